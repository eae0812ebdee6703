"""Coordinates of Pascal VOC files, from text and to text, with pixels counted from 0 or from 1.

Used by `voc` and `voc_reader`. Pure, any thread; what is found by its text is made once and never changed.
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Final

from datacache.annotations.numbers import parse_number

_EXACT: Final = Context(prec=64, traps=[])
"""1.1 - 1 is 0.1 in decimals and not in floats: with these, what was written is read as it was."""


class Numbers(dict[str, float]):
    """Coordinates by their text. Small whole numbers are found five times as fast as `float` reads them; others are
    read and not kept. `ValueError` for what is no number."""

    def __init__(self, first: int) -> None:
        super().__init__((str(number), float(number - first)) for number in range(4096))
        self._first = first

    def __missing__(self, text: str) -> float:
        value = parse_number(text) if len(text) <= 64 else None
        if value is None:
            raise ValueError(text)
        if not self._first:
            return value
        if value.is_integer() or not 1e-20 < abs(value) < 1e15:
            return value - self._first
        return float(_EXACT.subtract(Decimal(text), self._first))


EDGES: Final = Numbers(0)
"""For numbers that are pixel edges, counted from 0."""
FIRST_PIXELS: Final = Numbers(1)
"""For the left and upper sides where pixels are counted from 1; the right and lower ones are edges then too, as the
last pixel's number is the number of pixels up to its far edge."""


def number_text(value: float, first: int) -> str:
    """The shortest text that `Numbers(first)` reads as this number; without a fraction where it has none."""
    if value == int(value):
        return str(int(value) + first)
    return str(_EXACT.add(Decimal(repr(value)), first)) if first else repr(value)
