"""Asking the store what the bucket has, and putting the answers into what is known.

Part of `RemoteView`. All of it waits, and is called without the engine's lock, which is taken for the answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from datacache.core.errors import (
    DatacacheError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
)
from datacache.core.threads import gather
from datacache.store.bucket import Bucket, FolderPage, is_probe
from datacache.store.retry import Backoff, retry
from datacache.writeback.model import Attributes, read_attributes
from datacache.writeback.remote_known import Known, RemoteFile, RemoteFolder, change_below, listed_file
from datacache.writeback.remote_requests import Requests

_log = logging.getLogger("datacache.writeback")
_RETRY_S = 1.0
"""How long a request that fails is tried again: who asks waits for it."""
_LONGEST_NAME = 255
_SMALL = 1000
"""Names of a folder from which on stores answer in pages."""


class Asking:
    """One prefix of a bucket. Attributes are those of what has none in the bucket."""

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        lock: threading.RLock,
        known: Known,
        requests: Requests,
        *,
        file_attributes: Attributes,
        folder_attributes: Attributes,
    ) -> None:
        self._bucket, self._prefix, self._lock = bucket, prefix, lock
        self._known, self._requests = known, requests
        self._file_default, self._folder_default = file_attributes, folder_attributes

    def below(self, folder: str, take: Callable[[dict[str, RemoteFile]], None]) -> None:
        """Give `take` every object below a folder, with its attributes, markers included: for renaming it. It is called
        under the lock, and what was applied until then is in it; the caller sees to the rest. May take long."""
        with self._requests.request() as since:
            found: dict[str, RemoteFile] = {}
            for page in self._bucket.list(self._prefix + folder):
                for info in page:
                    if not info.key.startswith(self._prefix + folder):
                        continue  # a store that lists too much: nothing of it may move with the folder
                    key = info.key[len(self._prefix) :]
                    if key != folder and all(_usable_name(name) for name in key.rstrip("/").split("/")):
                        found[key] = listed_file(info)
            with self._lock:
                for key, file in found.items():
                    known = self._known.file(key)
                    if known is not None and known.etag == file.etag and known.attributes is not None:
                        found[key] = file._replace(attributes=known.attributes)
            unknown = [key for key, file in found.items() if file.attributes is None]
            for key, looked in zip(unknown, gather(self._look, unknown), strict=True):
                if isinstance(looked, DatacacheError):
                    raise looked
                if looked is None:
                    del found[key]
                else:
                    found[key] = looked[0]
            with self._lock:
                for key, now in self._requests.changes(since):
                    change_below(found, folder, key, now)
                take(found)

    def list_folder(self, folder: str) -> None:
        """List a folder."""
        with self._requests.request(self._known.folders.get(folder) is not None) as since:
            self._take(folder, self._pages(folder), since)

    def _only_page(self, folder: str) -> list[FolderPage] | None:
        """Ask for what lies in a folder; None if it is more than one page."""
        pages = self._bucket.list_folder(self._prefix + folder)
        try:
            first = next(pages, None)
        except StoreAccessError:  # single names may be open to us
            return None
        if first is None:
            return []
        is_small = len(first.objects) + len(first.folders) < _SMALL
        return [first] if is_small and next(pages, None) is None else None

    def _take(self, folder: str, pages: Iterable[FolderPage], since: int) -> None:
        """Put a folder's pages into what is known."""
        found = RemoteFolder()
        prefix = self._prefix + folder
        for page in pages:
            self._requests.heard()
            for info in page.objects:
                name = _name_below(prefix, info.key)
                if not name:
                    found.marker = True
                elif _usable_name(name):
                    found.files[name] = listed_file(info)
                elif not is_probe(name):
                    found.hidden.append(folder + name)
            for key in page.folders:
                name = _name_below(prefix, key)
                if name.endswith("/") and _usable_name(name[:-1]):
                    found.folders[name] = None
                else:
                    found.hidden.append(folder + name)
        with self._lock:
            self._known.put(folder, found, self._requests.changes(since))

    def _pages(self, folder: str) -> Iterator[FolderPage]:
        """A folder's pages. A listing that breaks goes on behind the last of what it gave."""
        backoff = Backoff(_RETRY_S)
        start_after = ""
        while True:
            try:
                for page in self._bucket.list_folder(self._prefix + folder, start_after=start_after):
                    yield page
                    start_after = max([info.key for info in page.objects] + page.folders)
                return
            except StoreUnavailableError as exc:
                time.sleep(backoff.wait_s(exc))

    def probe(self, folder: str, name: str) -> None:
        """Ask for one name of a folder. The first time all of a small folder is listed: who works in it can go on when
        the store does not answer any more."""
        key = folder + name
        with self._requests.request(key in self._known.probes) as since:
            if self._list_small(folder, since):
                return
            info, is_folder = retry(lambda: self._bucket.find(self._prefix + key), _RETRY_S)
            with self._lock:
                file = None if info is None else listed_file(info)
                for changed, now in self._requests.changes(since):
                    if changed == key:
                        file = now
                    elif changed.startswith(f"{key}/") and now is not None:
                        is_folder = True
                self._known.put_probe(folder, name, file, is_folder=is_folder)

    def list_root(self) -> None:
        """List the root if it is small."""
        with self._requests.request() as since:
            self._list_small("", since)

    def _list_small(self, folder: str, since: int) -> bool:
        """List a folder that nobody looked into before, if it is small: whether that was done."""
        if not self._bucket.lists_in_pages or folder in self._known.folders or not self._known.is_new(folder):
            return False
        only_page = retry(lambda: self._only_page(folder), _RETRY_S)
        if only_page is not None:
            self._take(folder, only_page, since)
        return only_page is not None

    def check(self, key: str) -> None:
        """Ask for an object anew."""
        with self._lock:
            since = self._requests.begin()
        try:
            found = self._look(key)
        except StoreUnavailableError:
            return  # known as away from now on
        finally:
            with self._lock:
                ours = any(changed == key for changed, _ in self._requests.changes(since))
                self._requests.end()
        with self._lock:
            self._known.put_checked(key)
            if not ours:
                self._known.apply(key, found[0] if found is not None else None)

    def look_at(self, keys: Iterable[str]) -> None:
        """Look at objects' metadata."""
        keys = list(keys)
        found = gather(self._look, keys)
        errors = [result for result in found if isinstance(result, DatacacheError)]
        with self._lock:
            for key, result in zip(keys, found, strict=True):
                if not isinstance(result, DatacacheError):
                    self._known.learn(key, result)
        if errors and (len(keys) == 1 or len(errors) == len(keys)):
            raise errors[0]

    def look_at_folder(self, folder: str) -> None:
        """Look at a folder's marker."""
        found = self._look(folder) if folder else None
        with self._lock:
            self._known.markers[folder] = (_now(), found[1] if found is not None else self._folder_default)

    def _look(self, key: str) -> tuple[RemoteFile, Attributes] | None:
        """The object now with its attributes; None if it is gone. What is refused to us has plain ones."""
        default = self._folder_default if key.endswith("/") else self._file_default
        with self._requests.request(whole=False):
            try:
                live = retry(lambda: self._bucket.look(self._prefix + key), _RETRY_S)
            except ObjectNotFoundError as exc:
                if exc.url == self._bucket.url:
                    raise
                return None
            except StoreUnavailableError:
                raise
            except StoreError as exc:
                with self._lock:
                    file = self._known.file(key)
                if file is None:
                    raise
                _log.info("%s: its metadata cannot be looked at: %s", key, exc)
                attributes = self.plain_attributes(file)
                return file._replace(attributes=attributes), attributes
            attributes = read_attributes(live.metadata, default._replace(mtime_ns=live.info.mtime_ns))
            info = live.info
            return RemoteFile(info.size_bytes, info.etag, info.mtime_ns, attributes), attributes

    def plain_attributes(self, file: RemoteFile) -> Attributes:
        """A file's attributes as far as they are known."""
        return file.attributes or self._file_default._replace(mtime_ns=file.mtime_ns)


def _name_below(prefix: str, key: str) -> str:
    """Return what a listed key is called in its folder; no usable name for one that does not belong there."""
    return key[len(prefix) :] if key.startswith(prefix) else f"/{key}"


def _usable_name(name: str) -> bool:
    """Whether a directory can have such a name, and it is none of ours."""
    odd = name in ("", ".", "..") or "\0" in name or "/" in name or is_probe(name)
    return not odd and len(_encoded(name)) <= _LONGEST_NAME


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _now() -> float:
    return time.monotonic()
