"""Keep the last values that took long to load: packs of the catalog, blocks that are read past the daemon.

Any thread of one process; what is to survive `fork()` is made by `PerProcess`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bytes, bytes | memoryview)


class LastLoaded(Generic[K, V]):
    """Hold bytes by their key, up to a number of bytes and one value at least. Each is loaded once, however many ask at
    the same moment; what cannot be loaded is an error for all of these, and is tried again by who asks later."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()  # guards all below; never held while anything is loaded
        self._bytes = 0
        self._held: OrderedDict[K, V] = OrderedDict()
        self._coming: dict[K, Future[V]] = {}

    def get(self, key: K, load: Callable[[], V]) -> V:
        """Return the value of a key, by `load` where it is not held. Raises what that raises."""
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                return held
            future = self._coming.get(key)
            begun = future is None
            if future is None:
                future = self._coming[key] = Future()
        if not begun:
            return future.result()
        try:
            value = load()
        except BaseException as exc:
            with self._lock:
                del self._coming[key]
            future.set_exception(exc)
            raise
        with self._lock:
            self._held[key] = value
            self._bytes += len(value)
            while self._bytes > self._limit_bytes and len(self._held) > 1:
                self._bytes -= len(self._held.popitem(last=False)[1])
            del self._coming[key]
        future.set_result(value)
        return value

    def forget(self, which: Callable[[K], bool]) -> None:
        """Let go of what is held under such keys."""
        with self._lock:
            for key in [key for key in self._held if which(key)]:
                self._bytes -= len(self._held.pop(key))
