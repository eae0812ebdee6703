"""Answers of servers that mean harm: read within bounds of time."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import urllib3

from datacache.core.addresses import AddressRule
from datacache.core.errors import StoreError, StoreUnavailableError
from datacache.core.ids import ObjectRef
from datacache.settings import Settings
from datacache.store import answers
from datacache.store.open import open_backend
from tests.promises import promise


def drip_headers(listener: socket.socket, ended: threading.Event) -> None:
    """Answer one request with a header that has no end."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while not ended.wait(0.02):
            try:
                connection.sendall(b"x")
            except OSError:
                return


@promise("A server that draws out its headers is cut off")
@pytest.mark.parametrize("kind", ["checked", "through a proxy"])
def test_a_server_that_draws_out_its_headers_is_cut_off(kind: str) -> None:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server = threading.Thread(target=drip_headers, args=(listener, ended))
        server.start()
        try:
            manager = urllib3.PoolManager() if kind == "checked" else urllib3.ProxyManager(url)
            manager.pool_classes_by_scheme = (
                answers.checked_pools(AddressRule(["127.0.0.1"])) if kind == "checked" else answers.bounded_pools()
            )
            timeout = urllib3.Timeout(connect=30, read=0.5)
            with pytest.raises(urllib3.exceptions.HTTPError, match="headers take too long"):
                manager.urlopen("GET", url, retries=False, preload_content=False, timeout=timeout)
        finally:
            ended.set()
            server.join()


@contextmanager
def answering(serve: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have S3 be a socket that `serve` listens at, in a thread that ends within."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        server = threading.Thread(target=serve, args=(listener,), daemon=True)
        server.start()
        yield
        server.join()


@promise("An answer that drips is given up in time")
@pytest.mark.parametrize("start", [0, 150])
@pytest.mark.parametrize("form", ["length", "chunks"])
def test_a_body_that_drips_is_given_up_in_time(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, form: str, start: int
) -> None:
    ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(65536)
            says = "Content-Length: 200" if form == "length" else "Transfer-Encoding: chunked"
            connection.sendall(f'HTTP/1.1 200 OK\r\nETag: "e"\r\n{says}\r\n\r\n'.encode())
            for _ in range(200):
                connection.sendall(b"x" if form == "length" else b"1\r\nx\r\n")
                ended.wait(0.01)
            connection.sendall(b"0\r\n\r\n")

    def serve(listener: socket.socket) -> None:
        for _ in range(2 if form == "chunks" else 1):  # what comes in chunks is asked for again, in another way
            drip(listener)

    with answering(serve, monkeypatch):
        store = open_backend("s3://faces", dataclasses.replace(settings, store_timeout_s=0.5))
        with pytest.raises(StoreUnavailableError, match="in time"):
            store.read(ObjectRef("s3://faces", "1.bin", 200, "e"), start, 200)
        ended.set()
        store.close()


def test_interim_answers_come_before_the_one_that_counts(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = (
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
        b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: "e"\r\n\r\nhello'
    )

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    with answering(serve, monkeypatch):
        store = open_backend("s3://faces", settings)
        assert bytes(store.read(ObjectRef("s3://faces", "1.bin", 5, "e"), 0, 5)) == b"hello"
        store.close()


@pytest.mark.parametrize(("etag", "version"), [("e\r\nX: y", ""), ("e", "\udcff")])
def test_an_etag_or_a_version_that_no_header_can_have_is_an_error_that_names_the_object(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, etag: str, version: str
) -> None:
    with answering(lambda listener: None, monkeypatch):
        store = open_backend("s3://faces", settings)
        with pytest.raises(StoreError, match=r"s3://faces/1.bin: its ETag or version"):
            store.read(ObjectRef("s3://faces", "1.bin", 5, etag, version), 0, 5)
        store.close()
