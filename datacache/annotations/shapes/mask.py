"""Masks: run lengths that were checked, and bitmaps made of them within the box of their object.

Used by readers, writers, checks and operations. `runs` are the lengths of the runs of an image's pixels, column by
column from the upper left pixel: background, object, background and so on; only the first can be 0. `Mask.counts` has
them compressed as COCO does (cocodataset/cocoapi, `common/maskApi.c`, `rleToString`).

No counts reach pycocotools before `checked` has seen them: its decoder reads behind the end of a text that is cut short
and trusts the sum of the runs. A polygon is filled as pycocotools does it, wherever one becomes a mask. Pure, any
thread. NumPy and pycocotools are imported here, so import this module where masks are met.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from pycocotools import mask as coco

from datacache.annotations.shapes.outline import Mask, Polygon, polygon_of, rings

MAX_COUNTS: Final = 2 * 2**20
"""The longest text of run lengths that is read."""
_MAX_PIXELS: Final = 178_956_970
"""Of an image: larger ones are not decoded either, and few run lengths could ask for gigabytes."""
_CHARACTERS: Final = 7
"""Of a number; COCO's own decoder has room for 32 bits."""
MAX_CORNERS: Final = 100_000
"""Of an outline along the edges of pixels; no reader takes more points of an object."""
_MAX_EDGE: Final = 4_000_000
"""Of all rings that are filled, in fifths of a pixel: pycocotools takes 28 bytes of memory for each."""

Runs = NDArray[np.int64]
Bitmap = NDArray[np.bool_]
Window = tuple[int, int, int, int]
"""Left, top, right and bottom, in whole pixels."""


def checked(counts: bytes, width: int, height: int) -> Mask:
    """Return the mask that a file's compressed counts mean, in their one spelling. `ValueError` says what is wrong with
    them: they come from strangers, and nothing is trusted."""
    if len(counts) > MAX_COUNTS:
        raise ValueError(f"the run lengths have {len(counts):,} bytes, more than {MAX_COUNTS:,}")
    return from_runs(_parse(counts), width, height)


def from_runs(runs: Sequence[int] | Runs, width: int, height: int, *, listed: bool = False) -> Mask:
    """Return the mask of run lengths that are not yet checked. `ValueError` where they are not those of the image."""
    if not 0 < width * height < _MAX_PIXELS:
        raise ValueError(f"no mask can be {width} x {height} pixels large")
    if len(runs) > MAX_COUNTS:
        raise ValueError(f"there are {len(runs):,} run lengths, more than {MAX_COUNTS:,}")
    if not isinstance(runs, np.ndarray) and not {*map(type, runs)} <= {int}:
        raise ValueError("a run length is no whole number")
    try:
        lengths = np.asarray(runs, np.int64)
    except OverflowError:
        lengths = np.array([-1])
    if lengths.size and not 0 <= lengths.min() <= lengths.max() < _MAX_PIXELS:
        raise ValueError("a run length is below 0 or above the image's pixels")
    total = int(lengths.sum())
    if total != width * height:
        raise ValueError(f"the run lengths make {total:,} pixels, and {width} x {height} are {width * height:,}")
    if not lengths[1:].all():
        lengths = _of_edges(np.cumsum(lengths)[:-1], total)
    found: dict[str, Any] = coco.frPyObjects({"counts": lengths.tolist(), "size": [height, width]}, height, width)
    return Mask(found["counts"], width, height, listed)


def runs(mask: Mask) -> Runs:
    """Return the run lengths of a mask."""
    return _parse(mask.counts)


def area(mask: Mask) -> int:
    """Return the number of the object's pixels."""
    return int(runs(mask)[1::2].sum())


