"""The one place that knows which backend serves which URL.

`open_store` is called by whoever needs one store, such as the snapshot builder; `Stores` is held by who reads from
several again and again: the daemon, a reader. Opening connects to nothing and imports only the backend it needs.
Whoever opens a store owns it and closes it. After `fork()` a store may be used on: children connect anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from datacache.core.errors import UsageError
from datacache.settings import Settings
from datacache.store.base import ObjectStore
from datacache.store.bucket import Bucket
from datacache.store.retry import RetryingStore
from datacache.store.urls import split_url


def open_store(store_url: str, settings: Settings) -> ObjectStore:
    """The store of a URL as `split_url` gives it, retrying while it is unavailable (`store_timeout_s`).

    Raises `UsageError` for a URL nobody serves; whether the bucket is there shows at the first request.
    """
    return RetryingStore(open_backend(store_url, settings), settings.store_timeout_s)


class Stores:
    """The stores one owner reads from, each opened when it is first asked for. Safe from several threads.

    `own` are stores that no URL leads to, such as the catalog's packs: by their URL, how each is made.
    """

    def __init__(self, settings: Settings, *, own: Mapping[str, Callable[[], ObjectStore]] | None = None) -> None:
        self._settings = settings
        self._own = own or {}
        self._open: dict[str, ObjectStore] = {}

    def get(self, store_url: str) -> ObjectStore:
        """The store of a URL, always the same one; raises as `open_store`."""
        store = self._open.get(store_url)
        if store is None:
            make = self._own.get(store_url)
            store = self._open.setdefault(store_url, make() if make else open_store(store_url, self._settings))
        return store

    def close(self) -> None:
        """Close them all."""
        for store in self._open.values():
            store.close()


def open_backend(store_url: str, settings: Settings) -> ObjectStore:
    """The same without retries."""
    url, _ = split_url(store_url if store_url != "file://" else "file:///")
    scheme = url.partition("://")[0]
    if scheme == "file":
        from datacache.store.local import LocalStore

        return LocalStore()
    if scheme == "memory":
        from datacache.store.memory import MemoryStore

        return MemoryStore(url)
    if scheme == "s3":
        from datacache.store.s3 import S3Store
        from datacache.store.s3_access import access_stamp, resolve_access, store_options

        store_options(url, settings)  # a wrong one is told now
        return S3Store(url, partial(resolve_access, url, settings), partial(access_stamp, url, settings))
    if scheme in ("gs", "az", "abfs", "abfss"):
        from datacache.store.obstore_backend import open_cloud_store

        return open_cloud_store(url, settings)
    from datacache.store.fsspec_backend import FsspecStore

    return FsspecStore(url)


def endpoint_of(store_url: str, settings: Settings) -> str:
    """Which of several servers a bucket's URL means here: the endpoint's URL; '' where the URL alone says it."""
    if not store_url.startswith("s3://"):
        return ""
    from datacache.store.s3_access import endpoint_of

    return endpoint_of(store_url, settings)


def open_bucket_backend(store_url: str, settings: Settings, *, probe_prefix: str = "") -> Bucket:
    """A live bucket, read and written, without retries. `UsageError` for a URL that only snapshots are made of.

    `probe_prefix` ('' or ending in `/`) is where a store may be tried out, on an object of our own.
    """
    url, _ = split_url(store_url if store_url != "file://" else "file:///")
    scheme = url.partition("://")[0]
    if scheme == "file":
        from datacache.store.local_bucket import LocalBucket

        return LocalBucket()
    if scheme == "s3":
        from datacache.store.s3_access import access_stamp, resolve_access, store_options
        from datacache.store.s3_bucket import S3Bucket

        store_options(url, settings)  # a wrong one is told now
        find, stamp = partial(resolve_access, url, settings), partial(access_stamp, url, settings)
        return S3Bucket(url, find, stamp, probe_prefix=probe_prefix)
    raise UsageError(
        f"{url} cannot be written as a live bucket",
        hint="Read-write mounts are for s3:// buckets and for folders (file://).",
    )
