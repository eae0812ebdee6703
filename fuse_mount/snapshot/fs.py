"""A snapshot as a file system: inodes, names, attributes, listings and bytes. It knows nothing of FUSE.

Used by `worker`. Nothing is kept per inode: an inode number *is* the position in the manifest, so any process that
opened the same snapshot answers for any number, and memory does not grow with the files visited. It may not encode
messages and may not start threads. `read_wait` may block and may be called from several threads at once; everything
else is quick and belongs to the worker's loop.

| inode | what |
|---|---|
| 1 | the root |
| row + 2 | the file in this row |
| bit 62, depth << 48, first row | the directory named by the first `depth` parts of this row's path |
| bit 61, number << 30, row | the file in this row, passed through to this object file of the SSD tier (`passthrough`) |

Programs see a file's own inode also where the kernel asks for it by the last kind.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from datacache.core.errors import DatacacheError, PathNotFoundError
from datacache.core.paths import stays_inside

if TYPE_CHECKING:
    from datacache.api import Snapshot
    from datacache.daemon.client import AskedBlock

ROOT = 1
_FILE_BASE = 2
_DIR_BIT = 1 << 62
_DEPTH_SHIFT = 48
_ROW_MASK = (1 << _DEPTH_SHIFT) - 1
_DEPTH_MASK = (1 << 14) - 1
_PASSED_BIT = 1 << 61
_NUMBER_SHIFT = 30
_NUMBER_MASK = (1 << 31) - 1
_PASSED_ROW_MASK = (1 << _NUMBER_SHIFT) - 1
COOKIE_BASE = 3
"""Cookies 1 and 2 follow '.' and '..'; the cookie after a child is the row that follows it, plus this."""


class Node(NamedTuple):
    """A file or directory and its attributes."""

    ino: int
    is_dir: bool
    size_bytes: int
    mtime_ns: int
    mode: int = 0
    """st_mode where it is a link, or where the snapshot knows it; else 0."""


def directory_inode(depth: int, first_row: int) -> int:
    """Return the inode of the directory that the first `depth` parts of this row's path name; depth 0: the root."""
    return _DIR_BIT | depth << _DEPTH_SHIFT | first_row if depth else ROOT


def passed_number(ino: int) -> int | None:
    """Return the number of the object file that a file's inode names; None for any other inode."""
    return ino >> _NUMBER_SHIFT & _NUMBER_MASK if ino & _PASSED_BIT and not ino & _DIR_BIT else None


