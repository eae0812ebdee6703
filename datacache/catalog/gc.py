"""Garbage collection as a whole: blobs of the catalog, then objects in content-addressed storage.

Used by `api.collect_garbage`. Nothing that a listed snapshot needs is touched, nothing young, and in the storage
nothing but what `ObjectWriter` has written for this catalog. Killed at any point, it leaves everything valid and can be
run again. One thread, which has others at work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from datacache.catalog import gc_objects, leases
from datacache.catalog.base import Catalog, Collected
from datacache.catalog.gc_objects import Age, CollectedObjects
from datacache.catalog.mark import reachable
from datacache.settings import Settings

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
    storages = gc_objects.collect(catalog, settings, age, dry_run=dry_run, progress=progress)
    mounted = tuple(sorted(_mounted_unlisted(catalog)))
    return GarbageReport(dry_run=dry_run, grace_s=grace_s, catalog=collected, storages=storages, mounted=mounted)


def _mounted_unlisted(catalog: Catalog) -> set[str]:
    mounted = [(id, places) for lease in leases.mount_leases(catalog) for id, places in lease.snapshots.items()]
    if not mounted:
        return set()
    listed = {record.id for dataset in catalog.datasets() for record in catalog.snapshots(dataset.name)}
    return {where for id, places in mounted if id not in listed for where in places}
