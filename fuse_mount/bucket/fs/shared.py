"""What the parts of `BucketFs` share: one bucket as it is mounted.

Made by `BucketFs`, given to `Nodes`, `Listings`, `Handles`, `Setting`, `Names` and `Renaming`. All of it is guarded by
the engine's lock. No logic of its own.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from datacache.store.base import ObjectInfo
from datacache.writeback.model import Attributes
from datacache.writeback.remote.bucket import RemoteView
from datacache.writeback.remote.memory import RemoteMemory
from fuse_mount.bucket.fs.files import OpenFiles
from fuse_mount.bucket.fs.folders import Folders
from fuse_mount.bucket.fs.tree import Tree
from fuse_mount.bucket.fs.view import View

if TYPE_CHECKING:
    from datacache.writeback.live import LiveBucket


class Mounted:
    """One mount."""

    def __init__(self, live: LiveBucket, *, uid: int, gid: int, umask: int) -> None:
        engine = live.engine
        now = time.time_ns()
        self.live, self.engine = live, engine
        self.on_stale: Callable[[int, str], None] = lambda _parent, _name: None
        """See `BucketFs.on_stale`."""
        # Where a group is to write together, what its members make is the group's, whatever their own group is.
        shared = stat.S_ISGID if not umask & stat.S_IWGRP else 0
        self.root_attributes = Attributes(stat.S_IFDIR | shared | (0o777 & ~umask), uid, gid, now)
        self.remote = RemoteView(
            engine.bucket,
            engine.prefix,
            engine.lock,
            ttl_s=live.ttl_s,
            file_attributes=Attributes(stat.S_IFREG | (0o666 & ~umask), uid, gid, now),
            folder_attributes=self.root_attributes,
            made_here=self._made_here,
        )
        self.memory = RemoteMemory(engine.area.folder, self.remote, engine.lock)
        engine.before_commits(self.memory.write_lines)
        engine.usage.size_of = self.remote.size_of
        live.hidden, live.problem = self.remote.hidden, self.remote.problem
        self.view = View(engine, self.remote)
        self.folders = Folders(engine, self.remote, self.view)
        self.tree = Tree()
        self.files = OpenFiles(live)
        self._next_handle = 1

    def _made_here(self, folder: str) -> bool:
        return self.folders.made_here(folder)  # which needs what is made with this

    def new_handle(self) -> int:
        """A number for an open file or folder."""
        self._next_handle += 1
        return self._next_handle

    def applied(self, key: str, info: ObjectInfo | None, attributes: Attributes | None) -> None:
        """The bucket has something else under a key now."""
        file = self.remote.applied(key, info, attributes)
        self.memory.note(key, file, attributes)
        self.folders.applied(key, file, is_there=info is not None)
