"""Ask other nodes: of what nodes answer, only a whole block with the right checksum is taken, and no wait is long."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from datacache.cluster import peers as peers_module
from datacache.cluster.members import Member, StaticMembers
from datacache.cluster.peers import Peers
from datacache.core.errors import ObjectChangedError
from datacache.core.ids import ObjectRef
from datacache.exchange.auth import Identity, welcome
from datacache.exchange.frames import Frame, FrameSocket, Kind, header
from datacache.exchange.server import FrameServer
from datacache.exchange.wire import BlocksRequest, Mode, checksum_of, encode_error
from tests.promises import promise

KEY = b"0123456789abcdef"
CONTENT = b"some content of an object"
REF = ObjectRef("s3://b", "k", len(CONTENT), "e", "")
Play = Callable[[FrameSocket, Frame], object]


class Nodes:
    """A cluster of nodes that answer as they are told, and `me`, who asks them."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.members = [Member("me", "192.0.2.1:7070", 1.0)]
        self.over = threading.Event()

    def add(self, play: Play, port: int = 0) -> Member:
        """Add a node that does this with each request."""
        name = f"n{len(self.members)}"
        me = Identity("lab", name, KEY)

        def meet(frames: FrameSocket) -> None:
            welcome(frames, me)
            frames.wait(30.0, lambda: None, lambda: None)
            while True:
                play(frames, frames.receive(most_bytes=2**20))

        server = FrameServer(lambda frame: iter(()), most_bytes=2**20, welcome=meet)  # type: ignore[arg-type, return-value]
        listener = socket.create_server(("127.0.0.1", port))
        server.listen(listener)
        self._stack.callback(server.close)
        self.members.append(Member(name, f"127.0.0.1:{listener.getsockname()[1]}", 1.0))
        return self.members[-1]

    def peers(self) -> Peers:
        """Return the nodes as `me` knows them."""
        members = StaticMembers("me", tuple(self.members))
        peers = Peers(members, Identity("lab", "me", KEY), self.members[0].address, "", lambda dataset: "share")
        self._stack.callback(peers.close)
        return peers


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        made = Nodes(stack)
        yield made
        made.over.set()


def honest(frames: FrameSocket, request: Frame) -> None:
    frames.send(Kind.OK, request.number, checksum_of(CONTENT), CONTENT)


def answering(kind: Kind, head: bytes = b"", body: bytes = b"") -> Play:
    return lambda frames, request: frames.send(kind, request.number, head, body)


def get(peers: Peers, *members: Member) -> bytes | None:
    found = peers.get(list(members), REF, 0, "d")
    return None if found is None else bytes(found)


FLIPPED = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
WRONG = {
    "a flipped bit": answering(Kind.OK, checksum_of(CONTENT), FLIPPED),
    "a wrong sum": answering(Kind.OK, bytes(8), CONTENT),
    "no sum": answering(Kind.OK, b"", CONTENT),
    "fewer bytes": answering(Kind.OK, checksum_of(CONTENT[:-1]), CONTENT[:-1]),
    "more bytes": answering(Kind.OK, checksum_of(CONTENT * 2), CONTENT * 2),
    "no bytes": answering(Kind.OK, checksum_of(b""), b""),
    "a number of another request": lambda frames, request: frames.send(
        Kind.OK, request.number + 1, checksum_of(CONTENT), CONTENT
    ),
    "a huge frame": lambda frames, request: frames.send_parts([header(Kind.OK, request.number, 8, 2**32 - 1)]),
    "no frame": lambda frames, request: frames.send_parts([b"HTTP/1.1 200 OK\r\n\r\n"]),
    "nothing more": lambda frames, request: frames.connection.shutdown(socket.SHUT_RDWR),
}


@promise("A node that answers wrongly, late or not at all is passed over")
@pytest.mark.parametrize("lie", WRONG.values(), ids=list(WRONG))
def test_a_wrong_answer_is_never_taken_and_the_next_node_is_asked(nodes: Nodes, lie: Play) -> None:
    asked: list[int] = []

    def count_and_lie(frames: FrameSocket, request: Frame) -> None:
        asked.append(request.number)
        lie(frames, request)

    liar, good = nodes.add(count_and_lie), nodes.add(honest)
    peers = nodes.peers()
    assert get(peers, liar, good) == CONTENT
    assert vars(peers.stats) == {"blocks": 1, "bytes": len(CONTENT), "missed": 1}
    shown = {each["node"]: each["problem"] for each in peers.describe()["members"]}
    assert shown["n1"]
    assert not shown["n2"]
    assert get(peers, liar) is None  # not asked again at once
    assert len(asked) == 1


