"""Objects that other nodes have, beside the store that they come from, over the same cable.

Three network namespaces (`tests/netns.py`), each with a cable of `--mbit` in each direction. The first one reads and
owns nothing, as a node that drained; the other two have all. The store is Ceph with its gateway, in memory, outside of
the nodes. In a round each object is read once from an empty cache, by threads of one process. Where nginx is installed
it does the same: the reader's own asks one of the other two by a consistent hash of the address, which keeps answers.

The link's delay is that of a byte there and a byte back over a bare socket; one row is a bare socket that gets objects.
Processor time a file is that of all processes of a side: the reader with its node's daemon, and those who give objects.
"""

from __future__ import annotations

import json
import random
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import obstore
import pytest

from benchmarks.cluster import DATASET
from benchmarks.harness import (
    OBJECT_BYTES,
    Home,
    ResultTable,
    ToldProcess,
    Workspace,
    benchmark,
    ratio,
    rounds_of,
)
from benchmarks.peers import NGINX_URL, bare_store, nginx_on
from benchmarks.readers import Readers
from benchmarks.usage import cpu_of_families
from datacache.cluster.members import DRAINED
from datacache.daemon.client import DaemonClient
from datacache.settings import load_settings
from tests.netns import CLUSTER_PORT, Network, Node, NodeHome, one_home_a_node
from tests.servers import CephRgw, ServerError

_GIVE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
taker, _ = listener.accept()
while asked := taker.recv(1):
    taker.sendall(bytes(int(sys.argv[2])) if asked == b"o" else b".")
"""
_TAKE = """
import json, socket, sys, time
giver, size = socket.create_connection((sys.argv[1], int(sys.argv[2]))), int(sys.argv[3])
giver.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def taken(asked, size):
    begun, left = time.perf_counter(), size
    giver.send(asked)
    while left:
        left -= len(giver.recv(left))
    return time.perf_counter() - begun
print(json.dumps([sorted(taken(*what) for _ in range(500)) for what in ((b"b", 1), (b"o", size))]))
"""


class PeerPass(NamedTuple):
    """One pass over all objects."""

    rate: float
    p50_s: float
    received: float
    """Bytes over the reader's cable, of the objects' bytes."""
    here_us: float
    there_us: float
    """Processor time a file on the reader's node, and of those who give it."""


def main() -> None:
    with benchmark(
        __doc__, files=(2000, 60), size=OBJECT_BYTES, mbit=10_000.0, threads=([1, 16], [2]), rounds=(3, 1)
    ) as (args, work):
        try:
            network = work.stack.enter_context(Network(3, mbit=args.mbit))
        except pytest.skip.Exception as exc:
            print(f"no nodes can be made here: {exc}")
            return
        try:
            store = work.stack.enter_context(
                CephRgw(work.folder("ceph"), memory_bytes=4 * args.files * args.size + 2**30, host=network.address)
            )
        except ServerError as exc:
            print(f"no store: {exc}")
            return
        _compare(work, network, store, args)


