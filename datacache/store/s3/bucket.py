"""`s3://bucket` read and written: the live bucket of a read-write mount (see `store/bucket.py`).

Whole objects of ordinary keys are written through obstore, everything else through requests of our own. What is relied
on where a write says what it may replace (`expect`):

- `write`: the server's own check, if it was found to make it (`s3/traits.py`); then `conditional()` is true. Else HEAD
  just before.
- `complete_upload`, `copy`, `remove`: HEAD just before in any case, because servers differ (Ceph 16 checks no condition
  there). Where `write` is checked as HTTP says, the condition goes along, too, as Amazon documents it for
  CompleteMultipartUpload, CopyObject and DeleteObject; if the server refuses what HEAD then says is met, it is tried
  without, from then on.

An upload's metadata are those it was begun with. Where a store keeps no folder markers, writing one is a
`NoMarkersError`. Any thread; a forked child works, with connections of its own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from datacache.core.concurrency import PerProcess
from datacache.core.errors import (
    NoMarkersError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreError,
    StoreUnavailableError,
)
from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.bucket import FolderPage, LiveObject, Part
from datacache.store.cloud import Putter, addressable, usable_here
from datacache.store.errors import expect_etag, unexpected
from datacache.store.s3 import multipart
from datacache.store.s3.access import S3Access
from datacache.store.s3.list import is_truncated, list_documents, parse_listing
from datacache.store.s3.requests import to_headers, to_info, to_metadata, to_words
from datacache.store.s3.store import S3Store, WithAccess, make_driver
from datacache.store.s3.traits import find_traits

T = TypeVar("T")
_FIND_KEYS = "10"
_HTTP_HEADERS = frozenset(
    ("content-disposition", "content-encoding", "content-language", "content-type", "cache-control", "storage-class")
)
"""Names of metadata that obstore takes for headers of HTTP."""
_UNKNOWN = "unknown"
"""The ETag of an object that was overwritten before the store said its ETag: no object has it."""


class S3Bucket(S3Store):
    """One bucket. `probe_prefix` is where the server is tried out, `copy_limit_bytes` what one request may copy."""

    whole_bytes = multipart.WHOLE_BYTES
    part_bytes = multipart.PART_BYTES
    max_parts = multipart.MAX_PARTS
    lists_in_pages = True

    def __init__(
        self,
        url: str,
        find_access: Callable[[], Sequence[S3Access]],
        access_stamp: Callable[[], object] = lambda: None,
        *,
        probe_prefix: str = "",
        copy_limit_bytes: int = multipart.COPY_LIMIT_BYTES,
    ) -> None:
        super().__init__(url, find_access, access_stamp)
        self._copy_limit_bytes = copy_limit_bytes
        self._putter = PerProcess(
            lambda: WithAccess(
                self._access.get(), lambda access: Putter(make_driver(access), url, endpoint=access.endpoint)
            )
        )
        self._traits = PerProcess(lambda: find_traits(self._requests.get(), url, probe_prefix))
        self._unchecked: set[str] = set()
        """The calls that the server was found to refuse wrongly when a condition came along."""

    def conditional(self) -> bool:
        """See `Bucket`: whether `write` is checked by the server."""
        return self._traits.get().conditional

    def list_folder(self, prefix: str, *, start_after: str = "") -> Iterator[FolderPage]:
        """See `Bucket`."""
        query, behind = {"prefix": prefix, "delimiter": "/"}, _bytes(start_after)
        for page in map(FolderPage._make, list_documents(self._requests.get().page, query, start_after, self.url)):
            if start_after:  # S3 gives a folder again if any key in it comes after
                page = FolderPage(  # noqa: PLW2901
                    [info for info in page.objects if _bytes(info.key) > behind],
                    [folder for folder in page.folders if _bytes(folder) > behind],
                )
            if page.objects or page.folders:
                yield page

    def find(self, path: str) -> tuple[ObjectInfo | None, bool]:
        """See `Bucket`. One request, but where more than a few names come between `path` and `path/`."""
        fetch = self._requests.get().page
        query = {"list-type": "2", "encoding-type": "url", "delimiter": "/", "prefix": path, "max-keys": _FIND_KEYS}
        objects, folders = parse_listing(document := fetch(query), self.url)
        found = next((info for info in objects if info.key == path), None)
        folder = f"{path}/"
        if folder in folders:
            return found, True
        last = max((_bytes(name) for name in (*folders, *(info.key for info in objects))), default=b"")
        if last > _bytes(folder) or not is_truncated(document):
            return found, False
        query = {"list-type": "2", "encoding-type": "url", "prefix": folder, "max-keys": "1"}
        return found, bool(parse_listing(fetch(query), self.url)[0])

    def look(self, key: str) -> LiveObject:
        """See `Bucket`."""
        info, headers = self._requests.get().look(key)
        expect_etag(info.etag, f"{self.url}/{key}")
        return LiveObject(info, to_metadata(headers))

    def fetch(self, ref: ObjectRef) -> tuple[LiveObject, bytes | memoryview]:
        """See `Bucket`."""
        if not ref.size_bytes:
            return self.look(ref.key), b""
        data, headers = self._get(ref, 0, ref.size_bytes)
        info = to_info(ref.key, ref.size_bytes, headers)
        expect_etag(info.etag, ref.url)
        return LiveObject(info, to_metadata(headers)), data

    def write(
        self, key: str, data: bytes | memoryview, metadata: Mapping[str, str], *, expect: str | None
    ) -> ObjectInfo:
        """See `Bucket`. The time of the new object is this machine's where the answer has none."""
        self._expect_storable(key)
        replaces = expect
        if expect is not None:
            traits = self._traits.get()
            if not traits.conditional:
                self._expect(key, expect)
                replaces = None
            elif expect:
                replaces = traits.if_match(expect)
        try:
            return self._put(key, data, metadata, replaces)
        except (ObjectChangedError, ObjectNotFoundError) as exc:
            if replaces is None or exc.url == self.url:  # no such bucket
                raise
            raise unexpected(f"{self.url}/{key}", expect or "") from exc

    def complete_upload(
        self, key: str, upload: str, parts: Sequence[Part], metadata: Mapping[str, str], *, expect: str | None
    ) -> ObjectInfo:
        """See `Bucket`. `parts` are all that were put. `ObjectNotFoundError` if the upload is not there: it may be
        complete already, by a request whose answer was lost."""

        def complete(conditions: Mapping[str, str]) -> str:
            try:
                return self._complete(key, upload, parts, conditions)
            except StoreUnavailableError as exc:
                if "HTTP 500" in exc.message:  # Ceph's answer for an upload that is not there
                    self.list_parts(key, upload)
                raise

        etag = self._checked("complete", key, expect, complete)
        return self._made(key, sum(part.size_bytes for part in parts), etag, metadata, expect)

    def copy(self, source: ObjectRef, key: str, metadata: Mapping[str, str], *, expect: str | None) -> ObjectInfo:
        """See `Bucket`. Bound to the source as `s3/multipart.py` says."""
        self._expect_storable(key)
        headers = to_headers(metadata, f"{self.url}/{key}")

        def copy(conditions: Mapping[str, str]) -> str:
            if source.size_bytes > self._copy_limit_bytes:
                limit = self._copy_limit_bytes
                return self._copy_in_parts(source, key, metadata, conditions, limit_bytes=limit)
            bound_by = self._traits.get().copy_header
            return self._copy_whole(source, key, {**headers, **conditions}, bound_by=bound_by, was_free=expect == "")

        etag = self._checked("copy", key, expect, copy)
        return self._made(key, source.size_bytes, etag, metadata, expect)

    def remove(self, key: str, *, expect: str | None) -> None:
        """See `Bucket`."""
        if expect == "":
            if not self._is_gone(key):
                raise unexpected(f"{self.url}/{key}", expect)
            return
        if key.endswith("/") and not self._traits.get().markers:
            return  # there is none, and a server over a file system would take it for its folder

        def remove(conditions: Mapping[str, str]) -> None:
            self._requests.get().delete(key, headers=conditions)

        try:
            self._checked("remove", key, expect, remove)
        except ObjectChangedError:
            if not self._is_gone(key):
                raise

    def close(self) -> None:
        """See `ObjectStore`."""
        super().close()
        self._putter.take()

    def _put(self, key: str, data: bytes | memoryview, metadata: Mapping[str, str], replaces: str | None) -> ObjectInfo:
        url = f"{self.url}/{key}"
        if _HTTP_HEADERS.isdisjoint(metadata) and self._by_obstore(key):
            words = to_words(metadata, url)
            etag, version = self._putter.get().call(lambda putter: putter.put(key, data, words, replaces=replaces))
            # obstore does not say whether a document came back: what has the ETag of other bytes may be a web page. A
            # store whose ETags are no MD5s (SSE-KMS) is asked once more for each object.
            if version or etag == hashlib.md5(data, usedforsecurity=False).hexdigest():
                return ObjectInfo(key, len(data), _now_ns(), etag, version)
            return self._requests.get().find_stored(key, data, to_headers(metadata, url))
        condition = {} if replaces is None else {"If-Match": replaces} if replaces else {"If-None-Match": "*"}
        return self._requests.get().put(key, data, {**to_headers(metadata, url), **condition})

    def _made(
        self, key: str, size_bytes: int, etag: str, metadata: Mapping[str, str], expect: str | None
    ) -> ObjectInfo:
        """Return the object that a completed upload or a copy made, whose answer says `etag` ('' for none). That says
        not enough: Ceph names no ETag, others another one than they list, and somebody may have come right after us.
        `StoreUnavailableError` where what is there shows that it was not made, or not whole."""
        info, found = self.look(key)
        url = f"{self.url}/{key}"
        if info.etag == etag or found.items() >= metadata.items():
            if info.size_bytes != size_bytes:
                what = f"the store has {info.size_bytes:,} bytes of {size_bytes:,}"
                raise StoreUnavailableError(f"{url}: {what}", url=url)
            return info
        if info.etag == expect:
            raise StoreUnavailableError(f"{url}: the store has what was there before", url=url)
        return ObjectInfo(key, size_bytes, info.mtime_ns, etag or _UNKNOWN)

    def _checked(self, what: str, key: str, expect: str | None, call: Callable[[Mapping[str, str]], T]) -> T:
        """`call` with the conditions that stand for `expect`, after a look at what is there."""
        if expect is None:
            return call({})
        self._expect(key, expect)
        traits = self._traits.get()
        if not (traits.conditional and traits.quoted) or what in self._unchecked:
            return call({})
        try:
            return call({"If-Match": traits.if_match(expect)} if expect else {"If-None-Match": "*"})
        except StoreError as exc:
            if not isinstance(exc, ObjectChangedError) and "HTTP 501" not in exc.message:
                raise
            self._expect(key, expect)
            done = call({})
            self._unchecked.add(what)
            return done

    def _expect(self, key: str, expect: str) -> None:
        if self._etag(key) != expect:
            raise unexpected(f"{self.url}/{key}", expect)

    def _etag(self, key: str) -> str:
        if self._by_obstore(key):
            return self._putter.get().call(lambda putter: putter.etag(key))
        return self._requests.get().etag(key)

    def _is_gone(self, key: str) -> bool:
        try:
            self.look(key)
        except ObjectNotFoundError as exc:
            if exc.url == self.url:  # the bucket is not there, which says nothing of the object
                raise
            return True
        return False

    def _by_obstore(self, key: str) -> bool:
        """Tell whether obstore can ask for this key, and may: it resolves names itself, where none can be checked."""
        return addressable(key) and usable_here() and not self._access.get().checked

    def _expect_storable(self, key: str) -> None:
        if key.endswith("/") and not self._traits.get().markers:
            raise NoMarkersError(
                f"{self.url}/{key}: this store keeps no folder markers",
                url=f"{self.url}/{key}",
                hint="An empty folder cannot be kept there; one with files in it needs no marker.",
            )


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _now_ns() -> int:
    return time.time_ns() // 10**9 * 10**9
