"""Statistics as a picture: classes, boxes per image, sizes of images, sizes and shapes of boxes, kinds of objects.

Needs matplotlib (`pip install 'dsctl[plot]'`), which is imported here and only when something is plotted; it draws
into memory, without a display and without its global state, so that any thread may plot.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from datacache.annotations.pictures import draw as fonts
from datacache.annotations.pictures.draw import colours_of
from datacache.annotations.stats import AREA_EDGES, ASPECT_EDGES, Statistics
from datacache.core.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

FORMATS = ("png", "svg", "pdf")
_OWN_FONT = "DejaVuSans"
"""Matplotlib draws with it anyway, and has its bold, too."""
_SHOWN_CLASSES = 24
_SHOWN_BOXES = 40
_POINT_EDGES = tuple(side << n for n in range(10) for side in (2, 3))
_INK, _MUTED, _GRID, _PAPER, _BAR, _EDGE = "#22272e", "#6b7280", "#e5e7eb", "#ffffff", "#4c78a8", "#ffffff"


def plot(statistics: Statistics, title: str, *, format: str = "png") -> bytes:
    """Draw the picture; return a file of one of `FORMATS`. `UsageError` where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise UsageError("plots need matplotlib", hint="Install it: pip install 'dsctl[plot]'") from exc

    # A row more where there are other objects than boxes, and all else as large as it is without.
    rows, height = (2, 7.6) if _objects(statistics) == "boxes" else (3, 10.94)
    part = 7.6 / height
    low, high = 0.075 * part, 1 - 0.185 * part
    figure = Figure(figsize=(13, height), dpi=120, facecolor=_PAPER)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        rows, 3, width_ratios=(1.25, 1, 1), left=0.125, right=0.975, bottom=low, top=high, wspace=0.28, hspace=0.46
    )
    _write(figure.text(0.025, 1 - 0.06 * part, "", fontsize=17, fontweight="bold", color=_INK), title)
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
    _write(figure.text(0.025, 1 - 0.1 * part, "", fontsize=11, color=_MUTED), "   ·   ".join(parts))
    _classes(figure.add_subplot(grid[:2, 0]), statistics)
    _boxes_per_image(figure.add_subplot(grid[0, 1]), statistics)
    _image_sizes(figure.add_subplot(grid[0, 2]), statistics)
    _box_areas(figure.add_subplot(grid[1, 1]), statistics)
    _box_aspects(figure.add_subplot(grid[1, 2]), statistics)
    if rows == 3:
        kinds = {kind: sum(counts.values()) for kind, counts in statistics.kinds.items() if counts}
        axes = figure.add_subplot(grid[2, 0])
        _bars(axes, "Objects by kind", [*kinds], [*kinds.values()], [_BAR] * len(kinds))
        if found := statistics.kinds["polygons"]:
            _polygon_points(figure.add_subplot(grid[2, 1]), found)
        if found := statistics.kinds["keypoints"]:
            _counts(axes := figure.add_subplot(grid[2, 2]), found, named=_SHOWN_BOXES)
            _finish(axes, "Visible keypoints per object", left="objects")
    out = io.BytesIO()
    # Without these two the same statistics give another file each time, and with each release of matplotlib.
    metadata: dict[str, Any] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[format]
    figure.savefig(out, format=format, metadata=metadata, facecolor=_PAPER)
    return out.getvalue()


def _objects(statistics: Statistics) -> str:
    """Name the objects: `boxes` where they are nothing else."""
    return "boxes" if sum(statistics.kinds["boxes"].values()) == statistics.boxes else "objects"


def _classes(axes: Axes, statistics: Statistics) -> None:
    of_boxes = statistics.boxes > 0
    shown = list(statistics.classes[:_SHOWN_CLASSES])
    colours = colours_of([each.label for each in statistics.classes])
    numbers = [each.boxes if of_boxes else each.images for each in shown]
    names = [each.label for each in shown]
    bars = [tuple(c / 255 for c in colours[name]) for name in names]
    if rest := statistics.classes[_SHOWN_CLASSES:]:
        numbers.append(sum(each.boxes if of_boxes else each.images for each in rest))
        names.append(f"{len(rest):,} more")
        bars.append((0.8, 0.8, 0.8))
    what = _objects(statistics).capitalize() if of_boxes else "Images"
    _bars(axes, f"{what} by class", names, numbers, bars)


def _bars(axes: Axes, title: str, names: Sequence[str], numbers: Sequence[int], bars: Sequence[Any]) -> None:
    places = range(len(names))
    axes.barh(places, numbers, color=bars, height=0.72)
    axes.set_yticks([])
    for place, name in zip(places, names, strict=True):
        text = axes.text(-0.02, place, "", transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9.5)
        text.set_color(_INK)
        _write(text, name if len(name) <= 20 else f"{name[:19]}…")
    axes.set_ylim(max(len(names), 8) - 0.4, -0.6)
    top = max(numbers, default=1) or 1
    axes.set_xlim(0, top * 1.18)
    for place, number in zip(places, numbers, strict=True):
        axes.text(number + top * 0.012, place, f"{number:,}", va="center", fontsize=8.5, color=_MUTED)
    _finish(axes, title, grid="x")
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])


