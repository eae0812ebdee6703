"""Read a snapshot by row and by object id, as mounts and loaders do: `Snapshot.rows`.

Rows are positions in the manifest. Several threads may call it, and a child of `fork()` may go on.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, cast

from datacache.core.concurrency import gather
from datacache.core.errors import CorruptManifestError, DatacacheError, ObjectNotFoundError, SnapshotClosedError
from datacache.core.ids import BLOCK_BYTES, BlockId, ObjectId, block_count, block_id, object_id
from datacache.daemon.client import AskedBlock
from datacache.manifest.model import SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.manifest.view import Tree
from datacache.reader.blocks import NodeBlocks

IDS_KEPT = 200_000
_ASK_AGAIN_S = 10.0


class RowReader:
    """The rows and objects of one snapshot. Ranges of a row are cut at its file's end."""

    def __init__(
        self, record: SnapshotRecord, manifest: Manifest, blocks: NodeBlocks, is_listed: Callable[[], bool]
    ) -> None:
        """`is_listed` tells, after a failed read, whether the catalog still has the snapshot."""
        self.record = record
        self.manifest = manifest
        self.tree = Tree(manifest)
        self._blocks, self._local = blocks, blocks.local
        self._is_listed = is_listed
        self._listed_until = 0.0
        self._objects: dict[int, tuple[ObjectId, int]] = {}  # row → object id and size

    def object_at(self, row: int) -> tuple[ObjectId, int]:
        """Return the object of a row, and its size."""
        return self._objects.get(row) or self._object(row)

    def read_local(self, row: int, start: int, stop: int) -> memoryview | None:
        """Return bytes of a row without waiting and without a copy, if one block on this node has them all."""
        obj, size = self._objects.get(row) or self._object(row)
        stop = min(stop, size)
        if start >= stop:
            return memoryview(b"")
        number = start // BLOCK_BYTES
        first = number * BLOCK_BYTES
        if stop > first + BLOCK_BYTES:
            return None
        return self._local.view(block_id(obj, number), start - first, stop - first)

    def map_row(self, row: int) -> mmap.mmap | None:
        """Return all bytes of a row, verified, as a mapping that its holder may write to (`LocalBlocks.map_object`), if
        one file on this node has them."""
        return self._local.map_object(*self.object_at(row))

    def read_row(self, row: int, start: int, stop: int, into: memoryview | None = None) -> bytes | memoryview:
        """Return bytes of a row, wherever they are. Raises the store's errors if they cannot be had.

        `into`: a buffer for all of them, where they are in one block. What the daemon sends is received there, and the
        result then is a view of it (the same `obj`); after an error the buffer may hold anything."""
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
                parts.append(self._blocks.read(ref, number, part_start, part_stop, into))
            except (ObjectNotFoundError, CorruptManifestError) as exc:
                self._explain(exc)
                raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def any_local(self) -> bool:
        """Tell whether anything may be on this node: for callers that would ask for thousands of rows."""
        return self._local.has_index()

    def read_file(self, row: int, start: int, stop: int) -> bytes | memoryview | None:
        """Return bytes of a row that is a file of this machine, from where it lies: for callers that read it once, and
        need no copy in the cache. None for other rows, and where only `read_row` can tell the reason."""
        ref = self.manifest.object_ref(self.manifest.entry(row))
        return self._blocks.read_file(ref, start, min(stop, ref.size_bytes))

    def ask_row(self, row: int, start: int, stop: int) -> AskedBlock | None:
        """Ask the daemon for bytes of a row that `read_local` has just not given, and do not wait for them. None where
        only `read_row` can get them."""
        obj, size = self.object_at(row)
        number = start // BLOCK_BYTES
        first, stop = number * BLOCK_BYTES, min(stop, size)
        if not first <= start < stop <= first + BLOCK_BYTES:
            return None
        ref = self.manifest.object_ref(self.manifest.entry(row))
        return self._blocks.ask(block_id(obj, number), ref, number, (start - first, stop - first))

    def read_rows(self, rows: Sequence[int]) -> list[bytes | memoryview | DatacacheError]:
        """Return all bytes of some rows, wherever they are, or the error of each that cannot be had. Those of one block
        that are not on this node are asked for together."""
        refs = [self.manifest.object_ref(self.manifest.entry(row)) for row in rows]
        together = [at for at, ref in enumerate(refs) if 0 < ref.size_bytes <= BLOCK_BYTES]
        found: dict[int, bytes | memoryview | DatacacheError] = dict(
            zip(together, self._blocks.read_whole([(refs[at], 0) for at in together]), strict=True)
        )
        for data in found.values():
            if isinstance(data, ObjectNotFoundError | CorruptManifestError):
                self._explain(data)
        left = [at for at in range(len(rows)) if at not in found]
        found |= zip(left, gather(lambda at: self.read_row(rows[at], 0, refs[at].size_bytes), left), strict=True)
        return [found[at] for at in range(len(rows))]

    def view_object(self, obj: ObjectId, size_bytes: int) -> memoryview | None:
        """Return all bytes of an object of one block, as `read_local` does."""
        return self._local.view(block_id(obj, 0), 0, size_bytes) if size_bytes <= BLOCK_BYTES else None

    def copy_object(self, obj: ObjectId, out: memoryview) -> bool:
        """Copy all bytes of an object to `out`, which is as long, if they are on this node. After False `out` may hold
        anything."""
        if len(out) <= BLOCK_BYTES:
            return self._local.copy_into(block_id(obj, 0), out)
        return all(
            self._local.copy_into(block_id(obj, number), out[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
            for number in range(block_count(len(out)))
        )

    def peek_block(self, block: BlockId, start: int, stop: int) -> memoryview | None:
        """Return bytes of a block on this node, perhaps not verified: for callers that verify their own copy."""
        return self._local.peek(block, start, stop)

    def release_local(self, row: int, start: int, stop: int) -> None:
        """Let go of cached pages of a row: the kernel keeps these bytes as pages of a mount now."""
        obj, size = self._objects.get(row) or self._object(row)
        for number in range(start // BLOCK_BYTES, -(-min(stop, size) // BLOCK_BYTES)):
            self._local.drop_pages(block_id(obj, number))

    def object_file(self, row: int) -> int | None:
        """Return the number of the SSD tier's file of exactly a row's bytes; None if there is none, or it was not
        checked as a whole. By the index: bytes unseen."""
        return self._local.object_file(*self.object_at(row))

    def open_object_file(self, row: int) -> tuple[int, int] | None:
        """Return number and descriptor, the caller's, of the SSD tier's file of exactly a row's bytes. Every byte has
        just been verified. None if there is none, whatever the reason."""
        return self._local.open_object_file(*self.object_at(row))

    def has_object_file(self, number: int) -> bool:
        """Tell whether the SSD tier still has a file of its own."""
        return self._local.has_object_file(number)

    def touch_object_file(self, number: int) -> None:
        """Note that a file of the SSD tier is read now, past this process, so that it is not evicted as unused."""
        self._local.touch_object_file(number)

    def sweep(self) -> None:
        """Give the disk space of evicted blocks back, and find an index that was made anew. A process that may not read
        for long, or only asks, calls it now and then."""
        self._local.sweep()
        self._local.refresh()

    def unmap_pages(self) -> None:
        """Let go of the memory that was read, now and then in a pass through a large snapshot."""
        self._local.unmap_pages()

    def cut_off(self, closed: Closed) -> None:
        """Let every later read raise `SnapshotClosedError`."""
        self.manifest = self.tree = self._blocks = self._local = cast("Any", closed)

    def _object(self, row: int) -> tuple[ObjectId, int]:
        entry = self.manifest.entry(row)
        found = object_id(self.manifest.object_ref(entry)), entry.size_bytes
        if len(self._objects) >= IDS_KEPT:
            self._objects.clear()  # cheap to make again; simplest bound
        self._objects[row] = found
        return found

    def _explain(self, exc: ObjectNotFoundError | CorruptManifestError) -> None:
        """Name the reason, in logs and messages, if an object is gone because the snapshot was removed."""
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


class Closed:
    """Stands in for the parts of a closed snapshot and raises at any use, so that open ones need no check."""

    def __init__(self, ref: str) -> None:
        self._ref = ref

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise SnapshotClosedError(f"{self._ref} is closed", hint="Read before close(), or open it again.")
