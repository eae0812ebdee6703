"""Write one shard: fetch its files, put them one behind the other, hash, upload, and write its sidecar.

Runs in the builder's workers. What is on the node is used in place; the rest is fetched some files ahead, so that a
cold data set costs the store's throughput and not its latency. Large files pass through in pieces; memory is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest, xxh3_128, xxh3_128_hexdigest

from datacache.core.concurrency import PerProcess
from datacache.core.errors import DatacacheError, ShardError
from datacache.core.ids import BLOCK_BYTES
from datacache.reader.snapshot import Snapshot
from datacache.shards import records as tar
from datacache.shards import records as tfrecord
from datacache.shards.index import IndexWriter, Member, ShardIndex, index_name
from datacache.shards.listing import ShardInfo
from datacache.shards.place import Place
from datacache.shards.plan import Plan
from datacache.shards.samples import File, Sample
from datacache.store.errors import from_oserror

SUFFIXES = {"webdataset": ".tar", "tfrecord": ".tfrecord"}
_THREADS, _AHEAD, _AHEAD_BYTES = 16, 64, 64 * 2**20
_UNMAP_BYTES = 64 * 2**20
_BUFFER_BYTES = 2**20
Data = bytes | memoryview


def shard_name(number: int, format: str) -> str:
    """`shard-000000.tar` and so on."""
    return f"shard-{number:06d}{SUFFIXES[format]}"


def shard_plan(plan: str, number: int) -> str:
    """What the sidecar of a shard says of the plan that it is a part of."""
    return xxh3_128_hexdigest(f"{plan}/{number}".encode())


class ShardWriter:
    """Makes shards of one plan. Made in the parent, used in each worker."""

    def __init__(self, snapshot: Snapshot, plan: Plan, place: Place, *, format: str, identity: str) -> None:
        self._snapshot, self._plan, self._place = snapshot, plan, place
        self._format, self._identity = format, identity
        self._threads = PerProcess(lambda: ThreadPoolExecutor(_THREADS, "read"))

    def work(self, number: int) -> ShardInfo:
        """Make a shard and its sidecar. `ShardError` that names the file that cannot be read; the store's errors."""
        name = shard_name(number, self._format)
        try:
            with self._place.new_file() as path:
                index = self._written(number, name, path)
                self._place.put_file(name, path)
        except OSError as exc:
            raise exc if isinstance(exc, DatacacheError) else from_oserror(exc, f"{self._place.url}/{name}") from exc
        raw = index.encode()
        self._place.put(index_name(name), raw)
        return ShardInfo(name, index.size_bytes, index.digest, len(index), xxh3_128_hexdigest(raw))

    def _written(self, number: int, name: str, path: Path) -> ShardIndex:
        index = IndexWriter()
        with path.open("xb", buffering=_BUFFER_BYTES) as file:
            out = _Hashed(file)
            pieces = self._read(_pieces(self._plan.shard(number)))
            for sample in self._plan.shard(number):
                content = _Content(self, sample, name, pieces)
                if self._format == "webdataset":
                    members = _write_tar(out, sample, content)
                else:
                    members = _write_record(out, sample, content)
                index.add(sample.key, members, sample.class_id)
            if self._format == "webdataset":
                out.write(tar.END)
        self._snapshot.unmap_pages()
        plan = shard_plan(self._identity, number)
        return index.finish(name, size_bytes=out.at, digest=out.hash.hexdigest(), format=self._format, plan=plan)

    def _read(self, pieces: Iterator[_Piece]) -> Iterator[Data]:
        """The bytes of each piece in order; some are on their way while one is written."""
        coming: deque[tuple[int, Data | Future[Data]]] = deque()
        held = viewed = 0
        waiting = next(pieces, None)
        while waiting is not None or coming:
            while waiting is not None and len(coming) < _AHEAD and (not coming or held < _AHEAD_BYTES):
                here = self._snapshot.read_local(*waiting)
                size = waiting.stop - waiting.start
                held += size
                coming.append((size, self._threads.get().submit(self._fetch, waiting) if here is None else here))
                waiting = next(pieces, None)
            size, data = coming.popleft()
            held -= size
            viewed += size
            yield data.result() if isinstance(data, Future) else data
            del data
            if viewed >= _UNMAP_BYTES:
                viewed = 0
                self._snapshot.unmap_pages()

    def _fetch(self, piece: _Piece) -> Data:
        return self._snapshot.read_row(*piece)

    def path_of(self, file: File) -> str:
        """A file's path in the snapshot."""
        return self._snapshot.manifest.path(file.row).decode("utf-8", "surrogateescape")


class _Piece(NamedTuple):
    """A part of a row that is in one block."""

    row: int
    start: int
    stop: int


def _pieces(samples: Iterator[Sample]) -> Iterator[_Piece]:
    for sample in samples:
        for file in sample.files:
            for start in range(0, file.size_bytes, BLOCK_BYTES):
                yield _Piece(file.row, start, min(start + BLOCK_BYTES, file.size_bytes))


class _Content:
    """The files of one sample, to be taken in their order."""

    def __init__(self, writer: ShardWriter, sample: Sample, shard: str, pieces: Iterator[Data]) -> None:
        self._writer, self._sample, self._shard, self._pieces = writer, sample, shard, pieces

    def of(self, file: File) -> Iterator[Data]:
        """A file's bytes."""
        for _ in range(0, file.size_bytes, BLOCK_BYTES):
            try:
                yield next(self._pieces)
            except DatacacheError as exc:
                raise ShardError(
                    f"{self._writer.path_of(file)} cannot be read, so {self._shard} cannot be made: {exc.message}",
                    shard=self._shard,
                    sample=self._sample.key,
                    hint=exc.hint,
                ) from exc


class _Hashed:
    """A file that is written from its beginning to its end, and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = xxh3_128()
        self.at = 0

    def write(self, data: Data) -> None:
        """The next bytes."""
        self._file.write(data)
        self.hash.update(data)
        self.at += len(data)


def _write_tar(out: _Hashed, sample: Sample, content: _Content) -> list[Member]:
    members = []
    for file in sample.files:
        out.write(tar.header(f"{sample.key}.{file.extension}", file.size_bytes))
        start, digest = out.at, xxh3_64()
        for data in content.of(file):
            digest.update(data)
            out.write(data)
        out.write(tar.padding(file.size_bytes))
        members.append(Member(file.extension, start, file.size_bytes, digest.intdigest()))
    for extension, made in sample.labels:
        out.write(tar.header(f"{sample.key}.{extension}", len(made)))
        members.append(Member(extension, out.at, len(made), xxh3_64_intdigest(made)))
        out.write(made)
        out.write(tar.padding(len(made)))
    return members


def _write_record(out: _Hashed, sample: Sample, content: _Content) -> list[Member]:
    ((extension, features),) = sample.labels
    (file,) = sample.files
    head = tfrecord.example_head(features, file.size_bytes)
    size_bytes = len(head) + file.size_bytes
    out.write(tfrecord.record_head(size_bytes))
    start, digest, crc = out.at, xxh3_64(head), tfrecord.extend(0, head)
    out.write(head)
    for data in content.of(file):
        digest.update(data)
        crc = tfrecord.extend(crc, bytes(data))
        out.write(data)
    out.write(tfrecord.record_foot(crc))
    return [Member(extension, start, size_bytes, digest.intdigest())]
