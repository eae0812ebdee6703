"""One large file on its way to the bucket in parts, sent by as many threads as have nothing else to do.

Part of the uploader: the thread that has claimed the key calls `run`, others join in with `help`. A part is read while
it is sent; what was written to the file meanwhile tears the whole upload.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from datacache.core.errors import StagingError
from datacache.store.bucket import Bucket, Part

_MIB = 2**20


class Reader(Protocol):
    """Where the bytes come from; safe from several threads."""

    size_bytes: int

    def read_into(self, buffer: memoryview, start: int) -> int:
        """Fill a buffer with the bytes from `start` on: how many there were, fewer if the file was cut off."""
        ...


class Torn(Protocol):
    """Tells when bytes are not those any more that the upload is of."""

    torn: bool


class _TornError(Exception):
    """The bytes are not those any more that the upload is of."""


class _Section:
    """A part of a file, as a body. No byte of another version is ever sent: the store would list the part, and who
    goes on with the upload after a crash would take it for one of its own."""

    def __init__(self, reader: Reader, claim: Torn, start: int, stop: int) -> None:
        self._reader, self._claim, self._start, self._stop = reader, claim, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def read_into(self, buffer: memoryview, start: int) -> None:
        try:
            count = self._reader.read_into(buffer, self._start + start)
        except OSError as exc:
            raise StagingError(
                f"a staged file cannot be read: {exc.strerror or exc}", hint="See to the staging area's file system."
            ) from exc
        if count != len(buffer):  # it has become shorter
            self._claim.torn = True
        if self._claim.torn:  # it is, before the first byte is changed
            raise _TornError


def part_size(size_bytes: int, bucket: Bucket) -> int:
    """The size of the parts of a file: the bucket's, or as many MiB as it takes for not more than it may have."""
    return max(bucket.part_bytes, -(-size_bytes // bucket.max_parts // _MIB) * _MIB)


class PartsUpload:
    """The parts of one file. `kept` are those that are there already; `sent` is told the bytes of each that is sent;
    `stopped` says when to begin no other part."""

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        upload_id: str,
        *,
        part_bytes: int,
        reader: Reader,
        claim: Torn,
        kept: Iterable[Part],
        sent: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._bucket, self._key, self._id = bucket, key, upload_id
        self._reader, self._claim = reader, claim
        self._part_bytes = part_bytes
        self._sent, self._stopped = sent, stopped
        self._changed = threading.Condition()  # guards what follows
        self._parts = {part.number: part for part in kept if self._fits(part)}
        numbers = range(1, -(-reader.size_bytes // part_bytes) + 1)
        self._missing = deque(number for number in numbers if number not in self._parts)
        self._sending = 0
        self._error: BaseException | None = None
        self._over = False  # it was stopped: whoever looks for work finds none here

    @property
    def kept_bytes(self) -> int:
        """Bytes of the parts that are there."""
        return sum(part.size_bytes for part in self._parts.values())

    @property
    def has_work(self) -> bool:
        """Whether a thread can help."""
        return bool(self._missing) and self._error is None and not (self._claim.torn or self._over)

    def _goes_on(self) -> bool:
        self._over = self._over or (self.has_work and self._stopped())
        return self.has_work

    def help(self) -> bool:
        """Send one part: whether there was one to send. Errors are `run`'s to raise."""
        with self._changed:
            if not self._goes_on():
                return False
            number = self._missing.popleft()
            self._sending += 1
        part: Part | None = None
        error: BaseException | None = None
        try:
            part = self._send(number)
        except BaseException as exc:  # noqa: BLE001 - raised by run
            error = exc
        with self._changed:
            self._sending -= 1
            if part is not None:
                self._parts[number] = part
            else:
                self._missing.appendleft(number)
            self._error = self._error or error
            self._changed.notify_all()
        return True

    def run(self) -> list[Part] | None:
        """All parts, once they are sent; None if it was stopped, or the file changed meanwhile. Raises the first
        error. No thread is at it when it returns."""
        while self.help():
            pass
        with self._changed:
            self._changed.wait_for(lambda: not self._sending)
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._missing or self._claim.torn:
                return None
            return [self._parts[number] for number in sorted(self._parts)]

    def _range(self, number: int) -> tuple[int, int]:
        start = (number - 1) * self._part_bytes
        return start, min(start + self._part_bytes, self._reader.size_bytes)

    def _fits(self, part: Part) -> bool:
        start, stop = self._range(part.number)
        return part.number >= 1 and part.size_bytes == stop - start > 0

    def _send(self, number: int) -> Part | None:
        start, stop = self._range(number)
        if self._claim.torn:
            return None
        try:
            part = self._bucket.put_part(self._key, self._id, number, _Section(self._reader, self._claim, start, stop))
        except _TornError:
            return None
        self._sent(stop - start)
        return part
