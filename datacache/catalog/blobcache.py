"""A catalog in front of a shared one: it keeps what was read once in a SQLite file of the node.

Used by `catalog.open` for MongoDB. All processes of a home share the file; any thread may call it. It is a `Catalog`
itself, so nobody above can tell.

- Blobs never change, so a blob in the file is never asked for again. The file is bounded: the least recently used blobs
  go first.
- Records of snapshots, datasets and documents are asked for every time, and the last answer is kept. It stands in only
while the shared catalog does not answer at all. So a second mount still starts then, with the snapshots that `latest`
and the tags named when they were last read, and a warning in the log says so. Writes and lists always go to the shared
catalog.
- The file is only a cache: a broken, full or unwritable one is logged, made anew if possible, and read around. Blobs
  carry a checksum, so a file damaged in silence gives no wrong bytes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from datacache.catalog.base import Catalog
from datacache.catalog.record import decode_record, encode_record
from datacache.catalog.sqlite.file import DAMAGED, SqliteFile, file_identity, file_uri, id_batches, primary_code
from datacache.core.errors import CatalogError, CatalogUnavailableError
from datacache.manifest.model import BlobId, DatasetRecord, SnapshotRecord

DEFAULT_LIMIT_BYTES = 2 * 10**9

_VERSION = 1
_SCHEMA = (
    "CREATE TABLE blobs (id BLOB PRIMARY KEY, data BLOB NOT NULL, crc INTEGER NOT NULL)",
    # Apart from the data, so that counting and choosing what goes reads no blob.
    """CREATE TABLE uses (id BLOB PRIMARY KEY, size_bytes INTEGER NOT NULL, used_s INTEGER NOT NULL)
        WITHOUT ROWID""",
    """CREATE TABLE answers (question TEXT PRIMARY KEY, answer TEXT NOT NULL, at_s INTEGER NOT NULL)
        WITHOUT ROWID""",
)
_USE_GRAIN_S = 3600
"""Last uses of blobs are noted this coarsely, so that reading hardly ever writes."""
_RETRY_S = 60.0
"""A broken cache is left alone for so long."""
_AWAY_S = 10.0
"""A catalog that did not answer is not asked for so long for what the cache can say."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class BlobCache:
    """A `Catalog`: `inner`, read through the file `path` of about `limit_bytes` (it may be a tenth larger)."""

    def __init__(self, inner: Catalog, path: Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._inner = inner
        self.url, self.read_only = inner.url, inner.read_only
        self._path = path.absolute()
        self._limit_bytes = limit_bytes
        self._file = SqliteFile(self._path, self._uri, _prepare)
        self._unchecked_bytes = limit_bytes  # added since the size was last checked; unknown at first
        self._broken_until = 0.0
        self._away_until = 0.0
        # Writes and lists go to the shared catalog: it does not have blobs that are only here.
        self.now_s, self.commit, self.collect = inner.now_s, inner.commit, inner.collect
        self.datasets, self.snapshots, self.documents = inner.datasets, inner.snapshots, inner.documents
        self.set_tag, self.remove_tag, self.remove_snapshot = inner.set_tag, inner.remove_tag, inner.remove_snapshot
        self.set_derived, self.remove_document = inner.set_derived, inner.remove_document
        self.has_blobs, self.derived_names = inner.has_blobs, inner.derived_names

    def __repr__(self) -> str:
        return f"BlobCache({self._inner!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(BlobCache, limit_bytes=self._limit_bytes), (self._inner, self._path))

    # --- blobs ----------------------------------------------------------------------------------------------

    def put_blobs(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        """Store blobs in the shared catalog, and keep them here for the next mount."""
        self._inner.put_blobs(blobs)
        self._guarded(lambda: self._write(blobs))

    def get_blobs(self, ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        wanted = list(dict.fromkeys(ids))
        found = self._guarded(lambda: self._read(wanted)) or {}
        missing = [id for id in wanted if id not in found]
        if missing:
            fetched = self._inner.get_blobs(missing)
            self._guarded(lambda: self._write(list(fetched.items())))
            found |= fetched
        return found

    def _read(self, ids: list[BlobId]) -> dict[BlobId, bytes]:
        now_s = int(time.time())
        found: dict[BlobId, bytes] = {}
        damaged: list[BlobId] = []
        aged: list[BlobId] = []
        for part, marks in id_batches(ids):
            with self._file.use() as connection:
                rows = connection.execute(
                    f"SELECT id, data, crc, used_s FROM blobs JOIN uses USING (id) WHERE id IN ({marks})",  # noqa: S608
                    part,
                ).fetchall()
            for id, data, crc, used_s in rows:
                if zlib.crc32(data) != crc:
                    damaged.append(id)
                    continue
                found[BlobId(id)] = data
                if not 0 <= now_s - used_s < _USE_GRAIN_S:
                    aged.append(id)
        if damaged:
            _log.warning("%d blobs in %s are damaged; they are read again", len(damaged), self._path)
        if damaged or aged:
            with self._file.write(durable=False) as connection:
                _forget(connection, damaged)
                connection.executemany("UPDATE uses SET used_s = ? WHERE id = ?", [(now_s, id) for id in aged])
        return found

    def _write(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        if not blobs:
            return
        now_s = int(time.time())
        with self._file.write(durable=False) as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO blobs VALUES (?, ?, ?)",
                [(id, data, zlib.crc32(data)) for id, data in blobs],
            )
            connection.executemany(
                "INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", [(id, len(data), now_s) for id, data in blobs]
            )
        self._unchecked_bytes += sum(len(data) for _id, data in blobs)
        if self._unchecked_bytes > self._limit_bytes // 20:
            self._unchecked_bytes = 0
            self._evict()

    def _evict(self) -> None:
        with self._file.write(durable=False) as connection:
            (total_bytes,) = connection.execute("SELECT coalesce(sum(size_bytes), 0) FROM uses").fetchone()
            if total_bytes <= self._limit_bytes:
                return
            gone: list[bytes] = []
            for id, size_bytes in connection.execute("SELECT id, size_bytes FROM uses ORDER BY used_s"):
                if total_bytes <= self._limit_bytes * 0.9:
                    break
                total_bytes -= size_bytes
                gone.append(id)
            _forget(connection, gone)

    # --- snapshots and datasets -----------------------------------------------------------------------------

    def dataset(self, name: str) -> DatasetRecord | None:
        return self._asked(
            f"dataset {name}",
            lambda: self._inner.dataset(name),
            lambda record: json.dumps(asdict(record)),
            lambda text: DatasetRecord(**json.loads(text)),
        )

    def snapshot(self, dataset: str, id: str) -> SnapshotRecord | None:
        question = f"snapshot {dataset}@{id}"
        return self._asked(question, lambda: self._inner.snapshot(dataset, id), encode_record, decode_record)

    def identity(self) -> str:
        identity = self._asked("identity", self._inner.identity, str, str)
        assert identity is not None
        return identity

    def derived(self, snapshot_id: str, name: str) -> BlobId | None:
        return self._asked(
            f"derived {name} of {snapshot_id}",
            lambda: self._inner.derived(snapshot_id, name),
            lambda root: root.hex(),
            lambda text: BlobId(bytes.fromhex(text)),
        )

    def document(self, kind: str, key: str) -> str | None:
        return self._asked(f"document {kind}/{key}", lambda: self._inner.document(kind, key), str, str)

    def set_document(self, kind: str, key: str, text: str, *, old: str | None) -> bool:
        done = self._inner.set_document(kind, key, text, old=old)
        self._away_until = 0.0  # it answers: a caller that was too late must read the present text next
        return done

    def close(self) -> None:
        self._file.close()
        self._inner.close()

    def _asked(
        self,
        question: str,
        ask: Callable[[], _T | None],
        encode: Callable[[_T], str],
        decode: Callable[[str], _T],
    ) -> _T | None:
        if time.monotonic() < self._away_until:
            kept = self._kept_answer(question, decode)
            if kept is not None:
                return kept
        try:
            answer = ask()
        except CatalogUnavailableError as exc:
            kept = self._kept_answer(question, decode)
            if kept is None:
                raise
            self._away_until = time.monotonic() + _AWAY_S
            _log.warning("%s; using what it last said of %s", exc, question)
            return kept
        self._away_until = 0.0
        text = None if answer is None else encode(answer)
        self._guarded(lambda: self._note_answer(question, text))
        return answer

    def _kept_answer(self, question: str, decode: Callable[[str], _T]) -> _T | None:
        text = self._guarded(lambda: self._noted(question))
        try:
            return None if text is None else decode(text)
        except (CatalogError, ValueError, TypeError):
            return None

    def _noted(self, question: str) -> str | None:
        with self._file.use() as connection:
            row = connection.execute("SELECT answer FROM answers WHERE question = ?", (question,)).fetchone()
        return None if row is None else str(row[0])

    def _note_answer(self, question: str, text: str | None) -> None:
        if self._noted(question) == text:
            return
        with self._file.write(durable=False) as connection:
            if text is None:
                connection.execute("DELETE FROM answers WHERE question = ?", (question,))
            else:
                connection.execute(
                    "INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (question, text, int(time.time()))
                )

    # --- the file -------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], _T]) -> _T | None:
        """Return the result of `work`, or None where the cache does not work: then leave it alone for a while."""
        if time.monotonic() < self._broken_until:
            return None
        identity = file_identity(self._path)
        try:
            return work()
        except (sqlite3.Error, OSError) as exc:
            if isinstance(exc, sqlite3.Error) and primary_code(exc) in DAMAGED:
                _log.warning("the cache of manifests %s is damaged (%s) and is made anew", self._path, exc)
                self._remove(identity)
                return None
            self._broken_until = time.monotonic() + _RETRY_S
            _log.warning("the cache of manifests %s does not work and is left out: %s", self._path, exc)
            return None

    def _remove(self, identity: tuple[int, int] | None) -> None:
        self._file.close()
        if file_identity(self._path) != identity:
            return  # another process was first, and this is its new file
        for suffix in ("", "-wal", "-shm"):
            try:
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            except OSError as exc:
                self._broken_until = time.monotonic() + _RETRY_S
                _log.warning("the cache of manifests %s cannot be removed: %s", self._path, exc)
                return

    def _uri(self) -> str:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        return file_uri(self._path, "mode=rw")


def _forget(connection: sqlite3.Connection, ids: Sequence[bytes]) -> None:
    for table in ("blobs", "uses"):
        connection.executemany(f"DELETE FROM {table} WHERE id = ?", [(id,) for id in ids])  # noqa: S608


def _prepare(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == _VERSION:
        return
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("BEGIN EXCLUSIVE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != _VERSION:
        for table in ("blobs", "uses", "answers"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={_VERSION}")
    connection.execute("COMMIT")
