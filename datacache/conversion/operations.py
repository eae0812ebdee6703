"""Operations on every image of a conversion: how a command line names them, and what they do to coordinates.

The operations are always done in one order: **crop, tile, rotate, flip, resize**. A crop is given in the pixels of the
image that its author looked at, so it comes first. The size is what training is set up for, so it comes last and holds,
whatever came before; and turning at full resolution loses least.

`plan` makes steps of them for one image, a list for each image of the result, and `carry` does the steps to its
objects; `images` does the same steps to its pixels. Coordinates are as in `annotations.model`: pixel edges of the
displayed image. A box's corners are moved in floating point, and the new box is what bounds them, cut at the image's
edges; an object with an outline has the box around its outline. Pure values and functions, any thread.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from datacache.annotations.model import Annotation, Box, Problem, quote
from datacache.annotations.shapes.outline import NOTHING, Edges, Skeleton
from datacache.core.counters import count as counted
from datacache.core.errors import AnnotationError, UsageError

MAX_PIXELS = 178_956_970
"""The largest image that is read or made, as in Pillow: 512 MiB in RGB. A small file can claim any size, and a thin
strip that is turned covers a large square."""
MAX_SIDE = 65_500
"""The longest side a JPEG can have (libjpeg's `JPEG_MAX_DIMENSION`)."""
_SLIVER = 1e-3
"""A crop that leaves less than so many pixels of a box's side has left nothing of it: crops are whole pixels, and such
a rest is rounding in the annotation."""
_TILES_APART = 16
"""The least distance of two tiles in pixels."""


class Length(NamedTuple):
    """Pixels, or percent of a side."""

    value: float
    percent: bool

    def of(self, side: int) -> float:
        """Return the length in pixels, on a side of so many."""
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
        """Return left, top, right and bottom in whole pixels, which may lie outside of an image of this size."""
        left, right = _span(self.x, self.width, width)
        top, bottom = _span(self.y, self.height, height)
        return left, top, right, bottom

    def __str__(self) -> str:
        if self.x is None or self.y is None:
            return f"center:{self.width}x{self.height}"
        return f"{self.x},{self.y},{self.width},{self.height}"


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations on every image. False where there are none; `quality` and `min_visible` alone do nothing."""

    crop: Crop | None = None
    tile: tuple[int, int] | None = None
    """Width and height of the tiles that an image is cut into; the last ones of a row and a column lie further back, so
    that all are of this size."""
    overlap: int = 0
    """The pixels that a tile has in common with the next one."""
    drop_empty: bool = False
    """Leave out tiles without objects."""
    rotate: float = 0.0
    """Degrees counter-clockwise, 0 ≤ rotate < 360. The image grows to hold all of it."""
    flip: str = ""
    """`h` swaps left and right; `v` swaps top and bottom."""
    resize: tuple[int, int] | None = None
    """Width and height."""
    letterbox: bool = False
    """Keep the aspect when resizing, and fill up with grey."""
    quality: int = 95
    """Of new JPEGs, 1 to 100."""
    min_visible: float = 0.0
    """The least share of an object's area that a crop or a tile must leave; 0: any."""

    def __bool__(self) -> bool:
        return bool(self.crop or self.tile or self.rotate or self.flip or self.resize)

    def as_json(self) -> dict[str, Any]:
        """Return the operations for a snapshot's lineage; nothing where there are none."""
        if not self:
            return {}
        value: dict[str, Any] = {"quality": self.quality}
        if self.crop:
            value |= {"crop": str(self.crop), "min_visible": self.min_visible}
        if self.tile:
            value |= {"tile": f"{self.tile[0]}x{self.tile[1]}", "overlap": self.overlap, "drop_empty": self.drop_empty}
            value["min_visible"] = self.min_visible
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
    tile: str | None = None,
    overlap: int = 0,
    drop_empty: bool = False,
    rotate: str | float | None = None,
    flip: str | None = None,
    resize: str | None = None,
    letterbox: bool = False,
    quality: int = 95,
    min_visible: float = 0.0,
) -> Operations:
    """Read the options of a command line. `UsageError` names the option that makes no sense.

    `crop`: `X,Y,WIDTH,HEIGHT` or `center:WIDTHxHEIGHT`, each in pixels or percent (`10%`). `tile`: `WIDTHxHEIGHT`, and
    `overlap` pixels. `rotate`: degrees, any number. `flip`: `h` or `v`. `resize`: `WIDTHxHEIGHT`.
    """
    if letterbox and not resize:
        raise UsageError("--letterbox says how to resize, and --resize is not given", hint="Add --resize 640x640.")
    if (overlap or drop_empty) and not tile:
        option = "--overlap" if overlap else "--drop-empty"
        raise UsageError(f"{option} is about tiles, and --tile is not given", hint="Add --tile 1024x1024.")
    tiles = _parse_size(tile, "--tile") if tile else None
    if tiles and not 0 <= overlap <= min(tiles) - _TILES_APART:
        if min(tiles) < _TILES_APART:
            raise UsageError(f"--tile: {tile} is less than {_TILES_APART} pixels wide or high")
        hint = f"Tiles of {tile} can overlap by 0 to {min(tiles) - _TILES_APART}."
        raise UsageError(f"--overlap: {overlap} leaves them less than {_TILES_APART} pixels of their own", hint=hint)
    if flip and flip not in ("h", "v"):
        raise UsageError(f"--flip: {flip!r} is neither h nor v")
    if not 1 <= quality <= 100:
        raise UsageError(f"--quality: {quality} is not between 1 and 100")
    if not 0 <= min_visible <= 1:  # also refuses nan
        raise UsageError(f"--min-visible: {min_visible} is not between 0 and 1")
    return Operations(
        crop=_parse_crop(crop) if crop else None,
        tile=tiles,
        overlap=overlap,
        drop_empty=drop_empty,
        rotate=_parse_angle(rotate) if rotate else 0.0,
        flip=flip or "",
        resize=_parse_size(resize, "--resize") if resize else None,
        letterbox=letterbox,
        quality=quality,
        min_visible=min_visible,
    )


