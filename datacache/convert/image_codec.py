"""Images from bytes and back: pixels as they are displayed, checked to be whole.

Used by `image_ops`. JPEGs go through simplejpeg (libjpeg-turbo), the rest through Pillow. A JPEG stays a JPEG with its
chroma subsampling; everything else becomes a PNG, which keeps every pixel. Colour profiles are kept, and all other
metadata (EXIF, with its orientation done to the pixels; comments) goes. Any thread.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from datacache.annotations.model import Problem
from datacache.convert.operations import MAX_PIXELS, MAX_SIDE
from datacache.core.errors import AnnotationError

Pixels = NDArray[Any]
"""Height x width, or height x width x channels; uint8, or uint16 for 16-bit grey."""
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA")
"""What is decoded. Not all that Pillow knows: some of its formats start other programs."""
_JPEG_EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif")
_SUBSAMPLINGS = ("444", "422", "420", "440", "411")
_ICC_MARK = b"ICC_PROFILE\0"
_ICC_PART = 65533 - len(_ICC_MARK) - 2


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A decoded image as it is displayed."""

    pixels: Pixels
    """Grey, grey and alpha, RGB or RGBA by the number of channels."""
    jpeg: bool
    subsampling: str = ""
    """Of a colour JPEG: `444`, `420`, …"""
    icc: bytes = b""
    problems: tuple[Problem, ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.pixels.shape[1], self.pixels.shape[0]


def decode(data: bytes, path: str) -> Picture:
    """The image in `data`. `AnnotationError` naming `path` if it is broken, truncated, too large or of no known format.
    Of several frames the first is taken."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        _check_size(path, *image.size)
        picture = _decode_jpeg(data, image, path) if image.format in ("JPEG", "MPO") else _decode_other(image, path)
        # Read when all is decoded: Pillow turns TIFFs by itself and then forgets their orientation.
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except AnnotationError:
        raise
    except Image.DecompressionBombError as exc:
        raise _too_large(path) from exc
    except Exception as exc:  # Pillow's decoders raise whatever they meet: SyntaxError, struct.error, zlib.error, …
        said = "it is of no known format" if isinstance(exc, UnidentifiedImageError) else str(exc)
        code = "image-truncated" if "truncated" in said else "image-broken"
        raise AnnotationError(f"{path}: the image cannot be decoded: {said}", code=code, file=path) from exc
    return replace(picture, pixels=_displayed(picture.pixels, orientation))


def encode(pixels: Pixels, picture: Picture, *, quality: int, path: str) -> bytes:
    """The pixels in the format that `picture` was read from. The same pixels give the same bytes."""
    pixels = np.ascontiguousarray(pixels)
    if not picture.jpeg:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG", **({"icc_profile": picture.icc} if picture.icc else {}))
        return file.getvalue()
    if max(pixels.shape[:2]) > MAX_SIDE:
        message = f"{path}: the result would be longer than a JPEG can be ({MAX_SIDE} pixels)"
        raise AnnotationError(message, code="image-too-large", file=path)
    if pixels.ndim == 2:
        data: bytes = simplejpeg.encode_jpeg(pixels[:, :, np.newaxis], quality, "GRAY", "Gray")
    else:
        data = simplejpeg.encode_jpeg(pixels, quality, "RGB", picture.subsampling)
    return _with_icc(data, picture.icc)


def extension(picture: Picture, path: str) -> str:
    """What a file with the result is called at its end: as it was, where that says the format."""
    given = "." + path.rpartition("/")[2].rpartition(".")[2]
    if given.lower() in (_JPEG_EXTENSIONS if picture.jpeg else (".png",)):
        return given
    return ".jpg" if picture.jpeg else ".png"


def _decode_jpeg(data: bytes, image: Image.Image, path: str) -> Picture:
    icc = image.info.get("icc_profile") or b""
    if image.mode not in ("L", "RGB"):
        pixels = np.asarray(image.convert("RGB"))
        problem = Problem("image-colours", "noted", path, 0, f"its colours are {image.mode} and were turned into RGB")
        return Picture(pixels=pixels, jpeg=True, subsampling="444", problems=(problem,))
    grey = image.mode == "L"
    try:
        subsampling = simplejpeg.decode_jpeg_header(data)[3]
        pixels = simplejpeg.decode_jpeg(data, "GRAY" if grey else "RGB", strict=True)
        problems: tuple[Problem, ...] = ()
    except ValueError as exc:
        # Stray bytes between markers are common, and every viewer passes over them. Pillow still raises when the image
        # ends too early; simplejpeg can only be told to mind all or nothing.
        image.load()
        pixels, subsampling = np.asarray(image), "420"
        problems = (Problem("image-damaged", "noted", path, 0, f"the JPEG decoder says: {exc}"),)
    return Picture(
        pixels=pixels[:, :, 0] if grey and pixels.ndim == 3 else pixels,
        jpeg=True,
        subsampling=subsampling if subsampling in _SUBSAMPLINGS else "420",
        icc=icc,
        problems=problems,
    )


def _decode_other(image: Image.Image, path: str) -> Picture:
    deep = any(";16" in str(tile.args) for tile in getattr(image, "tile", ()))
    icc = image.info.get("icc_profile") or b""
    image.load()
    mode, problems = image.mode, []
    if mode.startswith("I;16") or mode == "I":
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise _too_deep(path, "have more than 16 bits")
        return Picture(pixels=values.astype(np.uint16), jpeg=False, icc=icc)
    if mode == "F":
        raise _too_deep(path, "are floating-point numbers")
    if deep:
        problems.append(Problem("image-depth", "noted", path, 0, "its 16-bit colours were reduced to 8 bits"))
    if mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        icc = b""
        problems.append(Problem("image-colours", "noted", path, 0, f"its colours are {mode} and were turned into RGB"))
    alpha = image.has_transparency_data
    target = ("LA" if alpha else "L") if mode in ("1", "L", "LA", "La") else ("RGBA" if alpha else "RGB")
    return Picture(pixels=np.asarray(image.convert(target)), jpeg=False, icc=icc, problems=tuple(problems))


def _displayed(pixels: Pixels, orientation: int) -> Pixels:
    """Pixels as they are stored → as they are displayed (EXIF 2.32, 4.6.4.A, tag 274)."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _with_icc(jpeg: bytes, icc: bytes) -> bytes:
    """A JPEG with a colour profile behind its JFIF header (ICC.1:2022, B.4)."""
    if not icc:
        return jpeg
    parts = [icc[at : at + _ICC_PART] for at in range(0, len(icc), _ICC_PART)]
    if len(parts) > 255:
        return jpeg
    segments = [
        b"\xff\xe2" + (len(part) + 16).to_bytes(2, "big") + _ICC_MARK + bytes((number, len(parts))) + part
        for number, part in enumerate(parts, 1)
    ]
    behind = 4 + int.from_bytes(jpeg[4:6], "big") if jpeg[2:4] == b"\xff\xe0" else 2
    return b"".join((jpeg[:behind], *segments, jpeg[behind:]))


def _check_size(path: str, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise _too_large(path)


def _too_large(path: str) -> AnnotationError:
    return AnnotationError(f"{path}: it has more than {MAX_PIXELS:,} pixels", code="image-too-large", file=path)


def _too_deep(path: str, said: str) -> AnnotationError:
    return AnnotationError(f"{path}: its pixels {said}, which a PNG cannot hold", code="image-depth", file=path)
