"""Steps of a training, added up over a stretch of time, and the report that is made of them (`bottleneck.py`).

Used by the loader, by `autotune` and by `dsctl bench loader`. One thread.
"""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple, TypeAlias

from datacache.loaders.tuning.timing import Clocks, Usage

Bottleneck: TypeAlias = Literal[
    "unknown", "training", "store", "reading", "decoding", "transform", "collate", "handing", "other"
]


class Step(NamedTuple):
    """One step of a training, as known when its batch is handed out."""

    epoch: int
    step: int
    """Counted from 0 in each epoch; what was done before a resume is counted."""
    samples: int
    size_bytes: int
    """Read by the dataset since the step before: with workers, for batches to come."""
    data_s: float
    """Waiting for this batch."""
    step_s: float
    """From the batch before being handed out to this one: the training's work, and `data_s`."""


class Stretch(NamedTuple):
    """What was measured over some steps."""

    workers: int
    processors: int
    """That this process may use."""
    steps: int = 0
    samples: int = 0
    data_s: float = 0.0
    step_s: float = 0.0
    receive_cpu_s: float = 0.0
    """Of `data_s`, the time this thread was on a processor: with workers, taking batches from them."""
    cpu_s: float = 0.0
    """On processors in all, workers counted."""
    usage: Usage = Usage()
    """Of the workers, or without any, of this process."""


class Report:
    """What a stretch shows. `str()` of it is the text; nothing in it changes."""

    def __init__(self, stretch: Stretch, bottleneck: Bottleneck, words: str) -> None:
        self.stretch, self.bottleneck, self.words = stretch, bottleneck, words

    @property
    def text(self) -> str:
        """The share of waiting, and what it is that is waited for."""
        if not self.stretch.steps:
            return self.words
        return f"data: {100 * self.data_share:.0f} % of each step is spent waiting for data. {self.words}"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Report: {self.bottleneck}, {self.stretch.steps} steps: {self.text}>"

    @property
    def data_share(self) -> float:
        """The share of the time spent waiting for data."""
        return share(self.stretch.data_s, self.stretch.step_s)

    @property
    def miss_share(self) -> float:
        """The share of samples that were not in the cache (0 where the dataset does not count)."""
        return share(self.stretch.usage.misses, self.stretch.usage.samples)

    @property
    def samples_per_s(self) -> float:
        """Samples the training was given."""
        return self.stretch.samples / self.stretch.step_s if self.stretch.step_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes that the dataset read, as stored."""
        return self.stretch.usage.size_bytes / self.stretch.step_s if self.stretch.step_s else 0.0

    @property
    def cpu_s_per_sample(self) -> float:
        """Of all processes."""
        return self.stretch.cpu_s / self.stretch.samples if self.stretch.samples else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        stretch = self.stretch
        return {
            "bottleneck": self.bottleneck,
            "text": self.text,
            "workers": stretch.workers,
            "steps": stretch.steps,
            "samples": stretch.samples,
            "data_s": stretch.data_s,
            "step_s": stretch.step_s,
            "data_share": self.data_share,
            "miss_share": self.miss_share,
            "samples_per_s": self.samples_per_s,
            "bytes_per_s": self.bytes_per_s,
            "cpu_s_per_sample": self.cpu_s_per_sample,
        }


class Tally:
    """Adds up steps from `begin` on."""

    def __init__(self, clocks: Clocks, *, workers: int, processors: int) -> None:
        self._clocks = clocks
        self._empty = Stretch(workers, processors)
        self._first_row = 1 if workers else 0
        self.begin()

    def begin(self) -> None:
        """Forget all, and count from now."""
        self._sums = self._empty
        self._usage = self._clocks.usage(self._first_row)
        self._cpu_s = time.process_time()
        self._began_s = time.perf_counter()

    @property
    def age_s(self) -> float:
        """How long ago it began."""
        return time.perf_counter() - self._began_s

    def add(self, step: Step, receive_cpu_s: float) -> None:
        """Count a step."""
        sums = self._sums
        self._sums = sums._replace(
            steps=sums.steps + 1,
            samples=sums.samples + step.samples,
            data_s=sums.data_s + step.data_s,
            step_s=sums.step_s + step.step_s,
            receive_cpu_s=sums.receive_cpu_s + receive_cpu_s,
        )

    def stretch(self) -> Stretch:
        """What there is until now."""
        usage = self._clocks.usage(self._first_row).minus(self._usage)
        here = time.process_time() - self._cpu_s
        return self._sums._replace(usage=usage, cpu_s=here + usage.cpu_s)


def share(part: float, whole: float) -> float:
    """0 where there is no whole."""
    return part / whole if whole > 0 else 0.0
