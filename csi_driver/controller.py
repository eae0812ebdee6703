"""The Controller service: which volume a PVC gets.

CreateVolume decides once: the PVC's annotations over the class's parameters (`volumes`), the reference resolved to
a snapshot's id, access, bucket and subpath checked (`resolve`). What it decided is a record in the catalog under the
volume's id, which follows from the name alone. So the same call again, after a crash or from a second controller, finds
the record and gives the same answer, whatever tags and annotations say by then. DeleteVolume forgets the record; no
object is ever deleted. Any thread; the catalog is the only state.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import grpc

from csi_driver import volume_records
from csi_driver.kube import KubeApi, VolumeClaim
from csi_driver.quotas import check_pin_size, check_staging
from csi_driver.resolve import BucketRules, check_open, check_pin, check_sources, check_subpath, find_snapshot
from csi_driver.status import (
    RequestError,
    aborted,
    denied,
    exists,
    invalid,
    not_found,
    out_of_range,
    precondition,
    status_of,
)
from csi_driver.volume_records import NO_END, VolumeRecord, check_room, room_left
from csi_driver.volumes import (
    CAPACITY,
    KUBERNETES,
    PREFIX,
    PVC_NAME,
    PVC_NAMESPACE,
    Asked,
    VolumeSpec,
    id_of,
    mount_options,
    parse_context,
    read_request,
    volume_id,
)
from csi_driver.wire import csi_pb2 as csi
from datacache.api import open_catalog
from datacache.catalog import refs
from datacache.core.errors import DatacacheError
from datacache.settings import Settings

WRONG_ANNOTATION = "WrongAnnotation"
"""The reason of the Events on PVCs."""
_PEOPLE_CAN_ACT = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.OUT_OF_RANGE)
_NODE_SECRET = f"{KUBERNETES}node-stage-secret-name"


class ControllerService:
    """The Controller service. Its methods are the RPCs."""

    def __init__(self, settings: Settings, api: KubeApi | None, rules: BucketRules) -> None:
        self._settings, self._api, self._rules = settings, api, rules
        self._catalog = open_catalog(settings)
        self._room = threading.Lock()
        """The rest of classes' capacities and namespaces' quotas: from counting it until what is given away is in the
        catalog. The leaders of the provisioner and of the resizer may be in two pods: what these give in the same
        moment is seen by whoever comes next."""

    def close(self) -> None:
        """Close the catalog."""
        self._catalog.close()

    def CreateVolume(self, request: csi.CreateVolumeRequest) -> csi.CreateVolumeResponse:
        if not request.name:
            raise invalid("a volume needs a name")
        if any(not c.isprintable() for c in request.name):
            raise invalid("the volume's name has control characters")
        if not request.volume_capabilities:
            raise invalid(f"volume {request.name!r}: volume_capabilities are missing")
        if request.HasField("volume_content_source"):
            raise invalid("a volume cannot be made from another volume or a VolumeSnapshot: name a data set's snapshot")
        _check_range(request.capacity_range)
        id = volume_id(request.name)
        record = volume_records.read(self._catalog, id)
        if record is None:
            record = self._give(self._decide(request, id))
        _check_same(record, request)
        return csi.CreateVolumeResponse(volume=_volume(record))

    def DeleteVolume(self, request: csi.DeleteVolumeRequest) -> csi.DeleteVolumeResponse:
        volume_records.remove(self._catalog, id_of(request))
        refs.forget_volume(self._catalog, request.volume_id)
        return csi.DeleteVolumeResponse()

    def ValidateVolumeCapabilities(
        self, request: csi.ValidateVolumeCapabilitiesRequest
    ) -> csi.ValidateVolumeCapabilitiesResponse:
        id = id_of(request)
        if not request.volume_capabilities:
            raise invalid(f"volume {id!r}: volume_capabilities are missing")
        record = volume_records.read(self._catalog, id)
        if record is None and not request.volume_context:
            raise _unknown(id)
        # A volume that somebody wrote a PV for by hand is known by its attributes alone.
        spec = parse_context(request.volume_context) if record is None else record.spec
        if record is not None and request.volume_context and parse_context(request.volume_context) != spec:
            return csi.ValidateVolumeCapabilitiesResponse(message="the volume has other attributes")
        try:
            _check_all(request.volume_capabilities, spec)
        except RequestError as exc:
            return csi.ValidateVolumeCapabilitiesResponse(message=exc.message)
        confirmed = csi.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=request.volume_context,
            volume_capabilities=request.volume_capabilities,
            parameters=request.parameters,
        )
        return csi.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)

    def ListVolumes(self, request: csi.ListVolumesRequest) -> csi.ListVolumesResponse:
        if request.max_entries < 0:
            raise invalid(f"max_entries is {request.max_entries}")
        token = request.starting_token
        after = token.partition(".")[2]
        if token and (not after or _token(after) != token):
            raise aborted(f"starting_token {token!r} is none of ours: begin again without one")
        limit = request.max_entries
        found = list(volume_records.records(self._catalog, after=after, limit=limit + 1 if limit else 0))
        shown = found[:limit] if limit else found
        there: dict[str, bool] = {}
        entries = [
            csi.ListVolumesResponse.Entry(
                volume=_volume(record),
                status=csi.ListVolumesResponse.VolumeStatus(volume_condition=self._condition(record, there)),
            )
            for record in shown
        ]
        return csi.ListVolumesResponse(
            entries=entries, next_token=_token(shown[-1].id) if len(found) > len(shown) else ""
        )

    def ControllerGetVolume(self, request: csi.ControllerGetVolumeRequest) -> csi.ControllerGetVolumeResponse:
        record = volume_records.read(self._catalog, id_of(request))
        if record is None:
            raise _unknown(request.volume_id)
        status = csi.ControllerGetVolumeResponse.VolumeStatus(volume_condition=self._condition(record, {}))
        return csi.ControllerGetVolumeResponse(volume=_volume(record), status=status)

    def GetCapacity(self, request: csi.GetCapacityRequest) -> csi.GetCapacityResponse:
        with suppress(RequestError):  # a class that leaves it to annotations, or is wrong: a PVC is told
            spec = read_request(request.parameters, {}, namespace="any", name="any").spec
            try:
                _check_all(request.volume_capabilities, spec)
            except RequestError:
                return csi.GetCapacityResponse(available_capacity=0)
            if spec.read_only:
                return csi.GetCapacityResponse(available_capacity=NO_END)
        return csi.GetCapacityResponse(available_capacity=room_left(self._catalog, request.parameters))

    def ControllerGetCapabilities(
        self, _request: csi.ControllerGetCapabilitiesRequest
    ) -> csi.ControllerGetCapabilitiesResponse:
        rpc = csi.ControllerServiceCapability.RPC
        types = [rpc.CREATE_DELETE_VOLUME, rpc.LIST_VOLUMES, rpc.GET_CAPACITY, rpc.EXPAND_VOLUME]
        types += [rpc.VOLUME_CONDITION, rpc.GET_VOLUME, rpc.SINGLE_NODE_MULTI_WRITER]
        return csi.ControllerGetCapabilitiesResponse(
            capabilities=[csi.ControllerServiceCapability(rpc=rpc(type=type)) for type in types]
        )

    def ControllerExpandVolume(self, request: csi.ControllerExpandVolumeRequest) -> csi.ControllerExpandVolumeResponse:
        id, wanted = id_of(request), request.capacity_range
        if not (wanted.required_bytes or wanted.limit_bytes):
            raise invalid(f"volume {id!r}: capacity_range is missing")
        _check_range(wanted)
        record = volume_records.read(self._catalog, id)
        if record is None:
            raise _unknown(id)
        if request.HasField("volume_capability"):
            mount_options(request.volume_capability, record.spec)
        if wanted.limit_bytes and record.capacity_bytes > wanted.limit_bytes:
            raise out_of_range(
                f"volume {id!r} may hold {record.capacity_bytes:,} bytes already, more than the limit of "
                f"{wanted.limit_bytes:,}"
            )
        size_bytes = wanted.required_bytes or wanted.limit_bytes
        if not record.capacity_bytes:  # it has no quota, and gets none by being made larger
            return csi.ControllerExpandVolumeResponse(capacity_bytes=size_bytes, node_expansion_required=False)
        grown = self._grow(record, size_bytes)
        # A data set's is a number for claims and nothing more.
        return csi.ControllerExpandVolumeResponse(
            capacity_bytes=grown.capacity_bytes, node_expansion_required=not grown.spec.read_only
        )

    def _give(self, decided: VolumeRecord) -> VolumeRecord:
        """Keep a new volume if its class and its namespace have room for it, or return the one that another call has
        made meanwhile."""
        if decided.spec.read_only:
            return volume_records.add(self._catalog, decided)
        with self._room:
            there = volume_records.read(self._catalog, decided.id)
            if there is not None:
                return there
            check_room(self._catalog, decided.parameters, decided.capacity_bytes)
            check_staging(self._catalog, decided.spec.namespace, decided.capacity_bytes)
            return volume_records.add(self._catalog, decided)

    def _grow(self, record: VolumeRecord, size_bytes: int) -> VolumeRecord:
        """Let a volume hold this much, if its class and its namespace have room for it now."""
        with self._room:
            there = volume_records.read(self._catalog, record.id)
            if there is not None and not there.spec.read_only and size_bytes > there.capacity_bytes:
                # What the provisioner takes for an error that only its caller can mend, who may then ask for less.
                more_bytes, code = size_bytes - there.capacity_bytes, grpc.StatusCode.OUT_OF_RANGE
                parameters = dict(there.parameters)
                if self._api is not None and there.storage_class:  # which may have been made anew
                    parameters[CAPACITY] = self._api.class_parameters(there.storage_class).get(CAPACITY, "")
                check_room(self._catalog, parameters, more_bytes, code=code)
                check_staging(self._catalog, there.spec.namespace, more_bytes, code=code)
            grown = volume_records.grow(self._catalog, record.id, size_bytes)
        if grown is None:
            raise _unknown(record.id)
        return grown

    def _decide(self, request: csi.CreateVolumeRequest, id: str) -> VolumeRecord:
        """Return the volume to make, after checking that all it asks for exists and that the namespace may have it."""
        namespace, name = request.parameters.get(PVC_NAMESPACE, ""), request.parameters.get(PVC_NAME, "")
        claim = self._claim(request, namespace, name)
        with self._told(claim):
            try:
                asked = read_request(
                    request.parameters, claim.annotations if claim else {}, namespace=namespace, name=name
                )
            except RequestError as exc:
                if self._api is not None and not name:
                    raise invalid(
                        f"{exc.message} (which PVC it is for is not known: run csi-provisioner with "
                        "--extra-create-metadata)"
                    ) from exc
                raise
            _check_all(request.volume_capabilities, asked.spec)
            if asked.spec.read_only:
                if asked.own_pin:
                    check_pin(self._settings, namespace)
                spec, capacity_bytes = self._dataset(asked.spec, namespace, request.capacity_range)
            else:
                spec, capacity_bytes = self._bucket(asked, claim, namespace, request.capacity_range)
        return VolumeRecord(
            id=id,
            name=request.name,
            context=spec.context(),
            capacity_bytes=capacity_bytes,
            parameters=dict(request.parameters),
            storage_class=claim.storage_class if claim is not None else "",
        )

    def _claim(self, request: csi.CreateVolumeRequest, namespace: str, name: str) -> VolumeClaim | None:
        if self._api is None or not name or not namespace:
            return None
        claim = self._api.claim(namespace, name)
        # The provisioner makes a volume's name of the PVC's uid by default.
        of_uid = request.name.startswith("pvc-") and len(request.name) == 40 and request.name.count("-") == 5
        if claim is None or (of_uid and request.name != f"pvc-{claim.uid}"):
            # A final code, so that the provisioner does not go on. One made anew under the name is another PVC.
            raise not_found(f"the PVC {namespace}/{name} is not there any more")
        return claim

    @contextmanager
    def _told(self, claim: VolumeClaim | None) -> Iterator[None]:
        """Write an Event on the PVC for an error that its owner can mend."""
        try:
            yield
        except (RequestError, DatacacheError) as exc:
            code, words = status_of(exc)
            if self._api is not None and claim is not None and code in _PEOPLE_CAN_ACT:
                self._api.warn(claim, WRONG_ANNOTATION, words)
                if code is grpc.StatusCode.INVALID_ARGUMENT:
                    # After INVALID_ARGUMENT csi-provisioner lets a PVC lie for minutes, annotated anew or not (its
                    # "infeasible" errors; sig-storage-lib-external-provisioner 13).
                    raise precondition(words) from exc
            raise

    def _dataset(self, spec: VolumeSpec, namespace: str, wanted: csi.CapacityRange) -> tuple[VolumeSpec, int]:
        hint = "Run csi-provisioner with --extra-create-metadata."
        check_open(self._catalog, spec.ref.dataset, namespace, default=self._settings.access, unknown=hint)
        record = find_snapshot(self._catalog, spec.ref, namespace, default=self._settings.access)
        check_sources(self._catalog, record.id, spec.ref, self._settings)
        check_subpath(self._catalog, record, spec)
        if spec.pin:
            check_pin_size(self._catalog, namespace, record.ref, record.total_bytes)
        if wanted.limit_bytes and record.total_bytes > wanted.limit_bytes:
            raise out_of_range(
                f"{spec.dataset} has {record.total_bytes:,} bytes, more than the limit of {wanted.limit_bytes:,}"
            )
        resolved = spec.resolved(f"{record.dataset}@{record.id}", namespace=namespace)
        # A claim that asks for more than there is would never be bound to a volume of the true size.
        return resolved, max(wanted.required_bytes, record.total_bytes)

    def _bucket(
        self, asked: Asked, claim: VolumeClaim | None, namespace: str, wanted: csi.CapacityRange
    ) -> tuple[VolumeSpec, int]:
        quota_bytes = wanted.required_bytes or wanted.limit_bytes
        spec = replace(asked.spec, namespace=namespace, quota_bytes=quota_bytes)
        if asked.own_bucket and not self._rules.allow(spec.bucket, namespace):
            assert claim is not None, "an annotation is a claim's"
            parameters = self._api.class_parameters(claim.storage_class) if self._api and claim.storage_class else {}
            if not (spec.takes_secret and _NODE_SECRET in parameters):
                raise denied(
                    f"{PREFIX}bucket: {spec.bucket} cannot be mounted with the driver's own credentials "
                    f"({self._rules.describe(namespace)}): use a StorageClass that names a secret with credentials "
                    f"for it ({_NODE_SECRET}), or have the bucket allowed (--allow-bucket)"
                )
            spec = replace(spec, credentials="secret")
        return spec, quota_bytes

    def _condition(self, record: VolumeRecord, there: dict[str, bool]) -> csi.VolumeCondition:
        spec = record.spec
        if spec.read_only and spec.dataset not in there:
            there[spec.dataset] = self._catalog.snapshot(*spec.ref) is not None
        if spec.read_only and not there[spec.dataset]:
            return csi.VolumeCondition(abnormal=True, message=f"the catalog has no snapshot {spec.dataset} any more")
        return csi.VolumeCondition(abnormal=False, message="")


def _check_range(wanted: csi.CapacityRange) -> None:
    if wanted.required_bytes < 0 or wanted.limit_bytes < 0:
        raise invalid("capacity_range has a negative size")
    if 0 < wanted.limit_bytes < wanted.required_bytes:
        raise out_of_range(f"{wanted.required_bytes:,} bytes are required, and the limit is {wanted.limit_bytes:,}")


def _check_all(capabilities: Iterable[csi.VolumeCapability], spec: VolumeSpec) -> None:
    for capability in capabilities:
        mount_options(capability, spec)


def _check_same(record: VolumeRecord, request: csi.CreateVolumeRequest) -> None:
    """Raise ALREADY_EXISTS unless this request asks for the volume that exists under the name."""

    def other(what: str) -> RequestError:
        return exists(f"there is a volume {request.name!r} already, {what}")

    if record.name != request.name or dict(record.parameters) != dict(request.parameters):
        raise other("made with other parameters")
    wanted = request.capacity_range
    if record.capacity_bytes < wanted.required_bytes or 0 < wanted.limit_bytes < record.capacity_bytes:
        raise other(f"of {record.capacity_bytes:,} bytes")
    try:
        _check_all(request.volume_capabilities, record.spec)
    except RequestError as exc:
        raise other(f"and {exc.message}") from exc


def _volume(record: VolumeRecord) -> csi.Volume:
    return csi.Volume(volume_id=record.id, capacity_bytes=record.capacity_bytes, volume_context=record.context)


def _unknown(id: str) -> RequestError:
    return not_found(f"there is no volume {id!r} that this driver has provisioned")


def _token(id: str) -> str:
    """Return the token of a listing that goes on after this volume, which may be deleted by then."""
    return f"{hashlib.blake2b(id.encode(), digest_size=6).hexdigest()}.{id}"
