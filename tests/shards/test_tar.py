"""Tars, read by the standard library."""

from __future__ import annotations

import io
import tarfile

import pytest

from datacache.shards import records as tar

NAMES = ["a.jpg", "x/" * 49 + "a", "n" * 100, "n" * 101, "f/" * 200 + "a.jpg", "é.jpg", "日本/語.jpg"]


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 100_000])
def test_the_standard_library_reads_every_member_with_its_name(size: int) -> None:
    archive = b""
    for name in NAMES:
        before = len(archive)
        archive += tar.header(name, size) + bytes(size) + tar.padding(size)
        assert len(archive) - before == tar.member_bytes(name, size)
    with tarfile.open(fileobj=io.BytesIO(archive + tar.END)) as opened:
        found = opened.getmembers()
        assert [info.name for info in found] == NAMES
        for info in found:
            assert (info.size, info.uid, info.gid, info.mode, info.mtime) == (size, 0, 0, 0o644, 0)
            assert archive[info.offset_data : info.offset_data + size] == bytes(size)


def test_a_member_above_eight_gib_has_a_header() -> None:
    size = 9 * 2**30
    head = tar.header("large.bin", size)
    assert tarfile.TarInfo.frombuf(head[-512:], "utf-8", "strict").name == "large.bin"
    assert tar.member_bytes("large.bin", size) == len(head) + size
