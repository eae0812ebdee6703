"""The only table from errors to errnos, and the log of the failures readers got to see.

Used by `worker` and `bucket/refusals`. Who is behind a mount sees nothing but an errno, so each failure is also logged
once with the path and the reason. Any thread may call.

| error | errno | why |
|---|---|---|
| `PathNotFoundError` | ENOENT | there is no such file |
| `ObjectChangedError` | ESTALE | the bucket holds another object than the snapshot recorded |
| `ObjectNotFoundError` | ESTALE | the snapshot has it, the bucket lost it: the name is not wrong |
| `StoreAccessError` | EACCES | credentials |
| `StagingFullError` | ENOSPC | there was no room for a write in the staging area, and none came in time |
| `QuotaError` | ENOSPC | of a gathered write that failed close(2) tells ENOSPC, and makes EIO of EDQUOT |
| everything else, `StoreUnavailableError` and `DaemonUnavailableError` included | EIO | |
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable

from datacache.core.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    PathNotFoundError,
    QuotaError,
    StagingFullError,
    StoreAccessError,
)
from fuse_mount.lifecycle.state import Failure

_log = logging.getLogger("fuse_mount")

_TABLE: tuple[tuple[type[BaseException], int], ...] = (
    (PathNotFoundError, errno.ENOENT),
    (ObjectChangedError, errno.ESTALE),
    (ObjectNotFoundError, errno.ESTALE),
    (StoreAccessError, errno.EACCES),
    (StagingFullError, errno.ENOSPC),
    (QuotaError, errno.ENOSPC),
)


def errno_of(exc: BaseException) -> int:
    """Return the errno that a reader gets for this error."""
    return next((number for kind, number in _TABLE if isinstance(exc, kind)), errno.EIO)


_MOST_REASON = 500
_QUIET_S = 60.0
_REMEMBERED = 1024


class FailureLog:
    """Logs each (path, reason) once a minute, at most `burst` lines a second; counts the others.

    What is logged is also given to `note`, from whatever thread reports it."""

    def __init__(self, *, burst: int = 20, prefix: str = "", note: Callable[[Failure], None] | None = None) -> None:
        self._prefix, self._note, self._burst = prefix, note, burst
        self._lock = threading.Lock()  # guards all below
        self._seen: dict[tuple[str, str], float] = {}
        self._second = 0
        self._lines = 0
        self._left_out = 0

    def report(self, path: str, exc: BaseException, number: int | None = None, hint: str | None = None) -> bool:
        """Log the failure unless it was logged just now. True if a line was written. `number` is the errno that was
        given where it is not the table's, `hint` what to say in place of the error's own."""
        now = time.monotonic()
        key = (path, f"{type(exc).__name__}: {exc}")
        with self._lock:
            if now - self._seen.get(key, -_QUIET_S) < _QUIET_S:
                return False
            if int(now) != self._second:
                self._second, self._lines = int(now), 0
            self._lines += 1
            if self._lines > self._burst:
                self._left_out += 1
                return False
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            self._seen[key] = now
            left_out, self._left_out = self._left_out, 0
        more = f" ({left_out} other failures were not logged)" if left_out else ""
        number = errno_of(exc) if number is None else number
        extra = {"errno": number, "about": self._prefix}
        _log.error("%s%s: %s%s", self._prefix, path, key[1], more, extra=extra)
        if self._note is not None:
            self._note(
                Failure(
                    path=path,
                    reason=key[1][:_MOST_REASON],
                    hint=str(getattr(exc, "hint", "") if hint is None else hint)[:_MOST_REASON],
                    errno=errno.errorcode.get(number, str(number)),
                    at=time.time(),
                )
            )
        return True
