"""The daemon's answers to requests that nobody should send, and what keeps it the only one of its home."""

from __future__ import annotations

import shutil

import pytest

from datacache import connect
from datacache.core.errors import CatalogUnavailableError, DaemonRunningError, UsageError
from datacache.daemon.server import Daemon, hold_lock
from tests.daemon.test_lookahead import wait_for
from tests.promises import promise


@promise("The daemon checks each field of a request")
@pytest.mark.parametrize("op", ["warm", "pin", "unpin"])
def test_a_reference_must_be_a_text(daemon, op):
    for body in ("{}", '{"ref": 5}', '{"ref": ""}', "]", "[" * 100_000, '{"ref": "\\u0000"}', '{"ref": ["x"]}'):
        with pytest.raises(UsageError, match="bad request"):
            daemon._ask(lambda of, body=body: of.call(op, body.encode()), timeout_s=60)


def test_an_operation_that_the_daemon_does_not_know_is_named(daemon):
    with pytest.raises(UsageError, match="'fly'"):
        daemon._call("fly")


@pytest.fixture
def daemon(settings):
    client = connect(settings)
    yield client
    client.stop()


@promise("A snapshot whose background fill could not begin is filled when it is read again")
def test_a_snapshot_whose_fill_did_not_begin_is_considered_again(settings):
    class Daemonless(Daemon):
        def __init__(self):
            self._considered = {"f" * 64}

        def _open_manifest(self, id):
            raise CatalogUnavailableError("away")

    daemon = Daemonless()
    daemon._fill_if_it_fits("mask", "f" * 64)
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
