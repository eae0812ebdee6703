"""`BucketFs` behind pyfuse3: requests in, answers and errnos out, and nothing else.

Used by the server process of a read-write mount, which has one mount and runs `serve` in its main thread. What takes
time (`Load`, `Defer`, and all that makes something durable) runs in threads; everything else is answered in the loop.

The loop waits for the kernel's next request a moment by itself, then with trio: a program that creates files sends each
request right after the answer to the last, and waiting through trio (lock, epoll, scheduler) costs more than answering.
Measured, a file system that does nothing takes 160 µs of CPU for a file that is created, written and closed, and 60
without. So where no other request is being worked on, it waits in poll(2) for a millisecond at most, which lets other
threads run; then trio's turn comes. pyfuse3 looks its wait up by name for each request (`_wait_fuse_readable`, 3.3 to
3.5). A release that has none of that name is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import select
import stat
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import pyfuse3
import trio

from datacache.core.errors import DatacacheError, StagingFullError
from datacache.writeback.sections import Defer, Load, finish
from fuse_mount.bucket.fs.bucket_fs import BucketFs
from fuse_mount.bucket.fs.names import Changes
from fuse_mount.bucket.fs.nodes import LONGEST_NAME, Attr
from fuse_mount.bucket.refusals import Refusals
from fuse_mount.errno_map import FailureLog

T = TypeVar("T")
_log = logging.getLogger("fuse_mount")
_BLOCK_BYTES = 4096
_ROOM_BLOCKS = 2**50 // _BLOCK_BYTES
"""A bucket without a quota has no size: statfs(2) says 1 PiB, of which all is free."""
_MAX_REQUESTS = 400
"""At a time: many may wait for room or for an upload, and all others must be answered."""
_THREADS = 420
_SWITCH_S = 0.0005
"""How long another thread may go on before it is this one's turn: a request waits for it, and an upload does not."""


class Pyfuse3Skin:
    """One mount, whose process has no other. `serve` is called once, by the main thread; the other methods by any."""

    def begin(self, fd: int) -> bool:
        """Leave the first request to `serve`; no next server goes on with the connection."""
        return False

    def serve(self, fs: BucketFs, fd: int, failures: FailureLog) -> None:
        """Answer the kernel on the descriptor of a mount until it is unmounted. `failures` gets what those see as an
        errno who read and write. Raises what pyfuse3 raises if it cannot be served."""
        operations = _Operations(fs, failures)
        sys.setswitchinterval(_SWITCH_S)
        # libfuse takes the descriptor of a mount that is made already for a mount point. The options that count are the
        # mount's.
        pyfuse3.init(operations, f"/dev/fd/{fd}", {"default_permissions"})
        try:
            trio.run(_run, operations)
        finally:
            pyfuse3.close(unmount=True)

    def stop(self) -> None:
        """End `serve` from another thread; the mount is taken away."""
        token = pyfuse3.trio_token
        if token is not None:
            trio.from_thread.run_sync(pyfuse3.terminate, trio_token=token)

    def forget_pages(self, ino: int) -> None:
        """Have the kernel write what it has gathered of a file: it does before it forgets the file's pages."""
        try:
            pyfuse3.invalidate_inode(ino)
        except OSError as exc:
            _log.info("the kernel did not write the pages of inode %d: %s", ino, exc)

    def forget_name(self, parent: int, name: str) -> None:
        """Have the kernel forget a name, as `BucketFs.on_stale`."""
        try:
            pyfuse3.invalidate_entry_async(parent, os.fsencode(name), ignore_enoent=True)
        except OSError as exc:
            _log.info("the kernel did not forget %s: %s", name, exc)


async def _run(operations: _Operations) -> None:
    fd = _device_fd()
    if fd is not None:
        operations.waiting = Waiting(fd)
        if hasattr(pyfuse3, "_wait_fuse_readable"):
            pyfuse3._wait_fuse_readable = operations.waiting.wait  # noqa: SLF001
    trio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
    await pyfuse3.main(max_tasks=_MAX_REQUESTS)


def _device_fd() -> int | None:
    """Return the descriptor of the connection, which this process has one of."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                found.append(int(name))
    return found[0] if len(found) == 1 else None


async def _answer(call: Callable[..., T], *args: Any) -> T:
    """Make a call of `BucketFs`, after all that it needs."""
    try:
        return call(*args)
    except (Load, Defer) as raised:
        return await trio.to_thread.run_sync(finish, raised, functools.partial(call, *args))


def _request(handler: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Turn a request handler's errors into errnos."""

    name = handler.__name__

    @functools.wraps(handler)
    async def answer(self: _Operations, *args: Any) -> T:
        waiting = self.waiting
        if waiting is not None:
            waiting.under_way += 1
        try:
            return await handler(self, *args)
        except pyfuse3.FUSEError:
            raise
        except Exception as exc:
            has_handle = name == "setattr" and args[3] is not None
            raise pyfuse3.FUSEError(self.refusals.errno_of(name, exc, has_handle=has_handle)) from exc
        finally:
            if waiting is not None:
                waiting.under_way -= 1

    return answer


