"""The URL to which shards are written: whole files only, and one builder of a home at a time.

Used by the builder and its workers. In a folder, a shard is written beside its place and renamed; elsewhere it
is written to `<home>/shards/…` and uploaded. The next builder removes the files of a killed one. A build holds its lock
until its last process is gone; workers die with the builder."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from datacache.core import lockfile
from datacache.core.errors import CacheError, DatacacheError, ObjectNotFoundError, UsageError
from datacache.settings import Settings
from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.errors import from_oserror
from datacache.store.local.store import LocalStore
from datacache.store.local.walk import TEMPORARY
from datacache.store.open import open_store
from datacache.store.urls import join_url, split_url

_LOCK_WAIT_S = 5.0
"""A builder that was killed holds its lock until the kernel has ended its workers."""
_LEFT_S = 86400.0
"""A file of a worker elsewhere that is older than this was left behind."""
_NO_FORK = ("gs://", "az://", "abfs://", "abfss://")


class Place:
    """The place of a shard set, finished or not. Close it."""

    def __init__(self, url: str, settings: Settings) -> None:
        store_url, self.prefix = split_url(url)
        self.store: ObjectStore = open_store(store_url, settings)
        self.url = join_url(store_url, self.prefix).rstrip("/")
        name = blake2b(self.url.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        self.scratch = settings.home / "shards" / name
        """A folder for temporary files; `begin` makes it."""
        self._folder = Path("/" + os.fsdecode(self.prefix)) if store_url == "file://" else None
        home = f"{socket.gethostname()}\0{settings.home}"
        self._temporary = TEMPORARY.decode() + blake2b(home.encode(errors="replace"), digest_size=6).hexdigest() + "-"
        self._settings = settings
        self._lock: int | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return (_elsewhere, (self.url, self._settings, self._temporary))

    @property
    def forks(self) -> bool:
        """Tell whether forked workers can write here."""
        return self.store.node_wide and not self.store.url.startswith(_NO_FORK)

    def begin(self) -> None:
        """Take the lock and remove the files of killed builders. Raise `UsageError` if another builder is at work."""
        try:
            self.scratch.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.scratch / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            deadline = time.monotonic() + _LOCK_WAIT_S
            while not lockfile.take(self._lock, wait=False):
                if time.monotonic() > deadline:
                    raise UsageError(f"shards are being written to {self.url} already", hint="Wait for it to end.")
                time.sleep(0.02)
            for left in self.scratch.iterdir():
                if left.name != "lock":
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            if self._folder is not None and self._folder.is_dir():
                for left in self._folder.glob(f"{self._temporary}*"):
                    left.unlink()
        except OSError as exc:
            raise CacheError(f"{self.scratch} cannot be used: {exc.strerror}") from exc

    def files(self) -> dict[str, ObjectInfo]:
        """Return the files directly under the URL, by name; none where there is no such folder."""
        found: dict[str, ObjectInfo] = {}
        skip = len(self.prefix)
        try:
            for page in self.store.list(self.prefix):
                found |= {info.key[skip:]: info for info in page if "/" not in info.key[skip:]}
        except ObjectNotFoundError:
            if self.store.url.startswith(("s3://", *_NO_FORK)):
                raise  # the bucket is missing
        found.pop("", None)
        return found

    @contextmanager
    def new_file(self) -> Iterator[Path]:
        """Give a path for a file that `put_file` then takes; remove the file afterwards if it is still there. Raise the
        store's errors where the folder cannot be made."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        path = (self._folder or self.scratch) / f"{self._temporary}{secrets.token_hex(8)}"
        try:
            yield path
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def put_file(self, name: str, path: Path) -> None:
        """Make a file of `new_file` the object of this name, in one step."""
        if self._folder is not None:
            LocalStore().take_file(self.prefix + name, path)
        else:
            self.store.put_file(self.prefix + name, path)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, in one step."""
        if self._folder is None:
            self.store.put(self.prefix + name, data)
            return
        try:
            with self.new_file() as path:
                path.write_bytes(data)
                self.put_file(name, path)
        except OSError as exc:
            raise exc if isinstance(exc, DatacacheError) else from_oserror(exc, f"{self.url}/{name}") from exc

    def read(self, info: ObjectInfo) -> bytes:
        """Read a whole file."""
        return bytes(self.store.read(info.ref(self.store.url), 0, info.size_bytes))

    def delete(self, name: str) -> None:
        """Delete a file; a missing one is fine."""
        self.store.delete(self.prefix + name)

    def close(self) -> None:
        """Release the lock and close connections."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
        self.store.close()


def _elsewhere(url: str, settings: Settings, temporary: str) -> Place:
    """Return the place for a worker of another machine, which writes for the builder that holds the lock: that one, or
    the next with its home, removes what is left in a folder. Elsewhere files are written in this process's home."""
    place = Place(url, settings)
    place._temporary = temporary  # noqa: SLF001 - its own
    try:
        place.scratch.mkdir(parents=True, exist_ok=True)
        for left in place.scratch.glob(f"{TEMPORARY.decode()}*"):
            if time.time() - left.stat().st_mtime > _LEFT_S:
                left.unlink(missing_ok=True)
    except OSError as exc:
        raise CacheError(f"{place.scratch} cannot be used: {exc.strerror}") from exc
    return place
