"""Draw objects as SVG over a picture, which a browser scales: outlines, boxes and keypoints in the colours of classes.

The result has numbers and colours alone, no text of a data set, so it is safe wherever it is put. All boxes of a class
are one path: a page of fifty pictures stays small. Used by the web page; pure functions, any thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from datacache.annotations.model import Annotation, Box
from datacache.annotations.pictures.draw import RGB
from datacache.annotations.shapes.outline import NOTHING, Keypoints, Mask, Outline, Rotated, Skeleton, rings, unpack

Scale = tuple[float, float, int]
"""Units of the SVG a pixel, across and down, and digits behind the point."""


def hex_colour(colour: RGB) -> str:
    """Write a colour as `#e69f00`."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def svg_objects(
    annotation: Annotation,
    colours: Mapping[str, RGB],
    width: int,
    height: int,
    *,
    skeletons: Mapping[str, Skeleton] | None = None,
    digits: int = 0,
) -> str:
    """Return the elements of an SVG whose view box is `0 0 width height`.

    Lines have the class `o`, those of difficult objects `o d`, areas `a` and keypoints `k`: a style sheet says how wide
    and how transparent they are. An object with an outline is drawn by that, as `draw_boxes` does."""
    scale = width / (annotation.width or 1), height / (annotation.height or 1), digits
    drawn: dict[tuple[str, str], list[str]] = {}
    for box in sorted(annotation.boxes, key=lambda each: (each.x1 - each.x2) * (each.y2 - each.y1)):
        extra, kind = box.extra or NOTHING, "o d" if box.difficult else "o"
        colour = hex_colour(colours[box.label])
        if extra.outline is not None:
            outline = _outline(extra.outline, scale)
            drawn.setdefault(("a", colour), []).append(outline)
            drawn.setdefault((kind, colour), []).append(outline)
        else:
            drawn.setdefault((kind, colour), []).append(_box(box, scale))
        if extra.keypoints is not None:
            lines, dots, rings_ = _keypoints(extra.keypoints, (skeletons or {}).get(box.label), scale)
            drawn.setdefault(("o", colour), []).append(lines)
            drawn.setdefault(("k", colour), []).append(dots)
            drawn.setdefault(("k d", colour), []).append(rings_)
    return "".join(_path(kind, colour, "".join(data)) for (kind, colour), data in drawn.items() if any(data))


def _path(kind: str, colour: str, data: str) -> str:
    return f'<path class="{kind}" {"fill" if kind == "a" else "stroke"}="{colour}" d="{data}"/>'


def _box(box: Box, scale: Scale) -> str:
    left, right = (_number(x * scale[0], scale) for x in (box.x1, box.x2))
    top, bottom = (_number(y * scale[1], scale) for y in (box.y1, box.y2))
    return f"M{left} {top}H{right}V{bottom}H{left}z"


def _outline(outline: Outline, scale: Scale) -> str:
    if isinstance(outline, Mask):
        from datacache.annotations.shapes.mask import trace

        outline = trace(outline)
    parts = [outline.corners] if isinstance(outline, Rotated) else [points for points, _ in rings(outline)]
    return "".join(f"M{'L'.join(places)}z" for part in parts if (places := list(_places(part, scale))))


def _keypoints(keypoints: Keypoints, skeleton: Skeleton | None, scale: Scale) -> tuple[str, str, str]:
    """Return the lines between points, the points that are seen, and those that are hidden."""
    values = unpack(keypoints.points)
    there = {
        n: f"{_number(x * scale[0], scale)} {_number(y * scale[1], scale)}"
        for n, (x, y, seen) in enumerate(zip(values[0::2], values[1::2], keypoints.visible, strict=True))
        if seen and math.isfinite(x) and math.isfinite(y)
    }
    edges = skeleton.edges if skeleton else ()
    lines = "".join(f"M{there[a]}L{there[b]}" for a, b in edges if a in there and b in there)
    dots = [
        "".join(f"M{place}h0" for n, place in there.items() if (keypoints.visible[n] == 1) is h) for h in (False, True)
    ]
    return lines, dots[0], dots[1]


def _places(points: bytes, scale: Scale) -> Iterator[str]:
    """Yield the points that differ from the one before, at this scale."""
    values, last = unpack(points), ""
    for x, y in zip(values[0::2], values[1::2], strict=True):
        place = f"{_number(x * scale[0], scale)} {_number(y * scale[1], scale)}"
        if place != last:
            yield place
        last = place


def _number(value: float, scale: Scale) -> str:
    text = f"{value:.{scale[2]}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