# --- parsing -------------------------------------------------------------------------------------------------------

_SIZE = re.compile(r"(\d{1,9})[xX×](\d{1,9})")
_LENGTH = r"\s*(\d{1,9}(?:\.\d{1,9})?%|\d{1,9})\s*"
_CROP_AT = re.compile(",".join([_LENGTH] * 4))
_CROP_CENTER = re.compile(rf"cent(?:er|re):{_LENGTH}[xX×]{_LENGTH}")


def _parse_size(text: str, option: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(text.strip())
    width, height = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE) or width * height > MAX_PIXELS:
        raise UsageError(f"{option}: {text!r} is no size", hint="Write WIDTHxHEIGHT in pixels, such as 640x480.")
    return width, height


def _parse_crop(text: str) -> Crop:
    match = _CROP_AT.fullmatch(text.strip()) or _CROP_CENTER.fullmatch(text.strip())
    lengths = [Length(float(part.removesuffix("%")), part.endswith("%")) for part in match.groups()] if match else []
    if not lengths or not all(length.value for length in lengths[-2:]):
        raise UsageError(
            f"--crop: {text!r} is no part of an image",
            hint="Write X,Y,WIDTH,HEIGHT or center:WIDTHxHEIGHT, in pixels or percent: center:80%x80%.",
        )
    x, y, width, height = [None] * (4 - len(lengths)) + lengths
    assert width is not None
    assert height is not None
    return Crop(x, y, width, height)


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
    """Return the first and last edge, in whole pixels. A part given in percent has at least one pixel."""
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


