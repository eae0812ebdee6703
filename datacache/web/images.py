"""Make the pictures of pages out of what the cache has verified: small ones as JPEG, whole ones as they are.

No picture is decoded before its header says that it is none too large, and few are at a time (`app`). Any thread.
"""

from __future__ import annotations

import io
from typing import Final

from datacache import api
from datacache.core.concurrency import LastLoaded
from datacache.core.errors import BrokenImageError

SMALL: Final = (240, 180)
"""Width and height of a tile at most, in pixels."""
LARGE: Final = (2000, 2000)
_MOST_PIXELS: Final = 64_000_000
"""The most pixels that are decoded; a JPEG is decoded smaller, and may have four times as many."""
_MOST_BYTES: Final = 256 * 2**20
_KEPT_BYTES: Final = 32 * 2**20
_TYPES: Final = {"jpeg": "image/jpeg", "png": "image/png", "gif": "image/gif", "webp": "image/webp", "bmp": "image/bmp"}
"""Formats that every browser shows. The rest is sent as JPEG."""


class Thumbnails:
    """Small pictures, and those made last."""

    def __init__(self) -> None:
        self._kept: LastLoaded[tuple[str, str], bytes] = LastLoaded(_KEPT_BYTES)

    def get(self, snapshot: api.Snapshot, path: str) -> bytes:
        """Return a JPEG. `BrokenImageError` for whatever cannot be decoded, or is too large; the store's errors."""
        return self._kept.get((snapshot.ref, path), lambda: _smaller(_read(snapshot, path), SMALL))


def whole(snapshot: api.Snapshot, path: str) -> tuple[bytes, str]:
    """Return an image as a browser shows it, and its type. The errors of `Thumbnails.get`."""
    data = _read(snapshot, path)
    kind = _TYPES.get(api.read_header(data).format)
    return (_smaller(data, LARGE), "image/jpeg") if kind is None else (data, kind)


def _read(snapshot: api.Snapshot, path: str) -> bytes:
    size_bytes = snapshot.stat(path).size_bytes
    if size_bytes > _MOST_BYTES:
        raise BrokenImageError(f"the image has {size_bytes:,} bytes, more than are shown")
    return snapshot.read(path)


def _smaller(data: bytes, size: tuple[int, int]) -> bytes:
    header = api.read_header(data)
    if header.width * header.height > _MOST_PIXELS * (4 if header.format == "jpeg" else 1):
        raise BrokenImageError(f"the image has {header.width} x {header.height} pixels, more than are decoded")
    out = io.BytesIO()
    api.thumbnail(data, *size).save(out, "JPEG", quality=80)
    return out.getvalue()
