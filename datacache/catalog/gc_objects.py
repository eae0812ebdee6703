"""Garbage collection in content-addressed storage: objects that `ObjectWriter` wrote and no snapshot refers to.

Used by `gc`. It looks only below `{prefix}{identity of the catalog}/`, at keys of exactly the form that `ObjectWriter`
gives, so it never touches what others put there. Writers refresh an object they need again when it is old
(`objects.REFRESH_AFTER_S`), and each object's age is looked at again right before it is deleted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

from datacache.catalog.base import Catalog
from datacache.catalog.objects import parse_object_key
from datacache.core.errors import CorruptManifestError, ObjectNotFoundError, StoreError, UsageError
from datacache.core.threads import map_in_threads
from datacache.manifest.model import PACKS, BlobId, SnapshotRecord, Source
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.open import open_store
from datacache.store.urls import split_url

_THREADS = 32
_OURS = re.compile(r"[0-9a-f]{2}/[0-9a-f]{30}-(?:0|[1-9][0-9]*)")


class CollectedObjects(NamedTuple):
    """What was removed from one place, or in a dry run would have been."""

    url: str
    objects: int = 0
    size_bytes: int = 0
    young: int = 0
    """Objects that no snapshot refers to and that stay for now."""
    kept: int = 0
    """Objects that snapshots refer to."""
    problem: str = ""
    """Why it was not looked through, or not to the end."""


def collect(
    catalog: Catalog, settings: Settings, *, before_s: float, dry_run: bool, progress: Callable[[str], None]
) -> tuple[CollectedObjects, ...]:
    """Remove the objects of this catalog that no snapshot refers to and that were written before `before_s` (Unix time,
    by the store's clock), wherever there are any: in the storage that is set and in those that snapshots name."""
    identity = catalog.identity()
    places = _places_in_use(catalog, identity)
    if settings.objects:
        store_url, prefix = split_url(settings.objects)
        places.add(Source(store_url, f"{prefix}{identity}/", content_addressed=True))
    done = []
    for place in sorted(places):
        url = f"{place.store}/{place.prefix}"
        progress(f"looking through {url}")
        try:
            with closing(open_store(place.store, settings)) as store:
                done.append(_collect(store, place, _Marked(catalog, place), before_s=before_s, dry_run=dry_run))
        except (StoreError, UsageError) as exc:
            done.append(CollectedObjects(url, problem=str(exc)))
    return tuple(done)


def _collect(store: ObjectStore, place: Source, marked: _Marked, *, before_s: float, dry_run: bool) -> CollectedObjects:
    marked.update()
    kept = young = 0
    old: list[ObjectInfo] = []
    for info in _ours(store, place.prefix):
        if info.key in marked:
            kept += 1
        elif info.mtime_ns >= before_s * 1e9:
            young += 1
        else:
            old.append(info)
    marked.update()  # what was committed since

    def delete(info: ObjectInfo) -> int:
        """How many bytes went, or -1."""
        try:
            found = store.head(info.key)
        except ObjectNotFoundError:
            return -1
        if found.mtime_ns >= before_s * 1e9:
            return -1  # a creation needs it again and has refreshed it
        if not dry_run:
            store.delete(info.key)
        return found.size_bytes

    doomed = (info for info in old if info.key not in marked)
    sizes = [size for size in map_in_threads(delete, doomed, threads=_THREADS) if size >= 0]
    return CollectedObjects(f"{place.store}/{place.prefix}", len(sizes), sum(sizes), young, kept)


def _ours(store: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
    try:
        for page in store.list(prefix):
            yield from (info for info in page if _OURS.fullmatch(info.key, len(prefix)))
    except ObjectNotFoundError:
        return  # nothing was ever written there


def _places_in_use(catalog: Catalog, identity: str) -> set[Source]:
    """Where objects of this catalog lie that snapshots refer to, whatever is set now."""
    return {
        source
        for _record, manifest in _manifests(catalog, set())
        for source in manifest.root.sources
        if source.content_addressed and source != PACKS and f"/{source.prefix}".endswith(f"/{identity}/")
    }


class _Marked:
    """The objects of one place that listed snapshots refer to, as far as they are known. One thread writes."""

    def __init__(self, catalog: Catalog, place: Source) -> None:
        self._catalog, self._place = catalog, place
        self._followed: set[str] = set()
        self._ranges: set[tuple[BlobId, tuple[Source, ...]]] = set()
        self._hashes: set[bytes] = set()

    def __contains__(self, key: str) -> bool:
        hash = _hash(key)
        return hash is None or hash in self._hashes

    def update(self) -> None:
        """Follow the snapshots that were not followed yet."""
        for record, manifest in _manifests(self._catalog, self._followed):
            with _unless_removed(self._catalog, record):
                self._follow(manifest)
                self._followed.add(record.id)

    def _follow(self, manifest: Manifest) -> None:
        sources = manifest.root.sources
        wanted = {number for number, source in enumerate(sources) if self._may_lie_here(source)}
        if not wanted:
            return
        infos = manifest.root.ranges
        new = [number for number, info in enumerate(infos) if (info.blob, sources) not in self._ranges]
        for held in manifest.ranges(new):
            for index in range(len(held.paths)):
                entry = held.entry(index)
                if entry.source in wanted:
                    key = manifest.object_ref(entry).key
                    hash = _hash(key) if key.startswith(self._place.prefix) else None
                    if hash is not None:
                        self._hashes.add(hash)
        self._ranges.update((infos[number].blob, sources) for number in new)

    def _may_lie_here(self, source: Source) -> bool:
        """Its objects, or some of them: a snapshot may have been made of the storage itself."""
        here, there = self._place.prefix, source.prefix
        return source.store == self._place.store and (there.startswith(here) or here.startswith(there))


def _hash(key: str) -> bytes | None:
    parsed = parse_object_key(key)
    return None if parsed is None else bytes.fromhex(parsed[0])


def _manifests(catalog: Catalog, known: set[str]) -> Iterator[tuple[SnapshotRecord, Manifest]]:
    """The manifests of all listed snapshots, each once, but those that are `known`. `known` may grow meanwhile."""
    seen: set[str] = set()
    for dataset in catalog.datasets():
        for record in catalog.snapshots(dataset.name):
            if record.id not in known and record.id not in seen:
                seen.add(record.id)
                with _unless_removed(catalog, record):
                    yield record, Manifest.open(record.id, catalog.get_blobs)


@contextmanager
def _unless_removed(catalog: Catalog, record: SnapshotRecord) -> Iterator[None]:
    """A snapshot that cannot be read is an error, unless it was removed this moment."""
    try:
        yield
    except CorruptManifestError:
        if catalog.snapshot(record.dataset, record.id) is not None:
            raise
