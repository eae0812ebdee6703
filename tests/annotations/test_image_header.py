"""Image headers against images that Pillow made, and against damage of any kind."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path

import pytest
import simplejpeg
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from datacache.annotations.image_header import HEAD_BYTES, TAIL_BYTES, ImageHeader, read_header
from datacache.core.errors import BrokenImageError

FORMATS = ["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"]


def picture(width: int = 67, height: int = 45, mode: str = "RGB") -> Image.Image:
    image = Image.effect_noise((width, height), 60)
    return image.convert(mode)


def made(format: str, image: Image.Image | None = None, **options: object) -> bytes:
    file = io.BytesIO()
    (image or picture()).save(file, format, **options)
    return file.getvalue()


def exif(orientation: int, order: str = "II", type: int = 3, tag: int = 0x0112) -> bytes:
    """An Exif block with a maker before the orientation, which is the third of four entries."""
    mark = "<" if order == "II" else ">"
    value = struct.pack(mark + {1: "Bxxx", 3: "Hxx", 4: "I"}[type], orientation)
    entries = [
        struct.pack(mark + "HHII", 0x010F, 2, 10, 62),
        struct.pack(mark + "HHI4s", 0x0110, 2, 2, b"x\0\0\0"),
        struct.pack(mark + "HHI", tag, type, 1) + value,
        struct.pack(mark + "HHII", 0x0128, 3, 1, 0),
    ]
    head = order.encode() + struct.pack(mark + "HI", 42, 8) + struct.pack(mark + "H", len(entries))
    return b"Exif\0\0" + head + b"".join(entries) + b"\0" * 4 + b"the maker\0"


def segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def with_segments(jpeg: bytes, *segments: bytes) -> bytes:
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


# --- every format ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (67, 45), (2, 300), (300, 1)])
def test_the_size_is_what_pillow_says(format: str, size: tuple[int, int]) -> None:
    data = made(format, picture(*size))
    expected = ImageHeader(format.lower(), *size)
    assert read_header(data) == expected
    assert read_header(memoryview(data)) == expected
    assert read_header(bytearray(data)) == expected


@pytest.mark.parametrize("format", FORMATS)
def test_an_image_without_its_end_is_not_complete(format: str) -> None:
    data = made(format, picture(300, 200))
    assert read_header(data).complete
    last = 12 if format == "PNG" else 1  # where IEND is, nothing of the image is missing
    for kept in (len(data) - last, len(data) - 100, len(data) * 3 // 4):
        header = read_header(data[:kept])
        assert (header.width, header.height, header.complete) == (300, 200, False)


@pytest.mark.parametrize("format", FORMATS)
def test_an_image_cut_in_its_header_or_empty_is_broken(format: str) -> None:
    data = made(format)
    for kept in range(10):
        with pytest.raises(BrokenImageError):
            read_header(data[:kept])


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 100, b"<html>404</html>", b"GIF90a" + b"\1" * 20, b"RIFF\1\2\3\4WAVE" + b"\0" * 50]
)
def test_what_is_no_image_is_broken(data: bytes) -> None:
    with pytest.raises(BrokenImageError, match="empty" if not data else "format"):
        read_header(data)


@pytest.mark.parametrize("format", ["PNG", "GIF", "BMP", "JPEG"])
def test_an_image_without_pixels_is_broken(format: str) -> None:
    data = bytearray(made(format))
    at = {"PNG": 16, "GIF": 6, "BMP": 18, "JPEG": data.find(b"\xff\xc0") + 7}[format]
    data[at : at + 2 if format in ("GIF", "JPEG") else at + 4] = bytes(2 if format in ("GIF", "JPEG") else 4)
    with pytest.raises(BrokenImageError):
        read_header(data)


def ends(data: bytes) -> bytes:
    assert len(data) > HEAD_BYTES + TAIL_BYTES
    return data[:HEAD_BYTES] + data[-TAIL_BYTES:]


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP", "WEBP"])
def test_the_ends_of_a_large_image_are_enough(format: str) -> None:
    options = {"JPEG": {"quality": 100, "exif": exif(6)}, "PNG": {"exif": exif(6)}, "WEBP": {"lossless": True}}
    data = made(format, picture(900, 700), **options.get(format, {}))
    assert read_header(ends(data), size_bytes=len(data)) == read_header(data)
    assert not read_header(ends(data[:-100]), size_bytes=len(data) - 100).complete


def test_where_the_ends_of_a_large_image_do_not_tell_it_is_refused_not_guessed() -> None:
    large = picture(900, 700)
    pages = b"".join(segment(0xE2, b"x" * 65000) for _ in range(5))
    png = made("PNG", large)
    for data in (
        made("TIFF", large),
        with_segments(made("JPEG", large, quality=100), pages),
        made("WEBP", large, lossless=True, exif=exif(6)),
        png[:-12] + made("PNG", exif=exif(6))[33:-12] + png[-12:],
    ):
        assert read_header(data).complete
        with pytest.raises(BrokenImageError, match="beginning and end"):
            read_header(ends(data), size_bytes=len(data))


# --- EXIF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["II", "MM"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_is_what_pillow_applies(order: str, orientation: int) -> None:
    block = exif(orientation, order)
    for format in ("JPEG", "PNG", "WEBP"):
        data = made(format, exif=block)
        header = read_header(data)
        assert (header.width, header.height, header.orientation) == (67, 45, orientation)
        shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert (header.displayed_width, header.displayed_height) == shown.size
    tags = Image.Exif()
    tags[0x0112] = orientation
    assert read_header(made("TIFF", exif=tags)) == ImageHeader("tiff", 67, 45, orientation)


@pytest.mark.parametrize(("type", "value"), [(1, 6), (4, 6)])
@pytest.mark.parametrize("order", ["II", "MM"])
def test_an_orientation_of_another_whole_type_counts(order: str, type: int, value: int) -> None:
    assert read_header(with_segments(made("JPEG"), segment(0xE1, exif(value, order, type)))).orientation == 6


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_orientation_that_is_none_is_upright(value: int) -> None:
    assert read_header(with_segments(made("JPEG"), segment(0xE1, exif(value)))).orientation == 1
    assert read_header(with_segments(made("JPEG"), segment(0xE1, exif(6, tag=0x0113)))).orientation == 1


def test_of_several_exif_blocks_the_first_counts_and_other_segments_are_none() -> None:
    xmp = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>")
    data = with_segments(made("JPEG"), xmp, segment(0xE1, exif(6)), segment(0xE1, exif(3)))
    assert read_header(data).orientation == 6


def test_a_damaged_exif_block_is_upright_and_the_image_is_read_on() -> None:
    block = exif(6)
    for cut in range(len(block)):
        header = read_header(with_segments(made("JPEG"), segment(0xE1, block[:cut])))
        assert header == ImageHeader("jpeg", 67, 45, 6 if cut >= 6 + 10 + 3 * 12 - 2 else 1)


def test_a_webp_may_have_other_chunks_before_its_exif() -> None:
    data = made("WEBP", icc_profile=b"x" * 99, exif=exif(6))
    assert read_header(data) == ImageHeader("webp", 67, 45, 6)


def test_a_png_may_have_its_exif_after_its_pixels() -> None:
    data = made("PNG", exif=exif(6))
    at = data.index(b"eXIf") - 4
    size = struct.unpack_from(">I", data, at)[0] + 12
    chunk = data[at : at + size]
    moved = data[:at] + data[at + size :]
    moved = moved[:-12] + chunk + moved[-12:]
    assert read_header(moved) == ImageHeader("png", 67, 45, 6)


# --- JPEG ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"optimize": True}, {"restart_marker_rows": 1}, {"comment": b"x"}]
)
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_every_kind_of_jpeg_is_read(options: dict[str, object], mode: str) -> None:
    assert read_header(made("JPEG", picture(mode=mode), **options)) == ImageHeader("jpeg", 67, 45)


@pytest.mark.parametrize("marker", [*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)])
def test_every_frame_header_counts(marker: int) -> None:
    data = made("JPEG").replace(b"\xff\xc0", bytes([0xFF, marker]))
    assert read_header(data) == ImageHeader("jpeg", 67, 45)


@pytest.mark.parametrize("marker", [0xC4, 0xC8, 0xCC, 0xDB, 0xFE])
def test_tables_are_no_frame_headers(marker: int) -> None:
    table = segment(marker, b"\x08\x01\x00\x01\x00" + b"\0" * 10)
    assert read_header(with_segments(made("JPEG"), table)) == ImageHeader("jpeg", 67, 45)


@pytest.mark.parametrize(
    "between", [b"\xff" * 5, b"\0", b"junk", b"\xff\0", b"\xff\x01", b"\xff\xd8", b"\xff\0" * 1000]
)
def test_what_lies_between_segments_is_passed_over(between: bytes) -> None:
    data = made("JPEG")
    frame = data.index(b"\xff\xc0")
    for at in (2, frame):
        assert read_header(data[:at] + between + data[at:]) == ImageHeader("jpeg", 67, 45)


def test_a_long_run_of_fill_bytes_costs_one_pass() -> None:
    data = b"\xff\xd8" + b"\xff" * 4_000_000
    with pytest.raises(BrokenImageError, match="frame"):
        read_header(data)


@pytest.mark.parametrize(
    "rest", [b"\0", b"\r\n", b"\0" * 5000, random.Random(1).randbytes(200_000), b"\xff\xd8\xff\xe0"]
)
def test_what_follows_the_end_of_a_jpeg_does_not_matter(rest: bytes) -> None:
    assert read_header(made("JPEG") + rest).complete


def test_the_end_of_a_thumbnail_is_not_the_images() -> None:
    thumbnail = segment(0xE1, exif(1) + made("JPEG", picture(8, 8)))
    data = with_segments(made("JPEG"), thumbnail)
    start = data.index(b"\xff\xda", len(thumbnail))
    assert read_header(data).complete
    for kept in (start - 1, start + 2, start + 30, len(data) - 1):
        assert read_header(data[:kept]) == ImageHeader("jpeg", 67, 45, complete=False)


def test_a_jpeg_whose_height_is_said_later_or_never_is_broken() -> None:
    data = bytearray(made("JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 7] = b"\0\0"
    with pytest.raises(BrokenImageError, match="height"):
        read_header(data)
    with pytest.raises(BrokenImageError, match="frame"):
        read_header(made("JPEG").replace(b"\xff\xc0", b"\xff\xfe"))


def test_real_photographs_are_read_as_a_decoder_reads_them(blood_cells: Path) -> None:
    files = sorted((blood_cells / "JPEGImages").glob("*.jpg"))
    assert len(files) > 300
    for file in files:
        data = file.read_bytes()
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        assert read_header(data) == ImageHeader("jpeg", width, height)
        assert not read_header(data[:-1000]).complete


# --- the others ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"lossless": True}, {"quality": 50}, {"exif": exif(1)}, {"icc_profile": b"x" * 99}]
)
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_every_kind_of_webp_is_read(options: dict[str, object], mode: str) -> None:
    for size in ((67, 45), (1, 16383), (300, 257)):
        assert read_header(made("WEBP", picture(*size, mode=mode), **options)) == ImageHeader("webp", *size)


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_adobe_deflate", "jpeg"])
@pytest.mark.parametrize("big", [False, True])
def test_every_kind_of_tiff_is_read(compression: str | None, big: bool) -> None:
    data = made("TIFF", compression=compression, big_tiff=big)
    assert read_header(data) == ImageHeader("tiff", 67, 45)
    assert read_header(made("TIFF", save_all=True, append_images=[picture(9, 9)])) == ImageHeader("tiff", 67, 45)


def test_a_tiff_of_the_other_byte_order_is_read() -> None:
    entries = [(256, 3, 1, 67 << 16), (257, 4, 1, 45), (273, 4, 1, 8), (274, 3, 1, 6 << 16), (279, 4, 1, 4)]
    directory = struct.pack(">H", len(entries)) + b"".join(struct.pack(">HHII", *entry) for entry in entries)
    data = b"MM\0*" + struct.pack(">I", 12) + b"data" + directory + b"\0" * 4
    assert read_header(data) == ImageHeader("tiff", 67, 45, 6)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_every_kind_of_bmp_is_read(mode: str) -> None:
    data = made("BMP", picture(mode=mode))
    assert read_header(data) == ImageHeader("bmp", 67, 45)
    downwards = bytearray(data)
    struct.pack_into("<i", downwards, 22, -45)
    assert read_header(downwards) == ImageHeader("bmp", 67, 45)


def test_the_oldest_kind_of_bmp_is_read() -> None:
    data = b"BM" + struct.pack("<IHHI", 26 + 12, 0, 0, 26) + struct.pack("<IHHHH", 12, 2, 1, 1, 24) + b"\0" * 12
    assert read_header(data) == ImageHeader("bmp", 2, 1)


# --- fuzzing ---------------------------------------------------------------------------------------------------------

SEEDS = [
    with_segments(made("JPEG", picture(20, 15)), segment(0xE1, exif(6))),
    made("JPEG", picture(20, 15), progressive=True),
    made("PNG", picture(20, 15), exif=exif(6)),
    made("GIF", picture(20, 15)),
    made("BMP", picture(20, 15)),
    made("WEBP", picture(20, 15), exif=exif(6)),
    made("WEBP", picture(20, 15), lossless=True),
    made("TIFF", picture(20, 15)),
    made("TIFF", picture(20, 15), big_tiff=True),
]


def reads_or_refuses(data: bytes) -> None:
    try:
        header = read_header(data)
    except BrokenImageError as error:
        if not error.message:
            raise
        return
    assert header.width > 0
    assert header.height > 0
    assert 1 <= header.orientation <= 8
    assert header.format.upper() in FORMATS


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=4), st.integers(0, 6)), max_size=4),
)
def test_damaged_images_are_read_or_refused(seed: bytes, damages: list[tuple[int, bytes, int]]) -> None:
    data = bytearray(seed)
    for at, new, removed in damages:
        data[at : at + removed] = new
    reads_or_refuses(bytes(data))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(
        [
            b"",
            b"\xff\xd8",
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
            b"BM",
            b"GIF89a",
            b"RIFF\0\0\0\0WEBPVP8X",
            b"II*\0",
            b"MM\0+",
        ]
    ),
    st.binary(max_size=100),
)
@example(b"MM\0+", b"\0\x08\0\0" + b"\xff" * 8)
@example(b"II*\0", b"\xff\xff\xff\xff")
def test_random_bytes_are_read_or_refused(magic: bytes, data: bytes) -> None:
    reads_or_refuses(magic + data)
