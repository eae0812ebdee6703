"""Find rows and paths in a manifest, loading its ranges from the catalog as they are needed.

Used by everything that reads a snapshot. Safe from several threads and after `fork()` (it holds no connection; `load`
decides what a child does). Memory is bounded: it keeps at most `cached_rows` decoded rows, so a walk over millions of
files does not grow a process.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import lt
from typing import Any, cast

from datacache.core.errors import CorruptManifestError
from datacache.core.ids import ObjectRef
from datacache.manifest import codec
from datacache.manifest.codec import Range
from datacache.manifest.model import BlobId, Entry, Root

LoadBlobs = Callable[[Sequence[BlobId]], dict[BlobId, bytes]]
CACHED_ROWS = 400_000
_RANGES_AHEAD = 16


class Manifest:
    """The rows of one snapshot, by number and by path."""

    def __init__(self, root: Root, load: LoadBlobs, *, cached_rows: int = CACHED_ROWS) -> None:
        self.root = root
        self._load = load
        self._first_paths = [info.first_path for info in root.ranges]
        if not all(map(lt, self._first_paths, self._first_paths[1:])) or not all(info.rows for info in root.ranges):
            raise CorruptManifestError("the ranges of a manifest root are empty or out of order", hint=codec.REMAKE)
        self._first_rows = list(accumulate((info.rows for info in root.ranges), initial=0))
        self._prefixes = [source.prefix for source in root.sources]
        self._stores = [source.store for source in root.sources]
        self._ranges: dict[int, Range] = {}
        self._cached_rows = cached_rows
        self._rows_held = 0
        self._last: tuple[int, Entry] = -1, cast("Any", None)
        """The entry that was asked for last, and its row: mounts look a name up, then read."""

    @classmethod
    def open(cls, id: str, load: LoadBlobs) -> Manifest:
        """Load the manifest of the snapshot with this id. Raise `CorruptManifestError` if its root is missing."""
        root_id = BlobId(bytes.fromhex(id))
        return cls(codec.decode_root(_fetch(load, [root_id])[root_id]), load)

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self._first_rows[-1]

    def locate(self, row: int) -> tuple[Range, int, int]:
        """Return the range that holds a row, the row's position in it, and the range's number."""
        number = bisect_right(self._first_rows, row) - 1
        return self.range(number), row - self._first_rows[number], number

    def seek(self, path: bytes) -> int:
        """Return the first row whose path is `path` or sorts after it (`rows` if there is none)."""
        number = bisect_right(self._first_paths, path) - 1
        if number < 0:
            return 0
        return self._first_rows[number] + bisect_left(self.range(number).paths, path)

    def find(self, path: bytes) -> int | None:
        """Return the row of exactly this path, or None."""
        number = bisect_right(self._first_paths, path) - 1
        if number < 0:
            return None
        paths = self.range(number).paths
        index = bisect_left(paths, path)
        return self._first_rows[number] + index if index < len(paths) and paths[index] == path else None

    def path(self, row: int) -> bytes:
        """Return the path at a row."""
        held, index, _ = self.locate(row)
        return held.paths[index]

    def entry(self, row: int) -> Entry:
        """Return the entry at a row."""
        last, entry = self._last
        if last != row:
            held, index, _ = self.locate(row)
            entry = held.entry(index)
            self._last = row, entry
        return entry

    def object_ref(self, entry: Entry) -> ObjectRef:
        """Return the object, and the version of it, that holds an entry's bytes."""
        if entry.key is None:
            key = self._prefixes[entry.source] + entry.path.decode("utf-8", "surrogateescape")
        else:
            key = entry.key.decode("utf-8", "surrogateescape")
        store = self._stores[entry.source]
        root = root_of(store, self._prefixes[entry.source], key) if store == "file://" else -1
        if self.root.sources[entry.source].content_addressed:
            return ObjectRef(store, key, entry.size_bytes, root=root)
        return ObjectRef(store, key, entry.size_bytes, entry.etag, entry.version, root)

    def entries(self, start: int = 0) -> Iterator[Entry]:
        """Yield all entries from a row on, in order. Their ranges are loaded some at a time and not kept."""
        if start >= self.rows:
            return
        number = bisect_right(self._first_rows, start) - 1
        skip = start - self._first_rows[number]
        for held in self.ranges(range(number, len(self.root.ranges))):
            for index in range(skip, len(held.paths)):
                yield held.entry(index)
            skip = 0

    def paths(self) -> Iterator[bytes]:
        """Yield all paths in order, without decoding the rest of the entries."""
        for held in self.ranges(range(len(self.root.ranges))):
            yield from held.paths

    def ranges(self, numbers: Sequence[int]) -> Iterator[Range]:
        """Decode ranges one after the other. They are loaded some at a time and not kept."""
        for at in range(0, len(numbers), _RANGES_AHEAD):
            some = numbers[at : at + _RANGES_AHEAD]
            raws = _fetch(self._load, [self.root.ranges[number].blob for number in some])
            for number in some:
                yield self._decode(number, raws)

    def range(self, number: int) -> Range:
        """Return a decoded range, loaded on first use."""
        held = self._ranges.get(number)
        if held is None:
            held = self._decode(number, _fetch(self._load, [self.root.ranges[number].blob]))
            # Two threads may load the same range at once: both get the same content, and one of them is kept.
            self._rows_held += len(held.paths)
            self._ranges[number] = held
            while self._rows_held > self._cached_rows and len(self._ranges) > 1:
                try:
                    oldest = self._ranges.pop(next(iter(self._ranges)))
                except (KeyError, RuntimeError, StopIteration):  # another thread dropped it first
                    break
                self._rows_held -= len(oldest.paths)
        return held

    def _decode(self, number: int, raws: dict[BlobId, bytes]) -> Range:
        """Decode the range with this number. Raise `CorruptManifestError` where it is not as the root describes it, so
        that searches by row and by path find entries in the range that has them."""
        info = self.root.ranges[number]
        held = Range(raws[info.blob])
        if (
            len(held.paths) != info.rows
            or held.paths[0] != info.first_path
            or (number + 1 < len(self._first_paths) and held.paths[-1] >= self._first_paths[number + 1])
            or held.sources > len(self._prefixes)
        ):
            raise CorruptManifestError(
                f"manifest blob {info.blob.hex()} holds other entries than its root says", hint=codec.REMAKE
            )
        return held


def root_of(store: str, prefix: str, key: str) -> int:
    """Return `ObjectRef.root` of an object to which an entry of a snapshot refers."""
    if store != "file://":
        return -1
    return len(prefix) if key.startswith(prefix) else 0


def _fetch(load: LoadBlobs, ids: Sequence[BlobId]) -> dict[BlobId, bytes]:
    stored = load(ids)
    for id in ids:
        if id not in stored:
            raise CorruptManifestError(f"manifest blob {id.hex()} is missing from the catalog", hint=codec.REMAKE)
    return {id: codec.decompress(stored[id], id) for id in ids}
