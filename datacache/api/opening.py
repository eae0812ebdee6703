"""Open what can be read or written: the catalog, snapshots, URLs, shard sets, live buckets.

Every function takes `settings`; without them they are loaded from the environment.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from os import PathLike
from typing import TYPE_CHECKING

from datacache.api.notebooks import PicturedSnapshot
from datacache.catalog.base import Catalog
from datacache.catalog.open import open_catalog_url
from datacache.catalog.refs import resolve
from datacache.core.errors import CorruptManifestError, ObjectNotFoundError, SnapshotNotFoundError, UsageError
from datacache.manifest.model import Entry, Root, SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.reader.blocks import NodeBlocks
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings, in_bucket, load_settings

if TYPE_CHECKING:
    from datacache.shards.reader import Shards
    from datacache.store.base import ObjectStore
    from datacache.writeback.engine import Replication
    from datacache.writeback.live import LiveBucket
    from datacache.writeback.staging.area import StagingArea
    from datacache.writeback.state_log import StateLog


def open_catalog(settings: Settings | None = None) -> Catalog:
    """Open the catalog of the settings. Close it. `CatalogUnavailableError` at first use if it cannot be reached."""
    settings = settings or load_settings()
    return open_catalog_url(settings.catalog, settings=settings, blob_cache_dir=settings.home)


def open_snapshot(ref: str, settings: Settings | None = None) -> PicturedSnapshot:
    """Open `NAME@TAG`, `NAME@ID`, `NAME@latest` or `NAME` for reading.

    The reference is resolved once: a tag that moves later does not change what an open snapshot reads. Thread-safe,
    safe after `fork()`, picklable. The name of a lock file (`data.lock`, see `lock_snapshot`) is a reference, too.
    `SnapshotNotFoundError` says what there is instead.
    """
    ref, settings = _unlocked(ref, settings or load_settings())
    with ExitStack() as stack:
        catalog = stack.enter_context(closing(open_catalog(settings)))
        record = resolve(catalog, ref)
        manifest = Manifest.open(record.id, catalog.get_blobs)
        return _opened(settings, catalog, record, manifest, stack, reopen=open_snapshot)


def _unlocked(ref: str, settings: Settings) -> tuple[str, Settings]:
    """Return the snapshot that the lock file named `ref` locks, and settings with a catalog that has it; any other
    reference as it is."""
    from datacache.catalog.lock import find_lock

    lock = find_lock(ref)
    if lock is None:
        return ref, settings
    if lock.catalog != settings.catalog and in_bucket(lock.catalog):
        with closing(open_catalog(settings)) as catalog:
            if catalog.snapshot(lock.dataset, lock.id) is None:
                settings = dataclasses.replace(settings, catalog=lock.catalog)
    return lock.ref, settings


def _opened(
    settings: Settings,
    catalog: Catalog,
    record: SnapshotRecord,
    manifest: Manifest,
    stack: ExitStack,
    *,
    reopen: Callable[..., Snapshot],
) -> PicturedSnapshot:
    """Make the snapshot, which from then on owns what `stack` would close."""
    blocks = NodeBlocks(settings, catalog.get_blobs, dataset=record.dataset, snapshot=record.id)
    stack.callback(blocks.close)
    return PicturedSnapshot(
        record,
        manifest,
        blocks,
        settings=settings,
        reopen=(reopen, (f"{record.dataset}@{record.id}", settings)),
        on_close=stack.pop_all().close,
        is_listed=lambda: catalog.snapshot(record.dataset, record.id) is not None,
    )


def open_mounted(ref: str, settings: Settings | None = None) -> PicturedSnapshot:
    """Open what was mounted before, as `open_snapshot` does: `NAME@ID` with the whole id also after the snapshot was
    removed from the catalog, for as long as garbage collection leaves its manifest.

    Nothing says then that the id ever was one of this name. So `ref` must come from a record that was written when the
    catalog said so (a mount's state, a volume's record), never from a caller that asks for a mount.
    """
    settings = settings or load_settings()
    try:
        return open_snapshot(ref, settings)
    except SnapshotNotFoundError:
        name, _, id = ref.partition("@")
        if not re.fullmatch(r"[0-9a-f]{32}", id):
            raise
    with ExitStack() as stack:
        catalog = stack.enter_context(closing(open_catalog(settings)))
        try:
            manifest = Manifest.open(id, catalog.get_blobs)
        except CorruptManifestError:
            raise SnapshotNotFoundError(
                f"{ref} was removed, and collected", ref=ref, hint="Unmount it (dsctl umount --lazy DIR)."
            ) from None
        record = _record(name, id, manifest.root, created_at="1970-01-01T00:00:00Z")  # the time went with the record
        return _opened(settings, catalog, record, manifest, stack, reopen=open_mounted)


def _record(dataset: str, id: str, root: Root, *, origin: str = "", created_at: str = "") -> SnapshotRecord:
    files, size = root.files, root.total_bytes
    return SnapshotRecord(dataset=dataset, id=id, created_at=created_at, origin=origin, files=files, total_bytes=size)


def open_url(url: str, settings: Settings | None = None) -> Snapshot:
    """List what lies under a URL now, to read it through the cache like a snapshot, and commit nothing.

    Reading what has changed there since is an error. The store's errors; `ObjectNotFoundError` where nothing is.
    """
    from datacache.catalog.create import ListedPlace
    from datacache.store.urls import join_url, split_url

    store_url, prefix = split_url(url)
    origin = join_url(store_url, prefix).rstrip("/")

    def listed(store: ObjectStore) -> Iterator[Entry]:
        return ListedPlace(store=store, prefix=prefix, origin=origin).entries()

    return _opened_url(settings or load_settings(), store_url, prefix, listed, (open_url, url))


def open_object(url: str, settings: Settings | None = None) -> tuple[Snapshot, str]:
    """Open one object as `open_url` does the folder that it lies in, and list nothing; return its path there, too."""
    snapshot = _open_object(url, settings or load_settings())
    return snapshot, next(iter(snapshot))


def _open_object(url: str, settings: Settings) -> Snapshot:
    from datacache.store.urls import split_object_url

    store_url, key = split_object_url(url)
    folder, slash, name = key.rpartition("/")

    def asked(store: ObjectStore) -> Iterator[Entry]:
        info = store.head(key)
        # Without its version, as listings have it: the same blocks are cached once.
        yield Entry(name.encode("utf-8", "surrogateescape"), info.size_bytes, info.mtime_ns, info.etag)

    if not name:
        raise UsageError(f"{url} names a folder", hint="Name an object in it.")
    return _opened_url(settings, store_url, folder + slash, asked, (_open_object, url))


def _opened_url(
    settings: Settings,
    store_url: str,
    prefix: str,
    entries: Callable[[ObjectStore], Iterable[Entry]],
    reopen: tuple[Callable[..., Snapshot], str],
) -> Snapshot:
    """Open what a store says it has under a prefix now."""
    from datacache.manifest.builder import ManifestBuilder
    from datacache.manifest.model import BlobId, Source
    from datacache.store.open import open_store
    from datacache.store.urls import join_url

    blobs: dict[BlobId, bytes] = {}

    def load(ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        return {id: blobs[id] for id in ids if id in blobs}

    origin = join_url(store_url, prefix).rstrip("/")
    with closing(open_store(store_url, settings)) as store:
        builder = ManifestBuilder([Source(store.url, prefix)], blobs.update)
        for entry in entries(store):
            builder.add(entry)
    if builder.empty:
        raise ObjectNotFoundError(f"there is nothing under {origin}", url=origin, hint="Check the URL.")
    id, root = builder.finish()
    record = _record(origin, id, root, origin=origin)
    blocks = NodeBlocks(settings, load, dataset=origin, snapshot="")
    open_again, url = reopen
    return Snapshot(
        record, Manifest.open(id, load), blocks, reopen=(open_again, (url, settings)), on_close=blocks.close
    )


def open_samples(
    where: str | PathLike[str], settings: Settings | None = None, *, lenient: bool = False
) -> Snapshot | Shards:
    """Open what has samples: a shard set in a folder (`./shards`, `file://…`), which is mapped, or under a URL, which
    is read through the cache; for a name (`NAME@REF`) its snapshot, or the shard set that it is a snapshot of.

    A bare name is a snapshot's. Of a shard set every sidecar is read, and every shard's size is looked at. `ShardError`
    for what is missing, cut short or damaged; with `lenient` its samples raise it when they are read.
    """
    from pathlib import Path

    from datacache.shards.index import SHARDS_JSON
    from datacache.shards.reader import Shards
    from datacache.shards.source import FolderFiles, SnapshotFiles
    from datacache.store.urls import split_url

    settings = settings or load_settings()
    text = os.fspath(where)
    if "://" in text and not text.lower().startswith("file:"):
        return Shards(SnapshotFiles(open_url(text, settings), listed=False), lenient=lenient)
    if not isinstance(where, str) or "/" in text or text in (".", ".."):
        return Shards(FolderFiles(Path("/", split_url(text)[1])), lenient=lenient)
    try:
        snapshot = open_snapshot(text, settings)
    except SnapshotNotFoundError as exc:
        if Path(text).is_dir():
            exc.hint = f"For the folder of that name write ./{text}. {exc.hint}"
        raise
    return Shards(SnapshotFiles(snapshot), lenient=lenient) if SHARDS_JSON in snapshot else snapshot


def open_shards(where: str | PathLike[str], settings: Settings | None = None, *, lenient: bool = False) -> Shards:
    """Open a shard set, wherever it is; see `open_samples`. `ShardError` for a snapshot of something else."""
    from datacache.shards.reader import Shards
    from datacache.shards.source import SnapshotFiles

    found = open_samples(where, settings, lenient=lenient)
    return found if isinstance(found, Shards) else Shards(SnapshotFiles(found))  # which says that it is none


def open_bucket(
    url: str,
    settings: Settings | None = None,
    *,
    who: str,
    ack: str = "staged",
    ttl_s: float = 5.0,
    upload_every_s: float = 30.0,
    quota_bytes: int = 0,
    keep_quota: bool = False,
    direct: bool = False,
    kept: StateLog | None = None,
) -> LiveBucket:
    """Open a bucket prefix to read and write it through its staging area, which belongs to this process until `close`.

    The upload of what an earlier process has left there goes on. `who` is shown to others that want the area. With
    `ack="uploaded"` a write is acknowledged when it is in the bucket, with `"staged"` when it is durable in the staging
    area, with `"replicated"` when it is durable on a second node of the cluster as well (`cluster.replicas`). Listings
    are used for `ttl_s`; files that stay open are uploaded every `upload_every_s`. There may be `quota_bytes` under the
    prefix (0: no quota; with `keep_quota` the one set last in this staging area goes before). Nothing is asked of the
    store yet, unless there is a quota. With `kept`, what an earlier process left when it was killed goes on, and
    uploading begins only with `uploader.start()`. `direct` reads objects from the store and never from the node's
    cache, whose credentials belong to others. `StagingBusyError` where another mount has the area, `StagingError`,
    `UsageError`.
    """
    import socket

    from datacache.store.open import endpoint_of, open_bucket_backend
    from datacache.store.urls import join_url, split_url
    from datacache.writeback.engine import WriteBack
    from datacache.writeback.fetching import Fetching
    from datacache.writeback.journal.journal import Journal
    from datacache.writeback.live import LiveBucket
    from datacache.writeback.quota import Quota
    from datacache.writeback.remote.memory import RemoteMemory
    from datacache.writeback.staging.files import StagedFiles
    from datacache.writeback.upload.uploader import Uploader

    settings = settings or load_settings()
    if ack not in ("staged", "replicated", "uploaded"):
        raise UsageError(f"{ack!r} is no way to acknowledge writes", hint="It is 'staged', 'replicated' or 'uploaded'.")
    store_url, prefix = split_url(url)
    endpoint = endpoint_of(store_url, settings)
    if settings.staging is None:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as stack:
        bucket = stack.enter_context(closing(open_bucket_backend(store_url, settings, probe_prefix=prefix)))
        area, replication, notes = _open_area(settings, url, who=who, endpoint=endpoint, ack=ack, kept=kept)
        stack.enter_context(area)
        if replication is not None:
            stack.callback(replication.close, done=False)
        files = StagedFiles(area.data_folder, limit_bytes=settings.staging_bytes)
        # What the journal has written and does not need any more lies in its segments: of a small disk it takes little.
        share = max(256 * 1024, files.capacity_bytes // 32)
        memory = RemoteMemory(area.folder)
        journal = Journal(
            area.journal_folder,
            segment_bytes=min(32 * 2**20, share),
            ballast_bytes=min(8 * 2**20, share),
            before_write=memory.write_lines,
        )
        stack.callback(journal.close)
        host = socket.gethostname()
        engine = WriteBack(
            area,
            files,
            journal,
            bucket,
            prefix,
            memory=memory,
            host=host,
            uploads=settings.uploads,
            ack="replicated" if replication is not None and ack == "staged" else ack,
            kept=kept,
            replication=replication,
        )
        stack.pop_all()
        stack.callback(bucket.close)
        stack.callback(engine.close)  # which has the journal and the staging area now
        quota = Quota(engine, ttl_s=ttl_s, quota_bytes=quota_bytes, keep=keep_quota)
        stack.callback(quota.close)
        blocks = NodeBlocks(settings, lambda _ids: {}, dataset=join_url(store_url, prefix), snapshot="", direct=direct)
        fetching = Fetching(engine, blocks)
        uploader = Uploader(engine, fetching, upload_every_s=upload_every_s, away_wait_s=settings.staging_wait_s)
        stack.callback(uploader.stop, 0.0)
        if kept is None:
            uploader.start()
        live = LiveBucket(
            engine=engine,
            uploader=uploader,
            fetching=fetching,
            blocks=blocks,
            quota=quota,
            url=join_url(store_url, prefix),
            ttl_s=ttl_s,
            upload_every_s=upload_every_s,
            staging_wait_s=settings.staging_wait_s,
            notes=notes,
        )
        stack.pop_all()
    return live


def _open_area(
    settings: Settings, url: str, *, who: str, endpoint: str, ack: str, kept: StateLog | None
) -> tuple[StagingArea, Replication | None, tuple[str, ...]]:
    """Take a URL's staging area, and what brings its changes to a second node where there is to be one: with
    `ack="replicated"`, and as long as something is pending that was acknowledged so. An area that another node has
    taken over meanwhile is put aside, and an empty one begins; then there is a note of it."""
    from datacache.cluster.replicas.opening import REPLICATED, AreaTakenError, open_replication
    from datacache.writeback.staging.area import StagingArea

    in_use = kept is not None and any(True for _ in kept.items())
    notes: tuple[str, ...] = ()
    while True:
        area = StagingArea.open(settings.staging_root, url, who=who, endpoint=endpoint)
        try:
            if ack != "replicated" and not (area.folder / REPLICATED).exists():
                return area, None, notes
            replication = open_replication(settings, area, endpoint, required=ack == "replicated", in_use=in_use)
        except AreaTakenError as exc:
            notes = (exc.message,)  # and again, with an empty one
        except BaseException:
            area.close(discard=area.is_new)
            raise
        else:
            return area, replication, notes
