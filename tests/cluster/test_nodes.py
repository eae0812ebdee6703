"""Three nodes with a daemon each and one store: each block is got once, and a node that is gone costs no read."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from datacache.cluster.members import Member
from datacache.cluster.peer import MOST_S
from datacache.cluster.placement import Placement
from datacache.core.ids import BLOCK_BYTES, ObjectRef, block_count, block_id, object_id
from datacache.daemon.client import DaemonClient
from datacache.settings import load_settings
from tests.conformance.faults import Fault, FaultProxy
from tests.netns import CLUSTER_PORT, Network, NodeHome, one_home_a_node
from tests.promises import promise
from tests.servers import Mongod, RcloneS3

KEY = "0123456789abcdef"
SIZES = [30_000 + 1000 * number for number in range(24)] + [2 * BLOCK_BYTES + 5]
ROOM = {"ram_bytes": "64MiB", "ssd_bytes": "256MiB", "cluster_key": KEY}
_names = (f"data-{number}" for number in itertools.count())


class Data:
    """A bucket with objects, and its blocks by the node that owns them."""

    def __init__(self, store: RcloneS3, name: str) -> None:
        self.name, self._store = name, store
        bucket, some = store.make_bucket(name), random.Random(name)
        self.content = {f"{number}.bin": some.randbytes(size) for number, size in enumerate(SIZES)}
        for key, content in self.content.items():
            (bucket / key).write_bytes(content)
        listed = store.client().list_objects_v2(Bucket=name)["Contents"]
        refs = [ObjectRef(f"s3://{name}", o["Key"], o["Size"], o["ETag"].strip('"'), "") for o in listed]
        self.blocks = [(ref, number) for ref in refs for number in range(block_count(ref.size_bytes))]

    def gets(self) -> int:
        """Return what the store was asked for so far."""
        return self._store.get_count(self.name)

    def expected(self, ref: ObjectRef, number: int) -> bytes:
        return self.content[ref.key][number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


class Cluster:
    """The nodes and what they share."""

    def __init__(self, network: Network, store: RcloneS3, proxy: FaultProxy, homes: Sequence[NodeHome]) -> None:
        self.network, self.store, self.proxy, self.homes = network, store, proxy, homes
        self.clients = [DaemonClient(load_settings(home.env)) for home in homes]

    def data(self, prefix: str = "") -> Data:
        return Data(self.store, prefix + next(_names))

    def owned(self, data: Data) -> list[list[tuple[ObjectRef, int]]]:
        """Return the blocks that each node owns."""
        nodes = self.network.nodes
        placement = Placement([Member(node.name, f"{node.address}:{CLUSTER_PORT}", 1.0) for node in nodes])
        owners = placement.owners([block_id(object_id(ref), number) for ref, number in data.blocks])
        return [[b for b, owner in zip(data.blocks, owners, strict=True) if owner.id == n.name] for n in nodes]

    def from_nodes(self) -> int:
        """Return how many blocks nodes got from each other, or asked for in vain."""
        stats = [client.cluster()["from_nodes"] for client in self.clients]
        return sum(each["blocks"] + each["missed"] for each in stats)

    def stored(self, tier: str) -> list[int]:
        """Return how many blocks each node has in a tier."""
        return [one["blocks"] for c in self.clients for one in c.cache_status()["tiers"] if one["name"] == tier]

    def read(self, client: DaemonClient, data: Data, blocks: Iterable[tuple[ObjectRef, int]] | None = None) -> None:
        """Read blocks on a node, and compare them."""
        for ref, number in data.blocks if blocks is None else blocks:
            if client.block(ref, number, data.name, "") != data.expected(ref, number):
                pytest.fail(f"wrong bytes of {ref.key}, block {number}")


@contextmanager
def a_cluster(folder: Path, **settings: object) -> Iterator[Cluster]:
    with ExitStack() as stack:
        network = stack.enter_context(Network(3))
        store = stack.enter_context(RcloneS3(folder / "s3", host=network.address))
        proxy = stack.enter_context(FaultProxy(store.endpoint, host=network.address))
        if "catalog" not in settings:
            members = [f"{node.name}={node.address}:{CLUSTER_PORT}" for node in network.nodes]
            settings = {"cluster_members": ",".join(members)} | settings
        else:
            mongod = stack.enter_context(Mongod(folder / "mongod", replica_set=True, host=network.address))
            settings = settings | {"catalog": mongod.database_url()}
        env = store.env() | {"AWS_ENDPOINT_URL": proxy.url}
        homes = stack.enter_context(one_home_a_node(network, folder, env, cluster="lab", **ROOM, **settings))
        yield Cluster(network, store, proxy, homes)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Nodes whose members are listed in their settings."""
    with a_cluster(tmp_path_factory.mktemp("nodes"), cluster_mode="off-*=off,parted-*=partition,*=share") as made:
        yield made


