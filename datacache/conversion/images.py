"""Image operations on pixels: images decoded, changed together with their objects, and stored, in worker processes.

Used by the pipeline when a conversion crops, tiles, rotates, flips or resizes; `check_whole` is for readings with
`--decode`. `operations` says which steps an image takes. New images go to objects storage under the hash of their
bytes, so a conversion that was killed finds what it wrote, and the same image is stored once.

JPEGs go through simplejpeg (libjpeg-turbo), the rest through Pillow. A JPEG stays a JPEG with its chroma subsampling;
everything else becomes a PNG, which keeps every pixel. Colour profiles are kept; all other metadata goes (EXIF, whose
orientation is done to the pixels; comments). Crops, flips and right-angled turns change no pixel. All else interpolates
linearly, over all pixels that a smaller one stands for. What an operation adds is grey. Any thread.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags

from datacache.annotations.image_header import ImageHeader, jpeg_end, read_header
from datacache.annotations.model import Annotation, Problem, unforeseen
from datacache.annotations.shapes.outline import Skeleton
from datacache.catalog.objects import ObjectWriter, Stored
from datacache.conversion.files import Files, Part
from datacache.conversion.model import Image, Report, stem
from datacache.conversion.operations import (
    MAX_PIXELS,
    MAX_SIDE,
    Cut,
    Mirror,
    Operations,
    Rotation,
    Scale,
    Step,
    Turn,
    carry,
    plan,
)
from datacache.core.concurrency import PerProcess
from datacache.core.errors import AnnotationError, BrokenImageError
from datacache.core.parallel import Workers, ordered_map
from datacache.reader.snapshot import Snapshot

Pixels = NDArray[Any]
"""Height x width, or height x width x channels; uint8, or uint16 for 16-bit grey."""
_BATCH = 16
_WRITES = 8
_JPEG_EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif")
_SUBSAMPLINGS = ("444", "422", "420", "440", "411")
_ICC_MARK = b"ICC_PROFILE\0"
_ICC_PART = 65533 - len(_ICC_MARK) - 2
_GREY = 114  # what YOLO pads with
_SCAN, _MOST_SCANS = b"\xff\xda", 100  # encoders make about ten
_LINEAR = PIL.Image.Resampling.BILINEAR
_REDUCING_GAP = 3.0
"""From six times smaller on, whole blocks are averaged first, which is much faster and changes nothing one can see."""


# --- a stream of images ----------------------------------------------------------------------------------------------


class _Done(NamedTuple):
    """The result of an image: none where the image cannot be used, several where it is cut into tiles."""

    problems: tuple[Problem, ...]
    results: tuple[tuple[Annotation, Stored], ...] = ()


def process_images(
    snapshot: Snapshot,
    images: Iterable[Image],
    operations: Operations,
    objects: ObjectWriter,
    source: int,
    *,
    processes: Workers,
    report: Report,
    skeletons: Mapping[str, Skeleton],
) -> Iterator[Image]:
    """Yield the images after the operations, in order; those that cannot be decoded are left out and reported."""
    under_way: deque[list[Image]] = deque()
    images = iter(images)

    def tasks() -> Iterator[list[Image]]:
        while batch := list(islice(images, _BATCH)):
            under_way.append(batch)
            yield batch

    worker = _Worker(snapshot, operations, objects, skeletons)
    for results in ordered_map(worker, tasks(), processes=processes):
        for image, done in zip(under_way.popleft(), results, strict=True):
            report.problems += done.problems
            for annotation, stored in done.results:
                yield image._replace(annotation=annotation).stored_anew(stored, source)


def _new_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_WRITES, "store")


class _Worker:
    """Changes and stores images. Made in the parent, used in each worker process."""

    def __init__(
        self,
        snapshot: Snapshot,
        operations: Operations,
        objects: ObjectWriter,
        skeletons: Mapping[str, Skeleton],
    ) -> None:
        self._files = Files(snapshot)
        self._operations, self._objects, self._skeletons = operations, objects, skeletons
        # A store takes its time for each object (a folder waits for the disk): several are under way at once.
        self._threads = PerProcess(_new_threads)

    def lasts(self, results: list[_Done]) -> bool:
        """Tell whether the images that an earlier start has stored are still there."""
        stored = [stored for done in results for _, stored in done.results]
        return all(self._threads.get().map(self._objects.lasts, stored))

    def work(self, batch: list[Image]) -> list[_Done]:
        """Return the result of each image."""
        parts = [Part(image.row, image.entry.size_bytes) for image in batch]
        coming = [
            self._begin(bytes(data), image.annotation)
            for image, data in zip(batch, self._files.read(parts), strict=True)
        ]
        self._files.done()
        return [
            _Done(problems, tuple((annotation, storing.result()) for annotation, storing in under_way))
            for problems, under_way in coming
        ]

    def _begin(
        self, data: bytes, annotation: Annotation
    ) -> tuple[tuple[Problem, ...], list[tuple[Annotation, Future[Stored]]]]:
        try:
            results, problems = apply(data, annotation, self._operations, self._skeletons)
        except AnnotationError as exc:
            message = f"{exc.message}; the image is left out"
            return (Problem(exc.code or "image-broken", "skipped", annotation.path, 0, message),), []
        except Exception as exc:  # noqa: BLE001 - one image must not end the work on all
            return (unforeseen(exc, annotation.path, "the image is"),), []
        put, threads = self._objects.put, self._threads.get()
        return tuple(problems), [(result.annotation, threads.submit(put, result.data)) for result in results]


# --- one image -------------------------------------------------------------------------------------------------------


class Processed(NamedTuple):
    """An image of the result."""

    data: bytes
    annotation: Annotation
    """For the new image, under a path with its extension: `.jpg` or `.png`, or the old one where it says the same. A
    tile's name says where its upper left corner was."""


