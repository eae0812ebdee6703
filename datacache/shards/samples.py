"""The samples of a snapshot, in the order of the manifest, and the keys they have in a shard. Used by the builder.

With annotations, samples are the usable images of the annotation table. With images alone they are these, and no image
is opened. Without images, files that share their path up to the first dot of the base name are a sample, as WebDataset
has it. A reader of WebDataset cuts a member's name at the first dot of its base name into key and extension; folders
may have dots. So a key is an image's path without its extension, and other dots of its base name become `_`. Keys are
text that every reader of tars takes as it is: bytes that are no UTF-8 and control characters are written `%ff`, and no
key is absolute or leads upwards. One thread."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from datacache.annotations.pairing import is_image
from datacache.annotations.table.table import Table
from datacache.conversion.index import with_entries
from datacache.core.errors import UsageError
from datacache.manifest.reader import Manifest
from datacache.shards.records import Described, Labels


class File(NamedTuple):
    """A file of the snapshot that becomes a member."""

    extension: str
    row: int
    """Of the manifest."""
    size_bytes: int


class Sample(NamedTuple):
    """Members that go into a shard together."""

    key: str
    files: tuple[File, ...]
    labels: tuple[tuple[str, bytes], ...] = ()
    """Extension and bytes of members that are made."""
    class_id: int = -1


@dataclass
class Counts:
    """The numbers of samples, and of images and boxes by what became of them."""

    samples: int = 0
    unusable: int = 0
    """Images left out because they, or their annotations, cannot be used at all."""
    unannotated: int = 0
    boxes: int = 0
    renamed: int = 0
    """Samples whose key got a suffix because another one has it."""


@dataclass
class Survey:
    """The findings of one look at a snapshot's paths."""

    images: int = 0
    folders: dict[bytes, None] = field(default_factory=dict)
    """The folders with images, in order."""


def survey(manifest: Manifest) -> Survey:
    """Look at all paths."""
    found = Survey()
    last = None
    for path in manifest.paths():
        if is_image(path):
            found.images += 1
            folder = path[: path.rfind(b"/") + 1]
            if folder != last:
                found.folders[folder] = None
                last = folder
    return found


def folder_classes(found: Survey) -> tuple[str, ...]:
    """Return the classes of images whose folders are named after them. Raise `UsageError` if the folders are no
    classes."""
    names = sorted({folder.split(b"/")[-2] if folder else b"" for folder in found.folders})
    depths = {folder.count(b"/") for folder in found.folders}
    if len(names) < 2 or len(depths) != 1 or b"" in names:
        raise UsageError(
            "--classes-from-folders: the images do not lie in two or more folders, all equally deep",
            hint="There must be a folder for each class, such as cat/001.jpg and dog/001.jpg.",
        )
    return tuple(_text(name) for name in names)


def annotated(manifest: Manifest, table: Table, labels: Labels, counts: Counts) -> Iterator[Sample]:
    """Yield the images of a table."""
    names = _image_names(manifest)
    for row, number, entry in with_entries(manifest, table.rows()):
        key, extension = image_key(row.path)
        key = names.give(key, extension)  # also for those left out: nobody else gets their keys
        annotation = row.annotation
        if annotation is None:
            counts.unusable += 1
            continue
        counts.unannotated += not annotation.source
        counts.boxes += len(annotation.boxes)
        image = Described(row.path, annotation, annotation.labels)
        yield _image(image, key, File(extension, number, entry.size_bytes), labels)
    counts.renamed = names.renamed


def images(manifest: Manifest, labels: Labels, counts: Counts, *, classes_from_folders: bool) -> Iterator[Sample]:
    """Yield the images of a snapshot without annotations."""
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
    """Yield the files of a snapshot without images, grouped."""
    names = Names(key for key, _ in _groups(manifest))
    for key, files in _groups(manifest):
        yield Sample(names.give(key), tuple(files))
    counts.renamed = names.renamed


def _image(image: Described, key: str, file: File, labels: Labels) -> Sample:
    return Sample(key, (file,), labels.encode(image, key, file.extension), labels.class_of(image))


def _image_names(manifest: Manifest) -> Names:
    return Names(image_key(_text(path))[0] for path in manifest.paths() if is_image(path))


def _groups(manifest: Manifest) -> Iterator[tuple[str, list[File]]]:
    """Yield files by key. They lie together in the order of paths but for folders that begin with the same name: a
    group is open until a path comes that does not begin with it."""
    opened: list[tuple[bytes, str, list[File]]] = []
    for number, entry in enumerate(manifest.entries()):
        if entry.is_marker:
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
    """Return what the files of a group begin with: the path up to the first dot of its base name, leading dots aside. A
    file without a dot is alone."""
    at = path.rfind(b"/") + 1
    while path[at : at + 1] == b".":
        at += 1
    dot = path.find(b".", at)
    return path + b"\0" if dot < 0 else path[: dot + 1]


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


_ODD = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")
_SKIPPED = "__"
"""WebDataset skips members whose names begin and end so, or lie in such a folder: names that begin so are changed."""


def image_key(path: str) -> tuple[str, str]:
    """Return key and extension of a file that is a sample of its own: `a/b.c.JPG` → `a/b_c`, `jpg`."""
    *folder, name = path.split("/")
    stem, dot, extension = name.rpartition(".")
    if not dot or not stem:
        stem, extension = name, ""
    return _key(folder, stem), _escaped(extension.lower()) or "bin"


def group_key(path: str) -> tuple[str, str]:
    """Return key and extension of a file as WebDataset would cut it: `a/b.seg.PNG` → `a/b`, `seg.png`."""
    *folder, name = path.split("/")
    bare = name.lstrip(".")
    stem, _, extension = bare.partition(".")
    return _key(folder, name[: len(name) - len(bare)] + stem), _escaped(extension.lower()) or "bin"


class Names:
    """Gives every sample a key of its own: the first sample that wants a key gets it as it is.

    Make it with the keys that all samples want, in order, and then give keys in the same order. It keeps a hash of
    each. One thread."""

    def __init__(self, wanted: Iterable[str]) -> None:
        hashes = np.array(array("Q", map(_hash, wanted)), dtype=np.uint64)
        hashes.sort()
        self._all = hashes
        self._twice = frozenset(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
        self._given: set[int] = set()
        self.renamed = 0
        """The number of samples that got another key than they wanted."""

    def give(self, key: str, extension: str = "") -> str:
        """Return the key of the next sample: `key`, or `key` with the extension or a number behind it."""
        hashed = _hash(key)
        if hashed not in self._twice:
            return key
        if hashed not in self._given:
            self._given.add(hashed)
            return key
        self.renamed += 1
        count = 1
        while True:
            suffix = extension.replace(".", "_") if count == 1 and extension else str(count + 1)
            other = f"{key}_{suffix}"
            hashed = _hash(other)
            at = int(np.searchsorted(self._all, np.uint64(hashed)))
            wanted = at < len(self._all) and int(self._all[at]) == hashed
            if hashed not in self._given and not wanted:
                self._given.add(hashed)
                return other
            count += 1


def _hash(key: str) -> int:
    return xxh3_64_intdigest(key.encode())


def _key(folders: list[str], stem: str) -> str:
    parts = [name.replace(".", "_") if name in (".", "..") else name or "_" for name in folders]
    key = _escaped("/".join([*parts, stem.replace(".", "_") or "_"]))
    return "%5f" + key[1:] if key.startswith(_SKIPPED) else key


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return _ODD.sub(lambda odd: "".join(f"%{byte:02x}" for byte in odd[0].encode("utf-8", "surrogateescape")), text)
