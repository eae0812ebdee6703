"""Label Studio: what its files mean, what is mended and refused, and that what was written is read back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import datacache
from datacache.annotations.formats import geometry, label_studio
from datacache.annotations.model import Annotation, Box, Draft
from datacache.annotations.shapes import mask as masks
from datacache.annotations.shapes.clip import box_around
from datacache.annotations.shapes.outline import (
    NOTHING,
    Extra,
    Keypoints,
    Mask,
    Polygon,
    Rotated,
    Skeleton,
    area,
    pack,
    unpack,
)
from datacache.core.errors import AnnotationError
from datacache.settings import Settings
from tests.annotations.shapes import bitmaps, cases, hundredths, points_within

FILE = "tasks.json"
WIDTH, HEIGHT = 200, 50


def region(type: str, label: str | None = "cat", id: str = "r1", **value: Any) -> dict[str, Any]:
    """Return a region as Label Studio writes it."""
    more = {key: value.pop(key) for key in ("score", "parentID", "meta", "from_name") if key in value}
    labels = {} if label is None else {type: [label]}
    size = {"original_width": WIDTH, "original_height": HEIGHT, "image_rotation": 0}
    return {"id": id, "type": type, "from_name": "label", "to_name": "image"} | size | {"value": value | labels} | more


def box(label: str = "cat", id: str = "r1", **more: Any) -> dict[str, Any]:
    return region("rectanglelabels", label, id, **{"x": 10, "y": 20, "width": 25, "height": 40, "rotation": 0} | more)


def task(*results: Any, image: Any = "a.jpg", **more: Any) -> dict[str, Any]:
    return {"id": 1, "data": {"image": image}, "annotations": [{"id": 1, "result": list(results)}]} | more


def parsed(*tasks: Any) -> tuple[list[Draft], list[str]]:
    found = label_studio.parse(json.dumps(tasks).encode(), FILE)
    images = list(found.images)
    problems = [problem for _, its in images for problem in its]
    return [draft for draft, _ in images], [f"{p.code} {p.action} {p.line}" for p in (*found.problems, *problems)]


def one(*results: Any) -> Box:
    (draft,), problems = parsed(task(*results))
    assert problems == []
    (found,) = draft.boxes
    return found


def test_a_task_as_label_studio_writes_it() -> None:
    size = {"original_width": WIDTH, "original_height": HEIGHT}
    results = (
        box(score=0.5),
        {"id": "r1", "type": "choices", "from_name": "colour", "value": {"x": 10, "choices": ["red", "dark"]}},
        region("polygonlabels", "dog", "r2", points=[[0, 0], [50, 0], [50, 100]], closed=True),
        {"id": "r3", "type": "rectangle", "from_name": "box", "value": {"x": 0, "y": 0, "width": 1, "height": 2}}
        | size,
        {"id": "r3", "type": "labels", "from_name": "label", "value": {"x": 0, "labels": ["cow", "calf"]}},
        {"id": "c", "type": "choices", "from_name": "weather", "value": {"choices": ["rain"]}},
        {"id": "t", "type": "textarea", "from_name": "caption", "value": {"text": ["A cat.", "A dog."]}},
        {"type": "relation", "from_id": "r1", "to_id": "r2"},
    )
    by = {"completed_by": {"email": "ann@example.org"}}
    (draft,), problems = parsed(task(annotations=[{"id": 1, "result": list(results)} | by]))
    ann = Extra(author="ann@example.org")
    outline = Polygon(pack([0, 0, 100, 0, 100, 50]))
    assert problems == []
    assert (draft.name, draft.width, draft.height) == ("a.jpg", WIDTH, HEIGHT)
    assert (draft.labels, draft.captions) == (("rain",), ("A cat.", "A dog."))
    assert draft.boxes == (
        Box("cat", 20, 10, 70, 30, attributes=(("colour", "red, dark"),), line=1, extra=ann._replace(score=0.5)),
        Box("dog", 0, 0, 100, 50, line=1, extra=ann._replace(outline=outline)),
        Box("cow", 0, 0, 2, 1, line=1, extra=ann),
        Box("calf", 0, 0, 2, 1, line=1, extra=ann),
    )


def test_a_turn_is_about_the_upper_left_corner_and_in_pixels() -> None:
    found = one(box(x=50, y=40, width=10, height=40, rotation=90))
    assert found.extra is not None
    assert isinstance(found.extra.outline, Rotated)
    assert unpack(found.extra.outline.corners).tolist() == pytest.approx([100, 20, 100, 40, 80, 40, 80, 20])
    assert found[1:5] == pytest.approx((80, 20, 100, 40))


def test_keypoints_alone_and_of_another_region() -> None:
    alone = one(region("keypointlabels", "eye", x=50, y=50, width=1))
    assert alone.extra == Extra(keypoints=Keypoints(pack([100, 25]), b"\2"))
    found = label_studio.parse(
        json.dumps(
            [
                task(box(), region("keypointlabels", "eye", "k1", x=50, y=50, width=1, parentID="r1")),
                task(
                    region("keypointlabels", "nose", "k1", x=0, y=50, width=1, parentID="r1"),
                    region("keypointlabels", "eye", "k2", x=0, y=0, width=1, parentID="r1", meta={"visible": 1}),
                    box(),
                ),
            ]
        ).encode(),
        FILE,
    )
    assert found.skeletons == {"cat": Skeleton(("eye", "nose"))}
    keypoints = [draft.boxes[0].extra and draft.boxes[0].extra.keypoints for draft, _ in found.images]
    assert keypoints == [
        Keypoints(pack([100, 25, 0, 0]), b"\2\0"),
        Keypoints(pack([0, 0, 0, 25]), b"\1\2"),
    ]


def test_an_ellipse_is_a_polygon() -> None:
    (draft,), problems = parsed(task(region("ellipselabels", x=50, y=50, radiusX=10, radiusY=20, rotation=0)))
    assert problems == ["shape-approximated noted 1"]
    assert draft.boxes[0].extra is not None
    assert isinstance(draft.boxes[0].extra.outline, Polygon)
    assert area(draft.boxes[0].extra.outline) == pytest.approx(math.pi * 20 * 10, rel=0.01)


BITS = "".join(
    (
        f"{4 * 3 * 2:032b}{7:05b}{2:04b}{3:04b}{7:04b}{15:04b}",
        f"1{1:02b}{11:04b}{0:08b}",  # three empty pixels
        f"0{0:02b}{3:03b}{0:08b}{0:08b}{0:08b}{129:08b}",  # one of different values
        f"1{0:02b}{7:03b}{255:08b}",  # two full ones
    )
)
BRUSH = list(int(BITS + "0" * (-len(BITS) % 8), 2).to_bytes(-(-len(BITS) // 8)))


def test_a_brush_is_read_bit_by_bit() -> None:
    small = region("brushlabels", format="rle", rle=BRUSH) | {"original_width": 3, "original_height": 2}
    found = one(small)
    assert found.extra is not None
    assert isinstance(found.extra.outline, Mask)
    assert masks.decode(found.extra.outline, (0, 0, 3, 2)).tolist() == [[False] * 3, [True] * 3]
    assert found[1:5] == (0, 1, 3, 2)


@pytest.mark.parametrize(
    ("by", "author"), [(7, "7"), ({"id": 7, "email": None}, "7"), ("ann", "ann"), (None, ""), (True, "")]
)
def test_an_author_may_be_an_id(by: Any, author: str) -> None:
    (draft,), problems = parsed(task(annotations=[{"result": [box()], "completed_by": by}]))
    assert ((draft.boxes[0].extra or NOTHING).author, problems) == (author, [])


def test_brushes_of_a_file_are_decoded_up_to_a_number_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "_MASK_PIXELS", 3006)
    monkeypatch.setattr(geometry, "_MASK_PIXELS_A_BYTE", 0)
    small = region("brushlabels", format="rle", rle=BRUSH) | {"original_width": 3, "original_height": 2}
    bomb = [*int(f"{4 * 3000:032b}{7:05b}{0:012b}{15:04b}{0:03b}", 2).to_bytes(7)]
    large = region("brushlabels", format="rle", rle=bomb) | {"original_width": 3000, "original_height": 1}
    found, problems = parsed(task(large), task(small), task(large))
    assert [len(draft.boxes) for draft in found] == [0, 1, 0]
    assert problems == ["mask-broken skipped 1", "shape-too-large skipped 3"]


@pytest.mark.parametrize(
    ("rle", "problem"),
    [
        (BRUSH[:9], "mask-broken"),
        (BRUSH[:2], "mask-broken"),
        ([0, 0, 0, 200, *BRUSH[4:]], "mask-size"),
        ([300], "mask-broken"),
        ("text", "mask-broken"),
        (2 * 10**9, "mask-broken"),
        ([0] * (label_studio.MAX_BRUSH + 1), "shape-too-large"),
        (BRUSH[:7] + [0xFF] * 20, "mask-broken"),
    ],
)
def test_a_brush_that_is_none_is_left_out(rle: Any, problem: str) -> None:
    small = region("brushlabels", format="rle", rle=rle) | {"original_width": 3, "original_height": 2}
    (draft,), problems = parsed(task(small, region("rectanglelabels", "dog", "r2", x=0, y=0, width=9, height=9)))
    assert [found.label for found in draft.boxes] == ["dog"]
    assert problems == [f"{problem} skipped 1"]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (box(x="text"), "box-text"),
        (box(width=None), "box-text"),
        (region("polygonlabels", points=[]), "box-missing"),
        (region("polygonlabels", points=[[1, 2], [3]]), "box-text"),
        (region("polygonlabels", points=[[1, 2]] * 100_001), "shape-too-large"),
        (box() | {"original_width": None}, "size-text"),
        (box() | {"original_height": 0}, "size-text"),
    ],
)
def test_a_region_that_cannot_be_used_is_left_out(wrong: Any, problem: str) -> None:
    child = region("keypointlabels", "eye", "k", x=1, y=1, width=1, parentID="r1")
    (draft,), problems = parsed(task(wrong, box("dog", "r2"), child))
    assert [found.label for found in draft.boxes] == ["dog"]
    assert problems == [f"{problem} skipped 1", "entry-malformed skipped 1"]


def test_a_score_that_is_infinite_is_an_attribute() -> None:
    (draft,), problems = parsed(task(box(score=math.inf)))
    assert [(each.extra, each.attributes) for each in draft.boxes] == [(None, (("score", "inf"),))]
    assert problems == []


def test_the_newest_annotation_counts_and_a_prediction_where_there_is_none() -> None:
    old, new = (
        {"result": [box(label)], "updated_at": f"2024-0{n}-01T00:00:00Z"} for n, label in enumerate(("old", "new"), 1)
    )
    (draft,), problems = parsed(task(annotations=[new, old, {"result": [], "was_cancelled": True}]))
    assert ([found.label for found in draft.boxes], problems) == (["new"], ["several-annotators noted 1"])
    guesses = [{"result": [box("low")], "score": 0.2}, {"result": [box("high")], "score": 0.8}, {"result": [box("no")]}]
    (draft,), problems = parsed(task(annotations=[], predictions=guesses))
    assert ([(each.label, each.extra) for each in draft.boxes], problems) == ([("high", Extra(score=0.8))], [])
    assert parsed(task(annotations=[], predictions=guesses[2:]), task(annotations=[])) == ([], [])


def test_images_are_named_by_paths_and_urls() -> None:
    names = {
        "a.jpg": "a.jpg",
        "/data/upload/3/0a1b2c3d-photo%201.png": "photo 1.png",
        "/data/local-files/?d=images/train/a%20b.jpg": "images/train/a b.jpg",
        "s3://bucket/folder/b.jpg": "/folder/b.jpg",
        "https://example.org/x/c.jpeg?token=1": "/x/c.jpeg",
    }
    drafts, problems = parsed(*(task(image=name) for name in names))
    assert ([draft.name for draft in drafts], problems) == (list(names.values()), [])
    drafts, problems = parsed(task(image="http://[x/a.jpg"), task(image=7), {"id": 1}, "text")
    assert drafts == []
    assert problems == [
        "image-unnamed skipped 1", "image-unnamed skipped 2", "entry-malformed skipped 3", "entry-malformed skipped 4"
    ]  # fmt: skip


def test_a_task_that_is_nested_too_deep_is_left_out_and_nothing_else() -> None:
    deep = b'{"data": {"image": "a.jpg"}, "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    tasks = [json.dumps(task(box(), image=f"{name}.jpg")).encode() for name in "bc"]
    found = label_studio.parse(b"[" + b", ".join([tasks[0], deep, tasks[1]]) + b"]", FILE)
    assert [draft.name for draft, _ in found.images] == ["b.jpg", "c.jpg"]
    assert [problem[:4] for problem in found.problems] == [("entry-malformed", "skipped", FILE, 2)]


def test_a_file_that_is_no_list_is_refused() -> None:
    with pytest.raises(AnnotationError, match="no list of tasks") as caught:
        label_studio.parse(b"{}", FILE)
    assert caught.value.code == "not-label-studio"


@st.composite
def any_object(draw: st.DrawFn) -> Box:
    """An object that Label Studio can hold."""
    kind = draw(st.sampled_from(["box", "polygon", "mask", "turned"]))
    outline: Any = None
    x1, y1 = draw(hundredths(WIDTH - 2)), draw(hundredths(HEIGHT - 2))
    edges = (x1, y1, round(x1 + draw(hundredths(1)) + 0.5, 2), round(y1 + draw(hundredths(1)) + 0.5, 2))
    if kind == "polygon":
        outline = Polygon(draw(points_within(WIDTH, HEIGHT)))
    elif kind == "mask":
        pixels = draw(bitmaps().filter(lambda found: found.any()))
        outline = masks.encode(pixels, draw(st.integers(0, 90)), draw(st.integers(0, 40)), WIDTH, HEIGHT)
    if outline is not None:
        edges = box_around(outline)
    visible = draw(st.sampled_from([b"", b"\2\1\2", b"\0\2\1", b"\0\0\0"]))
    keypoints = Keypoints(draw(points_within(WIDTH, HEIGHT, 3, 3)), visible) if visible else None
    if keypoints is not None:
        values = unpack(keypoints.points)
        there = (v if visible[n // 2] else 0.0 for n, v in enumerate(values))
        keypoints = keypoints._replace(points=pack(there))
    extra = Extra(
        outline, keypoints, score=draw(st.none() | st.floats(0, 1)), author=draw(st.sampled_from(["", "ann"]))
    )
    attributes = draw(st.sampled_from([(), (("colour", "red"), ("size", "3"))]))
    flags = [draw(st.booleans()) for _ in range(3)]
    label = "person" if keypoints else "cat"
    return Box(label, *edges, *flags, attributes, 1, None if extra == Extra() else extra)


@cases
@given(st.lists(any_object(), max_size=4), st.lists(st.sampled_from("abc"), unique=True))
def test_what_was_written_is_read_back(objects: list[Box], labels: list[str]) -> None:
    skeletons = {"person": Skeleton(("nose", "eye", "ear"))}
    annotation = Annotation("images/é a.jpg", WIDTH, HEIGHT, tuple(objects), tuple(labels), captions=tuple(labels))
    data = b"".join(label_studio.write([(annotation, True)], skeletons))
    found = label_studio.parse(data, FILE)
    ((draft, problems),) = found.images
    assert (problems, found.problems) == ([], [])
    assert found.skeletons == (skeletons if any(box.label == "person" for box in objects) else {})
    assert (draft.name, draft.labels, draft.captions) == (annotation.path, annotation.labels, annotation.captions)
    assert draft.boxes == annotation.boxes
    again = annotation._replace(boxes=draft.boxes)
    assert b"".join(label_studio.write([(again, True)], skeletons)) == data


@cases
@given(hundredths(150), hundredths(40), hundredths(40), hundredths(9), st.integers(1, 3599))
def test_a_turned_box_comes_back(x: float, y: float, across: float, down: float, tenths: int) -> None:
    given = box(x=x / 2, y=y, width=across + 1, height=down + 1, rotation=tenths / 10)
    found = one(given)
    written = b"".join(label_studio.write([(Annotation("a.jpg", WIDTH, HEIGHT, (found,)), True)], {}))
    value = json.loads(written)[0]["annotations"][0]["result"][0]["value"]
    assert {key: value[key] for key in ("x", "y", "width", "height")} == pytest.approx(
        {key: given["value"][key] for key in ("x", "y", "width", "height")}, abs=1e-9
    )
    assert value["rotation"] == pytest.approx(tenths / 10, abs=1e-8)


def test_a_single_keypoint_comes_back_as_one() -> None:
    point = Box("eye", 4.5, 4.5, 5.5, 5.5, line=1, extra=Extra(keypoints=Keypoints(pack([5, 5]), b"\1")))
    data = b"".join(label_studio.write([(Annotation("a.jpg", WIDTH, HEIGHT, (point,)), True)], {}))
    ((draft, _),) = label_studio.parse(data, FILE).images
    assert draft.boxes == (point,)


def test_a_data_set_is_told_read_and_written_with_its_splits(tmp_path: Path, settings: Settings) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "abc":
        Image.fromarray(np.full((HEIGHT, WIDTH, 3), ord(name), np.uint8)).save(folder / f"{name}.png")
    tasks = [
        task(box(), image="/data/upload/1/00000000-a.png"),
        task(image="b.png"),
        task(image="c.png", annotations=[]),
    ]
    (folder / "project-1-at-2024-05-06.json").write_text(json.dumps(tasks))
    ref = datacache.create_snapshot("labelled", folder.as_uri(), settings=settings).ref
    assert datacache.stats(ref, settings=settings).unannotated == 1
    done = datacache.convert(
        ref,
        to="label-studio",
        name="again",
        split="train=0.5,val=0.5",
        seed=1,
        keep_unannotated=True,
        settings=settings,
    )
    assert done.report.counts == {"image-unannotated": 1}
    with datacache.open_snapshot(done.record.ref, settings) as snapshot:
        got = snapshot.paths()
        written = [
            each for split in ("train", "val") for each in json.loads(snapshot[f"annotations/tasks_{split}.json"])
        ]
    assert len(written) == 3
    assert sorted(len(each["annotations"]) for each in written) == [0, 1, 1]
    for each in written:
        assert each["data"]["image"].removeprefix("/data/local-files/?d=") in got
    back = datacache.convert(done.record.ref, to="voc", name="back", keep_unannotated=True, settings=settings)
    assert back.report.splits == done.report.splits
    assert back.report.boxes == 1
    assert back.report.counts == {"image-unannotated": 1}
