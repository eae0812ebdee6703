"""A catalog in a bucket or folder: snapshots that were pushed there, for whoever can read the bucket.

    {prefix}/catalog.json                          {"version": 1}: here is a catalog
    {prefix}/bundles/ab/cdef…-SIZE                 blobs, one behind the other, compressed as in every catalog; named by
                                                   their xxh3-128, like all content-addressed objects
    {prefix}/bundles/ab/cdef…-SIZE.ids             their ids and lengths; a bundle is there when these are
    {prefix}/index/ROOT                            where in which bundles the blobs are that a root needs
    {prefix}/datasets/NAME/@snapshots/ID.json      a record
    {prefix}/datasets/NAME/@tags/TAG               the id that a tag names
    {prefix}/datasets/NAME/@latest                 the id of the snapshot that was pushed last
    {prefix}/derived/ID/NAME                       the root of what was derived from a snapshot, such as its annotations
                                                   (NAME as in a URL, with %2F: one name may lie below another)

A manifest has thousands of small blobs, so they lie in bundles, each of them in one: a push reads what all bundles
hold, and whoever opens a snapshot reads the one index of its root. Every object but tags and `@latest` is written once
and never changed, so nothing needs the store to compare before it writes: any store of objects will do. A push ends
with the record, `@latest` and the tags; one that was killed leaves whole bundles, and is run again. Of two pushes that
move one tag at once, the later one has it. No data set's name has an `@`, so the parts of a path never mix with names.

`BucketCatalog` reads and writes the objects; `snapshot push` and `pull` copy to it and from it (`catalog.travel`).
`ReadOnlyCatalog` is what `DATACACHE_CATALOG=s3://…` opens: a `Catalog` that refuses new versions. What a reader writes
beside them (documents, and annotations that were not pushed) lies in a file of its home. Anybody may have written to
the bucket: what is no name is passed over, what is larger than a push writes it is not read, and what cannot be is an
error. Any thread; after `fork()` and pickled, too.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, NoReturn
from urllib.parse import quote, unquote

from datacache.catalog.base import Collected, Live, batches, blobs_missing, check_tags_free, read_only_error
from datacache.catalog.packs import content_etag
from datacache.catalog.record import decode_record, encode_record
from datacache.catalog.refs import is_name, is_tag, is_whole_id
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.concurrency import map_in_threads
from datacache.core.errors import (
    CatalogError,
    CatalogUnavailableError,
    CorruptManifestError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from datacache.core.ids import CONTENT_KEY, ObjectRef
from datacache.core.packed import MOST_BYTES, unpack
from datacache.manifest import codec
from datacache.manifest.model import BlobId, DatasetRecord, SnapshotRecord
from datacache.settings import Settings
from datacache.store.open import open_store
from datacache.store.urls import join_url, split_url

VERSION = 1
_THREADS = 32
BUNDLE_BYTES = 8 * 2**20
_BUNDLE_BLOBS = 100_000
_GAP_BYTES = 64 * 1024
"""Blobs that are not further apart than this are read by one request."""
_ROOTS = 4
_IDS = struct.Struct("<16sI")
_INDEXED = struct.Struct("<16s16sIII")
_TEXT_BYTES, _RECORD_BYTES = 2**12, 2**24
"""The most of an object that is an id or the mark, and of a record."""
_NOTE = re.compile(r"[!-~]{1,200}")
_MARK = "catalog.json"
_LATEST, _SNAPSHOTS, _TAGS = "@latest", "@snapshots/", "@tags/"


class _BlobPlace(NamedTuple):
    """Where a blob lies."""

    bundle: bytes
    start: int
    size_bytes: int
    bundle_bytes: int


class BucketCatalog:
    """The catalog under a URL. `UsageError` for a URL that is no place; the first call asks the store."""

    def __init__(self, url: str, settings: Settings) -> None:
        store_url, prefix = split_url(url)
        self._store = open_store(store_url, settings)
        self._prefix = prefix.rstrip("/") + "/" if prefix else ""
        self.url = join_url(store_url, prefix).rstrip("/")
        self._settings = settings
        self._is_there = self._looked = False
        self._places: dict[BlobId, _BlobPlace] = {}  # single operations of a dict, so no lock

    def __repr__(self) -> str:
        return f"BucketCatalog({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (BucketCatalog, (self.url, self._settings))

    # --- blobs ----------------------------------------------------------------------------------------------

    def put_blobs(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        """Store those of the blobs that are not there, many in one object."""
        here = self.has_blobs(id for id, _ in blobs)
        missing = [(id, data) for id, data in blobs if id not in here]
        with self._errors():
            for batch in batches(missing, _BUNDLE_BLOBS, size_bytes=lambda b: len(b[1]), most_bytes=BUNDLE_BYTES):
                data = b"".join(data for _, data in batch)
                bundle = bytes.fromhex(content_etag(data))
                key = _bundle_key(bundle, len(data))
                self._put(key, data)
                self._put(f"{key}.ids", b"".join(_IDS.pack(id, len(data)) for id, data in batch))
                self._note(bundle, ((id, len(data)) for id, data in batch))

    def has_blobs(self, ids: Iterable[BlobId]) -> set[BlobId]:
        """See `Catalog.has_blobs`. The first call reads the ids of all bundles."""
        self._look_at_bundles()
        return {id for id in ids if id in self._places}

    def get_blobs(self, ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        """See `Catalog.get_blobs`. The caller checks the bytes against the id (`manifest.codec`)."""
        wanted = list(dict.fromkeys(ids))
        unknown = [id for id in wanted if id not in self._places]
        with self._errors():
            self._expect_catalog()
            for id in unknown[:_ROOTS]:  # what is asked for first is a root
                self._read_index(id)
        if any(id not in self._places for id in unknown):
            self._look_at_bundles()
        places = sorted((self._places[id], id) for id in wanted if id in self._places)
        with self._errors():
            found = map_in_threads(self._read_span, _spans(places), threads=_THREADS)
            return {id: data for part in found for id, data in part}

    def _read_span(self, span: list[tuple[_BlobPlace, BlobId]]) -> list[tuple[BlobId, bytes]]:
        """Read blobs that lie close together in one bundle, in the order of their places."""
        first, last = span[0][0], span[-1][0]
        key = self._prefix + _bundle_key(first.bundle, first.bundle_bytes)
        ref = ObjectRef(self._store.url, key, first.bundle_bytes)
        try:
            data = self._store.read(ref, first.start, last.start + last.size_bytes)
        except ObjectNotFoundError:
            return []
        return [(id, bytes(data[at : at + p.size_bytes])) for p, id in span for at in [p.start - first.start]]

    def _look_at_bundles(self) -> None:
        """Note what all bundles hold, once."""
        if self._looked:
            return
        with self._errors():
            known = {_bundle_key(place.bundle, place.bundle_bytes) for place in self._places.values()}
            keys = {f"bundles/{name}" for name in self._names("bundles/")}
            new = sorted(key for key in keys if f"{key}.ids" in keys and key not in known)
            read = map_in_threads(lambda key: self._get(f"{key}.ids", _BUNDLE_BLOBS * _IDS.size), new, threads=_THREADS)
            for key, raw in zip(new, read, strict=True):
                named = CONTENT_KEY.fullmatch(key)
                blobs = [*_IDS.iter_unpack(raw)] if raw and len(raw) % _IDS.size == 0 else []
                if named is None or sum(size for _, size in blobs) != int(named[3]):
                    raise CorruptManifestError(f"{self.url}/{key}.ids is not what a push has written there")
                self._note(bytes.fromhex(named[1] + named[2]), ((BlobId(id), size) for id, size in blobs))
        self._looked = True

    def _note(self, bundle: bytes, blobs: Iterable[tuple[BlobId, int]]) -> None:
        start, found = 0, []
        for id, size in blobs:
            found.append((id, start, size))
            start += size
        for id, at, size in found:
            self._places.setdefault(id, _BlobPlace(bundle, at, size, start))

    def _read_index(self, root: BlobId) -> None:
        stored = self._get(f"index/{root.hex()}", MOST_BYTES)
        if stored is None:
            return
        try:
            rows = [(_BlobPlace(*place), BlobId(id)) for id, *place in _INDEXED.iter_unpack(unpack(stored))]
            _check_places(rows)
            for place, id in rows:
                self._places.setdefault(id, place)
        except (ValueError, struct.error) as exc:
            raise CorruptManifestError(f"{self.url}/index/{root.hex()} cannot be read: {exc}") from exc

    def _write_index(self, root: BlobId, needs: Collection[BlobId], what: str) -> None:
        gone = len(needs) - len(self.has_blobs(needs))
        if gone:
            raise blobs_missing(what, gone)
        rows = b"".join(_INDEXED.pack(id, *self._places[id]) for id in sorted(needs))
        self._put(f"index/{root.hex()}", codec.compress(rows))

    # --- snapshots ------------------------------------------------------------------------------------------

    def commit(
        self,
        record: SnapshotRecord,
        *,
        tags: Sequence[str] = (),
        move_tags: bool = False,
        needs: Collection[BlobId] = (),
        check: Callable[[SnapshotRecord], None] | None = None,
    ) -> SnapshotRecord:
        """See `Catalog.commit`. Each step leaves a catalog that can be read; a commit that was killed is repeated."""
        name, id = record.dataset, record.id
        with self._errors():
            self._put(_MARK, json.dumps({"version": VERSION}).encode() + b"\n")
            old = self.dataset(name)
            if check is not None and old is not None and (latest := self.snapshot(name, old.latest)) is not None:
                check(latest)
            if old is not None and not move_tags:
                check_tags_free(name, old.tags, tags, id)
            self._write_index(BlobId(bytes.fromhex(id)), needs, record.ref)
            kept = self.snapshot(name, id)
            if kept is None:
                self._put(_record_key(name, id), encode_record(record).encode())
            self._put(_dataset_key(name, _LATEST), id.encode())
            for tag in tags:
                self._put(_dataset_key(name, _TAGS, tag), id.encode())
            return kept or record

    def dataset(self, name: str) -> DatasetRecord | None:
        """Return the dataset with its tags, or None."""
        with self._errors():
            self._expect_catalog()
            latest = self._id(_dataset_key(name, _LATEST))
            if latest is None:
                return None
            tags = [*filter(is_tag, self._names(_dataset_key(name, _TAGS)))]
            read = map_in_threads(lambda tag: self._id(_dataset_key(name, _TAGS, tag)), tags, threads=_THREADS)
            named = {tag: id for tag, id in zip(tags, read, strict=True) if id is not None}
        return DatasetRecord(name=name, latest=latest, tags=dict(sorted(named.items())))

    def datasets(self) -> list[DatasetRecord]:
        """Return all datasets, by name."""
        with self._errors():
            self._expect_catalog()
            end = f"/{_LATEST}"
            names = sorted(key.removesuffix(end) for key in self._names("datasets/") if key.endswith(end))
            found = [self.dataset(name) for name in names if is_name(name)]
        return [dataset for dataset in found if dataset is not None]

    def snapshot(self, dataset: str, id: str) -> SnapshotRecord | None:
        """Return the snapshot with this whole id, or None."""
        with self._errors():
            self._expect_catalog()
            text = self._text(_record_key(dataset, id), _RECORD_BYTES)
        record = None if text is None else decode_record(text)
        if record is not None and (record.dataset, record.id) != (dataset, id):
            raise CatalogError(f"{self.url} has the record of {record.ref} in the place of {dataset}@{id[:12]}")
        return record

    def snapshots(self, dataset: str, *, id_prefix: str = "") -> list[SnapshotRecord]:
        """Return the snapshots whose id starts with `id_prefix`, by the time at which they were made."""
        with self._errors():
            self._expect_catalog()
            listed = self._listed(_dataset_key(dataset, _SNAPSHOTS))
            named = ((name.removesuffix(".json"), at) for name, at in listed if name.startswith(id_prefix))
            pushed = {id: at for id, at in named if is_whole_id(id)}
            found = map_in_threads(partial(self.snapshot, dataset), pushed, threads=_THREADS)
            records = [record for record in found if record is not None]
        return sorted(records, key=lambda record: (record.created_at, pushed[record.id]))

    def derived(self, snapshot_id: str, name: str) -> BlobId | None:
        """See `Catalog.derived`."""
        with self._errors():
            self._expect_catalog()
            id = self._id(_derived_key(snapshot_id, name))
        return None if id is None else BlobId(bytes.fromhex(id))

    def derived_names(self, snapshot_id: str) -> list[str]:
        """See `Catalog.derived_names`."""
        with self._errors():
            names = [unquote(name) for name in self._names(_derived_key(snapshot_id, ""))]
        return [*filter(_NOTE.fullmatch, names)]

    def set_derived(self, snapshot_id: str, name: str, root: BlobId, *, needs: Collection[BlobId] = ()) -> None:
        """See `Catalog.set_derived`."""
        with self._errors():
            self._write_index(root, needs, f"{name} of {snapshot_id[:12]}")
            self._put(_derived_key(snapshot_id, name), root.hex().encode())

    def close(self) -> None:
        """Close the connections. A later call opens them again."""
        self._store.close()

    # --- objects --------------------------------------------------------------------------------------------

    def _expect_catalog(self) -> None:
        if self._is_there:
            return
        text = self._text(_MARK)
        if text is None:
            raise CatalogError(
                f"there is no catalog at {self.url}",
                hint=f"Check the URL, or push a snapshot there: dsctl snapshot push NAME@TAG {self.url}",
            )
        try:
            version = int(json.loads(text)["version"])
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise CatalogError(f"{self.url}/{_MARK} cannot be read: {text[:80]!r}") from exc
        if version != VERSION:
            raise CatalogError(
                f"{self.url} is a catalog of version {version}, and this datacache knows version {VERSION}",
                hint="Install a newer datacache.",
            )
        self._is_there = True

    def _get(self, key: str, most_bytes: int) -> bytes | None:
        """Return an object, or None. `CatalogError` for one that is larger than a push writes it."""
        for last in (False, True):  # a tag may move between the two requests
            try:
                info = self._store.head(self._prefix + key)
                if info.size_bytes > most_bytes:
                    message = f"{self.url}/{key} has {info.size_bytes:,} bytes: a push writes {most_bytes:,} at most"
                    raise CatalogError(message)
                return bytes(self._store.read(info.ref(self._store.url), 0, info.size_bytes))
            except ObjectNotFoundError:
                return None
            except ObjectChangedError:
                if last:
                    raise
        return None

    def _text(self, key: str, most_bytes: int = _TEXT_BYTES) -> str | None:
        data = self._get(key, most_bytes)
        return None if data is None else data.decode("utf-8", "replace").strip()

    def _id(self, key: str) -> str | None:
        text = self._text(key)
        if text is not None and not is_whole_id(text):
            raise CatalogError(f"{self.url}/{key} holds no id")
        return text

    def _put(self, key: str, data: bytes) -> None:
        self._store.put(self._prefix + key, data)

    def _names(self, folder: str) -> Iterator[str]:
        """Yield what follows `folder` in the keys that begin with it."""
        return (name for name, _ in self._listed(folder))

    def _listed(self, folder: str) -> Iterator[tuple[str, int]]:
        """Yield the same, with the times at which the objects were written."""
        start = self._prefix + folder
        with suppress(ObjectNotFoundError):  # a folder of this machine that is not there
            for page in self._store.list(start):
                yield from ((info.key[len(start) :], info.mtime_ns) for info in page)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailableError as exc:
            raise CatalogUnavailableError(f"the catalog {self.url} cannot be reached: {exc.message}") from exc


class ReadOnlyCatalog:
    """A `Catalog`: what was pushed to a bucket, to be read. What reading leaves behind goes into `own`."""

    read_only = True

    def __init__(self, bucket: BucketCatalog, own: SqliteCatalog) -> None:
        self._bucket, self._own = bucket, own
        self.url = bucket.url
        self.dataset, self.datasets = bucket.dataset, bucket.datasets
        self.snapshot, self.snapshots = bucket.snapshot, bucket.snapshots
        self.now_s, self.put_blobs, self.set_derived = own.now_s, own.put_blobs, own.set_derived
        self.document, self.documents = own.document, own.documents
        self.set_document, self.remove_document = own.set_document, own.remove_document

    def __repr__(self) -> str:
        return f"ReadOnlyCatalog({self._bucket!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (ReadOnlyCatalog, (self._bucket, self._own))

    def get_blobs(self, ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        found = self._own.get_blobs(wanted := list(dict.fromkeys(ids)))
        missing = [id for id in wanted if id not in found]
        return found | self._bucket.get_blobs(missing) if missing else found

    def has_blobs(self, ids: Iterable[BlobId]) -> set[BlobId]:
        found = self._own.has_blobs(wanted := list(dict.fromkeys(ids)))
        return found | self._bucket.has_blobs(id for id in wanted if id not in found)

    def derived(self, snapshot_id: str, name: str) -> BlobId | None:
        return self._own.derived(snapshot_id, name) or self._bucket.derived(snapshot_id, name)

    def derived_names(self, snapshot_id: str) -> list[str]:
        return sorted({*self._own.derived_names(snapshot_id), *self._bucket.derived_names(snapshot_id)})

    def identity(self) -> str:
        """Return digits of the URL: nothing is written elsewhere for this catalog."""
        return blake2b(self.url.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()

    def commit(
        self,
        record: SnapshotRecord,
        *,
        tags: Sequence[str] = (),
        move_tags: bool = False,
        needs: Collection[BlobId] = (),
        check: Callable[[SnapshotRecord], None] | None = None,
    ) -> SnapshotRecord:
        self._refuse()

    def set_tag(self, dataset: str, tag: str, id: str, *, move: bool = False) -> None:
        self._refuse()

    def remove_tag(self, dataset: str, tag: str, *, id: str = "") -> bool:
        self._refuse()

    def remove_snapshot(self, dataset: str, id: str, *, only_tags: Collection[str] | None = None) -> bool:
        self._refuse()

    def collect(self, live: Live, *, grace_s: float, dry_run: bool = False, now_s: float | None = None) -> Collected:
        self._refuse()

    def close(self) -> None:
        self._bucket.close()
        self._own.close()

    def _refuse(self) -> NoReturn:
        raise read_only_error(self.url)


def _check_places(rows: Iterable[tuple[_BlobPlace, BlobId]]) -> None:
    """Raise `ValueError` where blobs do not lie one behind the other in their bundles: then a small index could have
    the same bytes read for each of many blobs."""
    bundle, end = b"", 0
    for place, id in sorted(rows):
        if place.bundle != bundle:
            bundle, end = place.bundle, 0
        if place.start < end:
            raise ValueError(f"the blob {id.hex()} overlaps another")
        end = place.start + place.size_bytes
        if end > place.bundle_bytes:
            raise ValueError(f"the blob {id.hex()} ends behind its bundle")


def _spans(places: list[tuple[_BlobPlace, BlobId]]) -> Iterator[list[tuple[_BlobPlace, BlobId]]]:
    """Cut sorted places into those that one request reads: close together in a bundle, and not too much at once."""
    span: list[tuple[_BlobPlace, BlobId]] = []
    for place, id in places:
        if span:
            first, last = span[0][0], span[-1][0]
            near = place.bundle == last.bundle and place.start - (last.start + last.size_bytes) <= _GAP_BYTES
            if not near or place.start + place.size_bytes - first.start > BUNDLE_BYTES:
                yield span
                span = []
        span.append((place, id))
    if span:
        yield span


def _bundle_key(bundle: bytes, size_bytes: int) -> str:
    digits = bundle.hex()
    return f"bundles/{digits[:2]}/{digits[2:]}-{size_bytes}"


def _derived_key(snapshot_id: str, name: str) -> str:
    return f"derived/{snapshot_id}/{quote(name, safe='')}"


def _dataset_key(name: str, *parts: str) -> str:
    return f"datasets/{name}/{''.join(parts)}"


def _record_key(name: str, id: str) -> str:
    return _dataset_key(name, _SNAPSHOTS, f"{id}.json")
