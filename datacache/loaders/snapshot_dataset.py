"""A dataset over the files of a snapshot.

`datacache.torch.SnapshotDataset` opens a snapshot and selects; this joins what it needs. See `dataset`.
"""

from __future__ import annotations

from typing import Any

from datacache.loaders.dataset import Options, SampleDataset
from datacache.loaders.selection import Selection
from datacache.loaders.source import SnapshotSource
from datacache.loaders.targets import tensors
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings


class SnapshotSamples(SnapshotSource, SampleDataset):
    """The files that were selected, in the byte order of their paths."""

    def __init__(self, snapshot: Snapshot, selection: Selection, options: Options, settings: Settings) -> None:
        SnapshotSource.__init__(self, snapshot, selection)
        SampleDataset.__init__(self, options, settings)

    def target(self, sample: int) -> Any:
        """See `SampleSource`; boxes are tensors."""
        return tensors(super().target(sample))
