"""When a store that does not answer is asked again: one policy for single calls and for whole stores.

Only `StoreUnavailableError` is worth a second try; everything else is an answer. The waits grow
exponentially with full jitter (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/),
so that the clients of a node that lost its store do not come back in step, and end at a deadline. Backends
never retry, so tries are not multiplied.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from datacache.core.errors import StoreUnavailableError
from datacache.core.objects import ObjectRef
from datacache.store.base import ObjectInfo, ObjectStore

T = TypeVar("T")

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 5.0
TELL_AFTER_S = 2.0
"""A store that does not answer for so long is told about: who waits wants to know what for."""
_log = logging.getLogger(__name__)


class Backoff:
    """The waits between the tries of one call. When it takes longer than `TELL_AFTER_S`, `tell` is called, once, with
    the error and the seconds that are left."""

    def __init__(
        self,
        deadline_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        tell: Callable[[StoreUnavailableError, float], None] | None = None,
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._tell = tell
        self._tell_at = clock() + TELL_AFTER_S
        self._deadline = clock() + deadline_s
        self._longest = FIRST_WAIT_S

    def wait_s(self, error: StoreUnavailableError) -> float:
        """How long to wait after `error`, to the deadline at most; raises it when that is over."""
        now = self._clock()
        if now >= self._deadline:
            raise error
        # The last try comes right at the deadline: a store that came back just before it is not missed.
        wait = min(self._longest * self._jitter(), self._deadline - now)
        self._longest = min(LONGEST_WAIT_S, 2 * self._longest)
        after = now + wait
        if self._tell is not None and after >= self._tell_at:
            self._tell(error, self._deadline - self._clock())
            self._tell = None
        return wait


def retry(
    call: Callable[[], T],
    deadline_s: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
    tell: Callable[[StoreUnavailableError, float], None] | None = None,
) -> T:
    """`call()` until it gives something else than `StoreUnavailableError`; after `deadline_s` that error
    itself. `tell` as for `Backoff`."""
    backoff = Backoff(deadline_s, tell=tell)
    while True:
        try:
            return call()
        except StoreUnavailableError as exc:
            sleep(backoff.wait_s(exc))


class RetryingStore:
    """A store that retries another one. Every operation is safe to repeat, writes included (whole objects
    only). An outage is logged, once for all calls that wait for its end."""

    def __init__(self, store: ObjectStore, deadline_s: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.inner = store
        self.url = store.url
        self.node_wide = store.node_wide
        self.sorted_listing = store.sorted_listing
        self._deadline_s = deadline_s
        self._sleep = sleep
        self._told = False  # of the outage under way; two threads at the same moment may both tell

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """Pages; a listing that breaks goes on after the last key it gave, with a new deadline.

        An unsorted one cannot go on, so it is tried again only while it has given nothing.
        """
        backoff: Backoff | None = None
        given = False
        while True:
            try:
                for page in self.inner.list(prefix, start_after=start_after):
                    backoff = None
                    self._told = False
                    yield page
                    given = True
                    if self.sorted_listing:
                        start_after = page[-1].key
                return
            except StoreUnavailableError as exc:
                if given and not self.sorted_listing:
                    raise
                backoff = backoff or Backoff(self._deadline_s, tell=self._tell)
                self._sleep(backoff.wait_s(exc))

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._retry(lambda: self.inner.head(key))

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes | memoryview:
        """See `ObjectStore`."""
        return self._retry(lambda: self.inner.read(ref, start, stop))

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._retry(lambda: self.inner.put(key, data))

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._retry(lambda: self.inner.put_file(key, path))

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        self._retry(lambda: self.inner.delete(key))

    def _retry(self, call: Callable[[], T]) -> T:
        result = retry(call, self._deadline_s, sleep=self._sleep, tell=self._tell)
        self._told = False
        return result

    def _tell(self, error: StoreUnavailableError, left_s: float) -> None:
        if not self._told:
            self._told = True
            _log.warning("%s; it is asked again for %.0f s", error.message, left_s)

    def close(self) -> None:
        """See `ObjectStore`."""
        self.inner.close()
