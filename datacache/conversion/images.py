"""Image operations over a stream of images: decoded, changed and stored in worker processes, in order.

Used by the pipeline when a conversion is asked to resize, crop, rotate or flip. New images go to objects storage
under the hash of their bytes, so a conversion that was killed finds what it had written, and the same image is stored
once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

from datacache.annotations.model import Annotation, Problem
from datacache.catalog.objects import ObjectWriter, Stored
from datacache.conversion.image import Image
from datacache.conversion.image_ops import apply
from datacache.conversion.operations import Operations
from datacache.conversion.parallel import ordered_map
from datacache.conversion.reading import Files, Part
from datacache.conversion.report import Report
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
