"""Keys that are being uploaded, and what becomes pending of them then.

Part of the engine (`WriteBack.claims`), used by the uploader. Any thread; the engine's lock guards it, and is taken
here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from datacache.core.errors import StagingError, StagingFullError
from datacache.store.base import ObjectInfo
from datacache.writeback.content_reader import ContentReader
from datacache.writeback.model import Conflict, Logged, Pending, Staged, Stored
from datacache.writeback.overlay import parent_of
from datacache.writeback.upload.conflicts import conflict_key

if TYPE_CHECKING:
    from datacache.writeback.engine import WriteBack

_log = logging.getLogger("datacache.writeback")


class Claim:
    """One key that is being uploaded."""

    __slots__ = ("pending", "torn")

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.torn = False
        """Whether bytes that are being uploaded were overwritten or cut off meanwhile."""


class Claims:
    """The claims of one staging area."""

    def __init__(self, engine: WriteBack) -> None:
        self._engine = engine
        self._conflict_log = engine.conflict_log
        self._claims: dict[str, Claim] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._claims

    def begin(self, key: str, version: int | None = None) -> Claim | None:
        """Claim a key for uploading, in the version whose blockers were looked at. None where there is nothing to do
        now, or it is another version. `StagingError` where what must be durable before the object may be replaced or
        deleted cannot be: that other keys do not need it any more."""
        with self._engine.lock:
            pending = self._engine.overlay.get(key)
        if pending is not None and pending.base:
            try:
                self._engine.commit()
            except StagingFullError:
                self._engine.commit(self._engine.needs_ended)  # the rest can wait: only uploading makes room
        with self._engine.lock:
            pending = self._engine.overlay.get(key)
            if pending is None or not pending.ready or key in self._claims or self._engine.is_kept_here(key):
                return None
            if version not in (None, pending.version):
                return None
            if not pending.touched:
                pending = replace(pending, touched=True)
                self._engine.overlay.set(pending)
            claim = self._claims[key] = Claim(pending)
            return claim

    def blockers(self, key: str) -> list[str]:
        """Keys that have to be brought to the bucket before this one. In a folder of files a name is either a file or a
        folder: the one that is gone has to go first."""
        with self._engine.lock:
            found = self._engine.overlay.needed_by(key)
            pending = self._engine.overlay.get(key)
            if pending is None:
                return found
            if pending.attributes is None:
                return found + list(self._engine.overlay.below(key)) if key.endswith("/") else found
            folder = key if key.endswith("/") else parent_of(key)
            while folder:
                found += self._gone([folder.rstrip("/")])
                folder = parent_of(folder)
            if not key.endswith("/"):
                found += self._gone([f"{key}/", *self._engine.overlay.below(f"{key}/")])
            return found

    def _gone(self, keys: Iterable[str]) -> list[str]:
        found = map(self._engine.overlay.get, keys)
        return [pending.key for pending in found if pending is not None and pending.attributes is None]

    def content(self, claim: Claim) -> ContentReader:
        """The bytes of a claimed key. `StagingError` if they are not there."""
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
            with self._engine.lock:
                now = self._engine.overlay.get(pending.key)
                if now is not None and now.content == pending.content:
                    raise
            claim.torn = True  # there are other bytes by now, and these are gone
            return ContentReader(0, b"")

    def touch(self, number: int, offset: int) -> None:
        """A staged file is about to be changed in place from this offset on."""
        with self._engine.lock:
            for claim in self._claims.values():
                content = claim.pending.content
                if isinstance(content, Staged) and content.file == number and offset < content.size_bytes:
                    claim.torn = True

    def finish(self, claim: Claim, info: ObjectInfo | None) -> None:
        """A claimed key is in the bucket now as it was claimed; None: it is deleted there."""
        pending = claim.pending
        key = pending.key
        with self._engine.lock:
            self._end(claim)
            now = self._engine.overlay.get(key)
            etag = info.etag if info is not None else ""
            self._engine.usage.applied(key, info.size_bytes if info is not None else 0)
            if self._engine.watcher is not None:
                self._engine.watcher.uploaded(pending, info)
            self._same_bytes(pending, etag)
            if now is not None and now.version != pending.version:
                later = replace(now, base=etag, touched=False, after=pending.version)
                if now.content == pending.content and isinstance(now.content, Stored):
                    # Only attributes changed since, and the bytes lie under the key itself now.
                    later = replace(later, content=Stored(key, now.content.size_bytes, etag))
                self._engine.record([later])
                if info is None and not later.ready:
                    self._engine.unrecord(key)  # the deletion that the new file follows is done
            elif now is not None:
                etag_of_copy = etag if info is not None and not claim.torn else None
                self._engine.settled(now, etag_of_copy)
            self._engine.changed.notify_all()

    def rebase(self, claim: Claim, etag: str, version: int | None) -> None:
        """An earlier version that this area wrote is in the bucket (None: the same bytes, by whomever): it may be
        replaced."""
        with self._engine.lock:
            after = claim.pending.after if version is None else version
            claim.pending = replace(claim.pending, base=etag, after=after)
            now = self._engine.overlay.get(claim.pending.key)
            if now is not None:
                self._engine.record([replace(now, base=etag, after=after)])

    def _same_bytes(self, pending: Pending, etag: str) -> None:
        """Where only an object's attributes were changed, others that are to be copied from it find it under a new
        ETag."""
        content = pending.content
        if not isinstance(content, Stored) or content.key != pending.key or etag in ("", content.etag):
            return
        needing = [self._engine.overlay.get(key) for key in self._engine.overlay.needed_by(pending.key)]
        copy = content._replace(etag=etag)
        self._engine.record([replace(other, content=copy) for other in needing if other and other.content == content])

    def keep_folder(self, claim: Claim) -> None:
        """The store cannot keep a claimed folder: it is kept here, and nothing is left to be done for it."""
        with self._engine.lock:
            self._end(claim)
            now = self._engine.overlay.get(claim.pending.key)
            if now is not None and now.version == claim.pending.version:
                self._engine.keep_here(now.key)

    def abandon(self, claim: Claim) -> None:
        """A claimed key was not uploaded. It stays pending."""
        with self._engine.lock:
            self._end(claim)
            self._engine.changed.notify_all()

    def lose(self, claim: Claim, reason: str) -> Conflict | None:
        """The object that a claimed key was to be copied from is gone, and its bytes are not here: the key is given up,
        and told as lost. None where the key has other content by now."""
        pending, losses = claim.pending, self._engine.losses
        # Noted first: a kill must not leave neither the file nor the note.
        number = losses.add(pending.key, pending.size_bytes, reason)
        losses.save()
        with self._engine.lock:
            now = self._engine.overlay.get(pending.key)
            if now is not None and now.content == pending.content:
                return self.conflict(claim, None, reason, is_loss=True)
        losses.drop(number)
        losses.save()
        self.abandon(claim)
        return None

    def conflict(self, claim: Claim, theirs: ObjectInfo | None, reason: str, *, is_loss: bool = False) -> Conflict:
        """Somebody else's object stays under the claimed key; what we have goes on under the conflict's name. A loss is
        told as such, and not as a conflict."""
        with self._engine.lock:
            self._end(claim)
            key = claim.pending.key
            now = self._engine.overlay.get(key) or claim.pending
            kept_as = ""
            self._engine.usage.applied(key, theirs.size_bytes if theirs is not None else 0)
            # Bytes that lay in the bucket alone, under this key or one that was changed as well, are not to be had any
            # more.
            lost = isinstance(now.content, Stored) and (theirs is None or now.content.key == key)
            if now.attributes is not None and not lost:
                kept_as = conflict_key(
                    key,
                    time.time(),
                    self._engine.host,
                    lambda name: self._engine.overlay.get(name) is not None,
                    prefix=self._engine.prefix,
                )
                blobs = {kept_as: self._engine.blob(key)} if isinstance(now.content, Logged) and now.ready else {}
                version = self._engine.next_version()
                moved = replace(now, key=kept_as, base="", touched=False, version=version, after=version - 1)
                self._engine.record([moved], drop=[key], blobs=blobs)
            else:
                self._engine.record(drop=[key])
            found = Conflict(key, kept_as, time.time(), reason)
            if self._engine.watcher is not None:
                self._engine.watcher.moved(key, kept_as, theirs)
            self._engine.changed.notify_all()
        if not is_loss:
            self._conflict_log.append(found)
        _log.warning("%s: %s; %s", key, reason, f"ours is kept as {kept_as}" if kept_as else "ours is given up")
        return found

    def _end(self, claim: Claim) -> None:
        if self._claims.get(claim.pending.key) is claim:
            del self._claims[claim.pending.key]
