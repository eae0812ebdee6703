"""Blobs of a MongoDB catalog. Used by `mongo.catalog` and `mongo.collect`. Any thread and process.

    blobs      {_id: blob id, data, put_s, doomed?}

A blob is inserted once and never changed, but for two notes: `put_s`, when it was last put, and `doomed`, the id of a
garbage collection that means to delete it (`docs/CONCURRENCY.md`). Errors of the driver pass through.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from pymongo.collection import Collection as MongoCollection
from pymongo.read_concern import ReadConcern

from datacache.catalog.base import REFRESH_AFTER_S, batches
from datacache.catalog.mongo.client import insert_new
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
