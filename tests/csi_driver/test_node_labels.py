"""Labels of nodes: which, on whom, when they change, and who else may write them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from csi_driver import node_labels, volume_records
from csi_driver.kube import KubeApi
from csi_driver.node_labels import MOST_LABELS, NodeLabels, wanted_labels
from csi_driver.status import RequestError
from csi_driver.volume_records import VolumeRecord
from datacache.api import open_catalog
from datacache.catalog.base import Catalog
from datacache.catalog.holdings import Holding, snapshot_label, write_holdings
from datacache.catalog.leases import HOLDINGS
from datacache.core.errors import DatacacheError
from datacache.settings import Settings, load_settings
from tests.csi_driver.api_server import ApiServer
from tests.csi_driver.conftest import StartDriver
from tests.promises import promise

A, B, C = "a" * 32, "b" * 32, "c" * 32
OTHERS = {"kubernetes.io/hostname": "n", "cache.example.org/x": "full"}


def share(percent: float) -> Holding:
    return Holding(int(percent * 100), 10_000)


@pytest.fixture
def catalog(any_catalog: str) -> Iterator[Catalog]:
    with closing(open_catalog(load_settings())) as opened:
        yield opened


@pytest.fixture
def labels(catalog: Catalog, kubeconfig: Path) -> Iterator[NodeLabels]:
    with closing(NodeLabels(load_settings(), KubeApi(kubeconfig))) as opened:
        yield opened


class TestOneNode:
    @pytest.mark.parametrize(
        ("now", "percent", "then"),
        [
            ("", 29.9, ""),
            ("", 30, "part"),
            ("", 94.9, "part"),
            ("", 95, "full"),
            ("part", 94.9, "part"),
            ("part", 95, "full"),
            ("part", 20, "part"),
            ("part", 19.9, ""),
            ("full", 90, "full"),
            ("full", 89.9, "part"),
            ("full", 19.9, ""),
            ("what somebody wrote", 20, ""),
        ],
    )
    def test_a_label_comes_late_and_goes_late(self, now: str, percent: float, then: str) -> None:
        key = snapshot_label(A)
        assert wanted_labels({key: now} if now else {}, {A: share(percent)}) == ({key: then} if then else {})

    @promise("A node's label of a snapshot changes only when what it holds has clearly changed")
    def test_a_share_that_wavers_around_a_limit_changes_nothing(self) -> None:
        have: dict[str, str] = {}
        seen = []
        for percent in (94, 96, 93, 96, 91, 95, 94, 90):
            have = wanted_labels(have, {A: share(percent)})
            seen.append(have[snapshot_label(A)])
        assert seen == ["part", *["full"] * 7]

    def test_what_it_holds_nothing_of_any_more_loses_its_label(self) -> None:
        assert wanted_labels({snapshot_label(A): "full"}, {B: share(100)}) == {snapshot_label(B): "full"}

    def test_of_many_the_claimed_ones_come_first_then_the_largest_and_those_there_are_stay(self) -> None:
        ids = [f"{number:032x}" for number in range(100)]
        held = {id: Holding(1000 + number, 1000 + number) for number, id in enumerate(ids)}
        first = wanted_labels({}, held, {ids[0], ids[1]})
        assert set(first) == {snapshot_label(id) for id in [*ids[:2], *ids[-MOST_LABELS + 2 :]]}
        # One that is a little larger takes nobody's place; one that is much larger does.
        assert wanted_labels(first, held | {A: Holding(1100, 1100)}, {ids[0], ids[1]}) == first
        later = wanted_labels(first, held | {A: Holding(9999, 9999)}, {ids[0], ids[1]})
        assert len(later) == MOST_LABELS
        assert set(later) - set(first) == {snapshot_label(A)}


@promise("A node's label of a snapshot changes only when what it holds has clearly changed")
def test_nodes_get_labels_and_lose_them_and_keep_all_others(
    catalog: Catalog, labels: NodeLabels, cluster: ApiServer
) -> None:
    for name in ("n1", "n2", "n3", "n4", "n5"):
        cluster.nodes[name] = dict(OTHERS)
    cluster.nodes["n5"][snapshot_label(C)] = "full"  # of a node pod that is gone
    write_holdings(catalog, "n1", {A: share(100), B: share(40)})
    write_holdings(catalog, "n3", {A: share(50), B: share(10)})
    write_holdings(catalog, "no-node-of-this-cluster", {A: share(100)})
    assert labels.look() == 3
    assert cluster.nodes == {
        "n1": OTHERS | {snapshot_label(A): "full", snapshot_label(B): "part"},
        "n2": OTHERS,
        "n3": OTHERS | {snapshot_label(A): "part"},
        "n4": OTHERS,
        "n5": OTHERS,
    }
    write_holdings(catalog, "n1", {B: share(100)})
    catalog.remove_document(HOLDINGS, "n3")
    assert labels.look() == 2
    assert cluster.nodes["n1"] == OTHERS | {snapshot_label(B): "full"}
    assert cluster.nodes["n3"] == OTHERS


def test_nothing_is_asked_while_nodes_say_the_same_and_nothing_written_by_a_second_controller(
    catalog: Catalog, labels: NodeLabels, cluster: ApiServer, kubeconfig: Path
) -> None:
    cluster.nodes["n1"] = {}
    write_holdings(catalog, "n1", {A: share(100)})
    assert labels.look() == 1
    asked = len(cluster.requests)
    write_holdings(catalog, "n1", {A: share(100)})  # renewed
    assert labels.look() == 0
    assert len(cluster.requests) == asked
    with closing(NodeLabels(load_settings(), KubeApi(kubeconfig))) as second:
        assert second.look() == 0
    assert [each for each in cluster.requests if each.startswith("PATCH")] == ["PATCH /api/v1/nodes/n1"]


def test_labels_that_somebody_took_away_come_back(
    catalog: Catalog, labels: NodeLabels, cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.nodes["n1"] = {}
    write_holdings(catalog, "n1", {A: share(100)})
    labels.look()
    cluster.nodes["n1"] = {}
    monkeypatch.setattr(node_labels, "_LIST_EVERY_S", 0.0)
    assert labels.look() == 1
    assert cluster.nodes["n1"] == {snapshot_label(A): "full"}


def test_a_node_that_went_meanwhile_or_that_cannot_be_patched_keeps_no_other_from_its_labels(
    catalog: Catalog, labels: NodeLabels, cluster: ApiServer
) -> None:
    for name in ("n1", "n2", "n3"):
        cluster.nodes[name] = {}
        write_holdings(catalog, name, {A: share(100)})
    cluster.fail, cluster.failing = 403, "/nodes/n1"
    with pytest.raises(RequestError, match="does not let the driver label the node n1"):
        labels.look()
    assert cluster.nodes["n2"] == cluster.nodes["n3"] == {snapshot_label(A): "full"}
    cluster.fail, cluster.failing = 404, "/nodes/n1"
    assert labels.look() == 0
    cluster.fail = 0
    write_holdings(catalog, "n2", {})
    assert labels.look() == 2, "what failed is tried again"
    assert cluster.nodes["n1"] == {snapshot_label(A): "full"}


def test_a_node_that_holds_more_than_can_be_keeps_no_other_from_its_labels(
    catalog: Catalog, labels: NodeLabels, cluster: ApiServer
) -> None:
    cluster.nodes |= {"n1": {}, "n2": {}}
    write_holdings(catalog, "n1", {A: Holding(10**400, 1), B: share(100), C: Holding(5, -(10**400))})
    write_holdings(catalog, "n2", {A: share(100)})
    labels.look()
    assert cluster.nodes == {"n1": {snapshot_label(B): "full"}, "n2": {snapshot_label(A): "full"}}


def test_no_label_goes_because_the_catalog_is_away(
    catalog: Catalog, labels: NodeLabels, cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.nodes["n1"] = {}
    write_holdings(catalog, "n1", {A: share(100)})
    labels.look()

    def away(_catalog: Catalog) -> None:
        raise DatacacheError("the catalog is away")

    monkeypatch.setattr(node_labels, "holdings", away)
    with pytest.raises(DatacacheError):
        labels.look()
    assert cluster.nodes["n1"] == {snapshot_label(A): "full"}


def test_of_many_snapshots_of_a_node_those_of_volumes_are_labelled(
    catalog: Catalog, labels: NodeLabels, cluster: ApiServer
) -> None:
    cluster.nodes["n1"] = {}
    small = "0" * 31 + "1"
    write_holdings(catalog, "n1", {f"{n:032x}": Holding(n * 1000, n * 1000) for n in range(1, 81)})
    volume_records.add(
        catalog, VolumeRecord(id="pvc-1", name="pvc-1", context={"dataset": f"mask@{small}"}, capacity_bytes=1)
    )
    catalog.set_document(
        volume_records.KIND, "odd", json.dumps({"id": "odd", "name": "", "context": {}, "capacity_bytes": 1}), old=None
    )
    catalog.set_document(volume_records.KIND, "damaged", "{", old=None)
    labels.look()
    assert len(cluster.nodes["n1"]) == MOST_LABELS
    assert snapshot_label(small) in cluster.nodes["n1"]
    assert snapshot_label("0" * 31 + "2") not in cluster.nodes["n1"]


def test_the_controllers_process_labels_nodes(
    home: Path, settings: Settings, cluster: ApiServer, kubeconfig: Path, start_driver: StartDriver
) -> None:
    cluster.nodes["n1"] = dict(OTHERS)
    with closing(open_catalog(settings)) as catalog:
        write_holdings(catalog, "n1", {A: share(100)})
    driver = start_driver("--mode=controller", "--label-nodes", f"--kubeconfig={kubeconfig}")
    cluster.wait_for("PATCH /api/v1/nodes/n1")
    assert any("labelled 1 nodes" in driver.lines(number, 1)[0] for number in itertools.count())
    assert driver.stop() == 0
    assert cluster.nodes["n1"] == OTHERS | {snapshot_label(A): "full"}


def test_without_an_api_there_is_nobody_to_tell(start_driver: StartDriver) -> None:
    with pytest.raises(RuntimeError, match="--label-nodes needs a Kubernetes API"):
        start_driver("--mode=controller", "--label-nodes")
