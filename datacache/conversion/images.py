"""Image operations over a stream of images: decoded, changed and stored in worker processes, in order.

Used by the pipeline when a conversion is asked to resize, crop, rotate or flip. New images go to objects storage
under the hash of their bytes, so a conversion that was killed finds what it had written, and the same image is stored
once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from datacache.annotations.model import Annotation, Problem
from datacache.catalog.objects import ObjectWriter, Stored
from datacache.conversion.image_ops import apply
from datacache.conversion.operations import Operations
from datacache.conversion.parallel import ordered_map
from datacache.conversion.reading import Files, Part
from datacache.conversion.report import Report
from datacache.conversion.splits import stem
from datacache.core.errors import AnnotationError
from datacache.manifest.model import Entry
from datacache.reader.snapshot import Snapshot

_BATCH = 16


class Image(NamedTuple):
    """An image on its way through a conversion."""

    annotation: Annotation
    entry: Entry
    """Its entry in the source, or in the result once it was written anew."""
    row: int
    """Its row in the source."""
    split: str
    annotated: bool


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

    arguments = (snapshot, operations, objects)
    for results in ordered_map(_process, tasks(), begin=_begin, arguments=arguments, processes=processes):
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


_worker: tuple[Files, Operations, ObjectWriter]
"""Of this process: set by `_begin` before any task."""


def _begin(snapshot: Snapshot, operations: Operations, objects: ObjectWriter) -> None:
    global _worker
    _worker = Files(snapshot), operations, objects


def _process(batch: list[Image]) -> list[_Done]:
    files, operations, objects = _worker
    parts = [Part(image.row, image.entry.size_bytes) for image in batch]
    return [
        _process_one(bytes(data), image.annotation, operations, objects)
        for image, data in zip(batch, files.read(parts), strict=True)
    ]


def _process_one(data: bytes, annotation: Annotation, operations: Operations, objects: ObjectWriter) -> _Done:
    try:
        result = apply(data, annotation, operations)
    except AnnotationError as exc:
        message = f"{exc.message}; the image is left out"
        return _Done(None, (Problem(exc.code or "image-broken", "skipped", annotation.path, 0, message),), None, "")
    return _Done(result.annotation, tuple(result.problems), objects.put(result.data), result.extension)
