"""The files of a shard set: a local folder that is mapped, or a snapshot that is read through the cache.

Only `reader` reads through it. Both kinds give bytes that are on this node without a copy. They do not verify what they
give: the reader has a checksum of each sample. Any thread, and after `fork()`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from datacache.core.concurrency import gather
from datacache.core.errors import DatacacheError, ObjectNotFoundError, PathNotFoundError, ShardError
from datacache.core.ids import BLOCK_BYTES, BlockId, ObjectId, ObjectRef, object_id
from datacache.core.mapped import MappedFile
from datacache.reader.snapshot import Snapshot

_MAX_MAPS, _MIN_MAPS = 4096, 16
_open: WeakSet[_Mapped] = WeakSet()
"""The mappings of this process: each takes one of its file descriptors."""

Extent = tuple[int, int, int]
"""A shard's number, and the first byte and the end of a part of it."""
_FETCH_BLOCKS = 16
"""Held in memory at a time, until the wanted bytes are copied: up to 64 MiB."""


class ShardFiles(Protocol):
    """The files beside one `shards.json`."""

    where: str
    """For messages: the folder, URL or snapshot."""

    def small(self, name: str) -> bytes | memoryview | None:
        """Return a whole small file; None if it does not exist."""
        ...

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes; None if it does not exist."""
        ...

    def use(self, names: Sequence[str]) -> None:
        """Give the shards their numbers."""
        ...

    def here(self, shard: int, start: int, stop: int) -> tuple[memoryview, ...] | None:
        """Return bytes `start:stop` (at least one) of a shard, in one or more parts, without a copy and without
        waiting; None where that is not possible. The caller must not keep them for long."""
        ...

    def read(self, shard: int, start: int, stop: int) -> bytes | memoryview:
        """Return the same bytes, wherever they are. Raise `ShardError` if the shard is missing or ends before; the
        store's errors."""
        ...

    def read_all(self, places: Sequence[Extent]) -> list[bytes | memoryview | DatacacheError]:
        """Read several places at once. Errors that `read` raises are among the results."""
        ...

    def refs(self) -> tuple[ObjectRef, ...]:
        """Return the shards' objects, for lookahead; none where there is nothing to fetch."""
        ...


