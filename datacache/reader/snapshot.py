"""`Snapshot`: an immutable set of files, read by path.

`datacache.open_snapshot()` returns it; the fsspec file system reads through it; mounts and loaders use its `rows`. Safe
from several threads, across `fork()`, and picklable (the other process opens the same immutable id).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self, cast

from datacache.core.errors import PathNotFoundError
from datacache.core.ids import BLOCK_BYTES, BlockId, ObjectRef, block_id
from datacache.manifest.model import SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.manifest.view import showable
from datacache.reader.blocks import NodeBlocks
from datacache.reader.rows import IDS_KEPT, Closed, RowReader

_FOR_USERS = ("close", "open", "paths", "read", "read_range", "record", "ref", "scan", "stat", "view")


class Stat(NamedTuple):
    """The facts of a path that are known without reading it."""

    path: str
    size_bytes: int
    mtime_ns: int
    is_dir: bool
    etag: str
    mode: int = 0
    """st_mode where the snapshot knows it, else 0."""
    target: str = ""
    """The target of a symbolic link, relative to its folder. All else is said of the file there."""


class Snapshot:
    """The files of one snapshot. Paths are str, with surrogateescape where the store's bytes are not UTF-8."""

    def __init__(
        self,
        record: SnapshotRecord,
        manifest: Manifest,
        blocks: NodeBlocks,
        *,
        reopen: tuple[Callable[..., Snapshot], tuple[object, ...]] | None = None,
        on_close: Callable[[], None] = lambda: None,
        is_listed: Callable[[], bool] = lambda: True,
    ) -> None:
        """See `RowReader` for `is_listed`. `reopen` opens the same snapshot in a process that unpickles this one."""
        self.record = record
        self.manifest = manifest
        self.rows = RowReader(record, manifest, blocks, is_listed)
        self._local = blocks.local
        self._reopen = reopen
        self._on_close = on_close
        self._small: dict[str, BlockId] = {}  # path → its only block

    @property
    def ref(self) -> str:
        """Return the immutable name, `dataset@id`."""
        return f"{self.record.dataset}@{self.record.id}"

    def __len__(self) -> int:
        """Return how many files there are."""
        return self.record.files

    def __contains__(self, path: str) -> bool:
        return self.manifest.find(_encode(path)) is not None

    def __iter__(self) -> Iterator[str]:
        """Yield the files' paths in byte order."""
        for entry in self.manifest.entries():
            if not entry.path.endswith(b"/"):
                yield entry.path.decode("utf-8", "surrogateescape")

    def __getitem__(self, path: str) -> bytes:
        """Return all bytes of a file, as `read` does; `PathNotFoundError` is a `FileNotFoundError`."""
        return self.read(path)

    def __dir__(self) -> list[str]:
        """Name what users call; the rest is for the mount and the loaders."""
        return [*_FOR_USERS, *(name for name in super().__dir__() if name.startswith("__"))]

    def __repr__(self) -> str:
        return f"<Snapshot {self.record.ref}: {self.record.files:,} files, {self.record.total_bytes:,} bytes>"

    def paths(self) -> list[str]:
        """Return the files' paths in byte order; folder markers are not among them."""
        return list(self)

    def stat(self, path: str) -> Stat:
        """Return the facts of a file, or of a directory that has files. `PathNotFoundError` if it is neither."""
        raw = _encode(path)
        row = self.manifest.find(raw)
        if row is not None:
            return self._stat_row(path, row)
        folder = raw.rstrip(b"/") + b"/" if raw else b""
        first = self.manifest.seek(folder)
        if first < self.manifest.rows and self.manifest.path(first).startswith(folder):
            return Stat(path, 0, 0, True, "")
        raise self._missing(path)

    def scan(self, folder: str = "") -> Iterator[Stat]:
        """Yield the facts of the files and folders directly in a folder, in byte order. `PathNotFoundError` for a
        folder without files, and for a file."""
        prefix = _encode(folder.rstrip("/")) + b"/" if folder else b""
        if folder and not self.stat(folder).is_dir:
            raise self._missing(folder + "/")
        for child in self.rows.tree.children(prefix):
            if not showable(child.name):  # whatever the manifest says of it: callers write to such paths
                continue
            path = (prefix + child.name).decode("utf-8", "surrogateescape")
            yield Stat(path, 0, 0, True, "") if child.is_dir else self._stat_row(path, child.row)

    def read(self, path: str) -> bytes:
        """Return all bytes of a file. `PathNotFoundError`, or the store's error where they cannot be had."""
        block = self._small.get(path)
        if block is not None:
            data = self._local.copy(block)
            if data is not None:
                return data
        row = self.row_of(path)
        obj, size = self.rows.object_at(row)
        if 0 < size <= BLOCK_BYTES:
            if len(self._small) >= IDS_KEPT:
                self._small.clear()  # cheap to make again; the simplest bound
            self._small[path] = block_id(obj, 0)
        return bytes(self.rows.read_row(row, 0, size))

    def view(self, path: str) -> memoryview:
        """Return all bytes of a file as `read` gives them, but without a copy where they are in one block on this node.

        For code that decodes or copies at once: keeping the view keeps its region's disk space."""
        row = self.row_of(path)
        size = self.rows.object_at(row)[1]
        here = self.rows.read_local(row, 0, size)
        return here if here is not None else memoryview(self.rows.read_row(row, 0, size))

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of a file, cut at its end like a slice."""
        return bytes(self.rows.read_row(self.row_of(path), start, stop))

    def open(self, path: str) -> io.BufferedReader:
        """Open the file as a seekable binary stream."""
        return io.BufferedReader(_SnapshotFile(self, self.row_of(path), path), buffer_size=128 * 1024)

    def object_ref(self, path: str) -> ObjectRef:
        """Return the object, and the version of it, that holds a file's bytes."""
        return self.manifest.object_ref(self.manifest.entry(self.row_of(path)))

    def close(self) -> None:
        """Give back the catalog's connections and the stores'. Later reads raise `SnapshotClosedError`; reads under way
        in other threads go on. Closing again does nothing."""
        if not isinstance(self._local, Closed):
            closed = Closed(self.ref)
            self.manifest = self._local = cast("Any", closed)
            self.rows.cut_off(closed)
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        if self._reopen is None:
            raise TypeError("this snapshot was not opened with open_snapshot() and cannot be pickled")
        return self._reopen

    def _stat_row(self, path: str, row: int) -> Stat:
        entry = self.manifest.entry(row)
        target = entry.target.decode("utf-8", "surrogateescape")
        return Stat(path, entry.size_bytes, entry.mtime_ns, path.endswith("/"), entry.etag, entry.mode, target)

    def row_of(self, path: str) -> int:
        """Return the row of a file, for calls of `rows`. `PathNotFoundError` if there is none."""
        if not isinstance(path, str):
            raise TypeError(f"a file is named by its path, not by {path!r}; paths() gives all")
        row = self.manifest.find(_encode(path))
        if row is None:
            raise self._missing(path)
        return row

    def _missing(self, path: str) -> PathNotFoundError:
        return PathNotFoundError(
            f"{self.record.ref} has no file {path!r}",
            path=path,
            ref=self.record.ref,
            hint=f"See its files: dsctl ls -R {self.record.ref}",
        )


class _SnapshotFile(io.RawIOBase):
    """A file's bytes behind Python's stream protocol."""

    def __init__(self, snapshot: Snapshot, row: int, path: str) -> None:
        self._snapshot, self._row = snapshot, row
        self._size = snapshot.manifest.entry(row).size_bytes
        self._at = 0
        self.name = path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative seek position {base + offset}")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        stop = min(self._at + len(view), self._size, (self._at // BLOCK_BYTES + 1) * BLOCK_BYTES)
        if self._at >= stop:
            return 0
        data = self._snapshot.rows.read_row(self._row, self._at, stop)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
