"""A model of eviction by whole regions, to compare ways of choosing what goes: no daemon, no bytes, only orders.

An epoch reads as in `benchmarks.eviction`. Prefetching runs a window ahead and stores what it fetches; what is known
are the rest of this epoch and the next one. The ways: `keep` (nothing goes), `soonest` and `mean` (the region whose
soonest, or average, next use is farthest), `count` (the region with the fewest known uses, late ones counting less),
`count, lanes` (and blocks are put together by when they are read next), `count, lanes, moves` (and at most three
quarters of a region, what is worth more than the least 30 % of all that is cached, are moved before it goes: the
daemon's way); `single blocks` is Belady's algorithm with the whole future known and no regions: no way can do better.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np

from benchmarks.eviction import make_orders
from benchmarks.harness import ResultTable, benchmark

NEVER = 10**9
LANES, WINDOW, BEHIND = 4, 0.02, 0.005


class EvictionWay(NamedTuple):
    name: str
    score: str
    lanes: int = 1
    moves: bool = False


WAYS = (
    EvictionWay("soonest", "soonest"),
    EvictionWay("mean", "mean"),
    EvictionWay("count", "count"),
    EvictionWay("count, lanes", "count", LANES),
    EvictionWay("count, lanes, moves", "count", LANES, moves=True),
)


def main() -> None:
    with benchmark(__doc__, files=(6000, 1000), epochs=(6, 2), regions=64) as (args, _):
        report(args.files, args.epochs, args.regions)


def report(files: int, epochs: int, regions: int) -> None:
    """Print the table."""
    table = ResultTable(
        f"{files:,} files, {regions} regions: hit rate after the first epoch; (moved for each read)",
        "reads", "cache", "keep", *(way.name for way in WAYS), "single blocks",
    )  # fmt: skip
    for reads, share in (("all", 0.5), ("all", 0.25), ("half", 0.5), ("half", 0.25), ("weighted", 0.25)):
        orders = make_orders(reads, files, epochs + 2)
        size = int(files * share)
        ways = []
        for way in WAYS:
            hits, moved = Model(orders, files, size, regions, way).run()
            ways.append(f"{hits:.1%} ({moved:.2f})" if way.moves else f"{hits:.1%}")
        table.row(reads, f"{share:.0%}", f"{keep(orders, size):.1%}", *ways, f"{single_blocks(orders, size):.1%}")
    table.print()


class Model:
    """A cache of `size` files in regions, read through `orders` but the last two."""

    def __init__(self, orders: list[Any], files: int, size: int, regions: int, way: EvictionWay) -> None:
        self.orders, self.way, self.size = orders, way, size
        self.length = len(orders[0])
        self.sequence = np.concatenate(orders)
        self.following = np.full(len(self.sequence), NEVER)
        self.current = np.full(files, NEVER)  # each file's next use
        for at in range(len(self.sequence) - 1, -1, -1):
            self.following[at] = self.current[self.sequence[at]]
            self.current[self.sequence[at]] = at
        self.region_of = np.full(files, -1)
        self.used: dict[int, int] = {}
        self.filling: dict[int, int] = {}
        self.region_files = max(1, size // regions)
        self.next_region = self.moved = 0
        self.window, self.behind = int(WINDOW * files) + 1, int(BEHIND * files)

    def run(self) -> tuple[float, float]:
        ahead = missed = reads = moved = 0
        for epoch in range(len(self.orders) - 2):
            if epoch == 1:
                missed, moved = 0, self.moved
            end = (epoch + 2) * self.length
            for now in range(epoch * self.length, (epoch + 1) * self.length):
                while ahead <= now + self.window:
                    file = self.sequence[ahead]
                    if self.region_of[file] < 0:
                        missed += 1
                        tries = 0
                        while sum(self.used.values()) >= self.size and tries < 6 and self.evict(now, end):
                            tries += 1
                        if sum(self.used.values()) < self.size:
                            self.put(file, self.following[ahead], end)
                    ahead += 1
                self.current[self.sequence[now]] = self.following[now]
                reads += epoch > 0
        return 1 - missed / max(1, reads), (self.moved - moved) / max(1, reads)

    def put(self, file: int, next_use: int, end: int) -> None:
        lanes = self.way.lanes
        lane = lanes if next_use >= end else int(next_use % self.length / self.length * lanes)
        if lanes == 1:
            lane = 0
        region = self.filling.get(lane)
        if region is None or self.used[region] >= self.region_files:
            region = self.filling[lane] = self.next_region
            self.used[region] = 0
            self.next_region += 1
        self.region_of[file] = region
        self.used[region] += 1

    def evict(self, now: int, end: int) -> bool:
        files = np.flatnonzero(self.region_of >= 0)
        values, soon = self.rate(files, now, end)
        regions = self.region_of[files]
        filling = {region for region in self.filling.values() if self.used[region] < self.region_files}
        totals = np.bincount(regions, values + 1000 * soon, minlength=self.next_region)
        if self.way.score == "soonest":
            totals = np.full(self.next_region, -float(NEVER))
            np.maximum.at(totals, regions, values + 1000 * soon)
        candidates = [region for region in self.used if region not in filling]
        if not candidates:
            return False
        divide = self.way.score != "soonest"
        victim = min(candidates, key=lambda region: totals[region] / (max(1, self.used[region]) if divide else 1))
        mine = regions == victim
        limit = 0.75 * self.used.pop(victim)
        self.filling = {lane: region for lane, region in self.filling.items() if region != victim}
        self.region_of[files[mine]] = -1
        wanted = files[mine][(soon | (values > np.quantile(values, 0.3)))[mine]]
        if self.way.moves and len(wanted) <= limit:
            for file in wanted:
                self.put(file, self.current[file], end)
            self.moved += len(wanted)
        return True

    def rate(self, files: Any, now: int, end: int) -> tuple[Any, Any]:
        """Return what each file is worth, and whether it is in the window."""
        use = self.current[files]
        soon = use < now + self.window
        soon |= np.isin(files, self.sequence[max(0, now - self.behind) : now])
        if self.way.score != "count":
            return -np.minimum(use, end).astype(float) / self.length, soon
        values = np.zeros(len(files))
        for _ in range(8):
            known = use < end
            values[known] += 1 - 0.5 * (use[known] - now) / (end - now)
            use = np.where(known, self.following[np.minimum(use, len(self.following) - 1)], NEVER)
        return values, soon


def keep(orders: list[Any], size: int) -> float:
    """Return the hit rate where what is first stays."""
    held: set[int] = set()
    hits = reads = 0
    for epoch, order in enumerate(orders[:-2]):
        for file in order.tolist():
            hits += epoch > 0 and file in held
            if len(held) < size:
                held.add(file)
        reads += len(order) * (epoch > 0)
    return hits / max(1, reads)


def single_blocks(orders: list[Any], size: int) -> float:
    """Return the hit rate of Belady's algorithm."""
    sequence, last, following = np.concatenate(orders).tolist(), {}, [0] * sum(map(len, orders))
    for at in range(len(sequence) - 1, -1, -1):
        following[at] = last.get(sequence[at], NEVER)
        last[sequence[at]] = at
    held: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits, first, stop = 0, len(orders[0]), len(sequence) - 2 * len(orders[-1])
    for at, file in enumerate(sequence[:stop]):
        hits += at >= first and file in held
        held[file] = following[at]
        heapq.heappush(heap, (-following[at], file))
        while len(held) > size:
            use, farthest = heapq.heappop(heap)
            if held.get(farthest) == -use:
                del held[farthest]
    return hits / max(1, stop - first)


if __name__ == "__main__":
    main()
