"""Memory of a process that takes and frees thousands of large blocks: fast while it works, given back when it is idle.

glibc gives a freed block of 100 KB back to the kernel at once and faults the next one in again, so the daemon raises
the threshold (mallopt(3)). The price is that memory of a busy minute stays: each thread may have an arena of its own,
and none shrinks. So there are few arenas, and `trim_when_idle` has glibc give free memory back once nothing was fetched
for some seconds. With another C library nothing of this happens.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_ARENA_MAX = -1, -8  # malloc.h
_KEEP_BYTES = 2**28
_ARENAS = 4
_LOOK_EVERY_S = 5.0


def tune() -> None:
    """Set up the allocator of this process, before it has threads."""
    libc = _glibc()
    for what, value in ((_M_TRIM_THRESHOLD, _KEEP_BYTES), (_M_ARENA_MAX, _ARENAS)):
        if libc is not None and not libc.mallopt(what, value):
            log.info("mallopt(%d) is not possible", what)


async def trim_when_idle(activity: Callable[[], object], *, every_s: float = _LOOK_EVERY_S) -> None:
    """Give memory back, until cancelled, each time that nothing happens: `activity` returns what changes meanwhile."""
    seen = given_back_at = activity()
    while True:
        await asyncio.sleep(every_s)
        now = activity()
        if now == seen and now != given_back_at:
            given_back_at = now
            await asyncio.to_thread(trim)
        seen = now


def trim() -> None:
    """Give free memory back to the kernel."""
    gc.collect()
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)  # in all arenas; other threads go on


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
