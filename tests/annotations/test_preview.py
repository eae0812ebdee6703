"""Previews: boxes where they belong, in the colours of their classes, on any image, and the same each time."""

from __future__ import annotations

import io
import math
import os
import pwd
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datacache.annotations.comparing.changes import compare
from datacache.annotations.model import Annotation, Box
from datacache.annotations.pictures import draw as fonts
from datacache.annotations.pictures.draw import BASE, BEFORE, DARK, _Tags, colours_of, draw_boxes, ink_on, mix
from datacache.annotations.pictures.preview import BROKEN, PAPER, TILE, Picture, preview, thumbnail
from datacache.annotations.shapes import mask
from datacache.annotations.shapes.outline import Extra, Keypoints, Polygon, Rotated, Skeleton, pack, polygon_of
from datacache.core.errors import BrokenImageError
from tests.annotations.tables import box, broken, build, image
from tests.conftest import ROOT

BLUE = (20, 40, 200)
COLOURS = {"mask": (230, 159, 0), "bare": (0, 158, 115)}


def photo(width: int = 400, height: int = 300, colour=BLUE, *, mode: str = "RGB", format: str = "PNG", **more) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (width, height), colour).save(out, format, **more)
    return out.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def note(width: int, height: int, *boxes: Box, labels: tuple[str, ...] = ()) -> Annotation:
    return Annotation("a.jpg", width, height, boxes, labels, "a.xml")


def at_tile(data: bytes) -> Image.Image:
    """The image's place in a preview of one image with tiles of 400 by 300, without heading."""
    return opened(data).crop((24, 24, 424, 324))


# --- where boxes are -------------------------------------------------------------------------------------------------


def test_a_box_has_its_colour_on_its_edges_and_nothing_inside():
    annotation = note(400, 300, box("mask", 100, 100, 200, 180))
    tile = at_tile(preview([Picture("a.jpg", photo(), annotation)], colours=COLOURS, tile=(400, 300)))
    for x, y in ((100, 140), (199, 140), (102, 140), (150, 100), (150, 179), (150, 177)):
        assert tile.getpixel((x, y)) == COLOURS["mask"], (x, y)
    for x, y in ((99, 140), (200, 140), (150, 180), (103, 140), (150, 176)):
        assert tile.getpixel((x, y)) == DARK, (x, y)
    for x, y in ((150, 140), (104, 140), (98, 140), (150, 182), (300, 250)):
        assert tile.getpixel((x, y)) == BLUE, (x, y)


SQUARE = [100, 100, 200, 100, 200, 180, 100, 180]
HOLE = [130, 120, 170, 120, 170, 160, 130, 160]
WITH_HOLE = polygon_of([pack(SQUARE), pack(HOLE)], 2)


@pytest.mark.parametrize("size", [(400, 300), (800, 600)])
@pytest.mark.parametrize("outline", [WITH_HOLE, mask.fill(WITH_HOLE, 400, 300), Rotated(pack(SQUARE))])
def test_an_outline_is_an_area_that_is_seen_through_with_a_line_around_it(outline, size: tuple[int, int]):
    annotation = note(400, 300, box("mask", 90, 90, 300, 200)._replace(extra=Extra(outline)))
    tile = at_tile(preview([Picture("a.jpg", photo(*size), annotation)], colours=COLOURS, tile=(400, 300)))
    within = mix(BLUE, COLOURS["mask"], 0.35)
    hole = within if isinstance(outline, Rotated) else BLUE
    for place, colour in {
        (101, 140): COLOURS["mask"], (198, 140): COLOURS["mask"], (115, 140): within, (185, 170): within,
        (150, 140): hole, (97, 140): BLUE, (204, 140): BLUE, (91, 150): BLUE, (150, 184): BLUE,
    }.items():  # fmt: skip
        assert tile.getpixel(place) == pytest.approx(colour, abs=2), place


