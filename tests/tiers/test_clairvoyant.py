"""Policy `clairvoyant` in the tiers: what goes first, lanes, and moving blocks out of a region before it goes."""

from __future__ import annotations

import dataclasses
import math

import pytest

from datacache.tiers.eviction import ContainerState, victims
from datacache.tiers.layout import OBJECT_FILE
from datacache.tiers.local import LocalBlocks
from datacache.tiers.recovery import open_tiers
from datacache.tiers.tier import Outlook
from tests.promises import promise
from tests.tiers.test_tiers import MIB, make_block, put, read

DAY = 86400.0


@pytest.fixture
def clairvoyant(settings):
    return dataclasses.replace(settings, eviction="clairvoyant", ram_bytes=0, ssd_bytes=8 * MIB)


def state(id: int, value: float, *, last_used_s: float = 0.0, pinned: bool = False) -> ContainerState:
    return ContainerState(id, 100, last_used_s, pinned, value)


def chosen(need_bytes: int, *states: ContainerState, planned: bool = True) -> list[int]:
    return list(victims("clairvoyant", states, need_bytes, now_s=DAY, ttl_s=DAY, planned=planned))


@promise("`clairvoyant` evicts first what no published order reads")
def test_what_is_never_used_goes_first_and_of_that_what_was_read_longest_ago():
    states = state(1, 0.5), state(2, 0.0, last_used_s=20), state(3, 0.0, last_used_s=10), state(4, 0.2)
    assert chosen(400, *states) == [3, 2, 4, 1]


@promise("`clairvoyant` evicts first what no published order reads")
def test_what_is_read_now_and_what_is_pinned_stays():
    assert chosen(100, state(1, math.inf), state(2, 0.0, pinned=True)) == []


def test_only_what_an_order_reads_next_takes_the_room_of_what_others_read_later():
    states = state(1, 0.5), state(2, 0.0)
    assert chosen(100, *states, planned=False) == [2]
    assert chosen(200, *states, planned=False) == []


def fill(writer, first: int, count: int, **more) -> list:
    blocks = [dataclasses.replace(make_block(seed), **more) for seed in range(first, first + count)]
    put(writer, *blocks)
    return blocks


def where(writer, tier, block) -> int:
    (id,) = [p.container for p in tier.placed if p.block == block.id][-1:]
    return id


def test_without_orders_it_keeps_what_is_there(clairvoyant):
    with open_tiers(clairvoyant) as writer:
        fill(writer, 0, 800)
        ssd = writer.tiers[1]
        before = set(ssd.containers)
        kept = put(writer, *[make_block(seed) for seed in range(2000, 2300)])
        assert not all(kept)
        assert before <= set(ssd.containers)
        assert ssd.evicted_bytes == 0


def test_blocks_of_a_lane_lie_together_and_apart_from_others(clairvoyant):
    with open_tiers(clairvoyant) as writer:
        ssd = writer.tiers[1]
        writer.call(lambda: setattr(ssd, "placed", [])).result(10)
        blocks = [dataclasses.replace(make_block(seed), lane=seed % 3) for seed in range(30)]
        assert put(writer, *blocks) == [True] * 30
        lanes: dict[int, set[int]] = {}
        for block in blocks:
            lanes.setdefault(block.lane, set()).add(where(writer, ssd, block))
        assert [len(lanes[lane]) for lane in range(3)] == [1, 1, 1]
        assert len(set.union(*lanes.values())) == 3
        assert all(read(clairvoyant, block) == block.data for block in blocks)
        assert writer.call(ssd.filling).result(10) == set.union(*lanes.values())
        writer.call(lambda: ssd.seal("mask")).result(10)
        assert not writer.call(ssd.filling).result(10)


@promise("A block that is moved between regions can be read at every moment and after a restart")
def test_moved_blocks_are_read_when_their_region_is_gone_and_the_others_are_not(clairvoyant):
    with open_tiers(clairvoyant) as writer:
        ssd = writer.tiers[1]
        blocks = fill(writer, 0, 20)
        (source,) = ssd.containers
        from datacache.tiers.layout import checksums

        pairs = [(dataclasses.replace(block, lane=1), checksums(block.data)) for block in blocks[:5]]
        local = LocalBlocks(clairvoyant.home, clairvoyant.ram_dir)
        held = local.view(blocks[0].id, 0, None)
        writer.call(lambda: writer.move(ssd, source, pairs)).result(10)
        writer.call(lambda: ssd.evict([source])).result(10)
        assert [read(clairvoyant, block) for block in blocks[:5]] == [block.data for block in blocks[:5]]
        assert [read(clairvoyant, block) for block in blocks[5:]] == [None] * 15
        assert bytes(held) == blocks[0].data, "who had a view of it still has it"
        (kept,) = ssd.containers.values()
        assert writer.count_blocks("ssd") == 5
        assert kept.disk_bytes < 20 * 10_000


def test_a_block_that_is_elsewhere_by_now_is_not_moved(clairvoyant):
    from datacache.tiers.layout import checksums

    with open_tiers(clairvoyant) as writer:
        ssd = writer.tiers[1]
        (block,) = fill(writer, 0, 1)
        (source,) = ssd.containers
        stranger = make_block(99)
        pairs = [(other, checksums(other.data)) for other in (block, stranger)]
        writer.call(lambda: writer.move(ssd, source + 1, pairs)).result(10)
        assert list(ssd.containers) == [source]
        assert read(clairvoyant, stranger) is None


@promise("A block that is moved between regions can be read at every moment and after a restart")
def test_moved_blocks_survive_a_restart(clairvoyant):
    from datacache.tiers.layout import checksums

    with open_tiers(clairvoyant) as writer:
        ssd = writer.tiers[1]
        blocks = fill(writer, 0, 4)
        (source,) = ssd.containers
        pairs = [(dataclasses.replace(block, lane=2), checksums(block.data)) for block in blocks]
        writer.call(lambda: writer.move(ssd, source, pairs)).result(10)
        writer.call(lambda: ssd.evict([source])).result(10)
    with open_tiers(clairvoyant):
        assert [read(clairvoyant, block) for block in blocks] == [block.data for block in blocks]


def test_a_planned_block_takes_the_room_of_what_no_order_reads_but_not_of_the_pinned(clairvoyant):
    with open_tiers(clairvoyant) as writer:
        ssd = writer.tiers[1]
        fill(writer, 0, 300, dataset="old")
        writer.call(lambda: writer.pin("old@1", "old", [make_block(0).object_id])).result(10)
        fill(writer, 1000, 400, dataset="other")
        pinned = {id for id, container in ssd.containers.items() if container.pinned_by}
        assert pinned
        ssd.outlook = Outlook({}, frozenset({"mask"}))
        kept = put(writer, *[dataclasses.replace(make_block(seed), lane=1) for seed in range(2000, 2400)])
        assert all(kept)
        assert ssd.evicted_bytes
        assert pinned <= set(ssd.containers)
        assert ssd.used_bytes <= ssd.budget_bytes


def test_the_index_is_read_in_parts_that_miss_nothing(clairvoyant, monkeypatch):
    monkeypatch.setattr("datacache.tiers.writer._ENTRIES", 7)
    with open_tiers(clairvoyant) as writer:
        blocks = fill(writer, 0, 50)
        found = [key for some in writer.entries("ssd") for key, _ in some]
        assert found == sorted(block.id for block in blocks)
        ids = [block.id for block in blocks] + [make_block(99).id]
        assert LocalBlocks(clairvoyant.home, clairvoyant.ram_dir).missing(ids) == [50]
        assert not any(id & OBJECT_FILE for id in writer.tiers[1].containers)
