"""When each container was last read: a small file all processes of the node map and write without asking anybody.

A float64 of seconds (Unix time) for a container's id modulo the number of slots. Two containers may share a slot once
ids wrap: then both count as read when either is, which costs precision, never correctness. Lost on a crash: nothing.
Where the file cannot be had (no cache yet, a full disk, not ours to write) the table is this process's own: eviction
knows less, reading goes on.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import struct
import time
from pathlib import Path

from datacache.tiers.memory import is_private

log = logging.getLogger(__name__)
_SLOTS = 1 << 13
_TIME = struct.Struct("<d")
FILE_BYTES = _SLOTS * _TIME.size


class AccessTable:
    """The mapped table. Safe from several threads and processes: each write is one aligned store."""

    def __init__(self, path: Path) -> None:
        try:
            self._map = _map(path)
        except OSError as exc:
            log.debug("%s cannot be used: %s", path, exc)
            self._map = mmap.mmap(-1, FILE_BYTES)

    def touch(self, container: int) -> None:
        """Note that a container was read now."""
        _TIME.pack_into(self._map, (container % _SLOTS) * 8, time.time())

    def at_least(self, container: int, when_s: float) -> None:
        """Note that a container was used at `when_s` (Unix seconds), if nothing later is known."""
        if when_s > self.last(container):
            _TIME.pack_into(self._map, (container % _SLOTS) * 8, when_s)

    def last(self, container: int) -> float:
        """When it was read last (Unix seconds); 0.0 if never."""
        return float(_TIME.unpack_from(self._map, (container % _SLOTS) * 8)[0])


def _map(path: Path) -> mmap.mmap:
    if not is_private(path.parent):
        raise PermissionError(errno.EACCES, "not in a folder of this user alone", str(path))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size != FILE_BYTES:
            os.ftruncate(fd, FILE_BYTES)
        os.posix_fallocate(fd, 0, FILE_BYTES)  # on a full disk, to write into a hole of a mapped file is fatal
        return mmap.mmap(fd, FILE_BYTES)
    finally:
        os.close(fd)
