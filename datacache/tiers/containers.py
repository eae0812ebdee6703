"""The files of a tier: regions of many small blocks, and object files, as the daemon writes them.

A region is sparse and has its full size from the start, so that readers map it once while it fills; sealing cuts it to
its used length. Each record carries its block's id, length and checksums, so `scan_region` can make a lost index again.
One thread writes.

On a disk, writes go past the page cache (O_DIRECT, through one aligned buffer): taking pages for bytes that readers
have in memory already cost three to nine times the processor time (14 µs against 36 to 130 for 110 KB). What is read
soon is written the usual way all the same (`Block.soon`). So is a file system that refuses (EINVAL, when a file is
opened or first written).

`object_blocks` and `open_object_file` are for readers that need a file and not blocks (`LocalBlocks.map_object` and
`LocalBlocks.open_object_file`): any thread, and after `fork()`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from datacache.core.concurrency import map_in_threads
from datacache.core.disk import write_all
from datacache.core.ids import BLOCK_BYTES, GRANULE_BYTES, BlockId, ObjectId, block_count, block_id, block_length
from datacache.core.pages import begins_at_page
from datacache.tiers import layout
from datacache.tiers.index import Index
from datacache.tiers.layout import OBJECT_FILE, Location, aligned, checksums, container_name, unpack_location

log = logging.getLogger(__name__)
_MODE = 0o600
_PADDING = bytes(layout.RECORD_ALIGN)
_IOV_MAX = 1024
_REGION_MAGIC = b"DCREGION"
_SSD = 1  # the number of the tier
_VERIFYING_THREADS = 4
"""Reading and hashing let go of the interpreter."""


class Bounce:
    """The aligned buffer for direct writes, one for each tier (and its writing thread). `refused`: the file system does
    no direct writes."""

    def __init__(self, size_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, size_bytes))
        self.refused = False

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        """Write `buffers` at an aligned offset, filled up with zeros to whole disk blocks. What begins at a page is
        written from where it is, the rest is copied."""
        view, at = self.view, 0
        for buffer in buffers:
            rest = memoryview(buffer)
            if not at and begins_at_page(rest):
                whole = len(rest) // layout.DISK_BLOCK * layout.DISK_BLOCK
                self._write(fd, rest[:whole], offset)
                offset, rest = offset + whole, rest[whole:]
            while rest:
                part = rest[: len(view) - at]
                view[at : at + len(part)] = part
                at, rest = at + len(part), rest[len(part) :]
                if at == len(view):
                    self._write(fd, view, offset)
                    offset, at = offset + at, 0
        if at:
            end = layout.aligned(at, layout.DISK_BLOCK)
            view[at:end] = bytes(end - at)
            self._write(fd, view[:end], offset)

    def _write(self, fd: int, data: memoryview, offset: int) -> None:
        """Write whole disk blocks that begin at a page."""
        done = 0
        while done < len(data):
            try:
                written = os.pwrite(fd, data[done:], offset + done)
            except OSError as exc:
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                if exc.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self.refused = True
                continue
            if written < min(len(data) - done, layout.DISK_BLOCK):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += written // layout.DISK_BLOCK * layout.DISK_BLOCK  # a direct write must start at a whole one


class Region:
    """A region being filled. With a `bounce` it is written past the page cache, if its file system can do that."""

    def __init__(self, folder: Path, container: int, capacity: int, dataset: str, bounce: Bounce | None) -> None:
        self.container = container
        self.dataset = dataset
        self.capacity = capacity
        self.end = layout.REGION_HEADER_BYTES
        name = dataset.encode()[: layout.REGION_HEADER_BYTES - len(_REGION_MAGIC)]
        self._head = (_REGION_MAGIC + name).ljust(layout.REGION_HEADER_BYTES, b"\0")  # until it is written
        self._fd, self._bounce = _create(folder / container_name(container), bounce, os.O_EXCL)
        try:
            os.ftruncate(self._fd, capacity)
        except OSError:
            os.close(self._fd)
            raise

    def room(self) -> int:
        """Return how many bytes of records fit."""
        return self.capacity - self.end

    def append(
        self, records: Sequence[tuple[BlockId, bytes | memoryview, bytes]], *, cached: bool = False
    ) -> list[Location]:
        """Write records (block, data, checksums) behind the last, with `cached` into the page cache. `OSError` leaves
        the region as it was. There must be room for them.

        A direct write takes whole disk blocks, and the next one begins at another: bytes that readers have mapped are
        never written again, which would take the page from under them.
        """
        buffers: list[bytes | memoryview] = [self._head]
        locations, at = [], self.end
        for block, data, sums in records:
            header = layout.record_header(block, len(data), sums)
            locations.append(Location(self.container, at + len(header), len(data), sums))
            padding = -len(data) % layout.RECORD_ALIGN
            buffers += (header, data, _PADDING[:padding])
            at += len(header) + len(data) + padding
        start = self.end - len(self._head)
        if self._bounce is None:
            _write_buffers(self._fd, buffers, start)
        else:
            if cached:
                with _not_direct(self._fd):
                    _write_buffers(self._fd, buffers, start)
            else:
                self._bounce.write(self._fd, buffers, start)
            at = aligned(at, layout.DISK_BLOCK)
        self._head, self.end = b"", at
        return locations

    def seal(self) -> None:
        """End the region: give back the room behind the last record."""
        os.ftruncate(self._fd, self.end)
        os.close(self._fd)


def record_bytes(length: int) -> int:
    """Return how much a block of this length takes in a region."""
    return aligned(aligned(layout.RECORD.size + 8 * layout.granules(length)) + length)


def open_region_size(budget_bytes: int) -> int:
    """Return the size of a tier's regions: small enough to evict in small steps, large enough to have few."""
    return min(256 * 2**20, max(2**20, aligned(budget_bytes // 64, layout.DISK_BLOCK)))


def scan_region(path: Path) -> Iterator[tuple[BlockId, Location]]:
    """Yield the records of a region up to the first bytes that are none. Payloads are not read: readers verify them."""
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
                if at % layout.DISK_BLOCK == 0:
                    return
                at = aligned(at, layout.DISK_BLOCK)  # the next write began at another disk block
                continue
            sums = head[layout.RECORD.size : layout.RECORD.size + sums_bytes]
            offset = at + aligned(layout.RECORD.size + sums_bytes)
            if offset + length > size or len(sums) != sums_bytes:
                return
            yield BlockId(block), Location(container, offset, length, sums)
            at = aligned(offset + length)


def region_dataset(path: Path) -> str | None:
    """Return the data set that a region was filled for; None if the file is no region."""
    with path.open("rb") as file:
        head = file.read(layout.REGION_HEADER_BYTES)
    if len(head) < layout.REGION_HEADER_BYTES or not head.startswith(_REGION_MAGIC):
        return None
    return head[len(_REGION_MAGIC) :].rstrip(b"\0").decode("utf-8", "replace")


def write_object_block(
    path: Path, size_bytes: int, offset: int, data: bytes | memoryview, bounce: Bounce | None
) -> None:
    """Write one block, at an aligned offset, of an object file, which is made sparse at its full size on first use."""
    fd, direct = _create(path, bounce, 0)
    try:
        if os.fstat(fd).st_size < size_bytes:
            os.ftruncate(fd, size_bytes)
        if direct is None:
            _write_buffers(fd, [data], offset)
            return
        direct.write(fd, [data], offset)
        if offset + len(data) == size_bytes:
            os.ftruncate(fd, size_bytes)  # the last disk block was filled up
    finally:
        os.close(fd)


def _create(path: Path, bounce: Bounce | None, more_flags: int) -> tuple[int, Bounce | None]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | more_flags
    if bounce is not None and not bounce.refused:
        try:
            return os.open(path, flags | os.O_DIRECT, _MODE), bounce
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            bounce.refused = True
            if flags & os.O_EXCL:
                path.unlink(missing_ok=True)  # some file systems refuse after they have made it
    return os.open(path, flags, _MODE), None


@contextlib.contextmanager
def _not_direct(fd: int) -> Iterator[None]:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    try:
        yield
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _write_buffers(fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
    """Write buffers one behind the other, some hundred with each call."""
    for first in range(0, len(buffers), _IOV_MAX):
        part = buffers[first : first + _IOV_MAX]
        total = sum(map(len, part))
        written = os.pwritev(fd, part, offset)
        if written < total:  # the disk is about to be full
            write_all(fd, memoryview(b"".join(part))[written:], offset + written)
        offset += total


def object_blocks(index: Index, obj: ObjectId, size_bytes: int, tier: int = _SSD) -> list[Location] | None:
    """Return the places of a large object's blocks, if all are in one object file of a tier. `ValueError` for an index
    value that is none."""
    if size_bytes <= BLOCK_BYTES:
        return None
    found = []
    for number in range(block_count(size_bytes)):
        value = dict(index.find(block_id(obj, number))).get(tier)
        if value is None:
            return None
        found.append(unpack_location(value))
    container = found[0].container
    as_expected = all(
        (block.container, block.offset, block.length) == (container, at * BLOCK_BYTES, block_length(size_bytes, at))
        for at, block in enumerate(found)
    )
    return found if as_expected and container & OBJECT_FILE else None


def open_object_file(folder: Path, blocks: Sequence[Location]) -> int | None:
    """Return a descriptor, the caller's, of the object file of these blocks, whose every byte has just been verified by
    its checksum. None if there is none, whatever the reason."""
    path = folder / container_name(blocks[0].container)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # evicted this moment
        return None
    try:
        sound = os.fstat(fd).st_size == blocks[-1].offset + blocks[-1].length
        size = -(-len(blocks) // _VERIFYING_THREADS)
        spans = [blocks[first : first + size] for first in range(0, len(blocks), size)]
        if sound and all(map_in_threads(lambda span: _intact_in(fd, span), spans, threads=_VERIFYING_THREADS)):
            return fd
        log.warning("%s is not what the index says: its blocks are read one by one", path)
    except OSError as exc:
        log.warning("%s cannot be read: %s", path, exc)
    os.close(fd)
    return None


def _intact_in(fd: int, span: Sequence[Location]) -> bool:
    """Tell whether blocks that follow each other have their checksums. They are not mapped: a file that is cut short
    must not be fatal."""
    # An open file of its own: the kernel reads ahead by what was read of one last. Where that began small it reads into
    # ever larger folios: whoever maps the file has 800 page faults a GiB then, after reads of whole blocks 3,500.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    buffer = memoryview(bytearray(GRANULE_BYTES))

    def is_intact(offset: int, length: int, sums: bytes) -> bool:
        return os.preadv(own, [buffer[:length]], offset) == length and checksums(buffer[:length]) == sums

    try:
        return all(
            is_intact(block.offset + at, min(GRANULE_BYTES, block.length - at), block.sums[8 * number : 8 * number + 8])
            for block in span
            for number, at in enumerate(range(0, block.length, GRANULE_BYTES))
        )
    finally:
        os.close(own)
