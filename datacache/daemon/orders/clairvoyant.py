"""Policy `clairvoyant` at work: evict what published orders never read, then what they read least and last.

A region goes as a whole, and holds blocks of every kind: those read soon, or more often than most, are moved into other
regions first (at most three quarters of it), into lanes by when they are read next, so that blocks read at about the
same time lie together and lose their use together. Reasons and measurements:
docs/decisions/0010-clairvoyant-eviction.md.

One thread makes room (`lookahead.Room`); plans come and go in any. The writer thread appends moved blocks, some MiB at
a time, and evicts; all that takes longer is done here.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from datacache.core.ids import BlockId
from datacache.daemon.orders.plan import Plan, PlanObjects, Wanted
from datacache.daemon.orders.uses import NEVER, Contents, Units, Uses
from datacache.tiers import layout
from datacache.tiers.containers import open_region_size
from datacache.tiers.layout import RECORD, RECORD_MAGIC, aligned, container_name
from datacache.tiers.tier import Block, Outlook, Placed, Tier
from datacache.tiers.writer import TierWriter

log = logging.getLogger(__name__)
_MAX_LANES = 4
_REGIONS_A_LANE = 12
_MOVED_SHARE = 0.75
_LEFT_QUANTILE = 0.3
"""This part of all cached blocks, read least and last, is not moved when its region goes."""
_LATE = 0.5
"""How much less a read at the end of what is known counts than one right now."""
_SLICE_BYTES = 8 * 2**20
_IN_MEMORY_BYTES = 64 * 2**20
_MANY_PLACED = 20_000
_RATINGS = 200
"""The number of steps that a plan's samples are divided into: all cached blocks are rated once in each."""
_KEPT_S = 300.0
"""How long a closed plan counts on, and its objects are remembered: the next epoch's plan is to come."""


class _Container(NamedTuple):
    """A container that may go, as the writer thread tells it."""

    id: int
    dataset: str
    disk_bytes: int
    object_id: str


class _Rated(NamedTuple):
    """A container that may go, and what published orders read of it."""

    container: _Container
    group: _Group | None
    """The group of these units; None if plans of several snapshots read it."""
    value: float
    """See `ContainerState.value`, windows not counted."""
    soon: float
    """The share of its bytes that is in a window."""
    rows: NDArray[np.int64]
    """Unit, offset, length of each of its blocks; none for an object file."""
    values: NDArray[np.float64]
    must: NDArray[np.bool_]
    """True for each of these blocks that is in a window."""


class _Rating(NamedTuple):
    """The result of the last rating of all cached blocks."""

    positions: dict[Plan, int]
    left: list[int]
    """The containers that may go, in this order."""
    enough: float
    """Blocks worth more than this are moved when their region goes."""


