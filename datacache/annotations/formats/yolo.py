"""YOLO: a label file an image, with a line `class cx cy w h` an object, as parts of the image's sides.

Both kinds lay them out differently and write the same lines: Ultralytics has `data.yaml` and `labels/` beside `images/`
(https://docs.ultralytics.com/datasets/detect/), Darknet has `obj.data`, `obj.names` and labels beside the images
(https://github.com/AlexeyAB/darknet#how-to-train-to-detect-your-custom-objects). Used by the annotation table and by
conversions. Pure functions, any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from datacache.annotations.formats.values import ClassIds, bounding_box, parse_number
from datacache.annotations.model import Annotation, Box, Draft, Problem, Problems, quote
from datacache.core.errors import AnnotationError, UsageError

MAX_BYTES: Final = 32 * 2**20
MAX_LINES: Final = 100_000
_BOM = b"\xef\xbb\xbf"
_KEYS = frozenset(("path", "nc", "names", "download", "kpt_shape", "flip_idx", "channels", "yaml_file"))
_PLAIN = frozenset(("train", "val", "test"))  # all others may be keywords: YAML 1.1 reads `no` as false
_LINE = b"%d %.6f %.6f %.6f %.6f\n"


# --- label files ----------------------------------------------------------------------------------------------------


def parse(
    data: bytes | memoryview, file: str, *, width: int, height: int, classes: Sequence[str], pose: bool = False
) -> tuple[Draft, list[Problem]]:
    """Read the boxes of a label file, in pixels of an image of `width` by `height` as it is displayed.

    A line may have a confidence after its box (an attribute), or be a polygon `class x1 y1 x2 y2 x3 y3 …` (its bounding
    box is taken); with `pose`, keypoints follow each box. An id that is not in `classes` becomes the label `class_7`,
    which is a problem only where there is a list. The draft has no size: the format knows none. `AnnotationError` for a
    file that is larger than any of one image.
    """
    data = bytes(data)
    if len(data) > MAX_BYTES:
        message = f"the file has {len(data):,} bytes, more than {MAX_BYTES:,}"
        raise AnnotationError(message, code="file-too-large", file=file)
    lines = (data[3:] if data[:3] == _BOM else data).splitlines()
    if len(lines) > MAX_LINES:
        message = f"the file has {len(lines):,} lines, more than {MAX_LINES:,}"
        raise AnnotationError(message, code="file-too-large", file=file)
    reader = _Lines(file, width, height, classes)
    listed = len(classes)
    boxes = reader.boxes
    for number, line in enumerate(lines, 1):
        parts = line.split()
        # Nearly every line of nearly every file; `_Lines.odd` reads the others.
        if len(parts) == 5 and b"_" not in line:
            try:
                id = int(parts[0])
                cx, cy, w, h = map(float, parts[1:])
            except ValueError:
                pass
            else:
                if 0 <= id < listed:
                    x1, y1, x2, y2 = (
                        (cx - w / 2) * width,
                        (cy - h / 2) * height,
                        (cx + w / 2) * width,
                        (cy + h / 2) * height,
                    )
                    boxes.append(Box(classes[id], x1, y1, x2, y2, False, False, False, (), number))
                    continue
        if parts:
            reader.odd(parts, number, pose=pose)
    reader.finish()
    return Draft(file, boxes=tuple(boxes)), reader.problems


class _Lines:
    """The boxes and problems of one label file while it is read."""

    def __init__(self, file: str, width: int, height: int, classes: Sequence[str]) -> None:
        self.file = file
        self.boxes: list[Box] = []
        self.problems = Problems(file)
        self._width, self._height, self._ids = width, height, ClassIds(classes)
        self._polygons: list[int] = []
        self._poses: list[int] = []

    def odd(self, parts: Sequence[bytes], number: int, *, pose: bool) -> None:
        """Read a line that is not five numbers with a class of the list."""
        columns = len(parts)
        polygon = columns >= 7 and columns % 2 == 1 and not pose
        if columns < 5 or (columns > 6 and not polygon and not pose):
            message = f"{_shown(parts)} has {columns} columns, and a box has 5; the line is left out"
            self.problems.add("line-malformed", "skipped", message, number)
            return
        id = self._ids.parse(parts[0], "line", self.problems, number)
        if id is None:
            return
        values: list[float] = []
        for part in parts[1:5] if pose else parts[1:]:  # keypoints are not read, and so cannot be wrong
            value = parse_number(part)
            if value is None:
                message = f"{quote(_text(part))} is not a number; the line is left out"
                self.problems.add("box-text", "skipped", message, number)
                return
            values.append(value)
        if polygon:
            self._polygons.append(number)
            edges = bounding_box(values)
        else:
            cx, cy, w, h = values[:4]
            edges = (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2)
            if columns > 6:
                self._poses.append(number)
        attributes = (("confidence", _text(parts[5])),) if columns == 6 and not pose else ()
        x1, y1, x2, y2 = edges
        w, h = self._width, self._height
        label = self._ids.label(id, number)
        self.boxes.append(Box(label, x1 * w, y1 * h, x2 * w, y2 * h, attributes=attributes, line=number))

    def finish(self) -> None:
        """Report what is said once for the whole file."""
        self._ids.finish(self.problems, _objects)
        if self._polygons:
            message = f"{_objects(self._polygons)} drawn as polygons; their bounding boxes were taken"
            self.problems.add("polygon-boxed", "noted", message, self._polygons[0])
        if self._poses:
            message = f"{_objects(self._poses)} with keypoints, which are left out; the boxes were taken"
            self.problems.add("keypoints-ignored", "noted", message, self._poses[0])


def write(annotation: Annotation, class_ids: Mapping[str, int]) -> bytes:
    """Write the label file of a checked annotation: a line a box in their order, six decimals. Boxes whose label is not
    in `class_ids` are left out; callers report it.

    Rounding moves an edge by up to 0.75e-6 of the image's side (half a unit of the centre, a quarter of the size), so a
    box at the image's edge may be read again as lying that far outside.
    """
    width, height = annotation.width, annotation.height
    twice_width, twice_height = 2 * width, 2 * height
    values: list[float] = []
    count = 0
    for label, x1, y1, x2, y2, *_ in annotation.boxes:
        id = class_ids.get(label)
        if id is not None:
            count += 1
            # Dividing by 2w is dividing by 2 and then by w to the last bit; multiplying by 1/w is not.
            values += (id, (x1 + x2) / twice_width, (y1 + y2) / twice_height, (x2 - x1) / width, (y2 - y1) / height)
    return _LINE * count % tuple(values)


# --- data.yaml and obj.data -----------------------------------------------------------------------------------------


def data_yaml(folders: Mapping[str, str], classes: Sequence[str]) -> bytes:
    """Write `data.yaml` for folders of images by split.

    Ultralytics refuses a file without `train` and `val`: where one of them is not there, it is the first folder. There
    is no `path`: without it the folders are beside the file, while `path: .` means wherever training was started
    (`check_det_dataset` in ultralytics/data/utils.py).
    """
    wrong = next((name for name in folders if name in _KEYS), None)
    if wrong is not None:
        raise UsageError(f"a split cannot be called {wrong!r}: data.yaml has a key of that name")
    first = next(iter(folders.values()), ".")
    ordered = {"train": folders.get("train", first), "val": folders.get("val", first), **folders}
    lines = [f"{name if name in _PLAIN else _yaml(name)}: {_yaml(folder)}\n" for name, folder in ordered.items()]
    lines.append(f"nc: {len(classes)}\n")
    lines.append("names:\n" if classes else "names: {}\n")
    lines += [f"  {id}: {_yaml(name)}\n" for id, name in enumerate(classes)]
    return "".join(lines).encode()


def darknet_data(classes: int, lists: Mapping[str, str]) -> bytes:
    """Write `obj.data`: the number of classes and the lists of images by split; Darknet calls `val` `valid`.

    `UsageError` for a split that has the name of another key.
    """
    taken = {"classes", "names", "backup"}
    lines = [f"classes = {classes}\n"]
    for split, path in lists.items():
        key = "valid" if split == "val" else split
        if key in taken:
            raise UsageError(f"a split cannot be called {split!r}: obj.data has {key!r} already")
        taken.add(key)
        lines.append(f"{key} = {path}\n")
    return "".join([*lines, "names = obj.names\n", "backup = backup/\n"]).encode("utf-8", "surrogateescape")


def _yaml(text: str) -> str:
    """Write a double-quoted scalar: the one style of YAML that holds every string, and has no keywords."""

    def escaped(char: str) -> str:
        if char in '"\\':
            return f"\\{char}"
        code = ord(char)
        if char.isprintable():
            return char
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return f'"{"".join(map(escaped, text))}"'


# --- small parts ----------------------------------------------------------------------------------------------------


def _objects(lines: Sequence[int]) -> str:
    return "1 object is" if len(lines) == 1 else f"{len(lines):,} objects are"


def _text(part: bytes) -> str:
    return part.decode("utf-8", "replace")


def _shown(parts: Sequence[bytes]) -> str:
    return quote(_text(b" ".join(parts)))
