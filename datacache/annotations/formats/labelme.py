"""LabelMe: a JSON file an image, beside it.

Read: rectangles, polygons, turned rectangles, masks, points, circles; `flags` of the image are its labels, `flags` of a
shape its flags and attributes. What has no area (lines) becomes the box around it. Other keys of a shape, as tools add
them, are attributes. Numbers are written with all their digits.

Used by the annotation table and by conversions. Pure, any thread. Source: labelme 6.3.1, `_label_file.py` and
`utils/shape.py`.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from datacache.annotations.formats.geometry import (
    MAX_MASK_PIXELS,
    MAX_POINTS,
    Geometry,
    ShapeError,
    around,
    ellipse,
    inside,
    masked,
    parted,
    rejoined,
)
from datacache.annotations.formats.mask_images import open_png
from datacache.annotations.formats.values import JSON, displayed, kind, load, to_number, to_text
from datacache.annotations.model import Annotation, Box, Draft, Problem, Problems, quote
from datacache.annotations.shapes.outline import (
    NOTHING,
    Edges,
    Extra,
    Keypoints,
    Mask,
    Polygon,
    Rotated,
    bounds,
    pack,
    unpack,
)
from datacache.core.errors import AnnotationError

MAX_BYTES: Final = 48 * 2**20
MAX_TEXT_BYTES: Final = 5 * 2**20
"""Without the image that a file may have in it. JSON of so many small lists is decoded in 0.6 s and 100 MiB."""
MAX_MASKS_PIXELS: Final = 2**27
"""Of all masks of an image together."""
_IMAGE_DATA: Final = re.compile(rb'"imageData"\s*:\s*"[A-Za-z0-9+/=\\]*"')
_OWN: Final = frozenset({"label", "points", "shape_type", "flags", "group_id", "description", "mask"})
_FLAGS: Final = ("difficult", "truncated", "occluded")
Attributes = dict[str, str]


def parse(data: bytes | memoryview, file: str) -> tuple[Draft, list[Problem]]:
    """Read a file. The line of an object and of its problems is its number in `shapes`, from 1. `AnnotationError` if it
    is no JSON, has no shapes, or is too large."""
    problems = Problems(file)
    text = _IMAGE_DATA.sub(b'"imageData": null', bytes(data), count=1) if len(data) <= MAX_BYTES else b""
    if len(data) > MAX_BYTES or len(text) > MAX_TEXT_BYTES:
        message = f"the file has more than {MAX_TEXT_BYTES:,} bytes, or more than {MAX_BYTES:,} with its image"
        raise AnnotationError(message, code="file-too-large", file=file)
    content = load(text, file)
    shapes = content.get("shapes") if isinstance(content, dict) else None
    if not isinstance(shapes, list):
        raise AnnotationError(f"{file} is no LabelMe file: it has no list of `shapes`", code="not-labelme", file=file)
    if sum(map(_mask_pixels, shapes)) > MAX_MASKS_PIXELS:
        message = f"the masks of the file have more than {MAX_MASKS_PIXELS:,} pixels together"
        raise AnnotationError(message, code="file-too-large", file=file)
    path = content.get("imagePath")
    name = path.replace("\\", "/").rpartition("/")[2] if isinstance(path, str) else ""
    size = _pixels(content, "imageWidth", problems), _pixels(content, "imageHeight", problems)
    flags = content.get("flags")
    labels = [label for label, there in flags.items() if there is True] if isinstance(flags, dict) else []
    boxes = []
    for number, shape in enumerate(shapes, 1):
        box = _object(shape, size, problems, number)
        if box is not None:
            boxes.append(box)
    return Draft(file, name, *size, rejoined(boxes), tuple(labels)), problems


def _pixels(content: Mapping[str, JSON], key: str, problems: Problems) -> int:
    value = content.get(key)
    number = to_number(value)
    if number is not None and number.is_integer() and 0 <= number <= 1e9:
        return int(number)
    if value is not None:
        problems.add("size-text", "noted", f"`{key}` is {displayed(value)}, which is no number of pixels")
    return 0


def _object(shape: JSON, size: tuple[int, int], problems: Problems, number: int) -> Box | None:
    if not isinstance(shape, dict):
        problems.add("entry-malformed", "skipped", f"a shape is {kind(shape)}; it is left out", number)
        return None
    label = to_text(shape["label"]) if shape.get("label") is not None else ""
    type = shape.get("shape_type") or "polygon"  # as the first versions had it
    try:
        read = _TYPES.get(type) if isinstance(type, str) else None
        if read is None:
            raise ShapeError("entry-malformed", f"is {displayed(type)}, which is no kind of shape")
        found = read(shape, size)
    except ShapeError as exc:
        problems.add(exc.code, "skipped", f"the shape {quote(label)} {exc}; the object is left out", number)
        return None
    if type in ("line", "linestrip"):
        problems.add("shape-boxed", "noted", f"the {type} {quote(label)} is taken as the box around it", number)
    elif type == "circle":
        problems.add("shape-approximated", "noted", f"the circle {quote(label)} is taken as a polygon", number)
    attributes = _attributes(shape)
    raised = {flag for flag in _FLAGS if attributes.get(flag) == "true"}
    group = shape.get("group_id")
    if group is not None and (not isinstance(group, int) or isinstance(group, bool) or not 0 <= group < 2**63):
        attributes["group_id"] = to_text(group)
        group = None
    score = shape.get("score")
    extra = Extra(
        found.outline,
        found.keypoints,
        group=-1 if group is None else group,
        score=score if _is_score(score) else None,
    )
    kept = tuple(sorted(pair for pair in attributes.items() if pair[0] not in raised))
    more = None if extra == NOTHING else extra
    difficult, truncated, occluded = (flag in raised for flag in _FLAGS)
    return Box(label, *found.edges, difficult, truncated, occluded, kept, number, more)


def _attributes(shape: dict[str, JSON]) -> Attributes:
    """Return the flags of a shape and its other keys. `attributes` has those that are no keys of LabelMe's own."""
    flags, more = shape.get("flags"), shape.get("attributes")
    found: dict[str, JSON] = {}
    for part in (flags, more):
        if isinstance(part, dict):
            found |= part
    others = {key: value for key, value in shape.items() if key not in _OWN and key not in ("attributes", "visible")}
    if _is_score(others.get("score")):
        del others["score"]
    if shape.get("description"):
        others["description"] = shape["description"]
    if more is not None and not isinstance(more, dict):
        others["attributes"] = more
    found |= {key: value for key, value in others.items() if value is not None}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}


