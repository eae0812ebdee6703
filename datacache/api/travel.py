"""Bring snapshots to catalogs in buckets and from there, and lock a version for code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from datacache.api.opening import open_catalog
from datacache.api.progress import of_blobs, shows
from datacache.catalog.refs import check_tag, parse_ref, resolve
from datacache.core.errors import SettingsError
from datacache.settings import Settings, in_bucket, load_settings

if TYPE_CHECKING:
    from datacache.catalog.base import Catalog
    from datacache.catalog.bucket import BucketCatalog
    from datacache.catalog.lock import Lock
    from datacache.catalog.travel import SnapshotCopy


@shows(of_blobs)
def push_snapshot(
    ref: str,
    url: str,
    *,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    replace: bool = False,
    settings: Settings | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> SnapshotCopy:
    """Copy a snapshot's record, manifest, packs and annotations to the catalog under `url` (`s3://bucket/prefix`, a
    folder), which the first push makes.

    What is there already is not sent again. The snapshot gets the tag that `ref` names it by, and `tags`; it becomes
    the latest of its data set there. Its objects stay where they are. `progress(blobs, of, bytes)`. Raises
    `SnapshotNotFoundError`, `TagExistsError`, `OtherKindError`, `UsageError` for a URL that is no place, the stores'
    errors.
    """
    from datacache.catalog.bucket import BucketCatalog

    settings = settings or load_settings()
    with closing(open_catalog(settings)) as here, closing(BucketCatalog(url, settings)) as there:
        return _copy(here, there, ref, tags, move_tags=move_tags, replace=replace, progress=progress)


@shows(of_blobs)
def pull_snapshot(
    ref: str,
    url: str,
    *,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    replace: bool = False,
    settings: Settings | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> SnapshotCopy:
    """Copy a snapshot from the catalog under `url`, to which it was pushed, into the catalog of the settings.

    Otherwise as `push_snapshot`. `CorruptManifestError` where the bucket has other bytes than the ids say.
    """
    settings = settings or load_settings()
    with closing(open_catalog(settings)) as here, closing(open_catalog_in(url, settings)) as there:
        return _copy(there, here, ref, tags, move_tags=move_tags, replace=replace, progress=progress)


def open_catalog_in(url: str, settings: Settings) -> Catalog:
    """Open the catalog in a bucket or folder for reading. `UsageError` for a URL that is no place, `SettingsError` for
    one that holds no catalogs."""
    from datacache.catalog.open import open_catalog_url
    from datacache.store.urls import join_url, split_url

    place = join_url(*split_url(url)).rstrip("/")
    if not in_bucket(place):
        raise SettingsError(f"{url} cannot hold a catalog", hint="Name a bucket and prefix: s3://bucket/catalog")
    return open_catalog_url(place, settings=settings)


def _copy(
    source: Catalog,
    target: Catalog | BucketCatalog,
    ref: str,
    tags: Sequence[str],
    *,
    move_tags: bool,
    replace: bool,
    progress: Callable[[int, int, int], None] | None,
) -> SnapshotCopy:
    from datacache.catalog.travel import copy_snapshot

    for tag in tags:
        check_tag(tag)
    record = resolve(source, ref)
    dataset = source.dataset(record.dataset)
    by_tag = [v for v in [parse_ref(ref).version] if dataset is not None and dataset.tags.get(v) == record.id]
    assert progress is not None  # by `shows`
    named = [*dict.fromkeys([*by_tag, *tags])]
    return copy_snapshot(source, target, record, tags=named, move_tags=move_tags, replace=replace, progress=progress)


def lock_snapshot(ref: str, *, catalog: str = "", settings: Settings | None = None) -> Lock:
    """Return what a lock file says of the snapshot that `ref` names now.

    `catalog` is the URL of a catalog in a bucket to which it was pushed, for those who have no other; by default that
    of the settings, if it is one. `SnapshotNotFoundError` where the snapshot is not there.
    """
    from datacache.catalog.lock import Lock

    settings = settings or load_settings()
    with closing(open_catalog(settings)) as here:
        record = resolve(here, ref)
    url = catalog or (settings.catalog if in_bucket(settings.catalog) else "")
    if catalog:
        with closing(open_catalog_in(catalog, settings)) as there:
            resolve(there, f"{record.dataset}@{record.id}")
            url = there.url
    return Lock(record.dataset, record.id, ref, record.files, record.total_bytes, url)
