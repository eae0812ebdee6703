"""The one writer of a node's tiers: a thread that takes fetched blocks and commits them to the index in batches.

Only the daemon has one. Each block goes to the SSD, so blocks that leave RAM are there already. RAM takes blocks that
readers wait for; of blocks fetched ahead only those that the SSD has no room for. Readers see blocks once their batch
is committed; `stored` is then called in the writer thread, and learns whether a tier kept the block.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from datacache.core.disk import replace_file
from datacache.core.ids import BlockId, ObjectId, ObjectRef, object_id
from datacache.tiers import layout
from datacache.tiers.index import UNCHECKED, Index, container_key, unchecked_key
from datacache.tiers.layout import DISK_BLOCK
from datacache.tiers.parts import Part
from datacache.tiers.tenants import NO_TENANTS, read_tenants, write_tenants
from datacache.tiers.tier import Block, Tier

log = logging.getLogger(__name__)
_BATCH_BLOCKS, _BATCH_BYTES = 64, 16 * 2**20
_LINGER_S = 0.025
"""A batch is waited for that long. Readers have their bytes already, and a write and a commit for a block alone cost
three times as much processor time as in a batch of ten (378 µs against 130 for 110 KB)."""
_EXPIRE_EVERY_S = 10.0
_ENTRIES = 4096
T = TypeVar("T")
Stored = Callable[[bool], None]
_Queued = tuple[Block, bytes, Stored]


class TierWriter:
    """The owner of the tiers. Any thread may `put` and `call`; the holders of the bytes bound the queue."""

    def __init__(
        self,
        index: Index,
        tiers: Iterable[Tier],
        pins_file: Path,
        part: Part = Part(),  # noqa: B008 - immutable
        tenants_file: Path | None = None,
    ) -> None:
        """The first part's writer writes the files of the pins and of the namespaces."""
        self._index, self.part = index, part
        self.tiers = tuple(tiers)
        self._pins_file = pins_file
        self._pins = read_pins(pins_file)
        for tier in self.tiers:  # of an unpinning that was not finished
            for ref in {ref for container in tier.containers.values() for ref in container.pinned_by} - set(self._pins):
                tier.unpin(ref)
        self._tenants_file = tenants_file
        self.tenants = NO_TENANTS if tenants_file is None else read_tenants(tenants_file)
        """The namespaces of this node, as the driver has named them last."""
        self._charge_tenants()
        self._queue: queue.SimpleQueue[_Queued | Callable[[], None] | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        """Set once a batch is full, or something waits that is no block. Blocks wake nobody up besides."""
        self._working_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="tier-writer", daemon=True)
        self._thread.start()

    def divide(self, parts: int) -> list[tuple[int, ...]]:
        """Keep the first of so many parts; return the budgets of the tiers for each part. Before any block is put."""
        self.part = Part(0, parts)
        budgets = list(zip(*(tier.divide(parts) for tier in self.tiers), strict=True))
        self._charge_tenants()
        return budgets

    def put(self, block: Block, stored: Stored) -> None:
        """Queue one block. Its checksums are made in the caller's thread."""
        self._queue.put((block, layout.checksums(block.data), stored))
        waiting = self._queue.qsize() + 1  # the first of a batch is out of the queue already
        if waiting >= _BATCH_BLOCKS or waiting * len(block.data) >= _BATCH_BYTES:
            self._hurry.set()

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run an action that touches the tiers in the writer thread."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as exc:  # noqa: BLE001 - it belongs to whoever waits for the future
                future.set_exception(exc)

        self._queue.put(run)
        self._hurry.set()
        return future

    def pin(self, ref: str, dataset: str, objects: Sequence[ObjectId]) -> None:
        """Keep the cached blocks of a snapshot's objects, and future ones of its data set. Call through `call`, with
        ids that are collected already: nothing is written meanwhile."""
        for tier in self.tiers:
            wanted = set()
            with self._index.env.begin(db=self._index.blocks[tier.name]) as txn, txn.cursor() as cursor:
                for id in objects:  # all blocks that are cached, whatever number of them there should be
                    more = cursor.set_range(id)
                    while more and bytes(cursor.key()).startswith(id):
                        wanted.add(layout.unpack_location(cursor.value()).container)
                        more = cursor.next()
                tier.pin(ref, wanted)
            tier.seal(dataset)  # what will come must not go into a region that is not pinned
        self._save_pins({**self._pins, ref: dataset})

    def unpin(self, ref: str) -> bool:
        """Let a ref's blocks be evicted again; tell whether it was pinned. Call through `call`."""
        known = ref in self._pins
        self._save_pins({other: dataset for other, dataset in self._pins.items() if other != ref})
        for tier in self.tiers:
            tier.unpin(ref)
        return known

    def pins(self) -> dict[str, str]:
        """Return the pinned refs and their data sets."""
        return dict(self._pins)

    def set_tenants(self, limits: Mapping[str, int | None] | None, users: Mapping[str, Iterable[str]]) -> bool:
        """Take what the driver says of this node's namespaces, see `Tenants.followed_by`; those above their limits are
        brought down. Tell whether that is anything new. Call through `call`."""
        now = self.tenants.followed_by(limits, users)
        if now == self.tenants:
            return False
        if self._tenants_file is not None and not self.part.number:
            try:
                write_tenants(self._tenants_file, now)
            except OSError as exc:  # a full disk is no reason to let one namespace take what is another's
                log.warning("the namespaces are not kept for the next daemon: %s", exc)
        self.tenants = now
        self._charge_tenants()
        return True

    def _charge_tenants(self) -> None:
        # The limit is one of the disk; of memory a namespace may have as large a part.
        whole = self.tiers[-1].budget_bytes or self.tiers[0].budget_bytes
        for tier in self.tiers:
            tier.set_tenants(self.tenants, tier.budget_bytes / whole if whole else 0.0)

    def drop(self, block: BlockId) -> None:
        """Forget a block in all tiers. Call through `call`."""
        with self._index.write() as txn:
            for tier in self.tiers:
                tier.drop(txn, block)

    def drop_object(self, blocks: Sequence[BlockId]) -> None:
        """Forget all blocks of a large object in all tiers, and its files, so that readers let go of them. Call through
        `call`."""
        with self._index.env.begin() as txn:
            found = [
                {
                    layout.unpack_location(value).container
                    for block in blocks
                    if (value := txn.get(block, db=self._index.blocks[tier.name])) is not None
                }
                for tier in self.tiers
            ]
        for block in blocks:
            self.drop(block)
        for tier, containers in zip(self.tiers, found, strict=True):
            tier.evict([id for id in containers if id & layout.OBJECT_FILE and id in tier.containers])

    def unchecked(self) -> Iterator[list[ObjectRef]]:
        """Yield this part's large objects that have blocks here and were not checked as a whole since, also those that
        a killed daemon left: some thousand at a time, once for each tier. From any thread."""
        for some in self._entries(self._index.meta, UNCHECKED):
            found = [ObjectRef(*json.loads(value)) for key, value in some if key.startswith(UNCHECKED)]
            yield [ref for ref in found if self.part.has(object_id(ref))]

    def is_unchecked(self, id: ObjectId) -> bool:
        """Tell whether `unchecked` has an object. From any thread."""
        return self.unchecked_ref(id) is not None

    def unchecked_ref(self, id: ObjectId) -> ObjectRef | None:
        """Return the object if `unchecked` has it. From any thread."""
        with self._index.env.begin(db=self._index.meta) as txn:
            found = [txn.get(unchecked_key(id, tier.name)) for tier in self.tiers]
        return next((ObjectRef(*json.loads(value)) for value in found if value is not None), None)

    def mark_checked(self, id: ObjectId) -> None:
        """Remember that all of a large object was checked. A block that comes later makes it unchecked again. Call
        through `call`."""
        with self._index.write() as txn:
            for tier in self.tiers:
                txn.delete(unchecked_key(id, tier.name), db=self._index.meta)

    def evict(self, dataset: str | None) -> int:
        """Drop a data set's containers, or all, except pinned ones; return the bytes that came free. Call through
        `call`."""
        freed = 0
        for tier in self.tiers:
            chosen = [
                id
                for id, container in tier.containers.items()
                if not container.pinned_by and (dataset is None or container.dataset == dataset)
            ]
            freed += tier.evict(chosen)
        return freed

    def count_blocks(self, tier: str) -> int:
        """Return how many blocks the index has for a tier."""
        with self._index.env.begin() as txn:
            return int(txn.stat(self._index.blocks[tier])["entries"])

    def entries(self, tier: str) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield a tier's blocks and their index values, some thousand at a time. Each portion is of one moment, all
        together are not. From any thread."""
        return self._entries(self._index.blocks[tier], b"")

    def _entries(self, db: Any, start: bytes) -> Iterator[list[tuple[bytes, bytes]]]:
        while True:
            with self._index.env.begin(db=db) as txn, txn.cursor() as cursor:
                some = list(itertools.islice(cursor.iternext(), _ENTRIES)) if cursor.set_range(start) else []
            if not some:
                return
            yield some
            start = some[-1][0] + b"\0"

    def datasets(self, tier: str, containers: Iterable[int]) -> dict[int, str]:
        """Return the data sets of those of some containers that the index has, whichever part's. From any thread."""
        with self._index.env.begin(db=self._index.meta) as txn:
            found = {id: txn.get(container_key(tier, id)) for id in containers}
        return {id: json.loads(value)["dataset"] for id, value in found.items() if value is not None}

    def move(self, tier: Tier, source: int | None, blocks: Sequence[tuple[Block, bytes]]) -> None:
        """See `Tier.put`; `source` is None for blocks whose region has gone already. Call through `call`."""
        pinned = self._pins
        self._guarded(lambda: tier.put(blocks, pinned, source))

    def working_s(self) -> float:
        """Return how long the thread has been at its present work; 0 while it has none. From any thread."""
        since = self._working_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Write the queued blocks, seal the regions, end the thread."""
        self._queue.put(None)
        self._hurry.set()
        self._thread.join()
        for tier in self.tiers:
            tier.seal()

    def _run(self) -> None:
        expire_at_s = time.monotonic() + _EXPIRE_EVERY_S
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, expire_at_s - time.monotonic()))
            except queue.Empty:
                item = _nothing
            self._working_since = time.monotonic()
            if time.monotonic() >= expire_at_s:
                for tier in self.tiers:
                    self._guarded(tier.evict_expired)
                self._guarded(self._index.env.reader_check)
                expire_at_s = time.monotonic() + _EXPIRE_EVERY_S
            if isinstance(item, tuple):
                batch, item = self._batch(item)
                self._store(batch)
            if item is None:
                return
            item()
            self._working_since = None

    def _batch(self, first: _Queued) -> tuple[list[_Queued], Callable[[], None] | None]:
        """Wait for more blocks; return them, and what is to be done behind them."""
        self._hurry.wait(_LINGER_S)
        self._hurry.clear()
        batch, size = [first], len(first[0].data)
        item: _Queued | Callable[[], None] | None = _nothing
        while len(batch) < _BATCH_BLOCKS and size < _BATCH_BYTES:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if not isinstance(item, tuple):
                break
            batch.append(item)
            size += len(item[0].data)
        if not self._queue.empty():
            self._hurry.set()  # somebody may wait for what is left
        return batch, _nothing if isinstance(item, tuple) else item

    def _store(self, batch: list[_Queued]) -> None:
        blocks = [(block, sums) for block, sums, _ in batch]
        ram, ssd = self.tiers
        mine = [n for n, (block, _) in enumerate(blocks) if not block.in_ram_only]
        on_ssd = dict(zip(mine, self._put(ssd, [blocks[n] for n in mine]), strict=True))
        # RAM is for what readers wait for, and for what the SSD has no room for: taking fresh memory for a whole
        # warm-up can cost more than fetching it, and the page cache keeps what is read from the SSD.
        chosen = [n for n, (block, _) in enumerate(blocks) if not (block.ahead and on_ssd.get(n))]
        in_ram = dict(zip(chosen, self._put(ram, [blocks[n] for n in chosen]), strict=True))
        for n, (_, _, stored) in enumerate(batch):
            try:
                stored(on_ssd.get(n, False) or in_ram.get(n, False))
            except Exception:  # a defect, as in `_put`
                log.exception("what follows on a stored block")

    def _put(self, tier: Tier, blocks: Sequence[tuple[Block, bytes]]) -> list[bool]:
        try:
            planned = any(block.lane for block, _ in blocks)
            wanted: dict[str, int] = {}
            for block, _ in blocks:
                wanted[block.dataset] = wanted.get(block.dataset, 0) + block.disk_bytes
            needs: dict[str, int] = {}
            for dataset, size_bytes in wanted.items():
                tier.make_own_room(dataset, size_bytes + DISK_BLOCK, planned=planned)
                group = tier.group(dataset)  # nobody else makes room for what is beyond a namespace's limit
                needs[group] = needs.get(group, 0) + int(min(size_bytes, tier.charges.room_bytes(dataset)))
            total = 0
            for group in sorted(needs, key=tier.has_share):  # what one makes room for is not the next one's
                total += needs[group]
                tier.make_room(total, planned=planned, group=group)
            return tier.put(blocks, self._pins)
        except (lmdb.Error, OSError) as exc:
            log.warning("the cache index cannot be written: %s", exc)
        except Exception:  # a defect; without this thread nothing would be stored any more, nor any status be told
            log.exception("%d blocks are not kept", len(blocks))
        return [False] * len(blocks)

    def _save_pins(self, pinned: dict[str, str]) -> None:
        if not self.part.number:
            write_pins(self._pins_file, pinned)
        self._pins = pinned

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (lmdb.Error, OSError) as exc:
            log.warning("the cache index: %s", exc)


def _nothing() -> None:
    """Do nothing: nobody wants anything."""


def read_pins(path: Path) -> dict[str, str]:
    """Return the pinned refs of a home and their data sets; none if there is no such file."""
    try:
        return {str(ref): str(dataset) for ref, dataset in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as exc:
        log.warning("the pins in %s cannot be read: %s", path, exc)
        return {}


def write_pins(path: Path, pins: dict[str, str]) -> None:
    """Replace the file of pins, durably. `OSError` leaves it as it was."""
    replace_file(path, json.dumps(pins).encode())
