"""Evaluate predictions by labels: average precision as COCO has it, precision and recall from a score on, confusions,
and the images that went worst.

The predictions and the labels are the annotation tables of two snapshots whose images have the same paths. Images are
evaluated that both have and can use, that have one size in both, and that are annotated in the labels; what is left out
is counted. Where neither has objects, labels of whole images are compared instead.

Reached through `datacache.api.evaluate`. One thread a call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from datacache.annotations.comparing.compared import Compared, WantedImages
from datacache.annotations.comparing.predictions import (
    Quality,
    has_scores,
    match_tables,
    object_arrays,
    quality,
)
from datacache.annotations.table.table import Table
from datacache.annotations.table.together import RangePair, together
from datacache.core.counters import count
from datacache.core.errors import UsageError
from datacache.models.average_precision import BestScore, DetectionCounter, DetectionScores, f1_of, mean_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Progress = Callable[[str, int, int], None]
RankedLabels = Mapping[str, Sequence[tuple[str, float]]]
"""Of each image that was classified: labels and scores, the likeliest first."""
_TOP: Final = 5


class LeftOut(NamedTuple):
    """Images that are not evaluated."""

    reason: Literal["only-labelled", "only-predicted", "unusable", "other-size", "unannotated"]
    images: int
    first: str
    """The path of the first of them."""


class ClassScores(NamedTuple):
    """The numbers of one class. What cannot be said is None: precision without predictions, recall without labels."""

    label: str
    objects: int
    """Without crowds; of whole images: how many have the label. Likewise `predictions`, from the score on."""
    predictions: int
    precision: float | None
    recall: float | None
    ap: float | None = None
    """Average precision at overlaps from 0.5 to 0.95."""
    ap_50: float | None = None
    ap_75: float | None = None
    ar: float | None = None
    """Average recall with 100 predictions an image and class."""
    best: BestScore | None = None

    @property
    def f1(self) -> float | None:
        """Return the harmonic mean of precision and recall."""
        return f1_of(self.precision, self.recall)


class Confusion(NamedTuple):
    """Two classes, and how often the first was taken for the second; '' stands for nothing."""

    label: str
    predicted: str
    times: int


class WorstImage(NamedTuple):
    """An image on which something is wrong."""

    path: str
    wrong: int
    hits: int
    misses: int
    false_alarms: int
    other_class: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All that came out of evaluating predictions."""

    predicted: str
    """References of the snapshots, by their ids."""
    against: str
    kind: Literal["objects", "labels"]
    """Objects in images, or labels of whole images."""
    images: int
    left_out: Sequence[LeftOut]
    objects: int
    predictions: int
    """All of them, whatever their scores."""
    iou: float
    """The least overlap from which on a prediction has found an object."""
    score: float
    """The least score of what precision, recall, confusions and worst images are about."""
    score_is_best: bool
    """Nobody gave a score: it is the one with the largest F1."""
    precision: float | None
    recall: float | None
    classes: Sequence[ClassScores]
    """Those with the most objects first."""
    confusion: Sequence[Confusion]
    """The most frequent first, what is right among them."""
    worst: Sequence[WorstImage]
    wrong_images: int
    coco: dict[str, float | None]
    """COCO's twelve numbers, by the names that torchmetrics gives them; empty where predictions have no scores."""
    best: BestScore | None = None
    accuracy: float | None = None
    """Of labels: the part of the images whose likeliest label is one of theirs; `top_5`: one of the five likeliest,
    where predictions say several."""
    top_5: float | None = None
    curves: dict[str, list[float]]
    """Of each class with objects: precision at the recalls 0, 0.01, … 1, at `iou`."""
    warnings: Sequence[str]

    @property
    def f1(self) -> float | None:
        """Return the harmonic mean of precision and recall."""
        return f1_of(self.precision, self.recall)

    @property
    def map(self) -> float | None:
        """Return the mean average precision at overlaps from 0.5 to 0.95; `map_50`: at 0.5."""
        return self.coco.get("map")

    @property
    def map_50(self) -> float | None:
        return self.coco.get("map_50")

    def as_json(self) -> dict[str, Any]:
        """Return all of it but the curves, as `dsctl evaluate --json` prints it."""
        value = asdict(self)
        del value["curves"]
        value["f1"] = self.f1
        value["left_out"] = [each._asdict() for each in self.left_out]
        value["best"] = _best_json(self.best)
        value["classes"] = [each._asdict() | {"f1": each.f1, "best": _best_json(each.best)} for each in self.classes]
        value["confusion"] = [each._asdict() for each in self.confusion]
        value["worst"] = [each._asdict() for each in self.worst]
        return value


