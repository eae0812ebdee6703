"""Task queues in the SQLite file of the embedded catalog.

Used through `catalog.open`. Each call is one transaction, so nothing is ever half done. Reports are on the disk when
the call returns. Leases that were given or renewed need not be: a power cut ends the workers of this machine, and with
them all leases. The clock is the catalog's, which follows no step ahead of this machine's. Any thread and process may
call."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.catalog.tasks.base import (
    BEHIND,
    CLOCK_SLACK_S,
    DOING,
    DONE,
    FAILED,
    TODO,
    Changes,
    Count,
    Leased,
    NewTask,
    Open,
    QueueRecord,
    StepCount,
    TaskState,
    TaskStore,
    lease_expired,
    lease_lost,
    with_error,
)
from datacache.store.clock import elapsed_s

_QUEUE = "SELECT name, generation, parameters, epoch, made FROM task_queues"
_STATE = """SELECT epoch, number, name, start, records, position, state, token, owner, since_s, until_s, failures, lost,
    errors, claim FROM tasks"""
_FITS = "ifnull(?, position) = position AND (? = '' OR owner <> ?)"
# Each query names its index: without, SQLite goes through all tasks of the generation by their primary key.
_BY_STATE = f"{_STATE} INDEXED BY tasks_by_state WHERE generation = ? AND state = ?"
_TODO = f"""{_STATE} INDEXED BY tasks_by_state WHERE generation = ? AND state = 'todo' AND {_FITS}
    ORDER BY epoch, place LIMIT 1"""
_TODO_AT = f"""{_STATE} INDEXED BY tasks_by_state WHERE generation = ? AND state = 'todo' AND epoch = ? AND place >= ?
    AND place < ? AND {_FITS} ORDER BY place LIMIT 1"""
_EXPIRED = f"""{_STATE} INDEXED BY tasks_by_lease WHERE generation = ? AND state = 'doing' AND until_s <= ? AND {_FITS}
    ORDER BY until_s LIMIT 1"""
_AHEAD = f"""{_STATE} INDEXED BY tasks_by_lease WHERE generation = ? AND state = 'doing' AND until_s > ? AND {_FITS}
    ORDER BY until_s LIMIT 1"""
_CLAIMED = f"{_STATE} INDEXED BY tasks_by_claim WHERE generation = ? AND state = 'doing' AND claim = ?"
_ONE = "generation = ? AND epoch = ? AND number = ?"
_NEW = """INSERT OR IGNORE INTO tasks (generation, epoch, number, place, name, start, records, position, state, errors)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""


