"""A bound on the bytes that are in flight at once, for one event loop."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """How many bytes may be in flight at once, first come, first served. For one event loop.

    A request larger than the whole budget waits until it is alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` fit; whoever takes them gives them back."""
        if not self._waiting and self._fits(size_bytes):
            self._held += size_bytes
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give(size_bytes)  # it was granted in the same moment
            raise

    def give(self, size_bytes: int) -> None:
        """Give bytes back."""
        self._held -= size_bytes
        while self._waiting:
            size, future = self._waiting[0]
            if future.done():
                self._waiting.popleft()
            elif self._fits(size):
                self._waiting.popleft()
                self._held += size
                future.set_result(None)
            else:
                return

    def _fits(self, size_bytes: int) -> bool:
        return self._held == 0 or self._held + size_bytes <= self._limit
