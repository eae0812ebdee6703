"""The summary of one range of images: what queries look at.

It has paths, image sizes, numbers of boxes and, label by label, which images have how many of it. A query over 100,000
images reads summaries alone: some 10 bytes an image instead of 100. What is left is in the range's details
(`table_details`). The encoding is canonical: the same rows give the same bytes. Pure functions, any thread and process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, repeat
from operator import attrgetter
from typing import NamedTuple

from datacache.annotations.model import Annotation, Problem
from datacache.annotations.table.columns import ColumnReader, ColumnWriter
from datacache.core.errors import CorruptManifestError

_MAGIC = b"DCAS"
ANNOTATED, BARE, UNUSABLE = range(3)
_NOTHING = Annotation("", 0, 0)
_label_of = attrgetter("label")


class Row(NamedTuple):
    """What is known of one image of a snapshot."""

    annotation: Annotation | None
    """None: the image cannot be used, and a problem says why."""
    path: str
    problems: tuple[Problem, ...] = ()


def encode_summary(rows: Sequence[Row]) -> bytes:
    """The bytes of a range's summary; rows in byte order of their paths."""
    annotations = [row.annotation or _NOTHING for row in rows]
    labels = range_labels(rows)
    ids = {label: n for n, label in enumerate(labels)}
    out = ColumnWriter(_MAGIC, len(rows))
    out.texts([row.path for row in rows], errors="surrogateescape")
    out.numbers([_state(row.annotation) for row in rows])
    out.numbers([annotation.width for annotation in annotations])
    out.numbers([annotation.height for annotation in annotations])
    out.numbers([len(annotation.boxes) for annotation in annotations])
    for flag in ("difficult", "truncated", "occluded"):
        of_box = attrgetter(flag)
        out.numbers([sum(map(of_box, annotation.boxes)) for annotation in annotations])
    # Label by label, the rows that have it: a query for one label unpacks a slice.
    boxes: Counter[tuple[int, int]] = Counter()
    difficult: Counter[tuple[int, int]] = Counter()
    for n, annotation in enumerate(annotations):
        boxes.update(zip(map(ids.__getitem__, map(_label_of, annotation.boxes)), repeat(n)))
        difficult.update((ids[box.label], n) for box in annotation.boxes if box.difficult)
    of_image = {(ids[label], n) for n, annotation in enumerate(annotations) for label in annotation.labels}
    pairs = sorted(boxes.keys() | of_image)
    rows_of_label = Counter(id for id, _ in pairs)
    out.numbers([len(labels)])
    out.texts(labels)
    out.numbers([rows_of_label[n] for n in range(len(labels))])
    out.numbers([row for _, row in pairs])
    out.numbers([boxes[pair] for pair in pairs])
    out.numbers([difficult[pair] for pair in pairs])
    out.numbers([pair in of_image for pair in pairs])
    return out.finish()


def _state(annotation: Annotation | None) -> int:
    if annotation is None:
        return UNUSABLE
    return ANNOTATED if annotation.source else BARE


def range_labels(rows: Sequence[Row]) -> list[str]:
    """The labels of boxes and of whole images, sorted."""
    annotations = [row.annotation for row in rows if row.annotation is not None]
    boxes = chain.from_iterable(annotation.boxes for annotation in annotations)
    return sorted({*map(_label_of, boxes), *chain.from_iterable(annotation.labels for annotation in annotations)})


class Summary:
    """A decoded summary. Columns are unpacked when they are asked for."""

    __slots__ = ("_columns", "_label_rows", "labels", "rows")

    def __init__(self, raw: bytes) -> None:
        self._columns = ColumnReader(raw, _MAGIC, "a summary of annotations")
        self.rows = self._columns.rows
        count = self._columns.numbers(9, 1)[0]
        self.labels = self._columns.texts(10, count)
        """All labels of the range, sorted."""
        self._label_rows = list(accumulate(self._columns.numbers(12, count), initial=0))

    def paths(self) -> list[str]:
        """The images' paths."""
        return [path.decode("utf-8", "surrogateescape") for path in self._columns.raw(0, self.rows)]

    def states(self) -> Sequence[int]:
        """`ANNOTATED`, `BARE` (no annotation was found for it) or `UNUSABLE`, for each image."""
        return self._columns.numbers(2, self.rows)

    def widths(self) -> Sequence[int]:
        """Of the images, in pixels; 0 for those that cannot be used."""
        return self._columns.numbers(3, self.rows)

    def heights(self) -> Sequence[int]:
        """The same for heights."""
        return self._columns.numbers(4, self.rows)

    def objects(self) -> Sequence[int]:
        """How many boxes each image has."""
        return self._columns.numbers(5, self.rows)

    def flagged(self, flag: str) -> Sequence[int]:
        """How many boxes of each image are `difficult`, `truncated` or `occluded`."""
        return self._columns.numbers({"difficult": 6, "truncated": 7, "occluded": 8}[flag], self.rows)

    def of_label(self, label: str) -> Iterator[tuple[int, int]]:
        """(row, boxes) of the images that have the label; 0 boxes: as a label of the whole image only."""
        at = self._slice(label)
        total = self._label_rows[-1]
        rows, boxes = self._columns.numbers(13, total)[at], self._columns.numbers(14, total)[at]
        if max(rows, default=-1) >= self.rows:
            raise CorruptManifestError("a summary of annotations names an image that it does not have")
        return zip(rows, boxes, strict=True)

    def difficult_of(self, label: str) -> int:
        """How many boxes of a label are difficult."""
        return sum(self._columns.numbers(15, self._label_rows[-1])[self._slice(label)])

    def counts(self) -> list[dict[str, int]]:
        """For each image its labels and how many boxes have them, as in `of_label`."""
        found: list[dict[str, int]] = [{} for _ in range(self.rows)]
        for label in self.labels:
            for row, boxes in self.of_label(label):
                found[row][label] = boxes
        return found

    def totals(self) -> tuple[tuple[str, int, int], ...]:
        """(label, images, boxes) for each label."""
        return tuple(
            (label, len(pairs), sum(boxes for _, boxes in pairs))
            for label in self.labels
            for pairs in [list(self.of_label(label))]
        )

    def _slice(self, label: str) -> slice:
        try:
            number = self.labels.index(label)
        except ValueError:
            return slice(0, 0)
        return slice(self._label_rows[number], self._label_rows[number + 1])
