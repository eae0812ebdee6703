"""Three nodes with a daemon each and one store: each block is got once, and a node that is gone costs no read."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from datacache.cluster.peer import MOST_S
from datacache.core.ids import BLOCK_BYTES, block_count
from datacache.daemon.client import DaemonClient
from datacache.settings import load_settings
from tests.cluster.three_nodes import Cluster, a_cluster, at_once, go_on, kill, shuffled, stop, until
from tests.conformance.faults import Fault
from tests.netns import NodeHome
from tests.promises import promise

pytestmark = pytest.mark.alone
"""A node that gets no processor for a second is passed over, and its blocks are got once more."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Nodes whose members are listed in their settings."""
    with a_cluster(tmp_path_factory.mktemp("nodes"), cluster_mode="off-*=off,parted-*=partition,*=share") as made:
        yield made


@promise("A block is got from the store once, however many nodes of a cluster read it")
def test_nodes_that_read_all_at_the_same_time_ask_the_store_once_for_each_block(cluster: Cluster) -> None:
    data = cluster.data()
    assert all(cluster.owned(data)), "each node owns something"
    at_once(*(lambda c=c, n=n: cluster.read(c, data, shuffled(data, n)) for n, c in enumerate(cluster.clients * 2)))
    assert data.gets() == len(data.blocks)


@promise("A block is got from the store once, however many nodes of a cluster read it")
def test_nodes_that_load_the_same_weights_at_once_ask_the_store_once_for_each_block(cluster: Cluster) -> None:
    import torch
    from safetensors.torch import save_file

    from datacache.safetensors import load_file

    bucket, tensors = cluster.store.make_bucket("cold-weights"), {"layer": torch.rand(2**24)}
    save_file(tensors, bucket / "w.safetensors")
    cluster.homes[0].snapshot(bucket.name, f"s3://{bucket.name}")

    def load(home: NodeHome) -> None:
        loaded = load_file(f"{bucket.name}@latest/w.safetensors", settings=load_settings(home.env))
        assert torch.equal(loaded["layer"], tensors["layer"])

    at_once(*(lambda home=home: load(home) for home in cluster.homes))
    assert cluster.store.get_count(bucket.name) == block_count((bucket / "w.safetensors").stat().st_size)


@promise("An owner whose store is slow is waited for as long as it shows signs of life")
def test_a_store_that_takes_seconds_is_asked_once_for_each_block(cluster: Cluster) -> None:
    data, go_on = cluster.data(), threading.Event()
    cluster.proxy.always(Fault(wait=go_on, only=lambda method, path: method == "GET"))

    def hold() -> None:
        until(lambda: sum(data.name in request for request in cluster.proxy.requests) >= 3)
        threading.Event().wait(2 * MOST_S)  # longer than any node may be silent
        go_on.set()

    try:
        at_once(
            hold, *(lambda c=c, n=n: cluster.read(c, data, shuffled(data, n)) for n, c in enumerate(cluster.clients))
        )
    finally:
        go_on.set()
        cluster.proxy.heal()
    assert data.gets() == len(data.blocks)


@promise("An owner whose store is slow is waited for as long as it shows signs of life")
def test_a_block_that_is_on_its_way_for_seconds_is_asked_for_once(cluster: Cluster) -> None:
    data = cluster.data(sizes=[BLOCK_BYTES])
    for node in cluster.network.nodes:
        node.limit(24.0)  # a second and a half for a block
    try:
        for client in cluster.clients:
            cluster.read(client, data)
    finally:
        for node in cluster.network.nodes:
            node.limit(None)
    assert data.gets() == len(data.blocks)


@promise("What one node of a cluster has, no other one asks the store for")
def test_blocks_that_a_node_lost_come_from_other_nodes(cluster: Cluster) -> None:
    data = cluster.data()
    for client in cluster.clients:
        cluster.read(client, data)
    assert data.gets() == len(data.blocks)
    for client in cluster.clients:  # owners of what they lost, too
        client.evict(data.name)
        cluster.read(client, data)
    assert data.gets() == len(data.blocks)


