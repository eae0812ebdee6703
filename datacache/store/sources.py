"""Which stores the objects of snapshots may be read from: the setting `sources`.

The writers of a catalog say in a manifest where a snapshot's bytes lie. A process that reads for others (a node's
daemon and mounts, for its pods) reads only what its administrator has named; asked by `Stores` before each read, by the
object's own address, so it makes no difference by which way a reference came. Pure values; any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from datacache.core.errors import DatacacheError, SettingsError, SourceNotAllowedError, UsageError
from datacache.core.ids import ObjectRef
from datacache.settings import Settings
from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.checksums import Checksum
from datacache.store.urls import split_url

EVERY_BUCKET = "*"
_BUCKETS = ("s3", "gs", "az", "abfs", "abfss")


class SourceRules:
    """The places that may be read from. `SettingsError` for a prefix that is none."""

    def __init__(self, settings: Settings) -> None:
        assert settings.sources is not None
        self._settings = settings
        self._every_bucket = EVERY_BUCKET in settings.sources
        self._places = [_place(prefix) for prefix in settings.sources if prefix != EVERY_BUCKET]
        self._copies = [_place(settings.objects)] if settings.objects else []
        """The storage where the administrator has copies made, which lie under a hash of their bytes."""

    def allow(self, store: str, key: str) -> bool:
        """Tell whether an object, or what lies under a prefix, may be read."""
        store = _canonical(store)
        if self._every_bucket and store.partition("://")[0] in _BUCKETS:
            return True
        if {".", ".."} & set(key.split("/")):  # a key for us, and a way out for a server or a proxy
            return False
        places = [*self._places, *self._copies]
        return any(store == place_store and key.startswith(prefix) for place_store, prefix in places)

    def allow_some(self, store: str, *, copies: bool = True) -> bool:
        """Tell whether anything of a store may be read; with `copies`, such as lie under a hash of their bytes, too."""
        store = _canonical(store)
        anywhere = self._every_bucket and store.partition("://")[0] in _BUCKETS
        places = [*self._places, *(self._copies if copies else ())]
        return anywhere or any(store == place_store for place_store, _ in places)

    def check(self, store: str, key: str) -> None:
        """Raise `SourceNotAllowedError` unless an object, or what lies under a prefix, may be read."""
        if not self.allow(store, key):
            self.refuse(f"{store}/{key}")

    def refuse(self, url: str) -> NoReturn:
        """Raise the error for an address that may not be read."""
        raise SourceNotAllowedError(
            f"{url} is not among the stores that data sets may be read from here",
            url=url,
            hint="An administrator names them in DATACACHE_SOURCES; it is: "
            f"{' '.join(self._settings.sources or ()) or 'nothing'}.",
        )

    def folder_of(self, key: str) -> str:
        """Return the folder below which a file may be read, '' or ending in '/': the innermost that has this key."""
        every = [*self._places, *self._copies]
        places = [prefix for store, prefix in every if store == "file://" and key.startswith(prefix)]
        return max(places, key=len, default="")


class AllowedStore:
    """A store of which only what the rules allow can be read. It writes nothing."""

    def __init__(self, store: ObjectStore, rules: SourceRules) -> None:
        self._store, self._rules = store, rules
        self.url, self.node_wide, self.sorted_listing = store.url, store.node_wide, store.sorted_listing

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """See `ObjectStore`. `SourceNotAllowedError`, as from all of these."""
        self._rules.check(self.url, prefix)
        return self._store.list(prefix, start_after=start_after)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`."""
        self._rules.check(self.url, key)
        return self._store.head(key)

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes | memoryview:
        """See `ObjectStore`."""
        self._rules.check(self.url, ref.key)
        return self._store.read(ref, start, stop)

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        """See `ObjectStore`."""
        self._rules.check(self.url, ref.key)
        return self._store.checksum(ref)

    def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        raise UsageError(f"{self.url} can only be read")

    put = put_file = delete = _refuse

    def close(self) -> None:
        """See `ObjectStore`."""
        self._store.close()


def source_rules(settings: Settings) -> SourceRules | None:
    """Return the rules of these settings; None where every store may be read."""
    return None if settings.sources is None else SourceRules(settings)


def _canonical(store: str) -> str:
    try:
        return split_url(store if store != "file://" else "file:///")[0]
    except DatacacheError:
        return ""


def _place(prefix: str) -> tuple[str, str]:
    try:
        return split_url(prefix)
    except DatacacheError as exc:
        raise SettingsError(f"DATACACHE_SOURCES: {prefix!r}: {exc.message}", hint=exc.hint) from exc
