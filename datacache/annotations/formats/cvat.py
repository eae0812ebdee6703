"""CVAT XML 1.1, for images and for video: one file about many images, or about the frames of a video.

Read: boxes, turned ones too, polygons, masks, points, skeletons, tags, and tracks of all of these. What has no outline
here (polylines, cuboids) becomes the box around it. Frames of a video are called as CVAT exports them, `frame_000012`;
their images may have other names (see `DraftFile.frames`). Coordinates have two decimals, as CVAT writes them.

expat reads the file a piece at a time and no tree is kept; nothing outside the file is opened, and entities are
refused. Used by the annotation table and by conversions. Pure, any thread; a reader reads one file.

Sources: docs.cvat.ai, "XML format"; cvat-ai/cvat `cvat/apps/dataset_manager/formats/cvat.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn
from xml.parsers import expat
from xml.sax.saxutils import escape, unescape

from datacache.annotations.formats.geometry import (
    MAX_MASK_PIXELS,
    MAX_POINTS,
    ROUND_POINTS,
    Geometry,
    ShapeError,
    around,
    inside,
)
from datacache.annotations.formats.json_stream import Data
from datacache.annotations.formats.values import parse_number
from datacache.annotations.model import Action, Annotation, Box, Draft, DraftFile, Problem, Problems, quote
from datacache.annotations.shapes.outline import (
    NOTHING,
    Extra,
    Keypoints,
    Mask,
    Polygon,
    Rotated,
    Skeleton,
    bounds,
    pack,
    unpack,
)
from datacache.core.errors import AnnotationError

MAX_TAG_BYTES: Final = 8 * 2**20
MAX_DEPTH: Final = 100
MAX_ELEMENTS: Final = 10_000_000
MAX_FRAMES: Final = 1_000_000
_PIECE: Final = 2**20
"""Fed to expat at once: of an element that is not complete it looks at all bytes again each time."""
_NO_RUNS: Final = re.compile(r"[^\d, ]")
_EDGE: Final = re.compile(r'<line\b[^>]*?\bdata-node-from="(\d+)"[^>]*?\bdata-node-to="(\d+)"')
_NODE: Final = re.compile(r'<circle\b[^>]*?\bdata-node-id="(\d+)"[^>]*?\bdata-label-name="([^"]*)"')
_FRAME: Final = re.compile(r"frame_\d{6,9}\.")
_IMAGE: Final = re.compile(rb"<image\b[^>]*>")
_GIVEN: Final = re.compile(rb'\b(name|subset)="([^"]*)"')
_MOVING: Final = ("xtl", "ytl", "xbr", "ybr", "rotation")

Attributes = dict[str, str]


class _Shape(NamedTuple):
    """A shape's element."""

    tag: str
    given: Attributes
    line: int
    attributes: tuple[tuple[str, str], ...] = ()
    nodes: tuple[Attributes, ...] = ()


def parse(data: Data, file: str, classes: Sequence[str] = ()) -> DraftFile:
    """Read every image of the file that it names, and every frame with an object. The labels of its `<meta>` are the
    classes. `AnnotationError` if it cannot be used."""
    return _CvatReader(file).read(data)


def is_frame(name: str) -> bool:
    """Tell whether an image is called as CVAT calls frames."""
    return _FRAME.match(name) is not None


