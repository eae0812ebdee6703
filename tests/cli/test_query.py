"""`dsctl query`, `dsctl stats` and `dsctl preview` as a user meets them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from datacache import api
from datacache.annotations.pictures.draw import BEFORE, colours_of
from datacache.annotations.pictures.preview import BROKEN
from dataset_cli.demo.faces import draw_faces
from dataset_cli.main import run
from tests.cli.conftest import Dsctl
from tests.servers import Mongod

XML = """<annotation><filename>{name}.jpg</filename>
<size><width>{width}</width><height>60</height><depth>3</depth></size>
{objects}</annotation>
"""
OBJECT = """<object><name>{label}</name><difficult>{difficult}</difficult>
<bndbox><xmin>{x}</xmin><ymin>20</ymin><xmax>{x2}</xmax><ymax>50</ymax></bndbox></object>
"""


def write(folder: Path, name: str, *labels: str, width: int = 80, at: int = 10, difficult: int = 0) -> None:
    """An image with a box for each label."""
    for kind in ("JPEGImages", "Annotations"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, 60), (30, 60, 90)).save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
    objects = "".join(
        OBJECT.format(label=label, difficult=difficult, x=at + 5 * n, x2=at + 5 * n + 20)
        for n, label in enumerate(labels)
    )
    (folder / "Annotations" / f"{name}.xml").write_text(XML.format(name=name, width=width, objects=objects))


@pytest.fixture
def masks(tmp_path: Path, dsctl: Dsctl) -> Path:
    """`masks@v1`: 1 has two masks, 2 one bare face, 3 one of both, 4 nothing, 5 is cut off, 6 is wide."""
    folder = tmp_path / "masks"
    write(folder, "1", "mask", "mask")
    write(folder, "2", "no_mask", difficult=1)
    write(folder, "3", "mask", "no_mask")
    write(folder, "4")
    write(folder, "5", "mask")
    image = folder / "JPEGImages" / "5.jpg"
    image.write_bytes(image.read_bytes()[:-100])
    write(folder, "6", "mask", width=200)
    done = dsctl("snapshot", "create", "masks", "--from", folder, "--tag", "v1")
    assert done.code == 0, done.err
    return folder


def test_a_query_lists_images_sizes_and_labels(masks: Path, dsctl: Dsctl) -> None:
    done = dsctl("query", "masks@v1", "--label", "mask")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "JPEGImages/1.jpg   80x60  mask 2",
        "JPEGImages/3.jpg   80x60  mask 1, no_mask 1",
        "JPEGImages/6.jpg  200x60  mask 1",
        "3 of 6 images",
    ]


def test_a_query_counts_and_prints_paths_and_only_the_first(masks: Path, dsctl: Dsctl) -> None:
    assert dsctl("query", "masks", "--label", "mask", "--min-objects", "2", "--count").out == "1\n"
    assert dsctl("query", "masks", "--max-objects", "0", "--paths").out == "JPEGImages/4.jpg\n"
    assert dsctl("query", "masks", "--label", "mask", "--label", "no_mask", "--paths").out == "JPEGImages/3.jpg\n"
    any_of = dsctl("query", "masks", "--label", "mask", "--label", "no_mask", "--any-label", "--limit", "2")
    assert any_of.out.splitlines()[1:] == ["JPEGImages/2.jpg  80x60  no_mask 1", "4 of 6 images; the first 2 are shown"]
    assert dsctl("query", "masks", "--where", 'width > 100 or count("mask") > 1', "--count").out == "2\n"
    assert dsctl("query", "masks", "--where", "min_side < 20").out == "0 of 6 images\n"


def test_a_query_with_a_limit_counts_its_matches_once(
    masks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted: list[api.Query] = []
    count = api.count_images

    def recorded(table: api.Table, wanted: api.Query) -> int:
        counted.append(wanted)
        return count(table, wanted)

    monkeypatch.setattr(api, "count_images", recorded)
    assert run(["query", "masks", "--limit", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "5 of 6 images; the first 2 are shown"
    assert len(counted) == 1


def test_the_json_of_a_query_has_what_was_found(masks: Path, dsctl: Dsctl) -> None:
    found = dsctl("query", "masks", "--where", "difficult > 0", "--json").json
    assert found["ref"].startswith("masks@")
    assert (found["images"], found["matches"]) == (6, 1)
    assert found["found"] == [
        {"path": "JPEGImages/2.jpg", "width": 80, "height": 60, "objects": 1, "labels": {"no_mask": 1}}
    ]
    assert dsctl("query", "masks", "--paths", "--limit", "1", "--json").json["found"] == ["JPEGImages/1.jpg"]
    assert dsctl("query", "masks", "--limit", "1", "--json").json["matches"] == 5
    assert dsctl("query", "masks", "--count", "--json").json.keys() == {"ref", "images", "matches"}


def test_mistakes_in_a_query_are_explained(masks: Path, dsctl: Dsctl) -> None:
    unknown = dsctl("query", "masks", "--label", "nomask", "--json")
    assert unknown.code == 2
    assert unknown.error["message"] == "there is no label 'nomask'; did you mean 'no_mask'?"
    assert unknown.error["hint"] == "There are: mask, no_mask."
    wrong = dsctl("query", "masks", "--where", "objects > 1 and widht > 3")
    assert wrong.code == 2
    assert "there is no field 'widht'; did you mean 'width'?" in wrong.err
    assert "at column 17" in wrong.err
    assert "hint: Fields: path" in wrong.err
    assert dsctl("query", "masks", "--min-objects", "-1").code == 2
    assert dsctl("query", "masks", "--tag", "v2").code == 2
    assert dsctl("query", "masks", "--as", "few", "--count").code == 2
    assert dsctl("query", "nothing").code == 1


def test_a_query_makes_a_snapshot_that_can_be_queried(masks: Path, dsctl: Dsctl) -> None:
    made = dsctl("query", "masks", "--label", "mask", "--as", "masked", "--tag", "v1", "-m", "for a test")
    assert (made.code, made.err) == (0, "")
    assert "3 of 6 images, 6 files" in made.out
    shown = dsctl("snapshot", "show", "masked@v1", "--json").json
    assert shown["message"] == "for a test"
    assert shown["lineage"]["command"] == "query"
    assert shown["lineage"]["parameters"] == {"labels": ["mask"]}
    assert dsctl("query", "masked", "--paths").out.split() == [f"JPEGImages/{n}.jpg" for n in (1, 3, 6)]
    none = dsctl("query", "masks", "--where", "width > 10000", "--as", "nothing")
    assert none.code == 2
    assert dsctl("query", "nothing").code == 1


@pytest.mark.parametrize("command", [("query", "masks", "--count"), ("stats", "masks")])
def test_annotations_are_read_once(masks: Path, dsctl: Dsctl, command: tuple[str, ...]) -> None:
    first = dsctl(*command)
    for file in masks.rglob("*"):
        if file.is_file():
            file.unlink()
    assert dsctl(*command) == first
    assert first.code == 0


def test_all_of_it_works_with_a_shared_catalog(masks: Path, dsctl: Dsctl, mongod: Mongod, tmp_path: Path) -> None:
    shared = {"DATACACHE_CATALOG": mongod.database_url()}
    assert dsctl("snapshot", "create", "masks", "--from", masks, **shared).code == 0
    for command in (["query", "masks", "--label", "mask"], ["stats", "masks"]):
        assert dsctl(*command, **shared).out == dsctl(*command).out
    assert dsctl("preview", "masks", "--out", tmp_path / "grid.png", **shared).code == 0


# --- stats -----------------------------------------------------------------------------------------------------------


def test_statistics_are_shown_as_text_and_json_and_picture(masks: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    picture = tmp_path / "masks.png"
    done = dsctl("stats", "masks", "--plot", picture)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "6 images, 6 boxes, 2 classes" in lines[0]
    assert "mask          3      4  66.7 %          0" in done.out
    assert "no_mask       2      2  33.3 %          1" in done.out
    assert "image-truncated  skipped      1" in done.out
    assert str(picture) in lines[-1]
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"
    value = dsctl("stats", "masks", "--json").json
    assert (value["images"], value["with_objects"], value["empty"], value["unusable"]) == (6, 4, 1, 1)
    assert value["boxes_per_image"] == [
        {"boxes": 0, "images": 1},
        {"boxes": 1, "images": 2},
        {"boxes": 2, "images": 2},
    ]


def test_problems_are_listed_with_their_places_and_mended(tmp_path: Path, dsctl: Dsctl) -> None:
    folder = tmp_path / "faces"
    write(folder, "1", "mask", "hat")
    write(folder, "2", "Mask", "mask")
    assert dsctl("snapshot", "create", "faces", "--from", folder).code == 0
    (line,) = dsctl("stats", "faces", "--problems").out.splitlines()
    message = "the class 'Mask' (1 object, 1 image) is written 'mask' elsewhere (2 objects)"
    assert line == f"Annotations/2.xml:3  class-spelling  {message}"
    listed = dsctl("stats", "faces", "--problems", "--json").json
    assert listed["ref"].startswith("faces@")
    assert listed["problems"] == [
        {"code": "class-spelling", "action": "noted", "file": "Annotations/2.xml", "line": 3, "message": message}
    ]
    done = dsctl("stats", "faces", "--fix", "--as", "mended", "--tag", "v1")
    assert (done.code, done.err) == (0, "")
    assert f"  repaired  class-spelling      Annotations/2.xml:3  {message}, and is now so everywhere" in done.out
    assert dsctl("stats", "mended@v1", "--problems").out == "no problems\n"
    report = tmp_path / "report.json"
    assert dsctl("stats", "faces", "--fix", "--as", "mended", "--report", report).code == 0
    assert json.loads(report.read_text())["report"]["problem_counts"] == {"class-spelling": 1}
    assert "--problems --json" in dsctl("stats", "faces", "--report", report).err
    for refused in (["--fix"], ["--as", "x"], ["--predictions", "faces"], ["--fix", "--as", "x", "--predictions", "y"]):
        assert dsctl("stats", "faces", *refused).code == 2


def test_a_plot_that_cannot_be_written_is_an_error_and_leaves_nothing(
    masks: Path, dsctl: Dsctl, tmp_path: Path
) -> None:
    assert dsctl("stats", "masks", "--plot", tmp_path / "a.gif").code == 2
    refused = dsctl("stats", "masks", "--plot", tmp_path / "nowhere" / "a.png")
    assert refused.code == 2
    assert "No such file or directory" in refused.err
    assert sorted(tmp_path.iterdir()) == [masks]


# --- preview ---------------------------------------------------------------------------------------------------------


def colours_in(file: Path) -> set[tuple[int, int, int]]:
    with Image.open(io.BytesIO(file.read_bytes())) as picture:
        return {colour for _, colour in picture.convert("RGB").getcolors(1_000_000)}


def test_a_preview_shows_boxes_and_broken_images(masks: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    out = tmp_path / "grid.png"
    done = dsctl("preview", "masks", "--out", out)
    assert (done.code, done.err) == (0, "")
    assert "6 of 6 images" in done.out
    wanted = colours_of(["mask", "no_mask"])
    assert {wanted["mask"], wanted["no_mask"], BROKEN} <= colours_in(out)
    again = out.read_bytes()
    assert dsctl("preview", "masks", "--out", out).code == 0
    assert out.read_bytes() == again


def test_a_preview_shows_what_was_asked_for_and_the_same_for_the_same_seed(
    masks: Path, dsctl: Dsctl, tmp_path: Path
) -> None:
    out = tmp_path / "grid.png"

    def shown(*more: str) -> list[str]:
        value = dsctl("preview", "masks", "--out", out, "--json", *more).json
        with Image.open(out) as picture:
            assert picture.size == (value["width"], value["height"])
        return [each["path"][11] for each in value["shown"]]

    assert shown("--label", "no_mask") == ["2", "3"]
    assert shown("--where", "width > 100", "--columns", "1") == ["6"]
    assert shown("--n", "2", "--seed", "1") == shown("--n", "2", "--seed", "1")
    assert len({tuple(shown("--n", "2", "--seed", str(seed))) for seed in range(5)}) > 1
    nothing = dsctl("preview", "masks", "--out", out, "--where", "width > 10000")
    assert nothing.code == 2
    assert "there is nothing to draw" in nothing.err
    assert dsctl("preview", "masks", "--out", tmp_path / "grid.jpg").code == 2


def test_a_preview_against_an_earlier_version_shows_what_changed(masks: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    assert dsctl("query", "masks@v1", "--count").code == 0  # read before the files change
    write(masks, "1", "mask", "mask", at=12)
    (masks / "JPEGImages" / "1.jpg").touch()
    for kind, suffix in (("JPEGImages", "jpg"), ("Annotations", "xml")):
        (masks / kind / f"6.{suffix}").unlink()
    write(masks, "7", "mask")
    Image.new("RGB", (80, 60), (200, 200, 0)).save(masks / "JPEGImages" / "3.jpg")
    assert dsctl("snapshot", "create", "masks", "--from", masks, "--tag", "v2").code == 0
    out = tmp_path / "changed.png"
    done = dsctl("preview", "masks@v2", "--against", "masks@v1", "--out", out, "--json")
    assert (done.code, done.err) == (0, "")
    notes = {each["path"][11]: each["note"] for each in done.json["shown"]}
    assert notes.pop("1") in ("boxes changed", "image and boxes changed")
    assert notes == {"3": "image changed", "6": "removed", "7": "added"}
    assert {BEFORE, colours_of(["mask", "no_mask"])["mask"]} <= colours_in(out)
    same = dsctl("preview", "masks@v2", "--against", "masks@v2", "--out", out)
    assert same.code == 2
    assert "no image of masks@" in same.err


def test_real_blood_cells_are_counted_and_drawn(blood_cells: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    assert dsctl("snapshot", "create", "cells", "--from", blood_cells).code == 0
    stats = dsctl("stats", "cells", "--json").json
    assert stats["images"] == 364
    assert [each["label"] for each in stats["classes"]] == ["RBC", "WBC", "Platelets"]
    few = dsctl("query", "cells", "--label", "Platelets", "--min-objects", "5", "--json").json
    assert all(each["labels"]["Platelets"] >= 5 for each in few["found"])
    assert 0 < few["matches"] < 364
    assert dsctl("preview", "cells", "--out", tmp_path / "cells.png", "--label", "Platelets").code == 0
    assert set(colours_of(["RBC", "WBC", "Platelets"]).values()) <= colours_in(tmp_path / "cells.png")


def test_drawn_faces_have_as_many_boxes_as_were_drawn(dsctl: Dsctl, tmp_path: Path) -> None:
    faces = draw_faces(tmp_path / "faces", count=12)
    assert dsctl("snapshot", "create", "faces", "--from", faces.folder).code == 0
    classes = {each["label"]: each["boxes"] for each in dsctl("stats", "faces", "--json").json["classes"]}
    assert classes == {"with_mask": faces.masked, "without_mask": faces.bare}
