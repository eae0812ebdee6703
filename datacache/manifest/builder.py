"""Build a manifest from entries in path order, streaming: memory follows one range, not the snapshot.

Used by whatever makes a snapshot. Not thread-safe; one builder, one snapshot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from datacache.core.errors import CatalogError, UsageError
from datacache.manifest import codec
from datacache.manifest.model import BlobId, Entry, RangeInfo, Root, Source

PutBlobs = Callable[[Sequence[tuple[BlobId, bytes]]], None]
_BLOBS_AT_A_TIME = 64
_MAX_PATH_BYTES = 65_535
# A component that a directory cannot hold: empty, '.', '..', with a NUL, or longer than a name may be (NAME_MAX).
_UNSHOWABLE = re.compile(rb"(?:^|/)\.{0,2}(?:/|$)|\0|[^/]{256}")


class ManifestBuilder:
    """Takes entries in strictly ascending byte order of their paths; `finish()` gives the snapshot's id and root.

    `sources` may grow until then. Blobs that are `known` to be in the catalog, such as those of the dataset's snapshot
    before, are not put again: what a new version writes follows the change. Who commits names them all in `needs`, as
    they may go meanwhile.
    """

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
        self.files = self.markers = self.total_bytes = 0

    def add(self, entry: Entry) -> None:
        """Append one entry. `CatalogError` if it is out of order or twice there, `UsageError` for an unusable path."""
        path = entry.path
        if path <= self._last:
            text = path.decode("utf-8", "backslashreplace")
            if not path:
                raise UsageError("an object has the prefix itself as its name and no path below it")
            raise CatalogError(f"the listing gives {text!r} twice or out of order")
        if len(path) > _MAX_PATH_BYTES:
            raise UsageError(f"a path of {len(path):,} bytes is too long: {path[:80]!r}…")
        self._last = path
        if path[-1:] == b"/":
            self.markers += 1
            path = path[:-1]
        else:
            self.files += 1
        self.total_bytes += entry.size_bytes
        if _UNSHOWABLE.search(path):
            self._hidden.add(entry.path)
        self._note_shadowed(entry.path)
        self._rows.append(entry)
        if codec.ends_range(entry.path, len(self._rows)):
            self._end_range()

    def finish(self, *, packs: Iterable[BlobId] = ()) -> tuple[str, Root]:
        """Write what is left and the root; the snapshot's id (32 hex digits) and the root. `packs` are those that
        entries of `PACKS` lie in, and must have been put."""
        if self._rows:
            self._end_range()
        root = Root(
            sources=tuple(self._sources),
            ranges=tuple(self._ranges),
            files=self.files,
            markers=self.markers,
            total_bytes=self.total_bytes,
            hidden=frozenset(self._hidden),
            packs=tuple(sorted(set(packs))),
        )
        raw = codec.encode_root(root)
        id = self._put(raw)
        if self._pending:
            self._put_blobs(self._pending)
        return id.hex(), root

    def _note_shadowed(self, path: bytes) -> None:
        """A file `a` beside `a/b` cannot be shown: the folder can. Both sort apart (`a`, `a-b`, `a/b`)."""
        above = self._above
        while above and not path.startswith(above[-1]):
            above.pop()
        for earlier in above:
            if path[len(earlier) : len(earlier) + 1] == b"/":
                self._hidden.add(earlier)
        if path[-1:] != b"/":
            above.append(path)

    def _end_range(self) -> None:
        raw = codec.encode_range(self._rows)
        self._ranges.append(RangeInfo(self._put(raw), self._rows[0].path, len(self._rows)))
        self._rows = []
        if len(self._pending) >= _BLOBS_AT_A_TIME:
            self._put_blobs(self._pending)
            self._pending = []

    def _put(self, raw: bytes) -> BlobId:
        id = codec.blob_id(raw)
        if id not in self._known:
            self._pending.append((id, codec.compress(raw)))
        return id