def evaluate_tables(
    names: tuple[str, str],
    labelled: Table,
    predicted: Table,
    *,
    iou: float = 0.5,
    score: float | None = None,
    worst: int = 20,
    keep_unannotated: bool = False,
    read_ranked: Callable[[], RankedLabels] = dict,
    progress: Progress = lambda _what, _done, _total: None,
) -> Evaluation:
    """Evaluate predictions. `names` are the references of labels and predictions, for messages. Without a `score` the
    one with the largest F1 counts. `worst` images are named. With `keep_unannotated` nothing is on images without
    annotation. `read_ranked` gives scores of labels of whole images, where the predictions have some.

    `UsageError` where no image, or nothing on them, can be compared."""
    if not 0 < iou <= 1:
        raise UsageError(f"an overlap of {iou:g} is none", hint="It is above 0, and 1 at most.")
    if score is not None and not 0 <= score < math.inf:
        raise UsageError(f"{score:g} is no score to count predictions from", hint="It is a number from 0 on.")
    if worst < 0:
        raise UsageError(f"there are no {worst} worst images", hint="It is a number from 0 on.")
    _check_kinds(names, labelled, predicted)
    chosen = _Chosen(names, labelled, predicted, keep_unannotated=keep_unannotated)
    if labelled.boxes:
        return _evaluate_objects(chosen, iou=iou, score=score, worst=worst, progress=progress)
    return _evaluate_labels(chosen, read_ranked(), iou=iou, score=score or 0.0, worst=worst, progress=progress)


def _check_kinds(names: tuple[str, str], labelled: Table, predicted: Table) -> None:
    against, name = names
    if not labelled.labels:
        raise UsageError(
            f"{against} has neither objects nor labels: nothing can be measured",
            hint="Name the snapshot with the labels; dsctl stats says what is in one. "
            "Where folders are the labels, add --format folders.",
        )
    if has_scores(labelled) and predicted.boxes and not has_scores(predicted):
        raise UsageError(
            f"the objects of {against} have scores, and those of {name} have none: are they the wrong way round?",
            hint=f"dsctl evaluate {against} --against {name}",
        )
    if bool(labelled.boxes) != bool(predicted.boxes) and predicted.labels:
        has, other = ("objects", "labels of whole images") if labelled.boxes else ("labels of whole images", "objects")
        raise UsageError(
            f"{against} has {has}, and {name} has {other}",
            hint="Predict with a model of the other kind, or name other labels.",
        )


