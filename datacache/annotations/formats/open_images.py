"""Open Images: CSV files about many images, of boxes, of masks and of labels of whole images.

Files are known by the columns they name, in any order. A mask is a PNG of its own, which a row names; the row has the
box that the mask was drawn in, too, and is of the same object as the row of that box. Coordinates are parts of the
image's sides, so a draft is `relative` until the image is looked at. `LabelName` is an id (`/m/01yrx`) that `class-
descriptions.csv` has a name of. Used by the annotation table and by conversions. Pure functions, any thread.

Source: storage.googleapis.com/openimages/web/download_v7.html, "Data Formats".
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from typing import Any, Final, NamedTuple

from datacache.annotations.aside import Aside
from datacache.annotations.check import clean_label
from datacache.annotations.formats.json_stream import Data, in_utf8, read_lines
from datacache.annotations.formats.mask_images import file_of, in_file
from datacache.annotations.formats.values import parse_number
from datacache.annotations.model import HALVES, Annotation, Box, Draft, DraftFile, Problem, Problems, quote
from datacache.annotations.pairing import LONGEST_NAME, short_name
from datacache.annotations.shapes.outline import NOTHING, Mask
from datacache.core.errors import AnnotationError

_SIDES: Final = ("XMin", "YMin", "XMax", "YMax")
_MASK_SIDES: Final = tuple(f"Box{side}" for side in _SIDES)
OF_MASKS: Final = ("BoxID", "PredictedIoU", "Clicks")
_MASK_COLUMNS: Final = (
    *("MaskPath", "ImageID", "LabelName", "BoxID", "BoxXMin", "BoxXMax", "BoxYMin", "BoxYMax"),
    *OF_MASKS[1:],
)
_FLAGS: Final = ("IsTruncated", "IsOccluded")
_MORE: Final = ("IsGroupOf", "IsDepiction", "IsInside")
ATTRIBUTES: Final = (*_FLAGS, *_MORE)
_BOX_COLUMNS: Final = (
    *("ImageID", "Source", "LabelName", "Confidence", "XMin", "XMax", "YMin", "YMax"),
    *("IsOccluded", "IsTruncated", *_MORE),
)
_LABEL_COLUMNS: Final = ("ImageID", "Source", "LabelName", "Confidence")
_USUAL_AUTHOR: Final = "xclick"
MAX_CLASSES: Final = 1_000_000
_BOX_ID: Final = re.compile("[0-9a-f]{8}")
_SHORT_ID: Final = re.compile("/[a-z]/[0-9a-z]+")
BOXES, LABELS, CLASSES = "annotations-bbox.csv", "annotations-human-imagelabels.csv", "class-descriptions.csv"
MASKS, MASK_FOLDER = "annotations-object-segmentation.csv", "masks"


def is_open_images(head: str) -> bool:
    """Tell by the first line of a file whether it has boxes, masks or labels of images."""
    columns = _columns(head)
    return {"ImageID", "LabelName"} <= columns and bool(columns & {"XMin", "Confidence", "MaskPath"})


def has_masks(head: str) -> bool:
    """Tell by the first line of such a file whether it has masks."""
    return "MaskPath" in _columns(head)


def _columns(head: str) -> set[str]:
    return set(_cells(head.removeprefix("\ufeff").partition("\n")[0].strip()))


def parse_classes(data: Data, file: str) -> tuple[dict[str, str], list[Problem]]:
    """Read `class-descriptions.csv`: ids of classes, and their names. `AnnotationError` for a file that is no text."""
    return in_utf8(lambda utf8: _parse_classes(utf8, file), data, file)


def _parse_classes(data: Data, file: str) -> tuple[dict[str, str], list[Problem]]:
    names: dict[str, str] = {}
    odd: list[int] = []
    problems = Problems(file)
    for number, line in read_lines(data, problems):
        id, *rest = _cells(line.rstrip("\r"))
        if id == "LabelName" or not (id or rest):
            continue
        if len(rest) != 1:
            odd.append(number)
        elif len(names) < MAX_CLASSES:
            names.setdefault(id, rest[0])
        else:
            message = f"there are more than {MAX_CLASSES:,} classes; this line and what follows are left out"
            problems.add("line-malformed", "skipped", message, number)
            break
    if odd:
        more = f", nor are {len(odd) - 1:,} more lines" if len(odd) > 1 else ""
        message = f"the line is no id and no name of a class{more}; left out"
        problems.add("line-malformed", "skipped", message, odd[0])
    return names, problems


def parse(data: Data, file: str, names: Mapping[str, str]) -> DraftFile:
    """Read the boxes, masks or labels of each image, in the order of their first lines; `names` are those of classes.

    One image is in memory at once: images are put together when they are asked for. `AnnotationError` for a file that
    is no text, or without the columns that it must have."""
    return in_utf8(lambda utf8: _parse(utf8, file, names), data, file)


def _parse(data: Data, file: str, names: Mapping[str, str]) -> DraftFile:
    of_file, absent, unsure = Problems(file), 0, 0
    lines = read_lines(data, of_file)
    _, head = next(lines, (1, ""))
    places = {name: place for place, name in enumerate(_cells(head.strip()))}
    masks = "MaskPath" in places
    sides = _MASK_SIDES if masks else _SIDES if "XMin" in places else ()
    missing = [name for name in ("ImageID", "LabelName", *(sides or ("Confidence",))) if name not in places]
    if missing:
        raise AnnotationError(f"{file} has no column {missing[0]}", code="line-malformed", file=file, line=1)
    images = _ImagesOnDisk(file)
    for number, line in lines:
        cells = _cells(line.rstrip("\r"))
        if cells == [""]:
            continue
        if len(cells) != len(places):
            message = f"{quote(line)} has {len(cells)} columns, and the first line has {len(places)}; it is left out"
            of_file.add("line-malformed", "skipped", message, number)
            continue
        row = {name: cells[place] for name, place in places.items()}
        image = images.begin(row["ImageID"], number)
        label = names.get(row["LabelName"]) or row["LabelName"]
        if not sides:
            confidence = parse_number(row["Confidence"])
            absent += confidence == 0
            unsure += confidence not in (0, 1)
            image.labels.extend([label] if confidence != 0 else [])
            continue
        edges = [parse_number(row[side]) for side in sides]
        if None in edges:
            message = f"a side of the box of {quote(label)} is no number; it is left out"
            image.problems.append(Problem("box-text", "skipped", file, number, message))
            continue
        read = _masked if masks else _box
        image.boxes.append(read(label, [edge for edge in edges if edge is not None], row, number))
    if absent:
        of_file.add("label-absent", "noted", f"{absent:,} labels of confidence 0 say what images do not show")
    if unsure:
        message = f"{unsure:,} labels have another confidence than 0 and 1; they are kept without it"
        of_file.add("label-unsure", "noted", message)
    images.finish()
    return DraftFile(images, of_file, tuple(dict.fromkeys(names.values())))


def identifiers(names: dict[str, str]) -> dict[str, str]:
    """Return the id of each class by its name: the first one of those that have the name."""
    return {clean_label(name): id for id, name in reversed(names.items())}


class _Rows(NamedTuple):
    """Hold the rows that follow each other and speak of one image."""

    earlier: int
    """The number of those before, or -1."""
    line: int
    boxes: list[Box]
    labels: list[str]
    problems: list[Problem]


class _ImagesOnDisk(Sequence[tuple[Draft, list[Problem]]]):
    """The images of a file, all but the one that is read last on disk."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._rows = Aside[_Rows]()
        self._last: dict[str, int] = {}
        """Image → the number of its last rows."""
        self._names: list[str] = []
        self._name, self._open = "", _Rows(-1, 0, [], [], [])

    def begin(self, name: str, line: int) -> _Rows:
        """Return what the next row of an image adds to."""
        if not self._open.line or name != self._name:
            self._put()
            self._name, self._open = name, _Rows(self._last.get(name, -1), line, [], [], [])
        return self._open

    def finish(self) -> None:
        """Take the last rows, too; then images can be asked for."""
        self._put()
        self._names = list(self._last)

    def _put(self) -> None:
        if self._open.line:
            self._last[self._name] = self._rows.put(self._open)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: Any) -> Any:
        name = self._names[number]
        parts = [self._rows.get(self._last[name])]
        while parts[-1].earlier >= 0:
            parts.append(self._rows.get(parts[-1].earlier))
        parts.reverse()
        boxes, labels, problems = (tuple(chain.from_iterable(found)) for found in list(zip(*parts, strict=True))[2:])
        return Draft(self._file, name, boxes=boxes, labels=labels, line=parts[0].line, relative=len(boxes)), list(
            problems
        )


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
    sure = score is None or score == 1 or not isfinite(score)
    extra = NOTHING._replace(score=None if sure else score, author="" if author == _USUAL_AUTHOR else author)
    flags = [(name, row[name]) for name in ATTRIBUTES if row.get(name, "0") != "0"]
    if sure and score != 1:
        flags.append(("Confidence", row["Confidence"]))  # such as `nan`: it is no score, and is not lost
    truncated, occluded = ((name, "1") in flags for name in _FLAGS)
    attributes = tuple(sorted(pair for pair in flags if pair[0] not in _FLAGS or pair[1] != "1"))
    x1, y1, x2, y2 = edges
    return Box(
        label, x1, y1, x2, y2, False, truncated, occluded, attributes, number, None if extra == NOTHING else extra
    )


