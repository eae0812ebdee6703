"""COCO: reading files as they are, and writing them."""

from __future__ import annotations

import json
import math
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datacache.annotations.check import check
from datacache.annotations.formats import coco
from datacache.annotations.image_header import ImageHeader
from datacache.annotations.model import PROBLEMS, Annotation, Box
from datacache.annotations.shapes.outline import Extra
from datacache.core.errors import AnnotationError
from tests.annotations.shapes import cases

IMAGES = [{"id": 1, "file_name": "a.jpg", "width": 640, "height": 480}, {"id": 2, "file_name": "b.jpg"}]
CATEGORIES = [{"id": 1, "name": "mask"}, {"id": 5, "name": "no_mask"}]


def parse(**content):
    return parse_any({"images": IMAGES, "categories": CATEGORIES, "annotations": [], **content})


def parse_any(content):
    found = coco.parse(json.dumps(content).encode(), "instances.json")
    problems = [*found.problems, *(problem for _, problems in found.images for problem in problems)]
    assert all(problem.file == "instances.json" and problem.code in PROBLEMS for problem in problems)
    return found, [(problem.code, problem.action) for problem in problems]


def of_first(found):
    return [(box.label, *box[1:5]) for box in found.images[0][0].boxes]


def one(**annotation):
    """Return what becomes of one annotation that is right but for what is given."""
    entry = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 20, 30, 40], **annotation}
    found, problems = parse(annotations=[{key: value for key, value in entry.items() if value != "missing"}])
    assert len(found.images) == 2
    return of_first(found), problems


def test_boxes_have_a_corner_and_a_size():
    found, problems = parse(
        annotations=[
            {"id": 7, "image_id": 1, "category_id": 5, "bbox": [1.5, 2, 3, 4.25]},
            {"id": 8, "image_id": 1, "category_id": 1, "bbox": [0, 0, 640, 480]},
        ]
    )
    assert of_first(found) == [("no_mask", 1.5, 2, 4.5, 6.25), ("mask", 0, 0, 640, 480)]
    assert problems == []
    assert found.classes == ("mask", "no_mask")


def test_every_image_is_there_also_without_objects_and_without_size():
    found, problems = parse()
    assert [(draft.name, draft.width, draft.height, draft.boxes) for draft, _ in found.images] == [
        ("a.jpg", 640, 480, ()),
        ("b.jpg", 0, 0, ()),
    ]
    assert problems == []


def test_flags_and_attributes_are_kept():
    attributes = {"occluded": True, "truncated": 1, "difficult": "true", "color": "red", "n": 2, "x": 0.5, "gone": None}
    found, problems = parse(
        annotations=[
            {"image_id": 1, "category_id": 1, "bbox": [1, 1, 2, 2], "attributes": attributes, "score": 0.75},
            {
                "image_id": 1,
                "category_id": 1,
                "bbox": [1, 1, 2, 2],
                "attributes": {"occluded": False, "truncated": "half"},
            },
            {"image_id": 1, "category_id": 1, "bbox": [1, 1, 2, 2], "attributes": [1]},
        ]
    )
    first, second, third = found.images[0][0].boxes
    assert (first.difficult, first.truncated, first.occluded) == (True, True, True)
    assert first.attributes == (("color", "red"), ("n", "2"), ("x", "0.5"))
    assert first.extra == Extra(score=0.75)
    assert (second.occluded, second.truncated, second.attributes) == (False, False, (("truncated", "half"),))
    assert third.attributes == ()
    assert problems == []


def test_a_crowd_is_kept_and_noted():
    found, problems = parse(annotations=[{"image_id": 1, "category_id": 1, "bbox": [1, 1, 2, 2], "iscrowd": 1}])
    assert found.images[0][0].boxes[0].attributes == (("iscrowd", "1"),)
    assert problems == [("crowd", "noted")]


