"""Which samples a snapshot has: images with what is known of them, or groups of files.

Used by the builder. Where there are annotations, samples are the images of the annotation table that can be used;
where there are images alone, they are these, and no image is opened; where there are no images, files that share their
path up to the first dot of the base name are a sample, as WebDataset has it. In the order of the manifest. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from datacache.annotations.formats.metadata import NAME as METADATA
from datacache.annotations.pairing import is_image
from datacache.annotations.table.table import Row, Table
from datacache.core.errors import UsageError
from datacache.manifest.reader import Manifest
from datacache.shards.labels import Described, Labels
from datacache.shards.naming import Names, group_key, image_key


class File(NamedTuple):
    """A member that is a file of the snapshot."""

    extension: str
    row: int
    """Of the manifest."""
    size_bytes: int


class Sample(NamedTuple):
    """What goes into a shard together."""

    key: str
    files: tuple[File, ...]
    labels: tuple[tuple[str, bytes], ...] = ()
    """Members that are made: extension and bytes."""
    class_id: int = -1


@dataclass
class Counts:
    """What was found and what became of it."""

    samples: int = 0
    unusable: int = 0
    """Images left out: they, or their annotations, cannot be used at all."""
    unannotated: int = 0
    boxes: int = 0
    renamed: int = 0
    """Samples whose key got a suffix, since another has it."""


@dataclass
class Survey:
    """One look at a snapshot's paths."""

    files: int = 0
    images: int = 0
    metadata: bool = False
    """There are labels of whole images."""
    folders: dict[bytes, None] = field(default_factory=dict)
    """The folders in which images are."""


def survey(manifest: Manifest) -> Survey:
    """Look at all paths."""
    found = Survey()
    last = None
    for path in manifest.paths():
        if path.endswith(b"/"):
            continue
        found.files += 1
        if is_image(path):
            found.images += 1
            folder = path[: path.rfind(b"/") + 1]
            if folder != last:
                found.folders[folder] = None
                last = folder
        elif path.rpartition(b"/")[2] == METADATA:
            found.metadata = True
    return found


def folder_classes(found: Survey) -> tuple[str, ...]:
    """The classes of images that lie in folders named after them. `UsageError` where they do not."""
    names = sorted({folder.split(b"/")[-2] if folder else b"" for folder in found.folders})
    depths = {folder.count(b"/") for folder in found.folders}
    if len(names) < 2 or len(depths) != 1 or b"" in names:
        raise UsageError(
            "--classes-from-folders: the images do not lie in two or more folders, all equally deep",
            hint="There must be a folder for each class, such as cat/001.jpg and dog/001.jpg.",
        )
    return tuple(_text(name) for name in names)


def annotated(manifest: Manifest, table: Table, labels: Labels, counts: Counts) -> Iterator[Sample]:
    """The images of a table. `UsageError` through `labels` for what a format cannot hold."""
    names = _image_names(manifest)
    for row, number, size_bytes in _with_rows(manifest, table):
        key, extension = image_key(row.path)
        key = names.give(key, extension)  # also for those left out: what they would be called is nobody else's
        annotation = row.annotation
        if annotation is None:
            counts.unusable += 1
            continue
        counts.unannotated += not annotation.source
        counts.boxes += len(annotation.boxes)
        image = Described(row.path, annotation, annotation.labels)
        yield _image(image, key, File(extension, number, size_bytes), labels)
    counts.renamed = names.renamed


def images(manifest: Manifest, labels: Labels, counts: Counts, *, classes_from_folders: bool) -> Iterator[Sample]:
    """Images of which nothing is known but where they lie."""
    names = _image_names(manifest)
    for number, entry in enumerate(manifest.entries()):
        if is_image(entry.path):
            path = _text(entry.path)
            key, extension = image_key(path)
            said = (path.split("/")[-2],) if classes_from_folders else ()
            file = File(extension, number, entry.size_bytes)
            yield _image(Described(path, labels=said), names.give(key, extension), file, labels)
    counts.renamed = names.renamed


def groups(manifest: Manifest, counts: Counts) -> Iterator[Sample]:
    """Files that are no images, grouped."""
    names = Names(key for key, _ in _groups(manifest))
    for key, files in _groups(manifest):
        yield Sample(names.give(key), tuple(files))
    counts.renamed = names.renamed


def _image(image: Described, key: str, file: File, labels: Labels) -> Sample:
    return Sample(key, (file,), labels.encode(image, key, file.extension), labels.class_of(image))


def _image_names(manifest: Manifest) -> Names:
    return Names(image_key(_text(path))[0] for path in manifest.paths() if is_image(path))


def _with_rows(manifest: Manifest, table: Table) -> Iterator[tuple[Row, int, int]]:
    """Each row of the table with the manifest's row and the size of its image: both are in the order of paths."""
    rows = table.rows()
    row = next(rows, None)
    for number, entry in enumerate(manifest.entries()):
        if row is None:
            return
        if entry.path == row.path.encode("utf-8", "surrogateescape"):
            yield row, number, entry.size_bytes
            row = next(rows, None)


def _groups(manifest: Manifest) -> Iterator[tuple[str, list[File]]]:
    """Files that share a key lie together in the order of paths but for folders that begin with the same name: a group
    is open until a path comes that no more begins with it."""
    opened: list[tuple[bytes, str, list[File]]] = []
    for number, entry in enumerate(manifest.entries()):
        if entry.path.endswith(b"/"):
            continue
        while opened and not entry.path.startswith(opened[-1][0]):
            yield opened.pop()[1:]
        key, extension = group_key(_text(entry.path))
        file = File(extension, number, entry.size_bytes)
        start = _shared(entry.path)
        if opened and opened[-1][0] == start and all(other.extension != extension for other in opened[-1][2]):
            opened[-1][2].append(file)
        elif opened and opened[-1][0] == start:
            yield key, [file]  # the same extension in another case
        else:
            opened.append((start, key, [file]))
    while opened:
        yield opened.pop()[1:]


def _shared(path: bytes) -> bytes:
    """What the files of a group begin with: the path with the first dot of its base name (leading ones are the name's).
    A file without a dot is alone."""
    at = path.rfind(b"/") + 1
    while path[at : at + 1] == b".":
        at += 1
    dot = path.find(b".", at)
    return path + b"\0" if dot < 0 else path[: dot + 1]


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
