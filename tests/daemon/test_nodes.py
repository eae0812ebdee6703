"""Nodes of a cluster that ask each other over real connections: restarts, slow answers, kept connections."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from datacache.cluster import peer as peer_module
from datacache.cluster.members import Member, StaticMembers, open_members
from datacache.cluster.peers import Peers, open_peers
from datacache.core import ipc
from datacache.core.errors import StoreUnavailableError
from datacache.core.ids import BLOCK_BYTES, ObjectRef, block_id, object_id
from datacache.daemon import nodes as nodes_module
from datacache.daemon import parts as parts_module
from datacache.daemon import paths
from datacache.daemon.client import import_store_clients
from datacache.daemon.fetcher import Fetcher, Reading
from datacache.daemon.nodes import NodeRequests, listen_to_nodes, serve_nodes
from datacache.daemon.parts import OtherParts
from datacache.exchange.auth import Identity
from datacache.exchange.frames import Kind
from datacache.exchange.server import FrameServer
from datacache.exchange.wire import BlocksRequest, Mode
from datacache.settings import load_settings
from datacache.store.open import open_store
from datacache.tiers.parts import Part, part_of
from tests.conformance.faults import Fault, FaultProxy
from tests.daemon.test_fetcher import Store, Tiers, small, until
from tests.promises import promise

KEY = b"0123456789abcdef"


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as found:
        return int(found.getsockname()[1])


def served_by(peers: Peers, fetcher: Fetcher) -> FrameServer:
    """Let other nodes in at a node of one process."""
    return serve_nodes(NodeRequests(peers, fetcher, OtherParts(Path(), Part())), listen_to_nodes(peers.address))


class Lab:
    """Two nodes, of which `owner` answers and the other asks."""

    def __init__(self) -> None:
        self.members = (Member("asks", "127.0.0.1:1", 1e-9), Member("owner", f"127.0.0.1:{free_port()}", 1.0))
        self.asks = self._peers("asks", 0)
        self.peer = self.asks._peer(self.members[1])
        self.peer.limit_s = 30.0  # the machine may be busy
        self.store, self.tiers = Store(), Tiers()
        self.served: FrameServer | None = None
        self.start()

    def _peers(self, name: str, at: int) -> Peers:
        me = Identity("lab", name, KEY)
        return Peers(StaticMembers(name, self.members), me, self.members[at].address, "", lambda _: "share")

    def start(self) -> None:
        fetcher = Fetcher(Tiers(keep=False), self.tiers, lambda _: self.store, 8)
        peers = self._peers("owner", 1)
        self.served = served_by(peers, fetcher)

    def stop(self) -> None:
        if self.served is not None:
            self.served.close()

    def connections(self) -> list[socket.socket]:
        assert self.served is not None
        return [frames.connection for frames in self.served._connections]

    def ask(self, number: int) -> memoryview | None:
        ref: ObjectRef = small(number)
        members = self.asks.ranked_before_this(block_id(object_id(ref), 0), "d")
        assert [member.id for member in members] == ["owner"]
        return self.asks.get(members, ref, 0, "d")

    def ask_together(self, count: int) -> None:
        threads = [threading.Thread(target=self.ask, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(peer_module, "_CONNECT_S", 30.0)
    monkeypatch.setattr(peer_module, "MOST_S", 30.0)
    lab = Lab()
    yield lab
    lab.asks.close()
    lab.stop()


def test_a_node_that_was_restarted_gives_the_next_block(lab: Lab) -> None:
    meet = threading.Barrier(4)
    lab.store.wait = lambda: meet.wait(30) and None
    lab.ask_together(4)
    assert len(lab.connections()) > 1
    lab.stop()
    lab.start()
    lab.store.wait = lambda: None
    assert lab.ask(9) == b"x" * 10
    assert lab.asks.stats.missed == 0
    assert lab.asks.describe()["members"][1]["problem"] == ""


def test_a_late_answer_gives_the_next_one_more_time_and_leaves_no_connection_open(lab: Lab) -> None:
    lab.ask(0)
    go_on = threading.Event()
    look = lab.tiers.view
    lab.tiers.view = lambda *block: go_on.wait(30) and look(*block)
    lab.peer.limit_s = 0.05
    assert lab.ask(9) is None
    assert (lab.peer.limit_s, lab.peer._idle) == (0.1, [])
    go_on.set()
    until(lambda: not lab.connections())
    lab.peer.limit_s = 30.0
    assert lab.ask(10) == b"x" * 10
    assert lab.peer.problem == ""


@promise("An owner whose store is slow is waited for as long as it shows signs of life")
def test_a_slow_store_is_asked_once_and_holds_up_nothing_that_is_here(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "_SIGN_EVERY_S", 0.01)
    here, slow = small(0), small(1)
    lab.tiers.here[block_id(object_id(here), 0)] = b"h" * 10
    go_on = threading.Event()
    lab.store.wait = lambda: go_on.wait(30) and None
    lab.peer.limit_s = 0.5
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(lab.ask, 1) for _ in range(2)]
        until(lambda: lab.store.reads)
        request = BlocksRequest([(slow, 0), (here, 0), (small(2), 0)], "d", "", Mode.OWNER)
        connection = peer_module.NodeConnection(lab.members[1], lab.asks.me)
        answers = connection.answers(request)
        first = [next(answers) for _ in request.blocks]
        assert first == [(0, Kind.WAIT), (1, b"h" * 10), (2, Kind.WAIT)]
        go_on.set()
        assert list(answers) == [(0, b"x" * 10), (2, b"x" * 10)]
        connection.close()
        assert [each.result() for each in waits] == [b"x" * 10] * 2
    assert len(lab.store.reads) == 2


def test_a_block_that_comes_in_the_moment_of_a_sign_of_life_is_given(lab: Lab) -> None:
    class JustCome(Future):  # type: ignore[type-arg]
        def result(self, timeout: float | None = None) -> object:
            if self.done():
                return super().result(timeout)
            self.set_result(b"x")
            raise TimeoutError

    asked = NodeRequests(lab.asks, Fetcher(lab.tiers, lab.tiers, lambda _: lab.store, 8), OtherParts(Path(), Part()))
    request = BlocksRequest([(small(0), 0)], "d", "", Mode.OWNER)
    answers = list(asked._got(0, request, {0: Reading(JustCome(), lambda: None)}))
    assert [(answer.kind, answer.body) for answer in answers] == [(Kind.WAIT, b""), (Kind.OK, b"x")]


def of_part(part: int, size_bytes: int = 10) -> ObjectRef:
    """Return an object of one of two parts."""
    refs = (small(number)._replace(size_bytes=size_bytes) for number in itertools.count())
    return next(ref for ref in refs if part_of(object_id(ref), 2) == part)


def listen_as_part(home: Path, part: int) -> socket.socket:
    path = paths.socket_path(home, part)
    path.parent.mkdir(exist_ok=True)
    return ipc.listen(path, backlog=8)


@promise("To the others a node of several processes is one node")
def test_a_part_that_is_silent_keeps_other_nodes_waiting_twice_at_most(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "_PART_SILENT_S", 0.1)
    monkeypatch.setattr(parts_module, "_PAUSES_S", (60.0, 60.0))
    fetcher, parts = Fetcher(lab.tiers, lab.tiers, lambda _: lab.store, 8), OtherParts(home, Part(0, 2))
    asked = NodeRequests(lab.asks, fetcher, parts)
    request = BlocksRequest([(of_part(1), 0)], "d", "", Mode.OWNER)
    with listen_as_part(home, 1):
        kinds = [[answer.kind for answer in asked.blocks(request)] for _ in range(3)]
    assert kinds == [[Kind.WAIT, Kind.ERROR], [Kind.WAIT, Kind.ERROR], [Kind.BUSY]]


@promise("To the others a node of several processes is one node")
def test_a_part_that_was_silent_is_asked_by_all_once_it_says_a_word(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "_PART_SILENT_S", 0.1)
    monkeypatch.setattr(parts_module, "_PAUSES_S", (0.0, 0.0))
    parts, other, given = OtherParts(home, Part(0, 2)), Store(), threading.Event()
    other.wait = lambda: given.wait(30) and None
    behind = NodeRequests(lab.asks, Fetcher(lab.tiers, lab.tiers, lambda _: other, 8), OtherParts(home, Part(1, 2)))
    asked = NodeRequests(lab.asks, Fetcher(lab.tiers, lab.tiers, lambda _: lab.store, 8), parts)
    request = BlocksRequest([(of_part(1), 0)], "d", "", Mode.OWNER)
    server = FrameServer(lambda frame: behind.blocks(BlocksRequest.decode(frame.body)), most_bytes=2**20)  # type: ignore[arg-type, return-value]
    with listen_as_part(home, 1) as listener:
        for _ in range(2):
            list(asked.blocks(request))
        monkeypatch.setattr(nodes_module, "_PART_SILENT_S", 30.0)
        server.listen(listener)
        answers = asked.blocks(request)
        assert [next(answers).kind for _ in range(2)] == [Kind.WAIT, Kind.WAIT]
        parts.give_back(parts.take(1, 30.0))  # while the store of that one does not answer
        given.set()
        assert [answer.kind for answer in answers if answer.kind != Kind.WAIT] == [Kind.OK]
        server.close()


@promise("To the others a node of several processes is one node")
def test_a_part_that_hung_up_while_its_block_waited_for_another_is_asked_again(lab: Lab, home: Path) -> None:
    behind = NodeRequests(lab.asks, Fetcher(lab.tiers, lab.tiers, lambda _: Store(), 8), OtherParts(home, Part(1, 2)))
    server = FrameServer(
        lambda frame: behind.blocks(BlocksRequest.decode(frame.body)),  # type: ignore[arg-type, return-value]
        most_bytes=2**20,
        crowded=lambda: True,
    )
    asked = NodeRequests(lab.asks, Fetcher(lab.tiers, lab.tiers, lambda _: lab.store, 8), OtherParts(home, Part(0, 2)))
    large = of_part(1, BLOCK_BYTES)
    with listen_as_part(home, 1) as listener:
        server.listen(listener)

        def wait() -> None:
            until(lambda: server._connections)
            until(lambda: not server._connections)  # as it had others waiting for its room

        lab.store.wait = wait
        answers = asked.blocks(BlocksRequest([(of_part(0), 0), (large, 0)], "d", "", Mode.OWNER))
        came = [answer for answer in answers if answer.kind != Kind.WAIT]
        server.close()
    assert [(answer.kind, len(answer.body)) for answer in came] == [(Kind.OK, 10), (Kind.OK, BLOCK_BYTES)]


@promise("An owner whose store does not answer is not blamed for it")
def test_a_read_ends_soon_after_the_owner_gave_up_a_store_that_never_answers(
    monkeypatch: pytest.MonkeyPatch, home: Path, record_property: Callable[[str, object], None]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    settings = replace(load_settings(), store_timeout_s=0.5)
    weights = {"owner": 1.0, "next": 1e-3, "asks": 1e-9}
    members = tuple(Member(name, f"127.0.0.1:{free_port()}", weight) for name, weight in weights.items())
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(FaultProxy("http://127.0.0.1:1"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        over = threading.Event()
        stack.callback(over.set)
        proxy.always(Fault(wait=over))
        for member in members:
            me, view = Identity("lab", member.id, KEY), StaticMembers(member.id, members)
            peers = Peers(view, me, member.address, "", lambda _: "share", store_timeout_s=0.5)
            stack.callback(peers.close)
            tiers, store = Tiers(), open_store("s3://b", settings)
            fetcher = Fetcher(tiers, tiers, lambda _, store=store: store, 8, peers=peers)
            stack.callback(fetcher.close)
            stack.callback(served_by(peers, fetcher).close)
        import_store_clients()
        begun = time.monotonic()
        reading = fetcher.read(small(0), 0, "d")
        with pytest.raises(StoreUnavailableError, match="s3://b/small/0"):
            reading.data.result(30)
        record_property("time, of the store's", (time.monotonic() - begun) / settings.store_timeout_s)
        # One of the owner, and a short one of the node that asked it, which on a busy machine may not get this far.
        assert 1 <= len(proxy.requests) <= 2
        assert [each["problem"] for each in peers.describe()["members"]] == [""] * 3


def test_a_node_listens_for_nodes_that_vanished_without_a_word(lab: Lab) -> None:
    lab.ask(0)
    [connection] = lab.connections()
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_listed_node_that_listens_at_all_its_addresses_owns_its_blocks_itself(home: Path) -> None:
    listed = ("a=10.0.0.1:7070", "b=10.0.0.2:7070*1e-9")
    options = {"cluster": "lab", "cluster_key": KEY.decode(), "cluster_members": listed, "node": "a"}
    settings = replace(load_settings(), listen="0.0.0.0:7070", **options)
    members = open_members(settings, "holder")
    assert members is not None
    peers = open_peers(settings, members)
    assert peers.ranked_before_this(block_id(object_id(small(0)), 0), "d") == []
