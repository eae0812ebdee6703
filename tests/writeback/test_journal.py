"""The journal as it is used: groups, order, reading, cleaning, and what is damaged."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from datacache.core.errors import StagingError
from datacache.writeback.journal import segments as journal_segments
from datacache.writeback.journal.journal import Change, Journal
from tests.promises import promise


def small(folder: Path, segment_bytes: int = 4096) -> Journal:
    return Journal(folder, segment_bytes=segment_bytes, ballast_bytes=0)


def state(journal: Journal) -> dict[str, tuple[bytes, bytes]]:
    found = {}
    for key, header, size in journal.records():
        found[key] = header, journal.read(key)
        assert len(found[key][1]) == size
    return found


def reopened(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    journal = small(folder)
    try:
        return state(journal)
    finally:
        journal.close()


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


def test_what_was_appended_is_read_before_and_after_it_is_durable_and_after_a_new_start(tmp_path: Path) -> None:
    journal = small(tmp_path / "journal")
    ticket = journal.append([Change("a/b", b"head", memoryview(b"blob")), Change("é\udcff", b"")])
    assert journal.read("a/b") == b"blob"
    assert list(journal.records()) == [("a/b", b"head", 4), ("é\udcff", b"", 0)]
    journal.commit(ticket)
    assert journal.read("a/b") == b"blob"
    with pytest.raises(KeyError):
        journal.read("a")
    journal.close()
    assert reopened(tmp_path / "journal") == {"a/b": (b"head", b"blob"), "é\udcff": (b"", b"")}


def test_a_group_is_refused_as_a_whole(tmp_path: Path) -> None:
    journal = small(tmp_path)
    with pytest.raises(UnicodeEncodeError):
        journal.append([Change("a", b"1"), Change("\ud800", b"2")])
    assert not list(journal.records())
    journal.close()


def test_a_dropped_key_is_gone_and_may_come_back(tmp_path: Path) -> None:
    journal = small(tmp_path)
    journal.append([Change("a", b"1", b"x"), Change("b", b"2")])
    journal.append([Change("a", None), Change("c", None)])
    with pytest.raises(KeyError):
        journal.read("a")
    journal.commit()
    assert list(journal.records()) == [("b", b"2", 0)]
    journal.commit(journal.append([Change("a", b"3")]))
    journal.close()
    assert list(reopened(tmp_path)) == ["b", "a"]


def test_records_come_in_the_order_they_were_last_written_whatever_cleaning_moved(tmp_path: Path) -> None:
    journal = small(tmp_path / "journal")
    keys = [f"key {number}" for number in range(300)]
    for key in keys:
        journal.append([Change(key, b"old", b"x" * 600)])
    order = random.Random(3).sample(keys, len(keys))
    for key in order:
        journal.append([Change(key, b"new", b"y" * 600)])
    for turn in range(20):  # now and then half of the cold keys are at the end of the log, before the others
        for number in range(20):
            journal.commit(journal.append([Change("busy", b"n", b"%d" % number * 2000)]))
        assert [key for key, _, _ in journal.records()] == [*order, "busy"]
        shutil.copytree(tmp_path / "journal", tmp_path / str(turn))
        assert list(reopened(tmp_path / str(turn))) == [*order, "busy"]
    assert segments(tmp_path / "journal")[0].name != "00000001.log"
    journal.close()


def test_a_header_may_be_of_any_length(tmp_path: Path) -> None:
    journal = small(tmp_path)
    journal.append([Change("long", b"h" * 5000, b"b" * 70000), Change("k" * 3000, b"h" * 10)])
    journal.commit()
    assert [(key[:4], len(header), size) for key, header, size in journal.records()] == [
        ("long", 5000, 70000),
        ("kkkk", 10, 0),
    ]
    journal.close()
    assert reopened(tmp_path)["long"] == (b"h" * 5000, b"b" * 70000)


@promise("The journal stays within a small multiple of what it holds")
def test_the_log_stays_within_a_small_multiple_of_what_is_live_and_drops_are_not_forgotten(tmp_path: Path) -> None:
    journal = small(tmp_path)
    draw = random.Random(5)
    model: dict[str, tuple[bytes, bytes]] = {}
    for number in range(6000):
        key = str(draw.randrange(60))
        if draw.random() < 0.3:
            model.pop(key, None)
            ticket = journal.append([Change(key, None)])
        else:
            model[key] = b"%d" % number, draw.randbytes(draw.randrange(400))
            ticket = journal.append([Change(key, *model[key])])
        if draw.random() < 0.5:
            journal.commit(ticket)
        if number % 2000 == 1999:
            assert state(journal) == model
    journal.commit()
    assert journal.size_bytes <= 4 * journal.live_bytes + 4 * 4096
    journal.close()
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= journal.size_bytes
    assert reopened(tmp_path) == model


def test_what_is_all_dropped_leaves_little(tmp_path: Path) -> None:
    journal = small(tmp_path)
    for number in range(300):
        journal.append([Change(str(number), b"x", b"y" * 400)])
    journal.commit()
    for number in range(300):
        journal.commit(journal.append([Change(str(number), None)]))
    assert journal.live_bytes == 0
    assert journal.size_bytes < 3 * 4096
    journal.close()
    assert reopened(tmp_path) == {}


def test_many_starts_do_not_leave_many_segments(tmp_path: Path) -> None:
    for number in range(60):
        journal = Journal(tmp_path, ballast_bytes=0)
        journal.commit(journal.append([Change(str(number), b"x")]))
        journal.close()
    # Cleaning owes a little for each commit: what is due is done once the next mount has some work.
    journal = Journal(tmp_path, ballast_bytes=0)
    for _ in range(400):
        journal.commit(journal.append([Change("busy", b"x", b"y" * 100)]))
    journal.close()
    assert len(segments(tmp_path)) < 15
    assert list(reopened(tmp_path)) == [*map(str, range(60)), "busy"]


def test_threads_share_syncs_and_each_finds_its_own_durable(tmp_path: Path) -> None:
    journal = Journal(tmp_path, ballast_bytes=0)
    start = threading.Barrier(8)

    def work(who: int) -> None:
        start.wait()
        for number in range(50):
            journal.commit(journal.append([Change(f"{who}/{number}", b"h", b"x" * 1000)]))

    threads = [threading.Thread(target=work, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(journal.records())) == 400
    journal.close()
    (segment,) = journal_segments.open_segments(tmp_path)
    with segment.path.open("rb") as file:
        syncs = {head.synced for _, head, _ in journal_segments.read_frames(file, segment)}
    assert len(syncs) < 400, "every commit made a sync of its own"


def test_reading_goes_on_while_segments_are_cleaned_away(tmp_path: Path) -> None:
    journal = small(tmp_path)
    journal.commit(journal.append([Change("kept", b"h", b"k" * 1000)]))
    stop = threading.Event()
    wrong: list[object] = []

    def look() -> None:
        try:
            while not stop.is_set():
                if journal.read("kept") != b"k" * 1000:
                    wrong.append("other bytes")
        except (StagingError, KeyError) as exc:
            wrong.append(exc)

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(800):
        journal.commit(journal.append([Change("busy", b"h", bytes(500 + number))]))
    stop.set()
    thread.join()
    assert not wrong
    assert segments(tmp_path)[0].name > "00000010.log"
    journal.close()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def filled(folder: Path) -> None:
    journal = small(folder)
    for number in range(40):
        journal.commit(journal.append([Change(str(number), b"h", b"x" * 400)]))
    journal.close()
    assert len(segments(folder)) > 3


@promise("What a staging area holds is read back as written, or is an error that says where")
@pytest.mark.parametrize("offset", [3, 20, 60, 70, 100, 700, -1])
def test_damage_in_a_segment_that_is_not_the_newest_is_an_error_that_says_where(tmp_path: Path, offset: int) -> None:
    filled(tmp_path / "area" / "journal")
    path = segments(tmp_path / "area" / "journal")[1]
    flip(path, offset)
    with pytest.raises(StagingError) as caught:
        small(tmp_path / "area" / "journal")
    assert f"{path}, byte " in str(caught.value)
    assert f"move {tmp_path / 'area'} away" in caught.value.hint


def test_a_segment_that_is_cut_off_or_missing_in_the_middle_is_an_error(tmp_path: Path) -> None:
    filled(tmp_path)
    path = segments(tmp_path)[1]
    data = path.read_bytes()
    os.truncate(path, len(data) - 100)
    with pytest.raises(StagingError, match=r"00000002.log, byte \d+: group \d+ is broken or cut off"):
        small(tmp_path)
    path.unlink()
    with pytest.raises(StagingError, match=r"00000002.log, byte 0: the file is missing"):
        small(tmp_path)
    path.write_bytes(data)
    segments(tmp_path)[0].unlink()
    with pytest.raises(StagingError, match=r"00000001.log, byte 0: the file is missing"):
        small(tmp_path)


@promise("What a staging area holds is read back as written, or is an error that says where")
@pytest.mark.parametrize("groups", [3, 10])
def test_damage_to_what_was_durable_in_the_newest_segment_is_no_torn_tail(tmp_path: Path, groups: int) -> None:
    journal = small(tmp_path, 1 << 20)
    for number in range(groups):
        journal.commit(journal.append([Change(str(number), b"h", b"x" * 400)]))
    journal.close()
    flip(tmp_path / "00000001.log", 1000)
    with pytest.raises(StagingError, match=r"00000001.log, byte \d+: group 2 is broken, later ones are whole"):
        small(tmp_path)


def test_segments_of_another_journal_and_another_version_are_refused(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    filled(tmp_path / "b")
    (tmp_path / "b" / "00000002.log").replace(tmp_path / "a" / "00000002.log")
    with pytest.raises(StagingError, match="belongs to another journal"):
        small(tmp_path / "a")


def test_a_blob_that_was_damaged_since_is_not_returned(tmp_path: Path) -> None:
    journal = small(tmp_path)
    journal.commit(journal.append([Change("a", b"h", b"x" * 400)]))
    flip(tmp_path / "00000001.log", 300)
    with pytest.raises(StagingError, match=r"00000001.log, byte 104: not the record"):
        journal.read("a")
    journal.close()


def test_what_recycled_blocks_hold_is_not_taken_for_frames(tmp_path: Path) -> None:
    def start_again(*values: bytes) -> None:
        journal = small(tmp_path / "journal", 1 << 20)
        for value in values:
            journal.commit(journal.append([Change("a", value)]))
        journal.close()

    start_again(b"1")
    shutil.copytree(tmp_path / "journal", tmp_path / "before")
    start_again(b"2", b"lost")
    stale = (tmp_path / "journal" / "00000002.log").read_bytes()
    shutil.rmtree(tmp_path / "journal")
    (tmp_path / "before").rename(tmp_path / "journal")
    start_again(b"3")
    # The next group's number at the very offset where the next one is expected, in a file of the same name.
    path = tmp_path / "journal" / "00000002.log"
    whole = path.read_bytes()
    path.write_bytes(whole + stale[len(whole) :])
    assert reopened(tmp_path / "journal") == {"a": (b"3", b"")}


def test_left_overs_of_a_start_that_was_cut_off_are_removed(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "00000009.log.new").write_bytes(b"half")
    before = reopened(tmp_path)
    assert len(before) == 40
    assert not (tmp_path / "00000009.log.new").exists()


def test_a_closed_journal_says_so(tmp_path: Path) -> None:
    journal = small(tmp_path)
    journal.append([Change("a", b"1")])
    journal.close()
    journal.close()
    with pytest.raises(StagingError, match="closed"):
        journal.append([Change("a", b"1")])
    with pytest.raises(StagingError, match="closed"):
        journal.read("a")
    assert reopened(tmp_path) == {"a": (b"1", b"")}


_MEMORY = """
import re, sys
from pathlib import Path
from datacache.writeback.journal.journal import Change, Journal
def kib():
    status = Path("/proc/self/status").read_text()
    return [int(re.search(name + r":\\s+(\\d+)", status)[1]) for name in ("VmRSS", "VmHWM")]
