"""Test what namespaces have of a node, with its daemon, its mounts and the Node service."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from csi_driver import volume_records
from csi_driver.node.records import NodeVolume
from csi_driver.node.service import NodeService
from csi_driver.node.tenants import NodeTenants
from csi_driver.volume_records import VolumeRecord
from datacache import api, open_snapshot
from datacache.api import connect, open_catalog
from datacache.catalog.leases import QUOTA_USES
from datacache.core.errors import DatacacheError
from datacache.settings import Settings, load_settings
from tests.csi_driver.kubelet import Kubelet, needs_root
from tests.promises import promise

pytestmark = needs_root
MB = 1000**2
COUNT, SIZE = 60, 200_000
POD = "csi.storage.k8s.io/pod"


@pytest.fixture
def stores(tmp_path: Path, settings: Settings) -> dict[str, Path]:
    """The folders of the data sets `mine`, `old` and `theirs`, of 12 MB each."""
    folders = {}
    for name in ("mine", "old", "theirs"):
        folders[name] = tmp_path / "stores" / name
        folders[name].mkdir(parents=True)
        for number in range(COUNT):
            (folders[name] / f"{number:02}").write_bytes(random.Random(f"{name}{number}").randbytes(SIZE))
        api.create_snapshot(name, str(folders[name]), settings=settings)
    return folders


@pytest.fixture
def settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of a node whose cache has 64 MB on its disk, and none in memory."""
    for name, text in {"SSD_BYTES": "64MB", "RAM_BYTES": "0", "EVICTION": "lru", "PREFETCH": "0", "PINS": "*"}.items():
        monkeypatch.setenv(f"DATACACHE_{name}", text)
    return load_settings()


@pytest.fixture
def away(stores: dict[str, Path]) -> Path:
    """Where folders of `stores` can be moved to, so that nothing can be fetched."""
    return stores["mine"].parents[1] / "away"


def pod(namespace: str) -> dict[str, str]:
    return {f"{POD}.namespace": namespace, f"{POD}.name": f"of-{namespace}", f"{POD}.uid": f"uid-{namespace}"}


def show(kubelet: Kubelet, name: str, namespace: str, **more: str) -> Path:
    """A volume that was provisioned for a namespace, as a pod of it sees it."""
    context = {"dataset": name, "namespace": namespace} | more
    return kubelet.show(f"{name}-{namespace}", context)


def read(folder: Path, numbers: range = range(COUNT)) -> None:
    for number in numbers:
        assert len((folder / f"{number:02}").read_bytes()) == SIZE


def kept(name: str) -> list[bool]:
    """Which files of a data set this node has, asked of its cache; the store is to be away."""
    found = []
    with open_snapshot(name) as snapshot:
        for number in range(COUNT):
            try:
                data = snapshot.read(f"{number:02}")
            except DatacacheError:
                found.append(False)
            else:
                assert data == random.Random(f"{name}{number}").randbytes(SIZE)
                found.append(True)
    return found


def charged(settings: Settings) -> dict[str, int]:
    return {each["name"]: each["ssd_bytes"] for each in connect(settings).cache_status()["namespaces"]}


def wait_until_stored(settings: Settings, namespace: str, size_bytes: int = COUNT * SIZE) -> None:
    """Wait for the cache's disk: readers have blocks before they are written there."""
    ends = time.monotonic() + 60
    while charged(settings).get(namespace, 0) < size_bytes:
        assert time.monotonic() < ends, charged(settings)
        time.sleep(0.02)


def kill_daemon(settings: Settings) -> None:
    pid = connect(settings).health()["pid"]
    os.kill(pid, signal.SIGKILL)
    connect(settings)


