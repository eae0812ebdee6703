"""One range of images as bytes: a summary that queries look at, and details that are read where boxes are wanted.

The summary has paths, image sizes, numbers of boxes and, label by label, the images that have it: a query over 100,000
images reads some 10 bytes an image instead of 100. The details have coordinates, flags, lines, attributes, labels of
whole images, sources and problems, in as many blobs as keep each small enough for every catalog, nearly always one. The
encoding is canonical: the same rows give the same bytes. Pure functions, any thread, any process.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, islice, pairwise, repeat
from operator import add, attrgetter, sub
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from datacache.annotations.model import Action, Annotation, Box, Problem
from datacache.annotations.shapes.outline import Extra
from datacache.annotations.table import shapes
from datacache.annotations.table.columns import ColumnReader, ColumnWriter, as_array, as_float64
from datacache.core.errors import CorruptManifestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SUMMARY_MAGIC, _DETAILS_MAGIC, _PROBLEMS_MAGIC = b"DCAS", b"DCAD", b"DCAP"
ANNOTATED, BARE, UNUSABLE = range(3)
_NOTHING = Annotation("", 0, 0)
_label_of = attrgetter("label")
MAX_ITEMS = 50_000
"""Of boxes and problems in a details blob, outlines by their size; those of one image are never split."""
_SUMMARY_COLUMNS, _DETAILS_COLUMNS = 17, 26
"""Of sets that have boxes alone; what `shapes` writes comes after them."""
_NO_BOXES: tuple[tuple[()], ...] = ((),) * len(Box._fields)
_FLAGS = tuple([bool(bits & bit) for bits in range(8)] for bit in (1, 2, 4))
_ACTIONS: tuple[Action, ...] = get_args(Action)
_box = partial(tuple.__new__, Box)


class Row(NamedTuple):
    """One image of a snapshot, and what is annotated on it."""

    annotation: Annotation | None
    """None where the image cannot be used, and a problem says why."""
    path: str
    problems: tuple[Problem, ...] = ()


def encode_summary(rows: Sequence[Row]) -> bytes:
    """Encode the summary of a range; its rows are in byte order of their paths."""
    annotations = [row.annotation or _NOTHING for row in rows]
    labels = range_labels(rows)
    ids = {label: n for n, label in enumerate(labels)}
    out = ColumnWriter(_SUMMARY_MAGIC, len(rows))
    out.texts([row.path for row in rows], errors="surrogateescape")
    found = [row.annotation for row in rows]
    out.numbers([UNUSABLE if each is None else ANNOTATED if each.source else BARE for each in found])
    out.numbers([annotation.width for annotation in annotations])
    out.numbers([annotation.height for annotation in annotations])
    out.numbers([len(annotation.boxes) for annotation in annotations])
    for flag in ("difficult", "truncated", "occluded"):
        of_box = attrgetter(flag)
        out.numbers([sum(map(of_box, annotation.boxes)) for annotation in annotations])
    # Label by label, the rows that have it: a query for one label unpacks a slice.
    boxes: Counter[tuple[int, int]] = Counter()
    difficult: Counter[tuple[int, int]] = Counter()
    for n, annotation in enumerate(annotations):
        boxes.update(zip(map(ids.__getitem__, map(_label_of, annotation.boxes)), repeat(n)))
        difficult.update((ids[box.label], n) for box in annotation.boxes if box.difficult)
    of_image = {(ids[label], n) for n, annotation in enumerate(annotations) for label in annotation.labels}
    pairs = sorted(boxes.keys() | of_image)
    rows_of_label = Counter(id for id, _ in pairs)
    out.numbers([len(labels)])
    out.texts(labels)
    out.numbers([rows_of_label[n] for n in range(len(labels))])
    out.numbers([row for _, row in pairs])
    out.numbers([boxes[pair] for pair in pairs])
    out.numbers([difficult[pair] for pair in pairs])
    out.numbers([pair in of_image for pair in pairs])
    if any(map(shapes.has_more, annotations)):
        shapes.put_counts(out, annotations)
    return out.finish()


def range_labels(rows: Sequence[Row]) -> list[str]:
    """Return the labels of boxes and of whole images, sorted."""
    annotations = [row.annotation for row in rows if row.annotation is not None]
    boxes = chain.from_iterable(annotation.boxes for annotation in annotations)
    return sorted({*map(_label_of, boxes), *chain.from_iterable(annotation.labels for annotation in annotations)})


class Summary:
    """A decoded summary. Each method unpacks its column."""

    __slots__ = ("_columns", "_label_rows", "labels", "rows")

    def __init__(self, raw: bytes) -> None:
        self._columns = ColumnReader(raw, _SUMMARY_MAGIC, "a summary of annotations")
        self.rows = self._columns.rows
        count = self._columns.numbers(9, 1)[0]
        self.labels = self._columns.texts(10, count)
        """All labels of the range, sorted."""
        self._label_rows = list(accumulate(self._columns.numbers(12, count), initial=0))

    def paths(self) -> list[str]:
        """Return the images' paths."""
        return [path.decode("utf-8", "surrogateescape") for path in self.raw_paths()]

    def raw_paths(self) -> list[bytes]:
        """Return the images' paths as the store has them."""
        return self._columns.raw(0, self.rows)

    def joined_paths(self) -> tuple[Sequence[int], bytes]:
        """Return the lengths of the images' paths in bytes, and all paths without anything between them."""
        return self._columns.numbers(0, self.rows), self._columns.joined(0)

    def states(self) -> Sequence[int]:
        """Return `ANNOTATED`, `BARE` (without an annotation) or `UNUSABLE` for each image."""
        return self._columns.numbers(2, self.rows)

    def widths(self) -> Sequence[int]:
        """Return the images' widths in pixels; 0 for those that cannot be used. `heights` likewise."""
        return self._columns.numbers(3, self.rows)

    def heights(self) -> Sequence[int]:
        return self._columns.numbers(4, self.rows)

    def objects(self) -> Sequence[int]:
        """Return the number of boxes of each image."""
        return self._columns.numbers(5, self.rows)

    def flagged(self, flag: str) -> Sequence[int]:
        """Return the number of boxes of each image that are `difficult`, `truncated` or `occluded`."""
        return self._columns.numbers({"difficult": 6, "truncated": 7, "occluded": 8}[flag], self.rows)

    def shaped(self, name: str) -> Sequence[int]:
        """Return one of the numbers `shapes.SHAPED` of each image."""
        column = _SUMMARY_COLUMNS + shapes.SHAPED.index(name)
        return self._columns.numbers(column, self.rows) if self._columns.has(column) else bytes(self.rows)

    def of_label(self, label: str) -> Iterator[tuple[int, int]]:
        """Yield (row, boxes) of the images that have the label; 0 boxes: it is a label of the whole image only."""
        at = self._slice(label)
        total = self._label_rows[-1]
        rows, boxes = self._columns.numbers(13, total)[at], self._columns.numbers(14, total)[at]
        if max(rows, default=-1) >= self.rows:
            raise CorruptManifestError("a summary of annotations names an image that it does not have")
        return zip(rows, boxes, strict=True)

    def label_rows(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return how many images have each of `labels`; then of these images, label by label, the rows, and the boxes
        as in `of_label`."""
        counts = self._columns.numbers(12, len(self.labels))
        total = self._label_rows[-1]
        return counts, self._columns.numbers(13, total), self._columns.numbers(14, total)

    def difficult_of(self, label: str) -> int:
        """Return the number of difficult boxes of a label."""
        return sum(self._columns.numbers(15, self._label_rows[-1])[self._slice(label)])

    def counts(self) -> list[dict[str, int]]:
        """Return for each image its labels and their numbers of boxes, as in `of_label`."""
        found: list[dict[str, int]] = [{} for _ in range(self.rows)]
        for label in self.labels:
            for row, boxes in self.of_label(label):
                found[row][label] = boxes
        return found

    def totals(self) -> tuple[tuple[str, int, int], ...]:
        """Return (label, images, boxes) for each label."""
        return tuple(
            (label, len(pairs), sum(boxes for _, boxes in pairs))
            for label in self.labels
            for pairs in [list(self.of_label(label))]
        )

    def _slice(self, label: str) -> slice:
        try:
            number = self.labels.index(label)
        except ValueError:
            return slice(0, 0)
        return slice(self._label_rows[number], self._label_rows[number + 1])


def encode_details(rows: Sequence[Row]) -> list[bytes]:
    """Encode the details of a range, in one blob or more."""
    ids = {label: n for n, label in enumerate(range_labels(rows))}
    parts, part, items = [], list[Row](), 0
    for row in rows:
        size = len(row.problems)
        if row.annotation:
            size += len(row.annotation.boxes) + shapes.items(row.annotation)
        if part and items + size > MAX_ITEMS:
            parts.append(_encode_details(part, ids))
            part, items = [], 0
        part.append(row)
        items += size
    return [*parts, _encode_details(part, ids)]


def _encode_details(rows: Sequence[Row], ids: dict[str, int]) -> bytes:
    annotations = [row.annotation or _NOTHING for row in rows]
    boxes = [box for annotation in annotations for box in annotation.boxes]
    labels, x1, y1, x2, y2, difficult, truncated, occluded, attributes, lines, extras = (
        zip(*boxes, strict=True) if boxes else _NO_BOXES
    )
    out = ColumnWriter(_DETAILS_MAGIC, len(rows))
    out.texts([_relate(annotation.source, row.path) for annotation, row in zip(annotations, rows, strict=True)])
    out.numbers([ids[label] for label in labels])
    # Whole numbers, as nearly all VOC files have them, as corner and size; all else as doubles.
    sides = [array("d", side) for side in (x1, y1, x2, y2)]
    corners = _whole(sides)
    for numbers in corners or ():
        out.numbers(numbers)
    for side in sides if corners is None else ():
        out.floats(side)
    out.numbers([d | t << 1 | o << 2 for d, t, o in zip(difficult, truncated, occluded, strict=True)])
    out.numbers(lines)
    kinds = {kind: n for n, kind in enumerate(dict.fromkeys(chain(((),), attributes)))}
    out.numbers([len(kinds)])
    out.texts([json.dumps(kind, separators=(",", ":")) for kind in kinds])
    out.numbers([kinds[kind] for kind in attributes])
    out.numbers([len(annotation.labels) for annotation in annotations])
    out.numbers([ids[label] for annotation in annotations for label in annotation.labels])
    out.numbers([len(row.problems) for row in rows])
    _put_problems(out, [(problem, row.path) for row in rows for problem in row.problems])
    captions = [annotation.captions for annotation in annotations]
    if any(extras) or any(captions):
        shapes.put_extras(out, extras, captions)
    return out.finish()


def decode_details(parts: Sequence[bytes], summary: Summary, rows: slice = slice(None)) -> Iterator[Row]:
    """Yield the rows of a range, or some of them that follow each other. `CorruptManifestError` if the blobs do not fit
    together."""
    start, stop, _ = rows.indices(summary.rows)
    paths, objects, labels = summary.paths(), summary.objects(), summary.labels
    columns = (values[start:stop] for values in (paths, summary.states(), summary.widths(), summary.heights()))
    each = zip(*columns, strict=True)
    row = 0
    try:
        for raw in parts:
            details = _Details(raw, objects[row:], labels)
            first, last = max(start - row, 0), min(stop - row, details.rows)
            mine = paths[row + first : row + last]
            for source, boxes, of_image, problems, captions in details.decode(mine, first, last) if mine else ():
                path, state, width, height = next(each)
                if state == UNUSABLE:
                    found = None
                else:
                    found = Annotation(path, width, height, boxes, of_image, source, captions)
                yield Row(found, path, problems)
            row += details.rows
    except (IndexError, ValueError, StopIteration) as exc:
        raise CorruptManifestError("a range of annotations does not fit its summary") from exc
    if row != summary.rows:
        raise CorruptManifestError("a range of annotations does not fit its summary")


def box_sizes(parts: Sequence[bytes], summary: Summary) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return widths and heights in pixels of all boxes of a range, in the order of its images."""
    import numpy as np

    sizes = [details.sizes() for details in _all_details(parts, summary)]
    widths, heights = zip(*sizes, strict=True) if sizes else ((np.zeros(0),), (np.zeros(0),))
    return np.concatenate(widths), np.concatenate(heights)


def box_corners(parts: Sequence[bytes], summary: Summary) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return left and top in pixels of all boxes of a range, in the order of its images."""
    import numpy as np

    corners = [details.corners() for details in _all_details(parts, summary)]
    lefts, tops = zip(*corners, strict=True) if corners else ((np.zeros(0),), (np.zeros(0),))
    return np.concatenate(lefts), np.concatenate(tops)


def object_areas(parts: Sequence[bytes], summary: Summary) -> NDArray[np.float64]:
    """Return the areas in square pixels of all objects of a range, in the order of its images: of their outlines, and
    of the boxes of those that have none."""
    import numpy as np

    return np.concatenate([np.zeros(0), *(details.areas() for details in _all_details(parts, summary))])


def count_kinds(parts: Sequence[bytes], summary: Summary) -> Iterator[Counter[tuple[str, int]]]:
    """Yield the numbers of objects of each kind (`Statistics.kinds`) and number of points, in parts of a range."""
    return (details.count_kinds() for details in _all_details(parts, summary))


def with_attribute(parts: Sequence[bytes], summary: Summary, name: str, value: str | None) -> list[float]:
    """Return how many boxes of each image of a range have an attribute, and this value of it where one is given."""
    found = (details.with_attribute(name, value) for details in _all_details(parts, summary))
    return list(chain.from_iterable(found))


def problem_codes(parts: Sequence[bytes], summary: Summary) -> Iterator[tuple[int, str]]:
    """Yield (row, code) for the problems of the images of a range."""
    row = 0
    for details in _all_details(parts, summary):
        for place, code in details.problem_codes():
            yield row + place, code
        row += details.rows


class Objects(NamedTuple):
    """The objects of a range as arrays, image by image."""

    counts: NDArray[np.int64]
    """How many each image has."""
    labels: NDArray[Any]
    """Places in the summary's labels."""
    edges: NDArray[np.float64]
    """x1, y1, x2, y2 in pixels: four rows."""
    flags: NDArray[np.uint8]
    """1: difficult, 2: truncated, 4: occluded."""
    kinds: NDArray[Any]
    """Places in `attributes`."""
    attributes: list[tuple[tuple[str, str], ...]]
    scores: NDArray[np.float64]
    """`nan` where there is none."""


def objects(parts: Sequence[bytes], summary: Summary) -> Objects:
    """Return the objects of a range."""
    import numpy as np

    each = [details.objects() for details in _all_details(parts, summary)]
    attributes = [kind for found in each for kind in found.attributes]
    starts = accumulate((len(found.attributes) for found in each), initial=0)
    kinds = [found.kinds + start for found, start in zip(each, starts, strict=False)]
    counts, labels, flags, scores = (
        np.concatenate([getattr(found, name) for found in each]) for name in ("counts", "labels", "flags", "scores")
    )
    edges = np.concatenate([found.edges for found in each], axis=1)
    return Objects(counts, labels, edges, flags, np.concatenate(kinds), attributes, scores)


def has_more(parts: Sequence[bytes], summary: Summary) -> bool:
    """Tell whether `more_of_objects` gives anything of an image."""
    return any(details.has_more for details in _all_details(parts, summary))


def more_of_objects(parts: Sequence[bytes], summary: Summary) -> list[tuple[Any, ...]]:
    """Return for each image what `objects` leaves out: its labels, its captions, and the extras of its objects."""
    return [each for details in _all_details(parts, summary) for each in details.more(summary.labels)]


def sources(parts: Sequence[bytes], summary: Summary) -> list[str]:
    """Return the files that the annotations of a range were read from; '' where there is none."""
    found = chain.from_iterable(details.sources() for details in _all_details(parts, summary))
    return list(map(_unrelate, found, summary.paths()))


def _all_details(parts: Sequence[bytes], summary: Summary) -> Iterator[_Details]:
    """Yield the details blobs of a range. `CorruptManifestError` if they are not those of its summary."""
    objects: Sequence[int] = summary.objects()
    row = 0
    for raw in parts:
        yield (details := _Details(raw, objects[row:], ()))
        row += details.rows
    if row != summary.rows:
        raise CorruptManifestError("a range of annotations does not fit its summary")


class _Details:
    """A details blob. `objects` are the numbers of boxes of its images, and maybe of more; `labels` are the range's."""

    def __init__(self, raw: bytes, objects: Sequence[int], labels: Sequence[str]) -> None:
        self._columns = ColumnReader(raw, _DETAILS_MAGIC, "a range of annotations")
        self.rows = self._columns.rows
        self._objects = objects[: self.rows]
        self._boxes = sum(self._objects)
        self._labels = labels

    def coordinates(self, boxes: slice) -> tuple[Sequence[float], ...]:
        """Return x1, y1, x2, y2 of boxes."""
        sides = tuple(side[boxes] for side in self._sides())
        if self._columns.is_floats(3):
            return sides
        x1, y1, width, height = sides
        x2, y2 = map(add, x1, width), map(add, y1, height)
        return list(map(float, x1)), list(map(float, y1)), list(map(float, x2)), list(map(float, y2))

    def _sides(self) -> list[Sequence[float]]:
        """Return x1, y1, and x2, y2 or width and height, of all boxes as they are stored."""
        read = self._columns.floats if self._columns.is_floats(3) else self._columns.numbers
        return [read(3 + n, self._boxes) for n in range(4)]

    def corners(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return left and top of all boxes."""
        read = self._columns.floats if self._columns.is_floats(3) else self._columns.numbers
        left, top = (as_float64(read(3 + n, self._boxes)) for n in range(2))
        return left, top

    def sizes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return widths and heights of all boxes."""
        if self._columns.is_floats(3):
            x1, y1, x2, y2 = (as_float64(self._columns.floats(3 + n, self._boxes)) for n in range(4))
            return x2 - x1, y2 - y1
        width, height = (as_float64(self._columns.numbers(5 + n, self._boxes)) for n in range(2))
        return width, height

    def areas(self) -> NDArray[np.float64]:
        """Return the areas of all objects."""
        width, height = self.sizes()
        if not self._columns.has(_DETAILS_COLUMNS):
            return width * height
        extras, _ = shapes.get_extras(self._columns, _DETAILS_COLUMNS, self._boxes, self.rows)
        return shapes.outline_areas(extras, width * height)

    def objects(self) -> Objects:
        """Return the objects as arrays."""
        import numpy as np

        columns, count = self._columns, self._boxes
        labels, flags, kinds = (as_array(columns.numbers(n, count)) for n in (2, 7, 12))
        edges = np.array([as_float64(side) for side in self._sides()]).reshape(4, count)
        if not columns.is_floats(3):
            edges[2:] += edges[:2]
        scores = shapes.get_scores(columns, _DETAILS_COLUMNS, count)
        counts = as_array(self._objects).astype(np.int64)
        return Objects(counts, labels, edges, flags, kinds.astype(np.int64), self.kinds(), scores)

    @property
    def has_more(self) -> bool:
        return self._columns.has(_DETAILS_COLUMNS) or any(self._columns.numbers(13, self.rows))

    def more(self, labels: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Yield labels, captions and extras of each image."""
        columns = self._columns
        counts = columns.numbers(13, self.rows)
        of_images = _split([labels[n] for n in columns.numbers(14, sum(counts))], counts)
        extras: Iterable[tuple[Extra | None, ...]] = repeat((), self.rows)
        captions: Iterable[tuple[str, ...]] = repeat((), self.rows)
        if columns.has(_DETAILS_COLUMNS):
            found, captions = shapes.get_extras(columns, _DETAILS_COLUMNS, self._boxes, self.rows)
            extras = _split(found, self._objects)
        return zip(of_images, captions, extras, strict=True)

    def count_kinds(self) -> Counter[tuple[str, int]]:
        return shapes.count_kinds(self._columns, _DETAILS_COLUMNS, self._boxes)

    def kinds(self) -> list[tuple[tuple[str, str], ...]]:
        """Return the attributes that boxes have, each combination once: column 12 has each box's place in them."""
        return [tuple(map(tuple, json.loads(text))) for text in self._columns.texts(10, self._columns.numbers(9, 1)[0])]

    def with_attribute(self, name: str, value: str | None) -> list[int]:
        """Return how many boxes of each image have an attribute; `value` None: whichever."""
        meant = [any(key == name and value in (None, text) for key, text in kind) for kind in self.kinds()]
        found = map(meant.__getitem__, self._columns.numbers(12, self._boxes))
        return [sum(islice(found, count)) for count in self._objects]

    def problem_codes(self) -> Iterator[tuple[int, str]]:
        """Yield (row, code) for each problem."""
        counts = self._columns.numbers(15, self.rows)
        codes = self._columns.texts(17, self._columns.numbers(16, 1)[0])
        ids = self._columns.numbers(19, sum(counts))
        rows = chain.from_iterable(repeat(row, count) for row, count in enumerate(counts))
        return zip(rows, map(codes.__getitem__, ids), strict=True)

    def sources(self) -> list[str]:
        """Return the files as they are written, related to the images' paths."""
        return self._columns.texts(0, self.rows)

    def decode(
        self, paths: Sequence[str], start: int, stop: int
    ) -> Iterator[tuple[str, tuple[Box, ...], tuple[str, ...], tuple[Problem, ...], tuple[str, ...]]]:
        """Yield source, boxes, labels of the whole image, problems and captions of the rows from `start` to `stop`,
        whose paths are given."""
        columns, count, labels, wanted = self._columns, self._boxes, self._labels, slice(start, stop)
        before = sum(self._objects[:start])
        boxes_at = slice(before, before + sum(self._objects[wanted]))
        kinds = self.kinds()
        extras: Iterable[Extra | None] = repeat(None, boxes_at.stop - before)
        captions: Iterable[tuple[str, ...]] = repeat((), stop - start)
        if columns.has(_DETAILS_COLUMNS):
            all_extras, all_captions = shapes.get_extras(columns, _DETAILS_COLUMNS, count, self.rows)
            extras, captions = islice(all_extras, before, boxes_at.stop), islice(all_captions, start, stop)
        each = zip(
            map(labels.__getitem__, columns.numbers(2, count)[boxes_at]),
            *self.coordinates(boxes_at),
            *(map(known.__getitem__, columns.numbers(7, count)[boxes_at]) for known in _FLAGS),
            map(kinds.__getitem__, columns.numbers(12, count)[boxes_at]),
            columns.numbers(8, count)[boxes_at],
            extras,
            strict=True,
        )
        boxes = list(map(_box, each))
        label_counts = columns.numbers(13, self.rows)
        of_images = [labels[n] for n in columns.numbers(14, sum(label_counts))]
        problem_counts = columns.numbers(15, self.rows)
        files = [path for path, n in zip(paths, problem_counts[wanted], strict=True) for _ in range(n)]
        skipped = sum(problem_counts[:start])
        all_files = [*repeat("", skipped), *files, *repeat("", sum(problem_counts) - skipped - len(files))]
        problems = _get_problems(columns, 16, all_files)
        return zip(
            map(_unrelate, columns.texts(0, self.rows)[wanted], paths),
            _split(boxes, self._objects[wanted]),
            islice(_split(of_images, label_counts), start, stop),
            islice(_split(problems, problem_counts), start, stop),
            captions,
            strict=True,
        )


def encode_problems(problems: Sequence[Problem]) -> bytes:
    """Encode problems that belong to no image."""
    out = ColumnWriter(_PROBLEMS_MAGIC, len(problems))
    _put_problems(out, [(problem, "") for problem in problems])
    return out.finish()


def decode_problems(raw: bytes) -> list[Problem]:
    """Decode what `encode_problems` made."""
    columns = ColumnReader(raw, _PROBLEMS_MAGIC, "a list of problems")
    try:
        return _get_problems(columns, 0, [""] * columns.rows)
    except (IndexError, ValueError) as exc:
        raise CorruptManifestError("a list of problems is damaged") from exc


def _split(values: Sequence, counts: Sequence[int]) -> Iterator[tuple]:  # type: ignore[type-arg]
    return (tuple(values[a:b]) for a, b in pairwise(accumulate(counts, initial=0)))


def _whole(sides: Sequence[array[float]]) -> list[list[int]] | None:
    """Return x1, y1, width and height as whole numbers from 0 below 2**32, if they are."""
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
    """Write `Annotations/a.xml` of `JPEGImages/a.jpg` as `Annotations/\\0.xml`, which is the same for every image."""
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
