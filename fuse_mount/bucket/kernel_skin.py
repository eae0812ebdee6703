"""`BucketFs` behind the kernel's own protocol: requests in, answers and errnos out.

Used by the server process of a read-write mount. Threads take turns: one *leads*, that is, it reads a request, answers
it, and goes on with the next, without waking anybody up. One that is about to wait (for a disk, room or a store) lets
another one lead first, goes on with its own request, and then waits for its turn. So a program that creates files talks
to one thread, and requests that take time keep no other waiting.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from datacache.core.errors import DatacacheError, StagingFullError
from datacache.writeback.sections import Defer, Load, finish
from fuse_mount.bucket.fs.bucket_fs import BucketFs
from fuse_mount.bucket.fs.mount_state import DoneRequest
from fuse_mount.bucket.fs.names import Changes
from fuse_mount.bucket.fs.nodes import LONGEST_NAME, Attr
from fuse_mount.bucket.refusals import Refusals
from fuse_mount.errno_map import FailureLog
from fuse_mount.kernel import protocol, session
from fuse_mount.kernel.notifier import Notifier
from fuse_mount.lifecycle.process import readable

T = TypeVar("T")
Body = bytes | memoryview
_log = logging.getLogger("fuse_mount")
_ROOM_BLOCKS = 2**50 // 4096
"""A bucket without a quota has no size: statfs(2) says 1 PiB, of which all is free."""
_MOST_THREADS = 420
"""Many may wait for room or for an upload, and all others must be answered."""
_SWITCH_S = 0.0005
"""How long another thread may go on before it is this one's turn: a request waits for it, and an upload does not."""
_RETRIED = frozenset((errno.EINTR, errno.ENOENT))  # ENOENT: it was withdrawn before it could be read
_MOST_COPIED = 2**32 - 4096
"""Bytes that the answer to a COPY_FILE_RANGE of before protocol 7.45 can tell."""
_KICK_S = 0.02
_STOP_S = 2.0
_DURABLE = frozenset(
    (
        protocol.SYMLINK, protocol.MKDIR, protocol.UNLINK, protocol.RMDIR, protocol.RENAME, protocol.RENAME2,
        protocol.MKNOD, protocol.LINK,
    )
)  # fmt: skip
"""Requests that are answered when what they have changed is durable."""
_NAMES = {
    protocol.LOOKUP: "lookup", protocol.GETATTR: "getattr", protocol.SETATTR: "setattr", protocol.READLINK: "readlink",
    protocol.SYMLINK: "symlink", protocol.MKNOD: "mknod", protocol.MKDIR: "mkdir", protocol.UNLINK: "unlink",
    protocol.RMDIR: "rmdir", protocol.RENAME: "rename", protocol.RENAME2: "rename", protocol.OPEN: "open",
    protocol.READ: "read", protocol.WRITE: "write", protocol.RELEASE: "release", protocol.FSYNC: "fsync",
    protocol.FLUSH: "flush", protocol.OPENDIR: "opendir", protocol.READDIR: "readdir", protocol.CREATE: "create",
    protocol.READDIRPLUS: "readdir", protocol.FSYNCDIR: "fsyncdir", protocol.TMPFILE: "create", protocol.LINK: "link",
    protocol.FALLOCATE: "fallocate", protocol.COPY_FILE_RANGE: "copy", protocol.COPY_FILE_RANGE_64: "copy",
    protocol.GETXATTR: "getxattr", protocol.SETXATTR: "setxattr", protocol.LISTXATTR: "listxattr",
    protocol.REMOVEXATTR: "removexattr",
}  # fmt: skip


