"""Entries, ranges, roots and the record of a snapshot: plain values with small derivations.

Paths are bytes, exactly as the store gives them relative to the snapshot's prefix; rows are their positions in byte
order. A path that ends in '/' is a folder marker: it makes an empty directory visible and does not count as a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NewType

BlobId = NewType("BlobId", bytes)
"""16 bytes: blake2b-128 of a manifest blob's content (uncompressed). Catalogs store blobs under it."""


class Source(NamedTuple):
    """A place where objects lie: an entry without a key of its own is the object `prefix + path` of `store`."""

    store: str
    prefix: str
    content_addressed: bool = False
    """True if the key alone says what the bytes are (the catalog's packs, copies stored under their hash). Then an
    entry's ETag serves to compare versions, and the store is not asked for it."""


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
    """Type and permissions as in st_mode; 0 where they are not known: then it is a file, or with a target a link."""
    target: bytes = b""
    """Where a symbolic link leads, relative and inside of the snapshot. The rest of the entry is that of the file
    there, so a reader that knows no links reads its bytes. A link to a folder has neither bytes nor object."""

    @property
    def is_marker(self) -> bool:
        """Tell whether this is a folder marker, which is no file."""
        return self.path[-1:] == b"/"

    @property
    def is_folder_link(self) -> bool:
        """Tell whether this is a link to a folder, or to nothing: it has no object."""
        return bool(self.target) and not self.etag and not self.size_bytes and self.key is None

    @property
    def has_object(self) -> bool:
        """Tell whether this is a file whose bytes lie in an object."""
        return not self.is_marker and not self.is_folder_link


class RangeInfo(NamedTuple):
    """A range as its root describes it."""

    blob: BlobId
    first_path: bytes
    rows: int


@dataclass(frozen=True, kw_only=True)
class Root:
    """The top of a manifest. Its encoding's hash is the snapshot's id."""

    sources: tuple[Source, ...]
    ranges: tuple[RangeInfo, ...]
    files: int
    """Without markers."""
    markers: int
    total_bytes: int
    hidden: frozenset[bytes] = frozenset()
    """Paths that a directory tree cannot show: a file whose name is also a folder's, and paths with an empty, '.', '..'
    or overlong component. They are in the snapshot and can be read by their exact path."""
    packs: tuple[BlobId, ...] = ()
    """The packs that entries of `PACKS` lie in, sorted: garbage collection need not decode ranges to keep them."""

    @property
    def rows(self) -> int:
        """Return the number of entries, with markers and hidden ones."""
        return self.files + self.markers


class Lineage(NamedTuple):
    """The command that made a snapshot, enough to make it again."""

    command: str
    """`create`, `convert`, `query`, …"""
    parameters: Mapping[str, Any]
    """The options of the command, as JSON."""
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
    """Where they were found: overwriting or deleting one there breaks it."""


@dataclass(frozen=True, kw_only=True)
class SnapshotRecord:
    """A snapshot of a dataset as the catalog records it. The bytes it stands for never change."""

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
    """Limits that a reader should know, such as keys that a mount cannot show."""
    lineage: Lineage | None = None
    held: Held | None = None
    """The way its files are held; None in a record of an older version."""

    @property
    def ref(self) -> str:
        """Return the immutable name `dataset@id`, with the id as short as `dsctl` prints it."""
        return f"{self.dataset}@{self.id[:12]}"

    def _repr_html_(self) -> str:
        from datacache.core.html import html_table

        inputs = self.lineage.inputs if self.lineage else ()
        made = " ".join([self.lineage.command, *inputs]) if self.lineage and inputs else self.origin
        rows = [("files", self.files), ("bytes", self.total_bytes), ("created", self.created_at), ("made from", made)]
        return html_table([*rows, *([("message", self.message)] if self.message else [])], caption=self.ref)


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """A dataset as the catalog records it."""

    name: str
    latest: str
    """Id of the snapshot committed last."""
    tags: dict[str, str]
    """tag → snapshot id."""
