"""Conversions change what a format cannot hold as the document says, count it, and refuse it under `--strict`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from PIL import Image

from datacache import api
from datacache.annotations.model import Annotation, Box, Problem
from datacache.annotations.shapes import mask as masks
from datacache.annotations.shapes.mask import encode, fill
from datacache.annotations.shapes.outline import (
    Extra,
    Keypoints,
    Mask,
    Polygon,
    Rotated,
    area,
    bounds,
    pack,
    polygon_of,
)
from datacache.conversion import fitting
from datacache.conversion.fitting import Losses, fit
from datacache.conversion.pipeline import Conversion
from datacache.conversion.targets import TARGETS
from datacache.core.errors import ConversionError, UsageError
from datacache.settings import Settings
from tests.annotations.shapes import bitmaps, cases

SQUARE = (2.0, 2.0, 12.0, 2.0, 12.0, 12.0, 2.0, 12.0)
HOLED = polygon_of([pack(SQUARE), pack((4, 4, 8, 4, 8, 8, 4, 8))], 0b10)
APART = polygon_of([pack(SQUARE), pack((20, 20, 26, 20, 26, 26))])
MASK = encode(np.ones((3, 4), bool), 5, 6, 30, 30)
TURNED = Rotated(pack((6, 2, 10, 6, 6, 10, 2, 6)))
POINTS = Keypoints(pack((3, 3, 4, 4)), b"\2\0")
SEGMENT, OBB, POSE, COCO, CVAT, VIDEO, BOXES = (
    TARGETS[name].holds for name in ("yolo-segment", "yolo-obb", "yolo-pose", "coco", "cvat", "cvat-video", "yolo")
)  # type: ignore[attr-defined]


MASKS: frozenset[str] = TARGETS["voc"].holds  # type: ignore[attr-defined]


def fitted(holds: frozenset[str], *extras: Extra, **more: Any) -> tuple[list[Extra | None], list[tuple[str, str]]]:
    boxes = tuple(Box("a", 2, 2, 12, 12, line=n, extra=extra) for n, extra in enumerate(extras, 1))
    problems: list[Problem] = []
    found = fit(Annotation("a.jpg", 30, 30, boxes, (), "f", **more), holds, problems)
    assert {problem.file for problem in problems} <= {"f"}
    return [box.extra for box in found.boxes], [(problem.code, problem.action) for problem in problems]


@pytest.mark.parametrize(
    ("holds", "extra", "code"),
    [
        (BOXES, Extra(HOLED), "polygon-boxed"),
        (BOXES, Extra(MASK), "mask-boxed"),
        (BOXES, Extra(TURNED), "rotation-boxed"),
        (BOXES, Extra(keypoints=POINTS), "keypoints-left-out"),
        (SEGMENT, Extra(keypoints=POINTS), "keypoints-left-out"),
        (MASKS, Extra(Polygon(pack((0, 0, 30, 1) * 14_000))), "polygon-boxed"),
    ],
)
def test_what_has_no_counterpart_is_left_out(holds: frozenset[str], extra: Extra, code: str) -> None:
    assert fitted(holds, extra) == ([None], [(code, "changed")])


@pytest.mark.parametrize(
    ("holds", "extra"),
    [
        (SEGMENT, Extra(Polygon(pack(SQUARE)))),
        (OBB, Extra(TURNED)),
        (POSE, Extra(keypoints=POINTS)),
        (COCO, Extra(APART, POINTS, score=0.5, area=3.0)),
        (COCO, Extra(MASK)),
        (MASKS, Extra(MASK)),
        (CVAT, Extra(TURNED, POINTS)),
        (CVAT, Extra(keypoints=POINTS)),
    ],
)
def test_what_is_held_is_left_as_it_is(holds: frozenset[str], extra: Extra) -> None:
    assert fitted(holds, extra) == ([extra], [])


def test_an_outline_becomes_the_nearest_thing_that_is_held() -> None:
    assert fitted(SEGMENT, Extra(TURNED)) == ([Extra(Polygon(TURNED.corners))], [("rotation-outlined", "changed")])
    for outline in (HOLED, APART, TURNED):
        filled = fill(Polygon(TURNED.corners) if outline is TURNED else outline, 30, 30)  # type: ignore[arg-type]
        assert fitted(MASKS, Extra(outline)) == ([Extra(filled)], [("polygon-masked", "changed")])
    (inside,), _ = fitted(SEGMENT, Extra(Rotated(pack((-4, 2, 8, 2, 8, 6, -4, 6)))))
    assert inside is not None
    assert isinstance(inside.outline, Polygon)
    assert bounds(inside.outline.points) == (0, 2, 8, 6)
    assert fitted(COCO, Extra(HOLED)) == ([Extra(fill(HOLED, 30, 30))], [("polygon-masked", "changed")])
    assert fitted(POSE, Extra(APART, POINTS)) == ([Extra(keypoints=POINTS)], [("polygon-boxed", "changed")])
    assert fitted(VIDEO, Extra(keypoints=POINTS)) == ([Extra(keypoints=POINTS)], [("box-of-keypoints", "changed")])
    nowhere = POINTS._replace(visible=b"\0\0")
    assert fitted(CVAT, Extra(TURNED, nowhere)) == ([Extra(TURNED)], [("keypoints-left-out", "changed")])
    leaning = Rotated(pack((6, 2, 10, 6, 7, 10, 2, 6)))
    (turned,), problems = fitted(CVAT, Extra(leaning))
    assert (type(turned and turned.outline), problems) == (Rotated, [("outline-rotated", "changed")])
    assert fitted(OBB, Extra(leaning)) == ([Extra(leaning)], [])
    (traced,), problems = fitted(SEGMENT, Extra(MASK))
    assert problems == [("mask-traced", "changed")]
    assert traced is not None
    assert isinstance(traced.outline, Polygon)
    assert bounds(traced.outline.points) == (5, 6, 9, 9)
    (turned,), problems = fitted(OBB, Extra(MASK))
    assert problems == [("outline-rotated", "changed")]
    assert turned is not None
    assert isinstance(turned.outline, Rotated)
    assert bounds(turned.outline.corners) == pytest.approx((5, 6, 9, 9))


@pytest.mark.parametrize("limit", [10**9, 0])
@pytest.mark.parametrize("outline", [HOLED, APART])
def test_rings_are_joined_to_one_that_fills_the_same_pixels(
    outline: Polygon, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_JOINED_BYTES", limit)
    (joined,), problems = fitted(SEGMENT, Extra(outline))
    assert problems == [("rings-joined", "changed")]
    assert joined is not None
    assert isinstance(joined.outline, Polygon)
    assert joined.outline.ends == ()
    assert _filled(joined.outline) == _filled(outline)
    assert area(joined.outline) == area(outline)


def test_holes_run_against_what_they_are_in_and_parts_with_it() -> None:
    corners = [(4, 4), (8, 4), (8, 8), (4, 8)]
    for points in (corners, corners[::-1]):
        for holes, of in ((0b10, -16), (0, 16)):
            outline = polygon_of([pack(SQUARE), pack(value for point in points for value in point)], holes)
            ((joined,), _) = fitted(SEGMENT, Extra(outline))
            assert joined is not None
            assert isinstance(joined.outline, Polygon)
            assert area(joined.outline) == 100 + of


def _filled(polygon: Polygon) -> int:
    """Return the number of pixels by the rule of even and odd, from their centres."""
    from datacache.annotations.shapes.outline import rings, unpack

    count = 0
    for x, y in np.ndindex(30, 30):
        inside = False
        for ring, _ in rings(polygon):
            values = unpack(ring)
            points = list(zip(values[0::2], values[1::2], strict=True))
            for (ax, ay), (bx, by) in zip(points, points[1:] + points[:1], strict=True):
                if (ay > y + 0.5) != (by > y + 0.5) and x + 0.5 < (bx - ax) * (y + 0.5 - ay) / (by - ay) + ax:
                    inside = not inside
        count += inside
    return count


@cases
@given(bitmaps())
def test_any_mask_becomes_one_ring_or_nothing(pixels: Any) -> None:
    mask = encode(pixels, 1, 1, 30, 30)
    (extra,), _ = fitted(SEGMENT, Extra(mask))
    if not masks.area(mask):
        assert extra is None
    else:
        assert extra is not None
        assert isinstance(extra.outline, Polygon)
        assert extra.outline.ends == ()
        assert _filled(extra.outline) == masks.area(mask)


def test_the_objects_of_an_image_are_counted_under_one_code() -> None:
    problems: list[Problem] = []
    boxes = tuple(Box("a", 2, 2, 12, 12, line=n, extra=Extra(HOLED)) for n in (4, 5))
    fit(Annotation("a.jpg", 30, 30, boxes, (), "f"), BOXES, problems)
    assert problems == [
        Problem("polygon-boxed", "changed", "f", 4, "a.jpg: the polygons of 2 objects became their boxes"),
    ]


@pytest.mark.parametrize(
    ("to", "lost"),
    [
        ("yolo", "'colour' (3 objects), difficult (2 objects), track (1 object), group (1 object) and 4 more"),
        ("coco", "track (1 object), group (1 object), author (1 object)"),
        ("cvat-video", "score (1 object)"),
        ("voc", "track (1 object), group (1 object), score (1 object), author (1 object)"),
        ("open-images", "'colour' (3 objects), difficult (2 objects), track (1 object), group (1 object)"),
    ],
)
def test_what_is_no_shape_is_one_line_a_conversion(to: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_SHOWN_NAMES", 4)
    losses = Losses(TARGETS[to].holds)  # type: ignore[attr-defined]
    plain = Box("a", 2, 2, 12, 12, extra=Extra(Polygon(pack(SQUARE))))
    dark = plain._replace(attributes=(("colour", "dark"),), line=7)
    all_of_it = dark._replace(difficult=True, extra=Extra(None, POINTS, 1, 2, 0.5, "me"))
    flags = dark._replace(difficult=True, truncated=True, attributes=(("IsInside", "1"), ("colour", "light")))
    for path, boxes in (("a.jpg", (plain,)), ("b.jpg", (plain, dark, all_of_it)), ("c.jpg", (flags,))):
        losses.take(Annotation(path, 30, 30, boxes, (), f"{path}.xml"))
    (problem,) = losses.problems()
    message = f"left out, as the format does not hold them: {lost}"
    assert problem == Problem("details-left-out", "changed", "b.jpg.xml", 7, message)
    assert fitted(BOXES, Extra(track=1, group=2, score=0.5, author="me")) == ([None], [])


@pytest.mark.parametrize(
    ("to", "lost"), [("labelme", "names of keypoints (1 object)"), ("yolo-pose", ""), ("yolo", "")]
)
def test_names_of_keypoints_are_counted_where_keypoints_are_held_without(to: str, lost: str) -> None:
    losses = Losses(TARGETS[to].holds, {"cat"})  # type: ignore[attr-defined]
    boxes = (Box(label, 2, 2, 12, 12, extra=Extra(keypoints=POINTS)) for label in ("cat", "dog"))
    losses.take(Annotation("a.jpg", 30, 30, (*boxes, Box("cat", 1, 1, 2, 2, extra=Extra(TURNED)))))
    assert [problem.message.rpartition(": ")[2] for problem in losses.problems()] == ([lost] if lost else [])


def test_nothing_is_said_where_nothing_is_lost() -> None:
    losses = Losses(TARGETS["cvat-video"].holds)  # type: ignore[attr-defined]
    box = Box("a", 2, 2, 12, 12, True, True, True, (("colour", "dark"),), 1, Extra(TURNED, None, 1, 2, None, "me"))
    losses.take(Annotation("a.jpg", 30, 30, (box,)))
    assert list(losses.problems()) == []


# --- whole data sets --------------------------------------------------------------------------------------------------


Convert = Callable[..., Conversion]


@pytest.fixture
def convert(settings: Settings, number: int) -> Convert:
    def run(ref: str, to: str, **options: object) -> Conversion:
        return api.convert(ref, to=to, name=f"{to}-{number}", settings=settings, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture
def persons(tmp_path: Path, make: Callable[..., str]) -> str:
    """A snapshot of two images in COCO with instances, keypoints and captions."""
    folder = tmp_path / "persons"
    (folder / "annotations").mkdir(parents=True)
    (folder / "images").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (30, 20)).save(folder / "images" / f"{name}.jpg")
    images = [{"id": n, "file_name": f"{name}.jpg", "width": 30, "height": 20} for n, name in enumerate("ab")]
    person = {"id": 1, "name": "person", "supercategory": "animal"}
    skeleton = {"keypoints": ["left_eye", "right_eye"], "skeleton": [[1, 2]]}
    polygon = {"image_id": 0, "category_id": 1, "bbox": [2, 2, 8, 8], "segmentation": [[2, 2, 10, 2, 10, 10]]}
    points = {**polygon, "keypoints": [4.25, 5, 2, 0, 0, 0], "num_keypoints": 1}
    mask = {"counts": MASK_OF_B.counts.decode(), "size": [20, 30]}
    crowd = {"image_id": 1, "category_id": 1, "bbox": [5, 6, 4, 3], "segmentation": mask, "iscrowd": 1, "area": 12}
    whole = {
        "instances": {"images": images, "categories": [person], "annotations": [polygon, crowd]},
        "person_keypoints": {"images": images, "categories": [{**person, **skeleton}], "annotations": [points]},
        "captions": {"images": images, "annotations": [{"image_id": 0, "caption": "Someone."}]},
    }
    for name, content in whole.items():
        (folder / "annotations" / f"{name}_train.json").write_text(json.dumps(content))
    return make(folder)


MASK_OF_B: Mask = encode(np.ones((3, 4), bool), 5, 6, 30, 20)


def test_instances_keypoints_and_captions_of_coco_are_one_data_set(
    persons: str, convert: Convert, files: Callable[[str], dict[str, bytes]]
) -> None:
    done = convert(persons, "coco", strict=True)
    found = files(done.record.ref)
    instances = json.loads(found["annotations/instances_train.json"])
    one, two = instances["annotations"]
    assert (one["segmentation"], one["keypoints"]) == ([[2, 2, 10, 2, 10, 10]], [4.25, 5, 2, 0, 0, 0])
    assert two["segmentation"] == {"counts": MASK_OF_B.counts.decode(), "size": [20, 30]}
    assert (two["iscrowd"], two["area"]) == (1, 12)
    (category,) = instances["categories"]
    assert (category["supercategory"], category["keypoints"]) == ("animal", ["left_eye", "right_eye"])
    assert category["skeleton"] == [[1, 2]]
    captions = json.loads(found["annotations/captions_train.json"])
    assert [entry["caption"] for entry in captions["annotations"]] == ["Someone."]


def test_captions_go_along_into_any_format(
    persons: str, convert: Convert, files: Callable[[str], dict[str, bytes]], settings: Settings
) -> None:
    first = convert(persons, "yolo").record.ref
    assert files(first)["metadata.jsonl"] == b'{"file_name": "images/train/a.jpg", "text": "Someone."}\n'
    back = api.convert(first, to="coco", name="back", settings=settings, strict=True).record.ref
    assert b"Someone." in files(back)["annotations/captions_train.json"]


def test_the_targets_of_yolo_each_have_their_kind(
    persons: str, convert: Convert, files: Callable[[str], dict[str, bytes]]
) -> None:
    found = files(convert(persons, "yolo-segment").record.ref)
    assert found["labels/train/a.txt"] == b"0 0.066667 0.100000 0.333333 0.100000 0.333333 0.500000\n"
    assert len(found["labels/train/b.txt"].split()) == 9
    found = files(convert(persons, "yolo-pose").record.ref)
    line = b"0 0.200000 0.300000 0.266667 0.400000 0.141667 0.250000 2 0.000000 0.000000 0\n"
    assert found["labels/train/a.txt"] == line
    content = yaml.safe_load(found["data.yaml"])
    assert (content["kpt_shape"], content["flip_idx"]) == ([2, 3], [1, 0])
    assert content["kpt_names"] == {0: ["left_eye", "right_eye"]}
    found = files(convert(persons, "yolo-obb").record.ref)
    assert {len(found[f"labels/train/{name}.txt"].split()) for name in "ab"} == {9}
    again = convert(persons, "yolo")
    assert {p.code for p in again.report.problems if p.action == "changed"} == {
        "polygon-boxed",
        "mask-boxed",
        "keypoints-left-out",
        "details-left-out",  # one is a crowd
    }


@pytest.mark.parametrize("to", ["yolo", "yolo-segment", "yolo-pose", "yolo-obb", "voc"])
def test_strict_refuses_what_is_changed(to: str, persons: str, convert: Convert) -> None:
    with pytest.raises(ConversionError, match="strict"):
        convert(persons, to, strict=True)


def test_what_one_writes_the_next_reads(
    persons: str, convert: Convert, files: Callable[[str], dict[str, bytes]], settings: Settings
) -> None:
    for to in ("yolo-segment", "yolo-pose", "yolo-obb"):
        first = convert(persons, to).record.ref
        again = api.convert(first, to=to, name=f"again-{to}", settings=settings).record.ref
        assert files(again) == files(first)
        back = api.convert(first, to="coco", name=f"back-{to}", settings=settings).record.ref
        assert len(json.loads(files(back)["annotations/instances_train.json"])["annotations"]) == 2


def test_images_of_masks_are_the_same_there_and_back(
    persons: str, convert: Convert, files: Callable[[str], dict[str, bytes]], settings: Settings
) -> None:
    there = convert(persons, "voc")
    codes = {"polygon-masked", "keypoints-left-out"}
    assert {p.code for p in there.report.problems if p.action == "changed"} == codes
    found = files(there.record.ref)
    assert found["labelmap.txt"].splitlines()[1:] == [b"background:0,0,0::", b"person:128,0,0::"]
    assert found["ImageSets/Segmentation/train.txt"] == b"a\nb\n"
    again = api.convert(there.record.ref, to="voc", name="again", settings=settings, strict=True)
    assert files(again.record.ref) == found
    back = api.convert(there.record.ref, to="coco", name="back", settings=settings, strict=True)
    one, two = json.loads(files(back.record.ref)["annotations/instances_train.json"])["annotations"]
    expected = fill(Polygon(pack((2, 2, 10, 2, 10, 10))), 30, 20)
    assert one["segmentation"] == {"counts": expected.counts.decode(), "size": [20, 30]}
    assert two["segmentation"] == {"counts": MASK_OF_B.counts.decode(), "size": [20, 30]}
    part = api.subset(there.record.ref, ["JPEGImages/a.jpg"], name="part", settings=settings)
    assert [path for path in files(part.ref) if "Segmentation" in path and path.endswith(".png")] == [
        "SegmentationClass/a.png",
        "SegmentationObject/a.png",
    ]


def test_scores_go_from_yolo_to_coco_and_back(
    tmp_path: Path, make: Callable[..., str], convert: Convert, files: Callable[[str], dict[str, bytes]]
) -> None:
    folder = tmp_path / "predicted"
    folder.mkdir()
    Image.new("RGB", (100, 80)).save(folder / "a.jpg")
    (folder / "a.txt").write_text("0 0.500000 0.500000 0.200000 0.200000 0.3\n0 0.500000 0.500000 0.100000 0.200000\n")
    (folder / "obj.names").write_text("face\n")
    coco = convert(make(folder), "coco", strict=True).record.ref
    objects = json.loads(files(coco)["annotations/instances.json"])["annotations"]
    assert [each.get("score") for each in objects] == [0.3, None]
    back = files(convert(coco, "yolo-predictions", strict=True).record.ref)
    assert back["labels/a.txt"] == (folder / "a.txt").read_bytes()
    assert convert(coco, "yolo").report.counts == {"details-left-out": 1}


def test_masks_that_overlap_are_counted(tmp_path: Path, make: Callable[..., str], convert: Convert) -> None:
    (tmp_path / "over").mkdir()
    Image.new("RGB", (30, 20)).save(tmp_path / "over" / "a.jpg")
    annotations = [
        {"image_id": 1, "category_id": 1, "bbox": box, "segmentation": [[x, 1, x + 9, 1, x + 9, 9, x, 9]]}
        for x in (1, 5)
        for box in ([x, 1, 9, 8],)
    ]
    image = {"id": 1, "file_name": "a.jpg", "width": 30, "height": 20}
    whole = {"images": [image], "categories": [{"id": 1, "name": "a"}], "annotations": annotations}
    (tmp_path / "over" / "instances.json").write_text(json.dumps(whole))
    problems = convert(make(tmp_path / "over", "over"), "voc").report.problems
    assert {problem[:4] for problem in problems} == {
        ("polygon-masked", "changed", "instances.json", 1),
        ("mask-covered", "changed", "instances.json", 1),
    }


def test_masks_need_no_xml(
    persons: str,
    convert: Convert,
    files: Callable[[str], dict[str, bytes]],
    tmp_path: Path,
    make: Callable[..., str],
) -> None:
    folder = tmp_path / "masks"
    for path, data in files(convert(persons, "voc").record.ref).items():
        if "Annotations" not in path and "Main" not in path:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    (folder / "SegmentationClass" / "lost.png").write_bytes(b"")
    done = convert(make(folder, "plain"), "coco")
    assert [problem[:3] for problem in done.report.problems] == [
        ("annotation-without-image", "skipped", "SegmentationClass/lost.png")
    ]
    one, two = json.loads(files(done.record.ref)["annotations/instances_train.json"])["annotations"]
    assert (one["bbox"], two["bbox"]) == ([3, 2, 7, 7], [5, 6, 4, 3])


def test_keypoints_that_no_class_has_cannot_be_written(drawn: Path, make: Callable[..., str], convert: Convert) -> None:
    with pytest.raises(UsageError, match="no class has keypoints"):
        convert(make(drawn), "yolo-pose")


def test_objects_without_keypoints_are_noted(persons: str, convert: Convert) -> None:
    codes = {problem.code for problem in convert(persons, "yolo-pose").report.problems}
    assert {"keypoints-padded", "mask-boxed"} <= codes
    ref = convert(persons, "yolo-segment").record.ref
    assert "obb-or-polygon" not in {problem.code for problem in convert(ref, "coco").report.problems}


def test_lines_of_four_points_are_rotated_boxes_where_that_is_said(
    persons: str, convert: Convert, files: Callable[[str], dict[str, bytes]], tmp_path: Path, make: Callable[..., str]
) -> None:
    folder = tmp_path / "plain"
    for path, data in files(convert(persons, "yolo-obb").record.ref).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data.replace(b"# task: obb\n", b""))
    ref = make(folder, "plain")
    codes = [problem.code for problem in convert(ref, "yolo-obb", replace=True).report.problems]
    assert ("outline-rotated" in codes, codes.count("obb-or-polygon")) == (True, 1)
    done = convert(ref, "yolo-obb", format="yolo-obb", strict=True, replace=True)
    assert "obb-or-polygon" not in {problem.code for problem in done.report.problems}
    written = files(done.record.ref)
    assert written["labels/train/a.txt"] == (folder / "labels/train/a.txt").read_bytes()


def test_a_mask_with_too_many_corners_stays_as_its_box() -> None:
    many = Extra(masks.from_runs([6, *[1, 6] * 51_426, 1, 10], 601, 599))
    assert fitted(SEGMENT, many) == ([None], [("mask-boxed", "changed")])
    (found,), _ = fitted(frozenset({"rotated"}), many)
    assert found is not None
    assert isinstance(found.outline, Rotated)
