"""Make, list, name, compare, check, export and remove snapshots; say which namespaces may have a data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from os import PathLike
from typing import TYPE_CHECKING, Unpack

from datacache.api.opening import open_catalog, open_snapshot
from datacache.api.options import NamingOptions
from datacache.api.progress import of_all_files, of_checks, of_files, of_frames, of_lines, of_words, shown, shows
from datacache.catalog.refs import check_tag, resolve
from datacache.core.counters import count
from datacache.core.engine import Engine
from datacache.core.errors import SnapshotNotFoundError, UsageError
from datacache.manifest.model import DatasetRecord, Naming, SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.settings import Settings, load_settings

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from datacache.catalog.access import Access
    from datacache.catalog.base import Catalog
    from datacache.catalog.gc import GarbageReport
    from datacache.catalog.refs import Removal
    from datacache.catalog.verify import Problem
    from datacache.imports.archives.members import UnpackLimits
    from datacache.imports.export import ImportedExport
    from datacache.imports.failures import Failure
    from datacache.imports.jsonl import ImportedLines, JsonlProgress
    from datacache.imports.videos.frames import FailedVideo, FramesProgress, ImportedFrames
    from datacache.manifest.diff import Change
    from datacache.manifest.model import Entry
    from datacache.reader.export.export import Exported
    from datacache.store.local.walk import Links


@shows(of_files)
def create_snapshot(
    name: str,
    url: str,
    *,
    copy: bool = False,
    pin: bool = False,
    objects: str = "",
    check_copies: bool = False,
    follow_links: bool = False,
    attributes: bool = False,
    links: Links | None = None,
    inventory: str = "",
    processes: int | None = None,
    settings: Settings | None = None,
    progress: Callable[[int, int], None] | None = None,
    **naming: Unpack[NamingOptions],
) -> SnapshotRecord:
    """Make a snapshot of all that lies under `url` (`s3://bucket/prefix`, a folder, any fsspec URL).

    An unchanged prefix gives the same id. Atomic: a creation that is killed leaves nothing visible and can be run
    again. `progress(files, bytes)` is called now and then. Raises the store's errors, `TagExistsError`, `UsageError`.
    `OtherKindError` where `name` is another data set than what lies there, unless `replace` is given.

    With `copy` (`pin` is its former name) each object is copied into content-addressed storage (the setting `objects`,
    or the URL `objects`; else `SettingsError`) and the snapshot refers to the copies; `check_copies` asks for those
    that earlier snapshots know.

    A link in a folder that stays inside of it is a link in the snapshot. One that leads out is left out, which the
    record's `warnings` say, and `links` counts where it is given; `follow_links` takes what is there along.
    `attributes` keeps permissions, and links that a read-write mount or s3fs-fuse wrote into a bucket, at the cost of a
    request for each object.

    A prefix of `s3://` with more than some thousand objects is listed by worker processes, which are made by `fork()`:
    `processes` of them, a few more than there are cores if it is None, none with 1. `inventory` is the URL of the
    `manifest.json` of an Amazon S3 Inventory of the bucket, which is read in place of a listing: the snapshot is that
    of a listing when the report was made. `ImportFailedError` for one that cannot be used.
    """
    from datacache.catalog.create import THREADS, ListedPlace, ObjectAttributes, create_copied_snapshot
    from datacache.catalog.create import create_snapshot as create
    from datacache.catalog.inventory import Inventory
    from datacache.catalog.objects import ObjectWriter
    from datacache.store.local.store import LocalStore
    from datacache.store.local.walk import Links
    from datacache.store.open import open_bucket_backend, open_store
    from datacache.store.retry import RetryingStore
    from datacache.store.urls import join_url, split_url

    settings = settings or load_settings()
    named = Naming(name=name, **naming)
    store_url, prefix = split_url(url)
    threads = min(THREADS, settings.concurrency)
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_store(store_url, settings)))
        catalog = stack.enter_context(closing(open_catalog(settings)))
        links = links if links is not None else Links()
        links.follow = follow_links
        if store_url == "file://":
            store = RetryingStore(LocalStore(links=links), settings.store_timeout_s)
        look = None
        if attributes:
            bucket = stack.enter_context(closing(open_bucket_backend(store_url, settings)))
            timeout_s = settings.store_timeout_s
            look = ObjectAttributes(bucket, prefix, links, timeout_s=timeout_s, threads=threads).page
        report = None
        if inventory:
            if attributes or not store_url.startswith("s3://"):
                raise UsageError("an inventory is for s3:// and has no attributes of objects")
            of = stack.enter_context(closing(open_store(Inventory.split(inventory)[0], settings)))
            report = Inventory(of, inventory, store_url)
        place = ListedPlace(
            store=store,
            prefix=prefix,
            origin=join_url(store_url, prefix),
            progress=progress,
            look=look,
            warnings=lambda: _links_warnings(links, store_url),
            inventory=report,
            processes=processes,
        )
        if not (copy or pin):
            return create(catalog, place, named)
        writer = stack.enter_context(closing(ObjectWriter(catalog, settings, url=objects)))
        return create_copied_snapshot(catalog, place, named, writer, check_copies=check_copies, threads=threads)


def _links_warnings(links: Links, store_url: str) -> list[str]:
    local = store_url == "file://"

    def names(first: Sequence[str], number: int) -> str:
        more = f" and {number - len(first):,} more" if number > len(first) else ""
        return ", ".join(repr("/" + name if local else name) for name in first) + more

    found = []
    if links.left_out:
        verb = "leads out of the folder and was" if links.left_out == 1 else "lead out of the folder and were"
        way_out = " (--follow-links)" if local else ""
        first = names(links.first, links.left_out)
        found.append(f"{count(links.left_out, 'link')} {verb} left out{way_out}: {first}")
    if links.passed_over:
        verb = "is no file or folder, or points" if links.passed_over == 1 else "are no files or folders, or point"
        first = names(links.first_passed_over, links.passed_over)
        found.append(f"{count(links.passed_over, 'entry', 'entries')} {verb} nowhere, and left out: {first}")
    return found


@shows(of_lines)
def import_jsonl(
    name: str,
    file: Path | str,
    *,
    copy: bool = False,
    pin: bool = False,
    objects: str = "",
    concurrency: int = 0,
    max_object_bytes: int = 2**30,
    object_timeout_s: float = 300.0,
    skip_failed: bool = False,
    allow_local: Sequence[str | PathLike[str]] = (),
    allow_network: Sequence[str] = (),
    on: str | Executor | None = None,
    settings: Settings | None = None,
    progress: Callable[[JsonlProgress], None] | None = None,
    on_failure: Callable[[Failure], None] | None = None,
    **naming: Unpack[NamingOptions],
) -> ImportedLines:
    """Make a snapshot of the objects that a file of JSON lines names: `{"url": …, "path": …, "label": …}`.

    Objects of web servers are copied into content-addressed storage (the setting `objects`, or the URL `objects`),
    those of stores are named, or with `copy` copied, too. Other fields than `url` and `path` go into `metadata.jsonl`.
    Every line is tried, and `on_failure` is told of those that failed; then nothing is committed and
    `ImportFailedError` is raised, unless `skip_failed` leaves them out. An import that was killed goes on where it was
    when it is run again. Files of this machine are taken from the list's own folder and from those of `allow_local`,
    addresses of this machine and of private networks only where `allow_network` or the setting names them. Objects are
    fetched `on` an engine, as in `convert`: its processes go to private networks only where their own setting names
    these, too, and `concurrency` is that of each. Also raises `UsageError`, `TagExistsError` and the errors of the
    storage for copies.
    """
    from datacache.executors.open import open_workers
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
    named = Naming(name=name, **naming)
    with (
        closing(open_catalog(settings)) as catalog,
        closing(LinesFile(file)) as lines,
        open_workers(on, None, settings) as workers,
    ):
        engine = workers if isinstance(workers, Engine) else None
        return import_lines(
            catalog, settings, lines, named, options=options, engine=engine, progress=progress, on_failure=on_failure
        )


@shows(of_all_files)
def import_export(
    name: str,
    path: Path | str,
    *,
    images: str = "",
    objects: str = "",
    limits: UnpackLimits | None = None,
    settings: Settings | None = None,
    progress: Callable[[int, int, int], None] | None = None,
    **naming: Unpack[NamingOptions],
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
    named = Naming(name=name, **naming)
    with closing(open_catalog(settings)) as catalog:
        return import_files(catalog, settings, path, named, options=options, progress=progress)


@shows(of_frames)
def import_frames(
    name: str,
    url: str,
    *,
    frames: str,
    max_side: int = 0,
    quality: int = 90,
    objects: str = "",
    processes: int | None = None,
    settings: Settings | None = None,
    progress: Callable[[FramesProgress], None] | None = None,
    on_failure: Callable[[FailedVideo], None] | None = None,
    **naming: Unpack[NamingOptions],
) -> ImportedFrames:
    """Make a snapshot of frames of the videos under `url` (or of one video) as JPEGs: `clip.mp4/000012.500.jpg`.

    `frames` is `every=1s` or `fps=2` (the frame that is shown at each of these times, counted from the first frame) or
    `scene` (the first frame of each). The images go to content-addressed storage (the setting `objects`, or the URL
    `objects`), and `videos.jsonl` says which video each is of. A video of which no frames can be taken is left out,
    which the record's `warnings` say, and `on_failure` is told. The same videos and options give the same id. An import
    that was killed goes on where it was when it is run again. Videos are decoded in worker processes made by `fork()`.
    Raises `UsageError` (also where PyAV is not installed), `ObjectNotFoundError` where there is no video,
    `ImportFailedError` where none is left, or the store does not give one, `TagExistsError`.
    """
    from datacache.imports.videos.frames import FramesOptions
    from datacache.imports.videos.frames import import_frames as import_videos

    settings = settings or load_settings()
    options = FramesOptions(frames=frames, max_side=max_side, quality=quality, objects=objects, processes=processes)
    named = Naming(name=name, **naming)
    with closing(open_catalog(settings)) as catalog:
        return import_videos(catalog, settings, url, named, options=options, progress=progress, on_failure=on_failure)


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


def versions_of_file(
    catalog: Catalog, dataset: str, path: str, *, most: int = 20
) -> list[tuple[SnapshotRecord, Entry | None]]:
    """Return the newest snapshots of a data set, newest first, each with its entry of a path, or None."""
    raw = path.encode("utf-8", "surrogateescape")
    found: list[tuple[SnapshotRecord, Entry | None]] = []
    for record in reversed(catalog.snapshots(dataset)[-most:]):
        manifest = Manifest.open(record.id, catalog.get_blobs)
        row = manifest.find(raw)
        found.append((record, None if row is None else manifest.entry(row)))
    return found


def tag_snapshot(ref: str, tag: str, *, move: bool = False, settings: Settings | None = None) -> SnapshotRecord:
    """Tag the snapshot that `ref` names now. `TagExistsError` where the tag names another and `move` is false."""
    check_tag(tag)
    with closing(open_catalog(settings)) as catalog:
        record = resolve(catalog, ref)
        catalog.set_tag(record.dataset, tag, record.id, move=move)
        return record


def untag_snapshot(name: str, tag: str, *, settings: Settings | None = None) -> None:
    """Remove a tag of dataset `name`; its snapshot stays. `SnapshotNotFoundError` where there is no such tag."""
    with closing(open_catalog(settings)) as catalog:
        if not catalog.remove_tag(name, tag):
            raise SnapshotNotFoundError(
                f"{name} has no tag {tag!r}", ref=f"{name}@{tag}", hint=f"See: dsctl snapshot list {name}"
            )


def remove_snapshot(ref: str, *, all_tags: bool = False, settings: Settings | None = None) -> Removal:
    """Remove the tag that `ref` names, and the snapshot with its last tag; return what was done.

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


