"""Objects, the blocks they are cut into, and the ids of both.

An object's id is made of what the snapshot recorded about it, so the same object has the same id in every snapshot, on
every node, and an object that changed has another one: a block found under an id can only hold that object's bytes.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import NamedTuple, NewType

ObjectId = NewType("ObjectId", bytes)
"""16 bytes, see `object_id`."""

BlockId = NewType("BlockId", bytes)
"""20 bytes: an `ObjectId` and the block's number, big-endian, so that an object's blocks sort together."""

BLOCK_BYTES = 4 * 1024 * 1024
"""Unit of fetching and caching. An object up to this size is one block and is packed into a region."""

MAX_READABLE_BYTES = 2**53
"""The largest object there can be: its blocks can be numbered and its size is exact in JSON, wherever it is read."""

GRANULE_BYTES = 128 * 1024
"""Unit of checksumming inside a block: a read verifies only the granules it touches."""


CONTENT_KEY = re.compile(r"(?:.*/)?([0-9a-f]{2})/([0-9a-f]{30})-(0|[1-9][0-9]*)", re.DOTALL)
"""The key of an object that is stored under the hash of its bytes: the hash in two parts, and the size."""


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
    root: int = -1
    """Of a file of this machine: how long the beginning of the key is that names the folder which the snapshot is of;
    below it no link is followed out of it. 0: the key has no links in it. -1: the file system is trusted."""

    @property
    def url(self) -> str:
        """The object's address for messages."""
        return f"{self.store}/{self.key}"


def names_its_content(ref: ObjectRef) -> bool:
    """Tell whether the key says what the bytes are: `…/` and their xxh3-128 as 2 and 30 hex digits, `-` and their
    number, as copies are stored. Then an ETag adds nothing.
    """
    match = CONTENT_KEY.fullmatch(ref.key)
    return match is not None and int(match[3]) == ref.size_bytes


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