def test_what_cannot_be_drawn_of_an_outline_is_left_out():
    nowhere = [Polygon(b""), Polygon(pack([math.nan] * 6)), Polygon(pack([-90, -90, -50, -90, -50, -50]))]
    nowhere += [mask.from_runs([400 * 300], 400, 300), Polygon(pack([10, 10]))]
    boxes = [box("mask", 10, 10, 20, 20)._replace(extra=Extra(outline)) for outline in nowhere]
    tile = at_tile(preview([Picture("a.jpg", photo(), note(400, 300, *boxes))], colours=COLOURS, tile=(400, 300)))
    assert tile.getpixel((200, 150)) == BLUE


def test_keypoints_are_dots_joined_by_their_skeleton_and_hidden_ones_have_a_dark_middle():
    points = Keypoints(pack([100, 100, 200, 100, 200, 200, 300, 250]), bytes([2, 1, 2, 0]))
    annotation = note(400, 300, box("mask", 90, 90, 310, 260)._replace(extra=Extra(keypoints=points)))
    skeleton = Skeleton(("a", "b", "c", "d"), ((0, 1), (1, 2), (2, 3), (0, 9)))
    tiles = [
        at_tile(preview([Picture("a.jpg", photo(), annotation)], colours=COLOURS, tile=(400, 300), skeletons=known))
        for known in ({"mask": skeleton}, {})
    ]
    for tile in tiles:
        assert tile.getpixel((100, 100)) == tile.getpixel((203, 100)) == tile.getpixel((91, 150)) == COLOURS["mask"]
        assert tile.getpixel((200, 100)) == DARK
        assert tile.getpixel((300, 250)) == tile.getpixel((250, 225)) == BLUE
    assert [tile.getpixel((150, 100)) for tile in tiles] == [COLOURS["mask"], BLUE]


def test_a_caption_counts_objects_where_not_all_are_boxes():
    def caption(*extras: Extra | None) -> bytes:
        boxes = [box("mask", 10, 10, 20, 20)._replace(extra=extra) for extra in extras]
        drawn = preview([Picture("a.jpg", photo(), note(400, 300, *boxes))], colours=COLOURS, tile=(400, 300))
        return Image.open(io.BytesIO(drawn)).crop((0, 326, 448, 366)).tobytes()

    outlined = [Extra(Rotated(pack(SQUARE))), Extra(keypoints=Keypoints(pack([1, 1]), b"\2"))]
    assert caption(outlined[0]) == caption(outlined[1]) != caption(None) == caption(Extra(track=1))
    assert caption(outlined[0], None) == caption(*outlined) != caption(None, None)


def test_a_box_lies_in_the_same_place_in_a_smaller_and_a_larger_picture():
    annotation = note(1600, 1200, box("mask", 400, 400, 800, 720))
    for size in ((1600, 1200), (200, 150)):
        data = preview([Picture("a.jpg", photo(*size), annotation)], colours=COLOURS, tile=(400, 300))
        tile = at_tile(data)
        assert tile.getpixel((100, 140)) == tile.getpixel((199, 140)) == tile.getpixel((150, 179)) == COLOURS["mask"]
        assert tile.getpixel((150, 140)) == BLUE


def test_an_image_of_another_shape_is_centred_in_its_tile():
    annotation = note(100, 300, box("mask", 10, 100, 90, 200))
    tile = at_tile(preview([Picture("a.jpg", photo(100, 300), annotation)], colours=COLOURS, tile=(400, 300)))
    assert tile.getpixel((149, 50)) == TILE
    assert tile.getpixel((150, 50)) == BLUE
    assert tile.getpixel((249, 50)) == BLUE
    assert tile.getpixel((250, 50)) == TILE
    assert tile.getpixel((160, 150)) == COLOURS["mask"]


def test_a_difficult_box_is_dashed():
    tile = at_tile(
        preview(
            [Picture("a.jpg", photo(), note(400, 300, box("mask", 100, 100, 200, 180, difficult=True)))],
            colours=COLOURS,
            tile=(400, 300),
        )
    )
    edge = [tile.getpixel((x, 179)) for x in range(100, 200)]
    assert edge[:7] == [COLOURS["mask"]] * 7
    assert edge[7:12] == [DARK] * 5
    assert edge[12] == COLOURS["mask"]


