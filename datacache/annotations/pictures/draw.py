"""Draw boxes and labels on pictures, with a colour for each class and a font for any script.

A box is a line of its class's colour between two thin dark lines, so that it is seen on any background; a difficult one
is dashed. A label stands where it covers no other label, or nowhere: the legend explains the colour. The first seven
colours are those of Okabe and Ito (2008, "Color Universal Design") without black, which colour-blind people tell apart;
more classes get the same hues lighter and darker.

Pillow's own font draws English on every machine alike. Other characters are looked for in the installed fonts, and a
name that no font can draw is written with escapes (`\\u6234`), not as empty boxes. Used by `preview` and `plot`; one
thread a canvas, the rest any thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from datacache.annotations.model import Annotation, Box
from datacache.annotations.pictures.outlines import Stroke, draw_keypoints, draw_outline
from datacache.annotations.shapes.outline import NOTHING, Skeleton

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

RGB = tuple[int, int, int]
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
    image: Image,
    annotation: Annotation | None,
    before: Annotation | None,
    colours: Mapping[str, RGB],
    text_px: int,
    *,
    skeletons: Mapping[str, Skeleton] | None = None,
) -> None:
    """Draw the boxes of `before` thin and grey, then the objects of `annotation` in colour; then labels. An object that
    has an outline is drawn by that, and not by its box. `skeletons` join the keypoints of a class.

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
        scale = image.width / (annotation.width or 1), image.height / (annotation.height or 1)
        largest_first = sorted(new, key=lambda box: (box.x1 - box.x2) * (box.y2 - box.y1))
        for box in largest_first:
            line, extra = Stroke(colours[box.label], DARK, width, box.difficult), box.extra or NOTHING
            if extra.outline is not None:
                draw_outline(image, extra.outline, scale, line)
            else:
                draw_box(pen, _place(box, annotation, image), line.colour, width, dashed=box.difficult)
            if extra.keypoints is not None:
                draw_keypoints(pen, extra.keypoints, (skeletons or {}).get(box.label), scale, line)
        for n, label in enumerate(dict.fromkeys(annotation.labels)):
            tags.add(label, colours[label], [(3, 3 + n * (text_px + 8))])
        for box in reversed(largest_first) if len(new) < _MANY else ():
            was = next((each.label for each in old if _same_place(each, box)), box.label)
            label = box.label if was == box.label else f"{was} → {box.label}"
            tags.add_beside(label, colours[box.label], _place(box, annotation, image))
    if before is not None and len(old) < _MANY:
        for box in old:
            if not any(_same_place(box, each) for each in new):
                tags.add_beside(box.label, BEFORE, _place(box, before, image))


def _same_place(old: Box, new: Box) -> bool:
    return all(abs(a - b) <= 1 for a, b in zip(old[1:5], new[1:5], strict=True))


