"""A relay passes bytes on, cuts, resets, holds and loses them, and comes between nodes that know nothing of it."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance.relay import NO_TROUBLE, Relay, Trouble
from tests.netns import CLUSTER_PORT, Network, relays_between
from tests.servers import LOOPBACK, free_port

ECHO = (
    "import socket, sys\n"
    "with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:\n"
    "    print('listening', flush=True)\n"
    "    while True:\n"
    "        with server.accept()[0] as one:\n"
    "            while data := one.recv(65536): one.sendall(data)\n"
)
CALL = (
    "import socket, sys\n"
    "with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as one:\n"
    "    one.sendall(b'hello'); print(one.recv(5).decode())\n"
)


@contextmanager
def relayed(trouble: Callable[[], Trouble] = lambda: NO_TROUBLE) -> Iterator[tuple[Relay, Callable[[], socket.socket]]]:
    """Yield a relay to a server that echoes, and what connects to it."""
    port = free_port()

    def echo(server: socket.socket) -> None:
        while True:
            try:
                one, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(one,), daemon=True).start()

    def answer(one: socket.socket) -> None:
        with one:
            try:
                while data := one.recv(65536):
                    one.sendall(data)
            except ConnectionResetError:
                pass

    with socket.create_server((LOOPBACK, 0)) as server:
        thread = threading.Thread(target=echo, args=(server,))
        thread.start()
        try:
            with Relay(lambda: socket.create_server((LOOPBACK, port)), server.getsockname(), trouble=trouble) as relay:
                yield relay, lambda: socket.create_connection((LOOPBACK, port), timeout=30)
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def received(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count and (more := connection.recv(count)):
        found += more
    return found


def test_bytes_come_through_until_the_relay_is_shut_and_again_when_it_is_open() -> None:
    with relayed() as (relay, connect):
        data = bytes(range(256)) * 10_000
        with connect() as one:
            sending = threading.Thread(target=one.sendall, args=(data,))
            sending.start()
            assert received(one, len(data)) == data
            sending.join()
            relay.shut()
            assert one.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            connect()
        relay.open()
        with connect() as one:
            one.sendall(b"a")
            assert one.recv(1) == b"a"
            one.shutdown(socket.SHUT_WR)
            assert one.recv(1) == b""


def test_what_a_relay_holds_comes_when_it_lets_go() -> None:
    with relayed() as (relay, connect), connect() as one:
        one.sendall(b"a")
        assert one.recv(1) == b"a"
        relay.hold()
        one.sendall(b"b")
        with connect() as another:
            another.sendall(b"c")
            for each in (one, another):
                each.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    each.recv(1)
                each.settimeout(30)
            relay.let_go()
            assert (one.recv(1), another.recv(1)) == (b"b", b"c")


def test_a_connection_is_reset_and_the_next_one_is_not() -> None:
    troubles = [NO_TROUBLE, NO_TROUBLE, Trouble(reset=True)]
    with relayed(lambda: troubles.pop(0) if troubles else NO_TROUBLE) as (_, connect):
        with connect() as one:
            one.sendall(b"a")
            assert one.recv(1) == b"a"
            one.sendall(b"b")
            with pytest.raises(ConnectionResetError):
                one.recv(1)
        with connect() as one:
            one.sendall(b"c")
            assert one.recv(1) == b"c"


def test_a_connection_that_is_lost_says_nothing_and_one_that_is_late_comes() -> None:
    lost = threading.Event()

    def trouble() -> Trouble:
        first = not lost.is_set()
        lost.set()
        return Trouble(lost=True) if first else Trouble(late_s=0.05)

    with relayed(trouble) as (_, connect), connect() as one:
        one.sendall(b"a")
        assert lost.wait(30)
        with connect() as another:
            another.sendall(b"b")
            assert another.recv(1) == b"b"
        one.sendall(b"c")
        one.settimeout(0.1)
        with pytest.raises(TimeoutError):
            one.recv(1)


def test_a_server_that_is_away_is_told_as_a_reset() -> None:
    port, away = free_port(), free_port()
    with (
        Relay(lambda: socket.create_server((LOOPBACK, port)), (LOOPBACK, away)),
        pytest.raises(ConnectionResetError),
        socket.create_connection((LOOPBACK, port), timeout=30) as one,  # or as soon as that
    ):
        one.recv(1)


def test_relays_stand_between_nodes_that_keep_their_addresses(tmp_path: Path) -> None:
    pieces: list[int] = []

    def counted() -> Trouble:
        pieces.append(1)
        return NO_TROUBLE

    with Network(2) as network, relays_between(network, trouble=counted) as relays:
        one, two = network.nodes
        log = tmp_path / "echo.log"
        two.start(sys.executable, "-c", ECHO, two.address, str(CLUSTER_PORT), log=log)
        while not log.read_text():
            pass
        assert one.run(sys.executable, "-c", CALL, two.address, str(CLUSTER_PORT)) == "hello\n"
        assert len(pieces) == 2
        relays["n1", "n2"].hold()
        assert two.run(sys.executable, "-c", CALL, two.address, str(CLUSTER_PORT)) == "hello\n"
        assert len(pieces) == 2
