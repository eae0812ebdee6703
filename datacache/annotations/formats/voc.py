"""Pascal VOC: one XML file an image.

What the numbers mean differs. The devkit of the challenge counts pixels from 1 and includes the last one (`origin=1`: a
box around the first pixel is 1, 1, 1, 1); LabelImg, CVAT and nearly every tool since write pixel edges (`origin=0`: the
same box is 0, 0, 1, 1).

`parse` reads what most tools write, as they write it, with a few regular expressions, and everything else (other
elements, comments, entities, encodings, all that is wrong) with expat in `voc_reader`; both give the same
(`test_voc.py` holds them together), the first at a third of the cost of building a tree.

Used by the annotation table and by conversions. Pure, any thread.
"""

from __future__ import annotations

import re
from typing import Final
from xml.sax.saxutils import escape

from datacache.annotations.formats.voc_reader import EDGES, FIRST_PIXELS, VocReader, attributes_of, number_text
from datacache.annotations.formats.xml_encoding import decode
from datacache.annotations.model import Annotation, Box, Draft, Problem
from datacache.core.errors import AnnotationError

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
_OBJECT: Final = re.compile(
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
    match, count, new = _OBJECT.match, text.count, tuple.__new__
    while found := match(text, position):
        label, pose, truncated, difficult, occluded, late, x1, y1, x2, x2_first, y1_last, y2, pairs = found.groups()
        if x2 is None:
            x2, y1 = x2_first, y1_last
        flags = difficult == "1" or late == "1", truncated == "1", occluded == "1"
        attributes = () if pose == "Unspecified" else attributes_of(pose)
        if pairs:
            attributes = tuple(sorted([*attributes, *_attributes(pairs)]))
        sides = low[x1], low[y1], high[x2], high[y2]
        boxes.append(new(Box, (label, *sides, *flags, attributes, line)))
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
_ESCAPES: Final = {"\r": "&#13;"}


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
        "\t<segmented>0</segmented>",
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
    return escape(_UNWRITABLE.sub("\ufffd", text), _ESCAPES)
