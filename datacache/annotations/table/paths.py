"""Find patterns in the paths of all images at once: one text of bytes, and arrays that say where each path lies in it.

A pattern is what `like` means by `*`, and `?` where all paths are ASCII: pieces with anything between them. UTF-8 finds
in bytes what Python finds in the decoded texts, as a character's first byte is never inside of another one. Used by
`browsing`. Pure functions of arrays, any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from datacache.annotations.table.arrays import narrow

if TYPE_CHECKING:
    from numpy.typing import NDArray

FIELDS: Final = ("path", "folder", "name")
_SLASH: Final = ord("/")
_ANY: Final = ord("?")
_CHUNK: Final = 2**20
_Bytes = dict[int, int]
"""Offset → byte, of a piece."""


class Paths:
    """The paths of all images. `arrays` are those of `path_arrays`."""

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        self._text = arrays["text"]
        ends = np.cumsum(arrays["lengths"], dtype=np.int32 if len(self._text) < 2**31 else np.int64)
        starts, names = ends - arrays["lengths"], ends - arrays["names"]
        self._spans = {"path": (starts, ends), "name": (names, ends), "folder": (starts, np.maximum(names - 1, starts))}
        self._ascii = not len(self._text) or int(self._text.max()) < 128

    def like(self, field: str, pattern: str) -> NDArray[np.bool_] | None:
        """Return which images' `field` fits a pattern of `fnmatch`; None where it is none that this can tell."""
        if "[" in pattern or ("?" in pattern and not self._ascii):
            return None
        pieces = [_encoded(piece, wild=True) for piece in pattern.split("*")]
        return None if None in pieces else self._fitting(field, pieces)  # type: ignore[arg-type]

    def among(self, field: str, texts: Iterable[str]) -> NDArray[np.bool_] | None:
        """Return which images' `field` is one of these texts; None as in `like`."""
        found = np.zeros(len(self._spans["path"][0]), bool)
        for text in texts:
            piece = _encoded(text)
            if piece is None:
                return None
            found |= self._fitting(field, [piece])
        return found

    def containing(self, field: str, text: str) -> NDArray[np.bool_] | None:
        """Return which images' `field` has a text in it; None as in `like`."""
        piece = _encoded(text)
        return None if piece is None else self._fitting(field, [(0, {}), piece, (0, {})])

    def _fitting(self, field: str, pieces: Sequence[tuple[int, _Bytes]]) -> NDArray[np.bool_]:
        starts, ends = self._spans[field]
        (first, head), *middle = pieces
        last, tail = middle.pop() if middle else (0, {})
        lengths = ends - starts
        rows = np.flatnonzero(lengths >= first + last if len(pieces) > 1 else lengths == first)
        rows = self._having(rows, starts, head)
        rows = self._having(rows, ends - last, tail)
        at = starts[rows] + first
        for size, piece in middle:
            if not size:
                continue
            # The first place behind the piece before: a later one would only leave less room.
            places = self._places(size, piece)
            nearest = np.searchsorted(places, at)
            there = nearest < len(places)
            rows, at = rows[there], places[nearest[there]] + size
            inside = at <= ends[rows] - last
            rows, at = rows[inside], at[inside]
        found = np.zeros(len(starts), bool)
        found[rows] = True
        return found

    def _having(
        self, rows: NDArray[np.intp], starts: NDArray[np.signedinteger[Any]], piece: _Bytes
    ) -> NDArray[np.intp]:
        """Return those of the rows that have a piece where it starts."""
        for offset, byte in reversed(piece.items()):  # paths begin alike
            rows = rows[self._text[starts[rows] + offset] == byte]
        return rows

    def _places(self, size: int, piece: _Bytes) -> NDArray[np.intp]:
        """Return where a piece lies in the text, be it across two paths."""
        found = []
        for start in range(0, max(0, len(self._text) - size + 1), _CHUNK):
            window = self._text[start : start + _CHUNK + size - 1]
            fits = np.ones(len(window) - size + 1, bool)
            for offset, byte in piece.items():
                fits &= window[offset : offset + len(fits)] == byte
            found.append(np.flatnonzero(fits) + start)
        return np.concatenate(found) if found else np.zeros(0, np.intp)


def path_arrays(parts: Iterable[tuple[Sequence[int], bytes]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of `Paths`: all bytes, the lengths of paths, and those of the names behind the last slash. A
    part is the lengths of some paths, and their bytes."""
    texts, all_lengths, all_names = [], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for numbers, text in parts:
        lengths = np.asarray(memoryview(numbers)).astype(np.int64)  # type: ignore[arg-type]
        ends = np.cumsum(lengths)
        slashes = np.concatenate([[-1], np.flatnonzero(np.frombuffer(text, np.uint8) == _SLASH)])
        behind = slashes[np.searchsorted(slashes, ends) - 1] + 1
        texts.append(text)
        all_lengths.append(narrow(lengths))
        all_names.append(narrow(ends - np.maximum(behind, ends - lengths)))
    return {
        "text": np.frombuffer(b"".join(texts), np.uint8),
        "lengths": np.concatenate(all_lengths[1:] or all_lengths),
        "names": np.concatenate(all_names[1:] or all_names),
    }


def _encoded(piece: str, *, wild: bool = False) -> tuple[int, _Bytes] | None:
    """Return the length of a piece in bytes, and the bytes that count; None for one that is no UTF-8."""
    try:
        raw = piece.encode()
    except UnicodeEncodeError:
        return None
    return len(raw), {offset: byte for offset, byte in enumerate(raw) if not (wild and byte == _ANY)}
