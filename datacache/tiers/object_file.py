"""The SSD tier's file of a large object, whole and verified, for who needs a file and not blocks.

Used by `reader.local_file`. Any thread, and after `fork()`. Whatever is wrong or missing, there is simply no such file.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import lmdb

from datacache.core.errors import CacheError
from datacache.core.objects import BLOCK_BYTES, ObjectId, block_count, block_id, block_length
from datacache.tiers import layout
from datacache.tiers.index import open_index
from datacache.tiers.layout import OBJECT_FILE, Location, container_name, intact, unpack_location
from datacache.tiers.memory import memory_dir

log = logging.getLogger(__name__)
_SSD = 1


def open_object_file(home: Path, ram_dir: Path, obj: ObjectId, size_bytes: int) -> int | None:
    """A descriptor, the caller's, of a file that has exactly this object's bytes: all of its blocks are in it, and
    every byte was read and has its checksum. None if there is none."""
    blocks = _blocks(home, ram_dir, obj, size_bytes)
    if blocks is None:
        return None
    path = layout.ssd_dir(home) / container_name(blocks[0].container)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # evicted this moment
        return None
    try:
        if os.fstat(fd).st_size == size_bytes and all(_sound(fd, block) for block in blocks):
            return fd
        log.warning("%s is not what the index says: its blocks are read one by one", path)
    except OSError as exc:
        log.warning("%s cannot be read: %s", path, exc)
    os.close(fd)
    return None


def _blocks(home: Path, ram_dir: Path, obj: ObjectId, size_bytes: int) -> list[Location] | None:
    """Where the object's blocks are, if all are in one object file."""
    if size_bytes <= BLOCK_BYTES:
        return None
    found = []
    try:
        index = open_index(layout.index_dir(memory_dir(home, ram_dir)))
        if not index.whole():
            return None
        for number in range(block_count(size_bytes)):
            value = dict(index.find(block_id(obj, number))).get(_SSD)
            if value is None:
                return None
            found.append(unpack_location(value))
    except (CacheError, lmdb.Error, OSError, IndexError, ValueError) as exc:
        log.debug("the index of %s: %s", home, exc)
        return None
    container = found[0].container
    as_expected = all(
        (block.container, block.offset, block.length) == (container, at * BLOCK_BYTES, block_length(size_bytes, at))
        for at, block in enumerate(found)
    )
    return found if as_expected and container & OBJECT_FILE else None


def _sound(fd: int, block: Location) -> bool:
    data = os.pread(fd, block.length, block.offset)  # not mapped: a file cut short must not be fatal
    return len(data) == block.length and intact(memoryview(data), block.sums, 0, block.length)
