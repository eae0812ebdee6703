"""`s3://bucket`: Amazon S3 and everything that speaks it (Ceph RGW, MinIO, …), path-style.

GETs of ordinary keys go through obstore; the rest (listings, odd keys, writes, servers that answer ranges
with 200, forked children) through requests of our own. Used through `open_store`. Any thread; a forked child
works, with connections of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from datacache.core.concurrency import PerProcess
from datacache.core.errors import SettingsError, StoreAccessError
from datacache.core.objects import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.obstore_get import Getter, RangeIgnoredError, addressable, usable_here
from datacache.store.s3_access import Accesses, S3Access
from datacache.store.s3_list import list_pages
from datacache.store.s3_requests import S3Requests
from datacache.store.s3_upload import put_file

if TYPE_CHECKING:
    from obstore.store import S3Store as Driver

C = TypeVar("C")
T = TypeVar("T")

_CLIENTS = 8
NO_RETRIES: dict[str, Any] = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
"""For obstore: `RetryingStore` decides alone."""


class S3Store:
    """One bucket. `find_access` is called when a request first needs it, and again when what `access_stamp` gives is
    another one (see `Accesses`); in each process."""

    node_wide = True
    sorted_listing = True

    def __init__(
        self,
        url: str,
        find_access: Callable[[], Sequence[S3Access]],
        access_stamp: Callable[[], object] = lambda: None,
    ) -> None:
        self.url = url
        self._access = PerProcess(lambda: Accesses(find_access, access_stamp))
        self._requests = PerProcess(lambda: S3Requests(url, self._access.get()))
        self._getter = PerProcess(lambda: WithAccess(self._access.get(), self._make_getter))
        self._ranges = True
        """False once the server has answered a range with 200."""

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """See `ObjectStore`. A missing bucket is an `ObjectNotFoundError`."""
        return list_pages(self._requests.get().page, prefix, start_after, self.url)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._requests.get().head(key)

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes | memoryview:
        """See `ObjectStore`. Without a copy or a Python loop for the common GET."""
        if start >= stop:
            return b""
        if self._fast(ref, start, stop):
            try:
                return self._getter.get().call(lambda getter: getter.get(ref, start, stop))
            except RangeIgnoredError:
                self._ranges = False
        return self._requests.get().get(ref, start, stop)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._requests.get().put(key, data)

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        """See `ObjectStore`."""
        return put_file(self._requests.get(), self.url, key, path)

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        self._requests.get().delete(key)

    def close(self) -> None:
        """See `ObjectStore`. A store that is used again connects again, with the credentials there are then."""
        requests = self._requests.take()
        if requests is not None:
            requests.close()
        self._getter.take()
        self._access.take()

    def _fast(self, ref: ObjectRef, start: int, stop: int) -> bool:
        whole = start == 0 and stop == ref.size_bytes
        return (whole or self._ranges) and addressable(ref.key) and usable_here()

    def _make_getter(self, access: S3Access) -> Getter:
        return Getter(make_driver(access), self.url, endpoint=access.endpoint)


class WithAccess(Generic[C]):
    """Clients of obstore's, which keep the credentials they were made with: one for each that is used. One process; any
    thread."""

    def __init__(self, accesses: Accesses, make: Callable[[S3Access], C]) -> None:
        self._accesses = accesses
        self._make = make
        self._made: dict[int, tuple[S3Access, C]] = {}

    def call(self, work: Callable[[C], T]) -> T:
        """What `work` gives; where the store refuses it, with the next credentials there are."""
        access = self._accesses.get()
        refused: list[S3Access] = []
        while True:
            try:
                return work(self._client(access))
            except StoreAccessError:
                refused.append(access)
                other = self._accesses.after_refusal(refused)
                if other is None:
                    raise
                access = other

    def _client(self, access: S3Access) -> C:
        made = self._made.get(id(access))
        if made is None:  # two threads may both make one: either is fine
            if len(self._made) >= _CLIENTS:  # most are of credentials that were replaced
                self._made = {}
            made = self._made[id(access)] = access, self._make(access)
        return made[1]


def make_driver(access: S3Access) -> Driver:
    """obstore's client of a bucket."""
    from obstore.store import S3Store as Driver

    client: dict[str, Any] = {
        "allow_http": access.endpoint.startswith("http:"),
        "connect_timeout": timedelta(seconds=min(10.0, access.timeout_s)),
        "timeout": timedelta(seconds=access.timeout_s),
    }
    if access.ca_bundle:
        try:
            with open(os.path.expanduser(access.ca_bundle), "rb") as file:
                client["root_certificate"] = file.read()
        except OSError as exc:
            raise SettingsError(f"the CA bundle {access.ca_bundle} cannot be read: {exc.strerror}") from exc
    # The constructor reads AWS_* by itself; what is given here goes before that, the service's endpoint
    # included.
    return Driver(
        access.bucket,
        endpoint=access.endpoint,
        aws_endpoint_url_s3=access.endpoint,
        region=access.region,
        virtual_hosted_style_request=False,
        skip_signature=access.credentials is None,
        credential_provider=access.obstore_provider(),  # type: ignore[arg-type]
        client_options=client,  # type: ignore[arg-type]
        retry_config=NO_RETRIES,  # type: ignore[arg-type]
    )
