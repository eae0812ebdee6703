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
from PIL import ExifTags, Image

from datacache.annotations.image_header import ImageHeader, read_header
from datacache.annotations.model import Problem
from datacache.conversion.operations import MAX_PIXELS, MAX_SIDE
from datacache.core.errors import AnnotationError

Pixels = NDArray[Any]
"""Height x width, or height x width x channels; uint8, or uint16 for 16-bit grey."""
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
        header = read_header(data)
        if header.width * header.height > MAX_PIXELS:
            message = f"{path}: the image has more than {MAX_PIXELS:,} pixels"
            raise AnnotationError(message, code="image-too-large", file=path)
        if not header.complete:
            raise AnnotationError(f"{path}: the image ends before its end", code="image-truncated", file=path)
        picture = _decode_jpeg(data, path) if header.format == "jpeg" else None
        if picture is None:
            picture, header = _decode_with_pillow(data, header, path)
    except AnnotationError:
        raise
    except Exception as exc:  # Pillow's decoders raise whatever they meet: SyntaxError, struct.error, zlib.error, …
        code = "image-truncated" if "truncated" in str(exc) else "image-broken"
        raise AnnotationError(f"{path}: the image cannot be decoded: {exc}", code=code, file=path) from exc
    return replace(picture, pixels=_displayed(picture.pixels, header.orientation))


def check_whole(data: bytes | memoryview, header: ImageHeader, path: str) -> None:
    """Decode an image as coarsely as its format allows. `AnnotationError` naming `path` where it is cut or damaged.

    A JPEG takes a bit less than decoding it does: its scans are read to their end, and an eighth of its pixels is made.
    """
    if header.format != "jpeg":
        decode(bytes(data), path)
        return
    try:
        simplejpeg.decode_jpeg(data, "GRAY", min_height=1, min_width=1, strict=True)
    except ValueError as exc:
        _expect_end(exc, path)
        decode(bytes(data), path)  # stray bytes, or colours that simplejpeg does not know: Pillow decides


def _expect_end(error: ValueError, path: str) -> None:
    """Raise where libjpeg says that an image ends too early, be it at an end marker (JWRN_HIT_MARKER in jerror.h) or
    not: other decoders fill it up with grey."""
    if "remature end" in str(error):
        message = f"{path}: the image ends before its end"
        raise AnnotationError(message, code="image-truncated", file=path) from error


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


def _decode_jpeg(data: bytes, path: str) -> Picture | None:
    """A grey or ordinary colour JPEG; None where another decoder must be asked."""
    try:
        _, _, colours, subsampling = simplejpeg.decode_jpeg_header(data)
        if colours not in ("Gray", "YCbCr", "RGB"):
            return None
        grey = colours == "Gray"
        pixels = simplejpeg.decode_jpeg(data, "GRAY" if grey else "RGB", strict=True)
    except ValueError as exc:
        _expect_end(exc, path)
        # Stray bytes between markers are common, and every viewer passes over them; simplejpeg can only be told to mind
        # all or nothing. Pillow minds an image that ends too early.
        image = Image.open(io.BytesIO(data), formats=("JPEG",))
        image.load()
        if image.mode not in ("L", "RGB"):
            return None
        pixels, subsampling, grey = np.asarray(image), "420", False
        problems: tuple[Problem, ...] = (Problem("image-damaged", "noted", path, 0, f"the JPEG decoder says: {exc}"),)
    else:
        problems = ()
    return Picture(
        pixels=pixels[:, :, 0] if grey else pixels,
        jpeg=True,
        subsampling=subsampling if subsampling in _SUBSAMPLINGS else "420",
        icc=_icc(data),
        problems=problems,
    )


def _decode_with_pillow(data: bytes, header: ImageHeader, path: str) -> tuple[Picture, ImageHeader]:
    """Everything else. The header's orientation is what is still to be done: Pillow turns TIFFs by itself."""
    # Only the format that the header is of: Pillow knows some that start other programs.
    image = Image.open(io.BytesIO(data), formats=(header.format,))
    deep = any(";16" in str(tile.args) for tile in getattr(image, "tile", ()))
    icc = image.info.get("icc_profile") or b""
    jpeg = header.format == "jpeg"
    image.load()
    if header.format == "tiff":
        header = header._replace(orientation=image.getexif().get(ExifTags.Base.Orientation, 1))
    mode, problems = image.mode, []
    if mode.startswith("I;16") or mode == "I":
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise _too_deep(path, "have more than 16 bits")
        return Picture(pixels=values.astype(np.uint16), jpeg=False, icc=icc), header
    if mode == "F":
        raise _too_deep(path, "are floating-point numbers")
    if deep:
        problems.append(Problem("image-depth", "noted", path, 0, "its 16-bit colours were reduced to 8 bits"))
    if mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        icc = b""
        problems.append(Problem("image-colours", "noted", path, 0, f"its colours are {mode} and were turned into RGB"))
    alpha = image.has_transparency_data
    target = ("LA" if alpha else "L") if mode in ("1", "L", "LA", "La") else ("RGBA" if alpha else "RGB")
    pixels = np.asarray(image.convert(target))
    return Picture(pixels=pixels, jpeg=jpeg, subsampling="444", icc=icc, problems=tuple(problems)), header


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


def _icc(jpeg: bytes) -> bytes:
    """The colour profile of a JPEG; b"" where there is none, or not all of it."""
    parts: dict[int, bytes] = {}
    count, at = 0, 2
    while jpeg[at : at + 1] == b"\xff" and jpeg[at + 1 : at + 2] not in (b"\xda", b""):
        end = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if jpeg[at + 1] == 0xE2 and jpeg.startswith(_ICC_MARK, at + 4):
            number, count = jpeg[at + 16], jpeg[at + 17]
            parts[number] = jpeg[at + 18 : end]
        at = end
    return b"".join(parts[number] for number in sorted(parts)) if len(parts) == count else b""


def _too_deep(path: str, said: str) -> AnnotationError:
    return AnnotationError(f"{path}: its pixels {said}, which a PNG cannot hold", code="image-depth", file=path)
