"""The queues' documents in MongoDB, and how the tasks of an epoch come and go.

The base of `tasks_mongo.MongoTasks`.

    task_queues  {_id: name, g, parameters, plan, epoch, made, checkpoint, maker, maker_until, stale: [g], removed}

A queue is one document, so whatever changes a queue as a whole is one conditional update of it:

- *An epoch begins* with `epoch` + 1 and `made` false. Who sees that becomes its maker, for some seconds at a time,
  inserts the tasks, and sets `made`. A maker that died is followed by another, who inserts what is missing. Nothing is
  leased before `made`.
- *Another generation* begins with another `g` and `made` false, and the earlier one is noted in `stale`. Its tasks are
  deleted by whoever did this, and for the case that it is killed, by the maker of the new generation's tasks.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any

from pymongo import ReturnDocument
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, DuplicateKeyError
from pymongo.read_concern import ReadConcern

from datacache.catalog.mongo_client import MongoDatabase
from datacache.catalog.tasks import DOING, DONE, FAILED, TODO, NewTask, QueueRecord

PUT_BACK = -1
"""The lane of tasks that had failed."""
_MAKER_S = 3.0
"""How long a maker may take for one batch, before another one goes on: two at once do no harm."""
_BATCH = 2000
_DUPLICATE_KEY = 11000
_LONG_AGO = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_SHOWN = {"g": 1, "parameters": 1, "epoch": 1, "made": 1}

_Document = dict[str, Any]


def task_id(generation: int, epoch: int, number: int) -> str:
    """The `_id` of a task."""
    return f"{generation}:{epoch}:{number}"


class MongoQueues:
    """What concerns queues as a whole."""

    def __init__(self, database: MongoDatabase) -> None:
        self._database = database
        self.url = database.url

    def close(self) -> None:
        """Close this process's client. A later call makes a new one."""
        self._database.close()

    def create(self, name: str, generation: int, parameters: str, plan: bytes) -> QueueRecord:
        """Make a queue, or the one that is there; see the protocol."""
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
        """Begin another generation; see the protocol."""
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
        """Forget a queue and its tasks; whether it was there."""
        with self._database.errors():
            found = self._queues.find_one_and_update({"_id": name, "removed": False}, {"$set": {"removed": True}})
            self._finish_removal(name)
        return found is not None

    def queue(self, name: str) -> QueueRecord | None:
        """The queue, or None."""
        with self._database.errors():
            found = self._queues.find_one({"_id": name, "removed": False}, _SHOWN)
        return None if found is None else _queue_record(found)

    def queues(self) -> list[QueueRecord]:
        """All of them, by name."""
        with self._database.errors():
            return [_queue_record(found) for found in self._queues.find({"removed": False}, _SHOWN).sort("_id", 1)]

    def plan(self, queue: QueueRecord) -> tuple[bytes, bytes] | None:
        """The plan and the checkpoint; see the protocol."""
        with self._database.errors():
            found = self._queues.find_one({"_id": queue.name, "g": queue.generation}, {"plan": 1, "checkpoint": 1})
        return None if found is None else (bytes(found["plan"]), bytes(found["checkpoint"]))

    # --- epochs ---------------------------------------------------------------------------------------------

    def begin_epoch(self, queue: QueueRecord) -> None:
        """Go on to the next epoch; see the protocol."""
        with self._database.errors():
            self._queues.update_one(
                _at(queue) | {"made": True},
                {"$set": {"epoch": queue.epoch + 1, "made": False, "maker": "", "maker_until": _LONG_AGO}},
            )

    def make(self, queue: QueueRecord, claim: str, tasks: Callable[[], Sequence[NewTask]]) -> bool:
        """Make the tasks of the epoch; see the protocol."""
        with self._database.errors():
            if not self._extend(queue, claim):
                return self.queue(queue.name) != queue
            self._clean(queue.name)
            rows = tasks()
            for begin in range(0, len(rows), _BATCH):
                if not self._extend(queue, claim):
                    return False  # it took too long, and another one is at it
                self._insert(queue, rows[begin : begin + _BATCH])
            back = [
                task_id(queue.generation, t.epoch, t.number) for t in rows if t.epoch < queue.epoch and t.state == TODO
            ]
            if back:  # not in this lane from the start: a maker who slept for long would put them in there once more
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

    def _extend(self, queue: QueueRecord, claim: str) -> bool:
        """Whether we are the maker for the next seconds."""
        free = {"$or": [{"maker": claim}, {"$expr": {"$lte": ["$maker_until", "$$NOW"]}}]}
        until = {"$add": ["$$NOW", round(_MAKER_S * 1000)]}
        found = self._queues.find_one_and_update(
            _at(queue) | {"made": False} | free,
            [{"$set": {"maker": claim, "maker_until": until}}],
            projection={"_id": 1},
            return_document=ReturnDocument.AFTER,
        )
        return found is not None

    def _insert(self, queue: QueueRecord, rows: Sequence[NewTask]) -> None:
        try:
            self._tasks.insert_many([_new_task(queue, row) for row in rows], ordered=False)
        except BulkWriteError as exc:
            errors = exc.details.get("writeErrors", [])
            if exc.details.get("writeConcernErrors") or any(error["code"] != _DUPLICATE_KEY for error in errors):
                raise  # otherwise a maker before this one has put them in

    # --- generations that are over ---------------------------------------------------------------------------

    def _clean(self, name: str) -> None:
        found = self._queues.find_one({"_id": name}, {"stale": 1})
        for generation in found["stale"] if found else ():
            self._tasks.delete_many({"g": generation})
            self._queues.update_one({"_id": name}, {"$pull": {"stale": generation}})

    def _finish_removal(self, name: str) -> None:
        """Delete a queue that is marked as removed, its tasks first: they would be found by nobody afterwards."""
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
        # Not what a majority has: each decision ends in a write that waits for one, and so for all that it has seen.
        return self._database.collection(name).with_options(read_concern=ReadConcern("local"))


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
        "_id": task_id(queue.generation, row.epoch, row.number),
        "g": queue.generation,
        "epoch": row.epoch,
        "number": row.number,
        "lane": row.epoch,
        "place": row.place,
        "open": row.state not in (DONE, FAILED),
        "state": row.state,
        "name": row.name,
        "start": row.start,
        "records": row.records,
        "position": row.position,
        "token": 0,
        "claim": "",
        "owner": "",
        "since": _LONG_AGO,
        "until": _LONG_AGO,
        "failures": 0,
        "lost": 0,
        "errors": list(row.errors),
    }
