"""Where the bytes of an open file are read from, on a read-write mount.

Used by `bucket_files`. `here` is called under the engine's lock and does not wait; `read` may, without it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from datacache.core.objects import BLOCK_BYTES, ObjectRef, block_id, block_length, object_id
from datacache.writeback.model import Stored

if TYPE_CHECKING:
    from datacache.writeback.live import LiveBucket

QUICK_BYTES = 64 * 1024
"""Up to here a read or write of a local file is done at once, and not in a thread."""


class Reader(Protocol):
    """Where an open file's bytes are read from."""

    def here(self, offset: int, size: int) -> bytes | None:
        """The bytes if they can be had at once."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """The bytes, wherever they are."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class BytesReader:
    """Bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def here(self, offset: int, size: int) -> bytes | None:
        return self._data[offset : offset + size]

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]

    def close(self) -> None:
        pass


class FileReader:
    """A staged file, or a clean copy of an object."""

    def __init__(self, fd: int) -> None:
        self._fd = os.fdopen(fd, "rb", buffering=0)  # closed when the last read in a thread has ended

    def here(self, offset: int, size: int) -> bytes | None:
        return self.read(offset, size) if size <= QUICK_BYTES else None

    def read(self, offset: int, size: int) -> bytes:
        parts = []
        while size > 0 and (part := os.pread(self._fd.fileno(), size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        pass


class StoredReader:
    """An object of the bucket, through the node's cache."""

    def __init__(self, live: LiveBucket, content: Stored) -> None:
        self._blocks = live.blocks
        full = live.engine.prefix + content.key
        self._ref = ObjectRef(live.engine.bucket.url, full, content.size_bytes, content.etag)
        self._id = object_id(self._ref)

    def here(self, offset: int, size: int) -> bytes | None:
        number = offset // BLOCK_BYTES
        start = offset - number * BLOCK_BYTES
        if start + size > block_length(self._ref.size_bytes, number):
            return None
        view = self._blocks.view_here(block_id(self._id, number), start, start + size)
        return bytes(view) if view is not None else None

    def read(self, offset: int, size: int) -> bytes:
        parts = []
        end = min(offset + size, self._ref.size_bytes)
        while offset < end:
            number = offset // BLOCK_BYTES
            first = number * BLOCK_BYTES
            stop = min(end, first + BLOCK_BYTES)
            parts.append(bytes(self._blocks.read(self._ref, number, offset - first, stop - first)))
            offset = stop
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        pass
