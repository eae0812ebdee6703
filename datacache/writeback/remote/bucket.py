"""The bucket as a mount sees it, as far as it is known: entries of folders, attributes, and what lies below a folder.

Used by `fuse_mount/bucket/fs` under the engine's lock. Nothing here waits: where something has to be asked of the
store, `Load` is raised (see `sections`). Knowledge is used for `ttl_s`, and for longer while the store cannot be
reached. `remote/known.py` has the knowledge, `remote/asking.py` the requests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable

from datacache.core.errors import StoreError, StoreUnavailableError
from datacache.core.ids import ObjectRef
from datacache.writeback.engine import WriteBack
from datacache.writeback.model import Attributes, Pending
from datacache.writeback.remote.asking import Asking
from datacache.writeback.remote.known import RemoteFile, RemoteFolder
from datacache.writeback.sections import Load

_SHORTEST_TTL_S = 0.2
"""An answer must be of use to the caller that asked for it."""
_FOLDER_ATTRIBUTES_S = 60.0
_BELOW_S = 5.0
"""How long the list of what lies below a folder may take to be used for renaming it."""
_RELIST = 2000
"""Names up to which a folder is listed anew for one name's sake; of larger ones the name alone is asked for first."""
_NAMES_A_PROBE = 50
"""How many names a listing gives in the time in which one name is asked for, roughly: where so many were asked for that
a listing would have told all of them by then, it is made."""
_PROBES_BEFORE_LIST = 8
"""Names of a folder that was never listed that are asked for, one by one, before it is."""
_CHECKED_S = 0.5
_LOOK_AHEAD = 1000
"""Objects of a folder whose metadata are asked for when it is listed: with more that are unknown, names come first."""


