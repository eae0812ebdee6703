"""An engine and its uploader over a real bucket, and the changes that a mount would make: for tests of the uploader."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from datacache.settings import Settings
from datacache.store.base import ObjectInfo
from datacache.store.bucket import Bucket
from datacache.store.open import open_bucket_backend
from datacache.writeback.engine import WriteBack
from datacache.writeback.fetching import Fetching
from datacache.writeback.journal.journal import Journal
from datacache.writeback.model import Attributes, Logged, Pending, Staged, Stored
from datacache.writeback.remote.memory import RemoteMemory
from datacache.writeback.staging.area import StagingArea
from datacache.writeback.staging.files import StagedFiles
from datacache.writeback.upload.uploader import Uploader
from tests.conformance.faults import FaultProxy
from tests.servers import CephRgw

FILE = Attributes(stat.S_IFREG | 0o644, 1000, 1000, 1_700_000_000_123456789)
FOLDER = FILE._replace(mode=stat.S_IFDIR | 0o755)
PREFIX = "live/"
SMALL_BYTES = 65_536
MIB = 2**20


class Rig:
    """One staging area on one bucket. `known` is what the bucket has, as a mount would know it."""

    def __init__(self, folder: Path, url: str, settings: Settings, **options: Any) -> None:
        self.url = url
        self.bucket: Bucket = open_bucket_backend(url, settings, probe_prefix=PREFIX)
        self.area = StagingArea.open(folder, f"{url}/{PREFIX}", who="test")
        self.files = StagedFiles(self.area.data_folder, limit_bytes=options.pop("limit_bytes", 0))
        delay_s, every_s = options.pop("delay_s", 0.02), options.pop("upload_every_s", 30.0)
        memory = RemoteMemory(self.area.folder)
        self.journal = Journal(self.area.journal_folder, before_write=memory.write_lines)
        self.engine = WriteBack(
            self.area, self.files, self.journal, self.bucket, PREFIX, memory=memory, host="test-host", **options
        )  # fmt: skip
        self.known: dict[str, ObjectInfo] = {}
        self.engine.watch(self)
        self.uploader = Uploader(self.engine, Fetching(self.engine), delay_s=delay_s, upload_every_s=every_s)
        self.claims = self.uploader.claims

    def start(self) -> Rig:
        self.uploader.start()
        return self

    def close(self) -> None:
        self.uploader.stop(10)
        self.engine.close()
        self.bucket.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # --- what the engine tells a mount -------------------------------------------------------------------------------

    def note_uploaded(self, pending: Pending, info: ObjectInfo | None) -> None:
        if info is None:
            self.known.pop(pending.key, None)
        else:
            self.known[pending.key] = info

    def note_moved(self, key: str, new_key: str, theirs: ObjectInfo | None) -> None:
        self.known.pop(key, None)
        if theirs is not None:
            self.known[key] = theirs

    # --- what a mount does -------------------------------------------------------------------------------------------

    def learn(self, *keys: str) -> None:
        """See what the bucket has."""
        for key in keys:
            self.known[key] = self.bucket.head(PREFIX + key)

    def base(self, key: str) -> str:
        return self.known[key].etag if key in self.known else ""

    def put(self, key: str, data: bytes, attributes: Attributes = FILE) -> int:
        """Write a file: its version."""
        engine = self.engine
        if len(data) <= SMALL_BYTES:
            with engine.lock:
                pending = engine.plan_change(key, attributes, Logged(len(data)), base=self.base(key))
                ticket = engine.record([pending], blobs={key: data})
        else:
            number = self.stage(data)
            with engine.lock:
                pending = engine.plan_change(key, attributes, Staged(number, len(data)), base=self.base(key))
                ticket = engine.record([pending])
        engine.commit(ticket)
        return pending.version

    def stage(self, data: bytes) -> int:
        number = self.files.create()
        fd = self.files.open(number)
        try:
            self.files.grow(number, len(data))
            os.pwrite(fd, data, 0)
            self.files.sync(fd, number)
        finally:
            os.close(fd)
        return number

    def chmod(self, key: str, attributes: Attributes) -> None:
        with self.engine.lock:
            self.engine.record([self.engine.plan_change(key, attributes, self._content(key), base=self.base(key))])

    def rename(self, *moves: tuple[str, str]) -> None:
        """One step: each pair's second key gets what the first has."""
        engine = self.engine
        with engine.lock:
            found = [(new, self._content(old), self._blob(old)) for old, new in moves]
            news = {new for _, new in moves}
            changes = [engine.plan_change(new, FILE, content, base=self.base(new)) for new, content, _ in found]
            drop: list[str] = []
            for old, _ in moves:
                if old not in news:
                    gone, dropped = engine.plan_deletion(old, base=self.base(old))
                    changes += gone
                    drop += dropped
            ticket = engine.record(changes, drop=drop, blobs={new: blob for new, _, blob in found if blob is not None})
        engine.commit(ticket)

    def remove(self, key: str) -> None:
        with self.engine.lock:
            gone, drop = self.engine.plan_deletion(key, base=self.base(key))
            ticket = self.engine.record(gone, drop=drop)
        self.engine.commit(ticket)

    def mkdir(self, key: str) -> None:
        with self.engine.lock:
            ticket = self.engine.record([self.engine.plan_change(key, FOLDER, None, base=self.base(key))])
        self.engine.commit(ticket)

    def _content(self, key: str) -> Logged | Staged | Stored:
        pending = self.engine.get(key)
        if pending is not None and pending.content is not None:
            return pending.content
        info = self.known[key]
        return Stored(key, info.size_bytes, info.etag)

    def _blob(self, key: str) -> bytes | None:
        pending = self.engine.get(key)
        return self.engine.blob(key) if pending is not None and isinstance(pending.content, Logged) else None

    # --- what somebody else sees -------------------------------------------------------------------------------------

    def objects(self) -> dict[str, bytes]:
        """All objects under the prefix."""
        found = {}
        for page in self.bucket.list(PREFIX):
            for info in page:
                data = self.bucket.read(info.ref(self.bucket.url), 0, info.size_bytes)
                found[info.key.removeprefix(PREFIX)] = bytes(data)
        return found

    def metadata(self, key: str) -> Mapping[str, str]:
        return self.bucket.look(PREFIX + key).metadata

    def somebody_writes(self, key: str, data: bytes) -> None:
        self.bucket.write(PREFIX + key, data, {}, expect=None)


