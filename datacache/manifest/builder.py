"""Build a manifest from entries in path order; memory follows one range, not the snapshot.

Used by whatever makes a snapshot. `Sorter` puts rows into order in bounded memory (sorted runs on disk, merged), for
stores that cannot list in byte order (most fsspec file systems) and other rows made in another order than they are kept
in. One thread; one builder, one snapshot.
"""

from __future__ import annotations

import heapq
import pickle
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import IO, Any, Generic, NamedTuple, TypeVar

from datacache.core.errors import CatalogError, UsageError
from datacache.core.ids import MAX_READABLE_BYTES
from datacache.core.paths import stays_inside
from datacache.manifest import codec
from datacache.manifest.model import BlobId, Entry, Held, RangeInfo, Root, Source

PutBlobs = Callable[[Sequence[tuple[BlobId, bytes]]], None]
_BLOBS_AT_A_TIME = 64
_SLASH = ord("/")
_MAX_PATH_BYTES = 65_535
# A component that a directory cannot hold: empty, '.', '..', with a NUL, or longer than a name may be (NAME_MAX).
_UNSHOWABLE = re.compile(rb"(?:\A|/)\.{0,2}(?:/|\Z)|\0|[^/]{256}")


class SealedRange(NamedTuple):
    """A range as it is kept, and what its rows add up to."""

    info: RangeInfo
    raw: bytes
    stored: bytes
    """For the catalog; empty where it is known to have it."""
    last_path: bytes
    files: int
    markers: int
    total_bytes: int
    copied: int
    versioned: int


class ManifestPart(NamedTuple):
    """Entries that follow each other, cut into ranges by a `PartBuilder`. Any process can make one."""

    ranges: list[SealedRange]
    ends: bool
    """Whether the last range ends where the part does, whatever follows."""
    hidden: frozenset[bytes]
    above: list[bytes]

    @property
    def size_bytes(self) -> int:
        """Return the memory that its ranges take."""
        return sum(len(each.raw) + len(each.stored) for each in self.ranges)


