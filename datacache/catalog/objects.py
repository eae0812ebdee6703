"""Content-addressed storage, and the files that a new snapshot brings with it: small ones go into packs, large ones
there.

`ObjectWriter` stores large objects, in a bucket or folder of the user's choice, under the key `{prefix}{catalog
identity}/{2 hex digits}/{30 hex digits}-{size}`; the digits are xxh3-128 of the bytes. So the same content is one
object, whoever stores it and however often, and two catalogs never share one: garbage collection of one cannot take the
other's. Every store with an atomic `put` will do (S3, folders, …): a writer that is killed leaves a whole object or
none.

`NewFiles` gives entries to all new files of a snapshot. A pack takes several small files or one large one alone, so
only larger files need a storage, which not every catalog has. Packs end where the paths of their files say so, as
ranges of a manifest do: the same files in the same order give the same packs, and a version in which some files changed
shares the packs of the others. Used by whatever makes snapshots with bytes of its own (conversions, imports, subsets).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple

from datacache.catalog.base import Catalog
from datacache.catalog.leases import REUSE_S, Creation
from datacache.catalog.packs import MAX_FILE_BYTES, PACK_BYTES, PackWriter, content_etag, pack_key, parse_pack_key
from datacache.core.concurrency import map_in_threads
from datacache.core.errors import (
    CatalogError,
    CorruptManifestError,
    ObjectNotFoundError,
    SettingsError,
    StoreAccessError,
    StoredObjectsGoneError,
    UsageError,
)
from datacache.core.ids import CONTENT_KEY
from datacache.manifest.builder import PutBlobs
from datacache.manifest.codec import ends_range
from datacache.manifest.model import PACKS, BlobId, Entry, Source
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.base import ObjectStore
from datacache.store.clock import StoreClock, elapsed_s
from datacache.store.open import open_store
from datacache.store.urls import split_url

MAX_OBJECT_BYTES = 2**30
"""An object is held in memory while it is stored, and is sent in one request."""
REFRESH_AFTER_S = REUSE_S
"""An existing object that is older than this is written again when it is needed again: garbage collection spares
objects that no snapshot names yet by their age, so its grace period must be well above this."""

_REMEMBERED = 100_000
_THREADS = 32
_CLOCK_ERROR_S = 60.0
_log = logging.getLogger(__name__)


class Stored(NamedTuple):
    """An object in the storage."""

    key: str
    hex: str
    """xxh3-128 of the bytes."""
    size_bytes: int


class ObjectWriter:
    """Stores objects of one catalog. Safe from several threads, after `fork()` and pickled. Close it.

    `url` overrides the setting `objects`. Raise `SettingsError` without either, `UsageError` for a `url` that is no
    place or has credentials in it."""

    def __init__(
        self, catalog: Catalog, settings: Settings, *, url: str = "", creation: str = "", resumes: bool = False
    ) -> None:
        """`resumes`: what a creation that was killed has stored in the last days stays, too (`lasts`)."""
        self._catalog, self._settings, self._url = catalog, settings, url
        store_url, self._prefix = check_place(settings, url)
        self._store: ObjectStore = open_store(store_url, settings)
        self._fresh: dict[str, float] = {}  # key → when it was seen or written; single dict operations, so no lock
        self._creation = Creation(catalog, creation, resumes=resumes)
        self._clock: StoreClock | None = None

    @cached_property
    def source(self) -> Source:
        """Return the source of entries whose objects lie here. The first access asks the catalog for its identity and
        notes there that a creation is under way."""
        self._creation.begin()
        return Source(self._store.url, f"{self._prefix}{self._catalog.identity()}/", content_addressed=True)

    def put(self, data: bytes) -> Stored:
        """Store these bytes, unless they are there, and return where they lie.

        Idempotent. Raise `UsageError` above `MAX_OBJECT_BYTES`, else the store's errors.
        """
        if len(data) > MAX_OBJECT_BYTES:
            raise UsageError(
                f"an object of {len(data):,} bytes cannot be stored: the most is {MAX_OBJECT_BYTES:,}",
                hint="Leave it where it is: snapshots without --copy refer to objects of any size.",
            )
        hex = content_etag(data)
        stored = Stored(f"{self.source.prefix}{hex[:2]}/{hex[2:]}-{len(data)}", hex, len(data))
        now = elapsed_s()
        if now - self._fresh.get(stored.key, -REFRESH_AFTER_S) >= REFRESH_AFTER_S:
            if not self._is_there(stored):
                self._store.put(stored.key, data)
            if len(self._fresh) >= _REMEMBERED:
                self._fresh = {}
            self._fresh[stored.key] = now
        return stored

    def has(self, key: bytes, size_bytes: int) -> bool:
        """Tell whether the object of an entry is there, whole."""
        try:
            return self._store.head(key.decode("utf-8", "surrogateescape")).size_bytes == size_bytes
        except ObjectNotFoundError:
            return False

    def lasts(self, stored: Stored) -> bool:
        """Tell whether an object that an earlier creation has stored is there, whole, and spared by garbage collections
        as long as this creation lasts."""
        self._creation.begin()
        return self._is_there(stored, REFRESH_AFTER_S + self._creation.resumed_s)

    def _is_there(self, stored: Stored, young_s: float = REFRESH_AFTER_S) -> bool:
        """Tell whether an object is there, whole, and so young that no garbage collection takes it."""
        try:
            found = self._store.head(stored.key)
        except (ObjectNotFoundError, StoreAccessError):  # S3 denies it where a key may be written but not looked for
            return False
        if found.size_bytes != stored.size_bytes:
            return False
        clock = self._clock = self._clock or StoreClock(self._store, self.source.prefix)
        return -_CLOCK_ERROR_S <= clock.now_s() - found.mtime_ns / 1e9 < young_s

    def confirm(self, manifest: Manifest) -> None:
        """Check before the commit that the objects of a manifest are still in this storage, unless no collection can
        have taken one. Raise `StoredObjectsGoneError` if some are gone: the next `put` stores them anew."""
        if self._creation.is_undisturbed() or self.source not in manifest.root.sources:
            return
        self._fresh = {}
        number = manifest.root.sources.index(self.source)
        stored = ((e.key, e.size_bytes) for e in manifest.entries() if e.source == number and e.key is not None)
        gone = sum(map_in_threads(lambda key_and_size: not self.has(*key_and_size), stored, threads=_THREADS))
        if gone:
            raise StoredObjectsGoneError(
                f"{gone:,} objects that the new snapshot needs are gone from {self.source.store}/"
                f"{self.source.prefix}; nothing was made",
                hint="A garbage collection took them while they were being stored. Run the same command again.",
            )

    def close(self) -> None:
        """Close connections; a later call connects again. Objects that were stored and not committed may be
        collected."""
        try:
            self._creation.end()
        except CatalogError as exc:  # the lease ends by itself
            _log.warning("the note of a creation that is over could not be removed: %s", exc)
        self._store.close()

    def __reduce__(self) -> tuple[object, ...]:
        same = partial(ObjectWriter, url=self._url, creation=self._creation.key)
        return (same, (self._catalog, self._settings))

    def reduce_elsewhere(self) -> tuple[object, ...]:
        """Return what a process of another machine stores objects with: in this place, for this creation, without the
        catalog."""
        return _ElsewhereWriter, (self._settings, self.source)


class _ElsewhereWriter(ObjectWriter):
    """Stores objects for a creation of another process."""

    def __init__(self, settings: Settings, source: Source) -> None:
        self._settings, self._store = settings, open_store(source.store, settings)
        self._fresh, self._clock = {}, None
        self.source = source  # in place of the property

    def put(self, data: bytes) -> Stored:
        self._fresh = {}  # this process outlives creations, and what one has stored may be gone in the next
        return super().put(data)

    def __reduce__(self) -> tuple[object, ...]:
        return (_ElsewhereWriter, (self._settings, self.source))

    def close(self) -> None:
        self._store.close()


def parse_object_key(key: str) -> tuple[str, int] | None:
    """Return hash (32 hex digits) and size of the object that `ObjectWriter.put` stored under this key; None for
    another key."""
    match = CONTENT_KEY.fullmatch(key)
    return None if match is None else (match[1] + match[2], int(match[3]))


def check_place(settings: Settings, url: str = "") -> tuple[str, str]:
    """Return store and prefix of where new objects go: `url`, or the settings' place. `SettingsError` where that is
    not set, `UsageError` for a URL that is none."""
    if url:
        return split_url(url)
    try:
        return split_url(settings.require_objects())
    except UsageError as exc:
        raise SettingsError(f"DATACACHE_OBJECTS: {exc.message}", hint=exc.hint) from exc


SMALL_BYTES = MAX_FILE_BYTES
"""A file up to this size is packed."""


class _Packed(NamedTuple):
    path: bytes
    size_bytes: int
    mtime_ns: int
    etag: str
    offset: int


class NewFiles:
    """Takes new files and gives their entries. `sources` is the list of the manifest's builder, and grows. One
    thread."""

    def __init__(self, sources: list[Source], put_blobs: PutBlobs, objects: Callable[[], ObjectWriter]) -> None:
        self.sources = sources
        self._writer = PackWriter(put_blobs)
        self._open_objects = objects
        self.opened_objects: ObjectWriter | None = None
        """The storage of large files, once the first one has come."""
        self._waiting: list[_Packed] = []
        self.packs: set[BlobId] = set()
        """The packs that entries of the new snapshot lie in, for `ManifestBuilder.finish`."""

    @property
    def objects(self) -> ObjectWriter:
        """The storage of large files, opened on first access. Raise `SettingsError` where none is set."""
        if self.opened_objects is None:
            self.opened_objects = self._open_objects()
        return self.opened_objects

    def source(self, source: Source) -> int:
        if source not in self.sources:
            self.sources.append(source)
        return self.sources.index(source)

    def add(self, path: str, data: bytes, mtime_ns: int) -> list[Entry]:
        """Store a file under a path. Return the entries that are ready now: that of this file, or those of an ended
        pack.

        Raise `SettingsError` for a large one if no storage is set."""
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
        """Return an entry of the snapshot that the new one is made from, taken over by reference: its pack must stay. A
        link becomes the file it leads to, which may be elsewhere in the new snapshot, or missing.

        Raise `CorruptManifestError` for an entry of a pack that does not say where in it."""
        if self.sources[entry.source] == PACKS:
            parsed = parse_pack_key((entry.key or b"").decode("utf-8", "surrogateescape"))
            if parsed is None:
                shown = entry.path.decode("utf-8", "backslashreplace")
                raise CorruptManifestError(f"the manifest has no place in a pack for {shown!r}")
            self.packs.add(parsed[0])
        return entry._replace(target=b"") if entry.target else entry

    def end_pack(self) -> list[Entry]:
        """End the open pack, if it holds anything, and return the entries of its files."""
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
