"""Statistics count what a loop over the rows counts; their plot is a picture in any script."""

from __future__ import annotations

import io
import subprocess
import sys
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from datacache.annotations.model import Problem
from datacache.annotations.pictures import plot
from datacache.annotations.shapes.outline import Extra, Keypoints, Mask, Polygon, Rotated, pack
from datacache.annotations.stats import AREA_EDGES, ASPECT_EDGES, ClassCount, collect
from datacache.annotations.table.table import ProblemCount
from tests.annotations.shapes import any_extra
from tests.annotations.tables import box, broken, build, image

ROWS = [
    image("1.jpg", box("mask"), box("mask", 0, 0, 320, 240, difficult=True), box("bare", truncated=True)),
    image("2.jpg", box("mask", 0, 0, 640, 480, occluded=True)),
    broken("3.jpg"),
    image("4.jpg", size=(100, 50)),
    image("5.jpg", labels=("street",)),
]
ROWS[3] = ROWS[3]._replace(annotation=ROWS[3].annotation._replace(source="4.xml"))


def test_statistics_count_images_boxes_classes_and_problems():
    found = collect(build(ROWS, [Problem("annotation-alone", "skipped", "9.xml", 0, "")]))
    assert (found.images, found.with_objects, found.empty, found.unannotated, found.unusable) == (5, 2, 1, 1, 1)
    assert (found.boxes, found.difficult, found.truncated, found.occluded) == (4, 1, 1, 1)
    assert found.classes == [
        ClassCount("mask", 2, 3, 0.75, 1),
        ClassCount("bare", 1, 1, 0.25, 0),
        ClassCount("street", 1, 0, 0.0, 0),
    ]
    assert found.boxes_per_image == {0: 2, 1: 1, 3: 1}
    assert list(found.image_sizes.items()) == [((640, 480), 3), ((100, 50), 1)]
    # 20x40 of 640x480 is 0.26 %; a quarter; all.
    assert found.box_sizes == {"small": 2, "medium": 0, "large": 2}
    assert found.coco_sizes == {"small": 2, "medium": 0, "large": 2}
    assert found.problems == [
        ProblemCount("annotation-alone", "skipped", 1),
        ProblemCount("image-truncated", "skipped", 1),
    ]


def test_shapes_are_counted():
    corner = pack([0, 0, 4, 0, 0, 4])
    shapes = [Extra(Polygon(corner)), Extra(Mask(b"12", 3, 3)), Extra(Polygon(corner), Keypoints(corner, b"\0\1\2"))]
    boxes = [box("a")._replace(extra=extra) for extra in shapes]
    found = collect(build([image("1.jpg", *boxes, box("a")), image("2.jpg", boxes[0]), broken("3.jpg")]))
    assert found.shapes == {"polygons": 3, "masks": 1, "rotated": 0, "vertices": 9, "keypoints": 2}
    assert not any(collect(build(ROWS)).shapes.values())


