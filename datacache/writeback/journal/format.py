"""The bytes of the journal: segment files of frames of records. Pure; used by `segments.py` and `journal.py` only.

Integers are little endian; checksums are XXH3-64 in its canonical form (8 bytes, big endian). A segment is a header and
frames without gaps. A frame is a group of changes: all of them count or none. What follows the last whole frame of the
newest segment is a torn tail and counts for nothing. In other segments nothing may be missing or damaged up to the end
that the next segment's header tells; what is behind that end was never acknowledged there: it counts for nothing, too.

Segment header, 64 bytes:

     0  8  magic "DCJRNL\\r\\n"
     8  4  version, 1
    12  4  number of the segment, which its name tells, too: `00000001.log`
    16  4  number of the oldest segment that was needed when this one was made
    20  4  zero
    24  8  the journal's id, random: the same in all of its segments
    32  8  nonce, random: no frame of another segment, and none that the blocks held before, is valid here
    40  8  sequence number of the first frame
    48  8  where the segment before ends; 0 for the first one
    56  8  checksum of 0-55

Frame, 40 bytes and the records:

     0  4  magic 89 "JF" 0A
     4  4  bytes of all records
     8  4  how many records: may be none
    12  4  number of the oldest segment that is needed; files before it are left-overs
    16  8  sequence number: one more than that of the frame before, across segments
    24  8  sequence number up to which frames were known to be durable when this one was appended
    32  8  checksum of 0-31 and the records, with (nonce + the frame's offset in the file) mod 2**64 as its seed

Record, 32 bytes, key, header, blob:

     0  8  checksum of all that follows
     8  8  serial: grows with every change; a copy that cleaning made keeps its own, and so its place in the order
    16  4  kind: 1 is a value, 2 a drop (no header, no blob)
    20  4  bytes of the key, UTF-8 with surrogateescape
    24  4  bytes of the header
    28  4  bytes of the blob
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_digest

VERSION = 1
MAX_GROUP_BYTES = 1 << 30  # offsets and lengths are 32 bits where they are kept in memory

_MAGIC = b"DCJRNL\r\n"
FRAME_MAGIC = b"\x89JF\n"
_HEADER = struct.Struct("<8sIIIIQQQQ")
HEADER_BYTES = _HEADER.size + 8
_FRAME = struct.Struct("<4sIIIQQ")
FRAME_BYTES = _FRAME.size + 8
_RECORD = struct.Struct("<QIIII")
RECORD_BYTES = _RECORD.size + 8
_VALUE, _DROP = 1, 2


class SegmentHeader(NamedTuple):
    """The first bytes of a segment."""

    number: int
    first: int
    journal: int
    nonce: int
    sequence: int
    previous_end: int

    def encode(self) -> bytes:
        """Return its bytes."""
        number, first, journal, nonce, sequence, previous_end = self
        head = _HEADER.pack(_MAGIC, VERSION, number, first, 0, journal, nonce, sequence, previous_end)
        return head + xxh3_64_digest(head)


def decode_header(data: bytes) -> SegmentHeader | int | None:
    """Return a header; its version if that is not ours; None if it is none or damaged."""
    head = data[: _HEADER.size]
    if len(data) < HEADER_BYTES or head[:8] != _MAGIC or xxh3_64_digest(head) != data[_HEADER.size : HEADER_BYTES]:
        return None
    _, version, number, first, _, *rest = _HEADER.unpack(head)
    return SegmentHeader(number, first, *rest) if version == VERSION else int(version)


class FrameHead(NamedTuple):
    """The first bytes of a frame."""

    payload_bytes: int
    records: int
    first: int
    sequence: int
    synced: int


def encode_frame(head: FrameHead, records: Sequence[bytes], seed: int) -> bytes:
    """Return the bytes of a frame's head, which the records follow."""
    packed = _FRAME.pack(FRAME_MAGIC, *head)
    checksum = xxh3_64(packed, seed & 0xFFFFFFFFFFFFFFFF)
    for record in records:
        checksum.update(record)
    return packed + checksum.digest()


def decode_frame(data: bytes) -> FrameHead | None:
    """Return a frame's head by its magic; nothing is checked yet."""
    if len(data) < FRAME_BYTES or data[:4] != FRAME_MAGIC:
        return None
    return FrameHead(*_FRAME.unpack_from(data)[1:])


def frame_is_whole(data: bytes, payload: bytes, seed: int) -> bool:
    """Return whether head and records are what was written."""
    checksum = xxh3_64(data[: _FRAME.size], seed & 0xFFFFFFFFFFFFFFFF)
    checksum.update(payload)
    return checksum.digest() == data[_FRAME.size : FRAME_BYTES]


class Record(NamedTuple):
    """One record's parts, as lengths: to be cut out of its bytes only when somebody wants them."""

    serial: int
    is_drop: bool
    key_bytes: int
    header_bytes: int
    blob_bytes: int

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all of it."""
        return RECORD_BYTES + self.key_bytes + self.header_bytes + self.blob_bytes

    @property
    def header_at(self) -> int:
        """Return where the header begins."""
        return RECORD_BYTES + self.key_bytes

    @property
    def blob_at(self) -> int:
        """Return where the blob begins."""
        return RECORD_BYTES + self.key_bytes + self.header_bytes


def encode_record(serial: int, key: bytes, header: bytes | None, blob: bytes | memoryview) -> bytes:
    """Return a record's bytes; no header: a drop."""
    if header is None:
        body = _RECORD.pack(serial, _DROP, len(key), 0, 0) + key
    else:
        size = blob.nbytes if isinstance(blob, memoryview) else len(blob)
        body = b"".join((_RECORD.pack(serial, _VALUE, len(key), len(header), size), key, header, blob))
    return xxh3_64_digest(body) + body


def decode_record(data: bytes, at: int = 0) -> Record:
    """Return the parts of the record at an offset; nothing is checked."""
    serial, kind, key_bytes, header_bytes, blob_bytes = _RECORD.unpack_from(data, at + 8)
    return Record(serial, kind == _DROP, key_bytes, header_bytes, blob_bytes)


def record_is_of(data: bytes, key: bytes) -> bool:
    """Tell whether these bytes begin with a record of this key, up to its blob at least, whatever its checksum says."""
    if len(data) < RECORD_BYTES:
        return False
    record = decode_record(data)
    return len(data) >= record.blob_at and data[RECORD_BYTES : record.header_at] == key


def record_is_whole(data: bytes, key: bytes) -> bool:
    """Tell whether these bytes are one record, as it was written, of this key."""
    whole = record_is_of(data, key) and decode_record(data).size_bytes == len(data)
    return whole and xxh3_64_digest(memoryview(data)[8:]) == data[:8]


def split_records(payload: bytes, count: int) -> Iterator[tuple[int, Record]]:
    """Yield offset and record of a frame's records. ValueError if they are not what the frame says."""
    at = 0
    for _ in range(count):
        if at + RECORD_BYTES > len(payload):
            raise ValueError("records beyond the end of their frame")
        record = decode_record(payload, at)
        yield at, record
        at += record.size_bytes
    if at != len(payload):
        raise ValueError("records do not fill their frame")


def encode_key(key: str) -> bytes:
    """Return a key's bytes."""
    return key.encode("utf-8", "surrogateescape")


def decode_key(data: bytes) -> str:
    """Return the key of these bytes."""
    return data.decode("utf-8", "surrogateescape")
