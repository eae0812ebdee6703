"""Read-only mappings of files on disks that may fail.

Touching a page of a mapping that the disk cannot give kills the process (SIGBUS). So pages are asked for first:
`MADV_POPULATE_READ` (madvise(2), Linux 5.14) answers with an error where touching would kill; older kernels are asked
by reading the same bytes. Asking costs as much as reading 50 KB, so each mapping remembers which granules it has: their
pages stay until the kernel reclaims memory, and whether it did so is looked up twenty times a second
(`/proc/vmstat`, 30 µs). While the kernel reclaims, nothing is remembered.

Used by readers of the tiers and of local shards. Any thread; a child of `fork()` remembers nothing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from time import monotonic
from typing import Any

GRANULE_BYTES = 1 << 17
_MADV_POPULATE_READ = 22
_LOOK_EVERY_S = 0.05
_RECLAIMED = re.compile(rb"^pgsteal_(?:anon|file) (\d+)$", re.MULTILINE)
_libc = ctypes.CDLL(None, use_errno=True)  # lets other threads run while the disk is waited for
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)


class MappedFile:
    """A file, open and mapped. The mapping goes when the last view of it goes, the descriptor with this object."""

    __slots__ = ("_address", "_path", "calm", "fd", "known", "map", "view")

    def __init__(self, path: str | os.PathLike[str], *, keep_open: bool = True, private: bool = False) -> None:
        """`keep_open`: have a descriptor, `fd`, besides the one that the mapping has. `private`: the mapping may be
        written to, which changes this process's copy of a page, never the file. `OSError` if the file cannot be opened,
        `ValueError` if it is empty."""
        self._path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        size_bytes = os.fstat(self.fd).st_size
        if private:
            self.map = mmap.mmap(self.fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        else:
            self.map = mmap.mmap(self.fd, size_bytes, prot=mmap.PROT_READ)
        self.view = memoryview(self.map)
        self._address = _address_of(self.map)
        self.known: set[int] = set()
        """The starts of the granules whose pages are in memory, if `calm` still is `reclaim.calm`: for callers that
        cannot afford to call `has`."""
        self.calm = -1
        if not keep_open:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)

    def has(self, piece: int, start: int, stop: int) -> bool:
        """Tell whether bytes `start:stop` are known to be in memory: they may be touched now, if the file is that long
        still. `piece`: where what they belong to begins, of which granules are remembered.
        """
        now_s = monotonic()
        if now_s >= reclaim.look_at_s:
            reclaim.look(now_s)
        if self.calm != reclaim.calm:
            return False
        at, known = piece + ((start - piece) & -GRANULE_BYTES), self.known
        while at < stop:
            if at not in known:
                return False
            at += GRANULE_BYTES
        return True

    def need(self, piece: int, end: int, start: int, stop: int) -> None:
        """Have bytes `start:stop` of the piece `piece:end` in memory, so that they may be touched now. Raises
        `OSError`: EFAULT where the file ends before, else what reading it raises (EIO: the disk failed). The file must
        not be cut short meanwhile, and the piece never be written again."""
        if self.has(piece, start, stop):
            return
        calm = reclaim.calm
        if not calm:
            self._ask(start, stop)
            return
        if self.calm != calm:
            self.known = set()  # before the number: another thread that sees that uses the new set
            self.calm = calm
        known = self.known
        for at in range(piece + ((start - piece) & -GRANULE_BYTES), stop, GRANULE_BYTES):
            if at not in known:
                self._ask(at, min(at + GRANULE_BYTES, end))
                known.add(at)

    def forget(self) -> None:
        """Remember nothing of what is in memory."""
        self.calm = -1

    def populate(self, start: int, stop: int) -> None:
        """Have bytes `start:stop` in memory, for a caller that goes through the file: the kernel reads ahead into large
        pages, and maps these in a third of the time. Raises as `need`; nothing is remembered."""
        first = start & -mmap.PAGESIZE
        while stop > start and _madvise(self._address + first, stop - first, _MADV_POPULATE_READ):
            if (code := ctypes.get_errno()) != errno.EINTR:
                self._read(start, stop)  # says why, or gets it after all: this kernel may not know how to populate
                if code != errno.EINVAL:
                    raise OSError(code, os.strerror(code))
                return

    def _ask(self, start: int, stop: int) -> None:
        first = start & -mmap.PAGESIZE
        # These pages and no others: a fault would have the disk read as much again on either side.
        _madvise(self._address + first, stop - first, mmap.MADV_WILLNEED)
        self.populate(start, stop)

    def _read(self, start: int, stop: int) -> None:
        fd = self.fd if self.fd >= 0 else os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while start < stop:
                count = len(os.pread(fd, min(stop - start, GRANULE_BYTES), start))
                if not count:
                    raise OSError(errno.EFAULT, "the file ends before")
                start += count
        finally:
            if fd != self.fd:
                os.close(fd)


class _Reclaim:
    """A look at whether the kernel takes pages back at present, which ends what mappings remember."""

    def __init__(self) -> None:
        self.calm = 0
        """The number of the calm that lasts; 0 if pages were reclaimed between the last two looks."""
        self._number = 0
        self.look_at_s = 0.0
        """The monotonic time from which on the next look is due."""
        self._reclaimed = -1
        try:
            self._fd = os.open("/proc/vmstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def look(self, now_s: float) -> None:
        """Look whether pages were reclaimed since the last look, if that was a while ago."""
        if now_s < self.look_at_s:
            return
        self.look_at_s = now_s + _LOOK_EVERY_S
        reclaimed = self._count()
        if reclaimed < 0 or reclaimed != self._reclaimed:
            self.calm = 0
        elif not self.calm:
            self._number += 1
            self.calm = self._number
        self._reclaimed = reclaimed

    def end(self) -> None:
        """End the calm."""
        self.calm, self._reclaimed = 0, -1

    def _count(self) -> int:
        """Return how many pages were reclaimed so far; -1 if nobody says."""
        try:
            counts = _RECLAIMED.findall(os.pread(self._fd, 1 << 16, 0))
        except OSError:
            return -1
        return sum(map(int, counts)) if counts else -1


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` (https://docs.python.org/3/c-api/buffer.html)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address_of(mapped: mmap.mmap) -> int:
    """Return where a mapping begins in this process's memory. Good for as long as it is mapped."""
    buffer: Any = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(mapped), ctypes.byref(buffer), 0)
    address = int(buffer.buf)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


reclaim = _Reclaim()
os.register_at_fork(after_in_child=reclaim.end)
