"""Find the images of a snapshot that a page shows: filters, counts beside each class, and pages by path.

A `Browser` looks at an annotation table in groups of arrays: some 20 bytes an image, and five for each label that an
image has. So a filter over a million images is a mask over arrays, and its condition is the one of `query`. A group is
made from the table's ranges once, kept beside the table (`ArrayStore`), and read at once from then on. That is done
when the first filter needs it; `prepare` does it ahead. The page without a filter needs the table's root alone.

Used by the web page, through `datacache.api`. Any thread may call; a group is loaded once, whoever asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from itertools import accumulate, groupby, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from datacache.annotations.browsing.box_bins import count_in_bins, has_bins, make_box_bins
from datacache.annotations.browsing.vectorized import RowWise, Vectorized
from datacache.annotations.query import (
    BOX_FIELDS,
    OF_DETAILS,
    Column,
    Query,
    box_columns,
    column_of,
    detail_column,
    make_program,
)
from datacache.annotations.split_lists import ListedSplits
from datacache.annotations.table.arrays import ArrayStore, narrow
from datacache.annotations.table.paths import Paths, path_arrays
from datacache.annotations.table.ranges import ANNOTATED, Row, Summary, problem_codes, sources
from datacache.annotations.table.shapes import SHAPED
from datacache.annotations.table.table import LabelCount, Table
from datacache.core.errors import CorruptManifestError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COUNTED: Final = ("difficult", "truncated", "occluded", *SHAPED)
_RANGES_AHEAD = 32
_FAR: Final = 255
_MOST_ASKED = 24
_ROWS_AT_ONCE = 1 << 17
_FILTERS_KEPT = 8
"""Each takes four bytes an image that it means; a column of an attribute eight for each image."""
_B = TypeVar("_B", bound="Browser")
_T = TypeVar("_T")
_Arrays = dict[str, "NDArray[Any]"]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which images are shown: those for which all holds. An empty one is every image, unusable ones included."""

    query: Query = field(default_factory=Query)
    split: str = ""
    folder: str = ""
    """Without a slash at its end; images in folders below it count."""
    min_side: float = 0
    """The shortest side of the smallest box, in pixels, at least."""
    problem: str = ""
    """A code of `PROBLEMS` that the image has."""

    @property
    def asks_query(self) -> bool:
        """Tell whether something is asked that an unusable image cannot have."""
        return bool(self.query.as_json()) or self.min_side > 0


class Matches(NamedTuple):
    """The images that a filter means."""

    rows: NDArray[np.uint32]
    """Their row numbers, in order."""
    labels: tuple[LabelCount, ...]
    """How many of them have each label, and how many boxes that are; labels that none has are there, too."""


class Page(NamedTuple):
    """Some images of a filter, in the byte order of their paths."""

    rows: list[Row]
    numbers: list[int]
    """Of the rows in the table."""
    first: int
    """Place of the first among all matches, from 0."""
    before: str
    """Images before this path are the page before; '' for none."""
    after: str
    """Images behind this path are the next page; '' for none."""


class LabelRows:
    """The images of each label."""

    def __init__(self, table: Table, arrays: _Arrays) -> None:
        self._ends = np.cumsum([0, *(count.images for count in table.labels.values())])
        self._ids = {label: n for n, label in enumerate(table.labels)}
        gaps = arrays["gaps"].astype(np.uint32)
        gaps[arrays["gaps"] == _FAR] = arrays["far"]
        self._rows = np.cumsum(gaps, out=gaps)
        self._boxes = arrays["boxes"]
        if not len(self._rows) == len(self._boxes) == self._ends[-1]:
            raise CorruptManifestError("the columns beside an annotation table are not of it")

    def of_label(self, label: str) -> tuple[NDArray[np.uint32], NDArray[Any]]:
        """Return the rows that have a label, and their numbers of boxes."""
        at = self._ids[label]
        part = slice(self._ends[at], self._ends[at + 1])
        return self._rows[part], self._boxes[part]

    def count(self, mask: NDArray[np.bool_]) -> tuple[LabelCount, ...]:
        """Return how many images of a mask have each label, and how many boxes that are."""
        ones, found = mask.view(np.uint8), []
        for label in self._ids:
            rows, boxes = self.of_label(label)
            here = ones.take(rows, mode="clip")  # a third of the time of the mode that checks bounds
            found.append(LabelCount(label, int(np.count_nonzero(here)), int(np.add.reduce(here * boxes))))
        return tuple(found)


