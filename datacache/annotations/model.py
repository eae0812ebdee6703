"""Boxes, annotations and problems: plain values that every format is read into and written from.

**Coordinates** are pixels of the image as it is displayed, that is with its EXIF orientation applied: the origin is the
upper left *corner* of the upper left pixel, x grows to the right and y downwards, and a box is the area between its
edges. So the box of a whole image is `(0, 0, width, height)`, its size is `x2 - x1` by `y2 - y1`, and a checked box has
`0 <= x1 < x2 <= width` and `0 <= y1 < y2 <= height`. COCO and YOLO mean the same; for Pascal VOC see `voc`.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple


class Format(NamedTuple):
    """How a format keeps annotations."""

    suffix: bytes = b""
    """Of the annotation file of one image; b"" where files speak of many images."""
    numbered: bool = False
    """Labels are ids, whose names a list has."""
    sized: bool = False
    """Annotations say the size of their image."""


FORMATS: Final = {
    "voc": Format(b".xml", sized=True),
    "yolo": Format(b".txt", numbered=True),
    "coco": Format(sized=True),
    "keras-yolo3": Format(numbered=True),
    "none": Format(),
}
"""The formats that are read; `none` where there are images alone."""
Action = Literal["repaired", "skipped", "noted"]


class Box(NamedTuple):
    """One object of an image."""

    label: str
    x1: float
    y1: float
    x2: float
    y2: float
    difficult: bool = False
    truncated: bool = False
    occluded: bool = False
    attributes: tuple[tuple[str, str], ...] = ()
    """What else the file says of it (pose, a tool's own attributes), sorted by name."""
    line: int = 0
    """Where in its file it begins, counted from 1; 0 where that is not known."""


class Annotation(NamedTuple):
    """All that is known of one image, checked: every box lies inside it and has an area."""

    path: str
    """The image's path in its snapshot."""
    width: int
    height: int
    boxes: tuple[Box, ...] = ()
    labels: tuple[str, ...] = ()
    """Labels of the whole image (classification), where there are any."""
    source: str = ""
    """The path of the file that said so; '' where no annotation was found for the image."""


class Problem(NamedTuple):
    """One thing that was not as it should be. Under `--strict` what is repaired or skipped is an error."""

    code: str
    """What it is, for machines and for the table in docs/ANNOTATIONS.md: `box-outside`, `size-wrong`, …"""
    action: Action
    """`repaired`: mended, and what was kept is right. `skipped`: left out. `noted`: kept as it is."""
    file: str
    """The file it is in, a path in the snapshot."""
    line: int
    """The line, counted from 1; 0 where a line makes no sense."""
    message: str
    """What is wrong and what was done, in a sentence that quotes the value."""


class Draft(NamedTuple):
    """What a reader found for one image, not yet checked against the image: sizes may be wrong or missing, coordinates
    may be reversed, outside, `nan` or infinite."""

    file: str
    """The file that was read, a path in the snapshot."""
    name: str = ""
    """The image's name as the file gives it (VOC `<filename>`, COCO `file_name`); '' where it gives none."""
    width: int = 0
    """As the file says; 0 where it says nothing usable (the reader has reported a wrong text)."""
    height: int = 0
    boxes: tuple[Box, ...] = ()
    labels: tuple[str, ...] = ()
    line: int = 0


class DraftFile(NamedTuple):
    """What a reader found in a file that speaks of many images (COCO, keras-yolo3)."""

    images: list[tuple[Draft, list[Problem]]]
    """An image is there once, however often the file names it by the same text."""
    problems: list[Problem]
    """Those that are of no image: of the whole file, or of objects whose image is not known."""
    classes: tuple[str, ...]
    """The classes' names, in the order of their ids."""
