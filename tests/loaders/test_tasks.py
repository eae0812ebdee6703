"""Task queues on both databases: the conformance suite, outages, crashes, a model, and workers that are killed."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from datacache.catalog.mongo import client
from datacache.catalog.open import open_task_store
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.catalog.tasks import mongo as tasks_mongo_queues
from datacache.catalog.tasks.base import Changes, Leased, NewTask, TaskState, TaskStore
from datacache.catalog.tasks.mongo import MongoTasks
from datacache.catalog.tasks.sqlite import _AHEAD, _CLAIMED, _EXPIRED, _TODO, SqliteTasks
from datacache.core.errors import LeaseLostError, TasksError
from datacache.core.packed import MOST_BYTES
from datacache.loaders.tasks.plan import Plan, TaskParameters, new_tasks, record_key
from datacache.loaders.tasks.queue import Span, Task, TaskQueue, Wait
from tests.catalog.test_sqlite import in_read_only
from tests.conformance.catalog import a_record
from tests.conformance.tasks import TasksConformance, fetch, make_queue, records, use_all
from tests.promises import promise
from tests.servers import Mongod


class TestSqliteTasks(TasksConformance):
    @pytest.fixture
    def tasks_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/home/catalog.db"

    def expire(self, store: TaskStore, lease: Leased) -> None:
        assert isinstance(store, SqliteTasks)
        with store._catalog.writing(durable=False) as connection:
            connection.execute(
                "UPDATE tasks SET until_s = until_s - 7200 WHERE generation = ? AND number = ? AND token = ?",
                (lease.generation, lease.number, lease.token),
            )

    def set_clock_back(self, store: TaskStore, lease: Leased) -> None:
        assert isinstance(store, SqliteTasks)
        with store._catalog.writing(durable=False) as connection:
            connection.execute(
                "UPDATE tasks SET until_s = until_s + 7200 WHERE generation = ? AND number = ? AND token = ?",
                (lease.generation, lease.number, lease.token),
            )


class TestMongoTasks(TasksConformance):
    @pytest.fixture(autouse=True)
    def _makers_are_given_up_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tasks_mongo_queues, "_MAKER_S", 0.3)

    @pytest.fixture
    def tasks_url(self, mongod: Mongod) -> str:
        return mongod.database_url()

    def expire(self, store: TaskStore, lease: Leased) -> None:
        assert isinstance(store, MongoTasks)
        store._tasks.update_one(
            {"g": lease.generation, "number": lease.number, "token": lease.token},
            [{"$set": {"until": {"$subtract": ["$until", 7_200_000]}}}],
        )

    def set_clock_back(self, store: TaskStore, lease: Leased) -> None:
        assert isinstance(store, MongoTasks)
        store._tasks.update_one(
            {"g": lease.generation, "number": lease.number, "token": lease.token},
            [{"$set": {"until": {"$add": ["$until", 7_200_000]}}}],
        )


# --- MongoDB ----------------------------------------------------------------------------------------------------------


@promise("A database that is killed and restarted costs no record, no lease and no repeat")
@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_costs_no_record_and_no_lease(tmp_path: Path) -> None:
    spans = [Span(f"shard-{number}", number * 20, 20) for number in range(40)]
    used: list[tuple[int, str, int]] = []
    with Mongod(tmp_path / "own") as server:
        url = server.database_url()
        make_queue(open_task_store(url), spans=spans, records=10, epochs=2, max_lost=1)
        begun = threading.Semaphore(0)

        def work() -> None:
            queue = TaskQueue(open_task_store(url), "job", patience_s=30)
            while (task := queue.fetch_shard()) is not None:
                for record in task.left().tolist():
                    queue.report_batch_done(task, 1)
                    used.append((task.epoch, task.name, record))
                    begun.release()
            queue.close()

        threads = [threading.Thread(target=work) for _worker in range(3)]
        for thread in threads:
            thread.start()
        for _round in range(2):
            for _record in range(200):
                assert begun.acquire(timeout=60)
            server.stop()
            server.start()
        for thread in threads:
            thread.join()
        assert Counter(used) == records([0, 1], spans)
        queue = TaskQueue(open_task_store(url), "job")
        assert queue.status().finished
        assert not queue.status().failed
        queue.close()


@pytest.fixture
def mongo(mongod: Mongod) -> Iterator[MongoTasks]:
    store = MongoTasks(mongod.database_url())
    yield store
    store.close()


def test_a_maker_that_died_before_the_clock_was_set_back_is_followed(mongo: MongoTasks) -> None:
    queue = mongo.create("queue", 1, "{}", b"")
    assert mongo._extend(queue, "dead")
    assert not mongo.make(queue, "too early", list)
    mongo._queues.update_one({"_id": "queue"}, [{"$set": {"maker_until": {"$add": ["$maker_until", 7_200_000]}}}])
    assert mongo.make(queue, "another", list)


def test_an_epoch_whose_maker_was_killed_is_made_by_the_next(
    mongo: MongoTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(mongo)
    record = mongo.queue("job")
    assert record is not None
    monkeypatch.setattr(tasks_mongo_queues, "_MAKER_S", 0.3)
    assert mongo._extend(record, "killed")
    half = [NewTask(0, 3, 3, "b", 0, 4), NewTask(0, 0, 0, "a", 0, 4)]
    mongo._insert(record, half)
    assert isinstance(queue.try_fetch("w"), Wait)
    assert use_all(queue) == sorted(records())


def test_a_report_that_loses_races_pauses_before_each_further_try(
    mongo: MongoTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_queue(mongo)
    record = mongo.queue("job")
    assert record is not None
    assert mongo.make(record, "maker", lambda: [NewTask(0, 0, 0, "a", 0, 4)])
    lease = mongo.lease(record, "w", "claim", lease_s=60, max_lost=3)
    assert lease is not None
    events: list[str] = []
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=lambda _s: events.append("pause")))

    def change(task: TaskState) -> Changes:
        events.append("try")
        if events.count("try") < 3:
            mongo._tasks.update_one({"g": lease.generation}, {"$inc": {"position": 1}})
        return {"state": task.state, "position": 4}

    mongo._change_held(lease, change, durable=True)
    assert events == ["try", "pause", "try", "pause", "try"]


def test_a_maker_that_wakes_up_epochs_later_brings_no_task_back(mongo: MongoTasks) -> None:
    queue = make_queue(mongo, epochs=4)
    queue.report_done(fetch(queue))
    begun = mongo.queue("job")
    assert begun is not None
    while (task := fetch(queue)).epoch < 3:
        queue.report_done(task)
    mongo._insert(begun, [NewTask(0, 0, 0, "a", 0, 4)])
    queue.report_done(task)
    assert {epoch for epoch, *_record in use_all(queue)} == {3}
    assert queue.status().finished


def test_a_generation_whose_end_was_interrupted_is_cleaned_up_before_the_next_is_leased(mongo: MongoTasks) -> None:
    queue = make_queue(mongo)
    old = fetch(queue)
    mongo._queues.update_one(  # as `replace` leaves it when it is killed before the tasks are deleted
        {"_id": "job"},
        {
            "$set": {"g": 1, "made": False, "maker_until": tasks_mongo_queues._LONG_AGO},
            "$push": {"stale": old.lease.generation},
        },
    )
    queue.renew(old)
    fetch(queue)
    with pytest.raises(LeaseLostError):
        queue.renew(old)
    assert mongo._tasks.count_documents({"g": old.lease.generation}) == 0


def test_a_removal_that_was_interrupted_is_finished_by_whoever_makes_the_queue_again(mongo: MongoTasks) -> None:
    queue = make_queue(mongo)
    old = fetch(queue)
    mongo._queues.update_one({"_id": "job"}, {"$set": {"removed": True}})
    assert not queue.exists()
    assert mongo.queues() == []
    make_queue(mongo, epochs=2)
    with pytest.raises(LeaseLostError):
        queue.renew(old)
    assert Counter(use_all(queue)) == records([0, 1])


def test_mongodb_finds_tasks_by_an_index(mongo: MongoTasks) -> None:
    queue = make_queue(mongo, spans=[Span("a", 0, 500)], records=1)
    held = [fetch(queue) for _task in range(100)]
    mine: dict[str, Any] = {"g": held[0].lease.generation, "lane": {"$in": [-1, 0]}}
    expired = {"state": "doing", "$expr": {"$lte": ["$until", "$$NOW"]}}
    for condition, sort, found in (
        (mine | {"state": "todo"}, [("lane", 1), ("place", 1)], 1),
        (mine | expired, [("until", 1)], 0),
        ({"g": mine["g"], "state": "doing", "claim": "nobody's"}, [("claim", 1)], 0),
    ):
        done = mongo._tasks.find(condition).sort(sort).limit(1).explain()["executionStats"]
        assert done["totalDocsExamined"] == found
        assert done["totalKeysExamined"] <= 3


# --- SQLite -----------------------------------------------------------------------------------------------------------


def test_sqlite_finds_tasks_by_an_index(tmp_path: Path) -> None:
    store = open_task_store(f"sqlite:///{tmp_path}/catalog.db")
    assert isinstance(store, SqliteTasks)
    make_queue(store)
    with store._catalog.reading() as connection:
        for query in (_TODO, _EXPIRED, _AHEAD, _CLAIMED):
            numbers = (1,) * query.count("?")
            plan = [row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}", numbers)]
            assert "USING INDEX tasks_by" in plan[0]
            assert len(plan) == 1  # nothing is sorted
    store.close()


def version_2_file(path: Path) -> None:
    """A catalog as the version before task queues left it."""
    catalog = SqliteCatalog(path)
    catalog.commit(a_record(), tags=["v1"])
    catalog.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "DROP TABLE documents; DROP TABLE tasks; DROP TABLE task_queues; PRAGMA user_version=2;"
        )


@promise("A catalog of an older version is brought up to date and keeps everything")
def test_a_catalog_of_the_version_before_gets_the_tables_and_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    version_2_file(path)
    before = SqliteCatalog(path).identity()
    store = open_task_store(f"sqlite:///{path}")
    assert Counter(use_all(make_queue(store))) == records()
    catalog = SqliteCatalog(path)
    assert catalog.snapshots("mask") == [a_record()]
    assert catalog.identity() == before
    store.close()
    catalog.close()


@promise("A catalog of an older version is brought up to date and keeps everything")
def test_a_catalog_of_the_version_before_that_cannot_be_written_has_no_queues_and_is_read(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "catalog.db"
    path.parent.mkdir()
    version_2_file(path)
    script = f"""
