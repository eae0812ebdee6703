"""Outlines, keypoints and tiles: what is painted on an image and the shape around it end up in the same place."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datacache import api
from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes import mask as masks
from datacache.annotations.shapes.clip import box_around, clip
from datacache.annotations.shapes.outline import (
    Extra,
    Keypoints,
    Mask,
    Outline,
    Polygon,
    Rotated,
    Skeleton,
    area,
    pack,
    polygon_of,
    ring_area,
    unpack,
)
from datacache.conversion.images import apply
from datacache.conversion.operations import carry, parse_operations, plan
from tests.promises import promise

pytestmark = [promise("Boxes, outlines and keypoints go with their images through every operation")]

SIZE = (64, 48)
RING = polygon_of([pack([10, 8, 50, 4, 58, 40, 12, 44]), pack([24, 16, 24, 32, 40, 32, 40, 16])], 2)
TURNED = Rotated(pack([20, 6, 52, 18, 44, 40, 12, 28]))
NAMES = Skeleton(("nose", "left_eye", "right_eye"))
OPTIONS: list[dict[str, Any]] = [
    {"crop": "20,10,38,30"},
    {"crop": "2,1,60%,80%"},
    {"flip": "h"},
    {"flip": "v"},
    {"rotate": 90},
    {"rotate": 180},
    {"rotate": -90},
    {"rotate": 17},
    {"resize": "128x96"},
    {"resize": "31x40"},
    {"resize": "90x90", "letterbox": True},
    {"crop": "center:60%x90%", "rotate": 31, "flip": "h", "resize": "80x70", "letterbox": True},
]


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def bitmap(mask: Mask) -> np.ndarray:
    return masks.decode(mask, (0, 0, mask.width, mask.height))


def painted(mask: Mask) -> bytes:
    return encoded(bitmap(mask).astype(np.uint8) * 255)


def annotated(*extras: Extra, size: tuple[int, int] = SIZE, path: str = "x.png") -> Annotation:
    boxes = []
    for extra in extras:
        around = (10.0, 8.0, 50.0, 44.0) if extra.outline is None else box_around(extra.outline)
        assert around is not None
        boxes.append(Box("cell", *around, extra=extra))
    return Annotation(path, *size, tuple(boxes), source="x.xml")


def outline_of(annotation: Annotation) -> Outline:
    (box,) = annotation.boxes
    assert box.extra is not None
    assert box.extra.outline is not None
    return box.extra.outline


def carried(before: Annotation, skeletons: Any = None, **options: Any) -> tuple[list[Annotation], list[str]]:
    ops = parse_operations(**options)
    plans, _ = plan(ops, before.width, before.height, before.path)
    after, problems = carry(before, plans, ops.min_visible, skeletons)
    return after, [problem.code for problem in problems]


def grown(pixels: np.ndarray) -> np.ndarray:
    padded = np.pad(pixels, 1)
    return np.any([np.roll(padded, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1)], 0)[1:-1, 1:-1]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pixels_agree_with_their_polygon_but_for_its_line(options) -> None:
    mask = masks.fill(RING, *SIZE)
    (result,), _ = apply(painted(mask), annotated(Extra(RING)), parse_operations(**options))
    pixels = np.asarray(Image.open(io.BytesIO(result.data))) > 160
    polygon = outline_of(result.annotation)
    assert isinstance(polygon, Polygon)
    filled = bitmap(masks.fill(polygon, result.annotation.width, result.annotation.height))
    assert not (filled & ~grown(pixels)).any()
    assert not (pixels & ~grown(filled)).any()
    assert bool(polygon.holes) == ("60%,80%" not in str(options))  # there the crop ends where the hole does
    (box,) = result.annotation.boxes
    assert box[1:5] == box_around(polygon)
    assert box.truncated == ("crop" in options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_mask_has_the_pixels_that_its_image_has(options) -> None:
    mask = masks.fill(RING, *SIZE)
    (result,), _ = apply(painted(mask), annotated(Extra(mask._replace(listed=True))), parse_operations(**options))
    pixels = np.asarray(Image.open(io.BytesIO(result.data)))
    after = outline_of(result.annotation)
    assert isinstance(after, Mask)
    assert after.listed
    found = bitmap(after)
    assert found.shape == pixels.shape
    assert (found[pixels == 255]).all()
    assert not (found[pixels == 0]).any()
    (box,) = result.annotation.boxes
    assert box[1:5] == masks.bounds(after)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_rotated_box_holds_what_is_left_of_it(options) -> None:
    mask = masks.fill(Polygon(TURNED.corners), *SIZE)
    (result,), _ = apply(painted(mask), annotated(Extra(TURNED)), parse_operations(**options))
    pixels = np.asarray(Image.open(io.BytesIO(result.data))) > 160
    after = outline_of(result.annotation)
    assert isinstance(after, Rotated)
    width, height = result.annotation.width, result.annotation.height
    inside = clip(Polygon(after.corners), (0, 0, width, height))
    assert inside is not None
    assert not (pixels & ~grown(bitmap(masks.fill(inside, width, height)))).any()
    x = unpack(after.corners)
    assert (x[2] - x[0]) * (x[7] - x[1]) > (x[3] - x[1]) * (x[6] - x[0])  # still clockwise
    if "crop" not in options and "resize" not in options:
        assert ring_area(after.corners) == pytest.approx(ring_area(TURNED.corners))


def test_a_crop_leaves_a_rotated_box_its_angle() -> None:
    (after,), _ = carried(annotated(Extra(TURNED)), crop="0,0,32,48")
    corners = np.array(unpack(outline_of(after).corners)).reshape(4, 2)
    assert np.arctan2(*(corners[1] - corners[0])) == pytest.approx(np.arctan2(32, 12))


def test_an_object_whose_outline_the_crop_misses_is_left_out() -> None:
    (after,), codes = carried(annotated(Extra(RING)), crop="26,18,10,10")  # the hole
    assert (after.boxes, codes) == ((), ["box-cropped-away"])
    (after,), codes = carried(annotated(Extra(masks.fill(RING, *SIZE))), crop="26,18,10,10")
    assert (after.boxes, codes) == ((), ["box-cropped-away"])


def test_what_a_crop_leaves_is_measured_by_the_outline() -> None:
    triangle = Polygon(pack([0, 0, 40, 0, 0, 40]))
    for outline in (triangle, masks.fill(triangle, *SIZE)):
        assert carried(annotated(Extra(outline)), crop="20,0,20,40", min_visible=0.3)[1] == ["box-cropped-away"]
        assert carried(annotated(Extra(outline)), crop="0,0,20,40", min_visible=0.7)[1] == []


def test_a_mask_that_is_too_small_for_a_pixel_keeps_one() -> None:
    mask = masks.encode(np.ones((1, 1), bool), 31, 5, *SIZE)
    (after,), codes = carried(annotated(Extra(mask)), resize="8x8")
    assert (box_around(outline_of(after)), codes) == ((3, 0, 4, 1), [])


def test_all_else_of_an_object_stays_but_the_area_that_a_file_gave() -> None:
    extra = Extra(RING, track=3, group=4, score=0.5, author="ann", area=7.0)
    (after,), _ = carried(annotated(extra), flip="h")
    assert after.boxes[0].extra == extra._replace(outline=outline_of(after), area=None)
    (bare,), _ = carried(annotated(Extra(area=7.0)), flip="h")
    assert bare.boxes[0].extra is None
    nothing, _ = carried(annotated(extra), crop="0,0,100%,100%")
    assert nothing[0].boxes[0].extra == extra._replace(area=None)


# --- keypoints -----------------------------------------------------------------------------------------------------


def keypoints_after(skeleton: Skeleton | None, **options: Any) -> tuple[list[float], list[int], list[str]]:
    keypoints = Keypoints(pack([30, 10, 24, 8, 36, 9]), bytes([2, 1, 2]))
    skeletons = {} if skeleton is None else {"cell": skeleton}
    (after,), codes = carried(annotated(Extra(keypoints=keypoints)), skeletons, **options)
    assert after.boxes[0].extra is not None
    found = after.boxes[0].extra.keypoints
    assert found is not None
    return unpack(found.points).tolist(), list(found.visible), codes


def test_a_mirror_swaps_left_and_right() -> None:
    mirrored = ([34, 10, 28, 9, 40, 8], [2, 2, 1], [])
    assert keypoints_after(NAMES, flip="h") == mirrored
    assert keypoints_after(Skeleton(("a", "b", "c"), flip=(0, 2, 1)), flip="h") == mirrored
    for names in (("Nose", "EyeLeft", "EyeRight"), ("nose", "l_eye", "r_eye"), ("hair", "Eye.L2", "Eye.R2")):
        assert keypoints_after(Skeleton(names), flip="h") == mirrored


def test_a_keypoint_alone_has_no_other_side() -> None:
    extra = Extra(keypoints=Keypoints(pack([30, 10]), b"\2"))
    (after,), codes = carried(annotated(extra), {"cell": Skeleton(("nose",))}, flip="h")
    assert after.boxes[0].extra == Extra(keypoints=Keypoints(pack([34, 10]), b"\2"))
    assert codes == []


@pytest.mark.parametrize(
    "skeleton", [None, Skeleton(("a", "b", "c")), Skeleton(("left", "right")), Skeleton(("a", "leg", "arm"))]
)
def test_without_names_they_stay_and_that_is_noted(skeleton) -> None:
    assert keypoints_after(skeleton, flip="h") == ([34, 10, 40, 8, 28, 9], [2, 1, 2], ["flip-unknown"])
    assert keypoints_after(skeleton, rotate=180)[2] == []  # a turn is no mirror


def test_keypoints_outside_of_a_crop_are_not_there() -> None:
    assert keypoints_after(NAMES, crop="26,0,38,40") == ([4, 10, 0, 0, 10, 9], [2, 0, 2], ["keypoint-outside"])


def test_an_object_whose_keypoints_a_crop_leaves_stays_without_its_outline() -> None:
    keypoints = Keypoints(pack([30, 20, 12, 10]), bytes([2, 2]))  # the first lies in the hole
    extra = Extra(RING, keypoints)
    (after,), codes = carried(annotated(extra), crop="26,18,10,10")
    assert after.boxes == (
        Box("cell", 0, 0, 10, 10, truncated=True, extra=Extra(None, Keypoints(pack([4, 2, 0, 0]), bytes([2, 0])))),
    )
    assert codes == ["keypoint-outside"]
    (after,), codes = carried(annotated(extra), crop="26,18,10,10", min_visible=0.1)
    assert (after.boxes, codes) == ((), ["box-cropped-away"])
    (after,), codes = carried(Annotation("x.png", *SIZE, (Box("a", 50, 8, 60, 44, extra=extra),)), crop="0,0,14,48")
    assert (len(after.boxes), codes) == (1, ["keypoint-outside"]), "the outline decides, not a box that differs"


# --- tiles ---------------------------------------------------------------------------------------------------------


def test_tiles_cover_the_image_and_all_have_one_size() -> None:
    ops = parse_operations(tile="30x20", overlap=4)
    pixels = np.arange(64 * 48, dtype=np.uint16).reshape(48, 64)
    seen = np.zeros_like(pixels, bool)
    results, problems = apply(encoded(pixels.astype(np.uint8)), annotated(path="a/x.jpg"), ops)
    for result in results:
        left, top = (int(part) for part in result.annotation.path.removesuffix(".png").split("_")[1:])
        assert (result.annotation.width, result.annotation.height) == (30, 20)
        part = np.s_[top : top + 20, left : left + 30]
        assert (np.asarray(Image.open(io.BytesIO(result.data))) == pixels[part].astype(np.uint8)).all()
        seen[part] = True
    assert seen.all()
    assert [result.annotation.path for result in results[:3]] == ["a/x_0_0.png", "a/x_26_0.png", "a/x_34_0.png"]
    assert (len(results), problems) == (9, [])


def test_an_image_smaller_than_a_tile_stays_whole() -> None:
    (result,), _ = apply(encoded(np.zeros((48, 64), np.uint8)), annotated(), parse_operations(tile="640x640"))
    assert (result.annotation.path, result.annotation.width) == ("x_0_0.png", 64)


def test_an_object_is_in_every_tile_that_has_a_part_of_it() -> None:
    after, codes = carried(annotated(Extra(Polygon(pack([10, 2, 50, 2, 50, 18, 10, 18])))), tile="32x24")
    assert [len(tile.boxes) for tile in after] == [1, 1, 0, 0]
    assert [tile.boxes[0].truncated for tile in after[:2]] == [True, True]
    assert sum(area(outline_of(tile)) for tile in after[:2]) == 40 * 16  # type: ignore[arg-type]
    assert codes == []


def test_of_keypoints_only_those_are_noted_that_no_tile_has_and_each_once() -> None:
    eyes = Extra(keypoints=Keypoints(pack([20, 10, 40, 20, 4, 40]), bytes([2, 1, 2])))
    before = Annotation("x.png", *SIZE, (Box("a", 10, 8, 50, 24, extra=eyes),), source="x.json")
    ops = parse_operations(tile="32x24", flip="h")
    plans, _ = plan(ops, *SIZE, "x.png")
    _, problems = carry(before, plans, 0.0, {})
    lost, unnamed = (problem.message for problem in problems)
    assert lost == "x.png: 1 keypoint lies outside of what a crop leaves: marked as not there"
    assert "those of 1 object keep" in unnamed


def test_only_what_no_tile_shows_enough_of_is_a_problem() -> None:
    before = Annotation("x.png", *SIZE, (Box("a", 28, 4, 36, 8), Box("b", 30, 12, 60, 20)), source="x.xml")
    after, codes = carried(before, tile="32x24", min_visible=0.6)
    assert [[box.label for box in tile.boxes] for tile in after] == [[], ["b"], [], []]
    assert codes == ["box-cropped-away"]


def test_a_tile_is_cut_from_the_crop_before_all_else() -> None:
    after, _ = carried(annotated(Extra(RING)), crop="0,0,60,40", tile="30x20", resize="60x40", rotate=90)
    assert [(tile.width, tile.height) for tile in after] == [(60, 40)] * 4


def test_a_data_set_is_cut_into_tiles(faces, make, files, settings) -> None:
    done = api.convert(
        make(faces), to="coco", name="tiles", tile="200x200", overlap=20, drop_empty=True, settings=settings
    )
    images = [path for path in files(done.record.ref) if path.startswith("images/")]
    assert len(images) == done.report.written > done.report.images
    assert (done.report.emptied, done.report.empty) == (0, 0)
    assert done.record.lineage.parameters["operations"]["tile"] == "200x200"


def test_an_object_in_several_tiles_loses_its_attributes_once(data_set, tmp_path, settings) -> None:
    data_set("wide", {"a": (9, [("cat", 28)])})
    xml = tmp_path / "wide" / "Annotations" / "a.xml"
    xml.write_text(xml.read_text().replace("</name>", "</name><difficult>1</difficult>"))
    ref = api.create_snapshot("wide", (tmp_path / "wide").as_uri(), settings=settings).ref
    done = api.convert(ref, to="yolo", name="plain", tile="32x24", settings=settings)
    assert done.report.boxes == 2
    (problem,) = [problem for problem in done.report.problems if problem.code == "details-left-out"]
    # That the tiles cut it is no flag of the source.
    assert problem.message.endswith(": difficult (1 object)")
