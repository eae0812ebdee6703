"""Pascal VOC: one XML file an image.

What the numbers mean differs. The devkit of the challenge counts pixels from 1 and includes the last one (`origin=1`: a
box around the first pixel is 1, 1, 1, 1); LabelImg, CVAT and nearly every tool since write pixel edges (`origin=0`: the
same box is 0, 0, 1, 1).

`parse` reads what most tools write, as they write it, with a few regular expressions, and everything else (other
elements, comments, entities, encodings, all that is wrong) with expat (`VocReader`); both give the same
(`test_voc.py` holds them together), the first at a third of the cost of building a tree.

Used by the annotation table and by conversions. Pure, any thread.

With expat, elements are looked at as they come, and only those that mean something are kept, so a file costs no tree.
Nothing outside the file is ever opened, and what could make a small file large (entities, default values of attributes)
is refused. Coordinates found by their text are made once and never changed. A `VocReader` reads one file, in one
thread."""

from __future__ import annotations

import re
from decimal import Context, Decimal
from html import escape
from typing import Final, NoReturn
from xml.parsers import expat

from datacache.annotations.formats.values import parse_number
from datacache.annotations.formats.xml_encoding import decode
from datacache.annotations.model import Action, Annotation, Box, Draft, Problem, quote
from datacache.core.errors import AnnotationError

MAX_DEPTH: Final = 100
MAX_ELEMENTS: Final = 1_000_000
MAX_OBJECTS: Final = 100_000
"""More of them are refused: no annotation of one image has so many, and they would not fit into memory."""

_SIDES: Final = ("xmin", "ymin", "xmax", "ymax")
_FLAGS: Final = ("difficult", "truncated", "occluded")
_ONCE: Final = frozenset({"name", "pose", "bndbox", *_FLAGS})
_CONTAINERS: Final = frozenset({"bndbox", "attributes", "actions"})
"""Children of an object whose own children mean something."""
_ROOT, _OBJECT, _WRAPPER = "annotation", "object", "objects"
_NAMES: Final = {
    name: name
    for name in (
        *(_ROOT, _OBJECT, _WRAPPER, "filename", "size", "width", "height", "depth", "bndbox", "name", "pose"),
        *("attributes", "attribute", "value", "actions", "part", *_SIDES, *_FLAGS),
    )
}
"""The elements that mean something: they are known by their name in lower case as well."""
_FLAG_TEXTS: Final = {
    **dict.fromkeys(("0", "false", "no", "unspecified", ""), False),
    **dict.fromkeys(("1", "true", "yes"), True),
}


def attributes_of(pose: str | None) -> tuple[tuple[str, str], ...]:
    """Return a pose as attributes: none where it is not specified."""
    if pose is None or pose == "Unspecified":
        return ()
    pose = pose.strip()
    return (("pose", pose),) if pose and pose.lower() != "unspecified" else ()


