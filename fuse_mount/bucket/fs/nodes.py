"""The inodes of a read-write mount and what lies under their names: finding, placing, telling one from another.

Part of `BucketFs`, under its lock; nothing here waits (see `writeback.sections`). `tree.py` has the nodes,
`view.py` the states of keys; this brings them together.
"""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from datacache.writeback.model import Attributes, Content, Stored
from datacache.writeback.sections import Load
from fuse_mount.bucket.fs.files import OpenFiles
from fuse_mount.bucket.fs.open_file import Name
from fuse_mount.bucket.fs.tree import LOCAL, Node, Tree
from fuse_mount.bucket.fs.view import FOLDER_BASE, State, View

LONGEST_NAME = 255
LONGEST_KEY = 1024
"""Bytes, of S3."""
_MODES: dict[int, int] = {}
"""One object for each st_mode, of which very many files have the same."""
_MOST_NODES = 20_000
"""Files and folders that the kernel may know of before it is asked to forget the oldest ones."""


class Attr(NamedTuple):
    """The answer to stat(2)."""

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
    rdev: int = 0
    """Of a device: its number."""
    atime_ns: int = 0


class Nodes:
    """One mount's inodes. `on_stale` gets a folder's inode number and a name that the kernel should forget."""

    def __init__(
        self,
        files: OpenFiles,
        view: View,
        tree: Tree,
        *,
        root_attributes: Attributes,
        on_stale: Callable[[int, str], None],
    ) -> None:
        self.files, self.view, self.tree, self.engine = files, view, tree, view.engine
        self.root_attributes = root_attributes
        self.on_stale = on_stale

    # --- what lies under a name --------------------------------------------------------------------------------------

    def resolve(self, parent: int, name: bytes, *, new: bool = False) -> tuple[Node, str]:
        """Return the folder of an inode number, and a name in it. A `new` one has to be one that an object can have."""
        folder = self.tree.get(parent)
        if len(name) > LONGEST_NAME:
            raise OSError(errno.ENAMETOOLONG, "the name is too long")
        if folder.is_gone:
            raise OSError(errno.ENOENT, "the folder was deleted")
        text = name.decode("utf-8", "surrogateescape")
        if new and not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise OSError(errno.EILSEQ, "an object's name has to be UTF-8")
        if new:
            self.expect_short(folder.key + text)
        return folder, text

    def expect_short(self, key: str) -> None:
        """Raise if a key is too long for an object."""
        if len((self.engine.prefix + key).encode("utf-8", "surrogateescape")) > LONGEST_KEY:
            raise OSError(errno.ENAMETOOLONG, "the path is too long for an object's key")

    def look(self, folder: Node, name: str, *, plain: bool = False) -> State | None:
        """Return what lies under a name; None for nothing. With `plain` without asking for attributes. The inode of a
        file that is not there any more loses the name first."""
        node = folder.child(name)
        if node is not None and node.draft is not None:
            return self.state_of(node)
        state = self.view.look(folder.key, name, plain=plain)
        if node is None or node.is_folder:
            return state
        if state is None or state.content is None or self.is_another(node, state.content):
            raise Load(partial(self._take_name_of_other, node, node.cached))
        return state

    def _take_name_of_other(self, node: Node, cached: str) -> None:
        with self.engine.lock:
            if not node.is_gone and node.draft is None and node.cached == cached:
                self.take_name(node)

    def expect(self, folder: Node, name: str, *, plain: bool = False) -> State:
        """Return what lies under a name, as `look` does. ENOENT for nothing."""
        state = self.look(folder, name, plain=plain)
        if state is None:
            raise OSError(errno.ENOENT, "there is nothing of this name")
        return state

    def state_of(self, node: Node) -> State:
        """Return what an inode is now."""
        if node is self.tree.root:
            return State("", self.root_attributes, None, FOLDER_BASE)
        file = node.open
        if file is not None and (file.draft is not None or node.is_gone):
            attributes = file.draft.attributes if file.draft is not None else file.attributes
            pending = None if node.is_gone else self.engine.overlay.get(node.key)
            return State(node.key, attributes, file.content, pending.base if pending is not None else file.base)
        if node.is_gone or node.parent is None:
            raise OSError(errno.ENOENT, "it was deleted")
        state = self.view.look(node.parent.key, node.name)
        if state is None or (state.content is None) != node.is_folder:
            raise OSError(errno.ENOENT, "it is not there any more")
        if self.is_another(node, state.content):
            raise OSError(errno.ESTALE, "it was changed elsewhere")  # the kernel looks the name up again
        return state

    def attributes(self, folder: Node) -> Attributes:
        """Return a folder's attributes, as far as they are known."""
        if folder is self.tree.root:
            return self.root_attributes
        return self.view.folder_attributes(folder.key)

    def new_attributes(self, folder: Node, mode: int, uid: int, gid: int) -> Attributes:
        """Return the attributes of what somebody makes now in a folder, which may hand its group on."""
        above = self.attributes(folder)
        if above.mode & stat.S_ISGID:
            gid, mode = above.gid, mode | stat.S_ISGID if stat.S_ISDIR(mode) else mode
        return Attributes(_MODES.setdefault(mode, mode), uid, gid, time.time_ns())

    def attr(self, node: Node, state: State) -> Attr:
        """Return the answer to stat(2) for a node."""
        size = node.open.size_bytes if node.open is not None else state.size_bytes
        kept = state.attributes
        mtime_ns = max(node.mtime_ns, kept.mtime_ns)
        ctime_ns = max(node.ctime_ns, mtime_ns)
        links = 0 if node.is_gone else 1 if not node.is_folder else self._links_of_folder(state.key)
        atime_ns = kept.mtime_ns if kept.atime_ns is None else kept.atime_ns
        owner = kept.uid, kept.gid
        return Attr(node.ino, kept.mode, *owner, size, mtime_ns, ctime_ns, links, state.complete, kept.rdev, atime_ns)

    def _links_of_folder(self, key: str) -> int:
        """Return one for its name, its own and each folder's in it; 1 for 'not counted', as btrfs has it."""
        n_folders = self.view.count_folders(key)
        return 1 if n_folders is None else 2 + n_folders

    def attr_now(self, node: Node) -> Attr:
        """Return the answer to stat(2) for a node as it is now."""
        return self.attr(node, self.state_of(node))

    # --- which inode it is -------------------------------------------------------------------------------------------

    def make(self, folder: Node, name: str, state: State) -> Node:
        """Return the node of a name, after `look`. The kernel keeps an inode's bytes and size for its own, so what
        somebody else has put under the name gets another one."""
        node, content = self.tree.make(folder, name, is_folder=state.content is None), state.content
        if not node.cached and content is not None:
            node.cached = content.etag if isinstance(content, Stored) else LOCAL
        return node

    def is_another(self, node: Node, content: Content | None) -> bool:
        """Return whether what a file's key has now are other bytes than those that the kernel knows the inode for."""
        if not isinstance(content, Stored) or node.is_folder or node.draft is not None:
            return False
        return node.cached not in ("", content.etag)

    def is_known_as(self, node: Node, state: State) -> bool:
        """Return whether an inode is what was listed some time ago."""
        if node.is_folder or state.content is None:
            return node.is_folder and state.content is None
        if node.draft is not None:
            return True
        return node.cached == (state.content.etag if isinstance(state.content, Stored) else LOCAL)

    # --- changes of names --------------------------------------------------------------------------------------------

    def touch(self, folder: Node) -> None:
        """Change a folder's times, in memory only: something in it has another name."""
        folder.ctime_ns = folder.mtime_ns = time.time_ns()

    def detach(self, folder: Node, name: str) -> None:
        """Take the name of a file that is about to lose it. Whoever has the file open goes on reading it."""
        node = folder.child(name)
        if node is None:
            return
        if node.open is not None:
            self.files.keep_bytes(node.open)
            self.files.take_name(node.open)
        self.tree.unname(node)

    def take_name(self, node: Node) -> None:
        """Take the name of a file in whose place somebody else has put something else, or nothing. Who has it open may
        go on reading; what they write has no place to go to."""
        if node.open is not None:
            self.files.take_name(node.open, Name.REPLACED)
        self.tree.unname(node)

    def detach_replaced(self, node: Node) -> State:
        """Take the name of a file that somebody has replaced or deleted elsewhere while it is open here. For who has it
        open it is what it was: return its state."""
        if node.parent is not None and not node.is_gone:
            self.on_stale(node.parent.ino, node.name)
            self.take_name(node)
        return self.state_of(node)

    def forget_old(self) -> None:
        """Ask the kernel to forget what it was told long ago: it keeps that for as long as it has memory, and so would
        we."""
        for node in self.tree.take_old(_MOST_NODES):
            if node.parent is not None:
                self.on_stale(node.parent.ino, node.name)
