"""Task queues in the catalog's database: the protocol of a storage, and the values it takes and gives.

`loaders/tasks/queue.py` has the logic and is the only user; `tasks_sqlite` and `tasks_mongo` implement it, and
`tests/conformance/tasks.py` is the suite they pass. Every
call is one atomic step, or several of which a killed caller's are
completed by the next one (`docs/CONCURRENCY.md`). All are idempotent, so a caller that does not know whether a call was
done makes it again with the same arguments. The clock is the database's. Calls are safe from several threads and after
`fork()`, and a storage can be pickled.

A queue has a *generation*, a random number that is drawn when it is made, reset or restored. Tasks belong to a
generation: those of an earlier one are gone, and whoever still holds one finds its lease lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from datacache.core.errors import LeaseLostError

TODO, DOING, DONE, FAILED = "todo", "doing", "done", "failed"

ERRORS_KEPT = 10
"""Of each task, the newest."""
ERROR_CHARACTERS = 2000
CLOCK_SLACK_S = 5.0
"""A lease that ends later than one given now by more than this was given before the clock was set back: who has it may
be dead, and one who lives renews it soon. It has ended, too."""
BEHIND = 2**40
"""What is added to a task's place when it has failed: it is tried again after all others."""


class QueueRecord(NamedTuple):
    """A queue as it was at one moment."""

    name: str
    generation: int
    parameters: str
    """JSON, of the logic's own."""
    epoch: int
    made: bool
    """Whether the tasks of the epoch are there. Otherwise the next worker makes them."""


class NewTask(NamedTuple):
    """A task to be made. `place` orders the tasks of an epoch. Those of an earlier epoch than the queue's come from a
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
    """A task given to a worker. `token` grew by one with this lease; `claim` is what the worker called the lease."""

    generation: int
    epoch: int
    number: int
    name: str
    start: int
    records: int
    position: int
    token: int
    claim: str


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
    """Who holds it, or held it last."""
    held_s: float
    """How long ago the lease was given."""
    left_s: float
    """How long the lease still holds; negative where it has expired and nobody has taken the task yet."""
    failures: int
    lost: int
    """Leases that expired since the position last grew."""
    errors: tuple[str, ...]


class Count(NamedTuple):
    """How many tasks of an epoch are in a state."""

    epoch: int
    state: str
    tasks: int
    records: int
    used: int
    """Records of them that were reported."""


class Open(NamedTuple):
    """What is left of the epoch when there is nothing to lease."""

    tasks: int
    """Not done and not failed."""
    wait_s: float
    """Until one of them can be leased, as far as is known now; never negative."""


class TaskStore(Protocol):
    """Queues and their tasks."""

    url: str
    """Where it is, for messages: without password."""

    def create(self, name: str, generation: int, parameters: str, plan: bytes) -> QueueRecord:
        """Make a queue at epoch 0, whose tasks are not made yet; or the one of this name that is there already."""
        ...

    def replace(
        self, old: QueueRecord, *, generation: int, parameters: str, plan: bytes | None, epoch: int, checkpoint: bytes
    ) -> bool:
        """Begin another generation at `epoch`, whose tasks are not made yet. No lease of the earlier generation counts
        when this returns. `plan` None keeps the plan. False if the queue is of another generation by now (then nothing
        was changed), true also where it is of this one already.
        """
        ...

    def remove(self, name: str) -> bool:
        """Forget a queue and its tasks; whether it was there."""
        ...

    def queue(self, name: str) -> QueueRecord | None:
        """The queue, or None."""
        ...

    def queues(self) -> list[QueueRecord]:
        """All of them, by name."""
        ...

    def plan(self, queue: QueueRecord) -> tuple[bytes, bytes] | None:
        """The plan, and the checkpoint that the queue was restored from (empty where none, or the epoch's tasks are
        made). None if the queue is of another generation by now."""
        ...

    def begin_epoch(self, queue: QueueRecord) -> None:
        """Go on to the epoch after `queue.epoch`, whose tasks are then to be made. Changes nothing unless the queue is
        still at that generation and epoch with its tasks made: of many workers one does it."""
        ...

    def make(self, queue: QueueRecord, claim: str, tasks: Callable[[], Sequence[NewTask]]) -> bool:
        """Make the tasks of the epoch. Of many workers that try at once one does it; if that one is killed, another
        goes on. `tasks` gives the same ones to everybody. Done tasks of the epochs before the last one are removed.
        Whether they are made now; false while somebody else is at it.
        """
        ...

    def lease(self, queue: QueueRecord, worker: str, claim: str, *, lease_s: float, max_lost: int) -> Leased | None:
        """Lease a task to `worker`: one whose lease has expired (or ends more than `CLOCK_SLACK_S` later than one given
        now), or the first that is to do; None where there is none.

        A lease that has expired is lost: the task's token and its `lost` grow. A task whose leases were lost
        `max_lost` times without a record in between is failed instead. `claim` names the lease: the same call again
        gives the same task.
        """
        ...

    def open(self, queue: QueueRecord) -> Open:
        """What is left of the epoch, counted together with tasks of earlier epochs that were put back."""
        ...

    def report(self, lease: Leased, position: int, *, lease_s: float) -> None:
        """So many records of the task are used: its position is at least `position` now, and the lease is renewed.
        At `lease.records` the task is done. `LeaseLostError` if this is not the task's lease any more; one that has
        expired is, for as long as nobody else took the task.
        """
        ...

    def release(self, lease: Leased) -> None:
        """Give the task back; `LeaseLostError` as for `report`."""
        ...

    def fail(self, lease: Leased, error: str, *, max_failures: int) -> None:
        """The task could not be done: it is given back, behind all others, or failed if this was failure number
        `max_failures`. `LeaseLostError` as for `report`."""
        ...

    def retry(self, queue: QueueRecord, number: int | None = None) -> int:
        """Put failed tasks (all, or those with this number) of any epoch back, with their positions; how many."""
        ...

    def counts(self, queue: QueueRecord) -> list[Count]:
        """How many tasks there are, by epoch and state."""
        ...

    def tasks(self, queue: QueueRecord, state: str) -> list[TaskState]:
        """The tasks of any epoch in this state, by epoch and number."""
        ...

    def progress(self, queue: QueueRecord) -> list[TaskState]:
        """All tasks of the queue's epoch by number, each as it was at some moment during the call."""
        ...

    def put_back(self, queue: QueueRecord) -> list[TaskState]:
        """The tasks of earlier epochs that are to do or being done, by epoch and number; none is missed because it is
        leased or given back meanwhile."""
        ...

    def close(self) -> None:
        """Close this process's connections. A later call opens them again."""
        ...


def open_task_store(url: str) -> TaskStore:
    """The storage in the catalog at `url` (`sqlite:///PATH`, `mongodb://…`). Nothing is opened before it is used."""
    from datacache.catalog.open import open_catalog_url
    from datacache.catalog.sqlite.catalog import SqliteCatalog

    if url.startswith(("mongodb://", "mongodb+srv://")):
        from datacache.catalog.tasks.mongo import MongoTasks

        return MongoTasks(url)
    from datacache.catalog.tasks.sqlite import SqliteTasks

    catalog = open_catalog_url(url)
    assert isinstance(catalog, SqliteCatalog)
    return SqliteTasks(catalog)


def lease_lost(lease: Leased, found: TaskState | None) -> LeaseLostError:
    """The error for a report that is refused, with who has the task now."""
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
    """What is written down with a task whose lease was lost."""
    return f"the lease of {owner} expired, its last report at record {position}"
