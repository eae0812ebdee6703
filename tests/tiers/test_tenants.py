"""Quotas of namespaces: who fills his share evicts only his own, and shared data never goes because of one."""

from __future__ import annotations

import dataclasses
import json

import pytest

from datacache.tiers import layout
from datacache.tiers.recovery import open_tiers
from datacache.tiers.tenants import Tenants, read_tenants
from tests.promises import promise
from tests.tiers.test_tiers import MIB, make_block, put, read

SIZE = 100_000


@pytest.fixture
def small(settings):
    """A cache of 32 MiB on SSD alone, in which a region has 1 MiB."""
    return dataclasses.replace(settings, ram_bytes=0, ssd_bytes=32 * MIB)


def blocks(dataset: str, count: int, *, start: int = 0):
    seed = 1000 * (1 + sum(dataset.encode()))
    return [make_block(seed + start + n, SIZE, dataset=dataset) for n in range(count)]


def tell(writer, limits: dict[str, int] | None, **users: list[str]) -> None:
    writer.call(lambda: writer.set_tenants(limits, users)).result(30)


def charged(writer) -> dict[str, int]:
    tier = writer.tiers[-1]
    return writer.call(lambda: {name: round(size) for name, size in tier.charges.namespaces.items()}).result(30)


def there(settings, some) -> list[bool]:
    found = [read(settings, block) for block in some]
    assert all(data in (None, block.data) for data, block in zip(found, some, strict=True))
    return [data is not None for data in found]


@promise("A namespace that fills its share of the cache evicts only its own")
@pytest.mark.parametrize("policy", ["keep", "lru", "ttl", "clairvoyant"])
def test_who_fills_his_share_takes_nothing_of_others(small, policy):
    with open_tiers(dataclasses.replace(small, eviction=policy)) as writer:
        tell(writer, {"a": 8 * MIB}, mine=["a"], theirs=["b"])
        put(writer, *blocks("nobodys", 60), *blocks("theirs", 60))
        for start in range(0, 300, 50):
            put(writer, *blocks("mine", 50, start=start))
            assert charged(writer)["a"] <= 8 * MIB
        assert charged(writer)["a"] > 6 * MIB
        assert all(there(small, blocks("theirs", 60) + blocks("nobodys", 60)))
        mine = there(small, blocks("mine", 300))
        newest_first = policy in ("lru", "ttl")
        assert mine[-1] == newest_first, "what a policy evicts of a whole cache it evicts of a share"
        assert mine[0] != newest_first


@promise("A namespace that fills its share of the cache evicts only its own")
def test_a_full_cache_is_not_emptied_for_what_is_beyond_a_share(small):
    with open_tiers(dataclasses.replace(small, eviction="lru")) as writer:
        tell(writer, {"a": 0}, mine=["a"], theirs=["b"])
        put(writer, *blocks("theirs", 330))
        before = writer.tiers[-1].evicted_bytes
        assert put(writer, *blocks("mine", 50)) == [False] * 50
        assert writer.tiers[-1].evicted_bytes == before


@promise("A namespace that fills its share of the cache evicts only its own")
def test_what_a_namespace_no_longer_has_mounted_goes_first_whatever_the_policy(small):
    with open_tiers(small) as writer:
        limits = {"a": 8 * MIB}
        tell(writer, limits, first=["a"], theirs=["b"])
        put(writer, *blocks("first", 70), *blocks("theirs", 60))
        assert put(writer, *blocks("first", 20, start=70))[-1] is False  # keep
        tell(writer, limits, second=["a"])  # "b" has nothing mounted either
        assert charged(writer)["a"] > 6 * MIB, "what was left behind is still charged"
        assert all(put(writer, *blocks("second", 60)))
        assert not there(small, blocks("first", 1))[0]
        assert all(there(small, blocks("theirs", 60)))


@promise("A namespace that fills its share of the cache evicts only its own")
def test_a_lower_quota_is_kept_at_once_and_a_daemon_that_starts_knows_it(small):
    with open_tiers(small) as writer:
        tell(writer, None, mine=["a"], theirs=["b"])
        writer.call(lambda: writer.pin("theirs@1", "theirs", [])).result(30)
        put(writer, *blocks("theirs", 60), *blocks("mine", 150))
        tell(writer, {"a": 5 * MIB}, mine=["a"], theirs=["b"])
        assert 3 * MIB < charged(writer)["a"] <= 5 * MIB
        assert there(small, blocks("mine", 150))[-1], "the oldest go"
    with open_tiers(small) as writer:
        put(writer, *blocks("mine", 100, start=1000))
        assert charged(writer)["a"] <= 5 * MIB
        tell(writer, {"a": MIB}, theirs=["b"])
        assert charged(writer)["a"] <= MIB
        assert all(there(small, blocks("theirs", 60)))