def apply(
    data: bytes, annotation: Annotation, ops: Operations, skeletons: Mapping[str, Skeleton] | None = None
) -> tuple[list[Processed], list[Problem]]:
    """Do `ops` to an image, as it is displayed, and to its objects. The same input gives the same bytes. There are
    several results where the image is cut into tiles.

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
    plans, planned = plan(ops, annotation.width, annotation.height, path)
    carried, dropped = carry(annotation, plans, ops.min_visible, skeletons)
    results = []
    for steps, moved in zip(plans, carried, strict=True):
        if ops.tile and ops.drop_empty and not moved.boxes:
            continue
        pixels = picture.pixels
        for step in steps:
            pixels = _do(step, pixels)
        encoded = encode(pixels, picture, quality=ops.quality, path=path)
        cut = steps[0]
        place = f"_{cut.left}_{cut.top}" if ops.tile and isinstance(cut, Cut) else ""
        results.append(Processed(encoded, moved._replace(path=stem(path) + place + extension(picture, path))))
    return results, [*picture.problems, *planned, *dropped]


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
                (step.width, step.height), PIL.Image.Transform.AFFINE, step.inverse(), _LINEAR, fillcolor=_grey(pixels)
            )
            return _from_image(image, pixels)
        case Scale():
            size = step.inner_width, step.inner_height
            if size != (step.from_width, step.from_height):
                pixels = _from_image(_to_image(pixels).resize(size, _LINEAR, reducing_gap=_REDUCING_GAP), pixels)
            if size == (step.width, step.height):
                return pixels
            filled = np.empty((step.height, step.width, *pixels.shape[2:]), pixels.dtype)
            filled[:] = _grey(pixels)
            filled[step.top : step.top + step.inner_height, step.left : step.left + step.inner_width] = pixels
            return filled


def _to_image(pixels: Pixels) -> PIL.Image.Image:
    # Pillow interpolates 16 bits only as floats.
    return PIL.Image.fromarray(np.ascontiguousarray(pixels, np.float32 if pixels.dtype == np.uint16 else None))


def _from_image(image: PIL.Image.Image, like: Pixels) -> Pixels:
    pixels = np.asarray(image)
    return pixels if pixels.dtype == like.dtype else np.rint(pixels).clip(0, 65535).astype(like.dtype)


def _grey(pixels: Pixels) -> int | tuple[int, ...]:
    if pixels.ndim == 2:
        return _GREY if pixels.dtype == np.uint8 else _GREY * 257
    return ((_GREY, 255), (_GREY,) * 3, (_GREY, _GREY, _GREY, 255))[pixels.shape[2] - 2]


# --- bytes to pixels and back ----------------------------------------------------------------------------------------


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
    """Decode an image; of several frames the first. `AnnotationError` naming `path` if it is broken, truncated, too
    large or of no known format."""
    try:
        header = read_header(data)
        expect_decodable(data, header, path)
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
    return replace(picture, pixels=turned(picture.pixels, header.orientation))


def expect_decodable(data: bytes | memoryview, header: ImageHeader, path: str) -> None:
    """Raise `AnnotationError` where decoding an image, at whatever size, takes too much memory or time. A progressive
    JPEG is held whole, and gone through once for each scan: three kilobytes can ask for gigabytes, or for hours."""
    if header.width * header.height > MAX_PIXELS:
        message = f"{path}: the image has more than {MAX_PIXELS:,} pixels"
        raise AnnotationError(message, code="image-too-large", file=path)
    if header.format == "jpeg" and (raw := bytes(data)).count(_SCAN) > _MOST_SCANS:
        try:
            scans = raw.count(_SCAN, 0, jpeg_end(raw))  # a film may follow the image
        except BrokenImageError as exc:
            raise AnnotationError(f"{path}: {exc.message}", code="image-truncated", file=path) from exc
        if scans > _MOST_SCANS:
            message = f"{path}: the JPEG has {scans:,} scans, more than {_MOST_SCANS}"
            raise AnnotationError(message, code="image-too-large", file=path)


def turned(pixels: Pixels, orientation: int) -> Pixels:
    """Turn pixels from how they are stored to how they are displayed (EXIF 2.32, 4.6.4.A, tag 274)."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def check_whole(data: bytes | memoryview, header: ImageHeader, path: str) -> None:
    """Decode an image as coarsely as its format allows. `AnnotationError` naming `path` where it is cut or damaged.

    A JPEG takes a bit less than decoding it does: its scans are read to their end, and an eighth of its pixels is made.
    """
    if header.format != "jpeg":
        decode(bytes(data), path)
        return
    expect_decodable(data, header, path)
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
    """Encode pixels in the format that `picture` was read from. The same pixels give the same bytes."""
    pixels = np.ascontiguousarray(pixels)
    if not picture.jpeg:
        file = io.BytesIO()
        PIL.Image.fromarray(pixels).save(file, "PNG", **({"icc_profile": picture.icc} if picture.icc else {}))
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
    """Return the extension of a file with the result: the path's own, where that says the format."""
    given = "." + path.rpartition("/")[2].rpartition(".")[2]
    if given.lower() in (_JPEG_EXTENSIONS if picture.jpeg else (".png",)):
        return given
    return ".jpg" if picture.jpeg else ".png"


