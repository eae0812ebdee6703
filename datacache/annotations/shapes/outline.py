"""Outlines, keypoints and all else that an object may have besides its box: plain values, and the arithmetic of points.

Coordinates are those of boxes (see `model`). Points are kept as `bytes`, `x, y, x, y …` as native doubles: immutable,
quick to compare, to hash and to send to another process, and `np.frombuffer` reads them without a copy. Nothing stores
them so. Used by the readers and writers of formats and by the annotation table. Pure functions, any thread.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

Edges = tuple[float, float, float, float]
"""x1, y1, x2, y2."""
POINT_BYTES = 16
FEW_BYTES = 200 * POINT_BYTES
"""Points of a polygon that is computed with in a second, however its lines run (`is_tangled`)."""
_MOST_PAIRS = 20_000
"""Of lines whose boxes overlap, besides some neighbours of each: 200 points at random have as many. Time and memory of
all that is computed with a polygon grow with them."""
_COMPARED = 2_000
"""Lines that are compared with each other at once; of more an index is made."""


class Polygon(NamedTuple):
    """An area within rings of straight lines."""

    points: bytes
    """Of all rings, one after the other. A ring is closed, whether its last point repeats the first or not."""
    ends: tuple[int, ...] = ()
    """The number of points up to the end of each ring; () for one ring."""
    holes: int = 0
    """Bit n: ring n is a hole in the nearest ring before it that is none."""


class Mask(NamedTuple):
    """An area of whole pixels."""

    counts: bytes
    """COCO's compressed run lengths, column by column; canonical: no run but the first is empty."""
    width: int
    """Always that of the image, as is `height`. 0 while a reader knows the mask's file alone (`mask_images`)."""
    height: int
    listed: bool = False
    """The file has the run lengths as a list of numbers, and gets them so again."""


class Rotated(NamedTuple):
    """A box that is turned. After rounding it need not be a rectangle to the last bit."""

    corners: bytes
    """Four points: the corner that was the upper left one before turning, then clockwise."""


Outline = Polygon | Mask | Rotated


class Keypoints(NamedTuple):
    """Named points of an object, in the order of its class's skeleton."""

    points: bytes
    visible: bytes
    """A byte each, as COCO has it: 0 not there, 1 hidden, 2 seen."""


class Extra(NamedTuple):
    """All that an object has besides what boxes have. An object without any of it has no `Extra`."""

    outline: Outline | None = None
    keypoints: Keypoints | None = None
    track: int = -1
    """-1: none; likewise `group`."""
    group: int = -1
    score: float | None = None
    author: str = ""
    area: float | None = None
    """In square pixels as the file gives it, where that is not what the shape has."""


class Skeleton(NamedTuple):
    """The keypoints of a class."""

    names: tuple[str, ...]
    edges: tuple[tuple[int, int], ...] = ()
    """Pairs of places in `names`, from 0."""
    flip: tuple[int, ...] = ()
    """For each point the one that it becomes in a mirror; () where that is not known."""
    dims: int = 3
    """Numbers a point in YOLO: 3 with visibility, 2 without."""


NOTHING = Extra()


def skeleton_of(fields: Sequence[Any]) -> Skeleton:
    """Return a skeleton that JSON made a list of."""
    names, edges, flip, dims = fields
    return Skeleton(tuple(names), tuple((a, b) for a, b in edges), tuple(flip), dims)


def pack(values: Iterable[float]) -> bytes:
    """Pack x, y, x, y … as points."""
    return array("d", values).tobytes()


def unpack(points: bytes) -> array[float]:
    """Return the x, y, x, y … of points."""
    values = array("d")
    values.frombytes(points)
    return values


def bounds(points: bytes) -> Edges:
    """Return the box around points; all `nan` where there are none, or one is not finite."""
    values = unpack(points)
    # A sum is finite only where each value is, or overflows: then each is looked at.
    if not values or not (math.isfinite(sum(values)) or all(map(math.isfinite, values))):
        return (math.nan, math.nan, math.nan, math.nan)
    xs, ys = values[0::2], values[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def in_common(one: Edges, other: Edges) -> float:
    """Return the intersection of two boxes as a part of their union; 0 where they have no area."""
    ax1, ay1, ax2, ay2 = one
    bx1, by1, bx2, by2 = other
    width, height = min(ax2, bx2) - max(ax1, bx1), min(ay2, by2) - max(ay1, by1)
    if width <= 0 or height <= 0:
        return 0.0
    both = width * height
    return both / ((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - both)


def ring_ends(polygon: Polygon) -> tuple[int, ...]:
    """Return the number of points up to the end of each ring, also where there is one ring."""
    return polygon.ends or (len(polygon.points) // POINT_BYTES,)


def rings(polygon: Polygon) -> Iterator[tuple[bytes, bool]]:
    """Yield the points of each ring, and whether it is a hole."""
    for n, (start, end) in enumerate(pairwise((0, *ring_ends(polygon)))):
        yield polygon.points[start * POINT_BYTES : end * POINT_BYTES], bool(polygon.holes >> n & 1)


def polygon_of(parts: Sequence[bytes], holes: int = 0) -> Polygon:
    """Make a polygon of the points of its rings."""
    if len(parts) == 1:
        return Polygon(parts[0], (), holes)
    ends, count = [], 0
    for part in parts:
        count += len(part) // POINT_BYTES
        ends.append(count)
    return Polygon(b"".join(parts), tuple(ends), holes)


def ring_area(points: bytes) -> float:
    """Return the area within one ring, in square pixels, by the shoelace formula; crossing lines count as they do
    there."""
    values = unpack(points)
    xs, ys = values[0::2], values[1::2]
    if not xs:
        return 0.0
    left, top = xs[0], ys[0]  # from the first point: small numbers lose less
    total = 0.0
    for n in range(1, len(xs) - 1):
        total += (xs[n] - left) * (ys[n + 1] - top) - (xs[n + 1] - left) * (ys[n] - top)
    return abs(total) / 2


def area(polygon: Polygon) -> float:
    """Return the area of a polygon in square pixels: its rings together, without its holes."""
    return math.fsum(-ring_area(ring) if hole else ring_area(ring) for ring, hole in rings(polygon))


def is_tangled(polygon: Polygon) -> bool:
    """Tell whether lines run over one another so often that computing with the polygon takes too long."""
    if len(polygon.points) <= FEW_BYTES:
        return False
    import numpy as np

    of_rings = [np.frombuffer(points).reshape(-1, 2) for points, _ in rings(polygon)]
    ends = np.concatenate([np.stack((ring, np.roll(ring, -1, 0)), 1) for ring in of_rings])
    left = _MOST_PAIRS + 8 * len(ends)
    if len(ends) <= _COMPARED:  # in a millisecond, and the index's import takes a hundred
        (left_of, above), (right_of, below) = ends.min(1).T, ends.max(1).T
        begins = np.less_equal.outer(left_of, right_of) & np.less_equal.outer(above, below)
        return int(np.count_nonzero(begins & begins.T)) > left
    import shapely

    lines = shapely.linestrings(ends)
    tree = shapely.STRtree(lines)
    for at in range(0, len(lines), 8):
        left -= tree.query(lines[at : at + 8]).shape[1]
        if left < 0:
            return True
    return False
