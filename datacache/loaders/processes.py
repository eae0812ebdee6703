"""The loading process: its processors, its rank, how its workers start, and the C library's memory. Any thread; no
PyTorch."""

from __future__ import annotations

import copy
import ctypes
import logging
import multiprocessing
import os
import sys
from multiprocessing.context import BaseContext
from multiprocessing.sharedctypes import RawValue
from typing import Any

from datacache.core.concurrency import PerProcess
from datacache.core.cores import cores
from datacache.core.errors import UsageError

log = logging.getLogger(__name__)


def processors() -> int:
    """Count the cores that the process may use, shared with the other ranks of this machine (LOCAL_WORLD_SIZE, which
    torchrun sets); at least 1."""
    count = cores()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, count // max(1, int(ranks))) if ranks.isdecimal() else count


def rank_and_world(rank: int | None = None, world: int | None = None) -> tuple[int, int]:
    """Return this process's rank and how many there are: as given, else as `torch.distributed` says where it is
    initialised, else as the variables RANK and WORLD_SIZE say, else 0 of 1. `UsageError` where they make no sense."""
    if (rank is None) != (world is None):
        raise UsageError("Give both `rank` and `world`, or neither.")
    if rank is not None and world is not None:
        if not 0 <= rank < world:
            raise UsageError(f"There is no rank {rank} of {world}.", hint="Ranks are 0 … world-1.")
        return rank, world
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    given, of = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not given and not of:
        return 0, 1
    if not (given.isdecimal() and of.isdecimal() and int(given) < int(of)):
        raise UsageError(
            f"The variables RANK={given} and WORLD_SIZE={of} do not say which rank this is.",
            hint="torchrun sets both; or give `rank` and `world`.",
        )
    return int(given), int(of)


# --- workers --------------------------------------------------------------------------------------------------------


def start_method(context: Any = None) -> str:
    """Return how workers are started with a DataLoader's `multiprocessing_context`. Without one, do not make the choice
    final as `multiprocessing` would."""
    if context is None:
        return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return context if isinstance(context, str) else str(context.get_start_method())


def worker_context(context: Any = None) -> BaseContext:
    """Return a DataLoader's `multiprocessing_context` (None: how workers start by default) of which no killed worker
    leaves a loop over batches waiting forever.

    PyTorch's workers ask an event with every batch whether they are to end, and its lock stays locked where one is
    killed (by the kernel, for memory) in that moment. The training would wait for it. This context's events have none.
    """
    chosen = copy.copy(
        multiprocessing.get_context(start_method(context)) if isinstance(context, str | None) else context
    )
    chosen.Event = _Flag  # type: ignore[method-assign]
    return chosen


class _Flag:
    """As much of `multiprocessing.Event` as a DataLoader uses."""

    def __init__(self) -> None:
        self._byte = RawValue(ctypes.c_bool)

    def is_set(self) -> bool:
        return bool(self._byte.value)

    def set(self) -> None:
        self._byte.value = True


# --- memory ---------------------------------------------------------------------------------------------------------

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_THRESHOLD_BYTES = 32 * 2**20
_TRIM_THRESHOLD_BYTES = 256 * 2**20
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TUNABLES = ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad")


def keep_freed_memory() -> bool:
    """Keep the C library from giving a freed sample's memory back to the kernel, only to have it faulted in again.

    glibc takes each block above 128 KiB from the kernel by a mapping of its own and unmaps it when it is freed, and it
    trims the top of its heap: an image that is read and dropped costs a page fault for every 4 KiB, which the kernel
    fills with zeros first. Datasets call this in the process that reads: the training's own, or a DataLoader's worker.
    See mallopt(3). glibc refuses a mapping threshold above HEAP_MAX_SIZE / 2, which is 32 MiB on 64 bits.

    Set the thresholds in this process, once; later calls and those of a forked child answer at once. Return False where
    nothing was changed: the C library is not glibc, refused, or the user chose thresholds (`MALLOC_TRIM_THRESHOLD_`,
    `GLIBC_TUNABLES`, …). The price is up to 256 MiB that the process holds on to.
    """
    return _kept.get()


def _set_thresholds() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    chosen = any(name in os.environ for name in _VARIABLES)
    if chosen or any(f"glibc.malloc.{name}=" in tunables for name in _TUNABLES):
        return False
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return False
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, ValueError, AttributeError):  # not glibc, a static Python, or another allocator in its place
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # Setting either ends glibc's own adjusting of both, so one without the other would be worse than none.
    done = bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES))
    if not done:
        log.debug("the C library refused the thresholds that keep freed memory")
    return done


_kept: PerProcess[bool] = PerProcess(_set_thresholds)
