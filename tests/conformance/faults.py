"""A proxy on this machine that makes an HTTP server misbehave on demand.

For tests of whatever speaks HTTP to a store. A fault applies to one request (`add`), to all (`always`), or
to the listener itself (`refuse`); everything else is passed on byte for byte, headers included, so signed
requests stay valid. Bodies are held in memory, and the server sees a request only when all of it has come: one whose
client dies half-way, or whose body a fault cuts off, never happened. Every connection has a thread; `close` ends them
all.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast
from urllib.parse import urlsplit


@dataclass
class Answer:
    """A response on its way to the client; a `Fault` may change all of it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        """The value of a header, or ''."""
        return next((v for k, v in self.headers if k.lower() == name.lower()), "")

    def set_header(self, name: str, value: str | None) -> None:
        """Replace a header, or take it away with None."""
        self.headers = [(k, v) for k, v in self.headers if k.lower() != name.lower()]
        if value is not None:
            self.headers.append((name, value))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Say what happens to one request. The fields that are set apply in this order."""

    reset_request_at: int | None = None
    """Read this many bytes of the request's body and reset the connection. The server never hears of it."""
    request_bytes_s: int = 0
    """Read the request's body at this rate."""
    wait: threading.Event | None = None
    """Hold the request until this is set."""
    status: int = 0
    """Answer with this status and an S3 error document, without asking the server."""
    code: str = "InternalError"
    change: Callable[[Answer], None] | None = None
    """Change the server's answer in place. Content-Length follows the body unless it is set here."""
    flip_one_in: int = 0
    """Flip a bit in the body of one in so many answers, wherever the number of the answer puts it; but of two answers
    for one path that follow each other in one at most, so that who asks again gets the right bytes. 1: in each."""
    lose_answer: bool = False
    """The server has done the request, but the connection is reset instead of its answer."""
    wrong_length: int = 0
    """How many bytes more (or fewer) than the body has Content-Length says. The connection is closed after the body."""
    answer_bytes_s: int = 0
    """Send the body at this rate."""
    truncate_at: int | None = None
    """Send this many bytes of the body and close the connection in good order."""
    reset_at: int | None = None
    """Send this many bytes of the body and reset the connection (RST)."""
    only: Callable[[str, str], bool] = field(default=lambda _method, _path: True)
    """Which requests it is for, by method and path."""


