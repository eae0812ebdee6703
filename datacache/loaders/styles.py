"""Targets under the names and in the units of torchvision and of Ultralytics.

Part of `selection`, for `SnapshotDataset(style=…)`. Any thread once all is added; forked and pickled.
"""

from __future__ import annotations

import marshal
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from datacache.annotations.model import Annotation
from datacache.annotations.shapes.outline import NOTHING, Polygon, pack
from datacache.conversion.fitting import fit

if TYPE_CHECKING:
    from datacache.loaders.selection import BoxColumns

STYLES = ("torchvision", "ultralytics")
_CROWD = ("iscrowd", "1")


class StyledColumns:
    """The targets of `columns`, in a style."""

    def __init__(self, columns: BoxColumns, style: str, kind: str) -> None:
        self.classes = columns.classes
        self.style = style
        self._columns, self._kind = columns, kind
        self._sides: Any = array("i")
        self._kept: Any = bytearray()
        self._ends: Any = array("q", [0])

    def add(self, path: str, annotation: Annotation | None) -> None:
        """Take the next sample's objects."""
        self._columns.add(path, annotation)
        self._sides.extend((annotation.width, annotation.height) if annotation is not None else (1, 1))
        if annotation is not None and annotation.boxes:
            if self.style == "torchvision":
                self._kept += marshal.dumps(
                    (_areas(annotation), [_CROWD in box.attributes for box in annotation.boxes])
                )
            elif self._kind == "segmentation":
                self._kept += marshal.dumps(_segments(annotation))
        self._ends.append(len(self._kept))

    def finish(self) -> None:
        """Make arrays of what was added."""
        self._columns.finish()
        self._sides, self._ends = np.asarray(self._sides).reshape(-1, 2), np.asarray(self._ends)

    def get(self, sample: int) -> dict[str, Any]:
        """Return a sample's own copy: arrays, and a list of them for `segments`."""
        found = self._columns.get(sample)
        first, last = self._ends[sample : sample + 2].tolist()
        kept = marshal.loads(self._kept[first:last]) if last > first else None  # noqa: S302 - ours
        if self.style == "torchvision":
            areas, crowds = kept or ([], [])
            return found | {
                "image_id": np.array([sample], np.int64),
                "area": np.array(areas, np.float32),
                "iscrowd": np.array(crowds, np.int64),
            }
        size = self._sides[sample].astype(np.float32)
        boxes, labels = found.pop("boxes"), found.pop("labels")
        sides = boxes[:, 2:] - boxes[:, :2]
        styled: dict[str, Any] = {"cls": labels.astype(np.float32)[:, None]}
        styled["bboxes"] = np.concatenate((boxes[:, :2] + sides / 2, sides), 1) / np.tile(size, 2)
        if self._kind == "obb":
            styled["bboxes"] = _turned(found.pop("corners"), size)
        if self._kind == "pose":
            found["keypoints"][..., :2] /= size
        if self._kind == "segmentation":
            styled["segments"] = [
                np.frombuffer(points).reshape(-1, 2).astype(np.float32) / size for points in kept or ()
            ]
        return styled | found


def _areas(annotation: Annotation) -> list[float]:
    from datacache.annotations.shapes.clip import area_of  # with shapely

    areas = []
    for box in annotation.boxes:
        extra = box.extra or NOTHING
        own = (box.x2 - box.x1) * (box.y2 - box.y1) if extra.outline is None else area_of(extra.outline)
        areas.append(own if extra.area is None else extra.area)
    return areas


def _segments(annotation: Annotation) -> list[bytes]:
    """Return the points of one ring of each object, as labels of `yolo-segment` have them."""
    found = []
    for box in fit(annotation, frozenset({"polygon"}), []).boxes:
        outline = (box.extra or NOTHING).outline
        corners = (box.x1, box.y1, box.x2, box.y1, box.x2, box.y2, box.x1, box.y2)
        found.append(outline.points if isinstance(outline, Polygon) else pack(corners))
    return found


def _turned(corners: Any, size: Any) -> Any:
    """Return x, y, width and height as parts of the image's sides, and the angle from -45 to 135 degrees in radians."""
    along, down = corners[:, 1] - corners[:, 0], corners[:, 3] - corners[:, 0]
    sides = np.stack((np.hypot(*along.T), np.hypot(*down.T)), 1)
    angle = (np.arctan2(along[:, 1], along[:, 0]) + np.pi / 4) % np.pi - np.pi / 4
    found = np.concatenate((corners.mean(1) / size, sides / size, angle[:, None]), 1)
    return found.astype(np.float32).reshape(-1, 5)
