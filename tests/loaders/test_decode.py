"""Pixels for training: what comes out of every kind of image, and what is refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from datacache.core.errors import AnnotationError
from datacache.loaders.decode import decode_rgb


def _gradient(mode: str = "RGB", size: tuple[int, int] = (64, 48)) -> Image.Image:
    across = np.linspace(0, 255, size[0], dtype=np.uint8)[np.newaxis, :].repeat(size[1], 0)
    down = np.linspace(0, 255, size[1], dtype=np.uint8)[:, np.newaxis].repeat(size[0], 1)
    return Image.fromarray(np.dstack([across, down, 255 - across])).convert(mode)


def _bytes(image: Image.Image, format: str, **how: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **how)
    return file.getvalue()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF"])
def test_every_format_gives_rgb_of_the_images_size(format: str) -> None:
    image = _gradient()
    pixels, own = decode_rgb(_bytes(image, format, **({"quality": 95} if format in ("JPEG", "WEBP") else {})), "x")
    assert own == (48, 64)
    assert pixels.shape == (48, 64, 3)
    assert pixels.dtype == np.uint8
    assert pixels.flags.writeable
    assert pixels.flags.c_contiguous
    tolerance = 12 if format == "GIF" else 6
    assert np.abs(pixels.astype(int) - np.asarray(image).astype(int)).mean() < tolerance


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = _gradient().convert(mode)
    pixels, _ = decode_rgb(_bytes(image, "JPEG" if mode == "CMYK" else "PNG"), "x")
    assert pixels.shape == (48, 64, 3)


def test_16_bit_grey_keeps_its_upper_half() -> None:
    values = np.arange(64 * 48, dtype=np.uint16).reshape(48, 64) * 20
    pixels, _ = decode_rgb(_bytes(Image.fromarray(values), "PNG"), "x")
    assert np.array_equal(pixels[:, :, 0], (values >> 8).astype(np.uint8))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_given_as_they_are_displayed(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = _bytes(_gradient(), "JPEG", quality=95, exif=exif)
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    pixels, own = decode_rgb(data, "x")
    assert own == (upright.height, upright.width)
    assert np.abs(pixels.astype(int) - np.asarray(upright).astype(int)).mean() < 3
    small, same = decode_rgb(data, "x", (20, 30))
    assert same == own
    expected = np.asarray(upright.resize((30, 20), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(small.astype(int) - expected).mean() < 6


def test_a_large_jpeg_is_reduced_to_the_same_picture() -> None:
    image = _gradient(size=(640, 480))
    data = _bytes(image, "JPEG", quality=95)
    pixels, own = decode_rgb(data, "x", (100, 120))
    assert own == (480, 640)
    expected = np.asarray(image.resize((120, 100), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(pixels.astype(int) - expected).mean() < 3


@pytest.mark.parametrize("damage", [lambda d: d[:200], lambda d: b"", lambda d: b"hello", lambda d: d[: len(d) // 2]])
def test_what_is_no_whole_image_is_an_error_that_names_it(damage: object) -> None:
    data = _bytes(_gradient(), "JPEG")
    with pytest.raises(AnnotationError, match=r"a/b\.jpg"):
        decode_rgb(damage(data), "a/b.jpg")  # type: ignore[operator]


def test_stray_bytes_in_a_jpeg_are_passed_over() -> None:
    data = _bytes(_gradient(), "JPEG", quality=95)
    pixels, _ = decode_rgb(data[:-2] + b"\0\0\0" + data[-2:], "x")
    assert pixels.shape == (48, 64, 3)
