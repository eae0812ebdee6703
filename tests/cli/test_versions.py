"""`dsctl snapshot diff`, `verify`, `create --copy`, and where a snapshot comes from."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from datacache import api
from datacache.api import open_catalog
from datacache.catalog.commit import commit_manifest
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import Entry, Lineage, Naming, SnapshotRecord, Source
from datacache.settings import load_settings
from dataset_cli.commands.completion import _BASH
from tests.cli.conftest import ROOT, Dsctl
from tests.conformance.faults import Fault, FaultProxy
from tests.promises import promise
from tests.servers import RcloneS3, free_port

PATIENCE_S = 60


def at_endpoint(endpoint: str) -> dict[str, str]:
    """Variables of somebody whose store is at `endpoint` and may take its time."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "DATACACHE_STORE_TIMEOUT_S": str(PATIENCE_S),
    }


@pytest.fixture
def two(dsctl: Dsctl, bucket: Path) -> list[str]:
    """Two versions of `mask`, tagged v1 and v2; their references."""
    (bucket / "images" / "same.jpg").write_bytes(b"same")
    first = dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1", "--json").json
    (bucket / "images" / "1.jpg").write_bytes(b"one more" * 100)
    (bucket / "images" / "2.jpg").unlink()
    (bucket / "images" / os.fsdecode(b"caf\xe9\x1b.jpg")).write_bytes(b"four")
    second = dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v2", "--json").json
    return [first["ref"], second["ref"]]


def test_a_diff_counts_and_names_what_was_added_removed_and_changed(dsctl: Dsctl, two: list[str]) -> None:
    result = dsctl("snapshot", "diff", "mask@v1", "mask@v2")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        f"{two[0]} → {two[1]}",
        "added               1 file  4 B",
        "removed             1 file  600 B",
        "changed             1 file  300 B → 800 B",
        "unchanged          2 files",
        "",
        "~ images/1.jpg  300 B → 800 B",
        "- images/2.jpg",
        "+ images/caf\udce9\\x1b.jpg  4 B",
    ]
    assert dsctl("snapshot", "diff", "mask@v2", "mask@v1", "--stat").out.splitlines()[1:] == [
        "added               1 file  600 B",
        "removed             1 file  4 B",
        "changed             1 file  800 B → 300 B",
        "unchanged          2 files",
    ]


def test_a_diff_as_json_has_counts_and_every_change(dsctl: Dsctl, two: list[str]) -> None:
    value = dsctl("snapshot", "diff", "mask@v1", "mask@v2", "--json").json
    changes = value.pop("changes")
    assert value == {
        "a": two[0],
        "b": two[1],
        "added": {"files": 1, "bytes": 4},
        "removed": {"files": 1, "bytes": 600},
        "changed": {"files": 1, "bytes_before": 300, "bytes_after": 800},
        "unchanged": {"files": 2},
    }
    assert [(c["kind"], c["path"]) for c in changes] == [
        ("changed", "images/1.jpg"),
        ("removed", "images/2.jpg"),
        ("added", "images/caf\udce9\x1b.jpg"),
    ]
    assert (changes[0]["before"]["bytes"], changes[0]["after"]["bytes"]) == (300, 800)
    assert set(changes[0]["after"]) == {"bytes", "mtime_ns", "etag", "version"}
    assert (changes[1]["after"], changes[2]["before"]) == (None, None)
    assert dsctl("snapshot", "diff", "mask@v1", "mask@v2", "--json", "--stat").json == value
    limited = dsctl("snapshot", "diff", "mask@v1", "mask@v2", "--json", "--limit", "1").json
    assert limited == value | {"changes": changes[:1]}


def test_a_diff_of_one_snapshot_is_with_the_one_before(dsctl: Dsctl, two: list[str]) -> None:
    assert dsctl("snapshot", "diff", "mask").out == dsctl("snapshot", "diff", *two).out
    alone = dsctl("snapshot", "diff", "mask@v1", "--json")
    assert alone.code == 2
    assert "first snapshot" in alone.error["message"]
    assert dsctl("snapshot", "rm", "mask@v1", "--yes").code == 0
    orphan = dsctl("snapshot", "diff", "mask", "--json")
    assert (orphan.code, orphan.error["type"]) == (1, "SnapshotNotFoundError")


def test_snapshots_that_do_not_differ_are_said_to_be_the_same(dsctl: Dsctl, two: list[str]) -> None:
    result = dsctl("snapshot", "diff", "mask@v2", "mask@latest")
    assert (result.code, result.out.splitlines()[1]) == (0, "no difference: 4 files in both")
    assert dsctl("snapshot", "diff", "mask@v2", "mask@v2", "--json").json["changes"] == []


