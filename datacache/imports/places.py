"""Places that the lines of a list may lead to: files of this machine, stores, hosts.

Used by `lines` and `jsonl`. Whoever runs an import did not write the list, most often, and what it names is read with
their rights. So local files come from the list's own folder, or from folders that are named; a link does not lead out
of them. Stores that are reached with credentials of the environment (buckets) are open, and so are public web
addresses. All other hosts have to be named. One thread, but for `rule`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache

from datacache.core.addresses import AddressRule
from datacache.core.errors import UsageError
from datacache.store.urls import split_object_url

WEB = ""
"""In place of a store: the object comes from a web server."""
_BUCKETS = ("s3", "gs", "az", "abfs", "abfss", "memory")
_HOSTS = {"sftp": 22, "ssh": 22, "ftp": 21, "smb": 445, "hdfs": 8020, "webhdfs": 9870}
"""Schemes whose URLs name the host, with their usual ports. Others are not taken: some of fsspec's are local files
under another name."""
_FOLDERS = 65_536


class ClosedPlaceError(Exception):
    """The list may not lead there; the words say what would let it."""


class Places:
    """The places that are open to a list. Relative paths are relative to the folder `base`, which is open itself."""

    def __init__(
        self, base: str, *, allow_local: Iterable[str | os.PathLike[str]] = (), allow_network: Iterable[str] = ()
    ) -> None:
        self._base = base
        # As wide as they are named, and no wider when a link among them is changed meanwhile.
        self._open = tuple(os.path.realpath(folder).rstrip("/") + "/" for folder in (base, *allow_local))
        self._folder = lru_cache(_FOLDERS)(os.path.realpath)
        self.rule = AddressRule(allow_network)
        """For web addresses."""

    def find(self, url: str) -> tuple[str, str, str]:
        """The store (`WEB` for a web address) and the key of a URL, without links in it where it is a file of this
        machine, and the last part of the key as it is written. `UsageError` for what is no URL, `ClosedPlaceError`."""
        store, key = split_object_url(url)
        scheme = store.partition("://")[0]
        if scheme == "file":
            if "://" not in url:
                store, key = split_object_url(os.path.join(self._base, url))
            return store, self._local(key), key.rpartition("/")[2]
        if scheme in ("http", "https"):
            return WEB, "", ""
        if scheme not in _BUCKETS:
            self._expect_host(scheme, store)
        return store, key, key.rpartition("/")[2]

    def _local(self, key: str) -> str:
        if not key or key.endswith("/"):
            return key  # a folder, which is told elsewhere
        folder, _, name = f"/{key}".rpartition("/")
        path = os.path.join(str(self._folder(folder or "/")), name)
        if os.path.islink(path):
            path = os.path.realpath(path)
        if not f"{path}/".startswith(self._open):
            asked = os.path.dirname(f"/{key}")
            raise ClosedPlaceError(
                f"it is outside of the list's folder; if the list may read from there: --allow-local {asked}"
            )
        return path[1:]

    def _expect_host(self, scheme: str, store: str) -> None:
        if scheme not in _HOSTS:
            raise UsageError(f"a list cannot name {scheme}:// URLs")
        host, _, port = store.partition("://")[2].rpartition("@")[2].partition(":")
        number = int(port) if port.isdecimal() else _HOSTS[scheme]
        if not self.rule.allows_host(host, number):
            raise ClosedPlaceError(f"a list may read from {host} only if it is named: --allow-network {host}")
