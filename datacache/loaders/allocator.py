"""Keeps the C library from giving a freed sample's memory back to the kernel, only to have it faulted in again.

glibc takes each block above 128 KiB from the kernel by a mapping of its own and unmaps it when it is freed, and it
trims the top of its heap: an image that is read and dropped costs a page fault for every 4 KiB, which the kernel fills
with zeros first. Datasets call this in the process that reads: the training's own, or a DataLoader's worker.

See mallopt(3). glibc refuses a mapping threshold above HEAP_MAX_SIZE / 2, which is 32 MiB on 64 bits. Any thread.
"""

from __future__ import annotations

import ctypes
import logging
import os

from datacache.core.concurrency import PerProcess

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_THRESHOLD_BYTES = 32 * 2**20
_TRIM_THRESHOLD_BYTES = 256 * 2**20
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TUNABLES = ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad")


def keep_freed_memory() -> bool:
    """Set the thresholds in this process, once; later calls and those of a forked child answer at once.

    False where nothing was changed: the C library is not glibc, refused, or the user chose thresholds himself
    (`MALLOC_TRIM_THRESHOLD_`, `GLIBC_TUNABLES`, …). The price is up to 256 MiB that the process holds on to.
    """
    return _done.get()


def _set() -> bool:
    if _user_chose() or not _is_glibc():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # a static Python, or another allocator in its place
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # Setting either ends glibc's own adjusting of both, so one without the other would be worse than none.
    done = bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES))
    if not done:
        log.debug("the C library refused the thresholds that keep freed memory")
    return done


def _user_chose() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(name in os.environ for name in _VARIABLES) or any(
        f"glibc.malloc.{name}=" in tunables for name in _TUNABLES
    )


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError):
        return False


_done: PerProcess[bool] = PerProcess(_set)
