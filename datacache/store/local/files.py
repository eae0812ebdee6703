"""What `file://` buckets do with single files: metadata in an extended attribute, whole writes, durable names.

Used by `local/bucket.py` and `local/bucket.py`. Pure functions, any thread.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from datacache.core.errors import DatacacheError, StoreError
from datacache.store.bucket import ABOUT_BYTES
from datacache.store.errors import from_oserror
from datacache.store.local.walk import etag_of

_ATTRIBUTE = "user.datacache.metadata"
_OF = ""
"""Beside the metadata: the ETag of the file they were written for. Who edits a file in place keeps its attributes."""
_ROUNDS = 3


@contextmanager
def translated(url: str) -> Iterator[None]:
    """System calls' errors inside become errors of ours."""
    try:
        yield
    except DatacacheError:  # such as one of reading what is to be stored
        raise
    except OSError as exc:
        raise from_oserror(exc, url) from exc


def get_metadata(path: bytes, etag: str, url: str) -> dict[str, str]:
    """The metadata of a file or folder with this ETag, without what was said of other bytes; none where the file system
    has no such attributes."""
    with translated(url):
        try:
            found = json.loads(os.getxattr(path, _ATTRIBUTE))
        except ValueError:
            return {}
        except OSError as exc:
            if exc.errno in (errno.ENODATA, errno.ENOTSUP, errno.EOPNOTSUPP):
                return {}
            raise
    if not isinstance(found, dict):
        return {}
    fits = found.pop(_OF, "") == etag
    return {str(name): str(value) for name, value in found.items() if fits or name not in ABOUT_BYTES}


def set_metadata(path: bytes | int, metadata: Mapping[str, str], etag: str, url: str) -> None:
    """Replace all metadata. The ETag is that of the file or folder they are of."""
    with translated(url):
        try:
            if metadata:
                os.setxattr(path, _ATTRIBUTE, json.dumps({**metadata, _OF: etag}).encode())
            else:
                os.removexattr(path, _ATTRIBUTE)
        except OSError as exc:
            if not metadata and exc.errno in (errno.ENODATA, errno.ENOTSUP, errno.EOPNOTSUPP):
                return
            if exc.errno in (errno.ENOTSUP, errno.EOPNOTSUPP):
                raise StoreError(
                    f"{url}: the file system keeps no extended attributes, so no mode, owner and time",
                    url=url,
                    hint="Use a folder on a file system with user attributes (ext4, XFS, CephFS, NFS 4.2).",
                ) from exc
            raise


def settle(fd: int, metadata: Mapping[str, str], url: str) -> os.stat_result:
    """Make a file that is written durable, with its metadata: what it is then."""
    found = os.fstat(fd)
    for _ in range(_ROUNDS):
        before = etag_of(found)
        set_metadata(fd, metadata, before, url)
        os.fsync(fd)
        found = os.fstat(fd)  # over a network its time may be another one now
        if etag_of(found) == before:
            break
    return found
