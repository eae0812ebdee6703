"""The root of an annotation table: what is known of all images together, and of each range without loading it.

Behind the header that names all blobs (`manifest.blobtree`) comes a JSON header, then columns: of each range its first
path, numbers, the key it can be found again by, and its labels, so that a query loads the ranges that matter alone.
Labels are named once for all ranges; a million images take some hundred kilobytes. Canonical; pure, any thread.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

from datacache.annotations.model import Action
from datacache.annotations.table.columns import ColumnReader, ColumnWriter
from datacache.core.errors import CorruptManifestError
from datacache.manifest import codec as blobtree
from datacache.manifest.model import BlobId

_MAGIC = b"DCA1"
_RANGE_NUMBERS = ("rows", "usable", "boxes", "details", "labels", "problems")
_K = TypeVar("_K", str, tuple[str, Action])


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
    """What a root knows of one range."""

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


class RootWriter:
    """Collects what is known of the ranges, in the order of their paths, without keeping objects for each."""

    def __init__(self) -> None:
        self._summaries: list[BlobId] = []
        self._details: list[BlobId] = []
        self._first_paths: list[str] = []
        self._keys: list[bytes] = []
        self._numbers = [array("Q") for _ in _RANGE_NUMBERS]
        self._labels: dict[str, int] = {}
        self._label_columns = array("I"), array("I"), array("I")  # label, images, boxes
        self._codes: dict[tuple[str, Action], int] = {}
        self._code_columns = array("I"), array("I")  # code, problems
        self._problems: Counter[tuple[str, Action]] = Counter()

    @property
    def last_path(self) -> str:
        """The first path of the range added last; '' before the first."""
        return self._first_paths[-1] if self._first_paths else ""

    def add(self, found: RangeSummary) -> None:
        """One more range."""
        self._summaries.append(found.summary)
        self._details += found.details
        self._first_paths.append(found.first_path)
        self._keys.append(found.key)
        sizes = len(found.details), len(found.labels), len(found.problems)
        for column, number in zip(self._numbers, (found.rows, found.usable, found.boxes, *sizes), strict=True):
            column.append(number)
        for label, images, boxes in found.labels:
            id = self._labels.setdefault(label, len(self._labels))
            for column, value in zip(self._label_columns, (id, images, boxes), strict=True):
                column.append(value)
        for code, action, times in found.problems:
            self._code_columns[0].append(self._code(code, action))
            self._code_columns[1].append(times)
            self._problems[code, action] += times

    def add_problem(self, code: str, action: Action) -> None:
        """One more problem that belongs to no image."""
        self._code(code, action)
        self._problems[code, action] += 1

    def encode(self, meta: Mapping[str, Any], problem_blobs: Sequence[BlobId]) -> bytes:
        """The bytes of the root. `problem_blobs` hold the problems that belong to no image."""
        labels, label_places = _in_order(self._labels)
        codes, code_places = _in_order(self._codes)
        rows, usable, boxes = (sum(column) for column in self._numbers[:3])
        totals = [[0, 0] for _ in labels]
        for id, of_images, of_boxes in zip(*self._label_columns, strict=True):
            totals[label_places[id]][0] += of_images
            totals[label_places[id]][1] += of_boxes
        header = {
            "images": rows,
            "usable": usable,
            "boxes": boxes,
            "labels": [[label, *total] for label, total in zip(labels, totals, strict=True)],
            "problems": [[*code, self._problems[code]] for code in codes],
            "problem_blobs": len(problem_blobs),
            "meta": meta,
        }
        out = ColumnWriter(_MAGIC, len(self._summaries))
        out.raw([json.dumps(header, sort_keys=True, separators=(",", ":")).encode()])
        out.texts(self._first_paths, errors="surrogateescape")
        out.raw(self._keys)
        for numbers in self._numbers:
            out.numbers(numbers)
        out.numbers([label_places[id] for id in self._label_columns[0]])
        out.numbers(self._label_columns[1])
        out.numbers(self._label_columns[2])
        out.numbers([code_places[id] for id in self._code_columns[0]])
        out.numbers(self._code_columns[1])
        return blobtree.encode_children([*self._summaries, *self._details, *problem_blobs]) + out.finish()

    def _code(self, code: str, action: Action) -> int:
        return self._codes.setdefault((code, action), len(self._codes))


class Root:
    """A decoded root. Ranges are numbered in the order of their paths."""

    def __init__(self, raw: bytes) -> None:
        """`CorruptManifestError` if these are not the bytes of an annotation table's root."""
        blobs = blobtree.children(raw)
        columns = ColumnReader(blobtree.payload(raw), _MAGIC, "an annotation table")
        self.ranges = count = columns.rows
        try:
            header = json.loads(columns.raw(0, 1)[0])
            self.meta: dict[str, Any] = header["meta"]
            self.images: int = header["images"]
            self.usable: int = header["usable"]
            self.boxes: int = header["boxes"]
            self.labels = [LabelCount(*total) for total in header["labels"]]
            self.problems = [ProblemCount(*total) for total in header["problems"]]
            loose = int(header["problem_blobs"])
        except (ValueError, KeyError, TypeError) as exc:
            raise CorruptManifestError("the root of an annotation table is damaged") from exc
        self.first_paths = columns.raw(2, count)
        self.keys = columns.raw(4, count)
        rows, usable, boxes, details, labels, problems = (
            columns.numbers(6 + n, count) for n in range(len(_RANGE_NUMBERS))
        )
        self.rows, self._usable, self._boxes = rows, usable, boxes
        self._details_at = list(accumulate(details, initial=count))
        self._labels_at = list(accumulate(labels, initial=0))
        self._codes_at = list(accumulate(problems, initial=0))
        self._label_columns = [columns.numbers(12 + n, self._labels_at[-1]) for n in range(3)]
        self._code_columns = [columns.numbers(15 + n, self._codes_at[-1]) for n in range(2)]
        self.blobs = blobs
        """All that the root needs."""
        if len(blobs) != self._details_at[-1] + loose:
            raise CorruptManifestError("the root of an annotation table names too few blobs, or too many")
        self.problem_blobs = blobs[self._details_at[-1] :]
        """The problems that belong to no image."""

    def summary(self, number: int) -> BlobId:
        """The blob of a range's summary."""
        return self.blobs[number]

    def details(self, number: int) -> list[BlobId]:
        """The blobs of a range's details."""
        return self.blobs[self._details_at[number] : self._details_at[number + 1]]

    def contents(self) -> list[tuple[BlobId, ...]]:
        """The blobs of each range: ranges that have the same are the same."""
        return [(self.summary(number), *self.details(number)) for number in range(self.ranges)]

    def has_problems(self, number: int) -> bool:
        """Whether images of a range have any."""
        return self._codes_at[number] < self._codes_at[number + 1]

    def ranges_with(self, label: str) -> list[int]:
        """The ranges that have a label."""
        id = next((n for n, total in enumerate(self.labels) if total.label == label), None)
        ids = list(self._label_columns[0])
        return [n for n, (a, b) in enumerate(pairwise(self._labels_at)) if id in ids[a:b]]

    def range(self, number: int) -> RangeSummary:
        """All that is known of a range."""
        labels = slice(self._labels_at[number], self._labels_at[number + 1])
        codes = slice(self._codes_at[number], self._codes_at[number + 1])
        ids, images, boxes = (column[labels] for column in self._label_columns)
        return RangeSummary(
            summary=self.summary(number),
            details=tuple(self.details(number)),
            first_path=self.first_paths[number].decode("utf-8", "surrogateescape"),
            rows=self.rows[number],
            usable=self._usable[number],
            boxes=self._boxes[number],
            key=self.keys[number],
            labels=tuple(
                LabelCount(self.labels[id].label, *counts) for id, *counts in zip(ids, images, boxes, strict=True)
            ),
            problems=tuple(
                self.problems[id]._replace(times=times)
                for id, times in zip(*(column[codes] for column in self._code_columns), strict=True)
            ),
        )


def _in_order(ids: Mapping[_K, int]) -> tuple[list[_K], dict[int, int]]:
    """The keys sorted, and where each id's key is then: ids depend on the order of adding, the bytes must not."""
    keys = sorted(ids)
    return keys, {ids[key]: place for place, key in enumerate(keys)}
