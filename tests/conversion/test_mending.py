"""`--problems` finds what reading does not, names its place, and `--fix` mends it as a new snapshot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from datacache import api
from datacache.annotations.model import Annotation, Box, Problem
from datacache.annotations.shapes.clip import area_of, uncrossed
from datacache.annotations.shapes.outline import Edges, Extra, Polygon, in_common, pack, polygon_of, rings, unpack
from datacache.annotations.table.ranges import Row
from datacache.conversion import problems, source
from datacache.conversion.fitting import fit
from datacache.conversion.model import Splits
from datacache.conversion.problems import Mending, spellings
from datacache.core.errors import ConversionError, UsageError
from datacache.settings import Settings
from tests.annotations.shapes import cases, points_within
from tests.annotations.tables import build

BOW = [10, 10, 50, 50, 50, 10, 10, 50]
SQUARE = [10, 10, 50, 10, 50, 50, 10, 50]


def save(folder: Path, objects: dict[str, list[dict[str, Any]]], names: dict[int, str]) -> Path:
    """A COCO data set with a file a split; `objects` are those of the paths below `images/`."""
    (folder / "annotations").mkdir(parents=True)
    for split in {path.partition("/")[0] for path in objects}:
        paths = [path for path in objects if path.startswith(split)]
        images, entries = [], []
        for number, path in enumerate(paths, 1):
            file = folder / "images" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            shade = "same" if file.stem.startswith("same") else path
            Image.new("RGB", (100, 80), (len(shade), sum(shade.encode()) % 200, 9)).save(file)
            images.append({"id": number, "file_name": file.name, "width": 100, "height": 80})
            entries += [{"image_id": number, "iscrowd": 0, **entry} for entry in objects[path]]
        content = {
            "images": images,
            "categories": [{"id": id, "name": name} for id, name in names.items()],
            "annotations": [{"id": n, **entry} for n, entry in enumerate(entries, 1)],
        }
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


def of(category: int, *bbox: float, **more: Any) -> dict[str, Any]:
    return {"category_id": category, "bbox": list(bbox), **more}


NAMES = {1: "no_mask", 2: "No mask", 3: "hat"}
OBJECTS = {
    "train/a.png": [
        of(1, 10, 10, 40, 40),
        of(1, 10, 10, 40.5, 40),
        of(1, 60, 10, 20, 20),
        of(1, 60, 10, 20, 20),
        of(2, 60, 10, 20, 20.2),
    ],
    "train/b.png": [of(3, 10, 10, 40, 40, segmentation=[BOW]), of(3, 10, 10, 40, 40, segmentation=[SQUARE])],
    "train/same.png": [of(1, 1, 1, 30, 30)],
    "val/same2.png": [of(1, 1, 1, 30, 30)],
    "val/c.png": [],
    "test/same3.png": [of(2, 1, 1, 30, 30)],
}


def shown(problems: list[Problem]) -> set[tuple[str, str, str, int]]:
    return {problem[:4] for problem in problems}


def test_a_closer_look_finds_them_with_their_places(
    make: Callable[..., str], tmp_path: Path, settings: Settings
) -> None:
    found = api.problems(make(save(tmp_path / "set", OBJECTS, NAMES)), settings=settings)
    train, test = "annotations/instances_train.json", "annotations/instances_test.json"
    assert shown(found) >= {
        ("box-near-equal", "noted", train, 2),
        ("box-repeated", "noted", train, 4),
        ("box-near-equal", "noted", train, 5),
        ("polygon-crossing", "noted", train, 6),
        ("split-shared", "noted", "images/val/same2.png", 0),
        ("split-shared", "noted", "images/test/same3.png", 0),
    }
    (spelling,) = [problem for problem in found if problem.code == "class-spelling"]
    assert spelling[1:4] in {("noted", test, 1), ("noted", train, 5)}
    assert "'No mask' (2 objects, 2 images) is written 'no_mask'" in spelling.message
    assert [(p.file, p.line) for p in found] == sorted((p.file, p.line) for p in found)
    crossing = next(problem for problem in found if problem.code == "polygon-crossing")
    assert crossing.message == "images/train/b.png, object 1 ('hat'): the outline crosses itself"


def test_images_of_a_file_that_cannot_be_read_do_not_become_background(
    make: Callable[..., str], tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "set", OBJECTS, NAMES)
    (folder / "annotations" / "instances_train.json").write_text('{"images": [{"id": 1')
    done = api.convert(make(folder), to="coco", name="part", keep_unannotated=True, settings=settings)
    assert done.report.written == 3
    left_out = [each for each in done.report.problems if each.code == "image-unannotated"]
    assert {(each.action, each.file) for each in left_out} == {
        ("skipped", f"images/train/{name}.png") for name in ("a", "b", "same")
    }
    assert "perhaps in 'annotations/instances_train.json', which cannot be read; it is left out" in left_out[0].message

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setitem(source._PARSERS, "coco", fail)
        (folder / "annotations" / "instances_train.json").write_text('{"images": []}')
        with pytest.raises(ConversionError) as caught:
            api.convert(make(folder), to="coco", name="failed", keep_unannotated=True, settings=settings)
    assert caught.value.hint.startswith("Mend or remove 'annotations/instances_")
    for file in (folder / "annotations").iterdir():
        file.write_text('{"images": [{"id": 1')
    with pytest.raises(ConversionError) as caught:
        api.convert(make(folder), to="yolo", name="none", keep_unannotated=True, settings=settings)
    assert caught.value.hint.startswith("Mend or remove 'annotations/instances_")


def test_what_is_found_is_mended_as_a_new_snapshot_always_the_same(
    make: Callable[..., str], tmp_path: Path, settings: Settings
) -> None:
    ref = make(save(tmp_path / "set", OBJECTS, NAMES))
    done = api.fix_problems(ref, name="mended", settings=settings, tags=["good"])
    assert done.record.lineage is not None
    assert (done.record.lineage.command, done.record.lineage.parameters["to"]) == ("fix", "coco")
    assert done.record.lineage.inputs[0].startswith(ref)
    train = "annotations/instances_train.json"
    assert shown(done.report.problems) >= {
        ("box-near-equal", "repaired", train, 2),
        ("box-repeated", "repaired", train, 4),
        ("polygon-crossing", "repaired", train, 6),
        ("split-shared", "skipped", "images/val/same2.png", 0),
        ("split-shared", "skipped", "images/test/same3.png", 0),
    }
    assert done.report.counts["class-spelling"] == 1
    assert ("box-repeated", "noted", train, 4) not in shown(done.report.problems), "it is not kept"
    with api.open_annotations("mended@good", settings=settings) as (_, table):
        rows = {row.path.rpartition("/")[2]: row.annotation for row in table.rows()}
        assert {name: rows[name] and len(rows[name].boxes) for name in rows} == {
            "a.png": 2, "b.png": 2, "same.png": 1, "c.png": 0
        }  # fmt: skip
        assert {*table.labels} == {"no_mask", "hat"}
        bow = rows["b.png"].boxes[0].extra.outline
        assert (bow.ends, bow.holes, area_of(bow)) == ((3, 6), 0, 800)
    again = {problem.code for problem in api.problems("mended@good", settings=settings)}
    assert not again & {"box-near-equal", "polygon-crossing", "class-spelling", "split-shared", "box-repeated"}
    assert api.fix_problems(ref, name="mended", settings=settings).record.id == done.record.id


@pytest.mark.parametrize(
    ("line", "more", "to"),
    [
        ("0 0.5 0.5 0.2 0.2", "", "yolo"),
        ("0 0.1 0.1 0.4 0.1 0.4 0.4 0.1 0.4", "", "yolo-segment"),
        ("0 0.1 0.1 0.4 0.1 0.4 0.4 0.1 0.4", "# task: obb\n", "yolo-obb"),
        ("0 0.5 0.5 0.2 0.2 0.45 0.45 2", "kpt_shape: [1, 3]\n", "yolo-pose"),
    ],
)
def test_it_stays_in_its_format(
    line: str, more: str, to: str, make: Callable[..., str], tmp_path: Path, settings: Settings
) -> None:
    for name in ("images", "labels"):
        (tmp_path / "set" / name).mkdir(parents=True)
    Image.new("RGB", (100, 100)).save(tmp_path / "set/images/a.png")
    (tmp_path / "set/labels/a.txt").write_text(f"{line}\n")
    (tmp_path / "set/data.yaml").write_text(f"{more}train: images\nval: images\nnames: [hat]\n")
    done = api.fix_problems(make(tmp_path / "set"), name="mended", settings=settings)
    assert done.record.lineage is not None
    assert done.record.lineage.parameters["to"] == to
    assert done.report.boxes == 1


def test_a_video_stays_one(make: Callable[..., str], tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "set/train").mkdir(parents=True)  # which is no split: a video has none
    Image.new("RGB", (100, 100)).save(tmp_path / "set/train/frame_000000.png")
    (tmp_path / "set/annotations.xml").write_text(
        '<annotations><version>1.1</version><track id="0" label="hat">'
        '<box frame="0" xtl="1" ytl="1" xbr="9" ybr="9" outside="0" occluded="0" keyframe="1"/></track></annotations>'
    )
    done = api.fix_problems(make(tmp_path / "set"), name="mended", settings=settings)
    assert done.record.lineage is not None
    assert done.record.lineage.parameters["to"] == "cvat-video"


def test_without_annotations_there_is_nothing_to_mend(
    make: Callable[..., str], tmp_path: Path, settings: Settings
) -> None:
    (tmp_path / "set").mkdir()
    Image.new("RGB", (10, 10)).save(tmp_path / "set/a.png")
    ref = make(tmp_path / "set")
    with pytest.raises(UsageError, match="no annotations"):
        api.fix_problems(ref, name="mended", settings=settings)
    assert api.problems(ref, settings=settings) == []


def test_a_sure_prediction_makes_a_label_doubtful(make: Callable[..., str], tmp_path: Path, settings: Settings) -> None:
    names = {1: "cat", 2: "dog"}
    said = {"val/a.png": [of(1, 10, 10, 20, 20), of(1, 50, 10, 20, 20), of(2, 10, 50, 20, 20), of(2, 50, 50, 20, 20)]}
    predicted = {
        "val/a.png": [
            of(2, 10, 10, 20, 22, score=0.9),
            of(2, 50, 10, 20, 20, score=0.7),
            of(1, 10, 50, 20, 20, score=0.9),
            of(2, 10, 50, 20, 21, score=0.8),
            of(1, 50, 50, 20, 30, score=0.9),
        ]
    }
    ref, predictions = (make(save(tmp_path / name, it, names), name) for name, it in (("s", said), ("p", predicted)))
    found = api.problems(ref, predictions=predictions, settings=settings)
    assert [(*problem[:4], problem.message) for problem in found if problem.code == "label-doubtful"] == [
        (
            *("label-doubtful", "noted", "annotations/instances_val.json", 1),
            "images/val/a.png, object 1: labelled 'cat', and predicted as 'dog' with a score of 0.90",
        )
    ]
    assert all(problem.code != "label-doubtful" for problem in api.problems(ref, settings=settings))
    with pytest.raises(UsageError, match="no image has a prediction with a score"):
        api.problems(ref, predictions=ref, settings=settings)


def test_spellings_differ_in_capitals_and_separators_only() -> None:
    labels = ["no_mask", "No-Mask", "nomask", "a", "A", "1-0", "10", "-1", "1", "class_1", "class 1", "_", "-"]
    boxes = tuple(Box(label, n, 0, n + 1, 1) for n, label in enumerate(["no_mask", *labels]))
    table = build([Row(Annotation("a.jpg", 100, 10, boxes), "a.jpg", ())])
    assert spellings(table) == {"No-Mask": "no_mask", "nomask": "no_mask", "class_1": "class 1"}


def mended(*boxes: Box) -> list[Box]:
    annotation = Annotation("a.jpg", 100, 100, boxes)
    mending = Mending(None, build([Row(annotation, "a.jpg", ())]), Splits(), fix=True)  # type: ignore[arg-type]
    return [*mending.mended(annotation, []).boxes]


side = st.integers(1, 24)


@cases
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 3), side, side), max_size=12))
def test_of_boxes_that_are_nearly_equal_the_first_is_kept(drawn: list[tuple[str, int, int, int, int]]) -> None:
    boxes = [Box(label, x, y, x + w, y + h) for label, x, y, w, h in drawn]

    def near(a: Box, b: Box) -> bool:
        width, height = min(a.x2, b.x2) - max(a.x1, b.x1), min(a.y2, b.y2) - max(a.y1, b.y1)
        both, areas = max(width, 0) * max(height, 0), ((c.x2 - c.x1) * (c.y2 - c.y1) for c in (a, b))
        return 10 * both >= 9 * (sum(areas) - both)

    kept: list[Box] = []
    for box in boxes:
        if not any(near(box, other) for other in kept if other.label == box.label):
            kept.append(box)
    assert mended(*boxes) == kept


@cases
@given(st.lists(st.tuples(*[st.floats(0, 30)] * 2, *[st.floats(7, 9)] * 2), max_size=20), st.floats(1e-3, 1e3))
def test_nearly_equal_boxes_are_found_wherever_they_lie(drawn: list[tuple[float, ...]], scale: float) -> None:
    boxes = [Box("a", *(scale * edge for edge in (x, y, x + w, y + h))) for x, y, w, h in drawn]
    kept: list[Box] = []
    for box in boxes:
        if not any(in_common(box[1:5], other[1:5]) >= 0.9 for other in kept):
            kept.append(box)
    assert mended(*boxes) == kept


@pytest.mark.parametrize("edge", range(4))
@pytest.mark.parametrize("side", [1, 3.9, 4, 4.1, 77])
def test_an_edge_may_be_a_tenth_of_the_side_apart(edge: int, side: float) -> None:
    edges = [5.0, 5.0, 5.0 + side, 5.0 + side]
    moved = [*edges]
    moved[edge] += side * (0.0999 if edge < 2 else -0.0999)
    one, other = Box("a", *edges), Box("a", *moved)
    assert mended(one, other) == [one]
    assert mended(other, one) == [other]


def test_each_box_is_compared_with_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(one: Edges, other: Edges) -> float:
        nonlocal compared
        compared += 1
        return in_common(one, other)

    monkeypatch.setattr("datacache.conversion.problems.in_common", counted)
    mended(*(Box("a", x, y, x + 10 + x % 7, y + 10) for x in range(0, 300, 3) for y in range(0, 300, 3)))
    assert compared < 20_000


def test_objects_with_outlines_are_repeated_only_where_they_are_equal() -> None:
    square, other = Polygon(pack(SQUARE)), Polygon(pack([10, 10, 50, 10, 50, 50]))
    first, second = (Box("a", 10, 10, 50, 50, extra=Extra(outline)) for outline in (square, other))
    assert mended(first, second, first, Box("a", 10, 10, 50, 50)) == [first, second, Box("a", 10, 10, 50, 50)]


def fills(polygon: Polygon, x: float, y: float) -> bool:
    """Tell whether lines enclose a point an odd number of times."""
    crossed = 0
    for ring, _ in rings(polygon):
        points = [*zip(unpack(ring)[::2], unpack(ring)[1::2], strict=True)]
        for (ax, ay), (bx, by) in zip(points, [*points[1:], points[0]], strict=True):
            crossed += (ay > y) != (by > y) and x < ax + (y - ay) * (bx - ax) / (by - ay)
    return crossed % 2 == 1


@cases
@given(points_within(30, 30, high=7))
def test_an_outline_that_crosses_becomes_what_it_fills(drawn: bytes) -> None:
    found = uncrossed(polygon := Polygon(drawn))
    if found is None:
        return
    assert uncrossed(found) is None
    lines = shapely.LinearRing(np.frombuffer(drawn).reshape(-1, 2))
    for x in range(1, 30, 3):
        for y in range(1, 30, 3):
            if lines.distance(shapely.Point(x, y)) > 1e-3:
                assert fills(polygon, x + 1e-4, y + 2e-4) == fills(found, x + 1e-4, y + 2e-4)


def test_lines_that_touch_or_go_back_do_not_cross() -> None:
    holed = polygon_of([pack(SQUARE), pack((20, 20, 30, 20, 30, 30, 20, 30))], 0b10)
    box = Box("a", 10, 10, 50, 50, extra=Extra(holed))
    joined = fit(Annotation("a.jpg", 60, 60, (box,)), frozenset({"polygon"}), []).boxes[0].extra
    touching = pack((10, 10, 30, 30, 50, 10, 50, 50, 30, 30, 10, 50))
    assert joined is not None
    for outline in (joined.outline, Polygon(touching), holed):
        assert isinstance(outline, Polygon)
        assert uncrossed(outline) is None


def test_an_image_at_which_the_closer_look_fails_is_named_and_all_others_are_mended(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = problems._repeated

    def fails(boxes: list[Box]) -> dict[int, tuple[int, bool]]:
        if len(boxes) == 5:
            raise ZeroDivisionError("no side")
        return works(boxes)

    monkeypatch.setattr(problems, "_repeated", fails)
    folder = save(tmp_path / "some", OBJECTS, NAMES)
    ref = api.create_snapshot("some", folder.as_uri(), settings=settings).ref
    done = api.fix_problems(ref, name="mended", settings=settings)
    for found in (api.problems(ref, settings=settings), done.report.problems):
        (failed,) = (each for each in found if each.code == "unforeseen")
        assert failed.file == "annotations/instances_train.json"
        assert "ZeroDivisionError: no side" in failed.message
        assert "train/a.png" in failed.message
        assert "polygon-crossing" in {each.code for each in found}
    with api.open_annotations(done.record.ref, settings=settings) as (_, table):
        assert [len(row.annotation.boxes) for row in table.rows() if row.annotation and "a.png" in row.path] == [5]
