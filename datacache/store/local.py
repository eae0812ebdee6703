"""`file://`: folders of this machine (disks, NFS, CephFS) as an object store, with the kernel's own exact
names.

A file's ETag is made of inode, modification time in ns and size: a file that is replaced or written to has
another one. (What changes bytes and puts all three back goes unseen, as it does for rsync and make.) Names
are bytes to Linux; keys carry them as str with `surrogateescape`. Any thread, and after `fork()`: there is
no state.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO

from datacache.core.errors import ObjectNotFoundError, StoreError, StoreUnavailableError
from datacache.core.objects import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.errors import changed, expect_same, from_oserror

_log = logging.getLogger(__name__)
_PAGE_KEYS = 1000
_KIND, _REGULAR = 0o170000, stat.S_IFREG  # inode(7); S_ISREG is a call for each of millions
_COPY_BYTES = 4 * 2**20
TEMPORARY = ".datacache-put-"
"""Start of the names of files that are not finished; a listing passes them over."""
_TEMPORARY = TEMPORARY.encode()


class LocalStore:
    """The file system from its root down: the key of `/data/a.jpg` is `data/a.jpg`."""

    url = "file://"
    node_wide = True
    sorted_listing = True

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """Walk one folder in byte order, following links to files and folders.

        A folder that cannot be read is a `StoreAccessError` that names it: a snapshot without it would lack
        files in silence. Sockets, devices, pipes and dangling links are no objects; how many were passed
        over is logged. A link to a folder above itself ends there.
        """
        root = prefix.encode("utf-8", "surrogateescape")
        if _exact_path(prefix.rstrip("/")) is None and root:
            raise ObjectNotFoundError(f"file:///{prefix} is no folder's name", url=f"file:///{prefix}")
        walk = _Walk(start_after.encode("utf-8", "surrogateescape"))
        page: list[ObjectInfo] = []
        for info in walk.entries(root):
            page.append(info)
            if len(page) == _PAGE_KEYS:
                yield page
                page = []
        if page:
            yield page
        if walk.skipped:
            _log.warning("%d entries under /%s are no files or folders, or point nowhere", walk.skipped, prefix)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`. A key with a trailing slash is a folder."""
        path = self._path(key)
        try:
            found = os.stat(path)
        except OSError as exc:
            raise from_oserror(exc, f"{self.url}/{key}") from exc
        if key.endswith("/") and stat.S_ISDIR(found.st_mode):
            return ObjectInfo(key, 0, found.st_mtime_ns, "")
        if key.endswith("/") or not stat.S_ISREG(found.st_mode):
            raise ObjectNotFoundError(f"{self.url}/{key} is no regular file", url=f"{self.url}/{key}")
        return ObjectInfo(key, found.st_size, found.st_mtime_ns, etag_of(found))

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes:
        """See `ObjectStore`. The file is looked at before and after, so a file being rewritten is noticed."""
        if start >= stop:
            return b""
        fd = self.open_exact(ref)
        try:
            data = _pread(fd, start, stop - start)
            self.expect_exact(ref, fd)
        except StoreError:
            raise
        except OSError as exc:
            raise from_oserror(exc, ref.url) from exc
        finally:
            os.close(fd)
        if len(data) != stop - start:
            raise StoreUnavailableError(f"{ref.url}: the file gave {len(data)} of {stop - start} bytes", url=ref.url)
        return data

    def open_exact(self, ref: ObjectRef) -> int:
        """A descriptor of the recorded file, for reading. `ObjectChangedError` and the errors of `read`.

        What is read from it is the recorded object if `expect_exact` says so afterwards."""
        path = self._path(ref.key)
        try:
            # O_NONBLOCK: the open of a pipe that took the file's name would wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as exc:
            raise from_oserror(exc, ref.url) from exc
        try:
            self.expect_exact(ref, fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def expect_exact(self, ref: ObjectRef, fd: int) -> None:
        """Raise `ObjectChangedError` if a file is not, or no longer, the recorded one."""
        _expect_same(ref, os.fstat(fd))

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore`. Atomic and durable: written beside, `fsync`ed, renamed. Folders are made as
        needed."""
        if not key.endswith("/"):
            return self._put(key, lambda file: file.write(data))
        try:
            if data:
                raise StoreError(f"{self.url}/{key} is a folder and holds no bytes", url=f"{self.url}/{key}")
            os.makedirs(self._path(key), exist_ok=True)
        except StoreError:
            raise
        except OSError as exc:
            raise from_oserror(exc, f"{self.url}/{key}") from exc
        return self.head(key)

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        """See `ObjectStore`. Atomic and durable like `put`."""

        try:
            source = path.open("rb")
        except OSError as exc:
            raise from_oserror(exc, str(path)) from exc
        with source:
            return self._put(key, lambda file: copyfileobj(source, file, _COPY_BYTES))

    def take_file(self, key: str, path: Path) -> ObjectInfo:
        """Make a file that lies in the same folder the object of this key: like `put_file`, without a copy."""
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                found = os.fstat(file.fileno())
            os.replace(path, self._path(key))
        except OSError as exc:
            raise from_oserror(exc, f"{self.url}/{key}") from exc
        return ObjectInfo(key, found.st_size, found.st_mtime_ns, etag_of(found))

    def _put(self, key: str, fill: Callable[[BinaryIO], object]) -> ObjectInfo:
        path = self._path(key)
        try:
            folder = os.path.dirname(path)
            os.makedirs(folder, exist_ok=True)
            beside = os.path.join(folder, _TEMPORARY + secrets.token_hex(8).encode())
            try:
                with open(beside, "xb") as file:
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                    found = os.fstat(file.fileno())
                os.replace(beside, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(beside)
                raise
        except StoreError:
            raise
        except OSError as exc:
            raise from_oserror(exc, f"{self.url}/{key}") from exc
        return ObjectInfo(key, found.st_size, found.st_mtime_ns, etag_of(found))

    def delete(self, key: str) -> None:
        """See `ObjectStore`. A key with a trailing slash deletes an empty folder."""
        path = self._path(key)
        try:
            if key.endswith("/"):
                os.rmdir(path)
            else:
                os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as exc:
            raise from_oserror(exc, f"{self.url}/{key}") from exc

    def close(self) -> None:
        """Nothing is held."""

    def _path(self, key: str) -> bytes:
        path = _exact_path(key.removesuffix("/"))
        if path is None:
            url = f"{self.url}/{key}"
            raise ObjectNotFoundError(f"{url!r} is not there: a file system has no such name", url=url)
        return path


class _Walk:
    """One listing: the folders on the way down, and what was passed over."""

    def __init__(self, start_after: bytes) -> None:
        self.skipped = 0
        self._start_after = start_after

    def entries(self, root: bytes) -> Iterator[ObjectInfo]:
        """Everything under `root` ('' or ending in '/') in the byte order of the keys."""
        # A stack of (key prefix, its (device, inode), entries still to do), so that depth costs no recursion.
        first = self._scan(root, missing_ok=False)
        stack = [(root, _identity(b"/" + root), iter(first or ()))]
        above = {stack[0][1]}
        while stack:
            folder, identity, entries = stack[-1]
            prefix = folder.decode("utf-8", "surrogateescape")
            deeper: bytes | None = None
            for name, entry in entries:
                if name[-1:] == b"/":
                    deeper = folder + name
                    break
                info = self._file(prefix, folder, name, entry)
                if info is not None:
                    yield info
            if deeper is None:
                stack.pop()
                above.discard(identity)
                continue
            if self._is_behind(deeper):
                continue
            identity = _identity(b"/" + deeper)
            if identity in above:
                _log.warning("/%s leads back to a folder above it: not followed", os.fsdecode(deeper))
                continue
            inside = self._scan(deeper, missing_ok=True)
            if inside:
                stack.append((deeper, identity, iter(inside)))
                above.add(identity)
            elif inside is not None and deeper > self._start_after:
                yield ObjectInfo(deeper.decode("utf-8", "surrogateescape"), 0, 0, "")

    def _scan(self, folder: bytes, *, missing_ok: bool) -> list[tuple[bytes, os.DirEntry[bytes]]] | None:
        """A folder's entries in key order: a folder's name sorts with the slash that follows it in its
        keys."""
        try:
            with os.scandir(b"/" + folder) as found:
                listed = list(found)
            try:
                entries = [(e.name + b"/" if e.is_dir() else e.name, e) for e in listed]
            except OSError:  # a link that leads round in a circle is among them
                entries = [(e.name + b"/" if _is_dir(e) else e.name, e) for e in listed]
        except FileNotFoundError as exc:
            if missing_ok:  # deleted while we walked
                return None
            raise _no_folder(folder, exc) from exc
        except OSError as exc:
            raise _no_folder(folder, exc) from exc
        entries.sort(key=_name)
        return entries

    def _file(self, prefix: str, folder: bytes, name: bytes, entry: os.DirEntry[bytes]) -> ObjectInfo | None:
        if self._start_after and folder + name <= self._start_after:
            return None
        try:
            found = entry.stat()
        except OSError:  # a dangling link, or deleted while we walked
            self.skipped += 1
            return None
        if found.st_mode & _KIND != _REGULAR:
            self.skipped += 1
            return None
        if name.startswith(_TEMPORARY):
            return None
        return ObjectInfo(
            prefix + name.decode("utf-8", "surrogateescape"), found.st_size, found.st_mtime_ns, etag_of(found)
        )

    def _is_behind(self, folder: bytes) -> bool:
        """Whether all keys under `folder` come before the start."""
        return folder < self._start_after and not self._start_after.startswith(folder)


def _name(entry: tuple[bytes, os.DirEntry[bytes]]) -> bytes:
    return entry[0]


def _is_dir(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads round in a circle
        return False


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


def _exact_path(key: str) -> bytes | None:
    """The path of a key, or None where the kernel would read another name into it."""
    raw = key.encode("utf-8", "surrogateescape")
    if b"\0" in raw or any(part in (b"", b".", b"..") for part in raw.split(b"/")):
        return None
    return b"/" + raw


def etag_of(found: os.stat_result) -> str:
    """The ETag of a file by what `stat` says of it."""
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _expect_same(ref: ObjectRef, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise changed(ref, "it is no regular file")
    expect_same(ref, etag=etag_of(found), size_bytes=found.st_size)


def _pread(fd: int, start: int, length: int) -> bytes:
    data = os.pread(fd, length, start)
    if len(data) == length or not data:
        return data
    parts = [data]  # the kernel gives at most 2 GiB at a time, and network file systems less
    while data and length > sum(map(len, parts)):
        got = sum(map(len, parts))
        data = os.pread(fd, length - got, start + got)
        parts.append(data)
    return b"".join(parts)
