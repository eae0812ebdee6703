"""Conversions of whole snapshots: what comes out, by reference, deterministic, with everything wrong reported."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from PIL import Image

import datacache
from datacache import api
from datacache.annotations.model import Annotation, Problem
from datacache.conversion import model
from datacache.conversion.pipeline import Conversion, _Names
from datacache.core.errors import ConversionError, SettingsError, SnapshotNotFoundError, UsageError
from datacache.manifest.model import Entry
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings
from tests.promises import promise

Make = Callable[..., str]
Files = Callable[[str], dict[str, bytes]]
Open = Callable[[str], Snapshot]


@pytest.fixture
def convert(settings: Settings) -> Callable[..., Conversion]:
    def run(ref: str, to: str = "yolo", name: str = "converted", **options: object) -> Conversion:
        return datacache.convert(ref, to=to, name=name, settings=settings, **options)  # type: ignore[arg-type]

    return run


def codes(problems: list[Problem]) -> list[tuple[str, str, str]]:
    """Return what was reported: code, action, the file's name."""
    return [(problem.code, problem.action, problem.file.rpartition("/")[2]) for problem in problems]


def test_operations_without_a_place_for_images_are_refused_before_anything_is_read(
    settings: Settings, convert: Callable[..., Conversion]
) -> None:
    nowhere = replace(settings, objects="")
    with pytest.raises(SettingsError, match="not set where"):
        datacache.convert("not-there@v1", to="yolo", name="small", resize="32x32", settings=nowhere)
    with pytest.raises(SnapshotNotFoundError):  # --objects says where
        datacache.convert(
            "not-there@v1", to="yolo", name="small", resize="32x32", objects="s3://made/here", settings=nowhere
        )


