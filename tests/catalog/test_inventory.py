"""Snapshots from S3 Inventory: the same as by a listing, and an error for what cannot be used.

The reports are written as Amazon documents them ("Amazon S3 Inventory", "Locating your inventory list"): the manifest's
fields, columns and types of Parquet, keys of CSV encoded as URLs."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from hashlib import md5
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote_plus

import pytest

from datacache import api
from datacache.catalog.inventory import Inventory
from datacache.core.errors import DatacacheError, ImportFailedError, ObjectChangedError, ObjectNotFoundError, UsageError
from datacache.manifest.builder import sorted_entries
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.base import ObjectInfo
from datacache.store.open import open_store
from tests.promises import promise
from tests.store.conftest import WritableRclone

KEYS = ("faces/a.jpg", "faces/a-b/x y+z%.jpg", "faces/a/ü.jpg", "faces/../a", "faces/b", "faces-1/c", "d", "faces/a/b")
CURRENT = ("Bucket", "Key", "Size", "LastModifiedDate", "ETag")
VERSIONS = (
    "Bucket",
    "Key",
    "VersionId",
    "IsLatest",
    "IsDeleteMarker",
    "Size",
    "LastModifiedDate",
    "ETag",
    "StorageClass",
)
PARQUET = {
    "Bucket": ("bucket", "string"), "Key": ("key", "string"), "VersionId": ("version_id", "string"),
    "IsLatest": ("is_latest", "bool"), "IsDeleteMarker": ("is_delete_marker", "bool"), "Size": ("size", "int64"),
    "LastModifiedDate": ("last_modified_date", "timestamp"), "ETag": ("e_tag", "string"),
    "StorageClass": ("storage_class", "string"),
}  # fmt: skip


class Row(NamedTuple):
    bucket: str
    info: ObjectInfo
    latest: bool = True
    deleted: bool = False

    def value(self, column: str) -> Any:
        return {
            "Bucket": self.bucket, "Key": self.info.key, "VersionId": "v1", "IsLatest": self.latest,
            "IsDeleteMarker": self.deleted, "Size": None if self.deleted else self.info.size_bytes,
            "LastModifiedDate": datetime.fromtimestamp(self.info.mtime_ns // 10**9, UTC).replace(
                microsecond=self.info.mtime_ns // 1000 % 10**6 // 1000 * 1000
            ),
            "ETag": None if self.deleted else self.info.etag, "StorageClass": "STANDARD",
        }[column]  # fmt: skip


def csv_file(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for row in rows:
        values = []
        for column in columns:
            value = row.value(column)
            if column == "Key":
                value = quote_plus(value, safe="/")
            elif isinstance(value, datetime):
                value = value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            elif isinstance(value, bool):
                value = str(value).lower()
            values.append("" if value is None else str(value))
        writer.writerow(values)
    return gzip.compress(text.getvalue().encode())


def parquet_file(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    kinds = {"string": pa.string(), "bool": pa.bool_(), "int64": pa.int64(), "timestamp": pa.timestamp("ms", tz="UTC")}
    arrays = {PARQUET[c][0]: pa.array([row.value(c) for row in rows], kinds[PARQUET[c][1]]) for c in columns}
    file = io.BytesIO()
    parquet.write_table(pa.table(arrays), file)
    return file.getvalue()


FORMATS = {"CSV": (csv_file, "csv.gz"), "Parquet": (parquet_file, "parquet")}


class Reports:
    """A bucket of images, and one with inventories of it, in a real S3 server."""

    def __init__(self, images: str, reports: str, settings: Settings) -> None:
        self.images, self.reports, self.settings = images, reports, settings
        self.bucket = open_store(f"s3://{images}", settings)
        self.store = open_store(f"s3://{reports}", settings)

    def rows(self) -> list[Row]:
        return [Row(self.images, info) for page in self.bucket.list("") for info in page]

    def write(
        self,
        files: Sequence[Sequence[Row]],
        *,
        format: str = "CSV",
        columns: Sequence[str] = CURRENT,
        change: Callable[[dict[str, Any]], object] = lambda _: None,
        spoil: Callable[[bytes], bytes] = lambda data: data,
    ) -> str:
        """Write a report of these rows; return its URL. `spoil` changes files before the manifest is made."""
        encode, ending = FORMATS[format]
        listed = []
        for number, rows in enumerate(files):
            data = spoil(encode(rows, columns))
            key = f"{self.images}/all/data/{number}.{ending}"
            self.store.put(key, data)
            listed.append({"key": key, "size": len(data), "MD5checksum": md5(data).hexdigest()})
        schema = ", ".join(columns)
        if format == "Parquet":
            schema = "message s3.inventory { required binary bucket (UTF8); required binary key (UTF8); }"
        manifest = {
            "sourceBucket": self.images,
            "destinationBucket": f"arn:aws:s3:::{self.reports}",
            "version": "2016-11-30",
            "creationTimestamp": "1514944800000",
            "fileFormat": format,
            "fileSchema": schema,
            "files": listed,
        }
        change(manifest)
        key = f"{self.images}/all/2026-01-31T01-00Z/manifest.json"
        self.store.put(key, json.dumps(manifest).encode())
        return f"s3://{self.reports}/{key}"

    def create(self, inventory: str = "", *, name: str = "faces", prefix: str = "faces") -> api.SnapshotRecord:
        return api.create_snapshot(name, f"s3://{self.images}/{prefix}", inventory=inventory, settings=self.settings)


@pytest.fixture
def reports(catalog_rclone: WritableRclone, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Reports:
    for name, value in catalog_rclone.env().items():
        monkeypatch.setenv(name, value)
    names = [f"{kind}-{os.urandom(6).hex()}" for kind in ("images", "reports")]
    for name in names:
        catalog_rclone.make_bucket(name)
    made = Reports(names[0], names[1], settings)
    for key in KEYS:
        if ".." not in key:  # which are no files of rclone's
            made.bucket.put(key, key.encode())
    return made


@promise("A snapshot of an S3 Inventory is that of a listing of the same objects")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [CURRENT, VERSIONS])
def test_a_snapshot_of_an_inventory_is_that_of_a_listing(reports: Reports, format: str, columns: Sequence[str]) -> None:
    rows = reports.rows()[::-1]
    if "IsLatest" in columns:
        older = [row._replace(latest=False, info=row.info._replace(etag="0" * 32)) for row in rows]
        gone = rows[0].info._replace(key="faces/gone.jpg")
        rows += [*older, Row(reports.images, gone, deleted=True), Row(reports.images, gone, latest=False)]
    url = reports.write([rows[:3], [], rows[3:]], format=format, columns=columns)
    made = reports.create(url, name="reported")
    listed = reports.create(name="listed")
    assert (made.id, made.files, made.total_bytes) == (listed.id, listed.files, listed.total_bytes)
    assert made.files == 5
    assert made.lineage is not None
    assert made.lineage.parameters == {"from": f"s3://{reports.images}/faces/", "inventory": url}
    assert reports.create(url, name="listed").id == listed.id  # as its next version, which is the same


@pytest.mark.parametrize("format", FORMATS)
def test_keys_of_any_form_come_out_of_an_inventory_exactly(reports: Reports, format: str) -> None:
    etag, time = "0" * 32, 1_700_000_000_123_000_000
    rows = [Row(reports.images, ObjectInfo(key, 3, time, etag)) for key in (*KEYS, "faces/", "faces/m/", "faces/日 本")]
    record = reports.create(reports.write([rows], format=format))
    with closing(api.open_catalog(reports.settings)) as catalog:
        entries = list(Manifest.open(record.id, catalog.get_blobs).entries())
    paths = sorted(row.info.key.removeprefix("faces/").encode() for row in rows if row.info.key.startswith("faces/"))
    assert [entry.path for entry in entries] == [path for path in paths if path]
    assert {(entry.size_bytes, entry.mtime_ns, entry.etag, entry.version) for entry in entries} == {(3, time, etag, "")}


def test_many_rows_are_sorted_on_disk_and_what_is_known_is_not_written_again(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted_entries.__kwdefaults__ is not None
    monkeypatch.setitem(sorted_entries.__kwdefaults__, "rows_in_memory", 1000)
    rows = [Row(reports.images, ObjectInfo(f"faces/{n:05}", n, 10**18, f"{n:032x}")) for n in range(5000)]
    first = reports.create(reports.write([rows[3000:], rows[:3000]]))
    again = reports.create(reports.write([rows[::-1]]))
    assert again.id == first.id
    rows[1234] = rows[1234]._replace(info=rows[1234].info._replace(size_bytes=7))
    other = reports.create(reports.write([rows]))
    with closing(api.open_catalog(reports.settings)) as catalog:
        ranges = [
            {info.blob for info in Manifest.open(id, catalog.get_blobs).root.ranges} for id in (first.id, other.id)
        ]
    assert len(ranges[1] - ranges[0]) == 1


def test_an_object_that_was_replaced_since_the_report_is_an_error_and_no_other_bytes(reports: Reports) -> None:
    url = reports.write([reports.rows()])
    reports.bucket.put("faces/b", b"others!")
    record = reports.create(url)
    with api.open_snapshot(record.ref, reports.settings) as snapshot:
        assert snapshot.read("a.jpg") == b"faces/a.jpg"
        with pytest.raises(ObjectChangedError, match="faces/b"):
            snapshot.read("b")


def test_objects_of_an_inventory_can_be_copied(reports: Reports, tmp_path: Path) -> None:
    url = reports.write([reports.rows()])
    record = api.create_snapshot(
        "kept", f"s3://{reports.images}/faces", inventory=url, copy=True, objects=f"file://{tmp_path}/objects",
        settings=reports.settings,
    )  # fmt: skip
    reports.bucket.delete("faces/b")
    with api.open_snapshot(record.ref, reports.settings) as snapshot:
        assert snapshot.read("b") == b"faces/b"


# --- what cannot be used ---------------------------------------------------------------------------------------------


def first(manifest: dict[str, Any], **fields: Any) -> None:
    manifest["files"][0].update(fields)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "of another bucket": ({"change": lambda m: m.update(sourceBucket="others")}, "is about the bucket 'others'"),
    "as ORC": ({"change": lambda m: m.update(fileFormat="ORC")}, "its format 'ORC' cannot be read"),
    "without files": ({"change": lambda m: m.pop("files")}, "file 1 has no key, size or MD5checksum"),
    "with another MD5": ({"change": lambda m: first(m, MD5checksum="0" * 32)}, "has another MD5"),
    "without an MD5": ({"change": lambda m: first(m, MD5checksum=None)}, "file 1 has no key, size or MD5checksum"),
    "of another size": ({"change": lambda m: first(m, size=7)}, "says 7"),
    "with a size that is none": ({"change": lambda m: first(m, size="7")}, "file 1 has no key, size or MD5checksum"),
    "without ETags": ({"columns": ("Bucket", "Key", "Size", "LastModifiedDate")}, "has no column ETag"),
    "without IsLatest": ({"columns": (*CURRENT, "VersionId")}, "has all versions and no column IsLatest"),
    "cut short": ({"spoil": lambda data: data[:-20]}, "cannot be read"),
    "damaged": ({"spoil": lambda data: data[:40] + bytes(20) + data[60:]}, "cannot be read"),
    "that is no gzip": ({"spoil": gzip.decompress}, "cannot be read"),
    "of one long line": ({"spoil": lambda _: gzip.compress(bytes(1 << 20))}, "more than 65,536 bytes"),
    "with a short row": ({"spoil": lambda _: gzip.compress(b'"images"\n')}, "row 1 has fewer columns"),
    "with rows of another bucket": ({"change": lambda m: m, "bucket": "others"}, "row 1 is about the bucket 'others'"),
    "with a size of letters": ({"size": "1e3"}, "row 1 has the size '1e3'"),
    "with a negative size": ({"size": "-1"}, "row 1 has the size '-1'"),
    "with an enormous size": ({"size": "9" * 30}, "row 1 has the size"),
    "without a time": ({"time": "yesterday"}, "has no ETag or time"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_inventory_is_an_error_that_says_why(reports: Reports, kind: str) -> None:
    options, message = dict(WRONG[kind][0]), WRONG[kind][1]
    row = Row(options.pop("bucket", reports.images), ObjectInfo("faces/a.jpg", 3, 10**18, "0" * 32))
    if "size" in options or "time" in options:
        size, time = options.get("size", "3"), options.get("time", "2026-01-31T00:00:00.000Z")
        line = f'"{reports.images}","faces/a.jpg","{size}","{time}","{"0" * 32}"\n'
        options = {"spoil": lambda _: gzip.compress(line.encode())}
    url = reports.write([[row]], **options)
    with pytest.raises(ImportFailedError, match=message) as raised:
        reports.create(url)
    assert f"s3://{reports.reports}/" in raised.value.message
    assert api.list_datasets(reports.settings) == []


def test_an_inventory_in_parquet_that_is_damaged_or_lacks_a_column_is_an_error(reports: Reports) -> None:
    rows = reports.rows()
    for options, message in (
        ({"spoil": lambda data: data[:100] + bytes(50) + data[150:]}, "cannot be read"),
        ({"spoil": lambda data: data[:-8]}, "cannot be read"),
        ({"columns": ("Bucket", "Key", "Size", "ETag")}, "no column LastModifiedDate"),
    ):
        with pytest.raises(ImportFailedError, match=message):
            reports.create(reports.write([rows * 100], format="Parquet", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("is_delete_marker", "false", ""),
        ("is_latest", "true", ""),
        ("is_latest", "maybe", "cannot be read"),
        ("size", 1.5, "cannot be read"),
        ("size", 2**64 - 1, "cannot be read"),
        ("last_modified_date", 5, "is no time but int64"),
        ("last_modified_date", datetime(1950, 1, 1, tzinfo=UTC), "no ETag or time"),
        ("key", ["a"], "cannot be read"),
        ("key", None, "has no key"),
        ("e_tag", "e" * 70_000, "no ETag or time"),
    ],
)
def test_columns_of_parquet_are_read_as_what_they_should_be_or_refused(
    reports: Reports, column: str, value: object, message: str
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    row = Row(reports.images, ObjectInfo("faces/a.jpg", 3, 10**18, "0" * 32))

    def spoil(data: bytes) -> bytes:
        table, file = parquet.read_table(io.BytesIO(data)), io.BytesIO()
        others = table.drop_columns([column])
        kind = pa.uint64() if value == 2**64 - 1 else None
        parquet.write_table(others.append_column(column, pa.array([value], kind)), file)
        return file.getvalue()

    url = reports.write([[row]], format="Parquet", columns=VERSIONS, spoil=spoil)
    if message:
        with pytest.raises(ImportFailedError, match=message):
            reports.create(url)
    else:
        assert reports.create(url).files == 1


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'"text"', b"[" * 100_000])
def test_a_manifest_that_is_none_is_an_error(reports: Reports, text: bytes) -> None:
    reports.store.put("manifest.json", text)
    with pytest.raises(ImportFailedError):
        reports.create(f"s3://{reports.reports}/manifest.json")


def test_a_manifest_that_is_too_large_is_refused_unread(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    url = reports.write([reports.rows()])
    monkeypatch.setattr("datacache.catalog.inventory._MANIFEST_BYTES", 100)
    monkeypatch.setattr("datacache.store.s3.store.S3Store.read", None)
    with pytest.raises(ImportFailedError, match="more than 100"):
        reports.create(url)


def test_what_is_no_inventory_is_named(reports: Reports, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError):
        reports.create(f"s3://{reports.reports}/nothing/manifest.json")
    for url in ("/tmp/manifest.json", f"s3://{reports.reports}/", "https://host/manifest.json"):
        with pytest.raises(UsageError, match="is no manifest of an S3 Inventory") as caught:
            Inventory.split(url)
        assert "where S3 has put it: write s3://BUCKET/" in caught.value.hint
    url = reports.write([reports.rows()])
    with pytest.raises(UsageError, match="has no attributes"):
        api.create_snapshot("a", f"file://{tmp_path}", inventory=url, settings=reports.settings)
    with pytest.raises(ObjectNotFoundError, match="there is nothing under"):
        reports.create(url, prefix="elsewhere")


def test_a_key_that_comes_twice_is_an_error(reports: Reports) -> None:
    rows = reports.rows()
    with pytest.raises(DatacacheError, match="twice or out of order"):
        reports.create(reports.write([rows, rows]))
