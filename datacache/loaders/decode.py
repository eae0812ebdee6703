"""Pixels for training: 8-bit RGB as displayed, resized on the way where that is asked for.

Used by the datasets and by whoever wants the same pixels elsewhere. JPEGs go through libjpeg-turbo, the rest through
`conversion.images`. Pure functions, any thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import index
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from datacache.annotations.image_header import read_header
from datacache.conversion.images import Picture, decode, turned
from datacache.core.errors import AnnotationError, BrokenImageError, UsageError

Size = tuple[int, int]
"""Height and width."""
MAX_SIDE = 2**16
"""Of what images can be resized to: far beyond anything a training takes."""


def height_and_width(size: Any) -> Size | None:
    """Return what `size=` means: a number is both. Raise `UsageError` for what is no size."""
    if size is None:
        return None
    sides: Any = (size, size) if isinstance(size, (int, np.integer)) else size
    if isinstance(size, str) and (text := re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", size)):
        sides = int(text[2]), int(text[1])
    try:
        height, width = sides
        found = index(height), index(width)
    except (TypeError, ValueError):
        found = 0, 0
    if isinstance(size, bool) or min(found) < 1 or max(found) > MAX_SIDE:
        raise UsageError(
            f"size={size!r}", hint='Height and width in pixels: size=(480, 640), 224 for both, or "640x480".'
        )
    return found


def decode_rgb(
    data: bytes | memoryview, path: str | Callable[[], str], size: Size | None = None
) -> tuple[NDArray[np.uint8], Size]:
    """Return the image's pixels, (height, width, 3) uint8, contiguous, and the height and width it has by itself.

    With `size` they are resized to exactly that, whatever the image's own proportions (bilinear with antialiasing; a
    JPEG that is more than twice as large is reduced while it is decoded). EXIF orientation is applied.
    `AnnotationError` naming `path` (which may be a function: only errors need it) where the image is broken, truncated
    or of no known format.
    """
    try:
        header = read_header(data)
    except BrokenImageError as exc:
        path = path if isinstance(path, str) else path()
        raise AnnotationError(f"{path}: {exc}", code="image-broken", file=path, hint=exc.hint) from exc
    own = header.displayed_height, header.displayed_width
    pixels = _jpeg(data, header.orientation, size, own) if header.format == "jpeg" and header.complete else None
    if pixels is None:
        pixels = _rgb(_other(bytes(data), path).pixels)
        own = pixels.shape[0], pixels.shape[1]
    if size is not None and pixels.shape[:2] != size:
        pixels = _resized(pixels, size)
    pixels = np.ascontiguousarray(pixels)
    return pixels if pixels.flags.writeable else pixels.copy(), own


def _other(data: bytes, path: str | Callable[[], str]) -> Picture:
    if isinstance(path, str):
        return decode(data, path)
    try:
        return decode(data, "")
    except AnnotationError:
        return decode(data, path())  # the same error, with the path


def _jpeg(data: bytes | memoryview, orientation: int, size: Size | None, own: Size) -> NDArray[np.uint8] | None:
    """Decode the common case; None for a JPEG that libjpeg-turbo has something to say about."""
    least: dict[str, int] = {}
    if size is not None and orientation <= 1 and own[0] >= 2 * size[0] and own[1] >= 2 * size[1]:
        least = {"min_height": size[0], "min_width": size[1]}
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", strict=True, **least)
    except ValueError:
        return None
    return turned(pixels, orientation) if orientation > 1 else pixels


def _rgb(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    if pixels.dtype == np.uint16:
        pixels = (pixels >> 8).astype(np.uint8)
    if pixels.ndim == 2:
        pixels = pixels[:, :, np.newaxis]
    channels = pixels.shape[2]
    return np.repeat(pixels[:, :, :1], 3, axis=2) if channels <= 2 else pixels[:, :, :3]


def _resized(pixels: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels)).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.array(image)  # writable, as PyTorch wants it
