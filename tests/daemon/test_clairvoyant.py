"""Policy `clairvoyant` with a real daemon: more hits than `keep` where an epoch reads other files than the last one,
the data of earlier trainings goes, pinned data does not; and the tables it decides by."""

from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from datacache import connect, create_snapshot, open_snapshot
from datacache.core.ids import BLOCK_BYTES, ObjectRef, block_id, object_id
from datacache.daemon.orders.clairvoyant import Clairvoyant, _both, _Container, _Rated
from datacache.daemon.orders.plan import Plan, PlanObjects
from datacache.daemon.orders.plan_file import PlanFile, PlanHeader, new_plan_file
from datacache.daemon.orders.uses import NEVER, Contents, Units, Uses
from datacache.loaders.lookahead import publish
from datacache.tiers.layout import Location, pack_location
from tests.daemon.test_lookahead import Files, wait_for
from tests.promises import promise

MIB = 2**20
COUNT, SIZE = 1200, 100_000


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    data = random.Random(1).randbytes(SIZE + COUNT)
    for row in range(COUNT):
        (folder / f"{row:05d}.bin").write_bytes(data[row : row + SIZE])
    return folder


@pytest.fixture
def small(settings):
    return dataclasses.replace(settings, ram_bytes=0, ssd_bytes=32 * MIB, concurrency=8)


def goes_on(client, ahead) -> bool:
    """Return whether all is fetched that fits into the window at the plan's position."""
    id = ahead._file.peek().path.name
    (plan,) = [plan for plan in client.cache_status()["plans"] if plan["id"] == id]
    to_come = plan["ahead"] > 0 or plan["position"] + plan["ahead"] >= plan["items"] + plan["next_items"]
    return to_come and plan["state"] != "fetching"


def train(settings, bucket, orders, *, planned: bool) -> list[int]:
    """Read epochs, a block ahead of each other, and count what each fetches; the last order is only published."""
    if not (settings.home / "catalog.db").exists():
        create_snapshot("many", str(bucket), settings=settings)
    client, fetched = connect(settings), []
    with open_snapshot("many", settings) as snapshot:
        before = None
        for order, following in itertools.pairwise(orders):
            start = client.cache_status()["fetched"]["fetched"]
            ahead = publish(
                dataclasses.replace(settings, prefetch=planned), Files(snapshot), order, next_order=following
            )
            assert ahead.wait_sent() == planned
            if before is not None:
                before.close()
            for place, row in enumerate(order.tolist()):
                ahead.advance(place)
                assert len(snapshot.read(f"{row:05d}.bin")) == SIZE
                if planned and place % 10 == 0:
                    wait_for(lambda ahead=ahead: goes_on(client, ahead))
            before = ahead
            fetched.append(client.cache_status()["fetched"]["fetched"] - start)
        before.close()
    return fetched