class FolderFiles:
    """`ShardFiles` in a folder of this machine. Shards are mapped when they are first read, at most so many that all
    folders together leave half of the process's file descriptors to others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.where = str(folder)
        self._names: Sequence[str] = ()
        self._maps: dict[int, _Mapped] = {}

    def small(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            raise ShardError(f"{self._folder / name} cannot be read: {exc.strerror}", shard=name) from exc

    def size(self, name: str) -> int | None:
        try:
            return (self._folder / name).stat().st_size
        except OSError:
            return None

    def use(self, names: Sequence[str]) -> None:
        self._names = names

    def here(self, shard: int, start: int, stop: int) -> tuple[memoryview, ...] | None:
        mapped = self._maps.get(shard)
        if mapped is None:
            mapped = self._map(shard)
            if mapped is None:
                return None
        # Touching a mapping behind the end of its file is fatal (SIGBUS), so its size is looked at every time.
        if mapped.size() < stop:
            return None
        if not mapped.has(0, start, stop):
            try:
                mapped.need(0, len(mapped.view), start, stop)
            except OSError:  # `read` says why
                return None
        return (mapped.view[start:stop],)

    def read(self, shard: int, start: int, stop: int) -> bytes | memoryview:
        name = self._names[shard]
        self._maps.pop(shard, None)  # another file may have taken its place
        data, done = memoryview(bytearray(stop - start)), 0
        try:
            with open(self._folder / name, "rb") as file:
                # read(2): at most 0x7ffff000 bytes at once.
                while done < len(data) and (count := os.preadv(file.fileno(), [data[done:]], start + done)):
                    done += count
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError as exc:
            raise missing(self.where, name) from exc
        except OSError as exc:
            raise ShardError(f"{self._folder / name} cannot be read: {exc.strerror}", shard=name) from exc
        if done != len(data):
            raise cut_short(self.where, name, size, stop)
        return data

    def read_all(self, places: Sequence[Extent]) -> list[bytes | memoryview | DatacacheError]:
        return gather(lambda place: self.read(*place), places)

    def refs(self) -> tuple[ObjectRef, ...]:
        return ()

    def _map(self, shard: int) -> _Mapped | None:
        if len(self._maps) >= _MIN_MAPS and len(_open) >= _max_maps():
            for old in list(self._maps)[: max(1, len(self._maps) // 4)]:
                self._maps.pop(old, None)
        try:
            return self._maps.setdefault(shard, _Mapped(self._folder / self._names[shard]))
        except (OSError, ValueError):  # missing, or empty
            return None

    def __reduce__(self) -> tuple[object, ...]:
        return (FolderFiles, (self._folder,), self._names)

    def __setstate__(self, names: Sequence[str]) -> None:
        self.use(names)


class SnapshotFiles:
    """`ShardFiles` in the root of a snapshot, read through the node's cache."""

    def __init__(self, snapshot: Snapshot, *, listed: bool = True) -> None:
        self.snapshot = snapshot
        self.listed = listed
        """True if the catalog has the snapshot; false for one that was made of a URL just now."""
        self.where = snapshot.record.ref if listed else snapshot.record.origin
        self._names: Sequence[str] = ()
        self.rows: list[int | None] = []
        """The shards' rows in the manifest; None for one that is missing."""
        self._sizes: list[int] = []
        self._objects: list[ObjectId] = []

    def small(self, name: str) -> bytes | None:
        try:
            return self.snapshot.read(name)
        except (PathNotFoundError, ObjectNotFoundError):
            return None

    def size(self, name: str) -> int | None:
        row = self.snapshot.manifest.find(name.encode())
        return None if row is None else self.snapshot.manifest.entry(row).size_bytes

    def use(self, names: Sequence[str]) -> None:
        manifest = self.snapshot.manifest
        self._names = names
        self.rows = [manifest.find(name.encode()) for name in names]
        entries = [None if row is None else manifest.entry(row) for row in self.rows]
        self._sizes = [0 if entry is None else entry.size_bytes for entry in entries]
        self._objects = [ObjectId(b"") if entry is None else object_id(manifest.object_ref(entry)) for entry in entries]

    def here(self, shard: int, start: int, stop: int) -> tuple[memoryview, ...] | None:
        if stop > self._sizes[shard]:
            return None
        number, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        if number == last:
            first, id = number * BLOCK_BYTES, BlockId(self._objects[shard] + number.to_bytes(4, "big"))
            found = self.snapshot.rows.peek_block(id, start - first, stop - first)
            return None if found is None else (found,)
        parts = []
        for each in range(number, last + 1):
            part = self._piece(shard, each, start, stop)
            if part is None:
                return None
            parts.append(part)
        return tuple(parts)

    def read(self, shard: int, start: int, stop: int) -> bytes | memoryview:
        row, name = self.rows[shard], self._names[shard]
        if row is None:
            raise missing(self.where, name)
        if stop > self._sizes[shard]:
            raise cut_short(self.where, name, self._sizes[shard], stop)
        return self.snapshot.rows.read_row(row, start, stop)

    def read_all(self, places: Sequence[Extent]) -> list[bytes | memoryview | DatacacheError]:
        """See `ShardFiles`. Of a block with several places what they span is fetched at once."""
        found: dict[Extent, bytes | memoryview | DatacacheError] = {}
        group: list[Extent] = []
        wanted: dict[tuple[int, int], Extent] = {}
        for place in sorted(set(places)):  # neighbours together
            missing = self._missing(*place)
            if group and len(wanted.keys() | missing.keys()) > _FETCH_BLOCKS:
                found |= self._fetched(group, wanted)
                group, wanted = [], {}
            group.append(place)
            for block, (shard, start, stop) in missing.items():
                _, first, end = wanted.get(block, (shard, start, stop))
                wanted[block] = shard, first, max(end, stop)
        found |= self._fetched(group, wanted)
        return [found[place] for place in places]

    def _missing(self, shard: int, start: int, stop: int) -> dict[tuple[int, int], Extent]:
        """Return what of these bytes lies in each block (shard, number) that is not here; nothing where only `read` can
        say what is wrong."""
        if stop > self._sizes[shard]:
            return {}
        return {
            (shard, number): (shard, max(start, number * BLOCK_BYTES), min(stop, (number + 1) * BLOCK_BYTES))
            for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
            if self._piece(shard, number, start, stop) is None
        }

    def _fetched(
        self, places: Sequence[Extent], wanted: Mapping[tuple[int, int], Extent]
    ) -> dict[Extent, bytes | memoryview | DatacacheError]:
        """Read places for which these parts of blocks have to be fetched."""
        came = gather(lambda part: self.read(*part), list(wanted.values()))
        blocks = {block: (start, data) for (block, (_, start, _)), data in zip(wanted.items(), came, strict=True)}
        found = {place: self._join(*place, blocks) for place in places}
        # Evicted this moment, or not to be fetched: `read` says what is wrong.
        left = [place for place, data in found.items() if data is None]
        read = dict(zip(left, gather(lambda place: self.read(*place), left), strict=True))
        return {place: read[place] if data is None else data for place, data in found.items()}

    def _join(
        self,
        shard: int,
        start: int,
        stop: int,
        blocks: Mapping[tuple[int, int], tuple[int, bytes | memoryview | DatacacheError]],
    ) -> bytes | DatacacheError | None:
        """Copy bytes out of what was fetched of blocks (from which byte of the shard on), and out of local blocks; a
        view would keep all of it."""
        if stop > self._sizes[shard]:
            return None
        parts: list[memoryview] = []
        for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            first, data = blocks.get((shard, number), (0, None))
            if isinstance(data, DatacacheError):
                return data
            begin, end = max(start, number * BLOCK_BYTES), min(stop, (number + 1) * BLOCK_BYTES)
            if data is not None and first <= begin and end <= first + len(data):
                parts.append(memoryview(data)[begin - first : end - first])
            elif (piece := self._piece(shard, number, start, stop)) is not None:
                parts.append(piece)
            else:
                return None
        return b"".join(parts)

    def _piece(self, shard: int, number: int, start: int, stop: int) -> memoryview | None:
        """Return the part of `start:stop` that lies in a block, if it is here."""
        first = number * BLOCK_BYTES
        id = BlockId(self._objects[shard] + number.to_bytes(4, "big"))
        return self.snapshot.rows.peek_block(id, max(start - first, 0), min(stop - first, BLOCK_BYTES))

    def refs(self) -> tuple[ObjectRef, ...]:
        """See `ShardFiles`. An empty object stands for a missing shard."""
        manifest = self.snapshot.manifest
        nothing = ObjectRef("memory://nothing", "", 0)
        return tuple(nothing if row is None else manifest.object_ref(manifest.entry(row)) for row in self.rows)

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(SnapshotFiles, listed=self.listed), (self.snapshot,), self._names)

    def __setstate__(self, names: Sequence[str]) -> None:
        self.use(names)


def missing(where: str, name: str) -> ShardError:
    """Return the error for a missing shard."""
    return ShardError(
        f"the shard {name} is missing from {where}",
        shard=name,
        hint="Copy it there again, or build the set again: dsctl shard makes only what is missing.",
    )


def cut_short(where: str, name: str, size_bytes: int, wanted: int) -> ShardError:
    """Return the error for a shard that ends too early."""
    return ShardError(
        f"the shard {name} of {where} is cut short: it has {size_bytes:,} bytes and should have at least {wanted:,}",
        shard=name,
        hint="Copy it there again, or build the set again: dsctl shard makes only what is not whole.",
    )


class _Mapped(MappedFile):
    """A shard's file, mapped. The mapping goes with its last view."""

    __slots__ = ("__weakref__", "size")

    def __init__(self, path: Path) -> None:
        super().__init__(path, keep_open=False)
        self.size: Callable[[], int] = self.map.size
        """The file's size in bytes, now."""
        _open.add(self)


def _max_maps() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_MAPS if soft == resource.RLIM_INFINITY else max(_MIN_MAPS, min(_MAX_MAPS, soft // 2))
