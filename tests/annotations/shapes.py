"""Strategies for objects of every kind, which the tests of tables and of formats draw from."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from datacache.annotations.shapes.outline import Extra, Keypoints, Mask, Polygon, Rotated, pack, polygon_of

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
"""What a table must keep, whether a reader would make it or not."""