@promise("What one node of a cluster has, no other one asks the store for")
def test_a_node_that_has_nothing_reads_all_while_the_store_is_away(cluster: Cluster) -> None:
    data = cluster.data()
    for client in cluster.clients:
        cluster.read(client, data)
    cluster.clients[2].evict(data.name)
    cluster.proxy.refuse()
    try:
        cluster.read(cluster.clients[2], data)
    finally:
        cluster.proxy.accept()
    assert data.gets() == len(data.blocks)


def test_nodes_ask_nobody_for_a_data_set_whose_mode_is_off(cluster: Cluster) -> None:
    data, before = cluster.data("off-"), cluster.from_nodes()
    for client in cluster.clients:
        cluster.read(client, data)
    assert cluster.from_nodes() == before
    assert data.gets() == 3 * len(data.blocks)


@promise("With the mode `partition` a node keeps on its disk what it owns")
def test_a_node_keeps_on_its_disk_what_it_owns_of_a_data_set_that_is_parted(cluster: Cluster) -> None:
    data, before = cluster.data("parted-"), cluster.stored("ssd")
    for client in cluster.clients:
        cluster.read(client, data)
    assert data.gets() == len(data.blocks)
    grown = [now - was for now, was in zip(cluster.stored("ssd"), before, strict=True)]
    assert grown == [len(blocks) for blocks in cluster.owned(data)]
    assert sum(grown) == len(data.blocks)


@promise("`dsctl warm` says done only when every byte is on the node")
def test_a_warm_up_of_what_is_parted_is_done_when_the_disks_of_all_owners_have_it(cluster: Cluster) -> None:
    data, before, ram = cluster.data("parted-"), cluster.stored("ssd"), cluster.stored("ram")
    cluster.homes[0].snapshot(data.name, f"s3://{data.name}")
    assert cluster.warm(0, data)["state"] == "done"
    owned = [len(blocks) for blocks in cluster.owned(data)]
    assert [now - was for now, was in zip(cluster.stored("ssd"), before, strict=True)] == owned
    assert data.gets() == sum(owned)
    assert cluster.stored("ram")[0] == ram[0]  # what others own only came by
    for client in cluster.clients[1:]:
        client.evict(data.name)
    cluster.homes[2].end_daemon()
    try:
        jobs, gets = [], []
        for _ in range(2):
            jobs.append(cluster.warm(0, data))
            gets.append(data.gets())
    finally:
        cluster.homes[2].start_daemon()
    for job in jobs:
        assert job["state"] == "incomplete"
        assert "the node n3 at" in str(job["error"])
        assert "Start the daemon of n3 again" in str(job["hint"])
    assert jobs[0]["bytes_from_nodes"] == jobs[0]["bytes_fetched"] > 0
    assert (jobs[1]["bytes_fetched"], gets[0]) == (0, gets[1])  # the node that stands in has what it can get
    grown = [now - was for now, was in zip(cluster.stored("ssd"), before, strict=True)]
    assert grown[0] == owned[0]
    assert grown[1] > owned[1]
    assert cluster.warm(0, data)["state"] == "done"  # at once, though n3 was passed over a moment ago
    assert data.gets() == gets[1] + owned[2] - (grown[1] - owned[1])


FAULTS = {
    "killed": (kill, NodeHome.start_daemon),
    "cut off": (lambda home: home.node.cut(), lambda home: home.node.mend()),
    "stopped": (stop, go_on),
}


@promise("Readers see no error and no wrong byte when a node of the cluster dies, hangs or is cut off")
@pytest.mark.parametrize("fault", FAULTS)
def test_an_epoch_goes_on_when_a_node_is(cluster: Cluster, fault: str) -> None:
    data, (begin, end) = cluster.data(), FAULTS[fault]
    lost, left = cluster.homes[0], cluster.clients[1:]
    under_way, count = threading.Event(), itertools.count()

    def read(client: DaemonClient, seed: int) -> None:
        for block in shuffled(data, seed):
            cluster.read(client, data, [block])
            if next(count) == len(data.blocks) // 2:
                under_way.set()

    def break_it() -> None:
        assert under_way.wait(60)
        begin(lost)

    try:
        at_once(break_it, *(lambda c=c, n=n: read(c, n) for n, c in enumerate(left)))
        again = cluster.data()
        at_once(*(lambda c=c: cluster.read(c, again) for c in left))  # and all of an epoch without it
    finally:
        end(lost)
    cluster.read(cluster.clients[0], data)
    cluster.read(cluster.clients[0], again)


