"""Where a loading process's time goes: a clock that datasets tell what they just did, and that the loader reads.

A `Clock` is a row of numbers in memory that a `Loader` shares with its workers, so they survive a worker that is
killed. A dataset asks for it once a batch; without a loader it is `NO_CLOCK`, which does nothing:

    clock = timing.clock()
    began = clock.start()
    data = read(...)                                  # for MISS instead of READ: it had to be fetched
    began = clock.lap(timing.READ, began)
    pixels = decode(data)
    began = clock.lap(timing.DECODE, began)
    clock.count(samples=1, size_bytes=len(data), misses=0)

A lap costs some 0.2 µs. Each process writes a row of its own; of two threads of a process that add at the very same
moment, one may go uncounted. Nothing here needs PyTorch.
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
"""Stages: reading what is cached; waiting for what was not; making pixels; the user's transform; making a batch."""

_STAGES = 5
_SAMPLES, _BYTES, _MISSES, _BATCHES, _FETCH, _FETCH_CPU, _FETCH_QUEUED, _CPU, _WIDTH = range(_STAGES, _STAGES + 9)
_ROW = 16  # doubles: two cache lines, so that no two processes write to one


class Usage(NamedTuple):
    """What one or several processes did, as sums; differences of two of them are those of the time between."""

    read_s: float = 0.0
    miss_s: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    collate_s: float = 0.0
    samples: float = 0.0
    size_bytes: float = 0.0
    misses: float = 0.0
    """Samples that were not in the cache."""
    batches: float = 0.0
    fetch_s: float = 0.0
    """In the dataset's code, whatever it did there; the stages before are parts of it, `collate_s` is not."""
    fetch_cpu_s: float = 0.0
    """Of that, the time on a processor,"""
    fetch_queued_s: float = 0.0
    """and the time ready to run while others had the processors. The rest was spent waiting."""
    cpu_s: float = 0.0
    """All time of workers on processors."""

    def minus(self, earlier: Usage) -> Usage:
        """What was done since `earlier`."""
        return Usage(*(max(0.0, now - then) for now, then in zip(self, earlier, strict=True)))


class Clock:
    """One process's row. See the module."""

    __slots__ = ("_cpu_s", "_schedstat", "_schedstat_of", "_values")

    def __init__(self, values: memoryview[float]) -> None:
        self._values = values  # doubles
        self._schedstat, self._schedstat_of = -1, 0
        self._cpu_s = 0.0

    def start(self) -> float:
        """Now: what the first `lap` is measured from."""
        return time.perf_counter()

    def lap(self, stage: int, since: float) -> float:
        """Count the time since `since` for a stage. Gives now, for the next lap."""
        now = time.perf_counter()
        self._values[stage] += now - since
        return now

    def count(self, samples: int, size_bytes: int, misses: int = 0) -> None:
        """Count samples that were read, their bytes as stored, and how many of them were not in the cache."""
        values = self._values
        values[_SAMPLES] += samples
        values[_BYTES] += size_bytes
        values[_MISSES] += misses

    def fetched(self, began: Began) -> None:
        """Count one batch's way through the dataset, from `begin` to now."""
        wall = time.perf_counter() - began.wall_s
        cpu = _cpu_s()
        values = self._values
        values[_BATCHES] += 1
        values[_FETCH] += wall
        values[_FETCH_CPU] += min(wall, cpu - began.cpu_s)
        values[_FETCH_QUEUED] += min(wall, self._queued_s() - began.queued_s)
        if _in_worker:
            values[_CPU] += cpu - self._cpu_s
            self._cpu_s = cpu

    def begin(self) -> Began:
        """What `fetched` is measured from."""
        return Began(time.perf_counter(), _cpu_s(), self._queued_s())

    def _queued_s(self) -> float:
        """How long this thread was ready to run and did not: Linux, Documentation/scheduler/sched-stats.rst."""
        thread = threading.get_native_id()
        try:
            if self._schedstat_of != thread:  # another thread's, or that of the process this one was forked from
                if self._schedstat >= 0:
                    os.close(self._schedstat)
                self._schedstat, self._schedstat_of = -1, thread
                self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._schedstat, 96, 0).split()[1]) / 1e9 if self._schedstat >= 0 else 0.0
        except (OSError, ValueError, IndexError):  # a kernel without it: then all that is not on a processor is waiting
            return 0.0

    def __del__(self) -> None:
        if self._schedstat >= 0:
            os.close(self._schedstat)


