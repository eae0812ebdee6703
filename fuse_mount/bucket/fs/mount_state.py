"""The state of a read-write mount that the next server takes up: nodes, open files, handles, requests that are done.

Part of `BucketFs`, under its lock. The parts note what they change (`Notes`), nodes and open files by themselves when
one of their fields is set, and the log of `writeback.state_log` takes it when a section ends. What is pending is the
engine's to keep. Items, by their first value:

    node, ino, parent, …    a node as it is now (`NodeRow`)
    gone, ino               no node any more
    file, ino, …            an open file as it is now
    closed, ino             nobody has the file open any more
    size, ino, n            the bytes that the draft of a file has, where it is in memory
    handle, n, ino, writes  a handle of an open file; ino 0: it is released
    listing, n, ino         a handle of a folder; ino 0: it is released
    told, n, at, names      names that the kernel was told from a position of a listing on
    done, unique, ino, n, m a request that was done, with its result; the one of number m is answered
    root, attributes        the root's attributes
    next, ino, n, n         the next inode number, handle and listing

How often the kernel was told of a node may be counted too high: entries of a listing that is asked for again are
counted again, and what the kernel forgot may have been read and not counted. Such nodes stay known for good.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from datacache.core.errors import QuotaError, StagingFullError
from datacache.writeback.draft import Draft
from datacache.writeback.model import Attributes, Staged, content_fields, content_of
from datacache.writeback.state_log import Item, StateLog
from fuse_mount.bucket.fs.open_file import Name, OpenFile, Spoiled
from fuse_mount.bucket.fs.tree import FileRow, Node, NodeRow

if TYPE_CHECKING:
    from fuse_mount.bucket.fs.handles import Handles
    from fuse_mount.bucket.fs.names import Names
    from fuse_mount.bucket.fs.nodes import Nodes

SIZE, HANDLE, LISTING, TOLD, DONE, ROOT_ATTRIBUTES = (
    "size", "handle", "listing", "told", "done", "root",
)  # fmt: skip
_NODE, _GONE, _FILE, _CLOSED, _NEXT = "node", "gone", "file", "closed", "next"
_MOST_DONE = 2000
"""More than there may be threads that answer requests (`kernel_skin`)."""


class PresentRequest(Protocol):
    """The request that a thread is about to answer."""

    @property
    def unique(self) -> int:
        """Return the number by which the kernel knows it, without the mark of one that is sent again."""
        ...


class DoneRequest(NamedTuple):
    """The result of a request that must not be done twice."""

    ino: int
    handle: int


class Notes:
    """One mount's notes of one section (see `writeback.state_log`)."""

    def __init__(self, log: StateLog) -> None:
        self.changed: set[Node | OpenFile] = log.changed
        """Those with a field that was set."""
        self.items = log.noted
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


class MountState:
    """One mount's `StateSource` (see `writeback.state_log`)."""

    def __init__(self, nodes: Nodes, handles: Handles, names: Names, notes: Notes) -> None:
        self._nodes, self.tree, self._engine = nodes, nodes.tree, nodes.engine
        self._handles, self._names, self._notes = handles, names, notes
        self._open: set[int] = set()  # inodes of files that the successor would find open

    # --- keeping -----------------------------------------------------------------------------------------------------

    def describe(self, changed: set[Node | OpenFile]) -> list[Item]:
        """See `writeback.state_log.StateSource`."""
        items: list[Item] = []
        for each in changed:
            if isinstance(each, OpenFile):
                if each.node.open is each:
                    items.append(self._file_item(each))
                continue
            items.append(_node_item(each) if each.ino in self.tree else (_GONE, each.ino))
            if each.open is None and each.ino in self._open:
                self._open.discard(each.ino)
                items.append((_CLOSED, each.ino))
        return items

    def everything(self) -> Iterator[Item]:
        """See `writeback.state_log.StateSource`."""
        self._open.clear()
        yield _NEXT, self.tree.next_ino, self._handles.next_handle, self._names.next_listing
        for node in self.tree:
            yield _node_item(node)
            if node.open is not None:
                yield self._file_item(node.open)
        yield from self._handles.everything()
        yield from self._names.everything()
        for unique, done in self._notes.done.items():
            yield DONE, unique, done.ino, done.handle, 0

    def _file_item(self, file: OpenFile) -> Item:
        draft, spoiled = file.draft, None
        slot = draft.slot if draft is not None else None  # a thread may be bringing it to a file this moment
        staged = draft.content() if draft is not None and slot is None else None
        if file.spoiled is not None:
            why = file.spoiled.why
            is_full = isinstance(why, StagingFullError | QuotaError)
            number = getattr(why, "errno", None) or (errno.ENOSPC if is_full else errno.EIO)
            spoiled = (number, str(why))
        self._open.add(file.node.ino)
        return (
            _FILE,
            file.node.ino,
            *FileRow(
                tuple(draft.attributes if draft is not None else file.attributes),
                content_fields(file.content),
                file.base,
                staged.file if isinstance(staged, Staged) else None,
                slot.number if slot is not None else None,
                draft.size if draft is not None and slot is not None else 0,
                draft is not None and draft.dirty,
                file.name.value,
                spoiled,
            ),
        )

    # --- taking up ---------------------------------------------------------------------------------------------------

    def restore(self) -> list[Callable[[], None]]:
        """Take up what an earlier server has left, if there was one, and keep it from now on; return what is left to be
        done, without the lock."""
        kept = self._engine.kept
        left = self._restore(LeftState(kept.items()))
        self._engine.end_taking_up()
        kept.watch(self)
        kept.begin_anew()
        return left

    def _restore(self, found: LeftState) -> list[Callable[[], None]]:
        if not found.nodes:
            return []
        next_ino, next_handle, next_listing = found.next
        self.tree.restore(found.nodes, next_ino)
        if found.root is not None:
            self._nodes.root_attributes = found.root
        for ino, row in found.files.items():
            self._restore_file(self.tree.get(ino), row)
        left = self._handles.restore(found.handles, next_handle)
        self._names.restore(found.listings, next_listing)
        self._notes.restore_done(found.done)
        for node in list(self.tree):
            self.tree.rest(node)
        return left

    def _restore_file(self, node: Node, row: FileRow) -> None:
        engine, files = self._engine, self._nodes.files
        file = node.open = OpenFile(node, Attributes(*row.attributes), content_of(row.content), row.base)
        file.is_cached = True
        file.name = Name(row.name_state)
        if row.spoiled is not None:
            file.spoiled = Spoiled(OSError(*row.spoiled))
        file.ticket = engine.last_ticket
        if row.staged is not None:
            draft = Draft.of_staged(engine, file.attributes, row.staged)
        elif row.slot is not None:
            draft = Draft(engine, file.attributes, engine.kept.slots.take_up(row.slot), row.size_bytes)
        else:
            return
        draft.changes = int(row.is_dirty)
        draft.unsettled_bytes = draft.size if row.is_dirty else 0
        file.state = draft
        files.charge(file, draft.size)


