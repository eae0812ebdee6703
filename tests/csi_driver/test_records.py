"""Test what a node writes down of its volumes, and what of it another driver can read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from csi_driver.node.records import NodeVolume, PublishedTarget, Records, SharedMount


def _record() -> NodeVolume:
    mount = SharedMount(source="mask@0123", bucket=False)
    return NodeVolume(volume_id="v", context={"dataset": "mask@0123"}, mount=mount, mode=3, staging="/staging")


def test_a_record_of_a_newer_driver_can_be_read(tmp_path: Path) -> None:
    records = Records(tmp_path)
    record = replace(_record(), targets=(PublishedTarget(path="/target", read_only=True),))
    records.put(record)
    (path,) = (tmp_path / "volumes").glob("*.json")
    values = json.loads(path.read_text())
    values["colour"] = values["targets"][0]["colour"] = values["mount"]["colour"] = "red"
    path.write_text(json.dumps(values))
    assert records.get("v") == record
    assert records.all() == [record]
    assert records.complete()


def test_only_its_owner_can_look_at_the_records_of_a_node(tmp_path: Path) -> None:
    Records(tmp_path / "csi")
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "csi", *(tmp_path / "csi").iterdir())} == {0}


def test_a_record_that_cannot_be_read_is_known_to_be_there(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.put(_record())
    (tmp_path / "volumes" / "other.json").write_text("{")
    assert records.all() == [_record()]
    assert not records.complete()
