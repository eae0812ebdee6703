"""The changes from one snapshot to another.

Used by `catalog.refs`. Ranges that both have are skipped unread, so the cost follows the change, not the snapshots; a
few of the other ranges are held at a time. One thread for each iterator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Literal, NamedTuple

from datacache.manifest.codec import Range
from datacache.manifest.model import Entry
from datacache.manifest.reader import Manifest

Kind = Literal["added", "removed", "changed"]


class Change(NamedTuple):
    """A file that differs."""

    kind: Kind
    path: bytes
    before: Entry | None
    after: Entry | None


def diff(a: Manifest, b: Manifest) -> Iterator[Change]:
    """Yield the files added, removed and changed from `a` to `b`, in path order.

    A file is the same if its size and ETag are, wherever its object lies; without an ETag only if it is the same
    object. A link must lead to the same place, too, and permissions count where both snapshots know them. Folder
    markers are no files. Raise `CorruptManifestError` at a range that is missing or damaged."""
    before, after = _Side(a, b), _Side(b, a)
    while before.load() and after.load():
        until = min(before.last_path, after.last_path)
        yield from _changes(before, before.take(until), after, after.take(until))
    for left in (before, after):
        while left.load():
            yield from (left.alone(row, is_new=left is after) for row in left.take(left.last_path) if left.is_file(row))


class _Side:
    """The ranges of one snapshot that the other lacks, in order: the loaded one, and how far it was taken."""

    def __init__(self, manifest: Manifest, other: Manifest) -> None:
        self.manifest = manifest
        # A range that both have stands for the same objects, also where one has more sources: no entry can mean those.
        sources, more = sorted((manifest.root.sources, other.root.sources), key=len)
        shared = {info.blob for info in other.root.ranges} if more[: len(sources)] == sources else set()
        infos = manifest.root.ranges
        self._coming = manifest.ranges([number for number, info in enumerate(infos) if info.blob not in shared])
        self._held: Range | None = None
        self.versions: list[tuple[bytes, int, str]] = []
        """Path, size and ETag of the loaded rows."""
        self._row = 0

    @property
    def last_path(self) -> bytes:
        return self.versions[-1][0]

    def load(self) -> bool:
        """Load rows unless some are left. Return False at the end."""
        while self._row >= len(self.versions):
            self._held = next(self._coming, None)
            if self._held is None:
                return False
            self.versions, self._row = self._held.versions(), 0
        return True

    def take(self, until: bytes) -> range:
        """Take the loaded rows up to and including this path."""
        assert self._held is not None
        first, self._row = self._row, bisect_right(self._held.paths, until, self._row)
        return range(first, self._row)

    def is_file(self, row: int) -> bool:
        return self.versions[row][0][-1:] != b"/"

    def entry(self, row: int) -> Entry:
        assert self._held is not None
        return self._held.entry(row)

    def alone(self, row: int, *, is_new: bool) -> Change:
        """Return the change of a file that only this side has."""
        entry = self.entry(row)
        return Change("added", entry.path, None, entry) if is_new else Change("removed", entry.path, entry, None)


def _changes(before: _Side, old: range, after: _Side, new: range) -> Iterator[Change]:
    """Yield the changes between these rows, which cover the same stretch of paths."""
    removed, added = _rest(before, old, after, new), _rest(after, new, before, old)
    i = j = 0
    while i < len(removed) or j < len(added):
        one = before.versions[removed[i]][0] if i < len(removed) else None
        other = after.versions[added[j]][0] if j < len(added) else None
        if other is None or (one is not None and one < other):
            yield before.alone(removed[i], is_new=False)
            i += 1
        elif one is None or other < one:
            yield after.alone(added[j], is_new=True)
            j += 1
        else:
            was, now = before.entry(removed[i]), after.entry(added[j])
            if not _same_content(before.manifest, was, after.manifest, now):
                yield Change("changed", was.path, was, now)
            i, j = i + 1, j + 1


def _rest(side: _Side, rows: range, other: _Side, other_rows: range) -> list[int]:
    """Return the files of one side that the other lacks exactly so, or that only their entries can decide."""
    known = {version for version in other.versions[other_rows.start : other_rows.stop] if version[2]}
    return [row for row in rows if side.versions[row] not in known and side.is_file(row)]


def _same_content(a: Manifest, before: Entry, b: Manifest, after: Entry) -> bool:
    if before.size_bytes != after.size_bytes or before.target != after.target:
        return False
    if before.mode and after.mode and before.mode != after.mode:
        return False
    if before.is_folder_link:
        return True
    # Copies under the hash of their bytes are the same object, whatever the ETags of their originals were.
    return (before.etag == after.etag != "") or a.object_ref(before) == b.object_ref(after)
