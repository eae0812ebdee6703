"""What the bucket has, as far as it is known: folders that were listed, names that were asked for, attributes.

Used by `fuse_mount/bucket/fs/view.py` under the engine's lock. Nothing here waits: where something has to be asked of
the
store, `Needs` is raised, whose `load` does that without the lock; then the caller starts again. Knowledge is used for
`ttl_s`, and for longer while the store cannot be reached. What this node itself has brought to the bucket is put in at
once, also into an answer that was on its way meanwhile.

`remote_known` has the knowledge, `remote_asking` the requests for it, `remote_requests` what happens meanwhile and
whether the store is away.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from datacache.core.errors import StoreError, StoreUnavailableError
from datacache.store.base import ObjectInfo
from datacache.store.bucket import Bucket
from datacache.writeback.model import Attributes
from datacache.writeback.remote.asking import Asking, Requests
from datacache.writeback.remote.known import Change, Known, RemoteFile, RemoteFolder

_SHORTEST_TTL_S = 0.2
"""What was asked for must be of use to who asked."""
_FOLDER_ATTRIBUTES_S = 60.0
_RELIST = 2000
"""Names up to which a folder is listed anew for one name's sake; of larger ones the name alone is asked for first."""
_NAMES_A_PROBE = 50
"""How many names a listing gives in the time in which one name is asked for, roughly: where so many were asked for that
a listing would have told all of them by then, it is made."""
_PROBES_BEFORE_LIST = 8
_CHECKED_S = 0.5
_LOOK_AHEAD = 1000
"""Objects of a folder whose metadata are asked for when it is listed: with more that are unknown, names come first."""