class FaultProxy:
    """`with FaultProxy(endpoint) as proxy:` listens on `proxy.url`, on the loopback unless `host` is another address
    of this machine, and passes on to `endpoint` (plain HTTP)."""

    def __init__(self, endpoint: str, *, host: str = "127.0.0.1") -> None:
        self._host = host
        parts = urlsplit(endpoint)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.requests: list[str] = []
        """`METHOD /path?query` of every request that came, the newest last."""
        self.headers: list[dict[str, str]] = []
        """Their headers, names in lower case."""
        self._once: deque[Fault] = deque()
        self._always: list[Fault] = []
        self._lock = threading.Lock()  # guards what is around it
        self.flipped = 0
        """The number of bodies that had a bit flipped."""
        self._bodies = 0
        self._right = 0  # of the bodies, since the last flip
        self._flipped_paths: set[str] = set()  # whose last body had a bit flipped
        self._port = 0
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self.accept()

    def pass_on_to(self, endpoint: str) -> None:
        """Send what comes from now on to another server."""
        parts = urlsplit(endpoint)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)

    @property
    def url(self) -> str:
        """The endpoint to give to a client."""
        return f"http://{self._host}:{self._port}"

    def add(self, *faults: Fault) -> None:
        """Each for one request it is for, in this order."""
        with self._lock:
            self._once.extend(faults)

    def always(self, fault: Fault) -> None:
        """For every request it is for, after those of `add` are used up, until `heal`."""
        with self._lock:
            self._always.append(fault)

    def heal(self) -> None:
        """No faults any more, and accept connections."""
        with self._lock:
            self._once.clear()
            self._always.clear()
        self.accept()

    def refuse(self) -> None:
        """Refuse new connections and cut the open ones."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is not None and thread is not None:
            server.shutdown()
            thread.join()
            server.cut()
            server.server_close()

    def accept(self) -> None:
        """Listen (again, on the same port)."""
        if self._server is None:
            self._server = _Server((self._host, self._port), self)
            self._port = self._server.server_address[1]
            self._thread = threading.Thread(
                target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stop listening and end all connections. Idempotent."""
        self.refuse()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def take(self, method: str, path: str) -> Fault:
        """The fault for a request that has come."""
        with self._lock:
            for fault in self._once:
                if fault.only(method, path):
                    self._once.remove(fault)
                    return fault
            return next((f for f in self._always if f.only(method, path)), Fault())

    def flip(self, answer: Answer, path: str, one_in: int) -> None:
        """Flip a bit of the body, if it is this one's turn."""
        with self._lock:
            self._bodies += 1
            number = self._bodies
            if not answer.body or self._right + 1 < one_in or (one_in > 1 and path in self._flipped_paths):
                self._right += 1
                self._flipped_paths.discard(path)
                return
            self.flipped += 1
            self._right = 0
            self._flipped_paths.add(path)
        body = bytearray(answer.body)
        at = number * 2_654_435_761 % (8 * len(body))
        body[at // 8] ^= 1 << at % 8
        answer.body = bytes(body)

    def forward(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        """The server's answer to a request."""
        connection = http.client.HTTPConnection(*self._target, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            response = connection.getresponse()
            return Answer(response.status, response.getheaders(), response.read())
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    """Threads are joined when it closes, after their connections were cut."""

    daemon_threads = False
    block_on_close = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.stopping = threading.Event()
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: object, client_address: object) -> None:
        self._open.add(cast(socket.socket, request))
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def shutdown_request(self, request: object) -> None:
        self._open.discard(cast(socket.socket, request))
        super().shutdown_request(request)  # type: ignore[arg-type]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is what tests are about."""

    def cut(self) -> None:
        """End every open connection."""
        self.stopping.set()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def _serve(self) -> None:
        server = cast(_Server, self.server)
        proxy = server.proxy
        proxy.requests.append(f"{self.command} {self.path}")
        proxy.headers.append({k.lower(): v for k, v in self.headers.items()})
        fault = proxy.take(self.command, self.path)
        length = int(self.headers.get("Content-Length") or 0)
        if fault.reset_request_at is not None:
            self.rfile.read(min(length, fault.reset_request_at))
            self._reset()
            return
        body = self._receive(length, fault.request_bytes_s)
        if len(body) < length:  # the client is gone
            self.close_connection = True
            return
        while fault.wait is not None and not fault.wait.wait(0.01):
            if server.stopping.is_set():
                self.close_connection = True
                return
        if fault.status:
            text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>injected</Message></Error>"
            answer = Answer(fault.status, [("Content-Type", "application/xml")], text.encode())
        else:
            answer = proxy.forward(self.command, self.path, self.headers.items(), body)
        if fault.lose_answer:
            self._reset()
        else:
            self._send(answer, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - names of http.server

    def _send(self, answer: Answer, fault: Fault) -> None:
        length = answer.header("Content-Length") or "0" if self.command == "HEAD" else str(len(answer.body))
        answer.set_header("Content-Length", None)
        if fault.change is not None:
            fault.change(answer)
            if self.command != "HEAD":
                length = str(len(answer.body))
        if fault.flip_one_in and self.command == "GET":
            cast(_Server, self.server).proxy.flip(answer, self.path, fault.flip_one_in)
        if fault.wrong_length:
            length = str(max(0, int(length) + fault.wrong_length))
        answer.set_header("Transfer-Encoding", None)
        answer.set_header("Connection", None)
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        if not answer.header("Content-Length"):
            self.send_header("Content-Length", length)
        self.end_headers()
        cut_at = fault.reset_at if fault.truncate_at is None else fault.truncate_at
        if self.command != "HEAD":
            self._write(answer.body[:cut_at], fault.answer_bytes_s)
        self.wfile.flush()
        if cut_at is not None or fault.wrong_length:
            self.close_connection = True
        if fault.reset_at is not None:
            # Linger 0: close() sends RST and throws away what was not sent, so give the bytes a reader first.
            _wait_until_sent(self.connection)
            self._reset()

    def _receive(self, length: int, bytes_s: int) -> bytes:
        """A request's body, or less of it where the client went away."""
        if not bytes_s:
            return self.rfile.read(length)
        parts, left = [], length
        while left:
            part = self.rfile.read(min(left, self._portion(bytes_s)))
            if not part:
                break
            parts.append(part)
            left -= len(part)
            time.sleep(len(part) / bytes_s)
        return b"".join(parts)

    def _write(self, body: bytes, bytes_s: int) -> None:
        if not bytes_s:
            self.wfile.write(body)
            return
        step = self._portion(bytes_s)
        for at in range(0, len(body), step):
            part = body[at : at + step]
            self.wfile.write(part)
            self.wfile.flush()
            time.sleep(len(part) / bytes_s)

    @staticmethod
    def _portion(bytes_s: int) -> int:
        """Return what is moved at a time: a hundredth of a second's bytes."""
        return max(1, min(65_536, bytes_s // 100))

    def _reset(self) -> None:
        """End the connection with RST."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, *_args: object) -> None:
        """Quiet."""


_SIOCOUTQ = 0x5411  # linux/sockios.h: bytes not yet acknowledged


def _wait_until_sent(connection: socket.socket) -> None:
    import fcntl

    pause = threading.Event()
    for _ in range(1000):
        (unsent,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), _SIOCOUTQ, b"\0" * 4))
        if unsent == 0:
            return
        pause.wait(0.001)
