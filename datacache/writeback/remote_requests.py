"""Requests to the store that are under way: what this node does meanwhile, and whether the store can be reached.

Part of `RemoteView`. `request` is around a request, without the engine's lock; all else is called under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from datacache.core.errors import ObjectNotFoundError, StoreAccessError, StoreError, StoreUnavailableError
from datacache.store.bucket import Bucket
from datacache.writeback.remote_known import Changed, RemoteFile

_log = logging.getLogger("datacache.writeback")
_AWAY_S = 3.0
"""How long a store that could not be reached is not asked again where something older will do. Then one request finds
out whether it is back."""
_ASKING_S = 35.0
"""How long a request may take that finds out: longer than its own timeout."""


class Requests:
    """Those of one mount."""

    def __init__(self, bucket: Bucket, prefix: str, lock: threading.RLock) -> None:
        self._bucket, self._prefix, self._lock = bucket, prefix, lock
        self._events: deque[tuple[int, str, RemoteFile | None]] = deque()
        self._event = 0
        self._loading = 0
        self._away_until = 0.0
        self.away: StoreError | None = None
        """Why the store cannot be reached."""

    def begin(self) -> int:
        """A request begins: what `changes` is to be asked with. `end` has to follow."""
        self._loading += 1
        return self._event

    def end(self) -> None:
        """A request has ended."""
        self._loading -= 1
        if not self._loading:
            self._events.clear()

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
                if self.away is None:
                    _log.warning("%s; what was known of the bucket is shown meanwhile", exc.message)
                self.away, self._away_until = exc, _now() + _AWAY_S
            if not known:
                raise
        else:
            with self._lock:
                self.away = None
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

    def unavailable(self, key: str) -> StoreError:
        """The error for what is not known while the store is away."""
        kind = StoreAccessError if isinstance(self.away, StoreAccessError) else StoreUnavailableError
        why = self.away.message if self.away is not None else "the store is away"
        return kind(f"{key or '/'}: {why}", url=f"{self._bucket.url}/{self._prefix}{key}")


def _now() -> float:
    return time.monotonic()
