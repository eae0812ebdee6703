"""`Snapshot`: an immutable set of files, read by path.

What `datacache.open_snapshot()` gives, and what the mount, the fsspec file system and the loaders read through. It
knows a manifest and a block source, nothing of daemons or tiers. Safe from several threads, across `fork()`, and
picklable (the other process opens the same immutable id).
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, cast

from datacache.core.errors import (
    CorruptManifestError,
    DatacacheError,
    ObjectNotFoundError,
    PathNotFoundError,
    SnapshotClosedError,
)
from datacache.core.ids import BLOCK_BYTES, BlockId, ObjectId, ObjectRef, block_count, block_id, object_id
from datacache.manifest.model import Entry, SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.manifest.view import Tree
from datacache.reader.blocks import BlockSource

_IDS_KEPT = 200_000
_ASK_AGAIN_S = 10.0
_FOR_USERS = ("close", "open", "paths", "read", "read_range", "record", "ref", "stat", "view")


class Stat(NamedTuple):
    """What is known of a path without reading it."""

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
        blocks: BlockSource,
        *,
        reopen: tuple[Callable[..., Snapshot], tuple[object, ...]] | None = None,
        on_close: Callable[[], None] = lambda: None,
        is_listed: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_listed` says, when a read has failed, whether the snapshot is in its catalog still."""
        self.record = record
        self.manifest = manifest
        self.tree = Tree(manifest)
        self._blocks = blocks
        self._reopen = reopen
        self._on_close = on_close
        self._is_listed = is_listed
        self._listed_until = 0.0
        self._objects: dict[int, tuple[ObjectId, int]] = {}  # row → object id and size
        self._small: dict[str, BlockId] = {}  # path → its only block

    @property
    def ref(self) -> str:
        """The immutable name, `dataset@id`."""
        return f"{self.record.dataset}@{self.record.id}"

    def __len__(self) -> int:
        """How many files there are."""
        return self.record.files

    def __contains__(self, path: str) -> bool:
        return self.manifest.find(_encode(path)) is not None

    def __iter__(self) -> Iterator[str]:
        """The files' paths in byte order, streamed."""
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
        """The files' paths in byte order; folder markers are not among them."""
        return list(self)

    def stat(self, path: str) -> Stat:
        """Size, time and ETag of a file, or of a directory that has files. `PathNotFoundError` if it is neither."""
        raw = _encode(path)
        row = self.manifest.find(raw)
        if row is not None:
            entry = self.manifest.entry(row)
            target = entry.target.decode("utf-8", "surrogateescape")
            return Stat(path, entry.size_bytes, entry.mtime_ns, raw.endswith(b"/"), entry.etag, entry.mode, target)
        folder = raw.rstrip(b"/") + b"/" if raw else b""
        first = self.manifest.seek(folder)
        if first < self.manifest.rows and self.manifest.path(first).startswith(folder):
            return Stat(path, 0, 0, True, "")
        raise self._missing(path)

    def read(self, path: str) -> bytes:
        """All bytes of a file. `PathNotFoundError`, or the store's error where they cannot be had."""
        block = self._small.get(path)
        if block is not None:
            data = self._blocks.copy_here(block)
            if data is not None:
                return data
        row = self._row(path)
        obj, size = self._objects.get(row) or self._object(row)
        if 0 < size <= BLOCK_BYTES:
            if len(self._small) >= _IDS_KEPT:
                self._small.clear()  # cheap to make again; the simplest bound
            self._small[path] = block_id(obj, 0)
        return bytes(self.read_row(row, 0, size))

    def view(self, path: str) -> memoryview:
        """All bytes of a file as `read` gives them, but without a copy where they are in one block on this node.

        For code that decodes or copies at once: keeping the view keeps its region's disk space."""
        row = self._row(path)
        size = (self._objects.get(row) or self._object(row))[1]
        here = self.read_local(row, 0, size)
        return here if here is not None else memoryview(self.read_row(row, 0, size))

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a file, cut at its end like a slice."""
        return bytes(self.read_row(self._row(path), start, stop))

    def open(self, path: str) -> io.BufferedReader:
        """The file as a seekable binary stream."""
        return io.BufferedReader(_SnapshotFile(self, self._row(path), path), buffer_size=128 * 1024)

    def object_ref(self, path: str) -> ObjectRef:
        """The object, and the version of it, that holds a file's bytes."""
        return self.manifest.object_ref(self.manifest.entry(self._row(path)))

    def entry(self, path: str) -> Entry:
        """The manifest's entry of a file."""
        return self.manifest.entry(self._row(path))

    # The rest is by row: what a mount and the loaders use.

    def read_local(self, row: int, start: int, stop: int) -> memoryview | None:
        """Bytes of a row without waiting and without a copy, if all are in one block that is on this node."""
        obj, size = self._objects.get(row) or self._object(row)
        stop = min(stop, size)
        if start >= stop:
            return memoryview(b"")
        number = start // BLOCK_BYTES
        first = number * BLOCK_BYTES
        if stop > first + BLOCK_BYTES:
            return None
        return self._blocks.view_here(block_id(obj, number), start - first, stop - first)

    def view_object(self, obj: ObjectId, size_bytes: int) -> memoryview | None:
        """All bytes of a small object of this snapshot, as `read_local` gives them, for who knows its id."""
        return self._blocks.view_here(block_id(obj, 0), 0, size_bytes) if size_bytes <= BLOCK_BYTES else None

    def copy_object(self, obj: ObjectId, out: memoryview) -> bool:
        """Copy all bytes of an object of this snapshot to `out`, which is as long, if they are on this node. Of false,
        `out` may hold anything."""
        if len(out) <= BLOCK_BYTES:
            return self._blocks.copy_into_here(block_id(obj, 0), out)
        return all(
            self._blocks.copy_into_here(block_id(obj, number), out[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
            for number in range(block_count(len(out)))
        )

    def peek_block(self, block: BlockId, start: int, stop: int) -> memoryview | None:
        """Bytes of a block of one of this snapshot's objects, if it is on this node: perhaps not verified, so for who
        has a checksum of his own (`BlockSource.peek_here`)."""
        return self._blocks.peek_here(block, start, stop)

    def read_row(self, row: int, start: int, stop: int) -> bytes | memoryview:
        """Bytes of a row, wherever they are, cut at the file's end."""
        entry = self.manifest.entry(row)
        start, stop = max(start, 0), min(stop, entry.size_bytes)
        if start >= stop:
            return b""
        ref = self.manifest.object_ref(entry)
        parts = []
        for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            first = number * BLOCK_BYTES
            part_start, part_stop = max(start - first, 0), min(stop - first, BLOCK_BYTES)
            try:
                parts.append(self._blocks.read(ref, number, part_start, part_stop))
            except (ObjectNotFoundError, CorruptManifestError) as exc:
                self._explain(exc)
                raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release_local(self, row: int, start: int, stop: int) -> None:
        """A hint that the kernel keeps these bytes as pages of a mount now: the cache's own pages may go."""
        obj, size = self._objects.get(row) or self._object(row)
        for number in range(start // BLOCK_BYTES, -(-min(stop, size) // BLOCK_BYTES)):
            self._blocks.release(block_id(obj, number))

    def sweep(self) -> None:
        """Now and then, for who may not read for long: give the disk space of evicted blocks back."""
        self._blocks.sweep()

    def unmap_pages(self) -> None:
        """Now and then, for who goes through a large snapshot: memory then follows what is being read."""
        self._blocks.unmap_pages()

    def close(self) -> None:
        """Give back what was opened: the catalog's connections and the stores'. What is read afterwards is
        `SnapshotClosedError`; what is being read in other threads goes on. Closing again does nothing."""
        closed = _Closed(self.ref)
        if isinstance(self._blocks, _Closed):
            return
        self.manifest = self.tree = self._blocks = cast("Any", closed)
        self._on_close()

    def _explain(self, exc: ObjectNotFoundError | CorruptManifestError) -> None:
        """Say so where an object is gone because the snapshot was removed. Callers see it in logs and messages."""
        now = time.monotonic()
        if now < self._listed_until:
            return
        with suppress(DatacacheError):
            if self._is_listed():
                self._listed_until = now + _ASK_AGAIN_S
            else:
                exc.args = (f"{self.record.ref} was removed from the catalog: {exc.message}",)
                exc.message = exc.args[0]
                exc.hint = "Its data were collected. Open, or mount, a snapshot that there is."

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        if self._reopen is None:
            raise TypeError("this snapshot was not opened with open_snapshot() and cannot be pickled")
        return self._reopen

    def _row(self, path: str) -> int:
        if not isinstance(path, str):
            raise TypeError(f"a file is named by its path, not by {path!r}; paths() gives all")
        row = self.manifest.find(_encode(path))
        if row is None:
            raise self._missing(path)
        return row

    def _object(self, row: int) -> tuple[ObjectId, int]:
        entry = self.manifest.entry(row)
        found = object_id(self.manifest.object_ref(entry)), entry.size_bytes
        if len(self._objects) >= _IDS_KEPT:
            self._objects.clear()  # cheap to make again; simplest bound
        self._objects[row] = found
        return found

    def _missing(self, path: str) -> PathNotFoundError:
        return PathNotFoundError(
            f"{self.record.ref} has no file {path!r}",
            path=path,
            ref=self.record.ref,
            hint=f"See its files: dsctl snapshot show {self.record.ref} --files",
        )


class _Closed:
    """In the place of what a closed snapshot had: whatever is asked of it is an error. So open ones pay nothing."""

    def __init__(self, ref: str) -> None:
        self._ref = ref

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise SnapshotClosedError(f"{self._ref} is closed", hint="Read before close(), or open it again.")


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
        data = self._snapshot.read_row(self._row, self._at, stop)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
