"""A cluster of 100 and of 1,000 caches in virtual time, with the real placement and the times of the real leases.

No bytes and no network: blocks are ids, a second costs nothing. What is shown:

- *owners' load*: the most and the least that a node owns in relation to its fair share, by the number of blocks; equal
  nodes, and nodes of one, two and four times the capacity. What it takes to compute an owner, and the memory of members
  and placement.
- *moves*: the share of blocks whose owner changes when a node dies or joins, and how many of them had to.
- *GETs*: three epochs in another order each, every block once an epoch, by random nodes that keep nothing; for each
  block, while nodes die or are restarted one after the other. Each node goes by a view of its own that is as old as its
  last reading. A restarted node drains for 5 s, is away for 20 s and keeps its disk; one that dies loses it. An owner
  without the block asks nobody before the store; the owner in its former view; or whom `Peers.get_earlier` asks.
- *hot*: one block gets 1 % of all reads. A node that has as much waiting as `--waiting` blocks answers busy, and the
  reader goes to the next in rank, at last to the store. Owners are nodes that serve at least 1 % of these reads.
"""

from __future__ import annotations

import gc
import heapq
import tracemalloc
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np

from benchmarks.harness import ResultTable, benchmark, timed
from datacache.cluster.members import DRAINING, SERVING, ClusterView, Member
from datacache.cluster.mongo_members import LEASE_S, VIEW_EVERY_S
from datacache.cluster.placement import Placement

DRAINS_S, AWAY_S = 5.0, 20.0
SERVICE_S, ROUND_TRIP_S = 1e-4, 2e-4


def main() -> None:
    with benchmark(
        __doc__,
        nodes=([100, 1000], [20]),
        blocks=([100_000, 300_000, 1_000_000], [2000]),
        reads=(100_000, 2000),
        epoch=1800.0,
        events=(300_000, 3000),
        waiting=8,
    ) as (args, _):
        show_load(args.nodes, args.blocks)
        show_moves(args.nodes, args.reads)
        show_gets(args.nodes, args.reads, args.epoch)
        show_hot(args.nodes, args.events, args.waiting)


def make_ids(count: int) -> list[bytes]:
    """Return ids as those of blocks of objects: 16 random bytes and a number."""
    random = np.random.default_rng(0).bytes(16 * count)
    return [random[at : at + 16] + b"\0\0\0\0" for at in range(0, 16 * count, 16)]


def make_members(count: int, capacities: tuple[int, ...] = (1,)) -> list[Member]:
    """Return members whose capacities take turns."""
    return [
        Member(f"node-{n}.rack-{n % 40}", f"10.{n >> 8}.{n & 255}.7:7070", capacities[n % len(capacities)] * 1e12)
        for n in range(count)
    ]


# --- who owns how much -----------------------------------------------------------------------------------------------


def show_load(nodes: list[int], blocks: list[int]) -> None:
    table = ResultTable(
        "Owners' load", "nodes", "capacities", "blocks", "a node", "most / fair", "least / fair", "mean deviation"
    )
    ids = make_ids(max(blocks))
    for count in nodes:
        for capacities in ((1,), (1, 2, 4)):
            members = make_members(count, capacities)
            owned = [member.id for member in Placement(members).owners(ids)]
            for size in blocks:
                loads = Counter(owned[:size])
                total = sum(member.weight for member in members)
                shares = np.array([loads[m.id] / size / (m.weight / total) for m in members])
                spread = float(np.abs(shares - 1).mean())
                table.row(
                    f"{count:,}", " ".join(map(str, capacities)), f"{size:,}", f"{size // count:,}",
                    f"{shares.max():.3f}", f"{shares.min():.3f}", f"{spread:.1%}",
                )  # fmt: skip
    table.print()
    table = ResultTable("What placement costs", "members", "ranked, µs", "owners, µs a block", "memory, KiB")
    for count in nodes:
        placement, some = Placement(make_members(count)), ids[:2000]
        one = min(timed(partial(rank_all, placement, some)) for _ in range(5)) / len(some)
        many = min(timed(partial(placement.owners, some)) for _ in range(5)) / len(some)
        table.row(f"{count:,}", f"{one * 1e6:.1f}", f"{many * 1e6:.1f}", f"{memory_bytes(count) / 1024:.0f}")
    table.print()


