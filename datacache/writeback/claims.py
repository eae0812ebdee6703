"""Keys that are being uploaded, and what becomes pending of them then.

Made and used by the uploader; the claims themselves are the engine's. Any thread; the engine's lock guards them, and is
taken here.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable

from datacache.core.errors import StagingError, StagingFullError
from datacache.store.base import ObjectInfo
from datacache.store.bodies import read_fully
from datacache.writeback.conflicts import conflict_key
from datacache.writeback.engine import WriteBack
from datacache.writeback.fetching import Fetching
from datacache.writeback.model import Claim, Conflict, Logged, Pending, Staged, Stored, parent_of

_log = logging.getLogger("datacache.writeback")


class ContentReader:
    """Reads bytes of the journal (`data`) or of a staged file (`fd`) while they are uploaded. Any thread may call the
    reads, one closes it."""

    def __init__(self, size_bytes: int, data: bytes | None = None, fd: int = -1) -> None:
        self.size_bytes = size_bytes
        self._data = data
        self._fd = fd

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Return bytes `start` to `stop`; fewer where the file was cut off meanwhile."""
        if self._data is not None:
            return memoryview(self._data)[start:stop]
        parts = []
        while start < stop and (part := os.pread(self._fd, stop - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, buffer: memoryview, start: int) -> int:
        """Fill a buffer with the bytes from `start` on; return how many there were."""
        if self._data is not None:
            data = self._data[start : start + len(buffer)]
            buffer[: len(data)] = data
            return len(data)
        return read_fully(self._fd, buffer, start)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Claims:
    """The claims of one staging area."""

    def __init__(self, engine: WriteBack, fetching: Fetching) -> None:
        self._engine, self._fetching = engine, fetching
        self._overlay = engine.overlay

    def begin(self, key: str, version: int | None = None) -> Claim | None:
        """Claim a key for uploading, in the version whose blockers were looked at. None where there is nothing to do
        now, or it is another version. `StagingError` where what must be durable before the object may be replaced or
        deleted cannot be: that other keys do not need it any more."""
        engine = self._engine
        pending = engine.get(key)
        # Where a second node may go on with it, that one is to know of all that the bucket has.
        if pending is not None and (pending.base or engine.replication is not None):
            try:
                engine.commit(acknowledges=False)
            except StagingFullError:
                engine.commit(engine.needs_ended, acknowledges=False)  # the rest can wait: only uploading makes room
        with engine.lock:
            pending = self._overlay.get(key)
            if pending is None or not pending.ready or key in engine.claims or key in engine.local_folders:
                return None
            if version not in (None, pending.version):
                return None
            if not pending.touched:
                pending = pending._replace(touched=True)
                self._overlay.set(pending)
            claim = engine.claims[key] = Claim(pending)
            return claim

    def blockers(self, key: str) -> list[str]:
        """Return the keys that have to be brought to the bucket before this one. In a folder of files a name is either
        a file or a folder: the one that is gone has to go first."""
        overlay = self._overlay
        with self._engine.lock:
            found = overlay.needed_by(key)
            pending = overlay.get(key)
            if pending is None:
                return found
            if pending.attributes is None:
                return found + list(overlay.below(key)) if key.endswith("/") else found
            folder = key if key.endswith("/") else parent_of(key)
            while folder:
                found += self._deleted([folder.rstrip("/")])
                folder = parent_of(folder)
            if not key.endswith("/"):
                found += self._deleted([f"{key}/", *overlay.below(f"{key}/")])
            return found

    def _deleted(self, keys: Iterable[str]) -> list[str]:
        found = map(self._overlay.get, keys)
        return [pending.key for pending in found if pending is not None and pending.attributes is None]

    def open_content(self, claim: Claim) -> ContentReader:
        """Return a reader of a claimed key's bytes. `StagingError` if they are not there."""
        pending = claim.pending
        if isinstance(pending.content, Logged):
            try:
                data = self._engine.blob(pending.key)
            except KeyError:
                data = b""
            now = self._engine.get(pending.key)  # not before: what is read is the newest
            if now is None or now.version != pending.version:
                claim.torn = True  # the record has other bytes by now
                return ContentReader(0, b"")
            return ContentReader(pending.content.size_bytes, data)
        if not isinstance(pending.content, Staged):
            raise StagingError(f"{pending.key} has no bytes here")
        try:
            return ContentReader(pending.content.size_bytes, fd=self._engine.files.open(pending.content.file))
        except StagingError:
            now = self._engine.get(pending.key)
            if now is not None and now.content == pending.content:
                raise
            claim.torn = True  # there are other bytes by now, and these are gone
            return ContentReader(0, b"")

    # --- the ends of a claim -----------------------------------------------------------------------------------------

    def finish(self, claim: Claim, info: ObjectInfo | None) -> None:
        """End a claim: the key is in the bucket now as it was claimed; None: it is deleted there."""
        engine, pending = self._engine, claim.pending
        key = pending.key
        with engine.lock:
            self._end_locked(claim)
            now = self._overlay.get(key)
            etag = info.etag if info is not None else ""
            engine.apply_own_locked(key, info, pending.attributes)
            for watcher in engine.watchers:
                watcher.note_uploaded(pending, info)
            self._move_needs_locked(pending, etag)
            if now is not None and now.version != pending.version:
                later = now._replace(base=etag, touched=False, after=pending.version)
                if now.content == pending.content and isinstance(now.content, Stored):
                    # Only attributes changed since, and the bytes lie under the key itself now.
                    later = later._replace(content=Stored(key, now.content.size_bytes, etag))
                engine.record([later])
                if info is None and not later.ready:
                    engine.unrecord_locked(key)  # the deletion that the new file follows is done
            elif now is not None:
                engine.settle_locked(now, etag if info is not None and not claim.torn else None)

    def _move_needs_locked(self, pending: Pending, etag: str) -> None:
        """Give keys that are to be copied from an object its new ETag, where only its attributes were changed."""
        content = pending.content
        if not isinstance(content, Stored) or content.key != pending.key or etag in ("", content.etag):
            return
        needing = [self._overlay.get(key) for key in self._overlay.needed_by(pending.key)]
        copy = content._replace(etag=etag)
        self._engine.record([other._replace(content=copy) for other in needing if other and other.content == content])

    def rebase(self, claim: Claim, etag: str, version: int | None) -> None:
        """Have a claim replace an earlier version that this area wrote and that is in the bucket (None: the same bytes,
        by whomever; the claim's own: some of its bytes)."""
        with self._engine.lock:
            after = claim.pending.after if version is None else min(version, claim.pending.version - 1)
            claim.pending = claim.pending._replace(base=etag, after=after)
            now = self._overlay.get(claim.pending.key)
            if now is not None:
                self._engine.record([now._replace(base=etag, after=after)])

    def keep_folder(self, claim: Claim) -> None:
        """End the claim of a folder that the store cannot keep: it is kept here, and nothing is left to be done."""
        with self._engine.lock:
            self._end_locked(claim)
            now = self._overlay.get(claim.pending.key)
            if now is not None and now.version == claim.pending.version:
                self._engine.keep_folder_locked(now.key)

    def abandon(self, claim: Claim) -> None:
        """End a claim whose key was not uploaded. It stays pending."""
        with self._engine.lock:
            self._end_locked(claim)

    def lose(self, claim: Claim, reason: str) -> Conflict | None:
        """Give up a claimed key, and tell it as lost: the object that it was to be copied from is gone, and its bytes
        are not here. None where the key has other content by now."""
        pending, losses = claim.pending, self._engine.losses
        # Noted first: a kill must not leave neither the file nor the note.
        number = losses.add(pending.key, pending.size_bytes, reason)
        losses.save()
        with self._engine.lock:
            now = self._overlay.get(pending.key)
            if now is not None and now.content == pending.content:
                return self.conflict(claim, None, reason, is_loss=True)
        losses.drop(number)
        losses.save()
        self.abandon(claim)
        return None

    def conflict(self, claim: Claim, theirs: ObjectInfo | None, reason: str, *, is_loss: bool = False) -> Conflict:
        """End a claim: somebody else's object stays under the key, and what we have goes on under the conflict's name.
        A loss is told as such, and not as a conflict."""
        engine = self._engine
        with engine.lock:
            self._end_locked(claim)
            key = claim.pending.key
            now = self._overlay.get(key) or claim.pending
            kept_as = ""
            engine.apply_own_locked(key, theirs, None)
            # Bytes that lay in the bucket alone, under this key or one that was changed as well, are not to be had any
            # more.
            lost = isinstance(now.content, Stored) and (theirs is None or now.content.key == key)
            if now.attributes is not None and not lost:
                kept_as = conflict_key(
                    key,
                    time.time(),
                    engine.host,
                    lambda name: self._overlay.get(name) is not None,
                    prefix=engine.prefix,
                )
                blobs = {kept_as: engine.blob(key)} if isinstance(now.content, Logged) and now.ready else {}
                version = engine.next_version()
                moved = now._replace(key=kept_as, base="", touched=False, version=version, after=version - 1)
                engine.record([moved], drop=[key], blobs=blobs)
            else:
                engine.record(drop=[key])
            found = Conflict(key, kept_as, time.time(), reason)
            for watcher in engine.watchers:
                watcher.note_moved(key, kept_as, theirs)
        if not is_loss:
            engine.conflict_log.append(found)
        _log.warning("%s: %s; %s", key, reason, f"ours is kept as {kept_as}" if kept_as else "ours is given up")
        return found

    def _end_locked(self, claim: Claim) -> None:
        if self._engine.claims.get(claim.pending.key) is claim:
            del self._engine.claims[claim.pending.key]

    # --- bytes that are not here -------------------------------------------------------------------------------------

    def fetch(self, claim: Claim) -> bool:
        """Bring content that lies under another key of the bucket here, and end the claim; return false where the key
        changed meanwhile. Errors of the store end it, too."""
        content = claim.pending.content
        try:
            return isinstance(content, Stored) and self._stage(claim, content, self._fetching.fetch(content))
        finally:
            self.abandon(claim)

    def fetch_kept(self, claim: Claim) -> bool:
        """Do the same for content whose object is gone, where its bytes are still on this node; return whether they
        are. If they are not the claim stays as it is."""
        content = claim.pending.content
        if not isinstance(content, Stored) or content.key == claim.pending.key:
            return False
        number = self._fetching.fetch_kept(content)
        if number is None:
            return False
        try:
            self._stage(claim, content, number)
        finally:
            self.abandon(claim)
        return True

    def _stage(self, claim: Claim, content: Stored, number: int) -> bool:
        """Give a claimed key a staged file in place of its content; return false, and delete the file, where the key
        changed meanwhile."""
        with self._engine.lock:
            now = self._overlay.get(claim.pending.key)
            if now is not None and now.content == content:
                staged = Staged(number, content.size_bytes)
                self._engine.record([now._replace(content=staged, version=self._engine.next_version())])
                return True
        self._engine.files.remove(number)
        return False
