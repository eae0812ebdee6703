"""Which files of a snapshot are samples, and what their targets are.

Used by `SnapshotDataset`. Without a target and a query, no annotation is read. All is done in one walk in the order of
paths, and what is kept of a sample are some numbers. One thread.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from datacache.annotations.classes import class_ids
from datacache.annotations.formats.metadata import NAME as METADATA
from datacache.annotations.layout import text
from datacache.annotations.model import Annotation
from datacache.annotations.pairing import is_image
from datacache.annotations.query import Query, find_paths
from datacache.annotations.table.table import Table
from datacache.catalog.base import Catalog
from datacache.conversion.index import Annotations, Reading
from datacache.core.errors import CorruptManifestError, UsageError
from datacache.core.ids import object_id
from datacache.loaders.columns import BoxBuilder, BoxColumns, ClassBuilder, ClassColumn, FolderBuilder, check_kind
from datacache.manifest.codec import Range
from datacache.manifest.reader import Manifest
from datacache.reader.snapshot import Snapshot
from datacache.shards.listing import SHARDS_JSON

log = logging.getLogger("datacache.loader")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The samples of a dataset, in the byte order of their paths."""

    rows: NDArray[np.int64]
    """Their rows in the manifest."""
    sizes: NDArray[np.int64]
    """In bytes."""
    ids: bytes
    """Of their objects, one after another."""
    kind: str | None
    """What targets are: `detection`, `classification`, `path`, or None for none."""
    targets: BoxColumns | ClassColumn | None = None
    classes: tuple[str, ...] = ()
    """The names of class ids."""


def select(
    snapshot: Snapshot,
    catalog: Catalog,
    *,
    target: str | None,
    query: Query,
    split: str = "",
    reading: Reading | None = None,
) -> Selection:
    """The samples that are meant. `UsageError` where there are none, and for a target that the data set does not have.

    Images are meant where there are any, else all files. With targets of annotations, with a query or a split, images
    that cannot be used are left out.
    """
    check_kind(target)
    annotations = Annotations(snapshot, catalog, reading or Reading())
    asked = query != Query()
    if target == "auto" and not asked and not split and not _annotated(annotations, snapshot):
        target = "path"
    if target in ("auto", "detection", "classification") or asked or split:
        return _of_annotations(snapshot, annotations, target, query, split)
    _expect_no_shards(snapshot)
    files = _Files(snapshot.manifest)
    folders = FolderBuilder() if target == "folder" else None
    for row, held, index in _meant(snapshot.manifest):
        files.add(row, held, index)
        if folders is not None:
            folders.add(text(held.paths[index]))
    if not files:
        raise UsageError(f"{snapshot.record.ref} has no files", hint="See: dsctl snapshot show REF --files")
    return files.selection(target) if folders is None else _of_folders(snapshot, files, folders)


def _expect_no_shards(snapshot: Snapshot) -> None:
    if snapshot.manifest.find(SHARDS_JSON.encode()) is not None:
        raise UsageError(
            f"{snapshot.record.ref} is a shard set", hint=f'ShardDataset("{snapshot.record.ref}") reads its samples.'
        )


def _annotated(annotations: Annotations, snapshot: Snapshot) -> bool:
    try:
        source = annotations.source
    except UsageError:
        if any(is_image(path) for path in snapshot.manifest.paths()):
            raise
        return False  # neither images nor annotations
    if source.format != "none":
        return True
    folders = (b"", *source.layout.image_folders)
    return any(snapshot.manifest.find(folder + METADATA) is not None for folder in folders)


def _of_annotations(
    snapshot: Snapshot, annotations: Annotations, target: str | None, query: Query, split: str
) -> Selection:
    table = annotations.table()
    target = _possible(snapshot, table, target)
    classes = class_ids(table)
    ids = {name: number for number, name in enumerate(classes)}
    files, folders, labelled = _Files(snapshot.manifest), FolderBuilder(), False
    boxes, values = BoxBuilder(ids), ClassBuilder(ids)
    kept = _in_split(annotations, split, snapshot) if split else None
    for row, held, index, annotation in _usable(snapshot, table, query):
        if kept is not None and not kept(annotation):
            continue
        files.add(row, held, index)
        if target == "detection":
            boxes.add(annotation)
        elif target in ("classification", "auto"):
            values.add(annotation)
            labelled = labelled or len(set(annotation.labels)) == 1
        elif target == "folder":
            folders.add(annotation.path)
    if not files:
        raise UsageError(f"no image of {snapshot.record.ref} fits", hint="Ask for less. See: dsctl query, dsctl stats")
    unusable = table.images - table.usable
    if unusable:
        log.warning(
            "%s: %d of %d images cannot be used with their annotations and are no samples (dsctl stats %s)",
            snapshot.record.ref,
            unusable,
            table.images,
            snapshot.record.ref,
        )
    if target == "folder":
        return _of_folders(snapshot, files, folders)
    if target == "detection":
        return files.selection("detection", boxes.finish(), classes)
    if target == "classification" or (target == "auto" and labelled):
        return files.selection("classification", values.finish(), classes)
    return files.selection("path" if target == "auto" else target)


