"""The crash test's writer and checker, on a plain directory: a faithful one passes, and what is planted is found."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fuse_mount.crash.manifest import Ledger, content, problems_of
from tests.fuse_mount.crash.rig import Writers, files_below


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Writers, dict[str, bytes]]]:
    """Yield what two writers left after some hundred operations, and they themselves."""
    folder, manifests = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("manifests")
    with Writers(folder, manifests, 2, seed=1, plain=True) as writers:
        paths = [manifests / "w0.jsonl", manifests / "w1.jsonl"]
        while min(path.read_text().count("\n") for path in paths) < 600:
            time.sleep(0.02)
        writers.finish()
        yield writers, files_below(folder)


def test_a_faithful_directory_has_no_problems(written: tuple[Writers, dict[str, bytes]]) -> None:
    writers, found = written
    assert len(found) > 10
    assert writers.problems(found) == []


def lose(found: dict[str, bytes], path: str) -> None:
    del found[path]


def tear(found: dict[str, bytes], path: str) -> None:
    found[path] = found[path][:-1]


def flip(found: dict[str, bytes], path: str) -> None:
    found[path] = found[path][:-1] + bytes([found[path][-1] ^ 1])


def grow(found: dict[str, bytes], path: str) -> None:
    found[path] += b"x"


def leave_a_conflict(found: dict[str, bytes], path: str) -> None:
    found[f"{path}.conflict-20260101T000000Z-host"] = found[path]


@pytest.mark.parametrize("spoil", [lose, tear, flip, grow, leave_a_conflict])
def test_every_single_spoiled_file_is_found(
    written: tuple[Writers, dict[str, bytes]], spoil: Callable[[dict[str, bytes], str], None]
) -> None:
    writers, found = written
    for path in random.Random(1).sample(sorted(found), 12):
        spoiled = dict(found)
        spoil(spoiled, path)
        assert writers.problems(spoiled), path


def test_a_deleted_file_that_is_there_again_is_found(written: tuple[Writers, dict[str, bytes]]) -> None:
    writers, found = written
    ledger = Ledger.read(writers._manifests["w0"])
    deleted = [path for path, state in ledger.states.items() if state is None]
    assert deleted
    for path in deleted:
        assert writers.problems(found | {path: b""}), path


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger.create(tmp_path / "manifest")
    yield ledger
    assert Ledger.read(tmp_path / "manifest").states == ledger.states
    assert ledger.file is not None
    os.close(ledger.file)


def test_an_operation_nobody_heard_the_end_of_was_done_or_not(ledger: Ledger) -> None:
    ledger.done(ledger.intend({"a": "one:10"}))
    ledger.intend({"a": "two:20"})
    assert not problems_of(ledger, {"a": content("one:10")})
    assert not problems_of(ledger, {"a": content("two:20")})
    assert problems_of(ledger, {"a": content("two:20")[:10]})
    assert problems_of(ledger, {})


def test_a_rename_nobody_heard_the_end_of_loses_nothing(ledger: Ledger) -> None:
    ledger.done(ledger.intend({"a": "one:10"}))
    ledger.done(ledger.intend({"b": "two:20"}))
    ledger.intend({"a": None, "b": "one:10"})
    assert not problems_of(ledger, {"a": content("one:10"), "b": content("two:20")})
    assert not problems_of(ledger, {"b": content("one:10")})
    assert problems_of(ledger, {"b": content("two:20")})
    assert problems_of(ledger, {"a": content("one:10"), "b": content("one:10")})


def test_a_log_has_what_was_acknowledged_and_then_only_what_was_meant(ledger: Ledger) -> None:
    ledger.done(ledger.intend_append("log", 0, "one:10"))
    ledger.acknowledge_log("log")
    ledger.intend_append("log", 10, "two:10")
    whole = content("one:10") + content("two:10")
    for size in range(21):
        assert bool(problems_of(ledger, {"log": whole[:size]})) == (size < 10), size
    assert problems_of(ledger, {})
    assert problems_of(ledger, {"log": content("one:10") + bytes(10)})
    assert problems_of(ledger, {"log": whole + b"x"})
