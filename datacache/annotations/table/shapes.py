"""The columns of a table that only objects with more than a box have: outlines, keypoints, tracks, scores, captions.

They follow the columns of `ranges`, and are there only where a row has any of it, so sets of boxes have the bytes they
always had. Points are one column a coordinate for all objects of a blob: whole numbers of the largest unit (1, 0.1, …
down to a millionth) that gives every double back to the last bit, as differences from point to point; else doubles.
NumPy is imported where there are points. Used by `ranges`. Pure functions, any thread.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from datacache.annotations.model import Annotation
from datacache.annotations.shapes.outline import (
    POINT_BYTES,
    Extra,
    Keypoints,
    Mask,
    Outline,
    Polygon,
    Rotated,
    ring_ends,
    rings,
)
from datacache.annotations.table.columns import ColumnReader, ColumnWriter, as_array

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NONE, _POLYGON, _MASK, _ROTATED = range(4)
_LISTED: Final = 4
_DOUBLES: Final = 7
_UNITS: Final = tuple(10.0**digits for digits in range(_DOUBLES))
_TOP: Final = 2.0**52
_POINTS_AN_ITEM, _MASK_BYTES_AN_ITEM = 10, 80
_extra, _polygon = partial(tuple.__new__, Extra), partial(tuple.__new__, Polygon)
SHAPED: Final = ("polygons", "masks", "rotated", "vertices", "keypoints")
"""The columns of a summary: outlines by kind, points of polygons and rotated boxes, visible keypoints."""


def has_more(annotation: Annotation) -> bool:
    """Tell whether an image has anything that these columns hold."""
    return bool(annotation.captions) or any(box.extra for box in annotation.boxes)


def items(annotation: Annotation) -> int:
    """Return the size of all extras in items of a blob (a box is one): it bounds a blob's bytes, not only its rows."""
    points = masks = 0
    for box in annotation.boxes:
        if box.extra:
            outline, keypoints = box.extra.outline, box.extra.keypoints
            if isinstance(outline, Mask):
                masks += len(outline.counts)
            elif outline is not None:
                points += len(outline[0])
            points += len(keypoints.points) if keypoints else 0
    return points // (POINT_BYTES * _POINTS_AN_ITEM) + masks // _MASK_BYTES_AN_ITEM


def put_counts(out: ColumnWriter, annotations: Sequence[Annotation]) -> None:
    """Write the columns of a summary (`SHAPED`)."""
    columns: list[list[int]] = [[0] * len(annotations) for _ in SHAPED]
    polygons, masks, rotated, vertices, keypoints = columns
    for n, annotation in enumerate(annotations):
        for box in annotation.boxes:
            extra = box.extra
            if extra is None:
                continue
            outline = extra.outline
            if isinstance(outline, Mask):
                masks[n] += 1
            elif outline is not None:
                (polygons if isinstance(outline, Polygon) else rotated)[n] += 1
                vertices[n] += len(outline[0]) // POINT_BYTES
            if extra.keypoints:
                keypoints[n] += len(extra.keypoints.visible) - extra.keypoints.visible.count(0)
    for column in columns:
        out.numbers(column)


def put_extras(out: ColumnWriter, extras: Sequence[Extra | None], captions: Sequence[tuple[str, ...]]) -> None:
    """Write the columns of a details blob: `extras` box by box, `captions` image by image."""
    at = [n for n, extra in enumerate(extras) if extra]
    found = [extra for extra in extras if extra]
    outlines = [extra.outline for extra in found]
    polygons = [outline for outline in outlines if isinstance(outline, Polygon)]
    masks = [outline for outline in outlines if isinstance(outline, Mask)]
    poses = [extra.keypoints for extra in found if extra.keypoints is not None]
    out.numbers([len(found)])
    out.numbers([b - a for a, b in pairwise((0, *at))])
    out.numbers([_kind(outline) for outline in outlines])
    ends = [ring_ends(polygon) for polygon in polygons]
    out.numbers([len(each) for each in ends])
    out.numbers([b - a for each in ends for a, b in pairwise((0, *each))])
    out.numbers(
        [polygon.holes >> n & 1 for polygon, each in zip(polygons, ends, strict=True) for n in range(len(each))]
    )
    out.numbers([mask.width for mask in masks])
    out.numbers([mask.height for mask in masks])
    out.raw([mask.counts for mask in masks])
    out.numbers([0 if extra.keypoints is None else len(extra.keypoints.visible) + 1 for extra in found])
    out.numbers(b"".join(pose.visible for pose in poses))
    points = [outline[0] for outline in outlines if outline is not None and not isinstance(outline, Mask)]
    _put_points(out, b"".join([*points, *(pose.points for pose in poses)]))
    out.numbers([extra.track + 1 for extra in found])
    out.numbers([extra.group + 1 for extra in found])
    for values in ([extra.score for extra in found], [extra.area for extra in found]):
        out.numbers([value is not None for value in values])
        out.floats(array("d", [value for value in values if value is not None]))
    authors = {author: n for n, author in enumerate(dict.fromkeys(("", *(extra.author for extra in found))))}
    out.numbers([len(authors)])
    out.texts(list(authors))
    out.numbers([authors[extra.author] for extra in found])
    out.numbers([len(each) for each in captions])
    out.texts([caption for each in captions for caption in each])


