"""One claimed key is brought to the bucket: which requests that takes, and what their answers mean.

Part of the uploader, whose threads call `Uploads.bring`, each with another key. How it gets there (in one request, in
parts, as a copy) is a `Way` of `upload/ways.py`. Each is conditional on what the bucket had when the key was changed
here, and each may be repeated after an answer that was lost: when the bucket has something else than expected, the
object itself says whether we wrote it (`conflicts.standing`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from datacache.core.concurrency import ByteBudget
from datacache.core.errors import (
    DatacacheError,
    NoMarkersError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreError,
    StoreUnavailableError,
)
from datacache.store.base import ObjectInfo
from datacache.store.bucket import LiveObject
from datacache.store.errors import expect_listing
from datacache.writeback.claims import Claims
from datacache.writeback.conflicts import Standing, is_conflict_copy, standing
from datacache.writeback.engine import WriteBack
from datacache.writeback.model import WRITER, Claim, Conflict, Pending, Stored
from datacache.writeback.upload.ways import AddProgress, Copied, InOneRequest, InParts, Way

if TYPE_CHECKING:
    from datacache.writeback.upload.board import UploadBoard

_log = logging.getLogger("datacache.writeback")
BODY_BYTES = 32 * 2**20
"""Of the bodies of whole objects, in memory, of all uploads together."""
_ROUNDS = 5
"""Tries to write a key that somebody else writes at the same time."""
_CHANGED = "somebody else changed it in the bucket since"
_CHANGED_BEFORE_DELETE = (
    "it was deleted or renamed here, but somebody else changed it in the bucket since: theirs stays"
)
_COPY_NAME_TAKEN = "somebody else's object has the name of this conflict copy"
_COPY_NAME_HINT = "It is tried again. If that object is there to stay, rename or delete one of the two."


class Outcome(NamedTuple):
    """The result of a claim."""

    version: int = -1
    """The version that is in the bucket now; -1 for none."""
    is_gone: bool = False
    """Tells whether that version is a deletion."""
    torn: bool = False
    """Tells whether it was given up, because the file was written to meanwhile."""
    conflict: Conflict | None = None


class Uploads:
    """Brings claims to the bucket of an engine. The board gets large files that other threads may help with, and says
    when to stop. Any thread, another key each."""

    def __init__(self, engine: WriteBack, claims: Claims, board: UploadBoard) -> None:
        self.engine, self.claims, self.board = engine, claims, board
        self.bodies = ByteBudget(BODY_BYTES)
        self._bucket = engine.bucket

    def bring(self, claim: Claim, progress: AddProgress, *, look_first: bool) -> Outcome:
        """Bring a claimed key to the bucket, and end the claim. `look_first`: an earlier try may have done it. Errors
        are the store's; the key stays pending, then."""
        try:
            if claim.pending.attributes is None:
                return self._remove(claim)
            if claim.pending.key.endswith("/"):
                return self._mark_folder(claim)
            return self._write(claim, progress, look_first=look_first)
        except BaseException as exc:
            self.claims.abandon(claim)
            if isinstance(exc, ObjectNotFoundError):
                raise StoreError(exc.message, url=exc.url, hint=exc.hint) from exc
            raise

    def forget_unfinished(self, key: str) -> None:
        """Take back the upload in parts that was recorded for a key and is not gone on with, by its id: another
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
        """Raise what says that the bucket is not there: that says nothing of its objects."""
        if isinstance(exc, ObjectNotFoundError) and exc.url == self.engine.bucket.url:
            raise exc

    def _mark_folder(self, claim: Claim) -> Outcome:
        """Write a folder's marker, in place of whatever marker is there."""
        pending = claim.pending
        self.engine.area.check()
        try:
            info = self._bucket.write(self.engine.prefix + pending.key, b"", self._metadata(pending), expect=None)
        except NoMarkersError:
            # It is there as long as something is in it; until then it is known here alone.
            self.claims.keep_folder(claim)
            return Outcome(pending.version)
        return self._finish(claim, info)

    def _write(self, claim: Claim, progress: AddProgress, *, look_first: bool) -> Outcome:
        pending = claim.pending
        full = self.engine.prefix + pending.key
        expect = pending.base
        is_large = pending.upload_bytes > self._bucket.whole_bytes
        if look_first and (is_large or not self._bucket.conditional()):
            found, how = self._look(full, pending, expect)
            if how is Standing.SAME and found is not None:
                self.forget_unfinished(pending.key)
                return self._finish(claim, found.info)
        way = self._way(claim, full, progress)
        keep = False
        try:
            for _ in range(_ROUNDS):
                try:
                    self.engine.area.check()
                    info = way.send(expect)
                except (ObjectChangedError, ObjectNotFoundError) as exc:
                    self.raise_if_bucket(exc)
                    answer = self._explain(claim, way, expect)
                    if isinstance(answer, Outcome):
                        return answer
                    expect = answer
                    continue
                if info is None:
                    break
                return self._finish(claim, info)
            else:
                raise StoreError(
                    f"{full}: the store says that it has changed, {_ROUNDS} times in a row, and shows no change",
                    url=full,
                )
        except DatacacheError:
            keep = True
            raise
        finally:
            way.end(keep=keep)
        self.claims.abandon(claim)  # not before: what is written while the way ends is to tear it
        return Outcome(torn=claim.torn)

    def _way(self, claim: Claim, full: str, progress: AddProgress) -> Way:
        pending = claim.pending
        metadata = self._metadata(pending)
        if pending.upload_bytes > self._bucket.whole_bytes:
            return InParts(self, claim, full, metadata, progress)
        self.forget_unfinished(pending.key)
        way = Copied if isinstance(pending.content, Stored) else InOneRequest
        return way(self, claim, full, metadata, progress)

    def _metadata(self, pending: Pending) -> dict[str, str]:
        assert pending.attributes is not None
        return pending.attributes.to_metadata(self.engine.writer_of(pending))

    def _explain(self, claim: Claim, way: Way, expect: str) -> Outcome | str:
        """Find out why the bucket has something else than expected; return what to expect instead, or the outcome."""
        pending = claim.pending
        full = self.engine.prefix + pending.key
        found, how = self._look(full, pending, expect)
        if found is None:
            if expect:
                return ""  # deleted by somebody: nothing of theirs is lost by writing it again
        elif how is Standing.SAME:
            return self._finish(claim, found.info)
        else:
            if how is Standing.THEIRS and WRITER not in found.metadata and way.is_same(found.info):
                how = Standing.EARLIER
            if how is Standing.EARLIER:
                self.claims.rebase(claim, found.info.etag, self.engine.own_version(found.metadata, pending))
                way.take_base(found.info)
                return found.info.etag
            if how is Standing.THEIRS:
                if not pending.base and is_conflict_copy(pending.key) and WRITER not in found.metadata:
                    # Only mounts give such names, so it is rather a store that shows something, such as a web page,
                    # under every key: a copy of the copy would be the next of thousands.
                    raise StoreError(f"{full}: {_COPY_NAME_TAKEN}", url=full, hint=_COPY_NAME_HINT)
                return self._conflict(claim, found.info, _CHANGED)
        gone = way.source_gone()
        if not gone:
            return expect
        if self.claims.fetch_kept(claim):
            return Outcome(torn=True)  # and is sent from here now
        content = claim.pending.content
        if isinstance(content, Stored) and content.key == claim.pending.key:
            return Outcome(conflict=self.claims.conflict(claim, None, gone))
        lost = self.claims.lose(claim, gone)
        return Outcome(conflict=lost, torn=lost is None)

    def _look(self, full: str, pending: Pending, expect: str | None) -> tuple[LiveObject | None, Standing]:
        """Return the object under the key, and how it stands to what is to be done."""
        found: LiveObject | None = None
        try:
            found = self._bucket.look(full)
        except ObjectNotFoundError as exc:
            self.raise_if_bucket(exc)
        ours = self.engine.own_version(found.metadata, pending) if found is not None else None
        size_bytes = pending.size_bytes if pending.attributes is not None else None
        how = standing(found, base=expect or "", version=pending.version, size_bytes=size_bytes, ours=ours)
        return found, how

    def _conflict(self, claim: Claim, found: ObjectInfo, why: str) -> Outcome:
        """End the claim as a conflict: if the object is listed as well, as no web page in the store's place is."""
        with expect_listing():
            listed = self._bucket.find(found.key)[0]
        if listed is None:
            raise StoreUnavailableError(f"{found.key}: the store shows an object and does not list it", url=found.key)
        return Outcome(conflict=self.claims.conflict(claim, found, why))

    def _finish(self, claim: Claim, info: ObjectInfo | None) -> Outcome:
        self.claims.finish(claim, info)
        return Outcome(claim.pending.version, is_gone=info is None)

    def _remove(self, claim: Claim) -> Outcome:
        pending = claim.pending
        full = self.engine.prefix + pending.key
        self.forget_unfinished(pending.key)
        expect = None if pending.key.endswith("/") else pending.base
        for _ in range(_ROUNDS):
            try:
                self.engine.area.check()
                self._bucket.remove(full, expect=expect)
                return self._finish(claim, None)
            except ObjectChangedError:
                found, how = self._look(full, pending, expect)
                if found is None:
                    return self._finish(claim, None)
                if how is Standing.THEIRS and WRITER not in found.metadata and found.info.etag == pending.sent:
                    how = Standing.EARLIER  # our bytes, and the store has forgotten that they are ours
                if how is Standing.THEIRS:
                    return self._conflict(claim, found.info, _CHANGED_BEFORE_DELETE)
                expect = found.info.etag
        raise StoreError(f"{full}: it changes again and again while it is to be deleted", url=full)
