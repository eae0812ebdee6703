"""Names and attributes in a read-write mount: looking them up, listing them, changing them.

Part of `BucketFs`; takes its lock itself, and never waits (see `writeback.sections`). Changes of names are durable
after a commit; a folder is renamed with all that lies below it in one record.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from datacache.writeback.draft import Draft
from datacache.writeback.model import (
    LONGEST_XATTRS,
    Attributes,
    Logged,
    Pending,
    Stored,
    decode_xattrs,
    encode_xattrs,
)
from datacache.writeback.remote.known import RemoteFile
from datacache.writeback.sections import Defer, Load, complete
from datacache.writeback.state_log import Item
from fuse_mount.bucket.fs.handles import Handles
from fuse_mount.bucket.fs.mount_state import LISTING, ROOT_ATTRIBUTES, TOLD, ListingRow, Notes
from fuse_mount.bucket.fs.nodes import Attr, Nodes
from fuse_mount.bucket.fs.open_file import Name, OpenFile
from fuse_mount.bucket.fs.tree import LOCAL, Node
from fuse_mount.bucket.fs.view import FOLDER_BASE, State

LONGEST_LINK = 4095
_NO_REPLACE, _EXCHANGE = 1, 2
"""Flags of renameat2(2) (include/uapi/linux/fs.h)."""
_USER = "user."
_BLOBS_AT_ONCE = 16 * 2**20
"""Bytes in the journal that the renaming of a folder takes along in one record."""


class Changes(NamedTuple):
    """The changes that setattr is to make; None: as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    ctime_ns: int | None = None
    """When the kernel saw the change; None: now. With its write-back cache it tells us late of what it has changed."""
    written_by: tuple[int, int] | None = None
    """User and group of whoever writes to a file, or gives it away, so that it loses set-user-ID and set-group-ID."""
    xattrs: str | None = None
    """As `Attributes.xattrs`."""


class DirEntry(NamedTuple):
    """One name of a folder."""

    name: str
    state: State


@dataclass(slots=True)
class Listing:
    """One opendir(3)."""

    ino: int
    entries: list[DirEntry] | None = None
    """None before they are read, also where an earlier server has listed them: what is listed then comes after what the
    kernel was told."""
    was_read: bool = False
    is_fresh: bool = False
    """True while the request is answered that has read them. What somebody changes meanwhile, the kernel knows better
    than the answer."""
    told: dict[int, str] = field(default_factory=dict)
    """The names that the kernel was told, by the position behind each."""
    skipped: int = 0
    """The position of the first of `entries`."""


@dataclass(frozen=True)
class _Move:
    """The records by which an object gets another key; the first of `pendings` is the new key's."""

    pendings: list[Pending]
    drop: list[str]
    blobs: dict[str, bytes]


