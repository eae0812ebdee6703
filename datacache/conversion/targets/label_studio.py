"""Label Studio: a JSON a split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datacache.annotations.formats import label_studio
from datacache.annotations.model import HALVES, Annotation, Problem
from datacache.conversion.targets.base import POSE, SAID, File, Target


class LabelStudio(Target):
    unwritable = HALVES
    holds = SAID | POSE | {"polygon", "mask", "rotated", "names", "score", "author", "captions", "labels"}

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        self._kept.put((split, (annotation, annotated)))
        return (), ()

    def _finish(self) -> Iterator[File]:
        for split, kept in self._by_split(rest=True):
            data = b"".join(label_studio.write(kept, self._about.skeletons))
            yield f"annotations/tasks{f'_{split}' if split else ''}.json", data