def _summary_arrays(table: Table) -> _Arrays:
    """Return what the summaries of all ranges say: a column for each field; then label by label the rows that have it,
    and their numbers of boxes. Rows are gaps to the row before in a byte each; those that need more are `far`."""
    # Zeros that nobody writes take no memory.
    fields = {name: np.zeros(table.images, np.uint32) for name in ("state", "width", "height", "objects", *_COUNTED)}
    ends = np.cumsum([0, *(count.images for count in table.labels.values())])
    all_rows, all_boxes = (np.zeros(ends[-1], np.uint32) for _ in range(2))
    numbers = {label: n for n, label in enumerate(table.labels)}
    free, start = ends.copy(), 0
    for _, summary in table.summaries():
        for name, values in fields.items():
            found = column_of(summary, Column("field", name))
            if any(found):
                values[start : start + summary.rows] = memoryview(found)  # type: ignore[arg-type]
        # The images of each label come behind those of the ranges before.
        ids = [numbers[label] for label in summary.labels]
        counts, rows, boxes = (np.asarray(memoryview(each)) for each in summary.label_rows())  # type: ignore[arg-type]
        places = np.arange(len(rows)) + np.repeat(free[ids] + counts - np.cumsum(counts, dtype=np.int64), counts)
        all_rows[places] = rows
        all_rows[places] += np.uint32(start)
        all_boxes[places] = boxes
        free[ids] += counts
        start += summary.rows
    gaps = np.diff(all_rows, prepend=np.uint32(0))  # back to the first rows from label to label, without a sign
    is_far = gaps >= _FAR
    rows_of_labels = {"gaps": np.where(is_far, _FAR, gaps).astype(np.uint8), "far": gaps[is_far]}
    return {name: narrow(values) for name, values in fields.items()} | rows_of_labels | {"boxes": narrow(all_boxes)}


def _kept(load: Callable[[_B], _T]) -> Callable[[_B], _T]:
    """Keep what a method of `Browser` returns. Threads that ask while it is loaded wait."""
    name = load.__name__

    @wraps(load)
    def get(self: _B) -> _T:
        if name not in self._kept:
            with self._lock:
                if name not in self._kept:
                    self._kept[name] = load(self)
        found: _T = self._kept[name]
        return found

    return get


def _stored(make: Callable[[_B], _Arrays]) -> Callable[[_B], _Arrays]:
    """Keep the arrays that a method of `Browser` makes beside the table as well."""

    def load(self: _B) -> _Arrays:
        found = self._store.get(make.__name__) if self._store else None
        if found is None:
            found = make(self)
            if self._store:
                self._store.put(make.__name__, found)
        return found

    return _kept(wraps(make)(load))


