"""Match predicted objects with labelled ones: which were found, which were missed, which are not there.

The predictions with the highest scores choose first. Each takes the object of its class with which it has the most in
common (intersection over union of the boxes), if that is enough and nobody has it yet, as COCO's and Pascal VOC's
evaluations do. A prediction that is left over, and lies in a crowd of its class for the most part, counts as nothing.
Then those that are left take objects of other classes, which are left, in the same way: a confusion. The rest are false
alarms, and misses. `overlapping` is asked once for the least overlap, `match` for each one that is wanted.

Pure functions over arrays; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from datacache.annotations.model import Box
from datacache.annotations.shapes.outline import NOTHING

if TYPE_CHECKING:
    from numpy.typing import NDArray

HIT, MISS, FALSE_ALARM, OTHER_CLASS, IGNORED = range(5)
_PAIRS_AT_ONCE: Final = 1_000_000
CROWD: Final = ("iscrowd", "1")
_SCORES: Final = ("confidence", "score")
"""The attributes that hold a score, in formats that have no field for it."""


class ObjectArrays(NamedTuple):
    """Labelled or predicted objects of images that follow each other."""

    images: NDArray[np.int64]
    """The number of each one's image, in order."""
    edges: NDArray[np.float64]
    """x1, y1, x2, y2: four rows."""
    classes: NDArray[np.int64]
    crowds: NDArray[np.bool_]
    """Of labels: those that stand for many."""
    scores: NDArray[np.float64]
    """Of predictions."""

    def only(self, which: NDArray[np.bool_]) -> ObjectArrays:
        """Return some of them."""
        images, edges, classes, crowds, scores = self
        return ObjectArrays(images[which], edges[:, which], classes[which], crowds[which], scores[which])


class Pairs(NamedTuple):
    """Objects and predictions that have something in common."""

    objects: NDArray[np.int64]
    predictions: NDArray[np.int64]
    overlaps: NDArray[np.float64]
    """Intersection over union; with a crowd, over the prediction."""


class Matching(NamedTuple):
    """Which predictions of an image have found which labels."""

    objects: NDArray[np.uint8]
    """`HIT`, `MISS`, `OTHER_CLASS` or, of crowds, `IGNORED`."""
    predictions: NDArray[np.uint8]
    """`HIT`, `FALSE_ALARM`, `OTHER_CLASS` or `IGNORED`."""
    taken: NDArray[np.int64]
    """The object that each prediction has taken, or the crowd that it lies in; -1 for none."""


def overlapping(labelled: ObjectArrays, predicted: ObjectArrays, least: float = 0.5) -> Pairs:
    """Return the pairs of one image that have at least `least`, above 0, in common."""
    first, last = (np.searchsorted(labelled.images, predicted.images, side) for side in ("left", "right"))
    counts = last - first
    found = []
    for part in _parts(counts):
        many = counts[part]
        m = np.repeat(np.arange(part.start, part.stop), many)
        n = np.arange(len(m)) + np.repeat(first[part] - (np.cumsum(many) - many), many)
        # As pycocotools does it, to the last bit: overlaps of exactly a half are frequent.
        (a, sides_a), (b, sides_b) = (
            (each[:2], each[2:] - each[:2]) for each in (labelled.edges[:, n], predicted.edges[:, m])
        )
        common = np.maximum(np.minimum(a + sides_a, b + sides_b) - np.maximum(a, b), 0).prod(axis=0)
        of_object, of_prediction = sides_a.prod(axis=0), sides_b.prod(axis=0)
        whole = np.where(labelled.crowds[n], of_prediction, of_object + of_prediction - common)
        overlaps = common / np.maximum(whole, 1e-12)
        enough = overlaps >= least
        found.append((n[enough], m[enough], overlaps[enough]))
    if not found:
        return Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    return Pairs(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _parts(counts: NDArray[np.int64]) -> Iterator[slice]:
    """Yield parts of predictions that make some pairs together, one prediction at least."""
    start, ends = 0, np.cumsum(counts)
    while start < len(counts):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _PAIRS_AT_ONCE, "right")))
        yield slice(start, stop)
        start = stop


