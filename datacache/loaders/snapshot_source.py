"""The files of a snapshot as samples, read from this node's cache where they are there. See `source`.

Used by `SnapshotDataset` and by `datacache.tf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from datacache.annotations.layout import text
from datacache.core.errors import DatacacheError
from datacache.core.objects import BLOCK_BYTES, ObjectId
from datacache.core.threads import gather
from datacache.loaders.lookahead import PlanSource
from datacache.loaders.selection import Selection
from datacache.loaders.source import Read, SampleSource
from datacache.loaders.tasks import Span
from datacache.reader.snapshot import Snapshot

_ID_BYTES = 16
_SPAN_FILES = 4096


class SnapshotSource(SampleSource):
    """The files that were selected, in the byte order of their paths."""

    def __init__(self, snapshot: Snapshot, selection: Selection) -> None:
        SampleSource.__init__(self, selection.sizes, selection.kind, selection.classes)
        self.snapshot = snapshot
        self._rows, self._targets = selection.rows, selection.targets
        self._ids = selection.ids

    def path(self, sample: int) -> str:
        """See `SampleSource`."""
        return text(self.snapshot.manifest.path(int(self._rows[sample])))

    def target(self, sample: int) -> Any:
        """See `SampleSource`."""
        return self.path(sample) if self._targets is None else self._targets.get(sample)

    def groups(self) -> NDArray[np.int64] | None:
        """Files lie apart: there are no groups that are read together."""
        return None

    def spans(self) -> list[Span]:
        """Some thousand files each, for tasks. Their names say which files: another selection has others."""
        found = []
        for start in range(0, len(self), _SPAN_FILES):
            count = min(_SPAN_FILES, len(self) - start)
            objects = self._ids[_ID_BYTES * start : _ID_BYTES * (start + count)]
            found.append(Span(f"files-{start:09d}-{xxh3_64_hexdigest(bytes(objects))}", start, count))
        return found

    def plan_source(self) -> PlanSource | None:
        """For lookahead: rows of the manifest."""
        record = self.snapshot.record
        return PlanSource(record.dataset, record.id)

    def plan_items(self, samples: NDArray[np.int64]) -> NDArray[np.uint32]:
        """For lookahead: the row of each sample, all of its object."""
        return self._rows[samples].astype(np.uint32).reshape(-1, 1)

    def _view_here(self, sample: int) -> memoryview | None:
        size = int(self._sizes[sample])
        if not size:
            return memoryview(b"")
        if size <= BLOCK_BYTES:
            return self.snapshot.view_object(self._object(sample), size)
        out = np.empty(size, np.uint8).data
        return out if self.snapshot.copy_object(self._object(sample), out) else None

    def _copy_here(self, samples: NDArray[np.int64], out: memoryview, starts: Sequence[int]) -> list[int]:
        left, copy = [], self.snapshot.copy_object
        sizes = self._sizes[samples].tolist()
        for at, (sample, size, start) in enumerate(zip(samples.tolist(), sizes, starts, strict=True)):
            if size and not copy(self._object(sample), out[start : start + size]):
                left.append(at)
        return left

    def _fetch(self, samples: Sequence[int]) -> list[Read]:
        def read(sample: int) -> bytes | memoryview:
            return self.snapshot.read_row(int(self._rows[sample]), 0, int(self._sizes[sample]))

        # The last ones first: what an order was published of is fetched in that order, so once the last has come, most
        # are here and nobody has to be asked for them.
        found: list[bytes | memoryview | DatacacheError] = gather(read, samples[::-1])
        return found[::-1]

    def _object(self, sample: int) -> ObjectId:
        at = _ID_BYTES * sample
        return ObjectId(self._ids[at : at + _ID_BYTES])