def _compare(work: Workspace, network: Network, store: CephRgw, args: Any) -> None:
    _fill(store, args)
    reader, *owners = network.nodes
    catalog = {"catalog": f"sqlite:///{work.path}/catalog.db"}
    settings = catalog | {"cluster_key": secrets.token_hex(16), "prefetch": 0, "ssd_bytes": 4 * args.files * args.size}
    settings["cluster_members"] = ",".join(f"{node.name}={node.address}:{CLUSTER_PORT}" for node in network.nodes)
    folder = work.short_folder(dir=args.dir)
    homes = work.stack.enter_context(one_home_a_node(network, folder, store.env(), cluster="benchmark", **settings))
    _make_warm(homes)
    daemons = [home.daemon.pid for home in homes if home.daemon is not None]
    client = DaemonClient(load_settings(homes[0].env))
    ways: dict[str, Callable[[int], PeerPass]] = {
        "bare obstore": lambda threads: _pass(homes[0], "bare", threads, args, [], store.pids),
        "ours": lambda threads: _pass(
            homes[0], "api", threads, args, daemons[:1], daemons[1:], lambda: client.evict(DATASET)
        ),
    }
    try:
        nginx = work.stack.enter_context(nginx_on(network.nodes, work.folder("nginx"), store.endpoint, owners))
    except ServerError as exc:
        print(f"nginx: {exc}")
    else:
        env, enter = store.env() | {"AWS_ENDPOINT_URL": NGINX_URL}, reader.enter
        home = Home(work.folder("nginx-home"), env, catalog | {"daemon": "external"}, enter=enter)
        work.stack.callback(home.close)
        ways["nginx, consistent hash"] = lambda threads: _pass(
            home, "bare", threads, args, nginx[:1], nginx[1:], of=homes[0].node
        )
        ways["nginx, consistent hash"](4)  # from now on it has all
    delay_s, object_s = _bare_socket(reader, owners[0], args.size)
    for threads in args.threads:
        found = rounds_of({name: partial(way, threads) for name, way in ways.items()}, args.rounds, warm_up=1)
        at_once = f"{threads} at a time" if threads > 1 else "one at a time"
        table = ResultTable(
            f"{args.files:,} objects × {args.size:,} bytes, {at_once}, cables of {args.mbit:,.0f} Mbit/s",
            "", "files/s", "/ obstore", "p50, ms", "above the link's delay", "received / read", "CPU µs here", "there",
        )  # fmt: skip
        table.row("a bare socket", None, None, object_s * 1e3, (object_s - delay_s) * 1e3, None, None, None)
        for name, passes in found.items():
            one = PeerPass(*(median(each) for each in zip(*passes, strict=True)))
            table.row(
                name, one.rate, ratio(one.rate, median(each.rate for each in found["bare obstore"])), one.p50_s * 1e3,
                (one.p50_s - delay_s) * 1e3, f"{one.received:.3f}", one.here_us, one.there_us,
            )  # fmt: skip
        table.print()


def _fill(store: CephRgw, args: Any) -> None:
    store.make_bucket(DATASET)
    bucket, some = bare_store(DATASET, store.env()), random.Random(0)
    for number in range(args.files):
        obstore.put(bucket, f"{number:07d}.jpg", some.randbytes(args.size))


def _make_warm(homes: Sequence[NodeHome]) -> None:
    """Have the first node own nothing, and the others have all that they own."""
    homes[0].snapshot(DATASET, f"s3://{DATASET}")
    first, *others = (DaemonClient(load_settings(home.env)) for home in homes)
    first.drain()
    while any(client.cluster()["members"][0]["state"] != DRAINED for client in (first, *others)):
        time.sleep(0.05)
    homes[1].dsctl("warm", f"{DATASET}@latest", "--wait")


def _pass(
    home: Home,
    way: str,
    threads: int,
    args: Any,
    here: Sequence[int],
    there: Sequence[int],
    prepare: Callable[[], object] = lambda: None,
    *,
    of: Node | None = None,
) -> PeerPass:
    """Read each object once. `here` and `there` are the processes of the two sides, without the reader's."""
    node = home.node if isinstance(home, NodeHome) else of
    assert node is not None
    prepare()
    with Readers(home, DATASET, [way], threads=threads, seed=secrets.randbelow(10**6)) as reader:
        before, received, begun = (*map(cpu_of_families, (here, there)),), node.traffic(), time.perf_counter()
        reader.begin()
        [took] = reader.end()
        seconds = time.perf_counter() - begun
        here_s, there_s = (cpu_of_families(pids) - was for pids, was in zip((here, there), before, strict=True))
        received_bytes = node.traffic().received_bytes - received.received_bytes
    if len(took) != args.files:
        raise SystemExit(f"{len(took)} objects were read")
    return PeerPass(
        rate=args.files / seconds,
        p50_s=median(took),
        received=received_bytes / (args.files * args.size),
        here_us=1e6 * (here_s + reader.cpu_s) / args.files,
        there_us=1e6 * there_s / args.files,
    )


def _bare_socket(taker: Node, giver: Node, size: int) -> tuple[float, float]:
    """Return the seconds of a byte there and a byte back, and until an object is there; each the median."""
    gives = ToldProcess(*giver.enter, sys.executable, "-c", _GIVE, giver.address, str(size))
    takes = ToldProcess(*taker.enter, sys.executable, "-c", _TAKE, giver.address, gives.answer().strip(), str(size))
    try:
        byte, whole = (median(times) for times in json.loads(takes.answer()))
    finally:
        takes.close()
        gives.close()
    return byte, whole


if __name__ == "__main__":
    main()
