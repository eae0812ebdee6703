"""Starting a mount's process: what is left where that fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datacache.core.errors import MountError
from datacache.settings import Settings
from fuse_mount import process, session
from fuse_mount.state import FilesOfMount, MountFiles
from tests import leftovers
from tests.fuse_mount.conftest import Mounter
from tests.fuse_mount.test_session import ended


def test_what_cannot_be_started_is_a_mounts_error_and_leaves_no_descriptor(tmp_path: Path) -> None:
    files = MountFiles(tmp_path, "/there")
    files.log.mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MountError, match="cannot be started: Is a directory"):
        process.start(["--config", "{}"], files, {}, foreground=False)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_says_nothing_in_time_is_ended_with_all_it_has_started(
    settings: Settings, mounter: Mounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("STANDIN_GATE", str(gate))
    read_word, started = process._read_word, []

    def read_word_when_a_worker_opens(fd: int, files: FilesOfMount) -> bytes:
        gate.read_bytes()
        started.extend(leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(settings.home)))
        return read_word(fd, files)

    monkeypatch.setattr(process, "_read_word", read_word_when_a_worker_opens)
    monkeypatch.setattr(process, "_READY_TIMEOUT_S", 0.0)
    monkeypatch.setattr(process, "_END_TIMEOUT_S", 0.05)
    with pytest.raises(MountError, match="did not start in 0 s"):
        mounter(opener="open_never", workers=1)
    assert len(started) >= 2  # supervisor and worker
    assert all(ended(pid) for pid in started)
    assert session.mount_at(tmp_path / "mnt") is None
