"""The Node service: a volume at a path, for a kubelet.

    NodeStage     record, `preparation` (access, credentials, shared mount, pin, warm-up)
    NodePublish   bind of the volume, or of a folder of it, to the pod's target path
    NodeUnpublish, NodeUnstage: the same backwards; what is gone already is fine

Nothing is mounted at the staging path: a kubelet does not unstage a volume while the file system that is there is
mounted anywhere else as well (GetDeviceMountRefs), and a shared mount always is. The path stands for the volume.

Everything can be asked again at any time, also after the driver was killed in the middle. The methods are the RPCs;
many threads call them. Mounts outlive this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from csi_driver.kube import KubeApi
from csi_driver.node import binds
from csi_driver.node.mender import Mender
from csi_driver.node.mounts import SharedMounts, SilentMountError
from csi_driver.node.preparation import NotYetError, Preparation, shared_mount
from csi_driver.node.records import NodeVolume, PublishedTarget, Records, SharedMount
from csi_driver.node.store_secrets import StoreSecrets
from csi_driver.node.tenants import NodeTenants
from csi_driver.resolve import BucketRules, check_pin
from csi_driver.status import exists, invalid, not_found, out_of_range, precondition
from csi_driver.volumes import (
    EPHEMERAL,
    POD_NAMES,
    MountOptions,
    VolumeSpec,
    id_of,
    is_single_writer,
    mount_options,
    parse_context,
)
from csi_driver.wire import csi_pb2 as csi
from datacache.core.errors import SettingsError
from datacache.settings import Settings
from fuse_mount import resolved

_LOCK_S = 20.0
_MAX_NODE_ID_BYTES = 256
_MAY_CHANGE = ("mode", "read_only", "noexec")
"""Options that another staging may ask for in another way, beside the mount's own, while no pod has the volume."""


