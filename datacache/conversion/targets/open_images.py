"""Open Images: a CSV of boxes, one of masks and one of labels a split, and an image of each mask."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from datacache.annotations.formats import open_images
from datacache.annotations.formats.mask_images import write_mask
from datacache.annotations.model import HALVES, Annotation, Problem
from datacache.conversion.model import stem
from datacache.conversion.targets.base import LINE_BREAKS, About, File, Target


class OpenImages(Target):
    holds = frozenset(
        {
            *("mask", "truncated", "occluded", "score", "author", "labels"),
            *map("attribute {}".format, (*open_images.ATTRIBUTES, *open_images.OF_MASKS)),
        }
    )
    unwritable = re.compile(f"{LINE_BREAKS.pattern}|{HALVES.pattern}")

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._names = dict.fromkeys(about.classes)
        self._labelled = self._masked = False

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        name = stem(annotation.path.removeprefix(self.image_path("", split)))
        named = annotation._replace(path=name)
        named, masks = open_images.name_masks(named, f"{split}/" if split else "", self._about.identifiers, self._ids)
        self._kept.put((split, named))
        self._masked = self._masked or bool(masks)
        self._names.update(dict.fromkeys(annotation.labels))
        self._labelled = self._labelled or bool(annotation.labels)
        return [(path, write_mask(mask)) for path, mask in masks], ()

    def _finish(self) -> Iterator[File]:
        ids = self._about.identifiers
        for split, kept in self._by_split(rest=True):
            begin = f"annotations/{split}-" if split else "annotations/"
            yield begin + open_images.BOXES, b"".join(open_images.write_boxes(kept, ids))
        for split, kept in self._by_split(rest=True) if self._masked else ():
            begin = f"annotations/{split}-" if split else "annotations/"
            yield begin + open_images.MASKS, b"".join(open_images.write_masks(kept, ids))
        for split, kept in self._by_split(rest=True) if self._labelled else ():
            begin = f"annotations/{split}-" if split else "annotations/"
            yield begin + open_images.LABELS, b"".join(open_images.write_labels(kept, ids))
        yield f"annotations/{open_images.CLASSES}", open_images.write_classes(self._names, ids)
