"""The Grafana dashboard asks for metrics that a node really prints."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from csi_driver.metrics import COUNTS, NodeMetrics
from csi_driver.node.records import Records
from datacache import connect, create_snapshot, open_snapshot
from datacache.settings import Settings
from fuse_mount import mount_bucket, unmount

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "datacache.json"
_METRIC = re.compile(r"\bdatacache_[a-z_]+")


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


@pytest.fixture
def printed(settings: Settings, tmp_path: Path) -> str:
    for name in ("bucket", "runs", "mnt"):
        (tmp_path / name).mkdir()
    (tmp_path / "bucket" / "a").write_bytes(b"a" * 1000)
    create_snapshot("mask", (tmp_path / "bucket").as_uri())
    connect().set_tenants({"lab": 10**9}, {"mask": ["lab"]})
    with open_snapshot("mask") as snapshot:
        snapshot.read("a")
    COUNTS.call("NodeGetInfo", "OK")
    mount_bucket((tmp_path / "runs").as_uri(), tmp_path / "mnt", settings=settings)
    try:
        return NodeMetrics(replace(settings, metrics_names=True), Records(settings.home / "csi")).render()
    finally:
        unmount(tmp_path / "mnt", settings=settings)


def test_every_metric_of_the_dashboard_is_printed(printed: str) -> None:
    names = set(re.findall(r"^(datacache_[a-z_]+)", printed, re.MULTILINE))
    asked = {
        name
        for panel in dashboard()["panels"]
        for target in panel["targets"]
        for name in _METRIC.findall(target["expr"])
    }
    assert len(asked) > 15
    assert asked - names == set()
    assert "datacache_csi_daemon_up" in names, "the list of nodes comes from it"


def test_each_alert_asks_for_metrics_that_are_printed_and_has_its_line_in_the_documents(printed: str) -> None:
    names = set(re.findall(r"^# TYPE (datacache_[a-z_]+)", printed, re.MULTILINE))
    [rule] = yaml.safe_load_all((ROOT / "deploy/kubernetes/monitoring/alerts.yaml").read_text(encoding="utf-8"))
    alerts = {each["alert"]: each for group in rule["spec"]["groups"] for each in group["rules"]}
    assert len(alerts) >= 10
    for each in alerts.values():
        assert set(_METRIC.findall(each["expr"])) <= names, each
        assert each["expr"].count("(") == each["expr"].count(")")
        assert each["labels"]["severity"] in ("warning", "critical")
        assert set(re.findall(r"\$labels\.(\w+)", each["annotations"]["summary"])) <= {"node", "tier"}
    text = (ROOT / "docs/OPERATIONS.md").read_text(encoding="utf-8").partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(Datacache\w+)`", text)) == set(alerts)


def test_panels_do_not_overlap_and_their_queries_are_balanced() -> None:
    panels = dashboard()["panels"]
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")"), target["expr"]
            assert target["expr"].count("{") == target["expr"].count("}"), target["expr"]
