"""Remember that somebody does not answer, so that callers do not each wait to find out.

One `Breaker` stands for one server (a bucket's, a database, another node) and is shared by all threads that call it. It
remembers the failures since the last answer, nothing else, and forgets them all at the first answer:

- *No or few failures*: calls go through; who fails waits and tries again by itself.
- *Doubt*, from some failures in a row on: one call at a time is let through as the probe, after growing pauses. The
  others wait for it, each until its own deadline, and go when it was answered.
- *Silence*, once the failures go on for as long as a call's whole patience: who comes now is not made to wait that long
  again. Its call fails as soon as a probe failed that began after it came, or after `LATE_S`. So a server that is back
  is never refused from memory alone, unless it keeps even the probe waiting.

An error that is an answer ("not there", "not allowed") counts as one. Any thread; not for use across `fork()`: hold it
in a `PerProcess`.

Pauses between tries that grow while something keeps failing, however often it does. No state; any thread.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

E = TypeVar("E", bound=Exception)

DOUBT = 3
_SILENT_AFTER = 0.9
"""Of the patience: those who were the first to wait give up a little later, and who comes then is late already."""
LATE_S = 3.0
PAUSES_S = (0.1, 1.0)
"""The first and the longest pause between probes. This one is shorter than `LATE_S`: who comes late sees a probe
begin."""


class Breaker(Generic[E]):
    """See the module. `patience_s` is how long a call tries against a server that does not answer."""

    def __init__(
        self,
        patience_s: float,
        *,
        doubt: int = DOUBT,
        pauses_s: tuple[float, float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`doubt`: the failures from which on one call at a time is let through, after `pauses_s`, the first and the
        longest."""
        self._patience_s, self._doubt, self._pauses_s, self._clock, self._jitter = (
            patience_s,
            doubt,
            pauses_s,
            clock,
            jitter,
        )
        self._changed = threading.Condition()  # guards all below
        self._failures = 0
        self._first_at = 0.0
        self._failed_at = float("-inf")
        self._error: E | None = None
        self._probe: int | None = None
        """The thread whose call is let through."""
        self._probe_at = 0.0
        self._probe_began = self._failed_began = float("-inf")
        """Times at which the newest probe began, and the newest that failed."""

    @property
    def silent(self) -> bool:
        """Tell whether the server has not answered for as long as a call's patience."""
        with self._changed:
            return self._silent_locked()

    @property
    def error(self) -> E | None:
        """The newest failure; None if the last call was answered."""
        return self._error

    def silent_s(self) -> float:
        """Since when calls fail without an answer in between; 0 if the last one was answered."""
        with self._changed:
            return self._clock() - self._first_at if self._failures else 0.0

    def asked_s(self) -> float:
        """How long ago a call failed last; infinite if none has."""
        return self._clock() - self._failed_at

    def enter(self, came: float, give_up_at: float, *, late: bool) -> E | None:
        """Wait for the turn to call: None when it has come, else the last error, where there is no use in calling.
        After None, `answered` or `failed` must follow, from the same thread. `came` is when the call was asked for,
        `late` whether the server was silent when it first entered."""
        with self._changed:
            if late:
                give_up_at = min(give_up_at, self._clock() + LATE_S)
            while self._failures >= self._doubt:
                now = self._clock()
                if late and self._failed_began > came:
                    return self._error
                if self._probe is None and now >= self._probe_at:
                    self._probe, self._probe_began = threading.get_ident(), now
                    return None
                if now >= give_up_at:
                    return self._error
                until = give_up_at if self._probe is not None else min(give_up_at, self._probe_at)
                self._changed.wait(max(0.0, until - now))
            return None

    def answered(self) -> None:
        """The server answered a call: forget all failures."""
        if not self._failures and self._probe is None:  # almost always: without the lock
            return
        with self._changed:
            self._failures, self._error, self._probe = 0, None, None
            self._changed.notify_all()

    def failed(self, error: E) -> bool:
        """A call was not answered. Whether the next turn is to be waited for in `enter`; otherwise the caller waits as
        it likes."""
        with self._changed:
            if not self._failures:
                self._first_at = self._clock()
            self._failures += 1
            self._failed_at = self._clock()
            self._error = error
            if self._probe == threading.get_ident():
                self._probe = None
                self._failed_began = self._probe_began
                self._pause_locked()
                self._changed.notify_all()
            elif self._failures == self._doubt:
                self._pause_locked()
            return self._failures >= self._doubt

    def _silent_locked(self) -> bool:
        return self._failures >= self._doubt and self._clock() - self._first_at > _SILENT_AFTER * self._patience_s

    def _pause_locked(self) -> None:
        first_s, longest_s = self._pauses_s
        longest = pause_s(self._failures - self._doubt + 1, first_s=first_s, longest_s=longest_s)
        self._probe_at = self._clock() + longest * (0.5 + self._jitter() / 2)


_MOST_DOUBLINGS = 64
"""More make no difference to a pause, and from 1,024 on 2**n fits into no float."""


def pause_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """The pause after so many failures in a row: none without one, `first_s` after the first, twice as long after each
    further one, `longest_s` at most.
    """
    if failures < 1:
        return 0.0
    return min(first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest_s)
