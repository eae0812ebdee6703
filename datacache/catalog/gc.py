"""Garbage collection as a whole: blobs of the catalog, then objects in content-addressed storage.

Used by `api.collect_garbage`. Nothing that a listed snapshot needs is touched, nothing young, and in the storage
nothing but what `ObjectWriter` has written for this catalog. Killed at any point, it leaves everything valid and can be
run again. One thread, which has others at work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from datacache.catalog import gc_objects
from datacache.catalog.base import Catalog, Collected
from datacache.catalog.gc_objects import CollectedObjects
from datacache.catalog.mark import reachable
from datacache.settings import Settings

GRACE_S = 86400.0
"""What is younger stays by default: a creation may be under way that will need it, and none takes a day."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class GarbageReport:
    """What was removed, or with `dry_run` would have been."""

    dry_run: bool
    grace_s: float
    catalog: Collected
    storages: tuple[CollectedObjects, ...]
    """One for each place with objects of this catalog."""

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
    """Remove what no snapshot needs and what is older than `grace_s`.

    A place for objects that cannot be reached is a problem of the report, not an error: the others are seen to. Raises
    the catalog's errors; `CorruptManifestError` where a snapshot cannot be read, and then no object is removed.
    `now_s` is the time it is, for tests.
    """
    progress("looking through the catalog")
    collected = catalog.collect(reachable(catalog.get_blobs), grace_s=grace_s, dry_run=dry_run, now_s=now_s)
    before_s = (time.time() if now_s is None else now_s) - grace_s
    storages = gc_objects.collect(catalog, settings, before_s=before_s, dry_run=dry_run, progress=progress)
    return GarbageReport(dry_run=dry_run, grace_s=grace_s, catalog=collected, storages=storages)
