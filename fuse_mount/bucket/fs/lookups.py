"""What the kernel looks up in a read-write mount, and what opendir(3) and readdir(3) show.

Part of `BucketFs`; takes its lock itself, and never waits (see `writeback.remote.bucket.Needs`).
"""

from __future__ import annotations

import errno
import itertools
import threading
from dataclasses import dataclass
from typing import NamedTuple

from fuse_mount.bucket.fs.files import OpenFiles
from fuse_mount.bucket.fs.nodes import Attr, Nodes
from fuse_mount.bucket.fs.tree import Node, OpenFile, Tree
from fuse_mount.bucket.fs.view import State, View

LONGEST_LINK = 4095


class DirEntry(NamedTuple):
    """One name of a folder."""

    name: str
    state: State


@dataclass(slots=True)
class Listing:
    """One opendir(3)."""

    ino: int
    entries: list[DirEntry]
    was_read: bool = False


class Lookups:
    """One mount's lookups and open folders."""

    def __init__(self, lock: threading.RLock, view: View, tree: Tree, files: OpenFiles, nodes: Nodes) -> None:
        self._lock, self._view, self._tree, self._files, self._nodes = lock, view, tree, files, nodes
        self._listings: dict[int, Listing] = {}
        self._numbers = itertools.count(1)

    def lookup(self, parent: int, name: bytes) -> Attr:
        """Return the file or folder of a name. The kernel will `forget` it."""
        with self._lock:
            folder, text = self._nodes.resolve(parent, name)
            state = self._nodes.expect(folder, text)
            node = self._nodes.make(folder, text, state)
            self._tree.tell(node)
            self._nodes.forget_old()
            return self._nodes.attr(node, state)

    def forget(self, ino: int, count: int) -> None:
        """Count that the kernel has forgotten an inode so many times."""
        with self._lock:
            self._tree.forget(ino, count)

    def getattr(self, ino: int) -> Attr:
        """Return the attributes of a file or folder."""
        with self._lock:
            node = self._tree.get(ino)
            try:
                state = self._nodes.state_of(node)
            except OSError as exc:
                if node.open is None or exc.errno not in (errno.ESTALE, errno.ENOENT):
                    raise
                state = self._nodes.detach_replaced(node)
            return self._nodes.attr(node, state)

    def readlink(self, ino: int) -> bytes:
        """Return what a symbolic link points to."""
        with self._lock:
            node = self._tree.get(ino)
            state = self._nodes.state_of(node)
            if not state.attributes.is_link:
                raise OSError(errno.EINVAL, "no symbolic link")
            return self._files.read(node.open or OpenFile(node, state), 0, LONGEST_LINK)

    # --- folders -----------------------------------------------------------------------------------------------------

    def opendir(self, ino: int) -> int:
        """Return a handle of what lies in a folder now, in order."""
        with self._lock:
            entries = self._entries_locked(self._tree.get(ino))
            handle = next(self._numbers)
            self._listings[handle] = Listing(ino, entries)
            return handle

    def readdir(self, handle: int, start: int) -> list[DirEntry]:
        """Return entries from a position on; from the beginning again, what lies in the folder then (rewinddir(3)).
        `enter` is to be called for each that is taken."""
        with self._lock:
            listing = self._listings[handle]
            if not start and listing.was_read:
                listing.entries = self._entries_locked(self._tree.get(listing.ino))
            listing.was_read = True
            return listing.entries[start:]

    def enter(self, ino: int, entry: DirEntry) -> Attr:
        """Count that the kernel was told of an entry, and will `forget` it; return its attributes with an inode
        number."""
        with self._lock:
            folder = self._tree.get(ino)
            state = entry.state
            node = self._tree.child(folder, entry.name)
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

    def releasedir(self, handle: int) -> None:
        """Let go of a handle."""
        self._listings.pop(handle, None)

    def _entries_locked(self, node: Node) -> list[DirEntry]:
        if self._tree.is_gone(node):
            return []
        key = node.key
        states = [(name, self._view.look(key, name, plain=True)) for name in self._view.names(key)]
        return [DirEntry(name, state) for name, state in states if state is not None]
