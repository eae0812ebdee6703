"""Read blocks from this node's tiers without asking another process: index lookup, mapping, checksum.

Every reading process uses this: a training script, a DataLoader worker, a mount worker, the daemon. Several threads may
call it. A child of `fork()` opens the index anew and keeps the read-only mappings. A broken container, index or disk is
a miss, never an error and never other bytes: the caller then asks the daemon, which repairs it. No page is touched that
the disk has not given (`core.mapped`), and a failing disk is asked ever less often (`health`).
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
from collections.abc import Callable, Sequence
from functools import partial
from os import SEEK_END, lseek
from pathlib import Path
from time import monotonic
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import lmdb
from xxhash import xxh3_64_intdigest

from datacache.core.concurrency import PerProcess, map_in_threads
from datacache.core.cores import cores
from datacache.core.counters import Counters, counters_of, folder_of_dataset
from datacache.core.errors import CacheError
from datacache.core.ids import (
    GRANULE_BYTES,
    BlockId,
    ObjectId,
    ObjectRef,
    block_id,
    object_id,
)
from datacache.core.mapped import MappedFile, reclaim
from datacache.tiers import layout
from datacache.tiers.containers import object_blocks, open_object_file
from datacache.tiers.health import health_of
from datacache.tiers.index import Index, open_index
from datacache.tiers.layout import OBJECT_FILE, Location, container_name, intact, unpack_location
from datacache.tiers.memory import AccessTable, is_private, make_shared, memory_dir

log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
_MAX_MAPS = 512
_MAX_SPOTS = 200_000
_SWEEP_EVERY_S = 1.0
_TOUCH_EVERY_S = 0.1
_MAX_FAILED = 10_000
_MAX_COUNTED = 64
"""Data sets whose reads a process counts apart: each takes an open file."""
_CHECKS = 4
"""Threads that verify a large object: more have a disk seek, and memory has no more to give."""
_DISK_ERRORS = frozenset({errno.EIO, errno.EUCLEAN, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO, errno.ESHUTDOWN})
"""Errors of opening a file that come from its disk; the others are about the file."""


class _Mapped(MappedFile):
    """A container's file, open and mapped."""

    __slots__ = ("container", "hit", "name", "touched_s")

    def __init__(self, folder: Path, container: int) -> None:
        self.container = container
        self.hit: Callable[[int, int], None] = _not_known_yet
        """Counts a hit of its data set: tier, bytes."""
        self.name = str(folder / container_name(container))
        self.touched_s = 0.0
        super().__init__(self.name)


class Spot(NamedTuple):
    """The place of a block in this process's memory: `start:end` of a mapping, and the number of the tier.

    A spot stays good for as long as it is kept: no container id is used twice, and an evicted container stays readable
    while it is mapped. `digest` is the one checksum of a block of one granule, else -1.
    """

    mapped: _Mapped
    start: int
    end: int
    digest: int
    sums: bytes
    tier: int


