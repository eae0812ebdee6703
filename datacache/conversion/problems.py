"""Problems that only a closer look finds, and what mends them: crossing lines, repeated objects, classes in two
spellings, images in several splits.

Used by `dsctl stats --problems`, which lists them, and by conversions with `fix`: both look by the same code. One
thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import floor, frexp, ldexp
from typing import Final, NamedTuple

from datacache.annotations.check import same_object
from datacache.annotations.classes import spelled, spelled_alike
from datacache.annotations.comparing.matching import score_of
from datacache.annotations.model import Action, Annotation, Box, Problem, quote, unforeseen
from datacache.annotations.shapes.outline import NOTHING, Polygon, in_common
from datacache.annotations.table.table import Table
from datacache.conversion.combine import own_target
from datacache.conversion.index import Annotations, with_entries
from datacache.conversion.model import Splits
from datacache.core.counters import count
from datacache.core.errors import UsageError
from datacache.reader.snapshot import Snapshot

NEAR: Final = 0.9
"""The part that two boxes of a class have in common, of both together, from which on they are one object."""
_APART: Final = 1.001 * (1 / NEAR - 1)
"""The part of its side by which each edge of such a box can be apart from the other's, and a little for rounding."""
_CELLS: Final = 6
"""To the power of two that is as long as a side or longer: boxes are looked for in cells of this size."""
SURE: Final = 0.8
"""The least score of a prediction that makes a label doubtful, and `OVER` what it has in common with the object."""
OVER: Final = 0.7


class Twin(NamedTuple):
    """The image of another split that is the same."""

    split: str
    path: str


def spellings(table: Table) -> dict[str, str]:
    """Return each class that is another one in another spelling, and this other one, which is the more frequent."""
    found: dict[str, str] = {}
    for alike in spelled_alike(table.labels):
        most = max(alike, key=lambda label: (table.labels[label].boxes, table.labels[label].images))
        found |= {label: most for label in alike if label != most}
    return found


class Mending:
    """Looks closer at one image after another. Without `fix` it says what is wrong, and what it gives is of no use."""

    def __init__(self, snapshot: Snapshot, table: Table, splits: Splits, *, fix: bool) -> None:
        """Read the images of equal sizes where there are several splits."""
        self.spellings = spellings(table)
        self._twins = _twins(snapshot, table, splits) if len(splits.names) > 1 else {}
        self._totals = table.labels
        self._fix = fix
        self._action: Action = "repaired" if fix else "noted"
        self._said: set[str] = set()

    def is_left_out(self, path: str, problems: list[Problem]) -> bool:
        """Tell whether an image is in an earlier split as well, and add that problem."""
        twin = self._twins.get(path)
        if twin is None:
            return False
        message = f"{path} is the same image as {twin.path} in {twin.split}"
        if self._fix:
            problems.append(Problem("split-shared", "skipped", path, 0, f"{message}; it is left out"))
        else:
            problems.append(Problem("split-shared", "noted", path, 0, message))
        return self._fix

    def mended(self, annotation: Annotation, problems: list[Problem]) -> Annotation:
        """Return the image's annotation without what is wrong with it, and add the problems that were found."""
        try:
            return self._mended(annotation, problems)
        except Exception as exc:  # noqa: BLE001 - one image must not end the look at all
            closer = f"the closer look at {quote(annotation.path)} is"
            problems.append(unforeseen(exc, annotation.source or annotation.path, closer))
            return annotation

    def _mended(self, annotation: Annotation, problems: list[Problem]) -> Annotation:
        file, boxes = annotation.source or annotation.path, annotation.boxes

        def say(code: str, place: int, wrong: str, done: str) -> None:
            shown = f"{annotation.path}, object {place + 1} ({quote(boxes[place].label)}): {wrong}"
            message = f"{shown}; {done}" if self._fix else shown
            problems.append(Problem(code, self._action, file, boxes[place].line, message))

        if self.spellings:
            self._say_spellings(annotation, file, problems)
            boxes = annotation.boxes
            annotation = renamed(annotation, self.spellings)
        kept = list(annotation.boxes)
        for place, box in enumerate(kept):
            if box.extra is not None and isinstance(box.extra.outline, Polygon):
                from datacache.annotations.shapes.clip import uncrossed  # with shapely

                outline = uncrossed(box.extra.outline)
                if outline is not None:
                    say("polygon-crossing", place, "the outline crosses itself", "it is now the areas that it fills")
                    kept[place] = box._replace(extra=box.extra._replace(outline=outline, area=None))
        again = _repeated(kept)
        for place, (first, same) in again.items():
            if same and not self._fix:
                continue  # reading has said so
            if same:
                say("box-repeated", place, f"the same object as object {first + 1}", "the first is kept")
            else:
                say("box-near-equal", place, f"nearly the box of object {first + 1}", "the first is kept")
        return annotation._replace(boxes=tuple(box for place, box in enumerate(kept) if place not in again))

    def _say_spellings(self, annotation: Annotation, file: str, problems: list[Problem]) -> None:
        """Report each other spelling once, where it is first met."""
        lines = dict.fromkeys(annotation.labels, 0) | {box.label: box.line for box in reversed(annotation.boxes)}
        for label in sorted(lines.keys() & self.spellings.keys() - self._said):
            self._said.add(label)
            total, most = self._totals[label], self.spellings[label]
            message = f"the class {quote(label)} ({count(total.boxes, 'object')}, {count(total.images, 'image')}) is "
            message += f"written {quote(most)} elsewhere ({count(self._totals[most].boxes, 'object')})"
            if self._fix:
                message += ", and is now so everywhere"
            problems.append(Problem("class-spelling", self._action, file, lines[label], message))


