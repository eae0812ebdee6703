"""Values on disk that are asked for by number: a million drafts are no gigabytes of memory.

Used by readers and writers of files about many images, and by the annotation index, which gives the bytes to its worker
processes. One thread.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")
_AT_A_TIME: Final = 2**20


class Aside(Generic[T]):
    """A list of values that are put aside, in an unnamed file under `TMPDIR`."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - gone with this object
        self._ends = array("Q", [0])
        self._part: list[bytes] = []
        self._held = 0

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[T]:
        return map(self.get, range(len(self)))

    def put(self, value: T) -> int:
        """Keep a value; return its number, from 0."""
        raw = self.bytes_of(value)
        self._part.append(raw)
        self._held += len(raw)
        self._ends.append(self._ends[-1] + len(raw))
        if self._held > _AT_A_TIME:
            self._write()
        return len(self) - 1

    def raw(self, number: int) -> bytes:
        """Return a value's bytes, of which `value_of` makes it. Two equal values may have other bytes."""
        if self._part:
            self._write()
        start, end = self._ends[number : number + 2]
        return os.pread(self._file.fileno(), end - start, start)

    def get(self, number: int) -> T:
        """Return a value."""
        return self.value_of(self.raw(number))

    @staticmethod
    def bytes_of(value: T) -> bytes:
        """Return what `raw` does, of a value that is in no list."""
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def value_of(raw: bytes) -> T:
        """Return the value that bytes are of, in this process or another."""
        value: T = pickle.loads(raw)  # noqa: S301 - our own unnamed file
        return value

    def _write(self) -> None:
        data = memoryview(b"".join(self._part))
        while data:
            data = data[self._file.write(data) :]
        self._part, self._held = [], 0
