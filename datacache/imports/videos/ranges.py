"""An object of a store as a file that is read in ranges, for a library that seeks. One thread."""

from __future__ import annotations

import io
from collections import OrderedDict

from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectStore

RANGE_BYTES = 2 << 20
_HELD = 8
"""Ranges that are kept: sound and pictures may lie apart, and the index lies elsewhere again."""


class RangeFile(io.RawIOBase):
    """One version of an object, read `RANGE_BYTES` at a time. Reading raises the store's errors."""

    def __init__(self, store: ObjectStore, ref: ObjectRef) -> None:
        super().__init__()
        self._store, self._ref = store, ref
        self._at = 0
        self._held: OrderedDict[int, bytes | memoryview] = OrderedDict()

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Read from there on."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._ref.size_bytes}[whence]
        if base + offset < 0:
            raise OSError("a position before the begin of the file")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most to the end of a range; none at the end."""
        number, skip = divmod(self._at, RANGE_BYTES)
        if self._at >= self._ref.size_bytes:
            return b""
        data = self._range(number)
        piece = bytes(data[skip:] if size < 0 else data[skip : skip + size])
        self._at += len(piece)
        return piece

    def _range(self, number: int) -> bytes | memoryview:
        data = self._held.get(number)
        if data is None:
            start = number * RANGE_BYTES
            data = self._store.read(self._ref, start, min(start + RANGE_BYTES, self._ref.size_bytes))
            self._held[number] = data
            if len(self._held) > _HELD:
                self._held.popitem(last=False)
        else:
            self._held.move_to_end(number)
        return data