# --- steps -----------------------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """Keep a window. Like every step it has the result's width and height, and `move` says where a point goes."""

    left: int
    top: int
    width: int
    height: int

    def move(self, x: float, y: float) -> tuple[float, float]:
        return x - self.left, y - self.top


class Turn(NamedTuple):
    """Turn by right angles, counter-clockwise: no pixel changes."""

    quarters: int
    width: int
    height: int

    def move(self, x: float, y: float) -> tuple[float, float]:
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
        x, y = x - self.from_width / 2, y - self.from_height / 2
        return self.cosine * x + self.sine * y + self.width / 2, self.cosine * y - self.sine * x + self.height / 2

    def inverse(self) -> tuple[float, float, float, float, float, float]:
        """Return `a … f` with x = a x' + b y' + c and y = d x' + e y' + f: where a point of the result comes from."""
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
        return x * self.inner_width / self.from_width + self.left, y * self.inner_height / self.from_height + self.top


Step = Cut | Turn | Rotation | Mirror | Scale


def plan(ops: Operations, width: int, height: int, path: str) -> tuple[list[list[Step]], list[Problem]]:
    """Return the steps to each image that an image of this size becomes: one, or its tiles, row by row.
    `AnnotationError` if the crop misses it or a result is too large."""
    problems: list[Problem] = []
    whole = Cut(0, 0, width, height)
    if ops.crop:
        whole, problems = _cut(ops.crop, width, height, path)
    plans: list[list[Step]] = []
    for cut in _tiles(whole, ops.tile, ops.overlap) if ops.tile else (whole,):
        steps: list[Step] = [cut] if ops.crop or ops.tile else []
        size = cut.width, cut.height
        if ops.rotate:
            steps.append(_turn(ops.rotate, *size))
            size = steps[-1].width, steps[-1].height
        if ops.flip:
            steps.append(Mirror(ops.flip, *size))
        if ops.resize:
            steps.append(_scale(ops.resize, ops.letterbox, *size))
        for step in steps:
            if step.width * step.height > MAX_PIXELS:
                message = f"{path}: the result would have {step.width} x {step.height} pixels, more than {MAX_PIXELS:,}"
                raise AnnotationError(message, code="image-too-large", file=path)
        plans.append(steps)
    return plans, problems


def carry(
    annotation: Annotation,
    plans: Sequence[Sequence[Step]],
    min_visible: float,
    skeletons: Mapping[str, Skeleton] | None = None,
) -> tuple[list[Annotation], list[Problem]]:
    """Return the annotation after the steps of each plan; its path stays. Objects of which no crop or tile leaves
    enough are problems; those that are cut are marked truncated. `skeletons` say, by label, how keypoints change places
    in a mirror."""
    problems: list[Problem] = []
    file = annotation.source or annotation.path
    boxes: list[list[Box]] = [[] for _ in plans]
    unflipped = Counter[str]()
    hidden = 0
    for box in annotation.boxes:
        most = -1.0
        seen = bytes(len(_there(box)))  # those that any result has
        named = True
        for steps, found in zip(plans, boxes, strict=True):
            moved, kept = _carry_box(box, steps)
            most = max(most, kept if moved is not None else -1.0)
            if moved is None or kept < min_visible:
                continue
            if seen:
                seen = bytes(map(max, seen, _there(moved)))
                moved, flipped = _flipped(moved, steps, (skeletons or {}).get(box.label))
                named = named and flipped
            found.append(moved)
        unflipped[box.label] += not named
        if most < max(min_visible, 0.0):
            left = "has nothing in the crop" if most < 0 else f"has {most:.1%} of its area in the crop"
            limit = f", less than {min_visible:.1%}" if most >= 0 else ""
            message = f"the box {quote(box.label)} {left}{limit}: it was left out"
            problems.append(Problem("box-cropped-away", "skipped", file, box.line, message))
        else:
            hidden += seen.count(0) - _there(box).count(0)
    if hidden:
        what = f"{counted(hidden, 'keypoint')} {'lies' if hidden == 1 else 'lie'}"
        message = f"{annotation.path}: {what} outside of what a crop leaves: marked as not there"
        problems.append(Problem("keypoint-outside", "noted", file, 0, message))
    for label, times in unflipped.items():
        if times:
            message = (
                f"which keypoints of {quote(label)} are left and which right is not known: those of "
                f"{counted(times, 'object')} keep their names in the mirror"
            )
            problems.append(Problem("flip-unknown", "noted", file, 0, message))
    results = []
    for steps, found in zip(plans, boxes, strict=True):
        width, height = (steps[-1].width, steps[-1].height) if steps else (annotation.width, annotation.height)
        results.append(annotation._replace(width=width, height=height, boxes=tuple(found)))
    return results, problems


