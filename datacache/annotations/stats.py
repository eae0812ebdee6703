"""Statistics of a data set: classes, boxes per image, sizes of images and boxes, and what is wrong with it.

Collected in one pass over the annotation table, a range at a time. Used by `dsctl stats`, `dsctl snapshot show --stats`
and `plot`. Any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from datacache.annotations.table.columns import as_float64
from datacache.annotations.table.ranges import ANNOTATED, UNUSABLE, box_sizes, count_kinds
from datacache.annotations.table.shapes import SHAPED
from datacache.annotations.table.table import ProblemCount, Table
from datacache.core.html import html_table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_RANGES_AT_A_TIME = 32
AREA_EDGES = tuple(10 ** (exponent / 4) for exponent in range(-20, 1))
"""Of the histogram of boxes' areas as a part of their image, from a hundred-thousandth to all; four bins a decade."""
ASPECT_EDGES = tuple(2 ** (exponent / 2) for exponent in range(-8, 9))
"""Of the histogram of boxes' width / height, from 1/16 to 16; two bins for each doubling."""
_SMALL, _LARGE = 0.01, 0.1
_COCO_SMALL, _COCO_LARGE = 32**2, 96**2


class ClassCount(NamedTuple):
    """One label."""

    label: str
    images: int
    """Images that have it."""
    boxes: int
    share: float
    """Of all boxes, from 0 to 1."""
    difficult: int
    """Boxes that are difficult."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """The statistics of a data set."""

    images: int
    with_objects: int
    empty: int
    """Annotated images without objects."""
    unannotated: int
    """Images for which no annotation was found."""
    unusable: int
    """Images that cannot be used: broken ones, and those whose annotation is."""
    boxes: int
    difficult: int
    truncated: int
    occluded: int
    shapes: Mapping[str, int]
    """Objects with each kind of outline, points of polygons and rotated boxes, and keypoints (`SHAPED`)."""
    kinds: Mapping[str, Mapping[int, int]]
    """`boxes` (that are nothing else), `polygons`, `masks`, `rotated`, `keypoints` → points, or keypoints that are
    visible → objects."""
    classes: Sequence[ClassCount]
    """The most frequent first."""
    boxes_per_image: Mapping[int, int]
    """Number of boxes → usable images that have so many."""
    image_sizes: Mapping[tuple[int, int], int]
    """(width, height) → usable images, the most frequent first."""
    box_sizes: Mapping[str, int]
    """`small` (less than 1 % of the image), `medium`, `large` (10 % and more) → boxes."""
    coco_sizes: Mapping[str, int]
    """Boxes by COCO's sizes: below 32² and below 96² pixels."""
    box_areas: Sequence[int]
    """Boxes in each bin of `AREA_EDGES`; what lies outside is in the first or last."""
    box_aspects: Sequence[int]
    """Boxes in each bin of `ASPECT_EDGES`, likewise."""
    problems: Sequence[ProblemCount]

    def _repr_html_(self) -> str:
        rows = [(each.label, each.images, each.boxes) for each in self.classes]
        caption = f"{self.images:,} images, {self.boxes:,} objects, {sum(p.times for p in self.problems):,} problems"
        return html_table(rows, ("class", "images", "objects"), caption=caption)

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as `dsctl stats --json` prints them."""
        return vars(self) | {
            "classes": [each._asdict() for each in self.classes],
            "boxes_per_image": [{"boxes": boxes, "images": n} for boxes, n in self.boxes_per_image.items()],
            "kinds": [{"kind": k, "points": p, "objects": n} for k, of in self.kinds.items() for p, n in of.items()],
            "image_sizes": [{"width": w, "height": h, "images": n} for (w, h), n in self.image_sizes.items()],
            "box_areas": {"edges": list(AREA_EDGES), "boxes": list(self.box_areas)},
            "box_aspects": {"edges": list(ASPECT_EDGES), "boxes": list(self.box_aspects)},
            "problems": [each._asdict() for each in self.problems],
        }


def collect(table: Table) -> Statistics:
    """Collect the statistics of a table. 100,000 images with a million boxes take about a second."""
    import numpy as np

    empty = 0
    flags: Counter[str] = Counter()
    shapes = dict.fromkeys(SHAPED, 0)
    kinds: Counter[tuple[str, int]] = Counter()
    difficult_of: Counter[str] = Counter()
    boxes_per_image: Counter[int] = Counter()
    sizes: Counter[tuple[int, int]] = Counter()
    relative, coco = [0, 0, 0], [0, 0, 0]
    areas, aspects = [0] * (len(AREA_EDGES) - 1), [0] * (len(ASPECT_EDGES) - 1)
    summaries = table.summaries()
    while part := list(islice(summaries, _RANGES_AT_A_TIME)):
        details = table.details([number for number, _ in part])
        for number, summary in part:
            kept = [state != UNUSABLE for state in summary.states()]
            objects = list(compress(summary.objects(), kept))
            boxes_per_image.update(objects)
            sizes.update(compress(zip(summary.widths(), summary.heights(), strict=True), kept))
            empty += sum(
                state == ANNOTATED and not n for state, n in zip(summary.states(), summary.objects(), strict=True)
            )
            for flag in ("difficult", "truncated", "occluded"):
                flags[flag] += sum(summary.flagged(flag))
            for name in SHAPED:
                shapes[name] += sum(summary.shaped(name))
            for found in count_kinds(details[number], summary):
                kinds.update(found)
            for label in summary.labels:
                difficult_of[label] += summary.difficult_of(label)
            widths, heights = box_sizes(details[number], summary)
            images = as_float64(summary.widths()) * as_float64(summary.heights())
            of_box = np.maximum(np.repeat(images, as_float64(summary.objects()).astype(np.intp)), 1)
            _count(relative, widths * heights / of_box, (_SMALL, _LARGE))
            _count(coco, widths * heights, (_COCO_SMALL, _COCO_LARGE))
            _count(areas, widths * heights / of_box, AREA_EDGES[1:-1])
            _count(aspects, widths / np.maximum(heights, np.finfo(float).tiny), ASPECT_EDGES[1:-1])
    classes = [
        ClassCount(label, total.images, total.boxes, total.boxes / (table.boxes or 1), difficult_of[label])
        for label, total in table.labels.items()
    ]
    classes.sort(key=lambda each: (-each.boxes, -each.images, each.label))
    return Statistics(
        images=table.images,
        with_objects=table.usable - boxes_per_image[0],
        empty=empty,
        unannotated=boxes_per_image[0] - empty,
        unusable=table.images - table.usable,
        boxes=table.boxes,
        difficult=flags["difficult"],
        truncated=flags["truncated"],
        occluded=flags["occluded"],
        shapes=shapes,
        kinds={
            each: {points: n for (kind, points), n in sorted(kinds.items()) if kind == each and n}
            for each in ("boxes", *SHAPED[:3], "keypoints")
        },
        classes=classes,
        boxes_per_image=dict(sorted(boxes_per_image.items())),
        image_sizes=dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))),
        box_sizes=dict(zip(("small", "medium", "large"), relative, strict=True)),
        coco_sizes=dict(zip(("small", "medium", "large"), coco, strict=True)),
        box_areas=areas,
        box_aspects=aspects,
        problems=table.problem_counts,
    )


def _count(bins: list[int], values: NDArray[np.float64], inner_edges: Sequence[float]) -> None:
    """Add to bins that end before each edge; the last is what is left."""
    import numpy as np

    counts = np.bincount(np.searchsorted(inner_edges, values, side="right"), minlength=len(bins))
    bins[:] = [old + int(new) for old, new in zip(bins, counts, strict=True)]
