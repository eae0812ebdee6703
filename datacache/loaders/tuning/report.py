"""Reports: steps added up over a stretch of time, and in words what holds a training up.

Used by the loader, by `autotune` and by `dsctl bench loader`, in the training's process. One thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from datacache.core.counters import Counters
from datacache.loaders.processes import processors
from datacache.loaders.tuning.clock import Clocks, Usage

log = logging.getLogger("datacache.loader")

Bottleneck: TypeAlias = Literal[
    "unknown", "training", "store", "reading", "decoding", "transform", "collate", "handing", "other"
]
_READY = 0.1  # below this share of waiting no loader makes a training noticeably faster
_FULL = 0.85  # from this share on the processors count as fully used: other programs are not seen here
_SOME = 0.2
_SLOW_START_S = 5.0


class Step(NamedTuple):
    """One step of a training, as known when its batch is handed out."""

    epoch: int
    step: int
    """Counted from 0 in each epoch, steps before a resume included."""
    samples: int
    size_bytes: int
    """Read by the dataset since the step before; with workers, for batches to come."""
    data_s: float
    """Waiting for this batch."""
    step_s: float
    """From the hand-over of the batch before to this one: the training's work, and `data_s`."""


class Stretch(NamedTuple):
    """The sums over some steps."""

    workers: int
    processors: int
    """That this process may use."""
    steps: int = 0
    samples: int = 0
    data_s: float = 0.0
    step_s: float = 0.0
    receive_cpu_s: float = 0.0
    """Of `data_s`: this thread on a processor, which with workers means taking batches from them."""
    cpu_s: float = 0.0
    """All processes on processors, workers included."""
    usage: Usage = Usage()
    """The workers', or without workers this process's."""


def share(part: float, whole: float) -> float:
    """Return `part / whole`, 0 without a whole."""
    return part / whole if whole > 0 else 0.0


