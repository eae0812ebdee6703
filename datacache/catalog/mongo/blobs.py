"""Blobs and documents of a MongoDB catalog. Used by `mongo.catalog` and `mongo.collect`. Any thread and process.

    blobs      {_id: blob id, data, put_s, doomed?}
    documents  {_id: "kind/key", text, by}

A blob is inserted once and never changed, but for two notes: `put_s`, when it was last put, and `doomed`, the id of a
garbage collection that means to delete it (`docs/CONCURRENCY.md`). Errors of the driver pass through.

Every write of a document is one conditional change of it. `by` is drawn for each write: when the answer was lost with
the connection, the writer finds out by it whether the write was done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from bson import ObjectId
from pymongo.collection import Collection as MongoCollection
from pymongo.errors import DuplicateKeyError
from pymongo.read_concern import ReadConcern

from datacache.catalog.base import REFRESH_AFTER_S, batches, check_document
from datacache.catalog.mongo.client import MongoDatabase, insert_new, retried
from datacache.manifest.model import BlobId

Document = dict[str, Any]

BATCH_IDS = 1000
"""Ids in one request, at most."""
_BATCH_BYTES = 8 * 2**20
_TRIES = 4


def put_blobs(collection: MongoCollection[Document], blobs: Sequence[tuple[BlobId, bytes]], now_s: int) -> None:
    """Store blobs, in batches, without sending those that exist. A kill in between leaves some: no harm."""
    for batch in batches(blobs, BATCH_IDS, size_bytes=lambda blob: len(blob[1]), most_bytes=_BATCH_BYTES):
        for _try in range(_TRIES):  # once more only where a garbage collection was quicker
            found = collection.find({"_id": {"$in": [id for id, _ in batch]}}, {"put_s": 1, "doomed": 1})
            here = {bytes(document["_id"]): document for document in found}
            missing = [{"_id": id, "data": data, "put_s": now_s} for id, data in batch if id not in here]
            if missing:
                insert_new(collection, missing)
            stale = [
                id
                for id, document in here.items()
                if "doomed" in document or document.get("put_s", 0) < now_s - REFRESH_AFTER_S
            ]
            change = {"$set": {"put_s": now_s}, "$unset": {"doomed": ""}}
            if not stale or collection.update_many({"_id": {"$in": stale}}, change).matched_count == len(stale):
                break


def get_blobs(collection: MongoCollection[Document], ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
    """Return the stored bytes of those of `ids` that exist."""
    return {
        BlobId(bytes(blob["_id"])): bytes(blob["data"])
        for part in batches(dict.fromkeys(ids), BATCH_IDS)
        for blob in collection.find({"_id": {"$in": part}}, {"data": 1})
    }


def claim(collection: MongoCollection[Document], ids: Collection[BlobId]) -> int:
    """Take back the dooms of these blobs, and return how many of the blobs are gone already.

    The others stay: a collection that looks later for blobs in use sees the claimant, and one that has looked already
    finds its doom taken back.
    """
    here = 0
    # Not `majority`: a deletion counts from the moment the primary has done it.
    latest = collection.with_options(read_concern=ReadConcern("local"))
    for part in batches(dict.fromkeys(ids), BATCH_IDS):
        collection.update_many({"_id": {"$in": part}, "doomed": {"$exists": True}}, {"$unset": {"doomed": ""}})
        here += sum(1 for _ in latest.find({"_id": {"$in": part}}, {"_id": 1}))
    return len(set(ids)) - here


def get_document(database: MongoDatabase, kind: str, key: str) -> str | None:
    """See `Catalog.document`."""
    check_document(kind, key)
    with database.errors():
        found = database.collection("documents").find_one({"_id": f"{kind}/{key}"})
    return None if found is None else str(found["text"])


def set_document(database: MongoDatabase, kind: str, key: str, text: str, *, old: str | None) -> bool:
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


def remove_document(database: MongoDatabase, kind: str, key: str, *, old: str | None = None) -> bool:
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


def list_documents(database: MongoDatabase, kind: str, *, after: str, limit: int) -> list[tuple[str, str]]:
    """See `Catalog.documents`."""
    check_document(kind, after or None)
    if limit <= 0:
        return []
    end = f"{kind}0"  # '0' follows '/'
    with database.errors():
        found = database.collection("documents").find({"_id": {"$gt": f"{kind}/{after}", "$lt": end}})
        return [(each["_id"].removeprefix(f"{kind}/"), each["text"]) for each in found.sort("_id", 1).limit(limit)]
