"""Files to S3: small ones in one request, large ones in parts, some of them at a time (multipart upload).

Part of the S3 backend, over its own requests, so that it works in forked workers, which build shards. An upload becomes
an object with its last request; one that is broken off is aborted, and one whose process is killed leaves parts that
nobody sees and that a lifecycle rule of the bucket takes away (`AbortIncompleteMultipartUpload`). Any thread; no part
is held in memory.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from datacache.core.concurrency import map_in_threads
from datacache.core.errors import DatacacheError, StoreError
from datacache.store.base import ObjectInfo
from datacache.store.bodies import read_fully
from datacache.store.bucket import Part
from datacache.store.errors import from_oserror
from datacache.store.s3.multipart import MAX_PARTS, PART_BYTES, WHOLE_BYTES, abort, begin, complete, put_part
from datacache.store.s3.requests import S3Requests

PARTS_AT_A_TIME = 4


@dataclass(frozen=True)
class _Section:
    """A part of an open file, as a body."""

    fd: int
    path: Path
    number: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def read_into(self, buffer: memoryview, start: int) -> None:
        try:
            count = read_fully(self.fd, buffer, self.start + start)
        except OSError as exc:
            raise _from_oserror(exc, str(self.path)) from exc
        if count != len(buffer):
            raise StoreError(f"{self.path} has become shorter while it was uploaded", url=str(self.path))


def put_file(requests: S3Requests, store_url: str, key: str, path: Path) -> ObjectInfo:
    """See `ObjectStore.put_file`."""
    url = f"{store_url}/{key}"
    try:
        size_bytes = path.stat().st_size
        if size_bytes <= WHOLE_BYTES:
            return requests.put(key, path.read_bytes())
    except OSError as exc:
        raise _from_oserror(exc, url) from exc
    upload = begin(requests, store_url, key)
    try:
        parts = _send_parts(requests, key, path, size_bytes, upload)
        complete(requests, store_url, key, upload, parts)
    except BaseException:
        with suppress(DatacacheError):
            abort(requests, key, upload)
        raise
    # Ceph gives no ETag in the answer, and every store may say only now that something went wrong.
    found = requests.head(key)
    if found.size_bytes != size_bytes:
        raise StoreError(f"{url} has {found.size_bytes:,} bytes after an upload of {size_bytes:,}", url=url)
    return found


def _send_parts(requests: S3Requests, key: str, path: Path, size_bytes: int, upload: str) -> list[Part]:
    part_bytes = max(PART_BYTES, -(-size_bytes // MAX_PARTS))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise _from_oserror(exc, str(path)) from exc
    try:
        sections = (
            _Section(fd, path, number, start, min(start + part_bytes, size_bytes))
            for number, start in enumerate(range(0, size_bytes, part_bytes), 1)
        )
        sent = map_in_threads(
            lambda section: put_part(requests, key, upload, section.number, section), sections, threads=PARTS_AT_A_TIME
        )
        return list(sent)
    finally:
        os.close(fd)


def _from_oserror(exc: OSError, url: str) -> Exception:
    return exc if isinstance(exc, DatacacheError) else from_oserror(exc, url)
