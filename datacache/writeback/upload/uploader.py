"""Brings everything that is pending to the bucket, in the background, for as long as it takes.

Made with a live bucket; told of changes by the engine. A fixed number of threads (twice as many while room
in the staging area is short) take keys from a board: a key is due a moment after its last change, so that temporary
files never reach the bucket, and at the latest `upload_every_s` after its first. A thread that finds no key due helps
to send the parts of a large file. Uploads of one key never overlap, and go in the order of its versions; what another
key still has to be copied from is not overwritten before (`Claims.blockers`).

What fails is tried again: a store that does not answer by one upload at a time until it does, everything else by key.
An upload that is torn (its file was written to meanwhile) is begun anew, less and less often if that goes on. Nothing
is lost when the process is killed: what was not finished is pending in the journal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from datacache.core.errors import (
    DatacacheError,
    ObjectChangedError,
    ObjectNotFoundError,
    StagingError,
    StoreAccessError,
)
from datacache.store.bucket import PROBE_BYTES, PROBE_PREFIX, Bucket, is_probe
from datacache.writeback.claims import Claims
from datacache.writeback.engine import WriteBack
from datacache.writeback.fetching import Fetching
from datacache.writeback.model import Pending, Stored
from datacache.writeback.upload.board import UploadBoard
from datacache.writeback.upload.queue import Wait
from datacache.writeback.upload.upload import Uploads
from datacache.writeback.upload.ways import PartsUpload

_log = logging.getLogger("datacache.writeback")
OLD_S = 7 * 86_400.0
"""Age of an upload of somebody else's that is taken for forgotten. An upload that takes longer is not known of."""
_CLEAN_EVERY_S = 86_400.0
_TOLD_CONFLICTS = 100
_HURRY = 0.8
_WATCH_EVERY_S = 0.5
_RECONNECT_EVERY_S = 30.0
_TELL_EVERY_S = 0.5
_FEW = 1000


