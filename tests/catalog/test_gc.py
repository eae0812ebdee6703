"""Garbage collection as users run it: blobs and stored objects together, against folders and a real S3 server."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from datacache.api import collect_garbage as collect_now
from datacache.api import create_snapshot, open_catalog, open_snapshot, verify_snapshot
from datacache.catalog import gc as gc_objects
from datacache.catalog import leases
from datacache.catalog.base import Catalog
from datacache.catalog.gc import GarbageReport, collect_garbage
from datacache.catalog.mark import reachable
from datacache.catalog.objects import ObjectWriter
from datacache.core.errors import CorruptManifestError
from datacache.manifest.model import BlobId, SnapshotRecord
from datacache.settings import Settings, load_settings
from tests.promises import promise
from tests.servers import RcloneS3

HOUR_S = 3600.0


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    root = tmp_path / "bucket"
    root.mkdir()
    for number in range(40):
        (root / f"{number:03}.jpg").write_bytes(f"image {number}".encode())
    return root


@pytest.fixture
def catalog(settings: Settings) -> Iterator[Catalog]:
    with contextlib.closing(open_catalog(settings)) as catalog:
        yield catalog


def objects_in(settings: Settings) -> set[Path]:
    root = settings.home / "objects"
    return {file for file in root.rglob("*") if file.is_file()}


def pinned(bucket: Path, settings: Settings, name: str = "mask") -> SnapshotRecord:
    return create_snapshot(name, str(bucket), settings=settings, pin=True)


def collected(
    catalog: Catalog, settings: Settings, *, later_s: float = 4 * HOUR_S, dry_run: bool = False
) -> GarbageReport:
    """A collection some hours later, with a grace period of three."""
    return collect_garbage(catalog, settings, grace_s=3 * HOUR_S, dry_run=dry_run, now_s=time.time() + later_s)


def numbers(report: GarbageReport) -> tuple[int, int, int]:
    (storage,) = report.storages
    assert report.problems == ()
    return storage.objects, storage.young, storage.kept


def whole(ref: str, settings: Settings) -> bool:
    return list(verify_snapshot(ref, read=True, settings=settings)) == []


@promise("Stored objects go when no snapshot refers to them")
def test_objects_that_no_snapshot_refers_to_any_more_go_and_the_others_stay(
    settings: Settings, bucket: Path, catalog: Catalog
) -> None:
    first = pinned(bucket, settings)
    (bucket / "000.jpg").write_bytes(b"another image")
    second = pinned(bucket, settings)
    assert numbers(collected(catalog, settings)) == (0, 0, 41)
    catalog.remove_snapshot("mask", first.id)
    assert numbers(collected(catalog, settings)) == (1, 0, 40)
    assert len(objects_in(settings)) == 40
    assert whole(f"mask@{second.id}", settings)
    catalog.remove_snapshot("mask", second.id)
    report = collected(catalog, settings)
    assert numbers(report) == (40, 0, 0)
    assert report.storages[0].size_bytes == sum(file.stat().st_size for file in bucket.iterdir())
    assert objects_in(settings) == set()


def test_an_object_that_two_datasets_share_stays_until_both_are_gone(
    settings: Settings, bucket: Path, catalog: Catalog
) -> None:
    one, two = pinned(bucket, settings, "one"), pinned(bucket, settings, "two")
    catalog.remove_snapshot("one", one.id)
    assert numbers(collected(catalog, settings)) == (0, 0, 40)
    catalog.remove_snapshot("two", two.id)
    assert numbers(collected(catalog, settings)) == (40, 0, 0)


@promise("A dry run says what would go and removes nothing")
def test_young_objects_stay_and_a_dry_run_removes_none(settings: Settings, bucket: Path, catalog: Catalog) -> None:
    catalog.remove_snapshot("mask", pinned(bucket, settings).id)
    before = objects_in(settings)
    assert numbers(collected(catalog, settings, later_s=HOUR_S)) == (0, 40, 0)
    said = collected(catalog, settings, dry_run=True)
    assert numbers(said) == (40, 0, 0)
    assert said.dry_run
    assert objects_in(settings) == before
    assert dataclasses.replace(collected(catalog, settings), dry_run=True) == said


@promise("Stored objects go when no snapshot refers to them")
def test_what_others_put_into_the_storage_is_never_touched(settings: Settings, bucket: Path, catalog: Catalog) -> None:
    catalog.remove_snapshot("mask", pinned(bucket, settings).id)
    ours = next(iter(objects_in(settings)))
    storage = settings.home / "objects"
    mine = storage / catalog.identity()
    theirs = [
        storage / "notes.txt",
        storage / "0123456789abcdef" / ours.parent.name / ours.name,  # another catalog's
        mine / "README",
        mine / ours.name,
        mine / ours.parent.name / "notes",
        mine / ours.parent.name / f"{ours.name}.bak",
        mine / ours.parent.name / f"{ours.name}-",
        mine / ours.parent.name.upper() / ours.name.upper(),
        mine / "zz" / ours.name,
        mine / ours.parent.name / "deeper" / ours.parent.name / ours.name,
    ]
    for file in theirs:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"theirs")
    assert numbers(collected(catalog, settings)) == (40, 0, 0)
    assert objects_in(settings) == set(theirs)


def test_an_object_written_again_since_it_was_listed_stays(
    settings: Settings, bucket: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer finds it old and refreshes it, in the moment between the listing and the deletion."""
    gone = pinned(bucket, settings)
    catalog.remove_snapshot("mask", gone.id)
    catalog.remove_document(leases.REMOVED, gone.id)  # as if that were long ago
    old_s = time.time() - 10 * HOUR_S
    for file in objects_in(settings):
        os.utime(file, (old_s, old_s))
    update, calls = gc_objects._Marked.update, []

    def refreshing(self: gc_objects._Marked) -> None:
        calls.append(self)
        if len(calls) == 2:  # after the listing
            with contextlib.closing(ObjectWriter(catalog, settings)) as writer:
                writer.put(b"image 7")
        update(self)

    monkeypatch.setattr(gc_objects._Marked, "update", refreshing)
    report = collect_garbage(catalog, settings, grace_s=3 * HOUR_S)
    assert numbers(report)[0] == 39
    (left,) = objects_in(settings)
    assert left.read_bytes() == b"image 7"