@promise("A node that drains owns nothing any more, and hands over what only it has")
@pytest.mark.parametrize("found_by", ["catalog", "list"])
def test_a_node_drains_and_what_it_had_outlives_it(tmp_path_factory: pytest.TempPathFactory, found_by: str) -> None:
    settings = {"catalog": "mongodb"} if found_by == "catalog" else {}
    mode = "parted-*=partition,*=share"
    with a_cluster(tmp_path_factory.mktemp("nodes"), cluster_mode=mode, **settings) as cluster:

        def states() -> list[list[Any]]:
            return [[each["state"] for each in client.cluster()["members"]] for client in cluster.clients]

        until(lambda: states() == [["serving"] * 3] * 3)
        data, (first, *others) = cluster.data(), cluster.clients
        mine = cluster.owned(data)[0]
        cluster.read(first, data)
        until(lambda: sum(cluster.stored("ssd")) == 2 * len(data.blocks) - len(mine) > 0)
        parted = cluster.data("parted-")
        hers = cluster.owned(parted)[0]
        cluster.read(others[0], parted)  # which has it in RAM now
        until(lambda: sum(cluster.stored("ssd")) == 2 * len(data.blocks) - len(mine) + len(parted.blocks))
        before = cluster.stored("ssd")
        assert others[0].drain("n1") == {"node": "n1", "state": "draining", "left": 0}
        until(lambda: states() == [["drained", "serving", "serving"]] * 3)
        assert [each["left"] for each in others[1].cluster()["members"]] == [0, 0, 0]
        cluster.homes[1].end_daemon()
        cluster.homes[1].start_daemon()  # who was away when it was told learns it when it is back
        until(lambda: states() == [["drained", "serving", "serving"]] * 3)
        moved = [now - was for now, was in zip(cluster.stored("ssd"), before, strict=True)]
        assert (moved[0], sum(moved)) == (0, len(mine) + len(hers))  # and not what others have on their disks
        again = cluster.data()
        for client in others:
            cluster.read(client, again)
        assert again.gets() == len(again.blocks)
        assert cluster.stored("ssd")[0] == before[0]  # it owns nothing
        cluster.homes[0].end_daemon()
        for client in others:
            cluster.read(client, data)
        assert data.gets() == len(data.blocks)
        cluster.homes[0].start_daemon()
        until(lambda: states() == [["serving"] * 3] * 3)
        first.evict(parted.name)
        before = cluster.stored("ssd")
        cluster.read(first, parted)  # what is its own again it has from who owned it meanwhile
        assert parted.gets() == len(parted.blocks)
        assert cluster.stored("ssd") == [before[0] + len(hers), *before[1:]]


@pytest.fixture(scope="module")
def zoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes in one zone and one in another."""
    with a_cluster(tmp_path_factory.mktemp("nodes"), zones=("east", "east", "west")) as made:
        yield made


@promise("A block is got from the store once, however many nodes of a cluster read it")
def test_nodes_in_two_zones_ask_the_store_once_for_each_block(zoned: Cluster) -> None:
    data = zoned.data()
    at_once(*(lambda c=c: zoned.read(c, data) for c in zoned.clients * 2))
    assert data.gets() == len(data.blocks)


def test_blocks_that_nobody_has_room_for_are_told(zoned: Cluster) -> None:
    data, first = zoned.data(), zoned.clients[0]
    before = zoned.stored("ssd")[0]
    zoned.read(first, data)
    until(lambda: zoned.stored("ssd")[0] == before + len(data.blocks))
    for home in zoned.homes[1:]:
        home.end_daemon()
    assert first.drain()["state"] == "draining"
    until(lambda: first.cluster()["members"][0]["state"] == "drained")
    assert first.cluster()["members"][0]["left"] >= len(data.blocks)