class Needs(Exception):  # noqa: N818 - not an error: what has to be done before the answer is known
    """Raised under the lock: `load()` has to be called without it, and the call made again; with `final` what it
    returns is the answer."""

    def __init__(self, load: Callable[[], object], *, final: bool = False) -> None:
        super().__init__("needs something that takes time")
        self.load = load
        self.final = final


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
        self._folder_default = folder_attributes
        self._made_here = made_here
        self._known = Known()
        self._requests = Requests(bucket, prefix, lock)
        self._asking = Asking(
            bucket,
            prefix,
            lock,
            self._known,
            self._requests,
            file_attributes=file_attributes,
            folder_attributes=folder_attributes,
        )

    # --- asking, under the lock --------------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Tell whether the store did not answer when it was last asked."""
        return self._requests.is_away()

    def entry(self, folder: str, name: str) -> tuple[RemoteFile | None, bool]:
        """The object of this name in a folder, and whether there is a folder of this name."""
        away = self._requests.is_away()
        listed = self._known.folders.get(folder)
        if listed is not None and (away or self._is_fresh(listed.read_at)):
            return listed.files.get(name), f"{name}/" in listed.folders
        key = folder + name
        probe = self._known.probes.get(key)
        if probe is not None and (away or self._is_fresh(probe.read_at)):
            return probe.file, probe.is_folder
        if away:
            if self._made_here(folder):
                return None, False
            raise self._requests.unavailable(key)
        older = listed is not None or probe is not None or self._made_here(folder)
        if self._known.probed.get(folder, 0) < _probes_before_list(listed):
            raise self._needs(lambda: self._asking.probe(folder, name), older=older)
        self._known.probed.pop(folder, None)  # one lists it, and others go on asking for names meanwhile
        raise self._needs(lambda: self._asking.list_folder(folder), older=older)

    def folder(self, folder: str) -> RemoteFolder:
        """All that lies right in a folder, with attributes unless those of very many are not known."""
        away = self._requests.is_away()
        listed = self._known.folders.get(folder)
        if listed is None or not (away or self._is_fresh(listed.read_at)):
            if away:
                if self._made_here(folder):
                    return RemoteFolder()
                raise self._requests.unavailable(folder)
            older = listed is not None or self._made_here(folder)
            raise self._needs(lambda: self._asking.list_folder(folder), older=older)
        unknown = [name for name, file in listed.files.items() if file.attributes is None]
        if unknown and len(unknown) <= _LOOK_AHEAD and not away:
            raise Needs(lambda: self._look_ahead(folder + name for name in unknown))
        return listed

    def attributes(self, key: str, file: RemoteFile) -> Attributes:
        """A file's attributes, asked of the store if they are not known yet."""
        if file.attributes is not None:
            return file.attributes
        if self._requests.is_away():
            raise self._requests.unavailable(key)
        raise Needs(lambda: self._asking.look_at([key]))

    def checked(self, key: str) -> None:
        """See that what is known of an object was asked for just now. For who is about to change a part of it."""
        at = self._known.checked.get(key)
        if (at is not None and at + _CHECKED_S > _now()) or self._requests.is_away():
            return
        raise self._needs(lambda: self._asking.check(key), older=True)

    def problem(self) -> tuple[str, float]:
        """See `Requests.problem`."""
        return self._requests.problem()

    def unavailable(self, key: str) -> StoreError:
        """Return the error for what is not known of a key while the store is away."""
        return self._requests.unavailable(key)

    def plain_attributes(self, file: RemoteFile) -> Attributes:
        """A file's attributes as far as they are known."""
        return self._asking.plain_attributes(file)

    def folder_attributes(self, folder: str) -> Attributes:
        """A folder's attributes: its marker's, if it has one."""
        known = self._known.markers.get(folder)
        if known is not None and known[0] + max(self._ttl_s, _FOLDER_ATTRIBUTES_S) > _now():
            return known[1]
        if self._requests.is_away():
            return known[1] if known is not None else self._folder_default
        raise self._needs(lambda: self._asking.look_at_folder(folder), older=True)

    def plain_folder_attributes(self, folder: str) -> Attributes:
        """The same as far as they are known."""
        known = self._known.markers.get(folder)
        return known[1] if known is not None else self._folder_default

    def size_of(self, key: str) -> int:
        """How large an object is as far as it is known; 0 where it is not."""
        file = self._known.file(key)
        if file is None:
            probe = self._known.probes.get(key)
            file = probe.file if probe is not None else None
        return file.size_bytes if file is not None else 0

    def hidden(self) -> list[str]:
        """Keys that were listed and that no file can have."""
        return self._known.hidden()

    def has_marker(self, folder: str) -> bool:
        """Whether a folder is known to have an object of its own."""
        listed = self._known.folders.get(folder)
        return listed is not None and listed.marker

    # --- over a restart ----------------------------------------------------------------------------------------------

    def remembered(self) -> dict[str, list[object]] | None:
        """See `Known.remembered`."""
        return self._known.remembered()

    def recall(self, kept: dict[str, Any], changes: Iterable[Change]) -> None:
        """See `Known.recall`."""
        self._known.recall(kept, changes)

    # --- what this node did, under the lock --------------------------------------------------------------------------

    def applied(self, key: str, info: ObjectInfo | None, attributes: Attributes | None) -> RemoteFile | None:
        """The bucket has this now (None: nothing under the key)."""
        file = None if info is None else RemoteFile(info.size_bytes, info.etag, info.mtime_ns, attributes)
        self._requests.note(key, file)
        self._known.applied(key, file, attributes)
        return file

    def made(self, folder: str) -> None:
        """See `Known.made`."""
        self._known.made(folder)

    def expire(self, folder: str) -> None:
        """Have a folder listed anew before it is used again."""
        self._known.expire(folder)

    # --- asking the store, without the lock --------------------------------------------------------------------------

    def look_around(self) -> None:
        """List the root if it is small, so that its names are known if the store goes away before anybody looks. Waits
        for a few seconds at most, and tells no errors: who uses the mount gets them."""
        with contextlib.suppress(StoreError):
            self._requests.patiently(self._asking.list_root)

    def below(self, folder: str, take: Callable[[dict[str, RemoteFile]], None]) -> None:
        """See `Asking.below`."""
        self._asking.below(folder, take)

    def _look_ahead(self, keys: Iterable[str]) -> None:
        with contextlib.suppress(StoreUnavailableError):  # the store is away from now on, and the names are known
            self._asking.look_at(keys)

    def _needs(self, load: Callable[[], object], *, older: bool) -> Needs:
        """Return what has to be asked. `older`: something older will do, and nobody waits for a store that hangs."""
        return Needs(lambda: self._requests.patiently(load)) if older else Needs(load)

    def _is_fresh(self, read_at: float) -> bool:
        return read_at + self._ttl_s > _now()


def _probes_before_list(listed: RemoteFolder | None) -> int:
    """How many names of a folder are asked for, one by one, before it is listed (again)."""
    if listed is None:
        return _PROBES_BEFORE_LIST
    return 0 if len(listed) <= _RELIST else len(listed) // _NAMES_A_PROBE


def _now() -> float:
    return time.monotonic()
