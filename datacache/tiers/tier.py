"""One tier as the daemon keeps it: its containers, how much they take, and which go when room is needed.

Only the writer thread touches a tier. The set size is a hard limit: room is made (index first, then the file) before
anything is written. A disk that fails or is full suspends the tier for a while; readers read around it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import lmdb

from datacache.core.ids import BLOCK_BYTES, BlockId, ObjectId, ObjectRef
from datacache.tiers import containers, layout
from datacache.tiers.containers import Bounce, Region
from datacache.tiers.eviction import ContainerState, Shares, may_evict, to_take_back, victims
from datacache.tiers.health import health_of
from datacache.tiers.index import Index, container_key, unchecked_key
from datacache.tiers.layout import DISK_BLOCK, OBJECT_FILE, Location, aligned, container_name
from datacache.tiers.memory import AccessTable
from datacache.tiers.parts import Part, part_of_container
from datacache.tiers.tenants import Charges, Tenants

log = logging.getLogger(__name__)
_SUSPENDED_S = 30.0
_RESERVED_S = 60.0
_NEXT_ID = b"next-container"
_MAX_FILLING = 32
Pins = Mapping[str, str]
"""Pinned refs and their data sets."""


@dataclass(kw_only=True)
class Container:
    """The facts that the index keeps of a container."""

    dataset: str
    disk_bytes: int
    object_id: str = ""
    """Hex, for an object file."""
    pinned_by: list[str] = field(default_factory=list)
    """Refs whose blocks it holds."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fetched block on its way into the tiers."""

    id: BlockId
    object_bytes: int
    """Size of the whole object: decides between region and object file."""
    number: int
    data: bytes | memoryview
    dataset: str
    ahead: bool = False
    """True if it was fetched before anybody asked for it."""
    lane: int = 0
    """The one of its data set's open regions that it goes into. Above 0: a published order reads it next, and blocks of
    one lane are read at about the same time after that."""
    soon: bool = False
    """True if a published order reads it within its window: it is written through the page cache, where its reader
    finds it. From the disk it comes at a tenth of the speed, and takes as much processor time."""
    in_ram_only: bool = False
    """True if the disk of another node keeps it."""
    unchecked: ObjectRef | None = None
    """The object, if it is a large one that is to be checked as a whole (`index.unchecked_key`)."""

    @property
    def in_object_file(self) -> bool:
        """True if it goes into a file of its own object."""
        return self.object_bytes > BLOCK_BYTES

    @property
    def object_id(self) -> ObjectId:
        """The object that it is a part of."""
        return ObjectId(self.id[:16])

    @cached_property
    def disk_bytes(self) -> int:
        """The bytes that it takes in a container."""
        length = len(self.data)
        return aligned(length, DISK_BLOCK) if self.in_object_file else containers.record_bytes(length)


class Outlook(NamedTuple):
    """The reads of published orders, by container, for policy `clairvoyant`."""

    values: Mapping[int, float]
    """See `ContainerState.value`."""
    datasets: frozenset[str]
    """Containers of these data sets without a value are about to be read."""


class Placed(NamedTuple):
    """A block in a region."""

    container: int
    block: BlockId
    offset: int
    length: int