class VocReader:
    """Reads one file: `read` once."""

    def __init__(self, file: str, origin: int) -> None:
        self._file = file
        self._low = FIRST_PIXELS if origin else EDGES
        self._problems: list[Problem] = []
        self._reported: set[str] = set()
        self._path: list[str] = []
        self._text: list[str] = []
        self._is_leaf = False
        self._ignored = 0
        """Length of the path to the element below which nothing counts; 0 for none."""
        self._elements = self._objects = 0
        self._wrapped = False
        """True while an <objects> around the objects is open. It is no part of the path."""
        self._name: str | None = None
        self._size: dict[str, str] = {}
        self._size_line = 0
        self._boxes: list[Box] = []
        self._in_object = False
        self._line = 0
        self._fields: dict[str, str] = {}
        self._sides: dict[str, str] = {}
        self._pair = ["", ""]
        self._attributes: list[tuple[str, str]] = []

    def read(self, text: str) -> tuple[Draft, list[Problem]]:
        """Read what the file says. `AnnotationError` for one that cannot be used."""
        self._parser = parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text.append
        parser.StartDoctypeDeclHandler = lambda *_: self._note_once(
            "xml-doctype", "the document type declaration is passed over"
        )
        parser.EntityDeclHandler = self._entity
        parser.SkippedEntityHandler = self._entity
        parser.AttlistDeclHandler = self._attribute_list
        try:
            parser.Parse(text, True)
        except expat.ExpatError as exc:
            why = expat.ErrorString(exc.code) if text.strip() else "the file is empty"
            raise AnnotationError(
                f"the XML is broken: {why}", code="xml-broken", file=self._file, line=exc.lineno
            ) from None
        finally:
            del self._parser  # it refers to our methods, and they to us
        width, height = (self._pixels(side) for side in ("width", "height"))
        draft = Draft(self._file, self._name or "", width, height, tuple(self._boxes))
        return draft, self._problems

    # --- what expat calls ---

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        path = self._path
        if ":" in tag or "xmlns" in attributes:
            tag = tag.rpartition(":")[2]
            self._note_once("xml-namespace", "names are taken without their namespace")
        known = tag if tag in _NAMES else _NAMES.get(tag.lower(), tag)
        if known != tag:
            self._note_once("tag-case", f"<{tag}> is taken as <{known}>", "repaired")
            tag = known
        path.append(tag)
        self._text.clear()
        self._is_leaf = True
        self._elements += 1
        depth = len(path)
        if depth > MAX_DEPTH or self._elements > MAX_ELEMENTS:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_ELEMENTS:,} elements"
            self._refuse("file-too-large", f"the file has more than {limit}")
        if tag == _OBJECT and depth > 2:
            self._skip_misplaced()
        elif self._ignored:
            return
        elif depth == 1:
            if tag != _ROOT:
                self._refuse("not-voc", f"the file is no Pascal VOC annotation: its root element is <{tag[:60]}>")
        elif tag == _WRAPPER and depth == 2 and not self._wrapped:
            self._wrapped = True
            what = "the objects are in an <objects>; they are read as if they were not"
            self._note_once("objects-wrapped", what, "repaired")
            path.pop()
        elif depth == 2:
            self._begin(tag)
        elif self._in_object:
            self._start_in_object(tag, depth)

    def _begin(self, tag: str) -> None:
        if tag == _OBJECT:
            self._in_object = True
            self._line = self._parser.CurrentLineNumber
            self._count_object()
        elif tag == "size":
            if self._size_line:
                self._ignore_repeated(tag)
            self._size_line = self._size_line or self._parser.CurrentLineNumber
        elif tag == "filename" and self._name is not None:
            self._ignore_repeated(tag)

    def _count_object(self) -> None:
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            self._refuse("file-too-large", f"the file has more than {MAX_OBJECTS:,} objects")

    def _start_in_object(self, tag: str, depth: int) -> None:
        if depth == 3:
            if tag in self._fields:
                self._ignore_repeated(tag)
            elif tag in _ONCE:
                self._fields[tag] = ""
        elif depth == 4:
            container = self._path[2]
            if container not in _CONTAINERS:
                if container == "part":
                    self._note_once("part-ignored", "<part> boxes are not read; the object's own box is")
                else:
                    what = f"<{container[:60]}> in an <object> is not read, as it has elements of its own"
                    self._note_once("element-ignored", what)
                self._ignored = 3
            elif container == "bndbox" and tag in self._sides:
                self._ignore_repeated(tag)

    def _skip_misplaced(self) -> None:
        """Leave out an object that is in something that is not read, with a line that says where."""
        self._count_object()
        place = "/".join(part[:60] for part in self._path[1:-1])
        message = f"an <object> is in <{place}>, where objects are not read; the object is left out"
        self._report("object-misplaced", "skipped", self._parser.CurrentLineNumber, message)
        self._ignored = self._ignored or len(self._path)

    def _end(self, name: str) -> None:
        path = self._path
        if self._wrapped and len(path) == 1 and name.rpartition(":")[2].lower() == _WRAPPER:
            self._wrapped = False
            return
        if self._ignored:
            if len(path) == self._ignored:
                self._ignored = 0
        elif self._is_leaf:
            self._take(path, "".join(self._text))
        elif self._in_object and len(path) == 4 and path[3] == "attribute":
            if any(self._pair):
                self._attributes.append((self._pair[0], self._pair[1]))
            self._pair = ["", ""]
        if self._in_object and len(path) == 2:
            self._end_object()
        self._is_leaf = False
        path.pop()

    def _take(self, path: list[str], text: str) -> None:
        """Take the text of an element that has no elements in it."""
        depth, tag = len(path), path[-1]
        if not self._in_object:
            if depth == 2 and tag == "filename":
                self._name = text.strip()
            elif depth == 3 and path[1] == "size" and tag not in self._size:
                self._size[tag] = text.strip()
        elif depth == 3:
            if tag in _ONCE:
                self._fields[tag] = text
            elif tag not in _CONTAINERS and (text := text.strip()):
                self._attributes.append((tag, text))
        elif depth == 4 and path[2] == "bndbox":
            self._sides[tag] = text.strip()
        elif depth == 4 and path[2] == "actions":
            self._attributes.append((f"actions/{tag}", text.strip()))
        elif depth == 5 and path[3] == "attribute" and tag in ("name", "value"):
            self._pair[tag == "value"] = text.strip()

    def _entity(self, name: str, *_: object) -> NoReturn:
        self._refuse("xml-entities", f"the file declares or uses the entity {quote(name)}; such files are not read")

    def _attribute_list(self, element: str, attribute: str, _: str, default: str | None, __: int) -> None:
        if default is not None:
            what = f"a default value for {quote(attribute)} of <{element[:60]}>"
            self._refuse("xml-entities", f"the file declares {what}; such files are not read")

    # --- objects ---

    def _end_object(self) -> None:
        fields, sides, attributes = self._fields, self._sides, self._attributes
        self._in_object = False
        self._fields, self._sides, self._attributes = {}, {}, []
        label = fields.get("name", "")
        missing = [side for side in _SIDES if not sides.get(side)]
        if missing:
            what = f"no <{missing[0]}>" if "bndbox" in fields else "no <bndbox>"
            message = f"the object {quote(label)} has {what}; the object is left out"
            self._report("box-missing", "skipped", self._line, message)
            return
        try:
            x1, y1 = self._low[sides["xmin"]], self._low[sides["ymin"]]
            x2, y2 = EDGES[sides["xmax"]], EDGES[sides["ymax"]]
        except ValueError:
            texts = ", ".join(f"{side} {quote(sides[side])}" for side in _SIDES)
            message = f"the box of the object {quote(label)} is not of numbers: {texts}; the object is left out"
            self._report("box-text", "skipped", self._line, message)
            return
        difficult, truncated, occluded = (self._flag(name, fields.get(name, "")) for name in _FLAGS)
        attributes = sorted([*attributes, *attributes_of(fields.get("pose"))])
        box = Box(label, x1, y1, x2, y2, difficult, truncated, occluded, tuple(attributes), self._line)
        self._boxes.append(box)

    def _flag(self, name: str, text: str) -> bool:
        value = _FLAG_TEXTS.get(text.strip().lower())
        if value is None:
            self._report("flag-text", "noted", self._line, f"<{name}> is {quote(text)}; it is taken as 0")
        return bool(value)

    def _pixels(self, side: str) -> int:
        text = self._size.get(side, "")
        try:
            value = float(text or 0)
        except ValueError:
            value = -1.0
        if value.is_integer() and 0 <= value <= 1e9:
            return int(value)
        message = f"<{side}> of the image is {quote(text)}, which is no number of pixels"
        self._report("size-text", "noted", self._size_line, message)
        return 0

    # --- problems ---

    def _report(self, code: str, action: Action, line: int, message: str) -> None:
        self._problems.append(Problem(code, action, self._file, line, message))

    def _note_once(self, code: str, message: str, action: Action = "noted") -> None:
        if message not in self._reported:
            self._reported.add(message)
            self._report(code, action, self._parser.CurrentLineNumber, message)

    def _ignore_repeated(self, tag: str) -> None:
        self._ignored = len(self._path)
        self._report(
            "element-repeated", "noted", self._parser.CurrentLineNumber, f"<{tag}> is there again; the first counts"
        )

    def _refuse(self, code: str, message: str) -> NoReturn:
        raise AnnotationError(message, code=code, file=self._file, line=self._parser.CurrentLineNumber)