class Names:
    """One mount's names."""

    def __init__(self, nodes: Nodes, handles: Handles, notes: Notes) -> None:
        self._nodes, self._handles, self._view, self._tree, self._files = (
            nodes,
            handles,
            nodes.view,
            nodes.tree,
            nodes.files,
        )
        self._engine, self._usage, self._remote = nodes.engine, nodes.engine.usage, nodes.view.remote
        self._notes = notes
        self._listings: dict[int, Listing] = {}
        self._next = 1

    # --- a server's successor ----------------------------------------------------------------------------------------

    def everything(self) -> Iterator[Item]:
        """Yield all listings, as they are noted. Under the lock."""
        yield ROOT_ATTRIBUTES, tuple(self._nodes.root_attributes)
        for handle, listing in self._listings.items():
            yield LISTING, handle, listing.ino
            for position, name in listing.told.items():
                yield TOLD, handle, position - 1, [name]

    @property
    def next_listing(self) -> int:
        """Return the handle of the next listing."""
        return self._next

    def restore(self, listings: dict[int, ListingRow], next_listing: int) -> None:
        """Take up the listings that an earlier server has left."""
        for handle, row in listings.items():
            self._listings[handle] = Listing(row.ino, None, told=row.told)
        self._next = max(next_listing, max(listings, default=0) + 1)

    # --- what the kernel looks up ------------------------------------------------------------------------------------

    def lookup(self, parent: int, name: bytes) -> Attr:
        """Return the file or folder of a name. The kernel will `forget` it."""
        with self._engine.lock:
            folder, text = self._nodes.resolve(parent, name)
            state = self._nodes.expect(folder, text)
            node = self._nodes.make(folder, text, state)
            self._tree.tell(node)
            self._notes.note_done(node.ino)
            self._nodes.forget_old()
            return self._nodes.attr(node, state)

    def forget(self, ino: int, count: int) -> None:
        """Count that the kernel has forgotten an inode so many times."""
        with self._engine.lock:
            self._tree.forget(ino, count)

    def getattr(self, ino: int) -> Attr:
        """Return the attributes of a file or folder."""
        with self._engine.lock:
            node = self._tree.get(ino)
            return self._nodes.attr(node, self._state_locked(node))

    def _state_locked(self, node: Node) -> State:
        if node.is_gone and node.is_folder:  # somebody has it open, or works in it
            return State(node.key, self._nodes.attributes(node), None, "")
        try:
            return self._nodes.state_of(node)
        except OSError as exc:
            if node.open is None or exc.errno not in (errno.ESTALE, errno.ENOENT):
                raise
            return self._nodes.detach_replaced(node)

    def readlink(self, ino: int) -> bytes:
        """Return what a symbolic link points to."""
        with self._engine.lock:
            node = self._tree.get(ino)
            state = self._nodes.state_of(node)
            if not state.attributes.is_link:
                raise OSError(errno.EINVAL, "no symbolic link")
            return self._files.read(node.open or OpenFile.of(node, state), 0, LONGEST_LINK)

    # --- folders -----------------------------------------------------------------------------------------------------

    def opendir(self, ino: int) -> int:
        """Return a handle of a folder whose names are known. They are listed when they are first read: programs open a
        folder to sync it, too, and keep it open."""
        with self._engine.lock:
            node = self._tree.get(ino)
            if not node.is_gone:
                self._view.names(node.key)
            handle, self._next = self._next, self._next + 1
            self._listings[handle] = Listing(ino)
            self._notes.items.append((LISTING, handle, ino))
            self._notes.note_done(ino, handle)
            return handle

    def readdir(self, handle: int, start: int) -> list[DirEntry]:
        """Return entries from a position on; from the beginning again, what lies in the folder then (rewinddir(3)).
        `enter` is to be called for each that is taken."""
        with self._engine.lock:
            listing = self._listings[handle]
            listing.is_fresh = listing.entries is None or start < listing.skipped or (not start and listing.was_read)
            if listing.entries is None or listing.is_fresh:
                last = listing.told.get(start, "")
                entries = self._entries_locked(self._tree.get(listing.ino))
                listing.entries, listing.skipped = [entry for entry in entries if entry.name > last], start
            listing.was_read = True
            return listing.entries[max(start - listing.skipped, 0) :]

    def note_told(self, handle: int, start: int, names: list[str]) -> None:
        """Keep that the kernel is told of these names, from a position on."""
        with self._engine.lock:
            listing = self._listings[handle]
            listing.told.update(enumerate(names, start + 1))
            self._notes.items.append((TOLD, handle, start, names))

    def enter(self, handle: int, entry: DirEntry) -> Attr | None:
        """Count that the kernel was told of an entry, and will `forget` it; return its attributes with an inode number.
        None where it is not there any more."""
        with self._engine.lock:
            listing = self._listings[handle]
            folder = self._tree.get(listing.ino)
            node, state = folder.child(entry.name), entry.state
            if not listing.is_fresh or (node is not None and not self._nodes.is_known_as(node, state)):
                now = self._state_now_locked(folder, entry)
                if now is None:
                    return None
                state = now
            is_certain = state.complete or state.content is None
            if node is None and is_certain:
                node = self._nodes.make(folder, entry.name, state)
            elif node is None or not (node.lookups or is_certain) or not self._nodes.is_known_as(node, state):
                # The kernel keeps the size and times of a file that it is told first: what is not known for sure, or
                # is something else since it was listed, is told of an inode that is never looked up.
                node = self._tree.make_nameless()
                state = state._replace(complete=False)
            self._tree.tell(node)
            return self._nodes.attr(node, self._nodes.state_of(node) if node.draft is not None else state)

    def _state_now_locked(self, folder: Node, entry: DirEntry) -> State | None:
        """Return what lies under a name that was listed; None for nothing. Where the store would have to be asked, what
        others did meanwhile is left out."""
        if folder.is_gone:
            return None
        for older in (False, True):
            try:
                state = self._view.look(folder.key, entry.name, plain=True, older=older)
                return state._replace(complete=state.complete and not older) if state is not None else None
            except Load:
                pass
        return entry.state._replace(complete=False)

    def releasedir(self, handle: int) -> None:
        """Let go of a handle."""
        with self._engine.lock:
            self._listings.pop(handle, None)
            self._notes.items.append((LISTING, handle, 0))

    def _entries_locked(self, node: Node) -> list[DirEntry]:
        if node.is_gone:
            return []
        key = node.key
        states = [(name, self._view.look(key, name, plain=True)) for name in self._view.names(key)]
        return [DirEntry(name, state) for name, state in states if state is not None]

    # --- new names ---------------------------------------------------------------------------------------------------

    def create(self, parent: int, name: bytes, flags: int, *, mode: int, uid: int, gid: int) -> tuple[int, Attr]:
        """Make a new file and open it; return its handle. It is in the bucket only after it was closed or synced."""
        with self._engine.lock:
            folder, text = self._nodes.resolve(parent, name, new=True)
            key = folder.key + text
            old = self._nodes.look(folder, text)
            if old is not None:
                if flags & os.O_EXCL or old.content is None:
                    raise OSError(errno.EEXIST, "it is there already")
                self._handles.expect_opened_locked(old, flags)
                node = self._nodes.make(folder, text, old)
                handle = self._handles.open_locked(node, old, flags)  # `Load` only if the node was there before
                self._tree.tell(node)
                return handle, self._nodes.attr(node, self._nodes.state_of(node) if node.draft is not None else old)
            self._usage.expect_room(1)  # who is to write nothing hears of it now, and not when it closes the file
            attributes = self._nodes.new_attributes(folder, stat.S_IFREG | stat.S_IMODE(mode), uid, gid)
            pending = self._engine.plan_change(key, attributes, Logged(0), base="", ready=False)
            self._engine.record([pending])
            node = self._tree.make(folder, text, is_folder=False)
            self._nodes.touch(folder)
            return self._open_new_locked(node, State(key, attributes, pending.content, pending.base))

    def create_unnamed(self, parent: int, *, mode: int, uid: int, gid: int) -> tuple[int, Attr]:
        """Make a new file without a name, with what it inherits of a folder, and open it; return its handle. Closing it
        deletes it, unless `link` has given it a name."""
        with self._engine.lock:
            folder = self._tree.get(parent)
            if folder.is_gone:
                raise OSError(errno.ENOENT, "the folder was deleted")
            self._usage.expect_room(1)
            attributes = self._nodes.new_attributes(folder, stat.S_IFREG | stat.S_IMODE(mode), uid, gid)
            return self._open_new_locked(self._tree.make_nameless(), State("", attributes, Logged(0), ""))

    def _open_new_locked(self, node: Node, state: State) -> tuple[int, Attr]:
        self._tree.tell(node)
        self._nodes.forget_old()
        node.cached = LOCAL
        draft = Draft.of_bytes(self._engine, state.attributes)
        draft.changes = 1
        name = Name.NONE_YET if node.is_gone else Name.GIVEN
        file = node.open = OpenFile(node, state.attributes, Logged(0), state.base, draft, name)
        handle = self._handles.add_locked(file, writes=True)
        self._notes.note_done(node.ino, handle)
        return handle, self._nodes.attr_now(node)

    def link(self, ino: int, parent: int, name: bytes, gather: Callable[[], None]) -> Attr:
        """Give a file that was made without a name its only one. It is durable when this returns, with all that was
        written to it: `gather` brings here what the kernel still has of that, and waits."""
        with self._engine.lock:
            file = self._tree.get(ino).open
            if file is None or file.name is not Name.NONE_YET:
                raise OSError(errno.EPERM, "an object store has no hard links")
            self._resolve_free_locked(parent, name)
        raise Defer(partial(self._link, file, parent, name, gather))

    def _link(self, file: OpenFile, parent: int, name: bytes, gather: Callable[[], None]) -> Attr:
        node = file.node

        def give_name() -> None:
            if file.name is not Name.NONE_YET:
                raise OSError(errno.EPERM, "an object store has no hard links")
            folder, text = self._resolve_free_locked(parent, name)
            self._tree.rename(node, folder, text)
            file.name = Name.GIVEN
            node.ctime_ns = time.time_ns()
            self._tree.tell(node)
            self._notes.note_done(node.ino)
            self._nodes.touch(folder)

        gather()
        try:
            complete(partial(self._handles.settle, file, name=give_name))
        except BaseException:
            with self._engine.lock:
                self._notes.forget_done()
            raise
        if node.is_gone:
            raise OSError(errno.ENOENT, "it was closed meanwhile, or deleted")
        return complete(partial(self.getattr, node.ino))

    def mkdir(self, parent: int, name: bytes, *, mode: int, uid: int, gid: int) -> Attr:
        """Make a new folder."""
        with self._engine.lock:
            folder, text = self._resolve_free_locked(parent, name)
            attributes = self._nodes.new_attributes(folder, stat.S_IFDIR | stat.S_IMODE(mode), uid, gid)
            key = f"{folder.key}{text}/"
            self._nodes.expect_short(key)
            self._engine.record([self._engine.plan_change(key, attributes, None, base="")])
            return self._made_locked(folder, text, is_folder=True)

    def symlink(self, parent: int, name: bytes, target: bytes, *, uid: int, gid: int) -> Attr:
        """Make a new symbolic link."""
        if len(target) > LONGEST_LINK:
            raise OSError(errno.ENAMETOOLONG, "the link's target is too long")
        with self._engine.lock:
            folder, text = self._resolve_free_locked(parent, name)
            self._usage.expect_room(len(target))
            key = folder.key + text
            attributes = self._nodes.new_attributes(folder, stat.S_IFLNK | 0o777, uid, gid)
            pending = self._engine.plan_change(key, attributes, Logged(len(target)), base="")
            self._engine.record([pending], blobs={key: target})
            return self._made_locked(folder, text, is_folder=False)

    def mknod(self, parent: int, name: bytes, *, mode: int, rdev: int, uid: int, gid: int) -> Attr:
        """Make a new FIFO, socket or device: an object without bytes, whose attributes say what it is. Opening it is
        the kernel's business."""
        with self._engine.lock:
            folder, text = self._resolve_free_locked(parent, name)
            attributes = self._nodes.new_attributes(folder, mode, uid, gid)._replace(rdev=rdev)
            self._engine.record([self._engine.plan_change(folder.key + text, attributes, Logged(0), base="")])
            return self._made_locked(folder, text, is_folder=False)

    def _resolve_free_locked(self, parent: int, name: bytes) -> tuple[Node, str]:
        folder, text = self._nodes.resolve(parent, name, new=True)
        if self._nodes.look(folder, text, plain=True) is not None:
            raise OSError(errno.EEXIST, "it is there already")
        return folder, text

    def _made_locked(self, folder: Node, name: str, *, is_folder: bool) -> Attr:
        node = self._tree.make(folder, name, is_folder=is_folder)
        if not is_folder:
            node.cached = LOCAL
        self._tree.tell(node)
        self._notes.note_done(node.ino)
        self._nodes.touch(folder)
        return self._nodes.attr_now(node)

    # --- names that go -----------------------------------------------------------------------------------------------

    def unlink(self, parent: int, name: bytes) -> None:
        """Delete a file. Who has it open goes on reading and writing it."""
        with self._engine.lock:
            folder, text = self._nodes.resolve(parent, name)
            state = self._nodes.expect(folder, text, plain=True)
            if state.content is None:
                raise OSError(errno.EISDIR, "it is a folder")
            self._nodes.detach(folder, text)
            pendings, drop = self._engine.plan_deletion(state.key, base=state.base)
            self._engine.record(pendings + self._view.keep_folder(folder.key), drop=drop)
            self._notes.note_done()
            self._nodes.touch(folder)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Delete an empty folder."""
        with self._engine.lock:
            folder, text = self._nodes.resolve(parent, name)
            state = self._nodes.expect(folder, text, plain=True)
            if state.content is not None:
                raise OSError(errno.ENOTDIR, "it is a file")
            if self._view.names(state.key):
                raise OSError(errno.ENOTEMPTY, "the folder is not empty")
            base = state.base or self._view.remote_folder_base(folder.key, text)
            pendings, drop = self._view.plan_folder_deletion(state.key, base)
            self._engine.record(pendings + self._view.keep_folder(folder.key), drop=drop)
            self._notes.note_done()
            node = folder.child(text)
            if node is not None:
                self._tree.unname(node)
            self._nodes.touch(folder)

    # --- rename ------------------------------------------------------------------------------------------------------

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """Give a file or folder another name, replacing what has it, in one step."""
        with self._engine.lock:
            folder, text = self._nodes.resolve(parent, name)
            new_folder, new_text = self._nodes.resolve(new_parent, new_name, new=True)
            if flags not in (0, _NO_REPLACE, _EXCHANGE):
                raise OSError(errno.EINVAL, "these flags are not supported")
            if flags == _EXCHANGE:
                self._exchange_locked(folder, text, new_folder, new_text)
                self._notes.note_done()
                return
            state = self._nodes.expect(folder, text)
            target = self._nodes.look(new_folder, new_text, plain=True)
            if target is not None and flags == _NO_REPLACE:
                raise OSError(errno.EEXIST, "the new name is there already")
            if target is not None and target.key == state.key:
                return
            if state.content is None:
                self._rename_folder_locked(folder, state, new_folder, new_text, target)
            else:
                self._rename_file_locked(folder, state, new_folder, new_text, target)
            self._notes.note_done()
            node = folder.child(text)
            if node is not None:
                node.ctime_ns = time.time_ns()
                self._tree.rename(node, new_folder, new_text)
            else:
                other = new_folder.child(new_text)
                if other is not None:
                    self._tree.unname(other)
                # The kernel may have an inode under the name that is not what was renamed.
                self._nodes.on_stale(new_folder.ino, new_text)
            self._nodes.touch(folder)
            self._nodes.touch(new_folder)

    def _rename_file_locked(
        self, folder: Node, state: State, new_folder: Node, new_text: str, target: State | None
    ) -> None:
        if target is not None and target.content is None:
            raise OSError(errno.EISDIR, "the new name is a folder's")
        node = self._tree.find(state.key)
        file = node.open if node is not None else None
        if file is not None and file.draft is not None and file.draft.dirty:
            raise Load(lambda: self._handles.settle(file))
        self._nodes.detach(new_folder, new_text)
        move = self._plan_move_locked(state, new_folder.key + new_text, target.base if target is not None else "")
        pendings = move.pendings + self._view.keep_folder(folder.key)
        self._engine.record(pendings, drop=move.drop, blobs=move.blobs)
        if file is not None:
            file.base = pendings[0].base
            self._files.set_content(file, pendings[0].content or Logged(0))

    def _rename_folder_locked(
        self, folder: Node, state: State, new_folder: Node, new_text: str, target: State | None
    ) -> None:
        key, new_key = state.key, f"{new_folder.key}{new_text}/"
        if new_key.startswith(key):
            raise OSError(errno.EINVAL, "a folder cannot be moved into itself")
        if target is not None:
            if target.content is not None:
                raise OSError(errno.ENOTDIR, "the new name is a file's")
            if self._view.names(target.key):
                raise OSError(errno.ENOTEMPTY, "the folder of the new name is not empty")
        inside = self._settled_locked(state)
        below = self._pending_below_locked(key)
        base = target.base if target is not None else self._view.remote_folder_base(new_folder.key, new_text)
        remote = self._remote.take_below([key])[key]
        move = self._plan_folder_move_locked(state, new_key, base, remote, below)
        pendings = move.pendings + self._view.keep_folder(folder.key)
        self._engine.record(pendings, drop=move.drop, blobs=move.blobs)
        self._adopt_locked(inside, key, new_key, pendings)

    def _exchange_locked(self, folder: Node, text: str, new_folder: Node, new_text: str) -> None:
        """Give each of two files or folders the other's name, with all that lies below it, in one record."""
        states = [self._nodes.expect(folder, text), self._nodes.expect(new_folder, new_text)]
        names = [folder.key + text, new_folder.key + new_text]
        if names[0] == names[1]:
            return
        for state, name in zip(states, reversed(names), strict=True):
            if state.content is None and name.startswith(state.key):
                raise OSError(errno.EINVAL, "a folder cannot change places with what lies in it")
        inside = [self._settled_locked(state) for state in states]
        folders = [state.key for state in states if state.content is None]
        below = {key: self._pending_below_locked(key) for key in folders}
        places = [(new_folder.key, new_text), (folder.key, text)]
        bases = [
            "" if state.content is not None else self._view.remote_folder_base(*place)
            for state, place in zip(states, places, strict=True)
        ]
        remote = self._remote.take_below(folders)
        moves = []
        for state, name, base in zip(states, reversed(names), bases, strict=True):
            if state.content is None:
                key = state.key
                moves.append(self._plan_folder_move_locked(state, f"{name}/", base, remote[key], below[key]))
            else:
                moves.append(self._plan_move_locked(state, name, base))
        move = _merged(*moves)
        self._engine.record(move.pendings, drop=move.drop, blobs=move.blobs)
        for state, nodes, name in zip(states, inside, reversed(names), strict=True):
            self._adopt_locked(nodes, state.key, name if state.content is not None else f"{name}/", move.pendings)
        nodes = [self._nodes.make(folder, text, states[0]), self._nodes.make(new_folder, new_text, states[1])]
        self._tree.exchange(*nodes)
        for node in nodes:
            node.ctime_ns = time.time_ns()
            if not node.lookups and node.parent is not None:  # the kernel may have another inode under its name
                self._nodes.on_stale(node.parent.ino, node.name)
        self._nodes.touch(folder)
        self._nodes.touch(new_folder)

    def _settled_locked(self, state: State) -> list[Node]:
        """Return the node of a file, or those below a folder, once what was written to them is pending."""
        node = self._tree.find(state.key)
        nodes = [] if node is None else self._tree.below(node) if node.is_folder else [node]
        unsettled = [n.open for n in nodes if n.open is not None and n.draft is not None and n.draft.dirty]
        if unsettled:
            raise Load(lambda: list(map(self._handles.settle, unsettled)))
        return nodes

    def _pending_below_locked(self, key: str) -> list[Pending]:
        """Return what is pending below a folder, once one record can rename it."""
        overlay = self._engine.overlay
        below = [pending for k in overlay.below(key) if (pending := overlay.get(k)) is not None]
        logged = [pending for pending in below if pending.ready and isinstance(pending.content, Logged)]
        if sum(pending.size_bytes for pending in logged) > _BLOBS_AT_ONCE:
            raise Load(lambda: self._spill(logged))
        return below

    def _adopt_locked(self, nodes: list[Node], key: str, new_key: str, pendings: list[Pending]) -> None:
        """Have open files that are about to get other names go on with what was recorded under these."""
        moved = {pending.key: pending for pending in pendings}
        for node in nodes:
            if node.open is None or (now := moved.get(new_key + node.key[len(key) :])) is None:
                continue
            if self._nodes.is_another(node, now.content):
                self._nodes.take_name(node)
                continue
            node.open.base = now.base
            self._files.set_content(node.open, now.content or Logged(0))

    def _plan_move_locked(self, state: State, new_key: str, base: str) -> _Move:
        """Return what is to be recorded for one object to have another key."""
        moved = self._engine.plan_change(new_key, state.attributes, state.content, base=base)
        blobs = {}
        if isinstance(state.content, Logged) and state.content.size_bytes:
            blobs[new_key] = self._engine.blob(state.key)
        pendings, drop = self._engine.plan_deletion(state.key, base=state.base)
        return _Move([moved, *pendings], drop, blobs)

    def _plan_folder_move_locked(
        self, state: State, new_key: str, base: str, remote: dict[str, RemoteFile], below: list[Pending]
    ) -> _Move:
        """Return what is to be recorded for a folder to have another key, with all that lies below it."""
        self._nodes.expect_short(new_key)
        move = self._plan_move_below_locked(state.key, new_key, remote, below)
        move.pendings.append(self._engine.plan_change(new_key, state.attributes, None, base=base))
        deleted, dropped = self._view.plan_folder_deletion(state.key, state.base)
        return _Move(move.pendings + deleted, move.drop + dropped, move.blobs)

    def _plan_move_below_locked(
        self, key: str, new_key: str, remote: dict[str, RemoteFile], below: list[Pending]
    ) -> _Move:
        """Return what is to be recorded for all that lies below a folder to move with it."""
        whole = _Move([], [], {})
        states: dict[str, State] = {}
        for old_key, file in remote.items():
            attributes = self._remote.plain_attributes(file)
            if old_key.endswith("/"):
                states[old_key] = State(old_key, attributes, None, FOLDER_BASE)
            else:
                content = Stored(old_key, file.size_bytes, file.etag)
                states[old_key] = State(old_key, attributes, content, file.etag)
        unready = {pending.key for pending in below if not pending.ready}
        for pending in below:
            states.pop(pending.key, None)
            if pending.attributes is not None:
                states[pending.key] = State(pending.key, pending.attributes, pending.content, pending.base)
        for old_key, state in states.items():
            moved_key = new_key + old_key[len(key) :]
            self._nodes.expect_short(moved_key)
            move = self._plan_move_locked(state, moved_key, "")
            if old_key in unready:
                move.pendings[0] = move.pendings[0]._replace(ready=False)
            whole.pendings.extend(move.pendings)
            whole.drop.extend(move.drop)
            whole.blobs.update(move.blobs)
        return whole

    def _spill(self, logged: list[Pending]) -> None:
        """Bring bytes out of the journal into files of their own, the largest first, so that one record can rename the
        keys of all."""
        logged.sort(key=lambda pending: -pending.size_bytes)
        left = sum(pending.size_bytes for pending in logged)
        for pending in logged:
            if left <= _BLOBS_AT_ONCE:
                return
            left -= pending.size_bytes
            self._files.live.fetching.spill(pending)

    # --- attributes --------------------------------------------------------------------------------------------------

    def setattr(self, ino: int, changes: Changes, handle: int | None = None) -> Attr:
        """Change attributes. A size is durable when this returns, unless the caller has the file open (`handle`)."""
        with self._engine.lock:
            node = self._tree.get(ino)
            state = self._nodes.state_of(node)
            if node.open is not None and changes._replace(atime_ns=None, mtime_ns=None, ctime_ns=None) != Changes():
                node.open.expect_current()  # times are sent by the kernel when somebody only reads, too
            if changes.size is not None:
                if state.content is None:
                    raise OSError(errno.EISDIR, "it is a folder")
                size = changes.size
                if not self._handles.truncate_locked(handle, size):
                    now = node.open.size_bytes if node.open is not None else state.size_bytes
                    if size != now or (node.draft is not None and node.draft.dirty):
                        raise Load(lambda: self._handles.truncate_now(node, size))
                state = self._nodes.state_of(node)
            attributes = _changed(state.attributes, changes)
            node.ctime_ns = changes.ctime_ns if changes.ctime_ns is not None else time.time_ns()
            if changes.mtime_ns is not None:
                node.mtime_ns = 0
            if attributes != state.attributes:
                self._set_attributes_locked(node, state, attributes)
                state = state._replace(attributes=attributes)
            return self._nodes.attr(node, state)

    def drop_privileges(self, ino: int, uid: int, gid: int) -> bool:
        """Take set-user-ID and set-group-ID from a file that this user and group writes to; return whether it had
        them."""
        with self._engine.lock:
            before = self._nodes.state_of(self._tree.get(ino)).attributes.mode
            return self.setattr(ino, Changes(written_by=(uid, gid))).mode != before

    def getxattr(self, ino: int, name: bytes) -> bytes:
        """Return the value of an extended attribute."""
        text = _xattr_name(name)
        try:
            return self._xattrs(ino)[text]
        except KeyError:
            raise OSError(errno.ENODATA, "there is no such attribute") from None

    def listxattr(self, ino: int) -> list[bytes]:
        """Return the names of a file's or folder's extended attributes."""
        return [os.fsencode(name) for name in self._xattrs(ino) if name.startswith(_USER)]

    def setxattr(self, ino: int, name: bytes, value: bytes, flags: int = 0) -> None:
        """Give an extended attribute a value."""
        text = _xattr_name(name)
        with self._engine.lock:
            xattrs = self._xattrs(ino)
            if flags & os.XATTR_CREATE and text in xattrs:
                raise OSError(errno.EEXIST, "the attribute is there already")
            if flags & os.XATTR_REPLACE and text not in xattrs:
                raise OSError(errno.ENODATA, "there is no such attribute")
            self._set_xattrs_locked(ino, xattrs | {text: value})

    def removexattr(self, ino: int, name: bytes) -> None:
        """Take an extended attribute away."""
        text = _xattr_name(name)
        with self._engine.lock:
            xattrs = self._xattrs(ino)
            if xattrs.pop(text, None) is None:
                raise OSError(errno.ENODATA, "there is no such attribute")
            self._set_xattrs_locked(ino, xattrs)

    def _xattrs(self, ino: int) -> dict[str, bytes]:
        with self._engine.lock:
            return decode_xattrs(self._state_locked(self._tree.get(ino)).attributes.xattrs)

    def _set_xattrs_locked(self, ino: int, xattrs: dict[str, bytes]) -> None:
        if self._tree.get(ino) is self._tree.root:
            raise OSError(errno.EOPNOTSUPP, "nothing of the mount point itself is kept")
        encoded = encode_xattrs(xattrs)
        if len(encoded) > LONGEST_XATTRS:
            raise OSError(errno.E2BIG, "there is no room for it in an object's metadata")
        self.setattr(ino, Changes(xattrs=encoded))
        self._notes.note_done()

    def _set_attributes_locked(self, node: Node, state: State, attributes: Attributes) -> None:
        if node is self._tree.root:
            self._nodes.root_attributes = attributes
            self._notes.items.append((ROOT_ATTRIBUTES, tuple(attributes)))
            return
        if node.open is not None:
            node.open.attributes = attributes
            if node.draft is not None:
                node.draft.attributes = attributes
                if node.draft.dirty:
                    return  # goes along with the bytes
        if node.is_gone:
            return
        old = self._engine.overlay.get(state.key)
        ready = old.ready if old is not None else True
        pending = self._engine.plan_change(state.key, attributes, state.content, base=state.base, ready=ready)
        self._engine.record([pending])


