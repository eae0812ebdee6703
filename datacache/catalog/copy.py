"""Copied snapshots: their objects are copied into content-addressed storage, so the snapshots outlive the bucket.

Used by `api.create_snapshot`. Entries come as they are listed and leave with the keys of their copies, otherwise
unchanged, so a diff with a version that is not copied shows no change. A creation that was killed can be run again: it
does not send its earlier copies again, and does not even read those that an earlier copied snapshot of the same place
has. Memory is bounded by the bytes in flight. One thread, which has others at work.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from datacache.catalog.base import Catalog
from datacache.catalog.create import Look, Progress, create_snapshot
from datacache.catalog.objects import MAX_OBJECT_BYTES, ObjectWriter
from datacache.core.concurrency import map_in_threads
from datacache.core.errors import StoredObjectsGoneError, UsageError
from datacache.core.ids import ObjectRef
from datacache.manifest.model import Entry, Naming, SnapshotRecord, Source
from datacache.manifest.reader import Manifest, root_of
from datacache.store.base import ObjectStore
from datacache.store.bodies import read_whole

THREADS = 32
_PART_BYTES = 8 * 2**20
_IN_FLIGHT_BYTES = 256 * 2**20
_EARLIER = 20
"""The number of a dataset's newest snapshots among which copies of the same place are looked for."""
_READY_AT_A_TIME = 500
_TRIES = 3


def create_copied_snapshot(
    catalog: Catalog,
    store: ObjectStore,
    prefix: str,
    writer: ObjectWriter,
    naming: Naming,
    *,
    origin: str,
    check_copies: bool = False,
    threads: int = THREADS,
    progress: Progress | None = None,
    warnings: Callable[[], Sequence[str]] = tuple,
    look: Look | None = None,
) -> SnapshotRecord:
    """Do as `create_snapshot`, and copy every object through `writer` first.

    With `check_copies`, ask the storage for each copy that an earlier snapshot knows, and make lost ones again. Raise
    `UsageError` for an object above `MAX_OBJECT_BYTES` and where the storage lies inside of what is copied.
    """
    source = writer.source
    if source.store == store.url and source.prefix.startswith(prefix):
        raise UsageError(
            f"the storage for copies, {source.store}/{source.prefix}, lies inside of {origin}",
            hint="Set DATACACHE_OBJECTS (or --objects) to a prefix or bucket of its own.",
        )
    tries = 1
    while True:
        earlier, known = _earlier(catalog, naming.name, origin, source)
        copier = _Copier(store, prefix, writer, known, check_copies=check_copies, threads=threads, progress=progress)
        try:
            record = create_snapshot(
                catalog,
                store,
                prefix,
                naming,
                origin=origin,
                copied_to=writer,
                copied=copier.copied,
                warnings=warnings,
                look=look,
            )
        except StoredObjectsGoneError:
            if tries == _TRIES:
                raise
            tries += 1
        else:
            # If the earlier snapshot was removed meanwhile, garbage collection may have taken copies of both. If it is
            # listed now, it was listed until the new one was.
            if earlier is None or catalog.snapshot(naming.name, earlier.id) is not None:
                return record
        check_copies = True


class _Copier:
    """Copies the objects of one listing."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        writer: ObjectWriter,
        known: Manifest | None,
        *,
        check_copies: bool,
        threads: int,
        progress: Progress | None,
    ) -> None:
        self._store, self._prefix, self._writer = store, prefix, writer
        self._known = known
        self._check = check_copies
        self._threads = threads
        self._progress = progress
        self._elsewhere: dict[bytes, str] = {}
        """The keys of objects that lie elsewhere than their paths say: links, which are few."""

    def copied(self, entries: Iterable[Entry]) -> Generator[Entry, None, None]:
        """Yield each entry, in order, when its copy is there."""
        files = size = 0
        for ready in map_in_threads(
            self._with_copies,
            self._work(entries),
            threads=self._threads,
            # Twice: the parts as they are read, and the whole.
            size_bytes=lambda rows: 2 * rows[0].size_bytes if rows[0].key is None or self._check else 0,
            limit_bytes=_IN_FLIGHT_BYTES,
        ):
            for entry in ready:
                files, size = files + 1, size + entry.size_bytes
                yield entry
            if self._progress is not None:
                self._progress(files, size)

    def _work(self, entries: Iterable[Entry]) -> Iterator[list[Entry]]:
        """Yield, in order, entries with known keys many together, and those without one by one."""
        ready: list[Entry] = []
        at_a_time = 1 if self._check else _READY_AT_A_TIME
        for entry in self._with_known_keys(entries):
            if (entry.key is None or len(ready) >= at_a_time) and ready:
                yield ready
                ready = []
            if entry.key is None:
                yield [entry]
            else:
                ready.append(entry)
        if ready:
            yield ready

    def _with_known_keys(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Give entries that the earlier snapshot has with the same ETag its keys. Both are in path order."""
        known = self._known.entries() if self._known is not None else iter(())
        before = next(known, None)
        for listed in entries:
            entry = listed
            if entry.key is not None:
                self._elsewhere[entry.path] = entry.key.decode("utf-8", "surrogateescape")
                entry = entry._replace(key=None)
            while before is not None and before.path < entry.path:
                before = next(known, None)
            yield entry._replace(key=before.key) if before is not None and _unchanged(before, entry) else entry

    def _with_copies(self, rows: list[Entry]) -> list[Entry]:
        """Copy what still has to be copied. Runs in any thread."""
        entry = rows[0]  # one that has to be copied, or checked, is alone
        if entry.has_object and (
            entry.key is None or (self._check and not self._writer.has(entry.key, entry.size_bytes))
        ):
            return [self._copy(entry)]
        return rows

    def _copy(self, entry: Entry) -> Entry:
        key = self._elsewhere.get(entry.path) or self._prefix + entry.path.decode("utf-8", "surrogateescape")
        root = root_of(self._store.url, self._prefix, key)
        ref = ObjectRef(self._store.url, key, entry.size_bytes, entry.etag, entry.version, root)
        if entry.size_bytes > MAX_OBJECT_BYTES:
            raise UsageError(
                f"{ref.url} has {entry.size_bytes:,} bytes; at most {MAX_OBJECT_BYTES:,} can be copied",
                hint="Without --copy, snapshots refer to objects of any size.",
            )
        stored = self._writer.put(read_whole(self._store, ref, _PART_BYTES))
        return entry._replace(
            etag=entry.etag or stored.hex, version="", key=stored.key.encode("utf-8", "surrogateescape")
        )


def _unchanged(before: Entry, entry: Entry) -> bool:
    return (
        before.path == entry.path
        and before.size_bytes == entry.size_bytes
        and before.etag == entry.etag != ""
        and not entry.etag.startswith("W/")  # a weak ETag does not promise the same bytes
        and before.key is not None
    )


def _earlier(catalog: Catalog, name: str, origin: str, source: Source) -> tuple[SnapshotRecord | None, Manifest | None]:
    """Return the newest snapshot of the same place whose copies lie in the same storage."""
    for record in reversed(catalog.snapshots(name)[-_EARLIER:]):
        if record.origin == origin:
            manifest = Manifest.open(record.id, catalog.get_blobs)
            if manifest.root.sources == (source,):
                return record, manifest
    return None, None
