"""The geometry of a shape that a labelling tool has written, and what several tools' readers do alike.

Pure functions, any thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from datacache.annotations.shapes.outline import Edges, Keypoints, Outline, Polygon, bounds, pack, unpack

MAX_POINTS: Final = 100_000
"""Of one object."""
MAX_MASK_PIXELS: Final = 2**25
"""Of a mask's own rectangle."""
ROUND_POINTS: Final = 64
"""Of the polygon that a circle or an ellipse becomes."""
_MASK_PIXELS, _MASK_PIXELS_A_BYTE = 2**28, 1024
"""The pixels of all masks of a file, and those that each of its bytes adds: a row of a large mask is a few bytes."""
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
