"""`dsctl evaluate` as a user meets it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.conftest import Dsctl

LABELS = {
    "1.jpg": [("mask", 10, 10, 30, 30)],
    "2.jpg": [("mask", 10, 10, 30, 30), ("bare", 40, 10, 60, 30)],
    "3.jpg": [("bare", 10, 10, 30, 30)],
}
GUESSES = {
    "1.jpg": [("mask", 10, 10, 30, 30, 0.9)],
    "2.jpg": [("mask", 12.5, 10, 30, 30, 0.8), ("mask", 40, 10, 60, 30, 0.7)],
    "3.jpg": [("bare", 60, 10, 75, 30, 0.6)],
}
CLASSES = ("bare", "mask")


def write_coco(folder: Path, images: dict[str, list[tuple]]) -> None:
    folder.mkdir()
    objects = []
    for n, (name, boxes) in enumerate(images.items()):
        Image.new("RGB", (80, 60)).save(folder / name)
        for label, x1, y1, x2, y2, *score in boxes:
            found = {"id": len(objects), "image_id": n, "category_id": CLASSES.index(label), "iscrowd": 0}
            found |= {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
            objects.append(found | ({"score": score[0]} if score else {}))
    value = {
        "images": [{"id": n, "file_name": name, "width": 80, "height": 60} for n, name in enumerate(images)],
        "annotations": objects,
        "categories": [{"id": n, "name": name} for n, name in enumerate(CLASSES)],
    }
    (folder / "annotations.json").write_text(json.dumps(value))


@pytest.fixture
def faces(tmp_path: Path, dsctl: Dsctl) -> None:
    """`faces`, and `guesses` of its images: a hit, a hit and a confusion, a miss and a false alarm."""
    for name, images in (("faces", LABELS), ("guesses", GUESSES)):
        write_coco(tmp_path / name, images)
        done = dsctl("snapshot", "create", name, "--from", tmp_path / name)
        assert done.code == 0, done.err


@pytest.mark.usefixtures("faces")
def test_an_evaluation_prints_numbers_classes_confusions_and_the_worst_images(dsctl: Dsctl) -> None:
    done = dsctl("evaluate", "guesses", "--against", "faces", "--score", "0.5", "--worst", "1")
    assert (done.code, done.err) == (0, "")
    first, *lines = done.out.splitlines()
    assert first.startswith("guesses@")
    assert first.endswith("  3 images")
    assert lines[0] == "  mAP@50:95 0.4505   mAP@50 0.5000   mAP@75 0.5000   AR@100 0.4500"
    assert lines[2:] == [
        "  precision 0.5000   recall 0.5000   F1 0.5000",
        "  of predictions from score 0.5 on, and overlap 0.5",
        "",
        "CLASS  OBJECTS  PREDICTED  PRECISION  RECALL      F1  AP@50:95   AP@50  BEST SCORE",
        "bare         2          1     0.0000  0.0000  0.0000    0.0000  0.0000      0.6000",
        "mask         2          3     0.6667  1.0000  0.8000    0.9010  1.0000      0.8000",
        "",
        "LABELLED   PREDICTED  TIMES",
        "(nothing)  bare           1",
        "bare       (nothing)      1",
        "bare       mask           1",
        "",
        "WORST IMAGES  MISSED  FALSE ALARMS  OTHER CLASS  HITS",
        "3.jpg              1             1            0     0",
        "… of 2 on which something is wrong; --worst N lists more",
    ]
    best = dsctl("evaluate", "guesses", "--against", "faces").out
    assert "  of predictions from score 0.8 on, which has the largest F1, and overlap 0.5\n" in best


@pytest.mark.usefixtures("faces")
def test_an_evaluation_as_json_has_all_numbers(dsctl: Dsctl) -> None:
    found = dsctl("evaluate", "guesses", "--against", "faces", "--score", "0.5", "--json").json
    assert (found["kind"], found["images"], found["objects"], found["predictions"]) == ("objects", 3, 4, 4)
    assert (found["iou"], found["score"], found["score_is_best"]) == (0.5, 0.5, False)
    assert found["coco"]["map"] == pytest.approx(0.4505, abs=1e-4)
    assert found["coco"]["map_large"] is None
    assert found["best"] == {"score": 0.8, "precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3)}
    assert [each["label"] for each in found["classes"]] == ["bare", "mask"]
    assert found["classes"][1]["ap"] == pytest.approx(0.901, abs=1e-4)
    assert {"label": "bare", "predicted": "mask", "times": 1} in found["confusion"]
    assert found["worst"][0] == {
        "path": "3.jpg",
        "wrong": 2,
        "hits": 0,
        "misses": 1,
        "false_alarms": 1,
        "other_class": 0,
    }
    assert (found["left_out"], found["warnings"], found["snapshot"], found["wrong_images"]) == ([], [], None, 2)


@pytest.mark.usefixtures("faces")
def test_the_worst_images_become_a_snapshot_that_comes_from_labels_and_predictions(dsctl: Dsctl) -> None:
    options = ("--against", "faces", "--score", "0.5", "--worst", "1", "--as", "worst", "--tag", "v1", "--json")
    made = dsctl("evaluate", "guesses", *options).json["snapshot"]
    assert (made["name"], made["tags"]) == ("worst", ["v1"])
    assert made["lineage"]["command"] == "evaluate"
    assert [each.partition("@")[0] for each in made["lineage"]["inputs"]] == ["faces", "guesses"]
    assert dsctl("query", "worst", "--paths").out == "images/3.jpg\n"
    assert "worst@" in dsctl("snapshot", "show", "guesses", "--outputs").out


@pytest.mark.usefixtures("faces")
def test_an_evaluation_is_drawn(tmp_path: Path, dsctl: Dsctl) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    done = dsctl("evaluate", "guesses", "--against", "faces", "--plot", picture)
    assert (done.code, done.err) == (0, "")
    assert f"{picture} shows it" in done.out
    with Image.open(io.BytesIO(picture.read_bytes())) as drawn:
        assert drawn.size == (1800, 912)
        assert len(drawn.convert("RGB").getcolors(2**20) or ()) > 100
    again = tmp_path / "again.png"
    dsctl("evaluate", "guesses", "--against", "faces", "--plot", again)
    assert again.read_bytes() == picture.read_bytes()


@pytest.mark.usefixtures("faces")
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("guesses",), 2, "Missing option '--against'"),
        (("guesses", "--against", "faces", "--plot", "curves.txt"), 2, "is not named as a picture"),
        (("guesses", "--against", "faces", "--tag", "v1"), 2, "are for a new snapshot"),
        (("guesses", "--against", "faces", "--worst", "0", "--as", "worst"), 2, "--worst 0 asks for none"),
        (("guesses", "--against", "faces", "--iou", "0"), 2, "--iou"),
        (("faces", "--against", "guesses"), 2, "wrong way round"),
        (("none", "--against", "faces"), 1, "none"),
    ],
)
def test_what_cannot_be_evaluated_is_said(options: tuple[str, ...], code: int, message: str, dsctl: Dsctl) -> None:
    done = dsctl("evaluate", *options)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
