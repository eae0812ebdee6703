"""The shared catalog: MongoDB, a standalone server or a replica set, without transactions.

Used through `catalog.open`. Any thread and any number of processes on any number of nodes may use it at once;
a child made by `fork()` makes its own client.

**Atomicity.** A dataset is one document, and it is the only thing that makes a snapshot visible: it lists its
snapshots in the order of their creation, `latest`, and the tags. Every change is one conditional update of
that document, on condition that its `rev` is the one that was read; who loses the race reads again. `rev` is
a random id, so a document that was removed and made anew is never mistaken for the old one.

    datasets  {_id: name, rev, latest: id, snapshots: [{id, doc}], tags: [{tag, id}]}
    snapshots {_id: doc, dataset, id, created_at, record}      written whole before a dataset lists it, never
    changed blobs     {_id: blob id, data}                             written before the snapshot meta
    {_id: "schema", version}

Each commit writes its own snapshot document under a fresh `doc`, so removing a snapshot and committing the
same one at the same time cannot take away the other's document. A process killed in between leaves documents
nobody lists, no more.

**Durability.** Writes wait for the journal of a majority and reads see only what a majority has, so a
fail-over loses nothing that was acknowledged.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from bson import ObjectId
from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConfigurationError,
    DocumentTooLarge,
    DuplicateKeyError,
    InvalidURI,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WTimeoutError,
)
from pymongo.read_concern import ReadConcern
from pymongo.uri_parser import parse_uri

from datacache.catalog.base import no_snapshot, tag_exists
from datacache.catalog.record import decode_record, encode_record
from datacache.core.concurrency import PerProcess
from datacache.core.errors import CatalogError, CatalogUnavailableError, SettingsError, TagExistsError
from datacache.manifest.model import BlobId, DatasetRecord, SnapshotRecord

SCHEMA_VERSION = 1
DEFAULT_DATABASE = "datacache"

_SELECTION_TIMEOUT_MS = 5_000
_SOCKET_TIMEOUT_MS = 60_000
_WRITE_TIMEOUT_MS = 30_000
_RACE_TIMEOUT_S = 60.0
_RECONNECTS = 3
_DUPLICATE_KEY = 11000
_AUTHENTICATION_CODES = (13, 18, 8000)
_BATCH_BYTES = 8 * 2**20
_BATCH_IDS = 1000

_Document = dict[str, Any]


_NEW = ObjectId("0" * 24)
"""In place of the `rev` of a document that is not written yet."""


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
        """The document that holds snapshot `id`'s record."""
        return next((listed.doc for listed in self.snapshots if listed.id == id), None)


