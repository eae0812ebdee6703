"""What the uploader has done, is doing, and could not do: numbers for status, and what goes into the log.

Part of the uploader, which guards it with its lock.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from datacache.core.errors import DatacacheError, StoreError
from datacache.writeback.model import Failure

_log = logging.getLogger("datacache.writeback")
_RATE_S = 10
_LISTED = 100
_TOLD = 1000


class Running:
    """One upload under way."""

    __slots__ = ("done_bytes", "key", "size_bytes")

    def __init__(self, key: str, size_bytes: int) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self.done_bytes = 0


class UploadReport:
    """Counters since the start, and the failures that are not mended."""

    def __init__(self) -> None:
        self.running: dict[str, Running] = {}
        self.failures: dict[str, Failure] = {}
        self.uploaded_files = 0
        self.uploaded_bytes = 0
        self._seconds: deque[list[float]] = deque()  # [second, bytes sent in it], the last few
        self._reasons: dict[str, str] = {}  # each reason once, in memory and in the log

    def sent(self, size_bytes: int, now: float) -> None:
        """Bytes have arrived in the bucket."""
        self.uploaded_bytes += size_bytes
        second = now // 1
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0])
            while self._seconds[0][0] < second - _RATE_S:
                self._seconds.popleft()
        self._seconds[-1][1] += size_bytes

    def bytes_per_s(self, now: float) -> float:
        """How fast they arrived in the last seconds."""
        return sum(size for second, size in self._seconds if second >= now // 1 - _RATE_S) / _RATE_S

    def succeeded(self, key: str) -> None:
        """A key is as it should be in the bucket."""
        self.uploaded_files += 1
        self.mended(key)

    def mended(self, key: str) -> None:
        """A key that may have failed has nothing to fail at any more."""
        if self.failures.pop(key, None) is not None and not self.failures:
            self._reasons.clear()  # the next failure is news again

    def failed(self, key: str, exc: Exception, retry_in_s: float) -> Failure:
        """A key could not be uploaded: its failure. Logged if the reason is new."""
        reason, hint = _reason(exc), exc.hint if isinstance(exc, DatacacheError) else ""
        known = self._reasons.get(reason)
        if known is None and len(self._reasons) < _TOLD:
            self._reasons[reason] = known = reason
            trace = None if isinstance(exc, DatacacheError) else exc
            _log.error("%s cannot be uploaded: %s%s", key, reason, f" ({hint})" if hint else "", exc_info=trace)
        before = self.failures.get(key)
        tries = before.tries + 1 if before is not None else 1
        now = time.time()
        found = self.failures[key] = Failure(key, known or reason, hint, tries, now, now + retry_in_s)
        return found

    def numbers(self, now: float) -> dict[str, Any]:
        """For status."""
        failures = list(self.failures.values())
        return {
            "uploading": [[each.key, each.done_bytes, each.size_bytes] for each in self.running.values()],
            "upload_bytes_per_s": self.bytes_per_s(now),
            "uploaded_files": self.uploaded_files,
            "uploaded_bytes": self.uploaded_bytes,
            "failed_files": len(failures),
            "failures": [failure._asdict() for failure in failures[:_LISTED]],
        }


def _reason(exc: Exception) -> str:
    """What an error says, without the name of what it says it of: thousands of keys fail for the same reason."""
    if not isinstance(exc, DatacacheError):
        return f"{type(exc).__name__}: {exc}"
    url = exc.url if isinstance(exc, StoreError) else ""
    return exc.message.removeprefix(f"{url}: ") if url else exc.message
