"""Fetch blocks from the stores: each once, however many ask; readers first; bounded in number and bytes.

Lives in the daemon's event loop. A block's bytes reach whoever waits as soon as they are here; a flight ends when the
tiers have stored them, so that somebody who asks a moment later is served from memory or from the index, never by a
second get.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from datacache.core.objects import (
    BLOCK_BYTES,
    BlockId,
    ObjectRef,
    block_count,
    block_id,
    block_length,
    object_id,
)
from datacache.daemon.budget import ByteBudget
from datacache.store.base import ObjectStore
from datacache.tiers.local import LocalBlocks
from datacache.tiers.tier import Block
from datacache.tiers.writer import TierWriter

log = logging.getLogger(__name__)
_IN_FLIGHT_BYTES = 128 * 2**20
_READ_AHEAD_BLOCKS = 4
_DRAIN_S = 5.0


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

    __slots__ = ("data", "on_stored", "task")

    def __init__(self, data: asyncio.Future[bytes | memoryview]) -> None:
        self.data = data
        self.on_stored: list[Callable[[bool], None]] = []
        self.task: asyncio.Task[None] | None = None


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
        self._flights: dict[BlockId, _Flight] = {}
        self._budget = ByteBudget(_IN_FLIGHT_BYTES)
        # Readers never queue behind a warm-up: each kind has its own slots, and warm-ups get a share that keeps the
        # store's answer to a reader quick.
        self._reading = asyncio.Semaphore(concurrency)
        self._filling = asyncio.Semaphore(concurrency)
        self._loop = asyncio.get_running_loop()
        self._landed: deque[tuple[BlockId, int, bool]] = deque()
        self._landing = False
        self.stats = FetchStats()

    def has(self, block: BlockId) -> bool:
        """Whether a block is on this node already."""
        return self._local.has(block)

    async def read(self, ref: ObjectRef, number: int, dataset: str) -> bytes | memoryview:
        """A block for somebody who waits. Raises the store's errors."""
        id = block_id(object_id(ref), number)
        if id not in self._flights:  # it may have landed since the reader looked
            found = self._local.view(id, 0, None)
            if found is not None:
                return found[0]
        data = await asyncio.shield(self._flight(id, ref, number, dataset, self._reading).data)
        if block_count(ref.size_bytes) > 1:
            self._read_ahead(ref, number, dataset)
        return data

    async def fill(
        self, id: BlockId, ref: ObjectRef, number: int, dataset: str, *, stored: Callable[[bool], None]
    ) -> None:
        """A block for the tiers. Returns when its bytes have come, so that the next can be asked for; `stored` is
        called when the tiers have taken it or not. Raises the store's errors, and then calls nothing."""
        flight = self._flights.get(id)
        if flight is not None:
            self.stats.shared += 1
            await asyncio.shield(flight.data)
            if id in self._flights:
                flight.on_stored.append(stored)
            else:
                stored(self.has(id))
        elif self.has(id):  # a reader was quicker
            stored(True)
        else:
            flight = self._begin(id)
            flight.on_stored.append(stored)
            await self._get(flight, id, ref, number, dataset=dataset, slots=self._filling)
            if (error := flight.data.exception()) is not None:
                raise error

    async def drain(self) -> None:
        """Wait a moment for what is under way (at a clean stop)."""
        data = [flight.data for flight in self._flights.values()]
        if data:
            await asyncio.wait(data, timeout=_DRAIN_S)

    @property
    def under_way(self) -> int:
        """Blocks in flight."""
        return len(self._flights)

    def _begin(self, id: BlockId) -> _Flight:
        flight = self._flights[id] = _Flight(asyncio.get_running_loop().create_future())
        return flight

    def _flight(self, id: BlockId, ref: ObjectRef, number: int, dataset: str, slots: asyncio.Semaphore) -> _Flight:
        """The flight of a block, begun if need be; it goes on when nobody waits any more."""
        flight = self._flights.get(id)
        if flight is not None:
            self.stats.shared += 1
            return flight
        flight = self._begin(id)
        flight.task = asyncio.get_running_loop().create_task(
            self._get(flight, id, ref, number, dataset=dataset, slots=slots)
        )
        return flight

    async def _get(
        self,
        flight: _Flight,
        id: BlockId,
        ref: ObjectRef,
        number: int,
        *,
        dataset: str,
        slots: asyncio.Semaphore,
    ) -> None:
        length = block_length(ref.size_bytes, number)
        start = number * BLOCK_BYTES
        try:
            async with slots:
                await self._budget.take(length)
                try:
                    data = await self._open_store(ref.store).read_async(ref, start, start + length)
                except BaseException:
                    self._budget.give(length)
                    raise
        except BaseException as exc:  # noqa: BLE001 - whoever waits gets it, whatever it is
            del self._flights[id]
            self.stats.failed += 1
            flight.data.set_exception(exc)
            flight.data.exception()  # a flight nobody waits for is no news
            return
        self.stats.fetched += 1
        self.stats.fetched_bytes += length
        flight.data.set_result(data)
        block = Block(id=id, object_bytes=ref.size_bytes, number=number, data=data, dataset=dataset)
        self._writer.put(block, lambda kept: self._stored(id, length, kept))

    def _stored(self, id: BlockId, length: int, kept: bool) -> None:
        """In the writer's thread: hand over to the loop, waking it once for many."""
        self._landed.append((id, length, kept))
        if not self._landing:
            self._landing = True
            self._loop.call_soon_threadsafe(self._land)

    def _land(self) -> None:
        self._landing = False  # before looking: what comes from now on wakes us again
        while self._landed:
            id, length, kept = self._landed.popleft()
            self._budget.give(length)
            for stored in self._flights.pop(id).on_stored:
                stored(kept)

    def _read_ahead(self, ref: ObjectRef, number: int, dataset: str) -> None:
        """Somebody reads a large object: have its next blocks on the way."""
        obj = object_id(ref)
        for ahead in range(number + 1, min(number + 1 + _READ_AHEAD_BLOCKS, block_count(ref.size_bytes))):
            id = block_id(obj, ahead)
            if id not in self._flights and not self.has(id):
                self._flight(id, ref, ahead, dataset, self._filling)
