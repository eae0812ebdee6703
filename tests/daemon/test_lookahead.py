"""Published orders: what is fetched when, how far ahead, for whom, and what happens when daemons and trainings die."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from datacache import connect, create_snapshot, load_settings, open_snapshot
from datacache.core.errors import UsageError
from datacache.core.ids import ObjectRef, block_id, object_id
from datacache.daemon.orders.plan import Plan, PlanObjects
from datacache.daemon.orders.plan_file import PlanFile, PlanHeader, new_plan_file, remove_if_dead
from datacache.loaders.lookahead import PlanSource, publish
from datacache.tiers.layout import ssd_dir
from datacache.tiers.local import LocalBlocks
from datacache.tiers.memory import lookahead_dir
from tests.conformance.faults import Fault, FaultProxy
from tests.daemon.test_nodes import free_port
from tests.promises import promise

COUNT, SIZE = 160, 50_000
MIB = 2**20


class Files:
    """A data set for planning: a sample is a file of the snapshot."""

    def __init__(self, snapshot) -> None:
        self.snapshot = snapshot

    def plan_source(self) -> PlanSource:
        return PlanSource(self.snapshot.record.dataset, self.snapshot.record.id)

    def plan_items(self, samples):
        return samples.astype(np.uint32).reshape(-1, 1)


def content(row: int) -> bytes:
    return random.Random(row).randbytes(SIZE)


@pytest.fixture
def bucket(rclone_s3, monkeypatch, settings):
    """A snapshot of a bucket behind a proxy; gives (settings, proxy, name of the bucket)."""
    name = f"ahead-{random.SystemRandom().randrange(10**9)}"
    folder = rclone_s3.make_bucket(name)
    for row in range(COUNT):
        (folder / f"{row:05d}.bin").write_bytes(content(row))
    with FaultProxy(rclone_s3.endpoint) as proxy:
        for key, value in rclone_s3.env().items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        create_snapshot("mask", f"s3://{name}", tags=["v1"], settings=settings)
        yield settings, proxy, name


def wait_for(condition, timeout_s: float = 60.0):
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def rows_got(proxy) -> list[int]:
    """The rows whose objects were asked for, in that order."""
    found = [re.match(r"GET /[^/]+/(\d{5})\.bin", request) for request in list(proxy.requests)]
    return [int(match[1]) for match in found if match]


def plan_of(client) -> dict:
    return wait_for(lambda: client.cache_status()["plans"])[0]


def settled(client) -> dict:
    """The state of the one plan once nothing more is fetched."""

    def still():
        before = client.cache_status()
        time.sleep(0.1)
        after = client.cache_status()
        same = before["fetched"]["fetched"] == after["fetched"]["fetched"] and not after["fetched"]["under_way"]
        return after if same and after["plans"] else None

    return wait_for(still)["plans"][0]


def small(settings, **changes):
    return dataclasses.replace(settings, **({"concurrency": 4} | changes))


def bytes_in_page_cache(path: Path) -> int:
    """Ask mincore(2) how much of a file the kernel has in memory."""
    with path.open("rb") as file:
        pages = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    found = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
    begin, result = (ctypes.c_void_p(array.ctypes.data) for array in (pages, found))
    assert ctypes.CDLL(None).mincore(begin, ctypes.c_size_t(len(pages)), result) == 0
    return int((found & 1).sum()) * mmap.PAGESIZE


@promise("A published order is fetched in that order, within a window")
def test_blocks_are_fetched_in_the_published_order_and_stay_in_the_page_cache(bucket):
    settings, proxy, _ = bucket
    settings = small(settings, concurrency=1)  # of several at a time, any may be held up while the others go on
    order = np.random.default_rng(1).permutation(COUNT)
    with open_snapshot("mask@v1", settings) as snapshot, publish(settings, Files(snapshot), order) as ahead:
        wait_for(lambda: len(rows_got(proxy)) == COUNT)
        assert ahead.wait_sent()
        wait_for(lambda: plan_of(connect(settings))["fetched"] == COUNT)
    assert rows_got(proxy) == order.tolist()
    assert sum(map(bytes_in_page_cache, ssd_dir(settings.home).iterdir())) >= COUNT * SIZE


@promise("A published order is fetched in that order, within a window")
def test_nothing_beyond_the_window_is_fetched_while_the_position_stands_still(bucket):
    settings, proxy, _ = bucket
    settings = small(settings, ssd_bytes=16 * MIB)  # a window of 4 MiB
    order = np.random.default_rng(2).permutation(COUNT)
    with open_snapshot("mask@v1", settings) as snapshot, publish(settings, Files(snapshot), order) as ahead:
        client = connect(settings)
        wait_for(lambda: len(rows_got(proxy)) > 60)
        plan = settled(client)
        inside = plan["window_bytes"] // SIZE
        assert plan["window_bytes"] == 4 * MIB
        assert len(rows_got(proxy)) == inside < COUNT
        assert set(rows_got(proxy)) == set(order[:inside].tolist())
        assert plan["state"] == "ahead"
        ahead.advance(50)
        wait_for(lambda: len(rows_got(proxy)) == inside + 50)
        assert set(rows_got(proxy)) == set(order[: inside + 50].tolist())


def test_what_is_here_is_not_fetched_again_and_a_place_to_start_from_is_kept(bucket):
    settings, proxy, _ = bucket
    settings = small(settings)
    order = np.arange(COUNT)
    with open_snapshot("mask@v1", settings) as snapshot:
        for row in range(100, 120):
            assert snapshot.read(f"{row:05d}.bin") == content(row)
        wait_for(lambda: not connect(settings).cache_status()["fetched"]["under_way"])
        here = set(rows_got(proxy))
        with publish(settings, Files(snapshot), order, start=90):
            wait_for(lambda: set(range(90, COUNT)) <= set(rows_got(proxy)) | here)
            settled(connect(settings))
    assert len(rows_got(proxy)) == len(set(rows_got(proxy)))


def test_a_reader_of_a_block_under_way_joins_its_flight(bucket):
    settings, proxy, _ = bucket
    held = threading.Event()
    proxy.always(Fault(wait=held, only=lambda method, path: method == "GET" and path.endswith("/00007.bin")))
    with open_snapshot("mask@v1", settings) as snapshot, publish(settings, Files(snapshot), np.arange(COUNT)):
        wait_for(lambda: 7 in rows_got(proxy))
        reader = threading.Thread(target=lambda: snapshot.read("00007.bin"))
        reader.start()
        client = connect(settings)
        wait_for(lambda: client.cache_status()["fetched"]["shared"] > 0)
        held.set()
        reader.join(30)
        assert not reader.is_alive()
        settled(client)
    assert rows_got(proxy).count(7) == 1


def test_the_window_reaches_into_the_next_epoch_once(bucket):
    settings, proxy, _ = bucket
    settings = small(settings)
    rng = np.random.default_rng(3)
    first, second = np.split(rng.permutation(COUNT), 2)
    with (
        open_snapshot("mask@v1", settings) as snapshot,
        publish(settings, Files(snapshot), first, next_order=second) as ahead,
    ):
        ahead.advance(len(first) - 1)
        wait_for(lambda: set(second.tolist()) <= set(rows_got(proxy)))


def test_a_plan_without_a_catalog_names_its_objects_and_the_blocks_of_each(bucket, rclone_s3):
    settings, _, name = bucket
    size = 9 * MIB
    (rclone_s3.root / name / "shard.tar").write_bytes(random.Random(9).randbytes(size))
    create_snapshot("shards", f"s3://{name}", settings=settings)
    with open_snapshot("shards", settings) as snapshot:
        row = snapshot.manifest.find(b"shard.tar")
        ref = snapshot.manifest.object_ref(snapshot.manifest.entry(row))
    assert ref.size_bytes == size

    class Shards:
        def plan_source(self):
            return PlanSource("shards", refs=(ref,))

        def plan_items(self, samples):
            return np.stack([0 * samples, samples, 1 + 0 * samples], axis=1).astype(np.uint32)

    with publish(settings, Shards(), np.array([2, 0])):
        wait_for(lambda: connect(settings).cache_status()["lookahead"]["fetched"] == 2)
    local = LocalBlocks(settings.home, settings.ram_dir)
    assert [local.has(block_id(object_id(ref), number)) for number in range(3)] == [True, False, True]


def test_objects_that_are_gone_are_passed_over(bucket, rclone_s3):
    settings, _, name = bucket
    for row in (3, 5):
        (rclone_s3.root / name / f"{row:05d}.bin").unlink()
    with open_snapshot("mask@v1", settings) as snapshot, publish(settings, Files(snapshot), np.arange(COUNT)):
        client = connect(settings)
        wait_for(lambda: plan_of(client)["fetched"] == COUNT - 2)
        wait_for(lambda: plan_of(client)["errors"] == 2)


def test_a_store_that_is_away_is_tried_again_while_the_plan_lives(bucket):
    settings, proxy, _ = bucket
    settings = small(settings, store_timeout_s=0.5)
    with open_snapshot("mask@v1", settings) as snapshot:
        connect(settings)
        proxy.refuse()
        with publish(settings, Files(snapshot), np.arange(COUNT)) as ahead:
            assert ahead.wait_sent()
            wait_for(lambda: plan_of(connect(settings))["state"] == "waiting for the store")
            proxy.accept()
            wait_for(lambda: plan_of(connect(settings))["fetched"] == COUNT)


def test_two_ranks_of_a_node_share_the_fetches(bucket):
    settings, proxy, _ = bucket
    settings = small(settings, ssd_bytes=32 * MIB)
    order = np.random.default_rng(4).permutation(COUNT)
    with open_snapshot("mask@v1", settings) as snapshot:
        files = Files(snapshot)
        with publish(settings, files, order[0::2]) as one, publish(settings, files, order[1::2]) as two:
            assert one.wait_sent()
            assert two.wait_sent()
            wait_for(lambda: len(connect(settings).cache_status()["plans"]) == 2)
            wait_for(lambda: len(set(rows_got(proxy))) > COUNT // 2)
            plans = connect(settings).cache_status()["plans"]
            assert [plan["window_bytes"] for plan in plans] == [4 * MIB, 4 * MIB]
            one.advance(COUNT // 2)
            two.advance(COUNT // 2)
    assert len(rows_got(proxy)) == len(set(rows_got(proxy)))


def test_a_full_tier_that_keeps_what_it_has_ends_the_fetching(bucket):
    settings, proxy, _ = bucket
    settings = small(settings, ssd_bytes=5 * MIB, ram_bytes=0)
    with open_snapshot("mask@v1", settings) as snapshot, publish(settings, Files(snapshot), np.arange(COUNT)) as ahead:
        client = connect(settings)
        for place in range(0, COUNT, 20):
            ahead.advance(place)
            settled(client)
            if plan_of(client)["state"] == "no room":
                break
        status = client.cache_status()
        assert status["plans"][0]["state"] == "no room"
        before = len(rows_got(proxy))
        ahead.advance(COUNT - 20)
        settled(client)
        assert len(rows_got(proxy)) == before
        dropped = status["fetched"]["fetched"] - status["plans"][0]["fetched"]
        assert 0 <= dropped <= settings.concurrency, "what was fetched is kept, but for what was under way at the end"


def test_what_the_disk_of_another_node_keeps_is_fetched_ahead_as_long_as_ram_has_room(bucket):
    settings, proxy, _ = bucket
    listen = f"127.0.0.1:{free_port()}"
    members = (f"me={listen}*1e-9", "away=127.0.0.1:2")  # which owns nearly everything
    cluster = {"cluster": "lab", "cluster_key": "0123456789abcdef", "cluster_members": members, "node": "me"}
    cluster |= {"listen": listen, "cluster_mode": (("*", "partition"),)}
    settings = small(settings, ram_bytes=4 * MIB, **cluster)
    with open_snapshot("mask@v1", settings) as snapshot, publish(settings, Files(snapshot), np.arange(COUNT)) as ahead:
        client = connect(settings)
        for place in range(0, COUNT, 20):
            ahead.advance(place)
            wait_for(lambda: settled(client)["window_bytes"] == MIB)
        status = client.cache_status()
        ram, ssd = status["tiers"]
        assert (ssd["blocks"], status["plans"][0]["state"]) == (0, "ahead")
        assert 60 < ram["blocks"] <= 4 * MIB // SIZE
        assert len(rows_got(proxy)) - ram["blocks"] <= 20 + settings.concurrency, "at most a window is thrown away"


def test_the_rest_is_warmed_in_the_background_only_after_the_plan(bucket):
    settings, proxy, _ = bucket
    settings = small(settings)
    order = np.arange(0, COUNT, 2)
    with open_snapshot("mask@v1", settings) as snapshot, publish(settings, Files(snapshot), order) as ahead:
        assert ahead.wait_sent()
        assert snapshot.read("00159.bin") == content(159)
        settled(connect(settings))
        assert set(rows_got(proxy)) == {*order.tolist(), 159}
        ahead.advance(len(order))
        assert snapshot.read("00157.bin") == content(157)
        wait_for(lambda: set(rows_got(proxy)) == set(range(COUNT)))


def test_a_background_warm_up_that_runs_waits_for_a_plan(bucket):
    settings, proxy, _ = bucket
    settings = small(settings, concurrency=1)
    held = threading.Event()
    proxy.always(Fault(wait=held, only=lambda method, path: method == "GET" and path.endswith("/00000.bin")))
    with open_snapshot("mask@v1", settings) as snapshot:
        snapshot.read("00150.bin")
        wait_for(lambda: 0 in rows_got(proxy))  # the warm-up has begun
        with publish(settings, Files(snapshot), np.arange(100, COUNT)) as ahead:
            assert ahead.wait_sent()
            held.set()
            wait_for(lambda: set(range(100, COUNT)) <= set(rows_got(proxy)))
            settled(connect(settings))
            assert len(set(rows_got(proxy)) - set(range(100, COUNT))) <= 2
        wait_for(lambda: set(rows_got(proxy)) == set(range(COUNT)))


@promise("Publishing an order never fails a training or makes it wait")
def test_a_killed_daemon_is_told_again_and_every_byte_is_right(bucket):
    settings, _, _ = bucket
    order = np.random.default_rng(5).permutation(COUNT)
    with open_snapshot("mask@v1", settings) as snapshot, publish(settings, Files(snapshot), order) as ahead:
        pids = set()
        for place, row in enumerate(order.tolist()):
            ahead.advance(place)
            assert snapshot.read(f"{row:05d}.bin") == content(row)
            if place in (30, 100):
                assert ahead.wait_sent()
                pid = connect(settings).health()["pid"]
                pids.add(pid)
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda: connect(settings).health()["pid"] not in pids)
                # Advancing notices it by the mark, and publishes again.
                wait_for(lambda at=place: ahead.advance(at) or connect(settings).cache_status()["plans"])
        assert connect(settings).cache_status()["plans"][0]["items"] == COUNT


@promise("An order ends with the process that published it")
def test_the_plan_of_a_process_that_was_killed_goes(bucket, tmp_path):
    settings, _, _ = bucket
    code = """
