"""Garbage collection of a MongoDB catalog: mark, doom, look again, delete what is still doomed.

Used by `mongo.catalog`; `docs/CONCURRENCY.md` says why no creation loses a blob to it. Several may run at once, each
dooms under its own id. A collection that is killed has removed some of what nobody needs, and leaves dooms without
effect: only the collection that wrote a doom acts on it. Errors of the driver pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from bson import ObjectId
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from datacache.catalog import leases
from datacache.catalog.base import Collected, Live, batches
from datacache.catalog.mark import Marked, Roots
from datacache.catalog.mongo.client import MongoDatabase
from datacache.manifest.model import BlobId

Documents = Callable[..., list[tuple[str, str]]]
"""Lists documents, see `Catalog.documents`."""

BATCH_IDS = 1000
"""Ids in one request, at most."""
PENDING_S = 3600
"""The document of a commit counts at least so long as one of a commit under way, whatever the grace period."""


def claim(collection: Collection[dict[str, Any]], ids: Iterable[BlobId]) -> int:
    """Take back the dooms of these blobs, and return how many of the blobs are gone already.

    The others stay: a collection that looks later for blobs in use sees the claimant, and one that has looked already
    finds its doom taken back.
    """
    wanted, here = set(ids), 0
    # Not `majority`: a deletion counts from the moment the primary has done it.
    latest = collection.with_options(read_concern=ReadConcern("local"))
    for part in batches(wanted, BATCH_IDS):
        collection.update_many({"_id": {"$in": part}, "doomed": {"$exists": True}}, {"$unset": {"doomed": ""}})
        here += sum(1 for _ in latest.find({"_id": {"$in": part}}, {"_id": 1}))
    return len(wanted) - here


class MongoCollection:
    """One garbage collection, of what is older than `grace_s`."""

    def __init__(
        self, database: MongoDatabase, documents: Documents, live: Live, *, grace_s: float, now_s: float | None
    ) -> None:
        self._database, self._documents = database, documents
        self._now_s = database.now_s() if now_s is None else now_s
        self._cutoff_s = int(self._now_s - grace_s)
        self._pending_cutoff_s = int(self._now_s - max(grace_s, PENDING_S))
        self._marked = Marked(live)
        self._id = ObjectId()
        self._stale: list[ObjectId] = []  # derived; in a dry run they stay
        self._blobs = database.collection("blobs")

    def run(self, *, dry_run: bool) -> Collected:
        """Remove what is not reachable; see `Catalog.collect`."""
        records = self._database.collection("snapshots")
        if not dry_run:
            # Blobs and records of version 1 have no time: theirs begins now.
            self._blobs.update_many({"put_s": None}, {"$set": {"put_s": int(self._now_s)}})
            records.update_many({"at_s": None}, {"$set": {"at_s": int(self._now_s)}})
        snapshots, derived = self._unlisted()
        if not dry_run:
            self._database.collection("derived").delete_many({"_id": {"$in": derived}})
            records.delete_many({"_id": {"$in": snapshots}})
        candidates = self._candidates()
        if dry_run:
            sizes = self._sizes({}, candidates)
            blobs, size_bytes = len(sizes), sum(sizes.values())
        else:
            blobs, size_bytes = self._sweep(candidates)
        return Collected(blobs, size_bytes, self._young(), len(derived), len(snapshots))

    def _unlisted(self) -> tuple[list[ObjectId], list[ObjectId]]:
        """Return the documents of snapshots and of derived data that no dataset lists, and that are too old to be of a
        commit under way."""
        documents = list(self._database.collection("snapshots").find({}, {"id": 1, "at_s": 1}))
        listed_docs, listed = self._listed()
        pending = {d["id"] for d in documents if d["_id"] not in listed_docs and _at_s(d) > self._pending_cutoff_s}
        derived = list(self._database.collection("derived").find({}, sort=[("at_s", -1), ("_id", -1)]))
        here = self._here(bytes(d["root"]) for d in derived)
        newest: set[tuple[str, str]] = set()
        stale: list[ObjectId] = []
        for document in derived:
            key = (document["snapshot"], document["name"])
            in_use = document["ready"] and key not in newest and key[0] in (listed | pending)
            if document["ready"]:
                newest.add(key)
            if document["at_s"] <= self._pending_cutoff_s and not (in_use and bytes(document["root"]) in here):
                stale.append(document["_id"])
        old = [d["_id"] for d in documents if d["_id"] not in listed_docs and _at_s(d) <= self._pending_cutoff_s]
        self._stale = stale
        return old, stale

    def _candidates(self) -> list[bytes]:
        """Mark, and return the old blobs that were not reached."""
        self._marked.follow(self._roots)
        old = self._blobs.find({"put_s": {"$lte": self._cutoff_s}}, {"_id": 1})
        return [id for found in old if BlobId(id := bytes(found["_id"])) not in self._marked.blobs]

    def _young(self) -> int:
        """Count the blobs that were not reached and stay."""
        marked = self._marked
        young = self._blobs.find({"put_s": {"$gt": self._cutoff_s}}, {"_id": 1})
        found_young = {BlobId(bytes(found["_id"])) for found in young} - marked.blobs
        return len(found_young | {BlobId(id) for id in self._here(marked.blobs - marked.needed)})

    def _sweep(self, candidates: list[bytes]) -> tuple[int, int]:
        """Remove those candidates that nothing needs now either. Return their number and bytes."""
        old = {"put_s": {"$lte": self._cutoff_s}}
        for part in batches(candidates, BATCH_IDS):
            self._blobs.update_many({"_id": {"$in": part}, **old}, {"$set": {"doomed": self._id}})
        # A document that was written before this moment is seen now. A commit that writes one later claims its blobs
        # after that, and finds them doomed: whichever of claim and deletion comes first at a blob, the other notices.
        self._marked.follow(self._roots)
        mine = {"doomed": self._id}
        needed = [id for id in candidates if BlobId(id) in self._marked.blobs]
        for part in batches(needed, BATCH_IDS):
            self._blobs.update_many({"_id": {"$in": part}, **mine}, {"$unset": {"doomed": ""}})
        count = size_bytes = 0
        doomed = (id for id in candidates if BlobId(id) not in self._marked.blobs)
        for part in batches(doomed, BATCH_IDS):
            sizes = self._sizes(mine, part)
            self._blobs.delete_many({"_id": {"$in": part}, **mine})
            kept = self._here(sizes)
            count += len(sizes) - len(kept)
            size_bytes += sum(size for id, size in sizes.items() if id not in kept)
        return count, size_bytes

    def _roots(self) -> Roots:
        # A commit writes to `snapshots`, then to `datasets`, and its document stays in the first until the snapshot is
        # removed. So a commit that was begun before is in one of the two, whichever is read first.
        documents = list(self._database.collection("snapshots").find({}, {"id": 1, "at_s": 1}))
        _docs, listed = self._listed()
        pending = {d["id"] for d in documents if _at_s(d) > self._pending_cutoff_s} - listed
        derived = self._database.collection("derived").find({"_id": {"$nin": self._stale}}, {"root": 1})
        others = {BlobId(bytes.fromhex(id)) for id in pending} | {BlobId(bytes(d["root"])) for d in derived}
        # Read last: a snapshot that is not listed any more was noted as removed before that.
        mounts = [text for _key, text in leases.all_documents(self._documents, leases.MOUNTS)]
        removed = list(leases.all_documents(self._documents, leases.REMOVED))
        held = leases.held_roots(mounts, removed, now_s=self._now_s, cutoff_s=self._cutoff_s)
        return Roots(frozenset(BlobId(bytes.fromhex(id)) for id in listed), frozenset(others), held)

    def _listed(self) -> tuple[set[ObjectId], set[str]]:
        datasets = list(self._database.collection("datasets").find({}, {"snapshots": 1}))
        listed = [snapshot for dataset in datasets for snapshot in dataset["snapshots"]]
        return {snapshot["doc"] for snapshot in listed}, {snapshot["id"] for snapshot in listed}

    def _here(self, ids: Iterable[bytes]) -> set[bytes]:
        return {
            bytes(found["_id"])
            for part in batches(dict.fromkeys(ids), BATCH_IDS)
            for found in self._blobs.find({"_id": {"$in": part}}, {"_id": 1})
        }

    def _sizes(self, condition: dict[str, Any], ids: list[bytes]) -> dict[bytes, int]:
        return {
            bytes(found["_id"]): found["size"]
            for part in batches(ids, BATCH_IDS)
            for found in self._blobs.aggregate(
                [{"$match": {"_id": {"$in": part}, **condition}}, {"$project": {"size": {"$binarySize": "$data"}}}]
            )
        }


def _at_s(document: dict[str, Any]) -> float:
    """Return when a snapshot's document was written; infinite for one of version 1 in a dry run, which is young."""
    return float(document.get("at_s", "inf"))