def match(labelled: ObjectArrays, predicted: ObjectArrays, pairs: Pairs, least: float = 0.5) -> Matching:
    """Match the objects of each image; `pairs` are all that have `least` in common, or more. Of equal scores the
    prediction that comes first chooses first, of equal overlaps the first object is chosen."""
    enough = pairs.overlaps >= least
    n, m, overlaps = (column[enough] for column in pairs)
    order = np.lexsort((n, -overlaps, m, -predicted.scores[m]))
    n, m = n[order], m[order]
    own = labelled.classes[n] == predicted.classes[m]
    crowd = labelled.crowds[n]
    objects = np.where(labelled.crowds, IGNORED, MISS).astype(np.uint8)
    predictions = np.full(len(predicted.images), FALSE_ALARM, np.uint8)
    taken = np.full(len(predictions), -1)
    free, left = set(np.flatnonzero(~labelled.crowds).tolist()), set(range(len(predictions)))
    for kind, which in ((HIT, own & ~crowd), (IGNORED, own & crowd), (OTHER_CLASS, ~own & ~crowd)):
        for object, prediction in zip(n[which].tolist(), m[which].tolist(), strict=True):
            if prediction in left and (object in free or kind == IGNORED):
                left.remove(prediction)
                free.discard(object)
                predictions[prediction], taken[prediction] = kind, object
                if kind != IGNORED:
                    objects[object] = kind
    return Matching(objects, predictions, taken)


class MatchedObject(NamedTuple):
    """One object, one prediction, or both."""

    kind: Literal["hit", "miss", "false-alarm", "other-class", "ignored"]
    before: Box | None
    """As it is labelled."""
    after: Box | None
    """As it is predicted."""


_KINDS: Final[dict[int, Literal["hit", "miss", "false-alarm", "other-class", "ignored"]]] = {
    HIT: "hit",
    MISS: "miss",
    FALSE_ALARM: "false-alarm",
    OTHER_CLASS: "other-class",
    IGNORED: "ignored",
}


def match_objects(
    labelled: Sequence[Box], predicted: Sequence[Box], *, least_overlap: float = 0.5, least_score: float = 0.0
) -> list[MatchedObject]:
    """Match the objects of one image with the predictions whose score is high enough: first the misses, then the
    predictions, the highest score first."""
    predicted = [box for box in predicted if score_of(box) >= least_score]
    classes: dict[str, int] = {}
    sides = []
    for boxes in (labelled, predicted):
        edges = np.array([box[1:5] for box in boxes], float).reshape(-1, 4).T
        labels = np.array([classes.setdefault(box.label, len(classes)) for box in boxes], np.int64)
        crowds = np.array([CROWD in box.attributes for box in boxes], bool)
        scores = np.array([score_of(box) for box in boxes], float)
        sides.append(ObjectArrays(np.zeros(len(boxes), np.int64), edges, labels, crowds, scores))
    one, two = sides
    found = match(one, two, overlapping(one, two, least_overlap), least_overlap)
    verdicts = [
        MatchedObject(_KINDS[kind], box, None)
        for box, kind in zip(labelled, found.objects.tolist(), strict=True)
        if kind == MISS
    ]
    for m in np.argsort(-two.scores, kind="stable").tolist():
        taken = int(found.taken[m])
        before = labelled[taken] if taken >= 0 else None
        verdicts.append(MatchedObject(_KINDS[int(found.predictions[m])], before, predicted[m]))
    return verdicts


def score_of(box: Box) -> float:
    """Return the score of a prediction; 0 where it has none."""
    score = (box.extra or NOTHING).score
    return score_in(box.attributes) if score is None else score


def score_in(attributes: Sequence[tuple[str, str]]) -> float:
    """Return the score that attributes hold; 0 for none, and for what is no finite number."""
    try:
        score = float(next((value for name, value in attributes if name in _SCORES), 0.0))
    except ValueError:
        return 0.0
    return score if math.isfinite(score) else 0.0
