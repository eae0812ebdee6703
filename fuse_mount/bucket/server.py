"""The server of a read-write mount: the process that opens the live bucket, mounts it and answers the kernel.

Run by `__main__`, started by its supervisor. The main thread opens, mounts and serves (`kernel_skin`, or
`pyfuse3_skin` where that is asked for);
beside it one thread says when the mount can be used, one waits for signals, one replaces a supervisor that dies, and
the control socket has its own. After an unmount, or SIGTERM or SIGINT (it flushes, unmounts, and soon does not wait for
who still has files open), it goes on uploading for a while (`stop_flush_s`), until a second signal; what is left after
that stays in the staging area. Where the connection to the kernel ends and the mount is still there (aborted through
sysfs, an error of ours) the exit code is not 0, and the supervisor starts the next server.

Where the kernel can send requests again (Linux 6.9), the first server hands the connection and the memory that it keeps
its state in to the supervisor before it serves; the next ones get both and go on, without mounting (`held`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from datacache.core import ipc
from datacache.core.breaker import pause_s
from datacache.core.errors import DatacacheError, MountError, StagingError
from datacache.core.logs import set_level
from datacache.settings import load_settings
from datacache.writeback.state_log import MemfdStateLog
from fuse_mount.bucket.areas import left_of, note_left
from fuse_mount.bucket.held import REFUSED, HeldMount, hand_over, lock
from fuse_mount.bucket.metrics import render_metrics
from fuse_mount.errno_map import FailureLog
from fuse_mount.kernel import session
from fuse_mount.kernel.notifier import Notifier
from fuse_mount.lifecycle import process
from fuse_mount.lifecycle.state import BucketConfig, BucketFiles, BucketInfo, Failure, with_failure

if TYPE_CHECKING:
    from datacache.writeback.live import LiveBucket
    from fuse_mount.bucket.fs.bucket_fs import BucketFs

_MOST_CALLERS = 256
_PROGRESS_EVERY_S = 0.2
_SERVED_TIMEOUT_S = 2.0
"""How long a lazy unmount waits for who has files open before the server ends anyway."""
_ANSWER_TIMEOUT_S = 5.0
_ALONE_S = 1.0
"""From the supervisor's end until this server starts another one: the keeper may be quicker, and a mount host that ends
kills the supervisor just before the server."""
_LONGEST_PAUSE_S = 30.0
_LOOK_EVERY_S = 3600.0
_CHECK_OPEN_S = 1.0
_REMEMBER_S = 10.0
_SYNCING_THREADS = 8

_log = logging.getLogger("fuse_mount")


class _Interrupted(Exception):  # noqa: N818 - it is no error: nobody waits any more
    """Raised in a flush that nobody waits for any more."""


class Skin(Protocol):
    """`BucketFs` behind one way of talking to the kernel."""

    def begin(self, fd: int) -> bool:
        """Answer the first request of a new mount. Return whether the next server can go on with its connection."""
        ...

    def serve(self, fs: BucketFs, fd: int, failures: FailureLog) -> None:
        """Answer the kernel on the descriptor of a mount until it is unmounted. In the main thread."""
        ...

    def stop(self) -> None:
        """End `serve`."""
        ...

    def forget_pages(self, ino: int) -> None:
        """Have the kernel write what it has gathered of a file, and forget it."""
        ...

    def forget_name(self, parent: int, name: str) -> None:
        """Have the kernel forget a name of a folder, soon."""
        ...


def _skin_of(fuse: str, notifier: Notifier) -> Skin:
    if fuse == "pyfuse3":
        session.check_pyfuse3()
        from fuse_mount.bucket.pyfuse3_skin import Pyfuse3Skin

        return Pyfuse3Skin()
    from fuse_mount.bucket.kernel_skin import KernelSkin

    return KernelSkin(notifier)


class BucketServer:
    """One mount, from its start to its end."""

    def __init__(self, config: BucketConfig, restarts: int, held: HeldMount | None, notifier: Notifier) -> None:
        """`held` is what a former server has left."""
        self._config, self._notifier = config, notifier
        self._held = held
        """The descriptors that the next one goes on with, if it can. Not changed once the control socket is there."""
        self._restarts = restarts
        self._files = BucketFiles(config.home, config.mountpoint)
        self._lock = -1
        """Of the memory; the process's end gives it back."""
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._live: LiveBucket
        self._fs: BucketFs
        self._skin: Skin
        self._chores: Chores
        self._info: BucketInfo
        self._final_flush_s = config.stop_flush_s
        """How long to go on uploading after the unmount. Set by who unmounts, read after it."""
        self._hurry = threading.Event()
        """Set once flushing is given up."""
        self._served = threading.Event()
        """Set once nothing is asked of the mount any more."""
        self._finished = threading.Event()
        """Set once it is known what is left."""
        self._left: dict[str, Any] = {}
        self._failures: tuple[Failure, ...] = ()
        """The last errors that somebody who reads or writes got. Changed by the serving thread alone."""

    def run(self, report: process.Report, line: int | None) -> int:
        """Serve to the end; return the exit code. `line` is the socket of the supervisor that hears `report`. Raises
        `DatacacheError` where it does not come to serving."""
        process.raise_open_files()  # each file that is open here has a file in the staging area
        from fuse_mount.bucket.fs.bucket_fs import BucketFs
        from fuse_mount.bucket.opening import open_live

        settings = load_settings()
        set_level(settings.log_level)
        fuse, goes_on = settings.fuse, self._held is not None
        self._skin = _skin_of(fuse, self._notifier)
        try:
            kept = self._kept_log(fuse)
        except ValueError as exc:
            _log.error("%s: files that are open cannot go on: %s", self._config.mountpoint, exc)
            return REFUSED
        config, target, supervisor = self._config, self._config.mountpoint, os.getppid()
        self._live, notes = open_live(config, restarted=self._restarts > 0, kept=kept)
        try:
            owner = {"uid": config.uid, "gid": config.gid, "umask": config.umask}
            self._fs = BucketFs(self._live, **owner, on_stale=self._skin.forget_name)
            if kept is not None:
                self._live.uploader.start()
            fd, more = self._connect(kept, line)
        except BaseException:
            self._live.close(discard=True)
            raise
        notes += more
        mount = session.mount_at(target)
        device = mount.device if mount is not None else 0
        self._info = BucketInfo(
            mountpoint=Path(target),
            url=config.url,
            ack=config.ack,
            pid=os.getpid(),
            supervisor=supervisor,
            device=device if self._held is None else self._held.device,
            staging=str(self._live.status()["staging"]["folder"]),
            log=self._files.log,
            started_at=time.time(),
            restarts=self._restarts,
            notes=tuple(notes),
            config=replace(config, quota_bytes=self._live.engine.usage.quota_bytes),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self._signals.put(number))
        self._files.make_folder()
        self._chores = Chores(self._fs, self._skin.forget_pages)
        control = ipc.MessageServer(self._files.listen(), self._answer, most=_MOST_CALLERS, name="control")
        threading.Thread(target=self._say_ready, args=(report,), name="ready", daemon=True).start()
        threading.Thread(target=self._obey_signals, name="signals", daemon=True).start()
        threading.Thread(target=self._stay_supervised, name="supervisor", daemon=True).start()

        def note_failure(failure: Failure) -> None:
            self._failures = with_failure(self._failures, failure)

        self._chores.start()
        if goes_on:
            threading.Thread(target=self._fs.finish_closing, name="closing", daemon=True).start()
            session.resend(fd)  # what the former server had read and not answered
        try:
            self._skin.serve(self._fs, fd, FailureLog(note=note_failure))
        finally:
            self._served.set()
            self._chores.stop()
            self._finish()
            control.close(timeout_s=_ANSWER_TIMEOUT_S)
        if self._is_ours():
            _log.error("the connection to the kernel has ended, but %s is still mounted", target)
            return 1
        self._files.remove_of(os.getpid())
        _log.info("%s is unmounted; left: %s", target, self._left)
        return 0

    def _kept_log(self, fuse: str) -> MemfdStateLog | None:
        """Return the memory for the state: the former server's, or new. `ValueError` where that cannot be used."""
        if fuse == "pyfuse3":
            if self._held is not None:
                raise ValueError("pyfuse3 goes on with no connection")
            return None
        if self._held is None:
            kept = MemfdStateLog.make()
            self._lock = lock(kept.fileno())
            return kept
        self._lock = lock(self._held.memory)
        return MemfdStateLog(os.dup(self._held.memory))

    def _connect(self, kept: MemfdStateLog | None, line: int | None) -> tuple[int, list[str]]:
        """Return the descriptor to serve, of the former server's mount or of a new one, and notes on that. Raises
        `MountError`."""
        target = self._config.mountpoint
        if self._held is not None:
            os.set_blocking(self._held.connection, True)
            return os.dup(self._held.connection), []
        placed = session.place(target, self._config.url, allow_other=self._config.allow_other)
        if self._skin.begin(placed.fd) and kept is not None and (mount := session.mount_at(target)) is not None:
            self._held = HeldMount(os.dup(placed.fd), kept.fileno(), mount.device)
            try:
                if line is not None:
                    hand_over(self._held, line)
            except (OSError, ValueError) as exc:
                _log.warning("the supervisor does not take the mount's descriptors: %s", exc)  # the next one asks
        return placed.fd, _stray_notes(target, placed.strays)

    # --- threads --------------------------------------------------------------------------------------------

    def _say_ready(self, report: process.Report) -> None:
        """Ask the mount something; when it answers it can be used."""
        try:
            if self._held is None:  # else it answers by itself, and a server that is killed here would not end
                os.statvfs(self._config.mountpoint)
        except OSError as exc:
            if not self._served.is_set():
                report({"error": f"the mount does not answer: {exc.strerror}", "hint": f"See {self._files.log}"})
            return
        session.set_readahead(self._info.device)
        if not self._restarts:
            self._fs.remote.look_around()
        try:
            with self._files.locked():
                self._has_supervisor()  # another one, where this server's was killed before it came to this
                self._files.write(self._info)
        except OSError as exc:  # a full disk must not end a mount
            _log.warning("the state of the mount cannot be written: %s", exc)
        _log.info("%s serves %s, staged in %s", self._config.mountpoint, self._info.url, self._info.staging)
        report({"ok": self._info.to_dict()})

    def _stay_supervised(self) -> None:
        """Start another supervisor whenever there is none. Of several that are started one stays: they take turns at
        the mount's lock (`BucketSupervisor.go_on`), and the one that stays writes itself into the state."""
        failed = 0
        while True:
            with process.watched(self._info.supervisor) as has_ended:
                while process.serves(self._info.supervisor, self._config.mountpoint) and not has_ended(_LOOK_EVERY_S):
                    pass
            pause = pause_s(failed, first_s=_ALONE_S, longest_s=_LONGEST_PAUSE_S) if failed else _ALONE_S
            if self._served.wait(pause):
                return
            if self._has_supervisor():
                failed = 0
                continue
            _log.warning("the supervisor is gone; starting another one")
            try:
                process.start(["--bucket", self._config.to_json(), "--only-if-dead"], self._files, {}, foreground=False)
            except (MountError, OSError) as exc:
                failed += 1
                _log.error("no supervisor can be started: %s", exc)

    def _has_supervisor(self) -> bool:
        """Tell whether the state names one that lives: perhaps another one than before, which is then this server's."""
        known = self._files.read()
        if known is None or not process.serves(known.supervisor, self._config.mountpoint):
            return False
        self._info = replace(self._info, supervisor=known.supervisor)
        return True

    def _obey_signals(self) -> None:
        number = self._signals.get()
        _log.info("told to end by %s", signal.Signals(number).name)

        def hurry() -> None:
            self._signals.get()
            self._hurry.set()

        threading.Thread(target=hurry, name="signals-2", daemon=True).start()
        deadline = time.monotonic() + self._config.stop_flush_s
        self._drain(self._config.stop_flush_s)
        self._final_flush_s = max(deadline - time.monotonic(), 1.0)
        self._live.uploader.let_go()
        try:
            session.take_away(self._config.mountpoint, lazy=True)
        except MountError as exc:
            _log.error("%s", exc)
        if not self._served.wait(_SERVED_TIMEOUT_S):
            _log.warning("%s: some files are still open; the server ends all the same", self._config.mountpoint)
            self._skin.stop()

    def _drain(self, timeout_s: float) -> None:
        """Upload for a while. What is left is told by `_finish`."""

        def go_on(_status: dict[str, Any]) -> None:
            if self._hurry.is_set():
                raise _Interrupted

        if timeout_s <= 0 or self._hurry.is_set():
            return
        try:
            self._chores.sync_open()
            self._live.flush(timeout_s=timeout_s, progress=go_on)
        except _Interrupted:
            _log.info("flushing was ended")
        except DatacacheError as exc:
            _log.error("%s %s", exc, exc.hint)

    def _finish(self) -> None:
        """Close, and say what is left. Where the mount is gone, upload for a while before; where it is not, the next
        server is to come soon."""
        try:
            if not self._is_ours():
                self._drain(self._final_flush_s)
            self._fs.remember()
            self._left = left_of(self._live.status())
            note_left(Path(self._info.staging), self._left)
        finally:
            try:
                self._live.close()
            except StagingError as exc:
                if self._is_ours():
                    raise
                _log.error("%s %s", exc, exc.hint)  # what is not durable was not acknowledged, and nobody comes for it
            self._finished.set()

    def _is_ours(self) -> bool:
        there = session.mount_at(self._config.mountpoint)
        return there is not None and there.device == self._info.device

    # --- what the control socket is asked ---------------------------------------------------------------------

    def _answer(self, request: ipc.Message, send: ipc.Send) -> Any:
        match request.get("op"):
            case "status":
                errors = [failure.to_dict() for failure in self._failures]
                return self._info.to_dict() | {"live": self._live.status(), "errors": errors}
            case "metrics":
                return render_metrics([(self._info, self._live.status())], self._config.home)
            case "flush":
                return self._flush(request, send)
            case "held":
                if self._held is None:
                    raise MountError("nothing of this mount outlives its server")
                send({"held": self._held.note}, self._held.fds)
                return ipc.ANSWERED
            case "stop":
                return self._stop(request, send)
            case "quota":
                return self._set_quota(int(request["quota_bytes"]))
            case "forget-lost":  # somebody has seen it
                try:
                    return [loss._asdict() for loss in self._live.engine.losses.forget()]
                except OSError as exc:
                    why = f"the note stays on the disk: {exc.strerror}"
                    raise MountError(why, hint="See to the staging area.") from exc
            case operation:
                raise MountError(f"unknown operation {operation!r}")

    def _set_quota(self, quota_bytes: int) -> dict[str, Any]:
        """Set another quota, kept in the staging area for the next server, and in the state for whoever mounts anew."""
        try:
            self._live.quota.set(quota_bytes)
        except OSError as exc:
            raise MountError(f"the quota cannot be kept: {exc.strerror}", hint="See to the staging area.") from exc
        self._info = replace(self._info, config=replace(self._info.config, quota_bytes=quota_bytes))
        with contextlib.suppress(OSError), self._files.locked():
            self._has_supervisor()  # the state may name another one than this server knows of
            self._files.write(self._info)
        _log.info("%s: the quota is %d bytes now", self._config.mountpoint, quota_bytes)
        return self._live.status()

    def _flush(self, request: ipc.Message, send: ipc.Send) -> dict[str, Any]:
        """Flush, and send where things are until it is done. A caller that goes away ends it."""
        done, gone, failed = threading.Event(), threading.Event(), queue.SimpleQueue[BaseException]()
        latest = self._live.status()

        def go_on(status: dict[str, Any]) -> None:
            nonlocal latest
            latest = status
            if gone.is_set():
                raise _Interrupted

        def flush() -> None:
            try:
                self._chores.sync_open()
                try:
                    self._live.flush(timeout_s=request.get("timeout_s"), progress=go_on)
                finally:
                    self._fs.remember()  # who asks may be about to kill this server
            except BaseException as exc:  # noqa: BLE001 - raised again by who waits
                failed.put(exc)
            finally:
                done.set()

        threading.Thread(target=flush, name="flush", daemon=True).start()
        try:
            while not done.wait(_PROGRESS_EVERY_S):
                send({"progress": latest})
        finally:
            gone.set()
        if not failed.empty():
            raise failed.get()
        return left_of(self._live.status())

    def _stop(self, request: ipc.Message, send: ipc.Send) -> dict[str, Any]:
        """Unmount, and say what is left when all is over; a lazy unmount says it at once."""
        self._final_flush_s = float(request.get("flush_s", self._config.stop_flush_s))
        lazy = bool(request.get("lazy"))
        if self._is_ours():
            try:
                session.take_away(self._config.mountpoint, lazy=lazy)
            except MountError:
                self._final_flush_s = self._config.stop_flush_s
                raise
        elif not lazy:
            self._hurry.set()  # it was unmounted before, and only flushes yet
        if lazy and not self._served.wait(_PROGRESS_EVERY_S):
            return left_of(self._live.status())
        while not self._finished.wait(_PROGRESS_EVERY_S):
            send({"progress": self._live.status()})
        return self._left


