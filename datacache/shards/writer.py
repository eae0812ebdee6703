"""Plan a shard set before any byte of it is read, and write its shards one by one.

Used by the builder; `ShardWriter.work` runs in its workers: forked ones, or processes elsewhere, which are given the
samples with each task. `Plan` keeps samples in a temporary file, and in memory only where each sample is in it and how
much it takes in a shard. A writer uses in place what is on the node, and
fetches the rest some files ahead, so that a cold data set costs the store's throughput and not its latency. Large files
pass through in pieces, so memory is bounded. One thread makes a plan; afterwards any process may read it.
"""

from __future__ import annotations

import os
import pickle
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_128, xxh3_128_hexdigest

from datacache.conversion.files import Data, Files, Part
from datacache.core.errors import DatacacheError, ShardError, UsageError
from datacache.core.ids import BLOCK_BYTES
from datacache.reader.snapshot import Snapshot
from datacache.shards import records
from datacache.shards.index import IndexWriter, Member, ShardIndex, ShardInfo, index_name
from datacache.shards.place import Place
from datacache.shards.samples import File, Sample
from datacache.store.errors import from_oserror

SUFFIXES = {"webdataset": ".tar", "tfrecord": ".tfrecord"}
_BUFFER_BYTES = 2**20


class Plan:
    """All samples of a set, cut into shards."""

    def __init__(self, samples: Iterable[Sample], format: str, *, max_size_bytes: int, seed: int | None, scratch: Path):
        path = scratch / "samples"
        offsets, sizes = array("Q", [0]), array("Q")
        with path.open("wb", buffering=_BUFFER_BYTES) as file:
            for sample in samples:
                key, files, labels, class_id = sample
                plain = pickle.dumps((key, [tuple(each) for each in files], labels, class_id), pickle.HIGHEST_PROTOCOL)
                file.write(plain)
                offsets.append(offsets[-1] + len(plain))
                sizes.append(_planned_bytes(sample, format))
        self._file = path.open("rb")
        path.unlink()  # it goes with the last process that has it open
        self._offsets = np.frombuffer(offsets, np.uint64)
        self.order = _order(len(sizes), seed)
        """The sample at each place of the set, in the order in which they were found."""
        in_order = np.frombuffer(sizes, np.uint64)[self.order] if len(sizes) else np.zeros(0, np.uint64)
        self.cuts = _cut(in_order, max_size_bytes - (len(records.END) if format == "webdataset" else 0))
        """The place of each shard's first sample, and the number of all samples."""

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.order)

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.cuts) - 1

    def shard(self, number: int) -> Iterator[Sample]:
        """Yield the samples of a shard in their order."""
        for sample in self.order[self.cuts[number] : self.cuts[number + 1]].tolist():
            first, last = int(self._offsets[sample]), int(self._offsets[sample + 1])
            raw = os.pread(self._file.fileno(), last - first, first)
            key, files, labels, class_id = pickle.loads(raw)  # noqa: S301 - written above
            yield Sample(key, tuple(File(*file) for file in files), labels, class_id)

    def close(self) -> None:
        """Remove the temporary file."""
        self._file.close()


class _Framed(NamedTuple):
    """A member of a shard: what it is made of."""

    extension: str
    parts: tuple[bytes | File, ...]
    size_bytes: int


def _members(sample: Sample, format: str) -> Iterator[_Framed]:
    if format == "tfrecord":
        ((extension, features),) = sample.labels
        (file,) = sample.files
        head = records.example_head(features, file.size_bytes)
        yield _Framed(extension, (head, file), len(head) + file.size_bytes)
        return
    for file in sample.files:
        yield _Framed(file.extension, (file,), file.size_bytes)
    for extension, made in sample.labels:
        yield _Framed(extension, (made,), len(made))


def _planned_bytes(sample: Sample, format: str) -> int:
    members = list(_members(sample, format))
    if format == "webdataset":
        return sum(records.member_bytes(f"{sample.key}.{each.extension}", each.size_bytes) for each in members)
    size_bytes = members[0].size_bytes
    if size_bytes > records.MAX_DATA_BYTES:
        raise UsageError(
            f"{sample.key} has {sample.files[0].size_bytes:,} bytes, and a record of TensorFlow holds no more than "
            "2 GiB",
            hint="Make WebDataset shards of it: --format webdataset",
        )
    return records.HEAD_BYTES + size_bytes + records.FOOT_BYTES


def _order(samples: int, seed: int | None) -> NDArray[np.int64]:
    """Return samples as found, or shuffled by random keys, whose stream is the same in every version of numpy (unlike
    its `permutation`)."""
    if seed is None or not samples:
        return np.arange(samples, dtype=np.int64)
    return np.argsort(np.random.Philox(key=seed).random_raw(samples), kind="stable").astype(np.int64)


