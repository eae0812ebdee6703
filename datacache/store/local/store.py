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

from datacache.core.counters import count
from datacache.core.disk import make_folders, take_place, write_all
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
from datacache.store.errors import changed, expect_same, translated
from datacache.store.local.walk import TEMPORARY, Links, Walk, etag_of
from datacache.store.sources import SourceRules

_log = logging.getLogger(__name__)
_PAGE_KEYS = 1000
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_COPY_BYTES = 4 * 2**20


def _synced(fd: int) -> os.stat_result:
    os.fsync(fd)
    return os.fstat(fd)


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
        (see `Links`): users who may write to the folder could name any file of the machine by it.

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
        with translated(f"{self.url}/{key}"):
            if self._rules is None:
                found = os.stat(path)
            else:
                fd = self._open(key, path, os.O_PATH)
                try:
                    found = os.fstat(fd)
                finally:
                    os.close(fd)
        if key.endswith("/") and stat.S_ISDIR(found.st_mode):
            return ObjectInfo(key, 0, found.st_mtime_ns, "")
        if key.endswith("/") or not stat.S_ISREG(found.st_mode):
            raise ObjectNotFoundError(f"{self.url}/{key} is no regular file", url=f"{self.url}/{key}")
        return ObjectInfo(key, found.st_size, found.st_mtime_ns, etag_of(found))

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes:
        """See `ObjectStore`. The file is looked at before and after, so a file being rewritten is noticed."""
        if start >= stop:
            return b""
        with translated(ref.url):
            fd = self.open_exact(ref)
            try:
                data = os.pread(fd, stop - start, start)
                while data and len(data) < stop - start:  # 2 GiB at a time at most, and less over a network
                    part = os.pread(fd, stop - start - len(data), start + len(data))
                    if not part:
                        break
                    data += part
                self.expect_exact(ref, fd)
            finally:
                os.close(fd)
        if len(data) != stop - start:
            raise StoreUnavailableError(f"{ref.url}: the file gave {len(data)} of {stop - start} bytes", url=ref.url)
        return data

    def open_exact(self, ref: ObjectRef) -> int:
        """Return a descriptor of the recorded file, for reading. `ObjectChangedError` and the errors of `read`.

        What is read from it is the recorded object if `expect_exact` says so afterwards. No link leads out of the
        folder that a snapshot is of (`ObjectRef.root`), also when it takes a file's place after the listing."""
        path = self._path(ref.key)
        with translated(ref.url):
            # O_NONBLOCK: the open of a pipe that took the file's name would wait for a writer.
            fd = self._open(ref.key, path, os.O_RDONLY | os.O_NONBLOCK, root=ref.root)
        try:
            self.expect_exact(ref, fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

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
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise changed(ref, "it is no regular file")
        if not ref.etag and not names_its_content(ref):
            # Every listing of a folder has them: without one it is a file that nobody has listed.
            raise changed(ref, "it was recorded without an ETag, so which file it is cannot be told")
        expect_same(ref, etag=etag_of(found), size_bytes=found.st_size)

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        """See `ObjectStore`: none is known."""
        return None

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore`. Atomic and durable, its name and new folders included: written beside, `fsync`ed,
        renamed. Folders are made as needed."""
        if not key.endswith("/"):
            return self._put(key, lambda fd: write_all(fd, data, 0))
        with translated(f"{self.url}/{key}"):
            if data:
                raise StoreError(f"{self.url}/{key} is a folder and holds no bytes", url=f"{self.url}/{key}")
            self._make_folders(self._path(key))
        return self.head(key)

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        """See `ObjectStore`. Atomic and durable like `put`."""
        with translated(str(path)):
            source = path.open("rb")

        def fill(fd: int) -> None:
            at = 0
            while data := source.read(_COPY_BYTES):
                write_all(fd, data, at)
                at += len(data)

        with source:
            return self._put(key, fill)

    def take_file(self, key: str, path: Path) -> ObjectInfo:
        """Make a file that lies in the same folder the object of this key: like `put_file`, without a copy."""
        with translated(f"{self.url}/{key}"):
            with path.open("rb") as file:
                found = _synced(file.fileno())
            take_place(path, self._path(key))
        return ObjectInfo(key, found.st_size, found.st_mtime_ns, etag_of(found))

    def _put(
        self,
        key: str,
        fill: Callable[[int], object],
        *,
        settle: Callable[[int], os.stat_result] = _synced,
        check: Callable[[], None] = lambda: None,
    ) -> ObjectInfo:
        """Write a file beside with `fill`, make it durable with `settle`, and rename it. `check` comes before that."""
        path = self._path(key)
        folder = os.path.dirname(path)
        beside = os.path.join(folder, TEMPORARY + secrets.token_hex(8).encode())
        with translated(f"{self.url}/{key}"):
            self._make_folders(folder)
            try:
                fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                try:
                    fill(fd)
                    found = settle(fd)
                finally:
                    os.close(fd)
                check()
                take_place(beside, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(beside)
                raise
        return ObjectInfo(key, found.st_size, found.st_mtime_ns, etag_of(found))

    def _make_folders(self, path: bytes) -> None:
        """Make a folder and those above it. `StoreError` names the file that lies in the place of one."""
        try:
            make_folders(path)
        except (FileExistsError, NotADirectoryError) as exc:
            while not os.path.lexists(path):
                path = os.path.dirname(path)
            url = self.url + os.fsdecode(path)
            hint = "Move it away, or use another prefix."
            raise StoreError(f"{url} is a file, and no folder can be made there", url=url, hint=hint) from exc

    def delete(self, key: str) -> None:
        """See `ObjectStore`. A key with a trailing slash deletes an empty folder."""
        path = self._path(key)
        with translated(f"{self.url}/{key}"), suppress(FileNotFoundError, NotADirectoryError):
            (os.rmdir if key.endswith("/") else os.unlink)(path)

    def close(self) -> None:
        """See `ObjectStore`: nothing is held."""

    def _path(self, key: str) -> bytes:
        path = _exact_path(key.removesuffix("/"))
        if path is None:
            url = f"{self.url}/{key}"
            raise ObjectNotFoundError(f"{url!r} is not there: a file system has no such name", url=url)
        return path


def _exact_path(key: str) -> bytes | None:
    """Return the path of a key, or None where the kernel would read another name into it."""
    raw = key.encode("utf-8", "surrogateescape")
    if b"\0" in raw or any(part in (b"", b".", b"..") for part in raw.split(b"/")):
        return None
    return b"/" + raw