def diff_snapshots(before: str, after: str = "", *, settings: Settings | None = None) -> Iterator[Change]:
    """Yield the files added, removed and changed on the way from one snapshot to another, in path order.

    They are read as they are taken. With one reference: to it, from its parent. `SnapshotNotFoundError`, `UsageError`
    without a parent.
    """
    from datacache.catalog.refs import compare

    with closing(open_catalog(settings)) as catalog:
        yield from compare(catalog, before, after).changes


def verify_snapshot(
    ref: str,
    *,
    read: bool = False,
    on: str | Executor | None = None,
    settings: Settings | None = None,
    progress: Callable[[int, int], None] | None = None,
    unchecked: Callable[[int], None] | None = None,
) -> Iterator[Problem]:
    """Yield the files of a snapshot whose objects are missing, changed, damaged or unreadable, as they are found.

    Asks the stores, not the cache; with `read` every byte is read, and compared with what the store says of it.
    `progress(done, files)`; at the end, with `read`, `unchecked(files)`: for so many no store says anything. Objects
    are read `on` an engine, as in `convert`. Raises `SnapshotNotFoundError`, `StoreUnavailableError` where a store is
    away.
    """
    from datacache.catalog.packs import stores_with_packs
    from datacache.catalog.verify import THREADS, verify, verify_on
    from datacache.executors.open import open_workers

    settings = settings or load_settings()
    if on not in (None, "local") and not read:
        raise UsageError("an engine reads objects", hint="Give read=True; a listing is compared here.")
    own_md5 = dataclasses.replace(settings, check_md5=False)  # `verify` judges them by all that it reads
    with closing(open_catalog(settings)) as catalog:
        id = resolve(catalog, ref).id
        manifest = Manifest.open(id, catalog.get_blobs)
        with closing(stores_with_packs(own_md5, catalog.get_blobs)) as stores:
            threads = min(THREADS, settings.concurrency)
            with shown(settings, progress, of_checks) as tell, open_workers(on, None, settings) as engine:
                if isinstance(engine, Engine):
                    yield from verify_on(engine, settings, id, manifest, progress=tell, unchecked=unchecked)
                else:
                    yield from verify(manifest, stores, read=read, threads=threads, progress=tell, unchecked=unchecked)


