"""keras-yolo3: a list a split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datacache.annotations.classes import write_classes
from datacache.annotations.formats import keras_yolo
from datacache.annotations.model import Annotation, Problem
from datacache.conversion.targets.base import LINE_BREAKS, About, File, Target
from datacache.core.errors import UsageError


class KerasYolo(Target):
    split_folders = False
    in_lists = True
    unwritable = LINE_BREAKS

    def __init__(self, about: About) -> None:
        super().__init__(about)
        wrong = next((split for split in about.splits if split.lower() == "classes"), None)
        if wrong is not None:
            raise UsageError(f"a split cannot be called {wrong!r}: classes.txt is the list of classes")

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        line, problems = keras_yolo.write_line(annotation, self._ids)
        self._kept.put((split, line))
        return (), problems

    def _finish(self) -> Iterator[File]:
        yield "classes.txt", write_classes(self._classes)
        for split, lines in self._by_split(rest=True):
            yield f"{split or ('other' if self._splits else 'train')}.txt", b"".join(lines)
