"""Queries find exactly the images a plain loop finds; what cannot be meant is an error that shows the place."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache.annotations.comparing.changes import compare
from datacache.annotations.model import Annotation
from datacache.annotations.query import BOX_FIELDS, FIELDS, HINT, Query, count, find, find_paths
from datacache.annotations.shapes.clip import area_of
from datacache.annotations.shapes.mask import encode
from datacache.annotations.shapes.outline import Extra, Keypoints, Mask, Polygon, Rotated, pack, polygon_of
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.table import Table
from datacache.core.errors import UsageError
from tests.annotations.shapes import any_polygon, bitmaps, cases, hundredths
from tests.annotations.tables import Blobs, box, broken, build, image

ROWS = [
    image("a/1.jpg", box("mask"), box("mask", 0, 0, 640, 480), box("no_mask", difficult=True)),
    image("a/2.png", size=(100, 200)),
    broken("a/3.jpg"),
    image("b/4.jpg", box("no_mask", 1, 1, 3, 100, truncated=True), size=(1920, 1080)),
    image("b/5 戴.jpg", box("戴口罩"), box("mask", occluded=True), size=(640, 640)),
    image("b/6.jpg", labels=("street",)),
]


@pytest.fixture(scope="module")
def table() -> Table:
    return build(ROWS)


def names(table: Table, where: str = "", **more: object) -> str:
    """The found images' numbers, as a text."""
    return "".join(path[2] for path in find_paths(table, Query(where=where, **more)))  # type: ignore[arg-type]


RED = (("colour", "red"), ("age", "3"))
TRIANGLE = pack([1, 1, 9, 1, 1, 9])
SHAPED = [
    image("s/1.jpg", box("mask")._replace(extra=Extra(Polygon(TRIANGLE + TRIANGLE, (3, 6)))), box("mask")),
    image("s/2.jpg", box("mask")._replace(extra=Extra(Mask(b"12", 3, 3)), attributes=RED)),
    image("s/3.jpg", *[box("mask")._replace(extra=Extra(Rotated(pack(range(8))))) for _ in range(2)]),
    image("s/4.jpg", box("mask")._replace(extra=Extra(keypoints=Keypoints(TRIANGLE, bytes([0, 1, 2]))))),
    image("s/5.jpg", *[box("mask")._replace(attributes=(("colour", colour),)) for colour in ("red", "blue")]),
    broken("s/6.jpg"),
]


@cases
@given(st.lists(st.none() | any_polygon(hundredths(30)) | bitmaps(), min_size=1, max_size=4))
def test_an_area_is_that_of_the_outline_where_there_is_one(drawn: list[Any]) -> None:
    outlines = [encode(each, 3, 2, 20, 20) if isinstance(each, np.ndarray) else each for each in drawn]
    areas = [800 if outline is None else area_of(outline) for outline in outlines]
    boxes = (box("mask")._replace(extra=outline and Extra(outline)) for outline in outlines)
    found = build([image("a.jpg", *boxes, size=(1, 1))])
    for name, value in (("min_area", min(areas)), ("max_area", max(areas))):
        assert count(found, Query(where=f"{value - 1e-6!r} <= {name} <= {value + 1e-6!r}")) == 1


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("polygons", None),
        ("polygons > 0", "1"),
        ("masks == 1", "2"),
        ("rotated == 2", "3"),
        ("vertices >= 6", "13"),
        ("vertices >= 7", "3"),
        ("keypoints == 2", "4"),
        ("polygons + masks + rotated + keypoints == 0", "5"),
        ("63 < min_area * area < 65 and 799 < max_area * area < 801", "1"),
        ("1 < max_area * area < 3", "2"),
        ("max_area == 0", "3"),
        ("799 < min_area * area < 801", "45"),
        ('attribute("colour") >= 1', "25"),
        ('attribute("colour") - attribute("colour", "red") == 1', "5"),
        ('attribute("age", "3") and objects > 0', None),
        ('attribute("age", "3") == 1 and attribute("Age") == 0', "2"),
    ],
)
def test_conditions_about_shapes_and_attributes(condition: str, found: str | None) -> None:
    with pytest.raises(UsageError) if found is None else nullcontext():
        assert names(build(SHAPED), condition) == found
    if found is not None and not re.search("attribute|area", condition):
        assert names(build(ROWS), condition) == ("12456" if condition.endswith("== 0") else "")


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("width >= 640", "1456"),
        ("width == 640 and height == 480", "16"),
        ("width >= 640 and not height < 1000", "4"),
        ("640 <= width < 1000", "156"),
        ("objects > 1 or width < 200", "125"),
        ("objects == 0", "26"),
        ("annotated", "145"),
        ("not annotated or width > 1000", "246"),
        ("area > 1e6", "4"),
        ("aspect < 1", "2"),
        ("-width < -1000 or +height == 200", "24"),
        ("(width + height) / 2 == 150", "2"),
        ("width // 1000 == 1 or width % 7 == 2", "24"),
        ("width - 2 * height > 0", ""),
        ("difficult > 0", "1"),
        ("truncated", None),
        ("truncated == 1", "4"),
        ("occluded >= 1", "5"),
        ('count("mask") == 2', "1"),
        ('count("mask") + count("no_mask") >= 1', "145"),
        ('has("street")', "6"),
        ('count("street") == 0', "12456"),
        ('not has("mask")', "246"),
        ('"no_mask" in labels', "14"),
        ('"no_mask" not in labels', "256"),
        ('has("戴口罩") and objects == 2', "5"),
        ('like(path, "a/*")', "12"),
        ('like(name, "?.jpg")', "146"),
        ('like(path, "*戴.jpg")', "5"),
        ('folder == "b" and name != "4.jpg"', "56"),
        ('".png" in path', "2"),
        ('name in ("1.jpg", "6.jpg")', "16"),
        ("width in [100, 1920]", "24"),
        ("objects not in {0, 1}", "15"),
        ("min_side < 10", "4"),
        ("max_side == 640", "1"),
        ("max_area >= 1", "1"),
        ("min_area * 1920 * 1080 < 199", "4"),
        ("True", "12456"),
        ("False or (True and\n objects == 3)", "1"),
        ('count("戴口罩") > 0 and nothing', None),
    ],
)
def test_a_condition_finds_what_it_says(table: Table, condition: str, found: str | None):
    if found is None:
        with pytest.raises(UsageError):
            names(table, condition)
    else:
        assert names(table, condition) == found


