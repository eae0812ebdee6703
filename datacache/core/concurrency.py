"""Concurrency primitives the layers share: what happens after `fork()` and how much is in flight is decided here."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value made once in each process: a child of `fork()` makes its own and leaves its parent's alone.

    For connections, runtimes and open databases, which must not cross a fork. `get` is safe from several threads.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._pid = 0
        self._value: T | None = None
        self._parents: list[object] = []  # kept, so that a child never finalises what is its parent's
        _instances.add(self)  # type: ignore[arg-type]

    def get(self) -> T:
        """This process's value."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._parents.append(self._value)
                    self._value = self._make()
                    self._pid = os.getpid()
        return self._value  # type: ignore[return-value]

    def peek(self) -> T | None:
        """This process's value if it was made already."""
        return self._value if self._pid == os.getpid() else None

    def __reduce__(self) -> tuple[object, ...]:
        return (PerProcess, (self._make,))


def _renew_locks() -> None:
    for instance in _instances:
        instance._lock = threading.Lock()  # a thread of the parent may have held it


_instances: weakref.WeakSet[PerProcess[object]] = weakref.WeakSet()
os.register_at_fork(after_in_child=_renew_locks)


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
