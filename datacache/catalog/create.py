"""Make a snapshot of what lies under a URL: list, build the manifest, commit.

Used by `api.create_snapshot`. Nothing is visible before the commit; a creation that was killed leaves only blobs, which
the next one finds in place.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Sequence

from datacache.catalog.base import Catalog, tag_exists
from datacache.catalog.refs import check_name, check_tag
from datacache.core.errors import ObjectNotFoundError
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import Entry, Root, SnapshotRecord, Source
from datacache.manifest.sort import sorted_entries
from datacache.store.base import ObjectStore

Progress = Callable[[int, int], None]
_SHOWN = 3


def create_snapshot(
    catalog: Catalog,
    store: ObjectStore,
    prefix: str,
    *,
    name: str,
    origin: str,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    message: str = "",
    progress: Progress | None = None,
) -> SnapshotRecord:
    """List `prefix` of a store and commit what is there as a snapshot of dataset `name`.

    Idempotent: an unchanged prefix gives the same id. Raises the store's errors, `ObjectNotFoundError` for a prefix
    with nothing under it, `TagExistsError` (before listing, too), `UsageError` for bad names.
    """
    check_name(name)
    for tag in tags:
        check_tag(tag)
    dataset = catalog.dataset(name)
    builder = ManifestBuilder([Source(store.url, prefix)], catalog.put_blobs)
    entries: Iterable[Entry] = _entries(store, prefix, builder, progress)
    if not store.sorted_listing:
        entries = sorted_entries(entries)
    for entry in entries:
        builder.add(entry)
    if not builder.files and not builder.markers:
        raise ObjectNotFoundError(
            f"there is nothing under {origin}", url=origin, hint="Check the bucket's name and the prefix."
        )
    id, root = builder.finish()
    if dataset is not None and not move_tags:
        for tag in tags:
            if dataset.tags.get(tag, id) != id:
                raise tag_exists(name, tag, dataset.tags[tag])
    record = SnapshotRecord(
        dataset=name,
        id=id,
        created_at=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        origin=origin,
        files=root.files,
        total_bytes=root.total_bytes,
        message=message,
        parent=dataset.latest if dataset is not None and dataset.latest != id else None,
        warnings=_warnings(root),
    )
    return catalog.commit(record, tags=tags, move_tags=move_tags)


def _entries(store: ObjectStore, prefix: str, builder: ManifestBuilder, progress: Progress | None) -> Iterator[Entry]:
    skip = len(prefix)
    files = size = 0
    for page in store.list(prefix):
        for info in page:
            path = info.key[skip:]
            if not path:
                continue  # the prefix's own folder marker
            files += 1
            size += info.size_bytes
            yield Entry(
                path.encode("utf-8", "surrogateescape"), info.size_bytes, info.mtime_ns, info.etag, info.version
            )
        if progress is not None:
            progress(files, size)


def _warnings(root: Root) -> tuple[str, ...]:
    if not root.hidden:
        return ()
    names = ", ".join(repr(path.decode("utf-8", "backslashreplace")) for path in sorted(root.hidden)[:_SHOWN])
    more = f" and {len(root.hidden) - _SHOWN:,} more" if len(root.hidden) > _SHOWN else ""
    text = (
        f"{len(root.hidden):,} object(s) cannot be shown in a mount (a name that is also a folder's, or with an empty, "
        f"'.', '..' or overlong part) but can be read by their exact path: {names}{more}"
    )
    return (text,)
