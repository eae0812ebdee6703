"""Which images are annotated otherwise in another version of a data set.

Ranges that both tables have are passed over unread, so the cost follows the change. Used by `dsctl preview --against`.
One thread an iterator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from datacache.annotations.model import Annotation, Box
from datacache.annotations.table import Row, Table

_SLACK_PX = 0.01
"""YOLO's six decimals move an edge by less; that is no change."""


class Changed(NamedTuple):
    """An image that is not annotated the same in both, or is in one alone (then the other is None)."""

    path: str
    before: Row | None
    after: Row | None


def compare(before: Table, after: Table) -> Iterator[Changed]:
    """What is different in `after`, in the byte order of paths. Where in its file a box stands, and which file that is,
    makes no difference, nor does the order of boxes."""
    old, new = before.rows_without(after), after.rows_without(before)
    a, b = next(old, None), next(new, None)
    while a is not None or b is not None:
        if b is None or (a is not None and _key(a) < _key(b)):
            assert a is not None
            yield Changed(a.path, a, None)
            a = next(old, None)
        elif a is None or _key(b) < _key(a):
            yield Changed(b.path, None, b)
            b = next(new, None)
        else:
            if not _same(a.annotation, b.annotation):
                yield Changed(a.path, a, b)
            a, b = next(old, None), next(new, None)


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
