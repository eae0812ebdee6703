"""Folders as the kernel lists them: with `.` and `..`, a few names at a time, and from a place that a program has kept.

readdir(3) asks for up to 1 MiB of names at a time, as many as `st_blksize` has bytes."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_getdents = ctypes.CDLL(None, use_errno=True).getdents64
_getdents.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_getdents.restype = ctypes.c_ssize_t
_HEAD = struct.Struct("@QqHB")
"""Of a struct linux_dirent64: d_ino, d_off, d_reclen, d_type. Then comes the name."""
_BUFFER_BYTES = 4096
_DT_DIR = 4


class Entry(NamedTuple):
    """One name of a folder."""

    name: str
    ino: int
    kind: int
    following: int
    """The place behind it, for lseek(2)."""


def list_on(folder: int) -> Iterator[Entry]:
    """Yield the entries of an open folder from where it is."""
    buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
    while length := _getdents(folder, buffer, _BUFFER_BYTES):
        if length < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        start = 0
        while start < length:
            ino, following, size, kind = _HEAD.unpack_from(buffer, start)
            name = buffer.raw[start + _HEAD.size : start + size].split(b"\0", 1)[0]
            yield Entry(os.fsdecode(name), ino, kind, following)
            start += size


def expect_whole_from_every_place(path: Path, names: list[str]) -> None:
    """Expect these names in a folder, and `.` and `..`, each once, also from places in between and when it starts
    over."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        seen = list(list_on(folder))
        assert sorted(entry.name for entry in seen) == sorted([*names, ".", ".."])
        assert {entry.kind for entry in seen if entry.name in (".", "..")} == {_DT_DIR}
        for number in {0, 1, 2, *range(3, len(seen), 97)} & set(range(len(seen))):
            os.lseek(folder, seen[number].following, os.SEEK_SET)
            assert [entry.name for entry in list_on(folder)] == [entry.name for entry in seen[number + 1 :]]
        os.lseek(folder, 0, os.SEEK_SET)
        assert [entry.name for entry in list_on(folder)] == [entry.name for entry in seen]
    finally:
        os.close(folder)
