"""The mount over real snapshots: catalog, manifest, daemon and tiers included."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

import fuse_mount
from datacache.api import create_snapshot, open_catalog
from datacache.core.errors import MountError
from datacache.settings import Settings
from tests.fuse_mount.conftest import files_below
from tests.fuse_mount.test_session import ended


def test_a_snapshot_is_read_cold_and_warm_and_stays_when_its_tag_moves(
    folder: Path, settings: Settings, tmp_path: Path
) -> None:
    create_snapshot("mask", folder.as_uri(), settings=settings, tags=["v1"])
    expected = files_below(folder)
    (tmp_path / "mnt").mkdir()
    for _ in range(2):
        info = fuse_mount.mount_snapshot("mask@v1", tmp_path / "mnt", settings=settings, workers=2)
        assert files_below(info.mountpoint) == expected
        assert (info.files, info.total_bytes) == (len(expected), sum(map(len, expected.values())))
        fuse_mount.unmount(info.mountpoint, settings=settings)
    info = fuse_mount.mount_snapshot("mask", tmp_path / "mnt", settings=settings, workers=1)
    (folder / "later").write_bytes(b"new")
    assert create_snapshot("mask", folder.as_uri(), settings=settings).id != info.snapshot_id
    os.kill(info.workers[0], signal.SIGKILL)
    assert ended(info.workers[0])
    assert not (info.mountpoint / "later").exists()  # the next worker shows the same snapshot
    assert files_below(info.mountpoint) == expected


def test_a_snapshot_that_is_removed_while_it_is_mounted_is_read_on_by_the_next_worker(
    folder: Path, settings: Settings, tmp_path: Path
) -> None:
    create_snapshot("mask", folder.as_uri(), settings=settings, tags=["v1"])
    (tmp_path / "mnt").mkdir()
    info = fuse_mount.mount_snapshot("mask@v1", tmp_path / "mnt", settings=settings, workers=1)
    with closing(open_catalog(settings)) as catalog:
        assert catalog.remove_snapshot("mask", info.snapshot_id)
    os.kill(info.workers[0], signal.SIGKILL)
    assert ended(info.workers[0])
    assert files_below(info.mountpoint) == files_below(folder)
    (tmp_path / "other").mkdir()
    with pytest.raises(MountError, match="no dataset 'mask'"):
        fuse_mount.mount_snapshot("mask@v1", tmp_path / "other", settings=settings)


def test_a_ref_that_names_nothing_is_said(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    with pytest.raises(MountError, match="mask"):
        fuse_mount.mount_snapshot("mask@v9", tmp_path / "mnt", settings=settings)
