"""The driver's port, over HTTP, with a real daemon behind it."""

from __future__ import annotations

import http.client
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from csi_driver import server as driver_server
from csi_driver.metrics import COUNTS, CallCounts, MetricsServer, NodeMetrics
from csi_driver.node.records import NodeVolume, Records, SharedMount
from csi_driver.wire import csi_pb2 as csi
from datacache import connect, create_snapshot, open_snapshot
from datacache.settings import Settings
from fuse_mount import list_bucket_mounts, mount_bucket, unmount
from fuse_mount.bucket.metrics import mount_id
from tests.csi_driver.kubelet import needs_root
from tests.promises import promise


def ask(server: MetricsServer, path: str, *, method: str = "GET", address: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, server.port, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def server(settings: Settings) -> Iterator[MetricsServer]:
    served = MetricsServer(0, NodeMetrics(settings, Records(settings.home / "csi")))
    yield served
    served.close()


def test_a_node_shows_the_daemons_metrics_and_its_own(server: MetricsServer, tmp_path: Path) -> None:
    COUNTS.call("NodePublishVolume", "OK")
    status, text = ask(server, "/metrics")
    assert status == 200
    assert "datacache_csi_daemon_up 0\n" in text
    assert 'datacache_csi_calls_total{method="NodePublishVolume",code="OK"} ' in text

    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a").write_bytes(b"a" * 1000)
    create_snapshot("mask", (tmp_path / "bucket").as_uri())
    connect()
    with open_snapshot("mask") as snapshot:
        snapshot.read("a")
    text = ask(server, "/metrics?name[]=x")[1]
    assert "datacache_csi_daemon_up 1\n" in text
    assert "datacache_misses_total 1\n" in text
    named = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(named) == len(set(named)), "Prometheus refuses a name that is described twice"


@promise("A node's metrics do not say which bucket a mount is of or where it is")
@needs_root
def test_the_port_tells_mounts_apart_and_not_what_they_are(
    server: MetricsServer, settings: Settings, tmp_path: Path
) -> None:
    for number in range(2):
        for name in (f"team-{number}", f"mnt-{number}"):
            (tmp_path / name).mkdir()
        mount_bucket((tmp_path / f"team-{number}").as_uri(), tmp_path / f"mnt-{number}", settings=settings)
    text = ask(server, "/metrics")[1]
    ids = re.findall(r'^datacache_write_dirty_bytes\{mount="([0-9a-f]{12})"\} 0$', text, re.MULTILINE)
    assert len(set(ids)) == 2
    # A scrape later, and in another process, they are the same; whoever owns the home is told which is which.
    assert set(re.findall(r'mount="([0-9a-f]+)"', ask(server, "/metrics")[1])) == set(ids)
    infos = list_bucket_mounts(settings)
    assert {mount_id(settings.home, info) for info in infos} == set(ids)
    assert (settings.home / "mounts" / "metrics.key").stat().st_mode & 0o777 == 0o600
    for secret in ("team-", "mnt-", str(tmp_path), str(settings.home), "file:"):
        assert secret not in text
    for info in infos:
        unmount(info.mountpoint, settings=settings)


@needs_root
def test_who_does_not_answer_is_told_within_a_scrape(
    server: MetricsServer, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon and a mount's server are stopped: the numbers that alerts go by are there all the same."""
    monkeypatch.setattr("csi_driver.metrics._ANSWER_S", 0.5)
    for name in ("runs", "mnt"):
        (tmp_path / name).mkdir()
    mount_bucket((tmp_path / "runs").as_uri(), tmp_path / "mnt", settings=settings)
    [info] = list_bucket_mounts(settings)
    stopped = [connect(settings).health()["pid"], info.pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        text = ask(server, "/metrics")[1]
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert "datacache_csi_daemon_up 0\n" in text
    assert "datacache_csi_bucket_mounts 1\n" in text
    assert "datacache_csi_bucket_mounts_silent 1\n" in text
    assert "datacache_csi_calls_total" in text
    unmount(tmp_path / "mnt", settings=settings)


def test_volumes_that_only_wait_for_their_uploads_are_not_used(settings: Settings) -> None:
    records = Records(settings.home / "csi")
    mount = SharedMount(source="mask@0123", bucket=False)
    for name, staging in (("used", "/staging"), ("left", "")):
        records.put(NodeVolume(volume_id=name, context={}, mount=mount, mode=3, staging=staging))
    assert "datacache_csi_volumes 1\n" in NodeMetrics(settings, records).render()


def test_health_is_503_with_the_reason_while_something_is_wrong() -> None:
    problems = ["", "the socket is gone"]
    server = MetricsServer(0, None, problem=problems.pop)
    try:
        assert ask(server, "/healthz") == (503, "the socket is gone\n")
        assert ask(server, "/healthz") == (200, "ok\n")
    finally:
        server.close()


def test_a_controller_shows_no_node() -> None:
    server = MetricsServer(0, None)
    try:
        assert "daemon_up" not in ask(server, "/metrics")[1]
    finally:
        server.close()


@promise("Metrics are served on the address that is named, by default to this machine alone")
def test_it_listens_on_the_address_that_it_is_told_and_on_no_other() -> None:
    server = MetricsServer(0, None)
    try:
        assert ask(server, "/healthz")[0] == 200
        with pytest.raises(ConnectionRefusedError):
            ask(server, "/healthz", address="127.0.0.2")
    finally:
        server.close()
    server = MetricsServer(0, None, address="*")
    try:
        assert [ask(server, "/healthz", address=each)[0] for each in ("127.0.0.1", "127.0.0.2")] == [200, 200]
    finally:
        server.close()
    with pytest.raises(OSError, match="address"):
        MetricsServer(0, None, address="192.0.2.1")


@promise("Liveness probes notice a driver, mount host or daemon that hangs, and wait for one that opens its cache")
def test_health_notices_a_driver_whose_threads_all_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_server, "PROBE_S", 0.5)
    going_on = threading.Event()

    class Hanging:
        def Probe(self, _request: Any) -> csi.ProbeResponse:  # noqa: N802
            going_on.wait(60)
            return csi.ProbeResponse()

    place = tmp_path / "csi.sock"
    assert "UNAVAILABLE" in driver_server.probe(place)
    served = driver_server.Server(place, csi.DESCRIPTOR, {"Identity": Hanging()})
    served.start()
    health = MetricsServer(0, None, problem=lambda: driver_server.probe(place))
    try:
        code, words = ask(health, "/healthz")
        assert (code, "DEADLINE_EXCEEDED" in words) == (503, True)
        going_on.set()
        assert ask(health, "/healthz") == (200, "ok\n")
    finally:
        going_on.set()
        health.close()
        served.close()


def test_nothing_else_is_answered(server: MetricsServer) -> None:
    assert ask(server, "/../etc/passwd")[0] == 404
    assert ask(server, "/metrics", method="POST")[0] == 501


def test_the_port_is_free_again_afterwards() -> None:
    first = MetricsServer(0, None)
    with pytest.raises(OSError, match="in use"):
        MetricsServer(first.port, None)
    first.close()
    MetricsServer(first.port, None).close()


def test_calls_are_counted_by_method_and_code() -> None:
    counts = CallCounts()
    for code in ("OK", "OK", "ABORTED"):
        counts.call("NodeStageVolume", code)
    counts.mended()
    text = "\n".join(counts.render())
    assert 'datacache_csi_calls_total{method="NodeStageVolume",code="OK"} 2' in text
    assert 'datacache_csi_calls_total{method="NodeStageVolume",code="ABORTED"} 1' in text
    assert "datacache_csi_mounts_mended_total 1" in text
