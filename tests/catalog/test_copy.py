"""Pinned snapshots: copies that outlive the bucket, made once."""

from __future__ import annotations

import dataclasses
import os
import shutil
import uuid
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

import datacache
from datacache import create_snapshot, open_snapshot
from datacache.api import diff_snapshots, open_catalog, verify_snapshot
from datacache.catalog.packs import content_etag
from datacache.catalog.refs import resolve
from datacache.core.errors import (
    ObjectChangedError,
    SettingsError,
    SnapshotNotFoundError,
    StoreAccessError,
    UsageError,
)
from datacache.manifest.model import Entry, SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from tests.conformance.faults import Fault, FaultProxy
from tests.promises import promise
from tests.servers import CephRgw, Mongod
from tests.store.conftest import WritableRclone

FILES = {f"images/{n:03}.jpg": b"image %d " % n * 1000 for n in range(60)} | {
    "same/1": b"twice" * 100,
    "same/2": b"twice" * 100,
    "empty": b"",
}


class Bucket(NamedTuple):
    """A bucket to copy and one for the copies, behind a proxy that counts requests and makes them fail."""

    server: WritableRclone
    proxy: FaultProxy
    name: str
    copies: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/data"

    def put(self, files: dict[str, bytes]) -> None:
        client = self.server.client()
        for path, data in files.items():
            client.put_object(Bucket=self.name, Key=f"data/{path}", Body=data)

    def count(self, method: str, bucket: str) -> int:
        """How many requests for objects of a bucket came since this was asked last."""
        return sum(request.startswith(f"{method} /{bucket}/") for request in self.proxy.requests)


@pytest.fixture
def bucket(catalog_rclone: WritableRclone, monkeypatch: pytest.MonkeyPatch):
    name, copies = (f"{use}-{uuid.uuid4().hex[:12]}" for use in ("data", "copies"))
    catalog_rclone.make_bucket(name)
    catalog_rclone.make_bucket(copies)
    with FaultProxy(catalog_rclone.endpoint) as proxy:
        for variable, value in (catalog_rclone.env() | {"AWS_ENDPOINT_URL": proxy.url}).items():
            monkeypatch.setenv(variable, value)
        found = Bucket(catalog_rclone, proxy, name, copies)
        found.put(FILES)
        yield found


def copied(bucket: Bucket, settings: Settings, **more: object) -> SnapshotRecord:
    return create_snapshot("faces", bucket.url, copy=True, objects=f"s3://{bucket.copies}/x", settings=settings, **more)  # type: ignore[arg-type]