_EXACT: Final = Context(prec=64, traps=[])
"""1.1 - 1 is 0.1 in decimals and not in floats: with these, what was written is read as it was."""


class Numbers(dict[str, float]):
    """Coordinates by their text. Small whole numbers are found five times as fast as `float` reads them; others are
    read and not kept. `ValueError` for what is no number."""

    def __init__(self, first: int) -> None:
        super().__init__((str(number), float(number - first)) for number in range(4096))
        self._first = first

    def __missing__(self, text: str) -> float:
        value = parse_number(text) if len(text) <= 64 else None
        if value is None:
            raise ValueError(text)
        if not self._first:
            return value
        if value.is_integer() or not 1e-20 < abs(value) < 1e15:
            return value - self._first
        return float(_EXACT.subtract(Decimal(text), self._first))


EDGES: Final = Numbers(0)
"""For numbers that are pixel edges, counted from 0."""
FIRST_PIXELS: Final = Numbers(1)
"""For the left and upper sides where pixels are counted from 1; the right and lower ones are edges then too, as the
last pixel's number is the number of pixels up to its far edge."""


def number_text(value: float, first: int) -> str:
    """Return the shortest text that `Numbers(first)` reads as this number; without a fraction where it has none."""
    if value == int(value):
        return str(int(value) + first)
    return str(_EXACT.add(Decimal(repr(value)), first)) if first else repr(value)


