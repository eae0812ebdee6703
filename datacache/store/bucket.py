"""The abilities of a live, read-write bucket beyond `ObjectStore`: folders, metadata, conditions, uploads in parts.

The protocol that `writeback/` writes through. A backend raises only `core.errors`, never retries by itself (the
uploader decides that), and keeps no request open between calls. All calls are safe from several threads.

`expect` says what a write may replace: None anything, `""` nothing (the key must be free), an ETag exactly that object.
Where it is not met the call raises `ObjectChangedError` and has changed nothing. `conditional` says whether the store
checks it in the same step as it writes; where it does not, it is looked at just before the write, and a writer in
between goes unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.bodies import Body

PROBE_PREFIX = ".datacache-probe-"
"""The beginning of names of objects that a store is tried out on. They are deleted at once, unless a kill comes
first."""
PROBE_BYTES = 8
"""The most bytes that they have."""
_PROBE = re.compile(re.escape(PROBE_PREFIX) + "[0-9a-f]{16}")


ABOUT_BYTES = frozenset(("datacache-writer", "mtime"))
"""Metadata that say something of the bytes: they are not given for an object whose bytes were changed in place."""


def is_probe(name: str) -> bool:
    """Tell whether an object that a store is tried out on has such a name."""
    return _PROBE.fullmatch(name) is not None


class FolderPage(NamedTuple):
    """A part of one folder: the objects right in it, and the prefixes (full keys, with their trailing slash) of the
    folders in it. The marker of the folder itself (`prefix`, size 0) is among the objects if there is one."""

    objects: list[ObjectInfo]
    folders: list[str]


class LiveObject(NamedTuple):
    """The store's knowledge of one object. `metadata` has lower-case names without the store's prefix
    (`x-amz-meta-`)."""

    info: ObjectInfo
    metadata: Mapping[str, str]


class Part(NamedTuple):
    """One uploaded part."""

    number: int
    size_bytes: int
    etag: str


class Upload(NamedTuple):
    """An upload in parts that is not finished. `started_at` in seconds since the epoch."""

    key: str
    id: str
    started_at: float


class Bucket(ObjectStore, Protocol):
    """One bucket, read and written."""

    whole_bytes: int
    """Objects up to this size are put in one request. They are in memory then."""
    part_bytes: int
    """The size to cut a larger object into (the last part may be smaller)."""
    max_parts: int
    """How many parts an upload may have; of larger objects the parts are larger."""

    lists_in_pages: bool
    """Tells whether the first page of a large folder costs no more than one of a small folder."""

    def conditional(self) -> bool:
        """Tell whether the store itself checks `expect`. Asked for once a process, on an object of our own that is
        deleted again."""
        ...

    def list_folder(self, prefix: str, *, start_after: str = "") -> Iterator[FolderPage]:
        """Yield what lies in one folder (`""` or ending in `/`), not below it, in pages, in the byte order of the
        names. Nothing there gives no page. `start_after` is a full key or prefix."""
        ...

    def find(self, path: str) -> tuple[ObjectInfo | None, bool]:
        """Return the object whose key is `path` (no trailing slash), and whether a folder of that name is there (any
        key that starts with `path/`). Two requests at most."""
        ...

    def look(self, key: str) -> LiveObject:
        """`head` with the metadata. `ObjectNotFoundError` if it is not there."""
        ...

    def fetch(self, ref: ObjectRef) -> tuple[LiveObject, bytes | memoryview]:
        """Return all bytes of exactly this version, and the same as `look`: one request. Raises as `read`."""
        ...

    def write(
        self, key: str, data: bytes | memoryview, metadata: Mapping[str, str], *, expect: str | None
    ) -> ObjectInfo:
        """Store a whole object of up to `whole_bytes` in one request. The ETag is the new object's."""
        ...

    def begin_upload(self, key: str, metadata: Mapping[str, str]) -> str:
        """Begin an upload in parts and return its id. Nothing can be seen under the key until it is completed."""
        ...

    def put_part(self, key: str, upload: str, number: int, data: bytes | memoryview | Body) -> Part:
        """Store part `number` (from 1). `ObjectNotFoundError` if the upload is not there (any more)."""
        ...

    def list_parts(self, key: str, upload: str) -> list[Part]:
        """Return the parts that are there, by number. `ObjectNotFoundError` if the upload is not there (any more)."""
        ...

    def complete_upload(
        self, key: str, upload: str, parts: Sequence[Part], metadata: Mapping[str, str], *, expect: str | None
    ) -> ObjectInfo:
        """Make the parts the object. `ObjectChangedError` leaves the upload as it was, to be aborted."""
        ...

    def abort_upload(self, key: str, upload: str) -> None:
        """Throw an upload away; one that is not there is fine."""
        ...

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield the unfinished uploads under a prefix."""
        ...

    def copy(self, source: ObjectRef, key: str, metadata: Mapping[str, str], *, expect: str | None) -> ObjectInfo:
        """Make `key` a copy of exactly this version of an object of the same bucket, with this metadata; inside the
        store, of any size. `key` may be the source's own: only the metadata changes then. `ObjectChangedError` if the
        source is another one now, or `expect` is not met; `ObjectNotFoundError` if the source is gone."""
        ...

    def remove(self, key: str, *, expect: str | None) -> None:
        """Delete an object; one that is not there is fine whatever is expected."""
        ...
