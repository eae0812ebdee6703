"""A grid of pictures with their boxes and labels, to see at a glance what a data set holds and what changed in it.

The same images, annotations and sizes give the same picture, down to its bytes, with the same Pillow and fonts. An
image that cannot be decoded is a tile that says so. Used by `dsctl preview` and `dsctl demo`; any thread.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

from datacache.annotations.model import Annotation
from datacache.annotations.pictures import draw as fonts
from datacache.annotations.pictures.draw import BEFORE, RGB, Rectangle, colours_of, draw_box, draw_boxes
from datacache.annotations.shapes.outline import Skeleton
from datacache.core.errors import BrokenImageError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

PAPER: RGB = (250, 250, 249)
TILE: RGB = (236, 236, 233)
INK: RGB = (34, 39, 46)
MUTED: RGB = (107, 114, 128)
BROKEN: RGB = (243, 230, 227)
_HATCH: RGB = (233, 211, 206)
_ALARM: RGB = (168, 50, 36)
_PAGE_PX, _WIDEST_TILE, _NARROWEST_TILE = 1_640, 400, 140
_MARGIN, _SPACE, _CAPTION, _HEADING, _LEGEND_LINE = 24, 16, 42, 64, 28


class Picture(NamedTuple):
    """One tile."""

    title: str
    data: bytes | None
    """The image's file; None where there is none."""
    annotation: Annotation | None = None
    before: Annotation | None = None
    """As it was: drawn thin and grey, below the boxes of today."""
    note: str = ""
    """A word on it: `added`, `boxes changed`; or what is wrong with it."""


