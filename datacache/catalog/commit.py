"""The last step of whatever makes a snapshot: finish the manifest, and commit the record.

Used by `catalog.create` and by conversions, imports and subsets. Nothing is visible before it, and all is after it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence

from datacache.catalog.base import Catalog, tag_exists
from datacache.catalog.mark import blobs_of
from datacache.catalog.refs import check_name, check_tag
from datacache.core.errors import CatalogError, CorruptManifestError
from datacache.manifest import codec
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import PACKS, BlobId, DatasetRecord, Lineage, Root, SnapshotRecord

_SHOWN = 3


def check_target(catalog: Catalog, name: str, tags: Sequence[str]) -> DatasetRecord | None:
    """Before any work: whether a snapshot may be called so. The dataset, if there is one.

    `UsageError` for a bad name or tag. A tag that is taken is seen only at the commit: the new snapshot may be the one
    that it names.
    """
    check_name(name)
    for tag in tags:
        check_tag(tag)
    return catalog.dataset(name)


def known_blobs(catalog: Catalog, dataset: DatasetRecord | None) -> frozenset[BlobId]:
    """The blobs of the dataset's latest snapshot, for `ManifestBuilder`: a new version need not put them again."""
    if dataset is None:
        return frozenset()
    id = BlobId(bytes.fromhex(dataset.latest))
    stored = catalog.get_blobs([id]).get(id)
    if stored is None:
        return frozenset()
    try:
        return blobs_of(id, codec.decode_root(codec.decompress(stored, id)))
    except CorruptManifestError:
        return frozenset()


def commit_manifest(
    catalog: Catalog,
    builder: ManifestBuilder,
    *,
    name: str,
    origin: str,
    lineage: Lineage,
    packs: Iterable[BlobId] = (),
    tags: Sequence[str] = (),
    move_tags: bool = False,
    message: str = "",
    warnings: Sequence[str] = (),
) -> SnapshotRecord:
    """Finish the manifest and make it the dataset's latest snapshot. Idempotent: the same entries give the same id.

    `TagExistsError` if a tag names another snapshot. `CorruptManifestError` if a blob of an earlier snapshot that this
    one needs is gone, `CatalogError` if one of the lineage's inputs was removed whose stored objects this one needs:
    nothing is visible then.
    """
    id, root = builder.finish(packs=packs)
    dataset = catalog.dataset(name)
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
        warnings=(*warnings, *_hidden_warning(root)),
        lineage=lineage,
    )
    needs = blobs_of(BlobId(bytes.fromhex(id)), root)
    is_new = catalog.snapshot(name, id) is None
    committed = catalog.commit(record, tags=tags, move_tags=move_tags, needs=needs)
    gone = _removed_input(catalog, lineage, root)
    if gone and is_new:
        catalog.remove_snapshot(name, id)
        raise CatalogError(
            f"{gone} was removed while {name} was made of it; nothing was made",
            hint="What it had stored may be gone with it. Start from a snapshot that there is.",
        )
    return committed


def _removed_input(catalog: Catalog, lineage: Lineage, root: Root) -> str | None:
    """An input that is not listed any more, if that matters: garbage collection may have taken objects in between. One
    that is still listed now was all the time until the snapshot made of it was, too."""
    if any(source.content_addressed and source != PACKS for source in root.sources):
        for ref in lineage.inputs:
            dataset, _, id = ref.partition("@")
            if catalog.snapshot(dataset, id) is None:
                return ref
    return None


def _hidden_warning(root: Root) -> tuple[str, ...]:
    if not root.hidden:
        return ()
    names = ", ".join(repr(path.decode("utf-8", "backslashreplace")) for path in sorted(root.hidden)[:_SHOWN])
    more = f" and {len(root.hidden) - _SHOWN:,} more" if len(root.hidden) > _SHOWN else ""
    text = (
        f"{len(root.hidden):,} object(s) cannot be shown in a mount (a name that is also a folder's, or with an empty, "
        f"'.', '..' or overlong part) but can be read by their exact path: {names}{more}"
    )
    return (text,)