def test_without_a_box_polygons_give_one():
    assert one(bbox="missing", segmentation=[[10, 10, 20, 10, 20, 30], [5, 15, 8, 15, 8, 18]]) == (
        [("mask", 5, 10, 20, 30)],
        [("box-missing", "noted")],
    )
    assert one(bbox=[], segmentation=[10, 10, 20, 10, 20, 30])[0] == [("mask", 10, 10, 20, 30)]
    assert one(bbox=None, segmentation=[[1, 2, 3, 4]])[0] == [("mask", 1, 2, 3, 4)]


@pytest.mark.parametrize(
    "segmentation", [[], [[]], {"counts": "x", "size": [1, 1]}, [[1, 2, 3]], [["a", 1]], "x", [{}], None]
)
@pytest.mark.parametrize("bbox", ["missing", None, [], [1, 2, 3], {"x": 1}, "1,2,3,4"])
def test_an_object_without_a_box_is_reported(bbox, segmentation):
    assert one(bbox=bbox, segmentation=segmentation) == ([], [("box-missing", "skipped")])


@pytest.mark.parametrize("bad", [None, "x", "", [1], {}, True, "1_0"])
def test_a_coordinate_that_is_no_number_is_reported(bad):
    assert one(bbox=[1, bad, 3, 4]) == ([], [("box-text", "skipped")])


def test_messages_about_objects_name_the_annotation_and_its_image_and_show_the_value():
    found, _ = parse(
        annotations=[
            {"id": 17, "image_id": 1, "category_id": 1, "bbox": [0, 0, 5, 5]},
            {"id": 18, "image_id": 1, "category_id": 1, "bbox": [10, 20]},
            {"id": 19, "image_id": 1, "category_id": 1, "bbox": [1, [2], 3, 4]},
            {"id": 20, "image_id": 1, "category_id": 9, "bbox": [700, 1, 3, 4]},
            {"id": 21, "image_id": 77},
        ]
    )
    draft, problems = found.images[0]
    _, more = check(draft, ImageHeader("jpeg", 640, 480), "a.jpg")
    said = {(problem.line, problem.message.split(";")[0]) for problem in (*problems, *found.problems)}
    assert said == {
        (2, "annotations[1], id 18, of 'a.jpg' has the bbox [10, 20], and nothing to take it from"),
        (3, "annotations[2], id 19, of 'a.jpg' has [2] in its bbox, which is not a number"),
        (4, "annotations[3], id 20, of 'a.jpg' is of category 9, which is not in the file"),
        (5, "annotations[4], id 21 has the image_id '77', which is no image's"),
    }
    assert [(problem.code, problem.line) for problem in more] == [("box-outside", 4)]
    assert [box.line for box in draft.boxes] == [1, 4]


def test_numbers_written_as_texts_are_read_and_reported():
    assert one(bbox=["1", 2, "3.5", 4]) == ([("mask", 1, 2, 4.5, 6)], [("box-text", "repaired")])


def test_what_is_not_finite_or_no_area_is_left_to_the_check():
    for bbox, code in (
        ([math.nan, 1, 2, 3], "box-not-finite"),
        ([1, 1, math.inf, 3], "box-not-finite"),
        ([10**400, 1, 2, 3], "box-not-finite"),
        ([10, 10, -5, 3], "box-reversed"),
        ([10, 10, 0, 3], "box-empty"),
        ([700, 10, 5, 3], "box-outside"),
        ([-5, 10, 10, 3], "box-clipped"),
    ):
        found, problems = parse(annotations=[{"image_id": 1, "category_id": 1, "bbox": bbox}])
        assert problems == []
        _, problems = check(found.images[0][0], ImageHeader("jpeg", 640, 480), "a.jpg")
        assert [problem.code for problem in problems] == [code]


@pytest.mark.parametrize("id", ["missing", None, [], {}, True, "", 3, "x", 1.5])
def test_an_object_of_no_image_is_reported(id):
    assert one(image_id=id) == ([], [("image-unknown", "skipped")])


