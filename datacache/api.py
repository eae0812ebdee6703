"""The composition root: what users and the edges call, and the only place where layers are put together.

Everything takes `settings`; without them they are loaded from the environment (`load_settings`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

from datacache.catalog.base import Catalog
from datacache.catalog.open import open_catalog_url
from datacache.catalog.refs import check_tag, resolve
from datacache.core.counters import count
from datacache.core.errors import CorruptManifestError, SnapshotNotFoundError
from datacache.daemon.client import DaemonClient
from datacache.manifest.model import DatasetRecord, Naming, SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.reader.blocks import NodeBlocks
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings, load_settings

if TYPE_CHECKING:
    from pathlib import Path

    from datacache.annotations.stats import Statistics
    from datacache.annotations.table.table import ImageSummary, Table
    from datacache.catalog.gc import GarbageReport
    from datacache.catalog.refs import Removal
    from datacache.catalog.verify import Problem
    from datacache.conversion.pipeline import Conversion
    from datacache.imports.archives.members import UnpackLimits
    from datacache.imports.export import ImportedExport
    from datacache.imports.failures import Failure
    from datacache.imports.jsonl import ImportedLines, JsonlProgress
    from datacache.loaders.tasks.queue import Span, TaskQueue, TaskStatus
    from datacache.manifest.diff import Change
    from datacache.reader.export.export import Exported
    from datacache.shards.build import Sharded
    from datacache.shards.listing import ShardSet
    from datacache.shards.reader import Shards
    from datacache.shards.verify import ShardProblem
    from datacache.store.local.walk import Links
    from datacache.writeback.live import LiveBucket


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
    with ExitStack() as stack:
        catalog = stack.enter_context(closing(open_catalog(settings)))
        record = resolve(catalog, ref)
        manifest = Manifest.open(record.id, catalog.get_blobs)
        return _opened(settings, catalog, record, manifest, stack, reopen=open_snapshot)


def _opened(
    settings: Settings,
    catalog: Catalog,
    record: SnapshotRecord,
    manifest: Manifest,
    stack: ExitStack,
    *,
    reopen: Callable[..., Snapshot],
) -> Snapshot:
    """The snapshot, which from then on owns what `stack` would close."""
    blocks = NodeBlocks(settings, catalog.get_blobs, dataset=record.dataset, snapshot=record.id)
    stack.callback(blocks.close)
    ref = f"{record.dataset}@{record.id}"
    return Snapshot(
        record,
        manifest,
        blocks,
        reopen=(reopen, (ref, settings)),
        on_close=stack.pop_all().close,
        is_listed=lambda: catalog.snapshot(record.dataset, record.id) is not None,
    )


def open_mounted(ref: str, settings: Settings | None = None) -> Snapshot:
    """As `open_snapshot`, for what was mounted before: `NAME@ID` with the whole id is opened as well after the snapshot
    was removed from the catalog, for as long as garbage collection leaves its manifest.

    Whether the id was ever one of this name cannot be told then. So `ref` comes from a record that was written when the
    catalog said so (a mount's state, a volume's record), and never from who asks for a mount.
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
        root = manifest.root
        when = "1970-01-01T00:00:00Z"  # went with the record
        record = SnapshotRecord(
            dataset=name, id=id, created_at=when, origin="", files=root.files, total_bytes=root.total_bytes
        )
        return _opened(settings, catalog, record, manifest, stack, reopen=open_mounted)


