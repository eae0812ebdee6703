"""Losses: what programs were told is written and then could not be kept, until somebody has said that he has seen it.

The kernel gathers writes and answers them itself, so an error reaches a program at close(2) at the earliest, and a
shell passes over it. Kept in the staging area's `losses.json` over restarts. `fuse_mount.bucket.fs.handles` notes them,
status and flush tell them. Any thread; `save` and `forget` wait for a disk, the others do not.

The disk that loses bytes is often the one that this is written to, and full: so `save` is called again and again, and
writes only where the file has something else than is known.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from datacache.core.disk import replace_file
from datacache.core.errors import StagingError

_log = logging.getLogger("datacache.writeback")
LOSSES = "losses.json"
"""The file, in the area's folder."""
MOST_LOSSES = 100
"""Kept of one area; of more the newest."""


class Loss(NamedTuple):
    """Bytes of one file that are nowhere."""

    key: str
    size_bytes: int
    """At most so many: what was written over is counted twice."""
    at: float
    """Seconds since the epoch."""
    reason: str


class LossLog:
    """One area's losses. `check` raises `StagingError` where the area is somebody else's by now."""

    def __init__(self, path: Path, *, check: Callable[[], None] = lambda: None) -> None:
        self._path, self._check = path, check
        self._lock = threading.Lock()  # guards all below
        self._saving = threading.Lock()  # held while the file is written; guards `_saved` and `_refused`
        self._losses: dict[int, Loss] = {}
        self._doubtful: dict[int, int] = {}  # loss -> the ticket with which it turns out to be none
        self._saved: list[Loss] = []
        self._refused = False
        self._next = 0
        try:
            for key, size_bytes, at, reason in json.loads(path.read_bytes()):
                self.add(str(key), int(size_bytes), str(reason), at=float(at))
            self._saved = self.all()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as exc:
            _log.warning("%s cannot be read: %s", path, exc)

    def add(self, key: str, size_bytes: int, reason: str, *, at: float | None = None, ticket: int = 0) -> int:
        """Note a loss, in memory; return its number, for `grow`. With a ticket it is one until that is settled."""
        with self._lock:
            self._next += 1
            self._losses[self._next] = Loss(key, size_bytes, time.time() if at is None else at, reason)
            while len(self._losses) > MOST_LOSSES:
                oldest = next(iter(self._losses))
                del self._losses[oldest]
                self._doubtful.pop(oldest, None)
            if ticket:
                self._doubtful[self._next] = ticket
            return self._next

    def grow(self, number: int, size_bytes: int) -> None:
        """Count more bytes to a loss. One that was forgotten meanwhile stays forgotten."""
        with self._lock:
            known = self._losses.get(number)
            if known is not None:
                self._losses[number] = known._replace(size_bytes=known.size_bytes + size_bytes)

    def drop(self, number: int) -> None:
        """Drop what turned out to be no loss."""
        with self._lock:
            self._losses.pop(number, None)

    def settle(self, ticket: int) -> bool:
        """Drop what was no loss, as all up to a ticket is durable now. Return whether there was any."""
        if not self._doubtful:
            return False
        with self._lock:
            kept = [number for number, wanted in self._doubtful.items() if wanted <= ticket]
            for number in kept:
                del self._doubtful[number]
                self._losses.pop(number, None)
            return bool(kept)

    def all(self) -> list[Loss]:
        """Return all of them, the oldest first."""
        with self._lock:
            return list(self._losses.values())

    def forget(self) -> list[Loss]:
        """Drop all of them, also from the disk: what they were. Raises `OSError` where they stay on the disk."""
        with self._saving:
            self._path.unlink(missing_ok=True)
            self._saved = []
            with self._lock:
                seen, self._losses, self._doubtful = list(self._losses.values()), {}, {}
        return seen

    def save(self) -> None:
        """Have the file say what is known. What a disk refuses is written by the next call that it lets."""
        with self._saving:
            losses = self.all()
            if losses == self._saved:
                return
            try:
                self._check()
                if losses:
                    replace_file(self._path, json.dumps(losses).encode())
                else:
                    self._path.unlink(missing_ok=True)
                self._saved, self._refused = losses, False
            except (OSError, StagingError) as exc:
                if not self._refused:
                    _log.warning("%s: a loss cannot be written down yet: %s", self._path, exc)
                self._refused = True
