"""YOLO's polygons, rotated boxes and keypoints: to the sixth decimal, and each line of one kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache.annotations.classes import read_data_yaml, read_pose
from datacache.annotations.formats import yolo
from datacache.annotations.model import Annotation, Box, Problem
from datacache.annotations.shapes.outline import Extra, Keypoints, Polygon, Rotated, Skeleton, pack
from tests.annotations.shapes import cases

CLASSES = ("cat", "dog")
IDS = {"cat": 0, "dog": 1}
POSE = Skeleton(("nose", "left eye", "right eye"), (), (0, 2, 1))
shares = st.integers(0, 1_000_000).map(lambda n: f"{n / 1_000_000:.6f}")
sizes = st.tuples(st.integers(1, 9000), st.integers(1, 9000))


def lines(least: int, most: int, *, step: int = 1) -> st.SearchStrategy[str]:
    numbers = st.integers(least, most).flatmap(lambda n: st.lists(shares, min_size=n * step, max_size=n * step))
    return st.lists(st.tuples(st.sampled_from("01"), numbers), max_size=4).map(
        lambda found: "".join(" ".join([id, *values]) + "\n" for id, values in found)
    )


def read(text: str, size: tuple[int, int] = (100, 200), **more: object) -> tuple[Annotation, list[Problem]]:
    draft, problems = yolo.parse(text.encode(), "f", width=size[0], height=size[1], classes=CLASSES, **more)  # type: ignore[arg-type]
    return Annotation("a.jpg", *size, draft.boxes), problems


@cases
@given(lines(4, 4), sizes)
def test_boxes_are_written_as_they_were_read(text: str, size: tuple[int, int]) -> None:
    annotation, problems = read(text, size)
    assert not problems
    assert all(box.extra is None for box in annotation.boxes)
    assert yolo.write(annotation, IDS).decode() == text


@cases
@given(lines(3, 8, step=2), sizes)
def test_polygons_are_written_as_they_were_read(text: str, size: tuple[int, int]) -> None:
    annotation, problems = read(text, size)
    assert not problems
    assert yolo.write_outlines([annotation], IDS)[0].decode() == text


@cases
@given(lines(4, 4, step=2), sizes)
def test_rotated_boxes_are_written_as_they_were_read(text: str, size: tuple[int, int]) -> None:
    annotation, _ = read(text, size, rotated=True)
    assert all(box.extra and isinstance(box.extra.outline, Rotated) for box in annotation.boxes)
    assert yolo.write_outlines([annotation], IDS)[0].decode() == text


@st.composite
def poses(draw: st.DrawFn) -> str:
    found = []
    for _ in range(draw(st.integers(0, 3))):
        points = [f"{draw(shares)} {draw(shares)} {draw(st.sampled_from('012'))}" for _ in POSE.names]
        found.append(f"{draw(st.sampled_from('01'))} 0.500000 0.250000 0.125000 0.062500 {' '.join(points)}\n")
    return "".join(found)


@cases
@given(poses(), sizes)
def test_keypoints_are_written_as_they_were_read(text: str, size: tuple[int, int]) -> None:
    annotation, problems = read(text, size, pose=POSE)
    assert not problems
    assert yolo.write_keypoints(annotation, IDS, POSE).decode() == text


@pytest.mark.parametrize("nowhere", ["-1 0", "0 0"])
def test_with_two_dimensions_a_keypoint_that_is_negative_or_0_is_not_there(nowhere: str) -> None:
    pose = Skeleton(("a", "b"), dims=2)
    annotation, problems = read(f"0 .5 .5 .2 .2 .25 .5 {nowhere}\n", pose=pose)
    assert not problems
    assert annotation.boxes[0].extra == Extra(keypoints=Keypoints(pack((25, 100, 0, 0)), b"\2\0"))


def test_a_row_of_zeros_is_no_keypoint() -> None:
    annotation, problems = read(f"0 .5 .5 .2 .2{' 0' * 9}\n", pose=POSE)
    assert not problems
    assert [box.extra for box in annotation.boxes] == [None]


@pytest.mark.parametrize("more", [".1 .1 2", ".1 .1 2 .1 .1 2 .1 .1", ".1 .1 3 .1 .1 2 .1 .1 1", "x .1 2 " * 3])
def test_keypoints_that_are_not_those_of_the_data_set_leave_a_box(more: str) -> None:
    annotation, problems = read(f"0 .5 .5 .2 .2 {more}\n", pose=POSE)
    assert [box.extra for box in annotation.boxes] == [None]
    assert [(problem.code, problem.action) for problem in problems] == [("keypoints-malformed", "repaired")]


def test_a_polygon_of_too_many_points_is_refused_before_it_is_read() -> None:
    annotation, problems = read(f"0 .5 .5 .2 .2\n1{' .1' * 200_004}\n")
    assert len(annotation.boxes) == 1
    assert [(problem.code, problem.action, problem.line) for problem in problems] == [("shape-too-large", "skipped", 2)]


def test_what_has_no_outline_is_written_as_its_corners_and_all_inside_the_image() -> None:
    boxes = (
        Box("cat", 10, 20, 30, 40),
        Box("dog", 0, 0, 100, 9, extra=Extra(Polygon(pack((-0.001, 0, 100.0001, 0, 50, 9))))),
        Box("cow", 1, 1, 2, 2),
    )
    assert yolo.write_outlines([Annotation("a.jpg", 100, 200, boxes)], IDS)[0].decode() == (
        "0 0.100000 0.100000 0.300000 0.100000 0.300000 0.200000 0.100000 0.200000\n"
        "1 0.000000 0.000000 1.000000 0.000000 0.500000 0.045000\n"
    )


def test_an_object_with_fewer_keypoints_gets_zeros() -> None:
    few = Extra(keypoints=Keypoints(pack((50, 50)), b"\1"))
    boxes = (Box("cat", 0, 0, 100, 200, extra=few), Box("dog", 0, 0, 100, 200))
    assert yolo.write_keypoints(Annotation("a.jpg", 100, 200, boxes), IDS, POSE).decode() == (
        "0 0.500000 0.500000 1.000000 1.000000 0.500000 0.250000 1" + " 0.000000 0.000000 0" * 2 + "\n"
        "1 0.500000 0.500000 1.000000 1.000000" + " 0.000000 0.000000 0" * 3 + "\n"
    )


def test_data_yaml_says_what_labels_have() -> None:
    assert read_data_yaml(yolo.data_yaml({"train": "images"}, CLASSES, POSE), "f").pose == POSE
    found = read_data_yaml(yolo.data_yaml({"train": "images"}, CLASSES, rotated=True), "f")
    assert (found.rotated, found.pose, found.classes) == (True, None, CLASSES)
    assert not read_data_yaml(yolo.data_yaml({"train": "images"}, CLASSES), "f").rotated


@pytest.mark.parametrize(
    ("text", "pose"),
    [
        ("names: [a]", None),
        ("kpt_shape: [2, 3]", Skeleton(("point_1", "point_2"))),
        ("kpt_shape: [2, 2]\nflip_idx: [1, 0]", Skeleton(("point_1", "point_2"), (), (1, 0), 2)),
        ("kpt_shape: [2, 3]\nflip_idx: [1, 1]\nkpt_names: {0: [a, b]}", Skeleton(("a", "b"))),
        ("kpt_shape: [2, 3]\nkpt_names: {0: [a]}", Skeleton(("point_1", "point_2"))),
        ("kpt_shape: [0, 3]", Skeleton(())),
        ("kpt_shape: [2, 4]", Skeleton(())),
        ("kpt_shape: x", Skeleton(())),
        ("kpt_shape: [1000000000, 3]", Skeleton(())),
        ("kpt_shape: [2, 3]\n - x:\n- y", Skeleton(())),
    ],
)
def test_the_shape_of_keypoints_is_read_or_passed_over(text: str, pose: Skeleton | None) -> None:
    assert read_pose(text.encode()) == pose
