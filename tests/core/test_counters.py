"""Counters: what is added up and folded, and that no read dies of a full disk."""

from __future__ import annotations

import array
import errno
import os
import subprocess
import sys
import time

import pytest

from datacache.core import counters
from tests.promises import promise


def no_more(folder):
    """The folder is there."""


def test_on_a_full_disk_counters_are_private_and_nothing_is_folded(tmp_path, monkeypatch):
    (tmp_path / "999999999").write_bytes(bytes(8 * len(counters.NAMES)))  # of a dead process

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    mine = counters.Counters(tmp_path, no_more)
    mine.miss(10)
    counters.fold(tmp_path)
    assert (tmp_path / "999999999").exists()
    assert counters.totals(tmp_path)["misses"] == 0


def test_a_counters_file_has_no_holes(tmp_path):
    counters.Counters(tmp_path, no_more).miss(10)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_blocks > 0
    assert counters.totals(tmp_path)["misses"] == 1


def test_steps_of_trainings_are_counted_behind_the_reads(tmp_path):
    mine = counters.Counters(tmp_path, no_more)
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


COUNT = """
import sys, time
from pathlib import Path
from datacache.core import counters
counters.Counters(Path(sys.argv[1]), lambda folder: None).miss(10)
print("counted", flush=True)
time.sleep(60)
"""


@promise("Counts of processes are told apart and kept")
def test_files_of_processes_in_other_pid_namespaces_are_told_apart_and_folded_when_they_end(tmp_path):
    wrapped = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*wrapped, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make PID namespaces")
    command = [*wrapped, sys.executable, "-c", COUNT, tmp_path]  # in both of them it is process 1
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "counted\n"
        assert counters.totals(tmp_path)["misses"] == 2
        counters.fold(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        for process in processes:
            process.kill()
            process.wait()
    deadline = time.monotonic() + 30
    while [path.name for path in tmp_path.iterdir()] != ["past"] and time.monotonic() < deadline:
        counters.fold(tmp_path)  # the namespace ends a moment after its process
    assert [path.name for path in tmp_path.iterdir()] == ["past"]
    assert counters.totals(tmp_path)["misses"] == 2


def test_what_concerns_a_data_set_is_told_apart_and_counts_for_all(tmp_path):
    counters.Counters(tmp_path, no_more).miss(1)
    for name in ("team/mask", "..", "a b%", "x" * 500):
        folder = counters.folder_of_dataset(tmp_path, name)
        assert folder in (tmp_path, tmp_path / folder.name)
        folder.mkdir(exist_ok=True)
        counters.Counters(folder, no_more).hit(1, 10)
        (folder / "999999999").write_bytes((5).to_bytes(8, "little") + bytes(8 * len(counters.NAMES) - 8))
    sums = counters.totals(tmp_path)
    assert (sums["misses"], sums["ssd_hits"], sums["ram_hits"]) == (1, 4, 20)
    of_each = counters.totals_by_dataset(tmp_path)
    assert {name: of["ssd_hits"] for name, of in of_each.items()} == {"team/mask": 1, "..": 1, "a b%": 1}
    counters.fold(tmp_path)
    assert not list(tmp_path.rglob("999999999"))
    assert counters.totals(tmp_path) == sums
    assert counters.totals_by_dataset(tmp_path) == of_each