class SqliteTasks(TaskStore):
    """A `TaskStore` in the file of `catalog`."""

    def __init__(self, catalog: SqliteCatalog) -> None:
        self._catalog = catalog
        self.url = catalog.url

    def __repr__(self) -> str:
        return f"SqliteTasks({self._catalog!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (SqliteTasks, (self._catalog,))

    def close(self) -> None:
        self._catalog.close()

    # --- queues ---------------------------------------------------------------------------------------------

    def create(self, name: str, generation: int, parameters: str, plan: bytes) -> QueueRecord:
        with self._catalog.writing(durable=True) as connection:
            connection.execute(
                "INSERT OR IGNORE INTO task_queues VALUES (?, ?, ?, 0, 0, x'', ?)", (name, generation, parameters, plan)
            )
            found = _queue(connection, name)
            assert found is not None
            return found

    def replace(
        self, old: QueueRecord, *, generation: int, parameters: str, plan: bytes | None, epoch: int, checkpoint: bytes
    ) -> bool:
        with self._catalog.writing(durable=True) as connection:
            found = _queue(connection, old.name)
            if found is None or found.generation != old.generation:
                return found is not None and found.generation == generation
            connection.execute(
                """UPDATE task_queues SET generation = ?, parameters = ?, epoch = ?, made = 0, checkpoint = ?,
                plan = coalesce(?, plan) WHERE name = ?""",
                (generation, parameters, epoch, checkpoint, plan, old.name),
            )
            connection.execute("DELETE FROM tasks WHERE generation = ?", (old.generation,))
            return True

    def remove(self, name: str) -> bool:
        with self._catalog.writing(durable=True) as connection:
            found = _queue(connection, name)
            if found is None:
                return False
            connection.execute("DELETE FROM tasks WHERE generation = ?", (found.generation,))
            connection.execute("DELETE FROM task_queues WHERE name = ?", (name,))
            return True

    def queue(self, name: str) -> QueueRecord | None:
        with self._catalog.reading() as connection:
            return _queue(connection, name)

    def queues(self) -> list[QueueRecord]:
        with self._catalog.reading() as connection:
            return [_queue_record(row) for row in connection.execute(f"{_QUEUE} ORDER BY name").fetchall()]

    def plan(self, queue: QueueRecord) -> tuple[bytes, bytes] | None:
        with self._catalog.reading() as connection:
            row = connection.execute(
                "SELECT plan, checkpoint FROM task_queues WHERE name = ? AND generation = ?",
                (queue.name, queue.generation),
            ).fetchone()
        return None if row is None else (row[0], row[1])

    # --- epochs ---------------------------------------------------------------------------------------------

    def begin_epoch(self, queue: QueueRecord) -> None:
        with self._catalog.writing(durable=True) as connection:
            connection.execute(
                """UPDATE task_queues SET epoch = epoch + 1, made = 0
                WHERE name = ? AND generation = ? AND epoch = ? AND made""",
                (queue.name, queue.generation, queue.epoch),
            )

    def make(self, queue: QueueRecord, claim: str, tasks: Callable[[], Sequence[NewTask]]) -> bool:
        del claim  # one transaction makes them all, so nobody needs to be their maker
        if self.queue(queue.name) != queue:
            return True  # another worker was quicker, or the queue went on
        rows = _rows(queue, tasks())
        with self._catalog.writing(durable=True) as connection:
            if _queue(connection, queue.name) != queue:
                return True
            connection.executemany(_NEW, rows)
            connection.execute(
                "DELETE FROM tasks WHERE generation = ? AND state = ? AND epoch < ?",
                (queue.generation, DONE, queue.epoch - 1),
            )
            connection.execute("UPDATE task_queues SET made = 1, checkpoint = x'' WHERE name = ?", (queue.name,))
        return True

    def add(self, queue: QueueRecord, tasks: Sequence[NewTask]) -> None:
        with self._catalog.writing(durable=True) as connection:
            if _queue(connection, queue.name) == queue:
                connection.executemany(_NEW, _rows(queue, tasks))

    def drop(self, queue: QueueRecord, numbers: Sequence[int]) -> None:
        with self._catalog.writing(durable=True) as connection:
            keys = [(queue.generation, queue.epoch, number) for number in numbers]
            connection.executemany(f"DELETE FROM tasks WHERE {_ONE}", keys)  # noqa: S608

    # --- leases ---------------------------------------------------------------------------------------------

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
        fits, clock = (position, not_owner, not_owner), self._clock()
        with self._catalog.writing(durable=False) as connection:
            current = _queue(connection, queue.name)
            if current is None or current.generation != queue.generation:
                return None
            row = connection.execute(_CLAIMED, (queue.generation, claim)).fetchone()
            if row is not None:  # given by the call whose answer was lost
                return _leased(queue.generation, _state(row), claim)
            now_s = clock()
            task = _take_over(connection, queue.generation, now_s, lease_s, max_lost, fits=fits)
            if task is None:
                query, values = _TODO, [queue.generation, *fits]
                if position is not None:
                    places = position * BEHIND, (position + 1) * BEHIND
                    query, values = _TODO_AT, [queue.generation, queue.epoch, *places, *fits]
                row = connection.execute(query, values).fetchone()
                if row is None:
                    return None
                task = _state(row)
            task = task._replace(token=task.token + 1)
            lease = _leased(queue.generation, task, claim)
            _update(
                connection,
                lease,
                "state = ?, token = ?, claim = ?, owner = ?, since_s = ?, until_s = ?",
                (DOING, task.token, claim, task.owner if not_owner else worker, now_s, now_s + lease_s),
            )
            return lease

    def open(self, queue: QueueRecord) -> Open:
        clock = self._clock()
        with self._catalog.reading() as connection:
            tasks, until_s = connection.execute(
                """SELECT count(*), min(CASE state WHEN ?2 THEN until_s ELSE 0 END)
                FROM tasks INDEXED BY tasks_by_state WHERE generation = ?1 AND state IN (?2, ?3)""",
                (queue.generation, DOING, TODO),
            ).fetchone()
        return Open(tasks, max(0.0, (until_s or 0) - clock()))

    def _change_held(
        self, lease: Leased, change: Callable[[TaskState], Changes | None], *, lease_s: float = 0.0, durable: bool
    ) -> None:
        clock = self._clock()
        with self._catalog.writing(durable=durable) as connection:
            row = connection.execute(f"{_STATE} WHERE {_ONE}", _key(lease)).fetchone()
            task = None if row is None else _state(row)
            if task is None or (task.token, row[-1]) != (lease.token, lease.claim):
                raise lease_lost(lease, task)
            changes = change(task)
            if changes is None:
                return
            behind = changes.pop("behind", 0)
            if "errors" in changes:
                changes["errors"] = json.dumps(changes["errors"])
            if lease_s:
                changes["until_s"] = clock() + lease_s
            columns = "".join(f", {name} = ?" for name in changes)
            _update(connection, lease, f"place = place + ?{columns}", (behind, *changes.values()))

    # --- looking on -----------------------------------------------------------------------------------------

    def retry(self, queue: QueueRecord, number: int | None = None) -> int:
        with self._catalog.writing(durable=True) as connection:
            return connection.execute(
                """UPDATE tasks SET state = ?, failures = 0, lost = 0
                WHERE generation = ? AND state = ? AND (? IS NULL OR number = ?)""",
                (TODO, queue.generation, FAILED, number, number),
            ).rowcount

    def counts(self, queue: QueueRecord) -> list[Count]:
        with self._catalog.reading() as connection:
            rows = connection.execute(
                """SELECT epoch, state, count(*), sum(records), sum(position) FROM tasks WHERE generation = ?
                GROUP BY epoch, state ORDER BY epoch, state""",
                (queue.generation,),
            ).fetchall()
        return [Count(*row) for row in rows]

    def steps(self, queue: QueueRecord) -> list[StepCount]:
        with self._catalog.reading() as connection:
            rows = connection.execute(
                """SELECT position, state, CASE state WHEN 'done' THEN '' ELSE owner END AS held, count(*) FROM tasks
                WHERE generation = ? AND epoch = ? GROUP BY position, state, held ORDER BY position, state, held""",
                (queue.generation, queue.epoch),
            ).fetchall()
        return [StepCount(*row) for row in rows]

    def tasks(self, queue: QueueRecord, state: str) -> list[TaskState]:
        return self._read(f"{_BY_STATE} ORDER BY epoch, number", queue.generation, state)

    def progress(self, queue: QueueRecord) -> list[TaskState]:
        query = f"{_STATE} WHERE generation = ? AND epoch = ? ORDER BY number"
        return self._read(query, queue.generation, queue.epoch)

    def put_back(self, queue: QueueRecord) -> list[TaskState]:
        query = f"""{_STATE} INDEXED BY tasks_by_state WHERE generation = ? AND state IN (?, ?) AND epoch < ?
            ORDER BY epoch, number"""
        return self._read(query, queue.generation, TODO, DOING, queue.epoch)

    def _read(self, query: str, *values: object) -> list[TaskState]:
        with self._catalog.reading() as connection:
            rows = connection.execute(query, values).fetchall()
        now_s = self._catalog.now_s()
        return [_state(row, now_s) for row in rows]

    def _clock(self) -> Callable[[], float]:
        """Return the catalog's clock for a transaction, in which the catalog cannot be asked."""
        ahead_s = self._catalog.now_s() - elapsed_s()
        return lambda: ahead_s + elapsed_s()


