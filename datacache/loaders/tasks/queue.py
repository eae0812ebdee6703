"""Elastic tasks: a data set cut into pieces that workers, who come and go, take on lease. No PyTorch here.

A `TaskQueue` lies in the catalog's database (`catalog/tasks/base.py`), so all workers of a job see one queue. A task is
a run of records of one span (a shard, or a list of files): to do, then leased to one worker, then done. A lease is kept
alive by reports; one that expires is lost, the task goes to somebody else, who begins where the last report ended, and
whatever the first one says later is refused. The words are those of DLRover and ElasticDL (`fetch_shard`, …).

    queue = datacache.open_tasks("faces-training")
    while (task := queue.fetch_shard(worker)) is not None:
        for record in task.left():            # numbers in the span `task.name`
            ...
            queue.report_batch_done(task, 1)

A `TaskQueue` may be used by any thread, after `fork()`, and be pickled. While the database is away, its calls wait for
`patience_s` before they raise `CatalogUnavailableError`. A `Task` belongs to one thread at a time.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from datacache.catalog.refs import check_name
from datacache.catalog.tasks.base import (
    DOING,
    FAILED,
    WORK,
    Count,
    Leased,
    NewTask,
    QueueRecord,
    StepCount,
    TaskState,
    TaskStore,
)
from datacache.core.errors import CatalogUnavailableError, TasksError, UsageError
from datacache.core.packed import pack
from datacache.loaders.tasks.checkpoint import check_checkpoint, encode_checkpoint, with_checkpoint
from datacache.loaders.tasks.plan import Plan, Span, Task, TaskParameters, Wait, new_tasks, record_key, unpacked

__all__ = ["Span", "Task", "TaskParameters", "TaskQueue", "TaskStatus", "Wait", "list_queues", "worker_name"]

POLL_S = 0.5
"""How often a worker looks again at most, while there is nothing for it and others are not done."""
_SHORTEST_WAIT_S = 0.02
_MAKING_WAIT_S = 0.2
_AWAY_WAIT_S = 0.2

_T = TypeVar("_T")


class TaskStatus(NamedTuple):
    """A queue as it was at one moment."""

    name: str
    parameters: TaskParameters
    epoch: int
    counts: dict[str, Count]
    """Of the epoch, by state (`todo`, `doing`, `done`, `failed`)."""
    doing: list[TaskState]
    failed: list[TaskState]
    """Of all epochs."""

    @property
    def finished(self) -> bool:
        """True once all epochs are over, every task done or listed as failed."""
        last = self.epoch + 1 == self.parameters.epochs
        ended = sum(self.counts[state].tasks for state in ("done", "failed") if state in self.counts)
        return last and ended == self.parameters.tasks and not self.doing


class TaskQueue:
    """The queue `name` in `store`, made by `create`. Nothing is opened before the first call."""

    def __init__(self, store: TaskStore, name: str, *, patience_s: float = 60.0, fence: int = 0) -> None:
        self.store = store
        self.name = check_name(name)
        self.patience_s = patience_s
        self._fence = fence

    def __repr__(self) -> str:
        return f"TaskQueue({self.name!r}, {self.store.url!r})"

    @classmethod
    def create(
        cls,
        store: TaskStore,
        name: str,
        spans: Iterable[Span],
        parameters: TaskParameters | None = None,
        *,
        reset: bool = False,
        patience_s: float = 60.0,
    ) -> TaskQueue:
        """Make a queue over a data set's `spans()`. Any number of workers may do so at once: with the same spans and
        parameters it is the same queue, as far as it has got; with others `TasksError`, unless `reset` begins anew.
        """
        queue = cls(store, name, patience_s=patience_s)
        plan = Plan.of(spans)
        wanted = parameters or TaskParameters()
        tasks = len(plan.cut(wanted.records))
        wanted = replace(wanted, digest=plan.digest, samples=plan.samples, tasks=tasks)
        packed, generation = plan.encode(), _new_generation()
        there = queue._tried(store.create, name, generation, wanted.encode(), packed)
        if there.generation == generation:
            return queue
        if reset:
            queue._replace(lambda _old: (wanted.encode(), packed, 0, b""))
        elif not (found := TaskParameters.decode(there.parameters)).same_as(wanted):
            differ = [n for n in wanted.__dataclass_fields__ if getattr(found, n) != getattr(wanted, n)]
            raise TasksError(
                f"there is a task queue {name} already, with other {', '.join(differ)}",
                hint=f"Take another name, or begin anew: dsctl tasks rm {name}",
            )
        return queue

    # --- workers --------------------------------------------------------------------------------------------

    def fetch_shard(self, worker: str = "", *, stop: threading.Event | None = None) -> Task | None:
        """Lease a task; waits while there is none, but others are not done yet. None when all epochs are over, or once
        `stop` is set."""
        worker = worker or worker_name()
        stop = stop or threading.Event()
        while not stop.is_set():
            found = self.try_fetch(worker)
            if not isinstance(found, Wait):
                return found
            stop.wait(found.seconds * random.uniform(0.8, 1.2))
        return None

    def make(self) -> bool:
        """Make the tasks of the epoch, as the first worker would. Return whether they are made; False while another one
        makes them."""
        while not (queue := self._queue()).made:
            if not self._make(queue, secrets.token_hex(8)):
                return False
        return True

    def lease(self, worker: str, claim: str, *, position: int, not_owner: str) -> Leased | Wait | None:
        """Lease a task of an only epoch as `TaskStore.lease` does; `Wait` while the tasks are being made, None where
        there is none."""
        if not self.make():
            return Wait(_MAKING_WAIT_S)
        queue = self._queue()
        parameters = TaskParameters.decode(queue.parameters)
        how: dict[str, Any] = {"position": position, "not_owner": not_owner, "max_lost": parameters.max_lost}
        return self._tried(self.store.lease, queue, worker, claim, lease_s=parameters.lease_s, **how)

    def try_fetch(self, worker: str) -> Task | Wait | None:
        """Lease a task; `Wait` where there is none now, None when all epochs are over."""
        claim = secrets.token_hex(8)
        while True:
            queue = self._queue()
            if not queue.made:
                if not self._make(queue, claim):
                    return Wait(_MAKING_WAIT_S)
                continue
            parameters = TaskParameters.decode(queue.parameters)
            limits = {"lease_s": parameters.lease_s, "max_lost": parameters.max_lost}
            lease = self._tried(self.store.lease, queue, worker, claim, **limits)
            if lease is not None:
                key = record_key(parameters, lease.epoch, lease.number)
                return Task(self.name, lease, parameters.lease_s, key, lease.position)
            left = self._tried(self.store.open, queue)
            if left.tasks:
                return Wait(min(POLL_S, max(_SHORTEST_WAIT_S, left.wait_s)))
            if self._queue() != queue:
                continue
            if queue.epoch + 1 >= parameters.epochs:
                return None
            self._tried(self.store.begin_epoch, queue)

    def report_batch_done(self, task: Task, records: int) -> bool:
        """Report so many more records as used. Return whether the task is done with that. Renews the lease.
        `LeaseLostError` if somebody else was given the task: then the caller drops it, and nothing of this report
        counts."""
        return self.report(task, task.position + records)

    def report(self, task: Task, position: int) -> bool:
        """Report as `report_batch_done` does, by how many records of the task are used altogether. Idempotent."""
        if not task.position <= position <= task.count:
            raise UsageError(f"task {task.number} is at record {task.position} of {task.count}, and not at {position}")
        self._tried(self.store.report, task.lease, position, lease_s=task.lease_s)
        task.position = position
        return position == task.count

    def report_done(self, task: Task) -> None:
        """Report all records of the task as used. `LeaseLostError` as above."""
        self.report(task, task.count)

    def renew(self, task: Task) -> None:
        """Renew the lease, with nothing to report. `LeaseLostError` as above."""
        self._tried(self.store.report, task.lease, 0, lease_s=task.lease_s)

    def release(self, task: Task) -> None:
        """Give the rest of the task back for others to take at once. `LeaseLostError` as above."""
        self._tried(self.store.release, task.lease)

    def report_failed(self, task: Task, error: str) -> None:
        """Report that the task cannot be done. It is tried again after all others, from its position on; after
        `max_failures` it is listed as failed, and the epoch goes on without it. `LeaseLostError` as above."""
        most = self.parameters.max_failures
        self._tried(self.store.fail, task.lease, error, max_failures=most)

    # --- checkpoints ----------------------------------------------------------------------------------------

    def get_shard_checkpoint(self) -> str:
        """Return what is done and how far the rest is, as JSON text. Each task is as it was at some moment during the
        call."""
        while True:
            queue = self._queue()
            if not queue.made:
                if not self._make(queue, secrets.token_hex(8)):
                    time.sleep(_MAKING_WAIT_S)
                continue
            parameters = TaskParameters.decode(queue.parameters)
            # Some go from one to the other meanwhile: by `retry`, or because they fail again.
            put_back = self._tried(self.store.put_back, queue)
            failed = self._tried(self.store.tasks, queue, FAILED)
            put_back += self._tried(self.store.put_back, queue)
            tasks = self._tried(self.store.progress, queue)
            now = self._queue()
            if now.generation == queue.generation and now.epoch <= queue.epoch + 1:
                return encode_checkpoint(self.name, parameters, queue.epoch, tasks, failed=failed, put_back=put_back)

    def restore_shard_from_checkpoint(self, text: str) -> None:
        """Go back to a checkpoint: what was not done then is to do again. All leases that were given are void.
        `TasksError` if it is none of this queue."""
        self._replace(
            lambda old: (
                old.parameters,
                None,
                check_checkpoint(text, TaskParameters.decode(old.parameters)),
                pack(text.encode()),
            )
        )

    def reset(self, *, epoch_only: bool = False) -> None:
        """Begin anew, from epoch 0 or only the epoch the queue is in. All leases that were given are void."""
        self._replace(lambda old: (old.parameters, None, old.epoch if epoch_only else 0, b""))

    # --- looking on -----------------------------------------------------------------------------------------

    @property
    def parameters(self) -> TaskParameters:
        """How the queue works; `TasksError` if it is not there."""
        return TaskParameters.decode(self._queue().parameters)

    def exists(self) -> bool:
        return self._tried(self.store.queue, self.name) is not None

    def steps(self) -> list[StepCount]:
        """Count the tasks of the epoch by position, state and owner; none before they are made."""
        return self._tried(self.store.steps, self._queue())

    def status(self) -> TaskStatus:
        """Return how far it is, who has which task, and what has failed."""
        return _status(self.store, self._queue())

    def retry(self, number: int | None = None) -> int:
        """Put failed tasks back, all or those of this number, to go on at their positions; how many."""
        queue = self._queue()
        return self._tried(self.store.retry, queue, number)

    def remove(self) -> bool:
        """Forget the queue; whether it was there. All leases that were given are void."""
        return self._tried(self.store.remove, self.name)

    def impatient(self) -> TaskQueue:
        """Return the same queue for calls that do not wait for a database that is away."""
        return TaskQueue(self.store, self.name, patience_s=0.0, fence=self._fence)

    @property
    def generation(self) -> int:
        """A number that is drawn whenever the queue is made, reset or restored; `TasksError` if it is not there."""
        return self._queue().generation

    def fenced(self, generation: int) -> TaskQueue:
        """Return the same queue for a worker that is to end once somebody resets or restores it: from then on calls
        raise `TasksError`. Without a fence workers go on with what the queue has then."""
        return TaskQueue(self.store, self.name, patience_s=self.patience_s, fence=generation)

    def close(self) -> None:
        """Close this process's connections. A later call opens them again."""
        self.store.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _queue(self) -> QueueRecord:
        found = self._tried(self.store.queue, self.name)
        if found is None:
            raise TasksError(f"there is no task queue {self.name}", hint="See: dsctl tasks list")
        if self._fence not in (0, found.generation):
            raise TasksError(
                f"the task queue {self.name} was reset or restored meanwhile",
                hint="Another process has begun again from a checkpoint. This one is to end.",
            )
        return found

    def _make(self, queue: QueueRecord, claim: str) -> bool:
        def tasks() -> list[NewTask]:
            kept = self.store.plan(queue)
            if kept is None:
                return []  # the queue has gone on, and these are not made
            plan, checkpoint = kept
            parameters = TaskParameters.decode(queue.parameters)
            made = new_tasks(Plan.decode(plan), parameters, queue.epoch)
            if not checkpoint:
                return made
            return with_checkpoint(made, queue.epoch, unpacked(checkpoint))

        return self._tried(self.store.make, queue, claim, tasks)

    def _replace(self, change: Callable[[QueueRecord], tuple[str, bytes | None, int, bytes]]) -> None:
        """Begin another generation, with parameters, plan, epoch and checkpoint as `change` says."""
        while True:
            old, generation = self._queue(), _new_generation()
            parameters, plan, epoch, checkpoint = change(old)
            new: dict[str, Any] = {"parameters": parameters, "plan": plan, "epoch": epoch, "checkpoint": checkpoint}
            if self._tried(self.store.replace, old, generation=generation, **new):
                return

    def _tried(self, call: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
        """Repeat a call, which is idempotent, where it met a database that is away is made again."""
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                return call(*arguments, **options)
            except CatalogUnavailableError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_AWAY_WAIT_S * random.uniform(0.5, 1.5))


def list_queues(store: TaskStore) -> list[TaskStatus]:
    """Return all queues, by name; none of work for other machines (`executors.queue`)."""
    return [_status(store, queue) for queue in store.queues() if not queue.name.startswith(WORK)]


def worker_name() -> str:
    """Return a name for a worker that nobody else has: host, process, chance."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"


def _status(store: TaskStore, queue: QueueRecord) -> TaskStatus:
    counts = {count.state: count for count in store.counts(queue) if count.epoch == queue.epoch}
    return TaskStatus(
        queue.name,
        TaskParameters.decode(queue.parameters),
        queue.epoch,
        counts,
        store.tasks(queue, DOING),
        store.tasks(queue, FAILED),
    )


def _new_generation() -> int:
    return secrets.randbits(62) | 1 << 61
