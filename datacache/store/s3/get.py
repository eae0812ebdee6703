"""GETs of S3 objects over sockets of our own: exact keys, all headers, and half of the processor time of obstore's.

A GET that nobody fetched ahead costs a quarter of a millisecond here; what takes the time elsewhere (building request
objects, parsing headers into message objects, handing bodies through buffers) is left out. Requests are signed as
https://docs.aws.amazon.com/IAM/latest/UserGuide/create-signed-request.html says. Answers that are not plain ones (in
chunks) and endpoints behind a proxy are left to `s3/requests.py` (`UnusualAnswerError`). Any thread; a getter
belongs to the process that made it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl
import struct
import time
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from datacache.core.addresses import ClosedAddressError
from datacache.core.errors import DatacacheError, SettingsError, StoreError
from datacache.core.ids import ObjectRef
from datacache.core.pages import page_buffer
from datacache.store.errors import (
    NOT_FOUND,
    address_refused,
    error_code,
    expect_s3_not_found,
    from_connection,
    from_status,
)
from datacache.store.retry import request_s
from datacache.store.s3.access import S3Access
from datacache.store.s3.requests import cut_short, quoted_key, skipped_bytes

_NOTHING = hashlib.sha256(b"").hexdigest()
_HEAD_BYTES = 16 * 2**10
_MAX_HEAD_BYTES = 64 * 2**10
_MAX_ERROR_BYTES = 64 * 2**10
_SCRATCH_BYTES = 256 * 2**10
_MOST_OF_IT = 0.9
_TIMEVAL = struct.Struct("@ll")
_ESTABLISHED = b"\x01"  # include/net/tcp_states.h


class UnusualAnswerError(Exception):
    """The endpoint is behind a proxy, or its answer is not a plain one: ask with `S3Requests`."""


class _Head(NamedTuple):
    status: int
    headers: dict[str, str]
    """By their names in lower case; those that come twice are joined by commas."""
    rest: bytes
    """The part of the body that came along with the headers."""


class _Second(NamedTuple):
    """The parts that all signed requests of one second share, each with what goes between them left out."""

    at_s: int
    credentials: object
    canonical: str
    """Of the canonical request: what follows its query."""
    text: str
    """Of the text to be signed: what stands before the hash of the canonical request."""
    key: bytes
    headers: str
    """To the signature, which follows."""


class _Deadline(NamedTuple):
    at: float
    timeout_s: float
    """The time that each call of the kernel may take on a connection that nobody uses."""


class S3Getter:
    """GETs from one bucket with the credentials of one `S3Access`."""

    def __init__(self, access: S3Access, store_url: str) -> None:
        parts = urlsplit(access.endpoint)
        self._access, self._url = access, store_url
        secure = parts.scheme == "https"
        self._address = parts.hostname or "", parts.port or (443 if secure else 80)
        self._host = parts.netloc
        self._bucket_path = f"{parts.path.rstrip('/')}/{access.bucket}"
        # Never through a proxy where the address is checked: it would resolve the name once more, and connect for us.
        self._proxied = access.rule is None and bool(get_environ_proxies(access.endpoint).get(parts.scheme))
        context = _tls(access) if secure or access.ca_bundle else None  # a wrong bundle is told at once
        self._tls = context if secure else None
        self._idle: list[socket.socket] = []  # single list operations
        self._second: _Second | None = None

    def get(self, ref: ObjectRef, start: int, stop: int) -> tuple[memoryview, dict[str, str]]:
        """Return bytes `start` to `stop` of exactly this version, and the answer's headers. One request; raises as
        `ObjectStore.read`."""
        if self._proxied:
            raise UnusualAnswerError
        request = self._request(ref, start, stop)
        timeout_s = request_s(self._access.timeout_s)
        deadline = _Deadline(time.monotonic() + timeout_s, timeout_s)
        connection: socket.socket | None = None
        try:
            connection = self._connected(timeout_s)
            connection.sendall(request)
            head = _read_head(connection, b"", deadline)
            while 100 <= head.status < 200:  # an interim answer: the one that was asked for follows
                head = _read_head(connection, head.rest, deadline)
            if head.status not in (200, 206):
                raise self._refused(connection, head, ref, deadline)
            length = head.headers.get("content-length", "")
            if "transfer-encoding" in head.headers or not length.isdecimal():
                raise UnusualAnswerError
            skip = skipped_bytes(ref, start, head.status, head.headers, int(length))
            wanted = skip + stop - start
            if int(length) < wanted:
                raise cut_short(ref, max(0, int(length) - skip), stop - start)
            data = page_buffer(stop - start)
            _read_body(connection, head.rest, data, skip, deadline)
            data = data.toreadonly()
            whole = int(length) == wanted >= len(head.rest) and head.headers.get("connection", "").lower() != "close"
            if whole and timeout_s == self._access.timeout_s:
                self._idle.append(connection)
                connection = None
        except ClosedAddressError as exc:
            raise address_refused(exc, ref.url) from exc
        except (OSError, ValueError) as exc:
            if isinstance(exc, DatacacheError):
                raise
            if isinstance(exc, BlockingIOError):
                exc = TimeoutError("timed out")
            what = "getaddrinfo" if isinstance(exc, socket.gaierror) else type(exc).__name__
            raise from_connection(f"{what} {exc}", ref.url, endpoint=self._access.endpoint) from exc
        finally:
            if connection is not None:
                connection.close()
        return data, head.headers

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            self._idle.pop().close()

    def _connected(self, timeout_s: float) -> socket.socket:
        """Return a connection that the server has not closed meanwhile, each call on which takes `timeout_s` at most.
        One for less than the usual is new, and of no use afterwards."""
        while self._idle and timeout_s == self._access.timeout_s:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took it
                break
            # A connection that the server has closed meanwhile is in another state.
            if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == _ESTABLISHED:
                return connection
            connection.close()
        connect_s, rule = min(10.0, timeout_s), self._access.rule
        if rule is None:
            connection = socket.create_connection(self._address, timeout=connect_s)
        else:
            connection = rule.connect(*self._address, connect_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(timeout_s)
            if self._tls is not None:
                return self._tls.wrap_socket(connection, server_hostname=self._address[0])
            connection.settimeout(None)
            _wait_at_most(connection, timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def _request(self, ref: ObjectRef, start: int, stop: int) -> bytes:
        if not (ref.etag + ref.version).isprintable():
            raise StoreError(f"{ref.url}: its ETag or version cannot be sent", url=ref.url)
        path = f"{self._bucket_path}/{quoted_key(ref.key)}"
        query = f"versionId={quote(ref.version, safe='-_.~')}" if ref.version else ""
        extra = ""
        if ref.etag and not ref.version:
            extra = f"If-Match: {ref.etag}\r\n" if ref.etag.startswith("W/") else f'If-Match: "{ref.etag}"\r\n'
        if (start, stop) != (0, ref.size_bytes):
            extra += f"Range: bytes={start}-{stop - 1}\r\n"
        credentials = self._access.frozen_credentials()
        if credentials is None:
            lines = f"host: {self._host}\r\nx-amz-checksum-mode: ENABLED"
        else:
            second, now_s = self._second, int(time.time())
            if second is None or (second.at_s, second.credentials) != (now_s, credentials):
                second = self._second = self._begin_second(now_s, credentials)
            digest = hashlib.sha256(f"GET\n{path}\n{query}{second.canonical}".encode()).hexdigest()
            signature = hmac.digest(second.key, f"{second.text}{digest}".encode(), "sha256").hex()
            lines = f"{second.headers}{signature}"
        request = f"GET {path}{'?' if query else ''}{query} HTTP/1.1\r\n{extra}{lines}\r\n\r\n"
        return request.encode("utf-8", "surrogateescape")

    def _begin_second(self, at_s: int, credentials: Any) -> _Second:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at_s))
        signed = {
            "host": self._host,
            "x-amz-checksum-mode": "ENABLED",
            "x-amz-content-sha256": _NOTHING,
            "x-amz-date": stamp,
        }
        if credentials.token:
            signed["x-amz-security-token"] = credentials.token
        names = ";".join(signed)  # in the order of their names
        scope = [stamp[:8], self._access.region, "s3", "aws4_request"]
        key = f"AWS4{credentials.secret_key}".encode()
        for part in scope:
            key = hmac.digest(key, part.encode(), "sha256")
        return _Second(
            at_s,
            credentials,
            "".join(f"\n{name}:{value}" for name, value in signed.items()) + f"\n\n{names}\n{_NOTHING}",
            f"AWS4-HMAC-SHA256\n{stamp}\n{'/'.join(scope)}\n",
            key,
            "".join(f"{name}: {value}\r\n" for name, value in signed.items())
            + f"Authorization: AWS4-HMAC-SHA256 Credential={credentials.access_key}/{'/'.join(scope)}, "
            f"SignedHeaders={names}, Signature=",
        )

    def _refused(self, connection: socket.socket, head: _Head, ref: ObjectRef, deadline: _Deadline) -> DatacacheError:
        """Return the error for an answer that is none of 2xx. Its document may be in chunks: the code stands in one."""
        body = bytearray(head.rest)
        length = head.headers.get("content-length", "")
        limit = min(int(length), _MAX_ERROR_BYTES) if length.isdecimal() else _MAX_ERROR_BYTES
        while len(body) < limit and b"</Error>" not in body and not body.endswith(b"\r\n0\r\n\r\n") and limit:
            part = _receive(connection, min(_HEAD_BYTES, limit - len(body)), deadline)
            if not part:
                break
            body += part
        text = body.decode("utf-8", "replace")
        code = error_code(text)
        in_pieces = not {"transfer-encoding", "content-encoding"}.isdisjoint(head.headers)
        if head.status in NOT_FOUND and not code and in_pieces:
            raise UnusualAnswerError
        expect_s3_not_found(head.status, text, ref.url)
        region = head.headers.get("x-amz-bucket-region", "")
        return from_status(head.status, code, ref.url, store=self._url, region=region)


def _read_head(connection: socket.socket, begun: bytes, deadline: _Deadline) -> _Head:
    data = begun
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > _MAX_HEAD_BYTES:
            raise ValueError("the headers are too long")
        part = _receive(connection, _HEAD_BYTES, deadline)
        if not part:
            raise ConnectionResetError("closed before the answer")
        data = data + part if data else part
    first, *lines = data[:end].decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
        raise ValueError("not an HTTP answer")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    if words[0] == "HTTP/1.0":
        headers["connection"] = "close"
    return _Head(int(words[1]), headers, data[end + 4 :])


def _read_body(connection: socket.socket, begun: bytes, out: memoryview, skip: int, deadline: _Deadline) -> None:
    """Fill `out` with what follows the first `skip` bytes of a body, of which `begun` has come already."""
    rest, got = memoryview(begun), 0
    scratch = memoryview(bytearray(min(skip, _SCRATCH_BYTES)) if skip else b"")
    while skip:
        came = min(len(rest), skip) or connection.recv_into(scratch[:skip])
        if not came:
            raise ConnectionResetError("closed within the answer")
        rest, skip = rest[came:], skip - came
        _expect_time(deadline)
    got = min(len(rest), len(out))
    out[:got] = rest[:got]
    while got < len(out):
        came = _receive_into(connection, out[got:], deadline)
        if not came:
            raise ConnectionResetError("closed within the answer")
        got += came
        if got < len(out):
            _expect_time(deadline)


def _receive_into(connection: socket.socket, out: memoryview, deadline: _Deadline) -> int:
    """Receive bytes, as many as come; of a large body all, in one call: each costs a turn of the interpreter, for which
    dozens of threads may wait."""
    if isinstance(connection, ssl.SSLSocket):
        return connection.recv_into(out)
    left_s = deadline.at - time.monotonic()
    if left_s > _MOST_OF_IT * deadline.timeout_s:  # almost always: what one call may take is about what is left
        return connection.recv_into(out, len(out), socket.MSG_WAITALL)
    _wait_at_most(connection, left_s)
    came = connection.recv_into(out, len(out), socket.MSG_WAITALL)
    _wait_at_most(connection, deadline.timeout_s)
    return came


def _wait_at_most(connection: socket.socket, timeout_s: float) -> None:
    """Have the kernel give up what it waits for (`BlockingIOError`). Python's own timeouts cost a second system call,
    and so a second turn of the interpreter, for each."""
    if isinstance(connection, ssl.SSLSocket):
        return  # it needs Python's
    value = _TIMEVAL.pack(*divmod(max(1, int(1e6 * timeout_s)), 1_000_000))  # 0 would mean for ever
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, value)


def _receive(connection: socket.socket, limit: int, deadline: _Deadline) -> bytes:
    _expect_time(deadline)
    return connection.recv(limit)


def _expect_time(deadline: _Deadline) -> None:
    if time.monotonic() > deadline.at:
        raise TimeoutError("timed out")


def _tls(access: S3Access) -> ssl.SSLContext:
    bundle = os.path.expanduser(access.ca_bundle) or get_cert_path(True)
    try:
        return ssl.create_default_context(cafile=bundle)
    except (OSError, ssl.SSLError) as exc:
        raise SettingsError(f"the CA bundle {bundle} cannot be read: {exc}") from exc
