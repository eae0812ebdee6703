"""Targets of objects with more than a box: masks, keypoints, corners.

Part of `selection`, for `SnapshotDataset`. What is kept of an object are the bytes of its outline or keypoints, all of
a data set's one after another; masks are made when a sample is asked for, in the process that asks. Any thread once all
is added; forked and pickled.
"""

from __future__ import annotations

import marshal
import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import NOTHING, Mask, Outline, Polygon, Rotated, Skeleton, pack

SHAPE_KINDS = ("segmentation", "pose", "obb")
_BY_NAME = {kind.__name__: kind for kind in (Polygon, Mask, Rotated)}


class ShapeColumn:
    """The shapes of each sample's objects."""

    def __init__(self, kind: str, skeletons: Mapping[str, Skeleton]) -> None:
        self._kind = kind
        self._points = max((len(skeleton.names) for skeleton in skeletons.values()), default=0)
        self._kept: Any = bytearray()
        self._ends: Any = array("q", [0])

    def add(self, annotation: Annotation | None) -> None:
        """Take the next sample's objects."""
        boxes = annotation.boxes if annotation is not None else ()
        if annotation is not None and boxes:
            shapes = [self._pose(box) if self._kind == "pose" else self._outline(box) for box in boxes]
            self._kept += marshal.dumps((annotation.width, annotation.height, shapes))
        self._ends.append(len(self._kept))

    def finish(self) -> None:
        """Make arrays of what was added."""
        self._ends = np.asarray(self._ends)

    def get(self, sample: int) -> dict[str, NDArray[Any]]:
        """Return what a sample's objects have, in the order of its boxes: `masks` (n, height, width) of 0 and 1,
        `keypoints` (n, points, 3) or `corners` (n, 4, 2)."""
        first, last = int(self._ends[sample]), int(self._ends[sample + 1])
        width, height, shapes = marshal.loads(self._kept[first:last]) if last > first else (0, 0, [])  # noqa: S302 - ours
        if self._kind == "pose":
            keypoints = np.zeros((len(shapes), self._points, 3), np.float32)
            for n, (points, visible) in enumerate(shapes):
                count = min(len(visible), self._points)
                keypoints[n, :count, :2] = np.frombuffer(points).reshape(-1, 2)[:count]
                keypoints[n, :count, 2] = np.frombuffer(visible, np.uint8)[:count]
            return {"keypoints": keypoints}
        outlines = [_BY_NAME[name](*fields) for name, fields in shapes]
        if self._kind == "obb":
            corners = [np.frombuffer(_corners(outline)).reshape(4, 2) for outline in outlines]
            return {"corners": np.array(corners, np.float32).reshape(-1, 4, 2)}
        masks = np.zeros((len(outlines), height, width), np.uint8)
        for n, outline in enumerate(outlines):
            _fill(masks[n], outline)
        return {"masks": masks}

    @staticmethod
    def _pose(box: Box) -> tuple[bytes, bytes]:
        keypoints = (box.extra or NOTHING).keypoints
        return (b"", b"") if keypoints is None else (keypoints.points, keypoints.visible)

    @staticmethod
    def _outline(box: Box) -> tuple[str, tuple[Any, ...]]:
        outline = (box.extra or NOTHING).outline
        if outline is None:
            outline = Rotated(pack((box.x1, box.y1, box.x2, box.y1, box.x2, box.y2, box.x1, box.y2)))
        return type(outline).__name__, tuple(outline)


def _corners(outline: Outline) -> bytes:
    if isinstance(outline, Rotated):
        return outline.corners
    from datacache.annotations.shapes import clip, mask  # with shapely, where it is needed

    points = outline.points if isinstance(outline, Polygon) else mask.trace(outline, most=math.inf).points
    return clip.smallest_rectangle(points).corners if points else bytes(64)


def _fill(pixels: NDArray[np.uint8], outline: Outline) -> None:
    """Set the pixels of an image that are an object's."""
    from datacache.annotations.shapes import clip, mask  # with shapely, where it is needed

    height, width = pixels.shape
    if isinstance(outline, Rotated):
        outline = clip.clip(Polygon(outline.corners), (0.0, 0.0, width, height)) or Polygon(b"")
    try:
        found = outline if isinstance(outline, Mask) else mask.fill(outline, width, height)
    except ValueError:  # its edges are too long to be filled: its box, as conversions have it
        left, top, right, bottom = clip.box_around(outline) or (0, 0, 0, 0)
        found = mask.fill(Polygon(pack((left, top, right, top, right, bottom, left, bottom))), width, height)
    window = mask.bounds(found)
    if window is not None:
        left, top, right, bottom = window
        pixels[top:bottom, left:right] = mask.decode(found, window)
