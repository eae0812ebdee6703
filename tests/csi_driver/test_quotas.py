"""Test that volumes and pins stay within the quotas of their namespaces."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from csi_driver.wire import csi_pb2 as csi
from datacache import api
from tests.csi_driver.api_server import ApiServer
from tests.csi_driver.conftest import StartDriver
from tests.csi_driver.driver import READ
from tests.csi_driver.test_annotations import NAME
from tests.csi_driver.test_capacity import ask
from tests.csi_driver.test_requests import GIB, between
from tests.promises import promise

LAB = {"bucket": "s3://lab/${pvc.name}"}


@promise("Bucket volumes of a namespace hold no more together than its staging quota")
def test_bucket_volumes_are_given_up_to_the_quota_of_their_namespace(
    any_catalog: str, start_driver: StartDriver
) -> None:
    driver = start_driver("--mode=controller")
    assert ask(driver, "before", 4, LAB)[0] == "OK"
    api.set_namespace_quota("vision", {"staging": 10 * GIB})
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda n: ask(driver, f"v{n}", 3, LAB)[0], range(4)))
    assert sorted(codes) == ["OK"] * 2 + ["RESOURCE_EXHAUSTED"] * 2
    code, words = ask(driver, "more", 1, LAB)
    assert code == "RESOURCE_EXHAUSTED"
    assert "staging quota of namespace vision, 10,737,418,240 bytes, 0 are left" in words
    assert "dsctl k8s quota vision --staging SIZE" in words
    assert ask(driver, "before", 4, LAB)[0] == "OK"  # what was given stays given
    grow = csi.ControllerExpandVolumeRequest(volume_id="before", capacity_range=between(5 * GIB))
    assert driver.client.code("ControllerExpandVolume", grow)[0] == "OUT_OF_RANGE"
    driver.client.DeleteVolume(volume_id="before")
    assert ask(driver, "more", 4, LAB)[0] == "OK"
    (use,) = api.namespace_quotas("vision")
    assert (use.quota.staging_bytes, use.capacity_bytes) == (10 * GIB, 10 * GIB)


@promise("Bucket volumes of a namespace hold no more together than its staging quota")
def test_a_volume_without_a_size_is_refused_where_a_namespace_has_a_quota(start_driver: StartDriver) -> None:
    driver = start_driver("--mode=controller")
    api.set_namespace_quota("*", {"staging": GIB})
    code, words = ask(driver, "a", 0, LAB)
    assert (code, "needs one" in words) == ("INVALID_ARGUMENT", True)
    api.set_namespace_quota("vision", {"staging": None})
    assert ask(driver, "a", 0, LAB)[0] == "OK"


def test_a_pin_that_exceeds_the_share_of_the_cache_is_refused_with_an_event(
    masks: dict[str, str], start_driver: StartDriver, cluster: ApiServer, kubeconfig: object
) -> None:
    api.set_namespace_quota("vision", {"cache": 10})
    variables = {"DATACACHE_PINS": "vision"}
    driver = start_driver("--mode=controller", f"--kubeconfig={kubeconfig}", variables=variables)
    annotations = {"datacache.io/dataset": "mask@v1", "datacache.io/pin": "true"}
    parameters = cluster.put_claim("data", annotations, namespace="vision")
    request = csi.CreateVolumeRequest(name=NAME, volume_capabilities=READ, parameters=parameters)
    code, words = driver.client.code("CreateVolume", request)
    assert code == "PERMISSION_DENIED"
    assert "namespace vision may have 10 bytes of a node's cache" in words
    assert any("may have 10 bytes" in event["message"] for event in cluster.events.values())
    api.set_namespace_quota("vision", {"cache": GIB})
    assert driver.client.code("CreateVolume", request)[0] == "OK"