@shows(of_files)
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


def dataset_access(name: str, settings: Settings | None = None) -> Access:
    """Return which namespaces of Kubernetes may mount a data set. `SnapshotNotFoundError` where there is none."""
    from datacache.catalog.access import access_of

    settings = settings or load_settings()
    with closing(open_catalog(settings)) as catalog:
        found = access_of(catalog, name, default=settings.access)
        if not found.listed and catalog.dataset(name) is None:
            resolve(catalog, name)  # raises, saying what there is
        return found


def set_dataset_access(
    name: str,
    *,
    everybody: bool | None = None,
    allow: Sequence[str] = (),
    deny: Sequence[str] = (),
    settings: Settings | None = None,
) -> tuple[Access, Access]:
    """Change which namespaces of Kubernetes may mount a data set; return what it was before, and what it is now.

    `everybody` opens it to all or to none; None leaves that as it is. `allow` and `deny` put namespaces on its list and
    take them off. Pods that have it mounted keep it.
    """
    from datacache.catalog.access import access_of, set_access

    settings = settings or load_settings()
    with closing(open_catalog(settings)) as catalog:
        before = access_of(catalog, name, default=settings.access)
        now = set_access(catalog, name, everybody=everybody, allow=allow, deny=deny, default=settings.access)
        return before, now


@shows(of_words)
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


def unchecked_objects() -> int:
    """Return how many objects this process has read that their store has no checksum of."""
    from datacache.store.checksums import TALLY

    return TALLY.counts()[0].get("none", 0)


def is_empty(url: str, settings: Settings | None = None) -> bool:
    """Ask a store for one page of what lies under `url`; true if nothing does. The store's errors."""
    from datacache.store.open import open_backend
    from datacache.store.urls import split_url

    store_url, prefix = split_url(url)
    with closing(open_backend(store_url, settings or load_settings())) as store:
        return not next(iter(store.list(prefix)), [])
