"""Shards as files of this machine, verified, for programs that read a shard by its path.

A set in a folder lies there already; shards of a snapshot or a URL become local files (`reader.local_file`). A path is
given only if the file's size and hash are those that `shards.json` says. Any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128

from datacache.core.errors import ObjectChangedError, ObjectNotFoundError, ShardError, StoreError
from datacache.reader.local_file import LocalFile, LocalFiles
from datacache.settings import Settings
from datacache.shards.reader import Shards
from datacache.shards.source import SnapshotFiles, cut_short, missing

_READ_BYTES = 2**20


class ShardPath:
    """The local path of a shard, for as long as it is held."""

    def __init__(self, path: Path, file: LocalFile | None, changed: Callable[[StoreError], ShardError]) -> None:
        self.path = path
        self._file, self._changed = file, changed

    def finish(self) -> None:
        """Close it. `ShardError` if it is a bucket's own file and was written to while it was read."""
        try:
            if self._file is not None:
                self._file.check()
        except StoreError as exc:
            raise self._changed(exc) from exc
        finally:
            self.close()

    def close(self) -> None:
        """Give the path up."""
        if self._file is not None:
            self._file.close()


class ShardPaths:
    """Makes local paths of shards, verified. Any thread."""

    def __init__(self, shards: Shards, settings: Settings) -> None:
        self._shards = shards
        files = shards.files
        self._local = LocalFiles(files.snapshot, settings) if isinstance(files, SnapshotFiles) else None
        self._rows = files.rows if isinstance(files, SnapshotFiles) else ()
        self._verified: dict[int, _Identity] = {}

    def open(self, number: int) -> ShardPath:
        """A shard's path. `ShardError` that names it if it is not there, or not what it should be; the
        store's error where that is away."""
        name, where = self._shards.set.shards[number].name, self._shards.files.where
        if number in self._shards.broken:
            raise self._shards.broken[number]

        def unreadable(exc: StoreError) -> ShardError:
            return ShardError(f"the shard {name} of {where} cannot be read: {exc}", shard=name, hint=exc.hint)

        file = None
        if self._local is not None:
            row = self._rows[number]
            if row is None:
                raise missing(where, name)
            try:
                file = self._local.open_row(row)
            except (ObjectNotFoundError, ObjectChangedError) as exc:
                raise unreadable(exc) from exc
        shard = ShardPath(Path(where, name) if file is None else file.path, file, unreadable)
        try:
            self._verify(number, shard.path)
        except BaseException:
            shard.close()
            raise
        return shard

    def _verify(self, number: int, path: Path) -> None:
        info, where = self._shards.set.shards[number], self._shards.files.where
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            raise missing(where, info.name) from exc
        except OSError as exc:
            raise ShardError(f"{path} cannot be read: {exc.strerror}", shard=info.name) from exc
        try:
            found = os.fstat(fd)
            identity = _Identity(found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
            if found.st_size < info.size_bytes:
                raise cut_short(where, info.name, found.st_size, info.size_bytes)
            if self._verified.get(number) == identity:
                return
            if found.st_size != info.size_bytes or _digest(fd) != info.digest:
                raise ShardError(
                    f"the bytes of {info.name} in {where} are not those that were written",
                    shard=info.name,
                    hint="It was damaged, or replaced by another one: copy it again, or see dsctl shard --check.",
                )
            self._verified[number] = identity
        except OSError as exc:
            raise ShardError(f"{path} cannot be read: {exc.strerror}", shard=info.name) from exc
        finally:
            os.close(fd)


class _Identity(NamedTuple):
    """By which a file that was verified is known again."""

    device: int
    inode: int
    mtime_ns: int
    size_bytes: int


def _digest(fd: int) -> str:
    found, at = xxh3_128(), 0
    while data := os.pread(fd, _READ_BYTES, at):
        found.update(data)
        at += len(data)
    return found.hexdigest()