@pytest.mark.parametrize("outline", [WITH_HOLE, Rotated(pack(SQUARE))])
def test_the_outline_of_a_difficult_object_is_dashed(outline):
    annotation = note(400, 300, box("mask", 90, 90, 300, 200, difficult=True)._replace(extra=Extra(outline)))
    tile = at_tile(preview([Picture("a.jpg", photo(), annotation)], colours=COLOURS, tile=(400, 300)))
    for edge in ([(x, 178) for x in range(103, 197)], [(101, y) for y in range(103, 177)]):
        assert {tile.getpixel(place) for place in edge} == {COLOURS["mask"], DARK}


def test_boxes_of_before_are_thin_and_grey_and_below_those_of_today():
    before = note(400, 300, box("mask", 40, 100, 90, 180), box("mask", 100, 100, 200, 180))
    now = note(400, 300, box("bare", 100, 100, 200, 180))
    tile = at_tile(preview([Picture("a.jpg", photo(), now, before)], colours=COLOURS, tile=(400, 300)))
    assert tile.getpixel((40, 140)) == BEFORE
    assert tile.getpixel((41, 140)) == tile.getpixel((39, 140)) == DARK
    assert tile.getpixel((42, 140)) == BLUE
    assert tile.getpixel((100, 140)) == COLOURS["bare"]
    gone = at_tile(preview([Picture("a.jpg", photo(), None, before)], tile=(400, 300)))
    assert gone.getpixel((100, 140)) == BEFORE


def test_a_box_that_was_relabelled_or_is_gone_shows_its_old_label():
    shown: list[str] = []

    def drawn(new: tuple[Box, ...], old: tuple[Box, ...]) -> list[str]:
        shown.clear()
        draw_boxes(Image.new("RGB", (400, 400)), note(400, 400, *new), note(400, 400, *old), colours_of(["a", "b"]), 14)
        return sorted(shown)

    add = _Tags.add_beside
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Tags, "add_beside", lambda self, label, *rest: (shown.append(label), add(self, label, *rest)))
        here, there = Box("a", 10, 10, 50, 50), Box("a", 60, 60, 90, 90)
        assert drawn((here._replace(label="b"),), (here,)) == ["a → b"]
        assert drawn((here,), (here, there)) == ["a", "a"]
        assert drawn((here,), (here,)) == ["a"]


def test_the_smaller_box_is_drawn_above_the_larger():
    boxes = box("mask", 100, 100, 120, 120), box("bare", 50, 50, 119, 250)
    for order in (boxes, boxes[::-1]):
        tile = at_tile(preview([Picture("a.jpg", photo(), note(400, 300, *order))], colours=COLOURS, tile=(400, 300)))
        assert tile.getpixel((118, 110)) == COLOURS["mask"]


@pytest.mark.parametrize("sides", [(0, 0, 400, 300), (399.9, 299.9, 400, 300), (0, 0, 0.2, 0.2), (0, 150, 400, 150.1)])
def test_boxes_at_the_edge_and_of_almost_no_size_are_drawn(sides):
    image = Image.new("RGB", (400, 300), BLUE)
    draw_boxes(image, note(400, 300, box("mask", *sides)), None, COLOURS, 14)
    assert COLOURS["mask"] in {colour for _, colour in image.getcolors(1_000_000)}


def test_labels_stand_beside_boxes_and_never_above_each_other():
    crowd = [box("mask", x, y, x + 60, y + 50) for x in range(0, 400, 50) for y in range(0, 300, 60)]
    image = Image.new("RGB", (400, 300), BLUE)
    draw_boxes(image, note(400, 300, *crowd[:30]), None, COLOURS, 14)
    one = Image.new("RGB", (400, 300), BLUE)
    draw_boxes(one, note(400, 300, box("mask", 100, 100, 200, 180)), None, COLOURS, 14)
    tag = [y for y in range(300) if one.getpixel((101, y)) == COLOURS["mask"] and y < 98]
    assert tag[-1] < 100 <= tag[0] + 30


