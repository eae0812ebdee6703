"""Data files of a staging area: larger contents, each in a file that has a number.

Used by the engine and the uploader. A file is either *referenced* (a record of the journal names its number, or its
writer is still at it), and then nothing here ever deletes it unasked; or a *clean copy* of an object as it is in the
bucket, kept for who reads what was just written, and dropped, the one used longest ago first, when its room is needed.
Clean copies are known to this process only: after a restart no record refers to them, and `purge()` deletes them.

Numbers grow and are never used twice in an area: 256 files of consecutive numbers share a folder, 256 of these another
one, and the folder of the highest number stays, so each start begins above it.

Any thread. The lock guards the tables (sizes, names not durable yet, clean copies); no system call is made under it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from datacache.core.errors import StagingError, StagingFullError
from datacache.writeback.area_files import sync_folder
from datacache.writeback.room import Room

log = logging.getLogger(__name__)

HIGH_WATERMARK, LOW_WATERMARK = 0.8, 0.7
MAX_CLEAN_COPIES = 20_000
"""Each takes some 400 bytes of memory."""
_MAKE_TRIES = 3
"""The outer folder of a file to be made may be removed this moment, with the last other file in it."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Clean(NamedTuple):
    number: int
    etag: str


class StagedFiles:
    """The data files under one folder, which must be there. One object for an area."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        """Finds what files there are. `limit_bytes` is for them and the journal; 0: what the file system has."""
        self._folder = folder
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        """Bytes each file counts for."""
        self._in_folder: Counter[int] = Counter()
        """How many files each inner folder (number >> 8) has."""
        self._unnamed: set[int] = set()
        """Files whose names are not durable yet."""
        self._new_folders: set[int] = set()
        """Inner folders whose own names are not durable yet."""
        self._clean: OrderedDict[str, _Clean] = OrderedDict()
        """By key, the one used longest ago first."""
        self._journal_bytes = 0
        self._room = Room(folder, limit_bytes=limit_bytes)
        with self._wrapped("looked into"):
            highest_folder = self._scan()
        self._next = (highest_folder + 1) << 8

    def _scan(self) -> int:
        """Read what is there; the highest inner folder, -1 for none."""
        highest = -1
        for inner, path in self._folders():
            highest = max(highest, inner)
            with os.scandir(path) as files:
                for file in files:
                    with contextlib.suppress(ValueError):
                        number = int(file.name, 16)
                        self._sizes[number] = file.stat(follow_symlinks=False).st_blocks * 512
                        self._in_folder[inner] += 1
        self._room.add(sum(self._sizes.values()))
        return highest

    def _folders(self) -> Iterator[tuple[int, Path]]:
        for outer in list(self._folder.iterdir()):
            for path in list(outer.iterdir()):
                with contextlib.suppress(ValueError):
                    yield int(outer.name, 16) << 8 | int(path.name, 16), path

    # --- files ---------------------------------------------------------------------------------------------------

    def __contains__(self, number: int) -> bool:
        """Whether there is a file of this number."""
        return number in self._sizes

    def path(self, number: int) -> Path:
        """Where a file of this number lies, or would."""
        return self._inner_path(number >> 8) / f"{number:x}"

    def _inner_path(self, inner: int) -> Path:
        return self._folder / f"{inner >> 8:06x}" / f"{inner & 0xFF:02x}"

    def create(self) -> int:
        """Make an empty file: its number. `StagingFullError` if the file system has no room for it."""
        while True:
            with self._lock:
                number, self._next = self._next, self._next + 1
                inner = number >> 8
                if not number & 0xFF:
                    self._new_folders.add(inner)
                self._sizes[number] = 0
                self._in_folder[inner] += 1
                self._unnamed.add(number)
            try:
                with self._wrapped("written to"):
                    os.close(self._make(number))
            except FileExistsError:
                self._forget_file(number)
            except BaseException:
                self._forget_file(number)
                raise
            else:
                if not number & 0xFF:
                    self._remove_folder_if_empty(inner - 1)
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
                hint="Nothing but datacache may delete files in a staging area. If its file system lost it, so did we.",
            ) from exc
        except OSError as exc:
            raise self._error(exc, "opened") from exc

    def sync(self, fd: int, number: int) -> None:
        """Make a file's bytes and its name durable. After any error the bytes count as not written: the kernel may have
        thrown them away (fsync(2), EIO)."""
        with self._wrapped("synced"):
            os.fdatasync(fd)
            status = os.fstat(fd)
        with self._lock:
            before = self._sizes.get(number)
            if before is not None:
                # Blocks may be fewer than bytes (compression; ZFS counts late); overwritten bytes were reported twice.
                self._sizes[number] = after = max(status.st_blocks * 512, min(before, status.st_size))
                self._room.add(after - before)
        self.sync_name(number)

    def sync_name(self, number: int) -> None:
        """Make a file's name durable; costs nothing if it is."""
        inner = number >> 8
        with self._lock:
            if number not in self._unnamed:
                return
            names = self._unnamed.intersection(range(inner << 8, (inner + 1) << 8))
            path = self._inner_path(inner)
            folders = [path, path.parent, self._folder] if inner in self._new_folders else [path]
        with self._wrapped("synced"):
            for folder in folders:
                sync_folder(folder)
        with self._lock:
            self._unnamed -= names
            self._new_folders.discard(inner)

    def remove(self, number: int) -> None:
        """Delete a file; one that is not there is fine. Who has it open goes on reading it."""
        with self._wrapped("deleted from"), contextlib.suppress(FileNotFoundError):
            self.path(number).unlink()
        self._forget_file(number)

    def _forget_file(self, number: int) -> None:
        inner = number >> 8
        with self._lock:
            size_bytes = self._sizes.pop(number, None)
            if size_bytes is None:
                return
            self._unnamed.discard(number)
            self._in_folder[inner] -= 1
            folder_empty = not self._in_folder[inner]
        self._room.add(-size_bytes)
        if folder_empty:
            self._remove_folder_if_empty(inner)

    def _remove_folder_if_empty(self, inner: int) -> None:
        """But for the folder of the newest files, in which others may be made this moment; in older ones none are."""
        with self._lock:
            if self._in_folder[inner] > 0 or inner >= self._next >> 8 or inner < 0:
                return
            del self._in_folder[inner]
            self._new_folders.discard(inner)
        path = self._inner_path(inner)
        with contextlib.suppress(OSError):
            path.rmdir()
            if inner >> 8 < self._next >> 16:
                path.parent.rmdir()

    def purge(self, referenced: set[int]) -> int:
        """At the start, before anything else: delete all files but those that a record refers to, clean copies of an
        earlier run among them, and begin numbers above all of them. How many were deleted."""
        with self._lock:
            self._next = max(self._next, (max(referenced, default=-1) >> 8) + 1 << 8)
            gone = [number for number in self._sizes if number not in referenced]
        for number in gone:
            self.remove(number)
        newest = (self._next >> 8) - 1
        with self._wrapped("looked into"):
            for inner, path in list(self._folders()):
                if inner != newest and not self._in_folder[inner]:
                    with contextlib.suppress(OSError):
                        path.rmdir()
        if gone:
            log.info(
                "%s: deleted %d files that no record refers to (copies of uploaded objects)", self._folder, len(gone)
            )
        return len(gone)

    # --- clean copies ----------------------------------------------------------------------------------------------

    def keep(self, key: str, etag: str, number: int, size_bytes: int) -> None:
        """A file is a copy of the object `key` with this ETag and size now, and nothing refers to it any more: nobody
        may have it open for writing. What is no such copy (another size, no ETag) is deleted, and so is an older copy.
        """
        try:
            same = bool(etag) and self.path(number).stat().st_size == size_bytes
        except OSError:
            same = False
        with self._lock:
            drop = [self._clean.pop(key).number] if key in self._clean else []
            if same and number in self._sizes:
                drop = [old for old in drop if old != number]
                self._clean[key] = _Clean(number, etag)
            else:
                drop.append(number)
            while len(self._clean) > MAX_CLEAN_COPIES:
                drop.append(self._clean.popitem(last=False)[1].number)
        self._drop(drop)
        self._room.release()
        self.make_room(0)

    def clean(self, key: str, etag: str) -> int | None:
        """The number of the clean copy of exactly this object. It may be dropped any moment: use `open_clean()` to read
        it."""
        with self._lock:
            found = self._clean.get(key)
            if found is None or found.etag != etag:
                return None
            self._clean.move_to_end(key)
            return found.number

    def open_clean(self, key: str, etag: str) -> int | None:
        """An fd to read the clean copy of exactly this object, for the caller to close; None if there is none. It stays
        readable when the copy is dropped."""
        number = self.clean(key, etag)
        if number is None:
            return None
        try:
            return os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise self._error(exc, "opened") from exc

    def take(self, key: str, etag: str) -> int | None:
        """The number of the clean copy of exactly this object, which is none from now on: it is the caller's, to be
        changed and referred to."""
        with self._lock:
            found = self._clean.get(key)
            if found is None or found.etag != etag:
                return None
            del self._clean[key]
            return found.number

    def rename(self, key: str, new_key: str, etag: str = "") -> None:
        """An object has another key now (and, if given, another ETag): so has its clean copy, if there is one."""
        with self._lock:
            found = self._clean.pop(key, None)
            old = self._clean.pop(new_key, None)
            if found is not None:
                self._clean[new_key] = _Clean(found.number, etag or found.etag)
        self._drop([old.number] if old is not None else [])

    def forget(self, key: str) -> None:
        """Drop a key's clean copy, if there is one."""
        with self._lock:
            found = self._clean.pop(key, None)
        self._drop([found.number] if found is not None else [])

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            try:
                self.remove(number)
            except StagingError as exc:
                log.warning("a copy of an uploaded object cannot be dropped: %s", exc)
                self._forget_file(number)  # the next start tries again

    # --- room ------------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes in use, the journal's and the clean copies' included."""
        return self._room.used_bytes

    @property
    def clean_bytes(self) -> int:
        """Bytes of clean copies."""
        with self._lock:
            return sum(self._sizes.get(found.number, 0) for found in self._clean.values())

    @property
    def capacity_bytes(self) -> int:
        """How many bytes there may be: the limit, or less if the file system has less."""
        with self._wrapped("looked at"):
            return self._room.capacity_bytes()

    def grow(self, number: int, n_bytes: int) -> None:
        """A file has this many more bytes than before; fewer, if negative."""
        with self._lock:
            if number not in self._sizes:
                return
            n_bytes = max(n_bytes, -self._sizes[number])
            self._sizes[number] += n_bytes
            self._room.add(n_bytes)

    def set_journal_bytes(self, size_bytes: int) -> None:
        """The journal takes this much of the room."""
        with self._lock:
            before, self._journal_bytes = self._journal_bytes, size_bytes
            self._room.add(size_bytes - before)

    def pressure(self) -> float:
        """Share of what there may be that is in use."""
        capacity = self.capacity_bytes
        return min(1.0, self.used_bytes / capacity) if capacity > 0 else 1.0

    def make_room(self, n_bytes: int) -> bool:
        """Whether `n_bytes` more may be written. Where that leads above the high watermark, clean copies are dropped
        first, down to the low one, and never anything else."""
        capacity = self.capacity_bytes
        if self.used_bytes + n_bytes > HIGH_WATERMARK * capacity:
            self._drop_clean(int(self.used_bytes + n_bytes - LOW_WATERMARK * capacity))
            capacity = self.capacity_bytes
        return self.used_bytes + n_bytes <= capacity

    def _drop_clean(self, n_bytes: int) -> int:
        """Drop clean copies until this much came free or there are none: how much did."""
        freed, numbers = 0, []
        with self._lock:
            while self._clean and freed < n_bytes:
                _, found = self._clean.popitem(last=False)
                freed += self._sizes.get(found.number, 0)
                numbers.append(found.number)
        self._drop(numbers)
        return freed

    def wait_for_room(self, n_bytes: int, timeout_s: float, *, refused: bool = False) -> None:
        """Return when `n_bytes` more may be written. `StagingFullError` if that takes longer than `timeout_s`, at once
        if they can never be.

        `refused`: the file system has just said ENOSPC (or EDQUOT), whatever our own numbers say. Then this returns as
        soon as something came free, after a second at the latest, since others may have freed something: try again,
        with what is left of the time.
        """
        began_s = time.monotonic()
        while True:
            releases = self._room.releases()
            if refused:
                with self._wrapped("looked at"):
                    self._room.capacity_bytes(fresh=True)
                if self._drop_clean(n_bytes):
                    return
            elif self.make_room(n_bytes):
                return
            left_s = timeout_s - (time.monotonic() - began_s)
            if left_s <= 0 or not self._room.ever_fits(n_bytes):
                raise self._room.full(n_bytes, time.monotonic() - began_s)
            self._room.wait(releases, left_s)
            if refused:
                return

    @contextlib.contextmanager
    def _wrapped(self, what: str) -> Iterator[None]:
        """What the file system refuses becomes a `StagingError`; that a file is there already does not."""
        try:
            yield
        except (StagingError, FileExistsError):
            raise
        except OSError as exc:
            raise self._error(exc, what) from exc

    def _error(self, exc: OSError, what: str) -> StagingError:
        if exc.errno in _FULL:
            return StagingFullError(
                f"the file system of the staging area {self._folder} is full: {exc.strerror}",
                hint="Free some room there. Room also comes free as files are uploaded: see dsctl status.",
            )
        error = StagingError(
            f"the staging area {self._folder} cannot be {what}: {exc.strerror}", hint="See to its file system."
        )
        error.errno = exc.errno
        return error
