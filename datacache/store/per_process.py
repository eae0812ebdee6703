"""A value that every process makes for itself.

Backends keep their connections in one: a DataLoader forks its workers, and two processes that talk through
the same socket read each other's answers. A forked child makes a new value at its first call and never
touches, not even to destroy it, the one it inherited. Safe from every thread without a lock (a lock held
during `fork()` would stay locked in the child); two threads that come first at the same time may make two
values, of which one is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """`get()` gives this process's value, made by `make()` when it is first asked for."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._slot: tuple[int, T] | None = None
        self._inherited: list[object] = []

    def get(self) -> T:
        """This process's value. Raises what `make()` raises, and tries again at the next call."""
        slot = self._slot
        pid = os.getpid()
        if slot is not None:
            if slot[0] == pid:
                return slot[1]
            self._inherited.append(slot)
        slot = (pid, self._make())
        self._slot = slot
        return slot[1]

    def take(self) -> T | None:
        """Give up this process's value, if there is one, for the caller to close."""
        slot = self._slot
        if slot is None or slot[0] != os.getpid():
            return None
        self._slot = None
        return slot[1]
