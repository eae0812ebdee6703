"""Every URL that has no backend of its own, through fsspec: `https://`, `sftp://`, `hdfs://`, `smb://`, ….

An object is known by whichever of an ETag, a checksum or a modification time the file system gives; where it
gives none only the size is checked. Listings are not sorted. Any thread; a forked child opens a file
system of its own.

Web servers through fsspec: their answers are read within bounds.

fsspec takes a page that lists a folder whole into memory, unpacked. Used by `fsspec_backend` for `http` and `https`
only. fsspec's own loop calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import fsspec

from datacache.core.concurrency import PerProcess
from datacache.core.errors import ObjectNotFoundError, StoreError, StoreUnavailableError, UsageError
from datacache.core.ids import ObjectRef
from datacache.store.answers import MAX_DOCUMENT_BYTES
from datacache.store.base import ObjectInfo
from datacache.store.checksums import Checksum
from datacache.store.errors import expect_same, from_connection, from_oserror, from_status, plain_etag

_PAGE_KEYS = 1000
_TIMES = (
    "mtime",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "modified",
    "modifiedTime",
    "updated",
    "created",
)
_ETAGS = ("ETag", "etag", "e_tag", "Content-MD5", "Digest", "md5Hash", "checksum", "sha256", *_TIMES, "uid")
"""What file systems call the thing that changes with the bytes, the best first."""


class FsspecStore:
    """Everything under one scheme and authority. `UsageError` where fsspec knows no such scheme."""

    node_wide = True
    sorted_listing = False

    def __init__(self, url: str) -> None:
        self.url = url
        scheme = url.partition("://")[0]
        try:
            fsspec.get_filesystem_class(scheme)
        except ValueError as exc:
            raise UsageError(f"nothing serves {scheme}:// URLs", hint="Known: s3, gs, az, file, https, …") from exc
        except ImportError as exc:
            raise UsageError(f"{scheme}:// URLs need a package that is not installed", hint=str(exc)) from exc
        self._fs: PerProcess[Any] = PerProcess(self._open)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """See `ObjectStore`, folder by folder; an empty folder is listed as a marker."""
        top = self._path(prefix)
        page: list[ObjectInfo] = []
        try:
            for folder, folders, files in self._fs.get().walk(top, detail=True, on_error="raise"):
                found = [self._listed(self._key(info["name"], top, prefix), info) for info in files.values()]
                below = self._key(folder, top, prefix).rstrip("/") + "/"
                if not found and not folders and below not in ("/", prefix):
                    found = [ObjectInfo(below, 0, 0, "")]
                page += found
                while len(page) >= _PAGE_KEYS:
                    yield page[:_PAGE_KEYS]
                    page = page[_PAGE_KEYS:]
        except Exception as exc:
            raise self._translated(exc, f"{self.url}/{prefix}") from exc
        if page:
            yield page

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._info(key, self._look(key))

    def _look(self, key: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._fs.get().info(self._path(key))
        except Exception as exc:
            raise self._translated(exc, f"{self.url}/{key}") from exc
        if found.get("type") == "directory":
            raise ObjectNotFoundError(f"{self.url}/{key} is a folder", url=f"{self.url}/{key}")
        if found.get("size") is None:
            url = f"{self.url}/{key}"
            raise StoreError(f"{url}: the store does not say how large it is", url=url)
        return found

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes:
        """See `ObjectStore`. The object is looked at after the read, so a change before or during it is
        noticed."""
        if start >= stop:
            return b""
        path = self._path(ref.key)
        try:
            fs = self._fs.get()
            # Not cat_file: over HTTP that takes a whole body into memory where the server ignores the range.
            with fs.open(path, "rb", cache_type="none", size=ref.size_bytes) as file:
                file.seek(start)
                data = bytes(file.read(stop - start))
        except Exception as exc:
            raise self._translated(exc, ref.url) from exc
        now = self._look(ref.key)
        # A listing may know less than a look at one object: what it recorded has to be among what is seen
        # now.
        etags = _etags(now)
        etag = ref.etag if ref.etag in etags else (etags[0] if etags else "")
        expect_same(ref, etag=etag, size_bytes=int(now["size"]))
        if len(data) != stop - start:
            raise StoreUnavailableError(
                f"{ref.url}: the store gave {len(data):,} of {stop - start:,} bytes", url=ref.url
            )
        return data

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        """See `ObjectStore`: none is known."""
        return None

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore`."""
        path = self._path(key)
        try:
            fs = self._fs.get()
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.pipe_file(path, data)
        except Exception as exc:
            raise self._translated(exc, f"{self.url}/{key}") from exc
        return self.head(key)

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        """See `ObjectStore`, as far as the file system keeps what is not finished out of sight."""
        target = self._path(key)
        try:
            fs = self._fs.get()
            fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(path), target)
        except Exception as exc:
            raise self._translated(exc, f"{self.url}/{key}") from exc
        return self.head(key)

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        try:
            self._fs.get().rm_file(self._path(key))
        except FileNotFoundError:
            pass
        except Exception as exc:
            raise self._translated(exc, f"{self.url}/{key}") from exc

    def close(self) -> None:
        """fsspec keeps its file systems itself."""
        self._fs.take()

    def _open(self) -> Any:
        options: dict[str, Any] = {}
        if self.url.startswith(("http://", "https://")):
            options = OPTIONS
        try:
            fs, _ = fsspec.core.url_to_fs(self.url + "/", use_listings_cache=False, skip_instance_cache=True, **options)
        except Exception as exc:
            raise self._translated(exc, self.url) from exc
        return fs

    def _path(self, key: str) -> str:
        return str(self._fs.get()._strip_protocol(f"{self.url}/{key}"))  # noqa: SLF001 - fsspec's documented hook

    def _key(self, name: str, top: str, prefix: str) -> str:
        """The key of a path that lies under the path `top` of `prefix`."""
        below = name.removeprefix(top.rstrip("/")).lstrip("/")
        return prefix + below

    def _listed(self, key: str, found: dict[str, Any]) -> ObjectInfo:
        # Web servers list names only; the rest takes a request for each.
        return self.head(key) if found.get("size") is None else self._info(key, found)

    def _info(self, key: str, found: dict[str, Any]) -> ObjectInfo:
        etag = next(iter(_etags(found)), "")
        time = next((found[name] for name in _TIMES if found.get(name)), None)
        return ObjectInfo(key, int(found["size"]), _nanoseconds(time), etag)

    def _translated(self, exc: Exception, url: str) -> Exception:
        if isinstance(exc, StoreError):
            return exc
        status = getattr(exc, "status", None)
        if isinstance(status, int):
            return from_status(status, "", url, store=self.url)
        if isinstance(exc, FileNotFoundError):
            return ObjectNotFoundError(f"{url} is not there", url=url)
        name = type(exc).__name__
        connection = isinstance(exc, (ConnectionError, TimeoutError, EOFError))
        if connection or any(word in name for word in ("Connect", "Timeout", "Client", "Payload")):
            return from_connection(f"{name} {exc}", url, endpoint=self.url)
        if isinstance(exc, OSError):
            return from_oserror(exc, url)
        return StoreError(f"{url}: the store's driver failed ({name})", url=url)


def _etags(found: dict[str, Any]) -> list[str]:
    """All that tells this object from a later one, the best first. Times come as text, floats or
    `datetime`s, of the same file system in different calls."""
    etags = []
    for name in _ETAGS:
        if found.get(name):
            time_ns = _nanoseconds(found[name]) if name in _TIMES else 0
            etags.append(f"{time_ns:x}" if time_ns else plain_etag(str(found[name])))
    return etags


def _nanoseconds(time: Any) -> int:
    if isinstance(time, datetime):
        return round(time.timestamp() * 1_000_000) * 1000
    if isinstance(time, (int, float)):
        return round(time * 1_000_000) * 1000
    try:
        return round(datetime.fromisoformat(str(time)).timestamp() * 1_000_000) * 1000
    except ValueError:
        return 0


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