def entries(settings: Settings, ref: str) -> list[Entry]:
    with closing(open_catalog(settings)) as catalog:
        return list(Manifest.open(resolve(catalog, ref).id, catalog.get_blobs).entries())


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@promise("A snapshot made with `--copy` can be read when its bucket is gone")
@pytest.mark.ceph
def test_a_copied_snapshot_is_read_when_its_bucket_is_gone(
    ceph_rgw: CephRgw, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ceph_rgw.env().items():
        monkeypatch.setenv(name, value)
    data, copies = (f"{use}-{uuid.uuid4().hex[:12]}" for use in ("data", "copies"))
    ceph_rgw.make_bucket(data)
    ceph_rgw.make_bucket(copies)
    client = ceph_rgw.client()
    for path, body in FILES.items():
        client.put_object(Bucket=data, Key=f"data/{path}", Body=body)
    record = create_snapshot("faces", f"s3://{data}/data", copy=True, objects=f"s3://{copies}", settings=settings)
    for path in FILES:
        client.delete_object(Bucket=data, Key=f"data/{path}")
    client.delete_bucket(Bucket=data)
    assert list(verify_snapshot(record.ref, read=True, settings=settings)) == []
    with open_snapshot(record.ref, settings) as opened:
        assert {path: opened.read(path) for path in FILES} == FILES


@promise("A copied version and one that is not have an empty diff")
def test_entries_keep_etag_size_and_time_so_a_diff_sees_no_change(bucket: Bucket, settings: Settings) -> None:
    plain = create_snapshot("faces", bucket.url, settings=settings)
    held = copied(bucket, settings)
    assert held.id != plain.id
    assert list(diff_snapshots(plain.ref, held.ref, settings=settings)) == []
    one, other = entries(settings, plain.ref), entries(settings, held.ref)
    assert [entry[:4] for entry in one] == [entry[:4] for entry in other]
    assert all(entry.key is not None and entry.key.startswith(b"x/") for entry in other)
    assert held.lineage is not None
    assert held.lineage.parameters["copied_to"].startswith(f"s3://{bucket.copies}/x/")


@promise("The same content is stored once, however many store it at a time")
def test_the_same_content_is_copied_once(bucket: Bucket, settings: Settings) -> None:
    copied(bucket, settings)
    stored = bucket.server.client().list_objects_v2(Bucket=bucket.copies)["Contents"]
    assert len(stored) == len(set(FILES.values()))


@promise("Copying the next version reads and writes only what is new")
def test_what_has_not_changed_is_neither_read_nor_written_again(bucket: Bucket, settings: Settings) -> None:
    first = copied(bucket, settings)
    bucket.proxy.requests.clear()
    assert copied(bucket, settings) == first
    assert bucket.count("GET", bucket.name) == bucket.count("PUT", bucket.copies) == 0

    bucket.put({"images/007.jpg": b"another", "new": b"new"})
    bucket.proxy.requests.clear()
    second = copied(bucket, settings)
    assert bucket.count("GET", bucket.name) == bucket.count("PUT", bucket.copies) == 2
    found = [(c.kind, c.path) for c in diff_snapshots(second.ref, settings=settings)]
    assert found == [("changed", b"images/007.jpg"), ("added", b"new")]
    assert list(verify_snapshot(second.ref, read=True, settings=settings)) == []


@promise("An interrupted copy leaves nothing visible and only whole objects")
def test_a_creation_that_broke_off_goes_on_and_sends_nothing_twice(bucket: Bucket, settings: Settings) -> None:
    puts: list[str] = []

    def refuse(method: str, path: str) -> bool:
        if method == "PUT" and len(puts) < 20:
            puts.append(path)
            return False
        return method == "PUT"

    bucket.proxy.always(Fault(status=403, code="AccessDenied", only=refuse))
    with pytest.raises(StoreAccessError):
        copied(bucket, settings)
    with closing(open_catalog(settings)) as catalog, pytest.raises(SnapshotNotFoundError):
        resolve(catalog, "faces")
    bucket.proxy.heal()
    bucket.proxy.requests.clear()
    record = copied(bucket, settings)
    sent = {request.partition(" ")[2] for request in bucket.proxy.requests if request.startswith("PUT ")}
    sent = {path for path in sent if "/clock-" not in path}  # which ask the store for the time
    assert sent.isdisjoint(puts)
    assert len(sent) == len(set(FILES.values())) - 20
    assert list(verify_snapshot(record.ref, read=True, settings=settings)) == []


def test_an_object_that_changes_while_it_is_copied_is_an_error_and_nothing_is_visible(
    bucket: Bucket, settings: Settings
) -> None:
    def overwrite(method: str, path: str) -> bool:
        if method == "GET" and path.endswith("/data/images/030.jpg"):
            bucket.put({"images/030.jpg": b"overwritten"})
        return False

    bucket.proxy.always(Fault(only=overwrite))
    with pytest.raises(ObjectChangedError, match=r"images/030\.jpg"):
        copied(bucket, settings)
    with closing(open_catalog(settings)) as catalog:
        assert catalog.datasets() == []


def test_copies_go_to_the_home_and_outlive_a_folder(tmp_path: Path, settings: Settings) -> None:
    folder = tmp_path / "data"
    write(folder, FILES)
    (folder / "an empty folder").mkdir()
    record = create_snapshot("faces", str(folder), copy=True, settings=settings)
    assert (record.files, record.total_bytes) == (len(FILES), sum(map(len, FILES.values())))
    shutil.rmtree(folder)
    with open_snapshot(record.ref, settings) as opened:
        assert {path: opened.read(path) for path in opened.paths()} == FILES
    assert entries(settings, record.ref)[0].path == b"an empty folder/"
    copy = next(iter((settings.home / "objects").rglob(f"{content_etag(b'')[2:]}-0")))
    assert copy.read_bytes() == b""


def test_a_lost_copy_is_made_again_when_asked_to(tmp_path: Path, settings: Settings) -> None:
    write(tmp_path / "data", FILES)
    record = create_snapshot("faces", str(tmp_path / "data"), copy=True, settings=settings)
    lost = next(path for path in (settings.home / "objects").rglob("*-*") if path.is_file())
    lost.unlink()
    assert [problem.kind for problem in verify_snapshot(record.ref, settings=settings)][:1] == ["missing"]
    again = create_snapshot("faces", str(tmp_path / "data"), copy=True, check_copies=True, settings=settings)
    assert again == record
    assert list(verify_snapshot(record.ref, read=True, settings=settings)) == []


@promise("A copied snapshot is whole even if its sharer is removed and collected meanwhile")
def test_copies_that_went_with_a_snapshot_removed_meanwhile_are_made_again(tmp_path: Path, settings: Settings) -> None:
    write(tmp_path / "data", FILES)
    first = create_snapshot("faces", str(tmp_path / "data"), copy=True, settings=settings)
    write(tmp_path / "data", {"new": b"new"})
    removed: list[str] = []

    def collect_garbage(_files: int, _bytes: int) -> None:
        """Do what garbage collection does once the snapshot, whose copies the new one was to share, is removed."""
        if not removed:
            with closing(open_catalog(settings)) as catalog:
                catalog.remove_snapshot("faces", first.id)
            for path in (settings.home / "objects").rglob("*-*"):
                if path.is_file():
                    path.unlink()
                    removed.append(path.name)

    second = create_snapshot("faces", str(tmp_path / "data"), copy=True, progress=collect_garbage, settings=settings)
    assert len(removed) >= len(set(FILES.values()))
    assert list(verify_snapshot(second.ref, read=True, settings=settings)) == []


def test_a_renamed_file_has_the_same_copy_in_both_versions(tmp_path: Path, settings: Settings) -> None:
    write(tmp_path / "data", {"a": b"1", "b": b"2"})
    first = create_snapshot("faces", str(tmp_path / "data"), copy=True, settings=settings)
    os.replace(tmp_path / "data" / "a", tmp_path / "data" / "c")
    second = create_snapshot("faces", str(tmp_path / "data"), copy=True, settings=settings)
    with open_snapshot(first.ref, settings) as one, open_snapshot(second.ref, settings) as other:
        assert {path: one.read(path) for path in one.paths()} == {"a": b"1", "b": b"2"}
        assert {path: other.read(path) for path in other.paths()} == {"b": b"2", "c": b"1"}
    assert entries(settings, first.ref)[0].key == entries(settings, second.ref)[1].key


def test_with_a_shared_catalog_versions_are_copied_compared_and_verified_alike(
    tmp_path: Path, mongod: Mongod, settings: Settings
) -> None:
    shared = dataclasses.replace(settings, catalog=mongod.database_url(), objects=f"file://{tmp_path}/copies")
    write(tmp_path / "data", FILES)
    plain = create_snapshot("faces", str(tmp_path / "data"), settings=shared)
    held = create_snapshot("faces", str(tmp_path / "data"), copy=True, settings=shared)
    assert list(datacache.diff_snapshots(plain.ref, held.ref, settings=shared)) == []
    shutil.rmtree(tmp_path / "data")
    assert list(datacache.verify_snapshot(held.ref, read=True, settings=shared)) == []
    assert len(list(datacache.verify_snapshot(plain.ref, settings=shared))) == len(FILES)


def test_storage_inside_of_what_is_copied_is_refused(tmp_path: Path, settings: Settings) -> None:
    write(tmp_path, FILES)
    with pytest.raises(UsageError, match="inside"):
        create_snapshot("faces", str(tmp_path), copy=True, objects=f"{tmp_path}/copies", settings=settings)


def test_an_object_that_is_too_large_is_refused_by_name(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datacache.catalog.create.MAX_OBJECT_BYTES", 10)
    write(tmp_path / "data", {"small": b"small", "video.mp4": b"x" * 11})
    with pytest.raises(UsageError, match=r"video\.mp4 has 11 bytes"):
        create_snapshot("faces", str(tmp_path / "data"), copy=True, settings=settings)


def test_objects_of_many_parts_are_copied_whole(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datacache.catalog.create._PART_BYTES", 1000)
    write(tmp_path / "data", FILES)
    record = create_snapshot("faces", str(tmp_path / "data"), copy=True, settings=settings)
    assert list(verify_snapshot(record.ref, read=True, settings=settings)) == []
    with open_snapshot(record.ref, settings) as opened:
        assert opened.read("images/001.jpg") == FILES["images/001.jpg"]


def test_with_a_shared_catalog_and_no_place_for_copies_it_says_what_to_set(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, catalog="mongodb://127.0.0.1:1/datacache", ram_bytes=1 << 20, ssd_bytes=1 << 20)
    with pytest.raises(SettingsError) as caught:
        create_snapshot("faces", str(tmp_path), copy=True, settings=settings)
    assert "DATACACHE_OBJECTS" in caught.value.hint
