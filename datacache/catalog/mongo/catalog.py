"""The shared catalog: MongoDB, a standalone server or a replica set, without transactions.

Used through `catalog.open`. Any thread and any number of processes on any number of nodes may use it at once; a child
made by `fork()` makes its own client.

**Atomicity.** A dataset is one document, and it alone makes a snapshot visible: it lists its snapshots in the order of
their creation, `latest`, and the tags. Every change is one conditional update of that document: its `rev` must be the
one that was read. A writer that loses the race reads again. `rev` is a random id, so a document that was removed and
made anew is never mistaken for the old one.

    datasets  {_id: name, rev, latest: id, snapshots: [{id, doc}], tags: [{tag, id}]}
    snapshots {_id: doc, dataset, id, created_at, record, at_s}    whole before a dataset lists it, never changed
    blobs     {_id: blob id, data, put_s, doomed?}                 written before the snapshot, never changed but for
                                                                   two notes: when it was last put, and the collection
                                                                   that means to delete it
    derived   {_id, snapshot, name, root, at_s, ready}             the newest that is ready counts
    documents {_id: kind/key, text, by}                            `by` is drawn for each write: a writer whose answer
                                                                   was lost finds out by it whether it was done
    meta      {_id: "schema", version}, {_id: "identity", value}

Each commit writes its own snapshot document under a fresh `doc`, so removing a snapshot and committing the same one at
the same time cannot take away the other's document. A process that is killed in between leaves documents that nobody
lists, no more.

**Garbage collection** (`mongo.collect`) treats young snapshot documents that no dataset lists yet as listed: a commit
writes its document, then claims its blobs (`mongo.collect.claim`), and only then becomes visible. Derived data are
written in the same order.

**Durability.** Writes wait for the journal of a majority and reads see only what a majority has, so a fail-over loses
nothing that was acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from bson import ObjectId
from pymongo.collection import Collection as PymongoCollection
from pymongo.errors import DuplicateKeyError

from datacache.catalog import leases
from datacache.catalog.base import (
    REFRESH_AFTER_S,
    Change,
    Collected,
    DatasetCatalog,
    ListedDataset,
    Live,
    batches,
    blobs_missing,
    check_document,
    check_tags_free,
)
from datacache.catalog.mongo.client import MongoDatabase, insert_new, pause_after_race, retried
from datacache.catalog.mongo.collect import BATCH_IDS, MongoCollection, claim
from datacache.catalog.record import decode_record, encode_record
from datacache.core.errors import CatalogError, CatalogUnavailableError, DatacacheError
from datacache.manifest.model import BlobId, DatasetRecord, SnapshotRecord

_RACE_TIMEOUT_S = 60.0
_COMMIT_TIMEOUT_S = 600.0
"""A commit gives up if it takes longer from writing its document to becoming visible (a suspended machine): after an
hour, garbage collection counts the document as dead (`mongo.collect.PENDING_S`)."""
_READS = 3
_BATCH_BYTES = 8 * 2**20
_TRIES = 4

_Document = dict[str, Any]


class MongoCatalog(DatasetCatalog):
    """A `Catalog` in the database that `url` names (`mongodb://HOST/DATABASE`, default `datacache`).

    Timeouts in the URL count; without, calls give up an unreachable server after 5 s. Raise `SettingsError` for an
    invalid URL. The password is in no message and no repr.
    """

    def __init__(self, url: str) -> None:
        self._secret_url = url
        self._database = MongoDatabase(url)
        self.url = self._database.url

    def __repr__(self) -> str:
        return f"MongoCatalog({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (MongoCatalog, (self._secret_url,))

    def now_s(self) -> float:
        with self._database.errors():
            return retried(self._database.now_s)

    # --- blobs ----------------------------------------------------------------------------------------------

    def put_blobs(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        """See `Catalog.put_blobs`. Blobs that exist are not sent. A kill in between leaves some: no harm."""
        with self._database.errors():
            now_s = int(self._database.now_s())
            for batch in batches(blobs, BATCH_IDS, size_bytes=lambda blob: len(blob[1]), most_bytes=_BATCH_BYTES):
                self._put(batch, now_s)

    def _put(self, batch: list[tuple[BlobId, bytes]], now_s: int) -> None:
        collection = self._database.collection("blobs")
        for _try in range(_TRIES):  # once more only where a garbage collection was quicker
            found = collection.find({"_id": {"$in": [id for id, _ in batch]}}, {"put_s": 1, "doomed": 1})
            here = {bytes(document["_id"]): document for document in found}
            missing = [{"_id": id, "data": data, "put_s": now_s} for id, data in batch if id not in here]
            if missing:
                insert_new(collection, missing)
            oldest_s = now_s - REFRESH_AFTER_S
            stale = [id for id, noted in here.items() if "doomed" in noted or noted.get("put_s", 0) < oldest_s]
            change = {"$set": {"put_s": now_s}, "$unset": {"doomed": ""}}
            if not stale or collection.update_many({"_id": {"$in": stale}}, change).matched_count == len(stale):
                break

    def get_blobs(self, ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        with self._database.errors():
            collection = self._database.collection("blobs")
            return {
                BlobId(bytes(blob["_id"])): bytes(blob["data"])
                for part in batches(dict.fromkeys(ids), BATCH_IDS)
                for blob in collection.find({"_id": {"$in": part}}, {"data": 1})
            }

    def has_blobs(self, ids: Iterable[BlobId]) -> set[BlobId]:
        with self._database.errors():
            collection = self._database.collection("blobs")
            return {
                BlobId(bytes(blob["_id"]))
                for part in batches(dict.fromkeys(ids), BATCH_IDS)
                for blob in collection.find({"_id": {"$in": part}}, {"_id": 1})
            }

    # --- snapshots and tags ---------------------------------------------------------------------------------

    def commit(
        self,
        record: SnapshotRecord,
        *,
        tags: Sequence[str] = (),
        move_tags: bool = False,
        needs: Collection[BlobId] = (),
        check: Callable[[SnapshotRecord], None] | None = None,
    ) -> SnapshotRecord:
        attempt = _Commit(self._database, record, tags, move_tags, needs=needs, check=check)
        with self._database.errors():
            try:
                new = self._changed(record.dataset, attempt.change)
            except DatacacheError:  # before anything was changed
                attempt.take_back()
                raise
            assert new is not None
            if new.snapshots[record.id] == attempt.doc:
                return record
            attempt.take_back()  # another process has committed the same snapshot
        return self.snapshot(record.dataset, record.id) or record

    def dataset(self, name: str) -> DatasetRecord | None:
        with self._database.errors():
            found = self._database.collection("datasets").find_one({"_id": name}, {"snapshots": 0})
        return None if found is None else _dataset_record(found)

    def datasets(self) -> list[DatasetRecord]:
        with self._database.errors():
            found = self._database.collection("datasets").find({}, {"snapshots": 0}).sort("_id", 1)
            return [_dataset_record(each) for each in found]

    def snapshot(self, dataset: str, id: str) -> SnapshotRecord | None:
        records = self._records(dataset, lambda listed: listed == id)
        return records[0] if records else None

    def snapshots(self, dataset: str, *, id_prefix: str = "") -> list[SnapshotRecord]:
        return self._records(dataset, lambda listed: listed.startswith(id_prefix))

    # --- besides the snapshots ------------------------------------------------------------------------------

    def identity(self) -> str:
        with self._database.errors():
            found = self._database.collection("meta").find_one({"_id": "identity"})
        if found is None:
            raise CatalogError(
                f"the catalog {self.url} is of an older version and this account cannot write",
                hint="Open it once with an account that can: dsctl snapshot list",
            )
        return str(found["value"])

    def derived(self, snapshot_id: str, name: str) -> BlobId | None:
        with self._database.errors():
            found = self._newest_derived(snapshot_id, name)
        return None if found is None else BlobId(bytes(found["root"]))

    def derived_names(self, snapshot_id: str) -> list[str]:
        with self._database.errors():
            wanted = {"snapshot": snapshot_id, "ready": True}
            return sorted(self._database.collection("derived").distinct("name", wanted))

    def set_derived(self, snapshot_id: str, name: str, root: BlobId, *, needs: Collection[BlobId] = ()) -> None:
        """See `Catalog.set_derived`. Each call writes its own document, and garbage collection removes replaced
        ones."""
        with self._database.errors():
            collection = self._database.collection("derived")
            now_s = int(self._database.now_s())
            newest = self._newest_derived(snapshot_id, name)
            if newest is not None and bytes(newest["root"]) == root and newest["at_s"] > now_s - REFRESH_AFTER_S:
                return
            doc = ObjectId()
            document = {"_id": doc, "snapshot": snapshot_id, "name": name, "root": root, "at_s": now_s, "ready": False}
            collection.insert_one(document)
            gone = claim(self._database.collection("blobs"), needs)
            if gone:
                collection.delete_one({"_id": doc})
                raise blobs_missing(f"{name} of {snapshot_id[:12]}", gone)
            collection.update_one({"_id": doc}, {"$set": {"ready": True}})

    def _newest_derived(self, snapshot_id: str, name: str) -> _Document | None:
        ready = {"snapshot": snapshot_id, "name": name, "ready": True}
        return self._database.collection("derived").find_one(ready, sort=[("at_s", -1), ("_id", -1)])

    def document(self, kind: str, key: str) -> str | None:
        check_document(kind, key)
        with self._database.errors():
            found = self._database.collection("documents").find_one({"_id": f"{kind}/{key}"})
        return None if found is None else str(found["text"])

    def set_document(self, kind: str, key: str, text: str, *, old: str | None) -> bool:
        check_document(kind, key, text)
        mine = {"_id": f"{kind}/{key}", "by": ObjectId()}

        def attempt() -> bool:
            documents = self._database.collection("documents")
            if old is None:
                with suppress(DuplicateKeyError):
                    documents.insert_one(mine | {"text": text})
                    return True
            elif documents.update_one({"_id": mine["_id"], "text": old}, {"$set": mine | {"text": text}}).matched_count:
                return True
            return documents.count_documents(mine, limit=1) == 1  # by an attempt whose answer was lost

        with self._database.errors():
            return retried(attempt)

    def remove_document(self, kind: str, key: str, *, old: str | None = None) -> bool:
        check_document(kind, key)
        wanted = {"_id": f"{kind}/{key}"} | ({} if old is None else {"text": old})
        seen: list[bool] = []

        def attempt() -> bool:
            documents = self._database.collection("documents")
            seen.append(documents.find_one(wanted, {"_id": 1}) is not None)
            removed = seen[-1] and documents.delete_one(wanted).deleted_count == 1
            return removed or any(seen[:-1])  # by an attempt whose answer was lost

        with self._database.errors():
            return retried(attempt)

    def documents(self, kind: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, str]]:
        check_document(kind, after or None)
        if limit <= 0:
            return []
        end = f"{kind}0"  # '0' follows '/'
        with self._database.errors():
            found = self._database.collection("documents").find({"_id": {"$gt": f"{kind}/{after}", "$lt": end}})
            return [(each["_id"].removeprefix(f"{kind}/"), each["text"]) for each in found.sort("_id", 1).limit(limit)]

    def collect(self, live: Live, *, grace_s: float, dry_run: bool = False, now_s: float | None = None) -> Collected:
        with self._database.errors():
            collection = MongoCollection(self._database, self.documents, live, grace_s=grace_s, now_s=now_s)
            return collection.run(dry_run=dry_run)

    def close(self) -> None:
        self._database.close()

    # --- the conditional update -----------------------------------------------------------------------------

    def _change(self, name: str, change: Change, *, removes: str = "") -> ListedDataset | None:
        with self._database.errors():
            if removes:
                removed = {"text": leases.removed_text(self._database.now_s()), "by": ObjectId()}
                self._database.collection("documents").update_one(
                    {"_id": f"{leases.REMOVED}/{removes}"}, {"$set": removed}, upsert=True
                )
            return self._changed(name, change)

    def _changed(self, name: str, change: Change) -> ListedDataset | None:
        """Do as `_change`. A connection cut while the answer was on its way does no harm: all changes may be done
        twice."""
        collection = self._database.collection("datasets")
        deadline = time.monotonic() + _RACE_TIMEOUT_S
        listed: set[ObjectId] = set()

        def attempt() -> tuple[bool, ListedDataset | None]:
            found = collection.find_one({"_id": name})
            old = None if found is None else _listing(found)
            new = change(old)
            listed.update(old.snapshots.values() if old is not None else ())
            return new is old or _replace(collection, name, old, new), new

        while True:
            is_done, new = retried(attempt)
            if is_done:
                gone = listed - set(new.snapshots.values() if new is not None else ())
                if gone:
                    self._database.collection("snapshots").delete_many({"_id": {"$in": list(gone)}})
                return new
            if time.monotonic() > deadline:
                raise CatalogUnavailableError(
                    f"the dataset {name} in {self.url} was changed by others without a pause for"
                    f" {_RACE_TIMEOUT_S:.0f} s",
                    hint="Try again.",
                )
            pause_after_race()

    def _records(self, dataset: str, wanted: Callable[[str], bool]) -> list[SnapshotRecord]:
        with self._database.errors():
            for _attempt in range(_READS):
                found = self._database.collection("datasets").find_one({"_id": dataset}, {"snapshots": 1})
                docs = [] if found is None else [s["doc"] for s in found["snapshots"] if wanted(s["id"])]
                if not docs:
                    return []
                texts = {
                    document["_id"]: document["record"]
                    for document in self._database.collection("snapshots").find({"_id": {"$in": docs}})
                }
                if len(texts) == len(docs):
                    break  # otherwise a snapshot was removed between the two reads
        return [decode_record(texts[doc]) for doc in docs if doc in texts]


class _Commit:
    """One commit, which may have to change the dataset several times."""

    def __init__(
        self,
        database: MongoDatabase,
        record: SnapshotRecord,
        tags: Sequence[str],
        move_tags: bool,
        *,
        needs: Collection[BlobId],
        check: Callable[[SnapshotRecord], None] | None,
    ) -> None:
        self._database, self._record = database, record
        self._tags, self._move_tags = tags, move_tags
        self._needs = needs
        self._check = check
        self._begun_s: float | None = None
        self._written = self._claimed = False
        self.doc = ObjectId()

    def change(self, old: ListedDataset | None) -> ListedDataset:
        """Return the dataset with the snapshot in it, after writing and claiming all that the snapshot needs."""
        name, id = self._record.dataset, self._record.id
        there = old.snapshots.get(id) if old else None
        if old is not None and there == self.doc:
            return old  # done by the attempt whose answer was lost
        tags = old.tags if old else {}
        if not self._move_tags:
            check_tags_free(name, tags, self._tags, id)
        if self._check is not None and old is not None and (latest := self._latest(old)) is not None:
            self._check(latest)
        listed = old.snapshots if old else {}
        if there is None:
            self._write_document()
            listed = listed | {id: self.doc}
        self._claim_blobs()
        if self._begun_s is not None and not -60 < self._database.now_s() - self._begun_s < _COMMIT_TIMEOUT_S:
            raise CatalogError(f"the commit of {self._record.ref} was held up for too long", hint="Try again.")
        return ListedDataset(id, listed, tags | dict.fromkeys(self._tags, id))

    def take_back(self) -> None:
        if self._begun_s is not None:
            self._database.collection("snapshots").delete_one({"_id": self.doc})

    def _write_document(self) -> None:
        if self._written:
            return
        self._begun_s = self._database.now_s()
        document = {
            "_id": self.doc,
            "dataset": self._record.dataset,
            "id": self._record.id,
            "created_at": self._record.created_at,
            "record": encode_record(self._record),
            "at_s": int(self._begun_s),
        }
        # Nobody else writes `doc`: a duplicate is from the attempt whose answer was lost.
        with suppress(DuplicateKeyError):
            self._database.collection("snapshots").insert_one(document)
        self._written = True
        self._claimed = False  # claims made before a garbage collection could see this document do not count

    def _latest(self, old: ListedDataset) -> SnapshotRecord | None:
        latest = {"_id": old.snapshots.get(old.latest)}
        found = self._database.collection("snapshots").find_one(latest, {"record": 1})
        return None if found is None else decode_record(found["record"])  # None: `old` is outdated

    def _claim_blobs(self) -> None:
        if self._claimed:
            return
        gone = claim(self._database.collection("blobs"), self._needs)
        if gone:
            raise blobs_missing(self._record.ref, gone)
        self._claimed = True


def _listing(found: _Document) -> ListedDataset:
    snapshots = {listed["id"]: listed["doc"] for listed in found["snapshots"]}
    return ListedDataset(
        found["latest"], snapshots, {tagged["tag"]: tagged["id"] for tagged in found["tags"]}, found["rev"]
    )


def _dataset_record(found: _Document) -> DatasetRecord:
    tags = {tagged["tag"]: tagged["id"] for tagged in found["tags"]}
    return DatasetRecord(name=found["_id"], latest=found["latest"], tags=dict(sorted(tags.items())))


def _replace(
    collection: PymongoCollection[_Document], name: str, old: ListedDataset | None, new: ListedDataset | None
) -> bool:
    """Replace the old document by the new one. Return False, with nothing changed, if it was another by now."""
    if new is None:
        assert old is not None
        return collection.delete_one({"_id": name, "rev": old.rev}).deleted_count == 1
    document = {
        "_id": name,
        "rev": ObjectId(),
        "latest": new.latest,
        "snapshots": [{"id": id, "doc": doc} for id, doc in new.snapshots.items()],
        # A list and not a map: a tag may hold a '.', which means a path in a field's name.
        "tags": [{"tag": tag, "id": id} for tag, id in new.tags.items()],
    }
    if old is None:
        try:
            collection.insert_one(document)
        except DuplicateKeyError:
            return False
        return True
    return collection.replace_one({"_id": name, "rev": old.rev}, document).matched_count == 1
