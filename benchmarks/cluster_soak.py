"""A cluster that is never left alone: three nodes read more than they can keep, while nodes, the network between them
and MongoDB fail in turns, by chance. Every byte is compared with the source, and a read that fails ends the benchmark.

Each node is a network namespace (`tests/netns.py`) with readers of the Python API. `--seed` repeats the order of
faults. Two in a hundred pieces that nodes send each other are reset or late. The first node is never killed: what it
holds is looked at `--looks` times, and must not grow.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest

from benchmarks.harness import ResultTable, Workspace, benchmark, make_files
from benchmarks.readers import Readers
from benchmarks.usage import memory_mib
from datacache.cluster.members import DRAINED
from datacache.daemon.client import DaemonClient
from datacache.settings import load_settings
from tests.conformance.relay import NO_TROUBLE, Relay, Trouble
from tests.netns import Network, NodeHome, one_home_a_node, relays_between
from tests.servers import Mongod, RcloneS3

DATASET = "soak"
ROOM = {"ram_bytes": "16MiB", "ssd_bytes": "32MiB"}
_TROUBLED = 0.02
_LATE_S = 0.2
_GROWTH_MIB, _GROWTH_DESCRIPTORS = 64, 128
"""More than this from the first look to the last is a leak: buffers and connections come and go."""


class DaemonHolds(NamedTuple):
    """What a daemon holds, and how many faults there have been."""

    minute: float
    faults: int
    resident_mib: float
    anonymous_mib: float
    descriptors: int


class FaultsByChance:
    """Has one thing fail after the other. The main thread calls: daemons and servers die with the one that starts
    them."""

    def __init__(
        self, homes: Sequence[NodeHome], mongod: Mongod, relays: Mapping[tuple[str, str], Relay], some: random.Random
    ) -> None:
        self._homes, self._mongod, self._relays, self._some = homes, mongod, relays, some
        self._pause = threading.Event()
        self.made: Counter[str] = Counter()

    def make(self) -> None:
        """Choose a fault, and wait until it is over."""
        mongod = self._some.choice(["", "", "", "MongoDB stopped", "MongoDB killed"])
        of_nodes: dict[str, Callable[[NodeHome], None]] = {
            "killed": lambda home: self._away(home, signal.SIGKILL),
            "restarted": lambda home: self._away(home, signal.SIGTERM),
            "stopped": self._stopped,
            "parted": self._parted,
        }
        if not mongod:  # it is where a node says that it drains
            of_nodes["drained"] = self._drained
        name, home = self._some.choice([*of_nodes]), self._some.choice(self._homes[1:])
        with self._mongod.away(stopped=mongod.endswith("stopped")) if mongod else nullcontext():
            self.made.update(filter(None, [mongod, name]))
            of_nodes[name](home)
            self._wait(3)

    def _wait(self, most_s: float) -> None:
        self._pause.wait(self._some.uniform(0, most_s))

    def _away(self, home: NodeHome, how: signal.Signals) -> None:
        home.end_daemon(how)
        self._wait(3)
        home.start_daemon()

    def _stopped(self, home: NodeHome) -> None:
        assert home.daemon is not None
        home.daemon.send_signal(signal.SIGSTOP)
        self._wait(3)
        home.daemon.send_signal(signal.SIGCONT)

    def _parted(self, home: NodeHome) -> None:
        relays = [relay for names, relay in self._relays.items() if home.node.name in names]
        for relay in relays:
            relay.hold()
        self._wait(3)
        for relay in relays:
            relay.let_go()

    def _drained(self, home: NodeHome) -> None:
        client, give_up_at = DaemonClient(load_settings(home.env)), time.monotonic() + 20
        client.drain()
        while time.monotonic() < give_up_at and all(
            one["state"] != DRAINED for one in client.cluster()["members"] if one["this"]
        ):
            self._wait(1)
        home.end_daemon()
        home.start_daemon()


def main() -> None:
    with benchmark(
        __doc__,
        minutes=(30.0, 0.05),
        looks=(6, 2),
        files=(1500, 1200),
        large=(4, 2),
        threads=(2, 1),
        pause=(0.0, 0.03),
        seed=secrets.randbelow(10**6),
    ) as (args, work):
        try:
            network = work.stack.enter_context(Network(3))
        except pytest.skip.Exception as exc:
            print(f"no nodes can be made here: {exc}")
            return
        _soak(work, network, args)


def _soak(work: Workspace, network: Network, args: Any) -> None:
    some, stack = random.Random(args.seed), work.stack
    print(f"seed {args.seed}", flush=True)
    of_relays = random.Random(args.seed + 1)

    def trouble() -> Trouble:
        if of_relays.random() >= _TROUBLED:
            return NO_TROUBLE
        return of_relays.choice([Trouble(reset=True), Trouble(late_s=_LATE_S)])

    store = stack.enter_context(RcloneS3(work.folder("s3"), live=False, log_requests=False, host=network.address))
    mongod = stack.enter_context(Mongod(work.folder("mongod"), replica_set=True, host=network.address))
    bucket = store.make_bucket(DATASET)
    make_files(bucket, args.files)
    for number in range(args.large):
        (bucket / f"large-{number}.bin").write_bytes(some.randbytes(10**7))
    settings = {"catalog": mongod.database_url(), "cluster_key": secrets.token_hex(16), **ROOM}
    homes = stack.enter_context(
        one_home_a_node(network, work.short_folder(dir=args.dir), store.env(), cluster="soak", **settings)
    )
    relays = stack.enter_context(relays_between(network, trouble=trouble))
    homes[0].snapshot(DATASET, f"s3://{DATASET}")
    readers = [
        stack.enter_context(
            Readers(home, DATASET, ["api"], threads=args.threads, pause_s=args.pause, seed=number, compared=bucket)
        )
        for number, home in enumerate(homes)
    ]
    faults, held = FaultsByChance(homes, mongod, relays, some), []
    for one in readers:
        one.begin()
    begun = time.monotonic()
    while len(held) < args.looks:
        faults.make()
        for one in readers:
            one.expect_alive()
        if time.monotonic() >= begun + (len(held) + 1) / args.looks * 60 * args.minutes:
            held.append(_held(homes[0], (time.monotonic() - begun) / 60, faults.made.total()))
            print(held[-1], flush=True)
    reads = [one.end() for one in readers]
    _print(faults, held, reads)
    first, last = held[0], held[-1]
    if last.anonymous_mib - first.anonymous_mib > _GROWTH_MIB:
        raise SystemExit("the memory of the node that was never killed has grown")
    if last.descriptors - first.descriptors > _GROWTH_DESCRIPTORS:
        raise SystemExit("the descriptors of the node that was never killed have grown")


def _held(home: NodeHome, minute: float, faults: int) -> DaemonHolds:
    assert home.daemon is not None
    pid = home.daemon.pid
    return DaemonHolds(
        minute, faults, memory_mib(pid, "VmRSS"), memory_mib(pid, "RssAnon"), len(os.listdir(f"/proc/{pid}/fd"))
    )


def _print(faults: FaultsByChance, held: Sequence[DaemonHolds], reads: Sequence[Sequence[Sequence[float]]]) -> None:
    table = ResultTable("Faults", "what", "times")
    for name, times in sorted(faults.made.items()):
        table.row(name, times)
    table.print()
    table = ResultTable("Readers, every byte compared", "node", "reads", "median, ms", "p99.9, ms", "longest, s")
    for number, of_node in enumerate(reads, 1):
        took = sorted(seconds for took in of_node for seconds in took)
        middle, late = (took[int(share * len(took))] * 1e3 for share in (0.5, 0.999))
        table.row(f"n{number}", len(took), middle, late, took[-1])
    table.print()
    table = ResultTable(
        "The daemon that was never killed", "minute", "faults so far", "RSS, MiB", "anonymous, MiB", "descriptors"
    )
    for one in held:
        table.row(f"{one.minute:.1f}", *one[1:])
    table.print()


if __name__ == "__main__":
    main()
