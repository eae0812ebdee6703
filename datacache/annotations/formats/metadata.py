"""`metadata.jsonl`: labels, captions and boxes of images, one JSON object a line with `file_name`.

The convention of Hugging Face's `imagefolder` (https://huggingface.co/docs/datasets/image_dataset), which imports from
JSON lines write. A `label` is a string or a number, a `text` (or `caption`) a sentence about the image; a list holds
several. `objects` has a list of boxes (`bbox`: x, y, width, height, in pixels) and one of their `categories`. Other
fields mean nothing here. Used by the annotation table and by conversions. Pure functions, any thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Final

from datacache.annotations.formats.geometry import side
from datacache.annotations.formats.json_stream import Data, in_utf8, read_lines
from datacache.annotations.formats.values import JSON, displayed, kind, to_id, to_number, to_text
from datacache.annotations.model import Annotation, Box, Draft, DraftFile, Problem, Problems, quote
from datacache.core.counters import count

NAME: Final = b"metadata.jsonl"
"""The file's name, in any folder; its `file_name`s are relative to that folder."""
_CAPTIONS: Final = ("text", "caption", "captions")
_CATEGORIES: Final = ("categories", "category")


def is_metadata(path: str) -> bool:
    """Tell by a file's name whether it is one of these."""
    return path.rpartition("/")[2].lower() == NAME.decode()


def parse(data: Data, file: str) -> DraftFile:
    """Read what is said of each image, in the order of their first lines; `name` of a draft is the `file_name`.

    A line without an image is left out and reported; an image without a label is kept.
    `AnnotationError` for a file that is no text.
    """
    return in_utf8(lambda utf8: _parse(utf8, file), data, file)


def _parse(data: Data, file: str) -> DraftFile:
    of_file = Problems(file)
    numbers: list[int] = []
    found: dict[str, tuple[int, list[str], list[str], list[Box], Problems]] = {}
    for number, line in read_lines(data, of_file):
        entry = _entry(line, number, of_file) if line.strip() else None
        if entry is None:
            continue
        name = entry["file_name"]
        begun = name in found
        first, labels, captions, boxes, problems = found.setdefault(name, (number, [], [], [], Problems(file)))
        if begun:
            message = f"{quote(name)} has line {first} already; what both say is taken together"
            problems.add("image-repeated", "noted", message, number)
        given = entry.get("label")
        for label in given if isinstance(given, list) else [given]:
            text = _label(label, number, numbers)
            if text is not None:
                labels.append(text)
            elif label is not None:
                message = f"the label {quote(to_text(label))} is neither a string nor a number; it is left out"
                problems.add("entry-malformed", "skipped", message, number)
        texts = [entry[key] for key in _CAPTIONS if entry.get(key)]
        for text in (text for given in texts for text in (given if isinstance(given, list) else [given])):
            if isinstance(text, str):
                captions.append(text)
            elif text is not None:
                message = f"the text {quote(to_text(text))} is no string; it is left out"
                problems.add("entry-malformed", "skipped", message, number)
        boxes += _boxes(entry.get("objects"), number, numbers, problems)
    if numbers:
        many = count(len(numbers), "label is a number", "labels are numbers")
        message = f"{many}, whose names no file says; they are called so, and --map 0=NAME names them"
        of_file.add("classes-missing", "noted", message, numbers[0])
    images: list[tuple[Draft, list[Problem]]] = []
    for name, (number, labels, captions, boxes, problems) in found.items():
        images.append((Draft(file, name, 0, 0, tuple(boxes), tuple(labels), number, tuple(captions)), problems))
    return DraftFile(images, of_file, ())


def _label(value: JSON, line: int, numbers: list[int]) -> str | None:
    """Return a label; of a whole number its digits, and its line in `numbers`. None for anything else."""
    if isinstance(value, str):
        return value
    id = to_id(value)
    if id is not None:
        numbers.append(line)
    return id


def _boxes(objects: JSON, line: int, numbers: list[int], problems: Problems) -> Iterator[Box]:
    """Yield the boxes of an image."""
    if not isinstance(objects, dict):
        if objects is not None:
            problems.add("entry-malformed", "skipped", f"`objects` is {kind(objects)}, not an object; left out", line)
        return
    boxes, labels = objects.get("bbox"), next((objects[key] for key in _CATEGORIES if key in objects), None)
    if not (isinstance(boxes, list) and isinstance(labels, list) and len(boxes) == len(labels)):
        message = "`objects` has no list of boxes and one of as many categories; they are left out"
        problems.add("entry-malformed", "skipped", message, line)
        return
    for sides, label in zip(boxes, labels, strict=True):
        found = [to_number(value) for value in sides] if isinstance(sides, list) and len(sides) == 4 else [None]
        if None in found:
            message = f"the box of {quote(to_text(label))} is {displayed(sides)}, not x, y, width, height; left out"
            problems.add("box-text", "skipped", message, line)
            continue
        x, y, width, height = (number or 0.0 for number in found)
        shown = _label(label, line, numbers)
        yield Box(
            ("" if label is None else to_text(label)) if shown is None else shown,
            x,
            y,
            x + width,
            y + height,
            line=line,
        )


def _entry(line: str, number: int, problems: Problems) -> dict[str, JSON] | None:
    """Read one line; None, and a problem, for one that names no image."""
    try:
        entry: JSON = json.loads(line)
    except (ValueError, RecursionError):
        message = f"{quote(line.strip())} is no JSON; the line is left out"
        problems.add("entry-malformed", "skipped", message, number)
        return None
    if not isinstance(entry, dict):
        message = f"the line is {kind(entry)}, not an object; it is left out"
        problems.add("entry-malformed", "skipped", message, number)
        return None
    name = entry.get("file_name")
    if isinstance(name, str) and name:
        return entry
    problems.add("image-unnamed", "skipped", "the line has no file_name; it is left out", number)
    return None


def write(images: Iterable[Annotation], *, objects: bool = False) -> Iterator[bytes]:
    """Write the lines of images, whose paths are those beside the file; `objects`: with their boxes."""
    for annotation in images:
        entry: dict[str, JSON] = {"file_name": annotation.path}
        for key, texts in (("label", annotation.labels), ("text", annotation.captions)):
            if texts:
                entry[key] = texts[0] if len(texts) == 1 else list(texts)
        if objects:
            boxes = [[box.x1, box.y1, side(box.x1, box.x2), side(box.y1, box.y2)] for box in annotation.boxes]
            entry["objects"] = {"bbox": boxes, "categories": [box.label for box in annotation.boxes]}
        yield json.dumps(entry).encode() + b"\n"
