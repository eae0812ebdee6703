"""Shapes of CVAT XML: their elements, read and written.

Coordinates have two decimals, as CVAT writes them. Used by `cvat`. Pure functions, any thread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape, unescape
from typing import Any, Final, NamedTuple

from datacache.annotations.formats.geometry import (
    MAX_POINTS,
    Geometry,
    ShapeError,
    around,
    ellipse,
    inside,
    masked,
    turned,
)
from datacache.annotations.formats.values import parse_number
from datacache.annotations.model import Box, quote
from datacache.annotations.shapes.outline import (
    NOTHING,
    Extra,
    Keypoints,
    Mask,
    Polygon,
    Rotated,
    Skeleton,
    bounds,
    pack,
    unpack,
)

_NO_RUNS: Final = re.compile(r"[^\d, ]")
_MOVING: Final = ("xtl", "ytl", "xbr", "ybr", "rotation")
UNWRITABLE: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Attributes = dict[str, str]


class CvatShape(NamedTuple):
    """A shape's element."""

    tag: str
    given: Attributes
    line: int
    attributes: tuple[tuple[str, str], ...] = ()
    nodes: tuple[Attributes, ...] = ()


def number_of(given: Mapping[str, str], name: str) -> float:
    text = given.get(name)
    if text is None:
        raise ShapeError("box-missing", f"has no {name}")
    value = parse_number(text)
    if value is None:
        raise ShapeError("box-text", f"has the {name} {quote(text)}, which is no number")
    return value


def points_of(given: Mapping[str, str]) -> bytes:
    """Return the points of an element. `ShapeError` where they are none."""
    text = given.get("points")
    if not text:
        raise ShapeError("box-missing", "has no points")
    if text.count(";") >= MAX_POINTS:
        raise ShapeError("shape-too-large", f"has more than {MAX_POINTS:,} points")
    values: list[float] = []
    try:
        for pair in text.split(";"):
            x, y = pair.split(",")
            values += float(x), float(y)
    except ValueError:
        values = []
    if not values or "_" in text:  # 1_000 is a number to Python alone
        raise ShapeError("box-text", f"has the points {quote(text)}, which are none")
    return pack(values)


def size_of(image: Mapping[str, str]) -> tuple[float, float]:
    """Return width and height of an image; infinite where it does not say them."""
    width, height = (parse_number(image.get(side, "")) or math.inf for side in ("width", "height"))
    return width, height


def _read_box(given: Mapping[str, str], image: Mapping[str, str]) -> Geometry:
    x1, y1, x2, y2 = (number_of(given, side) for side in ("xtl", "ytl", "xbr", "ybr"))
    degrees = number_of(given, "rotation") if "rotation" in given else 0.0
    if degrees % 360 == 0 or not math.isfinite(degrees):
        return Geometry((x1, y1, x2, y2))
    corners = pack(turned([(x1, y1), (x2, y1), (x2, y2), (x1, y2)], (x1 + x2) / 2, (y1 + y2) / 2, degrees))
    return Geometry(inside(bounds(corners), *size_of(image)), Rotated(corners))


def _read_polygon(given: Mapping[str, str], _image: Mapping[str, str]) -> Geometry:
    points = points_of(given)
    return Geometry(bounds(points), Polygon(points))


