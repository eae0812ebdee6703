"""Image operations: what is painted on an image and the box around it end up in the same place."""

from __future__ import annotations

import io
import itertools
import math
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from datacache.annotations.model import PROBLEMS, Annotation, Box, Problem
from datacache.conversion import images
from datacache.conversion.operations import Operations, carry, parse_operations, plan
from datacache.core.errors import AnnotationError, UsageError
from tests.promises import promise

pytestmark = [promise("Boxes, outlines and keypoints go with their images through every operation")]

GROUND, PAINT, MIDDLE = (20, 40, 60), (240, 220, 200), 130
SIZES = [(64, 48), (63, 47), (101, 33), (33, 101), (7, 5)]


def painted(width: int, height: int, box: tuple[int, int, int, int]) -> np.ndarray:
    """An image with one bright rectangle on a dark ground, which is a little different at every pixel."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:] = GROUND
    pixels[:, :, 1] += (np.arange(height)[:, None] + np.arange(width)).astype(np.uint8) % 7
    pixels[box[1] : box[3], box[0] : box[2]] = PAINT
    return pixels


def found(pixels: np.ndarray) -> tuple[int, int, int, int]:
    """The bright rectangle, as pixel edges."""
    bright = (pixels if pixels.ndim == 2 else pixels[:, :, 0]) > MIDDLE
    rows, columns = np.flatnonzero(bright.any(axis=1)), np.flatnonzero(bright.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def encoded(pixels: np.ndarray, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format, **options)
    return file.getvalue()


class Result(NamedTuple):
    data: bytes
    annotation: Annotation
    problems: list[Problem]


def apply(data: bytes, annotation: Annotation, ops: Operations) -> Result:
    """Return the one image that another one becomes."""
    (found,), problems = images.apply(data, annotation, ops)
    return Result(*found, problems)


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


def annotation(width: int, height: int, *boxes: tuple[float, float, float, float], path: str = "a/x.png") -> Annotation:
    return Annotation(
        path, width, height, tuple(Box("cell", *box, line=n + 1) for n, box in enumerate(boxes)), (), "x.xml"
    )


def middle_box(width: int, height: int) -> tuple[int, int, int, int]:
    return width // 4, height // 5, width - width // 4 - 1, height - height // 3


def extension_of(result: Result) -> str:
    return Path(result.annotation.path).suffix


def coordinates(result: Result) -> tuple[float, float, float, float]:
    (box,) = result.annotation.boxes
    return box.x1, box.y1, box.x2, box.y2


# --- pixels and boxes agree ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {"crop": "2,1,60%,80%"},
        {"crop": "center:80%x60%"},
        {"crop": "10%,20%,80%,75%"},
        {"flip": "h"},
        {"flip": "v"},
        {"rotate": 90},
        {"rotate": 180},
        {"rotate": "270"},
        {"rotate": -90},
        {"crop": "center:60%x90%", "rotate": 90, "flip": "h"},
    ],
    ids=str,
)
def test_pixels_that_are_only_moved_agree_with_their_box_exactly(size, options):
    box = middle_box(*size)
    result = apply(encoded(painted(*size, box)), annotation(*size, box), parse_operations(**options))
    pixels = decoded(result.data)
    assert pixels.shape[:2] == (result.annotation.height, result.annotation.width)
    assert found(pixels) == coordinates(result)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"crop": "2,1,5,3"}, lambda p: p[1:4, 2:7]),
        ({"crop": "center:6x4"}, lambda p: p[(len(p) - 4) // 2 :][:4, (p.shape[1] - 6) // 2 :][:, :6]),
        ({"flip": "h"}, lambda p: p[:, ::-1]),
        ({"flip": "v"}, lambda p: p[::-1]),
        ({"rotate": 90}, lambda p: p.transpose(1, 0, 2)[::-1]),  # counter-clockwise: the right side comes up
        ({"rotate": 180}, lambda p: p[::-1, ::-1]),
        ({"rotate": -90}, lambda p: p[::-1].transpose(1, 0, 2)),
        ({"rotate": 450}, lambda p: p.transpose(1, 0, 2)[::-1]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_pixels_that_are_only_moved_keep_their_values(options, expected, channels):
    pixels = np.random.default_rng(channels).integers(0, 256, (9, 13, channels), dtype=np.uint8)
    given = pixels[:, :, 0] if channels == 1 else pixels
    result = decoded(apply(encoded(given), annotation(13, 9), parse_operations(**options)).data)
    assert np.array_equal(result.reshape(*result.shape[:2], channels), expected(pixels))


INTERPOLATED = [
    {"resize": "320x240"},
    {"resize": "57x31"},
    {"resize": "200x33"},
    {"resize": "96x96", "letterbox": True},
    {"resize": "37x91", "letterbox": True},
    {"rotate": 10},
    {"rotate": 33.3},
    {"rotate": "-45"},
    {"rotate": 179.5},
    {"rotate": 271},
    {"crop": "center:90%x80%", "rotate": 20, "flip": "v", "resize": "128x128", "letterbox": True},
]


@pytest.mark.parametrize("options", INTERPOLATED, ids=str)
@pytest.mark.parametrize("size", [(64, 48), (63, 47), (101, 33), (33, 101)])
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_interpolated_pixels_agree_with_their_box_within_a_pixel(size, options, format):
    box = middle_box(*size)
    data = encoded(painted(*size, box), format, **({"quality": 95, "subsampling": 0} if format == "JPEG" else {}))
    result = apply(data, annotation(*size, box), parse_operations(**options))
    pixels = decoded(result.data)
    assert pixels.shape[:2] == (result.annotation.height, result.annotation.width)
    # Edges show where they cover half of a pixel. The tip of a turned rectangle covers half only further in, and when
    # that is enlarged, so is the difference.
    enlarged = 1.5 if "rotate" in options and "resize" in options else 1
    assert found(pixels) == pytest.approx(coordinates(result), abs=enlarged)


@pytest.mark.parametrize("options", INTERPOLATED, ids=str)
def test_16_bit_grey_is_interpolated_like_8_bit_and_stays_16_bit(options):
    box = middle_box(63, 47)
    small = painted(63, 47, box)[:, :, 0]
    ops = parse_operations(**options)
    result = apply(encoded(small.astype(np.uint16) * 257), annotation(63, 47, box), ops)
    pixels = decoded(result.data)
    assert Image.open(io.BytesIO(result.data)).mode == "I;16"
    as_8_bit = decoded(apply(encoded(small), annotation(63, 47, box), ops).data)
    assert np.abs(pixels / 257 - as_8_bit).max() <= (2 if "rotate" in options and "resize" in options else 1)
    assert result.problems == []


@pytest.mark.parametrize("degrees", [1, 30, 45, 60, 89, 135, 200, 300])
def test_a_rotated_image_is_all_there_and_its_corners_are_grey(degrees):
    white = np.full((40, 60, 3), 255, np.uint8)
    result = apply(encoded(white), annotation(60, 40, (0, 0, 60, 40)), parse_operations(rotate=degrees))
    pixels = decoded(result.data)
    assert found(pixels) == pytest.approx((0, 0, pixels.shape[1], pixels.shape[0]), abs=1)
    assert np.array_equal(np.unique(pixels), [114, 255])
    assert np.count_nonzero(pixels[:, :, 0] == 255) == pytest.approx(60 * 40, rel=0.02)


@pytest.mark.parametrize(
    ("size", "place"), [((64, 32), (0, 16, 64, 48)), ((32, 64), (16, 0, 48, 64)), ((64, 31), (0, 16, 64, 47))]
)
def test_letterbox_keeps_the_aspect_and_pads_both_sides_with_grey(size, place):
    white = np.full((size[1], size[0], 3), 255, np.uint8)
    result = apply(encoded(white), annotation(*size, (0, 0, *size)), parse_operations(resize="64x64", letterbox=True))
    pixels = decoded(result.data)
    assert found(pixels) == coordinates(result) == place
    assert np.array_equal(np.unique(pixels), [114, 255])
    assert pixels.shape == (64, 64, 3)


def test_transparent_pixels_do_not_bleed_into_their_neighbours():
    pixels = np.zeros((40, 40, 4), np.uint8)
    pixels[:, :20] = (255, 255, 255, 255)  # the other half: black, and not there
    result = decoded(apply(encoded(pixels), annotation(40, 40), parse_operations(resize="13x13")).data)
    assert result.shape == (13, 13, 4)
    seen = result[result[:, :, 3] > 0]
    assert seen[:, :3].min() >= 250


# --- orientation ---------------------------------------------------------------------------------------------------

STORED = {  # displayed → stored, for each EXIF orientation
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.transpose(1, 0, 2),
    6: lambda p: p.transpose(1, 0, 2)[::-1],
    7: lambda p: p[::-1, ::-1].transpose(1, 0, 2),
    8: lambda p: p.transpose(1, 0, 2)[:, ::-1],
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    "options", [{"crop": "3,2,40,30"}, {"flip": "h"}, {"rotate": 90}, {"resize": "128x96"}], ids=str
)
def test_every_orientation_is_done_to_the_pixels_and_boxes_are_in_the_displayed_frame(orientation, format, options):
    box = (7, 5, 30, 17)
    shown = painted(53, 41, box)
    exif = Image.Exif()
    exif[0x0112] = orientation
    more = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(format, {})
    stored = np.ascontiguousarray(STORED[orientation](shown))
    result = apply(encoded(stored, format, exif=exif, **more), annotation(53, 41, box), parse_operations(**options))
    picture = Image.open(io.BytesIO(result.data))
    assert picture.getexif().get(0x0112, 1) == 1
    assert found(np.asarray(picture)) == pytest.approx(coordinates(result), abs=1 if "resize" in options else 0)


# --- geometry alone ------------------------------------------------------------------------------------------------

sides = st.integers(1, 4000)


@st.composite
def annotations(draw: st.DrawFn) -> Annotation:
    width, height = draw(sides), draw(sides)
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        x = sorted(draw(st.tuples(*[st.floats(0, width)] * 2)))
        y = sorted(draw(st.tuples(*[st.floats(0, height)] * 2)))
        if x[1] - x[0] > 1e-6 and y[1] - y[0] > 1e-6:
            boxes.append((x[0], y[0], x[1], y[1]))
    return annotation(width, height, *boxes)


percents = st.integers(0, 100).map(lambda n: f"{n}%")
operations = st.builds(
    parse_operations,
    crop=st.none()
    | st.builds(
        lambda x, y, w, h: f"{x},{y},{w},{h}", percents, percents, st.integers(1, 5000), percents.filter("0%".__ne__)
    )
    | st.builds(lambda w, h: f"center:{w}x{h}", st.integers(1, 5000), st.integers(1, 5000)),
    rotate=st.floats(-720, 720) | st.sampled_from([0, 90, 180, 270]),
    flip=st.sampled_from([None, "h", "v"]),
    resize=st.builds(lambda w, h: f"{w}x{h}", st.integers(1, 2000), st.integers(1, 2000)),
    letterbox=st.booleans(),
    min_visible=st.sampled_from([0, 0.3, 1]),
)


def carried(annotation: Annotation, **options: object) -> Annotation:
    ops = parse_operations(**options)
    plans, _ = plan(ops, annotation.width, annotation.height, "x")
    return carry(annotation, plans, ops.min_visible)[0][0]


def areas(annotation: Annotation) -> list[float]:
    return [(box.x2 - box.x1) * (box.y2 - box.y1) for box in annotation.boxes]


@given(annotations(), operations)
def test_boxes_stay_inside_and_every_one_that_is_dropped_is_a_problem(before, ops):
    try:
        plans, _ = plan(ops, before.width, before.height, before.path)
    except AnnotationError:
        assume(False)
    (after,), problems = carry(before, plans, ops.min_visible)
    assert len(after.boxes) + len(problems) == len(before.boxes)
    for box in after.boxes:
        assert 0 <= box.x1 < box.x2 <= after.width
        assert 0 <= box.y1 < box.y2 <= after.height
    if ops.resize:
        assert (after.width, after.height) == ops.resize
    assert {problem.code for problem in problems} <= {"box-cropped-away"}


@given(
    annotations(), st.sampled_from([({"flip": "h"}, 2), ({"flip": "v"}, 2), ({"rotate": 90}, 4), ({"rotate": 270}, 4)])
)
def test_flipping_twice_and_turning_four_times_changes_nothing(before, change):
    options, times = change
    after = before
    for _ in range(times):
        after = carried(after, **options)
        assert sorted(areas(after)) == pytest.approx(sorted(areas(before)), rel=1e-6, abs=1e-9)
    assert (after.width, after.height) == (before.width, before.height)
    for now, then in zip(after.boxes, before.boxes, strict=True):
        assert now[1:5] == pytest.approx(then[1:5], abs=1e-9)


@given(annotations(), st.integers(-3, 3))
def test_a_whole_turn_does_nothing(before, turns):
    assert not parse_operations(rotate=360 * turns)
    assert carried(before, rotate=360 * turns) == before


@given(annotations(), st.integers(1, 3000), st.integers(1, 3000))
def test_resizing_scales_areas_by_the_images_area(before, width, height):
    after = carried(before, resize=f"{width}x{height}")
    factor = width * height / (before.width * before.height)
    assert areas(after) == pytest.approx([area * factor for area in areas(before)], rel=1e-6, abs=1e-9)


@given(annotations(), st.floats(0.1, 359.9))
def test_a_rotated_box_bounds_its_corners(before, degrees):
    after = carried(before, rotate=degrees)
    cosine, sine = abs(math.cos(math.radians(degrees))), abs(math.sin(math.radians(degrees)))
    for now, then in zip(after.boxes, before.boxes, strict=True):
        width, height = then.x2 - then.x1, then.y2 - then.y1
        assert now.x2 - now.x1 == pytest.approx(cosine * width + sine * height, abs=1e-6)
        assert now.y2 - now.y1 == pytest.approx(sine * width + cosine * height, abs=1e-6)
        middle = (now.x1 + now.x2 - after.width) / 2, (now.y1 + now.y2 - after.height) / 2
        was = (then.x1 + then.x2 - before.width) / 2, (then.y1 + then.y2 - before.height) / 2
        assert math.hypot(*middle) == pytest.approx(math.hypot(*was), abs=1e-6)  # it went round the middle


# --- what a crop leaves --------------------------------------------------------------------------------------------


def crop_boxes(min_visible: float) -> Result:
    boxes = [(0, 0, 10, 10), (30, 0, 50, 10), (38, 0, 48, 10), (40, 10, 60, 20), (0, 0, 40.0002, 10)]
    ops = parse_operations(crop="40,0,40,40", min_visible=min_visible)
    return apply(encoded(painted(80, 40, (40, 10, 60, 20))), annotation(80, 40, *boxes), ops)


def test_boxes_outside_of_a_crop_are_left_out_and_reported_with_file_and_line():
    result = crop_boxes(0)
    assert [box[1:5] for box in result.annotation.boxes] == [(0, 0, 10, 10), (0, 0, 8, 10), (0, 10, 20, 20)]
    assert [box.truncated for box in result.annotation.boxes] == [True, True, False]
    assert [(p.code, p.action, p.file, p.line) for p in result.problems] == [
        ("box-cropped-away", "skipped", "x.xml", 1),
        ("box-cropped-away", "skipped", "x.xml", 5),
    ]
    assert "'cell'" in result.problems[0].message


def test_boxes_that_keep_too_little_of_their_area_are_left_out():
    result = crop_boxes(0.6)
    assert [box[1:5] for box in result.annotation.boxes] == [(0, 0, 8, 10), (0, 10, 20, 20)]
    assert [p.line for p in result.problems] == [1, 2, 5]
    assert "50.0%" in result.problems[1].message


def test_a_crop_that_reaches_over_the_edge_is_cut_and_noted():
    result = apply(encoded(painted(30, 20, (5, 5, 9, 9))), annotation(30, 20), parse_operations(crop="20,10,20,5"))
    assert decoded(result.data).shape == (5, 10, 3)
    assert [(p.code, p.action) for p in result.problems] == [("crop-outside", "noted")]
    larger = apply(encoded(painted(30, 20, (5, 5, 9, 9))), annotation(30, 20), parse_operations(crop="center:40x10"))
    assert decoded(larger.data).shape == (10, 30, 3)


def test_a_crop_beside_the_image_is_an_error_that_names_it():
    with pytest.raises(AnnotationError, match=r"a/x\.png.*30,0,5,5") as caught:
        apply(encoded(painted(30, 20, (5, 5, 9, 9))), annotation(30, 20), parse_operations(crop="30,0,5,5"))
    assert caught.value.code == "crop-outside"


# --- formats -------------------------------------------------------------------------------------------------------

CROP = parse_operations(crop="1,1,6,5")


@pytest.mark.parametrize(
    ("mode", "result_mode", "problems"),
    [
        ("1", "L", []),
        ("L", "L", []),
        ("LA", "LA", []),
        ("P", "RGB", []),
        ("RGB", "RGB", []),
        ("RGBA", "RGBA", []),
        ("I;16", "I;16", []),
    ],
)
def test_a_png_stays_a_png_and_keeps_every_pixel(mode, result_mode, problems):
    pixels = np.random.default_rng(3).integers(0, 256, (9, 11, 4), dtype=np.uint8)
    if mode == "I;16":
        picture = Image.fromarray(pixels[:, :, 0] * np.uint16(251))
    else:
        picture = Image.fromarray(pixels).convert("RGB" if mode == "P" else "RGBA")
        picture = picture.quantize(17) if mode == "P" else picture.convert(mode)
    file = io.BytesIO()
    picture.save(file, "PNG")
    result = apply(file.getvalue(), annotation(11, 9), CROP)
    assert extension_of(result) == ".png"
    assert [p.code for p in result.problems] == problems
    after = Image.open(io.BytesIO(result.data))
    assert (after.format, after.mode) == ("PNG", result_mode)
    expected = picture if mode == "I;16" else picture.convert(result_mode)
    assert np.array_equal(np.asarray(after), np.asarray(expected.crop((1, 1, 7, 6))))


def test_a_palette_with_a_transparent_colour_becomes_rgba():
    picture = Image.fromarray(np.arange(99, dtype=np.uint8).reshape(9, 11) % 4, "P")
    picture.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9])
    file = io.BytesIO()
    picture.save(file, "PNG", transparency=2)
    after = decoded(apply(file.getvalue(), annotation(11, 9), CROP).data)
    assert after.shape == (5, 6, 4)
    assert set(np.unique(after[:, :, 3])) == {0, 255}


def deep_png(channels: int) -> bytes:
    """A 16-bit PNG of 8 x 8 pixels, which Pillow reads and cannot write."""
    values = (np.arange(8 * 8 * channels, dtype=np.uint32) * 331 % 65536).astype(">u2").reshape(8, -1)
    colour = {2: 4, 3: 2, 4: 6}[channels]

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.tobytes() for row in values)
    header = struct.pack(">IIBBBBB", 8, 8, 16, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_16_bit_colours_are_reduced_to_8_bits_and_noted(channels):
    result = apply(deep_png(channels), annotation(8, 8), parse_operations(flip="h"))
    assert [(p.code, p.action, p.file) for p in result.problems] == [("image-depth", "noted", "a/x.png")]
    assert decoded(result.data).dtype == np.uint8


def test_a_grey_jpeg_stays_a_grey_jpeg():
    box = (8, 8, 24, 16)
    data = encoded(painted(40, 24, box)[:, :, 0], "JPEG", quality=95)
    result = apply(data, annotation(40, 24, box, path="x.JPG"), parse_operations(rotate=90))
    after = Image.open(io.BytesIO(result.data))
    assert (after.format, after.mode, extension_of(result), result.problems) == ("JPEG", "L", ".JPG", [])
    assert found(np.asarray(after)) == coordinates(result)


def test_a_cmyk_jpeg_becomes_rgb_and_is_noted():
    box = (8, 8, 24, 16)
    picture = Image.fromarray(painted(40, 24, box)).convert("CMYK")
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=95)
    result = apply(file.getvalue(), annotation(40, 24, box, path="x.jpeg"), parse_operations(flip="h"))
    assert [(p.code, p.action) for p in result.problems] == [("image-colours", "noted")]
    assert (Image.open(io.BytesIO(result.data)).mode, extension_of(result)) == ("RGB", ".jpeg")
    assert found(decoded(result.data)) == pytest.approx(coordinates(result), abs=1)


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_a_jpeg_keeps_its_chroma_subsampling_and_takes_the_quality_it_is_given(subsampling):
    import simplejpeg

    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(noise, "JPEG", subsampling=subsampling)
    high = apply(data, annotation(64, 64), parse_operations(flip="h"))
    low = apply(data, annotation(64, 64), parse_operations(flip="h", quality=40))
    assert simplejpeg.decode_jpeg_header(high.data)[3] == subsampling.replace(":", "")
    assert len(low.data) < len(high.data) / 2
    assert np.abs(decoded(high.data).astype(int) - decoded(data)[:, ::-1]).mean() < 15


@pytest.mark.parametrize("format", ["BMP", "GIF", "WEBP", "TIFF"])
def test_other_formats_become_pngs_with_the_same_pixels(format):
    pixels = painted(20, 16, (4, 4, 9, 9))
    data = encoded(pixels, format, **({"lossless": True} if format == "WEBP" else {}))
    result = apply(data, annotation(20, 16, path="x.old"), parse_operations(flip="v"))
    assert extension_of(result) == ".png"
    assert Image.open(io.BytesIO(result.data)).format == "PNG"
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))[::-1]
    assert np.array_equal(decoded(result.data), expected)


@pytest.mark.parametrize(
    ("format", "path", "extension"), [("PNG", "x.jpg", ".png"), ("JPEG", "x.png", ".jpg"), ("JPEG", "x", ".jpg")]
)
def test_the_extension_says_what_the_bytes_are(format, path, extension):
    data = encoded(painted(20, 16, (4, 4, 9, 9)), format)
    assert extension_of(apply(data, annotation(20, 16, path=path), CROP)) == extension


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("size_bytes", [600, 150_000])
def test_the_colour_profile_is_kept(format, size_bytes):
    profile = bytes(n * 7 % 251 for n in range(size_bytes))
    data = encoded(painted(20, 16, (4, 4, 9, 9)), format, icc_profile=profile)
    after = Image.open(io.BytesIO(apply(data, annotation(20, 16), CROP).data))
    assert after.info["icc_profile"] == profile
    assert np.asarray(after).shape == (5, 6, 3)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_the_same_input_gives_the_same_bytes(format):
    data = encoded(painted(63, 47, (4, 4, 9, 9)), format)
    ops = parse_operations(crop="center:90%x90%", rotate=12, resize="64x64", letterbox=True)
    first, second = (apply(data, annotation(63, 47), ops) for _ in range(2))
    assert first == second


# --- what is broken ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP"])
def test_an_image_that_is_cut_off_anywhere_is_an_error_that_names_it(format):
    noise = np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    data = encoded(noise, format, **({"progressive": True} if format == "JPEG" else {}))
    for share in (0, 0.01, 0.2, 0.5, 0.9, 0.99):
        with pytest.raises(AnnotationError, match=r"a/x\.png") as caught:
            apply(data[: int(len(data) * share)], annotation(40, 40), CROP)
        assert caught.value.file == "a/x.png"
        assert caught.value.code in ("image-broken", "image-truncated")


def test_bytes_that_rotted_in_a_png_are_an_error():
    noise = np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    data = bytearray(encoded(noise))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(AnnotationError, match="decoded"):
        apply(bytes(data), annotation(40, 40), CROP)


def test_stray_bytes_in_a_jpeg_are_noted():
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = bytearray(encoded(noise, "JPEG", quality=90))
    data[len(data) // 2 : len(data) // 2 + 20] = bytes(20)
    result = apply(bytes(data), annotation(64, 64), CROP)
    assert [(p.code, p.action) for p in result.problems] == [("image-damaged", "noted")]
    assert "extraneous bytes" in result.problems[0].message


@pytest.mark.parametrize("data", [b"", b"<html>not found</html>", b"%!PS-Adobe-3.0 EPSF-3.0\n" * 20, bytes(1000)])
def test_what_is_no_image_is_an_error(data):
    with pytest.raises(AnnotationError, match=r"a/x\.png"):
        apply(data, annotation(40, 40), CROP)


def test_an_image_that_claims_to_be_huge_is_refused_before_it_is_decoded():
    png = bytearray(encoded(painted(40, 40, (1, 1, 3, 3))))
    png[16:24] = struct.pack(">II", 60_000, 60_000)
    png[29:33] = struct.pack(">I", zlib.crc32(png[12:29]))
    jpeg = bytearray(encoded(painted(40, 40, (1, 1, 3, 3)), "JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 60_000, 60_000)
    for data in (png, jpeg):
        with pytest.raises(AnnotationError, match="pixels") as caught:
            apply(bytes(data), annotation(60_000, 60_000), CROP)
        assert caught.value.code == "image-too-large"


def test_turning_a_thin_strip_into_a_huge_square_is_refused():
    strip = np.zeros((1, 60_000, 3), np.uint8)
    with pytest.raises(AnnotationError, match="pixels"):
        apply(encoded(strip), annotation(60_000, 1), parse_operations(rotate=45))


def test_an_annotation_for_an_image_of_another_size_is_an_error():
    with pytest.raises(AnnotationError, match=r"40 x 30.*30 x 40"):
        apply(encoded(painted(40, 30, (1, 1, 3, 3))), annotation(30, 40), CROP)


# --- what can be asked for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"resize": "640"}, "--resize"),
        ({"resize": "0x480"}, "--resize"),
        ({"resize": "-1x480"}, "--resize"),
        ({"resize": "99999999x2"}, "--resize"),
        ({"resize": "60000x60000"}, "--resize"),
        ({"resize": "640x480!"}, "--resize"),
        ({"letterbox": True}, "--letterbox"),
        ({"crop": "1,2,3"}, "--crop"),
        ({"crop": "1,2,0,4"}, "--crop"),
        ({"crop": "-1,2,3,4"}, "--crop"),
        ({"crop": "1.5,2,3,4"}, "--crop"),
        ({"crop": "center:10"}, "--crop"),
        ({"crop": "middle:10x10"}, "--crop"),
        ({"crop": "0,0,0%,10%"}, "--crop"),
        ({"rotate": "left"}, "--rotate"),
        ({"rotate": "nan"}, "--rotate"),
        ({"rotate": math.inf}, "--rotate"),
        ({"flip": "x"}, "--flip"),
        ({"flip": "h", "quality": 0}, "--quality"),
        ({"flip": "h", "quality": 101}, "--quality"),
        ({"tile": "0x9"}, "--tile"),
        ({"tile": "big"}, "--tile"),
        ({"overlap": 9}, "--tile is not given"),
        ({"drop_empty": True}, "--tile is not given"),
        ({"tile": "64x64", "overlap": -1}, "--overlap"),
        ({"tile": "640x64", "overlap": 49}, "--overlap"),
        ({"tile": "10x640"}, "--tile: 10x640 is less than 16 pixels"),
        ({"crop": "1,2,3,4", "min_visible": 1.5}, "--min-visible"),
        ({"crop": "1,2,3,4", "min_visible": math.nan}, "--min-visible"),
    ],
    ids=str,
)
def test_nonsense_is_refused_naming_the_option(options, named):
    with pytest.raises(UsageError, match=named):
        parse_operations(**options)


def test_what_does_nothing_is_false_and_leaves_no_trace():
    for ops in (Operations(), parse_operations(), parse_operations(rotate="720", quality=80, min_visible=0.5)):
        assert not ops
        assert ops.as_json() == {}


def test_the_lineage_says_all_that_is_needed_to_do_it_again():
    for crop, tile, rotate, flip, resize in itertools.product(
        (None, "1,2,3,4", "center:33.333333%x5"), (None, "64x48"), (None, "-12.5"), (None, "h"), (None, "640x480")
    ):
        tiles = {"tile": tile, "overlap": 3 if tile else 0, "drop_empty": bool(tile)}
        options = {"crop": crop, "rotate": rotate, "flip": flip, "resize": resize, "letterbox": bool(resize), **tiles}
        ops = parse_operations(**options, quality=91)
        assert parse_operations(**ops.as_json()) == ops or not ops


def test_every_problem_is_in_the_list_of_problems():
    codes = ("image-damaged", "image-too-large", "image-depth", "image-colours", "crop-outside", "box-cropped-away")
    assert set(codes) <= set(PROBLEMS)
