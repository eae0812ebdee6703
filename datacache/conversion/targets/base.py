"""The base of what writes a format. See the package for the layouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from datacache.annotations.aside import Aside
from datacache.annotations.formats import metadata
from datacache.annotations.model import Annotation, Problem
from datacache.annotations.pairing import split_of_name
from datacache.annotations.shapes.outline import Skeleton

File = tuple[str, bytes]
SAID = frozenset({"difficult", "truncated", "occluded", "attributes"})
"""The parts of `Target.holds` of a format that has attributes of objects."""
POSE = frozenset({"keypoints", "outline+keypoints", "box+keypoints"})
"""The part of `Target.holds` of a format that has keypoints beside anything else of an object."""


LINE_BREAKS: Final = re.compile("[\r\n]")
"""Characters that no path in a list of images can have."""


class About(NamedTuple):
    """All that is known of the result before its first image."""

    classes: Sequence[str]
    """In the order of their ids."""
    splits: Sequence[str]
    origin: int = 0
    """The coordinate of the first pixel in Pascal VOC."""
    skeletons: Mapping[str, Skeleton] = MappingProxyType({})
    """Of the classes that have keypoints."""
    supercategories: Mapping[str, str] = MappingProxyType({})
    identifiers: Mapping[str, str] = MappingProxyType({})
    """Ids of classes that are no numbers, where the data set has them."""
    lists_unannotated: bool = True
    """Images without annotation are in the files of all images like those without objects, and become such."""


class Target:
    """One format being written; a subclass says where images lie, what a label file holds, and what comes last."""

    folder = "images"
    """Of the images."""
    split_folders = True
    """Images of each split lie in a folder of their own."""
    holds: frozenset[str] = frozenset()
    """The kinds that the format has besides boxes and labels; `fitting` changes all others: `polygon`, `rings` (several
    of a polygon), `holes`, `mask`, `rotated`, `corners` (of no rectangle), `keypoints`, `absent keypoints` (of which
    none is there), `names` (of keypoints), `outline+keypoints` and `box+keypoints` (of one object), `difficult`,
    `truncated`, `occluded`, `attributes` (all) or `attribute NAME`, `track`, `group`, `score`, `author`, `captions`,
    `labels` (of images)."""
    of_objects = True
    """False for a format that has labels of images alone."""
    in_lists = False
    """Files of all images name it, by which alone it is annotated."""
    in_metadata = False
    """So does `metadata.jsonl`, and it alone."""
    unwritable: re.Pattern[str] | None = None
    """Characters that no path in the format's files can have: they would name another image, or be no text."""

    def __init__(self, about: About) -> None:
        """Raise `UsageError` for a split that would be called like something else."""
        self._about = about
        self._classes, self._splits = about.classes, about.splits
        self._ids = {name: number for number, name in enumerate(about.classes)}
        self._kept = Aside[tuple[str, Any]]()
        """The split of each image and what `finish` needs of it."""
        self._of_images = Aside[Annotation]()
        """Labels and captions of whole images, as far as the format cannot hold them."""
        self._unsplit = False

    def relative(self, relative: str, split: str, labels: Sequence[str]) -> str:
        """Return what an image is to be called, which is made unique then."""
        return relative

    def image_path(self, relative: str, split: str) -> str:
        """Return where an image goes. `relative` is unique up to its extension."""
        return f"{self.folder}/{split}/{relative}" if split and self.split_folders else f"{self.folder}/{relative}"

    def expect(self, annotations: Sequence[Annotation]) -> None:
        """Look at images before each of them is added: for what is quicker of many at once."""

    def add(self, annotation: Annotation, split: str, *, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        """Return the files that belong to this image alone, after `expect`. `annotation.path` is the image's path in
        the result, as `image_path` gave it; `annotated` is false for a background image without annotation."""
        labels = () if "labels" in self.holds else annotation.labels
        captions = () if "captions" in self.holds else annotation.captions
        added: tuple[Sequence[File], Sequence[Problem]] = (), ()
        if annotated or not self.in_lists or self._about.lists_unannotated:
            self._unsplit = self._unsplit or not split
            added = self._add(annotation, split, annotated)
        if labels or captions:
            self._of_images.put(annotation._replace(boxes=(), labels=labels, captions=captions))
        return added

    def finish(self) -> Iterator[File]:
        """Yield the files that belong to all images."""
        yield from self._finish()
        data = b"".join(metadata.write(self._of_images))
        if data:
            yield metadata.NAME.decode(), data

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        raise NotImplementedError

    def _finish(self) -> Iterator[File]:
        raise NotImplementedError

    def _by_split(self, *, rest: bool = False) -> Iterator[tuple[str, Iterator[Any]]]:
        """Yield each split (without splits: '') and what was kept of its images; with `rest` also '' for images in no
        split, where there are some."""
        for split in (*self._splits, "") if rest and self._unsplit and self._splits else self._splits or ("",):
            yield split, (kept for of, kept in self._kept if of == split)


def lines(names: Iterable[str]) -> bytes:
    """Write a list, one a line."""
    return "".join(f"{name}\n" for name in names).encode("utf-8", "surrogateescape")


def without_split(path: str) -> str:
    """Return a path without the folder of an earlier split that it begins with."""
    first, slash, rest = path.partition("/")
    return rest if slash and split_of_name(first.encode("utf-8", "surrogateescape")) else path
