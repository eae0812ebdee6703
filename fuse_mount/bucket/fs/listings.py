"""What opendir(3) and readdir(3) show of a read-write mount.

Part of `BucketFs`; takes its lock itself, and never waits (see `writeback.remote.Needs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fuse_mount.bucket.fs.nodes import Attr, Nodes
from fuse_mount.bucket.fs.shared import Mounted
from fuse_mount.bucket.fs.tree import Node
from fuse_mount.bucket.fs.view import State


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


class Listings:
    """One mount's open folders."""

    def __init__(self, mounted: Mounted, nodes: Nodes) -> None:
        self._mounted = mounted
        self._lock = mounted.engine.lock
        self._view = mounted.view
        self._tree = mounted.tree
        self._nodes = nodes
        self._lists: dict[int, Listing] = {}

    def opendir(self, ino: int) -> int:
        """A handle of what lies in a folder now, in order."""
        with self._lock:
            found = self._entries(self._tree.get(ino))
            handle = self._mounted.new_handle()
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
        with self._lock:
            listing = self._lists[handle]
            if not start and listing.was_read:
                listing.entries = self._entries(self._tree.get(listing.ino))
            listing.was_read = True
            return listing.entries[start:]

    def entered(self, ino: int, entry: DirEntry) -> Attr:
        """The kernel has been told of an entry, and will `forget` it: its attributes with an inode number."""
        with self._lock:
            folder = self._tree.get(ino)
            state = entry.state
            node = self._tree.child(folder, entry.name)
            is_certain = state.complete or state.content is None
            if node is None and is_certain:
                node = self._nodes.node(folder, entry.name, state)
            elif node is None or not (node.lookups or is_certain) or not self._nodes.is_known_as(node, state):
                # The kernel keeps the size and times of a file that it is told first: what is not known for sure, or
                # is something else since it was listed, is told of an inode that is never looked up.
                node = self._tree.passing()
                state = state._replace(complete=False)
            self._tree.tell(node)
            is_written = node.open is not None and node.open.draft is not None
            return self._nodes.attr(node, self._nodes.state_of(node) if is_written else state)

    def releasedir(self, handle: int) -> None:
        """The handle is not used any more."""
        self._lists.pop(handle, None)
