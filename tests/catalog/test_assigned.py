"""Which resource of Kubernetes has a data set: one at a time, also of several that want it at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from datacache.catalog.access import Access, access_of, declare_access, set_access
from datacache.catalog.assigned import assign, assigned_to
from datacache.catalog.base import Catalog
from datacache.catalog.mongo.catalog import MongoCatalog
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import UsageError
from tests.conformance.catalog import run_together
from tests.servers import Mongod


@pytest.fixture(params=["sqlite", "mongodb"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Catalog]:
    if request.param == "sqlite":
        opened: Catalog = SqliteCatalog(tmp_path / "catalog.db")
    else:
        mongod: Mongod = request.getfixturevalue("mongod")
        opened = MongoCatalog(mongod.database_url())
    yield opened
    opened.close()


def test_of_many_that_want_a_free_name_at_once_one_gets_it(catalog: Catalog, tmp_path: Path) -> None:
    def want(number: int) -> None:
        if assign(catalog, "mask", f"team-{number}/faces", old=""):
            (tmp_path / f"team-{number}").touch()

    run_together(6, want)
    [winner] = tmp_path.glob("team-*")
    assert assigned_to(catalog, "mask") == f"{winner.name}/faces"


def test_a_name_is_given_on_and_taken_away(catalog: Catalog) -> None:
    assert assign(catalog, "mask", "team-a/faces")
    assert assign(catalog, "mask", "team-a/faces", old="")
    assert not assign(catalog, "mask", "team-b/faces", old="")
    assert assign(catalog, "mask", "team-b/faces.v2", old="team-a/faces")
    assert assign(catalog, "mask", "")
    assert assign(catalog, "mask", "")
    assert assigned_to(catalog, "mask") == ""


@pytest.mark.parametrize(
    "wrong", ["faces", "a/b/c", "Team/faces", "team-a/", "/faces", "team-a/faces\n", "team_a/faces"]
)
def test_what_cannot_be_a_resource_is_refused(catalog: Catalog, wrong: str) -> None:
    with pytest.raises(UsageError, match="cannot be a resource"):
        assign(catalog, "mask", wrong)


def test_a_list_can_be_declared_before_there_is_a_data_set_and_replaces_what_there_was(catalog: Catalog) -> None:
    declare_access(catalog, "mask", Access(everybody=False, allowed=("team-a", "team-b")))
    assert str(access_of(catalog, "mask", default="all")) == "team-a, team-b"
    set_access(catalog, "mask", allow=["team-c"])
    declare_access(catalog, "mask", Access(everybody=True, denied=("guests",)))
    assert str(access_of(catalog, "mask", default="none")) == "all namespaces but guests"
    with pytest.raises(UsageError):
        declare_access(catalog, "mask", Access(everybody=False, allowed=("Team A",)))
    assert str(access_of(catalog, "mask", default="none")) == "all namespaces but guests"
