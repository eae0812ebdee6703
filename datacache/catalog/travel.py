"""A snapshot's way from one catalog to another: its record, manifest, packs and annotations, each blob once.

Used by `api.push_snapshot` and `api.pull_snapshot`. Objects stay where they are: the manifest names them. What the
other catalog has already is not moved, so a version in which little changed takes little, and a copying that was killed
goes on where it was. Every blob is checked against its id on the way. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from datacache.catalog.base import Catalog, batches
from datacache.catalog.bucket import BUNDLE_BYTES, BucketCatalog
from datacache.catalog.commit import check_kind, kind_of
from datacache.catalog.mark import reachable
from datacache.core.errors import CorruptManifestError
from datacache.manifest import codec
from datacache.manifest.model import BlobId, SnapshotRecord

_SMALL, _LARGE = 1024, 16
"""Blobs in memory at a time: ranges of a few kilobytes, and packs of a few megabytes."""


class SnapshotCopy(NamedTuple):
    """The result of `copy_snapshot`."""

    record: SnapshotRecord
    """As the other catalog has it."""
    blobs: int
    """All that the snapshot needs."""
    moved: int
    """Those of them that the other catalog did not have."""
    moved_bytes: int
    local: tuple[str, ...] = ()
    """Places of this machine in which its files lie: they are found elsewhere only where the same folder is."""


def copy_snapshot(
    source: Catalog | BucketCatalog,
    target: Catalog | BucketCatalog,
    record: SnapshotRecord,
    *,
    tags: Sequence[str] = (),
    move_tags: bool = False,
    replace: bool = False,
    progress: Callable[[int, int, int], None] = lambda _done, _total, _bytes: None,
) -> SnapshotCopy:
    """Copy a snapshot, which becomes the latest of its data set in `target`. Idempotent.

    `progress(done, blobs, bytes)`. `OtherKindError` where the data set is another one there and is not replaced,
    `TagExistsError`, `CorruptManifestError` where a blob is missing or has other bytes than its id says; the catalogs'
    errors.
    """
    kind = None if replace or record.lineage is None else kind_of(record.lineage)
    root = BlobId(bytes.fromhex(record.id))
    stored = source.get_blobs([root])
    _check(stored, [root], record, source)
    top = codec.decode_root(codec.decompress(stored[root], root))
    if (record.files, record.total_bytes) != (top.files, top.total_bytes):
        raise CorruptManifestError(
            f"{source.url} has another record of {record.ref} than its manifest says: {record.files:,} files with "
            f"{record.total_bytes:,} bytes, not {top.files:,} with {top.total_bytes:,}"
        )
    live = reachable(source.get_blobs)
    of_snapshot = live([root])
    known = () if isinstance(target, BucketCatalog) else target.derived_names(record.id)
    names = sorted({*source.derived_names(record.id)}.difference(known))  # what was read here stays as it was read
    derived = {name: id for name in names if (id := source.derived(record.id, name))}
    of_derived = {name: live([id]) for name, id in derived.items()}
    needed = of_snapshot.union(*of_derived.values())
    missing = needed - target.has_blobs(needed)
    ranges = [info.blob for info in top.ranges if info.blob in missing]  # in this order: neighbours are read together
    packs = sorted(missing.intersection(top.packs))
    others = sorted(missing.difference(ranges, packs))
    moved_bytes = done = 0
    held: list[tuple[BlobId, bytes]] = []
    for ids in chain(batches([*ranges, *others], _SMALL), batches(packs, _LARGE)):
        stored = source.get_blobs(ids)
        _check(stored, ids, record, source)
        held += stored.items()
        moved_bytes += sum(map(len, stored.values()))
        done += len(ids)
        if sum(len(data) for _, data in held) >= BUNDLE_BYTES or done == len(missing):
            target.put_blobs(held)
            held = []
        progress(done, len(missing), moved_bytes)
    kept = target.commit(
        record,
        tags=tags,
        move_tags=move_tags,
        needs=of_snapshot,
        check=None if kind is None else lambda latest: check_kind(latest, kind),
    )
    for name, id in derived.items():
        target.set_derived(record.id, name, id, needs=of_derived[name])
    local = tuple(f"{place.store}/{place.prefix}" for place in top.sources if place.store == "file://")
    return SnapshotCopy(kept, len(needed), len(missing), moved_bytes, local)


def _check(
    stored: Mapping[BlobId, bytes], ids: Sequence[BlobId], record: SnapshotRecord, source: Catalog | BucketCatalog
) -> None:
    """`CorruptManifestError` where a blob is missing or is not what its id says. One at a time is decompressed."""
    gone = [id for id in ids if id not in stored]
    if gone:
        raise CorruptManifestError(
            f"{record.ref} needs the blob {gone[0].hex()}, which is missing from {source.url}",
            hint="Push the snapshot again, from a catalog that has it.",
        )
    for id in ids:
        codec.decompress(stored[id], id)
