"""One large file on its way to the bucket in parts, sent by as many threads as have nothing else to do.

Part of the uploader: the thread that has claimed the key calls `run`, others join in with `help`. A part is read, sent
and let go; how many are in memory at a time is bounded by a budget of bytes that all uploads share.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from datacache.core.budget import ByteBudget
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


class Bodies:
    """Room for the bodies of all requests, bounded. Any thread.

    Parts lie in buffers that are used again while any is in use: what malloc gets back from many threads stays with the
    process, up to twice as much as is ever in use (glibc, measured).
    """

    def __init__(self, limit_bytes: int) -> None:
        self._budget = ByteBudget(limit_bytes)
        self._lock = threading.Lock()  # guards the two below
        self._used = 0
        self._free: list[mmap.mmap] = []

    @contextmanager
    def room(self, size_bytes: int) -> Iterator[None]:
        """Wait for room for some bytes, and give it back."""
        self._budget.take(size_bytes)
        try:
            yield
        finally:
            self._budget.give(size_bytes)

    @contextmanager
    def buffer(self, size_bytes: int) -> Iterator[memoryview]:
        """The same, and a buffer of that size. Nothing may hold on to it."""
        with self.room(size_bytes):
            with self._lock:
                self._used += 1
                found = self._free.pop() if self._free and len(self._free[-1]) >= size_bytes else None
            buffer = found if found is not None else mmap.mmap(-1, size_bytes)
            try:
                yield memoryview(buffer)[:size_bytes]
            finally:
                with self._lock:
                    self._used -= 1
                    self._free = [*self._free[: self._used - 1], buffer] if self._used else []


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
        bodies: Bodies,
        sent: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._bucket, self._key, self._id = bucket, key, upload_id
        self._reader, self._claim, self._bodies = reader, claim, bodies
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
        """Send one part: whether there was one to send. Errors are `run`'s to raise.

        The part is chosen when there is room for it: a thread that waits for room holds none back, which a store that
        takes parts in their order (`rclone serve s3`) would wait for, with those in flight.
        """
        if not self._goes_on():
            return False
        with self._bodies.buffer(min(self._part_bytes, self._reader.size_bytes)) as buffer:
            return self._send_next(buffer)

    def _send_next(self, buffer: memoryview) -> bool:
        with self._changed:
            if not self._goes_on():
                return False
            number = self._missing.popleft()
            self._sending += 1
        part: Part | None = None
        error: BaseException | None = None
        try:
            part = self._send(number, buffer)
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

    def _send(self, number: int, buffer: memoryview) -> Part | None:
        start, stop = self._range(number)
        data = buffer[: stop - start]
        if self._reader.read_into(data, start) != len(data):
            self._claim.torn = True
        if self._claim.torn:
            return None
        part = self._bucket.put_part(self._key, self._id, number, data)
        self._sent(stop - start)
        return part
