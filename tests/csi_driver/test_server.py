"""The driver's process and its socket: starts, ends, upgrades, wrong usage."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from csi_driver.server import Server
from csi_driver.status import RequestError, status_of
from csi_driver.wire import csi_pb2 as csi
from datacache.core import errors
from tests.csi_driver.api_server import ApiServer
from tests.csi_driver.conftest import StartDriver
from tests.csi_driver.driver import READ, Client


def run(*options: str, **variables: str) -> tuple[int, str]:
    """The exit code and the last words of a driver that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "csi_driver", *options],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


# --- usage ---


def test_help_names_every_option() -> None:
    code, text = run("--help", COLUMNS="200")
    assert code == 0
    for option in ("endpoint", "node-id", "mode", "register", "kubelet-endpoint", "kubeconfig", "allow-bucket"):
        assert f"--{option} " in text
    assert "--metrics-port" in text
    assert "--metrics-address" in text


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("", 2, "--endpoint"),
        ("--endpoint tcp://127.0.0.1:1 --node-id n", 2, "unix:///PATH/csi.sock"),
        ("--endpoint unix://csi.sock --node-id n", 2, "unix:///PATH/csi.sock"),
        ("--endpoint unix:///FOLDER/csi.sock", 2, "--node-id"),
        ("--endpoint unix:///FOLDER/csi.sock --mode both", 2, "--mode"),
        (f"--endpoint unix:///FOLDER/csi.sock --mode node --node-id {'x' * 300}", 1, "--node-id"),
        ("--endpoint unix:///FOLDER/csi.sock --mode controller --colour", 2, "--colour"),
        ("--endpoint unix:///FOLDER/none/csi.sock --mode controller", 1, "/none of the socket"),
        ("--endpoint unix:///FOLDER/file --mode controller", 1, "no socket"),
        (f"--endpoint unix:///FOLDER/{'x' * 100} --mode controller", 1, "too long"),
        ("--endpoint unix:///FOLDER/csi.sock --mode controller --register /FOLDER/none", 1, "plugins_registry"),
        ("--endpoint unix:///FOLDER/csi.sock --mode controller --kubeconfig /FOLDER/none", 1, "--kubeconfig"),
        ("--endpoint unix:///FOLDER/csi.sock --mode controller --allow-bucket s3://", 1, "allowed bucket"),
        ("--endpoint unix:///FOLDER/csi.sock --mode controller --metrics-port 99999", 1, "99999"),
    ],
)
def test_wrong_usage_is_named(tmp_path: Path, home: Path, options: str, code: int, words: str) -> None:
    (tmp_path / "file").touch()
    got, text = run(*options.replace("/FOLDER", str(tmp_path)).split())
    assert (got, words in text, "Traceback" in text) == (code, True, False), text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_endpoint_can_be_a_variable(home: Path) -> None:
    code, text = run("--mode=controller", CSI_ENDPOINT="unix:///none/csi.sock")
    assert (code, "/none" in text) == (1, True)


def test_a_wrong_setting_is_an_error_without_a_traceback(home: Path, tmp_path: Path) -> None:
    code, text = run(f"--endpoint=unix://{tmp_path}/s", "--mode=controller", DATACACHE_SSD_BYTES="much")
    assert (code, "DATACACHE_SSD_BYTES" in text, "Traceback" in text) == (1, True, False)


# --- the socket ---


def test_a_driver_takes_over_from_a_living_one_without_a_gap(start_driver: StartDriver) -> None:
    old = start_driver("--mode=controller")
    stop = threading.Event()

    def ask_on_new_connections() -> int:
        asked = 0
        while not stop.wait(0.001):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(old.socket))
                asked += 1
        return asked

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_on_new_connections)
        new = start_driver("--mode=controller", f"--endpoint=unix://{old.socket}")
        assert f"taking {old.socket} over" in new.text
        assert old.stop() == 0
        client = Client(old.socket)
        assert client.Probe().ready.value
        client.close()
        stop.set()
        assert asked.result() > 0
    assert new.stop() == 0
    assert os.listdir(old.socket.parent) == []


def test_a_call_under_way_is_finished_before_the_driver_ends(
    start_driver: StartDriver, cluster: ApiServer, kubeconfig: Path, masks: dict[str, str]
) -> None:
    driver = start_driver("--mode=controller", f"--kubeconfig={kubeconfig}")
    claim = cluster.put_claim("faces", {"datacache.io/dataset": "mask@v9"})
    cluster.fail, cluster.failing = "hang", "events"
    request = csi.CreateVolumeRequest(name="faces", volume_capabilities=READ, parameters=claim)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(driver.client.code, "CreateVolume", request)
        cluster.wait_for("events")
        assert driver.stop() == 0
        assert call.result() == ("FAILED_PRECONDITION", "mask has no tag v9; it has v1, v2, v3")


# --- calls ---


class Identity:
    """A service that does what the test says."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def Probe(self, _request: csi.ProbeRequest) -> csi.ProbeResponse:  # noqa: N802
        if self.error is not None:
            raise self.error
        return csi.ProbeResponse()


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RequestError(grpc.StatusCode.ABORTED, "twice"), "ABORTED", "twice"),
        (errors.CatalogUnavailableError("away", hint="Start it."), "UNAVAILABLE", "away. Start it"),
        (errors.AccessDeniedError("closed"), "PERMISSION_DENIED", "closed"),
        (errors.StagingFullError("full"), "RESOURCE_EXHAUSTED", "full"),
        (OSError(28, "No space left on device"), "RESOURCE_EXHAUSTED", "No space"),
        (ZeroDivisionError("a bug"), "INTERNAL", "ZeroDivisionError: a bug"),
        (RequestError(grpc.StatusCode.INTERNAL, "ü" * 100_000), "INTERNAL", "üüü"),
    ],
)
def test_an_error_becomes_a_code_and_words(tmp_path: Path, error: Exception, code: str, words: str) -> None:
    service, counted = Identity(), []
    server = Server(
        tmp_path / "s", csi.DESCRIPTOR, {"Identity": service}, count=lambda rpc, code: counted.append((rpc, code))
    )
    server.start()
    client = Client(tmp_path / "s")
    try:
        assert client.code("Probe") == ("OK", "")
        service.error = error
        got, text = client.code("Probe")
        assert (got, words.removesuffix(".") in text) == (code, True)
        assert counted == [("Probe", "OK"), ("Probe", code)]
        assert client.code("GetPluginInfo")[0] == "UNIMPLEMENTED"
    finally:
        client.close()
        server.close()
    assert os.listdir(tmp_path) == []


def test_a_call_that_does_not_end_is_left_when_patience_is_over(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Waiting:
        def Probe(self, _request: csi.ProbeRequest) -> csi.ProbeResponse:  # noqa: N802
            begun.set()
            go_on.wait(60)
            return csi.ProbeResponse()

    server = Server(tmp_path / "s", csi.DESCRIPTOR, {"Identity": Waiting()})
    server.start()
    client = Client(tmp_path / "s")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.code, "Probe")
        assert begun.wait(60)
        assert not server.close(patience_s=0.1)
        assert call.result()[0] in ("CANCELLED", "UNAVAILABLE")
        go_on.set()
    client.close()


def test_every_error_of_ours_has_a_code_that_a_caller_can_act_on() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.DatacacheError)
    ]
    internal = {kind.__name__ for kind in kinds if status_of(kind("x"))[0] is grpc.StatusCode.INTERNAL}
    assert "CatalogUnavailableError" not in internal
    assert "StoreUnavailableError" not in internal
    assert status_of(errors.SnapshotNotFoundError("x", hint="y."))[1] == "x. y."
