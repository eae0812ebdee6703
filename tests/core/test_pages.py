"""Memory that begins at a page."""

from __future__ import annotations

import mmap

import pytest

from datacache.core.pages import begins_at_page, page_buffer


@pytest.mark.parametrize("size_bytes", [2**18, 2**22 - 1, 2**22])
def test_a_large_buffer_begins_at_a_page_and_can_be_filled_to_its_end(size_bytes):
    buffer = page_buffer(size_bytes)
    buffer[:] = bytes(range(256)) * (size_bytes // 256) + bytes(size_bytes % 256)
    assert (len(buffer), buffer[255]) == (size_bytes, 255)
    assert begins_at_page(buffer)
    assert begins_at_page(buffer.toreadonly())
    assert not begins_at_page(buffer[1:])


def test_other_memory_does_not_count():
    assert page_buffer(100) == bytes(100)
    assert not begins_at_page(b"small")
    assert not begins_at_page(memoryview(mmap.mmap(-1, 2**20))[8:])
