"""Image operations over a stream of images: decoded, changed and stored in worker processes, in order.

Used by the pipeline when a conversion is asked to resize, crop, rotate or flip. New images go to objects storage
under the hash of their bytes, so a conversion that was killed finds what it had written, and the same image is stored
once.

Image operations with the boxes carried along: the bytes of an image and its annotation in, those of the result out.

Used by conversions, in their worker processes. `operations` says what can be asked for and the order in which it is
done, `geometry` what that means for one image, `image_codec` reads and writes; here the same steps are done to the
pixels. Crops, flips and turns by right angles move pixels and change none. The rest interpolates linearly, over all
pixels that a smaller one stands for. What an operation adds is grey. Any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import numpy as np
import PIL.Image

from datacache.annotations.model import Annotation, Problem
from datacache.catalog.objects import ObjectWriter, Stored
from datacache.conversion.geometry import Cut, Mirror, Rotation, Scale, Step, Turn, carry, plan
from datacache.conversion.image import Image
from datacache.conversion.image_codec import Pixels, decode, encode, extension
from datacache.conversion.operations import Operations, parse_operations
from datacache.conversion.parallel import ordered_map
from datacache.conversion.pipeline import Report
from datacache.conversion.source import Files, Part
from datacache.conversion.splits import stem
from datacache.core.concurrency import PerProcess
from datacache.core.errors import AnnotationError
from datacache.reader.snapshot import Snapshot

_BATCH = 16
_WRITES = 8


class _Done(NamedTuple):
    """What a worker made of an image; `annotation` is None where nothing could be made of it."""

    annotation: Annotation | None
    problems: tuple[Problem, ...]
    stored: Stored | None
    extension: str


def process_images(
    snapshot: Snapshot,
    images: Iterable[Image],
    operations: Operations,
    objects: ObjectWriter,
    source: int,
    *,
    processes: int | None,
    report: Report,
) -> Iterator[Image]:
    """The same images after the operations; those that cannot be decoded are left out and reported."""
    under_way: deque[list[Image]] = deque()
    images = iter(images)

    def tasks() -> Iterator[list[Image]]:
        while batch := list(islice(images, _BATCH)):
            under_way.append(batch)
            yield batch

    worker = _Worker(snapshot, operations, objects)
    for results in ordered_map(worker, tasks(), processes=processes):
        for image, done in zip(under_way.popleft(), results, strict=True):
            report.add(done.problems)
            if done.annotation is None or done.stored is None:
                continue
            entry = image.entry._replace(
                size_bytes=done.stored.size_bytes,
                etag=done.stored.hex,
                version="",
                source=source,
                key=done.stored.key.encode("utf-8", "surrogateescape"),
            )
            path = stem(image.annotation.path) + done.extension
            yield image._replace(annotation=done.annotation._replace(path=path), entry=entry)


class _Worker:
    """Changes and stores images. Made in the parent, used in each worker process."""

    def __init__(self, snapshot: Snapshot, operations: Operations, objects: ObjectWriter) -> None:
        self._files = Files(snapshot)
        self._operations, self._objects = operations, objects
        # A store takes its time for each object (a folder waits for the disk): several are under way at once.
        self._threads = PerProcess(lambda: ThreadPoolExecutor(_WRITES, "store"))

    def work(self, batch: list[Image]) -> list[_Done]:
        """What became of each."""
        parts = [Part(image.row, image.entry.size_bytes) for image in batch]
        coming = [
            self._begin(bytes(data), image.annotation)
            for image, data in zip(batch, self._files.read(parts), strict=True)
        ]
        self._files.done()
        return [done if storing is None else done._replace(stored=storing.result()) for done, storing in coming]

    def _begin(self, data: bytes, annotation: Annotation) -> tuple[_Done, Future[Stored] | None]:
        try:
            result = apply(data, annotation, self._operations)
        except AnnotationError as exc:
            message = f"{exc.message}; the image is left out"
            problem = Problem(exc.code or "image-broken", "skipped", annotation.path, 0, message)
            return _Done(None, (problem,), None, ""), None
        storing = self._threads.get().submit(self._objects.put, result.data)
        return _Done(result.annotation, tuple(result.problems), None, result.extension), storing


__all__ = ["Operations", "Processed", "apply", "parse_operations"]
_GREY = 114  # what YOLO pads with
_LINEAR = PIL.Image.Resampling.BILINEAR
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
                (step.width, step.height), PIL.Image.Transform.AFFINE, step.inverse(), _LINEAR, fillcolor=_grey(pixels)
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


def _to_image(pixels: Pixels) -> PIL.Image.Image:
    """For Pillow, which interpolates 16 bits only as floats."""
    return PIL.Image.fromarray(np.ascontiguousarray(pixels, np.float32 if pixels.dtype == np.uint16 else None))


def _from_image(image: PIL.Image.Image, like: Pixels) -> Pixels:
    pixels = np.asarray(image)
    return pixels if pixels.dtype == like.dtype else np.rint(pixels).clip(0, 65535).astype(like.dtype)


def _grey(pixels: Pixels) -> int | tuple[int, ...]:
    if pixels.ndim == 2:
        return _GREY if pixels.dtype == np.uint8 else _GREY * 257
    return ((_GREY, 255), (_GREY,) * 3, (_GREY, _GREY, _GREY, 255))[pixels.shape[2] - 2]
