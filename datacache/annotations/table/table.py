"""The annotation table: all that is known of a snapshot's images, parsed once, in blobs of the catalog.

Rows are in the byte order of their paths and cut into ranges like a manifest's (`manifest.codec.ends_range`), so that
two versions of a data set share what did not change. Workers encode ranges (`encode_range`), one process puts them
together (`TableBuilder`), and queries, statistics, previews and conversions read them (`Table`). Nothing here knows
where a table's root is kept; see `Catalog.derived`.

The root says what is known of all images together, and of each range without loading it. Behind the header that names
all blobs (`manifest.codec.encode_children`) comes a JSON header, then columns: of each range its first path, numbers,
the key it can be found again by, and its labels, so that a query loads the ranges that matter alone. Labels are named
once for all ranges; a million images take some hundred kilobytes. Canonical.

An open table holds its root and one decoded range; it may be used by several threads and after `fork()`, as far as
`load_blobs` may. A builder belongs to one thread.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, chain, groupby, islice, pairwise
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from datacache.annotations.model import Action, Problem
from datacache.annotations.shapes.outline import Skeleton, skeleton_of
from datacache.annotations.table import ranges
from datacache.annotations.table.columns import ColumnReader, ColumnWriter
from datacache.annotations.table.ranges import Row, Summary
from datacache.core.errors import CatalogError, CorruptManifestError
from datacache.manifest import codec
from datacache.manifest.builder import Sorter
from datacache.manifest.model import BlobId

PutBlobs = Callable[[Sequence[tuple[BlobId, bytes]]], None]
LoadBlobs = Callable[[Sequence[BlobId]], dict[BlobId, bytes]]
KEY_BYTES = 16
_MAGIC = b"DCA1"
_RANGE_NUMBERS = ("rows", "usable", "boxes", "details", "labels", "problems")
_T = TypeVar("_T")
_K = TypeVar("_K", str, tuple[str, Action])
_BLOBS_AT_A_TIME = 64
_SUMMARIES_AHEAD, _DETAILS_AHEAD = 128, 8
_PROBLEMS_A_BLOB = 4_096


class LabelCount(NamedTuple):
    """How often a label is there."""

    label: str
    images: int
    """Images that have it, as a box's label or as one of the whole image."""
    boxes: int


class ProblemCount(NamedTuple):
    """How often something was not as it should be."""

    code: str
    action: Action
    times: int


class RangeSummary(NamedTuple):
    """All that a root knows of one range."""

    summary: BlobId
    details: tuple[BlobId, ...]
    first_path: str
    rows: int
    usable: int
    """Rows with an annotation."""
    boxes: int
    key: bytes
    """16 bytes: a fingerprint of what the range was made from. Ranges of equal keys are equal."""
    labels: tuple[LabelCount, ...]
    problems: tuple[ProblemCount, ...]


class EncodedRange(NamedTuple):
    """A range ready for the catalog. One that is taken over from an earlier table has no blobs."""

    summary: RangeSummary
    blobs: tuple[tuple[BlobId, bytes], ...] = ()
    """Compressed, as `put_blobs` takes them."""


class ImageSummary(NamedTuple):
    """The facts about an image that a query can ask for."""

    path: str
    width: int
    height: int
    objects: int
    """Boxes."""
    labels: dict[str, int]
    """Every label of the image and how many boxes have it; 0: it is a label of the whole image only."""


def encode_range(rows: Sequence[Row], key: bytes) -> EncodedRange:
    """Encode one range: rows in byte order of their paths, at least one. `key` (16 bytes) is a fingerprint of what they
    were made from, by which the next version's table finds the range again."""
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


class _Counted(Generic[_K]):
    """Counts of each range by label or problem, as columns: 5,300 ranges of 80 labels are no 424,000 objects."""

    def __init__(self, numbers: int) -> None:
        self._ids: dict[_K, int] = {}
        self._totals: list[list[int]] = []
        self._columns = [array("I") for _ in range(1 + numbers)]

    def add(self, key: _K, *counts: int, of_range: bool = True) -> None:
        """Add the counts of a range, or those of no range."""
        id = self._ids.setdefault(key, len(self._ids))
        if id == len(self._totals):
            self._totals.append([0] * len(counts))
        self._totals[id] = [a + b for a, b in zip(self._totals[id], counts, strict=True)]
        for column, value in zip(self._columns, (id, *counts), strict=True) if of_range else ():
            column.append(value)

    def totals(self) -> list[tuple[_K, list[int]]]:
        """Return the keys, sorted, with their counts."""
        return [(key, self._totals[self._ids[key]]) for key in sorted(self._ids)]

    def columns(self) -> Iterator[Sequence[int]]:
        """Yield the places of the keys in sorted order (ids depend on the order of adding, the bytes must not), and the
        counts."""
        places = {self._ids[key]: place for place, key in enumerate(sorted(self._ids))}
        yield [places[id] for id in self._columns[0]]
        yield from self._columns[1:]


