"""Bringing bytes here, into staged files: objects of the bucket, and what lies in the journal.

Used by the file system and by the uploader. Any thread, without the engine's lock: all of it waits for a disk or the
store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Protocol

from datacache.core.disk import write_all
from datacache.core.errors import ObjectChangedError, ObjectNotFoundError, StagingError, StagingFullError
from datacache.core.ids import BLOCK_BYTES, ObjectRef
from datacache.tiers.local import LocalBlocks
from datacache.writeback.engine import WriteBack
from datacache.writeback.journal.segments import FULL
from datacache.writeback.model import Pending, Staged, Stored


class Blocks(Protocol):
    """The node's read cache (`reader.blocks.NodeBlocks`)."""

    local: LocalBlocks

    def read(self, ref: ObjectRef, number: int, start: int, stop: int) -> memoryview | bytes:
        """Return a part of a block, wherever it is."""
        ...


class Fetching:
    """Fetches into one staging area. Without `blocks` the node's read cache is not asked."""

    def __init__(self, engine: WriteBack, blocks: Blocks | None = None) -> None:
        self._engine, self._files, self._blocks = engine, engine.files, blocks

    def fetch(self, stored: Stored) -> int:
        """Copy an object of the bucket into a new staged file, durable; return its number."""
        ref = self._engine.ref(stored)
        clean = self._files.open_clean(ref.key, stored.etag)
        if clean is not None:
            try:
                number = self.copy(lambda start, stop: os.pread(clean, stop - start, start), stored.size_bytes)
            finally:
                os.close(clean)
            if number is not None and self._files.clean(ref.key, stored.etag) is not None:
                return number
            # Somebody has begun to change the copy, or it is cut short.
            if number is not None:
                self._files.remove(number)
        number = self.copy(lambda start, stop: self._engine.bucket.read(ref, start, stop), stored.size_bytes)
        if number is None:
            raise StagingError(f"{ref.url} came cut short")
        return number

    def fetch_kept(self, stored: Stored) -> int | None:
        """Copy the bytes that a clean copy or the node's cache has of an object; None for neither."""
        ref = self._engine.ref(stored)
        # Where the copy was dropped meanwhile, or the cache has not all of it, the store is asked, which has it not.
        with contextlib.suppress(ObjectChangedError, ObjectNotFoundError):
            if self._files.clean(ref.key, stored.etag) is not None:
                return self.fetch(stored)
        with contextlib.suppress(ObjectChangedError, ObjectNotFoundError):
            if self._blocks is not None:
                read = self._blocks.read
                return self.copy(
                    lambda start, stop: bytes(read(ref, start // BLOCK_BYTES, 0, stop - start)), stored.size_bytes
                )
        return None

    def spill(self, pending: Pending) -> None:
        """Bring what lies in the journal into a staged file; nothing is done if the key has changed meanwhile."""
        engine = self._engine
        with engine.lock:
            if engine.overlay.get(pending.key) != pending:
                return
            data = engine.blob(pending.key)
        number = self.copy(lambda start, stop: memoryview(data)[start:stop], len(data))
        if number is None:
            return
        with engine.lock:
            if engine.overlay.get(pending.key) == pending and pending.key not in engine.claims:
                engine.record([pending._replace(content=Staged(number, len(data)))])
                return
        self._files.remove(number)

    def copy(self, read: Callable[[int, int], bytes | memoryview], size_bytes: int) -> int | None:
        """Make a new staged file, durable, with the bytes that `read(start, stop)` gives; return its number, or None
        where these are too few. `StagingFullError` where there is no room."""
        number = self._files.create()
        try:
            fd = self._files.open(number)
            try:
                for start in range(0, size_bytes, BLOCK_BYTES):
                    stop = min(start + BLOCK_BYTES, size_bytes)
                    data = read(start, stop)
                    if len(data) != stop - start:
                        self._files.remove(number)
                        return None
                    write_all(fd, data, start)
                    self._files.grow(number, len(data))
                self._files.sync(fd, number)
            finally:
                os.close(fd)
        except BaseException as exc:
            self._files.remove(number)
            if isinstance(exc, OSError) and exc.errno in FULL and not isinstance(exc, StagingError):
                raise StagingFullError(
                    f"there is no room in {self._engine.area.folder} for a copy of {size_bytes:,} bytes",
                    hint="Free some room there. Room also comes free as files are uploaded: see dsctl status.",
                ) from exc
            raise
        return number
