"""The folder an export is written into: found to be fit, kept from others, and never left by way of a link.

Used by `export`. All below the folder is reached through descriptors of its directories, opened one component at a
time and without following links (`openat` with O_NOFOLLOW), so neither a path of the snapshot nor a link that lies
there leads out of it. While the export is unfinished, `.datacache-export` in the folder says of which snapshot it is
and holds the files being written; at the end only a small file, `.datacache-exported`, is left of it. A folder that
holds anything is taken only if one of both names this very snapshot: sizes and times do not tell two versions of a
file apart. Safe from several threads, but for `open` and `finish`.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from datacache.core import lockfile
from datacache.core.errors import DatacacheError, ExportError, UsageError
from datacache.manifest.model import Entry
from datacache.manifest.view import Tree

_STATE = b".datacache-export"
_SNAPSHOT = b"snapshot"
_DONE = b".datacache-exported"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
IsThere = Callable[[os.stat_result, Entry], bool]
"""Whether a file is what the export makes of an entry."""


class _Names(NamedTuple):
    """What the export calls its own in the folder."""

    state: bytes
    done: bytes

    @classmethod
    def free_in(cls, tree: Tree) -> _Names:
        """Names that the snapshot does not have; it may, as somebody's snapshot of an export."""
        more = b""
        while any(tree.child(b"", name + more) is not None for name in (_STATE, _DONE)):
            more += b"~"
        return cls(_STATE + more, _DONE + more)


class Folder:
    """An open folder that is being exported into."""

    def __init__(self, path: Path, root: int, state: int, names: _Names, *, resumed: bool) -> None:
        self.path = path
        self.root = root
        self.resumed = resumed
        """Whether an unfinished export goes on: what differs from the snapshot is its own and may be replaced."""
        self._state, self._names = state, names
        self._numbers = itertools.count()

    @classmethod
    def open(cls, path: Path, tree: Tree, ref: str, is_there: IsThere) -> Folder:
        """Make or take a folder. `UsageError` if it holds what is not of this snapshot, `ExportError` if it cannot be
        written, or is written by another export at the moment."""
        with local_errors(path, "the folder cannot be made"):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as exc:
                raise UsageError(f"{path} is no folder") from exc
            root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return cls._take(path, root, tree, ref, is_there)
        except BaseException:
            os.close(root)
            raise

    @classmethod
    def _take(cls, path: Path, root: int, tree: Tree, ref: str, is_there: IsThere) -> Folder:
        names = _Names.free_in(tree)
        skip = {names.state, names.done, b"lost+found"}
        with local_errors(path, "the folder cannot be read"):
            notes = unfinished, finished = _unfinished(root, names.state), _read_note(root, names.done)
            of = unfinished or finished
            if of is None:
                for found in _names_in(root, skip):
                    raise UsageError(
                        f"{path} holds {os.fsdecode(found)!r} and is not an export of {ref}",
                        hint="Export into a folder that is empty or not there yet, or into an export of this snapshot.",
                    )
            elif of.rpartition("@")[2] != ref.rpartition("@")[2]:
                finish = f"finish this one (dsctl export {of} {path}), or " if unfinished else ""
                raise UsageError(
                    f"{path} holds an {'unfinished ' if unfinished else ''}export of {of}, not of {ref}",
                    hint=f"Remove it, {finish}export into another folder.",
                )
            for problem in _Survey(tree, is_there, skip, resumed=unfinished is not None).differences(root, b""):
                raise UsageError(
                    f"{path} holds {problem} that {ref} does not have",
                    hint="Remove it, or export into another folder.",
                )
        with local_errors(path, "the folder cannot be written"):
            with suppress(FileExistsError):
                os.mkdir(names.state, 0o700, dir_fd=root)
            state = os.open(names.state, _DIRECTORY, dir_fd=root)
            try:
                _lock(state, path)
                if (_unfinished(root, names.state), _read_note(root, names.done)) != notes:
                    raise ExportError(f"another export into {path} has just ended", hint="Run this one again.")
                with os.scandir(state) as left_over:
                    for entry in left_over:
                        if os.fsencode(entry.name) != _SNAPSHOT:
                            os.unlink(entry.name, dir_fd=state)
                if unfinished is None:
                    _write_note(state, ref)
            except BaseException:
                os.close(state)
                raise
        return cls(path, root, state, names, resumed=unfinished is not None)

    def directory(self, path: bytes) -> int:
        """A descriptor of a directory ('' or ending with '/'), which is made if it is not there. Close it."""
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
        where = os.fsdecode(path)
        raise ExportError(
            f"{self.path / where}: there is a link or a file where the snapshot has a folder",
            hint="Remove it, or export into another folder.",
        )

    def new_name(self) -> bytes:
        """A name in `state` for a file that is still to be made, and then moved where it belongs."""
        return str(next(self._numbers)).encode()

    @property
    def state(self) -> int:
        """The directory that new files are made in."""
        return self._state

    def finish(self, *, complete: bool) -> None:
        """Close it; when complete, with nothing left but the files and the note of which snapshot they are."""
        if complete:
            with local_errors(self.path, "the folder cannot be written"):
                os.rename(_SNAPSHOT, self._names.done, src_dir_fd=self._state, dst_dir_fd=self.root)
                os.rmdir(self._names.state, dir_fd=self.root)
        os.close(self._state)
        os.close(self.root)