def renamed(annotation: Annotation, names: Mapping[str, str]) -> Annotation:
    """Return the annotation with other names of its classes; labels of the image that become equal are one."""
    boxes = tuple(box._replace(label=names.get(box.label, box.label)) for box in annotation.boxes)
    labels = tuple(dict.fromkeys(names.get(label, label) for label in annotation.labels))
    return annotation._replace(boxes=boxes, labels=labels)


def find(snapshot: Snapshot, annotations: Annotations, table: Table, predictions: Table | None) -> Iterator[Problem]:
    """Yield all problems: those that reading has found, and those of a closer look. `predictions` are of images of the
    same paths; `UsageError` at the end where none has a score."""
    listed = annotations.splits()
    yield from table.problems()
    yield from listed.problems
    mending = Mending(snapshot, table, Splits(names=listed.names, listed=listed), fix=False)
    scored = predictions is None
    for row in table.rows():
        problems: list[Problem] = []
        mending.is_left_out(row.path, problems)
        if row.annotation is not None:
            mending.mended(row.annotation, problems)
            predicted = None if predictions is None else predictions.row(row.path)
            if predicted is not None and predicted.annotation is not None:
                scored = scored or any(score_of(box) for box in predicted.annotation.boxes)
                problems += _doubtful(row.annotation, predicted.annotation)
        yield from problems
    if not scored:
        raise UsageError(
            "no image has a prediction with a score",
            hint="Predictions are objects with scores in images of the same paths.",
        )


def own_format(table: Table) -> str:
    """Return the name that `--to` has for the format of the annotations, that of a video where there are tracks.
    `UsageError` where there are none."""
    if table.meta.get("format", "none") == "none":
        raise UsageError("there are no annotations to mend", hint="dsctl convert --keep-unannotated takes such images.")
    extras = (box.extra for row in table.rows() if row.annotation for box in row.annotation.boxes if box.extra)
    format = own_target([table])
    return "cvat-video" if format == "cvat" and any(extra.track >= 0 for extra in extras) else format


