"""How a derived root names the blobs below it, so that garbage collection can follow it without knowing what it is.

A snapshot's manifest has its own root (`codec.decode_root`). Every other root that a catalog keeps beside a snapshot
(`Catalog.derived`: annotation tables, and what may come) is a blob of the caller's own format behind this header, and
all blobs it needs are named in the header:

    magic b"DCT1", count (u32, little-endian), count times 16 bytes (blob ids, in the order the format likes), payload

Whoever marks what is in use decompresses a root and calls `children`; whoever writes one begins with
`encode_children`, and finds its payload again with `payload`. A blob below the root is a leaf: it names no others.
Pure functions, any thread.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from datacache.core.errors import CorruptManifestError
from datacache.manifest.model import BlobId

MAGIC = b"DCT1"
_HEAD = struct.Struct("<4sI")
_ID_BYTES = 16


def encode_children(ids: Sequence[BlobId]) -> bytes:
    """The header of a root that needs these blobs; its payload comes after it."""
    return b"".join([_HEAD.pack(MAGIC, len(ids)), *ids])


def children(raw: bytes) -> list[BlobId]:
    """The blobs that the root with these uncompressed bytes needs. `CorruptManifestError` if it is no such root."""
    end = _payload_at(raw)
    return [BlobId(raw[at : at + _ID_BYTES]) for at in range(_HEAD.size, end, _ID_BYTES)]


def payload(raw: bytes) -> memoryview:
    """What comes after the header, without a copy. `CorruptManifestError` if the bytes are no such root."""
    return memoryview(raw)[_payload_at(raw) :]


def _payload_at(raw: bytes) -> int:
    if raw[:4] != MAGIC:
        raise CorruptManifestError("a derived root has another format", hint="It was made by a newer version.")
    if len(raw) >= _HEAD.size:
        end = _HEAD.size + _ID_BYTES * int(_HEAD.unpack_from(raw)[1])
        if end <= len(raw):
            return end
    raise CorruptManifestError("a derived root is shorter than it says")
