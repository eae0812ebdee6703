"""Permissions and links of a listing's objects, from their metadata: what a read-write mount or s3fs-fuse wrote there.

Used by `create` with `--attributes`. A listing tells no metadata, so each object costs a request, some at a time. One
thread, which has others at work.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable
from typing import TypeVar

from datacache.core.errors import ObjectNotFoundError
from datacache.core.links import stays_inside
from datacache.core.threads import map_in_threads
from datacache.store.base import ObjectInfo
from datacache.store.bucket import Bucket, LiveObject
from datacache.store.local_walk import Links
from datacache.store.retry import retry
from datacache.writeback.model import Attributes, read_attributes

T = TypeVar("T")
_TARGET_BYTES = 4096
"""PATH_MAX: a link's target is no longer."""
_LINKS = 40
"""As many as the kernel follows."""
_PLAIN = Attributes(0, 0, 0, 0)


class ObjectAttributes:
    """Looks at the objects below a prefix of a bucket. `links` counts those that lead out, which are left out."""

    def __init__(self, bucket: Bucket, prefix: str, links: Links, *, timeout_s: float, threads: int) -> None:
        self._bucket, self._prefix, self._links = bucket, prefix, links
        self._timeout_s, self._threads = timeout_s, threads

    def page(self, page: list[ObjectInfo]) -> list[ObjectInfo]:
        """Return the same objects with what is known of them."""
        looked = map_in_threads(self._attributed, page, threads=self._threads)
        return [info for info in looked if info is not None]

    def _attributed(self, info: ObjectInfo) -> ObjectInfo | None:
        """Runs in any thread."""
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
        if not stays_inside(os.fsencode(info.key[len(self._prefix) :]), os.fsencode(target)):
            self._links.leave_out(info.key)
            return None
        return self._link(info, target)

    def _link(self, info: ObjectInfo, target: str) -> ObjectInfo:
        """A link with the object that it leads to; to a folder, or to nothing, with none."""
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
            if not stays_inside(os.fsencode(key[len(self._prefix) :]), os.fsencode(to)):
                break
        return ObjectInfo(info.key, 0, info.mtime_ns, "", target=target)

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

    def _retried(self, call: Callable[[], T]) -> T:
        return retry(call, self._timeout_s)
