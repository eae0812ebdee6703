"""Masks as PNGs, as VOC has them: their numbers, colours and classes, and what is wrong with them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from datacache.annotations.formats.mask_images import (
    VOC_CLASSES,
    MaskClasses,
    add_masks,
    parse_label_map,
    voc_colours,
    write_label_map,
    write_masks,
)
from datacache.annotations.model import Box, Draft
from datacache.annotations.shapes.mask import bounds, decode, encode
from datacache.annotations.shapes.outline import Extra, Mask
from tests.annotations.shapes import cases

CLASSES = MaskClasses(("", "a", "b", "c"))
IDS = {"a": 0, "b": 1, "c": 2}


def png(values: Sequence[Sequence[int]] | Any, palette: Sequence[int] = (), mode: str = "") -> bytes:
    image = Image.fromarray(np.array(values, np.uint8))
    if palette:
        image.putpalette(list(palette))
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, "PNG")
    return file.getvalue()


def read(
    kinds: bytes | None, objects: bytes | None, *boxes: Box, classes: MaskClasses = CLASSES, by_place: bool = True
) -> tuple[list[tuple[str, Any]], list[tuple[str, str]]]:
    """The labels and pixels of objects, and problems."""
    draft, problems = add_masks(Draft("f", boxes=boxes), (kinds, objects), "f", classes, by_place=by_place)
    found = []
    for box in draft.boxes:
        mask = box.extra.outline if box.extra else None
        assert mask is None or isinstance(mask, Mask)
        pixels = None if mask is None else decode(mask, (0, 0, mask.width, mask.height)).astype(int).tolist()
        found.append((box.label, pixels))
    return found, [(problem.code, problem.action) for problem in problems]


def box(label: str, x1: float = 0, y1: float = 0, x2: float = 1, y2: float = 1) -> Box:
    return Box(label, x1, y1, x2, y2)


def test_a_mask_belongs_to_the_object_in_its_place() -> None:
    objects, kinds = png([[1, 1, 255], [3, 0, 3]]), png([[1, 1, 255], [2, 0, 2]])
    found = [("a", [[1, 1, 0], [0, 0, 0]]), ("b", None), ("b", [[0, 0, 0], [1, 0, 1]])]
    assert read(kinds, objects, box("a"), box("b"), box("b")) == (found, [])
    assert read(None, objects, box("a"), box("b"), box("b")) == (found, [])
    assert read(kinds, objects, box("c"), box("b"), box("b"))[1] == [("mask-class", "noted")]


def test_an_object_that_no_xml_has_is_of_the_class_of_most_of_its_pixels() -> None:
    found, problems = read(png([[1, 2, 2], [0, 9, 255]]), png([[1, 1, 1], [0, 2, 2]]))
    assert found == [("b", [[1, 1, 1], [0, 0, 0]]), ("class_9", [[0, 0, 0], [0, 1, 1]])]
    assert problems == [("class-unlisted", "noted")]


def test_places_count_only_where_all_objects_are_there() -> None:
    objects = png([[1, 1, 0, 2], [1, 1, 0, 2]])
    there = box("b", 3, 0, 4, 2)
    found, problems = read(png([[1, 1, 0, 2], [1, 1, 0, 2]]), objects, there, by_place=False)
    assert ([label for label, _ in found], problems) == (["b", "a"], [])
    assert found[0][1] == [[0, 0, 0, 1], [0, 0, 0, 1]]


def test_without_an_image_of_objects_a_class_is_one_object() -> None:
    kinds = png([[1, 1, 0, 2]])
    assert read(kinds, None) == ([("a", [[1, 1, 0, 0]]), ("b", [[0, 0, 0, 1]])], [])
    found, _ = read(kinds, None, box("a"), box("b"), box("b"))
    assert [(label, pixels is not None) for label, pixels in found] == [("a", 1), ("b", 0), ("b", 0), ("b", 1)]


def test_the_size_is_that_of_the_masks_where_nothing_else_says_it() -> None:
    draft, _ = add_masks(Draft("f"), (png([[1, 0, 0]]), None), "f", CLASSES, by_place=True)
    assert (draft.width, draft.height, draft.boxes[0][1:5]) == (3, 1, (0, 0, 1, 1))


LABEL_MAP = b"""# label:color_rgb:parts:actions
cat:250,50,83::
a:b:0,128,0:head,tail:run

