"""Memory of a process that takes and frees thousands of large blocks: fast while it works, given back when it is idle.

glibc gives a freed block of 100 KB back to the kernel at once and faults the next one in again, so the daemon raises
the threshold (mallopt(3)). The price is that memory of a busy minute stays: each thread may have an arena of its own,
and none shrinks. So there are few arenas, and `Trimmer` has glibc give free memory back once nothing was fetched for
some seconds. With another C library nothing of this happens.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_ARENA_MAX = -1, -8  # malloc.h
_KEEP_BYTES = 2**28
_ARENAS = 4
_LOOK_EVERY_S = 5.0


def tune() -> None:
    """Set up the allocator of this process, before it has threads."""
    libc = _glibc()
    if libc is None:
        return
    for what, value in ((_M_TRIM_THRESHOLD, _KEEP_BYTES), (_M_ARENA_MAX, _ARENAS)):
        if not libc.mallopt(what, value):
            log.info("mallopt(%d) is not possible", what)


class Trimmer:
    """A thread that gives memory back while nothing happens. `activity` returns a number that changes while something
    does."""

    def __init__(self, activity: Callable[[], object], *, every_s: float = _LOOK_EVERY_S) -> None:
        self._activity, self._every_s = activity, every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trim", daemon=True)
        self.trimmed = 0
        """The number of times that memory was given back."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        libc = _glibc()
        seen = given_back_at = self._activity()
        while not self._stopping.wait(self._every_s):
            now = self._activity()
            if now == seen and now != given_back_at:
                given_back_at = now
                gc.collect()
                if libc is not None:
                    libc.malloc_trim(0)  # in all arenas; other threads go on
                self.trimmed += 1
            seen = now


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