def test_a_label_of_the_whole_image_is_in_its_corner():
    tile = at_tile(
        preview([Picture("a.jpg", photo(), note(400, 300, labels=("bare",)))], colours=COLOURS, tile=(400, 300))
    )
    assert tile.getpixel((4, 4)) == COLOURS["bare"]


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_the_grid_has_a_tile_for_each_picture():
    pictures = [Picture(f"{n}.png", photo(colour=(n * 20, 0, 99)), note(400, 300)) for n in range(7)]
    page = opened(preview(pictures, columns=3, tile=(100, 75)))
    for n in range(7):
        row, column = divmod(n, 3)
        assert page.getpixel((24 + column * 116 + 50, 24 + row * (75 + 42 + 16) + 37)) == (n * 20, 0, 99)
    assert page.getpixel((24 + 116 + 50, 24 + 2 * 133 + 37)) == PAPER


def test_tiles_have_the_shape_that_most_images_have_and_the_page_stays_readable():
    def page(count: int, width: int, height: int) -> tuple[int, int]:
        return opened(preview([Picture("a", photo(8, 8), note(width, height))] * count)).size

    assert page(16, 640, 480)[0] == page(16, 480, 640)[0] == 24 * 2 + 4 * 416 - 16
    assert page(16, 480, 640)[1] > page(16, 640, 480)[1]
    assert page(100, 640, 480)[0] < 1_900


def test_the_same_pictures_give_the_same_bytes():
    pictures = [Picture("a.jpg", photo(), note(400, 300, box("mask"), box("bare", 50, 50, 90, 90)))] * 5
    assert preview(pictures, title="mask@v1", subtitle="5 images") == preview(
        pictures, title="mask@v1", subtitle="5 images"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image",
        photo()[:60],
        photo(format="JPEG")[:400],
        photo(format="JPEG")[:-200],
        b"\x89PNG\r\n\x1a\n" * 9,
        None,
    ],
    ids=["empty", "text", "png cut in header", "jpeg cut in header", "jpeg cut", "garbage", "none"],
)
def test_a_broken_image_is_a_tile_that_says_so(data):
    if data is not None and data.startswith(b"\xff\xd8") and len(data) > 400:
        data = photo(1200, 900, format="JPEG")[:3000]
    page = opened(preview([Picture("a.jpg", data, note(400, 300)), Picture("b.jpg", photo())], tile=(400, 300)))
    colours = {colour for _, colour in page.crop((24, 24, 424, 324)).getcolors(1_000_000)}
    assert BROKEN in colours
    assert BLUE not in colours
    assert page.getpixel((24 + 416 + 200, 174)) == BLUE


@pytest.mark.parametrize(
    "name",
    [
        "戴口罩.jpg",
        "без маски.jpg",
        "a" * 300 + ".jpg",
        "\udcff\udcfe.jpg",
        "a\nb\x1b[31m.jpg",
        "",
        "قناع.jpg",
        "😷.jpg",
    ],
)
def test_names_and_labels_in_any_script_and_of_any_length_are_drawn(name):
    annotation = note(400, 300, box(name or "x", 100, 100, 300, 250), labels=(name,))
    page = opened(preview([Picture(name, photo(), annotation, note=name)], title=name, subtitle=name, tile=(400, 300)))
    assert page.width == 24 * 2 + 400


def test_the_legend_has_the_classes_of_the_pictures():
    annotation = note(400, 300, *[box(f"class {n}", 100, 100, 300, 250) for n in range(60)])
    short = opened(preview([Picture("a", photo(), note(400, 300, box("class 1")))], tile=(400, 300)))
    long = opened(preview([Picture("a", photo(), annotation)], tile=(400, 300)))
    assert long.width == short.width
    assert long.height > short.height + 200
    swatches = {long.getpixel((30, y)) for y in range(390, long.height)}
    assert len(swatches - {PAPER}) >= 15


