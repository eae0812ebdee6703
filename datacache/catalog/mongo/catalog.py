"""The shared catalog: MongoDB, a standalone server or a replica set, without transactions.

Used through `catalog.open`. Any thread and any number of processes on any number of nodes may use it at once; a child
made by `fork()` makes its own client.

**Atomicity.** A dataset is one document, and it alone makes a snapshot visible: it lists its snapshots in the order of
their creation, `latest`, and the tags. Every change is one conditional update of that document: its `rev` must be the
one that was read. A writer that loses the race reads again. `rev` is a random id, so a document that was removed and
made anew is never mistaken for the old one.

    datasets  {_id: name, rev, latest: id, snapshots: [{id, doc}], tags: [{tag, id}]}
    snapshots {_id: doc, dataset, id, created_at, record, at_s}    whole before a dataset lists it, never changed
    blobs     {_id: blob id, data, put_s, doomed?}                 see `mongo.blobs`; written before the snapshot
    derived   {_id, snapshot, name, root, at_s, ready}             the newest that is ready counts
    documents {_id: kind/key, text, by}                            see `mongo.blobs`
    meta      {_id: "schema", version}, {_id: "identity", value}

Each commit writes its own snapshot document under a fresh `doc`, so removing a snapshot and committing the same one at
the same time cannot take away the other's document. A process that is killed in between leaves documents that nobody
lists, no more.

**Garbage collection** (`mongo.collect`) treats young snapshot documents that no dataset lists yet as listed: a commit
writes its document, then claims its blobs (`mongo.blobs.claim`), and only then becomes visible. Derived data are
written in the same order.

**Durability.** Writes wait for the journal of a majority and reads see only what a majority has, so a fail-over loses
nothing that was acknowledged.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from bson import ObjectId
from pymongo.collection import Collection as MongoCollection
from pymongo.errors import DuplicateKeyError

from datacache.catalog import leases
from datacache.catalog.base import (
    REFRESH_AFTER_S,
    Collected,
    Live,
    blobs_missing,
    check_tags_free,
    no_snapshot,
    still_tagged,
)
from datacache.catalog.mongo import blobs as blob_store
from datacache.catalog.mongo.client import MongoDatabase, retried
from datacache.catalog.mongo.collect import collect
from datacache.catalog.record import decode_record, encode_record
from datacache.core.errors import CatalogError, CatalogUnavailableError, DatacacheError
from datacache.manifest.model import BlobId, DatasetRecord, SnapshotRecord

_RACE_TIMEOUT_S = 60.0
_COMMIT_TIMEOUT_S = 600.0
"""A commit gives up if it takes longer from writing its document to becoming visible (a suspended machine): after an
hour, garbage collection counts the document as dead (`mongo.collect.PENDING_S`)."""
_READS = 3

_Document = dict[str, Any]


_NEW = ObjectId("0" * 24)
"""The `rev` of a document that is not written yet."""


class _Listed(NamedTuple):
    """A snapshot as its dataset lists it."""

    id: str
    doc: ObjectId


class _Dataset(NamedTuple):
    """A dataset's document."""

    rev: ObjectId
    latest: str
    snapshots: tuple[_Listed, ...]
    tags: dict[str, str]

    def doc(self, id: str) -> ObjectId | None:
        """Return the document that holds the record of snapshot `id`."""
        return next((listed.doc for listed in self.snapshots if listed.id == id), None)


