"""The door of a cluster: it lets in nodes that have the key, and nobody who only hears, repeats or holds the line."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datacache.cluster.members import Member, StaticMembers
from datacache.cluster.peers import Peers
from datacache.core.errors import DaemonError, UsageError
from datacache.core.ids import ObjectRef
from datacache.daemon.nodes import NodeRequests, listen_to_nodes, serve_nodes
from datacache.daemon.parts import OtherParts
from datacache.exchange import server as server_module
from datacache.exchange.auth import HELLO, PROOF, Identity, PeerRefusedError, introduce, welcome
from datacache.exchange.client import Connection
from datacache.exchange.frames import HEADER, MAGIC, VERSION, Frame, FrameError, FrameSocket, Kind, header
from datacache.exchange.wire import BlocksRequest, Mode, decode_error
from datacache.tiers.parts import Part
from tests.promises import promise

A = Identity("lab", "a", b"0123456789abcdef")
B = Identity("lab", "b", b"0123456789abcdef")
STRANGER = Identity("lab", "a", b"0123456789abcdeF")
REF = ObjectRef("s3://b", "k", 7, "e", "")


class Cache:
    """The daemon's fetcher: has every block, and counts what it is asked for."""

    def __init__(self) -> None:
        self.local, self.asked = self, 0

    def view(self, id: bytes, start: int, stop: int | None) -> bytes:
        self.asked += 1
        return b"content"


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def address(cache: Cache) -> Iterator[tuple[str, int]]:
    """Where the node `b` listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mine = f"127.0.0.1:{port}"
    peers = Peers(StaticMembers("b", (Member("b", mine, 1.0),)), B, mine, "", lambda dataset: "share")
    server = serve_nodes(NodeRequests(peers, cache, OtherParts(Path(), Part())), listen_to_nodes(mine))  # type: ignore[arg-type]
    yield "127.0.0.1", port
    server.close()


def over(connection: socket.socket) -> FrameSocket:
    """Return frames on a connection; a test that waits for half a minute has failed."""

    def enough() -> None:
        raise TimeoutError("nothing comes")

    return FrameSocket(connection, look_every_s=30.0, receiving=enough, sending=enough)


@pytest.fixture
def raw(address: tuple[str, int]) -> Iterator[socket.socket]:
    with contextlib.closing(socket.create_connection(address, timeout=30)) as connection:
        yield connection


def ask(connection: socket.socket, me: Identity, *, wanted: str = "b") -> list[Any]:
    """Introduce a node and ask for a block."""
    client = Connection(connection, look=lambda: None, look_every_s=30.0)
    introduce(client.frames, me, wanted)
    return list(client.blocks(BlocksRequest([(REF, 0)], "d", "", Mode.HAVE)))


def played(play: Callable[[FrameSocket], object]) -> contextlib.AbstractContextManager[socket.socket]:
    """Return a connection whose other side does what `play` says."""
    ours, theirs = socket.socketpair()

    def run() -> None:
        with contextlib.suppress(OSError, PeerRefusedError), contextlib.closing(over(theirs)) as frames:
            play(frames)

    @contextlib.contextmanager
    def playing() -> Iterator[socket.socket]:
        thread = threading.Thread(target=run)
        thread.start()
        with ours:
            yield ours
        thread.join()

    return playing()


def refusal(frames: FrameSocket) -> str:
    """Return with what words a server ends the talk."""
    error = frames.receive(most_bytes=4096)
    assert error.kind == Kind.ERROR
    with pytest.raises(ConnectionError):
        frames.receive(most_bytes=4096)
    return str(decode_error(error.body))


def hello(**changed: object) -> bytes:
    fields = {"cluster": "lab", "node": "a", "nonce": "0" * 64, "versions": [VERSION, VERSION]} | changed
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def test_nodes_with_the_key_are_let_in_and_know_each_other(address: tuple[str, int], raw: socket.socket) -> None:
    assert [bytes(block) for block in ask(raw, A)] == [b"content"]
    names: list[str] = []
    with played(lambda frames: names.append(welcome(frames, B))) as connection:
        introduce(over(connection), A, "b")
    assert names == ["a"]


@promise("Without the cluster's key one gets nothing from a node, and gives it nothing")
@pytest.mark.parametrize("me", [STRANGER, replace(STRANGER, key=b""), replace(A, cluster="other")])
def test_a_caller_without_the_key_or_of_another_cluster_is_refused(
    address: tuple[str, int], raw: socket.socket, cache: Cache, me: Identity
) -> None:
    with pytest.raises(PeerRefusedError):
        ask(raw, me)
    frames = over(socket.create_connection(address))
    introduction = hello(cluster=me.cluster)
    frames.send(Kind.CALL, 0, HELLO, introduction)
    if me.cluster == "lab":  # a caller that does not care whether the server has the key
        assert frames.receive(most_bytes=4096).kind == Kind.OK
        frames.send(Kind.CALL, 0, PROOF, b"\0" * 32)
    assert refusal(frames) == (
        "the keys of the two nodes differ" if me.cluster == "lab" else "the clusters' names differ"
    )
    frames.close()
    assert cache.asked == 0


@promise("Without the cluster's key one gets nothing from a node, and gives it nothing")
def test_a_server_without_the_key_is_hung_up_on_before_it_is_asked_for_anything() -> None:
    heard: list[Frame] = []

    def pretend(frames: FrameSocket) -> None:
        heard.append(frames.receive(most_bytes=4096))
        frames.send(Kind.OK, 0, body=hello(node="b", version=VERSION) + b"\0" * 32)
        heard.append(frames.receive(most_bytes=4096))

    with played(pretend) as connection, pytest.raises(PeerRefusedError, match="keys of the two nodes differ"):
        ask(connection, A)
    assert [frame.head for frame in heard] == [HELLO]
    theirs = replace(B, key=STRANGER.key)
    with played(lambda frames: welcome(frames, theirs)) as connection, pytest.raises(PeerRefusedError):
        ask(connection, A)


class Recorded(socket.socket):
    """A connection that notes what goes over it."""

    def note(self) -> Recorded:
        self.sent, self.received = bytearray(), bytearray()
        return self

    def sendmsg(self, parts: Any, *more: Any) -> int:  # type: ignore[override]
        count = super().sendmsg(parts, *more)
        self.sent += b"".join(map(bytes, parts))[:count]
        return count

    def recvmsg_into(self, buffers: Any, *more: Any) -> Any:  # type: ignore[override]
        answer = super().recvmsg_into(buffers, *more)
        self.received += b"".join(map(bytes, buffers))[: answer[0]]
        return answer


@promise("Without the cluster's key one gets nothing from a node, and gives it nothing")
def test_a_recorded_handshake_opens_nothing_in_either_role(
    address: tuple[str, int], raw: socket.socket, cache: Cache
) -> None:
    with Recorded(fileno=socket.create_connection(address).detach()).note() as recorded:
        introduce(over(recorded), A, "b")
    raw.sendall(recorded.sent)
    frames = over(raw)
    assert frames.receive(most_bytes=4096).kind == Kind.OK
    assert refusal(frames) == "the keys of the two nodes differ"
    assert cache.asked == 0

    def play_back(frames: FrameSocket) -> None:
        frames.receive(most_bytes=4096)
        frames.send_parts([recorded.received])

    with played(play_back) as connection, pytest.raises(PeerRefusedError):
        ask(connection, A)


@promise("Without the cluster's key one gets nothing from a node, and gives it nothing")
def test_a_proof_is_worth_nothing_in_the_hands_of_who_asked_for_it(
    address: tuple[str, int], raw: socket.socket, cache: Cache
) -> None:
    frames = over(raw)
    frames.send(Kind.CALL, 0, HELLO, hello())
    frames.send(Kind.CALL, 0, PROOF, frames.receive(most_bytes=4096).body[-32:])
    assert refusal(frames) == "the keys of the two nodes differ"
    assert cache.asked == 0


@promise("Without the cluster's key one gets nothing from a node, and gives it nothing")
def test_who_has_a_nodes_former_address_cannot_pass_an_introduction_on_to_another_node(
    address: tuple[str, int],
) -> None:
    """Addresses are given to others when a node is gone. The proof of `b` says that it is of `b`."""
    passed: list[Frame] = []

    def relay(frames: FrameSocket) -> None:
        with contextlib.closing(over(socket.create_connection(address))) as other:
            introduction = frames.receive(most_bytes=4096)
            other.send(Kind.CALL, 0, introduction.head, introduction.body)
            frames.send(Kind.OK, 0, body=other.receive(most_bytes=4096).body)
            passed.append(frames.receive(most_bytes=4096))

    with played(relay) as connection, pytest.raises(PeerRefusedError, match="'b'"):
        ask(connection, A, wanted="c")
    assert passed == []


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ([VERSION + 1, VERSION + 2], "no version of the exchange in common"),
        ([0, VERSION - 1], "no version of the exchange in common"),
        (None, "no version of the exchange in common"),
        ([VERSION], "no introduction"),
        ([VERSION, "2"], "no introduction"),
        (7, "no introduction"),
    ],
)
def test_a_caller_of_other_versions_hears_which_one_is_spoken(raw: socket.socket, versions: object, words: str) -> None:
    frames = over(raw)
    frames.send(Kind.CALL, 0, HELLO, hello(versions=versions))
    assert words in refusal(frames)


@promise("Nodes speak the newest version of the exchange that both know")
@pytest.mark.parametrize(
    ("theirs", "mine", "spoken"), [((1, 3), (1, 1), 1), ((1, 1), (1, 3), 1), ((1, 3), (2, 4), 3), ((1, 1), (2, 3), 0)]
)
def test_nodes_agree_on_the_newest_version_that_both_speak(
    theirs: tuple[int, int], mine: tuple[int, int], spoken: int
) -> None:
    ends = [over(end) for end in socket.socketpair()]
    with ThreadPoolExecutor() as pool, contextlib.closing(ends[0]), contextlib.closing(ends[1]):
        let_in = pool.submit(welcome, ends[1], replace(B, versions=mine))
        if not spoken:
            with pytest.raises(PeerRefusedError, match="in common: 1 to 1, and 2 to 3"):
                introduce(ends[0], replace(A, versions=theirs), "b")
            assert isinstance(let_in.exception(), PeerRefusedError)
            return
        introduce(ends[0], replace(A, versions=theirs), "b")
        assert let_in.result() == "a"
        ends[0].send(Kind.CALL, 7, b"more")
        assert ends[1].receive(most_bytes=100).head == b"more"
        ends[0].connection.sendall(header(Kind.CALL, 7, 0, 0, spoken + 1))
        with pytest.raises(FrameError, match=f"speaks version {spoken + 1}"):
            ends[1].receive(most_bytes=100)


@promise("What is no introduction of a node is hung up on, and keeps no other node out")
@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
        HEADER.pack(MAGIC, VERSION + 1, Kind.CALL, 1, 0, 0),
        header(Kind.CALL, 0, 5, 4097) + HELLO,
        header(Kind.CALL, 0, 5, 2**32 - 1) + HELLO,
        header(Kind.CALL, 0, 5, 2) + HELLO + b"[]",
        header(Kind.CALL, 0, 5, 4096) + HELLO + b"[" * 4096,
        header(Kind.CALL, 0, 5, len(hello(nonce="short"))) + HELLO + hello(nonce="short"),
        header(Kind.CALL, 0, 5, len(hello(node=7))) + HELLO + hello(node=7),
        header(Kind.CALL, 0, 5, 32) + PROOF + b"\0" * 32,
        header(Kind.BLOCKS, 0, 0, 2) + b"[]",
    ],
    ids=["http", "version", "long", "huge", "list", "nested", "nonce", "node", "proof first", "blocks"],
)
def test_what_is_no_introduction_is_hung_up_on_and_others_are_let_in(
    address: tuple[str, int], raw: socket.socket, cache: Cache, sent: bytes
) -> None:
    raw.sendall(sent)
    with contextlib.suppress(ConnectionResetError):
        while raw.recv(4096):
            pass
    with socket.create_connection(address) as other:
        assert [bytes(block) for block in ask(other, A)] == [b"content"]
    assert cache.asked == 1


@promise("What is no introduction of a node is hung up on, and keeps no other node out")
@pytest.mark.parametrize("sent", [b"", header(Kind.CALL, 0, 5, 200)[:7], header(Kind.CALL, 0, 5, 200) + HELLO + b"{"])
def test_a_caller_that_says_nothing_or_half_of_it_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, address: tuple[str, int], sent: bytes
) -> None:
    monkeypatch.setattr(server_module, "_INTRODUCTION_S", 0.05)
    with socket.create_connection(address, timeout=30) as silent:
        silent.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""


@promise("What is no introduction of a node is hung up on, and keeps no other node out")
def test_many_strangers_keep_no_node_out(monkeypatch: pytest.MonkeyPatch, address: tuple[str, int]) -> None:
    monkeypatch.setattr(server_module, "_INTRODUCTION_S", 600.0)
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(contextlib.closing(socket.create_connection(address, timeout=30)))
            for _ in range(2 * server_module._MOST_STRANGERS)
        ]
        with socket.create_connection(address) as node:
            assert [bytes(block) for block in ask(node, A)] == [b"content"]
        with contextlib.suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b""


@promise("What is no introduction of a node is hung up on, and keeps no other node out")
def test_an_introduction_has_one_end_however_often_a_byte_of_it_comes(
    monkeypatch: pytest.MonkeyPatch, address: tuple[str, int]
) -> None:
    monkeypatch.setattr(server_module, "_INTRODUCTION_S", 0.6)

    def drip(connection: socket.socket) -> None:
        for byte in header(Kind.CALL, 0, 5, 200) + HELLO:
            connection.sendall(bytes([byte]))
            threading.Event().wait(0.3)  # what a slow loris does: each byte comes in time, and all of them never

    with socket.create_connection(address, timeout=30) as slow, pytest.raises(OSError, match=r"reset|pipe"):
        drip(slow)


@promise("What is no introduction of a node is hung up on, and keeps no other node out")
def test_a_flood_from_other_addresses_ends_no_introduction(
    monkeypatch: pytest.MonkeyPatch, address: tuple[str, int]
) -> None:
    """Strangers that come while a node introduces itself end the oldest stranger: of theirs, not the node."""
    monkeypatch.setattr(server_module, "_INTRODUCTION_S", 600.0)
    with contextlib.ExitStack() as stack:

        def flood(host: str) -> None:
            for _ in range(server_module._MOST_STRANGERS):
                connection = socket.create_connection(address, timeout=30, source_address=(host, 0))
                stack.enter_context(contextlib.closing(connection))

        frames = over(stack.enter_context(contextlib.closing(socket.create_connection(address))))
        frames.send(Kind.CALL, 0, HELLO, hello())
        assert frames.receive(most_bytes=4096).kind == Kind.OK
        for host in ("127.0.0.2", "127.0.0.3"):
            flood(host)
        with socket.create_connection(address) as other:  # the server has seen all of them
            assert [bytes(block) for block in ask(other, A)] == [b"content"]
        frames.send(Kind.CALL, 0, PROOF, b"\0" * 32)
        assert refusal(frames) == "the keys of the two nodes differ"


@promise("A node answers other nodes questions for blocks, and nothing else but what draining takes")
def test_a_node_that_was_let_in_may_ask_for_blocks_as_a_node_only(raw: socket.socket, cache: Cache) -> None:
    client = Connection(raw, look=lambda: None, look_every_s=30.0)
    introduce(client.frames, A, "b")
    for op in ("stop", "health", "evict", "warm", ""):
        with pytest.raises(UsageError, match="blocks only"):
            client.call(op, b"")
    for mode in (Mode.READ, Mode.BROKEN):
        with pytest.raises(UsageError, match="not ask as a reader"):
            list(client.blocks(BlocksRequest([(REF, 0)], "d", "", mode)))
    assert cache.asked == 0
    assert [bytes(block) for block in client.blocks(BlocksRequest([(REF, 0)], "d", "", Mode.OWNER))] == [b"content"]
    client.ask("drain")
    with pytest.raises(DaemonError, match="drains, and takes nothing over"):
        client.call("lacks", b"")