@pytest.mark.parametrize(
    "condition", ["min_side < 1e9", "min_side > 0", "min_area <= 1", "max_side != 5 and min_side >= 0"]
)
def test_an_image_without_boxes_has_no_smallest_box(table: Table, condition: str):
    assert names(table, condition) == "145"


@pytest.mark.parametrize("operator", ["/", "//", "%"])
def test_a_division_by_zero_is_no_number_and_no_crash(table: Table, operator: str):
    assert names(table, f"width {operator} objects >= 0") == "145"


def test_a_broken_image_is_never_found(table: Table):
    assert names(table) == names(table, "True") == names(table, "width >= 0") == "12456"


def test_several_labels_are_all_of_them_or_with_any_label_one(table: Table):
    assert names(table, labels=("mask",)) == "15"
    assert names(table, labels=("mask", "no_mask")) == "1"
    assert names(table, labels=("mask", "no_mask"), any_label=True) == "145"
    assert names(table, labels=("street",)) == "6"


def test_numbers_of_objects_are_those_of_the_label_if_one_is_given(table: Table):
    assert names(table, min_objects=2) == "15"
    assert names(table, max_objects=0) == "26"
    assert names(table, min_objects=1, max_objects=2) == "45"
    assert names(table, labels=("mask",), min_objects=2) == "1"
    assert names(table, labels=("mask",), max_objects=1) == "5"
    assert names(table, labels=("mask", "no_mask"), min_objects=2) == ""
    assert names(table, labels=("mask", "no_mask"), min_objects=2, any_label=True) == "1"
    assert names(table, labels=("street",), min_objects=1) == ""
    assert names(table, "width > 640", labels=("no_mask",), min_objects=1) == "4"


def test_what_is_found_says_size_and_labels(table: Table):
    (found,) = find(table, Query(labels=("mask",), min_objects=2))
    assert found == ("a/1.jpg", 640, 480, 3, {"mask": 2, "no_mask": 1})
    assert count(table, Query()) == 5


