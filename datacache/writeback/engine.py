"""All that is pending, in memory and durable: the file system changes it, the uploader works it off.

`WriteBack` puts overlay, journal and staged files together. A change is `record`ed: it is in the overlay at once, and
durable when `commit` has returned for its ticket. Whatever takes bytes away (a staged file that nothing refers to any
more) happens only after the record that says so is durable, so the journal never refers to a file that is gone.
`claims.py` is what the uploader does with keys; `fetching.py` brings bytes into staged files.

Any thread. `lock` guards everything here and may be held across several calls; no call that waits for a sync or a store
is made under it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import xxhash

from datacache.core.errors import DatacacheError, StagingError, StagingFullError
from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.bucket import Bucket
from datacache.writeback.conflicts import CONFLICT_MARK, CONFLICTS, ConflictLog
from datacache.writeback.journal.journal import Change, Journal
from datacache.writeback.model import (
    KEPT,
    PENDING,
    UPLOAD,
    WRITER,
    Attributes,
    Claim,
    Content,
    Logged,
    Pending,
    Staged,
    Stored,
    UploadState,
    content_fields,
    content_of,
    decode_pending,
    decode_upload,
    encode_pending,
    encode_upload,
)
from datacache.writeback.overlay import Overlay
from datacache.writeback.remote.known import Known, RemoteFile
from datacache.writeback.remote.memory import RemoteMemory
from datacache.writeback.sections import SectionLock
from datacache.writeback.staging.area import StagingArea
from datacache.writeback.staging.files import StagedFiles
from datacache.writeback.staging.losses import LOSSES, LossLog
from datacache.writeback.state_log import Item, Slot, StateLog

_log = logging.getLogger("datacache.writeback")
_COMMIT_EVERY_S = 0.2
"""How long a change that nobody waits for stays in memory."""
_RECORD_BYTES = 64 * 1024
_GROUP, _DURABLE, _UNREADY, _HELD = "group", "durable", "unready", "held"
"""Kinds of items that are kept for the next owner: what was recorded, up to which ticket it is durable, what is pending
and not recorded, and which staged files drafts have open."""


class Watcher(Protocol):
    """Shows the bucket as a directory, and is told under the lock what changes behind its back."""

    def note_uploaded(self, pending: Pending, info: ObjectInfo | None) -> None:
        """Take in that the bucket has this now; None: it is deleted there."""
        ...

    def note_moved(self, key: str, new_key: str, theirs: ObjectInfo | None) -> None:
        """Take in that ours goes on under another key, because somebody else's object has this one. '' for the new key:
        ours was a deletion or cannot be kept."""
        ...

    def problem(self) -> tuple[str, float]:
        """Return why the store does not answer who looks, and for how many seconds it has not; '' while it does."""
        ...


class Replicated(NamedTuple):
    """Where what is acknowledged is beside this node."""

    node: str
    """'' for nowhere."""
    problem: str


class Replication(Protocol):
    """Brings what becomes durable here to a second node's disk as well. Any thread."""

    def watch(self, engine: WriteBack) -> None:
        """Begin, with all that the journal has."""
        ...

    def note_changed(self, keys: Sequence[str]) -> None:
        """Take note of keys of the journal whose records have changed. The engine's lock is held."""
        ...

    def ask(self, ticket: int) -> None:
        """Begin to bring the changes up to a ticket."""
        ...

    def wait(self, ticket: int, *, acknowledges: bool) -> None:
        """Return when the second node has the changes up to a ticket, or where it is settled that there is none; where
        something is acknowledged then, only if that may be. `StagingError` if it takes too long."""
        ...

    def holds(self, ticket: int) -> bool:
        """Return whether `wait` would return at once where something is acknowledged."""
        ...

    def status(self) -> Replicated:
        """Return which node it is, and what is wrong."""
        ...

    def close(self, *, done: bool) -> None:
        """End; `done`: nothing is pending any more."""
        ...


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
        memory: RemoteMemory,
        host: str,
        uploads: int = 8,
        ack: str = "staged",
        kept: StateLog | None = None,
        replication: Replication | None = None,
    ) -> None:
        """`kept` is where the area's last owner, if it was killed in the middle of its work, has left what goes on."""
        self.replication = replication
        self.area, self.files, self.bucket, self.prefix = area, files, bucket, prefix
        self.memory, self.host, self.uploads, self.ack = memory, host, uploads, ack
        self.kept = kept or StateLog()
        self.lock = SectionLock(self.kept, journal.seal)
        self.known = Known()
        memory.recall(self.known)
        self.overlay = Overlay(self.known.size_of)
        self.usage = self.overlay.usage
        self.conflict_log = ConflictLog(area.folder / CONFLICTS)
        self.losses = LossLog(area.folder / LOSSES, check=area.check)
        self.claims: dict[str, Claim] = {}
        """Keys that are being uploaded. See `Claims`."""
        self.local_folders: set[str] = set()
        """Folders that the store cannot keep: nothing is left to be done for them."""
        self.watchers: list[Watcher] = []
        self._listeners: list[Callable[[Pending], None]] = []
        self._journal = journal
        self._uploads: dict[str, UploadState] = {}
        self._recorded: deque[Item] = deque()  # groups that may not be durable yet
        self._noted = self.kept.noted
        self._kept_files: set[int] = set()  # that drafts of the last owner had open
        self._refs: dict[int, str] = {}  # staged file -> the key whose content it is
        self._held: dict[int, int] = {}  # staged file -> how many drafts have it open
        self._after: deque[tuple[int, Callable[[], None]]] = deque()  # what may happen once a ticket is durable
        self._ticket = self._durable = 0
        self.needs_ended = 0
        """The ticket of the last record by which a key stopped to need another key's object."""
        self._version = time.time_ns() // 1000
        self.commit_s = 1.0
        """How long it takes to make a change durable: a moving mean."""
        self._second = 0.0
        self._wake = threading.Event()
        self._closing = False
        self._replay()
        self.kept.watch(self)
        if replication is not None:
            replication.watch(self)
        self._committer = threading.Thread(target=self._commit_lazily, name="writeback-commit", daemon=True)
        self._committer.start()

    # --- what is pending -------------------------------------------------------------------------------------------

    def get(self, key: str) -> Pending | None:
        """Return what is pending of a key."""
        with self.lock:
            return self.overlay.get(key)

    def pendings(self) -> list[Pending]:
        """Return all that is to be brought to the bucket, as it is now."""
        with self.lock:
            return [pending for pending in self.overlay if pending.key not in self.local_folders]

    def listen(self, listener: Callable[[Pending], None]) -> None:
        """Have each new or changed pending told, under the lock."""
        with self.lock:
            self._listeners.append(listener)

    def watch(self, watcher: Watcher) -> None:
        """Have uploads and conflicts told, under the lock."""
        with self.lock:
            self.watchers.append(watcher)

    def next_version(self) -> int:
        """Return a number larger than any used in this area before: also after a restart, as long as the clock is
        right."""
        with self.lock:
            self._version += 1
            return self._version

    # --- changes ---------------------------------------------------------------------------------------------------

    def plan_change(
        self, key: str, attributes: Attributes, content: Content | None, *, base: str, ready: bool = True
    ) -> Pending:
        """Return a key's `Pending` with these, for `record`. `base` is the bucket's ETag, where nothing was pending
        yet."""
        old = self.overlay.get(key)
        with self.lock:
            before, version = self._version, self.next_version()  # `before` is often another key's: one object for both
        if old is None:
            return Pending(key, attributes, content, base, version, self._now(), ready, after=before)
        return Pending(key, attributes, content, old.base, version, old.since, ready, old.touched, old.after)

    def plan_deletion(self, key: str, *, base: str) -> tuple[list[Pending], list[str]]:
        """Return what a key's deletion has `record` make pending, and what it has it drop. `base` as for
        `plan_change`."""
        if CONFLICT_MARK in key:  # a conflict's copy: somebody has seen to it
            self._do_later(partial(self.conflict_log.settle, key))
        old = self.overlay.get(key)
        if old is None:
            if not base:
                return [], []
            version = self.next_version()
            return [Pending(key, None, None, base, version, self._now(), after=version - 1)], []
        if not old.base and not old.touched:
            return [], [key]
        sent = self._sum_of_sent(old)
        return [old._replace(attributes=None, content=None, version=self.next_version(), ready=True, sent=sent)], []

    def record(
        self,
        pendings: Iterable[Pending] = (),
        *,
        drop: Iterable[str] = (),
        blobs: Mapping[str, bytes | memoryview] | None = None,
        slots: Mapping[str, Slot] | None = None,
    ) -> int:
        """Make changes, all or none of which survive a crash; return the ticket for `commit`. `blobs` are the bytes of
        keys whose content is `Logged`, from the beginning of the key's slot where `slots` has one; where it lacks one,
        the key keeps the bytes it has. What is not ready stays in memory."""
        blobs = blobs or {}
        drop, pendings = list(drop), list(pendings)
        with self.lock:
            changes = [Change(PENDING + key, None) for key in drop if PENDING + key in self._journal]
            # What is not ready is not recorded: a deletion that it follows stays in the journal, or a crash would bring
            # the old object back.
            changes += [self._change_of(pending, blobs) for pending in pendings if pending.ready]
            if self.local_folders:
                keys = (*drop, *(pending.key for pending in pendings))
                changes += [Change(KEPT + key, None) for key in keys if key in self.local_folders]
            if changes:
                self._append_locked(changes, slots)  # from here on nothing may fail
            released: set[int] = set()
            for key in drop:
                old = self.overlay.drop(key)
                self._note_unready(old, None)
                self._release(old, released)
            for pending in pendings:
                old = self.overlay.get(pending.key)
                self._note_unready(old, pending)
                self._release(old, released)
                if isinstance(pending.content, Staged):
                    self._refs[pending.content.file] = pending.key
                self.overlay.set(pending)
                for listener in self._listeners:
                    listener(pending)
            for number in released.difference(self._refs):
                if number not in self._held:
                    self._do_later(partial(self.files.remove, number))
            return self._ticket

    def ref(self, stored: Stored) -> ObjectRef:
        """Return the object that has these bytes."""
        return ObjectRef(self.bucket.url, self.prefix + stored.key, stored.size_bytes, stored.etag)

    def blob(self, key: str) -> bytes:
        """Return the bytes of a key whose content is `Logged`."""
        return self._journal.read(PENDING + key)

    def commit(self, ticket: int | None = None, *, wait_s: float = 0.0, acknowledges: bool = True) -> None:
        """Return when the changes up to a ticket (None: all) are durable, on a second node as well where there is to be
        one. Raises `StagingError`; they may be durable later, then. On a full disk room is waited for, `wait_s` at
        most. `acknowledges`: somebody is told then; else they are only to be uploaded."""
        with self.lock:
            wanted = self._ticket if ticket is None else ticket
        if self.replication is None:
            self._commit_here(wanted, wait_s)
            return
        self.replication.ask(wanted)  # both at the same time
        self._commit_here(wanted, wait_s)
        self.replication.wait(wanted, acknowledges=acknowledges)
        if self.losses.settle(self._durable):  # of those who waited in vain
            self.losses.save()

    def _commit_here(self, wanted: int, wait_s: float = 0.0) -> None:
        deadline = time.monotonic() + wait_s
        while wanted > self._durable:
            self.area.check()
            began = time.perf_counter()
            try:
                durable = self._journal.commit(wanted)
            except StagingFullError:
                if time.monotonic() >= deadline:
                    raise
                self.files.wait_for_room(_RECORD_BYTES, deadline - time.monotonic(), refused=True)
                continue
            self.commit_s += (time.perf_counter() - began - self.commit_s) / 8
            self.files.set_journal_bytes(self._journal.size_bytes)
            with self.lock:  # where the ticket is of a section that goes on, it can be written after that
                self._durable = max(self._durable, durable)
                while self._recorded and self._recorded[0][1] <= self._durable:
                    self._recorded.popleft()
                self._noted.append((_DURABLE, self._durable))
            if self.losses.settle(self._durable):
                self.losses.save()
        while self._after:
            with self.lock:
                if not self._after or self._after[0][0] > self._durable:
                    return
                _, action = self._after.popleft()
            try:
                action()
            except StagingError as exc:  # what is durable is acknowledged all the same, and the next start deletes it
                _log.warning("a file that is not needed any more stays: %s", exc)

    @property
    def last_ticket(self) -> int:
        """Return the ticket of all changes so far."""
        return self._ticket

    def is_durable(self, ticket: int) -> bool:
        """Return whether a change is durable, on a second node as well where there is to be one."""
        return ticket <= self._durable and (self.replication is None or self.replication.holds(ticket))

    def recorded_keys(self) -> list[str]:
        """Return the keys of all records of the journal."""
        return self._journal.live_keys()

    def recorded(self, key: str) -> tuple[bytes, bytes, int | None] | None:
        """Return the header and the blob of a key's record, and which staged file it refers to; None for no record."""
        found = self._journal.record(key)
        return None if found is None else (*found, staged_file(key, found[0], len(found[1])))

    def _sum_of_sent(self, pending: Pending) -> str:
        """Return the MD5 of the bytes that a try may have brought to the bucket in one request; '' for none."""
        if not pending.touched or pending.upload_bytes > self.bucket.whole_bytes:
            return pending.sent
        try:
            if isinstance(pending.content, Logged):
                data = self.blob(pending.key)
            elif isinstance(pending.content, Staged):
                fd = self.files.open(pending.content.file)
                try:
                    data = os.pread(fd, pending.content.size_bytes, 0)
                finally:
                    os.close(fd)
            else:
                return pending.sent
        except (KeyError, OSError, StagingError):
            return pending.sent  # then the object is taken for somebody's, and kept
        return hashlib.md5(data, usedforsecurity=False).hexdigest()

    def _change_of(self, pending: Pending, blobs: Mapping[str, bytes | memoryview]) -> Change:
        key = PENDING + pending.key
        blob = blobs.get(pending.key, b"")
        if isinstance(pending.content, Logged) and pending.content.size_bytes and not blob:
            blob = self._journal.read(key)
        return Change(key, encode_pending(pending), blob)

    def _append_locked(self, changes: list[Change], slots: Mapping[str, Slot] | None = None) -> int:
        self._ticket = self._journal.append(changes, sealed=False)  # see `SectionLock`
        if self.replication is not None:
            self.replication.note_changed([change.key for change in changes])
        kept: list[tuple[str, bytes | None, bytes | memoryview | tuple[int, int]]] = []
        for key, header, blob in changes:
            slot = slots.get(key) if slots else None
            if slot is not None:
                slot.ticket = self._ticket
            kept.append((key, header, blob if slot is None else (slot.number, len(blob))))
        item = _GROUP, self._ticket, kept
        self._recorded.append(item)
        self._noted.append(item)
        self._wake.set()
        return self._ticket

    def _note_unready(self, old: Pending | None, new: Pending | None) -> None:
        """Keep what is pending of a key and not recorded."""
        if new is not None and not new.ready:
            self._noted.append(_unready_item(new))
        elif old is not None and not old.ready:
            self._noted.append((_UNREADY, old.key))

    def _release(self, old: Pending | None, released: set[int]) -> None:
        """Take note that a key's old content is not its content any more."""
        if old is None:
            return
        self.local_folders.discard(old.key)
        if isinstance(old.content, Stored) and old.content.key != old.key:
            self.needs_ended = self._ticket
        if isinstance(old.content, Staged) and self._refs.get(old.content.file) == old.key:
            del self._refs[old.content.file]
            released.add(old.content.file)

    def _do_later(self, action: Callable[[], None]) -> None:
        """Do something once all that is recorded by now is durable."""
        self._after.append((self._ticket, action))
        self._wake.set()

    def _now(self) -> float:
        """Return the time in whole seconds, the same object for a second."""
        now = float(int(time.time()))
        if now != self._second:
            self._second = now
        return self._second

    # --- staged files ------------------------------------------------------------------------------------------------

    def hold(self, number: int) -> int:
        """Open a staged file for a draft. While it is held it is neither deleted nor taken for a clean copy."""
        with self.lock:
            fd = self.files.open(number)
            self._held[number] = self._held.get(number, 0) + 1
            self._noted.append((_HELD, number, True))
            return fd

    def free(self, number: int) -> None:
        """Take note that a draft has closed a staged file. If nothing refers to it (any more) it is deleted."""
        with self.lock:
            self._held[number] -= 1
            if not self._held[number]:
                del self._held[number]
                self._noted.append((_HELD, number, False))
                if number not in self._refs:
                    self._do_later(partial(self.files.remove, number))

    def free_slot(self, slot: Slot) -> None:
        """Take note that a draft has let go of its memory. Others have it when what it was recorded with is durable."""
        with self.lock:
            if self.is_durable(slot.ticket):
                self.kept.slots.give_back(slot)
            else:
                self._do_later(partial(self._give_back, slot))

    def _give_back(self, slot: Slot) -> None:
        with self.lock:
            self.kept.slots.give_back(slot)

    def tear(self, number: int, offset: int) -> None:
        """Take note that a staged file is about to be changed in place from this offset on: uploads of it are torn."""
        with self.lock:
            for claim in self.claims.values():
                content = claim.pending.content
                if isinstance(content, Staged) and content.file == number and offset < content.size_bytes:
                    claim.torn = True

    # --- what is uploaded --------------------------------------------------------------------------------------------

    def apply_own_locked(self, key: str, info: ObjectInfo | None, attributes: Attributes | None) -> None:
        """Take into what is known that the bucket has something else under a key now; None: nothing."""
        self.usage.apply_own(key, info.size_bytes if info is not None else 0)
        file = None if info is None else RemoteFile(info.size_bytes, info.etag, info.mtime_ns, attributes)
        self.known.apply_own(key, file, attributes)
        self.memory.note(key, file, attributes)

    def settle_locked(self, pending: Pending, etag: str | None) -> None:
        """Drop what is pending of a key, as the bucket has it. An ETag says that a staged file with its bytes is a copy
        of the object."""
        key, content = pending.key, pending.content
        if isinstance(content, Staged) and etag is not None and content.file not in self._held:
            # Not given back: it is a clean copy, once it is durable that nothing refers to it any more.
            del self._refs[content.file]
            self.record(drop=[key])
            self._do_later(partial(self.files.keep, self.prefix + key, etag, content.file, content.size_bytes))
        else:
            self.record(drop=[key])

    def unrecord_locked(self, key: str) -> None:
        """Drop what the journal has of a key, which is done: what is pending of it is not ready."""
        if PENDING + key in self._journal:
            self._append_locked([Change(PENDING + key, None)])

    def keep_folder_locked(self, key: str) -> None:
        """Note that the store cannot keep a folder: nothing is left to be done for it, now or later."""
        self.local_folders.add(key)
        self._append_locked([Change(KEPT + key, b"")])

    def writer_of(self, pending: Pending) -> str:
        """Return what the metadata of an uploaded object says of where it came from. The key is part of it, because who
        copies an object often copies its metadata as well."""
        return f"{self.area.id}-{pending.version}-{self._stamp(pending.key)}"

    def own_version(self, metadata: Mapping[str, str], pending: Pending) -> int | None:
        """Return the version of this key that an object was made of, if this area wrote it since the key began to
        differ. An older one was edited by a program that kept the metadata."""
        area, _, rest = metadata.get(WRITER, "").partition("-")
        version, _, stamp = rest.partition("-")
        if area != self.area.id or stamp != self._stamp(pending.key) or not (version.isascii() and version.isdigit()):
            return None
        return int(version) if pending.after < int(version) <= pending.version else None

    def _stamp(self, key: str) -> str:
        return xxhash.xxh3_64_hexdigest((self.prefix + key).encode("utf-8", "surrogateescape"))

    def upload_state(self, key: str) -> UploadState | None:
        """Return the unfinished upload in parts that was recorded for a key."""
        with self.lock:
            return self._uploads.get(key)

    def upload_states(self) -> dict[str, UploadState]:
        """Return all unfinished uploads in parts that were recorded, by key."""
        with self.lock:
            return dict(self._uploads)

    def save_upload(self, key: str, state: UploadState | None) -> None:
        """Record an unfinished upload, durable when it returns; None: that there is none any more."""
        with self.lock:
            if state is None:
                if self._uploads.pop(key, None) is None:
                    return
            else:
                self._uploads[key] = state
            header = encode_upload(state) if state is not None else None
            ticket = self._append_locked([Change(UPLOAD + key, header)])
        if state is not None:
            self.commit(ticket, acknowledges=False)

    # --- what is kept for the next owner -----------------------------------------------------------------------------

    def describe(self, _changed: set[Any]) -> list[Item]:
        """See `state_log.StateSource`. All that changes here is noted at once."""
        return []

    def everything(self) -> Iterator[Item]:
        """See `state_log.StateSource`."""
        yield from self._recorded
        for pending in self.overlay:
            if not pending.ready:
                yield _unready_item(pending)
        for number in self._held:
            yield _HELD, number, True

    def _take_up(self) -> list[Pending]:
        """Record again what the last owner had recorded and perhaps not made durable, and return what it had pending
        and not recorded."""
        groups: deque[tuple[int, list[Any]]] = deque()
        unready: dict[str, Pending] = {}
        for kind, *item in self.kept.items():
            if kind == _GROUP:
                groups.append((item[0], item[1]))
            elif kind == _DURABLE:
                while groups and groups[0][0] <= item[0]:
                    groups.popleft()
            elif kind == _UNREADY:
                key, *fields = item
                unready.pop(key, None)
                if fields:
                    attributes, content, *more = fields
                    unready[key] = Pending(key, Attributes(*attributes), content_of(content), *more)
            elif kind == _HELD:
                (self._kept_files.add if item[1] else self._kept_files.discard)(item[0])
        look = self.kept.slots.look
        for _, changes in groups:
            self._append_locked(
                [Change(key, header, look(*blob) if isinstance(blob, tuple) else blob) for key, header, blob in changes]
            )
        self._journal.seal()
        return list(unready.values())

    def end_taking_up(self) -> None:
        """Let go of files that the last owner's drafts had open, and nobody has by now."""
        with self.lock:
            kept, self._kept_files = self._kept_files, set()
            for number in kept.difference(self._refs, self._held):
                self._do_later(partial(self.files.remove, number))

    # --- start and end -----------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        unready = self._take_up()
        files: set[int] = set()
        written: list[tuple[Pending, Staged]] = []
        for key, header, blob_bytes in self._journal.records():
            if key.startswith(KEPT):
                self.local_folders.add(key.removeprefix(KEPT))
                continue
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
        for pending in unready:
            self._version = max(self._version, pending.version)
            self.overlay.set(pending)
        self.files.purge(files | self._kept_files)

    def _measured(self, pending: Pending, content: Staged) -> Pending:
        """Return it with its file's size: what was written after the last acknowledgement may be there as well."""
        try:
            size = os.stat(self.files.path(content.file)).st_size
        except OSError:
            _log.error("%s: its staged file %s is not there", pending.key, self.files.path(content.file))
            return pending
        if size == content.size_bytes:
            return pending
        return pending._replace(content=Staged(content.file, size), version=self.next_version())

    def _commit_lazily(self) -> None:
        told = False
        pause = threading.Event()
        while not self._closing:
            self._wake.wait()
            pause.wait(_COMMIT_EVERY_S)
            self._wake.clear()
            try:
                wanted = self._ticket
                if self.replication is not None:
                    self.replication.ask(wanted)
                self._commit_here(wanted)
                told = False
            except DatacacheError as exc:
                if not told:
                    _log.error("what was written is not durable yet: %s", exc)
                told = True
                self._wake.set()
                pause.wait(1.0)

    def close(self, *, discard: bool = False) -> None:
        """Make everything durable and let go of the staging area; with `discard` it is deleted, if it was made just now
        and nothing is pending in it."""
        self._closing = True
        self._wake.set()
        self._committer.join()
        try:
            self._commit_here(self._ticket)
        finally:
            if self.replication is not None:
                with self.lock:
                    done = not self.overlay
                self.replication.close(done=done)
            self.losses.save()
            self.conflict_log.shorten()
            try:
                self._journal.close()
            finally:
                self.memory.close()
                self.area.close(discard=discard and self.area.is_new and not len(self.overlay))


def _unready_item(pending: Pending) -> Item:
    """Return the item of a new file that was not closed or synced yet."""
    p = pending
    assert p.attributes is not None
    assert p.content is not None
    attributes, content = tuple(p.attributes), content_fields(p.content)
    return _UNREADY, p.key, attributes, content, p.base, p.version, p.since, p.ready, p.touched, p.after


def staged_file(key: str, header: bytes, blob_bytes: int) -> int | None:
    """Return the number of the staged file that a record of the journal refers to; None for none."""
    if key.startswith((UPLOAD, KEPT)):
        return None
    content = decode_pending(key, header, blob_bytes).content
    return content.file if isinstance(content, Staged) else None
