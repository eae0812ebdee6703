"""Members by leases: one document a node in the catalog's MongoDB, all by the database's clock.

    cluster_members  {_id: "cluster/node", cluster, node, holder, address, weight, zone, state, since, left, seen,
                      until}

A node renews its lease (`until`) every few seconds and reads the leases that have not ended. No time of a node is
written or compared, so clocks may be wrong. While MongoDB is away the last view stays, and renewal goes on when it is
back; until then nodes that died are in it, and the others notice by themselves that they do not answer.

`holder` tells one home's processes from others' that chose the same id. A home takes its own lease over at once;
another has to wait until it has ended.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import replace
from typing import Any

import pymongo
from pymongo import ReturnDocument

from datacache.catalog.mongo.client import MongoDatabase, retried
from datacache.cluster.members import ClusterView, Member
from datacache.core.errors import DatacacheError, NodeTakenError
from datacache.core.nodes import parse_address

log = logging.getLogger(__name__)

LEASE_S = 15.0
"""A node is gone for the others so long after its last renewal."""
RENEW_EVERY_S = 5.0
VIEW_EVERY_S = 0.5
_MEMBERS_A_SECOND = 100
"""A view of more members is read less often, so that reading costs MongoDB no more than it grows."""
_FORGET_S = 86_400.0
_SLACK_S = 60.0
"""A lease that ends later than a new one would, and this, is from before the database's clock was set back."""
_FAREWELL_S = 2.0
_NOT_READ = "the catalog has not told the members yet"

_Document = dict[str, Any]


