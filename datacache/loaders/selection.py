"""Which files of a snapshot are samples, and what their targets are.

Used by `SnapshotDataset` and `datacache.tf`. Without a target and a query, no annotation is read. All is done in one
walk in the order of paths by one thread, and what is kept of a sample are some numbers in columns, so that a million of
them are a few arrays. Columns that are complete are read by any thread, forked and pickled.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datacache.annotations.classes import class_ids
from datacache.annotations.layout import text
from datacache.annotations.model import Annotation, Box
from datacache.annotations.pairing import is_image
from datacache.annotations.query import Query, find_paths
from datacache.annotations.shapes.outline import Skeleton
from datacache.annotations.table.table import Table
from datacache.catalog.base import Catalog
from datacache.conversion.index import Annotations, Reading
from datacache.core.errors import CorruptManifestError, UsageError
from datacache.core.ids import object_id
from datacache.loaders.shapes import SHAPE_KINDS, ShapeColumn
from datacache.loaders.styles import STYLES, StyledColumns
from datacache.manifest.codec import Range
from datacache.manifest.reader import Manifest
from datacache.reader.snapshot import Snapshot
from datacache.shards import records
from datacache.shards.index import SHARDS_JSON

log = logging.getLogger("datacache.loader")

KINDS = ("auto", "detection", "classification", "folder", "path")
NO_CLASS = -1
Boxes = dict[str, NDArray[Any]]
"""`{"boxes": float32 (n, 4) as x1, y1, x2, y2 in pixels, "labels": int64 (n,)}`, and what `shapes` adds."""


class BoxColumns:
    """The boxes of each sample, with the ids of their classes: 8 bytes for each sample and 20 for each box."""

    def __init__(self, classes: tuple[str, ...], shapes: ShapeColumn | None = None) -> None:
        self.classes = classes
        self._ids = _numbered(classes)
        self._shapes = shapes
        self._ends: Any = array("q", [0])
        self._boxes: Any = array("f")
        self._labels: Any = array("i")

    def add(self, _path: str, annotation: Annotation | None) -> None:
        for box in annotation.boxes if annotation is not None else ():
            self._boxes.extend((box.x1, box.y1, box.x2, box.y2))
            self._labels.append(self._ids[box.label])
        self._ends.append(len(self._labels))
        if self._shapes is not None:
            self._shapes.add(annotation)

    def finish(self) -> None:
        """Make arrays of the columns: all samples were added."""
        self._ends, self._labels = np.asarray(self._ends), np.asarray(self._labels)
        self._boxes = np.asarray(self._boxes).reshape(-1, 4)
        if self._shapes is not None:
            self._shapes.finish()

    def get(self, sample: int) -> Boxes:
        """Return a sample's own copy."""
        first, last = int(self._ends[sample]), int(self._ends[sample + 1])
        found = {"boxes": self._boxes[first:last].copy(), "labels": self._labels[first:last].astype(np.int64)}
        return found if self._shapes is None else found | self._shapes.get(sample)


class ClassColumn:
    """The class id of each sample, an int: of its annotation, or `NO_CLASS` where that has none."""

    def __init__(self, classes: tuple[str, ...]) -> None:
        self.classes = classes
        self._ids = _numbered(classes)
        self._values = array("i")

    def add(self, _path: str, annotation: Annotation | None) -> None:
        assert annotation is not None
        self._values.append(class_of(annotation.labels, (box.label for box in annotation.boxes), self._ids))

    def finish(self) -> None:
        """Do nothing: the column is as it is read."""

    def get(self, sample: int) -> int:
        """Return a sample's class."""
        return self._values[sample]


class FolderColumn(ClassColumn):
    """Makes classes of the names of the folders that files lie in, sorted once all are known."""

    def __init__(self) -> None:
        super().__init__(())

    def add(self, path: str, _annotation: Annotation | None) -> None:
        folder = path.rpartition("/")[0].rpartition("/")[2]
        self._values.append(self._ids.setdefault(folder, len(self._ids)))

    def finish(self) -> None:
        """Number the classes in the order of their names."""
        self.classes = tuple(sorted(self._ids))
        ids = np.zeros(len(self._ids), np.int32)
        for id, name in enumerate(self.classes):
            ids[self._ids[name]] = id
        self._values = array("i", ids[np.asarray(self._values)].tobytes())


Targets = BoxColumns | ClassColumn | StyledColumns


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
    """The kind of targets: `detection`, one of `SHAPE_KINDS`, `classification`, `path`, or None for none."""
    targets: Targets | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        return () if self.targets is None else self.targets.classes


def check_kind(target: str | None, kinds: Sequence[str] = KINDS) -> None:
    """Raise `UsageError` for a target that there is not."""
    if target in SHAPE_KINDS and target not in kinds:
        raise UsageError(f"target={target!r}: only the datasets of datacache.torch have such targets")
    if target is not None and target not in kinds:
        raise UsageError(f"target={target!r}: there is no such target", hint=f"One of {', '.join(kinds)}, or None.")


