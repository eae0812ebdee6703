"""What an object is, how it is cut into blocks, and the ids of both.

An object's id is made of what the snapshot recorded about it, so the same object has the same id in every snapshot, on
every node, and an object that changed has another one: a block found under an id can only hold that object's bytes.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, NewType

ObjectId = NewType("ObjectId", bytes)
"""16 bytes, see `object_id`."""

BlockId = NewType("BlockId", bytes)
"""20 bytes: an `ObjectId` and the block's number, big-endian, so that an object's blocks sort together."""

BLOCK_BYTES = 4 * 1024 * 1024
"""Unit of fetching and caching. An object up to this size is one block and is packed into a region."""

GRANULE_BYTES = 128 * 1024
"""Unit of checksumming inside a block: a read verifies only the granules it touches."""


class ObjectRef(NamedTuple):
    """One immutable version of one object, as a snapshot recorded it.

    `store` is scheme and authority (`s3://bucket`, `file://`), `key` all that follows the slash after it (str with
    surrogateescape where the store's bytes are not UTF-8). `etag` and `version` are '' where the store has none.
    """

    store: str
    key: str
    size_bytes: int
    etag: str = ""
    version: str = ""

    @property
    def url(self) -> str:
        """The object's address for messages."""
        return f"{self.store}/{self.key}"


def object_id(ref: ObjectRef) -> ObjectId:
    """The node-independent id of this version of this object."""
    text = f"{ref.store}\0{ref.key}\0{ref.size_bytes}\0{ref.etag}\0{ref.version}"
    return ObjectId(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest())


def block_id(obj: ObjectId, number: int) -> BlockId:
    """The id of block `number` of an object."""
    return BlockId(obj + number.to_bytes(4, "big"))


def block_count(size_bytes: int) -> int:
    """How many blocks an object of this size has. An empty object has none."""
    return -(-size_bytes // BLOCK_BYTES)


def block_length(size_bytes: int, number: int) -> int:
    """Length in bytes of block `number` of an object of this size."""
    return min(BLOCK_BYTES, size_bytes - number * BLOCK_BYTES)