@promise("A namespace that fills its share of the cache evicts only its own")
def test_a_pin_holds_within_the_quota_and_goes_last(small):
    with open_tiers(dataclasses.replace(small, eviction="lru")) as writer:
        tell(writer, {"a": 8 * MIB}, pinned=["a"], other=["a"])
        writer.call(lambda: writer.pin("pinned@1", "pinned", [])).result(30)
        put(writer, *blocks("pinned", 40), *blocks("other", 30))
        put(writer, *blocks("other", 100, start=100))
        assert all(there(small, blocks("pinned", 40)))
        put(writer, *blocks("pinned", 100, start=100))
        assert charged(writer)["a"] <= 8 * MIB
        tell(writer, {"a": 3 * MIB}, pinned=["a"], other=["a"])
        assert charged(writer)["a"] <= 3 * MIB
        assert not any(there(small, blocks("other", 130)))
        assert any(there(small, blocks("pinned", 140)))


@promise("A data set that several namespaces have is charged to each in equal parts, and never goes because of one")
@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_shared_data_is_paid_in_equal_parts_and_stays(small, policy):
    with open_tiers(dataclasses.replace(small, eviction=policy)) as writer:
        tell(writer, {"a": 6 * MIB, "b": 20 * MIB}, both=["a", "b"], mine=["a"])
        put(writer, *blocks("both", 60))
        paid = charged(writer)
        assert paid["a"] == paid["b"] == pytest.approx(60 * SIZE / 2, rel=0.1)
        put(writer, *blocks("mine", 100))
        assert charged(writer)["a"] <= 6 * MIB
        assert all(there(small, blocks("both", 60)))
        # "b" has room for more of it, and what only "a" has goes for the part of "a".
        assert all(put(writer, *blocks("both", 60, start=100)))
        tell(writer, {"a": MIB, "b": 20 * MIB}, both=["a", "b"], mine=["a"])
        assert not any(there(small, blocks("mine", 100)))
        assert all(there(small, blocks("both", 60) + blocks("both", 60, start=100)))
        # Once nobody else has it, it is the last one's own.
        tell(writer, None, both=["a"])
        assert charged(writer)["a"] <= MIB


@promise("A namespace that fills its share of the cache evicts only its own")
def test_large_objects_stay_within_a_share(small):
    def large(object: int):
        return [make_block(object, 4 * MIB, dataset="mine", object_bytes=8 * MIB, number=number) for number in range(2)]

    with open_tiers(dataclasses.replace(small, eviction="lru")) as writer:
        tell(writer, {"a": 10 * MIB}, mine=["a"], theirs=["b"])
        put(writer, *blocks("theirs", 60))
        for number in (1, 2, 3):
            assert put(writer, *large(number)) == [True, True]
            assert charged(writer)["a"] <= 10 * MIB
        assert all(there(small, blocks("theirs", 60)))


def test_half_of_the_limit_is_each_parts_and_of_memory_as_large_a_part_as_of_the_disk(settings):
    both = dataclasses.replace(settings, ram_bytes=8 * MIB, ssd_bytes=32 * MIB, eviction="lru")
    with open_tiers(both) as writer:
        tell(writer, {"a": 16 * MIB}, mine=["a"])
        put(writer, *blocks("mine", 300))
        ram, ssd = (writer.call(lambda n=n: writer.tiers[n].charges.namespaces["a"]).result(30) for n in (0, 1))
        assert 2 * MIB < ram <= 4 * MIB
        assert 8 * MIB < ssd <= 16 * MIB
    with open_tiers(both) as writer:
        writer.divide(2)
        assert writer.call(lambda: writer.tiers[-1].charges.namespaces["a"]).result(30) <= 8 * MIB


@pytest.mark.parametrize("text", ["", "{", "[]", '{"limits": 1}', '{"limits": {"a": "x"}, "users": {}, "had": {}}'])
def test_a_file_that_cannot_be_read_is_as_none(settings, text):
    path = layout.tenants_file(settings.home)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert read_tenants(path) == Tenants()
    with open_tiers(settings) as writer:
        tell(writer, {"a": 5}, mine=["a"])
    assert json.loads(path.read_text())["limits"] == {"a": 5}


def test_without_namespaces_nothing_is_written_and_nothing_is_charged(small):
    with open_tiers(small) as writer:
        put(writer, *blocks("mine", 10))
        tell(writer, {})
        assert not charged(writer)
    assert not layout.tenants_file(small.home).exists()
