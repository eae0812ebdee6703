"""Open Images: CSV files about many images, one of boxes and one of labels of whole images.

Files are known by the columns they name, in any order. Coordinates are parts of the image's sides, so a draft is
`relative` until the image is looked at. `LabelName` is an id (`/m/01yrx`) that `class-descriptions.csv` has a name of.
Used by the annotation table and by conversions. Pure functions, any thread.

Source: storage.googleapis.com/openimages/web/download_v7.html, "Data Formats".
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from datacache.annotations.classes import decode
from datacache.annotations.formats.json_stream import Data, in_utf8, read_lines
from datacache.annotations.formats.values import parse_number
from datacache.annotations.model import Annotation, Box, Draft, DraftFile, Problem, Problems, quote
from datacache.annotations.shapes.outline import NOTHING
from datacache.core.errors import AnnotationError

_SIDES: Final = ("XMin", "YMin", "XMax", "YMax")
_FLAGS: Final = ("IsTruncated", "IsOccluded")
_MORE: Final = ("IsGroupOf", "IsDepiction", "IsInside")
ATTRIBUTES: Final = (*_FLAGS, *_MORE)
_BOX_COLUMNS: Final = (
    *("ImageID", "Source", "LabelName", "Confidence", "XMin", "XMax", "YMin", "YMax"),
    *("IsOccluded", "IsTruncated", *_MORE),
)
_LABEL_COLUMNS: Final = ("ImageID", "Source", "LabelName", "Confidence")
_USUAL_AUTHOR: Final = "xclick"
BOXES, LABELS, CLASSES = "annotations-bbox.csv", "annotations-human-imagelabels.csv", "class-descriptions.csv"


def is_open_images(head: str) -> bool:
    """Tell by the first line of a file whether it has boxes or labels of images."""
    columns = set(_cells(head.removeprefix("\ufeff").partition("\n")[0].strip()))
    return {"ImageID", "LabelName"} <= columns and bool(columns & {"XMin", "Confidence"})


def parse_classes(data: bytes) -> dict[str, str]:
    """Read `class-descriptions.csv`: ids of classes, and their names."""
    rows = (_cells(line) for line in (decode(data) or "").removeprefix("\ufeff").splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2 and row[0] != "LabelName"}


def parse(data: Data, file: str, names: Mapping[str, str]) -> DraftFile:
    """Read the boxes, or the labels, of each image, in the order of their first lines; `names` are those of classes.
    `AnnotationError` for a file that is no text, or without the columns that it must have."""
    return in_utf8(lambda utf8: _parse(utf8, file, names), data, file)


def _parse(data: Data, file: str, names: Mapping[str, str]) -> DraftFile:
    of_file, absent = Problems(file), 0
    lines = read_lines(data, of_file)
    _, head = next(lines, (1, ""))
    places = {name: place for place, name in enumerate(_cells(head.strip()))}
    boxes = "XMin" in places
    missing = [name for name in ("ImageID", "LabelName", *(_SIDES if boxes else ("Confidence",))) if name not in places]
    if missing:
        raise AnnotationError(f"{file} has no column {missing[0]}", code="line-malformed", file=file, line=1)
    found: dict[str, tuple[int, list[Box], list[str], Problems]] = {}
    for number, line in lines:
        cells = _cells(line.rstrip("\r"))
        if cells == [""]:
            continue
        if len(cells) != len(places):
            message = f"{quote(line)} has {len(cells)} columns, and the first line has {len(places)}; it is left out"
            of_file.add("line-malformed", "skipped", message, number)
            continue
        row = {name: cells[place] for name, place in places.items()}
        _, its, labels, problems = found.setdefault(row["ImageID"], (number, [], [], Problems(file)))
        label = names.get(row["LabelName"], row["LabelName"])
        if not boxes:
            there = parse_number(row["Confidence"]) != 0
            absent += not there
            labels += [label] if there else []
            continue
        edges = [parse_number(row[side]) for side in _SIDES]
        if None in edges:
            message = f"a side of the box of {quote(label)} is no number; it is left out"
            problems.add("box-text", "skipped", message, number)
            continue
        its.append(_box(label, [edge for edge in edges if edge is not None], row, number))
    if absent:
        of_file.add("label-absent", "noted", f"{absent:,} labels of confidence 0 say what images do not show")
    images: list[tuple[Draft, list[Problem]]] = [
        (Draft(file, name, boxes=tuple(its), labels=tuple(labels), line=number, relative=True), problems)
        for name, (number, its, labels, problems) in found.items()
    ]
    return DraftFile(images, of_file, tuple(dict.fromkeys(names.values())))


def _cells(line: str) -> list[str]:
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line]), [])
    except csv.Error:  # a cell of more than 128 KiB
        return [line]


def _box(label: str, edges: Sequence[float], row: Mapping[str, str], number: int) -> Box:
    score = parse_number(row.get("Confidence", "1"))
    author = row.get("Source", "")
    extra = NOTHING._replace(
        score=None if score is None or score == 1 else score, author="" if author == _USUAL_AUTHOR else author
    )
    flags = [(name, row[name]) for name in ATTRIBUTES if row.get(name, "0") != "0"]
    truncated, occluded = ((name, "1") in flags for name in _FLAGS)
    attributes = tuple(sorted(pair for pair in flags if pair[0] not in _FLAGS or pair[1] != "1"))
    x1, y1, x2, y2 = edges
    return Box(
        label, x1, y1, x2, y2, False, truncated, occluded, attributes, number, None if extra == NOTHING else extra
    )


def scaled(draft: Draft, width: int, height: int) -> Draft:
    """Return a draft of an image of this size, in pixels."""
    boxes = (
        box._replace(x1=box.x1 * width, y1=box.y1 * height, x2=box.x2 * width, y2=box.y2 * height)
        for box in draft.boxes
    )
    return draft._replace(boxes=tuple(boxes), relative=False)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_boxes(images: Iterable[Annotation]) -> Iterator[bytes]:
    """Write the boxes of images, whose paths are their ids. Sides have as many digits as their pixels need."""
    yield _line(_BOX_COLUMNS)
    for annotation in images:
        across, down = _parts_of(annotation.width), _parts_of(annotation.height)
        for box in annotation.boxes:
            extra, own = box.extra or NOTHING, dict(box.attributes)
            sides = across(box.x1), across(box.x2), down(box.y1), down(box.y2)
            flags = (("IsOccluded", box.occluded), ("IsTruncated", box.truncated))
            shown = ["1" if flag else own.get(name, "0") for name, flag in flags]
            score = "1" if extra.score is None else repr(extra.score)
            head = annotation.path, extra.author or _USUAL_AUTHOR, box.label, score
            yield _line((*head, *sides, *shown, *(own.get(name, "0") for name in _MORE)))


def write_labels(images: Iterable[Annotation]) -> Iterator[bytes]:
    """Write the labels of whole images."""
    yield _line(_LABEL_COLUMNS)
    for annotation in images:
        for label in annotation.labels:
            yield _line((annotation.path, "verification", label, "1"))


def write_classes(names: Iterable[str]) -> bytes:
    """Write `class-descriptions.csv`: here a class's name is its id."""
    return b"".join(_line((name, name)) for name in names)


def _line(cells: Sequence[str]) -> bytes:
    text = io.StringIO()
    # A line is a row to many readers, also within quotes.
    csv.writer(text, lineterminator="\n").writerow([cell.replace("\n", " ").replace("\r", " ") for cell in cells])
    return text.getvalue().encode("utf-8", "surrogateescape")


def _parts_of(side: int) -> Callable[[float], str]:
    """Return how a coordinate is written as a part of its side: the shortest number that gives it again."""

    def part(value: float) -> str:
        exact = value / side
        texts = (f"{exact:.{digits}f}" for digits in range(6, 20))
        return next((text for text in texts if float(text) * side == value), repr(exact))

    return part
