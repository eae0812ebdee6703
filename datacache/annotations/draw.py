"""Boxes and their labels on a picture.

A box is a line of its class's colour between two thin dark lines, so that it is seen on any background; a difficult one
is dashed. A label stands where it covers no other label, or nowhere: the legend says what the colour means. Used by
`preview`; one thread a canvas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from datacache.annotations import fonts
from datacache.annotations.colours import RGB, ink_on
from datacache.annotations.model import Annotation, Box

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

Rectangle = tuple[int, int, int, int]
"""Left, top, right, bottom: pixels, the last ones included."""

DARK: RGB = (24, 26, 30)
BEFORE: RGB = (176, 180, 186)
"""Boxes as they were in an earlier version."""
_DASH, _GAP = 7, 5
_LONGEST = 24
_SOME, _MANY = 8, 40
"""Above the first number of boxes lines are thin; from the second on labels are left to the legend."""


def draw_boxes(
    image: Image, annotation: Annotation | None, before: Annotation | None, colours: Mapping[str, RGB], text_px: int
) -> None:
    """Draw the boxes of `before` thin and grey, then those of `annotation` in colour; then labels.

    A box that had another label in `before` shows both labels. One that is gone shows its old label.
    """
    from PIL import ImageDraw

    pen = ImageDraw.Draw(image)
    old = before.boxes if before is not None else ()
    new = annotation.boxes if annotation is not None else ()
    if before is not None:
        for box in old:
            edges = _place(box, before, image)
            _frame(pen, edges, 1, DARK)
            pen.rectangle(edges, outline=BEFORE)
    tags = _Tags(image, pen, text_px)
    if annotation is not None:
        width = 3 if image.width >= 240 and len(new) <= _SOME else 2
        largest_first = sorted(new, key=lambda box: (box.x1 - box.x2) * (box.y2 - box.y1))
        for box in largest_first:
            draw_box(pen, _place(box, annotation, image), colours[box.label], width, dashed=box.difficult)
        for n, label in enumerate(dict.fromkeys(annotation.labels)):
            tags.add(label, colours[label], [(3, 3 + n * (text_px + 8))])
        for box in reversed(largest_first) if len(new) < _MANY else ():
            tags.add_beside(_label(box, old), colours[box.label], _place(box, annotation, image))
    if before is not None and len(old) < _MANY:
        for box in old:
            if not any(_same_place(box, each) for each in new):
                tags.add_beside(box.label, BEFORE, _place(box, before, image))


def _label(box: Box, before: Sequence[Box]) -> str:
    """Return the label of a box, with the one that it had where that was another."""
    was = next((old.label for old in before if _same_place(old, box)), box.label)
    return box.label if was == box.label else f"{was} → {box.label}"


def _same_place(old: Box, new: Box) -> bool:
    return all(abs(a - b) <= 1 for a, b in zip(old[1:5], new[1:5], strict=True))


def draw_box(pen: ImageDraw, edges: Rectangle, colour: RGB, width: int, *, dashed: bool = False) -> None:
    """One box: its outermost coloured pixels are `edges`."""
    left, top, right, bottom = edges
    width = max(1, min(width, (right - left) // 2, (bottom - top) // 2))
    _frame(pen, edges, width, DARK)
    if not dashed:
        pen.rectangle(edges, outline=colour, width=width)
        return
    for start in range(left, right + 1, _DASH + _GAP):
        end = min(start + _DASH - 1, right)
        pen.rectangle((start, top, end, top + width - 1), fill=colour)
        pen.rectangle((start, bottom - width + 1, end, bottom), fill=colour)
    for start in range(top, bottom + 1, _DASH + _GAP):
        end = min(start + _DASH - 1, bottom)
        pen.rectangle((left, start, left + width - 1, end), fill=colour)
        pen.rectangle((right - width + 1, start, right, end), fill=colour)


def _frame(pen: ImageDraw, edges: Rectangle, width: int, colour: RGB) -> None:
    """What lies under a line of this width: one pixel more on either side."""
    left, top, right, bottom = edges
    grown = left - 1, top - 1, right + 1, bottom + 1
    pen.rectangle(grown, outline=colour, width=max(1, min(width + 2, (right - left) // 2 + 1, (bottom - top) // 2 + 1)))


def _place(box: Box, annotation: Annotation, image: Image) -> Rectangle:
    """Where a box lies in a picture of another size."""
    across, down = image.width / (annotation.width or 1), image.height / (annotation.height or 1)
    left, top = round(box.x1 * across), round(box.y1 * down)
    right, bottom = round(box.x2 * across) - 1, round(box.y2 * down) - 1
    return left, top, max(left + 2, right), max(top + 2, bottom)


class _Tags:
    """Labels on a picture, none above another."""

    def __init__(self, image: Image, pen: ImageDraw, text_px: int) -> None:
        self._image, self._pen, self._text_px = image, pen, text_px
        self._taken: list[Rectangle] = []

    def add_beside(self, label: str, colour: RGB, edges: Rectangle) -> None:
        """At a corner of a box: above it, below it, or within it where that does not hide it."""
        left, top, right, bottom = edges
        width, height = self._size(label)
        lefts = left - 1, right + 2 - width
        tops = [top - height - 1, bottom + 2]
        if 3 * width * height < (right - left) * (bottom - top):
            tops += [top, bottom - height + 1]
        self.add(label, colour, [(x, y) for y in tops for x in lefts])

    def add(self, label: str, colour: RGB, corners: list[tuple[int, int]]) -> None:
        """At the first of these places (left and top) where it is whole and covers no other, or not at all."""
        width, height = self._size(label)
        for x, y in corners:
            left, top = max(0, min(x, self._image.width - width)), y
            edges = left, top, left + width - 1, top + height - 1
            if abs(left - x) <= width and top >= 0 and edges[3] < self._image.height and self._free(edges):
                self._taken.append(edges)
                face, text = fonts.for_text(_shortened(label))
                self._pen.rectangle(edges, fill=colour)
                self._pen.text(
                    (left + 4, top + height - 5 - self._text_px // 6),
                    text,
                    fill=ink_on(colour),
                    font=face.at(self._text_px),
                    anchor="ls",
                )
                return

    def _size(self, label: str) -> tuple[int, int]:
        face, text = fonts.for_text(_shortened(label))
        return round(face.at(self._text_px).getlength(text)) + 8, self._text_px + 7

    def _free(self, edges: Rectangle) -> bool:
        left, top, right, bottom = edges
        return left >= 0 and not any(
            left <= other[2] and other[0] <= right and top <= other[3] and other[1] <= bottom for other in self._taken
        )


def _shortened(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
