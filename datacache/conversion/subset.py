"""A snapshot of some of a snapshot's images, with their annotations: what a query found, for one.

Used by `api.subset` and others that choose images. Images and annotation files are entered by reference. Files that
speak of many images (COCO, keras-yolo3, lists of splits) are written anew with what is left of them; all other files
(`data.yaml`, class lists, a README) stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from datacache.annotations.formats.metadata import is_metadata
from datacache.annotations.layout import text
from datacache.annotations.pairing import is_image, is_mask_image, mask_images
from datacache.annotations.split_lists import cut_down
from datacache.catalog.base import Catalog
from datacache.catalog.commit import check_target, commit_entries
from datacache.catalog.objects import NewFiles, ObjectWriter
from datacache.conversion.index import Annotations, Reading
from datacache.conversion.model import Splits
from datacache.conversion.pipeline import Plan, run
from datacache.conversion.problems import own_format
from datacache.conversion.source import AnnotationSource, NamedImages
from datacache.core.errors import UsageError
from datacache.core.parallel import Workers
from datacache.manifest.model import Entry, Lineage, Naming, SnapshotRecord
from datacache.reader.snapshot import Snapshot


def subset(
    catalog: Catalog,
    snapshot: Snapshot,
    images: Collection[str],
    naming: Naming,
    *,
    reading: Reading,
    parameters: Mapping[str, Any],
    open_objects: Callable[[], ObjectWriter],
    command: str = "query",
    chosen_by: Sequence[str] = (),
    processes: Workers = None,
) -> SnapshotRecord:
    """Commit the snapshot that has these images of `snapshot`, and what belongs to them. `command` and `parameters` say
    how they were chosen, `chosen_by` by which other snapshots (`dataset@id`). Deterministic. `UsageError` where there
    are none, and for a path that is no usable image."""
    lineage = Lineage(command, {**parameters, **reading.as_json()}, (snapshot.ref, *chosen_by))
    check_target(catalog, naming, lineage)
    wanted = frozenset(images)
    if not wanted:
        raise UsageError("no image fits, and a snapshot without images is of no use", hint="Ask for less.")
    annotations = Annotations(snapshot, catalog, reading)
    table = annotations.table(processes=processes)
    said = {row.path: row.annotation.source for row in table.rows() if row.annotation and row.path in wanted}
    missing = sorted(wanted.difference(said))
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise UsageError(f"{missing[0]!r}{more}: no image of {snapshot.record.ref}, or one that cannot be used")
    source = annotations.source
    if source.layout.lists:
        listed = annotations.splits()
        in_splits = all(listed.of(_encode(path), _encode(file)) for path, file in said.items())
        to = own_format(table)
        plan = Plan(
            to=to,
            naming=naming,
            reading=reading,
            splits=None if in_splits and to != "cvat-video" else Splits(),
            keep_unannotated=True,
            only=wanted,
            lineage=lineage,
        )
        return run(catalog, [snapshot], plan, open_objects=open_objects, processes=processes).record
    files = NewFiles(list(snapshot.manifest.root.sources), catalog.put_blobs, open_objects)
    entries, origin = _entries(source, snapshot, said, files), f"datacache://{snapshot.record.ref}"
    return commit_entries(catalog, entries, files, naming, origin=origin, lineage=lineage)


def _entries(source: AnnotationSource, snapshot: Snapshot, said: Mapping[str, str], files: NewFiles) -> Iterator[Entry]:
    """Yield the entries of the subset: those of the images and their annotations, the lists cut down, and the rest.
    `said` has each image and the file that speaks of it."""
    layout, manifest = source.layout, snapshot.manifest
    images, annotations = set(map(_encode, said)), set(map(_encode, said.values()))
    named = NamedImages(manifest, layout)
    masks = {path for image in images if layout.masks for both in mask_images(image) for path in both}
    lists = frozenset((*layout.image_sets, *layout.image_lists))
    for entry in manifest.entries():
        path = entry.path
        if entry.is_folder_link or (layout.masks and is_mask_image(path) and path not in masks):
            continue
        if path in lists:
            yield from files.add(text(path), cut_down(source.read(path), images), entry.mtime_ns)
        elif is_metadata(text(path)):
            lines = source.read(path).splitlines(keepends=True)
            rows = ((line, _named(line, path, named)) for line in lines)
            left = [line for line, row in rows if row is not None and manifest.path(row) in images]
            yield from files.add(text(path), b"".join(left), entry.mtime_ns)
        elif path in images or (path in annotations if layout.is_annotation(path) else not is_image(path)):
            yield files.refer(entry)
    yield from files.end_pack()


def _named(line: bytes, file: bytes, named: NamedImages) -> int | None:
    """Return the row of the image that a line of `metadata.jsonl` is about."""
    try:
        name = json.loads(line)["file_name"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    found = named.named(name, file) if isinstance(name, str) else None
    return None if found is None else found.row


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
