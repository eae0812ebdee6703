"""Room in a staging area: how much is in use, how much there may be, and waiting for some.

Used by `files.StagedFiles`. The limit is the operator's, or what the file system has left beside what others keep on
it; the file system is asked at most once a second, and what grew since is counted in between.

Any thread. The lock guards the numbers; no system call is made under it.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from datacache.core.errors import StagingFullError

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
