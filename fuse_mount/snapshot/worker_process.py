"""A worker process: it serves a queue of each mount of its supervisor, each in a thread of its own (`worker`).

Forked by `supervisor`, with nothing but a socket to it. Messages on it are JSON, one a packet:

    {"op": "open", "mount": N, "config": …}     open the snapshot: {"mount": N, "opened": facts} or "error" and "hint"
    {"op": "serve", "mount": N, "device": D, "own": true, "passed": name}
                                                with the descriptor: serve it; no other worker reads it. `passed` names
                                                the table of what is passed through (`passthrough`), or is ''
    {"op": "stop", "mount": N}                  answer what was read, and let go of it: {"mount": N, "ended": "stopped"}
    {"mount": N, "ended": "unmounted"}          the mount is gone
    {"mount": N, "ended": "failed"}             its loop failed
    {"mount": N, "failure": …}                  a reader got an error (`state.Failure`)

It holds no state that its successor would need, so it may be killed at any moment. Without its supervisor it serves on,
and starts a process that has all mounts taken over (`pool.revive`), which asks for descriptors, and tells it to stop,
on its own socket (`pool.worker_socket`). Without supervisor and mounts it ends, whatever it is opening.

Threads: the main one hears the supervisor and signals; each mount has one, with a pool for what it fetches; one for all
lets go of cached pages while memory is short; one for each caller on the worker's own socket, of which there are few.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from datacache.core import ipc
from datacache.core.errors import MountError
from datacache.core.logs import set_level
from fuse_mount.errno_map import FailureLog
from fuse_mount.kernel import protocol
from fuse_mount.lifecycle import process
from fuse_mount.lifecycle.pool import Pool, revive, worker_socket
from fuse_mount.lifecycle.state import Failure, MountConfig, MountFiles
from fuse_mount.snapshot.fs import SnapshotFs
from fuse_mount.snapshot.passthrough import Passthrough
from fuse_mount.snapshot.worker import Worker, memory_is_short

EXIT_STOPPED = 3
"""The exit code of a worker that was told to stop and has answered all it had read."""
EXIT_FAILED = 1
MOST_MESSAGE_BYTES = 2**17
_RELEASE_EVERY_S = 1.0
_BEGIN_TIMEOUT_S = 4.0
"""Less than the caller waits for a descriptor (`pool._ORPHAN_TIMEOUT_S`)."""
_MOST_CALLERS = 64

_log = logging.getLogger("fuse_mount")


def run(channel: socket.socket, pool: Pool, *, bypass: bool) -> NoReturn:
    """Life of a worker process, from the fork to `_exit`. `channel` is the socket to the supervisor.

    With `bypass` snapshots are opened with `DATACACHE_BYPASS_LOCAL=1`: nothing that lies on this node is trusted,
    because workers that used it died one after another."""
    code = EXIT_FAILED
    own_socket = worker_socket(pool.home, pool.id, os.getpid())
    try:
        if bypass:
            os.environ["DATACACHE_BYPASS_LOCAL"] = "1"
        code = _Process(channel, own_socket, pool.id).run()
    except BaseException:  # noqa: BLE001 - logged
        _log.exception("a worker failed")
    finally:
        with contextlib.suppress(OSError):
            own_socket.unlink()
        logging.shutdown()
        os._exit(code)


class _Mount:
    """One mount in this process."""

    def __init__(self, number: int, config: MountConfig) -> None:
        self.number = number
        self.config = config
        self.device = 0
        self.passed = ""
        self.orders: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()
        """Gets the descriptor to serve, and whether it is a queue of this process alone; or None."""
        self.is_given = False
        """True once it has got the descriptor: requests may be lost without this process."""
        self.worker: Worker | None = None
        self.begun = threading.Event()
        """Set when there is a worker, or will never be one."""
        self.stopping = False


class _Process:
    def __init__(self, channel: socket.socket, own_socket: Path, pool: str) -> None:
        self._channel = channel
        self._pool = pool
        self._orphaned = False
        self._mounts: dict[int, _Mount] = {}
        self._lock = (
            threading.Condition()
        )  # guards _mounts and each mount's worker; told when one is given or forgotten
        self._signals = process.Signals(signal.SIGTERM, signal.SIGUSR1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._listener = ipc.listen(own_socket, backlog=_MOST_CALLERS)

    def run(self) -> int:
        """Serve until it is told to stop, or has neither supervisor nor mounts."""
        threading.Thread(target=self._release, name="release", daemon=True).start()
        ipc.MessageServer(self._listener, self._answer, most=_MOST_CALLERS, name="worker")
        channel = self._channel.fileno()
        while True:
            ready = process.wait_for_any({self._signals.fd} | (set() if self._orphaned else {channel}), set(), ())
            if self._signals.fd in ready and signal.SIGTERM in self._signals.received():
                self._orphaned = True
                for number in list(self._mounts):
                    self._stop(number)
                while self._serves():
                    process.wait_for_any({self._signals.fd}, set(), ())
                    self._signals.received()
                return EXIT_STOPPED
            if channel in ready and not self._hear():
                self._orphaned = True
                with self._lock:
                    configs = [mount.config for mount in self._mounts.values() if mount.is_given]
                if configs:
                    _log.warning("the supervisor is gone; a new one takes over")
                    threading.Thread(target=revive, args=(configs[0], self._pool), name="revive", daemon=True).start()
            if self._orphaned and not self._serves():
                return EXIT_STOPPED

    def _serves(self) -> bool:
        """Tell whether any mount counts on this process. One that is only being opened for a supervisor that is gone
        does not: its descriptor will never come."""
        with self._lock:
            return any(mount.is_given for mount in self._mounts.values())

    # --- the supervisor ---------------------------------------------------------------------------------------

    def _hear(self) -> bool:
        """Do what the supervisor says next; False where there is none any more."""
        try:
            text, fds = ipc.receive_fds(self._channel, MOST_MESSAGE_BYTES, 1)
        except ConnectionError:  # it has ended with something unread; what it said before is still to come
            return True
        if not text:
            return False
        message = json.loads(text)
        number = int(message["mount"])
        if message["op"] == "open":
            mount = _Mount(number, MountConfig.from_dict(message["config"]))
            with self._lock:
                self._mounts[number] = mount
            threading.Thread(target=self._serve, args=(mount,), name=f"mount-{number}", daemon=True).start()
        elif message["op"] == "serve":
            mount = self._mounts[number]
            mount.passed = str(message.get("passed", ""))
            with self._lock:
                mount.device, mount.is_given = int(message["device"]), True
                self._lock.notify_all()
            mount.orders.put((fds.pop(), bool(message["own"])))
        elif message["op"] == "stop":
            self._stop(number)
        for fd in fds:
            os.close(fd)
        return True

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it is gone
            self._channel.send(json.dumps(message).encode())

    # --- one mount ----------------------------------------------------------------------------------------------

    def _serve(self, mount: _Mount) -> None:
        """Open, serve and close a mount, in its thread."""
        config, ended = mount.config, "failed"
        try:
            snapshot = _opened(config)
        except Exception as exc:  # noqa: BLE001 - sent on
            about, text = {"about": config.mountpoint}, f"{config.mountpoint}: {config.ref} cannot be opened: {exc}"
            _log.error("%s", text, exc_info=not hasattr(exc, "hint"), extra=about)
            self._forget(mount)
            error = {"error": str(exc) or type(exc).__name__, "hint": getattr(exc, "hint", "")}
            self._say({"mount": mount.number} | error)
            return
        facts = {name: getattr(snapshot.record, name) for name in ("dataset", "id", "files", "total_bytes")}
        self._say({"mount": mount.number, "opened": facts})
        order = mount.orders.get()
        if order is None:  # the supervisor changed its mind
            snapshot.close()
            self._forget(mount)
            self._say({"mount": mount.number, "ended": "stopped"})
            return

        def note(failure: Failure) -> None:
            self._say({"mount": mount.number, "failure": failure.to_dict()})

        failures = FailureLog(prefix=f"{config.mountpoint}: ", note=note)
        owner = protocol.Ownership(config.uid, config.gid, config.umask)
        fd, own = order
        fs = SnapshotFs(snapshot)
        worker = Worker(fs, fd, owner, failures=failures, own_queue=own, passthrough=_passthrough(fs, fd, mount))
        with self._lock:
            mount.worker = worker
            stopping = mount.stopping
        mount.begun.set()
        if stopping:
            self._stop(mount.number)
        try:
            ended = "stopped" if worker.serve() else "unmounted"
        except Exception:  # noqa: BLE001 - one mount's, and the supervisor has it served again
            _log.exception("%s: the loop of a worker failed", config.mountpoint)
        self._say({"mount": mount.number, "ended": ended})
        self._forget(mount)
        worker.close()

    def _forget(self, mount: _Mount) -> None:
        with self._lock:
            if self._mounts.get(mount.number) is mount:
                del self._mounts[mount.number]
                self._lock.notify_all()
        mount.begun.set()
        with contextlib.suppress(BlockingIOError):
            os.write(self._signals.wake_fd, b"\0")  # the main thread looks whether any is left

    def _stop(self, number: int) -> None:
        """Have a mount answer what it has read and let go, in its own time."""
        with self._lock:
            mount = self._mounts.get(number)
            if mount is None:
                return
            mount.stopping, worker = True, mount.worker
        if worker is not None:
            threading.Thread(target=worker.stop, name="stop", daemon=True).start()
        else:
            mount.orders.put(None)  # read only if no descriptor has come before

    def _release(self) -> None:
        while True:
            time.sleep(_RELEASE_EVERY_S)
            with self._lock:
                workers = [mount.worker for mount in self._mounts.values() if mount.worker is not None]
            short = memory_is_short()
            for worker in workers:
                worker.release_given(short=short)

    # --- who takes mounts over --------------------------------------------------------------------------------

    def _answer(self, request: ipc.Message, send: ipc.Send) -> object:
        mountpoint, device = str(request["mountpoint"]), int(request["device"])
        here: list[_Mount] = []

        def is_known() -> bool:
            """False while the supervisor's word that a mount is to be served may lie unread in the channel."""
            at = [mount for mount in self._mounts.values() if mount.config.mountpoint == mountpoint]
            here[:] = [mount for mount in at if mount.is_given and mount.device == device]
            return bool(here) or all(mount.is_given for mount in at)

        with self._lock:
            self._lock.wait_for(is_known, _BEGIN_TIMEOUT_S)
        if not here:
            raise MountError("it is not served here")
        if request["op"] == "stop":
            self._stop(here[0].number)  # whether or not the caller still waits to hear of it
            return None
        here[0].begun.wait(_BEGIN_TIMEOUT_S)
        worker = here[0].worker
        if worker is None:
            raise MountError("it does not begin")
        with worker.with_descriptor() as fd:
            if fd is None:
                raise MountError("it ends just now")
            send({"ok": None}, [fd])
        return ipc.ANSWERED


def _passthrough(fs: SnapshotFs, fd: int, mount: _Mount) -> Passthrough | None:
    if not mount.passed:
        return None
    files = MountFiles(mount.config.home, mount.config.mountpoint)
    try:
        return Passthrough(fs, fd, files.folder / mount.passed)
    except OSError as exc:
        _log.warning("%s: no more files are passed through: %s", files.mountpoint, exc)
        return None


def _opened(config: MountConfig) -> Any:
    from datacache.settings import load_settings

    module, _, name = config.opener.partition(":")
    opener = getattr(importlib.import_module(module), name)
    settings = load_settings()
    set_level(settings.log_level)
    return opener(config.ref, settings=settings)