def _twins(snapshot: Snapshot, table: Table, splits: Splits) -> dict[str, Twin]:
    """Return the images that are in an earlier split as well, in the order of train, val and test."""
    from datacache.conversion.contents import ImageContents  # with numpy

    groups = [[place.row for place in group] for group in ImageContents([snapshot]).groups()]
    several = {row for group in groups for row in group}
    images: dict[int, Twin] = {}
    for row, number, _ in with_entries(snapshot.manifest, table.rows()):
        if number in several and row.annotation is not None and (split := splits.of(row.annotation)):
            images[number] = Twin(split, row.path)
    found: dict[str, Twin] = {}
    for group in groups:
        alike = [images[row] for row in group if row in images]
        first = min(alike, key=lambda image: splits.names.index(image.split), default=None)
        found |= {image.path: first for image in alike if first is not None and image.split != first.split}
    return found


def _repeated(boxes: list[Box]) -> dict[int, tuple[int, bool]]:
    """Return the places of objects that are there already, each with the first one's, and whether it is the same to the
    last digit. Of objects with outlines or keypoints only such are."""
    again: dict[int, tuple[int, bool]] = {}
    if len(boxes) < 2:
        return again
    first: dict[tuple[object, ...], int] = {}
    kept: dict[tuple[str, int, int], list[tuple[int, float, float, float, float]]] = {}  # by class and cells
    for place, box in enumerate(boxes):
        before = first.setdefault(same_object(box), place)
        if before != place:
            again[place] = before, True
            continue
        if (box.extra or NOTHING)[:2] != NOTHING[:2]:
            continue
        label, x1, y1, x2, y2 = box[:5]
        across, down = (x2 - x1) * _APART, (y2 - y1) * _APART
        near, rows = place, _cells(y1, y2)
        for column in _cells(x1, x2):
            for row in rows:
                for other, ax1, ay1, ax2, ay2 in kept.get((label, column, row), ()):
                    if (
                        other < near
                        and abs(ax1 - x1) <= across
                        and abs(ay1 - y1) <= down
                        and in_common(box[1:5], (ax1, ay1, ax2, ay2)) >= NEAR
                    ):
                        near = other
        if near != place:
            again[place] = near, False
        else:
            cell = label, _cell(x1, frexp(x2 - x1)[1]), _cell(y1, frexp(y2 - y1)[1])
            kept.setdefault(cell, []).append((place, x1, y1, x2, y2))
    return again


def _cell(low: float, size: int) -> int:
    """Return the cell of a side of a box that begins at `low`, and whose length has a power of two of this size."""
    return (size << 40) + floor(ldexp(low * _CELLS, -size))


def _cells(low: float, high: float) -> list[int]:
    """Return the cells of all sides that boxes can have that have `NEAR` in common with a box that has this one."""
    side = high - low
    apart = side * _APART
    smallest, largest = frexp(side - apart)[1], frexp(side + apart)[1]
    found = [*range(_cell(low - apart, smallest), _cell(low + apart, smallest) + 1)]
    if smallest != largest:
        found += range(_cell(low - apart, largest), _cell(low + apart, largest) + 1)
    return found


def _doubtful(annotation: Annotation, predicted: Annotation) -> Iterator[Problem]:
    """Yield the objects at whose place a sure prediction has another class, and none has theirs."""
    sure = [box for box in predicted.boxes if score_of(box) >= SURE]
    for place, box in enumerate(annotation.boxes if sure else ()):
        there = [other for other in sure if in_common(box[1:5], other[1:5]) >= OVER]
        if there and all(spelled(other.label) != spelled(box.label) for other in there):
            best = max(there, key=score_of)
            message = f"{annotation.path}, object {place + 1}: labelled {quote(box.label)}, and predicted as "
            message += f"{quote(best.label)} with a score of {score_of(best):.2f}"
            yield Problem("label-doubtful", "noted", annotation.source or annotation.path, box.line, message)