def open_url(url: str, settings: Settings | None = None) -> Snapshot:
    """What lies under a URL right now, for reading through the cache as a snapshot is: listed, and not committed. What
    changes there later is an error when it is read. The store's errors; `ObjectNotFoundError` where nothing is."""
    from datacache.catalog.create import list_into
    from datacache.core.errors import ObjectNotFoundError
    from datacache.manifest.builder import ManifestBuilder
    from datacache.manifest.model import BlobId, Source
    from datacache.store.open import open_store
    from datacache.store.urls import split_url

    settings = settings or load_settings()
    store_url, prefix = split_url(url)
    blobs: dict[BlobId, bytes] = {}

    def load(ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        return {id: blobs[id] for id in ids if id in blobs}

    with closing(open_store(store_url, settings)) as store:
        builder = ManifestBuilder([Source(store.url, prefix)], blobs.update)
        list_into(builder, store, prefix)
    origin = f"{store_url}/{prefix}".rstrip("/")
    if builder.empty:
        raise ObjectNotFoundError(f"there is nothing under {origin}", url=origin, hint="Check the URL.")
    id, root = builder.finish()
    record = SnapshotRecord(
        dataset=origin, id=id, created_at="", origin=origin, files=root.files, total_bytes=root.total_bytes
    )
    blocks = NodeBlocks(settings, load, dataset=origin, snapshot="")
    return Snapshot(record, Manifest.open(id, load), blocks, reopen=(open_url, (url, settings)), on_close=blocks.close)


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
) -> LiveBucket:
    """A live bucket prefix, read and written through its staging area, which is this process's until `close`.

    What an earlier process has left there goes on being uploaded. `who` is shown to others that want the area. With
    `ack="uploaded"` a write is acknowledged when it is in the bucket, with `"staged"` when it is durable in the staging
    area. Listings are used for `ttl_s`; files that stay open are uploaded every `upload_every_s`. There may be
    `quota_bytes` under the prefix (0: no quota; with `keep_quota` what was set last in this staging area goes before).
    Nothing is asked of the store yet, unless there is a quota. `direct`: objects are read from the store and never from
    the node's cache, whose credentials are others'. `StagingBusyError` where another mount has the area,
    `StagingError`, `UsageError`.
    """
    import socket

    from datacache.core.errors import UsageError
    from datacache.store.open import endpoint_of, open_bucket_backend
    from datacache.store.urls import split_url
    from datacache.writeback.engine import WriteBack
    from datacache.writeback.journal.journal import Journal
    from datacache.writeback.live import LiveBucket
    from datacache.writeback.staging.area import StagingArea
    from datacache.writeback.staging.files import StagedFiles
    from datacache.writeback.staging.quota import Quota
    from datacache.writeback.upload.uploader import Uploader

    settings = settings or load_settings()
    if ack not in ("staged", "uploaded"):
        raise UsageError(f"{ack!r} is no way to acknowledge writes", hint="It is 'staged' or 'uploaded'.")
    store_url, prefix = split_url(url)
    endpoint = endpoint_of(store_url, settings)
    if settings.staging is None:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as stack:
        bucket = stack.enter_context(closing(open_bucket_backend(store_url, settings, probe_prefix=prefix)))
        area = stack.enter_context(StagingArea.open(settings.staging_root, url, who=who, endpoint=endpoint))
        files = StagedFiles(area.data_folder, limit_bytes=settings.staging_bytes)
        # What the journal has written and does not need any more lies in its segments: of a small disk it takes little.
        share = max(256 * 1024, files.capacity_bytes // 32)
        journal = stack.enter_context(
            closing(
                Journal(area.journal_folder, segment_bytes=min(32 * 2**20, share), ballast_bytes=min(8 * 2**20, share))
            )
        )
        host = socket.gethostname()
        engine = WriteBack(area, files, journal, bucket, prefix, host=host, uploads=settings.uploads, ack=ack)
        stack.pop_all()
        stack.callback(bucket.close)
        stack.callback(engine.close)  # which has the journal and the staging area now
        quota = Quota(engine, ttl_s=ttl_s, quota_bytes=quota_bytes, keep=keep_quota)
        stack.callback(quota.close)
        blocks = NodeBlocks(
            settings,
            lambda _ids: {},
            dataset=f"{store_url}/{prefix}",
            snapshot="",
            direct=direct,
        )
        uploader = Uploader(engine, upload_every_s=upload_every_s, away_wait_s=settings.staging_wait_s)
        stack.callback(uploader.stop, 0.0)
        uploader.start()
        live = LiveBucket(
            engine,
            uploader,
            blocks,
            quota,
            url=f"{store_url}/{prefix}",
            ttl_s=ttl_s,
            upload_every_s=upload_every_s,
            staging_wait_s=settings.staging_wait_s,
        )
        stack.pop_all()
    return live


def open_samples(
    where: str | PathLike[str], settings: Settings | None = None, *, lenient: bool = False
) -> Snapshot | Shards:
    """What samples can be read from: a shard set in a folder (`./shards`, `file://…`), which is mapped, or under a URL,
    read through the cache; and for a name (`NAME@REF`) its snapshot, or the shard set that it is a snapshot of.

    A bare name is a snapshot's. Of a shard set every sidecar is read, and every shard's size is looked at. `ShardError`
    for what is missing, cut short or damaged; with `lenient` its samples raise it when they are read.
    """
    from pathlib import Path

    from datacache.core.errors import SnapshotNotFoundError
    from datacache.shards.listing import SHARDS_JSON
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
    """A shard set, wherever it is; see `open_samples`. `ShardError` for a snapshot of something else."""
    from datacache.shards.reader import Shards
    from datacache.shards.source import SnapshotFiles

    found = open_samples(where, settings, lenient=lenient)
    return found if isinstance(found, Shards) else Shards(SnapshotFiles(found))  # which says that it is none


def open_tasks(name: str, settings: Settings | None = None, *, patience_s: float = 60.0) -> TaskQueue:
    """The queue of training tasks `name` in the catalog. Nothing is opened before its first call.

    Thread-safe, safe after `fork()`, picklable. While the database is away, calls wait for `patience_s` before they
    raise `CatalogUnavailableError`. `TasksError` where the queue is not there.
    """
    from datacache.catalog.open import open_task_store
    from datacache.loaders.tasks.queue import TaskQueue

    return TaskQueue(open_task_store((settings or load_settings()).catalog), name, patience_s=patience_s)


def create_tasks(
    name: str,
    dataset: Any,
    *,
    records: int = 1024,
    epochs: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    lease_s: float = 60.0,
    max_failures: int = 3,
    max_lost: int = 10,
    reset: bool = False,
    settings: Settings | None = None,
    patience_s: float = 60.0,
) -> TaskQueue:
    """Make a queue of training tasks over a data set, in the catalog.

    `dataset` is one of `datacache.torch`'s (anything with `spans()`), or what they are opened with: a snapshot, or a
    shard set in a snapshot, at a URL or in a folder. For the other arguments see `TaskParameters`. All workers of a job
    may call this: with the same arguments it is the same queue, with others `TasksError` unless `reset` begins anew.
    """
    from datacache.loaders.tasks.queue import TaskParameters, TaskQueue

    settings = settings or load_settings()
    label, spans = (repr(dataset), dataset.spans()) if hasattr(dataset, "spans") else _spans(dataset, settings)
    parameters = TaskParameters(
        dataset=label,
        records=records,
        epochs=epochs,
        shuffle=shuffle,
        seed=seed,
        lease_s=lease_s,
        max_failures=max_failures,
        max_lost=max_lost,
    )
    store = open_tasks(name, settings).store
    return TaskQueue.create(store, name, spans, parameters, reset=reset, patience_s=patience_s)


def list_tasks(settings: Settings | None = None) -> list[TaskStatus]:
    """All queues of training tasks, by name."""
    from datacache.catalog.open import open_task_store
    from datacache.loaders.tasks.queue import list_queues

    with closing(open_task_store((settings or load_settings()).catalog)) as store:
        return list_queues(store)


def _spans(where: str | PathLike[str], settings: Settings) -> tuple[str, list[Span]]:
    """What a data set is called, and its spans: those that `ShardDataset` and `SnapshotDataset` have."""
    from datacache.annotations.query import Query
    from datacache.loaders.selection import select
    from datacache.loaders.shard_source import ShardSource
    from datacache.loaders.source import SnapshotSource
    from datacache.shards.reader import Shards

    found = open_samples(where, settings, lenient=True)
    if isinstance(found, Shards):
        return found.files.where, ShardSource(found, None).spans()
    with closing(found), closing(open_catalog(settings)) as catalog:
        selection = select(found, catalog, target="auto", query=Query())
        return found.record.ref, SnapshotSource(found, selection).spans()


def create_snapshot(
    name: str,
    url: str,
    *,
    settings: Settings | None = None,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    replace: bool = False,
    message: str = "",
    copy: bool = False,
    pin: bool = False,
    objects: str = "",
    check_copies: bool = False,
    follow_links: bool = False,
    attributes: bool = False,
    links: Links | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SnapshotRecord:
    """Make a snapshot of all that lies under `url` (`s3://bucket/prefix`, a folder, any fsspec URL).

    An unchanged prefix gives the same id. Atomic: a creation that is killed leaves nothing visible and can be run
    again. `progress(files, bytes)` is called now and then. Raises the store's errors, `TagExistsError`, `UsageError`.
    `OtherKindError` where `name` is another data set than what lies there, unless `replace` says that it becomes this.

    With `copy` (`pin` is its former name) each object is copied into content-addressed storage (the setting `objects`,
    or the URL `objects`; else `SettingsError`) and the snapshot refers to the copies; `check_copies` asks for those
    that earlier snapshots know.

    A link in a folder that stays inside of it is a link in the snapshot. One that leads out is left out, which the
    record's `warnings` say, and `links` counts where it is given; `follow_links` takes what is there along.
    `attributes` keeps permissions, and links that a read-write mount or s3fs-fuse wrote into a bucket, at the cost of a
    request for each object.
    """
    from datacache.catalog.copy import THREADS, create_copied_snapshot
    from datacache.catalog.create import ObjectAttributes
    from datacache.catalog.create import create_snapshot as create
    from datacache.catalog.objects import ObjectWriter
    from datacache.store.local.store import LocalStore
    from datacache.store.local.walk import Links
    from datacache.store.open import open_bucket_backend, open_store
    from datacache.store.retry import RetryingStore
    from datacache.store.urls import split_url

    settings = settings or load_settings()
    store_url, prefix = split_url(url)
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_store(store_url, settings)))
        catalog = stack.enter_context(closing(open_catalog(settings)))
        naming = Naming(name=name, tags=tags, move_tags=move_tags, replace=replace, message=message)
        named: dict[str, Any] = {"origin": f"{store_url}/{prefix}", "progress": progress}
        links = links if links is not None else Links()
        links.follow = follow_links
        named["warnings"] = lambda: _links_warnings(links, store_url)
        if store_url == "file://":
            store = RetryingStore(LocalStore(links=links), settings.store_timeout_s)
        if attributes:
            bucket = stack.enter_context(closing(open_bucket_backend(store_url, settings)))
            timeout_s, threads = settings.store_timeout_s, min(THREADS, settings.concurrency)
            named["look"] = ObjectAttributes(bucket, prefix, links, timeout_s=timeout_s, threads=threads).page
        if not (copy or pin):
            return create(catalog, store, prefix, naming, **named)
        writer = stack.enter_context(closing(ObjectWriter(catalog, settings, url=objects)))
        threads = min(THREADS, settings.concurrency)
        return create_copied_snapshot(
            catalog, store, prefix, writer, naming, check_copies=check_copies, threads=threads, **named
        )


