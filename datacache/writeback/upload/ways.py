"""The ways a key's content gets to the bucket: in one request, in parts, as a copy inside the store.

Part of the uploader: `upload.py` chooses one for a claim and uses it in one thread. A way sends under the condition it
is given and says what the store said; what follows from an unexpected answer is decided in `upload.py`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from datacache.core.concurrency import ByteBudget
from datacache.core.errors import DatacacheError, ObjectNotFoundError, StoreError, StoreUnavailableError
from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.bucket import Part
from datacache.writeback.claims import Claim
from datacache.writeback.content_reader import ContentReader
from datacache.writeback.engine import WriteBack
from datacache.writeback.journal.records import UploadState
from datacache.writeback.model import Pending, Staged, Stored
from datacache.writeback.upload.parts import PartsUpload, part_size

_log = logging.getLogger("datacache.writeback")
_GONE = "somebody else changed or deleted it in the bucket since"
_RENAMED = "it was renamed from {key}, which somebody else {what} before the rename had reached the bucket"


@dataclass
class Sending:
    """What all uploads share. `offer` and `withdraw` are given large files that other threads may help with; `stopped`
    says when to begin no other part."""

    engine: WriteBack
    bodies: ByteBudget
    """Room for the bodies of whole objects, which are in memory on their way."""
    offer: Callable[[PartsUpload], None]
    withdraw: Callable[[PartsUpload], None]
    stopped: Callable[[], bool]

    def forget_unfinished(self, key: str) -> None:
        """Take back the upload in parts that was recorded for a key and that nobody will go on with, by its id: another
        writer may be sending the same key. What the store refuses to take back is left to it."""
        state = self.engine.upload_state(key)
        if state is None:
            return
        full = self.engine.prefix + key
        try:
            if state.id:  # older versions recorded uploads without one
                self.engine.bucket.abort_upload(full, state.id)
        except StoreUnavailableError:
            raise
        except StoreError as exc:
            _log.warning("%s: an unfinished upload is left behind in the bucket: %s", full, exc)
        self.engine.save_upload(key, None)

    def raise_if_bucket(self, exc: BaseException) -> None:
        """A bucket that is not there says nothing of its objects."""
        if isinstance(exc, ObjectNotFoundError) and exc.url == self.engine.bucket.url:
            raise exc


class Progress(Protocol):
    """Who wants to know how far an upload is."""

    def has(self, size_bytes: int) -> None:
        """So many bytes were there already."""
        ...

    def sent(self, size_bytes: int) -> None:
        """So many more bytes are there."""
        ...


class Way(Protocol):
    """How a key gets to the bucket."""

    def send(self, expect: str | None) -> ObjectInfo | None:
        """Do it; None if the file was written to meanwhile. Raises as `Bucket` does, and may be called again."""
        ...

    def replaces(self, found: ObjectInfo) -> None:
        """An earlier version of ours turned out to be under the key; the next `send` is to replace that."""
        ...

    def is_same(self, found: ObjectInfo) -> bool:
        """Whether an object that nobody says he wrote has exactly these bytes: replacing it takes nothing away."""
        ...

    def source_gone(self) -> str:
        """Say why what is to be sent is not to be had any more; '' where it is. Asked when a request failed although
        what is under the key is as expected."""
        ...

    def end(self, *, keep: bool) -> None:
        """It is over. What was begun in the bucket and did not become the object is taken back, unless it is to be kept
        for the next try."""
        ...


class InOneRequest:
    """Bytes of a small file."""

    def __init__(self, sending: Sending, claim: Claim, full: str, metadata: dict[str, str], progress: Progress) -> None:
        self._sending, self._claim, self._full, self._metadata = sending, claim, full, metadata
        self._progress = progress
        self._size = claim.pending.upload_bytes

    def send(self, expect: str | None) -> ObjectInfo | None:
        sending, claim = self._sending, self._claim
        sending.bodies.take(self._size)
        try:
            reader = sending.engine.claims.content(claim)
            try:
                data = reader.read(0, self._size)
            finally:
                reader.close()
            if claim.torn or len(data) != self._size:
                return None
            info = sending.engine.bucket.write(self._full, data, self._metadata, expect=expect)
            del data
        finally:
            sending.bodies.give(self._size)
        self._progress.sent(self._size)
        return info

    def is_same(self, found: ObjectInfo) -> bool:
        # Where rclone's S3 server fails after it has written a file, the object is there without its metadata.
        if found.size_bytes != self._size:
            return False
        reader = self._sending.engine.claims.content(self._claim)
        try:
            data = reader.read(0, self._size)
        finally:
            reader.close()
        return not self._claim.torn and hashlib.md5(data, usedforsecurity=False).hexdigest() == found.etag

    def replaces(self, found: ObjectInfo) -> None:
        pass

    def source_gone(self) -> str:
        return ""

    def end(self, *, keep: bool) -> None:
        pass


class Copied:
    """The bytes are in the bucket already, under another key or, when only attributes changed, under the same."""

    def __init__(self, engine: WriteBack, pending: Pending, content: Stored, metadata: dict[str, str]) -> None:
        self._engine, self._pending, self._metadata = engine, pending, metadata
        self._in_place = content.key == pending.key
        full = engine.prefix + content.key
        self._source = ObjectRef(engine.bucket.url, full, content.size_bytes, content.etag)

    def send(self, expect: str | None) -> ObjectInfo | None:
        full = self._engine.prefix + self._pending.key
        return self._engine.bucket.copy(self._source, full, self._metadata, expect=expect)

    def replaces(self, found: ObjectInfo) -> None:
        if self._in_place:  # an earlier try to change the attributes, of the same bytes
            self._source = self._source._replace(etag=found.etag)

    def is_same(self, found: ObjectInfo) -> bool:
        return False

    def source_gone(self) -> str:
        if self._in_place:
            return _GONE
        key = self._source.key[len(self._engine.prefix) :]
        try:
            found = self._engine.bucket.look(self._source.key)
        except ObjectNotFoundError:
            return _RENAMED.format(key=key, what="deleted")
        if found.info.etag == self._source.etag:
            return ""
        # While a copy of it is pending we write a key only to change its attributes, so the bytes are the same.
        other, now = self._engine.get(key), self._engine.get(self._pending.key)
        known = now is not None and now.content == Stored(key, found.info.size_bytes, found.info.etag)
        ours = other is not None and self._engine.is_ours(found.metadata, other) is not None
        if not (known or ours) or found.info.size_bytes != self._source.size_bytes:
            return f"{_RENAMED.format(key=key, what='changed')}; the newer bytes stay as {key}"
        self._source = self._source._replace(etag=found.info.etag)
        return ""

    def end(self, *, keep: bool) -> None:
        pass


class InParts:
    """Bytes of a larger one. The upload is recorded before its first part is sent, and gone on with after an
    error or a restart."""

    def __init__(self, sending: Sending, claim: Claim, full: str, metadata: dict[str, str], progress: Progress) -> None:
        self._sending, self._claim, self._full, self._metadata = sending, claim, full, metadata
        self._progress = progress
        self._state: UploadState | None = None
        self._parts: list[Part] | None = None
        self._completed = False

    def send(self, expect: str | None) -> ObjectInfo | None:
        sending = self._sending
        if self._parts is None:
            self._parts = self._send_parts()
        if self._parts is None or self._claim.torn:
            return None
        assert self._state is not None
        sending.engine.area.check()
        try:
            info = sending.engine.bucket.complete_upload(
                self._full, self._state.id, self._parts, self._metadata, expect=expect
            )
        except ObjectNotFoundError as exc:  # taken away, or completed by a try whose answer was lost
            self._begin_anew(exc)
            raise
        self._completed = True
        return info

    def _send_parts(self) -> list[Part] | None:
        sending, pending = self._sending, self._claim.pending
        kept = self._go_on()
        reader: ContentReader = sending.engine.claims.content(self._claim)
        try:
            if self._state is None:
                part_bytes = part_size(reader.size_bytes, sending.engine.bucket)
                stamp = self._stamp()
                # A kill between these two leaves an upload without parts, which `leftovers` finds when it is old. To
                # write down before that one is begun would not say which of a key's uploads is ours.
                begun = sending.engine.bucket.begin_upload(self._full, self._metadata)
                self._state = UploadState(pending.version, begun, part_bytes, *stamp)
                sending.engine.save_upload(pending.key, self._state)
            parts = PartsUpload(
                sending.engine.bucket, self._full, self._state.id, part_bytes=self._state.part_bytes, reader=reader,
                claim=self._claim, kept=kept, sent=self._progress.sent, stopped=self._stopped,
            )  # fmt: skip
            self._progress.has(parts.kept_bytes)
            sending.offer(parts)
            try:
                return parts.run()
            finally:
                sending.withdraw(parts)
        except ObjectNotFoundError as exc:
            self._begin_anew(exc)
            raise
        finally:
            reader.close()

    def _begin_anew(self, exc: ObjectNotFoundError) -> None:
        self._sending.raise_if_bucket(exc)
        self._parts = self._state = None
        self._sending.engine.save_upload(self._claim.pending.key, None)

    def _go_on(self) -> list[Part]:
        """The parts that are there of an upload of this version."""
        sending, pending = self._sending, self._claim.pending
        self._state = sending.engine.upload_state(pending.key)
        if self._state is None:
            return []
        state = self._state
        if state.id and state.version == pending.version and (state.mtime_ns, state.size_bytes) == self._stamp():
            try:
                return sending.engine.bucket.list_parts(self._full, self._state.id)
            except ObjectNotFoundError as exc:
                sending.raise_if_bucket(exc)
                sending.engine.save_upload(pending.key, None)
                self._state = None
                raise
        self._state = None
        sending.forget_unfinished(pending.key)
        return []

    def _stopped(self) -> bool:
        return self._sending.stopped() or self._superseded()

    def _superseded(self) -> bool:
        """Whether the file was deleted or renamed meanwhile: nobody wants it under this key."""
        now = self._sending.engine.get(self._claim.pending.key)
        return now is None or now.attributes is None

    def replaces(self, found: ObjectInfo) -> None:
        pass

    def is_same(self, found: ObjectInfo) -> bool:
        return False

    def source_gone(self) -> str:
        return ""

    def end(self, *, keep: bool) -> None:
        sending, key = self._sending, self._claim.pending.key
        if self._completed:
            sending.engine.save_upload(key, None)
            return
        mtime_ns, size_bytes = self._stamp()  # before it is looked whether it is torn
        try:
            if self._claim.torn or not (keep or sending.stopped()):
                sending.forget_unfinished(key)
            elif self._state is not None and (mtime_ns, size_bytes) != (self._state.mtime_ns, self._state.size_bytes):
                # What was appended meanwhile belongs to none of its parts.
                sending.engine.save_upload(key, self._state._replace(mtime_ns=mtime_ns, size_bytes=size_bytes))
        except DatacacheError as exc:  # it stays recorded as it is, and the next upload or start tries again
            _log.info("%s: its unfinished upload cannot be taken back yet: %s", key, exc)

    def _stamp(self) -> tuple[int, int]:
        """Time and size of the staged file: whether it was written to since."""
        content = self._claim.pending.content
        if not isinstance(content, Staged):
            return 0, 0
        try:
            found = os.stat(self._sending.engine.files.path(content.file))
        except OSError:
            return 0, 0
        return found.st_mtime_ns, found.st_size