def _masked(label: str, edges: Sequence[float], row: Mapping[str, str], number: int) -> Box:
    own = ((name, row.get(name, "")) for name in OF_MASKS)
    kept = tuple(sorted((name, text) for name, text in own if text and (name != "BoxID" or _BOX_ID.fullmatch(text))))
    x1, y1, x2, y2 = edges
    extra = NOTHING._replace(outline=in_file(row["MaskPath"])) if row["MaskPath"] else None
    return Box(label, x1, y1, x2, y2, attributes=kept, line=number, extra=extra)


def scaled(draft: Draft, width: int, height: int) -> Draft:
    """Return a draft of an image of this size, in pixels."""
    boxes = (
        box._replace(x1=box.x1 * width, y1=box.y1 * height, x2=box.x2 * width, y2=box.y2 * height)
        for box in draft.boxes[: draft.relative]
    )
    return draft._replace(boxes=(*boxes, *draft.boxes[draft.relative :]), relative=0)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_boxes(images: Iterable[Annotation], ids: Mapping[str, str]) -> Iterator[bytes]:
    """Write the boxes of images, whose paths are their ids; `ids` are those of classes. Sides have as many digits as
    their pixels need."""
    yield _line(_BOX_COLUMNS)
    for annotation in images:
        across, down = _parts_of(annotation.width), _parts_of(annotation.height)
        for box in annotation.boxes:
            extra, own = box.extra or NOTHING, _attributes(box)
            sides = across(box.x1), across(box.x2), down(box.y1), down(box.y2)
            flags = (("IsOccluded", box.occluded), ("IsTruncated", box.truncated))
            shown = ["1" if flag else own.get(name, "0") for name, flag in flags]
            score = "1" if extra.score is None else repr(extra.score)
            head = annotation.path, extra.author or _USUAL_AUTHOR, ids.get(box.label, box.label), score
            yield _line((*head, *sides, *shown, *(own.get(name, "0") for name in _MORE)))


