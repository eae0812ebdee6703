"""The last step of whatever makes a snapshot: finish the manifest, check the kind of the data set, commit the record.

Used by `catalog.create`, conversions, imports, subsets and shards. Before it nothing is visible, and after it all is.

A snapshot can be the next version of a data set only if it is of the same *kind*: the command that makes it, its
sources, and its layout. So a data set that somebody trains on never becomes another one because of a mistyped name.
Nothing is compared that changes from one version to the next (ids of the inputs, the words of a query, a resize, the
file name of an export). One thread.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from datacache.catalog.access import inherit_access
from datacache.catalog.base import Catalog, check_tags_free, read_only_error
from datacache.catalog.mark import blobs_of
from datacache.catalog.objects import NewFiles, ObjectWriter
from datacache.catalog.refs import check_name, check_tag
from datacache.core.counters import count
from datacache.core.errors import CatalogError, CorruptManifestError, OtherKindError, TagExistsError
from datacache.manifest import codec
from datacache.manifest.builder import ManifestBuilder, sorted_entries
from datacache.manifest.model import PACKS, BlobId, DatasetRecord, Entry, Lineage, Naming, Root, SnapshotRecord
from datacache.manifest.reader import Manifest

_SHOWN = 3
_LAYOUTS = {"convert": "to", "fix": "to", "merge": "to", "shard": "format"}
"""The parameter of a command that says what the files look like."""


class DatasetKind(NamedTuple):
    """The traits that all versions of a data set have in common."""

    command: str
    origin: str
    """The URL that was listed; empty for other commands."""
    inputs: tuple[str, ...]
    """The data sets it is made of, by name."""
    layout: str

    def __str__(self) -> str:
        words = [self.command, *self.inputs]
        words += [f"--from {self.origin}"] if self.origin else []
        words += [f"--{_LAYOUTS[self.command]} {self.layout}"] if self.layout else []
        return " ".join(words)


def kind_of(lineage: Lineage) -> DatasetKind:
    """Return the kind of the snapshots with this lineage."""
    command, parameters, inputs = lineage
    return DatasetKind(
        command,
        str(parameters.get("from", "")) if command == "create" else "",
        tuple(sorted({input.partition("@")[0] for input in inputs})),
        str(parameters.get(_LAYOUTS.get(command, ""), "")),
    )


def check_kind(latest: SnapshotRecord, kind: DatasetKind) -> None:
    """Raise `OtherKindError` unless a snapshot of this kind can be the next version after `latest`. Any kind can follow
    one whose lineage is not known."""
    before = None if latest.lineage is None else kind_of(latest.lineage)
    if before is None or before == kind:
        return
    raise OtherKindError(
        f"{latest.dataset} is made by '{before}', and this is '{kind}'; {latest.dataset} was not changed",
        hint=f"Is it what you meant, and no mistyped URL? Then give it a name of its own, or have it replace what "
        f"{latest.dataset} is: --replace.",
    )


def check_target(catalog: Catalog, naming: Naming, lineage: Lineage) -> DatasetRecord | None:
    """Check before any work whether a snapshot with this lineage may be named so. Return the dataset, if it exists.

    Raise `UsageError` for a bad name or tag, `OtherKindError` where the dataset is of another kind and is not replaced.
    A tag that is taken shows only at the commit: the new snapshot may be the one that it names."""
    check_name(naming.name)
    for tag in naming.tags:
        check_tag(tag)
    if catalog.read_only:
        raise read_only_error(catalog.url)
    dataset = catalog.dataset(naming.name)
    if not naming.replace:
        _check_latest(catalog, dataset, kind_of(lineage))
    return dataset


def _check_latest(catalog: Catalog, dataset: DatasetRecord | None, kind: DatasetKind) -> None:
    if dataset is not None and (latest := catalog.snapshot(dataset.name, dataset.latest)) is not None:
        check_kind(latest, kind)


def known_blobs(catalog: Catalog, dataset: DatasetRecord | None) -> frozenset[BlobId]:
    """Return the blobs of the dataset's latest snapshot, which a new version need not put again (`ManifestBuilder`)."""
    if dataset is None:
        return frozenset()
    id = BlobId(bytes.fromhex(dataset.latest))
    stored = catalog.get_blobs([id]).get(id)
    try:
        return frozenset() if stored is None else blobs_of(id, codec.decode_root(codec.decompress(stored, id)))
    except CorruptManifestError:
        return frozenset()


def commit_entries(
    catalog: Catalog,
    entries: Iterable[Entry],
    files: NewFiles,
    naming: Naming,
    *,
    origin: str,
    lineage: Lineage,
    check: Callable[[SnapshotRecord], None] | None = None,
) -> SnapshotRecord:
    """Make the snapshot of these entries, which come in any order and go through `files`; see `commit_manifest`."""
    builder = ManifestBuilder(files.sources, catalog.put_blobs)
    for entry in sorted_entries(entries):
        builder.add(entry)
    packs, objects = files.packs, files.opened_objects
    return commit_manifest(
        catalog, builder, naming, origin=origin, lineage=lineage, packs=packs, objects=objects, check=check
    )


