"""The journal on disks that are full, or fail: small file systems that are mounted for it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from datacache.core.errors import StagingError, StagingFullError
from datacache.writeback.journal.journal import Change, Journal
from tests.promises import promise


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *arguments, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def sparse_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a small tmpfs and a larger ext2 image in it: when the tmpfs is full, the image's writing back fails."""
    with mounted(tmp_path / "below", "-t", "tmpfs", "-o", "size=8m", "tmpfs") as below:
        image = below / "disk.img"
        with image.open("wb") as file:
            file.truncate(64 << 20)
        subprocess.run(["mkfs.ext2", "-q", "-b", "4096", "-N", "64", "-m", "0", image], check=True)
        yield below, image


def fill(path: Path, leave: int = 0) -> None:
    """A file that takes all the room but for some bytes."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                os.write(file.fileno(), bytes(4096))
        except OSError:
            os.ftruncate(file.fileno(), max(0, file.tell() - leave))
            os.fsync(file.fileno())


def keys(journal: Journal) -> list[str]:
    return [key for key, _, _ in journal.records()]


def test_on_a_full_disk_nothing_is_lost_and_everything_is_durable_in_order_once_there_is_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m", "tmpfs") as disk:
        journal = Journal(disk / "journal", segment_bytes=32 << 10, ballast_bytes=64 << 10)
        fill(disk / "filler", leave=100 << 10)
        sent = []
        refused = ""
        while not refused:
            sent.append(str(len(sent)))
            ticket = journal.append([Change(sent[-1], b"h", bytes(4096))])
            try:
                journal.commit(ticket)
            except StagingFullError as error:
                refused = f"{error} ({error.hint})"
        assert "No space left" in refused
        assert "make room" in refused
        for number in range(1000, 1005):
            sent.append(str(number))
            ticket = journal.append([Change(sent[-1], b"h", b"later")])
        with pytest.raises(StagingFullError):
            journal.commit(ticket)
        assert keys(journal) == sent
        assert journal.read("1004") == b"later"
        assert (disk / "journal" / "ballast").stat().st_size == 64 << 10, "only drops are worth it"
        (disk / "filler").unlink()
        journal.commit(ticket)
        journal.close()
        journal = Journal(disk / "journal")
        assert keys(journal) == sent
        journal.close()


@promise("On a full disk the next server starts, uploads what is there, and records that it did")
def test_on_a_full_disk_drops_are_durable_with_the_ballast_given_up_which_comes_back(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m", "tmpfs") as disk:
        folder = disk / "journal"
        journal = Journal(folder, segment_bytes=32 << 10, ballast_bytes=64 << 10)
        for number in range(50):
            journal.append([Change(str(number), b"h", bytes(4096))])
        journal.commit()
        fill(disk / "filler")
        with pytest.raises(StagingFullError):
            journal.commit(journal.append([Change("more", b"h", bytes(8192))]))
        for number in range(40):
            journal.commit(journal.append([Change(str(number), None)]))
        assert not (folder / "ballast").exists()
        assert len(list(folder.glob("*.log"))) < 4, "segments that nothing lives in are room"
        (disk / "filler").unlink()
        journal.close()
        journal = Journal(folder, segment_bytes=32 << 10, ballast_bytes=64 << 10)
        assert keys(journal) == [*map(str, range(40, 50)), "more"]
        assert (folder / "ballast").stat().st_size == 64 << 10
        journal.close()


def test_the_ballast_is_there_only_while_something_may_have_to_be_dropped(tmp_path: Path) -> None:
    ballast = tmp_path / "journal" / "ballast"
    for changes, left in (([Change("a", b"h")], True), ([Change("a", None)], False)):
        journal = Journal(tmp_path / "journal", ballast_bytes=64 << 10)
        assert ballast.exists()
        journal.append(changes)
        journal.close()
        assert ballast.exists() == left


def test_the_ballast_is_a_small_part_of_a_small_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=16m", "tmpfs") as disk:
        ballast = disk / "journal" / "ballast"
        journal = Journal(disk / "journal")
        assert 2**19 < ballast.stat().st_size <= 2**20
        journal.commit(journal.append([Change("a", b"h")]))
        journal.close()
        ballast.unlink()
        fill(disk / "filler", leave=2**22)
        journal = Journal(disk / "journal")
        assert not ballast.exists(), "what is left is for files"
        journal.close()


def test_the_ballast_grows_when_there_is_room_again(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=64m", "tmpfs") as disk:
        ballast = disk / "journal" / "ballast"
        fill(disk / "filler", leave=2**24)
        journal = Journal(disk / "journal")
        journal.commit(journal.append([Change("a", b"h")]))
        small = ballast.stat().st_size
        assert 2**19 < small <= 2**20
        journal.close()
        (disk / "filler").unlink()
        journal = Journal(disk / "journal")
        assert 3 * small < ballast.stat().st_size <= 2**22
        journal.close()


def test_a_full_disk_is_no_reason_not_to_start(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m", "tmpfs") as disk:
        journal = Journal(disk / "journal", ballast_bytes=64 << 10)
        journal.commit(journal.append([Change("a", b"h"), Change("b", b"h")]))
        journal.close()
        fill(disk / "filler")
        journal = Journal(disk / "journal", ballast_bytes=64 << 10)
        with pytest.raises(StagingFullError):
            journal.commit(journal.append([Change("c", b"h")]))
        journal.commit(journal.append([Change("a", None)]))
        journal.close()
        journal = Journal(disk / "journal", ballast_bytes=64 << 10)
        assert keys(journal) == ["b", "c"]
        journal.close()


def test_too_much_waiting_for_a_full_disk_is_refused_but_for_drops(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as disk:
        journal = Journal(disk / "journal", ballast_bytes=0)
        with pytest.raises(StagingFullError):
            journal.commit(journal.append([Change("large", b"h", bytes(33 << 20))]))
        with pytest.raises(StagingFullError):
            journal.append([Change("more", b"h")])
        journal.append([Change("large", None)])
        assert keys(journal) == []
        with pytest.raises(StagingFullError):
            journal.close()


@promise("After a failed sync, its data is written anew before anything is acknowledged")
def test_frames_whose_fsync_failed_are_written_anew_to_another_segment(tmp_path: Path) -> None:
    with sparse_disk(tmp_path) as (below, image):
        with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:
            journal = Journal(disk / "journal", ballast_bytes=0)
            journal.commit(journal.append([Change("first", b"h", b"1" * 9000)]))
            os.sync()
            fill(below / "filler")
            ticket = journal.append([Change("second", b"h", os.urandom(3 << 20))])
            with pytest.raises(StagingError):
                journal.commit(ticket)
            second = journal.read("second")
            (below / "filler").unlink()
            journal.append([Change("third", b"h", b"3")])
            journal.commit()
            assert (disk / "journal" / "00000002.log").exists()
            journal.close()
        with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:  # nothing in the page cache now
            journal = Journal(disk / "journal", ballast_bytes=0)
            assert keys(journal) == ["first", "second", "third"]
            assert journal.read("second") == second
            assert journal.read("first") == b"1" * 9000
            journal.close()


_FAILED = """
import os, sys
from pathlib import Path
from datacache.core.errors import StagingError
from datacache.writeback.journal.journal import Change, Journal
journal = Journal(Path(sys.argv[1]), ballast_bytes=0)
journal.commit(journal.append([Change("first", b"h", b"1" * 9000)]))
os.sync()
filler = Path(sys.argv[2]).open("wb", buffering=0)
try:
    while True:
        filler.write(bytes(4096))