def remove_snapshot(ref: str, *, all_tags: bool = False, settings: Settings | None = None) -> Removal:
    """Remove the tag that `ref` names, and the snapshot with its last tag: what was done.

    `NAME@ID` and `NAME@latest` remove a snapshot without tags, or with `all_tags` one with all of them; else
    `TagExistsError` names the tags, and nothing is removed. Data stay until `collect_garbage`, and for as long as the
    snapshot is mounted. `SnapshotNotFoundError`, `UsageError` for a bare name.
    """
    from datacache.catalog.refs import plan_removal, remove

    with closing(open_catalog(settings)) as catalog:
        while True:
            planned = plan_removal(catalog, ref, all_tags=all_tags)
            if remove(catalog, planned):
                return planned


def _links_warnings(links: Links, store_url: str) -> list[str]:
    local = store_url == "file://"
    found = []
    if links.left_out:
        verb = "leads out of the folder and was" if links.left_out == 1 else "lead out of the folder and were"
        way_out = " (--follow-links)" if local else ""
        named = _named(links.first, links.left_out, local)
        found.append(f"{count(links.left_out, 'link')} {verb} left out{way_out}: {named}")
    if links.passed_over:
        verb = "is no file or folder, or points" if links.passed_over == 1 else "are no files or folders, or point"
        named = _named(links.first_passed_over, links.passed_over, local)
        found.append(f"{count(links.passed_over, 'entry', 'entries')} {verb} nowhere, and left out: {named}")
    return found


