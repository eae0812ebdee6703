"""Files that a new snapshot brings with it: small ones go into packs, large ones to objects storage.

Used by whatever makes snapshots with bytes of its own (conversions, imports, subsets). One thread. A file as large as a
pack is one alone, so that only what is larger still needs a storage, which not every catalog has. Where a pack ends
depends on the paths of its files, as with ranges of a manifest, so the same files in the same order give the same
packs, and a version in which some files changed shares the packs of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from datacache.catalog.objects import ObjectWriter
from datacache.catalog.packs import MAX_FILE_BYTES, PACK_BYTES, PackWriter, content_etag, pack_key, parse_pack_key
from datacache.core.errors import SettingsError
from datacache.manifest.builder import PutBlobs
from datacache.manifest.codec import ends_range
from datacache.manifest.model import PACKS, BlobId, Entry, Source

SMALL_BYTES = MAX_FILE_BYTES
"""A file up to this size is packed."""


class _Packed(NamedTuple):
    path: bytes
    size_bytes: int
    mtime_ns: int
    etag: str
    offset: int


class NewFiles:
    """Takes files and gives their entries. `sources` is the list that the manifest's builder has, and grows."""

    def __init__(self, sources: list[Source], put_blobs: PutBlobs, objects: Callable[[], ObjectWriter]) -> None:
        self._sources = sources
        self._writer = PackWriter(put_blobs)
        self._open_objects = objects
        self._objects: ObjectWriter | None = None
        self._waiting: list[_Packed] = []
        self.packs: set[BlobId] = set()
        """The packs that entries of the new snapshot lie in, for `ManifestBuilder.finish`."""

    @property
    def objects(self) -> ObjectWriter:
        """Where large files go, opened when the first one comes. `SettingsError` where none is set."""
        if self._objects is None:
            self._objects = self._open_objects()
        return self._objects

    @property
    def opened_objects(self) -> ObjectWriter | None:
        """Return where large files went, if one came."""
        return self._objects

    def source(self, source: Source) -> int:
        """A source's number in the manifest."""
        if source not in self._sources:
            self._sources.append(source)
        return self._sources.index(source)

    def add(self, path: str, data: bytes, mtime_ns: int) -> list[Entry]:
        """Store a file under a path; the entries that are ready now: this file's, and those of the pack that ended.

        `SettingsError` for a large one if it is not set where to."""
        raw = path.encode("utf-8", "surrogateescape")
        if len(data) > SMALL_BYTES:
            return [self._add_large(path, raw, data, mtime_ns)]
        before = self.end_pack() if len(data) > PACK_BYTES else []
        offset = self._writer.add(data)
        self._waiting.append(_Packed(raw, len(data), mtime_ns, content_etag(data), offset))
        return before + (self.end_pack() if self._writer.full or ends_range(raw, len(self._waiting)) else [])

    def _add_large(self, path: str, raw: bytes, data: bytes, mtime_ns: int) -> Entry:
        try:
            objects = self.objects
        except SettingsError as exc:
            what = f"{path} has {len(data):,} bytes, and files above {SMALL_BYTES:,} do not go into the catalog"
            raise SettingsError(f"{what}: {exc.message}", hint=exc.hint) from exc
        stored = objects.put(data)
        key = stored.key.encode("utf-8", "surrogateescape")
        return Entry(raw, len(data), mtime_ns, stored.hex, "", self.source(objects.source), key)

    def refer(self, entry: Entry) -> Entry:
        """An entry of the snapshot that the new one is made from, taken over by reference: its pack must stay. A link
        becomes the file it leads to, as that may be elsewhere in the new one, or not there."""
        if self._sources[entry.source] == PACKS:
            parsed = parse_pack_key((entry.key or b"").decode("utf-8", "surrogateescape"))
            assert parsed is not None
            self.packs.add(parsed[0])
        return entry._replace(target=b"") if entry.target else entry

    def end_pack(self) -> list[Entry]:
        """End the open pack, if it holds anything; the entries of its files."""
        if not self._waiting:
            return []
        pack = self._writer.close()
        self.packs.add(pack)
        number = self.source(PACKS)
        entries = [
            Entry(file.path, file.size_bytes, file.mtime_ns, file.etag, "", number, pack_key(pack, file.offset))
            for file in self._waiting
        ]
        self._waiting = []
        return entries
