"""The splits that a data set brings: lists of names (`ImageSets/Main`), lists of paths (`train.txt`), `data.yaml`,
folders that are called after splits, subsets of CVAT, and a COCO or keras-yolo3 file for each split.

Used by conversions. `ListedSplits` is read-only after `read_splits`; any thread. Paths are bytes, as in the manifest.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterator
from typing import Final

from datacache.annotations.classes import read_data_yaml
from datacache.annotations.formats import cvat
from datacache.annotations.formats.json_stream import Data, read_lines
from datacache.annotations.layout import Layout, Read, text
from datacache.annotations.model import Problem, Problems, quote
from datacache.annotations.pairing import (
    class_and_split,
    file_split,
    folder_split,
    is_image,
    split_of_name,
    without_extension,
)
from datacache.core.errors import AnnotationError

_MAX_RECODED: Final = 64 * 2**20
_COLUMN: Final = re.compile(rb"(.*\S)\s+(?:-1|0|1)")
_ORDER: Final = ("train", "val", "test", "trainval")
_UP: Final = re.compile(rb"^(?:\.{0,2}/)+|^[A-Za-z]:/")


class ListedSplits:
    """Which image belongs to which split."""

    def __init__(self, layout: Layout) -> None:
        self.problems: list[Problem] = []
        self._folders = layout.split_folders
        self._classes = layout.class_folders if layout.format == "folders" else None
        self._lists = {file: file_split(file) for file in layout.lists}
        # Base name without extension → the listed paths that end so (without extension), and their splits.
        self._listed: dict[bytes, list[tuple[bytes, str]]] = {}
        # Of these, those that no image of the snapshot was found for yet, and where they are.
        self._unmatched: dict[bytes, tuple[str, int]] = {}
        self._yaml_folders: list[tuple[bytes, str]] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Return the splits there are, in their usual order."""
        found = {split for listed in self._listed.values() for _, split in listed} | self._folders
        found |= set(self._lists.values()) | {split for _, split in self._yaml_folders}
        return tuple(split for split in _ORDER if split in found)

    @property
    def by_name(self) -> bool:
        """Tell whether lists name the images of a split."""
        return bool(self._listed)

    @property
    def by_source(self) -> bool:
        """Tell whether the file that an image's annotation was read from may say its split."""
        return not self._listed and any(self._lists.values())

    def of(self, image: bytes, source: bytes = b"") -> str:
        """Return the split of an image, whose annotation was read from `source`; '' for none.

        Lists go before `data.yaml`, and this before names of folders; what no list names is in no split."""
        if self._listed:
            return self._by_list(without_extension(image))
        split = self._lists.get(source, "")
        if split:
            return split
        for folder, split in self._yaml_folders:
            if image.startswith(folder):
                return split
        if not self._folders:
            return ""
        return folder_split(image) if self._classes is None else class_and_split(image, self._classes)[1]

    def found(self, image: bytes) -> None:
        """Note that the snapshot has this image: whatever lists it is no entry without an image."""
        path = without_extension(image)
        for listed, _ in self._listed.get(path.rpartition(b"/")[2], ()) if self._unmatched else ():
            if _fit(listed, path):
                self._unmatched.pop(listed, None)

    def unmatched(self) -> Iterator[Problem]:
        """Yield one problem for each list with entries that fit none of the images that were `found`."""
        files: dict[str, list[tuple[int, bytes]]] = {}
        for path, (file, line) in self._unmatched.items():
            files.setdefault(file, []).append((line, path))
        for file, entries in files.items():
            line, path = entries[0]
            more = f", nor do {len(entries) - 1:,} more lines" if len(entries) > 1 else ""
            message = f"{quote(text(path))} names no image of the snapshot{more}; passed over"
            yield Problem("split-line", "noted", file, line, message)

    def add(self, path: bytes, split: str, file: str, line: int, *, rest: bool) -> None:
        """List an image, without its extension. What came first stays; for a list of the `rest` that is no problem."""
        listed = self._listed.setdefault(path.rpartition(b"/")[2], [])
        earlier = next((other for same, other in listed if same == path), None)
        if earlier is None:
            listed.append((path, split))
            self._unmatched[path] = file, line
        elif earlier != split and not rest:
            message = f"{quote(text(path))} is listed for {split}, but it is in {earlier} already, and stays there"
            self.problems.append(Problem("split-repeated", "repaired", file, line, message))

    def read_yaml(self, layout: Layout, read: Read) -> None:
        """Take the folders that `data.yaml` names; a folder of two splits is of none."""
        if not layout.data_yamls:
            return
        file = layout.data_yamls[0]
        try:
            content = read_data_yaml(read(file), text(file))
        except AnnotationError:
            return  # who needs its classes is told
        base = file[: file.rfind(b"/") + 1]
        folders: dict[bytes, set[str]] = {}
        for split, paths in content.folders.items():
            for path in paths:
                name = _UP.sub(b"", path.replace("\\", "/").encode("utf-8", "replace")).rstrip(b"/")
                folders.setdefault(base + name + b"/" if name not in (b"", b".") else base, set()).add(split)
        self._yaml_folders = sorted((folder, splits.pop()) for folder, splits in folders.items() if len(splits) == 1)

    def _by_list(self, path: bytes) -> str:
        listed = self._listed.get(path.rpartition(b"/")[2], ())
        best, split = 0, ""
        for other, its in listed:
            common = _common_end(path, other)
            if common > best and _fit(other, path):
                best, split = common, its
        return split


