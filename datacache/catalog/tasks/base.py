"""Task queues in the catalog's database: the protocol of a storage, and the values it takes and gives.

`loaders/tasks/queue.py` has the logic of training tasks, `executors/queue` that of work for other machines; `sqlite`
and `mongo` implement the protocol, and `tests/conformance/tasks.py` is the suite that they pass. Every call is one
atomic step, or several, of which the next caller completes those of a killed one (`docs/CONCURRENCY.md`). All are
idempotent, so a caller that does not know whether a call was done repeats it with the same arguments. The clock is the
database's. Calls are safe from several threads and after `fork()`, and a storage can be pickled.

A queue has a *generation*, a random number that is drawn when it is made, reset or restored. Tasks belong to a
generation: those of an earlier one are gone, and a worker that still holds one finds its lease lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from datacache.core.errors import LeaseLostError

TODO, DOING, DONE, FAILED = "todo", "doing", "done", "failed"

WORK = "work:"
"""Begins the names of queues of work; names of other queues have no colon."""
ERRORS_KEPT = 10
"""Of each task, the newest."""
ERROR_CHARACTERS = 2000
CLOCK_SLACK_S = 5.0
"""A lease that ends later than one given now by more than this was given before the clock was set back. It counts as
ended: its worker may be dead, and a live one renews it soon."""
BEHIND = 2**40
"""Added to the place of a task that has failed, so that it is tried again after all others."""

Changes = dict[str, Any]
"""New values of fields of a `TaskState`; "behind" is added to the task's place."""


class QueueRecord(NamedTuple):
    """A queue as it was at one moment."""

    name: str
    generation: int
    parameters: str
    """JSON, of the logic's own."""
    epoch: int
    made: bool
    """False where the next worker has to make the tasks of the epoch."""


class NewTask(NamedTuple):
    """A task to be made. `place` orders the tasks of an epoch. Tasks of an earlier epoch than the queue's come from a
    checkpoint: failed, or put back (to do)."""

    epoch: int
    number: int
    place: int
    name: str
    start: int
    records: int
    position: int = 0
    state: str = TODO
    errors: tuple[str, ...] = ()


class Leased(NamedTuple):
    """A task leased to a worker. `token` grew by one with this lease; `claim` is the worker's name for the lease."""

    generation: int
    epoch: int
    number: int
    name: str
    start: int
    records: int
    position: int
    token: int
    claim: str


class StepCount(NamedTuple):
    """The number of tasks at one position, in one state and last held by one worker."""

    position: int
    state: str
    owner: str
    """'' for tasks that are done or that nobody has held."""
    tasks: int


class TaskState(NamedTuple):
    """A task as it was at one moment."""

    epoch: int
    number: int
    name: str
    start: int
    records: int
    position: int
    state: str
    token: int
    owner: str
    """The worker that holds it, or held it last."""
    held_s: float
    """Seconds since the lease was given."""
    left_s: float
    """Seconds until the lease expires; negative where it has expired and nobody has taken the task yet."""
    failures: int
    lost: int
    """Leases that expired since the position last grew."""
    errors: tuple[str, ...]


class Count(NamedTuple):
    """The number of an epoch's tasks in one state."""

    epoch: int
    state: str
    tasks: int
    records: int
    used: int
    """Their records that were reported."""


class Open(NamedTuple):
    """The tasks left of an epoch in which there is nothing to lease."""

    tasks: int
    """Not done and not failed."""
    wait_s: float
    """Seconds until one of them can be leased, as far as is known now; never negative."""


