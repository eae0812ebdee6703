"""Open files of a read-write mount by handle: reading, writing, and when what was written is acknowledged.

Part of `BucketFs`; takes its lock itself. What `Load` and `Defer` ask for, and what `flush`, `fsync`, `release` and
`long_open` give back, waits, and is called in a thread without the lock. `files.py` has the bytes.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from datacache.core.errors import DatacacheError, ObjectChangedError, ObjectNotFoundError, StagingFullError
from datacache.writeback.draft import INLINE_BYTES
from datacache.writeback.model import Pending, Stored, parent_of
from datacache.writeback.sections import Defer, complete
from datacache.writeback.state_log import Item
from fuse_mount.bucket.fs.mount_state import HANDLE, Notes
from fuse_mount.bucket.fs.nodes import Nodes
from fuse_mount.bucket.fs.open_file import Name, OpenFile, Spoiled
from fuse_mount.bucket.fs.tree import Node
from fuse_mount.bucket.fs.view import State

_log = logging.getLogger("fuse_mount")


class Handle(NamedTuple):
    """One open(2)."""

    file: OpenFile
    writes: bool


class Handles:
    """One mount's open files."""

    def __init__(self, nodes: Nodes, notes: Notes) -> None:
        self._nodes, self._tree, self._files, self._engine = nodes, nodes.tree, nodes.files, nodes.engine
        self._live, self._remote = nodes.files.live, nodes.view.remote
        self._notes = notes
        self._handles: dict[int, Handle] = {}
        self._next = 1

    # --- a server's successor ----------------------------------------------------------------------------------------

    def everything(self) -> Iterator[Item]:
        """Yield all handles, as they are noted. Under the lock."""
        for number, handle in self._handles.items():
            yield HANDLE, number, handle.file.node.ino, handle.writes

    @property
    def next_handle(self) -> int:
        """Return the number of the next handle."""
        return self._next

    def restore(self, handles: dict[int, tuple[int, bool]], next_handle: int) -> list[Callable[[], None]]:
        """Take up the handles that an earlier server has left, of files that are open; return what is left to be done,
        without the lock, for files that were about to be closed."""
        for number, (ino, writes) in handles.items():
            file = self._tree.get(ino).open
            if file is not None:
                self._handles[number] = Handle(file, writes)
                file.handles += 1
                file.writers += writes
        self._next = max(next_handle, max(handles, default=0) + 1)
        left = [node.open for node in self._tree if node.open is not None and not node.open.handles]
        return [partial(self.settle, file) for file in left]

    # --- opening -----------------------------------------------------------------------------------------------------

    def open(self, ino: int, flags: int) -> int:
        """Return a handle. What the kernel has kept of the file's bytes is right: other bytes have another inode. What
        is going to be appended to is brought here first. What cannot be changed, because the store that
        has its bytes is away, is not opened to be: the kernel would take the writes, and only close(2) would fail."""
        with self._engine.lock:
            node = self._tree.get(ino)
            state = self._nodes.state_of(node)
            truncates, writes = _ways(flags)
            if writes and node.open is not None:
                node.open.expect_current()
            self.expect_opened_locked(state, flags)
            changes_part = writes and not truncates
            if changes_part and self._remote.is_away and self._files.is_only_in_store(node.open, state.content):
                raise self._remote.unavailable(state.key)
            handle = self.open_locked(node, state, flags)
            appends = bool(flags & os.O_APPEND)
            if changes_part and self._files.wants_its_bytes(self._handles[handle].file, appends=appends):
                raise Defer(partial(self._begin_draft, handle))
            return handle

    def expect_opened_locked(self, state: State, flags: int) -> None:
        """Raise where what lies under a name cannot be opened, or something has to be asked for before."""
        content = state.content
        if content is None:
            raise OSError(errno.EISDIR, "it is a folder")
        truncates, writes = _ways(flags)
        if writes and not truncates and isinstance(content, Stored) and content.key == state.key:
            brings = content.size_bytes <= INLINE_BYTES and self._files.is_only_in_store(None, content)
            # A part of what somebody else has replaced cannot be changed.
            self._remote.expect_checked(state.key, self._engine.ref(content) if brings else None)

    def open_locked(self, node: Node, state: State, flags: int) -> int:
        """Open a file as it is, after `expect_opened_locked`. `Load` where it is still being closed: nothing is changed
        then."""
        truncates, writes = _ways(flags)
        file = node.open
        if file is None:
            file = OpenFile.of(node, state)
        if truncates:
            self._files.truncate(file, 0, state)
        else:
            self._files.renew(file, state)
        if node.open is None:
            node.open = file
        handle = self.add_locked(file, writes=writes)
        self._notes.note_done(node.ino, handle)
        return handle

    def _begin_draft(self, handle: int) -> int:
        """Begin the draft of a file that is opened to be changed in part; return the handle."""
        with self._engine.lock:
            file = self._handles[handle].file
        try:
            self._files.begin_now(file)
            return handle
        except (ObjectChangedError, ObjectNotFoundError) as exc:
            self._release_ungiven(handle)
            with self._engine.lock:
                self._remote.expire(parent_of(file.node.key))
            raise OSError(errno.ESTALE, "it was changed elsewhere", file.node.key) from exc  # the kernel looks again
        except BaseException:
            self._release_ungiven(handle)
            raise

    def _release_ungiven(self, handle: int) -> None:
        """Release a handle that nobody was given. What others wrote to the file meanwhile may be left to be done."""
        with self._engine.lock:
            self._notes.forget_done()
            left = self.release(handle)
        if left is None:
            return
        try:
            left()
        except (DatacacheError, OSError) as exc:  # told to who wrote it, by its own close
            _log.warning("an open file could not be made durable: %s", exc)

    def add_locked(self, file: OpenFile, *, writes: bool) -> int:
        """Return a new handle of a file."""
        handle, self._next = self._next, self._next + 1
        self._set(handle, Handle(file, writes))
        file.handles += 1
        file.writers += writes
        return handle

    def _set(self, number: int, handle: Handle) -> None:
        self._handles[number] = handle
        self._notes.items.append((HANDLE, number, handle.file.node.ino, handle.writes))

    # --- reading and writing -----------------------------------------------------------------------------------------

    def read(self, handle: int, offset: int, size: int, *, cached: bool = True) -> bytes:
        """Return bytes of an open file, which the kernel keeps (`cached`) as pages of it."""
        with self._engine.lock:
            file = self._handles[handle].file
            file.is_cached |= cached
            return self._files.read(file, offset, size)

    def is_cached(self, handle: int) -> bool:
        """Return whether the kernel may have read pages of an open file since that was opened."""
        with self._engine.lock:
            return self._handles[handle].file.is_cached

    def write(self, handle: int, offset: int, data: bytes) -> int:
        """Write to an open file; return how much was written, which is all."""
        with self._engine.lock:
            return self._files.write(self._handles[handle].file, offset, data)

    def allocate(self, handle: int, mode: int, offset: int, size: int) -> None:
        """Do as fallocate(2) to an open file."""
        with self._engine.lock:
            self._files.allocate(self._handles[handle].file, mode, offset, size)

    def copy(self, source_handle: int, start: int, handle: int, offset: int, size: int) -> int:
        """Copy bytes of one open file into another one; return how many, perhaps fewer. A whole object that the bucket
        has becomes what is pending under the other's key, as when it is renamed: its bytes stay where they are."""
        with self._engine.lock:
            source, file = self._handles[source_handle].file, self._handles[handle].file
            size = min(size, source.size_bytes - start)
            if size <= 0:
                return 0
            if not start and not offset and size == source.size_bytes and self._copy_by_key_locked(source, file):
                return size
            return self._files.copy(source, start, file, offset, size)

    def _copy_by_key_locked(self, source: OpenFile, file: OpenFile) -> bool:
        """Give an empty file the content of an open one, durable when the file is closed; return false where its bytes
        have to be copied: small ones, and those that the bucket does not have."""
        content = source.content
        if source.draft is not None or source.has_no_place or not isinstance(content, Stored):
            return False
        if content.size_bytes <= INLINE_BYTES or file.size_bytes or file.node.is_gone or file.spoiled is not None:
            return False
        file.expect_current()
        key = file.node.key
        if content.key == source.node.key:
            self._remote.expect_checked(content.key)
            try:
                if self._nodes.state_of(source.node).content != content:
                    return False
            except OSError:  # somebody else has replaced it
                return False
        self._engine.usage.expect_room(content.size_bytes)
        attributes = (file.draft or file).attributes
        file.take_io()
        try:
            file.ticket = self._engine.record([self._engine.plan_change(key, attributes, content, base=file.base)])
            self._files.discard(file)
        finally:
            file.io.release()
        file.attributes = attributes
        file.node.cached = content.etag
        self._files.set_content(file, content)
        return True

    def truncate_locked(self, handle: int | None, size: int) -> bool:
        """Change an open file's size, if there is one of this handle; return whether there is."""
        opened = self._handles.get(handle) if handle is not None else None
        if opened is None or handle is None:
            return False
        self._files.truncate(opened.file, size)
        if not opened.writes:  # open(2) with O_TRUNC, for reading: closing it is what acknowledges this
            self._set(handle, Handle(opened.file, True))
            opened.file.writers += 1
        return True

    def truncate_now(self, node: Node, size: int) -> None:
        """Change the size of a file as truncate(2) does, without a handle: durable when it returns. Waits."""

        def open_file() -> OpenFile:
            with self._engine.lock:
                if node.open is None:
                    node.open = OpenFile.of(node, self._nodes.state_of(node))
                node.open.handles += 1  # it is not to go meanwhile
                return node.open

        def truncate() -> None:
            with self._engine.lock:
                self._files.truncate(file, size)

        file = complete(open_file)
        try:
            complete(truncate)
            self.settle(file)
        finally:
            with self._engine.lock:
                file.handles -= 1
            self.close_if_unused(file)

    def knows(self, handle: int) -> bool:
        """Return whether a handle was not released."""
        return handle in self._handles

    def is_small(self, handle: int) -> bool:
        """Return whether an open file's bytes go into the journal."""
        draft = self._handles[handle].file.draft
        return draft is not None and draft.in_memory(0)

    # --- what is lost ------------------------------------------------------------------------------------------------

    def spoil(self, handle: int, exc: BaseException, n_bytes: int) -> str | None:
        """Note that a write of so many bytes has failed; return the file's key, None where a write to it had failed
        before. The kernel has told its writer already that all is well, keeps the bytes, and would not write them
        again: so no close or sync of this open file succeeds from now on, and who opens the name anew gets another
        inode, with what is really here."""
        with self._engine.lock:
            file = self._handles[handle].file
            if file.spoiled is not None:
                self._engine.losses.grow(file.spoiled.loss, n_bytes)
                return None
            node = file.node
            key = node.key
            file.spoiled = Spoiled(exc, self._lose_locked(file, n_bytes, exc))
            _log.error("%s: what was written is lost, and its writer is told at close: %s", key, exc)
            if node.parent is None or node.is_gone:
                return key
            self._nodes.on_stale(node.parent.ino, node.name)
            self._tree.unname(node)
            self._files.take_name(file)
            pending = self._engine.overlay.get(key)
            if pending is not None and not pending.ready:  # a new file, of which nothing is to be kept
                pendings, drop = self._engine.plan_deletion(key, base="")
                self._engine.record(pendings, drop=drop)
            return key

    def _lose_locked(self, file: OpenFile, n_bytes: int, exc: BaseException) -> int:
        """Note what is lost of a file, for status and flush to tell; return its number. Of one that was deleted here
        nothing is: 0."""
        if file.node.is_gone and file.name is not Name.REPLACED:
            return 0
        draft = file.draft
        if draft is not None:
            n_bytes += min(draft.unsettled_bytes, draft.size)  # a page that is written a thousand times is lost once
        return self._engine.losses.add(file.node.key, n_bytes, _reason(exc))

    def _doubt(self, file: OpenFile, exc: BaseException) -> None:
        """Note that the journal has refused what was written to a file: it is lost, unless a later try succeeds before
        the server ends."""
        engine = self._engine
        with engine.lock:
            if not file.uncommitted_bytes or engine.is_durable(file.ticket) or file.node.is_gone:
                return
            lost_bytes, file.uncommitted_bytes = file.uncommitted_bytes, 0
            engine.losses.add(file.node.key, lost_bytes, _reason(exc), ticket=file.ticket)
        engine.losses.save()

    # --- acknowledging -----------------------------------------------------------------------------------------------

    def flush(self, handle: int, *, wait: bool = True) -> Callable[[], None] | None:
        """Return what close(2) has to do for all that was written to be acknowledged: it waits for a disk, with `wait`
        for room as well. None for nothing."""
        with self._engine.lock:
            opened = self._handles[handle]
            file = opened.file
            if opened.writes and file.spoiled is not None:
                raise file.spoiled.why
            dirty = file.draft is not None and file.draft.dirty
            waits = self._engine.ack == "uploaded" and file.ticket > 0
            if not opened.writes or not (dirty or waits or not self._engine.is_durable(file.ticket)):
                return None
            return partial(self.settle, file, wait=wait)

    def fsync(self, handle: int) -> Callable[[], None]:
        """Return what fsync(2) has to do: as `flush`, and for all else that was changed before."""
        with self._engine.lock:
            file = self._handles[handle].file

        def settle() -> None:
            self.settle(file)
            self.commit()

        return settle

    def release(self, handle: int) -> Callable[[], None] | None:
        """Let go of a handle; return what is left to be done, in a thread."""
        with self._engine.lock:
            opened = self._handles.pop(handle)
            self._notes.items.append((HANDLE, handle, 0, False))
            file = opened.file
            file.handles -= 1
            file.writers -= opened.writes
            dirty = file.draft is not None and file.draft.dirty
            if file.handles or (dirty and not file.node.is_gone):
                return partial(self.settle, file) if dirty and not file.writers else None
            self.close_if_unused(file)
            return None

    def long_open(self, for_s: float | None = None) -> list[tuple[int, Callable[[], None]]]:
        """Return the inode numbers of files that have been open for writing for a while (None: as long as it is set),
        and what is to be done in a thread for each, after the kernel has written what it has of it."""
        now = time.monotonic()
        for_s = self._live.upload_every_s if for_s is None else for_s
        due: list[tuple[int, Callable[[], None]]] = []
        with self._engine.lock:
            for opened in self._handles.values():
                if opened.writes and opened.file.synced_at + for_s <= now:
                    opened.file.synced_at = now
                    due.append((opened.file.node.ino, partial(self.settle, opened.file)))
        return due

    def commit(self, *, wait: bool = True) -> None:
        """Return when all changes of names so far are durable. May take long: with `wait`, for room as well."""
        self._engine.commit(wait_s=self._live.staging_wait_s if wait else 0.0)

    def settle(self, file: OpenFile, *, wait: bool = True, name: Callable[[], None] | None = None) -> None:
        """Make what was written to a file durable and pending. Without the lock, and in a thread: with `wait` for room,
        too. It may be called again after any error. `name` is called under the lock before it becomes pending, to give
        the file its first name."""
        if file.spoiled is not None:
            self.close_if_unused(file)
            raise file.spoiled.why
        try:
            pending = self._stage(file, name)
        except BaseException as exc:
            self.close_if_unused(file, exc)
            raise
        if not file.handles:  # else `release` sees to it
            self.close_if_unused(file)
        try:
            self._engine.commit(file.ticket, wait_s=self._live.staging_wait_s if wait else 0.0)
        except BaseException as exc:
            if wait or not isinstance(exc, StagingFullError):  # else it is tried again at once
                self._doubt(file, exc)
            raise
        if self._engine.ack == "uploaded":
            if pending is None:
                with self._engine.lock:
                    pending = None if file.node.is_gone else self._engine.overlay.get(file.node.key)
            if pending is not None and pending.ready:
                self._live.uploader.wait_for(pending.key, pending.version, None)

    def _stage(self, file: OpenFile, name: Callable[[], None] | None) -> Pending | None:
        engine = self._engine
        with file.io:
            draft = file.draft
            if draft is None or not draft.dirty:
                return None
            changes, taken = draft.changes, draft.unsettled_bytes
            draft.sync()
            with engine.lock:
                if name is not None:
                    name()
                if file.node.is_gone:
                    return None
                key = file.node.key
                content, blob = draft.content(), draft.blob()
                pending = engine.plan_change(key, draft.attributes, content, base=file.base)
                uncommitted = 0 if engine.is_durable(file.ticket) else file.uncommitted_bytes
                slots = {key: draft.slot} if draft.slot is not None else {}
                file.ticket = engine.record([pending], blobs={key: blob} if blob else {}, slots=slots)
                draft.settled_changes = changes
                draft.unsettled_bytes -= taken
                file.uncommitted_bytes = min(uncommitted + taken, draft.size)
                file.synced_at = time.monotonic()
                file.content, file.attributes = content, draft.attributes
                self._files.charge(file)
                return pending

    def close_if_unused(self, file: OpenFile, failure: BaseException | None = None) -> None:
        """Let go of a file that nobody has open any more. `failure`: why what was written to it could not be kept."""
        with self._engine.lock:
            if file.handles or file.node.open is not file or not file.io.acquire(blocking=False):
                return  # who has `io` comes here afterwards
            try:
                if failure is not None and file.draft is not None and file.draft.unsettled_bytes:
                    self._lose_locked(file, 0, failure)
                self._files.discard(file)
            finally:
                file.io.release()
            file.node.open = None
            self._tree.rest(file.node)
        if failure is not None:
            self._engine.losses.save()


def _ways(flags: int) -> tuple[bool, bool]:
    """Return whether open(2) empties a file, and whether it writes."""
    truncates = bool(flags & os.O_TRUNC)
    return truncates, truncates or flags & os.O_ACCMODE != os.O_RDONLY


def _reason(exc: BaseException) -> str:
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
