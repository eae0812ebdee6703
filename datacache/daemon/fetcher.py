"""Fetch blocks from the stores: each once, however many ask; readers first; bounded in number and bytes.

Lives in the daemon's event loop. A block's bytes reach whoever waits as soon as they are here; a flight ends when the
tiers have stored them, so that somebody who asks a moment later is served from memory or from the index, never by a
second get.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

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
_IN_FLIGHT_BYTES = 256 * 2**20
_READ_AHEAD_BLOCKS = 4


@dataclass
class FetchStats:
    """What was fetched since the daemon's start."""

    fetched: int = 0
    fetched_bytes: int = 0
    failed: int = 0
    shared: int = 0
    """Requests that joined a flight already under way."""


@dataclass
class _Flight:
    data: asyncio.Future[bytes | memoryview]
    stored: asyncio.Future[bool]
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


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
        data = await asyncio.shield(self._flight(ref, number, dataset, self._reading).data)
        if block_count(ref.size_bytes) > 1:
            self._read_ahead(ref, number, dataset)
        return data

    async def fill(self, ref: ObjectRef, number: int, dataset: str) -> bool:
        """A block for the tiers: whether one of them keeps it. Raises the store's errors."""
        id = block_id(object_id(ref), number)
        if id not in self._flights and self.has(id):  # a reader was quicker
            return True
        flight = self._flight(ref, number, dataset, self._filling)
        await asyncio.shield(flight.data)
        return await asyncio.shield(flight.stored)

    async def drain(self) -> None:
        """Wait for what is under way (at a clean stop)."""
        flights = list(self._flights.values())
        for flight in flights:
            await asyncio.wait([flight.stored], timeout=5.0)

    @property
    def under_way(self) -> int:
        """Blocks in flight."""
        return len(self._flights)

    def _flight(self, ref: ObjectRef, number: int, dataset: str, slots: asyncio.Semaphore) -> _Flight:
        id = block_id(object_id(ref), number)
        flight = self._flights.get(id)
        if flight is not None:
            self.stats.shared += 1
            return flight
        loop = asyncio.get_running_loop()
        flight = self._flights[id] = _Flight(loop.create_future(), loop.create_future())
        task = loop.create_task(self._get(flight, ref, number, dataset=dataset, slots=slots))
        flight.tasks.add(task)
        return flight

    async def _get(
        self, flight: _Flight, ref: ObjectRef, number: int, *, dataset: str, slots: asyncio.Semaphore
    ) -> None:
        id = block_id(object_id(ref), number)
        length = block_length(ref.size_bytes, number)
        start = number * BLOCK_BYTES
        loop = asyncio.get_running_loop()
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
            _fail(flight.data, exc)
            _fail(flight.stored, exc)
            return
        self.stats.fetched += 1
        self.stats.fetched_bytes += length

        def land(kept: bool) -> None:
            self._flights.pop(id, None)
            self._budget.give(length)
            if not flight.stored.done():
                flight.stored.set_result(kept)

        flight.data.set_result(data)
        block = Block(id=id, object_bytes=ref.size_bytes, number=number, data=data, dataset=dataset)

        def stored(kept: bool) -> None:  # in the writer's thread
            loop.call_soon_threadsafe(land, kept)

        self._writer.put(block, stored)

    def _read_ahead(self, ref: ObjectRef, number: int, dataset: str) -> None:
        """Somebody reads a large object: have its next blocks on the way."""
        obj = object_id(ref)
        for ahead in range(number + 1, min(number + 1 + _READ_AHEAD_BLOCKS, block_count(ref.size_bytes))):
            id = block_id(obj, ahead)
            if id not in self._flights and not self.has(id):
                self._flight(ref, ahead, dataset, self._filling)


def _fail(future: asyncio.Future[bytes | memoryview] | asyncio.Future[bool], exc: BaseException) -> None:
    if not future.done():
        future.set_exception(exc)
        future.exception()  # a flight nobody waits for is no news
