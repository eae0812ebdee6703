"""Listings of folders of this machine: in the byte order of the keys, with links as links.

Used by `store.py`. A listing belongs to one thread.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from datacache.core.errors import ObjectNotFoundError
from datacache.core.paths import stays_inside
from datacache.store.base import ObjectInfo
from datacache.store.errors import from_oserror

_log = logging.getLogger(__name__)
_KIND, _REGULAR = 0o170000, stat.S_IFREG  # inode(7); S_ISREG is a call for each of millions
_NAMED = 5
TEMPORARY = b".datacache-put-"
"""Start of the names of files that are not finished; a listing passes them over."""


@dataclass
class Links:
    """The treatment of links that lead out of a listed folder, and what listings came across."""

    follow: bool = False
    """List what is there as if it were in the folder. Otherwise it is left out."""
    left_out: int = 0
    first: list[str] = field(default_factory=list)
    """The keys of the first that were left out."""
    passed_over: int = 0
    """Sockets, devices, pipes and links that point nowhere: what is no object."""
    first_passed_over: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Forget what the last listing came across, as another one begins."""
        self.left_out = self.passed_over = 0
        self.first, self.first_passed_over = [], []

    def pass_over(self, key: str) -> None:
        """Note something that is no object."""
        self.passed_over += 1
        if len(self.first_passed_over) < _NAMED:
            self.first_passed_over.append(key)

    def leave_out(self, key: str) -> None:
        """Note a link that leads out."""
        self.left_out += 1
        if len(self.first) < _NAMED:
            self.first.append(key)


class _Link(NamedTuple):
    """A link that a listing has come across and takes."""

    place: bytes
    """The path it leads to, without links in it."""
    found: os.stat_result
    target: bytes
    """The target as a link of the snapshot; b'' where it is followed."""


class _Named(NamedTuple):
    """An entry of a folder under the name it sorts by: a folder's has the slash that follows it in its keys."""

    name: bytes
    entry: os.DirEntry[bytes]
    link: _Link | None


class _Folder(NamedTuple):
    """A folder on the way down."""

    prefix: bytes
    """Of the keys of what is in it."""
    identity: tuple[int, int]
    entries: Iterator[_Named]
    place: bytes
    """The place it was found at, if a link that leads out of the listed folder was followed to it; else b''."""


