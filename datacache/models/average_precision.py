"""Count what COCO's evaluation does: average precision and recall of boxes, and the score from which on they fit best.

The numbers are those of pycocotools' `COCOeval` (`iouType="bbox"`, images numbered in the order in which they come):
crowds and objects outside of a range of areas count as nothing, and so do predictions that fit them; an image and a
class have 100 predictions at most; of equal scores the first prediction chooses first, of equal overlaps the last
object is chosen. All images, thresholds and ranges of areas are matched at once, one prediction of each image and class
after the other. docs/decisions/0055-cocos-numbers-from-arrays.md says why not by pycocotools itself.

A prediction takes some 30 bytes until the end. One thread a counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from datacache.annotations.comparing.matching import ObjectArrays, Pairs, overlapping

if TYPE_CHECKING:
    from numpy.typing import NDArray

OVERLAPS: Final = np.linspace(0.5, 0.95, 10)
_RECALLS: Final = np.linspace(0.0, 1.0, 101)
_AREAS: Final = np.array([[0, 1e10], [0, 32**2], [32**2, 96**2], [96**2, 1e10]])
"""In square pixels: all, small, medium, large."""
_MOST: Final = 100
_LIMITS: Final = ((0, 1), (0, 10), (0, _MOST), (1, _MOST), (2, _MOST), (3, _MOST))
"""The ranges of areas, and how many predictions an image and a class may have, that recalls are of."""
_AT_ONCE: Final = 50_000


class BestScore(NamedTuple):
    """The score from which on precision and recall have their largest harmonic mean."""

    score: float
    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """Return the harmonic mean."""
        return f1_of(self.precision, self.recall) or 0.0


def f1_of(precision: float | None, recall: float | None) -> float | None:
    """Return the harmonic mean of both; None where one of them cannot be said."""
    if precision is None or recall is None:
        return None
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


class DetectionScores(NamedTuple):
    """The numbers of each class; `nan` for a class without objects."""

    precision: NDArray[np.float64]
    """Average precision: ranges of areas x `OVERLAPS` x classes."""
    recall: NDArray[np.float64]
    """Average recall: with 1, 10 and 100 predictions, then of small, medium and large objects; x `OVERLAPS` x
    classes."""
    curves: NDArray[np.float64]
    """At the overlap that was asked for: classes x precision at the recalls 0, 0.01, … 1."""
    best: list[BestScore | None]
    """At that overlap: of each class, and at the end of all; None without objects or predictions."""

    def summary(self) -> dict[str, float | None]:
        """Return COCO's twelve numbers, by the names that torchmetrics gives them."""
        ap, ar = self.precision, self.recall
        numbers = {
            "map": ap[0],
            "map_50": ap[0, :1],
            "map_75": ap[0, 5:6],
            **{f"map_{name}": ap[1 + n] for n, name in enumerate(("small", "medium", "large"))},
            **{f"mar_{name}": ar[n] for n, name in enumerate((1, 10, 100, "small", "medium", "large"))},
        }
        return {name: mean_of(values) for name, values in numbers.items()}


