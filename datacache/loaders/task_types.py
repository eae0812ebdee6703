"""The values that a task queue and its workers hand to and fro. The user imports them from `tasks`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from datacache.catalog.tasks import Leased
from datacache.loaders.permutation import Permutation


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
    """What the order of its records is drawn with; None: as they lie."""
    position: int

    @property
    def epoch(self) -> int:
        """The epoch it belongs to."""
        return self.lease.epoch

    @property
    def number(self) -> int:
        """Its number in the epoch: the same piece of the data set in every epoch."""
        return self.lease.number

    @property
    def name(self) -> str:
        """The span it is a piece of."""
        return self.lease.name

    @property
    def start(self) -> int:
        """Its first record in the span."""
        return self.lease.start

    @property
    def count(self) -> int:
        """How many records it has."""
        return self.lease.records

    @property
    def token(self) -> int:
        """The fencing token: grows with every lease of the task. Hand it on to what must refuse late writers, too."""
        return self.lease.token

    def left(self) -> NDArray[np.int64]:
        """The records that are not reported as used yet, as numbers in the span, in the order they are to be used in:
        it is the same for whoever goes on with the task."""
        places = np.arange(self.position, self.count, dtype=np.int64)
        if self.key is None:
            return self.start + places
        return self.start + Permutation(self.count, self.key)(places)
