"""Recognise what models return, image by image, and check it.

Used by `detectors`. The forms are those of torchvision's detection models (dicts of boxes, labels and scores), of
Ultralytics (`Results`, and the one array that its exports return), tuples of boxes, labels and scores, and arrays of
class scores. A form is told by its types and shapes, and each image is looked at alone: the answer does not depend on
how images are put into batches. Arrays may be those of any library that numpy can read, and PyTorch's. Pure functions;
any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datacache.core.counters import count as counted
from datacache.core.errors import UsageError

BACKGROUND: Final = ("__background__", "background")
LEAST_SCORE: Final = 0.01
"""Boxes of Ultralytics' models with a lower score are not looked at."""
_SAME_OBJECT: Final = 0.7
_MOST: Final = 300
_LOOKED_AT: Final = 1000
"""Overlap, boxes that stay and boxes that are looked at: what Ultralytics has for the first two when it validates."""
_FORMS: Final = (
    "for each image a dict or tuple of boxes (n x 4), labels (n) and scores (n), an Ultralytics Results, or scores of "
    "all classes; or one array for the batch: images x classes, or images x (4 + classes) x n as YOLO's exports have it"
)


class Found(NamedTuple):
    """The objects found in one image."""

    boxes: NDArray[np.float32]
    """n x 4: x1, y1, x2, y2 in pixels of the image as the detector was given it."""
    labels: NDArray[np.int64]
    """n: positions in the detector's classes."""
    scores: NDArray[np.float32]
    """n: from 0 to 1."""


class Classified(NamedTuple):
    """How likely each class is for one image."""

    scores: NDArray[np.float32]
    """As many as there are classes; they add up to 1."""


class Numbering:
    """The classes of a detector, and which of them a model's own number means. The background is none of them, and of
    classes with one name the first one stands for all."""

    def __init__(self, names: Sequence[str]) -> None:
        self.classes = tuple(dict.fromkeys(name for name in names if name not in BACKGROUND))
        positions = {name: at for at, name in enumerate(self.classes)}
        self.of = np.array([positions.get(name, -1) for name in names], np.int64)
        """For each number of the model's, the position in `classes`; -1 for the background."""


def per_image(output: Any, count: int) -> list[Any]:
    """Return the part of a model's output that speaks of each image of a batch, for `checked`."""
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], dict) and isinstance(output[1], list):
        output = output[1]  # scripted models of torchvision: losses, and what was found
    if isinstance(output, Mapping):
        output = _fields(output)
    if isinstance(output, tuple) and len(output) == 3 and all(map(_is_array, output)):
        boxes, labels, scores = map(as_array, output)
        if boxes.ndim == 2:
            output = [(boxes, labels, scores)]
        elif boxes.ndim == 3 and len(boxes) == len(labels) == len(scores):
            output = list(zip(boxes, labels, scores, strict=True))
    elif _is_array(output):
        array = as_array(output)
        output = [array] if array.ndim == 1 else list(array)
    if isinstance(output, list | tuple) and len(output) == count:
        return list(output)
    many = f" of {len(output)}" if hasattr(output, "__len__") else ""
    raise UsageError(
        f"the model returned a {type(output).__name__}{many} for {counted(count, 'image')}",
        hint=f"Expected: {_FORMS}.",
    )


def checked(part: Any, shape: Sequence[int], numbering: Numbering) -> Found | Classified:
    """Return what a model said of an image of this height and width, as it is meant.

    Boxes are clipped to the image, and go where no area is left on one of its edges. `UsageError` for arrays of other
    shapes, values that are no numbers, scores outside 0 to 1, labels that are no class, and boxes that cannot be of it.
    """
    boxes, labels, scores = (None if each is None else as_array(each) for each in _told(part, len(numbering.of)))
    assert scores is not None
    _expect_numbers("scores", scores)
    if boxes is None or labels is None:
        return _classified(scores, numbering)
    if boxes.shape != (len(boxes), 4) and boxes.size:
        raise UsageError(f"the model returned boxes of shape {boxes.shape}, expected (n, 4): x1, y1, x2, y2 in pixels")
    _expect_numbers("boxes with edges", boxes)
    boxes = boxes.reshape(-1, 4).astype(np.float32)
    if labels.shape != (len(boxes),) or scores.shape != (len(boxes),):
        text = f"the model returned {len(boxes)} boxes with labels of shape {labels.shape} and scores of {scores.shape}"
        raise UsageError(text, hint="Expected: one label and one score for each box.")
    _expect_numbers("labels", labels, whole=True)
    labels, scores = labels.astype(np.int64), scores.astype(np.float32)
    if len(scores) and (scores.min() < 0 or scores.max() > 1):
        raise UsageError(f"the model returned scores from {scores.min():g} to {scores.max():g}, expected 0 to 1")
    if len(labels) and (labels.min() < 0 or labels.max() >= len(numbering.of)):
        raise UsageError(
            f"the model returned labels from {labels.min()} to {labels.max()}, expected 0 to {len(numbering.of) - 1}: "
            f"it has {counted(len(numbering.of), 'class', 'classes')}",
            hint=f"Name all of its classes in their order. Where 0 is the background, begin with {BACKGROUND[0]}.",
        )
    _expect_inside(boxes, shape)
    boxes = np.clip(boxes, 0, np.array([shape[1], shape[0]] * 2, np.float32))
    labels = numbering.of[labels]
    kept = (labels >= 0) & (boxes[:, 0] < boxes[:, 2]) & (boxes[:, 1] < boxes[:, 3])
    return Found(boxes[kept], labels[kept], scores[kept])


