"""Brings everything that is pending to the bucket, in the background, for as long as it takes.

Made by whoever opens a live bucket; told of changes by the engine. A fixed number of threads (twice as many while room
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
from dataclasses import replace
from typing import Any

from datacache.core.concurrency import ByteBudget
from datacache.core.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    StagingError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
)
from datacache.writeback.engine import WriteBack
from datacache.writeback.model import Pending, Stored
from datacache.writeback.upload import leftovers
from datacache.writeback.upload.board import UploadBoard
from datacache.writeback.upload.parts import PartsUpload
from datacache.writeback.upload.queue import Wait
from datacache.writeback.upload.report import Running
from datacache.writeback.upload.upload import Uploads
from datacache.writeback.upload.ways import Sending

_log = logging.getLogger("datacache.writeback")
BODY_BYTES = 32 * 2**20
"""Of the bodies of whole objects, in memory, of all uploads together."""
_TOLD_CONFLICTS = 100
_HURRY = 0.8
_WATCH_EVERY_S = 0.5
_RECONNECT_EVERY_S = 30.0
_TELL_EVERY_S = 0.5
_FEW = 1000


class _Progress:
    """Passes on how far one upload is."""

    def __init__(self, board: UploadBoard, running: Running) -> None:
        self._board, self._running = board, running

    def has(self, size_bytes: int) -> None:
        self._board.progressed(self._running, size_bytes, sent=False)

    def sent(self, size_bytes: int) -> None:
        self._board.progressed(self._running, size_bytes, sent=True)


class Uploader:
    """The uploads of one engine, between `start` and `stop`."""

    def __init__(
        self,
        engine: WriteBack,
        *,
        delay_s: float = 3.0,
        upload_every_s: float = 30.0,
        away_wait_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`away_wait_s`: how long the store may be away until who waits for one upload is told."""
        self._away_wait_s = away_wait_s
        self._engine = engine
        self._clock = clock
        self._board = UploadBoard(delay_s=delay_s, every_s=upload_every_s, threads=engine.uploads, clock=clock)
        self._sending = Sending(
            engine, ByteBudget(BODY_BYTES), self._board.offer, self._board.withdraw, lambda: self._board.stopped
        )
        self._uploads = Uploads(self._sending)
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._let_go = False
        self._reconnected_at = clock()

    def start(self) -> None:
        """Begin with all that is pending. Once."""
        self._engine.listen(self._changed)
        for pending in self._engine.pendings():
            self._changed(pending)
        for key in self._engine.uploads_recorded():
            self._board.changed(key, at_once=True)
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
        wait = Wait([replace(pending, version=min(version, pending.version))])
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
                    if wait and left_s > 0 and not self._why_not(wait, began, is_flush=is_flush):
                        board.ended.wait(left_s)
                    why = self._why_not(wait, began, is_flush=is_flush)
                    if not why and deadline is not None and self._clock() >= deadline:
                        why = "the time is over"
                    if wait and why:
                        raise wait.error(why, board.reason_of, hint=board.halted.hint if board.halted else "")
                if progress is not None:
                    progress(self.status() | wait.progress())
                if not wait:
                    return
                if wait.count <= _FEW:  # what was deleted before it was ever uploaded is not pending any more
                    for key in [key for key in wait.keys if self._engine.get(key) is None]:
                        board.forget(key)
        finally:
            board.remove_wait(wait)

    def let_go(self) -> None:
        """Nobody but a flush waits for an upload any more: the mount ends. They get an error."""
        with self._board.lock:
            self._let_go = True
            self._board.ended.notify_all()

    def _why_not(self, wait: Wait, began: float, *, is_flush: bool) -> str:
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
        return "they were refused" if self._board.is_hopeless(wait) else ""

    def status(self) -> dict[str, Any]:
        """What is to be uploaded and how that goes. `failures` and `conflicts` are the first and last hundred."""
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

    def _changed(self, pending: Pending) -> None:
        if pending.ready:
            self._board.changed(pending.key, at_once=self._engine.ack == "uploaded")

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
        """Looks after the staging area: whether it is still ours, and whether its room is short."""
        while not self._stop.wait(_WATCH_EVERY_S):
            self._check()
            try:
                hurry = self._engine.pressure() > _HURRY
            except StagingError:
                continue
            hurries = self._board.hurry
            self._board.press(hurry)
            if hurry and not hurries:
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                for number in range(self._engine.uploads):
                    self._begin(self._work, self._engine.uploads + number)

    def _clean(self) -> None:
        engine = self._engine

        def recorded() -> set[str]:
            return {state.id for state in engine.uploads_recorded().values()}

        while True:
            leftovers.take_back_old(engine.bucket, engine.prefix, recorded, stopped=self._stop.is_set)
            leftovers.remove_probes(engine.bucket, engine.prefix)
            if self._stop.wait(leftovers.EVERY_S):
                return

    def _check(self) -> bool:
        """Whether the staging area is still ours."""
        try:
            self._engine.area.check()
        except StagingError as exc:
            self._board.halt(exc)
            return False
        self._board.halt(None)
        return True

    # --- one key -----------------------------------------------------------------------------------------------------

    def _bring(self, key: str) -> None:
        """Whatever happens, the board is told."""
        try:
            pending = self._prepare(key)
            if pending is not None:
                self._upload(pending)
        except StagingError as exc:
            if self._check():
                self._board.failed(key, exc)
            else:
                self._board.nothing(key, retry=True)
        except Exception as exc:  # noqa: BLE001 - the thread goes on; the board logs it
            self._board.failed(key, exc)
            if isinstance(exc, StoreError) and not isinstance(exc, StoreUnavailableError):
                self._reconnect(exc)

    def _prepare(self, key: str) -> Pending | None:
        """What is to be uploaded of a key; None if nothing is, or not now."""
        pending = self._engine.get(key)
        if pending is None or not pending.ready:
            self._sending.forget_unfinished(key)
            self._board.nothing(key, is_gone=pending is None)
            return None
        blockers = self._engine.claims.blockers(key)
        if blockers:
            while blockers and not self._is_ready(blockers[-1]):
                blockers.pop()
            if not blockers:
                self._board.nothing(key, retry=True)
                return None
            if self._board.park(key, blockers):
                return None
            self._break_circle(pending, blockers[-1])
            return None
        return pending

    def _is_ready(self, key: str) -> bool:
        pending = self._engine.get(key)
        return pending is not None and pending.ready

    def _break_circle(self, pending: Pending, blocker: str) -> None:
        """Two names were swapped, or more were shifted round: the bytes of one that is a copy of another are brought
        here, then the others can go."""
        for key in (pending.key, *self._board.chain(blocker)):
            found = self._engine.get(key)
            if found is None or not isinstance(found.content, Stored) or found.content.key == key:
                continue
            claim = self._engine.claims.begin(key, found.version)
            if claim is None:
                continue
            try:
                self._engine.fetching.fetch(claim)
            except (ObjectChangedError, ObjectNotFoundError):
                if key == pending.key:
                    self._upload(found)  # finds out the same, and knows what to do
                    return
                self._upload_other(found)
            finally:
                if key != pending.key:  # another thread may have found it claimed, and left it
                    self._board.changed(key, at_once=True)
            self._board.nothing(pending.key)
            self._board.changed(pending.key, at_once=True)
            return
        self._board.nothing(pending.key, retry=True)

    def _upload_other(self, pending: Pending) -> None:
        try:
            self._upload(pending)
        except BaseException:
            self._board.nothing(pending.key)
            raise

    def _upload(self, pending: Pending) -> None:
        key = pending.key
        is_large = pending.upload_bytes > self._engine.bucket.whole_bytes
        if is_large and not self._board.begin_large(key):
            return
        try:
            claim = self._engine.claims.begin(key, pending.version)
            if claim is None:
                self._board.nothing(key)
                return
            running = Running(key, claim.pending.upload_bytes)
            self._board.began(running)
            outcome = self._uploads.bring(claim, _Progress(self._board, running), look_first=pending.touched)
        finally:
            if is_large:
                self._board.end_large()
        kept = outcome.conflict.kept_as if outcome.conflict is not None else ""
        self._board.came(key, outcome, self._engine.get(kept) if kept else None)

    def _reconnect(self, exc: StoreError) -> None:
        """Connect anew once in a while when access is refused: new credentials may be there."""
        now = self._clock()
        if isinstance(exc, StoreAccessError) and now - self._reconnected_at >= _RECONNECT_EVERY_S:
            self._reconnected_at = now
            self._engine.bucket.close()
