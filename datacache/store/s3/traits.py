"""Finds out what an S3 server really does with conditions and folder markers, on an object of our own.

What servers say and do differs: some pass over If-Match in silence, Ceph (16) compares it with the ETag without quotes
and knows the condition on a copy's source under another name, and servers over a file system turn the marker `a/` into
a file `a` that is then in the way of the folder. So a live bucket asks once a process, before the first write that
depends on it. The object lies beside the user's, is a few bytes, and is deleted again, with its versions.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import NamedTuple

from datacache.core.errors import (
    DatacacheError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    StoreUnreachableError,
)
from datacache.store.bucket import PROBE_BYTES, PROBE_PREFIX
from datacache.store.s3.multipart import answered_etag, quoted
from datacache.store.s3.requests import S3Requests, quoted_key

_WRONG = "0123456789abcdef0123456789abcdef"
_log = logging.getLogger(__name__)


class Traits(NamedTuple):
    """The behaviour that can be relied on."""

    conditional: bool
    """PUT refuses what If-Match and If-None-Match rule out, and nothing else."""
    quoted: bool
    """If-Match is compared as HTTP wants it, in quotes."""
    copy_header: str
    """The header that binds a copy to its source's ETag; '' if there is none."""
    markers: bool
    """A key that ends in a slash is an object of its own."""

    def if_match(self, etag: str) -> str:
        """Return what If-Match of a PUT says for an ETag."""
        return quoted(etag) if self.quoted else etag


def find_traits(requests: S3Requests, store_url: str, prefix: str) -> Traits:
    """Find the traits out under `prefix`. Raises what the first write raises: `StoreAccessError` without the right to
    write."""
    key = f"{prefix}{PROBE_PREFIX}{secrets.token_hex(8)}"
    probe = _Probe(requests, store_url, key)
    try:
        probe.put(b"first", {})
        conditional, in_quotes = probe.conditions()
        return Traits(conditional, in_quotes, probe.copy_header(), probe.markers())
    finally:
        probe.clean()


class _Probe:
    def __init__(self, requests: S3Requests, store_url: str, key: str) -> None:
        self._requests = requests
        self._store_url = store_url
        self._key = key
        self._etag = ""
        self._made: list[tuple[str, str]] = []

    def put(self, data: bytes, headers: Mapping[str, str], *, slash: str = "") -> None:
        key = self._key + slash
        try:
            info = self._requests.put(key, data, headers)
        except StoreUnreachableError:
            raise
        except StoreUnavailableError:  # it may be there nevertheless
            self._made.append((key, ""))
            raise
        self._made.append((key, info.version))
        if not slash:
            self._etag = info.etag

    def conditions(self) -> tuple[bool, bool]:
        """Return whether PUT is conditional, and whether in quotes."""
        if not self._refused({"If-None-Match": "*"}):
            return False, True
        for in_quotes in (True, False):
            if not self._refused({"If-Match": quoted(_WRONG) if in_quotes else _WRONG}):
                return False, True
            if not self._refused({"If-Match": quoted(self._etag) if in_quotes else self._etag}):
                return True, in_quotes
        return False, True

    def copy_header(self) -> str:
        for header in ("x-amz-copy-source-if-match", "x-amz-copy-if-match"):
            if not self._copies({header: quoted(_WRONG)}) and self._copies({header: quoted(self._etag)}):
                return header
        return ""

    def markers(self) -> bool:
        """Tell whether a marker and the object of the same name without the slash are two objects."""
        try:
            self.put(b"", {}, slash="/")
        except StoreUnavailableError:
            raise
        except StoreError:
            return False
        return self._requests.head(self._key).size_bytes > 0

    def clean(self) -> None:
        for key, version in dict.fromkeys(self._made):
            try:
                self._requests.delete(key, version=version)
            except DatacacheError as exc:
                is_there = "is" if version or self._etag else "may be"
                _log.warning("%s/%s %s left behind: %s", self._store_url, key, is_there, exc)

    def _refused(self, headers: Mapping[str, str]) -> bool:
        try:
            self.put(secrets.token_bytes(PROBE_BYTES), headers)
        except (StoreUnavailableError, StoreAccessError):
            raise
        except StoreError:  # 412, or 501 where the header is not known
            return True
        return False

    def _copies(self, headers: Mapping[str, str]) -> bool:
        source = f"/{self._store_url.removeprefix('s3://')}/{quoted_key(self._key)}"
        try:
            _, body = self._requests.call(
                "PUT",
                self._key,
                (200,),
                headers={"x-amz-copy-source": source, "x-amz-metadata-directive": "REPLACE", **headers},
            )
            answered_etag(body, self._store_url, self._store_url)
        except (StoreUnavailableError, StoreAccessError):
            raise
        except StoreError:
            return False
        info = self._requests.head(self._key)  # some give a copy another ETag, and Ceph does not say its version
        self._made.append((self._key, info.version))
        self._etag = info.etag
        return True