def _is_score(value: JSON) -> bool:
    return isinstance(value, float) and math.isfinite(value)


# --- geometry --------------------------------------------------------------------------------------------------------


def _points(shape: Mapping[str, JSON], exactly: int = 0) -> bytes:
    points = shape.get("points")
    if not isinstance(points, list) or not points:
        raise ShapeError("box-missing", "has no points")
    if len(points) > MAX_POINTS:
        raise ShapeError("shape-too-large", f"has more than {MAX_POINTS:,} points")
    if exactly and len(points) != exactly:
        raise ShapeError("box-missing", f"has {len(points)} points, and should have {exactly}")
    try:
        flat = [value for x, y in points for value in (x, y)]
        return pack(flat) if {*map(type, flat)} <= {int, float} else pack(_numbers(flat))
    except (OverflowError, TypeError, ValueError):
        raise ShapeError("box-text", f"has the points {displayed(points)}, which are none") from None


def _numbers(values: list[JSON]) -> list[float]:
    numbers = [to_number(value) for value in values]
    if None in numbers:
        raise ValueError
    return [number for number in numbers if number is not None]


def _read_rectangle(shape: Mapping[str, JSON], _size: tuple[int, int]) -> Geometry:
    points = shape.get("points")
    return Geometry(bounds(_points(shape, 4 if isinstance(points, list) and len(points) == 4 else 2)))


def _read_polygon(shape: Mapping[str, JSON], _size: tuple[int, int]) -> Geometry:
    points = _points(shape)
    return Geometry(bounds(points), Polygon(points))


def _read_rotated(shape: Mapping[str, JSON], size: tuple[int, int]) -> Geometry:
    corners = _points(shape, 4)
    return Geometry(_inside(bounds(corners), size), Rotated(corners))


def _inside(edges: Edges, size: tuple[int, int]) -> Edges:
    return inside(edges, size[0] or math.inf, size[1] or math.inf)


