"""Objects read whole in parts, and checked as a whole: stores can check only what comes in one piece.

Used by whoever takes over all bytes of objects: copying, imports, verifying. Any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from datacache.core.objects import ObjectRef
from datacache.store.base import ObjectStore
from datacache.store.checksums import TALLY, Checksum, Running, md5_etags, mismatch
from datacache.store.retry import DAMAGED_AGAIN

_log = logging.getLogger(__name__)


def read_whole(
    store: ObjectStore,
    ref: ObjectRef,
    part_bytes: int,
    *,
    before_part: Callable[[], None] = lambda: None,
) -> bytes:
    """Return all bytes of an object, read so many at a time. `before_part` may raise, to stop.

    `ChecksumError` where they stay others than the store's checksum is of; else the errors of `ObjectStore.read`. One
    request more for an object of several parts.
    """
    if ref.size_bytes <= part_bytes:
        before_part()
        return bytes(store.read(ref, 0, ref.size_bytes))  # the store checks it
    expected = store.checksum(ref)
    for again in range(DAMAGED_AGAIN, -1, -1):
        parts: list[bytes | memoryview] = []

        def keep(part: bytes | memoryview, parts: list[bytes | memoryview] = parts) -> None:
            before_part()
            parts.append(part)

        found = digest_of(store, ref, part_bytes, expected, keep)
        if expected is None:
            TALLY.checked("none")
            break
        if found == expected.value:
            if expected.algorithm == "md5":
                md5_etags(ref.store).proven = True
            TALLY.checked(expected.algorithm)
            break
        if expected.algorithm == "md5" and md5_etags(ref.store).meet(ref, expected.value, found):
            TALLY.checked("none")
            break
        TALLY.failed(expected.algorithm)
        error = mismatch(ref, expected, found)
        if not again:
            raise error
        _log.warning("%s (it is read again)", error.message)
    return b"".join(parts)


def digest_of(
    store: ObjectStore,
    ref: ObjectRef,
    part_bytes: int,
    expected: Checksum | None,
    keep: Callable[[bytes | memoryview], None],
) -> bytes:
    """Read an object in parts, give each to `keep`, and return the checksum of all of it, of the expected kind; b''
    where none is expected."""
    running = Running(expected.algorithm) if expected is not None else None
    for start in range(0, ref.size_bytes, part_bytes):
        part = store.read(ref, start, min(start + part_bytes, ref.size_bytes))
        keep(part)
        if running is not None:
            running.update(part)
    return running.digest() if running is not None else b""