class _Chosen:
    """Goes through both tables, and leaves out images that cannot be evaluated."""

    def __init__(self, names: tuple[str, str], labelled: Table, predicted: Table, *, keep_unannotated: bool) -> None:
        self.names, self.tables, self._keep = names, (labelled, predicted), keep_unannotated
        self._left_out: dict[str, tuple[int, str]] = {}
        self.images = 0

    def stretches(self, progress: Progress) -> Iterator[RangePair]:
        """Yield the images to be evaluated, and count the others. `UsageError` at the end where there was none."""
        total, done = self.tables[0].images, 0
        for stretch in together(*self.tables, *(range(len(table.row_counts())) for table in self.tables)):
            chosen = self.choose(stretch, self._note)
            self.images += len(chosen.both[0])
            if len(chosen.both[0]):
                yield chosen
            done += len(stretch.both[0]) + len(stretch.gone)
            progress("evaluating", done, total)
        if not self.images:
            raise self._nothing_in_common()

    def choose(
        self, stretch: RangePair, note: Callable[[str, Sequence[bytes]], None] = lambda _reason, _paths: None
    ) -> RangePair:
        """Leave out images of a stretch that cannot be evaluated."""
        old, new, both, gone, added = stretch
        if old:
            note("only-labelled", [old.paths[n] for n in gone])
        if new:
            note("only-predicted", [new.paths[n] for n in added])
        if not (old and new and len(both[0])):
            return stretch
        a, b = old.images[:, both[0]], new.images[:, both[1]]
        left = np.ones(len(both[0]), bool)
        for reason, which in (
            ("unusable", (a[0] & b[0]) == 0),
            ("other-size", (a[1:] != b[1:]).any(axis=0)),
            ("unannotated", ~old.annotated[both[0]] & (not self._keep)),
        ):
            note(reason, [old.paths[n] for n in both[0][which & left].tolist()])
            left &= ~which
        return stretch._replace(both=(both[0][left], both[1][left]))

    def left_out(self) -> list[LeftOut]:
        """Return what was left out."""
        return [LeftOut(reason, *found) for reason, found in self._left_out.items()]  # type: ignore[arg-type]

    def _note(self, reason: str, paths: Sequence[bytes]) -> None:
        if paths:
            number, first = self._left_out.get(reason, (0, paths[0].decode("utf-8", "replace")))
            self._left_out[reason] = number + len(paths), first

    def _nothing_in_common(self) -> UsageError:
        reasons = "; ".join(say(each) for each in self.left_out()) or "neither has any"
        against, name = self.names
        hints = {
            "unannotated": "Images without annotation show nothing? Add --keep-unannotated.",
            "other-size": "Predict on the images of the labels as they are: boxes are pixels.",
        }
        found = next((hints[each.reason] for each in self.left_out() if each.reason in hints), "")
        hint = found or f"Predict on {against}, so that images have the same paths."
        return UsageError(f"{name} and {against} have no image that can be evaluated: {reasons}", hint=hint)


_REASONS: Final = {
    "only-labelled": "that the predictions lack",
    "only-predicted": "that the labels lack",
    "unusable": "that cannot be used",
    "other-size": "of another size in the labels",
    "unannotated": "without annotation in the labels",
}


def say(left_out: LeftOut) -> str:
    """Return what was left out as a part of a sentence."""
    return f"{count(left_out.images, 'image')} {_REASONS[left_out.reason]} ({left_out.first!r})"


def _evaluate_objects(
    chosen: _Chosen, *, iou: float, score: float | None, worst: int, progress: Progress
) -> Evaluation:
    labelled, predicted = chosen.tables
    labels = sorted({*labelled.labels, *predicted.labels})
    numbers = {label: n for n, label in enumerate(labels)}
    counter = DetectionCounter(len(labels), iou)
    counts = np.zeros((2, len(labels)), np.int64)
    unsure = 0
    for stretch in chosen.stretches(progress):
        old, new, (places, others), *_ = stretch
        assert old
        assert new
        one, two = object_arrays(old, places, numbers), object_arrays(new, others, numbers)
        counter.add(one, old.areas[old.objects_of(places)], two, len(places))
        unsure += int((two.scores <= 0).sum())
        both = one.classes[~one.crowds], two.classes
        counts += [np.bincount(classes, minlength=len(labels)) for classes in both]
    found = counter.finish()
    scored = has_scores(predicted)
    best = found.best[-1] if scored else None
    least = score if score is not None else best.score if best and best.f1 else 0.0
    compared = match_tables(
        labelled,
        predicted,
        least_overlap=iou,
        least_score=least,
        choose=chosen.choose,
        progress=lambda _what, done, total: progress("matching", done, total),
    )
    each = {one.label: one for one in quality(compared)}
    every = each.pop("", Quality("", 0, 0, 0, 0, 0))
    there = np.flatnonzero(counts.any(axis=0)).tolist()
    scores = [_class_scores(labels[n], n, counts, each, found, scored=scored) for n in there]
    wrong, number = _worst(compared, labelled, worst)
    return Evaluation(
        predicted=chosen.names[1],
        against=chosen.names[0],
        kind="objects",
        images=chosen.images,
        left_out=chosen.left_out(),
        objects=int(counts[0].sum()),
        predictions=int(counts[1].sum()),
        iou=iou,
        score=least,
        score_is_best=score is None and least > 0,
        precision=every.precision,
        recall=every.recall,
        classes=sorted(scores, key=lambda one: (-one.objects, one.label)),
        confusion=_confusion(compared.objects()),
        worst=wrong,
        wrong_images=number,
        coco=found.summary() if scored else {},
        best=best,
        curves={labels[n]: found.curves[n].tolist() for n in there if scored and counts[0, n]},
        warnings=_warnings(chosen, labels, counts, scored=scored, unsure=unsure),
    )


