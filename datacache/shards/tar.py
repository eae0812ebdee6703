"""A shard as a tar: members one after the other, the same bytes for the same members.

ustar headers as the standard library writes them; names that they cannot hold (above 100 bytes, not ASCII) have a pax
header in front, which every tar of today reads. No owner, no time. Used by the builder. Pure functions, any thread.
"""

from __future__ import annotations

import tarfile
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
