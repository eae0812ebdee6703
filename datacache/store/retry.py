"""When a store that does not answer is asked again: one policy for single calls and for whole stores.

`StoreUnavailableError` is worth another try until a deadline, `ChecksumError` is worth a few; everything else is an
answer. The waits grow exponentially with full jitter
(https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/), so that the clients of a node that lost its
store do not come back in step, and end at a deadline. Backends never retry, so tries are not multiplied.

An address where nobody was ever met is more likely mistyped than down: calls that are refused there, or whose host has
no address, end after `UNREACHED_S`. A store that was met once is waited for until the deadline. A home remembers those
(`MetAddresses`), so a daemon or a worker that starts while a store is away knows that it was there before. Any thread;
a forked child knows what its parent did.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, TypeVar

from datacache.core.breaker import Breaker
from datacache.core.concurrency import PerProcess
from datacache.core.errors import ChecksumError, ObjectNotFoundError, StoreUnavailableError, StoreUnreachableError
from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.checksums import Checksum
from datacache.store.errors import GONE_HINT

T = TypeVar("T")
Sleep = Callable[[float], None]

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 5.0
UNREACHED_S = 3.0
"""Time for which a call is tried against an address where nobody was ever met."""
_ASKED_LATELY_S = 60.0
TELL_AFTER_S = 2.0
"""The log names a store that has not answered for so long: users want to know what they wait for."""
DAMAGED_AGAIN = 3
"""So often an object that came with wrong bytes is asked for again."""
_LAST_CHANCE_S = 5.0
"""The least time for which a call is tried again that was asked for long ago and waited for its turn since."""
_log = logging.getLogger(__name__)
_asked_at: ContextVar[AskedAt | None] = ContextVar("asked_at", default=None)


class AskedAt:
    """Have the deadline of the calls within counted from when they were asked for (`time.monotonic()`). With `within_s`
    they and their requests end so long after this began, at the latest. A class, as `contextlib` takes twice as long
    and every get does this."""

    __slots__ = ("_token", "end_at", "when")

    def __init__(self, when: float, within_s: float = math.inf) -> None:
        self.when, self.end_at = when, time.monotonic() + within_s

    def __enter__(self) -> None:
        self._token = _asked_at.set(self)

    def __exit__(self, *_: object) -> None:
        _asked_at.reset(self._token)


def request_s(timeout_s: float) -> float:
    """Return how long a request may take that has `timeout_s`, and for which there may be less time left (`AskedAt`).
    Never 0."""
    asked = _asked_at.get()
    return timeout_s if asked is None else min(timeout_s, max(0.001, asked.end_at - time.monotonic()))


class Backoff:
    """The waits between the tries of one call. When it takes longer than `TELL_AFTER_S`, `tell` is called, once, with
    the error and the seconds that are left. With `reached` the waits after a `StoreUnreachableError` end after
    `UNREACHED_S` as long as `reached()` is false."""

    def __init__(
        self,
        deadline_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        tell: Callable[[StoreUnavailableError, float], None] | None = None,
        reached: Callable[[], bool] = lambda: True,
        began: float | None = None,
    ) -> None:
        """`began`: when the call was first tried, if not now."""
        self._clock = clock
        self._reached = reached
        self._jitter = jitter
        self._tell = tell
        now = clock() if began is None else began
        self._tell_at = now + TELL_AFTER_S
        self._deadline = now + deadline_s
        self._early_deadline = now + min(deadline_s, UNREACHED_S)
        self._longest = FIRST_WAIT_S

    def deadline(self, error: StoreUnavailableError | None) -> float:
        """Return when a call that failed with `error` is given up."""
        early = isinstance(error, StoreUnreachableError) and not self._reached()
        return self._early_deadline if early else self._deadline

    def wait_s(self, error: StoreUnavailableError) -> float:
        """Return how long to wait after `error`, to the deadline at most; raises it when that is over."""
        now, deadline = self._clock(), self.deadline(error)
        if now >= deadline:
            raise error
        # The last try comes right at the deadline: a store that came back just before it is not missed.
        wait = min(self._longest * self._jitter(), deadline - now)
        self._longest = min(LONGEST_WAIT_S, 2 * self._longest)
        after = now + wait
        if self._tell is not None and after >= self._tell_at:
            self._tell(error, deadline - self._clock())
            self._tell = None
        return wait


def retry(
    call: Callable[[], T],
    deadline_s: float,
    *,
    sleep: Sleep = time.sleep,
    tell: Callable[[StoreUnavailableError, float], None] | None = None,
) -> T:
    """Repeat `call()` until it gives something else than `StoreUnavailableError`; after `deadline_s` that error
    itself. `tell` as for `Backoff`."""
    backoff = Backoff(deadline_s, tell=tell)
    while True:
        try:
            return call()
        except StoreUnavailableError as exc:
            sleep(backoff.wait_s(exc))


class _Attempt:
    """A call and its repetitions until a deadline."""

    def __init__(
        self,
        url: str,
        breaker: Breaker[StoreUnavailableError],
        backoff: Backoff,
        came: float,
        sleep: Sleep,
        *,
        late: bool,
    ) -> None:
        """`late`: the store was silent when the call came."""
        self._url, self._breaker, self._backoff, self._came, self._sleep = url, breaker, backoff, came, sleep
        self._late = late

    def wait_for_turn(self) -> None:
        """Return when the store is to be asked. `StoreUnavailableError` where it has not answered others for long."""
        error: StoreUnavailableError | None = self._breaker.error
        while True:
            end = self._backoff.deadline(error)
            error = self._breaker.enter(self._came, end, late=self._late)
            # What fails otherwise by now, or was met meanwhile, has longer.
            if error is None or self._late or self._backoff.deadline(error) <= end:
                break
        if error is not None:
            since_s = self._breaker.silent_s()
            raise type(error)(
                f"{self._url} has not answered for {since_s:.0f} s; last: {error.message}",
                url=self._url,
                hint=error.hint,
            ) from error

    def failed(self, exc: StoreUnavailableError, *, again: bool = True) -> None:
        """Return when the call is to be made again; otherwise raise its error."""
        in_doubt = self._breaker.failed(exc)
        if self._late or not again:
            raise exc
        wait_s = self._backoff.wait_s(exc)
        if not in_doubt:
            self._sleep(wait_s)


class Silence(NamedTuple):
    """A store that does not answer."""

    url: str
    silent_s: float
    problem: str


class RetryingStore:
    """A store that retries another one. Every operation is safe to repeat, writes included (whole objects
    only). An outage is logged, once for all calls that wait for its end, and remembered (`core.breaker`): one of them
    asks, the others wait for that, and calls that come when it has lasted for the whole deadline fail soon."""

    def __init__(
        self,
        store: ObjectStore,
        deadline_s: float,
        *,
        address: Callable[[], str] | None = None,
        met: MetAddresses | None = None,
        sleep: Sleep = time.sleep,
    ) -> None:
        """`address` names whom the store's calls meet (its URL, unless one URL means several servers); asked for once.
        `met` knows the addresses met before; without it every store is waited for as if it had been."""
        self.inner = store
        self._address = functools.cache(address or (lambda: store.url))
        self._addresses = met
        self._met = met is None
        self.url = store.url
        self.node_wide = store.node_wide
        self.sorted_listing = store.sorted_listing
        self._deadline_s = deadline_s
        self._sleep = sleep
        self._breaker: PerProcess[Breaker[StoreUnavailableError]] = PerProcess(lambda: Breaker(deadline_s))
        self._told = False  # of the outage under way; two threads at the same moment may both tell

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """Yield pages; a listing that breaks goes on after the last key it gave, with a new deadline.

        An unsorted one cannot go on, so it is tried again only while it has given nothing.
        """
        breaker = self._breaker.get()
        attempt: _Attempt | None = None
        given = False
        while True:
            attempt = attempt or self._attempt()
            attempt.wait_for_turn()
            try:
                for page in self.inner.list(prefix, start_after=start_after):
                    self._answered(breaker)
                    attempt = None
                    self._told = False
                    yield page
                    given = True
                    if self.sorted_listing:
                        start_after = page[-1].key
                self._answered(breaker)
                return
            except StoreUnavailableError as exc:
                attempt = attempt or self._attempt()
                self._note_failure(exc)
                attempt.failed(exc, again=self.sorted_listing or not given)
            except BaseException:
                self._answered(breaker)
                raise

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._retry(lambda: self.inner.head(key))

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes | memoryview:
        """See `ObjectStore`."""
        damaged = 0
        while True:
            try:
                return self._retry(lambda: self.inner.read(ref, start, stop))
            except ObjectNotFoundError as exc:  # what is read was listed: it was there
                exc.hint = exc.hint or GONE_HINT
                raise
            except ChecksumError as exc:  # it may have happened on the way
                damaged += 1
                _log.warning("%s (%d of %d)", exc.message, damaged, 1 + DAMAGED_AGAIN)
                if damaged > DAMAGED_AGAIN:
                    raise
                self._sleep(FIRST_WAIT_S)

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        """See `ObjectStore`."""
        return self._retry(lambda: self.inner.checksum(ref))

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
        breaker, began = self._breaker.get(), time.monotonic()
        # Almost every call is answered at once, where the last one was: that one needs no deadline and no waits.
        attempt = None if breaker.error is None else self._attempt()
        while True:
            if attempt is not None:
                attempt.wait_for_turn()
            try:
                result = call()
            except StoreUnavailableError as exc:
                self._note_failure(exc)
                attempt = attempt or self._attempt(began)
                attempt.failed(exc)
            except BaseException:
                self._answered(breaker)
                raise
            else:
                self._answered(breaker)
                self._told = False
                return result

    def _attempt(self, began: float | None = None) -> _Attempt:
        """Return the attempt of a call that comes now, or `began` while the store answered."""
        now = time.monotonic() if began is None else began
        asked = _asked_at.get()
        came, end_at = (asked.when, asked.end_at) if asked is not None else (now, math.inf)
        left_s = min(self._deadline_s, max(came + self._deadline_s - now, _LAST_CHANCE_S), end_at - now)
        backoff = Backoff(left_s, tell=self._tell, reached=self._reached, began=now)
        breaker = self._breaker.get()
        return _Attempt(self.url, breaker, backoff, came, self._sleep, late=began is None and breaker.silent)

    def _answered(self, breaker: Breaker[StoreUnavailableError]) -> None:
        if not self._met:
            self._note_met()
        breaker.answered()

    def _note_failure(self, exc: StoreUnavailableError) -> None:
        if not self._met and not isinstance(exc, StoreUnreachableError):
            self._note_met()  # somebody is there, even if only to break off

    def _note_met(self) -> None:
        if self._addresses is not None:
            self._addresses.note(self._address())
        self._met = True

    def _reached(self) -> bool:
        return self._met or self._addresses is None or self._addresses.knows(self._address())

    def silence(self) -> Silence | None:
        """Return since when calls are not answered, and why; None if the last one was, or was made long ago."""
        breaker = self._breaker.get()
        error = breaker.error
        if error is None or breaker.asked_s() > _ASKED_LATELY_S:
            return None
        return Silence(self.url, breaker.silent_s(), error.message)

    def _tell(self, error: StoreUnavailableError, left_s: float) -> None:
        if not self._told:
            self._told = True
            _log.warning("%s; it is asked again for %.0f s", error.message, left_s)

    def close(self) -> None:
        """See `ObjectStore`."""
        self.inner.close()


class MetAddresses:
    """Addresses where somebody was met by this object or, with `home`, by any process of that home: empty files named
    by hashes. A home that cannot be written, or is not there, remembers nothing."""

    def __init__(self, home: Path | None = None) -> None:
        self._folder = None if home is None else home / "met"
        self._known: set[str] = set()  # single set operations

    def note(self, address: str) -> None:
        """Remember an address."""
        if address in self._known:
            return
        self._known.add(address)
        if self._folder is not None:
            with suppress(OSError):
                self._folder.mkdir(mode=0o700, exist_ok=True)
                os.close(os.open(self._file(self._folder, address), os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600))

    def knows(self, address: str) -> bool:
        """Say whether somebody was met at an address before."""
        if address in self._known or self._folder is None:
            return address in self._known
        return os.path.exists(self._file(self._folder, address))

    @staticmethod
    def _file(folder: Path, address: str) -> Path:
        return folder / hashlib.sha256(address.encode(errors="surrogatepass")).hexdigest()[:32]