def at_once(*reads: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(reads)) as pool:
        for read in [pool.submit(read) for read in reads]:
            read.result()


def shuffled(data: Data, seed: int) -> list[tuple[ObjectRef, int]]:
    return random.Random(seed).sample(data.blocks, len(data.blocks))


def until(true: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + 60, threading.Event()
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        pause.wait(0.05)


@promise("A block is got from the store once, however many nodes of a cluster read it")
def test_nodes_that_read_all_at_the_same_time_ask_the_store_once_for_each_block(cluster: Cluster) -> None:
    data = cluster.data()
    assert all(cluster.owned(data)), "each node owns something"
    at_once(*(lambda c=c, n=n: cluster.read(c, data, shuffled(data, n)) for n, c in enumerate(cluster.clients * 2)))
    assert data.gets() == len(data.blocks)


@promise("An owner whose store is slow is waited for as long as it shows signs of life")
def test_a_store_that_takes_seconds_is_asked_once_for_each_block(cluster: Cluster) -> None:
    data, go_on = cluster.data(), threading.Event()
    cluster.proxy.always(Fault(wait=go_on, only=lambda method, path: method == "GET"))

    def hold() -> None:
        until(lambda: sum(data.name in request for request in cluster.proxy.requests) >= 3)
        threading.Event().wait(3 * MOST_S)  # longer than any node may be silent
        go_on.set()

    try:
        at_once(
            hold, *(lambda c=c, n=n: cluster.read(c, data, shuffled(data, n)) for n, c in enumerate(cluster.clients))
        )
    finally:
        go_on.set()
        cluster.proxy.heal()
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


@promise("With the mode `partition` a node keeps on its disk what it owns, and nothing else")
def test_a_node_keeps_on_its_disk_what_it_owns_of_a_data_set_that_is_parted(cluster: Cluster) -> None:
    data, before = cluster.data("parted-"), cluster.stored("ssd")
    for client in cluster.clients:
        cluster.read(client, data)
    assert data.gets() == len(data.blocks)
    grown = [now - was for now, was in zip(cluster.stored("ssd"), before, strict=True)]
    assert grown == [len(blocks) for blocks in cluster.owned(data)]
    assert sum(grown) == len(data.blocks)


def kill(home: NodeHome) -> None:
    home.end_daemon(signal.SIGKILL)


def stop(home: NodeHome) -> None:
    assert home.daemon is not None
    home.daemon.send_signal(signal.SIGSTOP)


def go_on(home: NodeHome) -> None:
    assert home.daemon is not None
    home.daemon.send_signal(signal.SIGCONT)
    until(DaemonClient(load_settings(home.env)).alive)


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


@promise("A node that drains owns nothing any more, and gives others what it has")
def test_nodes_find_each_other_in_the_catalog_and_one_drains(tmp_path_factory: pytest.TempPathFactory) -> None:
    with a_cluster(tmp_path_factory.mktemp("nodes"), catalog="mongodb") as cluster:

        def states() -> list[list[Any]]:
            return [[each["state"] for each in client.cluster()["members"]] for client in cluster.clients]

        until(lambda: states() == [["serving"] * 3] * 3)
        data, first = cluster.data(), cluster.clients[0]
        # Objects of one block, of which nothing is read ahead.
        mine = [block for block in cluster.owned(data)[0] if block[0].size_bytes < BLOCK_BYTES]
        cluster.read(first, data, mine)
        assert data.gets() == len(mine) > 0
        assert first.drain()["state"] == "draining"
        until(lambda: states() == [["draining", "serving", "serving"]] * 3)
        for client in cluster.clients[1:]:
            cluster.read(client, data, mine)
        assert data.gets() == len(mine)
        before, again = cluster.stored("ssd"), cluster.data()
        for client in cluster.clients[1:]:
            cluster.read(client, again)
        assert again.gets() == len(again.blocks)
        assert cluster.stored("ssd")[0] == before[0]