def write_masks(images: Iterable[Annotation], ids: Mapping[str, str]) -> Iterator[bytes]:
    """Write the rows of masks, of images as `name_masks` gives them."""
    yield _line(_MASK_COLUMNS)
    for annotation in images:
        across, down = _parts_of(annotation.width), _parts_of(annotation.height)
        for box in annotation.boxes:
            path, own = file_of(box), _attributes(box)
            if path or not own.keys().isdisjoint(OF_MASKS):
                sides = across(box.x1), across(box.x2), down(box.y1), down(box.y2)
                name = path.removeprefix(f"{MASK_FOLDER}/")
                id, *more = (own.get(name, "") for name in OF_MASKS)
                yield _line((name, annotation.path, ids.get(box.label, box.label), id, *sides, *more))


def name_masks(
    annotation: Annotation, folder: str, ids: Mapping[str, str], classes: Mapping[str, int]
) -> tuple[Annotation, list[tuple[str, Mask]]]:
    """Return an image whose masks are in files, and these: the paths, below `folder` of all masks, and the masks. A
    file's name has the class's id, or its number, and the object's."""
    boxes, files, taken = [], [], set[str]()
    for n, box in enumerate(annotation.boxes):
        outline = box.extra.outline if box.extra else None
        if box.extra is not None and isinstance(outline, Mask):
            own = dict(box.attributes)
            if own.get("BoxID", "") in taken or not _BOX_ID.fullmatch(own.get("BoxID", "")):
                own["BoxID"] = f"n{n:07d}"
            taken.add(own["BoxID"])
            id = ids.get(box.label, "")
            of_class = id.replace("/", "") if _SHORT_ID.fullmatch(id) else f"c{classes.get(box.label, 0)}"
            above, slash, stem = annotation.path.rpartition("/")
            tail = f"_{of_class}_{own['BoxID']}.png"
            path = f"{MASK_FOLDER}/{folder}{above}{slash}{short_name(stem, LONGEST_NAME - len(tail))}{tail}"
            files.append((path, outline))
            extra = box.extra._replace(outline=in_file(path))
            box = box._replace(extra=extra, attributes=tuple(sorted(own.items())))  # noqa: PLW2901
        boxes.append(box)
    return annotation._replace(boxes=tuple(boxes)), files


def write_labels(images: Iterable[Annotation], ids: Mapping[str, str]) -> Iterator[bytes]:
    """Write the labels of whole images."""
    yield _line(_LABEL_COLUMNS)
    for annotation in images:
        for label in annotation.labels:
            yield _line((annotation.path, "verification", ids.get(label, label), "1"))


def write_classes(names: Iterable[str], ids: Mapping[str, str]) -> bytes:
    """Write `class-descriptions.csv`: the name of a class is its id where it has no other."""
    return b"".join(_line((ids.get(name, name), name)) for name in names)


def _attributes(box: Box) -> dict[str, str]:
    return {name: text if text.isascii() else HALVES.sub("\ufffd", text) for name, text in box.attributes}


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
