"""What all threads of an uploader share: which key is next, how the store is, who waits for what.

Part of the uploader, which does the work: nothing here calls the engine or the store. Any thread; one lock guards all
of it. The engine tells of changes while it holds its own lock, so the engine is never called under this one.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Iterable

from datacache.core.errors import StagingError, StoreUnavailableError
from datacache.writeback.model import Failure, Pending
from datacache.writeback.upload.health import StoreHealth
from datacache.writeback.upload.parts import PartsUpload
from datacache.writeback.upload.queue import UploadQueue, Wait
from datacache.writeback.upload.report import Running, UploadReport
from datacache.writeback.upload.upload import Outcome

_log = logging.getLogger("datacache.writeback")
_FIRST_RETRY_S = 1.0
_LONGEST_WAIT_S = 30.0
"""Between two tries of one key that the store did not answer; what it refuses is tried half as often."""
_TORN_IN_A_ROW = 3
_ALONE_TRIES = 5
"""Of a key that the store never answers while others are uploaded, before who waits for it is told."""
_TORN_HINT = "It is uploaded when the program that has it open pauses, or closes it."
_A_LARGE_ONE = "\0"
"""Stands for a large upload that is under way: no key has a zero byte in it."""


class UploadBoard:
    """Tasks for threads, and what came of them. `threads` and `large` say how many uploads there are at a time, and how
    many of these may be of more than one part, so that a few huge files do not hold up all others."""

    def __init__(self, *, delay_s: float, every_s: float, threads: int, clock: Callable[[], float]) -> None:
        self.lock = threading.Lock()
        self.ended = threading.Condition(self.lock)
        """Notified when a wait may be over."""
        self.health = StoreHealth()
        self.report = UploadReport()
        self.stopping = False
        self.halted: StagingError | None = None
        """Why nothing may be uploaded from here any more."""
        self._delay_s, self._every_s, self._threads = delay_s, every_s, threads
        self._large_limit = max(1, threads * 3 // 4)
        self._large = 0
        self._clock = clock
        self._work = threading.Condition(self.lock)
        self._wakes_at = math.inf  # when a thread that waits for the next key to be due wakes; others need not
        self._queue = UploadQueue(delay_s, every_s)
        self._offers: list[PartsUpload] = []
        self._unavailable: set[str] = set()  # keys that failed because the store did not answer
        self._successes = 0
        self._failed_at: dict[str, int] = {}  # how many successes there were when a key failed so last
        self._torn: dict[str, int] = {}
        self._waits: list[Wait] = []

    @property
    def stopped(self) -> bool:
        """Whether no other request is to be begun."""
        return self.stopping or self.halted is not None

    @property
    def hurry(self) -> bool:
        """Whether room is short."""
        return self._queue.hurry

    # --- tasks -------------------------------------------------------------------------------------------------------

    def changed(self, key: str, *, at_once: bool) -> None:
        """A key is pending, or has changed again."""
        with self.lock:
            now = self._clock()
            if self._queue.soon(key, now) if at_once else self._queue.changed(key, now):
                self._work.notify()

    def _hasten(self, keys: Iterable[str], *, retries: bool) -> None:
        self._queue.hasten(self._clock(), keys, retries=retries)
        if retries:
            self.health.wake()
        self._work.notify_all()

    def take(self, number: int) -> tuple[str, bool] | PartsUpload | None:
        """What thread `number` is to do next: a key (and whether it is the only one that is tried), or a large file to
        help with; None to end. Waits until there is something."""
        with self.lock:
            while True:
                if self.stopping or (number >= self._threads and not self.hurry):
                    self._work.notify()  # it may have been woken for a task
                    return None
                now = self._clock()
                wait_s = self.health.wait_s(now) if self.halted is None else None
                if wait_s == 0:
                    key = self._queue.pop_any(now) if self.health.away else self._queue.pop(now)
                    if key is not None:
                        self._work.notify()  # the next one may be due as well
                        return key, self.health.begin()
                    helped = None if self.health.limited else self._to_help()
                    if helped is not None:
                        self._work.notify()
                        return helped
                    due = self._queue.next_due()
                    wait_s = due - now if due is not None else None
                if wait_s is None or self._wakes_at <= now + wait_s:
                    self._work.wait()
                else:
                    self._wakes_at = wakes_at = now + wait_s
                    self._work.wait(wait_s)
                    if self._wakes_at == wakes_at:
                        self._wakes_at = math.inf

    def _to_help(self) -> PartsUpload | None:
        found = next((parts for parts in self._offers if parts.has_work), None)
        if found is not None:  # the next thread helps the next one
            self._offers.remove(found)
            self._offers.append(found)
        return found

    def offer(self, parts: PartsUpload) -> None:
        """Other threads may help with this."""
        with self.lock:
            self._offers.append(parts)
            self._work.notify_all()

    def withdraw(self, parts: PartsUpload) -> None:
        """No other thread can."""
        with self.lock:
            self._offers.remove(parts)

    def park(self, key: str, blockers: list[str]) -> bool:
        """A key waits until the last of these, which are due now, is done. False if that one waits for this key."""
        with self.lock:
            now = self._clock()
            for blocker in blockers:
                self._queue.soon(blocker, now)
            parked = self._queue.park(key, blockers[-1])
            self._work.notify_all()
            return parked

    def chain(self, key: str) -> list[str]:
        """A key, the one that it waits for, the one that that one waits for, and so on."""
        with self.lock:
            return self._queue.chain(key)

    def begin_large(self, key: str) -> bool:
        """Whether another large upload may begin now; if not, the key waits until one has ended."""
        with self.lock:
            if self._large < self._large_limit:
                self._large += 1
                return True
            self._queue.park(key, _A_LARGE_ONE)
            return False

    def end_large(self) -> None:
        """It is over."""
        with self.lock:
            self._large -= 1
            self._queue.done(_A_LARGE_ONE, self._clock())
            self._work.notify_all()

    def end_probe(self) -> None:
        """The only key that was tried is over, however that went."""
        with self.lock:
            self.health.end()
            self._work.notify_all()

    # --- what came of them -------------------------------------------------------------------------------------------

    def began(self, running: Running) -> None:
        """An upload is under way."""
        with self.lock:
            self.report.running[running.key] = running

    def progressed(self, running: Running, size_bytes: int, *, sent: bool) -> None:
        """More of it is in the bucket: sent now, or there from before."""
        with self.lock:
            running.done_bytes += size_bytes
            if sent:
                self.report.sent(size_bytes, self._clock())
                self._answered()

    def nothing(self, key: str, *, retry: bool = False, is_gone: bool = False) -> None:
        """Nothing was to be done for a key, or not now."""
        with self.lock:
            self.report.running.pop(key, None)
            now = self._clock()
            if retry:
                self._queue.retry(key, now + self._delay_s)
            elif self._queue.done(key, now):
                self._work.notify()
            if is_gone:
                self._drop(key)

    def came(self, key: str, outcome: Outcome, kept: Pending | None) -> None:
        """An upload has ended. `kept` is what goes on under another key after a conflict."""
        with self.lock:
            now = self._clock()
            self.report.running.pop(key, None)
            self._answered()
            if outcome.torn:
                self._retry_torn(key, now)
                return
            if outcome.version < 0 and outcome.conflict is None:  # stopped, or deleted meanwhile
                self._queue.retry(key, now + self._delay_s)
                return
            self._mended(key)
            if outcome.version >= 0:
                self.report.succeeded(key)
            for wait in self._waits:
                if outcome.conflict is None:
                    wait.uploaded(key, outcome.version, is_gone=outcome.is_gone)
                elif wait.drop(key) and kept is not None:
                    wait.add(kept)
                    if self._queue.soon(kept.key, now):
                        self._work.notify()
                self._tell(wait)
            if self._queue.done(key, now):
                self._work.notify()

    def failed(self, key: str, exc: Exception) -> None:
        """An upload has failed."""
        with self.lock:
            now = self._clock()
            self.report.running.pop(key, None)
            if self.stopped:
                self._queue.retry(key, now + self._delay_s)
                return
            is_away = isinstance(exc, StoreUnavailableError)
            before = self.report.failures.get(key)
            longest_s = _LONGEST_WAIT_S if is_away else 2 * _LONGEST_WAIT_S
            wait_s = min(longest_s, _FIRST_RETRY_S * 2 ** min(before.tries if before is not None else 0, 10))
            wait_s *= 0.5 + random.random() / 2
            failure = self.report.failed(key, exc, wait_s)
            self._queue.retry(key, now + wait_s)
            if is_away and self._failed_at.get(key, self._successes) < self._successes:
                # Others were uploaded since it last failed: it is this key, not the store, and it backs off alone.
                self._failed_at[key] = self._successes
                self._unavailable.discard(key)
                if failure.tries >= _ALONE_TRIES:
                    for wait in self._waits:
                        wait.failed(failure)
                        self._tell(wait)
            elif is_away:
                self._failed_at[key] = self._successes
                self._unavailable.add(key)
                if self.health.unavailable(now, failure.reason):
                    _log.warning("the store does not answer; uploads go on when it does: %s", failure.reason)
            else:
                if not self._waits:  # who waits wants to know of every key whether it is refused
                    self.health.refused(now)
                for wait in self._waits:
                    wait.failed(failure)
                    self._tell(wait)
            self._work.notify()

    def halt(self, error: StagingError | None) -> None:
        """Nothing may be uploaded from here any more; None: it may be again."""
        with self.lock:
            if error is not None and self.halted is None:
                _log.error("uploads stop: %s", error)
            if (error is None) != (self.halted is None):
                self.halted = error
                self.ended.notify_all()
                self._work.notify_all()

    def press(self, hurry: bool) -> None:
        """Room is short, or is not any more."""
        with self.lock:
            if hurry and not self._queue.hurry:
                self._hasten((), retries=False)
            self._queue.hurry = hurry

    def stop(self) -> None:
        """All threads are to end."""
        with self.lock:
            self.stopping = True
            self._work.notify_all()
            self.ended.notify_all()

    def _answered(self) -> None:
        self._successes += 1
        if self.health.answered():
            _log.warning("the store answers again")
            now = self._clock()
            for key in self._unavailable:
                self._queue.soon(key, now)
            self._unavailable.clear()
            self._work.notify_all()

    def _mended(self, key: str) -> None:
        self._torn.pop(key, None)
        self._unavailable.discard(key)
        self._failed_at.pop(key, None)
        self.report.mended(key)

    def _retry_torn(self, key: str, now: float) -> None:
        """A file that is written to in place again and again is tried less and less often. (An upload may as well begin
        when the writer pauses; copying the file first would need its room a second time, and be torn as well.)"""
        self._torn[key] = count = self._torn.get(key, 0) + 1
        if count < _TORN_IN_A_ROW:
            self._queue.retry(key, now + self._delay_s)
            return
        wait_s = min(self._delay_s * 2.0 ** min(count, 20), 4 * self._every_s)
        self._queue.when_quiet(key, now, wait_s)
        # Who waits is told: it may go on for ever.
        failure = self.report.failed(key, StagingError("it is written to all the time", hint=_TORN_HINT), wait_s)
        for wait in self._waits:
            wait.failed(failure)
            self._tell(wait)

    # --- who waits ---------------------------------------------------------------------------------------------------

    def add_wait(self, wait: Wait, *, all_at_once: bool) -> None:
        """Its keys are due now, and with `all_at_once` everything else: what failed, and what others wait for."""
        with self.lock:
            self._waits.append(wait)
            if all_at_once:
                self._hasten(wait.keys, retries=True)
            else:
                now = self._clock()
                for key in wait.keys:
                    self._queue.soon(key, now)
                self._work.notify()

    def forget(self, key: str) -> None:
        """A key is not pending any more, and nobody has to wait for it."""
        with self.lock:
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._mended(key)
        for wait in self._waits:
            wait.moved = wait.drop(key) or wait.moved
            self._tell(wait)

    def remove_wait(self, wait: Wait) -> None:
        """Nobody waits for it any more."""
        with self.lock:
            self._waits.remove(wait)

    def is_hopeless(self, wait: Wait) -> bool:
        """Whether nothing that is left of it can be uploaded. Under the lock."""
        return wait.is_hopeless(self._queue.blocker, self._queue.parked)

    def reason_of(self, key: str) -> Failure | None:
        """Why a key was not uploaded when it was last tried. Under the lock."""
        return self.report.failures.get(key) or self.report.failures.get(self._queue.blocker(key))

    def _tell(self, wait: Wait) -> None:
        if not wait or self.is_hopeless(wait):
            self.ended.notify_all()
