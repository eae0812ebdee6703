"""The ways a key's content gets to the bucket: in one request, in parts, as a copy inside the store.

Part of the uploader: `upload.py` chooses one for a claim and uses it in one thread; other threads help to send the
parts of a large file. A way sends under the condition it is given and says what the store said; what follows from an
unexpected answer is decided in `upload.py`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from datacache.core.errors import DatacacheError, ObjectNotFoundError, StagingError, StoreError
from datacache.store.base import ObjectInfo
from datacache.store.bucket import Bucket, Part
from datacache.store.errors import expect_listing
from datacache.writeback.claims import ContentReader
from datacache.writeback.model import Claim, Staged, Stored, UploadState

if TYPE_CHECKING:
    from datacache.writeback.upload.upload import Uploads

_log = logging.getLogger("datacache.writeback")
_MIB = 2**20
_GONE = "somebody else changed or deleted it in the bucket since"
AddProgress = Callable[[int, bool], None]
"""Counts more bytes of an upload as in the bucket: sent now (True), or there from before."""
_RENAMED = "it was renamed or copied from {key}, which somebody else {what} before that had reached the bucket"


class Way:
    """How a claimed key gets to the bucket, under the key `full`."""

    def __init__(
        self, uploads: Uploads, claim: Claim, full: str, metadata: dict[str, str], progress: AddProgress
    ) -> None:
        self._uploads, self._claim, self._full, self._metadata = uploads, claim, full, metadata
        self._engine, self._progress = uploads.engine, progress

    def send(self, expect: str | None) -> ObjectInfo | None:
        """Send it; None if the file was written to meanwhile. Raises as `Bucket` does, and may be called again."""
        raise NotImplementedError

    def take_base(self, found: ObjectInfo) -> None:
        """Have the next `send` replace an earlier version of ours, which turned out to be under the key."""

    def is_same(self, found: ObjectInfo) -> bool:
        """Return whether an object of an unknown writer has exactly these bytes: replacing it takes nothing away."""
        return False

    def source_gone(self) -> str:
        """Return why what is to be sent is not to be had any more; '' where it is. Asked when a request failed although
        what is under the key is as expected."""
        return ""

    def end(self, *, keep: bool) -> None:
        """End it. What was begun in the bucket and did not become the object is taken back, unless it is to be kept for
        the next try."""


class InOneRequest(Way):
    """The bytes of a small file."""

    def send(self, expect: str | None) -> ObjectInfo | None:
        size_bytes = self._claim.pending.upload_bytes
        self._uploads.bodies.take(size_bytes)
        try:
            data = self._read()
            if self._claim.torn or len(data) != size_bytes:
                return None
            info = self._engine.bucket.write(self._full, data, self._metadata, expect=expect)
            del data
        finally:
            self._uploads.bodies.give(size_bytes)
        self._progress(size_bytes, True)
        return info

    def is_same(self, found: ObjectInfo) -> bool:
        # Where rclone's S3 server fails after it has written a file, the object is there without its metadata.
        if found.size_bytes != self._claim.pending.upload_bytes:
            return False
        data = self._read()
        return not self._claim.torn and hashlib.md5(data, usedforsecurity=False).hexdigest() == found.etag

    def _read(self) -> bytes | memoryview:
        reader = self._uploads.claims.open_content(self._claim)
        try:
            return reader.read(0, self._claim.pending.upload_bytes)
        finally:
            reader.close()


class Copied(Way):
    """Bytes that are in the bucket already, under another key or, when only attributes changed, under the same."""

    def __init__(
        self, uploads: Uploads, claim: Claim, full: str, metadata: dict[str, str], progress: AddProgress
    ) -> None:
        super().__init__(uploads, claim, full, metadata, progress)
        content = claim.pending.content
        assert isinstance(content, Stored)
        self._source = self._engine.ref(content)
        self._in_place = self._source.key == full

    def send(self, expect: str | None) -> ObjectInfo | None:
        return self._engine.bucket.copy(self._source, self._full, self._metadata, expect=expect)

    def take_base(self, found: ObjectInfo) -> None:
        if self._in_place:  # an earlier try to change the attributes, of the same bytes
            self._source = self._source._replace(etag=found.etag)

    def source_gone(self) -> str:
        if self._in_place:
            return _GONE
        key = self._source.key[len(self._engine.prefix) :]
        try:
            found = self._engine.bucket.look(self._source.key)
        except ObjectNotFoundError:
            self._expect_unlisted()
            return _RENAMED.format(key=key, what="deleted")
        if found.info.etag == self._source.etag:
            return ""
        # While a copy of it is pending we write a key only to change its attributes, so the bytes are the same.
        other, now = self._engine.get(key), self._engine.get(self._claim.pending.key)
        known = now is not None and now.content == Stored(key, found.info.size_bytes, found.info.etag)
        ours = other is not None and self._engine.own_version(found.metadata, other) is not None
        if not (known or ours) or found.info.size_bytes != self._source.size_bytes:
            return f"{_RENAMED.format(key=key, what='changed')}; the newer bytes stay as {key}"
        self._source = self._source._replace(etag=found.info.etag)
        return ""

    def _expect_unlisted(self) -> None:
        """Raise `StoreError` where the store lists the source as it was: it may only fail to find it now."""
        source = self._source
        with expect_listing():
            listed = self._engine.bucket.find(source.key)[0]
        if listed is not None and listed.etag == source.etag:
            raise StoreError(
                f"{source.url}: the store lists it and has it not",
                url=source.url,
                hint="It is tried again. If the store has lost it, delete the file that was renamed or copied from it.",
            )


class InParts(Way):
    """The bytes of a larger file. The upload is recorded before its first part is sent, and gone on with after an error
    or a restart."""

    _state: UploadState | None = None
    _parts: list[Part] | None = None
    _completed = False

    def send(self, expect: str | None) -> ObjectInfo | None:
        if self._parts is None:
            self._parts = self._send_parts()
        if self._parts is None or self._claim.torn:
            return None
        assert self._state is not None
        self._engine.area.check()
        try:
            info = self._engine.bucket.complete_upload(
                self._full, self._state.id, self._parts, self._metadata, expect=expect
            )
        except ObjectNotFoundError as exc:  # taken away, or completed by a try whose answer was lost
            self._begin_anew(exc)
            raise
        self._completed = True
        return info

    def _send_parts(self) -> list[Part] | None:
        uploads, bucket, pending = self._uploads, self._engine.bucket, self._claim.pending
        kept = self._go_on()
        reader = uploads.claims.open_content(self._claim)
        try:
            if self._state is None:
                part_bytes = part_size(reader.size_bytes, bucket)
                stamp = self._stamp()
                # A kill between these two leaves an upload without parts, which `abort_old_uploads` finds when it is
                # old. To write down before that one is begun would not say which of a key's uploads is ours.
                begun = bucket.begin_upload(self._full, self._metadata)
                self._state = UploadState(pending.version, begun, part_bytes, *stamp)
                self._engine.save_upload(pending.key, self._state)
            parts = PartsUpload(
                bucket, self._full, self._state.id, part_bytes=self._state.part_bytes, reader=reader,
                claim=self._claim, kept=kept, sent=self._progress, stopped=self._is_stopped,
            )  # fmt: skip
            uploads.board.offer(parts)
            try:
                return parts.run()
            finally:
                uploads.board.withdraw(parts)
        except ObjectNotFoundError as exc:
            self._begin_anew(exc)
            raise
        finally:
            reader.close()

    def _begin_anew(self, exc: ObjectNotFoundError) -> None:
        self._uploads.raise_if_bucket(exc)
        self._parts = self._state = None
        self._engine.save_upload(self._claim.pending.key, None)

    def _go_on(self) -> list[Part]:
        """Return the parts that are there of an upload of this version."""
        pending = self._claim.pending
        state = self._engine.upload_state(pending.key)
        if state is None:
            return []
        if state.id and state.version == pending.version and (state.mtime_ns, state.size_bytes) == self._stamp():
            self._state = state
            try:
                return self._engine.bucket.list_parts(self._full, state.id)
            except ObjectNotFoundError as exc:
                self._begin_anew(exc)
                raise
        self._uploads.forget_unfinished(pending.key)
        return []

    def _is_stopped(self) -> bool:
        if self._uploads.board.stopped:
            return True
        now = self._engine.get(self._claim.pending.key)
        return now is None or now.attributes is None  # deleted or renamed: nobody wants it under this key

    def end(self, *, keep: bool) -> None:
        key = self._claim.pending.key
        if self._completed:
            self._engine.save_upload(key, None)
            return
        mtime_ns, size_bytes = self._stamp()  # before it is looked whether it is torn
        try:
            if self._claim.torn or not (keep or self._uploads.board.stopped):
                self._uploads.forget_unfinished(key)
            elif self._state is not None and (mtime_ns, size_bytes) != (self._state.mtime_ns, self._state.size_bytes):
                # What was appended meanwhile belongs to none of its parts.
                self._engine.save_upload(key, self._state._replace(mtime_ns=mtime_ns, size_bytes=size_bytes))
        except DatacacheError as exc:  # it stays recorded as it is, and the next upload or start tries again
            _log.info("%s: its unfinished upload cannot be taken back yet: %s", key, exc)

    def _stamp(self) -> tuple[int, int]:
        """Return time and size of the staged file, which tell whether it was written to since."""
        content = self._claim.pending.content
        if not isinstance(content, Staged):
            return 0, 0
        try:
            found = os.stat(self._engine.files.path(content.file))
        except OSError:
            return 0, 0
        return found.st_mtime_ns, found.st_size


# --- the parts of a large file ---------------------------------------------------------------------------------------


class _TornError(Exception):
    """The bytes are not those any more that the upload is of."""


class _Section:
    """A part of a file, as a body. No byte of another version is ever sent: the store would list the part, and who
    goes on with the upload after a crash would take it for one of its own."""

    def __init__(self, reader: ContentReader, claim: Claim, start: int, size_bytes: int) -> None:
        self._reader, self._claim, self._start, self._size = reader, claim, start, size_bytes

    def __len__(self) -> int:
        return self._size

    def read_into(self, buffer: memoryview, start: int) -> None:
        try:
            count = self._reader.read_into(buffer, self._start + start)
        except OSError as exc:
            raise StagingError(
                f"a staged file cannot be read: {exc.strerror or exc}", hint="See to the staging area's file system."
            ) from exc
        if count != len(buffer):  # it has become shorter
            self._claim.torn = True
        if self._claim.torn:  # it is, before the first byte is changed
            raise _TornError


def part_size(size_bytes: int, bucket: Bucket) -> int:
    """Return the size of a file's parts: the bucket's, or as many MiB as it takes for not more than it may have."""
    return max(bucket.part_bytes, -(-size_bytes // bucket.max_parts // _MIB) * _MIB)


class PartsUpload:
    """The parts of one file, sent by as many threads as have nothing else to do: the thread that has claimed the key
    calls `run`, others join in with `help`.

    A part is read while it is sent; what was written to the file meanwhile tears the whole upload. `kept` are parts
    that are there already; `sent` is told the bytes of each that is sent; `stopped` says when to begin no other part.
    """

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        upload_id: str,
        *,
        part_bytes: int,
        reader: ContentReader,
        claim: Claim,
        kept: Iterable[Part],
        sent: AddProgress,
        stopped: Callable[[], bool],
    ) -> None:
        self._bucket, self._key, self._id = bucket, key, upload_id
        self._reader, self._claim = reader, claim
        self._part_bytes = part_bytes
        self._sent, self._stopped = sent, stopped
        self._changed = threading.Condition()  # guards what follows
        self._parts = {
            part.number: part for part in kept if part.number >= 1 and part.size_bytes == self._size_of(part.number) > 0
        }
        if self._parts:
            sent(sum(part.size_bytes for part in self._parts.values()), False)
        numbers = range(1, -(-reader.size_bytes // part_bytes) + 1)
        self._missing = deque(number for number in numbers if number not in self._parts)
        self._sending = 0
        self._error: BaseException | None = None
        self._over = False  # it was stopped: helpers find no work here

    @property
    def has_work(self) -> bool:
        """Return whether a thread can help."""
        return bool(self._missing) and self._error is None and not (self._claim.torn or self._over)

    def help(self) -> bool:
        """Send one part; return whether there was one to send. Errors are `run`'s to raise."""
        with self._changed:
            self._over = self._over or (self.has_work and self._stopped())
            if not self.has_work:
                return False
            number = self._missing.popleft()
            self._sending += 1
        part: Part | None = None
        error: BaseException | None = None
        try:
            part = self._send(number)
        except BaseException as exc:  # noqa: BLE001 - raised by run
            error = exc
        with self._changed:
            self._sending -= 1
            if part is not None:
                self._parts[number] = part
            else:
                self._missing.appendleft(number)
            self._error = self._error or error
            self._changed.notify_all()
        return True

    def run(self) -> list[Part] | None:
        """Return all parts, once they are sent; None if it was stopped, or the file changed meanwhile. Raises the first
        error. No thread is at it when it returns."""
        while self.help():
            pass
        with self._changed:
            self._changed.wait_for(lambda: not self._sending)
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._missing or self._claim.torn:
                return None
            return [self._parts[number] for number in sorted(self._parts)]

    def _size_of(self, number: int) -> int:
        return min(self._part_bytes, self._reader.size_bytes - (number - 1) * self._part_bytes)

    def _send(self, number: int) -> Part | None:
        if self._claim.torn:
            return None
        section = _Section(self._reader, self._claim, (number - 1) * self._part_bytes, self._size_of(number))
        try:
            part = self._bucket.put_part(self._key, self._id, number, section)
        except _TornError:
            return None
        self._sent(len(section), True)
        return part
