"""LabelMe: what its files mean, what is mended and refused, and that what was written is read back."""

from __future__ import annotations

import base64
import io
import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from datacache.annotations.formats import labelme
from datacache.annotations.model import Annotation, Box, Draft
from datacache.annotations.shapes import mask as masks
from datacache.annotations.shapes.clip import box_around
from datacache.annotations.shapes.outline import Extra, Keypoints, Mask, Polygon, Rotated, area, pack
from datacache.core.errors import AnnotationError
from tests.annotations.shapes import cases, one_of_a_kind, points_within

FILE = "a.json"
WIDTH, HEIGHT = 64, 48


def shape(type: str, points: Any, label: Any = "cat", **more: Any) -> dict[str, Any]:
    """Return a shape as LabelMe writes it."""
    usual = {"label": label, "points": points, "group_id": None, "description": "", "shape_type": type, "flags": {}}
    return usual | {"mask": None} | more


def document(*shapes: Any, **more: Any) -> bytes:
    usual = {"version": "5.5.0", "flags": {}, "shapes": list(shapes), "imagePath": "a.jpg", "imageData": None}
    return json.dumps(usual | {"imageHeight": HEIGHT, "imageWidth": WIDTH} | more).encode()


def parsed(data: bytes) -> tuple[Draft, list[str]]:
    draft, problems = labelme.parse(data, FILE)
    return draft, [f"{problem.code} {problem.action} {problem.line}" for problem in problems]


def box_of(*shapes: Any, **more: Any) -> Box:
    draft, problems = parsed(document(*shapes, **more))
    assert problems == []
    (box,) = draft.boxes
    return box


def png(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_a_file_as_labelme_writes_it() -> None:
    draft, problems = parsed(
        document(
            shape("rectangle", [[30.5, 2], [10.0, 20.25]], group_id=3),
            shape("polygon", [[1, 2], [5.5, 2], [5, 9]], description="a text", flags={"wet": True, "difficult": True}),
            flags={"night": True, "day": False},
            imagePath="..\\images\\b.jpg",
            imageData="aGVsbG8=",
        )
    )
    assert (draft.name, draft.width, draft.height, draft.labels, problems) == ("b.jpg", 64, 48, ("night",), [])
    assert draft.boxes == (
        Box("cat", 10, 2, 30.5, 20.25, line=1, extra=Extra(group=3)),
        Box(
            "cat", 1, 2, 5.5, 9, difficult=True, attributes=(("description", "a text"), ("wet", "true")), line=2,
            extra=Extra(Polygon(pack([1, 2, 5.5, 2, 5, 9]))),
        ),
    )  # fmt: skip


def test_a_mask_includes_its_last_row_and_column() -> None:
    pixels = np.array([[0, 1, 1], [1, 0, 0]], np.uint8)
    box = box_of(shape("mask", [[4, 5], [6, 6]], mask=png(pixels)))
    assert box.extra is not None
    mask = box.extra.outline
    assert isinstance(mask, Mask)
    assert (masks.decode(mask, (4, 5, 7, 7)) == pixels).all()
    assert (box[1:5], masks.area(mask)) == ((4, 5, 7, 7), 3)


def test_points_turned_rectangles_and_circles() -> None:
    keypoints = box_of(shape("points", [[1, 2], [5, 9]], visible=[2, 1], score=0.5)).extra
    assert keypoints == Extra(keypoints=Keypoints(pack([1, 2, 5, 9]), b"\2\1"), score=0.5)
    odd = box_of(shape("rectangle", [[1, 2], [5, 9]], score=math.nan))
    assert (odd.extra, odd.attributes) == (None, (("score", "NaN"),))
    point = box_of(shape("point", [[3, 0]]))
    assert (point.extra, point[1:5]) == (Extra(keypoints=Keypoints(pack([3, 0]), b"\2")), (2.5, 0, 3.5, 0.5))
    corners = [[20, -2], [30, 5], [20, 15], [10, 5]]
    turned = box_of(shape("oriented_rectangle", corners))
    assert turned.extra == Extra(Rotated(pack(v for xy in corners for v in xy)))
    assert turned[1:5] == (10, 0, 30, 15)
    assert box_of(shape("rotation", corners, direction=0.5)).attributes == (("direction", "0.5"),)
    draft, problems = parsed(document(shape("circle", [[30, 20], [33, 24]])))
    assert problems == ["shape-approximated noted 1"]
    assert draft.boxes[0].extra is not None
    outline = draft.boxes[0].extra.outline
    assert isinstance(outline, Polygon)
    assert area(outline) == pytest.approx(math.pi * 25, rel=0.01)


def test_a_line_becomes_the_box_around_it() -> None:
    draft, problems = parsed(document(shape("line", [[5, 9], [1, 2]]), shape("linestrip", [[0, 0], [0, 9], [0, 12]])))
    assert [(box[1:5], box.extra) for box in draft.boxes] == [((1, 2, 5, 9), None), ((0, 0, 0.5, 12), None)]
    assert problems == ["shape-boxed noted 1", "shape-boxed noted 2"]


def test_other_keys_are_attributes() -> None:
    more = {"attributes": {"age": "3", "n": 2}, "difficult": True, "tags": ["a"], "group_id": -4, "kept": None}
    box = box_of(shape("rectangle", [[1, 2], [3, 4]], **more))
    assert box.difficult
    assert box.attributes == (("age", "3"), ("group_id", "-4"), ("n", "2"), ("tags", '["a"]'))


MASK = png(np.ones((2, 3), np.uint8))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("text", "entry-malformed skipped 1"),
        (shape("blob", [[1, 2]]), "entry-malformed skipped 1"),
        (shape(["polygon"], [[1, 2]]), "entry-malformed skipped 1"),  # type: ignore[arg-type]
        (shape("polygon", []), "box-missing skipped 1"),
        (shape("polygon", None), "box-missing skipped 1"),
        (shape("rectangle", [[1, 2], [3, 4], [5, 6]]), "box-missing skipped 1"),
        (shape("polygon", [[1, 2], [3]]), "box-text skipped 1"),
        (shape("polygon", [[1, 2], 3]), "box-text skipped 1"),
        (shape("polygon", [[1, 2], [10**400, 3]]), "box-text skipped 1"),
        (shape("polygon", [[1, 2], [True, 3]]), "box-text skipped 1"),
        (shape("polygon", [[1, 2], [3, "x"]]), "box-text skipped 1"),
        (shape("mask", [[1, 2], [3, 3]]), "mask-broken skipped 1"),
        (shape("mask", [[1, 2], [3, 3]], mask="no base64"), "mask-broken skipped 1"),
        (shape("mask", [[1, 2], [3, 3]], mask="aGVsbG8="), "mask-broken skipped 1"),
        (shape("mask", [[1, 2], [3, 3]], mask=MASK[:-24]), "mask-broken skipped 1"),
        (shape("mask", [[1, 2], [3, 3.5]], mask=MASK), "mask-broken skipped 1"),
        (shape("mask", [[1, 2], [9, 9]], mask=MASK), "mask-size skipped 1"),
        (shape("mask", [[62, 2], [64, 3]], mask=MASK), "mask-size skipped 1"),
        (shape("mask", [[1, 2], [3, 3]], mask=png(np.zeros((2, 3), np.uint8))), "mask-broken skipped 1"),
        (shape("polygon", [[1, 2]] * 100_001), "shape-too-large skipped 1"),
    ],
)
def test_shapes_that_mean_nothing_are_left_out(wrong: Any, problem: str) -> None:
    draft, problems = parsed(document(wrong, shape("rectangle", [[1, 2], [3, 4]], "kept")))
    assert ([box.label for box in draft.boxes], problems) == (["kept"], [problem])


