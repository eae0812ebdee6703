"""Ask other nodes: of what nodes answer, only a whole block with the right checksum is taken, and no wait is long."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from datacache.cluster import peer as peer_module
from datacache.cluster import peers as peers_module
from datacache.cluster.members import DRAINED, DRAINING, JOINING, SERVING, Member, StaticMembers
from datacache.cluster.peer import Question, SilenceBudget, SilentError
from datacache.cluster.peers import Peers
from datacache.cluster.placement import Placement
from datacache.core.errors import DaemonError, StoreAccessError, StoreUnavailableError, UsageError
from datacache.core.ids import BlockId, ObjectRef
from datacache.exchange.auth import Identity, welcome
from datacache.exchange.frames import LEAST_BYTES, Frame, FrameSocket, Kind, header
from datacache.exchange.server import FrameServer
from datacache.exchange.wire import BlocksRequest, Mode, checksum_of, encode_error
from tests.daemon.test_fetcher import until
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

    def peers(self, *, store_timeout_s: float = 30.0) -> Peers:
        """Return the nodes as `me` knows them."""
        members, me = StaticMembers("me", tuple(self.members)), Identity("lab", "me", KEY)
        address, share = self.members[0].address, lambda dataset: "share"
        peers = Peers(members, me, address, "", share, store_timeout_s=store_timeout_s)
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


REFUSING = answering(Kind.REFUSED, body=encode_error(UsageError("bad request: a later version asks so")))


def get(peers: Peers, *members: Member) -> bytes | None:
    found = peers.get(list(members), REF, 0, "d")
    assert not isinstance(found, StoreUnavailableError)
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
    assert get(peers, liar) is None  # once may be chance
    assert get(peers, liar) is None  # not asked again at once
    assert len(asked) == 2


REFUSED = {
    "busy": answering(Kind.BUSY),
    "no to the whole request": REFUSING,
    "absent": answering(Kind.ABSENT),
    "an error": answering(Kind.ERROR, body=encode_error(DaemonError("the cache daemon is stopping"))),
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


def test_a_node_that_refuses_requests_answers_and_is_asked_for_other_blocks(nodes: Nodes) -> None:
    answers = iter([*[REFUSING] * 3, honest])
    member = nodes.add(lambda frames, request: next(answers)(frames, request))
    peers = nodes.peers()
    assert [get(peers, member) for _ in range(4)] == [None, None, None, CONTENT]
    assert peers.describe()["members"][1]["problem"] == ""


def test_a_refusal_is_the_answer_to_each_block_that_is_left(nodes: Nodes) -> None:
    refs = [REF._replace(key=str(number)) for number in range(5)]

    def refuse_the_rest(frames: FrameSocket, request: Frame) -> None:
        honest(frames, request)
        frames.send(Kind.WAIT, request.number, (1).to_bytes(2, "big"))
        REFUSING(frames, request)

    with contextlib.closing(nodes.peers().connect(nodes.add(refuse_the_rest))) as connection:
        answers = list(connection.answers(BlocksRequest([(ref, 0) for ref in refs], "d", "", Mode.OWNER)))
    assert [at for at, _ in answers] == [0, 1, 2, 3, 4, 1, 2]
    assert [came for _, came in answers[1:3]] == [Kind.WAIT] * 2
    assert all(isinstance(came, UsageError) for _, came in answers[3:])


def test_the_store_refuses_an_owner_once_and_no_other_node_asks_it_for_this_one(nodes: Nodes) -> None:
    refused = encode_error(StoreAccessError("it is closed", url="s3://b/k"))
    owner, good = nodes.add(answering(Kind.ERROR, body=refused)), nodes.add(honest)
    assert get(nodes.peers(), owner, good) is None


@promise("An owner whose store does not answer is not blamed for it")
def test_an_owner_whose_store_is_away_says_so_and_no_other_node_asks_it_for_this_one(nodes: Nodes) -> None:
    away = encode_error(StoreUnavailableError("it is away", url="s3://b/k"))
    owner, good = nodes.add(answering(Kind.ERROR, body=away)), nodes.add(honest)
    peers = nodes.peers()
    for _ in range(3):
        assert isinstance(peers.get([owner, good], REF, 0, "d"), StoreUnavailableError)
    assert peers.describe()["members"][1]["problem"] == ""


@promise("An owner whose store is slow is waited for as long as it shows signs of life")
def test_a_node_that_gets_a_block_is_waited_for_while_it_shows_signs_of_life(nodes: Nodes) -> None:
    def slow(frames: FrameSocket, request: Frame) -> None:
        for _ in range(15):  # for longer than a node may be silent
            frames.send(Kind.WAIT, request.number)
            nodes.over.wait(0.1)
        honest(frames, request)

    owner, other = nodes.add(slow), nodes.add(honest)
    peers = nodes.peers()
    assert get(peers, owner, other) == CONTENT
    assert vars(peers.stats) == {"blocks": 1, "bytes": len(CONTENT), "missed": 0}


@promise("A node that answers wrongly, late or not at all is passed over")
def test_a_node_that_falls_silent_while_it_gets_a_block_is_given_up(nodes: Nodes) -> None:
    def die(frames: FrameSocket, request: Frame) -> None:
        frames.send(Kind.WAIT, request.number)
        nodes.over.wait(30)

    dying, good = nodes.add(die), nodes.add(honest)
    peers = nodes.peers()
    assert get(peers, dying, good) == CONTENT
    assert peers.stats.missed == 1


@promise("Nodes that are silent cost a read about a second in all")
def test_a_read_loses_a_second_to_silent_nodes_however_many_there_are(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, peers = [nodes.add(honest) for _ in range(5)], nodes.peers()
    now_s, asked = [0.0], []

    def stay_silent(_: object, question: Question) -> None:
        asked.append(question.silence_s)
        now_s[0] += question.silence_s
        raise SilentError

    monkeypatch.setattr(peer_module.OtherNode, "ask", stay_silent)
    monkeypatch.setattr(peers_module.time, "monotonic", lambda: now_s[0])
    patience = SilenceBudget()
    assert peers.get(members, REF, 0, "d", patience) is None
    assert peers.get_earlier(b"x" * 20, REF, 0, "d", patience) is None
    assert len(asked) > 1
    assert now_s[0] == sum(asked) == peer_module.MOST_S
    assert peers.get(members[:1], REF, 0, "d") is None
    assert asked[-1] == peer_module.MOST_S  # nobody else is left to ask


@promise("An owner whose store is slow is waited for as long as it shows signs of life")
@pytest.mark.parametrize("how", ["slow", "dripping"])
def test_bytes_are_a_sign_of_life_unless_they_drip(nodes: Nodes, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "MOST_S", 0.4)
    large, piece = bytes(16 * LEAST_BYTES), 2 * LEAST_BYTES if how == "slow" else 10
    ref = REF._replace(size_bytes=len(large))

    def send_slowly(frames: FrameSocket, request: Frame) -> None:
        frames.send_parts([header(Kind.OK, request.number, 8, len(large)), checksum_of(large)])
        for at in range(0, len(large), piece):  # takes twice as long as a node may be silent
            nodes.over.wait(0.1)
            frames.send_parts([large[at : at + piece]])

    came = nodes.peers().get([nodes.add(send_slowly)], ref, 0, "d")
    assert came == (large if how == "slow" else None)


@promise("An owner whose store does not answer is not blamed for it")
def test_an_owner_that_gets_a_block_for_ever_is_given_up_and_not_blamed(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_MORE_S", 0.0)
    whole_frames = REF._replace(size_bytes=24)  # so that there is never a piece of one, for whose rest one waits

    def never(frames: FrameSocket, request: Frame) -> None:
        for _ in range(600):  # seconds of it
            nodes.over.wait(0.05)
            frames.send(Kind.WAIT, request.number)
        frames.send(Kind.OK, request.number, checksum_of(bytes(24)), bytes(24))

    owner, other = nodes.add(never), nodes.add(honest)
    peers = nodes.peers(store_timeout_s=0.2)
    for _ in range(2):
        assert isinstance(peers.get([owner, other], whole_frames, 0, "d"), StoreUnavailableError)
    assert peers.describe()["members"][1]["problem"] == ""


@promise("A node that answers wrongly, late or not at all is passed over")
def test_a_node_that_sends_signs_of_life_without_a_pause_is_passed_over(nodes: Nodes) -> None:
    def hurry(frames: FrameSocket, request: Frame) -> None:
        with contextlib.suppress(OSError):  # the other side has hung up
            while not nodes.over.is_set():
                frames.send_parts([header(Kind.WAIT, request.number, 0, 0) * 1000])
        raise ConnectionResetError

    hasty, good = nodes.add(hurry), nodes.add(honest)
    peers = nodes.peers()
    assert get(peers, hasty, good) == CONTENT
    assert "without a pause" in peers.describe()["members"][1]["problem"]


def test_questions_that_wait_for_the_first_word_of_a_node_go_together(nodes: Nodes) -> None:
    requests: list[int] = []
    go_on = threading.Event()

    def note(frames: FrameSocket, request: Frame) -> None:
        blocks = BlocksRequest.decode(request.body).blocks
        requests.append(len(blocks))
        assert go_on.wait(30)
        frames.send(Kind.WAIT, request.number, (len(blocks) - 1).to_bytes(2, "big"))
        for _ in blocks:
            honest(frames, request)

    member = nodes.add(note)
    peers = nodes.peers()
    peer = peers._peer(member)
    peer.limit_s = 30.0
    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(get, peers, member) for _ in range(10)]
        until(lambda: len(peer._waiting) == 8)
        go_on.set()
        assert [each.result() for each in asked] == [CONTENT] * 10
    assert requests[:2] == [1, 1]
    assert sum(requests) == 10
    assert len(requests) <= 4  # each word lets one out, which takes along all that wait


def test_one_thread_at_a_time_looks_whether_a_node_is_back(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "_PAUSES_S", (0.0, 0.0))
    requests: list[int] = []
    go_on = threading.Event()

    def fail_twice(frames: FrameSocket, request: Frame) -> None:
        requests.append(request.number)
        if len(requests) < 3:
            frames.connection.shutdown(socket.SHUT_RDWR)
        assert go_on.wait(30)
        honest(frames, request)

    member = nodes.add(fail_twice)
    peers = nodes.peers()
    peers._peer(member).limit_s = 30.0
    assert [get(peers, member) for _ in range(2)] == [None, None]
    with ThreadPoolExecutor(1) as pool:
        probe = pool.submit(get, peers, member)
        until(lambda: len(requests) == 3)
        assert [get(peers, member) for _ in range(5)] == [None] * 5  # while one looks
        go_on.set()
        assert probe.result() == CONTENT
    assert get(peers, member) == CONTENT
    assert len(requests) == 4


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


def test_a_node_that_has_another_name_at_an_address_is_asked_by_that_name(nodes: Nodes) -> None:
    member = nodes.add(honest)
    peers = nodes.peers()
    before = replace(member, id="before")
    peers.members.view = peers.members.view.replaced([nodes.members[0], before])  # type: ignore[misc]
    assert get(peers, before) is None
    peers.members.view = peers.members.view.replaced([nodes.members[0], member])  # type: ignore[misc]
    assert get(peers, member) == CONTENT


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
    monkeypatch.setattr(peer_module, "_PAUSES_S", (60.0, 60.0))
    assert [get(peers, gone, good) for _ in range(2)] == [CONTENT] * 2
    assert nodes.add(honest, port) == gone
    assert get(peers, gone) is None
    monkeypatch.setattr(peers._peer(gone)._breaker, "_clock", lambda: time.monotonic() + 60.0)
    assert get(peers, gone) == CONTENT


@promise("Nodes that are silent cost a read about a second in all")
def test_a_name_server_that_says_nothing_keeps_no_read_waiting(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up, names = socket.getaddrinfo, []

    def wait(host: str, *rest: Any, flags: int = 0, **more: Any) -> Any:
        if host == "n1.example" and not flags:
            names.append(host)
            nodes.over.wait(30)
            raise AssertionError("the read has waited for it")
        return look_up(host, *rest, flags=flags, **more)

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    monkeypatch.setattr(peer_module, "_CONNECT_S", 0.1)
    named, good = Member("n1", "n1.example:7070", 1.0), nodes.add(honest)
    peers = nodes.peers()
    assert [get(peers, named, good) for _ in range(2)] == [CONTENT] * 2
    assert names == ["n1.example"]  # by one thread, which waits on
    assert "n1.example" in peers._peer(named).problem


def test_a_node_is_found_by_its_name_once_a_thread_can_be_started(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "resolve":
            raise RuntimeError("can't start new thread")
        begin(thread)

    member, good = nodes.add(honest), nodes.add(honest)
    named, peers = replace(member, address=member.address.replace("127.0.0.1", "localhost")), nodes.peers()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert get(peers, named, good) == CONTENT
    assert get(peers, named) == CONTENT


def test_what_was_seen_of_a_node_grows_older_with_the_view(nodes: Nodes) -> None:
    peers = nodes.peers()
    view = peers.members.view
    peers.members.view = replace(view, read_at=view.read_at - 100)  # type: ignore[misc]
    assert peers.describe()["members"][0]["seen_s"] >= 100


def test_a_node_that_came_back_is_asked_at_once(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "_PAUSES_S", (60.0, 60.0))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gone = Member("n1", f"127.0.0.1:{port}", 1.0)
    peers = nodes.peers()
    assert [get(peers, gone) for _ in range(2)] == [None] * 2
    assert nodes.add(honest, port) == gone
    assert get(peers, gone) is None
    assert get(peers, replace(gone, since_ms=1)) == CONTENT


def test_a_node_that_had_this_ones_address_before_takes_no_block_from_it(nodes: Nodes) -> None:
    me, good = nodes.members[0], nodes.add(honest)
    nodes.members.append(Member("before", me.address, 1e9, "west", DRAINING))
    peers, ids = nodes.peers(), [BlockId(bytes([number]) * 20) for number in range(9)]
    assert not peers.leaves
    peers.members.set_state(DRAINED)
    assert peers.leaves
    peers.members.set_state(SERVING)
    peers.members.view = peers.members.view.replaced(  # type: ignore[misc]
        [me, good, replace(nodes.members[2], state=SERVING)]
    )
    assert {peers.ranked_before_this(id, "d")[-1] for id in ids if peers.ranked_before_this(id, "d")} == {good}
    peers.members.set_state(DRAINING)
    assert not peers.serves


def test_no_other_node_tells_the_state_of_this_one(nodes: Nodes) -> None:
    nodes.add(honest)
    peers = nodes.peers()
    peers.note("n1", DRAINING, 3)
    assert peers.note("me", DRAINING, 3) == {"node": "me", "state": SERVING, "left": 0, "list": ""}
    assert [member.state for member in peers.members.view.members] == [SERVING, DRAINING]


def test_a_node_that_has_drained_and_does_not_tell_this_one_says_so_when_it_is_asked(nodes: Nodes) -> None:
    nodes.add(answering(Kind.OK, body=json.dumps({"node": "n1", "state": DRAINED, "left": 3}).encode()))
    peers = nodes.peers()
    assert peers.drain("n1")["state"] == DRAINED
    assert [(member.state, member.left) for member in peers.members.view.members] == [(SERVING, 0), (DRAINED, 3)]
    assert peers.drain("") == {"node": "me", "state": DRAINING, "left": 0}
    peers.report(DRAINED, 2)
    assert peers.drain("") == {"node": "me", "state": DRAINED, "left": 2}


def test_a_node_that_hangs_keeps_no_other_from_being_told_the_state_of_this_one(nodes: Nodes) -> None:
    told = threading.Event()

    def answer(frames: FrameSocket, request: Frame) -> None:
        frames.send(Kind.OK, request.number, body=b"{}")

    def hang(frames: FrameSocket, request: Frame) -> None:
        if told.wait(30):
            answer(frames, request)

    def be_told(frames: FrameSocket, request: Frame) -> None:
        told.set()
        answer(frames, request)

    nodes.add(answering(Kind.OK, body=b"[]"))
    nodes.add(hang)
    nodes.add(be_told)
    assert nodes.peers().tell() == ["n1"]


def add_lacking(nodes: Nodes, count: int) -> list[str]:
    """Add nodes that have nothing; return a list of those that are asked."""
    asked: list[str] = []

    def add() -> None:
        def lack(frames: FrameSocket, request: Frame) -> None:
            asked.append(name)
            frames.send(Kind.ABSENT, request.number)

        name = nodes.add(lack).id

    for _ in range(count):
        add()
    return asked


@promise("What one node of a cluster has, no other one asks the store for")
def test_an_owner_asks_the_next_in_rank_for_ten_minutes_after_a_node_came_or_went(nodes: Nodes) -> None:
    asked = add_lacking(nodes, 4)
    peers = nodes.peers()
    id = next(id for id in (bytes([number] * 20) for number in range(256)) if not peers.ranked_before_this(id, "d"))
    ranked = [member.id for member in peers._placed().ranked(id, 5)]

    def ask() -> list[str]:
        asked.clear()
        assert peers.get_earlier(id, REF, 0, "d") is None
        return list(asked)

    assert ask() == ranked[1:3]
    peers._changed_at -= 600
    assert ask() == []
    left = [member for member in nodes.members if member.id != ranked[1]]
    peers.members.view = peers.members.view.replaced(left)  # type: ignore[misc]
    assert ask() == ranked[2:4]
    peers._changed_at -= 600
    peers.members.set_state(JOINING)  # others know already that it serves
    assert ask() == ranked[2:4]


def test_the_owner_in_a_zone_asks_those_of_other_zones_that_come_before_it() -> None:
    found = [Member(f"n{at}", f"10.0.0.{at}:1", 1.0, "east" if at < 3 else "west") for at in range(6)]
    ids = [BlockId(bytes([at]) * 20) for at in range(40)]
    crossing = set()
    for me in found:  # the list says where it is
        peers = Peers(
            StaticMembers(me.id, tuple(found)), Identity("lab", me.id, KEY), me.address, "", lambda _: "share"
        )
        for id in ids:
            ranked = [m.id for m in Placement([replace(m, zone="") for m in found]).ranked(id, 6)]
            before = ranked[: ranked.index(me.id)]
            assert [m.id for m in peers.ranked_across(id, "d")] == [
                m.id for name in before for m in found if m.id == name and m.zone != me.zone
            ]
            in_zone = peers.ranked_before_this(id, "d")
            assert {m.zone for m in in_zone} <= {me.zone}
            if not in_zone and before:
                crossing.add((me.id, id))
    assert len(crossing) == len(ids)  # the owner of one of the two zones


def test_an_owner_among_all_zones_that_came_lately_asks_the_next_of_another_zone(nodes: Nodes) -> None:
    asked = add_lacking(nodes, 5)
    zones = ["west"] * 5 + ["east"]
    nodes.members = [replace(member, zone=zone) for member, zone in zip(nodes.members, zones, strict=True)]
    peers, [*_, east] = nodes.peers(), nodes.members

    def ranks(number: int) -> list[str]:
        return [member.id for member in peers._placed().ranked_across(bytes([number] * 20), 2)]

    id = BlockId(bytes([next(number for number in range(256) if ranks(number) == ["me", east.id])] * 20))
    assert peers.get_earlier(id, REF, 0, "d") is None
    assert asked[-1] == east.id
    assert east.id not in asked[:-1]


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
