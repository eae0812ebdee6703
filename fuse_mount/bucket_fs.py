"""A live bucket prefix as a directory that can be read and written; knows nothing of FUSE.

Used by `pyfuse3_adapter`, or by any other skin. Calls work on inode numbers and handles and raise `OSError` for what a
file system refuses, `core.errors` for what fails, and `Needs` for what has to be done first: its `load` is to be
called, in a thread, and then the call made again. They take the engine's lock and never wait themselves. Changes of
names (`unlink`, `rename`, `mkdir`, `rmdir`, `symlink`) are durable after a `commit`; what was written, after what
`flush` and `fsync` return was done.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from datacache.store.base import ObjectInfo
from datacache.writeback.conflicts import conflict_key
from datacache.writeback.draft import Draft
from datacache.writeback.model import Attributes, Logged, Pending, Stored
from datacache.writeback.overlay import parent_of
from datacache.writeback.remote import Needs, RemoteFile, RemoteView, change_below
from fuse_mount.bucket_files import OpenFile, OpenFiles, link_attributes
from fuse_mount.bucket_tree import LOCAL, Node, Tree
from fuse_mount.bucket_view import FOLDER_BASE, State, View

if TYPE_CHECKING:
    from datacache.writeback.live import LiveBucket

_log = logging.getLogger("fuse_mount")
LONGEST_NAME = 255
LONGEST_KEY = 1024
"""Bytes, of S3."""
LONGEST_LINK = 4095
_QUICK_COMMIT_S = 0.001
_RECALL_S = 2 * 3600.0
"""How long ago an earlier process may have ended whose knowledge of the bucket is used in an outage."""
_BLOBS_AT_ONCE = 16 * 2**20
"""Bytes in the journal that the renaming of a folder takes along in one record."""
_MOST_NODES = 20_000
"""Files and folders that the kernel may know of before it is asked to forget the oldest ones."""
_TREE_S = 5.0
"""How long the list of what lies below a folder may take to be used for renaming it."""


class Attr(NamedTuple):
    """What stat(2) tells."""

    ino: int
    mode: int
    uid: int
    gid: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    links: int
    complete: bool = True
    """False where more is known only when the name is looked up."""


class DirEntry(NamedTuple):
    """One name of a folder."""

    name: str
    state: State


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What setattr is to change; None: as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    mtime_ns: int | None = None


@dataclass(slots=True)
class Listing:
    """One opendir(3)."""

    ino: int
    entries: list[DirEntry]
    was_read: bool = False


class Handle(NamedTuple):
    """One open(2)."""

    file: OpenFile
    writes: bool


class BucketFs:
    """One mount."""

    def __init__(self, live: LiveBucket, *, uid: int, gid: int, umask: int = 0o022) -> None:
        engine = live.engine
        now = time.time_ns()
        self.live, self.engine = live, engine
        self.ttl_s = live.ttl_s
        self.on_stale: Callable[[int, str], None] = lambda _parent, _name: None
        """Called when the kernel should forget a name (inode number of the folder, name)."""
        folder_attributes = Attributes(stat.S_IFDIR | (0o777 & ~umask), uid, gid, now)
        self.remote = RemoteView(
            engine.bucket,
            engine.prefix,
            engine.lock,
            ttl_s=live.ttl_s,
            file_attributes=Attributes(stat.S_IFREG | (0o666 & ~umask), uid, gid, now),
            folder_attributes=folder_attributes,
            made_here=self._made_here,
        )
        self._root_attributes = folder_attributes
        self._view = View(engine, self.remote)
        self._tree = Tree()
        self._files = OpenFiles(live)
        self._handles: dict[int, Handle] = {}
        self._lists: dict[int, Listing] = {}
        self._next_handle = 1
        self._below: dict[str, tuple[float, dict[str, RemoteFile]]] = {}
        self._in_bucket: set[str] = set()  # folders below which this process has put something into the bucket
        engine.watcher = self
        self._known = engine.area.folder / "known.json"
        with contextlib.suppress(OSError):
            if time.time() - self._known.stat().st_mtime < _RECALL_S:
                self.remote.recall(self._known.read_bytes())

    # --- names ------------------------------------------------------------------------------------------------------

    def lookup(self, parent: int, name: bytes) -> Attr:
        """The file or folder of a name. The kernel will `forget` it."""
        with self.engine.lock:
            folder, text = self._place(parent, name)
            state = self._state(folder, text)
            node = self._node(folder, text, state)
            node.lookups += 1
            self._forget_old()
            return self._attr(node, state)

    def forget(self, ino: int, count: int) -> None:
        """The kernel does not know it any more."""
        with self.engine.lock:
            self._tree.forget(ino, count)

    def _forget_old(self) -> None:
        """The kernel keeps what it was told of for as long as it has memory, and so would we."""
        for node in self._tree.old(_MOST_NODES):
            if node.parent is not None:
                self.on_stale(node.parent.ino, node.name)

    def getattr(self, ino: int) -> Attr:
        """Attributes of a file or folder."""
        with self.engine.lock:
            node = self._tree.get(ino)
            return self._attr(node, self._state_of(node))

    def opendir(self, ino: int) -> int:
        """A handle of what lies in a folder now, in order."""
        with self.engine.lock:
            found = self._entries(self._tree.get(ino))
            handle = self._new_handle()
            self._lists[handle] = Listing(ino, found)
            return handle

    def _entries(self, node: Node) -> list[DirEntry]:
        if self._tree.is_gone(node):
            return []
        key = node.key
        states = [(name, self._view.look(key, name, plain=True)) for name, _ in self._view.names(key)]
        return [DirEntry(name, state) for name, state in states if state is not None]

    def readdir(self, handle: int, start: int) -> list[DirEntry]:
        """Entries from a position on; from the beginning again, what lies in the folder then (rewinddir(3)). For each
        that is taken over `entered` is to be called."""
        with self.engine.lock:
            listing = self._lists[handle]
            if not start and listing.was_read:
                listing.entries = self._entries(self._tree.get(listing.ino))
            listing.was_read = True
            return listing.entries[start:]

    def entered(self, ino: int, entry: DirEntry) -> Attr:
        """The kernel has been told of an entry, and will `forget` it: its attributes with an inode number."""
        with self.engine.lock:
            folder = self._tree.get(ino)
            state = entry.state
            if state.complete or state.content is None or self._tree.child(folder, entry.name) is not None:
                node = self._node(folder, entry.name, state)
            else:
                # The kernel keeps the size and times of a file that it is told first: what is not known for sure is
                # told of an inode that is never looked up.
                node = self._tree.passing()
            node.lookups += 1
            is_written = node.open is not None and node.open.draft is not None
            return self._attr(node, self._state_of(node) if is_written else state)

    def releasedir(self, handle: int) -> None:
        """The handle is not used any more."""
        self._lists.pop(handle, None)

    def readlink(self, ino: int) -> bytes:
        """What a symbolic link points to."""
        with self.engine.lock:
            node = self._tree.get(ino)
            state = self._state_of(node)
            if not state.attributes.is_link:
                raise OSError(errno.EINVAL, "no symbolic link")
            file = node.open or OpenFile(node, state)
            return self._files.read(file, 0, LONGEST_LINK)

    # --- changes of names -------------------------------------------------------------------------------------------

    def create(self, parent: int, name: bytes, flags: int, *, mode: int, uid: int, gid: int) -> tuple[int, Attr]:
        """A new file, open: its handle. It is in the bucket only after it was closed or synced."""
        with self.engine.lock:
            folder, text = self._place(parent, name, new=True)
            key = folder.key + text
            old = self._view.look(folder.key, text)
            if old is not None:
                if flags & os.O_EXCL or old.content is None:
                    raise OSError(errno.EEXIST, "it is there already")
                node = self._node(folder, text, old)
                node.lookups += 1
                try:
                    handle = self.open(node.ino, flags)
                except Needs:
                    node.lookups -= 1
                    raise
                return handle, self._attr(node, self._state_of(node))
            gid = self._inherited_gid(folder, gid)
            attributes = Attributes(stat.S_IFREG | stat.S_IMODE(mode), uid, gid, time.time_ns())
            pending = self.engine.change(key, attributes, Logged(0), base="", ready=False)
            self.engine.record([pending])
            node = self._tree.make(folder, text, is_folder=False)
            node.lookups += 1
            self._forget_old()
            node.cached = LOCAL
            file = node.open = OpenFile(node, State(key, attributes, pending.content, pending.base))
            file.draft = Draft(self.engine, attributes)
            file.draft.changes = 1
            self._touch(folder)
            return self._opened(file, writes=True), self._attr(node, self._state_of(node))

    def mkdir(self, parent: int, name: bytes, *, mode: int, uid: int, gid: int) -> Attr:
        """A new folder."""
        with self.engine.lock:
            folder, text = self._place(parent, name, new=True)
            if self._view.look(folder.key, text, plain=True) is not None:
                raise OSError(errno.EEXIST, "it is there already")
            inherited = self._inherited_gid(folder, gid)
            setgid = stat.S_ISGID if self._attributes(folder).mode & stat.S_ISGID else 0
            mode = stat.S_IFDIR | stat.S_IMODE(mode) | setgid
            attributes = Attributes(mode, uid, inherited, time.time_ns())
            key = f"{folder.key}{text}/"
            self._expect_short(key)
            self.engine.record([self.engine.change(key, attributes, None, base="")])
            node = self._tree.make(folder, text, is_folder=True)
            node.lookups += 1
            self._touch(folder)
            return self._attr(node, self._state_of(node))

    def symlink(self, parent: int, name: bytes, target: bytes, *, uid: int, gid: int) -> Attr:
        """A new symbolic link."""
        with self.engine.lock:
            folder, text = self._place(parent, name, new=True)
            if len(target) > LONGEST_LINK:
                raise OSError(errno.ENAMETOOLONG, "the link's target is too long")
            if self._view.look(folder.key, text, plain=True) is not None:
                raise OSError(errno.EEXIST, "it is there already")
            key = folder.key + text
            attributes = link_attributes(uid, self._inherited_gid(folder, gid))
            pending = self.engine.change(key, attributes, Logged(len(target)), base="")
            self.engine.record([pending], blobs={key: target})
            node = self._tree.make(folder, text, is_folder=False)
            node.lookups += 1
            self._touch(folder)
            return self._attr(node, self._state_of(node))

    def unlink(self, parent: int, name: bytes) -> None:
        """Delete a file. Who has it open goes on reading and writing it."""
        with self.engine.lock:
            folder, text = self._place(parent, name)
            state = self._state(folder, text, plain=True)
            if state.content is None:
                raise OSError(errno.EISDIR, "it is a folder")
            self._detach(folder, text)
            pendings, drop = self.engine.gone(state.key, base=state.base)
            pendings += self._kept_folder(folder.key)
            self.engine.record(pendings, drop=drop)
            self._touch(folder)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Delete an empty folder."""
        with self.engine.lock:
            folder, text = self._place(parent, name)
            state = self._state(folder, text, plain=True)
            if state.content is not None:
                raise OSError(errno.ENOTDIR, "it is a file")
            if self._view.names(state.key):
                raise OSError(errno.ENOTEMPTY, "the folder is not empty")
            pendings, drop = self._gone_folder(state.key, state.base or self._seen_base(folder, text))
            pendings += self._kept_folder(folder.key)
            self.engine.record(pendings, drop=drop)
            node = self._tree.child(folder, text)
            if node is not None:
                self._tree.unname(node)
            self._touch(folder)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """Give a file or folder another name, replacing what has it, in one step."""
        with self.engine.lock:
            folder, text = self._place(parent, name)
            new_folder, new_text = self._place(new_parent, new_name, new=True)
            if flags & ~1:  # RENAME_NOREPLACE is 1; exchanging is not offered
                raise OSError(errno.EINVAL, "these flags are not supported")
            state = self._state(folder, text)
            target = self._view.look(new_folder.key, new_text, plain=True)
            if target is not None and flags & 1:
                raise OSError(errno.EEXIST, "the new name is there already")
            if target is not None and target.key == state.key:
                return
            if state.content is None:
                self._rename_folder(folder, state, new_folder, new_text, target)
            else:
                self._rename_file(folder, state, new_folder, new_text, target)
            node = self._tree.child(folder, text)
            if node is not None:
                node.ctime_ns = time.time_ns()
                self._tree.rename(node, new_folder, new_text)
            else:
                other = self._tree.child(new_folder, new_text)
                if other is not None:
                    self._tree.unname(other)
            self._touch(folder)
            self._touch(new_folder)

    def _rename_file(self, folder: Node, state: State, new_folder: Node, new_text: str, target: State | None) -> None:
        if target is not None and target.content is None:
            raise OSError(errno.EISDIR, "the new name is a folder's")
        node = self._tree.find(state.key)
        if node is not None and node.open is not None and node.open.draft is not None and node.open.draft.dirty:
            file = node.open
            raise Needs(lambda: self._settle(file))
        self._detach(new_folder, new_text)
        new_key = new_folder.key + new_text
        base = target.base if target is not None else ""
        pendings, drop, blobs = self._moved(state.key, state, new_key, base)
        pendings += self._kept_folder(folder.key)
        self.engine.record(pendings, drop=drop, blobs=blobs)
        if node is not None and node.open is not None:
            node.open.base = pendings[0].base
            self._files.set_content(node.open, pendings[0].content or Logged(0))

    def _moved(
        self, key: str, state: State, new_key: str, base: str
    ) -> tuple[list[Pending], list[str], dict[str, bytes]]:
        """What is to be recorded for one object to have another key."""
        moved = self.engine.change(new_key, state.attributes, state.content, base=base)
        blobs = {}
        if isinstance(state.content, Logged) and state.content.size_bytes:
            blobs[new_key] = self.engine.blob(key)
        pendings, drop = self.engine.gone(key, base=state.base)
        return [moved, *pendings], drop, blobs

    def _rename_folder(self, folder: Node, state: State, new_folder: Node, new_text: str, target: State | None) -> None:
        key, new_key = state.key, f"{new_folder.key}{new_text}/"
        if new_key.startswith(key):
            raise OSError(errno.EINVAL, "a folder cannot be moved into itself")
        if target is not None:
            if target.content is not None:
                raise OSError(errno.ENOTDIR, "the new name is a file's")
            if self._view.names(target.key):
                raise OSError(errno.ENOTEMPTY, "the folder of the new name is not empty")
        node = self._tree.find(key)
        inside = self._tree.below(node) if node is not None else []
        unsettled = [n.open for n in inside if n.open is not None and n.open.draft is not None and n.open.draft.dirty]
        if unsettled:
            raise Needs(lambda: self._settle_all(unsettled))
        logged = [p for k in self.engine.overlay.below(key) if (p := self.engine.overlay.get(k)) and _is_logged(p)]
        if sum(pending.size_bytes for pending in logged) > _BLOBS_AT_ONCE:
            raise Needs(lambda: self._spill(logged))
        base = target.base if target is not None else self._seen_base(new_folder, new_text)
        made_here = self._made_here(key)
        taken_at, below = self._below.pop(key, (-1e9, {}))
        if not made_here and taken_at + _TREE_S < time.monotonic():
            raise Needs(lambda: self._look_below(key))
        self._expect_short(new_key)
        pendings, drop, blobs = self._moved_below(key, new_key, {} if made_here else below)
        pendings.append(self.engine.change(new_key, state.attributes, None, base=base))
        gone, dropped = self._gone_folder(key, state.base)
        pendings += gone + self._kept_folder(folder.key)
        self.engine.record(pendings, drop=drop + dropped, blobs=blobs)
        contents = {pending.key: pending for pending in pendings}
        for child in inside:
            if child.open is not None and (moved := contents.get(new_key + child.key[len(key) :])) is not None:
                child.open.base = moved.base
                self._files.set_content(child.open, moved.content or Logged(0))

    def _moved_below(
        self, key: str, new_key: str, remote: dict[str, RemoteFile]
    ) -> tuple[list[Pending], list[str], dict[str, bytes]]:
        pendings: list[Pending] = []
        drops: list[str] = []
        blobs: dict[str, bytes] = {}
        states: dict[str, State] = {}
        for old_key, file in remote.items():
            attributes = file.attributes or self.remote.plain_attributes(file)
            if old_key.endswith("/"):
                states[old_key] = State(old_key, attributes, None, FOLDER_BASE)
            else:
                content = Stored(old_key, file.size_bytes, file.etag)
                states[old_key] = State(old_key, attributes, content, file.etag)
        for old_key in list(self.engine.overlay.below(key)):
            pending = self.engine.overlay.get(old_key)
            states.pop(old_key, None)
            if pending is not None and pending.attributes is not None:
                states[old_key] = State(old_key, pending.attributes, pending.content, pending.base)
        for old_key, state in states.items():
            moved_key = new_key + old_key[len(key) :]
            self._expect_short(moved_key)
            moved, drop, blob = self._moved(old_key, state, moved_key, "")
            old = self.engine.overlay.get(old_key)
            if old is not None and not old.ready:
                moved[0] = replace(moved[0], ready=False)
            pendings += moved
            drops += drop
            blobs |= blob
        return pendings, drops, blobs

    def _spill(self, logged: list[Pending]) -> None:
        """Bring bytes out of the journal into files of their own, the largest first, so that one record can rename the
        keys of all."""
        logged.sort(key=lambda pending: -pending.size_bytes)
        left = sum(pending.size_bytes for pending in logged)
        for pending in logged:
            if left <= _BLOBS_AT_ONCE:
                return
            left -= pending.size_bytes
            self.engine.spill(pending)

    def _gone_folder(self, key: str, base: str) -> tuple[list[Pending], list[str]]:
        """As `WriteBack.gone`, for a folder: it is deleted after all that is still to be deleted below it, or an upload
        that was under way would bring it back to sight."""
        old = self.engine.overlay.get(key)
        if old is not None and (self.engine.overlay.anything_below(key) or key in self._in_bucket):
            gone = replace(old, attributes=None, content=None, base=FOLDER_BASE, version=self.engine.next_version())
            return [gone], []
        return self.engine.gone(key, base=base)

    def _look_below(self, key: str) -> None:
        def take(found: dict[str, RemoteFile]) -> None:
            self._below[key] = (time.monotonic(), found)

        self.remote.below(key, take)

    def _applied(self, key: str, info: ObjectInfo | None, attributes: Attributes | None) -> None:
        """The bucket has something else under a key now."""
        file = self.remote.applied(key, info, attributes)
        for folder, (_, found) in self._below.items():
            change_below(found, folder, key, file)
        if info is not None:
            above = parent_of(key)
            while above and above not in self._in_bucket:
                self._in_bucket.add(above)
                above = parent_of(above)

    # --- attributes -------------------------------------------------------------------------------------------------

    def setattr(self, ino: int, changes: Changes, handle: int | None = None) -> Attr:
        """Change attributes. A size is durable when this returns, unless the caller has the file open (`handle`)."""
        with self.engine.lock:
            node = self._tree.get(ino)
            state = self._state_of(node)
            if changes.size is not None:
                if state.content is None:
                    raise OSError(errno.EISDIR, "it is a folder")
                self._truncate(node, state, changes.size, handle)
                state = self._state_of(node)
            attributes = _changed(state.attributes, changes)
            node.ctime_ns = time.time_ns()
            if changes.mtime_ns is not None:
                node.mtime_ns = 0
            if attributes != state.attributes:
                self._set_attributes(node, state, attributes)
            return self._attr(node, self._state_of(node))

    def _set_attributes(self, node: Node, state: State, attributes: Attributes) -> None:
        if node is self._tree.root:
            self._root_attributes = attributes
            return
        file = node.open
        if file is not None:
            file.attributes = attributes
            if file.draft is not None:
                file.draft.attributes = attributes
                if file.draft.dirty:
                    return  # goes along with the bytes
        if self._tree.is_gone(node):
            return
        old = self.engine.overlay.get(state.key)
        ready = old.ready if old is not None else True
        self.engine.record([self.engine.change(state.key, attributes, state.content, base=state.base, ready=ready)])

    def _truncate(self, node: Node, state: State, size: int, handle: int | None) -> None:
        file = node.open
        opened = self._handles.get(handle) if handle is not None else None
        if opened is not None and handle is not None:
            self._files.truncate(opened.file, size)
            if not opened.writes:  # open(2) with O_TRUNC, for reading: closing it is what acknowledges this
                self._handles[handle] = Handle(opened.file, True)
                opened.file.writers += 1
            return
        draft = file.draft if file is not None else None
        if size != (file.size_bytes if file is not None else state.size_bytes) or (draft is not None and draft.dirty):
            raise Needs(lambda: self._truncate_now(node, size))

    def _truncate_now(self, node: Node, size: int) -> None:
        """truncate(2), without a handle: durable when it returns."""
        with self.engine.lock:
            if node.open is None:
                node.open = OpenFile(node, self._state_of(node))
            file = node.open
            file.handles += 1  # it is not to go meanwhile
        try:
            while True:
                try:
                    with self.engine.lock:
                        self._files.truncate(file, size)
                    break
                except Needs as needs:
                    needs.load()
            self._settle(file)
        finally:
            with self.engine.lock:
                file.handles -= 1
            self._close_if_unused(file)

    def _settle_all(self, files: list[OpenFile]) -> None:
        for file in files:
            self._settle(file)

    def _close_if_unused(self, file: OpenFile) -> None:
        with self.engine.lock:
            if file.handles or file.node.open is not file or not file.io.acquire(blocking=False):
                return  # who has `io` comes here afterwards
            try:
                self._files.discard(file)
            finally:
                file.io.release()
            file.node.open = None
            self._tree.drop(file.node)

    # --- open files -------------------------------------------------------------------------------------------------

    def open(self, ino: int, flags: int) -> int:
        """A handle. What the kernel has kept of the file's bytes is right: other bytes have another inode."""
        with self.engine.lock:
            node = self._tree.get(ino)
            state = self._state_of(node)
            if state.content is None:
                raise OSError(errno.EISDIR, "it is a folder")
            if node.open is None:
                node.open = OpenFile(node, state)
            file = node.open
            truncates = bool(flags & os.O_TRUNC)
            writes = truncates or flags & os.O_ACCMODE != os.O_RDONLY
            if writes and not truncates and isinstance(state.content, Stored) and state.content.key == state.key:
                self.remote.checked(state.key)  # a part of what somebody else has replaced cannot be changed
                state = self._state_of(node)
            if file.draft is None and state.content != file.content:
                self._files.set_content(file, state.content or Logged(0))  # another version by now
                file.base, file.attributes = state.base, state.attributes
            if truncates:
                try:
                    self._files.truncate(file, 0)
                except Needs:
                    if not file.handles:
                        node.open = None
                    raise
            return self._opened(file, writes=writes)

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Bytes of an open file."""
        with self.engine.lock:
            return self._files.read(self._handles[handle].file, offset, size)

    def write(self, handle: int, offset: int, data: bytes) -> int:
        """Write to an open file: how much was written, which is all."""
        with self.engine.lock:
            return self._files.write(self._handles[handle].file, offset, data)

    def spoil(self, handle: int, exc: BaseException) -> None:
        """A write has failed. The kernel has told its writer already that all is well, keeps the bytes, and would not
        write them again: so no close or sync of this open file succeeds from now on, and who opens the name anew gets
        another inode, with what is really here."""
        with self.engine.lock:
            file = self._handles[handle].file
            if file.spoiled is not None:
                return
            file.spoiled = exc
            node = file.node
            if node.parent is None or self._tree.is_gone(node):
                return
            key = node.key
            self.on_stale(node.parent.ino, node.name)
            self._tree.unname(node)
            pending = self.engine.overlay.get(key)
            if pending is not None and not pending.ready:  # a new file, of which nothing is to be kept
                pendings, drop = self.engine.gone(key, base="")
                self.engine.record(pendings, drop=drop)
            _log.error("%s: what was written is lost, and its writer is told at close: %s", key, exc)

    def flush(self, handle: int, *, wait: bool = True) -> Callable[[], None] | None:
        """close(2): what has to be done for all that was written to be acknowledged. It waits for a disk, with `wait`
        for room as well."""
        with self.engine.lock:
            opened = self._handles[handle]
            file = opened.file
            if opened.writes and file.spoiled is not None:
                raise file.spoiled
            dirty = file.draft is not None and file.draft.dirty
            waits = self.engine.ack == "uploaded" and file.ticket > 0
            if not opened.writes or not (dirty or waits or self.engine.unsettled(file.ticket)):
                return None
            return partial(self._settle, file, wait=wait)

    def is_small(self, handle: int) -> bool:
        """Whether an open file's bytes go into the journal."""
        draft = self._handles[handle].file.draft
        return draft is not None and draft.in_memory(0)

    def fsync(self, handle: int) -> Callable[[], None]:
        """fsync(2): the same, and all else that was changed before."""
        with self.engine.lock:
            file = self._handles[handle].file

        def settle() -> None:
            self._settle(file)
            self.commit()

        return settle

    def release(self, handle: int) -> Callable[[], None] | None:
        """The handle is not used any more: what is left to be done, in a thread."""
        with self.engine.lock:
            opened = self._handles.pop(handle)
            file = opened.file
            file.handles -= 1
            file.writers -= opened.writes
            if file.handles or (file.draft is not None and file.draft.dirty and not self._tree.is_gone(file.node)):
                if not file.writers and file.draft is not None and file.draft.dirty:
                    return lambda: self._settle(file)
                return None
            self._close_if_unused(file)
            return None

    def long_open(self, for_s: float | None = None) -> list[tuple[int, Callable[[], None]]]:
        """Inode numbers of files that have been open for writing for a while (None: as long as it is set), and what is
        to be done in a thread for each, after the kernel has written what it has of it."""
        now = time.monotonic()
        for_s = self.live.upload_every_s if for_s is None else for_s
        due: list[tuple[int, Callable[[], None]]] = []
        with self.engine.lock:
            for opened in self._handles.values():
                if opened.writes and opened.file.synced_at + for_s <= now:
                    opened.file.synced_at = now
                    due.append((opened.file.node.ino, partial(self._settle, opened.file)))
        return due

    def remember(self) -> None:
        """Write down what is known of the bucket, for a start while the store cannot be reached. May take long."""
        with self.engine.lock:
            data = self.remote.remembered()
        if data is None:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._known)  # it still is what is known
            return
        beside = self._known.with_suffix(".new")
        beside.write_bytes(data)
        beside.replace(self._known)

    @property
    def is_quick(self) -> bool:
        """Whether the staging area's disk is so fast that handing a sync to another thread costs more than waiting for
        it. (A thread costs some 0.1 ms, most of it with the interpreter's lock.)"""
        return self.engine.commit_s < _QUICK_COMMIT_S and self.engine.ack == "staged"

    def commit(self, *, wait: bool = True) -> None:
        """Return when all changes of names so far are durable. May take long: with `wait`, for room as well."""
        self.engine.commit(wait_s=self.live.staging_wait_s if wait else 0.0)

    def _opened(self, file: OpenFile, *, writes: bool) -> int:
        handle = self._new_handle()
        self._handles[handle] = Handle(file, writes)
        file.handles += 1
        file.writers += writes
        return handle

    def _new_handle(self) -> int:
        self._next_handle += 1
        return self._next_handle

    def _settle(self, file: OpenFile, *, wait: bool = True) -> None:
        """Make what was written to a file durable and pending. Without the lock, and in a thread: with `wait` for room,
        too. It may be called again after any error."""
        if file.spoiled is not None:
            self._close_if_unused(file)
            raise file.spoiled
        try:
            pending = self._stage(file)
        finally:
            self._close_if_unused(file)
        self.engine.commit(file.ticket, wait_s=self.live.staging_wait_s if wait else 0.0)
        if self.engine.ack == "uploaded":
            pending = pending or self.engine.get(self._key_of(file))
            if pending is not None and pending.ready:
                self.live.uploader.wait_for(pending.key, pending.version, None)

    def _key_of(self, file: OpenFile) -> str:
        with self.engine.lock:
            return "" if self._tree.is_gone(file.node) else file.node.key

    def _stage(self, file: OpenFile) -> Pending | None:
        with file.io:
            draft = file.draft
            if draft is None or not draft.dirty:
                return None
            changes = draft.changes
            draft.sync()
            with self.engine.lock:
                if self._tree.is_gone(file.node):
                    return None
                key = file.node.key
                content, blob = draft.content(), draft.blob()
                pending = self.engine.change(key, draft.attributes, content, base=file.base)
                file.ticket = self.engine.record([pending], blobs={key: blob} if blob else {})
                draft.settled_changes = changes
                file.synced_at = time.monotonic()
                file.content, file.attributes = content, draft.attributes
                return pending

    # --- what others did --------------------------------------------------------------------------------------------

    def uploaded(self, pending: Pending, info: ObjectInfo | None) -> None:
        """See `writeback.engine.Watcher`."""
        self._applied(pending.key, info, pending.attributes)
        node = self._tree.find(pending.key)
        if info is None or node is None or node.is_folder:
            return
        now = self.engine.overlay.get(pending.key)
        if now is None or now.content != pending.content:
            return
        if now.version == pending.version or isinstance(now.content, Stored):
            node.cached = info.etag
        file = node.open
        if file is not None:
            file.base = info.etag
            if now.version == pending.version:
                self._files.set_place(file, Stored(pending.key, info.size_bytes, info.etag))

    def moved(self, key: str, new_key: str, theirs: ObjectInfo | None) -> None:
        """See `writeback.engine.Watcher`."""
        node = self._tree.find(key)
        self._applied(key, theirs, None)
        if theirs is None:
            self.remote.expire(parent_of(key))
        if node is None:
            return
        parent, name = node.parent, node.name
        if not new_key and node.open is not None and node.open.writers:
            # What is being written is ours all the same, and is to have a name when it is closed.
            new_key = conflict_key(key, time.time(), self.engine.host, lambda k: self.engine.overlay.get(k) is not None)
            _log.warning("%s is open for writing: what is written goes on as %s", key, new_key)
        if new_key:
            self._tree.rename(node, node.parent or self._tree.root, new_key[len(parent_of(new_key)) :])
            if node.open is not None:
                node.open.base = ""
        else:
            self._tree.unname(node)
        if parent is not None:
            self.on_stale(parent.ino, name)

    # --- within -----------------------------------------------------------------------------------------------------

    def _place(self, parent: int, name: bytes, *, new: bool = False) -> tuple[Node, str]:
        folder = self._tree.get(parent)
        if len(name) > LONGEST_NAME:
            raise OSError(errno.ENAMETOOLONG, "the name is too long")
        if self._tree.is_gone(folder):
            raise OSError(errno.ENOENT, "the folder was deleted")
        text = name.decode("utf-8", "surrogateescape")
        if new and not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise OSError(errno.EILSEQ, "an object's name has to be UTF-8")
        if new:
            self._expect_short(folder.key + text)
        return folder, text

    def _expect_short(self, key: str) -> None:
        if len((self.engine.prefix + key).encode("utf-8", "surrogateescape")) > LONGEST_KEY:
            raise OSError(errno.ENAMETOOLONG, "the path is too long for an object's key")

    def _state(self, folder: Node, name: str, *, plain: bool = False) -> State:
        node = self._tree.child(folder, name)
        if node is not None and node.open is not None and node.open.draft is not None:
            return self._state_of(node)
        state = self._view.look(folder.key, name, plain=plain)
        if state is None:
            raise OSError(errno.ENOENT, "there is nothing of this name")
        return state

    def _state_of(self, node: Node) -> State:
        if node is self._tree.root:
            return State("", self._root_attributes, None, FOLDER_BASE)
        file = node.open
        if file is not None and (file.draft is not None or self._tree.is_gone(node)):
            attributes = file.draft.attributes if file.draft is not None else file.attributes
            pending = None if self._tree.is_gone(node) else self.engine.overlay.get(node.key)
            return State(node.key, attributes, file.content, pending.base if pending is not None else file.base)
        if self._tree.is_gone(node):
            raise OSError(errno.ENOENT, "it was deleted")
        if node.parent is None:
            raise OSError(errno.ENOENT, "it was deleted")
        state = self._view.look(node.parent.key, node.name)
        if state is None or (state.content is None) != node.is_folder:
            raise OSError(errno.ENOENT, "it is not there any more")
        if self._is_another(node, state):
            raise OSError(errno.ESTALE, "it was changed elsewhere")  # the kernel looks the name up again
        return state

    def _node(self, folder: Node, name: str, state: State) -> Node:
        """The node of a name. The kernel keeps an inode's bytes and size for its own, so what somebody else has put
        under the name gets another one."""
        node = self._tree.child(folder, name)
        if node is not None and node.is_folder == (state.content is None) and self._is_another(node, state):
            self._tree.unname(node)
        return self._tree.make(folder, name, is_folder=state.content is None)

    def _is_another(self, node: Node, state: State) -> bool:
        if node.is_folder or (node.open is not None and node.open.draft is not None):
            return False
        if not isinstance(state.content, Stored):
            node.cached = LOCAL
        elif not node.cached:
            node.cached = state.content.etag
        return isinstance(state.content, Stored) and node.cached != state.content.etag

    def _attributes(self, folder: Node) -> Attributes:
        return self._root_attributes if folder is self._tree.root else self._view.folder_attributes(folder.key)

    def _inherited_gid(self, folder: Node, gid: int) -> int:
        attributes = self._attributes(folder)
        return attributes.gid if attributes.mode & stat.S_ISGID else gid

    def _attr(self, node: Node, state: State) -> Attr:
        size = node.open.size_bytes if node.open is not None else state.size_bytes
        kept = state.attributes
        mtime_ns = max(node.mtime_ns, kept.mtime_ns)
        ctime_ns = max(node.ctime_ns, mtime_ns)
        links = 0 if self._tree.is_gone(node) else 1
        return Attr(node.ino, kept.mode, kept.uid, kept.gid, size, mtime_ns, ctime_ns, links, state.complete)

    def _touch(self, folder: Node) -> None:
        """Something in a folder has another name: its times change, in memory only."""
        folder.ctime_ns = folder.mtime_ns = time.time_ns()

    def _detach(self, folder: Node, name: str) -> None:
        """A file is about to lose its name."""
        node = self._tree.child(folder, name)
        if node is None:
            return
        if node.open is not None:
            self._files.keep_readable(node.open)
        self._tree.unname(node)

    def _kept_folder(self, key: str) -> list[Pending]:
        """A folder that would be gone in the bucket with the last object in it is given an object of its own."""
        if self._view.has_marker(key):
            return []
        return [self.engine.change(key, self._view.folder_attributes(key), None, base=FOLDER_BASE)]

    def _made_here(self, folder: str) -> bool:
        """Whether a folder was made through this mount and the bucket cannot have anything in it."""
        pending = self.engine.overlay.get(folder)
        if pending is None or pending.attributes is None or folder in self._in_bucket:
            return False
        return not pending.base and not pending.touched

    def _seen_base(self, folder: Node, name: str) -> str:
        """The base of a folder that is or was here: whether the bucket has anything under its name."""
        _, is_folder = self.remote.entry(folder.key, name)
        return FOLDER_BASE if is_folder else ""


def _is_logged(pending: Pending) -> bool:
    return pending.ready and isinstance(pending.content, Logged)


def _changed(attributes: Attributes, changes: Changes) -> Attributes:
    mode = attributes.mode
    if changes.mode is not None:
        mode = stat.S_IFMT(mode) | stat.S_IMODE(changes.mode)
    return Attributes(
        mode,
        attributes.uid if changes.uid is None else changes.uid,
        attributes.gid if changes.gid is None else changes.gid,
        attributes.mtime_ns if changes.mtime_ns is None else changes.mtime_ns,
    )