def test_many_changes_are_listed_up_to_a_limit(dsctl: Dsctl, two: list[str], bucket: Path) -> None:
    for n in range(70):
        (bucket / f"new{n:02}").write_bytes(b"x")
    dsctl("snapshot", "create", "mask", "--from", bucket)
    shown = dsctl("snapshot", "diff", "mask").out.splitlines()
    assert shown[-1] == "… and 20 more: --all"
    assert sum(line.startswith("+ ") for line in shown) == 50
    assert dsctl("snapshot", "diff", "mask", "--limit", "3").out.splitlines()[-1] == "… and 67 more: --all"
    assert len(dsctl("snapshot", "diff", "mask", "--all").out.splitlines()) == 6 + 70
    assert dsctl("snapshot", "diff", "mask", "--all", "--limit", "3").code == 2


def test_references_of_a_diff_are_completed(dsctl: Dsctl, two: list[str]) -> None:
    shown = dsctl(
        _DSCTL_COMPLETE="bash_complete", COMP_WORDS="dsctl snapshot diff mask@v1 mask@v", COMP_CWORD="4"
    ).out.split()
    assert shown == ["plain,mask@v1", "plain,mask@v2"]
    assert "_DSCTL_COMPLETE=bash_complete" in _BASH


def test_a_whole_snapshot_verifies_and_exit_code_1_says_that_one_is_not(
    dsctl: Dsctl, two: list[str], bucket: Path
) -> None:
    fine = dsctl("snapshot", "verify", "mask", "--read")
    assert (fine.code, fine.err) == (0, "")
    assert fine.out == (
        f"{two[1]} has all its files: 4 files, 810 B; every byte was read\n"
        "4 of 4 files could not be checked: the store has no checksum of the whole object\n"
    )
    broken = dsctl("snapshot", "verify", "mask@v1")
    assert broken.code == 1
    lines = broken.out.splitlines()
    assert lines[0].startswith("changed: images/1.jpg: ")
    assert lines[1].startswith("missing: images/2.jpg: ")
    assert lines[2] == f"{two[0]} is not whole: 1 missing, 1 changed, of 4 files"
    as_json = dsctl("snapshot", "verify", "mask@v1", "--json")
    assert as_json.code == 1
    problems = as_json.json.pop("problems")
    assert [(p["kind"], p["path"]) for p in problems] == [("changed", "images/1.jpg"), ("missing", "images/2.jpg")]
    assert problems[1]["url"] == f"file://{bucket}/images/2.jpg"
    counts = {key: as_json.json[key] for key in ("ref", "files", "read", "ok", "missing", "changed", "unreadable")}
    assert counts == {
        "ref": two[0], "files": 4, "read": False, "ok": False, "missing": 1, "changed": 1, "unreadable": 0
    }  # fmt: skip
    assert dsctl("snapshot", "verify", "mask", "--json").json["ok"] is True
    assert dsctl("snapshot", "verify", "nothing").code == 1


def test_a_copied_snapshot_outlives_its_folder(dsctl: Dsctl, two: list[str], bucket: Path, home: Path) -> None:
    made = dsctl("snapshot", "create", "mask", "--from", bucket, "--copy", "--json")
    assert made.code == 0, made.err
    assert made.json["lineage"]["parameters"]["copied_to"].startswith(f"file://{home}/objects/")
    assert dsctl("snapshot", "diff", "mask@v2", "mask").out.splitlines()[1] == "no difference: 4 files in both"
    shutil.rmtree(bucket)
    assert dsctl("snapshot", "verify", "mask@v2").code == 1
    assert dsctl("snapshot", "verify", "mask", "--read").code == 0
    assert dsctl("warm", "mask").code == 0
    lost = next(path for path in (home / "objects").rglob("*-*") if path.is_file())
    lost.unlink()
    broken = dsctl("snapshot", "verify", "mask")
    assert broken.code == 1
    assert "--check-copies" in broken.out


def test_copies_go_where_they_are_sent(dsctl: Dsctl, bucket: Path, tmp_path: Path) -> None:
    place = tmp_path / "copies"
    assert dsctl("snapshot", "create", "mask", "--from", bucket, "--copy", "--objects", place).code == 0
    assert len([path for path in place.rglob("*-*") if path.is_file()]) == 3
    assert dsctl("snapshot", "create", "mask", "--from", bucket, "--objects", place).code == 2
    shared = {"DATACACHE_CATALOG": f"mongodb://127.0.0.1:{free_port()}/x"}
    unset = dsctl("snapshot", "create", "mask", "--from", bucket, "--copy", "--json", **shared)
    assert (unset.code, unset.error["type"]) == (2, "SettingsError")
    assert "DATACACHE_OBJECTS" in unset.error["hint"]


