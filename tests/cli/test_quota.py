"""Test `dsctl k8s quota`."""

from __future__ import annotations

from pathlib import Path

import pytest

from datacache import connect
from datacache.catalog.quotas import KIND, NodeUse, report_use
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.settings import Settings
from tests.cli.conftest import Dsctl

TEAM = {
    "namespace": "team-a",
    "cache_bytes": 500_000_000,
    "staging_bytes": None,
    "own": ["cache"],
    "capacity_bytes": 0,
    "nodes": [],
}


def test_a_quota_is_set_shown_and_removed(dsctl: Dsctl) -> None:
    assert "no quotas yet" in dsctl("k8s", "quota").out
    assert dsctl("k8s", "quota", "team-a", "--cache", "500MB", "--json").json == [TEAM]
    dsctl("k8s", "quota", "*", "--staging", "1TB")
    assert [use["namespace"] for use in dsctl("k8s", "quota", "--json").json] == ["*", "team-a"]
    shown = dsctl("k8s", "quota", "team-a").out
    assert "500.0 MB" in shown
    assert "1.0 TB" in shown
    assert "no limit" in dsctl("k8s", "quota", "team-a", "--staging", "none").out
    (left,) = dsctl("k8s", "quota", "team-a", "--remove", "--json").json
    assert (left["cache_bytes"], left["staging_bytes"], left["own"]) == (None, 10**12, [])


def test_what_nodes_hold_is_shown_with_the_fullest_first(dsctl: Dsctl, home: Path) -> None:
    catalog = SqliteCatalog(home / "catalog.db")
    report_use(catalog, NodeUse(node="n1", cache_bytes={"team-a": 10_000_000}, staged_bytes={"team-a": 7}))
    report_use(catalog, NodeUse(node="n2", cache_bytes={"team-a": 30_000_000}))
    catalog.close()
    assert "30.0 MB (n2)" in dsctl("k8s", "quota").out
    (use,) = dsctl("k8s", "quota", "team-a", "--json").json
    assert use["nodes"] == [
        {"node": "n1", "cache_bytes": 10_000_000, "staged_bytes": 7},
        {"node": "n2", "cache_bytes": 30_000_000, "staged_bytes": 0},
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cache", "1GB"], "which namespace"),
        (["--remove"], "which namespace"),
        (["Team", "--cache", "1GB"], "'Team' cannot name a namespace"),
        (["a/../b"], "cannot name a namespace"),
        (["team-a", "--cache", "much"], "--cache: 'much' is not a size"),
        (["team-a", "--staging", "-1"], "'-1' is not a size"),
        (["team-a", "--staging", "9" * 400], "more than there can be"),
        (["team-a", "--staging", "10000PB"], "cannot be a quota"),
        (["team-a", "--remove"], "no quota of its own"),
        (["team-a", "--remove", "--cache", "1"], "do not go together"),
    ],
)
def test_what_cannot_be_is_refused_with_words(dsctl: Dsctl, words: list[str], told: str) -> None:
    result = dsctl("k8s", "quota", *words, "--json")
    assert result.code == 2
    assert told in result.error["message"]
    assert not dsctl("k8s", "quota", "--json").json


def test_a_quota_of_a_newer_version_names_the_way_out(dsctl: Dsctl, home: Path) -> None:
    catalog = SqliteCatalog(home / "catalog.db")
    catalog.set_document(KIND, "team-a", '{"version": 2}', old=None)
    catalog.close()
    result = dsctl("k8s", "quota", "--json")
    assert (result.code, "--remove" in result.error["hint"]) == (1, True)
    assert dsctl("k8s", "quota", "team-a", "--remove").code == 0


def test_the_status_of_a_cache_shows_the_shares_of_namespaces(dsctl: Dsctl, settings: Settings) -> None:
    connect(settings).set_tenants({"*": 10**9, "free": None}, {"mask": ["team-a", "free"]})
    out = dsctl("cache", "status").out
    assert "namespace team-a: 0 B of 1.0 GB\n" in out
    assert "namespace free: 0 B\n" in out
