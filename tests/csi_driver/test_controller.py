"""Provisioned volumes and their records, in both catalogs, with a driver that is killed in between."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from csi_driver import volume_records
from csi_driver.volume_records import VolumeRecord
from csi_driver.volumes import parse_context
from csi_driver.wire import csi_pb2 as csi
from datacache import api
from datacache.core.errors import CatalogError
from datacache.settings import load_settings
from tests.csi_driver.api_server import ApiServer
from tests.csi_driver.conftest import StartDriver
from tests.csi_driver.driver import READ, WRITE, Driver

GIB = 2**30
BUCKET = {"bucket": "s3://lab/results"}


def create(driver: Driver, name: str, required: int = 0, **fields: object) -> csi.Volume:
    wanted = csi.CapacityRange(required_bytes=required)
    answer: csi.CreateVolumeResponse = driver.client.CreateVolume(name=name, capacity_range=wanted, **fields)
    return answer.volume


def listed(driver: Driver) -> list[str]:
    return [entry.volume.volume_id for entry in driver.client.ListVolumes().entries]


def test_a_data_sets_volume_is_as_large_as_it_is_or_as_the_claim_wants(
    any_catalog: str, masks: dict[str, str], start_driver: StartDriver
) -> None:
    driver = start_driver("--mode=controller")
    for name, required, capacity in (("none", 0, 56), ("less", 1, 56), ("more", GIB, GIB)):
        volume = create(driver, name, required, volume_capabilities=READ, parameters={"dataset": "mask@v1"})
        assert (volume.volume_id, volume.capacity_bytes) == (name, capacity)
        assert parse_context(volume.volume_context).dataset == f"mask@{masks['v1']}"
    assert listed(driver) == ["less", "more", "none"]
    assert driver.client.ControllerGetVolume(volume_id="more").volume.capacity_bytes == GIB


def test_a_buckets_volume_has_its_quota_and_grows(any_catalog: str, start_driver: StartDriver) -> None:
    driver = start_driver("--mode=controller")
    volume = create(driver, "out", GIB, volume_capabilities=WRITE, parameters=BUCKET)
    spec = parse_context(volume.volume_context)
    assert (volume.capacity_bytes, spec.quota_bytes) == (GIB, GIB)
    expand = driver.client.ControllerExpandVolume
    for wanted, got in ((2 * GIB, 2 * GIB), (2 * GIB, 2 * GIB), (GIB, 2 * GIB)):
        grown = expand(volume_id="out", capacity_range=csi.CapacityRange(required_bytes=wanted))
        assert (grown.capacity_bytes, grown.node_expansion_required) == (got, True)
    catalog = api.open_catalog()
    assert volume_records.quota_of(catalog, "out", spec) == 2 * GIB
    catalog.close()
    assert create(driver, "out", GIB, volume_capabilities=WRITE, parameters=BUCKET).capacity_bytes == 2 * GIB

    assert create(driver, "free", volume_capabilities=WRITE, parameters=BUCKET).capacity_bytes == 0
    grown = expand(volume_id="free", capacity_range=csi.CapacityRange(required_bytes=GIB))
    assert (grown.capacity_bytes, grown.node_expansion_required) == (GIB, False)


def test_volumes_are_listed_page_by_page_whatever_goes_meanwhile(any_catalog: str, start_driver: StartDriver) -> None:
    driver = start_driver("--mode=controller")
    for number in range(7):
        create(driver, f"v{number}", volume_capabilities=WRITE, parameters=BUCKET)
    page = driver.client.ListVolumes(max_entries=3)
    assert [entry.volume.volume_id for entry in page.entries] == ["v0", "v1", "v2"]
    driver.client.DeleteVolume(volume_id="v2")
    driver.client.DeleteVolume(volume_id="v3")
    page = driver.client.ListVolumes(max_entries=3, starting_token=page.next_token)
    assert [entry.volume.volume_id for entry in page.entries] == ["v4", "v5", "v6"]
    assert not page.next_token


def test_a_snapshot_that_is_gone_is_the_volumes_condition(
    any_catalog: str, masks: dict[str, str], start_driver: StartDriver
) -> None:
    driver = start_driver("--mode=controller")
    create(driver, "faces", volume_capabilities=READ, parameters={"dataset": "mask@v1"})
    get = driver.client.ControllerGetVolume
    assert not get(volume_id="faces").status.volume_condition.abnormal
    catalog = api.open_catalog()
    catalog.remove_snapshot("mask", masks["v1"])
    catalog.close()
    condition = get(volume_id="faces").status.volume_condition
    assert (condition.abnormal, masks["v1"] in condition.message) == (True, True)
    (entry,) = driver.client.ListVolumes().entries
    assert entry.status.volume_condition == condition
    driver.client.DeleteVolume(volume_id="faces")
    assert listed(driver) == []


def test_of_two_controllers_both_give_the_same_volume(
    any_catalog: str, masks: dict[str, str], start_driver: StartDriver, tmp_path: Path
) -> None:
    drivers = [start_driver("--mode=controller"), start_driver("--mode=controller")]

    def make(driver: Driver, name: str) -> csi.Volume:
        while True:
            try:
                return create(driver, name, volume_capabilities=READ, parameters={"dataset": "mask@latest"})
            except grpc.RpcError as exc:
                if exc.code() is not grpc.StatusCode.ABORTED:  # another call on it in this driver
                    raise

    with ThreadPoolExecutor(8) as pool:
        for round in range(5):
            calls = [pool.submit(make, drivers[n % 2], f"v{round}") for n in range(8)]
            (tmp_path / "masks" / "v3" / f"more{round}").touch()
            api.create_snapshot("mask", str(tmp_path / "masks" / "v3"))
            assert len({call.result().SerializeToString(deterministic=True) for call in calls}) == 1
    assert listed(drivers[0]) == [f"v{round}" for round in range(5)]


def test_a_driver_killed_in_the_middle_of_a_call_does_it_the_next_time(
    masks: dict[str, str], start_driver: StartDriver
) -> None:
    """Each RPC that changes something, killed after ever more of it has been done."""
    driver = start_driver("--mode=controller")
    wanted = {"volume_capabilities": READ, "parameters": {"dataset": "mask@v2"}}
    calls = {
        "CreateVolume": csi.CreateVolumeRequest(name="faces", **wanted),
        "ControllerExpandVolume": csi.ControllerExpandVolumeRequest(
            volume_id="out", capacity_range=csi.CapacityRange(required_bytes=2 * GIB)
        ),
        "DeleteVolume": csi.DeleteVolumeRequest(volume_id="faces"),
    }
    create(driver, "out", GIB, volume_capabilities=WRITE, parameters=BUCKET)
    for rpc, request in calls.items():
        for delay_s in (0.0, 0.002):
            kill = threading.Timer(delay_s, driver.process.kill)
            kill.start()
            driver.client.code(rpc, request, timeout_s=0.2)
            kill.join()
            driver.kill()
            driver.start()
            assert driver.client.code(rpc, request) == ("OK", "")
            assert driver.client.code(rpc, request) == ("OK", "")
    assert listed(driver) == ["out"]
    assert driver.client.ControllerGetVolume(volume_id="out").volume.capacity_bytes == 2 * GIB


def test_a_call_that_was_cut_off_while_it_waited_is_decided_by_the_next(
    masks: dict[str, str], start_driver: StartDriver, cluster: ApiServer, kubeconfig: Path
) -> None:
    driver = start_driver("--mode=controller", f"--kubeconfig={kubeconfig}")
    claim = cluster.put_claim("faces", {"datacache.io/dataset": "mask@v1"})
    request = csi.CreateVolumeRequest(name="faces", volume_capabilities=READ, parameters=claim)
    cluster.fail, cluster.failing = "hang", "persistentvolumeclaims"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(driver.client.code, "CreateVolume", request)
        cluster.wait_for("persistentvolumeclaims")
        # While one call is being worked on, a second one is turned away.
        assert driver.client.code("CreateVolume", request)[0] == "ABORTED"
        assert driver.client.code("DeleteVolume", volume_id="faces")[0] == "ABORTED"
        assert driver.client.code("DeleteVolume", volume_id="another")[0] == "OK"
        driver.kill()
        assert first.result()[0] == "UNAVAILABLE"
    cluster.fail = 0
    driver.start()
    assert driver.client.code("CreateVolume", request) == ("OK", "")
    assert listed(driver) == ["faces"]


def test_a_catalog_that_is_away_is_unavailable(start_driver: StartDriver, home: Path) -> None:
    nowhere = "mongodb://127.0.0.1:1/none?serverSelectionTimeoutMS=300"
    driver = start_driver("--mode=controller", variables={"DATACACHE_CATALOG": nowhere})
    request = csi.CreateVolumeRequest(name="out", volume_capabilities=WRITE, parameters=BUCKET)
    assert driver.client.code("CreateVolume", request)[0] == "UNAVAILABLE"
    assert driver.client.code("ListVolumes")[0] == "UNAVAILABLE"
    assert driver.client.Probe().ready.value


def test_records_are_read_in_pages_of_any_size(any_catalog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_records, "_PAGE", 2)
    catalog = api.open_catalog(load_settings())
    for number in range(5):
        volume_records.add(
            catalog, VolumeRecord(id=f"v{number}", name=f"v{number}", context=BUCKET, capacity_bytes=number)
        )
    for limit in range(7):
        found = [record.id for record in volume_records.records(catalog, limit=limit)]
        assert found == ["v0", "v1", "v2", "v3", "v4"][: limit or None]
    assert [record.id for record in volume_records.records(catalog, after="v2")] == ["v3", "v4"]
    catalog.close()


def test_a_damaged_record_is_named_once_and_hides_no_other(any_catalog: str, caplog: pytest.LogCaptureFixture) -> None:
    volume_records._warn.cache_clear()
    with closing(api.open_catalog(load_settings())) as catalog:
        for id in ("v1", "v3", "v4"):
            volume_records.add(catalog, VolumeRecord(id=id, name=id, context=BUCKET, capacity_bytes=1))
        old = None
        for text in (
            "",
            "{}",
            '{"id": "other", "name": "v2", "context": {}, "capacity_bytes": 1}',
            '{"id": "v2", "name": "v2", "context": {"bucket": 7}, "capacity_bytes": 1}',
            '{"id": "v2", "name": "v2", "context": [], "capacity_bytes": 1}',
            '{"id": "v2", "name": "v2", "context": {}, "capacity_bytes": "much"}',
            "[" * 100_000,
        ):
            assert catalog.set_document(volume_records.KIND, "v2", text, old=old)
            old = text
            assert [record.id for record in volume_records.records(catalog)] == ["v1", "v3", "v4"]
            assert [record.id for record in volume_records.records(catalog, limit=2)] == ["v1", "v3"]
            assert [record.id for record in volume_records.records(catalog, after="v1", limit=1)] == ["v3"]
            with pytest.raises(CatalogError, match="record of the volume v2 is damaged"):
                volume_records.read(catalog, "v2")
    assert caplog.text.count("record of the volume v2 is damaged") == 1
