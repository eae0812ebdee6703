"""The one check: what is mended, what is left out, and that nothing else ever comes out or goes missing."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from datacache.annotations.check import SLACK_PX, SLACK_RELATIVE, check, clean_label, displayed
from datacache.annotations.image_header import ImageHeader, read_header
from datacache.annotations.model import Annotation, Box, Draft, Problem
from tests.promises import promise

pytestmark = [promise("No box lies outside of its image, and none is lost without a line in the report")]

FILE, PATH = "Annotations/a.xml", "JPEGImages/a.jpg"
HEADER = ImageHeader("jpeg", 640, 480)
INSIDE = Box("cat", 10, 20, 30, 40, difficult=True, attributes=(("pose", "Left"),), line=7)


def checked(
    *boxes: Box, header: ImageHeader | None = HEADER, size: tuple[int, int] = (640, 480), sized: bool = True
) -> tuple[Annotation, list[Problem]]:
    draft = Draft(FILE, "a.jpg", *size, boxes, line=3)
    annotation, problems = check(draft, header, PATH, sized=sized)
    assert annotation is not None
    assert (annotation.path, annotation.source) == (PATH, FILE)
    return annotation, problems


def outcome(*boxes: Box) -> tuple[tuple[Box, ...], list[tuple[str, str, int]]]:
    """The boxes that are kept, and code, action and line of each problem."""
    annotation, problems = checked(*boxes)
    assert all(problem.file == FILE and problem.message for problem in problems)
    return annotation.boxes, [(problem.code, problem.action, problem.line) for problem in problems]


def box(*sides: float, label: str = "cat") -> Box:
    return Box(label, *sides, line=7)


def test_what_is_right_comes_out_as_it_went_in() -> None:
    edge = Box("whole", 0.0, 0.0, 640.0, 480.0)
    assert outcome(INSIDE, edge) == ((INSIDE, edge), [])
    assert checked(INSIDE)[0] == Annotation(PATH, 640, 480, (INSIDE,), (), FILE)
    assert outcome() == ((), [])


# --- coordinates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", [(30, 20, 10, 40), (10, 40, 30, 20), (30, 40, 10, 20)])
def test_reversed_coordinates_are_swapped(sides: tuple[float, ...]) -> None:
    assert outcome(box(*sides)) == ((box(10, 20, 30, 40),), [("box-reversed", "repaired", 7)])


@pytest.mark.parametrize(
    ("sides", "clipped"),
    [
        ((-5, -6, 30, 40), (0, 0, 30, 40)),
        ((600, 400, 700, 500), (600, 400, 640, 480)),
        ((-0.5, 6, 30, 40), (0, 6, 30, 40)),
        ((5, -0.5, 30, 40), (5, 0, 30, 40)),
        ((5, 6, 640.5, 40), (5, 6, 640, 40)),
        ((5, 6, 30, 480.5), (5, 6, 30, 480)),
        ((-1e300, -1e300, 1e300, 1e300), (0, 0, 640, 480)),
        ((0, 0, 640.01, 480), (0, 0, 640, 480)),
    ],
)
def test_what_lies_outside_the_image_is_cut_off(sides: tuple[float, ...], clipped: tuple[float, ...]) -> None:
    assert outcome(box(*sides)) == ((box(*clipped),), [("box-clipped", "repaired", 7)])


@pytest.mark.parametrize(
    "sides",
    [
        (-10, 0, -5, 10),
        (-10, 0, 0, 10),
        (640, 0, 700, 10),
        (0, 480, 10, 500),
        (0, -20, 10, -10),
        (639.9999, 0, 700, 10),
    ],
)
def test_a_box_wholly_outside_is_left_out(sides: tuple[float, ...]) -> None:
    assert outcome(box(*sides), INSIDE) == ((INSIDE,), [("box-outside", "skipped", 7)])


@pytest.mark.parametrize(
    "sides", [(10, 10, 10, 20), (10, 20, 30, 20), (0, 0, 0, 0), (10, 10, 10.0001, 20), (700, 0, 700, 1)]
)
def test_a_box_without_area_is_left_out(sides: tuple[float, ...]) -> None:
    assert outcome(box(*sides), INSIDE) == ((INSIDE,), [("box-empty", "skipped", 7)])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_a_box_that_is_not_finite_is_left_out(side: int, value: float) -> None:
    sides = [10.0, 20.0, 30.0, 40.0]
    sides[side - 1] = value
    assert outcome(box(*sides), INSIDE) == ((INSIDE,), [("box-not-finite", "skipped", 7)])
    assert str(value) in checked(box(*sides))[1][0].message


def test_a_box_that_is_there_several_times_is_kept_and_noted_once() -> None:
    cat, dog = box(1, 2, 3, 4), box(1, 2, 3, 4, label="dog")
    boxes, problems = outcome(cat, dog, cat._replace(line=5), dog)
    assert len(boxes) == 4
    assert problems == [("box-repeated", "noted", 5)]


def test_one_box_may_be_mended_twice() -> None:
    boxes, problems = outcome(box(700, 500, 600, 400, label=" cat "))
    assert boxes == (box(600, 400, 640, 480),)
    assert [code for code, *_ in problems] == ["label-spaces", "box-reversed", "box-clipped"]


def test_rounding_outside_is_cut_off_without_a_word() -> None:
    width = 20_000
    header = ImageHeader("jpeg", width, width)
    edge = width + width * 0.75e-6
    annotation, problems = checked(box(-1e-3, 0, edge, 10), header=header, size=(width, width))
    assert (annotation.boxes, problems) == ((box(0, 0, width, 10),), [])


def test_six_decimals_of_a_fraction_never_make_a_report_and_never_a_box_of_no_size() -> None:
    for width in (1, 7, 640, 1999, 30_000):
        header = ImageHeader("jpeg", width, width)
        for left in (0.0, width / 3, width - 0.9):
            centre, size = f"{(left + width) / 2 / width:.6f}", f"{(width - left) / width:.6f}"
            x1, x2 = ((float(centre) + sign * float(size) / 2) * width for sign in (-1, 1))
            assert checked(box(x1, 0, x2, width), header=header, size=(width, width))[1] == []
        thinnest = 1.001 * (SLACK_PX + SLACK_RELATIVE * width)
        (kept,) = checked(box(0, 0, thinnest, width), header=header, size=(width, width))[0].boxes
        assert float(f"{(kept.x2 - kept.x1) / width:.6f}") > 0


def test_messages_quote_the_box_and_the_image() -> None:
    _, problems = checked(box(-5, 0.5, 700, 40))
    assert problems[0].message == (
        "box (-5, 0.5, 700, 40) of 'cat' is partly outside the image, which is 640x480; it is cut at its edge"
    )


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(0, 0), (0, 480), (640, 0), (-1, 480)])
def test_a_missing_size_is_read_from_the_image(size: tuple[int, int]) -> None:
    annotation, problems = checked(INSIDE, size=size)
    assert annotation == Annotation(PATH, 640, 480, (INSIDE,), (), FILE)
    assert [(p.code, p.action, p.file, p.line) for p in problems] == [("size-missing", "repaired", FILE, 3)]


def test_formats_without_sizes_miss_none() -> None:
    assert checked(INSIDE, size=(0, 0), sized=False) == (Annotation(PATH, 640, 480, (INSIDE,), (), FILE), [])


@pytest.mark.parametrize("size", [(480, 640), (1280, 480), (10**30, 1)])
def test_of_a_wrong_size_the_images_own_is_taken(size: tuple[int, int]) -> None:
    annotation, problems = checked(box(0, 0, 1000, 480), size=size)
    assert (annotation.width, annotation.height) == (640, 480)
    assert annotation.boxes == (box(0, 0, 640, 480),)
    assert [(p.code, p.action) for p in problems] == [("size-wrong", "repaired"), ("box-clipped", "repaired")]
    assert f"{size[0]}x{size[1]}" in problems[0].message
    assert "640x480" in problems[0].message


def test_a_wrong_size_of_the_same_shape_says_what_that_may_mean() -> None:
    assert "resized" in checked(INSIDE, size=(1280, 960))[1][0].message
    assert "resized" not in checked(INSIDE, size=(1280, 480))[1][0].message


def test_without_a_look_at_the_image_the_size_is_believed() -> None:
    annotation, problems = checked(box(0, 0, 1000, 480), header=None, size=(900, 480))
    assert annotation == Annotation(PATH, 900, 480, (box(0, 0, 900, 480),), (), FILE)
    assert [p.code for p in problems] == ["box-clipped"]


@pytest.mark.parametrize("size", [(0, 0), (0, 480), (640, -1)])
def test_without_a_size_and_a_look_at_the_image_there_is_no_annotation(size: tuple[int, int]) -> None:
    annotation, problems = check(Draft(FILE, "a.jpg", *size, (INSIDE,), line=3), None, PATH)
    assert annotation is None
    assert [(p.code, p.action, p.file, p.line) for p in problems] == [("size-missing", "skipped", FILE, 3)]


# --- EXIF ------------------------------------------------------------------------------------------------------------


def turned_image(orientation: int, width: int, height: int) -> tuple[Image.Image, ImageHeader]:
    """A black image with a white box at (3, 5, 9, 17), and its header."""
    image = Image.new("L", (width, height))
    image.paste(255, (3, 5, 9, 17))
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    return Image.open(file), read_header(file.getvalue())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_turn_as_the_image_is_turned_to_be_displayed(orientation: int) -> None:
    image, header = turned_image(orientation, 40, 30)
    shown = ImageOps.exif_transpose(image)
    assert (header.displayed_width, header.displayed_height) == shown.size
    assert displayed(Box("x", 3, 5, 9, 17), orientation, 40, 30)[1:5] == shown.getbbox()


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_boxes_on_the_stored_image_are_turned(orientation: int) -> None:
    image, header = turned_image(orientation, 40, 30)
    annotation, problems = checked(Box("x", 3, 5, 9, 17), header=header, size=(40, 30))
    assert (annotation.width, annotation.height) == (30, 40)
    assert annotation.boxes[0][1:5] == ImageOps.exif_transpose(image).getbbox()
    assert [(p.code, p.action) for p in problems] == [("exif-orientation", "repaired")]


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_boxes_on_the_displayed_image_stay(orientation: int) -> None:
    header = ImageHeader("jpeg", 480, 640, orientation)
    assert checked(INSIDE, header=header) == (Annotation(PATH, 640, 480, (INSIDE,), (), FILE), [])


@pytest.mark.parametrize(
    ("header", "size", "codes"),
    [
        (ImageHeader("jpeg", 640, 480, 3), (640, 480), ["exif-ambiguous"]),
        (ImageHeader("jpeg", 640, 640, 6), (640, 640), ["exif-ambiguous"]),
        (ImageHeader("jpeg", 480, 640, 6), (0, 0), ["size-missing", "exif-ambiguous"]),
        (ImageHeader("jpeg", 480, 640, 6), (900, 900), ["size-wrong", "exif-ambiguous"]),
    ],
)
def test_where_the_size_does_not_tell_boxes_are_taken_as_displayed(
    header: ImageHeader, size: tuple[int, int], codes: list[str]
) -> None:
    annotation, problems = checked(INSIDE, header=header, size=size)
    assert annotation.boxes == (INSIDE,)
    assert [p.code for p in problems] == codes
    assert problems[-1].action == "noted"
    assert "exif-ambiguous" not in [p.code for p in checked(header=header, size=size)[1]]


# --- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [" cat", "cat\n", "\t cat \r\n", "\u3000cat\u00a0"])
def test_spaces_around_a_label_are_removed(label: str) -> None:
    assert outcome(INSIDE._replace(label=label)) == ((INSIDE,), [("label-spaces", "repaired", 7)])


@pytest.mark.parametrize("label", ["", " ", "\n", "\u3000", "\ufeff", "\0"])
def test_an_object_without_a_label_is_left_out(label: str) -> None:
    assert outcome(INSIDE._replace(label=label), INSIDE) == ((INSIDE,), [("label-empty", "skipped", 7)])


@pytest.mark.parametrize(
    ("label", "clean"),
    [
        ("a\nb", "a b"),
        ("a \r\n\t b", "a b"),
        ("a\0b", "a b"),
        ("a\u2028b", "a b"),
        ("\ufeffa\u200b", "a"),
        ("a\ud800", "a\ufffd"),
    ],
)
def test_characters_that_a_list_of_classes_cannot_hold_are_replaced(label: str, clean: str) -> None:
    kept, problems = outcome(INSIDE._replace(label=label))
    assert kept == (INSIDE._replace(label=clean),)
    assert problems == [("label-characters", "repaired", 7)]


@pytest.mark.parametrize("label", ["no mask", "a  b", "口罩", "😷", "a\u00a0b", "x" * 5000, "ﺕ\u200dﺕ"])
def test_other_labels_are_as_they_are(label: str) -> None:
    assert outcome(INSIDE._replace(label=label)) == ((INSIDE._replace(label=label),), [])


def test_labels_of_the_image_are_cleaned_and_each_is_there_once() -> None:
    draft = Draft(FILE, width=640, height=480, labels=("day", " day", "", "a\nb", "day"), line=3)
    annotation, problems = check(draft, HEADER, PATH)
    assert annotation is not None
    assert annotation.labels == ("day", "a b")
    assert [(p.code, p.action, p.line) for p in problems] == [
        ("label-spaces", "repaired", 3),
        ("label-empty", "skipped", 3),
        ("label-characters", "repaired", 3),
    ]


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_a_clean_label_is_one_line_and_stays_clean(label: str) -> None:
    clean = clean_label(label)
    assert clean_label(clean) == clean == clean.strip()
    assert len(clean.splitlines()) <= 1
    assert "\0" not in clean
    clean.encode("utf-8")


# --- any input -------------------------------------------------------------------------------------------------------

any_number = st.one_of(
    st.floats(),
    st.floats(-100, 800),
    st.integers(-5, 700).map(float),
    st.sampled_from([0.0, -0.0, 640.0, 480.0, 640.0005, -0.0005, math.nan, math.inf]),
)
sides = st.tuples(any_number, any_number, any_number, any_number)
any_box = st.one_of(
    st.tuples(st.sampled_from(["cat", "dog", " cat", "", "a\nb"]), sides),
    st.tuples(st.sampled_from(["cat", "dog"]), st.sampled_from([(0.0, 0.0, 1.0, 1.0), (0.25, 0.5, 0.75, 1.0)])),
)
any_header = st.one_of(
    st.none(), st.builds(ImageHeader, st.just("jpeg"), st.integers(1, 700), st.integers(1, 700), st.integers(1, 8))
)


@settings(max_examples=600, deadline=None)
@given(st.lists(any_box, max_size=6), any_header, st.integers(-1, 700), st.integers(-1, 700), st.booleans())
def test_every_box_comes_out_inside_the_image_or_is_in_a_problem(
    found: list[tuple[str, tuple[float, ...]]], header: ImageHeader | None, width: int, height: int, sized: bool
) -> None:
    boxes = [Box(label, *sides, line=number) for number, (label, sides) in enumerate(found, start=1)]
    if header is not None and width % 3 == 0:
        width, height = header.width, header.height
    annotation, problems = check(Draft(FILE, "", width, height, tuple(boxes)), header, PATH, sized=sized)
    if annotation is None:
        assert header is None
        assert [problem.code for problem in problems] == ["size-missing"]
        return
    for box in annotation.boxes:
        assert 0 <= box.x1 < box.x2 <= annotation.width
        assert 0 <= box.y1 < box.y2 <= annotation.height
        assert box.label
        assert box.label == clean_label(box.label)
    kept = [box.line for box in annotation.boxes]
    left_out = [problem.line for problem in problems if problem.action == "skipped"]
    assert kept == sorted(kept)
    assert sorted(kept + left_out) == [box.line for box in boxes]
    # What came out is right, so a second check has nothing to say.
    again = Draft(FILE, "", annotation.width, annotation.height, annotation.boxes)
    same, more = check(again, None, PATH)
    assert same == annotation
    assert {problem.code for problem in more} <= {"box-repeated"}
