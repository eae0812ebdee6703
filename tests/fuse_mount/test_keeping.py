"""Asking a keeper that lets nobody in."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import fuse_mount
from datacache.core import ipc
from datacache.daemon import paths
from datacache.settings import Settings
from fuse_mount import MountInfo
from fuse_mount.lifecycle import keeping
from fuse_mount.lifecycle.state import MountConfig, MountFiles


@pytest.fixture
def hanging(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The listener of a keeper that accepts nobody; more may not wait."""
    monkeypatch.setattr(keeping, "_ANSWER_TIMEOUT_S", 0.01)
    path = paths.keeper_socket_path(settings.home)
    path.parent.mkdir()
    with ipc.listen(path, backlog=0) as listener, ipc.connect(path, timeout_s=0.0):
        yield listener


def state_of_a_mount_that_is_not_seen(settings: Settings, mountpoint: Path) -> MountFiles:
    """As it is where the mount is in another container, or gone."""
    config = MountConfig(
        ref="mask@1",
        mountpoint=str(mountpoint),
        home=str(settings.home),
        uid=os.getuid(),
        gid=os.getgid(),
        allow_other=False,
        workers=1,
    )
    files = MountFiles(settings.home, mountpoint)
    files.make_folder()
    files.write(
        MountInfo(
            mountpoint=mountpoint,
            ref="mask@1",
            dataset="mask",
            snapshot_id="1",
            files=0,
            total_bytes=0,
            pid=0,
            workers=(),
            device=0,
            log=files.log,
            started_at=0.0,
            config=config,
        )
    )
    return files


def test_a_keeper_that_hangs_is_not_waited_for_without_end(settings: Settings, hanging: socket.socket) -> None:
    assert keeping.fetch(settings.home, "k") == ({}, [])
    with pytest.raises(TimeoutError):
        keeping.kept(settings.home)


def test_while_the_keeper_does_not_say_what_it_has_no_state_is_removed(
    settings: Settings, hanging: socket.socket, tmp_path: Path
) -> None:
    files = state_of_a_mount_that_is_not_seen(settings, tmp_path / "mnt")
    assert fuse_mount.list_mounts(settings) == []
    assert files.read() is not None
    hanging.close()
    assert fuse_mount.list_mounts(settings) == []
    assert files.read() is None
