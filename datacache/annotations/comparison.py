"""Compare the annotations of two versions of a data set: which images differ, and which of their objects.

Ranges that both tables have are passed over unread, so the cost follows the change. Used by `dsctl snapshot diff
--objects`, previews and pictures of versions. Pure functions over open tables; one thread an iterator.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import NOTHING, Mask, Polygon, Rotated, unpack
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.table import Table

_SLACK_PX = 0.01
"""YOLO's six decimals move an edge by less; that is no change."""
_MOST_PAIRS = 1_000_000
"""Objects before times objects after of one image that are compared by overlap; of more, only those with equal boxes
are found again."""
_SAME_OBJECT = 0.5
"""The least overlap (intersection over union) of two boxes that are taken for one object."""


class ObjectChange(NamedTuple):
    """One object that differs. `moved`: its box, outline or keypoints; `relabelled`: its label, and perhaps its place;
    `edited`: its flags, attributes and the like alone."""

    kind: Literal["added", "removed", "moved", "relabelled", "edited"]
    before: Box | None
    after: Box | None


class Changed(NamedTuple):
    """An image that is not annotated the same in both, or is in one alone (then the other is None)."""

    path: str
    before: Row | None
    after: Row | None

    def objects(self) -> list[ObjectChange]:
        """Return the objects that differ; all of an image that is in one version alone."""
        before, after = (row.annotation.boxes if row and row.annotation else () for row in (self.before, self.after))
        return compare_objects(before, after)


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
    if sorted(a.captions) != sorted(b.captions):
        return False
    return all(map(_alike, sorted(a.boxes, key=_order), sorted(b.boxes, key=_order)))


def _order(box: Box) -> tuple[str, float, float, float, float]:
    return box.label, round(box.x1), round(box.y1), round(box.x2), round(box.y2)


def _alike(a: Box, b: Box) -> bool:
    facts = ((box.label, box[5:9], (box.extra or NOTHING)[2:]) for box in (a, b))
    return next(facts) == next(facts) and _in_place(a, b)


def _in_place(a: Box, b: Box) -> bool:
    """Tell whether box, outline and keypoints are the same but for rounding."""
    return _but_points(a) == _but_points(b) and all(
        abs(p - q) <= _SLACK_PX for p, q in zip((*a[1:5], *_points(a)), (*b[1:5], *_points(b)), strict=True)
    )


def _but_points(box: Box) -> tuple[object, ...]:
    """Return what must be equal of the outline and the keypoints: all but their points, of which their number."""
    outline, keypoints, *_ = box.extra or NOTHING
    shape = outline if isinstance(outline, Mask) else outline and (type(outline), len(outline[0]), *outline[1:])
    return shape, keypoints and (len(keypoints.points), keypoints.visible)


def _points(box: Box) -> array[float]:
    outline, keypoints = (None, None) if box.extra is None else box.extra[:2]
    lines = outline[0] if isinstance(outline, Polygon | Rotated) else b""
    return unpack(lines + (keypoints.points if keypoints else b""))


def _key(row: Row) -> bytes:
    return row.path.encode("utf-8", "surrogateescape")


def compare_objects(before: Sequence[Box], after: Sequence[Box]) -> list[ObjectChange]:
    """Return the objects of one image that differ: first pairs in the order of `before`, then what was removed, then
    what was added.

    Of objects that are not equal, two are one if their boxes overlap by at least half, those of one label first, and
    of these the pair that overlaps most.
    """
    old, new = _without_equal(before, after)
    pairs = dict(_pairs(old, new))
    taken = set(pairs.values())
    changes = [_change(old[a], new[pairs[a]]) for a in sorted(pairs) if not _alike(old[a], new[pairs[a]])]
    changes += [ObjectChange("removed", box, None) for n, box in enumerate(old) if n not in pairs]
    changes += [ObjectChange("added", None, box) for n, box in enumerate(new) if n not in taken]
    return changes


def _without_equal(before: Sequence[Box], after: Sequence[Box]) -> tuple[list[Box], list[Box]]:
    """Return the objects of each side that are not equal to one of the other, each of which counts once."""
    places: dict[Box, list[int]] = {}
    for n in reversed(range(len(after))):
        places.setdefault(after[n]._replace(line=0), []).append(n)
    old, equal = [], set()
    for box in before:
        if left := places.get(box._replace(line=0)):
            equal.add(left.pop())
        else:
            old.append(box)
    return old, [box for n, box in enumerate(after) if n not in equal]


def _pairs(old: Sequence[Box], new: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yield places in `old` and `new` of one object each, every place at most once."""
    candidates = _equal_boxes(old, new) if len(old) * len(new) > _MOST_PAIRS else _overlapping(old, new)
    left_old, left_new = set(range(len(old))), set(range(len(new)))
    for *_, a, b in sorted(candidates):
        if a in left_old and b in left_new:
            left_old.remove(a)
            left_new.remove(b)
            yield a, b


def _overlapping(old: Sequence[Box], new: Sequence[Box]) -> Iterator[tuple[bool, float, int, int]]:
    if not old or not new:
        return
    import numpy as np

    a, b = (np.array([box[1:5] for box in boxes], np.float64).T[:, :, None] for boxes in (old, new))
    b = b.transpose(0, 2, 1)
    width = np.minimum(a[2], b[2]) - np.maximum(a[0], b[0])
    height = np.minimum(a[3], b[3]) - np.maximum(a[1], b[1])
    common = np.maximum(width, 0) * np.maximum(height, 0)
    areas = [(side[2] - side[0]) * (side[3] - side[1]) for side in (a, b)]
    shares = common / np.maximum(areas[0] + areas[1] - common, 1e-12)
    for n, m in zip(*np.nonzero(shares >= _SAME_OBJECT), strict=True):
        yield old[n].label != new[m].label, -float(shares[n, m]), int(n), int(m)


def _equal_boxes(old: Sequence[Box], new: Sequence[Box]) -> Iterator[tuple[bool, float, int, int]]:
    places: dict[tuple[float, ...], list[int]] = {}
    for m, box in enumerate(new):
        places.setdefault(box[1:5], []).append(m)
    for n, box in enumerate(old):
        for m in places.get(box[1:5], ())[:100]:
            yield box.label != new[m].label, -1.0, n, m


def _change(before: Box, after: Box) -> ObjectChange:
    if before.label != after.label:
        return ObjectChange("relabelled", before, after)
    return ObjectChange("edited" if _in_place(before, after) else "moved", before, after)
