"""Find images by what is annotated in them (labels, numbers of objects, a condition of `where`), and compare versions.

A query is compiled to one function over the columns of a range's summary, so that 100,000 images take some hundredths
of a second; boxes are decoded only for the fields that need them. `compare` passes over ranges that both tables have,
so its cost follows the change. Used by `dsctl query`, previews and subsets. A query is a plain value; any thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

from datacache.annotations import where
from datacache.annotations.model import Annotation, Box
from datacache.annotations.table.columns import as_float64
from datacache.annotations.table.ranges import ANNOTATED, UNUSABLE, Row, Summary, box_sizes
from datacache.annotations.table.table import ImageSummary, Table
from datacache.annotations.where import Column, Program
from datacache.core.errors import UsageError

_DETAILS_AHEAD = 32
_Select = Callable[[Sequence[Sequence[Any]]], list[int]]
_Found = Iterator[tuple[Summary, list[int]]]


@dataclass(frozen=True, kw_only=True)
class Query:
    """Which images are meant. Images that cannot be used never are."""

    labels: tuple[str, ...] = ()
    """Labels an image must have, on a box or as a whole: all of them, or with `any_label` one."""
    any_label: bool = False
    min_objects: int | None = None
    """At least so many boxes: of each label in `labels` (with `any_label`: of one), or of all where none is given."""
    max_objects: int | None = None
    """At most so many, counted in the same way."""
    where: str = ""
    """A condition, see `where`."""

    def __post_init__(self) -> None:
        for name, number in (("min_objects", self.min_objects), ("max_objects", self.max_objects)):
            if number is not None and number < 0:
                raise UsageError(f"{name} cannot be {number}", hint="Give a number from 0 on.")

    def as_json(self) -> dict[str, Any]:
        """Return what is asked for, for lineage."""
        asked = {name: value for name, value in asdict(self).items() if value is not None and value not in ((), "")}
        if self.labels:
            asked["labels"] = list(self.labels)
        if not self.any_label:
            del asked["any_label"]
        return asked


def find(table: Table, query: Query) -> Iterator[ImageSummary]:
    """Return the images a query means, in the byte order of their paths. `UsageError` at once for a label that the
    table does not have, and for a condition that cannot be understood."""
    return (
        ImageSummary(path, width, height, objects, labels)
        for summary, rows in _select(table, query)
        for path, width, height, objects, labels in _picked(
            rows, summary.paths(), summary.widths(), summary.heights(), summary.objects(), summary.counts()
        )
    )


def find_paths(table: Table, query: Query) -> Iterator[str]:
    """Return the paths alone, which is faster."""
    return (path for summary, rows in _select(table, query) for (path,) in _picked(rows, summary.paths()))


def count(table: Table, query: Query) -> int:
    """Count the images."""
    return sum(len(rows) for _, rows in _select(table, query))


def _picked(rows: Sequence[int], *columns: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    return ((*(column[row] for column in columns),) for row in rows)


def _select(table: Table, query: Query) -> _Found:
    """Find the rows that are meant, of each range that has some. Mistakes are found before the first range is read."""
    program = Program()
    program.add(f"{program.column('field', 'state')} != {UNUSABLE}")
    for label in query.labels:
        if label not in table.labels:
            raise where.unknown_label(label, table.labels)
    if query.labels:
        word = " or " if query.any_label else " and "
        of_each = (
            [program.column("has", label), *_bounds(program, program.column("count", label), query)]
            for label in query.labels
        )
        program.add(word.join(f"({' and '.join(conditions)})" for conditions in of_each))
    else:
        bounds = _bounds(program, program.column("field", "objects"), query)
        program.add(" and ".join(bounds) or "True")
    if query.where.strip():
        where.Checker(program, query.where, table.labels).check()
    return _evaluate(table, query, program.columns, program.compile())


def _bounds(program: Program, number: str, query: Query) -> list[str]:
    bounds = []
    if query.min_objects is not None:
        bounds.append(f"{number} >= {program.constant(query.min_objects)}")
    if query.max_objects is not None:
        bounds.append(f"{number} <= {program.constant(query.max_objects)}")
    return bounds


def _evaluate(table: Table, query: Query, columns: Sequence[Column], select: _Select) -> _Found:
    box_fields = any(column.function == "field" and column.name in where.BOX_FIELDS for column in columns)
    summaries = table.summaries(query.labels, any_label=query.any_label)
    while part := list(islice(summaries, _DETAILS_AHEAD)):
        details = table.details([number for number, _ in part]) if box_fields else {}
        for number, summary in part:
            of_boxes = _box_fields(details[number], summary) if box_fields else {}
            rows = select([_column(summary, column, of_boxes) for column in columns])
            if rows:
                yield summary, rows


def _column(summary: Summary, column: Column, of_boxes: dict[str, list[float]]) -> Sequence[Any]:
    """Return the values of a column for all rows of a range."""
    if column.function != "field":
        numbers = [0] * summary.rows
        there = [False] * summary.rows
        for row, boxes in summary.of_label(column.name):
            numbers[row], there[row] = boxes, True
        return numbers if column.function == "count" else there
    if column.name in of_boxes:
        return of_boxes[column.name]
    return _FIELDS[column.name](summary)


_FIELDS: dict[str, Callable[[Summary], Sequence[Any]]] = {
    "state": Summary.states,
    "annotated": lambda summary: [state == ANNOTATED for state in summary.states()],
    "path": Summary.paths,
    "folder": lambda summary: [path.rpartition("/")[0] for path in summary.paths()],
    "name": lambda summary: [path.rpartition("/")[2] for path in summary.paths()],
    "width": Summary.widths,
    "height": Summary.heights,
    "area": lambda summary: [w * h for w, h in zip(summary.widths(), summary.heights(), strict=True)],
    "aspect": lambda summary: [w / (h or 1) for w, h in zip(summary.widths(), summary.heights(), strict=True)],
    "objects": Summary.objects,
    "difficult": lambda summary: summary.flagged("difficult"),
    "truncated": lambda summary: summary.flagged("truncated"),
    "occluded": lambda summary: summary.flagged("occluded"),
    "labels": Summary.counts,
}


def _box_fields(parts: Sequence[bytes], summary: Summary) -> dict[str, list[float]]:
    """Return the fields that boxes are decoded for; nan where an image has none."""
    import numpy as np

    widths, heights = box_sizes(parts, summary)
    objects = as_float64(summary.objects()).astype(np.intp)
    images = as_float64(summary.widths()) * as_float64(summary.heights())
    areas = widths * heights / np.repeat(images, objects)
    having = objects > 0
    starts = (np.cumsum(objects) - objects)[having]
    found = {}
    for name, values, reduce in (
        ("min_side", np.minimum(widths, heights), np.minimum),
        ("max_side", np.maximum(widths, heights), np.maximum),
        ("min_area", areas, np.minimum),
        ("max_area", areas, np.maximum),
    ):
        column = np.full(len(objects), np.nan)
        if len(starts):
            column[having] = reduce.reduceat(values, starts)
        found[name] = column.tolist()
    return found


_SLACK_PX = 0.01
"""YOLO's six decimals move an edge by less; that is no change."""


