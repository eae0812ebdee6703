"""`dsctl snapshot create --from-jsonl`, `--from-export` and `--frames`."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Dsctl
from tests.imports.videos.films import make_film
from tests.promises import promise
from tests.servers import RcloneS3


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An ordinary web server that lists may name; its files are those of `bucket`."""
    monkeypatch.setenv("DATACACHE_ALLOW_NETWORK", "127.0.0.1")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_arguments: object) -> None:
            """Quiet."""

    handler = partial(Handler, directory=str(tmp_path / "bucket"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def lines(*values: object) -> str:
    return "".join(f"{json.dumps(value)}\n" for value in values)


def test_lines_become_a_snapshot_with_metadata(dsctl: Dsctl, bucket: Path, web: str, tmp_path: Path) -> None:
    file = tmp_path / "list.jsonl"
    file.write_text(lines({"url": f"{web}/images/1.jpg", "label": "cat"}, {"url": "bucket/images/2.jpg"}))
    made = dsctl("snapshot", "create", "mask", "--from-jsonl", file, "--tag", "v1", "-m", "first", "--json")
    assert made.code == 0, made.err
    assert made.json["import"] == {"lines": 2, "left_out": 0, "resumed": 0, "failures": []}
    assert (made.json["files"], made.json["tags"], made.json["message"]) == (3, ["v1"], "first")
    assert made.json["origin"] == file.as_uri()
    assert made.json["lineage"]["command"] == "import-jsonl"
    shown = dsctl("snapshot", "show", "mask@v1", "--files", "--json").json
    assert [entry["path"] for entry in shown["entries"]] == ["1.jpg", "2.jpg", "metadata.jsonl"]
    again = dsctl("snapshot", "create", "mask", "--from-jsonl", file)
    assert again.code == 0
    assert again.out.startswith(f"{made.json['ref']}  3 files, ")
    assert again.err == ""


def test_lines_come_from_standard_input_too(dsctl: Dsctl, bucket: Path, tmp_path: Path) -> None:
    for data in (
        lines({"url": "bucket/labels.txt"}).encode(),
        gzip.compress(lines({"url": "bucket/labels.txt"}).encode()),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "dataset_cli", "snapshot", "create", "mask", "--from-jsonl", "-", "--json"],
            input=data,
            capture_output=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["origin"] == "-"


@promise("An import reports every failure, and commits nothing unless they are to be left out (`--skip-failed`)")
def test_failures_are_shown_counted_and_reported(dsctl: Dsctl, bucket: Path, web: str, tmp_path: Path) -> None:
    file, report = tmp_path / "list.jsonl", tmp_path / "report.jsonl"
    bad = [{"url": f"{web}/missing-{n}?token_of=s3cret"} for n in range(24)]
    file.write_text(lines({"url": "bucket/labels.txt"}, *bad) + "{\n")
    for options in ([], ["--report", str(report)]):
        failed = dsctl("snapshot", "create", "mask", "--from-jsonl", file, *options)
        assert failed.code == 1
        assert failed.out == ""
        said = failed.err.splitlines()
        assert said[0] == f"warning: line 2: {web}/missing-0?… is not there (HTTP 404)"
        assert len([text for text in said if text.startswith("warning: line ")]) == 20
        assert said[20].startswith("warning: 5 more lines failed")
        assert said[21] == "error: 25 of 26 lines cannot be imported, so nothing was"
        assert "--skip-failed" in said[22]
    reported = [json.loads(line) for line in report.read_text().splitlines()]
    assert [failure["line"] for failure in reported] == list(range(2, 27))
    assert reported[0] == {
        "line": 2,
        "url": f"{web}/missing-0?…",
        "path": "missing-0",
        "code": "not-found",
        "reason": f"{web}/missing-0?… is not there (HTTP 404)",
    }
    assert reported[-1]["code"] == "json"

    failed = dsctl("snapshot", "create", "mask", "--from-jsonl", file, "--json")
    assert failed.code == 1
    assert failed.json["import"] == {"failed": 25, "failures": reported}
    assert failed.error["type"] == "ImportFailedError"
    assert dsctl("snapshot", "list", "--json").json == []

    made = dsctl("snapshot", "create", "mask", "--from-jsonl", file, "--skip-failed", "--report", report, "--json")
    assert made.code == 0
    assert made.json["import"] == {"lines": 26, "left_out": 25, "resumed": 0}
    assert made.json["warnings"] == ["25 of 26 lines were left out"]
    assert len(report.read_text().splitlines()) == 25
    assert "s3cret" not in failed.out + failed.err + made.out + made.err + report.read_text()


def test_many_lines_at_a_time_leave_stderr_to_what_matters(
    dsctl: Dsctl, rclone_s3: RcloneS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    folder = rclone_s3.make_bucket("cli-jsonl")
    for n in range(300):
        (folder / f"{n}.jpg").write_bytes(b"%d" % n)
    file = tmp_path / "list.jsonl"
    file.write_text(lines(*({"url": f"s3://cli-jsonl/{n}.jpg"} for n in range(300))))
    for options in ([], ["--copy", "--objects", str(tmp_path / "objects")]):
        made = dsctl("snapshot", "create", "mask", "--from-jsonl", file, "--concurrency", "128", *options)
        assert made.code == 0, made.err
        # A slow machine is told how far it is.
        assert all(line.startswith(("reading the lines: ", "copying ")) for line in made.err.splitlines())
        assert "300 files" in made.out


def test_workers_of_the_queue_fetch_what_lines_name(dsctl: Dsctl, bucket: Path, web: str, tmp_path: Path) -> None:
    file = tmp_path / "list.jsonl"
    file.write_text(
        lines(
            {"url": f"{web}/images/1.jpg", "label": "cat"},
            {"url": "bucket/images/2.jpg"},
            {"url": f"{web}/gone", "path": "gone"},
        )
    )
    make = ("--from-jsonl", file, "--skip-failed", "--json")
    here = dsctl("snapshot", "create", "here", *make)
    worker = subprocess.Popen(
        [sys.executable, "-m", "dataset_cli", "tasks", "work", "--job", "night", "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        there = dsctl("snapshot", "create", "there", *make, "--on", "queue://night")
        assert there.code == 0, there.err
        assert there.json["id"] == here.json["id"]
        assert there.json["import"] == here.json["import"]
        assert [failure["path"] for failure in there.json["import"]["failures"]] == ["gone"]
        out, _ = worker.communicate(timeout=60)
        assert json.loads(out.splitlines()[-1])["tasks"] == 1, out
    finally:
        worker.kill()
        worker.communicate()


def test_an_export_becomes_a_snapshot_with_the_images_of_another(dsctl: Dsctl, bucket: Path, tmp_path: Path) -> None:
    assert dsctl("snapshot", "create", "raw", "--from", bucket).code == 0
    with zipfile.ZipFile(tmp_path / "task.zip", "w") as archive:
        for name in ("task/Annotations/1.xml", "task/ImageSets/Main/train.txt", "__MACOSX/x"):
            archive.writestr(name, name)
    made = dsctl("snapshot", "create", "mask", "--from-export", tmp_path / "task.zip", "--images", "raw", "--json")
    assert made.code == 0, made.err
    assert made.json["import"] == {
        "files": 2,
        "images": 0,
        "referenced": 2,
        "replaced": 0,
        "passed_over": 1,
        "leading": "task/",
    }
    assert made.json["files"] == 4
    assert len(made.json["lineage"]["inputs"]) == 1
    told = dsctl("snapshot", "create", "mask", "--from-export", tmp_path / "task.zip", "--images", "raw").out
    assert "2 images of raw" in told
    assert "without the leading task/" in told


def test_a_bad_export_fails_and_says_why(dsctl: Dsctl, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("../evil", "x")
    failed = dsctl("snapshot", "create", "mask", "--from-export", tmp_path / "a.zip", "--json")
    assert failed.code == 1
    assert "'../evil' cannot be taken" in failed.error["message"]
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("a", "x")
        archive.writestr("b", "x")
    limit = ("--unpack-limit", "members=1")
    failed = dsctl("snapshot", "create", "mask", "--from-export", tmp_path / "b.zip", *limit)
    assert failed.code == 1
    assert "--unpack-limit members=" in failed.err
    assert (
        dsctl("snapshot", "create", "mask", "--from-export", tmp_path / "b.zip", "--unpack-limit", "members=2").code
        == 0
    )


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--from", "x", "--from-jsonl", "y"],
        ["--from-jsonl", "x", "--from-export", "y"],
        ["--from-jsonl", "missing"],
        ["--from-export", "missing"],
        ["--from-export", "x", "--copy"],
        ["--from-export", "x", "--skip-failed"],
        ["--from-jsonl", "x", "--images", "raw"],
        ["--from", "x", "--report", "r"],
        ["--from", "x", "--on", "queue"],
        ["--from-jsonl", "x", "--on", "cloud"],
        ["--from-jsonl", "x", "--check-copies"],
        ["--from-jsonl", "x", "--inventory", "s3://reports/manifest.json"],
        ["--from", "x", "--inventory", "s3://reports/manifest.json"],
        ["--from", "s3://x", "--inventory", "s3://reports/manifest.csv"],
        ["--from-jsonl", "x", "--max-object", "many"],
        ["--from-jsonl", "x", "--max-object", "2GiB"],
        ["--from-jsonl", "x", "--report", "no/such/folder"],
        ["--from-export", "x", "--unpack-limit", "members"],
        ["--from-export", "x", "--unpack-limit", "size=1"],
        ["--from-export", "x", "--unpack-limit", "total=much"],
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(
    dsctl: Dsctl, tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text('{"url": "x"}\n')
    assert dsctl("snapshot", "create", "mask", *options).code == 2
    assert dsctl("snapshot", "list", "--json").json == []


def test_real_annotations_join_real_images(dsctl: Dsctl, blood_cells: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "task.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in (*blood_cells.glob("Annotations/*"), *blood_cells.glob("ImageSets/Main/*")):
            archive.write(file, f"bccd/{file.relative_to(blood_cells)}")
    whole = dsctl("snapshot", "create", "whole", "--from", blood_cells, "--json").json
    made = dsctl("snapshot", "create", "cells", "--from-export", tmp_path / "task.zip", "--images", "whole", "--json")
    assert made.code == 0, made.err
    assert made.json["import"]["referenced"] == len(list(blood_cells.glob("JPEGImages/*")))
    paths = [
        [entry["path"] for entry in dsctl("snapshot", "show", ref, "--files", "--json").json["entries"]]
        for ref in (whole["ref"], made.json["ref"])
    ]
    kept = ("Annotations/", "ImageSets/Main/", "JPEGImages/")
    assert paths[1] == [path for path in paths[0] if path.startswith(kept)]


def test_frames_of_videos_are_made_and_broken_ones_reported(dsctl: Dsctl, tmp_path: Path) -> None:
    films = tmp_path / "films"
    films.mkdir()
    make_film(films / "film.mp4", "-c:v", "libx264", "-preset", "ultrafast")
    (films / "broken.mp4").write_bytes(b"no video")
    options = ("--objects", tmp_path / "objects", "--frames", "every=2s", "--max-side", "64")
    made = dsctl("snapshot", "create", "frames", "--from", films, *options, "--json", "--report", tmp_path / "report")
    assert made.code == 0, made.err
    assert made.json["files"] == 4
    assert made.json["import"] == {"videos": 2, "left_out": 1, "images": 3, "resumed": 0}
    failure = json.loads((tmp_path / "report").read_text())
    assert (failure["video"], failure["code"]) == ("broken.mp4", "format")
    assert "broken.mp4" in made.json["warnings"][0]
    for wrong in (
        ("--from", films, "--frames", "every=1s", "--copy"),
        ("--from", films, "--frames", "every=1s", "--attributes"),
        ("--from", films, "--max-side", "64"),
        ("--from", films, "--report", "x"),
        ("--from-jsonl", "x", "--frames", "every=1s"),
        ("--from", films, "--frames", "now and then"),
    ):
        assert dsctl("snapshot", "create", "other", *wrong, "--objects", tmp_path / "objects").code == 2, wrong
