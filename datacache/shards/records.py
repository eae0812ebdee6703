"""The bytes of a shard: tar members, TFRecords, and the labels of images in both. Used by the builder.

A tar has ustar headers as the standard library writes them, without owner and time, so the same members give the same
bytes. Names that they cannot hold (above 100 bytes, not ASCII) have a pax header in front, which today's tars read.

A TFRecord is the length of its data (8 bytes, little endian), a checksum of these 8 bytes, the data, and a checksum of
the data; checksums are CRC-32C, rotated and added to (`tensorflow/core/lib/hash/crc32c.h`, `io/record_writer.cc`). The
data is a `tf.train.Example` in the wire format of Protocol Buffers (`tensorflow/core/example/example.proto`,
`feature.proto`), made without TensorFlow. Features have the names of the TensorFlow Object Detection API
(`research/object_detection/dataset_tools`). Pure functions, any thread.
"""

from __future__ import annotations

import json
import struct
import tarfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from datacache.annotations.formats import yolo
from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import (
    Extra,
    Keypoints,
    Mask,
    Outline,
    Rotated,
    pack,
    polygon_of,
    rings,
    unpack,
)
from datacache.shards.index import NO_CLASS

BLOCK: Final = 512
END: Final = bytes(2 * BLOCK)
"""The end of a tar."""
_MAX_NAME = 100  # ustar's field, without splitting a name in two
_MAX_SIZE = 8**11

HEAD_BYTES: Final = 12
FOOT_BYTES: Final = 4
MAX_DATA_BYTES: Final = 2**31 - 1
"""Protocol Buffers read no larger message."""
IMAGE: Final = "image/encoded"
_LENGTH_DELIMITED = 2
_MASK = 0xA282EAD8
_FLAGS = ("difficult", "truncated", "occluded")


# --- tars ------------------------------------------------------------------------------------------------------------


def header(name: str, size_bytes: int) -> bytes:
    """Return the header of a tar member: one block, or more with a pax header."""
    info = tarfile.TarInfo(name)
    info.size = size_bytes
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def padding(size_bytes: int) -> bytes:
    """Return the zeros from the end of a member's bytes to the next block."""
    return bytes(-size_bytes % BLOCK)


def member_bytes(name: str, size_bytes: int) -> int:
    """Return how much a member takes in a tar, with header and padding."""
    ustar = name.isascii() and len(name) <= _MAX_NAME and size_bytes < _MAX_SIZE
    return (BLOCK if ustar else len(header(name, size_bytes))) + size_bytes + -size_bytes % BLOCK


# --- records ---------------------------------------------------------------------------------------------------------


def record_head(data_bytes: int) -> bytes:
    """Return the bytes in front of a record's data."""
    length = struct.pack("<Q", data_bytes)
    return length + struct.pack("<I", masked(extend(0, length)))


def record_foot(crc: int) -> bytes:
    """Return the bytes behind a record's data; `crc` is the data's, as `extend` gives it."""
    return struct.pack("<I", masked(crc))


def extend(crc: int, data: bytes) -> int:
    """Return the CRC-32C of the bytes of `crc` (0 at first) with `data` behind them."""
    from awscrt import checksums

    return int(checksums.crc32c(data, crc))


def masked(crc: int) -> int:
    """Return a checksum as it is stored."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def bytes_feature(name: str, values: Iterable[bytes]) -> bytes:
    """Return a feature of byte strings, as a part of an example's features."""
    return _entry(name, _field(1, b"".join(_field(1, value) for value in values)))


def float_feature(name: str, values: Sequence[float]) -> bytes:
    """Return a feature of floats (32 bits)."""
    return _entry(name, _field(2, _field(1, struct.pack(f"<{len(values)}f", *values)) if values else b""))


def int64_feature(name: str, values: Sequence[int]) -> bytes:
    """Return a feature of integers."""
    return _entry(name, _field(3, _field(1, b"".join(map(_varint, values))) if values else b""))


def example_head(features: bytes, image_bytes: int) -> bytes:
    """Return an example without the image's bytes, which end it; `features` are the other features."""
    value = _tag(1) + _varint(image_bytes)
    value_bytes = len(value) + image_bytes
    bytes_list = _tag(1) + _varint(value_bytes) + value
    feature = _tag(2) + _varint(len(bytes_list) + image_bytes) + bytes_list
    name = _field(1, IMAGE.encode())
    entry = _tag(1) + _varint(len(name) + len(feature) + image_bytes) + name + feature
    return _tag(1) + _varint(len(features) + len(entry) + image_bytes) + features + entry


def _entry(name: str, feature: bytes) -> bytes:
    return _field(1, _field(1, name.encode()) + _field(2, feature))


def _field(number: int, data: bytes) -> bytes:
    return _tag(number) + _varint(len(data)) + data


def _tag(number: int) -> bytes:
    return bytes([number << 3 | _LENGTH_DELIMITED])


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # negative numbers are two's complement of 64 bits
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


# --- labels ----------------------------------------------------------------------------------------------------------


class Described(NamedTuple):
    """An image and its annotation."""

    path: str
    annotation: Annotation | None = None
    """None where only the path is known, and not even the image's size."""
    labels: tuple[str, ...] = ()
    """Labels of the whole image."""


