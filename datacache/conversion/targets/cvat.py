"""CVAT XML 1.1: one file about all images, whose splits are CVAT's subsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datacache.annotations.formats import cvat
from datacache.annotations.model import Annotation, Problem
from datacache.conversion.targets.base import About, File, Target


class Cvat(Target):
    holds = frozenset({"polygon", "mask", "rotated", "keypoints", "group", "author"})

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._count = 0

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        name = annotation.path.removeprefix(self.image_path("", split))
        self._kept.append((split, annotation._replace(path=name)))
        self._count += 1
        return (), ()

    def _finish(self) -> Iterator[File]:
        about = self._about
        yield "annotations.xml", b"".join(cvat.write(self._kept, about.classes, about.skeletons, self._count))
