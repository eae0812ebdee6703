"""Open files of a read-write mount: where their bytes come from, drafts of those that are written.

Part of `BucketFs`. What is called under its lock does not wait (see `writeback.sections`). Which open files have a name
is the caller's to know.
"""

from __future__ import annotations

import errno
import io
import time
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

from datacache.core.disk import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE
from datacache.core.errors import ObjectChangedError, ObjectNotFoundError, StagingError
from datacache.core.ids import BLOCK_BYTES
from datacache.writeback.draft import INLINE_BYTES, Draft
from datacache.writeback.journal.segments import FULL
from datacache.writeback.live import LiveBucket
from datacache.writeback.model import Content, Logged, Staged, Stored
from datacache.writeback.sections import Defer, Load, complete
from fuse_mount.bucket.fs.mount_state import SIZE, Notes
from fuse_mount.bucket.fs.open_file import (
    QUICK_BYTES,
    BytesReader,
    Clean,
    FileReader,
    Name,
    OpenFile,
    Reader,
    StoredReader,
)
from fuse_mount.bucket.fs.tree import LOCAL
from fuse_mount.bucket.fs.view import State

T = TypeVar("T")
_COPIED_AT_A_TIME = 64 * 2**20
"""Bytes of one staged file that one request copies into another: the program may be interrupted in between."""
_MOST_IN_MEMORY = 256
"""Open files whose bytes are kept in memory to be read, as those of the journal are: 64 MiB."""


