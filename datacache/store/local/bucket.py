"""`file://` read and written: a folder of this machine as the live bucket of a read-write mount.

For folders on CephFS, NFS or a disk. What a bucket has and a file system has not:

- metadata lie in the extended attribute `user.datacache.metadata` (JSON), with the ETag of the file they were written
  for: what they say of the bytes is not believed when somebody has edited the file since. A file system without such
  attributes refuses them with a `StoreError`; without metadata it works.
- a folder's marker is the folder. Its ETag stays the same while files come and go.
- an upload in parts is a hidden file in the target's folder, `.datacache-put-ID`, into which the parts are written at
  their offsets, and beside it `.datacache-put-ID.parts`: a line with the target's name (JSON), then a line
  `NUMBER SIZE ETAG` for each part that is durable. Both survive crashes; listings pass them over. All parts but the
  last are `part_bytes` long.
- `expect` is checked right before the rename, which is not one step: `conditional()` is false.

Links are not followed: what a link points to is not listed and not found, and a write to the name of a link finds
something else there. Any thread, several on one upload, and after `fork()`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import xxhash

from datacache.core.disk import sync_folder, write_all
from datacache.core.errors import ObjectNotFoundError, StoreError, StoreUnavailableError
from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.bodies import Body, chunks
from datacache.store.bucket import ABOUT_BYTES, FolderPage, LiveObject, Part, Upload
from datacache.store.errors import expect_same, translated, unexpected
from datacache.store.local.store import LocalStore
from datacache.store.local.walk import TEMPORARY, etag_of

_PAGE_NAMES = 1000
_COPY_BYTES = 64 * 2**20
_NO_COPY = (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_NO_ATTRIBUTE = (errno.ENODATA, errno.ENOTSUP, errno.EOPNOTSUPP)
_UPLOAD = re.compile(rb"[0-9a-f]{16}")
_SUFFIX = b".parts"
_ATTRIBUTE = "user.datacache.metadata"
_OF = ""
"""Beside the metadata: the ETag of the file they were written for. Editing a file in place keeps its attributes."""
_ROUNDS = 3


class LocalBucket(LocalStore):
    """The file system from its root down, as `LocalStore` has it, written as a bucket."""

    whole_bytes = part_bytes = 8 * 2**20
    max_parts = 2**31
    lists_in_pages = False

    def conditional(self) -> bool:
        """See `Bucket`: never."""
        return False

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`; a folder has an ETag here, and a link is not there."""
        found = self._stat(key)
        if found is None or not (stat.S_ISDIR if key.endswith("/") else stat.S_ISREG)(found.st_mode):
            raise ObjectNotFoundError(f"{self.url}/{key} is not there", url=f"{self.url}/{key}")
        return _info(key, found)

    def list_folder(self, prefix: str, *, start_after: str = "") -> Iterator[FolderPage]:
        """See `Bucket`. The folder itself is its marker."""
        behind, page = _bytes(start_after), FolderPage([], [])
        for key, found in self._entries(prefix):
            if start_after and _bytes(key) <= behind:
                continue
            if stat.S_ISDIR(found.st_mode) and key != prefix:
                page.folders.append(key)
            else:
                page.objects.append(_info(key, found))
            if len(page.objects) + len(page.folders) == _PAGE_NAMES:
                yield page
                page = FolderPage([], [])
        if page.objects or page.folders:
            yield page

    def find(self, path: str) -> tuple[ObjectInfo | None, bool]:
        """See `Bucket`. Never both."""
        found = self._stat(path)
        if found is None:
            return None, False
        return (_info(path, found) if stat.S_ISREG(found.st_mode) else None), stat.S_ISDIR(found.st_mode)

    def look(self, key: str) -> LiveObject:
        """See `Bucket`."""
        info = self.head(key)
        return LiveObject(info, get_metadata(self._path(key), info.etag, f"{self.url}/{key}"))

    def fetch(self, ref: ObjectRef) -> tuple[LiveObject, bytes | memoryview]:
        """See `Bucket`."""
        live = self.look(ref.key)
        return live, self.read(ref, 0, ref.size_bytes)

    def write(
        self, key: str, data: bytes | memoryview, metadata: Mapping[str, str], *, expect: str | None
    ) -> ObjectInfo:
        """See `Bucket`. Atomic and durable."""
        if key.endswith("/"):
            return self._make_folder(key, data, metadata, expect)
        return self._store(key, lambda fd: write_all(fd, data, 0), metadata, expect)

    def begin_upload(self, key: str, metadata: Mapping[str, str]) -> str:
        """See `Bucket`."""
        upload, url = secrets.token_hex(8), f"{self.url}/{key}"
        path = self._upload_path(key, upload)
        name = os.path.basename(self._path(key)).decode("utf-8", "surrogateescape")
        with translated(url):
            self._make_folders(os.path.dirname(path))
            with open(path, "xb") as file:
                set_metadata(file.fileno(), metadata, "", url)
            with open(path + _SUFFIX, "xb") as file:
                file.write(json.dumps(name).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            sync_folder(os.path.dirname(path))
        return upload

    def put_part(self, key: str, upload: str, number: int, data: bytes | memoryview | Body) -> Part:
        """See `Bucket`. Durable when it returns."""
        path, url = self._upload_path(key, upload), f"{self.url}/{key}"
        if len(data) > self.part_bytes:
            raise StoreError(f"{url}: a part has {len(data):,} bytes, more than {self.part_bytes:,}", url=url)
        digest, offset = xxhash.xxh3_64(), (number - 1) * self.part_bytes
        with translated(url):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for chunk in chunks(data):
                    digest.update(chunk)
                    write_all(fd, chunk, offset)
                    offset += len(chunk)
                os.fdatasync(fd)
            finally:
                os.close(fd)
            part = Part(number, len(data), digest.hexdigest())
            fd = os.open(path + _SUFFIX, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(fd, f"{part.number} {part.size_bytes} {part.etag}\n".encode())
                os.fdatasync(fd)
            finally:
                os.close(fd)
        return part

    def list_parts(self, key: str, upload: str) -> list[Part]:
        """See `Bucket`."""
        with translated(f"{self.url}/{key}"), open(self._upload_path(key, upload) + _SUFFIX, "rb") as file:
            lines = [line.decode().split() for line in file.readlines()[1:] if line.endswith(b"\n")]
        parts = {int(line[0]): Part(int(line[0]), int(line[1]), line[2]) for line in lines if len(line) == 3}
        return [parts[number] for number in sorted(parts)]

    def complete_upload(
        self, key: str, upload: str, parts: Sequence[Part], metadata: Mapping[str, str], *, expect: str | None
    ) -> ObjectInfo:
        """See `Bucket`."""
        url, target, path = f"{self.url}/{key}", self._path(key), self._upload_path(key, upload)
        there = {part.number: part for part in self.list_parts(key, upload)}
        full = all(part.size_bytes == self.part_bytes for part in parts[:-1])
        if not full or [there.get(number) for number in range(1, len(parts) + 1)] != list(parts):
            raise StoreError(f"{url}: these are not the parts that were uploaded", url=url)
        with translated(url):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.ftruncate(fd, sum(part.size_bytes for part in parts))
                settle(fd, metadata, url)
            finally:
                os.close(fd)
            self._expect(key, expect)
            found = os.stat(path)
            os.replace(path, target)
            with suppress(FileNotFoundError):
                os.unlink(path + _SUFFIX)
            sync_folder(os.path.dirname(target))
        return _info(key, found)

    def abort_upload(self, key: str, upload: str) -> None:
        """See `Bucket`."""
        with suppress(ObjectNotFoundError):
            path = self._upload_path(key, upload)
            for name in (path, path + _SUFFIX):
                with translated(f"{self.url}/{key}"), suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(name)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """See `Bucket`. Walks the folders under the prefix; links are not followed."""
        folder = prefix.rpartition("/")[0]
        for place, _, names in os.walk(self._path(folder) if folder else b"/"):
            for name in names:
                upload = name.removeprefix(TEMPORARY).removesuffix(_SUFFIX)
                if name != TEMPORARY + upload + _SUFFIX or _UPLOAD.fullmatch(upload) is None:
                    continue
                with suppress(OSError, ValueError), open(os.path.join(place, name), "rb") as file:
                    target = str(json.loads(file.readline())).encode("utf-8", "surrogateescape")
                    began = os.stat(os.path.join(place, TEMPORARY + upload)).st_ctime
                    key = os.path.join(place, target)[1:].decode("utf-8", "surrogateescape")
                    if key.startswith(prefix):
                        yield Upload(key, upload.decode(), began)

    def _pages(self, prefix: str, start_after: str) -> Iterator[list[ObjectInfo]]:
        told: set[str] = set()
        for page in super().list(prefix, start_after=start_after):
            found: list[ObjectInfo] = []
            for info in page:
                if info.target:  # a link is not there, as for `head`
                    continue
                at = info.key.find("/", len(prefix))
                while 0 <= at < len(info.key) - 1:
                    folder = info.key[: at + 1]
                    if folder not in told and folder > start_after:
                        found.append(ObjectInfo(folder, 0, 0, ""))
                    told.add(folder)
                    at = info.key.find("/", at + 1)
                if info.key not in told:
                    found.append(info)
            yield found

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        """See `ObjectStore`. Each folder is listed, as if all had markers, and not the empty ones alone. A folder that
        is not there has nothing in it, as in a bucket."""
        with suppress(ObjectNotFoundError):
            yield from self._pages(prefix, start_after)

    def copy(self, source: ObjectRef, key: str, metadata: Mapping[str, str], *, expect: str | None) -> ObjectInfo:
        """See `Bucket`. The kernel copies, where the file system can without moving bytes. A file that is copied to
        itself keeps its ETag."""
        if source.key == key or source.key.endswith("/") or key.endswith("/"):
            found = self.head(source.key)
            expect_same(source, etag=found.etag, size_bytes=found.size_bytes)
            if source.key != key:
                return self.write(key, b"", metadata, expect=expect)
            self._expect(key, expect)
            set_metadata(self._path(key), metadata, found.etag, f"{self.url}/{key}")
            return self.head(key)

        def fill(target: int) -> None:
            at = 0
            while at < source.size_bytes:
                size = min(_COPY_BYTES, source.size_bytes - at)
                try:
                    copied = os.copy_file_range(fd, target, size, at, at)
                except OSError as exc:
                    if exc.errno not in _NO_COPY:
                        raise
                    copied = 0
                if not copied:  # some file systems cannot, or say so in this way
                    data = os.pread(fd, size, at)
                    write_all(target, data, at)
                    copied = len(data)
                if not copied:
                    break
                at += copied
            self.expect_exact(source, fd)
            if at != source.size_bytes:
                raise StoreUnavailableError(f"{source.url}: {at:,} of {source.size_bytes:,} bytes came", url=source.url)

        self._expect(key, expect)
        fd = self.open_exact(source)
        try:
            return self._store(key, fill, metadata, expect)
        finally:
            os.close(fd)

    def remove(self, key: str, *, expect: str | None) -> None:
        """See `Bucket`. A marker's removal removes the folder if it is empty; else the folder is there as long as
        there is something in it, as in a bucket."""
        if self._stat(key) is None:
            return
        self._expect(key, expect)
        with translated(f"{self.url}/{key}"), suppress(FileNotFoundError, NotADirectoryError):
            if not key.endswith("/"):
                os.unlink(self._path(key))
                return
            try:
                os.rmdir(self._path(key))
            except OSError as exc:
                if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def _make_folder(
        self, key: str, data: bytes | memoryview, metadata: Mapping[str, str], expect: str | None
    ) -> ObjectInfo:
        url = f"{self.url}/{key}"
        if data:
            raise StoreError(f"{url} is a folder and holds no bytes", url=url)
        self._expect(key, expect)
        path = self._path(key)
        with translated(url):
            self._make_folders(path)
            set_metadata(path, metadata, _etag(os.lstat(path)), url)
            sync_folder(os.path.dirname(path))
        return self.head(key)

    def _store(
        self, key: str, fill: Callable[[int], None], metadata: Mapping[str, str], expect: str | None
    ) -> ObjectInfo:
        url = f"{self.url}/{key}"
        return self._put(
            key, fill, settle=lambda fd: settle(fd, metadata, url), check=lambda: self._expect(key, expect)
        )

    def _upload_path(self, key: str, upload: str) -> bytes:
        if _UPLOAD.fullmatch(upload.encode("ascii", "replace")) is None:
            url = f"{self.url}/{key}"
            raise ObjectNotFoundError(f"{url}: there is no upload {upload}", url=url)
        return os.path.join(os.path.dirname(self._path(key)), TEMPORARY + upload.encode())

    def _entries(self, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the folder and what is in it, in the byte order of the keys; no links, and nothing unfinished."""
        if prefix:
            found = self._stat(prefix)
            if found is None or not stat.S_ISDIR(found.st_mode):
                return
            yield prefix, found
        listed = []
        with (
            translated(f"{self.url}/{prefix}"),
            suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(self._path(prefix) if prefix else b"/") as entries,
        ):
            for entry in entries:
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(found.st_mode):
                        listed.append((entry.name + b"/", found))
                    elif stat.S_ISREG(found.st_mode) and not entry.name.startswith(TEMPORARY):
                        listed.append((entry.name, found))
        listed.sort(key=lambda item: item[0])
        for name, found in listed:
            yield prefix + name.decode("utf-8", "surrogateescape"), found

    def _stat(self, key: str) -> os.stat_result | None:
        try:
            path = self._path(key)
        except ObjectNotFoundError:  # no name a file system can have
            return None
        with translated(f"{self.url}/{key}"):
            try:
                found = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return None if key.endswith("/") and not stat.S_ISDIR(found.st_mode) else found

    def _expect(self, key: str, expect: str | None) -> None:
        if expect is not None:
            found = self._stat(key)
            if (_etag(found) if found is not None else "") != expect:
                raise unexpected(f"{self.url}/{key}", expect)


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    size_bytes = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    return ObjectInfo(key, size_bytes, found.st_mtime_ns, _etag(found))


def _etag(found: os.stat_result) -> str:
    if stat.S_ISREG(found.st_mode):
        return etag_of(found)
    return f"{found.st_ino:x}-{'folder' if stat.S_ISDIR(found.st_mode) else 'special'}"


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def get_metadata(path: bytes, etag: str, url: str) -> dict[str, str]:
    """Return the metadata of a file or folder with this ETag, without what was said of other bytes; none where the file
    system has no such attributes."""
    with translated(url):
        try:
            found = json.loads(os.getxattr(path, _ATTRIBUTE))
        except ValueError:
            return {}
        except OSError as exc:
            if exc.errno in _NO_ATTRIBUTE:
                return {}
            raise
    if not isinstance(found, dict):
        return {}
    fits = found.pop(_OF, "") == etag
    return {str(name): str(value) for name, value in found.items() if fits or name not in ABOUT_BYTES}


def set_metadata(path: bytes | int, metadata: Mapping[str, str], etag: str, url: str) -> None:
    """Replace all metadata. The ETag is that of the file or folder they are of."""
    with translated(url):
        try:
            if metadata:
                os.setxattr(path, _ATTRIBUTE, json.dumps({**metadata, _OF: etag}).encode())
            else:
                os.removexattr(path, _ATTRIBUTE)
        except OSError as exc:
            if not metadata and exc.errno in _NO_ATTRIBUTE:
                return
            if exc.errno in (errno.ENOTSUP, errno.EOPNOTSUPP):
                raise StoreError(
                    f"{url}: the file system keeps no extended attributes, so no mode, owner and time",
                    url=url,
                    hint="Use a folder on a file system with user attributes (ext4, XFS, CephFS, NFS 4.2).",
                ) from exc
            raise


def settle(fd: int, metadata: Mapping[str, str], url: str) -> os.stat_result:
    """Make a file that is written durable, with its metadata, and return what it is then."""
    found = os.fstat(fd)
    for _ in range(_ROUNDS):
        before = etag_of(found)
        set_metadata(fd, metadata, before, url)
        os.fsync(fd)
        found = os.fstat(fd)  # over a network its time may be another one now
        if etag_of(found) == before:
            break
    return found
