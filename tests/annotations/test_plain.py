"""Boxes as plain values, and back."""

from __future__ import annotations

from itertools import combinations

from datacache.annotations.model import Box
from datacache.annotations.plain import boxes_of, columns_of
from datacache.annotations.shapes.outline import Extra, Keypoints, Mask, Polygon, Rotated, pack

POINTS = pack((1.0, 2.0, 30.0, 2.5, 17.25, 40.0, 3.0, 9.0))
BOXES = (
    Box("cat", 1.0, 2.0, 30.0, 40.0, truncated=True, attributes=(("pose", "left"),), line=7),
    Box("dog", 1.0, 2.0, 30.0, 40.0, extra=Extra(Polygon(POINTS, (3, 4), 2), area=12.5)),
    Box("cat", 1.0, 2.0, 30.0, 40.0, extra=Extra(Mask(b"0123", 64, 48, listed=True), score=0.5, author="me")),
    Box("ox", 1.0, 2.0, 30.0, 40.0, extra=Extra(Rotated(POINTS), track=3, group=4)),
    Box("ox", 1.0, 2.0, 30.0, 40.0, extra=Extra(None, Keypoints(POINTS, b"\0\1\2\2"))),
)


def test_any_boxes_come_back_with_the_types_of_all_their_parts() -> None:
    assert boxes_of(columns_of(())) == ()
    for count in range(1, len(BOXES) + 1):
        for boxes in combinations(BOXES, count):
            again = boxes_of(columns_of(boxes))
            assert repr(again) == repr(boxes)
            assert again == boxes
