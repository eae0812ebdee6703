"""The health of a disk: how often a failing one is asked, and by how many."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from datacache.tiers import health


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(health, "monotonic", lambda: now[0])
    monkeypatch.setattr(health, "pause_s", lambda failures, *, first_s, longest_s: first_s * failures)
    return now


def broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_failed_disk_is_asked_by_one_after_each_pause_and_by_all_once_it_works(clock):
    disk = health.DiskHealth(Path("/disk"))
    assert not disk.away()
    assert disk.turn()
    assert disk.turn()
    for failures in (1, 2, 3):
        disk.failed(broken())
        assert disk.problem == "Input/output error (/disk)"
        clock[0] += failures - 0.5  # the pause grows by a second each time
        assert disk.away()
        assert not disk.turn()
        clock[0] += 0.6
        assert not disk.away()
        assert disk.turn()
        assert not disk.turn(), "somebody is trying already"
    clock[0] += 1.1
    assert disk.turn(), "whoever tried has said nothing"
    disk.worked()
    assert not disk.away()
    assert disk.problem == ""
    assert disk.turn()
    assert disk.turn()
    disk.failed(broken())
    clock[0] += 1.1
    assert disk.turn(), "pauses begin again with the shortest"


def test_one_folder_has_one_health():
    assert health.health_of(Path("/a")) is health.health_of(Path("/a"))
    assert health.health_of(Path("/a")) is not health.health_of(Path("/b"))
