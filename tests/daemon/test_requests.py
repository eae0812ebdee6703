"""The daemon's answers to requests that nobody should send, and what keeps it the only one of its home."""

from __future__ import annotations

import json
import shutil
import time

import pytest

from datacache import connect
from datacache.core.errors import DaemonError, DaemonRunningError
from datacache.daemon import paths
from datacache.daemon.client import _Connection
from datacache.daemon.server import Daemon, hold_lock
from tests.daemon.test_lookahead import wait_for
from tests.promises import promise

REF = ["file:///nowhere", "key", 100, "", ""]
WRONG = [
    {"ref": REF, "number": -5, "dataset": "mask"},
    {"ref": REF, "number": 1, "dataset": "mask"},
    {"ref": REF, "number": True, "dataset": "mask"},
    {"ref": REF, "number": "0", "dataset": "mask"},
    {"ref": REF, "dataset": "mask"},
    {"ref": REF, "number": 0, "dataset": 7},
    {"ref": REF, "number": 0, "dataset": "mask", "broken": "yes"},
    {"ref": REF, "number": 0, "dataset": "mask", "snapshot": ["x"]},
    {"ref": ["file:///nowhere", "key", -1, "", ""], "number": 0, "dataset": "mask"},
    {"ref": ["file:///nowhere", "key", 10**30, "", ""], "number": 0, "dataset": "mask"},
    {"ref": "file:///nowhere", "number": 0, "dataset": "mask"},
    {"number": 0, "dataset": "mask"},
    [],
    None,
]


def request(settings, method, path, body=None):
    connection = _Connection(paths.socket_path(settings.home), lambda: None)
    connection.connect()
    connection.sock.give_up_at = time.monotonic() + 60
    connection.request(method, path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read()


def post(settings, path, body):
    status, answer = request(settings, "POST", path, body)
    return status, json.loads(answer)


@pytest.mark.parametrize("path", ["/healthz", "/metrics"])
def test_a_probe_may_ask_for_the_head_alone(daemon, settings, path):
    assert request(settings, "HEAD", path) == (200, b"")


@promise("The daemon checks each field of a request")
@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_field_that_is_wrong_is_wrong_usage_that_names_it(daemon, settings, number):
    status, answer = post(settings, "/v1/block", json.dumps(WRONG[number]))
    assert (status, answer["error"]) == (400, "UsageError")
    assert "bad request" in answer["message"]


@pytest.mark.parametrize("path", ["/v1/warm", "/v1/pin", "/v1/unpin"])
def test_a_reference_must_be_a_text(daemon, settings, path):
    for body in ("{}", '{"ref": 5}', '{"ref": ""}', "]", "[" * 100_000, '{"ref": "\\u0000"}'):
        assert post(settings, path, body)[0] == 400


@pytest.mark.parametrize("how", ["before the answer", "within the answer", "cut off"])
def test_a_reader_that_goes_away_is_no_defect(tmp_path, monkeypatch, caplog, how):
    """Nothing is logged of it, by the daemon or by aiohttp; an error of a connection to somebody else is."""
    import asyncio

    from aiohttp import web

    from datacache.daemon import requests

    if how == "cut off":
        monkeypatch.setattr(requests, "_TAKEN_IN_S", 0.05)
    raised = asyncio.Event()

    async def answer(request):
        if how == "before the answer":
            while request.transport is not None:  # noqa: ASYNC110 - aiohttp has no event for it
                await asyncio.sleep(0.01)
        try:
            return await requests.send_pieces(request, bytes(64 * 2**20))
        except ConnectionError:
            raised.set()
            raise

    async def other(_):
        raise ConnectionResetError("of a catalog")

    async def run():
        app = web.Application(middlewares=[requests.answer_as_json])
        app.router.add_get("/", answer)
        app.router.add_get("/other", other)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        if how == "within the answer":
            await reader.readexactly(100_000)
        if how != "cut off":
            writer.transport.abort()
        async with asyncio.timeout(60):
            await raised.wait()
        writer.transport.abort()
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        quiet = list(caplog.records)
        writer.write(b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 500 " in await reader.readline()
        writer.transport.abort()
        await runner.cleanup()
        return quiet

    caplog.set_level("INFO")
    assert asyncio.run(run()) == []
    assert [record.getMessage() for record in caplog.records] == ["GET /other"]


@pytest.fixture
def daemon(settings):
    client = connect(settings)
    yield client
    client.stop()


@promise("The daemon checks each field of a request")
def test_a_defect_of_the_daemon_is_not_called_wrong_usage(settings, monkeypatch):
    import asyncio

    from aiohttp import web
    from aiohttp.test_utils import make_mocked_request

    from datacache.daemon.requests import answer_as_json

    async def defect(_):
        return {}["missing"]

    request = make_mocked_request("POST", "/v1/warm")
    response = asyncio.run(answer_as_json(request, defect))
    assert isinstance(response, web.Response)
    assert response.status == 500
    assert json.loads(response.text)["error"] == DaemonError.__name__


@promise("A snapshot whose background fill could not begin is filled when it is read again")
def test_a_snapshot_whose_fill_did_not_begin_is_considered_again(settings):
    import asyncio

    from datacache.core.errors import CatalogUnavailableError

    class Daemonless(Daemon):
        def __init__(self):
            self._considered = {"f" * 64}

        def _open_manifest(self, id):
            raise CatalogUnavailableError("away")

    daemon = Daemonless()
    asyncio.run(daemon._fill_if_it_fits("mask", "f" * 64))
    assert not daemon._considered


@promise("A home has one daemon, however many start one at a time or delete `<home>/run`")
def test_deleting_the_run_folder_gives_no_second_daemon_and_the_first_makes_way(settings):
    client = connect(settings)
    pid = client.health()["pid"]
    shutil.rmtree(settings.home / "run")
    with pytest.raises(DaemonRunningError), hold_lock(settings):
        pass
    wait_for(lambda: not alive(pid))
    assert connect(settings).health()["pid"] != pid
    connect(settings).stop()


def alive(pid):
    from pathlib import Path

    return Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