def test_images_in_folders_of_classes_are_refused_with_what_reads_them(
    faces: Path, make: Make, convert: Callable[..., Conversion]
) -> None:
    for number, image in enumerate(sorted((faces / "JPEGImages").iterdir())):
        folder = faces / ("cat" if number % 2 else "dog")
        folder.mkdir(exist_ok=True)
        image.rename(folder / image.name)
    shutil.rmtree(faces / "Annotations")
    shutil.rmtree(faces / "ImageSets")
    with pytest.raises(ConversionError) as caught:
        convert(make(faces))
    assert "--classes-from-folders" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("failing", "options"),
    [
        ("datacache.conversion.pipeline.joined", {}),
        ("datacache.conversion.pipeline.fit", {}),
        ("datacache.conversion.images.apply", {"flip": "h"}),
        ("datacache.conversion.targets.yolo.Yolo._labels_of", {}),
        ("datacache.conversion.targets.yolo.YoloSegment.expect", {"to": "yolo-segment"}),
    ],
)
def test_an_image_at_which_a_step_fails_is_named_and_all_others_are_written(
    failing: str,
    options: dict[str, str],
    faces: Path,
    make: Make,
    convert: Callable[..., Conversion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works = pkgutil.resolve_name(failing)

    def fails(*args: object) -> object:
        given = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
        if any(isinstance(each, Annotation) and "000007" in each.path for each in given):
            raise IndexError("no such place")
        return works(*args)

    monkeypatch.setattr(failing, fails)
    done = convert(make(faces), **options)
    assert done.report.written == done.report.images - 1
    (problem,) = (each for each in done.report.problems if each.code == "unforeseen")
    assert "000007" in problem.file
    assert problem.action == "skipped"
    assert "IndexError: no such place" in problem.message


def test_a_hundred_thousand_images_that_want_one_name_get_theirs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def hashed(text: str) -> int:
        nonlocal asked
        asked += 1
        return hash(text)

    monkeypatch.setattr("datacache.conversion.pipeline._hash", hashed)
    entry = Entry(b"a.jpg", 1, 0, "", "", 0)
    names, image = _Names(), model.Image("a.jpg", Annotation("a.jpg", 1, 1), entry, 0, "", True, 0, False, "")
    given = [names.give(f"a.{'png' if n % 3 else 'jpg'}", image, below="")[0] for n in range(1000)]
    assert given[:6] == ["a.jpg", "a_png.png", "a_2.png", "a_jpg.jpg", "a_3.png", "a_4.png"]
    assert len({name.partition(".")[0] for name in given}) == 1000
    assert asked < 6 * len(given)


def independent_labels(folder: Path) -> dict[str, list[str]]:
    """YOLO lines of every VOC file, computed without this project."""
    labels = {}
    names = sorted({e.text or "" for p in (folder / "Annotations").glob("*.xml") for e in ET.parse(p).iter("name")})
    for path in sorted((folder / "Annotations").glob("*.xml")):
        root = ET.parse(path).getroot()
        width, height = (float(root.findtext(f"size/{side}") or 0) for side in ("width", "height"))
        lines = []
        for found in root.iter("object"):
            x1, y1, x2, y2 = (float(found.findtext(f"bndbox/{c}") or 0) for c in ("xmin", "ymin", "xmax", "ymax"))
            if x1 < x2 and y1 < y2:
                numbers = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
                lines.append(" ".join([str(names.index(found.findtext("name") or "")), *(f"{n:.6f}" for n in numbers)]))
        labels[path.stem] = lines
    return labels


def labels_of(files: dict[str, bytes]) -> dict[str, list[str]]:
    found = {path: data for path, data in files.items() if path.startswith("labels/")}
    return {Path(path).stem: data.decode().splitlines() for path, data in found.items()}


# --- what comes out --------------------------------------------------------------------------------------------------


@promise("Converted labels agree with an independent computation to six decimals")
def test_labels_of_real_data_agree_with_an_independent_computation_to_six_decimals(
    blood_cells: Path, make: Make, convert: Callable[..., Conversion], files: Files
) -> None:
    done = convert(make(blood_cells))
    labels = labels_of(files(done.record.ref))
    assert len(labels) == 364
    assert labels == independent_labels(blood_cells)
    assert codes(done.report.problems) == [
        ("details-left-out", "changed", "BloodImage_00000.xml"),
        ("box-empty", "skipped", "BloodImage_00338.xml"),
        ("box-empty", "skipped", "BloodImage_00343.xml"),
    ]


def test_drawn_faces_agree_too_and_their_splits_are_honoured(
    drawn: Path, make: Make, convert: Callable[..., Conversion], files: Files
) -> None:
    done = convert(make(drawn))
    got = files(done.record.ref)
    assert labels_of(got) == independent_labels(drawn)
    for split in ("train", "val", "test"):
        listed = (drawn / "ImageSets" / "Main" / f"{split}.txt").read_text().split()
        assert sorted(Path(path).stem for path in got if path.startswith(f"images/{split}/")) == sorted(listed)
    assert done.report.problems == []


@promise("A conversion copies no image")
def test_images_are_the_same_objects_and_nothing_is_written_to_the_bucket(
    drawn: Path, make: Make, convert: Callable[..., Conversion], opened: Open
) -> None:
    before = sorted(drawn.rglob("*"))
    ref = make(drawn)
    done = convert(ref, split="none")
    with opened(ref) as source, opened(done.record.ref) as result:
        for path in source.paths():
            if path.endswith(".jpg"):
                assert result.object_ref(f"images/{Path(path).name}") == source.object_ref(path)
    assert sorted(drawn.rglob("*")) == before


@promise("The same input gives the same converted snapshot")
def test_the_same_input_gives_the_same_snapshot_whatever_the_number_of_processes(
    drawn: Path, make: Make, convert: Callable[..., Conversion]
) -> None:
    ref = make(drawn)
    options = {"split": "train=0.8,val=0.2", "seed": 3}
    ids = {convert(ref, name=f"n{n}", processes=n, trust_sizes=n > 2, **options).record.id for n in (1, 2, 3, 4)}
    assert len(ids) == 1


@promise("Going through another format and back loses nothing")
@pytest.mark.parametrize("through", ["coco", "voc", "darknet"])
def test_a_way_through_another_format_loses_nothing(
    through: str, drawn: Path, make: Make, convert: Callable[..., Conversion], files: Files
) -> None:
    ref = make(drawn)
    straight = convert(ref, name="straight").record
    other = convert(ref, to=through, name="other").record
    back = convert(other.ref, name="back").record
    assert labels_of(files(back.ref)) == labels_of(files(straight.ref))
    assert sorted(files(back.ref)) == sorted(files(straight.ref))


def test_each_format_has_its_layout(drawn: Path, make: Make, convert: Callable[..., Conversion], files: Files) -> None:
    ref = make(drawn)
    name = "000001"
    coco = files(convert(ref, to="coco", name="c", split="none").record.ref)
    content = json.loads(coco["annotations/instances.json"])
    assert [image["file_name"] for image in content["images"]] == [Path(p).name for p in sorted(coco) if "images/" in p]
    assert [category["name"] for category in content["categories"]] == ["with_mask", "without_mask"]
    keras = files(convert(ref, to="keras-yolo3", name="k", split="none").record.ref)
    assert keras["classes.txt"] == b"with_mask\nwithout_mask\n"
    assert keras["train.txt"].startswith(f"images/{name}.jpg ".encode())
    darknet = files(convert(ref, to="darknet", name="d", split="none").record.ref)
    assert f"obj_train_data/{name}.txt" in darknet
    assert darknet["train.txt"].splitlines()[0] == f"./obj_train_data/{name}.jpg".encode()
    voc = files(convert(ref, to="voc", name="v").record.ref)
    assert f"JPEGImages/{name}.jpg" in voc
    assert set(voc["ImageSets/Main/train.txt"].split()) | set(voc["ImageSets/Main/val.txt"].split())
    objects = ET.fromstring(voc[f"Annotations/{name}.xml"]).findall("object")
    assert len(objects) == len(labels_of(files(convert(ref, name="y").record.ref))[name])


def test_lineage_says_how_it_was_made(
    drawn: Path, make: Make, convert: Callable[..., Conversion], opened: Open
) -> None:
    ref = make(drawn)
    record = convert(ref, split="train=0.5,val=0.5", seed=4, skip_difficult=True).record
    assert record.lineage is not None
    assert record.lineage.command == "convert"
    assert record.lineage.parameters["split"] == {"train": 0.5, "val": 0.5}
    assert record.lineage.parameters["seed"] == 4
    assert record.lineage.parameters["skip_difficult"] is True
    with opened(ref) as source:
        assert record.lineage.inputs == (source.ref,)


@promise("The same input gives the same converted snapshot")
def test_it_is_the_same_on_mongodb(
    drawn: Path, convert: Callable[..., Conversion], settings: Settings, mongod, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_mongo = replace(settings, catalog=mongod.database_url())
    ids = []
    for chosen in (settings, on_mongo):
        ref = api.create_snapshot("faces", drawn.as_uri(), settings=chosen).ref
        done = datacache.convert(ref, to="yolo", name="yolo", settings=chosen)
        with api.open_snapshot(done.record.ref, chosen) as snapshot:
            assert labels_of({p: snapshot.read(p) for p in snapshot.paths()}) == independent_labels(drawn)
        ids.append(done.record.id)
    assert ids[0] == ids[1]


# --- versions --------------------------------------------------------------------------------------------------------


@promise("From version to version, classes keep their numbers and images their split")
def test_the_next_version_keeps_the_numbers_of_classes(
    faces: Path, make: Make, convert: Callable[..., Conversion], files: Files
) -> None:
    first = files(convert(make(faces)).record.ref)
    annotation = faces / "Annotations" / "000001.xml"
    annotation.write_text(annotation.read_text().replace("with_mask", "a_new_class", 1))
    second = files(convert(make(faces)).record.ref)
    assert re.findall(r'"(.*)"$', first["data.yaml"].decode(), re.MULTILINE)[-2:] == ["with_mask", "without_mask"]
    assert re.findall(r'"(.*)"$', second["data.yaml"].decode(), re.MULTILINE)[-3:] == [
        "with_mask",
        "without_mask",
        "a_new_class",
    ]


@promise("From version to version, classes keep their numbers and images their split")
def test_images_that_are_added_move_none_of_the_others(
    faces: Path, make: Make, convert: Callable[..., Conversion], files: Files
) -> None:
    first = set(files(convert(make(faces), split="train=0.6,val=0.4").record.ref))
    for number in range(100, 110):
        for folder, suffix in (("JPEGImages", "jpg"), ("Annotations", "xml")):
            shutil.copy(faces / folder / f"000001.{suffix}", faces / folder / f"{number:06}.{suffix}")
    second = set(files(convert(make(faces), split="train=0.6,val=0.4").record.ref))
    assert first < second
    assert len(second) == len(first) + 20


@promise("A converted version costs what changed")
def test_a_version_with_one_change_shares_what_did_not_change(
    faces: Path, make: Make, convert: Callable[..., Conversion], settings: Settings
) -> None:
    for copy in range(40):  # 1,230 images: several ranges
        for number in range(1, 31):
            for folder, suffix in (("JPEGImages", "jpg"), ("Annotations", "xml")):
                os.link(faces / folder / f"{number:06}.{suffix}", faces / folder / f"{copy:02}-{number:06}.{suffix}")
    convert(make(faces), split="none")
    catalog = api.open_catalog(settings)
    before = _blobs(settings)
    changed = faces / "Annotations" / "07-000003.xml"
    text = changed.read_text()
    changed.unlink()
    changed.write_text(text.replace("without_mask", "bare").replace("with_mask", "bare"))
    convert(make(faces), split="none")
    catalog.close()
    new = _blobs(settings) - before
    # A manifest range and root, a table's summary, details and root; a pack, ranges and root of the result; data.yaml.
    assert 5 <= len(new) <= 14
    assert len(before) > 3 * len(new)


def _blobs(settings: Settings) -> set[bytes]:
    import sqlite3

    with sqlite3.connect(settings.catalog.removeprefix("sqlite:///")) as connection:
        return {row[0] for row in connection.execute("SELECT id FROM blobs")}


# --- what is wrong ---------------------------------------------------------------------------------------------------


@promise("No box lies outside of its image, and none is lost without a line in the report")
@promise("Every repair and omission is reported with file and line")
def test_everything_that_is_wrong_is_mended_or_left_out_and_said(
    faces: Path, make: Make, convert: Callable[..., Conversion], files: Files
) -> None:
    shutil.rmtree(faces / "ImageSets")
    images, annotations = faces / "JPEGImages", faces / "Annotations"
    (annotations / "000001.xml").unlink()
    (images / "000002.jpg").unlink()
    (annotations / "000003.xml").write_text((annotations / "000003.xml").read_text()[:-60])
    (images / "000004.jpg").write_bytes((images / "000004.jpg").read_bytes()[:2000])
    (images / "000005.jpg").write_bytes(b"no image")
    _object_free(annotations / "000006.xml")
    _sub(annotations / "000007.xml", r"<width>\d+</width>", "<width>0</width>")
    _sub(annotations / "000008.xml", r"<xmin>\d+</xmin>", "<xmin>nan</xmin>")
    _sub(annotations / "000009.xml", r"<xmax>\d+</xmax>", "<xmax>5000</xmax>")
    (images / "000010.jpg").rename(images / "000010.JPG")
    shutil.copy(images / "000011.jpg", images / "000011.png")  # a JPEG by another name, and the annotation of one image
    (images / "000012.jpg").rename(images / "ein Gesicht 脸.jpg")
    (annotations / "000012.xml").rename(annotations / "ein Gesicht 脸.xml")
    done = convert(make(faces), split="none")
    got = files(done.record.ref)
    labels = {path: data for path, data in got.items() if path.startswith("labels/")}
    assert codes(done.report.problems) == [
        ("annotation-without-image", "skipped", "000002.xml"),
        ("xml-broken", "skipped", "000003.xml"),
        ("size-missing", "repaired", "000007.xml"),
        ("box-not-finite", "skipped", "000008.xml"),
        ("box-clipped", "repaired", "000009.xml"),
        ("image-unannotated", "skipped", "000001.jpg"),
        ("image-truncated", "skipped", "000004.jpg"),
        ("image-broken", "skipped", "000005.jpg"),
        ("objects-lost", "skipped", "000008.jpg"),
        ("image-unannotated", "skipped", "000011.png"),
    ]
    assert "JPEGImages/000003.jpg" in done.report.problems[1].message
    assert labels["labels/000006.txt"] == b""
    assert "images/000010.JPG" in got
    assert "labels/000010.txt" in got
    assert "labels/ein Gesicht 脸.txt" in got
    gone = {"000001", "000002", "000003", "000004", "000005", "000008"}
    assert not gone & {Path(path).stem for path in got}
    assert done.report.written == len(labels) == 24
    for data in labels.values():
        for line in data.decode().splitlines():
            cx, cy, w, h = map(float, line.split()[1:])
            assert cx - w / 2 >= -1e-6
            assert cx + w / 2 <= 1 + 1e-6
            assert cy - h / 2 >= -1e-6
            assert cy + h / 2 <= 1 + 1e-6


def _sub(path: Path, pattern: str, by: str) -> None:
    path.write_text(re.sub(pattern, by, path.read_text(), count=1))


def _object_free(path: Path) -> None:
    path.write_text(re.sub(r"<object>.*</object>", "", path.read_text(), flags=re.DOTALL))


@promise("`--strict` makes nothing where something is wrong")
def test_strict_makes_nothing_and_names_every_problem(
    faces: Path, make: Make, convert: Callable[..., Conversion], settings: Settings
) -> None:
    _sub(faces / "Annotations" / "000001.xml", r"<xmin>\d+</xmin>", "<xmin>x</xmin>")
    (faces / "JPEGImages" / "000002.jpg").unlink()
    with pytest.raises(ConversionError, match="2 problems in") as caught:
        convert(make(faces), split="none", strict=True)
    assert codes(list(caught.value.problems)) == [
        ("box-text", "skipped", "000001.xml"),
        ("annotation-without-image", "skipped", "000002.xml"),
    ]
    catalog = api.open_catalog(settings)
    assert catalog.dataset("converted") is None
    catalog.close()


def test_strict_has_nothing_against_data_that_is_right(
    drawn: Path, make: Make, convert: Callable[..., Conversion]
) -> None:
    assert convert(make(drawn), strict=True).report.written == 30


def test_images_in_no_list_of_splits_are_left_out_and_said(
    faces: Path, make: Make, convert: Callable[..., Conversion]
) -> None:
    for path in (faces / "ImageSets" / "Main").iterdir():
        path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "000007" not in line))
    done = convert(make(faces))
    assert codes(done.report.problems) == [("not-in-split", "skipped", "000007.jpg")]
    assert done.report.written == 29


def test_an_image_that_lost_all_its_objects_is_no_background(
    faces: Path, make: Make, convert: Callable[..., Conversion], files: Files
) -> None:
    path = faces / "Annotations" / "000001.xml"
    path.write_text(re.sub(r"<xmin>\d+</xmin>", "<xmin>x</xmin>", path.read_text()))
    done = convert(make(faces), split="none")
    assert "images/000001.jpg" not in files(done.record.ref)
    assert {code for code, _, _ in codes(done.report.problems)} == {"box-text", "objects-lost"}
    assert done.report.empty == 0
    few = convert(make(faces), name="few", split="none", classes=["with_mask"])
    assert few.report.emptied > 0
    assert few.report.empty == 0


def test_unannotated_images_are_kept_as_background_when_asked_for(
    faces: Path, make: Make, convert: Callable[..., Conversion], files: Files
) -> None:
    (faces / "Annotations" / "000001.xml").unlink()
    done = convert(make(faces), split="none", keep_unannotated=True)
    got = files(done.record.ref)
    assert "images/000001.jpg" in got
    assert "labels/000001.txt" not in got
    assert codes(done.report.problems) == [("image-unannotated", "noted", "000001.jpg")]


def test_classes_given_are_the_only_ones_in_their_order(
    faces: Path, make: Make, convert: Callable[..., Conversion], files: Files
) -> None:
    done = convert(make(faces), classes=["without_mask"])
    got = files(done.record.ref)
    assert {line.split()[0] for lines in labels_of(got).values() for line in lines} == {"0"}
    unlisted = [problem for problem in done.report.problems if problem.code == "class-left-out"]
    masked = sum(
        "with_mask" in e
        for p in (faces / "Annotations").iterdir()
        for e in re.findall(r"<name>(with_mask)<", p.read_text())
    )
    assert len(unlisted) == masked
    assert all(problem.line for problem in unlisted)


def test_classes_are_renamed_and_brought_together(
    drawn: Path, make: Make, convert: Callable[..., Conversion], settings: Settings
) -> None:
    ref = make(drawn)
    plain, one = convert(ref), convert(ref, name="one", rename={"with_mask": "face", "without_mask": "face"})
    assert one.report.classes == {"face": plain.report.boxes}
    assert one.record.lineage is not None
    assert one.record.lineage.parameters["map"] == {"with_mask": "face", "without_mask": "face"}
    swapped = convert(ref, name="swapped", rename={"with_mask": "without_mask", "without_mask": "with_mask"})
    assert swapped.report.classes == dict(
        zip(plain.report.classes, reversed(plain.report.classes.values()), strict=True)
    )
    again = convert(one.record.ref, "voc", name="again", rename={"face": "with_mask"})
    assert again.report.classes == {"with_mask": plain.report.boxes}
    with pytest.raises(UsageError, match="has no class 'hat'"):
        convert(ref, name="none", rename={"hat": "face"})


@pytest.mark.parametrize(("labels", "codes"), [("01", ["classes-missing"]), ("0a", [])])
def test_classes_that_look_like_ids_are_noted_with_the_way_out(
    labels: str, codes: list[str], data_set: Callable[..., str], convert: Callable[..., Conversion]
) -> None:
    ref = data_set("digits", {"a": (9, [(label, 5 + 20 * n) for n, label in enumerate(labels)])})
    problems = convert(ref).report.problems
    assert [problem.code for problem in problems] == codes
    assert all("--map 0=NAME" in problem.message for problem in problems)


def test_difficult_objects_are_left_out_when_asked_for(
    faces: Path, make: Make, convert: Callable[..., Conversion]
) -> None:
    _sub(faces / "Annotations" / "000001.xml", r"<difficult>0</difficult>", "<difficult>1</difficult>")
    everything, fewer = (
        convert(make(faces), name="a").report,
        convert(make(faces), name="b", skip_difficult=True).report,
    )
    assert (fewer.boxes, fewer.difficult_left_out) == (everything.boxes - 1, 1)


def test_images_that_differ_only_in_extension_get_names_of_their_own(
    faces: Path, make: Make, convert: Callable[..., Conversion], files: Files
) -> None:
    with Image.open(faces / "JPEGImages" / "000001.jpg") as image:
        image.save(faces / "JPEGImages" / "000001.png")
    done = convert(make(faces), split="none", keep_unannotated=True)
    got = files(done.record.ref)
    assert {"images/000001.jpg", "images/000001_png.png", "labels/000001.txt"} <= set(got)
    assert ("image-renamed", "repaired", "000001.png") in codes(done.report.problems)


def test_boxes_follow_the_exif_orientation(
    faces: Path, make: Make, convert: Callable[..., Conversion], files: Files
) -> None:
    path = faces / "JPEGImages" / "000001.jpg"
    with Image.open(path) as image:
        width, height = image.size
        exif = image.getexif()
        exif[0x0112] = 6
        image.save(path, exif=exif)
    (xml := faces / "Annotations" / "000001.xml").write_text(
        f"<annotation><size><width>{width}</width><height>{height}</height><depth>3</depth></size><object>"
        "<name>face</name><bndbox><xmin>0</xmin><ymin>0</ymin><xmax>32</xmax><ymax>24</ymax></bndbox></object></annotation>"
    )
    assert xml.exists()
    done = convert(make(faces), split="none")
    # Turned clockwise for display, the upper left corner is the upper right one: 24 px wide, 32 px high.
    label = labels_of(files(done.record.ref))["000001"][0].split()[1:]
    expected = ((height - 12) / height, 16 / width, 24 / height, 32 / width)
    assert [float(number) for number in label] == [round(number, 6) for number in expected]
    assert ("exif-orientation", "repaired", "000001.xml") in codes(done.report.problems)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "pascal"}, "'pascal' is no format"),
        ({"name": "../x"}, "cannot name a dataset"),
        ({"split": "a=2"}, "is no share"),
        ({"format": "xml"}, "no such format"),
        ({"resize": "0x1"}, "--resize"),
    ],
)
def test_what_cannot_be_meant_is_said_at_once(
    options: dict[str, str], said: str, drawn: Path, make: Make, convert: Callable[..., Conversion]
) -> None:
    with pytest.raises(UsageError) as caught:
        convert(make(drawn), **options)
    assert said in caught.value.message


