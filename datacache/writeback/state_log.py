"""Keep a read-write mount's state for the next server, in memory that outlives the process: a log of changes.

The kernel goes on with the inode numbers and handles that it was told, and with requests that nobody has answered. So
what a server tells the kernel, and what is not durable yet, it notes here first: a few bytes copied into mapped memory
(memfd), which the mount's supervisor and the keeper hold along with the connection. Whoever gets the connection gets
this as well, and both are gone together. A power loss takes both: what it may take is the journal's to say.

What is changed in one *section*, that is while the engine's lock is held, is one record: the next server finds all of
it or nothing. Those who have something to keep are `StateSource`s: they note what they change, describe when a section
ends what is better described once, and are asked for all that they have when the log has become much longer than that.

The bytes of small files that are being written lie in `Slots` of the same memory, and the log says in which.

A record's length is written last, so one that its writer was killed at is not there; the number that says where the log
begins is written last as well when it is written anew. Both are stored by one machine instruction. A value is what
`marshal` takes, which reads what earlier versions of Python wrote, and makes nothing but such values.
"""

from __future__ import annotations

import marshal
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from datacache.core.disk import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, allocate

MAGIC = b"dckept02"
"""Names the version of the items, too: a server that knows another one begins with nothing."""
_START_AT, _SIZE_AT = 8, 16
_NUMBER = struct.Struct("@Q")
_LENGTH = struct.Struct("@I")
"""In the machine's own order, which `struct` stores as a whole: in others it stores byte by byte."""
_PAGE = mmap.PAGESIZE
_STEP_BYTES = 4 * 2**20
_LEAST_BYTES = 8 * 2**20
"""A log that is shorter is not written anew."""
_TIMES_LIVE = 2
_SLOTS_AT = 1 << 36
"""Where slots begin in the memory, which has nothing in between."""
SLOT_BYTES = 256 * 1024
_SLOTS_AT_A_TIME = 16
_MOST_WARM = 16
"""Free slots that keep their memory."""
_MOST_SLOTS = 256
"""Slots that take bytes: 64 MiB. Of files that are open beside as many, what is written goes to the disk."""
_MARSHAL_VERSION = 4
_ITEMS_AT_A_TIME = 500

Item = tuple[Any, ...]
"""One thing that is kept: its kind (a short string), of what it is, and what its owner wants to find again."""


class StateSource(Protocol):
    """A part that has something to keep. Called with the engine's lock held."""

    def describe(self, changed: set[Any]) -> list[Item]:
        """Return items of what this source has put into `StateLog.changed`."""
        ...

    def everything(self) -> Iterable[Item]:
        """Return items that say all there is to keep, in place of all items before."""
        ...


class Slot:
    """Memory of `SLOT_BYTES` bytes. What it had before is in it still."""

    __slots__ = ("memory", "number", "ticket")

    def __init__(self, number: int, memory: memoryview) -> None:
        self.number, self.memory = number, memory
        self.ticket = 0
        """Of the last record whose bytes are these: they are needed until it is durable."""


class Slots:
    """Memory of a memfd, or of this process alone, by numbers. The engine's lock is held."""

    def __init__(self, fd: int = -1) -> None:
        self._fd = fd
        self._maps: list[mmap.mmap] = []
        self._free: list[int] = []
        self._cold: list[int] = []

    @property
    def inline_bytes(self) -> int:
        """Return up to which size bytes may lie in a slot now: 0 while very many are taken."""
        taken = len(self._maps) * _SLOTS_AT_A_TIME - len(self._free) - len(self._cold)
        return SLOT_BYTES if taken <= _MOST_SLOTS else 0

    def take(self) -> Slot:
        """Return a slot that nobody has: the one that was given back last."""
        if not self._free:
            self._map_more()
        return self._slot(self._free.pop())

    def take_up(self, number: int) -> Slot:
        """Return the slot that an earlier process has had under this number."""
        while number >= len(self._maps) * _SLOTS_AT_A_TIME:
            self._map_more()
        self._free.remove(number)
        return self._slot(number)

    def look(self, number: int, size: int) -> bytes:
        """Return bytes that an earlier process has left in a slot."""
        return os.pread(self._fd, size, _SLOTS_AT + number * SLOT_BYTES)

    def give_back(self, slot: Slot) -> None:
        """Let somebody else have a slot."""
        slot.memory.release()
        (self._free if len(self._free) < _MOST_WARM else self._cold).append(slot.number)

    def end_section(self) -> None:
        """Give back the memory of slots, once it is written down that nobody has them."""
        for number in self._cold:
            chunk, place = divmod(number, _SLOTS_AT_A_TIME)
            self._maps[chunk].madvise(mmap.MADV_REMOVE, place * SLOT_BYTES, SLOT_BYTES)
        self._free[:0] = self._cold
        self._cold.clear()

    def _slot(self, number: int) -> Slot:
        chunk, place = divmod(number, _SLOTS_AT_A_TIME)
        return Slot(number, memoryview(self._maps[chunk])[place * SLOT_BYTES : (place + 1) * SLOT_BYTES])

    def _map_more(self) -> None:
        first, size = len(self._maps) * _SLOTS_AT_A_TIME, _SLOTS_AT_A_TIME * SLOT_BYTES
        if self._fd < 0:
            self._maps.append(mmap.mmap(-1, size))
        else:
            begin = _SLOTS_AT + first * SLOT_BYTES
            if os.fstat(self._fd).st_size < begin + size:
                os.ftruncate(self._fd, begin + size)
            self._maps.append(mmap.mmap(self._fd, size, offset=begin))
        self._free[:0] = reversed(range(first, first + _SLOTS_AT_A_TIME))


