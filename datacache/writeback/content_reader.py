"""Reading what lies in the journal or in a staged file, while it is uploaded.

Made by `Claims.content`, used by the uploader's ways. No lock: one thread at a time but for `read`, which any may call.
"""

from __future__ import annotations

import os

from datacache.store.bodies import read_fully


class ContentReader:
    """Reads what lies in the journal or in a staged file."""

    def __init__(self, size_bytes: int, data: bytes | None = None, fd: int = -1) -> None:
        self.size_bytes = size_bytes
        self._data = data
        self._fd = fd

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Bytes `start` to `stop`; fewer where the file was cut off meanwhile."""
        if self._data is not None:
            return memoryview(self._data)[start:stop]
        parts = []
        while start < stop and (part := os.pread(self._fd, stop - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, buffer: memoryview, start: int) -> int:
        """Fill a buffer with the bytes from `start` on: how many there were."""
        if self._data is not None:
            data = self._data[start : start + len(buffer)]
            buffer[: len(data)] = data
            return len(data)
        return read_fully(self._fd, buffer, start)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
