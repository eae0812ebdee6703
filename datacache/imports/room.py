"""What bounds the import of one object: room in memory, and time.

Used by the threads of an import; each object has its own `Room` and `Clock`, in one thread.
"""

from __future__ import annotations

import time
from types import TracebackType

from datacache.core.budget import ByteBudget
from datacache.imports.failures import TooSlowError


class Clock:
    """The time one object may take, waiting for room not counted."""

    def __init__(self, shown_url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = shown_url, timeout_s
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """What is left; at the end 0 or less."""
        return self._end - time.monotonic()

    def check(self) -> None:
        """`TooSlowError` once the time is over."""
        if self.left_s() <= 0:
            raise TooSlowError(f"{self._url}: it was not here after {self._timeout_s:g} s", url=self._url)

    def extend(self, seconds: float) -> None:
        """Do not count these."""
        self._end += seconds


class Room:
    """A share of the bytes that may be in flight, given back at the end of a `with` block."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._held = 0

    def take(self, size_bytes: int, clock: Clock) -> None:
        """Hold this much instead of what is held. A share is never raised while it is held: two that wait for each
        other's would wait for ever."""
        self.give()
        began = time.monotonic()
        self._budget.take(size_bytes)
        self._held = size_bytes
        clock.extend(time.monotonic() - began)

    def give(self) -> None:
        """Hold nothing."""
        if self._held:
            self._budget.give(self._held)
            self._held = 0

    def __enter__(self) -> Room:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.give()
