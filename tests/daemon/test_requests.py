"""The daemon's answers to requests that nobody should send, and what keeps it the only one of its home."""

from __future__ import annotations

import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from datacache import connect
from datacache.core.errors import CatalogUnavailableError, DaemonRunningError, StoreUnavailableError, UsageError
from datacache.core.ids import BLOCK_BYTES
from datacache.daemon import fetcher as fetcher_module
from datacache.daemon.client import AskedBlock
from datacache.daemon.fetcher import Fetcher
from datacache.daemon.nodes import NodeRequests
from datacache.daemon.parts import OtherParts
from datacache.daemon.running import hold_lock
from datacache.daemon.server import Daemon
from datacache.daemon.turns import Sends
from datacache.exchange.client import Connection
from datacache.exchange.frames import Deadline, Frame, FrameSocket, Kind
from datacache.exchange.wire import BlocksRequest, Mode, encode_error
from datacache.tiers.parts import Part
from tests.daemon.test_fetcher import LARGE, Store, Tiers
from tests.daemon.test_lookahead import wait_for
from tests.daemon.test_turns import held_bytes
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


@pytest.mark.parametrize("told_by_another_shell", [False, True])
def test_who_is_told_that_a_store_is_away_asks_again_only_if_it_was_the_wrong_one(told_by_another_shell):
    ours, theirs = socket.socketpair()
    with theirs:
        connection = Connection(ours, look=lambda: None, look_every_s=30.0)
        connection.deadline = Deadline("late")
        request, kept = BlocksRequest([(LARGE, 0)], "d", "", Mode.READ), []
        asked = AskedBlock(connection, request, lambda: False, kept.append, lambda exc: told_by_another_shell)
        away = encode_error(StoreUnavailableError("it is away", url="s3://b/large"))
        FrameSocket(theirs, look_every_s=30.0, receiving=lambda: None, sending=lambda: None).send(
            Kind.ERROR, 1, body=away
        )
        assert asked.take() is None
        assert kept == [connection]
        assert isinstance(asked.failure(), StoreUnavailableError) is not told_by_another_shell
        asked.give_up()


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
    run = settings.home / "run"
    wait_for(lambda: shutil.rmtree(run, ignore_errors=True) or not run.exists())  # the daemon may be writing there
    with pytest.raises(DaemonRunningError), hold_lock(settings):
        pass
    wait_for(lambda: not alive(pid))
    assert connect(settings).health()["pid"] != pid
    connect(settings).stop()


def alive(pid):
    return Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


class Reading(Daemon):
    """As much of a daemon as gives blocks."""

    def __init__(self, store):
        self._flow_of, self._sends, self._answered = str, Sends(), 0
        tiers = Tiers()
        self.fetcher = Fetcher(tiers, tiers, lambda _: store, 8)
        parts = OtherParts(Path(), Part())
        self.nodes = NodeRequests(SimpleNamespace(leaves=False), self.fetcher, parts)


@promise("Bytes in the daemon are bounded from the fetch until they were stored and sent")
def test_a_request_for_more_blocks_than_there_is_room_for_is_answered(monkeypatch):
    monkeypatch.setattr(fetcher_module, "_READ_BYTES", 2 * BLOCK_BYTES)

    daemon = Reading(Store())
    request = BlocksRequest([(LARGE, number) for number in range(8)], "d", "", Mode.READ)
    came = []

    def ask():
        for _ in range(2):  # all blocks, and then the first alone: whoever asks may go away
            for answer in daemon.answer(Frame(Kind.BLOCKS, 1, b"", memoryview(request.encode()))):
                came.append(len(answer.body))
                if len(came) == 9:
                    break

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(60)
    assert came == [BLOCK_BYTES] * 9
    wait_for(lambda: not daemon.fetcher.under_way)
    assert held_bytes(daemon.fetcher.turns) == 0


@promise("Requests for the same blocks in different order are all answered, however little room there is")
@pytest.mark.parametrize("mode", [Mode.READ, Mode.OWNER, Mode.ZONE])
def test_no_request_holds_the_room_that_its_first_block_waits_for(mode, monkeypatch):
    monkeypatch.setattr(fetcher_module, "_READ_BYTES", BLOCK_BYTES)
    store, go_on, came = Store(), threading.Event(), []
    store.wait = lambda: go_on.wait(60)
    daemon = Reading(store)

    def ask(*numbers):
        request = BlocksRequest([(LARGE, number) for number in numbers], "d", "", mode)
        came.extend(daemon.answer(Frame(Kind.BLOCKS, 1, b"", memoryview(request.encode()))))

    askers = [threading.Thread(target=ask, args=numbers, daemon=True) for numbers in ((4,), (7, 4))]
    askers[0].start()
    wait_for(lambda: store.reads)
    askers[1].start()
    wait_for(lambda: daemon.fetcher.stats.shared)  # it holds the block that the room is for
    go_on.set()
    for asker in askers:
        asker.join(20)
    assert [len(answer.body) for answer in came if answer.kind == Kind.OK] == [BLOCK_BYTES] * 3
    assert sorted(store.reads) == [4 * BLOCK_BYTES, 7 * BLOCK_BYTES]