def _class_scores(
    label: str, n: int, counts: NDArray[np.int64], each: dict[str, Quality], found: DetectionScores, *, scored: bool
) -> ClassScores:
    mine = each.get(label, Quality(label, 0, 0, 0, 0, 0))
    objects, predictions = int(counts[0, n]), mine.hits + mine.false_alarms + mine.others_taken
    if not scored:
        return ClassScores(label, objects, predictions, mine.precision, mine.recall)
    ap = found.precision[0, :, n]
    return ClassScores(
        label,
        objects,
        predictions,
        mine.precision,
        mine.recall,
        ap=mean_of(ap),
        ap_50=mean_of(ap[:1]),
        ap_75=mean_of(ap[5:6]),
        ar=mean_of(found.recall[2, :, n]),
        best=found.best[n],
    )


def _worst(compared: Compared, labelled: Table, most: int) -> tuple[list[WorstImage], int]:
    """Return the images with the most that is wrong, and how many there are with anything wrong."""
    found = []
    wrong = compared.images_but("hit")
    for number in compared.select(WantedImages())[: min(most, wrong)].tolist():
        hits, *others = compared.counts_of(number).values()
        found.append(WorstImage(labelled.path_at(int(compared.rows[0][number])), sum(others), hits, *others))
    return found, wrong


def _confusion(objects: Counter[tuple[str, str, str]]) -> list[Confusion]:
    times: Counter[tuple[str, str]] = Counter()
    for (_, was, now), number in objects.items():
        times[was, now] += number
    return [Confusion(*both, number) for both, number in sorted(times.items(), key=lambda item: (-item[1], item[0]))]


def _warnings(
    chosen: _Chosen, labels: Sequence[str], counts: NDArray[np.int64], *, scored: bool, unsure: int = 0
) -> list[str]:
    """Return what makes the numbers other than they look, with the way out."""
    against, name = chosen.names
    found = [f"left out: {say(each)}" for each in chosen.left_out()]
    objects, predictions = counts
    if not predictions.any():
        found.append(f"{name} predicts nothing on these images: all objects are missed")
    elif not scored:
        found.append(
            f"the predictions of {name} have no scores, so there is no average precision: dsctl predict writes scores, "
            "as do the formats yolo-predictions and coco"
        )
    elif unsure:
        found.append(
            f"{count(unsure, 'prediction')} of {name} of the score 0, or without a score that is a number: the least "
            "sure of all"
        )
    found += _said_of_reading(name, chosen.tables[1])
    unknown = [label for label, a, b in zip(labels, objects, predictions, strict=True) if b and not a]
    unfound = [label for label, a, b in zip(labels, objects, predictions, strict=True) if a and not b]
    if unknown:
        found.append(
            f"{name} alone has {_listed(unknown)}: false alarms all, and no part of the mean average precision"
        )
    if unfound and predictions.any():
        found.append(f"{against} alone has {_listed(unfound)}: missed all")
    if unknown and unfound:
        found[-1] += "; where one class has two names, dsctl convert --map gives it one"
    return found


