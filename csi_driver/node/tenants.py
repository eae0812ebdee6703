"""The namespaces that have volumes on this node: the daemon is told of them and their quotas, and the catalog of what
they have here. What exceeds a quota on this node is refused.

Used by `service` and `preparation`. Which namespace has what is in the volumes' records. One thread, which looks at the
catalog's quotas every `EVERY_S`; the daemon keeps what it was told, so its own restart needs nobody. A catalog or
daemon that is away is asked again, and holds nobody up. Any thread may call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import closing

from csi_driver.node.mounts import SharedMounts
from csi_driver.node.records import NodeVolume, Records, SharedMount
from csi_driver.quotas import check_pin_size, check_staging
from csi_driver.volume_records import dataset_specs
from datacache.api import open_catalog, running_daemon
from datacache.catalog.quotas import NodeUse, read_quotas, report_use
from datacache.core.concurrency import RepeatedCall
from datacache.core.errors import CatalogUnavailableError, DatacacheError
from datacache.settings import Settings
from datacache.store.clock import elapsed_s

EVERY_S = 10.0
_REPORT_EVERY_S = 60.0
_REPORT_ANYWAY_S = 300.0
_MARGIN = 0.01
"""A change of what namespaces have by less than this part is not worth a report."""
_JOIN_S = 5.0
_log = logging.getLogger("csi_driver")


class NodeTenants:
    """The namespaces of one node."""

    def __init__(self, settings: Settings, node_id: str, records: Records, mounts: SharedMounts) -> None:
        self._settings, self._node_id, self._records, self._mounts = settings, node_id, records, mounts
        self._limits: dict[str, int | None] | None = None
        """As the catalog said last; None before."""
        self._claims: dict[str, set[str]] = {}
        """The namespaces with a claim anywhere to data sets of which each node keeps a part for all."""
        self._reported: NodeUse | None = None
        self._reported_at_s = 0.0
        self._report_at_s = 0.0
        self._troubles: dict[str, str] = {}
        self._telling = threading.Lock()
        """Held while the daemon is told, so that of two messages the later one says what is true later."""
        trouble = "what namespaces have of this node is not written down"
        self._looks = RepeatedCall("tenants", self._look, EVERY_S, trouble=trouble, log=_log)

    def start(self) -> None:
        """Tell the daemon now, and then every `EVERY_S`."""
        self._looks.start()

    def close(self) -> None:
        """End the thread."""
        self._looks.stop(_JOIN_S)

    def read_quotas(self) -> None:
        """Take the quotas from the catalog. The catalog's errors; then those from before hold."""
        with closing(open_catalog(self._settings)) as catalog:
            own = read_quotas(catalog).own
        self._limits = {name: quota.cache_bytes for name, quota in own.items() if "cache" in quota.said}

    def read_claims(self) -> None:
        """Take from the catalog who has claims to data sets that a cluster of caches has in the mode `partition`: this
        node keeps a part of them for pods of other nodes, too. The catalog's errors; then those from before hold."""
        if not self._settings.cluster or not any(mode == "partition" for _, mode in self._settings.cluster_mode):
            return
        claims: dict[str, set[str]] = {}
        with closing(open_catalog(self._settings)) as catalog:
            for spec in dataset_specs(catalog):
                if spec.namespace and self._settings.mode_of(spec.ref.dataset) == "partition":
                    claims.setdefault(spec.ref.dataset, set()).add(spec.namespace)
        self._claims = claims

    def tell(self) -> None:
        """Tell the daemon, if it runs, which namespaces have which data sets, and their limits."""
        with self._telling:
            users = {dataset: set(names) for dataset, names in self._claims.items()}
            for record in self._records.all():
                if record.used and record.spec.dataset:
                    users.setdefault(record.spec.ref.dataset, set()).update(record.namespaces)
            try:
                daemon = running_daemon(self._settings)
                if daemon is not None:
                    daemon.set_tenants(self._limits, {name: sorted(names) for name, names in users.items() if names})
                self._note("")
            except (DatacacheError, OSError) as exc:
                self._note(f"the daemon does not know which namespaces have which data sets: {exc}")

    def report(self) -> None:
        """Write down in the catalog what namespaces have of this node, if that has changed. The errors of both."""
        use = NodeUse(node=self._node_id, cache_bytes=self._cached(), staged_bytes=self._staged_bytes())
        before, now_s = self._reported, elapsed_s()
        if before is not None and now_s - self._reported_at_s < _REPORT_ANYWAY_S and not _differ(before, use):
            return
        with closing(open_catalog(self._settings)) as catalog:
            report_use(catalog, use)
        self._reported, self._reported_at_s = use, now_s

    def check_pin(self, record: NodeVolume) -> None:
        """Raise PERMISSION_DENIED if a volume's pin is beyond what its namespaces may have of the cache."""
        with closing(open_catalog(self._settings)) as catalog:

            def size_bytes(mount: SharedMount) -> int:
                name, _, id = mount.source.partition("@")
                snapshot = catalog.snapshot(name, id)
                return 0 if snapshot is None else snapshot.total_bytes

            for namespace in sorted(record.namespaces):
                pinned = {
                    other.mount.source: other.mount
                    for other in self._records.all()
                    if other.pinned and namespace in other.namespaces and other.mount != record.mount
                }
                already = sum(map(size_bytes, pinned.values()))
                check_pin_size(catalog, namespace, str(record.spec.ref), size_bytes(record.mount), already)

    def check_staging(self, volume_id: str, namespace: str, size_bytes: int) -> None:
        """Raise unless a bucket volume that nobody provisioned fits the staging quota of its namespace: an inline one
        has no size, one of a PV by hand that of its attribute `quota`. While the catalog is away it does."""
        here = sum(
            other.quota_bytes
            for other in self._records.all()
            if other.volume_id != volume_id and other.spec.bucket and not other.spec.namespace
            if namespace in other.namespaces
        )
        try:
            with closing(open_catalog(self._settings)) as catalog:
                check_staging(catalog, namespace, size_bytes, besides_bytes=here)
        except CatalogUnavailableError as exc:
            _log.warning("volume %s is published without a look at its namespace's quota: %s", volume_id, exc)

    def _cached(self) -> dict[str, int]:
        daemon = running_daemon(self._settings)
        found = [] if daemon is None else daemon.cache_status().get("namespaces", [])
        return {each["name"]: each["ssd_bytes"] for each in found if each["ssd_bytes"]}

    def _staged_bytes(self) -> dict[str, int]:
        """Return what is not uploaded yet by namespace; of a mount that several share each has an equal part."""
        users: dict[str, tuple[SharedMount, set[str]]] = {}
        for record in self._records.all():
            if record.used and record.mount.bucket:
                users.setdefault(record.mount.key, (record.mount, set()))[1].update(record.namespaces)
        found: dict[str, int] = {}
        for mount, names in users.values():
            staged = self._mounts.staged_bytes(mount) if names else 0
            for name in names if staged else ():
                found[name] = found.get(name, 0) + staged // len(names)
        return found

    def _look(self) -> None:
        reports = elapsed_s() >= self._report_at_s
        try:
            self.read_quotas()
            if reports:
                self.read_claims()
        except DatacacheError as exc:
            self._note(f"quotas are as they were: {exc}", about="quotas")
        else:
            self._note("", about="quotas")
        self.tell()
        if reports:
            self._report_at_s = elapsed_s() + _REPORT_EVERY_S
            self.report()

    def _note(self, trouble: str, *, about: str = "daemon") -> None:
        """Log trouble once for as long as it stays the same."""
        if trouble and trouble != self._troubles.get(about):
            _log.warning("%s", trouble)
        self._troubles[about] = trouble


def _differ(before: NodeUse, now: NodeUse) -> bool:
    def differs(old: Mapping[str, int], new: Mapping[str, int]) -> bool:
        return old.keys() != new.keys() or any(abs(new[name] - old[name]) > _MARGIN * old[name] for name in new)

    return differs(before.cache_bytes, now.cache_bytes) or differs(before.staged_bytes, now.staged_bytes)
