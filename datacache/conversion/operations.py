"""What can be done to every image of a conversion, and how a command line says it. Pure values, any thread.

The operations are always done in one order: **crop, rotate, flip, resize**. A crop is given in the pixels of the image
that its author looked at, so it comes first. The size is what training is set up for, so it comes last and holds,
whatever came before; and turning at full resolution loses least.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from datacache.core.errors import UsageError

MAX_PIXELS = 178_956_970
"""The largest image that is taken or made, where Pillow also draws the line: 512 MiB in RGB. A small file can claim any
size, and a thin strip that is turned covers a large square."""
MAX_SIDE = 65_500
"""The longest side a JPEG can have (libjpeg's `JPEG_MAX_DIMENSION`)."""
_FLIPS = ("h", "v")


class Length(NamedTuple):
    """Pixels, or percent of a side."""

    value: float
    percent: bool

    def of(self, side: int) -> float:
        """In pixels."""
        return side * self.value / 100 if self.percent else self.value

    def __str__(self) -> str:
        return f"{str(self.value).removesuffix('.0')}{'%' * self.percent}"


class Crop(NamedTuple):
    """A part of the image: `width` by `height` at `x`, `y`, or in the middle where these are None."""

    x: Length | None
    y: Length | None
    width: Length
    height: Length

    def window(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom in whole pixels, which may lie outside of an image of this size."""
        left, right = _span(self.x, self.width, width)
        top, bottom = _span(self.y, self.height, height)
        return left, top, right, bottom

    def __str__(self) -> str:
        if self.x is None or self.y is None:
            return f"center:{self.width}x{self.height}"
        return f"{self.x},{self.y},{self.width},{self.height}"


@dataclass(frozen=True, kw_only=True)
class Operations:
    """What is done to every image. False where nothing is; `quality` and `min_visible` alone do nothing."""

    crop: Crop | None = None
    rotate: float = 0.0
    """Degrees counter-clockwise, 0 ≤ rotate < 360. The image grows so that all of it is still there."""
    flip: str = ""
    """`h`: left and right change places; `v`: top and bottom do."""
    resize: tuple[int, int] | None = None
    """Width and height."""
    letterbox: bool = False
    """Whether a resize keeps the aspect and fills up with grey."""
    quality: int = 95
    """Of the JPEGs that are written, 1 to 100."""
    min_visible: float = 0.0
    """The share of a box's area that a crop must leave for the box to be kept; 0: any."""

    def __bool__(self) -> bool:
        return bool(self.crop or self.rotate or self.flip or self.resize)

    def as_json(self) -> dict[str, Any]:
        """For a snapshot's lineage: what was asked for, and nothing where nothing is done."""
        if not self:
            return {}
        value: dict[str, Any] = {"quality": self.quality}
        if self.crop:
            value |= {"crop": str(self.crop), "min_visible": self.min_visible}
        if self.rotate:
            value["rotate"] = self.rotate
        if self.flip:
            value["flip"] = self.flip
        if self.resize:
            value |= {"resize": f"{self.resize[0]}x{self.resize[1]}", "letterbox": self.letterbox}
        return value


def parse_operations(
    *,
    crop: str | None = None,
    rotate: str | float | None = None,
    flip: str | None = None,
    resize: str | None = None,
    letterbox: bool = False,
    quality: int = 95,
    min_visible: float = 0.0,
) -> Operations:
    """The operations of a command line. `UsageError` names the option that makes no sense.

    `crop`: `X,Y,WIDTH,HEIGHT` or `center:WIDTHxHEIGHT`, each in pixels or percent (`10%`). `rotate`: degrees, any
    number. `flip`: `h` or `v`. `resize`: `WIDTHxHEIGHT`.
    """
    if letterbox and not resize:
        raise UsageError("--letterbox says how to resize, and --resize is not given", hint="Add --resize 640x640.")
    if flip and flip not in _FLIPS:
        raise UsageError(f"--flip: {flip!r} is neither h nor v")
    if not 1 <= quality <= 100:
        raise UsageError(f"--quality: {quality} is not between 1 and 100")
    if not 0 <= min_visible <= 1:  # also refuses nan
        raise UsageError(f"--min-visible: {min_visible} is not between 0 and 1")
    return Operations(
        crop=_parse_crop(crop) if crop else None,
        rotate=_parse_angle(rotate) if rotate else 0.0,
        flip=flip or "",
        resize=_parse_size(resize) if resize else None,
        letterbox=letterbox,
        quality=quality,
        min_visible=min_visible,
    )


# --- parsing -------------------------------------------------------------------------------------------------------

_SIZE = re.compile(r"(\d{1,9})[xX×](\d{1,9})")
_LENGTH = r"\s*(\d{1,9}(?:\.\d{1,9})?%|\d{1,9})\s*"
_CROP_AT = re.compile(",".join([_LENGTH] * 4))
_CROP_CENTER = re.compile(rf"cent(?:er|re):{_LENGTH}[xX×]{_LENGTH}")


def _parse_size(text: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(text.strip())
    width, height = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE) or width * height > MAX_PIXELS:
        raise UsageError(f"--resize: {text!r} is no size", hint="Write WIDTHxHEIGHT in pixels, such as 640x480.")
    return width, height


def _parse_crop(text: str) -> Crop:
    at, center = _CROP_AT.fullmatch(text.strip()), _CROP_CENTER.fullmatch(text.strip())
    if at:
        crop = Crop(*(_parse_length(part) for part in at.groups()))
    elif center:
        crop = Crop(None, None, *(_parse_length(part) for part in center.groups()))
    else:
        crop = None
    if crop is None or not crop.width.value or not crop.height.value:
        raise UsageError(
            f"--crop: {text!r} is no part of an image",
            hint="Write X,Y,WIDTH,HEIGHT or center:WIDTHxHEIGHT, in pixels or percent: center:80%x80%.",
        )
    return crop


def _parse_length(text: str) -> Length:
    return Length(float(text.removesuffix("%")), text.endswith("%"))


def _parse_angle(value: str | float) -> float:
    try:
        degrees = float(value)
    except ValueError:
        degrees = math.nan
    if not math.isfinite(degrees):
        raise UsageError(f"--rotate: {value!r} is no angle", hint="Write degrees, counter-clockwise: --rotate 15")
    degrees %= 360
    return 0.0 if degrees == 360 else degrees  # a tiny negative angle, rounded


def _span(start: Length | None, length: Length, side: int) -> tuple[int, int]:
    """First and last edge, in whole pixels. A part that is given in percent has at least one pixel."""
    if start is None:
        size = max(round(length.of(side)), 1)
        first = (side - size) // 2
        return first, first + size
    first = round(start.of(side))
    last = round(start.of(side) + length.of(side))
    if length.percent:
        first = min(first, side - 1) if start.percent and start.value < 100 else first
        last = max(last, first + 1)
    return first, last
