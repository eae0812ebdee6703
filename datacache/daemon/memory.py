"""Memory of a process that takes and frees thousands of large blocks: fast while it works, given back when it is idle.

glibc gives a freed block of 100 KB back to the kernel at once and faults the next one in again, which costs half a
millisecond a MiB, so the daemon raises the thresholds (mallopt(3)). The price is that memory of a busy minute stays, so
`IdleTrim` has glibc give free memory back once nothing was fetched for some seconds. That leaves the free end of every
arena but the first, so all threads share one: after a warm-up of 1 GiB in large objects the process has 74 MiB, and
with four arenas 117 to 169, for the same processor time. With another C library nothing of this happens.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_KEEP_BYTES = 2**28
_MAPPED_BYTES = 2**25  # glibc refuses more; without it one of 128 KiB holds once another threshold was set
_ARENAS = 1


def tune() -> None:
    """Set up the allocator of this process, before it has threads."""
    libc = _glibc()
    chosen = {_M_TRIM_THRESHOLD: _KEEP_BYTES, _M_MMAP_THRESHOLD: _MAPPED_BYTES, _M_ARENA_MAX: _ARENAS}
    for what, value in chosen.items():
        if libc is not None and not libc.mallopt(what, value):
            log.info("mallopt(%d) is not possible", what)


class IdleTrim:
    """Give memory back each time that nothing has happened between two looks. One thread."""

    def __init__(self, activity: Callable[[], object]) -> None:
        """`activity` returns what changes when something happens."""
        self._activity = activity
        self._seen = self._given_back_at = activity()

    def look(self) -> None:
        """Look now; to be called every few seconds."""
        now = self._activity()
        if now == self._seen and now != self._given_back_at:
            self._given_back_at = now
            trim()
        self._seen = now


def trim() -> None:
    """Give free memory back to the kernel."""
    gc.collect()
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)  # other threads go on


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