def _carry_box(box: Box, steps: Sequence[Step]) -> tuple[Box | None, float]:
    """Return the object after the steps (None where nothing is left), and the share of its area that a crop left. Where
    there is an outline it decides, not the box, unless keypoints are left and no part of the outline."""
    edges, kept = _carry_edges(box, steps)
    extra = box.extra
    if extra is not None and steps:
        from datacache.annotations.shapes import clip  # with shapely, where shapes are met

        movements = [clip.Movement(step.move, step.width, step.height, isinstance(step, Cut)) for step in steps]
        width, height, outline, keypoints = steps[-1].width, steps[-1].height, extra.outline, extra.keypoints
        if keypoints is not None:
            keypoints = clip.carried_keypoints(keypoints, movements)
        if outline is not None:
            outline, kept = clip.carried(outline, movements)
            around = None if outline is None else clip.box_around(outline)
            if around is not None:
                x1, y1, x2, y2 = around
                edges = max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height))
            elif keypoints is None or not any(keypoints.visible):
                edges = None
        extra = extra._replace(outline=outline, keypoints=keypoints, area=None)
    if edges is None or not (edges[0] < edges[2] and edges[1] < edges[3]):
        return None, 0.0
    x1, y1, x2, y2 = edges
    truncated = box.truncated or kept < 1 - 1e-9
    extra = None if extra == NOTHING else extra
    return box._replace(x1=x1, y1=y1, x2=x2, y2=y2, truncated=truncated, extra=extra), min(kept, 1.0)


def _carry_edges(box: Box, steps: Sequence[Step]) -> tuple[Edges | None, float]:
    """Return the box after the steps (None where nothing is left), and the share of its area that a crop left."""
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
    return (x1, y1, x2, y2), kept


def _flipped(box: Box, steps: Sequence[Step], skeleton: Skeleton | None) -> tuple[Box, bool]:
    """Return the object with its keypoints under the names that they have in a mirror; False where these are not
    known."""
    assert box.extra is not None
    keypoints = box.extra.keypoints
    if keypoints is None or not any(isinstance(step, Mirror) for step in steps):
        return box, True
    from datacache.annotations.shapes import clip

    order = () if skeleton is None else clip.mirrored_order(skeleton)
    if len(order) != len(keypoints.visible):
        return box, False
    return box._replace(extra=box.extra._replace(keypoints=clip.swapped(keypoints, order))), True


def _there(box: Box) -> bytes:
    """Return the visibility of an object's keypoints, 0 for those that are not there."""
    keypoints = None if box.extra is None else box.extra.keypoints
    return b"" if keypoints is None else keypoints.visible


def _tiles(whole: Cut, tile: tuple[int, int], overlap: int) -> list[Cut]:
    """Return the windows of the tiles of a part of an image, row by row."""
    width, height = min(tile[0], whole.width), min(tile[1], whole.height)
    lefts = [*range(0, whole.width - width, tile[0] - overlap), whole.width - width]
    tops = [*range(0, whole.height - height, tile[1] - overlap), whole.height - height]
    return [Cut(whole.left + left, whole.top + top, width, height) for top in tops for left in lefts]


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