except OSError:
    pass
try:
    journal.commit(journal.append([Change("second", b"h", b"2" * (3 << 20))]))
except StagingError:
    os.kill(os.getpid(), 9)
"""


@promise("After a failed sync, its data is written anew before anything is acknowledged")
def test_frames_whose_fsync_failed_before_a_kill_are_on_the_disk_after_the_next_start(tmp_path: Path) -> None:
    """The page cache may hold them whole, and takes them for written."""
    with sparse_disk(tmp_path) as (below, image):
        with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:
            command = [sys.executable, "-c", _FAILED, disk / "journal", below / "filler"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == -9, done.stderr
            (below / "filler").unlink()
            journal = Journal(disk / "journal", ballast_bytes=0)
            found = keys(journal)
            journal.close()
        with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:  # nothing in the page cache now
            journal = Journal(disk / "journal", ballast_bytes=0)
            left = {key: journal.read(key) for key in keys(journal)}
            journal.close()
        assert found == ["first", "second"]
        assert left == {"first": b"1" * 9000, "second": b"2" * (3 << 20)}


_KILLED = """
import os, sys
from pathlib import Path
from datacache.writeback.journal.journal import Change, Journal
journal = Journal(Path(sys.argv[1]), segment_bytes=4096, ballast_bytes=0)
journal.commit(journal.append([Change("a", b"h", b"1" * 4096)]))
ticket = journal.append([Change("b", b"h", bytes(3 << 19))])
# Too much to be written along with "b", and then too much for the disk.
journal.append([Change("a", None), Change("c", b"h", bytes(3 << 19))])
journal.commit(ticket)
os.kill(os.getpid(), 9)
"""


def test_a_segment_stays_needed_until_the_drops_of_its_records_are_durable(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m", "tmpfs") as disk:
        done = subprocess.run([sys.executable, "-c", _KILLED, disk], capture_output=True, text=True, check=False)
        assert done.returncode == -9, done.stderr
        assert "00000003.log" in os.listdir(disk), "a segment was begun, and then there was no room"
        journal = Journal(disk, ballast_bytes=0)
        assert keys(journal) == ["a", "b"]
        assert journal.read("a") == b"1" * 4096
        journal.close()


_LIMITED = """
import resource, sys
from pathlib import Path
from datacache.core.errors import StagingError
from datacache.writeback.journal.journal import Change, Journal
journal = Journal(Path(sys.argv[1]), ballast_bytes=0)
journal.commit(journal.append([Change("a", b"h", b"1" * 5000)]))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))
ticket = journal.append([Change("b", b"h", b"2" * 5000), Change("a", None)])
for _ in range(3):
    try:
        journal.commit(ticket)
    except StagingError as error:
        print(error.errno)
    journal.append([Change("c", b"h", b"3" * 5000)])
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
journal.commit()
"""


def test_a_write_that_is_cut_short_is_an_error_and_is_made_whole_later(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _LIMITED, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == str(errno.EFBIG)
    journal = Journal(tmp_path, ballast_bytes=0)
    assert [(key, size) for key, _, size in journal.records()] == [("b", 5000), ("c", 5000)]
    journal.close()
