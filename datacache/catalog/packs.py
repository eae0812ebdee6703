"""Packs: many small new files (labels, `data.yaml`) one after the other in one blob of the catalog.

Whatever makes snapshots with new small files uses `PackWriter`; readers of objects use `PackStore`, one of the stores
that `stores_with_packs` gives. An entry of `PACKS` names its bytes by the pack's id, the offset in it and its size, so
the key alone says what the bytes are. A writer is for one thread. A store is safe from several threads and after
`fork()` (a child starts with no pack held; `load_blobs` decides about connections).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from xxhash import xxh3_128_hexdigest

from datacache.core.concurrency import LastLoaded, PerProcess
from datacache.core.errors import CorruptManifestError, ObjectNotFoundError, UsageError
from datacache.core.ids import ObjectRef
from datacache.manifest import codec
from datacache.manifest.builder import PutBlobs
from datacache.manifest.model import PACKS, BlobId
from datacache.manifest.reader import LoadBlobs
from datacache.settings import Settings
from datacache.store.base import ObjectInfo
from datacache.store.checksums import Checksum
from datacache.store.credentials import Environments
from datacache.store.open import Stores
from datacache.store.sources import source_rules

PACK_BYTES = 2**20
"""A pack of this size is full: small enough that a random read of one label is not a read of the whole set, large
enough that 100,000 labels are some twenty blobs."""
MAX_FILE_BYTES = 8 * 2**20
"""The largest file a pack takes: with it a pack is well below the 16 MiB of a MongoDB document."""

_HELD_BYTES = 32 * 2**20
_KEY = re.compile(r"([0-9a-f]{32})/(0|[1-9][0-9]{0,8})")


def pack_key(pack: BlobId, offset: int) -> bytes:
    """Return the key of the entry whose bytes begin at `offset` of a pack."""
    return b"%s/%d" % (pack.hex().encode(), offset)


def parse_pack_key(key: str) -> tuple[BlobId, int] | None:
    """Return the pack and the offset of a key that `pack_key` made; None for another key."""
    match = _KEY.fullmatch(key)
    return None if match is None else (BlobId(bytes.fromhex(match[1])), int(match[2]))


def stores_with_packs(settings: Settings, load_blobs: LoadBlobs, *, environments: Environments | None = None) -> Stores:
    """Return the stores from which snapshots' objects are read: those that the setting `sources` allows, and the packs
    of a catalog."""
    own = {PACKS.store: lambda: PackStore(load_blobs)}
    return Stores(settings, own=own, rules=source_rules(settings), environments=environments)


def content_etag(data: bytes) -> str:
    """Return the ETag in an entry of content-addressed bytes: 32 hex digits, xxh3-128."""
    return xxh3_128_hexdigest(data)


class PackWriter:
    """Collects files into one pack after the other.

    The content of a pack depends only on its files and on when the caller closes it. A caller that closes where the
    paths say so (`manifest.codec.ends_range`) gets the same packs again for unchanged files."""

    def __init__(self, put_blobs: PutBlobs) -> None:
        self._put_blobs = put_blobs
        self._parts: list[bytes] = []
        self.size_bytes = 0
        """Of the open pack."""

    @property
    def full(self) -> bool:
        """Tell whether the open pack should be closed before more is added."""
        return self.size_bytes >= PACK_BYTES

    def add(self, data: bytes) -> int:
        """Append a file to the open pack, and return its offset. Raise `UsageError` if the file or the pack is too
        large."""
        if len(data) > MAX_FILE_BYTES or self.size_bytes + len(data) > MAX_FILE_BYTES + PACK_BYTES:
            raise UsageError(
                f"a file of {len(data):,} bytes is too large for a pack of {self.size_bytes:,} bytes",
                hint="Large files go to the storage of objects; a full pack must be closed.",
            )
        offset = self.size_bytes
        self._parts.append(data)
        self.size_bytes += len(data)
        return offset

    def close(self) -> BlobId:
        """Put the open pack into the catalog, begin the next one, and return the id."""
        raw = b"".join(self._parts)
        self._parts, self.size_bytes = [], 0
        id = codec.blob_id(raw)
        self._put_blobs([(id, codec.compress(raw))])
        return id


class PackStore:
    """The catalog's packs as an `ObjectStore`, for reading. Raises the catalog's errors, too.

    It holds the packs read last decompressed (`held_bytes`), so reading the labels of a snapshot in any order
    decompresses each pack about once.
    """

    url = PACKS.store
    node_wide = True
    sorted_listing = True

    def __init__(self, load_blobs: LoadBlobs, *, held_bytes: int = _HELD_BYTES) -> None:
        self._load_blobs = load_blobs
        self._packs = PerProcess(lambda: LastLoaded[BlobId, bytes](held_bytes))

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes:
        """See `ObjectStore`. Raise `CorruptManifestError` for a pack that the catalog lacks, or that is too short."""
        if start >= stop:
            return b""
        parsed = parse_pack_key(ref.key)
        if parsed is None:
            raise _not_found(ref.key)
        pack, offset = parsed
        raw = self._packs.get().get(pack, lambda: self._load(pack))
        if offset + ref.size_bytes > len(raw) or stop > ref.size_bytes or start < 0:
            raise CorruptManifestError(
                f"bytes {offset + start} to {offset + max(stop, ref.size_bytes)} are asked of the pack {pack.hex()}, "
                f"which has {len(raw)}"
            )
        return raw[offset + start : offset + stop]

    def _load(self, pack: BlobId) -> bytes:
        stored = self._load_blobs([pack]).get(pack)
        if stored is None:
            raise CorruptManifestError(
                f"the pack {pack.hex()} is missing from the catalog",
                hint="Make the snapshot again by the command that made it.",
            )
        return codec.decompress(stored, pack)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """Refuse: files in packs are found through the snapshots that have them."""
        raise _read_only()

    def head(self, key: str) -> NoReturn:
        """Refuse: only an entry says how long an object in a pack is."""
        raise _not_found(key)

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        return None

    def put(self, key: str, data: bytes) -> NoReturn:
        raise _read_only()

    def put_file(self, key: str, path: Path) -> NoReturn:
        raise _read_only()

    def delete(self, key: str) -> None:
        raise _read_only()

    def close(self) -> None:
        self._packs.take()


def _not_found(key: str) -> ObjectNotFoundError:
    return ObjectNotFoundError(f"{PACKS.store}/{key} is not there", url=f"{PACKS.store}/{key}")


def _read_only() -> UsageError:
    return UsageError(f"{PACKS.store} can only be read")
