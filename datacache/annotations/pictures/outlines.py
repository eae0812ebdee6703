"""Draw outlines and keypoints: the area of an object in the colour of its class, seen through, with a line around it.

Every outline becomes a picture of its area first, of the size it has on the picture, so that polygons, masks and turned
boxes look alike, and holes stay free. Keypoints are dots, hidden ones rings, joined as their skeleton says. Used by
`draw`; one thread a picture.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from datacache.annotations.shapes.outline import (
    Edges,
    Keypoints,
    Mask,
    Outline,
    Polygon,
    Rotated,
    Skeleton,
    bounds,
    rings,
    unpack,
)

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

    from datacache.annotations.pictures.draw import RGB

_SEEN_THROUGH = 0.35
_DASH = 6
_BEYOND = 3
"""Pixels around an area, for its line."""


class Stroke(NamedTuple):
    """The line around an object: its width in pixels, and the colour that a thin line on either side has."""

    colour: RGB
    dark: RGB
    width: int
    dashed: bool = False


Scale = tuple[float, float]
"""Pixels of the picture for one of the image: across, down."""


def draw_outline(image: Image, outline: Outline, scale: Scale, line: Stroke) -> None:
    """Draw an object's area, and a line along its edge."""
    from PIL import ImageChops, ImageFilter

    across, down = scale
    around = _around(outline)
    if around is None:
        return
    left, top = (max(0, math.floor(edge) - _BEYOND) for edge in (around[0] * across, around[1] * down))
    right = min(image.width, math.ceil(around[2] * across) + _BEYOND)
    bottom = min(image.height, math.ceil(around[3] * down) + _BEYOND)
    if left >= right or top >= bottom:
        return
    area = _area(outline, (left, top, right, bottom), scale)
    inside = area.filter(ImageFilter.MinFilter(2 * line.width + 1))
    image.paste(line.colour, (left, top), inside.point(lambda value: round(value * _SEEN_THROUGH)))
    image.paste(line.dark, (left, top), ImageChops.subtract(area.filter(ImageFilter.MaxFilter(3)), area))
    edge = ImageChops.subtract(area, inside)
    if line.dashed:
        image.paste(line.dark, (left, top), edge)
        edge = ImageChops.multiply(edge, _stripes(edge.size))
    image.paste(line.colour, (left, top), edge)


def draw_keypoints(pen: ImageDraw, keypoints: Keypoints, skeleton: Skeleton | None, scale: Scale, line: Stroke) -> None:
    """Draw the points that are there, and what joins them."""
    values = unpack(keypoints.points)
    places = [(x * scale[0], y * scale[1]) for x, y in zip(values[0::2], values[1::2], strict=True)]
    there = {
        n: place
        for n, (seen, place) in enumerate(zip(keypoints.visible, places, strict=True))
        if seen and all(map(math.isfinite, place))
    }
    joined = [(there[a], there[b]) for a, b in (skeleton.edges if skeleton else ()) if a in there and b in there]
    for ink, width in ((line.dark, line.width + 1), (line.colour, line.width - 1)):
        for ends in joined:
            pen.line(ends, fill=ink, width=width)
    for n, (x, y) in there.items():
        hidden = keypoints.visible[n] == 1
        for ink, radius in ((line.dark, line.width + 2), (line.colour, line.width + 1), (line.dark, hidden and 1)):
            if radius:
                pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)


def _stripes(size: tuple[int, int]) -> Image:
    """Return slanting stripes, which leave dashes of a line."""
    from PIL import Image, ImageDraw

    stripes, (width, height) = Image.new("L", size), size
    pen = ImageDraw.Draw(stripes)
    for x in range(-height, width, 2 * _DASH):
        pen.line((x, 0, x + height // 2, height), fill=255, width=_DASH)
    return stripes


def _around(outline: Outline) -> Edges | None:
    if isinstance(outline, Mask):
        from datacache.annotations.shapes import mask

        return mask.bounds(outline)
    found = bounds(outline.points if isinstance(outline, Polygon) else outline.corners)
    return None if math.isnan(found[0]) else found


def _area(outline: Outline, window: tuple[int, int, int, int], scale: Scale) -> Image:
    """Return which pixels of a window of the picture are the object's: 255, and 0 elsewhere."""
    from PIL import Image, ImageDraw

    (left, top, right, bottom), (across, down) = window, scale
    if isinstance(outline, Mask):
        return _area_of_mask(outline, window, scale)
    area = Image.new("L", (right - left, bottom - top))
    pen = ImageDraw.Draw(area)
    parts = [(outline.corners, False)] if isinstance(outline, Rotated) else list(rings(outline))
    for points, is_hole in parts:
        values = unpack(points)
        # A corner between two pixels is drawn on the one behind it.
        placed = [
            (round(x * across - left - 0.5), round(y * down - top - 0.5))
            for x, y in zip(values[0::2], values[1::2], strict=True)
        ]
        if len(placed) > 1:
            pen.polygon(placed, fill=0 if is_hole else 255)
    return area


def _area_of_mask(outline: Mask, window: tuple[int, int, int, int], scale: Scale) -> Image:
    import numpy as np
    from PIL import Image

    from datacache.annotations.shapes import mask

    (left, top, right, bottom), (across, down) = window, scale
    source = mask.bounds(outline)
    assert source is not None
    pixels = Image.fromarray(mask.decode(outline, source).astype(np.uint8) * 255)
    # The centre of each pixel of the picture, as a place in what was decoded.
    place = (1 / across, 0, left / across - source[0], 0, 1 / down, top / down - source[1])
    size, nearest = (right - left, bottom - top), Image.Resampling.NEAREST
    return pixels.transform(size, Image.Transform.AFFINE, place, nearest)
