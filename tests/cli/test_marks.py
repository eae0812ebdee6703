"""`dsctl marks` as a user meets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from datacache import api
from datacache.settings import load_settings
from dataset_cli.demo.faces import draw_faces
from tests.cli.conftest import Dsctl

Mark = Callable[[int, str, bool], None]
PATH = "JPEGImages/00000{}.jpg"


@pytest.fixture
def mark(tmp_path: Path, dsctl: Dsctl) -> Mark:
    """Marks the newest version of `faces`, ten drawn faces, with a bird."""
    draw_faces(tmp_path / "faces", count=10)
    assert dsctl("snapshot", "create", "faces", "--from", tmp_path / "faces", "--tag", "v1").code == 0

    def marked(number: int, author: str, done: bool) -> None:
        settings = load_settings()
        with api.open_annotations("faces", processes=1, settings=settings) as (snapshot, table):
            row = table.row(PATH.format(number))
        assert row is not None
        catalog = api.open_catalog(settings)
        birds = [api.MarkedObject(-1, "bird", 1, 1, 9, 9)]
        api.save_draft(catalog, row, snapshot.record, birds, author=author, rev="", done=done)
        catalog.close()

    return marked


def test_drafts_are_listed_with_author_and_state_and_committed(mark: Mark, dsctl: Dsctl, tmp_path: Path) -> None:
    assert "Nobody has marked anything in faces" in dsctl("marks", "faces").out
    for number, author, done in ((1, "ann", True), (2, "bob", False), (3, "ann", True), (4, "bob", True)):
        mark(number, author, done)
    listed = dsctl("marks", "faces@v1")
    assert (listed.code, listed.err) == (0, "")
    assert [line.split()[:2] for line in listed.out.splitlines()[1:]] == [
        ["ann", "done"],
        ["bob", "not"],
        ["ann", "done"],
        ["bob", "done"],
    ]
    found = dsctl("marks", "faces", "--json").json
    assert [(each["author"], each["drafts"], each["done"]) for each in found["authors"]] == [
        ("ann", 2, 2),
        ("bob", 2, 1),
    ]
    assert [each["path"] for each in dsctl("marks", "faces", "--author", "bob", "--json").json["drafts"]] == [
        PATH.format(2),
        PATH.format(4),
    ]
    report = tmp_path / "report.json"
    done = dsctl("marks", "faces", "--commit", "-m", "birds", "--tag", "v2", "--author", "ann", "--report", report)
    assert (done.code, done.err) == (0, "")
    assert "2 images marked" in done.out
    assert f"left, another author: {PATH.format(2)} (bob)" in done.out
    assert report.exists()
    assert "birds" in dsctl("log", "faces").out
    rest = dsctl("marks", "faces", "--commit", "--unfinished", "--json").json
    assert (rest["images"], rest["left"]) == (2, [])
    assert dsctl("query", "faces", "--label", "bird", "--json").json["matches"] == 4
    again = dsctl("marks", "faces", "--commit", "--json").json
    assert (again["snapshot"], again["images"]) == (None, 0)


def test_what_a_commit_cannot_do_is_told_before_it_begins(mark: Mark, dsctl: Dsctl) -> None:
    mark(1, "ann", True)
    assert dsctl("marks", "faces", "-m", "birds").code == 2
    assert dsctl("marks", "faces", "--commit").code == 0
    older = dsctl("marks", "faces@v1", "--commit")
    assert older.code == 2
    assert "not the newest version" in older.err
    assert dsctl("marks", "nothing").code == 1