from pathlib import Path
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.catalog.open import open_task_store
from datacache.core.errors import CatalogError
from tests.conformance.tasks import make_queue
store = open_task_store("sqlite:///{path}")
assert store.queues() == []
assert len(SqliteCatalog(Path({str(path)!r})).snapshots("mask")) == 1
assert len(SqliteCatalog(Path({str(path)!r})).identity()) == 16
try:
    make_queue(store)
except CatalogError as exc:
    print(exc)
"""
    assert "cannot be written" in in_read_only(path.parent, script)


# --- the plan ---------------------------------------------------------------------------------------------------------


@promise("The order of tasks is the same on every machine and in both databases")
def test_the_order_of_tasks_and_of_their_records_never_changes_between_releases() -> None:
    # A checkpoint says how many records of a task were used: in another order these are other records.
    def orders(seed: int, epoch: int) -> tuple[tuple[int, ...], ...]:
        parameters = TaskParameters(records=6, seed=seed)
        tasks = new_tasks(Plan([("a", 20), ("b", 15), ("c", 5)]), parameters, epoch)
        left = []
        for number in (0, 1):
            lease = Leased(1, epoch, number, "a", 6 * number, 6, 0, 1, "claim")
            task = Task("job", lease, 60.0, record_key(parameters, epoch, number), 0)
            left.append(tuple((task.left() - task.start).tolist()))
        return tuple(task.place for task in tasks), *left

    assert orders(7, 2) == ((1, 7, 6, 0, 2, 3, 5, 4), (2, 5, 1, 4, 3, 0), (3, 1, 4, 0, 5, 2))
    every = [orders(seed, epoch) for seed in (7, 8) for epoch in (0, 1, 2)]
    assert len({places for places, *_ in every}) == len(every)
    assert len({left for _, *of_two in every for left in of_two}) == 2 * len(every)


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "shards"), [("sqlite", 10_000), ("mongodb", 2000)])
def test_many_thousands_of_tasks_are_made_taken_and_counted(
    backend: str, shards: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if backend == "sqlite":
        url = f"sqlite:///{tmp_path}/catalog.db"
    else:
        url = request.getfixturevalue("mongod").database_url()
    store = open_task_store(url)
    spans = [Span(f"shard-{number:06}.tar", number * 1000, 1000) for number in range(shards)]
    queue = make_queue(store, spans=spans, records=100, shuffle=True)
    for _task in range(50):
        queue.report_done(fetch(queue))
    held = fetch(queue)
    status = queue.status()
    counts = {state: count.tasks for state, count in status.counts.items()}
    assert counts == {"todo": 10 * shards - 51, "doing": 1, "done": 50}
    text = queue.get_shard_checkpoint()
    assert len(text) < 20_000
    queue.restore_shard_from_checkpoint(text)
    with pytest.raises(LeaseLostError):
        queue.report_done(held)
    fetch(queue)
    assert queue.status().counts["done"].tasks == 50
    assert queue.remove()
    store.close()


@promise("Packed catalog records over 256 MiB are refused before they take memory")
def test_a_plan_that_would_unpack_to_more_than_there_is_room_for_is_refused():
    plan = Plan([("shard", 3)])
    assert Plan.decode(plan.encode()).spans == plan.spans
    frame = bytearray(zstandard.compress(bytes(2**20)))
    frame[5:9] = (MOST_BYTES + 1).to_bytes(4, "little")  # its declared size
    assert zstandard.get_frame_parameters(bytes(frame)).content_size == MOST_BYTES + 1
    for kept in (bytes(frame), zstandard.compress(b"x")[:-2], b"no frame"):
        with pytest.raises(TasksError, match="cannot be unpacked"):
            Plan.decode(kept)
