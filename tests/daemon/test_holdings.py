"""What a daemon says that its node holds."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from datacache import connect, create_snapshot, load_settings
from datacache.api import open_catalog
from datacache.catalog.base import Catalog
from datacache.catalog.holdings import Holding, holdings
from datacache.catalog.leases import HOLDINGS
from datacache.core.ids import BLOCK_BYTES
from datacache.daemon import holdings as module
from datacache.daemon.holdings import Holdings, sample_blocks
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.tiers.local import LocalBlocks

COUNT, SIZE = 900, 3000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for number in range(COUNT):
        file = root / f"{number % 5}" / f"{number:05d}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(random.Random(number).randbytes(SIZE))
    return root


@pytest.fixture
def catalog(settings: Settings) -> Iterator[Catalog]:
    with closing(open_catalog(settings)) as opened:
        yield opened


def local_holdings(settings: Settings, catalog: Catalog, *datasets: str) -> Holdings:
    local = LocalBlocks(settings.home, settings.ram_dir)
    return Holdings(
        "node-1", settings.home, catalog, settings.catalog, missing=local.missing, datasets=lambda: datasets
    )


def warm(ref: str) -> None:
    client = connect()
    job = client.warm(ref)
    end = time.monotonic() + 60
    while (state := client.job(job))["state"] == "running":
        assert time.monotonic() < end, state
        time.sleep(0.02)
    assert state["state"] == "done", state


def test_a_daemon_with_a_node_name_tells_the_catalog_what_it_holds(
    settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATACACHE_NODE", "gpu-7")
    create_snapshot("mask", folder.as_uri())
    connect()
    end = time.monotonic() + 60
    with closing(open_catalog(load_settings())) as catalog:
        while (found := holdings(catalog)) == {}:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert found == {"gpu-7": {}}


def test_a_share_is_counted_and_written_when_it_has_changed(
    settings: Settings, catalog: Catalog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LIST_EVERY_S", 0.0)
    whole = create_snapshot("mask", folder.as_uri())
    part = create_snapshot("part", (folder / "0").as_uri())
    ours = local_holdings(settings, catalog, "mask", "gone")
    assert ours.look() == {}
    warm("part")
    held = ours.look()
    # The objects of `part` are a fifth of those of `mask`, under other paths; `part` is no data set of this node.
    assert set(held) == {whole.id}
    assert held[whole.id].total_bytes == COUNT * SIZE
    assert 0.17 < held[whole.id].share < 0.23
    assert holdings(catalog) == {"node-1": held}
    before = catalog.documents(HOLDINGS)
    ours.look()
    assert catalog.documents(HOLDINGS) == before, "nothing has changed, so nothing is written"
    warm("mask")
    assert ours.look() == {whole.id: Holding(COUNT * SIZE, COUNT * SIZE)}
    assert local_holdings(settings, catalog, "mask", "part").look().keys() == {whole.id, part.id}


def test_a_version_that_shares_most_blocks_with_the_one_that_was_read_is_held_as_well(
    settings: Settings, catalog: Catalog, folder: Path
) -> None:
    old = create_snapshot("mask", folder.as_uri(), tags=["v1"])
    warm("mask@v1")
    for number in range(90):
        (folder / "4" / f"new-{number}").write_bytes(b"x" * SIZE)
    new = create_snapshot("mask", folder.as_uri())
    held = local_holdings(settings, catalog, "mask").look()
    assert held[old.id].share == 1
    assert 0.86 < held[new.id].share < 0.96


def test_a_catalog_that_cannot_be_reached_ends_nothing(
    settings: Settings, catalog: Catalog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_snapshot("mask", folder.as_uri())
    monkeypatch.setattr(module, "_FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.0)
    ours, failed = local_holdings(settings, catalog, "mask"), threading.Semaphore(0)

    def fail() -> None:
        failed.release()
        raise OSError("no disk")

    monkeypatch.setattr(ours, "_count", fail)
    ours.start()
    assert all(failed.acquire(timeout=30) for _ in range(3))
    ours.stop()


class TestSample:
    def manifest(self, catalog: Catalog, ref: str) -> Manifest:
        snapshots = catalog.snapshots(ref)
        return Manifest.open(snapshots[-1].id, catalog.get_blobs)

    def test_a_small_snapshot_is_counted_whole(self, settings: Settings, catalog: Catalog, tmp_path: Path) -> None:
        sizes = [0, 1, 100, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 7]
        (tmp_path / "few").mkdir()
        for number, size in enumerate(sizes):
            with (tmp_path / "few" / str(number)).open("wb") as file:
                file.truncate(size)
        create_snapshot("few", (tmp_path / "few").as_uri())
        sample = sample_blocks(self.manifest(catalog, "few"))
        assert len(sample.weights) == 1 + 1 + 1 + 2 + 4
        assert sum(sample.weights) == sample.total_bytes == sum(sizes)
        assert sample.held_bytes(lambda _ids: []) == sum(sizes)
        assert sample.held_bytes(lambda ids: list(range(len(ids)))) == 0
        assert sample.held_bytes(lambda _ids: [0]) == sum(sizes) - 1

    def test_of_one_large_file_some_blocks_are_looked_at(
        self, settings: Settings, catalog: Catalog, tmp_path: Path
    ) -> None:
        (tmp_path / "one").mkdir()
        with (tmp_path / "one" / "file").open("wb") as file:
            file.truncate(10_000 * BLOCK_BYTES)
        create_snapshot("one", (tmp_path / "one").as_uri())
        sample = sample_blocks(self.manifest(catalog, "one"))
        assert len(sample.weights) == 512
        half = sample.held_bytes(lambda ids: [at for at, id in enumerate(ids) if int.from_bytes(id[16:]) >= 5000])
        assert abs(half / sample.total_bytes - 0.5) < 0.01

    def test_of_many_files_a_few_hundred_are_looked_at(
        self, settings: Settings, catalog: Catalog, folder: Path
    ) -> None:
        create_snapshot("mask", folder.as_uri())
        sample = sample_blocks(self.manifest(catalog, "mask"))
        assert 400 <= len(sample.weights) <= 512
        first = len(sample.weights) // 4
        held = sample.held_bytes(lambda ids: list(range(first, len(ids))))
        assert abs(held / sample.total_bytes - 0.25) < 0.01
