"""What a sample's target is: boxes, a class, a path. Kept as columns, so that a million of them are a few arrays.

Used by the sources of samples; knows neither PyTorch nor TensorFlow. Read-only after they are made: any thread, forked
and pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datacache.annotations.model import Annotation
from datacache.core.errors import UsageError

KINDS = ("auto", "detection", "classification", "folder", "path")
NO_CLASS = -1
Boxes = dict[str, NDArray[Any]]
"""`{"boxes": float32 (n, 4) as x1, y1, x2, y2 in pixels, "labels": int64 (n,)}`."""


class BoxColumns:
    """The boxes of each sample."""

    kind = "detection"

    def __init__(self, annotations: Iterable[Annotation], class_ids: Mapping[str, int]) -> None:
        counts, boxes, labels = [0], [], []
        for annotation in annotations:
            counts.append(len(annotation.boxes))
            boxes += [(box.x1, box.y1, box.x2, box.y2) for box in annotation.boxes]
            labels += [class_ids[box.label] for box in annotation.boxes]
        self._ends: NDArray[np.int64] = np.cumsum(counts, dtype=np.int64)
        self._boxes = np.array(boxes, np.float32).reshape(-1, 4)
        self._labels = np.array(labels, np.int64)

    def get(self, sample: int) -> Boxes:
        """A sample's own copy."""
        first, last = int(self._ends[sample]), int(self._ends[sample + 1])
        return {"boxes": self._boxes[first:last].copy(), "labels": self._labels[first:last].copy()}


class ClassColumn:
    """The class id of each sample, an int; `NO_CLASS` where it has none."""

    kind = "classification"

    def __init__(self, values: Sequence[int] | NDArray[np.int32]) -> None:
        self._values = np.asarray(values, np.int32)

    def get(self, sample: int) -> int:
        """A sample's."""
        return int(self._values[sample])


def boxes_of_json(raw: bytes | memoryview, class_ids: Mapping[str, int], sample: str) -> Boxes:
    """The boxes in a shard's `.json` member. `UsageError` if it has none."""
    try:
        value = json.loads(bytes(raw))
        found = value["boxes"]
        boxes = [(box["x1"], box["y1"], box["x2"], box["y2"]) for box in found]
        labels = [box["class"] if "class" in box else class_ids[box["label"]] for box in found]
    except (KeyError, TypeError, ValueError) as exc:
        raise UsageError(
            f"{sample}: its .json says nothing of boxes ({type(exc).__name__}: {exc})",
            hint="Shards with boxes are made of a snapshot with annotations. For none: target=None.",
        ) from exc
    return {"boxes": np.array(boxes, np.float32).reshape(-1, 4), "labels": np.array(labels, np.int64)}


def class_of_json(raw: bytes | memoryview, class_ids: Mapping[str, int], sample: str) -> int:
    """The class in a shard's `.json` member, as `class_of` has it. `UsageError` if it says nothing of classes."""
    try:
        value = json.loads(bytes(raw))
        labels = value.get("labels") or [box["label"] for box in value["boxes"]]
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise UsageError(
            f"{sample}: its .json says nothing of classes ({type(exc).__name__}: {exc})",
            hint="Shards with classes are made of a snapshot with annotations. For none: target=None.",
        ) from exc
    return class_of(labels, (), class_ids)


def path_of_json(raw: bytes | memoryview) -> str | None:
    """The image's path in its snapshot, out of a shard's `.json` member; None if it does not say."""
    try:
        path = json.loads(bytes(raw))["path"]
    except (KeyError, TypeError, ValueError):
        return None
    return path if isinstance(path, str) else None


def class_of(labels: Iterable[str], boxed: Iterable[str], class_ids: Mapping[str, int]) -> int:
    """The class of an image with these labels of the whole image, or else with boxes of these: where it is one."""
    found = set(labels) or set(boxed)
    return class_ids.get(found.pop(), NO_CLASS) if len(found) == 1 else NO_CLASS


def check_kind(target: str | None) -> None:
    """`UsageError` for a target that there is not."""
    if target is not None and target not in KINDS:
        raise UsageError(f"target={target!r}: there is no such target", hint=f"One of {', '.join(KINDS)}, or None.")
