"""Image operations with the boxes carried along: the bytes of an image and its annotation in, those of the result out.

Used by conversions, in their worker processes. `operations` says what can be asked for and the order in which it is
done, `geometry` what that means for one image, `image_codec` reads and writes; here the same steps are done to the
pixels. Crops, flips and turns by right angles move pixels and change none. The rest interpolates linearly, over all
pixels that a smaller one stands for. What an operation adds is grey. Any thread.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from PIL import Image

from datacache.annotations.model import Annotation, Problem
from datacache.conversion.geometry import Cut, Mirror, Rotation, Scale, Step, Turn, carry, plan
from datacache.conversion.image_codec import Pixels, decode, encode, extension
from datacache.conversion.operations import Operations, parse_operations
from datacache.core.errors import AnnotationError

__all__ = ["Operations", "Processed", "apply", "parse_operations"]
_GREY = 114  # what YOLO pads with
_LINEAR = Image.Resampling.BILINEAR
_REDUCING_GAP = 3.0
"""From six times smaller on, whole blocks are averaged first, which is much faster and changes nothing one can see."""


class Processed(NamedTuple):
    """The result of `apply`."""

    data: bytes
    extension: str
    """`.jpg` or `.png`, or what the path had, if that says the same."""
    annotation: Annotation
    """For the new image. Its path is still the old one."""
    problems: list[Problem]


def apply(data: bytes, annotation: Annotation, ops: Operations) -> Processed:
    """Do `ops` to an image, as it is displayed, and to its boxes. The same input gives the same bytes.

    `AnnotationError` if the image is broken, truncated, too large, missed by the crop, or not of the size that its
    annotation was checked against.
    """
    path = annotation.path
    picture = decode(data, path)
    if picture.size != (annotation.width, annotation.height):
        raise AnnotationError(
            f"{path}: the image is {picture.size[0]} x {picture.size[1]}, "
            f"and its annotation is for {annotation.width} x {annotation.height}",
            code="image-broken",
            file=path,
        )
    steps, planned = plan(ops, annotation.width, annotation.height, path)
    moved, dropped = carry(annotation, steps, ops.min_visible)
    pixels = picture.pixels
    for step in steps:
        pixels = _do(step, pixels)
    encoded = encode(pixels, picture, quality=ops.quality, path=path)
    return Processed(encoded, extension(picture, path), moved, [*picture.problems, *planned, *dropped])


def _do(step: Step, pixels: Pixels) -> Pixels:
    match step:
        case Cut():
            return pixels[step.top : step.top + step.height, step.left : step.left + step.width]
        case Turn():
            return np.rot90(pixels, step.quarters)
        case Mirror():
            return pixels[:, ::-1] if step.axis == "h" else pixels[::-1]
        case Rotation():
            image = _to_image(pixels).transform(
                (step.width, step.height), Image.Transform.AFFINE, step.inverse(), _LINEAR, fillcolor=_grey(pixels)
            )
            return _from_image(image, pixels)
        case Scale():
            return _scale(step, pixels)


def _scale(step: Scale, pixels: Pixels) -> Pixels:
    if (step.inner_width, step.inner_height) != (step.from_width, step.from_height):
        size = step.inner_width, step.inner_height
        pixels = _from_image(_to_image(pixels).resize(size, _LINEAR, reducing_gap=_REDUCING_GAP), pixels)
    if (step.inner_width, step.inner_height) == (step.width, step.height):
        return pixels
    filled = np.empty((step.height, step.width, *pixels.shape[2:]), pixels.dtype)
    filled[:] = _grey(pixels)
    filled[step.top : step.top + step.inner_height, step.left : step.left + step.inner_width] = pixels
    return filled


def _to_image(pixels: Pixels) -> Image.Image:
    """For Pillow, which interpolates 16 bits only as floats."""
    return Image.fromarray(np.ascontiguousarray(pixels, np.float32 if pixels.dtype == np.uint16 else None))


def _from_image(image: Image.Image, like: Pixels) -> Pixels:
    pixels = np.asarray(image)
    return pixels if pixels.dtype == like.dtype else np.rint(pixels).clip(0, 65535).astype(like.dtype)


def _grey(pixels: Pixels) -> int | tuple[int, ...]:
    if pixels.ndim == 2:
        return _GREY if pixels.dtype == np.uint8 else _GREY * 257
    return ((_GREY, 255), (_GREY,) * 3, (_GREY, _GREY, _GREY, 255))[pixels.shape[2] - 2]
