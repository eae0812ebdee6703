"""Durable files, for every part that makes some: all of a write, names that survive a power loss, mapping.

Pure system calls; they raise what the kernel says. Any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write at an offset, in as many calls as it takes: a disk that fills up, or a signal, may cut one short."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest, offset = rest[count:], offset + count


_PIECE_BYTES = 1024 * 1024
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE = 0x01, 0x02, 0x10
"""Modes of fallocate(2) (include/uapi/linux/falloc.h)."""
_UNSUPPORTED = frozenset((errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EINVAL))
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYNC_FILE_RANGE_WRITE = 2  # <linux/fs.h>


def allocate(fd: int, mode: int, offset: int, size: int) -> None:
    """Do as fallocate(2). `OSError` EOPNOTSUPP where the file system cannot."""
    while _fallocate(fd, mode, offset, size):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def begin_writing(fd: int) -> None:
    """Have the kernel bring a file's dirty pages to the disk from now on, and wait for none. Without a word where it
    cannot: it does by itself, later."""
    _sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


def write_zeros(fd: int, start: int, stop: int) -> None:
    """Write zeros from one offset up to another."""
    zeros = memoryview(bytes(min(_PIECE_BYTES, max(0, stop - start))))
    for offset in range(start, stop, _PIECE_BYTES):
        write_all(fd, zeros[: stop - offset], offset)


def copy_range(source_fd: int, start: int, fd: int, offset: int, size: int) -> int:
    """Copy bytes of one file into another, by copy_file_range(2) where their file system can; return how many. Fewer
    where the first one ends."""
    copied, is_supported = 0, True
    while copied < size:
        if is_supported:
            try:
                count = os.copy_file_range(source_fd, fd, size - copied, start + copied, offset + copied)
            except OSError as exc:
                if exc.errno not in _UNSUPPORTED:
                    raise
                is_supported = False
                continue
        else:
            data = os.pread(source_fd, min(_PIECE_BYTES, size - copied), start + copied)
            write_all(fd, data, offset + copied)
            count = len(data)
        if not count:
            break
        copied += count
    return copied


def replace_file(path: Path, data: bytes, *, beside: Path | None = None, durable: bool = True) -> None:
    """Put bytes into a file's place, with mode 0600, durable and as a whole: after a crash the old file is there, or
    the new one. They are written to `beside` first, in the same folder: by default NAME.new, for who is alone to write.
    Not `durable`: as a whole for other processes, and nothing is synced.
    """
    beside = beside or path.with_name(f"{path.name}.new")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, data, 0)
        if durable:
            os.fsync(fd)
    except OSError:  # a full disk: what there is of it takes room
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    finally:
        os.close(fd)
    if durable:
        take_place(beside, path)
    else:
        os.replace(beside, path)


def map_file(path: Path, size_bytes: int) -> mmap.mmap:
    """Map a file, which is made, or cut to this size, to be written. It has no holes: on a full disk, to write into a
    hole of a mapped file is fatal."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size != size_bytes:
            os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)


def open_private(path: str | Path, flags: int) -> int:
    """For `open(…, opener=open_private)`: a file that only its owner can read, also where it was made before by a
    version that let others."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_mode & 0o077:
            os.fchmod(fd, 0o600)
    except PermissionError:  # somebody else's, who lets us write to it
        pass
    except BaseException:
        os.close(fd)
        raise
    return fd


def take_place(beside: Path | bytes, path: Path | bytes) -> None:
    """Give a file that is durable already another one's name, durably: both are in the same folder."""
    os.replace(beside, path)
    sync_folder(os.path.dirname(path) or ".")


def make_folders(path: bytes) -> None:
    """Make a folder and those above it that are missing, their names durable. One that is there is fine."""
    above = os.path.dirname(path)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return
    except FileNotFoundError:
        if above == path:
            raise
        make_folders(above)
        make_folders(path)
    else:
        sync_folder(above)


def sync_folder(path: str | Path | bytes) -> None:
    """Make the names in a folder durable, where its file system can (fsync(2): EINVAL where it cannot)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)