def _boxes_per_image(axes: Axes, statistics: Statistics) -> None:
    _counts(axes, statistics.boxes_per_image)
    usable = statistics.images - statistics.unusable
    mean = f"on average {statistics.boxes / usable:,.1f}" if usable else ""
    _finish(axes, f"{_objects(statistics).capitalize()} per image", under=mean, left="images")


def _counts(axes: Axes, counts: Mapping[int, int], named: int = 12) -> None:
    most = max(counts, default=0)
    # One bar for each number as long as they are few; else bars of equal width that all hold as many numbers.
    step = -(-(most + 1) // _SHOWN_BOXES)
    bars = [0] * (most // step + 1)
    for value, times in counts.items():
        bars[value // step] += times
    axes.bar([n * step for n in range(len(bars))], bars, width=step * 0.9, align="edge", color=_BAR)
    if step == 1 and most <= named:
        ticks = range(0, most + 1, 1 + most // 13)
        axes.set_xticks([n + 0.45 for n in ticks], [str(n) for n in ticks])


def _polygon_points(axes: Axes, counts: Mapping[int, int]) -> None:
    numbers = [0] * (len(_POINT_EDGES) - 1)
    for points, polygons in counts.items():
        numbers[bisect_right(_POINT_EDGES[1:-1], points)] += polygons
    _bins(axes, _POINT_EDGES, numbers)
    axes.set_xticks(_POINT_EDGES[2::4], [str(edge) for edge in _POINT_EDGES[2::4]])
    _finish(axes, "Points per polygon", left="polygons")


def _image_sizes(axes: Axes, statistics: Statistics) -> None:
    sizes = list(statistics.image_sizes.items())[:2_000]
    top = max((images for _, images in sizes), default=1)
    axes.scatter(
        [width for (width, _), _ in sizes],
        [height for (_, height), _ in sizes],
        s=[14 + 420 * images / top for _, images in sizes],
        color=_BAR,
        alpha=0.55,
        edgecolor=_EDGE,
        linewidth=0.8,
    )
    largest = max((side for size, _ in sizes for side in size), default=1)
    axes.set_xlim(0, largest * 1.2)
    axes.set_ylim(0, largest * 1.2)
    axes.plot([0, largest * 1.2], [0, largest * 1.2], color=_GRID, linewidth=1, zorder=0)
    most = ""
    if sizes:
        (width, height), images = sizes[0]
        most = f"most often {width:,} × {height:,} ({100 * images / max(1, sum(n for _, n in sizes)):.0f} %)"
    _finish(axes, "Image sizes", under=most, left="height, px", bottom="width, px", grid="both")


def _box_areas(axes: Axes, statistics: Statistics) -> None:
    _bins(axes, AREA_EDGES, statistics.box_areas)
    labels = {1e-4: "0.01 %", 1e-3: "0.1 %", 1e-2: "1 %", 1e-1: "10 %", 1.0: "100 %"}
    axes.set_xticks(list(labels), list(labels.values()))
    sizes, boxes = statistics.box_sizes, max(1, statistics.boxes)
    under = ", ".join(f"{100 * sizes[name] / boxes:.0f} % {name}" for name in ("small", "medium", "large"))
    for edge in (0.01, 0.1):
        axes.axvline(edge, color=_MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
    _finish(axes, "Box area, part of the image", under=under, left="boxes")


def _box_aspects(axes: Axes, statistics: Statistics) -> None:
    _bins(axes, ASPECT_EDGES, statistics.box_aspects)
    labels = {1 / n: f"1:{n}" for n in (16, 8, 4, 2)} | {float(n): f"{n}:1" for n in (1, 2, 4, 8, 16)}
    axes.set_xticks(list(labels), list(labels.values()))
    _finish(axes, "Box width : height", left="boxes")


def _bins(axes: Axes, edges: Sequence[float], numbers: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log")
    widths = [b - a for a, b in pairwise(edges)]
    axes.bar(edges[:-1], numbers, width=widths, align="edge", color=_BAR, edgecolor=_EDGE, linewidth=0.7)
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.set_minor_locator(NullLocator())


def _finish(axes: Axes, title: str, *, under: str = "", left: str = "", bottom: str = "", grid: str = "y") -> None:
    """Give all of them the same looks."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    above: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(title, (0, 1), (0, 20), fontsize=11, fontweight="bold", color=_INK, **above)
    axes.annotate(under, (0, 1), (0, 7), fontsize=8.5, color=_MUTED, **above)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.set_axisbelow(True)
    if grid != "x":
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(axis="both" if grid == "both" else "y", color=_GRID, linewidth=0.8)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=_MUTED if grid != "x" else _INK)
    axes.set_ylabel(left, fontsize=9, color=_MUTED)
    axes.set_xlabel(bottom, fontsize=9, color=_MUTED)


def _write(text: Text, value: str) -> None:
    """Set a text in whatever script it is; nothing in it is a formula."""
    from matplotlib.font_manager import FontProperties

    face, drawable = fonts.for_text(value)
    text.set_parse_math(False)
    text.set_text(drawable)
    if face.file is not None and face.file.stem != _OWN_FONT:
        size, weight = text.get_fontsize(), text.get_fontweight()
        text.set_fontproperties(FontProperties(fname=str(face.file), size=size, weight=weight))
