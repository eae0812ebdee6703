"""Memory that begins at a page: a direct write (O_DIRECT) takes it as it lies. Any thread."""

from __future__ import annotations

import mmap

_LARGE_BYTES = 2**18
"""Below, zeroing a buffer, or copying it for a direct write, costs less than what avoids it."""


def page_buffer(size_bytes: int) -> memoryview:
    """Return memory to be filled. A large one begins at a page, and may hold anything: zeroing 4 MiB takes 0.2 ms."""
    if size_bytes < _LARGE_BYTES:
        return memoryview(bytearray(size_bytes))
    import numpy as np  # a mount's worker has none until it reads something large past the daemon

    array = np.empty(size_bytes + mmap.PAGESIZE, np.uint8)
    start = -array.ctypes.data % mmap.PAGESIZE
    return array.data[start : start + size_bytes]


def begins_at_page(buffer: bytes | memoryview) -> bool:
    """Tell whether a large buffer begins at a page. Of small ones no."""
    if len(buffer) < _LARGE_BYTES:
        return False
    import numpy as np

    return bool(np.frombuffer(buffer, np.uint8).ctypes.data % mmap.PAGESIZE == 0)
