"""Match all predictions of a snapshot with the labels of another one whose images have the same paths.

Used by the web page, through `datacache.api`. One thread a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from datacache.annotations.comparing.compared import Collector, Compared
from datacache.annotations.comparing.matching import (
    CROWD,
    FALSE_ALARM,
    HIT,
    IGNORED,
    MISS,
    ObjectArrays,
    match,
    overlapping,
    score_in,
)
from datacache.annotations.table.table import Table
from datacache.annotations.table.together import RangePair, UnpackedRange, together

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERDICTS: Final = ("hit", "miss", "false-alarm", "other-class")
"""In the order of `HIT`, `MISS`, `FALSE_ALARM` and `OTHER_CLASS`."""
_LOOKED_AT: Final = 40
"""Ranges of a table that are looked at for scores."""


class Quality(NamedTuple):
    """How well one class, or all, was found."""

    label: str
    hits: int
    misses: int
    """Without those that were found as another class."""
    false_alarms: int
    """Without those that are another class."""
    taken_for_other: int
    others_taken: int

    @property
    def precision(self) -> float | None:
        """Return the part of the predictions that are right; None where there are none."""
        predicted = self.hits + self.false_alarms + self.others_taken
        return self.hits / predicted if predicted else None

    @property
    def recall(self) -> float | None:
        """Return the part of the objects that were found; None where there are none."""
        there = self.hits + self.misses + self.taken_for_other
        return self.hits / there if there else None


def quality(found: Compared) -> list[Quality]:
    """Return the quality of each class that has labels or predictions, and at the end that of all (label '')."""
    counts: dict[str, Counter[str]] = {}
    every: Counter[str] = Counter()
    for (kind, was, now), count in found.objects().items():
        names = [(was, "taken_for_other"), (now, "others_taken")] if kind == "other-class" else [(was or now, kind)]
        for label, name in names:
            counts.setdefault(label, Counter())[name] += count
            every[name] += count
    each = [*sorted(counts.items()), ("", every)]
    fields = ("hit", "miss", "false-alarm", "taken_for_other", "others_taken")
    return [Quality(label, *(numbers[field] for field in fields)) for label, numbers in each]


def has_scores(table: Table) -> bool:
    """Tell whether a table is one of predictions: one of the first objects that it has has a score."""
    for loaded in islice(table.loaded(range(len(table.row_counts()))), _LOOKED_AT):
        objects = UnpackedRange(loaded).objects
        if (_scores(objects.scores, objects.kinds, objects.attributes) > 0).any():
            return True
    return False


def match_tables(
    labelled: Table,
    predicted: Table,
    *,
    least_overlap: float = 0.5,
    least_score: float = 0.0,
    choose: Callable[[RangePair], RangePair] = lambda stretch: stretch,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Compared:
    """Match the objects of all images that both have, or of those of them that `choose` leaves; images without any
    are left out. In the result the labels are before, the predictions after."""
    found = Collector(labelled, predicted, (), VERDICTS)
    worst: tuple[list[float], ...] = [], [], [], [], []
    done = 0
    tables = labelled, predicted
    for stretch in together(*tables, *(range(len(table.row_counts())) for table in tables)):
        chosen = choose(stretch)
        if len(chosen.both[0]):
            _add(found, worst, chosen, least_overlap, least_score)
        done += len(stretch.both[0]) + len(stretch.gone)
        progress("matching", done, labelled.images)
    return found.finish(worst)


def _add(
    found: Collector, worst: tuple[list[float], ...], stretch: RangePair, least_overlap: float, least_score: float
) -> None:
    held = stretch.before, stretch.after
    one, two = (
        object_arrays(each, places, found.labels) for each, places in zip(held, stretch.both, strict=True) if each
    )
    two = two.only(two.scores >= least_score)
    verdicts = match(one, two, overlapping(one, two, least_overlap), least_overlap)
    none = found.labels[""]
    events: dict[int, list[tuple[int, int, int]]] = {}
    worsts: dict[int, list[float]] = {}
    missed = verdicts.objects == MISS
    for image, label in zip(one.images[missed].tolist(), one.classes[missed].tolist(), strict=True):
        events.setdefault(image, []).append((MISS, label, none))
        order = worsts.setdefault(image, [0.0] * 5)
        order[0] += 1
        order[1 + MISS] += 1
    columns = two.images, verdicts.predictions, verdicts.taken, two.classes, two.scores
    for image, kind, taken, label, score in zip(*(column.tolist() for column in columns), strict=True):
        if kind == IGNORED:
            continue
        was = none if kind == FALSE_ALARM else int(one.classes[taken])
        events.setdefault(image, []).append((kind, was, label))
        order = worsts.setdefault(image, [0.0] * 5)
        order[0] += kind != HIT
        if kind == HIT:
            order[1] += 1
        else:
            order[1 + kind] = max(order[1 + kind], score)
    firsts = [each.first for each in held if each]
    for image in sorted(events):
        numbers = (firsts[side] + int(places[image]) for side, places in enumerate(stretch.both))
        found.add((next(numbers), next(numbers)), 0, events[image])
        for column, value in zip(worst, worsts.get(image, [0.0] * 5), strict=True):
            column.append(value)


def object_arrays(held: UnpackedRange, places: NDArray[np.int64], numbers: dict[str, int]) -> ObjectArrays:
    """Return the objects of some images, which are numbered from 0 in the order of their places. `numbers` are those
    of classes."""
    objects, wanted = held.objects, held.objects_of(places)
    classes = np.array([numbers[label] for label in held.labels], np.int64)
    crowds = np.array([CROWD in kind for kind in objects.attributes], bool)
    kinds = objects.kinds[wanted]
    return ObjectArrays(
        np.repeat(np.arange(len(places)), objects.counts[places]),
        objects.edges[:, wanted],
        classes[objects.labels[wanted]],
        crowds[kinds],
        _scores(objects.scores[wanted], kinds, objects.attributes),
    )


def _scores(
    scores: NDArray[np.float64], kinds: NDArray[np.int64], attributes: list[tuple[tuple[str, str], ...]]
) -> NDArray[np.float64]:
    of_kinds = np.array([score_in(kind) for kind in attributes], float)
    return np.where(np.isnan(scores), of_kinds[kinds], scores)
