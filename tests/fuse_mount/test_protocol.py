"""Layouts against the sizes of include/uapi/linux/fuse.h."""

from __future__ import annotations

import struct

import pytest

from fuse_mount.kernel import protocol


def test_messages_have_the_kernels_sizes() -> None:
    encoder = protocol.Encoder(protocol.Ownership(1, 2, 0o022))
    assert len(encoder.attributes(3, False, 4, 5)) == 88
    assert len(encoder.attr_out(3, False, 4, 5)) == 16 + 88
    assert len(encoder.entry_out(3, False, 4, 5)) == 40 + 88 == len(protocol.NEGATIVE_ENTRY)
    assert len(protocol.encode_statfs(1, 1)) == 80
    assert len(protocol.encode_resend()) == 16


def test_init_is_answered_with_what_both_know() -> None:
    flags = protocol.ASYNC_READ | protocol.NO_OPEN_SUPPORT | 1 << 30
    header = struct.pack("<IIQQIIIHH", 104, protocol.INIT, 77, 0, 0, 0, 0, 0, 0)
    answer = protocol.encode_init(protocol.decode_init(header + struct.pack("<IIII48x", 7, 31, 131072, flags)))
    length, error, unique, major, minor, _, agreed = struct.unpack_from("<IiQIIII", answer)
    assert (length, error, unique, major, minor) == (len(answer), 0, 77, 7, 31)
    assert len(answer) == 16 + 64
    assert agreed == protocol.ASYNC_READ | protocol.NO_OPEN_SUPPORT
    with pytest.raises(ValueError, match="INIT"):
        protocol.decode_init(bytes(104))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 255])
def test_directory_records_are_padded_to_eight_bytes(length: int) -> None:
    record = protocol.dirent_packer(length)(1, 2, length, protocol.DT_REG, b"n" * length)
    assert len(record) == protocol.dirent_bytes(length)
    assert len(record) % 8 == 0
    assert struct.unpack_from("<QQII", record) == (1, 2, length, protocol.DT_REG)
    assert record[24:].rstrip(b"\0") == b"n" * length


def test_a_time_before_1970_is_shown_as_1970() -> None:
    attributes = protocol.Encoder(protocol.Ownership(0, 0, 0)).attributes(3, False, 4, -1)
    assert struct.unpack_from("<QQQQQQ", attributes)[3:] == (0, 0, 0)
