"""The one writer of a node's tiers: a thread that takes fetched blocks and commits them to the index in batches.

Used by the daemon only. Each block goes to the SSD, so what leaves RAM is there already; RAM takes what readers wait
for, and of what is fetched ahead only what the SSD has no room for. Blocks are visible to all readers once their batch
is committed; `stored` is then called (in the writer thread) with whether any tier kept the block.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import lmdb

from datacache.core.objects import BlockId
from datacache.tiers import layout
from datacache.tiers.index import Index
from datacache.tiers.tier import Block, Tier

log = logging.getLogger(__name__)
_BATCH_BLOCKS, _BATCH_BYTES = 64, 16 * 2**20
_EXPIRE_EVERY_S = 10.0
_PINS = b"pins"
T = TypeVar("T")
Stored = Callable[[bool], None]


class TierWriter:
    """Owns the tiers. `put` and `call` may be used from any thread; the queue is bounded by whoever holds the bytes."""

    def __init__(self, index: Index, tiers: Iterable[Tier]) -> None:
        self._index = index
        self.tiers = tuple(tiers)
        with index.env.begin() as txn:
            raw = txn.get(_PINS, db=index.meta)
        self._pins: dict[str, str] = json.loads(raw) if raw else {}  # ref → data set
        self._queue: queue.SimpleQueue[tuple[Block, Stored] | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tier-writer", daemon=True)
        self._thread.start()

    def put(self, block: Block, stored: Stored) -> None:
        """Queue one block."""
        self._queue.put((block, stored))

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run something that touches the tiers in the writer thread."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as exc:  # noqa: BLE001 - it belongs to whoever waits for the future
                future.set_exception(exc)

        self._queue.put(run)
        return future

    def pin(self, ref: str, dataset: str, blocks: Iterable[BlockId]) -> None:
        """Keep what is here of a snapshot, and what will come for its data set. Call through `call`."""
        self._pins[ref] = dataset
        self._save_pins()
        wanted: list[set[int]] = [set() for _ in self.tiers]
        with self._index.env.begin() as txn:
            for block in blocks:
                for tier, found in zip(self.tiers, wanted, strict=True):
                    value = txn.get(block, db=self._index.blocks[tier.name])
                    if value is not None:
                        found.add(layout.unpack_location(value).container)
        for tier, found in zip(self.tiers, wanted, strict=True):
            tier.pin(ref, found)

    def unpin(self, ref: str) -> bool:
        """Whether the ref was pinned. Call through `call`."""
        known = self._pins.pop(ref, None) is not None
        self._save_pins()
        for tier in self.tiers:
            tier.unpin(ref)
        return known

    def pins(self) -> dict[str, str]:
        """Pinned refs and their data sets."""
        return dict(self._pins)

    def drop(self, block: BlockId) -> None:
        """Forget a block everywhere. Call through `call`."""
        with self._index.env.begin(write=True) as txn:
            for tier in self.tiers:
                tier.drop(txn, block)

    def evict(self, dataset: str | None) -> int:
        """Drop a data set's containers, or all that nobody pinned; the bytes that came free. Call through `call`."""
        freed = 0
        for tier in self.tiers:
            chosen = [
                id
                for id, container in tier.containers.items()
                if (container.dataset == dataset if dataset else not container.pinned_by)
            ]
            freed += tier.evict(chosen)
        return freed

    def count_blocks(self, tier: str) -> int:
        """How many blocks the index has for a tier."""
        with self._index.env.begin() as txn:
            return int(txn.stat(self._index.blocks[tier])["entries"])

    def close(self) -> None:
        """Write what is queued, seal the regions, end the thread."""
        self._queue.put(None)
        self._thread.join()
        for tier in self.tiers:
            tier.seal_all()

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_EXPIRE_EVERY_S)
            except queue.Empty:
                for tier in self.tiers:
                    self._guarded(tier.evict_expired)
                self._guarded(self._index.env.reader_check)
                continue
            batch: list[tuple[Block, Stored]] = []
            size = 0
            while isinstance(item, tuple):
                batch.append(item)
                size += len(item[0].data)
                if len(batch) >= _BATCH_BLOCKS or size >= _BATCH_BYTES or self._queue.empty():
                    break
                item = self._queue.get_nowait()  # only this thread takes from the queue
            if batch:
                self._store(batch)
            if item is None:
                return
            if callable(item):
                item()

    def _store(self, batch: list[tuple[Block, Stored]]) -> None:
        kept = [False] * len(batch)
        try:
            blocks = [(block, layout.checksums(block.data)) for block, _ in batch]
            ram, ssd = self.tiers
            _make_room(ssd, blocks)
            with self._index.env.begin(write=True) as txn:
                on_ssd = ssd.put(txn, blocks, self._pins)
            # RAM is for what readers wait for, and for what the SSD has no room for: taking fresh memory for a whole
            # warm-up can cost more than fetching it, and the page cache keeps what is read from the SSD.
            chosen = [n for n, (block, _) in enumerate(blocks) if not (block.ahead and on_ssd[n])]
            for_ram = [blocks[n] for n in chosen]
            _make_room(ram, for_ram)
            with self._index.env.begin(write=True) as txn:
                in_ram = dict(zip(chosen, ram.put(txn, for_ram, self._pins), strict=True))
            kept = [on_ssd[n] or in_ram.get(n, False) for n in range(len(blocks))]
        except (lmdb.Error, OSError) as exc:
            log.warning("the cache index cannot be written: %s", exc)
        for (_, stored), is_kept in zip(batch, kept, strict=True):
            stored(is_kept)

    def _save_pins(self) -> None:
        with self._index.env.begin(write=True) as txn:
            txn.put(_PINS, json.dumps(self._pins).encode(), db=self._index.meta)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (lmdb.Error, OSError) as exc:
            log.warning("the cache index: %s", exc)


def _make_room(tier: Tier, blocks: Sequence[tuple[Block, bytes]]) -> None:
    tier.make_room(sum(block.disk_bytes() for block, _ in blocks))
