"""The node's cache in front of a shared catalog."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from datacache.catalog.blobcache import BlobCache
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import CatalogUnavailableError, CorruptManifestError
from datacache.manifest.model import BlobId, DatasetRecord, SnapshotRecord
from tests.conformance.catalog import CatalogConformance, a_blob, a_record, run_together
from tests.conformance.collect import collect
from tests.promises import promise


class Shared(SqliteCatalog):
    """A catalog that counts what it is asked for, and can be away."""

    away = False
    asked = 0

    def get_blobs(self, ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        wanted = list(ids)
        self.asked += len(wanted)
        return super().get_blobs(wanted) if not self.away else self._fail()

    def dataset(self, name: str) -> DatasetRecord | None:
        return super().dataset(name) if not self.away else self._fail()

    def snapshot(self, dataset: str, id: str) -> SnapshotRecord | None:
        return super().snapshot(dataset, id) if not self.away else self._fail()

    def identity(self) -> str:
        return super().identity() if not self.away else self._fail()

    def derived(self, snapshot_id: str, name: str) -> BlobId | None:
        return super().derived(snapshot_id, name) if not self.away else self._fail()

    def _fail(self):  # type: ignore[no-untyped-def]
        raise CatalogUnavailableError("MongoDB at nowhere does not answer")


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path / "shared.db")


@pytest.fixture
def cache_file(tmp_path: Path) -> Path:
    return tmp_path / "home" / "manifests.db"


class TestBlobCacheIsACatalog(CatalogConformance):
    # Their processes open the catalog below, so that they would try out that, which has its own.
    test_processes_that_ask_first_for_the_identity_get_the_same = None  # type: ignore[assignment]
    test_processes_committing_at_once_lose_nothing = None  # type: ignore[assignment]
    test_of_processes_racing_for_a_tag_one_wins_and_the_others_hear_of_it = None  # type: ignore[assignment]
    test_committing_and_removing_the_same_snapshot_at_once_leaves_it_whole_or_gone = None  # type: ignore[assignment]
    test_a_killed_writer_leaves_a_valid_catalog_and_loses_nothing_it_was_told_is_done = None  # type: ignore[assignment]
    test_creations_lose_nothing_while_collections_run_again_and_again = None  # type: ignore[assignment]
    test_collections_and_creations_killed_at_any_point_leave_a_valid_catalog = None  # type: ignore[assignment]
    test_of_processes_that_set_at_once_none_loses_what_another_has_set = None  # type: ignore[assignment]
    test_a_killed_writer_of_documents_loses_nothing_it_was_told_is_done = None  # type: ignore[assignment]

    @pytest.fixture
    def catalog_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/home/catalog.db"

    @pytest.fixture
    def catalog(self, catalog_url: str, tmp_path: Path) -> BlobCache:
        return BlobCache(SqliteCatalog(Path(catalog_url.removeprefix("sqlite:///"))), tmp_path / "cache.db")


def test_a_blob_is_asked_for_once_on_a_node(shared: Shared, cache_file: Path) -> None:
    blobs = dict(a_blob(os.urandom(1000)) for _number in range(2000))
    shared.put_blobs(list(blobs.items()))
    assert BlobCache(shared, cache_file).get_blobs(blobs) == blobs
    assert shared.asked == 2000
    assert BlobCache(shared, cache_file).get_blobs(blobs) == blobs
    assert shared.asked == 2000


def test_what_was_put_here_is_not_asked_for(shared: Shared, cache_file: Path) -> None:
    blob = a_blob(b"new")
    BlobCache(shared, cache_file).put_blobs([blob])
    assert shared.get_blobs([blob[0]]) == dict([blob])
    shared.away = True
    assert BlobCache(shared, cache_file).get_blobs([blob[0]]) == dict([blob])


@promise("While a shared catalog is away, known snapshots can still be opened and mounted")
def test_a_mount_goes_on_and_another_begins_while_the_shared_catalog_is_away(
    shared: Shared, cache_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blob = a_blob(b"range")
    first = BlobCache(shared, cache_file)
    first.put_blobs([blob])
    first.commit(a_record(), tags=["v1"])
    before = first.dataset("mask")
    assert first.snapshot("mask", a_record().id) == a_record()
    shared.away = True
    for cache in (first, BlobCache(shared, cache_file)):
        assert cache.dataset("mask") == before
        assert cache.snapshot("mask", a_record().id) == a_record()
        assert cache.get_blobs([blob[0]]) == dict([blob])
    assert "does not answer; using what it last said of dataset mask" in caplog.text


def test_what_was_derived_and_the_identity_are_known_while_the_shared_catalog_is_away(
    shared: Shared, cache_file: Path
) -> None:
    first = BlobCache(shared, cache_file)
    root, part = a_blob(b"root"), a_blob(b"part")
    shared.put_blobs([root, part])
    first.set_derived(a_record().id, "table", root[0], needs=[root[0], part[0]])
    assert first.derived(a_record().id, "table") == root[0]
    assert first.derived(a_record().id, "another") is None
    identity = first.identity()
    shared.away = True
    for cache in (first, BlobCache(shared, cache_file)):
        assert cache.derived(a_record().id, "table") == root[0]
        assert cache.identity() == identity
        with pytest.raises(CatalogUnavailableError):
            cache.derived(a_record().id, "another")


def test_a_blob_that_only_the_node_has_is_not_there_for_a_commit(shared: Shared, cache_file: Path) -> None:
    cache = BlobCache(shared, cache_file)
    blob = a_blob(b"x")
    cache.put_blobs([blob])
    collect(shared)
    assert cache.get_blobs([blob[0]]) == dict([blob])
    with pytest.raises(CorruptManifestError):
        cache.commit(a_record(), needs=[blob[0]])
    cache.put_blobs([blob])
    cache.commit(a_record(), needs=[blob[0]])


def test_what_the_node_never_saw_fails_while_the_shared_catalog_is_away(shared: Shared, cache_file: Path) -> None:
    cache = BlobCache(shared, cache_file)
    assert cache.dataset("mask") is None
    shared.away = True
    for ask in (
        lambda: cache.get_blobs([a_blob(b"x")[0]]),
        lambda: cache.dataset("mask"),
        lambda: cache.snapshot("mask", a_record().id),
    ):
        with pytest.raises(CatalogUnavailableError):
            ask()


@promise("A reference is resolved once, and a catalog that answers is always asked for tags")
def test_a_catalog_that_answers_is_always_asked_for_tags(shared: Shared, cache_file: Path) -> None:
    cache = BlobCache(shared, cache_file)
    for number in (1, 2):
        shared.commit(a_record(number=number), tags=["v1"], move_tags=True)
        dataset = cache.dataset("mask")
        assert dataset is not None
        assert dataset.tags == {"v1": a_record(number=number).id}


def test_a_snapshot_that_was_removed_is_forgotten_here_too(shared: Shared, cache_file: Path) -> None:
    cache = BlobCache(shared, cache_file)
    cache.commit(a_record())
    assert cache.snapshot("mask", a_record().id)
    shared.remove_snapshot("mask", a_record().id)
    assert cache.snapshot("mask", a_record().id) is None
    shared.away = True
    with pytest.raises(CatalogUnavailableError):
        cache.snapshot("mask", a_record().id)


def test_the_file_stays_within_its_bound_and_keeps_what_was_used_last(
    shared: Shared, cache_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlobCache(shared, cache_file, limit_bytes=1_000_000)
    clock = [time.time()]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    often = a_blob(os.urandom(10_000))
    cache.put_blobs([often])
    for _round in range(30):
        clock[0] += 7200
        assert cache.get_blobs([often[0]]) == dict([often])
        cache.put_blobs([a_blob(os.urandom(10_000)) for _number in range(20)])
    cache.close()
    assert cache_file.stat().st_size < 1_500_000
    assert shared.asked == 0


@pytest.mark.parametrize("damage", ["header", "middle", "cut"])
def test_a_broken_file_is_logged_and_made_anew(
    shared: Shared, cache_file: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    blobs = dict(a_blob(os.urandom(5000)) for _number in range(200))
    cache = BlobCache(shared, cache_file)
    cache.put_blobs(list(blobs.items()))
    cache.close()
    size = cache_file.stat().st_size
    with cache_file.open("r+b") as file:
        if damage == "cut":
            file.truncate(size // 2)
        else:
            file.seek(0 if damage == "header" else 4096)
            file.write(os.urandom(8192 if damage == "header" else size - 4096))
    assert cache.get_blobs(blobs) == blobs
    assert cache.get_blobs(blobs) == blobs
    assert "damaged" in caplog.text
    asked = shared.asked
    assert cache.get_blobs(blobs) == blobs
    assert shared.asked == asked


def test_a_blob_damaged_in_silence_is_fetched_again(shared: Shared, cache_file: Path) -> None:
    data = b"0123456789abcdef" * 100
    blob = a_blob(data)
    cache = BlobCache(shared, cache_file)
    cache.put_blobs([blob])
    cache.close()
    cache_file.write_bytes(cache_file.read_bytes().replace(data[:64], b"X" * 64))
    assert cache.get_blobs([blob[0]]) == dict([blob])
    assert shared.asked == 1
    assert cache.get_blobs([blob[0]]) == dict([blob])
    assert shared.asked == 1


def test_a_place_that_cannot_be_written_is_read_around(shared: Shared, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    blob = a_blob(b"x")
    cache = BlobCache(shared, Path("/proc/nowhere/manifests.db"))
    cache.put_blobs([blob])
    cache.commit(a_record())
    assert cache.get_blobs([blob[0]]) == dict([blob])
    assert cache.snapshot("mask", a_record().id) == a_record()
    assert caplog.text.count("is left out") == 1


def test_processes_share_the_file_and_survive_its_renewal(shared: Shared, cache_file: Path) -> None:
    blobs = dict(a_blob(os.urandom(2000)) for _number in range(300))
    shared.put_blobs(list(blobs.items()))

    def work(process: int) -> None:
        cache = BlobCache(shared, cache_file)
        for number in range(20):
            assert cache.get_blobs(blobs) == blobs
            if process == 0 and number % 5 == 4:
                cache_file.write_bytes(b"garbage" * 1000)

    run_together(4, work)
    assert BlobCache(shared, cache_file).get_blobs(blobs) == blobs
