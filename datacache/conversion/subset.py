"""A snapshot of some of a snapshot's images, with their annotations: what a query found, under a name of its own.

Used by `api.subset`. Images and annotation files are entered by reference. Files that speak of many images (COCO,
keras-yolo3, lists of splits) are written anew with what is left of them; all other files (`data.yaml`, class lists, a
README) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from datacache.annotations.layout import text
from datacache.annotations.pairing import is_image, without_extension
from datacache.catalog.base import Catalog
from datacache.catalog.commit import check_target, commit_manifest, known_blobs
from datacache.catalog.new_files import NewFiles
from datacache.catalog.objects import ObjectWriter
from datacache.conversion.index import Reading
from datacache.conversion.pipeline import Plan, run
from datacache.conversion.source import AnnotationSource
from datacache.core.errors import UsageError
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import Entry, Lineage, SnapshotRecord, Source
from datacache.manifest.sort import sorted_entries
from datacache.reader.snapshot import Snapshot


def subset(
    catalog: Catalog,
    snapshot: Snapshot,
    images: Collection[str],
    *,
    name: str,
    reading: Reading,
    parameters: Mapping[str, Any],
    open_objects: Callable[[], ObjectWriter],
    tags: Sequence[str] = (),
    move_tags: bool = False,
    message: str = "",
) -> SnapshotRecord:
    """Commit the snapshot that has these images of `snapshot`, and what belongs to them. `parameters` say how they were
    chosen. Deterministic. `UsageError` where there are none."""
    dataset = check_target(catalog, name, tags)
    if not images:
        raise UsageError("no image fits, and a snapshot without images is of no use", hint="Ask for less.")
    source = AnnotationSource(snapshot, reading.format)
    lineage = Lineage("query", {**parameters, **reading.as_json()}, (snapshot.ref,))
    if source.layout.lists:
        plan = Plan(
            to=source.format,
            name=name,
            reading=reading,
            keep_unannotated=True,
            only=images,
            lineage=lineage,
            tags=tags,
            move_tags=move_tags,
            message=message,
        )
        return run(catalog, snapshot, plan, open_objects=open_objects).record
    sources: list[Source] = list(snapshot.manifest.root.sources)
    files = NewFiles(sources, catalog.put_blobs, open_objects)
    builder = ManifestBuilder(sources, catalog.put_blobs, known=known_blobs(catalog, dataset))
    kept = {path.encode("utf-8", "surrogateescape") for path in images}
    for entry in sorted_entries(_entries(source, snapshot, kept, files)):
        builder.add(entry)
    return commit_manifest(
        catalog,
        builder,
        name=name,
        origin=f"datacache://{snapshot.record.ref}",
        lineage=lineage,
        packs=files.packs,
        tags=tags,
        move_tags=move_tags,
        message=message,
    )


def _entries(source: AnnotationSource, snapshot: Snapshot, kept: Collection[bytes], files: NewFiles) -> Iterator[Entry]:
    """The entries of the subset: those of the images and their annotations, the lists cut down, and the rest."""
    layout = source.layout
    annotations = {found.annotation for found in source.images() if found.entry.path in kept}
    lists = frozenset((*layout.image_sets, *layout.image_lists))
    names = {without_extension(path.rpartition(b"/")[2]) for path in kept}
    for row, entry in enumerate(snapshot.manifest.entries()):
        if is_image(entry.path):
            wanted = entry.path in kept
        elif layout.is_annotation(entry.path):
            wanted = row in annotations
        elif entry.path in lists:
            yield from files.add(text(entry.path), _cut_down(source.read(entry.path), names), entry.mtime_ns)
            continue
        else:
            wanted = True
        if wanted:
            yield files.refer(entry)
    yield from files.end_pack()


def _cut_down(data: bytes, names: Collection[bytes]) -> bytes:
    """The lines of a list that name an image of the subset."""

    def name(line: bytes) -> bytes:
        base = line.replace(b"\\", b"/").rpartition(b"/")[2].strip()
        return without_extension(base) if is_image(base) else base.split()[0] if base else b""

    return b"".join(line for line in data.splitlines(keepends=True) if name(line) in names)