def _named(first: Sequence[str], number: int, local: bool) -> str:
    """The first of so many keys, and how many more there are."""
    more = f" and {number - len(first):,} more" if number > len(first) else ""
    return ", ".join(repr("/" + name if local else name) for name in first) + more


def diff_snapshots(before: str, after: str = "", *, settings: Settings | None = None) -> Iterator[Change]:
    """The files added, removed and changed on the way from one snapshot to another, in path order, read as they are
    taken. With one reference: to it, from its parent. `SnapshotNotFoundError`, `UsageError` without a parent."""
    from datacache.catalog.refs import compare

    with closing(open_catalog(settings)) as catalog:
        yield from compare(catalog, before, after).changes


def verify_snapshot(
    ref: str,
    *,
    read: bool = False,
    settings: Settings | None = None,
    progress: Callable[[int, int], None] | None = None,
    unchecked: Callable[[int], None] | None = None,
) -> Iterator[Problem]:
    """The files of a snapshot whose objects are missing, changed, damaged or unreadable, as they are found.

    Asks the stores, not the cache; with `read` every byte is read, and compared with what the store says of it.
    `progress(done, files)`; at the end, with `read`, `unchecked(files)`: for so many no store says anything. Raises
    `SnapshotNotFoundError`, `StoreUnavailableError` where a store is away.
    """
    from datacache.catalog.packs import stores_with_packs
    from datacache.catalog.verify import THREADS, verify

    settings = settings or load_settings()
    own_md5 = dataclasses.replace(settings, check_md5=False)  # `verify` judges them by all that it reads
    with closing(open_catalog(settings)) as catalog:
        manifest = Manifest.open(resolve(catalog, ref).id, catalog.get_blobs)
        with closing(stores_with_packs(own_md5, catalog.get_blobs)) as stores:
            threads = min(THREADS, settings.concurrency)
            yield from verify(manifest, stores, read=read, threads=threads, progress=progress, unchecked=unchecked)


