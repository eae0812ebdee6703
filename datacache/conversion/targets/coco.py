"""COCO: a JSON a split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datacache.annotations.formats import coco
from datacache.annotations.model import Annotation, Problem
from datacache.conversion.targets.base import File, Target


class Coco(Target):
    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        # A file name in COCO is relative to the folder of its split's images.
        name = annotation.path.removeprefix(self.image_path("", split))
        self._kept.append((split, annotation._replace(path=name)))
        return (), ()

    def _finish(self) -> Iterator[File]:
        for split, kept in self._by_split():
            data = b"".join(coco.write(kept, self._classes))
            yield f"annotations/instances{f'_{split}' if split else ''}.json", data
