"""Hugging Face's image folder: a `metadata.jsonl` a split, beside its images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datacache.annotations.formats import metadata
from datacache.annotations.model import Annotation, Problem
from datacache.conversion.targets.base import File, Target, without_split


class ImageFolder(Target):
    holds = frozenset({"labels", "captions"})
    in_metadata = True

    def relative(self, relative: str, split: str, labels: Sequence[str]) -> str:
        """Return a path in the folder of its split."""
        return f"{split or 'images'}/{without_split(relative)}"

    def image_path(self, relative: str, split: str) -> str:
        """Return where an image goes."""
        return relative

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        if annotated:
            name = annotation.path.removeprefix(f"{split or 'images'}/")
            self._kept.put((split, annotation._replace(path=name)))
        return (), ()

    def _finish(self) -> Iterator[File]:
        for split, kept in self._by_split(rest=True):
            lines = b"".join(metadata.write(kept, objects=bool(self._classes)))
            yield f"{split or 'images'}/{metadata.NAME.decode()}", lines