@pytest.mark.parametrize(
    ("condition", "says", "column"),
    [
        ("widht > 3", "there is no field 'widht'; did you mean 'width'?", 1),
        ("width > 3 and hight > 3", "there is no field 'hight'; did you mean 'height'?", 15),
        ('"戴" in path and hight > 3', "'hight'", 17),
        ("mask > 3", 'for the label, write has("mask")', 1),
        ('width > "3"', "a number cannot be compared with a text", 9),
        ("width", "width is a number, not a condition; write width > 0", 1),
        ("objects > 1 and name", 'name is a text, not a condition; write name == "…"', 17),
        ("labels == labels", "cannot be compared", 11),
        ("not width", "is a number", 5),
        ("path + path == path", "a number is needed", 1),
        ("width in labels", "a number cannot be in a labels", 1),
        ('count("maks") > 1', "there is no label 'maks'; did you mean 'mask'?", 7),
        ('has("MASK")', "did you mean 'mask'?", 5),
        ('"nonsense" in labels', "there is no label 'nonsense'", 1),
        ("count(path) > 1", 'count is used so: count("label")', 1),
        ('has("mask", "no_mask")', "has is used so", 1),
        ('boxes("size", 8) > 0', 'boxes is used so: boxes("side", 8, 16)', 1),
        ('boxes("side") > 0', "boxes is used so", 1),
        ('boxes("side", 1, 2, 3) > 0', "boxes is used so", 1),
        ('boxes("side", True) > 0', "boxes is used so", 1),
        ('boxes("side", 8, 16)', "is a number, not a condition", 1),
        ('like(width, "3*")', "a text is needed", 6),
        ('like("*.png", path)', "like is used so", 1),
        ('open("/etc/passwd")', "there is no function 'open'", 1),
        ('__import__("os")', "there is no function '__import__'", 1),
        ("path.__class__ == path", "has no meaning here", 1),
        ('count(label="mask") > 0', "has no meaning here", 1),
        ("[x for x in path] == path", "has no meaning here", 1),
        ("(lambda: 1)() > 0", "has no meaning here", 1),
        ("width if True else height", "has no meaning here", 1),
        ("path[0] == path", "has no meaning here", 1),
        ('f"{path}" == path', "has no meaning here", 1),
        ("b'a' == path", "has no meaning here", 1),
        ("width == None", "has no meaning here", 10),
        ("width > 1j", "has no meaning here", 9),
        ("(width := 3) > 2", "has no meaning here", 2),
        ("9 ** 9 ** 9 > width", "operator that is not known", 1),
        ("width << 3 > 1", "operator that is not known", 1),
        ("~width > 1", "has no meaning here", 1),
        ("width is 3", "'is' has no meaning here", 1),
        ('name in ("a", 3)', "only texts, or only numbers", 9),
        ("width in ()", "has no meaning here", 10),
        ("width = 640", "'=' is written '==' here", 7),
        ("width > 3 && height > 3", "&& is written 'and' here", 11),
        ("width > 3 || height > 3", "|| is written 'or' here", 11),
        ("width >", "invalid syntax", 8),
        ("width > 3) or (1", "unmatched", 10),
        ("width; height", "invalid syntax", 6),
    ],
)
def test_a_condition_that_cannot_be_meant_is_an_error_at_its_place(
    table: Table, condition: str, says: str, column: int
):
    with pytest.raises(UsageError) as caught:
        find(table, Query(where=condition))
    assert says in caught.value.message
    assert caught.value.message.endswith(f"(in the condition {condition!r}, at column {column})")
    assert "Fields: path" in caught.value.hint or "There are: mask, no_mask" in caught.value.hint


@pytest.mark.parametrize(
    "condition",
    [
        "(" * 3_000 + "width" + ")" * 3_000,
        "-" * 3_900 + "width > 1",
        "not " * 900 + "True",
        "width > 1 and " * 400 + "True",
    ],
)
def test_a_condition_that_is_deep_or_long_is_refused(table: Table, condition: str):
    with pytest.raises(UsageError, match=r"too (long|deeply|many)"):
        find(table, Query(where=condition))


@pytest.mark.parametrize("condition", ["width\0 > 1", 'has("\udcff")', "width > " + "9" * 3_990])
def test_odd_characters_and_numbers_are_refused_or_understood_but_do_not_crash(table: Table, condition: str):
    with suppress(UsageError):
        names(table, condition)


def test_numbers_that_become_too_large_are_an_error(table: Table):
    with pytest.raises(UsageError, match="too large"):
        names(table, "9" * 400 + " / width > 1")


@given(st.text(st.sampled_from("width objcs<>=!()\"'+-*/%,.0123456789[]{}:@&|~^\\\n#andorti")))
def test_any_text_is_a_condition_or_a_usage_error(text: str):
    with suppress(UsageError):
        count(TABLE, Query(where=text))


TABLE = build(ROWS)


def test_an_unknown_label_lists_the_labels_there_are(table: Table):
    with pytest.raises(UsageError, match=r"there is no label 'no-mask'; did you mean 'no_mask'\?") as caught:
        find(table, Query(labels=("no-mask",)))
    assert caught.value.hint == "There are: mask, no_mask, street, 戴口罩."
    with pytest.raises(UsageError) as caught:
        find(build([image("a.jpg")]), Query(labels=("mask",)))
    assert caught.value.hint == "There are no labels at all."


@pytest.mark.parametrize("bound", ["min_objects", "max_objects"])
def test_a_negative_number_of_objects_is_refused(bound: str):
    with pytest.raises(UsageError, match="cannot be -1"):
        Query(**{bound: -1})


def test_every_field_and_function_is_in_the_hint():
    assert all(field in HINT for field in FIELDS)
    assert FIELDS.keys() >= BOX_FIELDS


