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
from datacache.core.objects import ObjectRef
from datacache.writeback.area_files import FULL
from datacache.writeback.claims import Claim
from datacache.writeback.model import Pending, Staged, Stored

if TYPE_CHECKING:
    from datacache.writeback.engine import WriteBack

_COPY_BYTES = 4 * 2**20


class Fetching:
    """What is brought into one staging area."""

    def __init__(self, engine: WriteBack) -> None:
        self._engine = engine

    def fetch(self, claim: Claim) -> bool:
        """Bring content that lies under another key of the bucket here, and end the claim: false where the key changed
        meanwhile. Errors of the store end it, too."""
        pending = claim.pending
        number = -1
        try:
            if not isinstance(pending.content, Stored):
                return False
            number = self.bring(pending.content)
            with self._engine.lock:
                now = self._engine.overlay.get(pending.key)
                if now is None or now.content != pending.content:
                    return False
                content = Staged(number, pending.content.size_bytes)
                self._engine.record([replace(now, content=content, version=self._engine.next_version())])
                number = -1
            return True
        finally:
            self._engine.claims.abandon(claim)
            if number >= 0:
                self._engine.files.remove(number)

    def fetch_clean(self, claim: Claim) -> bool:
        """The same for content whose object is gone, where a copy of it is here: whether there is one. If there is not
        the claim stays as it is."""
        content = claim.pending.content
        if not isinstance(content, Stored) or content.key == claim.pending.key:
            return False
        if self._engine.files.clean(self._engine.prefix + content.key, content.etag) is None:
            return False
        # Where the copy was dropped meanwhile the next try finds none.
        with contextlib.suppress(ObjectChangedError, ObjectNotFoundError):
            self.fetch(claim)
        return True

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
                for start in range(0, size_bytes, _COPY_BYTES):
                    stop = min(start + _COPY_BYTES, size_bytes)
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
