"""The geometry of a shape that a labelling tool has written, and what several tools' readers do alike.

Pure functions, any thread.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import (
    NOTHING,
    Edges,
    Extra,
    Keypoints,
    Outline,
    Polygon,
    bounds,
    pack,
    unpack,
)

MAX_POINTS: Final = 100_000
"""Of one object."""
MAX_MASK_PIXELS: Final = 2**25
"""Of a mask's own rectangle."""
ROUND_POINTS: Final = 64
"""Of the polygon that a circle or an ellipse becomes."""
_MASK_PIXELS, _MASK_PIXELS_A_BYTE = 2**28, 1024
"""The pixels of all masks of a file, and those that each of its bytes adds: a row of a large mask is a few bytes."""
_ROUNDED: Final = 0.01
"""Pixels."""
_GROUPS_OF_ONE: Final = 1_000_000
"""Groups above are of the shapes of one object that has no group."""
_ON_EDGE: Final = 0.5
"""Points that span no area get a box that goes so far beyond them."""


class Geometry(NamedTuple):
    """The geometry of a shape."""

    edges: Edges
    outline: Outline | None = None
    keypoints: Keypoints | None = None


class ShapeError(Exception):
    """A shape cannot be used."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class MaskBudget:
    """Counts the pixels of a file's masks before they are decoded: a few bytes can stand for millions."""

    def __init__(self, file_bytes: int) -> None:
        self._left = _MASK_PIXELS + _MASK_PIXELS_A_BYTE * file_bytes

    def spend(self, pixels: float) -> None:
        """Count a mask. `ShapeError` where it is too large, or those before it have used up what there is."""
        if pixels > MAX_MASK_PIXELS:
            raise ShapeError("shape-too-large", f"has a mask of more than {MAX_MASK_PIXELS:,} pixels")
        if pixels > self._left:
            raise ShapeError("shape-too-large", "and those before it have more pixels than masks of such a file")
        self._left -= int(pixels) if pixels > 0 else 0


def masked(pixels: Any, left: int, top: int, width: int, height: int) -> Geometry:
    """Return the mask of an image of `width` by `height` whose pixels from `left`, `top` on are these. `ShapeError` for
    one without a pixel or with too many runs."""
    import numpy as np

    from datacache.annotations.shapes import mask as masks

    if np.count_nonzero(pixels[1:] != pixels[:-1]) > masks.MAX_COUNTS:
        raise ShapeError("shape-too-large", f"has a mask with more than {masks.MAX_COUNTS:,} runs")
    try:
        mask = masks.encode(pixels, left, top, width, height)
    except ValueError as exc:
        raise ShapeError("shape-too-large", f"has a mask that cannot be used: {exc}") from None
    found = masks.bounds(mask)
    if found is None:
        raise ShapeError("mask-broken", "has a mask without a pixel")
    x1, y1, x2, y2 = found
    return Geometry((float(x1), float(y1), float(x2), float(y2)), mask)


def around(points: bytes, width: float = math.inf, height: float = math.inf) -> Edges:
    """Return the box around points; around those that span no area it is a little larger, within the image."""
    x1, y1, x2, y2 = bounds(points)
    if x1 == x2:
        x1, x2 = max(x1 - _ON_EDGE, min(0.0, x1)), min(x2 + _ON_EDGE, max(width, x2))
    if y1 == y2:
        y1, y2 = max(y1 - _ON_EDGE, min(0.0, y1)), min(y2 + _ON_EDGE, max(height, y2))
    return x1, y1, x2, y2


def around_keypoints(keypoints: Keypoints, width: float = math.inf, height: float = math.inf) -> Edges | None:
    """Return the box around the keypoints that are there; None where none is."""
    points = zip(*[iter(unpack(keypoints.points))] * 2, keypoints.visible, strict=True)
    there = pack(value for x, y, seen in points if seen for value in (x, y))
    return around(there, width, height) if there else None