@contextmanager
def local_errors(path: Path | str, what: str) -> Iterator[None]:
    """Failures of the file system that is written to, as errors that say what to do."""
    try:
        yield
    except DatacacheError:  # some are OSErrors, too
        raise
    except OSError as exc:
        raise local_error(exc, path, what) from exc


def local_error(exc: OSError, path: Path | str, what: str) -> ExportError:
    """The error for a failed system call in the folder."""
    said = os.strerror(exc.errno) if exc.errno else str(exc)
    hint = ""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Make room there and run it again, which goes on where it stopped; or export to a larger disk."
    elif exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "Check who may write there, or export into another folder."
    elif exc.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
        hint = "The file system there cannot have this name; export to another one."
    elif exc.errno == errno.EEXIST:
        hint = "Something else wrote it, or the file system does not tell upper from lower case; export to another one."
    return ExportError(f"{path}: {what}: {said}", hint=hint)


def _unfinished(root: int, name: bytes) -> str | None:
    """The snapshot whose export stopped here."""
    try:
        state = os.open(name, _DIRECTORY, dir_fd=root)
    except FileNotFoundError:
        return None
    try:
        return _read_note(state, _SNAPSHOT)  # None: killed before it was written, and nothing else was
    finally:
        os.close(state)


def _read_note(directory: int, name: bytes) -> str | None:
    """The snapshot that a note names."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        with os.fdopen(fd, "rb") as file:
            return str(json.loads(file.read())["ref"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _write_note(state: int, ref: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(b"new", flags, 0o666, dir_fd=state), "wb") as file:
        file.write(json.dumps({"ref": ref}).encode() + b"\n")
    os.rename(b"new", _SNAPSHOT, src_dir_fd=state, dst_dir_fd=state)


def _names_in(directory: int, skip: set[bytes]) -> list[bytes]:
    with os.scandir(directory) as found:
        return sorted({os.fsencode(entry.name) for entry in found} - skip)


def _lock(state: int, path: Path) -> None:
    """Keep others out, for as long as the descriptor is open."""
    try:
        if lockfile.take(state, wait=False):
            return
    except OSError:  # a file system without locks
        return
    raise ExportError(f"another export into {path} is under way", hint="Wait for it, or end it.")


class _Survey:
    """A look at what is in a folder already."""

    def __init__(self, tree: Tree, is_there: IsThere, skip: set[bytes], *, resumed: bool) -> None:
        self._tree, self._is_there, self._skip, self._resumed = tree, is_there, skip, resumed

    def differences(self, directory: int, prefix: bytes) -> Iterator[str]:
        """What is not of the snapshot, in words; where an export goes on, its files may differ."""
        with os.scandir(directory) as found:
            entries = sorted(((os.fsencode(entry.name), entry) for entry in found), key=lambda pair: pair[0])
        for name, entry in entries:
            if not prefix and name in self._skip:
                continue
            child = self._tree.child(prefix, name)
            if entry.is_dir(follow_symlinks=False) and child is not None and child.is_dir:
                below = os.open(name, _DIRECTORY, dir_fd=directory)
                try:
                    yield from self.differences(below, prefix + name + b"/")
                finally:
                    os.close(below)
            elif child is not None and child.is_link and entry.is_symlink():
                if os.readlink(name, dir_fd=directory) != self._tree.entry(child.row).target:
                    yield f"a link {os.fsdecode(prefix + name)!r} to another place"
            elif not entry.is_file(follow_symlinks=False) or child is None or child.is_dir or child.is_link:
                kind = "folder" if entry.is_dir(follow_symlinks=False) else "file"
                yield f"a {'link' if entry.is_symlink() else kind} {os.fsdecode(prefix + name)!r}"
            elif not self._resumed and not self._is_there(
                entry.stat(follow_symlinks=False), self._tree.entry(child.row)
            ):
                yield f"a file {os.fsdecode(prefix + name)!r} of another size or time"