def import_jsonl(
    name: str,
    file: Path | str,
    *,
    settings: Settings | None = None,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    replace: bool = False,
    message: str = "",
    copy: bool = False,
    pin: bool = False,
    objects: str = "",
    concurrency: int = 0,
    max_object_bytes: int = 2**30,
    object_timeout_s: float = 300.0,
    skip_failed: bool = False,
    allow_local: Sequence[str | PathLike[str]] = (),
    allow_network: Sequence[str] = (),
    progress: Callable[[JsonlProgress], None] | None = None,
    on_failure: Callable[[Failure], None] | None = None,
) -> ImportedLines:
    """Make a snapshot of the objects that a file of JSON lines names: `{"url": …, "path": …, "label": …}`.

    Objects of web servers are copied into content-addressed storage (the setting `objects`, or the URL `objects`),
    those of stores are named, or with `copy` copied, too. Other fields than `url` and `path` go into `metadata.jsonl`.
    Every line is tried, and `on_failure` is told of those that failed; then nothing is committed and
    `ImportFailedError` is raised, unless `skip_failed` leaves them out. An import that was killed goes on where it was
    when it is run again. Files of this machine are taken from the list's own folder and from those of `allow_local`,
    addresses of this machine and of private networks only where `allow_network` or the setting names them. Also raises
    `UsageError`, `TagExistsError` and the errors of the storage for copies.
    """
    from datacache.imports.jsonl import JsonlOptions
    from datacache.imports.jsonl import import_jsonl as import_lines
    from datacache.imports.lines import LinesFile

    settings = settings or load_settings()
    options = JsonlOptions(
        copy=copy or pin,
        objects=objects,
        concurrency=concurrency,
        max_object_bytes=max_object_bytes,
        object_timeout_s=object_timeout_s,
        skip_failed=skip_failed,
        allow_local=tuple(allow_local),
        allow_network=tuple(allow_network),
    )
    with closing(open_catalog(settings)) as catalog, closing(LinesFile(file)) as lines:
        return import_lines(
            catalog,
            settings,
            lines,
            Naming(name=name, tags=tags, move_tags=move_tags, replace=replace, message=message),
            options=options,
            progress=progress,
            on_failure=on_failure,
        )


