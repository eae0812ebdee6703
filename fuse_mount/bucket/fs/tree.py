"""The files and folders of a read-write mount that the kernel knows: inode numbers, names, and open files.

Part of `BucketFs`, under its lock. A node is made when the kernel first hears of it. When the kernel forgets it, as it
does whenever memory is short, it *rests*: programs compare the inode numbers and times that they were told, so the
kernel hears the same ones when it asks again. Of resting nodes the tree drops those that were forgotten first. A node's
key is found by walking up, so that a folder is renamed by one change.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from datacache.writeback.draft import Draft

if TYPE_CHECKING:
    from fuse_mount.bucket.fs.open_file import OpenFile

ROOT = 1
MOST_RESTING = 50_000
"""Files and empty folders that keep their numbers and times after the kernel has forgotten them. Each takes some 0.5 KB
(a node, its name, its rows in four dictionaries)."""
_LET_GO_AT_A_TIME = 64
"""Nodes. To find the first one of a dictionary takes the longer, the more were taken from its front."""
_OLD_AT_A_TIME = 256
LOCAL = "local"
"""For `Node.cached`: bytes that were written through this mount, which the kernel has seen itself."""


@dataclass(slots=True, eq=False)
class Node:
    """One inode."""

    changed: set[Node | OpenFile]
    """Where it and its open file are put when something of them changes, for the server's successor."""
    ino: int
    parent: Node | None
    name: str
    """Without a slash; '' for the root."""
    is_folder: bool
    children: dict[str, Node] | None = None
    """Of a folder."""
    lookups: int = 0
    """How often the kernel was told of it, less what it has forgotten."""
    open: OpenFile | None = None
    """A file's state while somebody has it open."""
    ctime_ns: int = 0
    """When it was last changed through this mount; 0 for never."""
    mtime_ns: int = 0
    """Of a folder: when a name in it was last changed; not kept anywhere else."""
    is_gone: bool = False
    """True once it has no name."""
    cached: str = ""
    """Which bytes the kernel takes this inode for: an ETag, or `LOCAL`; '' before it was told."""

    def __post_init__(self) -> None:
        if self.is_folder:
            self.children = {}

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        self.changed.add(self)

    @property
    def key(self) -> str:
        """Return the key relative to the mount: '' for the root, with a trailing slash for other folders."""
        names = []
        node = self
        while node.parent is not None:
            names.append(node.name)
            node = node.parent
        key = "/".join(reversed(names))
        return f"{key}/" if self.is_folder and key else key

    def child(self, name: str) -> Node | None:
        """Return the node of a name in a folder, if there is one."""
        return self.children.get(name) if self.children is not None else None

    @property
    def draft(self) -> Draft | None:
        """Return the draft of a file that is being written."""
        return self.open.draft if self.open is not None else None


class NodeRow(NamedTuple):
    """The fields of a node that the next server gets."""

    parent: int
    """0 for none."""
    name: str
    is_folder: bool
    lookups: int
    ctime_ns: int
    mtime_ns: int
    is_gone: bool
    cached: str


class FileRow(NamedTuple):
    """The fields of an open file that the next server gets. Values are such as `marshal` takes."""

    attributes: tuple[Any, ...]
    content: tuple[Any, ...]
    """The name of its type, and its fields."""
    base: str
    staged: int | None
    """The number of the draft's staged file."""
    slot: int | None
    """The number of the slot that has the draft's bytes. None of both: there is no draft."""
    size_bytes: int
    """Of a draft in a slot."""
    is_dirty: bool
    name_state: str
    """The value of a `Name`."""
    spoiled: tuple[int, str] | None
    """Errno and text."""


