"""The shared mounts of a node: one for each snapshot, and one for each bucket prefix with its options.

Used by `node`, `preparation` and `mender`. They lie under `<home>/csi/mounts/<key>` and are made by `fuse_mount`; their
processes are no children of the driver. Who uses one is what the records say. Any thread may call; one at a time makes
or ends a mount (`Records.lock_mount`), in all drivers of the home.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import fuse_mount
from csi_driver.node import binds
from csi_driver.node.patience import Patience
from csi_driver.node.records import NodeVolume, PublishedTarget, Records, SharedMount
from csi_driver.node.store_secrets import StoreSecrets
from csi_driver.status import RequestError, unauthenticated, unavailable
from datacache.core.errors import MountError, UploadError
from datacache.settings import Settings
from datacache.writeback.staging.area import areas, discard_clean
from fuse_mount import Mount, mounts

_ANSWER_S = 5.0
_LOCK_S = 60.0
_STOP_FLUSH_S = 5.0
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)

_log = logging.getLogger("csi_driver")


class Health(Enum):
    """The state of a mount point."""

    ALIVE = "answers"
    SLOW = "does not answer in time"
    FAILING = "answers with an error"
    DEAD = "its processes are gone"
    ABSENT = "nothing is mounted"


class SilentMountError(Exception):
    """A mount does not answer. The words say why."""

    def __init__(self, health: Health, words: str = "") -> None:
        super().__init__(words or health.value)
        self.health = health


class SharedMounts:
    """The shared mounts of one home."""

    def __init__(self, settings: Settings, records: Records, secrets: StoreSecrets, folder: Path) -> None:
        self._settings, self._records, self._secrets = settings, records, secrets
        self._folder = folder / "mounts"
        self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._patience = Patience("the volume's file system")

    def point(self, mount: SharedMount) -> str:
        """Return where a mount is, or would be."""
        return fuse_mount.resolved(str(self._folder / mount.key))

    def health(self, path: str, tops: Mapping[str, Mount] | None = None) -> Health:
        """Ask the mount at a path how it is, for a bounded time. `tops` is the answer of `binds.tops`."""
        if (binds.top_at(path) if tops is None else tops.get(path)) is None:
            return Health.ABSENT
        try:
            self.usage(path)
        except SilentMountError as exc:
            return exc.health
        return Health.ALIVE

    def usage(self, path: str) -> os.statvfs_result:
        """Return statvfs(3) of a path, within a bounded time. `SilentMountError`."""
        try:
            return self._patience.ask(("statvfs", path), lambda: os.statvfs(path), _ANSWER_S)
        except RequestError as exc:
            raise SilentMountError(Health.SLOW) from exc
        except OSError as exc:
            if exc.errno in _DEAD:
                raise SilentMountError(Health.DEAD) from exc
            raise SilentMountError(Health.FAILING, f"{Health.FAILING.value}: {exc.strerror}") from exc

    def trouble(self, mount: SharedMount) -> str:
        """Return why a bucket's mount cannot upload what was written; '' where it can."""
        status = self._status(mount)
        if status is None:
            return ""  # whether it is served is another question
        reasons = [status["halted"], status["store_problem"], *(failure["reason"] for failure in status["failures"])]
        reason = next(filter(None, reasons), "")
        return f"{mount.source}: {status['dirty_files']} files are not uploaded yet: {reason}" if reason else ""

    def staged_bytes(self, mount: SharedMount) -> int:
        """Return how much was written to a bucket's mount and is not uploaded yet; 0 where it does not say."""
        status = self._status(mount)
        return 0 if status is None else int(status["dirty_bytes"])

    def _status(self, mount: SharedMount) -> dict[str, Any] | None:
        info = fuse_mount.bucket_mount_at(self.point(mount), self._settings) if mount.bucket else None
        if info is None:
            return None
        try:
            return self._patience.ask(("status", mount.key), lambda: fuse_mount.bucket_status(info), _ANSWER_S)
        except (MountError, RequestError):
            return None

    def device(self, mount: SharedMount) -> int | None:
        """Return the st_dev of a mount, dead or alive; None where nothing is mounted."""
        there = binds.top_at(self.point(mount))
        return None if there is None else there.device

    def ensure(self, mount: SharedMount) -> bool:
        """Mount it unless it is mounted and served. Return whether it had to be mounted. The errors of `fuse_mount`."""
        with self._records.lock_mount(mount.key, timeout_s=_LOCK_S, source=mount.source):
            point = self.point(mount)
            if self.health(point) not in (Health.DEAD, Health.ABSENT):
                return False
            if binds.top_at(point) is None:
                Path(point).mkdir(mode=0o755, exist_ok=True)
            try:
                self._make(mount, point)
            except MountError:
                # A driver that was killed while it mounted has left that to its child, which came first.
                if self.health(point) is not Health.ALIVE:
                    raise
            return True

    def bind(self, record: NodeVolume, target: PublishedTarget) -> None:
        """Show a volume, or its folder, at a target, on top of anything there. Missing folders of a bucket are made."""
        mount, subpath, point = record.mount, record.spec.subpath, self.point(record.mount)

        def find() -> int:
            root = binds.open_root(point)
            try:
                if not mount.bucket:
                    return binds.open_folder(root, subpath)
                owner = {name: mount.options[name] for name in ("uid", "gid", "umask")}
                return binds.make_folder(root, subpath, **owner)
            finally:
                os.close(root)

        if subpath:
            folder = self._patience.ask(("folder", point, subpath), find, _ANSWER_S, discard=os.close)
        else:
            folder = binds.open_root(point)
        try:
            binds.bind(folder, target.path, read_only=target.read_only, noexec=target.noexec)
        finally:
            os.close(folder)

    def flush(self, mount: SharedMount, *, timeout_s: float, unmounted_too: bool) -> None:
        """Wait until a bucket has all that was written. UNAVAILABLE names what it lacks. With `unmounted_too`, mount a
        bucket that has something left in its staging area."""
        if not mount.bucket:
            return
        point = self.point(mount)
        health = self.health(point)
        if health is Health.ABSENT:
            if not unmounted_too:
                return
            health = self._when_free(mount, timeout_s)
            left = fuse_mount.left_areas(self._staged(mount))
            if health is Health.ABSENT and not any(area.url == mount.source for area in left):
                return
        if health in (Health.DEAD, Health.ABSENT):
            self.ensure(mount)  # what was acknowledged is in its staging area
        info = fuse_mount.bucket_mount_at(point, self._settings)
        if info is None:
            return
        try:
            fuse_mount.flush_mount(info, timeout_s=timeout_s, progress=lambda _status: None)
        except UploadError as exc:
            raise unavailable(f"{mount.source}: {exc.message}. {exc.hint}".removesuffix(". ")) from exc

    def end(self, mount: SharedMount) -> bool:
        """Unmount a mount that no volume uses any more. Return whether it is gone."""
        with self._records.lock_mount(mount.key, timeout_s=_LOCK_S, source=mount.source):
            if any(record.used and not record.resting for record in self._records.of(mount)):
                return False
            if not self._records.complete():  # one that cannot be read may be of a volume that uses it
                _log.warning("%s stays mounted, as not all records of volumes can be read", mount.source)
                return False
            self.end_at(self.point(mount))
            return True

    def end_at(self, point: str) -> None:
        """Unmount at one of our mount points, and remove the folder."""
        if binds.top_at(point) is not None:
            info = fuse_mount.bucket_mount_at(point, self._settings)
            if info is not None:
                self._end_bucket(info)
            elif self.health(point) is not Health.DEAD:
                with contextlib.suppress(MountError):
                    fuse_mount.unmount(point, settings=self._settings)
        binds.clear(point)
        binds.remove_place(point)

    def end_strays(self) -> None:
        """Unmount what a killed driver left and no volume has."""
        for key in sorted(os.listdir(self._folder)):
            # A volume is written down before its mount is looked for, so with the lock its record is seen, or it waits.
            with contextlib.suppress(RequestError), self._records.lock_mount(key, timeout_s=0.0):
                if any(record.mount.key == key for record in self._records.all()):
                    continue
                point = fuse_mount.resolved(str(self._folder / key))
                there = binds.top_at(point)
                if not any(there and each.device == there.device and each.mountpoint != point for each in mounts()):
                    self.end_at(point)

    def renew_quota(self, mount: SharedMount) -> None:
        """Have a mounted bucket hold as much as its volumes may by now."""
        info = fuse_mount.bucket_mount_at(self.point(mount), self._settings)
        if info is not None:
            fuse_mount.set_quota(info, self._quota_of(mount))

    def _quota_of(self, mount: SharedMount) -> int:
        """Return the largest quota of a mount's users; 0 for no limit if one of them has none."""
        quotas = [record.quota_bytes for record in self._records.of(mount) if record.used]
        return max(quotas, default=0) if all(quotas) else 0

    def _when_free(self, mount: SharedMount, timeout_s: float) -> Health:
        """Return the health of an absent mount once nobody works on its staging area, or once it is back: a killed
        server may get a successor this moment. UNAVAILABLE where that goes on."""
        deadline = time.monotonic() + timeout_s
        while True:
            health = self.health(self.point(mount))
            found = areas(self._staged(mount).staging_root)
            if not any(area.locked for area in found if area.bucket_url == mount.source) or health is not Health.ABSENT:
                return health
            if time.monotonic() > deadline:
                raise unavailable(f"{mount.source}: another process uploads what was written to it")
            time.sleep(0.1)

    def _staged(self, mount: SharedMount) -> Settings:
        staging = mount.options["staging"]
        return replace(self._settings, staging=Path(staging)) if staging else self._settings

    def _make(self, mount: SharedMount, point: str) -> None:
        if not mount.bucket:
            binds.clear(point)  # what is dead
            # Who uses it has a record, which was written after the catalog had said that this is a snapshot of this
            # name.
            fuse_mount.mount_snapshot(mount.source, point, settings=self._settings, allow_other=True, given=True)
            return
        direct = self._secrets.has_any(mount)
        # Where a volume brought credentials along, its bucket is not mounted with the driver's own.
        if not direct and any(record.credentials for record in self._records.of(mount)):
            raise unauthenticated(f"the credentials that opened {mount.source} are not on this node")
        staging = Path(mount.options["staging"]) if mount.options["staging"] else None
        options = mount.options | {"staging": staging, "quota_bytes": self._quota_of(mount), "direct": direct}
        credentials = self._secrets.folder(mount)
        fuse_mount.mount_bucket(
            mount.source, point, settings=self._settings, allow_other=True, credentials=credentials, **options
        )

    def _end_bucket(self, info: fuse_mount.BucketInfo) -> None:
        left: dict[str, Any] = {}
        try:
            left = fuse_mount.stop_server(info, flush_s=_STOP_FLUSH_S, lazy=False)
        except MountError as exc:
            _log.warning("%s: %s", info.url, exc)
            with contextlib.suppress(MountError):
                fuse_mount.take_away_dead(info)
        if left.get("files"):
            _log.warning("%s: %s files are left for when it is mounted again", info.url, left["files"])
        elif left.get("files") == 0:
            try:
                discard_clean(Path(info.staging))
            except OSError as exc:
                _log.warning("the staging area %s stays: %s", info.staging, exc)
