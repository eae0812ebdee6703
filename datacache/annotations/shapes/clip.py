"""Geometry of shapes: cut them at a window, carry them through movements of their image, and bound them.

Used by checks, operations and targets. Shapely computes with polygons, so import this module where shapes are met.
Pure, any thread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import shapely
from numpy.typing import NDArray
from shapely.geometry.base import BaseGeometry

from datacache.annotations.shapes import mask as masks
from datacache.annotations.shapes.outline import (
    Edges,
    Extra,
    Keypoints,
    Mask,
    Outline,
    Polygon,
    Rotated,
    Skeleton,
    area,
    bounds,
    is_tangled,
    polygon_of,
    ring_area,
    rings,
)

Points = NDArray[np.float64]
Move = Callable[[Any, Any], tuple[Any, Any]]
"""Returns where x and y go; of numbers and of arrays of them."""

_SIDE = re.compile(r"(left|right|(?<![^\W\d_])[lr](?![^\W\d_]))", re.IGNORECASE)
_OTHER_SIDE = {
    "l": {"l": "r", "L": "R"},
    "r": {"r": "l", "R": "L"},
    "left": {"left": "right", "Left": "Right", "LEFT": "RIGHT"},
    "right": {"right": "left", "Right": "Left", "RIGHT": "LEFT"},
}
_LEAST_AREA = 1e-6
"""Of a ring in square pixels: what is below is rounding where a line was cut."""

_AT_ONCE = 2**18
"""Pairs of lines and points that are looked at together."""
_CROSSED = 1e-4
"""The part of an area by which it is another where lines cross, and not only touch or are rounded."""


class Movement(NamedTuple):
    """A movement onto an image of another size: a turn, a mirror, a change of size, and any of them together."""

    move: Move
    width: int
    height: int
    cuts: bool = False
    """Drops what comes to lie outside."""


def box_around(outline: Outline) -> Edges | None:
    """Return the box around an outline; None around a mask without pixels."""
    if isinstance(outline, Mask):
        return masks.bounds(outline)
    return bounds(outline.points if isinstance(outline, Polygon) else outline.corners)


def area_of(outline: Outline) -> float:
    """Return an outline's area in square pixels."""
    if isinstance(outline, Mask):
        return masks.area(outline)
    return area(outline) if isinstance(outline, Polygon) else ring_area(outline.corners)


def carried(outline: Outline, movements: Sequence[Movement]) -> tuple[Outline | None, float]:
    """Return the outline after the movements (None where nothing is left), and the share of its area that they left.

    A turned box that is cut becomes the smallest one with the same axes around what is left. A mask that becomes too
    small for any pixel keeps one."""
    share = 1.0
    for movement in movements:
        after, before = _moved_and_cut(outline, movement)
        if after is None:
            return None, 0.0
        if before:
            share *= area_of(after) / before
        outline = after
    return outline, min(share, 1.0)


def carried_keypoints(keypoints: Keypoints, movements: Sequence[Movement]) -> Keypoints:
    """Return keypoints after the movements. Those that are not there, or come to lie outside, are at 0, 0 and marked as
    not there."""
    points, visible = keypoints.points, np.frombuffer(keypoints.visible, np.uint8).copy()
    for movement in movements:
        points = _moved_points(points, movement.move)
        if movement.cuts:
            x, y = _array(points).T
            visible[~((x >= 0) & (y >= 0) & (x <= movement.width) & (y <= movement.height))] = 0
    kept = _array(points).copy()
    kept[visible == 0] = 0.0
    return Keypoints(kept.tobytes(), visible.tobytes())


def mirrored_order(skeleton: Skeleton) -> tuple[int, ...]:
    """Return, of each keypoint, the one that takes its place in a mirror: as the skeleton says, or by names with left
    and right, or l and r, in them; () where neither tells. A keypoint alone keeps its place."""
    if skeleton.flip or len(skeleton.names) == 1:
        return skeleton.flip or (0,)
    places = {name: n for n, name in enumerate(skeleton.names)}
    order = []
    for n, name in enumerate(skeleton.names):
        words = _SIDE.split(name)
        words[1::2] = (_OTHER_SIDE[word.lower()].get(word, "") for word in words[1::2])
        order.append(places.get("".join(words), n))
    return tuple(order) if sorted(order) == list(range(len(order))) != order else ()


