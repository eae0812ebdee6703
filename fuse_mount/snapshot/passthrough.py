"""Have the kernel read files of a mount itself (FUSE_PASSTHROUGH, Linux 6.9), by backing ids that all workers agree on.

Used by `worker`, for a mount of large files. A file is passed through if the SSD tier has an object file of exactly its
bytes, checked as a whole. Every byte is verified when the first program opens it; from then on the kernel reads the
object file, and no process of ours is asked.

The kernel wants all programs that have an inode open to have it open in the same way, with the same backing id. So a
file that may be passed through has an inode that names the object file (`fs`), and what becomes of this inode is
decided once for the life of the mount, in a table that all workers share:

    <home>/mounts/<key>.passed-<token>       records of (object file, backing id), 8 bytes each
    id > 0      passed through to this id
    id 0        not passed through: not sound, or the kernel refused
    id -1       was evicted, and the kernel has let go of it: open again by the name, which has another inode now

The token is the connection's: an id means nothing in another one. A record is written and its answer given under the
lock of the table (flock(2)), so no id is closed between. A worker that is killed between the kernel's answer and the
record leaves an id that nobody uses; it takes the space of one evicted file until the mount ends.

`inode` is quick, and the loop's. `opening` reads the whole file the first time, and waits for the lock, as `sweep`
does: other threads call them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from datacache.core import lockfile
from fuse_mount.kernel import session
from fuse_mount.snapshot.fs import Node, SnapshotFs, passed_number

_RECORD = struct.Struct("<Ii")
_MOST_RECORDS = 65_536
PLAIN, EVICTED = 0, -1

_log = logging.getLogger("fuse_mount")


class Passthrough:
    """The table of one mount, in one worker. `close()` when nothing is opened any more."""

    def __init__(self, fs: SnapshotFs, connection: int, table: Path) -> None:
        """`connection` stays the caller's. `OSError` where the table cannot be opened."""
        self._fs, self._connection = fs, connection
        self._fd = os.open(table, os.O_RDWR | os.O_CLOEXEC)
        self._places: dict[int, int] = {}
        """Object file → position of its record, as far as was read. A record keeps its object file."""
        self._lock = threading.Lock()
        """Held with the table's lock, which does not keep threads of one process apart."""
        self._verifying = threading.Lock()
        """Held while a file is verified: each takes several threads, and programs open the same one at a time."""
        self._known: dict[int, int] = {}
        """A file's own inode → the one that it may be passed through by."""

    def close(self) -> None:
        """Close the table."""
        os.close(self._fd)

    def inode(self, node: Node) -> int:
        """Return the inode by which the kernel is to ask for a file of this size: its own, or another one by which it
        may be passed through."""
        known = passed_number(self._known.get(node.ino, 0))
        if known is not None and self._fs.has_object_file(known):
            return self._known[node.ino]
        passed = self._fs.passed_inode(node)
        number = passed_number(passed)
        if number is None or (self._place(number) is None and len(self._places) >= _MOST_RECORDS):
            return node.ino
        if len(self._known) >= _MOST_RECORDS:
            self._known.clear()
        self._known[node.ino] = passed
        return passed

    @contextlib.contextmanager
    def opening(self, ino: int) -> Iterator[int]:
        """Give the backing id to open an inode with, `PLAIN` or `EVICTED`, while it is sure to hold: answer meanwhile.
        Verify the file if no worker has. `OSError` where the table fails."""
        number = passed_number(ino)
        assert number is not None
        fd = None
        if self._place(number) is None:
            with self._verifying:
                if self._place(number) is None:
                    fd = self._fs.open_object_file(ino)
        try:
            with self._locked():
                yield self._decided(number, fd)
        finally:
            if fd is not None:
                os.close(fd)
        self._fs.touch_object_file(number)

    def closed(self, ino: int) -> None:
        """Take the word that a program has closed a file."""
        number = passed_number(ino)
        if number is not None:
            self._fs.touch_object_file(number)

    def sweep(self) -> None:
        """Have the kernel let go of evicted files, so that their space comes free once no program has them open."""
        self._place(-1)
        for number, place in list(self._places.items()):
            if self._id_at(place) <= 0 or self._fs.has_object_file(number):
                continue
            with self._locked():
                id = self._id_at(place)
                if id <= 0:
                    continue
                self._write(place, number, EVICTED)
                with contextlib.suppress(OSError):
                    session.close_backing(self._connection, id)

    def _decided(self, number: int, fd: int | None) -> int:
        """Return the id of an object file, which is decided now if it was not before; `fd` is the file, verified."""
        place = self._place(number)
        if place is not None:
            return self._id_at(place)
        if len(self._places) >= _MOST_RECORDS:
            return EVICTED  # another inode is found for it
        id = PLAIN if self._fs.has_object_file(number) else EVICTED
        if fd is not None:
            id = PLAIN
            try:
                id = session.open_backing(self._connection, fd)
            except OSError as exc:
                _log.info("object file %08x is not passed through: %s", number, exc.strerror)
        try:
            self._write(len(self._places), number, id)
        except OSError:
            if id > 0:
                session.close_backing(self._connection, id)
            raise
        return id

    def _place(self, number: int) -> int | None:
        """Return the position of the record of an object file, after a look at what was added."""
        while number not in self._places:
            place = len(self._places)
            record = os.pread(self._fd, _RECORD.size, place * _RECORD.size)
            if len(record) < _RECORD.size:
                return None
            self._places[_RECORD.unpack(record)[0]] = place
        return self._places[number]

    def _id_at(self, place: int) -> int:
        id: int = _RECORD.unpack(os.pread(self._fd, _RECORD.size, place * _RECORD.size))[1]
        return id

    def _write(self, place: int, number: int, id: int) -> None:
        if os.pwrite(self._fd, _RECORD.pack(number, id), place * _RECORD.size) < _RECORD.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            lockfile.take(self._fd)
            try:
                yield
            finally:
                lockfile.give_back(self._fd)


def make_table(connection: int, table: Path) -> str:
    """Make the table of a new mount. Return '', or why the kernel passes nothing through, and there is no table."""
    fd = os.open(table, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        session.close_backing(connection, session.open_backing(connection, fd))
    except OSError as exc:
        table.unlink()
        return exc.strerror or str(exc)
    finally:
        os.close(fd)
    return ""
