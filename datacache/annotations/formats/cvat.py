"""CVAT XML 1.1, for images and for video: one file about many images, or about the frames of a video.

Read: boxes, turned ones too, polygons, masks, points, skeletons, tags, and tracks of all of these. What has no outline
here (polylines, cuboids) becomes the box around it. Frames of a video are called as CVAT exports them, `frame_000012`;
their images may have other names (see `DraftFile.frames`). What is within a shape's element is `cvat_shapes`' part.

expat reads the file a piece at a time and no tree is kept; nothing outside the file is opened, and entities are
refused. Used by the annotation table and by conversions. Pure, any thread; a reader reads one file.

Sources: docs.cvat.ai, "XML format"; cvat-ai/cvat `cvat/apps/dataset_manager/formats/cvat.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NoReturn
from xml.parsers import expat

from datacache.annotations.formats.cvat_shapes import (
    SHAPES,
    Attributes,
    CvatShape,
    box_of,
    number_of,
    points_of,
    quoted,
    shape_between,
    shape_text,
    size_of,
    text_of,
    unescaped,
)
from datacache.annotations.formats.geometry import (
    MAX_POINTS,
    Geometry,
    MaskBudget,
    ShapeError,
    around,
    parted,
    rejoined,
)
from datacache.annotations.formats.json_stream import Data
from datacache.annotations.formats.values import parse_number
from datacache.annotations.formats.xml_encoding import unknown_encoding
from datacache.annotations.model import Action, Annotation, Box, Draft, DraftFile, Problem, Problems, quote
from datacache.annotations.shapes.outline import NOTHING, Keypoints, Skeleton, pack, unpack
from datacache.core.errors import AnnotationError

MAX_TAG_BYTES: Final = 8 * 2**20
MAX_DEPTH: Final = 100
MAX_ELEMENTS: Final = 10_000_000
MAX_FRAMES: Final = 1_000_000
MAX_MADE: Final = 2**18
"""Points that are made where the file has none: of a track between its shapes, and of keypoints that are not there."""
_ELEMENTS, _BYTES_AN_ELEMENT = 20_000, 24
"""Elements that say something have so many bytes each, and a file may have so many more elements than that gives."""
_PIECE: Final = 2**20
"""Fed to expat at once: of an element that is not complete it looks at all bytes again each time."""
_DRAWN: Final = re.compile(r"<(?:line|circle)\b[^<>]*>")
_DRAWN_DATA: Final = re.compile(r'\bdata-(node-from|node-to|node-id|label-name)="([^"]*)"')
_FRAME: Final = re.compile(r"frame_\d{6,9}\.")


def parse(data: Data, file: str, classes: Sequence[str] = ()) -> DraftFile:
    """Read every image of the file that it names, and every frame with an object. The labels of its `<meta>` are the
    classes. `AnnotationError` if it cannot be used."""
    return _CvatReader(file).read(data)


def is_frame(name: str) -> bool:
    """Tell whether an image is called as CVAT calls frames."""
    return _FRAME.match(name) is not None


def subsets(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the name and the subset of each image that has one, up to where the file cannot be read."""
    found: list[tuple[str, str]] = []

    def start(tag: str, given: Attributes) -> None:
        if tag == "image" and given.get("name") and given.get("subset"):
            found.append((given["name"], given["subset"]))

    def refuse(*_: object) -> NoReturn:
        raise expat.ExpatError

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EntityDeclHandler = parser.SkippedEntityHandler = refuse
    try:
        for at in range(0, len(data), _PIECE):
            parser.Parse(data[at : at + _PIECE], False)
            yield from found
            found.clear()
            if at + _PIECE - parser.CurrentByteIndex > MAX_TAG_BYTES:
                return
    except (expat.ExpatError, LookupError, ValueError):  # the last two of a declared encoding
        yield from found


