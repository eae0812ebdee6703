"""One worker process: a loop over one queue of the kernel's requests, answered from one opened snapshot.

Started by `supervisor` right after a fork, with nothing but a socket to it: it opens the snapshot, says so,
gets a descriptor of the mount and serves until the mount is gone or it is told to stop. It holds no state
that its successor would need, so it may be killed at any moment (see `supervisor` for what happens to the
requests it was working on).

Threads: the main thread runs the loop and answers all that is on this node; bytes that must be fetched go to
a pool, so that waiting for a store never delays a hit, and are answered from there (a reply is one `writev`,
which the kernel takes whole). How many wait is bounded by the kernel: `max_background` read-aheads and one
read per reading thread. One more watches the
socket and the signals, and another lets go of cached pages while memory is short.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import logging
import os
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from fuse_mount import protocol
from fuse_mount.errno_map import FailureLog, errno_of
from fuse_mount.snapshot_fs import SnapshotFs
from fuse_mount.state import MountConfig

EXIT_UNMOUNTED = 0
"""The mount is gone: nothing is left to serve."""
EXIT_STOPPED = 3
"""It was told to stop and has answered all it had read."""
EXIT_FAILED = 1

FETCH_THREADS = 32
_KICK_S = 0.02
_GIVEN_KEPT = 8192
_RELEASE_EVERY_S = 1.0
_SHORT_OF_MEMORY = 0.2
_RETRIED = frozenset((errno.EINTR, errno.ENOENT))  # ENOENT: the request was withdrawn before it could be read
_RESEND_MASK = ~protocol.UNIQUE_RESEND

_log = logging.getLogger("fuse_mount")

Reply = tuple[int, bytes]


class Worker:
    """The loop. `serve()` may be called once; `stop()` from any thread."""

    def __init__(
        self, fs: SnapshotFs, fd: int, owner: protocol.Ownership, *, fetch_threads: int = FETCH_THREADS
    ) -> None:
        self._fs = fs
        self._fd = fd
        self._encoder = protocol.Encoder(owner)
        self._statfs = protocol.encode_statfs(fs.total_bytes, fs.files)
        self._buffer = bytearray(protocol.REQUEST_BUFFER_BYTES)
        self._failures = FailureLog()
        self._pool = ThreadPoolExecutor(fetch_threads, thread_name_prefix="fetch")
        self._fetching: dict[int, int] = {}
        self._fetching_lock = threading.Lock()  # guards _fetching
        self._fetched = threading.Condition(self._fetching_lock)
        self._given: deque[tuple[int, int, int]] = deque(maxlen=_GIVEN_KEPT)
        self._stopping: bool = False
        self._stopped = threading.Event()
        self._handlers: dict[int, Callable[[int, int], Reply]] = {
            protocol.LOOKUP: self._lookup,
            protocol.GETATTR: self._getattr,
            protocol.READDIR: self._readdir,
            protocol.READDIRPLUS: self._readdirplus,
            protocol.STATFS: self._statfs_reply,
            protocol.DESTROY: self._nothing,
        }
        self._handlers |= dict.fromkeys(protocol.MODIFYING, self._read_only)

    def serve(self) -> int:
        """Answer requests until the mount is gone or `stop()`; the process's exit code."""
        fd, buffer, read = self._fd, self._buffer, self._read
        buffers, unpack, handlers = [buffer], protocol.unpack_start, self._handlers
        readv = os.readv
        try:
            while not self._stopping:
                try:
                    readv(fd, buffers)
                except BlockingIOError:
                    # A descriptor that all workers share, made non-blocking by one that was told to stop, or
                    # this one.
                    select.select([fd], [], [], _KICK_S * 5)
                    continue
                except OSError as exc:
                    if exc.errno == errno.ENODEV:
                        return EXIT_UNMOUNTED
                    if exc.errno in _RETRIED:
                        continue
                    raise
                length, opcode, unique, ino = unpack(buffer)
                if opcode == protocol.READ:
                    read(unique, ino)
                    continue
                handler = handlers.get(opcode)
                if handler is not None:
                    try:
                        error, body = handler(ino, length)
                    except Exception as exc:  # noqa: BLE001 - one request's errno, never the mount's end
                        error, body = self._failed(ino, exc), b""
                elif opcode in protocol.UNANSWERED:
                    continue
                else:
                    error, body = errno.ENOSYS, b""  # OPEN, OPENDIR, GETXATTR, …: the kernel never asks again
                self._reply(unique, error, body)
            self._finish_fetches()
            return EXIT_STOPPED
        finally:
            self._stopped.set()

    def stop(self) -> None:
        """Make the loop end after the request it is at. Returns when it has left the loop or begun its last
        steps.
        """
        self._stopping = True
        main = threading.main_thread().ident
        assert main is not None
        # No request may be read and then dropped, so the loop is never interrupted, only kept from blocking.
        # The signal ends a read that blocks already; one that began to block after it is why it is sent until
        # the loop has ended.
        os.set_blocking(self._fd, False)
        while not self._stopped.wait(_KICK_S):
            # Again each time: who took the mount over may have made blocking what it got from this process.
            os.set_blocking(self._fd, False)
            signal.pthread_kill(main, signal.SIGUSR1)

    def release_given(self) -> None:
        """Every second until the loop ends: let go of cached bytes that the kernel keeps as pages of the
        mount now.

        And of regions that were evicted: while a worker maps them, the disk space is not free.

        The former only while memory is short. Otherwise a second copy costs nothing and dropping it does: 40
        to 280 µs a file, three times what the read took.
        """
        given = self._given
        while not self._stopped.wait(_RELEASE_EVERY_S):
            with contextlib.suppress(Exception):  # a hint, no more
                self._fs.sweep()
            short = memory_is_short()
            for _ in range(len(given)):
                ino, offset, length = given.popleft()
                if short and length:
                    with contextlib.suppress(Exception):  # a hint, no more
                        self._fs.release(ino, offset, length)

    # --- requests -------------------------------------------------------------------------------------------

    def _lookup(self, parent: int, length: int) -> Reply:
        node = self._fs.lookup(parent, protocol.name_argument(self._buffer, length))
        if node is None:
            return 0, protocol.NEGATIVE_ENTRY
        return 0, self._encoder.entry_out(*node)

    def _getattr(self, ino: int, _length: int) -> Reply:
        return 0, self._encoder.attr_out(*self._fs.getattr(ino))

    def _readdir(self, ino: int, _length: int) -> Reply:
        cookie, size = protocol.read_arguments(self._buffer)
        records: list[bytes] = []
        room = size
        append, packer, directory, regular = (
            records.append,
            protocol.dirent_packer,
            protocol.DT_DIR,
            protocol.DT_REG,
        )
        if cookie < 2:
            room = self._dots(records, ino, cookie, room, b"")
        for name, child, following, is_dir in self._fs.children(ino, cookie):
            name_bytes = len(name)
            record = packer(name_bytes)(child, following, name_bytes, directory if is_dir else regular, name)
            room -= len(record)
            if room < 0:
                break
            append(record)
        return 0, b"".join(records)

    def _readdirplus(self, ino: int, _length: int) -> Reply:
        cookie, size = protocol.read_arguments(self._buffer)
        records: list[bytes] = []
        room = size
        if cookie < 2:
            room = self._dots(records, ino, cookie, room, protocol.UNLOOKED_ENTRY)
        getattr_of, entry_out = self._fs.getattr, self._encoder.entry_out
        for name, child, following, is_dir in self._fs.children(ino, cookie):
            room -= protocol.ENTRY_OUT_BYTES + protocol.dirent_bytes(len(name))
            if room < 0:
                break
            kind = protocol.DT_DIR if is_dir else protocol.DT_REG
            records.append(entry_out(*getattr_of(child)))
            records.append(protocol.dirent_packer(len(name))(child, following, len(name), kind, name))
        return 0, b"".join(records)

    def _dots(self, records: list[bytes], ino: int, cookie: int, room: int, entry: bytes) -> int:
        parent = protocol.ROOT_INODE if ino == protocol.ROOT_INODE else protocol.UNKNOWN_INODE
        for following, name, number in ((1, b".", ino), (2, b"..", parent)):
            if cookie < following:
                record = entry + protocol.dirent_packer(len(name))(number, following, len(name), protocol.DT_DIR, name)
                records.append(record)
                room -= len(record)
        return room

    def _statfs_reply(self, _ino: int, _length: int) -> Reply:
        return 0, self._statfs

    def _read_only(self, _ino: int, _length: int) -> Reply:
        return errno.EROFS, b""

    def _nothing(self, _ino: int, _length: int) -> Reply:
        return 0, b""

    # --- reads ----------------------------------------------------------------------------------------------

    def _read(self, unique: int, ino: int) -> None:
        offset, size = protocol.read_arguments(self._buffer)
        try:
            data = self._fs.read_now(ino, offset, size)
        except Exception as exc:  # noqa: BLE001 - as above
            self._reply(unique, self._failed(ino, exc), b"")
            return
        if data is None:
            self._fetch(unique, ino, offset, size)
            return
        length = len(data)
        try:
            os.writev(self._fd, (protocol.pack_out_header(16 + length, 0, unique), data))
        except OSError as exc:
            if exc.errno == errno.EFAULT:  # the mapped bytes went away under us: ask the long way
                self._fetch(unique, ino, offset, size)
            elif exc.errno not in (errno.ENOENT, errno.ENODEV):
                raise
            return
        self._given.append((ino, offset, length))

    def _fetch(self, unique: int, ino: int, offset: int, size: int) -> None:
        base = unique & _RESEND_MASK
        with self._fetching_lock:
            known = base in self._fetching
            # Sent again while it is being fetched here: one fetch, and the answer carries the id that came
            # last.
            self._fetching[base] = unique
        if not known:
            self._pool.submit(self._fetch_and_reply, base, ino, offset, size)

    def _fetch_and_reply(self, base: int, ino: int, offset: int, size: int) -> None:
        error = 0
        data: bytes | memoryview = b""
        try:
            data = self._fs.read_wait(ino, offset, size)
        except Exception as exc:  # noqa: BLE001 - as above
            error = self._failed(ino, exc)
        with self._fetching_lock:
            unique = self._fetching.pop(base)
        try:
            self._reply(unique, error, data)
        except Exception:  # noqa: BLE001 - logged
            _log.exception("a reply failed")
        with self._fetched:
            self._fetched.notify_all()

    def _finish_fetches(self) -> None:
        with self._fetched:
            self._fetched.wait_for(lambda: not self._fetching)
        self._pool.shutdown(wait=True)

    def _reply(self, unique: int, error: int, body: bytes | memoryview) -> None:
        try:
            if error:
                os.write(self._fd, protocol.pack_out_header(16, -error, unique))
            else:
                os.writev(self._fd, (protocol.pack_out_header(16 + len(body), 0, unique), body))
        except OSError as exc:
            # ENOENT: interrupted, or sent again to somebody else meanwhile. ENODEV: unmounted; the loop will
            # see it.
            if exc.errno not in (errno.ENOENT, errno.ENODEV):
                raise

    def _failed(self, ino: int, exc: Exception) -> int:
        self._failures.report(self._fs.path_of(ino), exc)
        return errno_of(exc)


