"""Signed S3 requests over urllib3: all that obstore cannot do exactly.

Keys go over the wire byte for byte (obstore drops trailing slashes and knows no `a//b`, `./x` or control
characters), range answers are understood in every form servers give them, and it works in a forked child.
About a quarter of the speed of `s3/get.py`, so `s3/store.py` uses it for everything but GETs of objects. Signing is
botocore's. Any thread; a pool belongs to the process that made it.
"""

from __future__ import annotations

import base64
import binascii
import quopri
import re
import time
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

from datacache.core.addresses import ClosedAddressError
from datacache.core.errors import (
    DatacacheError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
)
from datacache.core.ids import ObjectRef
from datacache.store.answers import MAX_DOCUMENT_BYTES, TooMuchError, checked_pools, read_document, read_start
from datacache.store.base import ObjectInfo
from datacache.store.bodies import CHUNK_BYTES, Body, BodyFile
from datacache.store.checksums import Checksum, from_etag, from_headers
from datacache.store.errors import (
    NOT_FOUND,
    address_refused,
    credentials_hint,
    error_code,
    expect_empty,
    expect_etag,
    expect_s3_not_found,
    expect_same,
    from_connection,
    from_status,
    plain_etag,
)
from datacache.store.s3.access import Accesses, S3Access

CHECKSUM_MODE = {"x-amz-checksum-mode": "ENABLED"}
"""Has a store say the checksum it keeps of an object along with it."""
CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_MAX_ERROR_BYTES = 65_536
LENGTH = re.compile(r"[0-9]{1,18}")
_PAGE_WITHIN_S = 60.0
"""The time that a listing's body may take; a request's timeout if that is longer."""
_DONE_WITHIN_S = 900.0
"""The time that all other answers may take: while a large upload is completed, servers send blanks for minutes."""
_REQUEST_ID = "x-amz-request-id"
_REFUSALS = (400, 401, 403)
"""400 is Amazon's answer to a token that is expired or not valid, among others."""
_READ_BYTES = 1 << 20
_CONNECTIONS = 256
"""How many are kept for the next request, as many as threads have at a time: urllib3 warns of each it throws away."""


_META = "x-amz-meta-"
_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_PLAIN = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")
_WORD = re.compile(r"=\?([A-Za-z0-9_-]+)\?([BbQq])\?([!->@-~]*)\?=")


