"""The state that all threads of an uploader share: which key is next, how the store is, what flushes wait for.

Part of the uploader, which does the work: nothing here calls the engine or the store. Any thread; one lock guards all
of it. The engine tells of changes while it holds its own lock, so the engine is never called under this one.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from datacache.core.errors import DatacacheError, StagingError, StoreError, StoreUnavailableError
from datacache.writeback.model import Failure, Pending
from datacache.writeback.upload.queue import StoreHealth, UploadQueue, Wait
from datacache.writeback.upload.upload import Outcome
from datacache.writeback.upload.ways import AddProgress, PartsUpload

_log = logging.getLogger("datacache.writeback")
_FIRST_RETRY_S = 1.0
_LONGEST_WAIT_S = 30.0
"""Between two tries of one key that the store did not answer; what it refuses is tried half as often."""
_TORN_IN_A_ROW = 3
_ALONE_TRIES = 5
"""Of a key that the store never answers while others are uploaded, before the threads that wait for it are told."""
_TORN_HINT = "It is uploaded when the program that has it open pauses, or closes it."
_A_LARGE_ONE = "\0"
"""Stands for a large upload that is under way: no key has a zero byte in it."""
_RATE_S = 10
_LISTED = 100
_TOLD = 1000


class UploadReport:
    """Counters since the start, and the failures that are not mended: for status and the log."""

    def __init__(self) -> None:
        self.running: dict[str, list[Any]] = {}
        """Key, bytes that are in the bucket by now and bytes of all, by key."""
        self.failures: dict[str, Failure] = {}
        self.uploaded_files = 0
        self._uploaded_bytes = 0
        self._seconds: deque[list[float]] = deque()  # [second, bytes sent in it], the last few
        self._reasons: dict[str, str] = {}  # each reason once, in memory and in the log

    def count_sent(self, size_bytes: int, now: float) -> None:
        """Count bytes that have arrived in the bucket."""
        self._uploaded_bytes += size_bytes
        second = now // 1
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0])
            while self._seconds[0][0] < second - _RATE_S:
                self._seconds.popleft()
        self._seconds[-1][1] += size_bytes

    def mend(self, key: str) -> None:
        """Forget the failure of a key, if there was one."""
        if self.failures.pop(key, None) is not None and not self.failures:
            self._reasons.clear()  # the next failure is news again

    def fail(self, key: str, exc: Exception, retry_in_s: float) -> Failure:
        """Note that a key could not be uploaded, and return its failure. Logged if the reason is new."""
        reason, hint = _reason(exc), exc.hint if isinstance(exc, DatacacheError) else ""
        known = self._reasons.get(reason)
        if known is None and len(self._reasons) < _TOLD:
            self._reasons[reason] = known = reason
            trace = None if isinstance(exc, DatacacheError) else exc
            _log.error("%s cannot be uploaded: %s%s", key, reason, f" ({hint})" if hint else "", exc_info=trace)
        before = self.failures.get(key)
        tries = before.tries + 1 if before is not None else 1
        now = time.time()
        found = self.failures[key] = Failure(key, known or reason, hint, tries, now, now + retry_in_s)
        return found

    def numbers(self, now: float) -> dict[str, Any]:
        """Return all of it for status."""
        failures = list(self.failures.values())
        recent_bytes = sum(size for second, size in self._seconds if second >= now // 1 - _RATE_S)
        return {
            "uploading": [list(each) for each in self.running.values()],
            "upload_bytes_per_s": recent_bytes / _RATE_S,
            "uploaded_files": self.uploaded_files,
            "uploaded_bytes": self._uploaded_bytes,
            "failed_files": len(failures),
            "failures": [failure._asdict() for failure in failures[:_LISTED]],
        }


def _reason(exc: Exception) -> str:
    """Return an error's words without the name of what it is about: thousands of keys fail for the same reason."""
    if not isinstance(exc, DatacacheError):
        return f"{type(exc).__name__}: {exc}"
    url = exc.url if isinstance(exc, StoreError) else ""
    return exc.message.removeprefix(f"{url}: ") if url else exc.message


