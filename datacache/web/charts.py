"""Lay out charts: where bars, lines and their numbers are, in units of an SVG. Numbers in, numbers out; templates draw.

`charts.html` has a macro for each. Pure functions, any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

WIDTH: Final = 400
HEIGHT: Final = 190
"""Of every chart: about what a phone is wide, so that text is as large there as elsewhere."""
_LEFT, _TOP, _FOOT, _RIGHT = 46, 10, 24, 8
_CHARACTER: Final = 6.4
"""Width of a digit, in a font of 11."""


class Bar(NamedTuple):
    """What is drawn as one bar."""

    name: str
    """It says what is counted: `640 to 799`."""
    mark: str
    """The text below it; '' for none."""
    number: int
    href: str = ""
    note: str = ""
    """The number in words; '' for the number and the chart's unit."""


class PlacedBar(NamedTuple):
    """A bar, and where it is."""

    bar: Bar
    x: float
    y: float
    width: float
    height: float


class Mark(NamedTuple):
    """A text beside an axis."""

    at: float
    text: str


class Columns(NamedTuple):
    """A chart of bars that stand."""

    columns: list[PlacedBar]
    marks: list[Mark]
    ticks: list[Mark]
    base: float


def columns(bars: Sequence[Bar], *, at_edges: bool = False) -> Columns:
    """Lay out bars that stand side by side. `at_edges` has their marks where they begin, not below their middle."""
    ticks = nice_ticks(max((bar.number for bar in bars), default=0))
    top = ticks[-1]
    high, base = HEIGHT - _TOP - _FOOT, HEIGHT - _FOOT
    step = (WIDTH - _LEFT - _RIGHT) / max(len(bars), 4)
    found = []
    for n, bar in enumerate(bars):
        tall = max(bar.number / top * high, 1.5) if bar.number else 0
        gap = min(step * 0.12, 3)
        found.append(PlacedBar(bar, _r(_LEFT + n * step + gap / 2), _r(base - tall), _r(step - gap), _r(tall)))
    middle = 0 if at_edges else step / 2
    marks = _without_overlaps(Mark(_r(_LEFT + n * step + middle), bar.mark) for n, bar in enumerate(bars))
    return Columns(found, marks, [Mark(_r(base - tick / top * high), short(tick)) for tick in ticks], base)


class Point(NamedTuple):
    """A bar, and where its point is."""

    bar: Bar
    x: float
    y: float


class Steps(NamedTuple):
    """A chart of a number that changes: its points, and the line through them."""

    points: list[Point]
    path: str
    marks: list[Mark]
    ticks: list[Mark]


def steps(bars: Sequence[Bar | None]) -> Steps:
    """Lay out a number over time, the oldest at the left. None has no point, and the line goes on behind it."""
    ticks = nice_ticks(max((bar.number for bar in bars if bar), default=0))
    high, base = HEIGHT - _TOP - _FOOT, HEIGHT - _FOOT
    step = (WIDTH - _LEFT - _RIGHT) / max(len(bars), 1)
    points = [
        Point(bar, _r(_LEFT + (n + 0.5) * step), _r(base - bar.number / ticks[-1] * high))
        for n, bar in enumerate(bars)
        if bar
    ]
    path = "".join(f"{f'H{point.x}V' if n else f'M{point.x} '}{point.y}" for n, point in enumerate(points))
    marks = _without_overlaps(Mark(point.x, point.bar.mark) for point in points)
    return Steps(points, path, marks, [Mark(_r(base - tick / ticks[-1] * high), short(tick)) for tick in ticks])


class Cell(NamedTuple):
    """A cell of a heat map: its place in the grid, its number, and that as a part of the largest."""

    x: int
    y: int
    number: int
    part: float


def heat_map(numbers: Sequence[Sequence[int]]) -> list[Cell]:
    """Lay out the cells that have a number, row by row from the top."""
    most = max(map(max, numbers), default=0)
    return [
        Cell(x, y, number, round(number / most, 3))
        for y, row in enumerate(numbers)
        for x, number in enumerate(row)
        if number
    ]


def nice_ticks(top: float, most: int = 4) -> list[int]:
    """Return whole numbers from 0 to `top` or more, some `most` of them."""
    for exponent in count():
        for factor in (1, 2, 5):
            step = factor * 10**exponent
            if step * most >= top:
                return [n * step for n in range(max(2, -int(-top // step) + 1))]
    raise AssertionError  # the loop has no end


def short(number: float) -> str:
    """Write a number in few characters: `950`, `1.5k`, `20M`."""
    for limit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{letter}"
    return f"{number:g}"


def _without_overlaps(marks: Iterator[Mark]) -> list[Mark]:
    """Leave out the marks that would touch the one before, and those that repeat it."""
    kept: list[Mark] = []
    free = float("-inf")
    for mark in marks:
        half = len(mark.text) * _CHARACTER / 2
        if mark.text and mark.at - half >= free and mark.text != (kept[-1].text if kept else ""):
            kept.append(mark)
            free = mark.at + half + 4
    return kept


def _r(number: float) -> float:
    return round(number, 1)
