"""One file of an export: linked, cloned or copied from wherever its bytes are, and whole before it has its name.

Used by `export`; one `FileMaker` for all of its threads. Where bytes come from, the first that can be had:

1. with `hard`, a hard link to the `file://` object, which *is* the bucket's file: who changes one changes both. Never
   to one of content-addressed storage, which would change under every snapshot that has this content;
2. a clone of the `file://` object (FICLONE, ioctl_ficlone(2)): its own file that shares the blocks on the disk;
3. what is on this node in one piece, verified by its checksum;
4. the kernel's copy of the `file://` object;
5. the cache, which fetches what it does not have.

The tiers' own files are never linked to: most objects lie in regions, at offsets no file system could share, and all
are rewritten and evicted at will.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from datacache.core.disk import write_all
from datacache.core.errors import ExportError, StoreError, UsageError
from datacache.core.ids import BLOCK_BYTES, ObjectRef
from datacache.core.paths import stays_inside
from datacache.manifest.model import Entry
from datacache.reader.export.folder import Folder, local_errors
from datacache.reader.snapshot import Snapshot
from datacache.store.errors import changed
from datacache.store.local.store import LocalStore
from datacache.store.sources import SourceRules

LINKS = ("auto", "hard", "none")
_FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)
_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOCKS_NS = (1, 100, 1_000, 1_000_000, 1_000_000_000, 2_000_000_000)
"""How finely file systems note times: ext4 and XFS, NTFS, some network file systems, …, FAT."""


class StoppedError(Exception):
    """The export was told to stop."""


class FileMaker:
    """Makes files of a snapshot in a folder. Safe from several threads."""

    def __init__(self, snapshot: Snapshot, link: str, rules: SourceRules | None = None) -> None:
        """`rules`: which files of this machine may be read. `UsageError` for another `link` than those there are."""
        if link not in LINKS:
            raise UsageError(f"{link!r} is no way to link", hint=f"There are: {', '.join(LINKS)}.")
        self._snapshot, self._link = snapshot, link
        self._store = LocalStore(rules)
        self._refused: set[tuple[str, int]] = set()  # devices that clones, or links, cannot come from
        self._lock = threading.Lock()  # of the two below
        self.made: Counter[str] = Counter()
        """How many files are `kept`, `cloned`, `linked` and `copied`."""
        self.bytes_done = 0
        self.stop = threading.Event()

    @staticmethod
    def is_there(found: os.stat_result, entry: Entry) -> bool:
        """Tell whether a file of an export of this snapshot is an entry's still: by size and time, as exactly as its
        file system keeps times."""
        if entry.target:
            return stat.S_ISLNK(found.st_mode)
        if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size_bytes:
            return False
        return any(entry.mtime_ns // clock * clock == found.st_mtime_ns for clock in _CLOCKS_NS)

    def make(self, folder: Folder, directory: int, row: int, entry: Entry) -> None:
        """Make the file of a row in a directory of the folder, unless it is there. Raises the errors of reading,
        `ExportError`, `StoppedError`."""
        with local_errors(folder.path / os.fsdecode(entry.path), "the file cannot be written"):
            made = self._make(folder, directory, entry.path.rpartition(b"/")[2], row, entry)
        self._count(made, 0 if made == "copied" else entry.size_bytes)

    def _make(self, folder: Folder, directory: int, name: bytes, row: int, entry: Entry) -> str:
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if self.is_there(found, entry) and (
                not entry.target or os.readlink(name, dir_fd=directory) == entry.target
            ):
                return "kept"
            if not folder.resumed:  # also where a file system does not tell A from a
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        new = folder.new_name()
        try:
            made = self._make_new(folder.state, new, row, entry)
            os.rename(new, name, src_dir_fd=folder.state, dst_dir_fd=directory)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=folder.state)
            raise
        return made

    def _make_new(self, state: int, new: bytes, row: int, entry: Entry) -> str:
        if entry.target:
            if not stays_inside(entry.path, entry.target):
                raise ExportError(f"{os.fsdecode(entry.path)} is a link that leads out of the snapshot: not made")
            os.symlink(entry.target, new, dir_fd=state)
            return "linked"
        ref = self._snapshot.manifest.object_ref(entry)
        source = self._open_source(ref) if ref.store == self._store.url else None
        try:
            # By its descriptor: the path may name another file by now.
            link = partial(os.link, f"/proc/self/fd/{source}", new, dst_dir_fd=state, follow_symlinks=True)
            if source is not None and self._may_link(entry) and self._share("linked", source, ref, link):
                return "linked"
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=state)
            try:
                clone = partial(fcntl.ioctl, fd, _FICLONE, source)
                cloned = source is not None and self._link != "none" and self._share("cloned", source, ref, clone)
                if not cloned:
                    self._copy(fd, source, ref, row)
                if entry.mode:
                    os.fchmod(fd, entry.mode & 0o777 | 0o200)
                os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(fd)  # a network file system may say here that its disk is full
            return "cloned" if cloned else "copied"
        finally:
            if source is not None:
                os.close(source)

    def _open_source(self, ref: ObjectRef) -> int | None:
        """Open the object's file; None where it is gone or another one by now: the cache may still have its bytes."""
        try:
            return self._store.open_exact(ref)
        except StoreError:
            return None

    def _may_link(self, entry: Entry) -> bool:
        return self._link == "hard" and not self._snapshot.manifest.root.sources[entry.source].content_addressed

    def _share(self, how: str, source: int, ref: ObjectRef, share: Callable[[], object]) -> bool:
        """Have the file linked or cloned from the object's; tell whether the file systems can do that."""
        device = how, os.fstat(source).st_dev
        if device in self._refused:
            return False
        try:
            share()
        except OSError as exc:
            if exc.errno in _ROOM:
                raise
            if how == "cloned" or exc.errno == errno.EXDEV:  # else it is a file of somebody else's, has too many links
                self._refused.add(device)
            return False
        self._store.expect_exact(ref, source)
        return True

    def _copy(self, fd: int, source: int | None, ref: ObjectRef, row: int) -> None:
        size = ref.size_bytes
        here = self._snapshot.rows.read_local(row, 0, min(size, BLOCK_BYTES))
        if here is None and source is not None and self._kernel_copy(source, ref, fd):
            return
        if here is not None and size <= BLOCK_BYTES:
            self._write(fd, here, 0)
            return
        del here  # it keeps a region's disk space
        for start in range(0, size, BLOCK_BYTES):
            data = self._snapshot.rows.read_row(row, start, min(start + BLOCK_BYTES, size))
            self._write(fd, data, start)

    def _kernel_copy(self, source: int, ref: ObjectRef, fd: int) -> bool:
        """Tell whether the kernel copied all of it. What it left is written over."""
        at = 0
        try:
            while at < ref.size_bytes:
                copied = os.copy_file_range(source, fd, min(ref.size_bytes - at, 16 * BLOCK_BYTES), at, at)
                if not copied:
                    raise changed(ref, "it is shorter now")
                at += copied
                self._count(None, copied)
        except StoreError:
            raise
        except OSError as exc:
            if exc.errno in _ROOM:
                raise
            self._count(None, -at)
            return False
        self._store.expect_exact(ref, source)
        return True

    def _write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        write_all(fd, data, offset)
        self._count(None, len(data))

    def _count(self, made: str | None, size_bytes: int) -> None:
        if self.stop.is_set():
            raise StoppedError
        with self._lock:
            self.bytes_done += size_bytes
            if made is not None:
                self.made[made] += 1
