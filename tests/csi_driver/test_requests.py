"""Requests to Identity and Controller, and the codes that the CSI specification asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from csi_driver.wire import csi_pb2 as csi
from datacache.api import create_snapshot
from datacache.settings import load_settings
from tests.csi_driver.driver import READ, WRITE, Driver, capability

DATASET = {"dataset": "mask@v1"}
BUCKET = {"bucket": "s3://lab/results"}
BLOCK = csi.VolumeCapability(
    block=csi.VolumeCapability.BlockVolume(),
    access_mode=csi.VolumeCapability.AccessMode(mode="MULTI_NODE_READER_ONLY"),
)
GIB = 2**30


def between(required: int, limit: int = 0) -> csi.CapacityRange:
    return csi.CapacityRange(required_bytes=required, limit_bytes=limit)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """One for all requests, with the volumes `there` (data set) and `bucket` (1 GiB)."""
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("data")
    variables = {"DATACACHE_HOME": str(home)}
    (folder / "train").mkdir()
    (folder / "train" / "a.jpg").write_bytes(b"x" * 5000)
    create_snapshot("mask", str(folder), tags=["v1"], settings=load_settings(variables))
    with Driver(tmp_path_factory.mktemp("csi"), "--mode=controller", variables=variables) as driver:
        create = driver.client.CreateVolume
        create(name="there", volume_capabilities=READ, parameters=DATASET)
        create(name="bucket", volume_capabilities=WRITE, parameters=BUCKET, capacity_range=between(GIB))
        yield driver


def create(name: str, **fields: Any) -> csi.CreateVolumeRequest:
    return csi.CreateVolumeRequest(**{"name": name, "volume_capabilities": READ, "parameters": DATASET} | fields)


REQUESTS: dict[str, tuple[str, Any, str, str]] = {
    # what it is: RPC, request, code, words that the answer has
    "no name": ("CreateVolume", create(""), "INVALID_ARGUMENT", "name"),
    "a name with a line break": ("CreateVolume", create("a\nb"), "INVALID_ARGUMENT", "control"),
    "no capabilities": ("CreateVolume", create("a", volume_capabilities=[]), "INVALID_ARGUMENT", "capabilities"),
    "a capability without access type": (
        "CreateVolume",
        create("a", volume_capabilities=[csi.VolumeCapability()]),
        "INVALID_ARGUMENT",
        "access type",
    ),
    "a block device": ("CreateVolume", create("a", volume_capabilities=[BLOCK]), "INVALID_ARGUMENT", "block"),
    "a block device beside": (
        "CreateVolume",
        create("a", volume_capabilities=[*READ, BLOCK]),
        "INVALID_ARGUMENT",
        "block",
    ),
    "an unknown mount option": (
        "CreateVolume",
        create("a", volume_capabilities=[capability(flags=("fast",))]),
        "INVALID_ARGUMENT",
        "'fast'",
    ),
    "a volume as source": (
        "CreateVolume",
        create(
            "a",
            volume_content_source=csi.VolumeContentSource(
                volume=csi.VolumeContentSource.VolumeSource(volume_id="there")
            ),
        ),
        "INVALID_ARGUMENT",
        "another volume",
    ),
    "an empty source": (
        "CreateVolume",
        create("a", volume_content_source=csi.VolumeContentSource()),
        "INVALID_ARGUMENT",
        "another volume",
    ),
    "a negative size": ("CreateVolume", create("a", capacity_range=between(-1)), "INVALID_ARGUMENT", "negative"),
    "a limit below what is required": (
        "CreateVolume",
        create("a", capacity_range=between(2 * GIB, GIB)),
        "OUT_OF_RANGE",
        "limit",
    ),
    "a limit below the data set": (
        "CreateVolume",
        create("a", capacity_range=between(0, 4999)),
        "OUT_OF_RANGE",
        "5,000",
    ),
    "no parameters": ("CreateVolume", create("a", parameters={}), "INVALID_ARGUMENT", "neither"),
    "data set and bucket": ("CreateVolume", create("a", parameters=DATASET | BUCKET), "INVALID_ARGUMENT", "both"),
    "an unknown parameter": (
        "CreateVolume",
        create("a", parameters=DATASET | {"colour": "red"}),
        "INVALID_ARGUMENT",
        "'colour'",
    ),
    "an unknown parameter that begins as one of the provisioner's": (
        "CreateVolume",
        create("a", parameters=DATASET | {"storage.kubernetes.io/csiProvisionerIdentityFoo": "x"}),
        "INVALID_ARGUMENT",
        "csiProvisionerIdentityFoo",
    ),
    "an unknown data set": (
        "CreateVolume",
        create("a", parameters={"dataset": "face"}),
        "INVALID_ARGUMENT",
        "no data set face",
    ),
    "an unknown tag": (
        "CreateVolume",
        create("a", parameters={"dataset": "mask@v9"}),
        "INVALID_ARGUMENT",
        "mask has no tag v9; it has v1",
    ),
    "an unknown folder": (
        "CreateVolume",
        create("a", parameters=DATASET | {"subpath": "trian"}),
        "INVALID_ARGUMENT",
        "it has train",
    ),
    "a way out": (
        "CreateVolume",
        create("a", parameters=DATASET | {"subpath": "train/../.."}),
        "INVALID_ARGUMENT",
        "subpath",
    ),
    "credentials in a URL": (
        "CreateVolume",
        create("a", parameters={"bucket": "s3://key:secret@lab/x"}),
        "INVALID_ARGUMENT",
        "credentials",
    ),
    "a namespace nobody told": (
        "CreateVolume",
        create("a", parameters={"bucket": "s3://lab/${pvc.namespace}"}, volume_capabilities=WRITE),
        "INVALID_ARGUMENT",
        "--extra-create-metadata",
    ),
    "an unknown place": (
        "CreateVolume",
        create("a", parameters={"bucket": "s3://lab/${pod.name}"}, volume_capabilities=WRITE),
        "INVALID_ARGUMENT",
        "${pvc.name}",
    ),
    "the name again": ("CreateVolume", create("there"), "OK", ""),
    "the name with other parameters": (
        "CreateVolume",
        create("there", parameters=BUCKET, volume_capabilities=WRITE),
        "ALREADY_EXISTS",
        "parameters",
    ),
    "the name with more bytes": (
        "CreateVolume",
        create("there", capacity_range=between(GIB)),
        "ALREADY_EXISTS",
        "5,000",
    ),
    "the name with a lower limit": (
        "CreateVolume",
        create("bucket", parameters=BUCKET, volume_capabilities=WRITE, capacity_range=between(0, GIB - 1)),
        "ALREADY_EXISTS",
        "bytes",
    ),
    "the name with other capabilities": (
        "CreateVolume",
        create("there", volume_capabilities=[BLOCK]),
        "ALREADY_EXISTS",
        "block",
    ),
    "delete nothing": ("DeleteVolume", csi.DeleteVolumeRequest(), "INVALID_ARGUMENT", "volume_id"),
    "delete what is not there": ("DeleteVolume", csi.DeleteVolumeRequest(volume_id="gone"), "OK", ""),
    "validate nothing": (
        "ValidateVolumeCapabilities",
        csi.ValidateVolumeCapabilitiesRequest(volume_capabilities=READ),
        "INVALID_ARGUMENT",
        "volume_id",
    ),
    "validate no capabilities": (
        "ValidateVolumeCapabilities",
        csi.ValidateVolumeCapabilitiesRequest(volume_id="there"),
        "INVALID_ARGUMENT",
        "capabilities",
    ),
    "validate what is not there": (
        "ValidateVolumeCapabilities",
        csi.ValidateVolumeCapabilitiesRequest(volume_id="gone", volume_capabilities=READ),
        "NOT_FOUND",
        "gone",
    ),
    "get nothing": ("ControllerGetVolume", csi.ControllerGetVolumeRequest(), "INVALID_ARGUMENT", "volume_id"),
    "get what is not there": (
        "ControllerGetVolume",
        csi.ControllerGetVolumeRequest(volume_id="gone"),
        "NOT_FOUND",
        "gone",
    ),
    "an unknown token": ("ListVolumes", csi.ListVolumesRequest(starting_token="there"), "ABORTED", "starting_token"),
    "a negative number of entries": (
        "ListVolumes",
        csi.ListVolumesRequest(max_entries=-1),
        "INVALID_ARGUMENT",
        "max_entries",
    ),
    "expand nothing": (
        "ControllerExpandVolume",
        csi.ControllerExpandVolumeRequest(capacity_range=between(GIB)),
        "INVALID_ARGUMENT",
        "volume_id",
    ),
    "expand to no size": (
        "ControllerExpandVolume",
        csi.ControllerExpandVolumeRequest(volume_id="bucket"),
        "INVALID_ARGUMENT",
        "capacity_range",
    ),
    "expand what is not there": (
        "ControllerExpandVolume",
        csi.ControllerExpandVolumeRequest(volume_id="gone", capacity_range=between(GIB)),
        "NOT_FOUND",
        "gone",
    ),
    "expand below what it is": (
        "ControllerExpandVolume",
        csi.ControllerExpandVolumeRequest(volume_id="bucket", capacity_range=between(0, GIB - 1)),
        "OUT_OF_RANGE",
        "already",
    ),
    "expand as a block device": (
        "ControllerExpandVolume",
        csi.ControllerExpandVolumeRequest(volume_id="bucket", capacity_range=between(2 * GIB), volume_capability=BLOCK),
        "INVALID_ARGUMENT",
        "block",
    ),
    "an RPC of the node": ("NodeGetInfo", csi.NodeGetInfoRequest(), "UNIMPLEMENTED", ""),
}


@pytest.mark.parametrize("what", REQUESTS)
def test_a_request_gets_the_code_of_the_specification(driver: Driver, what: str) -> None:
    rpc, request, code, words = REQUESTS[what]
    got, text = driver.client.code(rpc, request)
    assert (got, words in text) == (code, True), text
    assert [entry.volume.volume_id for entry in driver.client.ListVolumes().entries] == ["bucket", "there"]


def test_the_driver_says_who_it_is(driver: Driver) -> None:
    info = driver.client.GetPluginInfo()
    assert info.name == "datacache.io"
    assert info.vendor_version
    assert driver.client.Probe().ready.value
    service, expansion = driver.client.GetPluginCapabilities().capabilities
    assert service.service.type == csi.PluginCapability.Service.CONTROLLER_SERVICE
    assert expansion.volume_expansion.type == csi.PluginCapability.VolumeExpansion.ONLINE


def test_the_controller_declares_what_it_does(driver: Driver) -> None:
    types = {capability.rpc.type for capability in driver.client.ControllerGetCapabilities().capabilities}
    rpc = csi.ControllerServiceCapability.RPC
    assert types == set(rpc.Type.values()) - {rpc.UNKNOWN}


def test_capabilities_are_confirmed_or_refused_in_words(driver: Driver) -> None:
    validate = driver.client.ValidateVolumeCapabilities
    assert list(validate(volume_id="there", volume_capabilities=READ).confirmed.volume_capabilities) == READ
    # Many tools know ReadWriteOnce only.
    assert list(validate(volume_id="there", volume_capabilities=WRITE).confirmed.volume_capabilities) == WRITE
    refused = validate(volume_id="there", volume_capabilities=[BLOCK])
    assert not refused.HasField("confirmed")
    assert "block" in refused.message
    other = validate(volume_id="there", volume_capabilities=READ, volume_context={"dataset": "face@v1"})
    assert not other.HasField("confirmed")


def test_a_volume_of_a_handwritten_pv_is_known_by_its_attributes(driver: Driver) -> None:
    validate = driver.client.ValidateVolumeCapabilities
    assert validate(volume_id="static", volume_capabilities=READ, volume_context=DATASET).HasField("confirmed")
    assert not validate(volume_id="static", volume_capabilities=[BLOCK], volume_context=DATASET).HasField("confirmed")


def test_a_call_is_one_line_of_log(driver: Driver) -> None:
    before = len(driver.log)
    driver.client.code("CreateVolume", create("none", parameters={"dataset": "mask@v9"}))
    driver.client.DeleteVolume(volume_id="forged\nline")
    driver.client.GetCapacity()  # not these: there is no end of them
    driver.client.ControllerGetVolume(volume_id="there")
    lines = driver.lines(before, 3)
    assert "CreateVolume volume=none code=INVALID_ARGUMENT ms=" in lines[0]
    assert "it has v1" in lines[0]
    assert "DeleteVolume volume=forged line code=OK ms=" in lines[1]
    assert "ControllerGetVolume volume=there code=OK" in lines[2]
