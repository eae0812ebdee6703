"""A shard as a tar: members one after the other, the same bytes for the same members.

ustar headers as the standard library writes them; names that they cannot hold (above 100 bytes, not ASCII) have a pax
header in front, which every tar of today reads. No owner, no time. Used by the builder. Pure functions, any thread.

A shard as a TFRecord file, and samples as `tf.train.Example`, without TensorFlow.

A record is the length of its data (8 bytes, little endian), a checksum of these 8 bytes, the data, and a checksum of
it; checksums are CRC-32C, rotated and added to (`tensorflow/core/lib/hash/crc32c.h`, `io/record_writer.cc`). The data
is an `Example` in the wire format of Protocol Buffers (`tensorflow/core/example/example.proto`, `feature.proto`).
Features have the names of the TensorFlow Object Detection API (`research/object_detection/dataset_tools`). Pure
functions, any thread.
"""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Iterable, Sequence
from typing import Final

BLOCK: Final = 512
END: Final = bytes(2 * BLOCK)
"""What ends an archive."""
_MAX_NAME = 100  # ustar's field, without splitting a name in two
_MAX_SIZE = 8**11


def header(name: str, size_bytes: int) -> bytes:
    """What stands in front of a member's bytes: one block, or more with a pax header."""
    info = tarfile.TarInfo(name)
    info.size = size_bytes
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def padding(size_bytes: int) -> bytes:
    """What stands behind them, up to the next block."""
    return bytes(-size_bytes % BLOCK)


def member_bytes(name: str, size_bytes: int) -> int:
    """How much a member takes in the archive, header and padding included."""
    ustar = name.isascii() and len(name) <= _MAX_NAME and size_bytes < _MAX_SIZE
    return (BLOCK if ustar else len(header(name, size_bytes))) + size_bytes + -size_bytes % BLOCK


HEAD_BYTES: Final = 12
FOOT_BYTES: Final = 4
MAX_DATA_BYTES: Final = 2**31 - 1
"""Protocol Buffers read no larger message."""
IMAGE: Final = "image/encoded"
_LENGTH_DELIMITED = 2
_MASK = 0xA282EAD8


# --- records ---------------------------------------------------------------------------------------------------------


def record_head(data_bytes: int) -> bytes:
    """What stands in front of a record's data."""
    length = struct.pack("<Q", data_bytes)
    return length + struct.pack("<I", masked(extend(0, length)))


def record_foot(crc: int) -> bytes:
    """What stands behind it; `crc` is the data's, as `extend` gives it."""
    return struct.pack("<I", masked(crc))


def extend(crc: int, data: bytes) -> int:
    """The CRC-32C of what `crc` (0 at first) is of, and of `data` behind it."""
    from awscrt import checksums

    return int(checksums.crc32c(data, crc))


def masked(crc: int) -> int:
    """A checksum as it is stored."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


# --- examples --------------------------------------------------------------------------------------------------------


def bytes_feature(name: str, values: Iterable[bytes]) -> bytes:
    """A feature of byte strings, as a part of an example's features."""
    return _entry(name, _field(1, b"".join(_field(1, value) for value in values)))


def float_feature(name: str, values: Sequence[float]) -> bytes:
    """A feature of floats (32 bits)."""
    return _entry(name, _field(2, _field(1, struct.pack(f"<{len(values)}f", *values)) if values else b""))


def int64_feature(name: str, values: Sequence[int]) -> bytes:
    """A feature of integers."""
    return _entry(name, _field(3, _field(1, b"".join(map(_varint, values))) if values else b""))


def example_head(features: bytes, image_bytes: int) -> bytes:
    """All of an example but the image's bytes, which follow it and end the example; `features` are the others."""
    value = _tag(1) + _varint(image_bytes)
    value_bytes = len(value) + image_bytes
    bytes_list = _tag(1) + _varint(value_bytes) + value
    feature = _tag(2) + _varint(len(bytes_list) + image_bytes) + bytes_list
    name = _field(1, IMAGE.encode())
    entry = _tag(1) + _varint(len(name) + len(feature) + image_bytes) + name + feature
    return _tag(1) + _varint(len(features) + len(entry) + image_bytes) + features + entry


def _entry(name: str, feature: bytes) -> bytes:
    return _field(1, _field(1, name.encode()) + _field(2, feature))


def _field(number: int, data: bytes) -> bytes:
    return _tag(number) + _varint(len(data)) + data


def _tag(number: int) -> bytes:
    return bytes([number << 3 | _LENGTH_DELIMITED])


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # negative numbers are two's complement of 64 bits
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
