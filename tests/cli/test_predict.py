"""`dsctl predict`: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

from dataset_cli.demo.faces import draw_faces
from tests.cli.conftest import Dsctl

FINDER = "tests.models.finder:Finder"


def test_what_a_model_finds_becomes_a_snapshot_and_then_labels(dsctl: Dsctl, tmp_path: Path) -> None:
    draw_faces(tmp_path, count=6)
    (tmp_path / "JPEGImages" / "000003.jpg").write_bytes(b"no image")
    assert dsctl("snapshot", "create", "faces", "--from", tmp_path).code == 0
    report = tmp_path / "report.json"
    done = dsctl("predict", "faces", "--model", FINDER, "--as", "found", "--batch", "2", "--report", report)
    assert done.code == 0, done.err
    assert "images    5 of 6" in done.out
    assert "found     10: mask 5, no_mask 5" in done.out
    assert "skipped   image-broken        JPEGImages/000003.jpg" in done.out
    assert '"predicted": 5' in report.read_text()
    done = dsctl("predict", "found", "--accept", "0.5", "--as", "labels")
    assert done.code == 0, done.err
    assert "left out  5 predictions below 0.5" in done.out
    assert dsctl("predict", "found", "--accept", "0.5", "--as", "labels", "--json").json["report"] == {
        "images": 5,
        "labelled": 5,
        "accepted": 5,
        "left_out": 5,
        "classes": {"mask": 5},
    }


def test_what_cannot_be_meant_is_wrong_usage(dsctl: Dsctl, tmp_path: Path) -> None:
    draw_faces(tmp_path, count=1)
    assert dsctl("snapshot", "create", "faces", "--from", tmp_path).code == 0
    for words, said in (
        ((), "give either --model MODEL, or --accept SCORE"),
        (("--model", FINDER, "--accept", "1"), "give either --model MODEL, or --accept SCORE"),
        (("--accept", "1", "--batch", "2"), "--batch is for --model"),
        (("--model", FINDER, "--size", "640"), "Write width x height"),
        (("--model", FINDER, "--weights", "nowhere/best.pt"), "nowhere/best.pt"),
        (("--model", "tests.models.finder"), "MODULE:CALLABLE"),
    ):
        done = dsctl("predict", "faces", "--as", "found", *words)
        assert done.code == 2, (words, done.err)
        assert said in done.err