def mean_of(values: NDArray[np.float64]) -> float | None:
    """Return the mean of what is there; None for nothing."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else None


class DetectionCounter:
    """Takes the objects and predictions of some images after the other."""

    def __init__(self, classes: int, overlap: float = 0.5) -> None:
        """`overlap` (above 0, 1 at most) is the one of curves and best scores."""
        self._classes = classes
        near = np.flatnonzero(np.isclose(OVERLAPS, overlap, rtol=0, atol=1e-9))
        self._asked = int(near[0]) if len(near) else len(OVERLAPS)
        overlaps = OVERLAPS if len(near) else np.append(OVERLAPS, overlap)
        self._overlaps = np.minimum(overlaps, 1 - 1e-10)
        self._objects = np.zeros((len(_AREAS), classes), np.int64)
        self._waiting: list[tuple[ObjectArrays, NDArray[np.float64], ObjectArrays]] = []
        self._images, self._objects_waiting = 0, 0
        self._kept: list[tuple[NDArray[Any], ...]] = []

    def add(self, labelled: ObjectArrays, areas: NDArray[np.float64], predicted: ObjectArrays, images: int) -> None:
        """Count some images, numbered from 0. `areas` are those of the labelled objects, in square pixels."""
        both = (each._replace(images=each.images + self._images) for each in (labelled, predicted))
        self._waiting.append((next(both), areas, next(both)))
        self._images += images
        self._objects_waiting += len(labelled.images) + len(predicted.images)
        if self._objects_waiting > _AT_ONCE:
            self._count_waiting()

    def finish(self) -> DetectionScores:
        """Return the numbers of all that was added."""
        self._count_waiting()
        found = _Predictions(*map(np.concatenate, zip(*self._kept, strict=True))) if self._kept else _nothing()
        found = found.only(np.lexsort((-found.scores, found.classes)))
        ends = np.searchsorted(found.classes, np.arange(self._classes + 1))
        asked, many = self._asked, len(OVERLAPS)
        precision = np.full((len(_AREAS), many, self._classes), np.nan)
        recall = np.full((len(_LIMITS), many, self._classes), np.nan)
        curves = np.full((self._classes, len(_RECALLS)), np.nan)
        best: list[BestScore | None] = []
        for label in range(self._classes):
            mine = found.only(slice(ends[label], ends[label + 1]))
            for area in range(len(_AREAS)):
                objects = int(self._objects[area, label])
                if objects:
                    drawn = _curves(*mine.bits(area, len(self._overlaps)), objects)
                    precision[area, :, label] = drawn[:many].mean(axis=1)
                    if not area:
                        curves[label] = drawn[asked]
            for n, (area, most) in enumerate(_LIMITS):
                objects = int(self._objects[area, label])
                if objects:
                    hits, _ = mine.only(mine.ranks < most).bits(area, many)
                    recall[n, :, label] = hits.sum(axis=1) / objects
            best.append(_best(mine, asked, int(self._objects[0, label])))
        together = found.only(np.argsort(-found.scores, kind="stable"))
        best.append(_best(together, asked, int(self._objects[0].sum())))
        return DetectionScores(precision, recall, curves, best)

    def _count_waiting(self) -> None:
        if not self._waiting:
            return
        labelled, areas, predicted = zip(*self._waiting, strict=True)
        self._waiting, self._objects_waiting = [], 0
        one, order = self._by_class(_joined(labelled))
        sizes = np.concatenate(areas)[order]
        two, _ = self._by_class(_joined(predicted))
        ranks = np.arange(len(two.images)) - np.searchsorted(two.images, two.images)
        few = ranks < _MOST
        two, ranks = two.only(few), ranks[few]
        low, high = _AREAS[:, :1], _AREAS[:, 1:]
        ignored = one.crowds | (sizes < low) | (sizes > high)
        for area, none in enumerate(ignored):
            self._objects[area] += np.bincount(one.classes[~none], minlength=self._classes)
        pairs = overlapping(one, two, float(self._overlaps.min()))
        taken, in_ignored = _match(pairs, two, self._overlaps, ignored, one.crowds)
        of_predictions = (two.edges[2:] - two.edges[:2]).prod(axis=0)
        outside = (of_predictions < low) | (of_predictions > high)
        nothing = in_ignored | (~taken & outside[:, None])
        self._kept.append((two.classes, two.scores, ranks, _packed(taken & ~nothing), _packed(nothing)))

    def _by_class(self, objects: ObjectArrays) -> tuple[ObjectArrays, NDArray[np.int64]]:
        """Return objects with a number for each image and class in the place of the image's, in order, those with the
        highest scores first; and the order that makes them so."""
        keys = objects.images * self._classes + objects.classes
        order = np.lexsort((-objects.scores, keys))
        images, edges, classes, crowds, scores = objects._replace(images=keys)
        return ObjectArrays(images[order], edges[:, order], classes[order], crowds[order], scores[order]), order


class _Predictions(NamedTuple):
    """All predictions. Bits of `hits` and `ignored` are overlaps; a row for each range of areas."""

    classes: NDArray[np.int64]
    scores: NDArray[np.float64]
    ranks: NDArray[np.int64]
    hits: NDArray[np.uint16]
    ignored: NDArray[np.uint16]

    def only(self, which: slice | NDArray[Any]) -> _Predictions:
        """Return some of them."""
        classes, scores, ranks, hits, ignored = self
        return _Predictions(classes[which], scores[which], ranks[which], hits[which], ignored[which])

    def bits(self, area: int, overlaps: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return hits, and what counts as nothing: overlaps x predictions."""
        places = np.arange(overlaps, dtype=np.uint16)[:, None]
        return (self.hits[:, area] >> places & 1).astype(bool), (self.ignored[:, area] >> places & 1).astype(bool)