def derive(name: str, source: SnapshotRecord) -> SnapshotRecord:
    """A snapshot of another one, as a conversion makes it."""
    with closing(open_catalog(load_settings())) as catalog:
        builder = ManifestBuilder([Source("file://", "")], catalog.put_blobs)
        builder.add(Entry(b"a", 1, 0))
        lineage = Lineage("convert", {"to": "yolo", "seed": 3}, (f"{source.dataset}@{source.id}",))
        return commit_manifest(catalog, builder, Naming(name=name), origin=source.origin, lineage=lineage)


@promise("A snapshot says from what, by which command and with which parameters it was made")
def test_where_a_snapshot_comes_from_is_shown(dsctl: Dsctl, two: list[str], bucket: Path) -> None:
    shown = dsctl("snapshot", "show", "mask@v1", "--json").json
    assert shown["lineage"] == {"command": "create", "parameters": {"from": f"file://{bucket}/"}, "inputs": []}
    known = {"created_at": dt.datetime.now(dt.UTC).isoformat(), "files": 4, "total_bytes": 906}
    source = SnapshotRecord(dataset="mask", id=shown["id"], origin=shown["origin"], **known)  # type: ignore[arg-type]
    derive("mask-yolo", source)
    value = dsctl("snapshot", "show", "mask-yolo", "--json").json
    assert value["lineage"] == {
        "command": "convert",
        "parameters": {"to": "yolo", "seed": 3},
        "inputs": [f"mask@{shown['id']}"],
    }
    assert f"made by:  convert {two[0]} to=yolo seed=3" in dsctl("snapshot", "show", "mask-yolo").out
    made = dsctl("snapshot", "show", two[0], "--outputs", "--json").json["outputs"]
    assert [(each["ref"].partition("@")[0], each["command"]) for each in made] == [("mask-yolo", "convert")]
    assert f"outputs:  {made[0]['ref']} (convert)" in dsctl("snapshot", "show", two[0], "--outputs").out
    assert "outputs:  none" in dsctl("snapshot", "show", two[1], "--outputs").out
    row = next(line for line in dsctl("snapshot", "list").out.splitlines() if line.startswith("mask-yolo@"))
    assert row.endswith(f"convert {two[0]}")


def test_a_tag_is_removed_by_either_way_of_writing_it(dsctl: Dsctl, two: list[str]) -> None:
    assert dsctl("snapshot", "untag", "mask@v1").out == "removed the tag mask@v1\n"
    assert dsctl("snapshot", "untag", "mask@v1").code == 1
    assert dsctl("snapshot", "untag", "mask", "v2").code == 0
    for wrong in (["mask"], ["mask@v1", "v1"]):
        assert dsctl("snapshot", "untag", *wrong).code == 2
    assert [record["tags"] for record in dsctl("snapshot", "list", "--json").json] == [[], []]


@promise("A caller that waits for a silent store is told after two seconds, once")
def test_a_store_that_does_not_answer_is_told_about_while_it_is_asked_again(home: Path) -> None:
    command = [sys.executable, "-m", "dataset_cli", "snapshot", "create", "mask", "--from", "s3://bucket/x"]
    with FaultProxy(f"http://127.0.0.1:{free_port()}") as proxy:
        proxy.always(Fault(status=503))
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | at_endpoint(proxy.url), cwd=ROOT
        ) as process:
            assert process.stderr is not None
            warning = process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
    assert warning.startswith("warning: s3://bucket")
    assert "the store cannot answer now (HTTP 503, InternalError); it is asked again for 5" in warning


@promise("An unreachable endpoint that the home never met is named after 3 s with its setting, however many ask")
@pytest.mark.parametrize("kind", ["refused", "unknown"])
def test_an_endpoint_that_nobody_answers_at_is_named_soon_with_its_setting(dsctl: Dsctl, kind: str) -> None:
    endpoint = {"refused": f"http://127.0.0.1:{free_port()}", "unknown": "http://no-such-host.invalid:9000"}[kind]
    begun = time.monotonic()
    result = dsctl("snapshot", "create", "mask", "--from", "s3://bucket/x", "--json", **at_endpoint(endpoint))
    assert time.monotonic() - begun < PATIENCE_S / 2
    assert (result.code, result.error["type"]) == (1, "StoreUnreachableError")
    assert f"{endpoint} " in result.error["message"]
    assert "AWS_ENDPOINT_URL" in result.error["hint"]


