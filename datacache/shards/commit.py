"""Make a snapshot of a finished shard set, so that it has a version and is cached: the objects stay where they are.

Used by `api.shard`. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from datacache.catalog.base import Catalog
from datacache.catalog.commit import commit_manifest
from datacache.core.errors import ShardError
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import Entry, Lineage, SnapshotRecord, Source
from datacache.shards.build import set_files
from datacache.shards.listing import ShardSet
from datacache.shards.place import Place


def commit_set(
    catalog: Catalog,
    place: Place,
    made: ShardSet,
    *,
    name: str,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    replace: bool = False,
    message: str = "",
) -> SnapshotRecord:
    """Commit the files of a set as a snapshot of dataset `name`; other files at the URL are not in it. Idempotent.

    `ShardError` if one of them is not there (any more), `TagExistsError`, the catalog's errors.
    """
    there = place.files()
    builder = ManifestBuilder([Source(place.store.url, place.prefix)], catalog.put_blobs)
    for file in sorted(set_files(made)):
        info = there.get(file)
        if info is None:
            raise ShardError(f"{place.url} has lost {file}", shard=file, hint="Build the shards again.")
        builder.add(Entry(file.encode(), info.size_bytes, info.mtime_ns, info.etag, info.version))
    parameters = {"to": place.url, "format": made.format, **made.parameters}
    return commit_manifest(
        catalog,
        builder,
        name=name,
        origin=place.url,
        lineage=Lineage("shard", parameters, (made.source,)),
        tags=tags,
        move_tags=move_tags,
        replace=replace,
        message=message,
    )
