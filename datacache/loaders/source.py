"""`SampleSource`: samples by number, their bytes and their targets; and the files of a snapshot as samples.

What the datasets of PyTorch and TensorFlow have in common, and what the two kinds of sources (the files of a snapshot,
a shard set) differ in. Knows neither framework. Read-only: any thread, workers made by `fork` or `spawn`, and pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from datacache.annotations.layout import text
from datacache.core.errors import (
    AnnotationError,
    DatacacheError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShardError,
    UsageError,
)
from datacache.core.ids import BLOCK_BYTES, ObjectId
from datacache.loaders.lookahead import PlanSource
from datacache.loaders.selection import Selection
from datacache.loaders.tasks.queue import Span
from datacache.loaders.tuning import clock as timing
from datacache.reader.snapshot import Snapshot

_OF_SAMPLES = (AnnotationError, ShardError, ObjectNotFoundError, ObjectChangedError)
Read = bytes | memoryview | DatacacheError


def is_skippable(error: BaseException) -> bool:
    """Tell whether an error is of one sample, so that others can be read all the same. One of a store that is away or
    lets nobody in is not: all samples would be left out."""
    return isinstance(error, _OF_SAMPLES)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How samples are given, as the datasets of PyTorch and TensorFlow have it in common."""

    on_error: str = "raise"
    """`skip`: go on without the samples that cannot be read."""

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise UsageError(f"on_error={self.on_error!r}", hint="on_error='raise' or on_error='skip'.")

    @classmethod
    def of(cls, caller: str, given: Mapping[str, Any]) -> Self:
        """Return the options of a caller's keywords. `TypeError` names the caller, as Python does of its own."""
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}")
        return cls(**given)

    def skips(self, error: DatacacheError) -> bool:
        """Tell whether to go on without a sample that has this error."""
        return self.on_error == "skip" and is_skippable(error)


class SampleSource:
    """Samples, numbered from 0."""

    def __init__(self, sizes: NDArray[np.int64], kind: str | None, classes: tuple[str, ...] = ()) -> None:
        self.kind = kind
        """The kind of targets: `detection`, `classification`, `path`, or None for none."""
        self.classes = classes
        """The names of class ids."""
        self.style: str | None = None
        """Whose names and units targets of objects have: see `styles`."""
        self._sizes = sizes

    # --- what sources differ in --------------------------------------------------------------------------------------

    def path(self, sample: int) -> str:
        """Return what a sample is called: its path, or its key in a shard."""
        raise NotImplementedError

    def target(self, sample: int) -> Any:
        """Return a sample's target, before any transform."""
        raise NotImplementedError

    def groups(self) -> NDArray[np.int64] | None:
        """Return the sizes of the runs of samples that are read together; None where samples lie apart."""
        return None

    def plan_source(self) -> PlanSource | None:
        raise NotImplementedError

    def plan_items(self, samples: NDArray[np.int64]) -> NDArray[np.uint32]:
        raise NotImplementedError

    def copy_here(self, samples: NDArray[np.int64], out: memoryview, starts: Sequence[int]) -> list[int]:
        """Copy those samples that are on this node to `starts` in `out`; the positions of the others."""
        raise NotImplementedError

    def view_here(self, sample: int) -> bytes | memoryview | None:
        """Return a sample's verified bytes without waiting, if they are on this node."""
        raise NotImplementedError

    def fetch(self, samples: Sequence[int]) -> list[Read]:
        """Return samples' bytes, or errors in their places, wherever they are: all at once."""
        raise NotImplementedError

    # --- what they have in common -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self._sizes

    def read_each(self, samples: Sequence[int]) -> list[Read]:
        """Return the stored bytes of samples, or what is wrong in their places. What is not on this node is fetched at
        once. Views are not to be kept for long."""
        clock = timing.clock()
        began = clock.start()
        found: list[Read | None] = [self.view_here(sample) for sample in samples]
        began = clock.lap(timing.READ, began)
        left = [at for at, data in enumerate(found) if data is None]
        if left:
            for at, data in zip(left, self.fetch([samples[at] for at in left]), strict=True):
                found[at] = data
            clock.lap(timing.MISS, began)
        clock.count(len(samples), sum(int(self._sizes[sample]) for sample in samples), len(left))
        return [data for data in found if data is not None]


_ID_BYTES = 16
_SPAN_FILES = 4096


class SnapshotSource(SampleSource):
    """The files that were selected, in the byte order of their paths."""

    def __init__(self, snapshot: Snapshot, selection: Selection) -> None:
        SampleSource.__init__(self, selection.sizes, selection.kind, selection.classes)
        self.snapshot = snapshot
        self._rows, self._targets = selection.rows, selection.targets
        self.style = getattr(selection.targets, "style", None)
        self._ids = selection.ids

    def row(self, sample: int) -> int:
        """Return a sample's row in the manifest."""
        return int(self._rows[sample])

    def path(self, sample: int) -> str:
        return text(self.snapshot.manifest.path(self.row(sample)))

    def target(self, sample: int) -> Any:
        return self.path(sample) if self._targets is None else self._targets.get(sample)

    def part(self, samples: range) -> Selection:
        """Return the selection of a run of samples, without targets."""
        first, end = samples.start, samples.stop
        ids = bytes(self._ids[_ID_BYTES * first : _ID_BYTES * end])
        return Selection(rows=self._rows[first:end], sizes=self._sizes[first:end], ids=ids, kind=None)

    def spans(self) -> list[Span]:
        """Return runs of some thousand files, for tasks. Their names say which files: another selection has others."""
        found = []
        for start in range(0, len(self), _SPAN_FILES):
            count = min(_SPAN_FILES, len(self) - start)
            objects = self._ids[_ID_BYTES * start : _ID_BYTES * (start + count)]
            found.append(Span(f"files-{start:09d}-{xxh3_64_hexdigest(bytes(objects))}", start, count))
        return found

    def plan_source(self) -> PlanSource | None:
        record = self.snapshot.record
        return PlanSource(record.dataset, record.id)

    def plan_items(self, samples: NDArray[np.int64]) -> NDArray[np.uint32]:
        return self._rows[samples].astype(np.uint32).reshape(-1, 1)

    def view_here(self, sample: int) -> memoryview | None:
        size = int(self._sizes[sample])
        if not size:
            return memoryview(b"")
        if size <= BLOCK_BYTES:
            return self.snapshot.rows.view_object(self._object(sample), size)
        out = np.empty(size, np.uint8).data
        return out if self.snapshot.rows.copy_object(self._object(sample), out) else None

    def copy_here(self, samples: NDArray[np.int64], out: memoryview, starts: Sequence[int]) -> list[int]:
        left, copy = [], self.snapshot.rows.copy_object
        sizes = self._sizes[samples].tolist()
        for at, (sample, size, start) in enumerate(zip(samples.tolist(), sizes, starts, strict=True)):
            if size and not copy(self._object(sample), out[start : start + size]):
                left.append(at)
        return left

    def fetch(self, samples: Sequence[int]) -> list[Read]:
        # The last ones first: what an order was published of is fetched in that order, so once the last has come, most
        # are here and nobody has to be asked for them.
        found = self.snapshot.rows.read_rows([int(self._rows[sample]) for sample in samples[::-1]])
        return list(found[::-1])

    def _object(self, sample: int) -> ObjectId:
        at = _ID_BYTES * sample
        return ObjectId(self._ids[at : at + _ID_BYTES])
