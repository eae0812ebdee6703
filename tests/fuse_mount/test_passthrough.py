"""Mounts of large files: the kernel reads whole, checked files of the SSD tier itself, and nobody notices."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import signal
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import fuse_mount
from datacache.api import create_snapshot, evict, open_snapshot, warm
from datacache.core.ids import BLOCK_BYTES
from datacache.settings import Settings
from datacache.tiers.layout import ssd_dir
from dataset_cli.main import run
from fuse_mount import MountInfo
from fuse_mount.kernel import session
from fuse_mount.lifecycle import pool
from fuse_mount.lifecycle.state import MountFiles
from fuse_mount.snapshot.passthrough import EVICTED, PLAIN
from tests.fuse_mount.test_session import ended
from tests.promises import promise

CONTENT = random.Random(3).randbytes(2 * BLOCK_BYTES + 100_001)


@pytest.fixture
def mount(settings: Settings, tmp_path: Path) -> Callable[[], MountInfo]:
    """mount() → MountInfo of a snapshot of one large file and a small one, nothing of which is on this node."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.bin").write_bytes(CONTENT)
    (source / "small").write_bytes(b"small")
    settings = replace(settings, prefetch=False)
    create_snapshot("weights", source.as_uri(), settings=settings)
    (tmp_path / "mnt").mkdir()

    def mount() -> MountInfo:
        info = fuse_mount.mount_snapshot("weights", tmp_path / "mnt", settings=settings, workers=2, large_files=True)
        if not info.config.passed:
            pytest.skip("the kernel passes no files through here")
        return info

    return mount