def _merged(move: _Move, other: _Move) -> _Move:
    """Put two moves together whose keys may be each other's: what one moves to a key replaces what the other takes away
    from it."""
    pendings = move.pendings + other.pendings
    bases = {pending.key: pending.base for pending in pendings if pending.attributes is None}
    changes = {p.key: p._replace(base=bases.get(p.key, p.base)) for p in pendings if p.attributes is not None}
    deletions = [pending for pending in pendings if pending.attributes is None and pending.key not in changes]
    drop = [key for key in move.drop + other.drop if key not in changes]
    return _Move([*changes.values(), *deletions], drop, move.blobs | other.blobs)


def _xattr_name(name: bytes) -> str:
    text = os.fsdecode(name)
    if not text.startswith(_USER):
        raise OSError(errno.EOPNOTSUPP, "there are attributes of users only")
    return text


def _changed(attributes: Attributes, changes: Changes) -> Attributes:
    mode = attributes.mode
    if changes.mode is not None:
        mode = stat.S_IFMT(mode) | stat.S_IMODE(changes.mode)
    if changes.written_by is not None and not attributes.is_folder:
        uid, gid = changes.written_by
        # As setattr_should_drop_sgid of the kernel.
        drops_group = mode & stat.S_IXGRP or (uid and gid != attributes.gid)
        mode &= ~(stat.S_ISUID | (stat.S_ISGID if drops_group else 0))
    return attributes._replace(
        mode=mode,
        uid=attributes.uid if changes.uid is None else changes.uid,
        gid=attributes.gid if changes.gid is None else changes.gid,
        mtime_ns=attributes.mtime_ns if changes.mtime_ns is None else changes.mtime_ns,
        atime_ns=attributes.atime_ns if changes.atime_ns is None else changes.atime_ns,
        xattrs=attributes.xattrs if changes.xattrs is None else changes.xattrs,
    )
