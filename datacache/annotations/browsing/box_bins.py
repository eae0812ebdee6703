"""Keep size, shape and place of every box as three bytes, so that plots and conditions count millions of them at once.

Two arrays have a byte for each box: `size` has the bin of its shorter side in the upper four bits and that of its area
in the lower, `aspect` that of its shape, `place` the cell of its centre in a grid over the image. `sides`, `areas` and
`aspects` have a bit for each bin in which an image has a box. Used by `browser` and `histograms`. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from datacache.annotations.query import Column, box_measures
from datacache.annotations.table.columns import as_float64
from datacache.annotations.table.ranges import Summary, box_corners, box_sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray

EDGES: Final[Mapping[str, tuple[float, ...]]] = {
    "side": (0, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    "area": (0, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "aspect": (0, 0.125, 0.25, 0.5, 0.8, 1.25, 2, 4, 8),
}
"""Of `query.BOX_MEASURES`: a bin begins at each, and the last has no end. At most 16. With other edges `arrays.VERSION`
goes up."""
CELLS: Final = 16
"""Of the grid, across and down."""
_CHUNK: Final = 1_000_000
Arrays = dict[str, "NDArray[Any]"]


def make_box_bins(ranges: Iterable[tuple[Sequence[bytes], Summary]]) -> Arrays:
    """Return the arrays of all boxes, whose details and summaries are given range by range."""
    found: dict[str, list[NDArray[Any]]] = {
        name: [] for name in ("size", "aspect", "place", "sides", "areas", "aspects")
    }
    for parts, summary in ranges:
        measures = box_measures(parts, summary)
        codes = {
            name: np.searchsorted(EDGES[name][1:], values, side="right").astype(np.uint8)
            for name, values in measures.items()
        }
        objects = as_float64(summary.objects()).astype(np.intp)
        found["size"].append(codes["side"] << 4 | codes["area"])
        found["aspect"].append(codes["aspect"])
        found["place"].append(_cells(parts, summary, objects))
        for name, each in codes.items():
            found[f"{name}s"].append(_bits(each, objects))
    kinds = {name: np.uint16 if name.endswith("s") else np.uint8 for name in found}
    return {name: np.concatenate([np.zeros(0, kinds[name]), *parts]) for name, parts in found.items()}


def bins_of(arrays: Arrays, measure: str) -> NDArray[Any]:
    """Return the bin of each box."""
    if measure == "aspect":
        return arrays["aspect"]
    return arrays["size"] >> 4 if measure == "side" else arrays["size"] & 15


def count_in_bins(arrays: Arrays, objects: NDArray[Any], column: Column) -> NDArray[np.float64]:
    """Return how many boxes of each image are within the bounds of a column that `has_bins`."""
    edges, (low, high) = EDGES[column.name], column.bounds
    first, end = edges.index(low), edges.index(high) if high in edges else len(edges)
    bins = bins_of(arrays, column.name)
    before = np.zeros(len(bins) + 1, np.uint32)
    np.cumsum((bins >= first) & (bins < end), dtype=np.uint32, out=before[1:])
    ends = before[np.cumsum(objects, dtype=np.intp)]
    return np.diff(ends, prepend=np.uint32(0)).astype(float)


def has_bins(column: Column) -> bool:
    """Tell whether the bounds of a `boxes` column are edges of bins."""
    low, high = column.bounds
    return low in EDGES[column.name] and (high in EDGES[column.name] or high == np.inf)


def counted(codes: NDArray[np.uint8], mask: NDArray[np.bool_] | None) -> NDArray[np.intp]:
    """Return how many boxes have each code, of all or of those in a mask."""
    total = np.zeros(256, np.intp)
    for part in _chunks(len(codes)):
        values = codes[part] if mask is None else codes[part][mask[part]]
        total += np.bincount(values, minlength=256)
    return total


def _chunks(length: int) -> Iterator[slice]:
    # bincount makes eight bytes of each.
    return (slice(start, start + _CHUNK) for start in range(0, length, _CHUNK))


def _cells(parts: Sequence[bytes], summary: Summary, objects: NDArray[np.intp]) -> NDArray[np.uint8]:
    places = []
    for corners, sizes, sides in zip(
        box_corners(parts, summary), box_sizes(parts, summary), (summary.widths(), summary.heights()), strict=True
    ):
        of_box = np.maximum(np.repeat(as_float64(sides), objects), 1)
        places.append(np.clip((corners + sizes / 2) / of_box * CELLS, 0, CELLS - 1).astype(np.uint8))
    across, down = places
    return down * np.uint8(CELLS) + across


def _bits(bins: NDArray[np.uint8], objects: NDArray[np.intp]) -> NDArray[np.uint16]:
    found = np.zeros(len(objects), np.uint16)
    having = objects > 0
    if having.any():
        starts = (np.cumsum(objects) - objects)[having]
        found[having] = np.bitwise_or.reduceat(np.uint16(1) << bins.astype(np.uint16), starts)
    return found
