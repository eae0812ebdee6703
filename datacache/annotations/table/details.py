"""The details of one range of images: coordinates, flags, lines, attributes, labels of whole images, sources, problems.

They are read where boxes are wanted; queries look at the range's summary (`table_summary`) alone. A range has as many
details blobs as keep each of them small enough for every catalog, nearly always one. The encoding is canonical: the
same rows give the same bytes. Pure functions, any thread, any process.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from operator import add, sub
from typing import TYPE_CHECKING, get_args

from datacache.annotations.model import Action, Annotation, Box, Problem
from datacache.annotations.table.columns import ColumnReader, ColumnWriter, as_float64
from datacache.annotations.table.summary import UNUSABLE, Row, Summary, range_labels
from datacache.core.errors import CorruptManifestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_ITEMS = 50_000
"""Boxes and problems of a details blob; one image's are never split."""
_MAGIC, _PROBLEMS_MAGIC = b"DCAD", b"DCAP"
_NOTHING = Annotation("", 0, 0)
_NO_BOXES: tuple[tuple[()], ...] = ((),) * 10
_FLAGS = tuple([bool(bits & bit) for bits in range(8)] for bit in (1, 2, 4))
_ACTIONS: tuple[Action, ...] = get_args(Action)
_box = partial(tuple.__new__, Box)


def encode_details(rows: Sequence[Row]) -> list[bytes]:
    """The bytes of a range's details, in one blob or more."""
    ids = {label: n for n, label in enumerate(range_labels(rows))}
    parts, part, items = [], list[Row](), 0
    for row in rows:
        size = len(row.problems) + (len(row.annotation.boxes) if row.annotation else 0)
        if part and items + size > MAX_ITEMS:
            parts.append(_encode_details(part, ids))
            part, items = [], 0
        part.append(row)
        items += size
    return [*parts, _encode_details(part, ids)]


def _encode_details(rows: Sequence[Row], ids: dict[str, int]) -> bytes:
    annotations = [row.annotation or _NOTHING for row in rows]
    boxes = [box for annotation in annotations for box in annotation.boxes]
    labels, x1, y1, x2, y2, difficult, truncated, occluded, attributes, lines = (
        zip(*boxes, strict=True) if boxes else _NO_BOXES
    )
    out = ColumnWriter(_MAGIC, len(rows))
    out.texts([_relate(annotation.source, row.path) for annotation, row in zip(annotations, rows, strict=True)])
    out.numbers([ids[label] for label in labels])
    _put_coordinates(out, array("d", x1), array("d", y1), array("d", x2), array("d", y2))
    if any(difficult) or any(truncated) or any(occluded):
        out.numbers([d | t << 1 | o << 2 for d, t, o in zip(difficult, truncated, occluded, strict=True)])
    else:
        out.numbers([0] * len(boxes))
    out.numbers(lines)
    kinds = {kind: n for n, kind in enumerate(dict.fromkeys(chain(((),), attributes)))}
    out.numbers([len(kinds)])
    out.texts([json.dumps(kind, separators=(",", ":")) for kind in kinds])
    out.numbers([kinds[kind] for kind in attributes])
    out.numbers([len(annotation.labels) for annotation in annotations])
    out.numbers([ids[label] for annotation in annotations for label in annotation.labels])
    out.numbers([len(row.problems) for row in rows])
    _put_problems(out, [(problem, row.path) for row in rows for problem in row.problems])
    return out.finish()


def decode_details(parts: Sequence[bytes], summary: Summary) -> Iterator[Row]:
    """The rows of a range. `CorruptManifestError` if the blobs do not fit together."""
    paths, objects, labels = summary.paths(), summary.objects(), summary.labels
    columns = zip(paths, summary.states(), summary.widths(), summary.heights(), strict=True)
    row = 0
    try:
        for raw in parts:
            details = _Details(raw, objects[row:], labels)
            mine = paths[row : row + details.rows]
            for source, boxes, of_image, problems in details.decode(mine):
                path, state, width, height = next(columns)
                found = None if state == UNUSABLE else Annotation(path, width, height, boxes, of_image, source)
                yield Row(found, path, problems)
            row += details.rows
    except (IndexError, ValueError, StopIteration) as exc:
        raise CorruptManifestError("a range of annotations does not fit its summary") from exc
    if row != summary.rows:
        raise CorruptManifestError("a range of annotations does not fit its summary")


