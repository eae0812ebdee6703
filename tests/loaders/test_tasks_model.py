"""Task queues against a model: whatever is done in whatever order, both give the same task, the same refusal, the same
state."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from datacache.catalog.open import open_task_store
from datacache.catalog.tasks.sqlite import SqliteTasks
from datacache.core.errors import LeaseLostError
from datacache.loaders.tasks.queue import Task, TaskQueue, Wait
from tests.conformance.tasks import SPANS, make_queue
from tests.promises import promise

pytestmark = [promise("Any sequence of calls does what a model of the queue does")]

EPOCHS, MAX_FAILURES, MAX_LOST = 2, 2, 3
TASKS = [("a", 0, 4), ("a", 4, 4), ("a", 8, 2), ("b", 0, 4), ("c", 0, 1)]


@dataclass
class Modelled:
    """A task of the model."""

    epoch: int
    number: int
    place: int
    state: str = "todo"
    position: int = 0
    token: int = 0
    failures: int = 0
    lost: int = 0
    heard: int = 0
    expired: bool = False

    @property
    def records(self) -> int:
        return TASKS[self.number][2]


@dataclass
class Model:
    epoch: int = 0
    generation: int = 0
    tasks: list[Modelled] = field(default_factory=list)
    clock: Any = field(default_factory=count)

    def begin(self, epoch: int) -> None:
        self.epoch = epoch
        old = [t for t in self.tasks if t.state == "failed" or (t.state == "done" and t.epoch >= epoch - 1)]
        self.tasks = old + [Modelled(epoch, number, number) for number in range(len(TASKS))]

    def fetch(self) -> Modelled | str:
        while True:
            expired = sorted((t for t in self.tasks if t.state == "doing" and t.expired), key=lambda t: t.heard)
            for task in expired:
                task.lost += 1
                if task.lost < MAX_LOST:
                    return self.lease(task)
                task.state = "failed"
            todo = sorted((t for t in self.tasks if t.state == "todo"), key=lambda t: (t.epoch, t.place))
            if todo:
                return self.lease(todo[0])
            if any(t.state == "doing" for t in self.tasks):
                return "wait"
            if self.epoch + 1 == EPOCHS:
                return "end"
            self.begin(self.epoch + 1)

    def lease(self, task: Modelled) -> Modelled:
        task.state, task.token, task.expired = "doing", task.token + 1, False
        task.heard = next(self.clock)
        return task

    def held(self, generation: int, lease: Task) -> Modelled | None:
        if generation != self.generation:
            return None
        key = (lease.epoch, lease.number, lease.token)
        return next((t for t in self.tasks if (t.epoch, t.number, t.token) == key), None)


class Queues(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = open_task_store(f"sqlite:///{Path(self.folder.name)}/catalog.db")
        assert isinstance(self.store, SqliteTasks)
        self.queue = make_queue(self.store, epochs=EPOCHS, max_failures=MAX_FAILURES, max_lost=MAX_LOST)
        self.model = Model()
        self.model.begin(0)
        self.leases: list[tuple[int, Task]] = []
        self.checkpoint: tuple[str, int, list[tuple[int, str, int]], list[Modelled]] | None = None

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule()
    def fetch(self) -> None:
        found, wanted = self.queue.try_fetch("w"), self.model.fetch()
        if isinstance(wanted, str):
            assert isinstance(found, Wait) if wanted == "wait" else found is None
            return
        assert isinstance(found, Task)
        name, start, records = TASKS[wanted.number]
        assert (found.epoch, found.name, found.start, found.count) == (wanted.epoch, name, start, records)
        assert (found.number, found.position, found.token) == (wanted.number, wanted.position, wanted.token)
        self.leases.append((self.model.generation, found))

    def _lease(self, at: int) -> tuple[Task, Modelled | None]:
        generation, task = self.leases[at % len(self.leases)]
        return task, self.model.held(generation, task)

    @precondition(lambda self: self.leases)
    @rule(at=st.integers(0, 30), records=st.integers(0, 4))
    def report(self, at: int, records: int) -> None:
        task, held = self._lease(at)
        position = min(task.count, task.position + records)
        if held is None or not (held.state == "doing" or (held.state == "done" and position <= held.position)):
            with pytest.raises(LeaseLostError):
                self.queue.report(task, position)
            return
        assert self.queue.report(task, position) is (position == task.count)
        if held.state == "doing":
            held.lost = 0 if position > held.position else held.lost
            held.position = max(held.position, position)
            held.state = "done" if held.position == held.records else "doing"
            held.heard, held.expired = next(self.model.clock), False

    @precondition(lambda self: self.leases)
    @rule(at=st.integers(0, 30))
    def expire(self, at: int) -> None:
        task, held = self._lease(at)
        if held is not None and held.state == "doing" and not held.expired:
            held.expired = True
            with self.store._catalog.writing(durable=False) as connection:  # type: ignore[attr-defined]
                connection.execute(
                    "UPDATE tasks SET until_s = until_s - 7200 WHERE epoch = ? AND number = ?",
                    (task.epoch, task.number),
                )

    @precondition(lambda self: self.leases)
    @rule(at=st.integers(0, 30))
    def release(self, at: int) -> None:
        task, held = self._lease(at)
        if held is None:
            with pytest.raises(LeaseLostError):
                self.queue.release(task)
            return
        self.queue.release(task)
        if held.state == "doing":
            held.state = "todo"

    @precondition(lambda self: self.leases)
    @rule(at=st.integers(0, 30))
    def fail(self, at: int) -> None:
        task, held = self._lease(at)
        if held is None or held.state == "done":
            with pytest.raises(LeaseLostError):
                self.queue.report_failed(task, "x")
            return
        self.queue.report_failed(task, "x")
        if held.state == "doing":
            held.failures += 1
            held.state = "failed" if held.failures >= MAX_FAILURES else "todo"
            held.place += 1000

    @rule()
    def retry(self) -> None:
        failed = [t for t in self.model.tasks if t.state == "failed"]
        assert self.queue.retry() == len(failed)
        for task in failed:
            task.state, task.failures, task.lost = "todo", 0, 0

    @rule()
    def save(self) -> None:
        saved = [(t.number, t.state, t.position) for t in self.model.tasks if t.epoch == self.model.epoch]
        earlier = [
            Modelled(t.epoch, t.number, t.number, "failed" if t.state == "failed" else "todo", t.position)
            for t in self.model.tasks
            if t.state != "done" and t.epoch < self.model.epoch
        ]
        self.checkpoint = (self.queue.get_shard_checkpoint(), self.model.epoch, saved, earlier)

    @precondition(lambda self: self.checkpoint)
    @rule()
    def restore(self) -> None:
        assert self.checkpoint is not None
        text, epoch, saved, earlier = self.checkpoint
        self.queue.restore_shard_from_checkpoint(text)
        self.model.generation += 1
        self.model.epoch = epoch
        self.model.tasks = [Modelled(t.epoch, t.number, t.number, t.state, t.position) for t in earlier]
        for number, state, position in saved:
            task = Modelled(epoch, number, number, "done" if state == "done" else "todo", position)
            self.model.tasks.append(task)

    @rule(epoch_only=st.booleans())
    def reset(self, epoch_only: bool) -> None:
        self.queue.reset(epoch_only=epoch_only)
        self.model.generation += 1
        self.model.tasks = []
        self.model.begin(self.model.epoch if epoch_only else 0)

    @invariant()
    def both_say_the_same(self) -> None:
        status = self.queue.status()
        assert status.epoch == self.model.epoch
        if not status.counts:
            return  # made when they are first asked for
        states = [t.state for t in self.model.tasks if t.epoch == self.model.epoch]
        assert {s: c.tasks for s, c in status.counts.items()} == {s: states.count(s) for s in set(states)}
        for state, found in (("doing", status.doing), ("failed", status.failed)):
            wanted = sorted(
                (t.epoch, t.number, t.position, t.failures, t.lost) for t in self.model.tasks if t.state == state
            )
            assert [(t.epoch, t.number, t.position, t.failures, t.lost) for t in found] == wanted


Queues.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestQueues = Queues.TestCase


def test_the_model_knows_how_the_spans_are_cut(tmp_path: Path) -> None:
    store = open_task_store(f"sqlite:///{tmp_path}/c.db")
    queue: TaskQueue = make_queue(store)
    assert len(TASKS) == queue.parameters.tasks
    assert sum(records for *_name, records in TASKS) == sum(span.count for span in SPANS)
    store.close()
