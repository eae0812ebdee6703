"""`gs://` and `az://`: stores that obstore serves alone.

Keys are exact except where object_store's paths are not: keys with empty, `.` or `..` segments are refused,
and a folder marker is known as one only by what follows it in the listing (else it is listed as an empty
object without the slash). Not usable in a child forked after the first call: it raises, where obstore would
hang. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore

from datacache.core.concurrency import PerProcess
from datacache.core.errors import ObjectNotFoundError, StoreError
from datacache.core.objects import ObjectRef
from datacache.settings import Settings
from datacache.store.base import ObjectInfo
from datacache.store.checksums import Checksum
from datacache.store.errors import from_obstore, plain_etag
from datacache.store.obstore_get import ERRORS, Getter, addressable, usable_here

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Driver


_PART_BYTES, _PARTS_AT_A_TIME = 16 * 2**20, 4


class ObstoreStore:
    """One bucket or container behind an obstore driver."""

    sorted_listing = True

    def __init__(
        self, url: str, make_driver: Callable[[], Driver], *, node_wide: bool = True, quoted: bool = True
    ) -> None:
        self.url = url
        self.node_wide = node_wide
        self._driver = PerProcess(make_driver)
        self._getter = PerProcess(lambda: Getter(self._driver.get(), url, quoted=quoted))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """See `ObjectStore`."""
        self._expect_usable()
        pages = obstore.list(self._driver.get(), prefix.rstrip("/") or None, offset=start_after or None)
        last: ObjectMeta | None = None  # held back until it is known what follows it
        try:
            for metas in pages:
                page: list[ObjectInfo] = []
                for meta in metas:
                    if last is not None:
                        page.append(_info(last, meta["path"]))
                    last = meta
                if page:
                    yield page
        except ERRORS as exc:
            raise from_obstore(exc, self.url, store=self.url) from exc
        if last is not None:
            yield [_info(last, "")]

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`."""
        self._expect_exact(key)
        try:
            return _info(obstore.head(self._driver.get(), key), "", key=key)
        except ERRORS as exc:
            raise from_obstore(exc, f"{self.url}/{key}", store=self.url) from exc

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes | memoryview:
        """See `ObjectStore`."""
        if start >= stop:
            return b""
        self._expect_exact(ref.key)
        return self._getter.get().get(ref, start, stop)

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        """See `ObjectStore`: none is known."""
        return None

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore`."""
        self._expect_exact(key)
        try:
            obstore.put(self._driver.get(), key, data, use_multipart=False)
        except ERRORS as exc:
            raise from_obstore(exc, f"{self.url}/{key}", store=self.url) from exc
        return self.head(key)

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        """See `ObjectStore`: in parts, some at a time."""
        self._expect_exact(key)
        try:
            obstore.put(self._driver.get(), key, path, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_A_TIME)
        except ERRORS as exc:
            raise from_obstore(exc, f"{self.url}/{key}", store=self.url) from exc
        return self.head(key)

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        self._expect_exact(key)
        try:
            obstore.delete(self._driver.get(), key)
        except FileNotFoundError:
            pass
        except ERRORS as exc:
            raise from_obstore(exc, f"{self.url}/{key}", store=self.url) from exc

    def close(self) -> None:
        """See `ObjectStore`."""
        self._getter.take()
        self._driver.take()

    def _expect_exact(self, key: str) -> None:
        self._expect_usable()
        if not addressable(key):
            url = f"{self.url}/{key}"
            raise ObjectNotFoundError(f"{url!r}: this store's driver cannot address such a key", url=url)

    def _expect_usable(self) -> None:
        if not usable_here():
            raise StoreError(
                f"{self.url} cannot be reached from a forked process",
                url=self.url,
                hint="Start workers with the 'spawn' or 'forkserver' method, or read through the daemon.",
            )


def open_cloud_store(url: str, settings: Settings) -> ObstoreStore:
    """A Google bucket or an Azure container, with credentials from the standard variables (`GOOGLE_*`,
    `AZURE_*`)."""

    def make_driver() -> Driver:
        from obstore.store import from_url

        options: dict[str, Any] = {
            "client_options": {"timeout": timedelta(seconds=settings.store_timeout_s)},
            "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        }
        try:
            driver: Driver = from_url(url, **options)
        except ERRORS as exc:
            raise from_obstore(exc, url, store=url) from exc
        return driver

    return ObstoreStore(url, make_driver)


def _info(meta: ObjectMeta, following: str, *, key: str = "") -> ObjectInfo:
    key = key or meta["path"]
    if not meta["size"] and following.startswith(f"{key}/"):
        key += "/"  # the marker of a folder, whose slash object_store has dropped
    mtime_ns = int(meta["last_modified"].timestamp() * 1_000_000) * 1000
    return ObjectInfo(key, meta["size"], mtime_ns, plain_etag(meta["e_tag"]), meta["version"] or "")
