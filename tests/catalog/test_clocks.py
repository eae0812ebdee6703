"""Nodes whose clocks differ by days: what is stored for a snapshot that is being made survives their collections.

Time is faked for a whole process, as libfaketime does it, so it meets the node's code and not the servers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from datacache import api
from datacache.catalog import leases
from datacache.catalog.sqlite import catalog as sqlite_catalog
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.catalog.tasks.base import NewTask
from datacache.catalog.tasks.sqlite import SqliteTasks
from datacache.manifest.model import BlobId, SnapshotRecord
from datacache.settings import Settings, load_settings
from tests.promises import promise
from tests.servers import Mongod, RcloneS3

FILES = 40


@dataclass
class Site:
    """A folder of data, a catalog, a place for copies, and nodes that use them."""

    settings: Settings
    data: Path
    ahead: str
    """By how much a node's clock may be wrong: S3 takes no request from one that is further off than 15 minutes."""
    grace: tuple[str, ...]
    """Options of a collection, for a grace period that is shorter."""

    def collect_ahead(self) -> None:
        """Collect garbage on a node whose clock is that far ahead."""
        self.node("snapshot", "gc", *self.grace, clock=f"+{self.ahead}")

    def node(self, *command: str, clock: str) -> str:
        """Run `dsctl` on a node whose clock shows another time."""
        done = subprocess.run(
            ["faketime", "--exclude-monotonic", "-f", clock, sys.executable, "-m", "dataset_cli", *command],
            env=os.environ | {"NO_FAKE_STAT": "1", "FAKETIME_FORCE_MONOTONIC_FIX": "0"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def collect_all(self) -> None:
        """Collect without grace until all copies are gone: S3 tells its time in whole seconds."""
        gone, deadline = 0, time.monotonic() + 60
        while gone < FILES:
            assert time.monotonic() < deadline, f"{gone} of {FILES} copies are gone"
            gone += api.collect_garbage(grace_s=0, settings=self.settings).storages[0].objects

    def create(self, *, pin: bool, at_the_end: Callable[[], object] = lambda: None) -> SnapshotRecord:
        """Make a snapshot, and have something happen when all files were seen, before it is committed."""
        called = []

        def progress(files: int, _size: int) -> None:
            if files >= FILES and not called:
                called.append(files)
                at_the_end()

        record = api.create_snapshot("mask", str(self.data), pin=pin, settings=self.settings, progress=progress)
        assert called
        return record

    def problems(self, ref: str = "mask") -> int:
        return len(list(api.verify_snapshot(ref, read=True, settings=self.settings)))


@pytest.fixture(params=["sqlite, folder", "mongod, folder", "mongod, s3"])
def site(
    request: pytest.FixtureRequest,
    mongod: Mongod,
    rclone_s3: RcloneS3,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Site:
    variables = {"DATACACHE_OBJECTS": f"file://{tmp_path}/copies"}
    ahead, grace = "2d", ()
    if request.param.endswith("s3"):
        bucket = f"clocks-{uuid.uuid4().hex[:12]}"
        rclone_s3.make_bucket(bucket)
        variables = rclone_s3.env() | {"DATACACHE_OBJECTS": f"s3://{bucket}/copies"}
        ahead, grace = "600s", ("--grace", "5m")
    if request.param.startswith("mongod"):
        variables["DATACACHE_CATALOG"] = mongod.database_url()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    data = tmp_path / "data"
    data.mkdir()
    for number in range(FILES):
        (data / f"{number:03}.jpg").write_bytes(b"image %d" % number)
    return Site(load_settings(), data, ahead, grace)


@promise("A node's wrong clock harms no creation under way: ages go by the clocks of store and database")
def test_a_collection_of_a_node_that_is_ahead_takes_nothing_of_a_creation_under_way(site: Site) -> None:
    record = site.create(pin=True, at_the_end=site.collect_ahead)
    assert record.files == FILES
    assert site.problems() == 0


@promise("A node's wrong clock harms no creation under way: ages go by the clocks of store and database")
def test_a_snapshot_without_copies_survives_such_a_collection_too(site: Site) -> None:
    record = site.create(pin=False, at_the_end=site.collect_ahead)
    assert record.files == FILES
    with api.open_snapshot("mask", site.settings) as snapshot:
        assert snapshot.read("007.jpg") == b"image 7"


@promise("A node's wrong clock harms no creation under way: ages go by the clocks of store and database")
def test_what_is_old_is_stored_again_by_a_node_whose_clock_is_behind(site: Site, tmp_path: Path) -> None:
    """By its own clock it would take old objects for young, and rely on what the next collection takes."""
    if not site.settings.objects.startswith("file://"):
        pytest.skip("a real S3 server's objects cannot be made older, and it refuses a clock that is so wrong")
    gone = site.create(pin=True)
    with closing(api.open_catalog(site.settings)) as catalog:
        catalog.remove_snapshot("mask", gone.id)
    old_s = time.time() - 86_400
    stored = [file for file in (tmp_path / "copies").rglob("*") if file.is_file()]
    for file in stored:
        os.utime(file, (old_s, old_s))
    site.node("snapshot", "create", "mask", "--from", str(site.data), "--copy", clock="-86460s")
    assert len(stored) == FILES
    assert all(file.stat().st_mtime > old_s + 3600 for file in stored)


@promise("What was stored for a creation under way stays, also without a grace period")
def test_a_creation_whose_objects_went_makes_them_anew(site: Site) -> None:
    """A collection without grace, by a version or an account that does not know of creations under way."""

    def collect() -> None:
        with closing(api.open_catalog(site.settings)) as catalog:
            for key, _text in catalog.documents(leases.CREATIONS):
                catalog.remove_document(leases.CREATIONS, key)
        site.collect_all()

    site.create(pin=True, at_the_end=collect)
    assert site.problems() == 0


@promise("What was stored for a creation under way stays, also without a grace period")
def test_a_collection_without_grace_leaves_a_creation_under_way_alone(site: Site) -> None:
    def collect() -> None:
        report = api.collect_garbage(grace_s=0, settings=site.settings)
        assert sum(storage.objects for storage in report.storages) == 0

    site.create(pin=True, at_the_end=collect)
    assert site.problems() == 0


@promise("What is younger than the grace period, or was removed within it, stays")
def test_a_removed_snapshot_stays_for_the_grace_period_and_then_goes(site: Site) -> None:
    record = site.create(pin=True)
    with closing(api.open_catalog(site.settings)) as catalog:
        catalog.remove_snapshot("mask", record.id)
        first = api.collect_garbage(grace_s=3600, settings=site.settings)
        assert [storage.objects for storage in first.storages] == [0]
        catalog.remove_document(leases.REMOVED, record.id)  # as if that were long ago
    site.collect_all()


@promise("With SQLite, a clock that is set ahead ends nothing before the next boot")
def test_a_step_of_the_nodes_clock_ends_no_grace_period(site: Site) -> None:
    """SQLite's clock is its node's, and follows no step ahead; a step back is followed, so nothing is of the future."""
    with closing(api.open_catalog(site.settings)) as catalog:
        if not isinstance(catalog, SqliteCatalog) or not site.settings.objects.startswith("file://"):
            pytest.skip("a server's clock is not the node's, and S3 refuses a clock that is so wrong")
        record = site.create(pin=True)
        catalog.remove_snapshot("mask", record.id)
        site.node("snapshot", "gc", clock="+365d")
        assert catalog.get_blobs([BlobId(bytes.fromhex(record.id))])
        assert abs(catalog.now_s() - time.time()) < 60
        site.node("snapshot", "gc", clock="-100d")
        assert catalog.now_s() < time.time() - 99 * 86_400
        assert catalog.get_blobs([BlobId(bytes.fromhex(record.id))])


@promise("With SQLite, a clock that is set ahead ends nothing before the next boot")
def test_each_boot_begins_with_the_time_of_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(SqliteCatalog(tmp_path / "catalog.db")) as catalog:
        before_s = catalog.now_s()
        node = time.time
        monkeypatch.setattr(time, "time", lambda: node() + 86_400)
        assert catalog.now_s() < before_s + 3600
        monkeypatch.setattr(sqlite_catalog, "boot_id", lambda: "the next one")
        assert catalog.now_s() >= before_s + 86_400
        catalog.set_document(sqlite_catalog.CLOCK, "node", "{}", old=catalog.document(sqlite_catalog.CLOCK, "node"))
        assert catalog.now_s() >= before_s + 86_400  # and what nobody can read is written anew


@promise("With SQLite, a clock that is set ahead ends nothing before the next boot")
def test_a_step_of_the_nodes_clock_gives_no_task_to_a_second_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SqliteTasks(SqliteCatalog(tmp_path / "catalog.db"))) as store:
        made = store.create("queue", 1, "{}", b"")
        store.make(made, "maker", lambda: [NewTask(0, 1, 1, "a task", 0, 2)])
        queue = store.queue("queue")
        assert queue is not None
        lease = store.lease(queue, "one", "first", lease_s=60, max_lost=3)
        assert lease is not None
        node = time.time
        monkeypatch.setattr(time, "time", lambda: node() + 86_400)
        assert store.lease(queue, "another", "second", lease_s=60, max_lost=3) is None
        store.report(lease, 1, lease_s=60)
        monkeypatch.setattr(time, "time", lambda: node() - 86_400)
        assert store.lease(queue, "another", "third", lease_s=60, max_lost=3) is not None, "its worker may be dead"
