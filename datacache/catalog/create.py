"""Make a snapshot of what lies under a URL: list, copy if that is asked for, build the manifest, commit.

Used by `api.create_snapshot`. Nothing is visible before the commit; a creation that was killed leaves only blobs and
copies, which the next one finds in place.

`create_copied_snapshot` copies the objects into content-addressed storage, so the snapshot outlives the bucket. Entries
leave the listing with the keys of their copies, otherwise unchanged, so a diff with a version that is not copied shows
no change. Copies of an earlier snapshot of the same place are not even read again. Memory is bounded by the bytes in
flight.

An S3 Inventory (`catalog/inventory.py`) can take the listing's place.

`ObjectAttributes` adds to a listing (with `--attributes`) permissions and links from the metadata of objects, as a
read-write mount or s3fs-fuse wrote them; that costs a request for each object. One thread, which has others at work."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from datacache.catalog.base import Catalog
from datacache.catalog.commit import check_target, commit_manifest, known_blobs
from datacache.catalog.inventory import Inventory
from datacache.catalog.listing import encode, entry_of, pages_and_parts
from datacache.catalog.objects import MAX_OBJECT_BYTES, ObjectWriter
from datacache.core.concurrency import map_in_threads
from datacache.core.errors import CorruptManifestError, ObjectNotFoundError, StoredObjectsGoneError, UsageError
from datacache.core.ids import ObjectRef
from datacache.core.paths import stays_inside
from datacache.manifest.builder import ManifestBuilder, ManifestPart, sorted_entries
from datacache.manifest.model import BlobId, Entry, Lineage, Naming, SnapshotRecord, Source
from datacache.manifest.reader import Manifest, root_of
from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.bodies import read_whole
from datacache.store.bucket import Bucket, LiveObject
from datacache.store.local.walk import Links
from datacache.store.retry import retry
from datacache.store.urls import join_url
from datacache.writeback.model import Attributes, read_attributes

THREADS = 32
_PART_BYTES = 8 * 2**20
_IN_FLIGHT_BYTES = 256 * 2**20
_EARLIER = 20
"""The number of a dataset's newest snapshots among which copies of the same place are looked for."""
_READY_AT_A_TIME = 500
_TRIES = 3
_TARGET_BYTES = 4096
"""PATH_MAX: no target of a link is longer."""
_LINKS = 40
"""The kernel follows no more."""
_PLAIN = Attributes(0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class ListedPlace:
    """A prefix of a store, and how it is listed."""

    store: ObjectStore
    prefix: str
    origin: str
    """The URL, as people and the record know it."""
    progress: Callable[[int, int], None] | None = None
    """Called with the number of files and bytes that are done."""
    look: Callable[[list[ObjectInfo]], list[ObjectInfo]] | None = None
    """Gives the objects of a page with their attributes."""
    warnings: Callable[[], Sequence[str]] = tuple
    """Called after the listing."""
    inventory: Inventory | None = None
    """A report that is read in place of a listing."""
    processes: int | None = None
    """How many list a bucket that has many objects; None for a few more than there are cores."""

    def entries(self) -> Iterator[Entry]:
        """Yield all entries in order."""
        listed = self._counted()
        return listed if self.store.sorted_listing and self.inventory is None else sorted_entries(listed)

    def _counted(self) -> Iterator[Entry]:
        files = size = 0
        for entries in self._pages():
            yield from entries
            files, size = self._done(files + len(entries), size + sum(entry.size_bytes for entry in entries))

    def _pages(self) -> Iterator[list[Entry]]:
        if self.inventory is not None:
            return self.inventory.pages(self.prefix)
        return map(self._entries_of, self.store.list(self.prefix))

    def _entries_of(self, page: list[ObjectInfo]) -> list[Entry]:
        skip = len(self.prefix)
        infos = page if self.look is None else self.look(page)
        # The prefix's own folder marker has no path.
        return [entry_of(info, skip) for info in infos if len(info.key) > skip]

    def _done(self, files: int, size_bytes: int) -> tuple[int, int]:
        if self.progress is not None:
            self.progress(files, size_bytes)
        return files, size_bytes

    def fill(self, builder: ManifestBuilder, source: Source, known: Collection[BlobId]) -> None:
        """Add all entries to a builder. Where a bucket has many, several processes list them."""
        if self.look is not None or self.inventory is not None or not self.store.sorted_listing:
            for entry in self.entries():
                builder.add(entry)
            return
        files = size = 0
        found = pages_and_parts(self.store, self.prefix, source, known=known, processes=self.processes)
        with closing(found):  # ends its processes also where an error is kept, and with it this frame
            for each in found:
                if isinstance(each, ManifestPart):
                    builder.add_part(each)
                    files += sum(sealed.info.rows for sealed in each.ranges)
                    size += sum(sealed.total_bytes for sealed in each.ranges)
                else:
                    for entry in (entries := self._entries_of(each)):
                        builder.add(entry)
                    files += len(entries)
                    size += sum(entry.size_bytes for entry in entries)
                self._done(files, size)


def create_snapshot(
    catalog: Catalog, place: ListedPlace, naming: Naming, *, copier: Copier | None = None
) -> SnapshotRecord:
    """List a place and commit what lies there as the snapshot that `naming` names.

    Idempotent: an unchanged prefix gives the same id. Raise the store's errors, `ObjectNotFoundError` for a prefix with
    nothing under it, `TagExistsError`, `UsageError` for bad names, `StoredObjectsGoneError`, and `OtherKindError` where
    the dataset is something else and `replace` is false.
    """
    parameters = {"from": place.origin}
    if place.inventory is not None:
        parameters["inventory"] = place.inventory.url
    source = Source(place.store.url, place.prefix)
    if copier is not None:
        source = copier.writer.source
        parameters["copied_to"] = join_url(source.store, source.prefix)
    lineage = Lineage("create", parameters)
    known = known_blobs(catalog, check_target(catalog, naming, lineage))
    again = True
    while True:
        try:
            builder = ManifestBuilder([source], catalog.put_blobs, known=known)
            if copier is None:
                place.fill(builder, source, known)
            else:
                with closing(copier.copied(place)) as entries:
                    for entry in entries:
                        builder.add(entry)
            if builder.empty:
                what = "the bucket's name and the prefix" if not place.store.url.startswith("file:") else "the path"
                raise ObjectNotFoundError(
                    f"there is nothing under {place.origin}", url=place.origin, hint=f"Check {what}."
                )
            objects = None if copier is None else copier.writer
            return commit_manifest(
                catalog,
                builder,
                naming,
                origin=place.origin,
                lineage=lineage,
                objects=objects,
                warnings=place.warnings(),
            )
        except CorruptManifestError:
            # The previous version was removed and collected meanwhile, or is damaged, or blobs of this one went while
            # it was made: count on no blob.
            if not known and not again:
                raise
            again = bool(known)
            known = frozenset()


# --- copies ----------------------------------------------------------------------------------------------------------


def create_copied_snapshot(
    catalog: Catalog,
    place: ListedPlace,
    naming: Naming,
    writer: ObjectWriter,
    *,
    check_copies: bool = False,
    threads: int = THREADS,
) -> SnapshotRecord:
    """Do as `create_snapshot`, and copy every object through `writer` first.

    With `check_copies`, ask the storage for each copy that an earlier snapshot knows, and make lost ones again. Raise
    `UsageError` for an object above `MAX_OBJECT_BYTES` and where the storage lies inside of what is copied.
    """
    source = writer.source
    if source.store == place.store.url and source.prefix.startswith(place.prefix):
        raise UsageError(
            f"the storage for copies, {source.store}/{source.prefix}, lies inside of {place.origin}",
            hint="Set DATACACHE_OBJECTS (or --objects) to a prefix or bucket of its own.",
        )
    tries = 1
    while True:
        earlier, known = _earlier(catalog, naming.name, place.origin, source)
        copier = Copier(writer, known, check=check_copies, threads=threads)
        try:
            record = create_snapshot(catalog, place, naming, copier=copier)
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


class Copier:
    """Copies the objects of one place."""

    def __init__(self, writer: ObjectWriter, known: Manifest | None, *, check: bool, threads: int) -> None:
        self.writer = writer
        self._known, self._check, self._threads = known, check, threads
        self._elsewhere: dict[bytes, str] = {}
        """The keys of objects that lie elsewhere than their paths say: links, which are few."""

    def copied(self, place: ListedPlace) -> Generator[Entry, None, None]:
        """Yield each entry of a place, in order, when its copy is there."""
        files = size = 0
        for ready in map_in_threads(
            lambda rows: self._with_copies(place, rows),
            self._work(place),
            threads=self._threads,
            # Twice: the parts as they are read, and the whole.
            size_bytes=lambda rows: 2 * rows[0].size_bytes if rows[0].key is None or self._check else 0,
            limit_bytes=_IN_FLIGHT_BYTES,
        ):
            for entry in ready:
                files, size = files + 1, size + entry.size_bytes
                yield entry
            if place.progress is not None:
                place.progress(files, size)

    def _work(self, place: ListedPlace) -> Iterator[list[Entry]]:
        """Yield, in order, entries with known keys many together, and those without one by one."""
        ready: list[Entry] = []
        at_a_time = 1 if self._check else _READY_AT_A_TIME
        listed = replace(place, progress=None)  # what counts as done is copied, not only listed
        for entry in self._with_known_keys(listed.entries()):
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

    def _with_copies(self, place: ListedPlace, rows: list[Entry]) -> list[Entry]:
        """Copy what still has to be copied. Runs in any thread."""
        entry = rows[0]  # one that has to be copied, or checked, is alone
        if entry.has_object and (
            entry.key is None or (self._check and not self.writer.has(entry.key, entry.size_bytes))
        ):
            return [self._copy(place, entry)]
        return rows

    def _copy(self, place: ListedPlace, entry: Entry) -> Entry:
        store = place.store
        key = self._elsewhere.get(entry.path) or place.prefix + entry.path.decode("utf-8", "surrogateescape")
        root = root_of(store.url, place.prefix, key)
        ref = ObjectRef(store.url, key, entry.size_bytes, entry.etag, entry.version, root)
        if entry.size_bytes > MAX_OBJECT_BYTES:
            raise UsageError(
                f"{ref.url} has {entry.size_bytes:,} bytes; at most {MAX_OBJECT_BYTES:,} can be copied",
                hint="Without --copy, snapshots refer to objects of any size.",
            )
        stored = self.writer.put(read_whole(store, ref, _PART_BYTES))
        return entry._replace(etag=entry.etag or stored.hex, version="", key=encode(stored.key))


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


# --- attributes ------------------------------------------------------------------------------------------------------


class ObjectAttributes:
    """Looks up permissions and links of the objects below a prefix of a bucket. Links that lead out are left out, and
    `links` counts them."""

    def __init__(self, bucket: Bucket, prefix: str, links: Links, *, timeout_s: float, threads: int) -> None:
        self._bucket, self._prefix, self._links = bucket, prefix, links
        self._timeout_s, self._threads = timeout_s, threads

    def page(self, page: list[ObjectInfo]) -> list[ObjectInfo]:
        """Return the objects of a page with their attributes."""
        looked = map_in_threads(self._attributed, page, threads=self._threads)
        return [info for info in looked if info is not None]

    def _attributed(self, info: ObjectInfo) -> ObjectInfo | None:
        """Return an object with its attributes, or None for a link that leads out. Runs in any thread."""
        if info.key.endswith("/") or info.target or info.at:
            return info
        try:
            found = self._look(info.key)
        except ObjectNotFoundError:  # deleted while we listed: reading it will say so
            return info
        mode = self._mode(found)
        if not stat.S_ISLNK(mode):
            return info._replace(mode=stat.S_IFREG | stat.S_IMODE(mode)) if mode else info
        target = self._target(found)
        if not self._stays_inside(info.key, target):
            self._links.leave_out(info.key)
            return None
        return self._link(info, target)

    def _link(self, info: ObjectInfo, target: str) -> ObjectInfo:
        """Return a link with the object that it leads to. A link to a folder, or to nothing, has none."""
        key, to = info.key, target
        for _ in range(_LINKS):
            key = posixpath.normpath(posixpath.join(posixpath.dirname(key), to))
            try:
                found = self._look(key)
            except ObjectNotFoundError:
                break
            if not stat.S_ISLNK(self._mode(found)):
                return found.info._replace(key=info.key, at=key, target=target)
            to = self._target(found)
            if not self._stays_inside(key, to):
                break
        return ObjectInfo(info.key, 0, info.mtime_ns, "", target=target)

    def _stays_inside(self, key: str, target: str) -> bool:
        return stays_inside(os.fsencode(key[len(self._prefix) :]), os.fsencode(target))

    def _mode(self, found: LiveObject) -> int:
        if "mode" in found.metadata:
            attributes = read_attributes(found.metadata, _PLAIN, found.info.size_bytes)
            return attributes.mode if stat.S_IMODE(attributes.mode) or attributes.is_link else 0
        if self._bucket.url != "file://":
            return 0
        try:
            return os.stat(f"/{found.info.key}", follow_symlinks=False).st_mode
        except OSError:
            return 0

    def _target(self, found: LiveObject) -> str:
        if not 0 < found.info.size_bytes <= _TARGET_BYTES:
            return ""
        ref = found.info.ref(self._bucket.url)
        data = retry(lambda: self._bucket.read(ref, 0, ref.size_bytes), self._timeout_s)
        return bytes(data).decode("utf-8", "surrogateescape")

    def _look(self, key: str) -> LiveObject:
        return retry(lambda: self._bucket.look(key), self._timeout_s)
