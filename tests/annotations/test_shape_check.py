"""Outlines and keypoints that leave the check are finite, have an area, and lie in their image."""

from __future__ import annotations

import math

import numpy as np
import pytest

from datacache.annotations.check import check
from datacache.annotations.image_header import ImageHeader
from datacache.annotations.model import Box, Draft
from datacache.annotations.shapes.mask import from_runs
from datacache.annotations.shapes.outline import Extra, Keypoints, Polygon, Rotated, bounds, pack

INSIDE = Polygon(pack((1, 2, 5, 2, 5, 6)))


def checked(extra: Extra, *edges: float) -> tuple[Extra | None, list[tuple[str, str]]]:
    box = Box("a", *(edges or (1.0, 2.0, 5.0, 6.0)), line=3, extra=extra)
    annotation, problems = check(Draft("f", "", 10, 8, (box,)), ImageHeader("jpeg", 10, 8), "a.jpg")
    assert annotation is not None
    assert all((problem.file, problem.line) == ("f", 3) for problem in problems)
    return annotation.boxes[0].extra, [(problem.code, problem.action) for problem in problems]


@pytest.mark.parametrize(
    "extra",
    [
        Extra(INSIDE),
        Extra(Rotated(pack((1, 2, 5, 2, 5, 6, 1, 6)))),
        Extra(from_runs([80], 10, 8)),
        Extra(INSIDE, Keypoints(pack((1, 2, 10, 8)), b"\2\1"), area=4.0),
        Extra(track=4),
    ],
)
def test_what_is_right_is_kept_as_it_is(extra: Extra) -> None:
    assert checked(extra) == (extra, [])


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        (Extra(Polygon(pack((1, 2, math.nan, 2, 5, 6)))), "shape-not-finite"),
        (Extra(Polygon(pack((1, 2, 5, 6)))), "polygon-empty"),
        (Extra(Polygon(b"")), "polygon-empty"),
        (Extra(Polygon(pack((1, 2, 5, 2, 3, 2)))), "polygon-empty"),
        (Extra(Polygon(pack((11, 2, 15, 2, 13, 5)))), "polygon-empty"),
        (Extra(from_runs([72], 9, 8)), "mask-size"),
        (Extra(keypoints=Keypoints(pack((1, math.inf)), b"\2")), "shape-not-finite"),
    ],
)
def test_what_cannot_be_meant_is_left_out_and_the_object_stays(extra: Extra, code: str) -> None:
    assert checked(extra) == (None, [(code, "repaired")])
    assert checked(extra._replace(track=2, area=3.5))[0] == Extra(track=2, area=None if extra.outline else 3.5)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_left_out(score: float) -> None:
    assert checked(Extra(score=score)) == (None, [("score-not-finite", "repaired")])
    assert checked(Extra(INSIDE, score=score)) == (Extra(INSIDE), [("score-not-finite", "repaired")])


def test_an_author_has_no_halves_of_characters() -> None:
    assert checked(Extra(author="a\ud800\udcff")) == (Extra(author="a\ufffd\ufffd"), [])


def test_lines_that_cross_again_and_again_are_left_out_before_anybody_computes_with_them() -> None:
    """Shapely would need minutes for 1,000 points at random, and gigabytes for more."""
    points = np.random.default_rng(7).random((100_000, 2)) * (10, 8)
    tangled = Polygon(points.tobytes())
    assert checked(Extra(tangled), 0, 0, 10, 8) == (None, [("shape-too-large", "repaired")])
    angles = np.linspace(0, 2 * np.pi, 50_000, endpoint=False)
    circle = Extra(Polygon(np.stack((5 + 4 * np.cos(angles), 4 + 4 * np.sin(angles)), 1).tobytes()))
    assert checked(circle, 1, 0, 9, 8) == (circle, [])


def test_an_outline_is_cut_at_the_edge_of_its_image() -> None:
    found, problems = checked(Extra(Polygon(pack((6, 2, 14, 2, 14, 6, 6, 6))), area=32.0), 6, 2, 10, 6)
    assert problems == [("polygon-clipped", "repaired")]
    assert found is not None
    assert found.area is None
    assert isinstance(found.outline, Polygon)
    assert bounds(found.outline.points) == (6, 2, 10, 6)


def test_a_rotated_box_may_stick_out_of_its_image() -> None:
    turned = Extra(Rotated(pack((-2, 3, 5, -1, 6, 1, -1, 5))))
    assert checked(turned, 0, 0, 6, 5) == (turned, [])
    apart = Extra(Rotated(pack((-3, 2, 2, -3, 1, -4, -4, 1))))
    assert checked(apart, 0, 0, 2, 2) == (None, [("polygon-empty", "repaired")])


def test_a_box_that_is_not_the_one_around_its_outline_is_noted() -> None:
    assert checked(Extra(INSIDE), 1, 2, 7.5, 6) == (Extra(INSIDE), [("box-shape-differ", "noted")])


def test_a_keypoint_outside_is_noted() -> None:
    extra = Extra(keypoints=Keypoints(pack((1, 2, 11, 2)), b"\2\1"))
    assert checked(extra) == (extra, [("keypoint-outside", "noted")])
