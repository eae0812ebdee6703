"""New names in a read-write mount, and names that go: create, mkdir, symlink, unlink, rmdir.

Part of `BucketFs`; takes its lock itself, and never waits (see `writeback.remote.Needs`). What is changed is durable
after a commit.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from datacache.writeback.draft import Draft
from datacache.writeback.model import Attributes, Logged
from fuse_mount.bucket.fs.files import OpenFile
from fuse_mount.bucket.fs.handles import Handles
from fuse_mount.bucket.fs.nodes import Attr, Nodes
from fuse_mount.bucket.fs.shared import Mounted
from fuse_mount.bucket.fs.tree import LOCAL
from fuse_mount.bucket.fs.view import State

LONGEST_LINK = 4095


class Names:
    """One mount's names."""

    def __init__(self, mounted: Mounted, nodes: Nodes, handles: Handles) -> None:
        self._engine = mounted.engine
        self._usage = mounted.engine.usage
        self._view = mounted.view
        self._folders = mounted.folders
        self._tree = mounted.tree
        self._nodes = nodes
        self._handles = handles

    def create(self, parent: int, name: bytes, flags: int, *, mode: int, uid: int, gid: int) -> tuple[int, Attr]:
        """A new file, open: its handle. It is in the bucket only after it was closed or synced."""
        with self._engine.lock:
            folder, text = self._nodes.place(parent, name, new=True)
            key = folder.key + text
            old = self._nodes.look(folder, text)
            if old is not None:
                if flags & os.O_EXCL or old.content is None:
                    raise OSError(errno.EEXIST, "it is there already")
                node = self._nodes.node(folder, text, old)
                self._tree.tell(node)
                try:
                    handle = self._handles.open(node.ino, flags, fetches=False)  # the kernel knew of no such file
                except BaseException:  # `Needs`, or an error: the kernel is not told of it
                    self._tree.forget(node.ino, 1)
                    raise
                is_written = node.open is not None and node.open.draft is not None
                return handle, self._nodes.attr(node, self._nodes.state_of(node) if is_written else old)
            self._usage.expect_room(1)  # who is to write nothing hears of it now, and not when it closes the file
            gid = self._nodes.inherited_gid(folder, gid)
            attributes = Attributes(stat.S_IFREG | stat.S_IMODE(mode), uid, gid, time.time_ns())
            pending = self._engine.change(key, attributes, Logged(0), base="", ready=False)
            self._engine.record([pending])
            node = self._tree.make(folder, text, is_folder=False)
            self._tree.tell(node)
            self._nodes.forget_old()
            node.cached = LOCAL
            file = node.open = OpenFile(node, State(key, attributes, pending.content, pending.base))
            file.draft = Draft(self._engine, attributes)
            file.draft.changes = 1
            self._nodes.touch(folder)
            return self._handles.opened(file, writes=True), self._nodes.attr(node, self._nodes.state_of(node))

    def mkdir(self, parent: int, name: bytes, *, mode: int, uid: int, gid: int) -> Attr:
        """A new folder."""
        with self._engine.lock:
            folder, text = self._nodes.place(parent, name, new=True)
            if self._nodes.look(folder, text, plain=True) is not None:
                raise OSError(errno.EEXIST, "it is there already")
            inherited = self._nodes.inherited_gid(folder, gid)
            setgid = stat.S_ISGID if self._nodes.attributes(folder).mode & stat.S_ISGID else 0
            mode = stat.S_IFDIR | stat.S_IMODE(mode) | setgid
            attributes = Attributes(mode, uid, inherited, time.time_ns())
            key = f"{folder.key}{text}/"
            self._nodes.expect_short(key)
            self._engine.record([self._engine.change(key, attributes, None, base="")])
            node = self._tree.make(folder, text, is_folder=True)
            self._tree.tell(node)
            self._nodes.touch(folder)
            return self._nodes.attr(node, self._nodes.state_of(node))

    def symlink(self, parent: int, name: bytes, target: bytes, *, uid: int, gid: int) -> Attr:
        """A new symbolic link."""
        with self._engine.lock:
            folder, text = self._nodes.place(parent, name, new=True)
            if len(target) > LONGEST_LINK:
                raise OSError(errno.ENAMETOOLONG, "the link's target is too long")
            if self._nodes.look(folder, text, plain=True) is not None:
                raise OSError(errno.EEXIST, "it is there already")
            self._usage.expect_room(len(target))
            key = folder.key + text
            inherited = self._nodes.inherited_gid(folder, gid)
            attributes = Attributes(stat.S_IFLNK | 0o777, uid, inherited, time.time_ns())
            pending = self._engine.change(key, attributes, Logged(len(target)), base="")
            self._engine.record([pending], blobs={key: target})
            node = self._tree.make(folder, text, is_folder=False)
            self._tree.tell(node)
            self._nodes.touch(folder)
            return self._nodes.attr(node, self._nodes.state_of(node))

    def unlink(self, parent: int, name: bytes) -> None:
        """Delete a file. Who has it open goes on reading and writing it."""
        with self._engine.lock:
            folder, text = self._nodes.place(parent, name)
            state = self._nodes.state(folder, text, plain=True)
            if state.content is None:
                raise OSError(errno.EISDIR, "it is a folder")
            self._nodes.detach(folder, text)
            pendings, drop = self._engine.gone(state.key, base=state.base)
            pendings += self._folders.kept(folder.key)
            self._engine.record(pendings, drop=drop)
            self._nodes.touch(folder)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Delete an empty folder."""
        with self._engine.lock:
            folder, text = self._nodes.place(parent, name)
            state = self._nodes.state(folder, text, plain=True)
            if state.content is not None:
                raise OSError(errno.ENOTDIR, "it is a file")
            if self._view.names(state.key):
                raise OSError(errno.ENOTEMPTY, "the folder is not empty")
            pendings, drop = self._folders.gone(state.key, state.base or self._folders.seen_base(folder, text))
            pendings += self._folders.kept(folder.key)
            self._engine.record(pendings, drop=drop)
            node = self._tree.child(folder, text)
            if node is not None:
                self._tree.unname(node)
            self._nodes.touch(folder)
