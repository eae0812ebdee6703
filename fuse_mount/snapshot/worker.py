"""One mount in one worker process: a loop over one queue of the kernel's requests, answered from an opened snapshot.

`worker_process` runs a loop for each mount that its process serves, each in a thread of its own, so that a mount whose
store or disk does not answer keeps no other one waiting. A loop holds no state that its successor would need, so its
process may be killed at any moment (see `supervisor` for what happens to the requests it was working on).

Threads: the one that calls `serve` runs the loop and answers all that is on this node. Waiting for a store never delays
a hit: of bytes that the daemon must fetch the loop asks it, and goes on until it answers, without a thread to wake up.
What the daemon cannot give like that goes to a pool of the mount's own, and is answered from there (a reply is one
`writev`, which the kernel takes whole). How many wait is bounded by the kernel: `max_background` read-aheads and one
read per reading thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from datacache.core.ids import BLOCK_BYTES
from fuse_mount.errno_map import FailureLog, errno_of
from fuse_mount.kernel import protocol
from fuse_mount.lifecycle.process import readable
from fuse_mount.snapshot.fs import Node, SnapshotFs, passed_number
from fuse_mount.snapshot.passthrough import EVICTED, PLAIN, Passthrough

if TYPE_CHECKING:
    from datacache.daemon.client import AskedBlock

_FETCH_THREADS = 32
_KICK_S = 0.02
_LOOK_EVERY_S = 0.25
"""How often to look whether the daemon, which is to answer, has become silent."""
_GIVEN_KEPT = 8192
_SHORT_OF_MEMORY = 0.2
_RETRIED = frozenset((errno.EINTR, errno.ENOENT))  # ENOENT: the request was withdrawn before it could be read
_READ_AGAIN = 3
"""So often bytes are read once more whose mapping went away before the kernel had taken them."""
_RESEND_MASK = ~protocol.UNIQUE_RESEND

_log = logging.getLogger("fuse_mount")

Reply = tuple[int, bytes]


class Worker:
    """The loop. `serve()` and then `close()` may be called once; `stop()` and `with_descriptor()` from any thread."""

    def __init__(
        self,
        fs: SnapshotFs,
        fd: int,
        owner: protocol.Ownership,
        *,
        failures: FailureLog | None = None,
        own_queue: bool = True,
        passthrough: Passthrough | None = None,
    ) -> None:
        """`fd` and `passthrough` are this object's from now on. Without `own_queue` other processes read requests from
        `fd`, too. Without `passthrough` the kernel opens files without asking."""
        self._fs = fs
        self._fd = fd
        self._fd_lock = threading.Lock()
        """Held by who uses the descriptor beside the loop: once it is closed, its number may be another mount's."""
        self._thread = 0
        self._closed = False
        self._encoder = protocol.Encoder(owner)
        statfs = protocol.encode_statfs(fs.total_bytes, fs.files)
        self._buffer = bytearray(protocol.REQUEST_BUFFER_BYTES)
        self._failures = failures or FailureLog()
        self._pool = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="fetch")
        self._fetching: dict[int, int] = {}
        self._fetching_lock = threading.Lock()  # guards _fetching
        self._fetched = threading.Condition(self._fetching_lock)
        self._own_queue = own_queue
        self._passthrough = passthrough
        self._openers = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="open")
        self._asked: dict[int, tuple[AskedBlock, int, int, int, int]] = {}
        """The blocks that the daemon was asked for by the loop, by descriptor, each with its request: unique, without
        `UNIQUE_RESEND`, inode, offset and size."""
        self._events: select.epoll | None = None
        """While the loop waits for kernel and daemon; without it the descriptor is blocking, which costs less."""
        self._look_at_s = 0.0
        self._given: deque[tuple[int, int, int]] = deque(maxlen=_GIVEN_KEPT)
        self._stopping: bool = False
        self._stopped = threading.Event()
        self._handlers: dict[int, Callable[[int, int], Reply]] = {
            protocol.LOOKUP: self._lookup,
            protocol.GETATTR: lambda ino, _length: (0, self._encoder.attr_out(*fs.getattr(ino))),
            protocol.READDIR: self._readdir,
            protocol.READDIRPLUS: self._readdirplus,
            protocol.READLINK: lambda ino, _length: (0, fs.readlink(ino)),
            protocol.STATFS: lambda _ino, _length: (0, statfs),
            protocol.DESTROY: lambda _ino, _length: (0, b""),
        }
        if passthrough is not None:
            self._handlers[protocol.RELEASE] = self._release
        self._handlers |= dict.fromkeys(protocol.MODIFYING, lambda _ino, _length: (errno.EROFS, b""))

    def serve(self) -> bool:
        """Answer requests until the mount is gone, or until `stop()` and the answer to all that was read. Tell whether
        it was stopped."""
        self._thread = threading.get_ident()
        fd, buffer, read = self._fd, self._buffer, self._read
        buffers, unpack, handlers = [buffer], protocol.unpack_start, self._handlers
        readv = os.readv
        try:
            while not self._stopping:
                if self._events is not None and not self._kernel_asks(self._events):
                    continue
                try:
                    readv(fd, buffers)
                except BlockingIOError:
                    # Another worker was quicker. Or this is a descriptor that all workers share, made non-blocking by
                    # one that was told to stop, or this one.
                    if self._events is None:
                        readable(fd, _KICK_S * 5)
                    continue
                except OSError as exc:
                    if exc.errno == errno.ENODEV:
                        return False
                    if exc.errno in _RETRIED:
                        continue
                    raise
                length, opcode, unique, ino = unpack(buffer)
                if opcode == protocol.READ:
                    read(unique, ino)
                    continue
                handler = handlers.get(opcode)
                if handler is None:
                    self._without_handler(opcode, unique, ino)
                    continue
                try:
                    error, body = handler(ino, length)
                except Exception as exc:  # noqa: BLE001 - one request's errno, never the mount's end
                    error, body = self._failed(ino, exc), b""
                self._reply(unique, error, body)
            self._finish_fetches()
            return True
        finally:
            self._stopped.set()

    def stop(self) -> None:
        """Make the loop end after the request it is at. Returns when it has left the loop or begun its last steps."""
        self._stopping = True
        # No request may be read and then dropped, so the loop is never interrupted, only kept from blocking.
        # The signal ends a read that blocks already; one that began to block after it is why it is sent until
        # the loop has ended.
        while not self._stopped.is_set():
            with self._fd_lock:
                if self._closed:
                    return
                # Again each time: who took the mount over may have made blocking what it got from this process.
                os.set_blocking(self._fd, False)
                if self._thread:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pthread_kill(self._thread, signal.SIGUSR1)
            self._stopped.wait(_KICK_S)

    def close(self) -> None:
        """Close snapshot and descriptor, once nothing is fetched any more: a late answer must not be written to
        whatever has the descriptor's number next."""
        self._finish_fetches()
        with self._fd_lock:
            self._closed = True
            os.close(self._fd)
            if self._passthrough is not None:
                self._passthrough.close()
        with contextlib.suppress(Exception):
            self._fs.close()

    @contextlib.contextmanager
    def with_descriptor(self) -> Iterator[int | None]:
        """Give the descriptor, which stays open meanwhile; None where it is closed."""
        with self._fd_lock:
            yield None if self._closed else self._fd

    def release_given(self, *, short: bool) -> None:
        """Now and then: let go of cached bytes that the kernel keeps as pages of the mount now.

        And of regions that were evicted: while a worker maps them, the disk space is not free.

        The former only while memory is short (`memory_is_short`). Otherwise a second copy costs nothing and dropping it
        does: 40 to 280 µs a file, three times what the read took."""
        given = self._given
        with contextlib.suppress(Exception):  # a hint, no more
            self._fs.sweep()
        with contextlib.suppress(Exception), self._fd_lock:
            if self._passthrough is not None and not self._closed:
                self._passthrough.sweep()
        for _ in range(len(given)):
            ino, offset, length = given.popleft()
            if short and length:
                with contextlib.suppress(Exception):  # a hint, no more
                    self._fs.release(ino, offset, length)

    # --- requests -------------------------------------------------------------------------------------------

    def _without_handler(self, opcode: int, unique: int, ino: int) -> None:
        if opcode == protocol.OPEN and self._passthrough is not None:
            self._open(self._passthrough, unique, ino)
        elif opcode not in protocol.UNANSWERED:  # OPEN, OPENDIR, GETXATTR, …: the kernel never asks again
            self._reply(unique, errno.ENOSYS, b"")

    def _lookup(self, parent: int, length: int) -> Reply:
        node = self._fs.lookup(parent, protocol.name_argument(self._buffer, length))
        if node is None:
            return 0, protocol.NEGATIVE_ENTRY
        if self._passthrough is not None and _is_large(node):
            return 0, self._encoder.entry_as(self._passthrough.inode(node), 0, node)
        return 0, self._encoder.entry_out(*node)

    def _readdir(self, ino: int, _length: int) -> Reply:
        cookie, size = protocol.read_arguments(self._buffer)
        records = [protocol.dot_records(ino, cookie, plus=False)]
        room = size - len(records[0])
        append, packer = records.append, protocol.dirent_packer
        for name, child, following, kind in self._fs.children(ino, cookie):
            name_bytes = len(name)
            record = packer(name_bytes)(child, following, name_bytes, kind >> 12, name)
            room -= len(record)
            if room < 0:
                break
            append(record)
        return 0, b"".join(records)

    def _readdirplus(self, ino: int, _length: int) -> Reply:
        cookie, size = protocol.read_arguments(self._buffer)
        records = [protocol.dot_records(ino, cookie, plus=True)]
        room = size - len(records[0])
        getattr_of, entry_out = self._fs.getattr, self._encoder.entry_out
        for name, child, following, kind in self._fs.children(ino, cookie):
            room -= protocol.ENTRY_OUT_BYTES + protocol.dirent_bytes(len(name))
            if room < 0:
                break
            node = getattr_of(child)
            is_looked_up = self._passthrough is None or not _is_large(node)
            records.append(entry_out(*node) if is_looked_up else protocol.UNLOOKED_ENTRY)
            records.append(protocol.dirent_packer(len(name))(child, following, len(name), kind >> 12, name))
        return 0, b"".join(records)

    # --- opening, where files are passed through ------------------------------------------------------------

    def _open(self, passthrough: Passthrough, unique: int, ino: int) -> None:
        if passed_number(ino) is None:
            self._reply(unique, 0, protocol.open_out(0, protocol.KEEP_CACHE | protocol.NO_FLUSH))
            return
        base = unique & _RESEND_MASK
        if self._begin(base, unique):
            self._openers.submit(self._open_and_reply, passthrough, base, ino)

    def _open_and_reply(self, passthrough: Passthrough, base: int, ino: int) -> None:
        try:
            with passthrough.opening(ino) as id:
                error, body = 0, protocol.open_out(0, protocol.KEEP_CACHE | protocol.NO_FLUSH)
                if id == EVICTED:
                    error, body = errno.ESTALE, b""  # the kernel looks the name up and tries again
                elif id != PLAIN:
                    body = protocol.open_out(0, protocol.PASS_THROUGH | protocol.NO_FLUSH, id)
                self._end(base, error, body)
        except Exception as exc:  # noqa: BLE001 - as above
            self._end(base, self._failed(ino, exc), b"")

    def _release(self, ino: int, _length: int) -> Reply:
        if self._passthrough is not None:
            self._passthrough.closed(ino)
        return 0, b""

    def _begin(self, base: int, unique: int) -> bool:
        """Note a request that is answered later. False if it was read before: then the one answer carries the id that
        came last."""
        with self._fetching_lock:
            known = base in self._fetching
            self._fetching[base] = unique
        return not known

    def _end(self, base: int, error: int, body: bytes) -> None:
        """Answer a request that was begun, unless it is answered already."""
        with self._fetching_lock:
            unique = self._fetching.pop(base, None)
        if unique is not None:
            self._reply(unique, error, body)
        with self._fetched:
            self._fetched.notify_all()

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
        if self._events is not None and not self._asked:
            self._wait_for_kernel_only(self._events)
        self._given.append((ino, offset, length))

    def _fetch(self, unique: int, ino: int, offset: int, size: int) -> None:
        base = unique & _RESEND_MASK
        if self._begin(base, unique) and not (self._own_queue and self._ask(base, ino, offset, size)):
            self._pool.submit(self._fetch_and_reply, base, ino, offset, size)

    def _ask(self, base: int, ino: int, offset: int, size: int) -> bool:
        """Ask the daemon for bytes. False where only a thread that waits gets them."""
        asked = None
        try:
            asked = self._fs.ask(ino, offset, size)
            if asked is None:
                return False
            if self._events is None:
                events = select.epoll()
                # Exclusive: a request wakes up one worker, not all that wait like this.
                events.register(self._fd, select.EPOLLIN | select.EPOLLEXCLUSIVE)
                os.set_blocking(self._fd, False)
                self._events = events
            self._events.register(asked, select.EPOLLIN)
        except Exception:  # noqa: BLE001 - the other way says what is wrong
            if asked is not None:
                asked.give_up()
            return False
        self._asked[asked.fileno()] = asked, base, ino, offset, size
        return True

    def _kernel_asks(self, events: select.epoll) -> bool:
        """Wait for kernel and daemon, and pass on what the daemon answers. Tell whether the kernel asks something."""
        ready = events.poll(_LOOK_EVERY_S)
        if not ready and not self._asked:
            self._wait_for_kernel_only(events)
            return True
        asks = False
        for fd, _ in ready:
            if fd == self._fd:
                asks = True
            else:
                self._pass_on(fd, events)
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_EVERY_S
            for fd in [fd for fd, (asked, *_) in self._asked.items() if asked.overdue()]:
                self._give_up(fd)
        return asks

    def _pass_on(self, fd: int, events: select.epoll) -> None:
        """Answer the kernel with what comes from the daemon."""
        events.unregister(fd)
        asked, base, ino, offset, size = self._asked.pop(fd)
        data = asked.take()
        if data is None:
            self._pool.submit(self._fetch_and_reply, base, ino, offset, size, asked)
            return
        with self._fetching_lock:
            unique = self._fetching.pop(base)
        self._reply(unique, 0, data)

    def _give_up(self, fd: int) -> None:
        """Let a thread get what the daemon was asked for."""
        asked, base, ino, offset, size = self._asked.pop(fd)
        asked.give_up()
        self._pool.submit(self._fetch_and_reply, base, ino, offset, size)

    def _wait_for_kernel_only(self, events: select.epoll) -> None:
        self._events = None
        events.close()
        os.set_blocking(self._fd, True)

    def _fetch_and_reply(self, base: int, ino: int, offset: int, size: int, asked: AskedBlock | None = None) -> None:
        """`asked`: whom the bytes were asked of in vain."""
        error, data = self._read_wait(ino, offset, size, asked)
        with self._fetching_lock:
            unique = self._fetching.pop(base)
        try:
            for _ in range(_READ_AGAIN):
                if self._reply(unique, error, data):
                    break
                error, data = self._read_wait(ino, offset, size)
            else:
                self._reply(unique, errno.EIO, b"")
        except Exception:  # noqa: BLE001 - logged
            _log.exception("a reply failed")
        with self._fetched:
            self._fetched.notify_all()

    def _read_wait(
        self, ino: int, offset: int, size: int, asked: AskedBlock | None = None
    ) -> tuple[int, bytes | memoryview]:
        try:
            failure = asked.failure() if asked is not None else None
            if failure is not None:
                raise failure
            return 0, self._fs.read_wait(ino, offset, size)
        except Exception as exc:  # noqa: BLE001 - as above
            return self._failed(ino, exc), b""

    def _finish_fetches(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None
        for fd in list(self._asked):
            self._give_up(fd)
        with self._fetched:
            self._fetched.wait_for(lambda: not self._fetching)
        self._pool.shutdown(wait=True)
        self._openers.shutdown(wait=True)

    def _reply(self, unique: int, error: int, body: bytes | memoryview) -> bool:
        """Answer a request, unless nobody waits for it any more. False if `body` is of a mapped file that went away:
        then it is not answered."""
        try:
            if error:
                os.write(self._fd, protocol.pack_out_header(16, -error, unique))
            else:
                os.writev(self._fd, (protocol.pack_out_header(16 + len(body), 0, unique), body))
        except OSError as exc:
            # ENOENT: interrupted, or sent again to somebody else meanwhile. ENODEV: unmounted; the loop will
            # see it.
            if exc.errno not in (errno.ENOENT, errno.ENODEV, errno.EFAULT):
                raise
            return exc.errno != errno.EFAULT
        return True

    def _failed(self, ino: int, exc: Exception) -> int:
        self._failures.report(self._fs.path_of(ino), exc)
        return errno_of(exc)


def _is_large(node: Node) -> bool:
    """Tell whether the SSD tier keeps a file of this size as a file of its own."""
    return not node.is_dir and node.size_bytes > BLOCK_BYTES


def memory_is_short() -> bool:
    """Tell whether less than a fifth of the memory could be had without swapping (proc(5), meminfo)."""
    with open("/proc/meminfo", encoding="ascii") as file:
        values = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
    return values.get("MemAvailable", 0) < _SHORT_OF_MEMORY * values["MemTotal"]
