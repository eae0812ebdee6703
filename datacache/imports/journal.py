"""The journal of an import, so that one that was killed goes on where it was.

A file under `{home}/imports/`, one for each file, data set and set of options. `jsonl` adds a record when a copy is
made and removes the file after the commit; nobody else reads it. A record is one line, JSON and its checksum:

    ["path", "digest of where it came from", size, mtime_ns, "etag", "version", source, "key", "when"]	checksum

A record counts once it is written: a process that is killed loses what was in flight. The file is fsynced now and
then, so a power cut loses some seconds more. What follows the first record that is not whole is cut off. A lock keeps a
second import of the same file out. Threads may add at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from datacache.core import lockfile
from datacache.core.errors import CacheError, ImportFailedError
from datacache.manifest.builder import Sorter
from datacache.manifest.model import Entry

_FORMAT = 1
_SYNC_EVERY_S = 2.0
_FORGET_AFTER_S = 30 * 86400.0


class Done(NamedTuple):
    """A line that is done."""

    path: bytes
    origin: str
    """`origin_of` its line: another URL under the same path is another line."""
    entry: Entry
    at_s: int
    """When, in seconds of the epoch."""


class Journal:
    """The journal of one import, locked. Close it. `ImportFailedError` if another process is at the same import."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        """`identity` is what must be the same for a later run to go on where this one was."""
        head = json.dumps({"format": _FORMAT, **identity}, sort_keys=True)
        self._path = folder / f"{xxh3_128_hexdigest(head.encode())}.journal"
        self._lock = threading.Lock()  # guards the writing end and _synced
        self._synced = time.monotonic()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _forget_old(folder)
            fd = _open_locked(self._path)
            self._fd = -1 if fd is None else fd
            if fd is not None:
                self._records_at = self._prepare(_sealed(head))
        except OSError as exc:
            raise CacheError(f"the journal {self._path} cannot be written: {exc.strerror}") from exc
        if self._fd < 0:
            raise ImportFailedError(
                "another process is at this very import",
                hint="Wait for the other process, or end it and run this again: it goes on where that was.",
            )

    def done(self) -> Sorter[Done]:
        """Return what earlier runs did, by path; of records of one path the newest is the last. Close it. Call it
        before anything is added."""
        sorter: Sorter[Done] = Sorter(attrgetter("path"))
        with open(self._path, "rb") as file:
            good = file.seek(self._records_at)
            for line in file:
                record = _unsealed(line)
                if record is None:
                    break
                sorter.add(record)
                good += len(line)
        os.ftruncate(self._fd, good)
        return sorter

    def add(self, origin: str, entry: Entry) -> None:
        """Note that a line is done."""
        path, key = entry.path.decode(), (entry.key or b"").decode("utf-8", "surrogateescape")
        row = [path, origin, *entry[1:5], entry.source, key, int(time.time())]
        data = _sealed(json.dumps(row, separators=(",", ":")))
        with self._lock:
            if self._fd < 0:
                return  # closed: a thread that an interrupted import left behind
            try:
                if os.write(self._fd, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if time.monotonic() - self._synced > _SYNC_EVERY_S:
                    os.fdatasync(self._fd)
                    self._synced = time.monotonic()
            except OSError as exc:
                raise CacheError(f"the journal {self._path} cannot be written: {exc.strerror}") from exc

    def remove(self) -> None:
        """Remove the journal of a committed import."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def close(self) -> None:
        """Give up the lock. What was noted stays."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _prepare(self, head: bytes) -> int:
        """Write the first line into a new file, or into one whose first line is not whole. Return where records
        begin."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        if os.read(self._fd, len(head)) != head:
            os.ftruncate(self._fd, 0)
            os.write(self._fd, head)
        return len(head)


def origin_of(url: str) -> str:
    """Return a URL as the journal keeps it: nobody can read a signature out of it."""
    return xxh3_128_hexdigest(url.encode("utf-8", "surrogateescape"))


def _sealed(text: str) -> bytes:
    data = text.encode()
    return b"%s\t%s\n" % (data, xxh3_64_hexdigest(data).encode())


def _unsealed(line: bytes) -> Done | None:
    data, tab, checksum = line.rpartition(b"\t")
    if not tab or checksum != xxh3_64_hexdigest(data).encode() + b"\n":
        return None
    path, origin, size, mtime_ns, etag, version, source, key, at_s = json.loads(data)
    raw = path.encode()
    return Done(
        raw,
        origin,
        Entry(raw, size, mtime_ns, etag, version, source, key.encode("utf-8", "surrogateescape") or None),
        at_s,
    )


def _open_locked(path: Path) -> int | None:
    return lockfile.open_locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def _forget_old(folder: Path) -> None:
    """Remove journals that nobody went on with for a month."""
    for file in folder.glob("*.journal"):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > _FORGET_AFTER_S and (fd := _open_locked(file)) is not None:
                try:
                    file.unlink()  # under its lock: an import that stands still keeps its journal
                finally:
                    os.close(fd)