def test_where_epochs_read_other_files_each_it_hits_more_often_than_keep(small, bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("DATACACHE_PREFETCH", "0")  # no warm-up in the background of `keep`
    rng = np.random.default_rng(1)
    orders = [rng.permutation(COUNT)[: COUNT // 2] for _ in range(4)]
    settings = dataclasses.replace(small, prefetch=False)
    keep = sum(train(settings, bucket, orders, planned=False)[1:])
    other = dataclasses.replace(
        small, home=tmp_path / "home", eviction="clairvoyant", catalog=f"sqlite:///{tmp_path}/home/catalog.db"
    )
    try:
        clairvoyant = sum(train(other, bucket, orders, planned=True)[1:])
        status = connect(other).cache_status()
        assert status["lookahead"]["moved_bytes"] > 0
        assert status["tiers"][1]["used_bytes"] <= other.ssd_bytes
    finally:
        connect(other).stop()
    assert clairvoyant < keep


@promise("`clairvoyant` evicts first what no published order reads")
def test_the_data_of_an_earlier_training_goes_and_what_is_pinned_stays(small, bucket, tmp_path):
    settings = dataclasses.replace(small, eviction="clairvoyant")
    old = tmp_path / "old"
    old.mkdir()
    for row in range(300):
        (old / f"{row:05d}.bin").write_bytes(random.Random(row).randbytes(SIZE))
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "00000.bin").write_bytes(bytes(SIZE))
    client = connect(settings)
    for name, folder in (("old", old), ("kept", kept)):
        create_snapshot(name, str(folder), settings=settings)
    for name, wanted in (("kept", "done"), ("old", None)):
        if name == "kept":
            client.pin("kept")
        job = client.warm(name)
        wait_for(lambda job=job: client.job(job)["state"] != "running")
        assert wanted is None or client.job(job)["state"] == wanted
    create_snapshot("many", str(bucket), settings=settings)
    order = np.arange(COUNT)
    with open_snapshot("many", settings) as snapshot, publish(settings, Files(snapshot), order) as ahead:
        assert ahead.wait_sent()
        for place in range(600):
            ahead.advance(place)
            assert len(snapshot.read(f"{place:05d}.bin")) == SIZE
            if place % 10 == 0:
                wait_for(lambda: goes_on(client, ahead))
        sizes = {dataset["name"]: dataset["ssd_bytes"] for dataset in client.cache_status()["datasets"]}
    assert sizes.get("old", 0) == 0
    assert sizes["kept"] >= SIZE
    assert sizes["many"] > 20 * MIB
    with open_snapshot("kept", settings) as snapshot:
        (kept / "00000.bin").unlink()
        assert snapshot.read("00000.bin") == bytes(SIZE)


def test_a_region_that_plans_of_two_snapshots_read_counts_for_both():
    region = _Container(5, "mask", 4096, "")

    def rated(rows, values, must, value):
        return _Rated(region, None, value, 0.0, np.array(rows), np.array(values), np.array(must))

    one = rated([[0, 512, 10], [1, 1024, 10]], [1.0, 0.5], [True, False], 1.5)
    other = rated([[7, 1024, 10], [8, 2048, 10]], [0.25, 2.0], [False, False], 2.25)
    both = _both(one, other)
    assert both.value == 3.75
    assert both.rows[:, 1].tolist() == [512, 1024, 2048]
    assert both.values.tolist() == [1.0, 0.75, 2.0]
    assert both.must.tolist() == [True, False, False]


class FixedPlan:
    """Hold what `Uses` looks at of a plan."""

    def __init__(self, items) -> None:
        self.items = np.array(items, np.uint32)


def complete(*sizes: int) -> PlanObjects:
    objects = PlanObjects(None, [ObjectRef("s3://b", str(n), size) for n, size in enumerate(sizes)])
    objects.learn_all(lambda: False)
    return objects


def test_the_next_use_of_every_unit_is_found_from_any_place():
    rng = random.Random(3)
    items = [[rng.randrange(50)] for _ in range(400)]
    units = Units(complete(*[10] * 60), parts=False)
    uses = Uses(FixedPlan(items), units)
    for place in (0, 1, 100, 399, 400):
        first, times = uses.after(np.arange(60), place)
        for unit in range(60):
            expected = [at for at in range(place, 400) if items[at][0] == unit]
            assert times[unit] == len(expected)
            assert first[unit] == (expected[0] if expected else NEVER)
            assert uses.next_place(unit, place) == (expected[0] if expected else None)


def test_parts_of_objects_are_units_of_their_own():
    objects = complete(10, 3 * BLOCK_BYTES, 2 * BLOCK_BYTES + 1)
    units = Units(objects, parts=True)
    assert units.count == 1 + 3 + 3
    which, places = units.of_items(np.array([[1, 1, 2], [0, 0, 1], [2, 2, 5]], np.uint32))
    assert which.tolist() == [2, 3, 0, 6]
    assert places.tolist() == [0, 0, 1, 2]
    assert units.of_object(objects.id(2)).tolist() == [4, 5, 6]
    assert units.of_object(bytes(16)).tolist() == []


def test_what_a_region_holds_is_known_from_the_index():
    objects = complete(*[10] * 5)
    units, contents = Units(objects, parts=False), Contents()
    ids = [block_id(object_id(ObjectRef("s3://b", str(n), 10)), 0) for n in (3, 1, 4)]
    entries = [(id, pack_location(Location(7 + at % 2, 1000 - at, 10, bytes(8)))) for at, id in enumerate(ids)]
    entries.append((bytes(20), pack_location(Location(7, 0, 10, bytes(8)))))
    contents.add_index(units, [sorted(entries)], over=lambda: True)
    assert len(contents.of(7)) == 0
    contents.add_index(units, [])
    contents.add_index(units, [sorted(entries)[:2], sorted(entries)[2:]])
    contents.add_index(units, [sorted(entries)])  # the same once more
    assert contents.of(7)[:, :2].tolist() == [[4, 998], [3, 1000]]
    assert contents.of(8)[:, 0].tolist() == [1]
    contents.keep_only([8])
    assert len(contents.of(7)) == 0


def test_a_plan_that_was_sent_again_takes_the_place_of_the_first(tmp_path):
    file = new_plan_file(
        tmp_path / "lookahead", tmp_path, 0
    )  # in a folder that is ours alone, as its parent need not be
    header = PlanHeader(
        id=file.path.name, pid=1, started=1, dataset="d", snapshot="", refs=(), columns=1, items=0, next_items=0
    )
    tier = SimpleNamespace(budget_bytes=2**30, outlook=None)
    chooser = Clairvoyant(None, tier)
    for objects in (PlanObjects(None, ()), PlanObjects(None, ())):  # the same objects, and others
        for _ in range(2):
            plan = Plan(header, np.zeros((0, 1), np.uint32), objects, PlanFile(file.path))
            chooser.add(plan)
            assert tier.outlook is not None
    file.remove()
    chooser.drop(plan)
    assert tier.outlook is None