dog:::
background:0,0,0::
"""


def test_label_maps_are_read_as_cvat_and_datumaro_write_them() -> None:
    found = parse_label_map(LABEL_MAP)
    assert found == MaskClasses(("", "cat", "a:b", "dog"), ((0, 0, 0), (250, 50, 83), (0, 128, 0), (0, 128, 0)))
    again = parse_label_map(write_label_map(["x", "y:z"]))
    assert again == MaskClasses(("", "x", "y:z"), ((0, 0, 0), (128, 0, 0), (0, 128, 0)))
    assert parse_label_map(b"\xff\xff").names == ("",)


def test_colours_say_the_class_where_a_list_has_them() -> None:
    classes = parse_label_map(LABEL_MAP)
    palette = (0, 0, 0, 0, 128, 0, 250, 50, 83)
    expected = ([("cat", [[0, 0, 1]]), ("a:b", [[0, 1, 0]])], [])
    assert read(png([[0, 1, 2]], palette), None, classes=classes) == expected
    assert read(png([[0, 1, 2]], palette, "RGB"), None, classes=classes) == expected
    assert read(png([[0, 2, 1]]), None, classes=classes) == expected
    voc = [channel for colour in voc_colours() for channel in colour]
    assert voc[:9] == [0, 0, 0, 128, 0, 0, 0, 128, 0]
    assert voc[-3:] == [224, 224, 192]
    both = png([[0, 1, 255]], voc, "RGB")
    assert read(both, both, classes=MaskClasses(("", *VOC_CLASSES))) == ([("aeroplane", [[0, 1, 0]])], [])


@st.composite
def masked(draw: st.DrawFn) -> tuple[tuple[Box, ...], int, int]:
    width, height, boxes = draw(st.integers(1, 9)), draw(st.integers(1, 9)), []
    owners = np.array(draw(st.lists(st.integers(0, 4), min_size=width * height, max_size=width * height)))
    for n in range(1, 5):
        mask = encode((owners == n).reshape(height, width), 0, 0, width, height)
        there = bounds(mask)
        label = draw(st.sampled_from("abc"))
        boxes.append(Box(label, *map(float, there or (0, 0, 1, 1)), extra=Extra(mask) if there else None))
    return tuple(boxes), width, height


@cases
@given(masked())
def test_masks_are_the_same_there_and_back(drawn: tuple[tuple[Box, ...], int, int]) -> None:
    boxes, width, height = drawn
    *images, lost = write_masks(boxes, width, height, IDS)
    assert not lost
    assert images == list(write_masks(boxes, width, height, IDS)[:2])
    bare = tuple(box._replace(extra=None) for box in boxes)
    found, problems = add_masks(Draft("f", boxes=bare), images, "f", CLASSES, by_place=True)
    assert (found.boxes, problems) == (boxes, [])


def test_the_smaller_of_two_masks_is_on_top_and_the_other_is_counted() -> None:
    large, small = encode(np.ones((2, 3), bool), 0, 0, 3, 2), encode(np.ones((1, 1), bool), 1, 0, 3, 2)
    boxes = [box("a")._replace(extra=Extra(mask)) for mask in (small, large)]
    kinds, objects, lost = write_masks(boxes, 3, 2, IDS)
    assert lost == {1}
    assert read(kinds, objects, box("a"), box("a"))[0] == [
        ("a", [[0, 1, 0], [0, 0, 0]]),
        ("a", [[1, 0, 1], [1, 1, 1]]),
    ]
    many = [boxes[0]] * 256
    assert write_masks(many, 3, 2, IDS)[2] == {*range(256)} - {253}


def test_a_list_of_more_classes_than_numbers_is_read_up_to_them() -> None:
    lines = "".join(f"c{n}:{n},{n},{'9' * 5000 if n == 3 else n}\n" for n in range(300))
    classes = parse_label_map(lines.encode())
    assert len(classes.names) == 256
    assert read(png([[0, 7]], [v for n in range(256) for v in (n, n, n)]), None, classes=classes)[0][0][0] == "c7"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "mask-broken"),
        (b"GIF89a", "mask-broken"),
        (png([[1]])[:-20], "mask-broken"),
        (png([[1, 2], [3, 4]]).replace(b"IDAT", b"IDAX"), "mask-broken"),
        (
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(bytes(1000)))
            + chunk(b"IEND", b""),
            "shape-too-large",
        ),
        (png(np.arange(3003 * 999).reshape(3003, 999) % 2 + 1), "shape-too-large"),
        (png([[1]]), "mask-size"),
    ],
)
def test_an_image_that_cannot_be_used_leaves_the_boxes(data: bytes, code: str) -> None:
    found = read(png([[1, 1]]) if code == "mask-size" else None, data, box("a"))
    assert found == ([("a", None)], [(code, "repaired")])


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_bytes_give_masks_or_a_problem(data: bytes, tail: bytes) -> None:
    parse_label_map(data)
    for image in (data, png([[1, 2], [3, 4]])[:-30] + tail):
        _, problems = read(image, None, box("a"))
        assert {action for _, action in problems} <= {"repaired"}