def _cut(sizes: NDArray[np.uint64], limit: int) -> list[int]:
    """Put as many samples into each shard as fit, and at least one."""
    ends = np.cumsum(sizes, dtype=np.uint64)
    cuts = [0]
    while cuts[-1] < len(sizes):
        first = cuts[-1]
        before = int(ends[first - 1]) if first else 0
        cuts.append(max(first + 1, int(np.searchsorted(ends, np.uint64(before + max(0, limit)), "right"))))
    return cuts


def shard_name(number: int, format: str) -> str:
    """Return `shard-000000.tar` and so on."""
    return f"shard-{number:06d}{SUFFIXES[format]}"


def shard_plan(plan: str, number: int) -> str:
    """Return the hash by which a shard's sidecar names the plan that it is a part of."""
    return xxh3_128_hexdigest(f"{plan}/{number}".encode())


class Writing(NamedTuple):
    """A shard to write."""

    number: int
    samples: list[Sample] | None = None
    """None where the plan is at hand."""


class ShardWriter:
    """Writes shards of one plan, which is None where tasks bring their samples. Made in the parent, used in each
    worker."""

    def __init__(self, snapshot: Snapshot, plan: Plan | None, place: Place, *, format: str, identity: str) -> None:
        self._snapshot, self._plan, self._place = snapshot, plan, place
        self._format, self._identity = format, identity
        self._files = Files(snapshot)

    def lasts(self, _info: ShardInfo) -> bool:
        """Tell a second start to write what the set does not have, whatever an earlier start has written."""
        return False

    def work(self, task: Writing) -> ShardInfo:
        """Write a shard and then its sidecar. Raise `ShardError` that names the file that cannot be read; the store's
        errors."""
        name = shard_name(task.number, self._format)
        try:
            with self._place.new_file() as path:
                index = self._write(task, name, path)
                self._place.put_file(name, path)
        except OSError as exc:
            raise exc if isinstance(exc, DatacacheError) else from_oserror(exc, f"{self._place.url}/{name}") from exc
        raw = index.encode()
        self._place.put(index_name(name), raw)
        return ShardInfo(name, index.size_bytes, index.digest, len(index), xxh3_128_hexdigest(raw))

    def _write(self, task: Writing, name: str, path: Path) -> ShardIndex:
        index = IndexWriter()

        def samples() -> Iterable[Sample]:
            if task.samples is not None:
                return task.samples
            assert self._plan is not None
            return self._plan.shard(task.number)

        with path.open("xb", buffering=_BUFFER_BYTES) as file:
            out = _Hashed(file)
            pieces = self._files.read(_pieces(samples()))
            for sample in samples():
                index.add(sample.key, self._write_sample(out, sample, pieces, name), sample.class_id)
            if self._format == "webdataset":
                out.write(records.END)
        self._files.done()
        plan = shard_plan(self._identity, task.number)
        return index.finish(name, size_bytes=out.at, digest=out.hash.hexdigest(), format=self._format, plan=plan)

    def _write_sample(self, out: _Hashed, sample: Sample, pieces: Iterator[Data], shard: str) -> list[Member]:
        """Write the members of a sample, of whose files `pieces` are the next ones."""
        tar, members = self._format == "webdataset", []
        for extension, parts, size_bytes in _members(sample, self._format):
            out.write(
                records.header(f"{sample.key}.{extension}", size_bytes) if tar else records.record_head(size_bytes)
            )
            start, digest, crc = out.at, xxh3_64(), 0
            for part in parts:
                for data in (part,) if isinstance(part, bytes) else self._content(part, pieces, sample.key, shard):
                    digest.update(data)
                    if not tar:
                        crc = records.extend(crc, bytes(data))
                    out.write(data)
            out.write(records.padding(size_bytes) if tar else records.record_foot(crc))
            members.append(Member(extension, start, size_bytes, digest.intdigest()))
        return members

    def _content(self, file: File, pieces: Iterator[Data], key: str, shard: str) -> Iterator[Data]:
        for _ in range(0, file.size_bytes, BLOCK_BYTES):
            try:
                yield next(pieces)
            except DatacacheError as exc:
                path = self._snapshot.manifest.path(file.row).decode("utf-8", "surrogateescape")
                message = f"{path} cannot be read, so {shard} cannot be made: {exc.message}"
                raise ShardError(message, shard=shard, sample=key, hint=exc.hint) from exc


def _pieces(samples: Iterable[Sample]) -> Iterator[Part]:
    """Yield parts that are in one block each."""
    for sample in samples:
        for file in sample.files:
            for start in range(0, file.size_bytes, BLOCK_BYTES):
                yield Part(file.row, min(start + BLOCK_BYTES, file.size_bytes), start)


class _Hashed:
    """A file that is written from its beginning to its end, and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = xxh3_128()
        self.at = 0

    def write(self, data: Data) -> None:
        self._file.write(data)
        self.hash.update(data)
        self.at += len(data)
