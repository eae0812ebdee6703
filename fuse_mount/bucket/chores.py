"""Do what the server of a read-write mount does beside answering requests, in threads whose errors end nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from datacache.core.errors import DatacacheError
from fuse_mount.bucket.fs.bucket_fs import BucketFs

_log = logging.getLogger("fuse_mount")
_CHECK_OPEN_S = 1.0
_REMEMBER_S = 10.0
_SYNCING_THREADS = 8


class Chores:
    """Make files that stay open durable, and so have them uploaded; note what is known of the bucket."""

    def __init__(self, fs: BucketFs, forget_pages: Callable[[int], None]) -> None:
        """`forget_pages` has the kernel write what it has gathered of a file, and waits for that."""
        self._fs, self._forget_pages = fs, forget_pages
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin."""
        for name, work in (("syncs", self._sync_long_open), ("known", self._remember)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def stop(self) -> None:
        """End soon."""
        self._ended.set()

    def sync_open(self) -> None:
        """Make durable what was written to all files that are open now."""
        for ino, settle in self._fs.handles.long_open(0.0):
            self._sync(ino, settle)

    def _sync_long_open(self) -> None:
        with ThreadPoolExecutor(_SYNCING_THREADS, thread_name_prefix="sync") as pool:
            while not self._ended.wait(_CHECK_OPEN_S):
                try:
                    for ino, settle in self._fs.handles.long_open():
                        pool.submit(self._sync, ino, settle)
                except Exception:  # noqa: BLE001 - see the module
                    _log.exception("open files could not be looked through")

    def _sync(self, ino: int, settle: Callable[[], None]) -> None:
        try:
            self._forget_pages(ino)
            settle()
        except (DatacacheError, OSError) as exc:
            _log.warning("an open file could not be made durable: %s", exc)
        except Exception:  # noqa: BLE001 - see the module
            _log.exception("an open file could not be made durable")

    def _remember(self) -> None:
        while not self._ended.wait(_REMEMBER_S):
            try:
                self._fs.remember()
            except Exception:  # noqa: BLE001 - see the module
                _log.exception("what is known of the bucket could not be noted")
