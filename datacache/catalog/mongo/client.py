"""The connection to a MongoDB database: URL, client, schema, clock, and the translation of the driver's errors.

Used by `catalog.mongo` and `catalog.tasks.mongo`. Any thread may use it; a child made by `fork()` makes its own client.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote

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

from datacache.core.breaker import pause_s
from datacache.core.concurrency import PerProcess
from datacache.core.errors import CatalogError, CatalogUnavailableError, SettingsError

SCHEMA_VERSION = 2
DEFAULT_DATABASE = "datacache"

_SELECTION_TIMEOUT_MS = 5_000
_SOCKET_TIMEOUT_MS = 60_000
_WRITE_TIMEOUT_MS = 30_000
_AUTHENTICATION_CODES = (13, 18, 8000)
_DUPLICATE_KEY = 11000
_TRIES = 4
_AWAY_FIRST_S, _AWAY_LONGEST_S = 5.0, 30.0
"""Growing pauses after a server was not found, in which no call looks for it. The driver looks meanwhile, in the
background, and ends the pause when it finds the server."""
_HEARTBEAT_MS = 5_000

_Document = dict[str, Any]
_T = TypeVar("_T")


class _Away:
    """One process's memory of a server that was not found. Any thread; a lost update costs a wait."""

    def __init__(self) -> None:
        self.failures = 0
        self.until = 0.0
        self.error: CatalogUnavailableError | None = None

    def note(self, error: CatalogUnavailableError) -> None:
        self.failures += 1
        self.error = error
        self.until = time.monotonic() + pause_s(self.failures, first_s=_AWAY_FIRST_S, longest_s=_AWAY_LONGEST_S)


