"""Read an Amazon S3 Inventory in place of a listing: what a bucket held when the report was made.

Used by `api.create_snapshot`. A report is a `manifest.json` that names files of rows, CSV packed by gzip or Parquet
("Amazon S3 Inventory" and "Locating your inventory list", Amazon S3 User Guide). Each file is read whole into an
unnamed temporary file (`TMPDIR`), and its size and MD5 are checked before its rows are looked at. Rows come in any
order. With all versions in a report, only the latest of a key counts, unless it is a delete marker. `ImportFailedError`
names file and row of what cannot be used. One thread.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from hashlib import md5
from itertools import islice
from typing import IO, Any, NamedTuple

from datacache.catalog.listing import encode
from datacache.core.errors import ImportFailedError, UsageError
from datacache.core.ids import ObjectRef
from datacache.manifest.model import Entry
from datacache.store.base import ObjectStore
from datacache.store.errors import plain_etag
from datacache.store.s3.list import decoded_key, nanoseconds
from datacache.store.urls import split_object_url

_MANIFEST_BYTES = 16 << 20
"""The most of a `manifest.json`: it has a line of some 200 bytes for each file, and a file up to millions of rows."""
_PART_BYTES = 8 << 20
_LINE_BYTES = 64 << 10
"""The most of a line of CSV: a key of 1,024 bytes is written as 3,072, other columns are short."""
_ETAG_CHARACTERS = 1024
_ROWS_AT_A_TIME = 10_000
_MD5 = re.compile(r"[0-9a-fA-F]{32}")
_SIZE = re.compile(r"[0-9]{1,18}")
_NEEDED = {
    "bucket": "Bucket",
    "key": "Key",
    "size": "Size",
    "last_modified_date": "LastModifiedDate",
    "e_tag": "ETag",
}
"""Columns by their names in Parquet, and in CSV. All but the first two are optional fields of an inventory."""
_VERSIONED = {"version_id": "VersionId", "is_latest": "IsLatest", "is_delete_marker": "IsDeleteMarker"}
_COLUMNS = _NEEDED | _VERSIONED


class _Listed(NamedTuple):
    """A file of rows, as the manifest names it."""

    key: str
    size_bytes: int
    md5: str


class _Row(NamedTuple):
    bucket: str
    key: str
    size: object
    time: object
    """Text, or an integer of nanoseconds."""
    etag: str
    latest: bool | None
    deleted: bool | None


class Inventory:
    """One report about a bucket. The constructor reads its manifest."""

    def __init__(self, store: ObjectStore, url: str, bucket_url: str) -> None:
        """`store` is that of the report's `url`; `bucket_url` that of the bucket it has to be about."""
        self.url = url
        self._store = store
        self._bucket = bucket_url.partition("://")[2]
        manifest = self._manifest()
        source = manifest.get("sourceBucket")
        if source != self._bucket:
            raise self._unusable(f"it is about the bucket {source!r}, not {self._bucket!r}")
        self._format = str(manifest.get("fileFormat", ""))
        if self._format not in ("CSV", "Parquet"):
            hint = "CSV and Parquet can be read." if self._format == "ORC" else ""
            raise self._unusable(f"its format {self._format!r} cannot be read", hint)
        schema = manifest.get("fileSchema")
        self._schema = [name.strip() for name in schema.split(",")] if isinstance(schema, str) else []
        if self._format == "CSV":
            self._expect_columns(self._schema, _COLUMNS)
        else:
            _pyarrow()
        self._files = self._listed(manifest.get("files"))

    @staticmethod
    def split(url: str) -> tuple[str, str]:
        """Split the URL of a manifest into store and key. `UsageError` if it is none."""
        store, key = split_object_url(url)
        if not store.startswith("s3://") or not key.endswith(".json"):
            raise UsageError(
                f"{url} is no manifest of an S3 Inventory",
                hint="It is read where S3 has put it: write s3://BUCKET/…/2026-01-31T01-00Z/manifest.json.",
            )
        return store, key

    def pages(self, prefix: str) -> Iterator[list[Entry]]:
        """Yield the entries of all objects under a prefix, some at a time, in no order."""
        entries = self._entries(prefix)
        while some := list(islice(entries, _ROWS_AT_A_TIME)):
            yield some

    def _entries(self, prefix: str) -> Iterator[Entry]:
        for listed in self._files:
            with tempfile.TemporaryFile() as file:
                self._fetch(listed, file)
                url = f"{self._store.url}/{listed.key}"
                seconds: dict[str, int] = {}
                rows = self._csv_rows(file, url) if self._format == "CSV" else self._parquet_rows(file, url)
                for number, row in enumerate(rows, 1):
                    if row.bucket != self._bucket:
                        raise _wrong(url, number, f"is about the bucket {row.bucket!r}, not {self._bucket!r}")
                    if not row.key:
                        raise _wrong(url, number, "has no key")
                    if row.latest is not False and not row.deleted and row.key.startswith(prefix) and row.key != prefix:
                        yield _entry(row, len(prefix), seconds, url, number)

    # --- the manifest ------------------------------------------------------------------------------------------------

    def _manifest(self) -> Mapping[str, Any]:
        _, key = self.split(self.url)
        info = self._store.head(key)
        if info.size_bytes > _MANIFEST_BYTES:
            raise self._unusable(f"it has {info.size_bytes:,} bytes, more than {_MANIFEST_BYTES:,}")
        try:
            manifest = json.loads(bytes(self._store.read(info.ref(self._store.url), 0, info.size_bytes)))
        except (ValueError, RecursionError) as exc:
            raise self._unusable("it is not JSON") from exc
        if not isinstance(manifest, dict):
            raise self._unusable("it is not an object of JSON")
        return manifest

    def _listed(self, files: object) -> list[_Listed]:
        found = []
        for number, file in enumerate(files if isinstance(files, list) else [None], 1):
            fields = file if isinstance(file, dict) else {}
            key, size, digest = fields.get("key"), fields.get("size"), fields.get("MD5checksum")
            if not isinstance(key, str) or type(size) is not int or not _MD5.fullmatch(str(digest)):
                raise self._unusable(f"its file {number} has no key, size or MD5checksum")
            found.append(_Listed(key, size, str(digest).lower()))
        return found

    def _expect_columns(self, names: Sequence[str], columns: Mapping[str, str], url: str = "") -> None:
        missing = [words for name, words in _NEEDED.items() if columns[name] not in names]
        if missing:
            raise ImportFailedError(
                f"{url or self.url}: the inventory has no column {', '.join(missing)}",
                hint=f"Add {', '.join(missing)} to the optional fields of the inventory's configuration.",
            )
        if columns["version_id"] in names and columns["is_latest"] not in names:
            raise ImportFailedError(f"{url or self.url}: the inventory has all versions and no column IsLatest")

    def _unusable(self, why: str, hint: str = "") -> ImportFailedError:
        return ImportFailedError(f"{self.url}: {why}", hint=hint)

    # --- rows --------------------------------------------------------------------------------------------------------

    def _fetch(self, listed: _Listed, file: IO[bytes]) -> None:
        """Copy a file of the report into a local one, checked."""
        info = self._store.head(listed.key)
        ref: ObjectRef = info.ref(self._store.url)
        if info.size_bytes != listed.size_bytes:
            raise ImportFailedError(
                f"{ref.url} has {info.size_bytes:,} bytes; {self.url} says {listed.size_bytes:,}",
                hint="Is the report complete? Take another one.",
            )
        digest = md5(usedforsecurity=False)
        for start in range(0, ref.size_bytes, _PART_BYTES):
            part = self._store.read(ref, start, min(start + _PART_BYTES, ref.size_bytes))
            digest.update(part)
            file.write(part)
        if digest.hexdigest() != listed.md5:
            raise ImportFailedError(f"{ref.url} has another MD5 than {self.url} says", hint="Take another report.")
        file.seek(0)

    def _csv_rows(self, file: IO[bytes], url: str) -> Iterator[_Row]:
        at = {name: self._schema.index(column) for name, column in _COLUMNS.items() if column in self._schema}
        bucket, key, size, time, etag = (at[name] for name in _NEEDED)
        latest, deleted = at.get("is_latest"), at.get("is_delete_marker")
        number = 0
        try:
            for number, row in enumerate(csv.reader(_lines(file), strict=True), 1):  # noqa: B007 - for the error
                yield _Row(
                    row[bucket],
                    decoded_key(row[key]),
                    row[size],
                    row[time],
                    row[etag],
                    latest is None or row[latest].lower() != "false",  # of two that are, the builder complains
                    deleted is not None and row[deleted].lower() == "true",
                )
        except IndexError as exc:
            raise _wrong(url, number, f"has fewer columns than the manifest says: {len(row)}") from exc
        except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as exc:
            raise _wrong(url, number + 1, f"cannot be read: {exc}") from exc

    def _parquet_rows(self, file: IO[bytes], url: str) -> Iterator[_Row]:
        pa, parquet = _pyarrow()
        done = 0
        try:
            opened = parquet.ParquetFile(file)
            names = opened.schema_arrow.names
            self._expect_columns(names, {name: name for name in _COLUMNS}, url)
            there = [name for name in _COLUMNS if name in names]
            flags = ("is_latest", "is_delete_marker")
            kinds = dict.fromkeys(_NEEDED, pa.string()) | dict.fromkeys(flags, pa.bool_()) | {"size": pa.int64()}
            for batch in opened.iter_batches(_ROWS_AT_A_TIME, columns=there):
                columns = {name: batch.column(name) for name in there}
                time = columns["last_modified_date"]
                if not pa.types.is_timestamp(time.type):
                    raise TypeError(f"last_modified_date is no time but {time.type}")
                # Not believed to be what they should: a flag that is the text "false" would count as true.
                values = {
                    name: column.cast(kinds[name]).to_pylist() for name, column in columns.items() if name in kinds
                }
                values["last_modified_date"] = time.cast(pa.timestamp("ns")).cast(pa.int64()).to_pylist()
                nothing = [None] * batch.num_rows
                for row in zip(*(values.get(name, nothing) for name in (*_NEEDED, *flags)), strict=True):
                    yield _Row(row[0] or "", row[1] or "", row[2], row[3], row[4] or "", row[5], row[6])
                done += batch.num_rows
        except (pa.ArrowException, OSError, TypeError, KeyError, UnicodeDecodeError) as exc:
            raise _wrong(url, done + 1, f"or one after it cannot be read: {exc}") from exc


