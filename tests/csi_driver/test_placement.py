"""Pods near their data, computed by the rules of Kubernetes' scheduler (`benchmarks.placement`)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.placement import GPUS, PodStarts, Scheduler, SimulatedPod, simulate
from tests.promises import promise


def run(load: float, *, labelled: bool) -> PodStarts:
    return sum((simulate(30, 900, load, labelled, 0, seed) for seed in (1, 2)), PodStarts())


@promise("A pod never waits for a warm node")
def test_pods_start_on_warm_nodes_while_there_is_room_and_none_waits() -> None:
    without, labelled = run(0.6, labelled=False), run(0.6, labelled=True)
    assert labelled.pods == without.pods == 900
    assert labelled.warm_with_room >= 0.98
    assert labelled.warm / labelled.pods >= 0.9
    assert labelled.waited == labelled.needlessly == 0
    assert without.warm < labelled.warm
    assert labelled.fetched_bytes < 0.7 * without.fetched_bytes


@promise("A pod never waits for a warm node")
def test_without_room_on_warm_nodes_pods_start_on_others() -> None:
    labelled = run(1.2, labelled=True)
    assert labelled.waited > 0, "all nodes are full at times"
    assert labelled.needlessly == 0
    assert labelled.warm < labelled.pods, "and pods start cold rather than wait"


def pod(gpus: int = 1, owner: int | None = None) -> SimulatedPod:
    return SimulatedPod(dataset=0, gpus=gpus, owner=owner, runs_s=1.0, counted=True)


class TestRules:
    """Points computed by hand from the scheduler's sources."""

    def scheduler(self, nodes: int = 4) -> Scheduler:
        return Scheduler(nodes, 5, 0, random.Random(0))

    def test_a_warm_node_outweighs_an_empty_one(self) -> None:
        ours = self.scheduler()
        for _ in range(6):
            ours.place(pod(), 2, 1)
        assert ours.choose(pod(), 0, np.array([0, 0, 100, 0])) == 2
        assert ours.choose(pod(), 0, np.zeros(4)) != 2

    def test_full_goes_before_part_and_part_alone_counts_as_much(self) -> None:
        ours = self.scheduler()
        assert ours.choose(pod(), 0, np.array([0, 50, 100, 0])) == 2
        assert ours.choose(pod(), 0, np.array([0, 50, 0, 0])) == 1

    def test_a_node_without_room_is_no_choice_however_warm(self) -> None:
        ours = self.scheduler(2)
        for _ in range(GPUS):
            ours.place(pod(), 1, 1)
        assert ours.choose(pod(), 0, np.array([0, 100])) == 0
        for _ in range(GPUS):
            ours.place(pod(), 0, 1)
        assert ours.choose(pod(), 0, np.array([0, 100])) is None

    def test_points(self) -> None:
        ours = self.scheduler(2)
        ours.place(pod(4), 0, 1)
        ours.images[0, 0] = True
        points = ours._points(pod(), np.array([0, 1]), 0, np.array([30, 60]))
        # Cores (28 + 7) / 64, memory (224 + 56) / 512 on both: 45 + 45 and 89 + 89, halved; both used equally: 100; the
        # image of 6,000 MiB on half of the nodes: 100 of 100; the preference 50 and 100, twice.
        assert points.tolist() == [2 * 50 + 45 + 100 + 100, 2 * 100 + 89 + 100 + 0]

    def test_replicas_of_a_deployment_go_to_other_nodes(self) -> None:
        ours = self.scheduler(2)
        ours.place(pod(owner=1), 0, 1)
        assert ours._spread(pod(), np.array([0, 1])).tolist() == [0, 0]
        spread = ours._spread(pod(owner=1), np.array([0, 1]))
        # ln 4 + 2 + ln 4 + 4 = 8.77, and 6: a zone each.
        assert spread.tolist() == [100 * 6 // 9, 100]

    @pytest.mark.parametrize(("nodes", "most"), [(50, 50), (100, 100), (200, 100), (1000, 420), (10_000, 500)])
    def test_of_many_nodes_some_get_points(self, nodes: int, most: int) -> None:
        assert self.scheduler(nodes)._most == most
