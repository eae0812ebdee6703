"""Hold replicas of other nodes' staging areas, and upload what is in one when its node is gone.

    <staging root>/replicas/<area's id>/     a staging root of its own, with one area: the other node's, same id

The first part of a node's daemon has one `Replicas`. Other nodes' frames come in the threads of their connections, one
at a time for each area. One thread looks at the leases. Where one has ended that names this node, and several looks
have found it so (after an outage of the catalog the other node may just be about to renew it), it takes the lease, and
starts a process (`datacache.api.takeover`) that opens the replica as a mount would and uploads all of it: objects say
which area and version they came from, so what the other node had uploaded is recognised, and not sent again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datacache.catalog.open import open_catalog_url
from datacache.cluster.replicas.lease import LeaseState, read_lease
from datacache.core.disk import write_all
from datacache.core.errors import DatacacheError, StagingError, UsageError
from datacache.settings import Settings
from datacache.writeback.engine import staged_file
from datacache.writeback.journal.journal import Change, Journal
from datacache.writeback.staging.area import StagingArea, make_folder, reaching
from datacache.writeback.staging.files import StagedFiles

log = logging.getLogger(__name__)
_LOOKS = 8
"""In the time of a lease. As many in a row must have found the same lease before it is taken."""
_STOP_S = 10.0


class _Replica:
    """A replica that a node of another staging area is writing. One thread at a time."""

    def __init__(self, root: Path, head: Mapping[str, Any]) -> None:
        for folder in (root.parent.parent, root.parent, root):
            make_folder(folder)
        who = f"the replica of {head['node']}"
        self._area = StagingArea.open(root, head["url"], who=who, endpoint=head["endpoint"], area_id=head["area"])
        try:
            self._files = StagedFiles(self._area.data_folder, limit_bytes=0)
            self._journal = Journal(self._area.journal_folder)
        except BaseException:
            self._area.close()
            raise
        self.session = str(head["session"])
        self.heard_at = time.monotonic()
        self._given: set[str] = set()  # keys of this session
        self._written: set[int] = set()  # files that are not durable
        self._file_of: dict[str, int] = {}
        for key, header, blob_bytes in self._journal.records():
            number = staged_file(key, header, blob_bytes)
            if number is not None:
                self._file_of[key] = number

    def write(self, number: int, size_bytes: int, extents: list[list[int]], payload: memoryview) -> None:
        """Take bytes of a staged file."""
        fd = self._files.adopt(number)
        try:
            with reaching(self._area.folder, "written to"):
                os.ftruncate(fd, size_bytes)
                for offset, length in extents:
                    write_all(fd, payload[:length], offset)
                    payload = payload[length:]
        finally:
            os.close(fd)
        self._written.add(number)

    def put(self, records: list[list[Any]], payload: memoryview, *, last: bool, whole: bool) -> None:
        """Make records durable, all or none of them; with the last of a message also the bytes that came before."""
        changes = []
        for key, header_bytes, blob_bytes in records:
            header = None if header_bytes < 0 else bytes(payload[:header_bytes])
            payload = payload[max(0, header_bytes) :]
            changes.append(Change(key, header, bytes(payload[:blob_bytes])))
            payload = payload[blob_bytes:]
        self._given.update(change.key for change in changes if change.header is not None)
        if last and whole:
            changes += [Change(key, None) for key in self._journal.live_keys() if key not in self._given]
        if last:
            for number in self._written:
                fd = self._files.open(number)
                try:
                    self._files.sync(fd, number)
                finally:
                    os.close(fd)
            self._written.clear()
        self._journal.append(changes)
        self._journal.commit()  # each time: the records of a message may be too many to be kept in memory
        left: set[int] = set()
        for key, header, blob in changes:
            old = self._file_of.pop(key, None)
            if old is not None:
                left.add(old)
            new = None if header is None else staged_file(key, header, len(blob))
            if new is not None:
                self._file_of[key] = new
        if last and whole:
            left = set(self._files.numbers())
            self._given.clear()
        for number in left.difference(self._file_of.values()) if left else ():
            self._files.remove(number)

    def close(self) -> None:
        """Let go of the files."""
        try:
            self._journal.close()
        except StagingError as exc:
            log.warning("a replica is closed, and its end may be missing: %s", exc)
        self._area.close()


class Replicas:
    """See the module."""

    def __init__(self, settings: Settings, node: str, environment: Mapping[str, str]) -> None:
        """`environment` is of processes that upload."""
        self._settings, self._node, self._environment = settings, node, environment
        # Without the daemon's cache: a lease as it was says nothing.
        self._catalog = open_catalog_url(settings.catalog)
        self._root = settings.staging_root / "replicas"
        self._guard = threading.Lock()  # guards _locks
        self._locks: dict[str, threading.RLock] = {}
        self._open: dict[str, _Replica] = {}  # the lock of each guards its entry
        self._uploading: dict[str, subprocess.Popen[bytes]] = {}  # the thread's own
        self._seen: dict[str, tuple[str | None, int]] = {}  # a lease's text, and how many looks in a row have found it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)

    def start(self) -> None:
        """Look at the leases from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Let go of all replicas, and end what uploads: the next daemon goes on with it."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        for process in self._uploading.values():
            process.terminate()
        for process in self._uploading.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        for area_id in list(self._open):
            self._close(area_id)
        self._catalog.close()

    def call(self, body: memoryview) -> bytes:
        """Do what another node asks for one of its areas."""
        try:
            at = 4 + int.from_bytes(body[:4], "big")
            head, payload = json.loads(bytes(body[4:at])), body[at:]
            area_id = head["area"]
            if not re.fullmatch("[0-9a-f]{8,64}", area_id):
                raise ValueError(f"{area_id!r} is no area")
            with self._lock_of(area_id):
                self._do(area_id, head, payload)
        except (ValueError, KeyError, TypeError) as exc:
            raise UsageError(f"bad request for a replica: {exc!r}") from exc
        return b"{}"

    def _do(self, area_id: str, head: dict[str, Any], payload: memoryview) -> None:
        if head["op"] == "begin":
            _, state = read_lease(self._catalog, area_id)
            if state is None or state.taken or self._ended.is_set():
                raise StagingError(f"the staging area {area_id} has no lease for a replica here")
            self._close(area_id)
            self._open[area_id] = _Replica(self._root / area_id, head)
            return
        replica = self._open.get(area_id)
        if replica is None or replica.session != head["session"]:
            raise StagingError(f"the node {self._node} has no replica of {area_id} under way")
        replica.heard_at = time.monotonic()
        if head["op"] == "write":
            replica.write(head["file"], head["size_bytes"], head["extents"], payload)
        else:
            replica.put(head["records"], payload, last=head["last"], whole=head["whole"])

    def _lock_of(self, area_id: str) -> threading.RLock:
        with self._guard:
            return self._locks.setdefault(area_id, threading.RLock())

    def _close(self, area_id: str) -> None:
        with self._lock_of(area_id):
            replica = self._open.pop(area_id, None)
            if replica is not None:
                replica.close()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.wait(self._settings.replica_lease_s / _LOOKS):
            try:
                for folder in list(self._root.iterdir()) if self._root.is_dir() else []:
                    self._look(folder.name)
            except (DatacacheError, OSError) as exc:
                log.warning("replicas of other nodes cannot be looked after now: %s", exc)
            except Exception:
                log.exception("replicas of other nodes cannot be looked after now")

    def _look(self, area_id: str) -> None:
        text, state = read_lease(self._catalog, area_id)
        last, alike = self._seen.get(area_id, (None, 0))
        alike = alike + 1 if text == last else 1
        self._seen[area_id] = text, alike
        with self._lock_of(area_id):
            replica = self._open.get(area_id)
            if state is None or state.done or (state.taken and state.taken != self._node):
                self._drop(area_id)  # all of it is uploaded, or another node's affair
            elif self._node in (state.taken, state.replica):
                if not state.taken and alike >= _LOOKS and self._catalog.now_s() > state.until_s:
                    taken = state._replace(taken=self._node)
                    if taken.replace_document(self._catalog, area_id, text):
                        text, state = taken.encode(), taken
                        self._close(area_id)
                if state.taken:
                    self._upload(area_id, text, state)
            elif replica is None or time.monotonic() - replica.heard_at > self._settings.replica_lease_s:
                self._drop(area_id)  # another node has more, and this one is told nothing any more

    def _drop(self, area_id: str) -> None:
        self._seen.pop(area_id, None)
        self._close(area_id)
        shutil.rmtree(self._root / area_id, ignore_errors=True)

    def _upload(self, area_id: str, text: str | None, state: LeaseState) -> None:
        """Have a process upload a replica, or see how it goes on."""
        process = self._uploading.get(area_id)
        code = process.poll() if process is not None else None
        if code == 0:
            state._replace(done=True).replace_document(self._catalog, area_id, text)  # else again, in a moment
            del self._uploading[area_id]
            log.warning("all that was pending on the node %s (%s) is uploaded", state.node, area_id)
            self._drop(area_id)
        elif process is None or code is not None:
            log.warning("the node %s is gone: uploading what it has left in %s", state.node, self._root / area_id)
            self._uploading[area_id] = subprocess.Popen(
                [sys.executable, "-m", "datacache.api.takeover", str(self._root / area_id)],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=dict(self._environment),
            )
