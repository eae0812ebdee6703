"""Which files of a snapshot are samples, and what their targets are.

Used by `SnapshotDataset`. Without a target and a query, no annotation is read. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datacache.annotations.class_ids import class_ids
from datacache.annotations.layout import text
from datacache.annotations.metadata import NAME as METADATA
from datacache.annotations.model import Annotation
from datacache.annotations.pairing import is_image
from datacache.annotations.query import Query, find_paths
from datacache.annotations.table import Table
from datacache.catalog.base import Catalog
from datacache.conversion.index import Annotations, Reading
from datacache.core.errors import UsageError
from datacache.loaders.columns import BoxColumns, ClassColumn, check_kind, class_of
from datacache.reader.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The samples of a dataset, in the byte order of their paths."""

    rows: NDArray[np.int64]
    """Their rows in the manifest."""
    sizes: NDArray[np.int64]
    """In bytes."""
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
    rows, sizes, paths = _files(snapshot)
    if target == "folder":
        return _of_folders(snapshot, rows, sizes, paths)
    return Selection(rows=rows, sizes=sizes, kind=target)


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
    found = _usable(table, query)
    if split:
        found = _in_split(annotations, found, split, snapshot)
    if target in (None, "path", "folder"):
        rows, sizes, paths = _files(snapshot, frozenset(_encode(each.path) for each in found))
        if target == "folder":
            return _of_folders(snapshot, rows, sizes, paths)
        return Selection(rows=rows, sizes=sizes, kind=target)
    kept = list(found)
    if not kept:
        raise UsageError(f"no image of {snapshot.record.ref} fits", hint="Ask for less. See: dsctl query, dsctl stats")
    if target == "auto":
        classified = any(len(set(each.labels)) == 1 for each in kept)
        target = "detection" if table.boxes else "classification" if classified else "path"
    rows, sizes, _ = _files(snapshot, frozenset(_encode(each.path) for each in kept))
    classes = class_ids(table)
    ids = {name: number for number, name in enumerate(classes)}
    if target == "path":
        return Selection(rows=rows, sizes=sizes, kind="path")
    targets: BoxColumns | ClassColumn
    if target == "detection":
        if not table.boxes:
            raise UsageError(f"{snapshot.record.ref} has no boxes", hint="See what it has: dsctl stats")
        targets = BoxColumns(kept, ids)
    else:
        if not table.labels:
            raise UsageError(f"{snapshot.record.ref} has no classes", hint="target='folder', 'path', or None.")
        targets = ClassColumn([class_of(each.labels, (box.label for box in each.boxes), ids) for each in kept])
    return Selection(rows=rows, sizes=sizes, kind=target, targets=targets, classes=classes)


def _usable(table: Table, query: Query) -> Iterator[Annotation]:
    wanted = None if query == Query() else frozenset(find_paths(table, query))
    for row in table.rows():
        if row.annotation is not None and (wanted is None or row.path in wanted):
            yield row.annotation


def _in_split(
    annotations: Annotations, found: Iterator[Annotation], split: str, snapshot: Snapshot
) -> Iterator[Annotation]:
    listed = annotations.splits()
    names = listed.names
    if split not in names:
        there = f"it has {', '.join(names)}" if names else "it has none; dsctl convert --split makes some"
        raise UsageError(f"{snapshot.record.ref} has no split {split!r}: {there}")
    return (each for each in found if listed.of(_encode(each.path), _encode(each.source)) == split)


def _files(
    snapshot: Snapshot, wanted: frozenset[bytes] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[bytes]]:
    """Rows, sizes and paths of the wanted files; for None, of all images, or of all files if none is an image."""
    manifest = snapshot.manifest
    if wanted is None and any(is_image(path) for path in manifest.paths()):
        meant: Any = is_image
    elif wanted is None:
        meant = _is_file
    else:
        meant = wanted.__contains__
    rows: list[int] = []
    sizes: list[int] = []
    paths: list[bytes] = []
    row = 0
    for held in manifest.ranges(range(len(manifest.root.ranges))):
        for path, size in zip(held.paths, held.sizes, strict=True):
            if meant(path):
                rows.append(row)
                sizes.append(size)
                paths.append(path)
            row += 1
    if not rows:
        raise UsageError(f"{snapshot.record.ref} has no files that fit", hint="See: dsctl snapshot show REF --files")
    return np.array(rows, np.int64), np.array(sizes, np.int64), paths


def _is_file(path: bytes) -> bool:
    return not path.endswith(b"/")


def _of_folders(
    snapshot: Snapshot, rows: NDArray[np.int64], sizes: NDArray[np.int64], paths: Sequence[bytes]
) -> Selection:
    """The class of a file is the folder it lies in."""
    folders = [text(path.rpartition(b"/")[0]).rpartition("/")[2] for path in paths]
    classes = tuple(sorted(set(folders)))
    if len(classes) < 2:
        raise UsageError(
            f"the files of {snapshot.record.ref} all lie in one folder, so there are no classes",
            hint="target='path', or None, needs none.",
        )
    ids = {name: number for number, name in enumerate(classes)}
    targets = ClassColumn([ids[folder] for folder in folders])
    return Selection(rows=rows, sizes=sizes, kind="classification", targets=targets, classes=classes)


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