class Changed(NamedTuple):
    """An image that is not annotated the same in both, or is in one alone (then the other is None)."""

    path: str
    before: Row | None
    after: Row | None


def compare(before: Table, after: Table) -> Iterator[Changed]:
    """Yield what is different in `after`, in the byte order of paths. Where in its file a box stands, and which file
    that is, makes no difference, nor does the order of boxes."""
    old, new = before.rows_without(after), after.rows_without(before)
    both = heapq.merge(((row, 0) for row in old), ((row, 1) for row in new), key=lambda item: _key(item[0]))
    for path, versions in groupby(both, key=lambda item: item[0].path):
        found: list[Row | None] = [None, None]
        for row, which in versions:
            found[which] = row
        a, b = found
        if a is None or b is None or not _same(a.annotation, b.annotation):
            yield Changed(path, a, b)


def _same(a: Annotation | None, b: Annotation | None) -> bool:
    if a is None or b is None:
        return a is b
    if (a.width, a.height, sorted(a.labels), len(a.boxes)) != (b.width, b.height, sorted(b.labels), len(b.boxes)):
        return False
    return all(map(_alike, sorted(a.boxes, key=_order), sorted(b.boxes, key=_order)))


def _order(box: Box) -> tuple[str, float, float, float, float]:
    return box.label, round(box.x1), round(box.y1), round(box.x2), round(box.y2)


def _alike(a: Box, b: Box) -> bool:
    return (a.label, a[5:9]) == (b.label, b[5:9]) and all(
        abs(p - q) <= _SLACK_PX for p, q in zip(a[1:5], b[1:5], strict=True)
    )


def _key(row: Row) -> bytes:
    return row.path.encode("utf-8", "surrogateescape")
