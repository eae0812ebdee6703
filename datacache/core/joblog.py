"""The log of a long job, so that one that was killed goes on where it was.

A file in a folder of the home, one for each job: its first line says which job it is of, each other line is a record
and its checksum. Imports, predictions and what an engine does write what is done into theirs and remove it after the
commit; nobody else reads it.

A record counts once it is written: a process that is killed loses what was in flight. The file is fsynced now and
then, so a power cut loses some seconds more. What follows the first record that is not whole is cut off. A lock keeps a
second process out of the same job; it ends with the process, whose forked workers do not have it. Threads may add at
the same time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from datacache.core import lockfile
from datacache.core.errors import CacheError, DatacacheError

_SYNC_EVERY_S = 2.0
_FORGET_AFTER_S = 30 * 86400.0


class JobLog:
    """The log of one job, locked. Close it."""

    def __init__(self, folder: Path, identity: dict[str, Any], *, taken: DatacacheError) -> None:
        """`identity` is what must be the same for a later run to go on where this one was. `taken` is raised where
        another process has the job, `CacheError` where the file cannot be written."""
        head = json.dumps(identity, sort_keys=True)
        self.path = folder / f"{xxh3_128_hexdigest(head.encode())}.journal"
        self._lock = threading.Lock()  # guards the writing end, _end and _synced
        self._synced = time.monotonic()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _forget_old(folder)
            self._file = lockfile.OwnDescriptor(lambda: self._open(taken))
            try:
                self._records_at = self._end = self._prepare(_sealed(head.encode()))
            except OSError:
                self._file.close()
                raise
        except OSError as exc:
            raise self._unwritable(exc) from exc

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield what earlier runs have added, in order: each record with the place that `read` finds it at. Go to the
        end of it before anything is added."""
        with open(self.path, "rb") as file:
            self._end = file.seek(self._records_at)
            for line in file:
                data = _unsealed(line)
                if data is None:
                    break
                yield self._end, data
                self._end += len(line)
        os.ftruncate(self._file.fd, self._end)

    def add(self, record: bytes) -> int:
        """Add a record, which has no line breaks. Return the place that `read` finds it at; -1 in a log that is
        closed: of a thread that an interrupted job left behind."""
        data = _sealed(record)
        with self._lock:
            if self._file.fd < 0:
                return -1
            try:
                _write(self._file.fd, data)
                if time.monotonic() - self._synced > _SYNC_EVERY_S:
                    os.fdatasync(self._file.fd)
                    self._synced = time.monotonic()
            except OSError as exc:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fd, self._end)  # else the next record would stand behind a part of this one
                raise self._unwritable(exc) from exc
            at, self._end = self._end, self._end + len(data)
            return at

    def read(self, places: Iterator[int]) -> Iterator[bytes]:
        """Yield the records at these places. `CacheError` for one that is damaged."""
        with open(self.path, "rb") as file:
            for at in places:
                file.seek(at)
                data = _unsealed(file.readline())
                if data is None:
                    raise CacheError(f"{self.path} is damaged", hint="Remove it, and run the command again.")
                yield data

    def remove(self) -> None:
        """Remove the log of a job that is done."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def close(self) -> None:
        """Give up the lock. What was added stays."""
        with self._lock:
            self._file.close()

    def _open(self, taken: DatacacheError) -> int:
        fd = _open_locked(self.path)
        if fd is None:
            raise taken
        return fd

    def _prepare(self, head: bytes) -> int:
        """Write the first line into a new file, or into one whose first line is not whole. Return where records
        begin."""
        fd = self._file.fd
        os.lseek(fd, 0, os.SEEK_SET)
        if os.read(fd, len(head)) != head:
            os.ftruncate(fd, 0)
            _write(fd, head)
        return len(head)

    def _unwritable(self, error: OSError) -> CacheError:
        return CacheError(
            f"the journal {self.path} cannot be written: {error.strerror}",
            hint="Mend that, and run the same command again: it goes on where it was.",
        )


def _write(fd: int, data: bytes) -> None:
    """Write all of it. `OSError` on a full disk, also where a part found room."""
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _sealed(data: bytes) -> bytes:
    return b"%s\t%s\n" % (data, xxh3_64_hexdigest(data).encode())


def _unsealed(line: bytes) -> bytes | None:
    data, tab, checksum = line.rpartition(b"\t")
    return data if tab and checksum == xxh3_64_hexdigest(data).encode() + b"\n" else None


def _open_locked(path: Path) -> int | None:
    return lockfile.open_locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def _forget_old(folder: Path) -> None:
    """Remove logs that nobody went on with for a month."""
    for file in folder.glob("*.journal"):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > _FORGET_AFTER_S and (fd := _open_locked(file)) is not None:
                try:
                    file.unlink()  # under its lock: a job that stands still keeps its log
                finally:
                    os.close(fd)
