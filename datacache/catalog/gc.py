"""Garbage collection as a whole: blobs of the catalog, then objects in content-addressed storage.

Used by `api.collect_garbage`. It touches nothing that a listed snapshot needs, and nothing young. In the storage it
looks only below `{prefix}{identity of the catalog}/`, at keys of exactly the form that `ObjectWriter` gives, so it
never touches objects of others. Ages of objects are by the clock of their store. Writers refresh an old object that
they need again (`objects.REFRESH_AFTER_S`), so each object's age is looked at again right before it is deleted. A
collection that is killed leaves everything valid and can be run again. One thread, which has others at work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from datacache.catalog import leases
from datacache.catalog.base import Catalog, Collected
from datacache.catalog.mark import reachable
from datacache.catalog.objects import parse_object_key
from datacache.core.concurrency import map_in_threads
from datacache.core.errors import CorruptManifestError, ObjectNotFoundError, StoreError, UsageError
from datacache.manifest.model import PACKS, BlobId, SnapshotRecord, Source
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.clock import IS_PROBE, StoreClock
from datacache.store.open import open_store
from datacache.store.urls import join_url, split_url

GRACE_S = 86400.0
"""The default grace period: data that were removed, or stored for nothing, a shorter time ago stay."""

Progress = Callable[[str], None]
_THREADS = 32
_AT_A_TIME = 1000
"""Objects that are deleted before needed objects are looked up again."""
_OURS = re.compile(r"[0-9a-f]{2}/[0-9a-f]{30}-(?:0|[1-9][0-9]*)")


class CollectedObjects(NamedTuple):
    """The objects removed from one place, or in a dry run those that would be."""

    url: str
    objects: int = 0
    size_bytes: int = 0
    young: int = 0
    """Objects that no snapshot refers to and that stay for now."""
    kept: int = 0
    """Objects that snapshots refer to."""
    problem: str = ""
    """The error that ended the search of this place, or prevented it."""


@dataclass(frozen=True, kw_only=True)
class GarbageReport:
    """The blobs and objects removed, or with `dry_run` those that would be."""

    dry_run: bool
    grace_s: float
    catalog: Collected
    storages: tuple[CollectedObjects, ...]
    """One for each place with objects of this catalog."""
    mounted: tuple[str, ...] = ()
    """The mount points, as `HOST:DIR`, of unlisted snapshots that stay because they are mounted."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Return the errors of places that could not be looked through."""
        return tuple(storage.problem for storage in self.storages if storage.problem)


def collect_garbage(
    catalog: Catalog,
    settings: Settings,
    *,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    now_s: float | None = None,
    progress: Progress = lambda _text: None,
) -> GarbageReport:
    """Remove what no snapshot, no mount and no creation under way has needed for `grace_s`.

    Times are the catalog's and the storages', never this node's. A storage that cannot be reached is a problem of the
    report, not an error. Raise the catalog's errors, and `CorruptManifestError` where a snapshot cannot be read: then
    no object is removed. `now_s` overrides the clock, for tests."""
    progress("looking through the catalog")
    there_s = catalog.now_s()
    age = Age(grace_s, 0.0 if now_s is None else now_s - there_s)
    now_s = there_s if now_s is None else now_s
    if not dry_run:
        leases.forget_ended(catalog, now_s=now_s, cutoff_s=now_s - grace_s)
    spared_s = age.spared_s(catalog)
    collected = catalog.collect(reachable(catalog.get_blobs), grace_s=spared_s, dry_run=dry_run, now_s=now_s)
    storages = _collect_storages(catalog, settings, age, dry_run=dry_run, progress=progress)
    mounted = tuple(sorted(_mounted_unlisted(catalog)))
    return GarbageReport(dry_run=dry_run, grace_s=grace_s, catalog=collected, storages=storages, mounted=mounted)


def _mounted_unlisted(catalog: Catalog) -> set[str]:
    mounted = [(id, places) for lease in leases.mount_leases(catalog) for id, places in lease.snapshots.items()]
    if not mounted:
        return set()
    listed = {record.id for dataset in catalog.datasets() for record in catalog.snapshots(dataset.name)}
    return {where for id, places in mounted if id not in listed for where in places}


class Age(NamedTuple):
    """The age at which unneeded data may go."""

    grace_s: float
    later_s: float = 0.0
    """Added to all clocks, for tests."""

    def spared_s(self, catalog: Catalog) -> float:
        """Return the age below which objects stay: the grace period, or more if a creation has been running for
        longer."""
        return max(self.grace_s, leases.oldest_creation_age_s(catalog, catalog.now_s() + self.later_s))


def _collect_storages(
    catalog: Catalog, settings: Settings, age: Age, *, dry_run: bool, progress: Progress
) -> tuple[CollectedObjects, ...]:
    """Collect in the storage that is set and in those that snapshots name."""
    identity = catalog.identity()
    places = _places_in_use(catalog, identity)
    if settings.objects:
        store_url, prefix = split_url(settings.objects)
        places.add(Source(store_url, f"{prefix}{identity}/", content_addressed=True))
    done = []
    for place in sorted(places):
        url = join_url(place.store, place.prefix)
        progress(f"looking through {url}")
        try:
            with closing(open_store(place.store, settings)) as store:
                done.append(_collect(catalog, store, place, age, dry_run=dry_run))
        except (StoreError, UsageError) as exc:
            done.append(CollectedObjects(url, problem=str(exc)))
    return tuple(done)