class MongoMembers:
    """The members of `cluster`, and the lease of the node `me` among them. Any thread may call.

    One thread, from `start` to `stop`, renews and reads. Tests call `refresh` instead.
    """

    def __init__(self, url: str, cluster: str, me: Member, *, holder: str, lease_s: float = LEASE_S) -> None:
        self._database = MongoDatabase(url)
        self._cluster, self._me, self._holder, self._lease_s = cluster, me, holder, lease_s
        self._id = f"{cluster}/{me.id}"
        self._busy = threading.Lock()  # one refresh at a time; guards _renewed_at, _joined
        self._renewed_at, self._joined = float("-inf"), False
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._odd: set[str] = set()  # leases that cannot be read, and were told of
        self.view = ClusterView()
        self.problem = _NOT_READ

    def read(self) -> None:
        """Read the view once, without joining. Raises the catalog's errors."""
        with self._busy, self._database.errors(), pymongo.timeout(self._lease_s / 3):
            self._read()

    def start(self) -> None:
        """Take the lease and start the thread. Raises `NodeTakenError`. If MongoDB is away, nobody is in the view until
        it is back."""
        try:
            self._note(self._try_refresh())
        except NodeTakenError:
            self._database.close()
            raise
        self._thread = threading.Thread(target=self._run, name="cluster-members", daemon=True)
        self._thread.start()

    def set_state(self, state: str, left: int = 0) -> None:
        """Change this node's state: the thread tells the others at once, or when MongoDB is back."""
        self._me = replace(self._me, state=state, left=left)
        self._renewed_at = float("-inf")
        self._wake.set()

    def stop(self) -> None:
        """End the thread and the lease, so that the others need not wait for its end. Where MongoDB does not answer,
        the lease ends by itself."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        try:
            if self._joined:
                with self._database.errors(), pymongo.timeout(_FAREWELL_S):
                    self._leases().delete_one({"_id": self._id, "holder": self._holder})
        except DatacacheError as exc:
            log.warning("the lease of node %s of cluster %s ends by itself: %s", self._me.id, self._cluster, exc)
        self._database.close()

    def refresh(self, *, read: bool = True) -> None:
        """Renew the lease if it is time, and `read` the view. Raises `NodeTakenError`, after the view was read, and the
        catalog's errors; the view is the old one then."""
        with self._busy, self._database.errors(), pymongo.timeout(self._lease_s / 3):
            taken_by = ""
            now = time.monotonic()
            if now - self._renewed_at >= min(RENEW_EVERY_S, self._lease_s / 3):
                self._joined = True
                self._renewed_at = now  # before the state is read: what is set meanwhile is written next
                try:
                    taken_by = self._renew()
                except BaseException:
                    self._renewed_at = float("-inf")
                    raise
            if read:
                self._read()
        if taken_by:
            raise NodeTakenError(
                f"the cluster {self._cluster!r} has another node {self._me.id!r}, at {taken_by}",
                address=taken_by,
                hint="Set DATACACHE_NODE to a name that no other node has. If that node has just died: its name is"
                f" free {self._lease_s:.0f} s later.",
            )

    def _renew(self) -> str:
        """Take or renew the lease. Return the address of another living node that has it."""
        me = self._me
        was = {"holder": self._holder, "state": me.state}
        same = {"$and": [*({"$eq": [f"${name}", value]} for name, value in was.items()), *self._lives()]}
        mine: _Document = {
            "$mergeObjects": [
                {"$literal": {"_id": self._id, "cluster": self._cluster, "node": me.id, "holder": self._holder}},
                {
                    "$literal": {
                        "address": me.address,
                        "weight": me.weight,
                        "zone": me.zone,
                        "state": me.state,
                        "left": me.left,
                    }
                },
                {"seen": "$$NOW", "until": self._later(self._lease_s), "since": {"$cond": [same, "$since", "$$NOW"]}},
            ]
        }
        others = {"$and": [{"$ne": ["$holder", self._holder]}, *self._lives()]}
        found = retried(
            lambda: self._leases().find_one_and_update(
                {"_id": self._id},
                [{"$replaceWith": {"$cond": [others, "$$ROOT", mine]}}],
                upsert=True,
                return_document=ReturnDocument.AFTER,
            )
        )
        return "" if found["holder"] == self._holder else str(found["address"])

    def _read(self) -> None:
        shown = dict.fromkeys(("cluster", "node", "address", "weight", "zone", "state", "left", "holder"), 1)
        pipeline: list[_Document] = [
            # Of other types they would be an error of the whole view.
            {"$match": {"cluster": self._cluster, "seen": {"$type": "date"}, "$expr": {"$and": self._lives()}}},
            {
                "$project": shown
                | {
                    "seen_ms": {"$subtract": ["$$NOW", "$seen"]},
                    "since_ms": {"$convert": {"input": "$since", "to": "long", "onError": 0, "onNull": 0}},
                }
            },
        ]
        found = retried(lambda: list(self._leases().aggregate(pipeline)))
        if not any(each["_id"] == self._id and each["holder"] == self._holder for each in found):
            self._renewed_at = float("-inf")  # it has ended while MongoDB was away, or an administrator removed it
        before = self.view
        members = []
        for each in found:
            try:
                members.append(_member(each))
            except (KeyError, TypeError, ValueError) as exc:
                if each["_id"] not in self._odd:
                    log.warning("the lease %s is passed over: %r", each["_id"], exc)
                self._odd.add(each["_id"])
        self.view = before.replaced(members)
        if self.view.version != before.version:
            was, now = ({member.id for member in view.members} for view in (before, self.view))
            log.info(
                "cluster %s: %d members, new: %s, gone: %s",
                *(self._cluster, len(now), " ".join(sorted(now - was)) or "-", " ".join(sorted(was - now)) or "-"),
            )

    def _lives(self) -> list[_Document]:
        """Return the conditions of a lease that has not ended."""
        return [{"$gt": ["$until", "$$NOW"]}, {"$lte": ["$until", self._later(max(self._lease_s, LEASE_S) + _SLACK_S)]}]

    @staticmethod
    def _later(seconds: float) -> _Document:
        return {"$add": ["$$NOW", round(seconds * 1000)]}

    def _leases(self) -> Any:
        return self._database.collection("cluster_members")

    def _try_refresh(self, *, read: bool = True) -> str:
        """Refresh; return why it could not be done. Raises `NodeTakenError`."""
        try:
            self.refresh(read=read)
        except NodeTakenError:
            raise
        except DatacacheError as exc:
            return f"{exc}. {exc.hint}".rstrip(". ")
        return ""

    def _note(self, problem: str) -> None:
        if problem and self.problem in ("", _NOT_READ):
            log.warning("the members of cluster %s are those of the last view: %s", self._cluster, problem)
        elif self.problem not in ("", _NOT_READ) and not problem:
            log.info("the members of cluster %s are known again", self._cluster)
        self.problem = problem

    def _run(self) -> None:
        try:
            with self._database.errors(), pymongo.timeout(self._lease_s / 3):
                long_ago = {"$lt": ["$until", self._later(-_FORGET_S)]}
                self._leases().delete_many({"cluster": self._cluster, "$expr": long_ago})
        except DatacacheError as exc:
            log.debug("ended leases were not removed: %s", exc)
        read_at = time.monotonic()
        while True:
            self._wake.wait(min(VIEW_EVERY_S, self._lease_s / 3))
            self._wake.clear()
            if self._stopping:
                return
            now = time.monotonic()
            read = bool(self.problem) or now - read_at >= len(self.view.members) / _MEMBERS_A_SECOND
            read_at = now if read else read_at
            try:
                self._note(self._try_refresh(read=read))
            except NodeTakenError as exc:
                self._note(f"{exc}: this node owns nothing")
            except Exception as exc:  # without this thread the lease would end
                log.exception("the members of cluster %s cannot be told", self._cluster)
                self._note(repr(exc))


def _member(found: _Document) -> Member:
    """Return the member of a lease. `KeyError`, `TypeError` or `ValueError` for one that would fail who asks it."""
    for name in ("node", "address", "zone", "state"):
        if not isinstance(found[name], str):
            raise TypeError(name)
    if found["_id"] != f"{found['cluster']}/{found['node']}":  # another node's name
        raise ValueError("node")
    parse_address(found["address"])
    if not 0 <= float(found["weight"]) < math.inf:
        raise ValueError("weight")
    seen_s = max(0.0, found["seen_ms"] / 1000)
    named = {name: found[name] for name in ("address", "zone", "state", "since_ms")}
    named["left"] = int(found.get("left", 0))  # an earlier version has none
    return Member(found["node"], weight=float(found["weight"]), seen_s=seen_s, **named)
