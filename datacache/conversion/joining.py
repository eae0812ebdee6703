"""Join what several data sets, or several results, say of one image.

Used by the pipeline. Formats round, so an object of two data sets is one where it differs by a hundredth of a pixel;
outlines and keypoints that differ by more are other objects, however equal their boxes are. Pure functions, any thread;
the time grows with the number of objects.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, product
from typing import Final

from datacache.annotations.check import same_object
from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import NOTHING, Extra, Keypoints, Mask, Outline, Polygon, Rotated, unpack

_ROUNDED: Final = 0.01
"""Pixels: formats round sides that far, and no two objects are so near to each other."""
_SHIFT: Final = 0.37
"""Of the cells of one pixel in which equal boxes are looked for. Edges of boxes are mostly whole pixels, and lie in the
middle of a cell so."""
_COMPARED: Final = 64
"""Objects of a cell, of equal boxes mostly, that an object is compared with. It is another one where there are more,
unless one is equal to the last digit."""


def joined(found: Sequence[Annotation]) -> Annotation:
    """Return all that several annotations say of one image. The same object counts once: one of the same class whose
    box, outline and keypoints are the same but for rounding. One that has only one of the latter two gets the other."""
    first, *others = found
    if not others:
        return first
    boxes = list(first.boxes)
    equal: dict[tuple[object, ...], int] = {}
    cells: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)

    def place(at: int) -> None:
        equal.setdefault(same_object(boxes[at]), at)
        beside = cells[boxes[at].label, *(math.floor(edge + _SHIFT) for edge in boxes[at][1:5])]
        if len(beside) < _COMPARED and at not in beside:
            beside.append(at)

    def find(box: Box) -> int | None:
        at = equal.get(same_object(box))
        if at is not None:
            return at
        near = ({math.floor(edge + _SHIFT - _ROUNDED), math.floor(edge + _SHIFT + _ROUNDED)} for edge in box[1:5])
        beside = (cells.get((box.label, *cell), ()) for cell in product(*near))
        return next((at for at in chain.from_iterable(beside) if _same(boxes[at], box)), None)

    for at in range(len(boxes)):
        place(at)
    for box in chain.from_iterable(other.boxes for other in others):
        known = find(box)
        if known is None:
            boxes.append(box)
            place(len(boxes) - 1)
        elif box.extra is not None and box.extra != boxes[known].extra:
            boxes[known] = boxes[known]._replace(extra=_completed(boxes[known].extra or NOTHING, box.extra))
            place(known)
    return first._replace(
        boxes=tuple(boxes),
        labels=_each_once(each.labels for each in found),
        captions=_each_once(each.captions for each in found),
        source=next((each.source for each in found if each.source), ""),
    )


def _same(one: Box, other: Box) -> bool:
    if one.label != other.label or not _near(one[1:5], other[1:5]):
        return False
    a, b = one.extra, other.extra
    if a is None or b is None:
        return True
    return _same_outline(a.outline, b.outline) and _same_keypoints(a.keypoints, b.keypoints)


def _same_outline(one: Outline | None, other: Outline | None) -> bool:
    """Tell whether two outlines can be of one object: one is missing, or they differ by rounding alone."""
    if one is None or other is None or one == other:
        return True
    if isinstance(one, Mask) or isinstance(other, Mask):
        return isinstance(one, Mask) and isinstance(other, Mask) and one.counts == other.counts
    if isinstance(one, Polygon) and isinstance(other, Polygon):
        return one[1:] == other[1:] and _near_points(one.points, other.points)
    return isinstance(one, Rotated) and isinstance(other, Rotated) and _near_points(one.corners, other.corners)


def _same_keypoints(one: Keypoints | None, other: Keypoints | None) -> bool:
    if one is None or other is None:
        return True
    return one.visible == other.visible and _near_points(one.points, other.points)


def _near_points(one: bytes, other: bytes) -> bool:
    return one == other or (len(one) == len(other) and _near(unpack(one), unpack(other)))


def _near(one: Iterable[float], other: Iterable[float]) -> bool:
    return all(abs(a - b) < _ROUNDED for a, b in zip(one, other, strict=True))


def _completed(mine: Extra, more: Extra) -> Extra:
    """Return what is known of an object with what another one knows of it besides."""
    if mine.outline is None and more.outline is not None:
        mine = mine._replace(outline=more.outline, area=more.area)
    return Extra._make(a if a != nothing else b for a, b, nothing in zip(mine, more, NOTHING, strict=True))


def _each_once(texts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(texts)))
