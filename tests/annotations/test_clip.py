"""Geometry of outlines: windows, movements, rectangles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import shapely
from hypothesis import assume, given
from hypothesis import strategies as st

from datacache.annotations.check import displayed
from datacache.annotations.model import Box
from datacache.annotations.shapes import clip as clips
from datacache.annotations.shapes import mask as masks
from datacache.annotations.shapes.outline import (
    Extra,
    Keypoints,
    Polygon,
    Rotated,
    area,
    bounds,
    pack,
    polygon_of,
    rings,
    unpack,
)
from datacache.conversion.images import turned
from tests.annotations.shapes import bitmaps, cases, hundredths, points_within

SQUARE = pack([0, 0, 8, 0, 8, 8, 0, 8])
HOLE = pack([2, 2, 2, 6, 6, 6, 6, 2])


def test_what_lies_in_the_window_stays_as_it_is() -> None:
    polygon = polygon_of([SQUARE, HOLE], 2)
    assert clips.clip(polygon, (0, 0, 8, 8)) is polygon
    assert clips.clip(polygon, (8, 0, 9, 8)) is None
    assert clips.clip(polygon, (2.5, 2.5, 5, 5)) is None  # in its hole
    assert clips.clip(Polygon(pack([0, 0, math.nan, 1, 2, 2])), (0, 0, 8, 8)) is None


def test_a_hole_stays_a_hole_and_one_that_the_window_cuts_becomes_a_bay() -> None:
    polygon = polygon_of([SQUARE, HOLE], 2)
    kept = clips.clip(polygon, (1, 1, 8, 8))
    assert kept is not None
    assert [hole for _, hole in rings(kept)] == [False, True]
    assert (bounds(kept.points), area(kept)) == ((1, 1, 8, 8), 33)
    bay = clips.clip(polygon, (0, 0, 4, 8))
    assert bay is not None
    assert (bay.holes, bay.ends, area(bay)) == (0, (), 24)


def test_a_window_can_leave_two_rings_of_one() -> None:
    kept = clips.clip(Polygon(pack([0, 0, 9, 0, 9, 9, 6, 9, 6, 3, 3, 3, 3, 9, 0, 9])), (0, 5, 9, 9))
    assert kept is not None
    assert (kept.ends, kept.holes, area(kept)) == ((4, 8), 0, 24)


def test_what_is_left_of_a_ring_that_crosses_itself_is_a_part_of_what_it_fills() -> None:
    bow = Polygon(pack([0, 0, 8, 8, 8, 0, 0, 8]))  # its lines go round both halves in opposite directions
    kept, share = clips.carried(bow, [clips.Movement(lambda x, y: (x, y), 4, 8, cuts=True)])
    assert kept is not None
    assert share == pytest.approx(0.5)


@cases
@given(points_within(9, 9, high=12), hundredths(5), hundredths(5))
def test_a_tangled_ring_cut_at_a_window_fills_the_same_there(drawn, left, top) -> None:
    kept = clips._clipped_rings(Polygon(drawn), (left, top, left + 3, top + 3))
    for x in np.arange(0.5, 9) + 1e-4:
        for y in np.arange(0.5, 9) + 1e-5:
            inside = left < x < left + 3 and top < y < top + 3 and encloses(drawn, x, y)
            assert (kept is not None and encloses(kept.points, x, y)) == inside


def encloses(ring: bytes, x: float, y: float) -> bool:
    """Tell whether the lines enclose a point an odd number of times."""
    points = np.frombuffer(ring).reshape(-1, 2)
    lines = np.concatenate((points, np.roll(points, -1, 0)), 1)
    ax, ay, bx, by = lines[(lines[:, 1] > y) != (lines[:, 3] > y)].T
    return bool(np.count_nonzero(x < ax + (y - ay) * (bx - ax) / (by - ay)) % 2)


def test_holes_of_a_tangled_ring_go_with_it() -> None:
    polygon = polygon_of([SQUARE, HOLE, SQUARE], 2)
    kept = clips._clipped_rings(polygon, (0, 0, 4, 8))
    assert kept is not None
    assert (kept.ends, kept.holes, area(kept)) == ((4, 8, 12), 2, 32 - 8 + 32)
    assert clips._clipped_rings(polygon, (8, 0, 9, 8)) is None
    assert clips._clipped_rings(polygon, (0, 0, 1, 8)) == polygon_of([pack([0, 0, 1, 0, 1, 8, 0, 8])] * 2)


def test_a_crop_of_a_comb_that_only_a_turn_has_tangled_has_its_teeth() -> None:
    teeth = [(x, y) for n in range(200) for x, y in ((4 * n, 0), (4 * n, 900), (4 * n + 2, 900), (4 * n + 2, 0))]
    comb = Polygon(pack(value for point in [*teeth, (800, 0), (800, -9), (0, -9)] for value in point))
    assert not clips.is_tangled(comb)
    cosine = math.sqrt(0.5)
    turn = clips.Movement(lambda x, y: (cosine * (x - y) + 700, cosine * (x + y) + 9), 1400, 1400)
    assert clips.is_tangled(clips.moved(comb, turn))  # type: ignore[arg-type]
    crop = clips.Movement(lambda x, y: (x, y), 700, 1400, cuts=True)
    kept, share = clips.carried(comb, [turn, crop])
    assert isinstance(kept, Polygon)
    drawn = [shapely.Polygon(np.frombuffer(each.points).reshape(-1, 2)) for each in (clips.moved(comb, turn), kept)]  # type: ignore[union-attr]
    expected = shapely.intersection(drawn[0], shapely.box(0, 0, 700, 1400)).area
    assert area(kept) == pytest.approx(expected)
    assert share == pytest.approx(expected / drawn[0].area)


def test_of_a_ring_that_crosses_itself_the_parts_that_it_fills_are_kept() -> None:
    kept = clips.clip(Polygon(pack([0, 0, 8, 8, 8, 0, 0, 8])), (0, 0, 7, 8))
    assert kept is not None
    assert area(kept) == pytest.approx(16 + 16 - 7)


@cases
@given(points_within(9, 9), hundredths(5), hundredths(5))
def test_the_window_cuts_as_shapely_does(ring, left, top) -> None:
    polygon, window = Polygon(ring), (left, top, left + 3, top + 3)
    drawn = shapely.Polygon(np.frombuffer(ring).reshape(-1, 2))
    assume(shapely.node(drawn.boundary).length > drawn.length - 1e-9)  # no line lies on another
    shape = shapely.make_valid(drawn)
    there = shapely.intersection(shape, shapely.box(*window)).area
    kept = clips.clip(polygon, window)
    if kept is None:
        assert there < 1e-5
        return
    if kept is not polygon:
        assert area(kept) == pytest.approx(there, abs=1e-5)
    x1, y1, x2, y2 = bounds(kept.points)
    assert left <= x1 <= x2 <= left + 3
    assert top <= y1 <= y2 <= top + 3


@cases
@given(points_within(9, 9, low=1))
def test_the_smallest_rectangle_holds_every_point_and_begins_upper_left(found) -> None:
    corners = np.array(unpack(clips.smallest_rectangle(found).corners)).reshape(4, 2)
    sides = np.roll(corners, -1, 0) - corners
    assert (sides[0] @ sides[1], sides[0] + sides[2]) == (pytest.approx(0, abs=1e-6), pytest.approx([0, 0], abs=1e-6))
    assert sides[0][0] >= abs(sides[0][1]) - 1e-6
    assert sides[0][0] * sides[1][1] - sides[0][1] * sides[1][0] >= -1e-6  # clockwise
    hull = shapely.Polygon(corners).buffer(1e-6)
    assert all(hull.covers(shapely.Point(xy)) for xy in np.frombuffer(found).reshape(-1, 2))


@cases
@given(st.integers(1, 8), bitmaps())
def test_outlines_turn_with_their_image_as_boxes_do(orientation, pixels) -> None:
    height, width = pixels.shape
    after = turned(pixels, orientation)
    movement = clips.displayed_movement(orientation, width, height)
    mask = masks.encode(pixels, 0, 0, width, height)._replace(listed=True)
    moved = clips.moved(mask, movement)
    assert moved == masks.encode(after, 0, 0, after.shape[1], after.shape[0])._replace(listed=True)
    seen = Keypoints(pack([0.25, 0.5, 0, 0]), b"\2\0")
    extra = Extra(Polygon(pack([0.25, 0.5, 1, 2])), seen, track=3)
    box = displayed(Box("", 0.25, 0.5, 1, 2, extra=extra), orientation, width, height)
    assert box.extra is not None
    outline, keypoints = box.extra.outline, box.extra.keypoints
    assert isinstance(outline, Polygon)
    assert keypoints is not None
    assert (bounds(outline.points), box.extra.track) == (box[1:5], 3)
    assert (keypoints.points, keypoints.visible) == (outline.points[:16] + pack([0, 0]), b"\2\0")


def test_a_turned_box_keeps_its_corners_in_order_in_a_mirror() -> None:
    quad = Rotated(pack([1, 2, 4, 3, 3, 6, 0, 5]))
    mirror = clips.displayed_movement(2, 9, 9)
    mirrored = clips.moved(quad, mirror)
    assert unpack(mirrored.corners).tolist() == [5, 3, 8, 2, 9, 5, 6, 6]
    assert clips.moved(mirrored, mirror) == quad