class _Operations(pyfuse3.Operations):  # type: ignore[misc]
    supports_dot_lookup = False
    # The kernel gathers small writes and keeps what was written; it trusts its own size and times of a file, which is
    # why `BucketFs` gives another inode to what somebody else has put under a name. close(2) and fsync(2) bring all of
    # it here before they ask for it to be made durable.
    enable_writeback_cache = True

    def __init__(self, fs: BucketFs, failures: FailureLog) -> None:
        super().__init__()
        self.refusals = Refusals(fs, failures)
        self.waiting: Waiting | None = None
        self._fs = fs

    # --- names -----------------------------------------------------------------------------------------------------

    @_request
    async def lookup(self, parent: int, name: bytes, _ctx: Any) -> Any:
        return self._entry(await _answer(self._fs.names.lookup, parent, name))

    async def forget(self, inodes: Iterable[tuple[int, int]]) -> None:
        for ino, count in inodes:
            try:
                self._fs.names.forget(ino, count)
            except Exception:  # noqa: BLE001 - nobody waits for an answer: it would end the server
                _log.exception("inode %d cannot be forgotten", ino)

    @_request
    async def getattr(self, ino: int, _ctx: Any) -> Any:
        return self._entry(await _answer(self._fs.names.getattr, ino))

    @_request
    async def setattr(self, ino: int, attr: Any, fields: Any, fh: int | None, _ctx: Any) -> Any:
        names = ("mode", "uid", "gid", "size", "atime_ns", "mtime_ns", "ctime_ns")
        changed = [name for name in names if getattr(fields, f"update_{name.removesuffix('_ns')}")]
        changes = Changes(**{name: getattr(attr, f"st_{name}") for name in changed})
        return self._entry(await _answer(self._fs.names.setattr, ino, changes, fh))

    @_request
    async def opendir(self, ino: int, _ctx: Any) -> int:
        return await _answer(self._fs.names.opendir, ino)

    @_request
    async def readdir(self, fh: int, start: int, token: Any) -> None:
        entries = await _answer(self._fs.names.readdir, fh, start)
        for number, entry in enumerate(entries, start + 1):
            attr = self._fs.names.enter(fh, entry)
            if attr is None:
                continue
            if not pyfuse3.readdir_reply(token, os.fsencode(entry.name), self._entry(attr), number):
                self._fs.names.forget(attr.ino, 1)
                return

    @_request
    async def releasedir(self, fh: int) -> None:
        self._fs.names.releasedir(fh)

    @_request
    async def readlink(self, ino: int, _ctx: Any) -> bytes:
        return await _answer(self._fs.names.readlink, ino)

    # --- changes of names ------------------------------------------------------------------------------------------

    @_request
    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        handle, attr = await self._create(parent, name, mode, flags, ctx)
        return pyfuse3.FileInfo(fh=handle, keep_cache=True), self._entry(attr)

    @_request
    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, ctx: Any) -> Any:
        if not stat.S_ISREG(mode):
            owner = {"mode": mode & ~ctx.umask, "uid": ctx.uid, "gid": ctx.gid}
            attr = await _answer(functools.partial(self._fs.names.mknod, parent, name, rdev=rdev, **owner))
            return await self._durably(self._entry(attr))
        handle, attr = await self._create(parent, name, mode, os.O_CREAT | os.O_EXCL | os.O_WRONLY, ctx)
        await self._close(handle)
        return self._entry(attr)

    @_request
    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> Any:
        call = functools.partial(self._fs.names.mkdir, parent, name, mode=mode & ~ctx.umask, uid=ctx.uid, gid=ctx.gid)
        return await self._durably(self._entry(await _answer(call)))

    @_request
    async def symlink(self, parent: int, name: bytes, target: bytes, ctx: Any) -> Any:
        call = functools.partial(self._fs.names.symlink, parent, name, target, uid=ctx.uid, gid=ctx.gid)
        return await self._durably(self._entry(await _answer(call)))

    @_request
    async def unlink(self, parent: int, name: bytes, _ctx: Any) -> None:
        await _answer(self._fs.names.unlink, parent, name)
        await self._durably(None)

    @_request
    async def rmdir(self, parent: int, name: bytes, _ctx: Any) -> None:
        await _answer(self._fs.names.rmdir, parent, name)
        await self._durably(None)

    @_request
    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, _ctx: Any) -> None:
        await _answer(self._fs.names.rename, parent, name, new_parent, new_name, flags)
        await self._durably(None)

    @_request
    async def link(self, _ino: int, _parent: int, _name: bytes, _ctx: Any) -> Any:
        raise OSError(errno.EPERM, "an object store has no hard links")

    # --- open files ------------------------------------------------------------------------------------------------

    @_request
    async def open(self, ino: int, flags: int, _ctx: Any) -> Any:
        return pyfuse3.FileInfo(fh=await _answer(self._fs.handles.open, ino, flags), keep_cache=True)

    @_request
    async def read(self, fh: int, offset: int, size: int) -> bytes:
        return await _answer(self._fs.handles.read, fh, offset, size)

    @_request
    async def write(self, fh: int, offset: int, data: bytes) -> int:
        try:
            return await _answer(self._fs.handles.write, fh, offset, data)
        except (DatacacheError, OSError) as exc:
            number = await trio.to_thread.run_sync(self.refusals.errno_of_write, fh, exc, len(data))
            raise pyfuse3.FUSEError(number) from exc

    @_request
    async def flush(self, fh: int) -> None:
        quick = self._fs.is_quick and self._fs.handles.is_small(fh)
        settle = self._fs.handles.flush(fh, wait=not quick)
        if settle is None:
            return
        if quick:
            try:
                settle()
                return
            except StagingFullError:  # room is waited for in a thread
                settle = self._fs.handles.flush(fh)
        if settle is not None:
            await trio.to_thread.run_sync(settle)

    @_request
    async def fsync(self, fh: int, _datasync: bool) -> None:
        await trio.to_thread.run_sync(self._fs.handles.fsync(fh))

    @_request
    async def fsyncdir(self, _fh: int, _datasync: bool) -> None:
        await trio.to_thread.run_sync(self._fs.handles.commit)

    @_request
    async def release(self, fh: int) -> None:
        await self._close(fh)

    @_request
    async def statfs(self, _ctx: Any) -> Any:
        found = pyfuse3.StatvfsData()
        found.f_bsize = found.f_frsize = _BLOCK_BYTES
        room = self._fs.room()
        if room is None:
            found.f_blocks = found.f_bfree = found.f_bavail = _ROOM_BLOCKS
        else:
            quota_bytes, used_bytes = room
            found.f_blocks = quota_bytes // _BLOCK_BYTES
            found.f_bfree = found.f_bavail = max(0, quota_bytes - used_bytes) // _BLOCK_BYTES
        found.f_files = found.f_ffree = found.f_favail = 2**32
        found.f_namemax = LONGEST_NAME
        return found

    # --- within ----------------------------------------------------------------------------------------------------

    async def _create(self, parent: int, name: bytes, mode: int, flags: int, ctx: Any) -> tuple[int, Attr]:
        owner = {"mode": mode & ~ctx.umask, "uid": ctx.uid, "gid": ctx.gid}
        return await _answer(functools.partial(self._fs.names.create, parent, name, flags, **owner))

    async def _close(self, fh: int) -> None:
        settle = self._fs.handles.release(fh)
        if settle is not None:
            await trio.to_thread.run_sync(settle)

    async def _durably(self, answer: T) -> T:
        if self._fs.is_quick:
            try:
                self._fs.handles.commit(wait=False)
                return answer
            except StagingFullError:
                pass
        await trio.to_thread.run_sync(self._fs.handles.commit)
        return answer

    def _entry(self, attr: Attr) -> Any:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = attr.ino
        entry.st_mode = attr.mode
        entry.st_uid, entry.st_gid = attr.uid, attr.gid
        entry.st_nlink = attr.links
        entry.st_rdev = attr.rdev
        entry.st_size = attr.size_bytes
        entry.st_blksize = 1 << 20
        entry.st_blocks = -(-attr.size_bytes // 512)
        entry.st_atime_ns, entry.st_mtime_ns = attr.atime_ns, attr.mtime_ns
        entry.st_ctime_ns = attr.ctime_ns
        entry.entry_timeout = entry.attr_timeout = self._fs.live.ttl_s if attr.complete else 0
        entry.generation = 0
        return entry


_MOMENT_MS = 1
_IN_A_ROW = 64
"""Requests that are answered before trio has its turn all the same."""


class Waiting:
    """Counts the requests of one session, and waits for the next one. In the loop's thread only."""

    def __init__(self, fd: int) -> None:
        self.under_way = 0
        """Requests that are being worked on."""
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._parked: list[trio.Event] = []
        self._is_watched = False
        self._is_closed = False
        self._in_a_row = 0

    async def wait(self) -> bool:
        """Return when there is a request to read; false to end."""
        if self._poll.poll(0 if self.under_way else _MOMENT_MS):
            self._in_a_row += 1
            if self._in_a_row < _IN_A_ROW:
                return True
        self._in_a_row = 0
        if self._is_watched:
            turn = trio.Event()
            self._parked.append(turn)
            await turn.wait()
        self._is_watched = True
        try:
            while not self._is_closed:
                await trio.lowlevel.wait_readable(self._fd)
                if self._poll.poll(0):  # another task may have read it
                    return True
        except trio.ClosedResourceError:
            self._is_closed = True
        finally:
            # The last to have come is the next to go: each task has a buffer of its own for requests, and those that
            # are not needed are not touched.
            if self._parked:
                self._parked.pop().set()
            else:
                self._is_watched = False
        return False
