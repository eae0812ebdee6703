"""Where the files of each format lie and what is in them: one target a format, fed image by image.

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
from typing import IO, Generic, Protocol, TypeVar

from datacache.annotations.classes import write_classes
from datacache.annotations.formats import coco, keras_yolo, metadata, voc, yolo
from datacache.annotations.model import Annotation, Problem
from datacache.conversion.splits import stem
from datacache.core.errors import UsageError

_AT_A_TIME = 200
T = TypeVar("T")
File = tuple[str, bytes]


class Target(Protocol):
    """One format being written. `annotation.path` is the image's path in the result, as `image_path` gave it."""

    @property
    def lists_paths(self) -> bool:
        """Whether a file has a path a line, which no path with a line break can be in."""
        ...

    def image_path(self, relative: str, split: str) -> str:
        """Where an image goes. `relative` is unique up to its extension."""
        ...

    def add(self, annotation: Annotation, split: str, *, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        """The files that belong to this image alone. `annotated` is false for a background image without annotation."""
        ...

    def finish(self) -> Iterator[tuple[File, Sequence[Problem]]]:
        """The files that belong to all of them."""
        ...


class Yolo:
    """Ultralytics: `labels` beside `images`, and `data.yaml`."""

    lists_paths = False

    def __init__(self, classes: Sequence[str], splits: Sequence[str]) -> None:
        self._classes, self._splits = classes, splits
        self._ids = {name: number for number, name in enumerate(classes)}
        self._used: set[str] = set()
        yolo.data_yaml(dict.fromkeys(splits, ""), ())  # before any work, it refuses what no split can be called

    def image_path(self, relative: str, split: str) -> str:
        """See `Target`."""
        return _join("images", split, relative)

    def add(self, annotation: Annotation, split: str, *, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        """See `Target`."""
        self._used.add(split)
        if not annotated:
            return (), ()
        label = f"labels{stem(annotation.path).removeprefix('images')}.txt"
        return [(label, yolo.write(annotation, self._ids))], ()

    def finish(self) -> Iterator[tuple[File, Sequence[Problem]]]:
        """See `Target`."""
        # A folder without images is none in a snapshot, and Ultralytics refuses to start without it.
        folders = {split: f"images/{split}" for split in self._splits if split in self._used}
        data = yolo.data_yaml(folders or {"train": "images", "val": "images"}, self._classes)
        yield ("data.yaml", data), ()


class Darknet:
    """Plain Darknet: labels beside the images, lists of images, `obj.names` and `obj.data`."""

    lists_paths = True

    def __init__(self, classes: Sequence[str], splits: Sequence[str]) -> None:
        yolo.darknet_data(0, dict.fromkeys(splits, ""))  # before any work, it refuses what no split can be called
        self._classes, self._splits = classes, splits
        self._ids = {name: number for number, name in enumerate(classes)}
        self._images = Spool[tuple[str, str]]()

    def image_path(self, relative: str, split: str) -> str:
        """See `Target`."""
        return _join("obj_train_data", split, relative)

    def add(self, annotation: Annotation, split: str, *, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        """See `Target`."""
        self._images.append((split, annotation.path))
        if not annotated:
            return (), ()
        return [(f"{stem(annotation.path)}.txt", yolo.write(annotation, self._ids))], ()

    def finish(self) -> Iterator[tuple[File, Sequence[Problem]]]:
        """See `Target`."""
        yield ("obj.names", write_classes(self._classes)), ()
        lists = {split: f"{split}.txt" for split in self._splits} or {"train": "train.txt"}
        yield ("obj.data", yolo.darknet_data(len(self._classes), lists)), ()
        for split in self._splits or ("",):
            yield (f"{split or 'train'}.txt", _lines(f"./{path}" for of, path in self._images if of == split)), ()


class Coco:
    """COCO detection: one JSON file a split."""

    lists_paths = False

    def __init__(self, classes: Sequence[str], splits: Sequence[str]) -> None:
        self._classes, self._splits = classes, splits
        self._annotations = Spool[tuple[str, Annotation]]()

    def image_path(self, relative: str, split: str) -> str:
        """See `Target`."""
        return _join("images", split, relative)

    def add(self, annotation: Annotation, split: str, *, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        """See `Target`."""
        # A file name in COCO is relative to the folder of its split's images.
        name = annotation.path.removeprefix(_join("images", split, ""))
        self._annotations.append((split, annotation._replace(path=name)))
        return (), ()

    def finish(self) -> Iterator[tuple[File, Sequence[Problem]]]:
        """See `Target`."""
        for split in self._splits or ("",):
            chosen = (annotation for of, annotation in self._annotations if of == split)
            data = b"".join(coco.write(chosen, self._classes))
            yield (f"annotations/instances{f'_{split}' if split else ''}.json", data), ()


class KerasYolo:
    """keras-yolo3: one line an image, and the classes' names."""

    lists_paths = True

    def __init__(self, classes: Sequence[str], splits: Sequence[str]) -> None:
        wrong = next((split for split in splits if split.lower() == "classes"), None)
        if wrong is not None:
            raise UsageError(f"a split cannot be called {wrong!r}: classes.txt is the list of classes")
        self._classes, self._splits = classes, splits
        self._ids = {name: number for number, name in enumerate(classes)}
        self._lines = Spool[tuple[str, bytes]]()

    def image_path(self, relative: str, split: str) -> str:
        """See `Target`."""
        return _join("images", "", relative)

    def add(self, annotation: Annotation, split: str, *, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        """See `Target`."""
        line, problems = keras_yolo.write_line(annotation, self._ids)
        self._lines.append((split, line))
        return (), problems

    def finish(self) -> Iterator[tuple[File, Sequence[Problem]]]:
        """See `Target`."""
        yield ("classes.txt", write_classes(self._classes)), ()
        for split in self._splits or ("",):
            yield (f"{split or 'train'}.txt", b"".join(line for of, line in self._lines if of == split)), ()


class Voc:
    """Pascal VOC: one XML file an image, and the lists of the splits."""

    def __init__(self, splits: Sequence[str], *, origin: int) -> None:
        self._splits, self._origin = splits, origin
        self.lists_paths = bool(splits)
        self._images = Spool[tuple[str, str]]()

    def image_path(self, relative: str, split: str) -> str:
        """See `Target`."""
        return _join("JPEGImages", "", relative)

    def add(self, annotation: Annotation, split: str, *, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        """See `Target`."""
        name = stem(annotation.path).removeprefix("JPEGImages/")
        self._images.append((split, name))
        if not annotated:
            return (), ()
        return [(f"Annotations/{name}.xml", voc.write(annotation, origin=self._origin))], ()

    def finish(self) -> Iterator[tuple[File, Sequence[Problem]]]:
        """See `Target`."""
        for split in self._splits:
            names = (name for of, name in self._images if of == split)
            yield (f"ImageSets/Main/{split}.txt", _lines(names)), ()


class _WithLabels:
    """A target, and the labels of whole images beside it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._labels = Spool[tuple[str, tuple[str, ...]]]()

    @property
    def lists_paths(self) -> bool:
        return self._target.lists_paths

    def image_path(self, relative: str, split: str) -> str:
        return self._target.image_path(relative, split)

    def add(self, annotation: Annotation, split: str, *, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        if annotation.labels:
            self._labels.append((annotation.path, annotation.labels))
        return self._target.add(annotation, split, annotated=annotated)

    def finish(self) -> Iterator[tuple[File, Sequence[Problem]]]:
        yield from self._target.finish()
        data = b"".join(metadata.write(self._labels))
        if data:
            yield (metadata.NAME.decode(), data), ()


def open_target(format: str, classes: Sequence[str], splits: Sequence[str], *, origin: int) -> Target:
    """The target of a format named as in `--to`. `UsageError` for a split that would be called like something else."""
    if format == "voc":
        return _WithLabels(Voc(splits, origin=origin))
    kinds: dict[str, Callable[[Sequence[str], Sequence[str]], Target]] = {
        "yolo": Yolo,
        "darknet": Darknet,
        "coco": Coco,
        "keras-yolo3": KerasYolo,
    }
    return _WithLabels(kinds[format](classes, splits))


FORMATS = ("yolo", "darknet", "coco", "keras-yolo3", "voc")


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


def _join(folder: str, split: str, relative: str) -> str:
    return f"{folder}/{split}/{relative}" if split else f"{folder}/{relative}"


def _lines(names: Iterable[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode("utf-8", "surrogateescape")