def test_details_are_loaded_for_box_fields_alone():
    blobs = Blobs()
    rows = [image(f"{n:05}.jpg", *[box("mask")] * (n % 3)) for n in range(1_000)]
    table = build(rows, blobs=blobs)
    for condition, kinds in (("objects > 1", 1), ("min_side == 20 and objects > 1", 2)):
        blobs.loaded.clear()
        assert count(table, Query(where=condition)) == 333
        assert len(blobs.loaded) == kinds * len(table.range_numbers())


annotations = st.builds(
    Annotation,
    st.just(""),
    st.integers(1, 60),
    st.integers(1, 60),
    st.lists(
        st.builds(box, st.sampled_from("abc"), x2=st.integers(11, 60), y2=st.floats(21, 60), difficult=st.booleans()),
        max_size=5,
    ).map(tuple),
    st.lists(st.sampled_from("ab"), max_size=2).map(tuple),
)
CONDITIONS: dict[str, Callable[[Annotation], bool]] = {
    "width * 2 > height": lambda a: a.width * 2 > a.height,
    "difficult < objects": lambda a: sum(b.difficult for b in a.boxes) < len(a.boxes),
    "min_side <= 15": lambda a: min((min(b.x2 - b.x1, b.y2 - b.y1) for b in a.boxes), default=math.nan) <= 15,
    "max_side > 30": lambda a: max((max(b.x2 - b.x1, b.y2 - b.y1) for b in a.boxes), default=math.nan) > 30,
}


@given(
    st.lists(annotations, min_size=1, max_size=12),
    st.lists(st.sampled_from("ab"), max_size=2, unique=True).map(tuple),
    st.booleans(),
    st.none() | st.integers(0, 3),
    st.none() | st.integers(0, 3),
    st.sampled_from(sorted(CONDITIONS)),
)
def test_a_query_finds_what_a_loop_over_the_rows_finds(given, labels, any_label, least, most, condition):
    rows = [Row(a._replace(path=f"{n:03}.jpg"), f"{n:03}.jpg") for n, a in enumerate(given)]
    table = build(rows)
    labels = tuple(label for label in labels if label in table.labels)

    def fits(found: Annotation) -> bool:
        def bounded(number: int) -> bool:
            return (least is None or number >= least) and (most is None or number <= most)

        of_labels = [
            (label in found.labels or any(b.label == label for b in found.boxes))
            and bounded(sum(b.label == label for b in found.boxes))
            for label in labels
        ]
        counted = (any if any_label else all)(of_labels) if labels else bounded(len(found.boxes))
        return counted and CONDITIONS[condition](found)

    query = Query(labels=labels, any_label=any_label, min_objects=least, max_objects=most, where=condition)
    expected = [row.path for row in rows if row.annotation and fits(row.annotation)]
    assert list(find_paths(table, query)) == expected
    assert [found.path for found in find(table, query)] == expected
    assert count(table, query) == len(expected)


def test_versions_differ_where_outlines_do_beyond_rounding():
    def version(*values: float, hole: int = 0, track: int = 4) -> Table:
        outline = polygon_of([pack(values[:6]), pack(values[6:])], hole)
        return build([image("a.jpg", box("a", extra=Extra(outline, track=track)))])

    points = (10, 20, 30, 20, 30, 60.0, 15, 25, 20, 25, 20, 40)
    one = version(*points)
    assert not list(compare(one, version(*points[:-1], 40.009)))
    for other in (
        version(*points[:-1], 40.02),
        version(*points[:-2]),
        version(*points, hole=2),
        version(*points, track=5),
        build([image("a.jpg", box("a"))]),
        build([image("a.jpg", box("a", extra=Extra(Rotated(pack(points[:8])), track=4)))]),
    ):
        assert len(list(compare(one, other))) == 1


def test_boxes_counts_those_of_a_size_or_shape() -> None:
    found = build(
        [
            image("a.jpg", box("x", 0, 0, 8, 20), box("x", 0, 0, 16, 16), size=(100, 10)),
            image("b.jpg", box("x", 0, 0, 7.5, 50), size=(100, 100)),
            image("c.jpg", size=(100, 100)),
        ]
    )
    for where, number in (
        ('boxes("side", 8, 16) == 1', 1),
        ('boxes("side", 7.5) > 0', 2),
        ('boxes("side", 8) == 2 and boxes("aspect", 1, 2) == 1', 1),
        ('boxes("area", 0.0375, 0.0376) == 1', 1),
        ('boxes("side", 0) == objects', 3),
        ('boxes("side", ' + "9" * 400 + ") == 0", 3),
    ):
        assert count(found, Query(where=where)) == number, where