class _ToldError(Exception):
    """A write that failed, of which all is told but the errno."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class KernelSkin:
    """One mount. `serve` is called once, by the main thread; the other methods by any."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self.fd = -1
        self.fs: BucketFs
        self.refusals: Refusals
        self.stopping = False
        self._lock = threading.Lock()  # guards all below
        self._parked: list[_Turn] = []
        self._threads = self._working = 1
        self._is_led = True
        self._leader = 0
        self._is_over = False
        self._ended = threading.Event()
        self._stale: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()

    def begin(self, fd: int) -> bool:
        """Answer the first request of a new mount. Return whether the kernel can send requests again, so that the next
        server can go on. Raises `MountError`."""
        session.answer_init(fd, writable=True)
        return session.resend(fd)

    def serve(self, fs: BucketFs, fd: int, failures: FailureLog) -> None:
        """Answer the kernel on the descriptor of a mount, until that is unmounted, or `stop` is called and all that was
        read is answered. `failures` gets what those see as an errno who read and write."""
        sys.setswitchinterval(_SWITCH_S)
        self.fs, self.fd, self.refusals = fs, fd, Refusals(fs, failures)
        self._notifier.begin(fd)
        signal.signal(signal.SIGUSR1, lambda *_: None)  # ends a read(2)
        threading.Thread(target=self._forget_names, name="stale", daemon=True).start()
        try:
            _Turn(self).run()
            self._ended.wait()
        finally:
            self._ended.set()
            self._stale.put(None)
            os.close(fd)

    def stop(self) -> None:
        """End `serve`, whose requests that wait have a moment to be answered. The mount stays."""
        self.stopping = True
        os.set_blocking(self.fd, False)
        deadline = time.monotonic() + _STOP_S
        while not self._ended.wait(_KICK_S):
            if self._leader and not self._is_over:
                with contextlib.suppress(ProcessLookupError):
                    signal.pthread_kill(self._leader, signal.SIGUSR1)  # its read(2) may have begun before this
            if time.monotonic() > deadline:
                self._ended.set()

    def forget_name(self, parent: int, name: str) -> None:
        """Have the kernel forget a name soon, as `BucketFs.on_stale`. It may be waiting for the answer to the request
        that this is called in."""
        self._stale.put((parent, name))

    def forget_pages(self, ino: int, offset: int = 0, size: int = 0) -> None:
        """Have the kernel write what it has gathered of a file, or of a range of it: it does before it forgets the
        file's pages there."""
        self._notify(protocol.encode_forget_pages(ino, offset, size))

    def forget_attributes(self, ino: int) -> None:
        """Have the kernel ask for the attributes of a file again."""
        self._notify(protocol.encode_forget_attributes(ino))

    # --- turns ---------------------------------------------------------------------------------------------------

    def let_lead(self) -> None:
        """Have another thread lead from now on."""
        with self._lock:
            if self._parked:
                self._working += 1
                self._parked.pop().turn.release()  # the last to have come: its buffer is warm
                return
            self._is_led = self._threads < _MOST_THREADS
            if not self._is_led:
                return
            self._threads += 1
            self._working += 1
        try:
            threading.Thread(target=_Turn(self).run, name="requests", daemon=True).start()
        except RuntimeError:  # no thread can be started: whoever is done first leads
            with self._lock:
                self._threads -= 1
                self._working -= 1
                self._is_led = False

    def leads(self) -> None:
        """Note that this thread leads."""
        self._leader = threading.get_ident()

    def wait_to_lead(self, turn: _Turn) -> bool:
        """Wait for a thread's turn to lead; return False at the end."""
        with self._lock:
            if self._is_over:
                self._leave_locked()
                return False
            if not self._is_led:
                self._is_led = True
                return True
            self._working -= 1
            self._parked.append(turn)
        turn.turn.acquire()
        return not self._is_over

    def end(self) -> None:
        """Note that the thread that led has met the end."""
        with self._lock:
            self._is_over = True
            parked, self._parked = self._parked, []
            self._leave_locked()
        for turn in parked:
            turn.turn.release()

    def _leave_locked(self) -> None:
        self._working -= 1
        if not self._working:
            self._ended.set()

    # --- what nobody asks for ------------------------------------------------------------------------------------

    def _forget_names(self) -> None:
        while (stale := self._stale.get()) is not None:
            self._notify(protocol.encode_forget_name(stale[0], os.fsencode(stale[1])))

    def _notify(self, message: bytes) -> None:
        try:
            self._notifier.send(message)
        except ConnectionError:  # nothing can be told any more: the supervisor starts the next server
            _log.critical("the process that tells the kernel what to forget has ended")
            os._exit(1)
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENODEV, errno.ENOTCONN):
                _log.info("the kernel did not take a notification: %s", exc)


