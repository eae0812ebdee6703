"""`dsctl snapshot gc`."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Dsctl


def a_removed_snapshot(dsctl: Dsctl, bucket: Path) -> None:
    ref = dsctl("snapshot", "create", "mask", "--from", bucket, "--copy", "--json").json["ref"]
    (bucket / "images" / "1.jpg").write_bytes(b"changed")
    assert dsctl("snapshot", "create", "mask", "--from", bucket, "--copy").code == 0
    assert dsctl("snapshot", "rm", ref, "--yes").code == 0


def test_what_no_snapshot_needs_goes_when_it_is_old_enough_and_a_dry_run_says_so_before(
    dsctl: Dsctl, bucket: Path
) -> None:
    a_removed_snapshot(dsctl, bucket)
    young = dsctl("snapshot", "gc", "--json")
    assert young.code == 0
    assert young.json | {"storages": []} == {
        "dry_run": False,
        "grace_s": 86400.0,
        "blobs": 0,
        "blob_bytes": 0,
        "objects": 0,
        "object_bytes": 0,
        "young_blobs": 2,
        "young_objects": 1,
        "derived": 0,
        "documents": 0,
        "mounted": [],
        "storages": [],
    }
    said = dsctl("snapshot", "gc", "--grace", "0", "--dry-run", "--json").json
    done = dsctl("snapshot", "gc", "--grace", "0", "--json").json
    assert done == said | {"dry_run": False}
    assert (done["blobs"], done["objects"], done["object_bytes"]) == (2, 1, 300)
    assert [storage["kept"] for storage in done["storages"]] == [3]
    assert dsctl("snapshot", "verify", "mask", "--read").code == 0


def test_for_people_it_is_a_line_for_each_place(dsctl: Dsctl, bucket: Path) -> None:
    a_removed_snapshot(dsctl, bucket)
    lines = dsctl("snapshot", "gc").out.splitlines()
    assert lines[0] == "catalog: removed 0 blobs, 0 B"
    assert lines[1].endswith(": removed 0 objects, 0 B; 3 in use")
    assert lines[2] == "3 more stay for now: needed or stored less than 1 d ago, or mounted"
    assert (
        dsctl("snapshot", "gc", "--dry-run", "--grace", "0s")
        .out.splitlines()[1]
        .endswith(": would remove 1 object, 300 B; 3 in use")
    )


def test_a_grace_period_is_a_number_with_a_unit(dsctl: Dsctl) -> None:
    for text, seconds in {"90s": 90, "1.5m": 90, "24h": 86400, "7d": 7 * 86400, "15": 15}.items():
        assert dsctl("snapshot", "gc", "--grace", text, "--json").json["grace_s"] == seconds
    for text in ("", "x", "1 year", "-1h"):
        wrong = dsctl("snapshot", "gc", f"--grace={text}")
        assert wrong.code == 2
        assert "24h" in wrong.err


def test_a_storage_that_is_away_is_a_warning_and_code_1(dsctl: Dsctl, bucket: Path) -> None:
    assert dsctl("snapshot", "create", "mask", "--from", bucket).code == 0
    away = dsctl(
        "snapshot", "gc", DATACACHE_OBJECTS="s3://nowhere/x", AWS_ENDPOINT_URL="http://127.0.0.1:9",
        AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="hush", DATACACHE_STORE_TIMEOUT_S="1",
    )  # fmt: skip
    assert away.code == 1
    assert "warning: " in away.err
    assert "hush" not in away.err + away.out
    assert away.out.startswith("catalog: removed 0 blobs")
