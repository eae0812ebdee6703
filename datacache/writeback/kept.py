"""What a read-write mount's server keeps for its successor, in memory that outlives the process: a log of changes.

The kernel goes on with the inode numbers and handles that it was told, and with requests that nobody has answered. So
what a server tells the kernel, and what is not durable yet, it notes here first: a few bytes copied into mapped memory
(memfd), which the mount's supervisor and the keeper hold along with the connection. Whoever gets the connection gets
this as well, and both are gone together. A power loss takes both: what it may take is the journal's to say.

What is changed in one *section*, that is while the engine's lock is held, is one record: the next server finds all of
it or nothing. Those who have something to keep are `Source`s: asked for what they changed when a section ends, and for
all that they have when the log has become much longer than that.

A record's length is written last, so one that its writer was killed at is not there; the number that says where the log
begins is written last as well when it is written anew. Both are stored by one machine instruction. A value is what
`marshal` takes, which reads what earlier versions of Python wrote, and makes nothing but such values.
"""

from __future__ import annotations

import marshal
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from types import TracebackType
from typing import Any, Protocol

from datacache.core.disk import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, allocate

MAGIC = b"dckept01"
"""Names the version of the items, too: a server that knows another one begins with nothing."""
_START_AT = len(MAGIC)
_START = struct.Struct("@Q")
_LENGTH = struct.Struct("@I")
"""In the machine's own order, which `struct` stores as a whole: in others it stores byte by byte."""
_PAGE = mmap.PAGESIZE
_STEP_BYTES = 4 * 2**20
_LEAST_BYTES = 8 * 2**20
"""A log that is shorter is not written anew."""
_TIMES_LIVE = 2
_MARSHAL_VERSION = 4
_ITEMS_AT_A_TIME = 500

Item = tuple[Any, ...]
"""What is kept, by its kind (a short string); of what, and what its owner wants to find again."""


class Source(Protocol):
    """Somebody who has something to keep. Called with the engine's lock held."""

    def take_changed(self) -> Iterable[Item]:
        """Return items of what was changed since the last call."""
        ...

    def everything(self) -> Iterable[Item]:
        """Return items that say all there is to keep, in place of all items before."""
        ...


class Keeping:
    """Keeps nothing: of a mount that ends with its server, and of an area that is only flushed."""

    def __init__(self) -> None:
        self._sources: list[Source] = []

    def watch(self, source: Source) -> None:
        """Keep what a source has, from now on."""
        self._sources.append(source)

    def items(self) -> Iterator[Item]:
        """Yield all items, the oldest first."""
        return iter(())

    def end_section(self) -> None:
        """Take what was changed. The engine's lock is held."""
        for source in self._sources:
            source.take_changed()

    def begin_anew(self) -> None:
        """Have what the sources have now in place of all before. The engine's lock is held."""


class KeptLog(Keeping):
    """See the module."""

    def __init__(self, fd: int) -> None:
        """`fd` is a memfd of `make`, this object's from now on. Raises `ValueError` for one of another version."""
        super().__init__()
        self._fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        if self._map[:_START_AT] != MAGIC:
            raise ValueError("the memory was kept by another version")
        (self._start,) = _START.unpack_from(self._map, _START_AT)
        self._end = self._start
        self._anew_bytes = 0
        for _ in self._records():
            pass
        self._clear(self._end)  # what its writer was killed at

    @classmethod
    def make(cls) -> KeptLog:
        """Make an empty one."""
        fd = os.memfd_create("datacache-mount", os.MFD_CLOEXEC)
        os.ftruncate(fd, _STEP_BYTES)
        os.pwrite(fd, MAGIC + _START.pack(_PAGE), 0)
        return cls(fd)

    def fileno(self) -> int:
        """Return the descriptor to hand on."""
        return self._fd

    def close(self) -> None:
        """Let go of it; the memory stays with whoever else has the descriptor."""
        self._map.close()
        os.close(self._fd)

    def items(self) -> Iterator[Item]:
        for record in self._records():
            yield from marshal.loads(record)  # noqa: S302 - an earlier process of ours wrote it

    def end_section(self) -> None:
        changed = [item for source in self._sources for item in source.take_changed()]
        if not changed:
            return
        self._end = self._append(self._end, changed)
        if self._end - self._start > max(_LEAST_BYTES, _TIMES_LIVE * self._anew_bytes):
            self.begin_anew()

    def begin_anew(self) -> None:
        items = (item for source in self._sources for item in source.everything())
        at = start = _page_after(self._end + _LENGTH.size)
        try:
            while group := list(islice(items, _ITEMS_AT_A_TIME)):
                at = self._append(at, group)
        except BaseException:
            self._clear(self._end)
            raise
        size = at + _LENGTH.size - start
        if size <= self._start - _PAGE:  # it fits before the old one, and does not wander off
            self._map[_PAGE : _PAGE + size] = self._map[start : start + size]
            start, at = _PAGE, _PAGE + at - start
        _START.pack_into(self._map, _START_AT, start)
        self._start, self._end, self._anew_bytes = start, at, at - start
        self._free(_PAGE, start)
        self._clear(at)

    def _clear(self, end: int) -> None:
        """Have nothing but zeros behind the log."""
        stop = _page_after(end)
        self._map[end:stop] = bytes(stop - end)
        self._free(stop, len(self._map))

    def _free(self, start: int, stop: int) -> None:
        if stop > start:
            allocate(self._fd, FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE, start, stop - start)

    def _records(self) -> Iterator[bytes]:
        at, size = self._start, len(self._map)
        while at + _LENGTH.size < size:
            (length,) = _LENGTH.unpack_from(self._map, at)
            if not length:
                break
            at += _LENGTH.size
            yield self._map[at : at + length]
            at += length
        self._end = at

    def _append(self, at: int, items: list[Item]) -> int:
        """Write a record; return where the next one begins."""
        content = marshal.dumps(items, _MARSHAL_VERSION)
        begin = at + _LENGTH.size
        end = begin + len(content)
        if end + _LENGTH.size > len(self._map):
            size = -(-(end + _LENGTH.size) // _STEP_BYTES) * _STEP_BYTES
            os.ftruncate(self._fd, size)
            self._map.resize(size)
        self._map[begin:end] = content
        _LENGTH.pack_into(self._map, at, len(content))
        return end


def _page_after(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE


class SectionLock:
    """A lock that its thread may take again, and whose outermost end ends a section."""

    def __init__(self, kept: Keeping) -> None:
        self._lock, self._depth, self._kept = threading.RLock(), 0, kept

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(
        self, _kind: type[BaseException] | None, _exc: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if self._depth == 1:
                self._kept.end_section()
        finally:
            self._depth -= 1
            self._lock.release()