def test_ids_may_be_texts_on_one_side():
    assert one(image_id="1", category_id=1.0) == ([("mask", 10, 20, 40, 60)], [])


@pytest.mark.parametrize("id", ["missing", None, [], {}, True, ""])
def test_an_object_without_a_class_is_reported(id):
    assert one(category_id=id) == ([], [("label-empty", "skipped")])


def test_a_class_that_is_not_in_the_file_or_has_no_name_is_kept_by_number():
    assert one(category_id=9) == ([("class_9", 10, 20, 40, 60)], [("class-unlisted", "noted")])
    for name in (None, "", " ", [], {}, True):
        found, problems = parse(
            categories=[{"id": 4, "name": name}],
            annotations=[{"image_id": 1, "category_id": 4, "bbox": [1, 1, 1, 1]}],
        )
        assert of_first(found) == [("class_4", 1, 1, 2, 2)]
        assert problems == [("class-unlisted", "noted")]
        assert found.classes == ("class_4",)


def test_classes_are_in_the_order_of_their_ids_not_of_their_list():
    ids = {10: "a", 9: "b", "x": "c", "1": "d"}
    found, _ = parse(categories=[{"id": id, "name": name} for id, name in ids.items()])
    assert found.classes == ("d", "b", "a", "c")


def test_names_of_classes_are_cleaned_once():
    found, problems = parse(categories=[{"id": 1, "name": " mask "}, {"id": 2, "name": "a\nb"}, {"id": 3, "name": 12}])
    assert found.classes == ("mask", "a b", "12")
    assert problems == [("label-spaces", "repaired"), ("label-characters", "repaired")]


def test_classes_that_are_there_twice_are_noted():
    found, problems = parse(
        categories=[{"id": 1, "name": "a"}, {"id": 1, "name": "b"}, {"id": 2, "name": "a"}, {"name": "c"}],
        annotations=[{"image_id": 1, "category_id": n, "bbox": [1, 1, 1, 1]} for n in (1, 2)],
    )
    assert [label for label, *_ in of_first(found)] == ["a", "a"]
    assert found.classes == ("a",)
    assert problems == [("class-repeated", "noted"), ("class-repeated", "noted"), ("class-id", "noted")]


def test_an_image_named_twice_is_one_image_with_the_objects_of_both():
    found, problems = parse(
        images=[{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "a.jpg"}, {"id": 1, "file_name": "a.jpg"}],
        annotations=[{"image_id": n, "category_id": 1, "bbox": [n, 1, 1, 1]} for n in (1, 2)],
    )
    assert len(found.images) == 1
    assert [x1 for _, x1, *_ in of_first(found)] == [1, 2]
    assert problems == [("image-repeated", "noted"), ("image-repeated", "noted")]


def test_an_id_of_two_images_is_the_first_ones():
    found, problems = parse(
        images=[{"id": 1, "file_name": "a.jpg"}, {"id": 1, "file_name": "b.jpg"}],
        annotations=[{"image_id": 1, "category_id": 1, "bbox": [1, 1, 1, 1]}],
    )
    assert [(draft.name, len(draft.boxes)) for draft, _ in found.images] == [("a.jpg", 1)]
    assert problems == [("image-unnamed", "skipped")]


def test_an_image_without_name_or_id_is_reported_and_so_are_its_objects():
    for name in ("missing", None, "", 5, []):
        image = {"id": 1} if name == "missing" else {"id": 1, "file_name": name}
        found, problems = parse(images=[image], annotations=[{"image_id": 1, "category_id": 1, "bbox": [1, 1, 1, 1]}])
        assert found.images == []
        assert problems == [("image-unnamed", "skipped"), ("image-unknown", "skipped")]
    for id in (None, [], True, math.nan):
        assert parse(images=[{"id": id, "file_name": "a.jpg"}])[1] == [("image-unnamed", "skipped")]


