"""Arrays beside a table come back exactly, live as long as their snapshot, and are made anew where they are damaged."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from datacache import api
from datacache.annotations.browsing.browser import Filter
from datacache.annotations.query import Query
from datacache.annotations.table import arrays
from datacache.annotations.table.arrays import ArrayStore, narrow
from datacache.settings import Settings
from tests.web.conftest import make

FILTERS = [
    Filter(query=Query(labels=("dog",))),
    Filter(query=Query(where="objects > 1 and width == 100 and like(path, '*7.jpg')")),
    Filter(min_side=7.5),
    Filter(split="train"),
    Filter(problem="box-clipped"),
]


@pytest.fixture
def ref(settings: Settings, tmp_path: Path) -> str:
    """A snapshot with two classes, a box that is clipped, and a split."""
    images = {
        b"%s/%03d.jpg" % (b"val" if n % 3 else b"train", n): [("cat", [1.5, 1, 9, 6 + n % 9]), ("dog", [90, 3, 20, 9])]
        for n in range(40)
    }
    return make(settings, tmp_path / "pets", "pets", images | {b"val/none.jpg": []})


def answers(ref: str, settings: Settings, *, ahead: bool = False) -> list[tuple[list[int], object]]:
    with api.open_browser(ref, processes=1, settings=settings) as (_, browser):
        if ahead:
            browser.prepare()
        found = [browser.select(each) for each in FILTERS]
        return [(each.rows.tolist(), each.labels) for each in found]


def test_arrays_come_back_exactly_and_in_their_order(settings: Settings) -> None:
    put = {
        "whole": narrow(np.array([0, 7, 255], np.uint32)),
        "wider": narrow(np.array([0, 7, 256], np.uint32)),
        "zeros": np.zeros(5, np.uint64),
        "halves": narrow(np.array([0.5, np.nan, -3])),
        "tenths": narrow(np.array([0.1, np.inf])),
        "none": np.zeros(0, np.uint8),
    }
    assert [each.dtype.str for each in put.values()] == ["|u1", "<u2", "<u8", "<f4", "<f8", "|u1"]
    with closing(api.open_catalog(settings)) as catalog:
        store = ArrayStore(catalog, "a" * 32, "table/1")
        assert store.get("group") is None
        store.put("group", put)
        got = store.get("group")
        assert got is not None
        assert list(got) == list(put)
        for name, values in put.items():
            np.testing.assert_array_equal(got[name], values)
        assert ArrayStore(catalog, "a" * 32, "table/2").get("group") is None


def test_a_large_array_is_in_several_blobs(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_BLOB_BYTES", 64)
    with closing(api.open_catalog(settings)) as catalog:
        store = ArrayStore(catalog, "a" * 32, "table/1")
        put = {"one": np.arange(333, dtype=np.uint16), "two": np.arange(50, dtype=np.float64)}
        store.put("group", put)
        got = store.get("group")
        assert got is not None
        assert all((got[name] == put[name]).all() for name in put)


def test_a_page_that_was_opened_before_reads_arrays_and_no_ranges(
    ref: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answers(ref, settings)
    assert [wanted for wanted, (rows, _) in zip(FILTERS, first, strict=True) if not rows] == []
    monkeypatch.setattr("datacache.annotations.table.table.Table.summaries", pytest.fail)
    monkeypatch.setattr("datacache.annotations.table.table.Table.details", pytest.fail)
    assert answers(ref, settings) == first
    assert answers(ref, settings, ahead=True) == first


def damage(home: Path, statement: str) -> None:
    with closing(sqlite3.connect(home / "catalog.db")) as file, file:
        assert file.execute(statement).rowcount > 0


@pytest.mark.parametrize("how", ["gone", "other bytes"])
def test_arrays_that_are_damaged_are_made_anew(ref: str, settings: Settings, home: Path, how: str) -> None:
    first = answers(ref, settings)
    what = "DELETE FROM blobs" if how == "gone" else "UPDATE blobs SET data = x'00'"
    damage(home, f"{what} WHERE id IN (SELECT root FROM derived WHERE name LIKE '%/summaries/%')")
    assert answers(ref, settings) == first


def test_a_catalog_that_takes_nothing_is_browsed_all_the_same(
    ref: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datacache.core.errors import CatalogError

    first = answers(ref, settings)

    def refuse(*_: object, **__: object) -> None:
        raise CatalogError("read-only")

    monkeypatch.setattr(arrays, "VERSION", 99)
    monkeypatch.setattr("datacache.catalog.sqlite.catalog.SqliteCatalog.set_derived", refuse)
    assert answers(ref, settings) == first


def notes(home: Path) -> int:
    with closing(sqlite3.connect(home / "catalog.db")) as file:
        count: int = file.execute("SELECT count(*) FROM derived").fetchone()[0]
        return count


def test_arrays_are_collected_with_their_snapshot_and_not_before(ref: str, settings: Settings, home: Path) -> None:
    first = answers(ref, settings)
    before = notes(home)
    assert before > 4
    api.collect_garbage(grace_s=0, settings=settings)
    assert notes(home) == before
    assert answers(ref, settings) == first
    api.remove_snapshot(ref, settings=settings)
    api.collect_garbage(grace_s=0, settings=settings)
    assert notes(home) == 0
