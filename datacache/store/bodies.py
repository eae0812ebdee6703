"""Bodies of requests that are read while they are sent, and objects that are read in parts and checked as a whole.

A body of an upload in parts takes no memory. S3 wants to know its SHA-256 before it comes, so it is read twice, in one
thread, and has to be the same both times: a request that is signed is refused otherwise. Stores can check an object
only where it comes in one piece: copying, imports and verifying read larger ones here. Any thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Protocol

from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectStore
from datacache.store.checksums import TALLY, Checksum, Running, md5_etags, mismatch
from datacache.store.retry import DAMAGED_AGAIN

CHUNK_BYTES = 2**18
"""Bytes read at a time: small enough to stay in a core's cache on its way from one read to one send."""


class Body(Protocol):
    """Bytes to send, that need not lie in memory."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill the buffer with those from `start` on. What it raises ends the request, and is raised from there."""
        ...


class BodyFile:
    """A body as a file, which is what botocore hashes and urllib3 sends piece by piece."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._position = 0
        self.error: BaseException | None = None
        """The error that reading it has raised last: urllib3 takes an `OSError` for one of the connection."""
        self._buffer = bytearray(min(CHUNK_BYTES, len(body)))

    def read(self, size: int = CHUNK_BYTES) -> memoryview:
        """Return the next bytes, `CHUNK_BYTES` at most; none at the end. Good until the next call."""
        count = min(size, len(self._buffer), len(self._body) - self._position)
        chunk = memoryview(self._buffer)[:count]
        if count:
            try:
                self._body.read_into(chunk, self._position)
            except BaseException as exc:
                self.error = exc
                raise
            self._position += count
        return chunk

    def tell(self) -> int:
        """Return how many bytes were read."""
        return self._position

    def seek(self, position: int) -> int:
        """Read from there on."""
        self._position = position
        return position


def read_fully(fd: int, buffer: memoryview, start: int) -> int:
    """Fill a buffer with the bytes of a file from `start` on: how many there were, fewer if it ends before."""
    done = 0
    while done < len(buffer) and (count := os.preadv(fd, [buffer[done:]], start + done)):
        done += count
    return done


def chunks(data: bytes | memoryview | Body) -> Iterator[memoryview]:
    """Yield the bytes, piece by piece. Each is good until the next is asked for."""
    if isinstance(data, bytes | memoryview):
        yield memoryview(data)
        return
    file = BodyFile(data)
    while chunk := file.read():
        yield chunk


_log = logging.getLogger(__name__)


def read_whole(
    store: ObjectStore, ref: ObjectRef, part_bytes: int, *, before_part: Callable[[], None] = lambda: None
) -> bytes:
    """Return all bytes of an object, read so many at a time. `before_part` may raise, to stop.

    `ChecksumError` where they stay others than the store's checksum is of; else the errors of `ObjectStore.read`. One
    request more for an object of several parts.
    """
    if ref.size_bytes <= part_bytes:
        before_part()
        return bytes(store.read(ref, 0, ref.size_bytes))  # the store checks it
    expected = store.checksum(ref)
    for again in range(DAMAGED_AGAIN, -1, -1):
        parts: list[bytes | memoryview] = []

        def keep(part: bytes | memoryview, parts: list[bytes | memoryview] = parts) -> None:
            before_part()
            parts.append(part)

        found = digest_of(store, ref, part_bytes, expected, keep)
        if expected is None:
            TALLY.checked("none")
            break
        if found == expected.value:
            if expected.algorithm == "md5":
                md5_etags(ref.store).proven = True
            TALLY.checked(expected.algorithm)
            break
        if expected.algorithm == "md5" and md5_etags(ref.store).meet(ref, expected.value, found):
            TALLY.checked("none")
            break
        TALLY.failed(expected.algorithm)
        error = mismatch(ref, expected, found)
        if not again:
            raise error
        _log.warning("%s (it is read again)", error.message)
    return b"".join(parts)


def digest_of(
    store: ObjectStore,
    ref: ObjectRef,
    part_bytes: int,
    expected: Checksum | None,
    keep: Callable[[bytes | memoryview], None],
) -> bytes:
    """Read an object in parts, give each to `keep`, and return the checksum of all of it, of the expected kind; b''
    where none is expected."""
    running = Running(expected.algorithm) if expected is not None else None
    for start in range(0, ref.size_bytes, part_bytes):
        part = store.read(ref, start, min(start + part_bytes, ref.size_bytes))
        keep(part)
        if running is not None:
            running.update(part)
    return running.digest() if running is not None else b""
