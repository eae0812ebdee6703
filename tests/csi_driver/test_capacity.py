"""Test what the bucket volumes of a StorageClass may hold together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from csi_driver.volume_records import NO_END
from csi_driver.wire import csi_pb2 as csi
from tests.csi_driver.conftest import StartDriver
from tests.csi_driver.driver import READ, WRITE, Driver
from tests.csi_driver.test_requests import BLOCK, GIB, between

TEN = {"bucket": "s3://lab/${pvc.name}", "capacity": "10Gi"}


def of(parameters: dict[str, str], pvc: str) -> dict[str, str]:
    """As csi-provisioner hands them over, for a PVC."""
    return parameters | {"csi.storage.k8s.io/pvc/name": pvc, "csi.storage.k8s.io/pvc/namespace": "vision"}


def ask(driver: Driver, name: str, gib: int, parameters: dict[str, str] = TEN, **fields: Any) -> tuple[str, str]:
    return driver.client.code(
        "CreateVolume",
        csi.CreateVolumeRequest(
            **{
                "name": name,
                "volume_capabilities": WRITE,
                "parameters": of(parameters, name),
                "capacity_range": between(gib * GIB),
            }
            | fields
        ),
    )


def left(driver: Driver, parameters: dict[str, str] = TEN, **fields: Any) -> int:
    return int(driver.client.GetCapacity(parameters=parameters, **fields).available_capacity)


def test_quotas_are_given_up_to_the_capacity_of_the_class(any_catalog: str, start_driver: StartDriver) -> None:
    driver = start_driver("--mode=controller")
    assert left(driver) == 10 * GIB
    assert ask(driver, "a", 6)[0] == "OK"
    assert ask(driver, "a", 6)[0] == "OK"  # the same once more
    assert left(driver) == 4 * GIB
    code, words = ask(driver, "b", 5)
    assert code == "RESOURCE_EXHAUSTED"
    assert "capacity of 10Gi 4,294,967,296 bytes are left" in words
    assert ask(driver, "b", 4)[0] == "OK"
    assert left(driver) == 0
    grow = csi.ControllerExpandVolumeRequest(volume_id="a", capacity_range=between(7 * GIB))
    assert driver.client.code("ControllerExpandVolume", grow)[0] == "OUT_OF_RANGE"
    driver.client.DeleteVolume(volume_id="b")
    assert driver.client.ControllerExpandVolume(grow).capacity_bytes == 7 * GIB
    assert left(driver) == 3 * GIB


def test_who_asks_at_once_gets_no_more_than_there_is(any_catalog: str, start_driver: StartDriver) -> None:
    driver = start_driver("--mode=controller")
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda i: ask(driver, f"v{i}", 3)[0], range(8)))
    assert sorted(codes) == ["OK"] * 3 + ["RESOURCE_EXHAUSTED"] * 5
    assert left(driver) == GIB


def test_a_class_that_is_made_anew_with_more_counts_what_was_given_before(start_driver: StartDriver) -> None:
    driver = start_driver("--mode=controller")
    assert ask(driver, "a", 9)[0] == "OK"
    assert left(driver, TEN | {"capacity": "1Ti"}) == (1024 - 9) * GIB
    assert left(driver, TEN | {"capacity": "1Gi"}) == 0
    # Another class, and its volumes, have nothing to do with it; neither have those that no capacity was said of.
    assert left(driver, TEN | {"bucket": "s3://other"}) == 10 * GIB
    assert ask(driver, "b", 100, {"bucket": TEN["bucket"]})[0] == "OK"
    assert left(driver) == GIB


def test_a_volume_without_a_size_is_refused_where_a_capacity_is_shared(start_driver: StartDriver) -> None:
    driver = start_driver("--mode=controller")
    code, words = ask(driver, "a", 0)
    assert (code, "needs a size" in words) == ("INVALID_ARGUMENT", True)
    assert ask(driver, "a", 0, {"bucket": "s3://lab"})[0] == "OK"


def test_a_capacity_that_is_no_size_is_named(start_driver: StartDriver) -> None:
    driver = start_driver("--mode=controller")
    wrong = TEN | {"capacity": "much"}
    code, words = ask(driver, "a", 1, wrong)
    assert (code, "'much' is not a size" in words) == ("INVALID_ARGUMENT", True)
    request = csi.GetCapacityRequest(parameters=wrong)
    assert driver.client.code("GetCapacity", request)[0] == "INVALID_ARGUMENT"


def test_without_a_capacity_there_is_no_end_and_for_what_cannot_be_there_is_no_room(start_driver: StartDriver) -> None:
    driver = start_driver("--mode=controller")
    bucket, dataset = {"bucket": "s3://lab"}, {"dataset": "mask@v1"}
    assert left(driver, {}) == left(driver, bucket, volume_capabilities=WRITE) == NO_END
    assert left(driver, dataset, volume_capabilities=READ) == NO_END
    assert left(driver, dataset | {"capacity": "1Gi"}) == NO_END  # it takes no room
    assert left(driver, dataset, volume_capabilities=[BLOCK]) == left(driver, TEN, volume_capabilities=[BLOCK]) == 0
