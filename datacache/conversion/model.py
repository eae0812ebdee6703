"""The values of a conversion: an image on its way through it, the split it goes to, and the report of what was done.

Used by the pipeline, which makes all of them, and by image operations. An image goes to a split by a hash of its path
and a seed, as the data set's own lists say, or by its classes (`deal`). A hash depends on nothing but the path and the
seed, so images that are added move none of the others, and every version of a data set has the same image in the same
split. One thread.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from xxhash import xxh3_64_intdigest

from datacache.annotations.model import Annotation, Problem
from datacache.annotations.split_lists import ListedSplits
from datacache.catalog.objects import Stored
from datacache.catalog.refs import check_tag
from datacache.core.errors import UsageError
from datacache.core.html import html_table
from datacache.manifest.model import Entry

if TYPE_CHECKING:
    from datacache.conversion.deal import Dealt


class Image(NamedTuple):
    """An image on its way through a conversion."""

    path: str
    """In the source."""
    annotation: Annotation
    entry: Entry
    """Its entry in the source, or in the result once it was written anew."""
    row: int
    """In the source."""
    split: str
    annotated: bool
    objects: int
    """Its boxes in the source."""
    goes_on: bool = False
    """True for a JPEG with bytes behind its end."""
    ref: str = ""
    """The snapshot it is from, where the result is of several."""

    def stored_anew(self, stored: Stored, source: int) -> Image:
        """Return this image with the entry of its new bytes; `source` is the number of the storage they are in."""
        entry = self.entry._replace(
            size_bytes=stored.size_bytes,
            etag=stored.hex,
            version="",
            source=source,
            key=stored.key.encode("utf-8", "surrogateescape"),
        )
        return self._replace(entry=entry)


@dataclass
class Report:
    """Counts of one conversion, and its problems in the order of the images' paths."""

    images: int = 0
    """Of the source; all other counts are of the result."""
    written: int = 0
    boxes: int = 0
    empty: int = 0
    """Images that have an annotation without a box."""
    emptied: int = 0
    """Images that had boxes, of which the classes asked for or an operation left none."""
    difficult_left_out: int = 0
    """Boxes that `skip_difficult` left out."""
    classes: Counter[str] = field(default_factory=Counter)
    """Label → boxes."""
    splits: Counter[str] = field(default_factory=Counter)
    """Split → images."""
    problems: list[Problem] = field(default_factory=list)

    def count(self, image: Image, *, of_objects: bool) -> None:
        """Count an image of the result, in a format of objects or of labels of images."""
        boxes = image.annotation.boxes
        self.written += 1
        self.boxes += len(boxes)
        if of_objects and image.annotated and not boxes:
            self.emptied += bool(image.objects)
            self.empty += not image.objects
        self.classes.update([box.label for box in boxes])
        if image.split:
            self.splits[image.split] += 1

    @property
    def counts(self) -> dict[str, int]:
        """Code → problems."""
        return dict(sorted(Counter(problem.code for problem in self.problems).items()))

    def _repr_html_(self) -> str:
        rows = [("images", self.written), ("objects", self.boxes), *self.splits.items()]
        return html_table([*rows, *((code, times) for code, times in self.counts.items())], caption="conversion")

    def as_json(self) -> dict[str, Any]:
        """Return the report as `dsctl convert --json` prints it."""
        problems = [problem._asdict() for problem in self.problems]
        counts = {name: value for name, value in vars(self).items() if name != "problems"}
        counts |= {"classes": dict(self.classes), "splits": dict(self.splits)}
        return counts | {"problem_counts": self.counts, "problems": problems}


_HASHES = 2**64


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Names of splits and how images are dealt to them. Without names, everything is in one set that has no name."""

    names: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    """Of splits by hash; they add up to 1."""
    seed: int = 0
    listed: ListedSplits | None = field(default=None, repr=False)
    """For splits that the data set brings."""
    stratify: bool = False
    """Give each split its share of each class, too. Then images that are added may move others."""
    dealt: Dealt | None = field(default=None, repr=False)
    """For splits by class, once the classes are known."""

    def of(self, annotation: Annotation) -> str | None:
        """Return the split of an image; '' where there are no splits, None where the lists leave it out."""
        if not self.names:
            return ""
        path = annotation.path
        if self.dealt is not None:
            return self.names[self.dealt.of(path)]
        if self.listed is not None:
            return self.listed.of(_encode(path), _encode(annotation.source)) or None
        place = xxh3_64_intdigest(_encode(path), self.seed) / _HASHES
        bounds = accumulate(self.shares)
        # The last one takes what rounding would leave to nobody.
        return next(
            (name for name, bound in zip(self.names[:-1], bounds, strict=False) if place < bound), self.names[-1]
        )


def stem(path: str) -> str:
    """Return a path without its extension."""
    folder, slash, name = path.rpartition("/")
    return folder + slash + (name.rpartition(".")[0] or name)


def parse_splits(text: str, seed: int, *, stratify: bool = False) -> Splits:
    """Parse `train=0.8,val=0.2` into splits by hash, or by class. The shares add up to 1. `UsageError` says which part
    is wrong."""
    names: list[str] = []
    shares: list[float] = []
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if not equals or not 0 < share <= 1:
            raise UsageError(f"--split: {part.strip()!r} is no share", hint="Write --split train=0.8,val=0.2")
        check_tag(name)  # a split names a folder and a file
        if name in names:
            raise UsageError(f"--split: {name!r} is given twice")
        names.append(name)
        shares.append(share)
    if abs(math.fsum(shares) - 1) > 1e-6:
        raise UsageError(f"--split: the shares add up to {math.fsum(shares):g}, not to 1")
    return Splits(names=tuple(names), shares=tuple(shares), seed=seed, stratify=stratify)


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
