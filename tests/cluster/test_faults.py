"""Epochs on three nodes that find each other in MongoDB, while nodes, the network between them and MongoDB fail.

Blocks are small and readers keep all, so that epochs take seconds: a fault meets the first one. How often the store is
asked follows from that. A block is asked for again if only a node had it that is away, or while it was under way.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from datacache.cluster.members import DRAINED, DRAINING
from tests.cluster.three_nodes import Cluster, a_cluster, kill, shuffled, until
from tests.conformance.relay import NO_TROUBLE, Trouble
from tests.promises import promise

pytestmark = pytest.mark.alone
"""As in `test_nodes`: who gets no processor for a second is passed over."""

SIZES = [20_000 + 500 * number for number in range(120)]
EPOCHS = 2


class Troubles:
    """Choose what relays between nodes do with each piece: nothing, until `share` of all is to be in trouble."""

    def __init__(self) -> None:
        self.share, self.made = 0.0, 0
        self._some = random.Random(7)

    def __call__(self) -> Trouble:
        if self._some.random() >= self.share:
            return NO_TROUBLE
        self.made += 1
        return self._some.choice([Trouble(reset=True), Trouble(late_s=0.2), Trouble(lost=True)])


troubles = Troubles()


@pytest.fixture(scope="module")
def module_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with a_cluster(tmp_path_factory.mktemp("nodes"), trouble=troubles, catalog="mongodb") as made:
        yield made


@pytest.fixture
def cluster(module_cluster: Cluster) -> Cluster:
    """All nodes serve, and each knows it."""
    module_cluster.until_all_serve()
    return module_cluster


class Epochs:
    """A reader on each node, in an order of its own, that waits while its own daemon is away."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.data = cluster, cluster.data(sizes=SIZES)
        self.longest_s = 0.0
        self.lost = 0
        """Blocks that only nodes had that went away."""
        self.gone: int | None = None
        """The node whose reader has ended with it."""
        self._turns = [threading.Lock() for _ in cluster.homes]
        self._had: dict[tuple[object, int], set[int]] = {block: set() for block in self.data.blocks}
        self._owner = {block: node for node, blocks in enumerate(cluster.owned(self.data)) for block in blocks}
        self._count, self._half = itertools.count(1), threading.Event()

    def read(self, meanwhile: Callable[[], object]) -> None:
        """Read all; in the middle of the first epoch have something happen, in this thread: a daemon that another one
        starts would end with it."""
        nodes = range(len(self.cluster.homes))
        with ThreadPoolExecutor(len(nodes)) as pool:
            reading = [pool.submit(self._read, node) for node in nodes]
            assert self._half.wait(60)
            meanwhile()
            for reader in reading:
                reader.result()

    def lose(self, node: int) -> None:
        """Count what nobody can give any more once this node is away."""
        self.lost += sum(had == {node} for had in list(self._had.values()))

    def without(self, node: int, action: Callable[[], object]) -> None:
        """Do something to a node while its own reader rests, as the daemon may be away."""
        with self._turns[node]:
            self.lose(node)
            action()

    def until_read_but_by(self, node: int) -> None:
        """Wait until the others have read all."""
        until(lambda: all(len(had - {node}) == len(self._turns) - 1 for had in list(self._had.values())))

    def _read(self, node: int) -> None:
        for epoch in range(EPOCHS):
            for block in shuffled(self.data, 10 * epoch + node):
                with self._turns[node]:
                    if node == self.gone:
                        return
                    begun = time.monotonic()
                    self.cluster.read(self.cluster.clients[node], self.data, [block])
                    self.longest_s = max(self.longest_s, time.monotonic() - begun)
                self._had[block] |= {node, self._owner[block]}
                if next(self._count) == len(self.cluster.homes) * len(self.data.blocks) // 2:
                    self._half.set()

    def assert_few_gets(self, record: Callable[[str, object], None]) -> None:
        """Each block once, but for what was lost, or under way when it happened."""
        record("longest read, s", round(self.longest_s, 3))
        record("GETs a block", self.data.gets() / len(self.data.blocks))
        assert len(self.data.blocks) <= self.data.gets() <= len(self.data.blocks) + self.lost + 2 * len(self._turns)


@promise("Readers see no error and no wrong byte when connections between nodes are reset, late or lost")
def test_two_in_a_hundred_pieces_that_nodes_send_are_reset_late_or_lost(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    epochs, made = Epochs(cluster), troubles.made
    troubles.share = 0.02
    try:
        epochs.read(lambda: None)
    finally:
        troubles.share = 0.0
    assert troubles.made > made
    epochs.lost = len(SIZES) // 10  # who is late is passed over: the next in rank asks the store itself
    epochs.assert_few_gets(record_property)


def die(epochs: Epochs) -> None:
    """Kill a node, which is back when the others have read all."""
    home = epochs.cluster.homes[0]

    def be_away() -> None:
        kill(home)
        try:
            epochs.until_read_but_by(0)
        finally:
            home.start_daemon()

    epochs.without(0, be_away)


def restart_all(epochs: Epochs) -> None:
    """Restart one node after the other."""
    for node, home in enumerate(epochs.cluster.homes):
        epochs.without(node, lambda home=home: (home.end_daemon(), home.start_daemon()))  # type: ignore[misc]


def drain(epochs: Epochs) -> None:
    """Drain a node, which goes on reading, and restart it at the end."""
    client, home = epochs.cluster.clients[0], epochs.cluster.homes[0]
    assert client.drain()["state"] == DRAINING
    until(lambda: all(states[0] == DRAINED for states in epochs.cluster.states()))
    epochs.until_read_but_by(0)
    epochs.without(0, lambda: (home.end_daemon(), home.start_daemon()))


def part(epochs: Epochs) -> None:
    """Part a node from the others, each way, until these have read all."""
    relays = [relay for names, relay in epochs.cluster.relays.items() if "n1" in names]
    for node in range(len(epochs.cluster.homes)):
        epochs.lose(node)
    for relay in relays:
        relay.hold()
    try:
        epochs.until_read_but_by(0)
    finally:
        for relay in relays:
            relay.let_go()


FAULTS = {
    "dies": die,
    "and each other one is restarted": restart_all,
    "drains": drain,
    "is parted from the others": part,
}


@promise("A block is got from the store once, however many nodes of a cluster read it")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_store_is_asked_for_nothing_but_what_is_away_when_a_node(
    cluster: Cluster, fault: str, record_property: Callable[[str, object], None]
) -> None:
    epochs = Epochs(cluster)
    epochs.read(lambda: FAULTS[fault](epochs))
    epochs.assert_few_gets(record_property)


@promise("A cluster goes on with the members that it knows while MongoDB is away")
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_node_dies_while_mongodb_is(
    cluster: Cluster, how: str, record_property: Callable[[str, object], None]
) -> None:
    epochs, mongod = Epochs(cluster), cluster.mongod
    assert mongod is not None
    with mongod.away(stopped=how == "stopped"):
        # A node that starts meanwhile knows nobody: it asks the store for all that it has not got.
        epochs.read(lambda: kill_for_good(epochs))
    cluster.homes[0].start_daemon()
    cluster.until_all_serve()
    epochs.assert_few_gets(record_property)
    cluster.read(cluster.clients[0], epochs.data)


def kill_for_good(epochs: Epochs) -> None:
    """Kill a node; its reader ends with it."""
    epochs.lose(0)
    epochs.gone = 0
    with epochs._turns[0]:
        kill(epochs.cluster.homes[0])
