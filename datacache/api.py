"""The composition root: what users and the edges call, and the only place where layers are put together.

Everything takes `settings`; without them they are loaded from the environment (`load_settings`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from datacache.catalog.base import Catalog
from datacache.catalog.open import open_catalog_url
from datacache.catalog.refs import resolve
from datacache.daemon.client import DaemonClient
from datacache.manifest.model import SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.reader.blocks import NodeBlocks
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings, load_settings


def open_catalog(settings: Settings | None = None) -> Catalog:
    """The catalog of the settings. Close it. `CatalogUnavailableError` at first use if it cannot be reached."""
    settings = settings or load_settings()
    return open_catalog_url(settings.catalog, blob_cache_dir=settings.home)


def open_snapshot(ref: str, settings: Settings | None = None) -> Snapshot:
    """Open `NAME@TAG`, `NAME@ID`, `NAME@latest` or `NAME` for reading.

    The reference is resolved once: a tag that moves later does not change what an open snapshot reads. Thread-safe,
    safe after `fork()`, picklable. `SnapshotNotFoundError` says what there is instead.
    """
    settings = settings or load_settings()
    catalog = open_catalog(settings)
    record = resolve(catalog, ref)
    manifest = Manifest.open(record.id, catalog.get_blobs)
    client = DaemonClient(settings)
    blocks = NodeBlocks(settings, client, catalog.get_blobs, dataset=record.dataset, snapshot=record.id)
    reopen = (open_snapshot, (f"{record.dataset}@{record.id}", settings))
    return Snapshot(record, manifest, blocks, reopen=reopen, on_close=catalog.close)


def create_snapshot(
    name: str,
    url: str,
    *,
    settings: Settings | None = None,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    message: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> SnapshotRecord:
    """Make a snapshot of all that lies under `url` (`s3://bucket/prefix`, a folder, any fsspec URL).

    An unchanged prefix gives the same id. Atomic: a creation that is killed leaves nothing visible and can be run
    again. `progress(files, bytes)` is called for each page of the listing. Raises the store's errors,
    `TagExistsError`, `UsageError`.
    """
    from datacache.catalog.create import create_snapshot as create
    from datacache.store.open import open_store
    from datacache.store.urls import split_url

    settings = settings or load_settings()
    store_url, prefix = split_url(url)
    store, catalog = open_store(store_url, settings), open_catalog(settings)
    try:
        return create(
            catalog,
            store,
            prefix,
            name=name,
            origin=f"{store_url}/{prefix}",
            tags=tags,
            move_tags=move_tags,
            message=message,
            progress=progress,
        )
    finally:
        store.close()
        catalog.close()


def connect(settings: Settings | None = None) -> DaemonClient:
    """The node's daemon, started if need be. `DaemonUnavailableError` says why it cannot be."""
    client = DaemonClient(settings or load_settings())
    client.ensure()
    return client


def running_daemon(settings: Settings | None = None) -> DaemonClient | None:
    """The node's daemon if one runs."""
    client = DaemonClient(settings or load_settings())
    return client if client.alive() else None
