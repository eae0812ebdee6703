"""Counters: what is added up and folded, and that no read dies of a full disk."""

from __future__ import annotations

import array
import errno
import os

from datacache.core import counters


def test_on_a_full_disk_counters_are_private_and_nothing_is_folded(tmp_path, monkeypatch):
    (tmp_path / "999999999").write_bytes(bytes(8 * len(counters.NAMES)))  # of a dead process

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    mine = counters.Counters(tmp_path)
    mine.miss(10)
    counters.fold(tmp_path)
    assert (tmp_path / "999999999").exists()
    assert counters.totals(tmp_path)["misses"] == 0


def test_a_counters_file_has_no_holes(tmp_path):
    counters.Counters(tmp_path).miss(10)
    assert (tmp_path / str(os.getpid())).stat().st_blocks > 0
    assert counters.totals(tmp_path)["misses"] == 1


def test_steps_of_trainings_are_counted_behind_the_reads(tmp_path):
    mine = counters.Counters(tmp_path)
    mine.step(64, 1000, 5, 7)
    mine.step(32, 500, 1, 2)
    sums = counters.totals(tmp_path)
    assert [sums[name] for name in counters.LOADER] == [2, 96, 1500, 6, 9]
    assert not any(sums[name] for name in counters.NAMES if name not in counters.LOADER)


def test_files_of_processes_that_knew_fewer_counters_are_added_up_and_folded(tmp_path):
    older = array.array("Q", range(1, counters.LOADER_STEPS + 1)).tobytes()
    (tmp_path / "past").write_bytes(older)
    (tmp_path / "999999999").write_bytes(older)
    (tmp_path / "999999998").write_bytes(older + bytes(8 * 100))  # of one that knows more
    before = counters.totals(tmp_path)
    counters.fold(tmp_path)
    assert before == counters.totals(tmp_path)
    assert before["misses"] == 2 * 5
    assert [path.name for path in tmp_path.iterdir()] == ["past"]
