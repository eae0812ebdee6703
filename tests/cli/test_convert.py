"""`dsctl convert` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from datacache.conversion.targets import TARGETS
from dataset_cli.commands.convert import FORMATS
from dataset_cli.demo.faces import draw_faces
from tests.cli.conftest import Dsctl
from tests.promises import promise


@pytest.fixture
def faces(tmp_path: Path, dsctl: Dsctl) -> Path:
    """Ten drawn faces as `faces@v1`, one with an object without area and one without annotation."""
    folder = tmp_path / "faces"
    draw_faces(folder, count=10)
    (folder / "Annotations" / "000002.xml").unlink()
    xml = folder / "Annotations" / "000001.xml"
    xml.write_text(
        xml.read_text().replace(
            "<object>",
            "<object><name>dot</name><bndbox><xmin>5</xmin><ymin>5</ymin>"
            "<xmax>5</xmax><ymax>9</ymax></bndbox></object><object>",
            1,
        )
    )
    assert dsctl("snapshot", "create", "faces", "--from", folder, "--tag", "v1").code == 0
    return folder


def test_it_prints_the_snapshot_the_counts_and_every_problem_with_its_place(faces: Path, dsctl: Dsctl) -> None:
    done = dsctl("convert", "faces@v1", "--to", "yolo", "--as", "faces-yolo", "--split", "train=0.8,val=0.2")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("faces-yolo@")
    assert "images    9 of 10: train" in done.out
    assert "problems  0 repaired, 2 left out, 1 noted" in done.out
    assert "Annotations/000001.xml:" in done.out
    assert "JPEGImages/000002.jpg" in done.out
    shown = dsctl("snapshot", "show", "faces-yolo").out
    assert "convert faces@" in shown


def test_what_a_format_cannot_hold_is_changed_and_counted(tmp_path: Path, dsctl: Dsctl) -> None:
    folder = tmp_path / "shapes"
    folder.mkdir()
    Image.new("RGB", (400, 300)).save(folder / "a.jpg")
    polygon = {"bbox": [40, 50, 140, 130], "segmentation": [[40, 50, 180, 50, 160, 180, 60, 170]]}
    pose = {"bbox": [230, 60, 130, 200], "keypoints": [250, 80, 2, 300, 100, 1, 0, 0, 0]}
    shared = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 400, "height": 300}],
        "categories": [
            {"id": 1, "name": "cut"},
            {"id": 2, "name": "pose", "keypoints": [*"abc"], "skeleton": [[1, 2]]},
        ],
        "annotations": [
            {"id": n, "image_id": 1, "category_id": n, "iscrowd": 0, **what}
            for n, what in enumerate((polygon, pose), 1)
        ],
    }
    (folder / "instances.json").write_text(json.dumps(shared))
    assert dsctl("snapshot", "create", "shapes", "--from", folder, "--tag", "v1").code == 0
    words = ("convert", "shapes@v1", "--split", "none", "--as")
    done = dsctl(*words, "boxes", "--to", "yolo")
    assert (done.code, done.err) == (0, "")
    assert "problems  0 repaired, 0 left out, 2 changed, 0 noted" in done.out
    assert "  changed   polygon-boxed " in done.out
    refused = dsctl(*words, "strict", "--to", "yolo", "--strict")
    assert refused.code == 1
    assert "polygon-boxed" in refused.out
    assert "problems" not in dsctl(*words, "same", "--to", "coco").out
    shapes = {"polygons": 1, "masks": 0, "rotated": 0, "vertices": 4, "keypoints": 2}
    for ref in ("shapes@v1", "same"):
        assert dsctl("stats", ref, "--json").json["shapes"] == shapes
    assert dsctl("query", "same", "--where", "keypoints == 2", "--count").out.strip().startswith("1")
    assert dsctl("preview", "same", "--out", tmp_path / "same.png").code == 0


@pytest.mark.parametrize(
    "words", [("face",), ("=face",), ("with_mask=",), ("with_mask=a", "with_mask=b"), ("hat=face",)]
)
def test_a_map_of_classes_that_cannot_be_meant_is_refused(faces: Path, dsctl: Dsctl, words: tuple[str, ...]) -> None:
    given = [word for text in words for word in ("--map", text)]
    refused = dsctl("convert", "faces@v1", "--to", "yolo", "--as", "mapped", *given)
    assert refused.code == 2
    assert "--map" in refused.err


@promise("A data set's command, source and layout change only with `--replace`")
def test_a_conversion_takes_no_other_data_sets_name_unless_asked_to(faces: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    before = dsctl("snapshot", "list", "--json").json
    shards = tmp_path / "shards"
    for command in (
        ("convert", "faces@v1", "--to", "yolo", "--split", "none"),
        ("query", "faces@v1", "--where", "objects >= 1"),
        ("shard", "faces@v1", "--to", str(shards)),
    ):
        refused = dsctl(*command, "--as", "faces", "--json")
        assert (refused.code, refused.error["type"]) == (1, "OtherKindError"), refused.err
        assert "faces is made by 'create --from file://" in refused.error["message"]
    assert dsctl("snapshot", "list", "--json").json == before
    assert not shards.exists()
    made = dsctl("convert", "faces@v1", "--to", "yolo", "--as", "faces", "--split", "none", "--replace", "--json")
    assert made.json["snapshot"]["parent"] == before[0]["id"]


@promise("A data set's command, source and layout change only with `--replace`")
def test_the_next_version_of_the_same_source_needs_nothing_and_another_layout_does(faces: Path, dsctl: Dsctl) -> None:
    words = ("--as", "c", "--split", "none", "--json")
    first = dsctl("convert", "faces@v1", "--to", "coco", *words).json["snapshot"]
    (faces / "Annotations" / "000003.xml").unlink()
    assert dsctl("snapshot", "create", "faces", "--from", faces).code == 0
    second = dsctl("convert", "faces", "--to", "coco", "--resize", "64x48", *words)
    assert second.code == 0, second.err
    assert second.json["snapshot"]["parent"] == first["id"]
    refused = dsctl("convert", "faces", "--to", "yolo", *words)
    assert refused.error["type"] == "OtherKindError"
    assert "convert faces --to coco" in refused.error["message"]


def test_json_has_snapshot_and_report_and_the_report_can_be_a_file(faces: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = dsctl("convert", "faces@v1", "--to", "coco", "--as", "c", "--split", "none", "--json", "--report", report)
    assert done.code == 0
    assert done.json["snapshot"]["name"] == "c"
    assert done.json["report"]["written"] == 9
    assert done.json["report"]["problem_counts"] == {"box-empty": 1, "image-unannotated": 1}
    assert {"code", "action", "file", "line", "message"} == set(done.json["report"]["problems"][0])
    assert json.loads(report.read_text()) == done.json


def test_strict_fails_lists_and_makes_nothing(faces: Path, dsctl: Dsctl) -> None:
    done = dsctl("convert", "faces@v1", "--to", "yolo", "--as", "y", "--strict", "--split", "none")
    assert done.code == 1
    assert "2 problems" in done.err
    assert "hint:" in done.err
    assert "Annotations/000001.xml:" in done.out
    assert dsctl("snapshot", "list", "y").code == 1
    machine = dsctl("convert", "faces@v1", "--to", "yolo", "--as", "y", "--strict", "--split", "none", "--json")
    assert machine.code == 1
    assert len(machine.json["report"]["problems"]) == 2
    assert machine.error["type"] == "ConversionError"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "xml", "--as", "y"], "'xml' is not one of"),
        (["--to", "yolo", "--as", "../y"], "cannot name a dataset"),
        (["--to", "yolo"], "Missing option '--as'"),
        (["--to", "yolo", "--as", "y", "--split", "train=2"], "--split"),
        (["--to", "yolo", "--as", "y", "--classes", "/nowhere/classes.txt"], "/nowhere/classes.txt"),
        (["--to", "yolo", "--as", "y", "--letterbox"], "--resize"),
        (["--to", "yolo", "--as", "y", "--crop", "1,2"], "--crop"),
        (["--to", "yolo", "--as", "y", "--format", "word"], "word"),
    ],
)
def test_wrong_usage_is_2_and_names_the_option(arguments: list[str], said: str, faces: Path, dsctl: Dsctl) -> None:
    done = dsctl("convert", "faces@v1", *arguments)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_classes_come_from_a_file(faces: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("without_mask\nwith_mask\ndot\n")
    done = dsctl("convert", "faces", "--to", "yolo", "--as", "y", "--classes", tmp_path / "classes.txt", "--json")
    assert done.code == 0
    assert done.json["snapshot"]["lineage"]["parameters"]["classes"] == ["without_mask", "with_mask", "dot"]


def test_an_unreachable_place_for_new_images_is_named(faces: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = dsctl(
        "convert", "faces", "--to", "yolo", "--as", "y", "--resize", "64x64", "--objects", f"file://{tmp_path}/file/x"
    )
    assert done.code == 1
    assert f"{tmp_path}/file is a file" in done.err


def test_a_report_that_cannot_be_written_stops_before_anything_is_made(
    faces: Path, dsctl: Dsctl, tmp_path: Path
) -> None:
    done = dsctl("convert", "faces", "--to", "yolo", "--as", "y", "--report", tmp_path / "none" / "r.json")
    assert done.code == 2
    assert "--report" in done.err
    assert dsctl("snapshot", "list", "y").code == 1


def test_a_report_for_which_the_disk_has_no_room_names_the_snapshot_that_was_made(faces: Path, dsctl: Dsctl) -> None:
    full = dsctl("convert", "faces", "--to", "yolo", "--as", "full", "--report", "/dev/full")
    assert full.code == 2
    assert "/dev/full cannot be written: No space left on device" in full.err
    assert f"{dsctl('snapshot', 'show', 'full', '--json').json['ref']} is made all the same" in full.err


def test_a_home_with_converted_snapshots_is_healthy(faces: Path, dsctl: Dsctl) -> None:
    assert dsctl("convert", "faces", "--to", "yolo", "--as", "y", "--tag", "v1", "--split", "none").code == 0
    stores = [check for check in dsctl("doctor", "--json").json["checks"] if check["name"] == "store"]
    assert all(check["state"] != "fail" for check in stores), stores


@promise("A derived data set inherits its source's list before it can be seen, of several the intersection")
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("yolo", ("convert", "faces", "--to", "yolo", "--as", "yolo")),
        ("small", ("convert", "faces", "--to", "voc", "--resize", "40x30", "--as", "small")),
        ("some", ("query", "faces", "--as", "some")),
        ("shards", ("shard", "faces", "--to", "SHARDS", "--format", "webdataset", "--as", "shards")),
        ("joined", ("snapshot", "create", "joined", "--from-export", "EXPORT", "--images", "faces")),
    ],
)
def test_whatever_is_made_of_a_closed_data_set_is_as_closed(
    name: str, command: tuple[str, ...], faces: Path, dsctl: Dsctl, tmp_path: Path
) -> None:
    assert dsctl("dataset", "access", "faces", "--none", "--allow", "lab").code == 0
    places = {"SHARDS": tmp_path / "shards", "EXPORT": faces}
    done = dsctl(*(places.get(word, word) for word in command))
    assert done.code == 0, done.err
    assert f"{name} is made of faces, so it is open to lab" in done.err
    access = dsctl("dataset", "access", name, "--json").json["access"]
    assert access == {
        "everybody": False,
        "allowed": ["lab"],
        "denied": [],
        "listed": True,
        "inherited_from": ["faces"],
    }
    assert "inherited from faces" in dsctl("dataset", "access", name).out


def test_a_merge_prints_what_a_conversion_does(faces: Path, dsctl: Dsctl) -> None:
    assert dsctl("convert", "faces@v1", "--to", "yolo", "--as", "yolo", "--split", "none").code == 0
    refused = dsctl("merge", "faces@v1", "yolo", "--as", "both", "--to", "coco")
    assert (refused.code, "--split none" in refused.err) == (2, True)
    done = dsctl(
        "merge", "faces@v1", "yolo", "--split", "none", "--as", "both", "--to", "coco", "--map", "with_mask=mask"
    )
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("both@")
    assert "images    10 of 19\n" in done.out


def test_every_kind_of_problem_is_among_the_first_and_the_rest_is_counted(faces: Path, dsctl: Dsctl) -> None:
    for n in range(30):
        (faces / "JPEGImages" / f"a{n:02}.jpg").write_bytes(b"")
    assert dsctl("snapshot", "create", "faces", "--from", faces, "--tag", "v2").code == 0
    lines = dsctl("convert", "faces@v2", "--to", "yolo", "--as", "y", "--split", "none").out.splitlines()
    assert {line.split()[1] for line in lines[4:-1]} == {"box-empty", "image-broken", "image-unannotated"}
    assert lines[-1] == "  … and 12 more: image-broken 12; --report FILE or --json lists all"


def test_dedupe_prints_what_it_left_out_and_sample_makes_a_small_one(faces: Path, dsctl: Dsctl) -> None:
    images = faces / "JPEGImages"
    (images / "000009.jpg").write_bytes((images / "000010.jpg").read_bytes())
    assert dsctl("snapshot", "create", "faces", "--from", faces, "--tag", "v2").code == 0
    done = dsctl("dedupe", "faces@v2", "--as", "once")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[1:] == ["  JPEGImages/000010.jpg  repeats JPEGImages/000009.jpg"]
    assert dsctl("dedupe", "faces@v2", "--as", "once", "--json").json["left_out"] == [
        {"path": "JPEGImages/000010.jpg", "kept": "JPEGImages/000009.jpg", "similar": False}
    ]
    done = dsctl("sample", "once", "--n", "3", "--by", "label", "--as", "few", "--tag", "v1")
    assert (done.code, done.err) == (0, "")
    assert done.out.partition("  ")[2] == "3 of 9 images\n"
    assert dsctl("query", "few@v1", "--count").out == "3\n"


def test_dedupe_and_sample_name_the_images_that_cannot_be_used_and_write_reports(
    faces: Path, dsctl: Dsctl, tmp_path: Path
) -> None:
    (faces / "JPEGImages" / "a.jpg").write_bytes(b"")
    assert dsctl("snapshot", "create", "faces", "--from", faces, "--tag", "v2").code == 0
    report = tmp_path / "report.json"
    for command in (["dedupe"], ["sample", "--n", "100"]):
        done = dsctl(*command, "faces@v2", "--as", command[0], "--report", report)
        assert (done.code, done.err) == (0, "")
        first, counted, listed = done.out.splitlines()
        assert re.search(r"  10 images, 0 left out$|  10 of 10 images$", first)
        assert counted == "problems  0 repaired, 1 left out, 0 noted"
        assert listed.startswith("  skipped   image-broken        JPEGImages/a.jpg  ")
        whole = json.loads(report.read_text())
        assert [problem["file"] for problem in whole["problems"]] == ["JPEGImages/a.jpg"]
        assert whole["snapshot"]["ref"].startswith(f"{command[0]}@")
        refused = dsctl(*command, "faces@v2", "--as", "other", "--report", tmp_path)
        assert (refused.code, "--report" in refused.err) == (2, True)
    for command, said in ((["sample", "--n", "3"], "3 of 10 images"), (["dedupe"], "3 images, 0 left out")):
        first, *others = dsctl(*command, "faces", "--as", "faces", "--replace").out.splitlines()
        assert (first.partition("  ")[2], len(others)) == (said, 2 if command[0] == "sample" else 0), (
            "of what was there"
        )


def test_every_format_can_be_asked_for() -> None:
    assert {*FORMATS} == {*TARGETS}