def box_sizes(parts: Sequence[bytes], summary: Summary) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Widths and heights in pixels of all boxes of a range, in the order of its images."""
    import numpy as np

    objects, row = summary.objects(), 0
    widths, heights = [np.zeros(0)], [np.zeros(0)]
    for raw in parts:
        details = _Details(raw, objects[row:], ())
        width, height = details.sizes()
        widths.append(width)
        heights.append(height)
        row += details.rows
    if row != summary.rows:
        raise CorruptManifestError("a range of annotations does not fit its summary")
    return np.concatenate(widths), np.concatenate(heights)


class _Details:
    """A details blob, with the numbers of boxes of its images (and any that follow) and the range's labels."""

    def __init__(self, raw: bytes, objects: Sequence[int], labels: Sequence[str]) -> None:
        self._columns = ColumnReader(raw, _MAGIC, "a range of annotations")
        self.rows = self._columns.rows
        self._objects = objects[: self.rows]
        self._boxes = sum(self._objects)
        self._labels = labels

    def coordinates(self) -> tuple[Sequence[float], ...]:
        """x1, y1, x2, y2 of all boxes."""
        if self._columns.is_floats(3):
            return tuple(self._columns.floats(3 + n, self._boxes) for n in range(4))
        x1, y1, width, height = (self._columns.numbers(3 + n, self._boxes) for n in range(4))
        x2, y2 = map(add, x1, width), map(add, y1, height)
        return list(map(float, x1)), list(map(float, y1)), list(map(float, x2)), list(map(float, y2))

    def sizes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Widths and heights of all boxes."""
        if self._columns.is_floats(3):
            x1, y1, x2, y2 = (as_float64(self._columns.floats(3 + n, self._boxes)) for n in range(4))
            return x2 - x1, y2 - y1
        width, height = (as_float64(self._columns.numbers(5 + n, self._boxes)) for n in range(2))
        return width, height

    def decode(
        self, paths: Sequence[str]
    ) -> Iterator[tuple[str, tuple[Box, ...], tuple[str, ...], tuple[Problem, ...]]]:
        """Source, boxes, labels of the whole image and problems, image by image."""
        columns, count, labels = self._columns, self._boxes, self._labels
        flags = columns.numbers(7, count)
        kind_count = columns.numbers(9, 1)[0]
        kinds = [tuple(map(tuple, json.loads(text))) for text in columns.texts(10, kind_count)]
        boxes = list(
            map(
                _box,
                zip(
                    map(labels.__getitem__, columns.numbers(2, count)),
                    *self.coordinates(),
                    map(_FLAGS[0].__getitem__, flags),
                    map(_FLAGS[1].__getitem__, flags),
                    map(_FLAGS[2].__getitem__, flags),
                    map(kinds.__getitem__, columns.numbers(12, count)),
                    columns.numbers(8, count),
                    strict=True,
                ),
            )
        )
        label_counts = columns.numbers(13, self.rows)
        of_images = [labels[n] for n in columns.numbers(14, sum(label_counts))]
        problem_counts = columns.numbers(15, self.rows)
        files = [path for path, n in zip(paths, problem_counts, strict=True) for _ in range(n)]
        problems = _get_problems(columns, 16, files)
        return zip(
            map(_unrelate, columns.texts(0, self.rows), paths),
            _split(boxes, self._objects),
            _split(of_images, label_counts),
            _split(problems, problem_counts),
            strict=True,
        )


def encode_problems(problems: Sequence[Problem]) -> bytes:
    """The bytes of problems that belong to no image."""
    out = ColumnWriter(_PROBLEMS_MAGIC, len(problems))
    _put_problems(out, [(problem, "") for problem in problems])
    return out.finish()


def decode_problems(raw: bytes) -> list[Problem]:
    """The problems of these bytes."""
    columns = ColumnReader(raw, _PROBLEMS_MAGIC, "a list of problems")
    try:
        return _get_problems(columns, 0, [""] * columns.rows)
    except (IndexError, ValueError) as exc:
        raise CorruptManifestError("a list of problems is damaged") from exc


def _split(values: Sequence, counts: Sequence[int]) -> Iterator[tuple]:  # type: ignore[type-arg]
    return (tuple(values[a:b]) for a, b in pairwise(accumulate(counts, initial=0)))


def _put_coordinates(out: ColumnWriter, *sides: array[float]) -> None:
    """Whole numbers, as nearly all VOC files have them, as corner and size; all else as doubles."""
    corners = _whole(sides)
    if corners is not None:
        for numbers in corners:
            out.numbers(numbers)
    else:
        for side in sides:
            out.floats(side)


def _whole(sides: Sequence[array[float]]) -> list[list[int]] | None:
    """x1, y1, width and height as whole numbers from 0 below 2**32, if they are."""
    try:
        x1, y1, x2, y2 = numbers = [list(map(int, side)) for side in sides]
    except (ValueError, OverflowError):  # nan, inf
        return None
    if any(ints != side.tolist() for ints, side in zip(numbers, sides, strict=True)):
        return None
    corners = [x1, y1, list(map(sub, x2, x1)), list(map(sub, y2, y1))]
    return corners if all(min(c, default=0) >= 0 and max(c, default=0) < 2**32 for c in corners) else None


def _put_problems(out: ColumnWriter, problems: Sequence[tuple[Problem, str]]) -> None:
    codes = sorted({problem.code for problem, _ in problems})
    ids = {code: n for n, code in enumerate(codes)}
    out.numbers([len(codes)])
    out.texts(codes)
    out.numbers([ids[problem.code] for problem, _ in problems])
    out.numbers([_ACTIONS.index(problem.action) for problem, _ in problems])
    out.texts([_relate(problem.file, path) for problem, path in problems])
    out.numbers([problem.line for problem, _ in problems])
    out.texts([problem.message for problem, _ in problems])


def _get_problems(columns: ColumnReader, first: int, paths: Sequence[str]) -> list[Problem]:
    count = len(paths)
    codes = columns.texts(first + 1, columns.numbers(first, 1)[0])
    return list(
        map(
            Problem,
            map(codes.__getitem__, columns.numbers(first + 3, count)),
            map(_ACTIONS.__getitem__, columns.numbers(first + 4, count)),
            map(_unrelate, columns.texts(first + 5, count), paths),
            columns.numbers(first + 7, count),
            columns.texts(first + 8, count),
        )
    )


def _relate(file: str, path: str) -> str:
    """`Annotations/a.xml` of `JPEGImages/a.jpg` as `Annotations/\\0.xml`, which is the same for every image."""
    if "\0" in file:
        return f"\0\0{file}"
    stem = _stem(path)
    folder, slash, name = file.rpartition("/")
    return f"{folder}{slash}\0{name[len(stem) :]}" if stem and name.startswith(stem) else file


def _unrelate(text: str, path: str) -> str:
    return text[2:] if text.startswith("\0\0") else text.replace("\0", _stem(path), 1)


def _stem(path: str) -> str:
    name = path.rpartition("/")[2]
    return name.rpartition(".")[0] or name
