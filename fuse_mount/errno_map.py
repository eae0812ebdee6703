"""The only table from errors to errnos, and the log of the failures readers got to see.

Used by `worker` and `pyfuse3_adapter`. Who is behind a mount sees nothing but an errno, so each failure is also logged
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
from dataclasses import asdict, dataclass, replace
from typing import Any

from datacache.core.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    PathNotFoundError,
    QuotaError,
    StagingFullError,
    StoreAccessError,
)

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
    """The errno a reader gets for this error."""
    return next((number for kind, number in _TABLE if isinstance(exc, kind)), errno.EIO)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error that a reader or writer of a mount got."""

    path: str
    """Below the mount point; '' where it was no one file's."""
    reason: str
    hint: str
    """Advice what to do about it; may be empty."""
    errno: str
    """Its name, as ESTALE."""
    at: float
    """The time when it happened last, in seconds since the epoch."""
    count: int = 1
    """The number of times, as far as it was told: the same one counts once in a minute."""

    def to_dict(self) -> dict[str, Any]:
        """Values that fit into JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Failure:
        """The value that `to_dict` took apart. What a newer version added is passed over."""
        return Failure(**{name: value for name, value in values.items() if name in Failure.__dataclass_fields__})

    @staticmethod
    def of(path: str, exc: BaseException, number: int | None = None, hint: str | None = None) -> Failure:
        """Return what to tell of an error. `number` is the errno that was given where it is not the table's, `hint`
        what to say in place of the error's own.
        """
        number = errno_of(exc) if number is None else number
        return Failure(
            path=path,
            reason=f"{type(exc).__name__}: {exc}"[:_MOST_REASON],
            hint=str(getattr(exc, "hint", "") if hint is None else hint)[:_MOST_REASON],
            errno=errno.errorcode.get(number, str(number)),
            at=time.time(),
        )


_MOST_REASON = 500
MOST_FAILURES = 10
"""Of one mount, that are told."""


def with_failure(known: tuple[Failure, ...], new: Failure) -> tuple[Failure, ...]:
    """The last failures with one more, the newest first: of each path and reason the last one, with its count."""
    same = [old for old in known if (old.path, old.reason) == (new.path, new.reason)]
    others = [old for old in known if (old.path, old.reason) != (new.path, new.reason)]
    counted = replace(new, count=new.count + sum(old.count for old in same))
    return (counted, *others)[:MOST_FAILURES]


class FailureLog:
    """Logs each (path, reason) once in `quiet_s`, at most `burst` lines a second; counts the others.

    What is logged is also given to `note`, from whatever thread reports it.
    """

    def __init__(
        self,
        *,
        quiet_s: float = 60.0,
        burst: int = 20,
        remembered: int = 1024,
        prefix: str = "",
        note: Callable[[Failure], None] | None = None,
    ) -> None:
        self._prefix = prefix
        self._note = note
        self._quiet_s = quiet_s
        self._burst = burst
        self._remembered = remembered
        self._lock = threading.Lock()  # guards all below
        self._seen: dict[tuple[str, str], float] = {}
        self._second = 0
        self._lines = 0
        self._left_out = 0

    def report(self, path: str, exc: BaseException, number: int | None = None, hint: str | None = None) -> bool:
        """Log the failure unless it was logged just now. True if a line was written. `number` and `hint` as in
        `Failure.of`."""
        now = time.monotonic()
        key = (path, f"{type(exc).__name__}: {exc}")
        with self._lock:
            if now - self._seen.get(key, -self._quiet_s) < self._quiet_s:
                return False
            if int(now) != self._second:
                self._second, self._lines = int(now), 0
            self._lines += 1
            if self._lines > self._burst:
                self._left_out += 1
                return False
            if len(self._seen) >= self._remembered:
                self._seen.clear()
            self._seen[key] = now
            left_out, self._left_out = self._left_out, 0
        more = f" ({left_out} other failures were not logged)" if left_out else ""
        told = {"errno": errno_of(exc) if number is None else number, "about": self._prefix}
        _log.error("%s%s: %s%s", self._prefix, path, key[1], more, extra=told)
        if self._note is not None:
            self._note(Failure.of(path, exc, number, hint))
        return True
