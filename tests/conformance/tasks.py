"""Test what every storage of task queues promises: subclass `TasksConformance`, give it a `tasks_url` fixture and
say how a lease is made to expire.

    class TestMyTasks(TasksConformance):
        @pytest.fixture
        def tasks_url(self) -> str: ...                       # of an empty catalog, a new one each time
        def expire(self, store, lease) -> None: ...           # as if the lease had been given long ago
        def set_clock_back(self, store, lease) -> None: ...   # as if the clock had been ahead when it was given

Used by this project's tests and by whoever writes another storage. Needs pytest.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from datacache.catalog.open import open_task_store
from datacache.catalog.tasks.base import Leased, NewTask, StepCount, TaskStore
from datacache.core.errors import LeaseLostError, TasksError, UsageError
from datacache.loaders.tasks.images import MarkingQueue, QueuedImage, QueueProgress, list_marking_queues
from datacache.loaders.tasks.queue import Span, Task, TaskParameters, TaskQueue, Wait
from tests.conformance.catalog import run_together
from tests.conformance.elastic_job import check, run_job
from tests.promises import promise

_fork = multiprocessing.get_context("fork")

SPANS = (Span("a", 0, 10), Span("b", 10, 4), Span("c", 14, 1))
"""Fifteen records; in tasks of four: a 0-3, a 4-7, a 8-9, b 0-3, c 0."""


def make_queue(store: TaskStore, name: str = "job", spans: Sequence[Span] = SPANS, **parameters: Any) -> TaskQueue:
    """A queue with tasks of four records in the order of their numbers, and leases that do not expire on their own."""
    defaults: dict[str, Any] = {"records": 4, "shuffle": False, "lease_s": 3600.0}
    return TaskQueue.create(store, name, spans, TaskParameters(**defaults | parameters), patience_s=5.0)


def fetch(queue: TaskQueue, worker: str = "w") -> Task:
    """A task that must be there at once."""
    task = queue.try_fetch(worker)
    assert isinstance(task, Task), task
    return task


def use_all(queue: TaskQueue, worker: str = "w") -> list[tuple[int, str, int]]:
    """Take and do tasks until the end; (epoch, span, record) in the order they were used in."""
    used = []
    while (task := queue.fetch_shard(worker)) is not None:
        used += [(task.epoch, task.name, int(record)) for record in task.left()]
        queue.report_done(task)
    return used


def image(queue: MarkingQueue, user: str, *, review: bool = False) -> QueuedImage:
    """An image that must be there at once."""
    given = queue.next_image(user, review=review)
    assert isinstance(given, QueuedImage), given
    return given


def records(epochs: Sequence[int] = (0,), spans: Sequence[Span] = SPANS) -> Counter[tuple[int, str, int]]:
    """Every record of the epochs once."""
    return Counter((epoch, span.name, record) for epoch in epochs for span in spans for record in range(span.count))


class TasksConformance:
    """The suite. Each test gets `store`, opened at `tasks_url`, and `open_again` for a second one."""

    @pytest.fixture
    def tasks_url(self) -> str:
        """Address of an empty catalog that nobody else uses."""
        raise NotImplementedError

    def expire(self, store: TaskStore, lease: Leased) -> None:
        """Have the lease end now, by the clock of the database."""
        raise NotImplementedError

    def set_clock_back(self, store: TaskStore, lease: Leased) -> None:
        """Have the lease end two hours later: as if the database's clock had been two hours ahead when it was given."""
        raise NotImplementedError

    @pytest.fixture
    def open_again(self, tasks_url: str) -> Iterator[Callable[[], TaskStore]]:
        """Opens the same storage once more, as another process would."""
        with contextlib.ExitStack() as stack:

            def opened() -> TaskStore:
                store = open_task_store(tasks_url)
                stack.callback(store.close)
                return store

            yield opened

    @pytest.fixture
    def store(self, open_again: Callable[[], TaskStore]) -> TaskStore:
        """The storage under test."""
        return open_again()

    # --- queues ---------------------------------------------------------------------------------------------

    def test_an_empty_catalog_has_no_queue(self, store: TaskStore) -> None:
        assert store.queues() == []
        assert not TaskQueue(store, "job").exists()
        assert not TaskQueue(store, "job").remove()
        with pytest.raises(TasksError, match="no task queue job"):
            TaskQueue(store, "job").fetch_shard()

    @promise("Making a queue again gives the one that is there")
    def test_creating_a_queue_again_gives_the_same_and_other_parameters_are_refused(self, store: TaskStore) -> None:
        queue = make_queue(store)
        queue.report_done(fetch(queue))
        assert make_queue(store, dataset="another name of the same").status().counts["done"].tasks == 1
        for other in ({"records": 5}, {"epochs": 2}, {"seed": 1}, {"spans": SPANS[:2]}):
            with pytest.raises(TasksError, match="with other"):
                make_queue(store, **other)
        assert queue.status().counts["done"].tasks == 1

    def test_a_queue_that_is_reset_by_its_creator_begins_anew_with_its_parameters(self, store: TaskStore) -> None:
        old = fetch(make_queue(store))
        queue = TaskQueue.create(store, "job", SPANS[1:], TaskParameters(records=2, shuffle=False), reset=True)
        with pytest.raises(LeaseLostError, match="reset"):
            queue.report_done(old)
        assert Counter(use_all(queue)) == records(spans=SPANS[1:])

    def test_two_queues_do_not_meet(self, store: TaskStore) -> None:
        one, two = make_queue(store, "one"), make_queue(store, "two", epochs=2)
        assert Counter(use_all(one)) == records()
        held = fetch(two)
        assert one.remove()
        two.report_done(held)
        assert Counter(use_all(two)) + Counter((0, "a", record) for record in range(4)) == records([0, 1])
        assert [queue.name for queue in store.queues()] == ["two"]

    def test_a_removed_queue_is_gone_and_one_of_its_name_is_another(self, store: TaskStore) -> None:
        queue = make_queue(store)
        task = fetch(queue)
        assert queue.remove()
        for report in (queue.report_done, queue.renew, queue.release):
            with pytest.raises(LeaseLostError):
                report(task)
        make_queue(store)
        with pytest.raises(LeaseLostError, match="removed"):
            queue.report_batch_done(task, 1)
        assert Counter(use_all(queue)) == records()

    # --- epochs ---------------------------------------------------------------------------------------------

    @promise("Without losses every record comes once in an epoch")
    def test_every_epoch_has_every_record_once_and_they_come_one_after_the_other(self, store: TaskStore) -> None:
        used = use_all(make_queue(store, epochs=3))
        assert Counter(used) == records([0, 1, 2])
        assert [epoch for epoch, *_ in used] == sorted(epoch for epoch, *_ in used)
        assert used[:15] == sorted(used[:15])

    @promise("The order of tasks is the same on every machine and in both databases")
    def test_a_shuffled_queue_has_another_order_in_every_epoch_and_the_same_for_everybody(
        self, store: TaskStore
    ) -> None:
        used = use_all(make_queue(store, "one", epochs=2, shuffle=True, seed=7))
        assert used == use_all(make_queue(store, "two", epochs=2, shuffle=True, seed=7))
        assert used != use_all(make_queue(store, "three", epochs=2, shuffle=True, seed=8))
        assert Counter(used) == records([0, 1])
        first, second = ([record for epoch, *record in used if epoch == number] for number in (0, 1))
        assert first != second

    def test_an_epoch_begins_when_all_tasks_of_the_one_before_are_done(self, store: TaskStore) -> None:
        queue = make_queue(store, epochs=2)
        held = [fetch(queue) for _task in range(5)]
        assert isinstance(queue.try_fetch("other"), Wait)
        for task in held[1:]:
            queue.report_done(task)
        assert isinstance(queue.try_fetch("other"), Wait)
        queue.report_done(held[0])
        assert fetch(queue).epoch == 1

    def test_the_end_is_told_from_nothing_now(self, store: TaskStore) -> None:
        queue = make_queue(store)
        held = [fetch(queue) for _task in range(5)]
        found = queue.try_fetch("other")
        assert isinstance(found, Wait)
        assert 0 < found.seconds <= 1
        assert not queue.status().finished
        for task in held:
            queue.report_done(task)
        assert queue.try_fetch("other") is None
        assert queue.fetch_shard() is None
        assert queue.status().finished

    def test_a_worker_that_waits_can_be_stopped(self, store: TaskStore) -> None:
        queue = make_queue(store, spans=[Span("a", 0, 1)])
        fetch(queue)
        stop = threading.Event()
        threading.Timer(0.1, stop.set).start()
        assert queue.fetch_shard("other", stop=stop) is None

    # --- leases ---------------------------------------------------------------------------------------------

    @promise("A task that changes hands goes on where the last accepted report ended")
    def test_a_task_that_was_leased_again_goes_on_where_the_last_report_ended(self, store: TaskStore) -> None:
        queue = make_queue(store)
        first = fetch(queue, "first")
        assert queue.report_batch_done(first, 3) is False
        self.expire(store, first.lease)
        second = fetch(queue, "second")
        assert (second.number, second.token) == (first.number, first.token + 1)
        assert second.left().tolist() == [3]
        assert queue.report_batch_done(second, 1) is True

    @promise("A late report is refused and changes nothing, unless it is in nobody's way")
    def test_whatever_a_lost_lease_reports_is_refused_and_changes_nothing(self, store: TaskStore) -> None:
        queue = make_queue(store)
        zombie = fetch(queue, "first")
        self.expire(store, zombie.lease)
        second = fetch(queue, "second")
        queue.report_batch_done(second, 1)
        before = queue.status()
        for report in (
            lambda: queue.report_batch_done(zombie, 4),
            lambda: queue.report_done(zombie),
            lambda: queue.report_failed(zombie, "x"),
            lambda: queue.renew(zombie),
            lambda: queue.release(zombie),
        ):
            with pytest.raises(LeaseLostError, match="to second") as caught:
                report()
            assert caught.value.task == zombie.number
        assert zombie.position == 0
        after = queue.status()
        assert after.counts == before.counts
        assert [task._replace(held_s=0, left_s=0) for task in after.doing] == [
            task._replace(held_s=0, left_s=0) for task in before.doing
        ]
        assert queue.report_batch_done(second, 3)
        with pytest.raises(LeaseLostError):
            queue.report_done(zombie)

    @promise("A late report is refused and changes nothing, unless it is in nobody's way")
    def test_a_lease_that_expired_counts_for_as_long_as_nobody_took_the_task(self, store: TaskStore) -> None:
        queue = make_queue(store)
        task = fetch(queue)
        self.expire(store, task.lease)
        assert queue.status().doing[0].left_s <= 0
        queue.report_batch_done(task, 1)
        assert queue.status().doing[0].left_s > 3000
        other = fetch(queue)
        assert other.number != task.number
        queue.report_done(task)

    def test_a_clock_that_was_set_back_keeps_no_lease_of_a_dead_worker(self, store: TaskStore) -> None:
        queue = make_queue(store)
        dead, alive = fetch(queue, "dead"), fetch(queue, "alive")
        self.set_clock_back(store, dead.lease)
        self.set_clock_back(store, alive.lease)
        queue.renew(alive)
        again = fetch(queue)
        assert (again.number, again.token) == (dead.number, dead.token + 1)
        with pytest.raises(LeaseLostError):
            queue.renew(dead)
        assert fetch(queue).number not in (dead.number, alive.number)
        queue.report_done(alive)

    def test_a_renewed_lease_holds_on(self, store: TaskStore) -> None:
        queue = make_queue(store)
        task = fetch(queue)
        self.expire(store, task.lease)
        queue.renew(task)
        assert fetch(queue).number != task.number
        assert task.position == 0

    def test_a_worker_that_is_gone_is_noticed_by_the_clock(self, store: TaskStore) -> None:
        queue = make_queue(store, lease_s=0.2)
        for _task in range(5):
            fetch(queue, "dead")
        assert Counter(use_all(queue)) == records()

    def test_a_task_given_back_is_there_for_others_at_once(self, store: TaskStore) -> None:
        queue = make_queue(store)
        task = fetch(queue)
        queue.report_batch_done(task, 1)
        queue.release(task)
        queue.release(task)
        with pytest.raises(LeaseLostError, match="given back"):
            queue.report_batch_done(task, 1)
        again = fetch(queue)
        assert (again.number, again.position, again.token) == (task.number, 1, task.token + 1)
        assert not queue.status().doing[0].errors

    def test_reports_beyond_a_task_make_no_sense(self, store: TaskStore) -> None:
        queue = make_queue(store)
        task = fetch(queue)
        for wrong in (5, -1):
            with pytest.raises(UsageError):
                queue.report_batch_done(task, wrong)

    def test_every_call_of_a_storage_can_be_made_again(self, store: TaskStore) -> None:
        make_queue(store, epochs=2)
        queue = store.queue("job")
        assert queue is not None
        TaskQueue(store, "job").status()
        first = fetch(TaskQueue(store, "job"))
        queue = store.queue("job")
        assert queue is not None
        lease = store.lease(queue, "w", "claim", lease_s=3600, max_lost=3)
        assert lease is not None
        assert store.lease(queue, "w", "claim", lease_s=3600, max_lost=3) == lease
        for _again in range(2):
            store.report(lease, 2, lease_s=3600)
        for _again in range(2):
            store.fail(lease, "why", max_failures=9)
        (task,) = [task for task in store.progress(queue) if task.number == lease.number]
        assert (task.state, task.position, task.failures, task.errors) == ("todo", 2, 1, ("why",))
        for _again in range(2):
            store.report(first.lease, 4, lease_s=3600)
        use_all(TaskQueue(store, "job"))
        store.begin_epoch(queue)
        store.make(queue, "claim", list)
        assert TaskQueue(store, "job").status().finished

    def test_tasks_can_be_added_once_and_dropped_and_other_generations_get_none(self, store: TaskStore) -> None:
        made = store.create("work", 7, "{}", b"")
        assert store.make(made, "claim", list)
        queue = store.queue("work")
        assert queue is not None
        new = [NewTask(0, number, place, "n", 0, 1) for place, number in enumerate((2**61 + 5, 1, 9))]
        for _again in range(2):
            store.add(queue, new)
        first = store.lease(queue, "w", "a", lease_s=3600, max_lost=3)
        assert first is not None
        assert first.number == 2**61 + 5
        store.report(first, 1, lease_s=3600)
        store.add(queue, new)
        assert [task.number for task in store.tasks(queue, "done")] == [first.number]
        second = store.lease(queue, "w", "b", lease_s=3600, max_lost=3)
        assert second is not None
        store.drop(queue, [second.number, first.number, 12345])
        with pytest.raises(LeaseLostError):
            store.report(second, 1, lease_s=3600)
        assert [task.number for task in store.progress(queue)] == [9]
        store.add(queue._replace(generation=8), new)
        assert store.remove("work")
        store.add(queue, new)
        assert store.progress(queue) == []

    # --- failures -------------------------------------------------------------------------------------------

    @promise("A task that cannot be done, or at which workers die, is listed with its errors until it is put back")
    def test_a_task_that_fails_is_tried_after_all_others_and_then_listed_with_its_errors(
        self, store: TaskStore
    ) -> None:
        queue = make_queue(store, max_failures=2, epochs=2)
        bad = fetch(queue, "one")
        queue.report_batch_done(bad, 1)
        queue.report_failed(bad, "first $error")
        with pytest.raises(LeaseLostError):
            queue.report_done(bad)
        for _task in range(4):
            task = fetch(queue)
            assert task.number != bad.number
            queue.report_done(task)
        again = fetch(queue, "two")
        assert (again.number, again.position) == (bad.number, 1)
        queue.report_failed(again, "second")
        used = use_all(queue)
        assert Counter(used) == records([1])
        (failed,) = queue.status().failed
        assert (failed.epoch, failed.number, failed.position) == (0, bad.number, 1)
        assert failed.errors == ("first $error", "second")
        assert failed.owner == "two"

    @promise("A task that cannot be done, or at which workers die, is listed with its errors until it is put back")
    def test_failed_tasks_can_be_put_back_even_when_all_is_over(self, store: TaskStore) -> None:
        queue = make_queue(store, max_failures=1, epochs=2)
        for _task in range(2):
            queue.report_failed(fetch(queue), "x")
        done = use_all(queue)
        assert queue.status().finished
        assert len(queue.status().failed) == 2
        assert queue.retry(0) == 1
        assert queue.retry() == 1
        assert queue.retry() == 0
        again = use_all(queue)
        assert {epoch for epoch, *_ in again} == {0}
        assert Counter(done) + Counter(again) == records([0, 1])
        assert queue.status().failed == []

    @promise("A task that cannot be done, or at which workers die, is listed with its errors until it is put back")
    def test_a_task_whose_workers_die_again_and_again_is_failed_and_one_that_gets_on_is_not(
        self, store: TaskStore
    ) -> None:
        queue = make_queue(store, max_lost=3, spans=[Span("a", 0, 8)])
        for number in range(4):
            poison, good = fetch(queue, f"$victim{number}"), fetch(queue)
            assert (poison.number, good.number) == (0, 1)
            assert good.position == number
            if number < 2:
                self.expire(store, poison.lease)
            if number < 3:
                queue.report_batch_done(good, 1)
                self.expire(store, good.lease)
            else:
                queue.report_done(good)
            if number == 2:
                self.expire(store, poison.lease)
                break
        # The poisoned task has lost its third lease; the other one as many, but with progress in between.
        task = fetch(queue)
        assert task.number == 1
        queue.report_done(task)
        assert queue.try_fetch("w") is None
        (failed,) = queue.status().failed
        assert (failed.number, failed.lost) == (0, 3)
        assert "$victim2 expired" in failed.errors[-1]
        with pytest.raises(LeaseLostError):
            queue.report_done(poison)

    # --- checkpoints ----------------------------------------------------------------------------------------

    @promise("A checkpoint brings back what was done and voids leases given since")
    def test_a_checkpoint_brings_back_what_was_done_and_voids_all_leases(self, store: TaskStore) -> None:
        queue = make_queue(store, epochs=3, max_failures=1)
        queue.report_failed(fetch(queue), "in the first epoch")
        while (task := fetch(queue)).epoch == 0:
            queue.report_done(task)
        queue.report_done(task)
        half = fetch(queue)
        queue.report_batch_done(half, 3)
        queue.report_failed(fetch(queue), "in the second epoch")
        text = queue.get_shard_checkpoint()
        queue.report_done(half)
        later = fetch(queue)
        queue.restore_shard_from_checkpoint(text)
        with pytest.raises(LeaseLostError, match="restored"):
            queue.report_done(later)
        assert queue.get_shard_checkpoint().split('"failed"')[0] == text.split('"failed"')[0]
        (failed,) = queue.status().failed
        assert (failed.epoch, failed.errors) == (0, ("in the first epoch",))
        done = {(1, task.name, record) for record in range(task.start, task.start + task.count)}
        used = {(1, half.name, record) for record in range(half.start, half.start + 3)}
        assert Counter(use_all(queue)) + Counter(done | used) == records([1, 2])

    def test_tasks_of_earlier_epochs_that_were_put_back_are_in_a_checkpoint(self, store: TaskStore) -> None:
        queue = make_queue(store, epochs=3, max_failures=1)
        for _task in range(3):
            queue.report_failed(fetch(queue), "x")
        while (task := fetch(queue)).epoch == 0:
            queue.report_done(task)
        queue.release(task)
        assert queue.retry(0) == queue.retry(1) == 1
        held = fetch(queue)
        assert (held.epoch, held.number) == (0, 0)
        queue.report_batch_done(held, 3)
        text = queue.get_shard_checkpoint()
        queue.report_done(held)
        use_all(queue)
        for _time in range(2):
            queue.restore_shard_from_checkpoint(text)
            text = queue.get_shard_checkpoint()
        assert [(failed.epoch, failed.number) for failed in queue.status().failed] == [(0, 2)]
        again = use_all(queue)
        assert Counter(again) == records([1, 2]) + Counter((0, "a", record) for record in (3, 4, 5, 6, 7))
        assert again[0] == (0, "a", 3)

    def test_what_is_left_of_long_errors_can_be_saved_and_restored(self, store: TaskStore) -> None:
        queue = make_queue(store, records=1, epochs=2, spans=[Span("a", 0, 3)], max_failures=4)
        for number in range(3 * 4):
            queue.report_failed(fetch(queue), f"{number}" * 2000)
        fetch(queue)
        text = queue.get_shard_checkpoint()
        assert len(text) < 3 * 2500
        queue.restore_shard_from_checkpoint(text)
        queue.release(fetch(queue))
        assert [len(failed.errors) for failed in queue.status().failed] == [1] * 3

    def test_a_checkpoint_of_the_beginning_and_of_the_end_is_one_too(self, store: TaskStore) -> None:
        queue = make_queue(store)
        begin = queue.get_shard_checkpoint()
        use_all(queue)
        end = queue.get_shard_checkpoint()
        queue.restore_shard_from_checkpoint(end)
        assert queue.fetch_shard() is None
        queue.restore_shard_from_checkpoint(begin)
        assert Counter(use_all(queue)) == records()

    def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(self, store: TaskStore) -> None:
        queue = make_queue(store)
        held = fetch(queue)
        other = make_queue(store, "other", spans=SPANS[:2]).get_shard_checkpoint()
        whole = queue.get_shard_checkpoint()
        parts = json.loads(whole)
        failed = {"epoch": 0, "number": 0, "position": 0, "errors": []}
        for wrong in (
            {"epoch": True},
            {"epoch": -1},
            {"epoch": "0"},
            {"positions": {"0": "1"}},
            {"positions": {"0": -1}},
            {"positions": {"0": 5}},
            {"positions": {"5": 1}},
            {"positions": {" 1": 1}},
            {"positions": [1]},
            {"failed": [{"epoch": 0, "number": 0}]},
            {"failed": [failed | {"number": 5}]},
            {"failed": [failed | {"number": 1.0}]},
            {"failed": [failed | {"position": 5}]},
            {"failed": [failed | {"errors": [1]}]},
            {"failed": [failed, failed]},
            {"failed": [failed], "put_back": [failed]},
            {"put_back": {}, "failed": 1},
            {"done": ""},
        ):
            with pytest.raises(TasksError, match="checkpoint"):
                queue.restore_shard_from_checkpoint(json.dumps(parts | wrong))
        for text in ("", "[]", "{}", whole[:-9], whole.replace('"done":"', '"done":"AA'), other, whole.replace(
            '"version":1', '"version":2'
        )):  # fmt: skip
            with pytest.raises(TasksError, match="checkpoint"):
                queue.restore_shard_from_checkpoint(text)
        queue.report_done(held)

    def test_a_reset_begins_the_epoch_or_everything_anew(self, store: TaskStore) -> None:
        queue = make_queue(store, epochs=3)
        for _task in range(7):
            held = fetch(queue)
            if not queue.report_batch_done(held, 1):
                queue.report_done(held)
        queue.reset(epoch_only=True)
        assert queue.status().epoch == 1
        with pytest.raises(LeaseLostError):
            queue.renew(held)
        assert fetch(queue).epoch == 1
        queue.reset()
        assert Counter(use_all(queue)) == records([0, 1, 2])

    # --- many at once ---------------------------------------------------------------------------------------

    def test_a_queue_can_be_pickled_and_its_tasks_too(self, store: TaskStore) -> None:
        queue = make_queue(store)
        task = fetch(queue)
        other, same = pickle.loads(pickle.dumps((queue, task)))
        assert other.report_batch_done(same, 1) is False
        assert queue.status().doing[0].position == 1

    @promise("Without losses every record comes once in an epoch")
    def test_processes_that_race_make_each_epoch_once_and_take_each_task_once(
        self, store: TaskStore, tasks_url: str
    ) -> None:
        spans = [Span(f"shard-{number:06}", number * 4, 4) for number in range(30)]
        found = _fork.SimpleQueue()

        def work(process: int) -> None:
            own = open_task_store(tasks_url)
            queue = make_queue(own, spans=spans, epochs=3, shuffle=True, max_lost=1)
            found.put(use_all(queue, f"w{process}"))

        run_together(5, work)
        assert Counter(record for _worker in range(5) for record in found.get()) == records([0, 1, 2], spans)
        status = TaskQueue(store, "job").status()
        assert status.finished
        assert not status.failed
        assert status.counts["done"].tasks == 30
        queue = store.queue("job")
        assert queue is not None
        assert {task.token for task in store.progress(queue)} == {1}

    def test_threads_and_a_forked_child_share_a_queue(self, store: TaskStore) -> None:
        spans = [Span("a", 0, 60)]
        queue = make_queue(store, spans=spans, records=1)
        found = _fork.SimpleQueue()
        used: list[tuple[int, str, int]] = []

        def work() -> None:
            used.extend(use_all(queue))

        threads = [threading.Thread(target=work) for _number in range(3)]
        for thread in threads:
            thread.start()
        run_together(1, lambda _number: found.put(use_all(queue)))
        for thread in threads:
            thread.join()
        assert Counter(used + found.get()) == records(spans=spans)

    # --- people who mark images -------------------------------------------------------------------------------

    def test_a_lease_can_be_asked_for_by_position_and_by_who_had_the_task(self, store: TaskStore) -> None:
        queue = make_queue(store, spans=[Span("a", 0, 2), Span("b", 2, 2)], records=2)
        held = fetch(queue, "ann")
        store.pass_on(held.lease, 1)
        store.pass_on(held.lease, 1)
        found = store.queue("job")
        assert found is not None

        def lease(worker: str, **how: Any) -> str | None:
            given = store.lease(found, worker, f"{worker} {how}", lease_s=3600.0, max_lost=9, **how)
            return given and f"{given.name}{given.position}"

        assert lease("ann", position=2) is None
        assert lease("ann", position=1, not_owner="ann") is None
        assert lease("bob", position=1, not_owner="bob") == "a1"
        assert lease("bob", position=0, not_owner="bob") == "b0"
        assert {(task.name, task.owner) for task in store.tasks(found, "doing")} == {("a", "ann"), ("b", "")}
        assert store.steps(found) == [StepCount(0, "doing", "", 1), StepCount(1, "doing", "ann", 1)]

    @promise("Nobody is given what they have marked to review")
    def test_each_image_is_marked_once_and_reviewed_by_somebody_else(self, store: TaskStore) -> None:
        queue = MarkingQueue.create(store, "job", "pets", ["a", "b", "c"], review=True)
        again = MarkingQueue.create(store, "job", "pets", ["a", "b", "c"], review=True)
        assert queue.progress() == QueueProgress("job", "pets", True, 3, {}, 0, 0, 0)
        a, b = image(queue, "ann"), image(again, "bob")
        assert (a.path, b.path) == ("a", "b")
        assert image(queue, "ann") == a  # after a reload
        assert queue.progress() == QueueProgress("job", "pets", True, 1, {"ann": 1, "bob": 1}, 0, 0, 0)
        assert isinstance(queue.next_image("ann", review=True), Wait)
        queue.finish(a)
        queue.finish(a)
        assert isinstance(queue.next_image("ann", review=True), Wait)
        reviewed = image(queue, "bob", review=True)
        assert reviewed.path == "a"
        assert queue.progress() == QueueProgress("job", "pets", True, 1, {"bob": 1}, 0, 1, 0)
        # Given back it still is not for who has marked it.
        queue.give_back(reviewed)
        assert isinstance(queue.next_image("ann", review=True), Wait)
        queue.finish(image(queue, "cat", review=True))
        queue.finish(b)
        queue.finish(image(queue, "ann"))
        assert queue.next_image("ann") is None
        assert image(queue, "ann", review=True).path == "b"
        assert image(queue, "cat", review=True).path == "c"
        for user in ("ann", "cat"):
            queue.finish(image(queue, user, review=True))
        for user in ("ann", "bob"):
            assert queue.next_image(user, review=True) is None
        assert queue.progress() == QueueProgress("job", "pets", True, 0, {}, 0, 0, 3)
        assert [each.name for each in list_marking_queues(store, "pets")] == ["job"]
        assert list_marking_queues(store, "cells") == []

    @promise("An image of a queue is one person's at a time, for ten minutes from when it was given or kept last")
    def test_an_image_that_nobody_kept_goes_to_somebody_else_and_the_first_is_told(self, store: TaskStore) -> None:
        queue = MarkingQueue.create(store, "job", "pets", ["a", "b"], review=True)
        first = image(queue, "ann")
        queue.keep(first)
        self.expire(store, first.lease)
        assert image(queue, "ann") == first  # nobody has taken it, and it is kept again
        self.expire(store, first.lease)
        assert image(queue, "bob").path == "a"
        for late in (queue.keep, queue.finish, queue.give_back):
            with pytest.raises(LeaseLostError, match="leased again, to bob"):
                late(first)
        queue.finish(image(queue, "bob"))
        review = image(queue, "cat", review=True)
        self.expire(store, review.lease)
        assert isinstance(queue.next_image("bob", review=True), Wait)
        assert image(queue, "ann", review=True).path == "a"
        with pytest.raises(LeaseLostError):
            queue.finish(review)

    def test_a_queue_without_review_ends_with_the_marking(self, store: TaskStore) -> None:
        queue = MarkingQueue.create(store, "job", "pets", ["b", "a"], review=False)
        assert image(queue, "ann").path == "b"
        queue.finish(image(queue, "ann"))
        assert queue.progress() == QueueProgress("job", "pets", False, 1, {}, 0, 0, 1)
        with pytest.raises(UsageError, match="nothing is reviewed"):
            queue.next_image("ann", review=True)
        with pytest.raises(UsageError, match="author"):
            queue.next_image("")
        with pytest.raises(UsageError, match="no text"):
            MarkingQueue.create(store, "other", "pets", ["\udcff"], review=True)
        with pytest.raises(TasksError, match="already"):
            MarkingQueue.create(store, "job", "pets", ["b"], review=False)
        make_queue(store, "training")
        with pytest.raises(TasksError, match="training tasks"):
            MarkingQueue(store, "training").next_image("ann")
        assert queue.remove()

    def test_people_who_ask_at_once_are_given_different_images(self, store: TaskStore, tasks_url: str) -> None:
        paths = [f"{n}.jpg" for n in range(12)]
        found = _fork.SimpleQueue()

        def work(process: int) -> None:
            queue = MarkingQueue.create(open_task_store(tasks_url), "job", "pets", paths, review=False)
            while (given := queue.next_image(f"person {process}")) is not None:
                if isinstance(given, QueuedImage):
                    found.put(given.path)
                    queue.finish(given)

        run_together(3, work)
        assert sorted(found.get() for _ in paths) == sorted(paths)
        assert found.empty()

    @promise("Killed, stopped and started workers see every record in every epoch")
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [1])
    def test_workers_that_are_killed_and_stopped_at_random_see_every_record_and_repeat_only_what_was_lost(
        self, tasks_url: str, tmp_path: Path, seed: int
    ) -> None:
        # Long tasks: who was stopped comes back while its successor is still at them.
        spans = [Span(f"shard-{number:06}.tar", number * 90, 90) for number in range(10)]
        parameters = TaskParameters(records=90, epochs=3, lease_s=0.5, max_lost=100)
        done = run_job(tasks_url, tmp_path, spans, parameters, workers=8, kills=20, stops=10, seed=seed)
        repeated = check(done, spans, 3)
        assert done.kills >= 10  # a machine at work starts workers late
        assert done.stops >= 5
        assert done.count("refused") > 0
        assert repeated > 0
        store = open_task_store(tasks_url)
        assert TaskQueue(store, "job").status().finished
        assert not TaskQueue(store, "job").status().failed
        store.close()