class _Turn:
    """One thread that answers requests."""

    def __init__(self, skin: KernelSkin) -> None:
        self.turn = threading.Semaphore(0)
        """Released for the thread to lead."""
        self._skin, self._fs, self._refusals = skin, skin.fs, skin.refusals
        self._names, self._files = skin.fs.names, skin.fs.handles
        self._buffer = bytearray(protocol.WRITE_BUFFER_BYTES)
        self._length = self._opcode = self._unique = 0
        self._leads = True
        self._handlers: dict[int, Callable[[int], Body]] = {
            protocol.LOOKUP: self._lookup,
            protocol.GETATTR: self._getattr,
            protocol.SETATTR: self._setattr,
            protocol.READLINK: lambda ino: self._do(self._names.readlink, ino),
            protocol.SYMLINK: self._symlink,
            protocol.MKNOD: self._mknod,
            protocol.MKDIR: self._mkdir,
            protocol.UNLINK: self._unlink,
            protocol.RMDIR: self._rmdir,
            protocol.RENAME: self._rename,
            protocol.RENAME2: self._rename,
            protocol.LINK: self._link,
            protocol.OPEN: self._open,
            protocol.CREATE: self._create,
            protocol.TMPFILE: self._create_unnamed,
            protocol.READ: self._read,
            protocol.WRITE: self._write,
            protocol.FALLOCATE: self._allocate,
            protocol.COPY_FILE_RANGE: self._copy,
            protocol.COPY_FILE_RANGE_64: self._copy,
            protocol.FLUSH: self._flush,
            protocol.FSYNC: self._fsync,
            protocol.RELEASE: self._release,
            protocol.OPENDIR: lambda ino: protocol.open_out(self._do(self._names.opendir, ino), 0),
            protocol.READDIR: self._readdir,
            protocol.READDIRPLUS: self._readdir,
            protocol.RELEASEDIR: self._releasedir,
            protocol.FSYNCDIR: self._fsyncdir,
            protocol.GETXATTR: self._getxattr,
            protocol.SETXATTR: self._setxattr,
            protocol.LISTXATTR: self._listxattr,
            protocol.REMOVEXATTR: self._removexattr,
            protocol.STATFS: self._statfs,
            protocol.DESTROY: lambda _ino: b"",
        }

    @property
    def unique(self) -> int:
        """See `mount_state.PresentRequest`."""
        return self._unique & ~protocol.UNIQUE_RESEND

    def run(self) -> None:
        """Read and answer requests, until the end."""
        self._fs.notes.serve(self)
        try:
            self._take_turns()
        except Exception:  # noqa: BLE001 - it ends here
            # A defect. Nobody would lead, and all would wait for ever: the supervisor starts the next server.
            _log.critical("a thread that answers requests has failed", exc_info=True)
            os._exit(1)

    def _take_turns(self) -> None:
        self._skin.leads()
        handlers = self._handlers
        while True:
            if not self._leads:
                if not self._skin.wait_to_lead(self):
                    return
                self._leads = True
                self._skin.leads()
            ino = self._next()
            if ino is None:
                self._skin.end()
                return
            handler = handlers.get(self._opcode)
            if self._unique & protocol.UNIQUE_RESEND:
                handler = self._again_of(handler)
            if handler is not None:
                try:
                    body, error = handler(ino), 0
                except Exception as exc:  # noqa: BLE001 - one request's errno, never the mount's end
                    body, error = b"", self._failed(exc)
                self._reply(error, body)
            elif self._opcode in (protocol.FORGET, protocol.BATCH_FORGET):
                self._forget(ino)
            elif self._opcode not in protocol.UNANSWERED:
                self._reply(errno.ENOSYS, b"")  # the kernel never asks again

    def _next(self) -> int | None:
        """Read the next request; return its inode, None at the end."""
        skin, buffer, buffers = self._skin, self._buffer, [self._buffer]
        while not skin.stopping:
            try:
                os.readv(skin.fd, buffers)
            except BlockingIOError:  # made so by `stop`, or by whoever shares the descriptor
                readable(skin.fd, _KICK_S)
            except OSError as exc:
                if exc.errno == errno.ENODEV:
                    return None
                if exc.errno not in _RETRIED:
                    _log.error("requests cannot be read: %s", exc)
                    return None
            else:
                ino: int
                self._length, self._opcode, self._unique, ino = protocol.unpack_start(buffer)
                return ino
        return None

    def _reply(self, error: int, body: Body) -> None:
        try:
            if error:
                os.write(self._skin.fd, protocol.pack_out_header(protocol.OUT_HEADER_BYTES, -error, self._unique))
            else:
                header = protocol.pack_out_header(protocol.OUT_HEADER_BYTES + len(body), 0, self._unique)
                os.writev(self._skin.fd, (header, body))
        except OSError as exc:
            # ENOENT: nobody waits for it any more. ENODEV: it is unmounted, and the next read tells.
            if exc.errno not in (errno.ENOENT, errno.ENODEV):
                _log.error("the kernel does not take the answer to %s: %s", _NAMES.get(self._opcode, "a request"), exc)
                if not error:
                    self._reply(errno.EIO, b"")

    def _failed(self, exc: Exception) -> int:
        if isinstance(exc, _ToldError):
            return exc.number
        asked = protocol.fields_to_set(self._buffer) if self._opcode == protocol.SETATTR else None
        has_handle = asked is not None and bool(asked.valid & protocol.SET_FH)
        return self._refusals.errno_of(_NAMES.get(self._opcode, ""), exc, has_handle=has_handle)

    # --- requests that are sent again -----------------------------------------------------------------------------

    def _again_of(self, handler: Callable[[int], Body] | None) -> Callable[[int], Body] | None:
        """Return what answers a request that an earlier server had read: with the result, where that has done it."""
        if self._opcode == protocol.RELEASE and not self._files.knows(protocol.opened(self._buffer)):
            return lambda _ino: b""
        done = self._fs.notes.take_done(self.unique)
        return handler if done is None else lambda _ino: self._result_of(done)

    def _result_of(self, done: DoneRequest) -> bytes:
        body = b""
        if done.ino and self._opcode not in (protocol.OPEN, protocol.OPENDIR):
            body = self._entry(self._do(self._names.getattr, done.ino))
        if self._opcode == protocol.MKNOD and done.handle:
            if self._files.knows(done.handle):
                self._close(done.handle)
        elif done.handle:
            flags = 0 if self._opcode == protocol.OPENDIR else protocol.KEEP_CACHE
            body += protocol.open_out(done.handle, flags)
        return self._durably(body) if self._opcode in _DURABLE else body

    # --- waiting -------------------------------------------------------------------------------------------------

    def _step_aside(self) -> None:
        """Let another thread lead, as this one is about to wait."""
        if self._leads:
            self._leads = False
            self._skin.let_lead()

    def _do(self, call: Callable[..., T], *args: Any, **more: Any) -> T:
        """Make a call of `BucketFs`, after all that it needs."""
        try:
            return call(*args, **more)
        except (Load, Defer) as raised:
            self._step_aside()
            return finish(raised, partial(call, *args, **more))

    def _durably(self, body: bytes) -> bytes:
        """Return an answer once all changes of names are durable."""
        if self._fs.is_quick:
            try:
                self._files.commit(wait=False)
                return body
            except StagingFullError:
                pass
        self._step_aside()
        self._files.commit()
        return body

    # --- names ---------------------------------------------------------------------------------------------------

    def _lookup(self, ino: int) -> bytes:
        [name, *_] = protocol.names_of(self._buffer, self._length)
        return self._entry(self._do(self._names.lookup, ino, name))

    def _forget(self, ino: int) -> None:
        for each, count in protocol.forgotten(self._buffer, self._opcode, ino):
            try:
                self._names.forget(each, count)
            except Exception:  # noqa: BLE001 - nobody waits for an answer
                _log.exception("inode %d cannot be forgotten", each)

    def _getattr(self, ino: int) -> bytes:
        return self._details(self._do(self._names.getattr, ino)).attr_out()

    def _setattr(self, ino: int) -> bytes:
        asked = protocol.fields_to_set(self._buffer)
        valid, now_ns = asked.valid, time.time_ns()
        atime_ns = now_ns if valid & protocol.SET_ATIME_NOW else asked.atime_ns
        mtime_ns = now_ns if valid & protocol.SET_MTIME_NOW else asked.mtime_ns
        changes = Changes(
            mode=asked.mode if valid & protocol.SET_MODE else None,
            uid=asked.uid if valid & protocol.SET_UID else None,
            gid=asked.gid if valid & protocol.SET_GID else None,
            size=asked.size if valid & protocol.SET_SIZE else None,
            atime_ns=atime_ns if valid & protocol.SET_ATIME else None,
            mtime_ns=mtime_ns if valid & protocol.SET_MTIME else None,
            ctime_ns=asked.ctime_ns if valid & protocol.SET_CTIME else None,
            # Nothing but a time: chown(2) that leaves owner and group as they are.
            written_by=protocol.owner_of(self._buffer)
            if valid & protocol.SET_NO_PRIVILEGES or valid == protocol.SET_CTIME
            else None,
        )
        handle = asked.fh if valid & protocol.SET_FH else None
        return self._details(self._do(self._names.setattr, ino, changes, handle)).attr_out()

    def _drop_privileges(self, ino: int) -> None:
        if self._do(self._names.drop_privileges, ino, **self._owner()):
            self._skin.forget_attributes(ino)  # it would tell the old mode to programs that ask for nothing else

    def _drop_privileges_of_user(self, ino: int) -> None:
        if protocol.owner_of(self._buffer)[0]:  # these requests have no flag that says it
            self._drop_privileges(ino)

    def _getxattr(self, ino: int) -> bytes:
        name, room = protocol.asked_xattr(self._buffer, self._length)
        return self._xattr_out(self._do(self._names.getxattr, ino, name), room)

    def _listxattr(self, ino: int) -> bytes:
        names = self._do(self._names.listxattr, ino)
        _, room = protocol.asked_xattr(self._buffer, self._length)
        return self._xattr_out(b"".join(name + b"\0" for name in names), room)

    def _xattr_out(self, found: bytes, room: int) -> bytes:
        if not room:
            return protocol.xattr_out(len(found))
        if len(found) > room:
            raise OSError(errno.ERANGE, "there is no room for it")
        return found

    def _setxattr(self, ino: int) -> bytes:
        name, value, flags = protocol.new_xattr(self._buffer, self._length)
        self._do(self._names.setxattr, ino, name, value, flags)
        return b""

    def _removexattr(self, ino: int) -> bytes:
        self._do(self._names.removexattr, ino, protocol.names_of(self._buffer, self._length)[0])
        return b""

    def _symlink(self, parent: int) -> bytes:
        name, target, *_ = protocol.names_of(self._buffer, self._length)
        return self._durably(self._entry(self._do(self._names.symlink, parent, name, target, **self._owner())))

    def _mknod(self, parent: int) -> bytes:
        mode, rdev, name = protocol.new_node(self._buffer, self._length)
        if not stat.S_ISREG(mode):
            attr = self._do(self._names.mknod, parent, name, mode=mode, rdev=rdev, **self._owner())
            return self._durably(self._entry(attr))
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        handle, attr = self._do(self._names.create, parent, name, flags, mode=mode, **self._owner())
        self._close(handle)
        return self._entry(attr)

    def _mkdir(self, parent: int) -> bytes:
        mode, name = protocol.new_folder(self._buffer, self._length)
        return self._durably(self._entry(self._do(self._names.mkdir, parent, name, mode=mode, **self._owner())))

    def _unlink(self, parent: int) -> bytes:
        self._do(self._names.unlink, parent, protocol.names_of(self._buffer, self._length)[0])
        return self._durably(b"")

    def _rmdir(self, parent: int) -> bytes:
        self._do(self._names.rmdir, parent, protocol.names_of(self._buffer, self._length)[0])
        return self._durably(b"")

    def _rename(self, parent: int) -> bytes:
        name, new_parent, new_name, flags = protocol.renaming(self._buffer, self._length, self._opcode)
        self._do(self._names.rename, parent, name, new_parent, new_name, flags)
        return self._durably(b"")

    def _link(self, parent: int) -> bytes:
        ino, name = protocol.linking(self._buffer, self._length)
        return self._entry(self._do(self._names.link, ino, parent, name, lambda: self._skin.forget_pages(ino)))

    def _owner(self) -> dict[str, int]:
        uid, gid = protocol.owner_of(self._buffer)
        return {"uid": uid, "gid": gid}

    # --- folders -------------------------------------------------------------------------------------------------

    def _readdir(self, folder: int) -> bytes:
        handle, (position, room) = protocol.opened(self._buffer), protocol.read_arguments(self._buffer)
        plus = self._opcode == protocol.READDIRPLUS
        records = [protocol.dot_records(folder, position, plus=plus)]
        room -= len(records[0])
        start = max(position - protocol.DOTS, 0)
        told: list[str] = []
        for number, entry in enumerate(self._do(self._names.readdir, handle, start), start + 1):
            name = os.fsencode(entry.name)
            size = protocol.dirent_bytes(len(name)) + (protocol.ENTRY_OUT_BYTES if plus else 0)
            if size > room:
                break
            told.append(entry.name)
            ino, mode = protocol.UNKNOWN_INODE, entry.state.attributes.mode
            if plus:
                attr = self._names.enter(handle, entry)
                if attr is None:
                    continue
                records.append(self._entry(attr))
                ino, mode = attr.ino, attr.mode
            room -= size
            kind = mode >> 12 & 15
            records.append(protocol.dirent_packer(len(name))(ino, number + protocol.DOTS, len(name), kind, name))
        self._names.note_told(handle, start, told)
        return b"".join(records)

    def _releasedir(self, _ino: int) -> bytes:
        self._names.releasedir(protocol.opened(self._buffer))
        return b""

    def _fsyncdir(self, _ino: int) -> bytes:
        self._step_aside()
        self._files.commit()
        return b""

    # --- open files ----------------------------------------------------------------------------------------------

    def _create(self, parent: int) -> bytes:
        flags, mode, name = protocol.creation(self._buffer, self._length)
        handle, attr = self._do(self._names.create, parent, name, flags, mode=mode, **self._owner())
        return self._entry(attr) + protocol.open_out(handle)

    def _create_unnamed(self, parent: int) -> bytes:
        _flags, mode, _name = protocol.creation(self._buffer, self._length)
        handle, attr = self._do(self._names.create_unnamed, parent, mode=mode, **self._owner())
        return self._entry(attr) + protocol.open_out(handle)

    def _open(self, ino: int) -> bytes:
        flags, _mode, _name = protocol.creation(self._buffer, self._length)
        if protocol.drops_privileges(self._buffer, self._opcode):
            self._drop_privileges(ino)
        return protocol.open_out(self._do(self._files.open, ino, flags))

    def _read(self, _ino: int) -> Body:
        offset, size = protocol.read_arguments(self._buffer)
        cached = not protocol.is_direct(self._buffer)
        return self._do(self._files.read, protocol.opened(self._buffer), offset, size, cached=cached)

    def _write(self, ino: int) -> bytes:
        handle, (offset, _) = protocol.opened(self._buffer), protocol.read_arguments(self._buffer)
        data = protocol.data_of(self._buffer)
        try:
            if protocol.drops_privileges(self._buffer, self._opcode):
                self._drop_privileges(ino)
            written = self._do(self._files.write, handle, offset, data)
            if protocol.is_direct(self._buffer) and self._files.is_cached(handle):
                # The kernel does so itself after a synchronous write, and a request does not say which it is.
                self._step_aside()
                self._skin.forget_pages(ino, offset, written)
            return protocol.write_out(written)
        except (DatacacheError, OSError) as exc:
            self._step_aside()
            raise _ToldError(self._refusals.errno_of_write(handle, exc, len(data))) from exc

    def _allocate(self, ino: int) -> bytes:
        asked = protocol.allocation(self._buffer)
        self._drop_privileges_of_user(ino)
        self._do(self._files.allocate, asked.fh, asked.mode, asked.offset, asked.size)
        return b""

    def _copy(self, _ino: int) -> bytes:
        asked, is_wide = protocol.copying(self._buffer), self._opcode == protocol.COPY_FILE_RANGE_64
        size = asked.size if is_wide else min(asked.size, _MOST_COPIED)
        self._drop_privileges_of_user(asked.ino)
        copied = self._do(self._files.copy, asked.source, asked.start, asked.fh, asked.offset, size)
        return protocol.copy_out(copied) if is_wide else protocol.write_out(copied)

    def _flush(self, _ino: int) -> bytes:
        handle = protocol.opened(self._buffer)
        quick = self._fs.is_quick and self._files.is_small(handle)
        settle = self._files.flush(handle, wait=not quick)
        if settle is None:
            return b""
        if quick:
            try:
                settle()
                return b""
            except StagingFullError:  # room is waited for
                settle = self._files.flush(handle)
        if settle is not None:
            self._step_aside()
            settle()
        return b""

    def _fsync(self, _ino: int) -> bytes:
        settle = self._files.fsync(protocol.opened(self._buffer))
        self._step_aside()
        settle()
        return b""

    def _release(self, _ino: int) -> bytes:
        self._close(protocol.opened(self._buffer))
        return b""

    def _close(self, handle: int) -> None:
        settle = self._files.release(handle)
        if settle is not None:
            self._step_aside()
            settle()

    def _statfs(self, _ino: int) -> bytes:
        room = self._fs.room()
        if room is None:
            return protocol.encode_room(_ROOM_BLOCKS, _ROOM_BLOCKS, longest_name=LONGEST_NAME)
        quota_bytes, used_bytes = room
        return protocol.encode_room(
            quota_bytes // 4096, max(0, quota_bytes - used_bytes) // 4096, longest_name=LONGEST_NAME
        )

    # --- answers -------------------------------------------------------------------------------------------------

    def _details(self, attr: Attr) -> protocol.Details:
        return protocol.Details(
            attr.ino,
            attr.mode,
            attr.links,
            attr.uid,
            attr.gid,
            attr.size_bytes,
            attr.atime_ns,
            attr.mtime_ns,
            attr.ctime_ns,
            self._fs.live.ttl_s if attr.complete else 0.0,
            attr.rdev,
        )

    def _entry(self, attr: Attr) -> bytes:
        return self._details(attr).entry_out()
