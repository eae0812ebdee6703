"""What nodes say that they hold, in both catalogs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from datacache.catalog import leases
from datacache.catalog.base import Catalog
from datacache.catalog.holdings import (
    LABEL_PREFIX,
    MOST_HELD,
    Holding,
    holdings,
    snapshot_label,
    write_holdings,
)
from datacache.catalog.leases import HOLDINGS, REPORT_LEASE_S
from datacache.catalog.open import open_catalog_url
from tests.servers import Mongod

A, B = "a" * 32, "b" * 32


@pytest.fixture(params=["sqlite", "mongodb"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Catalog]:
    if request.param == "mongodb":
        mongod: Mongod = request.getfixturevalue("mongod")
        url = mongod.database_url()
    else:
        url = f"sqlite:///{tmp_path}/catalog.db"
    opened = open_catalog_url(url)
    yield opened
    opened.close()


def test_a_node_says_what_it_holds_and_says_it_anew(catalog: Catalog) -> None:
    write_holdings(catalog, "node-1", {A: Holding(10, 100), B: Holding(5, 5)})
    write_holdings(catalog, "node-2", {B: Holding(1, 5)})
    write_holdings(catalog, "node-1", {A: Holding(90, 100)})
    assert holdings(catalog) == {"node-1": {A: Holding(90, 100)}, "node-2": {B: Holding(1, 5)}}
    assert holdings(catalog)["node-1"][A].share == 0.9


def test_a_node_that_died_is_forgotten_by_readers_and_by_a_collection(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_holdings(catalog, "dead", {A: Holding(1, 1)})
    later_s = catalog.now_s() + REPORT_LEASE_S + 1
    monkeypatch.setattr(type(catalog), "now_s", lambda _self: later_s)
    write_holdings(catalog, "alive", {A: Holding(1, 1)})
    assert set(holdings(catalog)) == {"alive"}
    leases.forget_ended(catalog, now_s=later_s, cutoff_s=0)
    assert [key for key, _ in catalog.documents(HOLDINGS)] == ["alive"]


def test_what_a_node_said_before_the_clock_was_set_back_counts_no_more(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = catalog.now_s()
    monkeypatch.setattr(type(catalog), "now_s", lambda _self: now_s + 1e6)
    write_holdings(catalog, "dead", {A: Holding(1, 1)})
    write_holdings(catalog, "alive", {A: Holding(1, 1)})
    monkeypatch.setattr(type(catalog), "now_s", lambda _self: now_s)
    write_holdings(catalog, "alive", {A: Holding(1, 1)})
    assert set(holdings(catalog)) == {"alive"}
    leases.forget_ended(catalog, now_s=now_s, cutoff_s=0)
    assert [key for key, _ in catalog.documents(HOLDINGS)] == ["alive"]


def test_of_many_snapshots_the_largest_are_written(catalog: Catalog) -> None:
    write_holdings(catalog, "n", {f"{number:032x}": Holding(number + 1, 10**9) for number in range(MOST_HELD + 50)})
    found = holdings(catalog)["n"]
    assert len(found) == MOST_HELD
    assert min(holding.held_bytes for holding in found.values()) == 51
    assert len(catalog.documents(HOLDINGS)[0][1]) < 20_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "nonsense",
        '{"version": 2, "until_s": SOON, "snapshots": {}}',
        '{"version": 1, "until_s": "never", "snapshots": {}}',
        '{"version": 1, "until_s": NaN, "snapshots": {}}',
        '{"version": 1, "until_s": SOON, "snapshots": []}',
        f'{{"version": 1, "until_s": SOON, "snapshots": {{"{A}": 7}}}}',
        f'{{"version": 1, "until_s": SOON, "snapshots": {{"{A}": [1e999, 1]}}}}',
        f'{{"version": 1, "until_s": SOON, "snapshots": {{"{A}": [1, 2, 3]}}}}',
        "[" * 100_000,
    ],
)
def test_what_makes_no_sense_counts_as_no_node(tmp_path: Path, text: str) -> None:
    catalog = open_catalog_url(f"sqlite:///{tmp_path}/catalog.db")
    catalog.set_document(HOLDINGS, "odd", text.replace("SOON", str(catalog.now_s() + 60)), old=None)
    write_holdings(catalog, "n", {A: Holding(1, 1)})
    assert holdings(catalog) == {"n": {A: Holding(1, 1)}}
    write_holdings(catalog, "odd", {})
    assert holdings(catalog)["odd"] == {}
    catalog.close()


def test_ids_that_are_none_and_nothing_held_are_left_out(tmp_path: Path) -> None:
    catalog = open_catalog_url(f"sqlite:///{tmp_path}/catalog.db")
    snapshots = {A: [1, 2], "../x": [1, 2], "A" * 32: [1, 2], B: [0, 2], "c" * 32: [10**400, 1], "d" * 32: [1, 10**400]}
    text = json.dumps({"version": 1, "until_s": catalog.now_s() + 60, "snapshots": snapshots})
    catalog.set_document(HOLDINGS, "n", text, old=None)
    assert holdings(catalog) == {"n": {A: Holding(1, 2)}}
    catalog.close()


def test_a_label_is_one_that_kubernetes_takes_and_names_no_snapshot() -> None:
    label = snapshot_label(A)
    name = label.removeprefix(LABEL_PREFIX)
    assert label == f"cache.datacache.io/{name}"
    assert len(name) == 20
    assert name.isalnum()
    assert name == name.lower()
    assert name not in A
    assert label != snapshot_label(B)
