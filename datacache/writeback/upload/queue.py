"""When which key is due for uploading, and which wait for others.

Part of the uploader, which guards it with its lock; no I/O, no clock of its own. Times are seconds of the uploader's
clock. A key is in one place at a time: queued (with the time it is due), active (a thread is at it) or parked (until
another key is done). A key costs a tuple in a heap and an entry of a dict, some 140 bytes besides its text.

What a flush waits for: some keys, each in a version, until they are in the bucket or cannot get there.

Part of the uploader, which guards it with its lock and tells it what becomes of each key.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable

from datacache.core.errors import UploadError
from datacache.writeback.model import Failure, Pending


class UploadQueue:
    """Keys by the time they are due: `delay_s` after their last change, but `every_s` after the first one at the
    latest."""

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
        self.hurry = False
        """Whether keys are due as soon as they change."""

    def __len__(self) -> int:
        return len(self._due)

    @property
    def parked(self) -> int:
        """How many wait for others."""
        return len(self._parked_on)

    def changed(self, key: str, now: float) -> bool:
        """A key is pending, or has changed again: whether it is due before all that were queued."""
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

    def soon(self, key: str, now: float) -> bool:
        """A key is due at once, whatever it waited for: whether it is due before all that were queued."""
        if key in self._active:
            self._again.add(key)
            return False
        if key in self._parked_on or self._due.get(key, now + 1) <= now:
            return False
        self._forget(key)
        return self._push(key, now)

    def retry(self, key: str, due: float) -> None:
        """A key that was active is due again later, and no sooner however it changes."""
        self._active.discard(key)
        self._again.discard(key)
        self._retries.add(key)
        self._push(key, due)

    def when_quiet(self, key: str, now: float, wait_s: float) -> None:
        """A key that was active is due when it has not changed for a while, but in `wait_s` at the latest."""
        self.retry(key, now + wait_s)
        self._first[key] = now + wait_s - self._every_s

    def pop(self, now: float) -> str | None:
        """A key that is due, which is active from now on."""
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
            del self._due[key]
            self._forget(key)
            self._active.add(key)
            return key
        return None

    def pop_any(self, now: float) -> str | None:
        """As `pop`, but one that has not failed yet comes first, whichever: another one each time."""
        new = [key for due, key in self._heap if due <= now and self._due.get(key) == due and key not in self._retries]
        if not new:
            return self.pop(now)
        key = random.choice(new)
        del self._due[key]
        self._forget(key)
        self._active.add(key)
        return key

    def next_due(self) -> float | None:
        """When the next key is due."""
        return self._heap[0][0] if self._heap else None

    def done(self, key: str, now: float) -> bool:
        """A key is not active any more. Queued again if it has changed meanwhile; who waited for it is due: whether
        anything is due before all that were queued."""
        self._active.discard(key)
        earlier = False
        if key in self._again:
            self._again.discard(key)
            earlier = self.changed(key, now)
        for waiting in self._parked.pop(key, ()):
            del self._parked_on[waiting]
            earlier = self._push(waiting, now) or earlier
        return earlier

    def park(self, key: str, blocker: str) -> bool:
        """An active key waits until another one is done. False, and nothing is changed, if that one waits for this."""
        found: str | None = blocker
        while found is not None:
            if found == key:
                return False
            found = self._parked_on.get(found)
        self._active.discard(key)
        self._again.discard(key)
        self._parked_on[key] = blocker
        self._parked.setdefault(blocker, []).append(key)
        return True

    def blocker(self, key: str) -> str:
        """The key that a key waits for in the end: itself if it waits for none."""
        return self.chain(key)[-1]

    def chain(self, key: str) -> list[str]:
        """A key, the one that it waits for, the one that that one waits for, and so on."""
        found = [key]
        while found[-1] in self._parked_on:
            found.append(self._parked_on[found[-1]])
        return found

    def hasten(self, now: float, keys: Iterable[str] = (), *, retries: bool = False) -> None:
        """All that is queued is due now, and `keys` as well; what failed only with `retries`."""
        wanted = dict.fromkeys(self._due, now) if retries else {}
        if not retries:
            wanted = {key: due if key in self._retries else now for key, due in self._due.items()}
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

    def _push(self, key: str, due: float) -> bool:
        earlier = not self._heap or due < self._heap[0][0]
        self._due[key] = due
        heapq.heappush(self._heap, (due, key))
        return earlier

    def _forget(self, key: str) -> None:
        self._first.pop(key, None)
        self._last.pop(key, None)
        self._retries.discard(key)


_NAMED = 5
"""Keys that an error names."""


class Wait:
    """Keys that somebody waits for."""

    def __init__(self, pendings: list[Pending]) -> None:
        self._wanted = {pending.key: (pending.version, pending.upload_bytes) for pending in pendings}
        self._failed: dict[str, Failure] = {}  # tried since, and failed in a way that waiting does not mend
        self._files = len(self._wanted)
        self._bytes = self._bytes_left = sum(size for _, size in self._wanted.values())
        self.moved = False
        """Whether a key was deleted meanwhile: what it had may go on under another one."""

    def __bool__(self) -> bool:
        """Whether there is anything left."""
        return bool(self._wanted)

    @property
    def keys(self) -> list[str]:
        """What is left."""
        return list(self._wanted)

    @property
    def count(self) -> int:
        """How many are left."""
        return len(self._wanted)

    def add(self, pending: Pending) -> None:
        """Wait for this as well."""
        self._wanted[pending.key] = (pending.version, pending.upload_bytes)
        self._files += 1
        self._bytes += pending.upload_bytes
        self._bytes_left += pending.upload_bytes

    def uploaded(self, key: str, version: int, *, is_gone: bool) -> None:
        """This version of a key is in the bucket; `is_gone`: it is deleted there."""
        found = self._wanted.get(key)
        if found is not None and version >= found[0]:
            self.drop(key)
            self.moved = self.moved or (is_gone and version > found[0])

    def drop(self, key: str) -> bool:
        """A key is not waited for any more: whether it was."""
        found = self._wanted.pop(key, None)
        self._failed.pop(key, None)
        if found is not None:
            self._bytes_left -= found[1]
        return found is not None

    def failed(self, failure: Failure) -> None:
        """A key was tried, and cannot be uploaded until somebody does something about it."""
        if failure.key in self._wanted:
            self._failed[failure.key] = failure

    def is_hopeless(self, blocker: Callable[[str], str], parked: int) -> bool:
        """Whether all that is left has failed, or waits for what has. `blocker` tells what a key waits for, `parked`
        how many keys wait for others."""
        if not self._failed or len(self._failed) + parked < len(self._wanted):
            return False
        return all(key in self._failed or blocker(key) in self._failed for key in self._wanted)

    def progress(self) -> dict[str, int]:
        """How far it is; files under way count as a whole."""
        return {
            "flush_files_left": len(self._wanted),
            "flush_files": self._files,
            "flush_bytes_left": self._bytes_left,
            "flush_bytes": self._bytes,
        }

    def error(self, why: str, reason_of: Callable[[str], Failure | None], *, hint: str = "") -> UploadError:
        """What is left, and why: those keys first that have failed. `why` says what ended the waiting."""
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
