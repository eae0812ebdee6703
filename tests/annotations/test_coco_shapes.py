"""COCO's outlines, keypoints and captions come back as they were, and what cannot be meant leaves its object a box."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache.annotations.formats import coco
from datacache.annotations.model import Annotation, Box, DraftFile
from datacache.annotations.shapes.mask import encode
from datacache.annotations.shapes.outline import Extra, Keypoints, Mask, Polygon, Skeleton, pack, polygon_of
from tests.annotations.shapes import bitmaps, cases, hundredths, points_within

SKELETON = Skeleton(("nose", "left eye"), ((0, 1),))


@st.composite
def annotations(draw: st.DrawFn) -> Annotation:
    width, height = draw(st.integers(10, 700)), draw(st.integers(10, 700))
    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        x1, y1 = draw(hundredths(width - 1)), draw(hundredths(height - 1))
        x2, y2 = x1 + draw(st.integers(1, 900)) / 100, y1 + draw(st.integers(1, 900)) / 100
        outline: Polygon | Mask | None = None
        kind = draw(st.sampled_from(["none", "polygon", "mask"]))
        if kind == "polygon":
            outline = polygon_of(draw(st.lists(points_within(width, height), min_size=1, max_size=3)))
        elif kind == "mask":
            outline = encode(draw(bitmaps()), 0, 0, width, height)._replace(listed=draw(st.booleans()))
        label, keypoints = draw(st.sampled_from(["car", "person"])), None
        if label == "person" and draw(st.booleans()):
            seen = bytes(draw(st.lists(st.integers(0, 2), min_size=2, max_size=2)))
            keypoints = Keypoints(draw(points_within(width, height, 2, 2)), seen)
        area = draw(st.none() | st.integers(0, 10**9).map(lambda n: n / 10_000)) if outline or keypoints else None
        crowd = draw(st.sampled_from([(), (("iscrowd", "1"),)]))
        extra = Extra(outline, keypoints, area=area) if outline or keypoints else None
        boxes.append(Box(label, x1, y1, x2, y2, attributes=crowd, extra=extra))
    return Annotation(draw(st.sampled_from(["a.jpg", "b/ü.png"])), width, height, tuple(boxes))


def written(annotation: Annotation) -> bytes:
    return b"".join(coco.write([annotation], ("person", "car"), {"person": SKELETON}, {"person": "animal"}))


@cases
@given(annotations())
def test_what_is_written_is_read_again_to_the_last_digit(annotation: Annotation) -> None:
    data = written(annotation)
    found = coco.parse(data, "f")
    (draft, problems), *_ = found.images
    assert {problem.code for problem in (*found.problems, *problems)} <= {"crowd"}
    assert found.skeletons == {"person": SKELETON}
    assert found.supercategories == {"person": "animal"}
    for box, before in zip(draft.boxes, annotation.boxes, strict=True):
        assert box._replace(line=0, extra=None) == before._replace(extra=None)
        mine, theirs = box.extra or Extra(), before.extra or Extra()
        assert mine._replace(area=None) == theirs._replace(area=None)
        assert theirs.area is None or mine.area == theirs.area
    assert written(annotation._replace(boxes=draft.boxes)) == data


def read(*entries: dict[str, Any], **content: Any) -> tuple[DraftFile, list[tuple[str, str]]]:
    whole = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 10, "height": 8}],
        "categories": [{"id": 1, "name": "person"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], **entry} for entry in entries],
        **content,
    }
    found = coco.parse(json.dumps(whole).encode(), "f")
    problems = [*found.problems, *found.images[0][1]]
    return found, [(problem.code, problem.action) for problem in problems]


def extra_of(**entry: Any) -> tuple[Extra | None, list[tuple[str, str]]]:
    found, problems = read(entry)
    return found.images[0][0].boxes[0].extra, problems


@pytest.mark.parametrize(
    ("segmentation", "code"),
    [
        ([[]], "polygon-empty"),
        ([[1, 2, 3]], "shape-malformed"),
        ([["a", 1, 2, 3, 4, 5]], "shape-malformed"),
        ([[1, 2], {"x": 1}], "shape-malformed"),
        ([10**400] * 6, "shape-malformed"),
        ("x", "shape-malformed"),
        ([[0.5] * 200_002], "shape-too-large"),
        ({"counts": "x", "size": [8, 10]}, "mask-broken"),
        ({"counts": [80, 1], "size": [8, 10]}, "mask-broken"),
        ({"counts": [1, "x"], "size": [8, 10]}, "mask-broken"),
        ({"counts": "o" * 3_000_000, "size": [8, 10]}, "mask-broken"),
        ({"counts": [10**18, 10**18], "size": [10**9, 10**9]}, "mask-broken"),
        ({"counts": [80], "size": [8]}, "mask-broken"),
        ({"counts": [80]}, "mask-broken"),
        ({"counts": None, "size": ["8", None]}, "mask-broken"),
    ],
)
def test_what_cannot_be_meant_leaves_the_object_as_its_box(segmentation: object, code: str) -> None:
    assert extra_of(segmentation=segmentation) == (None, [(code, "repaired")])


def test_keypoints_without_a_box_have_the_one_around_those_that_are_there() -> None:
    found, problems = read({"bbox": None, "keypoints": [1, 2, 2, 9, 9, 0, 4, 7, 1]})
    assert found.images[0][0].boxes[0][1:5] == (1, 2, 4, 7)
    assert problems == [("box-missing", "noted")]
    assert read({"bbox": None, "keypoints": [0, 0, 0]})[1] == [("box-missing", "skipped")]


def test_masks_are_read_in_both_forms() -> None:
    listed, _ = extra_of(segmentation={"counts": [8, 3, 69], "size": [8, 10]})
    assert listed is not None
    mask = listed.outline
    assert isinstance(mask, Mask)
    assert mask.listed
    packed, _ = extra_of(segmentation={"counts": mask.counts.decode(), "size": [8, 10]})
    assert packed == Extra(mask._replace(listed=False))


def test_the_area_of_a_box_is_kept_where_it_is_more_than_another_rounding() -> None:
    assert extra_of(area=12) == extra_of(area=12.004) == extra_of(area="x") == (None, [])
    assert extra_of(area=7) == (Extra(area=7.0), [])


@pytest.mark.parametrize("keypoints", [[1, 2], [1, 2, 3], [1, 2, 0.5, 1, 1, 1], ["a", 1, 1], {"x": 1}, [1, 2, -1]])
def test_keypoints_that_are_not_those_of_the_class_are_left_out(keypoints: object) -> None:
    category = {"id": 1, "name": "person", "keypoints": ["nose", "tail"]}
    found, problems = read({"keypoints": keypoints}, categories=[category])
    assert found.images[0][0].boxes[0].extra is None
    assert problems == [("keypoints-malformed", "repaired")]


def test_keypoints_of_a_class_without_names_are_numbered() -> None:
    found, problems = read({"keypoints": [1, 2, 2, 0, 0, 0]})
    assert found.images[0][0].boxes[0].extra == Extra(keypoints=Keypoints(pack((1, 2, 0, 0)), b"\2\0"))
    assert (found.skeletons, problems) == ({"person": Skeleton(("point_1", "point_2"))}, [])


@pytest.mark.parametrize(
    ("edges", "kept", "problems"),
    [
        ([[1, 2]], ((0, 1),), []),
        ([[0, 1]], ((0, 1),), [("skeleton", "repaired")]),
        ([[1, 2], [2, 3]], ((0, 1),), [("skeleton", "repaired")]),
        ([[1]], (), [("skeleton", "noted")]),
        ("x", (), [("skeleton", "noted")]),
        (None, (), []),
    ],
)
def test_skeletons_count_from_0_here(edges: object, kept: object, problems: object) -> None:
    category = {"id": 1, "name": "person", "keypoints": ["nose", "tail"], "skeleton": edges}
    found, said = read(categories=[category])
    assert (found.skeletons["person"].edges, said) == (kept, problems)


def test_captions_are_written_beside_and_read_again() -> None:
    annotation = Annotation("a.jpg", 10, 8, captions=("A dog.", "Ein Hund, schläft"))
    found = coco.parse(coco.write_captions([annotation]), "captions.json")
    assert [(draft.name, draft.width, draft.height, draft.captions) for draft, _ in found.images] == [
        ("a.jpg", 10, 8, annotation.captions)
    ]
    assert not found.images[0][1]