@dataclass(frozen=True, repr=False)
class Report:
    """The findings about a stretch. `str()` gives the text."""

    stretch: Stretch
    bottleneck: Bottleneck
    words: str

    @property
    def text(self) -> str:
        if not self.stretch.steps:
            return self.words
        return f"data: {_percent(self.data_share)} of each step is spent waiting for data. {self.words}"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Report: {self.bottleneck}, {self.stretch.steps} steps: {self.text}>"

    @property
    def data_share(self) -> float:
        return share(self.stretch.data_s, self.stretch.step_s)

    @property
    def miss_share(self) -> float:
        """The share of samples that had to be fetched (0 where the dataset does not count)."""
        return share(self.stretch.usage.misses, self.stretch.usage.samples)

    @property
    def samples_per_s(self) -> float:
        return share(self.stretch.samples, self.stretch.step_s)

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second that the dataset read, as stored."""
        return share(self.stretch.usage.size_bytes, self.stretch.step_s)

    @property
    def cpu_s_per_sample(self) -> float:
        """Seconds on processors for each sample, over all processes."""
        return share(self.stretch.cpu_s, self.stretch.samples)

    def as_dict(self) -> dict[str, Any]:
        of_stretch = ("workers", "steps", "samples", "data_s", "step_s")
        of_report = ("data_share", "miss_share", "samples_per_s", "bytes_per_s", "cpu_s_per_sample")
        return (
            {"bottleneck": self.bottleneck, "text": self.text}
            | {name: getattr(self.stretch, name) for name in of_stretch}
            | {name: getattr(self, name) for name in of_report}
        )


class Tally:
    """Adds up steps from `begin` on."""

    def __init__(self, clocks: Clocks, workers: int) -> None:
        self._clocks = clocks
        self._empty = Stretch(workers, processors())
        self.begin()

    def begin(self) -> None:
        self._sums = self._empty
        self._usage = self._used()
        self._cpu_s, self.began_s = time.process_time(), time.perf_counter()

    def add(self, samples: int, data_s: float, step_s: float, receive_cpu_s: float) -> None:
        workers, cores, steps, *sums, cpu_s, usage = self._sums
        added = (was + more for was, more in zip(sums, (samples, data_s, step_s, receive_cpu_s), strict=True))
        self._sums = Stretch._make((workers, cores, steps + 1, *added, cpu_s, usage))

    def stretch(self) -> Stretch:
        usage = self._used().minus(self._usage)
        return self._sums._replace(usage=usage, cpu_s=time.process_time() - self._cpu_s + usage.cpu_s)

    def _used(self) -> Usage:
        return self._clocks.usage(1 if self._empty.workers else 0)


class Watch:
    """Follows the steps of one loader, to the counters, the log and the user: `begin`, then `asked` and `handed_out`
    for each batch, then `end`."""

    def __init__(
        self,
        clocks: Clocks,
        counters: Counters,
        *,
        workers: int,
        report_every: float,
        on_step: Callable[[Step], Any] | None,
    ) -> None:
        self.last: Step | None = None
        self._clocks, self._counters = clocks, counters
        self._report_every, self._on_step = report_every, on_step
        self._epoch, self._since_log = Tally(clocks, workers), Tally(clocks, workers)
        self._place = (0, 0)  # epoch and step
        self._asked_s = self._asked_cpu_s = self._handed_out_s = self._first_s = 0.0
        self._bytes = 0.0

    def begin(self, epoch: int, step: int) -> None:
        self._place = (epoch, step)
        self._handed_out_s = 0.0
        self._bytes = self._clocks.size_bytes()
        self._epoch.begin()

    def asked(self) -> None:
        self._asked_s, self._asked_cpu_s = time.perf_counter(), time.thread_time()

    def handed_out(self, samples: int) -> None:
        """Note that the training is about to get the batch."""
        now_s, receive_cpu_s = time.perf_counter(), time.thread_time() - self._asked_cpu_s
        size_bytes = self._clocks.size_bytes()
        first = not self._handed_out_s
        data_s = now_s - self._asked_s
        step_s = data_s if first else now_s - self._handed_out_s
        step = Step(*self._place, samples, int(size_bytes - self._bytes), data_s, step_s)
        self.last, self._handed_out_s, self._bytes = step, now_s, size_bytes
        self._place = (step.epoch, step.step + 1)
        self._counters.step(samples, step.size_bytes, int(data_s * 1e9), int(step_s * 1e9))
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "epoch %d step %d: data_time=%.6f step_time=%.6f samples=%d bytes=%d",
                *(step.epoch, step.step, data_s, step_s, samples, step.size_bytes),
            )
        if first:  # the start of workers and the filling of queues belong to no step
            self._first_s = data_s
            self._epoch.begin()
            self._since_log.begin()
        else:
            self._epoch.add(samples, data_s, step_s, receive_cpu_s)
            self._since_log.add(samples, data_s, step_s, receive_cpu_s)
            if now_s - self._since_log.began_s >= self._report_every > 0:
                self._log(self._since_log.stretch())
                self._since_log.begin()
        if self._on_step is not None:
            self._on_step(step)

    def end(self) -> None:
        stretch = self._epoch.stretch()
        if stretch.steps and self._report_every > 0:
            self._log(stretch)

    def report(self) -> Report:
        return diagnose(self._epoch.stretch())

    def _log(self, stretch: Stretch) -> None:
        found = diagnose(stretch)
        start = f" The first batch took {self._first_s:.1f} s." if self._first_s >= _SLOW_START_S else ""
        log.info(
            "epoch %d: %d steps, data_time %.4f s of step_time %.4f s, %.0f samples/s. %s%s",
            *(self._place[0], stretch.steps, stretch.data_s / stretch.steps, stretch.step_s / stretch.steps),
            *(found.samples_per_s, found.text, start),
        )


# --- what holds a training up: pure functions of a stretch ---------------------------------------------------------


def diagnose(stretch: Stretch) -> Report:
    """Say what holds this training up."""
    if not stretch.steps or not stretch.step_s:
        return Report(stretch, "unknown", "No whole step was measured yet.")
    part = share(stretch.data_s, stretch.step_s)
    if part < _READY:
        ready = f"The training itself is what takes time: data is ready {_percent(1 - part)} of the time."
        return Report(stretch, "training", ready)
    scores = _scores(stretch)
    bottleneck = max(scores, key=lambda name: scores[name])
    waits = bottleneck == "store" and not stretch.usage.misses
    return Report(stretch, bottleneck, _WORDS["waiting" if waits else bottleneck].format(**_numbers(stretch)))


def _scores(stretch: Stretch) -> dict[Bottleneck, float]:
    """Return for each suspect the share of the loading processes' time that it took."""
    usage = stretch.usage
    at_work = usage.fetch_s + usage.collate_s
    lanes_s = stretch.workers * stretch.step_s if stretch.workers else max(stretch.data_s, at_work)
    told_s = usage.read_s + usage.miss_s + usage.decode_s + usage.transform_s
    # A dataset without a clock: on a processor or queued for one it computed, else it waited for something.
    untold_s = max(0.0, usage.fetch_s - told_s)
    waited_s = min(untold_s, max(0.0, usage.fetch_s - usage.fetch_cpu_s - usage.fetch_queued_s - usage.miss_s))
    seconds: dict[Bottleneck, float] = {
        "store": usage.miss_s + waited_s,
        "reading": usage.read_s,
        "decoding": usage.decode_s,
        "transform": usage.transform_s,
        "collate": usage.collate_s,
    }
    # Around a dataset with a clock it is the user's own code; a dataset without one most likely decodes.
    seconds["transform" if told_s else "decoding"] += untold_s - waited_s
    scores = {name: share(value, lanes_s) for name, value in seconds.items()}
    if stretch.workers:
        # A thread of the worker writes batches and this thread reads them. Idle workers alone prove nothing: one late
        # worker makes the others wait.
        writing_s = max(0.0, usage.cpu_s - usage.fetch_cpu_s - usage.collate_s)
        scores["handing"] = max(share(stretch.receive_cpu_s, stretch.data_s), share(writing_s, lanes_s))
    else:
        scores["other"] = share(max(0.0, stretch.data_s - at_work), lanes_s)
    return scores