class RemoteView:
    """One prefix of a bucket. Folder keys are '' or end in '/', all keys relative to the prefix."""

    def __init__(
        self, engine: WriteBack, *, ttl_s: float, file_attributes: Attributes, folder_attributes: Attributes
    ) -> None:
        """Show what has no attributes in the bucket with these."""
        self._ttl_s = max(ttl_s, _SHORTEST_TTL_S)
        self._folder_default = folder_attributes
        self._overlay, self._known = engine.overlay, engine.known
        self._asking = Asking(engine, file_attributes=file_attributes, folder_attributes=folder_attributes)
        self._requests = self._asking.requests
        self.problem = self._requests.problem
        self.note_answer = self._requests.note_answer
        self.unavailable = self._requests.unavailable
        self.plain_attributes = self._asking.plain_attributes

        def note_made(pending: Pending) -> None:
            if pending.key.endswith("/") and self.is_made_here(pending.key):
                self._known.note_made(pending.key)

        engine.listen(note_made)

    @property
    def is_away(self) -> bool:
        """Return whether the store did not answer when it was last asked."""
        return self._requests.is_away()

    def entry(self, folder: str, name: str, *, older: bool = False) -> tuple[RemoteFile | None, bool]:
        """Return the object of this name in a folder, and whether there is a folder of this name. With `older` a
        listing of any age will do."""
        away = self._requests.is_away()
        listed = self._known.folders.get(folder)
        if listed is not None and (older or away or self._is_fresh(listed.read_at)):
            return listed.files.get(name), f"{name}/" in listed.folders
        key = folder + name
        probe = self._known.probes.get(key)
        if probe is not None and (away or self._is_fresh(probe.read_at)):
            return probe.file, probe.is_folder
        if away:
            if self.is_made_here(folder):
                return None, False
            raise self.unavailable(key)
        has_older = listed is not None or probe is not None or self.is_made_here(folder)
        probes = _PROBES_BEFORE_LIST
        if listed is not None:
            probes = 0 if len(listed) <= _RELIST else len(listed) // _NAMES_A_PROBE
        if self._known.probed.get(folder, 0) < probes:
            raise self._load(lambda: self._asking.probe(folder, name), has_older=has_older)
        self._known.probed.pop(folder, None)  # one lists it, and others go on asking for names meanwhile
        raise self._load(lambda: self._asking.list_folder(folder), has_older=has_older)

    def folder(self, folder: str) -> RemoteFolder:
        """Return the contents of a folder, with attributes unless those of very many are not known."""
        away = self._requests.is_away()
        listed = self._known.folders.get(folder)
        if listed is None or not (away or self._is_fresh(listed.read_at)):
            is_made_here = self.is_made_here(folder)
            if not away:
                has_older = listed is not None or is_made_here
                raise self._load(lambda: self._asking.list_folder(folder), has_older=has_older)
            if is_made_here:
                return RemoteFolder()
            raise self.unavailable(folder)
        unknown = [name for name, file in listed.files.items() if file.attributes is None]
        if unknown and len(unknown) <= _LOOK_AHEAD and not away:
            raise Load(lambda: self._look_ahead(folder + name for name in unknown))
        return listed

    def folders(self, folder: str) -> Collection[str] | None:
        """Return the names of the folders in a folder; None where that has to be asked for."""
        listed = self._known.folders.get(folder)
        if listed is not None and (self._is_fresh(listed.read_at) or self._requests.is_away()):
            return listed.folders
        return () if self.is_made_here(folder) else None

    def take_below(self, folders: Collection[str]) -> dict[str, dict[str, RemoteFile]]:
        """Return every object below each of these folders, which were listed just now, to be renamed at once."""
        listed, known = [folder for folder in folders if not self.is_made_here(folder)], self._known.below
        oldest = time.monotonic() - _BELOW_S
        if any(folder not in known or known[folder][0] < oldest for folder in listed):
            raise Load(lambda: self._asking.list_below(listed))
        found = {folder: known.pop(folder, (0.0, {}))[1] for folder in folders}
        return found | {folder: {} for folder in folders if folder not in listed}

    def is_made_here(self, folder: str) -> bool:
        """Return whether a folder was made through this mount and the bucket cannot have anything in it."""
        pending = self._overlay.get(folder)
        if pending is None or pending.attributes is None or folder in self._known.filled:
            return False
        return not pending.base and not pending.touched

    def has_filled(self, folder: str) -> bool:
        """Return whether this process has put something into the bucket below a folder."""
        return folder in self._known.filled

    def has_marker(self, folder: str) -> bool:
        """Return whether a folder is known to have an object of its own."""
        listed = self._known.folders.get(folder)
        return listed is not None and listed.marker

    # --- attributes --------------------------------------------------------------------------------------------------

    def attributes(self, key: str, file: RemoteFile) -> Attributes:
        """Return a file's attributes, asked of the store if they are not known yet."""
        if file.attributes is not None:
            return file.attributes
        if self._requests.is_away():
            raise self.unavailable(key)
        raise Load(lambda: self._asking.look_at([key]))

    def folder_attributes(self, folder: str) -> Attributes:
        """Return a folder's attributes: its marker's, if it has one."""
        known = self._known.markers.get(folder)
        if known is not None and known[0] + max(self._ttl_s, _FOLDER_ATTRIBUTES_S) > time.monotonic():
            return known[1]
        if self._requests.is_away():
            return self.plain_folder_attributes(folder)
        raise self._load(lambda: self._asking.look_at_folder(folder), has_older=True)

    def plain_folder_attributes(self, folder: str) -> Attributes:
        """Return a folder's attributes as far as they are known."""
        known = self._known.markers.get(folder)
        return known[1] if known is not None else self._folder_default

    def expect_checked(self, key: str, brings: ObjectRef | None = None) -> None:
        """Have an object asked for, unless it was just now: before a part of it is changed. `brings`: if its bytes are
        to come along."""
        at = self._known.checked.get(key)
        if (at is not None and at + _CHECKED_S > time.monotonic()) or self._requests.is_away():
            return
        raise self._load(lambda: self._asking.check(key, brings), has_older=True)

    def expire(self, folder: str) -> None:
        """Have a folder listed anew before it is used again."""
        self._known.expire(folder)

    # --- asking the store, without the lock --------------------------------------------------------------------------

    def look_around(self) -> None:
        """List the root if it is small, so that its names are known if the store goes away before anybody looks. Waits
        for a few seconds at most, and tells no errors: users of the mount get them."""
        with contextlib.suppress(StoreError):
            self._requests.wait_patiently(self._asking.list_root)

    def _look_ahead(self, keys: Iterable[str]) -> None:
        with contextlib.suppress(StoreUnavailableError):  # the store is away from now on, and the names are known
            self._asking.look_at(keys)

    def _load(self, load: Callable[[], object], *, has_older: bool) -> Load:
        """Return what has to be asked. `has_older`: something older will do, so nobody waits for a store that hangs."""
        return Load(lambda: self._requests.wait_patiently(load)) if has_older else Load(load)

    def _is_fresh(self, read_at: float) -> bool:
        return read_at + self._ttl_s > time.monotonic()
