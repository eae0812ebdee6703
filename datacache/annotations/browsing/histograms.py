"""Count the images that a filter means: by number of objects, by size, by the size of their boxes, by class and split.

Each bar has the condition of `query` that finds its images, so that a page can lead there. Counted from the arrays of a
`Browser`. Used by the web page, through `datacache.api`; any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from datacache.annotations.browsing.box_bins import CELLS, EDGES, counted
from datacache.annotations.browsing.browser import Browser, Matches
from datacache.annotations.table.ranges import UNUSABLE

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_VALUES: Final = 16
"""So many different numbers have a bar each."""
_WHOLE: Final = ("objects", "width", "height")
_OBJECTS: Final = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
_PIXELS: Final = (0, 64, 128, 256, 320, 480, 640, 800, 1024, 1280, 1600, 1920, 2560, 3840, 5120)
_ASPECTS: Final = (0, 0.25, 0.4, 0.6, 0.7, 0.9, 1.1, 1.4, 1.6, 2, 3, 4)
"""2:3, 3:4, 1:1, 4:3, 3:2 and 16:9 lie inside of bars, not on their edges."""


class HistogramBar(NamedTuple):
    """Images whose number is `low`, or with `high` at least that and less than `high`."""

    low: float
    high: float | None
    """None for the number itself; infinite for the last bar."""
    images: int
    condition: str
    """Finds these images among those of the filter."""


class Histogram(NamedTuple):
    """The images of a filter by one number. Those that do not have the number, as images without boxes have no smallest
    one, are in no bar."""

    field: str
    """Of `query.FIELDS`."""
    bars: tuple[HistogramBar, ...]


_SHOWN: Final[tuple[tuple[str, Sequence[float]], ...]] = (
    ("objects", _OBJECTS),
    ("width", _PIXELS),
    ("height", _PIXELS),
    ("aspect", _ASPECTS),
    ("min_side", EDGES["side"]),
    ("min_area", EDGES["area"]),
    ("max_area", EDGES["area"]),
)


def image_histograms(browser: Browser, found: Matches) -> list[Histogram]:
    """Return the histograms of the images that a filter means. Unusable ones have no numbers."""
    rows = usable(browser, found)
    return [Histogram(field, tuple(_bars(field, browser.numbers(field)[rows], edges))) for field, edges in _SHOWN]


class ObjectBar(NamedTuple):
    """Objects whose number is at least `low` and less than `high`, and the images that have some."""

    low: float
    high: float
    objects: int
    images: int
    condition: str
    """Finds these images among those of the filter."""


class ObjectPlots(NamedTuple):
    """All objects on the images of a filter, by their boxes."""

    bars: dict[str, tuple[ObjectBar, ...]]
    """Of each of `query.BOX_MEASURES`."""
    cells: list[list[int]]
    """How many have their middle in each cell of a grid over the image, row by row from the top."""


def object_plots(browser: Browser, found: Matches) -> ObjectPlots:
    """Return where objects on the images of a filter lie, and their sizes and shapes. The first time all boxes of the
    data set are read, and what is made of them is kept."""
    arrays, rows = browser.box_bins(), usable(browser, found)
    mask = None
    if len(rows) < browser.table.usable:
        mask = np.repeat(browser.having(rows), browser.summaries()["objects"])
    size = counted(arrays["size"], mask).reshape(16, 16)
    numbers = {"side": size.sum(1), "area": size.sum(0), "aspect": counted(arrays["aspect"], mask)}
    cells = counted(arrays["place"], mask).reshape(CELLS, CELLS).tolist()
    bars = {}
    for measure, edges in EDGES.items():
        of_images = arrays[f"{measure}s"][rows]
        held = np.flatnonzero(numbers[measure]).tolist()
        bounds = list(pairwise([*edges, np.inf]))
        bars[measure] = tuple(
            ObjectBar(
                *bounds[n],
                int(numbers[measure][n]),
                int(np.count_nonzero(of_images & (1 << n))),
                f'boxes("{measure}", {", ".join(str(each) for each in bounds[n] if each < np.inf)}) > 0',
            )
            for n in (range(held[0], held[-1] + 1) if held else ())
        )
    return ObjectPlots(bars, cells)


def split_counts(browser: Browser, found: Matches, labels: Sequence[str]) -> dict[str, list[int]]:
    """Return how many images of each split a filter means, under '', and how many of these have each of `labels`; in
    the order of the browser's `split_names`, those of no split last."""
    splits = [browser.having(rows) for rows in browser.splits().values()]
    mask = browser.having(found.rows)

    def count(rows: NDArray[Any]) -> list[int]:
        counted = [int(np.count_nonzero(each[rows])) for each in splits]
        return [*counted, len(rows) - sum(counted)]

    counts = {"": count(found.rows)}
    for label in labels:
        rows, _ = browser.label_rows().of_label(label)
        counts[label] = count(rows[mask[rows]])
    return counts


def usable(browser: Browser, found: Matches) -> NDArray[Any]:
    """Return the rows of the usable images among those found."""
    if browser.table.usable == browser.table.images:
        return found.rows
    rows: NDArray[Any] = found.rows[browser.numbers("state")[found.rows] != UNUSABLE]
    return rows


def _bars(field: str, values: NDArray[Any], edges: Sequence[float]) -> Iterator[HistogramBar]:
    if field in _WHOLE:
        distinct, counts = np.unique(values, return_counts=True)
        if len(distinct) <= _MOST_VALUES:
            for value, count in zip(distinct.tolist(), counts.tolist(), strict=True):
                yield HistogramBar(value, None, count, f"{field} == {int(value)}")
            return
    values = values[~np.isnan(values)]
    numbers = np.bincount(np.searchsorted(edges[1:], values, side="right"), minlength=len(edges)).tolist()
    held = [n for n, number in enumerate(numbers) if number]
    bounds = list(pairwise([*edges, np.inf]))
    for n in range(held[0], held[-1] + 1) if held else ():
        low, high = bounds[n]
        yield HistogramBar(
            low, high, numbers[n], f"{field} >= {low}" + (f" and {field} < {high}" if high < np.inf else "")
        )
