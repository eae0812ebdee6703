"""Test what is counted by data set and by namespace: all of it, in a bounded number of names."""

from __future__ import annotations

import random
from pathlib import Path

from datacache import connect, create_snapshot, load_settings, open_snapshot
from datacache.daemon.owners import COUNTED, REST, OwnerCounts
from datacache.settings import Settings
from datacache.tiers.tenants import Tenants


def sums(**fetched: int) -> dict[str, dict[str, int]]:
    return {name: dict.fromkeys(COUNTED, 0) | {"fetched_bytes": size} for name, size in fetched.items()}


def shown(found: dict, which: str, what: str = "fetched_bytes") -> dict[str, int]:
    return {each["name"]: each[what] for each in found[which] if each[what]}


def test_what_is_shared_counts_for_each_namespace_in_parts_and_what_changes_hands_from_then_on():
    counts = OwnerCounts()
    both = Tenants(users={"mask": ("a", "b"), "own": ("a",)})
    found = counts.look(sums(mask=100, own=10, free=5), both, {"mask": 100, "own": 10}, {"a": 60.0, "b": 50.0})
    assert shown(found, "by_dataset") == {"mask": 100, "own": 10, "free": 5}
    assert shown(found, "by_namespace") == {"a": 60, "b": 50}
    assert shown(found, "by_namespace", "held_bytes") == {"a": 60, "b": 50}
    found = counts.look(
        sums(mask=150, own=10, free=5), Tenants(users={"mask": ("b",)}), {"mask": 150}, {"a": 1, "b": 150}
    )
    assert shown(found, "by_namespace") == {"a": 60, "b": 100}, "nothing that was counted is taken back"


def test_only_the_largest_have_names_and_the_rest_has_one_that_never_falls():
    random_sizes = random.Random(7)
    counts, total = OwnerCounts(), dict.fromkeys((f"d{n}" for n in range(200)), 0)
    rest = 0
    for _ in range(30):
        for name in total:
            total[name] += random_sizes.randrange(1000)
        held = {name: random_sizes.randrange(10**6) for name in total}
        namespaces = {f"n{name}": float(size) for name, size in held.items()}
        tenants = Tenants(users={name: (f"n{name}",) for name in total})
        found = counts.look(sums(**total), tenants, held, namespaces)
        assert all(len(some) == 21 for some in found.values())
        assert sum(shown(found, "by_dataset", "held_bytes").values()) == sum(held.values())
        assert shown(found, "by_dataset")[REST] >= rest
        rest = shown(found, "by_dataset")[REST]


def test_counters_that_began_anew_count_from_0():
    counts = OwnerCounts()
    counts.look(sums(mask=100), Tenants(), {}, {})
    assert shown(counts.look(sums(mask=30), Tenants(), {}, {}), "by_dataset") == {"mask": 130}


def test_a_daemon_tells_what_was_read_of_each_data_set(settings: Settings, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DATACACHE_PREFETCH", "0")
    for name, count in (("one", 3), ("two", 5)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / str(number)).write_bytes(f"{name} {number}".encode() * 2000)
        create_snapshot(name, str(tmp_path / name))
    client = connect(load_settings())
    assert client.set_tenants({"lab": 10**6}, {"two": ["lab", "guests"]})
    assert not client.set_tenants(None, {"two": ["guests", "lab"]})
    for name, count in (("one", 3), ("two", 5)):
        for _ in range(2):
            with open_snapshot(name) as snapshot:
                for number in range(count):
                    assert snapshot.read(str(number)).startswith(name.encode())
            client.cache_status()  # all is stored by then
    found = client.cache_status()
    by_dataset = {each["name"]: each for each in found["by_dataset"]}
    assert [by_dataset[name]["misses"] for name in ("one", "two")] == [3, 5]
    assert [by_dataset[name]["hits"] for name in ("one", "two")] == [3, 5]
    assert [by_dataset[name]["fetched_bytes"] for name in ("one", "two")] == [30_000, 50_000]
    assert found["reads"]["hits"] == 8
    by_namespace = {each["name"]: each for each in found["by_namespace"]}
    assert by_namespace["lab"]["fetched_bytes"] == by_namespace["guests"]["fetched_bytes"] == 25_000
    client.evict("two")
    text = client.metrics(names=True)
    assert 'datacache_dataset_hits_total{dataset="one"} 3\n' in text
    assert 'datacache_namespace_limit_bytes{namespace="lab"} 1000000.0\n' in text
    start = 'datacache_dataset_evicted_bytes_total{dataset="two"} '
    evicted = next(line for line in text.splitlines() if line.startswith(start))
    assert int(evicted.removeprefix(start)) >= 50_000
    assert "dataset=" not in client.metrics()
    assert "namespace=" not in client.metrics()
