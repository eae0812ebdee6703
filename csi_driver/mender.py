"""Notices mounts whose processes are all gone, mounts anew, and shows that over what is dead.

Two threads of `NodeService`: one mends, one releases, so that a store that is away holds no mending up. Of several
drivers of a home one does each at a time. A new bind on top of a dead one reaches
running pods whose volume mount has `mountPropagation: HostToContainer`; the others have to be started again, which the
volume's condition says. It also finishes what a killed driver left, and what could not be released at first. Nothing it
asks is waited for without end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from csi_driver import binds
from csi_driver.metrics import COUNTS
from csi_driver.mounts import Health, SharedMounts
from csi_driver.preparation import Preparation
from csi_driver.records import NodeVolume, Records, SharedMount, Target
from csi_driver.status import RequestError
from datacache.core.errors import DatacacheError

EVERY_S = 2.0
_FLUSH_S = 1.0
_JOIN_S = 5.0
_AT_A_TIME = 8
"""Mounts that are looked at and mended at a time."""
_MAX_WAIT_S = 60.0
"""How long it is waited, at most, before a release that failed is tried again."""

_log = logging.getLogger("csi_driver")


class Mender:
    """Mends the mounts of one home."""

    def __init__(self, records: Records, mounts: SharedMounts, preparation: Preparation) -> None:
        self._records, self._mounts, self._preparation = records, mounts, preparation
        self._ending = threading.Event()
        self._wait_s: dict[str, float] = {}  # the tidying thread's: volume → until it is tried again
        self._tidied_at: dict[str, float] = {}
        works = {"mender": self.mend, "tidier": self.tidy}
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True) for name, work in works.items()
        ]

    def start(self) -> None:
        """Look at once, and then again and again."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads."""
        self._ending.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_JOIN_S)

    def mend(self, *, first: bool = False) -> None:
        """Mend the mounts that are dead now."""
        del first
        with self._records.lock_work("mender"):
            shared: dict[str, list[NodeVolume]] = {}
            for record in self._records.all():
                if record.used:
                    shared.setdefault(record.mount.key, []).append(record)
            # One that hangs or whose store is away is not to keep the others' pods waiting.
            mounts = list(shared.values())
            works = [
                threading.Thread(target=self._mend_all, args=(mounts[at::_AT_A_TIME],), name=f"mends {at}", daemon=True)
                for at in range(min(_AT_A_TIME, len(mounts)))
            ]
            for work in works:
                work.start()
            for work in works:
                work.join()

    def tidy(self, *, first: bool = False) -> None:
        """Release what nothing uses and what could not be released before. `first`: also what a driver that was killed
        left, or a node that was started again."""
        with self._records.lock_work("tidier"):
            records = self._records.all()
            for record in records:
                if first or not record.used:
                    self._guarded(self._tidy, record)
            if first:
                self._guarded(self._preparation.forget_strays)

    def _run(self, work: Callable[..., None]) -> None:
        first = True
        while True:
            try:
                work(first=first)
                first = False
            except RequestError:  # another driver does it
                pass
            except Exception:  # noqa: BLE001 - it is the last one that could tell
                _log.exception("mounts could not be looked after")
            if self._ending.wait(EVERY_S):
                return

    def _guarded(self, function: object, *arguments: object) -> None:
        assert callable(function)
        try:
            function(*arguments)
        except RequestError as exc:
            _log.debug("later: %s", exc)
        except (DatacacheError, OSError) as exc:
            _log.warning("%s", exc)

    # --- leftovers ----------------------------------------------------------------------------------------------

    def _tidy(self, record: NodeVolume) -> None:
        wait_s = self._wait_s.get(record.volume_id, 0.0)
        if time.monotonic() < self._tidied_at.get(record.volume_id, 0.0) + wait_s:
            return
        with self._records.lock(record.volume_id, timeout_s=0.0):
            now = self._records.get(record.volume_id)
            if now is None:
                return
            if now.used:
                targets = tuple(target for target in now.targets if binds.top_at(target.path) is not None)
                if targets or self._is_staged(now):
                    if targets != now.targets:
                        self._records.put(replace(now, targets=targets))
                    return
                _log.info("volume %s is not mounted anywhere any more", now.volume_id)
            self._wait_s[now.volume_id] = min(max(2 * wait_s, EVERY_S), _MAX_WAIT_S)
            try:
                self._preparation.release(now, flush_s=_FLUSH_S)
            finally:
                self._tidied_at[now.volume_id] = time.monotonic()
            if self._records.get(now.volume_id) is None:
                del self._wait_s[now.volume_id], self._tidied_at[now.volume_id]

    def _is_staged(self, record: NodeVolume) -> bool:
        """Whether a kubelet can still know of it: it removes the staging path afterwards, and a node that was started
        again has no mounts."""
        return bool(record.staging) and os.path.isdir(record.staging) and self._mounts.device(record.mount) is not None

    def _mend_all(self, mounts: list[list[NodeVolume]]) -> None:
        for volumes in mounts:
            try:
                self._guarded(self._mend, volumes[0].mount, volumes)
            except Exception:  # noqa: BLE001 - the others are mended all the same
                _log.exception("%s could not be looked after", volumes[0].mount.source)

    # --- mending ------------------------------------------------------------------------------------------------

    def _mend(self, mount: SharedMount, volumes: list[NodeVolume]) -> None:
        targets = [target.path for volume in volumes for target in volume.targets]
        if all(binds.top_at(path) is None for path in targets):
            return  # no pod sees it; whoever publishes it next mounts it
        health = self._mounts.health(self._mounts.point(mount))
        if health is Health.SLOW:
            return
        if health in (Health.DEAD, Health.ABSENT):
            _log.warning("%s: %s; it is mounted anew", mount.source, health.value)
            self._preparation.mount(volumes[0])
            COUNTS.mended()
        device = self._mounts.device(mount)
        for volume in volumes:
            if any(self._is_other(target.path, device) for target in volume.targets):
                with self._records.lock(volume.volume_id, timeout_s=1.0):
                    self._show_again(volume.volume_id, device)

    def _show_again(self, volume_id: str, device: int | None) -> None:
        record = self._records.get(volume_id)
        if record is None or device is None:
            return
        words = (
            f"{record.mount.source} was mounted anew at {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}, as all of its "
            "processes had ended: pods that mount it without mountPropagation: HostToContainer have to be started again"
        )
        for target in record.targets:
            if self._is_other(target.path, device):
                record = self._show_target_again(record, replace(target, mended=words))

    def _show_target_again(self, record: NodeVolume, target: Target) -> NodeVolume:
        self._mounts.bind(record, target.path, record.spec.subpath, read_only=target.read_only, noexec=target.noexec)
        _log.warning("volume %s is shown anew at %s", record.volume_id, target.path)
        record = record.with_target(target)
        self._records.put(record)
        return record

    @staticmethod
    def _is_other(path: str, device: int | None) -> bool:
        there = binds.top_at(path)
        return there is not None and there.device != device
