"""`file://`: folders of this machine (disks, NFS, CephFS) as an object store, with the kernel's own exact
names.

A file's ETag is made of inode, modification time in ns and size: a file that is replaced or written to has
another one. (What changes bytes and puts all three back goes unseen, as it does for rsync and make.) Names
are bytes to Linux; keys carry them as str with `surrogateescape`. Any thread, and after `fork()`: there is
no state.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO

from datacache.core.counters import count
from datacache.core.disk import make_folders, take_place
from datacache.core.errors import (
    ObjectNotFoundError,
    SourceNotAllowedError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
)
from datacache.core.ids import ObjectRef, names_its_content
from datacache.core.paths import RESOLVE_NO_SYMLINKS, open_beneath
from datacache.store.base import ObjectInfo
from datacache.store.checksums import Checksum
from datacache.store.errors import changed, expect_same, from_oserror
from datacache.store.local.walk import TEMPORARY, Links, Walk, etag_of
from datacache.store.sources import SourceRules

_log = logging.getLogger(__name__)
_PAGE_KEYS = 1000
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_COPY_BYTES = 4 * 2**20
_TEMPORARY = TEMPORARY.encode()


class LocalStore:
    """The file system from its root down: the key of `/data/a.jpg` is `data/a.jpg`. `links` is for all its listings."""

    url = "file://"
    node_wide = True
    sorted_listing = True

    def __init__(self, rules: SourceRules | None = None, *, links: Links | None = None) -> None:
        """`rules`: which files may be read; then no link leads out of the folder that they name. `links`: what is done
        with links in all listings."""
        self._rules, self._links = rules, links

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """Walk one folder in byte order.

        A link that stays inside of the folder is listed as a link (`ObjectInfo.target`), one that leads out is left out
        (see `Links`): who may write to the folder could name any file of the machine by it.

        A folder that cannot be read is a `StoreAccessError` that names it: a snapshot without it would lack
        files in silence. Sockets, devices, pipes and dangling links are no objects; how many were passed
        over is in `Links`, or logged.
        """
        root = prefix.encode("utf-8", "surrogateescape")
        if _exact_path(prefix.rstrip("/")) is None and root:
            raise ObjectNotFoundError(f"file:///{prefix} is no folder's name", url=f"file:///{prefix}")
        links = self._links or Links()
        if not start_after:
            links.begin()
        walk = Walk(root, start_after.encode("utf-8", "surrogateescape"), links)
        page: list[ObjectInfo] = []
        for info in walk.entries():
            page.append(info)
            if len(page) == _PAGE_KEYS:
                yield page
                page = []
        if page:
            yield page
        if links.passed_over and self._links is None:
            _log.warning(
                "%s under /%s: no file or folder, or points nowhere, /%s first: left out",
                count(links.passed_over, "entry", "entries"),
                prefix,
                links.first_passed_over[0],
            )
        if links.left_out and self._links is None:
            _log.warning(
                "%d links under /%s lead out of it, %s first: left out", links.left_out, prefix, links.first[0]
            )

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`. A key with a trailing slash is a folder."""
        path = self._path(key)
        try:
            found = self._status(key, path)
        except StoreError:  # some are OSErrors, too
            raise
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

        What is read from it is the recorded object if `expect_exact` says so afterwards. No link leads out of the
        folder that a snapshot is of (`ObjectRef.root`), also when it takes a file's place after the listing."""
        path = self._path(ref.key)
        try:
            # O_NONBLOCK: the open of a pipe that took the file's name would wait for a writer.
            fd = self._open(ref.key, path, os.O_RDONLY | os.O_NONBLOCK, root=ref.root)
        except StoreError:  # some are OSErrors, too
            raise
        except OSError as exc:
            raise from_oserror(exc, ref.url) from exc
        try:
            self.expect_exact(ref, fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _status(self, key: str, path: bytes) -> os.stat_result:
        if self._rules is None:
            return os.stat(path)
        fd = self._open(key, path, os.O_PATH)
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def _open(self, key: str, path: bytes, flags: int, *, root: int = -1) -> int:
        """Open a file below the folder that the rules allow and below that of the snapshot (`ObjectRef.root`)."""
        if self._rules is not None:
            self._rules.check(self.url, key)
        allowed = self._rules.folder_of(key) if self._rules is not None else ""
        folders = sorted({allowed, key[: max(root, 0)]} - {""}, key=len)
        if not folders and root < 0:
            return os.open(path, flags | os.O_CLOEXEC)
        at, done = os.open(self._path(folders[0]) if folders else b"/", _FOLDER), len("".join(folders[:1]))
        try:
            for folder in folders[1:]:
                below = self._step(at, key, slice(done, len(folder) - 1), _FOLDER, allowed=folder == allowed)
                os.close(at)
                at, done = below, len(folder)
            exact = 0 if root else RESOLVE_NO_SYMLINKS
            inside = bool(folders) and folders[-1] == allowed
            return self._step(at, key, slice(done, None), flags, allowed=inside, resolve=exact)
        finally:
            os.close(at)

    def _step(self, at: int, key: str, part: slice, flags: int, *, allowed: bool, resolve: int = 0) -> int:
        """Open a part of a key below a folder. `allowed`: it is the folder that the rules allow."""
        try:
            return open_beneath(at, key[part].encode("utf-8", "surrogateescape"), flags, resolve=resolve)
        except OSError as exc:
            if exc.errno not in (errno.EXDEV, errno.ELOOP):
                raise
            url, folder = f"{self.url}/{key}", key[: part.start]
            if allowed:
                raise SourceNotAllowedError(
                    f"{url} leads out of /{folder} by a link",
                    url=url,
                    hint="DATACACHE_SOURCES allows that folder, and what a link of it names is not in it.",
                ) from exc
            raise StoreAccessError(
                f"{url}: a link on the way leads out of the snapshot's folder",
                url=url,
                hint="Make a new snapshot: it says which links it leaves out, and --follow-links takes them along.",
            ) from exc

    def expect_exact(self, ref: ObjectRef, fd: int) -> None:
        """Raise `ObjectChangedError` if a file is not, or no longer, the recorded one."""
        _expect_same(ref, os.fstat(fd))

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        """See `ObjectStore`: none is known."""
        return None

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore`. Atomic and durable, its name and new folders included: written beside, `fsync`ed,
        renamed. Folders are made as needed."""
        if not key.endswith("/"):
            return self._put(key, lambda file: file.write(data))
        try:
            if data:
                raise StoreError(f"{self.url}/{key} is a folder and holds no bytes", url=f"{self.url}/{key}")
            make_folders(self._path(key).rstrip(b"/"))
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
            take_place(path, self._path(key))
        except OSError as exc:
            raise from_oserror(exc, f"{self.url}/{key}") from exc
        return ObjectInfo(key, found.st_size, found.st_mtime_ns, etag_of(found))

    def _put(self, key: str, fill: Callable[[BinaryIO], object]) -> ObjectInfo:
        path = self._path(key)
        try:
            folder = os.path.dirname(path)
            make_folders(folder)
            beside = os.path.join(folder, _TEMPORARY + secrets.token_hex(8).encode())
            try:
                with open(beside, "xb") as file:
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                    found = os.fstat(file.fileno())
                take_place(beside, path)
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


def _exact_path(key: str) -> bytes | None:
    """The path of a key, or None where the kernel would read another name into it."""
    raw = key.encode("utf-8", "surrogateescape")
    if b"\0" in raw or any(part in (b"", b".", b"..") for part in raw.split(b"/")):
        return None
    return b"/" + raw


def _expect_same(ref: ObjectRef, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise changed(ref, "it is no regular file")
    if not ref.etag and not names_its_content(ref):
        # Every listing of a folder has them: without one it is a file that nobody has listed.
        raise changed(ref, "it was recorded without an ETag, so which file it is cannot be told")
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
