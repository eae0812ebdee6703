"""Draw what all pictures of numbers share: a sheet, colours, titles, and texts in any script.

Needs matplotlib (`pip install 'dsctl[plot]'`), which is imported here and only when something is plotted; it draws
into memory, without a display and without its global state, so that any thread may plot.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from datacache.annotations.pictures import draw as fonts
from datacache.core.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

FORMATS: Final = ("png", "svg", "pdf")
INK, MUTED, GRID, PAPER, BAR, EDGE = "#22272e", "#6b7280", "#e5e7eb", "#ffffff", "#4c78a8", "#ffffff"
_OWN_FONT = "DejaVuSans"
"""Matplotlib draws with it anyway, and has its bold, too."""


def sheet(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches. `UsageError` where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise UsageError("plots need matplotlib", hint="Install it: pip install 'dsctl[plot]'") from exc

    figure = Figure(figsize=(width, height), dpi=120, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def head(figure: Figure, title: str, under: str, part: float = 1.0) -> None:
    """Write a title and a line under it. `part` is what 7.6 inches are of the figure's height."""
    write(figure.text(0.025, 1 - 0.06 * part, "", fontsize=17, fontweight="bold", color=INK), title)
    write(figure.text(0.025, 1 - 0.1 * part, "", fontsize=11, color=MUTED), under)


def saved(figure: Figure, format: str) -> bytes:
    """Return a file of one of `FORMATS`: the same numbers give the same bytes."""
    out = io.BytesIO()
    # Without these two the same statistics give another file each time, and with each release of matplotlib.
    metadata: dict[str, Any] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[format]
    figure.savefig(out, format=format, metadata=metadata, facecolor=PAPER)
    return out.getvalue()


def bars(
    axes: Axes, title: str, names: Sequence[str], numbers: Sequence[float], colours: Sequence[Any], *, shown: str = ","
) -> None:
    """Draw a bar for each name; `shown` formats its number."""
    places = range(len(names))
    axes.barh(places, numbers, color=colours, height=0.72)
    axes.set_yticks([])
    for place, name in zip(places, names, strict=True):
        text = axes.text(-0.02, place, "", transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9.5)
        text.set_color(INK)
        write(text, name if len(name) <= 20 else f"{name[:19]}…")
    axes.set_ylim(max(len(names), 8) - 0.4, -0.6)
    top = max(numbers, default=1) or 1
    axes.set_xlim(0, top * 1.18)
    for place, number in zip(places, numbers, strict=True):
        axes.text(number + top * 0.012, place, format(number, shown), va="center", fontsize=8.5, color=MUTED)
    finish(axes, title, grid="x")
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])


def finish(axes: Axes, title: str, *, under: str = "", left: str = "", bottom: str = "", grid: str = "y") -> None:
    """Give all of them the same looks."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    above: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(title, (0, 1), (0, 20), fontsize=11, fontweight="bold", color=INK, **above)
    axes.annotate(under, (0, 1), (0, 7), fontsize=8.5, color=MUTED, **above)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.set_axisbelow(True)
    if grid != "x":
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(axis="both" if grid == "both" else "y", color=GRID, linewidth=0.8)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=MUTED if grid != "x" else INK)
    axes.set_ylabel(left, fontsize=9, color=MUTED)
    axes.set_xlabel(bottom, fontsize=9, color=MUTED)


def write(text: Text, value: str) -> None:
    """Set a text in whatever script it is; nothing in it is a formula."""
    from matplotlib.font_manager import FontProperties

    face, drawable = fonts.for_text(value)
    text.set_parse_math(False)
    text.set_text(drawable)
    if face.file is not None and face.file.stem != _OWN_FONT:
        size, weight = text.get_fontsize(), text.get_fontweight()
        text.set_fontproperties(FontProperties(fname=str(face.file), size=size, weight=weight))
