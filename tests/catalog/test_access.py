"""Who may have a data set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from datacache.catalog.access import Access, access_of, check_access, open_to, set_access
from datacache.catalog.sqlite import SqliteCatalog
from datacache.core.errors import AccessDeniedError, CatalogError, SnapshotNotFoundError, UsageError
from datacache.testing.catalog import a_record, run_together


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqliteCatalog]:
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    catalog.commit(a_record("mask"), tags=["secret-tag"])
    yield catalog
    catalog.close()


def allowed(catalog: SqliteCatalog, namespace: str, *, dataset: str = "mask", default: str = "none") -> bool:
    try:
        check_access(catalog, dataset, namespace, default=default)
    except AccessDeniedError:
        return False
    return True


def test_without_a_list_the_setting_decides(catalog: SqliteCatalog) -> None:
    assert allowed(catalog, "team-a", default="all")
    assert not allowed(catalog, "team-a", default="none")
    assert not access_of(catalog, "mask", default="all").listed


def test_a_list_decides_whatever_the_setting_says(catalog: SqliteCatalog) -> None:
    set_access(catalog, "mask", allow=["team-a", "team-b"])
    for default in ("all", "none"):
        assert allowed(catalog, "team-a", default=default)
        assert not allowed(catalog, "team-c", default=default)
    assert set_access(catalog, "mask", deny=["team-a", "team-c"]) == Access(everybody=False, allowed=("team-b",))
    assert set_access(catalog, "mask", deny=["team-b"]) == Access(everybody=False)
    assert not allowed(catalog, "team-b", default="all")


def test_to_all_but_some_and_back(catalog: SqliteCatalog) -> None:
    set_access(catalog, "mask", allow=["team-a"])
    assert set_access(catalog, "mask", everybody=True, deny=["b", "a"]) == Access(everybody=True, denied=("a", "b"))
    assert allowed(catalog, "c")
    assert not allowed(catalog, "a", default="all")
    assert set_access(catalog, "mask", allow=["a", "c"]) == Access(everybody=True, denied=("b",))
    assert set_access(catalog, "mask", everybody=False) == Access(everybody=False)
    assert not allowed(catalog, "c", default="all")


def test_one_that_shuts_somebody_out_is_not_open_to_whoever_is_not_known(catalog: SqliteCatalog) -> None:
    assert access_of(catalog, "mask", default="all").without_exception
    assert not set_access(catalog, "mask", deny=["guests"]).without_exception
    assert set_access(catalog, "mask", allow=["guests"]).without_exception
    assert not set_access(catalog, "mask", allow=["guests"]).without_exception


def test_who_may_not_have_it_hears_how_to_get_it_and_nothing_else(catalog: SqliteCatalog) -> None:
    said = []
    for name in ("mask", "nosuch"):
        with pytest.raises(AccessDeniedError) as caught:
            check_access(catalog, name, "team-b", default="none")
        assert "secret-tag" not in caught.value.message + caught.value.hint
        said.append((caught.value.message.replace(name, "X"), caught.value.hint.replace(name, "X")))
    assert said[0] == said[1]  # whether there is such a data set is not told either
    assert said[0][0] == "data set X is not open to namespace team-b"
    assert "dsctl dataset access X --allow team-b" in said[0][1]


def test_a_namespace_is_shown_what_is_open_to_it(catalog: SqliteCatalog) -> None:
    for number in range(3):
        catalog.commit(a_record(f"d{number}"))
    set_access(catalog, "d0", allow=["team-a"])
    set_access(catalog, "d1", allow=["team-b"])
    assert open_to(catalog, "team-a", default="none") == ["d0"]
    assert open_to(catalog, "team-a", default="all") == ["d0", "d2", "mask"]


def test_a_list_stays_when_the_data_set_goes_and_comes_back(catalog: SqliteCatalog) -> None:
    set_access(catalog, "mask", allow=["team-a"])
    catalog.remove_snapshot("mask", a_record("mask").id)
    assert not allowed(catalog, "team-b", default="all")
    set_access(catalog, "mask", allow=["team-c"])
    catalog.commit(a_record("mask", 2))
    assert access_of(catalog, "mask", default="all") == Access(everybody=False, allowed=("team-a", "team-c"))


def test_a_data_set_that_is_not_there_gets_no_list(catalog: SqliteCatalog) -> None:
    with pytest.raises(SnapshotNotFoundError) as caught:
        set_access(catalog, "nosuch", allow=["team-a"])
    assert "mask" in caught.value.hint
    assert catalog.documents("access") == []


@pytest.mark.parametrize("name", ["", "Team", "a_b", "-a", "a-", "a.b", "a" * 64, "ä", "a\n"])
def test_what_is_no_namespace_is_refused(catalog: SqliteCatalog, name: str) -> None:
    with pytest.raises(UsageError):
        set_access(catalog, "mask", allow=[name])
    with pytest.raises(UsageError):
        check_access(catalog, "mask", name, default="all")


def test_a_list_that_cannot_be_understood_opens_nothing(catalog: SqliteCatalog) -> None:
    for text in ("", "{}", "[]", '{"version": 2, "everybody": true, "allowed": [], "denied": []}'):
        catalog.set_document("access", "mask", text, old=catalog.document("access", "mask"))
        with pytest.raises(CatalogError, match="cannot be understood"):
            check_access(catalog, "mask", "team-a", default="all")


def test_processes_that_change_a_list_at_once_lose_nothing(catalog: SqliteCatalog) -> None:
    def work(process: int) -> None:
        own = SqliteCatalog(catalog.path)
        for number in range(10):
            set_access(own, "mask", allow=[f"n{process}-{number}"])

    run_together(4, work)
    assert len(access_of(catalog, "mask", default="all").allowed) == 40
