"""The mount host: one process below which the mounts of a home run, whoever asked for them (../CONCURRENCY.md).

`python -m fuse_mount --host`, a container of its own on a node of Kubernetes. The CSI driver (anybody with the setting
`mount_host`) asks it to start supervisors, so the driver may end and start again and no mount notices. It takes over
every mount of the home that runs elsewhere, and starts servers of read-write mounts that have no processes. The newest
host has the socket; older ones leave everything alone from then on, unless that one is gone for good.

Threads: the main thread waits for signals and reaps (it is a subreaper: whatever loses its parent below it becomes its
child). One thread takes connections, each of which has a thread, up to a limit: more wait to be let in. One looks after
the home. It never forks by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from datacache.core import ipc
from datacache.core.boot import born, stat_of
from datacache.core.breaker import pause_s
from datacache.core.errors import DatacacheError, MountError
from datacache.daemon import paths
from datacache.settings import Settings
from fuse_mount.kernel import session
from fuse_mount.lifecycle import keeping, pool, process
from fuse_mount.lifecycle.state import (
    SILENCE_S,
    BucketFiles,
    BucketInfo,
    MountConfig,
    MountFiles,
    MountInfo,
    files_of,
)

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_LOOK_EVERY_S = 2.0
_MAX_PAUSE_S = 60.0
_AT_A_TIME = 4
"""Mounts taken over at a time: each starts processes that import and open a snapshot."""
_MOST_CALLERS = 32
"""Heard at a time, each for as long as what it asks for takes to start."""
_LEAVE_TIMEOUT_S = 25.0
_LEAVE_RETRY_S = 0.1
_GONE_S = _LOOK_EVERY_S
"""How long nobody listens at the socket until an older host does again. Should the newer one start again after all, it
takes everything over once more."""
_READY_ANYWAY_S = 120.0
"""How long a host is not ready because of mounts that others serve and that it cannot take over."""
_CALL_TIMEOUT_S = 10.0
_NEWER_TIMEOUT_S = 10.0
"""How long a newer host may take to take over, once this one is told to end."""

_log = logging.getLogger("fuse_mount")


class MountHost:
    """The process. `run()` returns when it was told to end and its mounts are left."""

    def __init__(self, settings: Settings, ready_file: Path | None = None) -> None:
        self._settings = settings
        self._ready_file = ready_file
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)  # of one that was killed
        self.path = settings.mount_host or paths.mount_host_path(settings.home)
        self._started = time.monotonic()
        self._generation = f"{os.getpid()} {born(os.getpid())}"
        """Its pools are its own: the next host's take over from them."""
        self._ending = threading.Event()
        self._failures: dict[str, tuple[int, float]] = {}
        """By mount point of what could not be taken over: how often, and when to try again."""
        self._server: ipc.MessageServer
        self._listen()  # the last step: an answer needs all that is above

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise MountError(f"no subreaper: {os.strerror(ctypes.get_errno())}")
        signals = process.Signals(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
        threading.Thread(target=self._look_after, name="look-after", daemon=True).start()
        _log.info("starting mounts of %s on request at %s", self._settings.home, self.path)
        while not self._ending.is_set():
            process.wait_for_any({signals.fd}, set(), ())
            if signals.received() & {signal.SIGTERM, signal.SIGINT}:
                self._ending.set()
            _reap()
        leaving = threading.Thread(target=self._leave, name="leave", daemon=True)
        leaving.start()
        while leaving.is_alive():
            process.readable(signals.fd, _LEAVE_RETRY_S)
            signals.received()
            _reap()
        _log.info("ended")
        return 0

    # --- requests -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Listen in the place of whoever did. Raises `MountError`."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            listener = ipc.listen(self.path, backlog=64)
            self._inode = os.stat(self.path).st_ino
        except OSError as exc:
            raise MountError(f"{self.path} cannot be listened at: {exc.strerror}") from exc
        self._server = ipc.MessageServer(listener, self._answer, most=_MOST_CALLERS, name="mount host")

    def _answer(self, request: ipc.Message, _send: ipc.Send) -> ipc.Message:
        if request.get("op") == "ping":
            return {"pid": os.getpid(), "home": str(self._settings.home)}
        if request.get("op") != "start":
            raise MountError(f"unknown operation {request.get('op')!r}")
        variables = {str(name): str(value) for name, value in request["variables"].items()}
        if variables.get("DATACACHE_HOME", str(self._settings.home)) != str(self._settings.home):
            raise MountError(f"the mount host serves {self._settings.home}, not {variables['DATACACHE_HOME']}")
        arguments = [str(word) for word in request["arguments"]]
        return self._start(arguments, str(request["mountpoint"]), variables)

    def _start(self, arguments: list[str], mountpoint: str, variables: dict[str, str]) -> ipc.Message:
        if self._ending.is_set():
            raise MountError("the mount host is ending", hint="Try again: another one starts.")
        variables = variables | {"DATACACHE_MOUNT_HOST": str(self.path)}
        if arguments[0] not in ("--config", "--takeover"):
            files = MountFiles(self._settings.home, mountpoint)
            started: ipc.Message = process.start([*arguments, "--hosted"], files, variables, foreground=False)
            return started
        environment = process.environment(variables)
        if arguments[0] == "--config":
            config = MountConfig.from_json(arguments[1])
            return pool.mount(config, environment, generation=self._generation).to_dict()
        taken = pool.take_over(
            arguments[1],
            self._settings.home,
            environment,
            only_if_dead="--only-if-dead" in arguments,
            generation=self._generation,
        )
        return taken.to_dict() if taken is not None else {}

    # --- what runs elsewhere ----------------------------------------------------------------------------------

    def _look_after(self) -> None:
        gone_since: float | None = None
        with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="take-over") as threads:
            while not self._ending.is_set():
                wait_s = _LOOK_EVERY_S
                try:
                    if self._is_newest():
                        gone_since = None
                        works = self._works()
                        # What is later at a place where nothing is to be taken over any more is another mount.
                        self._failures = {at: self._failures[at] for at, _ in works if at in self._failures}
                        done = list(threads.map(self._take, works))
                        # Somebody else may have brought one back meanwhile: the keeper, in its own container.
                        left = [at for at, _ in self._works() if at not in self._failures]
                        is_ready = all(done) and not left
                        is_ready |= time.monotonic() - self._started > _READY_ANYWAY_S
                        if is_ready and self._ready_file is not None and not self._ready_file.exists():
                            self._ready_file.write_text(f"{os.getpid()}\n", encoding="ascii")
                        wait_s = _LEAVE_RETRY_S if left and done else _LOOK_EVERY_S
                    elif self._somebody_listens():
                        gone_since = None
                    else:
                        gone_since = gone_since or time.monotonic()
                        if time.monotonic() - gone_since >= _GONE_S:
                            _log.warning("the newer host is gone: this one has the socket again")
                            old = self._server
                            self._listen()
                            old.close()
                            continue
                except Exception:  # noqa: BLE001 - one look's, and the next one comes
                    _log.exception("looking after the home's mounts failed")
                self._ending.wait(wait_s)

    def _somebody_listens(self) -> bool:
        try:
            connection = ipc.connect(self.path, timeout_s=_CALL_TIMEOUT_S)
        except TimeoutError:  # so many wait to be let in
            return True
        except OSError:
            return False
        with connection, contextlib.suppress(OSError, ValueError):
            ipc.send(connection, {"op": "ping"})  # to part in peace: whoever lets callers in is there
            ipc.receive(connection)
        return True

    def _is_newest(self) -> bool:
        try:
            return os.stat(self.path).st_ino == self._inode
        except OSError:
            return False

    def _works(self) -> list[tuple[str, list[str]]]:
        """Return mount points and arguments: of snapshots' mounts whose supervisors are not below this process, and of
        buckets' mounts without processes."""
        found, mounts = [], session.mounts_by_place()
        home = self._settings.home
        infos: list[MountInfo | BucketInfo] = [*MountFiles.all_states(home), *BucketFiles.all_states(home)]
        for info in infos:
            target = str(info.mountpoint)
            if target not in mounts or mounts[target].kind != session.MOUNT_TYPE:
                continue
            if isinstance(info, BucketInfo):
                if not info.problem and not any(process.serves(pid, target) for pid in (info.supervisor, info.pid)):
                    found.append((target, ["--bucket", info.config.to_json(), "--only-if-dead"]))
            elif not _is_below(info):
                # Others may be bringing back one whose supervisor is dead, below this process.
                dead = [] if process.is_served(info) else ["--only-if-dead"]
                found.append((target, ["--takeover", target, *dead]))
        return found

    def _take(self, what: tuple[str, list[str]]) -> bool:
        """Take a mount over. Return false where somebody else has to go on serving it for the time being."""
        mountpoint, arguments = what
        served = arguments[0] == "--takeover" and "--only-if-dead" not in arguments
        failed, not_before = self._failures.get(mountpoint, (0, 0.0))
        if self._ending.is_set() or time.monotonic() < not_before:
            return not served
        try:
            self._start(arguments, mountpoint, self._settings.environment())
        except MountError as exc:
            if not failed:
                _log.error("%s is not taken over: %s", mountpoint, exc.message)
            wait_s = pause_s(failed + 1, first_s=_LOOK_EVERY_S, longest_s=_MAX_PAUSE_S)
            self._failures[mountpoint] = failed + 1, time.monotonic() + wait_s
            return not served
        self._failures.pop(mountpoint, None)
        _log.info("%s is taken over", mountpoint)
        return True

    # --- the end ----------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)
        home, deadline = self._settings.home, time.monotonic() + _LEAVE_TIMEOUT_S
        if self._is_newest():
            self.path.unlink(missing_ok=True)
        else:  # it takes over all mounts of snapshots
            newer_until = time.monotonic() + _NEWER_TIMEOUT_S
            while any(map(_is_below, MountFiles.all_states(home))) and time.monotonic() < newer_until:
                time.sleep(_LEAVE_RETRY_S)
        self._server.close()
        mine = [info for info in MountFiles.all_states(home) if _is_below(info)]
        buckets = [info for info in BucketFiles.all_states(home) if _is_below(info)]
        if not mine and not buckets:
            return
        with ThreadPoolExecutor(len(mine) + len(buckets), thread_name_prefix="leave") as threads:
            for info in mine:
                threads.submit(_leave_snapshot, info, deadline)
            for bucket in buckets:
                threads.submit(_leave_bucket, bucket, deadline)


