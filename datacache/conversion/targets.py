"""Where the files of each format lie and what is in them: one `Target` a format, fed image by image.

Used by the pipeline. A target knows paths and bytes, nothing of snapshots or stores. Layouts:

    yolo         images/[SPLIT/]x.jpg  labels/[SPLIT/]x.txt  data.yaml               (Ultralytics)
    darknet      obj_train_data/[SPLIT/]x.jpg and x.txt  obj.names  obj.data  SPLIT.txt
    coco         images/[SPLIT/]x.jpg  annotations/instances[_SPLIT].json
    keras-yolo3  images/x.jpg  SPLIT.txt  classes.txt
    voc          JPEGImages/x.jpg  Annotations/x.xml  ImageSets/Main/SPLIT.txt

Labels of whole images, which none of these can hold, are in a `metadata.jsonl` beside them.

One thread. Everything is deterministic: the same annotations in the same order give the same bytes.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, Generic, TypeVar

from datacache.annotations.classes import write_classes
from datacache.annotations.formats import coco, keras_yolo, metadata, voc, yolo
from datacache.annotations.model import Annotation, Problem
from datacache.conversion.model import stem
from datacache.core.errors import UsageError

_AT_A_TIME = 200
T = TypeVar("T")
File = tuple[str, bytes]


class Target:
    """One format being written; a subclass says where images lie, what a label file holds, and what comes last."""

    folder = "images"
    """Of the images."""
    split_folders = True
    """Images of each split lie in a folder of their own."""
    lists_paths = False
    """A file has a path a line, which no path with a line break can be in."""

    def __init__(self, classes: Sequence[str], splits: Sequence[str], origin: int) -> None:
        """Raise `UsageError` for a split that would be called like something else."""
        self._classes, self._splits, self._origin = classes, splits, origin
        self._ids = {name: number for number, name in enumerate(classes)}
        self._kept = Spool[tuple[str, Any]]()
        """The split of each image and what `finish` needs of it."""
        self._labels = Spool[tuple[str, tuple[str, ...]]]()

    def image_path(self, relative: str, split: str) -> str:
        """Return where an image goes. `relative` is unique up to its extension."""
        return f"{self.folder}/{split}/{relative}" if split and self.split_folders else f"{self.folder}/{relative}"

    def add(self, annotation: Annotation, split: str, *, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        """Return the files that belong to this image alone. `annotation.path` is the image's path in the result, as
        `image_path` gave it; `annotated` is false for a background image without annotation."""
        if annotation.labels:
            self._labels.append((annotation.path, annotation.labels))
        return self._add(annotation, split, annotated)

    def finish(self) -> Iterator[File]:
        """Yield the files that belong to all images."""
        yield from self._finish()
        data = b"".join(metadata.write(self._labels))
        if data:
            yield metadata.NAME.decode(), data

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        raise NotImplementedError

    def _finish(self) -> Iterator[File]:
        raise NotImplementedError

    def _by_split(self) -> Iterator[tuple[str, Iterator[Any]]]:
        """Yield each split (without splits: '') and what was kept of its images."""
        for split in self._splits or ("",):
            yield split, (kept for of, kept in self._kept if of == split)


class _Yolo(Target):
    def __init__(self, classes: Sequence[str], splits: Sequence[str], origin: int) -> None:
        super().__init__(classes, splits, origin)
        self._used: set[str] = set()
        yolo.data_yaml(dict.fromkeys(splits, ""), ())  # before any work, it refuses what no split can be called

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        self._used.add(split)
        label = f"labels{stem(annotation.path).removeprefix('images')}.txt"
        return [(label, yolo.write(annotation, self._ids))] if annotated else [], ()

    def _finish(self) -> Iterator[File]:
        # A folder without images is none in a snapshot, and Ultralytics refuses to start without it.
        folders = {split: f"images/{split}" for split in self._splits if split in self._used}
        yield "data.yaml", yolo.data_yaml(folders or {"train": "images", "val": "images"}, self._classes)


class _Darknet(Target):
    folder = "obj_train_data"
    lists_paths = True

    def __init__(self, classes: Sequence[str], splits: Sequence[str], origin: int) -> None:
        super().__init__(classes, splits, origin)
        yolo.darknet_data(0, dict.fromkeys(splits, ""))  # as in _Yolo

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        self._kept.append((split, annotation.path))
        return [(f"{stem(annotation.path)}.txt", yolo.write(annotation, self._ids))] if annotated else [], ()

    def _finish(self) -> Iterator[File]:
        yield "obj.names", write_classes(self._classes)
        lists = {split: f"{split}.txt" for split in self._splits} or {"train": "train.txt"}
        yield "obj.data", yolo.darknet_data(len(self._classes), lists)
        for split, paths in self._by_split():
            yield f"{split or 'train'}.txt", _lines(f"./{path}" for path in paths)


class _Coco(Target):
    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        # A file name in COCO is relative to the folder of its split's images.
        name = annotation.path.removeprefix(self.image_path("", split))
        self._kept.append((split, annotation._replace(path=name)))
        return (), ()

    def _finish(self) -> Iterator[File]:
        for split, kept in self._by_split():
            data = b"".join(coco.write(kept, self._classes))
            yield f"annotations/instances{f'_{split}' if split else ''}.json", data


class _KerasYolo(Target):
    split_folders = False
    lists_paths = True

    def __init__(self, classes: Sequence[str], splits: Sequence[str], origin: int) -> None:
        super().__init__(classes, splits, origin)
        wrong = next((split for split in splits if split.lower() == "classes"), None)
        if wrong is not None:
            raise UsageError(f"a split cannot be called {wrong!r}: classes.txt is the list of classes")

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        line, problems = keras_yolo.write_line(annotation, self._ids)
        self._kept.append((split, line))
        return (), problems

    def _finish(self) -> Iterator[File]:
        yield "classes.txt", write_classes(self._classes)
        for split, lines in self._by_split():
            yield f"{split or 'train'}.txt", b"".join(lines)


class _Voc(Target):
    folder = "JPEGImages"
    split_folders = False

    def __init__(self, classes: Sequence[str], splits: Sequence[str], origin: int) -> None:
        super().__init__(classes, splits, origin)
        self.lists_paths = bool(splits)

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        name = stem(annotation.path).removeprefix("JPEGImages/")
        self._kept.append((split, name))
        return [(f"Annotations/{name}.xml", voc.write(annotation, origin=self._origin))] if annotated else [], ()

    def _finish(self) -> Iterator[File]:
        for split, names in self._by_split() if self._splits else ():
            yield f"ImageSets/Main/{split}.txt", _lines(names)


TARGETS: dict[str, Callable[[Sequence[str], Sequence[str], int], Target]] = {
    "yolo": _Yolo,
    "darknet": _Darknet,
    "coco": _Coco,
    "keras-yolo3": _KerasYolo,
    "voc": _Voc,
}
"""The formats as `--to` names them."""


class Spool(Generic[T]):
    """A list on disk (an unnamed file under `TMPDIR`) that can be read again and again: a million annotations are no
    gigabytes of memory. One thread."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - gone with this object
        self._part: list[T] = []

    def append(self, item: T) -> None:
        """Add at the end."""
        self._part.append(item)
        if len(self._part) >= _AT_A_TIME:
            self._flush()

    def __iter__(self) -> Iterator[T]:
        if self._part:
            self._flush()
        at, end = 0, self._file.seek(0, 2)
        while at < end:
            self._file.seek(at)
            part: list[T] = pickle.load(self._file)  # noqa: S301 - our own unnamed file
            at = self._file.tell()
            yield from part

    def _flush(self) -> None:
        self._file.seek(0, 2)
        pickle.dump(self._part, self._file, pickle.HIGHEST_PROTOCOL)
        self._part = []


def _lines(names: Iterable[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode("utf-8", "surrogateescape")
