"""Pascal VOC: an XML an image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datacache.annotations.formats import voc
from datacache.annotations.model import Annotation, Problem
from datacache.conversion.model import stem
from datacache.conversion.targets.base import About, File, Target, lines


class Voc(Target):
    folder = "JPEGImages"
    split_folders = False

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self.lists_paths = bool(about.splits)

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        name = stem(annotation.path).removeprefix("JPEGImages/")
        self._kept.append((split, name))
        return [(f"Annotations/{name}.xml", voc.write(annotation, origin=self._about.origin))] if annotated else [], ()

    def _finish(self) -> Iterator[File]:
        for split, names in self._by_split() if self._splits else ():
            yield f"ImageSets/Main/{split}.txt", lines(names)
