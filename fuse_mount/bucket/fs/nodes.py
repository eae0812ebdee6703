"""The inodes of a read-write mount and what lies under their names: finding, placing, telling one from another.

Part of `BucketFs`, under its lock; nothing here waits (see `writeback.remote.Needs`). `bucket_tree` has the nodes,
`bucket_view` the states of keys; this brings them together.
"""

from __future__ import annotations

import errno
import stat
import time
from typing import NamedTuple

from datacache.writeback.model import Attributes, Content, Stored
from fuse_mount.bucket.fs.shared import Mounted
from fuse_mount.bucket.fs.tree import LOCAL, Node
from fuse_mount.bucket.fs.view import FOLDER_BASE, State

LONGEST_NAME = 255
LONGEST_KEY = 1024
"""Bytes, of S3."""
_MOST_NODES = 20_000
"""Files and folders that the kernel may know of before it is asked to forget the oldest ones."""


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


class Nodes:
    """One mount's inodes."""

    def __init__(self, mounted: Mounted) -> None:
        self._mounted = mounted
        self._engine = mounted.engine
        self._view = mounted.view
        self._tree = mounted.tree
        self._files = mounted.files

    def place(self, parent: int, name: bytes, *, new: bool = False) -> tuple[Node, str]:
        """The folder of an inode number, and a name in it. A `new` one has to be one that an object can have."""
        folder = self._tree.get(parent)
        if len(name) > LONGEST_NAME:
            raise OSError(errno.ENAMETOOLONG, "the name is too long")
        if self._tree.is_gone(folder):
            raise OSError(errno.ENOENT, "the folder was deleted")
        text = name.decode("utf-8", "surrogateescape")
        if new and not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise OSError(errno.EILSEQ, "an object's name has to be UTF-8")
        if new:
            self.expect_short(folder.key + text)
        return folder, text

    def expect_short(self, key: str) -> None:
        """Raise if a key is too long for an object."""
        if len((self._engine.prefix + key).encode("utf-8", "surrogateescape")) > LONGEST_KEY:
            raise OSError(errno.ENAMETOOLONG, "the path is too long for an object's key")

    def state(self, folder: Node, name: str, *, plain: bool = False) -> State:
        """What lies under a name. With `plain` without asking for attributes."""
        state = self.look(folder, name, plain=plain)
        if state is None:
            raise OSError(errno.ENOENT, "there is nothing of this name")
        return state

    def look(self, folder: Node, name: str, *, plain: bool = False) -> State | None:
        """The same; None for nothing. The inode of a file that is not there any more loses the name."""
        node = self._tree.child(folder, name)
        if node is not None and node.open is not None and node.open.draft is not None:
            return self.state_of(node)
        state = self._view.look(folder.key, name, plain=plain)
        if node is None or node.is_folder:
            return state
        if state is None or state.content is None or self.is_another(node, state.content):
            self.replaced(node)
        return state

    def state_of(self, node: Node) -> State:
        """What an inode is now."""
        if node is self._tree.root:
            return State("", self._mounted.root_attributes, None, FOLDER_BASE)
        file = node.open
        if file is not None and (file.draft is not None or self._tree.is_gone(node)):
            attributes = file.draft.attributes if file.draft is not None else file.attributes
            pending = None if self._tree.is_gone(node) else self._engine.overlay.get(node.key)
            return State(node.key, attributes, file.content, pending.base if pending is not None else file.base)
        if self._tree.is_gone(node):
            raise OSError(errno.ENOENT, "it was deleted")
        if node.parent is None:
            raise OSError(errno.ENOENT, "it was deleted")
        state = self._view.look(node.parent.key, node.name)
        if state is None or (state.content is None) != node.is_folder:
            raise OSError(errno.ENOENT, "it is not there any more")
        if self.is_another(node, state.content):
            raise OSError(errno.ESTALE, "it was changed elsewhere")  # the kernel looks the name up again
        return state

    def node(self, folder: Node, name: str, state: State) -> Node:
        """The node of a name, after `look`. The kernel keeps an inode's bytes and size for its own, so what somebody
        else has put under the name gets another one."""
        node = self._tree.make(folder, name, is_folder=state.content is None)
        self.is_another(node, state.content)  # a new one is this from now on
        return node

    def is_known_as(self, node: Node, state: State) -> bool:
        """Whether an inode is what was listed some time ago."""
        if node.is_folder or state.content is None:
            return node.is_folder and state.content is None
        if node.open is not None and node.open.draft is not None:
            return True
        return node.cached == (state.content.etag if isinstance(state.content, Stored) else LOCAL)

    def replaced(self, node: Node) -> None:
        """Somebody else has put something else under a file's name, or nothing: the inode has no name any more. Who
        has it open may go on reading; what they write has no place to go to."""
        if node.open is not None:
            node.open.replaced = True
            self._files.lost_name(node.open)
        self._tree.unname(node)

    def is_another(self, node: Node, content: Content | None) -> bool:
        """Whether what a file's key has now are other bytes than those that the kernel knows the inode for."""
        if node.is_folder or (node.open is not None and node.open.draft is not None):
            return False
        if not isinstance(content, Stored):
            node.cached = LOCAL
        elif not node.cached:
            node.cached = content.etag
        return isinstance(content, Stored) and node.cached != content.etag

    def attributes(self, folder: Node) -> Attributes:
        """A folder's attributes, as far as they are known."""
        if folder is self._tree.root:
            return self._mounted.root_attributes
        return self._view.folder_attributes(folder.key)

    def inherited_gid(self, folder: Node, gid: int) -> int:
        """The group of what is made in a folder by somebody of group `gid`."""
        attributes = self.attributes(folder)
        return attributes.gid if attributes.mode & stat.S_ISGID else gid

    def attr(self, node: Node, state: State) -> Attr:
        """What stat(2) tells of a node."""
        size = node.open.size_bytes if node.open is not None else state.size_bytes
        kept = state.attributes
        mtime_ns = max(node.mtime_ns, kept.mtime_ns)
        ctime_ns = max(node.ctime_ns, mtime_ns)
        links = 0 if self._tree.is_gone(node) else 1
        return Attr(node.ino, kept.mode, kept.uid, kept.gid, size, mtime_ns, ctime_ns, links, state.complete)

    def touch(self, folder: Node) -> None:
        """Something in a folder has another name: its times change, in memory only."""
        folder.ctime_ns = folder.mtime_ns = time.time_ns()

    def detach(self, folder: Node, name: str) -> None:
        """A file is about to lose its name."""
        node = self._tree.child(folder, name)
        if node is None:
            return
        if node.open is not None:
            self._files.keep_readable(node.open)
            self._files.lost_name(node.open)
        self._tree.unname(node)

    def part(self, node: Node) -> State:
        """What somebody has replaced or deleted elsewhere while it is open here has no name any more, and is for who
        has it open what it was: its state."""
        if node.parent is not None and not self._tree.is_gone(node):
            self._mounted.on_stale(node.parent.ino, node.name)
            self.replaced(node)
        return self.state_of(node)

    def forget_old(self) -> None:
        """The kernel keeps what it was told of for as long as it has memory, and so would we."""
        for node in self._tree.old(_MOST_NODES):
            if node.parent is not None:
                self._mounted.on_stale(node.parent.ino, node.name)
