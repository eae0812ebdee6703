"""What a sample's target is: boxes, a class, a path. Kept as columns, so that a million of them are a few arrays.

Used by the sources of samples; knows neither PyTorch nor TensorFlow. Read-only after they are made: any thread, forked
and pickled.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
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
    """The boxes of each sample: in `boxes` (float32, 4 each) and `labels` (int32), those of sample n end at
    `ends[n + 1]`."""

    kind = "detection"

    def __init__(self, ends: NDArray[np.int64], boxes: NDArray[np.float32], labels: NDArray[np.int32]) -> None:
        self._ends, self._boxes, self._labels = ends, boxes, labels

    def get(self, sample: int) -> Boxes:
        """A sample's own copy."""
        first, last = int(self._ends[sample]), int(self._ends[sample + 1])
        return {"boxes": self._boxes[first:last].copy(), "labels": self._labels[first:last].astype(np.int64)}


class ClassColumn:
    """The class id of each sample, an int; `NO_CLASS` where it has none."""

    kind = "classification"

    def __init__(self, values: NDArray[np.int32]) -> None:
        self._values = values

    def get(self, sample: int) -> int:
        """A sample's."""
        return int(self._values[sample])


class BoxBuilder:
    """Takes annotations one after another; of each it keeps 8 bytes, and 20 of each box. One thread, like all that
    build here."""

    def __init__(self, class_ids: Mapping[str, int]) -> None:
        self._ids = class_ids
        self._ends, self._boxes, self._labels = array("q", [0]), array("f"), array("i")

    def add(self, annotation: Annotation) -> None:
        """The next sample's."""
        for box in annotation.boxes:
            self._boxes.extend((box.x1, box.y1, box.x2, box.y2))
            self._labels.append(self._ids[box.label])
        self._ends.append(len(self._labels))

    def finish(self) -> BoxColumns:
        """All of them."""
        return BoxColumns(np.asarray(self._ends), np.asarray(self._boxes).reshape(-1, 4), np.asarray(self._labels))


class ClassBuilder:
    """Takes annotations one after another, each with the class that the whole image has."""

    def __init__(self, class_ids: Mapping[str, int]) -> None:
        self._ids = class_ids
        self._values = array("i")

    def add(self, annotation: Annotation) -> None:
        """The next sample's."""
        self._values.append(class_of(annotation.labels, (box.label for box in annotation.boxes), self._ids))

    def finish(self) -> ClassColumn:
        """All of them."""
        return ClassColumn(np.asarray(self._values))


class FolderBuilder:
    """Takes paths one after another; a sample's class is the name of the folder it lies in."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        self._values = array("i")

    def add(self, path: str) -> None:
        """The next sample's."""
        folder = path.rpartition("/")[0].rpartition("/")[2]
        self._values.append(self._found.setdefault(folder, len(self._found)))

    def finish(self) -> tuple[tuple[str, ...], ClassColumn]:
        """The classes, sorted, and all samples'."""
        classes = tuple(sorted(self._found))
        ids = np.zeros(len(classes), np.int32)
        for id, name in enumerate(classes):
            ids[self._found[name]] = id
        return classes, ClassColumn(ids[np.asarray(self._values)])


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