class _CvatReader:
    """Reads one file: `read` once."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._of_file = Problems(file)
        self._path: list[str] = []
        self._text: list[str] = []
        self._elements = self._made = 0
        self._most_elements = 0
        self._masks = MaskBudget(0)
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
        self._track: list[tuple[int, CvatShape]] = []
        self._shape = CvatShape("", {}, 0)
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
        self._masks = MaskBudget(len(data))
        try:
            for at in range(0, len(data), _PIECE):
                self._most_elements = min(_ELEMENTS + (at + _PIECE) // _BYTES_AN_ELEMENT, MAX_ELEMENTS)
                parser.Parse(bytes(data[at : at + _PIECE]), False)
                if at + _PIECE - parser.CurrentByteIndex > MAX_TAG_BYTES:
                    self._refuse("file-too-large", f"a tag has more than {MAX_TAG_BYTES:,} bytes")
            parser.Parse(b"", True)
        except expat.ExpatError as exc:
            why = expat.ErrorString(exc.code) if len(data) else "the file is empty"
            message = f"the XML is broken: {why}"
            raise AnnotationError(message, code="xml-broken", file=self._file, line=exc.lineno) from None
        except (LookupError, ValueError) as exc:
            if self._elements or isinstance(exc, AnnotationError):
                raise
            raise unknown_encoding(self._file, f"{exc}") from None  # of the declaration, which expat cannot read
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
        if depth > MAX_DEPTH or self._elements > self._most_elements:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{self._most_elements:,} elements up to here"
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
                self._shape = CvatShape(tag, given, self._parser.CurrentLineNumber)
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
            elements = [dict(_DRAWN_DATA.findall(tag)) for tag in _DRAWN.findall(drawn.get(label, ""))]
            nodes = {given.get("node-id"): places.get(unescaped(given.get("label-name", ""))) for given in elements}
            ends = (
                (given["node-from"], given["node-to"]) for given in elements if {"node-from", "node-to"} <= {*given}
            )
            pairs = ((nodes.get(one), nodes.get(other)) for one, other in ends)
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
        draft = Draft(self._file, placed, width, height, rejoined(self._boxes), tuple(self._labels), self._line)
        self._images.append((draft._replace(subset=subset), problems))

    def _pixels(self, given: Mapping[str, str], side: str) -> int:
        text = given.get(side, "0")
        value = parse_number(text)
        if value is not None and value.is_integer() and 0 <= value <= 1e9:
            return int(value)
        message = f"the {side} of the image is {quote(text)}, which is no number of pixels"
        self._problems.append(Problem("size-text", "noted", self._file, self._line, message))
        return 0

    def _take_frame(self, shape: CvatShape) -> None:
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
            missing = range(frame + 1, min(until, self._size["size"] or until))
            made += len(missing)
            self._make(len(missing) * (2 + shape.given.get("points", "").count(";") + len(shape.nodes)))
            for between in missing:
                self._take_at(between, shape_between(shape, then, (between - frame) / (until - frame)))
        if made:
            message = f"a track has no shape in frames between others ({made:,}); it is taken to move evenly there"
            self._of_file.add("track-interpolated", "noted", message, self._line)

    def _take_at(self, frame: int, shape: CvatShape) -> None:
        boxes, labels, problems = self._frames.setdefault(frame, ([], [], Problems(self._file)))
        track = self._given
        given = {name: track[name] for name in ("label", "source", "group_id") if name in track} | shape.given
        self._take(shape._replace(given=given), boxes, labels, problems, track.get("id", ""))

    # --- shapes ---

    def _take(
        self, shape: CvatShape, boxes: list[Box], labels: list[str], problems: list[Problem], track: str = ""
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
        read = SHAPES.get(tag)
        if read is None and tag != "skeleton":
            report("element-ignored", "noted", f"<{tag[:60]}> is passed over")
            return
        try:
            if tag == "mask":
                self._masks.spend(number_of(given, "width") * number_of(given, "height"))
            found = self._skeleton(label, shape.nodes) if read is None else read(given, self._image)
        except ShapeError as exc:
            report(exc.code, "skipped", f"the {tag} {quote(label)} {exc}; the object is left out")
            return
        if tag in ("polyline", "cuboid"):
            report("shape-boxed", "noted", f"the {tag} {quote(label)} is taken as the box around it")
        elif tag == "ellipse":
            report("shape-approximated", "noted", f"the ellipse {quote(label)} is taken as a polygon")
        boxes.append(box_of(shape, label, found, track))

    def _skeleton(self, label: str, nodes: Sequence[Attributes]) -> Geometry:
        order = self._orders.setdefault(label, [])
        self._make(max(len(order) - len(nodes), 0))
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
            points += unpack(points_of(node))[:2] if there else (0.0, 0.0)
            visible.append(0 if node.get("outside") == "1" or not there else 2 - (node.get("occluded") == "1"))
        seen = pack(v for n, v in enumerate(points) if visible[n // 2])
        if not seen:
            raise ShapeError("box-missing", "has no keypoint that is there")
        return Geometry(around(seen, *size_of(self._image)), None, Keypoints(pack(points), bytes(visible)))

    def _make(self, points: int) -> None:
        """Count points that are made, before they are: few bytes can ask for millions."""
        self._made += points
        if self._made > MAX_MADE:
            self._refuse("file-too-large", f"more than {MAX_MADE:,} points would have to be made that the file has not")

    def _refuse(self, code: str, message: str) -> NoReturn:
        raise AnnotationError(message, code=code, file=self._file, line=self._parser.CurrentLineNumber)


# --- writing ---------------------------------------------------------------------------------------------------------


def write(
    images: Iterable[tuple[str, Annotation]], classes: Sequence[str], skeletons: Mapping[str, Skeleton], count: int
) -> Iterator[bytes]:
    """Write the file of `count` images, given with their splits; '' for none. The same bytes for the same images."""
    yield _head(classes, skeletons, count, "annotation")
    for number, (split, annotation) in enumerate(images):
        subset = f" subset={quoted(split)}" if split else ""
        lines = [f'  <image id="{number}" name={quoted(annotation.path)}{subset}']
        lines.append(f' width="{annotation.width}" height="{annotation.height}">\n')
        lines += [f'    <tag label={quoted(label)} source="manual">\n    </tag>\n' for label in annotation.labels]
        lines += [shape_text(box, skeletons, f"label={quoted(box.label)}", "") for box in parted(annotation)]
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
    lines = [f'  <track id="{number}" label={quoted(label)} source={quoted(extra.author or "manual")}{group}>\n']
    for n, (frame, box) in enumerate(shapes):
        keyframe = "0" if ("keyframe", "0") in box.attributes else "1"
        lines.append(shape_text(box, skeletons, "", f' frame="{frame}" keyframe="{keyframe}" outside="0"'))
        until = shapes[n + 1][0] if n + 1 < len(shapes) else count
        if frame + 1 < until:
            lines.append(shape_text(box, skeletons, "", f' frame="{frame + 1}" keyframe="1" outside="1"'))
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
        kind, svg = ("any", "") if skeleton is None else ("skeleton", f"<svg>{text_of(_svg(skeleton))}</svg>")
        labels.append(f"<label><name>{text_of(name)}</name><type>{kind}</type><attributes></attributes>{svg}</label>")
        for point in () if skeleton is None else skeleton.names:
            parent = f"<parent>{text_of(name)}</parent>"
            labels.append(
                f"<label><name>{text_of(point)}</name><type>points</type><attributes></attributes>{parent}</label>"
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
        f'<circle data-type="element node" data-node-id="{n}" data-label-name={quoted(name)}></circle>'
        for n, name in enumerate(skeleton.names, 1)
    )
    return "".join((*edges, *nodes))