# --- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int):
    upright = Image.new("RGB", (80, 40), BLUE)
    upright.paste((250, 10, 10), (0, 0, 20, 10))  # red in the upper left corner of what is displayed
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Image.Transpose that the orientation takes back
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    stored.save(out, "JPEG", exif=exif, quality=95)
    shown = thumbnail(out.getvalue(), 80, 80)
    assert shown.size == (80, 40)
    red, _, blue = shown.getpixel((5, 4))
    assert red > 180 > 90 > blue
    assert shown.getpixel((70, 30))[2] > 150


@pytest.mark.parametrize(
    ("mode", "colour", "format", "expected"),
    [
        ("L", 100, "PNG", (100, 100, 100)),
        ("1", 1, "PNG", (255, 255, 255)),
        ("P", 3, "PNG", None),
        ("RGBA", (10, 20, 30, 255), "PNG", (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), "PNG", (255, 255, 255)),
        ("LA", (50, 255), "PNG", (50, 50, 50)),
        ("CMYK", (0, 0, 0, 255), "TIFF", (0, 0, 0)),
        ("I;16", 30_000, "PNG", (0, 0, 0)),
        ("F", 0.5, "TIFF", (0, 0, 0)),
        ("RGB", BLUE, "WEBP", None),
        ("RGB", BLUE, "BMP", BLUE),
        ("RGB", BLUE, "GIF", None),
    ],
)
def test_images_of_every_mode_and_format_become_rgb(mode, colour, format, expected):
    shown = thumbnail(photo(64, 48, colour, mode=mode, format=format), 32, 32)
    assert (shown.mode, shown.size) == ("RGB", (32, 24))
    if expected is not None:
        assert shown.getpixel((16, 12)) == expected


def test_sixteen_bits_are_spread_from_black_to_white():
    deep = Image.new("I;16", (64, 64), 1_000)
    deep.paste(3_000, (32, 0, 64, 64))
    out = io.BytesIO()
    deep.save(out, "PNG")
    shown = thumbnail(out.getvalue(), 64, 64)
    assert (shown.getpixel((5, 5)), shown.getpixel((60, 5))) == ((0, 0, 0), (255, 255, 255))


@pytest.mark.parametrize(
    ("size", "expected"), [((4000, 10), (100, 1)), ((1, 1), (4, 4)), ((50, 100), (50, 100)), ((3, 9000), (1, 100))]
)
def test_thumbnails_fit_keep_their_aspect_and_are_not_blown_up(size, expected):
    assert thumbnail(photo(*size), 100, 100).size == expected


def test_too_large_an_image_is_broken_and_not_decoded():
    out = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(out, "PNG")
    with pytest.raises(BrokenImageError, match="exceeds"):
        thumbnail(out.getvalue(), 100, 100)


# --- colours and fonts -----------------------------------------------------------------------------------------------


def test_a_class_keeps_its_colour_when_others_come_and_go():
    names = [f"class {n}" for n in range(200)]
    alone = {name: colours_of([name])[name] for name in names}
    assert set(alone.values()) == set(BASE)
    assert colours_of(["mask", "bare"]) == colours_of(["bare", "mask"])
    kept = sum(colours_of([name, "no_mask"])[name] == alone[name] for name in names)
    assert kept > 150


@pytest.mark.parametrize("count", [2, 7, 8, 21, 35])
def test_up_to_thirty_five_classes_have_colours_that_differ(count):
    colours = colours_of([f"class {n}" for n in range(count)])
    assert len(set(colours.values())) == count
    if count <= 7:
        assert set(colours.values()) <= set(BASE)