class TaskStore(Protocol):
    """Queues and their tasks. What becomes of a task that a worker holds is the same in every storage."""

    url: str
    """The address for messages, without password."""

    def create(self, name: str, generation: int, parameters: str, plan: bytes) -> QueueRecord:
        """Make a queue at epoch 0, whose tasks are not made yet. Return it, or the one that has this name already."""
        ...

    def replace(
        self, old: QueueRecord, *, generation: int, parameters: str, plan: bytes | None, epoch: int, checkpoint: bytes
    ) -> bool:
        """Begin another generation at `epoch`, whose tasks are not made yet. Afterwards no lease of the earlier
        generation counts. `plan` None keeps the plan. Return False, with nothing changed, if the queue is of a third
        generation by now; True also where it is of the new one already.
        """
        ...

    def remove(self, name: str) -> bool:
        """Forget a queue and its tasks. Return whether it existed."""
        ...

    def queue(self, name: str) -> QueueRecord | None:
        """Return the queue, or None."""
        ...

    def queues(self) -> list[QueueRecord]:
        """Return all queues, by name."""
        ...

    def plan(self, queue: QueueRecord) -> tuple[bytes, bytes] | None:
        """Return the plan, and the checkpoint that the queue was restored from (empty without one, and once the epoch's
        tasks are made). None if the queue is of another generation by now."""
        ...

    def begin_epoch(self, queue: QueueRecord) -> None:
        """Go on to the epoch after `queue.epoch`, whose tasks are then to be made. Changes nothing unless the queue is
        still at that generation and epoch with its tasks made: of many workers one does it."""
        ...

    def make(self, queue: QueueRecord, claim: str, tasks: Callable[[], Sequence[NewTask]]) -> bool:
        """Make the tasks of the epoch, and remove done tasks of the epochs before the last one. Return whether the
        tasks are made now; False while another worker makes them. Of many workers that try at once one does it; if that
        one is killed, another goes on. `tasks` gives all workers the same tasks."""
        ...

    def add(self, queue: QueueRecord, tasks: Sequence[NewTask]) -> None:
        """Put tasks of the queue's epoch, which are made, beside the others. Those whose numbers are there stay as they
        are. Changes nothing where the queue is gone or of another generation."""
        ...

    def drop(self, queue: QueueRecord, numbers: Sequence[int]) -> None:
        """Remove tasks of the queue's epoch by number, whatever their state. Their leases are lost."""
        ...

    def lease(
        self,
        queue: QueueRecord,
        worker: str,
        claim: str,
        *,
        lease_s: float,
        max_lost: int,
        position: int | None = None,
        not_owner: str = "",
    ) -> Leased | None:
        """Lease a task to `worker`: one whose lease has expired (or ends more than `CLOCK_SLACK_S` later than one given
        now), or the first that is to do. None if there is no such task.

        A lease that has expired is lost: the task's token and its `lost` grow. A task whose leases were lost `max_lost`
        times without a record in between is failed instead. `claim` names the lease: the same call again gives the same
        task.

        With `position`, only a task of the epoch that was passed on so often, each time with one more record reported
        (`pass_on`): it is found without a look at those before it. With `not_owner`, only one that another
        worker held last, who stays its owner: so whoever reported the first record is known to the end.
        """
        ...

    def open(self, queue: QueueRecord) -> Open:
        """Return what is left of the epoch, together with tasks of earlier epochs that were put back."""
        ...

    def _change_held(
        self, lease: Leased, change: Callable[[TaskState], Changes | None], *, lease_s: float = 0.0, durable: bool
    ) -> None:
        """Change a task as `change` says, with no other change in between, if this is the lease that it was given last;
        else raise `LeaseLostError`. With `lease_s`, renew the lease. `change` returns None for what was done before."""
        ...

    def report(self, lease: Leased, position: int, *, lease_s: float) -> None:
        """Note that the task's first `position` records are used, and renew the lease. A position never shrinks; at
        `lease.records` the task is done. Raise `LeaseLostError` if this is not the task's lease any more; an expired
        one is, for as long as no other worker took the task."""

        def change(task: TaskState) -> Changes | None:
            if task.state == DONE and position <= task.position:
                return None
            if task.state != DOING:
                raise lease_lost(lease, task)
            new = max(task.position, position)
            lost = 0 if new > task.position else task.lost
            return {"position": new, "lost": lost, "state": DONE if new >= task.records else DOING}

        self._change_held(lease, change, lease_s=lease_s, durable=position > 0)

    def release(self, lease: Leased) -> None:
        """Give the task back. Raise `LeaseLostError` as `report` does."""
        self._change_held(lease, lambda task: {"state": TODO} if task.state == DOING else None, durable=False)

    def pass_on(self, lease: Leased, position: int) -> None:
        """Note that the task's first `position` records are used, and give it back behind all others, in one step.
        Raise `LeaseLostError` as `report` does."""

        def change(task: TaskState) -> Changes | None:
            if task.state != DOING:
                return None
            return {"position": max(task.position, position), "lost": 0, "state": TODO, "behind": BEHIND}

        self._change_held(lease, change, durable=True)

    def fail(self, lease: Leased, error: str, *, max_failures: int) -> None:
        """Note that the task could not be done: give it back, behind all others, or at failure number `max_failures`
        make it failed. Raise `LeaseLostError` as `report` does."""

        def change(task: TaskState) -> Changes | None:
            if task.state in (TODO, FAILED):
                return None
            if task.state != DOING:
                raise lease_lost(lease, task)
            failures = task.failures + 1
            state = FAILED if failures >= max_failures else TODO
            return {"failures": failures, "state": state, "errors": with_error(task, error), "behind": BEHIND}

        self._change_held(lease, change, durable=True)

    def retry(self, queue: QueueRecord, number: int | None = None) -> int:
        """Put failed tasks of any epoch back (all, or those with this number), with their positions. Return how
        many."""
        ...

    def counts(self, queue: QueueRecord) -> list[Count]:
        """Count the tasks by epoch and state."""
        ...

    def steps(self, queue: QueueRecord) -> list[StepCount]:
        """Count the tasks of the queue's epoch by position, state and owner."""
        ...

    def tasks(self, queue: QueueRecord, state: str) -> list[TaskState]:
        """Return the tasks of any epoch in this state, by epoch and number."""
        ...

    def progress(self, queue: QueueRecord) -> list[TaskState]:
        """Return all tasks of the queue's epoch by number, each as it was at some moment during the call."""
        ...

    def put_back(self, queue: QueueRecord) -> list[TaskState]:
        """Return the tasks of earlier epochs that are to do or being done, by epoch and number. None is missed because
        a worker leases it or gives it back meanwhile."""
        ...

    def close(self) -> None:
        """Close this process's connections. A later call opens them again."""
        ...


def with_error(task: TaskState, error: str) -> list[str]:
    """Return a task's newest errors with one more."""
    return [*task.errors, error[:ERROR_CHARACTERS]][-ERRORS_KEPT:]


def lease_lost(lease: Leased, found: TaskState | None) -> LeaseLostError:
    """Return the error for a refused report, which says why the lease is lost."""
    what = f"task {lease.number} of epoch {lease.epoch} ({lease.name})"
    if found is None:
        why = "the queue was reset, restored or removed, or its epoch is long over"
    elif found.token != lease.token:
        why = f"it was leased again, to {found.owner}"
    else:
        why = f"it was given back ({found.state})" if found.state != DOING else "it is another lease"
    return LeaseLostError(
        f"the lease of {what} is lost: {why}; nothing of this report counts",
        task=lease.number,
        hint="Drop what is left of the task and fetch another one. Where this happens often, make leases longer.",
    )


def lease_expired(owner: str, position: int) -> str:
    """Return the error that is noted with a task whose lease was lost."""
    return f"the lease of {owner} expired, its last report at record {position}"
