"""How many bytes a prefix has, and how many it may have: what the bucket is known to have, what is pending, and what is
being written.

Part of the engine (`WriteBack.usage`), under its lock; without any I/O. `quota` walks the bucket's listing now and
then, which puts right what others did there and what was not known here. In between every upload and deletion of our
own is counted, and of each pending key how much of the bucket's bytes is its own: so overwriting counts the difference,
and a deletion gives room before it has reached the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from datacache.core.errors import QuotaError


class Walk:
    """A listing of the whole prefix that is under way, in the order of the keys."""

    __slots__ = ("at", "counted", "events", "total")

    def __init__(self) -> None:
        self.at = ""
        """The last key that was listed."""
        self.total = 0
        self.counted: dict[str, int] = {}
        """What `total` has of pending keys."""
        self.events: dict[str, int] = {}
        """Sizes of objects that this node has changed before they were listed."""


class Usage:
    """Bytes of one prefix. Keys are relative to it."""

    def __init__(self, pending: Container[str]) -> None:
        self.quota_bytes = 0
        """0: no quota."""
        self.bucket_bytes = 0
        """What the bucket has, as far as it is known."""
        self.is_known = False
        """Whether the bucket was walked to its end."""
        self.draft_bytes = 0
        """How much larger files are that are being written than they were when they were last acknowledged."""
        self.refused = 0
        """How often something did not fit."""
        self.size_of: Callable[[str], int] = lambda _key: 0
        """How large the bucket's object of a key is, as far as it is known."""
        self.on_refused: Callable[[], None] = lambda: None
        self._pending = pending
        self._pending_bytes = 0
        self._counted: dict[str, int] = {}  # of pending keys: what `bucket_bytes` has of them
        self._counted_bytes = 0
        self._walk: Walk | None = None

    @property
    def used_bytes(self) -> int:
        """What the bucket will have when all is uploaded."""
        return max(0, self.bucket_bytes - self._counted_bytes + self._pending_bytes + self.draft_bytes)

    @property
    def settled_bytes(self) -> int:
        """What the bucket has of keys of which nothing is pending."""
        return self.bucket_bytes - self._counted_bytes

    def begin(self, settled_bytes: int) -> None:
        """Begin with what an earlier process knew of the bucket. What that had pending is pending already."""
        self.bucket_bytes = settled_bytes + self._counted_bytes

    @property
    def is_near(self) -> bool:
        """Whether there is little room left."""
        return self.used_bytes > self.quota_bytes * 0.9

    def expect_room(self, n_bytes: int) -> None:
        """Raise `QuotaError` unless there may be this many bytes more."""
        if self.quota_bytes and self.used_bytes + n_bytes > self.quota_bytes:
            self.refused += 1
            self.on_refused()
            raise QuotaError(
                f"the quota of this mount is used up ({self.quota_bytes:,} bytes)",
                hint="Delete something, or have the quota raised.",
            )

    # --- what is pending, told by the overlay ------------------------------------------------------------------------

    def began(self, key: str, size_bytes: int) -> None:
        """A key became pending, of which the bucket has so many bytes."""
        self._count(key, size_bytes)
        if self._walk is not None and size_bytes and key <= self._walk.at:
            self._walk.counted[key] = size_bytes

    def changed(self, n_bytes: int) -> None:
        """What is pending has this many bytes more; fewer, if negative."""
        self._pending_bytes += n_bytes

    def ended(self, key: str) -> None:
        """A key is not pending any more."""
        self._count(key, 0)
        if self._walk is not None:
            self._walk.counted.pop(key, None)

    def applied(self, key: str, size_bytes: int) -> None:
        """The bucket has this much under a pending key now."""
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
        """A listing begins."""
        self._walk = Walk()

    def listed(self, page: Iterable[tuple[str, int]]) -> None:
        """Keys and sizes of objects as they were listed."""
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
        """The listing has ended; or broke off, and nothing is known anew."""
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