import sys, time, numpy as np
from datacache import load_settings, open_snapshot
from tests.daemon.test_lookahead import Files, publish
settings = load_settings()
with open_snapshot("mask@v1", settings) as snapshot:
    ahead = publish(settings, Files(snapshot), np.arange(len(snapshot)))
    assert ahead.wait_sent()
    print("published", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "published\n"
        client = connect(settings)
        assert client.cache_status()["plans"]
        process.kill()
    wait_for(lambda: not client.cache_status()["plans"])
    assert not list(lookahead_dir(settings.home, settings.ram_dir).iterdir())


def test_since_when_a_position_stands_still_is_known(tmp_path):
    file = new_plan_file(
        tmp_path / "lookahead", tmp_path, 0
    )  # in a folder that is ours alone, as its parent need not be
    header = PlanHeader(
        id=file.path.name, pid=1, started=1, dataset="d", snapshot="", refs=(), columns=1, items=9, next_items=0
    )
    objects = PlanObjects(None, [ObjectRef("s3://b", "key", SIZE)])
    plan = Plan(header, np.zeros((9, 1), np.uint32), objects, PlanFile(file.path))
    assert plan.stands_since_s(100.0) == 100.0
    assert plan.stands_since_s(400.0) == 100.0
    file.position = 3
    assert plan.stands_since_s(500.0) == 500.0
    assert plan.stands_since_s(900.0) == 500.0
    file.remove()


@promise("An order ends with the process that published it")
def test_a_child_of_a_killed_process_does_not_keep_its_plan(settings):
    code = """
import os, signal, sys, time
from datacache import load_settings
from datacache.daemon.orders.plan_file import new_plan_file
from datacache.tiers.memory import lookahead_dir
home = load_settings().home
file = new_plan_file(lookahead_dir(home, load_settings().ram_dir), home, 0)
if os.fork() == 0:  # says where, so its end of the fork is over
    print(file.path, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process:
        try:  # SIGKILL of the first process leaves its child alive
            path = Path(os.fsdecode(process.stdout.readline().strip()))
            assert not remove_if_dead(path)
            process.kill()
            process.wait()
            assert remove_if_dead(path)
            assert not path.exists()
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@promise("An order ends with the process that published it")
def test_a_plan_from_another_pid_namespace_is_followed_until_its_process_ends(bucket):
    settings, _, _ = bucket
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespace can be had")
    code = """
import sys, numpy as np
from datacache import load_settings, open_snapshot
from tests.daemon.test_lookahead import Files, publish
settings = load_settings()
with open_snapshot("mask@v1", settings) as snapshot:
    ahead = publish(settings, Files(snapshot), np.arange(len(snapshot)))
    assert ahead.wait_sent()
    print("published", flush=True)
    sys.stdin.readline()
    ahead.advance(7)
    sys.stdin.readline()
    sys.stdout.close()
    import os
    os._exit(0)  # leaves its file behind
"""
    client = connect(settings)
    command = [*unshare, sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "published\n"
        (path,) = lookahead_dir(settings.home, settings.ram_dir).iterdir()
        assert not remove_if_dead(path)
        process.stdin.write("\n")
        process.stdin.flush()
        wait_for(lambda: plan_of(client)["position"] == 7)
        wait_for(lambda: plan_of(client)["fetched"])
        process.stdin.write("\n")
        process.stdin.flush()
    wait_for(lambda: not client.cache_status()["plans"])
    assert not list(lookahead_dir(settings.home, settings.ram_dir).iterdir())


def test_a_closed_plan_goes_and_its_file_too(bucket):
    settings, _, _ = bucket
    with open_snapshot("mask@v1", settings) as snapshot:
        ahead = publish(settings, Files(snapshot), np.arange(COUNT))
        assert ahead.wait_sent()
        ahead.close()
        ahead.close()
        wait_for(lambda: not connect(settings).cache_status()["plans"])
        assert not list(lookahead_dir(settings.home, settings.ram_dir).iterdir())


def test_what_is_no_plan_is_refused(settings):
    client = connect(settings)
    header = PlanHeader(
        id="1-x", pid=1, started=1, dataset="mask", snapshot="", refs=(), columns=1, items=3, next_items=0
    )
    with pytest.raises(UsageError, match="no file"):
        client.lookahead(header, lambda: [bytes(12)])
    for wrong in (dataclasses.replace(header, id="../1"), dataclasses.replace(header, columns=2)):
        with pytest.raises(UsageError):
            client.lookahead(wrong, lambda size=wrong.body_bytes: [bytes(size)])
    (lookahead_dir(settings.home, settings.ram_dir)).mkdir(parents=True, exist_ok=True)
    (lookahead_dir(settings.home, settings.ram_dir) / "1-x").write_bytes(bytes(16))
    with pytest.raises(UsageError, match="rows"):
        client.lookahead(header, lambda: [bytes(12)])
    assert client.health()["pid"]


def test_plans_are_in_the_metrics(bucket):
    settings, _, _ = bucket
    with open_snapshot("mask@v1", settings) as snapshot, publish(settings, Files(snapshot), np.arange(COUNT)) as ahead:
        assert ahead.wait_sent()
        client = connect(settings)
        wait_for(lambda: plan_of(client)["fetched"] == COUNT)
        text = client.metrics()
        assert "datacache_lookahead_plans 1" in text
        assert f"datacache_lookahead_fetched_total {COUNT}" in text


def test_nothing_is_published_where_prefetching_is_off(bucket, monkeypatch):
    monkeypatch.setenv("DATACACHE_PREFETCH", "0")
    settings = load_settings()
    with open_snapshot("mask@v1", settings) as snapshot, publish(settings, Files(snapshot), np.arange(COUNT)) as ahead:
        ahead.advance(3)
        assert not ahead.wait_sent()
    assert not lookahead_dir(settings.home, settings.ram_dir).exists()
