"""keras-yolo3: lines of boxes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datacache.annotations.check import check
from datacache.annotations.formats import keras_yolo
from datacache.annotations.image_header import ImageHeader
from datacache.annotations.model import PROBLEMS, Annotation, Box
from tests.annotations.shapes import cases

CLASSES = ("mask", "no_mask")
IDS = {"mask": 0, "no_mask": 1}


def parse(text, classes=CLASSES):
    data = text if isinstance(text, bytes) else text.encode()
    found = keras_yolo.parse(data, "train.txt", classes)
    problems = [*found.problems, *(problem for _, problems in found.images for problem in problems)]
    assert all(problem.file == "train.txt" and problem.code in PROBLEMS for problem in problems)
    images = {draft.name: [(box.label, *box[1:5]) for box in draft.boxes] for draft, _ in found.images}
    return images, [(problem.code, problem.action, problem.line) for problem in problems]


def test_a_line_is_an_image_and_its_boxes():
    images, problems = parse("a.jpg 1,2,3,4,0 5,6,70,80,1\nb/c.png 0,0,10,10,1\n")
    assert images == {
        "a.jpg": [("mask", 1, 2, 3, 4), ("no_mask", 5, 6, 70, 80)],
        "b/c.png": [("no_mask", 0, 0, 10, 10)],
    }
    assert problems == []


def test_drafts_know_their_file_and_line_and_no_size():
    found = keras_yolo.parse(b"\na.jpg 1,2,3,4,0\n", "train.txt", CLASSES)
    draft = found.images[0][0]
    assert (draft.file, draft.line, draft.width, draft.height, draft.boxes[0].line) == ("train.txt", 2, 0, 0, 2)
    assert found.classes == CLASSES


def test_an_image_may_have_no_boxes():
    assert parse("a.jpg\nb.jpg \n") == ({"a.jpg": [], "b.jpg": []}, [])
    assert parse("") == parse("\n \r\n") == ({}, [])


@pytest.mark.parametrize(
    "path",
    [
        "two words.jpg",
        "/data/My Pictures/a b  c.JPG",
        "C:\\Users\\me\\a.jpg",
        "a,b,c,d,e.jpg",
        "1,2,3,4,5/a.jpg",
        "x.jpg 1.jpg",
        "口罩/é.png",
        "no_extension",
        "a\u2028b.jpg",
        "caf\udce9.jpg",
    ],
)
def test_a_path_may_have_spaces_and_anything_else_but_line_breaks(path):
    line = f"{path} 1,2,3,4,0 5,6,7,8,1\n".encode("utf-8", "surrogateescape")
    assert parse(line) == ({path: [("mask", 1, 2, 3, 4), ("no_mask", 5, 6, 7, 8)]}, [])


def test_byte_order_marks_and_line_ends_change_nothing():
    expected = parse("a.jpg 1,2,3,4,0\nb.jpg 1,2,3,4,0\n")
    assert parse(b"\xef\xbb\xbfa.jpg 1,2,3,4,0\r\nb.jpg\t1,2,3,4,0") == expected
    assert keras_yolo.parse(memoryview(b"a.jpg"), "f", CLASSES).images


@pytest.mark.parametrize(
    ("box", "code"),
    [
        ("1,2,3,4", "line-malformed"),
        ("1,2,3,4,0,0.9", "line-malformed"),
        ("x", "line-malformed"),
        ("a,2,3,4,0", "box-text"),
        (",2,3,4,0", "box-text"),
        ("1_0,2,3,4,0", "box-text"),
        ("1,2,3,4,mask", "class-id"),
        ("1,2,3,4,-1", "class-id"),
        ("1,2,3,4,0.5", "class-id"),
        ("1,2,3,4,nan", "class-id"),
        ("1,2,3,4,99999999999", "class-id"),
    ],
)
def test_what_is_no_box_is_left_out_and_reported_with_its_line(box, code):
    images, problems = parse(f"a.jpg 1,2,3,4,0\nb.jpg 1,2,3,4,0 {box} 5,6,7,8,1\n")
    assert images["b.jpg"] == [("mask", 1, 2, 3, 4), ("no_mask", 5, 6, 7, 8)]
    assert problems == [(code, "skipped", 2)]


def test_floats_and_what_is_not_finite_are_read_for_the_check():
    images, problems = parse("a.jpg 1.5,2.25,3e1,4,0 nan,2,inf,4,1 5,6,1,2,0\n")
    assert images["a.jpg"][0] == ("mask", 1.5, 2.25, 30, 4)
    assert problems == []
    draft = keras_yolo.parse(b"a.jpg nan,2,inf,4,1 5,6,1,2,0\n", "f", CLASSES).images[0][0]
    annotation, found = check(draft, ImageHeader("jpeg", 10, 10), "a.jpg", sized=False)
    assert [problem.code for problem in found] == ["box-not-finite", "box-reversed"]
    assert annotation.boxes[0][1:5] == (1, 2, 5, 6)


def test_a_class_as_a_float_is_read_and_one_beyond_the_list_is_kept_by_number():
    images, problems = parse("a.jpg 1,2,3,4,1.0 1,2,3,4,7\nb.jpg 1,2,3,4,7\n")
    assert [label for label, *_ in images["a.jpg"]] == ["no_mask", "class_7"]
    assert problems == [("class-unlisted", "noted", 1), ("class-id-float", "repaired", 1)]
    assert parse("a.jpg 1,2,3,4,7\n", ()) == ({"a.jpg": [("class_7", 1, 2, 3, 4)]}, [])


def test_lines_of_one_image_are_taken_together_and_noted():
    images, problems = parse("a.jpg 1,2,3,4,0\nb.jpg\na.jpg 5,6,7,8,1\n")
    assert images == {"a.jpg": [("mask", 1, 2, 3, 4), ("no_mask", 5, 6, 7, 8)], "b.jpg": []}
    assert problems == [("image-repeated", "noted", 3)]


def test_boxes_without_a_path_are_reported():
    assert parse("1,2,3,4,0 5,6,7,8,1\n") == ({}, [("line-malformed", "skipped", 1)])


def test_a_line_is_written_in_whole_pixels():
    boxes = (Box("no_mask", 1.4, 1.5, 20.6, 30.49), Box("mask", 0, 0, 100, 100), Box("other", 1, 1, 2, 2))
    line, problems = keras_yolo.write_line(Annotation("a.jpg", 100, 100, boxes), IDS)
    assert line == b"a.jpg 1,2,21,30,1 0,0,100,100,0\n"
    assert problems == []
    assert keras_yolo.write_line(Annotation("a.jpg", 100, 100), IDS) == (b"a.jpg\n", [])


def test_a_thin_box_keeps_a_pixel():
    boxes = (Box("mask", 99.6, 10.2, 100, 10.4),)
    assert keras_yolo.write_line(Annotation("a.jpg", 100, 100, boxes), IDS)[0] == b"a.jpg 99,10,100,11,0\n"


def test_a_path_with_spaces_is_written_and_noted_and_one_with_a_line_break_is_not():
    line, problems = keras_yolo.write_line(Annotation("a b.jpg", 9, 9), IDS)
    assert line == b"a b.jpg\n"
    assert [(problem.code, problem.action, problem.file) for problem in problems] == [
        ("path-spaces", "noted", "a b.jpg")
    ]
    line, problems = keras_yolo.write_line(Annotation("a\nb.jpg", 9, 9), IDS)
    assert line == b""
    assert [(problem.code, problem.action) for problem in problems] == [("path-unwritable", "skipped")]
    assert keras_yolo.write_line(Annotation("\udcff.jpg", 9, 9), IDS) == (b"\xff.jpg\n", [])


@st.composite
def annotations(draw):
    width, height = draw(st.integers(1, 5000)), draw(st.integers(1, 5000))
    found = []
    for label in draw(st.lists(st.sampled_from(CLASSES), max_size=5)):
        x1, x2 = sorted(draw(st.tuples(*[st.floats(0, width)] * 2)))
        y1, y2 = sorted(draw(st.tuples(*[st.floats(0, height)] * 2)))
        if x1 < x2 and y1 < y2:
            found.append(Box(label, x1, y1, x2, y2))
    return Annotation(draw(st.sampled_from(["a.jpg", "b c/d.PNG", "ü,1.jpg"])), width, height, tuple(found))


@cases
@given(annotations())
def test_what_is_written_is_read_again_within_a_pixel_and_written_so_again(annotation):
    line, _ = keras_yolo.write_line(annotation, IDS)
    found = keras_yolo.parse(line, "f", CLASSES)
    assert found.problems == []
    ((draft, problems),) = found.images
    assert problems == []
    assert draft.name == annotation.path
    for read, box in zip(draft.boxes, annotation.boxes, strict=True):
        assert read.label == box.label
        assert read[1:5] == pytest.approx(box[1:5], abs=1)
        assert 0 <= read.x1 < read.x2 <= annotation.width
        assert 0 <= read.y1 < read.y2 <= annotation.height
        assert all(edge == int(edge) for edge in read[1:5])
    assert keras_yolo.write_line(annotation._replace(boxes=draft.boxes), IDS)[0] == line


words = st.sampled_from(
    [
        b"a.jpg",
        b"b",
        b"1,2,3,4,0",
        b"1,2,3,4",
        b"nan,1,2,3,1",
        b"1,2,3,4,7",
        b"x,,,,",
        b"5,5,1,1,1.0",
        b"\xff",
        b"1e9,2,3,4,0",
    ]
)
files = st.one_of(
    st.binary(max_size=80), st.lists(st.lists(words, max_size=6).map(b" ".join), max_size=5).map(b"\n".join)
)


@given(files)
@settings(max_examples=400, deadline=None)
def test_no_file_raises_and_nothing_in_it_is_lost_without_a_problem(data):
    found = keras_yolo.parse(data, "f", CLASSES)
    problems = [*found.problems, *(problem for _, problems in found.images for problem in problems)]
    assert all(problem.code in PROBLEMS for problem in problems)
    names = [draft.name for draft, _ in found.images]
    assert len(set(names)) == len(names)
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    lines = {
        n
        for n, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1)
        if line.strip(" \t\v\f")
    }
    seen = {draft.line for draft, _ in found.images} | {problem.line for problem in problems}
    assert lines <= seen
    for draft, _ in found.images:
        annotation, more = check(draft, ImageHeader("jpeg", 640, 480), "a.jpg", sized=False)
        assert annotation is not None
        assert len(annotation.boxes) + sum(problem.action == "skipped" for problem in more) == len(draft.boxes)
