"""Manifests of made-up files, for the tests of what recognises and pairs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import BlobId, Entry, Source
from datacache.manifest.reader import Manifest


class Folder(dict[bytes, bytes]):
    """Files and their bytes, with a manifest of them."""

    def __init__(self, files: Mapping[str, str | bytes] | Iterable[str]) -> None:
        pairs = files.items() if isinstance(files, Mapping) else ((path, b"") for path in files)
        for path, data in pairs:
            self[path.encode("utf-8", "surrogateescape")] = data.encode() if isinstance(data, str) else data
        blobs: dict[BlobId, bytes] = {}
        builder = ManifestBuilder([Source("memory://test", "")], blobs.update)
        for path in sorted(self):
            builder.add(Entry(path, len(self[path]), 0))
        id, _ = builder.finish()
        self.manifest = Manifest.open(id, lambda ids: {id: blobs[id] for id in ids if id in blobs})

    def read(self, path: bytes, limit: int | None = None, /) -> bytes:
        return self[path][:limit]
