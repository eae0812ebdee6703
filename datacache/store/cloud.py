"""`gs://` and `az://`: stores that obstore serves alone. And whole objects of S3, put through obstore.

obstore is the fast way (no Python in the transfer, buffers without a copy; puts take a third or a quarter of the time
of requests of our own), within its limits. Keys are exact except where object_store's paths are not: keys with empty,
`.` or `..` segments are refused, and a folder marker is known as one only by what follows it in the listing (else it is
listed as an empty object without the slash). Its runtime does not survive `fork()`: in a child forked after the first
call it raises, where obstore would hang. Any thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import obstore
from obstore.exceptions import BaseError

from datacache.core.concurrency import PerProcess
from datacache.core.errors import DatacacheError, ObjectNotFoundError, StoreError, StoreUnavailableError
from datacache.core.ids import ObjectRef
from datacache.settings import Settings
from datacache.store.base import ObjectInfo
from datacache.store.checksums import Checksum
from datacache.store.errors import expect_etag, expect_s3_not_found, expect_same, from_obstore, plain_etag

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta, UpdateVersion
    from obstore.store import ObjectStore as Driver

_PART_BYTES, _PARTS_AT_A_TIME = 16 * 2**20, 4


class ObstoreStore:
    """One bucket or container behind an obstore driver."""

    sorted_listing = True

    def __init__(self, url: str, make_driver: Callable[[], Driver], *, node_wide: bool = True) -> None:
        self.url, self.node_wide = url, node_wide
        self._driver = PerProcess(make_driver)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """See `ObjectStore`."""
        self._expect_usable()
        pages = obstore.list(self._driver.get(), prefix.rstrip("/") or None, offset=start_after or None)
        last: ObjectMeta | None = None  # held back until it is known what follows it
        with _translated(self.url, self.url):
            for metas in pages:
                page: list[ObjectInfo] = []
                for meta in metas:
                    if last is not None:
                        page.append(_info(last, meta["path"]))
                    last = meta
                if page:
                    yield page
        if last is not None:
            yield [_info(last, "")]

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`."""
        with self._exact(key):
            return _info(obstore.head(self._driver.get(), key), "", key=key)

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes | memoryview:
        """See `ObjectStore`."""
        if start >= stop:
            return b""
        options: GetOptions = {}
        if ref.version:
            options["version"] = ref.version
        elif ref.etag:
            options["if_match"] = f'"{ref.etag}"' if not ref.etag.startswith("W/") else ref.etag
        if (start, stop) != (0, ref.size_bytes):
            options["range"] = (start, stop)
        with self._exact(ref.key):
            result = obstore.get(self._driver.get(), ref.key, options=options)
            expect_same(ref, etag=plain_etag(result.meta["e_tag"]), size_bytes=result.meta["size"])
            data = result.bytes()
        if len(data) != stop - start:
            raise StoreUnavailableError(
                f"{ref.url}: the answer has {len(data):,} bytes, not {stop - start:,}", url=ref.url
            )
        return memoryview(data)

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        """See `ObjectStore`: none is known."""
        return None

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore`."""
        with self._exact(key):
            obstore.put(self._driver.get(), key, data, use_multipart=False)
        return self.head(key)

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        """See `ObjectStore`: in parts, some at a time."""
        with self._exact(key):
            obstore.put(self._driver.get(), key, path, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_A_TIME)
        return self.head(key)

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        with self._exact(key), suppress(FileNotFoundError):
            obstore.delete(self._driver.get(), key)

    def close(self) -> None:
        """See `ObjectStore`."""
        self._driver.take()

    def _exact(self, key: str) -> AbstractContextManager[None]:
        """Have obstore's errors within be ours, of a key that it asks for exactly."""
        self._expect_usable()
        url = f"{self.url}/{key}"
        if not addressable(key):
            raise ObjectNotFoundError(f"{url!r}: this store's driver cannot address such a key", url=url)
        return _translated(url, self.url)

    def _expect_usable(self) -> None:
        if not usable_here():
            raise StoreError(
                f"{self.url} cannot be reached from a forked process",
                url=self.url,
                hint="Start workers with the 'spawn' or 'forkserver' method, or read through the daemon.",
            )


def open_cloud_store(url: str, settings: Settings) -> ObstoreStore:
    """Open a Google bucket or an Azure container, with credentials from the standard variables (`GOOGLE_*`,
    `AZURE_*`)."""

    def make_driver() -> Driver:
        from obstore.store import from_url

        options: dict[str, Any] = {
            "client_options": {"timeout": timedelta(seconds=settings.store_timeout_s)},
            "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        }
        with _translated(url, url):
            driver: Driver = from_url(url, **options)
        return driver

    return ObstoreStore(url, make_driver)


def _info(meta: ObjectMeta, following: str, *, key: str = "") -> ObjectInfo:
    key = key or meta["path"]
    if not meta["size"] and following.startswith(f"{key}/"):
        key += "/"  # the marker of a folder, whose slash object_store has dropped
    mtime_ns = int(meta["last_modified"].timestamp() * 1_000_000) * 1000
    return ObjectInfo(key, meta["size"], mtime_ns, plain_etag(meta["e_tag"]), meta["version"] or "")


@contextmanager
def _translated(url: str, store: str, endpoint: str = "") -> Iterator[None]:
    """Raise obstore's errors within as errors of ours."""
    try:
        yield
    except DatacacheError:  # some are OSErrors, too
        raise
    except (BaseError, OSError, ValueError) as exc:
        raise from_obstore(exc, url, store=store, endpoint=endpoint) from exc


# What object_store's Path changes or refuses: empty, '.' and '..' segments (and so a slash at either end),
# control characters; and what is no UTF-8.
_INEXACT = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|[\x00-\x1f\x7f\ud800-\udfff]")

_runtime_pid = 0


def addressable(key: str) -> bool:
    """Tell whether obstore asks for exactly this key."""
    return _INEXACT.search(key) is None


def usable_here() -> bool:
    """Tell whether this process may call obstore.

    Its runtime's threads exist only in the process of the first call: in a child forked after that, calls
    hang or crash. Asking claims the runtime for this process.
    """
    global _runtime_pid
    pid = os.getpid()
    if _runtime_pid == 0:
        _runtime_pid = pid
    return _runtime_pid == pid


class Putter:
    """Writes through one obstore driver."""

    def __init__(self, driver: Driver, store_url: str, *, endpoint: str = "") -> None:
        self._driver = driver
        self._url = store_url
        self._endpoint = endpoint

    def put(
        self, key: str, data: bytes | memoryview, metadata: Mapping[str, str], *, replaces: str | None
    ) -> tuple[str, str]:
        """Store an object by one PUT; return its ETag ('' where the answer has none) and version. `replaces` is None
        for anything, '' for nothing, or what If-Match is to say, exactly. `metadata` in ASCII."""
        mode: Literal["create", "overwrite"] | UpdateVersion = "overwrite"
        if replaces is not None:
            mode = {"e_tag": replaces} if replaces else "create"
        try:
            done = obstore.put(self._driver, key, data, attributes=dict(metadata), mode=mode, use_multipart=False)
        except (BaseError, OSError, ValueError) as exc:
            if "ETag Header missing" in str(exc):  # of an answer that is good otherwise
                return "", ""
            error = from_obstore(exc, f"{self._url}/{key}", store=self._url, endpoint=self._endpoint)
            if isinstance(error, ObjectNotFoundError):
                expect_s3_not_found(404, str(exc), f"{self._url}/{key}")
            raise error from exc
        version = done["version"] or ""
        return plain_etag(done["e_tag"]), "" if version == "null" else version

    def etag(self, key: str) -> str:
        """Return the object's ETag by one HEAD, '' if it is not there, also where the bucket is not."""
        url = f"{self._url}/{key}"
        with _translated(url, self._url, self._endpoint), suppress(FileNotFoundError):
            return expect_etag(obstore.head(self._driver, key)["e_tag"], url)
        return ""
