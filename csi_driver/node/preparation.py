"""Prepare a volume on a node before it is shown, and undo that when nothing shows it any more.

Used by `node`, with the volume's lock held, and by `mender`. In order: which snapshot it is, whether it may be had,
credentials, the shared mount, pin and warm-up. The record is written before each; every step can be made again. Any
thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

import grpc

from csi_driver import volume_records
from csi_driver.node.mounts import SharedMounts
from csi_driver.node.records import NodeVolume, Records, SharedMount
from csi_driver.node.store_secrets import EndpointTurns, StoreSecrets
from csi_driver.node.tenants import NodeTenants
from csi_driver.resolve import BucketRules, check_open, check_sources, find_snapshot
from csi_driver.server import DEADLINE
from csi_driver.status import RequestError, denied, precondition, unauthenticated, unavailable
from csi_driver.volumes import MountOptions, VolumeSpec
from datacache.api import DaemonClient, connect, open_catalog, unpin
from datacache.catalog.refs import volume_snapshot
from datacache.core.errors import CatalogUnavailableError, DaemonError, DatacacheError, SnapshotNotFoundError
from datacache.manifest.reader import Manifest
from datacache.settings import Settings

FLUSH_S = 20.0
"""How long the end of a bucket's last volume waits for uploads before the kubelet has to ask again."""
_WARM_S = 100.0
"""How long one call waits for a warm-up: a kubelet gives up after 2 minutes, and asks again."""
_WAITING = 24
"""How many calls wait for warm-ups at a time, so that the others find a thread; see `server.THREADS`."""
_MARGIN_S = 5.0
_ASK_AGAIN_S = 0.2
_OTHERS_LOCK_S = 2.0
"""Short: two volumes may each wait for the other's lock, and then both callers ask again."""

_log = logging.getLogger("csi_driver")


class NotYetError(RequestError):
    """The volume is being prepared. What was done so far stays for the next call."""