REFUSED = {
    "busy": answering(Kind.BUSY),
    "absent": answering(Kind.ABSENT),
    "an error": answering(Kind.ERROR, body=encode_error(ObjectChangedError("changed", url="s3://b/k"))),
    "no known error": answering(Kind.ERROR, body=b'{"error": "Exit", "message": 7}'),
    "an error with foreign fields": answering(
        Kind.ERROR, body=json.dumps({"error": "SettingsError", "url": "x", "checksum": "y"}).encode()
    ),
    "no JSON": answering(Kind.ERROR, body=b"[" * 100_000),
}


@promise("A node that answers wrongly, late or not at all is passed over")
@pytest.mark.parametrize("answer", REFUSED.values(), ids=list(REFUSED))
def test_a_node_that_gives_no_block_now_is_passed_over_and_asked_the_next_time(nodes: Nodes, answer: Play) -> None:
    answers = iter([answer, honest])
    fickle, good = nodes.add(lambda frames, request: next(answers)(frames, request)), nodes.add(honest)
    peers = nodes.peers()
    assert get(peers, fickle, good) == CONTENT
    assert vars(peers.stats) == {"blocks": 1, "bytes": len(CONTENT), "missed": 1}
    assert get(peers, fickle) == CONTENT


@promise("A node that answers wrongly, late or not at all is passed over")
@pytest.mark.parametrize("how", ["says nothing", "sends an error that never ends"])
def test_a_node_that_never_comes_to_an_end_is_given_up(nodes: Nodes, how: str) -> None:
    def go_on(frames: FrameSocket, request: Frame) -> None:
        if how != "says nothing":
            frames.send_parts([header(Kind.ERROR, request.number, 0, 2**27)])
        while not nodes.over.wait(0.005):
            if how != "says nothing":
                frames.send_parts([b"x"])

    endless, good = nodes.add(go_on), nodes.add(honest)
    assert get(nodes.peers(), endless, good) == CONTENT


def test_one_late_answer_has_the_node_asked_again_over_a_new_connection(nodes: Nodes) -> None:
    connections: list[FrameSocket] = []
    number = iter(range(10))

    def late_once(frames: FrameSocket, request: Frame) -> None:
        connections.append(frames)
        if next(number) == 1:
            nodes.over.wait(30)
        else:
            honest(frames, request)

    member = nodes.add(late_once)
    peers = nodes.peers()
    assert [get(peers, member) for _ in range(4)] == [CONTENT, None, CONTENT, CONTENT]
    assert connections[0] is connections[1]
    assert connections[1] is not connections[2]
    assert connections[2] is connections[3]


@promise("A node that answers wrongly, late or not at all is passed over")
def test_a_node_that_is_gone_is_passed_over_and_asked_again_later(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gone, good = Member("n2", f"127.0.0.1:{port}", 1.0), nodes.add(honest)
    peers = nodes.peers()
    monkeypatch.setattr(peers_module, "_FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(peers_module, "_LONGEST_PAUSE_S", 60.0)
    assert get(peers, gone, good) == CONTENT
    assert nodes.add(honest, port) == gone
    assert get(peers, gone) is None
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 60.0)
    assert get(peers, gone) == CONTENT


def test_no_node_is_asked_for_a_data_set_that_stays_off_the_cluster(nodes: Nodes) -> None:
    nodes.add(honest)
    members = StaticMembers("me", tuple(nodes.members))
    peers = Peers(members, Identity("lab", "me", KEY), nodes.members[0].address, "", lambda dataset: "off")
    assert peers.ranked_before_this(b"x" * 20, "d") == []
    assert peers.get_earlier(b"x" * 20, REF, 0, "d") is None
    assert peers.stats.missed == 0


def test_a_request_to_a_node_says_which_block_of_which_data_set_and_how(nodes: Nodes) -> None:
    requests: list[Any] = []

    def note(frames: FrameSocket, request: Frame) -> None:
        requests.append(BlocksRequest.decode(request.body))
        honest(frames, request)

    member = nodes.add(note)
    peers = nodes.peers()
    assert get(peers, member) == CONTENT
    found = peers.get_earlier(b"x" * 20, REF, 0, "d")
    assert found is None or bytes(found) == CONTENT
    assert requests[0] == BlocksRequest([(REF, 0)], "d", "", Mode.OWNER)
    assert all(request.mode is Mode.HAVE for request in requests[1:])