class UploadBoard:
    """Tasks for threads, and what came of them. Of `threads` uploads at a time three in four may be of more than one
    part, so that a few huge files do not hold up all others."""

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
        """Return whether no other request is to be begun."""
        return self.stopping or self.halted is not None

    @property
    def hurry(self) -> bool:
        """Return whether room is short."""
        return self._queue.hurry

    # --- tasks -------------------------------------------------------------------------------------------------------

    def note_change(self, key: str, *, at_once: bool) -> None:
        """Queue a key that is pending, or has changed again."""
        with self.lock:
            now = self._clock()
            if self._queue.make_due(key, now) if at_once else self._queue.note_change(key, now):
                self._work.notify()

    def take(self, number: int) -> tuple[str, bool] | PartsUpload | None:
        """Return the next task of thread `number`: a key (and whether it is the only one that is tried), or a large
        file to help with; None to end. Waits until there is something."""
        with self.lock:
            while True:
                if self.stopping or (number >= self._threads and not self.hurry):
                    self._work.notify()  # it may have been woken for a task
                    return None
                now = self._clock()
                wait_s = self.health.wait_s(now) if self.halted is None else None
                if wait_s == 0:
                    patient = not (self._waits or self.health.limited)
                    key = self._queue.pop_any(now) if self.health.away else self._queue.pop(now, patient=patient)
                    if key is not None:
                        self._work.notify()  # the next one may be due as well
                        return key, self.health.begin()
                    helped = None if self.health.limited else self._next_offer_locked()
                    if helped is not None:
                        self._work.notify()
                        return helped
                    due = self._queue.next_due(now, patient=patient)
                    wait_s = due - now if due is not None else None
                if wait_s is None or self._wakes_at <= now + wait_s:
                    self._work.wait()
                else:
                    self._wakes_at = wakes_at = now + wait_s
                    self._work.wait(wait_s)
                    if self._wakes_at == wakes_at:
                        self._wakes_at = math.inf

    def _next_offer_locked(self) -> PartsUpload | None:
        found = next((parts for parts in self._offers if parts.has_work), None)
        if found is not None:  # the next thread helps the next one
            self._offers.remove(found)
            self._offers.append(found)
        return found

    def offer(self, parts: PartsUpload) -> None:
        """Offer an upload to threads that have nothing else to do."""
        with self.lock:
            self._offers.append(parts)
            self._work.notify_all()

    def withdraw(self, parts: PartsUpload) -> None:
        """Stop offering an upload to helper threads."""
        with self.lock:
            self._offers.remove(parts)

    def park(self, key: str, blockers: list[str]) -> bool:
        """Have a key wait until the last of these, which are due now, is done. False if that one waits for this key."""
        with self.lock:
            now = self._clock()
            for blocker in blockers:
                self._queue.make_due(blocker, now)
            parked = self._queue.park(key, blockers[-1])
            self._work.notify_all()
            return parked

    def chain(self, key: str) -> list[str]:
        """Return a key, the one that it waits for, the one that that one waits for, and so on."""
        with self.lock:
            return self._queue.chain(key)

    def begin_large(self, key: str) -> bool:
        """Begin a large upload if one more may; if not, the key waits until one has ended."""
        with self.lock:
            if self._large < self._large_limit:
                self._large += 1
                return True
            self._queue.park(key, _A_LARGE_ONE)
            return False

    def end_large(self) -> None:
        """End a large upload: another one may begin."""
        with self.lock:
            self._large -= 1
            self._queue.end(_A_LARGE_ONE, self._clock())
            self._work.notify_all()

    def end_probe(self) -> None:
        """End the upload of the only key that was tried, however that went."""
        with self.lock:
            self.health.end()
            self._work.notify_all()

    # --- what came of them -------------------------------------------------------------------------------------------

    def begin(self, key: str, size_bytes: int) -> AddProgress:
        """Show an upload as under way."""
        running: list[Any] = [key, 0, size_bytes]
        with self.lock:
            self.report.running[key] = running

        def add(done_bytes: int, sent: bool) -> None:
            with self.lock:
                running[1] += done_bytes
                if sent:
                    self.report.count_sent(done_bytes, self._clock())
                    self._note_answer_locked()

        return add

    def skip(self, key: str, *, retry: bool = False, is_gone: bool = False) -> None:
        """End a key for which nothing was to be done; with `retry`: not now. `is_gone`: it is not pending any more."""
        with self.lock:
            self.report.running.pop(key, None)
            now = self._clock()
            if retry:
                self._queue.retry(key, now + self._delay_s)
            elif self._queue.end(key, now):
                self._work.notify()
            if is_gone:
                self._drop_locked(key)

    def end(self, key: str, outcome: Outcome, kept: Pending | None) -> None:
        """End an upload. `kept` is what goes on under another key after a conflict."""
        with self.lock:
            now = self._clock()
            self.report.running.pop(key, None)
            self._note_answer_locked()
            if outcome.torn:
                self._retry_torn_locked(key, now)
                return
            if outcome.version < 0 and outcome.conflict is None:  # stopped, or deleted meanwhile
                self._queue.retry(key, now + self._delay_s)
                return
            self._mend_locked(key)
            self.report.uploaded_files += outcome.version >= 0
            for wait in self._waits:
                if outcome.conflict is None:
                    wait.note_uploaded(key, outcome.version, is_gone=outcome.is_gone)
                elif wait.drop(key) and kept is not None:
                    wait.add(kept)
                    if self._queue.make_due(kept.key, now):
                        self._work.notify()
                self._tell_locked(wait)
            if self._queue.end(key, now):
                self._work.notify()

    def fail(self, key: str, exc: Exception) -> None:
        """End an upload that has failed: it is tried again."""
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
            failure = self.report.fail(key, exc, wait_s)
            self._queue.retry(key, now + wait_s)
            if is_away and self._failed_at.get(key, self._successes) < self._successes:
                # Others were uploaded since it last failed: it is this key, not the store, and it backs off alone.
                self._failed_at[key] = self._successes
                self._unavailable.discard(key)
                if failure.tries >= _ALONE_TRIES:
                    self._tell_failed_locked(failure)
            elif is_away:
                self._failed_at[key] = self._successes
                self._unavailable.add(key)
                if self.health.note_silence(now, failure.reason):
                    _log.warning("the store does not answer; uploads go on when it does: %s", failure.reason)
            else:
                if not self._waits:  # a flush wants to know of every key whether it is refused
                    self.health.note_refusal(now)
                self._tell_failed_locked(failure)
            self._work.notify()

    def _retry_torn_locked(self, key: str, now: float) -> None:
        """Try a file that is written to in place again and again less and less often. (An upload may as well begin when
        the writer pauses; copying the file first would need its room a second time, and be torn as well.)"""
        self._torn[key] = count = self._torn.get(key, 0) + 1
        if count < _TORN_IN_A_ROW:
            self._queue.retry(key, now + self._delay_s)
            return
        wait_s = min(self._delay_s * 2.0 ** min(count, 20), 4 * self._every_s)
        self._queue.retry_when_quiet(key, now, wait_s)
        error = StagingError("it is written to all the time", hint=_TORN_HINT)
        self._tell_failed_locked(self.report.fail(key, error, wait_s))  # it may go on for ever

    def _note_answer_locked(self) -> None:
        self._successes += 1
        if self.health.note_answer():
            _log.warning("the store answers again")
            now = self._clock()
            for key in self._unavailable:
                self._queue.make_due(key, now)
            self._unavailable.clear()
            self._work.notify_all()

    def _mend_locked(self, key: str) -> None:
        self._torn.pop(key, None)
        self._unavailable.discard(key)
        self._failed_at.pop(key, None)
        self.report.mend(key)

    # --- all of them -------------------------------------------------------------------------------------------------

    def halt(self, error: StagingError | None) -> None:
        """Let nothing be uploaded from here any more; None: let it again."""
        with self.lock:
            if error is not None and self.halted is None:
                _log.error("uploads stop: %s", error)
            changed = (error is None) != (self.halted is None)
            self.halted = error
            if changed:
                self.ended.notify_all()
                self._work.notify_all()

    def set_hurry(self, hurry: bool) -> None:
        """Have all keys due as soon as they change while room is short."""
        with self.lock:
            if hurry and not self._queue.hurry:
                self._hasten_locked((), retries=False)
            self._queue.hurry = hurry

    def stop(self) -> None:
        """Have all threads end."""
        with self.lock:
            self.stopping = True
            self._work.notify_all()
            self.ended.notify_all()

    def _hasten_locked(self, keys: Iterable[str], *, retries: bool) -> None:
        self._queue.hasten(self._clock(), keys, retries=retries)
        if retries:
            self.health.wake()
        self._work.notify_all()

    # --- waits -------------------------------------------------------------------------------------------------------

    def add_wait(self, wait: Wait, *, all_at_once: bool) -> None:
        """Have a wait's keys due now, and with `all_at_once` everything else: what failed, and what others wait for."""
        with self.lock:
            self._waits.append(wait)
            if all_at_once:
                self._hasten_locked(wait.keys, retries=True)
            else:
                now = self._clock()
                for key in wait.keys:
                    self._queue.make_due(key, now)
                self._work.notify()

    def remove_wait(self, wait: Wait) -> None:
        """Tell a wait nothing more."""
        with self.lock:
            self._waits.remove(wait)

    def drop(self, key: str) -> None:
        """End all waits for a key that is not pending any more."""
        with self.lock:
            self._drop_locked(key)

    def _drop_locked(self, key: str) -> None:
        self._mend_locked(key)
        for wait in self._waits:
            wait.moved = wait.drop(key) or wait.moved
            self._tell_locked(wait)

    def is_hopeless_locked(self, wait: Wait) -> bool:
        """Return whether nothing that is left of it can be uploaded."""
        return wait.is_hopeless(self._queue)

    def reason_of_locked(self, key: str) -> Failure | None:
        """Return why a key was not uploaded when it was last tried."""
        return self.report.failures.get(key) or self.report.failures.get(self._queue.blocker(key))

    def _tell_failed_locked(self, failure: Failure) -> None:
        for wait in self._waits:
            wait.note_failed(failure)
            self._tell_locked(wait)

    def _tell_locked(self, wait: Wait) -> None:
        if not wait or self.is_hopeless_locked(wait):
            self.ended.notify_all()
