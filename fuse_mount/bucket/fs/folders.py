"""The folders of a read-write mount, in a bucket that knows none: what it has below them, and when they stay or go.

Part of `BucketFs`, under its lock, but for what `Needs` asks for: that waits for the store, and is called without it.
"""

from __future__ import annotations

import time
from dataclasses import replace

from datacache.writeback.engine import WriteBack
from datacache.writeback.model import Pending
from datacache.writeback.overlay import parent_of
from datacache.writeback.remote.bucket import Needs, RemoteView
from datacache.writeback.remote.known import RemoteFile, change_below
from fuse_mount.bucket.fs.tree import Node
from fuse_mount.bucket.fs.view import FOLDER_BASE, View

_TREE_S = 5.0
"""How long the list of what lies below a folder may take to be used for renaming it."""


class Folders:
    """One mount's folders by key."""

    def __init__(self, engine: WriteBack, remote: RemoteView, view: View) -> None:
        self._engine = engine
        self._remote = remote
        self._view = view
        self._below: dict[str, tuple[float, dict[str, RemoteFile]]] = {}
        self._in_bucket: set[str] = set()  # folders below which this process has put something into the bucket
        engine.listen(self._note_made)

    def made_here(self, folder: str) -> bool:
        """Whether a folder was made through this mount and the bucket cannot have anything in it."""
        pending = self._engine.overlay.get(folder)
        if pending is None or pending.attributes is None or folder in self._in_bucket:
            return False
        return not pending.base and not pending.touched

    def _note_made(self, pending: Pending) -> None:
        if pending.key.endswith("/") and self.made_here(pending.key):
            self._remote.made(pending.key)

    def take_below(self, key: str) -> dict[str, RemoteFile]:
        """What the bucket has below a folder, to be used at once."""
        made_here = self.made_here(key)
        taken_at, below = self._below.pop(key, (-1e9, {}))
        if not made_here and taken_at + _TREE_S < time.monotonic():
            raise Needs(lambda: self._look_below(key))
        return {} if made_here else below

    def _look_below(self, key: str) -> None:
        def take(found: dict[str, RemoteFile]) -> None:
            self._below[key] = (time.monotonic(), found)

        self._remote.below(key, take)

    def applied(self, key: str, file: RemoteFile | None, *, is_there: bool) -> None:
        """The bucket has something else under a key now."""
        for folder, (_, found) in self._below.items():
            change_below(found, folder, key, file)
        if is_there:
            above = parent_of(key)
            while above and above not in self._in_bucket:
                self._in_bucket.add(above)
                above = parent_of(above)

    def seen_base(self, folder: Node, name: str) -> str:
        """The base of a folder that is or was here: whether the bucket has anything under its name."""
        _, is_folder = self._remote.entry(folder.key, name)
        return FOLDER_BASE if is_folder else ""

    def kept(self, key: str) -> list[Pending]:
        """A folder that would be gone in the bucket with the last object in it is given an object of its own."""
        if self._view.has_marker(key):
            return []
        return [self._engine.change(key, self._view.folder_attributes(key), None, base=FOLDER_BASE)]

    def gone(self, key: str, base: str) -> tuple[list[Pending], list[str]]:
        """As `WriteBack.gone`, for a folder: it is deleted after all that is still to be deleted below it, or an upload
        that was under way would bring it back to sight."""
        old = self._engine.overlay.get(key)
        if old is not None and (self._engine.overlay.anything_below(key) or key in self._in_bucket):
            gone = replace(old, attributes=None, content=None, base=FOLDER_BASE, version=self._engine.next_version())
            return [gone], []
        return self._engine.gone(key, base=base)