def test_a_size_that_is_none_is_noted() -> None:
    draft, problems = parsed(document(imageWidth="wide", imageHeight=None))
    assert ((draft.width, draft.height), problems) == ((0, 0), ["size-text noted 0"])


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "json-broken"),
        (b"[" * 100_000, "json-broken"),
        (b"[]", "not-labelme"),
        (b'{"shapes": {}}', "not-labelme"),
        (b" " * (labelme.MAX_TEXT_BYTES + 1), "file-too-large"),
        (document(*[shape("mask", [[0, 0], [5000, 5000]], mask="")] * 6), "file-too-large"),
        (b'{"imageData": "' + b"A" * labelme.MAX_BYTES + b'"}', "file-too-large"),
    ],
)
def test_files_that_cannot_be_used_are_refused(data: bytes, code: str) -> None:
    with pytest.raises(AnnotationError) as caught:
        labelme.parse(data, FILE)
    assert (caught.value.code, caught.value.file) == (code, FILE)


def test_an_image_in_the_file_does_not_count() -> None:
    data = document(shape("rectangle", [[1, 2], [3, 4]]), imageData="A" * (labelme.MAX_TEXT_BYTES + 4))
    assert len(labelme.parse(data, FILE)[0].boxes) == 1


HOSTILE = """
import resource, time
import numpy
import PIL.Image
import datacache.annotations.formats.labelme as labelme
import datacache.annotations.shapes.mask
from datacache.core.errors import AnnotationError
used = int(open("/proc/self/statm").read().split()[0]) * 4096
head = b'{"imageWidth": 50000, "imageHeight": 50000, "shapes": ['
import base64, io
def mask(pixels, mode="1"):
    file = io.BytesIO()
    pixels.save(file, "PNG")
    box = [[0, 0], [pixels.width - 1, pixels.height - 1]]
    text = base64.b64encode(file.getvalue())
    return head + b'{"label": "a", "shape_type": "mask", "points": %s, "mask": "%s"}]}' % (str(box).encode(), text)
stripes = numpy.zeros((5792, 5792), bool)
stripes[::2] = True
for data in [
    head + b'{"label": "a", "points": [' + b"[1.5, 2.5]," * 450_000 + b"[1, 1]]}]}",
    mask(PIL.Image.new("1", (20_000, 20_000), 1)),
    mask(PIL.Image.fromarray(stripes)),
]:
    resource.setrlimit(resource.RLIMIT_AS, (used + len(data) * 2 + 200 * 2**20, resource.RLIM_INFINITY))
    start = time.process_time()
    try:
        said = [problem.code for problem in labelme.parse(data, "a.json")[1]]
    except AnnotationError as exc:
        said = [exc.code]
    assert said, data[:99]
    print(time.process_time() - start)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_files_from_strangers_take_neither_memory_nor_time() -> None:
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(float(seconds) < 1 for seconds in done.stdout.split()), done.stdout


# --- there and back --------------------------------------------------------------------------------------------------

inside = st.floats(0, HEIGHT)
words = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)
reserved = {"difficult", "truncated", "occluded", "description", "group_id"}


def any_points(low: int, high: int) -> st.SearchStrategy[bytes]:
    return st.lists(st.tuples(inside, inside), min_size=low, max_size=high).map(
        lambda found: pack(v for p in found for v in p)
    )


@st.composite
def objects(draw: st.DrawFn) -> Box:
    """Draw an object as LabelMe can have it."""
    masked = (
        points_within(WIDTH, HEIGHT).map(lambda found: masks.fill(Polygon(found), WIDTH, HEIGHT)).filter(masks.area)
    )
    outline = draw(st.none() | any_points(3, 6).map(Polygon) | any_points(4, 4).map(Rotated) | masked)
    keypoints = None
    if draw(st.booleans()):
        found = draw(any_points(1, 4))
        seen = draw(st.lists(st.integers(0, 2), min_size=len(found) // 16, max_size=len(found) // 16))
        keypoints = Keypoints(found, bytes(seen))
    extra = Extra(outline, keypoints, group=draw(st.integers(-1, 9)), score=draw(st.none() | st.floats(0, 1)))
    around = tuple(draw(inside) for _ in range(4)) if outline is None else box_around(outline)
    assert around is not None
    x1, y1, x2, y2 = around
    values = words | st.sampled_from(["true", "false", "2"])
    attributes = draw(st.dictionaries(words.filter(lambda name: name not in reserved), values, max_size=3))
    attributes |= draw(st.sampled_from([{}, {"description": "a text"}, {"truncated": "maybe", "group_id": "-1"}]))
    flags = [draw(st.booleans()) and name not in attributes for name in ("difficult", "truncated", "occluded")]
    sides = min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)
    return Box(draw(words), *sides, *flags, tuple(sorted(attributes.items())), 0, None if extra == Extra() else extra)


@cases
@given(st.lists(objects(), max_size=3).filter(one_of_a_kind), st.lists(words, max_size=2, unique=True))
def test_what_was_written_is_read_back(found: list[Box], labels: list[str]) -> None:
    annotation = Annotation("images/a.jpg", WIDTH, HEIGHT, tuple(found), tuple(labels))
    data = labelme.write(annotation)
    draft, problems = parsed(data)
    assert (problems, draft.name, draft.labels) == ([], "a.jpg", annotation.labels)
    for box, again in zip(found, draft.boxes, strict=True):
        shaped = box.extra is not None and (box.extra.outline or box.extra.keypoints)
        edges = dict(zip(("x1", "y1", "x2", "y2"), box[1:5], strict=True)) if shaped else {}
        assert again._replace(line=0, **edges) == box
    assert labelme.write(annotation._replace(boxes=draft.boxes)) == data


def test_a_mask_is_written_as_labelme_does_it() -> None:
    mask = masks.encode(np.array([[0, 1, 1], [1, 0, 0]], bool), 4, 5, WIDTH, HEIGHT)
    (found,) = json.loads(labelme.write(Annotation("a.jpg", 64, 48, (Box("a", 4, 5, 7, 7, extra=Extra(mask)),))))[
        "shapes"
    ]
    assert found["points"] == [[4, 5], [6, 6]]
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["mask"]))))
    assert image.tolist() == [[0, 1, 1], [1, 0, 0]]


def test_a_group_that_no_table_holds_is_an_attribute() -> None:
    box = box_of(shape("rectangle", [[1, 2], [3, 4]], group_id=10**20))
    assert (box.extra, box.attributes) == (None, (("group_id", str(10**20)),))
