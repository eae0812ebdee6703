"""YOLO as Ultralytics and as Darknet lay it out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datacache.annotations.classes import write_classes
from datacache.annotations.formats import yolo
from datacache.annotations.model import Annotation, Problem
from datacache.conversion.model import stem
from datacache.conversion.targets.base import About, File, Target, lines


class Yolo(Target):
    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._used: set[str] = set()
        yolo.data_yaml(dict.fromkeys(about.splits, ""), ())  # before any work, it refuses what no split can be called

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        self._used.add(split)
        label = f"labels{stem(annotation.path).removeprefix('images')}.txt"
        return [(label, yolo.write(annotation, self._ids))] if annotated else [], ()

    def _finish(self) -> Iterator[File]:
        # A folder without images is none in a snapshot, and Ultralytics refuses to start without it.
        folders = {split: f"images/{split}" for split in self._splits if split in self._used}
        yield "data.yaml", yolo.data_yaml(folders or {"train": "images", "val": "images"}, self._classes)


class Darknet(Target):
    folder = "obj_train_data"
    lists_paths = True

    def __init__(self, about: About) -> None:
        super().__init__(about)
        yolo.darknet_data(0, dict.fromkeys(about.splits, ""))  # as in Yolo

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        self._kept.append((split, annotation.path))
        return [(f"{stem(annotation.path)}.txt", yolo.write(annotation, self._ids))] if annotated else [], ()

    def _finish(self) -> Iterator[File]:
        yield "obj.names", write_classes(self._classes)
        lists = {split: f"{split}.txt" for split in self._splits} or {"train": "train.txt"}
        yield "obj.data", yolo.darknet_data(len(self._classes), lists)
        for split, paths in self._by_split():
            yield f"{split or 'train'}.txt", lines(f"./{path}" for path in paths)
