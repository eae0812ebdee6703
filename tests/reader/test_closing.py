"""Resources of a snapshot are given back: at its close, and where it cannot be opened."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from datacache import api
from datacache.catalog.leases import REMOVED
from datacache.catalog.open import open_catalog_url
from datacache.core.errors import (
    DatacacheError,
    ObjectNotFoundError,
    SnapshotClosedError,
    SnapshotNotFoundError,
)
from datacache.settings import Settings
from datacache.store.open import Stores
from datacache.writeback.quota import Quota
from tests.leftovers import descriptors_below
from tests.promises import promise


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    folder = tmp_path / "bucket"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.jpg").write_bytes(b"image %d" % number)
    return folder


@promise("A closed snapshot gives back its connections")
def test_what_is_read_after_the_close_is_an_error_and_says_so(bucket: Path, settings: Settings) -> None:
    api.create_snapshot("mask", str(bucket), settings=settings)
    snapshot = api.open_snapshot("mask", settings)
    file = snapshot.open("1.jpg")
    assert snapshot.read("0.jpg") == snapshot.read("0.jpg") == b"image 0"
    snapshot.close()
    reads: list[Callable[[], object]] = [
        lambda: snapshot.read("0.jpg"),
        lambda: snapshot.read("2.jpg"),
        lambda: snapshot.view("0.jpg"),
        lambda: snapshot.read_range("0.jpg", 1, 3),
        lambda: snapshot.stat("0.jpg"),
        lambda: snapshot.open("0.jpg"),
        lambda: "0.jpg" in snapshot,
        snapshot.paths,
        file.read,
    ]
    for read in reads:
        with pytest.raises(SnapshotClosedError, match=r"mask@[0-9a-f]{32} is closed"):
            read()
    assert len(snapshot) == 3
    assert "mask@" in repr(snapshot)
    snapshot.close()
    with pickle.loads(pickle.dumps(snapshot)) as again:
        assert again.read("2.jpg") == b"image 2"


@promise("A closed snapshot gives back its connections")
def test_a_close_closes_the_stores_and_the_catalog(
    bucket: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.create_snapshot("mask", str(bucket), settings=settings)
    closed: list[str] = []
    monkeypatch.setattr(Stores, "close", lambda _self: closed.append("stores"))
    with api.open_snapshot("mask", settings) as snapshot:
        assert snapshot.read("0.jpg") == b"image 0"
        assert closed == []
    assert closed == ["stores"]
    assert descriptors_below(settings.home / "catalog.db") == 0


@promise("A closed snapshot gives back its connections")
def test_a_snapshot_that_cannot_be_opened_keeps_no_catalog_open(bucket: Path, settings: Settings) -> None:
    api.create_snapshot("mask", str(bucket), settings=settings)
    gc.disable()  # or it would be closed by luck
    try:
        for opened in (api.open_snapshot, api.open_mounted):
            kept: list[DatacacheError] = []
            for ref in ("mask@v9", "nothing", f"mask@{'0' * 32}"):
                with pytest.raises(SnapshotNotFoundError) as caught:
                    opened(ref, settings)
                kept.append(caught.value)  # its traceback holds what was local
            assert descriptors_below(settings.home / "catalog.db") == 0
    finally:
        gc.enable()


@promise("A read that fails because the snapshot was removed and collected says so")
def test_a_read_that_fails_since_the_snapshot_was_removed_says_so(bucket: Path, settings: Settings) -> None:
    record = api.create_snapshot("mask", str(bucket), settings=settings, pin=True)
    with api.open_snapshot("mask", settings) as snapshot:
        snapshot.stat("0.jpg")  # its manifest is known
        api.remove_snapshot("mask@latest", settings=settings)
        with closing(open_catalog_url(settings.catalog)) as catalog:
            catalog.remove_document(REMOVED, record.id)
        assert api.collect_garbage(grace_s=0, settings=settings).storages[0].objects == 3
        with pytest.raises(ObjectNotFoundError, match=r"mask@.* was removed from the catalog"):
            snapshot.read("0.jpg")


@promise("A closed snapshot gives back its connections")
def test_a_bucket_that_cannot_be_opened_to_the_end_lets_its_staging_area_go(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "live").mkdir()
    url = f"file://{tmp_path}/live"

    def fail(*_arguments: object, **_options: object) -> None:
        raise DatacacheError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Quota, "__init__", fail)
        with pytest.raises(DatacacheError, match="no") as caught:
            api.open_bucket(url, settings, who="first")
        assert caught.traceback  # which holds what was local
    with closing(api.open_bucket(url, settings, who="second")) as live:  # its traceback is held still
        assert live.url.rstrip("/").endswith("/live")
