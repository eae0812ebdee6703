"""Making snapshots of a place again and again: what is written, what is recorded, what a collection in between does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from datacache.catalog.commit import commit_manifest
from datacache.catalog.create import ListedPlace, create_copied_snapshot, create_snapshot
from datacache.catalog.mark import reachable
from datacache.catalog.objects import ObjectWriter
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import CatalogError, TagExistsError
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import BlobId, Entry, Lineage, Naming, SnapshotRecord, Source
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.base import ObjectInfo
from tests.memory import MemoryStore
from tests.promises import promise


class Counting(SqliteCatalog):
    """A catalog that notes which blobs it is given."""

    def put_blobs(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        self.__dict__.setdefault("given", []).extend(id for id, _data in blobs)
        super().put_blobs(blobs)

    def taken(self) -> list[BlobId]:
        return self.__dict__.pop("given", [])  # type: ignore[no-any-return]


@pytest.fixture
def catalog(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "catalog.db")


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemoryStore:
    store = MemoryStore(f"memory://{request.node.name}")
    for number in range(3000):
        store.put(f"faces/{number:05}.jpg", str(number).encode())
    return store


def create(catalog: SqliteCatalog, store: MemoryStore, name: str = "mask") -> SnapshotRecord:
    return create_snapshot(
        catalog, ListedPlace(store=store, prefix="faces/", origin=f"{store.url}/faces/"), Naming(name=name)
    )


@promise("A new version writes what changed and shares the rest")
def test_an_unchanged_prefix_writes_no_blob_and_a_changed_one_the_ranges_that_changed(
    catalog: Counting, store: MemoryStore
) -> None:
    first = create(catalog, store)
    ranges = len(Manifest.open(first.id, catalog.get_blobs).root.ranges)
    assert len(catalog.taken()) == ranges + 1 > 10
    assert create(catalog, store) == first
    assert catalog.taken() == []
    store.put("faces/01500.jpg", b"another")
    second = create(catalog, store)
    assert len(catalog.taken()) == 2  # one range, the root
    assert second.parent == first.id
    store.put("faces/99999.jpg", b"one more")
    create(catalog, store)
    assert len(catalog.taken()) == 2


def test_a_snapshot_knows_how_it_was_made(catalog: Counting, store: MemoryStore) -> None:
    record = create(catalog, store)
    assert record.lineage == Lineage("create", {"from": f"{store.url}/faces/"}, ())
    assert catalog.snapshot("mask", record.id) == record


def test_progress_counts_a_file_once_when_it_is_listed_or_copied(
    tmp_path: Path, catalog: Counting, store: MemoryStore, settings: Settings
) -> None:
    done: list[tuple[int, int]] = []
    place = ListedPlace(
        store=store, prefix="faces/", origin=f"{store.url}/faces/", progress=lambda *counts: done.append(counts)
    )
    create_snapshot(catalog, place, Naming(name="mask"))
    size_bytes = sum(len(str(number)) for number in range(3000))
    assert done == sorted(done)
    assert done[-1] == (3000, size_bytes)
    done.clear()
    with closing(ObjectWriter(catalog, settings, url=f"file://{tmp_path}/copies")) as writer:
        create_copied_snapshot(catalog, place, Naming(name="mask"), writer)
    assert done == sorted(set(done))
    assert len(done) == 3000
    assert done[-1] == (3000, size_bytes)


class RemovedMeanwhile(MemoryStore):
    """A store during whose listing a catalog loses all it has."""

    def __init__(self, store: MemoryStore, catalog: SqliteCatalog) -> None:
        super().__init__(store.url)
        self._catalog = catalog

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        yield from super().list(prefix, start_after=start_after)
        for record in self._catalog.snapshots("mask"):
            self._catalog.remove_snapshot("mask", record.id)
        self._catalog.collect(reachable(self._catalog.get_blobs), grace_s=0, now_s=time.time() + 1)


def test_what_the_version_before_had_may_go_during_a_creation_which_then_puts_it_again(
    catalog: Counting, store: MemoryStore
) -> None:
    first = create(catalog, store)
    store.put("faces/01500.jpg", b"another")
    second = create(catalog, RemovedMeanwhile(store, catalog))
    assert [record.id for record in catalog.snapshots("mask")] == [second.id]
    assert second.parent is None
    assert len(list(Manifest.open(second.id, catalog.get_blobs).entries())) == 3000
    assert first.id != second.id


def test_a_damaged_version_before_spoils_no_new_one(catalog: Counting, store: MemoryStore) -> None:
    first = create(catalog, store)
    blob = Manifest.open(first.id, catalog.get_blobs).root.ranges[3].blob
    with catalog._file.write(durable=True) as connection:
        connection.execute("DELETE FROM blobs WHERE id = ?", (blob,))
    again = create(catalog, store)
    assert again.id == first.id
    assert len(list(Manifest.open(first.id, catalog.get_blobs).entries())) == 3000
    with catalog._file.write(durable=True) as connection:
        connection.execute("UPDATE blobs SET data = x'00' WHERE id = ?", (bytes.fromhex(first.id),))
    store.put("faces/01500.jpg", b"another")
    second = create(catalog, store)
    assert len(list(Manifest.open(second.id, catalog.get_blobs).entries())) == 3000


@pytest.mark.parametrize("removed", [False, True])
def test_a_snapshot_whose_input_was_removed_meanwhile_is_made_only_if_it_needs_no_stored_objects(
    catalog: Counting, store: MemoryStore, removed: bool
) -> None:
    taken = create(catalog, store)
    for sources in ([Source("s3://faces", "")], [Source("s3://o", "x/", content_addressed=True)]):
        builder = ManifestBuilder(sources, catalog.put_blobs)
        builder.add(Entry(b"a", 1, 0, "", "", 0, b"key"))
        if removed:
            catalog.remove_snapshot("mask", taken.id)

        def commit(builder: ManifestBuilder = builder) -> SnapshotRecord:
            lineage = Lineage("query", {}, (f"mask@{taken.id}",))
            return commit_manifest(catalog, builder, Naming(name="part"), origin="", lineage=lineage)

        if removed and sources[0].content_addressed:
            with pytest.raises(CatalogError, match="was removed while part was made"):
                commit()
            assert len(catalog.snapshots("part")) == 1
        else:
            assert commit().lineage == Lineage("query", {}, (f"mask@{taken.id}",))


class Interrupted(SqliteCatalog):
    """A catalog in which somebody else does something right after the first commit of a data set."""

    def commit(self, record: SnapshotRecord, **options: Any) -> SnapshotRecord:
        committed = super().commit(record, **options)
        if self.__dict__.get("dataset_at", "") == record.dataset:
            self.__dict__.pop("dataset_at")
            self.__dict__["then"]()
        return committed

    def after_commit_of(self, dataset: str, then: Callable[[], object]) -> None:
        self.__dict__.update(dataset_at=dataset, then=then)


@pytest.mark.parametrize("what", ["input removed", "tag taken"])
def test_a_commit_that_is_taken_back_loses_no_tag(tmp_path: Path, store: MemoryStore, what: str) -> None:
    catalog = Interrupted(tmp_path / "catalog.db")
    taken = create(catalog, store)
    lineage = Lineage("query", {}, (f"mask@{taken.id}",))

    def commit(key: bytes, **tags: Any) -> SnapshotRecord:
        builder = ManifestBuilder([Source("s3://o", "x/", content_addressed=True)], catalog.put_blobs)
        builder.add(Entry(b"a", 1, 0, "", "", 0, key))
        return commit_manifest(catalog, builder, Naming(name="part", **tags), origin="", lineage=lineage)

    first = commit(b"1", tags=["prod"])
    if what == "input removed":
        catalog.after_commit_of("part", lambda: catalog.remove_snapshot("mask", taken.id))
        with pytest.raises(CatalogError, match="was removed while part was made"):
            commit(b"2", tags=["prod", "new"], move_tags=True)
    else:
        catalog.after_commit_of("part", lambda: catalog.set_tag("part", "new", first.id))
        with pytest.raises(TagExistsError):
            commit(b"2", tags=["new"])
    dataset = catalog.dataset("part")
    assert dataset is not None
    assert dataset.tags == {"prod": first.id} | ({} if what == "input removed" else {"new": first.id})
    assert (dataset.latest, len(catalog.snapshots("part"))) == (first.id, 1)
    if what == "tag taken":
        second = commit(b"2", tags=["prod", "new"], move_tags=True)
        dataset = catalog.dataset("part")
        assert dataset is not None
        assert dataset.tags == {"prod": second.id, "new": second.id}
