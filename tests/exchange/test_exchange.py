"""The exchange's two ends over real sockets, and what comes from those who do not keep to the protocol."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import threading
import tracemalloc
import weakref

import pytest

from datacache.core import ipc
from datacache.core.errors import DaemonError, ObjectChangedError, UsageError
from datacache.core.ids import BLOCK_BYTES, ObjectRef
from datacache.exchange import server as server_module
from datacache.exchange.client import Connection
from datacache.exchange.frames import HEADER, MAGIC, VERSION, Deadline, FrameError, FrameSocket, Kind, header
from datacache.exchange.server import Answer, FrameServer, error_answer
from datacache.exchange.wire import BlocksRequest, Mode
from tests.promises import promise

REFS = [ObjectRef("s3://b", f"k\udcff{n}", size, "e", "v") for n, size in enumerate((3, 300_000, BLOCK_BYTES + 1))]
WANTED = [(REFS[0], 0), (REFS[1], 0), (REFS[2], 1), (REFS[2], 0)]
MOST_BYTES = 100_000


def content(ref: ObjectRef, number: int) -> bytes:
    length = min(BLOCK_BYTES, ref.size_bytes - number * BLOCK_BYTES)
    return (f"{ref.key}-{number}".encode("utf-8", "surrogateescape") * length)[:length]


class Answers:
    """A handler that notes whether it could clean up behind itself."""

    def __init__(self):
        self.begun, self.ended = threading.Event(), threading.Event()

    def __call__(self, frame):
        if frame.kind == Kind.CALL:
            if frame.head == b"defect":
                raise KeyError("missing")
            if frame.head == b"elsewhere":
                raise ConnectionResetError("of a catalog")
            yield Answer(Kind.OK, body=bytes(frame.body)[::-1])
            return
        request = BlocksRequest.decode(frame.body)
        self.begun.set()
        try:
            for ref, number in request.blocks:
                if request.dataset == "broken" and number:
                    raise KeyError("missing")
                if request.dataset == "changed" and number:
                    yield error_answer(ObjectChangedError("changed", url=ref.url, hint="again"))
                else:
                    span = slice(*request.span(request.blocks.index((ref, number))))
                    yield Answer(Kind.OK, body=content(ref, number)[span])
        finally:
            self.ended.set()


@pytest.fixture
def answers():
    return Answers()


@pytest.fixture
def path(tmp_path, answers):
    served = FrameServer(answers, most_bytes=MOST_BYTES)
    served.listen(ipc.listen(tmp_path / "s", backlog=8))
    yield tmp_path / "s"
    served.close()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(server_module, "_TAKEN_IN_S", 0.05)


@pytest.fixture
def raw(path):
    with contextlib.closing(ipc.connect(path, timeout_s=30)) as connection:
        yield connection


@pytest.fixture
def client(path):
    connection = Connection(ipc.connect(path), look=lambda: None, look_every_s=0.05)
    yield connection
    connection.close()


def test_blocks_of_a_batch_come_in_order_and_whole(client):
    for _ in range(3):
        found = list(client.blocks(BlocksRequest(WANTED, "d", "", Mode.READ)))
        assert [bytes(data) for data in found] == [content(*wanted) for wanted in WANTED]


def test_of_each_block_the_part_that_was_asked_for_comes(client):
    parts = [(0, 1), (299_990, 300_000), (0, 1), (5, BLOCK_BYTES)]
    found = client.blocks(BlocksRequest(WANTED, "d", "", Mode.READ, parts))
    wanted = zip(WANTED, parts, strict=True)
    assert [bytes(data) for data in found] == [content(*block)[start:stop] for block, (start, stop) in wanted]


def test_a_block_that_fails_keeps_no_other_one_of_its_batch_back(client):
    first, second, error, last = client.blocks(BlocksRequest(WANTED, "changed", "", Mode.READ))
    assert [bytes(data) for data in (first, second, last)] == [content(*WANTED[n]) for n in (0, 1, 3)]
    assert isinstance(error, ObjectChangedError)
    assert (error.url, error.hint) == (REFS[2].url, "again")
    assert bytes(client.call("reverse", b"abc")) == b"cba"


@promise("The daemon checks each field of a request")
def test_a_request_that_is_refused_as_a_whole_has_one_answer_and_the_next_is_answered(client):
    for dataset, error in (("\0", UsageError), ("broken", DaemonError)):
        with pytest.raises(error):
            list(client.blocks(BlocksRequest(WANTED, dataset, "", Mode.READ)))
        assert bytes(client.call("reverse", b"ab")) == b"ba"


def test_a_request_whose_parts_fail_hangs_up_as_half_of_it_was_sent(client):
    def parts():
        yield b"ab"
        raise UsageError("of the caller")

    with pytest.raises(UsageError, match="of the caller"):
        client.upload("reverse", 4, parts())
    assert client.closed


def test_a_connection_that_nobody_holds_is_closed_at_once(path):
    """Threads come and go, and each has a connection."""
    deadline = Deadline("nothing comes")
    connection = Connection(ipc.connect(path), look=deadline.look, look_every_s=0.05)
    connection.deadline = deadline
    closed = weakref.ref(connection.frames.connection)
    gc.disable()
    try:
        del connection, deadline
        assert closed() is None
    finally:
        gc.enable()


@promise("The daemon checks each field of a request")
def test_a_defect_is_not_called_wrong_usage_and_ends_no_connection(client, caplog):
    for op in ("defect", "elsewhere"):
        with pytest.raises(DaemonError, match="the daemon failed"):
            client.call(op, b"")
    assert bytes(client.call("reverse", b"ab")) == b"ba"
    assert [record.message for record in caplog.records] == ["a request failed"] * 2


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/block HTTP/1.1\r\nHost: daemon\r\n\r\n",
        HEADER.pack(MAGIC, VERSION + 1, Kind.CALL, 1, 0, 0),
        header(Kind.CALL, 1, 0, MOST_BYTES + 1),
        header(Kind.CALL, 1, 0, 2**32 - 1),
    ],
    ids=["http", "version", "too long", "huge"],
)
def test_what_is_no_frame_of_ours_is_hung_up_on_and_others_are_answered(raw, client, sent):
    raw.sendall(sent)
    with contextlib.suppress(ConnectionResetError):
        assert raw.recv(1) == b""
    assert bytes(client.call("reverse", b"ab")) == b"ba"


def test_half_a_frame_keeps_nobody_waiting(raw, client):
    raw.sendall(header(Kind.CALL, 1, 4, 4)[:7])
    assert bytes(client.call("reverse", b"ab")) == b"ba"


def test_connections_that_say_nothing_keep_no_other_one_out(monkeypatch, path, client):
    monkeypatch.setattr(server_module, "_MOST_CONNECTIONS", 3)
    assert bytes(client.call("reverse", b"ab")) == b"ba"
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(contextlib.closing(ipc.connect(path, timeout_s=30))) for _ in range(8)]
        last = Connection(ipc.connect(path), look=lambda: None, look_every_s=0.05)
        stack.callback(last.close)
        assert bytes(last.call("reverse", b"ab")) == b"ba"
        assert silent[0].recv(1) == b""
        with pytest.raises(ConnectionError):  # it was silent for longest, and connects again
            client.call("reverse", b"ab")


def test_frames_that_come_byte_by_byte_or_together_are_answered_one_by_one(raw):
    one = header(Kind.CALL, 7, 1, 3) + b"x" + b"abc"
    for byte in one:
        raw.sendall(bytes([byte]))
    raw.sendall(one * 3)
    answer = header(Kind.OK, 7, 0, 3) + b"cba"
    assert raw.makefile("rb").read(4 * len(answer)) == answer * 4


@pytest.mark.parametrize("how", ["goes away", "takes nothing"])
def test_a_reader_that_does_not_take_its_answer_lets_go_of_it(impatient, raw, answers, caplog, how):
    caplog.set_level("INFO")
    body = BlocksRequest(WANTED, "d", "", Mode.READ).encode()
    raw.sendall(header(Kind.BLOCKS, 1, 0, len(body)) + body)
    assert answers.begun.wait(30)
    if how == "goes away":
        raw.close()
    assert answers.ended.wait(60)
    assert caplog.records == []


def test_a_reader_that_takes_its_answer_byte_by_byte_lets_go_of_it(monkeypatch, raw, answers):
    monkeypatch.setattr(server_module, "_TAKEN_IN_S", 0.3)
    body = BlocksRequest(WANTED, "d", "", Mode.READ).encode()
    raw.sendall(header(Kind.BLOCKS, 1, 0, len(body)) + body)
    while not answers.ended.wait(0.01):
        assert raw.recv(1) or answers.ended.wait(30)


@promise("A reader that takes nothing of an answer keeps no other one waiting")
def test_a_reader_that_takes_nothing_lets_go_at_once_while_others_wait_for_room(monkeypatch, tmp_path, answers):
    monkeypatch.setattr(server_module, "_TAKEN_IN_S", 600.0)
    crowded = threading.Event()
    served = FrameServer(answers, most_bytes=MOST_BYTES, crowded=crowded.is_set)
    served.listen(ipc.listen(tmp_path / "s", backlog=8))
    with contextlib.closing(served), contextlib.closing(ipc.connect(tmp_path / "s", timeout_s=30)) as raw:
        body = BlocksRequest(WANTED, "d", "", Mode.READ).encode()
        raw.sendall(header(Kind.BLOCKS, 1, 0, len(body)) + body)
        assert answers.begun.wait(30)
        assert not answers.ended.is_set()
        crowded.set()
        assert answers.ended.wait(60)


def test_a_header_alone_takes_no_memory_and_a_long_body_comes_whole():
    ours, theirs = socket.socketpair()
    frames = FrameSocket(ours, look_every_s=0.05, receiving=lambda: None, sending=lambda: None)
    body = random.Random(1).randbytes(5 * 2**20 + 3)
    sender = threading.Thread(target=theirs.sendall, args=(header(Kind.CALL, 1, 1, len(body)) + b"x" + body,))
    sender.start()
    assert frames.receive(most_bytes=2**31) == (Kind.CALL, 1, b"x", body)
    sender.join()
    theirs.sendall(header(Kind.CALL, 1, 0, 2**30))
    theirs.close()
    tracemalloc.start()
    with pytest.raises(ConnectionResetError):
        frames.receive(most_bytes=2**31)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    frames.close()
    assert peak < 2**23


def test_an_answer_to_another_request_is_noticed(tmp_path):
    ours, theirs = socket.socketpair()
    theirs.sendall(header(Kind.OK, 5, 0, 0))
    with (
        contextlib.closing(Connection(ours, look=lambda: None, look_every_s=0.05)) as client,
        pytest.raises(FrameError),
    ):
        client.call("x", b"")
    theirs.close()


def test_a_block_of_another_length_is_no_answer():
    ours, theirs = socket.socketpair()
    theirs.sendall(header(Kind.OK, 1, 0, 2) + b"xy")
    with (
        contextlib.closing(Connection(ours, look=lambda: None, look_every_s=0.05)) as client,
        pytest.raises(FrameError),
    ):
        list(client.blocks(BlocksRequest([(REFS[0], 0)], "d", "", Mode.READ)))
    theirs.close()


class Dripping(socket.socket):
    """A connection that never has more than a byte, and always has one."""

    def recvmsg_into(self, buffers, *more):
        return super().recvmsg_into([memoryview(next(filter(len, buffers)))[:1]], *more)


def test_bytes_that_come_one_by_one_put_off_no_end():
    ours, theirs = socket.socketpair()
    theirs.sendall(header(Kind.CALL, 1, 4, 4) + b"head" + b"body")
    deadline, looks = Deadline("too late", watch=lambda: looks.append(0)), []
    dripping = Dripping(fileno=ours.detach())
    frames = FrameSocket(dripping, look_every_s=30.0, receiving=deadline.look, sending=deadline.look)
    with contextlib.closing(frames), theirs:
        assert frames.receive(most_bytes=4) == (Kind.CALL, 1, b"head", b"body")
        assert len(looks) == HEADER.size + 8 - 3
        deadline.give_up_at = 0.0
        theirs.sendall(header(Kind.CALL, 1, 4, 4)[:2])
        with pytest.raises(TimeoutError, match="too late"):
            frames.receive(most_bytes=4)


def test_a_client_looks_around_while_nothing_comes():
    ours, theirs = socket.socketpair()

    def look():
        raise TimeoutError("enough")

    with contextlib.closing(Connection(ours, look=look, look_every_s=0.01)) as client, pytest.raises(TimeoutError):
        client.call("x", b"")
    theirs.close()


def test_a_client_looks_around_while_a_byte_comes_now_and_then():
    ours, theirs = socket.socketpair()
    theirs.sendall(header(Kind.OK, 1, 0, 100_000))
    looks = []

    def look():
        looks.append(theirs.send(b"x"))
        if len(looks) == 3:
            raise TimeoutError("enough")

    with contextlib.closing(Connection(ours, look=look, look_every_s=0.01)) as client, pytest.raises(TimeoutError):
        client.call("x", b"")
    theirs.close()


WRONG = [
    b"",
    b"{}",
    b"[" * 100_000,
    b'["read", "d", "", []]',
    b'["read", 7, "", [["s3://b", "k", 1, "", "", 0]]]',
    b'["read", "d", ["x"], [["s3://b", "k", 1, "", "", 0]]]',
    b'["owner?", "d", "", [["s3://b", "k", 1, "", "", 0]]]',
    b'["read", "d", "", [["s3://b", "k", 1, "", "", 1]]]',
    b'["read", "d", "", [["s3://b", "k", 1, "", "", -1]]]',
    b'["read", "d", "", [["s3://b", "k", 1, "", "", true]]]',
    b'["read", "d", "", [["s3://b", "k", 1, "", "", "0"]]]',
    b'["read", "d", "", [["s3://b", "k", 0, "", "", 0]]]',
    b'["read", "d", "", [["s3://b", "k", 1' + b"0" * 30 + b', "", "", 0]]]',
    b'["read", "d", "", [["s3://b", "k", true, "", "", 0]]]',
    b'["read", "d", "", [[]]]',
    b'["read", "d", "", [7]]',
    b'["read", "d", "", ["s3://b"]]',
    b'["read", "d", "", 5]',
    b'["read", "\\ud800", "", [["s3://b", "k", 1, "", "", 0]]]',
    b'["read", "\\udcff", "", [["s3://b", "k", 1, "", "", 0]]]',
    b'["read", "d", "\\ud800", [["s3://b", "k", 1, "", "", 0]]]',
    b'["read", "d", "", [["s3://\\ud800", "k", 1, "", "", 0]]]',
    b'["read", "d", "", [["s3://b", "\\ud800", 1, "", "", 0]]]',
    b'["read", "d\\u0000", "", [["s3://b", "k", 1, "", "", 0]]]',
    b'["read", "d", "", [["s3://b", "k", 9, "", "", 0]], [0, 10]]',
    b'["read", "d", "", [["s3://b", "k", 9, "", "", 0]], [3, 3]]',
    b'["read", "d", "", [["s3://b", "k", 9, "", "", 0]], [-1, 3]]',
    b'["read", "d", "", [["s3://b", "k", 9, "", "", 0]], [true, 3]]',
    b'["read", "d", "", [["s3://b", "k", 9, "", "", 0]], [0, 3], [0, 3]]',
    b'["read", "d", "", [["s3://b", "k", 9, "", "", 0]], 7]',
    b'["have", "d", "", [["s3://b", "k", 9, "", "", 0]], [0, 3]]',
    b'["read", "d", "", [' + b",".join([b'["s3://b", "k", 1, "", "", 0]'] * 65) + b"]]",
]


@promise("The daemon checks each field of a request")
@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_request_with_a_wrong_field_is_wrong_usage(number):
    with pytest.raises(UsageError, match="bad request"):
        BlocksRequest.decode(WRONG[number])


def test_a_request_comes_as_it_was_sent():
    request = BlocksRequest([*WANTED, (ObjectRef("file://", "x", 5, root=2), 0)], "d", "s", Mode.BROKEN)
    assert BlocksRequest.decode(request.encode()) == request
    span = BlocksRequest(request.blocks[-1:], "d", "s", Mode.READ, ((1, 4),))
    assert BlocksRequest.decode(span.encode()) == span
