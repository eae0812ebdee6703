"""The folder an export is written into: found to be fit, kept from others, and never left by way of a link.

Used by `export`. All below the folder is reached through descriptors of its directories, opened one component at a
time and without following links (`openat` with O_NOFOLLOW), so neither a path of the snapshot nor a link that lies
there leads out of it. While the export is unfinished, `.datacache-export` in the folder says of which snapshot it is
and holds the files being written; at the end only a small file, `.datacache-exported`, is left of it. A folder that
holds anything is taken only if one of both names this very snapshot: sizes and times do not tell two versions of a
file apart. Safe from several threads once it is made, but for
`finish`.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from datacache.core import lockfile
from datacache.core.errors import DatacacheError, ExportError, UsageError
from datacache.manifest.model import Entry
from datacache.manifest.view import Tree

_STATE = b".datacache-export"
_SNAPSHOT = b"snapshot"
_DONE = b".datacache-exported"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HINTS = {
    "Make room there and run it again, which goes on where it stopped; or export to a larger disk.": (
        errno.ENOSPC,
        errno.EDQUOT,
    ),
    "Check who may write there, or export into another folder.": (errno.EACCES, errno.EPERM, errno.EROFS),
    "The file system there cannot have this name; export to another one.": (
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.EILSEQ,
    ),
    "Something else wrote it, or the file system does not tell upper from lower case; export to another one.": (
        errno.EEXIST,
    ),
}


class Folder:
    """An open folder that is being exported into."""

    def __init__(self, path: Path, tree: Tree, ref: str, is_there: Callable[[os.stat_result, Entry], bool]) -> None:
        """Make or take a folder. `is_there` tells whether a file is what the export makes of an entry.

        `UsageError` if it holds what is not of this snapshot, `ExportError` if it cannot be written, or is written by
        another export at the moment."""
        self.path, self._tree, self._is_there = path, tree, is_there
        self.resumed = False
        """True if an unfinished export goes on: files that differ from the snapshot are its own and may be replaced."""
        self._numbers = itertools.count()
        more = b""  # names that the snapshot does not have; it may, as somebody's snapshot of an export
        while any(tree.child(b"", name + more) is not None for name in (_STATE, _DONE)):
            more += b"~"
        self._state_name, self._done_name = _STATE + more, _DONE + more
        with local_errors(path, "the folder cannot be made"):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as exc:
                raise UsageError(f"{path} is no folder") from exc
            self.root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with local_errors(path, "the folder cannot be read"):
                notes = self._check(ref)
            with local_errors(path, "the folder cannot be written"):
                self.state = self._take(ref, notes)
                """The directory that new files are made in."""
        except BaseException:
            os.close(self.root)
            raise

    def _check(self, ref: str) -> tuple[str | None, str | None]:
        """Expect nothing that is not of the snapshot. Return of which one an unfinished, and a finished, export is."""
        skip = {self._state_name, self._done_name, b"lost+found"}
        unfinished, finished = notes = self._notes()
        self.resumed = unfinished is not None
        of = unfinished or finished
        if of is None:
            with os.scandir(self.root) as entries:
                for found in sorted({os.fsencode(entry.name) for entry in entries} - skip):
                    raise UsageError(
                        f"{self.path} holds {os.fsdecode(found)!r} and is not an export of {ref}",
                        hint="Export into a folder that is empty or not there yet, or into an export of this snapshot.",
                    )
        elif of.rpartition("@")[2] != ref.rpartition("@")[2]:
            finish = f"finish this one (dsctl export {of} {self.path}), or " if unfinished else ""
            raise UsageError(
                f"{self.path} holds an {'unfinished ' if unfinished else ''}export of {of}, not of {ref}",
                hint=f"Remove it, {finish}export into another folder.",
            )
        for problem in self._differences(self.root, b"", skip):
            raise UsageError(
                f"{self.path} holds {problem} that {ref} does not have",
                hint="Remove it, or export into another folder.",
            )
        return notes

    def _take(self, ref: str, notes: tuple[str | None, str | None]) -> int:
        with suppress(FileExistsError):
            os.mkdir(self._state_name, 0o700, dir_fd=self.root)
        state = os.open(self._state_name, _DIRECTORY, dir_fd=self.root)
        try:
            _lock(state, self.path)
            if self._notes() != notes:
                raise ExportError(f"another export into {self.path} has just ended", hint="Run this one again.")
            with os.scandir(state) as left_over:
                for entry in left_over:
                    if os.fsencode(entry.name) != _SNAPSHOT:
                        os.unlink(entry.name, dir_fd=state)
            if not self.resumed:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(b"new", flags, 0o666, dir_fd=state), "wb") as file:
                    file.write(json.dumps({"ref": ref}).encode() + b"\n")
                os.rename(b"new", _SNAPSHOT, src_dir_fd=state, dst_dir_fd=state)
        except BaseException:
            os.close(state)
            raise
        return state

    def _notes(self) -> tuple[str | None, str | None]:
        """Return the snapshot whose export stopped here, and the one whose export is finished."""
        unfinished = None
        with suppress(FileNotFoundError):
            state = os.open(self._state_name, _DIRECTORY, dir_fd=self.root)
            try:
                unfinished = _read_note(state, _SNAPSHOT)  # None: killed before it was written, and nothing else was
            finally:
                os.close(state)
        return unfinished, _read_note(self.root, self._done_name)

    def _differences(self, directory: int, prefix: bytes, skip: set[bytes]) -> Iterator[str]:
        """Yield what is there and not of the snapshot, in words; where an export goes on, its files may differ."""
        with os.scandir(directory) as found:
            entries = sorted(((os.fsencode(entry.name), entry) for entry in found), key=lambda pair: pair[0])
        for name, entry in entries:
            if not prefix and name in skip:
                continue
            child = self._tree.child(prefix, name)
            if entry.is_dir(follow_symlinks=False) and child is not None and child.is_dir:
                below = os.open(name, _DIRECTORY, dir_fd=directory)
                try:
                    yield from self._differences(below, prefix + name + b"/", skip)
                finally:
                    os.close(below)
            elif child is not None and child.is_link and entry.is_symlink():
                if os.readlink(name, dir_fd=directory) != self._tree.entry(child.row).target:
                    yield f"a link {os.fsdecode(prefix + name)!r} to another place"
            elif not entry.is_file(follow_symlinks=False) or child is None or child.is_dir or child.is_link:
                kind = "folder" if entry.is_dir(follow_symlinks=False) else "file"
                yield f"a {'link' if entry.is_symlink() else kind} {os.fsdecode(prefix + name)!r}"
            elif not self.resumed and not self._is_there(
                entry.stat(follow_symlinks=False), self._tree.entry(child.row)
            ):
                yield f"a file {os.fsdecode(prefix + name)!r} of another size or time"

    def directory(self, path: bytes) -> int:
        """Return a descriptor of a directory ('' or ending with '/'), which is made if it is not there. Close it."""
        fd = os.dup(self.root)
        for name in path.split(b"/")[:-1]:
            above = fd
            try:
                fd = self._step(above, name, path)
            finally:
                os.close(above)
        return fd

    def _step(self, above: int, name: bytes, path: bytes) -> int:
        for _ in range(3):
            try:
                return os.open(name, _DIRECTORY, dir_fd=above)
            except FileNotFoundError:
                with suppress(FileExistsError):  # another thread made it
                    os.mkdir(name, 0o777, dir_fd=above)
            except OSError as exc:
                if exc.errno in (errno.ELOOP, errno.ENOTDIR):
                    break
                raise
        raise ExportError(
            f"{self.path / os.fsdecode(path)}: there is a link or a file where the snapshot has a folder",
            hint="Remove it, or export into another folder.",
        )

    def new_name(self) -> bytes:
        """Return a name in `state` for a file that is still to be made, and then moved where it belongs."""
        return str(next(self._numbers)).encode()

    def finish(self, *, complete: bool) -> None:
        """Close it; when complete, with nothing left but the files and the note of which snapshot they are."""
        if complete:
            with local_errors(self.path, "the folder cannot be written"):
                os.rename(_SNAPSHOT, self._done_name, src_dir_fd=self.state, dst_dir_fd=self.root)
                os.rmdir(self._state_name, dir_fd=self.root)
        os.close(self.state)
        os.close(self.root)


@contextmanager
def local_errors(path: Path | str, what: str) -> Iterator[None]:
    """Turn failures of the file system that is written to into errors that say what to do."""
    try:
        yield
    except DatacacheError:  # some are OSErrors, too
        raise
    except OSError as exc:
        said = os.strerror(exc.errno) if exc.errno else str(exc)
        hint = next((hint for hint, codes in _HINTS.items() if exc.errno in codes), "")
        raise ExportError(f"{path}: {what}: {said}", hint=hint) from exc


def _read_note(directory: int, name: bytes) -> str | None:
    """Return the snapshot that a note names."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        with os.fdopen(fd, "rb") as file:
            return str(json.loads(file.read())["ref"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _lock(state: int, path: Path) -> None:
    """Keep others out, for as long as the descriptor is open."""
    try:
        if lockfile.take(state, wait=False):
            return
    except OSError:  # a file system without locks
        return
    raise ExportError(f"another export into {path} is under way", hint="Wait for it, or end it.")
