"""Pascal VOC: an XML an image, and images of the masks that objects have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datacache.annotations.formats import voc
from datacache.annotations.formats.mask_images import write_label_map, write_masks
from datacache.annotations.model import Annotation, Problem
from datacache.conversion.model import stem
from datacache.conversion.targets.base import LINE_BREAKS, SAID, About, File, Target, lines
from datacache.core.counters import count


class Voc(Target):
    holds = SAID | {"mask"}
    folder = "JPEGImages"
    split_folders = False

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self.unwritable = LINE_BREAKS if about.splits else None
        self._masked = False

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        name = stem(annotation.path).removeprefix("JPEGImages/")
        files = [(f"Annotations/{name}.xml", voc.write(annotation, origin=self._about.origin))] if annotated else []
        problems = []
        masked = any(box.extra for box in annotation.boxes)
        if masked:
            kinds, objects, lost = write_masks(annotation.boxes, annotation.width, annotation.height, self._ids)
            files += [(f"SegmentationClass/{name}.png", kinds), (f"SegmentationObject/{name}.png", objects)]
            self._masked = True
            if lost:
                message = f"{annotation.path}: of {count(len(lost), 'object')} the mask is covered or has no number"
                line = annotation.boxes[min(lost)].line
                problems.append(Problem("mask-covered", "changed", annotation.source, line, message))
        self._kept.put((split, (name, masked)))
        return files, problems

    def _finish(self) -> Iterator[File]:
        for split, names in self._by_split() if self._splits else ():
            yield f"ImageSets/Main/{split}.txt", lines(name for name, _ in names)
        for split, names in self._by_split() if self._splits and self._masked else ():
            yield f"ImageSets/Segmentation/{split}.txt", lines(name for name, masked in names if masked)
        if self._masked:
            yield "labelmap.txt", write_label_map(self._classes)