def draw_box(pen: ImageDraw, edges: Rectangle, colour: RGB, width: int, *, dashed: bool = False) -> None:
    """Draw one box, whose outermost coloured pixels are `edges`."""
    left, top, right, bottom = edges
    width = max(1, min(width, (right - left) // 2, (bottom - top) // 2))
    _frame(pen, edges, width, DARK)
    if not dashed:
        pen.rectangle(edges, outline=colour, width=width)
        return
    inner = width - 1
    for x in range(left, right + 1, _DASH + _GAP):
        for y in (top, bottom - inner):
            pen.rectangle((x, y, min(x + _DASH - 1, right), y + inner), fill=colour)
    for y in range(top, bottom + 1, _DASH + _GAP):
        for x in (left, right - inner):
            pen.rectangle((x, y, x + inner, min(y + _DASH - 1, bottom)), fill=colour)


def _frame(pen: ImageDraw, edges: Rectangle, width: int, colour: RGB) -> None:
    """Draw what lies under a line of this width: one pixel more on either side."""
    left, top, right, bottom = edges
    grown = left - 1, top - 1, right + 1, bottom + 1
    pen.rectangle(grown, outline=colour, width=max(1, min(width + 2, (right - left) // 2 + 1, (bottom - top) // 2 + 1)))


def _place(box: Box, annotation: Annotation, image: Image) -> Rectangle:
    """Return where a box lies in a picture of another size."""
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
        """Write at a corner of a box: above it, below it, or within it where that does not hide it."""
        left, top, right, bottom = edges
        width, height = self._size(label)
        tops = [top - height - 1, bottom + 2]
        if 3 * width * height < (right - left) * (bottom - top):
            tops += [top, bottom - height + 1]
        self.add(label, colour, [(x, y) for y in tops for x in (left - 1, right + 2 - width)])

    def add(self, label: str, colour: RGB, corners: list[tuple[int, int]]) -> None:
        """Write at the first of these places (left and top) where it is whole and covers no other, or not at all."""
        width, height = self._size(label)
        for x, top in corners:
            left = max(0, min(x, self._image.width - width))
            right, bottom = left + width - 1, top + height - 1
            inside = abs(left - x) <= width and top >= 0 and bottom < self._image.height
            if inside and not any(
                left <= other[2] and other[0] <= right and top <= other[3] and other[1] <= bottom
                for other in self._taken
            ):
                self._taken.append((left, top, right, bottom))
                face, text = for_text(_shortened(label))
                self._pen.rectangle((left, top, right, bottom), fill=colour)
                at = left + 4, top + height - 5 - self._text_px // 6
                self._pen.text(at, text, fill=ink_on(colour), font=face.at(self._text_px), anchor="ls")
                return

    def _size(self, label: str) -> tuple[int, int]:
        face, text = for_text(_shortened(label))
        return round(face.at(self._text_px).getlength(text)) + 8, self._text_px + 7


def _shortened(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


BASE: tuple[RGB, ...] = (
    (230, 159, 0),  # orange
    (86, 180, 233),  # sky blue
    (0, 158, 115),  # bluish green
    (240, 228, 66),  # yellow
    (0, 114, 178),  # blue
    (213, 94, 0),  # vermilion
    (204, 121, 167),  # reddish purple
)
_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)
_RINGS = ((_WHITE, 0.0), (_WHITE, 0.55), (_BLACK, 0.45), (_WHITE, 0.28), (_BLACK, 0.25))
"""Once all colours are taken, the next classes get them mixed with this much white or black; after that all again."""


def colours_of(labels: Collection[str]) -> dict[str, RGB]:
    """Return a colour for each label. It follows from the name where the colour is free, so that a class keeps it when
    others come and go; all are different up to 35 classes."""
    found: dict[str, RGB] = {}
    taken: list[set[int]] = []
    for label in sorted(labels):
        wanted = int.from_bytes(blake2b(label.encode("utf-8", "surrogatepass"), digest_size=4).digest()) % len(BASE)
        if not taken or len(taken[-1]) == len(BASE):
            taken.append(set())
        place = next(n % len(BASE) for n in range(wanted, wanted + len(BASE)) if n % len(BASE) not in taken[-1])
        taken[-1].add(place)
        other, part = _RINGS[(len(taken) - 1) % len(_RINGS)]
        found[label] = mix(BASE[place], other, part)
    return found


def mix(colour: RGB, other: RGB, part: float) -> RGB:
    """Return a colour with a part, from 0 to 1, of another."""
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(colour, other, strict=True))
    return red, green, blue


def ink_on(colour: RGB) -> RGB:
    """Return black or white: what can be read on a colour (relative luminance of WCAG 2)."""
    red, green, blue = ((c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour)
    return _BLACK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else _WHITE


_FOLDERS = {
    "linux": ("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts"),
    "darwin": ("/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts"),
    "win32": ("C:/Windows/Fonts",),
}
_PREFERRED = ("DejaVuSans.", "NotoSans-Regular", "NotoSansCJK-Regular", "NotoSans", "wqy-", "PingFang", "msyh", "Arial")
_BLANK = ("LastResort", "AdobeBlank")
"""Fonts that draw the same box, or nothing, for every character."""
_MOST = 400
"""Fonts that are tried for one name."""


class Typeface(NamedTuple):
    """A font to draw a text with: a font file, or Pillow's own."""

    file: Path | None = None

    def at(self, size: int) -> FreeTypeFont:
        """Return the font in a size, in pixels."""
        return _font(self.file, size)

    def draws(self, text: str) -> bool:
        """Tell whether the font has every character of a text."""
        font = self.at(16)
        missing = _shape(font, "\U0010fffd")  # a private character, which fonts answer with their empty box
        return all(character.isspace() or _shape(font, character) != missing for character in set(text))


OWN = Typeface()


@cache
def _font(file: Path | None, size: int) -> FreeTypeFont:
    from PIL import ImageFont

    font = ImageFont.load_default(size) if file is None else ImageFont.truetype(file, size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def for_text(text: str) -> tuple[Typeface, str]:
    """Return the font for a text, and the text as it is to be drawn."""
    clean = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    found = _for_characters("".join(sorted(set(clean))))
    if found is not None:
        return found, clean
    return OWN, "".join(c if OWN.draws(c) else c.encode("unicode_escape").decode() for c in clean)


@cache
def _for_characters(characters: str) -> Typeface | None:
    if OWN.draws(characters):
        return OWN
    for face in map(Typeface, _files()[:_MOST]):
        with suppress(OSError):  # no font that FreeType knows
            if face.draws(characters):
                return face
    return None


@cache
def _files() -> list[Path]:
    """Return all font files, the preferred first; among the others the order is always the same."""
    folders = [Path(os.path.expanduser(folder)) for folder in _FOLDERS.get(sys.platform, _FOLDERS["linux"])]
    plotting = find_spec("matplotlib")
    if plotting is not None and plotting.origin is not None:
        folders.append(Path(plotting.origin).parent / "mpl-data" / "fonts" / "ttf")
    found = [file for folder in folders for kind in ("*.ttf", "*.ttc", "*.otf") for file in folder.rglob(kind)]

    def place(file: Path) -> tuple[int, str]:
        preferred = (n for n, name in enumerate(_PREFERRED) if file.name.startswith(name))
        return next(preferred, len(_PREFERRED)), str(file)

    return sorted((file for file in found if not file.name.startswith(_BLANK)), key=place)


def _shape(font: FreeTypeFont, character: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(character)
    return mask.size, bytes(mask)