def swapped(keypoints: Keypoints, order: Sequence[int]) -> Keypoints:
    """Return keypoints in another order."""
    visible = bytes(keypoints.visible[n] for n in order)
    return Keypoints(_array(keypoints.points)[list(order)].tobytes(), visible)


def clip(polygon: Polygon, window: Edges) -> Polygon | None:
    """Return what lies in the window, with holes as holes; None where that has no area. A polygon that lies in it
    wholly comes back as it is; of one that crosses itself the parts that it fills are kept, and of one that is tangled
    lines along the edge of the window join them."""
    return _clipped(polygon, window)[0]


def _clipped(polygon: Polygon, window: Edges) -> tuple[Polygon | None, float]:
    """Return what lies in the window, and the area that the whole polygon fills; 0 where all of it or nothing does."""
    x1, y1, x2, y2 = bounds(polygon.points)
    left, top, right, bottom = window
    if left <= x1 and top <= y1 and x2 <= right and y2 <= bottom:
        return polygon, 0.0
    if not (x1 < right and left < x2 and y1 < bottom and top < y2):  # also where a number is not finite
        return None, 0.0
    if is_tangled(polygon):
        return _clipped_rings(polygon, window), area(polygon)
    filled = [*map(_valid, _groups(polygon))]
    areas = filled[0] if len(filled) == 1 else shapely.union_all(filled)
    return _polygon_of([shapely.intersection(areas, shapely.box(*window))]), areas.area


def _clipped_rings(polygon: Polygon, window: Edges) -> Polygon | None:
    """Return each ring cut at one edge of the window after the other (Sutherland and Hodgman, "Reentrant polygon
    clipping", 1974): what it fills stays, and the time grows with its points, however they cross."""
    kept: list[bytes] = []
    holes = 0
    outer = False
    for points, hole in rings(polygon):
        ring = _array(points)
        for n, edge in enumerate(window):
            beyond = (ring[:, n % 2] - edge) * (-1 if n < 2 else 1)
            inside = beyond <= 0
            crosses = inside != np.roll(inside, -1)
            cuts, ends = ring.copy(), np.roll(ring, -1, 0)[crosses]
            shares = beyond[crosses] / (beyond - np.roll(beyond, -1))[crosses]
            cuts[crosses] += shares[:, np.newaxis] * (ends - ring[crosses])
            cuts[:, n % 2] = edge
            ring = np.stack((ring, cuts), 1).reshape(-1, 2)[np.stack((inside, crosses), 1).ravel()]
        within = ((ring > window[:2]) & (ring < window[2:])).all(1).any()
        outer = outer if hole else bool(within) or ring_area(ring.tobytes()) >= _LEAST_AREA
        if outer and len(ring) >= 3:
            holes |= hole << len(kept)
            kept.append(ring.tobytes())
    return polygon_of(kept, holes) if kept else None


def uncrossed(polygon: Polygon) -> Polygon | None:
    """Return the areas that a polygon fills whose lines cross each other; None of any other. Lines that touch, or go
    there and back as where rings are joined, do not cross."""
    groups = _groups(polygon)
    filled = [*map(_valid, groups)]
    return _polygon_of(filled) if any(map(_crosses, groups, filled)) else None


def _crosses(areas: shapely.Polygon, filled: BaseGeometry) -> bool:
    if filled is areas or abs(areas.area - filled.area) <= _CROSSED * filled.area:
        return False
    given = {*map(tuple, shapely.get_coordinates(areas))}
    return not given.issuperset(map(tuple, shapely.get_coordinates(shapely.node(areas.boundary))))


