"""The guards of an import: its name, places that a list may lead to, names that may become paths, bounds of an object.

Whoever runs an import has often not written its list, and the list is read with their rights. So local files come from
the list's own folder, or from folders that are named; no link leads out of them. Buckets, which are reached with
credentials of the environment, and public web addresses are open. All other hosts have to be named.

`Places` belongs to one thread, but for `check_store`; each object has its own `Allowance`, in one thread. The functions
on names are pure.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import lru_cache

from datacache.catalog.base import Catalog, tag_exists
from datacache.catalog.commit import check_target
from datacache.core.addresses import AddressRule
from datacache.core.concurrency import ByteBudget
from datacache.core.errors import UsageError
from datacache.imports.failures import TooSlowError
from datacache.manifest.model import Lineage, Naming
from datacache.store.urls import split_object_url

WEB = ""
"""In place of a store: the object comes from a web server."""
_BUCKETS = ("s3", "gs", "az", "abfs", "abfss", "memory")
_HOSTS = {"sftp": 22, "ssh": 22, "ftp": 21, "smb": 445, "hdfs": 8020, "webhdfs": 9870}
"""Schemes whose URLs name the host, with their usual ports. Others are not taken: some of fsspec's are local files
under another name."""
_FOLDERS = 65_536


def check_import(catalog: Catalog, naming: Naming, lineage: Lineage) -> None:
    """Raise unless an import may have this name: `UsageError` for a bad name or tag, `OtherKindError` unless it
    replaces the data set.

    `TagExistsError` for a tag that is taken, now and not after hours of fetching, unless what it names was made by the
    same import: then this one may well come to the same snapshot.
    """
    dataset = check_target(catalog, naming, lineage)
    for tag in naming.tags if dataset is not None and not naming.move_tags else ():
        id = dataset.tags.get(tag) if dataset is not None else None
        record = catalog.snapshot(naming.name, id) if id is not None else None
        if record is None or id is None:
            continue
        made, content = record.lineage, lineage.parameters["content"]
        if made is None or made.command != lineage.command or made.parameters.get("content") != content:
            raise tag_exists(naming.name, tag, id)


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
        self.hosts = tuple(allow_network)
        self.rule = AddressRule(self.hosts)

    def find(self, url: str) -> tuple[str, str, str]:
        """Return the store (`WEB` for a web address) and the key of a URL, without links in it where it is a file of
        this machine, and the last part of the key as it is written. `UsageError` for what is no URL,
        `ClosedPlaceError`."""
        store, key = split_object_url(url)
        scheme = store.partition("://")[0]
        if scheme == "file":
            if "://" not in url:
                store, key = split_object_url(os.path.join(self._base, url))
            return store, self._local(key), key.rpartition("/")[2]
        if scheme in ("http", "https"):
            return WEB, "", ""
        self.check_store(store)
        return store, key, key.rpartition("/")[2]

    def check_store(self, store: str) -> None:
        """Raise unless a list may name this store, whatever of it: `UsageError` for a kind of stores that it cannot
        name, `ClosedPlaceError` for a host that is not named. Any thread."""
        scheme, _, authority = store.partition("://")
        if scheme in _BUCKETS or store == "file://":
            return
        if scheme not in _HOSTS:
            raise UsageError(f"a list cannot name {scheme}:// URLs")
        host, _, port = authority.rpartition("@")[2].partition(":")
        if not self.rule.allows_host(host, int(port) if port.isdecimal() else _HOSTS[scheme]):
            raise ClosedPlaceError(f"a list may read from {host} only if it is named: --allow-network {host}")

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


_DRIVE = re.compile(r"[A-Za-z]:")
_MAX_PATH_BYTES, _MAX_PART_BYTES = 4096, 255
_JUNK_NAMES = frozenset({".DS_Store", "Thumbs.db", "desktop.ini", "ehthumbs.db", ".datacache-exported"})


def unusable(path: str) -> str:
    """Return why this cannot be a path of a snapshot, or '' if it can."""
    if not path:
        return "the path is empty"
    if "\0" in path:
        return "the path has a NUL in it"
    if "\\" in path:
        return "the path has a backslash in it; folders are separated by '/'"
    if path.startswith("/"):
        return "the path is absolute"
    parts = path.split("/")
    if ".." in parts:
        return "the path leads out of the snapshot ('..')"
    if "" in parts or "." in parts:
        return "the path has an empty part or a '.'" if path[-1] != "/" else "the path names a folder"
    if _DRIVE.match(path) and (len(path) == 2 or path[2] == "/" or len(parts) > 1):
        return "the path begins with a drive letter"
    try:
        if len(path.encode("utf-8", "surrogateescape")) > _MAX_PATH_BYTES:
            return f"the path is longer than {_MAX_PATH_BYTES:,} bytes"
        if any(len(part.encode("utf-8", "surrogateescape")) > _MAX_PART_BYTES for part in parts):
            return f"a part of the path is longer than {_MAX_PART_BYTES} bytes, which no file system takes"
    except UnicodeEncodeError:
        return "the path has half a character in it"
    return ""


def from_archive(name: str) -> str:
    """Return a member's name as a path: '\\\\' of Windows tools becomes '/', and `./` and doubled slashes go. What is
    not safe stays so, for `unusable` to refuse."""
    path = name.replace("\\", "/")
    absolute = path.startswith("/")
    return "/" * absolute + "/".join(part for part in path.split("/") if part not in ("", "."))


def is_junk(path: str) -> bool:
    """Tell whether it is what a desktop leaves behind (`__MACOSX/`, `.DS_Store`, `Thumbs.db`, `._x` and the like), or
    the note in a folder that a snapshot was exported into."""
    parts = path.split("/")
    return "__MACOSX" in parts or parts[-1] in _JUNK_NAMES or parts[-1].startswith("._")


class Allowance(AbstractContextManager["Allowance"]):
    """The time one object may take (waiting for room not counted), and its share of the bytes that may be in flight,
    which is given back at the end of a `with` block."""

    def __init__(self, shown_url: str, timeout_s: float, budget: ByteBudget) -> None:
        self._url, self._timeout_s, self._budget = shown_url, timeout_s, budget
        self._end = time.monotonic() + timeout_s
        self._held = 0

    def left_s(self) -> float:
        """Return the time that is left; at the end 0 or less."""
        return self._end - time.monotonic()

    def check(self) -> None:
        """Raise `TooSlowError` once the time is over."""
        if self.left_s() <= 0:
            raise TooSlowError(f"{self._url}: it was not here after {self._timeout_s:g} s", url=self._url)

    def take(self, size_bytes: int) -> None:
        """Hold this much instead of what is held. A share is never raised while it is held: two that wait for each
        other's would wait for ever."""
        self._give()
        began = time.monotonic()
        self._budget.take(size_bytes)
        self._held = size_bytes
        self._end += time.monotonic() - began

    def _give(self) -> None:
        if self._held:
            self._budget.give(self._held)
            self._held = 0

    def __exit__(self, *_exc: object) -> None:
        self._give()
