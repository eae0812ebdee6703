"""Everything that is pending, by key: in memory, without any I/O.

Part of the engine, which guards it with its lock. Besides the keys themselves it knows the folders they lie in (a
pending `a/b/c` makes the folders `a/` and `a/b/` known) and which keys still need an object under another key.
"""

from __future__ import annotations

from collections.abc import Iterator

from datacache.writeback.model import Pending, Stored
from datacache.writeback.staging.quota import Usage


def parent_of(key: str) -> str:
    """The folder a key lies in: '' or ending in '/'."""
    return key[: key.rstrip("/").rfind("/") + 1]


def name_of(key: str) -> str:
    """The last part of a key, with the slash of a folder."""
    return key[key.rstrip("/").rfind("/") + 1 :]


class Overlay:
    """Pending keys, replaced as a whole with `set` and taken away with `drop`."""

    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}
        # Folder -> names right in it, of pending keys or of folders with pending keys below them.
        self._names: dict[str, dict[str, None]] = {}
        self._needs: dict[str, dict[str, None]] = {}  # key of a stored object -> keys whose content it is
        self.usage = Usage(self._pending)
        """How many bytes there are, these included."""

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._pending.values()))

    def get(self, key: str) -> Pending | None:
        """What is pending of a key."""
        return self._pending.get(key)

    def set(self, pending: Pending) -> None:
        """Replace what is pending of a key."""
        key = pending.key
        old = self._pending.get(key)
        if old is not None:
            self._forget_need(old)
        self._pending[key] = pending
        if isinstance(pending.content, Stored) and pending.content.key != key:
            self._needs.setdefault(pending.content.key, {})[key] = None
        if old is None:
            self._enlist(key)
            if pending.base:
                self.usage.began(key, self._stored_bytes(pending))
        self.usage.changed(pending.size_bytes - (old.size_bytes if old is not None else 0))

    def drop(self, key: str) -> Pending | None:
        """Take a key away: what was pending of it."""
        old = self._pending.pop(key, None)
        if old is not None:
            self._forget_need(old)
            if key not in self._names:
                self._strike(key)
            self.usage.ended(key)
            self.usage.changed(-old.size_bytes)
        return old

    def names(self, folder: str) -> list[str]:
        """Names right in a folder of which something is pending at or below them; folders end in '/'."""
        return list(self._names.get(folder, ()))

    def below(self, folder: str) -> Iterator[str]:
        """All pending keys below a folder, without its own. Not to be changed meanwhile."""
        waiting = [folder]
        while waiting:
            above = waiting.pop()
            for name in self._names.get(above, ()):
                key = above + name
                if key in self._pending:
                    yield key
                if key in self._names:
                    waiting.append(key)

    def exists_below(self, folder: str) -> bool:
        """Whether a pending key below a folder is there (is not a deletion)."""
        return any(self._pending[key].attributes is not None for key in self.below(folder))

    def anything_below(self, folder: str) -> bool:
        """Whether anything is pending below a folder, deletions included."""
        return bool(self._names.get(folder))

    def needed_by(self, key: str) -> list[str]:
        """Other keys whose content still is the object stored under this key."""
        return list(self._needs.get(key, ()))

    def _stored_bytes(self, pending: Pending) -> int:
        """How large the object is that the bucket has under a pending key, as far as it is known."""
        content = pending.content
        if isinstance(content, Stored) and content.key == pending.key:
            return content.size_bytes
        for key in self._needs.get(pending.key, ()):
            return self._pending[key].size_bytes
        return self.usage.size_of(pending.key)

    def _enlist(self, key: str) -> None:
        while key:
            folder = parent_of(key)
            names = self._names.get(folder)
            if names is not None:
                names[name_of(key)] = None
                return  # the folders above know already
            self._names[folder] = {name_of(key): None}
            key = folder

    def _strike(self, key: str) -> None:
        while key:
            folder = parent_of(key)
            names = self._names[folder]
            names.pop(name_of(key), None)
            if names:
                return
            del self._names[folder]
            if folder in self._pending:
                return
            key = folder

    def _forget_need(self, old: Pending) -> None:
        if isinstance(old.content, Stored) and old.content.key != old.key:
            needs = self._needs[old.content.key]
            needs.pop(old.key, None)
            if not needs:
                del self._needs[old.content.key]
