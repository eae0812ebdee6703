"""Strategies for objects of every kind, which the tests of tables and of formats draw from."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from datacache.annotations.model import Box
from datacache.annotations.shapes.outline import Extra, Keypoints, Mask, Polygon, Rotated, pack, polygon_of

CASES = int(os.environ.get("DATACACHE_TEST_CASES") or 200)
cases = settings(max_examples=CASES)
"""How many annotations are drawn for a comparison, and for what a format reads again as it was written.
`DATACACHE_TEST_CASES=10000` asks for as many as a format must hold; they take minutes: `pytest --timeout 0`."""
words = st.text(max_size=6)
any_number = (
    st.integers(0, 30_000).map(lambda n: n / 100) | st.floats() | st.sampled_from([-0.0, math.inf, 2.0**53, 0.1 + 0.2])
)


def points(number: st.SearchStrategy[float], low: int, high: int) -> st.SearchStrategy[bytes]:
    """Between `low` and `high` points."""
    return st.lists(st.tuples(number, number), min_size=low, max_size=high).map(
        lambda found: pack(value for point in found for value in point)
    )


@st.composite
def any_polygon(draw: st.DrawFn, number: st.SearchStrategy[float] = any_number) -> Polygon:
    """A polygon of any points, with rings and holes."""
    rings = draw(st.lists(points(number, 0, 6), min_size=1, max_size=4))
    return polygon_of(rings, draw(st.integers(0, 2 ** len(rings) - 1)))


@st.composite
def any_keypoints(draw: st.DrawFn, number: st.SearchStrategy[float] = any_number) -> Keypoints:
    """Keypoints of any number and visibility."""
    visible = draw(st.lists(st.integers(0, 2), max_size=5))
    return Keypoints(draw(points(number, len(visible), len(visible))), bytes(visible))


any_outline = (
    any_polygon()
    | st.builds(Mask, st.binary(max_size=20), st.integers(0, 70_000), st.integers(0, 300), st.booleans())
    | st.builds(Rotated, points(any_number, 4, 4))
)
any_extra = st.builds(
    Extra,
    st.none() | any_outline,
    st.none() | any_keypoints(),
    st.integers(-1, 2**40),
    st.integers(-1, 9),
    st.none() | st.floats(0, 1),
    words,
    st.none() | st.floats(0, 1e9),
)
"""Annotations that a table must keep, whether a reader would make them or not."""


@st.composite
def bitmaps(draw: st.DrawFn) -> Any:
    """A small bitmap; its objects are often ragged, and touch its edges."""
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    bits = draw(st.integers(0, 2 ** (width * height) - 1))
    return np.array([bits >> n & 1 for n in range(width * height)], bool).reshape(height, width)


def hundredths(highest: int) -> st.SearchStrategy[float]:
    """Numbers of two decimals."""
    return st.integers(0, highest * 100).map(lambda value: value / 100)


def points_within(width: int, height: int, low: int = 3, high: int = 8) -> st.SearchStrategy[bytes]:
    """Points of an image, in hundredths."""
    return st.lists(st.tuples(hundredths(width), hundredths(height)), min_size=low, max_size=high).map(
        lambda found: pack(value for point in found for value in point)
    )


def one_of_a_kind(found: Sequence[Box]) -> bool:
    """Tell whether no two objects have both group and class in common: those may be one, if one has keypoints alone."""
    grouped = [(box.label, box.extra.group) for box in found if box.extra and box.extra.group >= 0]
    return len(grouped) == len({*grouped})