def _entry(row: _Row, skip: int, seconds: dict[str, int], url: str, number: int) -> Entry:
    size = row.size
    if isinstance(size, str) and _SIZE.fullmatch(size):
        size = int(size)
    if type(size) is not int or size < 0:
        raise _wrong(url, number, f"has the size {row.size!r}")
    time = row.time if isinstance(row.time, int) else nanoseconds(str(row.time or ""), seconds)
    if not row.etag or len(row.etag) > _ETAG_CHARACTERS or time <= 0:
        raise _wrong(url, number, f"of the key {row.key!r} has no ETag or time that can be used")
    return Entry(encode(row.key[skip:]), size, time, plain_etag(row.etag))


def _lines(file: IO[bytes]) -> Iterator[str]:
    with gzip.GzipFile(fileobj=file) as unpacked:
        while line := unpacked.readline(_LINE_BYTES):
            if len(line) == _LINE_BYTES:
                raise csv.Error(f"it has more than {_LINE_BYTES:,} bytes")
            yield line.decode()


def _wrong(url: str, number: int, why: str) -> ImportFailedError:
    return ImportFailedError(f"{url}: row {number:,} {why}")


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as exc:
        raise UsageError(
            "an inventory in Parquet needs pyarrow", hint="Install it: pip install 'dsctl[parquet]'"
        ) from exc
    return pa, parquet
