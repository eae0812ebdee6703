"""Fetch blocks from the stores: each once, however many ask; readers first; bounded in number and bytes.

Any thread of the daemon may ask. A block's bytes reach whoever waits as soon as they are here; its flight ends when
the tiers have stored it, so that somebody who asks a moment later is served from memory or from the index, never by a
second get. Threads rather than an event loop: obstore's synchronous calls leave the interpreter alone while they run,
and cost two thirds of the processor time of its awaitable ones.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from datacache.core.objects import BLOCK_BYTES, BlockId, ObjectRef, block_count, block_id, block_length, object_id
from datacache.daemon.budget import ByteBudget
from datacache.store.base import ObjectStore
from datacache.tiers.local import LocalBlocks
from datacache.tiers.tier import Block
from datacache.tiers.writer import TierWriter

log = logging.getLogger(__name__)
_IN_FLIGHT_BYTES = 128 * 2**20
_READ_AHEAD_BLOCKS = 4

Data = bytes | memoryview
Stored = Callable[[bool], None]


@dataclass
class FetchStats:
    """What was fetched since the daemon's start."""

    fetched: int = 0
    fetched_bytes: int = 0
    failed: int = 0
    shared: int = 0
    """Requests that joined a flight already under way."""


class _Flight:
    """A block between the first request for it and its place in the tiers."""

    __slots__ = ("data", "stored")

    def __init__(self) -> None:
        self.data: Future[Data] = Future()
        self.stored: list[Stored] = []


class Fetcher:
    """The daemon's gets."""

    def __init__(
        self,
        writer: TierWriter,
        local: LocalBlocks,
        open_store: Callable[[str], ObjectStore],
        concurrency: int,
    ) -> None:
        self._writer = writer
        self._local = local
        self._open_store = open_store
        self._lock = threading.Lock()  # guards _flights, what hangs on a flight, and stats
        self._flights: dict[BlockId, _Flight] = {}
        self._budget = ByteBudget(_IN_FLIGHT_BYTES)
        # Reads that wait have threads of their own, so that they never queue behind what is fetched ahead.
        self._readers = ThreadPoolExecutor(concurrency, thread_name_prefix="read")
        self._ahead = ThreadPoolExecutor(_READ_AHEAD_BLOCKS, thread_name_prefix="ahead")
        self.stats = FetchStats()

    def has(self, block: BlockId) -> bool:
        """Whether a block is on this node already."""
        return self._local.has(block)

    def read(self, ref: ObjectRef, number: int, dataset: str) -> Future[Data]:
        """A block for somebody who waits. The future may have the store's errors."""
        id = block_id(object_id(ref), number)
        if block_count(ref.size_bytes) > 1:
            self._read_ahead(ref, number, dataset)
        flight, begun = self._flight(id)
        if not begun:
            return flight.data
        found = self._local.view(id, 0, None)  # it may have landed since the reader looked
        if found is not None:
            self._end(id, flight, kept=True)
            flight.data.set_result(found[0])
        else:
            self._readers.submit(self._get, flight, id, ref, number, dataset)
        return flight.data

    def fill(self, id: BlockId, ref: ObjectRef, number: int, dataset: str, *, stored: Stored) -> None:
        """A block for the tiers, fetched in this thread. Returns when its bytes have come; `stored` is called, in any
        thread, when the tiers have taken them or not. Raises the store's errors, and then calls nothing."""
        if self.has(id):
            stored(True)
            return
        flight, begun = self._flight(id, stored)
        if begun:
            self._get(flight, id, ref, number, dataset, ahead=True)
        flight.data.result()

    def close(self) -> None:
        """Let what is under way end; what has not begun is dropped."""
        self._ahead.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    @property
    def under_way(self) -> int:
        """Blocks in flight."""
        return len(self._flights)

    def _flight(self, id: BlockId, stored: Stored | None = None) -> tuple[_Flight, bool]:
        """The flight of a block, and whether the caller has just begun it and must see to it."""
        with self._lock:
            flight = self._flights.get(id)
            begun = flight is None
            if flight is None:
                flight = self._flights[id] = _Flight()
            else:
                self.stats.shared += 1
            if stored is not None:
                flight.stored.append(stored)
            return flight, begun

    def _get(
        self, flight: _Flight, id: BlockId, ref: ObjectRef, number: int, dataset: str, *, ahead: bool = False
    ) -> None:
        length = block_length(ref.size_bytes, number)
        start = number * BLOCK_BYTES
        self._budget.take(length)
        try:
            data = self._open_store(ref.store).read(ref, start, start + length)
        except BaseException as exc:  # noqa: BLE001 - whoever waits gets it, whatever it is
            self._budget.give(length)
            with self._lock:
                self.stats.failed += 1
                del self._flights[id]
            flight.data.set_exception(exc)
            return
        with self._lock:
            self.stats.fetched += 1
            self.stats.fetched_bytes += length

        def landed(kept: bool) -> None:  # in the writer's thread
            self._budget.give(length)
            self._end(id, flight, kept=kept)

        block = Block(id=id, object_bytes=ref.size_bytes, number=number, data=data, dataset=dataset, ahead=ahead)
        self._writer.put(block, landed)
        flight.data.set_result(data)

    def _end(self, id: BlockId, flight: _Flight, *, kept: bool) -> None:
        with self._lock:
            del self._flights[id]
        for stored in flight.stored:
            stored(kept)

    def _read_ahead(self, ref: ObjectRef, number: int, dataset: str) -> None:
        """Somebody reads a large object: have its next blocks on the way."""
        obj = object_id(ref)
        for ahead in range(number + 1, min(number + 1 + _READ_AHEAD_BLOCKS, block_count(ref.size_bytes))):
            id = block_id(obj, ahead)
            if id not in self._flights and not self.has(id):
                flight, begun = self._flight(id)
                if begun:
                    self._ahead.submit(self._get, flight, id, ref, ahead, dataset, ahead=True)
