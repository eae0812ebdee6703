"""What goes into which shard, known before any byte of it is read.

Samples are written to a temporary file as they are found; what is kept of each in memory is where it is there and how
much it takes in a shard. Used by the builder, whose forked workers read the samples of their shards. A plan belongs to
one thread while it is made; afterwards any process may read it.
"""

from __future__ import annotations

import os
import pickle
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datacache.core.errors import UsageError
from datacache.shards import records as tar
from datacache.shards import records as tfrecord
from datacache.shards.samples import File, Sample

_WRITE_BYTES = 2**20


class Plan:
    """All samples of a set, cut into shards."""

    def __init__(self, samples: Iterable[Sample], format: str, *, max_size_bytes: int, seed: int | None, scratch: Path):
        path = scratch / "samples"
        offsets, sizes = array("Q", [0]), array("Q")
        take = tar_bytes if format == "webdataset" else record_bytes
        with path.open("wb", buffering=_WRITE_BYTES) as file:
            for key, files, labels, class_id in samples:
                plain = pickle.dumps((key, [tuple(each) for each in files], labels, class_id), pickle.HIGHEST_PROTOCOL)
                file.write(plain)
                offsets.append(offsets[-1] + len(plain))
                sizes.append(take(Sample(key, files, labels, class_id)))
        self._file = path.open("rb")
        path.unlink()  # it goes with the last process that has it open
        self._offsets = np.frombuffer(offsets, np.uint64)
        self.order = _order(len(sizes), seed)
        """The sample at each place of the set, in the order in which they were found."""
        in_order = np.frombuffer(sizes, np.uint64)[self.order] if len(sizes) else np.zeros(0, np.uint64)
        self.cuts = _cut(in_order, max_size_bytes - (len(tar.END) if format == "webdataset" else 0))
        """The place of each shard's first sample, and the number of all."""

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self.order)

    @property
    def shards(self) -> int:
        """How many there are."""
        return len(self.cuts) - 1

    def shard(self, number: int) -> Iterator[Sample]:
        """The samples of a shard in their order."""
        for sample in self.order[self.cuts[number] : self.cuts[number + 1]].tolist():
            first, last = int(self._offsets[sample]), int(self._offsets[sample + 1])
            raw = os.pread(self._file.fileno(), last - first, first)
            key, files, labels, class_id = pickle.loads(raw)  # noqa: S301 - written above
            yield Sample(key, tuple(File(*file) for file in files), labels, class_id)

    def close(self) -> None:
        """Give the temporary file back."""
        self._file.close()


def tar_bytes(sample: Sample) -> int:
    """What a sample takes in a tar."""
    members = [(file.extension, file.size_bytes) for file in sample.files]
    members += [(extension, len(data)) for extension, data in sample.labels]
    return sum(tar.member_bytes(f"{sample.key}.{extension}", size_bytes) for extension, size_bytes in members)


def record_bytes(sample: Sample) -> int:
    """What a sample takes in a TFRecord file. `UsageError` where it is too large for one."""
    ((_, features),) = sample.labels
    size_bytes = sample.files[0].size_bytes
    data_bytes = len(tfrecord.example_head(features, size_bytes)) + size_bytes
    if data_bytes > tfrecord.MAX_DATA_BYTES:
        raise UsageError(
            f"{sample.key} has {size_bytes:,} bytes, and a record of TensorFlow holds no more than 2 GiB",
            hint="Make WebDataset shards of it: --format webdataset",
        )
    return tfrecord.HEAD_BYTES + data_bytes + tfrecord.FOOT_BYTES


def _order(samples: int, seed: int | None) -> NDArray[np.int64]:
    """As found, or shuffled: by random keys, whose stream is the same in every version of numpy (unlike its
    `permutation`)."""
    if seed is None or not samples:
        return np.arange(samples, dtype=np.int64)
    return np.argsort(np.random.Philox(key=seed).random_raw(samples), kind="stable").astype(np.int64)


def _cut(sizes: NDArray[np.uint64], limit: int) -> list[int]:
    """As many samples in each shard as fit, and at least one."""
    ends = np.cumsum(sizes, dtype=np.uint64)
    cuts = [0]
    while cuts[-1] < len(sizes):
        first = cuts[-1]
        before = int(ends[first - 1]) if first else 0
        cuts.append(max(first + 1, int(np.searchsorted(ends, np.uint64(before + max(0, limit)), "right"))))
    return cuts
