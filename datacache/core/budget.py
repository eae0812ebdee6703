"""A bound on the bytes that are in flight at once."""

from __future__ import annotations

import threading


class ByteBudget:
    """Whoever holds bytes takes room for them first and gives it back. Safe from several threads.

    A request larger than the whole budget waits until it is alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._changed = threading.Condition()  # guards _held

    def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` fit."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size_bytes <= self._limit)
            self._held += size_bytes

    def give(self, size_bytes: int) -> None:
        """Give bytes back."""
        with self._changed:
            self._held -= size_bytes
            self._changed.notify_all()
