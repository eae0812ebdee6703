"""JPEG files that cost what photographs cost: textures whose spectrum falls with frequency as that of natural images
does (their amplitude goes about as 1/f), at the quality a camera or a web site chooses.

A few dozen are drawn and used over and over, each file with a comment of its own inside, so no two files are the same.
The same arguments give the same files (with the same libjpeg-turbo).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import simplejpeg

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SLOPE = 1.2
_DRAWN = 64
"""Textures; a file's size and decoding time depend on its texture's contrast."""


class PhotographKind(NamedTuple):
    """What images are drawn; its name is about the mean size of their files."""

    name: str
    width: int
    height: int
    quality: int
    even_bytes: int = 0
    """Every file has exactly so many, by its comment."""


PHOTOGRAPHS = PhotographKind("107 KB", 640, 480, 81)
THUMBNAILS = PhotographKind("1.6 KB", 48, 48, 75)
# How malloc treats buffers of one size, and those of many sizes on both sides of its thresholds, is not the same.
EVEN = PhotographKind("exactly 107 KB", 640, 480, 79, 107_000)
KINDS = {"photographs": PHOTOGRAPHS, "thumbnails": THUMBNAILS, "even": EVEN}


def write_images(folder: Path, count: int, kind: PhotographKind = PHOTOGRAPHS, *, seed: int = 0) -> int:
    """`count` files `0000000.jpg` … in `folder`, which is there; their bytes."""
    drawn = [_draw(seed + number, kind) for number in range(min(count, _DRAWN))]
    total = 0
    for number in range(count):
        name = f"{number:07d}"
        jpeg = drawn[number % _DRAWN]
        comment = name.encode().ljust(max(0, kind.even_bytes - len(jpeg) - 4))
        total += (folder / f"{name}.jpg").write_bytes(with_comment(jpeg, comment))
    return total


def with_comment(jpeg: bytes, text: bytes) -> bytes:
    """A COM segment behind the APP0 segment that follows SOI (ITU T.81, B.1.1.3 and B.2.4.5)."""
    end = 4 + int.from_bytes(jpeg[4:6], "big")
    return jpeg[:end] + b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text + jpeg[end:]


def _draw(seed: int, kind: PhotographKind) -> bytes:
    chance = np.random.default_rng(seed)
    shape = kind.height, kind.width
    contrast = 45.0 if kind.even_bytes else chance.uniform(35, 65)
    luma = 118 + contrast * _texture(chance, shape)
    blue, red = 18 * _texture(chance, shape), 18 * _texture(chance, shape)
    # ITU-R BT.601, as JFIF has it.
    colours = np.stack([luma + 1.402 * red, luma - 0.344 * blue - 0.714 * red, luma + 1.772 * blue], axis=-1)
    pixels = np.ascontiguousarray(colours.clip(0, 255).astype(np.uint8))
    jpeg: bytes = simplejpeg.encode_jpeg(pixels, quality=kind.quality, colorspace="RGB", colorsubsampling="420")
    return jpeg


def _texture(chance: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Noise of mean 0 and deviation 1 whose amplitude falls as frequency to the power `_SLOPE`."""
    height, width = shape
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = np.inf
    half = height, width // 2 + 1
    spectrum = (chance.standard_normal(half) + 1j * chance.standard_normal(half)) / frequency**_SLOPE
    texture: NDArray[np.float64] = np.fft.irfft2(spectrum, s=shape)
    return texture / texture.std()
