"""A store that keeps objects of this process in memory, under exact keys of any form. For tests only.

All stores of one name share their objects. A forked child starts with its parent's objects and goes its own way. Any
thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pytest

from datacache.core.errors import ObjectNotFoundError
from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.checksums import Checksum
from datacache.store.errors import expect_same

_PAGE_KEYS = 1000
_objects: dict[str, dict[str, tuple[ObjectInfo, bytes]]] = {}


class MemoryStore:
    """One name's objects. Single dict operations, which the interpreter makes atomic, so there is no lock to
    fork."""

    node_wide = False
    sorted_listing = True

    def __init__(self, url: str) -> None:
        self.url = url
        self._objects = _objects.setdefault(url, {})

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """See `ObjectStore`. What is put while it runs may or may not be in it."""
        after = _order(start_after)
        keys = sorted((k for k in list(self._objects) if k.startswith(prefix)), key=_order)
        keys = [k for k in keys if not start_after or _order(k) > after]
        for first in range(0, len(keys), _PAGE_KEYS):
            page = [self._objects[k][0] for k in keys[first : first + _PAGE_KEYS] if k in self._objects]
            if page:
                yield page

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._get(key)[0]

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes:
        """See `ObjectStore`."""
        if start >= stop:
            return b""
        info, data = self._get(ref.key)
        expect_same(ref, etag=info.etag, size_bytes=info.size_bytes)
        return data[start:stop]

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        """See `ObjectStore`: none is known."""
        return None

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore`."""
        data = bytes(data)
        info = ObjectInfo(key, len(data), time.time_ns(), blake2b(data, digest_size=16).hexdigest())
        self._objects[key] = (info, data)
        return info

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        """See `ObjectStore`."""
        return self.put(key, path.read_bytes())

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        self._objects.pop(key, None)

    def close(self) -> None:
        """The objects stay: they belong to the process."""

    def _get(self, key: str) -> tuple[ObjectInfo, bytes]:
        try:
            return self._objects[key]
        except KeyError:
            raise ObjectNotFoundError(f"{self.url}/{key} is not there", url=f"{self.url}/{key}") from None


def serve_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `MemoryStore` serve `memory://` in place of fsspec, which cannot hold keys such as `a//b`."""
    monkeypatch.setattr("datacache.store.filesystems.FsspecStore", MemoryStore)


def _order(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")