@promise("A namespace that fills its share of the cache evicts only its own")
def test_a_namespace_that_fills_its_share_evicts_its_own_through_kills_and_lower_quotas(
    stores: dict[str, Path], service: NodeService, kubelet: Kubelet, settings: Settings, away: Path
) -> None:
    api.set_namespace_quota("a", {"cache": 8 * MB})
    service.tenants.read_quotas()
    theirs, mine = show(kubelet, "theirs", "b"), show(kubelet, "mine", "a")
    read(theirs)
    wait_until_stored(settings, "b")
    read(mine, range(20))
    wait_until_stored(settings, "a", 20 * SIZE)
    kill_daemon(settings)  # who starts knows the quotas by itself
    read(mine, range(20, COUNT))
    assert 5 * MB < charged(settings)["a"] <= 8 * MB
    assert charged(settings)["b"] >= COUNT * SIZE
    api.set_namespace_quota("a", {"cache": 4 * MB})
    service.tenants.read_quotas()
    service.tenants.tell()
    kill_daemon(settings)
    assert 2 * MB < charged(settings)["a"] <= 4 * MB
    shutil.move(stores["mine"].parent, away)
    assert all(kept("theirs"))
    assert not any(kept("mine")[:40]), "its oldest went"
    assert kept("mine")[-1]


@promise("A namespace that fills its share of the cache evicts only its own")
def test_what_pods_left_is_charged_to_their_namespace_and_goes_for_its_next_data_set(
    stores: dict[str, Path], service: NodeService, kubelet: Kubelet, settings: Settings, away: Path
) -> None:
    api.set_namespace_quota("*", {"cache": 14 * MB})
    api.set_namespace_quota("b", {"cache": None})
    service.tenants.read_quotas()
    theirs = show(kubelet, "theirs", "b")
    context = {"dataset": "old"} | pod("a")  # a PV by hand: only its pods say whose it is
    old = kubelet.show("by-hand", context)
    read(old)
    read(theirs)
    kubelet.hide("by-hand")
    service.tenants.tell()
    wait_until_stored(settings, "a")  # it is charged after the last pod
    read(show(kubelet, "mine", "a"))
    assert charged(settings)["a"] <= 14 * MB
    shutil.move(stores["mine"].parent, away)
    assert all(kept("theirs") + kept("mine"))
    assert not any(kept("old")[:40])


def test_a_data_set_of_two_namespaces_is_charged_to_each_in_equal_parts(
    stores: dict[str, Path], kubelet: Kubelet, settings: Settings
) -> None:
    read(show(kubelet, "mine", "a"))
    wait_until_stored(settings, "a")
    show(kubelet, "mine", "b")
    found = charged(settings)
    assert found["a"] == found["b"] == pytest.approx(COUNT * SIZE / 2, rel=0.1)


def test_what_a_node_keeps_for_pods_of_others_is_charged_to_who_has_a_claim(
    stores: dict[str, Path], settings: Settings, tmp_path: Path
) -> None:
    modes = (("mine", "partition"), ("*", "share"))
    node = NodeService(replace(settings, cluster="lab", cluster_mode=modes), "node-1")
    connect(settings)
    with closing(open_catalog(settings)) as catalog:
        for name, namespace in (("mine", "a"), ("mine", "b"), ("theirs", "b")):
            (snapshot,) = catalog.snapshots(name)
            context = {"dataset": f"{name}@{snapshot.id}", "namespace": namespace}
            id = f"{name}-{namespace}"
            volume_records.add(catalog, VolumeRecord(id=id, name=id, context=context, capacity_bytes=0))
        newer = {"dataset": "mine@latest", "namespace": "c", "of a newer version": "x"}
        volume_records.add(catalog, VolumeRecord(id="newer", name="newer", context=newer, capacity_bytes=0))
        catalog.set_document(volume_records.KIND, "damaged", "{", old=None)
    node.tenants.read_claims()
    node.tenants.tell()
    found = {each["name"]: each["mounted"] for each in connect(settings).cache_status()["namespaces"]}
    assert found == {"a": ["mine"], "b": ["mine"]}
    node.close()


