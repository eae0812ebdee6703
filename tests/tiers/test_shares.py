"""Shares of the cache: what a group is entitled to is there for it, and nobody else's room stays empty for it."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from datacache.core.errors import SettingsError
from datacache.settings import load_settings
from datacache.tiers.eviction import ContainerState, Shares, may_evict, to_take_back
from datacache.tiers.recovery import open_tiers
from tests.promises import promise
from tests.tiers.test_tiers import MIB, make_block, put, read


@pytest.fixture
def shared(settings):
    """A cache of 16 MiB on SSD alone, half of it for each of two groups."""
    shares = (("small", 50.0), ("greedy*", 50.0))
    return dataclasses.replace(settings, ram_bytes=0, ssd_bytes=16 * MIB, shares=shares)


def greedy(count: int, *, start: int = 0, dataset: str = "greedy"):
    return [make_block(1000 + start + n, 100_000, dataset=dataset) for n in range(count)]


def small(count: int):
    return [make_block(n, 100_000, dataset="small") for n in range(count)]


def used(writer) -> dict[str, int]:
    tier = writer.tiers[-1]
    found: dict[str, int] = {}
    for container in writer.call(lambda: list(tier.containers.values())).result(10):
        found[container.dataset] = found.get(container.dataset, 0) + container.disk_bytes
    assert sum(found.values()) <= tier.budget_bytes
    return found


@promise("A group takes its share (`DATACACHE_SHARES`) back from groups above theirs, and no more")
def test_a_group_alone_has_all_of_it(shared):
    with open_tiers(shared) as writer:
        put(writer, *greedy(300))
        assert used(writer)["greedy"] > 12 * MIB


@promise("A group takes its share (`DATACACHE_SHARES`) back from groups above theirs, and no more")
@pytest.mark.parametrize("policy", ["keep", "lru", "clairvoyant"])
def test_what_a_group_is_entitled_to_is_taken_back_and_stays_its_own_whatever_the_other_does(shared, policy):
    with open_tiers(dataclasses.replace(shared, eviction=policy)) as writer:
        put(writer, *greedy(300))
        mine = small(20)
        for n, block in enumerate(mine):  # the other goes on all the time
            assert put(writer, block) == [True]
            put(writer, *greedy(20, start=1000 + 20 * n))
        for n in range(5):
            assert [read(shared, block) for block in mine] == [block.data for block in mine]
            put(writer, *greedy(100, start=10_000 + 100 * n))
        found = used(writer)
    assert found["small"] >= 2_000_000
    assert found["greedy"] > 10 * MIB  # more than its share: nobody needs the rest


@promise("A group takes its share (`DATACACHE_SHARES`) back from groups above theirs, and no more")
def test_what_is_stored_along_with_others_of_a_group_above_its_share_finds_room(shared):
    with open_tiers(shared) as writer, ThreadPoolExecutor(1) as thread:
        put(writer, *greedy(100))
        for n, block in enumerate(small(60)):
            gate = threading.Event()
            held = writer.call(gate.wait)  # so that the next ones are stored in one go
            stored = thread.submit(put, writer, *greedy(3, start=1000 + 3 * n), block)
            while writer._queue.qsize() < 4:
                time.sleep(0.001)
            gate.set()
            held.result(10)
            assert stored.result(10)[-1], n


@promise("A group takes its share (`DATACACHE_SHARES`) back from groups above theirs, and no more")
def test_nobody_takes_more_back_than_its_share(shared):
    with open_tiers(shared) as writer:
        put(writer, *greedy(300))
        put(writer, *small(300))
        found = used(writer)
    assert found["greedy"] >= 6 * MIB
    assert found["small"] >= 6 * MIB


@promise("A pin holds within the share of its group")
def test_a_pin_holds_within_the_share_of_its_group(shared):
    with open_tiers(shared) as writer:
        blocks = greedy(300)
        writer.call(lambda: writer.pin("greedy@1", "greedy", [])).result(10)
        put(writer, *blocks)
        assert all(put(writer, *small(50)))
        assert used(writer)["greedy"] >= 7 * MIB
        assert sum(read(shared, block) is not None for block in blocks) >= 70


@promise("A group takes its share (`DATACACHE_SHARES`) back from groups above theirs, and no more")
def test_without_a_share_one_has_what_the_others_leave(shared):
    with open_tiers(shared) as writer:
        put(writer, *greedy(300, dataset="unknown"))
        assert used(writer)["unknown"] > 12 * MIB
        put(writer, *greedy(60))
        put(writer, *small(60))
        found = used(writer)
    assert found["greedy"] >= 5 * MIB
    assert found["small"] >= 5 * MIB


@promise("A group takes its share (`DATACACHE_SHARES`) back from groups above theirs, and no more")
def test_groups_and_what_they_have_are_known_after_a_restart(shared):
    with open_tiers(shared) as writer:
        put(writer, *greedy(300))
    with open_tiers(shared) as writer:
        assert all(put(writer, *small(20)))
        put(writer, *greedy(300, start=5000))
        assert all(read(shared, block) == block.data for block in small(20))


def test_what_is_most_above_its_share_goes_first_unpinned_and_oldest_first():
    def held(id, group, *, pinned=False, last=0.0):
        return ContainerState(id, 10, last, pinned, group=group)

    containers = [
        held(1, "a", last=5.0),
        held(2, "b", pinned=True, last=1.0),
        held(3, "b", last=3.0),
        held(4, "b", last=2.0),
        held(5, "mine"),
    ]
    usage, entitled = {"a": 10, "b": 30, "mine": 10}, {"a": 10, "b": 5, "mine": 100}
    assert to_take_back(containers, 10, usage, entitled, "mine") == [4]
    assert to_take_back(containers, 1000, usage, entitled, "mine") == [4, 3, 2]  # "a" has no more than its share


def test_a_group_with_no_more_than_its_share_loses_nothing_to_others():
    assert may_evict("mine", "mine", {"mine": 1}, {"mine": 5})
    assert may_evict("mine", "b", {"b": 6}, {"b": 5})
    assert not may_evict("mine", "b", {"b": 5}, {"b": 5})


def test_a_data_set_belongs_to_the_first_pattern_that_matches():
    shares = Shares([("team-a-x", 1), ("team-a-*", 3), ("*", 1)])
    assert [shares.group(name) for name in ("team-a-x", "team-a-y", "other")] == ["team-a-x", "team-a-*", "*"]
    assert shares.entitled_bytes("team-a-*", 1000) == 600
    assert Shares([("a", 1)]).flow("b") == "b"  # takes turns by itself
    assert not Shares()


def test_shares_are_read_from_the_variable_and_from_the_file_and_given_on(home, tmp_path):
    expected = (("team-a-*", 75.0), ("b", 25.0))
    from_variable = load_settings({"DATACACHE_HOME": str(home), "DATACACHE_SHARES": "team-a-*=75,b=25"})
    assert from_variable.shares == expected
    assert load_settings(from_variable.environment()).shares == expected
    (tmp_path / "c.toml").write_text('[shares]\n"team-a-*" = 75\nb = 25\n')
    from_file = load_settings({"DATACACHE_HOME": str(home), "DATACACHE_CONFIG": str(tmp_path / "c.toml")})
    assert from_file.shares == expected


@pytest.mark.parametrize("value", ["a", "=5", "a=0", "a=-1", "a=nan", "a=inf", "a=x", "a=1,a=2"])
def test_wrong_shares_are_refused(home, value):
    with pytest.raises(SettingsError, match="DATACACHE_SHARES"):
        load_settings({"DATACACHE_HOME": str(home), "DATACACHE_SHARES": value})