class MongoCatalog:
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
        with self._database.errors():
            blob_store.put_blobs(self._database.collection("blobs"), blobs, int(self._database.now_s()))

    def get_blobs(self, ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        with self._database.errors():
            return blob_store.get_blobs(self._database.collection("blobs"), ids)

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
                new = self._change(record.dataset, attempt.change)
            except DatacacheError:  # before anything was changed
                attempt.take_back()
                raise
            assert new is not None
            if new.doc(record.id) == attempt.doc:
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

    def set_tag(self, dataset: str, tag: str, id: str, *, move: bool = False) -> None:

        def change(old: _Dataset | None) -> _Dataset | None:
            if old is None or old.doc(id) is None:
                raise no_snapshot(dataset, id)
            if old.tags.get(tag) == id:
                return old
            if not move:
                check_tags_free(dataset, old.tags, [tag], id)
            return old._replace(tags=old.tags | {tag: id})

        with self._database.errors():
            self._change(dataset, change)

    def remove_tag(self, dataset: str, tag: str, *, id: str = "") -> bool:
        was_there = False

        def change(old: _Dataset | None) -> _Dataset | None:
            nonlocal was_there
            if old is None or tag not in old.tags or (id and old.tags[tag] != id):
                return old
            was_there = True
            return old._replace(tags={other: id for other, id in old.tags.items() if other != tag})

        with self._database.errors():
            self._change(dataset, change)
        return was_there

    def remove_snapshot(self, dataset: str, id: str, *, only_tags: Collection[str] | None = None) -> bool:
        doc: ObjectId | None = None

        def change(old: _Dataset | None) -> _Dataset | None:
            nonlocal doc
            there = old.doc(id) if old else None
            if old is None or there is None:
                return old
            others = {tag for tag, named in old.tags.items() if named == id} - set(only_tags or ())
            if others and only_tags is not None:
                raise still_tagged(dataset, id, others)
            doc = there
            left = tuple(listed for listed in old.snapshots if listed.id != id)
            if not left:
                return None
            latest = left[-1].id if old.latest == id else old.latest
            tags = {tag: named for tag, named in old.tags.items() if named != id}
            return _Dataset(_NEW, latest, left, tags)

        with self._database.errors():
            # First: a collection that no longer sees the snapshot sees this.
            removed = {"text": leases.removed_text(self._database.now_s()), "by": ObjectId()}
            self._database.collection("documents").update_one(
                {"_id": f"{leases.REMOVED}/{id}"}, {"$set": removed}, upsert=True
            )
            self._change(dataset, change)
            if doc is not None:
                self._database.collection("snapshots").delete_one({"_id": doc})
        return doc is not None

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
            gone = blob_store.claim(self._database.collection("blobs"), needs)
            if gone:
                collection.delete_one({"_id": doc})
                raise blobs_missing(f"{name} of {snapshot_id[:12]}", gone)
            collection.update_one({"_id": doc}, {"$set": {"ready": True}})

    def _newest_derived(self, snapshot_id: str, name: str) -> _Document | None:
        ready = {"snapshot": snapshot_id, "name": name, "ready": True}
        return self._database.collection("derived").find_one(ready, sort=[("at_s", -1), ("_id", -1)])

    def document(self, kind: str, key: str) -> str | None:
        return blob_store.get_document(self._database, kind, key)

    def set_document(self, kind: str, key: str, text: str, *, old: str | None) -> bool:
        return blob_store.set_document(self._database, kind, key, text, old=old)

    def remove_document(self, kind: str, key: str, *, old: str | None = None) -> bool:
        return blob_store.remove_document(self._database, kind, key, old=old)

    def documents(self, kind: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, str]]:
        return blob_store.list_documents(self._database, kind, after=after, limit=limit)

    def collect(self, live: Live, *, grace_s: float, dry_run: bool = False, now_s: float | None = None) -> Collected:
        with self._database.errors():
            return collect(self._database, live, grace_s=grace_s, dry_run=dry_run, now_s=now_s)

    def close(self) -> None:
        self._database.close()

    # --- the conditional update -----------------------------------------------------------------------------

    def _change(self, name: str, change: Callable[[_Dataset | None], _Dataset | None]) -> _Dataset | None:
        """Replace a dataset's document by the result of `change`, with no other change in between. Return the new one.

        `change` may be called several times. None stands for a dataset that does not exist; a change that returns its
        argument changes nothing. A connection cut while the answer was on its way does no harm: all changes may be done
        twice.
        """
        collection = self._database.collection("datasets")
        deadline = time.monotonic() + _RACE_TIMEOUT_S

        def attempt() -> tuple[bool, _Dataset | None]:
            found = collection.find_one({"_id": name})
            old = None if found is None else _parse_dataset(found)
            new = change(old)
            return new is old or _replace(collection, name, old, new), new

        while True:
            is_done, new = retried(attempt)
            if is_done:
                return new
            if time.monotonic() > deadline:
                raise CatalogUnavailableError(
                    f"the dataset {name} in {self.url} was changed by others without a pause for"
                    f" {_RACE_TIMEOUT_S:.0f} s",
                    hint="Try again.",
                )
            time.sleep(random.uniform(0, 0.01))

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

    def change(self, old: _Dataset | None) -> _Dataset:
        """Return the dataset with the snapshot in it, after writing and claiming all that the snapshot needs."""
        name, id = self._record.dataset, self._record.id
        there = old.doc(id) if old else None
        if old is not None and there == self.doc:
            return old  # done by the attempt whose answer was lost
        tags = old.tags if old else {}
        if not self._move_tags:
            check_tags_free(name, tags, self._tags, id)
        if self._check is not None and old is not None and (latest := self._latest(old)) is not None:
            self._check(latest)
        listed = old.snapshots if old else ()
        if there is None:
            self._write_document()
            listed = (*listed, _Listed(id, self.doc))
        self._claim_blobs()
        if self._begun_s is not None and not -60 < self._database.now_s() - self._begun_s < _COMMIT_TIMEOUT_S:
            raise CatalogError(f"the commit of {self._record.ref} was held up for too long", hint="Try again.")
        return _Dataset(_NEW, id, listed, tags | dict.fromkeys(self._tags, id))

    def take_back(self) -> None:
        """Remove the document, which no dataset lists."""
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

    def _latest(self, old: _Dataset) -> SnapshotRecord | None:
        found = self._database.collection("snapshots").find_one({"_id": old.doc(old.latest)}, {"record": 1})
        return None if found is None else decode_record(found["record"])  # None: `old` is outdated

    def _claim_blobs(self) -> None:
        if self._claimed:
            return
        gone = blob_store.claim(self._database.collection("blobs"), self._needs)
        if gone:
            raise blobs_missing(self._record.ref, gone)
        self._claimed = True


def _parse_dataset(found: _Document) -> _Dataset:
    return _Dataset(
        rev=found["rev"],
        latest=found["latest"],
        snapshots=tuple(_Listed(listed["id"], listed["doc"]) for listed in found["snapshots"]),
        tags={tagged["tag"]: tagged["id"] for tagged in found["tags"]},
    )


def _dataset_record(found: _Document) -> DatasetRecord:
    tags = {tagged["tag"]: tagged["id"] for tagged in found["tags"]}
    return DatasetRecord(name=found["_id"], latest=found["latest"], tags=dict(sorted(tags.items())))


def _replace(collection: MongoCollection[_Document], name: str, old: _Dataset | None, new: _Dataset | None) -> bool:
    """Replace the old document by the new one. Return False, with nothing changed, if it was another by now."""
    if new is None:
        assert old is not None
        return collection.delete_one({"_id": name, "rev": old.rev}).deleted_count == 1
    document = {
        "_id": name,
        "rev": ObjectId(),
        "latest": new.latest,
        "snapshots": [listed._asdict() for listed in new.snapshots],
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
