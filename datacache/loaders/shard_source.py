"""The samples of a shard set, in the order in which they lie in its shards (`source`); and shards as verified files.

Used by `ShardDataset` and by `datacache.tf`, whose TFRecords are read by their paths. Any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from datacache.annotations.pairing import is_image
from datacache.core.errors import ObjectChangedError, ObjectNotFoundError, ShardError, StoreError, UsageError
from datacache.core.ids import BLOCK_BYTES
from datacache.loaders.lookahead import PlanSource
from datacache.loaders.selection import (
    KINDS,
    NO_CLASS,
    boxes_of_json,
    check_kind,
    class_of_json,
    path_of_json,
    shapes_of_json,
)
from datacache.loaders.shapes import SHAPE_KINDS
from datacache.loaders.source import Read, SampleSource
from datacache.loaders.tasks.queue import Span
from datacache.reader.local_file import LocalFile, LocalFiles
from datacache.settings import Settings
from datacache.shards.reader import Shards
from datacache.shards.source import SnapshotFiles, cut_short, missing


class ShardSource(SampleSource):
    """All samples of a set of WebDataset shards."""

    def __init__(self, shards: Shards, target: str | None) -> None:
        extensions = {name for index in shards.indexes() for name in index.extensions}
        # The builder describes images, and groups files where there is none: a .json or .txt is then any file.
        self._described = any(is_image(f"x.{extension}".encode()) for extension in extensions)
        self._has_boxes = self._described and bool(shards.set.classes) and "txt" in extensions
        SampleSource.__init__(self, shards.sizes, _kind(shards, target, self._has_boxes), shards.set.classes)
        self.shards = shards
        self._class_ids = {name: number for number, name in enumerate(self.classes)}

    def path(self, sample: int) -> str:
        shard, key = self.shards.name(sample)
        return f"{shard}/{key}"

    def target(self, sample: int) -> Any:
        """Return a sample's target. Boxes, paths and the class of boxes come out of the shard's `.json` members."""
        if self.kind in ("detection", *SHAPE_KINDS):
            raw = self._json(sample)
            if raw is None:
                shard, key = self.shards.name(sample)
                raise ShardError(
                    f"sample {key!r} of {shard} has no .json, so no boxes", shard=shard, sample=key, hint="target=None."
                )
            if self.kind == "detection":
                return boxes_of_json(raw, self._class_ids, self.path(sample))
            return shapes_of_json(raw, self._class_ids, self.kind, self.path(sample))
        if self.kind == "classification":
            known = int(self.shards.classes[sample])
            raw = self._json(sample) if known == NO_CLASS and self._has_boxes else None
            return known if raw is None else class_of_json(raw, self._class_ids, self.path(sample))
        raw = self._json(sample)
        named = None if raw is None else path_of_json(raw)
        return self.shards.name(sample)[1] if named is None else named

    def _json(self, sample: int) -> bytes | memoryview | None:
        """Return what the builder says of an image; None for files of another kind."""
        if not self._described:
            return None
        member = next((each for each in self.shards.members(sample) if each.extension == "json"), None)
        return None if member is None else self.shards.read(sample, member)

    def groups(self) -> NDArray[np.int64]:
        """Return the sizes of the runs of samples that lie in one block of one shard, which is fetched as a whole."""
        shards = self.shards.shards_of(np.arange(len(self), dtype=np.int64))
        blocks = shards * 2**32 + self.shards.offsets // BLOCK_BYTES
        starts = np.concatenate(([0], np.flatnonzero(np.diff(blocks)) + 1, [len(self)]))
        return np.diff(starts).astype(np.int64) if len(self) else np.zeros(0, np.int64)

    def spans(self) -> list[Span]:
        starts = self.shards.starts.tolist()
        return [
            Span(info.name, start, info.samples)
            for info, start in zip(self.shards.set.shards, starts, strict=False)
            if info.samples
        ]

    def plan_source(self) -> PlanSource | None:
        """Return, for lookahead, rows of the manifest, or shards by number. None for a folder of this machine."""
        files = self.shards.files
        if not isinstance(files, SnapshotFiles):
            return None
        record = files.snapshot.record
        if files.listed:
            return PlanSource(record.dataset, record.id)
        return PlanSource(record.dataset, "", files.refs())

    def plan_items(self, samples: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return, for lookahead, shard, first block and number of blocks of each sample."""
        files = self.shards.files
        assert isinstance(files, SnapshotFiles)
        shards = self.shards.shards_of(samples)
        items = np.zeros((len(samples), 3), np.uint32)
        items[:, 0] = shards
        if files.listed:
            items[:, 0] = np.array([row or 0 for row in files.rows], np.uint32)[shards]
        offsets, sizes = self.shards.offsets[samples], self.shards.sizes[samples]
        items[:, 1] = offsets // BLOCK_BYTES
        items[:, 2] = -(-(offsets + sizes) // BLOCK_BYTES) - offsets // BLOCK_BYTES
        if files.listed and None in files.rows:
            items[np.array([row is None for row in files.rows])[shards], 2] = 0
        return items

    def view_here(self, sample: int) -> bytes | memoryview | None:
        if not self._sizes[sample]:
            return None if self.shards.broken else memoryview(b"")
        return self.shards.first_here(sample)

    def copy_here(self, samples: NDArray[np.int64], out: memoryview, starts: Sequence[int]) -> list[int]:
        return self.shards.copy_here(samples, out, starts)

    def fetch(self, samples: Sequence[int]) -> list[Read]:
        return self.shards.read_first(samples)


def _kind(shards: Shards, target: str | None, boxes: bool) -> str | None:
    check_kind(target, KINDS + SHAPE_KINDS)
    classes = bool(np.any(shards.classes != NO_CLASS))
    if target == "auto":
        return "detection" if boxes else "classification" if classes else "path"
    if target == "folder":
        target = "classification"
    if target == "classification" and not classes and not boxes:
        raise UsageError(f"the shards of {shards.files.where} have no classes", hint="target='path', or None.")
    if target in ("detection", *SHAPE_KINDS) and not boxes:
        raise UsageError(f"the shards of {shards.files.where} have no boxes", hint="target='path', or None.")
    return target


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
        if self._file is not None:
            self._file.close()


class ShardPaths:
    """Makes local paths of shards. A set in a folder lies there already; shards of a snapshot or a URL become local
    files (`reader.local_file`). A path is given only if the file's size and hash are those that `shards.json` says."""

    def __init__(self, shards: Shards, settings: Settings) -> None:
        self._shards = shards
        files = shards.files
        self._local = LocalFiles(files.snapshot, settings) if isinstance(files, SnapshotFiles) else None
        self._rows = files.rows if isinstance(files, SnapshotFiles) else ()
        self._verified: dict[int, tuple[int, ...]] = {}
        """By number: device, inode, time and size of the file that was verified."""

    def open(self, number: int) -> ShardPath:
        """Return a shard's path. Raise `ShardError` that names it if it is not there, or not what it should be; the
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
            identity = found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
            if found.st_size < info.size_bytes:
                raise cut_short(where, info.name, found.st_size, info.size_bytes)
            if self._verified.get(number) == identity:
                return
            digest, at = xxh3_128(), 0
            while found.st_size == info.size_bytes and (data := os.pread(fd, _READ_BYTES, at)):
                digest.update(data)
                at += len(data)
            if found.st_size != info.size_bytes or digest.hexdigest() != info.digest:
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