def test_sizes_that_are_no_sizes_are_reported_and_not_taken():
    for bad in ("wide", -5, 1.5, [], True, math.nan, math.inf, 10**400):
        found, problems = parse(images=[{"id": 1, "file_name": "a.jpg", "width": bad, "height": 480}])
        assert (found.images[0][0].width, found.images[0][0].height) == (0, 480)
        assert problems == [("size-text", "noted")]
    for fine, width in (("640", 640), (640.0, 640), (0, 0), (None, 0)):
        found, problems = parse(images=[{"id": 1, "file_name": "a.jpg", "width": fine, "height": 480}])
        assert (found.images[0][0].width, problems) == (width, [])


def test_entries_of_the_wrong_kind_are_reported():
    for kind in ("images", "annotations", "categories"):
        assert parse(**{kind: [None, 5, "x", []]})[1] == [("entry-malformed", "skipped")] * 4
    assert parse(annotations=None, categories=None)[1] == [("list-missing", "noted")] * 2
    assert parse(annotations={}, categories="x")[1] == [("list-missing", "skipped")] * 2


@pytest.mark.parametrize(
    "content", [None, 5, "x", [], {}, {"images": None}, {"images": {}}, {"shapes": [], "version": "5"}]
)
def test_what_is_no_coco_file_is_an_error_that_says_so(content):
    with pytest.raises(AnnotationError) as caught:
        parse_any(content)
    assert (caught.value.code, caught.value.file) == ("not-coco", "instances.json")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", 1),
        (b'{"images": [\n{"id": 1,\n}]}', 3),
        (b'{"images": [', 1),
        (b"[" * 100_000, 1),
        (b"1" * 5000, 0),
        (b"\xff\xff\xff", 0),
        (b"<xml/>", 1),
    ],
)
def test_broken_json_is_an_error_that_names_the_line(data, line):
    with pytest.raises(AnnotationError) as caught:
        coco.parse(data, "instances.json")
    assert (caught.value.code, caught.value.line) == ("json-broken", line)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gb18030"])
def test_files_are_read_in_the_encodings_of_common_tools(encoding):
    text = json.dumps({"images": [{"id": 1, "file_name": "口罩.jpg"}]}, ensure_ascii=False)
    assert coco.parse(memoryview(text.encode(encoding)), "f").images[0][0].name == "口罩.jpg"


def test_a_file_is_written_with_ids_from_1_in_order():
    boxes = (
        Box("b", 1, 2, 4, 6),
        Box("a", 0.5, 0, 640, 480, True, False, True, (("color", "red"),)),
        Box("other", 1, 1, 2, 2),
    )
    annotations = [Annotation("a.jpg", 640, 480, boxes), Annotation("b ü\udcff.jpg", 10, 20)]
    data = b"".join(coco.write(iter(annotations), ("b", "a")))
    assert json.loads(data) == {
        "info": {},
        "licenses": [],
        "categories": [{"id": 1, "name": "b", "supercategory": ""}, {"id": 2, "name": "a", "supercategory": ""}],
        "annotations": [
            {
                "id": 1,
                "image_id": 1,
                "category_id": 1,
                "bbox": [1, 2, 3, 4],
                "area": 12,
                "segmentation": [],
                "iscrowd": 0,
            },
            {
                "id": 2,
                "image_id": 1,
                "category_id": 2,
                "bbox": [0.5, 0, 639.5, 480],
                "area": 306960,
                "segmentation": [],
                "iscrowd": 0,
                "attributes": {"color": "red", "difficult": True, "occluded": True},
            },
        ],
        "images": [
            {"id": 1, "file_name": "a.jpg", "width": 640, "height": 480},
            {"id": 2, "file_name": "b ü\udcff.jpg", "width": 10, "height": 20},
        ],
    }
    assert data == b"".join(coco.write(annotations, ("b", "a")))