class ListingRow(NamedTuple):
    """A listing that the next server gets."""

    ino: int
    told: dict[int, str]
    """See `Listing`."""


class LeftState:
    """All items that were kept, put together."""

    def __init__(self, items: Iterator[Item]) -> None:
        self.nodes: dict[int, NodeRow] = {}
        self.files: dict[int, FileRow] = {}
        self.handles: dict[int, tuple[int, bool]] = {}
        self.listings: dict[int, ListingRow] = {}
        self.done: dict[int, DoneRequest] = {}
        self.root: Attributes | None = None
        self.next = (0, 0, 0)
        take: dict[str, Callable[..., None]] = {
            _NODE: self._node, _GONE: self._gone, _FILE: self._file, _CLOSED: self._closed, SIZE: self._size,
            HANDLE: self._handle, LISTING: self._listing, TOLD: self._told, DONE: self._done,
            ROOT_ATTRIBUTES: self._root, _NEXT: self._next,
        }  # fmt: skip
        for kind, *fields in items:
            if kind in take:  # others are the engine's
                take[kind](*fields)

    def _node(self, ino: int, *row: Any) -> None:
        self.nodes[ino] = NodeRow(*row)
        self.next = (max(self.next[0], ino + 1), *self.next[1:])

    def _gone(self, ino: int) -> None:
        self.nodes.pop(ino, None)

    def _file(self, ino: int, *fields: Any) -> None:
        self.files[ino] = FileRow(*fields)

    def _size(self, ino: int, size_bytes: int) -> None:
        self.files[ino] = self.files[ino]._replace(size_bytes=size_bytes)

    def _closed(self, ino: int) -> None:
        self.files.pop(ino, None)

    def _handle(self, number: int, ino: int, writes: bool) -> None:
        if ino:
            self.handles[number] = ino, writes
            self.next = self.next[0], max(self.next[1], number + 1), self.next[2]
        else:
            self.handles.pop(number, None)

    def _listing(self, number: int, ino: int) -> None:
        if ino:
            self.listings[number] = ListingRow(ino, {})
            self.next = (*self.next[:2], max(self.next[2], number + 1))
        else:
            self.listings.pop(number, None)

    def _told(self, number: int, start: int, names: list[str]) -> None:
        if number in self.listings:
            self.listings[number].told.update(enumerate(names, start + 1))

    def _done(self, unique: int, ino: int, handle: int, answered: int) -> None:
        self.done.pop(answered, None)
        if unique:
            self.done[unique] = DoneRequest(ino, handle)

    def _root(self, attributes: tuple[Any, ...]) -> None:
        self.root = Attributes(*attributes)

    def _next(self, ino: int, handle: int, listing: int) -> None:
        self.next = ino, handle, listing


def _node_item(node: Node) -> Item:
    parent = node.parent.ino if node.parent is not None else 0
    times = node.ctime_ns, node.mtime_ns
    return _NODE, node.ino, parent, node.name, node.is_folder, node.lookups, *times, node.is_gone, node.cached
