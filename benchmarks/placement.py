"""Where pods start, by the rules of Kubernetes' scheduler: with labels of what nodes hold, and without.

The scheduler itself is not run: its default rules are computed, with the labels and the preference that our own code
makes (`csi_driver.node_labels.wanted_labels`, `datacache.api.preferred_nodes`). A pod goes to the node with the most
points:

- *NodeAffinity*, weight 2: the weights of the preferred terms that match, the best node's made 100
- *NodeResourcesFit* (LeastAllocated), 1: what is free of CPU and memory, in percent
- *NodeResourcesBalancedAllocation*, 1: how equally CPU and memory are used
- *ImageLocality*, 1: the image's size, times the share of nodes that have it, between 23 and 1,000 MiB
- *PodTopologySpread*, 2: few pods of the same owner, by host (skew 3) and zone (skew 5); jobs have no such default
- *TaintToleration* and *InterPodAffinity* give all nodes here the same.

Of up to 100 nodes all with room get points, of 1,000 nodes 42 %, looked for from where the last search has ended; among
equals chance decides. Sources: kubernetes.io, *Scheduler Configuration*, *Pod Topology Spread Constraints* and
*Scheduler Performance Tuning*; kubernetes/kubernetes, pkg/scheduler/apis/config/v1/default_plugins.go and
pkg/scheduler/framework/plugins (noderesources, nodeaffinity, imagelocality, podtopologyspread).

Nodes have 8 GPUs, 64 cores, 512 GiB and 2 TB of cache in three zones; 20 data sets of 0.1 to 1 TB are asked for by
frequency 1/n; three of four pods are jobs of 1, 2 or 4 GPUs, the others replicas of deployments. A node fetches at 1
GB/s and evicts what was read longest ago; what it holds is a label a minute later. The first half of the pods is not
counted.

- *warm, with room*: of the pods for which a node with room had 30 % of the data, those that started on such a node
- *warm, of all*; *full, of all*: with 30 % and 95 % of their data at the start
- *waited*: pods for which no node had room; *though one had room*: of those, the ones that a node could have taken
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.harness import ResultTable, benchmark
from csi_driver.node_labels import wanted_labels
from datacache.api import preferred_nodes
from datacache.catalog.holdings import Holding

GPUS, CORES, MEMORY_GIB, CACHE_BYTES = 8, 64.0, 512.0, 2e12
FETCH_BYTES_S = 1e9
LABELS_EVERY_S = 60.0
ZONES = 3
IMAGE_MIB = 6000
WARM, FULL = 0.30, 0.95


def main() -> None:
    with benchmark(__doc__, nodes=([100, 1000], [20]), pods=(60, 15), most=20_000, seeds=(2, 1)) as (args, _):
        table = ResultTable(
            "Where pods start",
            *("nodes", "GPUs asked for", "labels", "warm, with room", "warm, of all", "full, of all"),
            *("fetched, TB", "waited", "though one had room"),
        )
        for nodes in args.nodes:
            ways = [("without", False, 0), ("with", True, 0)]
            if nodes > MOST_SCORED:
                ways.append(("with, all nodes scored", True, 100))
            for load in (0.5, 0.7, 0.9, 1.1) if nodes <= MOST_SCORED else (0.7,):
                for words, labelled, percent in ways:
                    pods = min(nodes * args.pods, args.most)
                    runs = [simulate(nodes, pods, load, labelled, percent, seed) for seed in range(args.seeds)]
                    table.row(f"{nodes:,}", f"{load:.0%}", words, *sum(runs, PodStarts()).cells())
        table.print()


@dataclass
class PodStarts:
    """Pods, counted at their start."""

    pods: int = 0
    warm: int = 0
    full: int = 0
    could: int = 0
    did: int = 0
    waited: int = 0
    needlessly: int = 0
    fetched_bytes: float = 0.0

    def __add__(self, other: PodStarts) -> PodStarts:
        return PodStarts(
            *(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @property
    def warm_with_room(self) -> float:
        """Return the part of the pods that could start warm, and did."""
        return self.did / max(1, self.could)

    def cells(self) -> tuple[str, ...]:
        """Return what the table shows."""
        shares = (self.warm_with_room, self.warm / self.pods, self.full / self.pods, self.fetched_bytes / 1e12)
        texts = [f"{share:.1%}" for share in shares[:3]]
        return *texts, f"{shares[3]:,.0f}", f"{self.waited / self.pods:.1%}", str(self.needlessly)


@dataclass
class SimulatedPod:
    """A pod, and where it runs."""

    dataset: int
    gpus: int
    owner: int | None
    """Of a replica its deployment."""
    runs_s: float
    counted: bool
    waits: bool = False


@dataclass
class SimulatedCache:
    """The data sets of one node: since when each is fetched, with how many bytes, and who reads it."""

    begun: dict[int, tuple[float, float]] = field(default_factory=dict)
    room: float = CACHE_BYTES
    readers: Counter[int] = field(default_factory=Counter)
    read_at: dict[int, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    fetches_until_s: float = 0.0

    def held(self, dataset: int, now_s: float) -> float:
        since, most = self.begun.get(dataset, (now_s, 0.0))
        return min(most, (now_s - since) * FETCH_BYTES_S)

    def read(self, dataset: int, size: float, now_s: float) -> float:
        """Begin to fetch what is lacking, after evicting what nobody reads; return how much that is."""
        self.readers[dataset] += 1
        self.read_at[dataset] = now_s
        if dataset in self.begun:
            return 0.0
        for other in sorted(self.begun, key=self.read_at.__getitem__):
            if self.room < size and not self.readers[other]:
                self.room += self.begun.pop(other)[1]
        most = min(size, self.room)
        self.room -= most
        self.begun[dataset] = now_s, most
        self.fetches_until_s = max(self.fetches_until_s, now_s + most / FETCH_BYTES_S)
        return size


MOST_SCORED = 100


class Scheduler:
    """The rules, over arrays with a place for each node."""

    def __init__(self, nodes: int, datasets: int, percent: int, dice: random.Random) -> None:
        self.gpus, self.cores, self.memory = (np.zeros(nodes) for _ in range(3))
        self.zone = np.arange(nodes) % ZONES
        self.images = np.zeros((nodes, datasets), bool)
        self.owned: dict[int, np.ndarray] = {}
        self._dice, self._start = dice, 0
        share = percent or max(5, 50 - nodes // 125)
        self._most = nodes if nodes < MOST_SCORED else max(MOST_SCORED, nodes * share // 100)

    def fits(self, pod: SimulatedPod) -> np.ndarray:
        """Return which nodes have room."""
        cores, memory = needs(pod)
        return (self.gpus + pod.gpus <= GPUS) & (self.cores + cores <= CORES) & (self.memory + memory <= MEMORY_GIB)

    def choose(self, pod: SimulatedPod, image: int, preferred: np.ndarray) -> int | None:
        """Return the node for a pod; None if none has room. `preferred`: the weights of the terms that match, added
        up."""
        count = len(self.gpus)
        order = (self._start + np.arange(count)) % count
        found = order[self.fits(pod)[order]]
        if not len(found):
            return None
        if len(found) > self._most:
            self._start = int(found[self._most - 1] + 1) % count
            found = found[: self._most]
        points = self._points(pod, found, image, preferred[found].astype(int))
        return int(self._dice.choice(found[points == points.max()].tolist()))

    def _points(self, pod: SimulatedPod, at: np.ndarray, image: int, preferred: np.ndarray) -> np.ndarray:
        cores, memory = needs(pod)
        used = np.stack([(self.cores[at] + cores) / CORES, (self.memory[at] + memory) / MEMORY_GIB])
        least = ((1 - used) * 100).astype(int).sum(0) // 2
        balanced = ((1 - np.abs(used[0] - used[1]) / 2) * 100).astype(int)
        size = np.clip(self.images[:, image].mean() * IMAGE_MIB * self.images[at, image], 23, 1000)
        locality = (100 * (size - 23) / (1000 - 23)).astype(int)
        affinity = 100 * preferred // max(1, int(preferred.max()))
        return 2 * affinity + least + balanced + locality + 2 * self._spread(pod, at)

    def _spread(self, pod: SimulatedPod, at: np.ndarray) -> np.ndarray:
        if pod.owner is None:
            return np.zeros(len(at), int)
        mine = self.owned.get(pod.owner, np.zeros(len(self.gpus)))
        by_zone = np.bincount(self.zone, mine, ZONES)[self.zone[at]]
        zones = len(set(self.zone[at].tolist()))
        counts = np.rint(mine[at] * np.log(len(at) + 2) + 2 + by_zone * np.log(zones + 2) + 4).astype(int)
        return 100 * (counts.max() + counts.min() - counts) // counts.max()

    def place(self, pod: SimulatedPod, node: int, sign: int) -> None:
        """Take or give back what a pod needs."""
        cores, memory = needs(pod)
        self.gpus[node] += sign * pod.gpus
        self.cores[node] += sign * cores
        self.memory[node] += sign * memory
        if pod.owner is not None:
            self.owned.setdefault(pod.owner, np.zeros(len(self.gpus)))[node] += sign


def needs(pod: SimulatedPod) -> tuple[float, float]:
    """Return the cores and the GiB of memory that a pod asks for."""
    return pod.gpus * 7.0, pod.gpus * 56.0


def simulate(nodes: int, pods: int, load: float, labelled: bool, percent: int, seed: int) -> PodStarts:
    """Have pods arrive, start and end."""
    dice = random.Random(seed)
    sizes = [float(np.exp(dice.uniform(np.log(1e11), np.log(1e12)))) for _ in range(20)]
    ids = [f"{number:032x}" for number in range(len(sizes))]
    terms = [preferred_nodes({id: int(size)}) for id, size in zip(ids, sizes, strict=True)]
    scheduler, caches = Scheduler(nodes, 5, percent, dice), [SimulatedCache() for _ in range(nodes)]
    preferred = np.zeros((len(sizes), nodes))
    arrivals = list(_arrivals(dice, pods, nodes, load, len(sizes)))
    numbers = itertools.count()
    events: list[tuple[float, int, Any]] = [(at_s, next(numbers), pod) for at_s, pod in arrivals]
    events.append((0.0, next(numbers), None))
    heapq.heapify(events)
    waiting: deque[SimulatedPod] = deque()
    outcome, left = PodStarts(), len(arrivals)

    def start(pod: SimulatedPod, now_s: float) -> bool:
        fits = scheduler.fits(pod)
        node = scheduler.choose(pod, pod.dataset % 5, preferred[pod.dataset])
        if node is None:
            outcome.needlessly += bool(fits.any())
            return False
        shares = np.array([cache.held(pod.dataset, now_s) for cache in caches]) / sizes[pod.dataset]
        if pod.counted:
            could = bool((fits & (shares >= WARM)).any())
            outcome.could += could
            outcome.did += could and bool(shares[node] >= WARM)
            outcome.warm += bool(shares[node] >= WARM)
            outcome.full += bool(shares[node] >= FULL)
            outcome.pods += 1
            outcome.waited += pod.waits
        fetched = caches[node].read(pod.dataset, sizes[pod.dataset], now_s)
        outcome.fetched_bytes += fetched * pod.counted
        scheduler.images[node, pod.dataset % 5] = True
        scheduler.place(pod, node, 1)
        heapq.heappush(events, (now_s + pod.runs_s, next(numbers), (pod, node)))
        return True

    while left:
        now_s, _, what = heapq.heappop(events)
        if what is None:
            if labelled:
                _label(caches, ids, sizes, terms, preferred, now_s)
            heapq.heappush(events, (now_s + LABELS_EVERY_S, next(numbers), None))
        elif isinstance(what, SimulatedPod):
            what.waits = not start(what, now_s)
            if what.waits:
                waiting.append(what)
            left -= 1
        else:
            pod, node = what
            scheduler.place(pod, node, -1)
            caches[node].readers[pod.dataset] -= 1
            waiting = deque(each for each in waiting if not start(each, now_s))
    return outcome


def _arrivals(dice: random.Random, pods: int, nodes: int, load: float, datasets: int) -> Any:
    """Yield times and pods that together ask for so much of all GPUs."""
    often = [1 / (number + 1) for number in range(datasets)]
    at_s, mean_gpus, mean_s = 0.0, 0.5 * 1 + 0.3 * 2 + 0.2 * 4, 7200.0
    gap_s = mean_gpus * mean_s / (load * nodes * GPUS)
    number = 0
    while number < pods:
        dataset = dice.choices(range(datasets), often)[0]
        gpus = dice.choices((1, 2, 4), (0.5, 0.3, 0.2))[0]
        replicas, owner = (1, None) if dice.random() < 0.9 else (3, number)
        for _ in range(replicas):
            at_s += dice.expovariate(1 / gap_s)
            yield at_s, SimulatedPod(dataset, gpus, owner, dice.expovariate(1 / mean_s), number >= pods / 2)
            number += 1


def _label(
    caches: list[SimulatedCache],
    ids: list[str],
    sizes: list[float],
    terms: list[list[dict[str, Any]]],
    preferred: np.ndarray,
    now_s: float,
) -> None:
    """Give nodes the labels of this moment, and note what the terms of each data set are worth there."""
    for node, cache in enumerate(caches):
        if now_s > cache.fetches_until_s + 2 * LABELS_EVERY_S:
            continue  # it holds what it held
        held = {ids[each]: Holding(int(cache.held(each, now_s)), int(sizes[each])) for each in cache.begun}
        labels = wanted_labels(cache.labels, held)
        if labels != cache.labels:
            cache.labels = labels
            preferred[:, node] = [sum(_worth(term, labels) for term in some) for some in terms]


def _worth(term: dict[str, Any], labels: dict[str, str]) -> int:
    [wanted] = term["preference"]["matchExpressions"]
    return int(term["weight"]) if labels.get(wanted["key"]) in wanted["values"] else 0


if __name__ == "__main__":
    main()
