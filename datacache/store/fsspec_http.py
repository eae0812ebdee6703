"""Web servers through fsspec: their answers are read within bounds.

fsspec takes a page that lists a folder whole into memory, unpacked. Used by `fsspec_backend` for `http` and `https`
only. fsspec's own loop calls it.
"""

from __future__ import annotations

import re

import aiohttp

from datacache.core.errors import StoreError
from datacache.store.answers import MAX_DOCUMENT_BYTES

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_PIECE = 1 << 16


class BoundedResponse(aiohttp.ClientResponse):
    """An answer that is read whole: as much as the range that was asked for, or as a page may have."""

    async def read(self) -> bytes:
        """The body, which nothing unpacks. `StoreError` for one that is too large or packed."""
        if self._body is not None:
            return self._body
        url = str(self.url.with_query(None))
        if self.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            self.close()
            raise StoreError(f"{url}: the server sends it in an encoding nobody asked for", url=url)
        asked = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
        limit = int(asked[2]) - int(asked[1]) + 1 if asked and self.status == 206 else MAX_DOCUMENT_BYTES
        parts: list[bytes] = []
        size = 0
        async for part in self.content.iter_chunked(_PIECE):
            size += len(part)
            if size > limit:
                self.close()
                raise StoreError(f"{url}: the answer is larger than it may be ({limit:,} bytes)", url=url)
            parts.append(part)
        self._body = b"".join(parts)
        return self._body


OPTIONS = {
    "client_kwargs": {"response_class": BoundedResponse, "auto_decompress": False},
    "headers": {"Accept-Encoding": "identity"},
}
"""The options that fsspec's file system for the web is opened with."""
