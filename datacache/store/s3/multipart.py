"""Uploads in parts (multipart upload) by S3's own requests, of whole files, of live buckets, and of copies.

Nothing can be seen under the key before `complete`. What is broken off is aborted; a process that is killed leaves
parts that nobody sees and that a lifecycle rule of the bucket takes away (`AbortIncompleteMultipartUpload`). Over
requests of our own, so that it works in forked workers, which build shards.

A copy is of exactly one version of an object: one CopyObject, or parts of the source copied into an upload where it is
larger than one request may copy (5 GiB). It is bound to its source by the header that the server is known to heed
(`s3/traits.py`). Where there is none, and for parts (whose conditions Ceph 16 passes over), the source is looked at
before and after: parts become an object only when it was the same both times; one request that copied something else is
found out, told, and taken back if the key was free before. Where a server cannot copy a part (Ceph 16 for keys that
have to be encoded), the bytes go through this machine, some MiB at a time. Any thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from html import escape, unescape
from io import FileIO
from pathlib import Path
from urllib.parse import unquote_plus

from datacache.core.concurrency import PerProcess, map_in_threads
from datacache.core.errors import DatacacheError, ObjectNotFoundError, StoreError, StoreUnavailableError
from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.bodies import Body, read_fully
from datacache.store.bucket import Part, Upload
from datacache.store.errors import (
    error_code,
    expect_empty,
    expect_etag,
    expect_same,
    from_status,
    not_s3,
    plain_etag,
    translated,
)
from datacache.store.s3.list import Paging, parse_answer
from datacache.store.s3.requests import LENGTH, S3Requests, quoted_key, to_headers

COPY_LIMIT_BYTES = 5 * 2**30
"""CopyObject and UploadPartCopy take no more (S3's user guide, "Copying, moving, and renaming objects")."""
WHOLE_BYTES = 8 * 2**20
"""Objects up to this size are put in one request."""
PART_BYTES = 16 * 2**20
"""A part is a request and, at the store, a round of records beside its bytes; as obstore and others cut by default."""
MAX_PARTS = 10_000
_COPIED_BYTES = 512 * 2**20
_CARRIED_BYTES = 8 * 2**20
"""Of parts that the store does not copy, and that are in memory on their way."""
_PARTS_AT_A_TIME = 4
_STATUS = {"PreconditionFailed": 412, "NoSuchKey": 404, "NoSuchUpload": 404, "AccessDenied": 403}
_WHOLE = re.compile(rb"(?:</(?:[\w.-]+:)?\w+Result\s*>|<(?:[\w.-]+:)?\w+Result\b[^>]*/>)\s*\Z")
_ETAG = re.compile(rb"<(?:[\w.-]+:)?ETag>([^<]*)<")
_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")
_NONE: Mapping[str, str] = {}


class _Section:
    """A part of an open file, as a body."""

    def __init__(self, file: FileIO, path: Path, start: int, stop: int) -> None:
        self._file, self._path, self._start, self._stop = file, path, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def read_into(self, buffer: memoryview, start: int) -> None:
        with translated(str(self._path)):
            count = read_fully(self._file.fileno(), buffer, self._start + start)
        if count != len(buffer):
            raise StoreError(f"{self._path} has become shorter while it was uploaded", url=str(self._path))


class _NotCopiedError(Exception):
    """The store does not copy parts of this object."""


class S3Uploads:
    """Uploads in parts, and copies, of one bucket: the part of `S3Store` and `S3Bucket` that makes large objects."""

    url: str
    _requests: PerProcess[S3Requests]

    def begin_upload(self, key: str, metadata: Mapping[str, str]) -> str:
        """See `Bucket`."""
        url = f"{self.url}/{key}"
        headers = to_headers(metadata, url)
        _, body = self._requests.get().call("POST", key, (200,), query={"uploads": ""}, headers=headers)
        found = _UPLOAD_ID.search(body)
        if found is None:
            raise StoreError(f"{self.url} begins no upload in parts", url=url)
        return unescape(found[1].decode())

    def put_part(self, key: str, upload: str, number: int, data: bytes | memoryview | Body) -> Part:
        """See `Bucket`. What lies in memory is sent from there."""
        query = {"partNumber": str(number), "uploadId": upload}
        headers, answer = self._requests.get().call("PUT", key, (200,), query=query, body=data)
        expect_empty(answer, f"{self.url}/{key}")
        return Part(number, len(data), expect_etag(headers.get("ETag"), f"{self.url}/{key}"))

    def list_parts(self, key: str, upload: str) -> list[Part]:
        """See `Bucket`."""
        found: dict[int, Part] = {}
        paging = Paging(self.url)
        query = {"uploadId": upload, "max-parts": "1000"}
        while True:
            _, body = self._requests.get().call("GET", key, (200,), query=query)
            root, space = parse_answer(body, self.url, "ListPartsResult")
            items, before = root.findall(f"{space}Part"), max(found, default=0)
            for item in items:
                number, size = (item.findtext(space + tag) or "0" for tag in ("PartNumber", "Size"))
                if not (LENGTH.fullmatch(number) and LENGTH.fullmatch(size)):
                    raise not_s3(self.url)
                if int(number) <= before:  # rclone's server counts anew on each page: what it has more is sent again
                    return [found[number] for number in sorted(found)]
                found[int(number)] = Part(int(number), int(size), plain_etag(item.findtext(f"{space}ETag")))
            marker = root.findtext(f"{space}NextPartNumberMarker") or ""
            if root.findtext(f"{space}IsTruncated") != "true":
                return [found[number] for number in sorted(found)]
            paging.follow(marker)
            paging.count(len(items))
            query["part-number-marker"] = marker

    def _complete(self, key: str, upload: str, parts: Sequence[Part], conditions: Mapping[str, str]) -> str:
        """Make the parts the object; return the ETag the store answers with, '' where it says none. Ceph wants all
        parts named that are there."""
        listed = "".join(
            f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(quoted(part.etag), quote=False)}</ETag></Part>"
            for part in parts
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        query = {"uploadId": upload}
        _, answer = self._requests.get().call("POST", key, (200,), query=query, headers=conditions, body=body)
        return answered_etag(answer, f"{self.url}/{key}", self.url)

    def abort_upload(self, key: str, upload: str) -> None:
        """See `Bucket`. A missing bucket is an error."""
        try:
            _, answer = self._requests.get().call("DELETE", key, (200, 204), query={"uploadId": upload})
            expect_empty(answer, f"{self.url}/{key}")
        except ObjectNotFoundError as exc:
            if not exc.url.endswith(f"/{key}"):
                raise

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """See `Bucket`."""
        query = {"uploads": "", "prefix": prefix}
        encoded, paging = False, Paging(self.url)
        while True:
            _, body = self._requests.get().call("GET", "", (200, 404), query=query)
            if not body or b"<Error>" in body or b"<Error " in body:
                code = error_code(body.decode("utf-8", "replace"))
                if code == "NoSuchUpload":  # what `rclone serve s3` says where there are none at all
                    return
                raise from_status(404, code, self.url, store=self.url)
            try:
                root, space = parse_answer(body, self.url, "ListMultipartUploadsResult")
            except StoreError:
                if encoded:
                    raise
                # A key with a control character is no XML. Not asked for at first: Ceph encodes, and does not say so.
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

    # --- files

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        """See `ObjectStore`. No part is held in memory."""
        url = f"{self.url}/{key}"
        with translated(url):
            file = FileIO(path)
        with file:
            with translated(url):
                size_bytes = os.fstat(file.fileno()).st_size
                data = file.readall() if size_bytes <= WHOLE_BYTES else None
            if data is not None:
                return self._requests.get().put(key, data)

            def put(upload: str, number: int, start: int, stop: int) -> Part:
                return self.put_part(key, upload, number, _Section(file, path, start, stop))

            part_bytes = max(PART_BYTES, -(-size_bytes // MAX_PARTS))
            self._send_parts(key, put, size_bytes=size_bytes, part_bytes=part_bytes)
        # Ceph gives no ETag in the answer, and every store may say only now that something went wrong.
        found = self._requests.get().head(key)
        if found.size_bytes != size_bytes:
            raise StoreError(f"{url} has {found.size_bytes:,} bytes after an upload of {size_bytes:,}", url=url)
        return found

    def _send_parts(
        self,
        key: str,
        make: Callable[[str, int, int, int], Part],
        *,
        size_bytes: int,
        part_bytes: int,
        metadata: Mapping[str, str] = _NONE,
        conditions: Mapping[str, str] = _NONE,
        check: Callable[[], None] = lambda: None,
    ) -> str:
        """Begin an upload, make its parts by `make(upload, number, start, stop)`, some at a time, and complete it,
        after `check`. Return the ETag that the answer says, '' for none. An upload that fails is aborted."""
        upload = self.begin_upload(key, metadata)
        try:
            starts = enumerate(range(0, size_bytes, part_bytes), 1)
            parts = map_in_threads(
                lambda each: make(upload, each[0], each[1], min(each[1] + part_bytes, size_bytes)),
                starts,
                threads=_PARTS_AT_A_TIME,
            )
            made = list(parts)
            check()
            return self._complete(key, upload, made, conditions)
        except BaseException:
            with suppress(DatacacheError):
                self.abort_upload(key, upload)
            raise

    # --- copies

    def _copy_whole(
        self, source: ObjectRef, key: str, headers: Mapping[str, str], *, bound_by: str, was_free: bool
    ) -> str:
        """Copy an object by one CopyObject; return the ETag that the answer says, '' for none. `headers` are the new
        object's metadata and conditions, `bound_by` the header for the source's ETag or ''."""
        bound = {bound_by: quoted(source.etag)} if bound_by and source.etag and not source.version else {}
        watched = not bound and not source.version
        if watched:
            self._expect_source(source)
        _, body = self._requests.get().call(
            "PUT",
            key,
            (200,),
            headers={"x-amz-copy-source": _source(source), "x-amz-metadata-directive": "REPLACE", **headers, **bound},
        )
        etag = answered_etag(body, f"{self.url}/{key}", self.url)
        if watched and etag != source.etag and key != source.key:
            try:
                self._expect_source(source)
            except StoreError:
                if was_free:
                    with suppress(DatacacheError):
                        self._requests.get().delete(key)
                raise
        return etag

    def _copy_in_parts(
        self,
        source: ObjectRef,
        key: str,
        metadata: Mapping[str, str],
        conditions: Mapping[str, str],
        *,
        limit_bytes: int,
    ) -> str:
        """Copy an object by an upload whose parts the store copies, some at once; return as `_copy_whole`."""

        def check() -> None:
            if not source.version:
                self._expect_source(source)

        def copy(upload: str, number: int, start: int, stop: int) -> Part:
            headers = {"x-amz-copy-source": _source(source), "x-amz-copy-source-range": f"bytes={start}-{stop - 1}"}
            if source.etag and not source.version:
                headers["x-amz-copy-source-if-match"] = quoted(source.etag)
            query = {"partNumber": str(number), "uploadId": upload}
            try:
                _, body = self._requests.get().call("PUT", key, (200,), query=query, headers=headers)
            except ObjectNotFoundError as exc:  # the source is there, but Ceph 16 does not decode its key here
                raise _NotCopiedError from exc
            # rclone's server takes the request for a part without bytes, and has nothing to say.
            etag = answered_etag(body, f"{self.url}/{key}", self.url) if body else ""
            if not etag:
                raise _NotCopiedError
            return Part(number, stop - start, etag)

        def carry(upload: str, number: int, start: int, stop: int) -> Part:
            return self.put_part(key, upload, number, self._requests.get().get(source, start, stop)[0])

        def send(make: Callable[[str, int, int, int], Part], part_bytes: int) -> str:
            return self._send_parts(
                key, make, size_bytes=source.size_bytes, part_bytes=part_bytes, metadata=metadata,
                conditions=conditions, check=check,
            )  # fmt: skip

        check()
        smallest = -(-source.size_bytes // MAX_PARTS)
        try:
            return send(copy, min(limit_bytes, max(_COPIED_BYTES, smallest)))
        except _NotCopiedError:
            return send(carry, max(_CARRIED_BYTES, smallest))

    def _expect_source(self, source: ObjectRef) -> None:
        info = self._requests.get().head(source.key)
        expect_same(source, etag=info.etag, size_bytes=info.size_bytes)


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
    return plain_etag(unescape(found[1].decode("utf-8", "replace")).strip())


def quoted(etag: str) -> str:
    """Return an ETag as HTTP writes it."""
    return etag if etag.startswith("W/") else f'"{etag}"'


def _source(source: ObjectRef) -> str:
    path = f"/{source.store.removeprefix('s3://')}/{quoted_key(source.key)}"
    return f"{path}?versionId={quoted_key(source.version)}" if source.version else path


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
