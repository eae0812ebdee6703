"""YOLO: a label file an image, with a line `class cx cy w h` an object, as parts of the image's sides.

Both kinds lay them out differently and write the same lines: Ultralytics has `data.yaml` and `labels/` beside `images/`
(https://docs.ultralytics.com/datasets/detect/), Darknet has `obj.data`, `obj.names` and labels beside the images
(https://github.com/AlexeyAB/darknet#how-to-train-to-detect-your-custom-objects). Used by the annotation table and by
conversions. Pure functions, any thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Final

from datacache.annotations.formats.geometry import MAX_POINTS
from datacache.annotations.formats.values import ClassIds, parse_number
from datacache.annotations.model import Annotation, Box, Draft, Problem, Problems, quote
from datacache.annotations.shapes.outline import (
    NOTHING,
    POINT_BYTES,
    Keypoints,
    Polygon,
    Rotated,
    Skeleton,
    bounds,
    pack,
    unpack,
)
from datacache.core.errors import AnnotationError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_BYTES: Final = 32 * 2**20
MAX_LINES: Final = 100_000
_BOM = b"\xef\xbb\xbf"
_KEYS = frozenset(("path", "nc", "names", "download", "kpt_shape", "kpt_names", "flip_idx", "channels", "yaml_file"))
_PLAIN = frozenset(("train", "val", "test"))  # all others may be keywords: YAML 1.1 reads `no` as false
_LINE = b"%d %.6f %.6f %.6f %.6f\n"


# --- label files ----------------------------------------------------------------------------------------------------


def parse(
    data: bytes | memoryview,
    file: str,
    *,
    width: int,
    height: int,
    classes: Sequence[str],
    pose: Skeleton | None = None,
    rotated: bool = False,
) -> tuple[Draft, list[Problem]]:
    """Read the objects of a label file, in pixels of an image of `width` by `height` as it is displayed.

    A line may be a polygon `class x1 y1 x2 y2 x3 y3 …`, which with `rotated` is the corners of a rotated box where
    there are four; with `pose`, keypoints follow each box. After all but a polygon may come a confidence, the score.

    An id that is not in `classes` becomes the label `class_7`, which is a problem only where there is a list. The draft
    has no size: the format knows none. `AnnotationError` for a file that is larger than any of one image.
    """
    data = bytes(data)
    if len(data) > MAX_BYTES:
        message = f"the file has {len(data):,} bytes, more than {MAX_BYTES:,}"
        raise AnnotationError(message, code="file-too-large", file=file)
    lines = (data[3:] if data[:3] == _BOM else data).splitlines()
    if len(lines) > MAX_LINES:
        message = f"the file has {len(lines):,} lines, more than {MAX_LINES:,}"
        raise AnnotationError(message, code="file-too-large", file=file)
    reader = _Lines(file, (width, height), classes, pose, rotated=rotated)
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
            reader.odd(parts, number)
    reader.finish()
    return Draft(file, boxes=tuple(boxes)), reader.problems


class _Lines:
    """The boxes and problems of one label file while it is read."""

    def __init__(
        self, file: str, size: tuple[int, int], classes: Sequence[str], pose: Skeleton | None, *, rotated: bool
    ) -> None:
        self.file = file
        self.boxes: list[Box] = []
        self.problems = Problems(file)
        (self._width, self._height), self._ids = size, ClassIds(classes)
        self._pose, self._rotated = pose, rotated

    def odd(self, parts: Sequence[bytes], number: int) -> None:
        """Read a line that is not five numbers with a class of the list."""
        columns, pose = len(parts), self._pose
        scored = columns == 6 + (len(pose.names) * pose.dims if pose else 0) or (self._rotated and columns == 10)
        confidence, parts = (parts[-1:], parts[:-1]) if scored else ([], parts)
        polygon = len(parts) >= 7 and len(parts) % 2 == 1 and pose is None
        if columns < 5 or (len(parts) > 5 and not polygon and pose is None):
            message = f"{_shown(parts)} has {columns} columns, and a box has 5; the line is left out"
            self.problems.add("line-malformed", "skipped", message, number)
            return
        columns = len(parts)
        if polygon and columns > 1 + 2 * MAX_POINTS:
            message = f"the polygon has more than {MAX_POINTS:,} points; the line is left out"
            self.problems.add("shape-too-large", "skipped", message, number)
            return
        id = self._ids.parse(parts[0], "line", self.problems, number)
        if id is None:
            return
        values: list[float] = []
        for part in (*confidence, *(parts[1:5] if pose else parts[1:])):
            value = parse_number(part)
            if value is None or (confidence and not values and not isfinite(value)):
                message = f"{quote(_text(part))} is not a number; the line is left out"
                self.problems.add("box-text", "skipped", message, number)
                return
            values.append(value)
        w, h = self._width, self._height
        label = self._ids.label(id, number)
        extra = NOTHING._replace(score=values.pop(0)) if confidence else NOTHING
        if polygon:
            points = array("d", values)
            points[0::2] = array("d", [x * w for x in values[0::2]])
            points[1::2] = array("d", [y * h for y in values[1::2]])
            raw = points.tobytes()
            extra = extra._replace(outline=Rotated(raw) if self._rotated and columns == 9 else Polygon(raw))
            edges = bounds(raw)
        else:
            cx, cy, bw, bh = values[:4]
            edges = (cx - bw / 2) * w, (cy - bh / 2) * h, (cx + bw / 2) * w, (cy + bh / 2) * h
            if pose is not None:
                extra = extra._replace(keypoints=self._keypoints(parts[5:], pose, number))
        self.boxes.append(Box(label, *edges, line=number, extra=None if extra == NOTHING else extra))

    def finish(self) -> None:
        """Report what is said once for the whole file."""
        self._ids.finish(self.problems, _objects)

    def _keypoints(self, parts: Sequence[bytes], pose: Skeleton, number: int) -> Keypoints | None:
        """Read what comes after a box: x and y of each keypoint, and with three dimensions its visibility. With two
        those at 0, 0 or with a negative number are not there. None where all are zeros: no keypoint is labelled."""
        count, dims = len(pose.names), pose.dims
        values = [value for value in map(parse_number, parts) if value is not None]
        there = [x >= 0 and y >= 0 and x + y > 0 for x, y in zip(values[0::2], values[1::2], strict=False)]
        seen = values[2::3] if dims == 3 else [2.0 * each for each in there]
        if not len(parts) == len(values) == count * dims or not {0.0, 1.0, 2.0}.issuperset(seen):
            message = f"there are not {count} keypoints of {dims} numbers after the box; they are left out"
            self.problems.add("keypoints-malformed", "repaired", message, number)
            return None
        if not any(values):
            return None
        points = array("d", bytes(16 * count))
        points[0::2] = array("d", [x * self._width for x in values[0::dims]])
        points[1::2] = array("d", [y * self._height for y in values[1::dims]])
        if dims == 2:
            points = array("d", [value if there[n // 2] else 0.0 for n, value in enumerate(points)])
        return Keypoints(points.tobytes(), bytes(map(int, seen)))


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


def write_scored(annotation: Annotation, class_ids: Mapping[str, int]) -> bytes:
    """Write the label file with a confidence behind each box that has a score, in as many digits as give it again, as
    Ultralytics saves predictions. Its training leaves out an image with such a label file."""
    lines = write(annotation, class_ids).splitlines()
    scores = (box.extra and box.extra.score for _, box in _chosen(annotation, class_ids))
    pairs = zip(lines, scores, strict=True)
    return b"".join(line + (b"\n" if score is None else b" %b\n" % repr(score).encode()) for line, score in pairs)


def write_outlines(annotations: Sequence[Annotation], class_ids: Mapping[str, int]) -> list[bytes]:
    """Write label files for segmentation or rotated boxes: a line an object with the points of its outline, which is a
    polygon of one ring or a rotated box; of a box alone its four corners. Of many images at once: NumPy's calls for
    each take longer than what they do.

    Points are written inside the image: Ultralytics leaves out an image with one outside."""
    boxes = [_chosen(annotation, class_ids) for annotation in annotations]
    points = [[_points_of(box) for _, box in its] for its in boxes]
    parts = [b"".join(its) for its in points]
    if not any(parts):
        return [b""] * len(boxes)
    import numpy as np

    sides = np.array([(annotation.width, annotation.height) for annotation in annotations])
    values = np.frombuffer(b"".join(parts)).reshape(-1, 2)
    values = values / np.repeat(sides, [len(part) // POINT_BYTES for part in parts], axis=0)
    text, at = _six_decimals(values.ravel()), 0
    files: list[bytes] = []
    for its, of_boxes in zip(boxes, points, strict=True):
        lines: list[bytes] = []
        for (id, _), part in zip(its, of_boxes, strict=True):
            end = at + len(part) // 8 * 9
            lines.append(b"%d%b\n" % (id, text[at:end]))
            at = end
        files.append(b"".join(lines))
    return files


def _points_of(box: Box) -> bytes:
    outline = box.extra and box.extra.outline
    if isinstance(outline, Polygon | Rotated):
        return outline[0]
    return pack((box.x1, box.y1, box.x2, box.y1, box.x2, box.y2, box.x1, box.y2))


def _six_decimals(values: NDArray[np.float64]) -> bytes:
    """Write numbers from 0 to 1, to which others are cut, as ` 0.123456`: nine bytes each, looked up three digits at a
    time, in a tenth of the time that `%.6f` takes."""
    import numpy as np

    first, last = _digits()
    units = np.rint(np.maximum(np.minimum(values, 1.0), 0.0) * 1e6).astype(np.int32)
    thousands = units // 1000
    text = np.empty((len(units), 9), np.uint8)
    text[:, 0] = ord(" ")
    text[:, 1:] = (first[thousands] | last[units - 1000 * thousands]).view(np.uint8).reshape(-1, 8)
    return text.tobytes()


@cache
def _digits() -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the texts `0.000` to `1.000`, and `000` to `999` at the end of eight bytes; each as a number."""
    import numpy as np

    first = b"".join(b"%d.%03d\0\0\0" % divmod(number, 1000) for number in range(1001))
    last = b"".join(b"\0\0\0\0\0%03d" % number for number in range(1000))
    return np.frombuffer(first, np.uint64), np.frombuffer(last, np.uint64)