def test_a_large_file_is_written_in_pieces():
    boxes = tuple(Box("a", n, 1, n + 2, 2) for n in range(100))
    pieces = list(coco.write((Annotation(f"{n}.jpg", 200, 20, boxes) for n in range(300)), ("a",)))
    assert max(map(len, pieces)) < 200_000
    found = coco.parse(b"".join(pieces), "f")
    assert len(found.images) == 300
    assert sum(len(draft.boxes) for draft, _ in found.images) == 30_000


def test_an_empty_file_is_a_file():
    assert coco.parse(b"".join(coco.write([], [])), "f")[:3] == ([], [], ())


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
attributes = st.dictionaries(
    texts.filter(lambda name: name not in ("difficult", "truncated", "occluded", "iscrowd")), texts, max_size=3
).map(lambda found: tuple(sorted(found.items())))


@st.composite
def annotated(draw, coordinates):
    width, height = draw(st.integers(2, 5000)), draw(st.integers(2, 5000))
    found = []
    for label in draw(st.lists(st.sampled_from(["a", "b"]), max_size=4)):
        x1, x2 = sorted(draw(st.tuples(*[coordinates(width)] * 2)))
        y1, y2 = sorted(draw(st.tuples(*[coordinates(height)] * 2)))
        if x1 < x2 and y1 < y2:
            flags = draw(st.tuples(*[st.booleans()] * 3))
            more = draw(attributes) + draw(st.sampled_from([(), (("iscrowd", "1"),)]))
            found.append(Box(label, x1, y1, x2, y2, *flags, tuple(sorted(more))))
    return Annotation(draw(texts.filter(str.strip)), width, height, tuple(found))


def sixteenths(side):
    return st.integers(0, side * 16).map(lambda n: n / 16)


def decimals(side):
    return st.integers(0, side * 100).map(lambda n: n / 100)


def written_and_read(annotations):
    found = coco.parse(b"".join(coco.write(annotations, ("a", "b"))), "f")
    assert found.problems == []
    assert [draft.name for draft, _ in found.images] == [annotation.path for annotation in annotations]
    assert all(problem.code == "crowd" for _, problems in found.images for problem in problems)
    return [draft for draft, _ in found.images]


@cases
@given(st.lists(annotated(sixteenths), max_size=3, unique_by=lambda annotation: annotation.path))
def test_what_is_written_is_read_again_exactly(annotations):
    for draft, annotation in zip(written_and_read(annotations), annotations, strict=True):
        boxes = tuple(box._replace(line=0) for box in draft.boxes)
        assert (draft.width, draft.height, boxes) == (annotation.width, annotation.height, annotation.boxes)


@cases
@given(st.lists(annotated(decimals), max_size=3, unique_by=lambda annotation: annotation.path))
def test_a_box_is_read_again_to_the_last_digits_of_a_float(annotations):
    for draft, annotation in zip(written_and_read(annotations), annotations, strict=True):
        for read, box in zip(draft.boxes, annotation.boxes, strict=True):
            assert (read.x1, read.y1) == (box.x1, box.y1)
            assert read[3:5] == pytest.approx(box[3:5], rel=1e-15, abs=0)


values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.sampled_from(["", "1", "a.jpg", "x", "\ud800"])
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)
ids = st.one_of(st.integers(1, 3), values)
boxes_of_any_kind = st.one_of(st.lists(st.floats(-10, 700), min_size=4, max_size=4), values)


def entries(**members):
    return st.one_of(
        st.lists(st.one_of(st.fixed_dictionaries({}, optional=members), values), max_size=4),
        st.lists(st.fixed_dictionaries(members), max_size=4),
        values,
    )