def wait_for(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def make_whole(settings: Settings) -> Path:
    """Have all of the snapshot on this node's disk, and checked. Return the file of the large one."""
    warm("weights", settings=settings)
    with open_snapshot("weights", settings=settings) as snapshot:
        wait_for(lambda: snapshot.rows.object_file(0) is not None)
        return ssd_dir(settings.home) / f"o-{snapshot.rows.object_file(0):08x}"


def decided(info: MountInfo) -> list[int]:
    """Return what was decided of each object file of a mount that was opened: its backing id, or why it has none."""
    table = MountFiles(info.config.home, info.mountpoint).folder / info.config.passed
    return [id for _, id in struct.iter_unpack("<Ii", table.read_bytes())]


@promise("A mount of large files reads whole, checked files past every process of ours")
def test_an_open_file_is_read_on_when_the_connection_is_gone(
    mount: Callable[[], MountInfo], settings: Settings
) -> None:
    make_whole(settings)
    info = mount()
    fd = os.open(info.mountpoint / "model.bin", os.O_RDONLY)
    with open(fd, "rb", buffering=0) as file:
        mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        session.abort(info.device)
        with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
            os.listdir(info.mountpoint)
        assert mapped[:] == CONTENT
        assert file.read() == CONTENT
        assert os.pread(fd, 10, 5 * 2**20) == CONTENT[5 * 2**20 :][:10]


@promise("A mount of large files reads whole, checked files past every process of ours")
@promise("Workers and daemon may be killed again and again: no read breaks, no byte is wrong (Linux 6.9 and newer)")
def test_a_file_is_opened_in_one_way_by_all_whoever_is_killed_or_takes_over(
    mount: Callable[[], MountInfo], settings: Settings
) -> None:
    make_whole(settings)
    info = mount()
    path = info.mountpoint / "model.bin"
    number = path.stat().st_ino
    assert {entry.name: entry.inode() for entry in os.scandir(info.mountpoint)}["model.bin"] == number
    with ThreadPoolExecutor(8) as threads, open(path, "rb", buffering=0) as first:
        for turn in range(4):
            reads = [threads.submit(path.read_bytes) for _ in range(8)]
            if turn == 3:
                info = fuse_mount.takeover(info.mountpoint, settings)
            else:
                now = MountFiles(settings.home, info.mountpoint).read()
                assert now is not None
                for pid in now.workers:
                    with contextlib.suppress(ProcessLookupError):  # the state file is of a moment ago
                        os.kill(pid, signal.SIGKILL)
                    assert ended(pid)
            assert all(read.result() == CONTENT for read in reads)
        assert first.read() == CONTENT
    (id,) = decided(info)
    assert id > 0
    assert path.stat().st_ino == number
    assert (info.mountpoint / "small").read_bytes() == b"small"


@promise("A file that is not whole on this node's disk, or not checked, is read as in any other mount")
def test_a_file_is_passed_through_from_the_first_opening_after_it_came(
    mount: Callable[[], MountInfo], settings: Settings
) -> None:
    info = mount()
    path = info.mountpoint / "model.bin"
    with open(path, "rb", buffering=0) as before:
        assert before.read(BLOCK_BYTES // 2) == CONTENT[: BLOCK_BYTES // 2]
        make_whole(settings)
        assert decided(info) == []
        assert Path(f"/proc/self/fd/{before.fileno()}").read_bytes() == CONTENT  # the same way as it is open
        assert decided(info) == []
        with open(path, "rb", buffering=0) as after:
            assert after.read() == CONTENT
            assert before.read() == CONTENT[BLOCK_BYTES // 2 :]
            assert os.fstat(before.fileno()).st_ino == os.fstat(after.fileno()).st_ino
    assert [id > 0 for id in decided(info)] == [True]


@promise("Every byte of a file that is passed through was verified when it was opened first in its mount")
def test_a_file_that_is_broken_on_the_disk_is_not_passed_through(
    mount: Callable[[], MountInfo], settings: Settings
) -> None:
    object_file = make_whole(settings)
    with open(object_file, "r+b") as file:
        file.seek(BLOCK_BYTES + 77)
        file.write(bytes([CONTENT[BLOCK_BYTES + 77] ^ 1]))
    info = mount()
    for _ in range(2):
        assert (info.mountpoint / "model.bin").read_bytes() == CONTENT
    assert decided(info) == [PLAIN]


@promise("A file that is evicted while it is passed through is read on, and its space comes free with the last reader")
def test_an_evicted_file_is_read_on_and_fetched_for_who_opens_it_next(
    mount: Callable[[], MountInfo], settings: Settings
) -> None:
    object_file = make_whole(settings)
    inode = object_file.stat().st_ino
    info = mount()
    path = info.mountpoint / "model.bin"
    with open(path, "rb", buffering=0) as file:
        evict("weights", settings=settings)
        assert not object_file.exists()
        wait_for(lambda: decided(info) == [EVICTED])
        assert file.read() == CONTENT
        assert path.read_bytes() == CONTENT  # fetched
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)
        make_whole(settings)
        assert path.read_bytes() == CONTENT
        assert [id > 0 for id in decided(info)] == [False, True]
    assert inode not in [os.stat(link).st_ino for pid in info.workers for link in Path(f"/proc/{pid}/fd").iterdir()]


@promise("Where the kernel passes nothing through, a mount of large files is as any other")
def test_without_the_kernels_leave_large_files_are_read_all_the_same(
    mount: Callable[[], MountInfo],
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pool, "make_table", lambda _connection, _table: os.strerror(errno.EPERM))
    make_whole(settings)
    assert run(["mount", "weights", str(tmp_path / "mnt"), "--large-files"]) == 0
    assert "the kernel does not let" in capsys.readouterr().err
    assert (tmp_path / "mnt" / "model.bin").read_bytes() == CONTENT
    assert not list((settings.home / "mounts").glob("*.passed-*"))


def test_an_unmounted_one_leaves_no_table(mount: Callable[[], MountInfo], settings: Settings) -> None:
    make_whole(settings)
    info = mount()
    assert (info.mountpoint / "model.bin").read_bytes() == CONTENT
    fuse_mount.unmount(info.mountpoint, settings=settings)
    assert not list((settings.home / "mounts").glob("*.passed-*"))
