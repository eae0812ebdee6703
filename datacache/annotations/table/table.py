"""The annotation table: all that is known of a snapshot's images, parsed once, in blobs of the catalog.

Rows are in the byte order of their paths and cut into ranges like a manifest's (`manifest.codec.ends_range`), so that
two versions of a data set share what did not change. Workers encode ranges (`encode_range`), one process puts them
together (`TableBuilder`), and queries, statistics, previews and conversions read them (`Table`). Nothing here knows
where a table's root is kept; see `Catalog.derived`.

An open table holds its root and one decoded range; it may be used by several threads and after `fork()`, as far as
`load_blobs` may. A builder belongs to one thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from datacache.annotations.model import Problem
from datacache.annotations.table import ranges
from datacache.annotations.table.ranges import Row, Summary
from datacache.annotations.table.root import LabelCount, ProblemCount, RangeSummary, Root, RootWriter
from datacache.core.errors import CatalogError, CorruptManifestError
from datacache.manifest import codec
from datacache.manifest.builder import Sorter
from datacache.manifest.model import BlobId

__all__ = [
    "EncodedRange",
    "ImageSummary",
    "LabelCount",
    "ProblemCount",
    "RangeSummary",
    "Row",
    "Table",
    "TableBuilder",
    "encode_range",
]

PutBlobs = Callable[[Sequence[tuple[BlobId, bytes]]], None]
LoadBlobs = Callable[[Sequence[BlobId]], dict[BlobId, bytes]]
KEY_BYTES = 16
_T = TypeVar("_T")
_BLOBS_AT_A_TIME = 64
_SUMMARIES_AHEAD, _DETAILS_AHEAD = 128, 8
_PROBLEMS_A_BLOB = 4_096


class EncodedRange(NamedTuple):
    """A range ready for the catalog. One that is taken over from an earlier table has no blobs."""

    summary: RangeSummary
    blobs: tuple[tuple[BlobId, bytes], ...] = ()
    """Compressed, as `put_blobs` takes them."""


class ImageSummary(NamedTuple):
    """What a query knows of an image."""

    path: str
    width: int
    height: int
    objects: int
    """Boxes."""
    labels: dict[str, int]
    """Every label of the image and how many boxes have it; 0: it is a label of the whole image only."""


def encode_range(rows: Sequence[Row], key: bytes) -> EncodedRange:
    """One range: rows in byte order of their paths, at least one. `key` (16 bytes) is a fingerprint of what they were
    made from, by which the next version's table finds the range again."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a range's key has {KEY_BYTES} bytes, not {len(key)}")
    summary = ranges.encode_summary(rows)
    raws = [summary, *ranges.encode_details(rows)]
    ids = [codec.blob_id(raw) for raw in raws]
    problems = Counter((problem.code, problem.action) for row in rows for problem in row.problems)
    found = [row.annotation for row in rows if row.annotation is not None]
    return EncodedRange(
        RangeSummary(
            summary=ids[0],
            details=tuple(ids[1:]),
            first_path=rows[0].path,
            rows=len(rows),
            usable=len(found),
            boxes=sum(len(annotation.boxes) for annotation in found),
            key=key,
            labels=tuple(LabelCount(*total) for total in Summary(summary).totals()),
            problems=tuple(ProblemCount(*kind, problems[kind]) for kind in sorted(problems)),
        ),
        tuple((id, codec.compress(raw)) for id, raw in zip(ids, raws, strict=True)),
    )


class TableBuilder:
    """Takes ranges in the order of their paths; `finish` gives the root. Memory follows one range, not the table.

    `known` are blobs that the catalog has and that need not be put. Close it, or use it in a `with`.
    """

    def __init__(self, put_blobs: PutBlobs, *, known: Collection[BlobId] = frozenset()) -> None:
        self._put_blobs = put_blobs
        self._known = known
        self._root = RootWriter()
        self._pending: list[tuple[BlobId, bytes]] = []
        self._problems: Sorter[Problem] = Sorter(lambda problem: (problem.file, problem.line, problem))

    def add_range(self, encoded: EncodedRange) -> None:
        """The next range. `CatalogError` if it is not behind the one before."""
        summary, last = encoded.summary, self._root.last_path
        if last and _key(summary.first_path) <= _key(last):
            raise CatalogError(f"the annotations of {summary.first_path!r} come out of order")
        self._root.add(summary)
        self._put(encoded.blobs)

    def add_problem(self, problem: Problem) -> None:
        """A problem that belongs to no image of the snapshot, in any order."""
        self._root.add_problem(problem.code, problem.action)
        self._problems.add(problem)

    def finish(self, meta: Mapping[str, Any]) -> BlobId:
        """Write what is left and the root, whose id is returned. `meta` (JSON) says how the table was made."""
        blobs = []
        for problems in _in_parts(self._problems.sorted(), _PROBLEMS_A_BLOB):
            raw = ranges.encode_problems(problems)
            blobs.append(codec.blob_id(raw))
            self._put([(blobs[-1], codec.compress(raw))])
        raw = self._root.encode(meta, blobs)
        id = codec.blob_id(raw)
        self._put([(id, codec.compress(raw))])
        self._flush()
        self.close()
        return id

    def close(self) -> None:
        """Give temporary files back."""
        self._problems.close()

    def __enter__(self) -> TableBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        self._pending += [blob for blob in blobs if blob[0] not in self._known]
        if len(self._pending) >= _BLOBS_AT_A_TIME:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._put_blobs(self._pending)
            self._pending = []