class Browser:
    """The images of one snapshot. `read_splits` is asked once, when a split is first asked for; `store` keeps what is
    made beside the table."""

    def __init__(
        self,
        table: Table,
        read_splits: Callable[[], ListedSplits] | None = None,
        store: ArrayStore | None = None,
    ) -> None:
        self.table = table
        self._read_splits = read_splits
        self._store = store
        self._lock = threading.RLock()  # held while a column is loaded; guards _kept
        self._kept: dict[str, Any] = {}
        self.select = lru_cache(_FILTERS_KEPT)(self._select)
        """Return the `Matches` of a `Filter`. `UsageError` for a label, a split or a kind of problem that is not there,
        and for a condition that cannot be understood."""
        self._attribute = lru_cache(_FILTERS_KEPT)(self._read_attribute)

    def prepare(self) -> None:
        """Load what filters look at, for a thread beside those that answer. Paths, which take the most memory, and are
        asked for the least, are only made ahead."""
        self.label_rows()
        self.splits()
        self.problems()
        self.sides()
        if self._store and not self._store.has("paths"):
            self.paths()

    def close(self) -> None:
        """Give the memory back. A filter that comes later loads again what it needs."""
        self.select.cache_clear()
        self._attribute.cache_clear()
        self._kept.clear()

    @property
    def split_names(self) -> tuple[str, ...] | None:
        """Return the splits there are; None while that is not known yet."""
        found = self._kept.get("splits")
        return None if found is None else tuple(found)

    def page(self, found: Matches, *, after: str = "", before: str = "", size: int) -> Page:
        """Return the `size` images behind the path `after`, or those before `before`. Neither need be there."""
        if before:
            end = int(np.searchsorted(found.rows, self.table.seek(before)))
            start = max(0, end - size)
        else:
            start = self._behind(found, after) if after else 0
            end = min(start + size, len(found.rows))
        numbers = found.rows[start:end].tolist()
        rows = self.table.rows_at(numbers)
        has_more = rows and end < len(found.rows)
        return Page(
            rows, numbers, start, rows[0].path if rows and start else "", rows[-1].path if rows and has_more else ""
        )

    def neighbours(self, found: Matches, path: str) -> tuple[str, int, str]:
        """Return the match before a path, the place that the path has or would have among all, and the match behind."""
        place = int(np.searchsorted(found.rows, self.table.seek(path)))
        behind = self._behind(found, path)
        before = self.table.path_at(int(found.rows[place - 1])) if place else ""
        return before, place, self.table.path_at(int(found.rows[behind])) if behind < len(found.rows) else ""

    def _behind(self, found: Matches, path: str) -> int:
        row = self.table.seek(path)
        here = row < self.table.images and self.table.path_at(row) == path
        return int(np.searchsorted(found.rows, row + here))

    # --- filters ----------------------------------------------------------------------------------------------------

    def _select(self, wanted: Filter) -> Matches:
        table = self.table
        if wanted == Filter():
            return Matches(np.arange(table.images, dtype=np.uint32), tuple(table.labels.values()))
        mask = self._queried(wanted) if wanted.asks_query else np.ones(table.images, bool)
        if wanted.folder:
            start, end = (table.seek(f"{wanted.folder}{behind}") for behind in "/0")  # 0 comes right behind /
            mask[:start] = False
            mask[end:] = False
        if wanted.split:
            splits = self.splits()
            if wanted.split not in splits:
                raise _unknown("split", wanted.split, splits)
            mask &= self.having(splits[wanted.split])
        if wanted.problem:
            known = {each.code for each in table.problem_counts}
            if wanted.problem not in known:
                raise _unknown("kind of problem", wanted.problem, sorted(known))
            mask &= self.having(self.problems().get(wanted.problem, []))
        return Matches(np.flatnonzero(mask).astype(np.uint32), self.label_rows().count(mask))

    def _queried(self, wanted: Filter) -> NDArray[np.bool_]:
        program = make_program(self.table, wanted.query)
        if wanted.min_side > 0:
            program.add(f"{program.column('field', 'min_side')} >= {program.constant(wanted.min_side)}")
        condition = Vectorized(program)
        details = [column for column in condition.columns if column.function in OF_DETAILS]
        asked = len(details) + len(condition.row_wise)
        if asked > _MOST_ASKED:
            raise UsageError(
                f"the condition asks {asked} things of paths, attributes and sizes of boxes, which takes too long",
                hint=f"Ask {_MOST_ASKED} at most, or use: dsctl query",
            )
        whole = {column: self._column(column) for column in details}
        row_wise = [self._row_wise(each) for each in condition.row_wise]
        mask = np.zeros(self.table.images, bool)
        # Part by part, as a condition may have hundreds of columns, and nested sums as many results in between.
        for start in range(0, len(mask), _ROWS_AT_ONCE):
            part = slice(start, min(start + _ROWS_AT_ONCE, len(mask)))
            columns = [whole[each][part] if each in whole else self._column(each, part) for each in condition.columns]
            mask[part] = condition.mask([*columns, *(each[part] for each in row_wise)], part.stop - start)
        return mask

    def having(self, rows: NDArray[np.uint32] | Sequence[int]) -> NDArray[np.bool_]:
        """Return the mask of some rows."""
        mask = np.zeros(self.table.images, bool)
        mask[rows] = True
        return mask

    # --- columns ----------------------------------------------------------------------------------------------------

    def numbers(self, field: str) -> NDArray[Any]:
        """Return one of the numbers of `query.FIELDS`, or `state`, of all images. Not to be written to."""
        return self._column(Column("field", field))

    def _column(self, column: Column, part: slice | None = None) -> NDArray[Any]:
        """Return a column of numbers, or of truths for `has`; of some rows, but for `OF_DETAILS`."""
        function, name, _ = column
        part = part or slice(0, self.table.images)
        if function == "boxes" and has_bins(column):
            return count_in_bins(self.box_bins(), self.summaries()["objects"], column)
        if function in OF_DETAILS:
            return self._attribute(column)
        if function in ("has", "count"):
            rows, boxes = self.label_rows().of_label(name)
            here = slice(*np.searchsorted(rows, (part.start, part.stop)))
            values = np.zeros(part.stop - part.start, bool if function == "has" else float)
            values[rows[here] - np.uint32(part.start)] = True if function == "has" else boxes[here]
            return values
        if name in BOX_FIELDS:
            return self.sides()[name][part].astype(float)  # a number of the condition would become a single, too
        fields = {field: values[part] for field, values in self.summaries().items()}
        if name == "annotated":
            values = fields["state"] == ANNOTATED
        elif name == "area":
            values = fields["width"].astype(float) * fields["height"]
        elif name == "aspect":
            values = fields["width"].astype(float) / np.maximum(fields["height"], 1)
        else:
            values = fields[name].astype(float)
        return values

    def _row_wise(self, part: RowWise) -> NDArray[np.bool_]:
        if part.test is not None:
            ask: Callable[..., NDArray[np.bool_] | None] = getattr(self._paths(), part.test.kind)
            found = ask(part.test.field, part.test.texts if part.test.kind == "among" else part.test.texts[0])
            if found is not None:
                return found
        truths = (
            part.run([column_of(summary, column) for column in part.columns]) for _, summary in self.table.summaries()
        )
        return _joined([np.array(each, bool) for each in truths], bool)

    def _read_attribute(self, column: Column) -> NDArray[np.float64]:
        found = (detail_column(parts, summary, column) for _, parts, summary in self._details())
        return _joined([np.array(each, float) for each in found], float)

    @_kept
    def label_rows(self) -> LabelRows:
        """Return the images of each label."""
        arrays = self.summaries()
        return LabelRows(self.table, {name: arrays.pop(name) for name in ("gaps", "far", "boxes")})

    @_kept
    def _paths(self) -> Paths:
        return Paths(self.paths())

    # --- groups of arrays, kept beside the table under their names ------------------------------------------------

    @_stored
    def summaries(self) -> _Arrays:
        """Return what the summaries say."""
        return _summary_arrays(self.table)

    @_stored
    def paths(self) -> _Arrays:
        """Return the arrays of `Paths`."""
        return path_arrays(summary.joined_paths() for _, summary in self.table.summaries())

    @_stored
    def sides(self) -> _Arrays:
        """Return `BOX_FIELDS` of all images."""
        found = {name: np.zeros(self.table.images) for name in sorted(BOX_FIELDS)}
        start = 0
        for _, parts, summary in self._details():
            for name, values in box_columns(parts, summary).items():
                found[name][start : start + summary.rows] = values
            start += summary.rows
        return {name: narrow(found.pop(name)) for name in list(found)}

    @_stored
    def box_bins(self) -> _Arrays:
        """Return the arrays of `box_bins`."""
        return make_box_bins((parts, summary) for _, parts, summary in self._details())

    @_stored
    def problems(self) -> _Arrays:
        """Return the rows that have a problem of each kind, in order."""
        starts = [0, *accumulate(self.table.row_counts())]
        found: dict[str, list[int]] = {}
        for number, parts, summary in self._details(set(self.table.with_problems())):
            for row, code in dict.fromkeys(problem_codes(parts, summary)):
                found.setdefault(code, []).append(starts[number] + row)
        return {code: np.array(rows, np.uint32) for code, rows in found.items()}

    @_stored
    def splits(self) -> _Arrays:
        """Return the rows of each split, in order."""
        listed = self._read_splits() if self._read_splits else None
        if listed is None or not listed.names:
            return {}
        places = {"": -1} | {name: n for n, name in enumerate(listed.names)}
        ranges = (
            ((each[2], sources(*each[1:])) for each in self._details())
            if listed.by_source
            else ((summary, [""] * summary.rows) for _, summary in self.table.summaries())
        )
        found = [
            np.array([places[split] for split in _splits(listed, summary.paths(), files)], np.int8)
            for summary, files in ranges
        ]
        of_rows = _joined(found, np.int8)
        return {name: np.flatnonzero(of_rows == places[name]).astype(np.uint32) for name in listed.names}

    def _details(self, only: Container[int] | None = None) -> Iterator[tuple[int, list[bytes], Summary]]:
        """Yield number, details and summary of the ranges."""
        summaries = (each for each in self.table.summaries() if only is None or each[0] in only)
        while part := list(islice(summaries, _RANGES_AHEAD)):
            details = self.table.details([number for number, _ in part])
            for number, summary in part:
                yield number, details[number], summary


def _splits(listed: ListedSplits, paths: Sequence[str], files: Sequence[str]) -> Iterator[str]:
    """Yield the splits of images; where folders alone say it, each folder is looked at once."""
    images = [path.encode("utf-8", "surrogateescape") for path in paths]
    if listed.by_source or listed.by_name:
        for image, file in zip(images, files, strict=True):
            yield listed.of(image, file.encode("utf-8", "surrogateescape"))
        return
    for _, same in groupby(images, key=lambda image: image.rpartition(b"/")[0]):
        of_folder = list(same)
        yield from [listed.of(of_folder[0])] * len(of_folder)


def _joined(parts: Sequence[NDArray[Any]], kind: type[Any] = np.uint8) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, kind)


def _unknown(what: str, name: str, names: Iterable[str]) -> UsageError:
    listed = ", ".join(names)
    return UsageError(f"there is no {what} {name!r}", hint=f"There are: {listed}." if listed else "There are none.")