def _nothing() -> _Predictions:
    none = np.zeros((0, len(_AREAS)), np.uint16)
    return _Predictions(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), none, none)


def _joined(parts: tuple[ObjectArrays, ...]) -> ObjectArrays:
    images, edges, *rest = zip(*parts, strict=True)
    return ObjectArrays(np.concatenate(images), np.concatenate(edges, axis=1), *map(np.concatenate, rest))


def _packed(bits: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Return areas x overlaps x predictions as a number for each prediction and area."""
    weights = np.uint16(1) << np.arange(bits.shape[1], dtype=np.uint16)
    packed: NDArray[np.uint16] = np.einsum("atn,t->na", bits, weights, dtype=np.uint16, casting="unsafe")
    return packed


def _match(
    pairs: Pairs,
    predicted: ObjectArrays,
    overlaps: NDArray[np.float64],
    ignored: NDArray[np.bool_],
    crowds: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which predictions, highest score first, take an object, and which one that is ignored: ranges of areas x
    overlaps x predictions.

    Of objects that are free, one that counts is taken before one that is ignored, and a crowd is always free."""
    shape = len(ignored), len(overlaps)
    free = np.ones((*shape, len(crowds)), bool)
    taken, in_ignored = (np.zeros((*shape, len(predicted.images)), bool) for _ in range(2))
    order = np.lexsort((-pairs.objects, -pairs.overlaps, pairs.predictions))
    objects, predictions, shares = (column[order] for column in pairs)
    with_pairs, of_pairs = np.unique(predictions, return_inverse=True)
    keys = predicted.images[with_pairs]
    turns = (np.arange(len(keys)) - np.searchsorted(keys, keys))[of_pairs]
    by_turn = np.argsort(turns, kind="stable")
    ends = np.cumsum(np.bincount(turns))
    for start, stop in zip((0, *ends), ends, strict=False):
        now = by_turn[start:stop]
        n, m, count = objects[now], predictions[now], stop - start
        firsts = np.flatnonzero(np.diff(m, prepend=-1))
        may = (shares[now] >= overlaps[:, None]) & (free[:, :, n] | crowds[n])
        places = np.arange(count) + count * ignored[:, n]
        chosen = np.minimum.reduceat(np.where(may, places[:, None], 2 * count), firsts, axis=2)
        area, overlap, who = np.nonzero(chosen < 2 * count)
        which = n[chosen[area, overlap, who] % count]
        free[area, overlap, which] = False
        taken[area, overlap, m[firsts[who]]] = True
        in_ignored[area, overlap, m[firsts[who]]] = ignored[area, which]
    return taken, in_ignored


def _curves(hits: NDArray[np.bool_], ignored: NDArray[np.bool_], objects: int) -> NDArray[np.float64]:
    """Return precision at each of the 101 recalls, a row for each overlap."""
    right, wrong = np.cumsum(hits, axis=1), np.cumsum(~hits & ~ignored, axis=1)
    precision = right / (right + wrong + np.spacing(1))
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    found = np.zeros((len(hits), len(_RECALLS)))
    for row, recall, values in zip(found, right / objects, precision, strict=True):
        places = np.searchsorted(recall, _RECALLS)
        there = places < len(values)
        row[there] = values[places[there]]
    return found


def _best(sorted_predictions: _Predictions, overlap: int, objects: int) -> BestScore | None:
    hits, ignored = (bits[overlap] for bits in sorted_predictions.bits(0, overlap + 1))
    scores = sorted_predictions.scores[~ignored]
    if not len(scores) or not objects:
        return None
    right = np.cumsum(hits[~ignored])
    predicted = np.arange(1, len(scores) + 1)
    last = np.append(scores[1:] != scores[:-1], True)  # a score is reached by all predictions that have it
    means = np.where(last, 2 * right / (predicted + objects), -1)
    at = int(np.argmax(means))
    return BestScore(float(scores[at]), float(right[at] / predicted[at]), float(right[at] / objects))
