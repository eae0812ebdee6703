"""Test the quotas of namespaces in the catalog."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from datacache.catalog import leases
from datacache.catalog.leases import QUOTA_USES
from datacache.catalog.quotas import (
    KIND,
    NodeUse,
    capacities,
    node_uses,
    quota_of,
    read_quotas,
    remove_quota,
    report_use,
    set_quota,
)
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import CatalogError, UsageError
from tests.conformance.catalog import run_together


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqliteCatalog]:
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    yield catalog
    catalog.close()


def test_what_a_namespace_does_not_say_is_the_defaults(catalog: SqliteCatalog) -> None:
    assert quota_of(catalog, "a").cache_bytes is None
    set_quota(catalog, "*", {"cache": 10, "staging": 20})
    set_quota(catalog, "a", {"staging": 5})
    set_quota(catalog, "b", {"cache": None})
    quotas = read_quotas(catalog)
    found = {name: (quotas.of(name).cache_bytes, quotas.of(name).staging_bytes) for name in ("a", "b", "c")}
    assert found == {"a": (10, 5), "b": (None, 20), "c": (10, 20)}
    assert all(quota_of(catalog, name) == quotas.of(name) for name in found)
    remove_quota(catalog, "a")
    assert quota_of(catalog, "a").staging_bytes == 20
    with pytest.raises(UsageError, match="no quota of its own") as failure:
        remove_quota(catalog, "a")
    assert "*, b" in failure.value.hint


def test_two_that_change_a_quota_at_once_lose_neither_change(catalog: SqliteCatalog) -> None:
    url = catalog.url.removeprefix("sqlite:///")

    def change(number: int) -> None:
        own = SqliteCatalog(Path(url))
        set_quota(own, "a", {("cache", "staging")[number]: number + 1})
        own.close()

    run_together(2, change)
    quota = quota_of(catalog, "a")
    assert (quota.cache_bytes, quota.staging_bytes) == (1, 2)


@pytest.mark.parametrize("namespace", ["", "A", "a/b", "a" * 64, "-a", "**", "a\n"])
def test_what_can_name_no_namespace_gets_no_quota(catalog: SqliteCatalog, namespace: str) -> None:
    with pytest.raises(UsageError):
        set_quota(catalog, namespace, {"cache": 1})
    assert not read_quotas(catalog).own


@pytest.mark.parametrize("size", [-1, 2**63])
def test_an_impossible_size_is_no_quota(catalog: SqliteCatalog, size: int) -> None:
    with pytest.raises(UsageError, match="cannot be a quota"):
        set_quota(catalog, "a", {"cache": size})


@pytest.mark.parametrize("text", ["[]", "{", '{"version":2}', '{"version":1,"cache":"1"}', '{"version":1,"cache":-1}'])
def test_a_quota_that_cannot_be_understood_says_how_to_get_rid_of_it(catalog: SqliteCatalog, text: str) -> None:
    catalog.set_document(KIND, "a", text, old=None)
    for ask in (lambda: read_quotas(catalog), lambda: quota_of(catalog, "a")):
        with pytest.raises(CatalogError, match="namespace a cannot be understood") as failure:
            ask()
        assert "--remove" in failure.value.hint
    remove_quota(catalog, "a")
    assert quota_of(catalog, "a").cache_bytes is None


def test_capacities_are_those_of_bucket_volumes_by_namespace_and_damaged_records_are_named(
    catalog: SqliteCatalog, caplog: pytest.LogCaptureFixture
) -> None:
    def add(id: str, context: dict[str, str], size: int) -> None:
        text = json.dumps({"id": id, "name": id, "context": context, "capacity_bytes": size})
        assert catalog.set_document("csi-volume", id, text, old=None)

    add("1", {"bucket": "s3://x/", "namespace": "a"}, 5)
    add("2", {"bucket": "s3://y/", "namespace": "a"}, 6)
    add("3", {"dataset": "mask@1", "namespace": "a"}, 100)
    add("4", {"bucket": "s3://y/"}, 7)
    bucket = '"context": {"bucket": "s3://x/", "namespace": "a"}'
    odd = ["", "[]", "{}", '{"context": []}', f"{{{bucket}}}", f'{{{bucket}, "capacity_bytes": 1e999}}', "[" * 100_000]
    for number, text in enumerate(odd):
        assert catalog.set_document("csi-volume", f"odd-{number}", text, old=None)
    assert capacities(catalog) == {"a": 11}
    named = [record.getMessage().partition(" is damaged")[0] for record in caplog.records]
    assert named == [f"the catalog's record of the volume odd-{number}" for number in range(len(odd))]


def test_nodes_that_say_nothing_any_more_do_not_count_and_are_forgotten(
    catalog: SqliteCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = catalog.now_s()
    monkeypatch.setattr(catalog, "now_s", lambda: now - 3600)  # the catalog's clock counts, whatever a node's says
    report_use(catalog, NodeUse(node="gone", cache_bytes={"a": 2}))
    monkeypatch.setattr(catalog, "now_s", lambda: now)
    catalog.set_document(QUOTA_USES, "broken", "{}", old=None)
    report_use(catalog, NodeUse(node="here", cache_bytes={"a": 3}, staged_bytes={"b": 4}))
    (use,) = node_uses(catalog)
    assert (use.node, use.cache_bytes, use.staged_bytes) == ("here", {"a": 3}, {"b": 4})
    leases.forget_ended(catalog, now_s=now, cutoff_s=0)
    assert [key for key, _ in catalog.documents(QUOTA_USES)] == ["here"]
    monkeypatch.setattr(catalog, "now_s", lambda: now - 3600)  # the clock is set back: only then is "here" in the past
    assert list(node_uses(catalog)) == []