def smallest_rectangle(points: bytes) -> Rotated:
    """Return the rectangle of the smallest area around points, turned by 45 degrees at most."""
    found = shapely.oriented_envelope(shapely.multipoints(_array(points)))
    corners = shapely.get_coordinates(found)
    if len(corners) != 5:  # the points lie on one line: a rectangle without an area
        corners = corners[[0, -1, -1, 0]]
    corners = corners[:4]
    (ax, ay), (bx, by) = corners[1] - corners[0], corners[3] - corners[0]
    if ax * by < ay * bx:
        corners = corners[::-1]
    sides = np.roll(corners, -1, 0) - corners
    first = int(np.argmax(sides[:, 0] - np.abs(sides[:, 1])))
    return Rotated(np.roll(corners, -first, 0).tobytes())


def moved(outline: Outline, movement: Movement) -> Outline:
    """Return an outline after a movement. A pixel of a mask is of the object if the one that lies nearest to where its
    centre comes from was."""
    if isinstance(outline, Polygon):
        return outline._replace(points=_moved_points(outline.points, movement.move))
    a, b, c, d, e, f = _matrix(movement.move)
    if isinstance(outline, Rotated):
        corners = _moved_points(outline.corners, movement.move)
        if a * e < b * d:  # a mirror: the corner that was the upper right one is the upper left one now
            corners = _array(corners)[[1, 0, 3, 2]].tobytes()
        return outline._replace(corners=corners)
    width, height, found = movement.width, movement.height, masks.bounds(outline)
    window = (0, 0, 0, 0) if found is None else _around(found, movement)
    scale = 1 / (a * e - b * d)
    back = e * scale, -b * scale, (b * f - c * e) * scale, -d * scale, a * scale, (c * d - a * f) * scale
    return masks.resample(outline, back, window, width, height)._replace(listed=outline.listed)


def displayed(extra: Extra, orientation: int, width: int, height: int) -> Extra:
    """Return the shapes of an object that was drawn on an image as it is stored, `width` by `height`, in the frame of
    the image as its EXIF orientation displays it."""
    movement = displayed_movement(orientation, width, height)
    outline, keypoints = extra.outline, extra.keypoints
    return extra._replace(
        outline=None if outline is None else moved(outline, movement),
        keypoints=None if keypoints is None else carried_keypoints(keypoints, [movement]),
    )


def displayed_movement(orientation: int, width: int, height: int) -> Movement:
    """Return the movement from an image as it is stored, `width` by `height`, to how its EXIF orientation displays it
    (Exif 2.32, tag 0x0112)."""

    def move(x: Any, y: Any) -> tuple[Any, Any]:
        x = width - x if orientation in (2, 3, 7, 8) else x
        y = height - y if orientation in (3, 4, 6, 7) else y
        return (y, x) if orientation >= 5 else (x, y)

    return Movement(move, *((height, width) if orientation >= 5 else (width, height)))


def _moved_and_cut(outline: Outline, movement: Movement) -> tuple[Outline | None, float]:
    """Return the outline after a movement, and the area that it had if it was cut."""
    after = moved(outline, movement)
    if not isinstance(after, Mask):
        return _cut(after, (0.0, 0.0, float(movement.width), float(movement.height))) if movement.cuts else (after, 0.0)
    if masks.area(after):
        return after, area_of(outline) if movement.cuts else 0.0
    return None if movement.cuts else _one_pixel(outline, movement), 0.0


def _cut(outline: Polygon | Rotated, window: Edges) -> tuple[Outline | None, float]:
    if isinstance(outline, Polygon):
        return _clipped(outline, window)
    left, before = _clipped(Polygon(outline.corners), window)
    if left is None or left.points == outline.corners:
        return None if left is None else outline, 0.0
    first, right, _, down = _array(outline.corners)
    axes = np.stack((right - first, down - first))
    shares = (_array(left.points) - first) @ np.linalg.inv(axes)
    (ax, ay), (bx, by) = shares.min(0), shares.max(0)
    corners = np.array(((ax, ay), (bx, ay), (bx, by), (ax, by))) @ axes + first
    return Rotated(corners.tobytes()), before


def _one_pixel(mask: Outline, movement: Movement) -> Mask | None:
    around = box_around(mask)
    if around is None:
        return None
    width, height = movement.width, movement.height
    x, y = movement.move((around[0] + around[2]) / 2, (around[1] + around[3]) / 2)
    left, top = min(max(int(x), 0), width - 1), min(max(int(y), 0), height - 1)
    return masks.encode(np.ones((1, 1), bool), left, top, width, height)


