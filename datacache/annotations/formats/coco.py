"""COCO: one JSON file for all images, with `images`, `annotations` and `categories`.

The format of https://cocodataset.org/#format-data for object detection, with `attributes` of annotations as CVAT and
Datumaro write them. A `bbox` is [x, y, width, height] in pixels. Used by the annotation table and by conversions. Pure
functions, any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from datacache.annotations.check import clean_label
from datacache.annotations.classes import unlisted
from datacache.annotations.formats.values import (
    JSON,
    bounding_box,
    displayed,
    kind,
    load,
    shown,
    to_id,
    to_number,
    to_text,
)
from datacache.annotations.model import Action, Annotation, Box, Draft, DraftFile, Problem, quote
from datacache.core.errors import AnnotationError

_FLAGS: Final = ("difficult", "truncated", "occluded")
_TRUE: Final = frozenset({"1", "true", "yes"})
_FALSE: Final = frozenset({"0", "false", "no", ""})
_HALVES: Final = re.compile("[\ud800-\udfff]")
_AT_A_TIME: Final = 500


def parse(data: bytes | memoryview, file: str, classes: Sequence[str] = ()) -> DraftFile:
    """Read every image of the file, also those without an object, in the order of `images`. Its categories name the
    classes, whatever else does.

    Entries of one `file_name` are taken together. A category without a name becomes the label `class_7`. All of the
    file is in memory, several times its size. For boxes, and problems of objects, the line is the number of the
    annotation, from 1, since no line says where in such a file an object is. `AnnotationError` if it is no JSON, or
    has no `images`.
    """
    content = load(bytes(data), file)
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list):
        raise AnnotationError(f"{file} is no COCO file: it has no list of `images`", code="not-coco", file=file)
    reader = _Reader(file)
    for name, take in (("categories", reader.category), ("images", reader.image), ("annotations", reader.object)):
        entries = content.get(name)
        if not isinstance(entries, list):
            action: Action = "noted" if entries is None else "skipped"
            reader.problem("list-missing", action, f"there is no list of `{name}`, but {kind(entries)}")
            continue
        for number, entry in enumerate(entries):
            where = f"{name}[{number}]"
            reader.number = number + 1 if name == "annotations" else 0
            if isinstance(entry, dict):
                take(entry, where)
            else:
                reader.problem("entry-malformed", "skipped", f"{where} is {kind(entry)} and no object; it is left out")
    return reader.finish()


def write(annotations: Iterable[Annotation], classes: Sequence[str]) -> Iterator[bytes]:
    """Write the file in pieces, for checked annotations in the order of their paths; `path` becomes `file_name`.

    Images are numbered from 1 as they come, objects likewise, categories from 1 in the order of `classes`, so the same
    input gives the same bytes. Boxes whose label is not in `classes` are left out, which is the caller's to report.
    Flags and attributes are in `attributes`. The text is ASCII and escapes everything else, so any path survives.
    `annotations` is gone through once; what is kept meanwhile is the entries of the images.
    """
    ids = {name: number for number, name in enumerate(classes, 1)}
    categories = ",\n".join(
        f'{{"id":{number},"name":{json.dumps(name)},"supercategory":""}}' for name, number in ids.items()
    )
    yield f'{{"info":{{}},"licenses":[],\n"categories":[\n{categories}\n],\n"annotations":[\n'.encode()
    entries: list[bytes] = []
    part: list[str] = []
    objects = 0
    for image_id, annotation in enumerate(annotations, 1):
        size = f'"width":{annotation.width},"height":{annotation.height}'
        entries.append(f'{{"id":{image_id},"file_name":{json.dumps(annotation.path)},{size}}}'.encode())
        for box in annotation.boxes:
            category = ids.get(box.label)
            if category is not None:
                objects += 1
                comma = ",\n" if objects > 1 else ""
                part.append(f'{comma}{{"id":{objects},"image_id":{image_id},"category_id":{category},{_object(box)}}}')
        if len(part) >= _AT_A_TIME:
            yield "".join(part).encode()
            part = []
    yield "".join([*part, '\n],\n"images":[\n']).encode()
    for at in range(0, len(entries), _AT_A_TIME):
        yield b",\n" * (at > 0) + b",\n".join(entries[at : at + _AT_A_TIME])
    yield b"\n]}\n"


class _Reader:
    """Images, objects and problems of one file while it is read."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._problems: list[Problem] = []
        self._labels: dict[str, str] = {}
        self._images: dict[str, _Image] = {}
        self._by_name: dict[str, _Image] = {}
        self._lost_ids: dict[str, str] = {}
        # Category → how many objects, the first one's number, and what it is called in messages.
        self._unlisted: dict[str, tuple[int, int, str]] = {}
        self.number = 0  # of the annotation that is being read, from 1

    def problem(self, code: str, action: Action, message: str, image: _Image | None = None) -> None:
        """Report; to the image where it is known."""
        problems = self._problems if image is None else image.problems
        problems.append(Problem(code, action, self._file, self.number, message))

    def category(self, entry: dict[str, JSON], where: str) -> None:
        """Take one of `categories`."""
        id, name = to_id(entry.get("id")), entry.get("name")
        if id is None:
            message = f"{where} has {shown(entry, 'id')} and so means no objects; it is left out"
            self.problem("class-id", "noted", message)
        elif id in self._labels:
            message = f"{where} has the id {id}, which is {quote(self._labels[id])} already; the first one counts"
            self.problem("class-repeated", "noted", message)
        elif isinstance(name, str | int | float) and not isinstance(name, bool) and clean_label(str(name)):
            label = clean_label(str(name))
            if label != str(name):
                code = "label-spaces" if label == str(name).strip() else "label-characters"
                self.problem(code, "repaired", f"{where} is called {quote(str(name))}, taken as {quote(label)}")
            if label in self._labels.values():
                message = f"{where} is called {quote(label)} like another one; their objects are of one class"
                self.problem("class-repeated", "noted", message)
            self._labels[id] = label
        else:
            self._labels[id] = unlisted(id)
            message = f"{where} has {shown(entry, 'name')}; its objects are labelled {unlisted(id)!r}"
            self.problem("class-unlisted", "noted", message)

    def image(self, entry: dict[str, JSON], where: str) -> None:
        """Take one of `images`."""
        id, name = to_id(entry.get("id")), entry.get("file_name")
        if not isinstance(name, str) or not name.strip():
            self._lost_image(id, where, f"has {shown(entry, 'file_name')}")
            return
        earlier = self._images.get(id) if id is not None else None
        if id is None:
            self._lost_image(None, where, f"({quote(name)}) has {shown(entry, 'id')}")
        elif earlier is not None and earlier.name != name:
            # Whose its objects are cannot be known, and the first image has them.
            self._lost_image(None, where, f"({quote(name)}) has the id {id} of {quote(earlier.name)}")
        elif name in self._by_name:
            self._images[id] = image = self._by_name[name]
            message = f"{where} names {quote(name)} again; the objects of both entries are taken together"
            self.problem("image-repeated", "noted", message, image)
        else:
            image = self._images[id] = self._by_name[name] = _Image(name)
            image.width = self._side(entry, "width", image)
            image.height = self._side(entry, "height", image)

    def object(self, entry: dict[str, JSON], where: str) -> None:
        """Take one of `annotations`."""
        image_id, own_id = to_id(entry.get("image_id")), to_id(entry.get("id"))
        if own_id is not None:
            where += f", id {own_id if len(own_id) <= 60 else quote(own_id)}"
        image = self._images.get(image_id) if image_id is not None else None
        if image is None:
            reason = self._lost_ids.get(image_id or "", "which is no image's")
            message = f"{where} has {shown(entry, 'image_id')}, {reason}; it is left out"
            self.problem("image-unknown", "skipped", message)
            return
        where += f", of {quote(image.name)}"
        id = to_id(entry.get("category_id"))
        if id is None:
            self.problem("label-empty", "skipped", f"{where} has {shown(entry, 'category_id')}; it is left out", image)
            return
        label = self._labels.get(id)
        if label is None:
            count, number, first = self._unlisted.get(id, (0, self.number, where))
            self._unlisted[id] = count + 1, number, first
            label = unlisted(id)
        edges = self._edges(entry, where, image)
        if edges is None:
            return
        flags, attributes = _attributes(entry)
        if to_text(entry.get("iscrowd")) in _TRUE:
            attributes["iscrowd"] = "1"
            self.problem("crowd", "noted", f"{where} is a crowd; its box is kept as one object", image)
        image.boxes.append(Box(label, *edges, *flags, tuple(sorted(attributes.items())), self.number))

    def finish(self) -> DraftFile:
        """Return all of it."""
        for id, (count, number, first) in self._unlisted.items():
            self.number = number
            objects = f"{first} is" if count == 1 else f"{first}, and {count - 1:,} more are"
            message = f"{objects} of category {id}, which is not in the file; labelled {unlisted(id)!r}"
            self.problem("class-unlisted", "noted", message)
        images = [
            (Draft(self._file, image.name, image.width, image.height, tuple(image.boxes)), image.problems)
            for image in self._by_name.values()
        ]
        return DraftFile(images, self._problems, tuple(dict.fromkeys(self._labels.values())))

    def _lost_image(self, id: str | None, where: str, reason: str) -> None:
        self.problem("image-unnamed", "skipped", f"{where} {reason}; it is left out")
        if id is not None and id not in self._images:
            self._lost_ids[id] = f"which is {where}, an image without a name"

    def _side(self, entry: dict[str, JSON], name: str, image: _Image) -> int:
        value = entry.get(name)
        number = to_number(value)
        if value is None or number == 0:
            return 0
        if number is None or number != number // 1 or not 0 < number < 2**31:
            message = f"the {name} of {quote(image.name)} is {displayed(value)}, which is no size; it is not taken"
            self.problem("size-text", "noted", message, image)
            return 0
        return int(number)

    def _edges(self, entry: dict[str, JSON], where: str, image: _Image) -> tuple[float, float, float, float] | None:
        bbox = entry.get("bbox")
        if isinstance(bbox, list) and len(bbox) == 4:
            numbers = [to_number(value) for value in bbox]
            if None not in numbers:
                if any(isinstance(value, str) for value in bbox):
                    message = f"{where} has a bbox with numbers written as texts, which were read as numbers"
                    self.problem("box-text", "repaired", message, image)
                x, y, width, height = (number for number in numbers if number is not None)
                return x, y, x + width, y + height
            wrong = next(value for value, number in zip(bbox, numbers, strict=True) if number is None)
            message = f"{where} has {displayed(wrong)} in its bbox, which is not a number; it is left out"
            self.problem("box-text", "skipped", message, image)
            return None
        around = _polygons_box(entry.get("segmentation"))
        if around is None:
            message = f"{where} has {shown(entry, 'bbox')}, and no polygon to take it from; it is left out"
            self.problem("box-missing", "skipped", message, image)
            return None
        message = f"{where} has {shown(entry, 'bbox')}; the bounding box of its polygons was taken"
        self.problem("polygon-boxed", "noted", message, image)
        return around