class LoadedRange(NamedTuple):
    """A range, uncompressed."""

    first: int
    """Number of its first row in the table."""
    summary: Summary
    details: list[bytes]


class TableBuilder(AbstractContextManager["TableBuilder"]):
    """Takes ranges in the order of their paths; `finish` gives the root. Memory follows one range, not the table.

    Close it, or use it in a `with`."""

    def __init__(self, put_blobs: PutBlobs) -> None:
        self._put_blobs = put_blobs
        self._summaries: list[BlobId] = []
        self._details: list[BlobId] = []
        self._first_paths: list[str] = []
        self._keys: list[bytes] = []
        self._numbers = [array("Q") for _ in _RANGE_NUMBERS]
        self._labels = _Counted[str](2)
        self._kinds = _Counted[tuple[str, Action]](1)
        self._pending: list[tuple[BlobId, bytes]] = []
        self._problems: Sorter[Problem] = Sorter(lambda problem: (problem.file, problem.line, problem))

    def add_range(self, encoded: EncodedRange) -> None:
        """Add the next range. `CatalogError` if it is not behind the one before."""
        found = encoded.summary
        if self._first_paths and _key(found.first_path) <= _key(self._first_paths[-1]):
            raise CatalogError(f"the annotations of {found.first_path!r} come out of order")
        self._summaries.append(found.summary)
        self._details += found.details
        self._first_paths.append(found.first_path)
        self._keys.append(found.key)
        sizes = len(found.details), len(found.labels), len(found.problems)
        for column, number in zip(self._numbers, (found.rows, found.usable, found.boxes, *sizes), strict=True):
            column.append(number)
        for label, images, boxes in found.labels:
            self._labels.add(label, images, boxes)
        for code, action, times in found.problems:
            self._kinds.add((code, action), times)
        self._put(encoded.blobs)

    def add_problem(self, problem: Problem) -> None:
        """Add a problem that belongs to no image of the snapshot, in any order."""
        self._kinds.add((problem.code, problem.action), 1, of_range=False)
        self._problems.add(problem)

    def finish(self, meta: Mapping[str, Any]) -> BlobId:
        """Write what is left and the root, whose id is returned. `meta` (JSON) says how the table was made."""
        blobs = []
        for problems in _in_parts(self._problems.sorted(), _PROBLEMS_A_BLOB):
            raw = ranges.encode_problems(problems)
            blobs.append(codec.blob_id(raw))
            self._put([(blobs[-1], codec.compress(raw))])
        rows, usable, boxes = (sum(column) for column in self._numbers[:3])
        header = {
            "images": rows,
            "usable": usable,
            "boxes": boxes,
            "labels": [[label, *counts] for label, counts in self._labels.totals()],
            "problems": [[*kind, *counts] for kind, counts in self._kinds.totals()],
            "problem_blobs": len(blobs),
            "meta": meta,
        }
        out = ColumnWriter(_MAGIC, len(self._summaries))
        out.raw([json.dumps(header, sort_keys=True, separators=(",", ":")).encode()])
        out.texts(self._first_paths, errors="surrogateescape")
        out.raw(self._keys)
        for numbers in (*self._numbers, *self._labels.columns(), *self._kinds.columns()):
            out.numbers(numbers)
        raw = codec.encode_children([*self._summaries, *self._details, *blobs]) + out.finish()
        id = codec.blob_id(raw)
        self._put([(id, codec.compress(raw))], all=True)
        self.close()
        return id

    def close(self) -> None:
        """Give temporary files back."""
        self._problems.close()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, blobs: Sequence[tuple[BlobId, bytes]], *, all: bool = False) -> None:
        self._pending += blobs
        if all or len(self._pending) >= _BLOBS_AT_A_TIME:
            self._put_blobs(self._pending)
            self._pending = []


