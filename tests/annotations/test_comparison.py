"""Two versions of an image's objects: what was added, removed, moved, relabelled and edited."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datacache.annotations.comparing.changes import compare, compare_objects
from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import Extra, Keypoints, Polygon, Rotated, pack
from datacache.annotations.table import ranges
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.together import together
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
    assert [(each.path, [change.kind for change in each.objects]) for each in compare(one, two)] == [
        ("b.jpg", ["added"])
    ]
    other = build([image("a.jpg", box("cat")), image("c.jpg")])
    assert [(each.path, len(each.objects), each.numbers) for each in compare(two, other)] == [
        ("b.jpg", 1, (1, -1)),
        ("c.jpg", 0, (-1, 1)),
    ]
    spoilt = build([broken("a.jpg")])
    assert [[change.kind for change in each.objects] for each in compare(one, spoilt)] == [["removed"]]


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


def drawn(rng: random.Random, n: int) -> Row:
    """A row of any kind."""
    path = f"{'abc'[n % 3]}/{n:04d}.jpg"
    if rng.random() < 0.05:
        return broken(path)
    attributes = (("colour", rng.choice("rg")),) if rng.random() < 0.3 else ()
    boxes = [
        box(rng.choice(("cat", "dog", "戴口罩")), x, 20, 30 + x, difficult=rng.random() < 0.2, attributes=attributes)
        for x in (rng.choice((10, 11, 12.5)) for _ in range(rng.randrange(4)))
    ]
    if rng.random() < 0.1:
        extras = (
            Extra(Polygon(pack([10, 20, 30, 20, 20, 60.5]))),
            Extra(keypoints=Keypoints(pack([11, 21]), b"\2"), score=0.25),
            Extra(Rotated(pack([10, 20, 30, 20, 30, 60, 10, 60])), group=3),
            Extra(score=rng.random()),
        )
        boxes.append(box("dog", extra=rng.choice(extras)))
    row = image(path, *boxes, size=(rng.choice((640, 640, 320)), 480), labels=rng.choice(((), (), ("street",))))
    captions = ("A cat.",) if rng.random() < 0.1 else ()
    assert row.annotation is not None
    return row._replace(annotation=row.annotation._replace(captions=captions))


def drawn_versions(seed: int) -> tuple[list[Row], list[Row]]:
    """Rows of two versions, in order: many are the same, some have their boxes in another order."""
    rng = random.Random(seed)
    before = [drawn(rng, n) for n in range(700)]
    after = []
    for n, row in enumerate(before):
        if row.annotation is not None and rng.random() < 0.2:
            row = row._replace(annotation=row.annotation._replace(boxes=row.annotation.boxes[::-1], source="x.xml"))
        after.append(drawn(rng, n) if rng.random() < 0.2 else row)
    versions = (rows[:: 1 + (n and rng.random() < 0.3)] for n, rows in enumerate((before, after)))
    kept = [[row for row in rows if rng.random() > 0.03] for rows in versions]
    one, two = (sorted(rows, key=lambda row: row.path) for rows in kept)
    return one, two


def test_images_differ_where_reading_both_tables_whole_says_so() -> None:
    for seed in range(6):
        before, after = drawn_versions(seed)
        tables = build(before), build(after)
        old, new = ({row.path: row for row in table.rows()} for table in tables)
        expected = {
            path
            for path in old.keys() | new.keys()
            if path not in old or path not in new or not same(old[path].annotation, new[path].annotation)
        }
        found = list(compare(*tables))
        assert [each.path for each in found] == sorted(expected)
        for each in found:
            assert (each.before, each.after) == (old.get(each.path), new.get(each.path))
            for row, number, table in zip((each.before, each.after), each.numbers, tables, strict=True):
                assert number == -1 if row is None else table.rows_at([number]) == [row]


def same(a: Annotation | None, b: Annotation | None) -> bool:
    """Tell whether two images are annotated the same: a slow way, by objects as sets."""
    if a is None or b is None:
        return a is b
    first, second = ((x.width, x.height, sorted(x.labels), sorted(x.captions), len(x.boxes)) for x in (a, b))
    return first == second and not compare_objects(a.boxes, b.boxes)


def test_the_columns_of_a_range_are_those_of_its_rows() -> None:
    table = build(drawn_versions(7)[0])
    numbers = range(len(table.row_counts()))
    count = 0
    for loaded in table.loaded(numbers):
        rows = table.rows_at(range(loaded.first, loaded.first + loaded.summary.rows))
        boxes = [each for row in rows if row.annotation for each in row.annotation.boxes]
        found = ranges.objects(loaded.details, loaded.summary)
        assert [loaded.summary.labels[n] for n in found.labels] == [each.label for each in boxes]
        assert found.edges.T.tolist() == [list(each[1:5]) for each in boxes]
        assert [found.attributes[n] for n in found.kinds] == [each.attributes for each in boxes]
        assert found.flags.tolist() == [each.difficult + 2 * each.truncated + 4 * each.occluded for each in boxes]
        scores = [each.extra.score if each.extra else None for each in boxes]
        assert np.array_equal(found.scores, np.array(scores, float), equal_nan=True)
        count += len(boxes) - scores.count(None)
    assert count > 10


def test_two_tables_are_gone_through_range_by_range() -> None:
    """However the ends of their ranges lie."""
    before, after = ([image(f"{n:05d}.jpg") for n in numbers] for numbers in (range(3_000), range(700, 6_000, 3)))
    tables = build(before), build(after)
    both, gone, added = [], [], []
    for stretch in together(*tables, *(range(len(table.row_counts())) for table in tables)):
        held = stretch.before, stretch.after
        for n, m in zip(*stretch.both, strict=True):
            paths = [each.paths[place] for each, place in zip(held, (n, m), strict=True) if each]
            assert paths[0] == paths[1]
            both.append(paths[0].decode())
        gone += [held[0].paths[n].decode() for n in stretch.gone if held[0]]
        added += [held[1].paths[n].decode() for n in stretch.added if held[1]]
    old, new = ({row.path for row in rows} for rows in (before, after))
    assert (both, gone, added) == (sorted(old & new), sorted(old - new), sorted(new - old))
