"""Files that have numbers for names: making, finding and deleting them, and making their names durable.

Used by `files.StagedFiles`, which knows what they are for. 256 files of consecutive numbers share an inner folder, 256
of these an outer one. Numbers grow and are never used twice: a folder goes with its last file, but that of the highest
numbers stays, and the next start begins with a new one above it.

Any thread. The lock guards the tables; no system call is made under it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from datacache.core.disk import sync_folder
from datacache.core.errors import StagingError
from datacache.writeback.staging.area import reaching, unreachable

_MAKE_TRIES = 3
"""The outer folder of a file to be made may be removed this moment, with the last other file in it."""


class NumberedFiles:
    """The files under one folder, which must be there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._next = 0
        self._in_folder: Counter[int] = Counter()
        """How many files each inner folder (number >> 8) has, those that are just being made included."""
        self._unnamed: set[int] = set()
        """Files whose names are not durable yet."""
        self._new_folders: set[int] = set()
        """Inner folders whose own names are not durable yet."""

    def scan(self) -> Iterator[tuple[int, int]]:
        """At the start, to its end: number and allocated bytes of each file that is there."""
        for inner, path in self._folders():
            self.begin_above(inner << 8)
            with os.scandir(path) as files:
                for file in files:
                    with contextlib.suppress(ValueError):
                        number = int(file.name, 16)
                        allocated = file.stat(follow_symlinks=False).st_blocks * 512
                        self._in_folder[number >> 8] += 1
                        yield number, allocated

    def _folders(self) -> Iterator[tuple[int, Path]]:
        for outer in list(self._folder.iterdir()):
            with contextlib.suppress(ValueError):
                high = int(outer.name, 16) << 8
                for path in list(outer.iterdir()):
                    with contextlib.suppress(ValueError):
                        yield high | int(path.name, 16), path

    def begin_above(self, number: int) -> None:
        """Files are made with higher numbers than this one, in a folder of their own."""
        with self._lock:
            self._next = max(self._next, ((number >> 8) + 1) << 8)

    def remove_empty_folders(self) -> None:
        """At the start, after `scan()`: but for the newest, in whose name the highest number is."""
        found = list(self._folders())
        newest = max((inner for inner, _ in found), default=-1)
        for inner, path in found:
            if inner != newest and not self._in_folder[inner]:
                with contextlib.suppress(OSError):
                    path.rmdir()
                    path.parent.rmdir()

    def path(self, number: int) -> Path:
        """Where a file lies, or would."""
        return self._inner_path(number >> 8) / f"{number:x}"

    def _inner_path(self, inner: int) -> Path:
        return self._folder / f"{inner >> 8:06x}" / f"{inner & 0xFF:02x}"

    def create(self) -> int:
        """Make an empty file. `StagingFullError` if the file system has no room for it."""
        while True:
            with self._lock:
                number, self._next = self._next, self._next + 1
                if not number & 0xFF:
                    self._new_folders.add(number >> 8)
                self._in_folder[number >> 8] += 1
                self._unnamed.add(number)
            try:
                with reaching(self._folder, "written to"):
                    os.close(self._make(number))
            except FileExistsError:  # a file that a former owner of the area has made since: it is left alone
                self._count_out(number)
            except BaseException:
                self._count_out(number)
                raise
            else:
                if not number & 0xFF:
                    self._remove_folder_if_empty((number >> 8) - 1)
                return number

    def _make(self, number: int) -> int:
        path, flags = self.path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for _ in range(_MAKE_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, flags, 0o600)
            with contextlib.suppress(FileNotFoundError):  # the first one in its folder
                for folder in (path.parent.parent, path.parent):
                    folder.mkdir(mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)

    def open(self, number: int) -> int:
        """An fd to read and write a file, for the caller to close. `StagingError` if it is not there."""
        try:
            return os.open(self.path(number), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            raise StagingError(
                f"the staged file {self.path(number)} is not there",
                hint="Only datacache may delete files in a staging area. See to its file system, and to who cleans it.",
            ) from exc
        except OSError as exc:
            raise unreachable(self._folder, "opened", exc) from exc

    def open_to_read(self, number: int) -> int | None:
        """As `open()`, but only to read; None if it is not there."""
        with reaching(self._folder, "read"), contextlib.suppress(FileNotFoundError):
            return os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC)
        return None

    def sync_name(self, number: int) -> None:
        """Make a file's name durable, and with it those of its neighbours; costs nothing if it is."""
        inner = number >> 8
        with self._lock:
            if number not in self._unnamed:
                return
            names = self._unnamed.intersection(range(inner << 8, (inner + 1) << 8))
            path = self._inner_path(inner)
            folders = [path, path.parent, self._folder] if inner in self._new_folders else [path]
        with reaching(self._folder, "synced"):
            for folder in folders:
                sync_folder(folder)
        with self._lock:
            self._unnamed -= names
            self._new_folders.discard(inner)

    def remove(self, number: int) -> None:
        """Delete a file that is there, to be called once. Who has it open goes on reading it. Not durable: after a
        power loss it may be there again."""
        with reaching(self._folder, "written to"), contextlib.suppress(FileNotFoundError):
            self.path(number).unlink()
        self._count_out(number)

    def _count_out(self, number: int) -> None:
        with self._lock:
            self._unnamed.discard(number)
            self._in_folder[number >> 8] -= 1
        self._remove_folder_if_empty(number >> 8)

    def _remove_folder_if_empty(self, inner: int) -> None:
        """But for the folder of the newest files, where others may be made this moment; in older ones none are."""
        with self._lock:
            if inner < 0 or self._in_folder[inner] > 0 or inner >= (self._next - 1) >> 8:
                return
            del self._in_folder[inner]
            self._new_folders.discard(inner)
            outer_is_newest = inner >> 8 == (self._next - 1) >> 16
        path = self._inner_path(inner)
        with contextlib.suppress(OSError):
            path.rmdir()
            if not outer_is_newest:
                path.parent.rmdir()
