"""Draw an evaluation: curves of precision over recall, confusions, and the numbers of classes.

Needs matplotlib, as `annotations.pictures.chart` does. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from datacache.annotations.pictures.chart import GRID, INK, MUTED, bars, finish, head, saved, sheet, write
from datacache.annotations.pictures.draw import colours_of
from datacache.core.counters import count
from datacache.models.evaluate import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES, _CONFUSED, _BARS = 10, 12, 24
_NOTHING = "nothing"


def plot(found: Evaluation, *, format: str = "png") -> bytes:
    """Draw the picture; return a file of one of `chart.FORMATS`. `UsageError` where matplotlib is not installed."""
    figure = sheet(15, 7.6)
    rounded = {"mAP@50:95": found.map, "mAP@50": found.map_50, "accuracy": found.accuracy, "top 5": found.top_5}
    parts = [f"{name} {value:.3f}" for name, value in rounded.items() if value is not None]
    for name, number in (("precision", found.precision), ("recall", found.recall)):
        parts += [] if number is None else [f"{name} {number:.3f}"]
    if found.kind == "objects":
        parts[-1:] = [*parts[-1:], f"from score {found.score:.3g} and overlap {found.iou:g} on"]
    parts.append(count(found.images, "image"))
    head(figure, f"{found.predicted} against {found.against}", "   ·   ".join(parts))
    wide = bool(found.curves)
    widths = (1.1, 1.2, 0.8) if wide else (1.2, 0.8)
    grid = figure.add_gridspec(
        1, len(widths), width_ratios=widths, left=0.055, right=0.975, bottom=0.13, top=0.79, wspace=0.42
    )
    colours = {label: tuple(c / 255 for c in rgb) for label, rgb in colours_of(_names(found)).items()}
    if wide:
        _draw_curves(figure.add_subplot(grid[0, 0]), found, colours)
    _draw_confusion(figure.add_subplot(grid[0, -2]), found)
    _draw_classes(figure.add_subplot(grid[0, -1]), found, colours)
    return saved(figure, format)


def _names(found: Evaluation) -> list[str]:
    return sorted(each.label for each in found.classes)


def _draw_curves(axes: Axes, found: Evaluation, colours: dict[str, Any]) -> None:
    recalls = np.linspace(0, 1, 101)
    shown = [each for each in found.classes if each.label in found.curves][:_CURVES]
    for each in shown:
        axes.plot(recalls, found.curves[each.label], color=colours[each.label], linewidth=1.6, label=each.label)
    axes.plot(recalls, np.mean(list(found.curves.values()), axis=0), color=INK, linewidth=2.4, label="mean of classes")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    rest = len(found.curves) - len(shown)
    finish(
        axes,
        "Precision over recall",
        under=f"overlap {found.iou:g}" + (f"; {rest:,} more classes in the mean" if rest else ""),
        left="precision",
        bottom="recall",
        grid="both",
    )
    ticks = [n / 5 for n in range(6)]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    for text in axes.legend(loc="lower left", frameon=False, fontsize=8.5).get_texts():
        write(text, _short(text.get_text()))


def _draw_confusion(axes: Axes, found: Evaluation) -> None:
    labels = [each.label for each in found.classes[:_CONFUSED]]
    places = {label: n for n, label in enumerate((*labels, ""))}
    times = np.zeros((len(places), len(places)))
    for each in found.confusion:
        if each.label in places and each.predicted in places:
            times[places[each.label], places[each.predicted]] += each.times
    rows = times.sum(axis=1, keepdims=True)
    parts = np.divide(times, rows, out=np.zeros_like(times), where=rows > 0)
    axes.imshow(parts, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    rest = len(found.classes) - len(labels)
    finish(
        axes,
        "What was taken for what",
        under=f"the {len(labels)} most frequent classes of {len(found.classes):,}" if rest > 0 else "",
        bottom="predicted",
        grid="x",
    )
    axes.grid(visible=False)
    axes.set_ylabel("labelled", fontsize=9, color=MUTED)
    axes.spines["bottom"].set_color(GRID)
    for row, column in zip(*np.nonzero(times), strict=True):
        ink = "#ffffff" if parts[row, column] > 0.6 else INK
        number = f"{int(times[row, column]):,}"
        axes.text(column, row, number, ha="center", va="center", fontsize=8 if len(places) < 9 else 6.5, color=ink)
    axes.set_xticks(range(len(places)), [""] * len(places), rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(places)), [""] * len(places))
    for axis in (axes.xaxis, axes.yaxis):
        for tick, name in zip(axis.get_major_ticks(), (*labels, _NOTHING), strict=True):
            # A tick's text comes from its formatter when it is drawn, so it is set there.
            write(tick.label1, _short(name))
        axis.set_ticklabels([tick.label1.get_text() for tick in axis.get_major_ticks()])


def _draw_classes(axes: Axes, found: Evaluation, colours: dict[str, Any]) -> None:
    scored = [(each.label, each.ap if found.coco else each.f1) for each in found.classes]
    known: Sequence[tuple[str, float]] = [(label, value) for label, value in scored if value is not None][:_BARS]
    names, values = [label for label, _ in known], [value for _, value in known]
    what = "AP at overlaps 0.5 to 0.95" if found.coco else "F1 by class"
    bars(axes, what, names, values, [colours[name] for name in names], shown=".3f")


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"