def only(method: str, key: str, *, query: str = "") -> Callable[[str, str], bool]:
    """Requests for one key."""
    return lambda sent, path: sent == method and f"/{PREFIX}{key}" in path and query in path


def until(condition: Any, *, timeout_s: float = 30.0) -> None:
    """Wait until it is true, by looking again and again."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        pause.wait(0.005)


class BucketOnCeph:
    """A bucket of its own on Ceph, behind a proxy, and rigs on it."""

    def __init__(self, server: CephRgw, folder: Path, proxy: FaultProxy, settings: Settings, name: str) -> None:
        self.server, self.folder, self.proxy, self.settings, self.name = server, folder, proxy, settings, name
        self.url = f"s3://{name}"
        self.rigs: list[Rig] = []
        self.never = threading.Event()

    def rig(self, **options: Any) -> Rig:
        self.rigs.append(Rig(self.folder, self.url, self.settings, **options))
        return self.rigs[-1]

    def requests(self, method: str, key: str) -> int:
        path = f"{method} /{self.name}/{PREFIX}{key}"
        return sum(request.partition("?")[0] == path for request in self.proxy.requests)

    def uploads(self) -> list[Any]:
        found: list[Any] = self.server.client().list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return found

    def parts(self, key: str) -> list[int]:
        """Numbers of the parts that are there of a key's one unfinished upload."""
        for upload in self.uploads():
            if upload["Key"] == PREFIX + key:
                answer = self.server.client().list_parts(
                    Bucket=self.name, Key=upload["Key"], UploadId=upload["UploadId"]
                )
                return [part["PartNumber"] for part in answer.get("Parts", [])]
        return []