class Table:
    """An annotation table, read from the catalog's blobs as they are needed. Ranges are numbered in the order of their
    paths."""

    def __init__(self, raw: bytes, load_blobs: LoadBlobs) -> None:
        """`CorruptManifestError` if these are not the bytes of a root."""
        self._load = load_blobs
        self._last: tuple[int, list[Row]] = (-1, [])
        self._blobs = codec.children(raw)
        columns = ColumnReader(codec.payload(raw), _MAGIC, "an annotation table")
        try:
            header = json.loads(columns.raw(0, 1)[0])
            self.meta: Mapping[str, Any] = header["meta"]
            """How it was made: format, order of classes, version of the reader."""
            self.images: int = header["images"]
            """Images, those that cannot be used among them."""
            self.usable: int = header["usable"]
            """Images that can be used."""
            self.boxes: int = header["boxes"]
            self.labels: dict[str, LabelCount] = {total[0]: LabelCount(*total) for total in header["labels"]}
            """All labels, sorted."""
            self.problem_counts: Sequence[ProblemCount] = [ProblemCount(*total) for total in header["problems"]]
            """How many problems there are of each kind, sorted by code."""
            loose = int(header["problem_blobs"])
        except (ValueError, KeyError, TypeError, IndexError) as exc:
            raise CorruptManifestError("the root of an annotation table is damaged") from exc
        self._count = count = columns.rows
        self._first_paths = columns.raw(2, count)
        self._keys = columns.raw(4, count)
        self._numbers = [columns.numbers(6 + n, count) for n in range(len(_RANGE_NUMBERS))]
        *_, details, labels, kinds = self._numbers
        self._details_at = list(accumulate(details, initial=count))
        self._rows_at = list(accumulate(self._numbers[0], initial=0))
        self._labels_at = list(accumulate(labels, initial=0))
        self._kinds_at = list(accumulate(kinds, initial=0))
        self._label_columns = [columns.numbers(12 + n, self._labels_at[-1]) for n in range(3)]
        self._kind_columns = [columns.numbers(15 + n, self._kinds_at[-1]) for n in range(2)]
        if len(self._blobs) != self._details_at[-1] + loose:
            raise CorruptManifestError("the root of an annotation table names too few blobs, or too many")

    @property
    def skeletons(self) -> dict[str, Skeleton]:
        """Return the skeletons of the labels that have keypoints."""
        return {label: skeleton_of(fields) for label, fields in self.meta.get("skeletons", {}).items()}

    @classmethod
    def open(cls, root: BlobId, load_blobs: LoadBlobs) -> Table:
        """Open the table with this root. `CorruptManifestError` if it is missing or damaged."""
        return cls(_fetch(load_blobs, [root])[root], load_blobs)

    def rows(self) -> Iterator[Row]:
        """Yield all rows in the byte order of their paths, streamed."""
        return self._rows(range(self._count))

    def numbers_without(self, other: Table) -> list[int]:
        """Return the numbers of those ranges that another table does not have."""
        shared = {tuple(other._range_blobs(number)) for number in range(other._count)}
        return [n for n in range(self._count) if tuple(self._range_blobs(n)) not in shared]

    def loaded(self, numbers: Sequence[int]) -> Iterator[LoadedRange]:
        """Yield some ranges, streamed."""
        for part in _in_parts(numbers, _DETAILS_AHEAD):
            details = self.details(part)
            raws = _fetch(self._load, [self._blobs[number] for number in part])
            for number in part:
                yield LoadedRange(self._rows_at[number], Summary(raws[self._blobs[number]]), details[number])

    def row(self, path: str) -> Row | None:
        """Return the row of an image, or None if there is none of this path."""
        number = bisect_right(self._first_paths, _key(path)) - 1
        if number < 0:
            return None
        last = self._last
        if last[0] != number:
            self._last = last = (number, list(self._rows([number])))
        return next((row for row in last[1] if row.path == path), None)

    def number(self, path: str) -> int:
        """Return the number of an image's row; -1 if there is none of this path."""
        return self.numbers_of([_key(path)])[0]

    def numbers_of(self, paths: Sequence[bytes]) -> list[int]:
        """Return the numbers of rows by their paths, which are in order; -1 for a path that is not there."""
        found: list[int] = []
        for number, same in groupby(paths, key=lambda path: bisect_right(self._first_paths, path) - 1):
            known = self._summary(number).raw_paths() if number >= 0 else []
            for path in same:
                place = bisect_left(known, path)
                is_there = place < len(known) and known[place] == path
                found.append(self._rows_at[number] + place if is_there else -1)
        return found

    def seek(self, path: str) -> int:
        """Return the number of the first row whose path is `path` or comes after it in byte order."""
        number = bisect_right(self._first_paths, _key(path)) - 1
        if number < 0:
            return 0
        paths = list(map(_key, self._summary(number).paths()))
        return self._rows_at[number] + bisect_left(paths, _key(path))

    def rows_at(self, rows: Sequence[int]) -> list[Row]:
        """Return some rows by their numbers, which are in order."""
        found: list[Row] = []
        by_range = groupby(rows, key=lambda row: bisect_right(self._rows_at, row) - 1)
        for part in _in_parts(((number, list(same)) for number, same in by_range), _DETAILS_AHEAD):
            details = self.details([number for number, _ in part])
            for number, wanted in part:
                start, first = self._rows_at[number], wanted[0]
                window = slice(first - start, wanted[-1] + 1 - start)
                decoded = list(ranges.decode_details(details[number], self._summary(number), window))
                found += [decoded[row - first] for row in wanted]
        return found

    def path_at(self, row: int) -> str:
        """Return the path of a row."""
        number = bisect_right(self._rows_at, row) - 1
        return self._summary(number).paths()[row - self._rows_at[number]]

    def row_counts(self) -> Sequence[int]:
        """Return the number of rows of each range."""
        return self._numbers[0]

    def with_problems(self) -> list[int]:
        """Return the numbers of the ranges whose images have problems."""
        return [n for n, (a, b) in enumerate(pairwise(self._kinds_at)) if a < b]

    def problems(self) -> Iterator[Problem]:
        """Yield all problems: first those that belong to no image, by file and line, then those of images in the order
        of their paths."""
        for id in self._blobs[self._details_at[-1] :]:
            yield from ranges.decode_problems(_fetch(self._load, [id])[id])
        for row in self._rows(self.with_problems()):
            yield from row.problems

    def summaries(self, labels: Sequence[str] = (), *, any_label: bool = False) -> Iterator[tuple[int, Summary]]:
        """Yield the number and the summary of each range that has all of `labels`, or with `any_label` one of them."""
        found = [self._ranges_with(label) for label in labels]
        if found:
            numbers = sorted(set.union(*found) if any_label else set.intersection(*found))
        else:
            numbers = list(range(self._count))
        for part in _in_parts(numbers, _SUMMARIES_AHEAD):
            raws = _fetch(self._load, [self._blobs[number] for number in part])
            for number in part:
                yield number, Summary(raws[self._blobs[number]])

    def details(self, numbers: Sequence[int]) -> dict[int, list[bytes]]:
        """Return the details blobs of some ranges, uncompressed, for `ranges`."""
        wanted = {number: self._range_blobs(number)[1:] for number in numbers}
        raws = _fetch(self._load, list(chain.from_iterable(wanted.values())))
        return {number: [raws[id] for id in ids] for number, ids in wanted.items()}

    def range_numbers(self) -> dict[bytes, int]:
        """Return the numbers of the ranges by their keys: a next version takes over those whose key it finds, with
        `builder.add_range(EncodedRange(table.range(number)))`."""
        return {key: number for number, key in enumerate(self._keys)}

    def range(self, number: int) -> RangeSummary:
        """Return all that is known of a range."""
        labels, kinds = list(self.labels), self.problem_counts
        ids, images, in_boxes = (c[self._labels_at[number] : self._labels_at[number + 1]] for c in self._label_columns)
        codes, times = (c[self._kinds_at[number] : self._kinds_at[number + 1]] for c in self._kind_columns)
        summary, *details = self._range_blobs(number)
        rows, usable, boxes = (column[number] for column in self._numbers[:3])
        return RangeSummary(
            summary,
            tuple(details),
            self._first_paths[number].decode("utf-8", "surrogateescape"),
            rows,
            usable,
            boxes,
            self._keys[number],
            tuple(LabelCount(labels[id], *counts) for id, *counts in zip(ids, images, in_boxes, strict=True)),
            tuple(kinds[id]._replace(times=count) for id, count in zip(codes, times, strict=True)),
        )

    def blobs(self) -> list[BlobId]:
        """Return all blobs below the root."""
        return list(self._blobs)

    def _range_blobs(self, number: int) -> list[BlobId]:
        """Return the blobs of a range, the summary first: ranges that have the same are the same."""
        return [self._blobs[number], *self._blobs[self._details_at[number] : self._details_at[number + 1]]]

    def _summary(self, number: int) -> Summary:
        return Summary(_fetch(self._load, [self._blobs[number]])[self._blobs[number]])

    def _ranges_with(self, label: str) -> set[int]:
        id = next((n for n, known in enumerate(self.labels) if known == label), None)
        ids = list(self._label_columns[0])
        return {n for n, (a, b) in enumerate(pairwise(self._labels_at)) if id in ids[a:b]}

    def _rows(self, numbers: Sequence[int]) -> Iterator[Row]:
        for _, summary, details in self.loaded(numbers):
            yield from ranges.decode_details(details, summary)


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
