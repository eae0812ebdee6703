"""The files of a tier, as the daemon writes them: regions of many small blocks, and object files.

A region is sparse and has its full size from the start, so that readers map it once while it fills; sealing cuts it to
what is used. Each record carries its block's id, length and checksums: a lost index can be made again by `scan_region`.
One thread writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from datacache.core.objects import BlockId
from datacache.tiers import layout
from datacache.tiers.layout import Location, aligned, container_name

log = logging.getLogger(__name__)
_MODE = 0o600
_PADDING = bytes(layout.RECORD_ALIGN)
_IOV_MAX = 1023  # of 1,024 (IOV_MAX), in threes


class Region:
    """A region being filled."""

    def __init__(self, folder: Path, container: int, capacity: int, dataset: str) -> None:
        self.container = container
        self.dataset = dataset
        self.capacity = capacity
        self.end = layout.REGION_HEADER_BYTES
        path = folder / container_name(container)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        try:
            os.ftruncate(self._fd, capacity)
            os.pwrite(self._fd, _region_header(dataset), 0)
        except OSError:
            os.close(self._fd)
            path.unlink()
            raise

    def room(self) -> int:
        """How many bytes of records fit."""
        return self.capacity - self.end

    def append(self, records: Sequence[tuple[BlockId, bytes | memoryview, bytes]]) -> list[Location]:
        """Write records (block, data, checksums) behind the last, in one call. `OSError` leaves the region as it was.
        There must be room for them."""
        buffers: list[bytes | memoryview] = []
        locations, at = [], self.end
        for block, data, sums in records:
            header = layout.record_header(block, len(data), sums)
            locations.append(Location(self.container, at + len(header), len(data), sums))
            padding = -len(data) % layout.RECORD_ALIGN
            buffers += (header, data, _PADDING[:padding])
            at += len(header) + len(data) + padding
        for first in range(0, len(buffers), _IOV_MAX):
            _write_all(self._fd, buffers[first : first + _IOV_MAX], self._offset(buffers, first))
        self.end = at
        return locations

    def _offset(self, buffers: list[bytes | memoryview], first: int) -> int:
        return self.end + sum(len(buffer) for buffer in buffers[:first])

    def seal(self) -> None:
        """No more will come: give back the room behind the last record."""
        os.ftruncate(self._fd, self.end)
        os.close(self._fd)


def record_bytes(length: int) -> int:
    """What a block of this length takes in a region."""
    return aligned(aligned(layout.RECORD.size + 8 * layout.granules(length)) + length)


def open_region_size(budget_bytes: int) -> int:
    """How large a tier's regions are: small enough to evict in small steps, large enough to have few."""
    return min(256 * 2**20, max(2**20, aligned(budget_bytes // 64, layout.DISK_BLOCK)))


def scan_region(path: Path) -> Iterator[tuple[BlockId, Location]]:
    """The records of a region up to the first thing that is none. Payloads are not read: readers verify them."""
    container = layout.container_of(path.name)
    assert container is not None
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        at = layout.REGION_HEADER_BYTES
        while at + layout.RECORD.size <= size:
            head = os.pread(file.fileno(), layout.RECORD.size + 8 * 64, at)
            if len(head) < layout.RECORD.size:
                return
            magic, block, length, sums_bytes = layout.RECORD.unpack_from(head)
            if magic != layout.RECORD_MAGIC or sums_bytes != 8 * layout.granules(length):
                return
            sums = head[layout.RECORD.size : layout.RECORD.size + sums_bytes]
            offset = at + aligned(layout.RECORD.size + sums_bytes)
            if offset + length > size or len(sums) != sums_bytes:
                return
            yield BlockId(block), Location(container, offset, length, sums)
            at = aligned(offset + length)


def region_dataset(path: Path) -> str | None:
    """The data set a region was filled for; None if the file is no region."""
    with path.open("rb") as file:
        head = file.read(layout.REGION_HEADER_BYTES)
    if len(head) < layout.REGION_HEADER_BYTES or head[:8] != b"DCREGION":
        return None
    return head[8:].rstrip(b"\0").decode("utf-8", "replace")


def write_object_block(folder: Path, container: int, size_bytes: int, offset: int, data: bytes | memoryview) -> None:
    """Write one block of an object file, made sparse at its full size on first use."""
    fd = os.open(folder / container_name(container), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        if os.fstat(fd).st_size < size_bytes:
            os.ftruncate(fd, size_bytes)
        _write_all(fd, [data], offset)
    finally:
        os.close(fd)


def _region_header(dataset: str) -> bytes:
    name = dataset.encode()[: layout.REGION_HEADER_BYTES - 8]
    return (b"DCREGION" + name).ljust(layout.REGION_HEADER_BYTES, b"\0")


def _write_all(fd: int, buffers: list[bytes | memoryview], offset: int) -> None:
    total = sum(len(b) for b in buffers)
    written = os.pwritev(fd, buffers, offset)
    if written == total:
        return
    rest = memoryview(b"".join(buffers))[written:]  # a short write: the disk is about to be full
    while rest:
        count = os.pwrite(fd, rest, offset + written)
        written, rest = written + count, rest[count:]
