"""From a bucket to a mounted snapshot, all parts real: the main job, and the main job under fire.

`DATACACHE_TEST_KILLS` (how many kills a run has, 30) asks for a long one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

import fuse_mount
from datacache import connect, create_snapshot, load_settings
from datacache.api import running_daemon
from datacache.core.errors import DatacacheError
from tests.promises import promise

COUNT, SIZE = 400, 30_000
KILLS = int(os.environ.get("DATACACHE_TEST_KILLS") or 30)


@pytest.fixture
def mountpoint(tmp_path):
    path = tmp_path / "mnt"
    path.mkdir()
    return path


def use_store(monkeypatch, server) -> None:
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)


def wait_until_warm(ref: str) -> None:
    client = connect()
    job = client.warm(ref)
    end = time.monotonic() + 120
    while (state := client.job(job))["state"] == "running":
        assert time.monotonic() < end
        time.sleep(0.02)
    assert state["state"] == "done", state


@promise("Every file of the snapshot is in the mount, byte for byte")
@pytest.mark.ceph
def test_real_blood_cells_from_ceph_are_mounted_byte_for_byte(
    blood_cells, ceph_rgw, mongod, settings, mountpoint, monkeypatch
):
    use_store(monkeypatch, ceph_rgw)
    monkeypatch.setenv("DATACACHE_CATALOG", mongod.database_url())
    bucket = "bccd"
    ceph_rgw.make_bucket(bucket)
    client = ceph_rgw.client()
    source = {str(p.relative_to(blood_cells)): p for p in blood_cells.rglob("*") if p.is_file()}
    for name, path in source.items():
        client.put_object(Bucket=bucket, Key=f"voc/{name}", Body=path.read_bytes())

    first = create_snapshot("bccd", f"s3://{bucket}/voc", tags=["v1"])
    assert first.files == len(source)
    assert create_snapshot("bccd", f"s3://{bucket}/voc").id == first.id
    current = load_settings()
    fuse_mount.mount_snapshot("bccd@v1", mountpoint, settings=current)
    try:
        mounted = {str(p.relative_to(mountpoint)): p for p in mountpoint.rglob("*") if p.is_file()}
        assert sorted(mounted) == sorted(source)
        for name, path in source.items():
            assert mounted[name].read_bytes() == path.read_bytes()
        # Another object under a known name is an error that the log explains, never other bytes.
        wait_until_warm("bccd@v1")
        victim = min(source)
        client.put_object(Bucket=bucket, Key=f"voc/{victim}", Body=b"other bytes")
        assert mounted[victim].read_bytes() == source[victim].read_bytes()
        connect().evict("bccd")
        # Who has the evicted bytes mapped may serve them, the snapshot's own, until the next look: let nobody have.
        connect().stop()
        for worker in fuse_mount.status(mountpoint, current).workers:
            os.kill(worker, signal.SIGKILL)
        os.posix_fadvise(fd := os.open(mounted[victim], os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            with pytest.raises(OSError):  # noqa: PT011 - ESTALE or EIO, by the kernel's mood
                os.pread(fd, 100, 0)
        finally:
            os.close(fd)
    finally:
        fuse_mount.unmount(mountpoint, settings=current, lazy=True)


class Killer:
    """Kills daemons and mount workers of a home at random moments."""

    def __init__(self, settings, mountpoint: Path, seed: int) -> None:
        self._settings, self._mountpoint = settings, mountpoint
        self._rng = random.Random(seed)
        self.kills = 0

    def strike(self) -> None:
        time.sleep(self._rng.uniform(0, 0.08))
        if self._rng.random() < 0.3:
            client = running_daemon(self._settings)
            pid = client.health()["pid"] if client is not None else None
        else:
            workers = fuse_mount.status(self._mountpoint, self._settings).workers
            pid = self._rng.choice(workers) if workers else None  # all dead this moment
        if pid is not None:
            try:
                os.kill(pid, signal.SIGKILL)
                self.kills += 1
            except ProcessLookupError:
                pass


@promise("Workers and daemon may be killed again and again: no read breaks, no byte is wrong (Linux 6.9 and newer)")
@pytest.mark.slow
@pytest.mark.parametrize("store_is_on", [True, False])
def test_kills_while_epochs_are_read_cause_no_error_and_no_wrong_byte(
    rclone_s3, settings, mountpoint, monkeypatch, store_is_on
):
    use_store(monkeypatch, rclone_s3)
    data = {f"{n % 5}/{n:04d}": random.Random(n).randbytes(SIZE + n) for n in range(COUNT)}
    bucket = f"fire-{int(store_is_on)}"
    root = rclone_s3.make_bucket(bucket)
    for name, content in data.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    create_snapshot("fire", f"s3://{bucket}", tags=["v1"])
    if not store_is_on:
        wait_until_warm("fire@v1")
        connect().stop()
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fuse_mount.mount_snapshot("fire@v1", mountpoint, settings=settings, workers=2)
    stop = []
    epochs = []

    def read_epochs(seed):
        rng, names = random.Random(seed), sorted(data)
        while not stop:
            rng.shuffle(names)
            for name in names:
                fd = os.open(mountpoint / name, os.O_RDONLY)
                try:
                    assert os.pread(fd, SIZE + COUNT, 0) == data[name]
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # so that the next epoch asks again
                finally:
                    os.close(fd)
            epochs.append(seed)

    killer = Killer(settings, mountpoint, seed=7)
    try:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read_epochs, seed) for seed in range(3)]
            try:
                while killer.kills < KILLS and not any(reader.done() for reader in readers):
                    killer.strike()
                    if store_is_on and killer.kills % 20 == 10:
                        with contextlib.suppress(DatacacheError):  # killed in the middle of it
                            connect().evict(None)  # so that there is something to fetch
            finally:
                stop.append(True)
            for reader in readers:
                reader.result(120)
        assert killer.kills == KILLS
        assert epochs
    finally:
        fuse_mount.unmount(mountpoint, settings=settings, lazy=True)