def test_namespaces_pin_within_their_quotas(
    stores: dict[str, Path], service: NodeService, kubelet: Kubelet, settings: Settings
) -> None:
    api.set_namespace_quota("a", {"cache": 15 * MB})
    show(kubelet, "mine", "a", pin="true")
    code, words = kubelet.code(
        "NodeStageVolume", kubelet.stage_request("more", {"dataset": "old", "namespace": "a", "pin": "true"})
    )
    assert code == "PERMISSION_DENIED"
    assert "beside the 12,000,000 that it pins on this node already" in words
    assert "dsctl k8s quota a --cache" in words
    assert [pin.partition("@")[0] for pin in connect(settings).cache_status()["pins"]] == ["mine"]
    request = kubelet.publish_request("inline", {"dataset": "old", "pin": "true"} | pod("a"), inline=True)
    assert kubelet.code("NodePublishVolume", request)[0] == "PERMISSION_DENIED"
    assert not service.records.has("inline")
    kubelet.hide("mine-a")
    show(kubelet, "old", "a", pin="true")
    assert [pin.partition("@")[0] for pin in connect(settings).cache_status()["pins"]] == ["old"]


def test_two_pins_at_once_pass_the_quota_one_by_one(
    stores: dict[str, Path], kubelet: Kubelet, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.set_namespace_quota("a", {"cache": 15 * MB})
    both, check = threading.Barrier(2), NodeTenants.check_pin

    def check_and_wait(self: NodeTenants, record: NodeVolume) -> None:
        check(self, record)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(2)  # for one that comes before this pin is noted

    monkeypatch.setattr(NodeTenants, "check_pin", check_and_wait)

    def stage(name: str) -> str:
        attributes = {"dataset": name, "namespace": "a", "pin": "true"}
        return kubelet.code("NodeStageVolume", kubelet.stage_request(name, attributes))[0]

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(stage, ("mine", "old"))) == ["OK", "PERMISSION_DENIED"]
    assert len(connect(settings).cache_status()["pins"]) == 1


def test_a_bucket_without_a_size_is_refused_where_staging_has_a_quota(
    bucket: Path, kubelet: Kubelet, service: NodeService
) -> None:
    api.set_namespace_quota("a", {"staging": 10 * MB})
    url = f"s3://{bucket.name}/out"
    service.preparation._rules = type(service.preparation._rules)(["*"])
    code, words = kubelet.code(
        "NodePublishVolume", kubelet.publish_request("i", {"bucket": url} | pod("a"), inline=True)
    )
    assert code == "INVALID_ARGUMENT"
    assert "namespace a has a staging quota of 10,000,000 bytes" in words
    kubelet.publish("i", {"bucket": url} | pod("b"), inline=True)
    kubelet.unpublish("i")
    first = {"bucket": url, "quota": str(6 * MB)} | pod("a")
    kubelet.show("first", first)
    kubelet.stage("second", first | {"bucket": f"{url}2"})
    code, words = kubelet.code("NodePublishVolume", kubelet.publish_request("second", first | {"bucket": f"{url}2"}))
    assert (code, "4,000,000 are left" in words) == ("RESOURCE_EXHAUSTED", True)
    kubelet.publish("first", first)
    kubelet.unstage("second")
    kubelet.hide("first")


def test_the_catalog_is_told_what_namespaces_have_and_only_of_changes(
    stores: dict[str, Path],
    bucket: Path,
    service: NodeService,
    kubelet: Kubelet,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read(show(kubelet, "mine", "a"))
    context = {"bucket": f"s3://{bucket.name}/out", "namespace": "b"}
    out = kubelet.show("out", context)
    with (out / "new").open("wb") as file:
        file.write(bytes(1000))
        file.flush()
        os.fsync(file.fileno())
    service.tenants.report()
    (use,) = api.namespace_quotas("a")
    assert use.cache_bytes["node-1"] == charged(settings)["a"] >= COUNT * SIZE
    (use,) = api.namespace_quotas("b")
    assert use.staged_bytes.get("node-1", 0) in (0, 1000)  # it may be uploaded by now
    monkeypatch.setattr(service.tenants, "_staged_bytes", dict)
    service.tenants.report()
    with closing(open_catalog(settings)) as catalog:
        catalog.remove_document(QUOTA_USES, "node-1")
        service.tenants.report()
        assert catalog.document(QUOTA_USES, "node-1") is None, "nothing has changed"
    kubelet.hide("out")
