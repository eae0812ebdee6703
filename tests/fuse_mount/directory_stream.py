"""Folders as C programs list them: with `.` and `..`, and from a place that they have kept (telldir(3))."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.opendir.restype = _libc.readdir.restype = ctypes.c_void_p
_libc.telldir.restype = ctypes.c_long
_libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
for _call in (_libc.readdir, _libc.telldir, _libc.rewinddir, _libc.closedir):
    _call.argtypes = [ctypes.c_void_p]
_KIND, _NAME = 18, 19
"""Where a struct dirent has its `d_type` and `d_name`."""
_FOLDER = 4
"""DT_DIR."""


class DirectoryStream:
    """One opendir(3)."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def read(self, most: int = 2**31) -> list[tuple[bytes, int]]:
        """Return names and types of the next entries, or of all that are left."""
        entries = []
        while len(entries) < most and (entry := _libc.readdir(self._stream)):
            entries.append((ctypes.string_at(entry + _NAME), ctypes.string_at(entry + _KIND, 1)[0]))
        return entries

    def tell(self) -> int:
        """Return the place behind the last entry."""
        place: int = _libc.telldir(self._stream)
        return place

    def seek(self, place: int) -> None:
        """Go on from a place."""
        _libc.seekdir(self._stream, place)

    def rewind(self) -> None:
        """Start over."""
        _libc.rewinddir(self._stream)


@contextmanager
def directory_stream(folder: Path) -> Iterator[DirectoryStream]:
    """Open a folder."""
    stream = _libc.opendir(str(folder).encode())
    assert stream, f"{folder} cannot be opened"
    try:
        yield DirectoryStream(stream)
    finally:
        _libc.closedir(stream)


def expect_whole_from_every_place(folder: Path, names: list[str]) -> None:
    """Expect these names in the folder, and `.` and `..`, each once, also from places in between and when it starts
    over."""
    with directory_stream(folder) as stream:
        seen: list[tuple[bytes, int]] = []
        places = {}
        while some := stream.read(1 if len(seen) < 4 else 97):
            seen += some
            places[len(seen)] = stream.tell()
        assert sorted(os.fsdecode(name) for name, _ in seen) == sorted([*names, ".", ".."])
        assert {kind for name, kind in seen if name in (b".", b"..")} == {_FOLDER}
        for count, place in places.items():
            stream.seek(place)
            assert stream.read() == seen[count:]
        stream.rewind()
        assert stream.read() == seen