def select(
    snapshot: Snapshot,
    catalog: Catalog,
    *,
    target: str | None,
    query: Query,
    split: str = "",
    reading: Reading | None = None,
    style: str | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Selection:
    """Return the samples that are meant. Raise `UsageError` where there are none, and for a target or a style that
    there is not.

    Images are meant where there are any, else all files. With targets of annotations, with a query or a split, images
    that cannot be used are left out.
    """
    check_kind(target, KINDS + SHAPE_KINDS)
    if style is not None and style not in STYLES:
        raise UsageError(f"style={style!r}: there is no such style", hint=f"One of {', '.join(STYLES)}, or None.")
    annotations = Annotations(snapshot, catalog, reading or Reading())
    asked = query != Query() or bool(split)
    if target == "auto" and not asked and not _annotated(annotations, snapshot):
        target = "path"
    if not asked and target not in ("auto", "detection", "classification", *SHAPE_KINDS):
        return _of_files(snapshot, target)
    table = annotations.table(progress=progress)
    target, targets = _possible(snapshot, table, target)
    if style is not None and target is not None and isinstance(targets, BoxColumns):
        targets = StyledColumns(targets, style, target)
    files, labelled = _Files(snapshot.manifest, targets), False
    kept = _in_split(annotations, split, snapshot) if split else None
    for row, held, index, annotation in _usable(snapshot, table, query):
        if kept is None or kept(annotation):
            files.add(row, held, index, annotation)
            labelled = labelled or len(set(annotation.labels)) == 1
    if not files.rows:
        raise UsageError(f"no image of {snapshot.record.ref} fits", hint="Ask for less. See: dsctl query, dsctl stats")
    if table.images > table.usable:
        log.warning(
            "%s: %d of %d images cannot be used with their annotations and are no samples (dsctl stats %s)",
            *(snapshot.record.ref, table.images - table.usable, table.images, snapshot.record.ref),
        )
    if target == "auto":
        target, files.targets = ("classification", targets) if labelled else ("path", None)
    return files.selection(target, snapshot)


def _of_files(snapshot: Snapshot, target: str | None) -> Selection:
    """Select without annotations: all images, or all files if none is an image."""
    ref, manifest = snapshot.record.ref, snapshot.manifest
    if manifest.find(SHARDS_JSON.encode()) is not None:
        raise UsageError(f"{ref} is a shard set", hint=f'ShardDataset("{ref}") reads its samples.')
    files = _Files(manifest, FolderColumn() if target == "folder" else None)
    images = any(is_image(path) for path in manifest.paths())
    for row, held, index in _all(manifest):
        path = held.paths[index]
        if is_image(path) if images else not path.endswith(b"/"):
            files.add(row, held, index, None)
    if not files.rows:
        raise UsageError(f"{ref} has no files", hint="See: dsctl ls REF")
    return files.selection(target, snapshot)


def _annotated(annotations: Annotations, snapshot: Snapshot) -> bool:
    try:
        source = annotations.source
    except UsageError:
        if any(is_image(path) for path in snapshot.manifest.paths()):
            raise
        return False  # neither images nor annotations
    return source.format not in ("none", "folders")  # of which `folder` needs no table


def _possible(snapshot: Snapshot, table: Table, target: str | None) -> tuple[str | None, Targets | None]:
    """Return the target as far as the table's totals decide it, and its column. Raise `UsageError` where there is
    nothing for it."""
    if target in ("detection", *SHAPE_KINDS) and not table.boxes:
        raise UsageError(f"{snapshot.record.ref} has no boxes", hint="See what it has: dsctl stats")
    if target == "classification" and not table.labels:
        raise UsageError(f"{snapshot.record.ref} has no classes", hint="target='folder', 'path', or None.")
    if target == "detection" or (target == "auto" and table.boxes):
        return "detection", BoxColumns(class_ids(table))
    if target in SHAPE_KINDS:
        if target == "pose" and not table.skeletons:
            raise UsageError(f"{snapshot.record.ref} has no keypoints", hint="See what it has: dsctl stats")
        return target, BoxColumns(class_ids(table), ShapeColumn(target, table.skeletons))
    if target in ("classification", "auto"):
        return target, ClassColumn(class_ids(table))
    return target, FolderColumn() if target == "folder" else None


class _Files:
    """Takes the files that are samples, in path order, and their targets."""

    def __init__(self, manifest: Manifest, targets: Targets | None) -> None:
        self.targets = targets
        self._manifest = manifest
        self.rows, self._sizes, self._ids = array("q"), array("q"), bytearray()

    def add(self, row: int, held: Range, index: int, annotation: Annotation | None) -> None:
        self.rows.append(row)
        self._sizes.append(held.sizes[index])
        self._ids += object_id(self._manifest.object_ref(held.entry(index)))
        if self.targets is not None:
            self.targets.add(text(held.paths[index]), annotation)

    def selection(self, target: str | None, snapshot: Snapshot) -> Selection:
        """Return all of them. Raise `UsageError` for classes of folders where there is only one."""
        if self.targets is not None:
            self.targets.finish()
        if isinstance(self.targets, FolderColumn):
            target = "classification"
            if len(self.targets.classes) < 2:
                raise UsageError(
                    f"the files of {snapshot.record.ref} all lie in one folder, so there are no classes",
                    hint="target='path', or None, needs none.",
                )
        rows, sizes = np.asarray(self.rows), np.asarray(self._sizes)
        return Selection(rows=rows, sizes=sizes, ids=bytes(self._ids), kind=target, targets=self.targets)


def _all(manifest: Manifest) -> Iterator[tuple[int, Range, int]]:
    row = 0
    for held in manifest.ranges(range(len(manifest.root.ranges))):
        for index in range(len(held.paths)):
            yield row, held, index
            row += 1


def _usable(snapshot: Snapshot, table: Table, query: Query) -> Iterator[tuple[int, Range, int, Annotation]]:
    """Yield the images that can be used and that the query means, each with its place in the manifest: one walk over
    both, which are in the order of paths. Raise `CorruptManifestError` if the table is of other files."""
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
    """Return what tells whether an image is in a split. Raise `UsageError` if there is no such split."""
    listed = annotations.splits()
    names = listed.names
    if split not in names:
        there = f"it has {', '.join(names)}" if names else "it has none; dsctl convert --split makes some"
        raise UsageError(f"{snapshot.record.ref} has no split {split!r}: {there}")
    return lambda each: listed.of(_encode(each.path), _encode(each.source)) == split


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _numbered(classes: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(classes)}


# --- targets in shards: what an image's `.json` member says ----------------------------------------------------------


def boxes_of_json(raw: bytes | memoryview, class_ids: Mapping[str, int], sample: str) -> Boxes:
    """Return the boxes in a shard's `.json` member. Raise `UsageError` if it has none."""
    try:
        found = json.loads(bytes(raw))["boxes"]
        boxes = [(box["x1"], box["y1"], box["x2"], box["y2"]) for box in found]
        labels = [box["class"] if "class" in box else class_ids[box["label"]] for box in found]
    except (KeyError, TypeError, ValueError) as exc:
        raise _says_nothing(sample, "boxes", exc) from exc
    return {"boxes": np.array(boxes, np.float32).reshape(-1, 4), "labels": np.array(labels, np.int64)}


def shapes_of_json(raw: bytes | memoryview, class_ids: Mapping[str, int], kind: str, sample: str) -> Boxes:
    """Return the target of one of `SHAPE_KINDS` out of a shard's `.json` member. Raise `UsageError` if it says nothing
    of these."""
    try:
        said = json.loads(bytes(raw))
        size = said["width"], said["height"]
        boxes = tuple(
            Box(box["label"], box["x1"], box["y1"], box["x2"], box["y2"], extra=records.shapes_of_json(box, *size))
            for box in said["boxes"]
        )
        skeleton = Skeleton(("",) * (said["keypoints"] if kind == "pose" else 0))
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise _says_nothing(sample, "keypoints" if kind == "pose" else "boxes", exc) from exc
    column = BoxColumns(tuple(class_ids), ShapeColumn(kind, {"": skeleton}))
    column.add("", Annotation("", *size, boxes))
    column.finish()
    return column.get(0)


def class_of_json(raw: bytes | memoryview, class_ids: Mapping[str, int], sample: str) -> int:
    """Return the class in a shard's `.json` member, as `class_of` has it. Raise `UsageError` if it says nothing of
    classes."""
    try:
        value = json.loads(bytes(raw))
        labels = value.get("labels") or [box["label"] for box in value["boxes"]]
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise _says_nothing(sample, "classes", exc) from exc
    return class_of(labels, (), class_ids)


def path_of_json(raw: bytes | memoryview) -> str | None:
    """Return the image's path in its snapshot, out of a shard's `.json` member; None if it does not say."""
    try:
        path = json.loads(bytes(raw))["path"]
    except (KeyError, TypeError, ValueError):
        return None
    return path if isinstance(path, str) else None


def class_of(labels: Iterable[str], boxed: Iterable[str], class_ids: Mapping[str, int]) -> int:
    """Return the class of an image with these labels of the whole image, or else with boxes of these: where it is
    one."""
    found = set(labels) or set(boxed)
    return class_ids.get(found.pop(), NO_CLASS) if len(found) == 1 else NO_CLASS


def _says_nothing(sample: str, of: str, exc: Exception) -> UsageError:
    return UsageError(
        f"{sample}: its .json says nothing of {of} ({type(exc).__name__}: {exc})",
        hint=f"Shards with {of} are made of a snapshot with annotations. For none: target=None.",
    )