class Table:
    """An annotation table, read from the catalog's blobs as they are needed."""

    def __init__(self, raw_root: bytes, load_blobs: LoadBlobs) -> None:
        self._root = root = Root(raw_root)
        self._load = load_blobs
        self._last: tuple[int, list[Row]] = (-1, [])
        self.meta: Mapping[str, Any] = root.meta
        """How it was made: format, order of classes, version of the reader."""
        self.labels: dict[str, LabelCount] = {total.label: total for total in root.labels}
        """All labels, sorted."""
        self.images = root.images
        """Images, those that cannot be used among them."""
        self.usable = root.usable
        """Images that can be used."""
        self.boxes = root.boxes
        self.problem_counts: Sequence[ProblemCount] = root.problems
        """How many problems there are of each kind, sorted by code."""

    @classmethod
    def open(cls, root: BlobId, load_blobs: LoadBlobs) -> Table:
        """The table with this root. `CorruptManifestError` if it is missing or damaged."""
        return cls(_fetch(load_blobs, [root])[root], load_blobs)

    def rows(self) -> Iterator[Row]:
        """All rows in the byte order of their paths, streamed."""
        return self._rows(range(self._root.ranges))

    def rows_without(self, other: Table) -> Iterator[Row]:
        """The rows of those ranges that another table does not have."""
        shared = set(other._root.contents())
        return self._rows([number for number, each in enumerate(self._root.contents()) if each not in shared])

    def row(self, path: str) -> Row | None:
        """The row of an image, or None if there is none of this path."""
        number = bisect_right(self._root.first_paths, _key(path)) - 1
        if number < 0:
            return None
        last = self._last
        if last[0] != number:
            self._last = last = (number, list(self._rows([number])))
        return next((row for row in last[1] if row.path == path), None)

    def problems(self) -> Iterator[Problem]:
        """All problems: first those that belong to no image, by file and line, then those of images in the order of
        their paths."""
        root = self._root
        for id in root.problem_blobs:
            yield from ranges.decode_problems(_fetch(self._load, [id])[id])
        for row in self._rows([n for n in range(root.ranges) if root.has_problems(n)]):
            yield from row.problems

    def summaries(self, labels: Sequence[str] = (), *, any_label: bool = False) -> Iterator[tuple[int, Summary]]:
        """The number and the summary of each range that has all of `labels`, or with `any_label` one of them."""
        found = [set(self._root.ranges_with(label)) for label in labels]
        if found:
            numbers = sorted(set.union(*found) if any_label else set.intersection(*found))
        else:
            numbers = list(range(self._root.ranges))
        for part in _in_parts(numbers, _SUMMARIES_AHEAD):
            ids = [self._root.summary(number) for number in part]
            raws = _fetch(self._load, ids)
            for number, id in zip(part, ids, strict=True):
                yield number, Summary(raws[id])

    def details(self, numbers: Sequence[int]) -> dict[int, list[bytes]]:
        """The details blobs of some ranges, uncompressed, for `ranges`."""
        wanted = {number: self._root.details(number) for number in numbers}
        raws = _fetch(self._load, list(chain.from_iterable(wanted.values())))
        return {number: [raws[id] for id in ids] for number, ids in wanted.items()}

    def reusable(self) -> Mapping[bytes, RangeSummary]:
        """The ranges by their keys: a next version takes over those whose key it finds, with
        `builder.add_range(EncodedRange(summary))`."""
        return _Reusable(self._root)

    def blobs(self) -> list[BlobId]:
        """All blobs below the root."""
        return list(self._root.blobs)

    def _rows(self, numbers: Sequence[int]) -> Iterator[Row]:
        for part in _in_parts(numbers, _DETAILS_AHEAD):
            details = self.details(part)
            ids = [self._root.summary(number) for number in part]
            raws = _fetch(self._load, ids)
            for number, id in zip(part, ids, strict=True):
                yield from ranges.decode_details(details[number], Summary(raws[id]))


class _Reusable(Mapping[bytes, RangeSummary]):
    """Makes a range's summary when it is asked for: a table of a million images has thousands with many labels."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._numbers = {key: number for number, key in enumerate(root.keys)}

    def __getitem__(self, key: bytes) -> RangeSummary:
        return self._root.range(self._numbers[key])

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def _key(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _fetch(load: LoadBlobs, ids: Sequence[BlobId]) -> dict[BlobId, bytes]:
    stored = load(ids)
    for id in ids:
        if id not in stored:
            raise CorruptManifestError(f"annotation blob {id.hex()} is missing from the catalog")
    return {id: codec.decompress(data, id) for id, data in stored.items()}


def _in_parts(values: Iterable[_T], size: int) -> Iterator[list[_T]]:
    source = iter(values)
    while part := list(islice(source, size)):
        yield part
