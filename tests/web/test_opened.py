"""Snapshots stay open while somebody reads of them, and give way to others; many annotations are read apart."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from datacache import api
from datacache.core.errors import SnapshotClosedError
from datacache.settings import Settings
from datacache.web import opened
from datacache.web.opened import Opening, OpenSnapshots, Shown
from datacache.web.reading import ReadingApart
from tests.web.conftest import make


@pytest.fixture
def snapshots(settings: Settings) -> Iterator[OpenSnapshots]:
    found = OpenSnapshots(settings)
    yield found
    found.close()


def get(snapshots: OpenSnapshots, record: api.SnapshotRecord) -> Shown:
    """Ask as a browser does that is told to come again."""
    while True:
        try:
            return snapshots.get(record)
        except Opening:
            pass


def made(settings: Settings, folder: Path, name: str) -> api.SnapshotRecord:
    make(settings, folder / name, name, {b"a.jpg": [("cat", [1, 1, 9, 9])], b"b.jpg": []})
    return api.list_snapshots(name, settings)[-1]


def test_a_snapshot_that_gives_way_is_closed_when_its_last_reader_is_done(
    snapshots: OpenSnapshots, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "_MOST_OPEN", 1)
    first, second = made(settings, tmp_path, "first"), made(settings, tmp_path, "second")
    shown, another = get(snapshots, first), get(snapshots, first)
    snapshot = shown.snapshot
    get(snapshots, second)
    while len(snapshots._entries) > 1:  # a thread makes room
        pass
    again = get(snapshots, first)
    assert again is not shown
    del shown
    assert snapshot.read("a.jpg") == again.snapshot.read("a.jpg")
    assert another.browser.table.row("a.jpg") == again.browser.table.row("a.jpg")
    del another
    snapshots.close()
    snapshots._threads.shutdown()  # they hold what they prepare
    with pytest.raises(SnapshotClosedError):
        snapshot.read("a.jpg")


def test_what_is_open_is_closed_with_all(snapshots: OpenSnapshots, settings: Settings, tmp_path: Path) -> None:
    shown = get(snapshots, made(settings, tmp_path, "first"))
    snapshots.close()
    with pytest.raises(SnapshotClosedError):
        shown.snapshot.read("a.jpg")


def test_annotations_of_many_images_are_read_by_a_process_of_their_own(
    snapshots: OpenSnapshots, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "_FEW_FILES", 0)
    for made_here in ("conversion.index.Annotations._build", "annotations.table.arrays.ArrayStore.put"):
        monkeypatch.setattr(f"datacache.{made_here}", pytest.fail)
    record = made(settings, tmp_path, "first")
    shown = get(snapshots, record)
    assert shown.browser.table.images == 2
    shown.browser.prepare()
    assert api.has_annotations(record.ref, settings=settings)


def test_a_reading_is_given_up_when_the_server_ends(
    snapshots: OpenSnapshots, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[ReadingApart] = []

    def follow(reading: ReadingApart, _progress: object) -> None:
        running.append(reading)
        snapshots.close()

    monkeypatch.setattr(ReadingApart, "follow", follow)
    monkeypatch.setattr(opened, "_FEW_FILES", 0)
    monkeypatch.setattr(opened, "_WAIT_S", 60)
    with pytest.raises(CancelledError):
        snapshots.get(made(settings, tmp_path, "first"))
    assert running[0]._process.returncode == -signal.SIGKILL
