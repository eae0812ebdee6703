"""What `file://` buckets do with single files: metadata in an extended attribute, whole writes, durable names.

Used by `local_bucket.py` and `local_uploads.py`. Pure functions, any thread.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from datacache.core.errors import StoreError
from datacache.store.errors import from_oserror

_ATTRIBUTE = "user.datacache.metadata"


@contextmanager
def translated(url: str) -> Iterator[None]:
    """System calls' errors inside become errors of ours."""
    try:
        yield
    except StoreError:
        raise
    except OSError as exc:
        raise from_oserror(exc, url) from exc


def get_metadata(path: bytes, url: str) -> dict[str, str]:
    """The metadata of a file or folder; none where the file system has no such attributes."""
    with translated(url):
        try:
            found = json.loads(os.getxattr(path, _ATTRIBUTE))
        except ValueError:
            return {}
        except OSError as exc:
            if exc.errno in (errno.ENODATA, errno.ENOTSUP, errno.EOPNOTSUPP):
                return {}
            raise
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def set_metadata(path: bytes, metadata: Mapping[str, str], url: str) -> None:
    """Replace all metadata."""
    with translated(url):
        try:
            if metadata:
                os.setxattr(path, _ATTRIBUTE, json.dumps(dict(metadata)).encode())
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


def write_all(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write at an offset, however many calls it takes."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, at)
        rest, at = rest[count:], at + count


def sync_folder(path: bytes) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
