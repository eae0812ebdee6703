"""Which node owns a block: the promises of rendezvous hashing, for any members and any block."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache.cluster.members import DRAINING, JOINING, SERVING, Member
from datacache.cluster.placement import Placement
from datacache.tiers.parts import part_of

IDS = [number.to_bytes(20, "big") for number in range(4000)]

GOLDEN_RANKS = [
    ["2", "big", "3"],
    ["2", "3", "1"],
    ["3", "0", "big"],
    ["2", "1", "4"],
    ["1", "big", "2"],
    ["4", "0", "2"],
]
GOLDEN_PARTS = [4, 1, 3, 5, 2, 5, 2, 6, 1, 6, 6, 2]
"""Computed from the formula in the module's docstring by other means."""

ids = st.binary(min_size=20, max_size=20)
members = st.lists(
    st.builds(
        Member,
        id=st.text(min_size=1, max_size=8),
        address=st.just("a:1"),
        weight=st.sampled_from([1.0, 2.0, 1e12]),
        zone=st.sampled_from(["", "north"]),
        state=st.sampled_from([SERVING, SERVING, SERVING, DRAINING, JOINING, "of a later version"]),
    ),
    max_size=12,
    unique_by=lambda member: member.id,
)


def nodes(count: int, **values: object) -> list[Member]:
    return [Member(f"node-{number}", f"10.0.0.{number}:7070", 1.0, **values) for number in range(count)]


def test_owners_are_the_same_on_every_machine_and_in_every_version() -> None:
    """Nodes of two versions that disagree would fetch every block twice."""
    placement = Placement([*nodes(5), Member("big", "10.0.0.9:7070", 2.5)])
    assert [[m.id.removeprefix("node-") for m in placement.ranked(id)] for id in IDS[:6]] == GOLDEN_RANKS
    assert [part_of(id, 8) for id in IDS[:12]] == GOLDEN_PARTS


@given(members, ids, st.randoms(use_true_random=False))
def test_a_rank_has_each_serving_member_once_its_own_zone_first(found: list[Member], id: bytes, random) -> None:
    ranked = Placement(found, "north").ranked(id, 100)
    assert sorted(m.id for m in ranked) == sorted(m.id for m in found if m.state == SERVING)
    assert [m.zone for m in ranked] == sorted((m.zone for m in ranked), key=lambda zone: zone != "north")
    random.shuffle(found)
    assert Placement(found, "north").ranked(id, 2) == ranked[:2]
    if ranked:
        assert Placement(found, "north").owners([id]) == ranked[:1]


@given(members, ids)
def test_the_owner_among_all_zones_owns_the_block_in_its_own_zone_and_is_the_same_for_all(found, id) -> None:
    serving = [replace(m, state=SERVING) for m in found]
    zones = {m.zone for m in serving}
    for zone in zones if len(zones) > 1 else ():
        placement = Placement(serving, zone)
        across = placement.ranked_across(id, 100)
        in_one_zone = Placement([replace(m, zone="") for m in serving]).ranked(id, 100)
        assert [m.id for m in across] == [m.id for m in in_one_zone]
        assert Placement(serving, across[0].zone).ranked(id, 1) == across[:1]
    assert Placement(nodes(3)).ranked_across(id) == []


@given(members, ids, st.data())
def test_a_member_that_goes_leaves_its_place_and_moves_nothing_else(found: list[Member], id: bytes, data) -> None:
    ranked = Placement(found).ranked(id, 100)
    if ranked:
        gone = data.draw(st.sampled_from(ranked))
        left = [m for m in found if m != gone]
        assert Placement(left).ranked(id, 100) == [m for m in ranked if m != gone]


@given(members, ids, st.data())
def test_who_owned_a_block_before_is_the_next_in_rank_or_drains(found: list[Member], id: bytes, data) -> None:
    found = [replace(m, zone="", state=SERVING) for m in found]
    if len(found) < 2:
        return
    changed = data.draw(st.sampled_from(found))
    others = [m for m in found if m != changed]
    [without], [owner, following] = Placement(others).ranked(id, 1), Placement(found).ranked(id, 2)
    draining = Placement([*others, replace(changed, state=DRAINING)])
    assert draining.ranked(id, 1) == [without]
    if owner == changed:
        assert following == without
        assert [m.id for m in draining.leaving(id)] == [changed.id]
    else:
        assert draining.leaving(id) == []
    assert Placement(found).leaving(id) == []


def test_blocks_are_owned_in_proportion_to_weights() -> None:
    weighted = [replace(member, weight=weight) for member, weight in zip(nodes(4), (1.0, 2.0, 3.0, 4.0), strict=True)]
    owned = Counter(m.weight for m in Placement(weighted).owners(IDS))
    assert {weight: round(count / len(IDS), 1) for weight, count in owned.items()} == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}


def test_what_a_dead_member_had_is_spread_over_all_others() -> None:
    placement = Placement(nodes(5))
    heirs = Counter(ranked[1].id for id in IDS if (ranked := placement.ranked(id, 2))[0].id == "node-0")
    assert len(heirs) == 4
    assert max(heirs.values()) < 1.4 * min(heirs.values())


def test_without_a_member_that_serves_nobody_owns_a_block() -> None:
    placement = Placement(nodes(3, state=DRAINING))
    assert (placement.ranked(IDS[0]), placement.leaving(IDS[0])) == ([], [])
    with pytest.raises(LookupError, match="serves"):
        placement.owners(IDS[:1])


@given(ids, st.integers(1, 40), st.integers(1, 40))
def test_a_block_stays_with_its_process_or_moves_to_one_that_is_new(id: bytes, few: int, more: int) -> None:
    before, after = part_of(id, few), part_of(id, few + more)
    assert 0 <= before < few
    assert after == before or few <= after < few + more


def test_each_process_of_a_node_has_its_share_of_what_the_node_owns() -> None:
    owners = Placement(nodes(4)).owners(IDS)
    parts = Counter(part_of(id, 4) for id, owner in zip(IDS, owners, strict=True) if owner.id == "node-0")
    assert len(parts) == 4
    assert max(parts.values()) < 1.3 * min(parts.values())
