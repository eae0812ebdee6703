"""Folders and single files of this machine as exports. One thread.

Links inside the folder are followed to files and folders inside it; one that leads out is refused, because an export is
what somebody sent. Times are not kept: copying a folder changes them, and the snapshot's id must not follow.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from datacache.core.errors import UsageError
from datacache.imports.archives.archive import Member, Members, UnpackLimits, damaged


class FolderExport:
    """All files below a folder. Close it."""

    def __init__(self, folder: Path, limits: UnpackLimits) -> None:
        self._shown = folder.name or str(folder)
        self._root = os.path.realpath(folder)
        members = Members(self._shown, limits)
        self._walk(members, self._root, "", (self._root,))
        self.members = members.sorted()
        self.passed_over = members.passed_over

    def read(self) -> Iterator[tuple[Member, bytes]]:
        """See `Export`: by path."""
        for member in self.members:
            yield member, _read(self._shown, member)

    def close(self) -> None:
        """See `Export`: nothing is open."""

    def _walk(self, members: Members, folder: str, prefix: str, above: tuple[str, ...]) -> None:
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        except OSError as exc:
            raise UsageError(f"{folder} cannot be read: {exc.strerror}") from exc
        for entry in entries:
            name = prefix + entry.name
            members.count(name)
            place = os.path.realpath(entry.path)
            if place != self._root and not place.startswith(self._root.rstrip("/") + "/"):
                raise members.refused(name, "it is a link that leads out of the folder")
            try:
                info = os.stat(place)
            except OSError as exc:
                raise members.refused(name, f"it cannot be looked at ({exc.strerror})") from exc
            if stat.S_ISDIR(info.st_mode):
                if place in above:
                    raise members.refused(name, "it is a link to a folder above it")
                self._walk(members, place, f"{name}/", (*above, place))
            elif stat.S_ISREG(info.st_mode):
                members.add(name, info.st_size, 0, place, literal=True)
            else:
                raise members.refused(name, "it is no file or folder")


class FileExport:
    """One file. Close it."""

    def __init__(self, file: Path, limits: UnpackLimits) -> None:
        self._shown = file.name
        members = Members(self._shown, limits)
        members.add(file.name, file.stat().st_size, 0, str(file), literal=True)
        self.members = members.sorted()
        self.passed_over = 0

    def read(self) -> Iterator[tuple[Member, bytes]]:
        """See `Export`."""
        for member in self.members:
            yield member, _read(self._shown, member)

    def close(self) -> None:
        """See `Export`: nothing is open."""


def _read(shown: str, member: Member) -> bytes:
    """The file's bytes; no more and no fewer than when it was looked at."""
    try:
        # O_NONBLOCK: the open of a pipe that took the file's name would wait for a writer.
        with open(os.open(member.at, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise damaged(shown, member.name, "it is no file any more")
            data = file.read(member.size_bytes + 1)
    except OSError as exc:
        raise damaged(shown, member.name, f"it cannot be read ({exc.strerror})") from exc
    if len(data) != member.size_bytes:
        raise damaged(shown, member.name, "it changed while it was read")
    return data
