"""Two versions of an image's objects: what was added, removed, moved, relabelled and edited."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from datacache.annotations.comparison import compare, compare_objects
from datacache.annotations.model import Box
from datacache.annotations.shapes.outline import Extra, Polygon, pack
from tests.annotations.tables import box, broken, build, image


def told(before: list[Box], after: list[Box]) -> list[tuple[str, str, str]]:
    return [
        (change.kind, change.before.label if change.before else "", change.after.label if change.after else "")
        for change in compare_objects(before, after)
    ]


def test_each_kind_of_change_is_told() -> None:
    cat, dog, far = box("cat"), box("dog", 100, 100, 140, 150), box("cat", 300, 300, 340, 340)
    assert told([cat, dog], [dog._replace(line=7), cat]) == [], "their order and lines are no change"
    assert told([cat], [cat, far]) == [("added", "", "cat")]
    assert told([cat, far], [cat]) == [("removed", "cat", "")]
    assert told([cat], [cat._replace(x1=12.0)]) == [("moved", "cat", "cat")]
    assert told([cat], [cat._replace(label="dog", x2=31.0)]) == [("relabelled", "cat", "dog")]
    assert told([cat], [cat._replace(occluded=True)]) == [("edited", "cat", "cat")]
    assert told([cat], [cat._replace(x1=cat.x1 + 0.001)]) == [], "less than six decimals of YOLO can say"
    assert told([cat], [cat._replace(x1=cat.x1 + 0.001, occluded=True)]) == [("edited", "cat", "cat")]
    assert told([cat], [cat._replace(x1=29.0)]) == [("removed", "cat", ""), ("added", "", "cat")], "another object"


def test_an_outline_that_moves_within_its_box_is_a_move() -> None:
    points = [10.0, 20, 30, 20, 30, 60, 10, 60]
    shapes = [box("cat", extra=Extra(Polygon(pack([*points, 20.0, y])))) for y in (40.0, 45.0)]
    assert told(shapes[:1], shapes[1:]) == [("moved", "cat", "cat")]


def test_of_two_that_could_be_it_the_one_of_its_label_is() -> None:
    cat = box("cat")
    near = [cat._replace(label="dog", x1=10.5), cat._replace(x1=14.0)]
    assert told([cat], near) == [("moved", "cat", "cat"), ("added", "", "dog")]


def test_one_of_two_equal_objects_that_goes_is_removed_once() -> None:
    cat = box("cat")
    assert told([cat, cat], [cat]) == [("removed", "cat", "")]
    assert told([cat], [cat, cat]) == [("added", "", "cat")]


def test_objects_of_a_crowded_image_are_found_again_by_their_boxes() -> None:
    before = [box("cat", x, 0, x + 5, 5) for x in range(1_500)]
    after = [each._replace(label="dog") for each in before[:-1]]
    found = told(before, after)
    assert found == [("relabelled", "cat", "dog")] * 1_499 + [("removed", "cat", "")]


def test_an_image_that_one_version_lacks_has_all_its_objects_added() -> None:
    one, two = build([image("a.jpg", box("cat"))]), build([image("a.jpg", box("cat")), image("b.jpg", box("dog"))])
    assert [(each.path, [change.kind for change in each.objects()]) for each in compare(one, two)] == [
        ("b.jpg", ["added"])
    ]
    spoilt = build([broken("a.jpg")])
    assert [[change.kind for change in each.objects()] for each in compare(one, spoilt)] == [["removed"]]


corners = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(21, 40), st.integers(21, 40))
objects = st.lists(
    st.builds(lambda label, sides: box(label, *sides), st.sampled_from(["cat", "dog"]), corners), max_size=8
)


@given(objects, objects)
def test_the_changes_lead_from_one_version_to_the_other(before: list[Box], after: list[Box]) -> None:
    changes = compare_objects(before, after)
    left = list(before)
    for change in changes:
        if change.before is not None:
            left.remove(change.before)
    left += [change.after for change in changes if change.after is not None]
    assert sorted(left) == sorted(after)