def write_keypoints(annotation: Annotation, class_ids: Mapping[str, int], skeleton: Skeleton) -> bytes:
    """Write the label file for keypoints: a line an object with its box, then x, y and visibility of each of the
    skeleton's keypoints; 0, 0 and 0 for those that an object has not."""
    lines: list[bytes] = []
    boxes = write(annotation, class_ids).splitlines()
    for line, (_, box) in zip(boxes, _chosen(annotation, class_ids), strict=True):
        keypoints = box.extra and box.extra.keypoints
        shares, seen = [], b""
        if keypoints:
            shares, seen = list(_shares(unpack(keypoints.points), annotation)), keypoints.visible
        lines.append(line)
        for n in range(len(skeleton.names)):
            point = (shares[2 * n], shares[2 * n + 1], seen[n]) if n < len(seen) else (0.0, 0.0, 0)
            lines.append(b" %.6f %.6f %d" % point)
        lines.append(b"\n")
    return b"".join(lines)


def _chosen(annotation: Annotation, class_ids: Mapping[str, int]) -> list[tuple[int, Box]]:
    return [(class_ids[box.label], box) for box in annotation.boxes if box.label in class_ids]


def _shares(values: array[float], annotation: Annotation) -> Iterator[float]:
    """Return x, y, x, y … as parts of the image's sides, from 0 to 1."""
    sides = annotation.width, annotation.height
    return (min(max(value / sides[n & 1], 0.0), 1.0) for n, value in enumerate(values))


# --- data.yaml and obj.data -----------------------------------------------------------------------------------------


def data_yaml(
    folders: Mapping[str, str], classes: Sequence[str], pose: Skeleton | None = None, *, rotated: bool = False
) -> bytes:
    """Write `data.yaml` for folders of images by split. That labels are `rotated` boxes stands in a comment, by which
    `read_data_yaml` knows them from polygons; Ultralytics does not tell.

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
    if pose is not None:
        lines.append(f"kpt_shape: [{len(pose.names)}, {pose.dims}]\n")
        lines += [f"flip_idx: {list(pose.flip)}\n"] if pose.flip else []
        names = ", ".join(map(_yaml, pose.names))
        lines += ["kpt_names:\n", *(f"  {id}: [{names}]\n" for id in range(len(classes)))]
    return "".join(["# task: obb\n"] * rotated + lines).encode()


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