def test_the_seven_colours_stay_apart_for_those_who_see_no_red_green_or_blue():
    """Machado, Oliveira and Fernandes (2009), severity 1, on linear values; distances in plain RGB."""
    sights = {
        "protan": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
        "deutan": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
        "tritan": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
    }
    for matrix in sights.values():
        seen = [
            [sum(m * (c / 255) ** 2.2 for m, c in zip(row, colour, strict=True)) for row in matrix] for colour in BASE
        ]
        shown = [[255 * max(0, min(1, v)) ** (1 / 2.2) for v in values] for values in seen]
        for n, a in enumerate(shown):
            for b in shown[:n]:
                assert sum((p - q) ** 2 for p, q in zip(a, b, strict=True)) ** 0.5 > 25


def test_ink_on_a_colour_can_be_read():
    assert ink_on((255, 255, 0)) == (0, 0, 0)
    assert ink_on((0, 0, 128)) == (255, 255, 255)
    assert mix((0, 100, 200), (255, 255, 255), 0.5) == (128, 178, 228)


def test_what_no_font_can_draw_is_written_with_escapes():
    face, text = fonts.for_text("x\ue123y")
    assert face.draws(text)
    assert text == "x\\ue123y"
    assert fonts.for_text("a\x1bb")[1] == "a\\x1bb"
    assert fonts.for_text("no_mask") == (fonts.OWN, "no_mask")


# --- what changed ----------------------------------------------------------------------------------------------------


def test_images_that_are_annotated_otherwise_are_found_and_no_others():
    before = [
        image("1.jpg", box("mask", line=3)),
        image("2.jpg", box("mask")),
        image("3.jpg", box("mask"), box("bare", 1, 1, 9, 9)),
        image("4.jpg", box("mask")),
        broken("5.jpg"),
        broken("6.jpg"),
        image("7.jpg", labels=("a", "b")),
        image("8.jpg", box("mask", 10, 20, 30, 60)),
        image("9.jpg", box("mask")),
    ]
    after = [
        image("0.jpg"),
        image("1.jpg", box("mask", line=9)),
        image("2.jpg", box("bare")),
        image("3.jpg", box("bare", 1, 1, 9, 9), box("mask")),
        image("4.jpg", box("mask", difficult=True)),
        image("5.jpg"),
        broken("6.jpg"),
        image("7.jpg", labels=("b", "a")),
        image("8.jpg", box("mask", 10.004, 20, 30, 59.996)),
        image("9.jpg", box("mask"), size=(320, 240)),
        image("z.jpg"),
    ]
    found = [(c.path, c.before is not None, c.after is not None) for c in compare(build(before), build(after))]
    assert found == [
        ("0.jpg", False, True),
        ("2.jpg", True, True),
        ("4.jpg", True, True),
        ("5.jpg", True, True),
        ("9.jpg", True, True),
        ("z.jpg", False, True),
    ]
    back = [(c.path, c.before is not None, c.after is not None) for c in compare(build(after), build(before))]
    assert back == [(path, is_after, was_before) for path, was_before, is_after in found]


def test_comparing_reads_the_ranges_that_are_not_the_same():
    from tests.annotations.tables import Blobs

    rows = [image(f"{n:05}.jpg", box("mask")) for n in range(3_000)]
    blobs = Blobs()
    before = build(rows, blobs=blobs)
    rows[1_234] = image("01234.jpg")
    after = build(rows, blobs=blobs)
    blobs.loaded.clear()
    assert [change.path for change in compare(before, after)] == ["01234.jpg"]
    assert len(blobs.loaded) == 4


def test_a_user_without_a_home_has_the_fonts_of_the_machine(monkeypatch):
    monkeypatch.setenv("HOME", "/nowhere")
    known = fonts._files.__wrapped__()

    def no_line(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", no_line)
    assert fonts._files.__wrapped__() == known


def test_the_picture_of_the_document_is_what_its_script_draws(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "draw_kinds.py", tmp_path / "kinds.png"],
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    pictures = [np.array(Image.open(path / "kinds.png"), int) for path in (tmp_path, ROOT / "docs" / "images")]
    assert np.abs(pictures[0] - pictures[1]).mean() < 1  # fonts and Pillow may differ a little
