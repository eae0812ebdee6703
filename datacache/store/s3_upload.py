"""Files to S3: small ones in one request, large ones in parts, some of them at a time (multipart upload).

Part of the S3 backend, over its own requests, so that it works in forked workers, which build shards. An upload becomes
an object with its last request; one that is broken off is aborted, and one whose process is killed leaves parts that
nobody sees and that a lifecycle rule of the bucket takes away (`AbortIncompleteMultipartUpload`). Any thread; memory is
bounded by `PART_BYTES * PARTS_AT_A_TIME` and, beyond 160 GB, by larger parts.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape, unescape

from datacache.core.errors import DatacacheError, StoreError, StoreUnavailableError
from datacache.core.threads import map_in_threads
from datacache.store.base import ObjectInfo
from datacache.store.errors import error_code, from_oserror, from_status
from datacache.store.s3_requests import S3Requests

PART_BYTES = 16 * 2**20
PARTS_AT_A_TIME = 4
_MAX_PARTS = 10_000
_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")


class _Part(NamedTuple):
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
    upload = _begin(requests, store_url, key)
    try:
        etags = _send_parts(requests, key, path, size_bytes, upload)
        _complete(requests, store_url, key, upload, etags)
    except BaseException:
        with suppress(DatacacheError):
            requests.call("DELETE", key, (200, 204, 404), query={"uploadId": upload})
        raise
    # Ceph gives no ETag in the answer, and every store may say only now that something went wrong.
    found = requests.head(key)
    if found.size_bytes != size_bytes:
        raise StoreError(f"{url} has {found.size_bytes:,} bytes after an upload of {size_bytes:,}", url=url)
    return found


def _begin(requests: S3Requests, store_url: str, key: str) -> str:
    _, body = requests.call("POST", key, (200,), query={"uploads": ""})
    found = _UPLOAD_ID.search(body)
    if found is None:
        raise StoreError(f"{store_url} begins no upload in parts", url=f"{store_url}/{key}")
    return unescape(found[1].decode())


def _send_parts(requests: S3Requests, key: str, path: Path, size_bytes: int, upload: str) -> list[str]:
    part_bytes = max(PART_BYTES, -(-size_bytes // _MAX_PARTS))

    def send(part: _Part) -> str:
        try:
            with path.open("rb") as file:
                file.seek(part.start)
                data = file.read(part.stop - part.start)
        except OSError as exc:
            raise _from_oserror(exc, str(path)) from exc
        if len(data) != part.stop - part.start:
            raise StoreError(f"{path} has become shorter while it was uploaded", url=str(path))
        query = {"partNumber": str(part.number), "uploadId": upload}
        headers, _ = requests.call("PUT", key, (200,), query=query, body=data)
        return headers.get("ETag", "")

    parts = (
        _Part(number, start, min(start + part_bytes, size_bytes))
        for number, start in enumerate(range(0, size_bytes, part_bytes), 1)
    )
    return list(map_in_threads(send, parts, threads=PARTS_AT_A_TIME))


def _complete(requests: S3Requests, store_url: str, key: str, upload: str, etags: list[str]) -> None:
    listed = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
        for number, etag in enumerate(etags, 1)
    )
    body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
    _, answer = requests.call("POST", key, (200,), query={"uploadId": upload}, body=body)
    code = error_code(answer.decode("utf-8", "replace")) if b"<Error>" in answer else ""
    if code:  # with a status of 200, which was sent before the parts were put together
        error = from_status(500, code, f"{store_url}/{key}", store=store_url)
        raise error if isinstance(error, StoreUnavailableError) else StoreError(error.message, hint=error.hint)


def _from_oserror(exc: OSError, url: str) -> Exception:
    return exc if isinstance(exc, DatacacheError) else from_oserror(exc, url)