@promise("An unreachable endpoint that the home never met is named after 3 s with its setting, however many ask")
def test_a_read_from_an_endpoint_that_nobody_answers_at_ends_soon(
    dsctl: Dsctl, rclone_s3: RcloneS3, tmp_path: Path
) -> None:
    (rclone_s3.make_bucket("away-early") / "a.txt").write_bytes(b"a")
    keys = {"AWS_ACCESS_KEY_ID": rclone_s3.access_key, "AWS_SECRET_ACCESS_KEY": rclone_s3.secret_key}
    made = dsctl("snapshot", "create", "mask", "--from", "s3://away-early", **at_endpoint(rclone_s3.endpoint) | keys)
    assert made.code == 0, made.err
    mistyped = f"http://127.0.0.1:{free_port()}"
    begun = time.monotonic()
    read = dsctl("export", "mask", tmp_path / "out", "--json", **at_endpoint(mistyped) | keys)
    warm = dsctl("warm", "mask", **at_endpoint(mistyped) | keys)
    assert time.monotonic() - begun < PATIENCE_S / 2
    assert read.code != 0
    assert warm.code != 0
    assert f"{mistyped} refuses connections" in read.err
    assert f"{mistyped} refuses connections" in warm.err


@promise("Copying is called `--copy` everywhere")
def test_copying_is_called_copy_and_its_former_name_still_copies(dsctl: Dsctl, bucket: Path) -> None:
    described = dsctl("snapshot", "create", "--help").out
    assert "--copy" in described
    assert "--pin" not in described
    made = [
        dsctl("snapshot", "create", name, "--from", bucket, option, "--json").json
        for name, option in (("one", "--copy"), ("two", "--pin"))
    ]
    assert [record["unchecked"] for record in made] == [0, 0]
    listing = dsctl("snapshot", "list").out
    assert listing.count("copied") == 2
    assert "not held" not in listing
    spoilt = dsctl("snapshot", "create", "three", "--from", bucket, "--objects", bucket)
    assert spoilt.code == 2
    assert "for --copy" in spoilt.err


def test_a_diff_tells_which_objects_changed(tmp_path: Path, dsctl: Dsctl) -> None:
    folder = tmp_path / "boxes"
    folder.mkdir()
    for name in ("a", "b", "c"):
        Image.new("RGB", (100, 50)).save(folder / f"{name}.png")
    versions = (
        {"a": "0 0.5 0.5 0.2 0.2\n1 0.1 0.1 0.1 0.1\n", "b": "0 0.5 0.5 0.2 0.2\n", "c": "1 0.5 0.5 0.2 0.2\n"},
        {"a": "0 0.5 0.52 0.2 0.2\n", "b": "1 0.5 0.5 0.2 0.2\n", "c": "1 0.5 0.5 0.2 0.2\n"},
    )
    (folder / "classes.txt").write_text("cat\ndog\n")
    for labels in versions:
        for name, text in labels.items():
            (folder / f"{name}.txt").write_text(text)
        assert dsctl("snapshot", "create", "boxes", "--from", folder, "--copy").code == 0
    done = dsctl("snapshot", "diff", "boxes", "--objects")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [" ".join(line.split()) for line in lines[1:7]] == [
        "added 0 images",
        "removed 0 images",
        "changed 2 images",
        "removed 1 object dog 1",
        "moved 1 object cat 1",
        "relabelled 1 object cat → dog 1",
    ]
    assert lines[8:] == ["~ a.png  moved cat, removed dog", "~ b.png  relabelled cat → dog"]
    found = dsctl("snapshot", "diff", "boxes", "--objects", "--json").json
    assert found["objects"] == {"removed": {"dog": 1}, "moved": {"cat": 1}, "relabelled": {"cat → dog": 1}}
    # The web page's numbers are these.
    with api.open_annotations(found["a"]) as (_, before), api.open_annotations(found["b"]) as (_, after):
        compared = api.find_differences(before, after, ())
    assert compared.objects() == {
        ("removed", "dog", ""): 1,
        ("moved", "cat", "cat"): 1,
        ("relabelled", "cat", "dog"): 1,
    }
    assert compared.images()["annotated"] == found["images"]["changed"]
    assert found["changes"][1]["objects"] == [
        {
            "kind": "relabelled",
            "before": {"label": "cat", "box": [40.0, 20.0, 60.0, 30.0]},
            "after": {"label": "dog", "box": [40.0, 20.0, 60.0, 30.0]},
        }
    ]
    same = dsctl("snapshot", "diff", "boxes", "boxes", "--objects")
    assert same.out.splitlines()[1:] == ["no difference: 3 images annotated the same"]
    (folder / "c.txt").unlink()
    (folder / "c.png").unlink()
    (folder / "d.txt").touch()
    Image.new("RGB", (100, 50)).save(folder / "d.png")
    assert dsctl("snapshot", "create", "boxes", "--from", folder, "--copy").code == 0
    gone = dsctl("snapshot", "diff", "boxes", "--objects")
    assert gone.out.splitlines()[-2:] == ["- c.png  removed dog", "+ d.png  no objects"]
    assert f"create from file://{folder}/" in dsctl("log", "boxes").out
