"""Uploads in parts into a folder: what `file://` has in place of an object store's multipart uploads.

An upload is a hidden file in the target's folder, `.datacache-put-ID`, into which the parts are written at their
offsets, and beside it `.datacache-put-ID.parts`: a line with the target's name (JSON), then a line `NUMBER SIZE ETAG`
for each part that is durable. Both survive crashes; listings pass them over. Any thread, several on one upload.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import xxhash

from datacache.core.disk import make_folders, sync_folder, write_all
from datacache.core.errors import ObjectNotFoundError, StoreError
from datacache.store.bodies import Body, chunks
from datacache.store.bucket import Part
from datacache.store.local_files import set_metadata, settle, translated
from datacache.store.local_walk import TEMPORARY

_UPLOAD = re.compile(rb"[0-9a-f]{16}")
_SUFFIX = b".parts"


class LocalUploads:
    """Uploads by the path of their target. `url` is for messages."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes

    def begin(self, target: bytes, metadata: Mapping[str, str], url: str) -> str:
        """The id of a new upload."""
        upload = secrets.token_hex(8)
        path = _path(target, upload, url)
        name = os.path.basename(target).decode("utf-8", "surrogateescape")
        with translated(url):
            make_folders(os.path.dirname(path))
            with open(path, "xb") as file:
                set_metadata(file.fileno(), metadata, "", url)
            with open(path + _SUFFIX, "xb") as file:
                file.write(json.dumps(name).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            sync_folder(os.path.dirname(path))
        return upload

    def put_part(self, target: bytes, upload: str, number: int, data: bytes | memoryview | Body, url: str) -> Part:
        """Write a part, durably."""
        path = _path(target, upload, url)
        if len(data) > self._part_bytes:
            raise StoreError(f"{url}: a part has {len(data):,} bytes, more than {self._part_bytes:,}", url=url)
        digest, offset = xxhash.xxh3_64(), (number - 1) * self._part_bytes
        with translated(url):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for chunk in chunks(data):
                    digest.update(chunk)
                    write_all(fd, chunk, offset)
                    offset += len(chunk)
                os.fdatasync(fd)
            finally:
                os.close(fd)
            part = Part(number, len(data), digest.hexdigest())
            fd = os.open(path + _SUFFIX, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(fd, f"{part.number} {part.size_bytes} {part.etag}\n".encode())
                os.fdatasync(fd)
            finally:
                os.close(fd)
        return part

    def list_parts(self, target: bytes, upload: str, url: str) -> list[Part]:
        """The parts that are there, by number."""
        with translated(url), open(_path(target, upload, url) + _SUFFIX, "rb") as file:
            lines = [line.decode().split() for line in file.readlines()[1:] if line.endswith(b"\n")]
        parts = {int(line[0]): Part(int(line[0]), int(line[1]), line[2]) for line in lines if len(line) == 3}
        return [parts[number] for number in sorted(parts)]

    def finish(self, target: bytes, upload: str, parts: Sequence[Part], metadata: Mapping[str, str], url: str) -> None:
        """Make the hidden file what the target is to be."""
        path = _path(target, upload, url)
        there = {part.number: part for part in self.list_parts(target, upload, url)}
        full = all(part.size_bytes == self._part_bytes for part in parts[:-1])
        if not full or [there.get(number) for number in range(1, len(parts) + 1)] != list(parts):
            raise StoreError(f"{url}: these are not the parts that were uploaded", url=url)
        with translated(url):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.ftruncate(fd, sum(part.size_bytes for part in parts))
                settle(fd, metadata, url)
            finally:
                os.close(fd)

    def take(self, target: bytes, upload: str, url: str) -> os.stat_result:
        """Give the hidden file the target's name."""
        path = _path(target, upload, url)
        with translated(url):
            found = os.stat(path)
            os.replace(path, target)
            with suppress(FileNotFoundError):
                os.unlink(path + _SUFFIX)
            sync_folder(os.path.dirname(target))
        return found

    def abort(self, target: bytes, upload: str, url: str) -> None:
        """Remove what there is of it."""
        with suppress(ObjectNotFoundError):
            path = _path(target, upload, url)
            for name in (path, path + _SUFFIX):
                with translated(url), suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(name)

    def find(self, folder: bytes) -> Iterator[tuple[bytes, str, float]]:
        """All uploads under a folder: target, id, and when it began (s since the epoch). Links are not followed."""
        start = TEMPORARY.encode()
        for place, _, names in os.walk(folder):
            for name in names:
                upload = name.removeprefix(start).removesuffix(_SUFFIX)
                if name != start + upload + _SUFFIX or _UPLOAD.fullmatch(upload) is None:
                    continue
                with suppress(OSError, ValueError), open(os.path.join(place, name), "rb") as file:
                    target = str(json.loads(file.readline())).encode("utf-8", "surrogateescape")
                    began = os.stat(os.path.join(place, start + upload)).st_ctime
                    yield os.path.join(place, target), upload.decode(), began


def _path(target: bytes, upload: str, url: str) -> bytes:
    if _UPLOAD.fullmatch(upload.encode("ascii", "replace")) is None:
        raise ObjectNotFoundError(f"{url}: there is no upload {upload}", url=url)
    return os.path.join(os.path.dirname(target), TEMPORARY.encode() + upload.encode())
