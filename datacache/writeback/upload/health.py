"""Whether the store is worth asking: one back-off for all uploads, not one for each of thousands of keys.

Part of the uploader, which guards it with its lock. While the store does not answer, one upload at a time is tried,
another one each time, at growing intervals with jitter; the first that gets through lets all others go on. (A key that
fails although others succeed is not told of here: the board has it back off alone.) While it refuses whatever is tried
(credentials that have expired), one at a time is tried as well, but soon after one another, since what it refuses may
be a few of many keys.
"""

from __future__ import annotations

import random

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
IN_A_ROW = 3
"""Uploads that fail one after the other, none succeeding in between, before it is taken to be the store."""
REFUSED_WAIT_S = 0.05


class StoreHealth:
    """What the last answers of a store say of it."""

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
        """Whether one upload at a time is tried."""
        return self._failed >= IN_A_ROW

    @property
    def away(self) -> bool:
        """Whether that is because it does not answer."""
        return self.limited and bool(self.reason)

    def wait_s(self, now: float) -> float | None:
        """How long to wait before something is tried: 0 for not at all, None until a try that is under way ends."""
        if not self.limited:
            return 0.0
        return None if self._probing else max(0.0, self._next_at - now)

    def begin(self) -> bool:
        """Something is tried now: whether it is the one try that others wait for."""
        self._probing = self.limited
        return self._probing

    def end(self) -> None:
        """The one try is over, however it went."""
        self._probing = False

    def answered(self) -> bool:
        """The store did what was asked: whether it did not answer before."""
        self._failed = 0
        self._wait_s = FIRST_WAIT_S
        back, self.reason = bool(self.reason), ""
        return back

    def unavailable(self, now: float, reason: str) -> bool:
        """It did not answer: whether that is new."""
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

    def refused(self, now: float) -> None:
        """It answered that it does not do this."""
        self._failed += 1
        self._next_at = now + REFUSED_WAIT_S
        self._wait_s = FIRST_WAIT_S
        self.reason = ""

    def wake(self) -> None:
        """Somebody waits: the next try is due now."""
        self._next_at = 0.0
        self._wait_s = FIRST_WAIT_S
