"""Test what readers and writers of labelling tools share: keypoints beside an outline as two shapes of a group."""

from __future__ import annotations

from datacache.annotations.formats.geometry import parted, rejoined
from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import Extra, Keypoints, Polygon, pack

RING = Extra(Polygon(pack((2, 2, 20, 2, 20, 20))))
POINTS = Extra(keypoints=Keypoints(pack((4, 4, 9, 6)), b"\2\1"))
OUTLINE = Box("cat", 2, 2, 20, 20, occluded=True, attributes=(("wet", "yes"),), extra=RING)
DOTS = Box("cat", 4, 4, 9, 6, extra=POINTS)


def in_group(box: Box, group: int, **more: object) -> Box:
    assert box.extra is not None
    return box._replace(extra=box.extra._replace(group=group), **more)  # type: ignore[arg-type]


def shapes(*boxes: Box) -> list[Box]:
    return list(parted(Annotation("a.jpg", 30, 30, boxes)))


def test_keypoints_beside_an_outline_or_another_box_are_a_shape_of_the_same_group() -> None:
    both = OUTLINE._replace(extra=RING._replace(keypoints=POINTS.keypoints))
    boxed = DOTS._replace(x1=1.0)
    first, second, third = 1_000_001, 1_000_002, 3
    assert shapes(both, in_group(both, third), DOTS, boxed) == [
        in_group(OUTLINE, first),
        in_group(DOTS, first),
        in_group(OUTLINE, third),
        in_group(DOTS, third),
        DOTS,
        Box("cat", 1, 4, 9, 6, extra=Extra(group=second)),
        in_group(DOTS, second),
    ]
    assert rejoined(shapes(both, in_group(both, third), DOTS, boxed)) == (both, in_group(both, third), DOTS, boxed)


def test_shapes_that_somebody_has_grouped_are_one_object_of_that_group() -> None:
    both = in_group(OUTLINE._replace(extra=RING._replace(keypoints=POINTS.keypoints)), 7)
    outline, dots = in_group(OUTLINE, 7), in_group(DOTS, 7)
    assert rejoined([outline, dots]) == rejoined([dots, outline]) == (both,)
    repeated = in_group(DOTS, 7, attributes=OUTLINE.attributes, occluded=True)
    assert rejoined([outline, repeated]) == (both,)
    dog = Box("dog", 1, 1, 2, 2, extra=Extra(group=7))
    assert rejoined([outline, dots, dog, outline, dots]) == (both, dog, both)


def test_shapes_that_say_more_stay_as_they_are() -> None:
    outline, dots = in_group(OUTLINE, 7), in_group(DOTS, 7)
    for other in (
        DOTS,
        in_group(DOTS, 8),
        in_group(DOTS, 7, label="dog"),
        in_group(DOTS, 7, truncated=True),
        in_group(DOTS, 7, attributes=(("wet", "no"),)),
        dots._replace(extra=dots.extra._replace(author="me")),  # type: ignore[union-attr]
        outline,
    ):
        assert rejoined([outline, other]) == (outline, other)
    assert rejoined([dots, dots]) == (dots, dots)
    assert rejoined([dots, outline, outline]) == (dots, outline, outline)