def subsets(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the name and the subset of each image that has one; of a file that is not yet known to be one of CVAT's."""
    for tag in _IMAGE.findall(data):
        given = {name: unescape(text.decode("utf-8", "replace"), {"&quot;": '"'}) for name, text in _GIVEN.findall(tag)}
        if b"name" in given and given.get(b"subset"):
            yield given[b"name"], given[b"subset"]


class _CvatReader:
    """Reads one file: `read` once."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._of_file = Problems(file)
        self._path: list[str] = []
        self._text: list[str] = []
        self._elements = 0
        self._images: list[tuple[Draft, list[Problem]]] = []
        self._frames: dict[int, tuple[list[Box], list[str], Problems]] = {}
        self._problems = self._of_file
        self._given: Attributes = {}
        """Of the image or track that is open."""
        self._image: Attributes = {}
        """Says the size of the image that shapes are on."""
        self._line = 0
        self._boxes: list[Box] = []
        self._labels: list[str] = []
        self._track: list[tuple[int, _Shape]] = []
        self._shape = _Shape("", {}, 0)
        self._attribute = ""
        self._attributes: list[tuple[str, str]] = []
        self._nodes: list[Attributes] = []
        self._label: dict[str, str] = {}
        self._meta_labels: list[dict[str, str]] = []
        self._size = {"size": 0, "width": 0, "height": 0}
        self._orders: dict[str, list[str]] = {}
        """Label of a skeleton → its keypoints, those of the meta first."""

    def read(self, data: Data) -> DraftFile:
        """Read what the file says."""
        self._parser = parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text.append
        parser.EntityDeclHandler = parser.SkippedEntityHandler = self._refuse_entity
        try:
            for at in range(0, len(data), _PIECE):
                parser.Parse(bytes(data[at : at + _PIECE]), False)
                if at + _PIECE - parser.CurrentByteIndex > MAX_TAG_BYTES:
                    self._refuse("file-too-large", f"a tag has more than {MAX_TAG_BYTES:,} bytes")
            parser.Parse(b"", True)
        except expat.ExpatError as exc:
            why = expat.ErrorString(exc.code) if len(data) else "the file is empty"
            message = f"the XML is broken: {why}"
            raise AnnotationError(message, code="xml-broken", file=self._file, line=exc.lineno) from None
        finally:
            del self._parser  # it refers to our methods, and they to us
        frames = self._size["size"] if self._frames and not self._images else 0
        for frame, (boxes, labels, problems) in sorted(self._frames.items()):
            draft = Draft(self._file, f"frame_{frame:06d}", self._size["width"], self._size["height"], tuple(boxes))
            self._images.append((draft._replace(labels=tuple(labels)), problems))
        names = (label["name"] for label in self._meta_labels if "parent" not in label and label.get("name"))
        return DraftFile(self._images, self._of_file, tuple(dict.fromkeys(names)), self._skeletons(), frames=frames)

    # --- what expat calls ---

    def _start(self, tag: str, given: Attributes) -> None:
        path = self._path
        path.append(tag)
        self._text.clear()
        self._elements += 1
        depth = len(path)
        if depth > MAX_DEPTH or self._elements > MAX_ELEMENTS:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_ELEMENTS:,} elements"
            self._refuse("file-too-large", f"the file has more than {limit}")
        if depth == 1 and tag != "annotations":
            self._refuse("not-cvat", f"the file is no CVAT XML: its root element is <{tag[:60]}>")
        if depth == 2 and tag in ("image", "track"):
            self._given, self._line = given, self._parser.CurrentLineNumber
            self._boxes, self._labels, self._track = [], [], []
            self._problems = Problems(self._file) if tag == "image" else self._of_file
            self._image = given if tag == "image" else {side: str(self._size[side]) for side in ("width", "height")}
        elif depth > 2 and path[1] in ("image", "track"):
            if depth == 3:
                self._shape = _Shape(tag, given, self._parser.CurrentLineNumber)
                self._attributes, self._nodes = [], []
            elif depth == 4 and tag == "attribute":
                self._attribute = given.get("name", "")
            elif depth == 4 and path[2] == "skeleton":
                self._nodes.append(given)
        elif tag == "label" and path[-2] == "labels":
            self._label = {}

    def _end(self, tag: str) -> None:
        path, depth = self._path, len(self._path)
        kind = path[1] if depth > 1 else ""
        if kind == "meta":
            self._end_meta(tag, "".join(self._text).strip())
        elif kind in ("image", "track"):
            if depth == 4 and tag == "attribute":
                self._attributes.append((self._attribute, "".join(self._text)))
            elif depth == 3:
                shape = self._shape._replace(attributes=tuple(sorted(self._attributes)), nodes=tuple(self._nodes))
                if kind == "image":
                    self._take(shape, self._boxes, self._labels, self._problems)
                else:
                    self._take_frame(shape)
            elif depth == 2:
                self._end_image() if kind == "image" else self._end_track()
        self._text.clear()
        path.pop()

    def _refuse_entity(self, name: str, *_: object) -> NoReturn:
        self._refuse("xml-entities", f"the file declares or uses the entity {quote(name)}; such files are not read")

    # --- meta ---

    def _end_meta(self, tag: str, text: str) -> None:
        path = self._path
        if tag == "label" and path[-2] == "labels":
            self._meta_labels.append(self._label)
        elif path[-2] == "label" and tag in ("name", "parent", "svg"):
            self._label[tag] = text
            if tag == "parent":
                self._orders.setdefault(text, []).append(self._label.get("name", ""))
        elif (tag == "size" and path[-2] in ("task", "job")) or (
            path[-2] == "original_size" and tag in ("width", "height")
        ):
            number = parse_number(text)
            self._size[tag] = int(number) if number is not None and 0 <= number <= 1e9 else 0

    def _skeletons(self) -> dict[str, Skeleton]:
        drawn = {label.get("name", ""): label.get("svg", "") for label in self._meta_labels}
        found = {}
        for label, names in self._orders.items():
            places = {name: place for place, name in enumerate(names)}
            nodes = {number: places.get(_unescaped(name)) for number, name in _NODE.findall(drawn.get(label, ""))}
            pairs = ((nodes.get(one), nodes.get(other)) for one, other in _EDGE.findall(drawn.get(label, "")))
            edges = tuple((one, other) for one, other in pairs if one is not None and other is not None)
            found[label] = Skeleton(tuple(names), edges)
        return found

    # --- images and tracks ---

    def _end_image(self) -> None:
        given, problems = self._given, self._problems
        name, subset = given.get("name", ""), given.get("subset", "")
        if not name:
            self._of_file.add("image-unnamed", "skipped", "an <image> has no name; it is left out", self._line)
            return
        width, height = (self._pixels(given, side) for side in ("width", "height"))
        placed = f"{subset}/{name}" if subset and not name.startswith(f"{subset}/") else name
        draft = Draft(self._file, placed, width, height, tuple(self._boxes), tuple(self._labels), self._line)
        self._images.append((draft, problems))

    def _pixels(self, given: Mapping[str, str], side: str) -> int:
        text = given.get(side, "0")
        value = parse_number(text)
        if value is not None and value.is_integer() and 0 <= value <= 1e9:
            return int(value)
        message = f"the {side} of the image is {quote(text)}, which is no number of pixels"
        self._problems.append(Problem("size-text", "noted", self._file, self._line, message))
        return 0

    def _take_frame(self, shape: _Shape) -> None:
        text = shape.given.get("frame", "")
        if text.isascii() and text.isdigit() and len(text) < 10 and int(text) < MAX_FRAMES:
            self._track.append((int(text), shape))
        else:
            message = f"the frame {quote(text)} of a track is none of a video; the object is left out"
            self._of_file.add("entry-malformed", "skipped", message, shape.line)

    def _end_track(self) -> None:
        """Give each frame its shape. Where frames between two that the file has are missing, the shape moves evenly."""
        self._track.sort(key=lambda pair: pair[0])
        made = 0
        for n, (frame, shape) in enumerate(self._track):
            if shape.given.get("outside") == "1":
                continue
            self._take_at(frame, shape)
            if n + 1 == len(self._track):
                break
            until, then = self._track[n + 1]
            for between in range(frame + 1, until):
                if between >= (self._size["size"] or until):
                    break
                made += 1
                self._elements += 1
                if self._elements > MAX_ELEMENTS:
                    raise AnnotationError(
                        f"the file has more than {MAX_ELEMENTS:,} elements", code="file-too-large", file=self._file
                    )
                self._take_at(between, _between(shape, then, (between - frame) / (until - frame)))
        if made:
            message = f"a track has no shape in {made:,} frame(s) between others; it is taken to move evenly there"
            self._of_file.add("track-interpolated", "noted", message, self._line)

    def _take_at(self, frame: int, shape: _Shape) -> None:
        boxes, labels, problems = self._frames.setdefault(frame, ([], [], Problems(self._file)))
        track = self._given
        given = {name: track[name] for name in ("label", "source", "group_id") if name in track} | shape.given
        self._take(shape._replace(given=given), boxes, labels, problems, track.get("id", ""))

    # --- shapes ---

    def _take(
        self, shape: _Shape, boxes: list[Box], labels: list[str], problems: list[Problem], track: str = ""
    ) -> None:
        """Add the object or the label of an image that a shape is, or a problem."""

        def report(code: str, action: Action, message: str) -> None:
            problems.append(Problem(code, action, self._file, shape.line, message))

        tag, given = shape.tag, shape.given
        label = given.get("label", "")
        if tag == "tag":
            labels.append(label)
            if shape.attributes:
                report("element-ignored", "noted", f"the attributes of the tag {quote(label)} are passed over")
            return
        read = _SHAPES.get(tag)
        if read is None and tag != "skeleton":
            report("element-ignored", "noted", f"<{tag[:60]}> is passed over")
            return
        try:
            found = self._skeleton(label, shape.nodes) if read is None else read(given, self._image)
        except ShapeError as exc:
            report(exc.code, "skipped", f"the {tag} {quote(label)} {exc}; the object is left out")
            return
        if tag in ("polyline", "cuboid"):
            report("shape-boxed", "noted", f"the {tag} {quote(label)} is taken as the box around it")
        elif tag == "ellipse":
            report("shape-approximated", "noted", f"the ellipse {quote(label)} is taken as a polygon")
        boxes.append(_box(shape, label, found, track))

    def _skeleton(self, label: str, nodes: Sequence[Attributes]) -> Geometry:
        order = self._orders.setdefault(label, [])
        known = set(order)
        for node in nodes:
            if node.get("label", "") not in known:
                order.append(node.get("label", ""))
                known.add(order[-1])
        if len(order) > MAX_POINTS:
            raise ShapeError("shape-too-large", f"has more than {MAX_POINTS:,} points")
        given = {node.get("label", ""): node for node in nodes}
        points: list[float] = []
        visible = bytearray()
        for name in order:
            node = given.get(name, {"outside": "1"})
            there = node.get("points") is not None
            points += unpack(_points(node))[:2] if there else (0.0, 0.0)
            visible.append(0 if node.get("outside") == "1" or not there else 2 - (node.get("occluded") == "1"))
        seen = pack(v for n, v in enumerate(points) if visible[n // 2])
        if not seen:
            raise ShapeError("box-missing", "has no keypoint that is there")
        return Geometry(around(seen, *_size(self._image)), None, Keypoints(pack(points), bytes(visible)))

    def _refuse(self, code: str, message: str) -> NoReturn:
        raise AnnotationError(message, code=code, file=self._file, line=self._parser.CurrentLineNumber)


# --- geometry --------------------------------------------------------------------------------------------------------


def _number(given: Mapping[str, str], name: str) -> float:
    text = given.get(name)
    if text is None:
        raise ShapeError("box-missing", f"has no {name}")
    value = parse_number(text)
    if value is None:
        raise ShapeError("box-text", f"has the {name} {quote(text)}, which is no number")
    return value


def _points(given: Mapping[str, str]) -> bytes:
    text = given.get("points")
    if not text:
        raise ShapeError("box-missing", "has no points")
    if text.count(";") >= MAX_POINTS:
        raise ShapeError("shape-too-large", f"has more than {MAX_POINTS:,} points")
    values: list[float] = []
    try:
        for pair in text.split(";"):
            x, y = pair.split(",")
            values += float(x), float(y)
    except ValueError:
        values = []
    if not values or "_" in text:  # 1_000 is a number to Python alone
        raise ShapeError("box-text", f"has the points {quote(text)}, which are none")
    return pack(values)


def _size(image: Mapping[str, str]) -> tuple[float, float]:
    width, height = (parse_number(image.get(side, "")) or math.inf for side in ("width", "height"))
    return width, height


def _read_box(given: Mapping[str, str], image: Mapping[str, str]) -> Geometry:
    x1, y1, x2, y2 = (_number(given, side) for side in ("xtl", "ytl", "xbr", "ybr"))
    degrees = _number(given, "rotation") if "rotation" in given else 0.0
    if degrees % 360 == 0 or not math.isfinite(degrees):
        return Geometry((x1, y1, x2, y2))
    corners = pack(_turned([(x1, y1), (x2, y1), (x2, y2), (x1, y2)], (x1 + x2) / 2, (y1 + y2) / 2, degrees))
    return Geometry(inside(bounds(corners), *_size(image)), Rotated(corners))


def _turned(points: Iterable[tuple[float, float]], x: float, y: float, degrees: float) -> Iterator[float]:
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    for px, py in points:
        yield x + (px - x) * cosine - (py - y) * sine
        yield y + (px - x) * sine + (py - y) * cosine


def _read_polygon(given: Mapping[str, str], _image: Mapping[str, str]) -> Geometry:
    points = _points(given)
    return Geometry(bounds(points), Polygon(points))


def _read_points(given: Mapping[str, str], image: Mapping[str, str]) -> Geometry:
    points = _points(given)
    return Geometry(around(points, *_size(image)), None, Keypoints(points, b"\2" * (len(points) // 16)))


def _read_polyline(given: Mapping[str, str], image: Mapping[str, str]) -> Geometry:
    return Geometry(around(_points(given), *_size(image)))


def _read_ellipse(given: Mapping[str, str], image: Mapping[str, str]) -> Geometry:
    x, y, across, down = (_number(given, name) for name in ("cx", "cy", "rx", "ry"))
    turns = (2 * math.pi * n / ROUND_POINTS for n in range(ROUND_POINTS))
    points = [(x + across * math.cos(turn), y + down * math.sin(turn)) for turn in turns]
    degrees = _number(given, "rotation") if "rotation" in given else 0.0
    outline = Polygon(pack(_turned(points, x, y, degrees if math.isfinite(degrees) else 0.0)))
    return Geometry(inside(bounds(outline.points), *_size(image)), outline)


def _read_cuboid(given: Mapping[str, str], image: Mapping[str, str]) -> Geometry:
    names = [f"{down}{across}{face}" for down in "tb" for across in "lr" for face in "12"]
    points = pack(_number(given, f"{axis}{name}") for name in names for axis in "xy")
    return Geometry(around(points, *_size(image)))


def _read_mask(given: Mapping[str, str], image: Mapping[str, str]) -> Geometry:
    import numpy as np

    from datacache.annotations.shapes import mask as masks

    left, top, width, height = (_number(given, name) for name in ("left", "top", "width", "height"))
    whole = tuple(_number(image, side) for side in ("width", "height"))
    if not all(value.is_integer() for value in (left, top, width, height, *whole)):
        raise ShapeError("mask-broken", "has a place or a size that is no whole number")
    if not (0 <= left < left + width <= whole[0] and 0 <= top < top + height <= whole[1]):
        raise ShapeError("mask-size", "reaches beyond its image")
    if width * height > MAX_MASK_PIXELS:
        raise ShapeError("shape-too-large", f"has a mask of more than {MAX_MASK_PIXELS:,} pixels")
    text = given.get("rle", "")
    try:
        runs = np.fromstring(text, np.int64, sep=",")
    except ValueError:  # NumPy 1 gives the numbers up to there
        runs = np.array([], np.int64)
    if _NO_RUNS.search(text) or not len(runs) == text.count(",") + 1 or runs.max() > width * height:
        raise ShapeError("mask-broken", "has run lengths that are none")
    if runs.sum() != width * height:
        raise ShapeError(
            "mask-broken", f"has run lengths of {runs.sum():,} pixels, and its size is {width * height:,.0f}"
        )
    pixels = np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(int(height), int(width))
    if np.count_nonzero(pixels[1:] != pixels[:-1]) > masks.MAX_COUNTS:
        raise ShapeError("shape-too-large", f"has a mask with more than {masks.MAX_COUNTS:,} runs")
    mask = masks.encode(pixels, int(left), int(top), int(whole[0]), int(whole[1]))
    around = masks.bounds(mask)
    if around is None:
        raise ShapeError("mask-broken", "has no pixel")
    x1, y1, x2, y2 = around
    return Geometry((float(x1), float(y1), float(x2), float(y2)), mask)


_SHAPES: Final[dict[str, Callable[[Mapping[str, str], Mapping[str, str]], Geometry]]] = {
    "box": _read_box,
    "cuboid": _read_cuboid,
    "ellipse": _read_ellipse,
    "mask": _read_mask,
    "points": _read_points,
    "polygon": _read_polygon,
    "polyline": _read_polyline,
}


def _between(shape: _Shape, then: _Shape, share: float) -> _Shape:
    """Return a shape on its way to another one; one that cannot move evenly stays as it is."""
    given = {**shape.given, "keyframe": "0"}
    try:
        for name in _MOVING:
            if name in shape.given and name in then.given:
                one, other = _number(shape.given, name), _number(then.given, name)
                given[name] = repr(one + (other - one) * share)
        if "points" in shape.given:
            here, there = unpack(_points(shape.given)), unpack(_points(then.given))
            if len(here) == len(there):
                moved = [a + (b - a) * share for a, b in zip(here, there, strict=True)]
                pairs = zip(moved[0::2], moved[1::2], strict=True)
                given["points"] = ";".join(f"{x!r},{y!r}" for x, y in pairs)
    except ShapeError:
        pass
    return shape._replace(given=given)


def _box(shape: _Shape, label: str, found: Geometry, track: str) -> Box:
    given = shape.given
    attributes = [(name, value) for name, value in shape.attributes if (name, value) not in _FLAGS]
    attributes += [(name, given[name]) for name, usual in _USUAL if given.get(name, usual) != usual]
    author = given.get("source", "manual")
    extra = Extra(
        found.outline,
        found.keypoints,
        _whole(track),
        _whole(given.get("group_id", "")),
        author="" if author == "manual" else author,
    )
    return Box(
        label,
        *found.edges,
        difficult=_FLAGS[0] in shape.attributes,
        truncated=_FLAGS[1] in shape.attributes,
        occluded=given.get("occluded") == "1",
        attributes=tuple(sorted(attributes)),
        line=shape.line,
        extra=None if extra == NOTHING else extra,
    )


_FLAGS: Final = (("difficult", "true"), ("truncated", "true"))
_USUAL: Final = (("keyframe", "1"), ("z_order", "0"))
"""Parts of every shape of CVAT; attributes where they are something else."""


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else -1


def _unescaped(text: str) -> str:
    return unescape(text, {code: character for character, code in _SPACES.items()})


# --- writing ---------------------------------------------------------------------------------------------------------

_UNWRITABLE: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(
    images: Iterable[tuple[str, Annotation]], classes: Sequence[str], skeletons: Mapping[str, Skeleton], count: int
) -> Iterator[bytes]:
    """Write the file of `count` images, given with their splits; '' for none. The same bytes for the same images."""
    yield _head(classes, skeletons, count, "annotation")
    for number, (split, annotation) in enumerate(images):
        subset = f" subset={_quoted(split)}" if split else ""
        lines = [f'  <image id="{number}" name={_quoted(annotation.path)}{subset}']
        lines.append(f' width="{annotation.width}" height="{annotation.height}">\n')
        lines += [f'    <tag label={_quoted(label)} source="manual">\n    </tag>\n' for label in annotation.labels]
        lines += [_shape_text(box, skeletons, f"label={_quoted(box.label)}", "") for box in annotation.boxes]
        yield ("".join(lines) + "  </image>\n").encode("utf-8")
    yield b"</annotations>\n"


def write_video(
    frames: Iterable[tuple[int, Annotation]], classes: Sequence[str], skeletons: Mapping[str, Skeleton], count: int
) -> Iterator[bytes]:
    """Write the file of a video with `count` frames. An object without a track is one of a single frame, and so are
    those of one track and another class."""
    tracks: dict[tuple[int, str], list[tuple[int, Box]]] = {}
    size, alone = (0, 0), 0
    for frame, annotation in frames:
        size = size if any(size) else (annotation.width, annotation.height)
        for box in annotation.boxes:
            track = (box.extra or NOTHING).track
            alone -= track < 0
            tracks.setdefault((track if track >= 0 else alone, box.label), []).append((frame, box))
    yield _head(classes, skeletons, count, "interpolation", size)
    taken: set[int] = set()
    following = max([track for track, _ in tracks] or [0]) + 1
    for (track, label), shapes in sorted(
        tracks.items(), key=lambda item: (item[0][0] < 0, abs(item[0][0]), item[0][1])
    ):
        number = track
        if track < 0 or track in taken:
            number, following = following, following + 1
        taken.add(number)
        yield _track_text(number, label, shapes, skeletons, count).encode("utf-8")
    yield b"</annotations>\n"


def _track_text(
    number: int, label: str, shapes: Sequence[tuple[int, Box]], skeletons: Mapping[str, Skeleton], count: int
) -> str:
    extra = shapes[0][1].extra or NOTHING
    group = f' group_id="{extra.group}"' if extra.group >= 0 else ""
    lines = [f'  <track id="{number}" label={_quoted(label)} source={_quoted(extra.author or "manual")}{group}>\n']
    for n, (frame, box) in enumerate(shapes):
        keyframe = "0" if ("keyframe", "0") in box.attributes else "1"
        lines.append(_shape_text(box, skeletons, "", f' frame="{frame}" keyframe="{keyframe}" outside="0"'))
        until = shapes[n + 1][0] if n + 1 < len(shapes) else count
        if frame + 1 < until:
            lines.append(_shape_text(box, skeletons, "", f' frame="{frame + 1}" keyframe="1" outside="1"'))
    return "".join((*lines, "  </track>\n"))


def _head(
    classes: Sequence[str],
    skeletons: Mapping[str, Skeleton],
    count: int,
    mode: str,
    size: tuple[int, int] | None = None,
) -> bytes:
    labels = []
    for name in classes:
        skeleton = skeletons.get(name)
        kind, svg = ("any", "") if skeleton is None else ("skeleton", f"<svg>{_text(_svg(skeleton))}</svg>")
        labels.append(f"<label><name>{_text(name)}</name><type>{kind}</type><attributes></attributes>{svg}</label>")
        for point in () if skeleton is None else skeleton.names:
            parent = f"<parent>{_text(name)}</parent>"
            labels.append(
                f"<label><name>{_text(point)}</name><type>points</type><attributes></attributes>{parent}</label>"
            )
    shown = "".join(f"        {label}\n" for label in labels)
    original = (
        f"      <original_size><width>{size[0]}</width><height>{size[1]}</height></original_size>\n" if size else ""
    )
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n  <version>1.1</version>\n  <meta>\n    <task>\n'
        f"      <size>{count}</size>\n      <mode>{mode}</mode>\n      <labels>\n{shown}      </labels>\n{original}"
        "    </task>\n  </meta>\n"
    ).encode()


def _svg(skeleton: Skeleton) -> str:
    """Return what names the nodes and edges of a skeleton; CVAT's own also says where to draw them."""
    edges = (
        f'<line data-type="edge" data-node-from="{a + 1}" data-node-to="{b + 1}"></line>' for a, b in skeleton.edges
    )
    nodes = (
        f'<circle data-type="element node" data-node-id="{n}" data-label-name={_quoted(name)}></circle>'
        for n, name in enumerate(skeleton.names, 1)
    )
    return "".join((*edges, *nodes))


def _shape_text(box: Box, skeletons: Mapping[str, Skeleton], named: str, more: str) -> str:
    """Return the element of an object. `named` says its label, or nothing in a track; `more` are a frame's."""
    extra = box.extra or NOTHING
    own = dict(box.attributes)
    attributes = list(box.attributes)
    z_order = own.get("z_order", "0")
    if re.fullmatch(r"-?\d+", z_order):
        attributes = [pair for pair in attributes if pair[0] != "z_order"]
    else:
        z_order = "0"
    if not named:
        attributes = [pair for pair in attributes if pair[0] != "keyframe"]
    attributes += [pair for pair, flag in zip(_FLAGS, (box.difficult, box.truncated), strict=True) if flag]
    head = named
    if named:
        head += f" source={_quoted(extra.author or 'manual')}"
        head += f' group_id="{extra.group}"' if extra.group >= 0 else ""
    head += f'{more} occluded="{box.occluded:d}"'
    tag, given, inner = _geometry(box, extra, skeletons)
    pairs = "".join(
        f"      <attribute name={_quoted(name)}>{_text(value)}</attribute>\n" for name, value in sorted(attributes)
    )
    return f'    <{tag} {head.strip()}{given} z_order="{z_order}">\n{inner}{pairs}    </{tag}>\n'


def _geometry(box: Box, extra: Extra, skeletons: Mapping[str, Skeleton]) -> tuple[str, str, str]:
    """Return the tag, the attributes and the elements of an object's geometry."""
    outline, keypoints = extra.outline, extra.keypoints
    if isinstance(outline, Polygon) and outline.points and not outline.ends:
        return "polygon", f' points="{_points_text(unpack(outline.points))}"', ""
    if isinstance(outline, Mask):
        return "mask", _mask_text(outline), ""
    if isinstance(outline, Rotated):
        return "box", _rotated_text(unpack(outline.corners)), ""
    if keypoints is not None and keypoints.visible:
        values, skeleton = unpack(keypoints.points), skeletons.get(box.label)
        if skeleton is None or len(skeleton.names) != len(keypoints.visible):
            return "points", f' points="{_points_text(values)}"', ""
        nodes = "".join(
            f'      <points label={_quoted(name)} outside="{seen == 0:d}" occluded="{seen == 1:d}" '
            f'points="{_points_text(values[2 * n : 2 * n + 2])}">\n      </points>\n'
            for n, (name, seen) in enumerate(zip(skeleton.names, keypoints.visible, strict=True))
        )
        return "skeleton", "", nodes
    return "box", _sides_text(box.x1, box.y1, box.x2, box.y2), ""


def _sides_text(*sides: float) -> str:
    return "".join(f' {name}="{side:.2f}"' for name, side in zip(_MOVING, sides, strict=False))


def _points_text(values: Sequence[float]) -> str:
    return ";".join(f"{x:.2f},{y:.2f}" for x, y in zip(values[0::2], values[1::2], strict=True))


def _rotated_text(corners: Sequence[float]) -> str:
    ax, ay, bx, by, _, _, dx, dy = corners
    x, y = sum(corners[0::2]) / 4, sum(corners[1::2]) / 4
    across, down = math.hypot(bx - ax, by - ay) / 2, math.hypot(dx - ax, dy - ay) / 2
    degrees = f"{math.degrees(math.atan2(by - ay, bx - ax)) % 360:.2f}"
    turn = f' rotation="{degrees}"' if degrees not in ("0.00", "360.00") else ""
    return _sides_text(x - across, y - down, x + across, y + down) + turn


def _mask_text(mask: Mask) -> str:
    import numpy as np

    from datacache.annotations.shapes import mask as masks

    left, top, right, bottom = masks.bounds(mask) or (0, 0, 1, 1)
    rows: Any = masks.decode(mask, (left, top, right, bottom)).ravel()
    edges = np.flatnonzero(rows[1:] != rows[:-1]) + 1
    runs = np.diff(edges, prepend=0, append=rows.size).tolist()
    text = ", ".join(map(str, [0, *runs] if rows[0] else runs))
    return f' rle="{text}" left="{left}" top="{top}" width="{right - left}" height="{bottom - top}"'


_SPACES: Final = {"\n": "&#10;", "\r": "&#13;", "\t": "&#9;", '"': "&quot;"}


def _quoted(text: str) -> str:
    return f'"{escape(_written(text), _SPACES)}"'


def _text(text: str) -> str:
    return escape(_written(text), {"\r": "&#13;"})


def _written(text: str) -> str:
    return _UNWRITABLE.sub("\ufffd", text)
