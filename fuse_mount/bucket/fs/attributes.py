"""Attributes of a read-write mount's files and folders, and their size: setattr.

Part of `BucketFs`; takes its lock itself, and never waits but in what `Needs` asks for.
"""

from __future__ import annotations

import errno
import stat
import time
from dataclasses import dataclass, replace

from datacache.writeback.model import Attributes
from datacache.writeback.remote.bucket import Needs
from fuse_mount.bucket.fs.files import OpenFile
from fuse_mount.bucket.fs.handles import Handles
from fuse_mount.bucket.fs.nodes import Attr, Nodes
from fuse_mount.bucket.fs.shared import Mounted
from fuse_mount.bucket.fs.tree import Node
from fuse_mount.bucket.fs.view import State


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What setattr is to change; None: as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    mtime_ns: int | None = None
    ctime_ns: int | None = None
    """When the kernel saw the change; None: now. With its write-back cache it tells us late of what it has changed."""


class Setting:
    """One mount's changes of attributes."""

    def __init__(self, mounted: Mounted, nodes: Nodes, handles: Handles) -> None:
        self._mounted = mounted
        self._engine = mounted.engine
        self._tree = mounted.tree
        self._files = mounted.files
        self._nodes = nodes
        self._handles = handles

    def setattr(self, ino: int, changes: Changes, handle: int | None = None) -> Attr:
        """Change attributes. A size is durable when this returns, unless the caller has the file open (`handle`)."""
        with self._engine.lock:
            node = self._tree.get(ino)
            state = self._nodes.state_of(node)
            if node.open is not None and replace(changes, mtime_ns=None, ctime_ns=None) != Changes():
                self._files.expect_current(node.open)  # times are sent by the kernel when somebody only reads, too
            if changes.size is not None:
                if state.content is None:
                    raise OSError(errno.EISDIR, "it is a folder")
                self._truncate(node, state, changes.size, handle)
                state = self._nodes.state_of(node)
            attributes = _changed(state.attributes, changes)
            node.ctime_ns = changes.ctime_ns if changes.ctime_ns is not None else time.time_ns()
            if changes.mtime_ns is not None:
                node.mtime_ns = 0
            if attributes != state.attributes:
                self._set_attributes(node, state, attributes)
            return self._nodes.attr(node, self._nodes.state_of(node))

    def _set_attributes(self, node: Node, state: State, attributes: Attributes) -> None:
        if node is self._tree.root:
            self._mounted.root_attributes = attributes
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
        old = self._engine.overlay.get(state.key)
        ready = old.ready if old is not None else True
        self._engine.record([self._engine.change(state.key, attributes, state.content, base=state.base, ready=ready)])

    def _truncate(self, node: Node, state: State, size: int, handle: int | None) -> None:
        if self._handles.truncate(handle, size):
            return
        file = node.open
        draft = file.draft if file is not None else None
        if size != (file.size_bytes if file is not None else state.size_bytes) or (draft is not None and draft.dirty):
            raise Needs(lambda: self._truncate_now(node, size))

    def _truncate_now(self, node: Node, size: int) -> None:
        """truncate(2), without a handle: durable when it returns."""
        with self._engine.lock:
            if node.open is None:
                node.open = OpenFile(node, self._nodes.state_of(node))
            file = node.open
            file.handles += 1  # it is not to go meanwhile
        try:
            while True:
                try:
                    with self._engine.lock:
                        self._files.truncate(file, size)
                    break
                except Needs as needs:
                    needs.load()
            self._handles.settle(file)
        finally:
            with self._engine.lock:
                file.handles -= 1
            self._handles.close_if_unused(file)


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
