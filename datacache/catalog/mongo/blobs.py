"""The blobs of a MongoDB catalog: `{_id: blob id, data, put_s, doomed?}`.

Used by `mongo` and `mongo_collect`; how they and garbage collection keep out of each other's way is in
`docs/CONCURRENCY.md`. A blob is inserted once and never changed, but for two notes on it: `put_s`, when it was last
put, and `doomed`, the id of a garbage collection that means to delete it. Errors of the driver pass through.

Documents of the shared catalog: small texts by kind and key. Used by `mongo` only; any thread and process.

    documents  {_id: "kind/key", text, by}

Every write is one conditional change of one document. `by` is drawn for each write: where the answer to a write was
lost with the connection, the writer finds out by it whether the write was done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from bson import ObjectId
from pymongo.collection import Collection as MongoCollection
from pymongo.errors import BulkWriteError, DuplicateKeyError
from pymongo.read_concern import ReadConcern

from datacache.catalog.base import REFRESH_AFTER_S, check_document
from datacache.catalog.mongo.client import MongoDatabase, retried
from datacache.manifest.model import BlobId

Document = dict[str, Any]

BATCH_IDS = 1000
_BATCH_BYTES = 8 * 2**20
_TRIES = 4
_DUPLICATE_KEY = 11000


def put_blobs(collection: MongoCollection[Document], blobs: Sequence[tuple[BlobId, bytes]], now_s: int) -> None:
    """Store blobs, in batches; those that are there are not sent. A kill in between leaves some: no harm."""
    for batch in _batches(blobs):
        for _try in range(_TRIES):  # again only where a garbage collection was quicker
            found = collection.find({"_id": {"$in": [id for id, _ in batch]}}, {"put_s": 1, "doomed": 1})
            here = {bytes(document["_id"]): document for document in found}
            missing = [{"_id": id, "data": data, "put_s": now_s} for id, data in batch if id not in here]
            if missing:
                _insert_new(collection, missing)
            stale = [
                id
                for id, document in here.items()
                if "doomed" in document or document.get("put_s", 0) < now_s - REFRESH_AFTER_S
            ]
            if not stale or _refresh(collection, stale, now_s) == len(stale):
                break


def get_blobs(collection: MongoCollection[Document], ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
    """The stored bytes of those of `ids` that are there."""
    found: dict[BlobId, bytes] = {}
    for part in id_batches(ids):
        for blob in collection.find({"_id": {"$in": part}}, {"data": 1}):
            found[BlobId(bytes(blob["_id"]))] = bytes(blob["data"])
    return found


def claim(collection: MongoCollection[Document], ids: Collection[BlobId]) -> int:
    """Take back what garbage collections mean to do to these blobs; how many of them are gone already.

    What is there afterwards stays: a collection that looks for what is in use later sees who claims, and one that has
    looked already finds its doom taken back.
    """
    here = 0
    # Not what a majority has: a deletion counts from the moment the primary has done it.
    latest = collection.with_options(read_concern=ReadConcern("local"))
    for part in id_batches(ids):
        collection.update_many({"_id": {"$in": part}, "doomed": {"$exists": True}}, {"$unset": {"doomed": ""}})
        here += sum(1 for _ in latest.find({"_id": {"$in": part}}, {"_id": 1}))
    return len(set(ids)) - here


def id_batches(ids: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The ids, each once, as many at a time as one request should have."""
    wanted = list(dict.fromkeys(ids))
    for start in range(0, len(wanted), BATCH_IDS):
        yield wanted[start : start + BATCH_IDS]


def _refresh(collection: MongoCollection[Document], ids: list[bytes], now_s: int) -> int:
    change = {"$set": {"put_s": now_s}, "$unset": {"doomed": ""}}
    return collection.update_many({"_id": {"$in": ids}}, change).matched_count


def _insert_new(collection: MongoCollection[Document], documents: list[Document]) -> None:
    try:
        retried(lambda: collection.insert_many(documents, ordered=False))
    except BulkWriteError as exc:
        errors = exc.details.get("writeErrors", [])
        unconfirmed = exc.details.get("writeConcernErrors")
        if unconfirmed or any(error["code"] != _DUPLICATE_KEY for error in errors):
            raise  # otherwise another process has just put the same blobs


def _batches(blobs: Sequence[tuple[BlobId, bytes]]) -> Iterator[list[tuple[BlobId, bytes]]]:
    batch: list[tuple[BlobId, bytes]] = []
    size_bytes = 0
    for blob in blobs:
        batch.append(blob)
        size_bytes += len(blob[1])
        if size_bytes >= _BATCH_BYTES or len(batch) >= BATCH_IDS:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def get(database: MongoDatabase, kind: str, key: str) -> str | None:
    """See `Catalog.document`."""
    check_document(kind, key)
    with database.errors():
        found = database.collection("documents").find_one({"_id": f"{kind}/{key}"})
    return None if found is None else str(found["text"])


def compare_and_set(database: MongoDatabase, kind: str, key: str, text: str, *, old: str | None) -> bool:
    """See `Catalog.set_document`."""
    check_document(kind, key, text)
    by = ObjectId()
    with database.errors():
        return retried(lambda: _try(database, f"{kind}/{key}", text, old, by))


def _try(database: MongoDatabase, id: str, text: str, old: str | None, by: ObjectId) -> bool:
    documents = database.collection("documents")
    if old is None:
        try:
            documents.insert_one({"_id": id, "text": text, "by": by})
        except DuplicateKeyError:
            return documents.count_documents({"_id": id, "by": by}, limit=1) == 1
        return True
    if documents.update_one({"_id": id, "text": old}, {"$set": {"text": text, "by": by}}).matched_count:
        return True
    return documents.count_documents({"_id": id, "by": by}, limit=1) == 1


def remove(database: MongoDatabase, kind: str, key: str, *, old: str | None = None) -> bool:
    """See `Catalog.remove_document`."""
    check_document(kind, key)
    wanted = {"_id": f"{kind}/{key}"} | ({} if old is None else {"text": old})
    seen: list[bool] = []

    def attempt() -> bool:
        documents = database.collection("documents")
        seen.append(documents.find_one(wanted, {"_id": 1}) is not None)
        removed = seen[-1] and documents.delete_one(wanted).deleted_count == 1
        return removed or any(seen[:-1])  # by an attempt whose answer was lost

    with database.errors():
        return retried(attempt)


def listed(database: MongoDatabase, kind: str, *, after: str, limit: int) -> list[tuple[str, str]]:
    """See `Catalog.documents`."""
    check_document(kind, after or None)
    if limit <= 0:
        return []
    end = f"{kind}0"  # '0' follows '/'
    with database.errors():
        found = database.collection("documents").find({"_id": {"$gt": f"{kind}/{after}", "$lt": end}})
        return [(each["_id"].removeprefix(f"{kind}/"), each["text"]) for each in found.sort("_id", 1).limit(limit)]
