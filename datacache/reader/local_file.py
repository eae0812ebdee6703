"""A file of a snapshot as a file of this machine, for programs that want a path: TensorFlow's readers, above all.

Files lie in `<home>/run/files/<pid>-<token>/` under names that end as theirs do, each for as long as its `LocalFile` is
held. How one gets there, the first that works:

1. a hard link to the `file://` object on the same file system, if it is exactly the recorded version;
2. a hard link to the SSD tier's file of the object (those over 4 MiB have one), if all its blocks are there; every byte
   is verified by its checksum first. The link keeps the bytes when the tier evicts the object;
3. a copy of what the cache gives, which fetches what it does not have, some blocks at a time.

Links cost no disk space, except for what was evicted while they are held: that counts as free to the tier and is not.
Copies cost the file's size beside the tiers' budgets. Hold few files at a time.

The files must never be written to: a link is the bucket's file, or the tier's. The tier itself writes into its file
again only where a block of it turned out to be broken, and then the object's own bytes: who reads meanwhile gets either
the broken bytes or the right ones. The owner of a `file://` object may write to it in place at any time; `check` says
whether that happened.

Any thread. A child of `fork()` makes a folder of its own, and never removes its parent's. What killed processes left is
removed by the next one: a folder is in use for as long as somebody has it locked (flock(2)).
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import weakref
from pathlib import Path

from datacache.core import lockfile
from datacache.core.concurrency import PerProcess, gather
from datacache.core.disk import write_all
from datacache.core.errors import CacheError, DatacacheError, StoreError
from datacache.core.ids import BLOCK_BYTES, ObjectRef, block_count
from datacache.daemon import paths
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings
from datacache.store.local.store import LocalStore
from datacache.store.sources import source_rules

_BLOCKS_AT_ONCE = 8
_NAME_BYTES = 200


class LocalFile:
    """A path that is good until it is closed. Closing is idempotent; garbage collection closes, too."""

    def __init__(self, folder: _Folder, name: str, source: ObjectRef | None) -> None:
        """`source`: the object, if this is the bucket's own file."""
        self.path = folder.path / name
        self._folder, self._source = folder, source
        self._remove = weakref.finalize(self, _remove_file, self.path, os.getpid())

    def check(self) -> None:
        """Raise `ObjectChangedError` if the file is a bucket's own and was written to since."""
        if self._source is not None:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                LocalStore().expect_exact(self._source, fd)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Give the path up."""
        self._remove()

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class LocalFiles:
    """Makes local files of a snapshot's files."""

    def __init__(self, snapshot: Snapshot, settings: Settings) -> None:
        self._snapshot, self._settings = snapshot, settings
        self._store = LocalStore(source_rules(settings))
        self._folder: PerProcess[_Folder] = PerProcess(lambda: _Folder(paths.files_dir(settings.home)))

    def open(self, path: str) -> LocalFile:
        """The file at a path of the snapshot. `PathNotFoundError`; else as `open_row`."""
        row = self._snapshot.manifest.find(path.encode("utf-8", "surrogateescape"))
        if row is None:
            self._snapshot.stat(path + "/" if path and not path.endswith("/") else path)  # raises for what is nothing
            raise CacheError(f"{path} is a folder", hint="Only files have a local path.")
        return self.open_row(row)

    def open_row(self, row: int) -> LocalFile:
        """The file of a row of the manifest. Blocks until all of it is on this node. The store's errors where its bytes
        cannot be had; `CacheError` where there is no room for it."""
        entry = self._snapshot.manifest.entry(row)
        ref = self._snapshot.manifest.object_ref(entry)
        try:
            folder = self._folder.get()
            name = folder.new_name(entry.path)
            if self._link_source(ref, folder, name):
                return LocalFile(folder, name, ref)
            if not self._link_tier(row, folder, name):
                self._copy(row, ref.size_bytes, folder.path / name)
            return LocalFile(folder, name, None)
        except DatacacheError:  # some are OSErrors, too
            raise
        except OSError as exc:
            raise CacheError(
                f"{os.fsdecode(entry.path)} cannot be made a local file in {paths.files_dir(self._settings.home)}: "
                f"{exc.strerror or exc}",
                hint="It takes the room of the file where it cannot be linked. Free some, or move DATACACHE_HOME.",
            ) from exc

    def _link_source(self, ref: ObjectRef, folder: _Folder, name: str) -> bool:
        if ref.store != self._store.url or not ref.size_bytes:
            return False
        try:
            fd = self._store.open_exact(ref)
        except StoreError:  # gone or changed; the cache may have it still
            return False
        try:
            if not folder.link(fd, name):
                return False
            self._store.expect_exact(ref, fd)
        except StoreError:
            (folder.path / name).unlink()
            return False
        finally:
            os.close(fd)
        return True

    def _link_tier(self, row: int, folder: _Folder, name: str) -> bool:
        found = self._snapshot.rows.open_object_file(row)
        if found is None:
            return False
        fd = found[1]
        try:
            return folder.link(fd, name)
        finally:
            os.close(fd)

    def _copy(self, row: int, size_bytes: int, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

        def copy(number: int) -> None:
            start = number * BLOCK_BYTES
            write_all(fd, self._snapshot.rows.read_row(row, start, min(start + BLOCK_BYTES, size_bytes)), start)

        try:
            for first in range(0, block_count(size_bytes), _BLOCKS_AT_ONCE):
                last = min(first + _BLOCKS_AT_ONCE, block_count(size_bytes))
                for done in gather(copy, range(first, last)):
                    if done is not None:
                        raise done
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


class _Folder:
    """A process's folder, locked for as long as it or a file of it is held."""

    def __init__(self, parent: Path) -> None:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_leftovers(parent)
        while True:
            self.path = parent / f"{os.getpid()}-{secrets.token_hex(6)}"
            self.path.mkdir(mode=0o700)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if lockfile.take(self._fd, wait=False) and self.path.exists():
                break
            os.close(self._fd)  # somebody took it for a leftover before it was locked
        self._numbers = itertools.count()
        self._remove = weakref.finalize(self, _remove_folder, self.path, self._fd, os.getpid())

    def new_name(self, path: bytes) -> str:
        """A name nobody has, that ends as a file's name does."""
        last = os.fsdecode(path.rpartition(b"/")[2][-_NAME_BYTES:])
        return f"{next(self._numbers):06d}-{last}"

    def link(self, fd: int, name: str) -> bool:
        """Tell whether an open file has this name now, too."""
        try:
            # By its descriptor: its name may be another file's by now. Without dst_dir_fd os.link follows no link.
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=self._fd, follow_symlinks=True)
        except OSError:  # evicted this moment, another file system, one without links, somebody else's file, …
            return False
        return True


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.iterdir():
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if lockfile.take(fd, wait=False):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


def _remove_file(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


def _remove_folder(path: Path, fd: int, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
    os.close(fd)
