"""What happens after `fork()` is decided here: DataLoader workers fork, and so does everybody who uses them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that each process makes for itself when it first asks: `fork()` gives a child none of its parent's.

    For connections, runtimes and open databases: a DataLoader forks its workers, and two processes on one socket read
    each other's answers. What a child inherited is kept unused, never finalised. Threads that ask first at the same
    moment wait for one of them to make it; a lock that a parent's thread held during `fork()` is not the child's.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}  # by generation of processes
        self._locks: dict[int, threading.Lock] = {}

    def get(self) -> T:
        """This process's value. Raises what making it raises, and tries again at the next call."""
        try:
            return self._values[_generation]
        except KeyError:
            pass
        with self._locks.setdefault(_generation, threading.Lock()):
            if _generation not in self._values:
                self._values[_generation] = self._make()
            return self._values[_generation]

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
