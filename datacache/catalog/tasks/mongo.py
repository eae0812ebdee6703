"""Task queues in the MongoDB of a shared catalog, without transactions.

Used through `catalog.open`. Any thread and process may call. `docs/CONCURRENCY.md` says why no crash in between does
harm.

    task_queues  {_id: name, g, parameters, plan, epoch, made, checkpoint, maker, maker_until, stale: [g], removed}
    tasks        {_id: "generation:epoch:number", g, epoch, number, lane, place, open, state, name, start, records,
                  position, token, claim, owner, since, until, failures, lost, errors}

A queue is one document, so a change of a queue as a whole is one conditional update of it:

- *An epoch begins* with `epoch` + 1 and `made` false. The first worker that sees this becomes its maker, for some
seconds at a time, inserts the tasks, and sets `made`. Another maker follows one that died and inserts what is missing.
Nothing is leased before `made`.
- *Another generation* begins with another `g` and `made` false, and `stale` lists the earlier one. The process that did
  this deletes the old tasks; if it is killed, the maker of the new tasks does.

A task is a document, and each change of a task is one update of it, on condition of the lease it was given; the
server's clock says what has expired. `lane` is the epoch, or -1 for a task that was put back; a worker takes from these
two only. So nobody is given a task of an old epoch that was removed and that a maker, asleep for long, inserts again.
`open` is true while a task is to do or being done: unlike `state` it does not change while the task goes to and fro, so
a search by it misses none."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any

from pymongo import ReturnDocument
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError
from pymongo.read_concern import ReadConcern

from datacache.catalog.mongo.client import MongoDatabase, insert_new, pause_after_race, retried
from datacache.catalog.tasks.base import (
    BEHIND,
    CLOCK_SLACK_S,
    DOING,
    DONE,
    ERRORS_KEPT,
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
    lease_lost,
)

PUT_BACK = -1
"""The lane of tasks that had failed."""
_MAKER_S = 3.0
"""A maker that takes longer for one batch is replaced by another: two at once do no harm."""
_BATCH = 2000
_LONG_AGO = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_SHOWN = {"g": 1, "parameters": 1, "epoch": 1, "made": 1}

_Document = dict[str, Any]


def _task_id(generation: int, epoch: int, number: int) -> str:
    return f"{generation}:{epoch}:{number}"


class MongoTasks(TaskStore):
    """A `TaskStore` in the database that `url` names (see `MongoCatalog`)."""

    def __init__(self, url: str) -> None:
        self._secret_url = url
        self._database = MongoDatabase(url)
        self.url = self._database.url

    def __repr__(self) -> str:
        return f"MongoTasks({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (MongoTasks, (self._secret_url,))

    def close(self) -> None:
        self._database.close()

    def create(self, name: str, generation: int, parameters: str, plan: bytes) -> QueueRecord:
        with self._database.errors():
            self._tasks.create_index([("g", 1), ("state", 1), ("lane", 1), ("place", 1)])
            self._tasks.create_index([("g", 1), ("open", 1), ("lane", 1)])
            self._tasks.create_index([("g", 1), ("epoch", 1), ("number", 1)])
            for field in ("until", "claim"):
                self._tasks.create_index([("g", 1), (field, 1)], partialFilterExpression={"state": DOING})
            while True:
                try:
                    self._queues.insert_one(_new_queue(name, generation, parameters, plan))
                except DuplicateKeyError:
                    self._finish_removal(name)
                found = self.queue(name)
                if found is not None:
                    return found

    def replace(
        self, old: QueueRecord, *, generation: int, parameters: str, plan: bytes | None, epoch: int, checkpoint: bytes
    ) -> bool:
        fresh = _new_queue(old.name, generation, parameters, plan or b"")
        change = {key: fresh[key] for key in ("g", "parameters", "made", "maker", "maker_until")}
        change |= {"epoch": epoch, "checkpoint": checkpoint} | ({} if plan is None else {"plan": plan})
        with self._database.errors():
            self._queues.update_one(
                {"_id": old.name, "g": old.generation, "removed": False},
                {"$set": change, "$push": {"stale": old.generation}},
            )
            found = self._queues.find_one({"_id": old.name, "removed": False}, {"g": 1})
            if found is None or found["g"] != generation:
                return False
            self._clean(old.name)
            return True

    def remove(self, name: str) -> bool:
        with self._database.errors():
            found = self._queues.find_one_and_update({"_id": name, "removed": False}, {"$set": {"removed": True}})
            self._finish_removal(name)
        return found is not None

    def queue(self, name: str) -> QueueRecord | None:
        with self._database.errors():
            found = self._queues.find_one({"_id": name, "removed": False}, _SHOWN)
        return None if found is None else _queue_record(found)

    def queues(self) -> list[QueueRecord]:
        with self._database.errors():
            return [_queue_record(found) for found in self._queues.find({"removed": False}, _SHOWN).sort("_id", 1)]

    def plan(self, queue: QueueRecord) -> tuple[bytes, bytes] | None:
        with self._database.errors():
            found = self._queues.find_one({"_id": queue.name, "g": queue.generation}, {"plan": 1, "checkpoint": 1})
        return None if found is None else (bytes(found["plan"]), bytes(found["checkpoint"]))

    # --- epochs ---------------------------------------------------------------------------------------------

    def begin_epoch(self, queue: QueueRecord) -> None:
        with self._database.errors():
            self._queues.update_one(
                _at(queue) | {"made": True},
                {"$set": {"epoch": queue.epoch + 1, "made": False, "maker": "", "maker_until": _LONG_AGO}},
            )

    def make(self, queue: QueueRecord, claim: str, tasks: Callable[[], Sequence[NewTask]]) -> bool:
        with self._database.errors():
            if not self._extend(queue, claim):
                return self.queue(queue.name) != queue
            self._clean(queue.name)
            rows = tasks()
            for begin in range(0, len(rows), _BATCH):
                if not self._extend(queue, claim):
                    return False  # this took too long, and another one is at it
                self._insert(queue, rows[begin : begin + _BATCH])
            back = [
                _task_id(queue.generation, t.epoch, t.number) for t in rows if t.epoch < queue.epoch and t.state == TODO
            ]
            if back:  # only now: a maker that slept for long would insert them into this lane once more
                if not self._extend(queue, claim):
                    return False
                which = {"_id": {"$in": back}, "state": TODO, "lane": {"$gte": 0}}
                self._tasks.update_many(which, {"$set": {"lane": PUT_BACK}})
            mine = {"g": queue.generation}
            self._tasks.delete_many(mine | {"state": DONE, "epoch": {"$lt": queue.epoch - 1}})
            self._tasks.delete_many(mine | {"state": TODO, "lane": {"$gte": 0, "$lt": queue.epoch - 1}})
            self._queues.update_one(
                _at(queue) | {"made": False, "maker": claim}, {"$set": {"made": True, "checkpoint": b""}}
            )
        return True

    def add(self, queue: QueueRecord, tasks: Sequence[NewTask]) -> None:
        """See `TaskStore.add`. Where the queue is removed at the same moment, tasks may stay that nobody finds."""
        if self.queue(queue.name) == queue:
            with self._database.errors():
                self._insert(queue, tasks)

    def drop(self, queue: QueueRecord, numbers: Sequence[int]) -> None:
        ids = [_task_id(queue.generation, queue.epoch, number) for number in numbers]
        with self._database.errors():
            retried(lambda: self._tasks.delete_many({"_id": {"$in": ids}}))

    def _extend(self, queue: QueueRecord, claim: str) -> bool:
        """Become, or stay, the maker for the next seconds. Return False where another one is."""
        # As of leases: one that ends too late was given before the clock was set back.
        ended = [{"$lte": ["$maker_until", "$$NOW"]}, {"$gt": ["$maker_until", _later(_MAKER_S + CLOCK_SLACK_S)]}]
        free = {"$or": [{"maker": claim}, *({"$expr": each} for each in ended)]}
        until = _later(_MAKER_S)
        found = self._queues.find_one_and_update(
            _at(queue) | {"made": False} | free,
            [{"$set": {"maker": claim, "maker_until": until}}],
            projection={"_id": 1},
            return_document=ReturnDocument.AFTER,
        )
        return found is not None

    def _insert(self, queue: QueueRecord, rows: Sequence[NewTask]) -> None:
        # Some may be there already, from a maker that has died.
        insert_new(self._tasks, [_new_task(queue, row) for row in rows])

    # --- generations that are over ---------------------------------------------------------------------------

    def _clean(self, name: str) -> None:
        found = self._queues.find_one({"_id": name}, {"stale": 1})
        for generation in found["stale"] if found else ():
            self._tasks.delete_many({"g": generation})
            self._queues.update_one({"_id": name}, {"$pull": {"stale": generation}})

    def _finish_removal(self, name: str) -> None:
        """Delete a queue that is marked as removed, its tasks first: nobody would find them afterwards."""
        found = self._queues.find_one({"_id": name, "removed": True}, {"g": 1})
        if found is not None:
            self._clean(name)
            self._tasks.delete_many({"g": found["g"]})
            self._queues.delete_one({"_id": name, "g": found["g"], "removed": True})

    @property
    def _queues(self) -> Collection[_Document]:
        return self._latest("task_queues")

    @property
    def _tasks(self) -> Collection[_Document]:
        return self._latest("tasks")

    def _latest(self, name: str) -> Collection[_Document]:
        # Not `majority`: each decision ends in a write that waits for one, and so for all that it has seen.
        return self._database.collection(name).with_options(read_concern=ReadConcern("local"))

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
        given: _Document = {
            "token": {"$add": ["$token", 1]},
            "claim": claim,
            "owner": "$owner" if not_owner else {"$literal": worker},
            "since": "$$NOW",
            "until": _later(lease_s),
        }
        lost = {"$add": ["$lost", 1]}
        state = {"$cond": [{"$gte": [lost, max_lost]}, FAILED, DOING]}
        expired = {
            "$concat": ["the lease of ", "$owner", " expired, its last report at record ", {"$toString": "$position"}]
        }
        take_over: list[_Document] = [
            {"$set": given | {"state": state, "lost": lost, "errors": _with_error(expired)}},
            {"$set": {"open": {"$eq": ["$state", DOING]}}},
        ]
        mine: _Document = {"g": queue.generation, "lane": {"$in": [PUT_BACK, queue.epoch]}}
        mine |= {} if position is None else {"position": position}
        mine |= {"owner": {"$ne": not_owner}} if not_owner else {}
        to_do = mine | {"state": TODO}
        if position is not None:
            to_do |= {"place": {"$gte": position * BEHIND, "$lt": (position + 1) * BEHIND}}
        ended = [{"$lte": ["$until", "$$NOW"]}, {"$gt": ["$until", _later(lease_s + CLOCK_SLACK_S)]}]
        has_expired = mine | {"state": DOING, "$or": [{"$expr": each} for each in ended]}

        def attempt() -> Leased | None:
            found = self._tasks.find_one({"g": queue.generation, "state": DOING, "claim": claim})
            if found is not None:  # given by the call whose answer was lost
                return _leased(found)
            while True:
                found = self._change(has_expired, take_over, sort=[("until", 1)])
                if found is None:
                    found = self._change(to_do, [{"$set": given | {"state": DOING}}], sort=[("lane", 1), ("place", 1)])
                    return None if found is None else _leased(found)
                if found["state"] == DOING:
                    return _leased(found)

        with self._database.errors():
            return retried(attempt)

    def open(self, queue: QueueRecord) -> Open:
        which = {"g": queue.generation, "lane": {"$in": [PUT_BACK, queue.epoch]}, "open": True}
        left = {"$cond": [{"$eq": ["$state", DOING]}, {"$subtract": ["$until", "$$NOW"]}, 0]}
        group = {"_id": None, "tasks": {"$sum": 1}, "wait_ms": {"$min": left}}
        with self._database.errors():
            found = list(self._database.collection("tasks").aggregate([{"$match": which}, {"$group": group}]))
        return Open(found[0]["tasks"], max(0.0, found[0]["wait_ms"] / 1000)) if found else Open(0, 0.0)

    def _change_held(
        self, lease: Leased, change: Callable[[TaskState], Changes | None], *, lease_s: float = 0.0, durable: bool
    ) -> None:
        del durable  # every write is
        id = _task_id(lease.generation, lease.epoch, lease.number)

        def attempt() -> bool:
            found = self._tasks.find_one({"_id": id})
            task = None if found is None else _state(found | {"held_ms": 0, "left_ms": 0})
            if found is None or task is None or (found["token"], found["claim"]) != (lease.token, lease.claim):
                raise lease_lost(lease, task)
            changes = change(task)
            if changes is None:
                return True
            behind, state = changes.pop("behind", 0), changes["state"]
            update: _Document = {name: {"$literal": value} for name, value in changes.items()}
            update |= {"open": state in (TODO, DOING), "place": {"$add": ["$place", behind]}}
            if lease_s:
                update["until"] = _later(lease_s)
            same = {name: found[name] for name in ("_id", "token", "claim", "state", "position", "lost", "failures")}
            return self._tasks.update_one(same, [{"$set": update}]).matched_count == 1

        with self._database.errors():
            while not retried(attempt):  # changed meanwhile, by another thread of the worker or by who takes it over
                pause_after_race()

    def _change(
        self, condition: _Document, update: list[_Document], sort: list[tuple[str, int]] | None = None
    ) -> _Document | None:
        """Update one task that fits. Return it as it is afterwards, or None."""
        return self._tasks.find_one_and_update(condition, update, sort=sort, return_document=ReturnDocument.AFTER)

    # --- looking on -----------------------------------------------------------------------------------------

    def retry(self, queue: QueueRecord, number: int | None = None) -> int:
        which = {"g": queue.generation, "state": FAILED} | ({} if number is None else {"number": number})
        back = {"state": TODO, "open": True, "lane": PUT_BACK, "failures": 0, "lost": 0}
        with self._database.errors():
            return self._tasks.update_many(which, {"$set": back}).modified_count

    def counts(self, queue: QueueRecord) -> list[Count]:
        group = {
            "_id": {"epoch": "$epoch", "state": "$state"},
            "tasks": {"$sum": 1},
            "records": {"$sum": "$records"},
            "used": {"$sum": "$position"},
        }
        with self._database.errors():
            found = list(self._tasks.aggregate([{"$match": {"g": queue.generation}}, {"$group": group}]))
        return sorted(
            Count(f["_id"]["epoch"], f["_id"]["state"], f["tasks"], f["records"], f["used"])
            for f in found
            if f["_id"]["epoch"] >= queue.epoch - 1 or f["_id"]["state"] == FAILED
        )

    def steps(self, queue: QueueRecord) -> list[StepCount]:
        held = {"$cond": [{"$eq": ["$state", DONE]}, "", "$owner"]}
        group = {"_id": {"position": "$position", "state": "$state", "owner": held}, "tasks": {"$sum": 1}}
        which = {"g": queue.generation, "epoch": queue.epoch}
        with self._database.errors():
            found = list(self._tasks.aggregate([{"$match": which}, {"$group": group}]))
        return sorted(
            StepCount(each["_id"]["position"], each["_id"]["state"], each["_id"]["owner"], each["tasks"])
            for each in found
        )

    def tasks(self, queue: QueueRecord, state: str) -> list[TaskState]:
        return self._read({"g": queue.generation, "state": state})

    def progress(self, queue: QueueRecord) -> list[TaskState]:
        return self._read({"g": queue.generation, "epoch": queue.epoch})

    def put_back(self, queue: QueueRecord) -> list[TaskState]:
        return self._read({"g": queue.generation, "lane": PUT_BACK, "open": True, "epoch": {"$lt": queue.epoch}})

    def _read(self, which: _Document) -> list[TaskState]:
        ages = {"held_ms": {"$subtract": ["$$NOW", "$since"]}, "left_ms": {"$subtract": ["$until", "$$NOW"]}}
        steps = [{"$match": which}, {"$sort": {"epoch": 1, "number": 1}}, {"$set": ages}]
        with self._database.errors(), self._tasks.aggregate(steps, allowDiskUse=True) as found:
            return [_state(document) for document in found]


def _at(queue: QueueRecord) -> _Document:
    return {"_id": queue.name, "g": queue.generation, "epoch": queue.epoch, "removed": False}


def _queue_record(found: _Document) -> QueueRecord:
    return QueueRecord(found["_id"], int(found["g"]), found["parameters"], found["epoch"], made=found["made"])


def _new_queue(name: str, generation: int, parameters: str, plan: bytes) -> _Document:
    return {
        "_id": name,
        "g": generation,
        "parameters": parameters,
        "plan": plan,
        "epoch": 0,
        "made": False,
        "checkpoint": b"",
        "maker": "",
        "maker_until": _LONG_AGO,
        "stale": [],
        "removed": False,
    }


def _new_task(queue: QueueRecord, row: NewTask) -> _Document:
    return {
        "_id": _task_id(queue.generation, row.epoch, row.number),
        "g": queue.generation,
        **row._asdict(),
        "errors": list(row.errors),
        "lane": row.epoch,
        "open": row.state not in (DONE, FAILED),
        "token": 0,
        "claim": "",
        "owner": "",
        "since": _LONG_AGO,
        "until": _LONG_AGO,
        "failures": 0,
        "lost": 0,
    }


def _later(seconds: float) -> _Document:
    return {"$add": ["$$NOW", round(seconds * 1000)]}


def _with_error(error: _Document) -> _Document:
    return {"$slice": [{"$concatArrays": ["$errors", [error]]}, -ERRORS_KEPT]}


def _leased(found: _Document) -> Leased:
    return Leased(int(found["g"]), *(found[field] for field in Leased._fields[1:]))


def _state(found: _Document) -> TaskState:
    made = {"held_s": found["held_ms"] / 1000, "left_s": found["left_ms"] / 1000, "errors": tuple(found["errors"])}
    return TaskState._make(made[field] if field in made else found[field] for field in TaskState._fields)
