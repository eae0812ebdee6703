"""Signed S3 requests over urllib3: all that obstore cannot do exactly.

Keys go over the wire byte for byte (obstore drops trailing slashes and knows no `a//b`, `./x` or control
characters), range answers are understood in every form servers give them, and it works in a forked child.
About a quarter of obstore's speed, so `s3.py` uses it for everything but the common GET. Signing is
botocore's. Any thread; a pool belongs to the process that made it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from urllib.parse import quote, urlsplit

import urllib3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from datacache.core.errors import DatacacheError, ObjectNotFoundError, StoreAccessError, StoreUnavailableError
from datacache.core.objects import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.bodies import CHUNK_BYTES, Body, BodyFile
from datacache.store.errors import (
    credentials_hint,
    error_code,
    expect_same,
    from_connection,
    from_status,
    plain_etag,
)
from datacache.store.s3_access import Accesses, S3Access

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_MAX_ERROR_BYTES = 65_536
_REFUSALS = (400, 401, 403)
"""400 is Amazon's answer to a token that is expired or not valid, among others."""
_SKIP_BYTES = 1 << 20
_CONNECTIONS = 256
"""How many are kept for the next request, as many as threads have at a time: urllib3 warns of each it throws away."""


class S3Requests:
    """Requests to one bucket. Where the store refuses one, it is sent again with the next credentials there are."""

    def __init__(self, url: str, accesses: Accesses) -> None:
        self._url = url
        self._accesses = accesses
        self._connection: _Connection | None = None
        self._connected(accesses.get())

    def send(
        self,
        method: str,
        key: str = "",
        *,
        query: dict[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | memoryview | Body = b"",
    ) -> urllib3.BaseHTTPResponse:
        """One request, signed; the answer is not read yet and may be an error. Raises for a failed
        connection."""
        tail = f"{'/' if key else ''}{quoted_key(key)}"
        if query:
            pairs = sorted((quote(k, safe="-_.~"), quoted_key(v, safe="-_.~")) for k, v in query.items())
            tail += "?" + "&".join(f"{k}={v}" for k, v in pairs)
        access = self._accesses.get()
        refused: list[S3Access] = []
        while True:
            connection = self._connected(access)
            try:
                answer = connection.send(method, tail, headers or {}, body)
            except BotoCoreError as exc:
                raise StoreAccessError(
                    f"{self._url_of(key)}: the credentials cannot be used ({type(exc).__name__})",
                    url=self._url_of(key),
                    hint=credentials_hint(self._url),
                ) from exc
            except urllib3.exceptions.HTTPError as exc:
                raise self._broken(exc, self._url_of(key)) from exc
            if answer.status not in _REFUSALS:
                return answer
            refused.append(access)
            other = self._accesses.after_refusal(refused)
            if other is None:
                return answer
            answer.close()
            access = other

    def page(self, query: dict[str, str]) -> bytes:
        """The document of one ListObjectsV2 request."""
        answer = self.send("GET", query=query)
        self._expect(answer, "", (200,))
        return self._body(answer, "")

    def head(self, key: str) -> ObjectInfo:
        """`look` without the headers."""
        return self.look(key)[0]

    def look(self, key: str) -> tuple[ObjectInfo, Mapping[str, str]]:
        """HEAD: the object and all headers; an error is asked for again with GET, because only that answer says
        which."""
        answer = self.send("HEAD", key)
        self._body(answer, key)
        if answer.status >= 300:
            again = self.send("GET", key, headers={"Range": "bytes=0-0"})
            if again.status < 300 or again.status == 416:
                again.close()
                raise from_status(answer.status, "", self._url_of(key), store=self._url)
            self._expect(again, key, ())
        return self._info(key, int(answer.headers.get("Content-Length", "0")), answer), answer.headers

    def etag(self, key: str) -> str:
        """The object's ETag by one HEAD, '' if it is not there. Whether the bucket is there it does not say."""
        answer = self.send("HEAD", key)
        self._body(answer, key)
        if answer.status == 404:
            return ""
        if answer.status >= 300:
            raise from_status(answer.status, "", self._url_of(key), store=self._url)
        return plain_etag(answer.headers.get("ETag"))

    def get(self, ref: ObjectRef, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of exactly this version, from a 206, or from a 200 of the part or of the
        whole."""
        headers = {}
        if ref.etag and not ref.version:
            headers["If-Match"] = ref.etag if ref.etag.startswith("W/") else f'"{ref.etag}"'
        if (start, stop) != (0, ref.size_bytes):
            headers["Range"] = f"bytes={start}-{stop - 1}"
        query = {"versionId": ref.version} if ref.version else None
        answer = self.send("GET", ref.key, query=query, headers=headers)
        self._expect(answer, ref.key, (200, 206))
        try:
            return self._part(answer, ref, start, stop)
        except urllib3.exceptions.HTTPError as exc:
            raise self._broken(exc, ref.url) from exc
        finally:
            # Read to its end, it goes back to the pool; otherwise the connection is cut, not drained.
            answer.close() if answer.length_remaining else answer.release_conn()

    def put(self, key: str, data: bytes | memoryview, headers: Mapping[str, str] | None = None) -> ObjectInfo:
        """PUT of a whole object. A HEAD follows where the answer has no ETag."""
        answer = self.send("PUT", key, body=data, headers={"Content-Length": str(len(data)), **(headers or {})})
        self._expect(answer, key, (200, 201))
        self._body(answer, key)
        info = self._info(key, len(data), answer)
        return info if info.etag else self.head(key)

    def call(
        self,
        method: str,
        key: str,
        good: tuple[int, ...],
        *,
        query: dict[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | memoryview | Body = b"",
    ) -> tuple[Mapping[str, str], bytes]:
        """Headers and body of an answer whose status is one of `good`."""
        length = {"Content-Length": str(len(body))} if method in ("PUT", "POST") else {}
        answer = self.send(method, key, query=query, headers={**length, **(headers or {})}, body=body)
        self._expect(answer, key, good)
        return answer.headers, self._body(answer, key)

    def delete(self, key: str, *, version: str = "", headers: Mapping[str, str] | None = None) -> None:
        """DELETE; nothing there is fine. With a version that one is gone for good."""
        answer = self.send("DELETE", key, query={"versionId": version} if version else None, headers=headers)
        try:
            self._expect(answer, key, (200, 202, 204))
        except ObjectNotFoundError as exc:
            if exc.url == self._url:  # the bucket is not there, which says nothing of the object
                raise
        self._body(answer, key)

    def close(self) -> None:
        """Close the pooled connections."""
        if self._connection is not None:
            self._connection.pool.close()

    def _connected(self, access: S3Access) -> _Connection:
        connection = self._connection
        if connection is None or connection.access is not access:
            # What another thread still reads over the earlier one's connections it reads to its end.
            pool = connection.pool_for(access) if connection is not None else None
            connection = self._connection = _Connection(access, pool)
        return connection

    def _part(self, answer: urllib3.BaseHTTPResponse, ref: ObjectRef, start: int, stop: int) -> bytes:
        length = answer.headers.get("Content-Length")
        # What the server sends begins here, and the object is this large.
        begins, size = 0, int(length) if length is not None else None
        sent = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
        if sent is not None:
            begins, size = int(sent[1]), None if sent[3] == "*" else int(sent[3])
        elif answer.status == 206:
            raise StoreUnavailableError(f"{ref.url}: the store does not say which bytes it sends", url=ref.url)
        expect_same(ref, etag=plain_etag(answer.headers.get("ETag")), size_bytes=size)
        if begins > start:
            raise StoreUnavailableError(f"{ref.url}: the store sends other bytes than asked for", url=ref.url)
        skip = start - begins
        while skip:
            passed = len(answer.read(min(skip, _SKIP_BYTES), decode_content=False))
            if not passed:
                break
            skip -= passed
        data = answer.read(stop - start, decode_content=False)
        if len(data) != stop - start:
            raise StoreUnavailableError(
                f"{ref.url}: the answer ended after {len(data):,} of {stop - start:,} bytes", url=ref.url
            )
        return data

    def _info(self, key: str, size_bytes: int, answer: urllib3.BaseHTTPResponse) -> ObjectInfo:
        date = answer.headers.get("Last-Modified") or answer.headers.get("Date")
        mtime_ns = 0
        with suppress(TypeError, ValueError):
            mtime_ns = int(parsedate_to_datetime(date or "").timestamp()) * 10**9
        version = answer.headers.get("x-amz-version-id", "")
        # "null" is what an unversioned bucket calls its one version, which the next PUT overwrites.
        version = "" if version == "null" else version
        return ObjectInfo(key, size_bytes, mtime_ns, plain_etag(answer.headers.get("ETag")), version)

    def _expect(self, answer: urllib3.BaseHTTPResponse, key: str, good: tuple[int, ...]) -> None:
        if answer.status in good:
            return
        code = error_code(self._body(answer, key)[:_MAX_ERROR_BYTES].decode("utf-8", "replace"))
        region = answer.headers.get("x-amz-bucket-region", "")
        raise from_status(answer.status, code, self._url_of(key), store=self._url, region=region)

    def _body(self, answer: urllib3.BaseHTTPResponse, key: str) -> bytes:
        try:
            body = answer.read(decode_content=True)
        except urllib3.exceptions.HTTPError as exc:
            raise self._broken(exc, self._url_of(key)) from exc
        finally:
            answer.release_conn()
        return body

    def _broken(self, exc: Exception, url: str) -> DatacacheError:
        return from_connection(f"{type(exc).__name__} {exc}", url, endpoint=self._endpoint())

    def _endpoint(self) -> str:
        return self._connection.access.endpoint if self._connection is not None else ""

    def _url_of(self, key: str) -> str:
        return f"{self._url}/{key}" if key else self._url


class _Connection:
    """The connections to an endpoint, and the credentials to sign with."""

    def __init__(self, access: S3Access, pool: tuple[urllib3.HTTPConnectionPool, bool] | None = None) -> None:
        self.access = access
        base_path = urlsplit(access.endpoint).path
        self._origin = access.endpoint.removesuffix(base_path) if base_path else access.endpoint
        self._bucket_path = f"{base_path}/{access.bucket}"
        self.pool, self._absolute = pool or _connect(access, self._origin)

    def pool_for(self, access: S3Access) -> tuple[urllib3.HTTPConnectionPool, bool] | None:
        """Its connections, if they are those to this endpoint, too."""
        same = (access.endpoint, access.ca_bundle) == (self.access.endpoint, self.access.ca_bundle)
        return (self.pool, self._absolute) if same else None

    def send(
        self, method: str, tail: str, headers: Mapping[str, str], body: bytes | memoryview | Body
    ) -> urllib3.BaseHTTPResponse:
        """One request; raises botocore's, urllib3's and the body's errors."""
        path = self._bucket_path + tail
        data = body if isinstance(body, bytes | memoryview) else BodyFile(body)
        request = AWSRequest(method, self._origin + path, headers=dict(headers), data=data)
        credentials = self.access.frozen_credentials()
        if credentials is not None:
            S3SigV4Auth(credentials, "s3", self.access.region).add_auth(request)
        try:
            return self.pool.urlopen(
                method,
                self._origin + path if self._absolute else path,
                body=data or None,  # type: ignore[arg-type]  # a memoryview is sent as it lies
                headers=dict(request.headers.items()),
                retries=False,
                redirect=False,
                assert_same_host=False,
                preload_content=False,
                decode_content=False,
            )
        except urllib3.exceptions.HTTPError:
            if isinstance(data, BodyFile) and data.error is not None:
                raise data.error from None
            raise


def quoted_key(text: str, safe: str = "/-_.~") -> str:
    """A key as it stands in a URL."""
    return quote(text.encode("utf-8", "surrogateescape"), safe=safe)


def _connect(access: S3Access, origin: str) -> tuple[urllib3.HTTPConnectionPool, bool]:
    """A pool for the endpoint, through a proxy where the environment has one, and whether its requests carry
    the whole URL (plain HTTP through a proxy)."""
    timeout = urllib3.Timeout(connect=min(10.0, access.timeout_s), read=access.timeout_s)
    options: dict[str, object] = {"maxsize": _CONNECTIONS, "timeout": timeout, "blocksize": CHUNK_BYTES}
    secure = origin.startswith("https:")
    if secure:
        options |= {"cert_reqs": "CERT_REQUIRED", "ca_certs": access.ca_bundle or get_cert_path(True)}
    proxy = get_environ_proxies(origin).get("https" if secure else "http")
    if proxy:
        manager = urllib3.ProxyManager(proxy, **options)  # type: ignore[arg-type]
        return manager.connection_from_url(origin), not secure
    return urllib3.connection_from_url(origin, **options), False
