"""Opening stores: the one place that knows which backend serves which URL.

`open_store` is for one store, such as the one that a snapshot is made from; `Stores` is for readers of several: the
daemon, a reader. Opening connects to nothing and imports only the backend that it needs. The caller that opens a store
closes it. After `fork()` a store may be used on: children connect anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from datacache.core.errors import UsageError
from datacache.settings import Settings, StoreOptions
from datacache.store.base import ObjectStore
from datacache.store.bucket import Bucket
from datacache.store.credentials import Environments
from datacache.store.retry import MetAddresses, RetryingStore, Silence
from datacache.store.sources import AllowedStore, SourceRules
from datacache.store.urls import split_url


def open_store(store_url: str, settings: Settings) -> ObjectStore:
    """Open the store of a URL as `split_url` gives it. It retries while unavailable, for `store_timeout_s`.

    Raises `UsageError` for a URL that nothing serves. The first request tells whether the bucket is there.
    """
    return _retrying(open_backend(store_url, settings), settings)


class Stores:
    """The stores that one owner reads from, each opened when it is first asked for. Any thread.

    `own` makes stores that no URL leads to, such as the catalog's packs, by their URL. `rules` restrict what the others
    give. `environments` replace the process's own variables.
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
        """Return the store of a URL, always the same one; raises as `open_store`."""
        store = self._open.get(store_url)
        if store is None:
            make = self._own.get(store_url)
            store = self._open.setdefault(store_url, make() if make else self._open_one(store_url))
        return store

    def _open_one(self, store_url: str) -> ObjectStore:
        rules = self._rules
        if rules is not None and not rules.allow_some(store_url):
            rules.refuse(store_url)
        backend = open_backend(store_url, self._settings, rules=rules, environments=self._environments)
        allowed = backend if rules is None else AllowedStore(backend, rules)
        return _retrying(allowed, self._settings, self._environments)

    def silences(self) -> list[Silence]:
        """Return the stores that do not answer."""
        opened = [store for store in list(self._open.values()) if isinstance(store, RetryingStore)]
        return [silence for store in opened if (silence := store.silence()) is not None]

    def close(self) -> None:
        """Close all stores."""
        for store in self._open.values():
            store.close()


def open_backend(
    store_url: str, settings: Settings, *, rules: SourceRules | None = None, environments: Environments | None = None
) -> ObjectStore:
    """Open a store without retries. With `rules`, no link of a folder leads out of what they allow. `environments`
    replace the process's own variables."""
    url, scheme = _split(store_url)
    if scheme == "file":
        from datacache.store.local.store import LocalStore

        return LocalStore(rules)
    if scheme == "s3":
        from datacache.store.s3.store import S3Store

        options, ways = _s3(url, settings, environments)
        if options is not None and options.backend == "s3fs":
            from datacache.store.filesystems import open_s3fs

            return open_s3fs(url, options, settings.store_timeout_s)
        generation = (lambda: environments.generation) if environments else (lambda: 0)
        return S3Store(url, *ways, generation=generation, check_md5=settings.check_md5)
    if scheme in ("gs", "az", "abfs", "abfss"):
        from datacache.store.cloud import open_cloud_store

        return open_cloud_store(url, settings)
    from datacache.store.filesystems import FsspecStore

    return FsspecStore(url)


def open_bucket_backend(store_url: str, settings: Settings, *, probe_prefix: str = "") -> Bucket:
    """Open a live bucket, read and written, without retries. `UsageError` for a URL that serves snapshots only.

    `probe_prefix` ('' or ending in `/`) is where a store may be tried out, on an object of our own.
    """
    url, scheme = _split(store_url)
    if scheme == "file":
        from datacache.store.local.bucket import LocalBucket

        return LocalBucket()
    hint = "Read-write mounts are for s3:// buckets and for folders (file://)."
    if scheme == "s3":
        from datacache.store.s3.bucket import S3Bucket

        options, ways = _s3(url, settings)
        if options is None or not options.backend:
            return S3Bucket(url, *ways, probe_prefix=probe_prefix)
        hint = f"Take backend = {options.backend!r} out of [stores.{options.name}] to write it."
    raise UsageError(f"{url} cannot be written as a live bucket", hint=hint)


def endpoint_of(store_url: str, settings: Settings, environments: Environments | None = None) -> str:
    """Return which of several servers a bucket's URL means here: the endpoint's URL; '' where the URL alone says it."""
    if not store_url.startswith("s3://"):
        return ""
    from datacache.store.s3.access import endpoint_of

    return endpoint_of(store_url, settings, environments=environments)


def _split(store_url: str) -> tuple[str, str]:
    url, _ = split_url(store_url if store_url != "file://" else "file:///")
    return url, url.partition("://")[0]


def _s3(url: str, settings: Settings, environments: Environments | None = None) -> tuple[StoreOptions | None, Any]:
    """Return a bucket's named store, and the two functions that find the ways to it and tell when others are found."""
    from datacache.store.s3.access import access_stamp, resolve_access, store_options

    options = store_options(url, settings)  # a wrong one is told now
    find = partial(resolve_access, url, settings, environments)
    return options, (find, partial(access_stamp, url, settings, environments))


def _retrying(store: ObjectStore, settings: Settings, environments: Environments | None = None) -> RetryingStore:
    def address() -> str:
        return endpoint_of(store.url, settings, environments) or store.url

    # What an administrator set up reads while nobody is looking, so it waits for every store. Others wait for those
    # that their home has met, so that a person who mistypes an endpoint is told soon.
    patient = settings.daemon == "external" or store.url.startswith(("file:", "memory:"))
    return RetryingStore(
        store, settings.store_timeout_s, address=address, met=None if patient else MetAddresses(settings.home)
    )
