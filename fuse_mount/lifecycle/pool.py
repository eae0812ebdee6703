"""Pools: the processes that serve the snapshots of a home, from their callers' side. Mounting, and taking mounts over.

A pool is a supervisor and its worker processes (`supervisor`, `worker_process`), which serve any number of mounts. One
that was mounted in the same surroundings joins the pool that is there (`pool_id`). Whatever differs makes another pool,
so no mount ever gets another one's credentials or sees another one's network. Joining, hand-over and take-over:
../CONCURRENCY.md. Whatever may have to wait is done here, in the caller's process: the mount itself, finding a
descriptor, asking a former supervisor.

    <home>/run/pool-<id>.sock             where the supervisor hears who wants something mounted; the newest has it
    <home>/run/pool.lock                  held while one looks whether there is a supervisor, starts one, or ends
    <home>/run/worker-<id>-<pid>.sock     where a worker gives its descriptors away
    <home>/mounts/pool.log                what all of them say

Any thread may call; no state.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import datacache
from datacache.core import ipc, lockfile
from datacache.core.errors import MountError
from datacache.daemon.keeper import is_connected
from fuse_mount.kernel import session
from fuse_mount.lifecycle import keeping, process
from fuse_mount.lifecycle.process import READY_TIMEOUT_S, Talk
from fuse_mount.lifecycle.state import DEFAULT_OPENER, REVIVER, MountConfig, MountFiles, MountInfo, make_private
from fuse_mount.snapshot.passthrough import make_table

_HELLO_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 60.0
_SERVE_TIMEOUT_S = 30.0
_ORPHAN_TIMEOUT_S = 5.0
_AT_A_TIME = 4
_NOISE = frozenset(
    ("_", "PWD", "OLDPWD", "SHLVL", "TERM", "COLUMNS", "LINES", "LC_CTYPE", "PS1", "LS_COLORS", "DISPLAY", "WINDOWID",
     "TMUX", "TMUX_PANE", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY",
     "STY", "COLORTERM", "TERM_PROGRAM", "PYTEST_CURRENT_TEST")
)  # fmt: skip
_NOISY = ("XDG_SESSION_", "VTE_", "INVOCATION_", "JOURNAL_")
"""Variables that differ from shell to shell and that nothing here goes by."""
_PACKAGES = (Path(__file__).parents[1], Path(datacache.__file__).parent)
"""The packages that a pool's processes run."""
_NAMESPACES = ("mnt", "net", "pid", "user")

_log = logging.getLogger("fuse_mount")


