"""COCO: one JSON file for all images, with `images`, `annotations` and `categories`.

The format of https://cocodataset.org/#format-data for detection, keypoints and captions, with `attributes` of
annotations as CVAT and Datumaro write them. A `bbox` is [x, y, width, height] in pixels; a `segmentation` is a list of
polygons, which together are the object (none is a hole), or a mask as run lengths; `keypoints` are x, y and visibility
in the order of their category's. Edges of a skeleton count from 1 there and from 0 here. Used by the annotation table
and by conversions. Pure functions, any thread.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby, islice
from types import MappingProxyType
from typing import Any, Final

from datacache.annotations.aside import Aside
from datacache.annotations.check import clean_label
from datacache.annotations.classes import unlisted, unnamed
from datacache.annotations.formats.geometry import MAX_POINTS, around_keypoints, side
from datacache.annotations.formats.json_stream import Data, JsonFile, PassedOver
from datacache.annotations.formats.values import (
    JSON,
    displayed,
    kind,
    shown,
    to_id,
    to_number,
    to_text,
)
from datacache.annotations.model import HALVES, Action, Annotation, Box, Draft, DraftFile, Problem, quote
from datacache.annotations.plain import Columns, boxes_of, columns_of
from datacache.annotations.shapes.outline import (
    NOTHING,
    POINT_BYTES,
    Edges,
    Extra,
    Keypoints,
    Mask,
    Outline,
    Polygon,
    Skeleton,
    area,
    bounds,
    polygon_of,
    rings,
    unpack,
)
from datacache.core.errors import AnnotationError

_FLAGS: Final = ("difficult", "truncated", "occluded")
_TRUE: Final = frozenset({"1", "true", "yes"})
_FALSE: Final = frozenset({"0", "false", "no", ""})
_NUMBERS: Final = frozenset({int, float})
_box, _extra = partial(tuple.__new__, Box), partial(tuple.__new__, Extra)
_polygon = partial(tuple.__new__, Polygon)
_NO_FLAGS: Final = (False, False, False)
_AT_A_TIME: Final = 500
_BOX_BYTES: Final = 450
_MOST_HELD: Final = 40 * 2**20
"""Bytes of boxes in memory, about: 45,000 polygons of 29 points are not put aside at all."""
_BLOCKS: Final = 1_024
"""So many parts of the images are put aside and read again on their own: a box at a time takes twice as long."""


def parse(data: Data, file: str, classes: Sequence[str] = ()) -> DraftFile:
    """Read every image of the file, also those without an object, in the order of `images`. Its categories name the
    classes, whatever else does.

    Entries of one `file_name` are taken together. A category without a name becomes the label `class_7`. Little
    of the file is in memory at once, and few of its boxes: images are put together when they are asked for.

    For boxes, and problems of objects, the line is the number of the annotation, from 1, since no line says where in
    such a file an object is. `AnnotationError` if it is no JSON, or has no `images`.
    """
    content = JsonFile(data, file)
    if content.kind("images") != "[":
        raise AnnotationError(f"{file} is no COCO file: it has no list of `images`", code="not-coco", file=file)
    reader = _Reader(file)
    for name, take in (("categories", reader.category), ("images", reader.image), ("annotations", reader.object)):
        first = content.kind(name)
        if first != "[":
            if name == "categories" and not first and content.kind("annotations") == "[":
                continue  # captions have none, and objects say that theirs is not there
            action: Action = "skipped" if first else "noted"
            there = "an object" if first == "{" else "a single value" if first else "nothing"
            reader.problem("list-missing", action, f"there is no list of `{name}`, but {there}")
            continue
        for number, entry in enumerate(content.elements(name)):
            reader.begin(name, number)
            if isinstance(entry, dict):
                take(entry)
            else:
                wrong = entry.reason if isinstance(entry, PassedOver) else f"is {kind(entry)} and no object"
                reader.problem("entry-malformed", "skipped", f"{reader.where} {wrong}; it is left out")
    return reader.finish()


def write(
    annotations: Iterable[Annotation],
    classes: Sequence[str],
    skeletons: Mapping[str, Skeleton] = MappingProxyType({}),
    supercategories: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[bytes]:
    """Write the file in pieces, for checked annotations in the order of their paths; `path` becomes `file_name`.

    Images are numbered from 1 as they come, objects likewise, categories from 1 in the order of `classes`, so the same
    input gives the same bytes. Boxes whose label is not in `classes` are left out, which is the caller's to report.
    Flags and attributes are in `attributes`. The text is ASCII and escapes everything else, so any path survives.
    `annotations` is gone through once; what is kept meanwhile is the entries of the images.
    """
    ids = {name: number for number, name in enumerate(classes, 1)}
    categories = ",\n".join(
        _category(name, number, skeletons.get(name), supercategories.get(name, "")) for name, number in ids.items()
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


def write_captions(annotations: Iterable[Annotation]) -> bytes:
    """Write the file of captions for the images that have some; `path` becomes `file_name`."""
    images: list[dict[str, JSON]] = []
    captions: list[dict[str, JSON]] = []
    for annotation in annotations:
        id = len(images) + 1
        size = {"width": annotation.width, "height": annotation.height}
        images.append({"id": id, "file_name": annotation.path, **size})
        for caption in annotation.captions:
            captions.append({"id": len(captions) + 1, "image_id": id, "caption": caption})
    content = {"info": {}, "licenses": [], "annotations": captions, "images": images}
    return json.dumps(content, separators=(",", ":")).encode()


def _category(name: str, number: int, skeleton: Skeleton | None, above: str) -> str:
    text = f'"id":{number},"name":{json.dumps(name)},"supercategory":{json.dumps(above)}'
    if skeleton is not None:
        edges = [[a + 1, b + 1] for a, b in skeleton.edges]
        text += f',"keypoints":{json.dumps(skeleton.names)},"skeleton":{json.dumps(edges)}'
    return f"{{{text}}}"


class _Reader:
    """Images, objects and problems of one file while it is read."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._problems: list[Problem] = []
        self._labels: dict[str, str] = {}
        # Images are numbered as they come: a hundred thousand objects would be most of what this process takes.
        self._images: dict[str, int] = {}
        self._by_name: dict[str, int] = {}
        self._names: list[str] = []
        self._sizes = array("i"), array("i")
        self._captions: defaultdict[int, list[str]] = defaultdict(list)
        self._problems_of: defaultdict[int, list[Problem]] = defaultdict(list)
        self._boxes: defaultdict[int, list[Box]] = defaultdict(list)
        self._held = 0
        self._records = _Records()
        self._lost_ids: dict[str, str] = {}
        # Category → how many objects, the first one's number, and what it is called in messages.
        self._unlisted: dict[str, tuple[int, int, str]] = {}
        self._skeletons: dict[str, Skeleton] = {}
        self._supercategories: dict[str, str] = {}
        self.number = 0  # of the annotation that is being read, from 1
        self._entry, self._image = ("", 0), ""
        self._own_id: JSON = None

    def begin(self, name: str, number: int) -> None:
        """Begin with an element of a list."""
        self.number = number + 1 if name == "annotations" else 0
        self._entry, self._own_id, self._image = (name, number), None, ""

    @property
    def where(self) -> str:
        """Name the element that is being read, for messages."""
        name, number = self._entry
        id, image = to_id(self._own_id), self._image
        shown = f", id {id if len(id) <= 60 else quote(id)}" if id else ""
        return f"{name}[{number}]{shown}{f', of {quote(image)}' if image else ''}"

    def problem(self, code: str, action: Action, message: str, image: int | None = None) -> None:
        """Report; to the image where it is known."""
        problems = self._problems if image is None else self._problems_of[image]
        problems.append(Problem(code, action, self._file, self.number, message))

    def category(self, entry: dict[str, JSON]) -> None:
        """Take one of `categories`."""
        id, name = to_id(entry.get("id")), entry.get("name")
        if id is None:
            message = f"{self.where} has {shown(entry, 'id')} and so means no objects; it is left out"
            self.problem("class-id", "noted", message)
        elif id in self._labels:
            message = f"{self.where} has the id {id}, which is {quote(self._labels[id])} already; the first one counts"
            self.problem("class-repeated", "noted", message)
        elif isinstance(name, str | int | float) and not isinstance(name, bool) and clean_label(str(name)):
            label = clean_label(str(name))
            if label != str(name):
                code = "label-spaces" if label == str(name).strip() else "label-characters"
                self.problem(code, "repaired", f"{self.where} is called {quote(str(name))}, taken as {quote(label)}")
            if label in self._labels.values():
                message = f"{self.where} is called {quote(label)} like another one; their objects are of one class"
                self.problem("class-repeated", "noted", message)
            self._labels[id] = label
            self._keypoints_of(entry, label)
        else:
            self._labels[id] = unlisted(id)
            message = f"{self.where} has {shown(entry, 'name')}; its objects are labelled {unlisted(id)!r}"
            self.problem("class-unlisted", "noted", message)

    def _keypoints_of(self, entry: dict[str, JSON], label: str) -> None:
        """Take what a category says besides its name."""
        if isinstance(above := entry.get("supercategory"), str) and above:
            self._supercategories.setdefault(label, above)
        names, edges = entry.get("keypoints"), entry.get("skeleton")
        if not isinstance(names, list) or not names:
            return
        found: list[tuple[int, int]] = []
        try:
            found = [(int(a), int(b)) for a, b in edges or ()]
        except (TypeError, ValueError, OverflowError):
            message = f"{self.where} has {shown(entry, 'skeleton')}, which is none; it is passed over"
            self.problem("skeleton", "noted", message)
        first = 1
        if any(0 in edge for edge in found):
            first = 0
            message = f"{self.where} counts ends of its skeleton from 0, and COCO does from 1; they are taken as meant"
            self.problem("skeleton", "repaired", message)
        kept = tuple((a - first, b - first) for a, b in found if first <= min(a, b) and max(a, b) < first + len(names))
        if len(kept) < len(found):
            message = (
                f"the skeleton of {self.where} has ends that are none of its {len(names)} keypoints; they are left out"
            )
            self.problem("skeleton", "repaired", message)
        self._skeletons.setdefault(label, Skeleton(tuple(map(to_text, names)), kept))

    def image(self, entry: dict[str, JSON]) -> None:
        """Take one of `images`."""
        id, name = to_id(entry.get("id")), entry.get("file_name")
        if not isinstance(name, str) or not name.strip():
            self._lost_image(id, f"has {shown(entry, 'file_name')}")
            return
        earlier = self._images.get(id) if id is not None else None
        if id is None:
            self._lost_image(None, f"({quote(name)}) has {shown(entry, 'id')}")
        elif earlier is not None and self._names[earlier] != name:
            # Whose its objects are cannot be known, and the first image has them.
            self._lost_image(None, f"({quote(name)}) has the id {id} of {quote(self._names[earlier])}")
        elif name in self._by_name:
            self._images[id] = image = self._by_name[name]
            message = f"{self.where} names {quote(name)} again; the objects of both entries are taken together"
            self.problem("image-repeated", "noted", message, image)
        else:
            image = self._images[id] = self._by_name[name] = len(self._names)
            self._names.append(name)
            for side, sizes in zip(("width", "height"), self._sizes, strict=True):
                sizes.append(self._side(entry, side, image))

    def object(self, entry: dict[str, JSON]) -> None:
        """Take one of `annotations`."""
        image_id, self._own_id = to_id(entry.get("image_id")), entry.get("id")
        image = self._images.get(image_id) if image_id is not None else None
        if image is None:
            reason = self._lost_ids.get(image_id or "", "which is no image's")
            message = f"{self.where} has {shown(entry, 'image_id')}, {reason}; it is left out"
            self.problem("image-unknown", "skipped", message)
            return
        self._image = self._names[image]
        if "category_id" not in entry and isinstance(entry.get("caption"), str):
            self._captions[image].append(entry["caption"])
            return
        id = to_id(entry.get("category_id"))
        if id is None:
            message = f"{self.where} has {shown(entry, 'category_id')}; it is left out"
            self.problem("label-empty", "skipped", message, image)
            return
        label = self._labels.get(id)
        if label is None:
            count, number, first = self._unlisted.get(id, (0, self.number, self.where))
            self._unlisted[id] = count + 1, number, first
            label = unlisted(id)
        said = len(self._problems_of.get(image, ()))
        outline = self._outline(entry["segmentation"], image) if entry.get("segmentation") else None
        keypoints = self._keypoints(entry, label, image) if entry.get("keypoints") else None
        edges = self._edges(entry, image, outline, keypoints)
        if edges is None:
            del self._problems_of[image][said:-1]  # of the outline of an object that is left out
            return
        flags, attributes = _attributes(entry) if "attributes" in entry or "score" in entry else (_NO_FLAGS, {})
        if (crowd := entry.get("iscrowd")) and to_text(crowd) in _TRUE:
            attributes["iscrowd"] = "1"
            kept = "its box is kept" if outline is None else "it is kept"
            self.problem("crowd", "noted", f"{self.where} is a crowd; {kept} as one object", image)
        extra, score, area = None, entry.get("score"), entry.get("area")
        if score is not None and not _is_score(score):
            score = None
        if outline or keypoints or score is not None or _differs(area, edges):
            given = area if type(area) is float else to_number(area)
            if given is not None and not (0 <= given < math.inf and (outline or keypoints or _differs(given, edges))):
                given = None
            if outline or keypoints or score is not None or given is not None:
                extra = _extra((outline, keypoints, -1, -1, score, "", given))
        more = tuple(sorted(attributes.items())) if attributes else ()
        self._boxes[image].append(_box((label, *edges, *flags, more, self.number, extra)))
        self._held += _BOX_BYTES + (0 if outline is None else len(outline[0]))
        if self._held > _MOST_HELD:
            self._put_aside()

    def _put_aside(self) -> None:
        """Write the boxes that are held to disk."""
        self._records.put(self._boxes, len(self._names))
        self._boxes.clear()
        self._held = 0

    def finish(self) -> DraftFile:
        """Return all of it."""
        for id, (count, number, first) in self._unlisted.items():
            self.number = number
            objects = f"{first} is" if count == 1 else f"{first}, and {count - 1:,} more are"
            message = f"{objects} of category {id}, which is not in the file; labelled {unlisted(id)!r}"
            self.problem("class-unlisted", "noted", message)
        if self._records:
            self._put_aside()
        self._images.clear()
        self._by_name.clear()
        images = _Drafts(self, len(self._names))
        # Ids are what tools and models count, not where a category stands in its list.
        ordered = sorted(self._labels, key=lambda id: (to_number(id) is None, to_number(id) or 0.0))
        classes = tuple(dict.fromkeys(self._labels[id] for id in ordered))
        kept = images if self._records else list(images)
        return DraftFile(kept, self._problems, classes, self._skeletons, self._supercategories)

    def draft(self, image: int) -> tuple[Draft, list[Problem]]:
        """Put an image together. `IndexError` for one that is not there."""
        name, (width, height) = self._names[image], (sizes[image] for sizes in self._sizes)
        boxes = self._records.get(image) if self._records else self._boxes.get(image, ())
        captions = tuple(self._captions.get(image, ()))
        return Draft(self._file, name, width, height, tuple(boxes), captions=captions), self._problems_of.get(image, [])

    def _lost_image(self, id: str | None, reason: str) -> None:
        self.problem("image-unnamed", "skipped", f"{self.where} {reason}; it is left out")
        if id is not None and id not in self._images:
            self._lost_ids[id] = f"which is {self.where}, an image without a name"

    def _side(self, entry: dict[str, JSON], name: str, image: int) -> int:
        value = entry.get(name)
        number = to_number(value)
        if value is None or number == 0:
            return 0
        if number is None or number != number // 1 or not 0 < number < 2**31:
            message = (
                f"the {name} of {quote(self._names[image])} is {displayed(value)}, which is no size; it is not taken"
            )
            self.problem("size-text", "noted", message, image)
            return 0
        return int(number)

    def _edges(
        self, entry: dict[str, JSON], image: int, outline: Outline | None, keypoints: Keypoints | None
    ) -> Edges | None:
        bbox = entry.get("bbox")
        if isinstance(bbox, list) and len(bbox) == 4:
            if _NUMBERS.issuperset(map(type, bbox)):
                try:
                    x, y, width, height = map(float, bbox)
                except OverflowError:
                    pass
                else:
                    return x, y, x + width, y + height
            numbers = [to_number(value) for value in bbox]
            if None not in numbers:
                if any(isinstance(value, str) for value in bbox):
                    message = f"{self.where} has a bbox with numbers written as texts, which were read as numbers"
                    self.problem("box-text", "repaired", message, image)
                x, y, width, height = (number for number in numbers if number is not None)
                return x, y, x + width, y + height
            wrong = next(value for value, number in zip(bbox, numbers, strict=True) if number is None)
            message = f"{self.where} has {displayed(wrong)} in its bbox, which is not a number; it is left out"
            self.problem("box-text", "skipped", message, image)
            return None
        edges, of = _around(outline), "outline"
        if edges is None and keypoints is not None:
            edges = around_keypoints(keypoints, *(sizes[image] or math.inf for sizes in self._sizes))
            of = "keypoints"
        if edges is None:
            message = f"{self.where} has {shown(entry, 'bbox')}, and nothing to take it from; it is left out"
            self.problem("box-missing", "skipped", message, image)
            return None
        message = f"{self.where} has {shown(entry, 'bbox')}; that of its {of} is taken"
        self.problem("box-missing", "noted", message, image)
        return edges

    def _outline(self, found: JSON, image: int) -> Outline | None:
        """Read a segmentation; None, and a problem, for one that cannot be meant."""
        stays = "the object stays as its box"
        if isinstance(found, dict):
            from datacache.annotations.shapes.mask import checked, from_runs

            try:
                height, width = found["size"]
                counts = found["counts"]
                if isinstance(counts, str):
                    return checked(counts.encode(), width, height)
                return from_runs(counts, width, height, listed=True)
            except (KeyError, TypeError, ValueError) as exc:
                reason = str(exc) if isinstance(exc, ValueError) else "a part of it is missing"
                message = f"the mask of {self.where} cannot be read: {reason}; {stays}"
                self.problem("mask-broken", "repaired", message, image)
            return None
        try:
            if len(found) == 1 and type(found[0]) is list and 0 < len(found[0]) <= 2 * MAX_POINTS:
                points = array("d", found[0]).tobytes()  # nearly always
                if not len(points) % POINT_BYTES:
                    return _polygon((points, (), 0))
            parts = found if isinstance(found[0], list) else [found]
            if sum(map(len, parts)) > 2 * MAX_POINTS:
                message = f"the outline of {self.where} has more than {MAX_POINTS:,} points; {stays}"
                self.problem("shape-too-large", "repaired", message, image)
                return None
            ringed = [array("d", part).tobytes() for part in parts]
        except (KeyError, TypeError, OverflowError):
            ringed = [b"-"]
        if any(len(ring) % POINT_BYTES for ring in ringed):
            message = f"the outline of {self.where} is no list of points; {stays}"
            self.problem("shape-malformed", "repaired", message, image)
            return None
        ringed = [ring for ring in ringed if ring]
        if not ringed:
            message = f"the outline of {self.where} has no points; {stays}"
            self.problem("polygon-empty", "repaired", message, image)
            return None
        return polygon_of(ringed)

    def _keypoints(self, entry: dict[str, JSON], label: str, image: int) -> Keypoints | None:
        """Read the keypoints of an object; None, and a problem, where they are not those of its class."""
        skeleton = self._skeletons.get(label)
        try:
            values = array("d", entry["keypoints"])
            visible = bytes(map(int, values[2::3]))
            if list(visible) != values[2::3].tolist():
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            values, visible = array("d", [0]), b""
        count = len(visible) if skeleton is None else len(skeleton.names)
        if len(values) != 3 * count or count > MAX_POINTS or max(visible, default=0) > 2:
            message = f"the keypoints of {self.where} are not x, y and 0, 1 or 2 for each of {count}; they are left out"
            self.problem("keypoints-malformed", "repaired", message, image)
            return None
        if skeleton is None:
            self._skeletons[label] = Skeleton(unnamed(count))
        points = array("d", bytes(POINT_BYTES * count))
        points[0::2], points[1::2] = values[0::3], values[1::3]
        return Keypoints(points.tobytes(), visible)


