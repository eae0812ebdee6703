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
from datacache.store.environments import Environments
from datacache.store.retry import MetPeers, RetryingStore, Silence
from datacache.store.sources import AllowedStore, SourceRules
from datacache.store.urls import split_url


def open_store(store_url: str, settings: Settings) -> ObjectStore:
    """The store of a URL as `split_url` gives it, retrying while it is unavailable (`store_timeout_s`).

    Raises `UsageError` for a URL nobody serves; whether the bucket is there shows at the first request.
    """
    return _retrying(open_backend(store_url, settings), settings)


class Stores:
    """The stores one owner reads from, each opened when it is first asked for. Safe from several threads.

    `own` are stores that no URL leads to, such as the catalog's packs: by their URL, how each is made. With `rules`
    others give only what these allow. `environments` count instead of the process's own variables.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        own: Mapping[str, Callable[[], ObjectStore]] | None = None,
        rules: SourceRules | None = None,
        environments: Environments | None = None,
    ) -> None:
        self._settings = settings
        self._own = own or {}
        self._rules = rules
        self._environments = environments
        self._open: dict[str, ObjectStore] = {}

    def get(self, store_url: str) -> ObjectStore:
        """The store of a URL, always the same one; raises as `open_store`."""
        store = self._open.get(store_url)
        if store is None:
            make = self._own.get(store_url)
            store = self._open.setdefault(store_url, make() if make else self._open_one(store_url))
        return store

    def _open_one(self, store_url: str) -> ObjectStore:
        if self._rules is None:
            backend = open_backend(store_url, self._settings, environments=self._environments)
            return _retrying(backend, self._settings, self._environments)
        if not self._rules.allow_some(store_url):
            self._rules.refuse(store_url)
        backend = open_backend(store_url, self._settings, rules=self._rules, environments=self._environments)
        return _retrying(AllowedStore(backend, self._rules), self._settings, self._environments)

    def silences(self) -> list[Silence]:
        """Those that do not answer."""
        opened = [store for store in list(self._open.values()) if isinstance(store, RetryingStore)]
        return [silence for store in opened if (silence := store.silence()) is not None]

    def close(self) -> None:
        """Close them all."""
        for store in self._open.values():
            store.close()


def open_backend(
    store_url: str,
    settings: Settings,
    *,
    rules: SourceRules | None = None,
    environments: Environments | None = None,
) -> ObjectStore:
    """Return the same without retries. With `rules` no link of a folder leads out of what they allow. `environments`
    count instead of the process's own variables.
    """
    url, _ = split_url(store_url if store_url != "file://" else "file:///")
    scheme = url.partition("://")[0]
    if scheme == "file":
        from datacache.store.local.store import LocalStore

        return LocalStore(rules)
    if scheme == "memory":
        from datacache.store.memory import MemoryStore

        return MemoryStore(url)
    if scheme == "s3":
        from datacache.store.s3.access import access_stamp, resolve_access, store_options
        from datacache.store.s3.store import S3Store

        store_options(url, settings)  # a wrong one is told now
        find = partial(resolve_access, url, settings, environments)
        stamp = partial(access_stamp, url, settings, environments)
        return S3Store(
            url,
            find,
            stamp,
            generation=lambda: environments.generation if environments else 0,
            check_md5=settings.check_md5,
        )
    if scheme in ("gs", "az", "abfs", "abfss"):
        from datacache.store.cloud import open_cloud_store

        return open_cloud_store(url, settings)
    from datacache.store.filesystems import FsspecStore

    return FsspecStore(url)


def _retrying(store: ObjectStore, settings: Settings, environments: Environments | None = None) -> RetryingStore:
    def peer() -> str:
        return endpoint_of(store.url, settings, environments) or store.url

    # What an administrator set up reads while nobody is looking: it waits for every store. Others wait for those that
    # their home has met, so that a person who mistypes an endpoint is told soon.
    patient = settings.daemon == "external" or store.url.startswith(("file:", "memory:"))
    return RetryingStore(store, settings.store_timeout_s, peer=peer, met=None if patient else MetPeers(settings.home))


def endpoint_of(store_url: str, settings: Settings, environments: Environments | None = None) -> str:
    """Which of several servers a bucket's URL means here: the endpoint's URL; '' where the URL alone says it."""
    if not store_url.startswith("s3://"):
        return ""
    from datacache.store.s3.access import endpoint_of

    return endpoint_of(store_url, settings, environments=environments)


def open_bucket_backend(store_url: str, settings: Settings, *, probe_prefix: str = "") -> Bucket:
    """A live bucket, read and written, without retries. `UsageError` for a URL that only snapshots are made of.

    `probe_prefix` ('' or ending in `/`) is where a store may be tried out, on an object of our own.
    """
    url, _ = split_url(store_url if store_url != "file://" else "file:///")
    scheme = url.partition("://")[0]
    if scheme == "file":
        from datacache.store.local.bucket import LocalBucket

        return LocalBucket()
    if scheme == "s3":
        from datacache.store.s3.access import access_stamp, resolve_access, store_options
        from datacache.store.s3.bucket import S3Bucket

        store_options(url, settings)  # a wrong one is told now
        find, stamp = partial(resolve_access, url, settings), partial(access_stamp, url, settings)
        return S3Bucket(url, find, stamp, probe_prefix=probe_prefix)
    raise UsageError(
        f"{url} cannot be written as a live bucket",
        hint="Read-write mounts are for s3:// buckets and for folders (file://).",
    )
