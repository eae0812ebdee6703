"""What is pending, in memory and durable: changed by the file system, worked off by the uploader.

`WriteBack` puts overlay, journal and staged files together. A change is `record`ed: it is in the overlay at once, and
durable when `commit` has returned for its ticket. Whatever takes bytes away (a staged file that nothing refers to any
more) happens only after the record that says so is durable, so the journal never refers to a file that is gone.

Any thread. `lock` guards everything here and may be held across several calls; no call that waits for a disk or a store
is made under it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import xxhash

from datacache.core.errors import DatacacheError, StagingError, StagingFullError
from datacache.core.objects import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.bucket import Bucket
from datacache.writeback.area_files import FULL
from datacache.writeback.conflict_log import ConflictLog
from datacache.writeback.conflicts import conflict_key
from datacache.writeback.files import StagedFiles
from datacache.writeback.journal import Change, Journal
from datacache.writeback.model import WRITER, Attributes, Conflict, Content, Logged, Pending, Staged, Stored
from datacache.writeback.overlay import Overlay, parent_of
from datacache.writeback.records import (
    PENDING,
    UPLOAD,
    UploadState,
    decode_pending,
    decode_upload,
    encode_pending,
    encode_upload,
)
from datacache.writeback.staging import StagingArea

_log = logging.getLogger("datacache.writeback")
_COMMIT_EVERY_S = 0.2
"""How long a change that nobody waits for stays in memory."""
_COPY_BYTES = 4 * 2**20
_RECORD_BYTES = 64 * 1024
_KEPT_CONFLICTS = 100


class Watcher(Protocol):
    """Who shows the bucket as a directory, and is told (under the lock) what changes behind its back."""

    def uploaded(self, pending: Pending, info: ObjectInfo | None) -> None:
        """The bucket has this now; None: it is deleted there."""
        ...

    def moved(self, key: str, new_key: str, theirs: ObjectInfo | None) -> None:
        """Ours goes on under another key, because somebody else's object has this one. '' for the new key: ours was a
        deletion or cannot be kept."""
        ...


class Claim:
    """One key that is being uploaded."""

    __slots__ = ("pending", "torn")

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.torn = False
        """Whether bytes that are being uploaded were overwritten or cut off meanwhile."""


class ContentReader:
    """Reads what lies in the journal or in a staged file."""

    def __init__(self, size_bytes: int, data: bytes | None = None, fd: int = -1) -> None:
        self.size_bytes = size_bytes
        self._data = data
        self._fd = fd

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Bytes `start` to `stop`; fewer where the file was cut off meanwhile."""
        if self._data is not None:
            return memoryview(self._data)[start:stop]
        parts = []
        while start < stop and (part := os.pread(self._fd, stop - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, buffer: memoryview, start: int) -> int:
        """Fill a buffer with the bytes from `start` on: how many there were."""
        if self._data is not None:
            data = self._data[start : start + len(buffer)]
            buffer[: len(data)] = data
            return len(data)
        done = 0
        while done < len(buffer) and (count := os.preadv(self._fd, [buffer[done:]], start + done)):
            done += count
        return done

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class WriteBack:
    """All that is pending of one staging area."""

    def __init__(
        self,
        area: StagingArea,
        files: StagedFiles,
        journal: Journal,
        bucket: Bucket,
        prefix: str,
        *,
        host: str,
        uploads: int = 8,
        ack: str = "staged",
    ) -> None:
        self.area, self.files, self.bucket, self.prefix = area, files, bucket, prefix
        self.area_id = area.id
        self.host = host
        self.uploads = uploads
        self.ack = ack
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when something was finished, given up for now, or became pending."""
        self.overlay = Overlay()
        self._conflict_log = ConflictLog(area.folder / "conflicts.jsonl")
        self.conflicts: deque[Conflict] = deque(self._conflict_log.last, maxlen=_KEPT_CONFLICTS)
        self.conflict_count = self._conflict_log.count
        self.watcher: Watcher | None = None
        self._journal = journal
        self._uploads: dict[str, UploadState] = {}
        self._claims: dict[str, Claim] = {}
        self._refs: dict[int, str] = {}  # staged file -> the key whose content it is
        self._local_folders: set[str] = set()  # folders that the store cannot keep
        self._held: dict[int, int] = {}  # staged file -> how many drafts have it open
        self._listeners: list[Callable[[Pending], None]] = []
        self._after: deque[tuple[int, Callable[[], None]]] = deque()  # what may happen once a ticket is durable
        self._ticket = self._durable = 0
        self._needs_ended = 0
        """The ticket of the last record by which a key stopped to need another key's object."""
        self._version = time.time_ns() // 1000
        self.commit_s = 1.0
        """How long it takes to make a change durable: a moving mean."""
        self._second = 0.0
        self._wake = threading.Event()
        self._closing = False
        self._replay()
        self._committer = threading.Thread(target=self._commit_lazily, name="writeback-commit", daemon=True)
        self._committer.start()

    # --- what is pending -------------------------------------------------------------------------------------------

    def get(self, key: str) -> Pending | None:
        """What is pending of a key."""
        with self.lock:
            return self.overlay.get(key)

    def pendings(self) -> list[Pending]:
        """All that is to be brought to the bucket, as it is now."""
        with self.lock:
            return [pending for pending in self.overlay if pending.key not in self._local_folders]

    def listen(self, listener: Callable[[Pending], None]) -> None:
        """Have each new or changed pending told, under the lock."""
        with self.lock:
            self._listeners.append(listener)

    def next_version(self) -> int:
        """A number larger than any used in this area before: also after a restart, as long as the clock is right."""
        with self.lock:
            self._version += 1
            return self._version

    # --- changes ---------------------------------------------------------------------------------------------------

    def change(
        self,
        key: str,
        attributes: Attributes,
        content: Content | None,
        *,
        base: str,
        blob: bytes | None = None,
        ready: bool = True,
    ) -> Pending:
        """What a key's `Pending` becomes when it is given these. `base` is what the bucket has, where nothing was
        pending yet. With `record` it takes effect."""
        old = self.overlay.get(key)
        version = self.next_version()
        if old is None:
            return Pending(key, attributes, content, base, version, self._now(), ready, after=version - 1)
        return Pending(key, attributes, content, old.base, version, old.since, ready, old.touched, old.after)

    def record(
        self, pendings: Iterable[Pending] = (), *, drop: Iterable[str] = (), blobs: Mapping[str, bytes] | None = None
    ) -> int:
        """Make changes, all or none of which survive a crash: the ticket for `commit`. `blobs` are the bytes of keys
        whose content is `Logged`; where it lacks one, the key keeps the bytes it has. What is not ready stays in
        memory."""
        blobs = blobs or {}
        drop, pendings = list(drop), list(pendings)
        with self.lock:
            changes = [Change(PENDING + key, None) for key in drop if PENDING + key in self._journal]
            # What is not ready is not recorded: a deletion that it follows stays in the journal, or a crash would bring
            # the old object back.
            changes += [self._change_of(pending, blobs) for pending in pendings if pending.ready]
            if changes:
                self._ticket = self._journal.append(changes)  # from here on nothing may fail
                self._wake.set()
            released: set[int] = set()
            for key in drop:
                self._release(self.overlay.drop(key), released)
            for pending in pendings:
                self._release(self.overlay.get(pending.key), released)
                if isinstance(pending.content, Staged):
                    self._refs[pending.content.file] = pending.key
                self.overlay.set(pending)
                for listener in self._listeners:
                    listener(pending)
            for number in released.difference(self._refs):
                if number not in self._held:
                    self._later(partial(self.files.remove, number))
            self.changed.notify_all()
            return self._ticket

    def gone(self, key: str, *, base: str) -> tuple[list[Pending], list[str]]:
        """What `record` is to be given for the deletion of a key: what becomes pending, and what is dropped. `base` as
        for `change`."""
        old = self.overlay.get(key)
        if old is None:
            if not base:
                return [], []
            version = self.next_version()
            return [Pending(key, None, None, base, version, self._now(), after=version - 1)], []
        if not old.base and not old.touched:
            return [], [key]
        return [replace(old, attributes=None, content=None, version=self.next_version(), ready=True)], []

    def blob(self, key: str) -> bytes:
        """The bytes of a key whose content is `Logged`."""
        return self._journal.read(PENDING + key)

    def commit(self, ticket: int | None = None, *, wait_s: float = 0.0) -> None:
        """Return when the changes up to a ticket (None: all) are durable. Raises `StagingError`; they may be durable
        later, then. On a full disk room is waited for, `wait_s` at most."""
        deadline = time.monotonic() + wait_s
        with self.lock:
            wanted = self._ticket if ticket is None else ticket
        while wanted > self._durable:
            self.area.check()
            began = time.perf_counter()
            try:
                self._journal.commit(wanted)
            except StagingFullError:
                if time.monotonic() >= deadline:
                    raise
                self.files.wait_for_room(_RECORD_BYTES, deadline - time.monotonic(), refused=True)
                continue
            self.commit_s += (time.perf_counter() - began - self.commit_s) / 8
            self.files.set_journal_bytes(self._journal.size_bytes)
            with self.lock:
                self._durable = max(self._durable, wanted)
        with self.lock:
            due = []
            while self._after and self._after[0][0] <= self._durable:
                due.append(self._after.popleft()[1])
        for action in due:
            try:
                action()
            except StagingError as exc:  # what is durable is acknowledged all the same, and the next start deletes it
                _log.warning("a file that is not needed any more stays: %s", exc)

    def unsettled(self, ticket: int) -> bool:
        """Whether a change is not durable yet."""
        return ticket > self._durable

    def hold(self, number: int) -> int:
        """An fd of a staged file for a draft. While it is held it is neither deleted nor taken for a clean copy."""
        with self.lock:
            fd = self.files.open(number)
            self._held[number] = self._held.get(number, 0) + 1
            return fd

    def free(self, number: int) -> None:
        """A draft has closed a staged file. If nothing refers to it (any more) it is deleted."""
        with self.lock:
            self._held[number] -= 1
            if not self._held[number]:
                del self._held[number]
                if number not in self._refs:
                    self._later(partial(self.files.remove, number))

    def touch(self, number: int, offset: int) -> None:
        """A staged file is about to be changed in place from this offset on."""
        with self.lock:
            for claim in self._claims.values():
                content = claim.pending.content
                if isinstance(content, Staged) and content.file == number and offset < content.size_bytes:
                    claim.torn = True

    # --- what the uploader does --------------------------------------------------------------------------------------

    def begin(self, key: str, version: int | None = None) -> Claim | None:
        """Claim a key for uploading, in the version whose blockers were looked at. None where there is nothing to do
        now, or it is another version. `StagingError` where what must be durable before the object may be replaced or
        deleted cannot be: that other keys do not need it any more."""
        with self.lock:
            pending = self.overlay.get(key)
        if pending is not None and pending.base:
            try:
                self.commit()
            except StagingFullError:
                self.commit(self._needs_ended)  # the rest can wait: only uploading makes room
        with self.lock:
            pending = self.overlay.get(key)
            if pending is None or not pending.ready or key in self._claims or key in self._local_folders:
                return None
            if version not in (None, pending.version):
                return None
            if not pending.touched:
                pending = replace(pending, touched=True)
                self.overlay.set(pending)
            claim = self._claims[key] = Claim(pending)
            return claim

    def blockers(self, key: str) -> list[str]:
        """Keys that have to be brought to the bucket before this one. In a folder of files a name is either a file or a
        folder: the one that is gone has to go first."""
        with self.lock:
            found = self.overlay.needed_by(key)
            pending = self.overlay.get(key)
            if pending is None:
                return found
            if pending.attributes is None:
                return found + list(self.overlay.below(key)) if key.endswith("/") else found
            folder = key if key.endswith("/") else parent_of(key)
            while folder:
                found += self._gone([folder.rstrip("/")])
                folder = parent_of(folder)
            if not key.endswith("/"):
                found += self._gone([f"{key}/", *self.overlay.below(f"{key}/")])
            return found

    def _gone(self, keys: Iterable[str]) -> list[str]:
        found = map(self.overlay.get, keys)
        return [pending.key for pending in found if pending is not None and pending.attributes is None]

    def content(self, claim: Claim) -> ContentReader:
        """The bytes of a claimed key. `StagingError` if they are not there."""
        pending = claim.pending
        if isinstance(pending.content, Logged):
            with self.lock:
                now = self.overlay.get(pending.key)
                if now is None or now.version != pending.version:
                    claim.torn = True  # the record has other bytes by now
                    return ContentReader(0, b"")
                return ContentReader(pending.content.size_bytes, self.blob(pending.key))
        if not isinstance(pending.content, Staged):
            raise StagingError(f"{pending.key} has no bytes here")
        try:
            return ContentReader(pending.content.size_bytes, fd=self.files.open(pending.content.file))
        except StagingError:
            with self.lock:
                now = self.overlay.get(pending.key)
                if now is not None and now.content == pending.content:
                    raise
            claim.torn = True  # there are other bytes by now, and these are gone
            return ContentReader(0, b"")

    def writer(self, pending: Pending) -> str:
        """What the metadata of an uploaded object says of where it came from. The key is part of it, because who copies
        an object often copies its metadata as well."""
        return f"{self.area_id}-{pending.version}-{self._stamp(pending.key)}"

    def is_ours(self, metadata: Mapping[str, str], pending: Pending) -> int | None:
        """The version of this key that an object was made of, if this area wrote it since the key began to differ. An
        older one was edited by somebody who kept the metadata."""
        area, _, rest = metadata.get(WRITER, "").partition("-")
        version, _, stamp = rest.partition("-")
        if area != self.area_id or stamp != self._stamp(pending.key) or not (version.isascii() and version.isdigit()):
            return None
        return int(version) if pending.after < int(version) <= pending.version else None

    def _stamp(self, key: str) -> str:
        return xxhash.xxh3_64_hexdigest((self.prefix + key).encode("utf-8", "surrogateescape"))

    def finish(self, claim: Claim, info: ObjectInfo | None) -> None:
        """A claimed key is in the bucket now as it was claimed; None: it is deleted there."""
        pending = claim.pending
        key = pending.key
        with self.lock:
            self._end(claim)
            now = self.overlay.get(key)
            etag = info.etag if info is not None else ""
            if self.watcher is not None:
                self.watcher.uploaded(pending, info)
            self._same_bytes(pending, etag)
            if now is not None and now.version != pending.version:
                later = replace(now, base=etag, touched=False, after=pending.version)
                if now.content == pending.content and isinstance(now.content, Stored):
                    # Only attributes changed since, and the bytes lie under the key itself now.
                    later = replace(later, content=Stored(key, now.content.size_bytes, etag))
                self.record([later])
                if info is None and not later.ready and PENDING + key in self._journal:
                    # The deletion that the new file follows is done.
                    self._ticket = self._journal.append([Change(PENDING + key, None)])
                    self._wake.set()
            elif now is not None:
                content = now.content
                clean = info is not None and not claim.torn
                if isinstance(content, Staged) and info is not None and clean and content.file not in self._held:
                    # Not given back: it is a clean copy, once it is durable that nothing refers to it any more.
                    del self._refs[content.file]
                    self.record(drop=[key])
                    copy = (self.prefix + key, info.etag, content.file, content.size_bytes)
                    self._later(partial(self.files.keep, *copy))
                else:
                    self.record(drop=[key])
            self.changed.notify_all()

    def rebase(self, claim: Claim, etag: str, version: int | None) -> None:
        """An earlier version that this area wrote is in the bucket (None: the same bytes, by whomever): it may be
        replaced."""
        with self.lock:
            after = claim.pending.after if version is None else version
            claim.pending = replace(claim.pending, base=etag, after=after)
            now = self.overlay.get(claim.pending.key)
            if now is not None:
                self.record([replace(now, base=etag, after=after)])

    def _same_bytes(self, pending: Pending, etag: str) -> None:
        """Where only an object's attributes were changed, others that are to be copied from it find it under a new
        ETag."""
        content = pending.content
        if not isinstance(content, Stored) or content.key != pending.key or etag in ("", content.etag):
            return
        needing = [self.overlay.get(key) for key in self.overlay.needed_by(pending.key)]
        copy = content._replace(etag=etag)
        self.record([replace(other, content=copy) for other in needing if other and other.content == content])

    def keep_folder(self, claim: Claim) -> None:
        """The store cannot keep a claimed folder: it is kept here, and nothing is left to be done for it."""
        with self.lock:
            self._end(claim)
            now = self.overlay.get(claim.pending.key)
            if now is not None and now.version == claim.pending.version:
                self._local_folders.add(now.key)

    def abandon(self, claim: Claim) -> None:
        """A claimed key was not uploaded. It stays pending."""
        with self.lock:
            self._end(claim)
            self.changed.notify_all()

    def conflict(self, claim: Claim, theirs: ObjectInfo | None, reason: str) -> Conflict:
        """Somebody else's object stays under the claimed key; what we have goes on under the conflict's name."""
        with self.lock:
            self._end(claim)
            key = claim.pending.key
            now = self.overlay.get(key) or claim.pending
            kept_as = ""
            # Bytes that lay in the bucket alone, under this key or one that was changed as well, are not to be had any
            # more.
            lost = isinstance(now.content, Stored) and (theirs is None or now.content.key == key)
            if now.attributes is not None and not lost:
                kept_as = conflict_key(
                    key, time.time(), self.host, lambda name: self.overlay.get(name) is not None, prefix=self.prefix
                )
                blobs = {kept_as: self.blob(key)} if isinstance(now.content, Logged) and now.ready else {}
                version = self.next_version()
                moved = replace(now, key=kept_as, base="", touched=False, version=version, after=version - 1)
                self.record([moved], drop=[key], blobs=blobs)
            else:
                self.record(drop=[key])
            found = Conflict(key, kept_as, time.time(), reason)
            self.conflicts.append(found)
            self.conflict_count = number = self.conflict_count + 1
            if self.watcher is not None:
                self.watcher.moved(key, kept_as, theirs)
            self.changed.notify_all()
        self._conflict_log.append(number, found)
        _log.warning("%s: %s; %s", key, reason, f"ours is kept as {kept_as}" if kept_as else "ours is given up")
        return found

    def fetch(self, claim: Claim) -> bool:
        """Bring content that lies under another key of the bucket here, and end the claim: false where the key changed
        meanwhile. Errors of the store end it, too."""
        pending = claim.pending
        number = -1
        try:
            if not isinstance(pending.content, Stored):
                return False
            number = self.bring(pending.content)
            with self.lock:
                now = self.overlay.get(pending.key)
                if now is None or now.content != pending.content:
                    return False
                content = Staged(number, pending.content.size_bytes)
                self.record([replace(now, content=content, version=self.next_version())])
                number = -1
            return True
        finally:
            self.abandon(claim)
            if number >= 0:
                self.files.remove(number)

    def bring(self, stored: Stored) -> int:
        """A new staged file, durable, with the bytes of an object of the bucket: its number."""
        full = self.prefix + stored.key
        clean = self.files.open_clean(full, stored.etag)
        if clean is not None:
            try:
                number = self._copied(lambda start, stop: os.pread(clean, stop - start, start), stored.size_bytes)
            finally:
                os.close(clean)
            if number is not None and self.files.clean(full, stored.etag) is not None:
                return number
            # Somebody has begun to change the copy, or it is cut short.
            if number is not None:
                self.files.remove(number)
        ref = ObjectRef(self.bucket.url, full, stored.size_bytes, stored.etag)
        number = self._copied(lambda start, stop: self.bucket.read(ref, start, stop), stored.size_bytes)
        if number is None:
            raise StagingError(f"{ref.url} came cut short")
        return number

    def _copied(self, read: Callable[[int, int], bytes | memoryview], size_bytes: int) -> int | None:
        number = self.files.create()
        try:
            fd = self.files.open(number)
            try:
                for start in range(0, size_bytes, _COPY_BYTES):
                    stop = min(start + _COPY_BYTES, size_bytes)
                    data = read(start, stop)
                    if len(data) != stop - start:
                        self.files.remove(number)
                        return None
                    view, done = memoryview(data), 0
                    while done < len(view):  # a disk that fills up takes a part of it
                        done += os.pwrite(fd, view[done:], start + done)
                    self.files.grow(number, len(view))
                self.files.sync(fd, number)
            finally:
                os.close(fd)
        except BaseException as exc:
            self.files.remove(number)
            if isinstance(exc, OSError) and exc.errno in FULL and not isinstance(exc, StagingError):
                raise StagingFullError(
                    f"there is no room in {self.area.folder} for a copy of {size_bytes:,} bytes",
                    hint="Free some room there. Room also comes free as files are uploaded: see dsctl status.",
                ) from exc
            raise
        return number

    def spill(self, pending: Pending) -> None:
        """Bring what lies in the journal into a staged file; nothing is done if the key has changed meanwhile."""
        with self.lock:
            if self.overlay.get(pending.key) != pending:
                return
            data = self.blob(pending.key)
        number = self._copied(lambda start, stop: memoryview(data)[start:stop], len(data))
        if number is None:
            return
        with self.lock:
            if self.overlay.get(pending.key) == pending and pending.key not in self._claims:
                self.record([replace(pending, content=Staged(number, len(data)))])
                number = None
        if number is not None:
            self.files.remove(number)

    def upload_state(self, key: str) -> UploadState | None:
        """The unfinished upload in parts that was recorded for a key."""
        with self.lock:
            return self._uploads.get(key)

    def save_upload(self, key: str, state: UploadState | None) -> None:
        """Record an unfinished upload, or that there is none any more. Durable when it returns."""
        with self.lock:
            if state is None:
                if self._uploads.pop(key, None) is None:
                    return
            else:
                self._uploads[key] = state
            header = encode_upload(state) if state is not None else None
            ticket = self._ticket = self._journal.append([Change(UPLOAD + key, header)])
            self._wake.set()
        if state is not None:
            self.commit(ticket)

    def uploads_recorded(self) -> dict[str, UploadState]:
        """All of them, by key."""
        with self.lock:
            return dict(self._uploads)

    def pressure(self) -> float:
        """The share of the staging area's room that is in use."""
        return self.files.pressure()

    def close(self) -> None:
        """Make everything durable and let go of the staging area."""
        self._closing = True
        self._wake.set()
        self._committer.join()
        try:
            self.commit()
        finally:
            self._journal.close()
            self.area.close()

    # --- within ----------------------------------------------------------------------------------------------------

    def _change_of(self, pending: Pending, blobs: Mapping[str, bytes]) -> Change:
        key = PENDING + pending.key
        blob = blobs.get(pending.key, b"")
        if isinstance(pending.content, Logged) and pending.content.size_bytes and not blob:
            blob = self._journal.read(key)
        return Change(key, encode_pending(pending), blob)

    def _release(self, old: Pending | None, released: set[int]) -> None:
        """A key's old content is not its content any more."""
        if old is None:
            return
        self._local_folders.discard(old.key)
        if isinstance(old.content, Stored) and old.content.key != old.key:
            self._needs_ended = self._ticket
        if isinstance(old.content, Staged) and self._refs.get(old.content.file) == old.key:
            del self._refs[old.content.file]
            released.add(old.content.file)

    def _replay(self) -> None:
        files: set[int] = set()
        written: list[tuple[Pending, Staged]] = []
        for key, header, blob_bytes in self._journal.records():
            if key.startswith(UPLOAD):
                of = key.removeprefix(UPLOAD)
                self._uploads[of] = decode_upload(of, header)
                continue
            pending = decode_pending(key, header, blob_bytes)
            if isinstance(pending.content, Staged):
                files.add(pending.content.file)
                self._refs[pending.content.file] = pending.key
                written.append((pending, pending.content))
            self._version = max(self._version, pending.version)
            self.overlay.set(pending)
        for pending, content in written:
            self.overlay.set(self._measured(pending, content))
        self.files.purge(files)

    def _measured(self, pending: Pending, content: Staged) -> Pending:
        """With the size the file has: what was written after the last acknowledgement may be there as well."""
        try:
            size = os.stat(self.files.path(content.file)).st_size
        except OSError:
            _log.error("%s: its staged file %s is not there", pending.key, self.files.path(content.file))
            return pending
        if size == content.size_bytes:
            return pending
        return replace(pending, content=Staged(content.file, size), version=self.next_version())

    def _now(self) -> float:
        """The time in whole seconds, the same object for a second."""
        now = float(int(time.time()))
        if now != self._second:
            self._second = now
        return self._second

    def _end(self, claim: Claim) -> None:
        if self._claims.get(claim.pending.key) is claim:
            del self._claims[claim.pending.key]

    def _later(self, action: Callable[[], None]) -> None:
        self._after.append((self._ticket, action))
        self._wake.set()

    def _commit_lazily(self) -> None:
        told = False
        pause = threading.Event()
        while not self._closing:
            self._wake.wait()
            pause.wait(_COMMIT_EVERY_S)
            self._wake.clear()
            try:
                self.commit()
                told = False
            except DatacacheError as exc:
                if not told:
                    _log.error("what was written is not durable yet: %s", exc)
                told = True
                self._wake.set()
                pause.wait(1.0)