class NodeService:
    """The volumes of one node, whose state is under `<home>/csi`. `rules` name the buckets that inline volumes may
    have; `api` tells pods what befell their volumes."""

    def __init__(
        self, settings: Settings, node_id: str, rules: BucketRules | None = None, api: KubeApi | None = None
    ) -> None:
        if not 0 < len(node_id.encode()) <= _MAX_NODE_ID_BYTES:
            raise SettingsError(f"--node-id: the node's id {node_id!r} has to have 1 to {_MAX_NODE_ID_BYTES} bytes")
        self.node_id, self._settings = node_id, settings
        folder = settings.home / "csi"
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.records = Records(folder)
        secrets = StoreSecrets(settings)
        self._mounts = SharedMounts(settings, self.records, secrets, folder)
        self.tenants = NodeTenants(settings, node_id, self.records, self._mounts)
        self.preparation = Preparation(
            settings, self.records, self._mounts, secrets, rules or BucketRules(), tenants=self.tenants
        )
        self.mender = Mender(self.records, self._mounts, self.preparation, api)

    def start(self) -> None:
        """Clean up what a driver that was killed left, in the background, and mend mounts from then on."""
        self.mender.start()
        self.tenants.start()

    def close(self) -> None:
        """End the threads. No mount is touched."""
        self.mender.close()
        self.tenants.close()

    # --- who we are ---------------------------------------------------------------------------------------------

    def NodeGetInfo(self, _request: csi.NodeGetInfoRequest) -> csi.NodeGetInfoResponse:
        return csi.NodeGetInfoResponse(node_id=self.node_id)

    def NodeGetCapabilities(self, _request: csi.NodeGetCapabilitiesRequest) -> csi.NodeGetCapabilitiesResponse:
        rpc = csi.NodeServiceCapability.RPC
        kinds = [rpc.STAGE_UNSTAGE_VOLUME, rpc.GET_VOLUME_STATS, rpc.EXPAND_VOLUME, rpc.VOLUME_CONDITION]
        kinds += [rpc.SINGLE_NODE_MULTI_WRITER, rpc.VOLUME_MOUNT_GROUP]
        capabilities = [csi.NodeServiceCapability(rpc=rpc(type=kind)) for kind in kinds]
        return csi.NodeGetCapabilitiesResponse(capabilities=capabilities)

    # --- staging ------------------------------------------------------------------------------------------------

    def NodeStageVolume(self, request: csi.NodeStageVolumeRequest) -> csi.NodeStageVolumeResponse:
        volume_id, path = id_of(request), _path(request.staging_target_path, "staging_target_path")
        spec, options = _read_use(request)
        mode = request.volume_capability.access_mode.mode
        with self.records.lock(volume_id, timeout_s=_LOCK_S):
            before = self.records.get(volume_id)
            spec = self.preparation.resolved(volume_id, spec, inline=False, before=before)
            if spec.namespace:  # of others it is known when they are published
                self.preparation.check_namespace(volume_id, spec, "", inline=False, secrets={})
            record = NodeVolume(
                volume_id=volume_id,
                context=spec.context(),
                mount=shared_mount(spec, options),
                mode=mode,
                read_only=options.read_only,
                noexec=options.noexec,
                staging=path,
                quota_bytes=self.preparation.quota_of(volume_id, spec),
            )
            if before is not None and before.used:
                _check_same(before, record, shown=before.shown)
                quota_bytes = max(before.quota_bytes, record.quota_bytes)
                if before.mount != record.mount:
                    before = self.preparation.move(before, record.mount)
                asked = {name: getattr(record, name) for name in _MAY_CHANGE}
                record = replace(before, quota_bytes=quota_bytes, **asked)
            elif before is not None and before.mount == record.mount:  # what an unstaging that did not end has left
                record = replace(record, pinned=before.pinned, credentials=before.credentials)
            self.records.put(record)
            with self._undone_where_it_fails(volume_id, before):
                self.preparation.prepare(record, request.secrets)
        return csi.NodeStageVolumeResponse()

    def NodeUnstageVolume(self, request: csi.NodeUnstageVolumeRequest) -> csi.NodeUnstageVolumeResponse:
        volume_id, path = id_of(request), _path(request.staging_target_path, "staging_target_path")
        with self.records.lock(volume_id, timeout_s=_LOCK_S):
            record = self.records.get(volume_id)
            if record is not None and record.staging in (path, ""):
                mounted = [target.path for target in record.targets if binds.top_at(target.path) is not None]
                if mounted:
                    raise precondition(f"volume {volume_id!r} is still published at {mounted[0]}")
            binds.clear(path)
            if record is not None and record.staging in (path, ""):
                self.preparation.release(record)
        return csi.NodeUnstageVolumeResponse()

    # --- publishing ---------------------------------------------------------------------------------------------

    def NodePublishVolume(self, request: csi.NodePublishVolumeRequest) -> csi.NodePublishVolumeResponse:
        volume_id, path = id_of(request), _path(request.target_path, "target_path")
        inline = request.volume_context.get(EPHEMERAL, "").lower() == "true"
        spec, options = _read_use(request)
        read_only = request.readonly or options.read_only or spec.read_only
        pod = {name: request.volume_context.get(key, "") for name, key in POD_NAMES.items()}
        named = pod if all(pod.values()) else {}
        target = PublishedTarget(path=path, read_only=read_only, noexec=options.noexec, pod=named)
        namespace = pod["namespace"]
        if inline and spec.pin:
            check_pin(self._settings, namespace)
        if inline and spec.quota_bytes:
            raise invalid("quota: an inline volume has none; it is the size of a PVC")
        with self.records.lock(volume_id, timeout_s=_LOCK_S):
            self.preparation.check_namespace(volume_id, spec, namespace, inline=inline, secrets=request.secrets)
            record = self.records.get(volume_id)
            if spec.bucket and (inline or not spec.namespace) and (record is None or record.target(path) is None):
                self.tenants.check_staging(volume_id, namespace, spec.quota_bytes)
            if inline:
                self._publish_inline(request, spec, options, target)
                return csi.NodePublishVolumeResponse()
            staging = _path(request.staging_target_path, "staging_target_path", missing=precondition)
            if record is None or record.staging != staging:
                raise precondition(f"volume {volume_id!r} is not staged at {staging}")
            _check_published(record, spec)
            self._check_target(record, target, single=is_single_writer(request.volume_capability))
            wanted = shared_mount(record.spec, options)
            if wanted != record.mount:
                _check_free(record, wanted)
                record = self.preparation.move(record, wanted)
            record, _ = self.preparation.mount(record)
            self._show(record, target, known=record.target(path))
            if not spec.namespace and spec.dataset:  # of a PV by hand it is known by now
                self.tenants.tell()
        return csi.NodePublishVolumeResponse()

    def _publish_inline(
        self, request: csi.NodePublishVolumeRequest, spec: VolumeSpec, options: MountOptions, target: PublishedTarget
    ) -> None:
        volume_id = request.volume_id
        before = self.records.get(volume_id)
        if before is not None and before.used:
            record = before
            if (spec.dataset or spec.bucket) not in (before.spec.asked, before.spec.dataset, before.spec.bucket):
                raise exists(f"volume {volume_id!r} is published already, and is another one")
            self._check_target(record, target, single=True)
        else:
            spec = replace(spec, namespace="", asked="", credentials="", quota_bytes=0)
            namespace = request.volume_context.get(POD_NAMES["namespace"], "")
            spec = self.preparation.resolved(volume_id, spec, inline=True, namespace=namespace)
            record = NodeVolume(
                volume_id=volume_id,
                context=spec.context(),
                mount=shared_mount(spec, options),
                mode=request.volume_capability.access_mode.mode,
                inline=True,
            )
        known = record.target(target.path)
        record = self.records.put(record.with_target(known or target))
        with self._undone_where_it_fails(volume_id, before):
            record = self.preparation.prepare(record, request.secrets)
            self._show(record, target, known=known)

    @contextmanager
    def _undone_where_it_fails(self, volume_id: str, before: NodeVolume | None) -> Iterator[None]:
        """Undo what was done for a volume that cannot be had, unless it was here `before` the call."""
        try:
            yield
        except NotYetError:
            raise
        except BaseException:
            if before is None or not before.used:  # of an unstaging that could not end yet, it is as it was
                self.preparation.undo(volume_id)
            raise

    def NodeUnpublishVolume(self, request: csi.NodeUnpublishVolumeRequest) -> csi.NodeUnpublishVolumeResponse:
        volume_id, path = id_of(request), _path(request.target_path, "target_path")
        with self.records.lock(volume_id, timeout_s=_LOCK_S):
            binds.clear(path)
            binds.remove_place(path)
            record = self.records.get(volume_id)
            if record is not None:
                if record.target(path) is not None:
                    record = self.records.put(record.without_target(path))
                if record.inline and not record.used:
                    self.preparation.release(record)
        return csi.NodeUnpublishVolumeResponse()

    def _check_target(self, record: NodeVolume, target: PublishedTarget, *, single: bool) -> None:
        known = record.target(target.path)
        if known is not None and (known.read_only, known.noexec) != (target.read_only, target.noexec):
            raise exists(
                f"volume {record.volume_id!r} is published at {target.path} already, "
                f"{'read-only' if known.read_only else 'writable'}"
            )
        others = [other.path for other in record.targets if other.path != target.path]
        used = next((path for path in others if binds.top_at(path) is not None), None)
        if single and used is not None:
            raise precondition(f"volume {record.volume_id!r} is for a single pod, and published at {used} already")

    def _show(self, record: NodeVolume, target: PublishedTarget, *, known: PublishedTarget | None) -> None:
        """Bind at a target, also over this volume's own bind, whose pod may be running. `known` is the target as
        recorded before this call."""
        there = binds.top_at(target.path)
        if known is not None and there is not None:  # what befell it stays true of the pod
            target = replace(target, mended=known.mended, told=known.told)
        self.records.put(record.with_target(target))
        if known is not None and there is not None and there.device == self._mounts.device(record.mount):
            return
        if known is None:
            binds.clear(target.path)
        binds.make_place(target.path)
        self._mounts.bind(record, target)

    # --- how it is ----------------------------------------------------------------------------------------------

    def NodeGetVolumeStats(self, request: csi.NodeGetVolumeStatsRequest) -> csi.NodeGetVolumeStatsResponse:
        volume_id, path = id_of(request), _path(request.volume_path, "volume_path")
        record = self._at(volume_id, path)
        target = record.target(path)
        try:
            facts = self._mounts.usage(path if target else self._mounts.point(record.mount))
        except SilentMountError as exc:
            return csi.NodeGetVolumeStatsResponse(
                volume_condition=csi.VolumeCondition(abnormal=True, message=f"{record.mount.source}: {exc}")
            )
        mended = target.mended if target else ""
        size, unit = facts.f_frsize, csi.VolumeUsage
        words = "; ".join(filter(None, (mended, self._mounts.trouble(record.mount))))
        condition = csi.VolumeCondition(abnormal=bool(words), message=words or f"{record.mount.source} answers")
        total_bytes, bytes_left, files_left = facts.f_blocks * size, facts.f_bavail * size, facts.f_favail
        used_bytes, used_files = (facts.f_blocks - facts.f_bfree) * size, facts.f_files - facts.f_ffree
        if not record.mount.bucket:
            # A data set cannot fill up. To df it is full, as any read-only file system; alerts on volumes that are
            # about to be full would never end.
            used_bytes, bytes_left, used_files, files_left = 0, total_bytes, 0, facts.f_files
        return csi.NodeGetVolumeStatsResponse(
            usage=[
                unit(unit=unit.BYTES, total=total_bytes, used=used_bytes, available=bytes_left),
                unit(unit=unit.INODES, total=facts.f_files, used=used_files, available=files_left),
            ],
            volume_condition=condition,
        )

    def NodeExpandVolume(self, request: csi.NodeExpandVolumeRequest) -> csi.NodeExpandVolumeResponse:
        volume_id, path = id_of(request), _path(request.volume_path, "volume_path")
        with self.records.lock(volume_id, timeout_s=_LOCK_S):
            record = self._at(volume_id, path)
            if request.HasField("volume_capability"):
                mount_options(request.volume_capability, record.spec)
            wanted, limit = request.capacity_range.required_bytes, request.capacity_range.limit_bytes
            if limit and limit < max(wanted, record.quota_bytes):
                raise out_of_range(
                    f"volume {volume_id!r} may hold {record.quota_bytes:,} bytes and is not made smaller"
                )
            if wanted and not record.spec.read_only:
                self.preparation.expand(record, wanted)
        return csi.NodeExpandVolumeResponse(capacity_bytes=max(wanted, record.quota_bytes))

    def _at(self, volume_id: str, path: str) -> NodeVolume:
        record = self.records.get(volume_id)
        if record is None:
            raise not_found(f"there is no volume {volume_id!r} on this node")
        known = record.target(path) is not None and binds.top_at(path) is not None
        if not known and not (path == record.staging and self._mounts.device(record.mount) is not None):
            raise not_found(f"volume {volume_id!r} is not at {path}")
        return record