class Began(NamedTuple):
    """When a batch was begun."""

    wall_s: float
    cpu_s: float
    queued_s: float


class NoClock:
    """What there is where nobody measures: it does nothing, at the price of a call."""

    __slots__ = ()

    def start(self) -> float:
        """See `Clock`."""
        return 0.0

    def lap(self, stage: int, since: float) -> float:
        """See `Clock`."""
        return 0.0

    def count(self, samples: int, size_bytes: int, misses: int = 0) -> None:
        """See `Clock`."""


NO_CLOCK = NoClock()
_clock: Clock | NoClock = NO_CLOCK
_in_worker = False


def clock() -> Clock | NoClock:
    """The clock of the loader that is reading in this process now. Ask once a batch, not once and for all."""
    return _clock


def _cpu_s() -> float:
    # A worker's threads all work for its batch; in the training's process others have work of their own.
    return time.process_time() if _in_worker else time.thread_time()


class Clocks:
    """The rows of a loader: one for the process it is in, and one for each worker. Goes along to workers, forked or
    spawned, as part of what they are started with."""

    def __init__(self, workers: int) -> None:
        self._rows = 1 + workers
        self._shared = RawArray(ctypes.c_double, self._rows * _ROW)
        self._here: dict[int, Clock] = {}

    def row(self, number: int) -> Clock:
        """A process's clock: 0 is the loader's own, 1 and up its workers'."""
        if number not in self._here:
            self._here[number] = Clock(self._values()[number * _ROW : (number + 1) * _ROW])
        return self._here[number]

    def usage(self, first: int = 0) -> Usage:
        """The sum over rows from `first` on."""
        values = self._values()
        return Usage(*(sum(values[row * _ROW + at] for row in range(first, self._rows)) for at in range(_WIDTH)))

    def size_bytes(self) -> float:
        """The sum of `Usage.size_bytes` alone: asked for at every step."""
        values = self._values()
        total = 0.0
        for row in range(self._rows):
            total += values[row * _ROW + _BYTES]
        return total

    def _values(self) -> memoryview[float]:
        return memoryview(self._shared).cast("B").cast("d")  # its own format, "<d", cannot be indexed

    def __getstate__(self) -> dict[str, Any]:
        return {"_rows": self._rows, "_shared": self._shared, "_here": {}}


class Measured:
    """A map-style dataset whose batches are timed. All else of it shows through, and what is set is set on it: a user's
    `worker_init_fn` finds this as `get_worker_info().dataset`."""

    def __init__(self, dataset: Any, clocks: Clocks) -> None:
        vars(self).update(_measured=dataset, _measured_by=clocks)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() says what it says of the dataset
        kind: type = self._measured.__class__
        return kind

    def __len__(self) -> int:
        return len(self._measured)

    def __getitem__(self, at: int) -> Any:
        return self._measured[at]

    def __getitems__(self, samples: Sequence[int]) -> Any:
        with measuring(self._measured_by) as mine:
            began = mine.begin()
            batches = getattr(self._measured, "__getitems__", None)
            batch = batches(samples) if batches else [self._measured[at] for at in samples]
            mine.fetched(began)
        return batch

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
    """A `collate_fn` that is timed."""

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
    """Make a loader's clock the one that `clock()` gives, while a batch is read in this process."""
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
    """From now on this process is that worker of the loader (a DataLoader's `worker_init_fn`)."""
    global _clock, _in_worker
    _in_worker = True
    _clock = clocks.row(1 + worker)
