"""Stores behind fsspec: every URL without a backend of its own (`https://`, `sftp://`, `hdfs://`, …), and s3fs.

An object is identified by the best of what its file system gives: an ETag, a checksum, a modification time. Where it
gives none, only the size is compared. Listings are not sorted. Any thread; a forked child opens a file system of its
own. Web servers are read within bounds (`_BoundedResponse`); of other file systems fsspec's driver decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import fsspec

from datacache.core.concurrency import PerProcess
from datacache.core.errors import (
    ObjectNotFoundError,
    SettingsError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    UsageError,
)
from datacache.core.ids import ObjectRef
from datacache.settings import StoreOptions
from datacache.store.answers import MAX_DOCUMENT_BYTES
from datacache.store.base import ObjectInfo
from datacache.store.checksums import Checksum
from datacache.store.errors import credentials_hint, expect_same, from_connection, from_oserror, from_status, plain_etag

_PAGE_KEYS = 1000
_TIMES = ("mtime", "LastModified", "Last-Modified", "last_modified", "modified", "modifiedTime", "updated", "created")
_ETAGS = ("ETag", "etag", "e_tag", "Content-MD5", "Digest", "md5Hash", "checksum", "sha256", *_TIMES, "uid")
"""Names under which file systems give what changes with the bytes, the best first."""


class FsspecStore:
    """Everything under one scheme and authority, through fsspec's file system of that scheme.

    `options` go to the file system. Raises `UsageError` where fsspec knows no such scheme.
    """

    sorted_listing = False

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.url = url
        scheme = url.partition("://")[0]
        self.node_wide = scheme != "memory"
        self._web = scheme in ("http", "https")
        self._has_folders = scheme != "s3"
        self._options = options or (_WEB_OPTIONS if self._web else {})
        try:
            fsspec.get_filesystem_class(scheme)
        except ValueError as exc:
            raise UsageError(f"nothing serves {scheme}:// URLs", hint="Known: s3, gs, az, file, https, …") from exc
        except ImportError as exc:
            raise UsageError(f"{scheme}:// URLs need a package that is not installed", hint=str(exc)) from exc
        self._fs: PerProcess[Any] = PerProcess(self._open)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """See `ObjectStore`. Folders are listed one by one; an empty folder is listed as a marker."""
        top = self._path(prefix)
        page: list[ObjectInfo] = []

        def key_of(path: str) -> str:
            return prefix + path.removeprefix(top.rstrip("/")).lstrip("/")

        with self._translated(f"{self.url}/{prefix}"):
            for folder, folders, files in self._fs.get().walk(top, detail=True, on_error="raise"):
                for info in files.values():
                    key = key_of(info["name"])
                    # Web servers list names only: a request for each tells the rest.
                    page.append(self.head(key) if info.get("size") is None else _info(key, info))
                below = key_of(folder).rstrip("/") + "/"
                if not files and not folders and below not in ("/", prefix):
                    page.append(ObjectInfo(below, 0, 0, ""))
                while len(page) >= _PAGE_KEYS:
                    yield page[:_PAGE_KEYS]
                    page = page[_PAGE_KEYS:]
        if page:
            yield page

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`."""
        return _info(key, self._look(key))

    def _look(self, key: str) -> dict[str, Any]:
        url = f"{self.url}/{key}"
        with self._translated(url):
            found: dict[str, Any] = self._fs.get().info(self._path(key))
        if found.get("type") == "directory":
            raise ObjectNotFoundError(f"{url} is a folder", url=url)
        if found.get("size") is None:
            raise StoreError(f"{url}: the store does not say how large it is", url=url)
        return found

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes:
        """See `ObjectStore`. A look at the object after the read notices a change before or during it."""
        if start >= stop:
            return b""
        path = self._path(ref.key)
        with self._translated(ref.url):
            fs = self._fs.get()
            if self._web:  # its `cat_file` takes a whole body into memory where the server ignores the range
                with fs.open(path, "rb", cache_type="none", size=ref.size_bytes) as file:
                    file.seek(start)
                    data = bytes(file.read(stop - start))
            else:
                data = bytes(fs.cat_file(path, start=start, end=stop))
        now = self._look(ref.key)
        # A listing may know less of an object than a look at it: the recorded ETag has to be one of those seen now.
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
        with self._translated(f"{self.url}/{key}"):
            self._with_folder(key).pipe_file(self._path(key), data)
        return self.head(key)

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        """See `ObjectStore`, as far as the file system keeps unfinished files out of sight."""
        with self._translated(f"{self.url}/{key}"):
            self._with_folder(key).put_file(str(path), self._path(key))
        return self.head(key)

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        try:
            with self._translated(f"{self.url}/{key}"):
                self._fs.get().rm_file(self._path(key))
        except ObjectNotFoundError:
            pass

    def close(self) -> None:
        """See `ObjectStore`. fsspec closes its connections itself."""
        self._fs.take()

    def _open(self) -> Any:
        options = {"use_listings_cache": False, "skip_instance_cache": True, **self._options}
        with self._translated(self.url):
            fs, _ = fsspec.core.url_to_fs(self.url + "/", **options)
        if hasattr(fs, "retries"):
            fs.retries = 1  # s3fs's own: `RetryingStore` decides alone
        return fs

    def _with_folder(self, key: str) -> Any:
        """Return the file system, with the folder that the key lies in."""
        fs = self._fs.get()
        if self._has_folders:
            fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)
        return fs

    def _path(self, key: str) -> str:
        return str(self._fs.get()._strip_protocol(f"{self.url}/{key}"))  # noqa: SLF001 - fsspec's documented hook

    @contextmanager
    def _translated(self, url: str) -> Iterator[None]:
        """Raise the driver's errors within as errors of ours."""
        try:
            yield
        except (StoreError, SettingsError):
            raise
        except Exception as exc:
            raise self._error(exc, url) from exc

    def _error(self, exc: Exception, url: str) -> Exception:
        status, name = getattr(exc, "status", None), type(exc).__name__
        if isinstance(status, int):
            return from_status(status, "", url, store=self.url)
        if isinstance(exc, FileNotFoundError):
            return ObjectNotFoundError(f"{url} is not there", url=url)
        denied = isinstance(exc, PermissionError) and not self._has_folders
        if denied or any(word in name for word in ("Credential", "Token", "Profile")):
            return StoreAccessError(f"{url}: access is denied ({name})", url=url, hint=credentials_hint(self.url))
        connection = isinstance(exc, (ConnectionError, TimeoutError, EOFError))
        if connection or any(word in name for word in ("Connect", "Timeout", "Client", "Payload")):
            return from_connection(f"{name} {exc}", url, endpoint=self.url)
        if isinstance(exc, OSError):
            return from_oserror(exc, url)
        return StoreError(f"{url}: the store's driver failed ({name})", url=url)


