"""Concurrency primitives the layers share: what happens after `fork()` and how much is in flight is decided here."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that each process makes for itself when it first asks: `fork()` gives a child none of its parent's.

    For connections, runtimes and open databases: a DataLoader forks its workers, and two processes on one socket read
    each other's answers. What a child inherited is kept unused, never finalised. Takes no lock, since one held during
    `fork()` would stay held in the child: of two threads that ask first at the same moment, both get the value that
    stays.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}  # by generation of processes

    def get(self) -> T:
        """This process's value. Raises what making it raises, and tries again at the next call."""
        try:
            return self._values[_generation]
        except KeyError:
            return self._values.setdefault(_generation, self._make())

    def peek(self) -> T | None:
        """This process's value if it was made already."""
        return self._values.get(_generation)

    def take(self) -> T | None:
        """Give up this process's value, if there is one, for the caller to close."""
        return self._values.pop(_generation, None)

    def __reduce__(self) -> tuple[object, ...]:
        return (PerProcess, (self._make,))


_generation = 0
"""How many forks lie between the first process and this one: cheaper to look at than the pid."""


def _count_fork() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_count_fork)


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
