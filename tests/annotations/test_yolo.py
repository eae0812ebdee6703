"""YOLO: label files, data.yaml, obj.data."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datacache.annotations.check import check, clean_label
from datacache.annotations.classes import read_data_yaml
from datacache.annotations.formats import yolo
from datacache.annotations.image_header import ImageHeader
from datacache.annotations.model import PROBLEMS, Annotation, Box
from datacache.annotations.shapes.outline import NOTHING, Skeleton
from datacache.core.errors import AnnotationError, UsageError
from tests.annotations.shapes import cases

CLASSES = ("mask", "no_mask")


def parse(text, classes=CLASSES, **more):
    data = text.encode() if isinstance(text, str) else text
    draft, problems = yolo.parse(data, "labels/a.txt", width=100, height=200, classes=classes, **more)
    assert all(problem.file == "labels/a.txt" and problem.code in PROBLEMS for problem in problems)
    return draft, [(problem.code, problem.action, problem.line) for problem in problems]


def boxes(text, **more):
    draft, problems = parse(text, **more)
    return [(box.label, box.x1, box.y1, box.x2, box.y2) for box in draft.boxes], problems


def test_a_line_is_a_box_in_parts_of_the_sides():
    draft, problems = parse("1 0.5 0.5 0.25 0.125\n0 0.25 0.25 0.5 0.5\n")
    assert draft.boxes == (Box("no_mask", 37.5, 87.5, 62.5, 112.5, line=1), Box("mask", 0, 0, 50, 100, line=2))
    assert (draft.file, draft.name, draft.width, draft.height, problems) == ("labels/a.txt", "", 0, 0, [])


def test_an_empty_file_has_no_boxes_and_no_problems():
    for text in ("", "\n", " \r\n\r\n", b"\xef\xbb\xbf"):
        assert boxes(text) == ([], [])


def test_byte_order_marks_line_ends_and_white_space_change_nothing():
    expected = boxes("0 .5 .5 .2 .2\n1 .5 .5 .2 .2\n")
    assert boxes(b"\xef\xbb\xbf0 .5 .5 .2 .2\r\n1\t.5 .5  .2 .2") == expected
    assert boxes("0 .5 .5 .2 .2\r1 .5 .5 .2 .2\r") == expected
    assert yolo.parse(memoryview(b"0 .5 .5 .2 .2"), "f", width=9, height=9, classes=CLASSES)[0].boxes


@pytest.mark.parametrize(
    ("line", "more"),
    [
        ("0 0.5 0.5 0.2 0.2", {}),
        ("0 0.1 0.1 0.3 0.2 0.2 0.4 0.1 0.3", {"rotated": True}),
        ("0 0.5 0.5 0.2 0.2 0.3 0.3 2", {"pose": Skeleton(("nose",))}),
        ("0 0.5 0.5 0.2 0.2 0.3 0.3", {"pose": Skeleton(("nose",), dims=2)}),
    ],
)
def test_a_column_more_is_the_confidence_of_a_prediction(line, more):
    (box,) = parse(line, **more)[0].boxes
    (scored,), problems = parse(f"{line} 0.875\n", **more)[0].boxes, parse(f"{line} 0.875\n", **more)[1]
    assert scored == box._replace(extra=(box.extra or NOTHING)._replace(score=0.875))
    assert problems == []


def test_a_polygon_has_the_box_around_it():
    found, problems = boxes("0 0.1 0.1 0.3 0.2 0.2 0.4\n1 .5 .5 .6 .5 .6 .6 .5 .6\n")
    assert found[0] == ("mask", 10.0, 20.0, 30.0, 80.0)
    assert found[1][1:] == pytest.approx((50, 100, 60, 120))
    assert problems == []


def test_a_polygon_with_a_coordinate_that_is_not_finite_is_a_box_that_is_not():
    for number in ("nan", "inf"):
        draft, _ = parse(f"0 0.1 0.1 0.3 {number} 0.2 0.4\n")
        assert all(map(math.isnan, draft.boxes[0][1:5]))


def test_keypoints_are_passed_over_where_the_data_set_does_not_say_how_many():
    found, problems = boxes("0 0.5 0.5 0.25 0.125 0.3 0.3 2 0.4 0.4 1\n", pose=Skeleton(()))
    assert found == [("mask", 37.5, 87.5, 62.5, 112.5)]
    assert problems == [("keypoints-malformed", "repaired", 1)]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("0 0.5 0.5 0.2", "line-malformed"),
        ("0", "line-malformed"),
        ("not a box", "line-malformed"),
        ("0 .1 .1 .2 .2 .3 .3 .4", "line-malformed"),  # seven coordinates
        ("0 0.5 0.5 0.2 wide", "box-text"),
        ("0 0.5 0.5 0.2 0,1", "box-text"),
        ("0 0.5 0.5 0.2 0_1", "box-text"),
        ("0 0.5 0.5 0.2 0.1 sure", "box-text"),
        ("0 0.5 0.5 0.2 0.1 nan", "box-text"),
        ("0 .1 .1 .2 .2 .3 x", "box-text"),
        ("mask 0.5 0.5 0.2 0.1", "class-id"),
        ("-1 0.5 0.5 0.2 0.1", "class-id"),
        ("0.5 0.5 0.5 0.2 0.1", "class-id"),
        ("nan 0.5 0.5 0.2 0.1", "class-id"),
        ("inf 0.5 0.5 0.2 0.1", "class-id"),
        ("1_0 0.5 0.5 0.2 0.1", "class-id"),
        ("99999999999999999999 0.5 0.5 0.2 0.1", "class-id"),
        ("9" * 5000 + " 0.5 0.5 0.2 0.1", "class-id"),
    ],
)
def test_a_line_that_is_no_box_is_left_out_and_reported_with_its_number(line, code):
    found, problems = boxes(f"0 0.5 0.5 0.2 0.1\n\n{line}\n1 0.5 0.5 0.2 0.1\n")
    assert [label for label, *_ in found] == ["mask", "no_mask"]
    assert problems == [(code, "skipped", 3)]


def test_a_class_written_as_a_float_is_read_and_reported():
    found, problems = boxes("1.0 0.5 0.5 0.2 0.1\n0e0 0.5 0.5 0.2 0.2\n")
    assert [label for label, *_ in found] == ["no_mask", "mask"]
    assert problems == [("class-id-float", "repaired", 1), ("class-id-float", "repaired", 2)]


def test_a_class_beyond_the_list_is_kept_under_its_number_and_noted_once():
    found, problems = boxes("7 .5 .5 .2 .1\n2 .5 .5 .2 .2\n7 .5 .5 .2 .3\n")
    assert [label for label, *_ in found] == ["class_7", "class_2", "class_7"]
    assert problems == [("class-unlisted", "noted", 1), ("class-unlisted", "noted", 2)]


def test_only_objects_that_are_kept_are_counted_as_of_a_class_beyond_the_list():
    text = b"7 .5 .5 .2 wide\n7 .5 .5 .2 .1\n8 .1 .1 .2 .2 .3 x\n7 .5 .5 .2 .3\n8.5 .5 .5 .2 wide\n"
    draft, problems = yolo.parse(text, "a.txt", width=100, height=200, classes=CLASSES)
    assert [box.label for box in draft.boxes] == ["class_7", "class_7"]
    assert [problem.code for problem in problems] == ["box-text", "box-text", "class-id", "class-unlisted"]
    assert problems[3].line == 2
    assert problems[3].message == "2 objects are of class 7, and the list has 2; kept as 'class_7'"


def test_without_a_list_classes_are_numbers_and_nothing_is_noted():
    assert boxes("1 .5 .5 .2 .1\n", classes=())[0][0][0] == "class_1"
    assert boxes("1 .5 .5 .2 .1\n", classes=())[1] == []


@pytest.mark.parametrize("data", [b"0 .5 .5 .2 .1\n" * (yolo.MAX_LINES + 1), b" " * (yolo.MAX_BYTES + 1)])
def test_a_file_that_is_larger_than_any_of_one_image_is_refused(data):
    with pytest.raises(AnnotationError) as caught:
        yolo.parse(data, "a.txt", width=100, height=80, classes=CLASSES)
    assert (caught.value.code, caught.value.file) == ("file-too-large", "a.txt")


@pytest.mark.parametrize(
    ("line", "codes", "kept"),
    [
        ("0 nan 0.5 0.2 0.1", ["box-not-finite"], 0),
        ("0 0.5 0.5 inf 0.1", ["box-not-finite"], 0),
        ("0 0.5 -inf 0.2 0.1", ["box-not-finite"], 0),
        ("0 1e400 0.5 0.2 0.1", ["box-not-finite"], 0),
        ("0 0.5 0.5 -0.2 0.1", ["box-reversed"], 1),
        ("0 0.5 0.5 0 0.1", ["box-empty"], 0),
        ("0 1.5 0.5 0.2 0.1", ["box-outside"], 0),
        ("0 0.95 0.5 0.2 0.1", ["box-clipped"], 1),
        ("0 -0.5 0.5 0.2 0.1", ["box-outside"], 0),
    ],
)
def test_numbers_that_are_no_box_of_the_image_are_the_checks_to_report(line, codes, kept):
    draft, problems = yolo.parse(line.encode(), "f", width=100, height=200, classes=CLASSES)
    assert problems == []
    annotation, problems = check(draft, ImageHeader("jpeg", 100, 200), "a.jpg", sized=False)
    assert annotation is not None
    assert ([problem.code for problem in problems], len(annotation.boxes)) == (codes, kept)


def test_labels_are_written_with_six_decimals_in_order():
    annotation = Annotation("a.jpg", 640, 480, (Box("b", 86, 86.5, 333, 243), Box("a", 0, 0, 640, 480)))
    assert yolo.write(annotation, {"a": 0, "b": 12}) == (
        b"12 0.327344 0.343229 0.385937 0.326042\n0 0.500000 0.500000 1.000000 1.000000\n"
    )
    assert yolo.write(annotation, {"a": 0}) == b"0 0.500000 0.500000 1.000000 1.000000\n"
    assert yolo.write(Annotation("a.jpg", 640, 480), {"a": 0}) == b""


sides = st.integers(1, 10_000)


@st.composite
def annotations(draw):
    width, height = draw(sides), draw(sides)
    found = []
    for label in draw(st.lists(st.sampled_from(CLASSES), max_size=5)):
        x1, x2 = sorted(draw(st.tuples(*[st.floats(0, width)] * 2)))
        y1, y2 = sorted(draw(st.tuples(*[st.floats(0, height)] * 2)))
        # What is smaller is no checked annotation; and six decimals may take 2e-6 of the image's side from a box.
        if x2 - x1 > 1e-3 + 3e-6 * width and y2 - y1 > 1e-3 + 3e-6 * height:
            found.append(Box(label, x1, y1, x2, y2))
    return Annotation("a.jpg", width, height, tuple(found))


@cases
@given(annotations())
def test_what_is_written_is_read_again_within_the_rounding(annotation):
    width, height = annotation.width, annotation.height
    data = yolo.write(annotation, {"mask": 0, "no_mask": 1})
    lines = [line.split() for line in data.decode().splitlines()]
    for words, (_, x1, y1, x2, y2, *_) in zip(lines, annotation.boxes, strict=True):
        parts = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
        assert words[1:] == [f"{part:.6f}" for part in parts]
        cx, cy, w, h = map(float, words[1:])
        assert min(cx - w / 2, cy - h / 2) >= -1e-6
        assert max(cx + w / 2, cy + h / 2) <= 1 + 1e-6
        assert w > 0
        assert h > 0
    draft, problems = yolo.parse(data, "f", width=width, height=height, classes=CLASSES)
    assert [box.label for box in draft.boxes] == [box.label for box in annotation.boxes]
    for read, box in zip(draft.boxes, annotation.boxes, strict=True):
        assert read.x1 == pytest.approx(box.x1, abs=1e-6 * width)
        assert read.y2 == pytest.approx(box.y2, abs=1e-6 * height)
    assert problems == []
    checked, problems = check(draft, ImageHeader("jpeg", width, height), "a.jpg", sized=False)
    assert checked is not None
    assert len(checked.boxes) == len(annotation.boxes)
    assert {problem.code for problem in problems} <= {"box-repeated"}


words = st.sampled_from(
    [b"0", b"1", b"7", b"0.5", b"-0.25", b"1e-3", b"nan", b"inf", b"-1", b"x", b"1_0", b"", b"\xff", b"1.0", b"9" * 400]
)
lines = st.lists(words, max_size=9).map(b" ".join)
label_files = st.one_of(st.binary(max_size=80), st.lists(lines, max_size=6).map(b"\n".join))


@given(label_files, st.sampled_from([None, Skeleton(()), Skeleton(("a",), dims=2), Skeleton(("a",))]))
@settings(max_examples=500, deadline=None)
def test_no_label_file_raises_and_no_line_is_lost_without_a_problem(data, pose):
    draft, problems = yolo.parse(data, "f", width=640, height=480, classes=CLASSES, pose=pose)
    lines = data.removeprefix(b"\xef\xbb\xbf").splitlines()
    kept = {box.line for box in draft.boxes}
    reported = {problem.line for problem in problems if problem.action == "skipped"}
    assert not kept & reported
    assert kept | reported == {number for number, line in enumerate(lines, 1) if line.split()}
    assert len(draft.boxes) == len(kept)
    assert all(problem.code in PROBLEMS for problem in problems)
    annotation, more = check(draft, ImageHeader("jpeg", 640, 480), "a.jpg", sized=False)
    assert annotation is not None
    assert len(annotation.boxes) + sum(problem.action == "skipped" for problem in more) == len(draft.boxes)
    for box in annotation.boxes:
        assert 0 <= box.x1 < box.x2 <= 640
        assert 0 <= box.y1 < box.y2 <= 480


def test_data_yaml_says_folders_and_names():
    assert yolo.data_yaml({"train": "images/train", "val": "images/val"}, CLASSES).decode() == (
        'train: "images/train"\nval: "images/val"\nnc: 2\nnames:\n  0: "mask"\n  1: "no_mask"\n'
    )


def test_data_yaml_always_has_a_train_and_a_val_folder():
    content = read_data_yaml(yolo.data_yaml({"part1": "images/part1"}, CLASSES), "d")
    assert content.folders == {"train": ("images/part1",), "val": ("images/part1",)}
    with pytest.raises(UsageError, match="'names'"):
        yolo.data_yaml({"names": "images/names"}, CLASSES)


odd_labels = st.one_of(
    st.sampled_from(
        ["yes", "no", "null", "~", "010", "1.5", "a: b", "- a", "#x", "'", '"', "\\", "%", "&a", "*a", "{", "!"]
    ),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
)


@cases
@given(st.lists(odd_labels.map(clean_label).filter(bool), max_size=5, unique=True))
def test_any_label_survives_data_yaml(names):
    data = yolo.data_yaml({"train": "images"}, names)
    assert read_data_yaml(data, "d").classes == tuple(names)
    import yaml

    assert yaml.safe_load(data)["names"] == dict(enumerate(names))


def test_obj_data_says_where_everything_is():
    assert yolo.darknet_data(2, {"train": "train.txt", "val": "val.txt"}) == (
        b"classes = 2\ntrain = train.txt\nvalid = val.txt\nnames = obj.names\nbackup = backup/\n"
    )
