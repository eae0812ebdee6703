"""The daemon's lease of the snapshots that this home has mounted: garbage collection, anywhere, leaves those alone.

A mounting process asks the daemon to take the lease before it acknowledges the mount (`DaemonClient.hold_mounts`). A
thread renews it once an hour, and within half a minute of a change. The state files of mounts in the home name the
snapshots and their catalogs, so a restarted daemon goes on; files of an earlier boot do not count. While a catalog is
away, mounts are made and read all the same, and the lease is taken when it is back.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from datacache.catalog import leases
from datacache.catalog.base import Catalog
from datacache.core.boot import boot_id
from datacache.core.concurrency import RepeatedCall
from datacache.core.disk import replace_file
from datacache.core.errors import DatacacheError
from datacache.settings import Settings
from datacache.store.clock import elapsed_s

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 30.0


class Mounted(NamedTuple):
    """One mount, by the state file of its supervisor."""

    id: str
    mountpoint: str
    catalog: str
    """The URL of the catalog that it was opened from; '' for the daemon's."""


class MountLeases:
    """The leases of one home's mounts: one in each catalog that they were opened from. Any thread may call `renew`."""

    def __init__(self, settings: Settings, open_catalog: Callable[[str], Catalog]) -> None:
        """`open_catalog` opens the catalog at a URL; it is closed after each use."""
        self._home, self._url, self._open_catalog = settings.home, settings.catalog, open_catalog
        self._lock = threading.Lock()  # over reading what is mounted and writing it down
        self._written: list[Mounted] = []
        self._written_at = float("-inf")
        self._note = self._home / "run" / "mount-lease"
        """Names the catalogs that may have a lease of this home."""
        trouble = "garbage collection is not told what is mounted here"
        self._looks = RepeatedCall("mount-leases", self._look, _LOOK_EVERY_S, trouble=trouble, log=log)

    def start(self) -> None:
        """Start the thread that renews."""
        self._looks.start()

    def stop(self) -> None:
        """End the thread; a request under way ends with the process."""
        self._looks.stop()

    def renew(self) -> int:
        """Write down the mounts of this moment; return their number. Raises the catalogs' errors after it asked all of
        them."""
        with self._lock:
            mounts = mounted(self._home)
            mine = {mount.catalog or self._url for mount in mounts}
            try:
                known = set(self._note.read_text(encoding="utf-8").split("\n")[:-1]) or {self._url}
            except FileNotFoundError:
                known = set()
            if not mine <= known:
                self._write_note(known | mine)
            failed: list[DatacacheError] = []
            left = set(mine)
            for url in sorted(known | mine):
                places = [(mount.id, mount.mountpoint) for mount in mounts if (mount.catalog or self._url) == url]
                try:
                    with closing(self._open_catalog(url)) as catalog:
                        leases.write_mounts(catalog, holder(self._home), socket.gethostname(), places)
                except DatacacheError as exc:
                    left.add(url)
                    failed.append(exc)
            if left != known | mine:
                self._write_note(left)
            if failed:
                raise failed[0]
            self._written, self._written_at = mounts, elapsed_s()
            return len(mounts)

    def _write_note(self, urls: set[str]) -> None:
        if urls:
            replace_file(self._note, "".join(f"{url}\n" for url in sorted(urls)).encode(), durable=False)
        else:
            self._note.unlink(missing_ok=True)

    def _look(self) -> None:
        if elapsed_s() - self._written_at >= leases.RENEW_EVERY_S or mounted(self._home) != self._written:
            self.renew()


def mounted(home: Path) -> list[Mounted]:
    """List the mounted snapshots, by the state files of their supervisors.

    A file that does not name its boot counts: to hold too much for a while does no harm.
    """
    this_boot = boot_id()
    found = []
    for path in (home / "mounts").glob("*.json"):
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if not this_boot or state.get("boot", "") in ("", this_boot):
                where = Mounted(str(state["snapshot_id"]), str(state["mountpoint"]), str(state.get("catalog", "")))
                found.append(where)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue  # a read-write mount's, or one that goes this moment
    return sorted(found)


def holder(home: Path) -> str:
    """Return the name of this home's lease: another after a reboot, and on a clone of the machine."""
    there = os.stat(home)
    return blake2b(f"{boot_id()} {there.st_dev} {there.st_ino}".encode(), digest_size=16).hexdigest()
