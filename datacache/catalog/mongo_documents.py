"""Documents of the shared catalog: small texts by kind and key. Used by `mongo` only; any thread and process.

    documents  {_id: "kind/key", text, by}

Every write is one conditional change of one document. `by` is drawn for each write: where the answer to a write was
lost with the connection, the writer finds out by it whether the write was done.
"""

from __future__ import annotations

from bson import ObjectId
from pymongo.errors import DuplicateKeyError

from datacache.catalog.base import check_document
from datacache.catalog.mongo_client import MongoDatabase, retried


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
