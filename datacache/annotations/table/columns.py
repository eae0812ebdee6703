"""Columns of numbers and texts as bytes, each as narrow as its largest value: what the annotation table is made of.

The bytes follow from the values alone (little-endian, no library's choice in them). A blob is a magic, a number of
rows (u32) and its columns; a column is a mode (u8), a length (u32) and its bytes. A column of zeros takes no bytes.
Reading checks every length: `CorruptManifestError`. Used by the modules of the annotation table; no state, any thread.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from datacache.core.errors import CorruptManifestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_HEAD = struct.Struct("<4sI")
_COLUMN = struct.Struct("<BI")
_ZEROS, _FLOATS, _WORDS = 0, 9, 16
_WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""Mode → type code: the mode is the width in bytes."""
_MOST_WITHOUT_BYTES = 2**20
"""The zeros that a blob of fewer bytes may stand for: a damaged number must not take all memory."""


class ColumnWriter:
    """Puts columns one after the other."""

    def __init__(self, magic: bytes, rows: int) -> None:
        self._parts = [_HEAD.pack(magic, rows)]

    def numbers(self, values: Sequence[int]) -> None:
        """Whole numbers from 0 to 2**64 - 1."""
        top = max(values, default=0)
        if top == 0:
            self._put(_ZEROS, b"")
            return
        width = next(width for width in _WIDTHS if top < 1 << 8 * width)
        self._put(width, _bytes_of(array(_WIDTHS[width], values)))

    def floats(self, values: array[float]) -> None:
        """Doubles, exactly. First all lowest bytes, then all second ones, …: that is what zstd can make smaller."""
        raw = _bytes_of(values)
        self._put(_FLOATS, b"".join([raw[n::8] for n in range(8)]))

    def words(self, values: NDArray[np.uint64]) -> None:
        """Whole numbers as in `numbers`, from an array, and the bytes in the order of `floats`."""
        top = int(values.max(initial=0))
        width = next(width for width in _WIDTHS if top < 1 << 8 * width)
        raw = values.astype(f"<u{width}").view("u1").reshape(-1, width)
        self._put(_WORDS + width, raw.T.tobytes())

    def texts(self, values: Sequence[str], *, errors: str = "surrogatepass") -> None:
        """Texts; with `surrogatepass` any `str` comes back as it was."""
        self.raw([value.encode("utf-8", errors) for value in values])

    def raw(self, values: Sequence[bytes]) -> None:
        """Byte strings: a column of lengths, and one of bytes."""
        self.numbers([len(value) for value in values])
        self._put(1, b"".join(values))

    def finish(self) -> bytes:
        """The blob."""
        return b"".join(self._parts)

    def _put(self, mode: int, data: bytes) -> None:
        self._parts += (_COLUMN.pack(mode, len(data)), data)


class ColumnReader:
    """Finds the columns of a blob by number, and unpacks those that are asked for. `raw` makes two columns."""

    __slots__ = ("_columns", "_raw", "rows")

    def __init__(self, raw: bytes | memoryview, magic: bytes, what: str) -> None:
        self._raw = memoryview(raw)
        if bytes(self._raw[:4]) != magic:
            raise CorruptManifestError(f"{what} has another format", hint="It was made by a newer version.")
        self._columns: list[tuple[int, int, int]] = []
        try:
            self.rows: int = _HEAD.unpack_from(raw)[1]
            at, end = _HEAD.size, len(self._raw)
            while at < end:
                mode, length = _COLUMN.unpack_from(raw, at)
                at += _COLUMN.size
                self._columns.append((mode, at, at + length))
                at += length
        except struct.error as exc:
            raise CorruptManifestError(f"{what} is cut off") from exc
        if at != end:
            raise CorruptManifestError(f"{what} is cut off")
        if self.rows > max(end, _MOST_WITHOUT_BYTES):
            raise CorruptManifestError(f"{what} has {self.rows:,} rows in {end:,} bytes")

    def numbers(self, column: int, count: int) -> Sequence[int]:
        """The `count` numbers of a column."""
        mode, data = self._column(column)
        if mode == _ZEROS and not data and count <= max(len(self._raw), _MOST_WITHOUT_BYTES):
            return bytes(count)  # a sequence of zeros
        if mode not in _WIDTHS or len(data) != mode * count:
            raise CorruptManifestError(f"column {column} of the annotation table is damaged")
        if mode == 1:
            return bytes(data)
        return _array_of(_WIDTHS[mode], data)

    def floats(self, column: int, count: int) -> array[float]:
        """The `count` doubles of a column."""
        mode, data = self._column(column)
        if mode != _FLOATS or len(data) != 8 * count:
            raise CorruptManifestError(f"column {column} of the annotation table is damaged")
        raw = bytearray(8 * count)
        for n in range(8):
            raw[n::8] = data[n * count : (n + 1) * count]
        return _array_of("d", raw)

    def words(self, column: int, count: int) -> NDArray[np.uint64]:
        """The `count` numbers of a column that `ColumnWriter.words` made."""
        import numpy as np

        mode, data = self._column(column)
        width = mode - _WORDS
        if width not in _WIDTHS or len(data) != width * count:
            raise CorruptManifestError(f"column {column} of the annotation table is damaged")
        raw = np.frombuffer(data, "u1").reshape(width, count)
        return np.ascontiguousarray(raw.T).view(f"<u{width}").ravel().astype(np.uint64)

    def raw(self, column: int, count: int) -> list[bytes]:
        """The `count` byte strings of a column and the next."""
        lengths = self.numbers(column, count)
        data = bytes(self._column(column + 1)[1])
        if sum(lengths) != len(data):
            raise CorruptManifestError(f"column {column} of the annotation table is damaged")
        return [data[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]

    def joined(self, column: int) -> bytes:
        """Return the bytes of all strings of a column and the next."""
        return bytes(self._column(column + 1)[1])

    def texts(self, column: int, count: int) -> list[str]:
        """Return the values as texts."""
        try:
            return [value.decode("utf-8", "surrogatepass") for value in self.raw(column, count)]
        except UnicodeDecodeError as exc:
            raise CorruptManifestError(f"column {column} of the annotation table is damaged") from exc

    def has(self, column: int) -> bool:
        """Tell whether there are that many columns."""
        return column < len(self._columns)

    def is_floats(self, column: int) -> bool:
        """Tell whether a column holds doubles."""
        return self._column(column)[0] == _FLOATS

    def _column(self, number: int) -> tuple[int, memoryview]:
        try:
            mode, start, stop = self._columns[number]
        except IndexError:
            raise CorruptManifestError(f"the annotation table has no column {number}") from None
        return mode, self._raw[start:stop]


def as_array(values: Sequence[int] | Sequence[float]) -> NDArray[Any]:
    """Return a column that `ColumnReader` gave for NumPy, which may not change it."""
    import numpy as np

    column: Any = values  # bytes or an array: both have the buffer that a Sequence does not promise
    return np.asarray(memoryview(column))


def as_float64(values: Sequence[int] | Sequence[float]) -> NDArray[np.float64]:
    """Return a column that `ColumnReader` gave as doubles."""
    return as_array(values).astype("f8")


def _bytes_of(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers.tobytes()


def _array_of(code: str, data: bytes | bytearray | memoryview) -> array[Any]:
    numbers: array[Any] = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