def _around(window: masks.Window, movement: Movement) -> masks.Window:
    """Return the window of the pixels that a window's pixels can become."""
    corners = [movement.move(x, y) for x in window[::2] for y in window[1::2]]
    (left, top), (right, bottom) = np.min(corners, 0), np.max(corners, 0)
    right, bottom = min(math.ceil(right), movement.width), min(math.ceil(bottom), movement.height)
    return max(math.floor(left), 0), max(math.floor(top), 0), right, bottom


def _matrix(move: Move) -> tuple[float, float, float, float, float, float]:
    """Return the a … f of a movement that takes x, y to a x + b y + c, d x + e y + f."""
    (c, f), (a, d), (b, e) = move(0.0, 0.0), move(1.0, 0.0), move(0.0, 1.0)
    return a - c, b - c, c, d - f, e - f, f


def _moved_points(points: bytes, move: Move) -> bytes:
    x, y = _array(points).T
    return np.stack(move(x, y), 1).tobytes()


def _groups(polygon: Polygon) -> list[shapely.Polygon]:
    """Return the rings of a polygon, each with its holes. They may cross."""
    groups: list[tuple[Points, list[Points]]] = []
    for points, hole in rings(polygon):
        ring = _array(points)
        if len(ring) >= 3:
            groups[-1][1].append(ring) if hole and groups else groups.append((ring, []))
    return [shapely.Polygon(outer, holes) for outer, holes in groups]


def _polygon_of(areas: Iterable[BaseGeometry]) -> Polygon | None:
    """Return the polygon of valid areas; None where they have none."""
    kept: list[bytes] = []
    holes = 0
    for part in chain.from_iterable(map(_parts, areas)):
        for n, ring in enumerate((part.exterior, *part.interiors)):
            if shapely.Polygon(ring).area >= _LEAST_AREA:
                holes |= bool(n) << len(kept)
                kept.append(shapely.get_coordinates(ring)[:-1].tobytes())
            elif not n:
                break
    return polygon_of(kept, holes) if kept else None


def _valid(polygon: shapely.Polygon) -> BaseGeometry:
    """Return the areas that lines enclose an odd number of times, as masks are filled. `shapely.make_valid` means the
    same, and takes half a minute for 300 points at random; this takes a second."""
    if polygon.is_valid:
        return polygon
    faces = shapely.get_parts(shapely.polygonize([shapely.node(polygon.boundary)]))
    x, y = shapely.get_coordinates(shapely.point_on_surface(faces)).T
    order = np.argsort(y)
    faces, x, y = faces[order], x[order], y[order]
    ends = [shapely.get_coordinates(ring) for ring in (polygon.exterior, *polygon.interiors)]
    lines = np.concatenate([np.concatenate((ring[:-1], ring[1:]), 1) for ring in ends])
    beside = np.sort(np.searchsorted(y, lines[:, 1::2]), 1)  # a line is passed by the points between its ends
    passed = beside[:, 1] - beside[:, 0]
    crossed = np.zeros(len(faces), np.int64)
    for part in np.split(np.arange(len(lines)), np.flatnonzero(np.diff(np.cumsum(passed) // _AT_ONCE)) + 1):
        line = np.repeat(part, passed[part])
        point = np.arange(len(line)) - np.repeat(np.cumsum(passed[part]) - passed[part] - beside[part, 0], passed[part])
        ax, ay, bx, by = lines[line].T
        crossed += np.bincount(point[x[point] < ax + (y[point] - ay) * (bx - ax) / (by - ay)], minlength=len(faces))
    odd = crossed % 2 == 1
    return shapely.coverage_union_all(faces[odd])


def _parts(found: BaseGeometry) -> Iterable[shapely.Polygon]:
    """Yield the areas of a result, which may have lines and points besides."""
    for part in getattr(found, "geoms", (found,)):
        if isinstance(part, shapely.Polygon):
            if not part.is_empty:
                yield part
        elif hasattr(part, "geoms"):
            yield from _parts(part)


def _array(points: bytes) -> Points:
    return np.frombuffer(points).reshape(-1, 2)
