"""Task queues in the MongoDB of a shared catalog, without transactions.

Used through `catalog.tasks`. A task is a document, and everything that happens to a task is one update of it, on
condition of the lease it was given; the server's clock says what has expired. `tasks_mongo_queues` has the documents of
queues and how epochs are made; `docs/CONCURRENCY.md` says why no crash in between does harm.

    tasks  {_id: "generation:epoch:number", g, epoch, number, lane, place, open, state, name, start, records, position,
            token, claim, owner, since, until, failures, lost, errors}

`lane` is the epoch, or -1 for a task that was put back; a worker takes from these two only. So a task that was removed
with its old epoch, and that a maker of that epoch who was asleep for long puts in again, is never given to anybody.
`open` is true while a task is to do or being done: unlike `state` it does not change while the task goes to and fro, so
a search by it misses none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pymongo import ReturnDocument

from datacache.catalog.mongo_client import MongoDatabase, retried
from datacache.catalog.tasks import (
    BEHIND,
    CLOCK_SLACK_S,
    DOING,
    DONE,
    ERROR_CHARACTERS,
    ERRORS_KEPT,
    FAILED,
    TODO,
    Count,
    Leased,
    Open,
    QueueRecord,
    TaskState,
    lease_lost,
)
from datacache.catalog.tasks_mongo_queues import PUT_BACK, MongoQueues, task_id

_Document = dict[str, Any]


class MongoTasks(MongoQueues):
    """The queues in the database that `url` names (see `MongoCatalog`)."""

    def __init__(self, url: str) -> None:
        self._secret_url = url
        super().__init__(MongoDatabase(url))

    def __repr__(self) -> str:
        return f"MongoTasks({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (MongoTasks, (self._secret_url,))

    # --- leases ---------------------------------------------------------------------------------------------

    def lease(self, queue: QueueRecord, worker: str, claim: str, *, lease_s: float, max_lost: int) -> Leased | None:
        """Lease a task; see the protocol."""
        given: _Document = {
            "token": {"$add": ["$token", 1]},
            "claim": claim,
            "owner": {"$literal": worker},
            "since": "$$NOW",
            "until": _later(lease_s),
        }
        lost = {"$add": ["$lost", 1]}
        state = {"$cond": [{"$gte": [lost, max_lost]}, FAILED, DOING]}
        expired = {"$concat": ["the lease of ", "$owner", " expired, its last report at record ", _text("$position")]}
        take_over: list[_Document] = [
            {"$set": given | {"state": state, "lost": lost, "errors": _with_error(expired)}},
            {"$set": {"open": {"$eq": ["$state", DOING]}}},
        ]
        mine = {"g": queue.generation, "lane": {"$in": [PUT_BACK, queue.epoch]}}
        ended = [{"$lte": ["$until", "$$NOW"]}, {"$gt": ["$until", _later(lease_s + CLOCK_SLACK_S)]}]
        has_expired = mine | {"state": DOING, "$or": [{"$expr": each} for each in ended]}

        def attempt() -> Leased | None:
            found = self._tasks.find_one({"g": queue.generation, "state": DOING, "claim": claim})
            if found is not None:  # given by the call whose answer was lost
                return _leased(found)
            while True:
                found = self._change(has_expired, take_over, sort=[("until", 1)])
                if found is None:
                    found = self._change(
                        mine | {"state": TODO}, [{"$set": given | {"state": DOING}}], sort=[("lane", 1), ("place", 1)]
                    )
                    return None if found is None else _leased(found)
                if found["state"] == DOING:
                    return _leased(found)

        with self._database.errors():
            return retried(attempt)

    def open(self, queue: QueueRecord) -> Open:
        """What is left of the epoch; see the protocol."""
        left = {"$cond": [{"$eq": ["$state", DOING]}, {"$subtract": ["$until", "$$NOW"]}, 0]}
        with self._database.errors():
            found = list(
                self._database.collection("tasks").aggregate(
                    [
                        {
                            "$match": {
                                "g": queue.generation,
                                "lane": {"$in": [PUT_BACK, queue.epoch]},
                                "open": True,
                            }
                        },
                        {"$group": {"_id": None, "tasks": {"$sum": 1}, "wait_ms": {"$min": left}}},
                    ]
                )
            )
        return Open(found[0]["tasks"], max(0.0, found[0]["wait_ms"] / 1000)) if found else Open(0, 0.0)

    def report(self, lease: Leased, position: int, *, lease_s: float) -> None:
        """So many records are used; see the protocol."""
        new = {"$max": ["$position", position]}
        update = [
            {
                "$set": {
                    "position": new,
                    "lost": {"$cond": [{"$gt": [position, "$position"]}, 0, "$lost"]},
                    "state": {"$cond": [{"$gte": [new, "$records"]}, DONE, DOING]},
                    "open": {"$lt": [new, "$records"]},
                    "until": _later(lease_s),
                }
            }
        ]
        self._change_held(lease, update, done=lambda found: found["state"] == DONE and position <= found["position"])

    def release(self, lease: Leased) -> None:
        """Give the task back; see the protocol."""
        self._change_held(lease, [{"$set": {"state": TODO}}], done=lambda _found: True)

    def fail(self, lease: Leased, error: str, *, max_failures: int) -> None:
        """The task could not be done; see the protocol."""
        failed = {"$gte": [{"$add": ["$failures", 1]}, max_failures]}
        update = [
            {
                "$set": {
                    "failures": {"$add": ["$failures", 1]},
                    "state": {"$cond": [failed, FAILED, TODO]},
                    "open": {"$not": [failed]},
                    "place": {"$add": ["$place", BEHIND]},
                    "errors": _with_error({"$literal": error[:ERROR_CHARACTERS]}),
                }
            }
        ]
        self._change_held(lease, update, done=lambda found: found["state"] in (TODO, FAILED))

    def _change_held(self, lease: Leased, update: list[_Document], *, done: Callable[[_Document], bool]) -> None:
        """Change a task if this is its lease. `done` tells from a task that is not held any more, but was with this
        lease, whether this change is why."""
        id = task_id(lease.generation, lease.epoch, lease.number)
        held = {"_id": id, "token": lease.token, "claim": lease.claim, "state": DOING}

        def attempt() -> None:
            if self._change(held, update) is not None:
                return
            found = self._tasks.find_one({"_id": id})
            if found is None:
                raise lease_lost(lease, None)
            if (found["token"], found["claim"]) != (lease.token, lease.claim) or not done(found):
                raise lease_lost(lease, _state(found | {"held_ms": 0, "left_ms": 0}))

        with self._database.errors():
            retried(attempt)

    def _change(
        self, condition: _Document, update: list[_Document], sort: list[tuple[str, int]] | None = None
    ) -> _Document | None:
        """One task that fits, as it is after the update, or None."""
        return self._tasks.find_one_and_update(condition, update, sort=sort, return_document=ReturnDocument.AFTER)

    # --- looking on -----------------------------------------------------------------------------------------

    def retry(self, queue: QueueRecord, number: int | None = None) -> int:
        """Put failed tasks back; how many."""
        which = {"g": queue.generation, "state": FAILED} | ({} if number is None else {"number": number})
        back = {"state": TODO, "open": True, "lane": PUT_BACK, "failures": 0, "lost": 0}
        with self._database.errors():
            return self._tasks.update_many(which, {"$set": back}).modified_count

    def counts(self, queue: QueueRecord) -> list[Count]:
        """How many tasks there are, by epoch and state."""
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

    def tasks(self, queue: QueueRecord, state: str) -> list[TaskState]:
        """The tasks in this state, by epoch and number."""
        return self._read({"g": queue.generation, "state": state})

    def progress(self, queue: QueueRecord) -> list[TaskState]:
        """All tasks of the epoch, by number."""
        return self._read({"g": queue.generation, "epoch": queue.epoch})

    def put_back(self, queue: QueueRecord) -> list[TaskState]:
        """Those of earlier epochs that are to do or being done; see the protocol."""
        return self._read({"g": queue.generation, "lane": PUT_BACK, "open": True, "epoch": {"$lt": queue.epoch}})

    def _read(self, which: _Document) -> list[TaskState]:
        ages = {"held_ms": {"$subtract": ["$$NOW", "$since"]}, "left_ms": {"$subtract": ["$until", "$$NOW"]}}
        steps = [{"$match": which}, {"$sort": {"epoch": 1, "number": 1}}, {"$set": ages}]
        with self._database.errors(), self._tasks.aggregate(steps, allowDiskUse=True) as found:
            return [_state(document) for document in found]


def _later(seconds: float) -> _Document:
    return {"$add": ["$$NOW", round(seconds * 1000)]}


def _text(field: str) -> _Document:
    return {"$toString": field}


def _with_error(error: _Document) -> _Document:
    return {"$slice": [{"$concatArrays": ["$errors", [error]]}, -ERRORS_KEPT]}


def _leased(found: _Document) -> Leased:
    return Leased(
        int(found["g"]),
        found["epoch"],
        found["number"],
        found["name"],
        found["start"],
        found["records"],
        found["position"],
        found["token"],
        found["claim"],
    )


def _state(found: _Document) -> TaskState:
    return TaskState(
        epoch=found["epoch"],
        number=found["number"],
        name=found["name"],
        start=found["start"],
        records=found["records"],
        position=found["position"],
        state=found["state"],
        token=found["token"],
        owner=found["owner"],
        held_s=found["held_ms"] / 1000,
        left_s=found["left_ms"] / 1000,
        failures=found["failures"],
        lost=found["lost"],
        errors=tuple(found["errors"]),
    )
