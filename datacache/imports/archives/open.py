"""Open an export of any kind: a zip, a tar, a folder, or a single JSON file. Used by `imports.export`. One thread.

Links inside a folder are followed to files and folders inside it. A link that leads out is refused, because somebody
else made the folder. Times of its files are not kept: copying the folder changes them, and the snapshot's id must not
follow.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from datacache.core.errors import UsageError
from datacache.imports.archives.members import Export, Member, UnpackLimits
from datacache.imports.archives.tar import TarExport, is_tar
from datacache.imports.archives.zip import ZipExport, is_zip

_SPLITS = ("train", "val", "valid", "test")
_LAYOUT_FOLDERS = frozenset(
    ["annotations", "annotation", "jpegimages", "images", "imagesets", "labels", "obj_train_data", *_SPLITS]
)
_LAYOUT_FILES = frozenset(
    ["data.yaml", "data.yml", "dataset.yaml", "obj.names", "obj.data", "classes.txt", "labelmap.txt"]
)
_MAX_LEADING = 3


def open_export(path: Path | str, limits: UnpackLimits) -> Export:
    """Open a zip, a tar (also compressed), a folder or a JSON file, and look through its members.

    `UsageError` for anything else, `ImportFailedError` for an export that is damaged or not safe.
    """
    shown = str(path)
    if "://" in shown and not shown.startswith("file://"):
        raise UsageError(f"{shown} is not on this machine", hint="Fetch it first; exports are read from local files.")
    place = Path(shown.removeprefix("file://")).expanduser().absolute()
    if place.is_dir():
        return FolderExport(place, limits)
    try:
        with open(place, "rb") as file:
            head = file.read(1 << 10)
    except OSError as exc:
        raise UsageError(f"{place} cannot be opened: {exc.strerror}") from exc
    if is_zip(head):
        return ZipExport(place, limits)
    if is_tar(head):
        return TarExport(place, limits)
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") and place.suffix.lower() == ".json":
        return FolderExport(place, limits)
    raise UsageError(
        f"{place} is no export that can be read", hint="Give a zip, a tar, a folder, or a .json file of COCO."
    )


class FolderExport(Export):
    """All files below a folder, or a single file."""

    def __init__(self, place: Path, limits: UnpackLimits) -> None:
        super().__init__(place.name or str(place), limits)
        if place.is_dir():
            self._root = os.path.realpath(place)
            self._walk(self._root, "", (self._root,))
            self.sort()
        else:
            self.add(place.name, place.stat().st_size, 0, str(place), literal=True)

    def read(self) -> Iterator[tuple[Member, bytes]]:
        """Yield the members by path. A file must be as long as when it was looked at."""
        for member in self.members:
            yield member, self._read(member)

    def _walk(self, folder: str, prefix: str, above: tuple[str, ...]) -> None:
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        except OSError as exc:
            raise UsageError(f"{folder} cannot be read: {exc.strerror}") from exc
        for entry in entries:
            name = prefix + entry.name
            self.count(name)
            place = os.path.realpath(entry.path)
            if place != self._root and not place.startswith(self._root.rstrip("/") + "/"):
                raise self.refused(name, "it is a link that leads out of the folder")
            try:
                info = os.stat(place)
            except OSError as exc:
                raise self.refused(name, f"it cannot be looked at ({exc.strerror})") from exc
            if stat.S_ISDIR(info.st_mode):
                if place in above:
                    raise self.refused(name, "it is a link to a folder above it")
                self._walk(place, f"{name}/", (*above, place))
            elif stat.S_ISREG(info.st_mode):
                self.add(name, info.st_size, 0, place, literal=True)
            else:
                raise self.refused(name, "it is no file or folder")

    def _read(self, member: Member) -> bytes:
        try:
            # O_NONBLOCK: opening a pipe that took the file's name would wait for a writer.
            with open(os.open(member.at, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise self.damaged(member.name, "it is no file any more")
                data = file.read(member.size_bytes + 1)
        except OSError as exc:
            raise self.damaged(member.name, f"it cannot be read ({exc.strerror})") from exc
        if len(data) != member.size_bytes:
            raise self.damaged(member.name, "it changed while it was read")
        return data


def leading_folders(members: list[Member]) -> str:
    """Return the folders that all members lie in and that hide a known layout: `export/` of `export/Annotations/a.xml`.

    '' unless a layout (VOC, YOLO, COCO) is recognised below them and not at the root. At most three folders.
    """
    if not members:
        return ""
    shared = members[0].path.split("/")[:-1][:_MAX_LEADING]
    for member in members:
        parts = member.path.split("/")[:-1]
        while shared and parts[: len(shared)] != shared:
            shared.pop()
    for depth in range(len(shared) + 1):
        skip = sum(len(part) + 1 for part in shared[:depth])
        for member in members:
            first, slash, _ = member.path[skip:].partition("/")
            if first.lower() in (_LAYOUT_FOLDERS if slash else _LAYOUT_FILES):
                return members[0].path[:skip]
    return ""
