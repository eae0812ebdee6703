"""Nodes of several processes each: to the others they are as one, also to those of a version that has one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from tests.cluster.three_nodes import Cluster, a_cluster, at_once, shuffled, until
from tests.promises import promise

pytestmark = [pytest.mark.alone, promise("To the others a node of several processes is one node")]
PROCESSES = (2, 1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with a_cluster(tmp_path_factory.mktemp("nodes"), processes=PROCESSES) as made:
        yield made


def others(cluster: Cluster, node: int) -> list[int]:
    """Return the processes of a node but the first."""
    home = cluster.homes[node]
    assert home.daemon is not None
    return [pid for pid in home.processes() if pid != home.daemon.pid]


def given(cluster: Cluster) -> list[int]:
    """Return how many blocks each node has got from the other."""
    return [client.cluster()["from_nodes"]["blocks"] for client in cluster.clients]


@promise("A block is got from the store once, however many nodes of a cluster read it")
def test_each_block_is_got_once_and_a_process_that_is_killed_comes_back(cluster: Cluster) -> None:
    was: list[int] = []
    for _ in range(2):
        data, before = cluster.data(), given(cluster)
        at_once(*(partial(cluster.read, c, data, shuffled(data, n)) for n, c in enumerate(cluster.clients * 2)))
        assert data.gets() == len(data.blocks)
        owned = [len(blocks) for blocks in cluster.owned(data)]
        assert [now - was for now, was in zip(given(cluster), before, strict=True)] == owned[::-1]
        until(lambda: len(others(cluster, 0)) == PROCESSES[0] - 1)
        assert others(cluster, 0) != was
        was = others(cluster, 0)
        os.kill(was[0], signal.SIGKILL)
        for client in cluster.clients:
            cluster.read(client, data)


@promise("A node that drains owns nothing any more, and hands over what only it has")
def test_what_all_processes_of_a_node_have_is_handed_over_and_taken_by_all(cluster: Cluster) -> None:
    for leaves, stays in ((0, 1), (1, 0)):
        data = cluster.data()
        cluster.read(cluster.clients[leaves], data)
        until(lambda data=data, leaves=leaves: cluster.stored("ssd")[leaves] >= len(data.blocks))
        cluster.clients[leaves].drain()
        until(lambda leaves=leaves: cluster.states()[1 - leaves][leaves] == "drained")
        cluster.homes[leaves].end_daemon()
        cluster.read(cluster.clients[stays], data)
        assert data.gets() == len(data.blocks)
        cluster.homes[leaves].start_daemon()
        cluster.until_all_serve()
