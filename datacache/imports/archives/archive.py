"""What an annotation tool exported, as a list of members that are safe to take, and their bytes.

`open_export` gives one of: a zip (`zip_archive`), a tar (`tar_archive`), a folder or a single file (`folder`). They
read members as streams and never write to disk. What every kind must refuse is refused here, before any of it is read:
names that lead out of the snapshot or are there twice, and more members or bytes than the limits. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from datacache.core.errors import ImportFailedError, UsageError
from datacache.imports.places import from_archive, is_junk, unusable

_SPLITS = ("train", "val", "valid", "test")
_LAYOUT_FOLDERS = frozenset(
    ["annotations", "annotation", "jpegimages", "images", "imagesets", "labels", "obj_train_data", *_SPLITS]
)
_LAYOUT_FILES = frozenset(
    ["data.yaml", "data.yml", "dataset.yaml", "obj.names", "obj.data", "classes.txt", "labelmap.txt"]
)
_MAX_LEADING = 3


@dataclass(frozen=True, kw_only=True)
class UnpackLimits:
    """How much an archive may unpack to."""

    members: int = 500_000
    total_bytes: int = 50 * 2**30
    member_bytes: int = 2**30
    """The most that one file may have; objects storage takes no more."""
    ratio: int = 200
    """How many times larger than in the archive a member above `RATIO_FROM_BYTES` may be (for a tar: all of it)."""


RATIO_FROM_BYTES = 16 * 2**20


class Member(NamedTuple):
    """One file of an export."""

    path: str
    """In the snapshot."""
    name: str
    """In the archive, for messages."""
    size_bytes: int
    mtime_ns: int
    at: Any
    """Where it is; its archive knows."""


class Export(Protocol):
    """An open export. Close it."""

    members: list[Member]
    """By path, in byte order; without what desktops leave behind."""
    passed_over: int
    """How many members were such."""

    def read(self) -> Iterator[tuple[Member, bytes]]:
        """Every member with its bytes, in an order that depends on the export alone. `ImportFailedError` for one that
        is damaged."""
        ...

    def close(self) -> None:
        """Close its file."""
        ...


class Members:
    """Collects the members of one archive and refuses what is not safe. `shown` is the archive in messages.

    Every member of any kind is counted (`count`), those that are files are added.
    """

    def __init__(self, shown: str, limits: UnpackLimits) -> None:
        self._shown, self._limits = shown, limits
        self._members: list[Member] = []
        self._names: dict[str, str] = {}
        self._seen = 0
        self._total_bytes = 0
        self.passed_over = 0

    def add(self, name: str, size_bytes: int, mtime_ns: int, at: Any, *, literal: bool = False) -> None:
        """One file. `literal` for names of this machine's file system, in which a backslash is a letter."""
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
        self._members.append(Member(path, name, size_bytes, mtime_ns, at))

    def count(self, name: str) -> None:
        """A member of any kind has been seen."""
        self._seen += 1
        if self._seen > self._limits.members:
            raise self.over("members", f"it has more than {self._limits.members:,} members (at {name!r})")

    def check_ratio(self, name: str, size_bytes: int, packed_bytes: int) -> None:
        """Whether a member may be so much larger than it is in the archive."""
        if size_bytes > RATIO_FROM_BYTES and size_bytes > self._limits.ratio * packed_bytes:
            times = size_bytes // max(packed_bytes, 1)
            raise self.over("ratio", f"{name!r} unpacks to {times:,} times its size, more than {self._limits.ratio:,}")

    def sorted(self) -> list[Member]:
        """All of them, by path."""
        return sorted(self._members, key=lambda member: member.path.encode("utf-8", "surrogateescape"))

    def refused(self, name: str, why: str, *, hint: str = "") -> ImportFailedError:
        """The error for a member that cannot be taken."""
        return refused(self._shown, name, why, hint=hint)

    def over(self, limit: str, what: str) -> ImportFailedError:
        """The error for an archive above a limit."""
        return ImportFailedError(
            f"{self._shown} is refused: {what}",
            hint=f"If it is what it should be, raise the limit: --unpack-limit {limit}=…",
        )


def refused(shown: str, name: str, why: str, *, hint: str = "") -> ImportFailedError:
    """The error for a member that cannot be taken."""
    return ImportFailedError(f"{shown}: {name!r} cannot be taken: {why}", hint=hint)


def damaged(shown: str, name: str, why: str) -> ImportFailedError:
    """The error for a member whose bytes are not what they were, or an archive that is not whole (`name` is '')."""
    what = f"{name!r} is damaged" if name else "the archive is damaged"
    return ImportFailedError(f"{shown}: {what}: {why}", hint="Export it, or copy it, again.")


def open_export(path: Path | str, limits: UnpackLimits) -> Export:
    """Open a zip, a tar (also compressed), a folder or a JSON file, and look through its members.

    `UsageError` for anything else, `ImportFailedError` for what is damaged or not safe.
    """
    from datacache.imports.archives.folder import FileExport, FolderExport
    from datacache.imports.archives.tar import TarExport, is_tar
    from datacache.imports.archives.zip import ZipExport, is_zip

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
        return FileExport(place, limits)
    raise UsageError(
        f"{place} is no export that can be read", hint="Give a zip, a tar, a folder, or a .json file of COCO."
    )


def leading_folders(members: list[Member]) -> str:
    """The folders that all members lie in and that hide a known layout: `export/` of `export/Annotations/a.xml`.

    '' unless what lies below them is recognised (VOC, YOLO, COCO) and the root is not; at most three folders.
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
        if any(map(_is_layout, (member.path[skip:] for member in members))):
            return members[0].path[:skip]
    return ""


def _is_layout(path: str) -> bool:
    first, slash, _rest = path.partition("/")
    return first.lower() in (_LAYOUT_FOLDERS if slash else _LAYOUT_FILES)
