"""Numbers as annotation files write them, and the box around a polygon. Used by the readers. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence


def parse_number(text: str | bytes) -> float | None:
    """A number, `nan` and `inf` among them (the check of a draft speaks of those); None for any other text."""
    if (b"_" if isinstance(text, bytes) else "_") in text:  # type: ignore[operator]  # 1_000 is a number to Python alone
        return None
    try:
        return float(text)
    except ValueError:
        return None


def bounding_box(values: Sequence[float]) -> tuple[float, float, float, float]:
    """The box around x, y, x, y …; of `nan` where one of them is not finite, which min and max would pass over."""
    if not all(map(math.isfinite, values)):
        return (math.nan, math.nan, math.nan, math.nan)
    xs, ys = values[0::2], values[1::2]
    return min(xs), min(ys), max(xs), max(ys)
