"""`SampleSource`: samples by number, their bytes and their targets, wherever they lie.

What the datasets of PyTorch and TensorFlow have in common, and what the two kinds of sources (the files of a snapshot,
a shard set) differ in. Knows neither framework. Read-only: any thread, workers made by `fork` or `spawn`, and pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datacache.core.errors import (
    AnnotationError,
    DatacacheError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShardError,
)
from datacache.loaders import timing
from datacache.loaders.lookahead import PlanSource

_OF_SAMPLES = (AnnotationError, ShardError, ObjectNotFoundError, ObjectChangedError)
Read = bytes | memoryview | DatacacheError


def is_skippable(error: BaseException) -> bool:
    """Whether something is wrong with a sample, so that others can be read all the same. A store that is away or lets
    nobody in is not: all samples would be left out."""
    return isinstance(error, _OF_SAMPLES)


class SampleSource:
    """Samples, numbered from 0."""

    def __init__(self, sizes: NDArray[np.int64], kind: str | None, classes: tuple[str, ...] = ()) -> None:
        self.kind = kind
        """What targets are: `detection`, `classification`, `path`, or None for none."""
        self.classes = classes
        """The names of class ids."""
        self._sizes = sizes

    # --- what sources differ in --------------------------------------------------------------------------------------

    def path(self, sample: int) -> str:
        """What a sample is called: its path, or its key in a shard."""
        raise NotImplementedError

    def target(self, sample: int) -> Any:
        """A sample's target, before any transform."""
        raise NotImplementedError

    def groups(self) -> NDArray[np.int64] | None:
        """The sizes of the runs of samples that are read together; None where samples lie apart."""
        raise NotImplementedError

    def plan_source(self) -> PlanSource | None:
        """See `lookahead.Plannable`."""
        raise NotImplementedError

    def plan_items(self, samples: NDArray[np.int64]) -> NDArray[np.uint32]:
        """See `lookahead.Plannable`."""
        raise NotImplementedError

    def _copy_here(self, samples: NDArray[np.int64], out: memoryview, starts: Sequence[int]) -> list[int]:
        """Copy those samples that are on this node to `starts` in `out`; the positions of the others."""
        raise NotImplementedError

    def _view_here(self, sample: int) -> bytes | memoryview | None:
        """A sample's verified bytes without waiting, if they are on this node."""
        raise NotImplementedError

    def _fetch(self, samples: Sequence[int]) -> list[Read]:
        """Samples' bytes, or errors in their places, wherever they are: all at once."""
        raise NotImplementedError

    # --- what they have in common -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._sizes)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The bytes of each sample. Not to be changed."""
        return self._sizes

    def read_each(self, samples: Sequence[int]) -> list[Read]:
        """The stored bytes of samples, or what is wrong in their places. What is not on this node is fetched at once.
        Views are not to be kept for long."""
        clock = timing.clock()
        began = clock.start()
        found: list[Read | None] = [self._view_here(sample) for sample in samples]
        began = clock.lap(timing.READ, began)
        left = [at for at, data in enumerate(found) if data is None]
        if left:
            for at, data in zip(left, self._fetch([samples[at] for at in left]), strict=True):
                found[at] = data
            clock.lap(timing.MISS, began)
        clock.count(len(samples), sum(int(self._sizes[sample]) for sample in samples), len(left))
        return [data for data in found if data is not None]
