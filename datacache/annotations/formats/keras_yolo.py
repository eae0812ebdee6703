"""keras-yolo3: a line an image, `path x1,y1,x2,y2,class x1,y1,x2,y2,class …`, in whole pixels.

The format of https://github.com/qqwweee/keras-yolo3 and its descendants; the classes' names are in a file of their own.
Used by the annotation table and by conversions. Pure functions, any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from datacache.annotations.formats.json_stream import Data, read_lines
from datacache.annotations.formats.values import ClassIds, parse_number
from datacache.annotations.model import Annotation, Box, Draft, DraftFile, Problem, Problems, quote

_TOKEN = re.compile(r"[^ \t\v\f]+")
_IMAGE_END = re.compile(r"\.(?:jpe?g|jpe|jfif|png|bmp|webp|tiff?|gif|p[gpnb]m)$", re.IGNORECASE)


def parse(data: Data, file: str, classes: Sequence[str]) -> DraftFile:
    """Read the boxes of each image, in the order of their first lines; `name` of a draft is the path as it is written.

    A path may have spaces: it ends with the last word that has an image's extension, and boxes follow. Several lines of
    one image are taken together. Bytes that are not UTF-8 stay as they are, as in a snapshot.
    """
    of_file, ids = Problems(file), ClassIds(classes)
    found: dict[str, tuple[int, list[Box], Problems]] = {}
    for number, line in read_lines(data, of_file, newline=None, errors="surrogateescape"):
        words = list(_TOKEN.finditer(line))
        if not words:
            continue
        boxes_from = _first_box([word.group() for word in words])
        path = line[words[0].start() : words[boxes_from - 1].end()] if boxes_from else ""
        if not path:
            message = f"{quote(line.strip())} has no path before its boxes; the line is left out"
            of_file.add("line-malformed", "skipped", message, number)
            continue
        begun = path in found
        first, boxes, problems = found.setdefault(path, (number, [], Problems(file)))
        if begun:
            message = f"{quote(path)} has line {first} already; the boxes of both are taken together"
            problems.add("image-repeated", "noted", message, number)
        read = (_box(word.group(), number, ids, problems) for word in words[boxes_from:])
        boxes += [box for box in read if box is not None]
    ids.finish(of_file, lambda lines: f"{len(lines):,} boxes are")
    images: list[tuple[Draft, list[Problem]]] = [
        (Draft(file, path, boxes=tuple(boxes), line=number), problems)
        for path, (number, boxes, problems) in found.items()
    ]
    return DraftFile(images, of_file, tuple(classes))


def _box(word: str, number: int, ids: ClassIds, problems: Problems) -> Box | None:
    parts = word.split(",")
    if len(parts) != 5:
        message = f"{quote(word)} is not x1,y1,x2,y2,class; the box is left out"
        problems.add("line-malformed", "skipped", message, number)
        return None
    edges: list[float] = []
    for part in parts[:4]:
        value = parse_number(part)
        if value is None:
            message = f"{quote(part)} in {quote(word)} is not a number; the box is left out"
            problems.add("box-text", "skipped", message, number)
            return None
        edges.append(value)
    id = ids.parse(parts[4], "box", problems, number)
    x1, y1, x2, y2 = edges
    return None if id is None else Box(ids.label(id, number), x1, y1, x2, y2, line=number)


def write_line(annotation: Annotation, class_ids: Mapping[str, int]) -> tuple[bytes, list[Problem]]:
    """Write the line of a checked annotation. Boxes whose label is not in `class_ids` are left out; callers report it.

    keras-yolo3 reads whole numbers only, so edges are rounded to the nearest pixel, a half upwards; a box that would
    lose its area keeps one pixel. Its loader splits lines at every space: a path with one is written, and noted. A path
    with a line break cannot be written: no line, and a problem.
    """
    path = annotation.path
    if "\n" in path or "\r" in path:
        message = f"{quote(path)} has a line break, which no line can hold; the image is left out"
        return b"", [Problem("path-unwritable", "skipped", path, 0, message)]
    words = [path]
    for label, x1, y1, x2, y2, *_ in annotation.boxes:
        id = class_ids.get(label)
        if id is not None:
            left, right = _whole(x1, x2)
            top, bottom = _whole(y1, y2)
            words.append(f"{left},{top},{right},{bottom},{id}")
    problems: list[Problem] = []
    if len(path.split()) != 1:
        message = "the path has spaces, at which keras-yolo3's own loader splits a line"
        problems.append(Problem("path-spaces", "noted", path, 0, message))
    return f"{' '.join(words)}\n".encode("utf-8", "surrogateescape"), problems


def _first_box(words: Sequence[str]) -> int:
    """Return how many words are the path."""
    for number in range(len(words), 0, -1):
        if _IMAGE_END.search(words[number - 1]):
            return number
    # Without an extension, the boxes are what has four commas at the end of the line.
    number = len(words)
    while number and words[number - 1].count(",") == 4:
        number -= 1
    return number


def _whole(low: float, high: float) -> tuple[int, int]:
    first, last = int(low + 0.5), int(high + 0.5)
    return (first, last) if first < last else (int(low), int(low) + 1)
