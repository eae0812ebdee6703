"""Starting a mount's process: what is left where that fails."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from datacache.core import ipc
from datacache.core.errors import MountError
from datacache.settings import Settings
from fuse_mount.kernel import session
from fuse_mount.lifecycle import process
from fuse_mount.lifecycle.state import MountFiles
from tests import leftovers
from tests.fuse_mount.conftest import Mounter
from tests.fuse_mount.test_session import ended


def test_what_cannot_be_started_is_a_mounts_error_and_leaves_no_descriptor() -> None:
    leftovers.in_own_process(start_what_cannot_be_started)


def start_what_cannot_be_started() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = MountFiles(Path(folder), "/there")
        files.log.mkdir(parents=True)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(MountError, match="cannot be started: Is a directory"):
            process.start(["--config", "{}"], files, {}, foreground=False)
        assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("attached", [False, True])
def test_an_error_names_the_log_of_a_process_that_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attached: bool
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    log = tmp_path / "mount.log"
    child, talk = process.spawn([], log, {}, attached=attached)
    with pytest.raises(MountError, match="ended at once") as ended_at_once:
        talk.hear(timeout_s=60.0)
    talk.close()
    child.wait()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    with pytest.raises(MountError, match="cannot be started") as not_started:
        process.spawn([], log, {}, attached=attached)
    named = [str(log) in error.message + error.hint for error in (ended_at_once.value, not_started.value)]
    assert named == [not attached] * 2


def test_what_says_nothing_in_time_is_ended_with_all_it_has_started(
    settings: Settings, mounter: Mounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("STANDIN_GATE", str(gate))
    started: list[int] = []

    receive = ipc.receive

    def receive_when_a_worker_opens(connection: socket.socket, *, timeout_s: float = 10.0, most_fds: int = 0) -> Any:
        if timeout_s == process.READY_TIMEOUT_S:
            gate.read_bytes()
            started.extend(leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(settings.home)))
            timeout_s = 0.05
        return receive(connection, timeout_s=timeout_s, most_fds=most_fds)

    monkeypatch.setattr(ipc, "receive", receive_when_a_worker_opens)
    with pytest.raises(MountError, match="did not start in 90 s"):
        mounter(opener="open_never", workers=1)
    assert len(started) >= 2  # supervisor and worker
    assert all(ended(pid) for pid in started)
    assert session.mount_at(tmp_path / "mnt") is None