class StateLog:
    """Keep nothing: of a mount that ends with its server, and of an area that is only flushed."""

    def __init__(self, slots: Slots | None = None) -> None:
        self._sources: list[StateSource] = []
        self.slots = slots or Slots()
        self.noted: list[Item] = []
        """Items of what was changed in this section, in order."""
        self.changed: set[Any] = set()
        """Things that were changed in this section, for their source to `describe`."""

    def watch(self, source: StateSource) -> None:
        """Keep what a source has, from now on."""
        self._sources.append(source)

    def items(self) -> Iterator[Item]:
        """Yield all items, the oldest first."""
        return iter(())

    def end_section(self) -> None:
        """Keep what was changed. The engine's lock is held."""
        self.noted.clear()
        self.changed.clear()
        self.slots.end_section()

    def begin_anew(self) -> None:
        """Have what the sources have now in place of all before. The engine's lock is held."""


class MemfdStateLog(StateLog):
    """A log of changes in a memfd (see the module)."""

    def __init__(self, fd: int) -> None:
        """`fd` is a memfd of `make`, this object's from now on. Raises `ValueError` for one of another version."""
        super().__init__(Slots(fd))
        self._fd = fd
        if os.pread(fd, len(MAGIC), 0) != MAGIC:
            raise ValueError("the memory was kept by another version")
        (size,) = _NUMBER.unpack(os.pread(fd, _NUMBER.size, _SIZE_AT))
        self._map = mmap.mmap(fd, size)
        (self._start,) = _NUMBER.unpack_from(self._map, _START_AT)
        self._end = self._start
        self._anew_bytes = 0
        self._wants_anew = False
        """True once a record could not be written: what is missing can be had from the sources only."""
        self._may_begin_anew = False
        """False until all sources are there."""
        for _ in self._records():
            pass
        self._clear(self._end)  # what its writer was killed at

    @classmethod
    def make(cls) -> MemfdStateLog:
        """Make an empty one."""
        fd = os.memfd_create("datacache-mount", os.MFD_CLOEXEC)
        os.ftruncate(fd, _STEP_BYTES)
        os.pwrite(fd, MAGIC + _NUMBER.pack(_PAGE) + _NUMBER.pack(_STEP_BYTES), 0)
        return cls(fd)

    def fileno(self) -> int:
        """Return the descriptor to hand on."""
        return self._fd

    def items(self) -> Iterator[Item]:
        for record in self._records():
            yield from marshal.loads(record)  # noqa: S302 - an earlier process of ours wrote it

    def end_section(self) -> None:
        if not (self._wants_anew and self._may_begin_anew):
            self._end_record()
        is_long = self._end - self._start > max(_LEAST_BYTES, _TIMES_LIVE * self._anew_bytes)
        if self._may_begin_anew and (self._wants_anew or is_long):
            self.begin_anew()
        self.slots.end_section()

    def _end_record(self) -> None:
        noted, changed = self.noted, self.changed
        try:
            if changed:
                for source in self._sources:
                    noted += source.describe(changed)
            self._end = self._append(self._end, noted)
        except BaseException:
            self._wants_anew = True  # when the next section ends: what was noted stays until then
            raise
        noted.clear()
        changed.clear()

    def begin_anew(self) -> None:
        self._may_begin_anew = True
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
        _NUMBER.pack_into(self._map, _START_AT, start)
        self._start, self._end, self._anew_bytes, self._wants_anew = start, at, at - start, False
        self._free(_PAGE, start)
        self._clear(at)
        self.noted.clear()  # it is among all the rest
        self.changed.clear()

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
            if os.fstat(self._fd).st_size < size:
                os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
            _NUMBER.pack_into(self._map, _SIZE_AT, size)
        self._map[begin:end] = content
        _LENGTH.pack_into(self._map, at, len(content))
        return end


def _page_after(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE
