"""What a flush waits for: some keys, each in a version, until they are in the bucket or cannot get there.

Part of the uploader, which guards it with its lock and tells it what becomes of each key.
"""

from __future__ import annotations

from collections.abc import Callable

from datacache.core.errors import UploadError
from datacache.writeback.model import Failure, Pending

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
