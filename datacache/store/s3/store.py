"""`s3://bucket`: Amazon S3 and everything that speaks it (Ceph RGW, MinIO, …), path-style.

GETs go over sockets of our own (`s3/get.py`), the rest (listings, writes, endpoints behind a proxy) through
`s3/requests.py`. What comes whole is checked against the checksum that the store has of it. Used through
`open_store`. Any thread; a forked child works, with connections of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from datacache.core.concurrency import PerProcess
from datacache.core.errors import ObjectChangedError, SettingsError, StoreAccessError, StoreUnavailableError
from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.checksums import Checker, Checksum
from datacache.store.errors import expect_listing
from datacache.store.s3.access import Accesses, S3Access
from datacache.store.s3.get import S3Getter, UnusualAnswerError
from datacache.store.s3.list import list_pages, parse_listing
from datacache.store.s3.multipart import S3Uploads
from datacache.store.s3.requests import S3Requests

if TYPE_CHECKING:
    from obstore.store import S3Store as Driver

C = TypeVar("C")
T = TypeVar("T")

_CLIENTS = 8
NO_RETRIES: dict[str, Any] = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
"""For obstore: `RetryingStore` decides alone."""


class S3Store(S3Uploads):
    """One bucket. `find_access` is called when a request first needs it, and again when what `access_stamp` gives is
    another one (see `Accesses`); in each process."""

    node_wide = True
    sorted_listing = True

    def __init__(
        self,
        url: str,
        find_access: Callable[[], Sequence[S3Access]],
        access_stamp: Callable[[], object] = lambda: None,
        *,
        generation: Callable[[], int] = lambda: 0,
        check_md5: bool = True,
    ) -> None:
        """`check_md5`: also check what has no other checksum than an ETag that looks like an MD5."""
        self.url = url
        self._access = PerProcess(lambda: Accesses(find_access, access_stamp, generation))
        self._requests = PerProcess(lambda: S3Requests(url, self._access.get()))
        self._getter = PerProcess(
            lambda: WithAccess(self._access.get(), lambda access: S3Getter(access, url), S3Getter.close)
        )
        self._checker = Checker(md5=check_md5)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """See `ObjectStore`. A missing bucket is an `ObjectNotFoundError`."""
        return list_pages(self._requests.get().page, prefix, start_after, self.url)

    def first_key(self, prefix: str, *, start_after: str) -> str:
        """Return the first key with a prefix after another one; '' where there is none, or the store does not say."""
        query = {"list-type": "2", "encoding-type": "url", "max-keys": "1"}
        document = self._requests.get().page(query | {"prefix": prefix, "start-after": start_after})
        objects, _ = parse_listing(document, self.url)
        return objects[0].key if objects else ""

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._requests.get().head(key)

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes | memoryview:
        """See `ObjectStore`. The whole object is checked, a part of it is not."""
        return self._get(ref, start, stop)[0] if start < stop else b""

    def _get(self, ref: ObjectRef, start: int, stop: int) -> tuple[memoryview, dict[str, str]]:
        """Return bytes of exactly this version, and the headers of the answer with names in lower case."""
        try:
            try:
                data, headers = self._getter.get().call(lambda getter: getter.get(ref, start, stop))
            except UnusualAnswerError:
                data, headers = self._requests.get().get(ref, start, stop)
        except ObjectChangedError:
            # Whether what answers lists the bucket: a web page says that every object has changed.
            with suppress(StoreAccessError), expect_listing():
                parse_listing(self._requests.get().page({"list-type": "2", "max-keys": "1"}), self.url)
            raise
        if (start, stop) == (0, ref.size_bytes):
            self._checker.check(ref, data, headers)
        return data, headers

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        """See `ObjectStore`: one HEAD."""
        return self._requests.get().checksum(ref)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._requests.get().put(key, data)

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        self._requests.get().delete(key)

    def close(self) -> None:
        """See `ObjectStore`. A store that is used again connects again, with the credentials there are then."""
        for clients in (self._requests.take(), self._getter.take()):
            if clients is not None:
                clients.close()
        self._access.take()


class WithAccess(Generic[C]):
    """Clients that keep the credentials they were made with: one for each that is used. One process; any thread."""

    def __init__(
        self, accesses: Accesses, make: Callable[[S3Access], C], close: Callable[[C], None] = lambda _: None
    ) -> None:
        self._accesses = accesses
        self._make = make
        self._close = close
        self._made: dict[int, tuple[S3Access, C]] = {}

    def call(self, work: Callable[[C], T]) -> T:
        """Return what `work` gives; where the store refuses it, with the next credentials there are."""
        refusal: StoreAccessError | None = None
        for access in self._accesses.each():
            try:
                return work(self._client(access))
            except StoreAccessError as exc:
                refusal = exc
        assert refusal is not None
        raise refusal

    def close(self) -> None:
        """Give back what the clients hold."""
        for _, client in list(self._made.values()):
            self._close(client)

    def _client(self, access: S3Access) -> C:
        made = self._made.get(id(access))
        if made is None:  # two threads may both make one: either is fine
            if len(self._made) >= _CLIENTS:  # most are of credentials that were replaced
                self._made = {}
            made = self._made[id(access)] = access, self._make(access)
        return made[1]


def make_driver(access: S3Access) -> Driver:
    """Return obstore's client of a bucket."""
    from obstore.store import S3Store as Driver

    if access.rule is not None:  # it came while a request was on its way; the next try goes the other way
        raise StoreUnavailableError(f"s3://{access.bucket}: the way to it has changed this moment")
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
