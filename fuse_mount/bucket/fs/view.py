"""The view of a read-write mount: the bucket as it is known, and above it what is pending.

Part of `BucketFs`, under its lock; nothing here waits (see `writeback.sections`). Where a folder and a file
have the same name the folder is shown. A bucket knows no folders: `keep_folder` and `plan_folder_deletion` say when one
stays or goes.
"""

from __future__ import annotations

from typing import NamedTuple

from datacache.writeback.engine import WriteBack
from datacache.writeback.model import Attributes, Content, Pending, Stored
from datacache.writeback.remote.bucket import RemoteView

FOLDER_BASE = "folder"
"""`Pending.base` of a folder that the bucket has, with or without a marker object."""

_MOST_COUNTED = 100
"""Pending names of a folder that stat(2) may look through."""


class State(NamedTuple):
    """The file or folder under a name."""

    key: str
    attributes: Attributes
    content: Content | None
    """None for a folder."""
    base: str
    """ETag of the object that the bucket has under this key; '' for none."""
    complete: bool = True
    """False while the object's metadata was not looked at."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of content."""
        return self.content.size_bytes if self.content is not None else 0


class View:
    """One mount's files and folders by key."""

    def __init__(self, engine: WriteBack, remote: RemoteView) -> None:
        self.engine, self.remote = engine, remote
        self._overlay = engine.overlay

    def look(self, folder: str, name: str, *, plain: bool = False, older: bool = False) -> State | None:
        """Return what lies under a name of a folder; None for nothing. With `plain` without asking for attributes, with
        `older` from a listing of any age."""
        file_key = folder + name
        folder_key = f"{file_key}/"
        marker, pending = self._overlay.get(folder_key), self._overlay.get(file_key)
        if marker is not None and marker.attributes is not None:
            return State(folder_key, marker.attributes, None, marker.base)
        if pending is not None and pending.attributes is not None:
            return State(file_key, pending.attributes, pending.content, pending.base)
        if self._overlay.anything_below(folder_key) and self._overlay.exists_below(folder_key):
            return self._folder_state(folder_key, FOLDER_BASE if marker is None else marker.base, plain)
        if marker is not None and pending is not None:
            return None
        file, is_folder = self.remote.entry(folder, name, older=older)
        if is_folder and marker is None:
            return self._folder_state(folder_key, FOLDER_BASE, plain)
        if file is None or pending is not None:
            return None
        content = Stored(file_key, file.size_bytes, file.etag)
        if not plain:
            return State(file_key, self.remote.attributes(file_key, file), content, file.etag)
        return State(file_key, self.remote.plain_attributes(file), content, file.etag, file.attributes is not None)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, in order."""
        remote = self.remote.folder(folder)
        found = set(remote.files)
        found.update(name[:-1] for name in remote.folders)
        for name in self._overlay.names(folder):
            plain = name.rstrip("/")
            folder_key = f"{folder}{plain}/"
            marker, pending = self._overlay.get(folder_key), self._overlay.get(folder + plain)
            if (
                any(each is not None and each.attributes is not None for each in (marker, pending))
                or self._overlay.exists_below(folder_key)
                or (f"{plain}/" in remote.folders and marker is None)
                or (plain in remote.files and pending is None)
            ):
                found.add(plain)
            else:
                found.discard(plain)
        return sorted(found)

    def count_folders(self, folder: str) -> int | None:
        """Return how many folders lie in a folder; None where that has to be asked for, or much is pending in it."""
        remote = self.remote.folders(folder)
        if remote is None or self._overlay.n_names(folder) > _MOST_COUNTED:
            return None
        count = len(remote)
        for name in self._overlay.names(folder):
            if name.endswith("/"):
                key, was_there = folder + name, name in remote
                marker = self._overlay.get(key)
                if marker is None:
                    is_there = was_there or self._overlay.exists_below(key)
                else:
                    is_there = marker.attributes is not None
                count += is_there - was_there
        return count

    def folder_attributes(self, folder: str) -> Attributes:
        """Return a folder's attributes, as far as they are known."""
        pending = self._overlay.get(folder)
        if pending is not None and pending.attributes is not None:
            return pending.attributes
        return self.remote.plain_folder_attributes(folder)

    def _folder_state(self, key: str, base: str, plain: bool) -> State:
        if plain:
            return State(key, self.remote.plain_folder_attributes(key), None, base, complete=False)
        return State(key, self.remote.folder_attributes(key), None, base)

    # --- folders that stay or go -------------------------------------------------------------------------------------

    def remote_folder_base(self, folder: str, name: str) -> str:
        """Return the base of a folder that is or was here: whether the bucket has anything under its name."""
        _, is_folder = self.remote.entry(folder, name)
        return FOLDER_BASE if is_folder else ""

    def keep_folder(self, key: str) -> list[Pending]:
        """Return what has to become pending for a folder to stay that would be gone with the last object in it: an
        object of its own, unless it has one."""
        if not key or self._overlay.get(key) is not None or self.remote.has_marker(key):
            return []
        return [self.engine.plan_change(key, self.folder_attributes(key), None, base=FOLDER_BASE)]

    def plan_folder_deletion(self, key: str, base: str) -> tuple[list[Pending], list[str]]:
        """Do as `WriteBack.plan_deletion`, for a folder: it is deleted after all that is still to be deleted below it,
        or an upload that was under way would bring it back to sight."""
        old = self._overlay.get(key)
        if old is not None and (self._overlay.anything_below(key) or self.remote.has_filled(key)):
            version = self.engine.next_version()
            return [old._replace(attributes=None, content=None, base=FOLDER_BASE, version=version)], []
        return self.engine.plan_deletion(key, base=base)