def _leave_snapshot(info: MountInfo, deadline: float) -> None:
    """End a supervisor without unmounting, once the keeper holds the descriptor."""
    problem = "there was no time left"
    with process.watched(info.pid) as has_ended:
        while not has_ended(0.0):
            if time.monotonic() >= deadline:
                _log.error("%s goes with this process: %s", info.mountpoint, problem)
                return
            try:
                files_of(info).ask({"op": "leave"})
                has_ended(deadline - time.monotonic())
                return
            except MountError as exc:
                problem = exc.message
            has_ended(_LEAVE_RETRY_S)


def _leave_bucket(info: BucketInfo, deadline: float) -> None:
    """End server and supervisor with the mount left in its place: the next ones go on with what the keeper holds. Where
    it holds nothing, upload for a while before; what was acknowledged is in the staging area, and what is in open files
    is brought there by the flush."""
    if not _is_kept(info):
        timeout_s = max(min(info.config.stop_flush_s, deadline - time.monotonic() - 2.0), 0.0)
        try:
            files_of(info).ask({"op": "flush", "timeout_s": timeout_s}, timeout_s=SILENCE_S)
        except DatacacheError as exc:
            _log.warning("%s is left with files that are not uploaded yet: %s", info.mountpoint, exc)
    for pid in (info.supervisor, info.pid):  # in this order: no other server is to be started here
        with process.watched(pid) as has_ended:
            if process.serves(pid, info.mountpoint):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                has_ended(deadline - time.monotonic())


def _is_kept(info: BucketInfo) -> bool:
    """Tell whether the keeper holds the descriptors of exactly this mount."""
    try:
        known = keeping.known(info.config.home).get(files_of(info).key)
    except TimeoutError:
        return False
    return known is not None and known["descriptor"] and known["note"].get("device") == info.device


def _is_below(info: MountInfo | BucketInfo) -> bool:
    """Tell whether a mount's supervisor is a child of this process."""
    pid = info.supervisor if isinstance(info, BucketInfo) else info.pid
    state, parent = (*stat_of(pid), "Z", "0")[:2]
    if state == "Z" or int(parent) != os.getpid():
        return False
    return process.serves(pid, info.mountpoint) if isinstance(info, BucketInfo) else process.is_served(info)


def _reap() -> None:
    """Let go of children that have ended. Whoever waits for one of them in a thread finds it gone."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
