"""COCO: a JSON a split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datacache.annotations.formats import coco
from datacache.annotations.model import Annotation, Problem
from datacache.conversion.targets.base import POSE, SAID, About, File, Target


class Coco(Target):
    holds = SAID | POSE | {"polygon", "rings", "mask", "names", "absent keypoints", "score", "captions"}
    in_lists = True

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._captions = False

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        # A file name in COCO is relative to the folder of its split's images.
        name = annotation.path.removeprefix(self.image_path("", split))
        self._kept.put((split, annotation._replace(path=name)))
        self._captions = self._captions or bool(annotation.captions)
        return (), ()

    def _finish(self) -> Iterator[File]:
        about = self._about
        for split, kept in self._by_split(rest=True):
            data = b"".join(coco.write(kept, about.classes, about.skeletons, about.supercategories))
            yield f"annotations/instances{f'_{split}' if split else ''}.json", data
        for split, kept in self._by_split(rest=True) if self._captions else ():
            captions = coco.write_captions(annotation for annotation in kept if annotation.captions)
            yield f"annotations/captions{f'_{split}' if split else ''}.json", captions
