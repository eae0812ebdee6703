"""Bodies of requests that are read while they are sent, so that a large one takes no memory.

S3 wants to know a body's SHA-256 before it comes, so it is read twice, and has to be the same both times: a request
that is signed is refused otherwise. Used by uploads in parts. Who sends a body reads it in one thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol

CHUNK_BYTES = 2**18
"""What is read at a time: small enough to stay in a core's cache on its way from one read to one send."""


class Body(Protocol):
    """Bytes to send, that need not lie in memory."""

    def __len__(self) -> int:
        """How many there are."""
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
        """What reading it has raised last: urllib3 takes an `OSError` for one of the connection."""
        self._buffer = bytearray(min(CHUNK_BYTES, len(body)))

    def read(self, size: int = CHUNK_BYTES) -> memoryview:
        """The next bytes, `CHUNK_BYTES` at most; none at the end. Good until the next call."""
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
        """How many bytes were read."""
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
    """The bytes, piece by piece. Each is good until the next is asked for."""
    if isinstance(data, bytes | memoryview):
        yield memoryview(data)
        return
    file = BodyFile(data)
    while chunk := file.read():
        yield chunk
