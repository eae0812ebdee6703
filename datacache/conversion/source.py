"""Find the annotation of each image of a snapshot, in a file beside the image or in one for many; and read many files.

Used by the index and by image operations. `AnnotationSource` belongs to one thread; it goes through the manifest twice,
and keeps one number an image. `Files` reads small files of a snapshot in order: from this node where it has them, ahead
of time in threads otherwise, so a cold data set costs the store's throughput and not its latency times the number of
files. It has one consumer.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from datacache.annotations.formats import coco, keras_yolo, metadata
from datacache.annotations.image_header import HEAD_BYTES, TAIL_BYTES
from datacache.annotations.layout import Layout, detect, read_class_list, text
from datacache.annotations.model import FORMATS, Draft, Problem, quote, unusable_file
from datacache.annotations.pairing import Pairing, is_image, pair_leftovers
from datacache.conversion.drafts import Drafts, NamedImages, Said
from datacache.core.concurrency import PerProcess
from datacache.core.errors import AnnotationError
from datacache.core.ids import BLOCK_BYTES, ObjectId, object_id
from datacache.manifest.model import Entry
from datacache.reader.snapshot import Snapshot

_NONE = -1
_LEFTOVERS_LIMIT = 200_000
"""So many unpaired images or annotations are looked at again, by name alone; more are no export that lies elsewhere."""


class Part(NamedTuple):
    """What to read of a row: all of it, a part of it, or of a large one only its beginning and end (an image's header
    and end)."""

    row: int
    stop: int
    start: int = 0
    ends_only: bool = False
    object: ObjectId | None = None
    """Its object's id, where whoever asks has computed it."""


class Item(NamedTuple):
    """One image to read, and where its annotation is: in a file of its own, or in a draft from a file of many."""

    path: str
    image: Part
    annotation: Part | None = None
    file: str = ""
    """The path of the annotation's file."""
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
        self.classes, self.pose, problems, self.classes_given = read_class_list(self.read, self.layout, classes)
        self.problems: list[Problem] = [*problems, *self.layout.problems()]
        """Those of no image. Complete when `images` has come to its end."""

    def read(self, path: bytes) -> bytes:
        """Return all bytes of a file."""
        return self._snapshot.read(text(path))

    def fingerprint(self) -> bytes:
        """Return what, besides an image and its own annotation, decides how the annotation is read."""
        return repr((self.format, self.classes, self.pose)).encode()

    def images(self) -> Iterator[Item]:
        """Yield all images in the order of their paths."""
        suffix, drafts = FORMATS[self.format].suffix, self._drafts()
        if suffix:
            yield from self._with_files(suffix, drafts)
            return
        for row, entry in enumerate(self._manifest.entries()):
            if is_image(entry.path):
                yield Item(text(entry.path), self._part(row, entry), draft=drafts.pop(entry.path, None))

    def _part(self, row: int, entry: Entry) -> Part:
        return Part(row, entry.size_bytes, object=object_id(self._manifest.object_ref(entry)))

    def _with_files(self, suffix: bytes, drafts: dict[bytes, Said]) -> Iterator[Item]:
        manifest, pairing = self._manifest, Pairing(self._manifest, suffix)
        annotations = array("q")  # of each image, the row of its annotation
        claims = bytearray(manifest.rows)  # of each row, how many images it is the annotation of (2: or more)
        for image in manifest.paths():
            if is_image(image):
                path = pairing.annotation_of(image)
                row = None if path is None else manifest.find(path)
                annotations.append(_NONE if row is None else row)
                if row is not None:
                    claims[row] = min(2, claims[row] + 1)
        self._pair_leftovers(pairing, annotations, claims)
        at = 0
        for row, entry in enumerate(manifest.entries()):
            if is_image(entry.path):
                annotation, at = annotations[at], at + 1
                item = Item(text(entry.path), self._part(row, entry), draft=drafts.get(entry.path))
                if annotation != _NONE:
                    other = manifest.entry(annotation)
                    rivals = pairing.images_of(other.path) if claims[annotation] > 1 else ()
                    item = item._replace(annotation=self._part(annotation, other), file=text(other.path), rivals=rivals)
                yield item
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

    def _drafts(self) -> dict[bytes, Said]:
        """Return what the files that speak of many images say, by image."""
        drafts = Drafts(NamedImages(self._manifest, self.layout), split_files=not self.layout.image_sets)
        folders = dict.fromkeys((b"", *self.layout.image_folders))
        labels = [folder + metadata.NAME for folder in folders]
        for file in (*self.layout.lists, *(path for path in labels if self._manifest.find(path) is not None)):
            drafts.add(file, self._parsed(file))
        found = drafts.finish()
        self.problems += drafts.problems
        return found

    def _parsed(self, file: bytes) -> list[tuple[Draft, list[Problem]]]:
        data, name = self.read(file), text(file)
        try:
            if metadata.is_metadata(name):
                found = metadata.parse(data, name)
            elif self.format == "keras-yolo3":
                found = keras_yolo.parse(data, name, self.classes)
            else:
                found = coco.parse(data, name)
        except AnnotationError as exc:
            self.problems.append(unusable_file(exc))
            return []
        self.problems += found.problems
        if not self.classes:
            self.classes = found.classes
        return found.images


_THREADS, _AHEAD, _AHEAD_BYTES = 16, 64, 64 * 2**20
_UNMAP_BYTES = 64 * 2**20
Data = bytes | memoryview


class Files:
    """Reads rows of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._threads = PerProcess(lambda: ThreadPoolExecutor(_THREADS, "read"))

    def read(self, parts: Iterable[Part]) -> Iterator[Data]:
        """Yield the bytes of each part, in order; some are on their way while one is used. Raise the store's errors.

        The caller lets go of the bytes before it asks for the next ones."""
        coming: deque[tuple[int, Data | Future[Data]]] = deque()
        held = viewed = 0
        parts = iter(parts)
        waiting = next(parts, None)
        while waiting is not None or coming:
            while waiting is not None and len(coming) < _AHEAD and (not coming or held < _AHEAD_BYTES):
                here, size = self._here(waiting), waiting.stop - waiting.start
                held += size
                coming.append((size, self._threads.get().submit(self._fetch, waiting) if here is None else here))
                waiting = next(parts, None)
            size, data = coming.popleft()
            held -= size
            viewed += size
            yield data.result() if isinstance(data, Future) else data
            del data
            if viewed >= _UNMAP_BYTES:
                viewed = 0
                self.done()

    def done(self) -> None:
        """Let go of what was read so far."""
        self._snapshot.rows.unmap_pages()

    def _here(self, part: Part) -> memoryview | None:
        if part.object is not None and part.stop:
            return self._snapshot.rows.view_object(part.object, part.stop)
        return self._snapshot.rows.read_local(part.row, part.start, part.stop)

    def _fetch(self, part: Part) -> Data:
        row, stop = part.row, part.stop
        if part.ends_only and stop > BLOCK_BYTES:
            tail = self._snapshot.rows.read_row(row, stop - TAIL_BYTES, stop)
            return b"".join([self._snapshot.rows.read_row(row, 0, HEAD_BYTES), tail])
        return self._snapshot.rows.read_row(row, part.start, stop)
