"""Data files of a staging area: larger contents, each in a file that has a number; and the room that they take.

Used by the engine and the uploader. A file is either *referenced* (a record of the journal names its number, or its
writer is still at it), and then nothing here ever deletes it unasked; or a *clean copy* of an object as it is in the
bucket, kept for readers of what was just written, and dropped, the one used longest ago first, when its room is needed.
Clean copies are known to this process only: after a restart no record refers to them, and `purge()` deletes them.

256 files of consecutive numbers share an inner folder, 256 of these an outer one. Numbers grow and are never used
twice: a folder goes with its last file, but that of the highest numbers stays, and the next start begins with a new one
above it.

Any thread. The locks guard the tables and numbers; no system call is made under them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from datacache.core.disk import sync_folder
from datacache.core.errors import StagingError, StagingFullError
from datacache.writeback.staging.area import reaching, unreachable

log = logging.getLogger(__name__)

HIGH_WATERMARK, LOW_WATERMARK = 0.8, 0.7
MAX_CLEAN_COPIES = 20_000
"""Each takes some 400 bytes of memory."""
SAMPLE_EVERY_S = 1.0
_RESERVE_BYTES = 64 << 20
_JOURNAL_SHARE = 16
"""Dead records of the journal take a 16th of the limit at most: two segments (`api.open_bucket`)."""
_RESERVE_SHARE = 50
"""Left free of the file system, a 50th of it at most: what is full to the last block cannot be tidied up either."""
WATCHED_BYTES = 64 << 10
"""Bytes of the pieces in which writes to watched files are noted."""
_MAKE_TRIES = 3
"""The outer folder of a file to be made may be removed this moment, with the last other file in it."""


class _Clean(NamedTuple):
    number: int
    etag: str


class StagedFiles:
    """The data files under one folder, which must be there. One object for an area."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        """Find what files there are. `limit_bytes` is for them and the journal; 0: what the file system has."""
        self._folder = folder
        self._lock = threading.Lock()
        self._clean: OrderedDict[str, _Clean] = OrderedDict()
        """By key, the one used longest ago first."""
        self._next = 0
        self._in_folder: Counter[int] = Counter()
        """How many files each inner folder (number >> 8) has, those that are just being made included."""
        self._unnamed: set[int] = set()
        """Files whose names are not durable yet."""
        self._new_folders: set[int] = set()
        """Inner folders whose own names are not durable yet."""
        self._sizes: dict[int, int] = {}
        """Bytes that each file counts for."""
        self._written: dict[int, set[int]] = {}
        """Watched files, and which pieces of them were written since `take_written`."""
        self._journal_bytes = 0
        self._room = Room(folder, limit_bytes=limit_bytes)
        with reaching(folder, "looked into"):
            for inner, path in self._folders():
                self._begin_above(inner << 8)
                with os.scandir(path) as files:
                    for file in files:
                        with contextlib.suppress(ValueError):
                            number = int(file.name, 16)
                            self._sizes[number] = file.stat(follow_symlinks=False).st_blocks * 512
                            self._in_folder[number >> 8] += 1
        self._room.add(sum(self._sizes.values()))

    def __contains__(self, number: int) -> bool:
        """Return whether there is a file of this number."""
        return number in self._sizes

    def path(self, number: int) -> Path:
        """Return where a file of this number lies, or would."""
        return self._inner_path(number >> 8) / f"{number:x}"

    def _inner_path(self, inner: int) -> Path:
        return self._folder / f"{inner >> 8:06x}" / f"{inner & 0xFF:02x}"

    def create(self) -> int:
        """Make an empty file and return its number, higher than any before it. `StagingFullError` if the file system
        has no room for it."""
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
                with self._lock:
                    self._sizes[number] = 0
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

    def adopt(self, number: int) -> int:
        """Open a file of a number that somebody else has chosen, and make it where it is not there. Return an fd."""
        with self._lock:
            if number not in self._sizes:
                self._sizes[number] = 0
                self._next = max(self._next, number + 1)
                self._in_folder[number >> 8] += 1
                self._unnamed.add(number)
                self._new_folders.add(number >> 8)
        with contextlib.suppress(FileExistsError), reaching(self._folder, "written to"):
            return self._make(number)
        return self.open(number)

    def numbers(self) -> list[int]:
        """Return the numbers of all files."""
        with self._lock:
            return list(self._sizes)

    def note_written(self, number: int, start: int, stop: int) -> None:
        """Take note that a file's bytes are other ones now. Call this after they were written."""
        if self._written:
            with self._lock:
                pieces = self._written.get(number)
                if pieces is not None:
                    pieces.update(range(start // WATCHED_BYTES, -(-stop // WATCHED_BYTES)))

    def take_written(self, number: int) -> list[int] | None:
        """Watch a file from now on. Return the pieces that were written since the last call, for the first one None."""
        with self._lock:
            pieces = self._written.get(number)
            self._written[number] = set()
        return None if pieces is None else sorted(pieces)

    def watch_none(self) -> None:
        """Watch no file any more."""
        with self._lock:
            self._written.clear()

    def open(self, number: int) -> int:
        """Return an fd to read and write a file, for the caller to close. `StagingError` if it is not there."""
        try:
            return os.open(self.path(number), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            raise StagingError(
                f"the staged file {self.path(number)} is not there",
                hint="Only datacache may delete files in a staging area. See to its file system, and to who cleans it.",
            ) from exc
        except OSError as exc:
            raise unreachable(self._folder, "opened", exc) from exc

    def sync(self, fd: int, number: int) -> None:
        """Make a file's bytes and its name durable. After an error the bytes count as not written: the kernel may have
        thrown them away (fsync(2), EIO)."""
        with reaching(self._folder, "synced"):
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
        """Delete a file; one that is not there is fine. Open descriptors stay readable. Not durable: after a power
        loss it may be there again."""
        with self._lock:
            size_bytes = self._sizes.pop(number, None)
            self._written.pop(number, None)
        if size_bytes is None:
            return
        try:
            with reaching(self._folder, "written to"), contextlib.suppress(FileNotFoundError):
                self.path(number).unlink()
        except StagingError:
            with self._lock:
                self._sizes[number] = size_bytes
            raise
        self._count_out(number)
        self._room.add(-size_bytes)

    def _count_out(self, number: int) -> None:
        with self._lock:
            self._unnamed.discard(number)
            self._in_folder[number >> 8] -= 1
        self._remove_folder_if_empty(number >> 8)

    def _remove_folder_if_empty(self, inner: int) -> None:
        """Remove an inner folder without files, but for that of the newest: others may be made there this moment."""
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

    def _folders(self) -> Iterator[tuple[int, Path]]:
        for outer in list(self._folder.iterdir()):
            with contextlib.suppress(ValueError):
                high = int(outer.name, 16) << 8
                for path in list(outer.iterdir()):
                    with contextlib.suppress(ValueError):
                        yield high | int(path.name, 16), path

    def purge(self, referenced: set[int]) -> int:
        """Delete all files but those that a record refers to, clean copies of an earlier run among them, and begin
        numbers above all of them: at the start, before anything else. Return how many were deleted."""
        self._begin_above(max(referenced, default=-1))
        gone = [number for number in self._sizes if number not in referenced]
        for number in gone:
            self.remove(number)
        with reaching(self._folder, "looked into"):
            found = list(self._folders())
        newest = max((inner for inner, _ in found), default=-1)  # in whose name the highest number is
        for inner, path in found:
            if inner != newest and not self._in_folder[inner]:
                with contextlib.suppress(OSError):
                    path.rmdir()
                    path.parent.rmdir()
        if gone:
            log.info(
                "%s: deleted %d files that no record refers to (copies of uploaded objects)", self._folder, len(gone)
            )
        return len(gone)

    def _begin_above(self, number: int) -> None:
        """Have files made with higher numbers than this one, in a folder of their own."""
        with self._lock:
            self._next = max(self._next, ((number >> 8) + 1) << 8)

    # --- clean copies ----------------------------------------------------------------------------------------------

    def keep(self, key: str, etag: str, number: int, size_bytes: int) -> None:
        """Keep a file as a copy of the object `key` with this ETag and size, as nothing refers to it any more: nobody
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
        """Return the number of the clean copy of exactly this object. It may be dropped any moment: use `open_clean()`
        to read it."""
        with self._lock:
            found = self._clean.get(key)
            if found is None or found.etag != etag:
                return None
            self._clean.move_to_end(key)
            return found.number

    def open_clean(self, key: str, etag: str) -> int | None:
        """Return an fd to read the clean copy of exactly this object, for the caller to close; None if there is none.
        It stays readable when the copy is dropped."""
        number = self.clean(key, etag)
        if number is not None:
            with reaching(self._folder, "read"), contextlib.suppress(FileNotFoundError):
                return os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC)
        return None

    def take(self, key: str, etag: str) -> int | None:
        """Return the number of the clean copy of exactly this object, which is none from now on: it is the caller's, to
        be changed and referred to."""
        with self._lock:
            found = self._clean.get(key)
            if found is None or found.etag != etag:
                return None
            del self._clean[key]
            return found.number

    def rename(self, key: str, new_key: str, etag: str = "") -> None:
        """Give an object's clean copy, if there is one, the object's new key and, if given, its new ETag."""
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

    # --- room ------------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Return the bytes in use, the journal's and the clean copies' included."""
        return self._room.used_bytes

    @property
    def clean_bytes(self) -> int:
        """Return the bytes of clean copies."""
        with self._lock:
            return sum(self._sizes.get(found.number, 0) for found in self._clean.values())

    @property
    def capacity_bytes(self) -> int:
        """Return how many bytes there may be: the limit, or less if the file system has less."""
        try:
            return self._room.capacity_bytes()
        except OSError as exc:
            raise unreachable(self._folder, "looked at", exc) from exc

    def grow(self, number: int, n_bytes: int) -> None:
        """Count that a file has this many more bytes than before; fewer, if negative."""
        with self._lock:
            if number not in self._sizes:
                return
            n_bytes = max(n_bytes, -self._sizes[number])
            self._sizes[number] += n_bytes
            self._room.add(n_bytes)

    def set_journal_bytes(self, size_bytes: int) -> None:
        """Count how much of the room the journal takes."""
        with self._lock:
            before, self._journal_bytes = self._journal_bytes, size_bytes
            self._room.add(size_bytes - before)

    def pressure(self) -> float:
        """Return the share of what there may be that is in use."""
        capacity = self.capacity_bytes
        return min(1.0, self.used_bytes / capacity) if capacity > 0 else 1.0

    def make_room(self, n_bytes: int) -> bool:
        """Return whether `n_bytes` more may be written. Where that leads above the high watermark, first drop clean
        copies, down to the low one, and never anything else."""
        capacity = self.capacity_bytes
        if n_bytes > capacity:
            return False  # all copies would be dropped in vain
        if self.used_bytes + n_bytes > HIGH_WATERMARK * capacity:
            self._drop_clean(int(self.used_bytes + n_bytes - LOW_WATERMARK * capacity))
            capacity = self.capacity_bytes
        return self.used_bytes + n_bytes <= capacity

    def _drop_clean(self, n_bytes: int) -> int:
        """Drop clean copies until this much came free or there are none; return how much did."""
        freed, numbers = 0, []
        with self._lock:
            while self._clean and freed < n_bytes:
                _, found = self._clean.popitem(last=False)
                freed += self._sizes.get(found.number, 0)
                numbers.append(found.number)
        self._drop(numbers)
        return freed

    def wait_for_room(self, n_bytes: int, timeout_s: float, *, own_bytes: int = 0, refused: bool = False) -> None:
        """Return when `n_bytes` more may be written. `StagingFullError` if that takes longer than `timeout_s`, at once
        if they can never be: with the `own_bytes` that their file has here, which stay for as long as it is written.

        `refused`: the file system has just said ENOSPC (or EDQUOT), whatever our own numbers say. Then this returns as
        soon as something came free, after a second at the latest, since others may have freed something: try again,
        with what is left of the time.
        """
        began_s = time.monotonic()
        while True:
            releases = self._room.releases()
            with reaching(self._folder, "looked at"):
                self._room.capacity_bytes(fresh=refused)
            self._room.expect_fitting(n_bytes, own_bytes, self._journal_bytes)
            if refused:
                if self._drop_clean(max(1, n_bytes)):
                    return
            elif self.make_room(n_bytes):
                return
            left_s = timeout_s - (time.monotonic() - began_s)
            if left_s <= 0:
                raise self._room.full(n_bytes, time.monotonic() - began_s)
            self._room.wait(releases, left_s)
            if refused:
                return


class Room:
    """Bytes in use and bytes there may be, of one folder, and waiting for some.

    The limit is the operator's, or what the file system has left beside what others keep on it; the file system is
    asked at most once a second, and what grew since is counted in between.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._used_bytes = 0
        self._releases = 0
        """How often some room came free: a waiting thread looks whether it did since it last looked."""
        self._free_bytes = self._capacity_bytes = self._disk_bytes = 0
        self._sample_due_s = 0.0

    @property
    def used_bytes(self) -> int:
        """Return the bytes in use."""
        return self._used_bytes

    def add(self, n_bytes: int) -> None:
        """Count this many more bytes as in use; fewer, if negative."""
        with self._changed:
            self._used_bytes += n_bytes
            if n_bytes < 0:
                self._release()

    def release(self) -> None:
        """Wake those who wait: something may be dropped now that could not be before."""
        with self._changed:
            self._release()

    def _release(self) -> None:
        self._releases += 1
        self._changed.notify_all()

    def capacity_bytes(self, *, fresh: bool = False) -> int:
        """Return how many bytes there may be: the limit, or less if the file system has less. `fresh`: ask it now."""
        now_s = time.monotonic()
        if fresh or now_s >= self._sample_due_s:
            self._sample_due_s = now_s + SAMPLE_EVERY_S  # others go on with the last answer
            self._ask()
        return self._capacity_bytes

    def _ask(self) -> None:
        used_bytes = self._used_bytes
        stats = os.statvfs(self._folder)
        reserve = min(_RESERVE_BYTES, stats.f_blocks * stats.f_frsize // _RESERVE_SHARE)
        free_bytes = max(0, stats.f_bavail * stats.f_frsize - reserve)
        if stats.f_files and not stats.f_favail:  # no inode left (file systems without a limit say 0 of 0)
            free_bytes = 0
        found = used_bytes + free_bytes
        with self._changed:
            if free_bytes > self._free_bytes:
                self._release()
            self._free_bytes, self._disk_bytes = free_bytes, stats.f_blocks * stats.f_frsize
            self._capacity_bytes = min(self._limit_bytes, found) if self._limit_bytes else found

    def expect_fitting(self, n_bytes: int, own_bytes: int, journal_bytes: int) -> None:
        """Raise `StagingFullError` if a file that has `own_bytes` could not have `n_bytes` more beside the journal were
        all else gone. A journal that takes more than its share has small files in it, and shrinks as they are uploaded.
        """
        if 0 < self._disk_bytes < n_bytes:  # its own may be holes; 0: another thread is asking for the first time
            raise StagingFullError(
                f"{_gb(n_bytes)} more of a file do not fit into the staging area {self._folder}: its file system has "
                f"{_gb(self._disk_bytes)} in all",
                hint="Mount with --staging on a larger disk.",
            )
        most_bytes = self._limit_bytes - min(journal_bytes, self._limit_bytes // _JOURNAL_SHARE)
        if self._limit_bytes and own_bytes + n_bytes > most_bytes:
            raise StagingFullError(
                f"a file of more than {most_bytes:,} bytes does not fit into the staging area {self._folder}, "
                f"which may have {_gb(self._limit_bytes)}",
                hint="Raise DATACACHE_STAGING_BYTES above the size of the largest file.",
            )

    def releases(self) -> int:
        """Return a number to give to `wait()`."""
        with self._changed:
            return self._releases

    def wait(self, releases: int, timeout_s: float) -> None:
        """Wait until some room came free since `releases()`; also whenever the file system is to be asked again, for
        others may have freed something there."""
        with self._changed:
            self._changed.wait_for(lambda: self._releases != releases, max(0.0, min(timeout_s, SAMPLE_EVERY_S)))

    def full(self, n_bytes: int, waited_s: float) -> StagingFullError:
        """Return the error for a wait in vain."""
        used, limit = _gb(self._used_bytes), self._limit_bytes
        if limit and limit <= self.capacity_bytes():
            what, way_out = f"{used} of the {_gb(limit)} that it may have", "raise DATACACHE_STAGING_BYTES"
        else:
            what, way_out = f"{used}, and its file system is full", "free some room on its file system"
        waited = f", and none came free in {waited_s:.0f} s" if waited_s >= 1 else ""
        return StagingFullError(
            f"there is no room for {n_bytes:,} bytes in the staging area {self._folder}: it has {what}{waited}",
            hint=f"Room comes free as files are uploaded: dsctl status says how that goes. Or {way_out}.",
        )


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 10**9:.1f} GB" if n_bytes >= 10**9 else f"{n_bytes / 10**6:.1f} MB"
