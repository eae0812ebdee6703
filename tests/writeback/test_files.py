"""Data files of a staging area: numbers, names, clean copies."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from datacache.core.errors import StagingError
from datacache.writeback.staging import files as files_module
from datacache.writeback.staging.files import StagedFiles
from tests.promises import promise


@pytest.fixture
def files(tmp_path):
    return StagedFiles(tmp_path, limit_bytes=0)


def fill(files, data, number=None):
    """A durable file with these bytes."""
    number = files.create() if number is None else number
    fd = files.open(number)
    try:
        os.write(fd, data)
        files.grow(number, len(data))
        files.sync(fd, number)
    finally:
        os.close(fd)
    return number


def kept(files, key, data=b"x" * 8192, etag="e1"):
    """A clean copy."""
    number = fill(files, data)
    files.keep(key, etag, number, len(data))
    return number


def on_disk(folder):
    return sum(len(names) for _, _, names in os.walk(folder))


def read(fd):
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def test_what_was_written_is_read_after_a_restart(tmp_path, files):
    number = fill(files, b"hello")
    again = StagedFiles(tmp_path, limit_bytes=0)
    assert again.purge({number}) == 0
    assert read(again.open(number)) == b"hello"
    assert again.used_bytes == os.stat(again.path(number)).st_blocks * 512


@promise("Only its owner reads an area")
def test_files_and_their_folders_are_private(tmp_path, files):
    path = files.path(files.create())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, path.parent.parent)} == {0o700}


def test_numbers_are_never_used_twice(tmp_path, files):
    numbers = [files.create() for _ in range(3)]
    for number in numbers:
        files.remove(number)
    for _ in range(3):
        files = StagedFiles(tmp_path, limit_bytes=0)
        files.purge(set())
        numbers.append(files.create())
        files.remove(numbers[-1])
    assert numbers == sorted(set(numbers))


def test_numbers_begin_above_those_that_records_refer_to(tmp_path):
    files = StagedFiles(tmp_path, limit_bytes=0)
    files.purge({70_000})
    assert files.create() > 70_000


def test_a_file_that_is_there_already_is_left_alone(tmp_path, files):
    first = files.create()
    other = StagedFiles(tmp_path, limit_bytes=0)  # a former owner goes on beside the new one
    theirs = fill(other, b"theirs")
    ours = [files.create() for _ in range(theirs - first + 1)]
    assert theirs not in ours
    assert read(files.open(theirs)) == b"theirs"


def test_no_folder_gets_large_and_empty_ones_go(tmp_path, files):
    numbers = [files.create() for _ in range(1500)]
    assert max(len(names) for _, _, names in os.walk(tmp_path)) == 256
    for number in numbers:
        files.remove(number)
    assert sum(len(folders) for _, folders, _ in os.walk(tmp_path)) == 2  # that of the newest files


def test_threads_make_and_remove_files_at_once(tmp_path, files):
    def work(_):
        mine = [files.create() for _ in range(150)]
        for number in mine[1:]:
            files.sync_name(number)
            files.remove(number)
        return mine

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(16)))
    assert len({number for mine in found for number in mine}) == 16 * 150
    assert all(mine[0] in files and files.path(mine[0]).exists() for mine in found)
    assert on_disk(tmp_path) == 16


def test_purge_deletes_what_no_record_refers_to(tmp_path, files):
    number, copy, lost = fill(files, b"dirty"), kept(files, "a"), files.create()
    again = StagedFiles(tmp_path, limit_bytes=0)
    assert again.purge({number}) == 2
    assert (number in again, copy in again, lost in again) == (True, False, False)
    assert again.clean("a", "e1") is None
    assert on_disk(tmp_path) == 1


def test_a_durable_file_has_durable_folders_above_it(tmp_path, files, monkeypatch):
    synced = []
    monkeypatch.setattr(files_module, "sync_folder", synced.append)
    first = files.path(fill(files, b"x"))
    assert set(synced) == {first.parent, first.parent.parent, tmp_path}
    synced.clear()
    fill(files, b"y")  # a neighbour: its folders are durable by now
    assert synced == [first.parent]


def test_what_does_not_belong_there_is_left_alone(tmp_path, files):
    fill(files, b"x")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lost+found" / "x").write_text("")
    again = StagedFiles(tmp_path, limit_bytes=0)
    again.purge(set())
    assert on_disk(tmp_path) == 1


def test_a_missing_file_is_an_error_that_names_it(files):
    number = files.create()
    files.path(number).unlink()
    with pytest.raises(StagingError, match=str(files.path(number))):
        files.open(number)
    files.remove(number)
    files.remove(number)
    assert files.used_bytes == 0


def test_a_folder_that_cannot_be_written_to_is_a_staging_error(tmp_path):
    files = StagedFiles(tmp_path, limit_bytes=0)
    (tmp_path / "000000").write_text("in the way")
    with pytest.raises(StagingError, match="Not a directory"):
        files.create()
    with pytest.raises(StagingError, match="No such file"):
        StagedFiles(tmp_path / "none", limit_bytes=0)


def test_the_bytes_in_use_follow_what_is_written_and_removed(files):
    number = files.create()
    files.grow(number, 100_000)
    assert files.used_bytes == 100_000
    files.grow(number, -40_000)
    other = fill(files, b"x" * 50_000)
    files.set_journal_bytes(1000)
    assert files.used_bytes == 61_000 + os.stat(files.path(other)).st_blocks * 512
    files.remove(number)
    files.remove(other)
    files.grow(other, 5)  # a write to a file that is gone counts for nothing
    assert files.used_bytes == 1000


def test_bytes_written_over_and_over_do_not_add_up(files):
    number = files.create()
    for _ in range(10):
        fill(files, b"x" * 50_000, number)
    assert files.used_bytes == os.stat(files.path(number)).st_blocks * 512


# --- clean copies ----------------------------------------------------------------------------------------------------


@promise("What was just uploaded is read from its copy here")
def test_a_clean_copy_is_found_by_key_and_etag(files):
    number = kept(files, "a", b"hello")
    assert files.clean("a", "e1") == number
    assert read(files.open_clean("a", "e1")) == b"hello"
    assert files.open_clean("a", "e2") is None
    assert files.open_clean("b", "e1") is None
    assert files.clean_bytes == files.used_bytes > 0


def test_a_clean_copy_stays_readable_when_it_is_dropped(files):
    kept(files, "a", b"hello")
    fd = files.open_clean("a", "e1")
    files.forget("a")
    assert files.open_clean("a", "e1") is None
    assert read(fd) == b"hello"
    assert files.used_bytes == files.clean_bytes == 0


def test_a_newer_copy_replaces_an_older_one(tmp_path, files):
    kept(files, "a", b"old")
    number = kept(files, "a", b"new", etag="e2")
    files.keep("a", "e2", number, 3)
    assert read(files.open_clean("a", "e2")) == b"new"
    assert on_disk(tmp_path) == 1


def test_what_is_no_copy_of_the_object_is_not_kept(tmp_path, files):
    for etag, size in (("", 5), ("e1", 6)):
        number = fill(files, b"hello")
        files.keep("a", etag, number, size)
        assert files.clean("a", etag) is None
    assert on_disk(tmp_path) == 0


def test_a_renamed_key_keeps_its_copy(tmp_path, files):
    number = kept(files, "a", b"hello")
    kept(files, "b", b"gone")
    files.rename("a", "b")
    assert (files.clean("a", "e1"), files.clean("b", "e1")) == (None, number)
    files.rename("b", "c", "e2")
    assert files.clean("c", "e2") == number
    files.rename("nothing", "c")
    assert on_disk(tmp_path) == 0


def test_a_taken_copy_is_the_takers_and_no_copy_any_more(files):
    number = kept(files, "a")
    assert files.take("a", "e2") is None
    assert files.take("a", "e1") == number
    assert files.take("a", "e1") is None
    assert (files.clean_bytes, number in files) == (0, True)


def test_there_are_no_more_copies_than_memory_is_meant_for(tmp_path, files, monkeypatch):
    monkeypatch.setattr(files_module, "MAX_CLEAN_COPIES", 3)
    for key in "abcd":
        kept(files, key)
    assert [key for key in "abcd" if files.clean(key, "e1") is not None] == ["b", "c", "d"]
    assert on_disk(tmp_path) == 3


def test_copies_are_read_while_others_drop_them(files):
    stop = threading.Event()

    def drop():
        while not stop.is_set():
            files.forget("a")

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        for _ in range(100):
            kept(files, "a", b"hello")
            fd = files.open_clean("a", "e1")
            assert fd is None or read(fd) == b"hello"
    finally:
        stop.set()
        thread.join()
