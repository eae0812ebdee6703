"""What image operations do to coordinates: the steps for one image, and the same steps for its boxes. Knows no pixel.

`image_ops` does these steps to the pixels. Coordinates are as in `annotations.model`: pixel edges of the displayed
image. A box's corners are moved in floating point, and the new box is what bounds them, cut at the image's edges. Pure
functions, any thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from datacache.annotations.model import Annotation, Box, Problem
from datacache.conversion.operations import MAX_PIXELS, Crop, Operations
from datacache.core.errors import AnnotationError

_SLIVER = 1e-3
"""A crop that leaves less than so many pixels of a box's side has left nothing of it: crops are whole pixels, and such
a rest is rounding in the annotation."""


class Cut(NamedTuple):
    """Keep a window."""

    left: int
    top: int
    width: int
    height: int

    def move(self, x: float, y: float) -> tuple[float, float]:
        """Where a point goes."""
        return x - self.left, y - self.top


class Turn(NamedTuple):
    """Turn by right angles, counter-clockwise: no pixel changes."""

    quarters: int
    width: int
    height: int
    """Of the result, as in every step."""

    def move(self, x: float, y: float) -> tuple[float, float]:
        """Where a point goes."""
        if self.quarters == 1:
            return y, self.height - x
        if self.quarters == 2:
            return self.width - x, self.height - y
        return self.width - y, x


class Rotation(NamedTuple):
    """Turn about the middle by any angle, onto an image that holds all of it."""

    cosine: float
    sine: float
    from_width: int
    from_height: int
    width: int
    height: int

    def move(self, x: float, y: float) -> tuple[float, float]:
        """Where a point goes."""
        x, y = x - self.from_width / 2, y - self.from_height / 2
        return (
            self.cosine * x + self.sine * y + self.width / 2,
            self.cosine * y - self.sine * x + self.height / 2,
        )

    def inverse(self) -> tuple[float, float, float, float, float, float]:
        """`a … f` with x = a x' + b y' + c and y = d x' + e y' + f: where a point of the result comes from."""
        cosine, sine = self.cosine, self.sine
        return (
            cosine, -sine, self.from_width / 2 - cosine * self.width / 2 + sine * self.height / 2,
            sine, cosine, self.from_height / 2 - sine * self.width / 2 - cosine * self.height / 2,
        )  # fmt: skip


class Mirror(NamedTuple):
    """Flip."""

    axis: str
    width: int
    height: int

    def move(self, x: float, y: float) -> tuple[float, float]:
        """Where a point goes."""
        return (self.width - x, y) if self.axis == "h" else (x, self.height - y)


class Scale(NamedTuple):
    """Resize to `inner_width` by `inner_height`, which lie at `left`, `top` of a result filled with grey."""

    from_width: int
    from_height: int
    inner_width: int
    inner_height: int
    left: int
    top: int
    width: int
    height: int

    def move(self, x: float, y: float) -> tuple[float, float]:
        """Where a point goes."""
        return (
            x * self.inner_width / self.from_width + self.left,
            y * self.inner_height / self.from_height + self.top,
        )


Step = Cut | Turn | Rotation | Mirror | Scale


def plan(ops: Operations, width: int, height: int, path: str) -> tuple[list[Step], list[Problem]]:
    """The steps for an image of this size. `AnnotationError` if the crop misses it or the result were too large."""
    steps: list[Step] = []
    problems: list[Problem] = []
    if ops.crop:
        cut, problem = _cut(ops.crop, width, height, path)
        steps.append(cut)
        problems += problem
    if ops.rotate:
        steps.append(_turn(ops.rotate, *_size(steps, width, height)))
    if ops.flip:
        steps.append(Mirror(ops.flip, *_size(steps, width, height)))
    if ops.resize:
        steps.append(_scale(ops.resize, ops.letterbox, *_size(steps, width, height)))
    for step in steps:
        if step.width * step.height > MAX_PIXELS:
            raise AnnotationError(
                f"{path}: the result would have {step.width} x {step.height} pixels, more than {MAX_PIXELS:,}",
                code="image-too-large",
                file=path,
            )
    return steps, problems


def carry(annotation: Annotation, steps: Sequence[Step], min_visible: float) -> tuple[Annotation, list[Problem]]:
    """The annotation after the steps; its path stays. Boxes that a crop leaves too little of are problems, and those it
    cuts are marked truncated."""
    problems: list[Problem] = []
    boxes = []
    for box in annotation.boxes:
        moved, kept = _carry_box(box, steps)
        if moved is not None and kept >= min_visible:
            boxes.append(moved)
            continue
        left = "has nothing in the crop" if moved is None else f"has {kept:.1%} of its area in the crop"
        limit = f", less than {min_visible:.1%}" if moved is not None else ""
        problems.append(
            Problem(
                "box-cropped-away",
                "skipped",
                annotation.source or annotation.path,
                box.line,
                f"the box {box.label!r} {left}{limit}: it was left out",
            )
        )
    width, height = _size(steps, annotation.width, annotation.height)
    return annotation._replace(width=width, height=height, boxes=tuple(boxes)), problems


def _carry_box(box: Box, steps: Sequence[Step]) -> tuple[Box | None, float]:
    """The box after the steps, None where nothing is left, and the share of its area that a crop left."""
    x1, y1, x2, y2 = box.x1, box.y1, box.x2, box.y2
    kept = 1.0
    for step in steps:
        corners = [step.move(x, y) for x in (x1, x2) for y in (y1, y2)]
        before = (x2 - x1) * (y2 - y1)
        x1 = max(min(x for x, _ in corners), 0.0)
        y1 = max(min(y for _, y in corners), 0.0)
        x2 = min(max(x for x, _ in corners), float(step.width))
        y2 = min(max(y for _, y in corners), float(step.height))
        if isinstance(step, Cut):
            if x2 - x1 < min(_SLIVER, (box.x2 - box.x1) / 2) or y2 - y1 < min(_SLIVER, (box.y2 - box.y1) / 2):
                return None, 0.0
            kept = (x2 - x1) * (y2 - y1) / before
        if not (x1 < x2 and y1 < y2):  # smaller than a number can say
            return None, 0.0
    truncated = box.truncated or kept < 1 - 1e-9
    return box._replace(x1=x1, y1=y1, x2=x2, y2=y2, truncated=truncated), min(kept, 1.0)


def _size(steps: Sequence[Step], width: int, height: int) -> tuple[int, int]:
    return (steps[-1].width, steps[-1].height) if steps else (width, height)


def _cut(crop: Crop, width: int, height: int, path: str) -> tuple[Cut, list[Problem]]:
    left, top, right, bottom = crop.window(width, height)
    inside = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
    cut = Cut(inside[0], inside[1], inside[2] - inside[0], inside[3] - inside[1])
    if cut.width < 1 or cut.height < 1:
        message = f"{path}: the crop {crop} has no pixel of this {width} x {height} image"
        raise AnnotationError(message, code="crop-outside", file=path)
    if inside == (left, top, right, bottom):
        return cut, []
    message = (
        f"the crop {crop} reaches beyond this {width} x {height} image: {cut.width} x {cut.height} pixels are left"
    )
    return cut, [Problem("crop-outside", "noted", path, 0, message)]


def _turn(degrees: float, width: int, height: int) -> Turn | Rotation:
    if degrees % 90 == 0:
        quarters = int(degrees // 90) % 4
        return Turn(quarters, *((height, width) if quarters % 2 else (width, height)))
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    wide = abs(width * cosine) + abs(height * sine)
    high = abs(width * sine) + abs(height * cosine)
    # What is over a whole number by rounding alone needs no further pixel.
    return Rotation(cosine, sine, width, height, math.ceil(wide - 1e-9), math.ceil(high - 1e-9))


def _scale(size: tuple[int, int], letterbox: bool, from_width: int, from_height: int) -> Scale:
    width, height = size
    if not letterbox:
        return Scale(from_width, from_height, width, height, 0, 0, width, height)
    # As Ultralytics' LetterBox does it, so that what was trained on these images sees the same at inference.
    ratio = min(width / from_width, height / from_height)
    inner_width, inner_height = max(round(from_width * ratio), 1), max(round(from_height * ratio), 1)
    left, top = round((width - inner_width) / 2 - 0.1), round((height - inner_height) / 2 - 0.1)
    return Scale(from_width, from_height, inner_width, inner_height, left, top, width, height)
