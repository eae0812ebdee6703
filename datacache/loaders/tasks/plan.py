"""The plan of a queue of tasks: its parameters, the cutting of spans into tasks, and their order.

Pure functions, used by `queue`, and the values that a task queue and its workers hand to and fro. The same plan,
parameters and epoch give the same tasks in the same places on every machine: several workers may make the tasks of an
epoch at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from datacache.catalog.tasks.base import Leased, NewTask
from datacache.core.errors import TasksError, UsageError
from datacache.core.packed import pack, unpack
from datacache.loaders.order import Permutation, derive_key

_PLAN_LIMIT_BYTES = 8 * 2**20
"""Packed. A plan is kept in one document, of which MongoDB takes 16 MiB."""
_TASK_ORDER, _RECORD_ORDER = 0x7461736B, 0x7265636F
"""The purposes of two keys."""


@dataclass(frozen=True, kw_only=True)
class TaskParameters:
    """How a queue works; fixed when it is created. `UsageError` for values that make no sense."""

    dataset: str = ""
    """Its source, for people: `faces@v3`, a URL."""
    records: int = 1024
    """The most of one task: what a worker that dies has others repeat at most."""
    epochs: int = 1
    shuffle: bool = True
    """The order of the tasks in an epoch and of the records in a task."""
    seed: int = 0
    lease_s: float = 60.0
    """A worker that has not been heard of for this long is taken for dead."""
    max_failures: int = 3
    """A task that was reported as failed this often in an epoch is failed."""
    max_lost: int = 10
    """So is one whose leases expired this often in a row without one record of it reported: whatever reads it dies.
    More than `max_failures`, because machines that come and go lose leases, too."""
    images_of: str = ""
    """The data set whose images people mark by this queue (`images`); '' for training."""
    digest: str = ""
    """Of the spans' names and sizes; set by `TaskQueue.create`."""
    samples: int = 0
    tasks: int = 0
    """Of an epoch."""

    def __post_init__(self) -> None:
        for name in ("records", "epochs", "max_failures", "max_lost"):
            if not 1 <= getattr(self, name) < 2**31:
                raise UsageError(f"{name} of a task queue must be at least 1, not {getattr(self, name)}")
        if not 0.05 <= self.lease_s <= 7 * 86400:
            raise UsageError(f"a lease is between 0.05 s and 7 days long, not {self.lease_s:g} s")

    def encode(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def decode(cls, text: str) -> TaskParameters:
        """Read JSON. What a newer version has added is passed over."""
        known = cls.__dataclass_fields__
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})

    def same_as(self, other: TaskParameters) -> bool:
        """Tell whether a queue made with these is one made with the others: all but what people call the data set."""
        return replace(self, dataset="") == replace(other, dataset="")


class Plan:
    """The spans of a data set, as a queue keeps them: names and sizes, in order."""

    def __init__(self, spans: Iterable[tuple[str, int]]) -> None:
        self.spans = [(name, int(count)) for name, count in spans if count > 0]
        if not self.spans:
            raise UsageError("a task queue needs at least one sample")
        if len({name for name, _count in self.spans}) < len(self.spans):
            raise UsageError("two spans of the data set have the same name", hint="Tasks are found by their names.")

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Plan:
        return cls((span.name, span.count) for span in spans)

    @property
    def samples(self) -> int:
        return sum(count for _name, count in self.spans)

    @property
    def digest(self) -> str:
        return blake2b(self._json(), digest_size=16).hexdigest()

    def encode(self) -> bytes:
        """Pack the plan. Raise `UsageError` where there are too many spans for one queue."""
        packed = pack(self._json())
        if len(packed) > _PLAN_LIMIT_BYTES:
            raise UsageError(
                f"{len(self.spans):,} shards are too many for one task queue", hint="Make larger shards, or two queues."
            )
        return packed

    @classmethod
    def decode(cls, packed: bytes) -> Plan:
        return cls((name, count) for name, count in json.loads(unpacked(packed)))

    def cut(self, records: int) -> list[tuple[str, int, int]]:
        """Return the tasks of an epoch by number: name, first record in the span, records."""
        return [
            (name, start, min(records, count - start))
            for name, count in self.spans
            for start in range(0, count, records)
        ]

    def _json(self) -> bytes:
        return json.dumps(self.spans, separators=(",", ":")).encode()


def unpacked(kept: bytes) -> str:
    """Unpack a plan or checkpoint; raise `TasksError` if it is none."""
    try:
        return unpack(kept).decode()
    except ValueError as exc:
        raise TasksError(
            f"what the catalog keeps of the task queue cannot be unpacked: {exc}",
            hint="Remove the queue and create it again.",
        ) from exc


def new_tasks(plan: Plan, parameters: TaskParameters, epoch: int) -> list[NewTask]:
    """Return the tasks of an epoch, by number."""
    cut = plan.cut(parameters.records)
    places: Sequence[int] = range(len(cut))
    if parameters.shuffle:
        places = Permutation(len(cut), derive_key(_TASK_ORDER, parameters.seed, epoch))(np.arange(len(cut))).tolist()
    return [
        NewTask(epoch, number, place, name, start, records)
        for number, (place, (name, start, records)) in enumerate(zip(places, cut, strict=True))
    ]


def record_key(parameters: TaskParameters, epoch: int, number: int) -> int | None:
    """Return what the order of a task's records is drawn with; None for the order they lie in."""
    return derive_key(_RECORD_ORDER, parameters.seed, epoch, number) if parameters.shuffle else None


class Span(NamedTuple):
    """A run of samples of a data set under a name that stays: a shard, or a list of files."""

    name: str
    first: int
    """The number of its first sample in the data set."""
    count: int  # type: ignore[assignment]  # a tuple's method, which nobody calls here


class Wait(NamedTuple):
    """Nothing to do now, but others are not done yet: ask again after so many seconds."""

    seconds: float


@dataclass(slots=True)
class Task:
    """A task leased to this worker. `position` is how many of its records are reported as used; `report_…` moves it."""

    queue: str
    lease: Leased
    lease_s: float
    key: int | None
    """The key of the order of its records; None: as they lie."""
    position: int

    @property
    def epoch(self) -> int:
        return self.lease.epoch

    @property
    def number(self) -> int:
        """Its number in the epoch: the same piece of the data set in every epoch."""
        return self.lease.number

    @property
    def name(self) -> str:
        return self.lease.name

    @property
    def start(self) -> int:
        """Its first record in the span."""
        return self.lease.start

    @property
    def count(self) -> int:
        return self.lease.records

    @property
    def token(self) -> int:
        """The fencing token: grows with every lease of the task. Hand it on to what must refuse late writers, too."""
        return self.lease.token

    def left(self) -> NDArray[np.int64]:
        """Return the records that are not reported as used yet, as numbers in the span, in the order they are to be
        used in: it is the same for whoever goes on with the task."""
        places = np.arange(self.position, self.count, dtype=np.int64)
        if self.key is None:
            return self.start + places
        return self.start + Permutation(self.count, self.key)(places)
