"""What several data sets say of one image, joined."""

from __future__ import annotations

import pytest

from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import Extra, Keypoints, Mask, Outline, Polygon, Rotated, pack
from datacache.conversion import joining
from datacache.conversion.joining import joined

SQUARE = (10.0, 10.0, 50.0, 10.0, 50.0, 50.0, 10.0, 50.0)
ROUNDED = tuple(value + 0.004 for value in SQUARE)
TRIANGLE = (10.0, 10.0, 50.0, 10.0, 50.0, 50.0)


def box(outline: Outline | None = None, *, at: float = 10, **extra: object) -> Box:
    known = Extra(outline, **extra)  # type: ignore[arg-type]
    return Box("a", at, 10, at + 40, 50, extra=None if known == Extra() else known)


def objects(*found: list[Box]) -> list[Box]:
    return [*joined([Annotation("a.jpg", 100, 100, tuple(boxes)) for boxes in found]).boxes]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Polygon(pack(SQUARE)), Polygon(pack(TRIANGLE))),
        (Polygon(pack(SQUARE)), Polygon(pack([*SQUARE, *SQUARE]), (4, 8), 2)),
        (Polygon(pack(SQUARE)), Rotated(pack(SQUARE))),
        (Polygon(pack(SQUARE)), Mask(b"0P1", 4, 8)),
        (Mask(b"0P1", 4, 8), Mask(b"1o0", 4, 8)),
        (Rotated(pack(SQUARE)), Rotated(pack([*SQUARE[2:], *SQUARE[:2]]))),
    ],
)
def test_objects_of_one_box_whose_outlines_differ_are_all_kept(one: Outline, other: Outline) -> None:
    assert objects([box(one)], [box(other)]) == [box(one), box(other)]
    assert objects([box(one), box(other)], [box(other), box(one)]) == [box(one), box(other)]


def test_outlines_and_keypoints_that_differ_by_rounding_alone_are_of_one_object() -> None:
    for kind in (Polygon, Rotated):
        assert objects([box(kind(pack(SQUARE)))], [box(kind(pack(ROUNDED)))]) == [box(kind(pack(SQUARE)))]
    seen, near, hidden = (Keypoints(pack(points), bytes([mark])) for points, mark in (
        ((20.0, 20.0), 2), ((20.004, 20.0), 2), ((20.0, 20.0), 1)
    ))  # fmt: skip
    assert objects([box(keypoints=seen)], [box(keypoints=near)]) == [box(keypoints=seen)]
    assert objects([box(keypoints=seen)], [box(keypoints=hidden)]) == [box(keypoints=seen), box(keypoints=hidden)]


@pytest.mark.parametrize("side", [10.0, 10.63, 10.627, 10.633, 0.0])
def test_a_box_that_differs_by_less_than_a_hundredth_is_the_same_wherever_it_lies(side: float) -> None:
    for moved in (side - 0.009, side + 0.009):
        assert objects([box(at=side)], [box(at=moved)]) == [box(at=side)]
    assert len(objects([box(at=side)], [box(at=side + 0.011)])) == 2


def test_an_object_gets_what_another_data_set_knows_of_it_besides() -> None:
    outline, points = Polygon(pack(SQUARE)), Keypoints(pack((20.0, 20.0)), b"\2")
    mine, more = box(keypoints=points, track=3, author="me"), box(outline, area=1500.0, author="you", score=0.5)
    assert objects([mine], [more]) == [box(outline, keypoints=points, track=3, author="me", area=1500.0, score=0.5)]
    assert objects([box()], [more]) == [more]
    triangle = box(Polygon(pack(TRIANGLE)))
    assert objects([box(), box()], [more, triangle]) == [more, triangle], "one outline for each box without"


def test_each_object_is_compared_with_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, same = 0, joining._same

    def counted(one: Box, other: Box) -> bool:
        nonlocal compared
        compared += 1
        return same(one, other)

    monkeypatch.setattr(joining, "_same", counted)
    apart = [box(at=n) for n in range(2000)]
    assert len(objects(apart, [box(at=each.x1 + 0.004) for each in apart])) == 2000
    assert compared == 2000
    compared, outlines = 0, [Polygon(pack((*SQUARE, 10.0, 20.0 + n / 100))) for n in range(1000)]
    of_one_box = [*map(box, outlines)]
    assert objects(of_one_box[:500], of_one_box) == of_one_box
    assert compared <= 500 * joining._COMPARED