def bounds(mask: Mask) -> Window | None:
    """Return the box around the object's pixels; None where there are none."""
    first, last = _spans(mask)
    if not first.size:
        return None
    height = mask.height
    left, right = int(first[0]) // height, int(last[-1] - 1) // height
    if (first // height != (last - 1) // height).any():  # a run that goes on in the next column touches both edges
        return left, 0, right + 1, height
    return left, int((first % height).min()), right + 1, int(((last - 1) % height).max()) + 1


def decode(mask: Mask, window: Window) -> Bitmap:
    """Return the pixels within a window of the image, as rows."""
    left, top, right, bottom = window
    height = mask.height
    edges = np.cumsum(runs(mask))[:-1]
    # Cut the runs at the beginnings of the window's columns: then each is of one column.
    starts = np.arange(left, right, dtype=np.int64) * height
    inside = edges[(edges > left * height) & (edges < right * height)]
    pieces = np.union1d(starts, inside)
    ends = np.append(pieces[1:], right * height)
    of_object = np.searchsorted(edges, pieces, "right") % 2 == 1
    column = pieces[of_object] // height
    first = np.clip(pieces[of_object] - column * height, top, bottom) - top
    last = np.clip(ends[of_object] - column * height, top, bottom) - top
    # Plus one where a run begins and minus one behind its end; summed down the column this is 1 inside of it.
    steps = np.zeros((right - left, bottom - top + 1), np.int8)
    column, first, last = (values[first < last] for values in (column - left, first, last))
    steps[column, first] += 1
    steps[column, last] -= 1
    np.cumsum(steps, axis=1, out=steps)
    return steps[:, :-1].T.view(np.bool_)


def encode(pixels: Bitmap, left: int, top: int, width: int, height: int) -> Mask:
    """Return the mask of an image of `width` by `height` whose pixels from `left`, `top` on are these."""
    columns = np.zeros((pixels.shape[1], pixels.shape[0] + 2), np.int8)
    columns[:, 1:-1] = pixels.T
    steps = np.diff(columns, axis=1)
    column, row = np.nonzero(steps)
    return from_runs(_of_edges((left + column) * height + top + row, width * height), width, height)


def fill(polygon: Polygon, width: int, height: int) -> Mask:
    """Return the pixels of a polygon that lies inside its image: its rings together, less their holes. `ValueError`
    where its edges are too long to be filled."""
    groups: list[list[dict[str, Any]]] = []
    edge = 0.0
    for points, hole in rings(polygon):
        ring = np.frombuffer(points).reshape(-1, 2).clip(0, (width, height))  # numbers from afar crash pycocotools
        if len(ring) < 3:
            continue
        steps = np.abs(np.diff(ring, axis=0, append=ring[:1])).max(axis=1)
        edge += steps.sum() * 5 + len(ring)
        if not edge < _MAX_EDGE:  # also refuses nan
            raise ValueError("the edges of a polygon are too long together to be filled")
        filled = coco.frPyObjects([ring.ravel().tolist()], height, width)[0]
        if hole and groups:
            groups[-1].append(filled)
        else:
            groups.append([filled])
    parts = [_without(outer, holes, width, height) for outer, *holes in groups]
    while len(parts) > 1:  # two at a time: one after the other, each takes as long as all before it
        parts = [coco.merge(parts[n : n + 2]) for n in range(0, len(parts), 2)]
    return from_runs(_parse(parts[0]["counts"]) if parts else [width * height], width, height)


def trace(mask: Mask, *, most: float = MAX_CORNERS) -> Polygon:
    """Return the outlines of a mask along the edges of its pixels, so that a square of 3 by 3 has an area of 9. Rings
    go clockwise and holes the other way; pixels that touch in a corner only are two rings. Time and memory grow with
    the runs, not with the pixels. `ValueError` for more than `most` corners."""
    first, last = _spans(mask)
    if not first.size:
        return Polygon(b"")
    height, width = mask.height, mask.width
    # Cut the runs at the ends of columns, of which they may cross several.
    columns = (last - 1) // height - first // height + 1
    place = np.arange(columns.sum()) - np.repeat(np.cumsum(columns) - columns, columns)
    column = np.repeat(first // height, columns) + place
    top = np.where(place == 0, np.repeat(first, columns) - column * height, 0)
    bottom = np.minimum(np.repeat(last, columns) - column * height, height)
    above, ones = np.concatenate((top, bottom)), np.ones(len(top), np.int8)
    beside = np.concatenate((column, column))
    # Object below: to the right; object on the left: downwards.
    across = _segments(above, beside, beside + 1, np.concatenate((ones, -ones)), width)
    beside[len(column) :] += 1
    _expect_few(across, most)
    down = _segments(beside, np.tile(top, 2), np.tile(bottom, 2), np.concatenate((-ones, ones)), height)
    _expect_few(down, most)
    found, holes = _traced(across, down, width + 1)
    return polygon_of([ring.tobytes() for ring in found], holes)


def resample(mask: Mask, inverse: Sequence[float], window: Window, width: int, height: int) -> Mask:
    """Return the mask of an image of `width` by `height` whose every pixel is the nearest one of this mask: the centre
    of x, y lies there at a x + b y + c, d x + e y + f, with a … f in `inverse`. `window` bounds the result's pixels."""
    source = bounds(mask)
    left, top, right, bottom = window
    if source is None or left >= right or top >= bottom:
        return from_runs([width * height], width, height)
    a, b, c, d, e, f = inverse
    inside = a, b, a * left + b * top + c - source[0], d, e, d * left + e * top + f - source[1]
    pixels = PIL.Image.fromarray(np.ascontiguousarray(decode(mask, source)).view(np.uint8))
    size, nearest = (right - left, bottom - top), PIL.Image.Resampling.NEAREST
    found = np.asarray(pixels.transform(size, PIL.Image.Transform.AFFINE, inside, nearest))
    return encode(found.astype(np.bool_), left, top, width, height)


def _parse(counts: bytes) -> Runs:
    """Return the numbers that a compressed text has, of which nothing else is known yet."""
    codes = np.frombuffer(counts, np.uint8) - np.uint8(48)
    if codes.size and codes.max() > 63:
        raise ValueError("the run lengths have a character that no compressed ones have")
    if codes.size and codes[-1] & 32:
        raise ValueError("the run lengths end within a number")
    last = np.flatnonzero(codes < 32)
    length = np.diff(last, prepend=-1)
    if length.size and length.max() > _CHARACTERS:
        raise ValueError(f"a run length has more than {_CHARACTERS} characters")
    first = last - length + 1
    numbers = (codes[first] & 31).astype(np.int64)
    for place in range(1, int(length.max()) if length.size else 0):
        longer = np.flatnonzero(length > place)
        numbers[longer] |= (codes[first[longer] + place] & 31).astype(np.int64) << 5 * place
    negative = np.flatnonzero(codes[last] & 16)
    numbers[negative] -= np.int64(1) << 5 * length[negative]
    # From the fourth on each is told by its difference to the one before the last.
    for chain in (numbers[1::2], numbers[2::2]):
        np.cumsum(chain, out=chain)
    return numbers


def _spans(mask: Mask) -> tuple[Runs, Runs]:
    """Return where the object's runs begin and end."""
    ends = np.cumsum(runs(mask))
    return ends[:-1:2], ends[1::2]


def _of_edges(edges: Runs, total: int) -> Runs:
    """Return the run lengths between edges in any order; two edges at one place are none."""
    places, times = np.unique(edges, return_counts=True)
    kept = places[(times % 2 == 1) & (places < total)]
    lengths: Runs = np.diff(kept, prepend=0, append=total)
    return lengths


def _without(outer: dict[str, Any], holes: list[dict[str, Any]], width: int, height: int) -> dict[str, Any]:
    if not holes:
        return outer
    inside = coco.merge([outer, coco.merge(holes)], intersect=True)
    edges = [np.cumsum(_parse(part["counts"]))[:-1] for part in (outer, inside)]
    kept = from_runs(_of_edges(np.concatenate(edges), width * height), width, height)
    return {"counts": kept.counts, "size": [height, width]}


def _traced(across: Segments, down: Segments, width: int) -> tuple[list[NDArray[np.float64]], int]:
    """Return the rings that segments make, and which are holes, as bits; each ring's holes follow it. `width` is that
    of a line of corners."""
    start, end, sign = (
        np.concatenate(parts)
        for parts in zip(
            _corners(*across, lambda line, along: line * width + along),
            _corners(*down, lambda line, along: along * width + line),
            strict=True,
        )
    )
    count = len(across[0])
    # A segment across goes on with one down. Where two begin at one corner, turn right: the object's side is kept.
    following = np.concatenate(
        (count + _begins(start[count:], sign[count:], end[:count], sign[:count]),
         _begins(start[:count], sign[:count], end[count:], ~sign[count:]))
    )  # fmt: skip
    ring_of = np.full(len(start), -1)
    found: list[NDArray[np.float64]] = []
    steps, seen = following.tolist(), [False] * len(start)
    for first in range(count):
        if seen[first]:
            continue
        ring, at = [], first
        while not seen[at]:
            seen[at] = True
            ring.append(at)
            at = steps[at]
        ring_of[ring] = len(found)
        corners = start[ring]
        found.append(np.stack((corners % width, corners // width), 1).astype(np.float64))
    owners = _owners(down, ring_of[count:], found)
    order = sorted(range(len(found)), key=lambda ring: (owners[ring], owners[ring] != ring, ring))
    bits = "".join("01"[owners[ring] != ring] for ring in reversed(order))
    return [found[ring] for ring in order], int(bits, 2)


Segments = tuple[Runs, Runs, Runs, Bitmap]


def _segments(line: Runs, first: Runs, last: Runs, value: NDArray[np.int8], length: int) -> Segments:
    """Return the straight runs of edges as line, first and last corner on it, and whether they go towards the last.
    Given are parts of lines of this length, which may lie on one another or go on, with 1 forwards and -1 back."""
    places = np.concatenate((line * (length + 1) + first, line * (length + 1) + last))
    places *= 2  # the last bit says whether a step goes up
    places += np.concatenate((value > 0, value < 0))
    places.sort()
    steps = (places & 1).astype(np.int8) * 2 - 1
    places >>= 1
    begins = np.flatnonzero(np.diff(places, prepend=-1))
    steps = np.add.reduceat(steps, begins)
    places, steps = places[begins[steps != 0]], steps[steps != 0]
    held = np.cumsum(steps)
    edges = np.flatnonzero(held)
    at, until = places[edges], places[edges + 1]
    return at // (length + 1), at % (length + 1), until % (length + 1), held[edges] > 0


def _expect_few(segments: Segments, most: float) -> None:
    if len(segments[0]) * 2 > most:  # there are as many of the other direction
        raise ValueError(f"the outline of a mask has more than {most:,} corners")


def _corners(line: Runs, first: Runs, last: Runs, forward: Bitmap, key: Any) -> tuple[Runs, Runs, Bitmap]:
    """Return the numbers of the corners where segments start and end, and their directions."""
    one, other = key(line, first), key(line, last)
    return np.where(forward, one, other), np.where(forward, other, one), forward


def _begins(starts: Runs, signs: Bitmap, corners: Runs, wanted: Bitmap) -> Runs:
    """Return, of each corner, the segment that starts there; in the wanted direction where there are two."""
    keys = starts * 2 + signs
    order = np.argsort(keys)
    keys = np.append(keys[order], -1)
    asked = corners * 2 + wanted
    places = np.searchsorted(keys[:-1], asked)
    other = np.searchsorted(keys[:-1], asked ^ 1)
    found: Runs = order[np.where(keys[places] == asked, places, other)]
    return found


def _owners(down: Segments, ring_of: Runs, found: list[NDArray[np.float64]]) -> list[int]:
    """Return the ring whose hole each ring is, or itself. On the left of a hole's leftmost pixel lies the object, whose
    pixels go on to the left up to an edge of the same object: of its outer ring, or of another hole."""
    owners = list(range(len(found)))
    holes = []
    for number, ring in enumerate(found):
        x, y = ring.T
        if x @ np.roll(y, -1) < y @ np.roll(x, -1):
            corner = int(np.lexsort((y, x))[0])
            holes.append((int(x[corner]), int(y[corner]), number))
    line, first, last, _ = down
    order = np.argsort(line, kind="stable")
    line, first, last, ring_of = line[order], first[order], last[order], ring_of[order]
    for x_left, y_top, number in sorted(holes):
        left = slice(0, int(np.searchsorted(line, x_left)))
        beside = np.flatnonzero((first[left] <= y_top) & (y_top < last[left]))
        owners[number] = owners[int(ring_of[beside[-1]])]
    return owners
