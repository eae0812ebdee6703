"""Bodies of requests that are read while they are sent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datacache.core.errors import StoreError
from datacache.store.bodies import CHUNK_BYTES, BodyFile, chunks, read_fully
from tests.conformance.bucket import ReadTwice


def test_a_body_as_a_file_is_read_in_pieces_and_again() -> None:
    data = os.urandom(CHUNK_BYTES * 2 + 5)
    file = BodyFile(ReadTwice(data))
    for _ in range(2):
        assert file.tell() == 0
        pieces = []
        while piece := file.read(2**20):
            assert len(piece) <= CHUNK_BYTES
            pieces.append(bytes(piece))
        assert b"".join(pieces) == data
        assert file.read() == b""
        assert file.seek(0) == 0
    assert bytes(file.read(3)) == data[:3]
    assert file.tell() == 3


def test_an_empty_body_has_no_pieces() -> None:
    assert list(chunks(ReadTwice(b""))) == []
    assert BodyFile(ReadTwice(b"")).read() == b""


def test_bytes_are_one_piece() -> None:
    assert [bytes(piece) for piece in chunks(b"abc")] == [b"abc"]


def test_what_reading_raised_is_kept() -> None:
    body = ReadTwice(b"abc")
    body.error = StoreError("gone")
    file = BodyFile(body)
    with pytest.raises(StoreError, match="gone"):
        file.read()
    assert file.error is body.error


def test_a_file_is_read_to_the_end_of_the_buffer_or_its_own(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    fd, buffer = os.open(path, os.O_RDONLY), memoryview(bytearray(6))
    assert read_fully(fd, buffer, 2) == 6
    assert bytes(buffer) == b"234567"
    assert read_fully(fd, buffer, 7) == 3
    assert bytes(buffer[:3]) == b"789"
    os.close(fd)
