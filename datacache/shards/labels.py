"""What a shard says of an image besides its bytes: members for WebDataset, features for TensorFlow.

Used by the builder. Class ids are positions in the set's list of classes and count from 0, in every member. Pure, any
thread.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from datacache.annotations.formats import yolo
from datacache.annotations.model import Annotation, Box
from datacache.shards import records as tfrecord
from datacache.shards.index import NO_CLASS

_FLAGS = ("difficult", "truncated", "occluded")


class Described(NamedTuple):
    """An image, and what is known of it."""

    path: str
    annotation: Annotation | None = None
    """None: nothing but its path, and its size is not known."""
    labels: tuple[str, ...] = ()
    """Labels of the whole image."""


class Labels(Protocol):
    """One format's way to say it."""

    left_out: Counter[str]
    """Boxes whose class is not among those asked for."""

    def encode(self, image: Described, key: str, extension: str) -> tuple[tuple[str, bytes], ...]:
        """Extension and bytes of each member; for TFRecords one, which lacks the image."""
        ...

    def class_of(self, image: Described) -> int:
        """The class of an image that has exactly one label of the whole image."""
        ...


class _Classes:
    def __init__(self, classes: Sequence[str]) -> None:
        self._ids: Mapping[str, int] = {name: id for id, name in enumerate(classes)}
        self.left_out: Counter[str] = Counter()

    def class_of(self, image: Described) -> int:
        """See `Labels`."""
        return self._ids.get(image.labels[0], NO_CLASS) if len(image.labels) == 1 else NO_CLASS

    def _boxes(self, image: Described) -> list[Box]:
        boxes = image.annotation.boxes if image.annotation is not None else ()
        self.left_out.update(box.label for box in boxes if box.label not in self._ids)
        return [box for box in boxes if box.label in self._ids]


class WebDatasetLabels(_Classes):
    """`.json` with all of it, `.cls` with the class of the whole image, and for detection `.txt` with lines of YOLO."""

    def __init__(self, classes: Sequence[str], *, detection: bool) -> None:
        super().__init__(classes)
        self._detection = detection

    def encode(self, image: Described, key: str, extension: str) -> tuple[tuple[str, bytes], ...]:
        """See `Labels`."""
        del key, extension
        said: dict[str, Any] = {"path": image.path}
        if image.annotation is not None or image.labels:
            said["labels"] = list(image.labels)
        members = []
        if image.annotation is not None:
            annotation = image.annotation
            said |= {"width": annotation.width, "height": annotation.height}
            said["boxes"] = [self._box(box) for box in self._boxes(image)]
            if not annotation.source:
                said["annotated"] = False
        members.append(("json", json.dumps(said, separators=(",", ":"), sort_keys=True).encode()))
        class_id = self.class_of(image)
        if class_id != NO_CLASS:
            members.append(("cls", b"%d" % class_id))
        if self._detection and image.annotation is not None:
            members.append(("txt", yolo.write(image.annotation, self._ids)))
        return tuple(members)

    def _box(self, box: Box) -> dict[str, Any]:
        said: dict[str, Any] = {"label": box.label, "class": self._ids[box.label]}
        said |= {"x1": box.x1, "y1": box.y1, "x2": box.x2, "y2": box.y2}
        said |= {flag: True for flag in _FLAGS if getattr(box, flag)}
        if box.attributes:
            said["attributes"] = dict(box.attributes)
        return said


class TfRecordLabels(_Classes):
    """The features of an example but the image itself."""

    def encode(self, image: Described, key: str, extension: str) -> tuple[tuple[str, bytes], ...]:
        """See `Labels`."""
        format = "jpeg" if extension in ("jpg", "jpe", "jfif") else extension
        parts = [
            tfrecord.bytes_feature("image/filename", [_raw(image.path)]),
            tfrecord.bytes_feature("image/format", [format.encode()]),
            tfrecord.bytes_feature("image/key", [key.encode()]),
        ]
        annotation = image.annotation
        if annotation is not None:
            width, height = annotation.width, annotation.height
            boxes = self._boxes(image)
            for name, side, size in (("xmin", "x1", width), ("ymin", "y1", height), ("xmax", "x2", width)):
                parts.append(_edges(name, [getattr(box, side) / size for box in boxes]))
            parts.append(_edges("ymax", [box.y2 / height for box in boxes]))
            parts += [
                tfrecord.int64_feature("image/width", [width]),
                tfrecord.int64_feature("image/height", [height]),
                tfrecord.bytes_feature("image/object/class/text", [_raw(box.label) for box in boxes]),
                tfrecord.int64_feature("image/object/class/label", [self._ids[box.label] for box in boxes]),
                tfrecord.int64_feature("image/object/difficult", [int(box.difficult) for box in boxes]),
            ]
        labels = [label for label in image.labels if label in self._ids]
        if labels:
            parts.append(tfrecord.bytes_feature("image/class/text", map(_raw, labels)))
            parts.append(tfrecord.int64_feature("image/class/label", [self._ids[label] for label in labels]))
        return (("tfrecord", b"".join(parts)),)


def _edges(name: str, values: list[float]) -> bytes:
    return tfrecord.float_feature(f"image/object/bbox/{name}", values)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
