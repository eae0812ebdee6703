"""LabelMe: a JSON beside each image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datacache.annotations.formats import labelme
from datacache.annotations.model import Annotation, Problem
from datacache.conversion.model import stem
from datacache.conversion.targets.base import POSE, SAID, File, Target


class Labelme(Target):
    holds = SAID | POSE | {"polygon", "mask", "rotated", "corners", "group", "score"}

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        return [(f"{stem(annotation.path)}.json", labelme.write(annotation))] if annotated else [], ()

    def _finish(self) -> Iterator[File]:
        return iter(())