def memory_is_short() -> bool:
    """Whether less than a fifth of the memory could be had without swapping (proc(5), meminfo)."""
    with open("/proc/meminfo", encoding="ascii") as file:
        values = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
    return values.get("MemAvailable", 0) < _SHORT_OF_MEMORY * values["MemTotal"]


def run(channel: socket.socket, config: MountConfig, *, bypass: bool) -> NoReturn:
    """Life of a worker process, from the fork to `_exit`. `channel` is the socket to the supervisor.

    It sends one JSON line, `{"ok": {dataset, id, files, total_bytes}}` or `{"error": …, "hint": …}`, and
    receives the descriptor to serve. With `bypass` the snapshot is opened with `DATACACHE_BYPASS_LOCAL=1`:
    nothing that lies on this node is trusted, because workers that used it died one after another.
    """
    code = EXIT_FAILED
    try:
        code = _run(channel, config, bypass=bypass)
    except BaseException:  # noqa: BLE001 - logged
        _log.exception("a worker failed")
    finally:
        logging.shutdown()
        os._exit(code)


def _run(channel: socket.socket, config: MountConfig, *, bypass: bool) -> int:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _note_signal)
    signal.signal(signal.SIGUSR1, _note_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if bypass:
        os.environ["DATACACHE_BYPASS_LOCAL"] = "1"
    try:
        snapshot = _open(config)
    except Exception as exc:  # noqa: BLE001 - sent on
        _log.error("the snapshot %s cannot be opened: %s", config.ref, exc, exc_info=not hasattr(exc, "hint"))
        text = str(exc) or type(exc).__name__
        _send(channel, {"error": text, "hint": getattr(exc, "hint", "")})
        return EXIT_FAILED
    record = snapshot.record
    facts = {
        "dataset": record.dataset,
        "id": record.id,
        "files": record.files,
        "total_bytes": record.total_bytes,
    }
    _send(channel, {"ok": facts})
    _, fds, _, _ = socket.recv_fds(channel, 1, 1)
    if not fds:  # the supervisor went away or changed its mind
        return EXIT_STOPPED
    worker = Worker(SnapshotFs(snapshot), fds[0], protocol.Ownership(config.uid, config.gid, config.umask))
    watcher = threading.Thread(target=_watch, args=(worker, channel, wake_read, config), name="watch", daemon=True)
    watcher.start()
    threading.Thread(target=worker.release_given, name="release", daemon=True).start()
    return worker.serve()


def _open(config: MountConfig) -> Any:
    from datacache.settings import load_settings

    module, _, name = config.opener.partition(":")
    opener = getattr(importlib.import_module(module), name)
    return opener(config.ref, settings=load_settings())


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _watch(worker: Worker, channel: socket.socket, wake_read: int, config: MountConfig) -> None:
    """Wait for the word to stop, for SIGTERM, or for the supervisor's death."""
    while True:
        ready, _, _ = select.select([channel.fileno(), wake_read], [], [])
        if wake_read in ready and signal.SIGTERM in _read_signals(wake_read):
            break
        if channel.fileno() in ready:
            if channel.recv(1):  # told to stop
                break
            _log.warning("the supervisor is gone; a new one takes over")
            from fuse_mount.launch import revive

            revive(config)
            while signal.SIGTERM not in _read_signals(wake_read):
                pass
            break
    worker.stop()


def _read_signals(wake_read: int) -> bytes:
    """The numbers of signals that came; waits for one."""
    select.select([wake_read], [], [])
    return os.read(wake_read, 64)


def _note_signal(_number: int, _frame: object) -> None:
    """Signals act through the wake-up descriptor; a handler only has to be there."""
