"""Servers' answers, read within bounds: connections to checked addresses, bodies of a limited size and time.

Used by the S3 backend and by imports from the web, for every answer that is read whole. A server decides neither how
much memory its answer takes, packed or not, nor how long it takes. Errors are urllib3's, but for `TooMuchError`. Any
thread.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import (
    ConnectTimeoutError,
    DecodeError,
    NameResolutionError,
    NewConnectionError,
    ReadTimeoutError,
)

from datacache.core.addresses import AddressRule
from datacache.store.errors import not_s3

MAX_DOCUMENT_BYTES = 16 << 20
"""The most for a listing: a page of 1,000 keys of 1,024 bytes, each byte written as three or five, is under 6 MiB."""
_PIECE = 1 << 16
_ZLIB = 15
_PACKED = {"gzip": 31, "x-gzip": 31, "deflate": _ZLIB}
"""Window sizes as zlib takes them: with a gzip header, with one of zlib."""
ENCODINGS = ("", "identity", *_PACKED)
"""Encodings that are understood. Only `identity` is asked for; servers that have a file packed send it so anyway."""
_MAX_TAGS = 200_000
"""A page has up to 1,000 entries of a dozen elements."""
_MAX_TAG_BYTES = 4 << 20
_TAG = re.compile(rb"<[^>]*>?")
_DECLARED = re.compile(rb"""[^<]{0,16}<\?xml[^>]{0,200}?encoding\s*=\s*["']([^"']{0,40})""")
_PLAIN_ENCODINGS = (b"utf-8", b"us-ascii", b"ascii", b"iso-8859-1")
"""In these a `<` is the byte `<`."""
_HEADERS_WITHIN_S = 30.0
"""Timeout of a read where a connection has none."""


class TooMuchError(Exception):
    """An answer is larger than it may be."""


def pieces(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the body as it comes, unpacked, never more than 64 KiB at a time, however well it is packed. `DecodeError`
    where it is packed in a way that was not asked for."""
    encoding = answer.headers.get("Content-Encoding", "").strip().lower()
    # read1: what has come, not a full buffer; a server that sends a byte a second would pass every timeout of a read.
    raw = iter(lambda: answer.read1(_PIECE, decode_content=False), b"")
    if encoding not in ENCODINGS:
        raise DecodeError("an encoding nobody asked for")
    return raw if encoding not in _PACKED else _unpacked(raw, _PACKED[encoding])


def read_document(answer: urllib3.BaseHTTPResponse, *, limit_bytes: int, within_s: float) -> bytes:
    """Return the whole body. `TooMuchError` above the limit, `ReadTimeoutError` for a server that drips."""
    body, whole = read_start(answer, limit_bytes=limit_bytes, within_s=within_s)
    if not whole:
        raise TooMuchError(f"more than {limit_bytes:,} bytes")
    return body


def read_start(answer: urllib3.BaseHTTPResponse, *, limit_bytes: int, within_s: float) -> tuple[bytes, bool]:
    """Return the beginning of the body, and whether it is all of it."""
    parts: list[bytes] = []
    size, end = 0, time.monotonic() + within_s
    for part in pieces(answer):
        size += len(part)
        parts.append(part)
        if size > limit_bytes:
            return b"".join(parts)[:limit_bytes], False
        if time.monotonic() > end:
            raise ReadTimeoutError(None, None, "the answer takes too long")  # type: ignore[arg-type]
    return b"".join(parts), True


def expect_plain_xml(document: bytes, store_url: str) -> None:
    """Raise `StoreError` for a document that would take far more memory as a tree than as text: one of millions of
    empty elements or attributes, or with declarations of its own.

    What is looked for here are bytes, so a document in another encoding than these bytes are in is refused, too.
    """
    tags = document.count(b"<")
    declared = _DECLARED.match(document)
    plain = b"\0" not in document and (declared is None or declared[1].lower() in _PLAIN_ENCODINGS)
    if tags > _MAX_TAGS or not plain or b"<!" in document:
        raise not_s3(store_url)
    if document.count(b"=") > _MAX_TAGS and sum(len(tag[0]) for tag in _TAG.finditer(document)) > _MAX_TAG_BYTES:
        raise not_s3(store_url)


class _BoundedHttp(HTTPConnection):
    """A connection on which status line and headers come in time."""

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as urllib3 has it
        with _headers_in_time(self):
            return super().getresponse()


class _BoundedHttps(_BoundedHttp, HTTPSConnection):
    """A `_BoundedHttp` over TLS."""


def bounded_pools() -> dict[str, type[HTTPConnectionPool]]:
    """Return pools of connections, by scheme, on which status line and headers come within the time that one read may
    take. They go anywhere, through a proxy too."""
    return _pools(_BoundedHttp, _BoundedHttps)


def checked_pools(rule: AddressRule) -> dict[str, type[HTTPConnectionPool]]:
    """Return `bounded_pools` whose connections go to addresses only which a rule allows. What is raised for another is
    `ClosedAddressError`. Of a proxy they would check the proxy's address: do not use them for one."""

    def connect(connection: HTTPConnection) -> socket.socket:
        timeout: Any = connection.timeout
        try:
            return rule.connect(
                connection.host,
                connection.port,
                timeout if isinstance(timeout, int | float) else None,
                source_address=connection.source_address,
                options=connection.socket_options or (),
            )
        except socket.gaierror as exc:
            raise NameResolutionError(connection.host, connection, exc) from exc
        except TimeoutError as exc:
            raise ConnectTimeoutError(connection, f"Connection to {connection.host} timed out") from exc
        except OSError as exc:
            raise NewConnectionError(connection, f"Failed to establish a new connection: {exc}") from exc

    class Plain(_BoundedHttp):
        def _new_conn(self) -> socket.socket:
            return connect(self)

    class Secure(_BoundedHttps):
        def _new_conn(self) -> socket.socket:
            return connect(self)

    return _pools(Plain, Secure)


def _pools(plain: type[HTTPConnection], secure: type[HTTPSConnection]) -> dict[str, type[HTTPConnectionPool]]:
    return {
        "http": type("PlainPool", (HTTPConnectionPool,), {"ConnectionCls": plain}),
        "https": type("SecurePool", (HTTPSConnectionPool,), {"ConnectionCls": secure}),
    }


@contextlib.contextmanager
def _headers_in_time(connection: HTTPConnection) -> Iterator[None]:
    """Cut a connection whose status line and headers take longer than one read may.

    A server that sends a byte now and then passes every timeout of a read, and would hold a thread as long as it likes.
    """
    late = False
    sock = connection.sock

    def cut() -> None:
        nonlocal late
        late = True
        with contextlib.suppress(OSError):
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)

    timeout: Any = connection.timeout
    timer = threading.Timer(timeout if isinstance(timeout, int | float) else _HEADERS_WITHIN_S, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception:
        if late:
            raise ReadTimeoutError(None, None, "the headers take too long") from None  # type: ignore[arg-type]
        raise
    finally:
        timer.cancel()
    if late:
        raise ReadTimeoutError(None, None, "the headers take too long")  # type: ignore[arg-type]


def _unpacked(parts: Iterator[bytes], window: int) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(window)
    begun = False
    try:
        for part in parts:
            rest = part
            while True:
                if unpacker.eof:  # several members, one after the other
                    unpacker = zlib.decompressobj(window)
                try:
                    data = unpacker.decompress(rest, _PIECE)
                except zlib.error:
                    if begun or window != _ZLIB:
                        raise
                    unpacker = zlib.decompressobj(-_ZLIB)  # deflate without its header, as many servers send it
                    data = unpacker.decompress(rest, _PIECE)
                begun = True
                if data:
                    yield data
                rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
                if not rest and (unpacker.eof or len(data) < _PIECE):  # a full piece may have left more behind
                    break
        if begun and not unpacker.eof:
            raise zlib.error("it is cut short")
    except zlib.error as exc:
        raise DecodeError(f"the answer cannot be unpacked: {exc}") from exc
