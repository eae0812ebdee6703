"""Clocks: where a loading process's time goes, told by datasets and read by the loader.

A `Clock` is a row of doubles in memory that a `Loader` shares with its workers, so the numbers outlive a killed worker.
A dataset asks for the clock once a batch; without a loader it gets `NO_CLOCK`, which does nothing:

    timer = clock.clock()
    began = timer.start()
    data = read(...)
    began = timer.lap(clock.READ, began)              # MISS instead of READ where the data had to be fetched
    timer.count(samples=1, size_bytes=len(data), misses=0)

A lap costs some 0.2 µs. Each process writes its own row; two threads of a process that add at the same moment may lose
one of the two. Needs no PyTorch.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

READ, MISS, DECODE, TRANSFORM, COLLATE = range(5)
"""Stages: reading cached data; waiting for a fetch; making pixels; the user's transform; making a batch."""
_SAMPLES, _BYTES, _MISSES, _BATCHES, _FETCH, _FETCH_CPU, _FETCH_QUEUED, _CPU, _WIDTH = range(5, 14)
_ROW = 16  # doubles: two cache lines, so that no two processes write to one


class Usage(NamedTuple):
    """Sums over one or several processes, in the order of a row. The difference of two is what was done between."""

    read_s: float = 0.0
    miss_s: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    collate_s: float = 0.0
    samples: float = 0.0
    size_bytes: float = 0.0
    misses: float = 0.0
    """Samples that had to be fetched."""
    batches: float = 0.0
    fetch_s: float = 0.0
    """In the dataset's code, with the stages above but for `collate_s`."""
    fetch_cpu_s: float = 0.0
    """Of `fetch_s`: on a processor."""
    fetch_queued_s: float = 0.0
    """Of `fetch_s`: ready to run, while others had the processors. The rest was waiting."""
    cpu_s: float = 0.0
    """All time of workers on processors."""

    def minus(self, earlier: Usage) -> Usage:
        return Usage(*(max(0.0, now - then) for now, then in zip(self, earlier, strict=True)))


class NoClock:
    """Does nothing, at the price of a call: the clock of a process that nobody measures."""

    __slots__ = ()

    def start(self) -> float:
        """Return now, for the first `lap`."""
        return 0.0

    def lap(self, stage: int, since: float) -> float:
        """Add the time since `since` to a stage and return now, for the next lap."""
        return 0.0

    def count(self, samples: int, size_bytes: int, misses: int = 0) -> None:
        """Count samples, their bytes as stored, and how many had to be fetched."""


class Clock(NoClock):
    """Keeps one process's row."""

    __slots__ = ("_cpu_s", "_schedstat", "_schedstat_of", "_values")

    def __init__(self, values: memoryview[float]) -> None:
        self._values = values
        self._schedstat, self._schedstat_of = -1, 0
        self._cpu_s = 0.0

    def start(self) -> float:
        return time.perf_counter()

    def lap(self, stage: int, since: float) -> float:
        now = time.perf_counter()
        self._values[stage] += now - since
        return now

    def count(self, samples: int, size_bytes: int, misses: int = 0) -> None:
        values = self._values
        values[_SAMPLES] += samples
        values[_BYTES] += size_bytes
        values[_MISSES] += misses

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Count one batch's way through the dataset."""
        wall_s, cpu_s, queued_s = time.perf_counter(), _cpu_s(), self._queued_s()
        yield
        wall, cpu, values = time.perf_counter() - wall_s, _cpu_s(), self._values
        values[_BATCHES] += 1
        values[_FETCH] += wall
        values[_FETCH_CPU] += min(wall, cpu - cpu_s)
        values[_FETCH_QUEUED] += min(wall, self._queued_s() - queued_s)
        if _in_worker:
            values[_CPU] += cpu - self._cpu_s
            self._cpu_s = cpu

    def _queued_s(self) -> float:
        """Return this thread's time in the run queue (Linux, Documentation/scheduler/sched-stats.rst)."""
        thread = threading.get_native_id()
        try:
            if self._schedstat_of != thread:  # another thread's, or of the process this one was forked from
                if self._schedstat >= 0:
                    os.close(self._schedstat)
                self._schedstat, self._schedstat_of = -1, thread
                self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._schedstat, 96, 0).split()[1]) / 1e9 if self._schedstat >= 0 else 0.0
        except (OSError, ValueError, IndexError):  # a kernel without it: all time off the processors counts as waiting
            return 0.0

    def __del__(self) -> None:
        if self._schedstat >= 0:
            os.close(self._schedstat)