def _possible(snapshot: Snapshot, table: Table, target: str | None) -> str | None:
    """The target, as far as the table's totals decide it. `UsageError` where there is nothing for it."""
    if target == "detection" and not table.boxes:
        raise UsageError(f"{snapshot.record.ref} has no boxes", hint="See what it has: dsctl stats")
    if target == "classification" and not table.labels:
        raise UsageError(f"{snapshot.record.ref} has no classes", hint="target='folder', 'path', or None.")
    return "detection" if target == "auto" and table.boxes else target


class _Files:
    """Takes the files that are samples, in path order."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._rows, self._sizes, self._ids = array("q"), array("q"), bytearray()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: int, held: Range, index: int) -> None:
        """The file at a row, which is at this position of a range."""
        self._rows.append(row)
        self._sizes.append(held.sizes[index])
        self._ids += object_id(self._manifest.object_ref(held.entry(index)))

    def selection(
        self, kind: str | None, targets: BoxColumns | ClassColumn | None = None, classes: tuple[str, ...] = ()
    ) -> Selection:
        """All of them."""
        return Selection(
            rows=np.asarray(self._rows),
            sizes=np.asarray(self._sizes),
            ids=bytes(self._ids),
            kind=kind,
            targets=targets,
            classes=classes,
        )


def _all(manifest: Manifest) -> Iterator[tuple[int, Range, int]]:
    """The row, and the range and the position in it, of each path."""
    row = 0
    for held in manifest.ranges(range(len(manifest.root.ranges))):
        for index in range(len(held.paths)):
            yield row, held, index
            row += 1


def _meant(manifest: Manifest) -> Iterator[tuple[int, Range, int]]:
    """All images, or all files if none is an image."""
    images = any(is_image(path) for path in manifest.paths())
    for row, held, index in _all(manifest):
        path = held.paths[index]
        if is_image(path) if images else not path.endswith(b"/"):
            yield row, held, index


def _usable(snapshot: Snapshot, table: Table, query: Query) -> Iterator[tuple[int, Range, int, Annotation]]:
    """The images that can be used and that the query means, each with its place in the manifest: one walk over both,
    which are in the order of paths. `CorruptManifestError` if the table is of other files."""
    wanted = None if query == Query() else find_paths(table, query)
    next_path = None if wanted is None else next(wanted, None)
    files = _all(snapshot.manifest)
    for image in table.rows():
        path = _encode(image.path)
        found = next((file for file in files if file[1].paths[file[2]] >= path), None)
        if found is None or found[1].paths[found[2]] != path:
            raise CorruptManifestError(
                f"the annotations of {snapshot.record.ref} name {image.path!r}, which is none of its files",
                hint="The catalog is damaged: make the snapshot again, dsctl snapshot create",
            )
        if wanted is not None:
            if image.path != next_path:
                continue
            next_path = next(wanted, None)
        if image.annotation is not None:
            yield *found, image.annotation
    if next_path is not None:
        raise CorruptManifestError(f"the annotations of {snapshot.record.ref} are not in the order of their paths")


def _in_split(annotations: Annotations, split: str, snapshot: Snapshot) -> Callable[[Annotation], bool]:
    """Whether an image is in a split. `UsageError` if there is no such split."""
    listed = annotations.splits()
    names = listed.names
    if split not in names:
        there = f"it has {', '.join(names)}" if names else "it has none; dsctl convert --split makes some"
        raise UsageError(f"{snapshot.record.ref} has no split {split!r}: {there}")
    return lambda each: listed.of(_encode(each.path), _encode(each.source)) == split


def _of_folders(snapshot: Snapshot, files: _Files, folders: FolderBuilder) -> Selection:
    """The class of a file is the folder it lies in."""
    classes, targets = folders.finish()
    if len(classes) < 2:
        raise UsageError(
            f"the files of {snapshot.record.ref} all lie in one folder, so there are no classes",
            hint="target='path', or None, needs none.",
        )
    return files.selection("classification", targets, classes)


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
