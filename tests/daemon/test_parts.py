"""A node's cache in several parts, each with a process of its own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from datacache import connect, create_snapshot, load_settings, open_snapshot
from datacache.api import running_daemon
from datacache.core.boot import stat_of
from datacache.daemon import paths
from datacache.daemon.client import DaemonClient
from datacache.settings import Settings
from tests.promises import promise
from tests.servers import RcloneS3

SMALL = {f"{n % 7}/{n:04d}.bin": random.Random(n).randbytes(20_000) for n in range(200)}
LARGE = {f"large-{n}.bin": random.Random(n).randbytes(9 * 2**20 + n) for n in range(4)}
DATA = SMALL | LARGE


@pytest.fixture
def bucket(rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Callable[[], int]]:
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DATACACHE_PREFETCH", "0")
    name = f"parts-{random.SystemRandom().randrange(10**9)}"
    folder = rclone_s3.make_bucket(name)
    for path, data in DATA.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(data)
    return name, lambda: rclone_s3.get_count(name)


def with_processes(count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, DaemonClient]:
    monkeypatch.setenv("DATACACHE_PROCESSES", str(count))
    settings = load_settings()
    running = running_daemon(settings)
    if running is not None:
        running.stop()
    return settings, connect(settings)


def read_all(ref: str, settings: Settings) -> None:
    snapshot = open_snapshot(ref, settings)
    for path, data in DATA.items():
        assert bytes(snapshot.read(path)) == data


def finish(client: DaemonClient, id: str) -> dict:
    end = time.monotonic() + 60
    while (job := client.job(id))["state"] == "running":
        assert time.monotonic() < end, job
        time.sleep(0.01)
    return job


@promise("The number of processes can be changed, and nothing is fetched again")
def test_the_number_of_processes_changes_and_nothing_is_fetched_again(bucket, home, monkeypatch) -> None:
    name, gets = bucket
    settings, client = with_processes(3, monkeypatch)
    ref = create_snapshot("d", f"s3://{name}/", settings=settings).ref
    job = finish(client, client.warm(ref))
    assert (job["state"], job["files_done"], job["bytes_done"]) == ("done", len(DATA), sum(map(len, DATA.values())))
    read_all(ref, settings)
    before = gets()
    for count in (1, 2, 3, 1):
        settings, client = with_processes(count, monkeypatch)
        read_all(ref, settings)
        assert finish(client, client.warm(ref))["state"] == "done"
        assert gets() == before
        state = client.cache_status()
        assert state["tiers"][1]["budget_bytes"] == pytest.approx(settings.ssd_bytes, abs=count)
    assert not paths.parts_path(settings.home).exists()


def pids_of_parts(client: DaemonClient) -> list[int]:
    daemon = client.health()["pid"]
    found = subprocess.run(["pgrep", "-P", str(daemon), "-f", "--", "--part"], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def test_a_part_that_is_killed_comes_back_and_readers_see_no_error(bucket, home, monkeypatch) -> None:
    name, gets = bucket
    settings, client = with_processes(3, monkeypatch)
    ref = create_snapshot("d", f"s3://{name}/", settings=settings).ref
    read_all(ref, settings)
    before, pids = gets(), pids_of_parts(client)
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    client.evict()
    read_all(ref, settings)
    assert gets() > before
    assert len(pids_of_parts(client)) == 2
    assert not set(pids) & set(pids_of_parts(client))
    assert finish(client, client.warm(ref))["state"] == "done"


def test_parts_end_with_the_daemon_however_that_ends(bucket, home, monkeypatch) -> None:
    name, gets = bucket
    settings, client = with_processes(2, monkeypatch)
    ref = create_snapshot("d", f"s3://{name}/", settings=settings).ref
    assert finish(client, client.warm(ref))["state"] == "done"
    before, daemon, [part] = gets(), client.health()["pid"], pids_of_parts(client)
    os.kill(daemon, signal.SIGKILL)
    read_all(ref, settings)
    client = connect(settings)  # the lock is free once the part has ended, too
    assert stat_of(part)[:1] in ([], ["Z"])
    assert finish(client, client.warm(ref))["state"] == "done"
    assert gets() == before


def test_state_pins_and_eviction_are_of_all_parts(bucket, home, monkeypatch) -> None:
    name, _ = bucket
    settings, client = with_processes(3, monkeypatch)
    ref = create_snapshot("d", f"s3://{name}/", settings=settings).ref
    client.pin(ref)
    assert finish(client, client.warm(ref))["state"] == "done"
    state = client.cache_status()
    ssd = state["tiers"][1]
    assert ssd["blocks"] == len(SMALL) + 3 * len(LARGE)
    assert ssd["used_bytes"] >= sum(map(len, DATA.values()))
    assert state["fetched"]["fetched"] == ssd["blocks"]
    assert [each["name"] for each in state["datasets"]] == ["d"]
    assert len([job for job in state["jobs"] if not job["background"]]) == 1
    assert client.evict()["freed_bytes"] == 0
    client.unpin(ref)
    assert client.evict("d")["freed_bytes"] > sum(map(len, DATA.values()))
    assert client.cache_status()["tiers"][1]["blocks"] == 0
