"""Asking the store what the bucket has, and putting the answers into what is known.

Part of `RemoteView`. All of it waits, and is called without the engine's lock, which is taken for the answers.

Requests to the store that are under way: what this node does meanwhile, and whether the store can be reached.

Part of `RemoteView`. `request` is around a request, without the engine's lock; all else is called under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from datacache.core.concurrency import gather
from datacache.core.errors import (
    DatacacheError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
)
from datacache.store.bucket import Bucket, FolderPage, is_probe
from datacache.store.retry import Backoff, retry
from datacache.writeback.model import Attributes, read_attributes
from datacache.writeback.remote.known import Changed, Known, RemoteFile, RemoteFolder, change_below, listed_file

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


_AWAY_S = 3.0
"""How long a store that could not be reached is not asked again where something older will do. Then one request finds
out whether it is back."""
_PATIENCE_S = 3.0
"""Patience with a store that says nothing, where something older will do."""
_IMPATIENCE_S = 0.25
"""Patience while it is away, of the one who finds out whether it is back."""
_TOLD_S = 60.0
"""How long it is told that the store does not answer while nobody asks it: it may have come back."""
_ASKING_S = 35.0
"""How long a request may take that finds out: longer than its own timeout."""


class Requests:
    """Those of one mount."""

    def __init__(self, bucket: Bucket, prefix: str, lock: threading.RLock) -> None:
        self._bucket, self._prefix, self._lock = bucket, prefix, lock
        self._events: deque[tuple[int, str, RemoteFile | None]] = deque()
        self._event = 0
        self._loading = 0
        self._away_until = self._away_since = 0.0
        self.away: StoreError | None = None
        """Why the store cannot be reached."""
        self._heard_at = 0.0
        """The time at which the store last said something: a part of a listing, an answer."""

    def begin(self) -> int:
        """A request begins: what `changes` is to be asked with. `end` has to follow."""
        self._loading += 1
        return self._event

    def end(self) -> None:
        """A request has ended."""
        self._loading -= 1
        if not self._loading:
            self._events.clear()

    def patiently(self, load: Callable[[], object]) -> None:
        """Make a request where something older will do. It goes on in a thread of its own when the store says nothing
        for `_PATIENCE_S`; the store is then away until it answers, so nobody waits for one that hangs. Called without
        the lock."""
        errors: list[BaseException] = []
        done = threading.Event()

        def work() -> None:
            try:
                load()
            except BaseException as exc:  # noqa: BLE001 - the caller's, if it still waits
                errors.append(exc)
            finally:
                done.set()

        with self._lock:
            patience_s = _PATIENCE_S if self.away is None else _IMPATIENCE_S
        began = _now()
        threading.Thread(target=work, name="asks the store", daemon=True).start()
        while (left_s := max(began, self._heard_at) + patience_s - _now()) > 0:
            if done.wait(left_s):
                if errors:
                    raise errors[0]
                return
        with self._lock:
            if done.is_set():
                return
            url = self._bucket.url
            self._found_away(self.away or StoreUnavailableError(f"{url} does not answer", url=url), _ASKING_S)

    def heard(self) -> None:
        """The store has said a part of an answer: it works on the request."""
        self._heard_at = _now()

    def note(self, key: str, file: RemoteFile | None) -> None:
        """This node has brought an object to the bucket, or deleted it (None)."""
        if self._loading:
            self._event += 1
            self._events.append((self._event, key, file))

    def changes(self, since: int) -> Iterator[Changed]:
        """What was noted since a request began, in order."""
        return ((key, file) for number, key, file in self._events if number > since)

    @contextmanager
    def request(self, known: bool = False, *, whole: bool = True) -> Iterator[int]:
        """Around a request: what happens meanwhile is remembered; a store that is away, or lets us in no more, is an
        error only where nothing older is known. Not `whole`: what is refused is one object."""
        with self._lock:
            since = self.begin()
        try:
            yield since
        except StoreError as exc:
            is_missing = isinstance(exc, ObjectNotFoundError) and exc.url == self._bucket.url
            refused = whole and (is_missing or isinstance(exc, StoreAccessError))
            if not refused and not isinstance(exc, StoreUnavailableError):
                raise
            with self._lock:
                self._found_away(exc, _AWAY_S)
            if not known:
                raise
        else:
            with self._lock:
                self.away = None
                self._heard_at = _now()
        finally:
            with self._lock:
                self.end()

    def is_away(self) -> bool:
        """Whether older knowledge has to do. Once in a while it says no to one caller, who finds out."""
        if self.away is None:
            return False
        if _now() < self._away_until:
            return True
        self._away_until = _now() + _ASKING_S  # the others use what is known until this one has an answer
        return False

    def problem(self) -> tuple[str, float]:
        """Return why the store does not answer, and for how many seconds it has not; '' while it does."""
        if not isinstance(self.away, StoreUnavailableError) or _now() > self._away_until + _TOLD_S:
            return "", 0.0
        return self.away.message, _now() - self._away_since

    def _found_away(self, error: StoreError, for_s: float) -> None:
        if self.away is None:
            self._away_since = _now()
            _log.warning("%s; what was known of the bucket is shown meanwhile", error.message)
        self.away, self._away_until = error, _now() + for_s

    def unavailable(self, key: str) -> StoreError:
        """The error for what is not known while the store is away."""
        kind = StoreAccessError if isinstance(self.away, StoreAccessError) else StoreUnavailableError
        why = self.away.message if self.away is not None else "the store is away"
        return kind(f"{key or '/'}: {why}", url=f"{self._bucket.url}/{self._prefix}{key}")
