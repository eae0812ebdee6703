"""Everything that is pending, by key, and how many bytes there are with it: in memory, without any I/O.

Part of the engine, which guards it with its lock. Besides the keys themselves the overlay knows the folders they lie in
(a pending `a/b/c` makes the folders `a/` and `a/b/` known) and which keys still need an object under another key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator

from datacache.core.errors import QuotaError
from datacache.writeback.model import Pending, Stored, name_of, parent_of


class Overlay:
    """Pending keys, replaced as a whole with `set` and taken away with `drop`. `size_of` says how large the bucket's
    object of a key is, as far as it is known."""

    def __init__(self, size_of: Callable[[str], int] = lambda _key: 0) -> None:
        self._size_of = size_of
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
        """Return what is pending of a key."""
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
                self.usage.begin_key(key, self._stored_bytes(pending))
        self.usage.add_pending(pending.size_bytes - (old.size_bytes if old is not None else 0))

    def drop(self, key: str) -> Pending | None:
        """Take a key away, and return what was pending of it."""
        old = self._pending.pop(key, None)
        if old is not None:
            self._forget_need(old)
            if key not in self._names:
                self._strike(key)
            self.usage.end_key(key)
            self.usage.add_pending(-old.size_bytes)
        return old

    def names(self, folder: str) -> list[str]:
        """Return the names right in a folder of which something is pending at or below them; folders end in '/'."""
        return list(self._names.get(folder, ()))

    def n_names(self, folder: str) -> int:
        """Return how many `names` there are."""
        return len(self._names.get(folder, ()))

    def below(self, folder: str) -> Iterator[str]:
        """Yield all pending keys below a folder, without its own. Not to be changed meanwhile."""
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
        """Return whether a pending key below a folder is there (is not a deletion)."""
        return any(self._pending[key].attributes is not None for key in self.below(folder))

    def anything_below(self, folder: str) -> bool:
        """Return whether anything is pending below a folder, deletions included."""
        return bool(self._names.get(folder))

    def needed_by(self, key: str) -> list[str]:
        """Return other keys whose content still is the object stored under this key."""
        return list(self._needs.get(key, ()))

    def _stored_bytes(self, pending: Pending) -> int:
        """Return how large the object is that the bucket has under a pending key, as far as it is known."""
        content = pending.content
        if isinstance(content, Stored) and content.key == pending.key:
            return content.size_bytes
        for key in self._needs.get(pending.key, ()):
            return self._pending[key].size_bytes
        return self._size_of(pending.key)

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


class _Walk:
    """A listing of the whole prefix that is under way, in the order of the keys."""

    __slots__ = ("at", "counted", "events", "total")

    def __init__(self) -> None:
        self.at = ""
        """The last key that was listed."""
        self.total = 0
        self.counted: dict[str, int] = {}
        """The share of pending keys in `total`."""
        self.events: dict[str, int] = {}
        """Sizes of objects that this node has changed before they were listed."""


class Usage:
    """The bytes that a prefix has, and may have: the bucket's, what is pending, and what is being written.

    `Quota` walks the bucket's listing now and then, which puts right what others did there and what was not known here.
    In between every upload and deletion of our own is counted, and of each pending key how much of the bucket's bytes
    is its own: so overwriting counts the difference, and a deletion gives room before it has reached the bucket.
    """

    def __init__(self, pending: Container[str]) -> None:
        self.quota_bytes = 0
        """0: no quota."""
        self.bucket_bytes = 0
        """The bucket's own, as far as it is known."""
        self.is_known = False
        """Tells whether the bucket was walked to its end."""
        self.draft_bytes = 0
        """How much larger files are that are being written than they were when they were last acknowledged."""
        self.refused = 0
        """How often something did not fit."""
        self.wants_walk = threading.Event()
        """Set when something did not fit: a walk may find room."""
        self._pending = pending
        self._pending_bytes = 0
        self._counted: dict[str, int] = {}  # of pending keys: their share of `bucket_bytes`
        self._counted_bytes = 0
        self._walk: _Walk | None = None

    @property
    def used_bytes(self) -> int:
        """Return how many bytes the bucket will have when all is uploaded."""
        return max(0, self.bucket_bytes - self._counted_bytes + self._pending_bytes + self.draft_bytes)

    @property
    def settled_bytes(self) -> int:
        """Return how many bytes the bucket has of keys of which nothing is pending."""
        return self.bucket_bytes - self._counted_bytes

    def begin(self, settled_bytes: int) -> None:
        """Begin with what an earlier process knew of the bucket. What that had pending is pending already."""
        self.bucket_bytes = settled_bytes + self._counted_bytes

    @property
    def is_near(self) -> bool:
        """Return whether there is little room left."""
        return self.used_bytes > self.quota_bytes * 0.9

    def expect_room(self, n_bytes: int) -> None:
        """Raise `QuotaError` unless there may be this many bytes more."""
        if self.quota_bytes and self.used_bytes + n_bytes > self.quota_bytes:
            self.refused += 1
            self.wants_walk.set()
            raise QuotaError(
                f"the quota of this mount is used up ({self.quota_bytes:,} bytes)",
                hint="Delete something, or have the quota raised.",
            )

    # --- what is pending, told by the overlay ------------------------------------------------------------------------

    def begin_key(self, key: str, size_bytes: int) -> None:
        """Count a key that became pending, of which the bucket has so many bytes."""
        self._count(key, size_bytes)
        if self._walk is not None and size_bytes and key <= self._walk.at:
            self._walk.counted[key] = size_bytes

    def add_pending(self, n_bytes: int) -> None:
        """Count this many bytes more as pending; fewer, if negative."""
        self._pending_bytes += n_bytes

    def end_key(self, key: str) -> None:
        """Count a key as not pending any more."""
        self._count(key, 0)
        if self._walk is not None:
            self._walk.counted.pop(key, None)

    def apply_own(self, key: str, size_bytes: int) -> None:
        """Count what this node has brought to the bucket under a pending key; 0: nothing is there any more."""
        self.bucket_bytes += size_bytes - self._counted.get(key, 0)
        if key in self._pending:
            self._count(key, size_bytes)
        walk = self._walk
        if walk is None:
            return
        if key > walk.at or key in walk.events:
            walk.events[key] = size_bytes
        else:
            walk.total += size_bytes - walk.counted.get(key, 0)
            walk.counted[key] = size_bytes

    def _count(self, key: str, size_bytes: int) -> None:
        self._counted_bytes += size_bytes - self._counted.pop(key, 0)
        if size_bytes:
            self._counted[key] = size_bytes

    # --- walking the bucket ------------------------------------------------------------------------------------------

    def begin_walk(self) -> None:
        """Begin a listing of the whole prefix."""
        self._walk = _Walk()

    def add_page(self, page: Iterable[tuple[str, int]]) -> None:
        """Count keys and sizes of objects as they were listed."""
        walk = self._walk
        if walk is None:
            return
        for key, listed_bytes in page:
            size_bytes = walk.events.pop(key, listed_bytes)
            walk.total += size_bytes
            if size_bytes and key in self._pending:
                walk.counted[key] = size_bytes
            walk.at = max(walk.at, key)
        if not self.is_known:
            self.bucket_bytes = max(self.bucket_bytes, walk.total)

    def end_walk(self, *, complete: bool) -> None:
        """Take over what the listing has told; nothing of one that broke off."""
        walk, self._walk = self._walk, None
        if walk is None or not complete:
            return
        for key, size_bytes in walk.events.items():
            walk.total += size_bytes
            if size_bytes and key in self._pending:
                walk.counted[key] = size_bytes
        self.bucket_bytes, self.is_known = walk.total, True
        self._counted = {key: size for key, size in walk.counted.items() if size and key in self._pending}
        self._counted_bytes = sum(self._counted.values())
