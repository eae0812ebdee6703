"""Renaming the files and folders of a read-write mount, with all that lies below them in one record.

Part of `BucketFs`; takes its lock itself, and never waits but in what `Needs` asks for. The change is durable after a
commit.
"""

from __future__ import annotations

import errno
import time
from dataclasses import replace

from datacache.writeback.model import Logged, Pending, Stored
from datacache.writeback.remote.bucket import Needs
from datacache.writeback.remote.known import RemoteFile
from fuse_mount.bucket.fs.handles import Handles
from fuse_mount.bucket.fs.nodes import Nodes
from fuse_mount.bucket.fs.shared import Mounted
from fuse_mount.bucket.fs.tree import Node
from fuse_mount.bucket.fs.view import FOLDER_BASE, State

_BLOBS_AT_ONCE = 16 * 2**20
"""Bytes in the journal that the renaming of a folder takes along in one record."""


class Renaming:
    """One mount's renaming."""

    def __init__(self, mounted: Mounted, nodes: Nodes, handles: Handles) -> None:
        self._mounted = mounted
        self._engine = mounted.engine
        self._remote = mounted.remote
        self._view = mounted.view
        self._folders = mounted.folders
        self._tree = mounted.tree
        self._files = mounted.files
        self._nodes = nodes
        self._handles = handles

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """Give a file or folder another name, replacing what has it, in one step."""
        with self._engine.lock:
            folder, text = self._nodes.place(parent, name)
            new_folder, new_text = self._nodes.place(new_parent, new_name, new=True)
            if flags & ~1:  # RENAME_NOREPLACE is 1; exchanging is not offered
                raise OSError(errno.EINVAL, "these flags are not supported")
            state = self._nodes.state(folder, text)
            target = self._nodes.look(new_folder, new_text, plain=True)
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
                # The kernel may have an inode under the name that is not what was renamed.
                self._mounted.on_stale(new_folder.ino, new_text)
            self._nodes.touch(folder)
            self._nodes.touch(new_folder)

    def _rename_file(self, folder: Node, state: State, new_folder: Node, new_text: str, target: State | None) -> None:
        if target is not None and target.content is None:
            raise OSError(errno.EISDIR, "the new name is a folder's")
        node = self._tree.find(state.key)
        if node is not None and node.open is not None and node.open.draft is not None and node.open.draft.dirty:
            file = node.open
            raise Needs(lambda: self._handles.settle(file))
        self._nodes.detach(new_folder, new_text)
        new_key = new_folder.key + new_text
        base = target.base if target is not None else ""
        pendings, drop, blobs = self._moved(state.key, state, new_key, base)
        pendings += self._folders.kept(folder.key)
        self._engine.record(pendings, drop=drop, blobs=blobs)
        if node is not None and node.open is not None:
            node.open.base = pendings[0].base
            self._files.set_content(node.open, pendings[0].content or Logged(0))

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
            raise Needs(lambda: self._handles.settle_all(unsettled))
        logged = [p for k in self._engine.overlay.below(key) if (p := self._engine.overlay.get(k)) and _is_logged(p)]
        if sum(pending.size_bytes for pending in logged) > _BLOBS_AT_ONCE:
            raise Needs(lambda: self._spill(logged))
        base = target.base if target is not None else self._folders.seen_base(new_folder, new_text)
        below = self._folders.take_below(key)
        self._nodes.expect_short(new_key)
        pendings, drop, blobs = self._moved_below(key, new_key, below)
        pendings.append(self._engine.change(new_key, state.attributes, None, base=base))
        gone, dropped = self._folders.gone(key, state.base)
        pendings += gone + self._folders.kept(folder.key)
        self._engine.record(pendings, drop=drop + dropped, blobs=blobs)
        contents = {pending.key: pending for pending in pendings}
        for child in inside:
            if child.open is not None and (moved := contents.get(new_key + child.key[len(key) :])) is not None:
                if self._nodes.is_another(child, moved.content):
                    self._nodes.replaced(child)
                    continue
                child.open.base = moved.base
                self._files.set_content(child.open, moved.content or Logged(0))

    def _moved(
        self, key: str, state: State, new_key: str, base: str
    ) -> tuple[list[Pending], list[str], dict[str, bytes]]:
        """What is to be recorded for one object to have another key."""
        moved = self._engine.change(new_key, state.attributes, state.content, base=base)
        blobs = {}
        if isinstance(state.content, Logged) and state.content.size_bytes:
            blobs[new_key] = self._engine.blob(key)
        pendings, drop = self._engine.gone(key, base=state.base)
        return [moved, *pendings], drop, blobs

    def _moved_below(
        self, key: str, new_key: str, remote: dict[str, RemoteFile]
    ) -> tuple[list[Pending], list[str], dict[str, bytes]]:
        pendings: list[Pending] = []
        drops: list[str] = []
        blobs: dict[str, bytes] = {}
        states: dict[str, State] = {}
        for old_key, file in remote.items():
            attributes = file.attributes or self._remote.plain_attributes(file)
            if old_key.endswith("/"):
                states[old_key] = State(old_key, attributes, None, FOLDER_BASE)
            else:
                content = Stored(old_key, file.size_bytes, file.etag)
                states[old_key] = State(old_key, attributes, content, file.etag)
        for old_key in list(self._engine.overlay.below(key)):
            pending = self._engine.overlay.get(old_key)
            states.pop(old_key, None)
            if pending is not None and pending.attributes is not None:
                states[old_key] = State(old_key, pending.attributes, pending.content, pending.base)
        for old_key, state in states.items():
            moved_key = new_key + old_key[len(key) :]
            self._nodes.expect_short(moved_key)
            moved, drop, blob = self._moved(old_key, state, moved_key, "")
            old = self._engine.overlay.get(old_key)
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
            self._engine.fetching.spill(pending)


def _is_logged(pending: Pending) -> bool:
    return pending.ready and isinstance(pending.content, Logged)
