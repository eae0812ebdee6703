"""What killed processes leave in a bucket: uploads in parts that nobody will go on with, objects it was tried out on.

A bucket keeps (and bills) the parts of an unfinished upload until told otherwise.
Those that this staging area recorded are gone on with, or taken back, when their key is looked at next, which the
uploader does for each when it starts. Others under the prefix, left by whatever lost its record, are taken back when
they are older than `OLD_S`, in a thread of the uploader, once a day. A bucket that does not let us list them is fine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from datacache.core.errors import DatacacheError
from datacache.store.bucket import PROBE_BYTES, PROBE_PREFIX, Bucket, is_probe

_log = logging.getLogger("datacache.writeback")
OLD_S = 7 * 86_400.0
"""Age of an upload of somebody else's that is taken for forgotten. An upload that takes longer is not known of."""
EVERY_S = 86_400.0


def take_back_old(
    bucket: Bucket, prefix: str, recorded: Callable[[], set[str]], *, stopped: Callable[[], bool], old_s: float = OLD_S
) -> int:
    """Abort the unfinished uploads under a prefix that are older than `old_s` and not in `recorded` (ids): how many.
    Errors are logged."""
    count = 0
    try:
        for upload in bucket.list_uploads(prefix):
            if stopped():
                break
            if upload.started_at < time.time() - old_s and upload.id not in recorded():
                bucket.abort_upload(upload.key, upload.id)
                count += 1
    except DatacacheError as exc:
        _log.info("unfinished uploads under %s/%s cannot be looked for: %s", bucket.url, prefix, exc)
    if count:
        _log.warning(
            "%s/%s: took back %d uploads in parts that were begun more than %.0f days ago and never finished",
            bucket.url, prefix, count, old_s / 86_400,
        )  # fmt: skip
    return count


def remove_probes(bucket: Bucket, prefix: str, *, old_s: float = EVERY_S) -> None:
    """Delete objects that a store was tried out on by a process that was killed then. Errors are logged."""
    try:
        for page in bucket.list(prefix + PROBE_PREFIX):
            for info in page:
                ours = is_probe(info.key[len(prefix) :]) and info.size_bytes <= PROBE_BYTES
                if ours and info.mtime_ns < (time.time() - old_s) * 10**9:
                    bucket.remove(info.key, expect=info.etag)
    except DatacacheError as exc:
        _log.debug("%s/%s: no objects of ours can be looked for: %s", bucket.url, prefix, exc)
