"""`dsctl snapshot`."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import closing
from dataclasses import replace
from hashlib import md5
from pathlib import Path

import pytest

from datacache import api
from datacache.core.errors import SnapshotNotFoundError, TagExistsError
from datacache.settings import Settings
from tests.cli.conftest import Dsctl
from tests.promises import promise
from tests.servers import RcloneS3

KEYS = {
    "name",
    "id",
    "ref",
    "files",
    "bytes",
    "tags",
    "created_at",
    "origin",
    "message",
    "parent",
    "lineage",
    "warnings",
    "held",
}


def test_a_snapshot_is_created_listed_shown_tagged_and_removed(dsctl: Dsctl, bucket: Path) -> None:
    made = dsctl(
        "snapshot",
        "create",
        "mask",
        "--from",
        bucket.as_uri(),
        "--tag",
        "v1",
        "--tag",
        "good",
        "-m",
        "first",
        "--json",
    )
    assert made.code == 0, made.err
    first = made.json
    assert (first.pop("links_left_out"), first.pop("entries_passed_over")) == (0, 0)
    assert set(first) == KEYS
    assert first["name"] == "mask"
    assert first["ref"] == f"mask@{first['id'][:12]}"
    assert (first["files"], first["bytes"]) == (3, 902)
    assert first["tags"] == ["good", "v1"]
    assert first["message"] == "first"
    assert first["parent"] is None

    (bucket / "images" / "3.jpg").write_bytes(b"three")
    second = dsctl("snapshot", "create", "mask", "--from", bucket, "--json").json
    del second["links_left_out"], second["entries_passed_over"]
    assert second["parent"] == first["id"]
    assert dsctl("snapshot", "list", "--json").json == [first, second]
    assert dsctl("snapshot", "list", "mask", "--json").json == [first, second]
    assert dsctl("snapshot", "show", "mask@latest", "--json").json == second

    assert dsctl("snapshot", "tag", "mask@latest", "v1").code == 1
    assert dsctl("snapshot", "tag", "mask@latest", "v1", "--move").code == 0
    assert dsctl("snapshot", "show", "mask@v1", "--json").json["id"] == second["id"]
    assert dsctl("snapshot", "untag", "mask", "v1").code == 0
    assert dsctl("snapshot", "untag", "mask", "v1").code == 1

    assert dsctl("snapshot", "rm", "mask@latest", "--yes").code == 0
    assert dsctl("snapshot", "list", "--json").json == [first | {"tags": ["good"]}]


def test_the_same_bucket_gives_the_same_snapshot(dsctl: Dsctl, bucket: Path) -> None:
    first = dsctl("snapshot", "create", "mask", "--from", bucket, "--json").json
    assert dsctl("snapshot", "create", "mask", "--from", bucket, "--json").json == first


def test_a_taken_tag_is_moved_only_when_asked_to(dsctl: Dsctl, bucket: Path) -> None:
    assert dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1").code == 0
    (bucket / "new").write_bytes(b"new")
    refused = dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1", "--json")
    assert refused.code == 1
    assert refused.error["type"] == "TagExistsError"
    assert len(dsctl("snapshot", "list", "--json").json) == 1
    assert dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1", "--move-tags").code == 0


@promise("stdout carries the result only; a pipe gets no colour and no bar")
def test_for_people_it_is_a_table_without_colour_in_a_pipe(dsctl: Dsctl, bucket: Path) -> None:
    assert "There are no snapshots yet" in dsctl("snapshot", "list").out
    made = dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1", "-m", "a \x1b[31mred\x1b[0m one")
    assert made.out.endswith("3 files, 902 B  tags: v1\n")
    assert made.err == ""
    listed = dsctl("snapshot", "list")
    assert listed.out.splitlines()[0].split()[:3] == ["REF", "TAGS", "FILES"]
    assert "v1, latest" in listed.out
    assert "\x1b" not in listed.out + dsctl("snapshot", "show", "mask").out


def test_files_are_listed_with_their_sizes(dsctl: Dsctl, bucket: Path) -> None:
    (bucket / os.fsdecode(b"caf\xe9")).write_bytes(b"1234")
    dsctl("snapshot", "create", "mask", "--from", bucket)
    shown = dsctl("snapshot", "show", "mask", "--files")
    assert shown.code == 0, shown.err
    lines = [line.split() for line in shown.out.partition("\n\n")[2].splitlines()]
    assert lines == [
        ["4", "caf\udce9"],
        ["300", "images/1.jpg"],
        ["600", "images/2.jpg"],
        ["2", "labels.txt"],
    ]
    entries = dsctl("snapshot", "show", "mask", "--files", "--json").json["entries"]
    assert [(e["path"], e["bytes"]) for e in entries] == [(name, int(size)) for size, name in lines]


def test_removing_asks_first_and_names_no_version_by_itself(dsctl: Dsctl, bucket: Path) -> None:
    dsctl("snapshot", "create", "mask", "--from", bucket)
    unsure = dsctl("snapshot", "rm", "mask", "--yes")
    assert unsure.code == 2
    assert "mask@latest" in unsure.err
    silent = dsctl("snapshot", "rm", "mask@latest")
    assert silent.code == 2
    assert "--yes" in silent.err
    assert "this must be confirmed: remove the snapshot mask@" in silent.err
    assert len(dsctl("snapshot", "list", "--json").json) == 1


@promise("Removing by a tag removes the tag, and the snapshot with its last tag")
def test_removing_by_a_tag_removes_the_tag_and_the_snapshot_with_its_last(dsctl: Dsctl, bucket: Path) -> None:
    made = dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1", "--tag", "v2", "--json").json
    first = dsctl("snapshot", "rm", "mask@v1", "--yes")
    assert (first.code, first.out) == (0, f"removed the tag mask@v1; the snapshot {made['ref']} stays, as mask@v2\n")
    assert dsctl("snapshot", "show", "mask@v2", "--json").json["tags"] == ["v2"]
    assert dsctl("snapshot", "rm", "mask@v1", "--yes").code == 1

    last = dsctl("snapshot", "rm", "mask@v2", "--yes", "--json").json
    assert (last["removed_tags"], last["removed_snapshot"], last["kept_tags"], last["latest"]) == (
        ["v2"],
        True,
        [],
        None,
    )
    assert dsctl("snapshot", "list", "--json").json == []


@promise("Removing by a tag removes the tag, and the snapshot with its last tag")
def test_a_snapshot_with_tags_is_removed_by_its_id_only_with_all_of_them(dsctl: Dsctl, bucket: Path) -> None:
    other = dsctl("snapshot", "create", "mask", "--from", bucket, "--json").json
    (bucket / "new").write_bytes(b"new")
    made = dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1", "--tag", "v2", "--json").json
    for ref in (made["ref"], f"mask@{made['id']}", "mask@latest"):
        refused = dsctl("snapshot", "rm", ref, "--yes")
        assert refused.code == 1
        assert "mask@v1, mask@v2; nothing was removed" in refused.err
        assert "--all-tags" in refused.err
    assert len(dsctl("snapshot", "list", "--json").json) == 2
    removed = dsctl("snapshot", "rm", "mask@v1", "--all-tags", "--yes")
    assert removed.out == (
        f"removed the snapshot {made['ref']} (4 files) with the tags mask@v1, mask@v2; mask@latest is {other['ref']}\n"
    )
    assert [each["ref"] for each in dsctl("snapshot", "list", "--json").json] == [other["ref"]]
    assert dsctl("snapshot", "rm", "mask@latest", "--yes").out.endswith(", the last one of mask\n")


@promise("Removing by a tag removes the tag, and the snapshot with its last tag")
def test_python_removes_as_the_command_does(dsctl: Dsctl, bucket: Path, settings: Settings) -> None:
    api.create_snapshot("mask", str(bucket), tags=["v1", "v2"], settings=settings)
    with pytest.raises(TagExistsError, match="mask@v1, mask@v2"):
        api.remove_snapshot("mask@latest", settings=settings)
    first = api.remove_snapshot("mask@v1", settings=settings)
    assert (first.tags, first.kept_tags, first.of_snapshot) == (("v1",), ("v2",), False)
    assert api.remove_snapshot("mask@v2", settings=settings).of_snapshot
    with pytest.raises(SnapshotNotFoundError):
        api.remove_snapshot("mask@v2", settings=settings)


@promise("A data set's command, source and layout change only with `--replace`")
def test_what_a_data_set_is_changes_only_when_asked_to(dsctl: Dsctl, bucket: Path, tmp_path: Path) -> None:
    made = dsctl("snapshot", "create", "mask", "--from", bucket, "--json").json
    (bucket / "new").write_bytes(b"new")
    assert dsctl("snapshot", "create", "mask", "--from", f"{bucket}/").code == 0  # the next version
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "1").write_bytes(b"1")
    refused = dsctl("snapshot", "create", "mask", "--from", elsewhere, "--json")
    assert refused.code == 1
    assert refused.error["type"] == "OtherKindError"
    assert f"create --from file://{elsewhere}/" in refused.error["message"]
    assert "--replace" in refused.error["hint"]
    assert len(dsctl("snapshot", "list", "--json").json) == 2
    assert dsctl("snapshot", "create", "mask", "--from", elsewhere, "--replace").code == 0
    back = dsctl("snapshot", "create", "mask", "--from", bucket)
    assert back.code == 1
    assert made["ref"] in dsctl("snapshot", "list").out


@promise("`snapshot list` and `show` say where the bytes are held")
def test_list_and_show_say_whether_the_bytes_are_held(dsctl: Dsctl, bucket: Path) -> None:
    assert dsctl("snapshot", "create", "mask", "--from", bucket).code == 0
    assert dsctl("snapshot", "create", "kept", "--from", bucket, "--copy").code == 0
    kept, mask = dsctl("snapshot", "list", "--json").json
    assert mask["held"] == {"copied": 0, "versioned": 0, "referenced": 3}
    assert kept["held"] == {"copied": 3, "versioned": 0, "referenced": 0}
    lines = dsctl("snapshot", "list").out.splitlines()
    assert " HELD " in lines[0]
    assert " copied " in lines[1]
    assert " not held " in lines[2]
    assert (
        "held:     not held (a change in the bucket breaks it; --copy copies)" in dsctl("snapshot", "show", "mask").out
    )
    assert "held:     copied\n" in dsctl("snapshot", "show", "kept").out


@promise("`snapshot list` and `show` say where the bytes are held")
def test_a_record_of_an_older_version_is_looked_up(dsctl: Dsctl, bucket: Path, settings: Settings) -> None:
    for pin in (False, True):
        record = api.create_snapshot(f"mask{pin}", str(bucket), pin=pin, settings=settings)
        with closing(api.open_catalog(settings)) as catalog:
            catalog.commit(replace(record, dataset=f"old{pin}", held=None))
        new, old = (dsctl("snapshot", "show", f"{name}{pin}", "--json").json["held"] for name in ("mask", "old"))
        assert new == old


def test_nothing_under_a_url_is_a_failure(dsctl: Dsctl, tmp_path: Path) -> None:
    for url in (tmp_path / "missing", tmp_path / "home"):
        result = dsctl("snapshot", "create", "mask", "--from", url, "--json")
        assert result.code == 1
        assert result.error["type"] == "ObjectNotFoundError"


def test_the_reference_of_what_was_made_goes_into_a_file(dsctl: Dsctl, bucket: Path, tmp_path: Path) -> None:
    place = tmp_path / "outputs" / "ref"
    create = ("snapshot", "create", "mask", "--from", bucket.as_uri(), "--output-ref", place)
    made = dsctl(*create, "--json")
    assert made.code == 0, made.err
    assert place.read_text() == f"mask@{made.json['id']}"
    failed = dsctl("snapshot", "create", "mask", "--from", (tmp_path / "nothing").as_uri(), "--output-ref", place)
    assert failed.code == 1
    assert place.read_text() == "", "what an earlier command has left is no result of this one"


def test_a_reference_that_cannot_be_written_or_is_of_nothing_is_wrong_usage_and_nothing_is_made(
    dsctl: Dsctl, bucket: Path, tmp_path: Path
) -> None:
    made = dsctl("snapshot", "create", "mask", "--from", bucket.as_uri(), "--output-ref", tmp_path)
    assert made.code == 2, made.err
    below = tmp_path / "file" / "ref"
    below.parent.write_text("")
    made = dsctl("snapshot", "create", "mask", "--from", bucket.as_uri(), "--output-ref", below)
    assert made.code == 2
    assert f"--output-ref: {below} cannot be written" in made.err
    assert dsctl("snapshot", "list", "--json").json == []
    assert dsctl("snapshot", "create", "mask", "--from", bucket.as_uri()).code == 0
    for words in (
        ("query", "mask"),
        ("evaluate", "mask", "--against", "mask"),
        ("stats", "mask"),
        ("shard", "mask", "--to", tmp_path / "shards"),
    ):
        done = dsctl(*words, "--output-ref", tmp_path / "ref")
        assert done.code == 2, words
        assert "--as" in done.err


def test_a_snapshot_is_made_of_an_inventory(dsctl: Dsctl, rclone_s3: RcloneS3) -> None:
    buckets = [rclone_s3.make_bucket(name) for name in ("inventoried", "inventories")]
    row = '"inventoried","faces/a%2Bb.jpg","3","2026-01-31T00:00:00.000Z","d41d8cd98f00b204e9800998ecf8427e"\n'
    rows = gzip.compress(row.encode())
    (buckets[1] / "rows.csv.gz").write_bytes(rows)
    listed = {"key": "rows.csv.gz", "size": len(rows), "MD5checksum": md5(rows).hexdigest()}
    manifest = {"sourceBucket": "inventoried", "fileFormat": "CSV", "files": [listed]}
    manifest["fileSchema"] = "Bucket, Key, Size, LastModifiedDate, ETag"
    (buckets[1] / "manifest.json").write_text(json.dumps(manifest))
    words = ("snapshot", "create", "faces", "--from", "s3://inventoried/faces")
    made = dsctl(*words, "--inventory", "s3://inventories/manifest.json", "--json", **rclone_s3.env())
    assert made.code == 0, made.err
    assert (made.json["files"], made.json["bytes"]) == (1, 3)
    shown = dsctl("snapshot", "show", "faces", "--files", "--json").json
    assert [entry["path"] for entry in shown["entries"]] == ["a+b.jpg"]
