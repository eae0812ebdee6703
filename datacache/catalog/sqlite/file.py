"""One SQLite file, opened safely by many threads and processes: a pool of connections that no `fork()` ever carries.

Used by the embedded catalog and by the blob cache; it knows nothing of their tables. Any thread may call it.

Why a pool that is closed before a fork, and not one connection a thread: SQLite keeps the file locks of a process in a
table that all its connections share. A child that inherits the table believes it holds locks that only its parent
holds, so even a connection that the child opens itself would read without a lock
(https://sqlite.org/howtocorrupt.html, 2.6). So `fork()` waits until every connection is idle and closes them; parent
and child open their own when they need one. A child made by `exec` (`subprocess`) inherits nothing: SQLite opens its
files close-on-exec.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from datacache.catalog.base import batches
from datacache.manifest.model import BlobId

BUSY_TIMEOUT_S = 60.0
"""How long a writer waits for the others. One write holds the lock for well under a second."""

BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""Another connection holds the lock."""
DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
"""The file is no SQLite database, or a broken one."""

_MAX_IDLE = 8
_BATCH_IDS = 500


class SqliteFile:
    """A pool of connections to one file. The pool runs `prepare` on each new connection (pragmas, schema).

    The pool calls `uri` for each opening, as a file may have become read-only since. It notices at the next use that a
    file was removed or replaced, so nothing is written to one that nobody will find again. Errors of SQLite pass
    through: only the owner knows what they mean for its caller.
    """

    def __init__(self, path: Path, uri: Callable[[], str], prepare: Callable[[sqlite3.Connection], None]) -> None:
        self._path = path
        self._uri = uri
        self._prepare = prepare
        self._condition = threading.Condition()  # guards the fields below
        self._idle: list[sqlite3.Connection] = []
        self._in_use = 0
        self._forking = False
        self._generation = 0
        self._identity: tuple[int, int] | None = None  # device and inode of the file the connections have open
        self._pid = os.getpid()
        _pools.add(self)

    @contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection to this thread. It must be given back without an open transaction or cursor."""
        connection, generation = self._take()
        healthy = False
        try:
            yield connection
            healthy = not connection.in_transaction
        finally:
            self._give(connection, generation, healthy)

    @contextmanager
    def write(self, *, durable: bool) -> Iterator[sqlite3.Connection]:
        """Lend a connection in a write transaction: committed at the end, rolled back by an exception.

        `durable` makes this commit, and all earlier ones, wait for the disk: a power cut then loses none of them.
        """
        with self.use() as connection:
            connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            # IMMEDIATE: a transaction that begins by reading and then writes can fail at once with "database is
            # locked", whatever the busy timeout, because its snapshot is too old to write on.
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the idle connections now, and those in use when they come back. A later use opens new ones."""
        with self._condition:
            self._leave_parents_connections_locked()
            self._retire_locked()

    def _retire_locked(self) -> None:
        self._generation += 1
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take(self) -> tuple[sqlite3.Connection, int]:
        with self._condition:
            self._leave_parents_connections_locked()
            while self._forking:
                self._condition.wait()
            identity = file_identity(self._path)
            if identity is None or identity != self._identity:
                self._retire_locked()
                self._identity = identity
            self._in_use += 1
            generation = self._generation
            if self._idle:
                return self._idle.pop(), generation
        try:
            connection = self._open()
        except BaseException:
            with self._condition:
                self._in_use -= 1
                self._condition.notify_all()
            raise
        if identity is None:  # it has just been created
            with self._condition:
                if self._generation == generation:
                    self._identity = file_identity(self._path)
        return connection, generation

    def _give(self, connection: sqlite3.Connection, generation: int, healthy: bool) -> None:
        with self._condition:
            self._in_use -= 1
            keep = healthy and generation == self._generation and len(self._idle) < _MAX_IDLE
            if keep and not self._forking:
                self._idle.append(connection)
            else:
                connection.close()
            self._condition.notify_all()

    def _open(self) -> sqlite3.Connection:
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            connection = sqlite3.connect(
                self._uri(), uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(connection)
                return connection
            except sqlite3.OperationalError as exc:
                connection.close()
                # Switching to WAL and closing the last connection lock the file outside the busy handler.
                if primary_code(exc) in BUSY and time.monotonic() < deadline:
                    time.sleep(random.uniform(0.002, 0.02))
                    continue
                raise
            except BaseException:
                connection.close()
                raise

    def _leave_parents_connections_locked(self) -> None:
        """Drop connections of the parent after a fork that ran no Python hooks, without touching or closing them."""
        if self._pid != os.getpid():
            _never_closed.extend(self._idle)
            self._idle = []
            self._in_use = 0
            self._pid = os.getpid()

    def close_for_fork(self) -> None:
        """Wait until nothing is in use, close all connections and lend none until the fork is over."""
        with self._condition:
            self._forking = True
            deadline = time.monotonic() + BUSY_TIMEOUT_S
            while self._in_use and time.monotonic() < deadline:
                self._condition.wait(1.0)
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def reopen_in_parent(self) -> None:
        """Lend again: the fork is over."""
        with self._condition:
            self._forking = False
            self._condition.notify_all()

    def reopen_in_child(self) -> None:
        """Begin anew in the child, which has no connection and no other thread."""
        self._condition = threading.Condition()  # the old one may be locked by a thread that is not here
        self._forking = False
        self._in_use = 0
        self._pid = os.getpid()


def primary_code(exc: sqlite3.Error) -> int:
    """Return SQLite's code of an error, without its extension."""
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF


def file_uri(path: Path, query: str) -> str:
    """Return SQLite's URI of `path`, which alone can say how to open it."""
    return f"{path.absolute().as_uri()}?{query}"


def id_batches(ids: Iterable[BlobId]) -> Iterator[tuple[list[BlobId], str]]:
    """Cut ids, each taken once, into what one statement takes, each with its `?,?,…`."""
    for part in batches(dict.fromkeys(ids), _BATCH_IDS):
        yield part, ",".join("?" * len(part))


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file, or None where it cannot be found."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


_pools: weakref.WeakSet[SqliteFile] = weakref.WeakSet()
_fork_lock = threading.Lock()  # guards _closed_for_fork: one fork at a time
_closed_for_fork: list[SqliteFile] = []
_never_closed: list[sqlite3.Connection] = []


def _before_fork() -> None:
    _fork_lock.acquire()
    _closed_for_fork[:] = list(_pools)
    for pool in _closed_for_fork:
        pool.close_for_fork()


def _after_fork_in_parent() -> None:
    for pool in _closed_for_fork:
        pool.reopen_in_parent()
    _closed_for_fork.clear()
    _fork_lock.release()


def _after_fork_in_child() -> None:
    for pool in _closed_for_fork:
        pool.reopen_in_child()
    _closed_for_fork.clear()
    _fork_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
