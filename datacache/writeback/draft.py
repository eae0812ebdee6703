"""A file that is being written: its bytes from the first change until the last writer closes it.

Used by `fuse_mount/bucket/fs`; calls for one draft are made one at a time by its owner, except `read`. Small
files are kept in memory and go into the journal, which takes one sync; larger ones lie in a staged file, and so do
small ones while very many are open. A draft that starts from nothing (a new file, or one that was truncated to nothing)
never touches what was acknowledged before: that stays in the overlay until the draft is settled. One that continues a
staged file changes it in place, as a local file system does.
"""

from __future__ import annotations

import errno
import io
import os

from datacache.core.disk import (
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    FALLOC_ZERO_RANGE,
    allocate,
    begin_writing,
    copy_range,
    write_all,
    write_zeros,
)
from datacache.core.errors import StagingError
from datacache.writeback.engine import WriteBack
from datacache.writeback.model import Attributes, Content, Staged, logged
from datacache.writeback.state_log import SLOT_BYTES, Slot

INLINE_BYTES = SLOT_BYTES
"""Files up to this size go into the journal."""
_WRITTEN_AT_A_TIME = 16 * 2**20
"""Bytes by which a file grows until the disk is told to begin with them."""


class Draft:
    """One file being written. `attributes` are its own while it lives."""

    __slots__ = (
        "_broken",
        "_engine",
        "_file",
        "_number",
        "_slot",
        "_spilled",
        "attributes",
        "changes",
        "charged",
        "extent",
        "settled_changes",
        "size",
        "unsettled_bytes",
    )

    def __init__(self, engine: WriteBack, attributes: Attributes, slot: Slot | None, size: int = 0) -> None:
        """`slot` has the first `size` bytes; None: they are elsewhere."""
        self._engine = engine
        self.attributes = attributes
        self._slot = slot
        self._spilled: Slot | None = None
        self._broken: StagingError | None = None
        # A thread that reads it keeps it open, so that its descriptor is not another file's meanwhile.
        self._file: io.FileIO | None = None
        self._number = -1
        self.size = size
        """Bytes it has now."""
        self.changes = 0
        """How often it was changed."""
        self.settled_changes = 0
        """How many of these changes are durable and in the overlay."""
        self.unsettled_bytes = 0
        """Bytes that were written since it was last settled."""
        self.extent = 0
        """Bytes that it has when the writes that are under way have ended."""
        self.charged = 0
        """Bytes that it counts for beside what was acknowledged; negative where it is smaller."""

    @staticmethod
    def of_bytes(engine: WriteBack, attributes: Attributes, data: bytes = b"") -> Draft:
        """Return a draft that begins with these bytes, few as they are."""
        draft = Draft(engine, attributes, engine.kept.slots.take())
        try:
            draft.write(0, data)
        except BaseException:
            draft.close()
            raise
        draft.let_go_of_spilled()  # of which nobody was told
        return draft

    @staticmethod
    def of_staged(engine: WriteBack, attributes: Attributes, number: int) -> Draft:
        """Return a draft that continues a staged file in place."""
        draft = Draft(engine, attributes, None)
        draft._number = number
        draft._file = io.FileIO(engine.hold(number), "r+b")
        draft.size = os.fstat(draft._file.fileno()).st_size
        return draft

    @property
    def dirty(self) -> bool:
        """Return whether something was changed since it was settled."""
        return self.changes != self.settled_changes

    def note_change(self) -> None:
        """Count a change that is about to be made, or was. The kernel says when that was: it keeps the time of what it
        gathers, sends it if it is another one, and believes its own as long as it knows the inode."""
        self.changes += 1

    def charge(self, n_bytes: int) -> None:
        """Count so many bytes beside what was acknowledged."""
        self._engine.usage.draft_bytes += n_bytes - self.charged
        self.charged = n_bytes

    def content(self) -> Content:
        """Return what `Pending` is to say of the bytes as they are now."""
        return logged(self.size) if self._slot is not None else Staged(self._number, self.size)

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes from an offset on, up to the end."""
        slot, file = self._slot, self._file
        if slot is not None or file is None:
            return bytes(slot.memory[offset : min(offset + size, self.size)]) if slot is not None else b""
        parts = []
        while size > 0 and (part := os.pread(file.fileno(), size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def file(self) -> io.FileIO | None:
        """Return the staged file, which who reads it keeps open; None of a draft in memory."""
        return self._file

    def in_memory(self, end: int) -> bool:
        """Return whether a write up to this offset stays in memory."""
        return self._slot is not None and end <= self._engine.kept.slots.inline_bytes

    def write(self, offset: int, data: bytes) -> None:
        """Write at an offset; a gap before it reads as zeros. `OSError` of a full disk leaves the rest unwritten."""
        end = offset + len(data)
        if self._slot is not None and not self.in_memory(end):
            self._spill()
        if self._slot is not None:
            self._extend(offset)
            self._slot.memory[offset:end] = data
        else:
            if offset < self.size:
                self._engine.tear(self._number, offset)
            try:
                write_all(self._fd(), data, offset)
            finally:
                self._engine.files.note_written(self._number, offset, end)
            if end > self.size:
                self._engine.files.grow(self._number, end - self.size)
                if end // _WRITTEN_AT_A_TIME > self.size // _WRITTEN_AT_A_TIME:
                    begin_writing(self._fd())  # what is left to be synced at the end is little
        self.size = max(self.size, end)

    def truncate(self, size: int) -> None:
        """Cut off, or extend with zeros."""
        if self._slot is not None and not self.in_memory(size):
            self._spill()
        if self._slot is not None:
            self._extend(size)
        else:
            if size < self.size:
                self._engine.tear(self._number, size)
            os.ftruncate(self._fd(), size)
            if size < self.size:
                self._engine.files.note_written(self._number, size, self.size)
                self._engine.files.grow(self._number, size - self.size)
        self.size = size

    def allocate(self, mode: int, offset: int, size: int) -> None:
        """Do as fallocate(2): with 0 extend with zeros for which a staged file has room, with `FALLOC_PUNCH_HOLE` or
        `FALLOC_ZERO_RANGE` put zeros into a range. Beyond the end, `FALLOC_KEEP_SIZE` allocates nothing."""
        end = min(offset + size, self.size) if mode & FALLOC_KEEP_SIZE else offset + size
        clears = bool(mode & (FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE)) and offset < self.size
        if end <= offset or not (clears or end > self.size):
            return
        if self._slot is not None and not self.in_memory(end):
            self._spill()
        if self._slot is not None:
            self._extend(end)
            if clears:
                self._slot.memory[offset:end] = bytes(end - offset)
        else:
            if clears:
                self._engine.tear(self._number, offset)
            try:
                self._allocate_in_file(mode, offset, end, zeros_from=offset if clears else self.size)
            finally:
                self._engine.files.note_written(self._number, offset, end)
            if end > self.size:
                self._engine.files.grow(self._number, end - self.size)
        self.size = max(self.size, end)

    def _extend(self, end: int) -> None:
        """Have zeros in memory up to this offset."""
        if self._slot is not None and end > self.size:
            self._slot.memory[self.size : end] = bytes(end - self.size)

    def _allocate_in_file(self, mode: int, offset: int, end: int, *, zeros_from: int) -> None:
        fd = self._fd()
        try:
            try:
                allocate(fd, mode, offset, end - offset)
            except OSError as exc:
                if exc.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                write_zeros(fd, zeros_from, end)
        except OSError:  # a disk that fills up has extended it by some of the zeros
            os.ftruncate(fd, self.size)
            raise

    def copy(self, offset: int, source: io.FileIO, start: int, size: int) -> int:
        """Write bytes of a file at an offset, into a staged file; return how many. Fewer where that file ends."""
        if self._slot is not None:
            self._spill()
        if offset < self.size:
            self._engine.tear(self._number, offset)
        copied = copy_range(source.fileno(), start, self._fd(), offset, size)
        end = offset + copied
        self._engine.files.note_written(self._number, offset, end)
        if copied and end > self.size:
            self._engine.files.grow(self._number, end - self.size)
            self.size = end
        return copied

    def empty(self) -> None:
        """Begin anew with nothing: what was acknowledged stays as it is until this is settled."""
        self._let_go()
        self._slot = self._engine.kept.slots.take()
        self._broken = None
        self.size = 0

    def sync(self) -> None:
        """Bring the bytes of a staged file to the disk. May take long. After an error it raises that for ever: the
        kernel has thrown away what it could not write, and a second try would find nothing left to do (fsync(2))."""
        if self._slot is not None:
            return
        if self._broken is not None:
            raise self._broken
        try:
            self._engine.files.sync(self._fd(), self._number)
        except StagingError as exc:
            self._broken = exc
            raise

    @property
    def slot(self) -> Slot | None:
        """Return the memory that has the bytes; None for a staged file."""
        return self._slot

    def blob(self) -> memoryview | None:
        """Return the bytes for the journal, of a draft in memory."""
        return self._slot.memory[: self.size] if self._slot is not None else None

    def close(self) -> None:
        """Let go of the bytes. What nothing in the overlay refers to is deleted."""
        self.charge(0)
        self._let_go()

    def _spill(self) -> None:
        if self._slot is None:
            raise StagingError("this draft lies in a file already")
        number = self._engine.files.create()
        self._file = io.FileIO(self._engine.hold(number), "r+b")
        self._number = number
        try:
            write_all(self._fd(), self._slot.memory[: self.size], 0)
        except OSError:
            self._let_go_of_file()
            raise
        self._engine.files.grow(number, self.size)
        self._spilled, self._slot = self._slot, None

    def _fd(self) -> int:
        if self._file is None:
            raise StagingError("this draft lies in no file")
        return self._file.fileno()

    def let_go_of_spilled(self) -> None:
        """Let go of memory whose bytes are in a staged file by now. Under the engine's lock, in the section in which
        its successor is told so: it would take others' bytes for these."""
        slot, self._spilled = self._spilled, None
        if slot is not None:
            self._engine.free_slot(slot)

    def _let_go(self) -> None:
        self._let_go_of_file()
        self.let_go_of_spilled()
        slot, self._slot = self._slot, None
        if slot is not None:
            self._engine.free_slot(slot)

    def _let_go_of_file(self) -> None:
        if self._file is not None:
            self._engine.free(self._number)
        self._file, self._number = None, -1
