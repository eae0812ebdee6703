"""Compare the annotations of two versions of a data set: which images differ, and which of their objects.

Ranges that both tables have are passed over unread, so the cost follows the change; of the others, images whose columns
are the same are not decoded. Used by `dsctl snapshot diff --objects`, the web page, previews and pictures of versions.
Pure functions over open tables; one thread an iterator.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np

from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import NOTHING, Mask, Polygon, Rotated, unpack
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.table import Table
from datacache.annotations.table.together import RangePair, UnpackedRange, together

if TYPE_CHECKING:
    from numpy.typing import NDArray

_T = TypeVar("_T")
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
    objects: list[ObjectChange]
    """Those that differ; all of an image that is in one version alone."""
    numbers: tuple[int, int]
    """Of the rows in their tables; -1 where there is none."""


def compare(
    before: Table, after: Table, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> Iterator[Changed]:
    """Yield what is different in `after`, in the byte order of paths. Where in its file a box stands, and which file
    that is, makes no difference, nor does the order of boxes. `progress(done, total)` counts rows of both tables."""
    old, new = before.numbers_without(after), after.numbers_without(before)
    counts = (table.row_counts() for table in (before, after))
    total = sum(sum(map(next(counts).__getitem__, numbers)) for numbers in (old, new))
    done = 0
    for stretch in together(before, after, old, new):
        yield from _changed(stretch)
        done += stretch.rows
        progress(done, total)


class _Numbers(dict[_T, int]):
    """Numbers values as they come."""

    def __missing__(self, value: _T) -> int:
        self[value] = len(self)
        return self[value]

    def of(self, values: Iterable[_T]) -> NDArray[np.int64]:
        return np.fromiter(map(self.__getitem__, values), np.int64)


def _changed(stretch: RangePair) -> Iterator[Changed]:
    old, new, both, gone, added = stretch
    pairs = [(n, -1) for n in gone] + [(-1, n) for n in added]
    if len(both[0]):
        assert old
        assert new
        may = _may_differ(old, new, both)
        pairs += zip(both[0][may].tolist(), both[1][may].tolist(), strict=True)
    if not pairs:
        return
    paths = [old.paths[n] if n >= 0 and old else new.paths[m] if new else b"" for n, m in pairs]
    sides = [
        held.rows(sorted(pair[side] for pair in pairs if pair[side] >= 0)) if held else {}
        for side, held in enumerate((old, new))
    ]
    for path, (n, m) in sorted(zip(paths, pairs, strict=True)):
        a, b = sides[0].get(n), sides[1].get(m)
        changes = compare_objects(*(row.annotation.boxes if row and row.annotation else () for row in (a, b)))
        if changes or a is None or b is None or not _same_but_objects(a.annotation, b.annotation):
            numbers = -1 if a is None or not old else old.first + n, -1 if b is None or not new else new.first + m
            yield Changed(path.decode("utf-8", "surrogateescape"), a, b, changes, numbers)


def _may_differ(
    old: UnpackedRange, new: UnpackedRange, both: tuple[NDArray[np.int64], NDArray[np.int64]]
) -> NDArray[np.bool_]:
    """Tell of pairs of images which may differ: for the others, objects have the same columns in the same order."""
    a, b = both
    labels, attributes = _Numbers[str](), _Numbers[tuple[tuple[str, str], ...]]()
    differ: NDArray[np.bool_] = (old.images[:, a] != new.images[:, b]).any(axis=0)
    differ |= old.objects.counts[a] != new.objects.counts[b]
    alike = np.flatnonzero(~differ)
    counts = old.objects.counts[a[alike]]
    n, m = (held.objects_of(rows[alike]) for held, rows in ((old, a), (new, b)))
    one, two = old.objects, new.objects
    other = labels.of(old.labels)[one.labels[n]] != labels.of(new.labels)[two.labels[m]]
    other |= attributes.of(one.attributes)[one.kinds[n]] != attributes.of(two.attributes)[two.kinds[m]]
    other |= one.flags[n] != two.flags[m]
    other |= (np.abs(one.edges[:, n] - two.edges[:, m]) > _SLACK_PX).any(axis=0)
    differ[np.repeat(alike, counts)[other]] = True
    if old.has_more or new.has_more:
        for place in np.flatnonzero(~differ).tolist():
            differ[place] = old.more[a[place]] != new.more[b[place]]
    return differ


def _same_but_objects(a: Annotation | None, b: Annotation | None) -> bool:
    if a is None or b is None:
        return a is b
    facts = ((each.width, each.height, sorted(each.labels), sorted(each.captions)) for each in (a, b))
    return next(facts) == next(facts)


def _in_place(a: Box, b: Box) -> bool:
    """Tell whether box, outline and keypoints are the same but for rounding."""
    if any(abs(p - q) > _SLACK_PX for p, q in zip(a[1:5], b[1:5], strict=True)):
        return False
    if a.extra is None and b.extra is None:
        return True
    return _but_points(a) == _but_points(b) and all(
        abs(p - q) <= _SLACK_PX for p, q in zip(_points(a), _points(b), strict=True)
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


def compare_objects(before: Sequence[Box], after: Sequence[Box]) -> list[ObjectChange]:
    """Return the objects of one image that differ: first pairs in the order of `before`, then what was removed, then
    what was added.

    Of objects that are not equal, two are one if their boxes overlap by at least half, those of one label first, and
    of these the pair that overlaps most.
    """
    old, new = _without_equal(before, after)
    pairs = dict(_pairs(old, new))
    taken = set(pairs.values())
    changes = [change for a in sorted(pairs) if (change := _change(old[a], new[pairs[a]]))]
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
    a, b = (np.array([box[1:5] for box in boxes], np.float64).T[:, :, None] for boxes in (old, new))
    b = b.transpose(0, 2, 1)
    width = np.minimum(a[2], b[2]) - np.maximum(a[0], b[0])
    height = np.minimum(a[3], b[3]) - np.maximum(a[1], b[1])
    common = np.maximum(width, 0) * np.maximum(height, 0)
    areas = [(side[2] - side[0]) * (side[3] - side[1]) for side in (a, b)]
    shares = common / np.maximum(areas[0] + areas[1] - common, 1e-12)
    places = np.nonzero(shares >= _SAME_OBJECT)
    for n, m, share in zip(*map(np.ndarray.tolist, places), shares[places].tolist(), strict=True):
        yield old[n].label != new[m].label, -share, n, m


def _equal_boxes(old: Sequence[Box], new: Sequence[Box]) -> Iterator[tuple[bool, float, int, int]]:
    places: dict[tuple[float, ...], list[int]] = {}
    for m, box in enumerate(new):
        places.setdefault(box[1:5], []).append(m)
    for n, box in enumerate(old):
        for m in places.get(box[1:5], ())[:100]:
            yield box.label != new[m].label, -1.0, n, m


def _change(before: Box, after: Box) -> ObjectChange | None:
    """Return the change of one object, if it is one."""
    if before.label != after.label:
        return ObjectChange("relabelled", before, after)
    if not _in_place(before, after):
        return ObjectChange("moved", before, after)
    facts = ((*box[5:9], *(box.extra or NOTHING)[2:]) for box in (before, after))
    return None if next(facts) == next(facts) else ObjectChange("edited", before, after)
