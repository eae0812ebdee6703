"""GETs through obstore, bound to one version of the object: what Google and Azure have in common.

obstore is the fast way (no Python in the transfer, buffers without a copy), within its limits, which are
decided here: which keys it can address exactly, and that its runtime does not survive `fork()`. Any thread.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError

from datacache.core.errors import StoreUnavailableError
from datacache.core.objects import ObjectRef
from datacache.store.errors import expect_same, from_obstore, plain_etag

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import ObjectStore as Driver

ERRORS = (BaseError, OSError, ValueError)
"""All that obstore raises."""

# What object_store's Path changes or refuses: empty, '.' and '..' segments (and so a slash at either end),
# control characters; and what is no UTF-8.
_INEXACT = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|[\x00-\x1f\x7f\ud800-\udfff]")

_runtime_pid = 0


def addressable(key: str) -> bool:
    """Whether obstore asks for exactly this key."""
    return _INEXACT.search(key) is None


def usable_here() -> bool:
    """Whether this process may call obstore.

    Its runtime's threads exist only in the process of the first call: in a child forked after that, calls
    hang or crash. Asking claims the runtime for this process.
    """
    global _runtime_pid
    pid = os.getpid()
    if _runtime_pid == 0:
        _runtime_pid = pid
    return _runtime_pid == pid


class Getter:
    """Reads exact versions through one obstore driver. `quoted` says whether its ETags are HTTP's, in
    quotes."""

    def __init__(self, driver: Driver, store_url: str, *, endpoint: str = "", quoted: bool = True) -> None:
        self._driver = driver
        self._url = store_url
        self._endpoint = endpoint
        self._quoted = quoted

    def get(self, ref: ObjectRef, start: int, stop: int) -> memoryview:
        """obstore's own buffer, or an error of ours."""
        try:
            result = obstore.get(self._driver, ref.key, options=self._options(ref, start, stop))
            self._check(result, ref)
            data = result.bytes()
        except ERRORS as exc:
            raise self._translated(exc, ref) from exc
        if len(data) != stop - start:
            raise StoreUnavailableError(
                f"{ref.url}: the answer has {len(data):,} bytes, not {stop - start:,}", url=ref.url
            )
        return memoryview(data)

    def _options(self, ref: ObjectRef, start: int, stop: int) -> GetOptions:
        options: GetOptions = {}
        if ref.version:
            options["version"] = ref.version
        elif ref.etag:
            quoted = self._quoted and not ref.etag.startswith("W/")
            options["if_match"] = f'"{ref.etag}"' if quoted else ref.etag
        if start or stop != ref.size_bytes:
            options["range"] = (start, stop)
        return options

    def _check(self, result: GetResult, ref: ObjectRef) -> None:
        meta = result.meta
        expect_same(ref, etag=plain_etag(meta["e_tag"]), size_bytes=meta["size"])

    def _translated(self, exc: Exception, ref: ObjectRef) -> Exception:
        if getattr(type(exc), "__module__", "").startswith("datacache."):
            return exc  # `_check` raised it
        return from_obstore(exc, ref.url, store=self._url, endpoint=self._endpoint)