def _read_points(given: Mapping[str, str], image: Mapping[str, str]) -> Geometry:
    points = points_of(given)
    return Geometry(around(points, *size_of(image)), None, Keypoints(points, b"\2" * (len(points) // 16)))


def _read_polyline(given: Mapping[str, str], image: Mapping[str, str]) -> Geometry:
    return Geometry(around(points_of(given), *size_of(image)))


def _read_ellipse(given: Mapping[str, str], image: Mapping[str, str]) -> Geometry:
    x, y, across, down = (number_of(given, name) for name in ("cx", "cy", "rx", "ry"))
    outline = ellipse(x, y, across, down, number_of(given, "rotation") if "rotation" in given else 0.0)
    return Geometry(inside(bounds(outline.points), *size_of(image)), outline)


def _read_cuboid(given: Mapping[str, str], image: Mapping[str, str]) -> Geometry:
    names = [f"{down}{across}{face}" for down in "tb" for across in "lr" for face in "12"]
    points = pack(number_of(given, f"{axis}{name}") for name in names for axis in "xy")
    return Geometry(around(points, *size_of(image)))


def _read_mask(given: Mapping[str, str], image: Mapping[str, str]) -> Geometry:
    import numpy as np

    left, top, width, height = (number_of(given, name) for name in ("left", "top", "width", "height"))
    whole = tuple(number_of(image, side) for side in ("width", "height"))
    if not all(value.is_integer() for value in (left, top, width, height, *whole)):
        raise ShapeError("mask-broken", "has a place or a size that is no whole number")
    if not (0 <= left < left + width <= whole[0] and 0 <= top < top + height <= whole[1]):
        raise ShapeError("mask-size", "reaches beyond its image")
    text = given.get("rle", "")
    try:
        runs = np.fromstring(text, np.int64, sep=",")
    except ValueError:  # NumPy 1 gives the numbers up to there
        runs = np.array([], np.int64)
    if _NO_RUNS.search(text) or not len(runs) == text.count(",") + 1 or runs.max() > width * height:
        raise ShapeError("mask-broken", "has run lengths that are none")
    if runs.sum() != width * height:
        raise ShapeError(
            "mask-broken", f"has run lengths of {runs.sum():,} pixels, and its size is {width * height:,.0f}"
        )
    pixels = np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(int(height), int(width))
    return masked(pixels, int(left), int(top), int(whole[0]), int(whole[1]))


SHAPES: Final[dict[str, Callable[[Mapping[str, str], Mapping[str, str]], Geometry]]] = {
    "box": _read_box,
    "cuboid": _read_cuboid,
    "ellipse": _read_ellipse,
    "mask": _read_mask,
    "points": _read_points,
    "polygon": _read_polygon,
    "polyline": _read_polyline,
}
"""Tag → the function that reads the geometry of its element on an image. `ShapeError` where there is none."""


def shape_between(shape: CvatShape, then: CvatShape, share: float) -> CvatShape:
    """Return a shape on its way to another one; one that cannot move evenly stays as it is."""
    given = {**shape.given, "keyframe": "0"}
    try:
        for name in _MOVING:
            if name in shape.given and name in then.given:
                one, other = number_of(shape.given, name), number_of(then.given, name)
                given[name] = repr(one + (other - one) * share)
        if "points" in shape.given:
            here, there = unpack(points_of(shape.given)), unpack(points_of(then.given))
            if len(here) == len(there):
                moved = [a + (b - a) * share for a, b in zip(here, there, strict=True)]
                pairs = zip(moved[0::2], moved[1::2], strict=True)
                given["points"] = ";".join(f"{x!r},{y!r}" for x, y in pairs)
    except ShapeError:
        pass
    return shape._replace(given=given)


def box_of(shape: CvatShape, label: str, found: Geometry, track: str) -> Box:
    """Return the object that a shape with this geometry is."""
    given = shape.given
    attributes = [(name, value) for name, value in shape.attributes if (name, value) not in _FLAGS]
    attributes += [(name, given[name]) for name, usual in _USUAL if given.get(name, usual) != usual]
    author = given.get("source", "manual")
    extra = Extra(
        found.outline,
        found.keypoints,
        _whole(track),
        _whole(given.get("group_id", "")),
        author="" if author == "manual" else author,
    )
    return Box(
        label,
        *found.edges,
        difficult=_FLAGS[0] in shape.attributes,
        truncated=_FLAGS[1] in shape.attributes,
        occluded=given.get("occluded") == "1",
        attributes=tuple(sorted(attributes)),
        line=shape.line,
        extra=None if extra == NOTHING else extra,
    )


_FLAGS: Final = (("difficult", "true"), ("truncated", "true"))
_USUAL: Final = (("keyframe", "1"), ("z_order", "0"))
"""Parts of every shape of CVAT; attributes where they are something else."""


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else -1


def unescaped(text: str) -> str:
    """Return the text of an attribute within an SVG."""
    return unescape(text)


def shape_text(box: Box, skeletons: Mapping[str, Skeleton], named: str, more: str) -> str:
    """Return the element of an object. `named` says its label, or nothing in a track; `more` are a frame's."""
    extra = box.extra or NOTHING
    own = dict(box.attributes)
    attributes = list(box.attributes)
    z_order = own.get("z_order", "0")
    if re.fullmatch(r"-?\d+", z_order):
        attributes = [pair for pair in attributes if pair[0] != "z_order"]
    else:
        z_order = "0"
    if not named:
        attributes = [pair for pair in attributes if pair[0] != "keyframe"]
    attributes += [pair for pair, flag in zip(_FLAGS, (box.difficult, box.truncated), strict=True) if flag]
    head = named
    if named:
        head += f" source={quoted(extra.author or 'manual')}"
        head += f' group_id="{extra.group}"' if extra.group >= 0 else ""
    head += f'{more} occluded="{box.occluded:d}"'
    tag, given, inner = _geometry(box, extra, skeletons)
    pairs = "".join(
        f"      <attribute name={quoted(name)}>{text_of(value)}</attribute>\n" for name, value in sorted(attributes)
    )
    return f'    <{tag} {head.strip()}{given} z_order="{z_order}">\n{inner}{pairs}    </{tag}>\n'


def _geometry(box: Box, extra: Extra, skeletons: Mapping[str, Skeleton]) -> tuple[str, str, str]:
    """Return the tag, the attributes and the elements of an object's geometry."""
    outline, keypoints = extra.outline, extra.keypoints
    if isinstance(outline, Polygon) and outline.points and not outline.ends:
        return "polygon", f' points="{_points_text(unpack(outline.points))}"', ""
    if isinstance(outline, Mask):
        return "mask", _mask_text(outline), ""
    if isinstance(outline, Rotated):
        return "box", _rotated_text(unpack(outline.corners)), ""
    if keypoints is not None and keypoints.visible:
        values, skeleton = unpack(keypoints.points), skeletons.get(box.label)
        if skeleton is None or len(skeleton.names) != len(keypoints.visible):
            return "points", f' points="{_points_text(values)}"', ""
        nodes = "".join(
            f'      <points label={quoted(name)} outside="{seen == 0:d}" occluded="{seen == 1:d}" '
            f'points="{_points_text(values[2 * n : 2 * n + 2])}">\n      </points>\n'
            for n, (name, seen) in enumerate(zip(skeleton.names, keypoints.visible, strict=True))
        )
        return "skeleton", "", nodes
    return "box", _sides_text(box.x1, box.y1, box.x2, box.y2), ""


def _sides_text(*sides: float) -> str:
    return "".join(f' {name}="{side:.2f}"' for name, side in zip(_MOVING, sides, strict=False))


def _points_text(values: Sequence[float]) -> str:
    return ";".join(f"{x:.2f},{y:.2f}" for x, y in zip(values[0::2], values[1::2], strict=True))


def _rotated_text(corners: Sequence[float]) -> str:
    ax, ay, bx, by, _, _, dx, dy = corners
    x, y = sum(corners[0::2]) / 4, sum(corners[1::2]) / 4
    across, down = math.hypot(bx - ax, by - ay) / 2, math.hypot(dx - ax, dy - ay) / 2
    degrees = f"{math.degrees(math.atan2(by - ay, bx - ax)) % 360:.2f}"
    turn = f' rotation="{degrees}"' if degrees not in ("0.00", "360.00") else ""
    return _sides_text(x - across, y - down, x + across, y + down) + turn


def _mask_text(mask: Mask) -> str:
    import numpy as np

    from datacache.annotations.shapes import mask as masks

    left, top, right, bottom = masks.bounds(mask) or (0, 0, 1, 1)
    rows: Any = masks.decode(mask, (left, top, right, bottom)).ravel()
    edges = np.flatnonzero(rows[1:] != rows[:-1]) + 1
    runs = np.diff(edges, prepend=0, append=rows.size).tolist()
    text = ", ".join(map(str, [0, *runs] if rows[0] else runs))
    return f' rle="{text}" left="{left}" top="{top}" width="{right - left}" height="{bottom - top}"'


_SPACES: Final = str.maketrans({"\n": "&#10;", "\r": "&#13;", "\t": "&#9;", '"': "&quot;"})


def quoted(text: str) -> str:
    """Return a text as an attribute of XML."""
    return f'"{escape(_written(text), quote=False).translate(_SPACES)}"'


def text_of(text: str) -> str:
    """Return a text as the content of an element."""
    return escape(_written(text), quote=False).replace("\r", "&#13;")


def _written(text: str) -> str:
    return UNWRITABLE.sub("\ufffd", text)
