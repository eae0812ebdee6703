"""The embedded catalog: one SQLite file, for one node.

Used through `catalog.open`. Any thread and any number of processes may use it at once, also across `fork()` (see
`sqlite.file`). The file is in WAL mode, so readers never wait for a writer, and writers wait for one another. Every
write is one transaction. All but blobs are on the disk when the call returns, and blobs are when the commit that needs
them returns. The file must lie on a local file system: WAL shares memory between processes. `sqlite.schema` has its
tables.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

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
from datacache.catalog.record import decode_record, encode_record
from datacache.catalog.sqlite.collect import SqliteCollection
from datacache.catalog.sqlite.file import (
    BUSY,
    BUSY_TIMEOUT_S,
    DAMAGED,
    SqliteFile,
    file_uri,
    id_batches,
    primary_code,
)
from datacache.catalog.sqlite.schema import prepare
from datacache.core.boot import boot_id
from datacache.core.errors import CatalogError, CatalogUnavailableError
from datacache.manifest.model import BlobId, DatasetRecord, SnapshotRecord
from datacache.store.clock import elapsed_s

_DATASET = "SELECT name, latest, (SELECT json_group_object(tag, id) FROM tags WHERE dataset = name) FROM datasets"
_SET_TAG = "INSERT OR REPLACE INTO tags (dataset, tag, id) VALUES (?, ?, ?)"
_ELSEWHERE = "Set DATACACHE_CATALOG (or DATACACHE_HOME) to a place you can write to."

_BATCH_BYTES = 16 * 2**20
"""Blobs of one transaction: other writers wait for about a tenth of a second."""
_BATCH_BLOBS = 10_000

CLOCK = "clock"
"""The kind of the document of the clock, whose one key is `_NODE`."""
_NODE = "node"
_SLACK_S = 60.0
"""A time of day that is corrected by less counts as right."""


class SqliteCatalog(DatasetCatalog):
    """A `Catalog` in the file `path`, which is created, readable by its owner only, when it is first needed."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.url = f"sqlite:///{self.path}"
        self._file = SqliteFile(self.path, self._uri, lambda connection: prepare(connection, self.path))

    def __repr__(self) -> str:
        return f"SqliteCatalog({str(self.path)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (SqliteCatalog, (self.path,))

    def now_s(self) -> float:
        """Return the time of the one node that can use the file. Within one boot it follows no step ahead.

        All users of the file share a count of seconds that nobody can set (`elapsed_s`). The file keeps the time of day
        at which this count began in this boot, as the first user saw it. A time of day that is set ahead later makes
        nothing older: no lease ends early, and no grace period. One that is set back is taken over, which makes all
        younger, so that stored times do not lie in the future for ever. Must not be called within a transaction.
        """
        boot = boot_id()
        while boot:
            text = self.document(CLOCK, _NODE)
            wall_s, running_s = time.time(), elapsed_s()
            began_s = _began_s(text, boot)
            if began_s is not None and began_s + running_s <= wall_s + _SLACK_S:
                return began_s + running_s
            noted = json.dumps({"version": 1, "boot": boot, "began_s": wall_s - running_s})
            with suppress(CatalogError):  # a file that cannot be written: the time is the same
                if not self.set_document(CLOCK, _NODE, noted, old=text):
                    continue  # another process was first
            return wall_s
        return time.time()

    def put_blobs(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        now_s = int(self.now_s())
        # A kill between two batches leaves some blobs: no snapshot names them yet.
        for batch in batches(blobs, _BATCH_BLOBS, size_bytes=lambda blob: len(blob[1]), most_bytes=_BATCH_BYTES):
            with self.writing(durable=False) as connection:
                connection.executemany("INSERT OR IGNORE INTO blobs (id, data) VALUES (?, ?)", batch)
                connection.executemany(
                    "INSERT INTO puts VALUES (?1, ?2, ?3) ON CONFLICT DO UPDATE SET put_s = ?3 WHERE put_s < ?3 - ?4",
                    [(id, len(data), now_s, REFRESH_AFTER_S) for id, data in batch],
                )

    def get_blobs(self, ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        found: dict[BlobId, bytes] = {}
        for part, marks in id_batches(ids):
            with self.reading() as connection:
                rows = connection.execute(f"SELECT id, data FROM blobs WHERE id IN ({marks})", part)  # noqa: S608
                found.update((BlobId(id), data) for id, data in rows)
        return found

    def has_blobs(self, ids: Iterable[BlobId]) -> set[BlobId]:
        found: set[BlobId] = set()
        for part, marks in id_batches(ids):
            with self.reading() as connection:
                rows = connection.execute(f"SELECT id FROM blobs WHERE id IN ({marks})", part)  # noqa: S608
                found.update(BlobId(id) for (id,) in rows)
        return found

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
        dataset, id = record.dataset, record.id
        with self.writing(durable=True) as connection:
            old = _listing(connection, dataset)
            if check is not None and old is not None and (latest := _record(connection, dataset, old.latest)):
                check(latest)
            _check_blobs_are_there(connection, needs, record.ref)
            if not move_tags and old is not None:
                check_tags_free(dataset, old.tags, tags, id)
            connection.execute(
                "INSERT OR IGNORE INTO snapshots (dataset, id, record) VALUES (?, ?, ?)",
                (dataset, id, encode_record(record)),
            )
            connection.execute(
                "INSERT INTO datasets (name, latest) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET latest = ?2",
                (dataset, id),
            )
            connection.executemany(_SET_TAG, [(dataset, tag, id) for tag in tags])
            kept = _record(connection, dataset, id)
            assert kept is not None
            return kept

    def dataset(self, name: str) -> DatasetRecord | None:
        with self.reading() as connection:
            row = connection.execute(f"{_DATASET} WHERE name = ?", (name,)).fetchone()
        return None if row is None else _dataset_record(row)

    def datasets(self) -> list[DatasetRecord]:
        with self.reading() as connection:
            rows = connection.execute(f"{_DATASET} ORDER BY name").fetchall()
        return [_dataset_record(row) for row in rows]

    def snapshot(self, dataset: str, id: str) -> SnapshotRecord | None:
        with self.reading() as connection:
            return _record(connection, dataset, id)

    def snapshots(self, dataset: str, *, id_prefix: str = "") -> list[SnapshotRecord]:
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT record FROM snapshots WHERE dataset = ? AND substr(id, 1, ?) = ? ORDER BY seq",
                (dataset, len(id_prefix), id_prefix),
            ).fetchall()
        return [decode_record(text) for (text,) in rows]

    def _change(self, name: str, change: Change, *, removes: str = "") -> ListedDataset | None:
        removed = leases.removed_text(self.now_s()) if removes else ""
        with self.writing(durable=True) as connection:
            old = _listing(connection, name)
            new = change(old)
            if new is old or old is None:
                return new
            left = new or old._replace(snapshots={}, tags={})
            gone = [(name, id) for id in old.snapshots if id not in left.snapshots]
            connection.executemany("DELETE FROM snapshots WHERE dataset = ? AND id = ?", gone)
            if removes:
                row = (leases.REMOVED, removes, removed)
                connection.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", row)
            untagged = [(name, tag) for tag in old.tags if tag not in left.tags]
            connection.executemany("DELETE FROM tags WHERE dataset = ? AND tag = ?", untagged)
            tagged = [(name, tag, id) for tag, id in left.tags.items() if old.tags.get(tag) != id]
            connection.executemany(_SET_TAG, tagged)
            connection.execute("UPDATE datasets SET latest = ? WHERE name = ?", (left.latest, name))
            if new is None:
                connection.execute("DELETE FROM datasets WHERE name = ?", (name,))
            return new

    # --- besides the snapshots ------------------------------------------------------------------------------

    def identity(self) -> str:
        with self.reading() as connection:
            row = connection.execute("SELECT value FROM meta WHERE name = 'identity'").fetchone()
        if row is None:
            raise CatalogError(
                f"the catalog {self.path} is of an older version and cannot be written",
                hint="Open it once where it can be written: dsctl snapshot list",
            )
        return str(row[0])

    def derived(self, snapshot_id: str, name: str) -> BlobId | None:
        with self.reading() as connection:
            row = connection.execute(
                "SELECT root FROM derived WHERE snapshot = ? AND name = ?", (snapshot_id, name)
            ).fetchone()
        return None if row is None else BlobId(row[0])

    def derived_names(self, snapshot_id: str) -> list[str]:
        with self.reading() as connection:
            rows = connection.execute("SELECT name FROM derived WHERE snapshot = ? ORDER BY name", (snapshot_id,))
            return [str(name) for (name,) in rows]

    def set_derived(self, snapshot_id: str, name: str, root: BlobId, *, needs: Collection[BlobId] = ()) -> None:
        now_s = int(self.now_s())
        with self.writing(durable=True) as connection:
            _check_blobs_are_there(connection, needs, f"{name} of {snapshot_id[:12]}")
            connection.execute("INSERT OR REPLACE INTO derived VALUES (?, ?, ?, ?)", (snapshot_id, name, root, now_s))

    def document(self, kind: str, key: str) -> str | None:
        check_document(kind, key)
        with self.reading() as connection:
            row = connection.execute("SELECT text FROM documents WHERE kind = ? AND key = ?", (kind, key)).fetchone()
        return None if row is None else str(row[0])

    def set_document(self, kind: str, key: str, text: str, *, old: str | None) -> bool:
        check_document(kind, key, text)
        with self.writing(durable=True) as connection:
            if old is None:
                cursor = connection.execute("INSERT OR IGNORE INTO documents VALUES (?, ?, ?)", (kind, key, text))
            else:
                cursor = connection.execute(
                    "UPDATE documents SET text = ? WHERE kind = ? AND key = ? AND text = ?", (text, kind, key, old)
                )
            return cursor.rowcount > 0

    def remove_document(self, kind: str, key: str, *, old: str | None = None) -> bool:
        check_document(kind, key)
        with self.writing(durable=True) as connection:
            cursor = connection.execute(
                "DELETE FROM documents WHERE kind = ? AND key = ? AND text = coalesce(?, text)", (kind, key, old)
            )
            return cursor.rowcount > 0

    def documents(self, kind: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, str]]:
        check_document(kind, after or None)
        with self.reading() as connection:
            return connection.execute(
                "SELECT key, text FROM documents WHERE kind = ? AND key > ? ORDER BY key LIMIT ?",
                (kind, after, max(0, limit)),
            ).fetchall()

    def collect(self, live: Live, *, grace_s: float, dry_run: bool = False, now_s: float | None = None) -> Collected:
        """See `Catalog.collect`. The file keeps its size: freed room is filled again first."""
        now_s = self.now_s() if now_s is None else now_s
        with self._errors():
            collection = SqliteCollection(self._file, live, now_s=now_s, cutoff_s=int(now_s - grace_s))
            return collection.run(dry_run=dry_run)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection, also for what else lies in the file, such as task queues. Raise the catalog's errors."""
        with self._errors(), self._file.use() as connection:
            yield connection

    @contextmanager
    def writing(self, *, durable: bool) -> Iterator[sqlite3.Connection]:
        """Lend a connection in a write transaction, likewise; see `SqliteFile.write`."""
        with self._errors(), self._file.write(durable=durable) as connection:
            # A file that cannot be written has to say so, even where temporary tables stand in for missing ones.
            connection.execute("UPDATE datasets SET latest = latest WHERE 0")
            yield connection

    def close(self) -> None:
        self._file.close()

    # --- opening --------------------------------------------------------------------------------------------

    def _uri(self) -> str:
        path = self.path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # O_EXCL: opening and closing a database that is there would drop this process's locks on it.
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                there = os.stat(path.parent)
                if os.geteuid() == 0 and there.st_uid != 0:  # as SQLite does with the files it puts beside it
                    os.fchown(fd, there.st_uid, there.st_gid)
            finally:
                os.close(fd)
        except FileExistsError:
            if not path.is_file():
                raise CatalogUnavailableError(
                    f"the catalog {path} cannot be opened: it is no file", hint=_ELSEWHERE
                ) from None
        except OSError as exc:
            if not path.is_file():
                raise CatalogUnavailableError(
                    f"the catalog {path} cannot be created: {exc.strerror}", hint=_ELSEWHERE
                ) from exc
        if 0 < path.stat().st_size < 512:  # SQLite would take it for an empty database and write over it
            raise self._damaged("it is too small")
        if os.access(path, os.W_OK):
            return file_uri(path, "mode=rw")
        wal = path.with_name(f"{path.name}-wal")
        if os.statvfs(path).f_flag & os.ST_RDONLY and not (wal.exists() and wal.stat().st_size):
            # WAL needs a file of shared memory beside the database, except where nobody can write.
            return file_uri(path, "mode=ro&immutable=1")
        return file_uri(path, "mode=ro")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise self._translated(exc) from exc
        except OSError as exc:
            if isinstance(exc, CatalogError):
                raise
            raise CatalogUnavailableError(
                f"the catalog {self.path} cannot be opened: {exc.strerror}", hint=_ELSEWHERE
            ) from exc

    def _damaged(self, reason: str) -> CatalogUnavailableError:
        path = self.path
        return CatalogUnavailableError(
            f"the catalog {path} is damaged or no catalog: {reason}",
            hint=f"Put a copy back, or start an empty one (mv {path} {path}.broken) and make the snapshots"
            " again: the data in the bucket is not touched. sqlite3's .recover may save what it held.",
        )

    def _translated(self, exc: sqlite3.Error) -> CatalogError:
        path, code = self.path, primary_code(exc)
        if code in DAMAGED:
            return self._damaged(str(exc))
        if code in BUSY:
            return CatalogUnavailableError(
                f"the catalog {path} has been locked by another process for {BUSY_TIMEOUT_S:.0f} s",
                hint=f"See who holds it: fuser {path}",
            )
        if code == sqlite3.SQLITE_FULL or _no_space(path):
            return CatalogError(
                f"no space left for the catalog {path}; nothing was changed",
                hint=f"Free some space: df -h {path.parent}",
            )
        if code == sqlite3.SQLITE_READONLY:
            return CatalogError(f"the catalog {path} cannot be written: {exc}", hint=_ELSEWHERE)
        if isinstance(exc, sqlite3.IntegrityError):  # the database works, and would say the same again
            return CatalogError(f"the catalog {path} does not take this: {exc}")
        if os.access(path, os.F_OK) and not os.access(path, os.R_OK):
            return CatalogUnavailableError(
                f"the catalog {path} cannot be opened: it belongs to another user (id {os.stat(path).st_uid})",
                hint="Run this as that user, or set DATACACHE_HOME to a folder of your own.",
            )
        return CatalogUnavailableError(
            f"the catalog {path} cannot be used: {exc}",
            hint=f"Check that you may write to {path.parent} and that its disk is well.",
        )