def read_splits(read: Read, layout: Layout, open: Callable[[bytes], Data] | None = None) -> ListedSplits:
    """Read all splits of a snapshot; without any, every image is in the split ''. `open` gives a list that is read
    piece by piece; else `read` gives all of it.

    An image in two lists is in the first of train, val and test, and reported. `trainval` counts where train or val has
    no list of its own, for what is in no other list: it is then in the missing one of the two (train, if both are).
    """
    splits = ListedSplits(layout)
    files = [(split_of_name(without_extension(file).rpartition(b"/")[2]), file) for file in layout.image_sets]
    if layout.format.startswith("yolo"):
        named = ((split_of_name(without_extension(file).rpartition(b"/")[2]), file) for file in layout.image_lists)
        files += [(split or file_split(file), file) for split, file in named]
    found = {split for split, _ in files if split}
    for split in _ORDER:
        for of, file in files:
            if of != split or (split == "trainval" and {"train", "val"} <= found):
                continue
            paths, problems = file in layout.image_lists, Problems(text(file))
            for number, _, name in _names((open or read)(file), problems):
                if _is_comment(name) or (paths and not is_image(name)):
                    what = "a comment" if name.startswith(b"#") else "no path of an image"
                    message = f"{quote(text(name))} is {what}; the line is passed over"
                    splits.problems.append(Problem("split-line", "noted", text(file), number, message))
                    continue
                missing = "val" if "train" in found else "train"
                splits.add(
                    _listed_path(name),
                    missing if split == "trainval" else split,
                    text(file),
                    number,
                    rest=split == "trainval",
                )
            splits.problems += problems
    if layout.format == "cvat" and not found | layout.split_folders:
        for file in layout.lists:
            for image, subset in cvat.subsets(read(file)):
                split = split_of_name(subset.encode())
                if split and split != "trainval":
                    path = _listed_path(image.replace("\\", "/").encode())
                    splits.add(path, split, text(file), 0, rest=False)
    if not found:
        splits.read_yaml(layout, read)
    return splits


def cut_down(data: bytes, images: Collection[bytes]) -> bytes:
    """Return a list with those of its lines alone that name one of these images (their paths), as UTF-8."""
    by_name: dict[bytes, list[bytes]] = {}
    for image in images:
        stem = without_extension(image)
        by_name.setdefault(stem.rpartition(b"/")[2], []).append(stem)

    kept = []
    for _, line, name in _names(data, Problems("")):
        stem = _listed_path(name)
        if any(_fit(stem, image) for image in by_name.get(stem.rpartition(b"/")[2], ())):
            kept.append(line + b"\n")
    return b"".join(kept)


def _listed_path(name: bytes) -> bytes:
    """Return a listed path without its extension and what leads up to the list's folder."""
    path = _UP.sub(b"", name)
    return without_extension(path) if is_image(path) else path


def _names(data: Data, problems: Problems) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield the lines of a list that are not empty, comments too: their numbers, all of each, and the names in them. A
    column of -1, 0 and 1 in all lines is no name: lists of single classes have it."""
    flagged = _has_column(data)
    for number, line in _lines(data, problems):
        match = _COLUMN.fullmatch(line) if flagged else None
        yield number, line, match[1] if match and not _is_comment(line) else line


def _has_column(data: Data) -> bool:
    names: set[bytes] = set()
    count, negative = 0, False
    for _, line in _lines(data, Problems("")):
        if not _is_comment(line):
            match = _COLUMN.fullmatch(line)
            if match is None:
                return False
            names.add(match[1])
            count += 1
        negative |= line.endswith(b"-1")
    # Where names would be the same without it, the number is a part of them.
    return negative or len(names) == count


def _is_comment(line: bytes) -> bool:
    return re.match(rb"#+(?:\s|$)", line) is not None  # a name may begin with #


def _lines(data: Data, problems: Problems) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers."""
    if bytes(data[:2]) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        if len(data) > _MAX_RECODED:
            problems.add("line-malformed", "skipped", f"of UTF-16 the first {_MAX_RECODED >> 20} MiB are read")
        data = bytes(data[:_MAX_RECODED]).decode("utf-16", "replace").encode()
    for number, line in read_lines(data, problems, newline=None, errors="surrogateescape"):
        stripped = line.encode("utf-8", "surrogateescape").replace(b"\\", b"/").strip()
        if stripped:
            yield number, stripped


def _fit(listed: bytes, image: bytes) -> bool:
    """Tell whether a path in a list is meant for an image (both without extension): a list's paths begin elsewhere than
    the snapshot's, and two folders alike at the end are enough."""
    common = _common_end(listed, image)
    return common >= 3 or common == 1 + min(listed.count(b"/"), image.count(b"/"))


def _common_end(one: bytes, other: bytes) -> int:
    """Count the components that two paths have in common at their end."""
    common = 0
    for first, second in zip(reversed(one.split(b"/")), reversed(other.split(b"/")), strict=False):
        if first != second:
            break
        common += 1
    return common
