"""Mounting a snapshot and taking mounts over: the conversation with a pool's supervisor, from its caller's side.

Used by `launch`, by the mount host and by the processes that bring mounts back (`__main__`). Whatever may have to wait
is done here, in the caller's process: the mount itself, finding a descriptor, asking a former supervisor. The pool's
supervisor (`supervisor`) only gets a descriptor with the words for what to serve on it, and waits for nobody.

**Hand-over** (an upgrade): the new supervisor gets the descriptor (SCM_RIGHTS) from the one that serves, opens the
snapshot, serves, and only then is the old one told to finish: its workers answer all they had read.

**A pool that was killed**: its workers still hold the descriptor, or else the keeper does. Whoever comes first takes
the mount it came for over, and then all others of that pool.

Several processes may try to take over one mount: `MountFiles.locked` lets one at a time. Any thread may call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datacache.core import ipc
from datacache.core.errors import MountError
from datacache.daemon.keeper import is_connected
from fuse_mount.kernel import session
from fuse_mount.lifecycle import keeping, process
from fuse_mount.lifecycle.pool import Pool, Talk, pool_id, worker_socket
from fuse_mount.lifecycle.state import MountConfig, MountFiles, MountInfo, read_state

_READY_TIMEOUT_S = 90.0
_SERVE_TIMEOUT_S = 30.0
_ORPHAN_TIMEOUT_S = 5.0
_AT_A_TIME = 4

_log = logging.getLogger("fuse_mount")


def mount(
    config: MountConfig, environment: Mapping[str, str], *, foreground: bool = False, generation: str = ""
) -> MountInfo:
    """Mount and return when it can be read; in the foreground, when it is gone. Raises `MountError` with nothing left
    over. `environment` is that of the processes that serve it.
    """
    session.check_mountpoint(config.mountpoint)
    session.check_device()
    if foreground:
        alone = Pool(config.home, f"alone-{secrets.token_hex(6)}")
        talk, child = alone.start_alone(environment, workers=config.workers)
        try:
            info = _mounted(talk, config)
        except BaseException:
            talk.close()
            child.terminate()
            child.wait()
            raise
        while True:
            try:
                child.wait()
                return info
            except KeyboardInterrupt:
                continue  # the supervisor got it, too, and unmounts
    pool = Pool(config.home, pool_id(config, environment, generation))
    return _mounted(pool.join(environment, workers=config.workers), config)


def _mounted(talk: Talk, config: MountConfig) -> MountInfo:
    with contextlib.closing(talk):
        facts = talk.ask({"op": "open", "config": asdict(config)}, timeout_s=_READY_TIMEOUT_S)
        config = config.fixed_to(f"{facts['dataset']}@{facts['id']}")
        fd = session.mount(config, f"datacache:{facts['dataset']}@{facts['id'][:12]}")
        try:
            info = _served(talk, config, fd)
            _expect_noted(info)
            return info
        except BaseException:
            with contextlib.suppress(MountError):
                session.unmount_now(config.mountpoint, lazy=True)
            raise
        finally:
            os.close(fd)


def _expect_noted(info: MountInfo) -> None:
    """Raise `MountError` where a new mount's state could not be written: nobody could find it, to unmount it."""
    files = MountFiles(info.config.home, info.mountpoint)
    noted = files.read()
    if noted is None or noted.device != info.device:
        raise MountError(
            f"the mount cannot be noted down in {files.folder}; is its disk full?",
            hint=f"df -h {files.folder}; {info.mountpoint} is not mounted. Make room, and mount it again.",
        )


def _served(talk: Talk, config: MountConfig, fd: int, former: MountInfo | None = None) -> MountInfo:
    request: dict[str, Any] = {"op": "serve", "config": asdict(config)}
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
    surroundings do. Raises `MountError`; whoever served it serves on.
    """
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
                talk.ask({"op": "open", "config": asdict(known.config)}, timeout_s=_READY_TIMEOUT_S)
                # Before the new supervisor has the control socket's place.
                old = _supervisor_of(files) if found is not None else None
                info = _served(talk, known.config, fd, known)
            if old is None or not _told_to_finish(old):
                _stop_orphans(known, home)
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
    states = (read_state(path) for path in sorted((Path(home) / "mounts").glob("*.json")))
    others = [info for info in states if info is not None and (info.pid, info.born) == (dead.pid, dead.born)]

    def take(info: MountInfo) -> None:
        try:
            take_over(str(info.mountpoint), home, environment, only_if_dead=True, id=id)
        except (MountError, OSError) as exc:
            _log.error("%s is not taken over: %s", info.mountpoint, exc)

    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="take-over") as threads:
        list(threads.map(take, others))


def revive(config: MountConfig, id: str) -> None:
    """Have the mounts of a pool whose supervisor was killed taken over, by the mount host if there is one. Called by
    its workers: the first one wins.
    """
    arguments = ["--takeover", config.mountpoint, "--only-if-dead", "--pool", id]
    files = MountFiles(config.home, config.mountpoint)
    try:
        process.start(arguments, files, {"DATACACHE_HOME": config.home}, foreground=False)
    except (MountError, OSError):
        return  # its log says why, and the workers serve on


def _supervisor_of(files: MountFiles) -> socket.socket | None:
    try:
        return files.connect()
    except OSError:
        return None


def _asked_for(old: socket.socket) -> tuple[int, MountInfo] | None:
    """Descriptor and state from the supervisor that serves; None if it ends meanwhile, or stands still."""
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


def _told_to_finish(old: socket.socket) -> bool:
    try:
        with old:
            ipc.send(old, {"op": "finish"})
            ipc.receive(old)
    except (OSError, ValueError):  # it was killed just now
        return False
    return True


def _adopted(info: MountInfo, files: MountFiles, home: str | Path) -> int:
    """Get a copy of a mount's descriptor, from a worker or else from the keeper. Raises `MountError` where nobody has
    it: the mount is lost.

    A worker is asked for this very mount, by mount point and device: it knows what it serves, whatever an older state
    says of it.
    """
    for pid in info.workers:
        try:
            _, fds = _ask_orphan(info, home, pid, "descriptor")
        except (OSError, ValueError):
            continue
        for fd in fds:
            if is_connected(fd):
                return fd
            os.close(fd)  # it was unmounted
    fd_kept = keeping.fetch(home, files.key)
    if fd_kept is not None:
        return fd_kept
    raise MountError(
        f"the mount at {files.mountpoint} is lost: none of its workers is left, and the cache daemon does not keep its "
        "descriptor",
        hint="Unmount it and mount it again (dsctl umount --lazy DIR; dsctl mount REF DIR).",
    )


def _stop_orphans(info: MountInfo, home: str | Path) -> None:
    """Tell what is left of a former supervisor's workers to answer what they had read and to let go of a mount."""
    for pid in info.workers:
        with contextlib.suppress(OSError, ValueError):  # it died just now
            _ask_orphan(info, home, pid, "stop")


def _ask_orphan(info: MountInfo, home: str | Path, pid: int, operation: str) -> tuple[ipc.Message, list[int]]:
    request = {"op": operation, "mountpoint": str(info.mountpoint), "device": info.device}
    return ipc.ask(worker_socket(home, info.pool, pid), request, timeout_s=_ORPHAN_TIMEOUT_S, most_fds=1)
