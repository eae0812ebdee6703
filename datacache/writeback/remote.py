"""What the bucket has, as far as it is known: folders that were listed, names that were asked for, attributes.

Used by `fuse_mount/bucket_view.py` under the engine's lock. Nothing here waits: where something has to be asked of the
store, `Needs` is raised, whose `load` does that without the lock; then the caller starts again. Knowledge is used for
`ttl_s`, and for longer while the store cannot be reached. What this node itself has brought to the bucket is put in at
once, also into an answer that was on its way meanwhile.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from datacache.core.errors import (
    DatacacheError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
)
from datacache.core.threads import gather
from datacache.store.base import ObjectInfo
from datacache.store.bucket import Bucket, FolderPage, is_probe
from datacache.store.retry import Backoff, retry
from datacache.writeback.model import Attributes, read_attributes
from datacache.writeback.overlay import name_of, parent_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("datacache.writeback")
_AWAY_S = 3.0
"""How long a store that could not be reached is not asked again where something older will do. Then one request finds
out whether it is back."""
_ASKING_S = 35.0
"""How long a request may take that finds out: longer than its own timeout."""
_RETRY_S = 1.0
"""How long a request that fails is tried again: who asks waits for it."""
_SHORTEST_TTL_S = 0.2
"""What was asked for must be of use to who asked."""
_FOLDER_ATTRIBUTES_S = 60.0
_RELIST = 2000
"""Names up to which a folder is listed anew for one name's sake; of larger ones the name alone is asked for."""
_PROBES_BEFORE_LIST = 8
_MAX_NAMES = 300_000
"""Names of listed folders that are remembered."""
_KEPT_NAMES = 10_000
_MAX_PROBES = 20_000
_CHECKED_S = 0.5
_LONGEST_NAME = 255
_LOOK_AHEAD = 1000
"""Objects of a folder whose metadata are asked for when it is listed: with more that are unknown, names come first."""


class Needs(Exception):  # noqa: N818 - not an error: what has to be done before the answer is known
    """Raised under the lock: `load()` has to be called without it, and the call made again; with `final` what it
    returns is the answer."""

    def __init__(self, load: Callable[[], object], *, final: bool = False) -> None:
        super().__init__("needs something that takes time")
        self.load = load
        self.final = final


class RemoteFile(NamedTuple):
    """An object as the bucket lists it. `attributes` is None until its metadata was looked at."""

    size_bytes: int
    etag: str
    mtime_ns: int
    attributes: Attributes | None = None


class RemoteFolder:
    """What lies right in a folder."""

    __slots__ = ("files", "folders", "marker", "probes", "read_at")

    def __init__(self) -> None:
        self.files: dict[str, RemoteFile] = {}
        self.folders: dict[str, None] = {}
        self.marker = False
        """Whether the folder has an object of its own."""
        self.read_at = _now()

    def __len__(self) -> int:
        return len(self.files) + len(self.folders)


class _Probe(NamedTuple):
    read_at: float
    file: RemoteFile | None
    is_folder: bool