def get_extras(
    columns: ColumnReader, first: int, boxes: int, rows: int
) -> tuple[list[Extra | None], Iterator[tuple[str, ...]]]:
    """Read what `put_extras` wrote from column `first` on: the extras of all boxes, and the captions of each image."""
    at = iter(range(first, first + 99))

    def numbers(count: int) -> Sequence[int]:
        return columns.numbers(next(at), count)

    count = numbers(1)[0]
    places = accumulate(numbers(count))
    kinds = numbers(count)
    ring_counts = numbers(sum(kind & 3 == _POLYGON for kind in kinds))
    sizes, holes = (numbers(sum(ring_counts)) for _ in range(2))
    mask_count = sum(kind & 3 == _MASK for kind in kinds)
    widths, heights = (numbers(mask_count) for _ in range(2))
    counts = columns.raw(next(at), mask_count)
    next(at)
    pose_sizes = numbers(count)
    visible = bytes(numbers(sum(size - 1 for size in pose_sizes if size)))
    outline_points = sum(sizes) + 4 * sum(kind & 3 == _ROTATED for kind in kinds)
    points = _get_points(columns, at, outline_points + len(visible))
    tracks, groups = (numbers(count) for _ in range(2))
    given: list[list[float | None]] = []
    for _ in range(2):
        present = numbers(count)
        values = iter(columns.floats(next(at), sum(present)))
        given.append([next(values) if there else None for there in present])
    author_count = numbers(1)[0]
    authors = columns.texts(next(at), author_count)
    next(at)
    author_ids = numbers(count)
    caption_counts = numbers(rows)
    captions = columns.texts(next(at), sum(caption_counts))

    # The parts of each object, from where the one before ended.
    ring = iter(zip(sizes, holes, strict=True))
    mask = iter(zip(counts, widths, heights, strict=True))
    ring_count = iter(ring_counts)
    point, key = 0, 0

    def taken(number: int) -> bytes:
        nonlocal point
        start, point = point, point + number
        return points[start * POINT_BYTES : point * POINT_BYTES]

    def outline(kind: int) -> Outline | None:
        if kind == _POLYGON:
            count = next(ring_count)
            if count == 1:
                size, hole = next(ring)
                return _polygon((taken(size), (), hole))
            mine = [next(ring) for _ in range(count)]
            ends = tuple(accumulate(size for size, _ in mine))
            bits = sum(hole << n for n, (_, hole) in enumerate(mine))
            return Polygon(taken(ends[-1]), ends, bits)
        if kind & 3 == _MASK:
            return Mask(*next(mask), bool(kind & _LISTED))
        return Rotated(taken(4)) if kind == _ROTATED else None

    extras: list[Extra | None] = [None] * boxes
    for place, kind, size, track, group, score, area, author in zip(
        places, kinds, pose_sizes, tracks, groups, *given, author_ids, strict=True
    ):
        shape = outline(kind)
        keypoints = None
        if size:
            start, key = key, key + size - 1
            behind = points[(outline_points + start) * POINT_BYTES : (outline_points + key) * POINT_BYTES]
            keypoints = Keypoints(behind, visible[start:key])
        extras[place] = _extra((shape, keypoints, track - 1, group - 1, score, authors[author], area))
    of_images = (tuple(captions[a:b]) for a, b in pairwise(accumulate(caption_counts, initial=0)))
    return extras, of_images


def get_scores(columns: ColumnReader, first: int, boxes: int) -> NDArray[np.float64]:
    """Read the scores of all boxes in what `put_extras` wrote from column `first` on, `nan` for none. Nothing else is
    unpacked."""
    import numpy as np

    scores = np.full(boxes, np.nan)
    if not columns.has(first):
        return scores
    count = columns.numbers(first, 1)[0]
    kinds = [kind & 3 for kind in columns.numbers(first + 2, count)]
    ring_counts = columns.numbers(first + 3, kinds.count(_POLYGON))
    poses = columns.numbers(first + 10, count)
    rings = any(columns.numbers(first + 4, sum(ring_counts)))
    has_points = rings or _ROTATED in kinds or any(size > 1 for size in poses)
    at = first + 15 + 2 * has_points
    present = as_array(columns.numbers(at, count)).astype(bool)
    places = np.cumsum(as_array(columns.numbers(first + 1, count)), dtype=np.int64)
    scores[places[present]] = columns.floats(at + 1, int(present.sum()))
    return scores