def _collect(catalog: Catalog, store: ObjectStore, place: Source, age: Age, *, dry_run: bool) -> CollectedObjects:
    marked = _Marked(catalog, place, age)
    marked.update()
    clock = StoreClock(store, place.prefix)
    spared_s = age.spared_s(catalog)
    kept = young = 0
    old: list[ObjectInfo] = []
    for info in _ours(store, place.prefix):
        if info.key in marked.needed:
            kept += 1
        elif info.key in marked.held or not _is_old(info, clock, age, spared_s):
            young += 1
        else:
            old.append(info)
    sizes: list[int] = []
    for start in range(0, len(old), _AT_A_TIME):
        if not dry_run:
            leases.note_sweep(catalog)  # before needed objects are looked up: a later commit looks for its own
        spared_s = age.spared_s(catalog)
        marked.update()

        def delete(info: ObjectInfo, spared_s: float = spared_s) -> int:
            """Delete an object that is still old. Return its size, or -1 where it stays."""
            try:
                found = store.head(info.key)
            except ObjectNotFoundError:
                return -1
            if not _is_old(found, clock, age, spared_s):
                return -1  # a creation needs it again and has refreshed it
            if not dry_run:
                store.delete(info.key)
            return found.size_bytes

        part = old[start : start + _AT_A_TIME]
        doomed = [info for info in part if info.key not in marked.needed and info.key not in marked.held]
        sizes += [size for size in map_in_threads(delete, doomed, threads=_THREADS) if size >= 0]
    if old and not dry_run:
        leases.note_sweep(catalog)
    return CollectedObjects(join_url(place.store, place.prefix), len(sizes), sum(sizes), young, kept)


def _is_old(info: ObjectInfo, clock: StoreClock, age: Age, spared_s: float) -> bool:
    return clock.now_s() + age.later_s - info.mtime_ns / 1e9 > spared_s


def _ours(store: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
    """Yield the objects that `ObjectWriter` wrote, and probes of the clock that a killed process left."""
    try:
        for page in store.list(prefix):
            for info in page:
                if _OURS.fullmatch(info.key, len(prefix)) or IS_PROBE.fullmatch(info.key, len(prefix)):
                    yield info
    except ObjectNotFoundError:
        return  # nothing was ever written there


def _places_in_use(catalog: Catalog, identity: str) -> set[Source]:
    """Return the places of this catalog's objects that snapshots refer to, whatever is set now."""
    return {
        source
        for _record, manifest in _manifests(catalog, set())
        for source in manifest.root.sources
        if source.content_addressed and source != PACKS and f"/{source.prefix}".endswith(f"/{identity}/")
    }


class _Objects:
    """The objects of one place to which the followed manifests refer. One thread writes."""

    def __init__(self, place: Source) -> None:
        self._place = place
        self._ranges: set[tuple[BlobId, tuple[Source, ...]]] = set()
        self._hashes: set[bytes] = set()

    def __contains__(self, key: str) -> bool:
        return _hash(key) in self._hashes

    def follow(self, manifest: Manifest) -> None:
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
        """Tell whether some objects of a source may be here: a snapshot may have been made of the storage itself."""
        here, there = self._place.prefix, source.prefix
        return source.store == self._place.store and (there.startswith(here) or here.startswith(there))


class _Marked:
    """The needed objects of one place that have been found so far."""

    def __init__(self, catalog: Catalog, place: Source, age: Age) -> None:
        self._catalog, self._age = catalog, age
        self._followed: set[str] = set()
        self.needed = _Objects(place)
        """By listed snapshots."""
        self.held = _Objects(place)
        """By unlisted snapshots that stay for now (`leases`)."""

    def update(self) -> None:
        """Follow the snapshots that were not followed yet."""
        for record, manifest in _manifests(self._catalog, self._followed):
            with _unless_removed(self._catalog, record):
                self.needed.follow(manifest)
                self._followed.add(record.id)
        # Last: a snapshot that is no longer listed was noted as removed, and a mount's lease taken, before that.
        now_s = self._catalog.now_s() + self._age.later_s
        for id in leases.held_now(self._catalog, now_s=now_s, cutoff_s=now_s - self._age.grace_s) - self._followed:
            with suppress(CorruptManifestError):  # its blobs went with an earlier collection
                self.held.follow(Manifest.open(id, self._catalog.get_blobs))
            self._followed.add(id)


def _hash(key: str) -> bytes | None:
    parsed = parse_object_key(key)
    return None if parsed is None else bytes.fromhex(parsed[0])


def _manifests(catalog: Catalog, known: set[str]) -> Iterator[tuple[SnapshotRecord, Manifest]]:
    """Yield the manifests of all listed snapshots, each once, except `known` ones. `known` may grow meanwhile."""
    seen: set[str] = set()
    for dataset in catalog.datasets():
        for record in catalog.snapshots(dataset.name):
            if record.id not in known and record.id not in seen:
                seen.add(record.id)
                with _unless_removed(catalog, record):
                    yield record, Manifest.open(record.id, catalog.get_blobs)


@contextmanager
def _unless_removed(catalog: Catalog, record: SnapshotRecord) -> Iterator[None]:
    """Pass over a snapshot that cannot be read if it was removed this moment."""
    try:
        yield
    except CorruptManifestError:
        if catalog.snapshot(record.dataset, record.id) is not None:
            raise
