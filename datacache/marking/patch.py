"""Put marks into the files of labels where they lie: each file that nobody has marked stays byte for byte.

Used by commits where every image has a file of its own that the format's writer can replace (VOC, YOLO, LabelMe); all
else is written anew by a conversion. The cost is that of the manifest, and of the images that were marked. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from datacache.annotations.model import FORMATS, Annotation, Problem
from datacache.annotations.pairing import Pairing
from datacache.annotations.table.table import Table
from datacache.catalog.base import Catalog
from datacache.catalog.commit import check_target, commit_entries
from datacache.catalog.objects import NewFiles, ObjectWriter
from datacache.conversion.fitting import fit
from datacache.conversion.model import stem
from datacache.conversion.source import AnnotationSource
from datacache.conversion.targets import TARGETS, About
from datacache.manifest.model import Entry, Lineage, Naming, SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.reader.snapshot import Snapshot

_FORMATS: Final = {"labelme": "labelme", "voc": "voc", "yolo": "yolo", "yolo-segment": "yolo"}
"""Targets that write one file an image, and what they are read as."""


def patched_files(
    source: AnnotationSource, manifest: Manifest, table: Table, to: str, marked: Sequence[Annotation]
) -> tuple[dict[str, bytes], list[Problem]] | None:
    """Return the files of labels that images get which were marked, and what their format cannot hold; None where
    other files have to change, too: lists of classes, masks, files of many images; and where a new file would
    not be of its image alone."""
    layout, classes = source.layout, table.meta.get("classes") or ()
    if _FORMATS.get(to) != source.format or layout.lists or layout.masks:
        return None
    labels = sorted({box.label for each in marked for box in each.boxes})
    if FORMATS[source.format].numbered and not set(labels) <= set(classes):
        return None
    target = TARGETS[to](About(classes or labels, ()))
    if "score" not in target.holds and any(
        box.extra and box.extra.score is not None for a in marked for box in a.boxes
    ):
        return None
    files: dict[str, bytes] = {}
    problems: list[Problem] = []
    suffix = FORMATS[source.format].suffix.decode()
    beside = _lie_beside(table, suffix)
    pairing = Pairing(manifest, suffix.encode())
    for annotation in marked:
        has_file = annotation.source.lower().endswith(suffix)
        own = annotation.source if has_file else stem(annotation.path) + suffix if beside else ""
        fitted = fit(annotation, target.holds, problems)
        target.expect([fitted])
        written, more = target.add(fitted, "", annotated=True)
        if len(written) != 1 or not (own or annotation.path.startswith(f"{target.folder}/")):
            return None
        problems += more
        file = own or written[0][0]
        if file in files or not (has_file or _is_free(pairing, manifest, file, annotation.path)):
            return None
        files[file] = written[0][1]
    return files, problems


def _is_free(pairing: Pairing, manifest: Manifest, file: str, image: str) -> bool:
    """Tell whether a new file of labels would be this image's, and nothing is there that is another one's."""
    path, own = file.encode("utf-8", "surrogateescape"), image.encode("utf-8", "surrogateescape")
    return manifest.find(path) is None and pairing.fitting(path) == [own] and pairing.annotation_of(own) is None


def _lie_beside(table: Table, suffix: str) -> bool:
    """Tell whether labels lie in the folders of their images, as far as the first image that has some shows."""
    pairs = ((row.path, row.annotation.source) for row in table.rows() if row.annotation)
    path, source = next((pair for pair in pairs if pair[1].endswith(suffix)), ("", ""))
    return source == stem(path) + suffix


def commit_patched(
    catalog: Catalog,
    snapshot: Snapshot,
    naming: Naming,
    lineage: Lineage,
    files: Mapping[str, bytes],
    *,
    open_objects: Callable[[], ObjectWriter],
    check: Callable[[SnapshotRecord], None],
) -> SnapshotRecord:
    """Commit the snapshot with these files in place of those that it has, or beside them. Deterministic."""
    check_target(catalog, naming, lineage)
    new = NewFiles(list(snapshot.manifest.root.sources), catalog.put_blobs, open_objects)
    entries, origin = _entries(snapshot, files, new), f"datacache://{snapshot.record.ref}"
    return commit_entries(catalog, entries, new, naming, origin=origin, lineage=lineage, check=check)


def _entries(snapshot: Snapshot, files: Mapping[str, bytes], new: NewFiles) -> Iterator[Entry]:
    left = {path.encode("utf-8", "surrogateescape"): data for path, data in files.items()}
    newest_ns = 0
    for entry in snapshot.manifest.entries():
        newest_ns = max(newest_ns, entry.mtime_ns)
        data = left.pop(entry.path, None)
        if data is None:
            yield new.refer(entry)._replace(target=entry.target)
        else:
            yield from new.add(entry.path.decode("utf-8", "surrogateescape"), data, entry.mtime_ns)
    for path, data in left.items():
        yield from new.add(path.decode("utf-8", "surrogateescape"), data, newest_ns)
    yield from new.end_pack()
