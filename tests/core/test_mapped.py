"""Mappings of files: what is read of the disk."""

from __future__ import annotations

import os
import random
from pathlib import Path

from datacache.core.mapped import MappedFile

_PIECE_BYTES, _PIECES = 110_000, 200


def _read_of_disks() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise AssertionError("the kernel does not count it")


def test_pieces_at_random_are_read_of_the_disk_without_what_lies_around_them(tmp_path: Path):
    path = tmp_path / "container"
    with path.open("wb") as file:
        file.write(os.urandom(_PIECE_BYTES * _PIECES))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = MappedFile(path)
    some = random.Random(1).sample(range(_PIECES), _PIECES // 4)
    before = _read_of_disks()
    for start in (number * _PIECE_BYTES for number in some):
        mapped.need(start, start + _PIECE_BYTES, start, start + _PIECE_BYTES)
        assert len(bytes(mapped.view[start : start + _PIECE_BYTES])) == _PIECE_BYTES
    # Whole pages, and some of the file system's own; a folder in memory reads nothing.
    assert _read_of_disks() - before < 1.3 * len(some) * _PIECE_BYTES
