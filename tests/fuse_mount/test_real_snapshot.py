"""The mount over real snapshots: catalog, manifest, daemon and tiers included."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import fuse_mount
from datacache.api import collect_garbage, connect, create_snapshot, open_catalog, remove_snapshot
from datacache.catalog.leases import MOUNTS, mounted_at
from datacache.core.errors import MountError
from datacache.daemon.mount_leases import mounted
from datacache.settings import Settings
from fuse_mount.lifecycle.state import MountFiles
from tests.fuse_mount.conftest import files_below
from tests.fuse_mount.test_session import ended
from tests.promises import promise


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


@promise("A hanging or stopped daemon costs a node's reads three seconds once")
def test_a_mount_reads_past_a_daemon_that_stops_or_dies_and_uses_it_again(
    folder: Path, settings: Settings, tmp_path: Path
) -> None:
    settings = replace(settings, prefetch=False)
    create_snapshot("mask", folder.as_uri(), settings=settings)
    (tmp_path / "mnt").mkdir()
    info = fuse_mount.mount_snapshot("mask", tmp_path / "mnt", settings=settings, workers=1)
    expected = files_below(folder)
    quarters = [sorted(expected)[first::4] for first in range(4)]

    def read(names: list[str]) -> None:
        assert {name: (info.mountpoint / name).read_bytes() for name in names} == {n: expected[n] for n in names}

    read(quarters[0])
    client = connect(settings)
    pid = client.health()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        read(quarters[1])
    finally:
        os.kill(pid, signal.SIGCONT)
    read(quarters[2])
    os.kill(pid, signal.SIGKILL)
    read(quarters[3])
    assert client.health()["pid"] != pid
    assert client.cache_status()["fetched"]["fetched"] > 0


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
    for ref in ("mask@v1", f"mask@{info.snapshot_id}"):
        with pytest.raises(MountError, match="no dataset 'mask'"):
            fuse_mount.mount_snapshot(ref, tmp_path / "other", settings=settings)


@promise("An id opens nothing by itself")
def test_an_id_is_mounted_only_under_a_name_that_has_it(folder: Path, settings: Settings, tmp_path: Path) -> None:
    id = create_snapshot("mask", folder.as_uri(), settings=settings).id
    (folder / "later").write_bytes(b"new")
    create_snapshot("face", folder.as_uri(), settings=settings)
    (tmp_path / "mnt").mkdir()
    for ref in (f"face@{id}", f"nothing@{id}", f"Mask@{id}"):
        with pytest.raises(MountError, match=r"no tag or snapshot|no dataset"):
            fuse_mount.mount_snapshot(ref, tmp_path / "mnt", settings=settings)


def test_a_ref_that_names_nothing_is_said(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    with pytest.raises(MountError, match="mask"):
        fuse_mount.mount_snapshot("mask@v9", tmp_path / "mnt", settings=settings)


@promise("A snapshot's mount that cannot be noted down (a full disk) is an error")
def test_a_mount_that_cannot_be_noted_down_is_not_left_mounted(
    folder: Path, settings: Settings, tmp_path: Path
) -> None:
    create_snapshot("mask", folder.as_uri(), settings=settings)
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    in_its_place = MountFiles(settings.home, mountpoint).state
    in_its_place.mkdir(parents=True)  # a full disk has the same effect: the state cannot be written
    with pytest.raises(MountError, match="cannot be noted down"):
        fuse_mount.mount_snapshot("mask", mountpoint, settings=settings)
    assert not mountpoint.is_mount()
    in_its_place.rmdir()
    fuse_mount.mount_snapshot("mask", mountpoint, settings=settings)
    fuse_mount.unmount(mountpoint, settings=settings)


@promise("What is mounted anywhere stays readable after its removal")
@pytest.mark.parametrize("with_daemon", [True, False])
def test_what_is_mounted_is_held_until_it_is_unmounted(
    folder: Path, settings: Settings, tmp_path: Path, with_daemon: bool
) -> None:
    """Copies, whose objects a collection may take: the reader goes on, and the removal says where it is mounted."""
    record = create_snapshot("mask", folder.as_uri(), settings=settings, tags=["v1"], pin=True)
    expected = files_below(folder)
    (tmp_path / "mnt").mkdir()
    info = fuse_mount.mount_snapshot("mask@v1", tmp_path / "mnt", settings=settings, workers=1)
    here = f"{socket.gethostname()}:{info.mountpoint}"
    removed = remove_snapshot("mask@v1", settings=settings)
    assert (removed.of_snapshot, removed.mounted_at) == (True, (here,))
    report = collect_garbage(grace_s=0, settings=settings)
    assert report.mounted == (here,)
    assert report.catalog.blobs == report.storages[0].objects == 0
    assert files_below(info.mountpoint) == expected  # cold: nothing was read before

    if not with_daemon:
        connect(settings).stop()
    fuse_mount.unmount(info.mountpoint, settings=settings)
    with closing(open_catalog(settings)) as catalog:
        assert mounted_at(catalog, record.id) == []
    report = collect_garbage(grace_s=0, settings=settings)
    assert report.catalog.blobs > 0
    assert report.storages[0].objects > 0


@promise("What is mounted anywhere stays readable after its removal")
def test_what_is_mounted_from_another_catalog_than_the_daemons_is_held_there(
    folder: Path, settings: Settings, tmp_path: Path
) -> None:
    connect(settings).health()  # starts it
    other = replace(settings, catalog=f"sqlite:///{tmp_path}/other.db")
    record = create_snapshot("mask", folder.as_uri(), settings=other, tags=["v1"], pin=True)
    (tmp_path / "mnt").mkdir()
    info = fuse_mount.mount_snapshot("mask@v1", tmp_path / "mnt", settings=other, workers=1)
    here = f"{socket.gethostname()}:{info.mountpoint}"
    assert remove_snapshot("mask@v1", settings=other).mounted_at == (here,)
    assert collect_garbage(grace_s=0, settings=other).mounted == (here,)
    assert collect_garbage(grace_s=0, settings=settings).mounted == ()
    assert files_below(info.mountpoint) == files_below(folder)  # cold: nothing was read before
    fuse_mount.unmount(info.mountpoint, settings=settings)
    with closing(open_catalog(other)) as catalog:
        assert mounted_at(catalog, record.id) == []
    assert not (settings.home / "run" / "mount-lease").exists()


@promise("With SQLite, a clock that is set ahead ends nothing before the next boot")
def test_a_clock_that_is_set_a_year_ahead_takes_nothing_that_is_mounted_here(
    folder: Path, settings: Settings, tmp_path: Path
) -> None:
    record = create_snapshot("mask", folder.as_uri(), settings=settings, tags=["v1"], pin=True)
    (tmp_path / "mnt").mkdir()
    info = fuse_mount.mount_snapshot("mask@v1", tmp_path / "mnt", settings=settings, workers=1)
    remove_snapshot("mask@v1", settings=settings)
    faked = ["faketime", "--exclude-monotonic", "-f", "+365d", sys.executable, "-m", "dataset_cli"]
    variables = os.environ | {"NO_FAKE_STAT": "1", "FAKETIME_FORCE_MONOTONIC_FIX": "0"}
    command = [*faked, "snapshot", "gc", "--grace", "0h", "--json"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with closing(open_catalog(settings)) as catalog:
        assert mounted_at(catalog, record.id) == [f"{socket.gethostname()}:{info.mountpoint}"]
    assert files_below(info.mountpoint) == files_below(folder)  # cold: nothing was read before


@promise("What is mounted anywhere stays readable after its removal")
@pytest.mark.parametrize("boot_known", [True, False])
def test_no_clock_says_whether_a_mount_is_of_an_earlier_boot(
    folder: Path, settings: Settings, tmp_path: Path, boot_known: bool
) -> None:
    """A clock that is set after the mount makes its state look as old as this, or older than the machine's start."""
    record = create_snapshot("mask", folder.as_uri(), settings=settings)
    (tmp_path / "mnt").mkdir()
    fuse_mount.mount_snapshot("mask", tmp_path / "mnt", settings=settings, workers=1)
    state = MountFiles(settings.home, tmp_path / "mnt").state
    values = json.loads(state.read_text())
    if not boot_known:  # written before states said it
        del values["boot"]
        state.write_text(json.dumps(values))
    os.utime(state, (0, 0))
    here = [(record.id, str(tmp_path / "mnt"), settings.catalog)]
    assert mounted(settings.home) == here
    connect(settings).hold_mounts()
    with closing(open_catalog(settings)) as catalog:
        assert mounted_at(catalog, record.id) == [f"{socket.gethostname()}:{tmp_path / 'mnt'}"]
    fuse_mount.unmount(tmp_path / "mnt", settings=settings)  # its supervisor would write its state down again
    state.write_text(json.dumps(values))  # as new as can be
    assert mounted(settings.home) == here
    state.write_text(json.dumps(values | {"boot": "an earlier one"}))
    assert mounted(settings.home) == []


@promise("What is mounted anywhere stays readable after its removal")
def test_the_next_daemon_takes_the_lease_of_what_is_mounted(folder: Path, settings: Settings, tmp_path: Path) -> None:
    record = create_snapshot("mask", folder.as_uri(), settings=settings)
    (tmp_path / "mnt").mkdir()
    fuse_mount.mount_snapshot("mask", tmp_path / "mnt", settings=settings, workers=1)
    with closing(open_catalog(settings)) as catalog:
        for key, _text in catalog.documents(MOUNTS):  # this daemon does not write it again for an hour
            catalog.remove_document(MOUNTS, key)
        connect(settings).stop()  # a mount may have the next one started before this does
        connect(settings)
        deadline = time.monotonic() + 60
        while not mounted_at(catalog, record.id):
            assert time.monotonic() < deadline
            time.sleep(0.05)