def rank_all(placement: Placement, ids: list[bytes]) -> None:
    for id in ids:
        placement.ranked(id)


def memory_bytes(count: int) -> int:
    """Return the memory of a view and its placement."""
    gc.collect()
    tracemalloc.start()
    view = ClusterView().replaced(make_members(count))
    placement = Placement(view.members)
    gc.collect()
    size_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(placement.ranked(b"")) == len(view.members[:3])  # both are still there
    return size_bytes


def show_moves(nodes: list[int], blocks: int) -> None:
    table = ResultTable("Blocks that move", "nodes", "what happens", "moved", "fair", "moved without need")
    ids = make_ids(blocks)
    for count in nodes:
        members = make_members(count + 1)
        with_it, without = (Placement(some).owners(ids) for some in (members, members[:-1]))
        moved = [(a, b) for a, b in zip(with_it, without, strict=True) if a != b]
        needless = sum(a != members[-1] for a, _ in moved)
        for event in ("a node joins", "a node dies"):
            table.row(f"{count:,}", event, f"{len(moved) / blocks:.2%}", f"{1 / (count + 1):.2%}", str(needless))
    table.print()


# --- GETs while nodes come and go ------------------------------------------------------------------------------------


class Timeline:
    """A cluster over time: its leases, and the nodes that answer."""

    def __init__(self, members: list[Member], stops: list[tuple[float, int, bool]]) -> None:
        """`stops` are times at which nodes are restarted, or die (True) and do not come back."""
        self.stops = {node: (at_s, dies) for at_s, node, dies in stops}
        changes: list[tuple[float, int, str]] = []
        for at_s, node, dies in stops:
            if dies:
                changes.append((at_s + LEASE_S, node, ""))
            else:
                gone_s = at_s + DRAINS_S
                changes += [(at_s, node, DRAINING), (gone_s, node, ""), (gone_s + AWAY_S, node, SERVING)]
        self.times, self.states = [float("-inf")], [dict.fromkeys(range(len(members)), SERVING)]
        for at_s, node, state in sorted(changes):
            self.times.append(at_s)
            self.states.append(self.states[-1] | {node: state})
        self.members = members
        self.every_s = max(VIEW_EVERY_S, len(members) / 100)
        self.placement = lru_cache(256)(self._placement)
        self.former = lru_cache(None)(self._former)

    def answers(self, node: int, at_s: float) -> bool:
        began_s, dies = self.stops.get(node, (float("inf"), True))
        away_s = at_s - began_s - (0.0 if dies else DRAINS_S)
        return away_s < 0 or (not dies and away_s >= AWAY_S)

    def view(self, node: int, at_s: float) -> int:
        """Return the number of the state that a node read last."""
        phase_s = node * 0.618 % 1 * self.every_s
        return bisect_right(self.times, (at_s - phase_s) // self.every_s * self.every_s + phase_s) - 1

    def _former(self, number: int) -> int:
        """Return the state before in which others owned blocks."""
        serving = self._serving(number)
        while number and serving == self._serving(number):
            number -= 1
        return number

    def _serving(self, number: int) -> set[int]:
        return {node for node, state in self.states[number].items() if state == SERVING}

    def _placement(self, number: int) -> Placement:
        return Placement(
            Member(member.id, str(node), member.weight, state=state)
            for node, (member, state) in enumerate(zip(self.members, self.states[number].values(), strict=True))
            if state
        )


def show_gets(nodes: list[int], blocks: int, epoch_s: float) -> None:
    asked = ("nobody", "former view", "next in rank")
    table = ResultTable("GETs a block, three epochs", "nodes", "what happens", *(f"asks {who}" for who in asked))
    ids = make_ids(blocks)
    for count in nodes:
        members = make_members(count)
        every_s = 2.5 * epoch_s / count
        happens: dict[str, list[tuple[float, int, bool]]] = {
            "nothing": [],
            "a node dies in the first epoch": [(epoch_s / 2, 3, True)],
            "a node dies in the second epoch": [(epoch_s * 1.5, 3, True)],
            f"all are restarted, one in {every_s:.1f} s": [
                (epoch_s / 4 + node * every_s, node, False) for node in range(count)
            ],
        }
        for what, stops in happens.items():
            timeline = Timeline(members, stops)
            gets = [count_gets(timeline, ids, epoch_s, who) / blocks for who in asked]
            table.row(f"{count:,}", what, *(f"{each:.4f}" for each in gets))
    table.print()


def count_gets(timeline: Timeline, ids: list[bytes], epoch_s: float, asked: str) -> int:
    count, rng, gets = len(timeline.members), np.random.default_rng(1), 0
    has = np.zeros((count, len(ids)), dtype=bool)
    for epoch in range(3):
        readers = rng.integers(0, count, len(ids)).tolist()
        for at, (block, reader) in enumerate(zip(rng.permutation(len(ids)).tolist(), readers, strict=True)):
            now_s = (epoch + at / len(ids)) * epoch_s
            ranked = timeline.placement(timeline.view(reader, now_s)).ranked(ids[block], 4)
            owner = next((int(m.address) for m in ranked if timeline.answers(int(m.address), now_s)), None)
            if owner is None:
                gets += 1
            elif not has[owner, block]:
                view = timeline.view(owner, now_s)
                before: list[Member] = []
                if asked == "next in rank":
                    placement = timeline.placement(view)
                    before = placement.leaving(ids[block]) + placement.ranked(ids[block], 3)[1:]
                elif asked == "former view":
                    before = timeline.placement(timeline.former(view)).ranked(ids[block], 1)
                having = [int(m.address) for m in before]
                gets += not any(has[node, block] and timeline.answers(node, now_s) for node in having)
                has[owner, block] = True
    return gets


# --- a hot block -----------------------------------------------------------------------------------------------------


def show_hot(nodes: list[int], events: int, waiting: int) -> None:
    table = ResultTable(
        f"A block that gets 1 % of all reads; busy from {waiting} waiting on",
        "nodes", "load of all", "tried", "owners", "shares of the first", "by the store", "GETs", "p50, ms", "p99, ms",
    )  # fmt: skip
    for count in nodes:
        for load in (0.3, 0.6, 0.8):
            for tried in (1, 3, 16):
                result = serve_hot(count, load, tried, events, waiting)
                table.row(f"{count:,}", f"{load:.0%}", str(tried), *result)
    table.print()


def serve_hot(count: int, load: float, tried: int, events: int, waiting: int) -> Iterator[Any]:
    """Yield the cells of a row. With one owner to try nobody is busy: its queue grows."""
    rng = np.random.default_rng(2)
    placement = Placement(make_members(count))
    index = {member.id: node for node, member in enumerate(make_members(count))}
    ids = make_ids(5000)
    ranks = [[index[m.id] for m in placement.ranked(id, tried)] for id in ids]
    times = np.cumsum(rng.exponential(SERVICE_S / (count * load), events)).tolist()
    wanted = np.where(rng.random(events) < 0.01, 0, rng.integers(1, len(ids), events)).tolist()
    free_at = [0.0] * count
    queue = [(at_s, number, 0) for number, at_s in enumerate(times)]  # sorted, so a heap
    served: Counter[int] = Counter()
    waits: list[float] = []
    by_store = 0
    while queue:
        now_s, number, turn = heapq.heappop(queue)
        block = wanted[number]
        if turn == len(ranks[block]):
            by_store += not block
            continue
        node = ranks[block][turn]
        if tried > 1 and free_at[node] - now_s >= waiting * SERVICE_S:
            heapq.heappush(queue, (now_s + ROUND_TRIP_S, number, turn + 1))
            continue
        free_at[node] = max(now_s, free_at[node]) + rng.exponential(SERVICE_S)
        if not block:
            served[node] += 1
            waits.append(free_at[node] - times[number] + ROUND_TRIP_S)
    total = sum(served.values()) + by_store
    shares = [number / total for _, number in served.most_common()]
    yield str(sum(share >= 0.01 for share in shares))
    yield " ".join(f"{share:.0%}" for share in shares[:5])
    yield f"{by_store / total:.1%}"
    yield str(len(served) + by_store)
    yield f"{np.percentile(waits, 50) * 1e3:.2f}"
    yield f"{np.percentile(waits, 99) * 1e3:.2f}"


if __name__ == "__main__":
    main()
