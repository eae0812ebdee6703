"""When published orders read each unit: tables of numpy arrays, for policy `clairvoyant`. No threads of its own.

A *unit* is what an order reads of an object: all of it (orders of rows), or one of its blocks (orders of parts).
Memory: 4 bytes a sample and 4 a unit for each order, 20 a unit, and 24 for each cached block that an order knows.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from datacache.core.ids import BLOCK_BYTES
from datacache.daemon.orders.plan import Plan, PlanObjects
from datacache.tiers.layout import LOCATION, OBJECT_FILE
from datacache.tiers.tier import Placed

NEVER = np.iinfo(np.int64).max


class Units:
    """The units of some objects, and the unit of each block."""

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
        """Return the unit of a block of an object."""
        return int(self._first[row]) + (number if self.parts else 0)

    def of_items(self, items: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the units that items read, and the item of each."""
        places = np.arange(len(items), dtype=np.int64)
        if not self.parts:
            return items[:, 0].astype(np.int64), places
        rows = items[:, 0].astype(np.int64)
        start = self._first[rows] + items[:, 1]
        counts = np.clip(np.minimum(start + items[:, 2], self._first[rows + 1]) - start, 0, None)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(start, counts) + within, np.repeat(places, counts)

    def of_blocks(self, ids: NDArray[np.uint64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the units of blocks, by the first eight bytes of their objects' ids, and their numbers; -1 for none.
        (Of two objects whose ids begin alike, which is one in 10^19, one may be taken for the other.)"""
        if not len(self._ids):
            return np.full(len(ids), -1)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        rows = self._rows[at].astype(np.int64)
        units = self._first[rows] + (numbers if self.parts else 0)
        return np.where((self._ids[at] == ids) & (units < self._first[rows + 1]), units, -1)

    def of_object(self, id: bytes) -> NDArray[np.int64]:
        """Return all units of an object, none if it is not among these."""
        (unit,) = self.of_blocks(np.frombuffer(id[:8], "<u8"), np.zeros(1, np.int64))
        if unit < 0:
            return np.empty(0, np.int64)
        row = int(np.searchsorted(self._first, unit, side="right")) - 1
        return np.arange(self._first[row], self._first[row + 1])


class Uses:
    """The places where one order reads each unit."""

    def __init__(self, plan: Plan, units: Units) -> None:
        which, places = units.of_items(plan.items)
        order = np.argsort(which, kind="stable")
        self._places = places[order].astype(np.uint32)
        self._starts = np.zeros(units.count + 1, np.uint32)
        self._starts[1:] = np.cumsum(np.bincount(which, minlength=units.count))
        self.end = len(plan.items)

    def after(self, units: NDArray[np.int64], place: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each unit the first place at or behind `place` that reads it (`NEVER` if none does), and how many
        do."""
        low, stop = self._starts[units].astype(np.int64), self._starts[units + 1].astype(np.int64)
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
        """Return the first place at or behind `place` that reads a unit."""
        start, stop = int(self._starts[unit]), int(self._starts[unit + 1])
        at = bisect_left(self._places, place, start, stop)
        return int(self._places[at]) if at < stop else None


class Contents:
    """The units that the regions of a tier hold, and where in them."""

    def __init__(self) -> None:
        self._of: dict[int, NDArray[np.int64]] = {}  # container → columns unit, offset, length

    def add_index(
        self, units: Units, index: Iterable[Sequence[tuple[bytes, bytes]]], over: Callable[[], bool] = lambda: False
    ) -> None:
        """Add the index, some blocks and their values at a time. Ends early once `over()`, and adds nothing then."""
        found = [_known(units, *_unpack(entries)) for entries in index if not over()]
        if found and not over():
            self._add(*(np.concatenate(columns) for columns in zip(*found, strict=True)))

    def add_placed(self, units: Units, placed: Iterable[Placed]) -> None:
        """Add the blocks that were put into regions since."""
        found = list(placed)
        if not found:
            return
        keys = np.frombuffer(b"".join(p.block for p in found), np.uint8).reshape(-1, 20)
        where = np.array([(p.container, p.offset, p.length) for p in found], np.int64)
        self._add(*_known(units, keys, where))

    def keep_only(self, containers: Iterable[int]) -> None:
        """Forget evicted containers."""
        kept = set(containers)
        self._of = {id: rows for id, rows in self._of.items() if id in kept}

    def of(self, container: int) -> NDArray[np.int64]:
        """Return rows of unit, offset and length, by offset."""
        found = self._of.get(container)
        return np.empty((0, 3), np.int64) if found is None else found

    def _add(self, containers: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Add rows with one sort for all; a container's first row at an offset counts."""
        order = np.lexsort((rows[:, 1], containers))
        containers, rows = containers[order], rows[order]
        starts = np.flatnonzero(np.concatenate(([True], containers[1:] != containers[:-1])))
        for start, stop in itertools.pairwise((*starts.tolist(), len(rows)) if len(rows) else ()):
            container, more = int(containers[start]), rows[start:stop]
            before = self._of.get(container)
            if before is not None:
                more = np.concatenate([before, more])
            self._of[container] = more[np.unique(more[:, 1], return_index=True)[1]]


def _unpack(entries: Sequence[tuple[bytes, bytes]]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return block ids, and columns of container, offset and length."""
    keys = np.frombuffer(b"".join(key for key, _ in entries), np.uint8).reshape(-1, 20)
    raw = b"".join(value[: LOCATION.size] for _, value in entries)
    where = np.frombuffer(raw, [("container", "<u4"), ("offset", "<u8"), ("length", "<u4")])
    return keys, np.stack([where[name].astype(np.int64) for name in ("container", "offset", "length")], axis=1)


def _known(
    units: Units, keys: NDArray[np.uint8], where: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return containers and rows of those blocks that are units and lie in regions."""
    ids = np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0]
    numbers = np.ascontiguousarray(keys[:, 16:]).view(">u4")[:, 0].astype(np.int64)
    which = units.of_blocks(ids, numbers)
    known = (which >= 0) & ((where[:, 0] & OBJECT_FILE) == 0)
    return where[known, 0], np.stack([which, where[:, 1], where[:, 2]], axis=1)[known]