def _decode_jpeg(data: bytes, path: str) -> Picture | None:
    """Decode a grey or ordinary colour JPEG; return None where another decoder must be asked."""
    problems: tuple[Problem, ...] = ()
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
        image = PIL.Image.open(io.BytesIO(data), formats=("JPEG",))
        image.load()
        if image.mode not in ("L", "RGB"):
            return None
        pixels, subsampling, grey = np.asarray(image), "420", False
        problems = (Problem("image-damaged", "noted", path, 0, f"the JPEG decoder says: {exc}"),)
    return Picture(
        pixels=pixels[:, :, 0] if grey else pixels,
        jpeg=True,
        subsampling=subsampling if subsampling in _SUBSAMPLINGS else "420",
        icc=_icc(data),
        problems=problems,
    )


def _decode_with_pillow(data: bytes, header: ImageHeader, path: str) -> tuple[Picture, ImageHeader]:
    """Decode everything else. The header's orientation is what is still to be done: Pillow turns TIFFs by itself."""
    # Only the format that the header is of: Pillow knows some that start other programs.
    image = PIL.Image.open(io.BytesIO(data), formats=(header.format,))
    deep = any(";16" in str(tile.args) for tile in getattr(image, "tile", ()))
    icc = image.info.get("icc_profile") or b""
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
    jpeg = header.format == "jpeg"
    return Picture(pixels=pixels, jpeg=jpeg, subsampling="444", icc=icc, problems=tuple(problems)), header


def _with_icc(jpeg: bytes, icc: bytes) -> bytes:
    """Put a colour profile behind a JPEG's JFIF header (ICC.1:2022, B.4)."""
    parts = [icc[at : at + _ICC_PART] for at in range(0, len(icc), _ICC_PART)]
    if not 0 < len(parts) < 256:
        return jpeg
    segments = [
        b"\xff\xe2" + (len(part) + 16).to_bytes(2, "big") + _ICC_MARK + bytes((number, len(parts))) + part
        for number, part in enumerate(parts, 1)
    ]
    behind = 4 + int.from_bytes(jpeg[4:6], "big") if jpeg[2:4] == b"\xff\xe0" else 2
    return b"".join((jpeg[:behind], *segments, jpeg[behind:]))


def _icc(jpeg: bytes) -> bytes:
    """Return the colour profile of a JPEG; b"" where there is none, or not all of it."""
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
