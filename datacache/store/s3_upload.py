"""Files to S3: small ones in one request, large ones in parts, some of them at a time (multipart upload).

Part of the S3 backend, over its own requests, so that it works in forked workers, which build shards. An upload becomes
an object with its last request; one that is broken off is aborted, and one whose process is killed leaves parts that
nobody sees and that a lifecycle rule of the bucket takes away (`AbortIncompleteMultipartUpload`). Any thread; memory is
bounded by `PART_BYTES * PARTS_AT_A_TIME` and, beyond 80 GB, by larger parts.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from datacache.core.errors import DatacacheError, StoreError
from datacache.core.threads import map_in_threads
from datacache.store.base import ObjectInfo
from datacache.store.bucket import Part
from datacache.store.errors import from_oserror
from datacache.store.s3_multipart import MAX_PARTS, PART_BYTES, abort, begin, complete, put_part
from datacache.store.s3_requests import S3Requests

PARTS_AT_A_TIME = 4


class _Range(NamedTuple):
    number: int
    start: int
    stop: int


def put_file(requests: S3Requests, store_url: str, key: str, path: Path) -> ObjectInfo:
    """See `ObjectStore.put_file`."""
    url = f"{store_url}/{key}"
    try:
        size_bytes = path.stat().st_size
        if size_bytes <= PART_BYTES:
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

    def send(part: _Range) -> Part:
        try:
            with path.open("rb") as file:
                file.seek(part.start)
                data = file.read(part.stop - part.start)
        except OSError as exc:
            raise _from_oserror(exc, str(path)) from exc
        if len(data) != part.stop - part.start:
            raise StoreError(f"{path} has become shorter while it was uploaded", url=str(path))
        return put_part(requests, key, upload, part.number, data)

    parts = (
        _Range(number, start, min(start + part_bytes, size_bytes))
        for number, start in enumerate(range(0, size_bytes, part_bytes), 1)
    )
    return list(map_in_threads(send, parts, threads=PARTS_AT_A_TIME))


def _from_oserror(exc: OSError, url: str) -> Exception:
    return exc if isinstance(exc, DatacacheError) else from_oserror(exc, url)
