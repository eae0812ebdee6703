"""The faults that tests of the write path inject: what the client sees of each, and what the server."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from tests.conformance.faults import Fault, FaultProxy

BODY = bytes(range(256)) * 40


class Server(ThreadingHTTPServer):
    """Keeps what was put and answers with it."""

    def __init__(self) -> None:
        self.put: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        server.put.append(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(BODY)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(f"http://127.0.0.1:{server.server_address[1]}") as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(proxy.url).port or 0)
    yield connection
    connection.close()


def put(client: http.client.HTTPConnection) -> int:
    """The status of a PUT of BODY."""
    client.request("PUT", "/a", BODY)
    answer = client.getresponse()
    answer.read()
    return answer.status


def test_a_request_reset_half_way_never_reaches_the_server(
    server: Server, proxy: FaultProxy, client: http.client.HTTPConnection
) -> None:
    proxy.add(Fault(reset_request_at=1000))
    with pytest.raises(ConnectionError):  # a reset or a broken pipe, whichever is noticed first
        put(client)
    client.close()
    assert put(client) == 200
    assert server.put == [BODY]


def test_a_lost_answer_is_of_a_request_that_was_done(
    server: Server, proxy: FaultProxy, client: http.client.HTTPConnection
) -> None:
    proxy.add(Fault(lose_answer=True))
    client.request("PUT", "/a", BODY)
    with pytest.raises(ConnectionResetError):
        client.getresponse()
    assert server.put == [BODY]


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_wrong_length_is_said_and_the_connection_closed(
    proxy: FaultProxy, client: http.client.HTTPConnection, wrong: int
) -> None:
    proxy.add(Fault(wrong_length=wrong))
    client.request("GET", "/a")
    answer = client.getresponse()
    assert answer.length == len(BODY) + wrong
    if wrong < 0:
        assert answer.read() == BODY[:wrong]
    else:
        with pytest.raises(http.client.IncompleteRead) as caught:
            answer.read()
        assert caught.value.partial == BODY


def test_a_slow_request_and_a_slow_answer_arrive_whole(
    server: Server, proxy: FaultProxy, client: http.client.HTTPConnection
) -> None:
    proxy.add(Fault(request_bytes_s=200_000), Fault(answer_bytes_s=200_000))
    client.request("PUT", "/a", BODY)
    client.getresponse().read()
    client.request("GET", "/a")
    assert client.getresponse().read() == BODY
    assert server.put == [BODY]


def test_a_client_that_dies_while_its_slow_request_is_read_has_asked_nothing(
    server: Server, proxy: FaultProxy, client: http.client.HTTPConnection
) -> None:
    proxy.add(Fault(request_bytes_s=1_000_000))
    client.request("PUT", "/a", headers={"Content-Length": str(len(BODY))})
    client.send(BODY[:-1])
    assert client.sock is not None
    client.sock.shutdown(socket.SHUT_WR)
    assert client.sock.recv(1) == b""  # hung up on
    assert server.put == []
