"""Make a snapshot of what lies under a URL: list, build the manifest, commit.

Used by `api.create_snapshot` and `catalog.copy`. Nothing is visible before the commit; a creation that was killed
leaves only blobs, which the next one finds in place.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing

from datacache.catalog.base import Catalog
from datacache.catalog.commit import check_target, commit_manifest, known_blobs
from datacache.catalog.kind import kind_of
from datacache.catalog.objects import ObjectWriter
from datacache.core.errors import CorruptManifestError, ObjectNotFoundError
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import Entry, Lineage, SnapshotRecord, Source
from datacache.manifest.sort import sorted_entries
from datacache.store.base import ObjectInfo, ObjectStore

Progress = Callable[[int, int], None]
Look = Callable[[list[ObjectInfo]], list[ObjectInfo]]


def create_snapshot(
    catalog: Catalog,
    store: ObjectStore,
    prefix: str,
    *,
    name: str,
    origin: str,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    replace: bool = False,
    message: str = "",
    progress: Progress | None = None,
    copied: Callable[[Iterable[Entry]], Generator[Entry, None, None]] | None = None,
    copied_to: ObjectWriter | None = None,
    warnings: Callable[[], Sequence[str]] = tuple,
    look: Look | None = None,
) -> SnapshotRecord:
    """List `prefix` of a store and commit what is there as a snapshot of dataset `name`.

    Idempotent: an unchanged prefix gives the same id. With `copied`, which takes the entries in order and gives them
    with keys of `copied_to`, the snapshot refers to copies. `warnings` are asked for once all is listed. Raises the
    store's errors, `ObjectNotFoundError` for a prefix with nothing under it, `TagExistsError`, `UsageError` for bad
    names, `StoredObjectsGoneError`, and `OtherKindError` where the dataset is something else and `replace` is false.
    """
    parameters = {"from": origin}
    source = Source(store.url, prefix)
    if copied_to is not None:
        source = copied_to.source
        parameters["copied_to"] = f"{source.store}/{source.prefix}"
    lineage = Lineage("create", parameters)
    kind = None if replace else kind_of(lineage)
    known = known_blobs(catalog, check_target(catalog, name, tags, kind=kind))
    again = True
    while True:
        try:
            builder = ManifestBuilder([source], catalog.put_blobs, known=known)
            list_into(builder, store, prefix, progress, copied=copied, look=look)
            if builder.empty:
                what = "the bucket's name and the prefix" if not store.url.startswith("file:") else "the path"
                raise ObjectNotFoundError(f"there is nothing under {origin}", url=origin, hint=f"Check {what}.")
            return commit_manifest(
                catalog,
                builder,
                name=name,
                origin=origin,
                lineage=lineage,
                objects=copied_to,
                tags=tags,
                move_tags=move_tags,
                replace=replace,
                message=message,
                warnings=warnings(),
            )
        except CorruptManifestError:
            # The version before was removed and collected meanwhile, or is damaged, or blobs of this one went while it
            # was made: nothing is taken for there.
            if not known and not again:
                raise
            again = bool(known)
            known = frozenset()


def list_into(
    builder: ManifestBuilder,
    store: ObjectStore,
    prefix: str,
    progress: Progress | None = None,
    *,
    copied: Callable[[Iterable[Entry]], Generator[Entry, None, None]] | None = None,
    look: Look | None = None,
) -> None:
    """Add all that lies under the prefix, in path order. `look` gives the objects of a page with their attributes."""
    entries: Iterable[Entry] = _entries(store, prefix, progress, look)
    if not store.sorted_listing:
        entries = sorted_entries(entries)
    if copied is None:
        for entry in entries:
            builder.add(entry)
    else:
        with closing(copied(entries)) as copies:
            for entry in copies:
                builder.add(entry)


def _entries(store: ObjectStore, prefix: str, progress: Progress | None, look: Look | None) -> Iterator[Entry]:
    skip = len(prefix)
    files = size = 0
    for page in store.list(prefix):
        for info in page if look is None else look(page):
            path = info.key[skip:]
            if not path:
                continue  # the prefix's own folder marker
            files += 1
            size += info.size_bytes
            raw = path.encode("utf-8", "surrogateescape")
            yield _entry(raw, info)
        if progress is not None:
            progress(files, size)


def _entry(path: bytes, info: ObjectInfo) -> Entry:
    plain = Entry(path, info.size_bytes, info.mtime_ns, info.etag, info.version)
    if not (info.target or info.at or info.mode):
        return plain
    key = info.at.encode("utf-8", "surrogateescape") or None
    return plain._replace(key=key, mode=info.mode, target=info.target.encode("utf-8", "surrogateescape"))
