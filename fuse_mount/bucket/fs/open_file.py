"""A file that somebody has open: where its bytes are, what became of its name, and whether it is spoiled.

Part of `BucketFs`, under its lock. `files.py` changes the bytes; the readers here bring those that were acknowledged.
"""

from __future__ import annotations

import enum
import errno
import io
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from datacache.core.ids import BLOCK_BYTES, block_id, block_length, object_id
from datacache.writeback.draft import Draft
from datacache.writeback.live import LiveBucket
from datacache.writeback.model import Attributes, Content, Logged, Stored
from datacache.writeback.sections import Load
from fuse_mount.bucket.fs.view import State

if TYPE_CHECKING:
    from fuse_mount.bucket.fs.tree import Node

_NOTED = frozenset(("attributes", "content", "base", "state", "spoiled", "name"))
"""Fields that the server's successor has to know (`mount_state.py`)."""
QUICK_BYTES = 64 * 1024
"""Up to here a read or write of a local file is done at once, and not in a thread."""


class BytesReader:
    """Bytes in memory. Of a reader, `here` returns what can be had at once, or None; `read` may wait."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]

    here = read


class FileReader:
    """A staged file, or a clean copy of an object."""

    def __init__(self, fd: int) -> None:
        self.file = io.FileIO(fd, "rb")  # closed when the last read in a thread has ended

    def here(self, offset: int, size: int) -> bytes | None:
        return self.read(offset, size) if size <= QUICK_BYTES else None

    def read(self, offset: int, size: int) -> bytes:
        parts = []
        while size > 0 and (part := os.pread(self.file.fileno(), size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class StoredReader:
    """An object of the bucket, through the node's cache."""

    def __init__(self, live: LiveBucket, content: Stored) -> None:
        self._blocks = live.blocks
        self._ref = live.engine.ref(content)
        self._id = object_id(self._ref)

    def here(self, offset: int, size: int) -> bytes | None:
        number = offset // BLOCK_BYTES
        start = offset - number * BLOCK_BYTES
        if start + size > block_length(self._ref.size_bytes, number):
            return None
        view = self._blocks.local.view(block_id(self._id, number), start, start + size)
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


Reader = BytesReader | FileReader | StoredReader


@dataclass(slots=True, eq=False)
class Clean:
    """The state of a file without a draft: its bytes are those of `OpenFile.content`."""

    reader: Reader | None = None
    found: tuple[Content, bytes | int] | None = None
    """The content that was fetched to begin a draft with, and its bytes or the number of a staged file."""
    fetching: threading.Lock = field(default_factory=threading.Lock)
    """Held while it is fetched. Taken before the engine's lock, and never together with `io`."""


class Name(enum.Enum):
    """The name of an open file, as those who write to it have to know."""

    GIVEN = "given"
    NONE_YET = "none yet"
    """Made without one, which it may be given."""
    DELETED = "deleted"
    """Deleted here: bytes that are written to it never get to the bucket, and the one who deleted it knows."""
    REPLACED = "replaced"
    """Somebody else took the name away, while nothing was written here: nothing can be from now on."""


_DELETED, _REPLACED = Name.DELETED, Name.REPLACED


class Spoiled(NamedTuple):
    """A file of which something that the kernel has taken for written is not here: none of it is acknowledged any
    more."""

    why: BaseException
    loss: int = 0
    """The number of the loss in the engine's list; 0 for none."""


@dataclass(slots=True, eq=False)
class OpenFile:
    """A file that somebody has open."""

    node: Node
    attributes: Attributes
    """As they were when it was opened or last changed."""
    content: Content
    """The bytes that were acknowledged last: all there are, unless there is a draft."""
    base: str
    state: Clean | Draft = field(default_factory=Clean)
    name: Name = Name.GIVEN
    spoiled: Spoiled | None = None
    handles: int = 0
    writers: int = 0
    synced_at: float = field(default_factory=time.monotonic)
    """When it was opened, or what was written was last made durable."""
    ticket: int = 0
    """Of the last change that was recorded of it."""
    uncommitted_bytes: int = 0
    """Of those that were settled, as many as the journal does not have yet; none that count as lost."""
    is_cached: bool = False
    """True if the kernel may have read pages of it since it was opened."""
    io: threading.Lock = field(default_factory=threading.Lock)
    """Guards the draft's bytes. Taken before the engine's lock, never the other way round (but for a try that does not
    wait)."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in _NOTED:
            self.node.changed.add(self)

    def note(self) -> None:
        """Keep for the server's successor that the draft has changed."""
        self.node.changed.add(self)

    @classmethod
    def of(cls, node: Node, now: State) -> OpenFile:
        """Return a file that is opened now."""
        return cls(node, now.attributes, now.content or Logged(0), now.base)

    @property
    def draft(self) -> Draft | None:
        """Return the draft, if it is being written."""
        state = self.state
        return state if isinstance(state, Draft) else None

    @property
    def size_bytes(self) -> int:
        """Return how many bytes it has now."""
        state = self.state
        return state.size if isinstance(state, Draft) else self.content.size_bytes

    @property
    def has_no_place(self) -> bool:
        """Return whether what is written never gets to the bucket."""
        return self.name is _DELETED or self.name is _REPLACED

    def expect_current(self) -> None:
        """Raise ESTALE for a file that somebody else has replaced or deleted. Who deleted it here knows that what is
        written then goes with it; these writers do not."""
        if self.name is _REPLACED:
            raise OSError(errno.ESTALE, "it was changed elsewhere", self.node.key)

    def expect_writable(self) -> None:
        """Raise for a file that cannot be written to any more."""
        if self.spoiled is not None:
            raise self.spoiled.why
        self.expect_current()

    def take_io(self) -> None:
        """Take `io`; `Load` where somebody else has it."""
        if not self.io.acquire(blocking=False):
            raise Load(self._wait_for_io)

    def _wait_for_io(self) -> None:
        with self.io:
            pass
