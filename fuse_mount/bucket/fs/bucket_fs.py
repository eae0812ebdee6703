"""A live bucket prefix as a directory that can be read and written; knows nothing of FUSE.

Used by `pyfuse3_adapter`, or by any other skin. Calls work on inode numbers and handles and raise `OSError` for what a
file system refuses, `core.errors` for what fails, and `Needs` for what has to be done first: its `load` is to be
called, in a thread, and then the call made again. They take the engine's lock and never wait themselves. Changes of
names (`unlink`, `rename`, `mkdir`, `rmdir`, `symlink`) are durable after a `commit`; what was written, after what
`flush` and `fsync` return was done.

This is the front: the work is in `bucket_names`, `bucket_rename`, `bucket_attributes`, `bucket_handles` and
`bucket_listings`, over `bucket_nodes`, and they share one `bucket_mounted.Mounted`.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from datacache.store.base import ObjectInfo
from datacache.writeback.model import Pending, Stored
from datacache.writeback.overlay import parent_of
from datacache.writeback.upload.conflicts import conflict_key
from fuse_mount.bucket.fs.attributes import Changes, Setting
from fuse_mount.bucket.fs.files import OpenFile
from fuse_mount.bucket.fs.handles import Handles
from fuse_mount.bucket.fs.listings import DirEntry, Listings
from fuse_mount.bucket.fs.names import LONGEST_LINK, Names
from fuse_mount.bucket.fs.nodes import LONGEST_NAME, Attr, Nodes
from fuse_mount.bucket.fs.rename import Renaming
from fuse_mount.bucket.fs.shared import Mounted

if TYPE_CHECKING:
    from datacache.writeback.live import LiveBucket

__all__ = ["LONGEST_NAME", "Attr", "BucketFs", "Changes", "DirEntry"]

_log = logging.getLogger("fuse_mount")
_QUICK_COMMIT_S = 0.001


class BucketFs:
    """One mount."""

    def __init__(self, live: LiveBucket, *, uid: int, gid: int, umask: int = 0o022) -> None:
        engine = live.engine
        self.live, self.engine = live, engine
        self.ttl_s = live.ttl_s
        self._mounted = mounted = Mounted(live, uid=uid, gid=gid, umask=umask)
        self.remote = mounted.remote
        self._tree = mounted.tree
        self._files = mounted.files
        self._nodes = nodes = Nodes(mounted)
        self._listings = Listings(mounted, nodes)
        self._handles = handles = Handles(mounted, nodes)
        self._setting = Setting(mounted, nodes, handles)
        self._names = Names(mounted, nodes, handles)
        self._renaming = Renaming(mounted, nodes, handles)
        engine.watcher = self
        mounted.memory.recall()

    @property
    def on_stale(self) -> Callable[[int, str], None]:
        """Called when the kernel should forget a name (inode number of the folder, name)."""
        return self._mounted.on_stale

    @on_stale.setter
    def on_stale(self, call: Callable[[int, str], None]) -> None:
        self._mounted.on_stale = call

    # --- names ------------------------------------------------------------------------------------------------------

    def lookup(self, parent: int, name: bytes) -> Attr:
        """The file or folder of a name. The kernel will `forget` it."""
        with self.engine.lock:
            folder, text = self._nodes.place(parent, name)
            state = self._nodes.state(folder, text)
            node = self._nodes.node(folder, text, state)
            self._tree.tell(node)
            self._nodes.forget_old()
            return self._nodes.attr(node, state)

    def forget(self, ino: int, count: int) -> None:
        """The kernel does not know it any more."""
        with self.engine.lock:
            self._tree.forget(ino, count)

    def getattr(self, ino: int) -> Attr:
        """Attributes of a file or folder."""
        with self.engine.lock:
            node = self._tree.get(ino)
            try:
                state = self._nodes.state_of(node)
            except OSError as exc:
                if node.open is None or exc.errno not in (errno.ESTALE, errno.ENOENT):
                    raise
                state = self._nodes.part(node)
            return self._nodes.attr(node, state)

    def setattr(self, ino: int, changes: Changes, handle: int | None = None) -> Attr:
        """Change attributes. A size is durable when this returns, unless the caller has the file open (`handle`)."""
        return self._setting.setattr(ino, changes, handle)

    def opendir(self, ino: int) -> int:
        """See `Listings.opendir`."""
        return self._listings.opendir(ino)

    def readdir(self, handle: int, start: int) -> list[DirEntry]:
        """See `Listings.readdir`."""
        return self._listings.readdir(handle, start)

    def entered(self, ino: int, entry: DirEntry) -> Attr:
        """See `Listings.entered`."""
        return self._listings.entered(ino, entry)

    def releasedir(self, handle: int) -> None:
        """See `Listings.releasedir`."""
        self._listings.releasedir(handle)

    def readlink(self, ino: int) -> bytes:
        """What a symbolic link points to."""
        with self.engine.lock:
            node = self._tree.get(ino)
            state = self._nodes.state_of(node)
            if not state.attributes.is_link:
                raise OSError(errno.EINVAL, "no symbolic link")
            file = node.open or OpenFile(node, state)
            return self._files.read(file, 0, LONGEST_LINK)

    # --- changes of names -------------------------------------------------------------------------------------------

    def create(self, parent: int, name: bytes, flags: int, *, mode: int, uid: int, gid: int) -> tuple[int, Attr]:
        """A new file, open: its handle. It is in the bucket only after it was closed or synced."""
        return self._names.create(parent, name, flags, mode=mode, uid=uid, gid=gid)

    def mkdir(self, parent: int, name: bytes, *, mode: int, uid: int, gid: int) -> Attr:
        """A new folder."""
        return self._names.mkdir(parent, name, mode=mode, uid=uid, gid=gid)

    def symlink(self, parent: int, name: bytes, target: bytes, *, uid: int, gid: int) -> Attr:
        """A new symbolic link."""
        return self._names.symlink(parent, name, target, uid=uid, gid=gid)

    def unlink(self, parent: int, name: bytes) -> None:
        """Delete a file. Who has it open goes on reading and writing it."""
        self._names.unlink(parent, name)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Delete an empty folder."""
        self._names.rmdir(parent, name)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """Give a file or folder another name, replacing what has it, in one step."""
        self._renaming.rename(parent, name, new_parent, new_name, flags)

    # --- open files -------------------------------------------------------------------------------------------------

    def open(self, ino: int, flags: int) -> int:
        """See `Handles.open`."""
        return self._handles.open(ino, flags)

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Bytes of an open file."""
        return self._handles.read(handle, offset, size)

    def write(self, handle: int, offset: int, data: bytes) -> int:
        """Write to an open file: how much was written, which is all."""
        return self._handles.write(handle, offset, data)

    def spoil(self, handle: int, exc: BaseException, n_bytes: int) -> str:
        """A write has failed: see `Handles.spoil`."""
        return self._handles.spoil(handle, exc, n_bytes)

    def save_losses(self) -> None:
        """Write down what was lost. Waits for a disk."""
        self.engine.losses.save()

    def flush(self, handle: int, *, wait: bool = True) -> Callable[[], None] | None:
        """close(2): see `Handles.flush`."""
        return self._handles.flush(handle, wait=wait)

    def is_small(self, handle: int) -> bool:
        """Whether an open file's bytes go into the journal."""
        return self._handles.is_small(handle)

    def fsync(self, handle: int) -> Callable[[], None]:
        """fsync(2): see `Handles.fsync`."""
        return self._handles.fsync(handle)

    def release(self, handle: int) -> Callable[[], None] | None:
        """The handle is not used any more: what is left to be done, in a thread."""
        return self._handles.release(handle)

    def long_open(self, for_s: float | None = None) -> list[tuple[int, Callable[[], None]]]:
        """Files that have been open for writing for a while: see `Handles.long_open`."""
        return self._handles.long_open(for_s)

    def commit(self, *, wait: bool = True) -> None:
        """Return when all changes of names so far are durable. May take long: with `wait`, for room as well."""
        self._handles.commit(wait=wait)

    @property
    def is_quick(self) -> bool:
        """Whether the staging area's disk is so fast that handing a sync to another thread costs more than waiting for
        it. (A thread costs some 0.1 ms, most of it with the interpreter's lock.)"""
        return self.engine.commit_s < _QUICK_COMMIT_S and self.engine.ack == "staged"

    def room(self) -> tuple[int, int] | None:
        """Bytes of the mount's quota and how many are in use; None where there is no quota."""
        with self.engine.lock:
            usage = self.engine.usage
            return (usage.quota_bytes, usage.used_bytes) if usage.quota_bytes else None

    def remember(self) -> None:
        """Write down what is known of the bucket, for a start while the store cannot be reached, and losses that the
        disk had no room for before. May take long; any thread."""
        self.save_losses()
        try:
            self._mounted.memory.remember()
        except OSError as exc:
            _log.info("what is known of the bucket was not written down: %s", exc)

    # --- what others did --------------------------------------------------------------------------------------------

    def uploaded(self, pending: Pending, info: ObjectInfo | None) -> None:
        """See `writeback.engine.Watcher`."""
        self._mounted.applied(pending.key, info, pending.attributes)
        node = self._tree.find(pending.key)
        if info is not None and isinstance(pending.content, Stored) and pending.content.key == pending.key:
            self._found_anew(pending.content, info.etag)
        if info is None or node is None or node.is_folder:
            return
        now = self.engine.overlay.get(pending.key)
        if now is None or now.content != pending.content:
            return
        if now.version == pending.version or isinstance(now.content, Stored):
            node.cached = info.etag
        file = node.open
        if file is not None:
            file.base = info.etag
            if now.version == pending.version:
                self._files.set_place(file, Stored(pending.key, info.size_bytes, info.etag))

    def _found_anew(self, old: Stored, etag: str) -> None:
        """Only an object's attributes were changed. Whoever was renamed meanwhile has its bytes under a new ETag."""
        for key in self.engine.overlay.needed_by(old.key):
            node = self._tree.find(key)
            if node is not None and node.cached == old.etag:
                node.cached = etag
            if node is not None and node.open is not None and node.open.content == old:
                self._files.set_place(node.open, old._replace(etag=etag))

    def moved(self, key: str, new_key: str, theirs: ObjectInfo | None) -> None:
        """See `writeback.engine.Watcher`."""
        node = self._tree.find(key)
        self._mounted.applied(key, theirs, None)
        if theirs is None:
            self.remote.expire(parent_of(key))
        if node is None:
            return
        parent, name = node.parent, node.name
        file = node.open
        if not new_key and file is not None and (file.writers or (file.draft is not None and file.draft.dirty)):
            # What is being written is ours all the same, and is to have a name when it is closed.
            new_key = conflict_key(
                key,
                time.time(),
                self.engine.host,
                lambda k: self.engine.overlay.get(k) is not None,
                prefix=self.engine.prefix,
            )
            _log.warning("%s is open for writing: what is written goes on as %s", key, new_key)
        if new_key:
            self._tree.rename(node, node.parent or self._tree.root, new_key[len(parent_of(new_key)) :])
            if file is not None:
                file.base = ""
        else:
            self._nodes.replaced(node)
        if parent is not None:
            self.on_stale(parent.ino, name)
