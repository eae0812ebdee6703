"""The protocol every object store backend implements, and the record a listing yields.

A backend raises only `core.errors` (never the library's own exceptions), never retries by itself
(`store/retry.py` does, by the kind of error) and never puts credentials in a message. All calls are safe
from several threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from datacache.core.ids import ObjectRef
from datacache.store.checksums import Checksum


class ObjectInfo(NamedTuple):
    """One object of a listing. `key` is all that follows `store.url + "/"`, exactly as the store gives it;
    `etag` is without the quotes of HTTP; `version` is known only to `head` and `put`, and only in a
    versioned bucket."""

    key: str
    size_bytes: int
    mtime_ns: int
    etag: str
    version: str = ""
    target: str = ""
    """Of a symbolic link of a file system: where it leads, relative and inside of what was listed. Size, time and ETag
    are those of the file there; a link to a folder has none."""
    at: str = ""
    """The key whose bytes it has, where that is another one."""
    mode: int = 0
    """st_mode, where it was asked for."""

    def ref(self, store_url: str) -> ObjectRef:
        """Return the reference to read this version by."""
        return ObjectRef(store_url, self.key, self.size_bytes, self.etag, self.version)


class ObjectStore(Protocol):
    """All that lies under one scheme and authority: a bucket, a web server, this machine's file system."""

    url: str
    """Scheme and authority, no trailing slash, no credentials: `s3://bucket`, `file://`, `https://host`."""

    node_wide: bool
    """True where another process of the node reaches the same objects (false for `memory://`)."""

    sorted_listing: bool
    """Tells whether `list` gives keys in the byte order of their UTF-8 (`surrogateescape`d bytes as they are)."""

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """Yield pages (never empty ones) of every object whose key starts with `prefix` ('' or ends with '/'),
        streamed.

        A folder marker of an object store keeps its trailing slash; an empty folder of a file system is
        listed as one (`a/`, size 0), but not the folder asked for itself. Where nothing has the prefix there
        is no page, or `ObjectNotFoundError` where the store knows that the bucket or folder is missing.
        `start_after` leaves out the keys up to and including it; only a store with a sorted listing takes
        it.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return what the store knows of one object; `ObjectNotFoundError` if it is not there."""
        ...

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes | memoryview:
        """Return exactly bytes `start` to `stop` of exactly this version: `ObjectChangedError` or
        `ObjectNotFoundError` if it is not there any more, `StoreUnavailableError` for short or broken
        answers. Never other bytes. One call is one request with one timeout, so ask for some MiB at a time.
        An empty range makes no request. An object that is read whole is checked against the checksum that the store
        gives along with it: `ChecksumError` for other bytes.

        Any of the two; a memoryview (read-only, of bytes, the caller's as long as it is kept) saves a copy.
        """
        ...

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        """Return the checksum that the store keeps of all bytes of this version, or the MD5 that its ETag may be; None
        where there is none. At most one request; raises as `read`. For callers that read an object in parts and check
        it themselves: a part cannot be checked."""
        ...

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Store one whole object (small: labels, indexes, demo data)."""
        ...

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        """Store a whole file of any size as one object (shards). The file is read some MiB at a time and must not
        change meanwhile. Nothing can be seen under the key before all of it is there."""
        ...

    def delete(self, key: str) -> None:
        """Delete one object; a missing one is fine."""
        ...

    def close(self) -> None:
        """Give back connections; a later call connects again."""
        ...