MAX_BYTES: Final = 32 * 2**20
"""Larger files are refused. A box takes some 300 bytes."""
_MAX_PLAIN_BYTES: Final = 2**20


def parse(data: bytes | memoryview, file: str, *, origin: int = 0) -> tuple[Draft, list[Problem]]:
    """Read what an annotation file says, not yet checked against the image, and what had to be mended to read it.

    `AnnotationError` for one that cannot be used at all: broken XML, entities, no annotation, unknown encoding, too
    large. Labels are as the file has them; `check` cleans them.
    """
    size_bytes = len(data)
    if size_bytes <= _MAX_PLAIN_BYTES:
        draft = _parse_plain(data, file, origin)
        if draft is not None:
            return draft, []
    elif size_bytes > MAX_BYTES:
        message = f"the file has {size_bytes:,} bytes, more than {MAX_BYTES:,}"
        raise AnnotationError(message, code="file-too-large", file=file)
    text, mended = decode(bytes(data), file)
    draft, problems = VocReader(file, origin).read(text)
    return draft, [mended, *problems] if mended else problems


# --- what most files are: the same elements in one of few orders ---------------------------------------------------

_SPACE: Final = r"[ \t\n]*+"
_TEXT: Final = r"[^<>&\x00-\x1f\ufffe\uffff]*+"
"""Characters that XML allows and that stand for themselves, on one line."""
_NUMBER: Final = r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)"
_FLAG: Final = "([01])"


def _element(tag: str, *contents: str) -> str:
    return f"<{tag}>{''.join(contents)}</{tag}>{_SPACE}"


def _optional(tag: str, *contents: str) -> str:
    return f"(?:{_element(tag, *contents)})?"


_DECLARATION: Final = (
    r"""<\?xml version=["']1\.0["'](?: encoding=["'][Uu][Tt][Ff]-8["'])?(?: standalone=["']yes["'])? ?\?>"""
)
_PASSED_OVER: Final = "|".join(
    [
        *(_element(tag, _TEXT) for tag in ("folder", "path", "segmented")),
        f"<(?:folder|path)/>{_SPACE}",
        _element("source", _SPACE, *(_optional(tag, _TEXT) for tag in ("database", "annotation", "image", "flickrid"))),
        _element("owner", _SPACE, *(_optional(tag, _TEXT) for tag in ("flickrid", "name"))),
    ]
)
_SIZE: Final = [_element(tag, "([0-9]{1,9})") for tag in ("width", "height")]
_BEGINNING: Final = re.compile(
    rf"\ufeff?(?:{_DECLARATION})?{_SPACE}"
    rf'<annotation(?: verified="[a-z]*")?>{_SPACE}(?:{_PASSED_OVER})*+'
    rf"{_optional('filename', f'({_TEXT})')}(?:{_PASSED_OVER})*+"
    rf"{_optional('size', _SPACE, *_SIZE, _optional('depth', '[0-9]*+'))}(?:{_PASSED_OVER})*+"
)


def _pair(text: str) -> str:
    return _element("attribute", _SPACE, _element("name", text), _element("value", text))


_PAIRS: Final = re.compile(_pair(f"({_TEXT})"))
_X1, _Y1, _X2, _Y2 = (_element(tag, _NUMBER) for tag in ("xmin", "ymin", "xmax", "ymax"))
_PLAIN_OBJECT: Final = re.compile(
    _element(
        "object",
        _SPACE,
        _element("name", f"({_TEXT})"),
        _optional("pose", f"({_TEXT})"),
        _optional("truncated", _FLAG),
        _optional("difficult", _FLAG),
        _optional("occluded", _FLAG),
        f"(?(4)|{_optional('difficult', _FLAG)})",  # only where there was none before
        _element("bndbox", _SPACE, _X1, f"(?:{_Y1}{_X2}|{_X2}{_Y1})", _Y2),
        _optional("attributes", _SPACE, f"((?:{_pair(_TEXT)})*+)"),
    )
)
_END: Final = re.compile(f"</annotation>{_SPACE}")


