"""Note what the parts of `BucketFs` change while they change it, for the next server (`kept.py`).

Under the engine's lock. Nodes and open files note themselves when one of their fields is set.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

from datacache.writeback.kept import Keeping

if TYPE_CHECKING:
    from fuse_mount.bucket.fs.open_file import OpenFile
    from fuse_mount.bucket.fs.tree import Node

SIZE, HANDLE, LISTING, TOLD, DONE, ROOT_ATTRIBUTES = (
    "size", "handle", "listing", "told", "done", "root",
)  # fmt: skip
"""Kinds of items. See `kept.py`."""
_MOST_DONE = 2000
"""More than there may be threads that answer requests (`kernel_skin`)."""


class PresentRequest(Protocol):
    """The request that a thread is about to answer."""

    @property
    def unique(self) -> int:
        """The number by which the kernel knows it, without the mark of one that is sent again."""
        ...


class DoneRequest(NamedTuple):
    """The result of a request that must not be done twice."""

    ino: int
    handle: int


class Notes:
    """One mount's notes of one section (see `datacache.writeback.kept`)."""

    def __init__(self, kept: Keeping) -> None:
        self.changed: set[Node | OpenFile] = kept.changed
        """Those with a field that was set."""
        self.items = kept.noted
        """All other changes."""
        self.done: dict[int, DoneRequest] = {}
        """Requests that were done and perhaps not answered, by their numbers."""
        self._thread = threading.local()

    def serve(self, request: PresentRequest) -> None:
        """Note that this thread answers requests, of which this is always the present one."""
        self._thread.request, self._thread.last = request, 0

    def note_done(self, ino: int = 0, handle: int = 0) -> None:
        """Note that what this thread is to answer is done with this section, and with which result. What the thread
        noted before is answered by now."""
        request: PresentRequest | None = getattr(self._thread, "request", None)
        if request is None:
            return
        last, unique = self._thread.last, request.unique
        self.done.pop(last, None)
        self.done[unique] = DoneRequest(ino, handle)
        self.items.append((DONE, unique, ino, handle, last))
        self._thread.last = unique

    def forget_done(self) -> None:
        """Take back what `note_done` has noted of this thread's request: it fails after all."""
        unique = getattr(self._thread, "last", 0)
        if self.done.pop(unique, None) is not None:
            self.items.append((DONE, 0, 0, 0, unique))
            self._thread.last = 0

    def take_done(self, unique: int) -> DoneRequest | None:
        """Return what came of a request that is sent again, if it was done; this thread is to answer it."""
        found = self.done.get(unique)
        if found is not None:
            self._thread.last = unique
        return found

    def restore_done(self, done: dict[int, DoneRequest]) -> None:
        """Take up what an earlier server has done."""
        self.done = dict(list(done.items())[-_MOST_DONE:])
