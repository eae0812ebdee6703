"""Make a snapshot of what lies under a URL: list, build the manifest, commit.

Used by `api.create_snapshot` and `catalog.pin`. Nothing is visible before the commit; a creation that was killed leaves
only blobs, which the next one finds in place.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing

from datacache.catalog.base import Catalog
from datacache.catalog.commit import check_target, commit_manifest, known_blobs
from datacache.core.errors import CorruptManifestError, ObjectNotFoundError
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import Entry, Lineage, SnapshotRecord, Source
from datacache.manifest.sort import sorted_entries
from datacache.store.base import ObjectStore

Progress = Callable[[int, int], None]


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
    copied: Callable[[Iterable[Entry]], Generator[Entry, None, None]] | None = None,
    copied_to: Source | None = None,
) -> SnapshotRecord:
    """List `prefix` of a store and commit what is there as a snapshot of dataset `name`.

    Idempotent: an unchanged prefix gives the same id. With `copied`, which takes the entries in order and gives them
    with keys of `copied_to`, the snapshot refers to copies. Raises the store's errors, `ObjectNotFoundError` for a
    prefix with nothing under it, `TagExistsError`, `UsageError` for bad names.
    """
    known = known_blobs(catalog, check_target(catalog, name, tags))
    parameters = {"from": origin}
    if copied_to is not None:
        parameters["copied_to"] = f"{copied_to.store}/{copied_to.prefix}"
    while True:
        try:
            builder = ManifestBuilder([copied_to or Source(store.url, prefix)], catalog.put_blobs, known=known)
            list_into(builder, store, prefix, progress, copied)
            if builder.empty:
                raise ObjectNotFoundError(
                    f"there is nothing under {origin}", url=origin, hint="Check the bucket's name and the prefix."
                )
            return commit_manifest(
                catalog,
                builder,
                name=name,
                origin=origin,
                lineage=Lineage("create", parameters),
                tags=tags,
                move_tags=move_tags,
                message=message,
            )
        except CorruptManifestError:
            # The version before was removed and collected meanwhile, or is damaged: nothing of it is taken for there.
            if not known:
                raise
            known = frozenset()


def list_into(
    builder: ManifestBuilder,
    store: ObjectStore,
    prefix: str,
    progress: Progress | None = None,
    copied: Callable[[Iterable[Entry]], Generator[Entry, None, None]] | None = None,
) -> None:
    """Add all that lies under the prefix, in path order."""
    entries: Iterable[Entry] = _entries(store, prefix, progress)
    if not store.sorted_listing:
        entries = sorted_entries(entries)
    if copied is None:
        for entry in entries:
            builder.add(entry)
    else:
        with closing(copied(entries)) as copies:
            for entry in copies:
                builder.add(entry)


def _entries(store: ObjectStore, prefix: str, progress: Progress | None) -> Iterator[Entry]:
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
