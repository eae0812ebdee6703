"""The cores that a process may use."""

from __future__ import annotations

import os

from datacache.core import cores as cores_module
from datacache.core.cores import cores, quota
from datacache.tiers.parts import parts_by_cores


def test_the_quotas_of_control_groups_are_known(tmp_path):
    root, member = tmp_path / "cgroup", tmp_path / "self"
    (root / "cpu" / "pod" / "box").mkdir(parents=True)
    member.write_text("4:cpu,cpuacct:/pod/box\n0::/slice/app\n")
    assert quota(root, member) is None
    (root / "cpu" / "pod" / "cpu.cfs_quota_us").write_text("350000\n")
    (root / "cpu" / "pod" / "cpu.cfs_period_us").write_text("100000\n")
    assert quota(root, member) == 3.5
    (root / "slice" / "app").mkdir(parents=True)
    (root / "slice" / "app" / "cpu.max").write_text("max 100000\n")
    (root / "slice" / "cpu.max").write_text("150000 100000\n")
    assert quota(root, member) == 1.5
    assert quota(tmp_path / "none", tmp_path / "none") is None


def test_a_node_has_a_process_for_eight_cores_that_its_container_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(128))
    monkeypatch.setattr(cores_module, "quota", lambda: None)
    assert (cores(), parts_by_cores()) == (128, 8)
    monkeypatch.setattr(cores_module, "quota", lambda: 16.5)
    assert (cores(), parts_by_cores()) == (16, 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    assert (cores(), parts_by_cores()) == (2, 1)
