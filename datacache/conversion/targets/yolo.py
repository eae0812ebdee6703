"""YOLO as Ultralytics and as Darknet lay it out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datacache.annotations.check import SLACK_PX
from datacache.annotations.classes import write_classes
from datacache.annotations.formats import yolo
from datacache.annotations.model import Annotation, Box, Problem
from datacache.annotations.shapes.outline import Rotated, Skeleton, bounds
from datacache.conversion.model import stem
from datacache.conversion.targets.base import LINE_BREAKS, About, File, Target, lines
from datacache.core.counters import count
from datacache.core.errors import UsageError


class Yolo(Target):
    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._used: set[str] = set()
        yolo.data_yaml(dict.fromkeys(about.splits, ""), ())  # before any work, it refuses what no split can be called

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        self._used.add(split)
        if not annotated:
            return (), ()
        data, problems = self._labels_of(annotation)
        return [(f"labels{stem(annotation.path).removeprefix('images')}.txt", data)], problems

    def _labels_of(self, annotation: Annotation) -> tuple[bytes, Sequence[Problem]]:
        return yolo.write(annotation, self._ids), ()

    def _finish(self) -> Iterator[File]:
        # A folder without images is none in a snapshot, and Ultralytics refuses to start without it.
        folders = {split: f"images/{split}" for split in self._splits if split in self._used}
        folders = folders or {"train": "images", "val": "images"}
        yield "data.yaml", yolo.data_yaml(folders, self._classes, self._pose(), rotated="rotated" in self.holds)

    def _pose(self) -> Skeleton | None:
        """Return the keypoints that labels have."""
        return None


class YoloPredictions(Yolo):
    """A confidence behind each box, which no training takes; so plain YOLO leaves scores out."""

    holds = frozenset({"score"})

    def _labels_of(self, annotation: Annotation) -> tuple[bytes, Sequence[Problem]]:
        return yolo.write_scored(annotation, self._ids), ()


class YoloSegment(Yolo):
    """A polygon an object; of a box alone its four corners, as Ultralytics leaves out an image that has both kinds."""

    holds = frozenset({"polygon"})

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._written: dict[str, bytes] = {}

    def expect(self, annotations: Sequence[Annotation]) -> None:
        files = yolo.write_outlines(annotations, self._ids)
        self._written = {annotation.path: data for annotation, data in zip(annotations, files, strict=True)}

    def _labels_of(self, annotation: Annotation) -> tuple[bytes, Sequence[Problem]]:
        alone = [box for box in annotation.boxes if box.label in self._ids and not (box.extra and box.extra.outline)]
        problems = []
        if alone:
            message = f"{annotation.path}: the boxes of {count(len(alone), 'object')} are written as their four corners"
            problems.append(Problem("box-outlined", "noted", annotation.source, alone[0].line, message))
        return self._written[annotation.path], problems


class YoloObb(YoloSegment):
    """Four corners an object, all inside the image."""

    holds = frozenset({"rotated", "corners"})

    def _labels_of(self, annotation: Annotation) -> tuple[bytes, Sequence[Problem]]:
        data, problems = super()._labels_of(annotation)
        outside = [box for box in annotation.boxes if box.label in self._ids and _sticks_out(box, annotation)]
        if outside:
            message = f"{annotation.path}: of {count(len(outside), 'object')} corners are moved to the image's edge"
            line = outside[0].line
            problems = [*problems, Problem("corner-moved", "changed", annotation.source, line, message)]
        return data, problems


def _sticks_out(box: Box, image: Annotation) -> bool:
    """Tell whether a rotated box goes beyond its image by more than a check lets pass."""
    if box.extra is None or not isinstance(box.extra.outline, Rotated):
        return False
    x1, y1, x2, y2 = bounds(box.extra.outline.corners)
    return max(-x1, -y1, x2 - image.width, y2 - image.height) > SLACK_PX


class YoloPose(Yolo):
    """A box and keypoints an object, as many as the class with the most has."""

    holds = frozenset({"keypoints", "names", "box+keypoints", "absent keypoints"})

    def __init__(self, about: About) -> None:
        super().__init__(about)
        found = [about.skeletons[name] for name in about.classes if name in about.skeletons]
        if not found:
            raise UsageError("no class has keypoints, and yolo-pose is for these", hint="Choose another format.")
        self._longest = max(found, key=lambda skeleton: len(skeleton.names))

    def _labels_of(self, annotation: Annotation) -> tuple[bytes, Sequence[Problem]]:
        most = len(self._longest.names)
        fewer = [box for box in annotation.boxes if box.label in self._ids and _keypoints(box) != most]
        problems = []
        if fewer:
            message = f"{annotation.path}: {count(len(fewer), 'object')} with fewer keypoints than {most}; others are 0"
            problems.append(Problem("keypoints-padded", "noted", annotation.source, fewer[0].line, message))
        return yolo.write_keypoints(annotation, self._ids, self._longest), problems

    def _pose(self) -> Skeleton | None:
        from datacache.annotations.shapes.clip import mirrored_order

        return self._longest._replace(flip=mirrored_order(self._longest), dims=3)


def _keypoints(box: Box) -> int:
    return len(box.extra.keypoints.visible) if box.extra and box.extra.keypoints else 0


class Darknet(Target):
    folder = "obj_train_data"
    unwritable = LINE_BREAKS

    def __init__(self, about: About) -> None:
        super().__init__(about)
        yolo.darknet_data(0, dict.fromkeys(about.splits, ""))  # as in Yolo

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        self._kept.put((split, annotation.path))
        return [(f"{stem(annotation.path)}.txt", yolo.write(annotation, self._ids))] if annotated else [], ()

    def _finish(self) -> Iterator[File]:
        yield "obj.names", write_classes(self._classes)
        lists = {split: f"{split}.txt" for split in self._splits} or {"train": "train.txt"}
        yield "obj.data", yolo.darknet_data(len(self._classes), lists)
        for split, paths in self._by_split():
            yield f"{split or 'train'}.txt", lines(f"./{path}" for path in paths)
