"""Snapshots in memory, of the shape the mount stands on, for tests of the mount alone.

Workers find these openers by name (`MountConfig.opener`) and what to show in `STANDIN_FOLDER`. In
`open_folder` a few paths are special: below `slow/` nothing is local and a read waits until somebody writes
to the FIFO `STANDIN_GATE`; below `errors/` a read raises the error of `core.errors` that the name says; below
`crash/` a local read kills the worker.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from datacache.core import errors
from datacache.manifest.model import Entry, SnapshotRecord


class Child(NamedTuple):
    name: bytes
    is_dir: bool
    row: int
    next_row: int
    is_link: bool = False


class Tree:
    def __init__(self, entries: list[Entry]) -> None:
        self._entries = sorted(entries)
        self._paths = [entry.path for entry in self._entries]

    def entry(self, row: int) -> Entry:
        return self._entries[row]

    def prefix_of(self, depth: int, first_row: int) -> bytes:
        return b"".join(part + b"/" for part in self._paths[first_row].split(b"/")[:depth])

    def child(self, prefix: bytes, name: bytes) -> Child | None:
        path = prefix + name
        row = bisect_left(self._paths, path)
        if row < len(self._paths) and self._paths[row] == path:
            return Child(name, False, row, row + 1)
        row = bisect_left(self._paths, path + b"/")
        if row < len(self._paths) and self._paths[row].startswith(path + b"/"):
            return Child(name, True, row, bisect_left(self._paths, path + b"0"))
        return None

    def children(self, prefix: bytes, start_row: int | None = None, stop_row: int | None = None) -> Iterator[Child]:
        paths, skip = self._paths, len(prefix)
        row = bisect_left(paths, prefix) if start_row is None else start_row
        stop = bisect_left(paths, prefix[:-1] + b"0") if prefix else len(paths)
        while row < stop:
            name, slash, _ = paths[row][skip:].partition(b"/")
            first, row = row, bisect_left(paths, prefix + name + b"0") if slash else row + 1
            if name:  # not the folder's own marker
                yield Child(name, bool(slash), first, row)


class FolderSnapshot:
    """A folder's files as a snapshot."""

    def __init__(self, folder: Path) -> None:
        files = [Path(top) / name for top, _, names in os.walk(folder) for name in names]
        entries = []
        for path in files:
            facts = path.stat()
            entries.append(Entry(os.fsencode(path.relative_to(folder)), facts.st_size, facts.st_mtime_ns))
        entries += [
            Entry(os.fsencode(Path(top).relative_to(folder)) + b"/", 0, 0)
            for top, folders, names in os.walk(folder)
            if not folders and not names and top != str(folder)
        ]
        self.folder = os.fsencode(folder)
        self.tree = Tree(entries)
        self.record = record(sum(not e.path.endswith(b"/") for e in entries), sum(e.size_bytes for e in entries))
        self._maps: dict[int, memoryview] = {}

    @property
    def rows(self) -> FolderSnapshot:
        return self

    def _bytes(self, row: int) -> memoryview:
        found = self._maps.get(row)
        if found is None:
            with open(os.path.join(self.folder, self.tree.entry(row).path), "rb") as file:
                found = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            if len(self._maps) > 4096:
                self._maps.clear()
            self._maps[row] = found
        return found

    def read_local(self, row: int, start: int, stop: int) -> memoryview | None:
        path = self.tree.entry(row).path
        if path.startswith((b"slow/", b"errors/")):
            return None
        if path.startswith(b"crash/") and "DATACACHE_BYPASS_LOCAL" not in os.environ:
            signal.pthread_kill(threading.get_ident(), signal.SIGBUS)  # as a fault: nothing after it is done
        return self._bytes(row)[start:stop]

    def ask_row(self, row: int, start: int, stop: int) -> None:
        """Nobody can be asked."""

    def read_row(self, row: int, start: int, stop: int) -> bytes:
        path = self.tree.entry(row).path
        if path.startswith(b"slow/"):
            os.close(os.open(os.environ["STANDIN_GATE"], os.O_RDONLY))
        if path.startswith(b"errors/"):
            raise getattr(errors, path.removeprefix(b"errors/").decode())("the test wants it")
        return bytes(self._bytes(row)[start:stop])

    def release_local(self, row: int, start: int, stop: int) -> None:
        pass

    def unmap_pages(self) -> None:
        """Nothing is mapped."""

    def sweep(self) -> None:
        pass

    def close(self) -> None:
        pass


class NamesSnapshot(FolderSnapshot):
    """Many empty files in one directory, without a folder behind it."""

    def __init__(self, count: int) -> None:
        self.folder = b""
        self.tree = Tree([Entry(b"%08d.jpg" % number, 0, 0) for number in range(count)])
        self.record = record(count, 0)
        self._maps = {}


def record(files: int, total_bytes: int) -> SnapshotRecord:
    return SnapshotRecord(
        dataset="mask",
        id="0123456789abcdef" * 2,
        created_at="2024-05-06T07:08:09Z",
        origin="file:///nowhere",
        files=files,
        total_bytes=total_bytes,
    )


def open_folder(ref: str, *, settings: Any) -> FolderSnapshot:
    if ref.startswith("missing"):
        raise errors.SnapshotNotFoundError(f"there is no {ref}", ref=ref, hint="dsctl snapshot list")
    return FolderSnapshot(Path(os.environ["STANDIN_FOLDER"]))


def open_if_there(ref: str, *, settings: Any) -> FolderSnapshot:
    if not os.path.exists(os.environ["STANDIN_FOLDER"]):
        raise errors.StoreUnavailableError("it went away")
    return open_folder(ref, settings=settings)


def open_by_name(ref: str, *, settings: Any) -> FolderSnapshot:
    """As `open_folder`; those whose name begins with `hanging` are never opened, and the file `STANDIN_OPENING` says
    that it was tried. Those that begin with `removed` are not there any more once there is the file `STANDIN_REMOVED`.
    """
    if ref.startswith("removed") and os.path.exists(os.environ["STANDIN_REMOVED"]):
        raise errors.SnapshotNotFoundError(f"there is no {ref}", ref=ref, hint="")
    if ref.startswith("hanging"):
        if "STANDIN_OPENING" in os.environ:
            Path(os.environ["STANDIN_OPENING"]).touch()
        threading.Event().wait()
    snapshot = open_folder(ref, settings=settings)
    snapshot.record = replace(snapshot.record, dataset=ref.partition("@")[0])
    return snapshot


def open_behind_gate(ref: str, *, settings: Any) -> FolderSnapshot:
    os.close(os.open(os.environ["STANDIN_GATE"], os.O_RDONLY))
    return open_folder(ref, settings=settings)


def open_never(ref: str, *, settings: Any) -> FolderSnapshot:
    Path(os.environ["STANDIN_GATE"]).write_bytes(b"opening")
    while True:
        signal.pause()


def open_names(ref: str, *, settings: Any) -> NamesSnapshot:
    return NamesSnapshot(int(os.environ["STANDIN_NAMES"]))