class _Records:
    """Boxes on disk, by the number of their image. Each record has those of neighbours, so that they can be read image
    by image again, a block at a time."""

    def __init__(self) -> None:
        self._aside = Aside[tuple[list[int], list[int], Columns]]()
        self._blocks: defaultdict[int, list[int]] = defaultdict(list)
        self._images_a_block = 1
        self._last: tuple[int, dict[int, list[Box]]] = (-1, {})

    def __len__(self) -> int:
        return len(self._aside)

    def put(self, boxes: Mapping[int, list[Box]], images: int) -> None:
        """Put boxes behind those that are there. `images`: how many there are, the same each time."""
        self._images_a_block = -(-images // _BLOCKS)
        for block, numbers in groupby(sorted(boxes), lambda number: number // self._images_a_block):
            mine = list(numbers)
            columns = columns_of(list(chain.from_iterable(boxes[number] for number in mine)))
            self._blocks[block].append(self._aside.put((mine, [len(boxes[number]) for number in mine], columns)))

    def get(self, image: int) -> list[Box]:
        """Return the boxes of an image."""
        block = image // self._images_a_block
        if self._last[0] != block:
            found: defaultdict[int, list[Box]] = defaultdict(list)
            for number in self._blocks.get(block, ()):
                images, counts, columns = self._aside.get(number)
                boxes = iter(boxes_of(columns))
                for of, count in zip(images, counts, strict=True):
                    found[of] += islice(boxes, count)
            self._last = block, found
        return self._last[1].get(image, [])


class _Drafts(Sequence[tuple[Draft, list[Problem]]]):
    """The images of a file, each put together when it is asked for."""

    def __init__(self, reader: _Reader, images: int) -> None:
        self._reader, self._images = reader, images

    def __len__(self) -> int:
        return self._images

    def __getitem__(self, number: Any) -> Any:
        return self._reader.draft(number)


def _attributes(entry: dict[str, JSON]) -> tuple[tuple[bool, bool, bool], dict[str, str]]:
    """Return the flags, and the other attributes as texts."""
    odd = "score" in entry and not _is_score(entry["score"])
    if "attributes" not in entry and not odd:
        return _NO_FLAGS, {}
    given = entry.get("attributes")
    given = dict(given) if isinstance(given, dict) else {}
    if odd:
        given.setdefault("score", entry["score"])
    difficult, truncated, occluded = texts = [to_text(given.get(name, "")).lower() for name in _FLAGS]
    for name, text in zip(_FLAGS, texts, strict=True):
        if text in _TRUE or text in _FALSE:
            given.pop(name, None)
    return (difficult in _TRUE, truncated in _TRUE, occluded in _TRUE), {
        HALVES.sub("\ufffd", name): HALVES.sub("\ufffd", to_text(value))
        for name, value in given.items()
        if value is not None
    }


def _is_score(value: JSON) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(to_number(value) or 0.0)


def _around(outline: Outline | None) -> Edges | None:
    """Return the box around an outline; None where there is none."""
    if isinstance(outline, Mask):
        from datacache.annotations.shapes.mask import bounds as mask_bounds

        return mask_bounds(outline)
    return None if outline is None else bounds(outline[0])


def _area(outline: Outline | None, edges: Edges) -> float:
    """Return the area in square pixels that is meant where a file gives none."""
    if isinstance(outline, Mask):
        from datacache.annotations.shapes.mask import area as mask_area

        return mask_area(outline)
    if isinstance(outline, Polygon):
        return area(outline)
    return side(edges[0], edges[2]) * side(edges[1], edges[3])


def _differs(area: JSON, edges: Edges) -> bool:
    """Tell whether an area is another than that of a box, not only another rounding of it."""
    own = (edges[2] - edges[0]) * (edges[3] - edges[1])
    return isinstance(area, float | int) and not (abs(area - own) < 0.01 or math.isclose(area, own, rel_tol=1e-3))


def _object(box: Box) -> str:
    """Write the members of an object that a box knows."""
    extra = box.extra or NOTHING
    width, height = side(box.x1, box.x2), side(box.y1, box.y2)
    bbox = ",".join(map(_digits, (box.x1, box.y1, width, height)))
    attributes: dict[str, str | bool] = dict(box.attributes)
    crowd = attributes.pop("iscrowd", "0") == "1"
    attributes |= {name: True for name in _FLAGS if getattr(box, name)}
    area = _area(extra.outline, box[1:5]) if extra.area is None else extra.area
    segmentation = "[]" if extra.outline is None else _segmentation(extra.outline)
    text = f'"bbox":[{bbox}],"area":{_digits(area)},"segmentation":{segmentation},"iscrowd":{int(crowd)}'
    if extra.keypoints is not None:
        points, visible = list(map(_digits, unpack(extra.keypoints.points))), extra.keypoints.visible
        flat = ",".join(f"{x},{y},{v}" for x, y, v in zip(points[0::2], points[1::2], visible, strict=True))
        text += f',"keypoints":[{flat}],"num_keypoints":{len(visible) - visible.count(0)}'
    if extra.score is not None:
        text += f',"score":{_digits(extra.score)}'
    return f'{text},"attributes":{json.dumps(attributes, sort_keys=True)}' if attributes else text


def _segmentation(outline: Outline) -> str:
    """Write a mask as run lengths, and a polygon, which has no holes here, as one list of numbers a ring."""
    if isinstance(outline, Mask):
        if outline.listed:
            from datacache.annotations.shapes.mask import runs

            counts = json.dumps(runs(outline).tolist(), separators=(",", ":"))
        else:
            counts = json.dumps(outline.counts.decode())
        return f'{{"size":[{outline.height},{outline.width}],"counts":{counts}}}'
    parts = [ring for ring, _ in rings(outline)] if isinstance(outline, Polygon) else [outline.corners]
    return "[" + ",".join("[" + ",".join(map(_digits, unpack(part))) + "]" for part in parts) + "]"


def _digits(value: float) -> str:
    """Return the shortest text that is read as the same number."""
    return str(int(value)) if value == int(value) else repr(float(value))