contents = st.fixed_dictionaries(
    {
        "images": entries(
            id=ids, file_name=st.sampled_from(["a.jpg", "b.jpg", "", "\ud800"]), width=values, height=values
        )
    },
    optional={
        "categories": entries(id=ids, name=st.one_of(st.sampled_from(["a", "b"]), values)),
        "annotations": entries(
            image_id=ids,
            category_id=ids,
            bbox=boxes_of_any_kind,
            segmentation=st.one_of(st.lists(st.lists(st.floats(0, 9), max_size=6), max_size=2), values),
            iscrowd=values,
            attributes=st.one_of(values, st.dictionaries(st.sampled_from(["occluded", "x"]), values, max_size=2)),
            score=values,
        ),
    },
)


@given(contents)
@settings(max_examples=250, deadline=None)
def test_no_content_raises_and_no_object_is_lost_without_a_problem(content):
    data = json.dumps(content).encode()
    if not isinstance(content["images"], list):
        with pytest.raises(AnnotationError, match="no list of `images`"):
            coco.parse(data, "f")
        return
    found = coco.parse(data, "f")
    problems = [*found.problems, *(problem for _, problems in found.images for problem in problems)]
    assert all(problem.code in PROBLEMS for problem in problems)
    objects = content.get("annotations")
    lost = [p for p in problems if p.action == "skipped" and p.message.startswith("annotations[")]
    kept = sum(len(draft.boxes) for draft, _ in found.images)
    assert kept + len(lost) == (len(objects) if isinstance(objects, list) else 0)
    for draft, _ in found.images:
        for box in draft.boxes:
            repr(box.attributes).encode()
            "".join(map("".join, box.attributes)).encode()  # fit for any file
        annotation, more = check(draft, ImageHeader("jpeg", 640, 480), "a.jpg")
        assert annotation is not None
        assert len(annotation.boxes) + sum(problem.action == "skipped" for problem in more) == len(draft.boxes)


VALID = b"".join(coco.write([Annotation("a.jpg", 9, 9, (Box("a", 1, 1, 2, 2), Box("b", 0, 0, 9, 9)))], ("a", "b")))


def test_boxes_that_are_put_aside_come_back_in_their_order(monkeypatch):
    expected = coco.parse(VALID, "f").images
    monkeypatch.setattr(coco, "_MOST_HELD", 0)
    found = coco.parse(VALID, "f").images
    assert list(found) == expected
    assert [len(draft.boxes) for draft, _ in found] == [2]


def test_boxes_of_many_images_in_any_order_come_back_to_their_images(monkeypatch):
    images = [{"id": n, "file_name": f"{n}.jpg", "width": 9 + n, "height": 9} for n in range(1, 12)]
    boxes = [{"image_id": n * 7 % 11 or 3, "category_id": 1, "bbox": [n, 0, 1, 1]} for n in range(90)]
    data = json.dumps({"categories": [{"id": 1, "name": "a"}], "images": images, "annotations": boxes}).encode()
    expected = coco.parse(data, "f").images
    monkeypatch.setattr(coco, "_BLOCKS", 4)
    monkeypatch.setattr(coco, "_MOST_HELD", 10 * coco._BOX_BYTES)
    found = coco.parse(data, "f").images
    assert list(found) == expected
    assert found[7] == expected[7]
    assert [len(draft.boxes) for draft, _ in found][-2:] == [8, 0]


def test_what_follows_an_element_that_is_nested_too_deep_is_read():
    deep = b"[" * 10_000 + b"]" * 10_000
    found = coco.parse(VALID.replace(b'"annotations":[', b'"annotations":[' + deep + b","), "f")
    (problem,) = found.problems
    assert (problem.code, problem.line) == ("entry-malformed", 1)
    assert problem.message.startswith("annotations[0] (at byte ")
    assert [len(draft.boxes) for draft, _ in found.images] == [2]


@given(st.integers(0, len(VALID)), st.integers(0, 30), st.binary(max_size=8))
@settings(max_examples=250, deadline=None)
def test_no_damaged_file_raises_anything_else(at, length, bytes_there):
    data = VALID[:at] + bytes_there + VALID[at + length :]
    with suppress(AnnotationError):
        coco.parse(data, "f")