def _take_over(
    connection: sqlite3.Connection,
    generation: int,
    now_s: float,
    lease_s: float,
    max_lost: int,
    *,
    fits: tuple[int | None, str, str],
) -> TaskState | None:
    """Return the task whose lease has expired first, with its loss noted. Fail those that were lost too often."""
    while True:
        row = connection.execute(_EXPIRED, (generation, now_s, *fits)).fetchone()
        row = row or connection.execute(_AHEAD, (generation, now_s + lease_s + CLOCK_SLACK_S, *fits)).fetchone()
        if row is None:
            return None
        task = _state(row, now_s)
        state = FAILED if task.lost + 1 >= max_lost else DOING
        errors = json.dumps(with_error(task, lease_expired(task.owner, task.position)))
        lease = _leased(generation, task, "")
        _update(connection, lease, "state = ?, lost = lost + 1, errors = ?", (state, errors))
        if state == DOING:
            return task


def _rows(queue: QueueRecord, tasks: Sequence[NewTask]) -> list[tuple[Any, ...]]:
    return [(queue.generation, *task[:-1], json.dumps(task.errors)) for task in tasks]


def _queue(connection: sqlite3.Connection, name: str) -> QueueRecord | None:
    row = connection.execute(f"{_QUEUE} WHERE name = ?", (name,)).fetchone()
    return None if row is None else _queue_record(row)


def _queue_record(row: tuple[str, int, str, int, int]) -> QueueRecord:
    return QueueRecord(*row[:4], made=bool(row[4]))


def _state(row: tuple[Any, ...], now_s: float = 0.0) -> TaskState:
    *same, since_s, until_s, failures, lost, errors, _claim = row
    return TaskState._make([*same, now_s - since_s, until_s - now_s, failures, lost, tuple(json.loads(errors))])


def _update(connection: sqlite3.Connection, lease: Leased, columns: str, values: tuple[Any, ...]) -> None:
    connection.execute(f"UPDATE tasks SET {columns} WHERE {_ONE}", (*values, *_key(lease)))  # noqa: S608


def _key(lease: Leased) -> tuple[int, int, int]:
    return lease.generation, lease.epoch, lease.number


def _leased(generation: int, task: TaskState, claim: str) -> Leased:
    return Leased(generation, *task[:6], task.token, claim)
