"""The driver's port, over HTTP, with a real daemon behind it."""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from csi_driver.metrics import COUNTS, Counts, MetricsServer, NodeMetrics, serve_metrics
from csi_driver.records import NodeVolume, Records, SharedMount
from datacache import connect, create_snapshot, open_snapshot
from datacache.settings import Settings
from fuse_mount import list_bucket_mounts, mount_bucket, unmount
from tests.csi_driver.kubelet import needs_root


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
    served = serve_metrics(0, NodeMetrics(settings, Records(settings.home / "csi")))
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
    server = serve_metrics(0, None, problem=problems.pop)
    try:
        assert ask(server, "/healthz") == (503, "the socket is gone\n")
        assert ask(server, "/healthz") == (200, "ok\n")
    finally:
        server.close()


def test_a_controller_shows_no_node() -> None:
    server = serve_metrics(0, None)
    try:
        assert "daemon_up" not in ask(server, "/metrics")[1]
    finally:
        server.close()


def test_nothing_else_is_answered(server: MetricsServer) -> None:
    assert ask(server, "/../etc/passwd")[0] == 404
    assert ask(server, "/metrics", method="POST")[0] == 501


def test_the_port_is_free_again_afterwards() -> None:
    first = serve_metrics(0, None)
    with pytest.raises(OSError, match="in use"):
        serve_metrics(first.port, None)
    first.close()
    serve_metrics(first.port, None).close()


def test_calls_are_counted_by_method_and_code() -> None:
    counts = Counts()
    for code in ("OK", "OK", "ABORTED"):
        counts.call("NodeStageVolume", code)
    counts.mended()
    text = "\n".join(counts.render())
    assert 'datacache_csi_calls_total{method="NodeStageVolume",code="OK"} 2' in text
    assert 'datacache_csi_calls_total{method="NodeStageVolume",code="ABORTED"} 1' in text
    assert "datacache_csi_mounts_mended_total 1" in text
