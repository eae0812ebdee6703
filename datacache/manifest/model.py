"""Entries, ranges, roots and the record of a snapshot: plain values, no behaviour beyond small derivations.

Paths are bytes, exactly as the store gives them relative to the snapshot's prefix; rows are their positions in byte
order. A path ending in '/' is a folder marker: it makes an empty directory visible and is not counted as a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NewType

BlobId = NewType("BlobId", bytes)
"""16 bytes: blake2b-128 of a manifest blob's content (uncompressed). Catalogs store blobs under it."""


class Source(NamedTuple):
    """Where entries' objects lie: an entry without a key of its own is the object `prefix + path` of `store`."""

    store: str
    prefix: str
    content_addressed: bool = False
    """Whether the key alone says what the bytes are (the catalog's packs, copies stored under their hash): then an
    entry's ETag is there to compare versions by, and is not asked of the store."""


PACKS = Source("catalog://packs", "", content_addressed=True)
"""Small new files, many in one blob of the catalog; see `catalog.packs`."""


class Entry(NamedTuple):
    """One file of a snapshot."""

    path: bytes
    size_bytes: int
    mtime_ns: int
    etag: str = ""
    version: str = ""
    source: int = 0
    key: bytes | None = None
    """The object's key in its source's store, where it is not `prefix + path`."""
    mode: int = 0
    """Type and permissions as in st_mode; 0 where they are not known. Then it is a file, or a link if there is a
    target."""
    target: bytes = b""
    """Of a symbolic link: where it leads, relative and inside of the snapshot. The rest of the entry is that of the
    file there, so who knows nothing of links reads its bytes; a link to a folder has neither bytes nor object."""

    @property
    def is_folder_link(self) -> bool:
        """Tell whether it is a link to a folder, or to nothing: there is no object."""
        return bool(self.target) and not self.etag and not self.size_bytes and self.key is None


class RangeInfo(NamedTuple):
    """What a root knows of a range."""

    blob: BlobId
    first_path: bytes
    rows: int


@dataclass(frozen=True, kw_only=True)
class Root:
    """The top of a manifest. Its encoding's hash is the snapshot's id."""

    sources: tuple[Source, ...]
    ranges: tuple[RangeInfo, ...]
    files: int
    """Files, markers not counted."""
    markers: int
    total_bytes: int
    hidden: frozenset[bytes] = frozenset()
    """Paths a directory tree cannot show: a file whose name is also a folder's, and paths with an empty, '.', '..' or
    overlong component. They are in the snapshot and can be read by their exact path."""
    packs: tuple[BlobId, ...] = ()
    """The packs that entries of `PACKS` lie in, sorted: what must be kept is known without decoding a range."""

    @property
    def rows(self) -> int:
        """Entries in all, markers and hidden ones counted."""
        return self.files + self.markers


class Lineage(NamedTuple):
    """How a snapshot was made, enough to make it again."""

    command: str
    """`create`, `convert`, `query`, …"""
    parameters: Mapping[str, Any]
    """What the command was asked for, as JSON."""
    inputs: tuple[str, ...] = ()
    """The snapshots it was made from, as `dataset@id` with the whole id."""


@dataclass(frozen=True, kw_only=True)
class Naming:
    """Name a snapshot that is about to be made."""

    name: str
    """The data set that it becomes the latest version of."""
    tags: Sequence[str] = ()
    move_tags: bool = False
    """Move tags that name another snapshot, instead of `TagExistsError`."""
    replace: bool = False
    """Let it follow a snapshot of another kind, instead of `OtherKindError`."""
    message: str = ""


class Held(NamedTuple):
    """The numbers of a snapshot's files that are held in each way."""

    copied: int = 0
    """In packs, or as copies under the hash of their content: datacache keeps them as long as the snapshot."""
    versioned: int = 0
    """As versions of a bucket, which the bucket keeps as long as its rules say."""
    referenced: int = 0
    """Files held where they were found: who overwrites or deletes one there ends it."""


@dataclass(frozen=True, kw_only=True)
class SnapshotRecord:
    """What the catalog keeps of one snapshot of one dataset. The bytes it stands for never change."""

    dataset: str
    id: str
    """32 hex digits: the root blob's id."""
    created_at: str
    """UTC, ISO 8601 with seconds and 'Z'."""
    origin: str
    """The URL it was listed from."""
    files: int
    total_bytes: int
    message: str = ""
    parent: str | None = None
    """Id of the dataset's latest snapshot when this one was made."""
    warnings: tuple[str, ...] = field(default=())
    """What a reader should know: keys that cannot be shown in a mount, and the like."""
    lineage: Lineage | None = None
    held: Held | None = None
    """The way its files are held; None in a record of an older version."""

    @property
    def ref(self) -> str:
        """The immutable name: `dataset@id`, shortened the way `dsctl` prints it."""
        return f"{self.dataset}@{self.id[:12]}"


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """What the catalog keeps of one dataset."""

    name: str
    latest: str
    """Id of the snapshot committed last."""
    tags: dict[str, str]
    """tag → snapshot id."""