@dataclass(slots=True)
class _Image:
    """One image while a file is read."""

    name: str
    width: int = 0
    height: int = 0
    boxes: list[Box] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def _attributes(entry: dict[str, JSON]) -> tuple[tuple[bool, bool, bool], dict[str, str]]:
    """Return the flags, and the other attributes as texts."""
    given = entry.get("attributes")
    given = dict(given) if isinstance(given, dict) else {}
    if "score" in entry:
        given.setdefault("score", entry["score"])
    difficult, truncated, occluded = texts = [to_text(given.get(name, "")).lower() for name in _FLAGS]
    for name, text in zip(_FLAGS, texts, strict=True):
        if text in _TRUE or text in _FALSE:
            given.pop(name, None)
    return (difficult in _TRUE, truncated in _TRUE, occluded in _TRUE), {
        # JSON can hold halves of characters, which no other file can.
        _HALVES.sub("\ufffd", name): _HALVES.sub("\ufffd", to_text(value))
        for name, value in given.items()
        if value is not None
    }


def _polygons_box(segmentation: JSON) -> tuple[float, float, float, float] | None:
    """Return the box around all polygons; None where there are none (run-length masks always come with a bbox)."""
    if not isinstance(segmentation, list):
        return None
    parts = segmentation if all(isinstance(part, list) for part in segmentation) else [segmentation]
    values: list[float] = []
    for part in parts:
        numbers = [number for number in map(to_number, part) if number is not None]
        if len(numbers) != len(part) or len(numbers) % 2:
            return None
        values += numbers
    return bounding_box(values) if values else None


def _object(box: Box) -> str:
    """Write the members of an object that a box knows."""
    width, height = box.x2 - box.x1, box.y2 - box.y1
    bbox = ",".join(map(_digits, (box.x1, box.y1, width, height)))
    attributes: dict[str, str | bool] = dict(box.attributes)
    crowd = attributes.pop("iscrowd", "0") == "1"
    attributes |= {name: True for name in _FLAGS if getattr(box, name)}
    text = f'"bbox":[{bbox}],"area":{_digits(width * height)},"segmentation":[],"iscrowd":{int(crowd)}'
    return f'{text},"attributes":{json.dumps(attributes, sort_keys=True)}' if attributes else text


def _digits(value: float) -> str:
    """Return the shortest text that is read as the same number."""
    return str(int(value)) if value == int(value) else repr(float(value))
