"""Work on a real Dask and a real Ray: the same result as here, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed
import pytest

from datacache import api
from datacache.core.errors import UsageError
from datacache.executors.open import open_engine
from datacache.settings import Settings
from dataset_cli.demo.faces import draw_faces
from tests.conftest import ROOT
from tests.executors.gated import Gate, convert
from tests.models.finder import Finder
from tests.promises import promise
from tests.servers import DaskCluster, RayCluster

_TIMEOUT_S = 100.0


@dataclass
class Cluster:
    """An engine with four processes."""

    url: str
    workers: Callable[[], list[int]]


# Ray gives its processes some seconds to start, which are too few on a busy machine.
@pytest.fixture(scope="module", params=["dask", pytest.param("ray", marks=pytest.mark.alone)])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "dask":
        with DaskCluster(folder) as dask:
            yield Cluster(dask.url, lambda: [worker.pid for worker in dask.workers])
    else:
        with RayCluster(folder) as ray:
            yield Cluster(ray.url, ray.workers)


@pytest.fixture(scope="module", params=[600, pytest.param(20_000, marks=pytest.mark.long)])
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    draw_faces(folder, count=request.param, width=64, height=48)
    return folder


@pytest.fixture
def ref(settings: Settings, drawn: Path) -> str:
    return api.create_snapshot("faces", drawn.as_uri(), settings=settings).ref


def wait_until(true: Callable[[], bool], running: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + _TIMEOUT_S
    while not true():
        assert running.poll() is None, "the client has ended"
        assert time.monotonic() < ends
        time.sleep(0.02)


def noted(settings: Settings) -> set[str]:
    """The ids of the tasks whose results the client has noted, the last perhaps in part."""
    lines = [
        line for file in (settings.home / "jobs").glob("*.journal") for line in file.read_bytes().split(b"\n")[1:-1]
    ]
    return {line[:32].decode() for line in lines if line}


@promise("Work on an engine goes on when processes there are killed, and on where it was when the client is")
def test_two_workers_and_the_client_are_killed_and_a_second_start_goes_on(
    settings: Settings, ref: str, cluster: Cluster, tmp_path: Path
) -> None:
    expected = api.convert(ref, to="yolo", resize="32x24", name="here", settings=settings).record.id
    gate = Gate(tmp_path / "gate")
    gate.let(6)
    command = [sys.executable, "-m", "tests.executors.gated", cluster.url, ref, "there", str(gate.folder)]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}) as client:
        try:
            wait_until(lambda: len(noted(settings)) >= 6 and gate.begun() >= 10, client)
            for pid in cluster.workers()[:2]:
                os.kill(pid, signal.SIGKILL)
            before = len(noted(settings))
            gate.let(20)
            wait_until(lambda: len(noted(settings)) > before + 4, client)
        finally:
            client.kill()
    there = noted(settings)
    gate.let()
    made, sent = convert(cluster.url, ref, "there", gate.folder)
    assert made == expected
    assert sent
    assert not sent & there


def test_what_is_made_there_is_what_is_made_here(
    settings: Settings, ref: str, cluster: Cluster, tmp_path: Path
) -> None:
    ids, files = [], []
    for where, how in (("here", {}), ("there", {"on": cluster.url})):
        ids.append(api.convert(ref, to="yolo", resize="32x24", name=where, settings=settings, **how).record.id)
        folder = tmp_path / where
        shards = api.shard("here", to=str(folder), max_size_bytes=40_000, settings=settings, **how)
        assert shards.built.made > 8
        files.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert ids[0] == ids[1]
    assert files[0] == files[1]


@pytest.mark.long  # Ray's processes take their time to import PyTorch
@promise("A prediction gives the same snapshot wherever its batches are done")
def test_a_model_finds_there_what_it_finds_here(settings: Settings, ref: str, cluster: Cluster) -> None:
    def predicted(model: Any, name: str, **how: Any) -> str:
        found = api.predict(ref, model, name=name, batch_size=250, settings=settings, **how)
        assert found.report.objects == 2 * found.report.images
        return found.record.id

    there = predicted("tests.models.finder:Finder", "there", on=cluster.url)
    assert there == predicted(Finder(), "here", decoders=0)


def test_an_engine_that_does_not_answer_is_named(settings: Settings, ref: str) -> None:
    with pytest.raises(UsageError, match=r"nobody answers at dask://127\.0\.0\.1:1: "):
        api.stats(ref, on="dask://127.0.0.1:1", settings=settings)


def test_a_cluster_is_named_once_each_time_that_it_has_no_worker(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datacache.executors.open._WIDTH_S", -1.0)
    with distributed.LocalCluster(n_workers=0, dashboard_address=":0", processes=False, protocol="tcp://") as cluster:
        url = cluster.scheduler_address.replace("tcp://", "dask://")
        with open_engine(url, settings) as engine:
            for _ in range(2):
                assert [engine.width(), engine.width()] == [1, 1]
                cluster.scale(1)
                cluster.wait_for_workers(1, timeout=_TIMEOUT_S)
                engine.width()
                cluster.scale(0)
                ends = time.monotonic() + _TIMEOUT_S
                while cluster.scheduler.workers:
                    assert time.monotonic() < ends
                    time.sleep(0.02)
    assert [record.message for record in caplog.records if record.name == "datacache.executors.open"] == 2 * [
        f"{url} has no worker; the command waits until one is there"
    ]
