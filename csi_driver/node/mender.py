"""Notices mounts whose processes are all gone, mounts anew, and shows that over what is dead.

Threads of `NodeService`: one mends, one releases, so that a store that is away holds no mending up, and one writes
Events. Of several drivers of a home one does each at a time. A new bind on top of a dead one reaches
running pods whose volume mount has `mountPropagation: HostToContainer`; the others have to be started again, which the
volume's condition says, and an Event on the pod. It also finishes what a killed driver left, and what could not be
released at first. Nothing it asks is waited for without end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from csi_driver.kube import KubeApi, Pod
from csi_driver.metrics import COUNTS
from csi_driver.node import binds
from csi_driver.node.mounts import Health, SharedMounts
from csi_driver.node.preparation import Preparation
from csi_driver.node.records import NodeVolume, Records, SharedMount
from csi_driver.status import RequestError
from datacache.core.breaker import pause_s
from datacache.core.errors import DatacacheError
from fuse_mount import Mount

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

    def __init__(
        self, records: Records, mounts: SharedMounts, preparation: Preparation, api: KubeApi | None = None
    ) -> None:
        """Take `api`, which tells each pod by an Event that its volume was lost and mounted anew."""
        self._records, self._mounts, self._preparation, self._api = records, mounts, preparation, api
        self._ending = threading.Event()
        self._failures, self._silent_until = 0, 0.0
        """The teller's: how often in a row an Event could not be written, and until when none is tried."""
        self._later: dict[str, tuple[float, float]] = {}
        """The tidying thread's: for how long a volume is left alone that could not be released, and until when."""
        works = (lambda _first: self.mend(), lambda first: self.tidy(first=first), lambda _first: self.tell())
        self._threads = [threading.Thread(target=self._run, args=(work,), daemon=True) for work in works]

    def start(self) -> None:
        """Look at once, and then every `EVERY_S`."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads."""
        self._ending.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_JOIN_S)

    def mend(self) -> None:
        """Mend the mounts that are dead now."""
        with self._records.lock_work("mender"):
            shared: dict[str, list[NodeVolume]] = {}
            for record in self._records.all():
                if record.used and not record.resting:
                    shared.setdefault(record.mount.key, []).append(record)
            # One that hangs or whose store is away is not to keep the others' pods waiting.
            mounts, tops = list(shared.values()), binds.tops()
            parts = [mounts[at::_AT_A_TIME] for at in range(min(_AT_A_TIME, len(mounts)))]
            works = [threading.Thread(target=self._mend_all, args=(part, tops), daemon=True) for part in parts]
            for work in works:
                work.start()
            for work in works:
                work.join()

    def tidy(self, *, first: bool = False) -> None:
        """Release unused volumes, and those that could not be released before. The `first` time also release what a
        killed driver or a restarted node left."""
        with self._records.lock_work("tidier"):
            records = self._records.all()
            there = {record.volume_id for record in records}
            self._later = {volume_id: later for volume_id, later in self._later.items() if volume_id in there}
            for record in records:
                if first or not record.used:
                    self._guarded(self._tidy, record)
            if first:
                self._guarded(self._preparation.forget_strays)

    def tell(self) -> None:
        """Write an Event on each pod whose volume was mounted anew, until it is written."""
        if self._api is None or time.monotonic() < self._silent_until:
            return
        with self._records.lock_work("teller"):
            for record in self._records.all():
                for target in record.targets:
                    if not target.mended or target.told or not target.pod:
                        continue
                    if not self._api.warn(Pod(**target.pod), "VolumeMountedAnew", target.mended):
                        self._failures += 1
                        wait_s = pause_s(self._failures, first_s=EVERY_S, longest_s=_MAX_WAIT_S)
                        self._silent_until = time.monotonic() + wait_s
                        return
                    self._failures = 0
                    with self._records.lock(record.volume_id, timeout_s=1.0):
                        now = self._records.get(record.volume_id)
                        there = None if now is None else now.target(target.path)
                        if now is not None and there is not None and there.mended == target.mended:
                            self._records.put(now.with_target(replace(there, told=True)))

    def _run(self, work: Callable[[bool], None]) -> None:
        first = True
        while True:
            try:
                work(first)
                first = False
            except RequestError:  # another driver does it
                pass
            except Exception:  # noqa: BLE001 - it is the last one that could tell
                _log.exception("mounts could not be looked after")
            if self._ending.wait(EVERY_S):
                return

    def _guarded(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except RequestError as exc:
            _log.debug("later: %s", exc)
        except (DatacacheError, OSError) as exc:
            _log.warning("%s", exc)

    # --- leftovers ----------------------------------------------------------------------------------------------

    def _tidy(self, record: NodeVolume) -> None:
        wait_s, until = self._later.get(record.volume_id, (0.0, 0.0))
        if time.monotonic() < until:
            return
        with self._records.lock(record.volume_id, timeout_s=0.0):
            now = self._records.get(record.volume_id)
            if now is None:
                return
            if now.used:
                self._later.pop(now.volume_id, None)
                targets = tuple(target for target in now.targets if binds.top_at(target.path) is not None)
                # A kubelet removes the staging path in the end, and a restarted node has no mounts. A resting volume
                # has none either, and may be published at any time.
                mounted = now.resting or self._mounts.device(now.mount) is not None
                if targets or (now.staging and os.path.isdir(now.staging) and mounted):
                    if targets != now.targets:
                        self._records.put(replace(now, targets=targets))
                    return
                _log.info("volume %s is not mounted anywhere any more", now.volume_id)
            try:
                self._preparation.release(now, flush_s=_FLUSH_S)
            finally:
                wait_s = min(max(2 * wait_s, EVERY_S), _MAX_WAIT_S)
                self._later[now.volume_id] = wait_s, time.monotonic() + wait_s

    def _mend_all(self, mounts: list[list[NodeVolume]], tops: Mapping[str, Mount]) -> None:
        for volumes in mounts:
            try:
                self._guarded(self._mend, volumes[0].mount, volumes, tops)
            except Exception:  # noqa: BLE001 - the others are mended all the same
                _log.exception("%s could not be looked after", volumes[0].mount.source)

    # --- mending ------------------------------------------------------------------------------------------------

    def _mend(self, mount: SharedMount, volumes: list[NodeVolume], tops: Mapping[str, Mount]) -> None:
        if not any(target.path in tops for volume in volumes for target in volume.targets):
            return  # no pod sees it; whoever publishes it next mounts it
        point = self._mounts.point(mount)
        health = self._mounts.health(point, tops)
        if health in (Health.DEAD, Health.ABSENT):
            _, made = self._preparation.mount(volumes[0])
            if made:
                COUNTS.mended()
                _log.warning("%s: %s; it was mounted anew", mount.source, health.value)
            tops = binds.tops()
        elif health is not Health.ALIVE:
            return
        device = tops[point].device if point in tops else None
        for volume in volumes:
            if any(_is_other(tops.get(target.path), device) for target in volume.targets):
                with self._records.lock(volume.volume_id, timeout_s=1.0):
                    self._show_again(volume.volume_id)

    def _show_again(self, volume_id: str) -> None:
        record = self._records.get(volume_id)
        device = None if record is None else self._mounts.device(record.mount)  # with the lock, as it is by now
        if record is None or device is None:
            return
        words = (
            f"{record.mount.source} was mounted anew at {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}, as all of its "
            "processes had ended: pods that mount it without mountPropagation: HostToContainer have to be started again"
        )  # said by the volume's condition, and by an Event on each pod (`tell`)
        for target in record.targets:
            if _is_other(binds.top_at(target.path), device):
                self._mounts.bind(record, target)
                _log.warning("volume %s is shown anew at %s", volume_id, target.path)
                record = self._records.put(record.with_target(replace(target, mended=words, told=False)))


def _is_other(there: Mount | None, device: int | None) -> bool:
    """Tell whether something is mounted that is not of the mount with this st_dev."""
    return there is not None and there.device != device