class Labels(ABC):
    """The labels of images in one format. Class ids are positions in `classes`, from 0, in every member."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._ids: Mapping[str, int] = {name: id for id, name in enumerate(classes)}
        self.left_out: Counter[str] = Counter()
        """Boxes by class, of classes that are not in `classes`."""

    @abstractmethod
    def encode(self, image: Described, key: str, extension: str) -> tuple[tuple[str, bytes], ...]:
        """Return extension and bytes of each member; for TFRecords one, which lacks the image."""

    def class_of(self, image: Described) -> int:
        """Return the class of an image with exactly one label of the whole image, else `NO_CLASS`."""
        return self._ids.get(image.labels[0], NO_CLASS) if len(image.labels) == 1 else NO_CLASS

    def _boxes(self, annotation: Annotation) -> list[Box]:
        self.left_out.update(box.label for box in annotation.boxes if box.label not in self._ids)
        return [box for box in annotation.boxes if box.label in self._ids]


class WebDatasetLabels(Labels):
    """`.json` with all labels, `.cls` with the class of the whole image, and for detection `.txt` with lines of
    YOLO."""

    def __init__(self, classes: Sequence[str], *, detection: bool, keypoints: int = 0) -> None:
        """`keypoints`: how many the class with the most has; 0 for none."""
        super().__init__(classes)
        self._detection, self._keypoints = detection, keypoints

    def encode(self, image: Described, key: str, extension: str) -> tuple[tuple[str, bytes], ...]:
        del key, extension
        annotation = image.annotation
        said: dict[str, Any] = {"path": image.path}
        if annotation is not None or image.labels:
            said["labels"] = list(image.labels)
        if annotation is not None:
            said |= {"width": annotation.width, "height": annotation.height}
            said["boxes"] = [self._box(box) for box in self._boxes(annotation)]
            if not annotation.source:
                said["annotated"] = False
            if self._keypoints:
                said["keypoints"] = self._keypoints
        members = [("json", json.dumps(said, separators=(",", ":"), sort_keys=True).encode())]
        class_id = self.class_of(image)
        if class_id != NO_CLASS:
            members.append(("cls", b"%d" % class_id))
        if self._detection and annotation is not None:
            members.append(("txt", yolo.write(annotation, self._ids)))
        return tuple(members)

    def _box(self, box: Box) -> dict[str, Any]:
        said = {
            "label": box.label,
            "class": self._ids[box.label],
            "x1": box.x1,
            "y1": box.y1,
            "x2": box.x2,
            "y2": box.y2,
        }
        said |= {flag: True for flag in _FLAGS if getattr(box, flag)}
        said |= {"attributes": dict(box.attributes)} if box.attributes else {}
        return said if box.extra is None else said | shapes_as_json(box.extra)


def shapes_as_json(extra: Extra) -> dict[str, Any]:
    """Return the `outline` and the `keypoints` of an object in a `.json` member."""
    said: dict[str, Any] = {}
    outline, keypoints = extra.outline, extra.keypoints
    if isinstance(outline, Mask):
        said["outline"] = {"mask": outline.counts.decode()}
    elif isinstance(outline, Rotated):
        said["outline"] = {"corners": unpack(outline.corners).tolist()}
    elif outline is not None:
        parts = list(rings(outline))
        said["outline"] = {"rings": [unpack(ring).tolist() for ring, _ in parts]}
        said["outline"] |= {"holes": [n for n, (_, hole) in enumerate(parts) if hole]} if outline.holes else {}
    if keypoints is not None:
        points = zip(*[iter(unpack(keypoints.points))] * 2, keypoints.visible, strict=True)
        said["keypoints"] = [value for point in points for value in point]
    return said


def shapes_of_json(said: Mapping[str, Any], width: int, height: int) -> Extra | None:
    """Read what `shapes_as_json` made, in an image of this size. Raise `KeyError`, `TypeError` or `ValueError` for
    anything else."""
    outline: Outline | None = None
    given = said.get("outline")
    if given is not None and "mask" in given:
        outline = Mask(given["mask"].encode(), width, height)
    elif given is not None and "corners" in given:
        outline = Rotated(pack(given["corners"]))
    elif given is not None:
        outline = polygon_of(list(map(pack, given["rings"])), sum(1 << n for n in given.get("holes", ())))
    points, keypoints = said.get("keypoints"), None
    if points is not None:
        visible = bytes(map(int, points[2::3]))
        keypoints = Keypoints(pack(value for n, value in enumerate(points) if n % 3 < 2), visible)
    return None if outline is None and keypoints is None else Extra(outline, keypoints)


class TfRecordLabels(Labels):
    """The features of an example without the image."""

    def encode(self, image: Described, key: str, extension: str) -> tuple[tuple[str, bytes], ...]:
        format = "jpeg" if extension in ("jpg", "jpe", "jfif") else extension
        parts = [
            bytes_feature("image/filename", [_raw(image.path)]),
            bytes_feature("image/format", [format.encode()]),
            bytes_feature("image/key", [key.encode()]),
        ]
        annotation = image.annotation
        if annotation is not None:
            width, height = annotation.width, annotation.height
            boxes = self._boxes(annotation)
            sides = (("xmin", "x1", width), ("ymin", "y1", height), ("xmax", "x2", width), ("ymax", "y2", height))
            for name, side, size in sides:
                parts.append(float_feature(f"image/object/bbox/{name}", [getattr(box, side) / size for box in boxes]))
            parts += [
                int64_feature("image/width", [width]),
                int64_feature("image/height", [height]),
                bytes_feature("image/object/class/text", [_raw(box.label) for box in boxes]),
                int64_feature("image/object/class/label", [self._ids[box.label] for box in boxes]),
                int64_feature("image/object/difficult", [int(box.difficult) for box in boxes]),
            ]
        labels = [label for label in image.labels if label in self._ids]
        if labels:
            parts.append(bytes_feature("image/class/text", map(_raw, labels)))
            parts.append(int64_feature("image/class/label", [self._ids[label] for label in labels]))
        return (("tfrecord", b"".join(parts)),)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