class _Group:
    """The plans of the same objects, and the blocks of these that the tier has."""

    def __init__(self, objects: PlanObjects, *, parts: bool) -> None:
        self.objects, self.parts = objects, parts
        self.units: Units | None = None
        self.contents = Contents()
        self.uses: dict[Plan, Uses] = {}
        self.plans: dict[Plan, float] = {}  # and until when (monotonic seconds) each counts

    def rate(self, units: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return how much the reading of each unit counts, and whether it is in a window."""
        values, soon = np.zeros(len(units)), np.zeros(len(units), bool)
        for plan, uses in list(self.uses.items()):
            now, behind, seen = plan.position, plan.behind(), plan.seen
            first, _ = uses.after(units, behind)
            soon |= first < seen
            first, times = uses.after(units, now)
            late = np.minimum(first - now, uses.end) / max(1, uses.end - now)
            values += np.where(times > 0, times - _LATE * late, 0.0)
        return values, soon

    def lanes(self, units: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the lane of each unit: by when it is read after the windows."""
        lanes, distances = np.full(len(units), count + 1), np.full(len(units), math.inf)
        for plan, uses in list(self.uses.items()):
            first, _ = uses.after(units, plan.seen)
            nearer = (first != NEVER) & (first - plan.position < distances)
            distances[nearer] = first[nearer] - plan.position
            lanes[nearer] = _lane(first[nearer], plan, count)
        return lanes


class Clairvoyant:
    """Makes room in the SSD tier for the blocks that published orders read next."""

    def __init__(self, writer: TierWriter, tier: Tier, over: Callable[[], bool] = lambda: False) -> None:
        """`over` tells whether the daemon stops, and nobody needs room any more."""
        self._writer, self._tier, self._over = writer, tier, over
        self._region_bytes = open_region_size(tier.budget_bytes)
        self._lanes = max(1, min(_MAX_LANES, tier.budget_bytes // self._region_bytes // _REGIONS_A_LANE))
        self._lock = threading.Lock()  # guards _groups and the plans of each
        self._groups: list[_Group] = []
        self._rating = _Rating({}, [], 0.0)
        self.moved_bytes = 0
        """The bytes put into another region before their own went."""

    def add(self, plan: Plan) -> None:
        """Reckon with a plan, in place of an earlier one of its id. `make_room` sorts its samples."""
        parts = plan.items.shape[1] == 3
        with self._lock:
            group = next((g for g in self._groups if g.objects is plan.objects and g.parts == parts), None)
            if group is None:
                group = _Group(plan.objects, parts=parts)
                self._groups.append(group)
            for any_group in self._groups:
                for other in list(any_group.plans):
                    before = any_group is group and other.publisher == plan.publisher and group.plans[other] < math.inf
                    if before or other.id == plan.id:  # the epoch before, or sent once more
                        del any_group.plans[other]
                        any_group.uses.pop(other, None)
            group.plans[plan] = math.inf
            self._tier.outlook = self._outlook({})

    def drop(self, plan: Plan, *, dead: bool = False) -> None:
        """End a plan. Its next epoch counts on for a while, unless its process is `dead` or has published the next
        plan."""
        until_s = 0.0 if dead else time.monotonic() + _KEPT_S
        with self._lock:
            for group in self._groups:
                if plan in group.plans:
                    later = list(group.plans)[list(group.plans).index(plan) + 1 :]
                    group.plans[plan] = 0.0 if any(other.publisher == plan.publisher for other in later) else until_s
            if not any(until_s == math.inf for group in self._groups for until_s in group.plans.values()):
                self._tier.outlook = None

    def has_news(self) -> bool:
        """Tell whether `make_room` should be called though nobody needs room: to take in stored blocks, and to forget
        ended plans."""
        now_s = time.monotonic()
        with self._lock:
            over = any(until_s < now_s for group in self._groups for until_s in group.plans.values())
        return over or len(self._tier.placed or ()) > _MANY_PLACED

    def lane(self, plan: Plan, wanted: Wanted) -> int:
        """Return the lane of a plan's block: by when it is read again after its next read."""
        for group in self._groups:
            uses = group.uses.get(plan)
            if uses is not None and group.units is not None:
                place = uses.next_place(group.units.of_row(wanted.row, wanted.number), wanted.item + 1)
                if place is not None:
                    return int(_lane(np.array([place]), plan, self._lanes)[0])
        return self._lanes + 1

    def make_room(self, need_bytes: int) -> bool:
        """Evict until so much is free, in the thread of the room; tell whether it is."""
        self._prepare()
        free, containers = self._look()
        if free >= need_bytes or self._tier.outlook is None:
            return free >= need_bytes
        fresh = self._rating.left and self._rating.positions == self._positions()
        if fresh and self._free_some(need_bytes, containers):
            return True
        self._rate_all(containers)
        return self._free_some(need_bytes, containers)

    def _positions(self) -> dict[Plan, int]:
        """Return where all plans are, in steps of what is known of each: until one takes a step, a rating's order of
        regions is near enough."""
        plans = [plan for group in self._groups for plan in list(group.plans)]
        return {plan: plan.position // max(1, len(plan.items) // _RATINGS) for plan in plans}

    def _rate_all(self, containers: Sequence[_Container]) -> None:
        positions = self._positions()
        rated = self._rate(containers)
        values = {r.container.id: math.inf if r.soon else r.value for r in rated}
        with self._lock:
            if self._tier.outlook is not None:
                self._tier.outlook = self._outlook(values)
        left = np.concatenate([r.values for r in rated]) if rated else np.empty(0)
        enough = float(np.quantile(left, _LEFT_QUANTILE)) if len(left) else 0.0
        order = [r.container.id for r in sorted(rated, key=lambda r: (r.soon, r.value))]
        self._rating = _Rating(positions, order, enough)

    def _free_some(self, need_bytes: int, containers: Sequence[_Container]) -> bool:
        """Evict as the last rating says, which then has these no more."""
        if self._writer.call(lambda: self._tier.make_room(need_bytes)).result():  # of what no order reads
            return True
        rating, now = self._rating, {one.id: one for one in containers}
        while rating.left and not self._over():
            container = now.get(rating.left.pop(0))
            # Of the region itself all must be known as it is: what of it lies in a window now is moved.
            for victim in [] if container is None else self._rate([container]):
                vacated = self._vacate(victim, rating.enough)
                if vacated and self._tier.budget_bytes - self._tier.used_bytes >= need_bytes:
                    return True
        return False

    def _outlook(self, values: dict[int, float]) -> Outlook | None:
        """Return the outlook. Under the lock, as is setting it: the last plan may be dropped meanwhile."""
        live = {p.dataset for g in self._groups for p, until_s in g.plans.items() if until_s == math.inf}
        counted = {plan.dataset for group in self._groups for plan in group.plans}
        return Outlook(values, frozenset(counted)) if live else None

    def _prepare(self) -> None:
        """Have tables for all plans that count, and none for others."""
        now_s = time.monotonic()
        with self._lock:
            for group in self._groups:
                group.plans = {plan: until_s for plan, until_s in group.plans.items() if until_s > now_s}
                group.uses = {plan: uses for plan, uses in list(group.uses.items()) if plan in group.plans}
            self._groups = [group for group in self._groups if group.plans]
            groups = list(self._groups)
        for group in groups:
            if group.units is None and group.objects.complete.is_set():
                if self._tier.placed is None:
                    self._writer.call(lambda: setattr(self._tier, "placed", [])).result()
                units = Units(group.objects, parts=group.parts)
                group.contents.add_index(units, self._writer.entries(self._tier.name), self._over)
                group.units = units
            if group.units is not None:
                for plan in list(group.plans):
                    if plan not in group.uses:
                        uses = Uses(plan, group.units)
                        with self._lock:
                            if plan in group.plans:
                                group.uses[plan] = uses

    def _look(self) -> tuple[int, list[_Container]]:
        """Return how much is free, and which containers may go; take in blocks stored since."""

        def look() -> tuple[int, list[_Container], list[Placed]]:
            tier, filling = self._tier, self._tier.filling()
            containers = [
                _Container(id, c.dataset, c.disk_bytes, c.object_id)
                for id, c in tier.containers.items()
                if not c.pinned_by and id not in filling
            ]
            placed, tier.placed = tier.placed or [], [] if self._groups else None
            return tier.budget_bytes - tier.used_bytes, containers, placed

        free, containers, placed = self._writer.call(look).result()
        known = list(self._tier.containers)
        for group in self._groups:
            if group.units is not None:
                group.contents.add_placed(group.units, placed)
                group.contents.keep_only(known)
        return free, containers

    def _rate(self, containers: Sequence[_Container]) -> list[_Rated]:
        """Rate the containers of planned data sets whose plans are all known."""
        rated: dict[int, _Rated] = {}
        for one in self._rate_by_group(containers):
            before = rated.get(one.container.id)
            rated[one.container.id] = one if before is None else _both(before, one)
        return list(rated.values())

    def _rate_by_group(self, containers: Sequence[_Container]) -> Iterator[_Rated]:
        """Yield ratings: one pass over all cached blocks of each group."""
        for group in list(self._groups):
            units, plans = group.units, list(group.plans)
            if units is None or set(group.uses) != set(plans):
                continue
            datasets = {plan.dataset for plan in plans}
            found = [(one, self._rows(group, units, one)) for one in containers if one.dataset in datasets]
            every = np.concatenate([rows for _, rows in found]) if found else np.empty((0, 3), np.int64)
            values, soon = group.rate(every[:, 0])
            at = 0
            for container, rows in found:
                part = slice(at, at + len(rows))
                at += len(rows)
                weights = rows[:, 2] / max(1, container.disk_bytes)
                kept = rows if not container.object_id else rows[:0]
                yield _Rated(
                    container,
                    group,
                    float((values[part] * weights).sum()),
                    float((soon[part] * weights).sum()),
                    kept,
                    values[part] if len(kept) else values[:0],
                    soon[part] if len(kept) else soon[:0],
                )

    def _rows(self, group: _Group, units: Units, container: _Container) -> NDArray[np.int64]:
        if not container.object_id:
            return group.contents.of(container.id)
        which = units.of_object(bytes.fromhex(container.object_id))
        share = container.disk_bytes // max(1, len(which))
        return np.stack([which, np.zeros_like(which), np.full_like(which, share)], axis=1)

    def _vacate(self, victim: _Rated, enough: float) -> bool:
        """Move the blocks worth it and evict the rest; False if too much of it is in use for that."""
        container = victim.container
        if container.object_id and victim.soon:
            return False
        lengths = victim.rows[:, 2]
        limit = int(container.disk_bytes * _MOVED_SHARE)
        if int(lengths[victim.must].sum()) > limit:
            return False
        free = self._tier.budget_bytes - self._tier.used_bytes
        # Fetches that wait for room do not wait for more than must be moved.
        wanted = victim.must | (victim.values > (enough if free >= self._region_bytes else math.inf))
        best = np.argsort(-(victim.values + np.where(victim.must, 1e9, 0.0)), kind="stable")
        within = np.zeros(len(lengths), bool)
        within[best] = np.cumsum(lengths[best]) <= limit
        rows = victim.rows[wanted & within]
        size = int((rows[:, 2] + layout.DISK_BLOCK).sum())
        if size > free and size > _IN_MEMORY_BYTES:
            return False
        slices = self._read(victim, rows)
        if size <= free:
            for blocks in slices:
                self._move(container.id, blocks)
            self._evict(container.id)
        else:  # only when a full tier meets its first plan
            held = list(slices)
            self._evict(container.id)
            for blocks in held:
                self._move(None, blocks)
        self.moved_bytes += int(rows[:, 2].sum())
        return True

    def _move(self, source: int | None, blocks: Sequence[tuple[Block, bytes]]) -> None:
        self._writer.call(lambda: self._writer.move(self._tier, source, blocks)).result()

    def _evict(self, id: int) -> None:
        def evict() -> None:  # unless it has gone, or was pinned, meanwhile
            found = self._tier.containers.get(id)
            if found is not None and not found.pinned_by:
                self._tier.evict([id])

        self._writer.call(evict).result()

    def _read(self, victim: _Rated, rows: NDArray[np.int64]) -> Iterator[list[tuple[Block, bytes]]]:
        """Yield blocks of a region with their checksums, some MiB at a time, and none of a region that cannot be read.
        They are not verified here: their readers do it."""
        if not len(rows):
            return
        container, group = victim.container, victim.group
        lanes = np.full(len(rows), self._lanes + 1) if group is None else group.lanes(rows[:, 0], self._lanes)
        try:
            fd = os.open(self._tier.folder / container_name(container.id), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            log.warning("a region cannot be read: %s", exc)
            return
        try:
            blocks: list[tuple[Block, bytes]] = []
            size = 0
            for (_, offset, length), lane in zip(rows.tolist(), lanes.tolist(), strict=True):
                found = _read_record(fd, offset, length, container.dataset, lane)
                if found is not None:
                    blocks.append(found)
                    size += length
                if size >= _SLICE_BYTES:
                    yield blocks
                    blocks, size = [], 0
            yield blocks
        except OSError as exc:
            log.warning("a region cannot be read: %s", exc)
        finally:
            os.close(fd)


def _both(one: _Rated, other: _Rated) -> _Rated:
    """Join the ratings of a container by the plans of two snapshots."""
    rows = np.concatenate([one.rows, other.rows])
    _, first, which = np.unique(rows[:, 1], return_index=True, return_inverse=True)
    return _Rated(
        one.container,
        None,
        one.value + other.value,
        one.soon + other.soon,
        rows[first],
        np.bincount(which, np.concatenate([one.values, other.values]), minlength=len(first)).astype(np.float64),
        np.bincount(which, np.concatenate([one.must, other.must]), minlength=len(first)) > 0,
    )


def _lane(places: NDArray[np.int64], plan: Plan, count: int) -> NDArray[np.int64]:
    """Return the lane of blocks read next at these places: 1 to `count`, by the part of its epoch."""
    following = np.where(
        places < plan.length,
        places * count // max(1, plan.length),
        (places - plan.length) * count // max(1, len(plan.items) - plan.length),
    )
    return following + 1


def _read_record(fd: int, offset: int, length: int, dataset: str, lane: int) -> tuple[Block, bytes] | None:
    """Return a block of a region from the place of its bytes; None if no record is there."""
    head_bytes = aligned(RECORD.size + 8 * layout.granules(length))
    raw = os.pread(fd, head_bytes + length, offset - head_bytes)
    if len(raw) < head_bytes + length:
        return None
    magic, id, stored, sums_bytes = RECORD.unpack_from(raw)
    if magic != RECORD_MAGIC or stored != length or sums_bytes != 8 * layout.granules(length):
        return None
    sums = raw[RECORD.size : RECORD.size + sums_bytes]
    block = Block(
        id=BlockId(id),
        object_bytes=length,
        number=int.from_bytes(id[16:], "big"),
        data=memoryview(raw)[head_bytes:],
        dataset=dataset,
        ahead=True,
        lane=lane,
    )
    return block, sums
