"""The cache's disk fails under two readers and a mount: bytes go on coming, and nobody dies."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time

from datacache import connect, create_snapshot
from datacache.tiers.layout import cache_dir
from fuse_mount import mount_snapshot, unmount
from tests.failing_disk import failing_disk
from tests.promises import promise

READER = """
import hashlib, sys
from datacache import open_snapshot
with open_snapshot("mask") as snapshot:
    for line in sys.stdin:
        name = line.strip()
        print(hashlib.sha256(snapshot.read(name)).hexdigest(), flush=True)
"""


@promise("A full or failing disk is read around and costs speed, not bytes")
def test_two_readers_and_a_mount_go_on_while_the_disk_of_the_cache_fails(settings, tmp_path):
    files = {f"{n:03}.bin": random.Random(n).randbytes(100_000 + n) for n in range(400)}  # more than the RAM tier holds
    bucket, mountpoint, cache = tmp_path / "bucket", tmp_path / "mnt", cache_dir(settings.home)
    for folder in (bucket, mountpoint, cache):
        folder.mkdir(parents=True)
    for name, data in files.items():
        (bucket / name).write_bytes(data)
    create_snapshot("mask", bucket.as_uri())
    with failing_disk(cache, tmp_path) as disk:
        client = connect()
        id = client.warm("mask")
        while (job := client.job(id))["state"] == "running":
            time.sleep(0.05)
        assert job["state"] == "done"
        pid = client.health()["pid"]
        mount_snapshot("mask", mountpoint, settings=settings)
        readers = [
            subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        try:
            for number, (name, data) in enumerate(files.items()):
                if number == 20:
                    disk.fail("reads", "writes")
                for reader in readers:
                    reader.stdin.write(f"{name}\n")
                    reader.stdin.flush()
                assert (mountpoint / name).read_bytes() == data
                for reader in readers:
                    assert reader.stdout.readline().strip() == hashlib.sha256(data).hexdigest()
            health = client.health()
            assert health["pid"] == pid
            assert any(problem.startswith("ssd: Input/output error") for problem in health["problems"])
            assert 'datacache_tier_broken{tier="ssd"} 1.0' in client.metrics()
            for reader in readers:
                reader.stdin.close()
                assert reader.wait(30) == 0
        finally:
            for reader in readers:
                reader.kill()
                reader.wait()
            disk.mend()
            unmount(mountpoint)
            client.stop()
