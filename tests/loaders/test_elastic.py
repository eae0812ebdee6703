"""`ElasticDataset` in real DataLoaders, on a real queue: what is used is reported, and whatever is not comes back."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from datacache import api
from datacache.catalog.open import open_task_store
from datacache.catalog.tasks.base import TaskStore
from datacache.catalog.tasks.sqlite import SqliteTasks
from datacache.core.errors import (
    AnnotationError,
    CatalogUnavailableError,
    DaemonUnavailableError,
    ShardError,
    StoreAccessError,
    StoreUnavailableError,
    TasksError,
    UsageError,
)
from datacache.loaders.packed import EmptyBatch
from datacache.loaders.tasks.elastic import ElasticDataset
from datacache.loaders.tasks.queue import Span, TaskParameters, TaskQueue
from datacache.settings import Settings
from datacache.torch import ShardDataset, SnapshotDataset
from tests.conformance.tasks import fetch
from tests.promises import promise


class Numbers:
    """Samples that are their numbers, in three spans."""

    def __init__(self, *, broken: int = -1, error: type[Exception] = ShardError) -> None:
        self.broken, self.error = broken, error

    def __len__(self) -> int:
        return 40

    def __getitem__(self, sample: int) -> int:
        if sample == self.broken:
            raise self.error(f"sample {sample} cannot be read")
        return sample

    def spans(self) -> list[Span]:
        return [Span("a", 0, 20), Span("b", 20, 15), Span("c", 35, 5)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TaskStore]:
    store = open_task_store(f"sqlite:///{tmp_path}/home/catalog.db")
    yield store
    store.close()


def make_queue(
    store: TaskStore, *, records: int = 6, epochs: int = 1, lease_s: float = 3600.0, **more: int
) -> TaskQueue:
    parameters = TaskParameters(records=records, epochs=epochs, lease_s=lease_s, **more)
    return TaskQueue.create(store, "job", Numbers().spans(), parameters, patience_s=5)


def samples(batches: object) -> list[int]:
    return [int(sample) for batch in batches for sample in batch]  # type: ignore[attr-defined]


def states(queue: TaskQueue) -> dict[str, int]:
    return {state: count.tasks for state, count in queue.status().counts.items()}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_of_every_epoch_comes_once_in_batches_of_one_size(store: TaskStore, num_workers: int) -> None:
    queue = make_queue(store, epochs=3)
    with ElasticDataset(Numbers(), queue, batch_size=4, num_workers=num_workers) as elastic:
        batches = [(elastic.epoch, batch.tolist()) for batch in elastic]
    assert [epoch for epoch, _batch in batches] == [0] * 10 + [1] * 10 + [2] * 10
    assert {len(batch) for _epoch, batch in batches} == {4}
    for number in range(3):
        epoch = [sample for at, batch in batches for sample in batch if at == number]
        assert sorted(epoch) == list(range(40))
        assert epoch != sorted(epoch)
    assert queue.status().finished
    assert elastic.lost == elastic.dropped == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_left_of_an_epoch_is_a_smaller_batch_or_dropped(store: TaskStore, num_workers: int) -> None:
    elastic = ElasticDataset(Numbers(), make_queue(store, epochs=2), batch_size=16, num_workers=num_workers)
    assert [len(batch) for batch in elastic] == [16, 16, 8] * 2
    TaskQueue(store, "job").reset()
    elastic = ElasticDataset(Numbers(), TaskQueue(store, "job"), batch_size=16, num_workers=num_workers, drop_last=True)
    assert [len(batch) for batch in elastic] == [16, 16] * 2
    assert elastic.dropped == 16
    assert TaskQueue(store, "job").status().finished


@promise("A batch of `ElasticDataset` counts when the training comes back for the next")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_counts_when_the_training_comes_back_and_what_was_read_ahead_does_not(
    store: TaskStore, num_workers: int
) -> None:
    queue = make_queue(store)
    elastic = ElasticDataset(Numbers(), queue, batch_size=4, num_workers=num_workers, report_every_s=0)
    batches = iter(elastic)
    used = [next(batches).tolist() for _batch in range(3)]
    reported = sum(task.position for task in store.progress(store.queue("job")))  # type: ignore[arg-type]
    assert reported == 8
    assert "doing" in states(queue)
    batches.close()  # type: ignore[attr-defined]
    assert "doing" not in states(queue)
    rest = samples(ElasticDataset(Numbers(), queue, batch_size=4))
    assert sorted(rest + used[0] + used[1]) == list(range(40))


def test_two_processes_share_the_work_and_wait_for_each_other(store: TaskStore) -> None:
    queue = make_queue(store, epochs=2)
    got: list[tuple[int, int]] = []

    def train() -> None:
        elastic = ElasticDataset(Numbers(), queue, batch_size=5)
        for batch in elastic:
            got.extend((elastic.epoch, sample) for sample in batch.tolist())

    threads = [threading.Thread(target=train) for _process in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(got) == Counter((epoch, sample) for epoch in range(2) for sample in range(40))
    assert queue.status().finished


@promise("With `wait=False` processes that take every step together do not wait for each other")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_processes_that_take_every_step_together_come_through_without_waiting(
    store: TaskStore, num_workers: int
) -> None:
    queue = make_queue(store, records=7, epochs=3)
    together = threading.Barrier(3)
    got: list[tuple[int, int]] = []
    nothing: list[None] = []

    def train() -> None:
        options: dict[str, Any] = {
            "num_workers": num_workers,
            "multiprocessing_context": "fork" if num_workers else None,
        }
        elastic = ElasticDataset(Numbers(), queue, batch_size=2, wait=False, **options)
        batches, ended = iter(elastic), object()
        while True:
            batch = next(batches, ended)
            together.wait(60)
            if isinstance(batch, torch.Tensor):
                got.extend((elastic.epoch, sample) for sample in batch.tolist())
            elif batch is None:
                nothing.append(batch)
            over.append(batch is ended)
            together.wait(60)
            if all(over[-3:]):
                return
            together.wait(60)

    over: list[bool] = []
    threads = [threading.Thread(target=train) for _process in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(got) == Counter((epoch, sample) for epoch in range(3) for sample in range(40))
    assert nothing
    assert queue.status().finished


@promise("Once a queue is reset or restored, what works behind a fence gets nothing more of it")
def test_a_worker_behind_a_fence_ends_when_somebody_begins_again_from_a_checkpoint(store: TaskStore) -> None:
    queue = make_queue(store, records=4)
    text = queue.get_shard_checkpoint()
    fenced = queue.fenced(queue.generation)
    batches = iter(ElasticDataset(Numbers(), fenced, batch_size=4))
    used = [next(batches).tolist(), next(batches).tolist()]
    assert fenced.status().counts["done"].tasks == 1
    queue.restore_shard_from_checkpoint(text)
    with pytest.raises(TasksError, match="was reset or restored"):
        samples(batches)
    with pytest.raises(TasksError, match="was reset or restored"):
        fenced.get_shard_checkpoint()
    assert states(queue) == {"todo": 11} or states(queue) == {}
    again = samples(ElasticDataset(Numbers(), queue.fenced(queue.generation), batch_size=4))
    assert sorted(again) == list(range(40))
    assert set(used[0] + used[1]) < set(again)


@promise("A stopping worker gives back at once what the training is not at")
def test_stopping_gives_back_at_once_what_the_training_is_not_at(store: TaskStore) -> None:
    queue = make_queue(store, records=4)
    elastic = ElasticDataset(Numbers(), queue, batch_size=4, num_workers=2)
    batches = iter(elastic)
    used = next(batches).tolist()
    assert states(queue)["doing"] > 1
    elastic.stop()
    while states(queue)["doing"] > 1:
        pass
    assert list(batches) == []
    assert states(queue) == {"done": 1, "todo": 10}
    rest = samples(ElasticDataset(Numbers(), queue, batch_size=4))
    assert sorted(used + rest) == list(range(40))


def test_a_signal_handler_may_stop_it(store: TaskStore) -> None:
    elastic = ElasticDataset(Numbers(), make_queue(store), batch_size=4)
    before = signal.signal(signal.SIGUSR1, lambda *_signal: elastic.stop())
    try:
        got = []
        for batch in elastic:
            got += batch.tolist()
            os.kill(os.getpid(), signal.SIGUSR1)
        assert len(got) == 4
    finally:
        signal.signal(signal.SIGUSR1, before)


@promise("A stopping worker gives back at once what the training is not at")
@pytest.mark.parametrize("error", [ValueError, StoreUnavailableError, KeyboardInterrupt, ShardError])
def test_after_an_error_of_the_training_all_is_given_back(store: TaskStore, error: type[BaseException]) -> None:
    queue = make_queue(store, shuffle=False)

    def train() -> None:
        with ElasticDataset(Numbers(), queue, batch_size=4, num_workers=2) as elastic:
            for batch in elastic:
                raise error(f"loss of {batch} is NaN")

    with pytest.raises(error):
        train()
    assert states(queue) == {"todo": 8}
    failures = sum(task.failures for task in store.progress(store.queue("job")))  # type: ignore[arg-type]
    assert failures == (1 if error is ShardError else 0)
    assert sorted(samples(ElasticDataset(Numbers(), queue, batch_size=4))) == list(range(40))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_cannot_be_read_fails_its_task_and_in_the_end_is_listed(
    store: TaskStore, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue(store, max_failures=2, shuffle=False)
    with pytest.raises(ShardError, match="sample 13 cannot be read"):
        samples(ElasticDataset(Numbers(broken=13), queue, batch_size=2, num_workers=num_workers))
    elastic = ElasticDataset(
        Numbers(broken=13), queue, batch_size=2, num_workers=num_workers, on_error="skip", report_every_s=0
    )
    samples(elastic)
    assert queue.status().finished
    assert "1 task(s) failed" in caplog.text
    (failed,) = queue.status().failed
    assert failed.name == "a"
    assert failed.failures == 2
    assert failed.errors[-1].startswith("ShardError: ")
    assert "sample 13 cannot be read" in failed.errors[-1]
    queue.retry()
    assert samples(ElasticDataset(Numbers(), queue, batch_size=2)) == [12, 13, 14, 15, 16, 17]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "error", [StoreUnavailableError, StoreAccessError, CatalogUnavailableError, DaemonUnavailableError]
)
def test_an_outage_is_raised_and_no_failure_of_the_tasks(
    store: TaskStore, error: type[Exception], num_workers: int
) -> None:
    queue = make_queue(store, max_failures=1, shuffle=False)
    numbers = Numbers(broken=13, error=error)
    with pytest.raises(error, match="sample 13"):
        samples(ElasticDataset(numbers, queue, batch_size=2, num_workers=num_workers, on_error="skip"))
    assert states(queue) == {"done": 2, "todo": 6}
    assert sum(task.failures for task in store.progress(store.queue("job"))) == 0  # type: ignore[arg-type]
    assert sorted(samples(ElasticDataset(Numbers(), queue, batch_size=2))) == list(range(12, 40))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_that_is_not_of_a_sample_is_raised_whatever_on_error_says(store: TaskStore, num_workers: int) -> None:
    queue = make_queue(store, max_failures=1, shuffle=False)
    numbers = Numbers(broken=13, error=OSError)
    with pytest.raises(OSError, match="sample 13"):
        samples(ElasticDataset(numbers, queue, batch_size=2, num_workers=num_workers, on_error="skip"))
    assert [task.number for task in queue.status().failed] == [2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_annotation_is_skipped_in_workers_too(store: TaskStore, num_workers: int) -> None:
    queue = make_queue(store, max_failures=1, shuffle=False)
    numbers = Numbers(broken=13, error=AnnotationError)
    samples(ElasticDataset(numbers, queue, batch_size=2, num_workers=num_workers, on_error="skip"))
    assert [task.number for task in queue.status().failed] == [2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_records_left_out_behind_a_batch_that_cannot_be_read_are_done_with(store: TaskStore, num_workers: int) -> None:
    queue = make_queue(store, records=20, max_failures=1, shuffle=False)
    elastic = ElasticDataset(
        Numbers(broken=16), queue, batch_size=16, num_workers=num_workers, on_error="skip", drop_last=True
    )
    assert [len(batch) for batch in elastic] == [16]
    assert [task.number for task in queue.status().failed] == [0, 1]
    assert states(queue) == {"done": 1, "failed": 2}


def test_records_left_out_at_the_end_are_not_reported_before_those_in_front_of_them_are_used(store: TaskStore) -> None:
    queue = make_queue(store, records=20)
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 4, "report_every_s": 0}
    elastic = ElasticDataset(Numbers(), queue, batch_size=16, drop_last=True, **options)
    batches = iter(elastic)
    next(batches)
    assert elastic.dropped == 8  # the worker is ahead
    batches.close()  # type: ignore[attr-defined]
    assert sorted(samples(ElasticDataset(Numbers(), queue, batch_size=16))) == list(range(40))


def test_what_was_used_and_not_reported_yet_is_reported_when_the_rest_is_given_back(store: TaskStore) -> None:
    queue = make_queue(store, records=20)
    batches = iter(ElasticDataset(Numbers(), queue, batch_size=4, report_every_s=3600))
    used = [next(batches).tolist() for _batch in range(3)]
    batches.close()  # type: ignore[attr-defined]
    assert sorted(samples(ElasticDataset(Numbers(), queue, batch_size=4)) + used[0] + used[1]) == list(range(40))


def test_a_task_that_failed_goes_on_behind_what_was_used_of_it(store: TaskStore) -> None:
    queue = make_queue(store, records=20, shuffle=False)
    elastic = ElasticDataset(Numbers(broken=13), queue, batch_size=2, report_every_s=3600)
    with pytest.raises(ShardError):
        samples(elastic)
    assert sorted(samples(ElasticDataset(Numbers(), queue, batch_size=2))) == list(range(12, 40))


def test_a_loop_that_was_left_goes_on_in_the_same_with(store: TaskStore) -> None:
    queue = make_queue(store, records=4)
    with ElasticDataset(Numbers(), queue, batch_size=4, num_workers=2) as elastic:
        used = next(iter(elastic)).tolist()
        used += samples(elastic)
    assert sorted(used) == list(range(40))
    assert queue.status().finished


class Skipping(Numbers):
    """Leaves samples out of batches, as our datasets do."""

    def __getitems__(self, wanted: list[int]) -> list[int]:
        found = [sample for sample in wanted if not 8 <= sample < 20]
        return found or EmptyBatch(0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_which_all_samples_were_left_out_do_not_come_and_count_as_used(
    store: TaskStore, num_workers: int
) -> None:
    queue = make_queue(store, records=4, shuffle=False)
    with ElasticDataset(Skipping(), queue, batch_size=4, num_workers=num_workers, collate_fn=torch.tensor) as elastic:
        assert [len(batch) for batch in elastic] == [4] * 7
    assert queue.status().finished
    assert states(queue) == {"done": 11}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_rest_of_a_task_whose_lease_was_lost_is_left_out(store: TaskStore, num_workers: int) -> None:
    assert isinstance(store, SqliteTasks)
    queue = make_queue(store, records=20, shuffle=False)
    elastic = ElasticDataset(Numbers(), queue, batch_size=4, num_workers=num_workers, report_every_s=0)
    batches = iter(elastic)
    got = [next(batches).tolist(), next(batches).tolist()]
    with store._catalog.writing(durable=False) as connection:
        connection.execute("UPDATE tasks SET until_s = 0 WHERE number = 0")
    other = fetch(queue, "other")
    assert (other.number, other.position) == (0, 4)
    queue.report_done(other)
    rest = samples(batches)
    assert elastic.lost == 1
    assert [number for batch in got for number in batch] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert set(rest) & set(range(8, 20)) == set()
    assert sorted(rest) == list(range(20, 40))
    assert queue.status().finished


def test_leases_are_renewed_while_the_training_takes_its_time(store: TaskStore) -> None:
    queue = make_queue(store, lease_s=0.3)
    elastic = ElasticDataset(Numbers(), queue, batch_size=4)
    batches = iter(elastic)
    first = next(batches).tolist()
    taken = []
    while True:
        found = queue.try_fetch("other")
        if not hasattr(found, "lease"):
            break
        taken.append(found)
        queue.report_done(found)
    for _look in range(20):
        assert not hasattr(queue.try_fetch("other"), "lease")
        threading.Event().wait(0.05)
    assert elastic.lost == 0
    got = first + samples(batches)
    assert len(got) + sum(task.count for task in taken) == 40


def lease_ends(store: SqliteTasks) -> list[float]:
    with store._catalog.reading() as connection:
        return [until for (until,) in connection.execute("SELECT until_s FROM tasks WHERE state = 'doing'")]


def test_leases_are_renewed_again_after_any_error_of_the_database(
    store: TaskStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(store, SqliteTasks)
    queue = make_queue(store, lease_s=0.6)
    elastic = ElasticDataset(Numbers(), queue, batch_size=4)
    batches = iter(elastic)
    first = next(batches).tolist()
    with store._catalog.writing(durable=False) as connection:
        connection.execute("CREATE TRIGGER full BEFORE UPDATE ON tasks BEGIN SELECT RAISE(ABORT, 'no room'); END")
    while "no room" not in caplog.text:
        threading.Event().wait(0.01)
    with store._catalog.writing(durable=False) as connection:
        connection.execute("DROP TRIGGER full")
    ends = lease_ends(store)
    while lease_ends(store) == ends:
        threading.Event().wait(0.01)
    assert sorted(first + samples(batches)) == list(range(40))
    assert elastic.lost == 0


def test_a_checkpoint_in_the_loop_counts_the_batch_at_hand(store: TaskStore) -> None:
    queue = make_queue(store)
    elastic = ElasticDataset(Numbers(), queue, batch_size=4, num_workers=2, report_every_s=3600)
    used: list[int] = []
    for batch in elastic:
        used += batch.tolist()
        if len(used) == 12:
            text = elastic.checkpoint()
            break
    samples(ElasticDataset(Numbers(), queue, batch_size=4))
    queue.restore_shard_from_checkpoint(text)
    assert sorted(used + samples(ElasticDataset(Numbers(), queue, batch_size=4))) == list(range(40))


def test_a_queue_of_another_data_set_is_refused(store: TaskStore) -> None:
    class Others(Numbers):
        def spans(self) -> list[Span]:
            return [Span("a", 0, 40)]

    queue = make_queue(store)
    with pytest.raises(TasksError, match="another data set"):
        next(iter(ElasticDataset(Others(), queue, batch_size=4)))
    with pytest.raises(TasksError, match="no task queue"):
        next(iter(ElasticDataset(Numbers(), TaskQueue(store, "nothing"), batch_size=4)))


class InWorker(IterableDataset[torch.Tensor]):
    def __init__(self, elastic: ElasticDataset) -> None:
        self.elastic = elastic

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.elastic)


def test_it_is_refused_in_a_worker_of_a_data_loader(store: TaskStore) -> None:
    queue = make_queue(store)
    inside = InWorker(ElasticDataset(Numbers(), queue, batch_size=4))
    with pytest.raises(UsageError, match="in a worker of a DataLoader"):
        next(iter(DataLoader(inside, batch_size=None, num_workers=1)))
    assert len(next(iter(DataLoader(inside, batch_size=None)))) == 4


def test_two_iterations_at_once_are_refused(store: TaskStore) -> None:
    elastic = ElasticDataset(Numbers(), make_queue(store), batch_size=4)
    first = iter(elastic)
    next(first)
    with pytest.raises(UsageError, match="already"):
        next(iter(elastic))


def test_a_queue_that_is_reset_to_another_data_set_meanwhile_is_refused_and_keeps_no_lease(store: TaskStore) -> None:
    elastic = ElasticDataset(Numbers(), make_queue(store, records=4), batch_size=4)
    batches = iter(elastic)
    next(batches)
    queue = TaskQueue.create(store, "job", [Span("z", 0, 40)], TaskParameters(records=40, lease_s=3600), reset=True)
    with pytest.raises(TasksError, match="was reset to another data set"):
        samples(batches)
    assert states(queue) == {"todo": 1}


def test_a_child_of_the_training_gives_none_of_its_leases_back(store: TaskStore) -> None:
    queue = make_queue(store, records=4)
    elastic = ElasticDataset(Numbers(), queue, batch_size=4, num_workers=1)
    batches = iter(elastic)
    first = next(batches).tolist()
    held = states(queue)["doing"]
    child = multiprocessing.get_context("fork").Process(target=elastic.close)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert states(queue)["doing"] == held
    assert sorted(first + samples(batches)) == list(range(40))
    assert elastic.lost == 0


def test_leases_are_renewed_in_a_second_iteration_too(store: TaskStore) -> None:
    assert isinstance(store, SqliteTasks)
    elastic = ElasticDataset(Numbers(), make_queue(store, lease_s=0.3), batch_size=4)
    used = next(iter(elastic)).tolist()  # the loop was left, so its leases are given back
    assert lease_ends(store) == []
    batches = iter(elastic)
    used += next(batches).tolist()
    ends = lease_ends(store)
    while lease_ends(store) == ends:
        threading.Event().wait(0.01)
    used += samples(batches)
    assert set(used) == set(range(40))


def test_no_lease_is_given_back_while_another_thread_renews_it(
    store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, release = store.report, store.release
    renewing, given_back = threading.Event(), threading.Event()
    given_back_meanwhile: list[bool] = []
    under_way: list[object] = []

    def slow_report(*about: Any, **more: Any) -> None:
        if threading.current_thread().name == "task-leases":
            under_way.append(about)
            renewing.set()
            given_back.wait(0.3)
            under_way.clear()
        report(*about, **more)

    def noted_release(*about: Any) -> None:
        given_back_meanwhile.append(bool(under_way))
        given_back.set()
        release(*about)

    monkeypatch.setattr(store, "report", slow_report)
    monkeypatch.setattr(store, "release", noted_release)
    batches = iter(ElasticDataset(Numbers(), make_queue(store, lease_s=3.0), batch_size=4))
    next(batches)
    assert renewing.wait(30)
    batches.close()  # type: ignore[attr-defined]
    assert given_back_meanwhile
    assert not any(given_back_meanwhile)


# --- our datasets -----------------------------------------------------------------------------------------------------


def test_shards_and_snapshots_are_trained_on(faces_ref: str, settings: Settings, tmp_path: Path) -> None:
    api.shard(faces_ref, to=str(tmp_path / "shards"), max_size_bytes=40_000, settings=settings)
    for number, (where, dataset) in enumerate(
        [
            (str(tmp_path / "shards"), ShardDataset(tmp_path / "shards", target="path", decode="rgb")),
            (faces_ref, SnapshotDataset(faces_ref, target="path", decode="rgb")),
        ]
    ):
        queue = api.create_tasks(f"job{number}", where, records=5, epochs=2, settings=settings)
        assert api.create_tasks(f"job{number}", dataset, records=5, epochs=2).name == queue.name
        seen: Counter[tuple[int, str]] = Counter()
        with ElasticDataset(dataset, api.open_tasks(f"job{number}"), batch_size=4, num_workers=2) as elastic:
            for images, paths in elastic:
                assert len(images) == len(paths)
                seen.update((elastic.epoch, path) for path in paths)
        assert len(seen) == 2 * len(dataset)
        assert set(seen.values()) == {1}
        assert queue.status().finished


# --- killed -----------------------------------------------------------------------------------------------------------


def _train(url: str, log: Path) -> None:
    queue = TaskQueue(open_task_store(url), "job")
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    with ElasticDataset(Numbers(), queue, batch_size=3, num_workers=1, report_every_s=0) as elastic:
        for batch in elastic:
            used = [[elastic.epoch, sample] for sample in batch.tolist()]
            os.write(descriptor, f"{json.dumps(used)}\n".encode())
            os.fsync(descriptor)


@pytest.mark.slow
def test_trainings_that_are_killed_and_started_again_use_every_sample(tmp_path: Path, store: TaskStore) -> None:
    epochs = 6
    queue = make_queue(store, records=4, epochs=epochs, lease_s=0.5)
    chance = random.Random(3)
    fork = multiprocessing.get_context("fork")
    logs = (tmp_path / f"{number}.log" for number in count())
    url = f"sqlite:///{tmp_path}/home/catalog.db"

    def start() -> Any:
        process = fork.Process(target=_train, args=(url, next(logs)))
        process.start()
        return process

    running = [start() for _process in range(3)]
    kills = 0
    while any(process.is_alive() for process in running):
        running[0].join(chance.uniform(0.1, 0.4))
        if kills < 8:
            victim = running.pop(chance.randrange(3))
            victim.kill()
            victim.join()
            kills += 1
            running.append(start())
    assert {process.exitcode for process in running} == {0}
    lines = [json.loads(line) for log in tmp_path.glob("*.log") for line in log.read_text().splitlines()]
    used = Counter((epoch, sample) for line in lines for epoch, sample in line)
    assert set(used) == {(epoch, sample) for epoch in range(epochs) for sample in range(40)}
    assert max(used.values()) <= 1 + kills
    assert sum(used.values()) - len(used) <= kills * 9  # of a killed one, what of its tasks was not reported
    assert queue.status().finished
