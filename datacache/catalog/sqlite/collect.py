"""Garbage collection of the embedded catalog: mark without a lock, sweep in short write transactions.

Used by `sqlite.catalog`. Each transaction first looks for commits that were not marked yet. Every commit is a write
transaction, too, and names the blobs it needs, so none can come in between. A collection that is killed has removed
some of what nobody needs. Errors of SQLite pass through.
"""

from __future__ import annotations

import sqlite3
from operator import itemgetter

from datacache.catalog import leases
from datacache.catalog.base import Collected, Live, batches
from datacache.catalog.mark import Marked, Roots
from datacache.catalog.sqlite.file import SqliteFile
from datacache.manifest.model import BlobId

_BATCH_IDS = 500
_BATCH_BYTES = 32 * 2**20
"""Swept in one transaction: other writers wait for about a tenth of a second."""
_TRIES = 10
_STALE = """(set_s <= ? AND snapshot NOT IN (SELECT id FROM snapshots)
    OR NOT EXISTS (SELECT 1 FROM blobs WHERE id = root))"""
_Sized = tuple[BlobId, int]
"""A blob and its size in bytes."""


class SqliteCollection:
    """One garbage collection, of what was put at `cutoff_s` or before."""

    def __init__(self, file: SqliteFile, live: Live, *, now_s: float, cutoff_s: int) -> None:
        self._file, self._now_s, self._cutoff_s = file, now_s, cutoff_s
        self._marked = Marked(live)

    def run(self, *, dry_run: bool) -> Collected:
        """Remove what is not reachable; see `Catalog.collect`."""
        if dry_run:
            count = f"SELECT count(*) FROM derived WHERE {_STALE}"  # noqa: S608
            with self._file.use() as connection:
                (derived,) = connection.execute(count, (self._cutoff_s,)).fetchone()
        else:
            with self._file.write(durable=False) as connection:
                derived = connection.execute(f"DELETE FROM derived WHERE {_STALE}", (self._cutoff_s,)).rowcount  # noqa: S608
        marked = self._marked
        marked.follow(self._read_roots)
        doomed: list[_Sized] = []
        young = 0
        with self._file.use() as connection:
            for id, size_bytes, put_s in connection.execute("SELECT id, size_bytes, put_s FROM puts"):
                if id not in marked.blobs and put_s <= self._cutoff_s:
                    doomed.append((BlobId(id), size_bytes))
                else:
                    young += id not in marked.needed
        if not dry_run:
            parts = batches(doomed, _BATCH_IDS, size_bytes=itemgetter(1), most_bytes=_BATCH_BYTES)
            doomed = [swept for part in parts for swept in self._sweep(part)]
        return Collected(len(doomed), sum(size for _id, size in doomed), young, derived, documents=0)

    def _sweep(self, batch: list[_Sized]) -> list[_Sized]:
        """Remove those of a batch that nothing needs now either, and return them."""
        marked = self._marked
        for attempt in range(_TRIES):
            with self._file.write(durable=False) as connection:
                roots = self._roots(connection)
                if marked.has_new(roots) and attempt == _TRIES - 1:
                    marked.follow(lambda roots=roots: roots)  # type: ignore[misc]
                if not marked.has_new(roots):
                    return self._delete(connection, [blob for blob in batch if blob[0] not in marked.blobs])
            marked.follow(self._read_roots)  # not while others wait, unless they never stop committing
        raise AssertionError

    def _delete(self, connection: sqlite3.Connection, batch: list[_Sized]) -> list[_Sized]:
        marks = ",".join("?" * len(batch))
        wanted = f"SELECT id FROM puts WHERE put_s <= ? AND id IN ({marks})"  # noqa: S608
        old = {id for (id,) in connection.execute(wanted, (self._cutoff_s, *(id for id, _size in batch)))}
        for table in ("blobs", "puts"):
            connection.executemany(f"DELETE FROM {table} WHERE id = ?", [(id,) for id in old])  # noqa: S608
        return [blob for blob in batch if blob[0] in old]

    def _read_roots(self) -> Roots:
        with self._file.use() as connection:
            return self._roots(connection)

    def _roots(self, connection: sqlite3.Connection) -> Roots:
        listed = connection.execute("SELECT DISTINCT id FROM snapshots")
        derived = connection.execute(f"SELECT root FROM derived WHERE NOT {_STALE}", (self._cutoff_s,))  # noqa: S608
        kept = "SELECT key, text FROM documents WHERE kind = ?"
        mounts = [text for _key, text in connection.execute(kept, (leases.MOUNTS,))]
        removed = connection.execute(kept, (leases.REMOVED,)).fetchall()
        return Roots(
            frozenset(BlobId(bytes.fromhex(id)) for (id,) in listed),
            frozenset(BlobId(root) for (root,) in derived),
            leases.held_roots(mounts, removed, now_s=self._now_s, cutoff_s=self._cutoff_s),
        )
