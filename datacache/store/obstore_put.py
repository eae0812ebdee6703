"""Whole objects put through obstore, with metadata and conditions.

The other half of `obstore_get.py`, whose limits hold here, too (`addressable`, `usable_here`). Three to four times as
fast as requests of our own. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import obstore

from datacache.core.errors import ObjectNotFoundError
from datacache.store.errors import expect_etag, expect_s3_not_found, from_obstore, plain_etag
from datacache.store.obstore_get import ERRORS

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ObjectStore as Driver


class Putter:
    """Writes through one obstore driver."""

    def __init__(self, driver: Driver, store_url: str, *, endpoint: str = "") -> None:
        self._driver = driver
        self._url = store_url
        self._endpoint = endpoint

    def put(
        self, key: str, data: bytes | memoryview, metadata: Mapping[str, str], *, replaces: str | None
    ) -> tuple[str, str]:
        """One PUT: the new ETag ('' where the answer has none) and version. `replaces` is None for anything, '' for
        nothing, or what If-Match is to say, exactly. `metadata` in ASCII."""
        mode: Literal["create", "overwrite"] | UpdateVersion = "overwrite"
        if replaces is not None:
            mode = {"e_tag": replaces} if replaces else "create"
        try:
            done = obstore.put(self._driver, key, data, attributes=dict(metadata), mode=mode, use_multipart=False)
        except ERRORS as exc:
            if "ETag Header missing" in str(exc):  # of an answer that is good otherwise
                return "", ""
            error = from_obstore(exc, f"{self._url}/{key}", store=self._url, endpoint=self._endpoint)
            if isinstance(error, ObjectNotFoundError):
                expect_s3_not_found(404, str(exc), f"{self._url}/{key}")
            raise error from exc
        version = done["version"] or ""
        return plain_etag(done["e_tag"]), "" if version == "null" else version

    def etag(self, key: str) -> str:
        """The object's ETag by one HEAD, '' if it is not there. Whether the bucket is there it does not say."""
        try:
            found = obstore.head(self._driver, key)["e_tag"]
        except FileNotFoundError:
            return ""
        except ERRORS as exc:
            raise from_obstore(exc, f"{self._url}/{key}", store=self._url, endpoint=self._endpoint) from exc
        return expect_etag(found, f"{self._url}/{key}")
