"""How many workers a DataLoader should have, found by trying: the same dataset, a few random samples, real processes.

Used by the loader and `dsctl bench loader`; in the training's process, which may not be the daemonic child of another.
Needs PyTorch, which is imported when something is measured. It takes two to three seconds at most, less where the
outcome is clear; the result is kept for the dataset. Nothing stays: no process, no change to the user's random numbers.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from datacache.loaders.processes import processors, start_method, worker_context
from datacache.loaders.tuning.clock import Clocks, Measured, MeasuredCollate, enter_worker
from datacache.loaders.tuning.report import Report, Tally, diagnose, share

log = logging.getLogger("datacache.loader")

_BUDGET_S = 3.0
_TRY_S = 0.35
_TOUCH_S, _TOUCHED_BATCHES, _BATCH_S = 0.6, 4, 0.1
_GAIN = 1.1  # more workers have to win this much: each takes memory, and measurements are short
_HANDING_S, _HANDING_BYTES_PER_S = 5e-4, 2e9  # handing a batch to another process: some messages, and one more copy
_READ_AHEAD_BYTES = 2**30
_COLD = 0.1  # from this share of misses on, workers are not what is missing

Collate = Callable[[Any], Any]


class Choice(NamedTuple):
    """How a loader is set up, and why."""

    num_workers: int
    prefetch_factor: int | None
    """None without workers, as a DataLoader wants it."""
    text: str
    measurements: tuple[Report, ...] = ()
    """One for each number of workers that was tried."""


_known: WeakKeyDictionary[Any, dict[Any, Choice]] = WeakKeyDictionary()


def choose(
    dataset: Any,
    batch_size: int,
    collate: Collate,
    *,
    context: Any = None,
    prefetch_factor: int | None = None,
    budget_s: float = _BUDGET_S,
) -> Choice:
    """Return the number of workers that gives most samples a second, and none where they do not pay.

    Measured once for a dataset and batch size in this process. It raises nothing: where measuring fails, the choice is
    0 workers, so that what is wrong with the dataset shows plainly. `context`: a DataLoader's
    `multiprocessing_context`.
    """
    try:
        known = _known.setdefault(dataset, {})
        key = (batch_size, collate, str(context), prefetch_factor)
        hash(key)
    except TypeError:  # a dataset that cannot be referred to weakly, or a collate that cannot be compared
        known, key = {}, None
    if key not in known:
        try:
            with _random_numbers_kept():
                trial = _Trial(dataset, batch_size, collate, context, budget_s)
                known[key] = trial.choose(prefetch_factor)
        except Exception as exc:
            log.debug("measuring the loader failed", exc_info=True)
            known[key] = Choice(0, None, f"num_workers=0: measuring failed ({type(exc).__name__}: {exc}).")
    return known[key]


def measure(
    dataset: Any,
    batches: Iterable[list[int]],
    collate: Collate,
    *,
    batch_size: int,
    workers: int,
    seconds: float,
    context: Any = None,
    on_batch: Callable[[], Any] = lambda: None,
) -> Report:
    """Report what a DataLoader with so many workers does in about `seconds`, without the start of its workers.
    `batches` are lists of `batch_size` sample numbers, more of them than are wanted. Raise what the dataset raises."""
    import torch
    from torch.utils.data import DataLoader

    clocks = Clocks(workers)
    tally = Tally(clocks, workers)
    dataloader = DataLoader(
        Measured(dataset, clocks),
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=MeasuredCollate(collate, clocks),
        worker_init_fn=partial(enter_worker, clocks),
        multiprocessing_context=worker_context(context) if workers else None,
        generator=torch.Generator(),
    )
    iterator = iter(dataloader)
    try:
        for _ in range(max(1, workers)):
            next(iterator, None)
        tally.begin()
        before, least = tally.began_s, 2 * workers
        while before - tally.began_s < seconds or least > 0:
            asked_cpu_s = time.thread_time()
            if next(iterator, None) is None:
                break
            now, cpu_s = time.perf_counter(), time.thread_time()
            tally.add(batch_size, now - before, now - before, cpu_s - asked_cpu_s)
            before, least = now, least - 1
            on_batch()
        return diagnose(tally.stretch())
    finally:
        shut_down(iterator)


def candidates(processors: int) -> list[int]:
    """Return the numbers of workers that are worth a try."""
    counts = [0, 1]
    while 2 * counts[-1] <= processors:
        counts.append(2 * counts[-1])
    return counts if counts[-1] == processors else [*counts, processors]


def best(tried: Sequence[Report]) -> Report:
    """Return the fewest workers that are not clearly slower than more. `tried`: by number of workers, ascending."""
    found = tried[0]
    for report in tried[1:]:
        if report.samples_per_s >= _GAIN * found.samples_per_s:
            found = report
    return found


def shut_down(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator now, not when it is collected."""
    getattr(iterator, "_shutdown_workers", lambda: None)()


