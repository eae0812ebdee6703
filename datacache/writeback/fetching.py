"""Bringing bytes here, into staged files: objects of the bucket, and what lies in the journal.

Part of the engine (`WriteBack.fetching`), used by the file system and by the uploader. Any thread, without the engine's
lock: all of it waits for a disk or the store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from datacache.core.disk import write_all
from datacache.core.errors import ObjectChangedError, ObjectNotFoundError, StagingError, StagingFullError
from datacache.core.ids import BLOCK_BYTES, ObjectRef
from datacache.writeback.claims import Claim
from datacache.writeback.model import Pending, Staged, Stored
from datacache.writeback.staging.area_files import FULL

if TYPE_CHECKING:
    from datacache.writeback.engine import WriteBack
    from datacache.writeback.live import Blocks


class Fetching:
    """What is brought into one staging area."""

    def __init__(self, engine: WriteBack) -> None:
        self._engine = engine
        self.blocks: Blocks | None = None
        """The node's read cache."""

    def fetch(self, claim: Claim) -> bool:
        """Bring content that lies under another key of the bucket here, and end the claim: false where the key changed
        meanwhile. Errors of the store end it, too."""
        content = claim.pending.content
        try:
            return isinstance(content, Stored) and self._stage(claim, content, self.bring(content))
        finally:
            self._engine.claims.abandon(claim)

    def fetch_kept(self, claim: Claim) -> bool:
        """Do the same for content whose object is gone, where its bytes are still on this node: whether they are. If
        they are not the claim stays as it is."""
        content = claim.pending.content
        if not isinstance(content, Stored) or content.key == claim.pending.key:
            return False
        number = self._bring_kept(content)
        if number is None:
            return False
        try:
            self._stage(claim, content, number)
        finally:
            self._engine.claims.abandon(claim)
        return True

    def _stage(self, claim: Claim, content: Stored, number: int) -> bool:
        """Give a claimed key a staged file in place of its content: false, and the file goes, where the key changed
        meanwhile."""
        with self._engine.lock:
            now = self._engine.overlay.get(claim.pending.key)
            if now is not None and now.content == content:
                staged = Staged(number, content.size_bytes)
                self._engine.record([replace(now, content=staged, version=self._engine.next_version())])
                return True
        self._engine.files.remove(number)
        return False

    def _bring_kept(self, stored: Stored) -> int | None:
        """A staged file with the bytes that a clean copy or the node's cache has of an object; None for neither."""
        full = self._engine.prefix + stored.key
        # Where the copy was dropped meanwhile, or the cache has not all of it, the store is asked, which has it not.
        with contextlib.suppress(ObjectChangedError, ObjectNotFoundError):
            if self._engine.files.clean(full, stored.etag) is not None:
                return self.bring(stored)
        with contextlib.suppress(ObjectChangedError, ObjectNotFoundError):
            if self.blocks is not None:
                read = self.blocks.read
                ref = ObjectRef(self._engine.bucket.url, full, stored.size_bytes, stored.etag)
                return self.copied(
                    lambda start, stop: bytes(read(ref, start // BLOCK_BYTES, 0, stop - start)), stored.size_bytes
                )
        return None

    def bring(self, stored: Stored) -> int:
        """A new staged file, durable, with the bytes of an object of the bucket: its number."""
        full = self._engine.prefix + stored.key
        clean = self._engine.files.open_clean(full, stored.etag)
        if clean is not None:
            try:
                number = self.copied(lambda start, stop: os.pread(clean, stop - start, start), stored.size_bytes)
            finally:
                os.close(clean)
            if number is not None and self._engine.files.clean(full, stored.etag) is not None:
                return number
            # Somebody has begun to change the copy, or it is cut short.
            if number is not None:
                self._engine.files.remove(number)
        ref = ObjectRef(self._engine.bucket.url, full, stored.size_bytes, stored.etag)
        number = self.copied(lambda start, stop: self._engine.bucket.read(ref, start, stop), stored.size_bytes)
        if number is None:
            raise StagingError(f"{ref.url} came cut short")
        return number

    def spill(self, pending: Pending) -> None:
        """Bring what lies in the journal into a staged file; nothing is done if the key has changed meanwhile."""
        with self._engine.lock:
            if self._engine.overlay.get(pending.key) != pending:
                return
            data = self._engine.blob(pending.key)
        number = self.copied(lambda start, stop: memoryview(data)[start:stop], len(data))
        if number is None:
            return
        with self._engine.lock:
            if self._engine.overlay.get(pending.key) == pending and pending.key not in self._engine.claims:
                self._engine.record([replace(pending, content=Staged(number, len(data)))])
                number = None
        if number is not None:
            self._engine.files.remove(number)

    def copied(self, read: Callable[[int, int], bytes | memoryview], size_bytes: int) -> int | None:
        """A new staged file, durable, with the bytes that `read(start, stop)` gives: its number; None where these are
        too few. `StagingFullError` where there is no room."""
        number = self._engine.files.create()
        try:
            fd = self._engine.files.open(number)
            try:
                for start in range(0, size_bytes, BLOCK_BYTES):
                    stop = min(start + BLOCK_BYTES, size_bytes)
                    data = read(start, stop)
                    if len(data) != stop - start:
                        self._engine.files.remove(number)
                        return None
                    write_all(fd, data, start)
                    self._engine.files.grow(number, len(data))
                self._engine.files.sync(fd, number)
            finally:
                os.close(fd)
        except BaseException as exc:
            self._engine.files.remove(number)
            if isinstance(exc, OSError) and exc.errno in FULL and not isinstance(exc, StagingError):
                raise StagingFullError(
                    f"there is no room in {self._engine.area.folder} for a copy of {size_bytes:,} bytes",
                    hint="Free some room there. Room also comes free as files are uploaded: see dsctl status.",
                ) from exc
            raise
        return number
