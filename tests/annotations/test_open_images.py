"""CSV files of Open Images: boxes, labels of images, names of classes."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from datacache import api
from datacache.annotations.formats import json_stream, open_images
from datacache.annotations.formats.mask_images import files_of, with_masks, write_mask
from datacache.annotations.layout import detect
from datacache.annotations.model import Annotation, Box, Draft
from datacache.annotations.pairing import is_image, is_object_mask
from datacache.annotations.shapes.mask import decode, encode
from datacache.annotations.shapes.outline import Extra, Mask
from datacache.core.errors import AnnotationError
from datacache.settings import Settings
from tests.annotations.folders import Folder
from tests.annotations.shapes import bitmaps, cases

# As on the page "Data Formats" of Open Images V7.
BOXES = """ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,IsInside
000026e7ee790996,activemil,/m/07j7r,1,0.071905,0.145346,0.206591,0.391306,0,1,1,0,0
000026e7ee790996,xclick,/m/01yrx,1,0.439756,0.572466,0.264153,0.435122,1,-1,0,0,-1
000062a39995e348,xclick,/m/0unlisted,0.5,0.205719,0.849912,0.154144,1,0,0,0,1,0
"""
LABELS = """ImageID,Source,LabelName,Confidence
000026e7ee790996,verification,/m/01yrx,1
000026e7ee790996,verification,/m/07j7r,0
fffc6543b32da1dd,machine,"/m/odd, one",1
"""
CLASSES = '/m/07j7r,Tree\n/m/01yrx,"Cat, domestic"\n'
NAMES = {"/m/07j7r": "Tree", "/m/01yrx": "Cat, domestic"}


MASKS = """MaskPath,ImageID,LabelName,BoxID,BoxXMin,BoxXMax,BoxYMin,BoxYMax,PredictedIoU,Clicks
000026e7ee790996_m01yrx_5e4b1e1d.png,000026e7ee790996,/m/01yrx,5e4b1e1d,0.439756,0.572466,0.264153,0.435122,0.8,0 1 1
"""


def parse(text: str) -> tuple[dict[str, Annotation], list[tuple[str, str, int]]]:
    """The annotations of images of 1000 by 100 pixels, and problems."""
    found = open_images.parse(text.encode(), "f.csv", NAMES)
    images = {}
    for draft, _ in found.images:
        assert draft.relative == len(draft.boxes)
        scaled = open_images.scaled(draft, 1000, 100)
        images[draft.name] = Annotation(draft.name, 1000, 100, scaled.boxes, scaled.labels)
    problems = [*found.problems, *(problem for _, its in found.images for problem in its)]
    return images, [(problem.code, problem.action, problem.line) for problem in problems]


def test_boxes_are_parts_of_the_image_with_flags_and_attributes() -> None:
    images, problems = parse(BOXES)
    assert problems == []
    tree, cat = images["000026e7ee790996"].boxes
    edges = 0.071905 * 1000, 0.206591 * 100, 0.145346 * 1000, 0.391306 * 100
    assert tree == Box(
        "Tree", *edges, truncated=True, attributes=(("IsGroupOf", "1"),), line=2, extra=Extra(author="activemil")
    )
    assert (cat.label, cat.occluded, cat.truncated, cat.extra) == ("Cat, domestic", True, False, None)
    assert cat.attributes == (("IsInside", "-1"), ("IsTruncated", "-1"))
    (other,) = images["000062a39995e348"].boxes
    assert (other.label, other.extra, other.y2) == ("/m/0unlisted", Extra(score=0.5), 100)


@pytest.mark.parametrize("confidence", ["nan", "inf", "sure"])
def test_a_confidence_that_is_no_number_is_an_attribute(confidence: str) -> None:
    images, problems = parse(f"ImageID,LabelName,Confidence,XMin,XMax,YMin,YMax\na,cat,{confidence},0,1,0,1\n")
    (cat,) = images["a"].boxes
    assert (cat.attributes, cat.extra, problems) == ((("Confidence", confidence),), None, [])


def test_labels_of_confidence_0_are_none_of_the_image() -> None:
    images, problems = parse(LABELS)
    assert {name: image.labels for name, image in images.items()} == {
        "000026e7ee790996": ("Cat, domestic",),
        "fffc6543b32da1dd": ("/m/odd, one",),
    }
    assert problems == [("label-absent", "noted", 0)]
    again, problems = parse(LABELS.replace(",0\n", ",0.7\n").replace("1\n", "?\n"))
    assert again["000026e7ee790996"].labels == ("Cat, domestic", "Tree")
    assert problems == [("label-unsure", "noted", 0)]


def test_names_of_classes_are_read_with_a_head_or_without() -> None:
    assert open_images.parse_classes(CLASSES.encode(), "f") == (NAMES, [])
    assert open_images.parse_classes(b"\xef\xbb\xbfLabelName,DisplayName\r\n\n" + CLASSES.encode(), "f") == (NAMES, [])
    assert open_images.identifiers({"/m/1": " a", "/m/2": "b", "/m/3": "a"}) == {"b": "/m/2", "a": "/m/1"}


def test_lines_that_name_no_class_are_left_out_with_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AnnotationError, match="f is neither UTF-8"):
        open_images.parse_classes(b"\xff\xff", "f")
    monkeypatch.setattr(json_stream, "MAX_ELEMENT", 100)
    names, problems = open_images.parse_classes(f"a\n{'x' * 200},y\n{CLASSES}b,c,d\n".encode(), "f")
    assert names == NAMES
    assert [(problem.code, problem.line) for problem in problems] == [("line-malformed", 2), ("line-malformed", 1)]
    monkeypatch.setattr(open_images, "MAX_CLASSES", 1)
    names, problems = open_images.parse_classes(CLASSES.encode(), "f")
    assert (names, [problem.line for problem in problems]) == ({"/m/07j7r": "Tree"}, [2])


def test_rows_of_one_image_are_taken_together_wherever_they_are() -> None:
    head, tree, cat, other = BOXES.splitlines()
    found = open_images.parse("\n".join([head, *(tree, other, cat, other, tree)]).encode(), "f", NAMES)
    assert [(draft.name, draft.line, [box.line for box in draft.boxes]) for draft, _ in found.images] == [
        ("000026e7ee790996", 2, [2, 4, 6]),
        ("62a39995e348".rjust(16, "0"), 3, [3, 5]),
    ]
    assert list(found.images) == list(found.images)


def test_what_is_wrong_is_left_out_with_its_line() -> None:
    head, row, *_ = BOXES.splitlines()
    text = "\n".join(("\ufeff" + head, row + ",1", "", row.replace("0.071905", "x"), "a,b"))
    images, problems = parse(text)
    assert problems == [
        ("line-malformed", "skipped", 2),
        ("line-malformed", "skipped", 5),
        ("box-text", "skipped", 4),
    ]
    assert images["000026e7ee790996"].boxes == ()
    assert parse(f'{head}\n"{"x" * 200_000}"\n{row}\n')[1] == [("line-malformed", "skipped", 2)]
    for text, code in ((head.replace("YMin", "Y"), "line-malformed"), ("ImageID,XMin\n", "line-malformed")):
        with pytest.raises(AnnotationError) as refused:
            parse(text)
        assert refused.value.code == code
    with pytest.raises(AnnotationError):
        open_images.parse(b"\xff\xff", "f.csv", {})


parts = st.integers(0, 10**9).map(lambda n: n / 10**9) | st.integers(0, 10**6).map(lambda n: n / 10**6)
flags = st.sampled_from(["0", "1", "-1"])
rows = st.tuples(
    st.sampled_from(["xclick", "activemil", ""]), st.sampled_from(["Tree", "a,b", "c"]), *[parts] * 4, *[flags] * 5
)


@cases
@given(st.lists(rows, max_size=4), st.integers(1, 5000), st.integers(1, 5000))
def test_any_boxes_are_the_same_there_and_back(drawn: list[tuple[str, ...]], width: int, height: int) -> None:
    boxes = []
    for n, (author, label, x1, x2, y1, y2, *more) in enumerate(drawn, 2):
        cells = ["a", author, label, "1", *(f"{float(value):.9f}".rstrip("0") for value in (x1, x2, y1, y2)), *more]
        row = dict(zip(open_images._BOX_COLUMNS, cells, strict=True))
        edges = [float(row[side]) for side in open_images._SIDES]
        boxes.append((open_images._box(label, edges, row, n), [float(value) for value in cells[4:8]], more))
    draft = Draft("f", boxes=tuple(box for box, _, _ in boxes), relative=len(boxes))
    annotation = Annotation("a", width, height, open_images.scaled(draft, width, height).boxes)
    data = b"".join(open_images.write_boxes([annotation], {}))
    found = open_images.parse(data, "f", {})
    assert [draft.boxes for draft, _ in found.images] == ([tuple(box for box, _, _ in boxes)] if boxes else [])
    again = [open_images.scaled(draft, width, height).boxes for draft, _ in found.images]
    assert again == ([annotation.boxes] if boxes else [])
    assert b"".join(open_images.write_boxes([annotation._replace(boxes=again[0] if again else ())], {})) == data


@pytest.mark.parametrize(
    ("path", "is_mask"),
    [
        ("train-masks-0/000026e7ee790996_m01yrx_5e4b1e1d.png", True),
        ("000026e7ee790996_m04_sv_5e4b1e1d.png", True),
        ("x/masks/train/a b/c_c12_n0000000.png", True),
        ("masks/a_m01yrx_5e4b1e1d.png", True),
        ("images/a_m01yrx_5e4b1e1d.png", False),
        ("masks/a_b.png", False),
        ("masks/with_mask_00000001.png.jpg", False),
        ("masks/a_1_20240101.png", False),
    ],
)
def test_masks_are_told_from_images_by_their_names(path: str, is_mask: bool) -> None:
    assert is_object_mask(path.encode()) == is_mask == (not is_image(path.encode()))


def png(pixels: Any, mode: str = "") -> bytes:
    image, file = Image.fromarray(np.array(pixels)), io.BytesIO()
    (image.convert(mode) if mode else image).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "P", "I;16"])
def test_any_pixel_but_0_is_the_object(mode: str) -> None:
    (draft, _), *_ = open_images.parse(MASKS.encode(), "f", {}).images
    assert files_of(draft) == ["000026e7ee790996_m01yrx_5e4b1e1d.png"]
    pixels = [[0, 0, 255], [0, 255, 255]]
    data = png(np.array(pixels, np.uint16)) if mode == "I;16" else png(np.array(pixels, np.uint8), mode)
    found, problems = with_masks(draft, [data], 3, 2)
    mask = found.boxes[0].extra.outline if found.boxes[0].extra else None
    assert isinstance(mask, Mask)
    assert decode(mask, (0, 0, 3, 2)).tolist() == [[0, 0, 1], [0, 1, 1]]
    assert problems == []


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (None, "mask-missing"),
        (b"GIF89a", "mask-broken"),
        (png([[False, False]]), "mask-broken"),
        (png([[True], [True], [True]]), "mask-size"),
    ],
)
def test_a_mask_that_cannot_be_used_leaves_the_box(data: bytes | None, code: str) -> None:
    (draft, _), *_ = open_images.parse((MASKS + MASKS.splitlines()[1]).encode(), "f", {}).images
    found, (problem, *more) = with_masks(draft, [data], 20, 10)
    assert [box.extra for box in found.boxes] == [None, None]
    assert (problem.code, problem.action, problem.line, more) == (code, "repaired", 2, [])


def test_a_mask_of_another_resolution_is_resampled_and_many_pixels_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, row = MASKS.splitlines()
    rows = (row.replace("5e4b1e1d.png", f"{n:08x}.png") for n in range(3))
    (draft, _), *_ = open_images.parse("\n".join([head, *rows]).encode(), "f", {}).images
    monkeypatch.setattr("datacache.annotations.formats.mask_images.MAX_PIXELS", 15)
    large = png([[True, True, False, False], [True, True, False, False]])
    found, problems = with_masks(draft, [large] * 3, 2, 1)
    masks = [box.extra.outline if box.extra else None for box in found.boxes]
    assert masks == [encode(np.array([[True, False]]), 0, 0, 2, 1)] * 2 + [None]
    assert [(problem.code, problem.action) for problem in problems] == [
        ("mask-size", "noted"),
        ("shape-too-large", "repaired"),
    ]


@st.composite
def masked(draw: st.DrawFn) -> Annotation:
    """An image whose objects have masks, or none."""
    first = draw(bitmaps().filter(np.any))
    height, width = first.shape
    boxes = []
    for n in range(draw(st.integers(1, 4))):
        bits = draw(st.lists(st.booleans(), min_size=width * height, max_size=width * height))
        pixels = np.array(bits).reshape(height, width) if n else first
        own = draw(st.sampled_from([(), (("BoxID", "0000000a"),), (("Clicks", "a,b;"), ("PredictedIoU", "0.5"))]))
        outline = encode(pixels, 0, 0, width, height) if pixels.any() else None
        # Two objects of one box are one to every reader.
        edges = [0, 0, width * draw(st.integers(1, 8)) / 8, height * (n + 1) / 8]
        label = draw(st.sampled_from(["a", "b/c", "d\ne"]))
        boxes.append(Box(label, *map(float, edges), attributes=own, extra=Extra(outline) if outline else None))
    ids = [dict(box.attributes).get("BoxID", n) for n, box in enumerate(boxes)]
    assume(len(set(ids)) == len(ids))
    return Annotation("x/y", width, height, tuple(boxes))


@cases
@given(masked())
def test_any_masks_are_the_same_there_and_back(drawn: Annotation) -> None:
    ids = {"a": "/m/01", "d e": "/m/0_2"}
    named, files = open_images.name_masks(drawn, "train/", ids, {})
    assert all(is_object_mask(path.encode()) for path, _ in files)
    assert len(dict(files)) == len(files)
    data = b"".join(open_images.write_masks([named], ids))
    found = open_images.parse(data, "f", {"/m/01": "a", "/m/0_2": "d e"})
    there = {f"{path.removeprefix('masks/')}": write_mask(mask) for path, mask in files}
    again = []
    for draft, problems in found.images:
        scaled = open_images.scaled(draft, drawn.width, drawn.height)
        read, more = with_masks(scaled, [there[name] for name in files_of(scaled)], drawn.width, drawn.height)
        assert problems + more == []
        again += [box._replace(line=0) for box in read.boxes]
    expected = (box._replace(label=box.label.replace("\n", " ")) for box in drawn.boxes if box.extra or box.attributes)
    assert again == list(expected)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200) | st.text(alphabet='a,"\n01.', max_size=80).map(str.encode))
def test_any_bytes_give_drafts_or_our_error(data: bytes) -> None:
    with suppress(AnnotationError):
        open_images.parse_classes(data, "f")
    for begin in (
        b"",
        BOXES.partition("\n")[0].encode() + b"\n",
        LABELS.partition("\n")[0].encode() + b"\n",
        MASKS.partition("\n")[0].encode() + b"\n",
    ):
        try:
            found = open_images.parse(begin + data, "f", {})
        except AnnotationError:
            continue
        assert all(draft.relative == len(draft.boxes) for draft, _ in found.images)


@pytest.mark.parametrize(
    ("name", "text", "format"),
    [
        ("train-annotations-bbox.csv", BOXES, "open-images"),
        ("labels/classifications.csv", LABELS, "open-images"),
        ("train-images-boxable.csv", "ImageID,Subset,OriginalURL\n", "none"),
        ("a.csv", "", "none"),
    ],
)
def test_files_are_known_by_their_columns(name: str, text: str, format: str) -> None:
    folder = Folder({"images/a.jpg": "", name: text})
    assert detect(folder.manifest, folder.read).format == format


def test_a_data_set_is_the_same_there_and_back(tmp_path: Path, settings: Settings) -> None:
    folder = tmp_path / "set"
    for name in ("train/000026e7ee790996", "train/fffc6543b32da1dd", "val/000062a39995e348"):
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (1000, 100)).save(folder / "images" / f"{name}.jpg")
    head, one, two, three = BOXES.splitlines()
    (folder / "train-annotations-bbox.csv").write_text(f"{head}\n{one}\n{two}\n")
    (folder / "validation-annotations-bbox.csv").write_text(f"{head}\n{three}\n")
    (folder / "train-annotations-human-imagelabels.csv").write_text(LABELS)
    (folder / "class-descriptions-boxable.csv").write_text(CLASSES)
    first = api.create_snapshot("first", folder.as_uri(), settings=settings).ref

    def read(ref: str) -> dict[str, tuple[object, ...]]:
        with api.open_annotations(ref, settings=settings, trust_sizes=True) as (_, table):
            return {
                row.path.rpartition("/")[2]: (
                    row.annotation.labels,
                    [box._replace(line=0) for box in row.annotation.boxes],
                )
                for row in table.rows()
                if row.annotation
            }

    done = api.convert(first, to="open-images", name="second", settings=settings, strict=True)
    assert done.report.counts == {"label-absent": 1}
    assert done.report.splits == {"train": 2, "val": 1}
    assert read(done.record.ref) == read(first)
    again = api.convert(done.record.ref, to="open-images", name="third", settings=settings, strict=True)

    def files(ref: str) -> dict[str, bytes]:
        with api.open_snapshot(ref, settings) as snapshot:
            return {path: snapshot.read(path) for path in snapshot.paths() if path.endswith(".csv")}

    assert files(again.record.ref) == files(done.record.ref)
    assert b",xclick,/m/0unlisted,0.5," in files(done.record.ref)["annotations/val-annotations-bbox.csv"]
    classes = files(done.record.ref)["annotations/class-descriptions.csv"].decode()
    assert classes.splitlines()[:2] == CLASSES.splitlines()
    assert (
        ",verification,/m/01yrx,1"
        in files(done.record.ref)["annotations/train-annotations-human-imagelabels.csv"].decode()
    )
    mapped = api.convert(first, to="open-images", name="mapped", settings=settings, rename={"Tree": "plant"})
    assert b"plant,plant\n" in files(mapped.record.ref)["annotations/class-descriptions.csv"]
    coco = api.convert(first, to="coco", name="fourth", settings=settings)
    left = {(problem.code, problem.action) for problem in coco.report.problems}
    # An image that has labels alone says nothing of objects.
    assert left == {("label-absent", "noted"), ("details-left-out", "changed"), ("image-unannotated", "skipped")}


def test_masks_are_read_of_their_images_and_written(tmp_path: Path, settings: Settings) -> None:
    folder = tmp_path / "set"
    for path in ("train/000026e7ee790996", "train/a_c0_n0000000"):
        (folder / "images" / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 20)).save(folder / "images" / f"{path}.png")
    pixels = np.zeros((20, 40), bool)
    pixels[3:9, 18:22] = True
    name = "000026e7ee790996_m01yrx_5e4b1e1d.png"
    (folder / "train-masks-0").mkdir()
    (folder / "train-masks-0" / name).write_bytes(png(pixels))
    (folder / "train-masks-0" / name.replace("5e4b1e1d", "00000000")).write_bytes(png(pixels))
    (folder / "train-annotations-bbox.csv").write_text(BOXES.replace(BOXES.splitlines()[3] + "\n", ""))
    lost = MASKS.splitlines()[1].replace("5e4b1e1d", "ffffffff").replace("0.8", "")
    (folder / "a-train-object-segmentation.csv").write_text(MASKS + lost.replace("0.439756", "0.1"))
    (folder / "class-descriptions.csv").write_text(CLASSES)
    first = api.create_snapshot("masked", folder.as_uri(), settings=settings).ref

    def read(ref: str) -> dict[str, list[Box]]:
        with api.open_annotations(ref, settings=settings) as (_, table):
            return {
                row.path.rpartition("/")[2]: [box._replace(line=0) for box in row.annotation.boxes]
                for row in table.rows()
                if row.annotation
            }

    tree, cat, other = read(first)["000026e7ee790996.png"]
    assert (tree.extra, cat.occluded, cat.extra) == (
        Extra(author="activemil"),
        True,
        Extra(encode(pixels, 0, 0, 40, 20)),
    )
    assert dict(cat.attributes) == {
        **dict.fromkeys(("IsInside", "IsTruncated"), "-1"),
        "BoxID": "5e4b1e1d",
        "PredictedIoU": "0.8",
        "Clicks": "0 1 1",
    }
    assert (other.extra, other.attributes) == (None, (("BoxID", "ffffffff"), ("Clicks", "0 1 1")))
    done = api.convert(first, to="open-images", name="again", settings=settings)
    assert [(problem.code, problem.file) for problem in done.report.problems] == [
        ("image-unannotated", "images/train/a_c0_n0000000.png"),
        ("mask-missing", "train-annotations-bbox.csv"),
        ("not-data", f"train-masks-0/{name.replace('5e4b1e1d', '00000000')}"),
    ]
    assert read(done.record.ref) == {"000026e7ee790996.png": [tree, cat, other]}
    with api.open_snapshot(done.record.ref, settings) as snapshot:
        assert "masks/train/000026e7ee790996_m01yrx_5e4b1e1d.png" in snapshot.paths()
    again = api.convert(done.record.ref, to="open-images", name="third", settings=settings, strict=True)
    assert again.report.problems == []
    yolo = api.convert(first, to="yolo", name="yolo", settings=settings)
    assert {"mask-boxed", "details-left-out"} <= yolo.report.counts.keys()


def test_halves_of_characters_in_attributes_do_not_spoil_the_file() -> None:
    attributes = (("IsGroupOf", "\udcff"), ("PredictedIoU", "\ud800"))
    image = Annotation("a", 1000, 100, (Box("Tree", 1, 1, 9, 9, attributes=attributes),))
    for written in (open_images.write_boxes([image], {}), open_images.write_masks([image], {})):
        assert "\ufffd" in b"".join(written).decode()


def test_a_line_break_in_a_value_begins_no_row() -> None:
    extra = Extra(author="e\nvictim,x,cat,1,0,1,0,1,0,0,0,0,0\r\nz")
    annotation = Annotation("x", 10, 10, (Box("a", 1, 1, 5, 5, extra=extra),))
    found = open_images.parse(b"".join(open_images.write_boxes([annotation], {})), "f", {})
    assert [(draft.name, len(draft.boxes)) for draft, _ in found.images] == [("x", 1)]