class _Trial:
    """One measurement of one dataset."""

    def __init__(self, dataset: Any, batch_size: int, collate: Collate, context: Any, budget_s: float) -> None:
        self._dataset, self._batch_size, self._collate, self._context = dataset, batch_size, collate, context
        self._deadline = time.perf_counter() + budget_s
        self._processors = processors()
        self._touched: list[list[int]] = []
        self._batch_bytes = self._cold = 0.0
        self._uneven = False

    def choose(self, prefetch_factor: int | None) -> Choice:
        if not len(self._dataset):
            return Choice(0, None, "num_workers=0: there are no samples.")
        self._touch()
        tried = [self._measure(0)]
        method = start_method(self._context)
        workers, why = 0, self._why_none(tried[0])
        if not why and method != "fork":
            # A spawned worker imports everything anew, which takes longer than the whole budget.
            workers = self._processors
            why = f"one for each processor, an estimate (workers are started by {method})"
        elif not why:
            for count in candidates(self._processors)[1:]:
                if time.perf_counter() > self._deadline:
                    break
                tried.append(self._measure(count))
                if count > 1 and best(tried) is not tried[-1]:
                    break
            workers = best(tried).stretch.workers
            rates = ", ".join(f"{report.stretch.workers}: {report.samples_per_s:,.0f}/s" for report in tried)
            why = f"samples by workers: {rates}"
        prefetch = (prefetch_factor or self._prefetch(workers)) if workers else None
        depth = f", prefetch_factor={prefetch}" if workers else ""
        if self._cold >= _COLD:
            why += f". {100 * self._cold:.0f} % of what was read was not in the cache: more workers do not help with"
            why += " that; lookahead or dsctl warm does"
        return Choice(workers, prefetch, f"num_workers={workers}{depth}: {why}.", tuple(tried))

    def _touch(self) -> None:
        """Read some random batches, so that the measurement that follows finds them cached; smaller ones than the
        training's where those would take long."""
        clocks = Clocks(0)
        dataset, collate = Measured(self._dataset, clocks), MeasuredCollate(self._collate, clocks)
        draw = np.random.default_rng(len(self._dataset))

        def touch(size: int) -> tuple[float, int, list[int]]:
            samples = draw.integers(0, len(self._dataset), size).tolist()
            before = time.perf_counter()
            batch = collate(dataset.__getitems__(samples))
            return time.perf_counter() - before, _nbytes(batch), samples  # not the batch: several may not fit

        few = min(self._batch_size, 4)
        touched = [touch(few)]  # the first has to open everything
        began = time.perf_counter()
        touched.append(touch(few))
        size = max(few, min(self._batch_size, int(few * _BATCH_S / max(touched[1][0], 1e-6))))
        if size > few:
            touched = []
        while True:
            touched.append(touch(size))
            if time.perf_counter() - began >= _TOUCH_S or len(touched) >= _TOUCHED_BATCHES:
                break
        usage, took_s = clocks.usage(), [each[0] for each in touched]
        self._touched = [samples for _took, _size_bytes, samples in touched]
        self._batch_bytes = touched[-1][1] * self._batch_size / size
        self._cold = share(usage.misses, usage.samples)
        self._uneven = max(took_s[1:], default=0.0) > 2 * sorted(took_s)[len(took_s) // 2]

    def _measure(self, workers: int) -> Report:
        left_s = self._deadline - time.perf_counter()
        return measure(
            self._dataset,
            itertools.cycle(self._touched),
            self._collate,
            batch_size=len(self._touched[0]),
            workers=workers,
            seconds=max(0.05, min(_TRY_S, left_s / 3)),
            context=self._context,
        )

    def _why_none(self, here: Report) -> str:
        """Say why no workers are tried; '' if they may pay."""
        if multiprocessing.current_process().daemon:
            return "a process of this kind can start no others"
        usage, steps = here.stretch.usage, max(1, here.stretch.steps)
        work_s = (here.stretch.data_s - usage.miss_s) / steps
        handed = _HANDING_S + self._batch_bytes / _HANDING_BYTES_PER_S * here.stretch.samples / steps / self._batch_size
        if work_s <= 2 * handed:
            took = f"reading a batch takes {1000 * work_s:.1f} ms here"
            return f"{took}, and handing it over from another process not much less"
        # Of its time the dataset neither computes nor waits for a processor or a fetch.
        idle = 1 - share(usage.fetch_cpu_s + usage.fetch_queued_s + usage.miss_s, usage.fetch_s)
        return "there is one processor" if self._processors == 1 and idle < 0.5 else ""

    def _prefetch(self, workers: int) -> int:
        """Return a larger depth where batches differ in the time they take, a smaller one where they would fill the
        memory."""
        wanted = 4 if self._uneven or self._cold >= _COLD else 2
        room = float(_READ_AHEAD_BYTES)
        with suppress(OSError):  # workers hand batches over in this, and a container's may be small
            room = min(room, shutil.disk_usage("/dev/shm").free / 2)
        while wanted > 1 and wanted * workers * self._batch_bytes > room:
            wanted -= 1
        return wanted


def _nbytes(batch: Any) -> int:
    if hasattr(batch, "nbytes"):
        return int(batch.nbytes)
    if isinstance(batch, bytes | bytearray | memoryview | str):
        return len(batch)
    if isinstance(batch, dict | list | tuple):
        return sum(map(_nbytes, batch.values() if isinstance(batch, dict) else batch))
    slots = getattr(type(batch), "__slots__", ())
    return sum(_nbytes(getattr(batch, name, 0)) for name in slots if name != "__dict__")


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Give the user back the state of the random numbers that transforms draw while they are measured."""
    torch = sys.modules.get("torch")
    python, arrays = random.getstate(), np.random.get_state()
    tensors = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        if torch is not None and tensors is not None:
            torch.set_rng_state(tensors)
