"""The files and folders of a read-write mount that the kernel knows: inode numbers and names, not what they hold.

Part of `BucketFs`, under its lock. A node is made when the kernel first hears of it and goes when the kernel forgets
it, unless it is open. Its key is found by walking up, so that a folder is renamed by one change.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuse_mount.bucket_files import OpenFile

ROOT = 1
_OLD_AT_A_TIME = 256
LOCAL = "local"
"""For `Node.cached`: bytes that were written through this mount, which the kernel has seen itself."""


class Node:
    """One inode."""

    __slots__ = ("cached", "children", "ctime_ns", "ino", "is_folder", "lookups", "mtime_ns", "name", "open", "parent")

    def __init__(self, ino: int, parent: Node | None, name: str, is_folder: bool) -> None:
        self.ino = ino
        self.parent = parent
        self.name = name
        """Without a slash; '' for the root."""
        self.is_folder = is_folder
        self.children: dict[str, Node] | None = {} if is_folder else None
        self.lookups = 0
        """How often the kernel was told of it, less what it has forgotten."""
        self.open: OpenFile | None = None
        """A file's state while somebody has it open."""
        self.ctime_ns = 0
        """When it was last changed through this mount; 0 for never."""
        self.mtime_ns = 0
        """Of a folder: when a name in it was last changed; not kept anywhere else."""
        self.cached = ""
        """Which bytes the kernel takes this inode for: an ETag, or `LOCAL`; '' before it was told."""

    @property
    def key(self) -> str:
        """Relative to the mount: '' for the root, with a trailing slash for other folders."""
        names = []
        node = self
        while node.parent is not None:
            names.append(node.name)
            node = node.parent
        key = "/".join(reversed(names))
        return f"{key}/" if self.is_folder and key else key


class Tree:
    """Nodes by inode number and by name."""

    def __init__(self) -> None:
        self.root = Node(ROOT, None, "", True)
        self.root.lookups = 1
        self._nodes: dict[int, Node] = {ROOT: self.root}
        self._next = self._oldest = ROOT + 1
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, ino: int) -> Node:
        """The node of an inode number that the kernel was told."""
        try:
            return self._nodes[ino]
        except KeyError:
            raise OSError(errno.ESTALE, "this inode number is not known any more") from None

    def is_gone(self, node: Node) -> bool:
        """Whether it has no name any more."""
        return node.ino in self._gone

    def child(self, parent: Node, name: str) -> Node | None:
        """The node of a name, if there is one."""
        return parent.children.get(name) if parent.children is not None else None

    def make(self, parent: Node, name: str, *, is_folder: bool) -> Node:
        """The node of a name, made if need be. One of the other kind has no name any more."""
        node = self.child(parent, name)
        if node is not None and node.is_folder == is_folder:
            return node
        if node is not None:
            self.unname(node)
        node = self._nodes[self._next] = Node(self._next, parent, name, is_folder)
        self._next += 1
        _name(parent, name, node)
        return node

    def passing(self) -> Node:
        """A file's node without a name."""
        node = self._nodes[self._next] = Node(self._next, None, "", False)
        self._gone.add(self._next)
        self._next += 1
        return node

    def old(self, most: int) -> list[Node]:
        """Files that the kernel was told of a long time ago, if there are more than `most` nodes: those that were not
        given before, some at a time."""
        found: list[Node] = []
        while len(self._nodes) - most > _OLD_AT_A_TIME and len(found) < _OLD_AT_A_TIME and self._oldest < self._next:
            node = self._nodes.get(self._oldest)
            self._oldest += 1
            if node is not None and not node.is_folder and node.open is None and node.parent is not None:
                found.append(node)
        return found

    def find(self, key: str) -> Node | None:
        """The node of a key, if there is one."""
        node: Node | None = self.root
        for name in key.rstrip("/").split("/") if key else ():
            node = self.child(node, name) if node is not None else None
        return node if node is not None and node.is_folder == (key.endswith("/") or not key) else None

    def rename(self, node: Node, parent: Node, name: str) -> None:
        """Give a node another name. Whoever had it has none any more."""
        other = self.child(parent, name)
        if other is not None and other is not node:
            self.unname(other)
        _unname(node)
        node.parent, node.name = parent, name
        _name(parent, name, node)

    def unname(self, node: Node) -> None:
        """A node's file is deleted, or replaced by another one."""
        _unname(node)
        self._gone.add(node.ino)
        self.drop(node)

    def forget(self, ino: int, count: int) -> None:
        """The kernel has forgotten it so many times."""
        node = self._nodes[ino]
        node.lookups -= count
        self.drop(node)

    def drop(self, node: Node) -> None:
        """Let go of a node that nobody knows any more."""
        if node.lookups > 0 or node.open is not None or node is self.root:
            return
        if self._nodes.pop(node.ino, None) is None:
            return
        self._gone.discard(node.ino)
        _unname(node)

    def below(self, folder: Node) -> list[Node]:
        """All nodes below a folder."""
        found = []
        for node in self._nodes.values():
            above = node.parent
            while above is not None and above is not folder:
                above = above.parent
            if above is not None and node.ino not in self._gone:
                found.append(node)
        return found


def _name(parent: Node, name: str, node: Node) -> None:
    if parent.children is not None:
        parent.children[name] = node


def _unname(node: Node) -> None:
    parent = node.parent
    if parent is not None and parent.children is not None and parent.children.get(node.name) is node:
        del parent.children[node.name]