def pool_id(config: MountConfig, environment: Mapping[str, str], generation: str = "") -> str:
    """Return the id of the pool that serves a mount. `generation` tells pools of one mount host from the next one's."""
    with contextlib.suppress(OSError):
        generation += "".join(os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES)
    words = [
        generation,
        sys.executable,
        _version(),
        str(os.geteuid()),
        config.home,
        DEFAULT_OPENER if config.opener == REVIVER else config.opener,
        f"{config.workers} {config.resend} {config.clone}",
    ]
    counted = ((n, value) for n, value in sorted(environment.items()) if n not in _NOISE and not n.startswith(_NOISY))
    words += [f"{name}={value}" for name, value in counted]
    return hashlib.blake2b("\0".join(words).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _version() -> str:
    """Name the code that would serve a mount, as it lies there: what is upgraded is served by new processes."""
    newest = [0] * len(_PACKAGES)
    for number, package in enumerate(_PACKAGES):
        for folder, _, names in os.walk(package):
            for name in names:
                if name.endswith(".py"):
                    with contextlib.suppress(FileNotFoundError):  # an editor's link to nothing, or replaced just now
                        newest[number] = max(newest[number], os.stat(f"{folder}/{name}").st_mtime_ns)
    return f"{_PACKAGES} {newest}"


def worker_socket(home: str | Path, pool: str, pid: int) -> Path:
    """Return where a worker of a pool can be asked for descriptors."""
    return Path(home) / "run" / f"worker-{pool}-{pid}.sock"


class Pool:
    """One pool of a home, whether it runs or not."""

    def __init__(self, home: str | Path, id: str) -> None:
        self.home = Path(home)
        self.id = id
        self.socket = self.home / "run" / f"pool-{id}.sock"
        self.log = self.home / "mounts" / "pool.log"

    def join(self, environment: Mapping[str, str], *, workers: int, unless: int = 0) -> Talk:
        """Return a conversation with the pool's supervisor, which is started if there is none, or where it is the
        process `unless`: the new one then has its place. Raises `MountError`."""
        talk = self._talk_to_other_than(unless)
        if talk is not None:
            return talk
        self._make_folders()
        with self.locked():
            talk = self._talk_to_other_than(unless)  # others may have been here first
            return self.start(environment, workers=workers)[0] if talk is None else talk

    def locked(self, *, wait: bool = True) -> AbstractContextManager[bool]:
        """Hold the lock under which supervisors come and go. Give False where `wait` is false and another has it."""
        return lockfile.held(self.home / "run" / "pool.lock", wait=wait)

    def _talk_to_other_than(self, unless: int) -> Talk | None:
        """Open a conversation with the supervisor that listens; None where there is none, or it is process `unless`."""
        try:
            talk = Talk(ipc.connect(self.socket, timeout_s=_HELLO_TIMEOUT_S), self.log)
        except OSError:
            return None
        try:
            if talk.ask({"op": "hello"}, timeout_s=_HELLO_TIMEOUT_S)["pid"] != unless:
                return talk
        except MountError:  # it ends just now, or stands still
            pass
        talk.close()
        return None

    def _make_folders(self) -> None:
        for name in ("run", "mounts"):
            make_private(self.home / name)

    def start(
        self, environment: Mapping[str, str], *, workers: int, alone: bool = False
    ) -> tuple[Talk, subprocess.Popen[bytes]]:
        """Start a supervisor. One that is `alone` is joined by nobody else, and is a child with this process's streams.
        Raises `MountError`."""
        self._make_folders()
        words = ["--supervise", "--pool", self.id, "--home", str(self.home), "--workers", str(workers)]
        words += ["--alone"] if alone else []
        child, talk = process.spawn(words, self.log, environment, attached=alone, option="--first")
        try:
            talk.ask({"op": "hello"}, timeout_s=_START_TIMEOUT_S)
        except MountError:
            talk.close()
            if alone:
                child.kill()
            child.wait()
            raise
        if not alone:
            child.wait()  # the parent of the daemon, which ends as soon as it has forked
        return talk, child


def mount(
    config: MountConfig, environment: Mapping[str, str], *, foreground: bool = False, generation: str = ""
) -> MountInfo:
    """Mount and return when it can be read; in the foreground, when it is gone. Raises `MountError` with nothing left
    over. `environment` is that of the processes that serve it."""
    session.check_mountpoint(config.mountpoint)
    session.check_device()
    if not foreground:
        pool = Pool(config.home, pool_id(config, environment, generation))
        return _mounted(pool.join(environment, workers=config.workers), config)
    alone = Pool(config.home, f"alone-{secrets.token_hex(6)}")
    talk, child = alone.start(environment, workers=config.workers, alone=True)
    try:
        info = _mounted(talk, config)
    except BaseException:
        child.terminate()
        child.wait()
        raise
    process.wait_for(child)
    return info


def _mounted(talk: Talk, config: MountConfig) -> MountInfo:
    with contextlib.closing(talk):
        facts = talk.ask({"op": "open", "config": config.to_dict()}, timeout_s=READY_TIMEOUT_S)
        config = config.fixed_to(f"{facts['dataset']}@{facts['id']}")
        source = f"datacache:{facts['dataset']}@{facts['id'][:12]}"
        fd = session.mount(config.mountpoint, source, allow_other=config.allow_other, passthrough=config.large_files)
        files = MountFiles(config.home, config.mountpoint)
        try:
            if config.large_files:
                config = replace(config, passed=_table_of_passed(fd, files))
            info = _served(talk, config, fd)
            noted = files.read()
            if noted is None or noted.device != info.device:  # nobody could find it, to unmount it
                raise MountError(
                    f"the mount cannot be noted down in {files.folder}; is its disk full?",
                    hint=f"df -h {files.folder}; {info.mountpoint} is not mounted. Make room, and mount it again.",
                )
            return info
        except BaseException:
            with contextlib.suppress(MountError):
                session.unmount_now(config.mountpoint, lazy=True)
            if config.passed:
                (files.folder / config.passed).unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


def _table_of_passed(fd: int, files: MountFiles) -> str:
    """Make the table of the files that are passed through in a new mount, and return its name; '' where the kernel does
    not allow any."""
    for left in files.folder.glob(f"{files.key}.passed-*"):  # of a mount at this place that was killed
        left.unlink(missing_ok=True)
    name = f"{files.key}.passed-{secrets.token_hex(8)}"
    refused = make_table(fd, files.folder / name)
    if refused:
        _log.info("%s: no file is passed through: %s", files.mountpoint, refused)
    return "" if refused else name


def _served(talk: Talk, config: MountConfig, fd: int, former: MountInfo | None = None) -> MountInfo:
    request: dict[str, Any] = {"op": "serve", "config": config.to_dict()}
    if former is not None:
        request |= {"former": former.to_dict()}
    return MountInfo.from_dict(talk.ask(request, timeout_s=_SERVE_TIMEOUT_S, fds=(fd,)))


def take_over(
    mountpoint: str,
    home: str | Path,
    environment: Mapping[str, str],
    *,
    only_if_dead: bool,
    generation: str = "",
    id: str = "",
) -> MountInfo | None:
    """Have a mount served by another process: from its supervisor, or from what is left of a pool that was killed.

    None where there is nothing to do (`only_if_dead` and its supervisor answers). `id` names the pool; without it the
    surroundings do. Raises `MountError`; whoever served it serves on."""
    files = MountFiles(home, mountpoint)
    with files.locked():
        old = _supervisor_of(files)
        if old is not None and only_if_dead:
            old.close()
            return None
        found = _asked_for(old) if old is not None else None
        known = found[1] if found is not None else files.read()
        if known is None:
            raise MountError(f"no mount of this home is known at {mountpoint}")
        fd = found[0] if found is not None else _adopted(known, files, home)
        try:
            pool = Pool(home, id or pool_id(known.config, environment, generation))
            with contextlib.closing(pool.join(environment, workers=known.config.workers, unless=known.pid)) as talk:
                talk.ask({"op": "open", "config": known.config.to_dict()}, timeout_s=READY_TIMEOUT_S)
                # Before the new supervisor has the control socket's place.
                old = _supervisor_of(files) if found is not None else None
                info = _served(talk, known.config, fd, known)
            try:
                if old is not None:
                    with old:
                        ipc.send(old, {"op": "finish"})
                        ipc.receive(old)
            except (OSError, ValueError):  # it was killed just now
                old = None
            if old is None:
                # What is left of its workers answers what it had read, and lets go of the mount.
                for pid in known.workers:
                    with contextlib.suppress(OSError, ValueError):  # it died just now
                        _ask_orphan(known, home, pid, "stop")
            if known.config.resend:
                session.resend(fd)  # what the old ones will not finish
            os.set_blocking(fd, True)
            return info
        finally:
            os.close(fd)


def take_over_all_of(dead: MountInfo, home: str | Path, environment: Mapping[str, str], *, id: str) -> None:
    """Take over whatever else a supervisor served that was killed. What cannot be is said in the log."""
    if process.is_served(dead):
        return

    def take(info: MountInfo) -> None:
        try:
            take_over(str(info.mountpoint), home, environment, only_if_dead=True, id=id)
        except (MountError, OSError) as exc:
            _log.error("%s is not taken over: %s", info.mountpoint, exc)

    others = [info for info in MountFiles.all_states(home) if (info.pid, info.born) == (dead.pid, dead.born)]
    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="take-over") as threads:
        list(threads.map(take, others))