def test_a_snapshot_committed_while_objects_are_listed_keeps_them(
    settings: Settings, bucket: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = pinned(bucket, settings)
    blobs = _blobs(catalog, gone)
    catalog.remove_snapshot("mask", gone.id)
    update, calls = gc_objects._Marked.update, []

    def committing(self: gc_objects._Marked) -> None:
        calls.append(self)
        if len(calls) == 2:
            catalog.put_blobs(blobs)
            catalog.commit(gone)
        update(self)

    monkeypatch.setattr(gc_objects._Marked, "update", committing)
    assert collected(catalog, settings).storages[0].objects == 0
    assert whole("mask", settings)


def _blobs(catalog: Catalog, record: SnapshotRecord) -> list[tuple[BlobId, bytes]]:
    return list(catalog.get_blobs(reachable(catalog.get_blobs)([BlobId(bytes.fromhex(record.id))])).items())


def test_a_storage_that_is_not_set_any_more_is_looked_through_as_long_as_snapshots_name_it(
    settings: Settings, bucket: Path, catalog: Catalog, tmp_path: Path
) -> None:
    first = pinned(bucket, settings)
    (bucket / "000.jpg").write_bytes(b"another image")
    pinned(bucket, settings)
    elsewhere = dataclasses.replace(settings, objects=f"file://{tmp_path}/elsewhere")
    catalog.remove_snapshot("mask", first.id)
    report = collected(catalog, elsewhere)
    assert sorted(storage.objects for storage in report.storages) == [0, 1]
    assert len(objects_in(settings)) == 40


def test_objects_that_a_snapshot_of_the_storage_itself_has_stay(
    settings: Settings, bucket: Path, catalog: Catalog
) -> None:
    catalog.remove_snapshot("mask", pinned(bucket, settings).id)
    storage = settings.home / "objects"
    create_snapshot("copy", str(storage), settings=settings)
    assert numbers(collected(catalog, settings)) == (0, 0, 40)
    assert whole("copy", settings)


def test_a_storage_that_is_away_is_a_problem_and_blobs_are_collected_all_the_same(
    settings: Settings, bucket: Path, catalog: Catalog
) -> None:
    catalog.remove_snapshot("mask", create_snapshot("mask", str(bucket), settings=settings).id)
    away = dataclasses.replace(settings, objects="http://127.0.0.1:9/objects", store_timeout_s=0.5)
    report = collected(catalog, away)
    assert report.catalog.blobs > 1
    assert len(report.problems) == 1
    assert report.problems[0]


@promise("Where a snapshot cannot be read, a collection removes nothing")
def test_a_snapshot_that_cannot_be_read_keeps_all_objects(settings: Settings, bucket: Path, catalog: Catalog) -> None:
    catalog.remove_snapshot("mask", pinned(bucket, settings).id)
    catalog.commit(SnapshotRecord(dataset="broken", id="b" * 32, created_at="", origin="", files=0, total_bytes=0))
    with pytest.raises(CorruptManifestError):
        collected(catalog, settings)
    assert len(objects_in(settings)) == 40


def test_objects_in_s3_are_collected_too(
    rclone_s3: RcloneS3, home: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    rclone_s3.make_bucket("gc-objects")
    monkeypatch.setenv("DATACACHE_OBJECTS", "s3://gc-objects/stored")
    settings = load_settings()
    with contextlib.closing(open_catalog(settings)) as catalog:
        first = pinned(bucket, settings)
        (bucket / "000.jpg").write_bytes(b"another image")
        second = pinned(bucket, settings)
        catalog.remove_snapshot("mask", first.id)
        assert numbers(collected(catalog, settings, dry_run=True)) == (1, 0, 40)
        assert numbers(collected(catalog, settings)) == (1, 0, 40)
        assert whole(f"mask@{second.id}", settings)


def test_collections_again_and_again_disturb_no_pinned_creation(
    settings: Settings, bucket: Path, catalog: Catalog
) -> None:
    """With the default grace period, as users run both."""
    fork = multiprocessing.get_context("fork")
    done = fork.Event()

    def gc() -> None:
        while not done.is_set():
            collect_now(settings=settings)

    process = fork.Process(target=gc)
    process.start()
    try:
        for round_number in range(5):
            (bucket / "000.jpg").write_bytes(f"round {round_number}".encode())
            record = pinned(bucket, settings)
            for old in catalog.snapshots("mask")[:-1]:
                catalog.remove_snapshot("mask", old.id)
            assert whole(record.ref, settings)
    finally:
        done.set()
        process.join(60)
    assert process.exitcode == 0
    with open_snapshot("mask", settings) as snapshot:
        assert snapshot.read("000.jpg") == b"round 4"