def _read_use(request: Any) -> tuple[VolumeSpec, MountOptions]:
    """Return the volume that a request describes, and how it is to be mounted."""
    if not request.HasField("volume_capability"):
        raise invalid("volume_capability is missing")
    spec = parse_context(request.volume_context)
    return spec, mount_options(request.volume_capability, spec)


def _path(path: str, name: str, *, missing: Any = invalid) -> str:
    if not path:
        raise missing(f"{name} is missing")
    if "\0" in path:
        raise invalid(f"{name} is no path")
    return resolved(path)


def _check_same(before: NodeVolume, now: NodeVolume, *, shown: bool) -> None:
    """Raise ALREADY_EXISTS unless a staged volume is staged as this call wants it. While no pod has it, its options may
    change: a restarted kubelet stages it for the next pod, whose fsGroup may differ."""
    if before.inline or before.staging not in ("", now.staging):
        where = "inline" if before.inline else f"staged at {before.staging}"
        raise exists(f"volume {now.volume_id!r} is {where} already")
    different = [name for name in ("mount", *_MAY_CHANGE) if getattr(before, name) != getattr(now, name)]
    if before.context != now.context or before.mount.source != now.mount.source or (shown and different):
        raise exists(
            f"volume {now.volume_id!r} is staged already, and not with this volume_capability and volume_context"
        )


def _check_published(record: NodeVolume, spec: VolumeSpec) -> None:
    """Raise unless the published volume is the one that is staged under its id: two PVs may have one id, and a kubelet
    stages it once."""
    staged = record.spec
    if spec.dataset and spec.dataset == staged.asked:
        spec = spec.resolved(staged.dataset)
    if spec != staged:
        raise precondition(
            f"volume {record.volume_id!r} is staged with other attributes: another PV has its volumeHandle"
        )


def _check_free(record: NodeVolume, wanted: SharedMount) -> None:
    """Raise if a pod has a volume that another pod wants with other options."""
    if not record.shown:
        return
    now, asked = record.mount.options_unlike(wanted), wanted.options_unlike(record.mount)
    raise precondition(
        f"pods of this node use volume {record.volume_id!r} with {now}, and this pod asks for {asked}: pods that share "
        "a bucket volume on a node need the same fsGroup. It is mounted for this pod when the others have ended"
    )
