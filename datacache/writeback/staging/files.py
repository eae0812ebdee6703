"""Data files of a staging area: larger contents, each in a file that has a number.

Used by the engine and the uploader. A file is either *referenced* (a record of the journal names its number, or its
writer is still at it), and then nothing here ever deletes it unasked; or a *clean copy* of an object as it is in the
bucket, kept for who reads what was just written, and dropped, the one used longest ago first, when its room is needed.
Clean copies are known to this process only: after a restart no record refers to them, and `purge()` deletes them.

Any thread. The lock guards the tables (sizes and clean copies); no system call is made under it.

Room in a staging area: how much is in use, how much there may be, and waiting for some.

Used by `files.StagedFiles`. The limit is the operator's, or what the file system has left beside what others keep on
it; the file system is asked at most once a second, and what grew since is counted in between.

Any thread. The lock guards the numbers; no system call is made under it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from datacache.core.errors import StagingError, StagingFullError
from datacache.writeback.staging.area import reaching
from datacache.writeback.staging.numbered import NumberedFiles

log = logging.getLogger(__name__)

HIGH_WATERMARK, LOW_WATERMARK = 0.8, 0.7
MAX_CLEAN_COPIES = 20_000
"""Each takes some 400 bytes of memory."""


class _Clean(NamedTuple):
    number: int
    etag: str


class StagedFiles:
    """The data files under one folder, which must be there. One object for an area."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        """Finds what files there are. `limit_bytes` is for them and the journal; 0: what the file system has."""
        self._folder = folder
        self._files = NumberedFiles(folder)
        self._lock = threading.Lock()
        self._clean: OrderedDict[str, _Clean] = OrderedDict()
        """By key, the one used longest ago first."""
        self._journal_bytes = 0
        self._room = Room(folder, limit_bytes=limit_bytes)
        with reaching(folder, "looked into"):
            self._sizes = dict(self._files.scan())
            """Bytes that each file counts for."""
        self._room.add(sum(self._sizes.values()))

    def __contains__(self, number: int) -> bool:
        """Whether there is a file of this number."""
        return number in self._sizes

    def path(self, number: int) -> Path:
        """Where a file of this number lies, or would."""
        return self._files.path(number)

    def create(self) -> int:
        """Make an empty file: its number, higher than any before it. `StagingFullError` if the file system has no room
        for it."""
        number = self._files.create()
        with self._lock:
            self._sizes[number] = 0
        return number

    def open(self, number: int) -> int:
        """An fd to read and write a file, for the caller to close. `StagingError` if it is not there."""
        return self._files.open(number)

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
        self._files.sync_name(number)

    def sync_name(self, number: int) -> None:
        """Make a file's name durable; costs nothing if it is."""
        self._files.sync_name(number)

    def remove(self, number: int) -> None:
        """Delete a file; one that is not there is fine. Who has it open goes on reading it."""
        with self._lock:
            size_bytes = self._sizes.pop(number, None)
        if size_bytes is None:
            return
        try:
            self._files.remove(number)
        except StagingError:
            with self._lock:
                self._sizes[number] = size_bytes
            raise
        self._room.add(-size_bytes)

    def purge(self, referenced: set[int]) -> int:
        """At the start, before anything else: delete all files but those that a record refers to, clean copies of an
        earlier run among them, and begin numbers above all of them. How many were deleted."""
        self._files.begin_above(max(referenced, default=-1))
        gone = [number for number in self._sizes if number not in referenced]
        for number in gone:
            self.remove(number)
        with reaching(self._folder, "looked into"):
            self._files.remove_empty_folders()
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
        return self._files.open_to_read(number)

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
        with reaching(self._folder, "looked at"):
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
                with reaching(self._folder, "looked at"):
                    self._room.capacity_bytes(fresh=True)
                if self._drop_clean(max(1, n_bytes)):
                    return
            elif self.make_room(n_bytes):
                return
            left_s = timeout_s - (time.monotonic() - began_s)
            if left_s <= 0 or not self._room.ever_fits(n_bytes):
                raise self._room.full(n_bytes, time.monotonic() - began_s)
            self._room.wait(releases, left_s)
            if refused:
                return


SAMPLE_EVERY_S = 1.0
_RESERVE_BYTES = 64 << 20
_RESERVE_SHARE = 50
"""What is left of the file system, a 50th of it at most: what is full to the last block cannot be tidied up either."""


class Room:
    """Bytes in use and bytes there may be, of one folder."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._used_bytes = 0
        self._releases = 0
        """How often some room came free: who waits looks whether it did since it last looked."""
        self._free_bytes = 0
        self._used_then_bytes = 0
        self._sample_due_s = 0.0

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        return self._used_bytes

    def add(self, n_bytes: int) -> None:
        """This many more are in use; fewer, if negative."""
        with self._changed:
            self._used_bytes += n_bytes
            if n_bytes < 0:
                self._release()

    def release(self) -> None:
        """Something may be dropped now that could not be before: wake who waits."""
        with self._changed:
            self._release()

    def _release(self) -> None:
        self._releases += 1
        self._changed.notify_all()

    def capacity_bytes(self, *, fresh: bool = False) -> int:
        """How many bytes there may be: the limit, or less if the file system has less. `fresh`: it is asked now."""
        now_s = time.monotonic()
        with self._changed:
            ask = fresh or now_s >= self._sample_due_s
            if ask:
                self._sample_due_s = now_s + SAMPLE_EVERY_S  # others go on with the last answer
        if ask:
            self._ask()
        with self._changed:
            found = self._used_then_bytes + self._free_bytes
        return min(self._limit_bytes, found) if self._limit_bytes else found

    def _ask(self) -> None:
        used_bytes = self._used_bytes
        stats = os.statvfs(self._folder)
        reserve = min(_RESERVE_BYTES, stats.f_blocks * stats.f_frsize // _RESERVE_SHARE)
        free_bytes = max(0, stats.f_bavail * stats.f_frsize - reserve)
        if stats.f_files and not stats.f_favail:  # no inode left (file systems without a limit say 0 of 0)
            free_bytes = 0
        with self._changed:
            if free_bytes > self._free_bytes:
                self._release()
            self._free_bytes, self._used_then_bytes = free_bytes, used_bytes

    def ever_fits(self, n_bytes: int) -> bool:
        """Whether this many could be written were all else gone."""
        return not self._limit_bytes or n_bytes <= self._limit_bytes

    def releases(self) -> int:
        """A number to give to `wait()`."""
        with self._changed:
            return self._releases

    def wait(self, releases: int, timeout_s: float) -> None:
        """Wait until some room came free since `releases()`; also whenever the file system is to be asked again, for
        others may have freed something there."""
        with self._changed:
            self._changed.wait_for(lambda: self._releases != releases, max(0.0, min(timeout_s, SAMPLE_EVERY_S)))

    def full(self, n_bytes: int, waited_s: float) -> StagingFullError:
        """The error for who waited in vain."""
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