def preview(
    pictures: Sequence[Picture],
    *,
    title: str = "",
    subtitle: str = "",
    colours: Mapping[str, RGB] | None = None,
    columns: int | None = None,
    tile: tuple[int, int] | None = None,
    before: str = "before",
    skeletons: Mapping[str, Skeleton] | None = None,
) -> bytes:
    """Draw the grid; return the bytes of a PNG.

    `colours` are those of the classes (default: `colours_of` the labels in the pictures; give those of all labels of a
    data set, so that all its previews have the same). `tile` is the size of an image's place in pixels; default: as
    large as a page of 1,640 pixels allows, in the shape that most images have. `before` is what the legend calls the
    boxes of `Picture.before`. `skeletons` join the keypoints of a class.
    """
    from PIL import Image, ImageDraw

    columns = columns or max(1, ceil(sqrt(len(pictures))))
    if tile is None:
        wide = max(_NARROWEST_TILE, min(_WIDEST_TILE, _PAGE_PX // columns))
        known = [p.annotation or p.before for p in pictures]
        shapes = [each.height / each.width for each in known if each is not None and each.width]
        tile = wide, round(wide * min(1.4, max(0.56, median(shapes) if shapes else 0.75)))
    labels = _labels(pictures)
    colours = colours_of(labels.keys()) | dict(colours or {})
    width = max(2 * _MARGIN + columns * (tile[0] + _SPACE) - _SPACE, 2 * _MARGIN + 360)
    top = _MARGIN + (_HEADING if title else 0)
    step = tile[0] + _SPACE, tile[1] + _CAPTION + _SPACE
    bottom = top + ceil(len(pictures) / columns) * step[1]
    legend = _legend(pictures, labels, colours, before, width - 2 * _MARGIN)
    lines = legend[-1].line + 1 if legend else 0
    page = Image.new("RGB", (width, bottom + lines * _LEGEND_LINE + _MARGIN), PAPER)
    pen = ImageDraw.Draw(page)
    if title:
        _write(pen, (_MARGIN, _MARGIN + 22), title, size=24, colour=INK, width=width - 2 * _MARGIN)
        _write(pen, (_MARGIN, _MARGIN + 46), subtitle, size=15, colour=MUTED, width=width - 2 * _MARGIN)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        left, above = _MARGIN + column * step[0], top + row * step[1]
        _draw_tile(page, picture, (left, above, left + tile[0] - 1, above + tile[1] - 1), colours, skeletons)
    for item in legend:
        left, y = _MARGIN + item.x, bottom + item.line * _LEGEND_LINE + 4
        edges = left, y, left + 17, y + 14
        if item.looks == "filled":
            pen.rectangle(edges, fill=item.colour)
        else:
            draw_box(pen, edges, item.colour, 2 if item.looks == "dashed" else 1, dashed=item.looks == "dashed")
        _write(pen, (left + 26, y + 13), item.text, size=14, colour=INK, width=_PAGE_PX)
    out = io.BytesIO()
    page.save(out, "PNG")
    return out.getvalue()


def _draw_tile(
    page: Image,
    picture: Picture,
    area: Rectangle,
    colours: Mapping[str, RGB],
    skeletons: Mapping[str, Skeleton] | None,
) -> None:
    from PIL import ImageDraw

    pen = ImageDraw.Draw(page)
    left, top, right, bottom = area
    width, height = right - left + 1, bottom - top + 1
    reason = picture.note or "there is no image"
    try:
        image = None if picture.data is None else thumbnail(picture.data, width, height)
    except BrokenImageError as exc:
        image, reason = None, picture.note or exc.message
    if image is None:
        _draw_broken(pen, area, reason)
    else:
        pen.rectangle(area, fill=TILE)
        draw_boxes(image, picture.annotation, picture.before, colours, 14 if width >= 300 else 11, skeletons=skeletons)
        page.paste(image, (left + (width - image.width) // 2, top + (height - image.height) // 2))
    known = picture.annotation or picture.before
    boxes = known.boxes if known else ()
    plain = not any(box.extra and (box.extra.outline or box.extra.keypoints) for box in boxes)
    what = ("box" if plain else "object") if len(boxes) == 1 else ("boxes" if plain else "objects")
    facts = [f"{known.width}x{known.height}", f"{len(boxes):,} {what}"] if known else []
    if picture.note and image is not None:
        facts.append(picture.note)
    name = picture.title.rpartition("/")[2]
    _write(pen, (left, top + height + 17), name, size=14, colour=INK, width=width)
    _write(pen, (left, top + height + 34), ",  ".join(facts), size=12, colour=MUTED, width=width)


def _draw_broken(pen: ImageDraw, area: Rectangle, reason: str) -> None:
    """Draw a hatched tile with the reason on it."""
    left, top, right, bottom = area
    pen.rectangle(area, fill=BROKEN)
    height = bottom - top
    for start in range(left - height, right, 14):
        # From the lower left upwards, cut at the tile's left and right sides.
        x1, x2 = max(left, start), min(right, start + height)
        if x1 < x2:
            pen.line((x1, bottom - (x1 - start), x2, bottom - (x2 - start)), fill=_HATCH, width=2)
    middle, text_px = (top + bottom) // 2, 16 if right - left >= 240 else 13
    width = right - left - 24
    lines = _wrapped(reason, 12, width, 3)
    plate = width + 16, 34 + 17 * len(lines)
    x, y = left + 4, middle - plate[1] // 2
    pen.rectangle((x, y, x + plate[0], y + plate[1]), fill=BROKEN)
    _write(pen, (left + 12, y + 22), "cannot be shown", size=text_px, colour=_ALARM, width=width)
    for n, line in enumerate(lines):
        _write(pen, (left + 12, y + 42 + 17 * n), line, size=12, colour=INK, width=width)


class _Item(NamedTuple):
    """The legend's entries, and its place."""

    text: str
    colour: RGB
    looks: Literal["filled", "dashed", "thin"]
    line: int = 0
    x: int = 0


def _legend(
    pictures: Sequence[Picture], labels: Counter[str], colours: Mapping[str, RGB], before: str, width: int
) -> list[_Item]:
    """Say what the colours mean, and how many boxes there are in the pictures, in lines that fit into a width."""
    items = [
        _Item(f"{label}  {boxes:,}" if boxes else label, colours[label], "filled")
        for label, boxes in sorted(labels.items(), key=lambda item: (-item[1], item[0]))
    ]
    if any(box.difficult for picture in pictures if picture.annotation for box in picture.annotation.boxes):
        items.append(_Item("difficult", MUTED, "dashed"))
    if any(picture.before is not None for picture in pictures):
        items.append(_Item(before, BEFORE, "thin"))
    line = x = 0
    placed = []
    for item in items:
        face, drawable = fonts.for_text(item.text)
        needs = 26 + round(face.at(14).getlength(drawable)) + 24
        if x and x + needs > width:
            line, x = line + 1, 0
        placed.append(item._replace(line=line, x=x))
        x += needs
    return placed


def _labels(pictures: Sequence[Picture]) -> Counter[str]:
    """Count the boxes of each label in the pictures."""
    found: Counter[str] = Counter()
    for annotation in (picture.annotation for picture in pictures if picture.annotation is not None):
        found.update(box.label for box in annotation.boxes)
        found.update(dict.fromkeys(annotation.labels, 0))
    return found


def _write(pen: ImageDraw, at: tuple[int, int], text: str, *, size: int, colour: RGB, width: int) -> None:
    """Write a text whose baseline begins here, shortened in its middle to fit a width."""
    face, drawable = fonts.for_text(text)
    font = face.at(size)
    if font.getlength(drawable) > width:
        dots = "…" if face.draws("…") else "..."
        kept = len(drawable)
        while kept > 2 and font.getlength(drawable) > width:
            kept -= 1
            whole = fonts.for_text(text)[1]
            drawable = whole[: kept - kept // 2] + dots + whole[len(whole) - kept // 2 :]
    pen.text(at, drawable, fill=colour, font=font, anchor="ls")


def _wrapped(text: str, size: int, width: int, most: int) -> list[str]:
    """Break a text into at most so many lines."""
    lines: list[str] = []
    for word in text.split():
        face, drawable = fonts.for_text(f"{lines[-1]} {word}" if lines else word)
        if lines and face.at(size).getlength(drawable) <= width:
            lines[-1] = drawable
        else:
            lines.append(word)
    return lines if len(lines) <= most else [*lines[: most - 1], f"{lines[most - 1]} …"]


_ORIENTATION = 0x0112
_LARGEST_SCALE = 4
"""An image is not enlarged beyond this."""
_PAPER = (255, 255, 255)
"""The colour behind transparent pixels."""


def thumbnail(data: bytes, width: int, height: int) -> Image:
    """Return the image in at most this size, its aspect kept, its EXIF orientation applied.

    A JPEG is decoded in an eighth, a quarter or half of its size where that is enough. `BrokenImageError` for whatever
    cannot be decoded."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data)) as image:
            turned = image.getexif().get(_ORIENTATION, 1) >= 5
            image.draft("RGB", (2 * height, 2 * width) if turned else (2 * width, 2 * height))
            upright = _as_rgb(ImageOps.exif_transpose(image))
    except Exception as exc:  # Pillow's plugins raise all kinds of errors for damaged files
        raise BrokenImageError(str(exc) or type(exc).__name__) from exc
    scale = min(width / upright.width, height / upright.height, _LARGEST_SCALE)
    size = max(1, round(upright.width * scale)), max(1, round(upright.height * scale))
    how = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC
    return upright.resize(size, how, reducing_gap=3.0)


def _as_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith(("I", "F")):  # 16 bits and more: the darkest pixel black, the brightest white
        values = image.convert("F")
        low, high = values.getextrema()
        assert isinstance(low, float)
        assert isinstance(high, float)
        scale = 255 / (high - low) if high > low else 0
        return values.point(lambda value: value * scale - low * scale).convert("L").convert("RGB")
    if image.mode in ("LA", "PA", "RGBA", "RGBa", "La") or "transparency" in image.info:
        above = image.convert("RGBA")
        paper = Image.new("RGBA", above.size, _PAPER)
        return Image.alpha_composite(paper, above).convert("RGB")
    return image.convert("RGB")
