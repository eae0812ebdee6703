"""The servers and the home that other tests stand on are real, separate and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pymongo
import pytest

from tests import leftovers, servers
from tests.fuse_mount.mount_processes import waiting_for_the_end_of
from tests.servers import CephRgw, Mongod, RcloneS3

if TYPE_CHECKING:
    from datacache.settings import Settings

ROOT = Path(__file__).resolve().parent.parent


def test_every_database_url_is_a_fresh_database(mongod: Mongod) -> None:
    first, second = mongod.database_url(), mongod.database_url()
    with pymongo.MongoClient(first) as one, pymongo.MongoClient(second) as two:
        one.get_default_database()["c"].insert_one({"x": 1})
        assert two.get_default_database()["c"].count_documents({}) == 0


def test_a_killed_mongod_comes_back_with_its_data(tmp_path: Path) -> None:
    with Mongod(tmp_path / "m", replica_set=True) as server:
        with pymongo.MongoClient(server.url) as client:
            client["d"]["c"].with_options(write_concern=pymongo.WriteConcern(w=1, j=True)).insert_one({"x": 1})
        server.stop()
        server.start()
        with pymongo.MongoClient(server.url) as client:
            assert client["d"]["c"].count_documents({}) == 1


def test_the_folders_of_rclone_are_buckets(rclone_s3: RcloneS3) -> None:
    folder = rclone_s3.make_bucket("servers-test")
    (folder / "a.txt").write_bytes(b"one")
    client = rclone_s3.client()
    assert client.get_object(Bucket="servers-test", Key="a.txt")["Body"].read() == b"one"
    assert rclone_s3.get_count("servers-test") == 1
    (folder / "b.txt").write_bytes(b"two")
    listed = client.list_objects_v2(Bucket="servers-test")["Contents"]
    assert [item["Key"] for item in listed] == ["a.txt", "b.txt"]


@pytest.mark.ceph
def test_ceph_stores_versions(ceph_rgw: CephRgw) -> None:
    ceph_rgw.make_bucket("servers-test", versioning=True)
    client = ceph_rgw.client()
    first = client.put_object(Bucket="servers-test", Key="k", Body=b"one")["VersionId"]
    client.put_object(Bucket="servers-test", Key="k", Body=b"two")
    assert client.get_object(Bucket="servers-test", Key="k", VersionId=first)["Body"].read() == b"one"


def test_a_home_is_empty_small_and_has_no_foreign_settings(home: Path, settings: Settings) -> None:
    assert settings.home == home
    assert list(home.iterdir()) == []
    assert settings.ram_dir.is_dir()
    assert settings.ssd_bytes < 2**30
    assert not [name for name in os.environ if name.startswith("AWS_") and "KEY" in name]


def test_a_missing_program_says_what_installs_it() -> None:
    with pytest.raises(servers.ServerError, match=r"run scripts/test\.sh"):
        servers.program("no-such-server", package="no-such-package")


def test_servers_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tests.servers import RcloneS3\n"
        "server = RcloneS3(Path(sys.argv[1]))\n"
        "print(server._processes[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    pid = done.stdout.strip()
    assert pid.isdigit(), done.stderr
    with waiting_for_the_end_of(int(pid)):
        pass


def test_processes_of_a_home_are_found_and_ended(home: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])

    def of_home() -> list[int]:
        return leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(home))

    deadline = time.monotonic() + 5
    while child.pid not in of_home():  # between exec and the kernel's note of the environment it has none
        assert time.monotonic() < deadline
    leftovers.end_processes(of_home)
    assert child.wait(timeout=5) == -signal.SIGKILL


def test_what_a_killed_run_left_is_cleaned_by_the_next(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = subprocess.Popen(["sleep", "60"], env=os.environ | {leftovers.SESSION_VARIABLE: str(dead.pid)})
    memory = leftovers.SHARED_MEMORY / f"{leftovers.SHARED_MEMORY_PREFIX}{dead.pid}-0"
    memory.mkdir()
    leftovers.clean_dead_sessions(tmp_path)
    assert left.wait(timeout=5) == -signal.SIGKILL
    assert not memory.exists()
