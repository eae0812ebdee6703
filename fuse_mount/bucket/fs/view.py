"""What a read-write mount shows: the bucket as it is known, and above it what is pending.

Part of `BucketFs`, under its lock; nothing here waits (see `writeback.remote.Needs`). Where a folder and a file have
the same name the folder is shown.
"""

from __future__ import annotations

from typing import NamedTuple

from datacache.writeback.engine import WriteBack
from datacache.writeback.model import Attributes, Content, Pending, Stored
from datacache.writeback.overlay import parent_of
from datacache.writeback.remote.bucket import RemoteView
from datacache.writeback.remote.known import RemoteFile

FOLDER_BASE = "folder"
"""`Pending.base` of a folder that the bucket has, with or without a marker object."""


class State(NamedTuple):
    """What lies under a name."""

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
        """Bytes of content."""
        return self.content.size_bytes if self.content is not None else 0


class View:
    """One mount's files and folders by key."""

    def __init__(self, engine: WriteBack, remote: RemoteView) -> None:
        self._overlay = engine.overlay
        self._remote = remote

    def look(self, folder: str, name: str, *, plain: bool = False) -> State | None:
        """What lies under a name of a folder; None for nothing. With `plain` without asking for attributes."""
        file_key = folder + name
        folder_key = f"{file_key}/"
        marker, pending = self._overlay.get(folder_key), self._overlay.get(file_key)
        if marker is not None and marker.attributes is not None:
            return State(folder_key, marker.attributes, None, marker.base)
        if pending is not None and pending.attributes is not None:
            return _pending_state(pending)
        if self._overlay.anything_below(folder_key) and self._overlay.exists_below(folder_key):
            return self._folder_state(folder_key, FOLDER_BASE if marker is None else marker.base, plain)
        if marker is not None and pending is not None:
            return None
        file, is_folder = self._remote.entry(folder, name)
        if is_folder and marker is None:
            return self._folder_state(folder_key, FOLDER_BASE, plain)
        if file is not None and pending is None:
            return self._file_state(file_key, file, plain)
        return None

    def look_at(self, key: str, *, plain: bool = False) -> State | None:
        """The same by key. The kind that the key says is not looked at."""
        folder = parent_of(key)
        return self.look(folder, key[len(folder) :].rstrip("/"), plain=plain)

    def names(self, folder: str) -> list[tuple[str, bool]]:
        """Names in a folder and whether each is a folder, in order."""
        remote = self._remote.folder(folder)
        found = dict.fromkeys(remote.files, False)
        found |= {name[:-1]: True for name in remote.folders}
        for name in self._overlay.names(folder):
            plain = name.rstrip("/")
            folder_key = f"{folder}{plain}/"
            marker, pending = self._overlay.get(folder_key), self._overlay.get(folder + plain)
            if (marker is not None and marker.attributes is not None) or self._overlay.exists_below(folder_key):
                found[plain] = True
            elif pending is not None and pending.attributes is not None:
                found[plain] = False
            else:
                there = (f"{plain}/" in remote.folders and marker is None, plain in remote.files and pending is None)
                if any(there):
                    found[plain] = there[0]
                else:
                    found.pop(plain, None)
        return sorted(found.items())

    def has_marker(self, folder: str) -> bool:
        """Whether a folder is there even when nothing lies in it."""
        return not folder or self._overlay.get(folder) is not None or self._remote.has_marker(folder)

    def folder_attributes(self, folder: str) -> Attributes:
        """A folder's attributes, as far as they are known."""
        pending = self._overlay.get(folder)
        if pending is not None and pending.attributes is not None:
            return pending.attributes
        return self._remote.plain_folder_attributes(folder)

    def _folder_state(self, key: str, base: str, plain: bool) -> State:
        if plain:
            return State(key, self._remote.plain_folder_attributes(key), None, base, complete=False)
        return State(key, self._remote.folder_attributes(key), None, base)

    def _file_state(self, key: str, file: RemoteFile, plain: bool) -> State:
        content = Stored(key, file.size_bytes, file.etag)
        if not plain:
            return State(key, self._remote.attributes(key, file), content, file.etag)
        return State(key, self._remote.plain_attributes(file), content, file.etag, file.attributes is not None)


def _pending_state(pending: Pending) -> State:
    if pending.attributes is None:
        raise ValueError(f"{pending.key} is gone")
    return State(pending.key, pending.attributes, pending.content, pending.base)
