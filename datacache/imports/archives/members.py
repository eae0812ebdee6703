"""The members of an archive that are safe to take, whatever kind of archive it is.

The readers (`zip`, `tar`, and `FolderExport`) are subclasses of `Export`, which refuses names that lead out of the
snapshot or are there twice, and more members or bytes than the limits. One thread.

Links inside a folder are followed to files and folders inside it. A link that leads out is refused, because somebody
else made the folder. Times of its files are not kept: copying the folder changes them, and the snapshot's id must not
follow.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from datacache.core.errors import ImportFailedError, UsageError
from datacache.imports.places import from_archive, is_junk, unusable

RATIO_FROM_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class UnpackLimits:
    """Bound what an archive may unpack to."""

    members: int = 500_000
    total_bytes: int = 50 * 2**30
    member_bytes: int = 2**30
    """Storage of objects takes no larger file."""
    ratio: int = 200
    """How many times larger a member above `RATIO_FROM_BYTES` may be than in the archive; of a tar, all of it."""


class Member(NamedTuple):
    """One file of an export."""

    path: str
    """In the snapshot."""
    name: str
    """In the archive, for messages."""
    size_bytes: int
    mtime_ns: int
    at: Any
    """The reader's note of where the bytes are."""


class Export:
    """An open export. Close it.

    A reader's `__init__` counts every member of any kind and adds those that are files, then sorts `members`.
    """

    def __init__(self, shown: str, limits: UnpackLimits) -> None:
        self.shown = shown
        self._limits = limits
        self.members: list[Member] = []
        """In byte order of their paths, without the files that desktops leave behind."""
        self.passed_over = 0
        """The number of such files."""
        self._names: dict[str, str] = {}
        self._counted = 0
        self._total_bytes = 0

    def read(self) -> Iterator[tuple[Member, bytes]]:
        """Yield every member with its bytes, in an order that depends on the export alone. `ImportFailedError` for a
        damaged one."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the archive's file."""

    def count(self, name: str) -> None:
        """Count a member of any kind."""
        self._counted += 1
        if self._counted > self._limits.members:
            raise self.over("members", f"it has more than {self._limits.members:,} members (at {name!r})")

    def add(self, name: str, size_bytes: int, mtime_ns: int, at: Any, *, literal: bool = False) -> None:
        """Add a file. `literal` is for names of this machine's file system, where a backslash is a letter."""
        path = name if literal else from_archive(name)
        if is_junk(path):
            self.passed_over += 1
            return
        why = unusable(path.replace("\\", "_") if literal else path)
        if why:
            raise self.refused(name, why)
        if path in self._names:
            also = self._names[path]
            raise self.refused(name, "it is there twice" if also == name else f"it and {also!r} are one path")
        if size_bytes > self._limits.member_bytes:
            raise self.over("member", f"{name!r} has {size_bytes:,} bytes, more than {self._limits.member_bytes:,}")
        self._total_bytes += size_bytes
        if self._total_bytes > self._limits.total_bytes:
            raise self.over("total", f"it unpacks to more than {self._limits.total_bytes:,} bytes")
        self._names[path] = name
        self.members.append(Member(path, name, size_bytes, mtime_ns, at))

    def sort(self) -> None:
        """Bring the members into byte order, once all are added."""
        self.members.sort(key=lambda member: member.path.encode("utf-8", "surrogateescape"))
        self._names.clear()

    def refused(self, name: str, why: str, *, hint: str = "") -> ImportFailedError:
        """Return the error for a member that cannot be taken."""
        return ImportFailedError(f"{self.shown}: {name!r} cannot be taken: {why}", hint=hint)

    def over(self, limit: str, what: str) -> ImportFailedError:
        """Return the error for an archive above a limit."""
        return ImportFailedError(
            f"{self.shown} is refused: {what}",
            hint=f"If it is what it should be, raise the limit: --unpack-limit {limit}=…",
        )

    def damaged(self, name: str, why: str) -> ImportFailedError:
        """Return the error for a member whose bytes changed, or, with '' for a name, for the archive."""
        what = f"{name!r} is damaged" if name else "the archive is damaged"
        return ImportFailedError(f"{self.shown}: {what}: {why}", hint="Export it, or copy it, again.")


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
