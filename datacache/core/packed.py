"""Bytes packed with zstd, and unpacked in memory whose size is known before.

What a database gives back may be anything. A few kilobytes can be packed zeros without end, and the decompressor takes
as much memory as the frame asks for; so the size that a frame declares is looked at first. Pure functions, any thread.
"""

from __future__ import annotations

import zstandard

from datacache.core.errors import UsageError

MOST_BYTES = 256 * 2**20
"""The most that is packed into one piece, and taken out of one."""


def pack(raw: bytes) -> bytes:
    """The packed bytes; `UsageError` where `unpack` would refuse them."""
    if len(raw) > MOST_BYTES:
        raise UsageError(f"{len(raw):,} bytes are too many for one piece of the catalog ({MOST_BYTES:,})")
    return zstandard.compress(raw, 3)


def unpack(packed: bytes) -> bytes:
    """The bytes that were packed. `ValueError` if they are not what `pack` gives, or more than it takes."""
    try:
        declared = zstandard.get_frame_parameters(packed).content_size
        if declared == zstandard.CONTENTSIZE_UNKNOWN:
            raise ValueError("it does not say how large it is")
        if declared > MOST_BYTES:
            raise ValueError(f"it would take {declared:,} bytes, and {MOST_BYTES:,} are the most")
        return zstandard.decompress(packed)
    except zstandard.ZstdError as exc:
        raise ValueError(str(exc)) from exc
