"""Garbage collection as a whole: blobs of the catalog, then objects in content-addressed storage.

Used by `api.collect_garbage`. Nothing that a listed snapshot needs is touched, nothing young, and in the storage
nothing but what `ObjectWriter` has written for this catalog. Killed at any point, it leaves everything valid and can be
run again. One thread, which has others at work.

Garbage collection in content-addressed storage: objects that `ObjectWriter` wrote and no snapshot refers to.

Used by `gc`. Ages are by the clock of the store that the objects lie in. It looks only below `{prefix}{identity of the
catalog}/`, at keys of exactly the form that `ObjectWriter` gives, so it never touches what others put there. Writers
refresh an object they need again when it is old (`objects.REFRESH_AFTER_S`), and each object's age is looked at again
right before it is deleted.
"""

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
from datacache.store.urls import split_url

GRACE_S = 86400.0
"""The default grace period: what was removed, or stored for nothing, a shorter time ago stays."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class GarbageReport:
    """What was removed, or with `dry_run` would have been."""

    dry_run: bool
    grace_s: float
    catalog: Collected
    storages: tuple[CollectedObjects, ...]
    """One for each place with objects of this catalog."""
    mounted: tuple[str, ...] = ()
    """The places, as `HOST:DIR`, of snapshots that are listed no more and stay because they are mounted."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Places that could not be looked through."""
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
    """Remove what nothing has needed for `grace_s`: no snapshot, no mount, no creation under way.

    Times are the catalog's and the storages', never this node's.
    A place for objects that cannot be reached is a problem of the report, not an error: the others are seen to. Raises
    the catalog's errors; `CorruptManifestError` where a snapshot cannot be read, and then no object is removed.
    `now_s` is the time it is, for tests.
    """
    progress("looking through the catalog")
    there_s = catalog.now_s()
    age = Age(grace_s, 0.0 if now_s is None else now_s - there_s)
    now_s = there_s if now_s is None else now_s
    if not dry_run:
        leases.forget_ended(catalog, now_s=now_s, cutoff_s=now_s - grace_s)
    spared_s = age.spared_s(catalog)
    collected = catalog.collect(reachable(catalog.get_blobs), grace_s=spared_s, dry_run=dry_run, now_s=now_s)
    storages = collect(catalog, settings, age, dry_run=dry_run, progress=progress)
    mounted = tuple(sorted(_mounted_unlisted(catalog)))
    return GarbageReport(dry_run=dry_run, grace_s=grace_s, catalog=collected, storages=storages, mounted=mounted)


def _mounted_unlisted(catalog: Catalog) -> set[str]:
    mounted = [(id, places) for lease in leases.mount_leases(catalog) for id, places in lease.snapshots.items()]
    if not mounted:
        return set()
    listed = {record.id for dataset in catalog.datasets() for record in catalog.snapshots(dataset.name)}
    return {where for id, places in mounted if id not in listed for where in places}


_THREADS = 32
_AT_A_TIME = 1000
"""Objects that are deleted before it is looked again at what is needed."""
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


class Age(NamedTuple):
    """The age at which what nobody needs may go."""

    grace_s: float
    later_s: float = 0.0
    """Time by which it is taken to be later than by the clocks, for tests."""

    def spared_s(self, catalog: Catalog) -> float:
        """Return the age below which objects stay: the grace period, or more if a creation is under way for longer."""
        return max(self.grace_s, leases.oldest_creation_age_s(catalog, catalog.now_s() + self.later_s))


def collect(
    catalog: Catalog, settings: Settings, age: Age, *, dry_run: bool, progress: Callable[[str], None]
) -> tuple[CollectedObjects, ...]:
    """Remove the objects of this catalog that nothing needs and that are as old as `age` says, wherever there are any:
    in the storage that is set and in those that snapshots name."""
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
            leases.note_sweep(catalog)  # before it is looked at what is needed: who commits later looks again
        spared_s = age.spared_s(catalog)
        marked.update()

        def delete(info: ObjectInfo, spared_s: float = spared_s) -> int:
            """Return how many bytes went, or -1."""
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
    return CollectedObjects(f"{place.store}/{place.prefix}", len(sizes), sum(sizes), young, kept)


def _is_old(info: ObjectInfo, clock: StoreClock, age: Age, spared_s: float) -> bool:
    return clock.now_s() + age.later_s - info.mtime_ns / 1e9 > spared_s


def _ours(store: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
    """Return what `ObjectWriter` wrote, and what a killed process left that asked for the time."""
    try:
        for page in store.list(prefix):
            for info in page:
                if _OURS.fullmatch(info.key, len(prefix)) or IS_PROBE.fullmatch(info.key, len(prefix)):
                    yield info
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


class _Objects:
    """Some objects of one place, as the manifests that are followed refer to them. One thread writes."""

    def __init__(self, place: Source) -> None:
        self._place = place
        self._ranges: set[tuple[BlobId, tuple[Source, ...]]] = set()
        self._hashes: set[bytes] = set()

    def __contains__(self, key: str) -> bool:
        return _hash(key) in self._hashes

    def follow(self, manifest: Manifest) -> None:
        """Add what a manifest refers to."""
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


class _Marked:
    """The objects of one place that something needs, as far as it is known."""

    def __init__(self, catalog: Catalog, place: Source, age: Age) -> None:
        self._catalog, self._age = catalog, age
        self._followed: set[str] = set()
        self.needed = _Objects(place)
        """By snapshots that are listed."""
        self.held = _Objects(place)
        """By those that stay for now (`leases`)."""

    def update(self) -> None:
        """Follow the snapshots that were not followed yet."""
        for record, manifest in _manifests(self._catalog, self._followed):
            with _unless_removed(self._catalog, record):
                self.needed.follow(manifest)
                self._followed.add(record.id)
        # Last: a snapshot that is not listed any more was noted as removed, and a mount's lease taken, before that.
        now_s = self._catalog.now_s() + self._age.later_s
        for id in leases.held_now(self._catalog, now_s=now_s, cutoff_s=now_s - self._age.grace_s) - self._followed:
            with suppress(CorruptManifestError):  # its blobs went with an earlier collection
                self.held.follow(Manifest.open(id, self._catalog.get_blobs))
            self._followed.add(id)


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
