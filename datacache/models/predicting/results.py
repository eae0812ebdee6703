"""Keep the results of a model, batch by batch, as records in a log.

A record is the outcome of a batch as JSON, so that a command that was killed goes on behind it:

    [number of the batch's first image, [[image, width, height, what was found]…], [[code, path, message]…]]

Found are objects `[class, x1, y1, x2, y2, score]` in pixels of the image itself, or the likeliest classes `[class,
score]` of one that was classified. The first record has the names of the classes. One thread; no PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datacache.annotations.check import SLACK_PX, SLACK_RELATIVE
from datacache.annotations.model import Problem
from datacache.core.errors import PredictError
from datacache.core.joblog import JobLog
from datacache.models.detectors import Classified, Found

Size = tuple[int, int]
"""Height and width."""
_LIKELIEST = 5
"""Classes that are kept of an image that was classified."""
_MOST_OBJECTS = 100_000
"""Of an image. Each takes half a kilobyte in memory."""


class PredictedImage(NamedTuple):
    """The model's result for one image."""

    image: int
    """Its number in the selection."""
    own: Size
    given: Size
    """The size of the pixels that the model was given."""
    found: Found | Classified


class BatchOutcome(NamedTuple):
    """The results of one batch."""

    start: int
    """The number of its first image."""
    predicted: list[PredictedImage]
    problems: list[Problem]
    """Of images that could not be decoded: they have no result."""
    busy_s: float
    """Seconds that the model took."""


class Kept(NamedTuple):
    """The result for one image, as it is kept."""

    image: int
    width: int
    height: int
    objects: list[list[Any]] | None
    """Class, edges and score of each; None where the image was classified."""
    likeliest: list[list[Any]]
    """Class and score, the likeliest first."""


class Results:
    """The results so far, in a log."""

    def __init__(
        self, log: JobLog, images: int, batch_size: int, least_score: float, *, path: Callable[[int], str] = str
    ) -> None:
        """Read what an earlier run has left. `path` names an image in messages."""
        self._path = path
        self._log, self._batch_size, self.least_score = log, batch_size, least_score
        self.classes: tuple[str, ...] | None = None
        """None as long as no model has said them."""
        self._places = np.full(-(-images // batch_size), -1, np.int64)
        """Of the records of batches, in the log."""
        self.problems: list[Problem] = []
        self.done = 0
        """Images of batches that are done."""
        self._images = images
        for place, record in log.records():
            content = json.loads(record)
            if self.classes is None:
                self.classes = tuple(content["classes"])
            else:
                self._note(
                    content[0], place, [Problem(code, "skipped", path, 0, text) for code, path, text in content[2]]
                )

    def batches(self) -> Iterator[range]:
        """Yield the ranges of images that are not done. They begin at the same images whatever is done: in another
        batch a model may give an image other last digits."""
        for number in np.flatnonzero(self._places < 0).tolist():
            yield self._range(number)

    def begin(self, classes: Sequence[str]) -> None:
        """Note the classes of a model that is loaded. `PredictError` where they are not those of the earlier run."""
        if self.classes is None:
            self.classes = tuple(classes)
            self._log.add(json.dumps({"classes": self.classes}).encode())
        elif self.classes != tuple(classes):
            raise PredictError(
                f"the model's classes are {', '.join(classes)}, and those of the run that was interrupted were "
                f"{', '.join(self.classes)}",
                hint=f"Is it another model? To begin anew, remove {self._log.path}.",
            )

    def add(self, outcome: BatchOutcome) -> None:
        """Keep the outcome of a batch, which is done then: without objects of a lower score than is asked for, the
        others in pixels of their images. `PredictError` where an image has more than any can have."""
        found = [[each.image, each.own[1], each.own[0], self._found(each)] for each in outcome.predicted]
        problems = [[problem.code, problem.file, problem.message] for problem in outcome.problems]
        record = json.dumps([outcome.start, found, problems], separators=(",", ":")).encode()
        self._note(outcome.start, self._log.add(record), outcome.problems)

    def read(self) -> Iterator[Kept]:
        """Yield what is kept of all images, in their order."""
        for record in self._log.read(iter(self._places.tolist())):
            for image, width, height, found in json.loads(record)[1]:
                yield Kept(image, width, height, found.get("objects"), found.get("classes", []))

    def _range(self, number: int) -> range:
        start = number * self._batch_size
        return range(start, min(start + self._batch_size, self._images))

    def _note(self, start: int, place: int, problems: Iterable[Problem]) -> None:
        number = start // self._batch_size
        self._places[number] = place
        self.problems += problems
        self.done += len(self._range(number))

    def _found(self, predicted: PredictedImage) -> dict[str, list[list[Any]]]:
        found = predicted.found
        if isinstance(found, Classified):
            order = np.argsort(-found.scores, kind="stable")[:_LIKELIEST]
            scores = _shortest(found.scores[order])
            return {"classes": [list(pair) for pair in zip(order.tolist(), scores, strict=True)]}
        boxes, kept = _in_own_pixels(found.boxes, predicted.given, predicted.own)
        kept &= found.scores >= np.float32(self.least_score)
        if (count := int(kept.sum())) > _MOST_OBJECTS:
            name = self._path(predicted.image)
            raise PredictError(
                f"the model found {count:,} objects in {name}, and {_MOST_OBJECTS:,} are the most",
                images=[name],
                hint="Are these its anchors? Have it take the best of those that overlap, or ask for a higher score.",
            )
        rows = zip(found.labels[kept].tolist(), boxes[kept].tolist(), _shortest(found.scores[kept]), strict=True)
        return {"objects": [[label, *edges, score] for label, edges, score in rows]}


def _in_own_pixels(boxes: NDArray[np.float32], given: Size, own: Size) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return boxes in pixels of the image itself, inside it, and which of them have an area there."""
    scale = np.array([own[1] / given[1], own[0] / given[0]] * 2)
    sides = np.array([own[1], own[0]], float)
    moved = np.clip(boxes.astype(float).reshape(-1, 4) * scale, 0.0, np.tile(sides, 2))
    return moved, (moved[:, 2:] - moved[:, :2] > SLACK_PX + SLACK_RELATIVE * sides).all(axis=1)


def _shortest(scores: NDArray[np.float32]) -> list[float]:
    """Return scores in as few digits as tell them from all others."""
    return [float(str(score)) for score in scores.astype(np.float32)]
