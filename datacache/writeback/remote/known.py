"""Holds what is known of the bucket: folders that were listed, names that were asked for, attributes. Without any I/O.

Part of the engine (`WriteBack.known`), under its lock. `RemoteView` reads it and has the store asked for what is
missing; the engine puts in what this node uploads and deletes, at once and also into answers that are on their way.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from datacache.store.base import ObjectInfo
from datacache.writeback.model import Attributes, name_of, parent_of

_log = logging.getLogger("datacache.writeback")
_MAX_NAMES = 300_000
"""Names of listed folders that are remembered, with the folders' own."""
_KEPT_NAMES = 10_000
_MAX_PROBES = 20_000
_MAX_MARKERS = 50_000
"""Folders whose attributes are remembered. Each takes some 400 bytes."""
_MOST_BROUGHT = 16
"""Small objects whose bytes came when they were asked for, and whose openers have not taken them yet."""
_HIDDEN = 1000
"""Names of a folder that are counted though they cannot be shown."""


class RemoteFile(NamedTuple):
    """An object as the bucket lists it. `attributes` is None until its metadata was looked at."""

    size_bytes: int
    etag: str
    mtime_ns: int
    attributes: Attributes | None = None


class RemoteFolder:
    """The contents of one folder, without those of the folders in it."""

    __slots__ = ("files", "folders", "hidden", "marker", "read_at")

    def __init__(self) -> None:
        self.files: dict[str, RemoteFile] = {}
        self.folders: dict[str, None] = {}
        self.marker = False
        """Tells whether the folder has an object of its own."""
        self.hidden: list[str] = []
        """Keys (up to `_HIDDEN`) that a directory cannot show: what is no name, and files whose name a folder has."""
        self.read_at = time.monotonic()

    def __len__(self) -> int:
        return len(self.files) + len(self.folders)


class Probe(NamedTuple):
    """The answer to a question for one name."""

    read_at: float
    file: RemoteFile | None
    is_folder: bool


Changed = tuple[str, RemoteFile | None]
"""A key, and the object that this node has put under it; None: deleted."""

ChangedWith = tuple[str, RemoteFile | None, Attributes | None]
"""A `Changed` with the attributes that the object has there."""