def _stray_notes(mountpoint: str, strays: list[str]) -> list[str]:
    if not strays:
        return []
    named = ", ".join(strays[:3]) + (" …" if len(strays) > 3 else "")
    note = (
        f"while the mount was replaced somebody wrote {named} into the folder below {mountpoint}: it is not in the "
        "bucket, and hidden until the mount is gone"
    )
    _log.error("%s", note)
    return [note]


class Chores:
    """Make files that stay open durable, and so have them uploaded; note what is known of the bucket. In threads, whose
    errors end nothing."""

    def __init__(self, fs: BucketFs, forget_pages: Callable[[int], None]) -> None:
        """`forget_pages` has the kernel write what it has gathered of a file, and waits for that."""
        self._fs, self._forget_pages = fs, forget_pages
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin."""
        for name, work in (("syncs", self._sync_long_open), ("known", self._remember)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def stop(self) -> None:
        """End soon."""
        self._ended.set()

    def sync_open(self) -> None:
        """Make durable what was written to all files that are open now."""
        for ino, settle in self._fs.handles.long_open(0.0):
            self._sync(ino, settle)

    def _sync_long_open(self) -> None:
        with ThreadPoolExecutor(_SYNCING_THREADS, thread_name_prefix="sync") as pool:
            while not self._ended.wait(_CHECK_OPEN_S):
                try:
                    for ino, settle in self._fs.handles.long_open():
                        pool.submit(self._sync, ino, settle)
                except Exception:  # noqa: BLE001 - see the class
                    _log.exception("open files could not be looked through")

    def _sync(self, ino: int, settle: Callable[[], None]) -> None:
        try:
            self._forget_pages(ino)
            settle()
        except (DatacacheError, OSError) as exc:
            _log.warning("an open file could not be made durable: %s", exc)
        except Exception:  # noqa: BLE001 - see the class
            _log.exception("an open file could not be made durable")

    def _remember(self) -> None:
        while not self._ended.wait(_REMEMBER_S):
            try:
                self._fs.remember()
            except Exception:  # noqa: BLE001 - see the class
                _log.exception("what is known of the bucket could not be noted")