def revive(config: MountConfig, id: str) -> None:
    """Have the mounts of a pool whose supervisor was killed taken over, by the mount host if there is one. Called by
    its workers: the first one wins."""
    arguments = ["--takeover", config.mountpoint, "--only-if-dead", "--pool", id]
    files = MountFiles(config.home, config.mountpoint)
    with contextlib.suppress(MountError, OSError):  # its log says why, and the workers serve on
        process.start(arguments, files, {"DATACACHE_HOME": config.home}, foreground=False)


def _supervisor_of(files: MountFiles) -> socket.socket | None:
    try:
        return files.connect()
    except OSError:
        return None


def _asked_for(old: socket.socket) -> tuple[int, MountInfo] | None:
    """Return descriptor and state from the supervisor that serves; None if it ends meanwhile, or stands still."""
    try:
        with old:
            ipc.send(old, {"op": "takeover"})
            answer, fds = ipc.receive(old, most_fds=1)
    except (OSError, ValueError):
        return None
    try:
        return fds[0], MountInfo.from_dict(answer["ok"])
    except (IndexError, KeyError, TypeError) as exc:
        ipc.close_all(fds)
        raise MountError(str(answer.get("error", "the supervisor did not hand its mount over"))) from exc


def _adopted(info: MountInfo, files: MountFiles, home: str | Path) -> int:
    """Get a copy of a mount's descriptor, from a worker or else from the keeper. Raises `MountError` where nobody has
    it: the mount is lost.

    A worker is asked for this very mount, by mount point and device: it knows what it serves, whatever an older state
    says of it."""
    for pid in info.workers:
        try:
            _, fds = _ask_orphan(info, home, pid, "descriptor")
        except (OSError, ValueError):
            continue
        for fd in fds:
            if is_connected(fd):
                return fd
            os.close(fd)  # it was unmounted
    _, fds = keeping.fetch(home, files.key)
    if fds:
        return fds[0]
    raise MountError(
        f"the mount at {files.mountpoint} is lost: none of its workers is left, and the cache daemon does not keep its "
        "descriptor",
        hint="Unmount it and mount it again (dsctl umount --lazy DIR; dsctl mount REF DIR).",
    )


def _ask_orphan(info: MountInfo, home: str | Path, pid: int, operation: str) -> tuple[ipc.Message, list[int]]:
    request = {"op": operation, "mountpoint": str(info.mountpoint), "device": info.device}
    return ipc.ask(worker_socket(home, info.pool, pid), request, timeout_s=_ORPHAN_TIMEOUT_S, most_fds=1)