def _parse_plain(data: bytes | memoryview, file: str, origin: int) -> Draft | None:
    """Read what the file says if it is of the plainest kind and nothing about it is unusual; None for any other."""
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError:
        return None
    if "\r" in text:
        text = text.replace("\r\n", "\n")  # one that stands alone matches nowhere
    beginning = _BEGINNING.match(text)
    if beginning is None:
        return None
    name, width, height = beginning.groups()
    low, high = FIRST_PIXELS if origin else EDGES, EDGES
    position = beginning.end()
    line = text.count("\n", 0, position) + 1
    boxes: list[Box] = []
    match, count, new = _PLAIN_OBJECT.match, text.count, tuple.__new__
    while found := match(text, position):
        label, pose, truncated, difficult, occluded, late, x1, y1, x2, x2_first, y1_last, y2, pairs = found.groups()
        if x2 is None:
            x2, y1 = x2_first, y1_last
        flags = difficult == "1" or late == "1", truncated == "1", occluded == "1"
        attributes = () if pose == "Unspecified" else attributes_of(pose)
        if pairs:
            attributes = tuple(sorted([*attributes, *_attributes(pairs)]))
        sides = low[x1], low[y1], high[x2], high[y2]
        boxes.append(new(Box, (label, *sides, *flags, attributes, line, None)))
        end = found.end()
        line += count("\n", position, end)
        position = end
    if not _END.fullmatch(text, position):
        return None
    return Draft(file, (name or "").strip(), int(width or 0), int(height or 0), tuple(boxes))


def _attributes(pairs: str) -> list[tuple[str, str]]:
    stripped = ((name.strip(), value.strip()) for name, value in _PAIRS.findall(pairs))
    return [pair for pair in stripped if any(pair)]


# --- writing -------------------------------------------------------------------------------------------------------

_UNWRITABLE: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(annotation: Annotation, *, origin: int = 0, folder: str = "", depth: int = 3) -> bytes:
    """Write the annotation as a Pascal VOC file: the same bytes for the same annotation.

    Boxes, labels, flags and attributes are read back as they are (attributes beside the pose as CVAT writes them). What
    XML cannot hold is written as U+FFFD; labels of the whole image have no place in the format.
    """
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        "<annotation>",
        f"\t<folder>{_escaped(folder)}</folder>",
        f"\t<filename>{_escaped(annotation.path.rpartition('/')[2])}</filename>",
        "\t<source>\n\t\t<database>Unknown</database>\n\t</source>",
        f"\t<size>\n\t\t<width>{annotation.width}</width>\n\t\t<height>{annotation.height}</height>",
        f"\t\t<depth>{depth}</depth>\n\t</size>",
        f"\t<segmented>{any(box.extra for box in annotation.boxes):d}</segmented>",
    ]
    for box in annotation.boxes:
        lines += _object_lines(box, origin)
    lines.append("</annotation>\n")
    return "\n".join(lines).encode("utf-8")


def _object_lines(box: Box, origin: int) -> list[str]:
    attributes = list(box.attributes)
    poses = [value for name, value in attributes if name == "pose"]
    pose = poses[0] if len(poses) == 1 and attributes_of(poses[0]) == (("pose", poses[0]),) else "Unspecified"
    if pose != "Unspecified":
        attributes.remove(("pose", pose))
    return [
        f"\t<object>\n\t\t<name>{_escaped(box.label)}</name>\n\t\t<pose>{_escaped(pose)}</pose>",
        f"\t\t<truncated>{box.truncated:d}</truncated>\n\t\t<occluded>{box.occluded:d}</occluded>",
        f"\t\t<difficult>{box.difficult:d}</difficult>\n\t\t<bndbox>",
        f"\t\t\t<xmin>{number_text(box.x1, origin)}</xmin>\n\t\t\t<ymin>{number_text(box.y1, origin)}</ymin>",
        f"\t\t\t<xmax>{number_text(box.x2, 0)}</xmax>\n\t\t\t<ymax>{number_text(box.y2, 0)}</ymax>\n\t\t</bndbox>",
        *(["\t\t<attributes>", *map(_pair_text, attributes), "\t\t</attributes>"] if attributes else []),
        "\t</object>",
    ]


def _pair_text(pair: tuple[str, str]) -> str:
    name, value = map(_escaped, pair)
    return f"\t\t\t<attribute>\n\t\t\t\t<name>{name}</name>\n\t\t\t\t<value>{value}</value>\n\t\t\t</attribute>"


def _escaped(text: str) -> str:
    return escape(_UNWRITABLE.sub("\ufffd", text), quote=False).replace("\r", "&#13;")