def export_snapshot(
    ref: str,
    directory: Path | str,
    *,
    link: str = "auto",
    settings: Settings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write a snapshot's files into a folder: one that is not there yet, is empty, or holds (a part of) this export,
    as the file `.datacache-exported` in it says.

    `link` says how files of this machine get there: `auto` clones them where the file system can
    (they share their blocks until one is changed), `hard` makes hard links, with which whoever changes the file changes
    the bucket (never to what datacache itself stored, which snapshots share), `none` copies. The rest is copied out of
    the cache, which fetches what it does not have. Files have the snapshot's times. `progress(files, bytes)` is called
    now and then. An export that failed or was killed goes on where it was when it is run again. Raises `UsageError` for
    a folder that holds other things, `ExportError` where it cannot be written (a full disk), and the errors of reading.
    """
    from datacache.reader.export.export import export
    from datacache.store.sources import source_rules

    settings = settings or load_settings()
    with open_snapshot(ref, settings) as snapshot:
        return export(snapshot, directory, link=link, rules=source_rules(settings), progress=progress)


def convert(
    ref: str,
    *,
    to: str,
    name: str,
    split: str | None = None,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    skip_difficult: bool = False,
    keep_unannotated: bool = False,
    strict: bool = False,
    format: str | None = None,
    voc_origin: int = 0,
    trust_sizes: bool = False,
    decode: bool = False,
    reencode_broken: bool = False,
    resize: str | None = None,
    letterbox: bool = False,
    crop: str | None = None,
    rotate: float | None = None,
    flip: str | None = None,
    quality: int = 95,
    min_visible: float = 0.0,
    objects: str | None = None,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    replace: bool = False,
    message: str = "",
    processes: int | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Conversion:
    """Make a snapshot of dataset `name` with the images of `ref` and its annotations in the format `to`.

    The arguments are the options of `dsctl convert`: `split` is `"train=0.8,val=0.2"` (by a hash of path and seed),
    `"none"`, or None for the splits the data set brings; `resize` is `"640x480"`. `progress(what, done, total)` counts
    images. The result has `record` and `report`.

    Deterministic and idempotent: the same snapshot, options and earlier classes of `name` give the same id. Nothing is
    visible before the end, and a conversion that was killed can be run again. Any thread may call it. Annotations are
    read in worker processes made by `fork()`; `processes=1` makes none. Raises `ConversionError` (`strict`),
    `UsageError`, and what stores and catalogs raise.
    """
    from datacache.catalog.objects import ObjectWriter
    from datacache.conversion.index import Reading
    from datacache.conversion.operations import parse_operations
    from datacache.conversion.pipeline import Plan, run
    from datacache.conversion.splits import Splits, parse_splits
    from datacache.core.errors import UsageError

    if isinstance(classes, str):
        raise UsageError(f"classes are a list of names, not the text {classes!r}")
    settings = settings or load_settings()
    plan = Plan(
        to=to,
        naming=Naming(name=name, tags=tags, move_tags=move_tags, replace=replace, message=message),
        reading=Reading(
            format=format,
            origin=voc_origin,
            trust_sizes=trust_sizes,
            decode=decode,
            classes=None if classes is None else tuple(classes),
        ),
        splits=None if split is None else Splits() if split == "none" else parse_splits(split, seed),
        classes=classes,
        skip_difficult=skip_difficult,
        keep_unannotated=keep_unannotated,
        strict=strict,
        reencode_broken=reencode_broken,
        operations=parse_operations(
            crop=crop,
            rotate=rotate,
            flip=flip,
            resize=resize,
            letterbox=letterbox,
            quality=quality,
            min_visible=min_visible,
        ),
    )
    with closing(open_catalog(settings)) as catalog, open_snapshot(ref, settings) as snapshot:
        return run(
            catalog,
            snapshot,
            plan,
            open_objects=lambda: ObjectWriter(catalog, settings, url=objects or ""),
            processes=processes,
            progress=progress,
        )


def shard(
    ref: str,
    *,
    to: str,
    format: str = "webdataset",
    max_size_bytes: int = 256 * 10**6,
    shuffle: bool = False,
    seed: int = 0,
    name: str | None = None,
    classes: Sequence[str] | None = None,
    classes_from_folders: bool = False,
    annotations: str | None = None,
    voc_origin: int = 0,
    trust_sizes: bool = False,
    overwrite: bool = False,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    replace: bool = False,
    message: str = "",
    processes: int | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int, int], None] = lambda _what, _done, _total, _bytes: None,
) -> Sharded:
    """Write the samples of `ref` as shards to the URL or folder `to`: WebDataset tars or TFRecords, each with a sidecar
    that says where its samples are, and `shards.json`. With `name`, a snapshot of dataset `name` is made of them.

    The arguments are the options of `dsctl shard`; `annotations` is the format of the snapshot's. `progress(what, done,
    total, bytes)` counts samples, and bytes of shards. The result has `built` (its `set` is what `shards.json` says)
    and `record`, None without a `name`.

    Deterministic: the same snapshot and options give the same bytes, whatever the number of processes. Idempotent: a
    set that is there is not made again, and one that was killed goes on where it was. Shards are made in worker
    processes (`fork()`); `processes=1` makes none. `UsageError` where something else is at the URL (unless
    `overwrite`), `ShardError` that names the file that cannot be read, and what stores and catalogs raise.
    """
    from datacache.catalog.commit import check_target
    from datacache.conversion.index import Reading
    from datacache.core.errors import UsageError
    from datacache.manifest.model import Lineage
    from datacache.shards.build import Options, Sharded, build, commit_set
    from datacache.shards.place import Place

    if isinstance(classes, str):
        raise UsageError(f"classes are a list of names, not the text {classes!r}")
    if name is None and (tags or message):
        raise UsageError("tags and messages are of snapshots, and none is asked for", hint="Name it: --as NAME.")
    settings = settings or load_settings()
    listed = None if classes is None else tuple(classes)
    naming = None
    if name is not None:
        naming = Naming(name=name, tags=tags, move_tags=move_tags, replace=replace, message=message)
    options = Options(
        format=format,
        max_size_bytes=max_size_bytes,
        shuffle=shuffle,
        seed=seed,
        classes=listed,
        classes_from_folders=classes_from_folders,
        reading=Reading(format=annotations, origin=voc_origin, trust_sizes=trust_sizes, classes=listed),
    )
    with (
        closing(open_catalog(settings)) as catalog,
        open_snapshot(ref, settings) as snapshot,
        closing(Place(to, settings)) as place,
    ):
        if naming is not None:
            check_target(catalog, naming, Lineage("shard", {"format": format}, (snapshot.ref,)))
        built = build(catalog, snapshot, place, options, overwrite=overwrite, processes=processes, progress=progress)
        record = None if naming is None else commit_set(catalog, place, built.set, naming)
        return Sharded(built, place.url, record)


def verify_shards(
    url: str,
    *,
    settings: Settings | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[ShardSet, list[ShardProblem]]:
    """Read every byte of the shard set at a URL or folder: what `shards.json` says, and all that is not as it says.

    `progress(done, total)` counts shards. `ShardError` if there is no finished set; the store's errors.
    """
    from datacache.shards.place import Place
    from datacache.shards.verify import read_set, verify

    with closing(Place(url, settings or load_settings())) as place:
        found = read_set(place)
        return found, list(verify(place, found, progress=progress))


def import_export(
    name: str,
    path: Path | str,
    *,
    images: str = "",
    settings: Settings | None = None,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    replace: bool = False,
    message: str = "",
    objects: str = "",
    limits: UnpackLimits | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> ImportedExport:
    """Make a snapshot of what an annotation tool exported: a zip, a tar, a folder, or a .json file of COCO.

    `images` is a snapshot whose images are taken by reference, so that annotations join images that lie in a bucket.
    Images in the export go to content-addressed storage (the setting `objects`, or the URL `objects`). The same export
    gives the same snapshot. `progress(done, files, bytes)`. Raises `ImportFailedError` for an archive that is damaged,
    leads out of itself or unpacks to more than `limits`, `UsageError`, `TagExistsError`, `SnapshotNotFoundError`.
    """
    from datacache.imports.archives.members import UnpackLimits
    from datacache.imports.export import ExportOptions
    from datacache.imports.export import import_export as import_files

    settings = settings or load_settings()
    options = ExportOptions(images=images, objects=objects, limits=limits or UnpackLimits())
    with closing(open_catalog(settings)) as catalog:
        return import_files(
            catalog,
            settings,
            path,
            Naming(name=name, tags=tags, move_tags=move_tags, replace=replace, message=message),
            options=options,
            progress=progress,
        )


def subset(
    ref: str,
    images: Collection[str],
    *,
    name: str,
    parameters: Mapping[str, Any] | None = None,
    format: str | None = None,
    voc_origin: int = 0,
    trust_sizes: bool = False,
    decode: bool = False,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    replace: bool = False,
    message: str = "",
    settings: Settings | None = None,
) -> SnapshotRecord:
    """Make a snapshot of dataset `name` with these images of `ref` (their paths) and their annotations, by reference.

    `parameters` say in its lineage how they were chosen. Deterministic. `UsageError` where `images` is empty.
    """
    from datacache.catalog.objects import ObjectWriter
    from datacache.conversion.index import Reading
    from datacache.conversion.subset import subset as make

    settings = settings or load_settings()
    with closing(open_catalog(settings)) as catalog, open_snapshot(ref, settings) as snapshot:
        return make(
            catalog,
            snapshot,
            images,
            Naming(name=name, tags=tags, move_tags=move_tags, replace=replace, message=message),
            reading=Reading(format=format, origin=voc_origin, trust_sizes=trust_sizes, decode=decode),
            parameters=parameters or {},
            open_objects=lambda: ObjectWriter(catalog, settings),
        )


def list_datasets(settings: Settings | None = None) -> list[DatasetRecord]:
    """Return all data sets by name, each with its tags and the id of its latest snapshot."""
    with closing(open_catalog(settings)) as catalog:
        return catalog.datasets()


def list_snapshots(name: str, settings: Settings | None = None) -> list[SnapshotRecord]:
    """Return the snapshots of dataset `name` in the order in which they were made.

    `SnapshotNotFoundError` where there is no such data set.
    """
    with closing(open_catalog(settings)) as catalog:
        resolve(catalog, name)
        return catalog.snapshots(name)


def tag_snapshot(ref: str, tag: str, *, move: bool = False, settings: Settings | None = None) -> SnapshotRecord:
    """Tag the snapshot that `ref` names now. `TagExistsError` where the tag names another and `move` is false."""
    with closing(open_catalog(settings)) as catalog:
        record = resolve(catalog, ref)
        catalog.set_tag(record.dataset, check_tag(tag), record.id, move=move)
        return record


def query(ref: str, *, settings: Settings | None = None, **wanted: Any) -> list[ImageSummary]:
    """Return the images of `ref` that fit, in the order of their paths: path, width, height and boxes by label.

    `wanted` are the fields of `datacache.annotations.query.Query`, as the options of `dsctl query`: `labels`,
    `any_label`, `min_objects`, `max_objects`, `where`. `UsageError` for a condition that cannot be understood.
    """
    from datacache.annotations.query import Query, find

    with open_annotations(ref, settings=settings) as (_snapshot, table):
        return list(find(table, Query(**wanted)))


def stats(ref: str, *, settings: Settings | None = None) -> Statistics:
    """Return what `dsctl stats` shows: classes, boxes, sizes and problems of a snapshot's annotations."""
    from datacache.annotations.stats import collect

    with open_annotations(ref, settings=settings) as (_snapshot, table):
        return collect(table)


def preview(ref: str, *, paths: Collection[str] | None = None, n: int = 16, settings: Settings | None = None) -> bytes:
    """Draw images with their boxes and return the bytes of a PNG: the images at `paths`, or the first `n`."""
    from itertools import islice

    from datacache.annotations.pictures.draw import colours_of
    from datacache.annotations.pictures.preview import Picture
    from datacache.annotations.pictures.preview import preview as draw
    from datacache.core.errors import PathNotFoundError

    with open_annotations(ref, settings=settings) as (snapshot, table):
        if paths is None:
            rows = list(islice(table.rows(), n))
        else:
            found = [(path, table.row(path)) for path in paths]
            rows = [row for _, row in found if row is not None]
            missing = next((path for path, row in found if row is None), None)
            if missing is not None:
                raise PathNotFoundError(f"{snapshot.record.ref} has no image {missing}", path=missing)
        pictures = [Picture(row.path, snapshot.read(row.path), row.annotation) for row in rows]
        subtitle = f"{len(pictures):,} of {table.images:,} images"
        return draw(pictures, title=snapshot.record.ref, subtitle=subtitle, colours=colours_of(table.labels))


@contextmanager
def open_annotations(
    ref: str,
    *,
    format: str | None = None,
    voc_origin: int = 0,
    trust_sizes: bool = False,
    decode: bool = False,
    processes: int | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Iterator[tuple[Snapshot, Table]]:
    """A snapshot and the table of its annotations, which is made the first time it is asked for.

    `UsageError` where the annotations' format cannot be told; the store's errors.
    """
    from datacache.conversion.index import Reading, open_table

    settings = settings or load_settings()
    reading = Reading(format=format, origin=voc_origin, trust_sizes=trust_sizes, decode=decode)
    with closing(open_catalog(settings)) as catalog, open_snapshot(ref, settings) as snapshot:
        yield snapshot, open_table(snapshot, catalog, reading, processes=processes, progress=progress)


def collect_garbage(
    *,
    grace_s: float | None = None,
    dry_run: bool = False,
    settings: Settings | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> GarbageReport:
    """Remove what no snapshot needs and what is older than `grace_s` (a day): blobs of the catalog, and objects that
    datacache has stored itself. Never touches what lies in a bucket otherwise.

    Snapshots may be created meanwhile, as long as none takes longer than the grace period. With `dry_run` nothing is
    removed, and the report says what would be. Killed at any point, it can be run again.
    """
    from datacache.catalog.gc import GRACE_S
    from datacache.catalog.gc import collect_garbage as collect

    settings = settings or load_settings()
    with closing(open_catalog(settings)) as catalog:
        return collect(
            catalog, settings, grace_s=GRACE_S if grace_s is None else grace_s, dry_run=dry_run, progress=progress
        )


def connect(settings: Settings | None = None) -> DaemonClient:
    """The node's daemon, started if need be. `DaemonUnavailableError` says why it cannot be."""
    client = DaemonClient(settings or load_settings())
    client.ensure()
    return client


def running_daemon(settings: Settings | None = None) -> DaemonClient | None:
    """The node's daemon if one runs. `DaemonSilentError` for one that does not answer."""
    client = DaemonClient(settings or load_settings())
    if client.alive():
        return client
    silence = client.silence()
    if silence is not None:
        raise silence
    return None