class Uploader:
    """The uploads of one engine, between `start` and `stop`."""

    def __init__(
        self,
        engine: WriteBack,
        fetching: Fetching,
        *,
        delay_s: float = 3.0,
        upload_every_s: float = 30.0,
        away_wait_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`away_wait_s`: how long the store may be away until a thread that waits for one upload is told."""
        self.claims = Claims(engine, fetching)
        self._away_wait_s = away_wait_s
        self._engine = engine
        self._clock = clock
        self._board = UploadBoard(delay_s=delay_s, every_s=upload_every_s, threads=engine.uploads, clock=clock)
        self._uploads = Uploads(engine, self.claims, self._board)
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._let_go = False
        self._reconnected_at = clock()

    def start(self) -> None:
        """Begin with all that is pending. Once."""
        self._engine.listen(self._note_change)
        for pending in self._engine.pendings():
            self._note_change(pending)
        for key in self._engine.upload_states():
            self._board.note_change(key, at_once=True)
        for number in range(self._engine.uploads):
            self._begin(self._work, number)
        self._begin(self._watch)
        self._begin(self._clean)

    def stop(self, timeout_s: float) -> None:
        """End the threads; each finishes the request it is at, for as long as the timeout. What is not uploaded stays
        pending; a large file is gone on with later."""
        self._board.stop()
        self._stop.set()
        deadline = time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        left = sum(thread.is_alive() for thread in self._threads)
        if left:
            _log.warning("%d uploads did not end in %.0f s", left, timeout_s)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def flush(self, timeout_s: float | None = None, progress: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Return when everything that is pending now is in the bucket. `UploadError` says what is not, and why: when
        the time is over, or as soon as all that is left was tried and cannot be uploaded until somebody mends it. A
        store that does not answer is waited for. `progress` gets `status()` now and then, with `flush_files_left`,
        `flush_files`, `flush_bytes_left` and `flush_bytes`."""
        deadline = None if timeout_s is None else self._clock() + timeout_s
        wait = Wait([pending for pending in self._engine.pendings() if pending.ready])
        first = set(wait.keys)
        self._await(wait, deadline, progress, is_flush=True)
        if wait.moved:
            more = [pending for pending in self._engine.pendings() if pending.ready and pending.key not in first]
            self._await(Wait(more), deadline, progress, is_flush=True)

    def wait_for(self, key: str, version: int, timeout_s: float | None = None) -> None:
        """Return when this version of a key, or a later one, is in the bucket. Raises as `flush`, and when the store
        has been away for a while."""
        pending = self._engine.get(key)
        if pending is None or version <= pending.after:
            return
        deadline = None if timeout_s is None else self._clock() + timeout_s
        wait = Wait([pending._replace(version=min(version, pending.version))])
        self._await(wait, deadline, None, is_flush=False)
        if wait.moved:  # it may go on under another key, with the same bytes
            size = pending.size_bytes if pending.attributes is not None else None
            later = [each for each in self._engine.pendings() if each.ready and each.version > version]
            wait = Wait([each for each in later if size in (None, each.size_bytes)])
            self._await(wait, deadline, None, is_flush=False)

    def _await(
        self, wait: Wait, deadline: float | None, progress: Callable[[dict[str, Any]], None] | None, *, is_flush: bool
    ) -> None:
        board, began = self._board, self._clock()
        board.add_wait(wait, all_at_once=is_flush)
        try:
            while True:
                with board.lock:
                    left_s = _TELL_EVERY_S if deadline is None else min(_TELL_EVERY_S, deadline - self._clock())
                    if wait and left_s > 0 and not self._why_not_locked(wait, began, is_flush=is_flush):
                        board.ended.wait(left_s)
                    why = self._why_not_locked(wait, began, is_flush=is_flush)
                    if not why and deadline is not None and self._clock() >= deadline:
                        why = "the time is over"
                    if wait and why:
                        raise wait.error(why, board.reason_of_locked, hint=board.halted.hint if board.halted else "")
                if progress is not None:
                    progress(self.status() | wait.progress())
                if not wait:
                    return
                if len(wait) <= _FEW:  # what was deleted before it was ever uploaded is not pending any more
                    for key in [key for key in wait.keys if self._engine.get(key) is None]:
                        board.drop(key)
        finally:
            board.remove_wait(wait)

    def let_go(self) -> None:
        """End all waits for uploads but a flush's, with an error: the mount ends."""
        with self._board.lock:
            self._let_go = True
            self._board.ended.notify_all()

    def _why_not_locked(self, wait: Wait, began: float, *, is_flush: bool) -> str:
        """Return why there is no use in waiting; '' where there is."""
        if self._let_go and not is_flush:
            return "the mount ends"
        if self._board.halted is not None:
            return str(self._board.halted)
        if self._board.stopping:
            return "uploads were stopped"
        health = self._board.health
        if not is_flush and health.reason:
            now = self._clock()
            if now - max(began, health.away_since) >= self._away_wait_s:
                return f"the store has not answered for {now - health.away_since:.0f} s"
        return "they were refused" if self._board.is_hopeless_locked(wait) else ""

    def status(self) -> dict[str, Any]:
        """Return what is to be uploaded and how that goes. `failures` are the first hundred, `conflicts` the last."""
        pendings = self._engine.pendings()
        now = self._clock()
        with self._board.lock:
            found = self._board.report.numbers(now)
            health = self._board.health
            found["store_problem"] = health.reason
            found["store_away_s"] = now - health.away_since if health.reason else 0.0
            found["halted"] = str(self._board.halted) if self._board.halted is not None else ""
        found["dirty_files"] = len(pendings)
        found["dirty_bytes"] = sum(pending.upload_bytes for pending in pendings)
        found["oldest_dirty_s"] = max(0.0, time.time() - min((p.since for p in pendings), default=time.time()))
        conflicts = self._engine.conflict_log
        found["conflicts"] = [conflict._asdict() for conflict in conflicts.unsettled()[-_TOLD_CONFLICTS:]]
        found["conflict_count"] = conflicts.count
        return found

    # --- threads -----------------------------------------------------------------------------------------------------

    def _note_change(self, pending: Pending) -> None:
        if pending.ready:
            self._board.note_change(pending.key, at_once=self._engine.ack == "uploaded")

    def _begin(self, target: Callable[..., None], *args: int) -> None:
        thread = threading.Thread(target=target, args=args, name=f"upload-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, number: int) -> None:
        while (task := self._board.take(number)) is not None:
            if isinstance(task, PartsUpload):
                task.help()
                continue
            key, is_probe = task
            try:
                self._bring(key)
            finally:
                if is_probe:
                    self._board.end_probe()

    def _watch(self) -> None:
        """Look after the staging area: whether it is still ours, and whether its room is short."""
        while not self._stop.wait(_WATCH_EVERY_S):
            self._check()
            try:
                hurry = self._engine.files.pressure() > _HURRY
            except StagingError:
                continue
            hurries = self._board.hurry
            self._board.set_hurry(hurry)
            if hurry and not hurries:
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                for number in range(self._engine.uploads):
                    self._begin(self._work, self._engine.uploads + number)

    def _clean(self) -> None:
        """Take back once a day what killed processes left in the bucket."""
        engine = self._engine

        def recorded() -> set[str]:
            return {state.id for state in engine.upload_states().values()}

        while True:
            abort_old_uploads(engine.bucket, engine.prefix, recorded, stopped=self._stop.is_set)
            remove_probes(engine.bucket, engine.prefix)
            if self._stop.wait(_CLEAN_EVERY_S):
                return

    def _check(self) -> bool:
        """Return whether the staging area is still ours."""
        try:
            self._engine.area.check()
        except StagingError as exc:
            self._board.halt(exc)
            return False
        self._board.halt(None)
        return True

    # --- one key -----------------------------------------------------------------------------------------------------

    def _bring(self, key: str) -> None:
        """Bring a key to the bucket. Whatever happens, the board is told."""
        try:
            pending = self._prepare(key)
            if pending is not None:
                self._upload(pending)
        except StagingError as exc:
            if self._check():
                self._board.fail(key, exc)
            else:
                self._board.skip(key, retry=True)
        except Exception as exc:  # noqa: BLE001 - the thread goes on; the board logs it
            self._board.fail(key, exc)
            now = self._clock()
            # Where access is refused, new credentials may be there: connect anew once in a while.
            if isinstance(exc, StoreAccessError) and now - self._reconnected_at >= _RECONNECT_EVERY_S:
                self._reconnected_at = now
                self._engine.bucket.close()

    def _prepare(self, key: str) -> Pending | None:
        """Return what is to be uploaded of a key; None if nothing is, or not now."""
        pending = self._engine.get(key)
        if pending is None or not pending.ready:
            self._uploads.forget_unfinished(key)
            self._board.skip(key, is_gone=pending is None)
            return None
        blockers = self.claims.blockers(key)
        if not blockers:
            return pending
        while blockers and not ((blocker := self._engine.get(blockers[-1])) is not None and blocker.ready):
            blockers.pop()
        if not blockers:
            self._board.skip(key, retry=True)
        elif not self._board.park(key, blockers):
            self._break_circle(pending, blockers[-1])
        return None

    def _break_circle(self, pending: Pending, blocker: str) -> None:
        """Bring the bytes here of one of several keys that wait for one another, as two names were swapped or more were
        shifted round: of one that is a copy of another. Then the others can go."""
        for key in (pending.key, *self._board.chain(blocker)):
            found = self._engine.get(key)
            if found is None or not isinstance(found.content, Stored) or found.content.key == key:
                continue
            claim = self.claims.begin(key, found.version)
            if claim is None:
                continue
            try:
                self.claims.fetch(claim)
            except (ObjectChangedError, ObjectNotFoundError):  # uploading it finds out the same, and knows what to do
                if key == pending.key:
                    self._upload(found)
                    return
                try:
                    self._upload(found)
                except BaseException:
                    self._board.skip(key)
                    raise
            finally:
                if key != pending.key:  # another thread may have found it claimed, and left it
                    self._board.note_change(key, at_once=True)
            self._board.skip(pending.key)
            self._board.note_change(pending.key, at_once=True)
            return
        self._board.skip(pending.key, retry=True)

    def _upload(self, pending: Pending) -> None:
        key = pending.key
        is_large = pending.upload_bytes > self._engine.bucket.whole_bytes
        if is_large and not self._board.begin_large(key):
            return
        try:
            claim = self.claims.begin(key, pending.version)
            if claim is None:
                self._board.skip(key)
                return
            progress = self._board.begin(key, claim.pending.upload_bytes)
            outcome = self._uploads.bring(claim, progress, look_first=pending.touched)
        finally:
            if is_large:
                self._board.end_large()
        kept = outcome.conflict.kept_as if outcome.conflict is not None else ""
        self._board.end(key, outcome, self._engine.get(kept) if kept else None)


# --- what killed processes leave in a bucket -------------------------------------------------------------------------


def abort_old_uploads(
    bucket: Bucket, prefix: str, recorded: Callable[[], set[str]], *, stopped: Callable[[], bool], old_s: float = OLD_S
) -> int:
    """Abort the unfinished uploads in parts under a prefix that are older than `old_s` and not in `recorded` (ids);
    return how many. Errors are logged: a bucket that does not let us list them is fine.

    A bucket keeps (and bills) the parts of an unfinished upload until told otherwise. Those that this staging area
    recorded are gone on with, or taken back, when their key is looked at next, which is so for each at the start.
    """
    count = 0
    try:
        for upload in bucket.list_uploads(prefix):
            if stopped():
                break
            if upload.started_at < time.time() - old_s and upload.id not in recorded():
                bucket.abort_upload(upload.key, upload.id)
                count += 1
    except DatacacheError as exc:
        _log.info("unfinished uploads under %s/%s cannot be looked for: %s", bucket.url, prefix, exc)
    if count:
        _log.warning(
            "%s/%s: took back %d uploads in parts that were begun more than %.0f days ago and never finished",
            bucket.url, prefix, count, old_s / 86_400,
        )  # fmt: skip
    return count


def remove_probes(bucket: Bucket, prefix: str, *, old_s: float = _CLEAN_EVERY_S) -> None:
    """Delete objects that a store was tried out on by a process that was killed then. Errors are logged."""
    try:
        for page in bucket.list(prefix + PROBE_PREFIX):
            for info in page:
                ours = is_probe(info.key[len(prefix) :]) and info.size_bytes <= PROBE_BYTES
                if ours and info.mtime_ns < (time.time() - old_s) * 10**9:
                    bucket.remove(info.key, expect=info.etag)
    except DatacacheError as exc:
        _log.debug("%s/%s: no objects of ours can be looked for: %s", bucket.url, prefix, exc)