class S3Requests:
    """Requests to one bucket. Where the store refuses one, it is sent again with the next credentials there are."""

    def __init__(self, url: str, accesses: Accesses) -> None:
        self.url = url
        self._accesses = accesses
        self._connection: _Connection | None = None
        self._with_id: set[tuple[str, bool]] = set()  # methods, and whether with a key, whose answers have had an id
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
        """Send one request, signed. The answer is not read yet and may be an error. Raises for a failed connection."""
        tail = f"{'/' if key else ''}{quoted_key(key)}"
        if query:
            pairs = sorted((quote(k, safe="-_.~"), quoted_key(v, safe="-_.~")) for k, v in query.items())
            tail += "?" + "&".join(f"{k}={v}" for k, v in pairs)
        answer: urllib3.BaseHTTPResponse | None = None
        for access in self._accesses.each():
            if answer is not None:
                answer.close()
            connection = self._connected(access)
            try:
                answer = connection.send(method, tail, headers or {}, body)
            except BotoCoreError as exc:
                raise StoreAccessError(
                    f"{self.url_of(key)}: the credentials cannot be used ({type(exc).__name__})",
                    url=self.url_of(key),
                    hint=credentials_hint(self.url),
                ) from exc
            except ClosedAddressError as exc:
                raise address_refused(exc, self.url_of(key)) from exc
            except urllib3.exceptions.HTTPError as exc:
                raise self._broken(exc, self.url_of(key)) from exc
            if answer.status not in _REFUSALS:
                self._expect_id(answer, method, key)
                break
        assert answer is not None
        return answer

    def page(self, query: dict[str, str]) -> bytes:
        """Return the document of one ListObjectsV2 request."""
        within_s = max(_PAGE_WITHIN_S, self._accesses.get().timeout_s)
        return self.call("GET", "", (200,), query=query, within_s=within_s)[1]

    def head(self, key: str) -> ObjectInfo:
        """Return what the store knows of an object: `look` without the headers."""
        return self.look(key)[0]

    def look(self, key: str) -> tuple[ObjectInfo, Mapping[str, str]]:
        """Return the object and all headers of its HEAD."""
        answer = self._head(key)
        return to_info(key, self._length(answer, key) or 0, answer.headers), answer.headers

    def etag(self, key: str) -> str:
        """Return the object's ETag by one HEAD, '' if it is not there, also where the bucket is not."""
        answer = self.send("HEAD", key)
        self._body(answer, key)
        if answer.status == 404:
            return ""
        if answer.status >= 300:
            raise from_status(answer.status, "", self.url_of(key), store=self.url)
        return expect_etag(answer.headers.get("ETag"), self.url_of(key))

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        """Return what the store has of all bytes of this version: its checksum, or the MD5 that its ETag may be."""
        query = {"versionId": ref.version} if ref.version else None
        answer = self._head(ref.key, query=query, headers=CHECKSUM_MODE)
        headers = _lower(answer)
        size = self._length(answer, ref.key)
        expect_same(ref, etag=plain_etag(headers.get("etag")), size_bytes=size)
        return from_headers(headers) or from_etag(ref.etag, headers)

    def get(self, ref: ObjectRef, start: int, stop: int) -> tuple[memoryview, dict[str, str]]:
        """Return bytes `start` to `stop` of exactly this version, from a 206, or from a 200 of the part or of the
        whole; and the answer's headers, names in lower case."""
        headers = dict(CHECKSUM_MODE)
        if ref.etag and not ref.version:
            headers["If-Match"] = ref.etag if ref.etag.startswith("W/") else f'"{ref.etag}"'
        if (start, stop) != (0, ref.size_bytes):
            headers["Range"] = f"bytes={start}-{stop - 1}"
        query = {"versionId": ref.version} if ref.version else None
        deadline = time.monotonic() + self._accesses.get().timeout_s
        answer = self.send("GET", ref.key, query=query, headers=headers)
        self._expect(answer, ref.key, (200, 206))
        try:
            found = _lower(answer)
            skip = skipped_bytes(ref, start, answer.status, found, self._length(answer, ref.key))
            while skip and (passed := len(_read(answer, min(skip, _READ_BYTES), deadline))):
                skip -= passed
            data = _read(answer, stop - start, deadline)
            if len(data) != stop - start:
                raise cut_short(ref, len(data), stop - start)
            return memoryview(data).toreadonly(), found
        except urllib3.exceptions.HTTPError as exc:
            raise self._broken(exc, ref.url) from exc
        finally:
            # Read to its end, it goes back to the pool; otherwise, or if nobody can tell (None), the connection is cut.
            answer.release_conn() if answer.length_remaining == 0 else answer.close()

    def put(self, key: str, data: bytes | memoryview, headers: Mapping[str, str] | None = None) -> ObjectInfo:
        """Store a whole object by one PUT. A HEAD follows where the answer has no ETag (see `find_stored`)."""
        found, body = self.call("PUT", key, (200, 201), headers=headers, body=data)
        expect_empty(body, self.url_of(key))
        info = to_info(key, len(data), found)
        return info if info.etag else self.find_stored(key, data, headers or {})

    def find_stored(self, key: str, data: bytes | memoryview, headers: Mapping[str, str]) -> ObjectInfo:
        """Return the object that a PUT with these headers has stored. `StoreUnavailableError` unless an object of this
        size is there and has its metadata or, if there are none to tell it by, its bytes: a PUT whose answer does not
        say what was stored may never have come to the store."""
        url = self.url_of(key)
        metadata = to_metadata(headers)
        try:
            info, found = self.look(key)
            if info.etag and info.size_bytes == len(data):
                if metadata:
                    same = to_metadata(found).items() >= metadata.items()
                else:
                    same = not data or self.get(info.ref(self.url), 0, len(data))[0] == data
                if same:
                    return info
        except ObjectNotFoundError as exc:
            if exc.url == self.url:
                raise
        raise StoreUnavailableError(f"{url}: the store does not say that it was stored", url=url)

    def call(
        self,
        method: str,
        key: str,
        good: tuple[int, ...],
        *,
        query: dict[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | memoryview | Body = b"",
        within_s: float = _DONE_WITHIN_S,
    ) -> tuple[Mapping[str, str], bytes]:
        """Send a request and return headers and body of the answer, whose status has to be one of `good`."""
        length = {"Content-Length": str(len(body))} if method in ("PUT", "POST") else {}
        answer = self.send(method, key, query=query, headers={**length, **(headers or {})}, body=body)
        self._expect(answer, key, good)
        return answer.headers, self._body(answer, key, within_s=within_s)

    def delete(self, key: str, *, version: str = "", headers: Mapping[str, str] | None = None) -> None:
        """Delete an object; one that is not there is fine. With a version that one is gone for good. After another
        status than 204, look whether the object is gone (not whether a version is)."""
        answer = self.send("DELETE", key, query={"versionId": version} if version else None, headers=headers)
        try:
            self._expect(answer, key, (200, 202, 204))
        except ObjectNotFoundError as exc:
            if exc.url == self.url or answer.status != 404:  # the bucket is not there, or DELETE is not allowed
                raise
            return
        expect_empty(self._body(answer, key), self.url_of(key))
        if answer.status != 204 and not version and self.etag(key):
            url = self.url_of(key)
            raise StoreUnavailableError(f"{url}: the store does not say that it was deleted", url=url)

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

    def _length(self, answer: urllib3.BaseHTTPResponse, key: str) -> int | None:
        length = answer.headers.get("Content-Length")
        if length is not None and not LENGTH.fullmatch(length):
            raise StoreError(f"{self.url_of(key)}: the store does not say how large it is", url=self.url_of(key))
        return None if length is None else int(length)

    def _head(
        self, key: str, *, query: dict[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> urllib3.BaseHTTPResponse:
        """Send a HEAD; ask for an error again with GET, because only that answer says which it is."""
        answer = self.send("HEAD", key, query=query, headers=headers)
        self._body(answer, key)
        if answer.status >= 300:
            again = self.send("GET", key, query=query, headers={"Range": "bytes=0-0"})
            if again.status >= 300 and again.status != 416:
                self._expect(again, key, ())
            again.close()
            url = self.url_of(key)
            if answer.status in NOT_FOUND:
                raise StoreUnavailableError(f"{url}: the store has it and has it not", url=url)
            raise from_status(answer.status, "", url, store=self.url)
        return answer

    def _expect_id(self, answer: urllib3.BaseHTTPResponse, method: str, key: str) -> None:
        """Raise where a request's success has no id and that of others of its kind had one: most stores give one, and a
        web page in their place does not know of it."""
        if answer.status >= 300:
            return
        kind = method, bool(key)
        if _REQUEST_ID in answer.headers:
            self._with_id.add(kind)
        elif kind in self._with_id:
            answer.close()
            url = self.url_of(key)
            raise StoreUnavailableError(f"{url}: the answer has no request id, so it may not be the store's", url=url)

    def _expect(self, answer: urllib3.BaseHTTPResponse, key: str, good: tuple[int, ...]) -> None:
        if answer.status in good:
            return
        url, whole = self.url_of(key), False
        try:
            start, whole = read_start(answer, limit_bytes=_MAX_ERROR_BYTES, within_s=_PAGE_WITHIN_S)
        except urllib3.exceptions.HTTPError as exc:
            raise self._broken(exc, url) from exc
        finally:
            answer.release_conn() if whole else answer.close()
        body = start.decode("utf-8", "replace")  # it says which error it is
        expect_s3_not_found(answer.status, body, url)
        region = answer.headers.get("x-amz-bucket-region", "")
        raise from_status(answer.status, error_code(body), url, store=self.url, region=region)

    def _body(self, answer: urllib3.BaseHTTPResponse, key: str, *, within_s: float = _DONE_WITHIN_S) -> bytes:
        url, whole = self.url_of(key), False
        try:
            body = read_document(answer, limit_bytes=MAX_DOCUMENT_BYTES, within_s=within_s)
            whole = True
        except TooMuchError as exc:
            raise StoreError(
                f"{url}: the store's answer is larger than any of S3's ({MAX_DOCUMENT_BYTES:,} bytes)",
                url=url,
                hint="Check the endpoint: it must be the S3 endpoint, not a website.",
            ) from exc
        except urllib3.exceptions.HTTPError as exc:
            raise self._broken(exc, url) from exc
        finally:
            answer.release_conn() if whole else answer.close()
        return body

    def _broken(self, exc: Exception, url: str) -> DatacacheError:
        endpoint = self._connection.access.endpoint if self._connection is not None else ""
        return from_connection(f"{type(exc).__name__} {exc}", url, endpoint=endpoint)

    def url_of(self, key: str) -> str:
        """Return the URL of a key; of the bucket for ''."""
        return f"{self.url}/{key}" if key else self.url


class _Connection:
    """The connections to an endpoint, and the credentials to sign with."""

    def __init__(self, access: S3Access, pool: tuple[urllib3.HTTPConnectionPool, bool] | None = None) -> None:
        self.access = access
        base_path = urlsplit(access.endpoint).path
        self._origin = access.endpoint.removesuffix(base_path) if base_path else access.endpoint
        self._bucket_path = f"{base_path}/{access.bucket}"
        self.pool, self._absolute = pool or _connect(access, self._origin)

    def pool_for(self, access: S3Access) -> tuple[urllib3.HTTPConnectionPool, bool] | None:
        """Return the pool if its connections lead to this endpoint, too."""
        own = self.access
        same = (access.endpoint, access.ca_bundle, access.rule) == (own.endpoint, own.ca_bundle, own.rule)
        return (self.pool, self._absolute) if same else None

    def send(
        self, method: str, tail: str, headers: Mapping[str, str], body: bytes | memoryview | Body
    ) -> urllib3.BaseHTTPResponse:
        """Send one request; raises botocore's, urllib3's and the body's errors."""
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


def skipped_bytes(ref: ObjectRef, start: int, status: int, headers: Mapping[str, str], length: int | None) -> int:
    """Return how many bytes of an answer come before those that were asked for: a server may send the whole for a part
    of it. `headers` in lower case, `length` the body's. Raises where it sends another object or other bytes."""
    begins, size = 0, length
    sent = CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
    if sent is not None:
        begins, size = int(sent[1]), None if sent[3] == "*" else int(sent[3])
    elif status == 206:
        raise StoreUnavailableError(f"{ref.url}: the store does not say which bytes it sends", url=ref.url)
    expect_same(ref, etag=plain_etag(headers.get("etag")), size_bytes=size)
    if begins > start:
        raise StoreUnavailableError(f"{ref.url}: the store sends other bytes than asked for", url=ref.url)
    return start - begins


def cut_short(ref: ObjectRef, got: int, length: int) -> StoreUnavailableError:
    """Return the error for an answer that ended too early."""
    return StoreUnavailableError(f"{ref.url}: the answer ended after {got:,} of {length:,} bytes", url=ref.url)


def to_info(key: str, size_bytes: int, headers: Mapping[str, str]) -> ObjectInfo:
    """Return what an answer's headers tell of an object; their names in lower case, or in any."""
    date = headers.get("last-modified") or headers.get("date")
    mtime_ns = 0
    with suppress(TypeError, ValueError, OverflowError):
        mtime_ns = min(int(parsedate_to_datetime(date or "").timestamp()) * 10**9, 2**63 - 1)
    version = headers.get("x-amz-version-id", "")
    # "null" is what an unversioned bucket calls its one version, which the next PUT overwrites.
    return ObjectInfo(key, size_bytes, mtime_ns, plain_etag(headers.get("etag")), "" if version == "null" else version)


def _lower(answer: urllib3.BaseHTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.headers.items()}


def _read(answer: urllib3.BaseHTTPResponse, count: int, deadline: float) -> bytearray:
    """Read so many bytes, or to the end of the body. A server that drips passes the timeout of each read."""
    data = bytearray()
    while len(data) < count and (came := answer.read1(min(count - len(data), _READ_BYTES), decode_content=False)):
        data += came
        if time.monotonic() > deadline:
            raise urllib3.exceptions.ReadTimeoutError(None, None, "the answer takes too long")  # type: ignore[arg-type]
    return data


def quoted_key(text: str, safe: str = "/-_.~") -> str:
    """Return a key as it stands in a URL."""
    return quote(text.encode("utf-8", "surrogateescape"), safe=safe)


def _connect(access: S3Access, origin: str) -> tuple[urllib3.HTTPConnectionPool, bool]:
    """Return a pool for the endpoint, through a proxy where the environment has one, and whether its requests carry the
    whole URL (plain HTTP through a proxy)."""
    timeout = urllib3.Timeout(connect=min(10.0, access.timeout_s), read=access.timeout_s)
    options: dict[str, object] = {"maxsize": _CONNECTIONS, "timeout": timeout, "blocksize": CHUNK_BYTES}
    secure = origin.startswith("https:")
    if secure:
        options |= {"cert_reqs": "CERT_REQUIRED", "ca_certs": access.ca_bundle or get_cert_path(True)}
    if access.rule is not None:
        # Never through a proxy, which would resolve the name once more, and connect for us.
        parts = urlsplit(origin)
        pool = checked_pools(access.rule)[parts.scheme]
        port = parts.port or (443 if secure else 80)
        return pool(parts.hostname or "", port=port, **options), False  # type: ignore[arg-type]
    proxy = get_environ_proxies(origin).get("https" if secure else "http")
    if proxy:
        manager = urllib3.ProxyManager(proxy, **options)  # type: ignore[arg-type]
        return manager.connection_from_url(origin), not secure
    return urllib3.connection_from_url(origin, **options), False


# --- metadata of objects --------------------------------------------------------------------------------------------
# `x-amz-meta-NAME`, any text as a value. Headers carry ASCII only, and servers trim blanks. Any other value travels as
# one RFC 2047 encoded word (`=?UTF-8?B?…?=`), the form in which S3 itself gives back what is not ASCII.


def to_headers(metadata: Mapping[str, str], url: str) -> dict[str, str]:
    """Return the headers that store metadata. `StoreError` for a name that no header can have."""
    return {_META + name: value for name, value in to_words(metadata, url).items()}


def to_words(metadata: Mapping[str, str], url: str) -> dict[str, str]:
    """Return metadata as headers without the prefix."""
    for name in metadata:
        if _NAME.fullmatch(name) is None:
            raise StoreError(f"{url}: metadata cannot have the name {name!r}", url=url)
    return {name: _word_of(value) for name, value in metadata.items()}


def to_metadata(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata that an answer's headers carry."""
    found = {}
    for name, value in headers.items():
        lower = name.lower()
        if lower.startswith(_META):
            found[lower.removeprefix(_META)] = _decoded(value)
    return found


def _word_of(value: str) -> str:
    if _PLAIN.fullmatch(value) is not None and "=?" not in value:
        return value
    return f"=?UTF-8?B?{base64.b64encode(value.encode('utf-8', 'surrogateescape')).decode()}?="


def _decoded(value: str) -> str:
    words = value.split()
    matches = [match for match in map(_WORD.fullmatch, words) if match is not None]
    if matches and len(matches) == len(words):
        try:
            return "".join(map(_word, matches))
        except (ValueError, LookupError, binascii.Error):
            return value
    try:  # http.client takes headers for Latin-1; servers that send other text mean UTF-8
        return value.encode("latin-1").decode()
    except ValueError:
        return value


def _word(match: re.Match[str]) -> str:
    charset, form, text = match.groups()
    data = base64.b64decode(text, validate=True) if form in "Bb" else quopri.decodestring(text.encode(), header=True)
    return data.decode(charset, "surrogateescape")
