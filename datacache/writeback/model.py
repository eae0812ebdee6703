"""Pending changes: one bucket key's difference between what we acknowledged and what the bucket has.

Pure values, their form in the journal and as object metadata; used by all of `writeback` and by `fuse_mount/bucket/fs`.
Keys are relative to the mount's prefix; a folder's key ends in a slash and stands for the marker object of that name.

Attributes travel as object metadata under the names s3fs-fuse uses (`mode`, `uid`, `gid`, `mtime`, `atime`), so each
reads what the other wrote; times are in seconds with a fraction, and rclone reads and writes `mtime` as well. s3fs-fuse
has no name for the number of a device, which is `rdev` here: as the kernel's protocol has it, in 32 bits. Extended
attributes are `xattr`, a URL-encoded JSON object of names and values in base64 (s3fs-fuse, `s3fs_setxattr` in
`src/s3fs.cpp`).
"""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote, unquote

from datacache.core.errors import StagingError

T = TypeVar("T")
WRITER = "datacache-writer"
"""Metadata: `<staging area's id>-<version>-<hash of the key>` of the write an object came from. After a crash it tells
a write of our own that was not recorded any more from somebody else's. Other tools keep it when they edit an object, so
it is believed of versions only that may have been written since the key began to differ (`Pending.after`)."""


LONGEST_XATTRS = 1700
"""Letters of `Attributes.xattrs`: the other metadata have the rest of the 2 KB that S3 has for them."""


def parent_of(key: str) -> str:
    """Return the folder a key lies in: '' or ending in '/'."""
    return key[: key.rstrip("/").rfind("/") + 1]


def name_of(key: str) -> str:
    """Return the last part of a key, with the slash of a folder."""
    return key[key.rstrip("/").rfind("/") + 1 :]


_EMPTY_KINDS = (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK)
"""Types of files that have a name and attributes, and no bytes."""


class Attributes(NamedTuple):
    """The attributes of a file, link or folder. `mode` is all of st_mode, the type included."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    rdev: int = 0
    """Of a device: its number."""
    atime_ns: int | None = None
    """The time of access that somebody set; None: that of modification. Reading sets none."""
    xattrs: str = ""
    """Extended attributes, as `encode_xattrs` has them; '' for none."""

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)

    def to_metadata(self, writer: str = "") -> dict[str, str]:
        """Return the object metadata that says this."""
        found = {"mode": str(self.mode), "uid": str(self.uid), "gid": str(self.gid), "mtime": _seconds(self.mtime_ns)}
        if self.rdev:
            found["rdev"] = str(self.rdev)
        if self.atime_ns is not None:
            found["atime"] = _seconds(self.atime_ns)
        if self.xattrs:
            found["xattr"] = self.xattrs
        return found | {WRITER: writer} if writer else found


def read_attributes(metadata: Mapping[str, str], default: Attributes, size_bytes: int) -> Attributes:
    """Return the attributes that the metadata of an object of this size says; what is missing or makes no sense there
    is the default's. A folder's type is believed only of a folder, a FIFO's, socket's or device's only of an object
    without bytes: nobody could read them."""
    mode = _number(metadata.get("mode"), default.mode)
    kind = stat.S_IFMT(mode)
    known = (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR, *(() if size_bytes else _EMPTY_KINDS))
    if kind not in known or (kind == stat.S_IFDIR) != default.is_folder:
        mode = stat.S_IMODE(mode) | stat.S_IFMT(default.mode)
    is_device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
    return Attributes(
        mode,
        _number(metadata.get("uid"), default.uid),
        _number(metadata.get("gid"), default.gid),
        _time_ns(metadata.get("mtime"), default.mtime_ns),
        _number(metadata.get("rdev"), 0) if is_device else 0,
        _time_ns(metadata.get("atime"), None),
        encode_xattrs(decode_xattrs(metadata.get("xattr", ""))),
    )


def encode_xattrs(xattrs: Mapping[str, bytes]) -> str:
    """Return extended attributes as text, of which there is one for the same attributes; '' for none."""
    if not xattrs:
        return ""
    values = {name: base64.b64encode(xattrs[name]).decode() for name in sorted(xattrs)}
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False)
    return quote(text, errors="surrogateescape")


def decode_xattrs(text: str) -> dict[str, bytes]:
    """Return the extended attributes of a text; none of one that makes no sense."""
    if not text:
        return {}
    try:
        values = json.loads(unquote(text, errors="surrogateescape"))
        return {name: base64.b64decode(value, validate=True) for name, value in values.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _seconds(time_ns: int) -> str:
    return f"{Decimal(time_ns).scaleb(-9):.9f}"


def _number(text: str | None, default: int) -> int:
    found = int(text) if text and text.isascii() and text.isdigit() and len(text) < 12 else default
    return found if found < 2**32 - 1 else default  # all ones: no user, and no group


def _time_ns(text: str | None, default: T) -> int | T:
    if not text or len(text) > 40:
        return default
    try:
        found = int(Decimal(text) * 10**9)
    except (InvalidOperation, ValueError, OverflowError):
        return default
    return found if abs(found) < 10**9 * 2**63 else default


class Logged(NamedTuple):
    """Bytes that lie in the journal, with the record of the key: small files and links."""

    size_bytes: int


@lru_cache(4096)
def logged(size_bytes: int) -> Logged:
    """Return a `Logged`, the same object for the same size: there may be very many small files."""
    return Logged(size_bytes)


class Staged(NamedTuple):
    """Bytes that lie in a numbered file of the staging area."""

    file: int
    size_bytes: int


class Stored(NamedTuple):
    """Bytes that lie in the bucket: under the same key when only attributes changed, after a rename under another."""

    key: str
    size_bytes: int
    etag: str


Content: TypeAlias = Logged | Staged | Stored
_CONTENTS: dict[str, Callable[..., Content]] = {"Logged": logged, "Staged": Staged, "Stored": Stored}


def content_fields(content: Content) -> tuple[Any, ...]:
    """Return content as plain values: the name of its type, and its fields."""
    return (type(content).__name__, *content)


def content_of(fields: tuple[Any, ...]) -> Content:
    """Return the content of such values."""
    kind, *rest = fields
    return _CONTENTS[kind](*rest)


class Pending(NamedTuple):
    """A key's difference from the bucket. Replaced as a whole when it changes."""

    key: str
    attributes: Attributes | None
    """None: it is gone, and the object is to be deleted."""
    content: Content | None
    """None for folders and for what is gone."""
    base: str
    """ETag of the object that the bucket has under this key as far as we know; '' for none."""
    version: int
    """Grows with every change in a staging area; never used twice."""
    since: float
    """When the key began to differ from the bucket, in seconds since the epoch."""
    ready: bool = True
    """False while a new file was neither closed nor synced: nothing of it is to be seen in the bucket."""
    touched: bool = False
    """Tells whether a write may have reached the bucket that `base` does not tell."""
    after: int = 0
    """Versions of the key up to this one cannot be what such a write left: `base` tells of them, or they are older."""
    sent: str = ""
    """MD5 of the bytes that such a write may have left, where the key is to be deleted now: a store may forget the
    metadata that say whose object it is."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of content."""
        return self.content.size_bytes if self.content is not None else 0

    @property
    def upload_bytes(self) -> int:
        """Return the bytes that have to go to the bucket."""
        return 0 if self.content is None or isinstance(self.content, Stored) else self.content.size_bytes


