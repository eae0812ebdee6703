"""Epochs over one snapshot on all nodes of a cluster at once, from empty caches: what the store was asked for, and what
went over each node's cable.

A node is a network namespace (`tests/netns.py`) with a home, a daemon and a reader of its own, all on the processors of
this machine; the catalog is a MongoDB and the store `rclone serve s3`, outside of the nodes. `--mbit` limits each cable
in each direction. Every reader reads every object once an epoch, in an order of its own. Beside ours: bare obstore,
which keeps nothing; and, where nginx is installed, obstore through an nginx on every node that asks the owner of an
address by a consistent hash, which keeps the answer. Each way is measured alone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import OBJECT_BYTES, ResultTable, Workspace, benchmark, make_files
from benchmarks.peers import NGINX_URL, nginx_on
from benchmarks.readers import Readers
from benchmarks.usage import cpu_of_families
from datacache.cluster.members import SERVING
from datacache.daemon.client import DaemonClient
from datacache.settings import load_settings
from tests.netns import Network, NodeHome, one_home_a_node
from tests.servers import Mongod, RcloneS3, ServerError

DATASET = "images"


@dataclass(frozen=True, kw_only=True)
class ClusterEpoch:
    """One epoch of all nodes together."""

    seconds: float
    gets: int
    received_bytes: int
    """Over the cables of all nodes, from the store and from each other."""
    cpu_s: float
    """Of the processes that fetch and serve, readers left out."""


@dataclass(frozen=True, kw_only=True)
class ClusterWay:
    """One way to read, with all that it needs running."""

    read: str
    """The way's name in `benchmarks.readers`."""
    homes: Sequence[NodeHome]
    pids: Sequence[int]


def main() -> None:
    with benchmark(
        __doc__, nodes=([3, 8], [3]), files=(2000, 60), size=OBJECT_BYTES, epochs=(3, 1), readers=1, mbit=0.0
    ) as (args, work):
        for count in args.nodes:
            try:
                network = work.stack.enter_context(Network(count, mbit=args.mbit or None))
            except pytest.skip.Exception as exc:
                print(f"no nodes can be made here: {exc}")
                return
            _compare(work, network, args)


def _compare(work: Workspace, network: Network, args: Any) -> None:
    count, folder = len(network.nodes), work.folder(f"nodes-{len(network.nodes)}")
    with ExitStack() as stack:
        store = stack.enter_context(RcloneS3(folder / "s3", live=False, host=network.address))
        mongod = stack.enter_context(Mongod(folder / "mongod", replica_set=True, host=network.address))
        make_files(store.make_bucket(DATASET), args.files, args.size)
        url = mongod.database_url()
        limit = f"cables of {args.mbit:,.0f} Mbit/s" if args.mbit else "cables without limit"
        title = f"{count} nodes, {args.files:,} objects × {args.size:,} bytes, {limit}"
        columns = ("GETs a block", "files/s, all nodes", "received / read", "CPU µs a file")
        table = ResultTable(title, "", *columns)
        ways = {"ours": _ours, "nginx, consistent hash": _nginx, "bare obstore": _bare}
        for name, prepare in ways.items():
            try:
                with prepare(network, work.short_folder(dir=args.dir), store, url, args) as way:
                    epochs = [_epoch(way, network, store, args, seed) for seed in range(args.epochs)]
            except ServerError as exc:
                print(f"{name}: {exc}")
                continue
            for number, epoch in enumerate(epochs, 1):
                read = count * args.files
                table.row(
                    f"{name}, epoch {number}",
                    epoch.gets / args.files,
                    read / epoch.seconds,
                    epoch.received_bytes / (read * args.size),
                    epoch.cpu_s / read * 1e6 if way.pids else None,
                )
        table.print()


def _epoch(way: ClusterWay, network: Network, store: RcloneS3, args: Any, seed: int) -> ClusterEpoch:
    with ExitStack() as stack:
        readers = [
            stack.enter_context(Readers(home, DATASET, [way.read] * args.readers, seed=seed * len(way.homes) + number))
            for number, home in enumerate(way.homes)
        ]
        gets, cpu_s, begun = store.get_count(DATASET), cpu_of_families(way.pids), time.perf_counter()
        received = sum(node.traffic().received_bytes for node in network.nodes)
        for one in readers:
            one.begin()
        reads = [len(took) for one in readers for took in one.end()]
        if sum(reads) != len(network.nodes) * args.files:
            raise SystemExit(f"{sum(reads)} objects were read")
        return ClusterEpoch(
            seconds=time.perf_counter() - begun,
            gets=store.get_count(DATASET) - gets,
            received_bytes=sum(node.traffic().received_bytes for node in network.nodes) - received,
            cpu_s=cpu_of_families(way.pids) - cpu_s,
        )


# --- the ways ---


def _homes(network: Network, folder: Path, env: Mapping[str, str], url: str, args: Any, **more: object) -> Any:
    size_bytes = args.files * args.size
    room = {"ssd_bytes": 2 * size_bytes + 2**28, "ram_bytes": 2**26}
    return one_home_a_node(network, folder, env, catalog=url, **room, **more)


@contextmanager
def _ours(network: Network, folder: Path, store: RcloneS3, url: str, args: Any) -> Iterator[ClusterWay]:
    cluster = {"cluster": "benchmark", "cluster_key": secrets.token_hex(16)}
    with _homes(network, folder, store.env(), url, args, **cluster) as homes:
        homes[0].snapshot(DATASET, f"s3://{DATASET}")
        wait_for_all(homes)
        yield ClusterWay(read="api", homes=homes, pids=[home.daemon.pid for home in homes])


def wait_for_all(homes: Sequence[NodeHome]) -> None:
    """Wait until every node knows that all serve."""
    for home in homes:
        client = DaemonClient(load_settings(home.env))
        while [each["state"] for each in client.cluster()["members"]] != [SERVING] * len(homes):
            time.sleep(0.1)


@contextmanager
def _bare(network: Network, folder: Path, store: RcloneS3, url: str, args: Any) -> Iterator[ClusterWay]:
    with _homes(network, folder, store.env(), url, args) as homes:  # for the names alone
        yield ClusterWay(read="bare", homes=homes, pids=[])


@contextmanager
def _nginx(network: Network, folder: Path, store: RcloneS3, url: str, args: Any) -> Iterator[ClusterWay]:
    env = store.env() | {"AWS_ENDPOINT_URL": NGINX_URL}
    with _homes(network, folder, env, url, args) as homes, nginx_on(network.nodes, folder, store.endpoint) as pids:
        yield ClusterWay(read="bare", homes=homes, pids=pids)


if __name__ == "__main__":
    main()