def _no_space(path: Path) -> bool:
    # WAL's shared memory on a full disk fails as "disk I/O error" or "unable to open", not as SQLITE_FULL.
    try:
        stats = os.statvfs(path.parent)
    except OSError as exc:
        return exc.errno == errno.ENOSPC
    return stats.f_bavail * stats.f_frsize < 64 * 1024 and not stats.f_flag & os.ST_RDONLY


def _record(connection: sqlite3.Connection, dataset: str, id: str) -> SnapshotRecord | None:
    row = connection.execute("SELECT record FROM snapshots WHERE dataset = ? AND id = ?", (dataset, id)).fetchone()
    return None if row is None else decode_record(row[0])


def _listing(connection: sqlite3.Connection, dataset: str) -> ListedDataset | None:
    row = connection.execute("SELECT latest FROM datasets WHERE name = ?", (dataset,)).fetchone()
    if row is None:
        return None
    listed = connection.execute("SELECT id, seq FROM snapshots WHERE dataset = ? ORDER BY seq", (dataset,))
    tags = connection.execute("SELECT tag, id FROM tags WHERE dataset = ?", (dataset,))
    return ListedDataset(row[0], dict(listed.fetchall()), dict(tags.fetchall()))


def _dataset_record(row: tuple[str, str, str]) -> DatasetRecord:
    name, latest, tags = row
    return DatasetRecord(name=name, latest=latest, tags=dict(sorted(json.loads(tags).items())))


def _check_blobs_are_there(connection: sqlite3.Connection, needs: Collection[BlobId], what: str) -> None:
    gone = 0
    for part, marks in id_batches(needs):
        (found,) = connection.execute(f"SELECT count(*) FROM blobs WHERE id IN ({marks})", part).fetchone()  # noqa: S608
        gone += len(part) - found
    if gone:
        raise blobs_missing(what, gone)


def _began_s(text: str | None, boot: str) -> float | None:
    """Return when this boot began, by the clock as it was then; None where nobody has noted it."""
    try:
        found = json.loads(text or "")
        return float(found["began_s"]) if found["boot"] == boot else None
    except (ValueError, TypeError, KeyError):
        return None
