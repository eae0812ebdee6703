"""Room in a staging area: limits, full disks, who goes first and who waits."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress

import pytest

from datacache.core.errors import StagingFullError
from datacache.writeback.staging.files import StagedFiles
from tests.promises import promise
from tests.writeback.test_files import fill, kept

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def files(tmp_path):
    """With a limit of 1 MiB."""
    return StagedFiles(tmp_path, limit_bytes=MIB)


def waiting(files, n_bytes, **options):
    """A thread that waits for room: `.join()`, then `.outcome`."""

    def wait():
        try:
            files.wait_for_room(n_bytes, 60, **options)
            thread.outcome = "room"
        except StagingFullError as exc:
            thread.outcome = str(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def fill_disk(files):
    """Write until the file system refuses: the file."""
    number = files.create()
    fd = files.open(number)
    try:
        with suppress(OSError):
            while True:
                files.grow(number, os.write(fd, b"x" * 64 * KIB))
    finally:
        os.close(fd)
    return number


def test_pressure_is_the_share_of_the_limit(files):
    assert files.capacity_bytes == MIB
    fill(files, b"x" * 512 * KIB)
    assert files.pressure() == 0.5
    files.set_journal_bytes(MIB)
    assert files.pressure() == 1.0


def test_files_of_an_earlier_run_count(tmp_path, files):
    number = fill(files, b"x" * 512 * KIB)
    again = StagedFiles(tmp_path, limit_bytes=MIB)
    again.purge({number})
    assert again.pressure() == 0.5


@promise("Dirty data is never thrown away for room")
def test_copies_go_from_the_high_watermark_down_to_the_low_one_the_one_used_longest_ago_first(files):
    for key in "abcdefg":
        kept(files, key, b"x" * 100 * KIB)
    assert files.clean("a", "e1") is not None  # used just now
    assert files.make_room(50 * KIB)
    assert files.clean_bytes == 700 * KIB
    assert files.make_room(200 * KIB)
    assert [key for key in "abcdefg" if files.clean(key, "e1") is not None] == ["a", "d", "e", "f", "g"]
    assert files.used_bytes == 500 * KIB


@promise("Dirty data is never thrown away for room")
def test_a_referenced_file_never_goes(files):
    numbers = [fill(files, b"x" * 256 * KIB) for _ in range(4)]
    assert not files.make_room(1)
    with pytest.raises(StagingFullError) as caught:
        files.wait_for_room(1, 0)
    assert caught.value.errno == errno.ENOSPC
    assert "DATACACHE_STAGING_BYTES" in caught.value.hint
    assert str(files.path(0).parent.parent.parent) in str(caught.value)
    assert all(number in files and files.path(number).exists() for number in numbers)


@promise("With full staging a writer waits, then gets ENOSPC")
def test_what_can_never_fit_is_refused_at_once(files):
    with pytest.raises(StagingFullError):
        files.wait_for_room(MIB + 1, 10**9)
    fill(files, b"x" * 512 * KIB)
    files.set_journal_bytes(32 * KIB)
    with pytest.raises(StagingFullError, match="does not fit"):
        files.wait_for_room(MIB // 2, 10**9, own_bytes=512 * KIB)


@promise("With full staging a writer waits, then gets ENOSPC")
def test_a_file_that_fits_when_others_and_the_small_ones_in_the_journal_are_uploaded_waits_for_them(files):
    number = fill(files, b"x" * 512 * KIB)
    files.set_journal_bytes(512 * KIB)
    thread = waiting(files, 512 * KIB, own_bytes=256 * KIB)
    files.remove(number)
    files.set_journal_bytes(0)
    thread.join()
    assert thread.outcome == "room"


def test_who_waits_goes_on_when_a_file_is_removed(files):
    number = fill(files, b"x" * MIB)
    thread = waiting(files, 4 * KIB)
    files.remove(number)
    thread.join()
    assert thread.outcome == "room"


def test_who_waits_goes_on_when_a_file_becomes_a_clean_copy(files):
    number = fill(files, b"x" * MIB)
    thread = waiting(files, 4 * KIB)
    files.keep("a", "e1", number, MIB)
    thread.join()
    assert thread.outcome == "room"
    assert files.clean("a", "e1") is None


def test_who_waits_goes_on_when_the_journal_has_shrunk(files):
    files.set_journal_bytes(2 * MIB)
    threads = [waiting(files, 4 * KIB) for _ in range(4)]
    files.set_journal_bytes(0)
    for thread in threads:
        thread.join()
    assert {thread.outcome for thread in threads} == {"room"}


def test_without_a_limit_the_file_system_is_one_and_others_files_do_not_count(disk):
    folder = disk("size=8m")
    (folder / "others").write_bytes(b"x" * 4 * MIB)
    data = folder / "data"
    data.mkdir()
    files = StagedFiles(data, limit_bytes=0)
    assert 3.5 * MIB < files.capacity_bytes < 4 * MIB
    assert files.pressure() == 0.0
    fill(files, b"x" * MIB)
    assert 0.2 < files.pressure() < 0.3


def test_a_file_system_smaller_than_the_limit_is_the_limit(disk):
    files = StagedFiles(disk("size=4m"), limit_bytes=10 * MIB)
    assert files.capacity_bytes < 4 * MIB
    fill(files, b"x" * 3 * MIB)
    with pytest.raises(StagingFullError) as caught:
        files.wait_for_room(2 * MIB, 0)
    assert "free some room on its file system" in caught.value.hint


def test_what_others_free_on_the_file_system_is_noticed(disk):
    folder = disk("size=4m")
    others = folder / "others"
    files = StagedFiles(folder, limit_bytes=0)
    others.write_bytes(b"x" * 4 * MIB)
    thread = waiting(files, MIB)
    others.unlink()
    thread.join()
    assert thread.outcome == "room"


def test_on_a_full_disk_copies_go_first_and_then_writing_goes_on(disk):
    files = StagedFiles(disk("size=4m"), limit_bytes=0)
    copy = kept(files, "a", b"x" * MIB)
    dirty = fill_disk(files)
    files.wait_for_room(64 * KIB, 0, refused=True)
    assert (copy in files, dirty in files) == (False, True)
    fill(files, b"x" * 64 * KIB)


@promise("With full staging a writer waits, then gets ENOSPC")
def test_on_a_full_disk_without_copies_the_writer_waits_for_an_upload_to_end(disk):
    files = StagedFiles(disk("size=4m"), limit_bytes=0)
    dirty = fill_disk(files)
    with pytest.raises(StagingFullError):
        files.wait_for_room(64 * KIB, 0, refused=True)
    thread = waiting(files, 64 * KIB, refused=True)
    files.keep("a", "e1", dirty, files.path(dirty).stat().st_size)
    thread.join()
    assert thread.outcome == "room"
    files.wait_for_room(64 * KIB, 60)
    fill(files, b"x" * 64 * KIB)


@promise("With full staging a writer waits, then gets ENOSPC")
def test_what_the_disk_could_never_hold_is_refused_at_once_and_costs_no_copy(disk):
    files = StagedFiles(disk("size=4m"), limit_bytes=0)
    copy = fill(files, b"x" * 64 * KIB)
    files.keep("a", "e1", copy, 64 * KIB)
    assert not files.make_room(5 * MIB)
    with pytest.raises(StagingFullError, match="in all"):
        files.wait_for_room(5 * MIB, 10**9)
    assert copy in files


def test_a_file_system_without_room_for_another_file_is_full(disk):
    files = StagedFiles(disk("size=4m,nr_inodes=8"), limit_bytes=0)
    number = files.create()
    with pytest.raises(StagingFullError) as caught:
        [files.create() for _ in range(8)]
    assert caught.value.errno == errno.ENOSPC
    files.remove(number)
    assert files.create() > number
