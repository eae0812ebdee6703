"""The tier on disk, where nobody says how large it is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from datacache import connect
from datacache.core.errors import SettingsError
from datacache.settings import load_settings
from dataset_cli.variables import differences
from tests import leftovers
from tests.promises import promise

MIB = 2**20


@pytest.fixture
def small_disk(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 256 MiB with a home on it."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "small", disk], check=True)
    monkeypatch.setenv("DATACACHE_HOME", str(disk / "home"))
    monkeypatch.delenv("DATACACHE_SSD_BYTES", raising=False)
    yield disk
    place = str(disk / "home")
    leftovers.end_processes(lambda: leftovers.processes_with("DATACACHE_HOME", lambda value: value == place))
    subprocess.run(["umount", "-l", disk], check=True)


@promise("The tier on disk keeps the size that its first daemon found")
def test_it_is_what_the_first_daemon_found_whatever_fills_the_disk_later(small_disk: Path) -> None:
    connect()
    size_bytes = load_settings().ssd_bytes
    assert 64 * MIB < size_bytes <= 128 * MIB
    (small_disk / "others").write_bytes(bytes(100 * MIB))
    assert load_settings().ssd_bytes == size_bytes
    file = small_disk / "home" / "ssd_bytes"
    assert int(file.read_text()) == size_bytes
    file.write_text("much")
    with pytest.raises(SettingsError, match="ssd_bytes") as caught:
        load_settings()
    assert "DATACACHE_SSD_BYTES" in caught.value.hint
    file.write_text("")
    with pytest.raises(SettingsError):
        load_settings()
    file.unlink()


def test_a_new_home_on_a_disk_that_fills_has_no_settings_that_differ(small_disk: Path) -> None:
    ours = load_settings()
    (small_disk / "others").write_bytes(bytes(50 * MIB))  # between this process's look and the daemon's
    client = connect(ours)
    assert differences(ours, client.health()) == differences(load_settings(), client.health()) == []
    size_bytes = int((small_disk / "home" / "ssd_bytes").read_text())
    assert size_bytes < ours.ssd_bytes
    (tier,) = (tier for tier in client.cache_status()["tiers"] if tier["name"] == "ssd")
    assert tier["budget_bytes"] <= size_bytes
    assert [each.name for each in differences(replace(ours, ssd_bytes=MIB), client.health())] == ["DATACACHE_SSD_BYTES"]