def _read_points(shape: Mapping[str, JSON], size: tuple[int, int]) -> Geometry:
    points, visible = _points(shape), shape.get("visible")
    count = len(points) // 16
    if isinstance(visible, list) and len(visible) == count and all(seen in (0, 1, 2) for seen in visible):
        seen = bytes(int(value) for value in visible)
    else:
        seen = b"\2" * count
    values = unpack(points)
    there = pack(value for n, value in enumerate(values) if seen[n // 2])
    return Geometry(_inside(around(there or points), size), None, Keypoints(points, seen))


def _read_line(shape: Mapping[str, JSON], size: tuple[int, int]) -> Geometry:
    return Geometry(_inside(around(_points(shape)), size))


def _read_circle(shape: Mapping[str, JSON], size: tuple[int, int]) -> Geometry:
    x, y, on_x, on_y = unpack(_points(shape, 2))
    radius = math.hypot(on_x - x, on_y - y)
    outline = ellipse(x, y, radius, radius, 0.0)
    return Geometry(_inside(bounds(outline.points), size), outline)


def _mask_pixels(shape: JSON) -> float:
    """Return how many pixels of a shape are to be decoded."""
    if not isinstance(shape, dict) or shape.get("shape_type") != "mask":
        return 0.0
    try:
        left, top, last_x, last_y = unpack(_points(shape, 2))
    except ShapeError:
        return 0.0
    pixels = (last_x - left + 1) * (last_y - top + 1)
    return pixels if 0 < pixels <= MAX_MASK_PIXELS else 0.0


def _read_mask(shape: Mapping[str, JSON], size: tuple[int, int]) -> Geometry:
    import numpy as np

    corners, text = unpack(_points(shape, 2)), shape.get("mask")
    if not isinstance(text, str) or not all(value.is_integer() for value in corners):
        raise ShapeError("mask-broken", "has no mask, or one at no whole pixel")
    left, top, last_x, last_y = (int(value) for value in corners)
    width, height = last_x - left + 1, last_y - top + 1
    if not (0 <= left <= last_x < size[0] and 0 <= top <= last_y < size[1]):
        raise ShapeError("mask-size", "reaches beyond its image")
    try:
        image = open_png(base64.b64decode(text, validate=True), (width, height))
    except binascii.Error:
        raise ShapeError("mask-broken", "has a mask that is no PNG") from None
    except ShapeError as exc:
        raise ShapeError(exc.code, f"has a mask that {exc}") from None
    pixels = np.asarray(image.convert("L")).astype(np.bool_)
    return masked(pixels, left, top, *size)


_TYPES: Final[dict[str, Callable[[Mapping[str, JSON], tuple[int, int]], Geometry]]] = {
    "circle": _read_circle,
    "line": _read_line,
    "linestrip": _read_line,
    "mask": _read_mask,
    "oriented_rectangle": _read_rotated,
    "point": _read_points,
    "points": _read_points,
    "polygon": _read_polygon,
    "rectangle": _read_rectangle,
    "rotation": _read_rotated,
}


# --- writing ---------------------------------------------------------------------------------------------------------


def write(annotation: Annotation) -> bytes:
    """Write the file of an image that lies beside it. The same bytes for the same annotation."""
    head = json.dumps({"version": "6.3.1", "flags": dict.fromkeys(annotation.labels, True)})
    shapes = ",\n".join(json.dumps(_shape(box)) for box in parted(annotation))
    name = json.dumps(annotation.path.rpartition("/")[2])
    size = f'"imageHeight": {annotation.height}, "imageWidth": {annotation.width}'
    return f'{head[:-1]}, "shapes": [\n{shapes}\n],\n"imagePath": {name}, "imageData": null, {size}}}\n'.encode()


def _shape(box: Box) -> dict[str, Any]:
    extra = box.extra or NOTHING
    type, points, more = _written(box, extra)
    own = dict(box.attributes)
    description = own.pop("description", "")
    flags = {name: own.pop(name) == "true" for name in list(own) if own[name] in ("true", "false")}
    flags |= {
        flag: True for flag, there in zip(_FLAGS, (box.difficult, box.truncated, box.occluded), strict=True) if there
    }
    shape: dict[str, Any] = {
        "label": box.label,
        "points": [list(point) for point in zip(points[0::2], points[1::2], strict=True)],
        "group_id": extra.group if extra.group >= 0 else None,
        "description": description,
        "shape_type": type,
        "flags": flags,
        "mask": None,
        **more,
    }
    if own:
        shape["attributes"] = own
    if extra.score is not None:
        shape["score"] = extra.score
    return shape


def _written(box: Box, extra: Extra) -> tuple[str, list[float], dict[str, Any]]:
    """Return the type, the points and further keys of an object's shape."""
    outline, keypoints = extra.outline, extra.keypoints
    if isinstance(outline, Polygon) and outline.points and not outline.ends:
        return "polygon", unpack(outline.points).tolist(), {}
    if isinstance(outline, Rotated):
        return "oriented_rectangle", unpack(outline.corners).tolist(), {}
    if isinstance(outline, Mask):
        return _written_mask(outline)
    if keypoints is not None and keypoints.visible:
        more = {} if set(keypoints.visible) == {2} else {"visible": list(keypoints.visible)}
        return "points", unpack(keypoints.points).tolist(), more
    return "rectangle", [box.x1, box.y1, box.x2, box.y2], {}


def _written_mask(mask: Mask) -> tuple[str, list[float], dict[str, Any]]:
    import numpy as np
    import PIL.Image

    from datacache.annotations.shapes import mask as masks

    left, top, right, bottom = masks.bounds(mask) or (0, 0, 1, 1)
    file = io.BytesIO()
    PIL.Image.fromarray(np.ascontiguousarray(masks.decode(mask, (left, top, right, bottom)), np.uint8)).save(
        file, "PNG"
    )
    text = base64.b64encode(file.getvalue()).decode("ascii")
    return "mask", [float(left), float(top), float(right - 1), float(bottom - 1)], {"mask": text}