def count_kinds(columns: ColumnReader, first: int, boxes: int) -> Counter[tuple[str, int]]:
    """Count objects by kind and points in what `put_extras` wrote from column `first` on. No point is unpacked."""
    if not columns.has(first):
        return Counter({("boxes", 0): boxes})
    count = columns.numbers(first, 1)[0]
    outlines = [kind & 3 for kind in columns.numbers(first + 2, count)]
    ring_counts = columns.numbers(first + 3, outlines.count(_POLYGON))
    sizes = columns.numbers(first + 4, sum(ring_counts))
    found = Counter(("polygons", sum(sizes[a:b])) for a, b in pairwise(accumulate(ring_counts, initial=0)))
    poses = columns.numbers(first + 10, count)
    ends = list(accumulate((pose - 1 for pose in poses if pose), initial=0))
    visible = bytes(columns.numbers(first + 11, ends[-1]))
    found.update(("keypoints", b - a - visible.count(0, a, b)) for a, b in pairwise(ends))
    found["masks", 0], found["rotated", 4] = outlines.count(_MASK), outlines.count(_ROTATED)
    found["boxes", 0] = boxes - sum(map(any, zip(outlines, poses, strict=True)))
    return found


def outline_areas(extras: Sequence[Extra | None], areas: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return areas of objects with those of their outlines in the place of what is given, where there are some."""
    import numpy as np

    from datacache.annotations.shapes import mask

    areas = areas.copy()
    parts: list[bytes] = []
    of: list[tuple[int, int]] = []  # of each ring its object, and -1 for a hole
    for place, extra in enumerate(extras):
        outline = extra and extra.outline
        if isinstance(outline, Mask):
            areas[place] = mask.area(outline)
        elif outline:
            areas[place] = 0
            polygon = outline if isinstance(outline, Polygon) else Polygon(outline.corners)
            for ring, hole in rings(polygon):
                if ring:
                    parts.append(ring)
                    of.append((place, -1 if hole else 1))
    if parts:
        ends = np.cumsum([len(part) // POINT_BYTES for part in parts])
        starts = np.concatenate(([0], ends[:-1]))
        points = np.frombuffer(b"".join(parts)).reshape(-1, 2)
        x, y = (points - np.repeat(points[starts], ends - starts, axis=0)).T  # small numbers lose less
        following = np.arange(1, len(points) + 1)
        following[ends - 1] = starts
        twice = np.add.reduceat(x * y[following] - x[following] * y, starts)
        places, signs = np.array(of).T
        np.add.at(areas, places, signs * np.abs(twice) / 2)
    return areas


def _kind(outline: Outline | None) -> int:
    if isinstance(outline, Mask):
        return _MASK + _LISTED * outline.listed
    return _NONE if outline is None else _POLYGON if isinstance(outline, Polygon) else _ROTATED


def _put_points(out: ColumnWriter, points: bytes) -> None:
    if not points:
        out.numbers([0])
        return
    import numpy as np

    values = np.frombuffer(points).reshape(-1, 2)
    digits, whole = _whole(values)
    out.numbers([digits])
    for n in range(2):
        if whole is None:
            out.floats(array("d", values[:, n].tobytes()))
        else:
            steps = np.diff(whole[:, n], prepend=0)
            out.words((steps << 1 ^ steps >> 63).view(np.uint64))


def _get_points(columns: ColumnReader, at: Iterator[int], count: int) -> bytes:
    digits = columns.numbers(next(at), 1)[0]
    if not count:
        return b""
    import numpy as np

    values = np.empty((count, 2))
    for n in range(2):
        if digits == _DOUBLES:
            values[:, n] = columns.floats(next(at), count)
        else:
            words = columns.words(next(at), count)
            steps = (words >> np.uint64(1)).view(np.int64) ^ -(words & np.uint64(1)).view(np.int64)
            values[:, n] = steps.cumsum() / _UNITS[digits]
    return values.tobytes()


def _whole(values: NDArray[np.float64]) -> tuple[int, NDArray[np.int64] | None]:
    """Return the number of decimals and the values as whole numbers of that unit; None where no unit gives each value
    back, bit by bit."""
    import numpy as np

    for digits, unit in enumerate(_UNITS):
        if all(_fits(part, unit) for part in (values[:32], values)):
            return digits, np.rint(values * unit).astype(np.int64)
    return _DOUBLES, None


def _fits(values: NDArray[np.float64], unit: float) -> bool:
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.rint(values * unit)
        if not (np.abs(scaled) < _TOP).all():  # nan is in no order
            return False
    again = scaled.astype(np.int64) / unit
    return bool((again.view(np.int64) == np.ascontiguousarray(values).view(np.int64)).all())