class LocalTier:
    """The containers of one tier, as a reader maps them."""

    def __init__(self, number: int, folder: Path) -> None:
        self._number = number
        self.folder = folder
        self.health = health_of(folder)
        self._maps: dict[int, _Mapped] = {}  # iterated over as a copy: other threads open containers meanwhile
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_maps = max(16, min(_MAX_MAPS, limit // 8))

    def spot(self, value: bytes) -> Spot | None:
        """Return the place that an index value names; None if its container was evicted meanwhile, or lost."""
        try:
            container, offset, length, sums = unpack_location(value)
            mapped = self._maps.get(container) or self._maps.setdefault(container, _Mapped(self.folder, container))
        except (OSError, ValueError) as exc:
            log.debug("a block in %s is not there: %s", self.folder, exc)
            if isinstance(exc, OSError) and exc.errno in _DISK_ERRORS:
                self.health.failed(exc)
            return None
        digest = int.from_bytes(sums, "little") if len(sums) == 8 else -1
        return Spot(mapped, offset, offset + length, digest, sums, self._number)

    def full(self) -> bool:
        """Tell whether as many containers are mapped as may be."""
        return len(self._maps) >= self._max_maps

    def close_some(self) -> bool:
        """Close evicted containers, so that their disk space comes free, and more where many are open."""
        gone = [c for c, mapped in self._maps.copy().items() if os.fstat(mapped.fd).st_nlink == 0]
        if self.full():
            gone += list(self._maps.copy())[: self._max_maps // 4]
        for container in gone:
            self._maps.pop(container, None)
        return bool(gone)

    def unmap_pages(self) -> None:
        """Keep the mappings, but none of their pages (madvise(2), MADV_DONTNEED on a file's mapping)."""
        for mapped in self._maps.copy().values():
            mapped.forget()
            mapped.map.madvise(mmap.MADV_DONTNEED)

    def forget(self, container: int) -> None:
        """Map a container anew at its next use."""
        self._maps.pop(container, None)


class LocalBlocks:
    """Look for blocks in all tiers of a node, fastest first. A block source (`reader.blocks`).

    The place of a block that was found is remembered, so the next read of it asks no index: one look at the container's
    size, a copy or a view, and the checksum.
    """

    def __init__(self, home: Path, ram_dir: Path, *, count_hits: bool = False) -> None:
        """`count_hits`: what is found counts as a read answered from its tier (`core.counters`)."""
        self._home, self._ram_dir, self._count_hits = home, ram_dir, count_hits
        self._index: PerProcess[list[Index]] = PerProcess(list)  # at most one: empty until there is an index
        self._spots: dict[BlockId, Spot] = {}
        self._sweep_at_s = 0.0
        self._failed: set[BlockId] = set()
        self._unread: set[BlockId] = set()
        self._use_memory(memory_dir(home, ram_dir))

    def copy(self, block: BlockId) -> bytes | None:
        """Return all bytes of a block, verified; None for a miss."""
        spot = self._spots.get(block)
        if spot is not None and spot.digest >= 0:
            mapped, start, end, digest, _, tier = spot
            now_s = monotonic()
            if now_s >= reclaim.look_at_s:
                reclaim.look(now_s)
            # Touching a mapping behind the end of its file is fatal (SIGBUS), so its size is looked at every time;
            # lseek tells it at a third of fstat's price.
            if mapped.calm == reclaim.calm and start in mapped.known and lseek(mapped.fd, 0, SEEK_END) >= end:
                data = mapped.map[start:end]
                if xxh3_64_intdigest(data) == digest:
                    if now_s > mapped.touched_s:
                        self._touch(mapped, now_s)
                    mapped.hit(tier, end - start)
                    return data
        found = self.view(block, 0, None)
        return None if found is None else bytes(found)

    def copy_into(self, block: BlockId, out: memoryview) -> bool:
        """Copy a whole block of exactly this length to `out`, and verify the copy while it is in the processor's cache.
        After False, a miss, `out` may hold anything."""
        spot = self._spots.get(block)
        if spot is not None:
            mapped, start, end, digest, sums, tier = spot
            if end - start == len(out) and self._readable(spot, start, end):
                out[:] = mapped.view[start:end]
                if xxh3_64_intdigest(out) == digest if digest >= 0 else intact(out, sums, 0, len(out)):
                    now_s = monotonic()
                    if now_s > mapped.touched_s:
                        self._touch(mapped, now_s)
                    mapped.hit(tier, end - start)
                    return True
        found = self.view(block, 0, None)
        if found is None or len(found) != len(out):
            return False
        out[:] = found
        return True

    def view(self, block: BlockId, start: int, stop: int | None) -> memoryview | None:
        """Return verified bytes `start:stop` of a block (to its end for None) without a copy; None for a miss.

        The view stays readable when its container is evicted. Keeping it keeps the container's disk space."""
        spot = self._spots.get(block)
        if spot is not None:
            view = self._verified(block, spot, start, stop)
            if view is not None:
                spot.mapped.hit(spot.tier, len(view))
                return view
            self._spots.pop(block, None)
        values = self._values(block)
        for number, value in values:
            spot = self.tiers[number].spot(value)
            if spot is not None:
                view = self._verified(block, spot, start, stop)
                if view is not None:
                    self._remember(block, spot)
                    spot.mapped.hit(number, len(view))
                    self._unread.discard(block)
                    return view
        if values and len(self._unread) < _MAX_FAILED:
            self._unread.add(block)
        return None

    def peek(self, block: BlockId, start: int, stop: int) -> memoryview | None:
        """As `view`, but do NOT verify a block that was found before: for callers that compare their own copy with a
        checksum of their own, while it is in the processor's cache."""
        spot = self._spots.get(block)
        if spot is None:
            return self.view(block, start, stop)
        mapped, first, end, _, _, tier = spot
        if first + stop > end or not self._readable(spot, first + start, first + stop):
            return self.view(block, start, stop)
        now_s = monotonic()
        if now_s > mapped.touched_s:
            self._touch(mapped, now_s)
        mapped.hit(tier, stop - start)
        return mapped.view[first + start : first + stop]

    def read(self, ref: ObjectRef, number: int, start: int, stop: int) -> memoryview | None:
        """Return verified bytes of a block of an object, as `view` does."""
        return self.view(block_id(object_id(ref), number), start, stop)

    def map_object(self, obj: ObjectId, size_bytes: int) -> mmap.mmap | None:
        """Return all bytes of an object, each verified now, as a mapping that its holder may write to: changed pages
        become the process's own, nothing else is copied. None unless one file of a tier has exactly these bytes.

        Keeping the mapping keeps the file's disk space. Pages that the kernel takes back meanwhile come from the disk
        again, as of any mapped file: nobody verifies them, and one that the disk cannot give is fatal (SIGBUS)."""
        found = (self._object_blocks(obj, size_bytes, number) for number in range(len(self.tiers)))
        number, blocks = next(((number, blocks) for number, blocks in enumerate(found) if blocks), (0, None))
        tier = self.tiers[number]
        if blocks is None or not tier.health.turn():
            return None
        path = tier.folder / container_name(blocks[0].container)

        def sound(block: Location) -> bool:
            start, stop = block.offset, block.offset + block.length
            file.populate(start, stop)
            return intact(file.view[start:stop], block.sums, 0, block.length)

        try:
            file = MappedFile(path, private=True)
            checked = len(file.map) == size_bytes and all(map_in_threads(sound, blocks, threads=min(_CHECKS, cores())))
        except (OSError, ValueError) as exc:
            if isinstance(exc, OSError) and exc.errno in _DISK_ERRORS:
                tier.health.failed(exc)
            log.debug("%s cannot be mapped: %s", path, exc)
            return None
        tier.health.worked()
        if not checked:
            log.warning("%s is not what the index says: its blocks are read one by one", path)
            return None
        self._access.touch(blocks[0].container)
        hit = self._counter_of(number, blocks[0].container)
        for block in blocks:
            hit(number, block.length)
        return file.map

    def has(self, block: BlockId) -> bool:
        """Tell whether the index has a block in a tier whose disk works, bytes unseen."""
        return bool(self._values(block))

    def missing(self, blocks: Sequence[BlockId], *, on_disk: bool = False) -> list[int]:
        """Return the positions of the blocks that `has` denies, with one look at the index. `on_disk`: also of those
        that are in RAM only."""
        tiers = [number for number, tier in reversed(list(enumerate(self.tiers))) if not tier.health.away()]
        if on_disk:
            tiers = [number for number in tiers if number]
        gone = self._ask(Index.missing, blocks, tiers)
        return list(range(len(blocks))) if gone is None else gone

    def has_index(self) -> bool:
        """Tell whether there is an index. A look for it takes as long as reading a small file, and before the daemon's
        first start each question is one."""
        return bool(self._ask(Index.whole))

    def any_unchecked(self) -> bool:
        """Tell whether the tiers have blocks of a large object that was not checked as a whole."""
        return bool(self._ask(Index.any_unchecked))

    def failed(self, block: BlockId) -> bool:
        """Tell whether a disk failed to give a block since the last such question."""
        try:
            self._failed.remove(block)
        except KeyError:
            return False
        return True

    def unread(self, block: BlockId) -> bool:
        """Tell whether the last `view` failed to give a block although the index has it. For callers that have just
        called `view` in vain: cheaper than `has`."""
        return block in self._unread

    def present(self, block: BlockId) -> bool:
        """Tell whether a tier has a block by the index, in a container that is there and long enough, bytes unread."""
        for number, value in self._values(block):
            tier = self.tiers[number]
            if tier.full():
                self.sweep()
            spot = tier.spot(value)
            if spot is not None:
                status = os.fstat(spot.mapped.fd)
                if status.st_nlink and status.st_size >= spot.end:
                    return True
        return False

    def object_file(self, obj: ObjectId, size_bytes: int) -> int | None:
        """Return the number of the SSD's file of exactly a large object, none of whose blocks came after the last check
        of the whole object; None if there is none. By the index: bytes unseen."""
        blocks = self._object_blocks(obj, size_bytes)
        if blocks is None or self._ask(Index.is_unchecked, obj) is not False:
            return None
        number = blocks[0].container & ~OBJECT_FILE
        return number if self.has_object_file(number) else None

    def open_object_file(self, obj: ObjectId, size_bytes: int) -> tuple[int, int] | None:
        """Return number and descriptor, the caller's, of the SSD's file of exactly a large object. Every byte has just
        been verified. None if there is none, whatever the reason."""
        blocks = self._object_blocks(obj, size_bytes)
        if blocks is None:
            return None
        fd = open_object_file(layout.ssd_dir(self._home), blocks)
        return None if fd is None else (blocks[0].container & ~OBJECT_FILE, fd)

    def has_object_file(self, number: int) -> bool:
        """Tell whether the SSD still has an object's file: it was not evicted."""
        return os.path.exists(layout.ssd_dir(self._home) / container_name(number | OBJECT_FILE))

    def touch_object_file(self, number: int) -> None:
        """Note that an object's file is read now, past this process, so that it is not evicted as unused."""
        self._access.touch(number | OBJECT_FILE)

    def sweep(self) -> None:
        """Let go of evicted containers, so that their room comes free. Reading does it now and then; a process that may
        not read for long calls it about once a second."""
        self._sweep_at_s = monotonic() + _SWEEP_EVERY_S
        closed = [tier.close_some() for tier in self.tiers]
        if any(closed):
            self._spots.clear()  # they hold the mappings

    def unmap_pages(self) -> None:
        """Give the mapped pages back to the kernel, which keeps them cached: for callers that go through more data than
        fits into the memory a process should have. Reading maps them again."""
        for tier in self.tiers:
            tier.unmap_pages()

    def counters_for(self, dataset: str) -> Counters:
        """Return this process's counters for a data set. One that reads from very many has one set for the rest."""
        found = self._counters_of.get(dataset)
        if found is None:
            many = len(self._counters_of) >= _MAX_COUNTED
            above = self._memory / "counters"

            def make(folder: Path) -> None:
                make_shared(above, home=self._home)
                folder.mkdir(mode=0o700, exist_ok=True)

            folder = above if many else folder_of_dataset(above, dataset)
            found = self.counters if folder == above else counters_of(folder, make)
            self._counters_of[dataset] = found
        return found

    def _counter_of(self, tier: int, container: int) -> Callable[[int, int], None]:
        if not self._count_hits:
            return _count_nothing
        return self.counters_for(self._ask(Index.dataset_of, tier, container) or "").hit

    def drop_pages(self, block: BlockId) -> None:
        """Let go of the SSD's cached pages of a block: the kernel keeps its bytes elsewhere, as a mount's pages."""
        spot = self._spots.get(block)
        if spot is not None and spot.tier:
            os.posix_fadvise(spot.mapped.fd, spot.start, spot.end - spot.start, os.POSIX_FADV_DONTNEED)

    def refresh(self) -> None:
        """Look again whether the index is still the one in use. To be called after a miss."""
        held = self._index.get()
        if held and not held[0].current():
            held.clear()

    def _object_blocks(self, obj: ObjectId, size_bytes: int, tier: int = 1) -> list[Location] | None:
        return None if self.tiers[tier].health.away() else self._ask(object_blocks, obj, size_bytes, tier)

    def _verified(self, block: BlockId, spot: Spot, start: int, stop: int | None) -> memoryview | None:
        mapped, first, end, digest, sums, _ = spot
        stop = end - first if stop is None else stop
        if digest >= 0:
            needed, until = first, end
        else:  # whole granules, each of which has a checksum
            needed = first + start // GRANULE_BYTES * GRANULE_BYTES
            until = min(first + -(-stop // GRANULE_BYTES) * GRANULE_BYTES, end)
        if not self._readable(spot, needed, until, block):
            return None
        view = mapped.view[first:end]
        sound = xxh3_64_intdigest(view) == digest if digest >= 0 else intact(view, sums, start, stop)
        if not sound or stop > len(view):
            mapped.forget()  # what repairs it may write it in its place
            log.warning("a block in %s at %d does not have its checksum", mapped.name, first)
            return None
        now_s = monotonic()
        if now_s > mapped.touched_s:
            self._touch(mapped, now_s)
        return view[start:stop]

    def _readable(self, spot: Spot, start: int, stop: int, block: BlockId | None = None) -> bool:
        """Tell whether bytes `start:stop` of a container may be touched. Note `block` as failed if its disk failed."""
        mapped, first, end, *_, number = spot
        if lseek(mapped.fd, 0, SEEK_END) < end:  # as in `copy`
            log.warning("%s is truncated", mapped.name)
            self._forget(spot)
            return False
        if mapped.has(first, start, stop):
            return True
        health = self.tiers[number].health
        if not health.turn():
            return False
        try:
            mapped.need(first, end, start, stop)
        except OSError as exc:
            if exc.errno != errno.EFAULT:
                health.failed(exc)
                if block is not None and len(self._failed) < _MAX_FAILED:
                    self._failed.add(block)
            return False
        health.worked()
        return True

    def _touch(self, mapped: _Mapped, now_s: float) -> None:
        mapped.touched_s = now_s + _TOUCH_EVERY_S
        self._access.touch(mapped.container)
        if now_s > self._sweep_at_s:
            self.sweep()

    def _remember(self, block: BlockId, spot: Spot) -> None:
        if self.tiers[spot.tier].full():
            self.sweep()
        if len(self._spots) >= _MAX_SPOTS:
            self._spots.clear()
        if spot.mapped.hit is _not_known_yet:
            spot.mapped.hit = self._counter_of(spot.tier, spot.mapped.container)
        self._spots[block] = spot

    def _forget(self, spot: Spot) -> None:
        self.tiers[spot.tier].forget(spot.mapped.container)
        for block, other in self._spots.copy().items():
            if other.mapped is spot.mapped:
                self._spots.pop(block, None)

    def _values(self, block: BlockId) -> list[tuple[int, bytes]]:
        """Return (tier, index value) of a block in each tier whose disk works."""
        found = self._ask(Index.find, block) or []
        ram, ssd = self.tiers
        if ssd.health.away() or ram.health.away():
            return [(number, value) for number, value in found if not self.tiers[number].health.away()]
        return found

    def _ask(self, question: Callable[Concatenate[Index, P], T], *about: P.args, **named: P.kwargs) -> T | None:
        """Ask the index; None if there is no sound one."""
        held = self._index.get()
        try:
            if not held:
                held.append(self._open_index())
            index = held[0]
            if index.whole():
                return question(index, *about, **named)
            log.warning("the index %s is truncated", index.folder)
            held.clear()
        except CacheError as exc:  # before the daemon's first start there is none
            log.debug("%s", exc)
        except (lmdb.Error, OSError, IndexError, ValueError) as exc:
            log.warning("the index of %s cannot be read: %s", self._home, exc)
            held.clear()
        return None

    def _open_index(self) -> Index:
        folder = memory_dir(self._home, self._ram_dir)
        if folder != self._memory:
            self._use_memory(folder)
        if not is_private(folder):
            raise CacheError(f"{folder} is not there, or not a folder of this user alone")
        return open_index(layout.index_dir(folder))

    def _use_memory(self, folder: Path) -> None:
        self._memory = folder
        self._access = AccessTable(folder / "access.bin")
        self.counters: Counters = counters_of(folder / "counters", partial(make_shared, home=self._home))
        self._counters_of: dict[str, Counters] = {}
        self.tiers = (LocalTier(0, folder), LocalTier(1, layout.ssd_dir(self._home)))


class BypassedBlocks(LocalBlocks):
    """The tiers of a process that must not read them: every block is a miss."""

    def _ask(self, question: Callable[Concatenate[Index, P], T], *about: P.args, **named: P.kwargs) -> T | None:
        return None


def _count_nothing(tier: int, size_bytes: int) -> None:
    """Count no hit: the daemon looks at blocks for its own work."""


def _not_known_yet(tier: int, size_bytes: int) -> None:
    """Count no hit: nobody has looked yet whose the container is."""
