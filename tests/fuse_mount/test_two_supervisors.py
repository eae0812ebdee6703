"""Callers on a control socket that say nothing, and two supervisors for one place: the later one owns its files."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import fuse_mount
from datacache.daemon.client import DaemonClient
from datacache.daemon.keeper import is_connected
from datacache.settings import Settings
from fuse_mount import MountInfo
from fuse_mount.kernel import session
from fuse_mount.lifecycle import keeping, pool
from fuse_mount.lifecycle.state import MountFiles
from tests.fuse_mount.conftest import Mounter, files_below
from tests.fuse_mount.mount_processes import wait_until
from tests.fuse_mount.test_session import ended


def state(info: MountInfo, settings: Settings) -> MountInfo:
    found = MountFiles(settings.home, info.mountpoint).read()
    assert found is not None
    return found


def wait_for(settings: Settings, info: MountInfo, *, kept: bool, unlike: int = 0) -> MountInfo:
    """The state that says whether the daemon has the descriptor, of a supervisor that is not the one given."""

    def ready() -> MountInfo | None:
        now = state(info, settings)
        return now if now.kept == kept and now.pid != unlike else None

    found: MountInfo = wait_until(settings.home / "mounts", ready)
    return found


@pytest.fixture
def daemon(settings: Settings) -> Iterator[DaemonClient]:
    client = DaemonClient(settings)
    client.ensure()
    yield client
    with contextlib.suppress(Exception):
        client.stop()


def test_callers_that_say_nothing_keep_nobody_waiting(folder: Path, mounter: Mounter, settings: Settings) -> None:
    info = mounter()
    silent = [MountFiles(settings.home, info.mountpoint).connect() for _ in range(40)]
    for connection, said in zip(silent[-3:], (b"{half a requ", b"[]\n", b"not JSON\n"), strict=True):
        connection.send(said)
    for pid in info.workers:
        os.kill(pid, signal.SIGKILL)
    assert files_below(info.mountpoint) == files_below(folder)
    assert fuse_mount.status(info.mountpoint, settings).pid == info.pid
    for connection in silent:
        connection.close()
    assert fuse_mount.status(info.mountpoint, settings).pid == info.pid
    assert fuse_mount.unmount(info.mountpoint, settings=settings)
    assert ended(info.pid)


def test_a_mount_in_the_place_of_one_that_was_detached_is_not_touched_by_that_ones_end(
    folder: Path, mounter: Mounter, settings: Settings, daemon: DaemonClient
) -> None:
    first = wait_for(settings, mounter(), kept=True)
    key = MountFiles(settings.home, first.mountpoint).key
    with (first.mountpoint / "large.bin").open("rb") as file:
        assert fuse_mount.unmount(first.mountpoint, lazy=True, settings=settings)
        second = wait_for(settings, mounter(), kept=True)
        os.kill(first.workers[0], signal.SIGKILL)  # its successor is none of the state's business
        assert file.read() == (folder / "large.bin").read_bytes()
        daemon.stop()
        wait_for(settings, second, kept=False)
        daemon.ensure()
        assert wait_for(settings, second, kept=True).pid == second.pid
    assert first.pid == second.pid  # one process supervises both
    second = wait_for(settings, second, kept=True)  # its workers may be others by now
    assert fuse_mount.status(second.mountpoint, settings).device == second.device
    _, [fd] = keeping.fetch(settings.home, key)
    assert is_connected(fd)
    os.close(fd)
    for pid in (second.pid, *second.workers):
        os.kill(pid, signal.SIGSTOP)  # none is to bring it back
    for pid in (second.pid, *second.workers):
        os.kill(pid, signal.SIGKILL)
    assert files_below(second.mountpoint) == files_below(folder)
    wait_for(settings, second, kept=True, unlike=second.pid)
    fuse_mount.unmount(second.mountpoint, settings=settings)
    assert keeping.known(settings.home) == {}


def test_a_supervisor_that_did_not_hear_of_its_hand_over_hands_over_when_it_looks(
    folder: Path, mounter: Mounter, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = mounter()
    monkeypatch.setattr(pool, "_HELLO_TIMEOUT_S", 0.1)  # of the one that stands still
    files = MountFiles(settings.home, info.mountpoint)
    os.kill(info.pid, signal.SIGSTOP)
    (files.folder / files.socket_name).unlink()  # as if it were dead
    later = fuse_mount.takeover(info.mountpoint, settings)
    os.kill(info.pid, signal.SIGCONT)
    for pid in (info.pid, *info.workers):
        assert ended(pid)
    assert state(info, settings).pid == later.pid
    assert files_below(info.mountpoint) == files_below(folder)
    fuse_mount.unmount(info.mountpoint, settings=settings)
    assert ended(later.pid)


def test_a_mount_that_vanishes_ends_its_processes_though_no_worker_can_open_it(
    folder: Path, mounter: Mounter, settings: Settings, tmp_path: Path
) -> None:
    info = mounter(opener="open_if_there", workers=1)
    os.rename(folder, tmp_path / "away")
    os.kill(info.workers[0], signal.SIGKILL)
    session.unmount_now(str(info.mountpoint))
    assert ended(info.pid)
    assert not MountFiles(settings.home, info.mountpoint).state.exists()
