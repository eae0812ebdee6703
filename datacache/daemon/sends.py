"""Turns at being sent large blocks, where several data sets are read: one at a time for each.

One thread of the daemon sends all answers and hears all requests. With two hundred readers of one data set, each of
whose answers goes out piece by piece, a request of another one waited for some pieces of each; and the gets that make
room for more answers took the processors besides. A data set that is read alone has no turns: they would cost it
some of its speed.

For the daemon's event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_READ_LATELY_S = 1.0
_MOST_FLOWS = 1000
SLOW_S = 0.25
"""How long a turn lasts at most: the answer goes on being sent to a reader that takes it slowly, and the next one
begins. Half as long after each such turn, down to `_SHORTEST_S`: many of them keep nobody waiting for long."""
_SHORTEST_S = 0.01


class Sends:
    """Count what is being sent, by data set, or by the share of the cache that it belongs to (`flow`)."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()
        self._waiting: defaultdict[str, deque[asyncio.Future[None]]] = defaultdict(deque)
        self._read_at: dict[str, float] = {}
        self._slow_s: dict[str, float] = {}

    def note_read(self, flow: str) -> None:
        """Note that somebody asks for a block."""
        now = time.monotonic()
        self._read_at[flow] = now
        if len(self._read_at) > _MOST_FLOWS:
            self._read_at = {name: at for name, at in self._read_at.items() if now - at < _READ_LATELY_S}
            self._slow_s = {name: slow_s for name, slow_s in self._slow_s.items() if name in self._read_at}

    @asynccontextmanager
    async def turn(self, flow: str) -> AsyncIterator[None]:
        """Wait for the turn to send a large answer; it lasts as long as the block, or `SLOW_S`."""
        loop = asyncio.get_running_loop()
        if self._under_way[flow] and self._others_read(flow):
            turn = loop.create_future()
            self._waiting[flow].append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it had come
                    self._end(flow)
                raise
        else:
            self._under_way[flow] += 1
        slow = loop.call_later(self._slow_s.get(flow, SLOW_S), self._is_slow, flow)
        try:
            yield
        finally:
            if slow.when() > loop.time():  # else it ends the turn, or has
                slow.cancel()
                if flow in self._slow_s:
                    self._slow_s[flow] *= 2
                    if self._slow_s[flow] >= SLOW_S:
                        del self._slow_s[flow]
                self._end(flow)

    def _is_slow(self, flow: str) -> None:
        self._slow_s[flow] = max(_SHORTEST_S, self._slow_s.get(flow, SLOW_S) / 2)
        self._end(flow)

    def _end(self, flow: str) -> None:
        """Give a turn to who waits longest, unless there are several since the data set was read alone."""
        waiting = self._waiting[flow]
        while waiting and waiting[0].done():  # cancelled
            waiting.popleft()
        if waiting and (self._under_way[flow] == 1 or not self._others_read(flow)):
            waiting.popleft().set_result(None)
        else:
            self._under_way[flow] -= 1
        if not waiting:
            del self._waiting[flow]
        if not self._under_way[flow]:
            del self._under_way[flow]

    def _others_read(self, flow: str) -> bool:
        since = time.monotonic() - _READ_LATELY_S
        return any(at > since for name, at in self._read_at.items() if name != flow)
