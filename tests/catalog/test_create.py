"""Making snapshots of a place again and again: what is written, what is recorded, what a collection in between does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from datacache.catalog.create import create_snapshot
from datacache.catalog.sqlite import SqliteCatalog
from datacache.core.errors import CorruptManifestError
from datacache.manifest.model import BlobId, Lineage, SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.store.memory import MemoryStore


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
    return create_snapshot(catalog, store, "faces/", name=name, origin=f"{store.url}/faces/")


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


def test_what_the_version_before_had_may_go_during_a_creation_which_then_fails_whole_and_can_be_run_again(
    catalog: Counting, store: MemoryStore
) -> None:
    first = create(catalog, store)

    class RemovedMeanwhile(MemoryStore):
        def list(self, prefix: str, *, start_after: str = ""):  # type: ignore[no-untyped-def]
            yield from super().list(prefix, start_after=start_after)
            catalog.remove_snapshot("mask", first.id)
            with catalog._file.write(durable=True) as connection:
                connection.execute("DELETE FROM blobs")

    store.put("faces/01500.jpg", b"another")
    with pytest.raises(CorruptManifestError, match="nothing was changed") as caught:
        create(catalog, RemovedMeanwhile(store.url))
    assert "again" in caught.value.hint
    assert catalog.datasets() == []
    second = create(catalog, store)
    assert len(list(Manifest.open(second.id, catalog.get_blobs).entries())) == 3000
