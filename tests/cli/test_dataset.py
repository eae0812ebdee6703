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
        "access": {"everybody": False, "allowed": ["team-a"], "denied": [], "listed": True, "inherited_from": []},
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
        "access": {"everybody": True, "allowed": [], "denied": ["guests"], "listed": True, "inherited_from": []},
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


def test_who_wants_to_remove_a_data_set_is_told_how(dsctl: Dsctl) -> None:
    done = dsctl("dataset", "rm", "mask", "--yes")
    assert done.code == 2
    assert "dsctl snapshot list mask. Remove each: dsctl snapshot rm mask@ID --all-tags" in done.err


def test_status_counts_data_sets_in_words_and_says_that_the_daemon_starts_by_itself(dsctl: Dsctl, mask: str) -> None:
    said = dsctl("status").out
    assert ": 1 dataset\n" in said
    assert "daemon   not running; it starts when it is needed\n" in said


def test_a_mistyped_url_for_a_name_that_is_there_is_asked_about(dsctl: Dsctl, mask: str, tmp_path: Path) -> None:
    done = dsctl("snapshot", "create", "mask", "--from", tmp_path / "mistyped")
    assert done.code == 1
    assert "Is it what you meant, and no mistyped URL?" in done.err