def commit_manifest(
    catalog: Catalog,
    builder: ManifestBuilder,
    naming: Naming,
    *,
    origin: str,
    lineage: Lineage,
    packs: Iterable[BlobId] = (),
    objects: ObjectWriter | None = None,
    warnings: Sequence[str] = (),
    check: Callable[[SnapshotRecord], None] | None = None,
) -> SnapshotRecord:
    """Finish the manifest and make it the dataset's latest snapshot. Idempotent: the same entries give the same id.
    `check` is as for `Catalog.commit`.

    First the data set inherits the access lists of the lineage's inputs (`catalog.access`). With `objects`, what was
    stored through it is looked for again where it may be gone.

    On an error nothing is visible, and no tag was moved: `OtherKindError` for a snapshot of another kind than the
    dataset's latest without `replace`, `StoredObjectsGoneError`, `TagExistsError` if a tag names another snapshot,
    `CorruptManifestError` if a blob of an earlier snapshot is gone that this one needs, `CatalogError` if an input of
    the lineage was removed whose stored objects this one needs.
    """
    id, root = builder.finish(packs=packs)
    name, tags, move_tags = naming.name, naming.tags, naming.move_tags
    dataset = catalog.dataset(name)
    if dataset is not None and not move_tags:
        check_tags_free(name, dataset.tags, tags, id)
    record = SnapshotRecord(
        dataset=name,
        id=id,
        created_at=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        origin=origin,
        files=root.files,
        total_bytes=root.total_bytes,
        message=naming.message,
        parent=dataset.latest if dataset is not None and dataset.latest != id else None,
        warnings=(*warnings, *_hidden_warning(root)),
        lineage=lineage,
        held=builder.held,
    )
    needs = blobs_of(BlobId(bytes.fromhex(id)), root)
    kind = kind_of(lineage)

    def check_latest(latest: SnapshotRecord) -> None:
        if not naming.replace:
            check_kind(latest, kind)
        if check is not None:
            check(latest)

    if objects is not None:
        objects.confirm(Manifest(root, catalog.get_blobs))
    if not naming.replace:
        _check_latest(catalog, dataset, kind)  # the commit checks again: a refused snapshot must change no list
    inherit_access(catalog, name, (ref.partition("@")[0] for ref in lineage.inputs))
    stored = any(source.content_addressed and source != PACKS for source in root.sources)
    if lineage.inputs and stored and catalog.snapshot(name, id) is None:  # its objects may be those of its inputs
        _make_visible(catalog, record, needs, check_latest)
        try:
            return catalog.commit(record, tags=tags, move_tags=move_tags, needs=needs, check=check and is_latest(id))
        except OvertakenError:  # by a version that was made of this one: it stays the latest
            for tag in tags:
                catalog.set_tag(name, tag, id, move=move_tags)
            return record
        except TagExistsError:  # the tag was free above
            _take_back(catalog, record)
            raise
    return catalog.commit(record, tags=tags, move_tags=move_tags, needs=needs, check=check_latest)


class OvertakenError(Exception):
    """Another snapshot has become the latest."""


def is_latest(id: str) -> Callable[[SnapshotRecord], None]:
    """Return a check for a commit: it raises `OvertakenError` unless the snapshot with this id is the latest."""

    def check(latest: SnapshotRecord) -> None:
        if latest.id != id:
            raise OvertakenError(f"{latest.ref} has become the latest")

    return check


def _make_visible(
    catalog: Catalog,
    record: SnapshotRecord,
    needs: Collection[BlobId],
    check: Callable[[SnapshotRecord], None] | None,
) -> None:
    """Commit a snapshot without its tags if its inputs are all listed: garbage collection may have taken the objects of
    a removed one. An input that is listed after the commit was listed before it, too."""
    gone = _removed_input(catalog, record)
    if gone is None:
        catalog.commit(record, needs=needs, check=check)
        gone = _removed_input(catalog, record)
        if gone is None:
            return
        _take_back(catalog, record)
    raise CatalogError(
        f"{gone} was removed while {record.dataset} was made of it; nothing was made",
        hint="What it had stored may be gone with it. Start from a snapshot that there is.",
    )


def _removed_input(catalog: Catalog, record: SnapshotRecord) -> str | None:
    for ref in record.lineage.inputs if record.lineage is not None else ():
        dataset, _, id = ref.partition("@")
        if catalog.snapshot(dataset, id) is None:
            return ref
    return None


def _take_back(catalog: Catalog, record: SnapshotRecord) -> None:
    """Forget the snapshot just committed, unless somebody has tagged it meanwhile: the tag would be lost."""
    dataset = catalog.dataset(record.dataset)
    if dataset is not None and record.id not in dataset.tags.values():
        catalog.remove_snapshot(record.dataset, record.id)


def _hidden_warning(root: Root) -> tuple[str, ...]:
    if not root.hidden:
        return ()
    names = ", ".join(repr(path.decode("utf-8", "backslashreplace")) for path in sorted(root.hidden)[:_SHOWN])
    more = f" and {len(root.hidden) - _SHOWN:,} more" if len(root.hidden) > _SHOWN else ""
    text = (
        f"{count(len(root.hidden), 'object')} cannot be shown in a mount (a name that is also a folder's, or with an "
        f"empty, '.', '..' or overlong part) but can be read by their exact path: {names}{more}"
    )
    return (text,)