class SnapshotFs:
    """One opened snapshot as a tree of inodes. `close()` closes the snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._rows = snapshot.rows
        self._tree = self._rows.tree
        self._entry = self._tree.entry
        self._local = self._rows.read_local
        self.files = snapshot.record.files
        self.total_bytes = snapshot.record.total_bytes
        self._created_ns = int(datetime.fromisoformat(snapshot.record.created_at).timestamp()) * 1_000_000_000
        # Prefixes are asked for again with every name of a directory; the bound keeps the memory flat.
        self._prefix = lru_cache(maxsize=4096)(self._tree.prefix_of)

    def close(self) -> None:
        """Close the snapshot below."""
        self._snapshot.close()

    def lookup(self, parent: int, name: bytes) -> Node | None:
        """Return the child of this name, or None. `PathNotFoundError` when `parent` is no directory."""
        depth, prefix = self._directory(parent)
        child = self._tree.child(prefix, name)
        if child is None:
            return None
        if child.is_dir:
            return Node(directory_inode(depth + 1, child.row), True, 0, self._created_ns)
        return self._file_node(child.row)

    def getattr(self, ino: int) -> Node:
        """Return the attributes of an inode. `PathNotFoundError` for a number that cannot be one of this snapshot."""
        if ino == ROOT or ino & _DIR_BIT:
            return Node(ino, True, 0, self._created_ns)
        return self._file_node(self._row(ino))

    def readlink(self, ino: int) -> bytes:
        """Return where a link leads. One that leads out of the snapshot, which nothing of ours makes, is an error."""
        entry = self._entry(ino - _FILE_BASE)
        if not stays_inside(entry.path, entry.target):
            raise DatacacheError(f"{self.path_of(ino)} is a link that leads out of the snapshot, or none")
        return entry.target

    def children(self, ino: int, cookie: int) -> Iterator[tuple[bytes, int, int, int]]:
        """Give (name, inode, next cookie, type as in st_mode) of each child after `cookie` (0: all), in byte order.

        '.' and '..' are the caller's. Seeks straight to the cookie's row; nothing is kept from one call to the next."""
        depth, prefix = self._directory(ino)
        start = cookie - COOKIE_BASE if cookie >= COOKIE_BASE else None
        directory = _DIR_BIT | (depth + 1) << _DEPTH_SHIFT
        for name, is_dir, row, next_row, is_link in self._tree.children(prefix, start):
            if is_dir:
                yield name, directory | row, next_row + 3, stat.S_IFDIR
            else:
                yield name, row + 2, next_row + 3, stat.S_IFLNK if is_link else stat.S_IFREG

    def read_now(self, ino: int, offset: int, size: int) -> memoryview | bytes | None:
        """Return the bytes if all of them are on this node and verified, else None. Short only at the end."""
        row = ino - 2
        if not 0 <= row < _ROW_MASK:
            row = self._row(ino)
        stop = min(offset + size, self._entry(row).size_bytes)
        if offset >= stop:
            return b""
        return self._local(row, offset, stop)

    def ask(self, ino: int, offset: int, size: int) -> AskedBlock | None:
        """Ask for bytes that `read_now` has not got, and do not wait for them. None where only `read_wait` gets
        them."""
        return self._rows.ask_row(self._row(ino), offset, offset + size)

    def read_wait(self, ino: int, offset: int, size: int) -> bytes | memoryview:
        """Return the bytes, fetched if need be; blocks for as long as the store does. Raises `core.errors`."""
        row = self._row(ino)
        stop = min(offset + size, self._entry(row).size_bytes)
        if offset >= stop:
            return b""
        data = self._rows.read_row(row, offset, stop)
        if len(data) != stop - offset:
            raise DatacacheError(f"{stop - offset} bytes from {offset} were due, {len(data)} came")
        return data

    def release(self, ino: int, offset: int, length: int) -> None:
        """Take the hint that the kernel keeps these bytes as pages of the mount now."""
        self._rows.release_local(self._row(ino), offset, offset + length)

    def sweep(self) -> None:
        """Let go of what was evicted on this node."""
        self._rows.sweep()

    def path_of(self, ino: int) -> str:
        """Return the path of an inode for messages; never raises."""
        try:
            raw = self._directory(ino)[1] if ino == ROOT or ino & _DIR_BIT else self._entry(self._row(ino)).path
        except Exception:  # noqa: BLE001 - a message must not fail for want of a path
            return f"inode {ino}"
        return raw.decode("utf-8", "backslashreplace") or "/"

    # --- files that the kernel reads itself -------------------------------------------------------------------

    def passed_inode(self, node: Node) -> int:
        """Return the inode under which the kernel may read a file from the SSD tier's own; 0 if it has no file of
        exactly these bytes."""
        row = node.ino - _FILE_BASE
        number = self._rows.object_file(row) if row <= _PASSED_ROW_MASK else None
        return 0 if number is None else _PASSED_BIT | number << _NUMBER_SHIFT | row

    def open_object_file(self, ino: int) -> int | None:
        """Return a descriptor, the caller's, of the object file that such an inode names, whose every byte has just
        been verified; None if it is not there, or not sound."""
        found = self._rows.open_object_file(self._row(ino))
        if found is None:
            return None
        number, fd = found
        if number != passed_number(ino):
            os.close(fd)
            return None
        return fd

    def has_object_file(self, number: int) -> bool:
        """Tell whether the SSD tier still has an object file."""
        return self._rows.has_object_file(number)

    def touch_object_file(self, number: int) -> None:
        """Note that an object file is in use."""
        self._rows.touch_object_file(number)

    # --- parts ------------------------------------------------------------------------------------------------

    def _row(self, ino: int) -> int:
        """Return the row of a file. `PathNotFoundError` for what is no file of this snapshot."""
        row = ino - _FILE_BASE if passed_number(ino) is None else ino & _PASSED_ROW_MASK
        if not 0 <= row < _ROW_MASK:
            raise PathNotFoundError(f"inode {ino} is no file of this snapshot")
        return row

    def _directory(self, ino: int) -> tuple[int, bytes]:
        if ino == ROOT:
            return 0, b""
        if not ino & _DIR_BIT:
            raise PathNotFoundError(f"inode {ino} is no directory of this snapshot")
        depth = ino >> _DEPTH_SHIFT & _DEPTH_MASK
        return depth, self._prefix(depth, ino & _ROW_MASK)

    def _file_node(self, row: int) -> Node:
        try:
            entry = self._entry(row)
        except IndexError as exc:
            raise PathNotFoundError(f"row {row} is not in this snapshot") from exc
        if entry.target:
            return Node(row + _FILE_BASE, False, len(entry.target), entry.mtime_ns, stat.S_IFLNK | 0o777)
        return Node(row + _FILE_BASE, False, entry.size_bytes, entry.mtime_ns, entry.mode)