_WORDS: dict[str, str] = {
    "waiting": "Reading waits: {waiting} of the dataset's time goes into neither computing nor reading from the cache"
    " (a store or disk behind it, a lock). More workers help (they wait at the same time): try num_workers={more}.",
    "store": "The store: {missed} of the samples were not in the cache and came at {missed_mb_per_s:,.0f} MB/s. Warm"
    " the cache (dsctl warm), or let lookahead fetch what comes next; more workers do not help.",
    "reading": "Reading what is cached, at {read_mb_per_s:,.0f} MB/s in each process. Packed batches (packed=True) and"
    " shards (dsctl shard) cost less for each sample, and RAM (DATACACHE_RAM_BYTES) is faster than a slow disk.",
    "decoding": "Decoding: {computing} Smaller images cost less: dsctl convert --resize makes them once and for all.",
    "transform": "The transform: {computing} Cheaper operations, or the same on the device, help too.",
    "collate": "Making batches: {collating} of the loading time goes into collate. packed=True or a cheaper collate_fn"
    " helps; so do images of one, smaller size.",
    "handing": "Handing batches between processes: workers read and decode only {busy} of the time, the rest is the"
    " batches' way to the training. Try num_workers=0, packed=True, or tensors instead of many Python objects.",
    "other": "The loader itself: {other} of the waiting is neither reading nor making batches (copying to the device,"
    " the order of samples). Larger batches make it less.",
}


def _numbers(stretch: Stretch) -> dict[str, Any]:
    usage = stretch.usage
    loading_s, missed = usage.fetch_s + usage.collate_s, share(usage.misses, usage.samples)
    busy = _percent(min(1.0, share(loading_s, stretch.workers * stretch.step_s)))
    return {
        "waiting": _percent(share(usage.fetch_s - usage.fetch_cpu_s, usage.fetch_s)),
        "more": max(2 * stretch.workers, 2),
        "missed": _percent(missed),
        "missed_mb_per_s": usage.size_bytes * missed / stretch.step_s / 1e6,
        "read_mb_per_s": usage.size_bytes / max(usage.read_s, 1e-9) / 1e6,
        "computing": _computing(stretch, busy),
        "collating": _percent(share(usage.collate_s, loading_s)),
        "busy": busy,
        "other": _percent(max(0.0, 1 - share(loading_s, stretch.data_s))),
    }


def _computing(stretch: Stretch, busy: str) -> str:
    workers = stretch.workers
    used = share(stretch.cpu_s, stretch.step_s * stretch.processors)
    queued = share(stretch.usage.fetch_queued_s, stretch.usage.fetch_s)
    count = f"{stretch.processors} processors" if stretch.processors > 1 else "1 processor"
    head = f"{workers} workers are busy {busy} of the time" if workers > 1 else f"1 worker is busy {busy} of the time"
    if not workers:
        head = "the training's own process does it, as there are no workers"
    if queued >= _SOME:
        return (
            f"{head}, and {_percent(queued)} of that it waits for a processor: {count} are too few for all that runs."
        )
    if used >= _FULL:
        return f"{head}, and all of {count} is in use: more of them would help."
    if not workers:
        return f"{head}; with num_workers=1 or more it is done beside the training."
    if workers < stretch.processors:
        return f"{head}, and {_percent(used)} of {count} is in use: num_workers can be larger."
    return f"{head}; there are {count}."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
