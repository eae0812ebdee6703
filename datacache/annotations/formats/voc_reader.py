"""Read Pascal VOC annotations out of any XML, through expat: the long way of `voc.parse`; and coordinates from text.

Elements are looked at as they come, and only those that mean something are kept, so a file costs no tree. Nothing
outside the file is ever opened, and what could make a small file large (entities, default values of attributes) is
refused. Coordinates count pixels from 0 or from 1; those found by their text are made once and never changed.

Used by `voc` only. A `VocReader` reads one file, in one thread; the rest is pure.
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Final, NoReturn
from xml.parsers import expat

from datacache.annotations.formats.values import parse_number
from datacache.annotations.model import Action, Box, Draft, Problem
from datacache.annotations.problems import quote
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