class Claim:
    """One key that is being uploaded. `torn`: bytes that are being uploaded were overwritten or cut off meanwhile."""

    __slots__ = ("pending", "torn")

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.torn = False


class Conflict(NamedTuple):
    """An object that somebody else changed and we changed as well. Nothing was overwritten."""

    key: str
    kept_as: str
    """Key of our version; '' where ours was a deletion, or a rename of what is not there any more."""
    at: float
    """Seconds since the epoch."""
    reason: str


class Failure(NamedTuple):
    """The reason why a key was not uploaded when it was last tried. It will be tried again."""

    key: str
    reason: str
    hint: str
    tries: int
    at: float
    """Seconds since the epoch."""
    retry_at: float


class UploadState(NamedTuple):
    """An upload in parts that was begun for a version of a key."""

    version: int
    id: str
    """'' while it is being begun."""
    part_bytes: int
    mtime_ns: int = 0
    """The staged file's time when its parts were last known to be of these bytes: it may be overwritten in place while
    nobody watches, also right before the process is killed."""
    size_bytes: int = 0


# --- in the journal --------------------------------------------------------------------------------------------------

_encode_json = json.JSONEncoder(separators=(",", ":")).encode
PENDING, UPLOAD, KEPT = "", "\0u", "\0k"
"""The beginnings of the journal's keys. No key of a bucket has a zero byte; those of `Pending` are the same strings in
the journal and in the overlay. `KEPT` marks folders that the store cannot keep: nothing is left to be done for them."""


def encode_pending(pending: Pending) -> bytes:
    """Return the header of a key's record: a short JSON text. The bytes of a `Logged` are the record's blob."""
    content: list[Any] | None = None
    if isinstance(pending.content, Logged):
        content = ["l"]
    elif isinstance(pending.content, Staged):
        content = ["s", pending.content.file, pending.content.size_bytes]
    elif pending.content is not None:
        content = ["b", *pending.content]
    fields = [pending.attributes, content, pending.base, pending.version, round(pending.since, 3), pending.after]
    if pending.sent:
        fields.append(pending.sent)
    return _encode_json(fields).encode()


def decode_pending(key: str, header: bytes, blob_bytes: int) -> Pending:
    """Return the `Pending` of a record. It is `touched`: an earlier process may have tried to upload it."""
    try:
        attributes, content, base, version, since, after, *more = json.loads(header)
        found: Content | None = None
        if content is not None:
            kind, *fields = content
            found = logged(blob_bytes) if kind == "l" else Staged(*fields) if kind == "s" else Stored(*fields)
        kept = Attributes(*attributes) if attributes is not None else None
        sent = str(more[0]) if more else ""
        return Pending(key, kept, found, str(base), int(version), float(since), True, True, int(after), sent)
    except (ValueError, TypeError) as exc:
        raise StagingError(
            f"the journal's record of {key!r} makes no sense", hint="It was written by another version of datacache."
        ) from exc


def encode_upload(state: UploadState) -> bytes:
    """Return the header of an upload's record."""
    return _encode_json(state).encode()


def decode_upload(key: str, header: bytes) -> UploadState:
    """Return the upload of a record."""
    try:
        return UploadState(*json.loads(header))
    except (ValueError, TypeError) as exc:
        raise StagingError(f"the journal's record of the upload of {key!r} makes no sense") from exc
