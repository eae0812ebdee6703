"""Uploads in parts (multipart upload) by S3's own requests: begun, filled, completed, aborted, found again.

The one implementation, for whole files (`s3/upload.py`), live buckets (`s3/bucket.py`) and copies of large objects
(`s3/copy.py`). Nothing can be seen under the key before `complete`. Over requests of our own, so that it works in
forked workers. Any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape, unescape

from datacache.core.errors import ObjectNotFoundError, StoreError, StoreUnavailableError
from datacache.store.answers import expect_plain_xml
from datacache.store.bodies import Body
from datacache.store.bucket import Part, Upload
from datacache.store.errors import error_code, expect_empty, expect_etag, from_status, plain_etag
from datacache.store.s3.list import Paging
from datacache.store.s3.requests import LENGTH, S3Requests

WHOLE_BYTES = 8 * 2**20
"""Objects up to this size are put in one request."""
PART_BYTES = 16 * 2**20
"""A part is a request and, at the store, a round of records beside its bytes; as obstore and others cut by default."""
MAX_PARTS = 10_000
_STATUS = {"PreconditionFailed": 412, "NoSuchKey": 404, "NoSuchUpload": 404, "AccessDenied": 403}
_WHOLE = re.compile(rb"(?:</(?:[\w.-]+:)?\w+Result\s*>|<(?:[\w.-]+:)?\w+Result\b[^>]*/>)\s*\Z")
_ETAG = re.compile(rb"<(?:[\w.-]+:)?ETag>([^<]*)<")
_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")


def begin(requests: S3Requests, store_url: str, key: str, headers: Mapping[str, str] | None = None) -> str:
    """Begin an upload: its id."""
    _, body = requests.call("POST", key, (200,), query={"uploads": ""}, headers=headers)
    found = _UPLOAD_ID.search(body)
    if found is None:
        raise StoreError(f"{store_url} begins no upload in parts", url=f"{store_url}/{key}")
    return unescape(found[1].decode())


def put_part(requests: S3Requests, key: str, upload: str, number: int, data: bytes | memoryview | Body) -> Part:
    """Store one part. What lies in memory is sent from there."""
    query = {"partNumber": str(number), "uploadId": upload}
    headers, answer = requests.call("PUT", key, (200,), query=query, body=data)
    expect_empty(answer, requests.url_of(key))
    return Part(number, len(data), expect_etag(headers.get("ETag"), requests.url_of(key)))


def list_parts(requests: S3Requests, store_url: str, key: str, upload: str) -> list[Part]:
    """The parts that are there, by number."""
    found: dict[int, Part] = {}
    paging = Paging(store_url)
    query = {"uploadId": upload, "max-parts": "1000"}
    while True:
        _, body = requests.call("GET", key, (200,), query=query)
        root, space = _document(body, store_url, "ListPartsResult")
        items, before = root.findall(f"{space}Part"), max(found, default=0)
        for item in items:
            number, size = (item.findtext(space + tag) or "0" for tag in ("PartNumber", "Size"))
            if not (LENGTH.fullmatch(number) and LENGTH.fullmatch(size)):
                raise StoreError(f"{store_url}: the endpoint does not answer as S3 does", url=store_url)
            if int(number) <= before:  # rclone's server counts anew on each page: what it has more is sent again
                return [found[number] for number in sorted(found)]
            found[int(number)] = Part(int(number), int(size), plain_etag(item.findtext(f"{space}ETag")))
        marker = root.findtext(f"{space}NextPartNumberMarker") or ""
        if root.findtext(f"{space}IsTruncated") != "true":
            return [found[number] for number in sorted(found)]
        paging.follow(marker)
        paging.count(len(items))
        query["part-number-marker"] = marker


def complete(
    requests: S3Requests,
    store_url: str,
    key: str,
    upload: str,
    parts: Sequence[Part],
    *,
    headers: Mapping[str, str] | None = None,
) -> str:
    """Make the parts the object: the ETag the store answers with, '' where it says none. Ceph wants all parts named
    that are there."""
    listed = "".join(
        f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(quoted(part.etag))}</ETag></Part>" for part in parts
    )
    body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
    _, answer = requests.call("POST", key, (200,), query={"uploadId": upload}, headers=headers, body=body)
    return answered_etag(answer, f"{store_url}/{key}", store_url)


def abort(requests: S3Requests, key: str, upload: str) -> None:
    """Throw an upload away; one that is not there is fine, a missing bucket is not."""
    try:
        _, answer = requests.call("DELETE", key, (200, 204), query={"uploadId": upload})
        expect_empty(answer, requests.url_of(key))
    except ObjectNotFoundError as exc:
        if not exc.url.endswith(f"/{key}"):
            raise


def list_uploads(requests: S3Requests, store_url: str, prefix: str) -> Iterator[Upload]:
    """All unfinished uploads of keys with a prefix."""
    query = {"uploads": "", "prefix": prefix}
    encoded, paging = False, Paging(store_url)
    while True:
        _, body = requests.call("GET", "", (200, 404), query=query)
        if not body or b"<Error>" in body or b"<Error " in body:
            code = error_code(body.decode("utf-8", "replace"))
            if code == "NoSuchUpload":  # what `rclone serve s3` says where there are none at all
                return
            raise from_status(404, code, store_url, store=store_url)
        try:
            root, space = _document(body, store_url, "ListMultipartUploadsResult")
        except StoreError:
            if encoded:
                raise
            # A key with a control character is no XML. Not asked for at first: Ceph encodes then and does not say so.
            encoded, query["encoding-type"] = True, "url"
            continue
        items = root.findall(f"{space}Upload")
        for item in items:
            key, upload, began = (item.findtext(space + tag) or "" for tag in ("Key", "UploadId", "Initiated"))
            key = unquote_plus(key, errors="surrogateescape") if encoded else key
            if key.startswith(prefix):
                yield Upload(key, upload, _seconds(began))
        following = root.findtext(f"{space}NextKeyMarker") or ""
        following = unquote_plus(following, errors="surrogateescape") if encoded else following
        place = {"key-marker": following, "upload-id-marker": root.findtext(f"{space}NextUploadIdMarker") or ""}
        if root.findtext(f"{space}IsTruncated") != "true":
            return
        paging.follow(place["key-marker"] and repr(place))
        paging.count(len(items))
        query |= place


def answered_etag(body: bytes, url: str, store_url: str) -> str:
    """Return the ETag in the document of a completed upload or a copy, '' for none.

    Servers begin the answer with 200 and blanks before the work is done. So raise the error that the document says, and
    `StoreUnavailableError` where it breaks off: only its end says that the work was done.
    """
    if b"<Error>" in body or b"<Error " in body:
        code = error_code(body.decode("utf-8", "replace"))
        raise from_status(_STATUS.get(code, 400 if code else 503), code, url, store=store_url)
    if _WHOLE.search(body) is None:
        raise StoreUnavailableError(f"{url}: the store does not say whether it was done", url=url)
    found = _ETAG.search(body)
    if found is None:
        return ""
    return plain_etag(unescape(found[1].decode("utf-8", "replace"), {"&quot;": '"', "&#34;": '"'}).strip())


def quoted(etag: str) -> str:
    """An ETag as HTTP writes it."""
    return etag if etag.startswith("W/") else f'"{etag}"'


def _document(body: bytes, store_url: str, name: str) -> tuple[ET.Element, str]:
    expect_plain_xml(body, store_url)
    try:
        root = ET.fromstring(body)  # noqa: S314 - expat bounds entity expansion by itself since 2.4
    except ET.ParseError as exc:
        raise StoreError(f"{store_url}: the answer is not valid XML", url=store_url) from exc
    space, found, tag = root.tag.rpartition("}")
    if tag != name:
        raise StoreError(f"{store_url}: the endpoint does not answer as S3 does", url=store_url)
    return root, space + found


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
