"""The check of outlines and keypoints: an object whose outline cannot be meant stays as its box.

Used by `annotations.check` for objects that have more than a box, after their boxes were checked. Outlines that leave
here are finite, have an area, and lie in the image, as far as `annotations.check` lets edges lie outside; rotated boxes
may stick out of it. Pure, any thread; NumPy is imported for polygons, and shapely only for what must be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import isfinite, isnan
from typing import Final

from datacache.annotations.model import HALVES, Box, Problem, quote
from datacache.annotations.shapes.outline import (
    FEW_BYTES,
    NOTHING,
    POINT_BYTES,
    Edges,
    Extra,
    Mask,
    Polygon,
    Rotated,
    bounds,
    is_tangled,
)

SLACK_PX: Final = 0.01
"""How far a point may lie outside without a report; six decimals move one by less in any image that is decoded."""
_BOX_DIFFERS_PX: Final = 2.0
Report = Callable[[str, bool, str], None]
"""Takes a code, whether it was repaired (else noted), and the message."""


def checked_shapes(
    boxes: Sequence[Box], width: int, height: int, file: str, problems: list[Problem]
) -> tuple[Box, ...]:
    """Return the boxes of an image with what can be kept of their extras."""
    if any(box[10] is not None and (box[10].score is not None or box[10].author) for box in boxes):
        boxes = [_told(box, file, problems) for box in boxes]
    clean = _clean_polygons(boxes, width, height)
    return tuple(
        [
            box if box.extra is None or n in clean else checked_shape(box, width, height, file, problems)
            for n, box in enumerate(boxes)
        ]
    )


def checked_shape(box: Box, width: int, height: int, file: str, problems: list[Problem]) -> Box:
    """Return the box with what can be kept of its extra."""
    extra = box.extra
    if extra is None:
        return box
    outline = extra.outline
    shown = f"an object of {quote(box.label)}"

    def report(code: str, repaired: bool, message: str) -> None:
        problems.append(Problem(code, "repaired" if repaired else "noted", file, box.line, message))

    around = None
    if isinstance(outline, Mask):
        if (outline.width, outline.height) != (width, height):
            message = f"the mask of {shown} is {outline.width}x{outline.height}, and its image is {width}x{height}"
            report("mask-size", True, f"{message}; the object stays as its box")
            outline = None
    elif outline is not None:
        outline, around = _points_checked(outline, width, height, shown, report)
    if around is not None and _differ(around, box) > _BOX_DIFFERS_PX:
        report("box-shape-differ", False, f"the box of {shown} is not the one around its outline; both are kept")
    keypoints = extra.keypoints
    if keypoints is not None and keypoints.visible:
        x1, y1, x2, y2 = bounds(keypoints.points)
        if isnan(x1):
            report("shape-not-finite", True, f"a keypoint of {shown} is not finite; its keypoints are left out")
            keypoints = None
        elif x1 < -SLACK_PX or y1 < -SLACK_PX or x2 > width + SLACK_PX or y2 > height + SLACK_PX:
            report("keypoint-outside", False, f"a keypoint of {shown} lies outside the image; it is kept")
    if outline is extra.outline and keypoints is extra.keypoints:
        return box
    area = extra.area if outline is extra.outline else None
    changed: Extra = extra._replace(outline=outline, keypoints=keypoints, area=area)
    return box._replace(extra=None if changed == NOTHING else changed)


def _told(box: Box, file: str, problems: list[Problem]) -> Box:
    """Return the box with a score and an author that every format can write."""
    extra = box.extra
    if extra is None:
        return box
    if extra.score is not None and not isfinite(extra.score):
        message = f"the score of an object of {quote(box.label)} is not finite; it is left out"
        problems.append(Problem("score-not-finite", "repaired", file, box.line, message))
        extra = extra._replace(score=None)
    author = HALVES.sub("\ufffd", extra.author)
    changed = extra if author == extra.author else extra._replace(author=author)
    return box if changed is box.extra else box._replace(extra=None if changed == NOTHING else changed)


def _clean_polygons(boxes: Sequence[Box], width: int, height: int) -> set[int]:
    """Return the places of the objects of which nothing is to be said: nearly every polygon of nearly every data set.
    One call of NumPy for all takes a fifth of the time of one for each."""
    places, parts = list[int](), list[bytes]()
    for n, box in enumerate(boxes):
        extra = box[10]
        if extra is not None and type(extra[0]) is Polygon and extra[1] is None:
            points = extra[0][0]
            if 3 * POINT_BYTES <= len(points) <= FEW_BYTES:
                places.append(n)
                parts.append(points)
    if not parts:
        return set()
    import numpy as np

    points_of_all = np.frombuffer(b"".join(parts)).reshape(-1, 2)
    starts = [0, *accumulate([len(points) // POINT_BYTES for points in parts[:-1]])]
    low = np.minimum.reduceat(points_of_all, starts).tolist()  # `nan` where a point has it, which is in no order
    high = np.maximum.reduceat(points_of_all, starts).tolist()
    return {
        n
        for n, (x1, y1), (x2, y2) in zip(places, low, high, strict=True)
        if 0.0 <= x1 < x2 <= width
        and 0.0 <= y1 < y2 <= height
        and _differ((x1, y1, x2, y2), boxes[n]) <= _BOX_DIFFERS_PX
    }


def _differ(edges: Edges, box: Box) -> float:
    """Return how far the edges of a box are from others, at most."""
    x1, y1, x2, y2 = edges
    return max(abs(x1 - box[1]), abs(y1 - box[2]), abs(x2 - box[3]), abs(y2 - box[4]))


def _points_checked(
    outline: Polygon | Rotated, width: int, height: int, shown: str, report: Report
) -> tuple[Polygon | Rotated | None, Edges | None]:
    """Return the outline inside the image, and the box around it."""
    points = outline[0]
    x1, y1, x2, y2 = edges = bounds(points)
    stays = "the object stays as its box"
    if points and isnan(x1):
        report("shape-not-finite", True, f"the outline of {shown} has a point that is not finite; {stays}")
        return None, None
    if len(points) < 3 * POINT_BYTES or x1 >= x2 or y1 >= y2:
        report("polygon-empty", True, f"the outline of {shown} has no area; {stays}")
        return None, None
    if isinstance(outline, Polygon) and is_tangled(outline):
        report("shape-too-large", True, f"the lines of the outline of {shown} overlap too often; {stays}")
        return None, None
    if x1 >= -SLACK_PX and y1 >= -SLACK_PX and x2 <= width + SLACK_PX and y2 <= height + SLACK_PX:
        return outline, edges
    from datacache.annotations.shapes.clip import Movement, carried

    kept, _ = carried(outline, [Movement(lambda x, y: (x, y), width, height, cuts=True)])
    if kept is None or isinstance(kept, Mask):
        report("polygon-empty", True, f"the outline of {shown} lies outside the image; {stays}")
        return None, None
    if isinstance(outline, Rotated):  # tools let one stick out, and it would not be the same box any more
        return outline, (max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height)))
    report("polygon-clipped", True, f"the outline of {shown} lies partly outside the image; it is cut at its edge")
    return kept, bounds(kept[0])