def parted(annotation: Annotation) -> Iterator[Box]:
    """Yield the objects as shapes of tools that give each one geometry: keypoints beside an outline, or beside a box
    that is not the one around them, are a shape of their own, in one group with the object's."""
    taken = max((box.extra.group for box in annotation.boxes if box.extra), default=-1)
    for box in annotation.boxes:
        extra = box.extra or NOTHING
        keypoints, group = extra.keypoints, extra.group
        if keypoints is None or (extra.outline is None and boxes_keypoints(box, annotation)):
            yield box
            continue
        if group < 0:
            group = taken = max(taken, _GROUPS_OF_ONE) + 1
        edges = around_keypoints(keypoints, annotation.width, annotation.height) or box[1:5]
        yield box._replace(extra=extra._replace(keypoints=None, group=group))
        yield Box(box.label, *edges, extra=Extra(keypoints=keypoints, group=group, author=extra.author))


def rejoined(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """Return the objects of an image's shapes that `parted`, or somebody by hand, has put into groups: keypoints belong
    to the shape of their group and class that is before them, or that is alone with them."""
    groups: dict[tuple[int, str], list[int]] = {}
    sizes: Counter[int] = Counter()
    for n, box in enumerate(boxes):
        if box.extra is not None and box.extra.group >= 0:
            groups.setdefault((box.extra.group, box.label), []).append(n)
            sizes[box.extra.group] += 1
    found: list[Box | None] = list(boxes)
    for (group, _), alike in groups.items():
        pairs = [alike, alike[::-1]] if len(alike) == 2 else pairwise(alike)
        for one, other in pairs:
            whole, points = boxes[one].extra or NOTHING, boxes[other].extra or NOTHING
            if _is_of(boxes[other], boxes[one]):
                made = group > _GROUPS_OF_ONE and sizes[group] == 2
                extra = whole._replace(keypoints=points.keypoints, group=-1 if made else group)
                found[one], found[other] = boxes[one]._replace(extra=extra), None
    return tuple(box for box in found if box is not None)


def boxes_keypoints(box: Box, image: Annotation) -> bool:
    """Tell whether the box of an object is the one around its keypoints, or near enough to it."""
    keypoints = box.extra and box.extra.keypoints
    edges = keypoints and around_keypoints(keypoints, image.width, image.height)
    return not edges or max(abs(a - b) for a, b in zip(edges, box[1:5], strict=True)) <= _ROUNDED


def _is_of(points: Box, other: Box) -> bool:
    """Tell whether a shape is the keypoints of another one, and says nothing else."""
    its, whole = points.extra or NOTHING, other.extra or NOTHING
    return (
        (its.keypoints is not None and its.outline is None and whole.keypoints is None)
        and {*points.attributes} <= {*other.attributes}
        and not any(mine > its_own for mine, its_own in zip(points[5:8], other[5:8], strict=True))
        and its.score in (None, whole.score)
        and its.author == whole.author
    )


def turned(points: Iterable[tuple[float, float]], x: float, y: float, degrees: float) -> Iterator[float]:
    """Yield x, y, x, y … of points that are turned clockwise about a point."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    for px, py in points:
        yield x + (px - x) * cosine - (py - y) * sine
        yield y + (px - x) * sine + (py - y) * cosine


def ellipse(x: float, y: float, across: float, down: float, degrees: float) -> Polygon:
    """Return the polygon that stands for an ellipse, by its middle, its radii and its turn."""
    turns = (2 * math.pi * n / ROUND_POINTS for n in range(ROUND_POINTS))
    points = ((x + across * math.cos(turn), y + down * math.sin(turn)) for turn in turns)
    return Polygon(pack(turned(points, x, y, degrees if math.isfinite(degrees) else 0.0)))


def inside(edges: Edges, width: float, height: float) -> Edges:
    """Return what of the box around a turned box lies in the image, of which its corners may stick out."""
    x1, y1, x2, y2 = max(edges[0], 0.0), max(edges[1], 0.0), min(edges[2], width), min(edges[3], height)
    return (x1, y1, x2, y2) if x1 < x2 and y1 < y2 else edges


def side(low: float, high: float) -> float:
    """Return the side that a file gave: the shortest number that, added to `low`, gives `high` to the last bit."""
    exact = high - low
    for digits in range(6, 17):
        if low + (short := round(exact, digits)) == high:
            return short
    return exact
