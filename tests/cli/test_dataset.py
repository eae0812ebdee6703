"""`dsctl dataset`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Dsctl


@pytest.fixture
def mask(dsctl: Dsctl, bucket: Path) -> str:
    return str(dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1", "--json").json["id"])


def test_the_list_says_what_there_is_and_who_may_have_it(dsctl: Dsctl, mask: str) -> None:
    dsctl("dataset", "access", "mask", "--allow", "team-a")
    (found,) = dsctl("dataset", "list", "--json").json
    assert found.pop("latest_created_at").endswith("Z")
    assert found == {
        "name": "mask",
        "snapshots": 1,
        "latest": mask,
        "tags": {"v1": mask},
        "access": {"everybody": False, "allowed": ["team-a"], "denied": [], "listed": True},
    }
    header, line = dsctl("dataset", "list").out.splitlines()
    assert header.split()[:3] == ["NAME", "SNAPSHOTS", "LATEST"]
    assert line.split()[:3] == ["mask", "1", mask[:12]]
    assert line.endswith("v1    team-a")


def test_an_empty_catalog_says_how_to_begin(dsctl: Dsctl) -> None:
    assert dsctl("dataset", "list", "--json").json == []
    assert "dsctl snapshot create" in dsctl("dataset", "list").out


def test_access_is_shown_and_changed(dsctl: Dsctl, mask: str) -> None:
    shown = dsctl("dataset", "access", "mask", DATACACHE_ACCESS="none").out
    assert shown == "mask is open to no namespace (it has no list of its own; DATACACHE_ACCESS is none)\n"
    narrowed = dsctl("dataset", "access", "mask", "--allow", "team-b", "--allow", "team-a")
    assert narrowed.out == "mask is open to team-a, team-b\n"
    assert "was open to all namespaces" in narrowed.err
    assert dsctl("dataset", "access", "mask", "--deny", "team-a").out == "mask is open to team-b\n"
    value = dsctl("dataset", "access", "mask", "--all", "--deny", "guests", "--json").json
    assert value == {
        "name": "mask",
        "access": {"everybody": True, "allowed": [], "denied": ["guests"], "listed": True},
    }
    assert dsctl("dataset", "access", "mask", "--none").out == "mask is open to no namespace\n"


def test_a_data_set_that_is_not_there_is_an_error_that_says_what_is(dsctl: Dsctl, mask: str) -> None:
    for options in ([], ["--none"]):
        result = dsctl("dataset", "access", "nosuch", *options, "--json")
        assert result.code == 1
        assert result.error["type"] == "SnapshotNotFoundError"
        assert "mask" in result.error["hint"]


@pytest.mark.parametrize(
    "options",
    [("--all", "--none"), ("--all", "--allow", "a"), ("--none", "--deny", "a"), ("--allow", "Team_A")],
)
def test_options_that_cannot_be_meant_are_refused(dsctl: Dsctl, options: tuple[str, ...]) -> None:
    assert dsctl("dataset", "access", "mask", *options).code == 2


def test_names_are_completed(dsctl: Dsctl, mask: str) -> None:
    completed = dsctl(_DSCTL_COMPLETE="bash_complete", COMP_WORDS="dsctl dataset access m", COMP_CWORD="3")
    assert "mask" in completed.out