def _said_of_reading(name: str, predicted: Table) -> list[str]:
    """Return what was left out or changed of predictions when they were read."""
    said = []
    for action, what in (("skipped", "left out"), ("repaired", "mended, as boxes that lead out of their images are")):
        kinds = [problem for problem in predicted.problem_counts if problem.action == action]
        if kinds:
            times = count(sum(problem.times for problem in kinds), "entry", "entries")
            codes = ", ".join(problem.code for problem in kinds)
            said.append(f"{times} in the annotations of {name} {what} ({codes}): dsctl stats {name} --problems")
    return said


def _listed(labels: Sequence[str], most: int = 5) -> str:
    names = ", ".join(map(repr, labels[:most]))
    more = f" and {len(labels) - most:,} more" if len(labels) > most else ""
    return f"the {'class' if len(labels) == 1 else 'classes'} {names}{more}"


def _evaluate_labels(
    chosen: _Chosen, ranked: RankedLabels, *, iou: float, score: float, worst: int, progress: Progress
) -> Evaluation:
    """Compare labels of whole images."""
    right = among = several = 0
    times: Counter[tuple[str, str]] = Counter()
    totals: dict[str, Counter[str]] = {}
    wrong: list[tuple[float, WorstImage]] = []
    for stretch in chosen.stretches(progress):
        old, new, (places, others), *_ = stretch
        assert old
        assert new
        one, two = old.more, new.more
        for place, other in zip(places.tolist(), others.tolist(), strict=True):
            path, truth = old.paths[place].decode("utf-8", "surrogateescape"), set(one[place][0])
            likeliest = ranked.get(path) or [(label, 1.0) for label in two[other][0]]
            guesses = [label for label, _ in likeliest]
            first, sure = likeliest[0] if likeliest and likeliest[0][1] >= score else ("", 0.0)
            right += first in truth
            among += not truth.isdisjoint(guesses[:_TOP])
            several += len(guesses) > 1
            for label in truth:
                totals.setdefault(label, Counter())["objects"] += 1
            if first:
                totals.setdefault(first, Counter()).update(predictions=1, hits=first in truth)
            was = first if first in truth else min(truth, default="")
            if was or first:
                times[was, first] += 1
            if was != first:
                verdict = (0, int(not first), int(not truth), int(bool(first and truth)))
                wrong.append((-sure, WorstImage(path, 1, *verdict)))
    wrong.sort()
    images = chosen.images
    labels = sorted(totals)
    counts = np.array([[totals[label][what] for label in labels] for what in ("objects", "predictions")], np.int64)
    scores = [
        ClassScores(
            label,
            found["objects"],
            found["predictions"],
            found["hits"] / found["predictions"] if found["predictions"] else None,
            found["hits"] / found["objects"] if found["objects"] else None,
        )
        for label, found in totals.items()
    ]
    hits, guessed, there = (
        sum(found[what] for found in totals.values()) for what in ("hits", "predictions", "objects")
    )
    return Evaluation(
        predicted=chosen.names[1],
        against=chosen.names[0],
        kind="labels",
        images=images,
        left_out=chosen.left_out(),
        objects=there,
        predictions=guessed,
        iou=iou,
        score=score,
        score_is_best=False,
        precision=hits / guessed if guessed else None,
        recall=hits / there if there else None,
        classes=sorted(scores, key=lambda one: (-one.objects, one.label)),
        confusion=_confusion(Counter({("", *both): number for both, number in times.items()})),
        worst=[image for _, image in wrong[:worst]],
        wrong_images=len(wrong),
        coco={},
        accuracy=right / images,
        top_5=among / images if several else None,
        curves={},
        warnings=_warnings(chosen, labels, counts, scored=True),
    )


def _best_json(best: BestScore | None) -> dict[str, float] | None:
    return None if best is None else best._asdict() | {"f1": best.f1}