class Tier:
    """RAM or SSD: `name` is also the name of its database in the index."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        budget_bytes: int,
        policy: str,
        ttl_s: float,
        index: Index,
        access: AccessTable,
        overhead: Callable[[], int] = lambda: 0,
        bounce: Bounce | None = None,
        check: bool = False,
        shares: Shares | None = None,
        part: Part = Part(),  # noqa: B008 - immutable
    ) -> None:
        """`part`: which containers are its own. `check`: the index was not closed cleanly, so look for entries whose
        container it does not have."""
        self.name, self.folder, self.budget_bytes = name, folder, budget_bytes
        self.shrunk_bytes = 0
        """The bytes that were evicted at the start, because the budget was lowered."""
        self._policy, self._ttl_s = policy, ttl_s
        self._index, self._access, self._overhead = index, access, overhead
        self._db = index.blocks[name]
        self._shares, self._part = shares or Shares(), part
        self._used_by: dict[str, int] = {}
        """Bytes of containers by group of data sets (`Shares.group`)."""
        self.charges = Charges()
        self.evicted_of: dict[str, int] = {}
        """Bytes that were evicted, by data set."""
        self._reserved_until = 0.0
        """Until then groups above their share leave some room alone, for one below its own."""
        self._bounce = bounce
        self._filling: dict[tuple[str, int], Region] = {}  # by data set and lane
        self.outlook: Outlook | None = None
        """None while no order is published."""
        self.placed: list[Placed] | None = None
        """The blocks put into regions, for a caller that has set this to a list and empties it."""
        self._object_files: dict[ObjectId, int] = {}
        self._unindexed: set[BlockId] = set()  # in an object file, room counted, but not in the index
        self._added: list[int] = []  # containers, by the `put` under way
        self._wrote: dict[BlockId, tuple[Block, Location]] = {}  # by the `put` under way
        self._suspended_until = 0.0
        self._problem = ""
        self.health = health_of(folder)
        self.evicted_bytes = 0
        self.containers: dict[int, Container] = {}
        self._load(check=check)

    @property
    def used_bytes(self) -> int:
        """The bytes that the tier takes now, metadata counted."""
        return self._container_bytes + self._overhead()

    @property
    def problem(self) -> str:
        """The reason why it gives or takes nothing at present, or keeps nothing for ever; else empty."""
        if self.health.problem or self._problem:
            return self.health.problem or self._problem
        overhead = self._overhead()
        if not self.budget_bytes or overhead < self.budget_bytes:
            return ""
        return (
            f"its limit of {self.budget_bytes:,} bytes is below the {overhead:,} that its index alone takes, so it "
            "keeps nothing. Half of what is free on the disk when a home is first used is the limit, unless "
            f"DATACACHE_{self.name.upper()}_BYTES says another"
        )

    def divide(self, parts: int) -> list[int]:
        """Keep the first of so many parts, before any block is put; return the budgets of all: what each has by now,
        and as much as each other one of what is free. So none has to evict what another may take."""
        overhead, used = self._overhead, [0] * parts
        free = max(0, self.budget_bytes - self.used_bytes)
        for id, container in list(self.containers.items()):
            object_id = bytes.fromhex(container.object_id)
            number = part_of_container(id, object_id, parts)
            used[number] += container.disk_bytes
            if number:
                self._count(id, -container.disk_bytes)
                del self.containers[id]
                self._object_files.pop(ObjectId(object_id), None)
        budgets = [each + (free + overhead()) // parts for each in used]
        self._part, self._overhead, self.budget_bytes = Part(0, parts), lambda: overhead() // parts, budgets[0]
        return budgets

    def make_room(self, need_bytes: int, *, planned: bool = False, group: str | None = None) -> bool:
        """Evict what the policy lets go until `need_bytes` fit; tell whether they do. `planned`: for blocks that a
        published order reads next; `group`: for whom, by `Shares.group`. Its own transaction; files go after the
        commit."""
        excess = self.used_bytes + need_bytes - self.budget_bytes
        takes_back = group is not None and not self.has_share(group)
        if takes_back and need_bytes:
            excess += self._reserve_bytes()  # ahead: others may fill the last of the room in the same go
        if excess <= 0:
            return True
        if need_bytes > self.budget_bytes:
            return False
        policy = self._policy_now()
        states = self._states()
        if self._shares and group is not None:
            groups = {state.group for state in states} | set(self._shares.groups())
            entitled = {each: self._shares.entitled_bytes(each, self.budget_bytes) for each in groups}
            if takes_back:
                self._reserved_until = time.monotonic() + _RESERVED_S
                self.evict(to_take_back(states, excess, self._used_by, entitled, group))
                return self.used_bytes + need_bytes <= self.budget_bytes
            states = [state for state in states if may_evict(group, state.group, self._used_by, entitled)]
        chosen = victims(policy, states, excess, now_s=time.time(), ttl_s=self._ttl_s, planned=planned)
        self.evict(chosen)
        return self.used_bytes + need_bytes <= self.budget_bytes

    def set_tenants(self, tenants: Tenants, scale: float) -> None:
        """Charge namespaces by what is known of them now, and bring those down that are above their limits: what they
        alone use goes, first what they no longer have mounted, pins last. `scale`: see `Charges.set`."""
        self.charges.set(tenants, scale / self._part.of)
        for name, excess in self.charges.above():
            own = self._own_states(name)
            own.sort(key=lambda state: (state.pinned, self._is_mounted(state), state.last_used_s))
            self.evict(_first(own, excess))

    def make_own_room(self, dataset: str, need_bytes: int, *, planned: bool = False) -> None:
        """Have each namespace that pays for a data set and would be above its limit with `need_bytes` more of it evict
        what it alone uses: what it no longer has mounted, then what the policy lets go."""
        for name, excess in list(self.charges.excess_bytes(dataset, need_bytes)):
            own = [state for state in self._own_states(name) if not state.pinned]
            idle = [state for state in own if not self._is_mounted(state)]
            freed = self.evict(_first(sorted(idle, key=lambda state: state.last_used_s), excess))
            if freed < excess:
                gone = {state.id for state in idle}
                left = [state for state in own if state.id not in gone]
                # More than all of it cannot come free: then of what is to be stored as much is kept as may be.
                need = math.ceil(min(excess - freed, sum(state.size_bytes for state in left)))
                policy = self._policy_now()
                self.evict(victims(policy, left, need, now_s=time.time(), ttl_s=self._ttl_s, planned=planned))

    def has_room_of_its_own(self, dataset: str, size_bytes: int) -> bool:
        """Tell whether the namespaces of a data set may have so much more of it, or make room for it. About, from any
        thread."""
        return self._policy in ("lru", "ttl") or self.charges.room_bytes(dataset) >= size_bytes + DISK_BLOCK

    def admits(self, size_bytes: int) -> bool:
        """Tell whether so much fits, or would have room made for it. About, from any thread."""
        if self._policy in ("keep", "clairvoyant"):
            size_bytes += self.used_bytes
        return size_bytes <= self.budget_bytes and not self.problem

    def group(self, dataset: str) -> str:
        """Return the group of data sets that shares are counted by."""
        return self._shares.group(dataset)

    def has_share(self, group: str) -> bool:
        """Tell whether a group has all that it is entitled to."""
        return self._used_by.get(group, 0) >= self._shares.entitled_bytes(group, self.budget_bytes)

    def evict_expired(self) -> None:
        """Drop what policy `ttl` no longer wants."""
        if self._policy == "ttl":
            old = time.time() - self._ttl_s
            self.evict([state.id for state in self._states() if not state.pinned and state.last_used_s < old])

    def evict(self, chosen: Iterable[int]) -> int:
        """Remove containers: their blocks from the index, then the files. Return the bytes that came free.

        On a full disk the index cannot be written either; then the files go first (a reader misses) to make room.
        """
        chosen, freed = list(chosen), 0
        if not chosen:
            return 0
        try:
            self._unindex_all(chosen)
        except lmdb.Error as exc:
            log.warning("the %s tier removes files before their index entries: %s", self.name, exc)
            for id in chosen:
                (self.folder / container_name(id)).unlink(missing_ok=True)
            self._unindex_all(chosen)
        for id in chosen:
            dataset, size_bytes = self.containers[id].dataset, self._remove(id)
            self.evicted_of[dataset] = self.evicted_of.get(dataset, 0) + size_bytes
            freed += size_bytes
        self.evicted_bytes += freed
        return freed

    def put(self, blocks: Sequence[tuple[Block, bytes]], pins: Pins, source: int | None = None) -> list[bool]:
        """Admit blocks (with their checksums) as far as there is room (see `make_room`); return which are kept now.

        With `source` put blocks of that region once more, each into the region of its lane, so that it can be evicted
        without them; blocks that are not in it any more are passed over. The bytes are written first, then the index in
        one transaction, so that other parts do not wait for this one's disk. `lmdb.Error` if that fails, and then the
        tier is as before. Never raises `OSError`."""
        self._added, self._wrote = [], {}
        with self._index.env.begin(db=self._db) as txn:
            values = [txn.get(block.id) for block, _ in blocks]
        try:
            kept = self._write(blocks, values, pins, source)
            if self._added or self._wrote:
                with self._index.write() as txn:
                    self._enter(txn)
        except BaseException:
            # What the index does not know of must not be written into again.
            for id in self._added:
                self._seal(lambda region, id=id: region.container == id)  # type: ignore[misc]
                self._remove(id)
            self._unindexed.update(id for id in self._wrote if ObjectId(id[:16]) in self._object_files)
            raise
        return kept

    def _write(
        self, blocks: Sequence[tuple[Block, bytes]], values: Sequence[bytes | None], pins: Pins, source: int | None
    ) -> list[bool]:
        """Write the bytes for `put`. `values` are what the index has of the blocks."""
        kept = [False] * len(blocks)
        run: list[tuple[int, Block, bytes]] = []  # goes into one region with one write
        run_bytes, index_bytes = 0, self._overhead()  # which grows when all of this is committed
        region: Region | None = None
        for at in sorted(range(len(blocks)), key=lambda at: blocks[at][0].lane):
            (block, sums), value = blocks[at], values[at]
            if source is not None and (value is None or layout.unpack_location(value).container != source):
                continue
            if self.health.away():
                continue
            if block.id in self._wrote or (source is None and value is not None):
                kept[at] = True
            elif self._suspended_until > time.monotonic():
                continue
            elif block.in_object_file:
                kept[at] = self._put_into_object_file(block, sums, pins)
            else:
                size = block.disk_bytes
                other = not run or (run[0][1].dataset, run[0][1].lane) != (block.dataset, block.lane)
                if region is None or other or region.room() < run_bytes + size:
                    self._write_run(region, run, kept)
                    run, run_bytes = [], 0
                    region = self._region_for(block, pins)
                needed = self._container_bytes + index_bytes + run_bytes + size + DISK_BLOCK
                if region is not None and needed <= self._limit_bytes(block.dataset):
                    run.append((at, block, sums))
                    run_bytes += size
        self._write_run(region, run, kept)
        return kept

    def drop(self, txn: lmdb.Transaction, block: BlockId) -> None:
        """Forget one block whose bytes are broken. Its room comes free with its container."""
        value = txn.get(block, db=self._db)
        if value is not None:
            txn.delete(block, db=self._db)
            container = layout.unpack_location(value).container
            if container & OBJECT_FILE and container in self.containers:
                self._unindexed.add(block)

    def pin(self, ref: str, wanted: Iterable[int]) -> None:
        """Keep containers for a ref."""
        with self._index.write() as txn:
            for id in wanted:
                container = self.containers.get(id)
                if container is not None and ref not in container.pinned_by:
                    container.pinned_by.append(ref)
                    self._save(txn, id)

    def unpin(self, ref: str) -> None:
        """No longer keep containers for a ref."""
        with self._index.write() as txn:
            for id, container in self.containers.items():
                if ref in container.pinned_by:
                    container.pinned_by.remove(ref)
                    self._save(txn, id)

    def last_used(self, id: int) -> float:
        """Return when a container was last read or written (Unix seconds)."""
        return self._access.last(id)

    def seal(self, dataset: str | None = None) -> None:
        """Finish the regions being filled for a data set, or all: later blocks go into new ones."""
        self._seal(lambda region: dataset is None or region.dataset == dataset)

    def filling(self) -> set[int]:
        """Return the regions that are not full yet."""
        return {region.container for region in self._filling.values()}

    def _states(self) -> list[ContainerState]:
        values, datasets = self.outlook or Outlook({}, frozenset())
        return [
            ContainerState(
                id,
                c.disk_bytes,
                self._access.last(id),
                bool(c.pinned_by),
                values.get(id, math.inf if c.dataset in datasets else 0.0),
                self._shares.group(c.dataset),
            )
            for id, c in self.containers.items()
        ]

    def _own_states(self, namespace: str) -> list[ContainerState]:
        """Return the containers of data sets that a namespace alone pays for."""
        return [
            state for state in self._states() if self.charges.sole_owner(self.containers[state.id].dataset) == namespace
        ]

    def _is_mounted(self, state: ContainerState) -> bool:
        return self.charges.is_mounted(self.containers[state.id].dataset)

    def _policy_now(self) -> str:
        return "keep" if self._policy == "clairvoyant" and self.outlook is None else self._policy

    def _reserve_bytes(self) -> int:
        return min(containers.open_region_size(self.budget_bytes), self.budget_bytes // 8)

    def _limit_bytes(self, dataset: str) -> int:
        """Return how much this tier may have in use once a block of a data set has been added."""
        room = self.charges.room_bytes(dataset)
        limit = self._limit_by_shares(dataset)
        return limit if room == math.inf else min(limit, self.used_bytes + int(room))

    def _limit_by_shares(self, dataset: str) -> int:
        if not self._shares or time.monotonic() > self._reserved_until:
            return self.budget_bytes
        group = self._shares.group(dataset)
        if self._used_by.get(group, 0) < self._shares.entitled_bytes(group, self.budget_bytes):
            return self.budget_bytes
        return self.budget_bytes - self._reserve_bytes()

    def _count(self, container: int, size_bytes: int) -> None:
        dataset = self.containers[container].dataset
        self._container_bytes += size_bytes
        self.charges.count(dataset, size_bytes)
        if self._shares:
            group = self._shares.group(dataset)
            self._used_by[group] = self._used_by.get(group, 0) + size_bytes

    def _enter(self, txn: lmdb.Transaction) -> None:
        """Enter into the index what `_write` wrote."""
        for id in self._added:
            self._save(txn, id)  # its size is what the file system says at the next start
        for block, location in self._wrote.values():
            txn.put(block.id, layout.pack_location(location), db=self._db)
            if block.unchecked is not None:  # each time: it may have been checked before this block was lost
                key = unchecked_key(block.object_id, self.name)
                txn.put(key, json.dumps(block.unchecked).encode(), db=self._index.meta)

    def _write_run(self, region: Region | None, run: list[tuple[int, Block, bytes]], kept: list[bool]) -> None:
        if region is None or not run:
            return
        before = aligned(region.end, DISK_BLOCK)
        try:
            records = [(block.id, block.data, sums) for _, block, sums in run]
            locations = region.append(records, cached=any(block.soon for _, block, _ in run))
        except OSError as exc:
            self._suspend(exc)
            return
        for (at, block, _), location in zip(run, locations, strict=True):
            self._wrote[block.id] = block, location
            kept[at] = True
            if self.placed is not None:
                self.placed.append(Placed(location.container, block.id, location.offset, location.length))
        self._grow(region.container, aligned(region.end, DISK_BLOCK) - before)

    def _put_into_object_file(self, block: Block, sums: bytes, pins: Pins) -> bool:
        if not self._part.has(block.object_id):  # a reader asked the wrong part, as their number has just changed
            return False
        # A block that was there before has its room already.
        size = 0 if block.id in self._unindexed else aligned(len(block.data), DISK_BLOCK)
        if size and self.used_bytes + size > self._limit_bytes(block.dataset):
            return False
        container = self._object_files.get(block.object_id)
        try:
            if container is None:
                container = self._new_number() | OBJECT_FILE
                self._add(container, block, pins, object_id=block.object_id.hex())
                self._object_files[block.object_id] = container
            offset = block.number * BLOCK_BYTES
            path = self.folder / container_name(container)
            bounce = None if block.soon else self._bounce
            containers.write_object_block(path, block.object_bytes, offset, block.data, bounce)
        except OSError as exc:
            self._suspend(exc)
            return False
        self._wrote[block.id] = block, Location(container, offset, len(block.data), sums)
        self._unindexed.discard(block.id)
        self._grow(container, size)
        return True

    def _grow(self, container: int, size_bytes: int) -> None:
        self.containers[container].disk_bytes += size_bytes
        self._count(container, size_bytes)
        self._access.touch(container)
        self._problem = ""

    def _region_for(self, block: Block, pins: Pins) -> Region | None:
        """Return the region to append a block to, a new one if need be; None if there is no room for one."""
        region = self._filling.get((block.dataset, block.lane))
        if region is not None and region.room() >= block.disk_bytes:
            return region
        full = region
        if full is None and len(self._filling) >= _MAX_FILLING:
            full = next(iter(self._filling.values()))
        self._seal(lambda other: other is full)
        room = self._limit_bytes(block.dataset) - self.used_bytes
        need = layout.REGION_HEADER_BYTES + block.disk_bytes
        # The last region of a budget is as large as what is left.
        wanted = aligned(max(containers.open_region_size(self.budget_bytes), need), DISK_BLOCK)
        capacity = min(wanted, room // DISK_BLOCK * DISK_BLOCK)
        if capacity < need:
            return None
        try:
            container = self._new_number()
            region = Region(self.folder, container, capacity, block.dataset, self._bounce)
        except OSError as exc:
            self._suspend(exc)
            return None
        self._filling[block.dataset, block.lane] = region
        self._add(container, block, pins)
        self._grow(container, DISK_BLOCK)
        return region

    def _add(self, id: int, block: Block, pins: Pins, *, object_id: str = "") -> None:
        pinned_by = [ref for ref, dataset in pins.items() if dataset == block.dataset]
        self.containers[id] = Container(dataset=block.dataset, disk_bytes=0, object_id=object_id, pinned_by=pinned_by)
        self._added.append(id)

    def _new_number(self) -> int:
        """Take a number for a container. The numbers are all parts', so they are taken in a transaction of their own,
        before a file is made."""
        with self._index.write() as txn:
            raw = txn.get(_NEXT_ID, db=self._index.meta)
            number = int.from_bytes(raw, "big") if raw else 1
            # An orphan of a killed daemon may have the file name already (its container was never committed).
            while not self._part.has_number(number) or any(
                (self.folder / container_name(n)).exists() for n in (number, number | OBJECT_FILE)
            ):
                number += 1
            txn.put(_NEXT_ID, (number + 1).to_bytes(4, "big"), db=self._index.meta)
        return number

    def _seal(self, which: Callable[[Region], bool]) -> None:
        for key, region in list(self._filling.items()):
            if which(region):
                del self._filling[key]
                try:
                    region.seal()
                except OSError as exc:
                    self._suspend(exc)

    def _suspend(self, exc: OSError) -> None:
        self._problem = f"{exc.strerror or exc} ({self.folder})"
        self._suspended_until = time.monotonic() + _SUSPENDED_S
        log.warning("the %s tier takes nothing for %.0f s: %s", self.name, _SUSPENDED_S, self._problem)

    def _remove(self, id: int) -> int:
        """Forget a container and remove its file. Return the bytes that came free."""
        self._count(id, -self.containers[id].disk_bytes)
        gone = self.containers.pop(id)
        if gone.object_id:
            object_id = ObjectId(bytes.fromhex(gone.object_id))
            self._object_files.pop(object_id, None)
            self._unindexed = {block for block in self._unindexed if block[:16] != object_id}
        try:
            (self.folder / container_name(id)).unlink(missing_ok=True)
        except OSError as exc:  # the next start removes it
            self._suspend(exc)
        return gone.disk_bytes

    def _save(self, txn: lmdb.Transaction, id: int) -> None:
        txn.put(container_key(self.name, id), json.dumps(asdict(self.containers[id])).encode(), db=self._index.meta)

    def _unindex_all(self, chosen: Iterable[int]) -> None:
        with self._index.write() as txn:
            for id in chosen:
                self._unindex(txn, id)

    def _unindex(self, txn: lmdb.Transaction, id: int) -> None:
        container = self.containers[id]
        if container.object_id:
            prefix = bytes.fromhex(container.object_id)
            with txn.cursor(db=self._db) as cursor:
                found = cursor.set_range(prefix)
                while found and cursor.key()[:16] == prefix:
                    found = cursor.delete()
            txn.delete(unchecked_key(ObjectId(prefix), self.name), db=self._index.meta)
        else:
            self._seal(lambda region: region.container == id)
            for block in self._blocks_in(txn, id):
                value = txn.get(block, db=self._db)
                if value is not None and layout.unpack_location(value).container == id:
                    txn.delete(block, db=self._db)
        txn.delete(container_key(self.name, id), db=self._index.meta)

    def _blocks_in(self, txn: lmdb.Transaction, id: int) -> list[BlockId]:
        """Return the blocks of a region by its own records or, if it cannot be read, by the whole index."""
        path = self.folder / container_name(id)
        try:
            blocks = [block for block, _ in containers.scan_region(path)]
            if blocks:
                return blocks
        except OSError as exc:
            log.warning("%s cannot be read: %s", path, exc.strerror)
        with txn.cursor(db=self._db) as cursor:
            return [BlockId(bytes(key)) for key, value in cursor if layout.unpack_location(value).container == id]

    def _load(self, *, check: bool) -> None:
        """Take stock of this part by looking, not by trusting: forget containers without a file, remove files and (for
        `check`) index entries without a container, take sizes from the file system. A file that is too short stays:
        what it lacks is a miss."""
        self._container_bytes = 0
        known = set()
        prefix = f"{self.name}/".encode()
        with self._index.env.begin() as txn, txn.cursor(db=self._index.meta) as cursor:
            found = cursor.set_range(prefix)
            while found and cursor.key().startswith(prefix):
                id = int(cursor.key()[len(prefix) :], 16)
                container = Container(**json.loads(cursor.value()))
                known.add(container_name(id))
                if self._part.has_container(id, bytes.fromhex(container.object_id)):
                    self.containers[id] = container
                found = cursor.next()
        lost: dict[int, Container] = {}
        for id, container in self.containers.items():
            try:
                status = os.stat(self.folder / container_name(id))
            except FileNotFoundError:
                lost[id] = container
                continue
            container.disk_bytes = status.st_blocks * 512
            self._count(id, container.disk_bytes)
            self._access.at_least(id, status.st_mtime)
            if container.object_id:
                self._object_files[ObjectId(bytes.fromhex(container.object_id))] = id
        if lost:
            log.warning("%d containers of the %s tier are gone", len(lost), self.name)
        for id in lost:
            del self.containers[id]
            known.remove(container_name(id))
        if lost or check:
            self._forget_strays(lost)
        for path in self.folder.iterdir():
            number = layout.container_of(path.name)
            if path.name not in known and number is not None and self._part.has_number(number):
                path.unlink()

    def _forget_strays(self, lost: Mapping[int, Container]) -> None:
        """Delete the index entries of containers that are gone."""
        with self._index.write() as txn:
            for id, container in lost.items():
                txn.delete(container_key(self.name, id), db=self._index.meta)
                if container.object_id:
                    object_id = ObjectId(bytes.fromhex(container.object_id))
                    txn.delete(unchecked_key(object_id, self.name), db=self._index.meta)
            with txn.cursor(db=self._db) as cursor:
                cursor.first()
                while value := cursor.value():
                    container_id = layout.unpack_location(value).container
                    if container_id in self.containers or not self._part.has_container(container_id, cursor.key()):
                        cursor.next()
                    else:
                        cursor.delete()


def _first(states: Iterable[ContainerState], need_bytes: float) -> list[int]:
    """Return the first containers that free so much, all if they do not."""
    chosen: list[int] = []
    for state in states:
        if need_bytes <= 0:
            break
        chosen.append(state.id)
        need_bytes -= state.size_bytes
    return chosen
