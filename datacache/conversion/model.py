"""The values of a conversion: an image on its way through it, and the report of what was done.

Used by the pipeline, which makes both, and by image operations. One thread.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from datacache.annotations.model import Annotation, Problem
from datacache.catalog.objects import Stored
from datacache.manifest.model import Entry


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

    def count(self, image: Image) -> None:
        """Count an image of the result."""
        boxes = image.annotation.boxes
        self.written += 1
        self.boxes += len(boxes)
        if image.annotated and not boxes:
            self.emptied += bool(image.objects)
            self.empty += not image.objects
        self.classes.update([box.label for box in boxes])
        if image.split:
            self.splits[image.split] += 1

    @property
    def counts(self) -> dict[str, int]:
        """Code → problems."""
        return dict(sorted(Counter(problem.code for problem in self.problems).items()))

    def as_json(self) -> dict[str, Any]:
        """Return the report as `dsctl convert --json` prints it."""
        problems = [problem._asdict() for problem in self.problems]
        counts = {name: value for name, value in vars(self).items() if name != "problems"}
        counts |= {"classes": dict(self.classes), "splits": dict(self.splits)}
        return counts | {"problem_counts": self.counts, "problems": problems}