class MongoDatabase:
    """The database that `url` names. Writes wait for the journal of a majority, and reads see only data that a majority
    has."""

    def __init__(self, url: str) -> None:
        self._secret_url = url
        self._hosts, self._name, self._options = _parse(url)
        self.url = f"mongodb://{self._hosts}/{self._name}"
        self._client: PerProcess[MongoClient[_Document]] = PerProcess(lambda: MongoClient(url, **self._options))
        self._away = PerProcess(_Away)
        self._checked_by = 0

    def __reduce__(self) -> tuple[object, ...]:
        return (MongoDatabase, (self._secret_url,))

    def collection(self, name: str) -> Collection[_Document]:
        """Return a collection. Check the schema, and write that of a new database, on this process's first call."""
        pid = os.getpid()
        self._expect_not_away()
        database = self._client.get().get_database(
            self._name,
            read_preference=ReadPreference.PRIMARY,
            read_concern=ReadConcern("majority"),
            write_concern=WriteConcern(w="majority", j=True, wtimeout=_WRITE_TIMEOUT_MS),
        )
        if self._checked_by != pid:
            self._check_schema(database)
            self._checked_by = pid
        return database[name]

    def now_s(self) -> float:
        """Ask the server for Unix time by its clock, so that nodes whose clocks differ, or are set while a process
        runs, agree on ages."""
        found = self.collection("meta").database.command("hello")
        return float(found["localTime"].replace(tzinfo=dt.UTC).timestamp())

    def _expect_not_away(self) -> None:
        """Repeat the error of a call that did not find the server a moment ago, unless the driver has found it since.
        After the pause, one call of many looks again."""
        away = self._away.get()
        if away.error is None:
            return
        if self._client.get().topology_description.has_writable_server():
            away.failures, away.error = 0, None
        elif time.monotonic() < away.until:
            raise CatalogUnavailableError(away.error.message, hint=away.error.hint)
        else:
            away.until = time.monotonic() + _SELECTION_TIMEOUT_MS / 1000

    def close(self) -> None:
        """Close this process's client. A later call makes a new one."""
        client = self._client.take()
        if client is not None:
            client.close()

    def _check_schema(self, database: Database[_Document]) -> None:
        found = database["meta"].find_one({"_id": "schema"})
        if found is None:
            if not database["datasets"].find_one({}, {"_id": 1}):
                self._write_schema(database)
        elif found["version"] < SCHEMA_VERSION:
            self._write_schema(database)
        elif found["version"] > SCHEMA_VERSION:
            raise CatalogError(
                f"the catalog {self.url} was made by a newer datacache (schema {found['version']}, this one"
                f" knows {SCHEMA_VERSION})",
                hint="Install that version, or set DATACACHE_CATALOG to another database.",
            )

    @staticmethod
    def _write_schema(database: Database[_Document]) -> None:
        """Write the schema of a new database, or of one of version 1, which had no indexes and no identity. Clients of
        that version refuse it from then on: they would not take back the doom of a blob that they need."""
        try:
            database["blobs"].create_index([("put_s", 1), ("_id", 1)])
            database["blobs"].create_index("doomed", sparse=True)
            database["derived"].create_index([("snapshot", 1), ("name", 1)])
            meta = database["meta"]
            for id, values in (("identity", {"value": secrets.token_hex(8)}), ("schema", {"version": SCHEMA_VERSION})):
                with suppress(DuplicateKeyError):  # another process was quicker
                    meta.update_one({"_id": id}, {"$setOnInsert": values}, upsert=True)
            meta.update_one(
                {"_id": "schema", "version": {"$lt": SCHEMA_VERSION}}, {"$set": {"version": SCHEMA_VERSION}}
            )
        except OperationFailure as exc:
            if exc.code not in _AUTHENTICATION_CODES:
                raise  # an account that may only read finds an empty catalog, or one of version 1

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise errors of the driver within as errors of the catalog."""
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
            error = CatalogUnavailableError(
                f"MongoDB at {self._hosts} does not answer: {reason}",
                hint="Check that mongod runs there and that DATACACHE_CATALOG names its host and port.",
            )
            if isinstance(exc, ServerSelectionTimeoutError):
                self._away.get().note(error)
            return error
        code = exc.code if isinstance(exc, OperationFailure) else None
        if code in _AUTHENTICATION_CODES:
            return CatalogError(
                f"MongoDB at {self._hosts} does not let this account use the database {self._name!r}",
                hint="Check user, password and authSource in DATACACHE_CATALOG, and the account's roles (readWrite).",
            )
        if isinstance(exc, DocumentTooLarge):
            return CatalogError(f"MongoDB at {self._hosts} takes no document above 16 MiB: {exc}")
        return CatalogError(f"MongoDB at {self._hosts} failed: {str(exc)[:500]}")


def retried(attempt: Callable[[], _T]) -> _T:
    """Return the result of `attempt()`. Repeat it, three times at most, where the connection was cut: the server may
    have done what was cut off. Do not repeat it where no server was found in time."""
    cut_off = 0
    while True:
        try:
            return attempt()
        except ServerSelectionTimeoutError:
            raise
        except AutoReconnect:
            cut_off += 1
            if cut_off == _TRIES:
                raise


def pause_after_race() -> None:
    """Wait for some milliseconds before a change is tried again that lost a race: a random time, so that the writers do
    not meet again."""
    time.sleep(random.uniform(0, 0.01))


def insert_new(collection: Collection[_Document], documents: list[_Document]) -> None:
    """Insert those of `documents` whose `_id` is not taken: another process may have just inserted the same."""
    try:
        retried(lambda: collection.insert_many(documents, ordered=False))
    except BulkWriteError as exc:
        errors = exc.details.get("writeErrors", [])
        if exc.details.get("writeConcernErrors") or any(error["code"] != _DUPLICATE_KEY for error in errors):
            raise


def _parse(url: str) -> tuple[str, str, dict[str, Any]]:
    """Return the hosts for messages, the database, and the client's options of a URL. Look nothing up."""
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
        "heartbeatFrequencyMS": _HEARTBEAT_MS,
    }
    options: dict[str, Any] = {name: value for name, value in defaults.items() if name.lower() not in given}
    return hosts, unquote(database) or DEFAULT_DATABASE, options | {"appname": "datacache", "connect": False}
