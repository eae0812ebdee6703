"""A read-write mount for tests: of a bucket on a real server, mounted, flushed, killed and looked behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from datacache.core.errors import MountError
from datacache.settings import Settings
from datacache.store.bucket import is_probe
from fuse_mount import BucketInfo
from fuse_mount.kernel import session
from fuse_mount.lifecycle import launch as bucket_launch
from tests.leftovers import processes_with
from tests.servers import CephRgw, RcloneS3

_FLUSH_TIMEOUT_S = 120.0


class BucketMount:
    """`url` at `mountpoint`, with the state of `settings`' home. Also a `posix_model.Subject`."""

    def __init__(
        self, server: RcloneS3 | CephRgw, bucket: str, mountpoint: Path, settings: Settings, **options: Any
    ) -> None:
        self.bucket, self.mountpoint, self.settings = bucket, mountpoint, settings
        self.options = options
        self.client = server.client()
        self.lists_uploads = not isinstance(server, RcloneS3)
        """rclone has no list of unfinished uploads before the first one."""
        mountpoint.mkdir(exist_ok=True)

    # --- the mount ---

    def mount(self) -> BucketInfo:
        """Mount it, also where a dead mount lies."""
        return bucket_launch.mount_bucket(
            f"s3://{self.bucket}/data", self.mountpoint, settings=self.settings, **self.options
        )

    def info(self) -> BucketInfo:
        found = bucket_launch.bucket_mount_at(self.mountpoint, self.settings)
        assert found is not None, "there is no mount"
        return found

    def status(self) -> dict[str, Any]:
        return bucket_launch.bucket_status(self.info())

    def flush(self) -> None:
        bucket_launch.flush_mount(self.info(), timeout_s=_FLUSH_TIMEOUT_S, progress=lambda _: None)

    def unmount(self, *, flush_s: float = 60.0) -> dict[str, Any]:
        return bucket_launch.stop_server(self.info(), flush_s=flush_s, lazy=False)

    def remount(self) -> None:
        self.unmount(flush_s=0.0)
        self.mount()

    def folder(self) -> Path:
        return self.mountpoint

    def elsewhere(self, mountpoint: Path, home: Path) -> BucketMount:
        """The same bucket on another node: a home with nothing in it."""
        home.mkdir()
        other = object.__new__(BucketMount)
        other.__dict__ |= self.__dict__ | {"mountpoint": mountpoint, "settings": replace(self.settings, home=home)}
        other.options = {**self.options, "staging": home / "staging"}
        mountpoint.mkdir()
        return other

    # --- the bucket, past the mount ---

    def objects(self, prefix: str) -> Mapping[str, bytes]:
        """Every object under a prefix, keys without it. What a store was tried out on, by a process that was killed
        then, is not counted: it is not shown either, and taken away a day later."""
        start = f"data/{prefix}"
        found = {}
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=start):
            for item in page.get("Contents", []):
                if is_probe(item["Key"].rpartition("/")[2]):
                    continue
                body = self.client.get_object(Bucket=self.bucket, Key=item["Key"])["Body"].read()
                found[item["Key"].removeprefix(start)] = body
        return found

    def unfinished_uploads(self) -> list[str]:
        """The keys of multipart uploads that somebody began and nobody finished."""
        for _ in range(20):
            try:
                found = self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
                return [item["Key"] for item in found]
            except self.client.exceptions.NoSuchUpload:
                time.sleep(0.1)  # Ceph's answer to a listing while one of them is being completed
        assert not self.lists_uploads, "the store does not list its unfinished uploads"
        return []

    # --- what kills it ---

    def kill_server(self) -> None:
        """SIGKILL; the supervisor starts another one."""
        _kill(self.info().pid)

    def kill_supervisor(self) -> None:
        """SIGKILL; the server goes on without it."""
        _kill(self.info().supervisor)

    def kill_all(self) -> None:
        """Nobody is left to bring it back, or to hold it. The supervisor first, or it would start another server."""
        self.kill_daemons()
        info = self.info()
        _kill(info.supervisor)
        _kill(info.pid)

    def kill_daemons(self) -> None:
        """The cache daemons of this home."""
        for pid in processes_with("DATACACHE_HOME", lambda value: value == str(self.settings.home)):
            with contextlib.suppress(OSError):
                if b"datacache.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    _kill(pid)

    def revive(self, *, within_s: float = 90.0) -> None:
        """Until it is served: by the supervisor's next server, or mounted again where there is no supervisor."""
        deadline = time.monotonic() + within_s
        while not self.is_served():
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.mountpoint} is not served again; {self.info()}")
            known = bucket_launch.bucket_mount_at(self.mountpoint, self.settings)
            if known is None or known.problem or not os.path.exists(f"/proc/{known.supervisor}"):
                with contextlib.suppress(MountError):
                    self.mount()
            time.sleep(0.05)

    def is_served(self) -> bool:
        """Return whether a living server answers."""
        try:
            return (
                not session.is_dead(str(self.mountpoint)) and os.path.ismount(self.mountpoint) and bool(self.status())
            )
        except (MountError, AssertionError, OSError):
            return False


def _kill(pid: int) -> None:
    assert pid > 0, "kill(2) takes it for many processes, this one among them"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
