"""Copies inside an S3 bucket, of exactly one version of an object, with new metadata.

One CopyObject, or parts of the source copied into an upload where it is larger than one request may copy (5 GiB).
A copy is bound to its source by the header that the server is known to heed (`s3/traits.py`). Where there is none, and
for parts (whose conditions Ceph 16 passes over), the source is looked at before and after: parts become an object only
when it was the same both times; one request that copied something else is found out, told, and taken back if the key
was free before. Where a server cannot copy a part (Ceph 16 for keys that have to be encoded), the bytes go through this
machine, some MiB at a time. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from datacache.core.concurrency import map_in_threads
from datacache.core.errors import DatacacheError, ObjectNotFoundError, StoreError
from datacache.core.ids import ObjectRef
from datacache.store.bucket import Part
from datacache.store.errors import expect_same
from datacache.store.s3.multipart import MAX_PARTS, abort, answered_etag, begin, complete, put_part, quoted
from datacache.store.s3.requests import S3Requests, quoted_key

COPY_LIMIT_BYTES = 5 * 2**30
"""CopyObject and UploadPartCopy take no more (S3's user guide, "Copying, moving, and renaming objects")."""
_PART_BYTES = 512 * 2**20
_CARRIED_BYTES = 8 * 2**20
"""Of parts that the store does not copy, and that are in memory on their way."""
_PARTS_AT_A_TIME = 4


def copy_whole(
    requests: S3Requests, source: ObjectRef, key: str, headers: Mapping[str, str], *, bound_by: str, was_free: bool
) -> None:
    """One CopyObject. `headers` are the new object's metadata and conditions, `bound_by` the header for the source's
    ETag or ''."""
    bound = {bound_by: quoted(source.etag)} if bound_by and source.etag and not source.version else {}
    watched = not bound and not source.version
    if watched:
        _expect_source(requests, source)
    _, body = requests.call(
        "PUT",
        key,
        (200,),
        headers={
            "x-amz-copy-source": _source(source),
            "x-amz-metadata-directive": "REPLACE",
            **headers,
            **bound,
        },
    )
    etag = answered_etag(body, f"{source.store}/{key}", source.store)
    if watched and etag != source.etag and key != source.key:
        try:
            _expect_source(requests, source)
        except StoreError:
            if was_free:
                with suppress(DatacacheError):
                    requests.delete(key)
            raise


def copy_in_parts(
    requests: S3Requests,
    source: ObjectRef,
    key: str,
    metadata: Mapping[str, str],
    conditions: Mapping[str, str],
    *,
    limit_bytes: int,
) -> None:
    """An upload whose parts are copied by the store, some at once."""
    if not source.version:
        _expect_source(requests, source)
    copied = min(limit_bytes, max(_PART_BYTES, -(-source.size_bytes // MAX_PARTS)))
    try:
        _upload(requests, source, key, metadata, conditions, part_bytes=copied, make=_copy_part)
    except _NotCopiedError:
        carried = max(_CARRIED_BYTES, -(-source.size_bytes // MAX_PARTS))
        _upload(requests, source, key, metadata, conditions, part_bytes=carried, make=_carry_part)


class _Range(NamedTuple):
    key: str
    upload: str
    number: int
    start: int
    stop: int


class _NotCopiedError(Exception):
    """The store does not copy parts of this object."""


def _upload(
    requests: S3Requests,
    source: ObjectRef,
    key: str,
    metadata: Mapping[str, str],
    conditions: Mapping[str, str],
    *,
    part_bytes: int,
    make: Callable[[S3Requests, ObjectRef, _Range], Part],
) -> None:
    upload = begin(requests, source.store, key, metadata)
    try:
        ranges = (
            _Range(key, upload, number, start, min(start + part_bytes, source.size_bytes))
            for number, start in enumerate(range(0, source.size_bytes, part_bytes), 1)
        )
        made = map_in_threads(lambda part: make(requests, source, part), ranges, threads=_PARTS_AT_A_TIME)
        parts = list(made)
        if not source.version:
            _expect_source(requests, source)
        complete(requests, source.store, key, upload, parts, headers=conditions)
    except BaseException:
        with suppress(DatacacheError):
            abort(requests, key, upload)
        raise


def _copy_part(requests: S3Requests, source: ObjectRef, part: _Range) -> Part:
    headers = {"x-amz-copy-source": _source(source), "x-amz-copy-source-range": f"bytes={part.start}-{part.stop - 1}"}
    if source.etag and not source.version:
        headers["x-amz-copy-source-if-match"] = quoted(source.etag)
    query = {"partNumber": str(part.number), "uploadId": part.upload}
    try:
        _, body = requests.call("PUT", part.key, (200,), query=query, headers=headers)
    except ObjectNotFoundError as exc:  # the source is there, but Ceph 16 does not decode its key here
        raise _NotCopiedError from exc
    # rclone's server takes the request for a part without bytes, and has nothing to say.
    etag = answered_etag(body, f"{source.store}/{part.key}", source.store) if body else ""
    if not etag:
        raise _NotCopiedError
    return Part(part.number, part.stop - part.start, etag)


def _carry_part(requests: S3Requests, source: ObjectRef, part: _Range) -> Part:
    data, _ = requests.get(source, part.start, part.stop)
    return put_part(requests, part.key, part.upload, part.number, data)


def _expect_source(requests: S3Requests, source: ObjectRef) -> None:
    info = requests.head(source.key)
    expect_same(source, etag=info.etag, size_bytes=info.size_bytes)


def _source(source: ObjectRef) -> str:
    path = f"/{source.store.removeprefix('s3://')}/{quoted_key(source.key)}"
    return f"{path}?versionId={quoted_key(source.version)}" if source.version else path