@settings(max_examples=60)
@given(st.lists(st.lists(st.none() | any_extra, max_size=4), max_size=4))
def test_objects_are_counted_by_kind_and_by_points(drawn):
    rows = [image(f"{n}.jpg", *(box("a")._replace(extra=each or None) for each in row)) for n, row in enumerate(drawn)]
    counts = {kind: Counter() for kind in ("boxes", "polygons", "masks", "rotated", "keypoints")}
    for outline, keypoints in ((each.outline, each.keypoints) if each else (None, None) for each in chain(*drawn)):
        if isinstance(outline, Polygon):
            counts["polygons"][len(outline.points) // 16] += 1
        elif outline is not None:
            kind, points = ("masks", 0) if isinstance(outline, Mask) else ("rotated", 4)
            counts[kind][points] += 1
        if keypoints is not None:
            counts["keypoints"][sum(value > 0 for value in keypoints.visible)] += 1
        elif outline is None:
            counts["boxes"][0] += 1
    found = collect(build(rows))
    assert found.kinds == counts
    assert sum(each["objects"] for each in found.as_json()["kinds"]) == sum(map(Counter.total, counts.values()))


def test_kinds_of_objects_are_a_row_more_of_the_plot_where_there_are_others_than_boxes():
    polygons = [Extra(Polygon(pack(range(2 * n)))) for n in (0, 3, 4, 50, 5_000)]
    poses = [Extra(keypoints=Keypoints(pack(range(2 * n)), bytes([2] * n))) for n in (0, 3, 17, 133)]
    masks = [Extra(Mask(b"12", 3, 3)), Extra(Rotated(pack(range(8))))]
    drawn = []
    for extras in ([Extra(track=1)], masks, masks + polygons + poses):
        rows = [image("1.jpg", *(box("a")._replace(extra=extra) for extra in extras))]
        with Image.open(io.BytesIO(plot.plot(collect(build(rows)), "mask@v1"))) as picture:
            drawn.append(picture.convert("RGB"))
    assert [each.size for each in drawn] == [(1560, 912), (1560, 1312), (1560, 1312)]
    columns = (0, 640), (640, 1100), (1100, 1560)
    used = [[len(each.crop((a, 900, b, 1312)).getcolors(1_000_000)) > 20 for a, b in columns] for each in drawn[1:]]
    assert used == [[True, False, False], [True, True, True]]


def test_every_box_is_in_one_bin_of_each_histogram():
    found = collect(
        build(
            [
                image("1.jpg", box("a", 0, 0, 640, 480), box("a", 0, 0, 0.001, 0.001), box("a", 0, 0, 640, 0.5)),
                image("2.jpg", box("a", 0, 0, 0.5, 480), box("a", 0, 0, 64, 48), box("a", 0, 0, 100, 100)),
            ]
        )
    )
    assert sum(found.box_areas) == sum(found.box_aspects) == 6
    assert found.box_areas[0] == 1
    assert found.box_areas[-1] == 1
    assert found.box_aspects[0] == found.box_aspects[-1] == 1
    assert found.box_areas[AREA_EDGES.index(0.1)] + found.box_areas[AREA_EDGES.index(0.1) - 1] == 0
    assert found.box_areas[AREA_EDGES.index(0.01)] == 1  # exactly a hundredth: from there on it is medium
    assert found.box_aspects[ASPECT_EDGES.index(1.0)] == 4


def test_json_has_everything_and_nothing_that_json_cannot_hold():
    import json

    value = json.loads(json.dumps(collect(build(ROWS)).as_json()))
    assert value["classes"][0] == {"label": "mask", "images": 2, "boxes": 3, "share": 0.75, "difficult": 1}
    assert value["boxes_per_image"][0] == {"boxes": 0, "images": 2}
    assert value["image_sizes"][0] == {"width": 640, "height": 480, "images": 3}
    assert len(value["box_areas"]["edges"]) == len(value["box_areas"]["boxes"]) + 1


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=3), min_size=1, max_size=10))
def test_statistics_agree_with_a_loop_over_the_rows(labels):
    rows = [image(f"{n:02}.jpg", *map(box, each)) for n, each in enumerate(labels)]
    found = collect(build(rows))
    for each in found.classes:
        assert each.images == sum(each.label in labels_of for labels_of in labels)
        assert each.boxes == sum(labels_of.count(each.label) for labels_of in labels)
    assert {each.label for each in found.classes} == {label for each in labels for label in each}
    assert sum(found.boxes_per_image.values()) == len(rows)
    assert sum(found.box_sizes.values()) == found.boxes == sum(map(len, labels))


@pytest.mark.parametrize(
    "rows",
    [
        [],
        ROWS,
        [image("1.jpg", box("戴口罩"), box("без маски"), box("price $x_2$ {a}"), box("قناع"), box("a\nb\udcff"))],
        [image(f"{n:04}.jpg", *[box(f"class {n % 90}")] * (n % 70)) for n in range(300)],
    ],
    ids=["nothing", "few", "scripts", "many"],
)
def test_a_plot_is_a_picture_of_the_same_size_whatever_is_in_the_data(rows):
    found = collect(build(rows))
    drawn = plot.plot(found, "маски@v1 戴")
    with Image.open(io.BytesIO(drawn)) as picture:
        assert picture.size == (1560, 912)
        assert len(picture.convert("RGB").getcolors(1_000_000)) > 20
    assert plot.plot(found, "маски@v1 戴") == drawn


@pytest.mark.parametrize(("format", "begins"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_plot_can_be_a_vector_graphic(format, begins):
    assert plot.plot(collect(build(ROWS)), "mask@v1", format=format).startswith(begins)


def test_classes_are_drawn_in_the_colours_that_previews_give_them():
    from datacache.annotations.pictures.draw import colours_of

    with Image.open(io.BytesIO(plot.plot(collect(build(ROWS)), "mask@v1"))) as picture:
        colours = {colour for count, colour in picture.convert("RGB").getcolors(1_000_000) if count > 1_000}
    wanted = colours_of(["mask", "bare", "street"])
    assert {wanted["mask"], wanted["bare"]} <= colours


def test_without_matplotlib_a_plot_is_an_error_that_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from datacache.annotations import stats\n"
        "from datacache.annotations.pictures import plot\n"
        "from datacache.core.errors import UsageError\n"
        "from tests.annotations.tables import build\n"
        "found = stats.collect(build([]))\n"
        "try: plot.plot(found, 'mask@v1')\n"
        "except UsageError as exc: print(exc, exc.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "plots need matplotlib Install it: pip install 'dsctl[plot]'\n"