class MongoCatalog:
    """A catalog in the database that `url` names (`mongodb://HOST/DATABASE`, default `datacache`).

    What the URL sets of timeouts counts; without, an unreachable server is given up after 5 s. Raises
    `SettingsError` for a URL that is none. The password is in no message and no repr.
    """

    def __init__(self, url: str) -> None:
        self._secret_url = url
        self._hosts, self._database_name, self._options = _parse(url)
        self.url = f"mongodb://{self._hosts}/{self._database_name}"
        self._client = PerProcess(self._new_client)
        self._schema_checked_by = 0

    def __repr__(self) -> str:
        return f"MongoCatalog({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (MongoCatalog, (self._secret_url,))

    # --- blobs ----------------------------------------------------------------------------------------------

    def put_blobs(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        """Store blobs, in batches; those that are there are not sent. A kill in between leaves some: no
        harm.
        """
        for batch in _batches(blobs):
            with self._errors():
                collection = self._collection("blobs")
                here = {
                    bytes(found["_id"])
                    for found in collection.find({"_id": {"$in": [id for id, _ in batch]}}, {"_id": 1})
                }
                missing = [{"_id": id, "data": data} for id, data in batch if id not in here]
                if missing:
                    _insert_new(collection, missing)

    def get_blobs(self, ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        """The stored bytes of those of `ids` that are there."""
        wanted = list(dict.fromkeys(ids))
        found: dict[BlobId, bytes] = {}
        for start in range(0, len(wanted), _BATCH_IDS):
            part: list[bytes] = list(wanted[start : start + _BATCH_IDS])
            with self._errors():
                for blob in self._collection("blobs").find({"_id": {"$in": part}}):
                    found[BlobId(bytes(blob["_id"]))] = bytes(blob["data"])
        return found

    # --- snapshots and tags ---------------------------------------------------------------------------------

    def commit(self, record: SnapshotRecord, *, tags: Sequence[str] = (), move_tags: bool = False) -> SnapshotRecord:
        """Make a snapshot visible; see the protocol and, for how, the module."""
        name, id = record.dataset, record.id
        doc = ObjectId()
        written = False

        def change(old: _Dataset | None) -> _Dataset | None:
            nonlocal written
            there = old.doc(id) if old else None
            if there == doc:
                return old  # done by the attempt whose answer was lost
            tags_before = old.tags if old else {}
            for tag in () if move_tags else tags:
                if tags_before.get(tag, id) != id:
                    raise tag_exists(name, tag, tags_before[tag])
            listed = old.snapshots if old else ()
            if there is None:
                if not written:
                    _insert_record(self._collection("snapshots"), doc, record)
                    written = True
                listed = (*listed, _Listed(id, doc))
            return _Dataset(_NEW, id, listed, tags_before | dict.fromkeys(tags, id))

        with self._errors():
            try:
                new = self._change(name, change)
            except TagExistsError:
                if written:
                    self._collection("snapshots").delete_one({"_id": doc})
                raise
            assert new is not None
            if new.doc(id) == doc:
                return record
            if written:  # somebody else committed the same snapshot a moment before
                self._collection("snapshots").delete_one({"_id": doc})
        return self.snapshot(name, id) or record

    def dataset(self, name: str) -> DatasetRecord | None:
        """The dataset, or None."""
        with self._errors():
            found = self._collection("datasets").find_one({"_id": name}, {"snapshots": 0})
        return None if found is None else _dataset_record(found)

    def datasets(self) -> list[DatasetRecord]:
        """All of them, by name."""
        with self._errors():
            return [
                _dataset_record(found)
                for found in self._collection("datasets").find({}, {"snapshots": 0}).sort("_id", 1)
            ]

    def snapshot(self, dataset: str, id: str) -> SnapshotRecord | None:
        """The snapshot with this whole id, or None."""
        records = self._records(dataset, lambda listed: listed == id)
        return records[0] if records else None

    def snapshots(self, dataset: str, *, id_prefix: str = "") -> list[SnapshotRecord]:
        """A dataset's snapshots in the order of their creation, those whose id starts with `id_prefix`."""
        return self._records(dataset, lambda listed: listed.startswith(id_prefix))

    def set_tag(self, dataset: str, tag: str, id: str, *, move: bool = False) -> None:
        """Point a tag at a snapshot; see the protocol."""

        def change(old: _Dataset | None) -> _Dataset | None:
            if old is None or old.doc(id) is None:
                raise no_snapshot(dataset, id)
            there = old.tags.get(tag)
            if there == id:
                return old
            if there is not None and not move:
                raise tag_exists(dataset, tag, there)
            return old._replace(tags=old.tags | {tag: id})

        with self._errors():
            self._change(dataset, change)

    def remove_tag(self, dataset: str, tag: str) -> bool:
        """Whether it was there."""
        was_there = False

        def change(old: _Dataset | None) -> _Dataset | None:
            nonlocal was_there
            if old is None or tag not in old.tags:
                return old
            was_there = True
            return old._replace(tags={other: id for other, id in old.tags.items() if other != tag})

        with self._errors():
            self._change(dataset, change)
        return was_there

    def remove_snapshot(self, dataset: str, id: str) -> bool:
        """Forget a snapshot and its tags; see the protocol."""
        doc: ObjectId | None = None

        def change(old: _Dataset | None) -> _Dataset | None:
            nonlocal doc
            there = old.doc(id) if old else None
            if old is None or there is None:
                return old
            doc = there
            left = tuple(listed for listed in old.snapshots if listed.id != id)
            if not left:
                return None
            latest = left[-1].id if old.latest == id else old.latest
            tags = {tag: named for tag, named in old.tags.items() if named != id}
            return _Dataset(_NEW, latest, left, tags)

        with self._errors():
            self._change(dataset, change)
            if doc is not None:
                self._collection("snapshots").delete_one({"_id": doc})
        return doc is not None

    def close(self) -> None:
        """Close this process's client. A later call makes a new one."""
        client = self._client.take()
        if client is not None:
            client.close()

    # --- the conditional update -----------------------------------------------------------------------------

    def _change(self, name: str, change: Callable[[_Dataset | None], _Dataset | None]) -> _Dataset | None:
        """Replace a dataset's document by what `change` makes of it, and nothing else in between.

        `change` may be called several times; None stands for a dataset that is not there, and returning its
        argument for no change. A connection cut while the answer was on its way is no loss: all changes may
        be done twice.
        """
        collection = self._collection("datasets")
        deadline = time.monotonic() + _RACE_TIMEOUT_S
        cut_off = 0
        while True:
            try:
                found = collection.find_one({"_id": name})
                old = None if found is None else _parse_dataset(found)
                new = change(old)
                if new is old or _replace(collection, name, old, new):
                    return new
            except ServerSelectionTimeoutError:
                raise
            except AutoReconnect:
                cut_off += 1
                if cut_off > _RECONNECTS:
                    raise
            if time.monotonic() > deadline:
                raise CatalogUnavailableError(
                    f"the dataset {name} in {self.url} was changed by others without a pause for"
                    f" {_RACE_TIMEOUT_S:.0f} s",
                    hint="Try again.",
                )
            time.sleep(random.uniform(0, 0.01))

    def _records(self, dataset: str, wanted: Callable[[str], bool]) -> list[SnapshotRecord]:
        with self._errors():
            for _attempt in range(_RECONNECTS):
                found = self._collection("datasets").find_one({"_id": dataset}, {"snapshots": 1})
                docs = [] if found is None else [s["doc"] for s in found["snapshots"] if wanted(s["id"])]
                if not docs:
                    return []
                texts = {
                    document["_id"]: document["record"]
                    for document in self._collection("snapshots").find({"_id": {"$in": docs}})
                }
                if len(texts) == len(docs):
                    break  # otherwise one was removed between the two reads
        return [decode_record(texts[doc]) for doc in docs if doc in texts]

    # --- connection and errors ------------------------------------------------------------------------------

    def _new_client(self) -> MongoClient[_Document]:
        return MongoClient(self._secret_url, **self._options)

    def _collection(self, name: str) -> Collection[_Document]:
        pid = os.getpid()
        database = self._client.get().get_database(
            self._database_name,
            read_preference=ReadPreference.PRIMARY,
            read_concern=ReadConcern("majority"),
            write_concern=WriteConcern(w="majority", j=True, wtimeout=_WRITE_TIMEOUT_MS),
        )
        if self._schema_checked_by != pid:
            self._check_schema(database)
            self._schema_checked_by = pid
        return database[name]

    def _check_schema(self, database: Database[_Document]) -> None:
        found = database["meta"].find_one({"_id": "schema"})
        if found is None:
            if not database["datasets"].find_one({}, {"_id": 1}):
                self._write_schema(database)
            return
        if found["version"] > SCHEMA_VERSION:
            raise CatalogError(
                f"the catalog {self.url} was made by a newer datacache (schema {found['version']}, this one"
                f" knows {SCHEMA_VERSION})",
                hint="Install that version, or set DATACACHE_CATALOG to another database.",
            )

    @staticmethod
    def _write_schema(database: Database[_Document]) -> None:
        try:
            database["meta"].update_one({"_id": "schema"}, {"$setOnInsert": {"version": SCHEMA_VERSION}}, upsert=True)
        except DuplicateKeyError:
            pass  # another process was quicker
        except OperationFailure as exc:
            if exc.code not in _AUTHENTICATION_CODES:
                raise  # an account that may only read finds an empty catalog

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except PyMongoError as exc:
            # Not `from exc` for all: a driver's message about the URL could quote the password.
            raise self._translated(exc) from (None if isinstance(exc, ConfigurationError) else exc)

    def _translated(self, exc: PyMongoError) -> CatalogError:
        if isinstance(exc, ConfigurationError):
            return CatalogUnavailableError(
                f"MongoDB at {self._hosts} cannot be used: an option of its URL is wrong, or its SRV"
                " record was not found",
                hint="Check DATACACHE_CATALOG.",
            )
        unconfirmed = isinstance(exc, BulkWriteError) and exc.details.get("writeConcernErrors")
        if isinstance(exc, WTimeoutError) or unconfirmed:
            return CatalogUnavailableError(
                f"MongoDB at {self._hosts} could not confirm the write on a majority of its members",
                hint="Check the replica set (rs.status()), then do the same again: that is always safe.",
            )
        if isinstance(exc, AutoReconnect):  # ServerSelectionTimeoutError, NetworkTimeout, NotPrimaryError too
            reason = str(exc).split(", Timeout:")[0].split(" (configured timeouts")[0]
            return CatalogUnavailableError(
                f"MongoDB at {self._hosts} does not answer: {reason}",
                hint="Check that mongod runs there and that DATACACHE_CATALOG names its host and port.",
            )
        code = exc.code if isinstance(exc, OperationFailure) else None
        if code in _AUTHENTICATION_CODES:
            return CatalogError(
                f"MongoDB at {self._hosts} does not let this account use the database {self._database_name!r}",
                hint="Check user, password and authSource in DATACACHE_CATALOG, and the account's roles (readWrite).",
            )
        if isinstance(exc, DocumentTooLarge):
            return CatalogError(f"MongoDB at {self._hosts} takes no document above 16 MiB: {exc}")
        return CatalogError(f"MongoDB at {self._hosts} failed: {str(exc)[:500]}")


def _parse(url: str) -> tuple[str, str, dict[str, Any]]:
    """Hosts for messages, the database, and the client's options, from a URL. Looks nothing up."""
    scheme, _, rest = url.partition("://")
    authority, _, tail = rest.partition("/")
    database, _, query = tail.partition("?")
    wrong = SettingsError(
        "DATACACHE_CATALOG is not a valid MongoDB URL",
        hint="Write mongodb://USER:PASSWORD@HOST:PORT/DATABASE, special characters of the password as %XX.",
    )
    if scheme not in ("mongodb", "mongodb+srv"):
        raise wrong
    if scheme == "mongodb":  # the other kind would be looked up in the DNS
        try:
            parse_uri(url)
        except (InvalidURI, ConfigurationError, ValueError):
            raise wrong from None
    hosts = authority.rpartition("@")[2].removesuffix(":27017")
    given = {name.lower() for name, _value in parse_qsl(query, keep_blank_values=True)}
    defaults = {
        "serverSelectionTimeoutMS": _SELECTION_TIMEOUT_MS,
        "connectTimeoutMS": _SELECTION_TIMEOUT_MS,
        "socketTimeoutMS": _SOCKET_TIMEOUT_MS,
    }
    options: dict[str, Any] = {name: value for name, value in defaults.items() if name.lower() not in given}
    return hosts, unquote(database) or DEFAULT_DATABASE, options | {"appname": "datacache", "connect": False}


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


def _replace(collection: Collection[_Document], name: str, old: _Dataset | None, new: _Dataset | None) -> bool:
    """Whether the document was still the old one, and now is the new one."""
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


def _insert_record(collection: Collection[_Document], doc: ObjectId, record: SnapshotRecord) -> None:
    document = {
        "_id": doc,
        "dataset": record.dataset,
        "id": record.id,
        "created_at": record.created_at,
        "record": encode_record(record),
    }
    # `doc` is ours alone: a duplicate is the attempt whose answer was lost.
    with suppress(DuplicateKeyError):
        collection.insert_one(document)


def _insert_new(collection: Collection[_Document], documents: list[_Document]) -> None:
    for attempt in range(_RECONNECTS + 1):
        try:
            collection.insert_many(documents, ordered=False)
        except BulkWriteError as exc:
            errors = exc.details.get("writeErrors", [])
            unconfirmed = exc.details.get("writeConcernErrors")
            if unconfirmed or any(error["code"] != _DUPLICATE_KEY for error in errors):
                raise  # otherwise another process has just put the same blobs
        except ServerSelectionTimeoutError:
            raise
        except AutoReconnect:
            if attempt < _RECONNECTS:
                continue
            raise
        return


def _batches(blobs: Sequence[tuple[BlobId, bytes]]) -> Iterator[list[tuple[BlobId, bytes]]]:
    batch: list[tuple[BlobId, bytes]] = []
    size_bytes = 0
    for blob in blobs:
        batch.append(blob)
        size_bytes += len(blob[1])
        if size_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_IDS:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