def open_s3fs(url: str, options: StoreOptions, timeout_s: float) -> FsspecStore:
    """Return a bucket behind s3fs, which logs in by itself. What `options` leave out aiobotocore finds."""
    chosen = {
        "endpoint_url": options.endpoint_url,
        "key": options.access_key_id,
        "secret": options.secret_access_key,
        "token": options.session_token,
        "profile": options.profile,
        "anon": options.anonymous,
        "client_kwargs": {"region_name": options.region} if options.region else {},
    }
    config = {
        "s3": {"addressing_style": "path"},
        "connect_timeout": min(10.0, timeout_s),
        "read_timeout": timeout_s,
        "retries": {"total_max_attempts": 1},
        # Older gateways refuse the checksums that the SDK sends by default.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    return FsspecStore(url, {"config_kwargs": config, **{name: value for name, value in chosen.items() if value}})


def _info(key: str, found: dict[str, Any]) -> ObjectInfo:
    etag = next(iter(_etags(found)), "")
    time = next((found[name] for name in _TIMES if found.get(name)), None)
    return ObjectInfo(key, int(found["size"]), _nanoseconds(time), etag)


def _etags(found: dict[str, Any]) -> list[str]:
    """Return all that tells this object from a later one, the best first. The same file system gives times as text,
    floats or `datetime`s, depending on the call."""
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


class _BoundedResponse(aiohttp.ClientResponse):
    """An answer of at most the range that was asked for, or of a page's size: fsspec reads folders' pages whole."""

    async def read(self) -> bytes:
        """Return the body as it came. `StoreError` for one that is too large or packed."""
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


_WEB_OPTIONS = {
    "client_kwargs": {"response_class": _BoundedResponse, "auto_decompress": False},
    "headers": {"Accept-Encoding": "identity"},
}