class Known:
    """One prefix of a bucket. Folder keys are '' or end in '/', all keys relative to the prefix."""

    def __init__(self) -> None:
        self.folders: OrderedDict[str, RemoteFolder] = OrderedDict()
        self.probes: dict[str, Probe] = {}
        self.probed: dict[str, int] = {}  # how many names of a folder were asked for since it was listed
        self.checked: dict[str, float] = {}
        self._brought: deque[tuple[str, str, bytes]] = deque(maxlen=_MOST_BROUGHT)
        self.markers: OrderedDict[str, tuple[float, Attributes]] = OrderedDict()
        """Attributes of folders, and when they were asked for."""
        self.below: dict[str, tuple[float, dict[str, RemoteFile]]] = {}
        """Everything below a folder that is about to be renamed, and when it was listed."""
        self.filled: set[str] = set()
        """Folders below which this process has put something into the bucket."""
        self._looked_into: set[str] = set()
        self._names = 0
        self._has_news = False
        self._requests = 0  # under way
        self._event = 0
        self._events: deque[tuple[int, str, RemoteFile | None]] = deque()  # numbered, while requests are under way

    def file(self, key: str) -> RemoteFile | None:
        """Return an object as its folder lists it."""
        listed = self.folders.get(parent_of(key))
        return listed.files.get(name_of(key)) if listed is not None else None

    def size_of(self, key: str) -> int:
        """Return how large an object is as far as that is known; 0 where it is not."""
        file = self.file(key)
        if file is None:
            probe = self.probes.get(key)
            file = probe.file if probe is not None else None
        return file.size_bytes if file is not None else 0

    def hidden(self) -> list[str]:
        """Return the keys that no file can have, of all folders that are remembered."""
        return [key for listed in self.folders.values() for key in listed.hidden]

    def note_first_look(self, folder: str) -> bool:
        """Note that somebody looks into a folder; return whether nobody has before."""
        is_first = folder not in self._looked_into
        if len(self._looked_into) >= _MAX_PROBES:
            self._looked_into.clear()
        self._looked_into.add(folder)
        return is_first

    # --- over a restart ----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, list[object]] | None:
        """Return the folders that were listed last, up to `_KEPT_NAMES` names, for `recall`. None if nothing is new."""
        if not self._has_news:
            return None
        self._has_news = False
        kept: dict[str, list[object]] = {}
        names = 0
        for folder, listed in reversed(self.folders.items()):
            names += len(listed) + 1
            if names > _KEPT_NAMES:
                break
            kept[folder] = [listed.marker, list(listed.folders), {n: list(f) for n, f in listed.files.items()}]
        return kept

    def recall(self, kept: dict[str, Any], changes: Iterable[ChangedWith]) -> None:
        """Take in what an earlier process knew and what it has changed since: for outages, as all of it is too old."""
        recalled: dict[str, RemoteFolder] = {}
        for folder, (marker, folders, files) in reversed(kept.items()):
            found = recalled[folder] = RemoteFolder()
            found.marker = bool(marker)
            found.folders = dict.fromkeys(folders)
            found.files = {name: file_of(values) for name, values in files.items()}
            found.read_at = -math.inf
        self.folders.update(recalled)
        self._names += sum(map(len, recalled.values())) + len(recalled)
        for key, file, attributes in changes:
            self._take_in(key, file, attributes)

    # --- what this node does -----------------------------------------------------------------------------------------

    def apply_own(self, key: str, file: RemoteFile | None, attributes: Attributes | None) -> None:
        """Put in that this node has brought an object to the bucket, or deleted it (None)."""
        if self._requests:
            self._event += 1
            self._events.append((self._event, key, file))
        self._take_in(key, file, attributes)
        for folder, (_, found) in self.below.items():
            change_below(found, folder, key, file)
        if file is not None:
            above = parent_of(key)
            while above and above not in self.filled:
                self.filled.add(above)
                above = parent_of(above)

    def _take_in(self, key: str, file: RemoteFile | None, attributes: Attributes | None) -> None:
        if key.endswith("/"):
            if attributes is not None:
                self.put_marker(key, attributes)
            else:
                self.markers.pop(key, None)
        self.apply(key, file)
        self._has_news = True

    def note_made(self, folder: str) -> None:
        """Note that this node makes a folder where there is none: the bucket has nothing in it."""
        if folder not in self.folders:
            self.folders[folder] = RemoteFolder()
            self.folders[folder].read_at = -math.inf  # others may put something there at once
            self._names += 1
            self._forget_oldest()
            self._has_news = True

    def begin_request(self) -> int:
        """Note that a request for the bucket begins, and return its number for `own_changes`. `end_request` follows."""
        self._requests += 1
        return self._event

    def end_request(self) -> None:
        """Forget what this node has done, once no request is under way that may not have seen it."""
        self._requests -= 1
        if not self._requests:
            self._events.clear()

    def own_changes(self, since: int) -> Iterator[Changed]:
        """Return what this node has done since a request began, in order."""
        return ((key, file) for number, key, file in self._events if number > since)

    # --- what the store says -----------------------------------------------------------------------------------------

    def apply(self, key: str, file: RemoteFile | None) -> None:
        """Put in that an object is another one now, or gone (None)."""
        folder, name = parent_of(key), name_of(key)
        self._put_found(key, file)
        listed = self.folders.get(folder)
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
        own = self.folders.get(key) if name.endswith("/") else None
        if own is not None:
            own.marker = file is not None
        while file is not None and folder:  # the folders above are there now
            above = self.folders.get(parent_of(folder))
            if above is not None:
                above.folders[name_of(folder)] = None
            self._put_found(folder, file)
            folder = parent_of(folder)

    def _put_found(self, key: str, file: RemoteFile | None) -> None:
        """Keep what was brought under a name also where nobody lists the folder, or in an outage there would be errors
        for what this node did itself. What a deletion leaves under a name has to be asked for."""
        path = key.rstrip("/")
        probe = self.probes.pop(path, None)
        if file is None or parent_of(path) in self.folders:
            return
        if path != key:
            self._put_probe(path, probe.file if probe is not None else None, is_folder=True)
        else:
            self._put_probe(path, file, is_folder=False)

    def put(self, folder: str, found: RemoteFolder, changes: Iterable[Changed]) -> None:
        """Take in a folder's listing, and then the changes that this node made meanwhile."""
        old = self.folders.pop(folder, None)
        if old is not None:
            self._names -= len(old) + 1
            for name, file in found.files.items():
                known = old.files.get(name)
                if known is not None and known.etag == file.etag and known.attributes is not None:
                    found.files[name] = file._replace(attributes=known.attributes)
        both = [folder + name[:-1] for name in found.folders if name[:-1] in found.files]
        found.hidden = (found.hidden + both)[:_HIDDEN]
        if found.hidden and (old is None or len(old.hidden) < len(found.hidden)):
            _log.warning(
                "%d objects in /%s cannot be shown as files, such as %r", len(found.hidden), folder, found.hidden[0]
            )
        found.read_at = time.monotonic()  # its end: a listing that takes longer than it is used for would be of no use
        self.folders[folder] = found
        self._names += len(found) + 1
        self._has_news = True
        self.probed.pop(folder, None)
        for key, now in changes:
            if key.startswith(folder):
                self.apply(key, now)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while self._names > _MAX_NAMES and len(self.folders) > 1:
            _, forgotten = self.folders.popitem(last=False)
            self._names -= len(forgotten) + 1

    def put_probe(self, folder: str, name: str, file: RemoteFile | None, *, is_folder: bool) -> None:
        """Take in the answer for one name."""
        self._put_probe(folder + name, file, is_folder=is_folder)
        self.probed[folder] = self.probed.get(folder, 0) + 1

    def _put_probe(self, path: str, file: RemoteFile | None, *, is_folder: bool) -> None:
        if len(self.probes) >= _MAX_PROBES:
            self.probes.clear()
            self.probed.clear()
        self.probes[path] = Probe(time.monotonic(), file, is_folder)

    def put_marker(self, folder: str, attributes: Attributes) -> None:
        """Take in a folder's attributes. Those that were asked for longest ago are forgotten when there are many."""
        self.markers[folder] = (time.monotonic(), attributes)
        self.markers.move_to_end(folder)
        if len(self.markers) > _MAX_MARKERS:
            self.markers.popitem(last=False)

    def put_checked(self, key: str) -> None:
        """Note that an object was asked for just now."""
        if len(self.checked) >= _MAX_PROBES:
            self.checked.clear()
        self.checked[key] = time.monotonic()

    def put_brought(self, key: str, etag: str, data: bytes) -> None:
        """Keep the bytes that came when an object was asked for, until they are taken or others have come."""
        self._brought.append((key, etag, data))

    def take_brought(self, key: str, etag: str) -> bytes | None:
        """Return the bytes that came of an object just now, once."""
        for brought in self._brought:
            if brought[:2] == (key, etag):
                self._brought.remove(brought)
                return brought[2]
        return None

    def put_attributes(self, key: str, found: tuple[RemoteFile, Attributes] | None) -> None:
        """Take in an object's metadata; None: it is gone."""
        listed, probe = self.folders.get(parent_of(key)), self.probes.get(key)
        known = listed.files.get(name_of(key)) if listed is not None else None
        if found is None:
            # A store whose index is stale lists the name each time: it is left out for as long as this listing is used.
            # Attributes that are known are those of an object that this node has put there meanwhile.
            if listed is not None and known is not None and known.attributes is None:
                del listed.files[name_of(key)]
                self._names -= 1
            if probe is not None and probe.file is not None and probe.file.attributes is None:
                self.probes[key] = probe._replace(file=None)
            return
        if listed is not None and known is not None and (known.attributes is None or known.etag == found[0].etag):
            listed.files[name_of(key)] = found[0]
        if probe is not None and probe.file is not None:
            self.probes[key] = probe._replace(file=found[0])

    def expire(self, folder: str) -> None:
        """Have a folder listed anew before it is used again."""
        listed = self.folders.get(folder)
        if listed is not None:
            listed.read_at = -math.inf
        for key in [key for key in self.probes if parent_of(key) == folder]:
            del self.probes[key]


def change_below(found: dict[str, RemoteFile], folder: str, key: str, file: RemoteFile | None) -> None:
    """Change one object in a list of all that lies below a folder."""
    if key.startswith(folder) and key != folder:
        found.pop(key, None)
        if file is not None:
            found[key] = file


def file_of(values: list[Any]) -> RemoteFile:
    """Return the file that JSON has as a list."""
    size_bytes, etag, mtime_ns, attributes = values
    return RemoteFile(size_bytes, etag, mtime_ns, None if attributes is None else Attributes(*attributes))


def listed_file(info: ObjectInfo) -> RemoteFile:
    """Return the file of an object in a listing."""
    return RemoteFile(info.size_bytes, info.etag, info.mtime_ns)