before = kib()[0]
journal = Journal(Path(sys.argv[1]), ballast_bytes=0)
count = sum(1 for _ in journal.records())
now, peak = kib()
print(count, now - before, peak - before)
"""


@promise("The journal stays within a small multiple of what it holds")
def test_100_000_records_take_25_mb(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for start in range(0, 100_000, 1000):
        journal.append(
            [
                Change(f"runs/2024/experiment-12/checkpoints/part-{n:07d}.bin", b"h" * 150, b"")
                for n in range(start, start + 1000)
            ]
        )
    journal.commit()
    journal.close()
    done = subprocess.run([sys.executable, "-c", _MEMORY, tmp_path], check=True, capture_output=True, text=True)
    count, kept_kib, peak_kib = map(int, done.stdout.split())
    assert count == 100_000
    assert kept_kib < 25 << 10
    assert peak_kib < 40 << 10


def test_a_group_that_is_not_sealed_is_not_written_and_neither_is_what_comes_after_it(tmp_path):
    journal = Journal(tmp_path, ballast_bytes=0)
    first = journal.append([Change("a", b"1")])
    opened = journal.append([Change("b", b"2")], sealed=False)
    last = journal.append([Change("c", b"3")])
    for ticket in (first, opened, last, None):
        journal.commit(ticket)
    assert "b" in journal
    assert [key for key, _, _ in Journal(tmp_path, ballast_bytes=0).records()] == ["a"]
    journal.seal()
    journal.commit(opened)
    assert [key for key, _, _ in Journal(tmp_path, ballast_bytes=0).records()] == ["a", "b", "c"]
    journal.close()
