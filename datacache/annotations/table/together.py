"""Go through two annotation tables together, in the order of paths, a few ranges at a time.

Used where versions, or predictions and labels, are compared. One thread an iterator.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from datacache.annotations.table import ranges
from datacache.annotations.table.columns import as_array
from datacache.annotations.table.ranges import ANNOTATED, UNUSABLE, Objects, Row
from datacache.annotations.table.shapes import outline_areas
from datacache.annotations.table.table import LoadedRange, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NEAR = 32
"""Rows no further apart are decoded at once."""


class UnpackedRange:
    """A range whose columns are unpacked as they are asked for. Places count from its first row."""

    def __init__(self, loaded: LoadedRange) -> None:
        self.first, self._summary, self._details = loaded
        self.paths = self._summary.raw_paths()
        self.labels = self._summary.labels

    @cached_property
    def images(self) -> NDArray[np.int64]:
        """Return whether each image can be used, its width and its height: three rows."""
        usable = as_array(self._summary.states()) != UNUSABLE
        return np.array([usable, *map(as_array, (self._summary.widths(), self._summary.heights()))], np.int64)

    @cached_property
    def annotated(self) -> NDArray[np.bool_]:
        """Return whether each image can be used and has an annotation, be it that nothing is on it."""
        found: NDArray[np.bool_] = as_array(self._summary.states()) == ANNOTATED
        return found

    @cached_property
    def objects(self) -> Objects:
        """Return all objects."""
        return ranges.objects(self._details, self._summary)

    @cached_property
    def areas(self) -> NDArray[np.float64]:
        """Return the areas of all objects in square pixels: as files give them, else of their outlines, else of their
        boxes."""
        edges = self.objects.edges
        areas: NDArray[np.float64] = (edges[2:] - edges[:2]).prod(axis=0)
        if self.has_more:
            counts = self.objects.counts.tolist()
            each = zip((of_image for *_, of_image in self.more), counts, strict=True)
            extras = [extra for of_image, count in each for extra in of_image or repeat(None, count)]
            if any(extras):
                areas = outline_areas(extras, areas)
                for place, extra in enumerate(extras):
                    if extra and extra.area is not None:
                        areas[place] = extra.area
        return areas

    def objects_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places among all objects of those of some images."""
        counts = self.objects.counts[places]
        first: NDArray[np.int64] = np.repeat(self.ends[places] - (np.cumsum(counts) - counts), counts)
        return first + np.arange(len(first))

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Return where the objects of each image end, after a 0."""
        return np.cumsum(np.append(0, self.objects.counts))

    @property
    def has_more(self) -> bool:
        """Tell whether `more` may hold anything."""
        return ranges.has_more(self._details, self._summary)

    @cached_property
    def more(self) -> list[tuple[Any, ...]]:
        """Return labels, captions and extras of each image."""
        return ranges.more_of_objects(self._details, self._summary)

    def rows(self, places: Sequence[int]) -> dict[int, Row]:
        """Return the rows at some places, which are in order."""
        found: dict[int, Row] = {}
        starts = [n for n, place in enumerate(places) if not n or place - places[n - 1] > _NEAR]
        for start, stop in zip(starts, [*starts[1:], len(places)], strict=False):
            window = slice(places[start], places[stop - 1] + 1)
            decoded = list(ranges.decode_details(self._details, self._summary, window))
            found |= {place: decoded[place - window.start] for place in places[start:stop]}
        return found


class RangePair(NamedTuple):
    """Some images of both tables: no other has a path between theirs. A side that has none of them is None."""

    before: UnpackedRange | None
    after: UnpackedRange | None
    both: tuple[NDArray[np.int64], NDArray[np.int64]]
    """Places in `before` and in `after` of the images that have one path."""
    gone: list[int]
    """Places in `before` of images that `after` lacks."""
    added: list[int]

    @property
    def rows(self) -> int:
        """Return the number of rows of both tables."""
        return 2 * len(self.both[0]) + len(self.gone) + len(self.added)


class _TableSide:
    def __init__(self, table: Table, numbers: Sequence[int]) -> None:
        self._coming = table.loaded(numbers)
        self.held: UnpackedRange | None = None
        self._at = 0

    def load(self) -> bool:
        """Load a range unless some rows are left. Return False at the end."""
        while self.held is None or self._at >= len(self.held.paths):
            loaded = next(self._coming, None)
            if loaded is None:
                self.held = None
                return False
            self.held, self._at = UnpackedRange(loaded), 0
        return True

    @property
    def last(self) -> bytes:
        assert self.held is not None
        return self.held.paths[-1]

    def take(self, until: bytes) -> slice:
        assert self.held is not None
        first, self._at = self._at, bisect_right(self.held.paths, until, self._at)
        return slice(first, self._at)


def together(
    before: Table, after: Table, numbers_before: Sequence[int], numbers_after: Sequence[int]
) -> Iterator[RangePair]:
    """Yield the rows of some ranges of each table. What is left out must be left out of both."""
    old, new = _TableSide(before, numbers_before), _TableSide(after, numbers_after)
    while True:
        has_old, has_new = old.load(), new.load()
        if not (has_old or has_new):
            return
        until = min(side.last for side, has in ((old, has_old), (new, has_new)) if has)
        mine, theirs = (side.take(until) if side.held else slice(0, 0) for side in (old, new))
        a = old.held.paths[mine] if old.held else []
        b = new.held.paths[theirs] if new.held else []
        if a == b:
            places = np.arange(len(a))
            yield RangePair(old.held, new.held, (places + mine.start, places + theirs.start), [], [])
            continue
        where = {path: n for n, path in enumerate(b, theirs.start)}
        pairs = [(n, where.pop(path, -1)) for n, path in enumerate(a, mine.start)]
        gone = [n for n, other in pairs if other < 0]
        both = np.array([pair for pair in pairs if pair[1] >= 0], np.int64).reshape(-1, 2)
        yield RangePair(old.held, new.held, (both[:, 0], both[:, 1]), gone, sorted(where.values()))
