"""`dsctl snapshot`."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cli.conftest import Dsctl

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
    assert set(first) == KEYS
    assert first["name"] == "mask"
    assert first["ref"] == f"mask@{first['id'][:12]}"
    assert (first["files"], first["bytes"]) == (3, 902)
    assert first["tags"] == ["good", "v1"]
    assert first["message"] == "first"
    assert first["parent"] is None

    (bucket / "images" / "3.jpg").write_bytes(b"three")
    second = dsctl("snapshot", "create", "mask", "--from", bucket, "--json").json
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
    assert len(dsctl("snapshot", "list", "--json").json) == 1


def test_nothing_under_a_url_is_a_failure(dsctl: Dsctl, tmp_path: Path) -> None:
    for url in (tmp_path / "missing", tmp_path / "home"):
        result = dsctl("snapshot", "create", "mask", "--from", url, "--json")
        assert result.code == 1
        assert result.error["type"] == "ObjectNotFoundError"
