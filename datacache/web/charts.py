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


class Column(NamedTuple):
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

    columns: list[Column]
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
        found.append(Column(bar, _r(_LEFT + n * step + gap / 2), _r(base - tall), _r(step - gap), _r(tall)))
    middle = 0 if at_edges else step / 2
    marks = _without_overlaps(Mark(_r(_LEFT + n * step + middle), bar.mark) for n, bar in enumerate(bars))
    return Columns(found, marks, [Mark(_r(base - tick / top * high), short(tick)) for tick in ticks], base)


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
    """Leave out the marks that would touch the one before."""
    kept: list[Mark] = []
    free = float("-inf")
    for mark in marks:
        half = len(mark.text) * _CHARACTER / 2
        if mark.text and mark.at - half >= free:
            kept.append(mark)
            free = mark.at + half + 4
    return kept


def _r(number: float) -> float:
    return round(number, 1)