class Preparation:
    """Prepares and releases the volumes of one home."""

    def __init__(
        self,
        settings: Settings,
        records: Records,
        mounts: SharedMounts,
        secrets: StoreSecrets,
        rules: BucketRules,
        *,
        tenants: NodeTenants,
    ) -> None:
        self._settings, self._records, self._mounts, self._rules = settings, records, mounts, rules
        self._secrets, self._tenants = secrets, tenants
        self._waiting = threading.BoundedSemaphore(_WAITING)
        self._turns = EndpointTurns()
        self._pinning = threading.Lock()
        """From looking at what a namespace pins until a pin is noted: else two volumes at once pass as one."""
        self.flush_s = FLUSH_S

    # --- what it is, and who may have it ------------------------------------------------------------------------

    def resolved(
        self, volume_id: str, spec: VolumeSpec, *, inline: bool, namespace: str = "", before: NodeVolume | None = None
    ) -> VolumeSpec:
        """Return the volume with its snapshot's id, which the catalog must have under the volume's name: access is
        asked for by name, so a volume cannot bring an id of its own.

        A reference is resolved once: an inline volume's by its node, a static one's by the first node, which
        writes it down in the catalog. So a snapshot that was removed since still goes to a volume that it was
        given to: by `before` (this node's record), the controller's record, or the static volume's. `namespace`
        decides what the error about a missing snapshot may tell.
        """
        if spec.bucket or (before is not None and before.used and before.context == spec.context()):
            return spec
        with closing(open_catalog(self._settings)) as catalog:
            if spec.asked and spec.ref.is_whole_id:
                given = volume_records.is_provisioned(catalog, volume_id, spec)
                if given or catalog.snapshot(*spec.ref) is not None:
                    return spec

            def now() -> str:
                record = find_snapshot(catalog, spec.ref, namespace, default=self._settings.access)
                return f"{record.dataset}@{record.id}"

            dataset = now() if inline else volume_snapshot(catalog, volume_id, spec.dataset, now)
            return spec if dataset == spec.dataset else spec.resolved(dataset)

    def check_namespace(
        self, volume_id: str, spec: VolumeSpec, namespace: str, *, inline: bool, secrets: Mapping[str, str]
    ) -> None:
        """Raise PERMISSION_DENIED unless pods of a namespace ('': not known) may have the volume. While the catalog is
        away, a namespace keeps what the controller provisioned for it, by what this node has read of the record."""
        owner = "" if inline else spec.namespace  # whoever writes a pod could claim anything
        if owner and namespace and owner != namespace:
            raise denied(f"the volume was provisioned for namespace {owner}, not for {namespace}")
        namespace = namespace or owner
        if spec.bucket:
            if inline and not (secrets and spec.takes_secret) and not self._rules.allow(spec.bucket, namespace):
                raise denied(
                    f"bucket {spec.bucket} is not open to inline volumes without a Secret (nodePublishSecretRef); "
                    f"{self._rules.describe(namespace)}"
                )
            return
        with closing(open_catalog(self._settings)) as catalog:
            try:
                hint = "The CSIDriver object needs podInfoOnMount: true."
                check_open(catalog, spec.ref.dataset, namespace, default=self._settings.access, unknown=hint)
            except CatalogUnavailableError:
                if not owner or not volume_records.is_provisioned(catalog, volume_id, spec):
                    raise

    # --- credentials, mount, pin, warm-up -----------------------------------------------------------------------

    def prepare(self, record: NodeVolume, secrets: Mapping[str, str]) -> NodeVolume:
        """Do everything but show the volume, and return its new record. `NotYetError` where the caller has to ask
        again."""
        end = min(time.monotonic() + _WARM_S, DEADLINE.get() - _MARGIN_S)
        if not record.mount.bucket and self._mounts.device(record.mount) is None:
            with closing(open_catalog(self._settings)) as catalog:
                check_sources(catalog, record.spec.ref.version, record.spec.ref, self._settings)
        record = self._take_secrets(record, secrets)
        record, made = self.mount(record)
        if not made and record.mount.bucket:
            self._mounts.renew_quota(record.mount)
        if not record.mount.bucket:
            self._tenants.tell()  # before anything of it is fetched
        record = self._pin(record)
        self._warm(record, end)
        return record

    def mount(self, record: NodeVolume) -> tuple[NodeVolume, bool]:
        """Make the shared mount, with the quota of its users. Return the new record, and whether the mount is new."""
        self._check_others(record, {})
        if record.resting:
            record = self._records.put(replace(record, resting=False))
        with self._turn(record, asks=self._mounts.device(record.mount) is None):
            return record, self._mounts.ensure(record.mount)

    def _turn(self, record: NodeVolume, *, asks: bool = True) -> contextlib.AbstractContextManager[None]:
        """Hold a turn to wait for a bucket's endpoint, if a Secret may name that endpoint and `asks` is true."""
        named = record.mount.bucket and record.credentials and not record.inline  # an inline volume's cannot
        return self._turns.take(record.spec.namespace) if named and asks else contextlib.nullcontext()

    def quota_of(self, volume_id: str, spec: VolumeSpec) -> int:
        """Return how many bytes a volume may hold by now."""
        if spec.read_only:
            return 0
        try:
            with closing(open_catalog(self._settings)) as catalog:
                return volume_records.quota_of(catalog, volume_id, spec)
        except DatacacheError as exc:
            _log.warning("the quota of volume %s is as it was provisioned: %s", volume_id, exc)
            return spec.quota_bytes

    def expand(self, record: NodeVolume, quota_bytes: int) -> None:
        """Let a bucket volume hold this much, unless it already may. A volume without a quota gets none."""
        if 0 < record.quota_bytes < quota_bytes:
            self._records.put(replace(record, quota_bytes=quota_bytes))
        self._mounts.renew_quota(record.mount)

    def move(self, record: NodeVolume, mount: SharedMount) -> NodeVolume:
        """Give a staged bucket volume that no pod sees another mount: the same bucket with other options. What was
        written is uploaded first; UNAVAILABLE until it is."""
        if not record.resting and not any(other.used for other in self._others_of(record)):
            with self._turn(record):
                self._mounts.flush(record.mount, timeout_s=self.flush_s, unmounted_too=True)
        left = record.mount
        self._secrets.move(record, mount)  # before the record: after a kill in between it is made again
        record = self._records.put(replace(record, mount=mount, resting=True))
        self._mounts.end(left)
        self._secrets.drop_of_mount(record, left)
        return record

    def _others_of(self, record: NodeVolume) -> list[NodeVolume]:
        """Return the other volumes of a volume's mount."""
        return [other for other in self._records.of(record.mount) if other.volume_id != record.volume_id]

    def _check_others(self, record: NodeVolume, secrets: Mapping[str, str]) -> None:
        """Check that a bucket's other volumes agree with this one: one staging area has one mount, and pods that have
        it decide its options and credentials. A mount that no pod has gives way."""
        in_the_way: dict[str, SharedMount] = {}
        for other in self._records.all() if record.mount.bucket else ():
            if other.volume_id == record.volume_id or other.mount.source != record.mount.source:
                continue
            if other.used and other.mount != record.mount:
                if not other.resting and record.mount.options["staging"] == other.mount.options["staging"]:
                    in_the_way[other.mount.key] = other.mount
            # One that is no longer used, too, has what it wrote in the staging area until it is uploaded.
            elif other.mount == record.mount and not self._secrets.check_shared(record, other, secrets):
                raise precondition(
                    f"{record.mount.source} is mounted on this node for another volume with other credentials; volumes "
                    "of different namespaces can only share a bucket prefix on a node with the same ones"
                )
        for mount in in_the_way.values():
            self._set_aside(mount, record)

    def _set_aside(self, mount: SharedMount, record: NodeVolume) -> None:
        """Unmount a bucket that no pod sees, for a volume with other options. Its volumes stay staged; the next
        publication mounts it anew. FAILED_PRECONDITION where a pod has it."""
        with contextlib.ExitStack() as stack:
            # With their locks nobody shows one of them meanwhile, and what is read is how it is.
            users = [each.volume_id for each in self._records.of(mount) if each.used]
            for volume_id in users:
                stack.enter_context(self._records.lock(volume_id, timeout_s=_OTHERS_LOCK_S))
            now = [each for each in map(self._records.get, users) if each is not None and each.mount == mount]
            shown = next((each for each in now if each.shown), None)
            if shown is not None:
                raise precondition(
                    f"{record.mount.source} is mounted on this node for pods of {shown.volume_id!r} with "
                    f"{mount.options_unlike(record.mount)}; volumes of the same bucket prefix need the same mount "
                    "options and fsGroup on a node"
                )
            there = self._mounts.device(mount) is not None
            if there or self._mounts.device(record.mount) is None:
                self._mounts.flush(mount, timeout_s=self.flush_s, unmounted_too=True)
            for each in now:
                self._records.put(replace(each, resting=True))
            self._mounts.end(mount)

    def _take_secrets(self, record: NodeVolume, secrets: Mapping[str, str]) -> NodeVolume:
        spec = record.spec
        if spec.credentials == "secret":
            if not spec.takes_secret:
                raise denied(f"bucket {spec.bucket} takes no credentials, so a Secret does not open it")
            if not secrets:
                raise unauthenticated(
                    f"bucket {spec.bucket} may only be mounted with store credentials from a Secret, and none came "
                    "along: see csi.storage.k8s.io/node-stage-secret-name of the StorageClass"
                )
        if not secrets or (spec.bucket and not spec.takes_secret):
            return record
        if spec.bucket:
            if record.mount.options["ack"] == "replicated":
                raise precondition(
                    f"{spec.bucket}: with ack=replicated another node may have to upload, and this volume's Secret is "
                    "on this node alone: take ack=uploaded, or give the nodes credentials for the bucket"
                )
            if self._mounts.device(record.mount) is not None and not self._secrets.has_any(record.mount):
                raise precondition(
                    f"{spec.bucket} is mounted on this node with the driver's own credentials; this volume has others"
                )
            # First the record, then the look at the others': of two at a time at least one sees the other.
            record = self._records.put(replace(record, credentials=True))
            self._check_others(record, secrets)
            with self._turn(record):
                self._secrets.take_for_bucket(record, secrets)
            return record
        with closing(open_catalog(self._settings)) as catalog:
            manifest = Manifest.open(spec.ref.version, catalog.get_blobs)
            taken = self._secrets.take_for_snapshot(record, manifest, secrets)
        return self._records.put(replace(record, credentials=taken))

    def _pin(self, record: NodeVolume) -> NodeVolume:
        spec = record.spec
        if not spec.pin:
            return record
        client = connect(self._settings)
        if not record.pinned:
            with self._pinning:
                self._tenants.check_pin(record)
                pins = client.cache_status()["pins"]
                ours = any(other.pinned for other in self._records.of(record.mount))
                # Somebody's own pin would not be ours to take away.
                if ours or not any(str(spec.ref).startswith(pin) for pin in pins):
                    record = self._records.put(replace(record, pinned=True))
        try:
            client.pin(spec.dataset)  # again, too: a driver that was killed may have noted it and not done it
        except SnapshotNotFoundError as exc:  # removed since the volume was given it
            _log.warning("%s is not pinned: %s", spec.dataset, exc)
        return record

    def _warm(self, record: NodeVolume, end: float) -> None:
        spec = record.spec
        if spec.warm == "false":
            return
        try:
            client = connect(self._settings)
            id = client.warm(spec.dataset)
        except SnapshotNotFoundError as exc:  # removed since the volume was given it
            _log.warning("%s is not warmed: %s", spec.dataset, exc)
            return
        except DaemonError as exc:
            if spec.warm == "wait":
                raise
            _log.warning("%s is not warmed: %s", spec.dataset, exc)
            return
        if spec.warm == "wait":
            waits = self._waiting.acquire(blocking=False)
            try:
                _wait_until_warm(client, spec, id, end if waits else 0.0)
            finally:
                if waits:
                    self._waiting.release()

    # --- the way back -------------------------------------------------------------------------------------------

    def release(self, record: NodeVolume, *, flush_s: float | None = None, unmounted_too: bool = True) -> None:
        """Undo everything that no other volume needs, once nothing shows the volume. UNAVAILABLE while a bucket lacks
        something: the rest stays for the next call. With `unmounted_too`, a bucket that is not mounted (the node was
        restarted) is mounted if something is to be uploaded."""
        record = self._records.put(replace(record, staging="", targets=()))
        others = self._others_of(record)
        if not any(other.used for other in others):
            if not record.resting:
                timeout_s = self.flush_s if flush_s is None else flush_s
                with self._turn(record, asks=timeout_s > 0):
                    self._mounts.flush(record.mount, timeout_s=timeout_s, unmounted_too=unmounted_too)
            self._mounts.end(record.mount)
        if record.pinned and not any(other.pinned for other in others):
            try:
                unpin(record.spec.dataset, self._settings)
            except DaemonError as exc:  # the record stays: it is tried again
                _log.warning("%s stays pinned for now: %s", record.spec.dataset, exc)
                return
        self._secrets.drop(record.volume_id)
        self._records.remove(record.volume_id)

    def forget_strays(self) -> None:
        """Remove mounts and credentials of volumes without a record."""
        if not self._records.complete():
            return
        self._mounts.end_strays()
        for volume_id in sorted(self._secrets.volumes()):
            # Whoever works on it brings its record or takes its credentials away.
            with contextlib.suppress(RequestError), self._records.lock(volume_id, timeout_s=0.0):
                if not self._records.has(volume_id):
                    self._secrets.drop(volume_id)

    def undo(self, volume_id: str) -> None:
        """Call `release` after a failure whose own error is the one to tell."""
        record = self._records.get(volume_id)  # as it is by now: pinned, with credentials
        if record is not None:
            with contextlib.suppress(DatacacheError, RequestError, OSError):
                self.release(record, flush_s=0.0, unmounted_too=False)


def shared_mount(spec: VolumeSpec, options: MountOptions) -> SharedMount:
    """Return the mount that a resolved volume is a part of."""
    if spec.bucket:
        return SharedMount(source=spec.bucket, bucket=True, options=options.of_mount())
    return SharedMount(source=spec.dataset, bucket=False)


def _wait_until_warm(client: DaemonClient, spec: VolumeSpec, id: str, end: float) -> None:
    while True:
        job = client.job(id)
        if job["state"] == "failed":
            raise unavailable(f"{spec.dataset} cannot be warmed: {job['error']}. {job['hint']}")
        if job["state"] != "running":
            if job["state"] == "incomplete":
                _log.warning("%s does not fit into the cache; it is read from the store", spec.dataset)
            return
        if time.monotonic() > end:
            raise NotYetError(
                grpc.StatusCode.UNAVAILABLE,
                f"{spec.dataset} is being warmed, and pods wait for it (warm: wait): {job['bytes_done']:,} of "
                f"{job['bytes_total']:,} bytes are here",
            )
        time.sleep(_ASK_AGAIN_S)
