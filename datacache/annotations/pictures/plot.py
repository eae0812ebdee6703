"""Statistics as a picture: classes, boxes per image, sizes of images, sizes and shapes of boxes, kinds of objects.

Needs matplotlib, as `chart` does. Any thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from datacache.annotations.pictures.chart import BAR, EDGE, GRID, MUTED, bars, finish, head, saved, sheet
from datacache.annotations.pictures.draw import colours_of
from datacache.annotations.stats import AREA_EDGES, ASPECT_EDGES, Statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN_CLASSES = 24
_SHOWN_BOXES = 40
_POINT_EDGES = tuple(side << n for n in range(10) for side in (2, 3))


def plot(statistics: Statistics, title: str, *, format: str = "png") -> bytes:
    """Draw the picture; return a file of one of `FORMATS`. `UsageError` where matplotlib is not installed."""
    # A row more where there are other objects than boxes, and all else as large as it is without.
    rows, height = (2, 7.6) if _objects(statistics) == "boxes" else (3, 10.94)
    part = 7.6 / height
    low, high = 0.075 * part, 1 - 0.185 * part
    figure = sheet(13, height)
    grid = figure.add_gridspec(
        rows, 3, width_ratios=(1.25, 1, 1), left=0.125, right=0.975, bottom=low, top=high, wspace=0.28, hspace=0.46
    )
    parts = [
        f"{statistics.images:,} images",
        f"{statistics.boxes:,} {_objects(statistics)}",
        f"{len(statistics.classes):,} classes",
    ]
    less = (
        (statistics.empty, "images without objects"),
        (statistics.unannotated, "without annotation"),
        (statistics.unusable, "unusable"),
    )
    parts += [f"{number:,} {what}" for number, what in less if number]
    head(figure, title, "   ·   ".join(parts), part)
    _classes(figure.add_subplot(grid[:2, 0]), statistics)
    _boxes_per_image(figure.add_subplot(grid[0, 1]), statistics)
    _image_sizes(figure.add_subplot(grid[0, 2]), statistics)
    _box_areas(figure.add_subplot(grid[1, 1]), statistics)
    _box_aspects(figure.add_subplot(grid[1, 2]), statistics)
    if rows == 3:
        kinds = {kind: sum(counts.values()) for kind, counts in statistics.kinds.items() if counts}
        axes = figure.add_subplot(grid[2, 0])
        bars(axes, "Objects by kind", [*kinds], [*kinds.values()], [BAR] * len(kinds))
        if found := statistics.kinds["polygons"]:
            _polygon_points(figure.add_subplot(grid[2, 1]), found)
        if found := statistics.kinds["keypoints"]:
            _counts(axes := figure.add_subplot(grid[2, 2]), found, named=_SHOWN_BOXES)
            finish(axes, "Visible keypoints per object", left="objects")
    return saved(figure, format)


def _objects(statistics: Statistics) -> str:
    """Name the objects: `boxes` where they are nothing else."""
    return "boxes" if sum(statistics.kinds["boxes"].values()) == statistics.boxes else "objects"


def _classes(axes: Axes, statistics: Statistics) -> None:
    of_boxes = statistics.boxes > 0
    shown = list(statistics.classes[:_SHOWN_CLASSES])
    colours = colours_of([each.label for each in statistics.classes])
    numbers = [each.boxes if of_boxes else each.images for each in shown]
    names = [each.label for each in shown]
    drawn = [tuple(c / 255 for c in colours[name]) for name in names]
    if rest := statistics.classes[_SHOWN_CLASSES:]:
        numbers.append(sum(each.boxes if of_boxes else each.images for each in rest))
        names.append(f"{len(rest):,} more")
        drawn.append((0.8, 0.8, 0.8))
    what = _objects(statistics).capitalize() if of_boxes else "Images"
    bars(axes, f"{what} by class", names, numbers, drawn)


def _boxes_per_image(axes: Axes, statistics: Statistics) -> None:
    _counts(axes, statistics.boxes_per_image)
    usable = statistics.images - statistics.unusable
    mean = f"on average {statistics.boxes / usable:,.1f}" if usable else ""
    finish(axes, f"{_objects(statistics).capitalize()} per image", under=mean, left="images")


def _counts(axes: Axes, counts: Mapping[int, int], named: int = 12) -> None:
    most = max(counts, default=0)
    # One bar for each number as long as they are few; else bars of equal width that all hold as many numbers.
    step = -(-(most + 1) // _SHOWN_BOXES)
    bars = [0] * (most // step + 1)
    for value, times in counts.items():
        bars[value // step] += times
    axes.bar([n * step for n in range(len(bars))], bars, width=step * 0.9, align="edge", color=BAR)
    if step == 1 and most <= named:
        ticks = range(0, most + 1, 1 + most // 13)
        axes.set_xticks([n + 0.45 for n in ticks], [str(n) for n in ticks])


def _polygon_points(axes: Axes, counts: Mapping[int, int]) -> None:
    numbers = [0] * (len(_POINT_EDGES) - 1)
    for points, polygons in counts.items():
        numbers[bisect_right(_POINT_EDGES[1:-1], points)] += polygons
    _bins(axes, _POINT_EDGES, numbers)
    axes.set_xticks(_POINT_EDGES[2::4], [str(edge) for edge in _POINT_EDGES[2::4]])
    finish(axes, "Points per polygon", left="polygons")


def _image_sizes(axes: Axes, statistics: Statistics) -> None:
    sizes = list(statistics.image_sizes.items())[:2_000]
    top = max((images for _, images in sizes), default=1)
    axes.scatter(
        [width for (width, _), _ in sizes],
        [height for (_, height), _ in sizes],
        s=[14 + 420 * images / top for _, images in sizes],
        color=BAR,
        alpha=0.55,
        edgecolor=EDGE,
        linewidth=0.8,
    )
    largest = max((side for size, _ in sizes for side in size), default=1)
    axes.set_xlim(0, largest * 1.2)
    axes.set_ylim(0, largest * 1.2)
    axes.plot([0, largest * 1.2], [0, largest * 1.2], color=GRID, linewidth=1, zorder=0)
    most = ""
    if sizes:
        (width, height), images = sizes[0]
        most = f"most often {width:,} × {height:,} ({100 * images / max(1, sum(n for _, n in sizes)):.0f} %)"
    finish(axes, "Image sizes", under=most, left="height, px", bottom="width, px", grid="both")


def _box_areas(axes: Axes, statistics: Statistics) -> None:
    _bins(axes, AREA_EDGES, statistics.box_areas)
    labels = {1e-4: "0.01 %", 1e-3: "0.1 %", 1e-2: "1 %", 1e-1: "10 %", 1.0: "100 %"}
    axes.set_xticks(list(labels), list(labels.values()))
    sizes, boxes = statistics.box_sizes, max(1, statistics.boxes)
    under = ", ".join(f"{100 * sizes[name] / boxes:.0f} % {name}" for name in ("small", "medium", "large"))
    for edge in (0.01, 0.1):
        axes.axvline(edge, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
    finish(axes, "Box area, part of the image", under=under, left="boxes")


def _box_aspects(axes: Axes, statistics: Statistics) -> None:
    _bins(axes, ASPECT_EDGES, statistics.box_aspects)
    labels = {1 / n: f"1:{n}" for n in (16, 8, 4, 2)} | {float(n): f"{n}:1" for n in (1, 2, 4, 8, 16)}
    axes.set_xticks(list(labels), list(labels.values()))
    finish(axes, "Box width : height", left="boxes")


def _bins(axes: Axes, edges: Sequence[float], numbers: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log")
    widths = [b - a for a, b in pairwise(edges)]
    axes.bar(edges[:-1], numbers, width=widths, align="edge", color=BAR, edgecolor=EDGE, linewidth=0.7)
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.set_minor_locator(NullLocator())
