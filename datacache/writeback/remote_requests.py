"""Requests to the store that are under way: what this node does meanwhile, and whether the store can be reached.

Part of `RemoteView`. `request` is around a request, without the engine's lock; all else is called under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from datacache.core.errors import ObjectNotFoundError, StoreAccessError, StoreError, StoreUnavailableError
from datacache.store.bucket import Bucket
from datacache.writeback.remote_known import Changed, RemoteFile

_log = logging.getLogger("datacache.writeback")
_AWAY_S = 3.0
"""How long a store that could not be reached is not asked again where something older will do. Then one request finds
out whether it is back."""
_PATIENCE_S = 3.0
"""Patience with a store that says nothing, where something older will do."""
_IMPATIENCE_S = 0.25
"""Patience while it is away, of the one who finds out whether it is back."""
_TOLD_S = 60.0
"""How long it is told that the store does not answer while nobody asks it: it may have come back."""
_ASKING_S = 35.0
"""How long a request may take that finds out: longer than its own timeout."""


class Requests:
    """Those of one mount."""

    def __init__(self, bucket: Bucket, prefix: str, lock: threading.RLock) -> None:
        self._bucket, self._prefix, self._lock = bucket, prefix, lock
        self._events: deque[tuple[int, str, RemoteFile | None]] = deque()
        self._event = 0
        self._loading = 0
        self._away_until = self._away_since = 0.0
        self.away: StoreError | None = None
        """Why the store cannot be reached."""
        self._heard_at = 0.0
        """The time at which the store last said something: a part of a listing, an answer."""

    def begin(self) -> int:
        """A request begins: what `changes` is to be asked with. `end` has to follow."""
        self._loading += 1
        return self._event

    def end(self) -> None:
        """A request has ended."""
        self._loading -= 1
        if not self._loading:
            self._events.clear()

    def patiently(self, load: Callable[[], object]) -> None:
        """Make a request where something older will do. It goes on in a thread of its own when the store says nothing
        for `_PATIENCE_S`; the store is then away until it answers, so nobody waits for one that hangs. Called without
        the lock."""
        errors: list[BaseException] = []
        done = threading.Event()

        def work() -> None:
            try:
                load()
            except BaseException as exc:  # noqa: BLE001 - the caller's, if it still waits
                errors.append(exc)
            finally:
                done.set()

        with self._lock:
            patience_s = _PATIENCE_S if self.away is None else _IMPATIENCE_S
        began = _now()
        threading.Thread(target=work, name="asks the store", daemon=True).start()
        while (left_s := max(began, self._heard_at) + patience_s - _now()) > 0:
            if done.wait(left_s):
                if errors:
                    raise errors[0]
                return
        with self._lock:
            if done.is_set():
                return
            url = self._bucket.url
            self._found_away(self.away or StoreUnavailableError(f"{url} does not answer", url=url), _ASKING_S)

    def heard(self) -> None:
        """The store has said a part of an answer: it works on the request."""
        self._heard_at = _now()

    def note(self, key: str, file: RemoteFile | None) -> None:
        """This node has brought an object to the bucket, or deleted it (None)."""
        if self._loading:
            self._event += 1
            self._events.append((self._event, key, file))

    def changes(self, since: int) -> Iterator[Changed]:
        """What was noted since a request began, in order."""
        return ((key, file) for number, key, file in self._events if number > since)

    @contextmanager
    def request(self, known: bool = False, *, whole: bool = True) -> Iterator[int]:
        """Around a request: what happens meanwhile is remembered; a store that is away, or lets us in no more, is an
        error only where nothing older is known. Not `whole`: what is refused is one object."""
        with self._lock:
            since = self.begin()
        try:
            yield since
        except StoreError as exc:
            is_missing = isinstance(exc, ObjectNotFoundError) and exc.url == self._bucket.url
            refused = whole and (is_missing or isinstance(exc, StoreAccessError))
            if not refused and not isinstance(exc, StoreUnavailableError):
                raise
            with self._lock:
                self._found_away(exc, _AWAY_S)
            if not known:
                raise
        else:
            with self._lock:
                self.away = None
                self._heard_at = _now()
        finally:
            with self._lock:
                self.end()

    def is_away(self) -> bool:
        """Whether older knowledge has to do. Once in a while it says no to one caller, who finds out."""
        if self.away is None:
            return False
        if _now() < self._away_until:
            return True
        self._away_until = _now() + _ASKING_S  # the others use what is known until this one has an answer
        return False

    def problem(self) -> tuple[str, float]:
        """Return why the store does not answer, and for how many seconds it has not; '' while it does."""
        if not isinstance(self.away, StoreUnavailableError) or _now() > self._away_until + _TOLD_S:
            return "", 0.0
        return self.away.message, _now() - self._away_since

    def _found_away(self, error: StoreError, for_s: float) -> None:
        if self.away is None:
            self._away_since = _now()
            _log.warning("%s; what was known of the bucket is shown meanwhile", error.message)
        self.away, self._away_until = error, _now() + for_s

    def unavailable(self, key: str) -> StoreError:
        """The error for what is not known while the store is away."""
        kind = StoreAccessError if isinstance(self.away, StoreAccessError) else StoreUnavailableError
        why = self.away.message if self.away is not None else "the store is away"
        return kind(f"{key or '/'}: {why}", url=f"{self._bucket.url}/{self._prefix}{key}")


def _now() -> float:
    return time.monotonic()
