"""A web server that behaves as told, on the loopback."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import pytest

from datacache import api
from datacache.catalog.packs import stores_with_packs
from datacache.catalog.refs import resolve
from datacache.manifest.reader import Manifest
from datacache.settings import Settings


class WebServer:
    """Serves `files` by path. A path in `odd` is answered by that function instead."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.odd: dict[str, Callable[[Request], None]] = {}
        self.asked: Counter[str] = Counter()
        """Requests by path."""
        self.closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), Request)
        self._server.web = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def add(self, path: str, data: bytes) -> str:
        """Serve these bytes; the URL."""
        self.files[path] = data
        return f"{self.url}{path}"

    def on(self, path: str, answer: Callable[[Request], None]) -> str:
        """Answer so; the URL."""
        self.odd[path] = answer
        return f"{self.url}{path}"

    def close(self) -> None:
        """Idempotent."""
        if self.closing.is_set():
            return
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.cut()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128
    web: WebServer

    def __init__(self, *arguments: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what the tests are about."""

    def cut(self) -> None:
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def web(self) -> WebServer:
        return cast(_Server, self.server).web

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.web.asked[path] += 1
        if path in self.web.odd:
            self.web.odd[path](self)
        elif path in self.web.files:
            self.answer(self.web.files[path])
        else:
            self.answer(b"no such file", status=404)

    def answer(self, body: bytes, *, status: int = 200, length: int | None = -1, **headers: str) -> None:
        """Send it; `length` is what Content-Length says, None for no such header (the connection's end ends the
        body)."""
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if length is None:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body) if length < 0 else length))
            self.close_connection = length >= 0
        self.end_headers()
        self.wfile.write(body)

    def chunks(self, *parts: bytes, end: bool = True, **headers: str) -> None:
        """Send a body in chunks; without `end` the connection ends in the middle."""
        self.send_response_only(200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in parts:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        if end:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True

    def log_message(self, *_arguments: Any) -> None:
        """Quiet."""


@pytest.fixture(autouse=True)
def _servers_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lists name the servers of the tests."""
    monkeypatch.setenv("DATACACHE_ALLOW_NETWORK", "127.0.0.0/8")


@pytest.fixture
def web() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.close()


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Write a file of JSON lines: objects, or bytes as they are."""

    def write(*lines: Any, name: str = "lines.jsonl", compress: bool = False) -> Path:
        data = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n"
        path = tmp_path / name
        path.write_bytes(gzip.compress(data, mtime=0) if compress else data)
        return path

    return write


def files_of(settings: Settings, ref: str = "faces") -> dict[str, bytes]:
    """All files of a snapshot with their bytes, straight from the stores."""
    catalog = api.open_catalog(settings)
    manifest = Manifest.open(resolve(catalog, ref).id, catalog.get_blobs)
    stores = stores_with_packs(settings, catalog.get_blobs)
    found = {}
    for entry in manifest.entries():
        object_ref = manifest.object_ref(entry)
        data = stores.get(object_ref.store).read(object_ref, 0, entry.size_bytes)
        found[entry.path.decode("utf-8", "surrogateescape")] = bytes(data)
    stores.close()
    catalog.close()
    return found
