"""When which key is due for uploading, whether the store is worth asking, and what a flush waits for.

Part of the uploader's board, which guards all of it with its lock; no I/O, no clock of its own. Times are seconds of
the uploader's clock.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable

from datacache.core.errors import UploadError
from datacache.writeback.model import Failure, Pending

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
IN_A_ROW = 3
"""Uploads that fail one after the other, none succeeding in between, before it is taken to be the store."""
REFUSED_WAIT_S = 0.05
MANY, AT_ONCE_S = 32, 0.5
"""Changes, and the time they come in, by which programs are taken to be at work: uploads would slow them down."""
PATIENCE_S = 10.0
"""How long a key that is due waits for them to pause."""
_NAMED = 5
"""Keys that an error names."""


class UploadQueue:
    """Keys by the time they are due: `delay_s` after their last change, but `every_s` after the first at the latest.
    While many change one after the other, what is due waits some more for a pause.

    A key is in one place at a time: queued (with the time it is due), active (a thread is at it) or parked (until
    another key is done). A key costs a tuple in a heap and an entry of a dict, some 140 bytes besides its text.
    """

    def __init__(self, delay_s: float, every_s: float) -> None:
        self._delay_s = delay_s
        self._every_s = every_s
        self._heap: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}  # what is not the same in the heap is out of date there
        self._first: dict[str, float] = {}  # first and last change, of queued keys that changed more than once
        self._last: dict[str, float] = {}
        self._retries: set[str] = set()  # queued keys that failed: hurrying does not help them
        self._active: set[str] = set()
        self._again: set[str] = set()  # active keys that have changed since
        self._parked_on: dict[str, str] = {}
        self._parked: dict[str, list[str]] = {}  # key -> those that wait for it
        self._changed_at: deque[float] = deque(maxlen=MANY)  # when keys changed, the oldest first
        self.hurry = False
        """Tells whether keys are due as soon as they change."""

    def __len__(self) -> int:
        return len(self._due)

    @property
    def parked(self) -> int:
        """Return how many keys wait for others."""
        return len(self._parked_on)

    # Methods that queue a key return whether it is due before all that were queued: then a thread is to be woken.

    def note_change(self, key: str, now: float) -> bool:
        """Queue a key that is pending, or has changed again."""
        self._changed_at.append(now)
        if key in self._active:
            self._again.add(key)
            return False
        if key in self._parked_on:
            return False
        due = self._due.get(key)
        if due is None:
            return self._push(key, now if self.hurry else now + self._delay_s)
        self._first.setdefault(key, due - self._delay_s)
        self._last[key] = now
        return False

    def make_due(self, key: str, now: float) -> bool:
        """Have a key due at once, whatever it waited for, a pause of programs included."""
        due = now - PATIENCE_S
        if key in self._active:
            self._again.add(key)
            return False
        if key in self._parked_on or self._due.get(key, now) <= due:
            return False
        self._forget(key)
        return self._push(key, due)

    def retry(self, key: str, due: float) -> None:
        """Queue a key that was active, to be due later, and no sooner however it changes."""
        self._active.discard(key)
        self._again.discard(key)
        self._retries.add(key)
        self._push(key, due)

    def retry_when_quiet(self, key: str, now: float, wait_s: float) -> None:
        """Queue a key that was active, to be due when it has not changed for a while, but in `wait_s` at the latest."""
        self.retry(key, now + wait_s)
        self._first[key] = now + wait_s - self._every_s

    def end(self, key: str, now: float) -> bool:
        """Take a key as not active any more. It is queued again if it has changed meanwhile; keys that waited for it
        are due."""
        self._active.discard(key)
        earlier = False
        if key in self._again:
            self._again.discard(key)
            earlier = self.note_change(key, now)
        for waiting in self._parked.pop(key, ()):
            del self._parked_on[waiting]
            earlier = self.make_due(waiting, now) or earlier
        return earlier

    def hasten(self, now: float, keys: Iterable[str] = (), *, retries: bool = False) -> None:
        """Have all that is queued due now, and `keys` as well; what failed only with `retries`."""
        wanted = {key: due if key in self._retries and not retries else now for key, due in self._due.items()}
        for key in keys:
            if key in self._active:
                self._again.add(key)
            elif key not in self._parked_on:
                wanted[key] = now
        self._due = wanted
        if retries:
            self._retries.clear()
        self._first.clear()
        self._last.clear()
        self._heap = [(due, key) for key, due in wanted.items()]
        heapq.heapify(self._heap)

    def pop(self, now: float, *, patient: bool = False) -> str | None:
        """Return a key that is due, which is active from now on. `patient`: while programs are at work, only one that
        has waited for long."""
        if patient and self._busy_s(now):
            now -= PATIENCE_S
        while self._heap and self._heap[0][0] <= now:
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) != due:
                continue
            last = self._last.pop(key, None)
            if last is not None and not self.hurry:
                later = min(last + self._delay_s, self._first[key] + self._every_s)
                if later > now:
                    self._push(key, later)
                    continue
            return self._activate(key)
        return None

    def pop_any(self, now: float) -> str | None:
        """Do as `pop`, but take one that has not failed yet first, whichever: another one each time."""
        new = [key for due, key in self._heap if due <= now and self._due.get(key) == due and key not in self._retries]
        return self._activate(random.choice(new)) if new else self.pop(now)

    def next_due(self, now: float, *, patient: bool = False) -> float | None:
        """Return when `pop` is worth another try."""
        if not self._heap:
            return None
        return max(self._heap[0][0], now + self._busy_s(now) if patient else now)

    def _busy_s(self, now: float) -> float:
        """Return how long programs are still taken to be at work if nothing else changes: not longer than a key waits
        after its change."""
        if self.hurry or len(self._changed_at) < MANY:
            return 0.0
        return max(0.0, self._changed_at[0] + min(AT_ONCE_S, self._delay_s) - now)

    def park(self, key: str, blocker: str) -> bool:
        """Have an active key wait until another one is done. False, and nothing is changed, if that one waits for
        this."""
        if key in self.chain(blocker):
            return False
        self._active.discard(key)
        self._again.discard(key)
        self._parked_on[key] = blocker
        self._parked.setdefault(blocker, []).append(key)
        return True

    def blocker(self, key: str) -> str:
        """Return the key that a key waits for in the end: itself if it waits for none."""
        return self.chain(key)[-1]

    def chain(self, key: str) -> list[str]:
        """Return a key, the one that it waits for, the one that that one waits for, and so on."""
        found = [key]
        while found[-1] in self._parked_on:
            found.append(self._parked_on[found[-1]])
        return found

    def _activate(self, key: str) -> str:
        del self._due[key]
        self._forget(key)
        self._active.add(key)
        return key

    def _push(self, key: str, due: float) -> bool:
        earlier = not self._heap or due < self._heap[0][0]
        self._due[key] = due
        heapq.heappush(self._heap, (due, key))
        return earlier

    def _forget(self, key: str) -> None:
        self._first.pop(key, None)
        self._last.pop(key, None)
        self._retries.discard(key)


class StoreHealth:
    """Tells by the last answers whether the store is worth asking: one back-off for all uploads, not one a key.

    While the store does not answer, one upload at a time is tried, another one each time, at growing intervals with
    jitter; the first that gets through lets all others go on. (A key that fails although others succeed is not told of
    here: the board has it back off alone.) While it refuses whatever is tried (credentials that have expired), one at a
    time is tried as well, but soon after one another, since what it refuses may be a few of many keys.
    """

    def __init__(self) -> None:
        self._failed = 0  # in a row
        self._probing = False
        self._next_at = 0.0
        self._wait_s = FIRST_WAIT_S
        self.reason = ""
        """Why it does not answer; '' while it does."""
        self.away_since = 0.0

    @property
    def limited(self) -> bool:
        """Return whether one upload at a time is tried."""
        return self._failed >= IN_A_ROW

    @property
    def away(self) -> bool:
        """Return whether that is because the store does not answer."""
        return self.limited and bool(self.reason)

    def wait_s(self, now: float) -> float | None:
        """Return how long to wait before something is tried: 0 for not at all, None until a try under way ends."""
        if not self.limited:
            return 0.0
        return None if self._probing else max(0.0, self._next_at - now)

    def begin(self) -> bool:
        """Note that something is tried now; return whether it is the one try that others wait for."""
        self._probing = self.limited
        return self._probing

    def end(self) -> None:
        """Note that the one try is over, however it went."""
        self._probing = False

    def note_answer(self) -> bool:
        """Note that the store did what was asked; return whether it did not answer before."""
        self._failed = 0
        self._wait_s = FIRST_WAIT_S
        back, self.reason = bool(self.reason), ""
        return back

    def note_silence(self, now: float, reason: str) -> bool:
        """Note that the store did not answer; return whether that is new."""
        self._failed += 1
        if not self.limited:
            return False
        self._next_at = now + self._wait_s * (0.5 + random.random() / 2)
        self._wait_s = min(LONGEST_WAIT_S, 2 * self._wait_s)
        new = not self.reason
        if new:
            self.away_since = now
        self.reason = reason
        return new

    def note_refusal(self, now: float) -> None:
        """Note that the store answered that it does not do this."""
        self._failed += 1
        self._next_at = now + REFUSED_WAIT_S
        self._wait_s = FIRST_WAIT_S
        self.reason = ""

    def wake(self) -> None:
        """Have the next try due now: somebody waits."""
        self._next_at = 0.0
        self._wait_s = FIRST_WAIT_S


class Wait:
    """Keys that a flush waits for, each in a version, until they are in the bucket or cannot get there."""

    def __init__(self, pendings: list[Pending]) -> None:
        self._wanted = {pending.key: (pending.version, pending.upload_bytes) for pending in pendings}
        self._failed: dict[str, Failure] = {}  # tried since, and failed in a way that waiting does not mend
        self._files = len(self._wanted)
        self._bytes = self._bytes_left = sum(size for _, size in self._wanted.values())
        self.moved = False
        """Tells whether a key was deleted meanwhile: what it had may go on under another one."""

    def __len__(self) -> int:
        return len(self._wanted)

    @property
    def keys(self) -> list[str]:
        """Return what is left."""
        return list(self._wanted)

    def add(self, pending: Pending) -> None:
        """Wait for this as well."""
        self._wanted[pending.key] = (pending.version, pending.upload_bytes)
        self._files += 1
        self._bytes += pending.upload_bytes
        self._bytes_left += pending.upload_bytes

    def note_uploaded(self, key: str, version: int, *, is_gone: bool) -> None:
        """Take in that this version of a key is in the bucket; `is_gone`: that it is deleted there."""
        found = self._wanted.get(key)
        if found is not None and version >= found[0]:
            self.drop(key)
            self.moved = self.moved or (is_gone and version > found[0])

    def note_failed(self, failure: Failure) -> None:
        """Take in that a key was tried, and cannot be uploaded until somebody does something about it."""
        if failure.key in self._wanted:
            self._failed[failure.key] = failure

    def drop(self, key: str) -> bool:
        """Wait for a key no more; return whether it was waited for."""
        found = self._wanted.pop(key, None)
        self._failed.pop(key, None)
        if found is not None:
            self._bytes_left -= found[1]
        return found is not None

    def is_hopeless(self, queue: UploadQueue) -> bool:
        """Return whether all that is left has failed, or waits for what has."""
        if not self._failed or len(self._failed) + queue.parked < len(self._wanted):
            return False
        return all(key in self._failed or queue.blocker(key) in self._failed for key in self._wanted)

    def progress(self) -> dict[str, int]:
        """Return how far it is; files under way count as a whole."""
        return {
            "flush_files_left": len(self._wanted),
            "flush_files": self._files,
            "flush_bytes_left": self._bytes_left,
            "flush_bytes": self._bytes,
        }

    def error(self, why: str, reason_of: Callable[[str], Failure | None], *, hint: str = "") -> UploadError:
        """Return the error that says what is left, and why: those keys first that have failed. `why` says what ended
        the waiting."""
        reasons = {key: self._failed.get(key) or reason_of(key) for key in self._wanted}
        failures = [found for found in reasons.values() if found is not None]
        first = sorted(reasons, key=lambda key: reasons[key] is None)[:_NAMED]
        named = [
            f"{key}: {found.reason if (found := reasons[key]) is not None else 'not uploaded yet'}" for key in first
        ]
        more = len(self._wanted) - len(named)
        text = "; ".join(named) + (f"; and {more:,} more" if more > 0 else "")
        hints = [found.hint for found in failures if found.hint]
        return UploadError(
            f"{len(self._wanted):,} of {self._files:,} files are not in the bucket ({why}): {text}",
            failures=failures,
            hint=hints[0] if hints else hint,
        )