class Walk:
    """One listing: the folders on the way down, and what was passed over."""

    def __init__(self, root: bytes, start_after: bytes, links: Links) -> None:
        self._root, self._links = root, links
        self._place = os.path.realpath(b"/" + root).rstrip(b"/") + b"/"
        self._start_after = start_after

    def entries(self) -> Iterator[ObjectInfo]:
        """Yield everything under the root ('' or ending in '/') in the byte order of the keys."""
        root = self._root
        # A stack, so that depth costs no recursion.
        first = self._scan(root, b"", missing_ok=False)
        stack = [_Folder(root, _identity(b"/" + root), iter(first or ()), b"")]
        above = {stack[0].identity}
        while stack:
            folder = stack[-1]
            prefix = folder.prefix.decode("utf-8", "surrogateescape")
            deeper: _Named | None = None
            for named in folder.entries:
                if named.name[-1:] == b"/":
                    deeper = named
                    break
                info = self._file(prefix, folder, named)
                if info is not None:
                    yield info
            if deeper is None:
                stack.pop()
                above.discard(folder.identity)
                continue
            below = folder.prefix + deeper.name
            if self._is_behind(below):
                continue
            place = folder.place and folder.place + deeper.name
            if deeper.link is not None:
                place = deeper.link.place + b"/"
            identity = _identity(place or b"/" + below)
            if identity in above:
                _log.warning("/%s leads back to a folder above it: not followed", os.fsdecode(below))
                continue
            inside = self._scan(below, place, missing_ok=True)
            if inside:
                stack.append(_Folder(below, identity, iter(inside), place))
                above.add(identity)
            elif inside is not None and below > self._start_after:
                yield ObjectInfo(below.decode("utf-8", "surrogateescape"), 0, 0, "")

    def _scan(self, folder: bytes, place: bytes, *, missing_ok: bool) -> list[_Named] | None:
        """Return a folder's entries in key order, without links that are not taken."""
        try:
            with os.scandir(place or b"/" + folder) as found:
                listed = list(found)
        except FileNotFoundError as exc:
            if missing_ok:  # deleted while we walked
                return None
            raise _no_folder(folder, exc) from exc
        except OSError as exc:
            raise _no_folder(folder, exc) from exc
        entries = []
        for each in listed:
            if each.is_symlink():
                link = self._link(folder, each, followed=bool(place))
                if link is not None:
                    deeper = not link.target and stat.S_ISDIR(link.found.st_mode)
                    entries.append(_Named(each.name + b"/" if deeper else each.name, each, link))
            else:
                name = each.name + b"/" if each.is_dir(follow_symlinks=False) else each.name
                entries.append(_Named(name, each, None))
        entries.sort(key=_name)
        return entries

    def _link(self, folder: bytes, entry: os.DirEntry[bytes], *, followed: bool) -> _Link | None:
        """Return a link as the listing takes it; None where it is passed over."""
        try:
            place, target = os.path.realpath(entry.path), os.readlink(entry.path)
            found = os.stat(place)
        except OSError:  # dangling, round in a circle, or deleted while we walked
            self._links.pass_over(_text(folder + entry.name))
            return None
        inside = (place + b"/").startswith(self._place)
        if inside and not followed:
            path = (folder + entry.name)[len(self._root) :]
            if not stays_inside(path, target):  # absolute, say, or by way of `x/..`
                target = os.path.relpath(place, os.path.realpath(b"/" + folder))
            return _Link(place, found, target)
        if inside or followed or self._links.follow:
            return _Link(place, found, b"")
        self._links.leave_out(_text(folder + entry.name))
        return None

    def _file(self, prefix: str, folder: _Folder, named: _Named) -> ObjectInfo | None:
        name, entry, link = named
        if self._start_after and folder.prefix + name <= self._start_after:
            return None
        try:
            found = link.found if link is not None else entry.stat(follow_symlinks=False)
        except OSError:  # deleted while we walked
            return None
        if name.startswith(TEMPORARY):
            return None
        key = prefix + name.decode("utf-8", "surrogateescape")
        if link is not None and link.target and stat.S_ISDIR(found.st_mode):
            return ObjectInfo(key, 0, found.st_mtime_ns, "", target=link.target.decode("utf-8", "surrogateescape"))
        if found.st_mode & _KIND != _REGULAR:
            self._links.pass_over(key)
            return None
        info = ObjectInfo(key, found.st_size, found.st_mtime_ns, etag_of(found))
        if link is None and not folder.place:
            return info
        target = link.target.decode("utf-8", "surrogateescape") if link is not None else ""
        return info._replace(at=self._at(folder, named), target=target)

    def _at(self, folder: _Folder, named: _Named) -> str:
        """Return the key of the file itself."""
        place = named.link.place if named.link is not None else folder.place + named.name
        if place.startswith(self._place):  # by the name that the listed folder was given
            place = b"/" + self._root + place[len(self._place) :]
        return place[1:].decode("utf-8", "surrogateescape")

    def _is_behind(self, folder: bytes) -> bool:
        """Tell whether all keys under `folder` come before the start."""
        return folder < self._start_after and not self._start_after.startswith(folder)


def etag_of(found: os.stat_result) -> str:
    """Return the ETag of a file by what `stat` says of it."""
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def _name(entry: _Named) -> bytes:
    return entry.name


def _identity(path: bytes) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (-1, -1)
    return (found.st_dev, found.st_ino)


def _no_folder(folder: bytes, exc: OSError) -> Exception:
    shown = os.fsdecode(b"/" + folder)
    if isinstance(exc, NotADirectoryError):
        return ObjectNotFoundError(f"{shown} is a file, not a folder", url=f"file://{shown}")
    if isinstance(exc, FileNotFoundError):
        return ObjectNotFoundError(f"there is no folder {shown}", url=f"file://{shown}")
    return from_oserror(exc, f"file://{shown}")