class OpenFiles:
    """Reads and writes the bytes of open files."""

    def __init__(self, live: LiveBucket, notes: Notes) -> None:
        self.live, self._engine, self._staged, self._notes = live, live.engine, live.engine.files, notes
        self._in_memory = WeakSet[BytesReader]()

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, file: OpenFile, offset: int, size: int) -> bytes:
        """Return bytes of an open file."""
        state = file.state
        if isinstance(state, Draft):
            if state.in_memory(0) or size <= QUICK_BYTES:
                return state.read(offset, size)
            raise Defer(lambda: state.read(offset, size))
        size = min(size, file.content.size_bytes - offset)
        if size <= 0:
            return b""
        reader = self._reader_of(file, state)
        found = reader.here(offset, size)
        if found is not None:
            return found
        content = file.content
        raise Defer(lambda: self._read(file, content, reader, offset, size))

    def _read(self, file: OpenFile, content: Content, reader: Reader | Draft, offset: int, size: int) -> bytes:
        while True:
            try:
                return reader.read(offset, size)
            except (ObjectNotFoundError, ObjectChangedError):
                # After a rename its bytes lie under the new key, and the object they lay in before is gone.
                with self._engine.lock:
                    if file.content == content:
                        raise
                    content, state = file.content, file.state
                    reader = state if isinstance(state, Draft) else self._reader_of(file, state)

    def _reader_of(self, file: OpenFile, state: Clean) -> Reader:
        if state.reader is not None:
            return state.reader
        reader = self._reader(file)
        if isinstance(reader, BytesReader):
            if len(self._in_memory) >= _MOST_IN_MEMORY:
                return reader  # its bytes are read anew each time, in place of being kept
            self._in_memory.add(reader)
        state.reader = reader
        return reader

    def _reader(self, file: OpenFile) -> Reader:
        content = file.content
        if isinstance(content, Logged):
            return BytesReader(self._blob(file))
        if isinstance(content, Staged):
            return FileReader(self._staged.open(content.file))
        fd = self._staged.open_clean(self._engine.prefix + content.key, content.etag)
        return FileReader(fd) if fd is not None else StoredReader(self.live, content)

    def _blob(self, file: OpenFile) -> bytes:
        return self._engine.blob(file.node.key) if file.content.size_bytes else b""

    def set_content(self, file: OpenFile, content: Content) -> None:
        """Give a file other bytes."""
        if content != file.content and isinstance(file.state, Clean):
            file.state.reader = None
        file.content = content
        self.charge(file)

    def set_place(self, file: OpenFile, content: Content) -> None:
        """Note that a file's bytes lie somewhere else now. Those that have them open here go on reading them."""
        if isinstance(file.state, Clean) and isinstance(file.state.reader, StoredReader):
            file.state.reader = None
        file.content = content

    def keep_bytes(self, file: OpenFile) -> None:
        """Have a file's bytes in a draft, for who has it open, before it loses its name."""
        if file.draft is None and file.handles:
            self._begin(file)

    def _fetch_stored(self, file: OpenFile, content: Stored) -> int | None:
        """Copy an object's bytes into a staged file; None if they lie somewhere else by now."""
        try:
            return self.live.fetching.fetch(content)
        except (ObjectNotFoundError, ObjectChangedError):
            with self._engine.lock:
                if file.content == content:
                    raise
            return None

    # --- drafts ------------------------------------------------------------------------------------------------------

    def begin(self, file: OpenFile) -> Draft:
        """Return the draft of a file that is to be changed. `Load` as by `_expect_fetched`."""
        return file.draft or self._begin(file)

    def _expect_fetched(self, file: OpenFile) -> None:
        """`Load` where the bytes of a file have to be fetched to begin a draft with."""
        content, state = file.content, file.state
        if isinstance(content, Stored) and isinstance(state, Clean) and not (state.found and state.found[0] == content):
            raise Load(lambda: self._fetch(file, state, content))

    def begin_now(self, file: OpenFile) -> None:
        """Begin the draft of a file that is to be changed, after all that it needs. Waits."""

        def begin() -> None:
            with self._engine.lock:
                file.expect_writable()
                self.begin(file)

        complete(begin)

    def _begin(self, file: OpenFile, *, empty: bool = False) -> Draft:
        content, state = file.content, file.state
        assert isinstance(state, Clean)
        if empty:
            self._drop(state.found)
            draft = Draft.of_bytes(self._engine, file.attributes)
        elif isinstance(content, Stored):
            self._expect_fetched(file)
            draft = self._of_found(file, state)
        elif isinstance(content, Logged):
            draft = Draft.of_bytes(self._engine, file.attributes, self._blob(file))
        else:
            draft = Draft.of_staged(self._engine, file.attributes, content.file)
        file.state = draft
        self.charge(file, draft.size)
        return draft

    def _note_size(self, file: OpenFile, draft: Draft) -> None:
        """Keep how many bytes a draft in memory has for the server's successor."""
        if draft.slot is not None:
            self._notes.items.append((SIZE, file.node.ino, draft.size))

    def _note_dirty(self, file: OpenFile, draft: Draft) -> None:
        if not draft.dirty:
            file.note()
        draft.note_change()

    def wants_its_bytes(self, file: OpenFile, *, appends: bool) -> bool:
        """Return whether a file that is opened to be changed in part should have its bytes here before the first write.

        An append needs them in any case, and small ones cost next to nothing. While they are here, an object that
        somebody puts under the name cannot take them away: ours goes on beside it, whole. A large file that is opened
        for reading and writing may be mapped and never written to."""
        content = file.content
        is_stored = file.draft is None and not file.has_no_place and isinstance(content, Stored)
        return is_stored and (appends or content.size_bytes <= INLINE_BYTES)

    def is_only_in_store(self, file: OpenFile | None, content: Content | None) -> bool:
        """Return whether the bytes that a change of a part needs lie in the bucket and nowhere here. `file`: if it is
        open."""
        if not isinstance(content, Stored) or (file is not None and (file.draft is not None or file.has_no_place)):
            return False
        if file is not None and isinstance(file.state, Clean) and file.state.found and file.state.found[0] == content:
            return False
        if self._staged.clean(self._engine.prefix + content.key, content.etag) is not None:
            return False
        # Only small ones are begun from the node's cache (see `_fetch_bytes`).
        size = content.size_bytes
        return size > INLINE_BYTES or StoredReader(self.live, content).here(0, size) is None

    def _of_found(self, file: OpenFile, state: Clean) -> Draft:
        """Begin a draft of an object's bytes."""
        assert state.found is not None
        _, found = state.found
        if isinstance(found, int):
            return Draft.of_staged(self._engine, file.attributes, found)
        return Draft.of_bytes(self._engine, file.attributes, found)

    def _fetch(self, file: OpenFile, state: Clean, content: Stored) -> None:
        """Bring bytes here that are to be changed in part, or kept. The kernel sends many writes at once: one of them
        fetches, and the others find what it has brought, or that it failed."""
        with state.fetching:
            with self._engine.lock:
                is_there = state.found is not None and state.found[0] == content
                if is_there or file.state is not state or file.spoiled is not None or file.content != content:
                    return
            found = self._fetch_bytes(file, content)
            if found is None:
                return
            with self._engine.lock:
                superseded, new = state.found, (content, found)
                if file.handles and file.state is state:
                    state.found = new
                else:
                    superseded = new
            self._drop(superseded)

    def _fetch_bytes(self, file: OpenFile, content: Stored) -> bytes | int | None:
        if content.size_bytes <= INLINE_BYTES:
            with self._engine.lock:
                brought = self._engine.known.take_brought(content.key, content.etag)
            if brought is not None:
                return brought
            return self._read(file, content, StoredReader(self.live, content), 0, content.size_bytes)
        found = self._staged.take(self._engine.prefix + content.key, content.etag)
        if found is None:
            self._wait_for_room(content.size_bytes)
            found = self._fetch_stored(file, content)
        return found

    def _drop(self, found: tuple[Content, bytes | int] | None) -> None:
        if found is not None and isinstance(found[1], int):
            self._staged.remove(found[1])

    def discard(self, file: OpenFile) -> None:
        """Let go of the bytes of a file that nobody has open any more, or that is to have others."""
        state, file.state = file.state, Clean()
        if isinstance(state, Draft):
            state.close()
        else:
            self._drop(state.found)

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(self, file: OpenFile, offset: int, data: bytes) -> int:
        """Write to an open file. What does not fit into memory is written in a thread."""
        file.expect_writable()
        end = offset + len(data)
        self._expect_fetched(file)
        self._expect_quota(file, end)
        self._make_room(end, file.size_bytes)
        draft = self.begin(file)
        self._grow(file, draft, end)
        file.node.cached = LOCAL
        quick = draft.in_memory(end) or (not draft.in_memory(0) and len(data) <= QUICK_BYTES)
        if not quick or not file.io.acquire(blocking=False):
            raise Defer(lambda: self._write(file, offset, data))
        try:
            self._note_dirty(file, draft)
            draft.write(offset, data)
            self._note_size(file, draft)
            draft.unsettled_bytes += len(data)
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            raise Defer(lambda: self._write(file, offset, data)) from exc
        finally:
            file.io.release()
        return len(data)

    def _write(self, file: OpenFile, offset: int, data: bytes) -> int:
        self._change(file, lambda draft: draft.write(offset, data), len(data))
        return len(data)

    def _change(self, file: OpenFile, change: Callable[[Draft], T], n_bytes: int) -> T:
        """Change a draft's bytes, so many of them. Waits for room where the disk is full."""
        deadline = time.monotonic() + self.live.staging_wait_s
        self._engine.area.check()
        while True:
            with file.io:
                draft = file.draft
                if draft is None:
                    raise StagingError("the file was closed while it was written")
                with self._engine.lock:
                    self._note_dirty(file, draft)
                try:
                    found = change(draft)
                    draft.unsettled_bytes += n_bytes
                    return found
                except OSError as exc:
                    if exc.errno not in FULL:
                        raise
                finally:
                    with self._engine.lock:
                        file.note()  # its bytes may lie in a file by now
                        draft.let_go_of_spilled()
            self._staged.wait_for_room(n_bytes, deadline - time.monotonic(), refused=True)

    def allocate(self, file: OpenFile, mode: int, offset: int, size: int) -> None:
        """Do as fallocate(2). What stays as it is, with `FALLOC_KEEP_SIZE` beyond the end, needs room and takes none.
        The rest is done in a thread."""
        if mode & ~(FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE):
            raise OSError(errno.EOPNOTSUPP, "a file's bytes cannot be moved within it")
        file.expect_writable()
        end, now = offset + size, file.size_bytes
        clears = bool(mode & (FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE)) and offset < now
        grows = not mode & FALLOC_KEEP_SIZE and end > now
        if clears or grows:
            self._expect_fetched(file)
        if mode & FALLOC_PUNCH_HOLE:
            end = min(end, now)
        if grows:
            self._expect_quota(file, end)
        elif end > now and not file.has_no_place:
            self._engine.usage.expect_room(end - now)
        self._make_room(end, now)
        if clears or grows:
            draft = self.begin(file)
            if grows:
                self._grow(file, draft, end)
            file.node.cached = LOCAL
            n_bytes = (min(end, now) if mode & FALLOC_KEEP_SIZE else end) - offset
            raise Defer(lambda: self._change(file, lambda d: d.allocate(mode, offset, size), n_bytes))

    def copy(self, source: OpenFile, start: int, file: OpenFile, offset: int, size: int) -> int:
        """Copy bytes of an open file, all of which it has, into one; return how many, perhaps fewer. In a thread."""
        file.expect_writable()
        draft = file.draft
        if draft is None:
            raise Load(lambda: self.begin_now(file))
        staged = None if draft.in_memory(offset + min(size, BLOCK_BYTES)) else self._staged_file(source)
        size = min(size, BLOCK_BYTES if staged is None else _COPIED_AT_A_TIME)
        self._expect_quota(file, offset + size)
        self._make_room(offset + size, draft.size)
        self._grow(file, draft, offset + size)
        file.node.cached = LOCAL
        if staged is not None:
            raise Defer(lambda: self._change(file, lambda d: d.copy(offset, staged, start, size), size))
        raise Defer(lambda: self._write(file, offset, self._read_now(source, start, size)))

    def _staged_file(self, file: OpenFile) -> io.FileIO | None:
        """Return the file of this node's disk that has a file's bytes, if there is one."""
        state = file.state
        if isinstance(state, Draft):
            return state.file
        reader = self._reader_of(file, state)
        return reader.file if isinstance(reader, FileReader) else None

    def _read_now(self, file: OpenFile, offset: int, size: int) -> bytes:
        def read() -> bytes:
            with self._engine.lock:
                return self.read(file, offset, size)

        return complete(read)

    def _make_room(self, end: int, own_bytes: int) -> None:
        """Have room for a file of so many bytes to reach an end. `Load` where that has to be waited for."""
        n_bytes = max(0, end - own_bytes)
        if not self._staged.make_room(n_bytes):
            raise Load(lambda: self._wait_for_room(n_bytes, own_bytes=own_bytes))

    def truncate(self, file: OpenFile, size: int, now: State | None = None) -> None:
        """Cut an open file off, or extend it with zeros; `now`: after `renew`."""
        file.expect_writable()
        if size:
            self._expect_fetched(file)
        self._expect_quota(file, size)
        file.take_io()
        try:
            if now is not None:
                self.renew(file, now)
            draft = file.draft or self._begin(file, empty=not size)
            file.node.cached = LOCAL
            if draft.size != size:
                draft.truncate(size) if size else draft.empty()
                file.note()  # it may lie elsewhere now
                self.charge(file, size)
            self._note_dirty(file, draft)
        finally:
            file.io.release()

    def renew(self, file: OpenFile, now: State) -> None:
        """Have an open file be another version, if its name has one by now."""
        if file.draft is None and now.content != file.content:
            self.set_content(file, now.content or Logged(0))
            file.base, file.attributes = now.base, now.attributes

    def _wait_for_room(self, n_bytes: int, *, own_bytes: int = 0) -> None:
        self._staged.wait_for_room(n_bytes, self.live.staging_wait_s, own_bytes=own_bytes)

    # --- quota -------------------------------------------------------------------------------------------------------

    def _expect_quota(self, file: OpenFile, end: int) -> None:
        """Raise `QuotaError` if the mount has no room for a file to reach an end. For what is not larger than it was
        when it was last acknowledged it always has."""
        draft = file.draft
        now = draft.extent if draft is not None else file.content.size_bytes
        if end > now and end > file.content.size_bytes and not file.has_no_place:
            self._engine.usage.expect_room(end - now)

    def _grow(self, file: OpenFile, draft: Draft, end: int) -> None:
        """Count that a file is going to have bytes up to an end."""
        if end > draft.extent and not file.has_no_place:
            self.charge(file, end)

    def charge(self, file: OpenFile, extent: int | None = None) -> None:
        """Count what a file's draft takes beside what was acknowledged of the file."""
        draft = file.draft
        if draft is not None:
            if extent is not None:
                draft.extent = extent
            draft.charge(0 if file.has_no_place else draft.extent - file.content.size_bytes)

    def take_name(self, file: OpenFile, name: Name = Name.DELETED) -> None:
        """Note that a file has no name any more."""
        file.name = name
        self.charge(file)
