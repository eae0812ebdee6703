"""The journal of an import: whole records survive everything, others count for nothing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from datacache.core.errors import CacheError, ImportFailedError
from datacache.imports.fetching import ordered
from datacache.imports.journal import Done, Journal
from datacache.manifest.model import Entry

IDENTITY = {"dataset": "faces", "content": "x"}
ENTRIES = [
    Entry(b"a", 1, 5, "etag", "version", 0, b"key"),
    Entry("é\n\t".encode(), 2**40, -1, "", "", 3, "k\udce9".encode("utf-8", "surrogateescape")),
    Entry(b"b", 0, 0),
]


def write(folder: Path) -> Path:
    journal = Journal(folder, IDENTITY)
    for entry in ENTRIES:
        journal.add(f"from {entry.size_bytes}", entry, int(time.time()))
    journal.close()
    [path] = folder.iterdir()
    return path


def read(folder: Path, identity: dict[str, str] = IDENTITY) -> list[Done]:
    journal = Journal(folder, identity)
    with journal.done() as done:
        records = list({record.path: record for record in done.sorted()}.values())
    journal.close()
    return records


def test_records_come_back_by_path(tmp_path: Path) -> None:
    write(tmp_path)
    records = read(tmp_path)
    assert [record.entry for record in records] == sorted(ENTRIES)
    assert [record.origin for record in records] == [f"from {entry.size_bytes}" for entry in sorted(ENTRIES)]
    assert all(abs(time.time() - record.at_s) < 3600 for record in records)
    assert read(tmp_path, {"dataset": "faces", "content": "y"}) == []


def test_of_two_records_of_a_path_the_newer_counts(tmp_path: Path) -> None:
    write(tmp_path)
    journal = Journal(tmp_path, IDENTITY)
    journal.done().close()
    journal.add("again", ENTRIES[0]._replace(size_bytes=7), int(time.time()))
    journal.close()
    assert (b"a", "again") in [(record.path, record.origin) for record in read(tmp_path)]
    assert len(read(tmp_path)) == 3


def test_wherever_it_is_torn_whole_records_stay_and_more_can_be_added(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 10]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        kept = sum(end <= length for end in ends[1:]) if length >= ends[0] else 0
        assert len(read(tmp_path)) == kept, length
        journal = Journal(tmp_path, IDENTITY)
        journal.done().close()
        journal.add("new", Entry(b"z", 1, 1), 1)
        journal.close()
        assert len(read(tmp_path)) == kept + 1, length


def test_a_flipped_bit_ends_what_is_believed(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for at in range(first, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert {record.entry for record in read(tmp_path)} < set(ENTRIES)


def test_another_process_is_kept_out_until_it_is_closed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, IDENTITY)
    with pytest.raises(ImportFailedError):
        Journal(tmp_path, IDENTITY)
    Journal(tmp_path, IDENTITY | {"content": "y"}).close()
    journal.remove()
    Journal(tmp_path, IDENTITY).close()  # another file now
    journal.close()
    journal.add("late", ENTRIES[0], 1)  # a thread that was left behind: nothing happens
    assert read(tmp_path) == []


def test_journals_nobody_goes_on_with_are_forgotten(tmp_path: Path) -> None:
    path = write(tmp_path)
    os.utime(path, (time.time() - 40 * 86400, time.time() - 40 * 86400))
    Journal(tmp_path, {"content": "other"}).close()
    assert not path.exists()


def test_a_home_that_cannot_be_written_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError, match="cannot be written"):
        Journal(tmp_path / "file" / "imports", IDENTITY)


# --- threads -------------------------------------------------------------------------------------------------------


def test_results_are_in_order_however_long_each_takes() -> None:
    first = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert first.wait(60)
        elif number == 40:
            first.set()
        return number * number

    assert list(ordered(work, range(200), threads=4)) == [number * number for number in range(200)]


def test_items_are_taken_no_further_ahead_than_is_promised() -> None:
    go, taken = threading.Event(), []

    def items() -> range:
        return range(1000)

    def work(number: int) -> int:
        go.wait(60)
        return number

    def watched() -> object:
        for number in items():
            taken.append(number)
            yield number

    results = ordered(work, watched(), threads=2, meanwhile=go.set)  # type: ignore[arg-type]
    assert next(results) == 0
    assert len(taken) <= 2 * 16 + 1
    assert list(results) == list(range(1, 1000))


def test_an_error_is_raised_in_its_turn_and_ends_it() -> None:
    def work(number: int) -> int:
        if number == 5:
            raise KeyError(number)
        return number

    results = ordered(work, range(100), threads=3)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError):
        next(results)
    assert list(results) == []
