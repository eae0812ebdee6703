"""The daemon as its own process: one a home, each block once, warm-ups, pins, metrics, and being killed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import random
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from datacache import connect, create_snapshot, load_settings, open_snapshot
from datacache.api import running_daemon
from datacache.core.errors import DaemonUnavailableError, SnapshotNotFoundError, StoreAccessError, UsageError
from datacache.core.ids import ObjectRef
from datacache.daemon import paths
from datacache.daemon.client import DaemonClient
from datacache.daemon.starting import DaemonProcess
from datacache.store.retry import UNREACHED_S
from tests.conformance.faults import Fault, FaultProxy
from tests.promises import promise

COUNT, SIZE = 300, 20_000
DATA = {f"{n % 7}/{n:04d}.bin": random.Random(n).randbytes(SIZE) for n in range(COUNT)}


def fill(folder) -> None:
    for name, data in DATA.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


@pytest.fixture
def bucket(tmp_path):
    root = tmp_path / "bucket"
    root.mkdir()
    fill(root)
    return root


@pytest.fixture
def s3_bucket(rclone_s3, monkeypatch):
    """A bucket on a real S3 server that counts its GETs; gives (name, count())."""
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    name = f"daemon-{random.SystemRandom().randrange(10**9)}"
    fill(rclone_s3.make_bucket(name))
    return name, lambda: rclone_s3.get_count(name)


def wait_until(true) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def finish(client: DaemonClient, job: str) -> dict:
    end = time.monotonic() + 60
    while (state := client.job(job))["state"] == "running":
        assert time.monotonic() < end, state
        time.sleep(0.01)
    return state


def no_prefetch(monkeypatch):
    monkeypatch.setenv("DATACACHE_PREFETCH", "0")
    return load_settings()


def test_a_second_daemon_of_a_home_is_refused_with_the_pid_of_the_first(settings):
    pid = connect(settings).health()["pid"]
    second = subprocess.run(
        [sys.executable, "-m", "datacache.daemon"],
        env=os.environ | settings.environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert second.returncode == 3
    assert str(pid) in second.stderr
    assert connect(settings).health()["pid"] == pid
    assert "numpy" not in Path(f"/proc/{pid}/maps").read_text()  # half of what a start would take


@promise("A home has one daemon, however many start one at a time or delete `<home>/run`")
def test_many_clients_starting_at_once_get_one_daemon(settings):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        pids = set(pool.map(lambda _: connect(settings).health()["pid"], range(8)))
    assert len(pids) == 1


@promise("Only its owner reaches the daemon")
def test_the_socket_is_for_its_owner_only_and_works_under_a_long_path(settings, tmp_path):
    long = dataclasses.replace(settings, home=tmp_path / ("h" * 150))
    client = connect(long)
    try:
        assert client.health()["home"] == str(long.home)
        mode = paths.socket_path(long.home).stat().st_mode
        assert stat.S_IMODE(mode) == 0o600
    finally:
        client.stop()


def test_a_stale_socket_is_replaced(settings):
    path = paths.socket_path(settings.home)
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert connect(settings).health()["pid"]


def test_stopping_leaves_no_socket_and_no_process(settings):
    client = connect(settings)
    client.stop()
    assert running_daemon(settings) is None
    assert not paths.socket_path(settings.home).exists()
    with pytest.raises(DaemonUnavailableError):
        client.stop()


def test_a_daemon_that_cannot_start_says_why(settings):
    (settings.home / "cache").write_text("in the way")
    with pytest.raises(DaemonUnavailableError, match="cache"):
        connect(settings)


@promise("A block is fetched once, however many ask for it at a time")
def test_each_block_is_fetched_once_however_many_ask(s3_bucket, home, monkeypatch):
    settings = no_prefetch(monkeypatch)
    name, get_count = s3_bucket
    create_snapshot("mask", f"s3://{name}", tags=["v1"], settings=settings)
    names = sorted(DATA)

    def read_all(seed):
        order = names[:]
        random.Random(seed // 4).shuffle(order)  # four readers in the same order, two orders
        with open_snapshot("mask@v1", settings) as snapshot:
            assert all(snapshot.read(path) == DATA[path] for path in order)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(read_all, range(8)))
    assert get_count() == COUNT


@promise("`dsctl warm` says done only when every byte is on the node")
def test_warming_is_done_only_when_every_byte_is_there(s3_bucket, settings):
    name, get_count = s3_bucket
    create_snapshot("mask", f"s3://{name}", tags=["v1"])
    client = connect(settings)
    state = finish(client, client.warm("mask@v1"))
    assert state["state"] == "done", state
    assert state["bytes_done"] == state["bytes_total"] == COUNT * SIZE
    assert state["files_done"] == COUNT
    fetched = get_count()
    assert fetched == COUNT
    with open_snapshot("mask@v1") as snapshot:
        assert all(snapshot.read(path) == data for path, data in DATA.items())
    assert finish(client, client.warm("mask@v1"))["bytes_fetched"] == 0
    assert get_count() == fetched
    reads = client.cache_status()["reads"]
    assert reads["hits"] == COUNT
    assert reads["misses"] == 0


def test_warming_more_than_fits_says_so(bucket, home, monkeypatch):
    monkeypatch.setenv("DATACACHE_SSD_BYTES", "3MiB")
    monkeypatch.setenv("DATACACHE_RAM_BYTES", "0")
    create_snapshot("mask", str(bucket))
    client = connect()
    state = finish(client, client.warm("mask"))
    assert state["state"] == "incomplete"
    assert "full" in state["error"]
    assert 0 < state["bytes_done"] < state["bytes_total"]
    with open_snapshot("mask") as snapshot:
        assert all(snapshot.read(path) == data for path, data in DATA.items())


def test_warming_with_an_object_gone_names_it_and_fetches_the_rest(bucket, settings):
    create_snapshot("mask", str(bucket))
    (bucket / "0/0007.bin").unlink()
    client = connect()
    state = finish(client, client.warm("mask"))
    assert state["state"] == "failed"
    assert "0007.bin" in state["error"]
    assert state["bytes_done"] == (COUNT - 1) * SIZE


def test_the_first_read_starts_a_warm_up_of_what_fits(bucket, settings):
    create_snapshot("mask", str(bucket))
    with open_snapshot("mask") as snapshot:
        snapshot.read(min(DATA))
        client = connect()
        end = time.monotonic() + 30
        while not (jobs := client.cache_status()["jobs"]) or jobs[0]["state"] == "running":
            assert time.monotonic() < end
            time.sleep(0.01)
        assert jobs[0]["state"] == "done"
        assert jobs[0]["background"]
        for path in bucket.glob("*/*"):
            path.unlink()
        assert all(snapshot.read(path) == data for path, data in DATA.items())


def test_a_block_that_a_reader_calls_broken_and_is_not_stays(bucket, settings, monkeypatch):
    create_snapshot("mask", str(bucket))
    client = connect(no_prefetch(monkeypatch))
    with open_snapshot("mask") as snapshot:
        ref = snapshot.object_ref(min(DATA))
    assert finish(client, client.warm("mask"))["state"] == "done"
    fetched = client.cache_status()["fetched"]["fetched"]
    assert client.block(ref, 0, "mask", "", broken=True) == DATA[min(DATA)]
    assert client.cache_status()["fetched"]["fetched"] == fetched


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_a_start_that_lost_the_race_or_was_killed_is_tried_again(settings, monkeypatch, end):
    client, spawn, spawned = DaemonClient(settings), DaemonProcess._spawn, []

    def lose_once(self):
        spawned.append(1)
        if len(spawned) > 1:
            return spawn(self)
        return subprocess.Popen([sys.executable, "-c", end])

    monkeypatch.setattr(DaemonProcess, "_spawn", lose_once)
    client.ensure()
    assert client.health()["pid"]


def test_a_missing_ca_bundle_is_named(s3_bucket, settings, monkeypatch):
    name, _ = s3_bucket
    create_snapshot("mask", f"s3://{name}")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere/ca.pem")
    client = connect()
    state = finish(client, client.warm("mask"))
    assert state["state"] == "failed"
    assert "CA bundle /nowhere/ca.pem" in state["error"]


def test_stopping_takes_a_few_seconds_while_a_store_is_away(s3_bucket, home, monkeypatch):
    settings = no_prefetch(monkeypatch)
    name, _ = s3_bucket
    create_snapshot("mask", f"s3://{name}", settings=settings)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    client = connect(settings)
    client.warm("mask")
    begun = time.monotonic()
    client.stop()
    assert time.monotonic() - begun < 15
    assert (home / "cache" / "CLEAN").exists()


def test_unknown_refs_jobs_and_broken_requests_are_refused(settings):
    client = connect()
    with pytest.raises(SnapshotNotFoundError):
        client.warm("nothing@v1")
    with pytest.raises(SnapshotNotFoundError):
        client.job("0000")
    with pytest.raises(UsageError):
        client._call("warm", {"ref": 1})
    with pytest.raises(UsageError):
        client.block(ObjectRef("s3://x", "k", 1), 0, "x" * 5000, "")
    assert client.health()["pid"]


def test_eviction_refuses_pinned_data_and_frees_the_rest(bucket, settings):
    create_snapshot("mask", str(bucket), tags=["v1"])
    client = connect()
    finish(client, client.warm("mask"))
    client.pin("mask@v1")
    assert client.cache_status()["pins"]
    with pytest.raises(UsageError, match="pinned"):
        client.evict("mask")
    assert client.evict(None)["freed_bytes"] == 0
    client.unpin("mask@v1")
    assert client.evict("mask@v1")["freed_bytes"] > COUNT * SIZE
    assert client.cache_status()["tiers"][1]["blocks"] == 0


@promise("No credential appears in a message, a repr or a metric")
def test_metrics_are_prometheus_text_and_show_no_secret(s3_bucket, home, monkeypatch):
    settings = no_prefetch(monkeypatch)
    name, _ = s3_bucket
    create_snapshot("mask", f"s3://{name}")
    with open_snapshot("mask") as snapshot:
        for _ in range(2):
            snapshot.read(min(DATA))
    text = connect().metrics()
    samples = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r'[a-z_]+(\{[a-z]+="[a-zA-Z0-9.+]+"\})? [0-9.e+-]+', line) for line in samples)
    assert "datacache_fetched_total 1\n" in text
    assert f"datacache_fetched_bytes_total {SIZE}\n" in text
    assert 'datacache_fetch_seconds_bucket{le="+Inf"} 1\n' in text
    # The second read may come before the tiers have the block.
    assert re.search(r'datacache_reader_wait_seconds_bucket\{le="\+Inf"\} [12]\n', text)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in text + paths.log_path(settings.home).read_text()


def test_a_daemon_without_the_readers_credentials_does_not_stop_the_reader(s3_bucket, settings, monkeypatch):
    name, _ = s3_bucket
    create_snapshot("mask", f"s3://{name}")
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    connect()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    others = dataclasses.replace(load_settings(), daemon="external")  # such a daemon is sent no credentials
    client = DaemonClient(others)
    with open_snapshot("mask", others) as snapshot:
        assert snapshot.read(min(DATA)) == DATA[min(DATA)]
        ref = snapshot.object_ref(min(DATA))
    with pytest.raises(StoreAccessError) as caught:
        client.block(ref, 0, "mask", "")
    assert "AWS_SECRET_ACCESS_KEY" in caught.value.hint
    assert "wrong" not in str(caught.value) + caught.value.hint


@promise("A store that is away is an error within a bounded time")
def test_a_store_that_is_away_is_an_error_in_bounded_time_and_no_harm_to_what_is_warm(
    s3_bucket, home, monkeypatch, rclone_s3
):
    monkeypatch.setenv("DATACACHE_STORE_TIMEOUT_S", "2")
    settings = no_prefetch(monkeypatch)
    name, _ = s3_bucket
    create_snapshot("mask", f"s3://{name}", settings=settings)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens on discard
    client = connect(settings)
    with open_snapshot("mask", settings) as snapshot, pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
        snapshot.read(min(DATA))
    client.stop()
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone_s3.endpoint)
    client = connect(settings)
    finish(client, client.warm("mask"))
    client.stop()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with open_snapshot("mask", settings) as snapshot:
        assert all(snapshot.read(path) == data for path, data in DATA.items())


@promise("While a store does not answer, one call asks and the others wait for it")
def test_a_store_that_answers_503_to_all_is_asked_by_few_and_fails_all_readers_by_one_deadline(
    s3_bucket, home, monkeypatch, rclone_s3
):
    timeout_s, readers = 6.0, 60
    monkeypatch.setenv("DATACACHE_STORE_TIMEOUT_S", str(timeout_s))
    monkeypatch.setenv("DATACACHE_CONCURRENCY", "8")
    settings = no_prefetch(monkeypatch)
    name, _ = s3_bucket
    create_snapshot("mask", f"s3://{name}", settings=settings)
    names = sorted(DATA)
    with FaultProxy(rclone_s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        client = connect(settings)
        proxy.always(Fault(status=503, code="SlowDown"))

        def read(n):
            begun = time.monotonic()
            with open_snapshot("mask", settings) as snapshot:
                try:
                    assert snapshot.read(names[n]) == DATA[names[n]]
                except ConnectionError:
                    return time.monotonic() - begun
            return None

        with concurrent.futures.ThreadPoolExecutor(readers) as pool:
            took = list(pool.map(read, range(readers)))
        asked = len(proxy.requests)
        assert None not in took
        # One deadline after the other, eight readers at a time, took eight of them, and each asked for itself.
        assert max(took) < 3 * timeout_s
        assert asked < readers
        proxy.heal()
        with concurrent.futures.ThreadPoolExecutor(readers) as pool:
            assert list(pool.map(read, range(readers))) == [None] * readers
        client.stop()


@promise("A daemon killed at any point, again and again, leaves only right blocks")
@pytest.mark.slow
def test_readers_see_no_error_and_no_wrong_byte_while_the_daemon_is_killed(s3_bucket, settings):
    name, _ = s3_bucket
    create_snapshot("mask", f"s3://{name}")
    kills = 0
    rng = random.Random(11)
    stop = []

    def read_epochs(seed):
        order = sorted(DATA)
        with open_snapshot("mask") as snapshot:
            while not stop:
                random.Random(seed).shuffle(order)
                for path in order:
                    assert snapshot.read(path) == DATA[path]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read_epochs, seed) for seed in range(3)]
        try:
            while kills < 8 and not any(reader.done() for reader in readers):
                client = running_daemon(settings)
                if client is None:
                    connect(settings).evict(None)  # so that there is something to fetch
                    continue
                time.sleep(rng.uniform(0, 0.05))
                os.kill(client.health()["pid"], signal.SIGKILL)
                kills += 1
        finally:
            stop.append(True)
        for reader in readers:
            reader.result(60)
    assert kills == 8


def test_threads_that_find_no_daemon_start_one_between_them(settings) -> None:
    started = []
    client = DaemonClient(settings)
    spawn = client._process._spawn

    def counted():
        started.append(1)
        return spawn()

    client._process._spawn = counted
    threads = [threading.Thread(target=client.ensure) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.alive()
    assert len(started) == 1


def test_a_daemon_that_waits_serves_when_the_one_before_it_has_ended(settings):
    first = connect(settings)
    pid = first.health()["pid"]
    waiting = subprocess.Popen(
        [sys.executable, "-m", "datacache.daemon", "--wait"],
        env=os.environ | settings.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert f"(pid {pid}) serves {settings.home}: waiting for its end" in waiting.stderr.readline()
        assert first.health()["pid"] == pid
        os.kill(pid, signal.SIGKILL)
        external = DaemonClient(dataclasses.replace(settings, daemon="external"))
        assert external.health()["pid"] == waiting.pid
    finally:
        waiting.terminate()
        waiting.communicate()
    assert waiting.returncode == 0


def test_where_something_else_starts_the_daemon_no_client_does_and_reads_go_past_it(settings, bucket, monkeypatch):
    def start(*_arguments):
        raise AssertionError("a client starts a daemon")

    monkeypatch.setattr("datacache.daemon.starting._EXTERNAL_AWAY_S", 0.2)
    snapshot = create_snapshot("mask", str(bucket), settings=settings)
    assert running_daemon(settings) is None
    external = dataclasses.replace(settings, daemon="external", prefetch=False)
    monkeypatch.setattr(DaemonProcess, "_spawn", start)
    DaemonClient(external).start_soon()
    with open_snapshot(snapshot.ref, settings=external) as opened:
        assert {path: opened.read(path) for path in list(DATA)[:20]} == dict(list(DATA.items())[:20])
    assert running_daemon(settings) is None


@promise("An unreachable endpoint that the home never met is named after 3 s with its setting, however many ask")
def test_a_daemon_that_starts_while_its_store_is_away_waits_for_it(s3_bucket, rclone_s3, settings, monkeypatch):
    with FaultProxy(rclone_s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        patient = dataclasses.replace(settings, store_timeout_s=60.0, prefetch=False)
        create_snapshot("mask", f"s3://{s3_bucket[0]}", settings=patient)
        proxy.refuse()
        connect(patient)  # the first daemon of the home
        with open_snapshot("mask@latest", patient) as snapshot, concurrent.futures.ThreadPoolExecutor() as pool:
            name = min(DATA)
            reading, asked = pool.submit(snapshot.read, name), time.monotonic()
            while time.monotonic() < asked + 3 * UNREACHED_S:  # longer than an address has that nobody was met at
                assert not reading.done(), reading.exception()
                time.sleep(0.05)
            proxy.heal()
            assert reading.result(60) == DATA[name]


@promise("Logs stay small")
def test_a_daemon_short_of_descriptors_says_so_a_few_times_and_answers_again(settings, tmp_path):
    log = tmp_path / "daemon.log"
    with log.open("wb") as file:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "datacache.daemon"],
            env=os.environ | settings.environment(),
            stderr=file,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)),
        )
    client = DaemonClient(settings)
    connections = []
    try:
        wait_until(client.alive)
        for _ in range(150):
            connections.append(socket.socket(socket.AF_UNIX))
            connections[-1].settimeout(0.2)
            try:
                connections[-1].connect(str(paths.socket_path(settings.home)))
            except (TimeoutError, BlockingIOError):  # the backlog is full
                break
        wait_until(lambda: b"Too many open files" in log.read_bytes())
        # It tries again every second, each time for all that wait.
        held_until = time.monotonic() + 5
        while time.monotonic() < held_until:
            assert log.read_bytes().count(b"Too many open files") <= 40
            assert log.stat().st_size < 200_000
            time.sleep(0.1)
        for connection in connections:
            connection.close()
        wait_until(client.alive)
        assert client.health()["pid"] == daemon.pid
    finally:
        for connection in connections:
            connection.close()
        daemon.kill()
        daemon.wait()