class ManifestBuilder:
    """Takes entries in strictly ascending byte order of their paths; `finish()` gives the snapshot's id and root.

    `sources` may grow until then. Blobs that are `known` to be in the catalog, such as those of the dataset's previous
    snapshot, are not put again, so a new version writes only its changes. They may go meanwhile: the commit must name
    all blobs in `needs`."""

    def __init__(
        self, sources: Sequence[Source], put_blobs: PutBlobs, *, known: Collection[BlobId] = frozenset()
    ) -> None:
        self._sources = sources
        self._put_blobs = put_blobs
        self._known = frozenset(known)
        self._pending: list[tuple[BlobId, bytes]] = []
        self._rows: list[Entry] = []
        self._ranges: list[RangeInfo] = []
        self._hidden: set[bytes] = set()
        self._above: list[bytes] = []  # earlier files whose path is a prefix of the current one, shortest first
        self._last = b""
        self._files = self._markers = self._bytes = 0  # of the ranges that are ended
        self._copied = self._versioned = 0

    @property
    def empty(self) -> bool:
        """Tell whether nothing was added."""
        return not self._rows and not self._ranges

    def add(self, entry: Entry) -> None:
        """Append an entry. Raise `CatalogError` if it is out of order or a duplicate, `UsageError` for an unusable
        path."""
        path = entry.path
        if path <= self._last or len(path) > _MAX_PATH_BYTES:
            raise _unusable(path)
        if entry.target and not stays_inside(path, entry.target):
            raise CatalogError(f"the link {path.decode('utf-8', 'backslashreplace')!r} leads out of the snapshot")
        self._last = path
        above = self._above
        while above and not path.startswith(above[-1]):
            above.pop()
        for earlier in above:  # hide files whose name is also a folder's, as `a` beside `a-b` and `a/b`
            if path[len(earlier) : len(earlier) + 1] == b"/":
                self._hidden.add(earlier)
        rows = self._rows
        rows.append(entry)
        if path[-1] != _SLASH:
            above.append(path)
        if codec.ends_range(path, len(rows)):
            self._end_range()

    def add_part(self, part: ManifestPart) -> None:
        """Append the entries of a part. Raises as `add`.

        Where a range ends depends on where the one before ended. The ranges of a part are those of the snapshot from
        the first place on where both end one, mostly within a few; up to there the entries are added one by one."""
        if not part.ranges:
            return
        first = part.ranges[0].info.first_path
        if first <= self._last:
            raise _unusable(first)
        shadowed = any(first.startswith(earlier) for earlier in self._above)
        for number, sealed in enumerate(part.ranges, 1):
            if self._rows or shadowed or (number == len(part.ranges) and not part.ends):
                decoded = codec.Range(sealed.raw)
                for row in range(len(decoded.paths)):
                    self.add(decoded.entry(row))
            else:
                self._take(sealed)
                self._last = sealed.last_path
        self._hidden |= part.hidden
        if not shadowed:  # else some above the part are not above its own entries alone
            self._above = list(part.above)

    def finish(self, *, packs: Iterable[BlobId] = ()) -> tuple[str, Root]:
        """Write the last range and the root. Return the snapshot's id (32 hex digits) and the root. `packs` are those
        that entries of `PACKS` lie in, and must have been put."""
        if self._rows:
            self._end_range()
        root = Root(
            sources=tuple(self._sources),
            ranges=tuple(self._ranges),
            files=self._files,
            markers=self._markers,
            total_bytes=self._bytes,
            hidden=frozenset(self._hidden),
            packs=tuple(sorted(set(packs))),
        )
        raw = codec.encode_root(root)
        id = self._put(raw)
        if self._pending:
            self._put_blobs(self._pending)
        return id.hex(), root

    @property
    def held(self) -> Held:
        """Return how the files of ended ranges are held."""
        return Held(self._copied, self._versioned, self._files - self._copied - self._versioned)

    def _end_range(self) -> None:
        rows, self._rows = self._rows, []
        paths = [entry.path for entry in rows]
        markers = sum(path[-1] == _SLASH for path in paths)
        sizes = [entry.size_bytes for entry in rows]
        if max(sizes) > MAX_READABLE_BYTES:
            raise UsageError(f"{paths[sizes.index(max(sizes))]!r} of {max(sizes):,} bytes is too large for a snapshot")
        copies = frozenset(number for number, source in enumerate(self._sources) if source.content_addressed)
        files = [entry for entry in rows if entry.path[-1] != _SLASH]
        if markers or _UNSHOWABLE.search(b"/".join(paths)):  # one search for all: nearly always there is none
            self._hidden.update(path for path in paths if _UNSHOWABLE.search(path.removesuffix(b"/")))
        try:
            raw = codec.encode_range(rows)
        except OverflowError as exc:
            among = f"{paths[0]!r} to {paths[-1]!r}"
            raise UsageError(f"among {among}, an object has a size, time or ETag that none can have: {exc}") from exc
        id = codec.blob_id(raw)
        self._take(
            SealedRange(
                RangeInfo(id, paths[0], len(rows)),
                raw,
                codec.compress(raw) if id not in self._known else b"",
                last_path=paths[-1],
                files=len(files),
                markers=markers,
                total_bytes=sum(sizes),
                copied=sum(entry.source in copies for entry in files),
                versioned=sum(bool(entry.version) and entry.source not in copies for entry in files),
            )
        )

    def _take(self, sealed: SealedRange) -> None:
        self._files += sealed.files
        self._markers += sealed.markers
        self._bytes += sealed.total_bytes
        self._copied += sealed.copied
        self._versioned += sealed.versioned
        self._ranges.append(sealed.info)
        if sealed.stored:
            self._pending.append((sealed.info.blob, sealed.stored))
        if len(self._pending) >= _BLOBS_AT_A_TIME:
            self._put_blobs(self._pending)
            self._pending = []

    def _put(self, raw: bytes) -> BlobId:
        id = codec.blob_id(raw)
        if id not in self._known:
            self._pending.append((id, codec.compress(raw)))
        return id


