"""Folders of classes: the folder of an image is its label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datacache.annotations.model import Annotation, Problem, quote
from datacache.annotations.pairing import short_name
from datacache.conversion.targets.base import File, Target, without_split


class Folders(Target):
    holds = frozenset({"captions", "labels"})
    of_objects = False

    def relative(self, relative: str, split: str, labels: Sequence[str]) -> str:
        """Return a path of a split and a class, and no other folders: the last one is read as the class."""
        folder = _folder(labels[0]) if labels else ""
        *above, name = without_split(relative).split("/")
        if above and above[-1] == folder:
            del above[-1]
        return "/".join(part for part in (split, folder, short_name("_".join((*above, name)))) if part)

    def image_path(self, relative: str, split: str) -> str:
        """Return where an image goes."""
        return relative

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        problems = []
        source = annotation.source or annotation.path
        if annotation.captions:
            message = f"{annotation.path}: captions are left out"
            problems.append(Problem("objects-left-out", "changed", source, 0, message))
        if len(annotation.labels) > 1:
            message = f"{annotation.path}: of {len(annotation.labels)} labels the first is the folder"
            problems.append(Problem("labels-left-out", "changed", source, 0, message))
        for label in annotation.labels[:1]:
            if _folder(label) != label:
                message = f"{quote(label)} can be no folder; it is {quote(_folder(label))}"
                problems.append(Problem("label-folder", "changed", source, 0, message))
        return (), problems

    def _finish(self) -> Iterator[File]:
        return iter(())


def _folder(label: str) -> str:
    """Return the name of the folder of a class."""
    name = label.replace("/", "_")
    return short_name(f"_{name}" if name.startswith(".") else name)
