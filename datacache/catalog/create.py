"""Make a snapshot of what lies under a URL: list, build the manifest, commit.

Used by `api.create_snapshot` and `catalog.copy`. Nothing is visible before the commit; a creation that was killed
leaves only blobs, which the next one finds in place. `ObjectAttributes` adds to a listing (with `--attributes`)
permissions and links from the metadata of objects, as a read-write mount or s3fs-fuse wrote them; that costs a request
for each object. One thread, which has others at work."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TypeVar

from datacache.catalog.base import Catalog
from datacache.catalog.commit import check_target, commit_manifest, known_blobs
from datacache.catalog.objects import ObjectWriter
from datacache.core.concurrency import map_in_threads
from datacache.core.errors import CorruptManifestError, ObjectNotFoundError
from datacache.core.paths import stays_inside
from datacache.manifest.builder import ManifestBuilder, sorted_entries
from datacache.manifest.model import Entry, Lineage, Naming, SnapshotRecord, Source
from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.bucket import Bucket, LiveObject
from datacache.store.local.walk import Links
from datacache.store.retry import retry
from datacache.writeback.model import Attributes, read_attributes

Progress = Callable[[int, int], None]
"""Called with the number of files and bytes that are done."""
Look = Callable[[list[ObjectInfo]], list[ObjectInfo]]
"""Gives the objects of a page with their attributes."""
Copied = Callable[[Iterable[Entry]], Generator[Entry, None, None]]
"""Takes entries in order and gives them with the keys of their copies."""
_T = TypeVar("_T")
_TARGET_BYTES = 4096
"""PATH_MAX: no target of a link is longer."""
_LINKS = 40
"""The kernel follows no more."""
_PLAIN = Attributes(0, 0, 0, 0)


def create_snapshot(
    catalog: Catalog,
    store: ObjectStore,
    prefix: str,
    naming: Naming,
    *,
    origin: str,
    progress: Progress | None = None,
    copied: Copied | None = None,
    copied_to: ObjectWriter | None = None,
    warnings: Callable[[], Sequence[str]] = tuple,
    look: Look | None = None,
) -> SnapshotRecord:
    """List `prefix` of a store and commit what lies there as the snapshot that `naming` names.

    Idempotent: an unchanged prefix gives the same id. With `copied`, the snapshot refers to copies in `copied_to`.
    `warnings` is called after the listing. Raise the store's errors, `ObjectNotFoundError` for a prefix with nothing
    under it, `TagExistsError`, `UsageError` for bad names, `StoredObjectsGoneError`, and `OtherKindError` where the
    dataset is something else and `replace` is false.
    """
    parameters = {"from": origin}
    source = Source(store.url, prefix)
    if copied_to is not None:
        source = copied_to.source
        parameters["copied_to"] = f"{source.store}/{source.prefix}"
    lineage = Lineage("create", parameters)
    known = known_blobs(catalog, check_target(catalog, naming, lineage))
    again = True
    while True:
        try:
            builder = ManifestBuilder([source], catalog.put_blobs, known=known)
            list_into(builder, store, prefix, progress, copied=copied, look=look)
            if builder.empty:
                what = "the bucket's name and the prefix" if not store.url.startswith("file:") else "the path"
                raise ObjectNotFoundError(f"there is nothing under {origin}", url=origin, hint=f"Check {what}.")
            return commit_manifest(
                catalog,
                builder,
                naming,
                origin=origin,
                lineage=lineage,
                objects=copied_to,
                warnings=warnings(),
            )
        except CorruptManifestError:
            # The previous version was removed and collected meanwhile, or is damaged, or blobs of this one went while
            # it was made: count on no blob.
            if not known and not again:
                raise
            again = bool(known)
            known = frozenset()


def list_into(
    builder: ManifestBuilder,
    store: ObjectStore,
    prefix: str,
    progress: Progress | None = None,
    *,
    copied: Copied | None = None,
    look: Look | None = None,
) -> None:
    """Add all that lies under the prefix to `builder`, in path order."""
    entries: Iterable[Entry] = _entries(store, prefix, progress, look)
    if not store.sorted_listing:
        entries = sorted_entries(entries)
    if copied is None:
        for entry in entries:
            builder.add(entry)
    else:
        with closing(copied(entries)) as copies:
            for entry in copies:
                builder.add(entry)


def _entries(store: ObjectStore, prefix: str, progress: Progress | None, look: Look | None) -> Iterator[Entry]:
    skip = len(prefix)
    files = size = 0
    for page in store.list(prefix):
        for info in page if look is None else look(page):
            path = info.key[skip:]
            if not path:
                continue  # the prefix's own folder marker
            files += 1
            size += info.size_bytes
            raw = path.encode("utf-8", "surrogateescape")
            entry = Entry(raw, info.size_bytes, info.mtime_ns, info.etag, info.version)
            if info.target or info.at or info.mode:
                key = info.at.encode("utf-8", "surrogateescape") or None
                target = info.target.encode("utf-8", "surrogateescape")
                entry = entry._replace(key=key, mode=info.mode, target=target)
            yield entry
        if progress is not None:
            progress(files, size)


class ObjectAttributes:
    """Looks up permissions and links of the objects below a prefix of a bucket. Links that lead out are left out, and
    `links` counts them."""

    def __init__(self, bucket: Bucket, prefix: str, links: Links, *, timeout_s: float, threads: int) -> None:
        self._bucket, self._prefix, self._links = bucket, prefix, links
        self._timeout_s, self._threads = timeout_s, threads

    def page(self, page: list[ObjectInfo]) -> list[ObjectInfo]:
        """Return the objects of a page with their attributes."""
        looked = map_in_threads(self._attributed, page, threads=self._threads)
        return [info for info in looked if info is not None]

    def _attributed(self, info: ObjectInfo) -> ObjectInfo | None:
        """Return an object with its attributes, or None for a link that leads out. Runs in any thread."""
        if info.key.endswith("/") or info.target or info.at:
            return info
        try:
            found = self._look(info.key)
        except ObjectNotFoundError:  # deleted while we listed: reading it will say so
            return info
        mode = self._mode(found)
        if not stat.S_ISLNK(mode):
            return info._replace(mode=stat.S_IFREG | stat.S_IMODE(mode)) if mode else info
        target = self._target(found)
        if not self._stays_inside(info.key, target):
            self._links.leave_out(info.key)
            return None
        return self._link(info, target)

    def _link(self, info: ObjectInfo, target: str) -> ObjectInfo:
        """Return a link with the object that it leads to. A link to a folder, or to nothing, has none."""
        key, to = info.key, target
        for _ in range(_LINKS):
            key = posixpath.normpath(posixpath.join(posixpath.dirname(key), to))
            try:
                found = self._look(key)
            except ObjectNotFoundError:
                break
            if not stat.S_ISLNK(self._mode(found)):
                return found.info._replace(key=info.key, at=key, target=target)
            to = self._target(found)
            if not self._stays_inside(key, to):
                break
        return ObjectInfo(info.key, 0, info.mtime_ns, "", target=target)

    def _stays_inside(self, key: str, target: str) -> bool:
        return stays_inside(os.fsencode(key[len(self._prefix) :]), os.fsencode(target))

    def _mode(self, found: LiveObject) -> int:
        if "mode" in found.metadata:
            attributes = read_attributes(found.metadata, _PLAIN)
            return attributes.mode if stat.S_IMODE(attributes.mode) or attributes.is_link else 0
        if self._bucket.url != "file://":
            return 0
        try:
            return os.stat(f"/{found.info.key}", follow_symlinks=False).st_mode
        except OSError:
            return 0

    def _target(self, found: LiveObject) -> str:
        if not 0 < found.info.size_bytes <= _TARGET_BYTES:
            return ""
        ref = found.info.ref(self._bucket.url)
        data = self._retried(lambda: self._bucket.read(ref, 0, ref.size_bytes))
        return bytes(data).decode("utf-8", "surrogateescape")

    def _look(self, key: str) -> LiveObject:
        return self._retried(lambda: self._bucket.look(key))

    def _retried(self, call: Callable[[], _T]) -> _T:
        return retry(call, self._timeout_s)
