"""Asking the store what the bucket has, and putting the answers into what is known.

Part of `RemoteView`. `Asking` has the questions: all of them wait, and are called without the engine's lock, which they
take for the answers. `Requests` is around each of them and notices when the store is away; its `away` side (`is_away`,
`problem`, `unavailable`) needs the lock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from datacache.core.concurrency import gather
from datacache.core.errors import (
    DatacacheError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
)
from datacache.core.ids import ObjectRef
from datacache.store.bucket import FolderPage, LiveObject, is_probe
from datacache.store.retry import Backoff, retry
from datacache.writeback.engine import WriteBack
from datacache.writeback.model import Attributes, read_attributes
from datacache.writeback.remote.known import RemoteFile, RemoteFolder, change_below, listed_file

_log = logging.getLogger("datacache.writeback")
_RETRY_S = 1.0
"""How long a request that fails is tried again: its caller waits for it."""
_LONGEST_NAME = 255
_SMALL = 1000
"""Names of a folder from which on stores answer in pages."""
_AWAY_S = 3.0
"""How long a store that could not be reached is not asked again where something older will do. Then one request finds
out whether it is back."""
_PATIENCE_S = 3.0
"""Patience with a store that says nothing, where something older will do."""
_IMPATIENCE_S = 0.25
"""Patience while it is away, of the caller that finds out whether it is back."""
_TOLD_S = 60.0
"""How long it is told that the store does not answer while nobody asks it: it may have come back."""
_ASKING_S = 35.0
"""How long a request may take that finds out: longer than its own timeout."""


class Requests:
    """The requests of one mount that are under way, and whether the store answers them."""

    def __init__(self, engine: WriteBack) -> None:
        self._bucket, self._prefix, self._lock, self._known = engine.bucket, engine.prefix, engine.lock, engine.known
        self._away_until = self._away_since = 0.0
        self._away: StoreError | None = None
        """Why the store cannot be reached."""
        self.heard_at = 0.0
        """The time at which the store last said something: a part of a listing, an answer."""

    @contextlib.contextmanager
    def request(self, has_older: bool = False, *, whole: bool = True) -> Iterator[int]:
        """Have what this node does meanwhile remembered, for `Known.own_changes`. A store that is away, or lets us in
        no more, is an error only where nothing older is known. Not `whole`: what is refused is one object."""
        with self._lock:
            since = self._known.begin_request()
        try:
            yield since
        except StoreError as exc:
            is_missing = isinstance(exc, ObjectNotFoundError) and exc.url == self._bucket.url
            refused = whole and (is_missing or isinstance(exc, StoreAccessError))
            if not refused and not isinstance(exc, StoreUnavailableError):
                raise
            with self._lock:
                self._note_away_locked(exc, _AWAY_S)
            if not has_older:
                raise
        else:
            with self._lock:
                self.note_answer()
        finally:
            with self._lock:
                self._known.end_request()

    def note_answer(self) -> None:
        """Take in that the store has done something: it is there. Under the lock."""
        self._away = None
        self.heard_at = time.monotonic()

    def wait_patiently(self, load: Callable[[], object]) -> None:
        """Make a request where something older will do. It goes on in a thread of its own when the store says nothing
        for `_PATIENCE_S`; the store is then away until it answers, so nobody waits for one that hangs. Without the
        lock."""
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
            patience_s = _PATIENCE_S if self._away is None else _IMPATIENCE_S
        began = time.monotonic()
        threading.Thread(target=work, name="asks the store", daemon=True).start()
        while (left_s := max(began, self.heard_at) + patience_s - time.monotonic()) > 0:
            if done.wait(left_s):
                if errors:
                    raise errors[0]
                return
        with self._lock:
            if done.is_set():
                return
            url = self._bucket.url
            silent = self._away or StoreUnavailableError(f"{url} does not answer", url=url)
            self._note_away_locked(silent, _ASKING_S)

    def is_away(self) -> bool:
        """Return whether older knowledge has to do. Once in a while one caller is told no, and finds out."""
        if self._away is None:
            return False
        if time.monotonic() < self._away_until:
            return True
        self._away_until = time.monotonic() + _ASKING_S  # the others use what is known until this one has an answer
        return False

    def problem(self) -> tuple[str, float]:
        """Return why the store does not answer, and for how many seconds it has not; '' while it does."""
        if not isinstance(self._away, StoreUnavailableError) or time.monotonic() > self._away_until + _TOLD_S:
            return "", 0.0
        return self._away.message, time.monotonic() - self._away_since

    def unavailable(self, key: str) -> StoreError:
        """Return the error for what is not known of a key while the store is away."""
        kind = StoreAccessError if isinstance(self._away, StoreAccessError) else StoreUnavailableError
        why = self._away.message if self._away is not None else "the store is away"
        return kind(f"{key or '/'}: {why}", url=f"{self._bucket.url}/{self._prefix}{key}")

    def _note_away_locked(self, error: StoreError, for_s: float) -> None:
        if self._away is None:
            self._away_since = time.monotonic()
            _log.warning("%s; what was known of the bucket is shown meanwhile", error.message)
        self._away, self._away_until = error, time.monotonic() + for_s


class Asking:
    """The questions about one prefix of a bucket. What has no attributes in the bucket gets `file_attributes` or
    `folder_attributes`."""

    def __init__(self, engine: WriteBack, *, file_attributes: Attributes, folder_attributes: Attributes) -> None:
        self._bucket, self._prefix, self._lock, self._known = engine.bucket, engine.prefix, engine.lock, engine.known
        self.requests = Requests(engine)
        self._file_default, self._folder_default = file_attributes, folder_attributes

    # --- folders -----------------------------------------------------------------------------------------------------

    def list_folder(self, folder: str) -> None:
        """List a folder."""
        with self.requests.request(folder in self._known.folders) as since:
            self._take(folder, self._pages(folder), since)

    def list_root(self) -> None:
        """List the root if it is small."""
        with self.requests.request() as since:
            self._list_small("", since)

    def list_below(self, folders: Iterable[str]) -> None:
        """List every object below folders, with its attributes, markers included: for renaming them, into
        `Known.below`. May take long."""
        with self.requests.request() as since:
            below = {folder: self._find_below(folder) for folder in folders}
            with self._lock:
                for key, now in self._known.own_changes(since):
                    for folder, found in below.items():
                        change_below(found, folder, key, now)
                self._known.below |= {folder: (time.monotonic(), found) for folder, found in below.items()}

    def _find_below(self, folder: str) -> dict[str, RemoteFile]:
        found: dict[str, RemoteFile] = {}
        for page in self._bucket.list(self._prefix + folder):
            for info in page:
                if not info.key.startswith(self._prefix + folder):
                    continue  # a store that lists too much: nothing of it may move with the folder
                key = info.key[len(self._prefix) :]
                if key != folder and all(_is_usable(name) for name in key.rstrip("/").split("/")):
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
        return found

    def _list_small(self, folder: str, since: int) -> bool:
        """List a folder that nobody looked into before, if it is small; return whether that was done."""
        known = self._known
        if not self._bucket.lists_in_pages or folder in known.folders or not known.note_first_look(folder):
            return False
        only_page = retry(lambda: self._only_page(folder), _RETRY_S)
        if only_page is not None:
            self._take(folder, only_page, since)
        return only_page is not None

    def _only_page(self, folder: str) -> list[FolderPage] | None:
        """Ask for the contents of a folder; None if they are more than one page."""
        pages = self._bucket.list_folder(self._prefix + folder)
        try:
            first = next(pages, None)
        except StoreAccessError:  # single names may be open to us
            return None
        if first is None:
            return []
        is_small = len(first.objects) + len(first.folders) < _SMALL
        return [first] if is_small and next(pages, None) is None else None

    def _pages(self, folder: str) -> Iterator[FolderPage]:
        """Yield a folder's pages. A listing that breaks goes on behind the last of what it gave."""
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

    def _take(self, folder: str, pages: Iterable[FolderPage], since: int) -> None:
        """Put a folder's pages into what is known."""
        found = RemoteFolder()
        prefix = self._prefix + folder
        for page in pages:
            self.requests.heard_at = time.monotonic()
            for info in page.objects:
                name = _name_below(prefix, info.key)
                if not name:
                    found.marker = True
                elif _is_usable(name):
                    found.files[name] = listed_file(info)
                elif not is_probe(name):
                    found.hidden.append(folder + name)
            for key in page.folders:
                name = _name_below(prefix, key)
                if name.endswith("/") and _is_usable(name[:-1]):
                    found.folders[name] = None
                else:
                    found.hidden.append(folder + name)
        with self._lock:
            self._known.put(folder, found, self._known.own_changes(since))

    # --- single names ------------------------------------------------------------------------------------------------

    def probe(self, folder: str, name: str) -> None:
        """Ask for one name of a folder. The first time all of a small folder is listed: programs in it can go on when
        the store does not answer any more."""
        key = folder + name
        with self.requests.request(key in self._known.probes) as since:
            if self._list_small(folder, since):
                return
            info, is_folder = retry(lambda: self._bucket.find(self._prefix + key), _RETRY_S)
            with self._lock:
                file = None if info is None else listed_file(info)
                for changed, now in self._known.own_changes(since):
                    if changed == key:
                        file = now
                    elif changed.startswith(f"{key}/") and now is not None:
                        is_folder = True
                self._known.put_probe(folder, name, file, is_folder=is_folder)

    def check(self, key: str, brings: ObjectRef | None = None) -> None:
        """Ask for an object anew. If it still is the one that is to be brought, its bytes come along and are kept for
        a moment (`Known.take_brought`)."""
        with self._lock:
            since = self._known.begin_request()
        try:
            found = self._look(key, brings)
        except StoreUnavailableError:
            return  # known as away from now on
        finally:
            with self._lock:
                is_own = any(changed == key for changed, _ in self._known.own_changes(since))
                self._known.end_request()
        with self._lock:
            self._known.put_checked(key)
            if not is_own:
                self._known.apply(key, found[0] if found is not None else None)

    def look_at(self, keys: Iterable[str]) -> None:
        """Look at objects' metadata."""
        keys = list(keys)
        found = gather(self._look, keys)
        errors = [result for result in found if isinstance(result, DatacacheError)]
        with self._lock:
            for key, result in zip(keys, found, strict=True):
                if not isinstance(result, DatacacheError):
                    self._known.put_attributes(key, result)
        if errors and (len(keys) == 1 or len(errors) == len(keys)):
            raise errors[0]

    def look_at_folder(self, folder: str) -> None:
        """Look at a folder's marker."""
        found = self._look(folder) if folder else None
        with self._lock:
            self._known.put_marker(folder, found[1] if found is not None else self._folder_default)

    def _ask(self, key: str, brings: ObjectRef | None) -> LiveObject:
        if brings is not None:
            with contextlib.suppress(ObjectChangedError, ObjectNotFoundError):
                live, data = self._bucket.fetch(brings)
                with self._lock:
                    self._known.put_brought(key, brings.etag, bytes(data))
                return live
        return self._bucket.look(self._prefix + key)

    def _look(self, key: str, brings: ObjectRef | None = None) -> tuple[RemoteFile, Attributes] | None:
        """Return the object now with its attributes; None if it is gone. What is refused to us has plain ones."""
        default = self._folder_default if key.endswith("/") else self._file_default
        with self.requests.request(whole=False):
            try:
                live = retry(lambda: self._ask(key, brings), _RETRY_S)
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
            info = live.info
            attributes = read_attributes(live.metadata, default._replace(mtime_ns=info.mtime_ns), info.size_bytes)
            return RemoteFile(info.size_bytes, info.etag, info.mtime_ns, attributes), attributes

    def plain_attributes(self, file: RemoteFile) -> Attributes:
        """Return a file's attributes as far as they are known."""
        return file.attributes or self._file_default._replace(mtime_ns=file.mtime_ns)


def _name_below(prefix: str, key: str) -> str:
    """Return a listed key's name in its folder; no usable name for one that does not belong there."""
    return key[len(prefix) :] if key.startswith(prefix) else f"/{key}"


def _is_usable(name: str) -> bool:
    """Return whether a directory can have such a name, and it is none of ours."""
    odd = name in ("", ".", "..") or "\0" in name or "/" in name or is_probe(name)
    return not odd and len(name.encode("utf-8", "surrogateescape")) <= _LONGEST_NAME
