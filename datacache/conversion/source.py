"""Find the annotation of each image of a snapshot, in a file beside the image or in one for many; and read many files.

Used by the index and by image operations. `AnnotationSource` belongs to one thread; it goes through the manifest twice,
and keeps one number an image. `Files` reads small files of a snapshot in order: from this node where it has them, ahead
of time in threads otherwise, so a cold data set costs the store's throughput and not its latency times the number of
files. It has one consumer.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import NamedTuple

from datacache.annotations.formats import coco, keras_yolo, metadata
from datacache.annotations.image_header import HEAD_BYTES, TAIL_BYTES
from datacache.annotations.layout import Layout, detect, read_class_list, text
from datacache.annotations.model import FORMATS, Draft, DraftFile, Problem
from datacache.annotations.pairing import Pairing, is_image, pair_leftovers
from datacache.annotations.problems import quote, unusable_file
from datacache.conversion.drafts import Drafts, NamedImages, Said
from datacache.core.concurrency import PerProcess
from datacache.core.errors import AnnotationError
from datacache.core.ids import BLOCK_BYTES, ObjectId
from datacache.manifest.model import Entry
from datacache.reader.snapshot import Snapshot

_NONE = -1
_LEFTOVERS_LIMIT = 200_000
"""So many unpaired images or annotations are looked at again, by name alone; more are no export that lies elsewhere."""


class Found(NamedTuple):
    """An image and its annotation, if it has one: a row of the manifest, or a draft from a file of many."""

    row: int
    entry: Entry
    annotation: int | None = None
    rivals: tuple[bytes, ...] = ()
    """The images that the annotation fits, where they are several."""
    draft: Said | None = None
    """What a file of many says of it: all, or beside an annotation of its own the labels of the whole image."""


class AnnotationSource:
    """The annotations of one snapshot, found but not yet read. `classes` are names for ids that have none. Raises
    `UsageError` where they cannot be told."""

    def __init__(self, snapshot: Snapshot, format: str | None, classes: Sequence[str] | None = None) -> None:
        self._snapshot = snapshot
        self._manifest = snapshot.manifest
        self.layout: Layout = detect(self._manifest, self.read, format=format)
        self.format = self.layout.format
        listed = read_class_list(self.read, self.layout, classes)
        self.classes, self.pose, self.classes_given = listed.names, listed.pose, listed.given
        self.problems: list[Problem] = [*listed.problems, *self.layout.problems()]
        """Those of no image. Complete when `images` has come to its end."""

    def fingerprint(self) -> bytes:
        """What, besides an image and its own annotation, decides how the annotation is read."""
        return repr((self.format, self.classes, self.pose)).encode()

    def images(self) -> Iterator[Found]:
        """All images in the order of their paths."""
        suffix = FORMATS[self.format].suffix
        drafts = self._drafts()
        return self._with_files(suffix, drafts) if suffix else self._with_drafts(drafts)

    # --- an annotation file an image -------------------------------------------------------------------------------

    def _with_files(self, suffix: bytes, drafts: dict[bytes, Said]) -> Iterator[Found]:
        manifest, pairing = self._manifest, Pairing(self._manifest, suffix)
        annotations = array("q")  # of each image, the row of its annotation
        claims = bytearray(manifest.rows)  # of each row, how many images it is the annotation of (2: or more)
        for image in manifest.paths():
            if is_image(image):
                row = pairing.annotation_row(image)
                annotations.append(_NONE if row is None else row)
                if row is not None:
                    claims[row] = min(2, claims[row] + 1)
        self._pair_leftovers(pairing, annotations, claims)
        at = 0
        for row, entry in enumerate(manifest.entries()):
            if is_image(entry.path):
                annotation, at = annotations[at], at + 1
                draft = drafts.get(entry.path) if drafts else None
                if annotation == _NONE:
                    yield Found(row, entry, draft=draft)
                elif claims[annotation] < 2:
                    yield Found(row, entry, annotation, draft=draft)
                else:
                    rivals = pairing.images_of(manifest.path(annotation))
                    yield Found(row, entry, annotation, rivals, draft)
            elif not claims[row] and self.layout.is_annotation(entry.path):
                message = "there is no image for this annotation; it is left out"
                self.problems.append(Problem("annotation-without-image", "skipped", text(entry.path), 0, message))

    def _pair_leftovers(self, pairing: Pairing, annotations: array[int], claims: bytearray) -> None:
        """Bring together what only its name brings together: annotations exported from a tool lie anywhere. Not those
        that lie where their image would have its place: it is missing, and an image elsewhere is another."""
        if _NONE not in annotations:
            return
        images: dict[bytes, int] = {}
        free: list[bytes] = []
        settled: set[bytes] = set()  # folders of annotations that have their images where they belong
        at = 0
        for row, path in enumerate(self._manifest.paths()):
            if is_image(path):
                if annotations[at] == _NONE:
                    images[path] = at
                at += 1
            elif claims[row]:
                settled.add(path[: path.rfind(b"/") + 1])
            elif self.layout.is_annotation(path):
                free.append(path)
            if len(images) > _LEFTOVERS_LIMIT or len(free) > _LEFTOVERS_LIMIT:
                return
        for annotation, image in pair_leftovers(images, free).items() if free else ():
            if annotation[: annotation.rfind(b"/") + 1] in settled or not pairing.may_lie_apart(annotation, image):
                continue
            found = self._manifest.find(annotation)
            assert found is not None
            annotations[images[image]] = found
            claims[found] = 1
            message = f"{quote(text(image))} is taken for its image, the only one of this name"
            self.problems.append(Problem("image-by-name", "noted", text(annotation), 0, message))

    # --- a file for many images ------------------------------------------------------------------------------------

    def _with_drafts(self, drafts: dict[bytes, Said]) -> Iterator[Found]:
        for row, entry in enumerate(self._manifest.entries()):
            if is_image(entry.path):
                yield Found(row, entry, draft=drafts.pop(entry.path, None))

    def _drafts(self) -> dict[bytes, Said]:
        """What the files that speak of many images say, by image."""
        drafts = Drafts(NamedImages(self._manifest, self.layout), split_files=not self.layout.image_sets)
        folders = dict.fromkeys((b"", *self.layout.image_folders))
        labels = [folder + metadata.NAME for folder in folders]
        for file in (*self.layout.lists, *(path for path in labels if self._manifest.find(path) is not None)):
            drafts.add(file, self._parsed(file))
        found = drafts.finish()
        self.problems += drafts.problems
        return found

    def _parsed(self, file: bytes) -> list[tuple[Draft, list[Problem]]]:
        parse: Callable[[bytes, str], DraftFile] = coco.parse
        if metadata.is_metadata(text(file)):
            parse = metadata.parse
        elif self.format == "keras-yolo3":
            parse = partial(keras_yolo.parse, classes=self.classes)
        try:
            found = parse(self.read(file), text(file))
        except AnnotationError as exc:
            self.problems.append(unusable_file(exc))
            return []
        self.problems += found.problems
        if not self.classes:
            self.classes = found.classes
        return found.images

    def read(self, path: bytes) -> bytes:
        """All bytes of a file."""
        return self._snapshot.read(text(path))


_THREADS = 16
_AHEAD = 32
Data = bytes | memoryview


class Part(NamedTuple):
    """What to read of a row: all of it, or of a large one only its beginning and end (an image's header and end)."""

    row: int
    size_bytes: int
    ends_only: bool = False
    object: ObjectId | None = None
    """Its object's id, where whoever asks has computed it."""


class Files:
    """Reads rows of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._threads = PerProcess(lambda: ThreadPoolExecutor(_THREADS, "read"))

    def read(self, parts: Iterable[Part]) -> Iterator[Data]:
        """The bytes of each, in order. Raises the store's errors."""
        coming: deque[Data | Future[Data]] = deque()
        parts = iter(parts)
        while True:
            for part in islice(parts, _AHEAD - len(coming)):
                here = self._here(part)
                coming.append(self._threads.get().submit(self._fetch, part) if here is None else here)
            if not coming:
                return
            data = coming.popleft()
            yield data.result() if isinstance(data, Future) else data

    def done(self) -> None:
        """What was read so far is not needed any more."""
        self._snapshot.unmap_pages()

    def _here(self, part: Part) -> memoryview | None:
        if part.object is not None and part.size_bytes:
            return self._snapshot.view_object(part.object, part.size_bytes)
        return self._snapshot.read_local(part.row, 0, part.size_bytes)

    def _fetch(self, part: Part) -> Data:
        row, size_bytes = part.row, part.size_bytes
        if part.ends_only and size_bytes > BLOCK_BYTES:
            tail = self._snapshot.read_row(row, size_bytes - TAIL_BYTES, size_bytes)
            return b"".join([self._snapshot.read_row(row, 0, HEAD_BYTES), tail])
        return self._snapshot.read_row(row, 0, size_bytes)