NO_CLOCK = NoClock()
_clock: NoClock = NO_CLOCK
_in_worker = False


def clock() -> NoClock:
    """Return the clock of the loader that reads in this process now. Ask once a batch: it changes."""
    return _clock


def _cpu_s() -> float:
    # A worker's threads all work for its batch; in the training's process others have work of their own.
    return time.process_time() if _in_worker else time.thread_time()


class Clocks:
    """Holds the rows of a loader: row 0 for its own process, one for each worker. Goes to workers, forked or spawned,
    as part of their arguments."""

    def __init__(self, workers: int) -> None:
        self._rows = 1 + workers
        self._shared = RawArray(ctypes.c_double, self._rows * _ROW)
        self._own: Clock | None = None

    def row(self, number: int) -> Clock:
        """Return a process's clock: 0 is the loader's own, 1 and up its workers'."""
        if number:
            return Clock(self._values()[number * _ROW : (number + 1) * _ROW])
        self._own = self._own or Clock(self._values()[:_ROW])
        return self._own

    def usage(self, first: int = 0) -> Usage:
        """Return the sums over the rows from `first` on."""
        values = self._values()
        return Usage(*(sum(values[row * _ROW + at] for row in range(first, self._rows)) for at in range(_WIDTH)))

    def size_bytes(self) -> float:
        """Return the sum of `Usage.size_bytes` alone, which every step asks for."""
        values = self._values()
        return sum(values[row * _ROW + _BYTES] for row in range(self._rows))

    def _values(self) -> memoryview[float]:
        return memoryview(self._shared).cast("B").cast("d")  # its own format, "<d", cannot be indexed

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_own": None}


class Measured:
    """Times the batches of a map-style dataset. Everything else shows through and is set on the dataset: a user's
    `worker_init_fn` finds this object as `get_worker_info().dataset`."""

    def __init__(self, dataset: Any, clocks: Clocks) -> None:
        vars(self).update(_measured=dataset, _measured_by=clocks)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() answers as for the dataset
        kind: type = self._measured.__class__
        return kind

    def __len__(self) -> int:
        return len(self._measured)

    def __getitem__(self, at: int) -> Any:
        return self._measured[at]

    def __getitems__(self, samples: Sequence[int]) -> Any:
        with measuring(self._measured_by) as mine, mine.batch():
            batches = getattr(self._measured, "__getitems__", None)
            return batches(samples) if batches else [self._measured[at] for at in samples]

    def __getattr__(self, name: str) -> Any:
        if name in ("_measured", "_measured_by") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._measured, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._measured, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._measured, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Measured, (self._measured, self._measured_by)


class MeasuredCollate:
    """Times a `collate_fn`."""

    def __init__(self, collate: Callable[[Any], Any], clocks: Clocks) -> None:
        self._collate, self._clocks = collate, clocks

    def __call__(self, samples: Any) -> Any:
        with measuring(self._clocks) as mine:
            began = mine.start()
            batch = self._collate(samples)
            mine.lap(COLLATE, began)
        return batch


@contextmanager
def measuring(clocks: Clocks) -> Iterator[Clock]:
    """Make `clock()` return this loader's clock while a batch is read in this process."""
    global _clock
    before = _clock
    if _in_worker and isinstance(before, Clock):
        yield before
        return
    _clock = mine = clocks.row(0)
    try:
        yield mine
    finally:
        _clock = before


def enter_worker(clocks: Clocks, worker: int) -> None:
    """Make this process the loader's worker number `worker` (a DataLoader's `worker_init_fn`)."""
    global _clock, _in_worker
    _in_worker = True
    _clock = clocks.row(1 + worker)
