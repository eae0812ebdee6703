"""The tables of the embedded catalog: made in a new file, brought up to date in one of an older version.

Used by `sqlite.catalog` on each new connection; any thread and process, at once. A change of version is one
transaction, so one that is killed has not happened.

    datasets, tags       as their names say
    snapshots            `seq` is the order of creation
    blobs                id → compressed bytes
    puts                 id → size and when it was last put: apart from the bytes, so that garbage collection and a
                         blobs that are put again read and write none of them
    derived              other data of a snapshot, besides its manifest: name → root blob
    meta                 `identity`
    documents            small texts by kind and key
    task_queues, tasks   see `tasks.sqlite`; the plan comes last, so that reading the other columns skips its pages
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datacache.catalog.sqlite.file import primary_code
from datacache.core.errors import CatalogError, CatalogUnavailableError

APPLICATION_ID = 0x64636174  # "dcat"
SCHEMA_VERSION = 4

_ADDED_IN_2 = (
    "CREATE TABLE puts (id BLOB PRIMARY KEY, size_bytes INTEGER NOT NULL, put_s INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE derived (snapshot TEXT NOT NULL, name TEXT NOT NULL, root BLOB NOT NULL, set_s INTEGER NOT NULL,
        PRIMARY KEY (snapshot, name)) WITHOUT ROWID""",
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
_ADDED_IN_3 = (
    """CREATE TABLE task_queues (name TEXT PRIMARY KEY, generation INTEGER NOT NULL, parameters TEXT NOT NULL,
        epoch INTEGER NOT NULL, made INTEGER NOT NULL, checkpoint BLOB NOT NULL, plan BLOB NOT NULL)""",
    """CREATE TABLE tasks (generation INTEGER NOT NULL, epoch INTEGER NOT NULL, number INTEGER NOT NULL,
        place INTEGER NOT NULL, name TEXT NOT NULL, start INTEGER NOT NULL, records INTEGER NOT NULL,
        position INTEGER NOT NULL, state TEXT NOT NULL, errors TEXT NOT NULL, token INTEGER NOT NULL DEFAULT 0,
        claim TEXT NOT NULL DEFAULT '', owner TEXT NOT NULL DEFAULT '', since_s REAL NOT NULL DEFAULT 0,
        until_s REAL NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0, lost INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (generation, epoch, number)) WITHOUT ROWID""",
    "CREATE INDEX tasks_by_state ON tasks (generation, state, epoch, place)",
    "CREATE INDEX tasks_by_lease ON tasks (generation, until_s) WHERE state = 'doing'",
    "CREATE INDEX tasks_by_claim ON tasks (generation, claim) WHERE state = 'doing'",
)
_ADDED_IN_4 = (
    """CREATE TABLE documents (kind TEXT NOT NULL, key TEXT NOT NULL, text TEXT NOT NULL,
        PRIMARY KEY (kind, key)) WITHOUT ROWID""",
)
_SCHEMA = (
    "CREATE TABLE datasets (name TEXT PRIMARY KEY, latest TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE snapshots (seq INTEGER PRIMARY KEY AUTOINCREMENT, dataset TEXT NOT NULL, id TEXT NOT NULL,
        record TEXT NOT NULL, UNIQUE (dataset, id))""",
    """CREATE TABLE tags (dataset TEXT NOT NULL, tag TEXT NOT NULL, id TEXT NOT NULL,
        PRIMARY KEY (dataset, tag)) WITHOUT ROWID""",
    "CREATE TABLE blobs (id BLOB PRIMARY KEY, data BLOB NOT NULL)",
    *_ADDED_IN_2,
    *_ADDED_IN_3,
    *_ADDED_IN_4,
)
_ADDED_SINCE = {
    0: _SCHEMA,
    1: _ADDED_IN_2 + _ADDED_IN_3 + _ADDED_IN_4,
    2: _ADDED_IN_3 + _ADDED_IN_4,
    3: _ADDED_IN_4,
}


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Give the file `path` the tables of this version. SQLite's errors pass through. Raise `CatalogError` for a file of
    a newer version, `CatalogUnavailableError` for another program's."""
    version = _version(connection, path)
    if version == SCHEMA_VERSION:
        return
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        with _transaction(connection, "EXCLUSIVE"):
            version = _version(connection, path)
            if version < SCHEMA_VERSION:  # otherwise another process has been quicker
                _bring_up_to_date(connection, version)
    except sqlite3.Error as exc:
        if version == 0 or primary_code(exc) != sqlite3.SQLITE_READONLY:
            raise
        # What cannot be written can be read all the same: this connection sees the new tables, empty.
        connection.execute("PRAGMA temp_store=MEMORY")
        for statement in _ADDED_SINCE[version]:
            temporary = statement.replace("CREATE TABLE ", "CREATE TABLE temp.", 1)
            connection.execute(temporary.replace("CREATE INDEX ", "CREATE INDEX temp.", 1))


def _bring_up_to_date(connection: sqlite3.Connection, version: int) -> None:
    for statement in _ADDED_SINCE[version]:
        connection.execute(statement)
    if version == 1:  # nobody knows when its blobs were put: their grace period begins now
        connection.execute("INSERT INTO puts SELECT id, length(data), ? FROM blobs", (int(time.time()),))
    if version < 2:
        connection.execute("INSERT INTO meta VALUES ('identity', ?)", (secrets.token_hex(8),))
    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the version of the file's schema; 0 for an empty file."""
    if connection.in_transaction:
        application, version, tables = _identification(connection)
    else:
        with _transaction(connection, "DEFERRED"):  # the three as they were at one moment
            application, version, tables = _identification(connection)
    if application == APPLICATION_ID and version > SCHEMA_VERSION:
        raise CatalogError(
            f"the catalog {path} was made by a newer datacache (schema {version}, this one knows {SCHEMA_VERSION})",
            hint="Install that version, or set DATACACHE_CATALOG to another file.",
        )
    if application == APPLICATION_ID and version:
        return version
    if application or version or tables:
        raise CatalogUnavailableError(
            f"{path} is a database of another program", hint="Set DATACACHE_CATALOG to another file."
        )
    return 0


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _identification(connection: sqlite3.Connection) -> tuple[int, int, int]:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return application, version, tables
