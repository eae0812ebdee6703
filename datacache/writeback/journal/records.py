"""How a `Pending` and an unfinished upload are written into the journal.

Used by the engine only. A header is a short JSON text; a key's bytes, where they lie in the journal at all, are the
record's blob. Records of keys and of uploads share the journal: see `PENDING`. `KEPT` marks the folders that the store
cannot keep: nothing is left to be done for them.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from datacache.core.errors import StagingError
from datacache.writeback.model import Attributes, Content, Logged, Pending, Staged, Stored, logged

PENDING, UPLOAD, KEPT = "", "\0u", "\0k"
"""What the journal's keys begin with. No key of a bucket has a zero byte; those of `Pending` are the same strings in
the journal and in the overlay."""


class UploadState(NamedTuple):
    """An upload in parts that was begun for a version of a key."""

    version: int
    id: str
    """'' while it is being begun."""
    part_bytes: int
    mtime_ns: int = 0
    """What the staged file had when its parts were last known to be of these bytes: it may be overwritten in place
    while nobody watches, also right before the process is killed."""
    size_bytes: int = 0


def encode_pending(pending: Pending) -> bytes:
    """The header of a key's record."""
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
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_pending(key: str, header: bytes, blob_bytes: int) -> Pending:
    """The `Pending` of a record. It is `touched`: whether an earlier process tried to upload it is not known."""
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
    """The header of an upload's record."""
    return json.dumps(state, separators=(",", ":")).encode()


def decode_upload(key: str, header: bytes) -> UploadState:
    """The upload of a record."""
    try:
        return UploadState(*json.loads(header))
    except (ValueError, TypeError) as exc:
        raise StagingError(f"the journal's record of the upload of {key!r} makes no sense") from exc