def as_array(values: Any) -> NDArray[Any]:
    """Return an array or a tensor of any device as one of numpy's."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # which NumPy has not
            values = values.float()
    return np.asarray(values)


def _expect_numbers(what: str, values: NDArray[Any], *, whole: bool = False) -> None:
    """Raise for texts, objects and complex numbers, for what is infinite or not a number, and for fractions where
    `whole` numbers are meant: casts take all of these for some other number."""
    if values.dtype.kind not in "biuf" or not np.isfinite(values).all():
        raise UsageError(f"the model returned {what} that are no finite numbers")
    if whole and values.dtype.kind == "f" and (values != np.floor(values)).any():
        hint = "Are these scores? A label is the position of a class."
        raise UsageError(f"the model returned {what} that are no whole numbers", hint=hint)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _fields(values: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    try:
        return values["boxes"], values["labels"], values["scores"]
    except KeyError as exc:
        text = f"the model returned a dict of {', '.join(map(str, values))}, without {exc.args[0]}"
        raise UsageError(text, hint=f"Expected: {_FORMS}.") from exc


def _told(part: Any, classes: int) -> tuple[Any, Any, Any]:
    """Return boxes, labels and scores of one image; the first two are None where it was classified."""
    if isinstance(part, Classified):
        return None, None, part.scores
    if isinstance(part, Mapping):
        return _fields(part)
    if _is_array(part):
        array = as_array(part)
        return _from_yolo(array, classes) if array.ndim == 2 else (None, None, array)
    if isinstance(part, list | tuple) and len(part) == 3:
        return part[0], part[1], part[2]
    if getattr(part, "boxes", None) is not None:  # Ultralytics' Results
        return part.boxes.xyxy, part.boxes.cls, part.boxes.conf
    if getattr(part, "probs", None) is not None:
        return None, None, part.probs.data
    raise UsageError(f"the model returned a {type(part).__name__} for an image", hint=f"Expected: {_FORMS}.")


def _classified(scores: NDArray[Any], numbering: Numbering) -> Classified:
    """Return scores by class. Those that do not add up to 1, or are below 0, are taken for logits."""
    if scores.shape != numbering.of.shape:
        text = f"the model returned class scores of shape {scores.shape}, expected ({len(numbering.of)},)"
        raise UsageError(text, hint=f"It has {len(numbering.of)} classes: name all of them in their order.")
    scores = scores.astype(np.float64)
    if scores.min() < 0 or abs(scores.sum() - 1) > 1e-2:
        scores = np.exp(scores - scores.max())
        scores /= scores.sum()
    by_class = np.zeros(len(numbering.classes))
    np.add.at(by_class, numbering.of[numbering.of >= 0], scores[numbering.of >= 0])
    return Classified(by_class.astype(np.float32))


def _expect_inside(boxes: NDArray[np.float32], shape: Sequence[int]) -> None:
    """Raise for boxes with edges in another order, and for those further outside than the image is large, which are in
    other pixels."""
    sides = np.array([shape[1], shape[0]], np.float32)
    wrong = (boxes[:, 2:] < boxes[:, :2]) | (boxes[:, :2] < -sides) | (boxes[:, 2:] > 2 * sides)
    if wrong.any():
        edges = ", ".join(f"{edge:g}" for edge in boxes[wrong.any(axis=1)][0])
        text = f"the model returned the box {edges} for an image of {shape[1]}x{shape[0]}"
        raise UsageError(text, hint="Expected: x1, y1, x2, y2 in pixels of the image that the model was given.")


def _from_yolo(array: NDArray[Any], classes: int) -> tuple[Any, Any, Any]:
    """Return the objects in what an export of Ultralytics says of an image: (4 + classes) x n with centres and sizes,
    of which the best of those that overlap are taken; or n x 6 with edges, score and class, which are distinct."""
    if array.shape[1] == 6:
        return array[:, :4], array[:, 5], array[:, 4]
    if len(array) != 4 + classes:
        text = f"the model returned {array.shape[0]} x {array.shape[1]} values for an image, expected {4 + classes} x n"
        raise UsageError(text, hint=f"It has {classes} classes: name all of them in their order.")
    best = array[4:].max(axis=0)
    order = np.argsort(-best, kind="stable")[:_LOOKED_AT]
    order = order[best[order] >= LEAST_SCORE]
    centres, sizes = array[:2, order].T, array[2:4, order].T
    boxes = np.concatenate((centres - sizes / 2, centres + sizes / 2), axis=1)
    labels = array[4:, order].argmax(axis=0)
    kept = distinct(boxes, labels)
    return boxes[kept], labels[kept], best[order][kept]


def distinct(boxes: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of the boxes, which have falling scores, without those that are another view of a better one
    of their class (non-maximum suppression)."""
    sides = (boxes[:, 2:] - boxes[:, :2]).clip(min=0)
    areas = sides.prod(axis=1)
    left = np.arange(len(boxes))
    kept: list[int] = []
    while len(left) and len(kept) < _MOST:
        at, left = left[0], left[1:]
        kept.append(int(at))
        inner = np.minimum(boxes[at, 2:], boxes[left, 2:]) - np.maximum(boxes[at, :2], boxes[left, :2])
        shared = inner.clip(min=0).prod(axis=1)
        overlaps = shared / np.maximum(areas[at] + areas[left] - shared, 1e-12)
        left = left[(overlaps <= _SAME_OBJECT) | (labels[left] != labels[at])]
    return np.array(kept, np.int64)
