"""Hold what came out of comparing two annotation tables as arrays: which images, and what happened to which classes.

An image takes some 20 bytes, and a class of it that something happened to nine. Made by `find_differences` for two
versions, and by `predictions.match_tables` for predictions and labels; asked by the web page. Immutable; any thread.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from heapq import merge
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from datacache.annotations.comparing.changes import Changed, compare
from datacache.annotations.pairing import is_image
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.table import Table
from datacache.core.errors import UsageError
from datacache.manifest.diff import Change

if TYPE_CHECKING:
    from numpy.typing import NDArray

IMAGE_KINDS: Final = ("image-added", "image-gone", "image-changed", "annotated")
"""In `after` alone, in `before` alone, other bytes, annotated otherwise."""
OBJECT_KINDS: Final = ("added", "moved", "removed", "relabelled", "edited")
_PATHS_AT_ONCE: Final = 4_096
_MOST_SUMS: Final = 1_000_000


class WantedImages(NamedTuple):
    """Which images are meant: those for which one thing holds that has this kind and these classes. '' is any."""

    kind: str = ""
    label: str = ""
    """Before or after."""
    was: str = ""
    now: str = ""

    @property
    def asks_class(self) -> bool:
        return any(self[1:])


class OfClass(NamedTuple):
    """The numbers of a class."""

    label: str
    before: int
    after: int
    kinds: dict[str, int]
    """Objects to which each kind of change happened; `was` and `now` of other classes that they were or are now."""

    @property
    def changes(self) -> int:
        return sum(self.kinds.values())


class Compared:
    """Images in the order of their paths, numbered from 0."""

    def __init__(
        self,
        tables: tuple[Table, Table],
        kinds: tuple[Sequence[str], Sequence[str]],
        rows: NDArray[np.int32],
        flags: NDArray[np.uint8],
        events: Sequence[NDArray[Any]],
        *,
        worst: Sequence[NDArray[np.float32]] = (),
    ) -> None:
        """`rows` are the numbers of each image in its tables, -1 where it is in none; bits of `flags` the kinds of
        images that it is one of. `events` are columns: image, kind, class before and after, both places among the
        classes, one more for none, and objects. `worst` sorts the images of all kinds, then of each kind of object."""
        self.image_kinds, self.object_kinds = kinds
        self.labels = tuple(sorted({*tables[0].labels, *tables[1].labels}))
        self.boxes = [[table.labels[e].boxes if e in table.labels else 0 for e in self.labels] for table in tables]
        self.rows, self.flags, self._worst = rows, flags, worst
        self._starts = np.searchsorted(events[0], np.arange(len(flags) + 1)).astype(np.uint32)
        self._kinds, self._before, self._after, self._counts = map(_narrow, events[1:])

    def __len__(self) -> int:
        return len(self.flags)

    @property
    def size_bytes(self) -> int:
        """Return what it takes in memory."""
        columns: list[NDArray[Any]] = [self.rows, self.flags, self._starts, self._kinds, self._before, self._after]
        return sum(column.nbytes for column in (*columns, self._counts, *self._worst))

    def images(self) -> dict[str, int]:
        """Return how many images there are of each kind of image."""
        return {kind: int((self.flags >> n & 1).sum()) for n, kind in enumerate(self.image_kinds)}

    def objects(self) -> Counter[tuple[str, str, str]]:
        """Return how many objects there are of each kind, class before and class after; '' for none."""
        return Counter(self._objects)

    @cached_property
    def _objects(self) -> dict[tuple[str, str, str], int]:
        names = (*self.labels, "")
        width = len(names)
        keys = (self._kinds.astype(np.int64) * width + self._before) * width + self._after
        if len(self.object_kinds) * width * width > _MOST_SUMS:  # thousands of classes: most pairs never occur
            keys, places = np.unique(keys, return_inverse=True)
            sums = np.bincount(places, self._counts, minlength=len(keys))
        else:
            sums = np.bincount(keys, self._counts)
            keys = np.flatnonzero(sums)
            sums = sums[keys]
        return {
            (self.object_kinds[key // width // width], names[key // width % width], names[key % width]): int(count)
            for key, count in zip(keys.tolist(), sums.tolist(), strict=True)
        }

    def classes(self) -> list[OfClass]:
        """Return the numbers of all classes, those with the most changes first."""
        found = [OfClass(label, a, b, {}) for label, a, b in zip(self.labels, *self.boxes, strict=True)]
        by_label = {each.label: each.kinds for each in found}
        for (kind, was, now), count in self._objects.items():
            if was and now and was != now:
                for label, name in ((was, f"{kind}-now"), (now, f"{kind}-was")):
                    by_label[label][name] = by_label[label].get(name, 0) + count
            else:
                by_label[now or was][kind] = by_label[now or was].get(kind, 0) + count
        return sorted(found, key=lambda each: (-each.changes, each.label))

    def select(self, asked: WantedImages) -> NDArray[np.uint32]:
        """Return the numbers of images: the worst first where that is known, else in order. `UsageError` for a kind or
        a class that is not there."""
        for label in asked[1:]:
            if label and label not in self.labels:
                raise UsageError(f"there is no class {label!r} in either")
        if asked.kind not in ("", *self.image_kinds, *self.object_kinds):
            kinds = ", ".join((*self.image_kinds, *self.object_kinds))
            raise UsageError(f"{asked.kind!r} is no kind of difference", hint=f"There are: {kinds}.")
        if asked.kind in self.object_kinds or asked.asks_class:
            mask = np.ones(len(self._kinds), bool)
            if asked.kind in self.object_kinds:
                mask &= self._kinds == self.object_kinds.index(asked.kind)
            where = {label: n for n, label in enumerate(self.labels)}
            if asked.label:
                mask &= (self._before == where[asked.label]) | (self._after == where[asked.label])
            if asked.was:
                mask &= self._before == where[asked.was]
            if asked.now:
                mask &= self._after == where[asked.now]
            here = np.zeros(len(self), bool)
            here[np.repeat(np.arange(len(self)), np.diff(self._starts))[mask]] = True
        else:
            here = np.ones(len(self), bool)
        if asked.kind in self.image_kinds:
            here &= (self.flags >> self.image_kinds.index(asked.kind) & 1).astype(bool)
        found = np.flatnonzero(here).astype(np.uint32)
        if self._worst:
            order = self._worst[1 + self.object_kinds.index(asked.kind) if asked.kind in self.object_kinds else 0]
            found = found[np.argsort(-order[found], kind="stable")]
        return found

    def kinds_of(self, number: int) -> list[str]:
        """Return the kinds of an image, and of what happened to its objects."""
        events = self._kinds[self._starts[number] : self._starts[number + 1]]
        kinds = [kind for n, kind in enumerate(self.image_kinds) if self.flags[number] >> n & 1]
        return kinds + [self.object_kinds[n] for n in np.unique(events)]

    def images_but(self, kind: str) -> int:
        """Return how many images there are with any other kind of thing that happened to objects."""
        of_events = np.repeat(np.arange(len(self)), np.diff(self._starts))
        return len(np.unique(of_events[self._kinds != self.object_kinds.index(kind)]))

    def counts_of(self, number: int) -> dict[str, int]:
        """Return to how many objects of an image each kind of thing happened."""
        events = slice(self._starts[number], self._starts[number + 1])
        sums = np.bincount(self._kinds[events], self._counts[events], minlength=len(self.object_kinds))
        return {kind: int(count) for kind, count in zip(self.object_kinds, sums.tolist(), strict=True)}

    def find(self, path: str, before: Table, after: Table) -> int:
        """Return the number of an image; -1 for one that is not among them."""
        for rows, table in zip(self.rows, (before, after), strict=True):
            row = table.number(path)
            if row >= 0:
                there = np.flatnonzero(rows >= 0)
                place = int(np.searchsorted(rows[there], row))
                if place < len(there) and rows[there[place]] == row:
                    return int(there[place])
        return -1

    def pairs(self, numbers: Sequence[int], before: Table, after: Table) -> list[tuple[Row | None, Row | None]]:
        """Return the rows of some images in both tables."""
        sides = []
        for rows, table in zip(self.rows, (before, after), strict=True):
            wanted = sorted({row for row in rows[list(numbers)].tolist() if row >= 0})
            sides.append(dict(zip(wanted, table.rows_at(wanted), strict=True)))
        return [(sides[0].get(int(self.rows[0][n])), sides[1].get(int(self.rows[1][n]))) for n in numbers]


class Collector:
    """Takes images in order, for a `Compared`."""

    def __init__(self, before: Table, after: Table, image_kinds: Sequence[str], object_kinds: Sequence[str]) -> None:
        self._tables, self._kinds = (before, after), (image_kinds, object_kinds)
        labels = sorted({*before.labels, *after.labels})
        self.labels = {label: n for n, label in enumerate((*labels, ""))}
        """The numbers of classes, and of none."""
        self._rows = array("i"), array("i")
        self._flags = array("B")
        self._events = tuple(array("I") for _ in range(5))

    def add(self, numbers: tuple[int, int], flags: int, events: Iterable[tuple[int, int, int]]) -> None:
        """Add an image; `events` are kind, class before and class after, one an object."""
        image = len(self._flags)
        for column, number in zip(self._rows, numbers, strict=True):
            column.append(number)
        self._flags.append(flags)
        for event, count in Counter(events).items():
            for column, value in zip(self._events, (image, *event, count), strict=True):
                column.append(value)

    def finish(self, worst: Sequence[Sequence[float]] = ()) -> Compared:
        """Return all that were added."""
        rows = np.array(self._rows, np.int32).reshape(2, -1)
        events = [np.frombuffer(column, np.uint32) if column else np.zeros(0, np.uint32) for column in self._events]
        orders = [np.array(each, np.float32) for each in worst]
        return Compared(self._tables, self._kinds, rows, np.array(self._flags, np.uint8), events, worst=orders)


def find_differences(
    before: Table,
    after: Table,
    files: Iterable[Change],
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Compared:
    """Compare two versions: their annotations, and the bytes of their images (`files`, in the order of paths)."""
    found = Collector(before, after, IMAGE_KINDS, OBJECT_KINDS)
    bit = {kind: 1 << n for n, kind in enumerate(IMAGE_KINDS)}
    places = {kind: n for n, kind in enumerate(OBJECT_KINDS)}
    ids = found.labels

    def event(change: Any) -> tuple[int, int, int]:
        was, now = (ids[box.label if box else ""] for box in (change.before, change.after))
        return places[change.kind], was, now

    def annotated() -> Iterator[tuple[bytes, tuple[int, int], Changed | None]]:
        for each in compare(before, after, lambda done, total: progress("comparing", done // 2, total // 2)):
            yield each.path.encode("utf-8", "surrogateescape"), each.numbers, each

    both = merge(annotated(), _other_bytes(before, after, files), key=itemgetter(0))
    for _, same in groupby(both, key=itemgetter(0)):
        flags, changes, of_path = 0, [], list(same)
        for _, _, each in of_path:
            if each is None:
                flags |= bit["image-changed"]
            elif each.before is None or each.after is None:
                flags |= bit["image-added" if each.before is None else "image-gone"]
            else:
                flags |= bit["annotated"]
            changes += each.objects if each else []
        found.add(of_path[0][1], flags, map(event, changes))
    return found.finish()


def _other_bytes(before: Table, after: Table, files: Iterable[Change]) -> Iterator[tuple[bytes, tuple[int, int], None]]:
    paths = (change.path for change in files if change.kind == "changed" and is_image(change.path))
    while part := list(islice(paths, _PATHS_AT_ONCE)):
        for path, *numbers in zip(part, before.numbers_of(part), after.numbers_of(part), strict=True):
            if min(numbers) >= 0:
                yield path, (numbers[0], numbers[1]), None


def _narrow(column: NDArray[Any]) -> NDArray[Any]:
    top = int(column.max(initial=0))
    return column.astype(np.uint8 if top < 2**8 else np.uint16 if top < 2**16 else np.uint32)
