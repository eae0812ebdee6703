"""Test what a conflict is, and what the loser is called."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from datacache.store.base import ObjectInfo
from datacache.store.bucket import LiveObject
from datacache.writeback.conflicts import KEPT, ConflictLog, Standing, conflict_key, is_conflict_copy, standing
from datacache.writeback.model import Conflict
from tests.promises import promise

AT = 1_700_000_000.5  # 2023-11-14 22:13:20 UTC


def named(key: str, host: str = "node-7", taken: tuple[str, ...] = ()) -> str:
    return conflict_key(key, AT, host, lambda name: name in taken)


@promise("The suffix of a conflict lies behind the extension")
def test_the_loser_lies_beside_the_winner_with_time_and_host_behind_its_extension() -> None:
    assert named("runs/model.pt") == "runs/model.pt.conflict-20231114T221320Z-node-7"
    assert named("model.pt") == "model.pt.conflict-20231114T221320Z-node-7"
    assert named("runs/") == "runs.conflict-20231114T221320Z-node-7/"


@promise("The suffix of a conflict lies behind the extension")
def test_a_name_that_is_taken_gets_a_number() -> None:
    first = named("a")
    assert named("a", taken=(first,)) == f"{first}-2"
    assert named("a", taken=(first, f"{first}-2")) == f"{first}-3"


@promise("A conflict copy whose name is taken is tried again later, or gets another name of the original's")
@pytest.mark.parametrize("original", ["runs/model.pt", "model.pt", "a.conflict-b", ".conflict-20231114T221320Z-node-7"])
def test_a_conflict_of_a_copy_has_the_original_name(original: str) -> None:
    copy = named(original, host="old.host")
    assert (is_conflict_copy(original), is_conflict_copy(copy), is_conflict_copy(f"{copy}/")) == (False, True, True)
    assert named(copy) == named(original)
    assert named(f"{copy}/") == named(f"{original}/")
    assert named(f"{copy}/inside") == f"{copy}/inside.conflict-20231114T221320Z-node-7"


@promise("The suffix of a conflict lies behind the extension")
@pytest.mark.parametrize("name", ["x" * 255, "ä" * 127, "\U0001f600" * 63, "\udcff" * 255])
def test_a_name_is_never_longer_than_a_files_can_be_and_no_character_is_cut(name: str) -> None:
    found = named(f"folder/{name}").partition("/")[2]
    assert len(found.encode("utf-8", "surrogateescape")) <= 255
    assert name.startswith(found.partition(".conflict-")[0])


@pytest.mark.parametrize(("host", "said"), [("a/b c", "a-b-c"), ("", "unknown"), ("n" * 200, "n" * 63)])
def test_a_host_name_makes_no_odd_keys(host: str, said: str) -> None:
    assert named("a", host) == f"a.conflict-20231114T221320Z-{said}"


@pytest.mark.parametrize(
    ("etag", "base", "ours", "expected"),
    [
        (None, "e1", None, Standing.FREE),
        (None, "", None, Standing.FREE),
        ("e1", "e1", None, Standing.EXPECTED),
        ("e1", "e1", 3, Standing.EXPECTED),
        ("e2", "e1", 5, Standing.SAME),
        ("e2", "", 5, Standing.SAME),
        ("e2", "e1", 4, Standing.EARLIER),
        ("e2", "e1", None, Standing.THEIRS),
        ("e2", "", None, Standing.THEIRS),
        ("", "", None, Standing.THEIRS),
        ("e2", "e1", 6, Standing.THEIRS),
    ],
)
def test_an_object_stands_to_version_5_as_its_etag_and_writer_say(
    etag: str | None, base: str, ours: int | None, expected: Standing
) -> None:
    found = LiveObject(ObjectInfo("k", 1, 0, etag), {}) if etag is not None else None
    assert standing(found, base=base, version=5, size_bytes=1, ours=ours) is expected


def test_an_object_of_fewer_bytes_is_not_the_version_whose_mark_it_has() -> None:
    found = LiveObject(ObjectInfo("k", 1, 0, "e2"), {})
    assert standing(found, base="e1", version=5, size_bytes=2, ours=5) is Standing.EARLIER
    assert standing(found, base="e1", version=5, size_bytes=None, ours=5) is Standing.SAME


@pytest.mark.parametrize("depth", range(1, 6))
@pytest.mark.parametrize("name", ["m", "m" * 200, "\u00e4" * 100])
def test_a_conflicts_key_is_never_longer_than_a_key_can_be(depth: int, name: str) -> None:
    folder = "/".join(["n" * 200] * depth)
    key = f"{folder}/{name}"
    found = conflict_key(key, AT, "h" * 63, lambda _: False, prefix="live/")
    above, _, last = found.rpartition("/")
    assert len(f"live/{found}".encode()) <= 1024
    assert len(last.encode()) <= 255
    assert f"{folder}/".startswith(f"{above}/")
    kept = last.partition(".conflict-")[0]
    assert name.startswith(kept)
    assert kept == name or len(kept) >= 8


def test_conflicts_are_read_again_and_the_oldest_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "conflicts.jsonl"
    conflicts = [Conflict(f"\u00fc\udcff{number}", "kept", 1.5, "why") for number in range(1, 2 * KEPT)]
    log = ConflictLog(path)
    for conflict in conflicts:
        log.append(conflict)
    for _ in range(2):
        again = ConflictLog(path)
        assert (again.unsettled(), again.count) == (conflicts[-KEPT:], len(conflicts))
    with path.open("a") as file:
        file.write('\n[9999, "cut o')
    again.append(conflicts[0])
    found = ConflictLog(path)
    assert (found.unsettled()[-1], found.count) == (conflicts[0], len(conflicts) + 1)


@promise("`status` and `flush` tell of a conflict until its copy is deleted or renamed")
def test_conflicts_that_somebody_has_seen_to_are_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "conflicts.jsonl"
    log = ConflictLog(path)
    for name in "abc":
        log.append(Conflict(name, f"{name}.conflict", 1.5, "why"))
    log.settle("b.conflict")
    for _ in range(2):
        again = ConflictLog(path)
        assert ([conflict.key for conflict in again.unsettled()], again.count) == (["a", "c"], 3)
    for name in "ac":
        again.settle(f"{name}.conflict")
    assert ConflictLog(path).unsettled() == []
    assert path.stat().st_size == 0, "an area that has nothing to tell goes with its mount"


def test_all_conflicts_that_were_seen_to_are_forgotten_however_many_there_were(tmp_path: Path) -> None:
    path = tmp_path / "conflicts.jsonl"
    log = ConflictLog(path)
    for number in range(KEPT + 50):
        log.append(Conflict(f"{number}", f"{number}.conflict", 1.5, "why"))
    log.append(Conflict("left", "left.conflict", 1.5, "why"))
    for number in range(KEPT + 50):
        log.settle(f"{number}.conflict")
    assert [conflict.key for conflict in log.unsettled()] == ["left"]
    again = ConflictLog(path)
    assert ([conflict.key for conflict in again.unsettled()], again.count) == (["left"], KEPT + 51)


@promise("`status` and `flush` tell of a conflict until its copy is deleted or renamed")
def test_a_conflict_of_which_nothing_was_kept_is_told_for_a_day(tmp_path: Path) -> None:
    log = ConflictLog(tmp_path / "conflicts.jsonl")
    log.append(Conflict("old", "", time.time() - 25 * 3600, "why"))
    log.append(Conflict("new", "", time.time() - 23 * 3600, "why"))
    assert [conflict.key for conflict in log.unsettled()] == ["new"]