def test_a_snapshot_without_annotations_makes_nothing_and_says_why(
    faces: Path, make: Make, convert: Callable[..., Conversion]
) -> None:
    shutil.rmtree(faces / "Annotations")
    shutil.rmtree(faces / "ImageSets")
    with pytest.raises(ConversionError, match=r"no image of .* is left") as caught:
        convert(make(faces))
    assert "--keep-unannotated" in caught.value.hint


# --- image operations ------------------------------------------------------------------------------------------------


def test_resized_images_are_new_objects_with_boxes_that_fit(
    drawn: Path, make: Make, convert: Callable[..., Conversion], files: Files
) -> None:
    done = convert(make(drawn), to="voc", resize="160x120", split="none")
    for path, data in files(done.record.ref).items():
        if path.endswith(".jpg"):
            with Image.open(BytesIO(data)) as image:
                assert image.size == (160, 120)
            root = ET.fromstring(files(done.record.ref)[f"Annotations/{Path(path).stem}.xml"])
            original = ET.parse(drawn / "Annotations" / f"{Path(path).stem}.xml")
            for new, old in zip(root.iter("xmax"), original.iter("xmax"), strict=True):
                assert float(new.text or 0) == pytest.approx(float(old.text or 0) / 2)
            break


@promise("A killed conversion leaves nothing visible and can be run again")
def test_a_conversion_that_is_killed_can_be_run_again(
    drawn: Path, make: Make, convert: Callable[..., Conversion], settings: Settings
) -> None:
    ref = make(drawn)
    command = [
        sys.executable,
        "-m",
        "dataset_cli",
        "convert",
        ref,
        "--to",
        "yolo",
        "--as",
        "small",
        "--resize",
        "300x200",
    ]
    objects = settings.home / "objects"
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(objects.rglob("*-*")) and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    catalog = api.open_catalog(settings)
    killed_in_time = catalog.dataset("small") is None
    done = convert(ref, name="small", resize="300x200")
    assert done.report.written == 30
    assert killed_in_time
    assert convert(ref, name="other", resize="300x200").record.id == done.record.id
    catalog.close()


def test_the_numbers_of_classes_outlive_a_version_that_was_made_otherwise(
    drawn: Path, make: Make, convert: Callable[..., Conversion], settings: Settings
) -> None:
    ref = make(drawn)
    convert(ref, classes=["without_mask", "with_mask"])
    datacache.subset(ref, ["JPEGImages/000001.jpg"], name="converted", replace=True, settings=settings)
    record = convert(ref, replace=True).record
    assert record.lineage is not None
    assert record.lineage.parameters["classes"] == ["without_mask", "with_mask"]
