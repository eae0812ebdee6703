"""A live bucket prefix as a directory that can be read and written; knows nothing of FUSE.

Used by the skins (`bucket/kernel_skin.py`, `bucket/pyfuse3_skin.py`) through its parts: `names` and `handles`. Calls
work on inode numbers and handles and raise `OSError` for what a file system refuses, `core.errors` for what fails, and
`Load` or `Defer` (`writeback.sections`) for what has to be done in a thread. They take the engine's lock and never
wait themselves. Changes of names (`unlink`, `rename`, `mkdir`, `rmdir`, `symlink`, `mknod`) are durable after a
`commit`, `link` is by itself; what was written, after what `flush` and `fsync` return was done.

`names` and `handles` work on `nodes` (which inode), `view` (what lies under a key), `tree` (what the kernel knows) and
`files` (the bytes).
"""

from __future__ import annotations

import logging
import stat
import time
from collections.abc import Callable

from datacache.core.errors import DatacacheError
from datacache.store.base import ObjectInfo
from datacache.writeback.conflicts import conflict_key
from datacache.writeback.live import LiveBucket
from datacache.writeback.model import Attributes, Pending, Stored, name_of, parent_of
from datacache.writeback.remote.bucket import RemoteView
from fuse_mount.bucket.fs.files import OpenFiles
from fuse_mount.bucket.fs.handles import Handles
from fuse_mount.bucket.fs.mount_state import MountState, Notes
from fuse_mount.bucket.fs.names import Names
from fuse_mount.bucket.fs.nodes import Nodes
from fuse_mount.bucket.fs.tree import Tree
from fuse_mount.bucket.fs.view import View

_log = logging.getLogger("fuse_mount")
_QUICK_COMMIT_S = 0.001


class BucketFs:
    """One mount. `on_stale` is called with a folder's inode number and a name that the kernel should forget."""

    def __init__(
        self, live: LiveBucket, *, uid: int, gid: int, umask: int = 0o022, on_stale: Callable[[int, str], None]
    ) -> None:
        self.live, self.engine = live, live.engine
        now = time.time_ns()
        # Where a group is to write together, what its members make is the group's, whatever their own group is.
        shared = stat.S_ISGID if not umask & stat.S_IWGRP else 0
        root_attributes = Attributes(stat.S_IFDIR | shared | (0o777 & ~umask), uid, gid, now)
        file_attributes = Attributes(stat.S_IFREG | (0o666 & ~umask), uid, gid, now)
        self.remote = RemoteView(
            self.engine, ttl_s=live.ttl_s, file_attributes=file_attributes, folder_attributes=root_attributes
        )
        self.notes = Notes(self.engine.kept)
        files, view = OpenFiles(live, self.notes), View(self.engine, self.remote)
        self._nodes = Nodes(files, view, Tree(self.notes.changed), root_attributes=root_attributes, on_stale=on_stale)
        self._tree, self._files = self._nodes.tree, files
        self.handles = Handles(self._nodes, self.notes)
        self.names = Names(self._nodes, self.handles, self.notes)
        self.kept = MountState(self._nodes, self.handles, self.names, self.notes)
        with self.engine.lock:
            self._left = self.kept.restore()
            self.engine.watch(self)

    def finish_closing(self) -> None:
        """Do what an earlier server had still to do for files that were closed. Waits."""
        left, self._left = self._left, []
        for settle in left:
            try:
                settle()
            except (DatacacheError, OSError) as exc:
                _log.warning("a file that was being closed could not be made durable: %s", exc)

    @property
    def is_quick(self) -> bool:
        """Return whether the staging area's disk is so fast that handing a sync to another thread costs more than
        waiting for it. (A thread costs some 0.1 ms, most of it with the interpreter's lock.)"""
        return self.engine.commit_s < _QUICK_COMMIT_S and self.engine.ack == "staged"

    def room(self) -> tuple[int, int] | None:
        """Return the bytes of the mount's quota and how many are in use; None where there is no quota."""
        with self.engine.lock:
            usage = self.engine.usage
            return (usage.quota_bytes, usage.used_bytes) if usage.quota_bytes else None

    def remember(self) -> None:
        """Write down what is known of the bucket, for a start while the store cannot be reached, and losses that the
        disk had no room for before. May take long; any thread."""
        self.engine.losses.save()
        try:
            self.engine.memory.remember(self.engine.known, self.engine.lock)
        except OSError as exc:
            _log.info("what is known of the bucket was not written down: %s", exc)

    # --- what uploads change, told by the engine under the lock ------------------------------------------------------

    def note_uploaded(self, pending: Pending, info: ObjectInfo | None) -> None:
        """See `writeback.engine.Watcher`."""
        self.remote.note_answer()
        node = self._tree.find(pending.key)
        if info is not None and isinstance(pending.content, Stored) and pending.content.key == pending.key:
            self._move_needs(pending.content, info.etag)
        if info is None or node is None or node.is_folder:
            return
        now = self.engine.overlay.get(pending.key)
        if now is None or now.content != pending.content:
            return
        if now.version == pending.version or isinstance(now.content, Stored):
            node.cached = info.etag
        if node.open is not None:
            node.open.base = info.etag
            if now.version == pending.version:
                self._files.set_place(node.open, Stored(pending.key, info.size_bytes, info.etag))

    def _move_needs(self, old: Stored, etag: str) -> None:
        """Give nodes that were renamed from an object its new ETag: only its attributes were changed."""
        for key in self.engine.overlay.needed_by(old.key):
            node = self._tree.find(key)
            if node is not None and node.cached == old.etag:
                node.cached = etag
            if node is not None and node.open is not None and node.open.content == old:
                self._files.set_place(node.open, old._replace(etag=etag))

    def problem(self) -> tuple[str, float]:
        """See `writeback.engine.Watcher`."""
        return self.remote.problem()

    def note_moved(self, key: str, new_key: str, theirs: ObjectInfo | None) -> None:
        """See `writeback.engine.Watcher`."""
        engine, node = self.engine, self._tree.find(key)
        if theirs is None:
            self.remote.expire(parent_of(key))
        if node is None:
            return
        parent, name, file = node.parent, node.name, node.open
        if not new_key and file is not None and (file.writers or (file.draft is not None and file.draft.dirty)):
            # What is being written is ours all the same, and is to have a name when it is closed.
            new_key = conflict_key(
                key, time.time(), engine.host, lambda k: engine.overlay.get(k) is not None, prefix=engine.prefix
            )
            _log.warning("%s is open for writing: what is written goes on as %s", key, new_key)
        if new_key:
            above = self._tree.find(parent_of(new_key))  # perhaps not its folder: that may leave no room for the name
            self._tree.rename(node, above or self._tree.root, name_of(new_key))
            if file is not None:
                file.base = ""
        else:
            self._nodes.take_name(node)
        if parent is not None:
            self._nodes.on_stale(parent.ino, name)
