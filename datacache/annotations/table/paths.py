"""Find patterns in the paths of all images at once: one text of bytes, and arrays that say where each path lies in it.

A pattern is what `like` means by `*`, and by `?` and `[…]` where all paths are ASCII: pieces with anything between.
UTF-8 finds in bytes what Python finds in the decoded texts, as a character's first byte is never inside of another one.
Used by `browsing`. Pure functions of arrays, any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from datacache.annotations.table.arrays import narrow

if TYPE_CHECKING:
    from numpy.typing import NDArray

FIELDS: Final = ("path", "folder", "name")
_SLASH: Final = ord("/")
_TOKEN: Final = re.compile(r"\*|\[!?+\]?+[^]]*+\]|.", re.DOTALL)
"""A part of a pattern as `fnmatch` sees it."""
_CHUNK: Final = 2**20
_Piece = list["int | NDArray[np.bool_]"]
"""For each byte of a piece which one it is, or for each of the 256 whether it may be that."""


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
        pieces: list[_Piece] = [[]]
        for token in _TOKEN.findall(pattern):
            if token == "*":
                pieces.append([])
            elif token == "?" or len(token) > 1:
                if not self._ascii:
                    return None
                fits = re.compile(translate(token)).match
                pieces[-1].append(np.array([n < 128 and fits(chr(n)) is not None for n in range(256)]))
            elif (piece := _encoded(token)) is None:
                return None
            else:
                pieces[-1] += piece
        return self._fitting(field, pieces)

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
        return None if piece is None else self._fitting(field, [[], piece, []])

    def _fitting(self, field: str, pieces: Sequence[_Piece]) -> NDArray[np.bool_]:
        starts, ends = self._spans[field]
        head, *middle = pieces
        tail = middle.pop() if middle else []
        lengths = ends - starts
        rows = np.flatnonzero(lengths >= len(head) + len(tail) if len(pieces) > 1 else lengths == len(head))
        rows = self._having(rows, starts, head)
        rows = self._having(rows, ends - len(tail), tail)
        at = starts[rows] + len(head)
        for piece in filter(None, middle):
            # The first place behind the piece before: a later one would only leave less room.
            places = self._places(piece)
            nearest = np.searchsorted(places, at)
            there = nearest < len(places)
            rows, at = rows[there], places[nearest[there]] + len(piece)
            inside = at <= ends[rows] - len(tail)
            rows, at = rows[inside], at[inside]
        found = np.zeros(len(starts), bool)
        found[rows] = True
        return found

    def _having(
        self, rows: NDArray[np.intp], starts: NDArray[np.signedinteger[Any]], piece: _Piece
    ) -> NDArray[np.intp]:
        """Return those of the rows that have a piece where it starts."""
        for offset in reversed(range(len(piece))):  # paths begin alike
            rows = rows[_fits(self._text[starts[rows] + offset], piece[offset])]
        return rows

    def _places(self, piece: _Piece) -> NDArray[np.intp]:
        """Return where a piece lies in the text, be it across two paths."""
        found = []
        for start in range(0, max(0, len(self._text) - len(piece) + 1), _CHUNK):
            window = self._text[start : start + _CHUNK + len(piece) - 1]
            fits = np.ones(len(window) - len(piece) + 1, bool)
            for offset, wanted in enumerate(piece):
                fits &= _fits(window[offset : offset + len(fits)], wanted)
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


def _fits(values: NDArray[np.uint8], wanted: int | NDArray[np.bool_]) -> NDArray[np.bool_]:
    return values == wanted if isinstance(wanted, int) else wanted[values]


def _encoded(text: str) -> _Piece | None:
    """Return the bytes of a text; None for one that is no UTF-8."""
    try:
        return [*text.encode()]
    except UnicodeEncodeError:
        return None
