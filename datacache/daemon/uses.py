"""When published orders read what: tables of numpy arrays, for policy `clairvoyant`. Pure, no threads of its own.

A *unit* is what an order reads of an object: all of it (orders of rows), or one of its blocks (orders of parts).
Memory: 4 bytes a sample and 8 a unit for each order, 20 a unit, and 24 for each cached block that an order knows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from datacache.core.objects import BLOCK_BYTES
from datacache.daemon.plan import Plan, PlanObjects
from datacache.tiers.layout import LOCATION, OBJECT_FILE
from datacache.tiers.tier import Placed

NEVER = np.iinfo(np.int64).max


class Units:
    """The units of some objects, and which block is which unit."""

    def __init__(self, objects: PlanObjects, *, parts: bool) -> None:
        """The objects must be complete."""
        self.parts = parts
        blocks = -(-objects.sizes.astype(np.int64) // BLOCK_BYTES) if parts else np.ones(objects.rows, np.int64)
        self._first = np.concatenate(([0], np.cumsum(blocks)))
        self.count = int(self._first[-1])
        ids = objects.ids()
        self._rows = np.argsort(ids, kind="stable").astype(np.uint32)
        self._ids = ids[self._rows]

    def of_row(self, row: int, number: int) -> int:
        """The unit of a block of an object."""
        return int(self._first[row]) + (number if self.parts else 0)

    def of_items(self, items: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The units that items read, and which item it is for each."""
        places = np.arange(len(items), dtype=np.int64)
        if not self.parts:
            return items[:, 0].astype(np.int64), places
        rows = items[:, 0].astype(np.int64)
        start = self._first[rows] + items[:, 1]
        counts = np.clip(np.minimum(start + items[:, 2], self._first[rows + 1]) - start, 0, None)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(start, counts) + within, np.repeat(places, counts)

    def of_blocks(self, ids: NDArray[np.uint64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The units of blocks: the first eight bytes of their objects' ids, and their numbers. -1 where there is none.
        (Of two objects whose ids begin alike, which is one in 10^19, one may be taken for the other.)"""
        if not len(self._ids):
            return np.full(len(ids), -1)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        rows = self._rows[at].astype(np.int64)
        units = self._first[rows] + (numbers if self.parts else 0)
        return np.where((self._ids[at] == ids) & (units < self._first[rows + 1]), units, -1)

    def of_object(self, id: bytes) -> NDArray[np.int64]:
        """All units of an object, none if it is not among these."""
        (unit,) = self.of_blocks(np.frombuffer(id[:8], "<u8"), np.zeros(1, np.int64))
        if unit < 0:
            return np.empty(0, np.int64)
        row = int(np.searchsorted(self._first, unit, side="right")) - 1
        return np.arange(self._first[row], self._first[row + 1])


class Uses:
    """When one order reads each unit."""

    def __init__(self, plan: Plan, units: Units) -> None:
        which, places = units.of_items(plan.items)
        order = np.argsort(which, kind="stable")
        self._places = places[order].astype(np.uint32)
        self._starts = np.concatenate(([0], np.cumsum(np.bincount(which, minlength=units.count))))
        self.end = len(plan.items)

    def after(self, units: NDArray[np.int64], place: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each unit the first place at or behind `place` that reads it (`NEVER` if none does), and how many do."""
        low, stop = self._starts[units], self._starts[units + 1]
        high = stop.copy()
        while True:  # bisection, for all of them at a time
            going = low < high
            if not going.any():
                break
            middle = (low + high) // 2
            less = going & (self._places[np.minimum(middle, len(self._places) - 1)] < place)
            low, high = np.where(less, middle + 1, low), np.where(going & ~less, middle, high)
        found = low < stop
        first = np.full(len(units), NEVER)
        first[found] = self._places[low[found]]
        return first, stop - low

    def next_place(self, unit: int, place: int) -> int | None:
        """The first place at or behind `place` that reads a unit."""
        start, stop = int(self._starts[unit]), int(self._starts[unit + 1])
        at = bisect_left(self._places, place, start, stop)
        return int(self._places[at]) if at < stop else None


class Contents:
    """Which units the regions of a tier hold, and where in them."""

    def __init__(self) -> None:
        self._of: dict[int, NDArray[np.int64]] = {}  # container → columns unit, offset, length

    def add_entries(self, units: Units, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Some of the index: blocks and their values."""
        keys = np.frombuffer(b"".join(key for key, _ in entries), np.uint8).reshape(-1, 20)
        raw = b"".join(value[: LOCATION.size] for _, value in entries)
        where = np.frombuffer(raw, [("container", "<u4"), ("offset", "<u8"), ("length", "<u4")])
        self._add(units, keys, where["container"], np.stack([where["offset"], where["length"]]).astype(np.int64))

    def add_placed(self, units: Units, placed: Iterable[Placed]) -> None:
        """What was put into regions since."""
        found = list(placed)
        if not found:
            return
        keys = np.frombuffer(b"".join(p.block for p in found), np.uint8).reshape(-1, 20)
        where = np.array([(p.offset, p.length) for p in found], np.int64).reshape(-1, 2).T
        self._add(units, keys, np.array([p.container for p in found], np.int64), where)

    def keep_only(self, containers: Iterable[int]) -> None:
        """Forget what was evicted."""
        kept = set(containers)
        self._of = {id: rows for id, rows in self._of.items() if id in kept}

    def of(self, container: int) -> NDArray[np.int64]:
        """Rows of unit, offset and length, by offset."""
        found = self._of.get(container)
        return np.empty((0, 3), np.int64) if found is None else found

    def _add(
        self, units: Units, keys: NDArray[np.uint8], containers: NDArray[np.int64], where: NDArray[np.int64]
    ) -> None:
        ids = np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0]
        numbers = np.ascontiguousarray(keys[:, 16:]).view(">u4")[:, 0].astype(np.int64)
        which = units.of_blocks(ids, numbers)
        rows = np.stack([which, *where], axis=1)
        known = (which >= 0) & ((containers & OBJECT_FILE) == 0)
        containers, rows = containers[known], rows[known]
        for container in np.unique(containers).tolist():
            more = np.concatenate([self.of(container), rows[containers == container]])
            self._of[container] = more[np.unique(more[:, 1], return_index=True)[1]]