class PartBuilder(ManifestBuilder):
    """Cuts entries of a part of a snapshot into ranges and keeps them for the builder of the whole."""

    def __init__(self, sources: Sequence[Source], *, known: Collection[BlobId] = frozenset()) -> None:
        super().__init__(sources, lambda _blobs: None, known=known)
        self._sealed: list[SealedRange] = []

    def part(self) -> ManifestPart:
        """Return what was added. Nothing may be added after it."""
        ends = not self._rows
        if self._rows:
            self._end_range()
        return ManifestPart(self._sealed, ends, frozenset(self._hidden), self._above)

    def _take(self, sealed: SealedRange) -> None:
        self._sealed.append(sealed)


def _unusable(path: bytes) -> CatalogError | UsageError:
    if not path:
        return UsageError("an object has the prefix itself as its name and no path below it")
    if len(path) > _MAX_PATH_BYTES:
        return UsageError(f"a path of {len(path):,} bytes is too long: {path[:80]!r}…")
    return CatalogError(
        f"the listing gives {path.decode('utf-8', 'backslashreplace')!r} twice or out of order",
        hint="Each key has to come once, in the order of UTF-8 bytes, as Amazon S3 lists them.",
    )


ROWS_IN_MEMORY = 100_000
_ROWS_AT_A_TIME = 1_000
_by_path = attrgetter("path")
_T = TypeVar("_T")


def sorted_entries(entries: Iterable[Entry], *, rows_in_memory: int = ROWS_IN_MEMORY) -> Iterator[Entry]:
    """Yield the entries by path. Rows above `rows_in_memory` wait in an unnamed temporary file (`TMPDIR`)."""
    with Sorter(_by_path, rows_in_memory=rows_in_memory) as sorter:
        for entry in entries:
            sorter.add(entry)
        yield from sorter.sorted()


class Sorter(Generic[_T]):
    """Takes rows in any order and yields them by `key`, equal ones in the order they came. Close it."""

    def __init__(self, key: Callable[[_T], Any], *, rows_in_memory: int = ROWS_IN_MEMORY) -> None:
        self._key = key
        self._limit = rows_in_memory
        self._rows: list[_T] = []
        self._spool: IO[bytes] | None = None
        self._starts: list[int] = []

    def add(self, row: _T) -> None:
        """Add a row, which pickle must be able to write."""
        self._rows.append(row)
        if len(self._rows) >= self._limit:
            if self._spool is None:
                self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
            self._rows.sort(key=self._key)
            self._starts.append(_write_run(self._spool, self._rows))
            self._rows = []

    def sorted(self) -> Iterator[_T]:
        """Yield all rows in order. Nothing may be added meanwhile."""
        self._rows.sort(key=self._key)
        if self._spool is None:
            yield from self._rows
            return
        runs = [_read_run(self._spool, start) for start in self._starts]
        yield from heapq.merge(*runs, self._rows, key=self._key)

    def close(self) -> None:
        """Remove the temporary file."""
        if self._spool is not None:
            self._spool.close()

    def __enter__(self) -> Sorter[_T]:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _write_run(spool: IO[bytes], run: list[Any]) -> int:
    start = spool.seek(0, 2)
    for at in range(0, len(run), _ROWS_AT_A_TIME):
        pickle.dump(run[at : at + _ROWS_AT_A_TIME], spool, pickle.HIGHEST_PROTOCOL)
    pickle.dump([], spool, pickle.HIGHEST_PROTOCOL)
    return start


def _read_run(spool: IO[bytes], at: int) -> Iterator[Any]:
    while True:
        spool.seek(at)
        rows = pickle.load(spool)  # noqa: S301 - our own unnamed file, written above
        at = spool.tell()
        if not rows:
            return
        yield from rows