class Tree:
    """Nodes by inode number and by name."""

    def __init__(self, changed: set[Node | OpenFile]) -> None:
        """`changed` gets nodes and open files when something of them changes."""
        self._changed = changed
        self.root = Node(changed, ROOT, None, "", True)
        self.root.lookups = 1
        self._nodes: dict[int, Node] = {ROOT: self.root}
        self._next = ROOT + 1
        self._n_known = 1
        """How many nodes the kernel was told of and has not forgotten."""
        self._resting: dict[int, Node] = {}
        """Those that only their names keep, in the order in which the kernel forgot them. None has children."""
        self._not_asked: dict[int, Node] = {}
        """Files that the kernel knows and was not asked to forget, in the order in which it was told of them."""

    # --- a server's successor ----------------------------------------------------------------------------------------

    @property
    def next_ino(self) -> int:
        """Return the inode number of the next node."""
        return self._next

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __contains__(self, ino: int) -> bool:
        return ino in self._nodes

    def restore(self, rows: dict[int, NodeRow], next_ino: int) -> None:
        """Take up the nodes that an earlier server has left, all but their open files."""
        for ino, row in rows.items():
            if ino != ROOT:
                self._nodes[ino] = Node(self._changed, ino, None, row.name, row.is_folder, is_gone=row.is_gone)
            node = self._nodes[ino]
            node.lookups, node.ctime_ns, node.mtime_ns, node.cached = (
                row.lookups,
                row.ctime_ns,
                row.mtime_ns,
                row.cached,
            )
        for ino, row in rows.items():
            node, node.parent = self._nodes[ino], self._nodes.get(row.parent)
            if node.parent is not None and not node.is_gone:
                self._name(node.parent, node.name, node)
        self._next = max(next_ino, *self._nodes)
        self._n_known = sum(node.lookups > 0 for node in self)
        self._not_asked.update((node.ino, node) for node in self if node.lookups > 0 and not node.is_folder)

    # --- finding -----------------------------------------------------------------------------------------------------

    def get(self, ino: int) -> Node:
        """Return the node of an inode number that the kernel was told."""
        try:
            return self._nodes[ino]
        except KeyError:
            raise OSError(errno.ESTALE, "this inode number is not known any more") from None

    def find(self, key: str) -> Node | None:
        """Return the node of a key, if there is one."""
        node: Node | None = self.root
        for name in key.rstrip("/").split("/") if key else ():
            node = node.child(name) if node is not None else None
        return node if node is not None and node.is_folder == (key.endswith("/") or not key) else None

    def below(self, folder: Node) -> list[Node]:
        """Return all nodes below a folder."""
        found = list((folder.children or {}).values())
        for node in found:
            found.extend((node.children or {}).values())
        return found

    # --- names -------------------------------------------------------------------------------------------------------

    def make(self, parent: Node, name: str, *, is_folder: bool) -> Node:
        """Return the node of a name, made if need be. One of the other kind has no name any more."""
        node = parent.child(name)
        if node is not None and node.is_folder == is_folder:
            return node
        if node is not None:
            self.unname(node)
        node = self._nodes[self._next] = Node(self._changed, self._next, parent, name, is_folder)
        self._next += 1
        self._name(parent, name, node)
        return node

    def make_nameless(self) -> Node:
        """Make a file's node without a name."""
        node = self._nodes[self._next] = Node(self._changed, self._next, None, "", False, is_gone=True)
        self._next += 1
        return node

    def rename(self, node: Node, parent: Node, name: str) -> None:
        """Give a node another name, or its first one. Whoever had it has none any more."""
        other = parent.child(name)
        if other is not None and other is not node:
            self.unname(other)
        old_parent = node.parent
        _strike(node)
        node.parent, node.name, node.is_gone = parent, name, False
        self._name(parent, name, node)
        if old_parent is not None:
            self.rest(old_parent)

    def exchange(self, node: Node, other: Node) -> None:
        """Give each of two nodes the other's name."""
        for each in (node, other):
            _strike(each)
        node.parent, node.name, other.parent, other.name = other.parent, other.name, node.parent, node.name
        for each in (node, other):
            if each.parent is not None:
                self._name(each.parent, each.name, each)
            self.rest(each)

    def unname(self, node: Node) -> None:
        """Take the name of a node whose file is deleted, or replaced by another one."""
        _strike(node)
        node.is_gone = True
        self.rest(node)
        if node.parent is not None:
            self.rest(node.parent)

    def _name(self, parent: Node, name: str, node: Node) -> None:
        if parent.children is not None:
            parent.children[name] = node
            self._resting.pop(parent.ino, None)

    # --- what the kernel knows ---------------------------------------------------------------------------------------

    def tell(self, node: Node) -> None:
        """Count that the kernel is told of a node, and will `forget` it."""
        if not node.lookups:
            self._n_known += 1
            self._resting.pop(node.ino, None)
            if not node.is_folder:
                self._not_asked[node.ino] = node
        node.lookups += 1

    def forget(self, ino: int, count: int) -> None:
        """Count that the kernel has forgotten a node so many times."""
        node = self._nodes[ino]
        node.lookups -= count
        if not node.lookups:
            self._n_known -= 1
            self._not_asked.pop(ino, None)
        self.rest(node)

    def take_old(self, most: int) -> list[Node]:
        """Return files that the kernel was told of a long time ago, if it knows more than `most` nodes: some at a time,
        and each once until it is forgotten and told again."""
        if self._n_known - most <= _OLD_AT_A_TIME:
            return []
        oldest = list(islice(self._not_asked.values(), _OLD_AT_A_TIME))
        for node in oldest:
            del self._not_asked[node.ino]
        return [node for node in oldest if node.open is None and node.parent is not None and not node.is_gone]

    def rest(self, node: Node) -> None:
        """Let a node rest that neither the kernel nor anybody else knows any more; let go of one without a name."""
        self._rest(node)
        if len(self._resting) >= MOST_RESTING + _LET_GO_AT_A_TIME:
            for oldest in list(islice(self._resting.values(), _LET_GO_AT_A_TIME)):
                self._remove(oldest)

    def _rest(self, node: Node) -> None:
        if node.lookups > 0 or node.open is not None or node.children or node is self.root:
            return
        if node.ino not in self._nodes:
            return
        if node.is_gone:
            self._remove(node)
        else:
            self._resting[node.ino] = node

    def _remove(self, node: Node) -> None:
        del self._nodes[node.ino]
        self._changed.add(node)
        self._resting.pop(node.ino, None)
        _strike(node)
        if node.parent is not None:
            self._rest(node.parent)  # nothing may be left in it


def _strike(node: Node) -> None:
    parent = node.parent
    if parent is not None and parent.children is not None and parent.children.get(node.name) is node:
        del parent.children[node.name]