class RemoteView:
    """One prefix of a bucket. Folder keys are '' or end in '/', all keys relative to the prefix."""

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        lock: threading.RLock,
        *,
        ttl_s: float,
        file_attributes: Attributes,
        folder_attributes: Attributes,
        made_here: Callable[[str], bool],
    ) -> None:
        self._ttl_s = max(ttl_s, _SHORTEST_TTL_S)
        self._bucket, self._prefix, self._lock = bucket, prefix, lock
        self._file_default, self._folder_default = file_attributes, folder_attributes
        self._made_here = made_here
        self._folders: OrderedDict[str, RemoteFolder] = OrderedDict()
        self._names = 0
        self._news = False
        self._probes: dict[str, _Probe] = {}
        self._probed: dict[str, int] = {}  # how many names of a folder that was not listed were asked for
        self._checked: dict[str, float] = {}
        self._folder_attributes: dict[str, tuple[float, Attributes]] = {}
        self._events: deque[tuple[int, str, RemoteFile | None]] = deque()
        self._event = 0
        self._loading = 0
        self._away_until = 0.0
        self._away: StoreError | None = None

    # --- asking, under the lock --------------------------------------------------------------------------------------

    def entry(self, folder: str, name: str) -> tuple[RemoteFile | None, bool]:
        """The object of this name in a folder, and whether there is a folder of this name."""
        away = self._is_away()
        listed = self._folders.get(folder)
        if listed is not None and (away or self._is_fresh(listed.read_at)):
            return listed.files.get(name), f"{name}/" in listed.folders
        key = folder + name
        probe = self._probes.get(key)
        if probe is not None and (away or self._is_fresh(probe.read_at)):
            return probe.file, probe.is_folder
        if away:
            if self._made_here(folder):
                return None, False
            raise self._unavailable(key)
        small = len(listed) <= _RELIST if listed is not None else self._probed.get(folder, 0) >= _PROBES_BEFORE_LIST
        raise Needs(lambda: self._list(folder) if small else self._probe(folder, name))

    def folder(self, folder: str) -> RemoteFolder:
        """All that lies right in a folder, with attributes unless those of very many are not known."""
        away = self._is_away()
        listed = self._folders.get(folder)
        if listed is None or not (away or self._is_fresh(listed.read_at)):
            if away:
                if self._made_here(folder):
                    return RemoteFolder()
                raise self._unavailable(folder)
            raise Needs(lambda: self._list(folder))
        unknown = [name for name, file in listed.files.items() if file.attributes is None]
        if unknown and len(unknown) <= _LOOK_AHEAD and not away:
            raise Needs(lambda: self._look_at(folder + name for name in unknown))
        return listed

    def attributes(self, key: str, file: RemoteFile) -> Attributes:
        """A file's attributes, asked of the store if they are not known yet."""
        if file.attributes is not None:
            return file.attributes
        if self._is_away():
            raise self._unavailable(key)
        raise Needs(lambda: self._look_at([key]))

    def checked(self, key: str) -> None:
        """See that what is known of an object was asked for just now. For who is about to change a part of it."""
        at = self._checked.get(key)
        if (at is not None and at + _CHECKED_S > _now()) or self._is_away():
            return
        raise Needs(lambda: self._check(key))

    def _check(self, key: str) -> None:
        with self._lock:
            since = self._event
            self._loading += 1
        try:
            found = self._look(key)
        except StoreUnavailableError:
            return  # known as away from now on
        finally:
            with self._lock:
                self._loading -= 1
                ours = any(number > since and changed == key for number, changed, _ in self._events)
                if not self._loading:
                    self._events.clear()
        with self._lock:
            if len(self._checked) >= _MAX_PROBES:
                self._checked.clear()
            self._checked[key] = _now()
            if not ours:
                self._apply(key, found[0] if found is not None else None)

    def plain_attributes(self, file: RemoteFile) -> Attributes:
        """A file's attributes as far as they are known."""
        return file.attributes or self._file_default._replace(mtime_ns=file.mtime_ns)

    def folder_attributes(self, folder: str) -> Attributes:
        """A folder's attributes: its marker's, if it has one."""
        known = self._folder_attributes.get(folder)
        if known is not None and known[0] + max(self._ttl_s, _FOLDER_ATTRIBUTES_S) > _now():
            return known[1]
        if self._is_away():
            return known[1] if known is not None else self._folder_default
        raise Needs(lambda: self._look_at_folder(folder))

    def plain_folder_attributes(self, folder: str) -> Attributes:
        """The same as far as they are known."""
        known = self._folder_attributes.get(folder)
        return known[1] if known is not None else self._folder_default

    def has_marker(self, folder: str) -> bool:
        """Whether a folder is known to have an object of its own."""
        listed = self._folders.get(folder)
        return listed is not None and listed.marker

    # --- over a restart ----------------------------------------------------------------------------------------------

    def remembered(self) -> bytes | None:
        """What `recall` takes: the folders that were listed last, up to `_KEPT_NAMES` names. None if nothing is new."""
        if not self._news:
            return None
        self._news = False
        kept: dict[str, list[object]] = {}
        names = 0
        for folder, listed in reversed(self._folders.items()):
            names += len(listed) + 1
            if names > _KEPT_NAMES:
                break
            kept[folder] = [listed.marker, list(listed.folders), {n: list(f) for n, f in listed.files.items()}]
        return json.dumps(kept, separators=(",", ":")).encode()

    def recall(self, data: bytes) -> None:
        """What an earlier process knew, for as long as the store cannot be asked. What makes no sense is left alone."""
        try:
            for folder, (marker, folders, files) in reversed(json.loads(data).items()):
                found = RemoteFolder()
                found.marker = bool(marker)
                found.folders = dict.fromkeys(folders)
                for name, (size_bytes, etag, mtime_ns, attributes) in files.items():
                    known = Attributes(*attributes) if attributes is not None else None
                    found.files[name] = RemoteFile(size_bytes, etag, mtime_ns, known)
                found.read_at = -math.inf
                self._folders[folder] = found
                self._names += len(found)
        except (ValueError, TypeError, AttributeError) as exc:
            _log.info("what was known of the bucket before is of no use: %s", exc)

    # --- what this node did, under the lock --------------------------------------------------------------------------

    def applied(self, key: str, info: ObjectInfo | None, attributes: Attributes | None) -> RemoteFile | None:
        """The bucket has this now (None: nothing under the key)."""
        file = None if info is None else RemoteFile(info.size_bytes, info.etag, info.mtime_ns, attributes)
        if self._loading:
            self._event += 1
            self._events.append((self._event, key, file))
        if key.endswith("/"):
            if attributes is not None:
                self._folder_attributes[key] = (_now(), attributes)
            else:
                self._folder_attributes.pop(key, None)
        self._apply(key, file)
        self._news = True
        return file

    def expire(self, folder: str) -> None:
        """Have a folder listed anew before it is used again."""
        listed = self._folders.get(folder)
        if listed is not None:
            listed.read_at = -math.inf
        for key in [key for key in self._probes if parent_of(key) == folder]:
            del self._probes[key]

    def _apply(self, key: str, file: RemoteFile | None) -> None:
        folder, name = parent_of(key), name_of(key)
        self._probes.pop(key.rstrip("/"), None)
        listed = self._folders.get(folder)
        if listed is not None:
            before = len(listed)
            if name.endswith("/"):
                if file is not None:
                    listed.folders[name] = None
                else:
                    listed.folders.pop(name, None)
            elif file is not None:
                listed.files[name] = file
            else:
                listed.files.pop(name, None)
            self._names += len(listed) - before
        own = self._folders.get(key) if name.endswith("/") else None
        if own is not None:
            own.marker = file is not None
        while file is not None and folder:  # the folders above are there now
            above = self._folders.get(parent_of(folder))
            if above is not None:
                above.folders[name_of(folder)] = None
            self._probes.pop(folder.rstrip("/"), None)
            folder = parent_of(folder)

    # --- asking the store, without the lock --------------------------------------------------------------------------

    def below(self, folder: str, take: Callable[[dict[str, RemoteFile]], None]) -> None:
        """Give `take` every object below a folder, with its attributes, markers included: for renaming it. It is called
        under the lock, and what was applied until then is in it; the caller sees to the rest. May take long."""
        with self._request() as since:
            found: dict[str, RemoteFile] = {}
            for page in self._bucket.list(self._prefix + folder):
                for info in page:
                    key = info.key[len(self._prefix) :]
                    if key != folder and all(_usable_name(name) for name in key.rstrip("/").split("/")):
                        found[key] = RemoteFile(info.size_bytes, info.etag, info.mtime_ns)
            with self._lock:
                for key, file in found.items():
                    listed = self._folders.get(parent_of(key))
                    known = listed.files.get(name_of(key)) if listed is not None else None
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
                for number, key, now in self._events:
                    if number > since:
                        change_below(found, folder, key, now)
                take(found)

    def _list(self, folder: str) -> None:
        with self._request(self._folders.get(folder) is not None) as since:
            found = RemoteFolder()
            for page in self._pages(folder):
                for info in page.objects:
                    name = info.key[len(self._prefix) + len(folder) :]
                    if not name:
                        found.marker = True
                    elif _usable_name(name):
                        found.files[name] = RemoteFile(info.size_bytes, info.etag, info.mtime_ns)
                for key in page.folders:
                    name = key[len(self._prefix) + len(folder) :]
                    if _usable_name(name.rstrip("/")):
                        found.folders[name] = None
            with self._lock:
                self._put(folder, found, since)

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

    def _put(self, folder: str, found: RemoteFolder, since: int) -> None:
        old = self._folders.pop(folder, None)
        if old is not None:
            self._names -= len(old)
            for name, file in found.files.items():
                known = old.files.get(name)
                if known is not None and known.etag == file.etag and known.attributes is not None:
                    found.files[name] = file._replace(attributes=known.attributes)
        found.read_at = _now()  # from its end on, or a listing that takes longer than it is used for is never of use
        self._folders[folder] = found
        self._names += len(found)
        self._news = True
        self._probed.pop(folder, None)
        for number, key, now in self._events:
            if number > since and key.startswith(folder):
                self._apply(key, now)
        while self._names > _MAX_NAMES and len(self._folders) > 1:
            _, forgotten = self._folders.popitem(last=False)
            self._names -= len(forgotten)

    def _probe(self, folder: str, name: str) -> None:
        key = folder + name
        with self._request(key in self._probes) as since:
            info, is_folder = retry(lambda: self._bucket.find(self._prefix + key), _RETRY_S)
            with self._lock:
                if len(self._probes) >= _MAX_PROBES:
                    self._probes.clear()
                    self._probed.clear()
                file = None if info is None else RemoteFile(info.size_bytes, info.etag, info.mtime_ns)
                for number, changed, now in self._events:
                    if number > since and changed == key:
                        file = now
                    elif number > since and changed.startswith(f"{key}/") and now is not None:
                        is_folder = True
                self._probes[key] = _Probe(_now(), file, is_folder)
                if folder not in self._folders:
                    self._probed[folder] = self._probed.get(folder, 0) + 1

    def _look_at(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        found = gather(self._look, keys)
        errors = [result for result in found if isinstance(result, DatacacheError)]
        with self._lock:
            for key, result in zip(keys, found, strict=True):
                if not isinstance(result, DatacacheError):
                    self._learn(key, result)
        if errors and (len(keys) == 1 or len(errors) == len(keys)):
            raise errors[0]

    def _look(self, key: str) -> tuple[RemoteFile, Attributes] | None:
        """The object now with its attributes; None if it is gone. What is refused to us has plain ones."""
        default = self._folder_default if key.endswith("/") else self._file_default
        with self._request(whole=False):
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
                    listed = self._folders.get(parent_of(key))
                    file = listed.files.get(name_of(key)) if listed is not None else None
                if file is None:
                    raise
                _log.info("%s: its metadata cannot be looked at: %s", key, exc)
                attributes = self.plain_attributes(file)
                return file._replace(attributes=attributes), attributes
            attributes = read_attributes(live.metadata, default._replace(mtime_ns=live.info.mtime_ns))
            info = live.info
            return RemoteFile(info.size_bytes, info.etag, info.mtime_ns, attributes), attributes

    def _learn(self, key: str, found: tuple[RemoteFile, Attributes] | None) -> None:
        listed, probe = self._folders.get(parent_of(key)), self._probes.get(key)
        known = listed.files.get(name_of(key)) if listed is not None else None
        if found is None:
            if known is not None:
                self.expire(parent_of(key))
            self._probes.pop(key, None)
            return
        if listed is not None and known is not None and (known.attributes is None or known.etag == found[0].etag):
            listed.files[name_of(key)] = found[0]
        if probe is not None and probe.file is not None:
            self._probes[key] = probe._replace(file=found[0])

    def _look_at_folder(self, folder: str) -> None:
        found = self._look(folder) if folder else None
        with self._lock:
            self._folder_attributes[folder] = (_now(), found[1] if found is not None else self._folder_default)

    @contextmanager
    def _request(self, known: bool = False, *, whole: bool = True) -> Iterator[int]:
        """Around a request: what happens meanwhile is remembered; a store that is away, or lets us in no more, is an
        error only where nothing older is known. Not `whole`: what is refused is one object."""
        with self._lock:
            self._loading += 1
            since = self._event
        try:
            yield since
        except StoreError as exc:
            is_missing = isinstance(exc, ObjectNotFoundError) and exc.url == self._bucket.url
            refused = whole and (is_missing or isinstance(exc, StoreAccessError))
            if not refused and not isinstance(exc, StoreUnavailableError):
                raise
            with self._lock:
                if self._away is None:
                    _log.warning("%s; what was known of the bucket is shown meanwhile", exc.message)
                self._away, self._away_until = exc, _now() + _AWAY_S
            if not known:
                raise
        else:
            with self._lock:
                self._away = None
        finally:
            with self._lock:
                self._loading -= 1
                if not self._loading:
                    self._events.clear()

    def _is_away(self) -> bool:
        """Whether older knowledge has to do. Once in a while it says no to one caller, who finds out."""
        if self._away is None:
            return False
        if _now() < self._away_until:
            return True
        self._away_until = _now() + _ASKING_S  # the others use what is known until this one has an answer
        return False

    def _is_fresh(self, read_at: float) -> bool:
        return read_at + self._ttl_s > _now()

    def _unavailable(self, key: str) -> StoreError:
        kind = StoreAccessError if isinstance(self._away, StoreAccessError) else StoreUnavailableError
        why = self._away.message if self._away is not None else "the store is away"
        return kind(f"{key or '/'}: {why}", url=f"{self._bucket.url}/{self._prefix}{key}")


def change_below(found: dict[str, RemoteFile], folder: str, key: str, file: RemoteFile | None) -> None:
    """An object below a folder is another one now, or gone."""
    if key.startswith(folder) and key != folder:
        found.pop(key, None)
        if file is not None:
            found[key] = file


def _usable_name(name: str) -> bool:
    """Whether a directory can have such a name, and it is none of ours."""
    odd = name in ("", ".", "..") or "\0" in name or is_probe(name)
    return not odd and len(_encoded(name)) <= _LONGEST_NAME


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _now() -> float:
    return time.monotonic()
