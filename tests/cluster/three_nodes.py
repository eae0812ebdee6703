"""Nodes, three by default, each a network namespace with a daemon, one store, and what can happen to them."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from datacache.cluster.members import SERVING, Member
from datacache.cluster.placement import Placement
from datacache.core.ids import BLOCK_BYTES, ObjectRef, block_count, block_id, object_id
from datacache.daemon.client import DaemonClient
from datacache.settings import load_settings
from tests.conformance.faults import FaultProxy
from tests.conformance.relay import Relay, Trouble
from tests.netns import CLUSTER_PORT, Network, NodeHome, one_home_a_node, relays_between
from tests.servers import Mongod, RcloneS3

KEY = "0123456789abcdef"
SIZES = [30_000 + 1000 * number for number in range(24)] + [2 * BLOCK_BYTES + 5]
ROOM = {"ram_bytes": "64MiB", "ssd_bytes": "256MiB", "cluster_key": KEY}
_names = (f"data-{number}" for number in itertools.count())


class Data:
    """A bucket with objects, and its blocks by the node that owns them."""

    def __init__(self, store: RcloneS3, name: str, sizes: Sequence[int] = SIZES) -> None:
        self.name, self._store = name, store
        bucket, some = store.make_bucket(name), random.Random(name)
        self.content = {f"{number}.bin": some.randbytes(size) for number, size in enumerate(sizes)}
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

    def __init__(
        self,
        network: Network,
        store: RcloneS3,
        proxy: FaultProxy,
        homes: Sequence[NodeHome],
        mongod: Mongod | None = None,
        relays: Mapping[tuple[str, str], Relay] | None = None,
    ) -> None:
        self.network, self.store, self.proxy, self.homes = network, store, proxy, homes
        self.mongod, self.relays = mongod, relays or {}
        self.clients = [DaemonClient(load_settings(home.env)) for home in homes]

    def data(self, prefix: str = "", sizes: Sequence[int] = SIZES) -> Data:
        return Data(self.store, prefix + next(_names), sizes)

    def owned(self, data: Data) -> list[list[tuple[ObjectRef, int]]]:
        """Return the blocks that each node owns."""
        nodes = self.network.nodes
        placement = Placement([Member(node.name, f"{node.address}:{CLUSTER_PORT}", 1.0) for node in nodes])
        owners = placement.owners([block_id(object_id(ref), number) for ref, number in data.blocks])
        return [[b for b, owner in zip(data.blocks, owners, strict=True) if owner.id == n.name] for n in nodes]

    def states(self) -> list[list[str]]:
        """Return the states of all members, as each node sees them."""
        return [[member["state"] for member in client.cluster()["members"]] for client in self.clients]

    def until_all_serve(self) -> None:
        """Wait until each node knows that all serve."""
        until(lambda: self.states() == [[SERVING] * len(self.homes)] * len(self.homes))

    def from_nodes(self) -> int:
        """Return how many blocks nodes got from each other, or asked for in vain."""
        stats = [client.cluster()["from_nodes"] for client in self.clients]
        return sum(each["blocks"] + each["missed"] for each in stats)

    def stored(self, tier: str) -> list[int]:
        """Return how many blocks each node has in a tier."""
        return [one["blocks"] for c in self.clients for one in c.cache_status()["tiers"] if one["name"] == tier]

    def warm(self, node: int, data: Data) -> dict[str, object]:
        """Warm a snapshot on a node; return the job."""
        client, job = self.clients[node], self.clients[node].warm(f"{data.name}@latest")
        until(lambda: client.job(job)["state"] != "running")
        return client.job(job)

    def read(self, client: DaemonClient, data: Data, blocks: Iterable[tuple[ObjectRef, int]] | None = None) -> None:
        """Read blocks on a node, and compare them."""
        for ref, number in data.blocks if blocks is None else blocks:
            if client.block(ref, number, data.name, "") != data.expected(ref, number):
                pytest.fail(f"wrong bytes of {ref.key}, block {number}")


@contextmanager
def a_cluster(
    folder: Path,
    *,
    trouble: Callable[[], Trouble] | None = None,
    processes: Sequence[int] = (1, 1, 1),
    zones: Sequence[str] = (),
    proxy_of: Callable[..., FaultProxy] = FaultProxy,
    **settings: object,
) -> Iterator[Cluster]:
    """Start all that it takes, a node for each number of `processes`; with `trouble`, nodes reach each other through
    relays. `zones` are theirs. `proxy_of` makes the proxy before the store."""
    mongod, relays = None, None
    with ExitStack() as stack:
        network = stack.enter_context(Network(len(processes)))
        store = stack.enter_context(RcloneS3(folder / "s3", host=network.address))
        proxy = stack.enter_context(proxy_of(store.endpoint, host=network.address))
        if "catalog" not in settings:
            members = [f"{node.name}={node.address}:{CLUSTER_PORT}" for node in network.nodes]
            members = [f"{member}/{zone}" for member, zone in zip(members, zones, strict=True)] if zones else members
            catalog = f"sqlite:///{folder / 'catalog.db'}"
            settings, zones = {"cluster_members": ",".join(members), "catalog": catalog} | settings, ()
        else:
            mongod = stack.enter_context(Mongod(folder / "mongod", replica_set=True, host=network.address))
            settings = settings | {"catalog": mongod.database_url()}
        env = store.env() | {"AWS_ENDPOINT_URL": proxy.url}
        homes = stack.enter_context(
            one_home_a_node(network, folder, env, cluster="lab", processes=processes, zones=zones, **ROOM, **settings)
        )
        if trouble is not None:
            relays = stack.enter_context(relays_between(network, trouble=trouble))
        yield Cluster(network, store, proxy, homes, mongod, relays)


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


def kill(home: NodeHome) -> None:
    home.end_daemon(signal.SIGKILL)


def stop(home: NodeHome) -> None:
    assert home.daemon is not None
    home.daemon.send_signal(signal.SIGSTOP)


def go_on(home: NodeHome) -> None:
    assert home.daemon is not None
    home.daemon.send_signal(signal.SIGCONT)
    until(DaemonClient(load_settings(home.env)).alive)
